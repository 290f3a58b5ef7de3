"""Sizes and constants from a config: Kimi K2's own, old and new keys, and each key that is refused, by name."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config

from probe import KIMI_K2, TINY, Dims
from probe.config import read_config
from probe.dims import Yarn
from probe.errors import BadConfig, ProbeError
from tests.probe.small import ALL_MOE, DENSE, DIRECT, K2_CONFIG, SMALL, TIED, VARIANTS, k2


def refusal(config: Any) -> str:
    """The message that a config is refused with."""
    with pytest.raises(BadConfig) as error:
        Dims.from_config(config)
    assert isinstance(error.value, ProbeError)
    return str(error.value)


# --- Kimi K2 -----------------------------------------------------------------------------------


def test_kimi_k2_is_what_its_config_reads() -> None:
    assert Dims.from_config(K2_CONFIG) == KIMI_K2


def test_kimi_k2_by_hand() -> None:
    d = KIMI_K2
    sizes = (d.d, d.r_q, d.r_kv, d.h, d.n, d.r, d.q, d.v, d.f, d.e, d.k, d.m, d.m_s, d.V)
    assert sizes == (7168, 1536, 512, 64, 128, 64, 192, 128, 18432, 384, 8, 2048, 2048, 163840)
    assert (d.blocks, d.moe.index(True), d.moe.count(True)) == (61, 1, 60)
    assert d.tau == pytest.approx(0.13086080, abs=1e-8)
    assert d.tau / 192**-0.5 == pytest.approx(1.8132604, abs=1e-7)
    assert d.rotary_gain == 1.0
    assert (d.eps, d.eps_latent, d.scaling, d.theta) == (1e-6, 1e-6, 2.827, 50000.0)


def test_constants_follow_yarn() -> None:
    plain = replace(SMALL, yarn=None)
    assert (plain.tau, plain.rotary_gain) == (SMALL.q**-0.5, 1.0)
    yarn = Yarn(factor=4.0, original=16, beta_fast=4.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=1.3)
    all_dim, once = 0.1 * 1.3 * math.log(4) + 1, 0.1 * 0.7 * math.log(4) + 1
    unequal = replace(SMALL, yarn=yarn)
    assert unequal.tau == pytest.approx(SMALL.q**-0.5 * all_dim**2)
    assert unequal.rotary_gain == pytest.approx(once / all_dim)
    without = replace(SMALL, yarn=replace(yarn, mscale=1.0, mscale_all_dim=0.0))
    assert without.tau == SMALL.q**-0.5
    assert without.rotary_gain == pytest.approx(0.1 * math.log(4) + 1)
    assert replace(SMALL, yarn=replace(yarn, factor=1.0)).rotary_gain == 1.0


def test_eps_of_the_latents_is_never_the_configs() -> None:
    assert Dims.from_config(k2(rms_norm_eps=1e-5)).eps == 1e-5
    assert Dims.from_config(k2(rms_norm_eps=1e-5)).eps_latent == 1e-6


def test_size_of_a_dim() -> None:
    assert SMALL.size("(h n)") == 2 * 6
    assert (SMALL.size("q"), SMALL.size("m_s"), SMALL.size("d")) == (10, 16, 16)
    for dim in ("B", "T", "S", "x", "moe"):
        with pytest.raises(KeyError):
            SMALL.size(dim)
    with pytest.raises(KeyError):
        DIRECT.size("r_q")


# --- keys that may differ ----------------------------------------------------------------------

NEW = {
    "rope_theta": 50000.0,
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def test_new_rotary_keys_read_as_the_old() -> None:
    new = k2(rope_theta=..., rope_scaling=..., rope_parameters=NEW)
    assert Dims.from_config(new) == KIMI_K2
    assert Dims.from_config({**new, "rope_scaling": None, "rope_theta": None}) == KIMI_K2
    plain = {"rope_type": "default", "rope_theta": 50000.0}
    without = replace(KIMI_K2, yarn=None)
    assert Dims.from_config(k2(rope_theta=..., rope_scaling=..., rope_parameters=plain)) == without
    for old in ({"rope_scaling": None}, {"rope_scaling": ...}, {"rope_scaling": {"type": "default"}}):
        assert Dims.from_config(k2(**old)) == without


OLD = K2_CONFIG["rope_scaling"]


def test_two_rotary_objects_that_mean_the_same_are_read() -> None:
    said = {key: value for key, value in NEW.items() if key != "rope_theta"}
    for both in (
        {"rope_parameters": NEW},
        {"rope_parameters": said},
        {"rope_parameters": {**NEW, "type": "yarn"}, "rope_scaling": {**OLD, "rope_theta": 50000, "factor": 32}},
        {"rope_parameters": {**NEW, "truncate": True, "attention_factor": None}},
    ):
        assert Dims.from_config(k2(**both)) == KIMI_K2
        config = DeepseekV3Config(**deepcopy(k2(**both)))  # it writes into what it is given
        assert {key: config.rope_parameters[key] for key in NEW} == NEW, "as transformers takes them"


OTHERS = {"factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 32.0, "beta_slow": 2.0, "mscale": 0.9}
DIFFERING: list[tuple[dict[str, Any], tuple[str, str]]] = [
    *(({"rope_parameters": {**NEW, key: other}}, ("rope_parameters", "rope_scaling")) for key, other in OTHERS.items()),
    ({"rope_parameters": {}}, ("rope_parameters", "rope_scaling")),
    ({"rope_scaling": {}, "rope_parameters": NEW}, ("rope_parameters", "rope_scaling")),
    ({"rope_parameters": {"rope_type": "default"}}, ("rope_parameters", "rope_scaling")),
    ({"rope_parameters": NEW, "rope_theta": ...}, ("rope_parameters", "rope_scaling")),
    (
        {"rope_parameters": {**NEW, "rope_theta": 1e4}, "rope_scaling": ...},
        ("rope_parameters.rope_theta", "rope_theta"),
    ),
    ({"rope_parameters": {**NEW, "type": "default"}}, ("rope_parameters.rope_type", "rope_parameters.type")),
]


@pytest.mark.parametrize(("both", "named"), DIFFERING)
def test_two_rotary_objects_that_differ_are_refused_by_both_names(both: dict[str, Any], named: tuple[str, str]) -> None:
    message = refusal(k2(**both))
    assert message.startswith(f"{named[0]} and {named[1]} differ: ")
    assert "keep the one that is meant" in message


def test_transformers_takes_the_other_of_two_that_differ() -> None:
    both = DeepseekV3Config(**deepcopy(k2(rope_parameters={**NEW, "factor": 4.0})))
    assert both.rope_parameters["factor"] == OLD["factor"] != 4.0


def test_rotary_objects_by_kind_of_layer_are_not_taken_for_none() -> None:
    assert refusal(k2(rope_scaling=..., rope_parameters={"full_attention": NEW})).startswith(
        "rope_parameters.full_attention: not a key that we know"
    )


def test_yarns_defaults() -> None:
    few = {"beta_fast": ..., "beta_slow": ..., "mscale": ..., "mscale_all_dim": ...}
    assert Dims.from_config(k2(yarn=few)).yarn == Yarn(32.0, 4096, 32.0, 1.0, 1.0, 0.0)
    assert Dims.from_config(k2(yarn={"truncate": True, "attention_factor": None})) == KIMI_K2


def test_keys_that_may_be_absent() -> None:
    optional = (
        "hidden_act attention_bias scoring_func topk_method moe_layer_freq num_key_value_heads norm_topk_prob "
        "tie_word_embeddings num_nextn_predict_layers quantization_config architectures torch_dtype"
    ).split()
    assert Dims.from_config(k2(**dict.fromkeys(optional, ...))) == KIMI_K2
    without = Dims.from_config(k2(max_position_embeddings=...))
    assert without == replace(KIMI_K2, max_positions=None)


def test_keys_that_are_read() -> None:
    changes: dict[str, dict[str, Any]] = {
        "routed_scaling_factor": {"scaling": 1.5},
        "norm_topk_prob": {"norm_topk": False},
        "tie_word_embeddings": {"tied": True},
        "rope_theta": {"theta": 1e4},
        "max_position_embeddings": {"max_positions": 8192},
        "kv_lora_rank": {"r_kv": 256},
        "v_head_dim": {"v": 96},
        "n_shared_experts": {"m_s": 3 * 2048},
    }
    for key, field in changes.items():
        (value,) = field.values()
        assert Dims.from_config(k2(**{key: 3 if key == "n_shared_experts" else value})) == replace(KIMI_K2, **field)


def test_no_query_latent() -> None:
    assert Dims.from_config(k2(q_lora_rank=None)) == replace(KIMI_K2, r_q=None)
    assert "q_lora_rank" in refusal(k2(q_lora_rank=...))  # absent is not null


@pytest.mark.parametrize("dense", [0, 1, 5, 61, 100])
def test_first_k_dense(dense: int) -> None:
    dims = Dims.from_config(k2(first_k_dense_replace=dense))
    assert dims.moe == tuple(i >= dense for i in range(61))
    if dense >= 61:
        assert (dims.e, dims.k, dims.m, dims.m_s) == (0, 0, 0, 0)
    else:
        assert replace(dims, moe=KIMI_K2.moe) == KIMI_K2


def test_a_dense_model_needs_no_key_of_the_experts() -> None:
    keys = "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts n_group topk_group".split()
    config = k2(first_k_dense_replace=61, routed_scaling_factor=..., **dict.fromkeys(keys, ...))
    assert Dims.from_config(config).m_s == 0


def test_groups() -> None:
    v3 = Dims.from_config(k2(n_routed_experts=256, n_group=8, topk_group=4))
    assert (v3.e, v3.n_group, v3.topk_group) == (256, 8, 4)


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(name: str) -> None:
    dims = VARIANTS[name]
    config = dims.to_config()
    assert Dims.from_config(config) == dims
    assert Dims.from_config(json.loads(json.dumps(config))) == dims


def test_round_trip_of_kimi_k2_and_the_tiny_model(tmp_path: Path) -> None:
    made = KIMI_K2.to_config()
    assert Dims.from_config(made) == KIMI_K2
    assert {key: K2_CONFIG[key] for key in made} == made  # the very keys and values of the real one
    tiny = Dims.from_config(TINY)
    assert tiny == Dims.from_config(TINY / "config.json") == Dims.from_config(str(TINY))
    assert Dims.from_config(tiny.to_config()) == tiny


def test_variants_differ() -> None:
    assert len(set(VARIANTS.values())) == len(VARIANTS)
    assert TIED.tied
    assert not any(DENSE.moe)
    assert all(ALL_MOE.moe)


def test_alternating_blocks_are_written_as_the_only_kind_that_can_say_so() -> None:
    dims = replace(SMALL, moe=(False, True, False))
    assert dims.to_config()["model_type"] == "glm4_moe_lite"
    assert Dims.from_config(dims.to_config()) == dims


# --- refused, by key ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"attention_bias": True}, ("attention_bias", "True")),
        ({"scoring_func": "softmax"}, ("scoring_func", "softmax", "sigmoid")),
        ({"topk_method": "greedy"}, ("topk_method", "greedy", "noaux_tc")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq", "2")),
        ({"rope_interleave": False}, ("rope_interleave", "half-split")),
        ({"num_key_value_heads": 8}, ("num_key_value_heads", "8", "64")),
        ({"qk_rope_head_dim": 63}, ("qk_rope_head_dim", "63", "odd")),
        ({"n_group": 7}, ("n_group", "7", "384")),
        ({"n_group": 384}, ("n_group", "at least two")),
        ({"n_group": 0}, ("n_group", "0")),
        ({"n_group": 4, "topk_group": 5}, ("topk_group", "5", "4")),
        ({"n_group": 64, "topk_group": 1}, ("num_experts_per_tok", "8", "6")),
        ({"num_experts_per_tok": 385}, ("num_experts_per_tok", "385", "384")),
        ({"num_experts_per_tok": 0}, ("num_experts_per_tok", "0")),
        ({"n_shared_experts": 0}, ("n_shared_experts", "0")),
        ({"n_shared_experts": None}, ("n_shared_experts", "None")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
        ({"first_k_dense_replace": -1}, ("first_k_dense_replace", "-1")),
        ({"hidden_size": "7168"}, ("hidden_size", "7168")),
        ({"hidden_size": 7168.0}, ("hidden_size", "whole number")),
        ({"hidden_size": True}, ("hidden_size", "True")),
        ({"kv_lora_rank": None}, ("kv_lora_rank", "None")),
        ({"q_lora_rank": 0}, ("q_lora_rank", "0")),
        ({"vocab_size": -1}, ("vocab_size", "-1")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps", "positive")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"routed_scaling_factor": "2"}, ("routed_scaling_factor", "'2'")),
        ({"norm_topk_prob": 1}, ("norm_topk_prob", "true or false")),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings", "'no'")),
        ({"max_position_embeddings": -1}, ("max_position_embeddings", "-1")),
        ({"num_nextn_predict_layers": "one"}, ("num_nextn_predict_layers", "'one'")),
        ({"num_nextn_predict_layers": 2**31 - 1}, ("num_nextn_predict_layers", "beyond all models")),
        ({"num_hidden_layers": 5000}, ("num_hidden_layers", "5,000", "at most 4,096")),
        ({"n_routed_experts": 10**6}, ("n_routed_experts", "1,000,000", "at most 4,369")),
        ({"hidden_size": 2**31}, ("hidden_size", "below 2**31")),
        ({"rms_norm_eps": 10**400}, ("rms_norm_eps", "positive number")),
        ({"rope_theta": 10**400}, ("rope_theta", "above 1")),
        ({"model_type": "x" * 10**6}, ("model_type", "…")),
        ({"rope_theta": None}, ("rope_theta", "None")),
        ({"rope_theta": ...}, ("rope_theta", "None")),
        ({"rope_theta": 1.0}, ("rope_theta", "above 1")),
        ({"rope_theta": float("inf")}, ("rope_theta", "inf")),
        ({"rope_scaling": "yarn"}, ("rope_scaling", "'yarn'", "object")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_scaling.type", "linear", "yarn")),
        ({"rope_parameters": {**NEW, "rope_type": "llama3"}}, ("rope_parameters.type", "llama3")),
        ({"rope_parameters": {**NEW, "factr": 2}}, ("rope_parameters.factr", "nearest: factor")),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused_by_the_key(change: dict[str, Any], said: tuple[str, ...]) -> None:
    message = refusal(k2(**change))
    assert message.startswith(said[0]) or message.split(":")[0].endswith(said[0])
    for words in said[1:]:
        assert words in message


@pytest.mark.parametrize(
    ("yarn", "said"),
    [
        ({"attention_factor": 1.2}, ("attention_factor", "1.2")),
        ({"truncate": False}, ("truncate", "False")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"factor": ...}, ("factor", "None")),
        ({"factor": 0}, ("factor", "positive")),
        ({"factor": -1.0}, ("factor", "-1.0")),
        ({"factor": float("nan")}, ("factor", "nan")),
        ({"original_max_position_embeddings": ...}, ("original_max_position_embeddings", "None")),
        ({"original_max_position_embeddings": 0}, ("original_max_position_embeddings", "positive")),
        ({"beta_fast": 0}, ("beta_fast", "positive")),
        ({"beta_slow": "1"}, ("beta_slow", "'1'")),
        ({"mscale": True}, ("mscale", "True")),
        ({"mscale_all_dim": None}, ("mscale_all_dim", "None")),
        ({"mscale": 0.7, "mscale_all_dim": 0.0}, ("mscale", "0.7", "disagree")),
        ({"mscale": ..., "mscale_all_dim": 1.0}, ("mscale", "disagree")),
        ({"mscale": 0.0, "mscale_all_dim": 1.0}, ("mscale", "disagree")),
        ({"beta_fst": 1.0}, ("beta_fst", "nearest: beta_fast")),
        ({"zzz": 1.0}, ("zzz", "not a key that we know.")),
    ],
    ids=str,
)
def test_yarn_refused_by_the_key(yarn: dict[str, Any], said: tuple[str, ...]) -> None:
    message = refusal(k2(yarn=yarn))
    assert message.startswith(f"rope_scaling.{said[0]}: ")
    for words in said[1:]:
        assert words in message


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("deepseek_v2", "softmax"),
        ("kimi_linear", "linear attention"),
        ("longcat_flash", "two attentions"),
    ],
)
def test_strangers_are_refused_with_the_reason(kind: str, reason: str) -> None:
    message = refusal(k2(model_type=kind))
    assert message.startswith("model_type: ")
    assert repr(kind) in message
    assert reason in message


@pytest.mark.parametrize("kind", ["llama", "Kimi_K2", None, ..., ["kimi_k2"]])
def test_unknown_families_are_refused(kind: Any) -> None:
    message = refusal(k2(model_type=kind))
    assert message.startswith("model_type: ")
    assert (
        "kimi_k2, deepseek_v3, glm4_moe_lite, youtu, deepseek_v32, glm_moe_dsa, sarvam_mla, kimi_k25, kimi_vl"
        in message
    )


def test_both_of_the_family_are_read() -> None:
    assert Dims.from_config(k2(model_type="deepseek_v3")) == KIMI_K2


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "first_k_dense_replace",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    assert refusal(k2(**{key: ...})).startswith(f"{key}: the config lacks it")


def test_a_missing_key_gets_the_nearest() -> None:
    assert refusal(k2(hidden_size=..., hiden_size=7168)) == "hidden_size: the config lacks it (it has hiden_size)."


# --- files -------------------------------------------------------------------------------------


def test_reads_a_file_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(K2_CONFIG), encoding="utf-8")
    assert Dims.from_config(tmp_path) == Dims.from_config(str(tmp_path / "config.json")) == KIMI_K2
    assert read_config(tmp_path) == K2_CONFIG


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "not list"),
        ("null", "not NoneType"),
        ('"x"', "not str"),
        ('{"hidden_size": 7168, "hidden_size": 16}', "not JSON (hidden_size is in it twice)"),
        ("[" * 10_000, "not JSON (it is nested too deeply)"),
    ],
)
def test_a_file_that_is_no_config(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    message = refusal(tmp_path)
    assert str(tmp_path / "config.json") in message
    assert said in message


def test_what_a_file_says_wrong_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k2(n_group=7)), encoding="utf-8")
    assert refusal(tmp_path).startswith(f"{tmp_path / 'config.json'}: n_group: 7 groups of 384 experts")


def test_a_number_of_more_digits_than_python_prints() -> None:
    assert refusal(k2(hidden_size=10**5000)).startswith("hidden_size: a int beyond telling should be a whole number")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    assert "not JSON" in refusal(tmp_path)


@pytest.mark.parametrize("where", ["", "config.json", "nowhere"])
def test_no_file(where: str, tmp_path: Path) -> None:
    message = refusal(tmp_path / where)
    assert str(tmp_path / where) in message
    assert "cannot read a config" in message
