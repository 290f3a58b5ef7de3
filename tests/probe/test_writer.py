"""The writer: every form there and back, K2's own sizes, the library's own bytes, little memory, all or nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from probe import KIMI_K2, Checkpoint, Decoder, Dims, Drawn, InMemory, Weights, from_state, load, random_weights, save
from probe.config import Layout
from probe.errors import BadCheckpoint, BadConfig, ShapeMismatch
from probe.forms import Form
from probe.quantised import dequantise_int4, plain_fp8, quantise_fp8, quantise_int4
from probe.weights import weight_sites
from probe.writer import _bytes, _cut, _modules
from tests.probe.small import SMALL, VARIANTS

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
FORMS: tuple[Form, ...] = ("plain", "fp8", "int4")

RAGGED = replace(SMALL, d=160, r_q=72, r_kv=132, n=70, r=26, v=66, f=300, m=64, m_s=128)
"""Blocks of 128 end inside heads (192, 272 rows) and inside matrices in both directions; d and m are whole groups."""

EVEN = replace(
    KIMI_K2, d=256, r_q=128, r_kv=112, h=4, n=16, r=16, v=16, f=384, e=4, k=2, m=128, m_s=128, V=64, moe=(False, True)
)
"""Every matrix is whole blocks: transformers takes rows / scales for the size of a block."""


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(ours: Weights, theirs: Weights) -> None:
    """Every weight equal, bit for bit."""
    for block, leaf in weight_sites(ours.dims):
        a, b = ours.read(block, leaf.name), theirs.read(block, leaf.name)
        assert a.dtype == b.dtype, leaf.name
        assert a.shape == b.shape, leaf.name
        assert torch.equal(bits(a), bits(b)), (block, leaf.name)


def state_of(directory: Path) -> dict[str, Tensor]:
    """All tensors, as the safetensors library reads them."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def shapes(directory: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (t.dtype, tuple(t.shape)) for name, t in state_of(directory).items()}


# --- the forms ---------------------------------------------------------------------------------

