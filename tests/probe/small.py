"""What the tests of this room share: small sizes, and Kimi K2's own config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from probe import Dims
from probe.dims import Yarn

SMALL = Dims(
    d=16,
    r_q=12,
    r_kv=10,
    h=2,
    n=6,
    r=4,
    v=8,
    f=24,
    e=4,
    k=2,
    m=8,
    m_s=16,
    V=30,
    moe=(False, True, True),
    eps=1e-5,
    scaling=2.5,
    norm_topk=True,
    n_group=1,
    topk_group=1,
    theta=1e3,
    yarn=Yarn(factor=4.0, original=16, beta_fast=4.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=1.3),
    max_positions=64,
)
"""One dense block, two MoE; no two widths alike where a swap could hide."""

DIRECT = replace(SMALL, r_q=None, yarn=None, norm_topk=False, eps=1e-6)
"""Without a query latent, without YaRN."""

TIED = replace(SMALL, tied=True, n_group=2)
DENSE = replace(SMALL, moe=(False, False), e=0, k=0, m=0, m_s=0, scaling=1.0)
ALL_MOE = replace(SMALL, moe=(True, True), max_positions=None)

VARIANTS = {"small": SMALL, "direct": DIRECT, "tied": TIED, "dense": DENSE, "all-moe": ALL_MOE}

K2_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 131072,
    "vocab_size": 163840,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "num_nextn_predict_layers": 0,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
"""moonshotai/Kimi-K2-Instruct's, key by key."""


def k2(yarn: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`K2_CONFIG` with changes; ``yarn`` changes single rotary keys; ``...`` leaves a key out."""
    made = {**K2_CONFIG, **changes}
    if yarn is not None:
        rope = {**K2_CONFIG["rope_scaling"], **yarn}
        made["rope_scaling"] = {key: value for key, value in rope.items() if value is not ...}
    return {key: value for key, value in made.items() if value is not ...}
