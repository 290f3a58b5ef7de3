"""Files that others have made: how they begin, what they say twice, and what they are where they are none of ours."""

from __future__ import annotations

import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from probe import TINY, Checkpoint, Dims, Tokenizer, load, memory, random_weights, save
from probe.errors import BadCheckpoint, BadConfig, BadText, ProbeError
from probe.headers import SINGLE
from probe.params import tally
from tests.oracle import Oracle, config
from tests.probe.files import INDEX, edit_json, edit_shard, same
from tests.probe.ranks import BYTES, kimi
from tests.probe.small import SMALL, TIED


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint in two shards, bf16."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    save(random_weights(SMALL, 1), directory, shards=2)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def marked(file: Path) -> None:
    """Put a byte order mark in front of a file."""
    file.write_bytes(BOM_UTF8 + file.read_bytes())


def test_a_byte_order_mark_of_config_and_index_says_nothing(copy: Path) -> None:
    for name in ("config.json", INDEX):
        marked(copy / name)
    assert Checkpoint(copy).dims == Dims.from_config(copy) == SMALL


def test_a_byte_order_mark_of_a_tokenizer_says_nothing(tmp_path: Path) -> None:
    tiny = shutil.copytree(TINY, tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tiny / name).exists():
            marked(tiny / name)
    assert Tokenizer(tiny).encode("When Mary") == Tokenizer(TINY).encode("When Mary")
    ranks = kimi(tmp_path / "ranks", BYTES)
    before = Tokenizer(ranks).encode("Mary"), Tokenizer(ranks).id("[BOS]")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        marked(ranks / name)
    assert (Tokenizer(ranks).encode("Mary"), Tokenizer(ranks).id("[BOS]")) == before


def test_a_header_with_a_byte_order_mark_is_damaged_as_it_is_to_the_format(copy: Path) -> None:
    shard = copy / "model-1-of-2.safetensors"
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shard.write_bytes((length + 3).to_bytes(8, "little") + BOM_UTF8 + raw[8:])
    with pytest.raises(BadCheckpoint, match="begins with a byte order mark"):
        Checkpoint(copy)


def test_a_key_of_a_tokenizer_twice_is_refused(tmp_path: Path) -> None:
    said = (TINY / "tokenizer.json").read_text(encoding="utf-8")
    word = next(iter(json.loads(said)["model"]["vocab"]))
    for twice in (said.replace('"vocab": {', f'"vocab": {{{json.dumps(word)}: 3,', 1), '{"version": "1.0",' + said[1:]):
        assert twice != said
        (tmp_path / "tokenizer.json").write_text(twice, encoding="utf-8")
        with pytest.raises(BadText, match=r"tokenizer\.json: .* is in it twice"):
            Tokenizer(tmp_path)
    kimi(tmp_path / "ranks", BYTES)
    config = tmp_path / "ranks" / "tokenizer_config.json"
    config.write_text('{"bos_token": "[BOS]", "bos_token": "[EOS]"}', encoding="utf-8")
    with pytest.raises(BadText, match=r"tokenizer_config\.json: not JSON \(bos_token is in it twice\)"):
        Tokenizer(tmp_path / "ranks")


# ---- weights in other forms ------------------------------------------------------------------------------------------


def refusal(directory: Path, error: type[ProbeError] = BadCheckpoint) -> str:
    """What opening is refused with, and so is asking for the memory."""
    said = []
    for ask in (Checkpoint, memory):
        with pytest.raises(error) as refused:
            ask(directory)
        said.append(str(refused.value))
    assert said[0] == said[1]
    return said[0]


EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"
ATTENTION = "model.layers.0.self_attn.o_proj.weight"
FORMS: dict[str, tuple[dict[str, Tensor], str]] = {
    "GPTQ": ({f"{EXPERT[:-6]}qweight": torch.ones(2, 2, dtype=torch.int32)}, "is of the form of GPTQ or AWQ"),
    "bitsandbytes": (
        {f"{ATTENTION}.quant_state.bitsandbytes__nf4": torch.ones(9, dtype=torch.uint8)},
        "is of the form of bitsandbytes",
    ),
    "bitsandbytes, 8 bit": ({f"{ATTENTION[:-6]}SCB": torch.ones(3)}, "is of the form of bitsandbytes"),
    "NVFP4 of ModelOpt": ({f"{EXPERT}_scale_2": torch.ones(())}, "is of the form of NVFP4"),
    "NVFP4 of compressed-tensors": ({f"{EXPERT}_global_scale": torch.ones(1)}, "is of the form of NVFP4"),
    "MXFP4": (
        {"model.layers.1.mlp.experts.down_proj_blocks": torch.ones(4, dtype=torch.uint8)},
        "is of the form of MXFP4",
    ),
    "MLX": ({f"{ATTENTION[:-6]}biases": torch.ones(3)}, "is of the form of MLX"),
    "MLX, in full": ({"model.layers.1.mlp.switch_mlp.up_proj.weight": torch.ones(3)}, "is of the form of MLX"),
    "an adapter": ({f"base_model.model.{ATTENTION[:-6]}lora_A.weight": torch.ones(3)}, "is an adapter's (LoRA)"),
    "fused experts": (
        {"model.layers.1.mlp.experts.gate_up_proj": torch.ones(3)},
        "holds all experts of a block in one",
    ),
    "a server's experts": ({"model.layers.1.mlp.experts.w13_weight": torch.ones(3)}, "holds all experts of a block"),
    "a server's latents": (
        {"model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight": torch.ones(3)},
        "holds two matrices in one (fused)",
    ),
    "DeepSeek's own names": ({"layers.0.attn.wkv_a.weight": torch.ones(3)}, "is called as in DeepSeek's own inference"),
    "GGUF's names": ({"blk.0.attn_kv_a_mqa.weight": torch.ones(3)}, "is of the form of GGUF"),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_another_form_are_refused_by_it(form: str, tmp_path: Path) -> None:
    """In place of the weights, or of one of them: what is missing first is not what is told."""
    tensors, said = FORMS[form]
    (name,) = tensors
    save(random_weights(SMALL, 1), tmp_path / "some")
    edit_shard(
        tmp_path / "some" / SINGLE, lambda state: (state.pop(EXPERT), state.pop(ATTENTION), state.update(tensors))
    )
    shutil.copytree(tmp_path / "some", tmp_path / "all")
    save_file(tensors, tmp_path / "all" / SINGLE)
    for directory in (tmp_path / "some", tmp_path / "all"):
        assert refusal(directory).startswith(f"{directory / SINGLE}: {name} {said}")
        assert name in tally(directory).faults[0]


def test_transformers_own_state_is_refused_as_fused(tmp_path: Path) -> None:
    oracle = Oracle(config())
    save(oracle.weights(), tmp_path)
    assert Checkpoint(tmp_path)
    save_file({key: tensor.contiguous() for key, tensor in oracle.model.state_dict().items()}, tmp_path / SINGLE)
    assert "experts.down_proj holds all experts of a block in one tensor (fused)" in refusal(tmp_path)
    assert "save_pretrained of transformers 5" in refusal(tmp_path)


def test_names_with_another_prefix_are_told(tmp_path: Path) -> None:
    save(random_weights(SMALL, 1), tmp_path)
    state = load_file(tmp_path / SINGLE)
    save_file({f"model.language_{name}": tensor for name, tensor in state.items()}, tmp_path / SINGLE)
    said = "model.embed_tokens.weight is missing: it is called model.language_model.embed_tokens.weight here"
    assert said in refusal(tmp_path)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.quant_method: 'awq'"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.quant_method: 'gptq'"),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "quantization_config.quant_method: 'bitsandbytes'",
    ),
    "modelopt": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "quantization_config.quant_method: 'modelopt' ('NVFP4')",
    ),
    "mlx": (
        {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 4, "group_size": 64}},
        "quantization: {'bits': 4, 'group_size': 64} is of MLX' form",
    ),
}


@pytest.mark.parametrize("form", CONFIGS)
def test_another_quantisation_is_refused_by_the_config(form: str, copy: Path) -> None:
    change, said = CONFIGS[form]
    edit_json(copy / "config.json", lambda config: config.update(change))
    assert f"config.json: {said}" in refusal(copy, BadConfig)
    assert "take the checkpoint that it was made from" in refusal(copy, BadConfig)


