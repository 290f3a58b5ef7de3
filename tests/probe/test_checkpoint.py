"""Checkpoint directories: there and back, transformers' own, and each kind of damage refused by file and tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from probe import Checkpoint, Decoder, Dims, load, random_weights, save
from probe.errors import BadCheckpoint, BadConfig, ProbeError
from probe.forms import BUFFERS, EXTRA
from probe.leaves import FP32, LEAVES
from probe.names import SOURCES, stored_name, stored_shapes
from probe.weights import weight_sites
from tests.oracle import Oracle, config
from tests.probe.files import INDEX, bits, edit_json, edit_shard, files_of, same
from tests.probe.small import SMALL, TIED, VARIANTS

ONE, TWO = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
TOKENS = torch.randint(0, SMALL.V, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint in two shards, bf16."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    save(random_weights(SMALL, 1), directory, shards=2)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A sound checkpoint in one file, to damage."""
    save(random_weights(SMALL, 1), tmp_path / "single")
    return tmp_path / "single"


# --- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(name: str, shards: int, tmp_path: Path) -> None:
    weights = random_weights(VARIANTS[name], 4)
    save(weights, tmp_path, dtype=torch.float32, shards=shards)
    files = sorted(path.name for path in tmp_path.iterdir())
    if shards == 1:
        assert files == ["config.json", "model.safetensors"]
    else:
        assert files == ["config.json", *(f"model-{i + 1}-of-{shards}.safetensors" for i in range(shards)), INDEX]
    same(load(tmp_path), weights)
    assert Checkpoint(tmp_path).survey.left_out == {}
    assert Checkpoint(tmp_path).notes == ()


def test_round_trip_in_bf16_keeps_the_bias_whole(tmp_path: Path) -> None:
    weights = random_weights(SMALL, 4)
    save(weights, tmp_path)
    read = load(tmp_path)
    for block, leaf in weight_sites(SMALL):
        want = weights.read(block, leaf.name)
        want = want if leaf.name == "b" else want.to(torch.bfloat16)
        want = want.float() if leaf.name in FP32 else want
        assert read.read(block, leaf.name).dtype == want.dtype
        assert torch.equal(bits(read.read(block, leaf.name)), bits(want)), leaf.name
    again = tmp_path / "again"
    save(read, again)
    same(load(again), read)


def test_saving_over_another_layout_leaves_only_the_new_one(tmp_path: Path) -> None:
    for seed, shards in enumerate((1, 2, 1)):
        weights = random_weights(SMALL, seed)
        save(weights, tmp_path, dtype=torch.float32, shards=shards)
        same(load(tmp_path), weights)


def test_saving_writes_further_keys_and_the_dtype(tmp_path: Path) -> None:
    save(random_weights(SMALL), tmp_path, dtype=torch.float32, bos_token_id=1)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (written["bos_token_id"], written["torch_dtype"], written["model_type"]) == (1, "float32", "kimi_k2")


