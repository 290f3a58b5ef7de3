"""Kimi K2's kin: published constants, values against transformers' own classes, and other blocks refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    YoutuConfig,
)

from probe import KIMI_K2, Checkpoint, Decoder, Dims, account, from_state, load, save
from probe.config import Layout, extra_layers, layout, text_config, unread_keys, wrapper
from probe.dims import Yarn
from probe.errors import BadCheckpoint, BadConfig
from probe.forms import EXTRA, SIGHT
from probe.numerics import rotation
from probe.params import tally
from probe.weights import random_weights
from tests.oracle import CLASSES, Oracle, draw, sarvam, seeing
from tests.oracle import config as small
from tests.probe.files import edit_json, edit_shard, same
from tests.probe.small import K2_CONFIG, SMALL, k2
from tests.probe.test_dims import refusal

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""DeepSeek-V3 and R1; V3.1 adds that its scales are powers of two."""

MOONLIGHT: dict[str, Any] = {
    **{key: value for key, value in V3.items() if key not in ("rope_scaling", "quantization_config", "ep_size")},
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}

YOUTU: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "youtu",
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 1600000,
    "v_head_dim": 128,
    "vocab_size": 128256,
}

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "mlp_layer_types": ["dense"] + ["sparse"] * 46,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}

V32: dict[str, Any] = {
    **V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
    "quantization_config": {**FP8, "scale_fmt": "ue8m0"},
}

GLM5: dict[str, Any] = {
    **{key: value for key, value in GLM.items() if key not in ("mlp_layer_types", "rope_scaling", "rope_theta")},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}

SARVAM: dict[str, Any] = {
    "architectures": ["SarvamMLAForCausalLM"],
    "attn_implementation": "eager",
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 576,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "sarvam_mla",
    "moe_intermediate_size": 2048,
    "moe_router_enable_expert_bias": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "q_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**V3["rope_scaling"], "type": "deepseek_yarn"},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "v_head_dim": 128,
    "vocab_size": 262144,
}

KIMI_VL: dict[str, Any] = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "model_type": "kimi_vl",
    "media_placeholder_token_id": 163605,
    "text_config": {
        **{key: value for key, value in MOONLIGHT.items() if key not in ("architectures", "auto_map", "model_type")},
        "max_position_embeddings": 131072,
        "rope_scaling": None,
        "rope_theta": 800000.0,
    },
    "vision_config": {"model_type": "moonvit", "num_hidden_layers": 27},
}

LONGER = {"factor": 64.0}
THINKING = k2(yarn=LONGER, rms_norm_eps=1e-5, max_position_embeddings=262144, quantization_config=...)
K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "kimi_k25_vision", "num_hidden_layers": 27},
    "text_config": {
        **k2(yarn={"factor": 64.0, "beta_fast": 32.0}, rms_norm_eps=1e-5, max_position_embeddings=262144),
        "top_k": 50,  # a nested config says what generation does, too
        "temperature": 1.0,
    },
}