@pytest.mark.parametrize("name", ["model-q4_k_m.gguf", "weights.npz", "pytest_model.bin", "consolidated.00.pth"])
@pytest.mark.parametrize("config", [True, False])
def test_other_files_are_refused_by_what_they_are(name: str, config: bool, saved: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    if config:
        shutil.copy(saved / "config.json", tmp_path)
    said = {"gguf": "GGUF", "npz": "MLX", "bin": "pickled", "pth": "pickled"}[name.split(".")[-1]]
    assert refusal(tmp_path).startswith(f"{tmp_path / name}: it is ")
    assert said in refusal(tmp_path)
    assert said in refusal(tmp_path / name), "and where it is named itself"


def test_an_adapter_is_refused_as_one(copy: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "moonshotai/Kimi-K2-Instruct"}')
    assert "an adapter (LoRA) without its base, 'moonshotai/Kimi-K2-Instruct': merge it" in refusal(adapter)
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1)}, adapter / "adapter_model.safetensors")
    assert "adapter_model.safetensors: an adapter (LoRA) without its base" in refusal(adapter)
    shutil.copy(adapter / "adapter_config.json", copy)
    assert Checkpoint(copy).dims == SMALL, "merged, and its config left behind"
    shutil.copy(adapter / "adapter_model.safetensors", copy)
    assert "adapter_model.safetensors: an adapter (LoRA) beside the weights: move it away, or merge" in refusal(copy)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint32, torch.int8, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("name", [ATTENTION, "lm_head.weight", "model.layers.1.mlp.gate.weight"])
def test_a_dtype_that_is_not_read_is_told_by_memory_too(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    save(random_weights(SMALL, 1), tmp_path)
    edit_shard(tmp_path / SINGLE, lambda state: state.update({name: torch.ones(state[name].shape).to(dtype)}))
    for asked in (None, torch.float32):
        with pytest.raises(BadCheckpoint) as refused:
            memory(tmp_path, asked)
        assert str(refused.value) == refusal(tmp_path)
    assert f"{SINGLE}: {name} is " in refusal(tmp_path)
    assert "it should be one of BF16, F16, F32" in refusal(tmp_path)


def test_memory_counts_what_is_missing_as_none(tmp_path: Path) -> None:
    save(random_weights(SMALL, 1), tmp_path)
    before = memory(tmp_path).choices["stored"].held
    edit_shard(tmp_path / SINGLE, lambda state: state.pop(ATTENTION))
    assert memory(tmp_path).choices["stored"].held == before - 2 * SMALL.d * SMALL.h * SMALL.v


# ---- a tied head that is stored --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "kimi_k25"])
def test_a_tied_head_that_is_stored_all_the_same(kind: str | None, tmp_path: Path) -> None:
    save(random_weights(TIED, 1), tmp_path, shards=2, **({} if kind is None else {"model_type": kind}))
    before = load(tmp_path)
    shard, index = tmp_path / "model-2-of-2.safetensors", tmp_path / INDEX
    embedding = load_file(tmp_path / "model-1-of-2.safetensors")
    (name,) = (name for name in embedding if name.endswith("embed_tokens.weight"))
    head = name.replace("model.embed_tokens", "lm_head") if kind is None else "language_model.lm_head.weight"
    edit_shard(shard, lambda state: state.update({head: embedding[name]}))
    edit_json(index, lambda said: said["weight_map"].update({head: shard.name}))
    same(before, load(tmp_path))
    assert tally(tmp_path).faults == []
    assert tally(tmp_path).total == sum(t.numel() for key, t in before.tensors.items() if key != (None, "W_U"))
    other = embedding[name].clone()
    other[-1, -1] += 1
    for changed in (other, embedding[name].float(), embedding[name][:-1].clone()):
        edit_shard(shard, lambda state, changed=changed: state.update({head: changed}))
        with pytest.raises(BadCheckpoint, match=f"{head} is there, but tie_word_embeddings is true"):
            load(tmp_path)