def test_the_index_counts_bytes_and_lists_all(saved: Path) -> None:
    index = json.loads((saved / INDEX).read_text(encoding="utf-8"))
    state = {**load_file(saved / ONE), **load_file(saved / TWO)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert set(index["weight_map"]) == set(state) == set(stored_shapes(SMALL))
    assert {name: tuple(t.shape) for name, t in state.items()} == stored_shapes(SMALL)


def test_original_names() -> None:
    names = stored_shapes(SMALL)
    layer = "model.layers.1."
    assert names[f"{layer}self_attn.q_b_proj.weight"] == (2 * (6 + 4), 12)
    assert names[f"{layer}self_attn.kv_a_proj_with_mqa.weight"] == (10 + 4, 16)
    assert names[f"{layer}self_attn.kv_b_proj.weight"] == (2 * (6 + 8), 10)
    assert names[f"{layer}mlp.experts.3.down_proj.weight"] == (16, 8)
    assert names[f"{layer}mlp.shared_experts.gate_proj.weight"] == (16, 16)
    assert names[f"{layer}mlp.gate.weight"] == (4, 16)
    assert names[f"{layer}mlp.gate.e_score_correction_bias"] == (4,)
    assert names["model.layers.0.mlp.down_proj.weight"] == (16, 24)
    assert names["lm_head.weight"] == names["model.embed_tokens.weight"] == (30, 16)
    assert names["model.norm.weight"] == (16,)
    assert stored_name(2, "W_QR", VARIANTS["direct"]) == "model.layers.2.self_attn.q_proj.weight"
    assert "lm_head.weight" not in stored_shapes(TIED)
    assert set(SOURCES) == {name for name, leaf in LEAVES.items() if leaf.kind == "weight"}


def test_rows_that_share_a_module_alternate_by_head(saved: Path) -> None:
    """By hand, from the file: n rows of a head's W_UQ, then r rows of its W_QR; so too for keys and values."""
    state = {**load_file(saved / ONE), **load_file(saved / TWO)}
    at, read = "model.layers.1.self_attn.", load(saved)
    h, n, r, v = SMALL.h, SMALL.n, SMALL.r, SMALL.v
    q, kv = state[at + "q_b_proj.weight"], state[at + "kv_b_proj.weight"]
    for head in range(h):
        rows = q[head * (n + r) : (head + 1) * (n + r)]
        assert torch.equal(read.read(1, "W_UQ")[:, head * n : (head + 1) * n], rows[:n].T)
        assert torch.equal(read.read(1, "W_QR")[:, head * r : (head + 1) * r], rows[n:].T)
        rows = kv[head * (n + v) : (head + 1) * (n + v)]
        assert torch.equal(read.read(1, "W_UK")[:, head * n : (head + 1) * n], rows[:n].T)
        assert torch.equal(read.read(1, "W_UV")[:, head * v : (head + 1) * v], rows[n:].T)
    down = state[at + "kv_a_proj_with_mqa.weight"]
    assert torch.equal(read.read(1, "W_DKV"), down[: SMALL.r_kv].T)
    assert torch.equal(read.read(1, "W_KR"), down[SMALL.r_kv :].T)
    assert torch.equal(read.read(1, "W_2_e")[3], state["model.layers.1.mlp.experts.3.down_proj.weight"].T)


def test_an_edit_of_one_never_changes_its_neighbour(saved: Path) -> None:
    read, clean = load(saved), load(saved)
    pairs = (("W_UQ", "W_QR"), ("W_UK", "W_UV"), ("W_DKV", "W_KR"), ("W_1", "W_3"))
    for first, second in pairs:
        read.read(0, first).zero_()
        assert torch.equal(read.read(0, second), clean.read(0, second))
        assert read.read(0, second).any()


# --- dtypes ------------------------------------------------------------------------------------


def test_bf16_values_are_read_exactly(saved: Path) -> None:
    stored, wide = load(saved), load(saved, torch.float32)
    for block, leaf in weight_sites(SMALL):
        a, b = stored.read(block, leaf.name), wide.read(block, leaf.name)
        assert a.dtype == (torch.float32 if leaf.name in FP32 else torch.bfloat16)
        assert b.dtype == torch.float32
        assert torch.equal(bits(a.float()), bits(b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_keeps_router_weight_and_bias(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_weights(SMALL, 2)
    save(weights, tmp_path, dtype=torch.float32)
    for read in (load(tmp_path, dtype), load(tmp_path, dtype, "cpu"), Checkpoint(tmp_path, dtype)):
        for block, leaf in weight_sites(SMALL):
            tensor = read.read(block, leaf.name)
            kept = torch.float32 if leaf.name in FP32 else dtype
            assert tensor.dtype == kept
            assert torch.equal(tensor, weights.read(block, leaf.name).to(kept))  # W_g and b not rounded on the way


def test_as_stored_means_each_as_it_is_stored(saved: Path, copy: Path) -> None:
    name = "model.layers.0.input_layernorm.weight"
    file = json.loads((copy / INDEX).read_text(encoding="utf-8"))["weight_map"][name]
    edit_shard(copy / file, lambda state: state.update({name: state[name].float()}))
    for read in (load(copy), load(copy, device="cpu"), Checkpoint(copy)):
        assert read.read(0, "w_attn").dtype == torch.float32
        assert read.read(0, "w_ffn").dtype == torch.bfloat16
    assert load(copy, torch.bfloat16).read(0, "w_attn").dtype == torch.bfloat16


def test_load_onto_a_device(saved: Path) -> None:
    moved = load(saved, device="meta")
    assert all(tensor.device.type == "meta" for tensor in moved.tensors.values())
    assert moved.read(1, "W_g").dtype == torch.float32
    assert moved.read(1, "W_O").dtype == torch.bfloat16


# --- streamed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_streamed_equals_loaded(name: str, tmp_path: Path) -> None:
    dims = VARIANTS[name]
    save(random_weights(dims, 3), tmp_path, shards=2)
    streamed, loaded = Checkpoint(tmp_path), load(tmp_path)
    assert (streamed.resident, loaded.resident) == (False, True)
    same(streamed, loaded)
    assert torch.equal(streamed.read(None, "W_U"), loaded.read(None, "W_U"))
    for block, moe in enumerate(dims.moe):
        for weight in ("W_1_e", "W_3_e", "W_2_e") if moe else ():
            for experts in ([2], [0, 3], [3, 1], list(range(4))):
                assert torch.equal(streamed.read(block, weight, experts), loaded.read(block, weight, experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_streamed_runs_to_the_same_bits(saved: Path, dtype: torch.dtype) -> None:
    streamed, loaded = Decoder(Checkpoint(saved, dtype)), Decoder(load(saved, dtype))
    wanted = list(loaded.sites)
    ours, theirs = streamed.run(TOKENS, want=wanted), loaded.run(TOKENS, want=wanted)
    for site in wanted:
        assert torch.equal(ours[site], theirs[site]), site


# --- transformers ------------------------------------------------------------------------------

TRANSFORMERS = {
    "yarn": config(),
    "direct": config(q_lora_rank=None, rope_scaling=None, rms_norm_eps=1e-5),
    "groups, two shared": config(n_group=4, topk_group=2, n_shared_experts=2),
    "tied": config(tie_word_embeddings=True),
    "dense": config(first_k_dense_replace=3),
}


def logits(model: DeepseekV3ForCausalLM, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_we_read_what_transformers_saves(name: str, tmp_path: Path) -> None:
    oracle = Oracle(TRANSFORMERS[name], seed=7)
    oracle.model.save_pretrained(tmp_path)
    read = load(tmp_path)
    assert read.dims == oracle.dims
    same(read, oracle.weights())


def test_we_read_what_transformers_saves_in_shards(tmp_path: Path) -> None:
    oracle = Oracle(TRANSFORMERS["yarn"], seed=7)
    oracle.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(files_of(tmp_path)) > 2
    same(load(tmp_path), oracle.weights())


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_reads_what_we_save(name: str, shards: int, tmp_path: Path) -> None:
    oracle = Oracle(TRANSFORMERS[name], seed=8, bias=-0.5)
    save(oracle.weights(), tmp_path, dtype=torch.float32, shards=shards)
    # As kimi_k2 it would load with random experts, and only a warning.
    theirs = DeepseekV3Config.from_pretrained(tmp_path)
    theirs.model_type = "deepseek_v3"
    model, report = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, config=theirs, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, before = model.state_dict(), oracle.model.state_dict()
    assert ours.keys() == before.keys()
    for key, tensor in before.items():
        assert torch.equal(ours[key], tensor), key
    tokens = torch.randint(0, oracle.dims.V, (2, 9))
    assert torch.equal(logits(model.eval(), tokens), logits(oracle.model, tokens))


# --- what is ignored ---------------------------------------------------------------------------


def test_a_stale_rotary_buffer_is_ignored_and_listed(saved: Path, single: Path) -> None:
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(3)]
    edit_shard(single / "model.safetensors", lambda state: state.update({n: torch.full((56,), 7.0) for n in names}))
    checkpoint = Checkpoint(single)
    assert {what: sorted(left) for what, left in checkpoint.survey.left_out.items()} == {BUFFERS: names}
    assert checkpoint.notes == load(single).notes == (f"left out: 3 tensors, {BUFFERS}",)
    same(load(single), load(saved))


def test_an_extra_layer_is_ignored_where_the_config_says_so(saved: Path, single: Path) -> None:
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2), "model.layers.3.mlp.gate.weight": torch.ones(4, 16)}
    edit_shard(single / "model.safetensors", lambda state: state.update(extra))
    unknown = r"model\.layers\.3\.\S+ is no tensor of this model\. 1 more differ: `k2probe params`"
    with pytest.raises(BadCheckpoint, match=unknown):
        Checkpoint(single)
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        edit_json(single / "config.json", lambda config, key=key: config.pop("num_nextn_predict_layers", 0))
        edit_json(single / "config.json", lambda config, key=key: config.update({key: 1}))
        assert {what: set(names) for what, names in Checkpoint(single).survey.left_out.items()} == {EXTRA: set(extra)}
    same(load(single), load(saved))
    beyond = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    edit_shard(single / "model.safetensors", lambda state: state.update(beyond))
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.4"):
        Checkpoint(single)


# --- refused -----------------------------------------------------------------------------------


def refusal(directory: Path, kind: type[ProbeError] = BadCheckpoint) -> str:
    """The message that both ways to read a directory refuse it with."""
    said = []
    for ask in (Checkpoint, load):
        with pytest.raises(kind) as error:
            ask(directory)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert str(directory) in said[0]
    return said[0]


def test_no_directory(tmp_path: Path, saved: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no such directory" in refusal(saved / "config.json")


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "config.json: cannot read a config" in refusal(copy, BadConfig)


def test_a_config_that_is_not_ours(copy: Path) -> None:
    edit_json(copy / "config.json", lambda config: config.update(scoring_func="softmax"))
    with pytest.raises(BadConfig, match="scoring_func"):
        load(copy)


def test_no_weights(copy: Path) -> None:
    for file in copy.glob("model*"):
        file.unlink()
    message = refusal(copy)
    assert INDEX in message
    assert "nor model.safetensors" in message


@pytest.mark.parametrize("file", [ONE, TWO])
def test_a_missing_shard(copy: Path, file: str) -> None:
    (copy / file).unlink()
    message = refusal(copy)
    assert str(copy / file) in message
    assert "missing" in message


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
@pytest.mark.parametrize("file", [ONE, TWO])
def test_an_empty_or_truncated_shard(copy: Path, file: str, keep: int) -> None:
    whole = (copy / file).read_bytes()
    (copy / file).write_bytes(whole[:keep])
    message = refusal(copy)
    assert str(copy / file) in message
    assert "not a readable safetensors file" in message


def test_a_truncated_single_file(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors: not a readable" in refusal(single)


def test_a_directory_for_a_shard(copy: Path) -> None:
    (copy / TWO).unlink()
    (copy / TWO).mkdir()
    assert str(copy / TWO) in refusal(copy)


def test_a_tensor_that_the_index_does_not_list(copy: Path) -> None:
    edit_shard(copy / TWO, lambda state: state.update({"model.layers.9.odd.weight": torch.ones(2)}))
    message = refusal(copy)
    assert str(copy / TWO) in message
    assert "model.layers.9.odd.weight, which the index does not list there" in message


def test_a_tensor_in_two_shards(copy: Path) -> None:
    first = load_file(copy / ONE)
    name = sorted(first)[0]
    edit_shard(copy / TWO, lambda state: state.update({name: first[name]}))
    message = refusal(copy)
    assert str(copy / TWO) in message
    assert name in message


def test_a_tensor_listed_in_the_wrong_shard(copy: Path) -> None:
    name = sorted(load_file(copy / ONE))[0]
    edit_json(copy / INDEX, lambda index: index["weight_map"].update({name: TWO}))
    message = refusal(copy)
    assert name in message
    assert ONE in message or TWO in message


def test_a_stale_index(copy: Path) -> None:
    gone = sorted(load_file(copy / ONE))[0]
    edit_shard(copy / ONE, lambda state: state.pop(gone))
    message = refusal(copy)
    assert str(copy / ONE) in message
    assert f"the index says that it holds {gone}; it does not" in message


@pytest.mark.parametrize("file", ["../model-1-of-2.safetensors", "/etc/passwd", "..", "sub/model.safetensors"])
def test_an_index_that_leaves_the_directory(copy: Path, file: str) -> None:
    shutil.copy(copy / ONE, copy.parent)  # there is one, and it is sound

    def point(index: dict[str, Any]) -> None:
        index["weight_map"] = {name: file if where == ONE else where for name, where in index["weight_map"].items()}

    edit_json(copy / INDEX, point)
    message = refusal(copy)
    assert INDEX in message
    assert f"{file!r}, which is not a file of this directory" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"weight_map": [1]}', '{"weight_map": null}'])
def test_an_index_that_is_none(copy: Path, text: str) -> None:
    (copy / INDEX).write_text(text, encoding="utf-8")
    message = refusal(copy)
    assert str(copy / INDEX) in message
    assert "not an index" in message


SHAPES = {
    "transposed": ("model.layers.0.mlp.down_proj.weight", lambda t: t.T),
    "a row short": ("model.layers.1.self_attn.kv_b_proj.weight", lambda t: t[:-1]),
    "an axis more": ("model.layers.2.mlp.gate.e_score_correction_bias", lambda t: t[None]),
    "flat": ("model.embed_tokens.weight", lambda t: t.flatten()),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_wrong_shape(single: Path, case: str) -> None:
    name, change = SHAPES[case]
    edit_shard(single / "model.safetensors", lambda state: state.update({name: change(state[name])}))
    message = refusal(single)
    assert name in message
    assert f"should be {list(stored_shapes(SMALL)[name])}, and is [" in message


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.float64, "F64"), (torch.int32, "I32")],
)
def test_a_wrong_dtype(single: Path, dtype: torch.dtype, said: str) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    edit_shard(single / "model.safetensors", lambda state: state.update({name: state[name].to(dtype)}))
    message = refusal(single)
    assert f"{name} is {said}" in message
    assert "quantization_config" in message if said == "F8_E4M3" else "should be one of BF16, F16, F32" in message


def test_a_missing_tensor(single: Path) -> None:
    for name in ("model.layers.2.mlp.experts.3.down_proj.weight", "model.norm.weight"):
        edit_shard(single / "model.safetensors", lambda state, name=name: state.pop(name))
        assert f"{name} is missing" in refusal(single)
        state = {name: torch.zeros(stored_shapes(SMALL)[name])}
        edit_shard(single / "model.safetensors", lambda all_, state=state: all_.update(state))
    load(single)


def test_all_the_experts_of_a_block_missing(single: Path) -> None:
    """A config that says dense, or fewer experts, than the files hold: refused, never skipped without a word."""
    edit_json(single / "config.json", lambda config: config.update(n_routed_experts=3))
    assert "mlp.gate" in refusal(single)
    edit_json(single / "config.json", lambda config: config.update(n_routed_experts=4, num_hidden_layers=2))
    assert "model.layers.2." in refusal(single)
    edit_json(single / "config.json", lambda config: config.update(num_hidden_layers=3, first_k_dense_replace=2))
    assert "model.layers.1.mlp.gate_proj.weight is missing" in refusal(single)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.4.up_proj.weight", "odd", "model.layers.0.mlp.gate.bias"])
def test_an_unknown_tensor(single: Path, name: str) -> None:
    edit_shard(single / "model.safetensors", lambda state: state.update({name: torch.ones(8, 16)}))
    assert f"model.safetensors: {name} is no tensor of this model." in refusal(single)


def test_a_head_that_contradicts_the_config(tmp_path: Path) -> None:
    save(random_weights(SMALL), tmp_path / "untied")
    edit_json(tmp_path / "untied" / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert "lm_head.weight is there, but tie_word_embeddings is true" in refusal(tmp_path / "untied")
    save(random_weights(TIED), tmp_path / "tied")
    edit_json(tmp_path / "tied" / "config.json", lambda config: config.update(tie_word_embeddings=False))
    assert "lm_head.weight is missing, but tie_word_embeddings is false" in refusal(tmp_path / "tied")


def test_a_query_latent_that_contradicts_the_config(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(q_lora_rank=None))
    assert "self_attn.q_proj.weight is missing" in refusal(single)


def test_eleven_shards_are_all_used_and_none_is_sorted_as_a_string(tmp_path: Path) -> None:
    weights = random_weights(SMALL, 5)
    save(weights, tmp_path, dtype=torch.float32, shards=11)
    assert len(files_of(tmp_path)) == 11
    same(load(tmp_path), weights)


def test_sizes_come_from_the_config(saved: Path) -> None:
    assert load(saved).dims == Dims.from_config(saved) == SMALL