DIMS: dict[str, tuple[dict[str, Any], Dims]] = {
    "K2-Base": (k2(), KIMI_K2),
    "K2-0905": (
        k2(yarn=LONGER, max_position_embeddings=262144),
        replace(KIMI_K2, yarn=replace(KIMI_K2.yarn, factor=64.0), max_positions=262144),  # type: ignore[type-var]
    ),
    "K2-Thinking": (
        THINKING,
        replace(KIMI_K2, yarn=Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0), eps=1e-5, max_positions=262144),
    ),
    "K2.5": (K25, replace(KIMI_K2, yarn=Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0), eps=1e-5, max_positions=262144)),
    "DeepSeek-V3": (
        V3,
        replace(
            KIMI_K2,
            h=128,
            e=256,
            V=129280,
            moe=tuple(i >= 3 for i in range(61)),
            scaling=2.5,
            n_group=8,
            topk_group=4,
            theta=1e4,
            yarn=Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0),
            max_positions=163840,
        ),
    ),
    "Moonlight": (
        MOONLIGHT,
        replace(
            KIMI_K2,
            d=2048,
            r_q=None,
            h=16,
            f=11264,
            e=64,
            k=6,
            m=1408,
            m_s=2 * 1408,
            moe=tuple(i >= 1 for i in range(27)),
            eps=1e-5,
            scaling=2.446,
            yarn=None,
            max_positions=8192,
        ),
    ),
    "Youtu-LLM": (
        YOUTU,
        replace(
            KIMI_K2,
            d=2048,
            h=16,
            f=6144,
            e=0,
            k=0,
            m=0,
            m_s=0,
            V=128256,
            moe=(False,) * 32,
            scaling=1.0,
            theta=1.6e6,
            yarn=None,
            tied=True,
        ),
    ),
    "GLM-4.7-Flash": (
        GLM,
        replace(
            KIMI_K2,
            d=2048,
            r_q=768,
            h=20,
            n=192,
            v=256,
            f=10240,
            e=64,
            k=4,
            m=1536,
            m_s=1536,
            V=154880,
            moe=tuple(i >= 1 for i in range(47)),
            eps=1e-5,
            scaling=1.8,
            theta=1e6,
            yarn=None,
            max_positions=202752,
        ),
    ),
}
DIMS |= {
    "DeepSeek-V3.2": (V32, replace(DIMS["DeepSeek-V3"][1], index_topk=2048)),
    "GLM-5": (
        GLM5,
        replace(
            DIMS["GLM-4.7-Flash"][1],
            d=6144,
            r_q=2048,
            h=64,
            f=12288,
            e=256,
            k=8,
            m=2048,
            m_s=2048,
            moe=tuple(i >= 3 for i in range(78)),
            scaling=2.5,
            index_topk=2048,
        ),
    ),
    "sarvam-105b": (
        SARVAM,
        replace(
            DIMS["DeepSeek-V3"][1],
            d=4096,
            r_q=None,
            h=64,
            f=16384,
            e=128,
            V=262144,
            moe=tuple(i >= 1 for i in range(32)),
            n_group=1,
            topk_group=1,
            max_positions=131072,
        ),
    ),
    "Kimi-VL": (KIMI_VL, replace(DIMS["Moonlight"][1], theta=8e5, max_positions=131072)),
}


def theirs(config: dict[str, Any], device: str = "cpu") -> Any:
    """Transformers' model of a config, its weights wide enough that rotation, routing and norms do real work."""
    config = dict(text_config(config))
    kind, model = CLASSES[config.pop("model_type")]
    config.pop("quantization_config", None)
    config["rope_scaling"] = dict(config["rope_scaling"]) if config.get("rope_scaling") else None  # it writes into it
    read = kind(**config)
    read._attn_implementation = "eager"
    if kind is not YoutuConfig:  # which has no experts
        read._experts_implementation = "grouped_mm"
    with torch.device(device):
        made = model(read).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in made.state_dict().items() if device == "cpu" else ():
        drawn = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            drawn *= 0.3
        elif tensor.ndim == 1:
            drawn = 1 + 0.2 * drawn
        elif "embed" not in name:
            drawn /= tensor.shape[-1] ** 0.5
        tensor.copy_(drawn)
    return made


SMALLER = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
    "qk_nope_head_dim": 20,
    "v_head_dim": 28,
    "vocab_size": 60,
}


def smaller(name: str) -> dict[str, Any]:
    """A published config at small widths: its rotary width, constants, groups and kinds of blocks stay."""
    text = dict(text_config(DIMS[name][0]))
    text |= SMALLER
    text["q_lora_rank"] = text.get("q_lora_rank") and 44
    if experts := {"n_routed_experts", "num_experts"} & text.keys():
        text |= {experts.pop(): 32, "num_experts_per_tok": 4, "first_k_dense_replace": 1}
    if "mlp_layer_types" in text:
        text["mlp_layer_types"] = ["sparse", "dense", "sparse"]
        del text["first_k_dense_replace"]
    return text


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def near(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


# --- constants ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIMS)
def test_the_published_config_reads_as_these_sizes(name: str) -> None:
    config, dims = DIMS[name]
    assert Dims.from_config(config) == dims
    assert Dims.from_config(json.loads(json.dumps(dims.to_config()))) == dims
    assert unread_keys(config) == ()


@pytest.mark.parametrize("name", DIMS)
def test_it_counts_what_transformers_would_hold_at_full_size(name: str) -> None:
    config, dims = DIMS[name]
    model = theirs(config, device="meta")
    biases = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    read = sum(p.numel() for n, p in model.named_parameters() if ".indexer." not in n)
    assert account(dims).total == read + biases


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GLM-4.7-Flash", Glm4MoeLiteConfig),
        ("Youtu-LLM", YoutuConfig),
        ("DeepSeek-V3.2", DeepseekV32Config),
        ("GLM-5", GlmMoeDsaConfig),
    ],
)
def test_the_sizes_are_transformers_own_for_that_model(name: str, kind: Any) -> None:
    """Its config classes are made for one model each; only what it rotates by is not in them."""
    dims = Dims.from_config(kind().to_dict())
    assert replace(dims, theta=DIMS[name][1].theta, yarn=DIMS[name][1].yarn) == DIMS[name][1]


