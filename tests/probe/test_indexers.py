"""Models with indexers, DeepSeek-V3.2 and GLM-5: the same block up to ``index_topk`` tokens, and refused beyond."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV32ForCausalLM

from probe import Decoder, Dims, Site, load, memory, random_weights, save
from probe.checkpoint import Checkpoint
from probe.config import unread_keys
from probe.errors import BadCheckpoint, BadText
from probe.forms import CHOOSING, EXTRA
from probe.params import tally
from tests.oracle import Oracle, indexed
from tests.probe.files import edit_shard, same
from tests.probe.small import SMALL, k2
from tests.probe.test_dims import refusal
from tests.probe.test_kin import DIMS, V32, logits, near, smaller

# --- their tensors -----------------------------------------------------------------------------


def indexers(dims: Dims, blocks: range, fp8: bool) -> dict[str, Tensor]:
    """The tensors of the indexers of some blocks, as published: in FP8 two matrices with their scales."""
    made: dict[str, Tensor] = {}
    for name in (f"model.layers.{block}.self_attn.indexer" for block in blocks):
        made |= {f"{name}.k_norm.weight": torch.ones(16), f"{name}.k_norm.bias": torch.zeros(16)}
        made[f"{name}.weights_proj.weight"] = torch.ones(2, dims.d)
        for matrix, shape in (("wq_b", (32, dims.r_q or 0)), ("wk", (16, dims.d))):
            made[f"{name}.{matrix}.weight"] = torch.ones(shape)
            if fp8:
                made[f"{name}.{matrix}.weight"] = torch.ones(shape).to(torch.float8_e4m3fn)
                made[f"{name}.{matrix}.weight_scale_inv"] = torch.ones(1, 1)
    return made


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "GLM-5"])
@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_indexers_are_left_out_and_told(name: str, form: Any, tmp_path: Path) -> None:
    dims = Dims.from_config(smaller(name))
    save(random_weights(dims, 2), tmp_path, form=form, num_nextn_predict_layers=1)
    before, counted, needs = load(tmp_path), tally(tmp_path), memory(tmp_path)
    found, further = (indexers(dims, blocks, form == "fp8") for blocks in (range(3), range(3, 4)))
    edit_shard(tmp_path / "model.safetensors", lambda state: state.update({**found, **further}))
    checkpoint = Checkpoint(tmp_path)
    assert {what: set(names) for what, names in checkpoint.survey.left_out.items()} == {
        CHOOSING: set(found),
        EXTRA: set(further),
    }
    assert f"left out: {len(found)} tensors, {CHOOSING}" in checkpoint.notes
    tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    logits = Decoder(before)(tokens)
    for keep in ("expanded", "stored", "disk"):
        weights = load(tmp_path, keep=keep)
        same(weights, before)
        assert torch.equal(Decoder(weights)(tokens), logits)
    told = tally(tmp_path)
    assert (told.counted, told.total, told.faults) == (counted.counted, counted.total, [])
    assert (CHOOSING, len(found)) in [(beside.what, beside.tensors) for beside in told.beside]
    assert memory(tmp_path).choices == needs.choices


@pytest.mark.parametrize(
    "stray", ["layers.0.self_attn.indexer.index_kpool_compress_ape", "layers.9.self_attn.indexer.wk.weight"]
)
def test_what_is_not_of_a_known_indexer_is_refused(stray: str, tmp_path: Path) -> None:
    save(random_weights(replace(SMALL, index_topk=8), 2), tmp_path)
    edit_shard(tmp_path / "model.safetensors", lambda state: state.update({f"model.{stray}": torch.ones(2, 2)}))
    with pytest.raises(BadCheckpoint, match=f"{stray.rpartition('.')[2]} is no tensor of this model"):
        load(tmp_path)


def test_an_indexer_in_a_model_that_has_none(tmp_path: Path) -> None:
    save(random_weights(SMALL, 2), tmp_path)
    edit_shard(tmp_path / "model.safetensors", lambda state: state.update(indexers(SMALL, range(1), False)))
    with pytest.raises(BadCheckpoint, match=r"indexer\.\S+ is no tensor of this model\. 4 more differ"):
        load(tmp_path)


def test_written_anew_transformers_opens_it_and_agrees(tmp_path: Path) -> None:
    """Its indexers are drawn anew there, and up to index_topk tokens it does not matter."""
    dims = Dims.from_config(indexed("deepseek_v32", 12))
    weights = random_weights(dims, 5)
    save(weights, tmp_path, dtype=torch.float32, index_head_dim=16, index_n_heads=2)
    assert load(tmp_path).dims == dims
    model, told = DeepseekV32ForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="grouped_mm", output_loading_info=True
    )
    assert all(".indexer." in name for name in told["missing_keys"])
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    assert near(Decoder(weights)(tokens), logits(model, tokens))


# --- their texts -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_beyond_its_limit_the_model_is_another_than_ours(kind: str) -> None:
    """So a text is refused from exactly there on; pads do not count."""
    oracle = Oracle(indexed(kind, 9))
    ours = Decoder(oracle.weights())
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    theirs = logits(oracle.model, tokens)
    free = oracle.weights()
    free.dims = replace(free.dims, index_topk=None)
    full = Decoder(free)(tokens)
    assert near(full[:, :9], theirs[:, :9])
    assert float((full[:, 9:] - theirs[:, 9:]).abs().max()) > 1e-2
    for short in (tokens[:, :9], tokens[:, :1]):
        assert torch.equal(ours(short), Decoder(free)(short))
    with pytest.raises(BadText, match="a text of 10 tokens is longer than index_topk: beyond 9 tokens"):
        ours(tokens[:, :10])
    keep = torch.arange(12) >= torch.tensor([[3], [4]])
    assert torch.equal(ours(tokens, keep), Decoder(free)(tokens, keep))
    with pytest.raises(BadText, match="a text of 10 tokens"):
        ours(tokens, torch.arange(12) >= torch.tensor([[2], [4]]))


def test_the_limit_holds_wherever_a_run_starts() -> None:
    """From tokens, behind a past, and from a stream that is known."""
    weights = random_weights(replace(SMALL, index_topk=6), 1)
    ours = Decoder(weights)
    tokens = torch.arange(7)[None]
    past = ours.run(tokens[:, :6], want=[Site(b, name) for b in range(3) for name in ("K", "V")])
    with pytest.raises(BadText, match="a text of 7 tokens"):
        ours.run(tokens[:, 6:], past=past)
    x_n = torch.randn(1, 7, SMALL.d)
    with pytest.raises(BadText, match="a text of 7 tokens"):
        ours.run(None, known={Site(1, "x_n"): x_n}, want=[Site(1, "x_next")])
    ours.run(None, known={Site(1, "x_n"): x_n[:, :6]}, want=[Site(1, "x_next")])


# --- their configs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("indexer_types", ["full", "shared", "shared"], "indexer_types: 'shared': blocks that share"),
        ("index_topk_pattern", "FSS", "index_topk_pattern: 'S': blocks that share"),
        ("index_topk_pattern", ["full", "shared"], "index_topk_pattern: 'shared': blocks that share"),
        ("index_topk_freq", 4, "index_topk_freq: 4: blocks that share"),
        ("index_topk", ..., "index_topk: the config lacks it"),
        ("index_topk", None, "index_topk: None should be a whole number"),
        ("index_topk", 0, "index_topk: 0 should be a whole number"),
        ("q_lora_rank", None, "q_lora_rank: None is not what a model with indexers has"),
        ("layer_types", ["sliding_attention"] * 61, "layer_types: 'sliding_attention'"),
        ("rope_interleave", False, "rope_interleave: false"),
    ],
)
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_indexers_that_are_refused(kind: str, key: str, value: Any, said: str) -> None:
    made = {**V32, "model_type": kind, key: value}
    assert refusal({k: v for k, v in made.items() if v is not ...}).startswith(said)


def test_each_block_with_its_own_indexer_is_the_same_however_it_is_said() -> None:
    said = {"indexer_types": ["full"] * 61, "index_topk_pattern": "F" * 61, "index_topk_freq": 1}
    for more in ({}, said, dict.fromkeys(said), {"layer_types": ["indexed_attention"] * 61}):
        assert Dims.from_config({**V32, **more}) == DIMS["DeepSeek-V3.2"][1]
        assert unread_keys({**V32, **more}) == ()
    assert unread_keys(k2(index_topk_freq=1, index_head_dim=128)) == ("index_topk_freq", "index_head_dim")
