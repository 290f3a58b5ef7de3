"""Parameter accounting: the atlas page's numbers for Kimi K2, from card and from headers; transformers' own counts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from probe import KIMI_K2, Dims, account, card, random_weights, save
from probe.errors import BadCheckpoint, BadConfig
from probe.forms import BUFFERS
from probe.params import Part, count, parts, tally
from probe.weights import weight_shape
from tests.oracle import config
from tests.probe.files import K2_NUMBERS, edit_json, edit_shard, hollow_k2
from tests.probe.small import SMALL, TIED, VARIANTS

K2_DENSE = {
    "Attention RMSNorm": 7_168,
    "Multi-head latent attention": 101_124_096,
    "MLP RMSNorm": 7_168,
    "SwiGLU MLP": 396_361_728,
}
K2_MOE = {
    "Attention RMSNorm": 7_168,
    "Multi-head latent attention": 101_124_096,
    "MLP RMSNorm": 7_168,
    "Router": 2_752_512 + 384,
    "Routed experts": 16_911_433_728,
    "Shared expert": 44_040_192,
}
K2_AROUND = {"Embedding": 1_174_405_120, "Final RMSNorm": 7_168, "Head": 1_174_405_120}
"""The atlas pages' tables."""


def numbers(table: Sequence[Part]) -> dict[str, int]:
    return {part.component: part.parameters for part in table}


def evaluated(calculation: str) -> int:
    products = calculation.replace(",", "").split(" + ")
    return sum(math.prod(map(int, product.split(" × "))) for product in products)


def test_kimi_k2() -> None:
    made = account(KIMI_K2)
    dense, moe, around = (numbers(table) for table in made[:3])
    assert (dense, moe, around) == (K2_DENSE, K2_MOE, K2_AROUND)
    assert sum(dense.values()) == 497_500_160
    assert sum(moe.values()) == 17_059_365_248
    assert (made.dense_blocks, made.moe_blocks) == (1, 60)
    assert made.total == 1_026_408_232_448
    assert made.active == 32_861_500_928


def test_a_calculation_gives_its_number() -> None:
    made = account(KIMI_K2)
    lines = [*made.dense, *made.moe, *made.around]
    for _, calculation, parameters in lines:
        assert evaluated(calculation) == parameters
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


# --- from headers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def k2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of Kimi-K2-Instruct's headers over a terabyte of holes: whoever read a weight would still be reading."""
    directory = tmp_path_factory.mktemp("k2")
    hollow_k2(directory)
    return directory


def test_kimi_k2s_own_tensors_give_the_same_tables(k2: Path) -> None:
    found = tally(k2)
    (dense, moe, around) = found.counted
    assert (dense.blocks, dense.moe, moe.blocks, moe.moe) == (range(1), False, range(1, 61), True)
    assert numbers(dense.parts) == K2_DENSE
    assert numbers(moe.parts) == K2_MOE
    assert numbers(around.parts) == K2_AROUND
    assert found.total == account(KIMI_K2).total == 1_026_408_232_448
    assert found.faults == []
    for counted in found.counted:
        assert all(evaluated(part.calculation) == part.parameters for part in counted.parts)


def test_what_is_left_out_adds_up_to_all_that_is_stored(k2: Path) -> None:
    found = tally(k2)
    said = {beside.what: (beside.tensors, beside.numbers) for beside in found.beside}
    assert said == {
        "scales and stated shapes of quantised weights": (69_608, 62_495_192),
        BUFFERS: (61, 61 * 56),
    }
    assert found.total + sum(numbers for _, numbers in said.values()) == K2_NUMBERS


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shards": {"shards": 3},
    "fp8": {"form": "fp8", "shards": 2},
    "int4": {"form": "int4"},
    "sees": {"form": "int4", "model_type": "kimi_k25"},
}
WIDE = Dims.from_config({**SMALL.to_config(), "hidden_size": 32, "moe_intermediate_size": 64})


@pytest.mark.parametrize("form", FORMS)
def test_headers_count_what_the_card_counts(form: str, tmp_path: Path) -> None:
    save(random_weights(WIDE), tmp_path, **FORMS[form])
    found, said = tally(tmp_path), account(WIDE)
    dense, moe, around = found.counted
    assert numbers(dense.parts) == numbers(said.dense)
    assert numbers(moe.parts) == numbers(said.moe)
    assert numbers(around.parts) == numbers(said.around)
    assert (found.total, found.faults) == (said.total, [])


@pytest.mark.parametrize("name", VARIANTS)
def test_headers_count_every_kind_of_model(name: str, tmp_path: Path) -> None:
    save(random_weights(VARIANTS[name]), tmp_path)
    found = tally(tmp_path)
    assert (found.total, found.beside, found.faults) == (account(VARIANTS[name]).total, [], [])
    assert ("Head" in numbers(found.counted[-1].parts)) == (VARIANTS[name] != TIED)


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(random_weights(SMALL), tmp_path)
    file = tmp_path / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    sound = tally(tmp_path)
    with file.open("r+b") as opened:  # the payload is a hole now
        size = os.fstat(opened.fileno()).st_size
        opened.truncate(8 + length)
        opened.truncate(size)
    assert tally(tmp_path) == sound
    with file.open("r+b") as opened:  # and a file that is cut is damaged, whatever its header says
        opened.truncate(size - 1)
    with pytest.raises(BadCheckpoint, match="it is cut"):
        tally(tmp_path)


def test_what_differs_is_told_tensor_by_tensor_and_counted_as_it_is(tmp_path: Path) -> None:
    save(random_weights(SMALL), tmp_path)
    gone, odd, cut = (
        "model.layers.1.mlp.experts.2.up_proj.weight",
        "model.layers.7.odd",
        "model.layers.2.self_attn.o_proj.weight",
    )

    def change(state: dict[str, torch.Tensor]) -> None:
        del state[gone]
        state[odd] = torch.ones(3)
        state[cut] = state[cut][:, 1:]

    edit_shard(tmp_path / "model.safetensors", change)
    found = tally(tmp_path)
    assert found.faults == [
        f"{gone} is missing",
        f"{cut} should be [16, 16], and is [16, 15]",
        f"{odd} is no tensor of this model",
    ]
    assert found.total == account(SMALL).total - 8 * 16 - 16
    assert [list(counted.blocks) for counted in found.counted] == [[0], [1], [2], []]  # no two alike any more
    edit_json(tmp_path / "config.json", lambda config: config.update(vocab_size=31))
    assert "model.embed_tokens.weight should be [31, 16], and is [30, 16]" in tally(tmp_path).faults


def test_a_config_that_is_none(tmp_path: Path) -> None:
    save(random_weights(SMALL), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    with pytest.raises(BadConfig, match="llama"):
        tally(tmp_path)
