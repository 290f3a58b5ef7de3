"""The oracle: transformers' DeepseekV3 and its kin, small and seeded, made to show what they compute inside.

Attention is ``eager`` and experts are ``grouped_mm``, which together give the bits of the model's own code. Modules
show their outputs through hooks; what no module returns (scores, norms' statistics, the experts' inner values) is
seen by a `TorchFunctionMode` that notes the torch calls made inside each module. Nothing in the oracle is replaced.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    SarvamMLAConfig,
    YoutuConfig,
    YoutuForCausalLM,
)

from probe import Dims, InMemory, Site
from probe.from_state import from_state

CLASSES: dict[str, tuple[Any, Any]] = {
    "kimi_k2": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "youtu": (YoutuConfig, YoutuForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "sarvam_mla": (SarvamMLAConfig, DeepseekV3ForCausalLM),
    "kimi_k25": (Kimi_K25Config, Kimi_K25ForConditionalGeneration),
}
"""By model type, transformers' own classes for it."""

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Kimi K2's."""

BASE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
"""K2's switches at small widths, no two alike where a swap could hide (v ≠ n + r, r ≠ n, r_q ≠ r_kv)."""


def config(yarn: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`BASE` with changes; ``yarn`` changes single rotary keys (None values leave a key out)."""
    made = {**BASE, **changes}
    if yarn is not None:
        made["rope_scaling"] = {k: v for k, v in {**YARN, **yarn}.items() if v is not None}
    return made


def indexed(kind: str, topk: int, **changes: Any) -> dict[str, Any]:
    """`config` of a model with indexers, whose attention is full up to ``topk`` tokens."""
    return config(model_type=kind, index_topk=topk, index_n_heads=2, index_head_dim=16, **changes)


def sarvam(yarn: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`config` in the keys of sarvam-105b: experts, groups, query latent and YaRN are spelt otherwise, or left out."""
    made = config(yarn, model_type="sarvam_mla", head_dim=36, q_head_dim=20, use_qk_norm=True, **changes)
    made["num_experts"], made["num_shared_experts"] = made.pop("n_routed_experts"), made.pop("n_shared_experts")
    made["rope_scaling"] = {**made["rope_scaling"], "type": "deepseek_yarn"}
    return {k: v for k, v in made.items() if k in changes or k not in ("n_group", "topk_group", "q_lora_rank")}


def seeing(text: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a K2.5 with this text part and little sight."""
    sight = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = text["tie_word_embeddings"]
    whole = {"model_type": "kimi_k25", "projection_hidden_size": 32, "tie_word_embeddings": tied}
    return {**whole, "vision_config": sight, "text_config": {**text, "model_type": "deepseek_v3"}}


def theirs(config: Mapping[str, Any], device: str = "cpu") -> Any:
    """Transformers' model of a config, on their own weights."""
    config = deepcopy(dict(config))  # it writes into what it is given
    kind, model = CLASSES[config.pop("model_type")]
    read = kind(**config)
    text = read.get_text_config()
    text._attn_implementation = "eager"
    if kind is not YoutuConfig:  # which has no experts
        text._experts_implementation = "grouped_mm"
    with torch.device(device):
        return model(read).eval().requires_grad_(False)


class Call(NamedTuple):
    """A torch call made inside a module."""

    name: str
    args: tuple[Any, ...]
    out: Any


class _Watch(TorchFunctionMode):
    """Notes every torch call by the innermost module that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.inside:
            self.calls[self.inside[-1]].append(Call(func.__name__.lstrip("_"), args, out))
        return out

    def named(self, module: str, name: str) -> list[Call]:
        """The calls of this name, in order."""
        return [call for call in self.calls[module] if call.name == name]


class Oracle:
    """A seeded model from a config.

    Args:
        config: see `config`; our `Dims` read the same.
        bias: what the routers' correction bias is shifted by.
        small: what the weights before the norms are scaled by, so that an eps matters: embedding and the down
            projections.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        bias: float = 0.0,
        small: float = 1.0,
    ) -> None:
        self.config = dict(config)
        self.dims = Dims.from_config(config)
        self.model = theirs(config)
        self.text = getattr(self.model.model, "language_model", self.model.model)
        self._draw(seed, bias, small)
        for name, parameter in self.model.named_parameters():
            # Not model.to(dtype): that would round the rotary frequencies and the correction bias.
            if not name.endswith("mlp.gate.weight"):
                parameter.data = parameter.data.to(dtype)

    def _draw(self, seed: int, bias: float, small: float) -> None:
        """Weights wide enough that softmax, routing, gains and bias do real work; the library's own hide mistakes."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.model.state_dict().items():
            drawn = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                drawn = 0.3 * drawn + bias
            elif tensor.ndim == 1:
                drawn = 1 + 0.2 * drawn
            elif "embed" in name:
                drawn = small * drawn
            else:
                drawn = drawn / tensor.shape[-1] ** 0.5
                if "_a_proj" in name:
                    drawn = small * drawn
            tensor.copy_(drawn)
        self.model.tie_weights()

    def weights(self) -> InMemory:
        """The same weights as ours; most are views, the fused experts among them."""
        return from_state(self.model.state_dict(), self.dims)

    def show(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Shown:
        """Run on tokens ([B T]; ``keep`` true where real; at these position ids, each segment alone, by a mask over
        pairs) and return every value it can be made to show."""
        watch, handles = _Watch(), []
        for full, module in self.model.named_modules():
            name = re.sub(r"^model\.language_model", "model", full)

            def enter(_module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                watch.inputs[name] = args[0] if args else kwargs.get("hidden_states")
                watch.inside.append(name)

            def leave(_module: Any, _args: Any, out: Any, name: str = name) -> None:
                watch.outputs[name] = out
                watch.inside.pop()

            handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            ]
        given: dict[str, Any] = {"use_cache": False}
        if keep is not None:
            given["attention_mask"] = keep.long()
            given["position_ids"] = (keep.long().cumsum(-1) - 1).clamp(min=0)
        seen = visible(tokens, keep, segments)
        if positions is not None:
            given["position_ids"] = positions.masked_fill(~real_of(tokens, keep), 0)
        if positions is not None or segments is not None:  # without a mask, a gap would mean another text to it
            hidden = torch.zeros(seen[:, None].shape).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
            given["attention_mask"] = hidden.to(self.model.dtype)
        try:
            with torch.no_grad(), watch:
                self.model(tokens, **given)
        finally:
            for handle in handles:
                handle.remove()
        return Shown(self, watch, tokens, keep, seen)


class Shown:
    """What one run of the oracle showed.

    Attributes:
        values: site → value, in the card's axis order.
        R: cosines and sines, [T r/2] or [B T r/2].
        M: the additive mask.
        real: [B T], true where a token is real.
        seen: [B T S], true where a real query may look.
    """

    def __init__(self, oracle: Oracle, watch: _Watch, tokens: Tensor, keep: Tensor | None, seen: Tensor) -> None:
        self.dims, self.watch = oracle.dims, watch
        self.batch = tokens.shape
        self.real, self.seen = real_of(tokens, keep), seen
        self.values: dict[Site, Tensor] = {Site(None, "x_0"): watch.outputs["model.embed_tokens"]}
        for i, moe in enumerate(self.dims.moe):
            inside = {**self._attention(i), **(self._moe(i) if moe else self._dense(i))}
            out = watch.outputs[f"model.layers.{i}"]
            inside["x_next"] = out[0] if isinstance(out, tuple) else out  # GLM-5's shows its chosen keys too
            self.values.update({Site(i, name): value for name, value in inside.items()})
        self.values.update({Site(None, name): value for name, value in self._norm("model.norm", "final").items()})
        self.values[Site(None, "logits")] = watch.outputs["lm_head"]
        cos, sin = watch.outputs["model.rotary_emb"]
        half = self.dims.r // 2
        self.R = (cos[..., :half], sin[..., :half])
        self.M = watch.named("model.layers.0.self_attn", "add")[-1].args[1]

    def __getitem__(self, site: tuple[int | None, str]) -> Tensor:
        return self.values[Site(*site)]

    def of(self, block: int | None) -> dict[str, Tensor]:
        """All values of a block, or of the model around."""
        return {site.tensor: value for site, value in self.values.items() if site.block == block}

    @property
    def margin(self) -> float:
        """How far the nearest tie of the routers is, over real tokens: of the groups' choice and the experts'."""
        nearest = [torch.inf]
        for site, score in self.values.items():
            if site.tensor != "choice_score":
                continue
            score = score[self.real]
            d = self.dims
            if d.n_group > 1:
                by_group = score.view(len(score), d.n_group, -1)
                groups = by_group.sort(-1, descending=True).values[..., :2].sum(-1)
                nearest.append(_gap(groups, d.topk_group))
                allowed = torch.zeros_like(groups).scatter(1, groups.topk(d.topk_group).indices, 1).bool()
                score = by_group[allowed].view(len(score), -1)
            nearest.append(_gap(score, d.k))
        return min(nearest)

    def _norm(self, module: str, end: str) -> dict[str, Tensor]:
        """A norm's scale, what the gain multiplies, and its output."""
        names = {"Q": "c_Q_hat", "KV": "c_KV_hat"}
        return {
            f"s_{end}": self.watch.named(module, "rsqrt")[0].out,
            f"n_{end}": self.watch.named(module, "mul")[-1].args[1],
            names.get(end, f"x_{end}"): self.watch.outputs[module],
        }

    def _attention(self, i: int) -> dict[str, Tensor]:
        d, out = self.dims, self.watch.outputs
        layer, module = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        B, T = self.batch
        made = {"x_n": self.watch.inputs[layer], **self._norm(f"{layer}.input_layernorm", "attn")}
        if d.r_q is None:
            queries = out[f"{module}.q_proj"]
        else:
            made["c_Q"] = out[f"{module}.q_a_proj"]
            made |= self._norm(f"{module}.q_a_layernorm", "Q")
            queries = out[f"{module}.q_b_proj"]
        made["Q_C"], made["Q_pe"] = queries.view(B, T, d.h, -1).split([d.n, d.r], dim=-1)
        made["q_C"], made["q_pe"] = made["Q_C"].flatten(2), made["Q_pe"].flatten(2)
        made["c_KV"], made["k_pe"] = out[f"{module}.kv_a_proj_with_mqa"].split([d.r_kv, d.r], dim=-1)
        made |= self._norm(f"{module}.kv_a_layernorm", "KV")
        made["K_C"], made["V"] = out[f"{module}.kv_b_proj"].view(B, T, d.h, -1).split([d.n, d.v], dim=-1)
        made["k_C"], made["v"] = made["K_C"].flatten(2), made["V"].flatten(2)
        rotated = self.watch.named(module, "cat")
        made["Q_R"], made["k_R"] = rotated[0].out.transpose(1, 2), rotated[1].out.squeeze(1)
        product, mix = self.watch.named(module, "matmul")
        made["Q"], made["K"] = product.args[0].transpose(1, 2), product.args[1].permute(0, 3, 1, 2)
        made["S"] = self.watch.named(module, "softmax")[0].args[0]
        made["A"], made["O"] = mix.args[0], mix.out.transpose(1, 2)
        assert torch.equal(mix.args[1].transpose(1, 2), made["V"])
        made["delta_attn"] = out[f"{module}.o_proj"]
        made["x_mid"] = self.watch.inputs[f"{layer}.post_attention_layernorm"]
        made |= self._norm(f"{layer}.post_attention_layernorm", "ffn")
        made["delta_ffn"] = out[f"{layer}.mlp"]
        return made

    def _swiglu(self, module: str, end: str) -> dict[str, Tensor]:
        out = self.watch.outputs
        return {
            f"g{end}": out[f"{module}.gate_proj"],
            f"u{end}": out[f"{module}.up_proj"],
            f"a{end}": out[f"{module}.act_fn"],
            f"h{end}": self.watch.inputs[f"{module}.down_proj"],
        }

    def _dense(self, i: int) -> dict[str, Tensor]:
        return self._swiglu(f"model.layers.{i}.mlp", "")

    def _moe(self, i: int) -> dict[str, Tensor]:
        out, watch, module = self.watch.outputs, self.watch, f"model.layers.{i}.mlp"
        logits, gates, experts = out[f"{module}.gate"]
        flat = {
            "router_logits": logits,
            "affinity": watch.named(f"{module}.gate", "sigmoid")[0].out,
            "choice_score": watch.named(f"{module}.gate", "add")[0].out,
            "experts": experts,
            "gates": gates,
            "delta_experts": watch.named(f"{module}.experts", "sum")[-1].args[0],
            "delta_routed": out[f"{module}.experts"],
        }
        # Inside, slots are sorted by expert: bring them back to the order of ``experts``.
        place = watch.named(f"{module}.experts", "sort")[0].out[1].argsort()
        into, down = watch.named(f"{module}.experts", "grouped_mm")
        gate, up = into.out.chunk(2, dim=-1)
        inner = {"g_e": gate, "u_e": up, "a_e": out[f"{module}.experts.act_fn"], "h_e": down.args[0], "y_e": down.out}
        flat |= {name: value[place].view(*experts.shape, -1) for name, value in inner.items()}
        shared = {
            **self._swiglu(f"{module}.shared_experts", "_s"),
            "delta_shared": out[f"{module}.shared_experts"],
        }
        return {name: value.view(*self.batch, *value.shape[1:]) for name, value in flat.items()} | shared


def _gap(scores: Tensor, chosen: int) -> float:
    """The least distance between the last chosen and the first left out."""
    if chosen >= scores.shape[-1]:
        return torch.inf
    ranked = scores.sort(-1, descending=True).values
    return float((ranked[..., chosen - 1] - ranked[..., chosen]).min())


def real_of(tokens: Tensor, keep: Tensor | None) -> Tensor:
    """[B T], true where a token is real."""
    return torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep.bool()


def visible(tokens: Tensor, keep: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
    """[B T S], true where a real query may look: at itself and at real tokens before it, of its own segment."""
    real, T = real_of(tokens, keep), tokens.shape[1]
    seen = torch.ones(T, T, dtype=torch.bool).tril() & real[:, None, :] & real[:, :, None]
    return seen if segments is None else seen & (segments[:, :, None] == segments[:, None, :])


def padding(lengths: list[int], side: str) -> Tensor:
    """The mask of real tokens of rows of these lengths, padded on the ``left`` or the ``right``."""
    longest = max(lengths)
    pads = [[False] * (longest - n) for n in lengths]
    real = [[True] * n for n in lengths]
    rows = [p + r if side == "left" else r + p for p, r in zip(pads, real, strict=True)]
    return torch.tensor(rows)


def draw(
    oracle: Oracle, batch: int, length: int, keep: Tensor | None = None, seed: int = 0, **places: Tensor | None
) -> tuple[Tensor, Shown]:
    """Tokens without a near-tie of the router, and what the oracle shows on them: near-ties are redrawn."""
    for attempt in range(100):
        generator = torch.Generator().manual_seed(1000 * attempt + seed)
        tokens = torch.randint(0, oracle.dims.V, (batch, length), generator=generator)
        shown = oracle.show(tokens, keep, **places)
        if shown.margin > 3e-5:
            return tokens, shown
    raise AssertionError("a hundred draws, each with a near-tie of the router")


def by_expert(value: Tensor, experts: Tensor) -> Tensor:
    """Slots ([B T k ·]) in the order of their experts' numbers."""
    order = experts.argsort(-1)
    return value.gather(2, order.view(*order.shape, *[1] * (value.ndim - 3)).expand_as(value))