TAKEN = {
    "plain": r"nothing",
    "fp8": r"model\.layers\.\d+\.(self_attn|mlp).*_proj\w*\.weight",
    "int4": r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight",
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_holds_what_it_should(form: Form, tmp_path: Path) -> None:
    """Every matrix is the plain one, quantised if this form takes it, else cast."""
    save(Drawn(RAGGED, 1), tmp_path / "fp32", dtype=torch.float32)
    save(Drawn(RAGGED, 1), tmp_path / form, form=form)
    state, taken = state_of(tmp_path / form), 0
    for name, whole in state_of(tmp_path / "fp32").items():
        if not re.fullmatch(TAKEN[form], name):
            dtype = torch.float32 if name.endswith("bias") else torch.bfloat16
            assert torch.equal(state.pop(name), whole.to(dtype)), name
        elif form == "fp8":
            taken += 1
            for ours, want in zip((state.pop(name), state.pop(f"{name}_scale_inv")), quantise_fp8(whole), strict=True):
                assert torch.equal(bits(ours), bits(want)), name
        else:
            taken += 1
            packed, scale = quantise_int4(whole)
            for end, want in (("packed", packed), ("scale", scale), ("shape", torch.tensor(whole.shape).int())):
                assert torch.equal(state.pop(f"{name}_{end}"), want), name
    assert not state
    assert taken == {"plain": 0, "fp8": 3 * 5 + 3 + 2 * (4 + 1) * 3, "int4": 2 * 4 * 3}[form]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_is_what_was_written(form: Form, tmp_path: Path) -> None:
    """Through our reader, against the stored tensors expanded by the obvious expression."""
    save(Drawn(RAGGED, 1), tmp_path / "quantised", form=form, shards=2)
    state, plain = state_of(tmp_path / "quantised"), {}
    for name, tensor in state.items():
        if name.endswith("_packed"):
            base = name.removesuffix("_packed")
            out, into = state[f"{base}_shape"].tolist()
            plain[base] = dequantise_int4(tensor, state[f"{base}_scale"], (out, into))
        elif tensor.dtype == torch.float8_e4m3fn:
            plain[name] = plain_fp8(tensor, state[f"{name}_scale_inv"])
        elif not name.endswith(("_scale", "_shape", "_scale_inv")):
            plain[name] = tensor
    save(random_weights(RAGGED), tmp_path / "plain")
    assert {name: tensor.shape for name, tensor in plain.items()} == {
        name: tensor.shape for name, tensor in state_of(tmp_path / "plain").items()
    }
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    same(load(tmp_path / "quantised"), load(tmp_path / "plain"))
    same(Checkpoint(tmp_path / "quantised"), load(tmp_path / "plain"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_model_in_every_form(variant: str, form: Form, tmp_path: Path) -> None:
    dims = replace(VARIANTS[variant], d=32, m=32 * any(VARIANTS[variant].moe), m_s=32 * any(VARIANTS[variant].moe))
    if form == "int4" and not any(dims.moe):
        with pytest.raises(BadCheckpoint, match="int4 is for routed experts alone"):
            save(random_weights(dims), tmp_path, form=form)
        assert not list(tmp_path.iterdir())
        return
    weights = random_weights(dims, 2)
    save(weights, tmp_path, form=form)
    tokens = torch.arange(6)[None]
    read = load(tmp_path, torch.float32)
    assert read.dims == dims
    near = {"plain": 0.05, "fp8": 0.4, "int4": 1.0}[form]
    for block, leaf in weight_sites(dims):
        a, b = read.read(block, leaf.name), weights.read(block, leaf.name)
        assert (a - b).abs().max() <= near * b.abs().max() * 2**-2, leaf.name
    assert Decoder(read).run(tokens, want=["logits"])


def test_numbers_that_bf16_and_fp8_hold_come_back_exactly(tmp_path: Path) -> None:
    """Whole numbers up to 16 with a 14 in every block: its scale is 2^-5."""
    weights = random_weights(RAGGED, 3)
    for key, tensor in weights.tensors.items():
        if tensor.ndim > 1 and key[0] is not None:
            tensor.copy_(
                torch.randint(-14, 15, tensor.shape, generator=torch.Generator().manual_seed(1)).clamp(-14, 14)
            )
    save(weights, tmp_path, form="fp8")
    read = load(tmp_path, torch.float32)
    for block, leaf in weight_sites(RAGGED):
        if block is not None and len(leaf.shape) > 1 and leaf.name != "W_g":
            assert torch.equal(read.read(block, leaf.name), weights.read(block, leaf.name)), leaf.name


# --- as published ------------------------------------------------------------------------------

TWO = replace(KIMI_K2, moe=(False, True))
"""Kimi K2's first block and any other one."""

FP8_BLOCK_0, FP8_BLOCK, FP8_LAST = 2_846_448_464, 17_066_299_728, 19_415_124_304
"""Bytes of tensors in Kimi-K2-Instruct's shards 1, 2 and 61, by a dump of their headers; each with an inv_freq."""

INT4_BLOCK_0, INT4_BLOCK, INT4_REST = 995_000_320, 9_808_554_496, 4_697_634_816
"""Kimi-K2-Thinking's: block 0, any other, and embedding, final norm and head."""

INV_FREQ = 2 * 56


def test_k2s_own_sizes_fp8() -> None:
    first, last = _cut(_modules(TWO, "fp8", torch.bfloat16, Layout()), "blocks", 2)
    assert _bytes(first) + INV_FREQ == FP8_BLOCK_0
    assert _bytes(last) + INV_FREQ == FP8_LAST
    assert _bytes({name: what for name, what in last.items() if ".layers." in name}) + INV_FREQ == FP8_BLOCK
    counts = [sum(f".layers.{block}." in name for name in (*first, *last)) for block in (0, 1)]
    assert counts == [21 - 1, 2_327 - 1]
    kv = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert last[kv] == (torch.float8_e4m3fn, (576, 7168))
    assert last[f"{kv}_scale_inv"] == (torch.float32, (5, 56))
    assert last["model.layers.1.mlp.gate.weight"] == (torch.bfloat16, (384, 7168))
    assert last["model.layers.1.mlp.gate.e_score_correction_bias"] == (torch.float32, (384,))


def test_k2_thinkings_own_sizes_int4() -> None:
    first, last = _cut(_modules(TWO, "int4", torch.bfloat16, Layout()), "blocks", 2)
    blocks = [_bytes({n: what for n, what in part.items() if ".layers." in n}) for part in (first, last)]
    assert blocks == [INT4_BLOCK_0, INT4_BLOCK]
    assert _bytes(first) + _bytes(last) - sum(blocks) == INT4_REST
    assert len(first) + 60 * (len(last) - 2) + 2 == 208_215
    down = "model.layers.1.mlp.experts.383.down_proj.weight"
    assert last[f"{down}_packed"] == (torch.int32, (7168, 256))
    assert last[f"{down}_scale"] == (torch.bfloat16, (7168, 64))


def test_the_config_says_how(tmp_path: Path) -> None:
    for form in FORMS:
        save(Drawn(RAGGED), tmp_path, form=form)
        said = read_json(tmp_path / "config.json")
        assert (said["model_type"], said["torch_dtype"]) == ("kimi_k2", "bfloat16")
        if form == "plain":
            assert "quantization_config" not in said
        elif form == "fp8":
            assert said["quantization_config"] == {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
            }
        else:
            quantised = said["quantization_config"]
            assert (quantised["quant_method"], quantised["format"]) == ("compressed-tensors", "pack-quantized")
            weights = quantised["config_groups"]["group_0"]["weights"]
            wanted = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"}
            assert wanted.items() <= weights.items()


@pytest.mark.parametrize("form", FORMS)
def test_the_text_part_of_a_model_that_sees(form: Form, tmp_path: Path) -> None:
    save(Drawn(RAGGED, 1), tmp_path / "text", form=form)
    save(Drawn(RAGGED, 1), tmp_path / "sees", form=form, model_type="kimi_k25", bos_token_id=3)
    text, sees = shapes(tmp_path / "text"), shapes(tmp_path / "sees")
    assert sees == {f"language_model.{name}": what for name, what in text.items()}
    said = read_json(tmp_path / "sees" / "config.json")
    assert said.keys() == {"architectures", "model_type", "text_config", "tie_word_embeddings"}
    assert said["model_type"] == "kimi_k25"
    assert (said["text_config"]["model_type"], said["text_config"]["bos_token_id"]) == ("kimi_k2", 3)
    same(load(tmp_path / "sees"), load(tmp_path / "text"))


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_transformers_expands_it_to_the_same_numbers(form: Form, tmp_path: Path) -> None:
    if form == "int4":
        pytest.importorskip("compressed_tensors", reason="transformers reads INT4 with this package")
    save(Drawn(EVEN, 3), tmp_path, form=form, shards=2)
    config = DeepseekV3Config.from_pretrained(tmp_path)
    config.model_type = "deepseek_v3"
    model, report = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="eager", output_loading_info=True, dtype=torch.bfloat16
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same(load(tmp_path), from_state(model.state_dict(), EVEN))


# --- the files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_each_file_is_the_librarys_own_byte_for_byte(form: Form, dtype: torch.dtype, tmp_path: Path) -> None:
    save(Drawn(RAGGED, 1), tmp_path, form=form, dtype=dtype, shards=3)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        save_file(load_file(file), tmp_path / "theirs", metadata={"format": "pt"})
        assert file.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_index_counts_bytes_and_lists_all(tmp_path: Path) -> None:
    save(Drawn(RAGGED), tmp_path, form="fp8", shards=4)
    index = read_json(tmp_path / INDEX)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state_of(tmp_path).values())
    for file in set(index["weight_map"].values()):
        assert set(load_file(tmp_path / file)) == {n for n, where in index["weight_map"].items() if where == file}


def test_a_file_a_block(tmp_path: Path) -> None:
    save(Drawn(RAGGED), tmp_path, form="int4", shards="blocks")
    held = [set(load_file(tmp_path / f"model-{i + 1}-of-3.safetensors")) for i in range(3)]
    for i, names in enumerate(held):
        layers = {name for name in names if name.startswith("model.layers.")}
        assert {name.split(".")[2] for name in layers} == {str(i)}
        around = [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", "lm_head.weight"}]
        assert names - layers == around[i]
    same(load(tmp_path), load(_single(Drawn(RAGGED), tmp_path / "one", form="int4")))


def _single(weights: Weights, directory: Path, **options: Any) -> Path:
    save(weights, directory, **options)
    return directory


def test_a_scale_may_lie_in_another_file_than_its_weight(tmp_path: Path) -> None:
    save(Drawn(RAGGED), tmp_path / "seven", form="fp8", shards=7)
    where = read_json(tmp_path / "seven" / INDEX)["weight_map"]
    apart = [n for n in where if n.endswith("_scale_inv") and where[n] != where[n.removesuffix("_scale_inv")]]
    assert apart
    same(load(tmp_path / "seven"), load(_single(Drawn(RAGGED), tmp_path / "one", form="fp8")))


# --- from any weights --------------------------------------------------------------------------

ANY: dict[str, Callable[[Path], Weights]] = {
    "in memory": lambda _: InMemory(
        RAGGED, {(b, leaf.name): Drawn(RAGGED, 4).read(b, leaf.name) for b, leaf in weight_sites(RAGGED)}
    ),
    "parameters": lambda _: InMemory(
        RAGGED,
        {(b, leaf.name): torch.nn.Parameter(Drawn(RAGGED, 4).read(b, leaf.name)) for b, leaf in weight_sites(RAGGED)},
    ),
    "a checkpoint": lambda place: Checkpoint(_single(Drawn(RAGGED, 4), place / "fp32", dtype=torch.float32)),
}


@pytest.mark.parametrize("source", ANY)
@pytest.mark.parametrize("form", FORMS)
def test_any_weights_give_the_same_files(source: str, form: Form, tmp_path: Path) -> None:
    save(Drawn(RAGGED, 4), tmp_path / "drawn", form=form)
    save(ANY[source](tmp_path), tmp_path / "other", form=form)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "drawn" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_weights_of_two_dtypes_that_share_a_matrix(tmp_path: Path) -> None:
    weights = random_weights(SMALL, 1)
    for name in ("W_UQ", "W_UV"):
        weights.tensors[1, name] = weights.tensors[1, name].to(torch.bfloat16)
    save(weights, tmp_path, dtype=torch.float32)
    for name in ("W_UQ", "W_QR", "W_UK", "W_UV"):
        assert torch.equal(load(tmp_path).read(1, name), weights.read(1, name).float())


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_made_plain_is_the_same_model(form: Form, tmp_path: Path) -> None:
    save(Drawn(RAGGED, 5), tmp_path, form=form, shards=2)
    read = load(tmp_path)
    save(Checkpoint(tmp_path), tmp_path, shards=3)  # into its own place
    same(load(tmp_path), read)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


# --- all or nothing ----------------------------------------------------------------------------


class Failing:
    """Weights that end in the middle."""

    resident = False

    def __init__(self, dims: Dims, error: BaseException) -> None:
        self.dims, self.error, self.left = dims, error, 20

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        self.left -= 1
        if not self.left:
            raise self.error
        return Drawn(self.dims).read(block, name, experts)


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_failed_save_leaves_what_was_there(error: BaseException, shards: int, tmp_path: Path) -> None:
    save(random_weights(SMALL, 1), tmp_path, shards=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(type(error)):
        save(Failing(SMALL, error), tmp_path, shards=shards)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_saving_over_another_checkpoint_leaves_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    for seed, shards in enumerate((1, 5, 3, 1, 2)):
        save(random_weights(SMALL, seed), tmp_path, dtype=torch.float32, shards=shards)
        files = {f"model-{i + 1}-of-{shards}.safetensors" for i in range(shards)} | {INDEX}
        kept = {"config.json", "tokenizer.json"}
        assert {p.name for p in tmp_path.iterdir()} == kept | (files if shards > 1 else {"model.safetensors"})
        same(load(tmp_path), random_weights(SMALL, seed))


# --- refused -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another form": ({"form": "fp4"}, "form: 'fp4' is not one of plain, fp8, int4"),
    "another dtype": ({"dtype": torch.float64}, "dtype: torch.float64 is not one of torch.bfloat16, torch.float16"),
    "no file": ({"shards": 0}, r"shards: 0 should be 1 to \d+, the number of tensors, or 'blocks'"),
    "more files than tensors": ({"shards": 10_000}, "shards: 10000 should be 1 to"),
    "files by another word": ({"shards": "layers"}, "shards: 'layers' should be"),
    "a width that is no whole number of groups": ({"form": "int4"}, "16 is no multiple"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    options, said = REFUSED[case]
    with pytest.raises(BadCheckpoint, match=said):
        save(random_weights(SMALL), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_sizes_that_a_config_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="m_s: 12 of these sizes would be read"):
        save(random_weights(replace(SMALL, m_s=12)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_weight_that_is_no_number_is_named(form: Form, tmp_path: Path) -> None:
    weights = random_weights(RAGGED)
    weights.read(2, "W_3_e")[3, 5, 7] = torch.nan
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight: a weight of"):
        save(weights, tmp_path, form=form)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_as_large_as_they_say(tmp_path: Path) -> None:
    with pytest.raises(ShapeMismatch, match=r"weight W_1 of block 0 should be \[16, 25\], and is \[16, 24\]"):
        save(_Lying(), tmp_path)


class _Lying:
    resident = False
    dims = replace(SMALL, f=25)

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        return Drawn(SMALL).read(block, name, experts)


# --- memory ------------------------------------------------------------------------------------

MEMORY = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from probe import KIMI_K2, Drawn, random_weights, save
torch.set_num_threads(1)
small = {"d": 512, "r_q": 64, "r_kv": 64, "h": 4, "n": 16, "r": 16, "v": 16, "f": 1024, "m": 256, "m_s": 256, "V": 512}
dims = replace(KIMI_K2, **small, e=96, moe=(False, True))
def most():  # of this program: getrusage would count what forked it
    line, = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
for form in ("plain", "fp8", "int4"):
    save(Drawn(replace(dims, e=8), 1), sys.argv[1], form=form)  # what libraries take once
before = most()
for form in ("plain", "fp8", "int4"):
    save(Drawn(dims, 1), sys.argv[1], form=form)
    print(form, sum(path.stat().st_size for path in Path(sys.argv[1]).iterdir()))
print("streamed", most() - before)
weights = random_weights(dims)
print("in memory", most() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much a program had at most")
def test_no_more_than_a_tensor_is_in_memory(tmp_path: Path) -> None:
    """The growth of the process's peak over three forms of a model of 150 MB, none of whose tensors has 3 MB."""
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    said = {what: int(count) for what, count in (line.rsplit(" ", 1) for line in ran.stdout.splitlines())}
    assert said["plain"] > 75e6
    assert said["fp8"] > 38e6
    assert said["streamed"] < 10e6
    assert said["in memory"] > 120e6
