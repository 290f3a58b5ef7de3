"""The closed list of what a block is given: inputs, weights, constants. Naming anything else fails at import."""

from __future__ import annotations

from dataclasses import replace

from probe.card import Leaf, split_shape


def _input(name: str, symbol: str, shape: str, doc: str, *also: str, hook: bool = False) -> Leaf:
    return Leaf(name, "input", symbol, split_shape(shape), doc, also, hook=hook)


def _weight(name: str, symbol: str, shape: str, part: str, doc: str, *also: str) -> Leaf:
    return Leaf(name, "weight", symbol, split_shape(shape), doc, also, part=part)


def _constant(name: str, symbol: str, doc: str) -> Leaf:
    return Leaf(name, "constant", symbol, (), doc)


_ALL = (
    _input("tokens", r"\mathrm{ids}", "B T", "Token ids."),
    _input("x_n", "x_n", "B T d", "The residual stream into the block.", "hook_resid_pre", hook=True),
    _input("x_L", "x_L", "B T d", "The residual stream after the last block: its x_next."),
    _input("R", "R", "T r", "Cosines and sines of the positions, [T, r/2] each, or [B, T, r/2], one a row."),
    _input(
        "M",
        "M",
        "T S",
        "Additive mask, 0 where a query may look, the dtype's least number elsewhere; or [B 1 T S], one a row.",
    ),
    _weight("W_E", "W_E", "V d", "Embedding", "One row a token.", "embed_tokens.weight"),
    _weight("w_attn", r"w_{\mathrm{attn}}", "d", "Attention RMSNorm", "Gain.", "input_layernorm.weight"),
    _weight(
        "W_DQ",
        "W_{DQ}",
        "d r_q",
        "Multi-head latent attention",
        "Down to the query latent.",
        "self_attn.q_a_proj.weight",
    ),
    _weight(
        "w_Q",
        "w_Q",
        "r_q",
        "Multi-head latent attention",
        "Gain of the query latent.",
        "self_attn.q_a_layernorm.weight",
    ),
    _weight(
        "W_UQ",
        "W_{UQ}",
        "r_q (h n)",
        "Multi-head latent attention",
        "Up to the queries' content part. Reads x_attn in a model without a query latent.",
    ),
    _weight(
        "W_QR",
        "W_{QR}",
        "r_q (h r)",
        "Multi-head latent attention",
        "Up to the queries' rotary part. Reads x_attn in a model without a query latent.",
    ),
    _weight("W_DKV", "W_{DKV}", "d r_kv", "Multi-head latent attention", "Down to the key-value latent."),
    _weight("W_KR", "W_{KR}", "d r", "Multi-head latent attention", "To the one rotary key that all heads share."),
    _weight(
        "w_KV",
        "w_{KV}",
        "r_kv",
        "Multi-head latent attention",
        "Gain of the key-value latent.",
        "self_attn.kv_a_layernorm.weight",
    ),
    _weight("W_UK", "W_{UK}", "r_kv (h n)", "Multi-head latent attention", "Up to the keys' content part."),
    _weight("W_UV", "W_{UV}", "r_kv (h v)", "Multi-head latent attention", "Up to the values."),
    _weight(
        "W_O",
        "W_O",
        "(h v) d",
        "Multi-head latent attention",
        "Heads back to the residual stream.",
        "self_attn.o_proj.weight",
    ),
    _weight("w_ffn", r"w_{\mathrm{ffn}}", "d", "MLP RMSNorm", "Gain.", "post_attention_layernorm.weight"),
    _weight("W_1", "W_1", "d f", "SwiGLU MLP", "Gate.", "mlp.gate_proj.weight"),
    _weight("W_3", "W_3", "d f", "SwiGLU MLP", "Up.", "mlp.up_proj.weight"),
    _weight("W_2", "W_2", "f d", "SwiGLU MLP", "Down.", "mlp.down_proj.weight"),
    _weight("W_g", "W_g", "d e", "Router", "Router; fp32 under every cast.", "mlp.gate.weight"),
    _weight(
        "b",
        "b",
        "e",
        "Router",
        "Correction bias, used only to choose; fp32 under every cast.",
        "mlp.gate.e_score_correction_bias",
    ),
    _weight("W_1_e", "W_{1,e}", "e d m", "Routed experts", "Gate of each expert.", "mlp.experts.gate_proj.weight"),
    _weight("W_3_e", "W_{3,e}", "e d m", "Routed experts", "Up, of each expert.", "mlp.experts.up_proj.weight"),
    _weight("W_2_e", "W_{2,e}", "e m d", "Routed experts", "Down, of each expert.", "mlp.experts.down_proj.weight"),
    _weight("W_1_s", "W_{1,s}", "d m_s", "Shared expert", "Gate.", "mlp.shared_experts.gate_proj.weight"),
    _weight("W_3_s", "W_{3,s}", "d m_s", "Shared expert", "Up.", "mlp.shared_experts.up_proj.weight"),
    _weight("W_2_s", "W_{2,s}", "m_s d", "Shared expert", "Down.", "mlp.shared_experts.down_proj.weight"),
    _weight("w_final", r"w_{\mathrm{final}}", "d", "Final RMSNorm", "Gain.", "norm.weight"),
    _weight(
        "W_U",
        "W_U",
        "d V",
        "Head",
        "To the vocabulary; the embedding transposed where the two are tied.",
        "lm_head.weight",
    ),
    _constant("tau", r"\tau", "Softmax scale: q^-1/2, with YaRN's mscale squared."),
    _constant("eps", r"\epsilon", "Of the block's norms and the final norm."),
    _constant("eps_latent", r"\epsilon_{\mathrm{latent}}", "Of the two latent norms: always 1e-6."),
    _constant("scaling", r"\mathrm{scaling}", "What the gates of a token sum to, when normalised."),
    _constant("norm_topk", r"\mathrm{norm}", "Whether gates are normalised over the chosen experts."),
    _constant("n_group", r"\mathrm{groups}", "Groups of experts."),
    _constant("topk_group", r"\mathrm{top\ groups}", "Groups that a token may choose from."),
    _constant("dt", r"\mathrm{dt}", "The activation dtype, for the one sum that is cast back to it."),
)

LEAVES: dict[str, Leaf] = {leaf.name: leaf for leaf in _ALL}
"""Every leaf by name."""

DIRECT: dict[str, Leaf] = {
    name: replace(leaf, shape=tuple("d" if axis == "r_q" else axis for axis in leaf.shape))
    for name, leaf in LEAVES.items()
}
"""The same in a model without a query latent: what reads it reads x_attn."""

FP32 = frozenset({"W_g", "b"})
"""Weights that stay fp32 under every cast: rounding them changes the choice of experts."""
