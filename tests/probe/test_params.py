"""Parameter accounting: the atlas page's numbers for Kimi K2, and transformers' own count for small models."""

from __future__ import annotations

import math

import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from probe import KIMI_K2, Dims, account, card, random_weights
from probe.params import count, parts
from probe.weights import weight_shape
from tests.oracle import config
from tests.probe.small import VARIANTS


def test_kimi_k2() -> None:
    made = account(KIMI_K2)
    dense, moe, around = ({part.component: part.parameters for part in table} for table in made[:3])
    assert dense == {
        "Attention RMSNorm": 7_168,
        "Multi-head latent attention": 101_124_096,
        "MLP RMSNorm": 7_168,
        "SwiGLU MLP": 396_361_728,
    }
    assert moe == {
        "Attention RMSNorm": 7_168,
        "Multi-head latent attention": 101_124_096,
        "MLP RMSNorm": 7_168,
        "Router": 2_752_512 + 384,
        "Routed experts": 16_911_433_728,
        "Shared expert": 44_040_192,
    }
    assert around == {"Embedding": 1_174_405_120, "Final RMSNorm": 7_168, "Head": 1_174_405_120}
    assert sum(dense.values()) == 497_500_160
    assert sum(moe.values()) == 17_059_365_248
    assert (made.dense_blocks, made.moe_blocks) == (1, 60)
    assert made.total == 1_026_408_232_448
    assert made.active == 32_861_500_928


def test_a_calculation_gives_its_number() -> None:
    made = account(KIMI_K2)
    lines = [*made.dense, *made.moe, *made.around]
    for _, calculation, parameters in lines:
        products = calculation.replace(",", "").split(" + ")
        assert sum(math.prod(map(int, product.split(" × "))) for product in products) == parameters
    assert made.dense[-1].calculation == "7,168 × 18,432 + 7,168 × 18,432 + 18,432 × 7,168"


CONFIGS = {
    "yarn": config(),
    "direct": config(q_lora_rank=None),
    "two-shared": config(n_shared_experts=2, rope_scaling=None),
    "groups": config(n_group=4, topk_group=2),
    "dense": config(first_k_dense_replace=3),
    "moe": config(first_k_dense_replace=0),
    "tied": config(tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_counts_what_transformers_holds(name: str) -> None:
    theirs = {k: v for k, v in CONFIGS[name].items() if k != "model_type"}
    if theirs["rope_scaling"]:
        theirs["rope_scaling"] = dict(theirs["rope_scaling"])
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**theirs))
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    dims = Dims.from_config(CONFIGS[name])
    assert len(biases) == sum(dims.moe)
    made = account(dims)
    assert made.total == sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in biases)
    idle = sum(p.numel() * (dims.e - dims.k) // dims.e for n, p in model.named_parameters() if ".mlp.experts." in n)
    assert (idle > 0) == any(dims.moe)
    assert made.active == made.total - idle


@pytest.mark.parametrize("name", VARIANTS)
def test_it_counts_what_we_hold(name: str) -> None:
    dims = VARIANTS[name]
    weights = random_weights(dims)
    held = sum(t.numel() for key, t in weights.tensors.items() if not (dims.tied and key == (None, "W_U")))
    assert account(dims).total == held


def test_parts_split_the_cards_weights() -> None:
    for moe in (False, True):
        made = card(moe=moe)
        assert all(leaf.part for leaf in made.weights)
        assert sum(part.parameters for part in parts(made, KIMI_K2)) == count(made.weights, KIMI_K2)


def test_shapes_without_a_query_latent() -> None:
    direct = VARIANTS["direct"]
    made = card(moe=False, query_latent=False)
    assert weight_shape(made.leaves["W_UQ"], direct) == (direct.d, direct.h * direct.n)
    assert weight_shape(made.leaves["W_QR"], direct) == (direct.d, direct.h * direct.r)
