"""What goes wrong in loaders of checkpoints, kind by kind, each in the smallest form that would show it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from probe import Checkpoint, Decoder, Dims, load, random_weights, save
from probe.errors import BadCheckpoint, BadConfig
from probe.params import tally
from probe.quantised import quantise_fp8
from tests.probe.files import INDEX, edit_json, edit_shard, same
from tests.probe.small import SMALL, TIED

FILE = "model.safetensors"
ROWS = replace(SMALL, d=256, r_kv=512, r=64, n=32)
"""576 rows in kv_a_proj_with_mqa, 192 in q_b_proj: neither is a multiple of 128."""


def refused(directory: Path, why: str, error: type[Exception] = BadCheckpoint) -> None:
    for ask in (Checkpoint, load):
        with pytest.raises(error, match=why):
            ask(directory)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save(random_weights(SMALL, 1), tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save(random_weights(SMALL, 1), tmp_path, shards=3)
    return tmp_path


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    save(random_weights(ROWS, 1), tmp_path, form="fp8")
    return tmp_path


def test_the_block_of_an_fp8_scale_is_128_and_no_ratio_of_shapes(fp8: Path) -> None:
    """At 576 and at 192 rows, rows over scale rows are 115 and 96."""
    state = load_file(fp8 / FILE)
    weights = load(fp8)
    for module, weight, row, column, scale_row in (
        ("kv_a_proj_with_mqa", "W_DKV", 120, 120, 0),  # in the second block, if blocks had 115 rows
        ("kv_a_proj_with_mqa", "W_KR", 575, 63, 4),
        ("q_b_proj", "W_QR", 96 + 32 + 2, 64 + 2, 1),  # the second head's, in the second block of 128 from row 128 on
    ):
        name = f"model.layers.0.self_attn.{module}.weight"
        scales = state[f"{name}_scale_inv"]
        assert len(scales) == -(-len(state[name]) // 128)
        want = (state[name][row].float() * scales[scale_row].repeat_interleave(128)[: state[name].shape[1]]).bfloat16()
        assert torch.equal(weights.read(0, weight)[:, column], want)
    moved = state["model.layers.0.self_attn.q_b_proj.weight_scale_inv"].clone()
    moved[0] *= 2  # rows 0 to 127: all of the first head's, and of the second's 96 … 191 the first 32
    edit_shard(fp8 / FILE, lambda all_: all_.update({"model.layers.0.self_attn.q_b_proj.weight_scale_inv": moved}))
    changed = load(fp8).read(0, "W_UQ") / weights.read(0, "W_UQ")
    assert changed.nan_to_num(2).unique().tolist() == [2.0]
    rotary = (load(fp8).read(0, "W_QR") / weights.read(0, "W_QR")).nan_to_num(0)
    assert rotary[:, :64].unique().tolist() == [2.0]
    assert rotary[:, 64:].unique().tolist() == [1.0]


def test_a_scale_in_another_shard_is_found(fp8: Path) -> None:
    before, state = load(fp8), load_file(fp8 / FILE)
    (fp8 / FILE).unlink()
    scales = {name: t for name, t in state.items() if name.endswith("_scale_inv")}
    files = {"a.safetensors": scales, "b.safetensors": {n: t for n, t in state.items() if n not in scales}}
    for file, part in files.items():
        save_file(part, fp8 / file)
    listed = {name: file for file, part in files.items() for name in part}
    (fp8 / INDEX).write_text(json.dumps({"weight_map": listed}), encoding="utf-8")
    same(load(fp8), before)


def test_a_missing_scale_is_refused(fp8: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    edit_shard(fp8 / FILE, lambda state: state.pop(name))
    refused(fp8, rf"{name} is missing")


def test_a_scale_in_another_dtype_is_refused(fp8: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    edit_shard(fp8 / FILE, lambda state: state.update({name: state[name].bfloat16()}))
    refused(fp8, rf"{name} should be F32, and is BF16")


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    (sharded / "model-2-of-3.safetensors").unlink()
    refused(sharded, r"model-2-of-3\.safetensors: the shard is missing")


def test_a_truncated_shard_is_refused(sharded: Path) -> None:
    file = sharded / "model-2-of-3.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    refused(sharded, r"model-2-of-3\.safetensors: not a readable safetensors file: .* it is cut")


def test_an_unlisted_shard_is_refused(sharded: Path) -> None:
    save_file({"x": torch.ones(1)}, sharded / "model-4-of-3.safetensors")
    refused(sharded, r"model-4-of-3\.safetensors: an unlisted shard")


def test_a_stale_index_is_refused(sharded: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    listed = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    edit_shard(sharded / listed[name], lambda state: state.pop(name))
    refused(sharded, rf"the index says that it holds {name}; it does not")


def test_shards_are_never_sorted_as_strings(tmp_path: Path) -> None:
    """Which file holds a tensor is what the index says: of eleven, the tenth comes before the second in no sense."""
    weights = random_weights(SMALL, 2)
    save(weights, tmp_path, dtype=torch.float32, shards=11)
    same(load(tmp_path), weights)
    names = {f"model-{i}-of-11.safetensors": f"model-{11 - i:05}.safetensors" for i in range(1, 12)}
    for old, new in names.items():
        (tmp_path / old).rename(tmp_path / new)
    edit_json(
        tmp_path / INDEX,
        lambda index: index["weight_map"].update({n: names[f] for n, f in index["weight_map"].items()}),
    )
    same(load(tmp_path), weights)


def test_a_stale_rotary_buffer_of_the_wrong_length_is_left_out_and_told(plain: Path) -> None:
    before = load(plain)
    stale = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((56,), 7.0) for i in range(3)}
    edit_shard(plain / FILE, lambda state: state.update(stale))
    same(load(plain), before)
    assert load(plain).notes == ("left out: 3 tensors, rotary buffers (inv_freq), which no run reads",)
    assert tally(plain).total == sum(t.numel() for t in before.tensors.values())


def test_an_extra_layer_is_left_out_where_the_config_says_so_and_refused_elsewhere(plain: Path) -> None:
    before = load(plain)
    edit_shard(plain / FILE, lambda state: state.update({"model.layers.3.eh_proj.weight": torch.ones(16, 32)}))
    refused(plain, r"model\.layers\.3\.eh_proj\.weight is no tensor of this model")
    edit_json(plain / "config.json", lambda config: config.update(num_nextn_predict_layers=1))
    same(load(plain), before)
    assert load(plain).notes == ("left out: 1 tensors, next-token modules (MTP), which no run reads",)


def test_a_head_that_is_tied_and_one_that_is_not(tmp_path: Path) -> None:
    save(random_weights(TIED, 1), tmp_path / "tied")
    weights = load(tmp_path / "tied")
    assert weights.read(None, "W_U").data_ptr() == weights.read(None, "W_E").data_ptr()
    edit_json(tmp_path / "tied" / "config.json", lambda config: config.update(tie_word_embeddings=False))
    refused(tmp_path / "tied", "lm_head.weight is missing, but tie_word_embeddings is false")
    save(random_weights(SMALL, 1), tmp_path / "untied")
    edit_json(tmp_path / "untied" / "config.json", lambda config: config.update(tie_word_embeddings=True))
    refused(tmp_path / "untied", "lm_head.weight is there, but tie_word_embeddings is true")


@pytest.mark.parametrize("kind", ["kimi_k9", "mixtral", "kimi_linear", "deepseek_v4", None])
def test_an_unknown_model_type_loads_nothing(kind: str | None, plain: Path) -> None:
    """Elsewhere it loads with experts that are random, and a warning."""
    edit_json(plain / "config.json", lambda config: config.update(model_type=kind))
    refused(plain, "model_type: ", BadConfig)


def test_the_type_of_kimi_k2_loads_its_own_experts(plain: Path) -> None:
    state = load_file(plain / FILE)
    assert json.loads((plain / "config.json").read_text(encoding="utf-8"))["model_type"] == "kimi_k2"
    for e in range(SMALL.e):
        assert torch.equal(load(plain).read(2, "W_2_e")[e], state[f"model.layers.2.mlp.experts.{e}.down_proj.weight"].T)


def test_no_expert_is_skipped(plain: Path) -> None:
    """Two thirds of them gone, or a config that asks for a third: not without a word."""
    experts = [f"model.layers.1.mlp.experts.{e}." for e in (1, 2, 3)]
    edit_json(plain / "config.json", lambda config: config.update(n_routed_experts=2, num_experts_per_tok=1))
    refused(plain, r"mlp\.gate\.weight should be \[2, 16\], and is \[4, 16\]")
    edit_json(plain / "config.json", lambda config: config.update(n_routed_experts=4, num_experts_per_tok=2))
    load(plain)
    edit_shard(plain / FILE, lambda state: [state.pop(n) for n in list(state) if n.startswith(tuple(experts))])
    refused(plain, r"model\.layers\.1\.mlp\.experts\.1\.gate_proj\.weight is missing\. 8 more differ")
    assert len(tally(plain).faults) == 9


def test_each_expert_that_is_chosen_is_that_expert(fp8: Path) -> None:
    """Read one by one as tokens choose them, they give what all of them in memory give."""
    tokens = torch.randint(0, ROWS.V, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = [Decoder(load(fp8, keep=keep))(tokens) for keep in ("expanded", "stored", "disk")]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    other = torch.zeros(ROWS.d, ROWS.m)
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    values, scale = quantise_fp8(other)
    edit_shard(fp8 / FILE, lambda state: state.update({name: values, f"{name}_scale_inv": scale}))
    assert float((Decoder(load(fp8, keep="disk"))(tokens) - logits[0]).abs().max()) > 1e-2


def test_the_latents_are_not_cut_by_the_width_without_position(plain: Path) -> None:
    """kv_a_proj_with_mqa is r_kv rows and then r: here 10 and 4, with n = 6 between them."""
    stored = load_file(plain / FILE)["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(load(plain).read(1, "W_DKV"), stored[:10].T)
    assert torch.equal(load(plain).read(1, "W_KR"), stored[10:].T)
    assert (Dims.from_config(plain).n, Dims.from_config(plain).r_kv) == (6, 10)