def test_totals_as_their_makers_round_them() -> None:
    said = {"DeepSeek-V3": 671e9, "Moonlight": 16e9, "Youtu-LLM": 1.96e9, "GLM-4.7-Flash": 30e9, "K2.5": 1.03e12}
    said |= {"GLM-5": 744e9, "sarvam-105b": 106e9, "Kimi-VL": 16e9}
    for name, total in said.items():
        assert account(DIMS[name][1]).total == pytest.approx(total, rel=0.02)
    assert account(DIMS["DeepSeek-V3"][1]).active == pytest.approx(37.5e9, rel=0.02)


def test_softmax_scales() -> None:
    scales = {"K2-Base": 0.1308607999629, "K2-0905": 0.1446796258, "K2.5": 0.1446796258, "DeepSeek-V3": 0.1352337789}
    for name, scale in scales.items():
        assert DIMS[name][1].tau == pytest.approx(scale, rel=1e-9)
    assert DIMS["Moonlight"][1].tau == 192**-0.5
    assert DIMS["GLM-4.7-Flash"][1].tau == 256**-0.5
    assert all(dims.rotary_gain == 1.0 for _, dims in DIMS.values())


@pytest.mark.parametrize("name", DIMS)
def test_angles_and_scale_are_transformers(name: str) -> None:
    """At positions far beyond what small runs reach."""
    dims = Dims.from_config(smaller(name))
    assert dims.r == DIMS[name][1].r
    ids = torch.tensor([[0, 1, 5, 4095, 4097, 100_000]])
    model = theirs(smaller(name))
    cos, sin = model.model.rotary_emb(torch.zeros(1), ids)
    ours = rotation(ids, dims, torch.float32)
    assert torch.equal(ours[0], cos[..., : dims.r // 2])
    assert torch.equal(ours[1], sin[..., : dims.r // 2])
    assert dims.tau == model.model.layers[0].self_attn.scaling


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIMS)
def test_what_transformers_saves_runs_as_transformers_runs_it(name: str, tmp_path: Path) -> None:
    model = theirs(smaller(name))
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    want = logits(model, tokens)
    weights = load(tmp_path)
    assert replace(weights.dims, max_positions=None) == replace(Dims.from_config(smaller(name)), max_positions=None)
    held = from_state(model.state_dict(), weights.dims)
    for ours in (weights, held, load(tmp_path, keep="disk")):
        assert near(Decoder(ours)(tokens), want)
    same(weights, held)


def test_these_constants_matter() -> None:
    """Negative controls: each of what tells the kin apart moves the logits of the same weights."""
    tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    dims = Dims.from_config(smaller("DeepSeek-V3"))
    weights = random_weights(dims, 1)
    base = Decoder(weights)(tokens)
    assert dims.yarn is not None
    others = {
        "groups": replace(dims, n_group=1, topk_group=1),
        "scaling": replace(dims, scaling=2.827),
        "betas": replace(dims, yarn=replace(dims.yarn, beta_fast=1.0)),
        "factor": replace(dims, yarn=replace(dims.yarn, factor=64.0)),
        "yarn": replace(dims, yarn=None),
        "theta": replace(dims, theta=5e4),
        "eps": replace(dims, eps=1e-2),
    }
    for name, other in others.items():
        moved = Decoder(type(weights)(other, weights.tensors))(tokens)
        assert float((moved - base).abs().max()) > 1e-4, name


def test_two_shared_experts_are_one_of_twice_the_width(tmp_path: Path) -> None:
    dims = Dims.from_config(smaller("Moonlight"))
    assert (dims.m, dims.m_s, dims.r_q) == (24, 48, None)
    save(random_weights(dims, 2), tmp_path)
    assert load(tmp_path).read(1, "W_1_s").shape == (48, 48)


def test_a_v3_keeps_its_next_token_module_out(tmp_path: Path) -> None:
    config = smaller("DeepSeek-V3")
    assert extra_layers(V3) == extra_layers(GLM) == extra_layers(config) == 1
    assert extra_layers(MOONLIGHT) == extra_layers(YOUTU) == extra_layers(K25) == 0
    save(random_weights(Dims.from_config(config), 2), tmp_path, form="fp8", num_nextn_predict_layers=1)
    before = load(tmp_path)
    extra = {
        "model.layers.3.eh_proj.weight": torch.ones(48, 96).to(torch.float8_e4m3fn),
        "model.layers.3.eh_proj.weight_scale_inv": torch.ones(1, 1),
        "model.layers.3.embed_tokens.weight": torch.ones(60, 48),
        "model.layers.3.shared_head.head.weight": torch.ones(60, 48),
    }
    edit_shard(tmp_path / "model.safetensors", lambda state: state.update(extra))
    checkpoint = Checkpoint(tmp_path)
    assert {what: set(names) for what, names in checkpoint.survey.left_out.items()} == {EXTRA: set(extra)}
    same(checkpoint, before)


def test_powers_of_two_for_scales_as_in_v31(tmp_path: Path) -> None:
    save(random_weights(Dims.from_config(smaller("DeepSeek-V3")), 2), tmp_path, form="fp8")
    edit_json(tmp_path / "config.json", lambda config: config["quantization_config"].update(scale_fmt="ue8m0"))
    assert any(note.startswith("scale_fmt ue8m0") for note in load(tmp_path).notes)


# --- where blocks stand ------------------------------------------------------------------------


def test_which_blocks_are_mixtures() -> None:
    types = ["sparse", "dense", "sparse"]
    dims = Dims.from_config({**GLM, "num_hidden_layers": 3, "mlp_layer_types": types})
    assert dims.moe == (True, False, True)
    written = dims.to_config()
    assert (written["model_type"], written["mlp_layer_types"]) == ("glm4_moe_lite", types)
    assert "first_k_dense_replace" not in written
    assert Dims.from_config(written) == dims
    without = {key: value for key, value in GLM.items() if key != "mlp_layer_types"}
    assert Dims.from_config(without) == DIMS["GLM-4.7-Flash"][1]  # the first is dense, unless it says otherwise
    assert Dims.from_config({**without, "first_k_dense_replace": 4}).moe == tuple(i >= 4 for i in range(47))


@pytest.mark.parametrize("types", ["dense", ["dense"] * 46, ["dense"] * 46 + ["moe"], [0] * 47, {"0": "dense"}])
def test_layer_types_that_are_none(types: Any) -> None:
    assert refusal({**GLM, "mlp_layer_types": types}).startswith("mlp_layer_types: ")


def test_youtu_is_tied_and_dense_whatever_it_leaves_out() -> None:
    assert Dims.from_config(YOUTU).tied
    assert not Dims.from_config({**YOUTU, "tie_word_embeddings": False}).tied
    assert not Dims.from_config(K2_CONFIG | {"tie_word_embeddings": False}).tied


# --- a model that sees -------------------------------------------------------------------------


def test_the_text_part_of_a_model_that_sees() -> None:
    whole = wrapper(K25)
    assert whole is not None
    assert layout(K25) is whole.layouts[0]
    assert layout(K25).full("model.layers.3.mlp.gate.weight") == "language_model.model.layers.3.mlp.gate.weight"
    assert layout(K25).full("lm_head.weight") == "language_model.lm_head.weight"
    assert layout(K2_CONFIG) == Layout()
    assert text_config(K25) == K25["text_config"]
    assert text_config(KIMI_VL) == {"model_type": "deepseek_v3", **KIMI_VL["text_config"]}
    assert wrapper(K2_CONFIG) is None
    assert text_config(K2_CONFIG) is K2_CONFIG
    message = refusal({**K25, "text_config": {**K25["text_config"], "hidden_size": "7168"}})  # type: ignore[dict-item]
    assert message.startswith("text_config: hidden_size: ")
    assert refusal({**K25, "text_config": [1]}).startswith("text_config: a kimi_k25 config should hold")


def as_published(state: dict[str, Tensor]) -> None:
    """Transformers 5.24 writes some of the names back wrongly."""
    for name in list(state):
        right = name.replace("language_model.model.blocks.", "language_model.model.layers.")
        state[right.removeprefix("model.")] = state.pop(name)


def as_loaded(state: dict[str, Tensor]) -> None:
    """The names by which transformers holds them, experts apart."""
    for name in list(state):
        inside = name.removeprefix("language_model.").replace("model.blocks.", "model.language_model.layers.")
        inside = re.sub(r"^model\.(embed_tokens|norm)\.", r"model.language_model.\1.", inside)
        state[re.sub(r"^(vision_tower|mm_projector)\.", r"model.\1.", inside)] = state.pop(name)


@pytest.mark.parametrize(
    "change", [lambda state: None, as_published, as_loaded], ids=["written", "published", "loaded"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_part_runs_as_transformers_runs_the_whole(
    change: Callable[[dict[str, Tensor]], None], tied: bool, tmp_path: Path
) -> None:
    oracle = Oracle(seeing(small(yarn={"factor": 64.0}, tie_word_embeddings=tied)))
    oracle.model.save_pretrained(tmp_path)
    edit_shard(tmp_path / "model.safetensors", change)
    tokens, shown = draw(oracle, 2, 12)
    for keep in ("expanded", "stored", "disk"):
        assert near(Decoder(load(tmp_path, keep=keep))(tokens), shown[None, "logits"])
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint.survey.left_out[SIGHT]) > 5
    same(checkpoint, oracle.weights())
    save(checkpoint, tmp_path / "ours", dtype=torch.float32, model_type="kimi_k25")
    same(load(tmp_path / "ours"), checkpoint)
    written = json.loads((tmp_path / "ours" / "config.json").read_text(encoding="utf-8"))
    assert written["tie_word_embeddings"] is tied  # transformers asks the whole, and takes true for nothing said


def test_one_spelling_at_a_time(tmp_path: Path) -> None:
    """A tensor under a name of another layout is none of this one's."""
    save(random_weights(SMALL, 2), tmp_path, model_type="kimi_k25")
    start = "language_model.model"
    edit_shard(
        tmp_path / "model.safetensors",
        lambda state: state.update(
            {f"{start}.blocks.0.input_layernorm.weight": state[f"{start}.layers.0.input_layernorm.weight"].clone()}
        ),
    )
    with pytest.raises(BadCheckpoint, match=r"blocks\.0\.input_layernorm\.weight is no tensor of this model"):
        load(tmp_path)


@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_kimi_vl_is_a_moonlight_under_another_prefix(form: Any, tmp_path: Path) -> None:
    """Transformers has no class for it: the layout is checked, around weights that are checked elsewhere."""
    weights = random_weights(Dims.from_config(smaller("Kimi-VL")), 4)
    save(weights, tmp_path, form=form, model_type="kimi_vl")
    save(weights, tmp_path / "text", form=form)
    sight = {
        name: torch.ones(3)
        for name in ("vision_tower.patch_embed.pos_emb.weight", "multi_modal_projector.linear_1.bias")
    }
    edit_shard(tmp_path / "model.safetensors", lambda state: state.update(sight))
    edit_json(tmp_path / "config.json", lambda config: config["text_config"].pop("model_type"))
    assert Checkpoint(tmp_path).survey.left_out == {SIGHT: sorted(sight)}
    same(load(tmp_path), load(tmp_path / "text"))
    assert tally(tmp_path).total == account(weights.dims).total


# --- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("deepseek_v2", "softmax and has no correction bias"),
        ("kimi_linear", "linear attention"),
        ("longcat_flash", "two attentions a layer"),
        ("axk1", "norm after the feed-forward part"),
        ("mistral4", "queries are scaled by position"),
        ("minicpm3", "scales the embedding, each update and the logits"),
    ],
)
def test_another_block_is_refused_by_name_with_the_reason(kind: str, reason: str) -> None:
    for config in (k2(model_type=kind), {**K25, "text_config": k2(model_type=kind)}):
        message = refusal(config)
        assert f"model_type: {kind!r} is another block than ours: " in message
        assert reason in message


def test_sarvams_own_keys_are_sarvams_alone() -> None:
    assert unread_keys(k2(num_experts=384)) == ("num_experts",)
    assert refusal(k2(yarn={"type": "deepseek_yarn"})).startswith("rope_scaling.type: 'deepseek_yarn'")
    assert refusal(k2(use_qk_norm=True)).startswith("use_qk_norm: True")
    dims = DIMS["sarvam-105b"][1]
    for same_said in ({"n_routed_experts": 128}, {"rope_scaling": V3["rope_scaling"]}, {"score_function": "sigmoid"}):
        assert Dims.from_config({**SARVAM, **same_said}) == dims
    for key, value in {
        "n_routed_experts": 64,
        "moe_router_enable_expert_bias": False,
        "score_function": "softmax",
        "router_dtype": "bf16",
    }.items():
        assert key in refusal({**SARVAM, key: value})
    assert refusal({**SARVAM, "rope_scaling": None}).startswith("rope_scaling: the config lacks it")


def test_groups_that_sarvam_leaves_out_are_told(tmp_path: Path) -> None:
    """One transformers' reading, and another: they differ, so whoever opens it must know."""
    oracle = Oracle(sarvam(), seed=2)
    said = {**oracle.config, "num_experts": 32}
    assert (Dims.from_config(said).n_group, Dims.from_config(said).topk_group) == (1, 1)
    oracle.model.save_pretrained(tmp_path)
    assert not any("n_group" in note for note in load(tmp_path).notes)
    edit_json(tmp_path / "config.json", lambda config: [config.pop(key) for key in ("n_group", "topk_group")])
    assert any(note.startswith("config.json does not state n_group") for note in load(tmp_path).notes)
    tokens, shown = draw(oracle, 2, 9)
    assert near(Decoder(load(tmp_path))(tokens), shown[None, "logits"])
    edit_json(tmp_path / "config.json", lambda config: config.update(n_group=2, topk_group=1))
    assert not near(Decoder(load(tmp_path))(tokens), shown[None, "logits"])


@pytest.mark.parametrize(("kind", "near"), [("kimi-k2", "kimi_k2"), ("DeepSeek_V3", "deepseek_v3"), ("yutu", "youtu")])
def test_an_unknown_type_gets_the_nearest_and_all_that_are_known(kind: str, near: str) -> None:
    message = refusal(k2(model_type=kind))
    assert message.endswith(f"nearest: {near}.")
    assert all(known in message for known in ("kimi_k2", "deepseek_v3", "kimi_k25", "glm4_moe_lite", "youtu"))


# --- keys that nobody reads --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("partial_rotary_factor", 1.0, 0.5),
        ("mlp_bias", False, True),
        ("use_qk_norm", False, True),
        ("sliding_window", None, 4096),
        ("use_sliding_window", False, True),
        ("index_topk", None, 2048),
        ("mla_scale_q_lora", False, True),
        ("final_logit_softcapping", None, 30.0),
        ("scale_emb", 1.0, 12),
        ("residual_multiplier", 1.0, 0.5),
        ("logit_scale", 1.0, 0.25),
        ("layer_types", ["full_attention"] * 61, ["sliding_attention"] * 61),
    ],
)
def test_a_switch_is_honoured_at_the_value_that_does_nothing(key: str, neutral: Any, other: Any) -> None:
    for value in (neutral, None):
        assert Dims.from_config(k2(**{key: value})) == KIMI_K2
    assert refusal(k2(**{key: other})).startswith(f"{key}: ")


def test_an_unknown_key_is_told_and_not_refused() -> None:
    config = k2(attention_sink_size=4, new_remark="x", off=None, _hidden=1, sliding_window=None)
    assert Dims.from_config(config) == KIMI_K2
    assert unread_keys(config) == ("attention_sink_size", "new_remark")
    assert unread_keys({**K25, "text_config": config}) == ("attention_sink_size", "new_remark")


def test_no_key_that_is_read_is_told() -> None:
    """Whatever transformers writes for these models is known here."""
    for name in ("DeepSeek-V3", "Youtu-LLM", "GLM-4.7-Flash", "DeepSeek-V3.2", "GLM-5", "sarvam-105b"):
        config = smaller(name)
        kind, _ = CLASSES[config.pop("model_type")]
        config.pop("quantization_config", None)
        assert unread_keys(kind(**config).to_dict()) == ()
    assert unread_keys(SMALL.to_config()) == ()


def test_extra_layers_that_are_no_number() -> None:
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        with pytest.raises(BadConfig, match=f"^{key}: 'one'"):
            Dims.from_config({**k2(num_nextn_predict_layers=...), key: "one"})
