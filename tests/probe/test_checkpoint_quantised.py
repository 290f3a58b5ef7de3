"""FP8, INT4 and a model that sees: each weight as a naive loop makes it, however it is kept; each damage refused."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from probe import Checkpoint, Decoder, InMemory, load, memory, random_weights, save
from probe import checkpoint as module
from probe.errors import BadCheckpoint, BadConfig, Missing, OutOfRange, ProbeError, TooLarge
from probe.forms import SIGHT
from probe.leaves import FP32, LEAVES
from probe.names import stored_shapes
from probe.weights import weight_sites
from tests.probe.files import INDEX, bits, edit_json, edit_shard, same
from tests.probe.small import SMALL

RAGGED = replace(SMALL, d=160, r_q=136, r_kv=512, n=32, r=64, v=72, f=200, m=96, m_s=96, k=1)
"""576 rows, 192 rows and ragged blocks on both sides; widths of experts that INT4's groups divide."""

TOKENS = torch.randint(0, RAGGED.V, (2, 6), generator=torch.Generator().manual_seed(0))
KINDS: dict[str, dict[str, Any]] = {
    "fp8": {"form": "fp8"},
    "int4": {"form": "int4"},
    "k25": {"form": "int4", "model_type": "kimi_k25"},
}
PREFIX = "language_model."
table = sys.modules["probe.memory"]  # the module; the package has the function by that name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint of each kind, in three shards."""
    home = tmp_path_factory.mktemp("made")
    for kind, how in KINDS.items():
        save(random_weights(RAGGED, 3), home / kind, shards=3, **how)
    return home


@pytest.fixture
def fp8(made: Path, tmp_path: Path) -> Path:
    """A copy of the FP8 one in a single file, to damage."""
    return single(made / "fp8", tmp_path / "fp8")


@pytest.fixture
def int4(made: Path, tmp_path: Path) -> Path:
    return single(made / "int4", tmp_path / "int4")


def single(directory: Path, to: Path) -> Path:
    to.mkdir()
    save_file(files(directory), to / "model.safetensors")
    shutil.copy(directory / "config.json", to)
    return to


def files(directory: Path) -> dict[str, Tensor]:
    """All tensors, as the safetensors library reads them."""
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Tensors of the single file set to others, or taken out; ``X__y`` is spelt X.y."""

    def edit(state: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            state.pop(name, None)
            if tensor is not None:
                state[name] = tensor

    edit_shard(directory / "model.safetensors", edit)


def naive_fp8(stored: Tensor, scale: Tensor) -> Tensor:
    out = torch.zeros(stored.shape)
    for i, j in product(range(0, stored.shape[0], 128), range(0, stored.shape[1], 128)):
        out[i : i + 128, j : j + 128] = stored[i : i + 128, j : j + 128].float() * scale[i // 128, j // 128]
    return out.bfloat16()


def naive_int4(packed: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    rows, columns = shape.tolist()
    words, factors = packed.tolist(), scale.float().tolist()
    out = [
        [(((words[o][i // 8] & 0xFFFFFFFF) >> 4 * (i % 8) & 15) - 8) * factors[o][i // 32] for i in range(columns)]
        for o in range(rows)
    ]
    return torch.tensor(out).bfloat16()


def naive(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the files mean, as a plain checkpoint would hold it."""
    plain = {}
    for full, tensor in state.items():
        name = full.removeprefix(PREFIX)
        if full + "_scale_inv" in state:
            plain[name] = naive_fp8(tensor, state[full + "_scale_inv"])
        elif name.endswith("_packed"):
            base = full.removesuffix("_packed")
            plain[name.removesuffix("_packed")] = naive_int4(tensor, state[base + "_scale"], state[base + "_shape"])
        elif not name.endswith(("_scale_inv", "_scale", "_shape")):
            plain[name] = tensor
    return plain


@pytest.fixture(scope="module")
def plain(made: Path) -> Path:
    """Of each kind, the plain checkpoint that the naive loop makes of it."""
    home = made / "plain"
    for kind in KINDS:
        save(random_weights(RAGGED, 3), home / kind)
        save_file(naive(files(made / kind)), home / kind / "model.safetensors")
    return home


# --- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("keep", ["expanded", "stored", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_what_a_naive_loop_makes(
    kind: str, keep: Any, dtype: torch.dtype | None, made: Path, plain: Path
) -> None:
    ours, theirs = load(made / kind, dtype, keep=keep), load(plain / kind, dtype)
    same(ours, theirs)
    assert ours.read(0, "W_1").dtype == (dtype or torch.bfloat16)
    for block in (1, 2):
        for weight in ("W_1_e", "W_3_e", "W_2_e"):
            assert torch.equal(ours.read(block, weight, [3, 1]), theirs.read(block, weight, [3, 1]))


def test_one_element_by_hand(made: Path) -> None:
    """Row 575, column 159 of the 576 × 160: the last of W_KR, in the ragged fifth row of blocks."""
    state, name = files(made / "fp8"), "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert tuple(state[name + "_scale_inv"].shape) == (5, 2)
    value = float(state[name][575, 159]) * float(state[name + "_scale_inv"][4, 1])
    assert float(load(made / "fp8").read(1, "W_KR")[159, 63]) == float(torch.tensor(value).bfloat16())


def test_it_runs_as_transformers_runs_the_plain_one(made: Path, plain: Path) -> None:
    for kind in KINDS:
        config = DeepseekV3Config.from_pretrained(plain / kind)
        config.model_type = "deepseek_v3"  # as kimi_k2 it would load with random experts, and only a warning
        model = DeepseekV3ForCausalLM.from_pretrained(
            plain / kind, config=config, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            theirs = model(TOKENS, use_cache=False).logits
        for keep in ("expanded", "stored", "disk"):
            ours = Decoder(load(made / kind, torch.float32, keep=keep))(TOKENS)
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(theirs.abs().max())))
    assert float((theirs - Decoder(random_weights(RAGGED, 3))(TOKENS)).abs().max()) > 1e-2  # quantising did something


def test_transformers_reads_our_fp8_where_it_can(tmp_path: Path) -> None:
    """Where all sizes are multiples of 128: elsewhere it guesses the block size from the shapes, and guesses wrong."""
    whole = replace(RAGGED, d=128, r_q=128, r_kv=64, r=64, n=64, v=64, f=256, m=128, m_s=128)
    save(random_weights(whole, 5), tmp_path, form="fp8")
    config = DeepseekV3Config.from_pretrained(tmp_path)
    config.model_type = "deepseek_v3"
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.bfloat16)
    theirs, ours = model.state_dict(), load(tmp_path)
    assert torch.equal(theirs["model.layers.0.mlp.down_proj.weight"], ours.read(0, "W_2").T)
    assert torch.equal(theirs["model.layers.1.self_attn.o_proj.weight"], ours.read(1, "W_O").T)
    assert torch.equal(theirs["model.layers.2.mlp.experts.down_proj"], ours.read(2, "W_2_e").transpose(1, 2))


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_scales_may_be_in_any_shard(kind: str, made: Path, tmp_path: Path) -> None:
    state = files(made / kind)
    shutil.copy(made / kind / "config.json", tmp_path)
    weight_map = {}
    for file, chosen in (("a.safetensors", False), ("b.safetensors", True)):
        part = {name: t for name, t in state.items() if ("_scale" in name) == chosen}
        save_file(part, tmp_path / file)
        weight_map.update(dict.fromkeys(part, file))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    same(load(tmp_path), load(made / kind))


# --- ways to keep ------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all tensors that are read from here on."""
    seen: list[str] = []
    real = module.read_tensor

    def read_tensor(directory: Path, name: str, stored: Any) -> Tensor:
        seen.append(name)
        return real(directory, name, stored)

    monkeypatch.setattr(module, "read_tensor", read_tensor)
    return seen


def test_opening_reads_no_weight(made: Path, reads: list[str]) -> None:
    for kind in KINDS:
        Checkpoint(made / kind)
        memory(made / kind)
    assert reads == []


def test_only_what_a_plan_reads_is_read(made: Path, reads: list[str]) -> None:
    weights = load(made / "fp8", keep="disk")
    assert reads == []
    Decoder(weights).run(TOKENS, want=["blocks.0.c_KV"])
    down = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    gains = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
    assert sorted(reads) == sorted([*gains, down, down + "_scale_inv"])
    reads.clear()
    weights.read(1, "W_2_e", [2])
    assert reads == [f"model.layers.1.mlp.experts.2.down_proj.weight{end}" for end in ("", "_scale_inv")]


def test_each_tensor_is_read_once_into_stored_form_and_never_after(made: Path, reads: list[str]) -> None:
    weights = load(made / "int4", keep="stored")
    assert sorted(reads) == sorted(files(made / "int4"))
    reads.clear()
    Decoder(weights)(TOKENS)
    weights.read(1, "W_2_e", [2])
    assert reads == []


def test_only_chosen_experts_are_expanded(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, expanded = load(made / "fp8", keep="stored"), []
    real = module.dequantise_fp8

    def dequantise(values: Tensor, scale: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        expanded.append(values.shape)
        return real(values, scale, *args, **kwargs)

    monkeypatch.setattr(module, "dequantise_fp8", dequantise)
    run = Decoder(weights).run(TOKENS[:1, :2], want=["blocks.1.experts", "logits"])
    chosen = len(run[next(iter(run))].unique())
    assert chosen < RAGGED.e
    assert expanded.count(torch.Size([RAGGED.d, RAGGED.m])) >= chosen
    assert expanded.count(torch.Size([RAGGED.d, RAGGED.m])) < 2 * RAGGED.e + 2  # two blocks, each with a shared expert


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_says_what_each_way_takes(kind: str, made: Path) -> None:
    for dtype in (None, torch.float32):
        said = memory(made / kind, dtype).choices
        expanded, stored = load(made / kind, dtype), load(made / kind, dtype, keep="stored")
        assert said["expanded"].held == sum(t.nbytes for t in expanded.tensors.values())
        assert isinstance(stored, Checkpoint)
        assert stored._held is not None
        assert said["stored"].held == sum(t.nbytes for t in stored._held.values())
        assert said["stored"].held == sum(t.nbytes for t in files(made / kind).values())
        assert said["disk"].held == 0
        blocks = dict.fromkeys(range(RAGGED.blocks), 0)
        for (block, _), tensor in expanded.tensors.items():
            blocks |= {} if block is None else {block: blocks[block] + tensor.nbytes}
        assert said["expanded"].block == max(blocks.values())
        largest = max(t.nbytes for t in expanded.tensors.values())
        assert said["disk"].once == said["stored"].once
        assert largest < said["disk"].once <= 3 * largest


def test_a_two_way_table_prints() -> None:
    said = str(table.Memory(Path("DIR"), {"disk": table.Bytes(0, 17_100_000_000, 999)}, 2_000_000))
    assert said.splitlines() == [
        "Memory for the weights of DIR",
        "keep  in memory  largest block  besides, at once",
        "disk    0 bytes        17.1 GB         999 bytes",
        "available: 2 MB",
    ]


def test_what_cannot_fit_is_refused_before_it_is_read(
    made: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = memory(made / "fp8").choices
    sizes = {keep: row.most for keep, row in said.items()}
    assert sizes["expanded"] > sizes["stored"] > sizes["disk"]
    monkeypatch.setattr(table, "available", lambda device: sizes["expanded"] - 1)
    with pytest.raises(TooLarge) as error:
        load(made / "fp8")
    message = str(error.value)
    assert message.startswith(f"{made / 'fp8'}: keep='expanded' takes {table.byte_count(sizes['expanded'])}")
    assert f"keep='stored' takes {table.byte_count(sizes['stored'])}" in message
    assert f"keep='disk' takes {table.byte_count(sizes['disk'])}" in message
    load(made / "fp8", keep="stored")
    monkeypatch.setattr(table, "available", lambda device: sizes["stored"] - 1)
    with pytest.raises(TooLarge, match=r"keep='stored' takes [^;]*; keep='disk' takes [^,]*\.$"):
        load(made / "fp8", keep="stored")
    reads.clear()
    monkeypatch.setattr(table, "available", lambda device: 10)
    for keep in ("expanded", "stored", "disk"):
        with pytest.raises(TooLarge):
            load(made / "fp8", keep=keep)
    with pytest.raises(TooLarge, match="no other way to keep the weights takes less"):
        load(made / "fp8", keep="disk")
    assert reads == []


def test_what_is_available_here() -> None:
    assert 10**6 < (table.available() or 0) < 10**15
    assert table.available("meta") is None


PEAK = """
import sys
from pathlib import Path
import torch
from probe import load, memory
torch.set_num_threads(1)
torch.ones(4).bfloat16() @ torch.ones(4).bfloat16()

def resident(what):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(what))

before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
weights = load(sys.argv[1], keep=sys.argv[2])
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak memory")
def test_the_peak_of_loading_is_the_model_and_a_tensor(tmp_path: Path) -> None:
    large = replace(RAGGED, moe=(True,), d=768, m=768, e=32, m_s=768, V=100)
    save(random_weights(large, 1, torch.bfloat16), tmp_path, form="fp8")
    said = memory(tmp_path).choices
    assert said["expanded"].held > 110e6
    for keep in ("expanded", "stored"):
        run = subprocess.run(
            [sys.executable, "-c", PEAK, str(tmp_path), keep], capture_output=True, text=True, check=True
        )
        assert int(run.stdout) < said[keep].held + 18e6, "a leaf of all experts is 38 MB, scratch 3"
        assert int(run.stdout) > 0.9 * said[keep].held


def test_an_unknown_way_to_keep(made: Path) -> None:
    with pytest.raises(BadCheckpoint, match="keep='gpu' is not one of expanded, stored, disk"):
        load(made / "fp8", keep="gpu")  # type: ignore[call-overload]


@pytest.mark.parametrize("keep", ["stored", "disk"])
def test_copied_and_pickled(keep: Any, made: Path) -> None:
    weights = load(made / "int4", torch.float32, keep=keep)
    for twin in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert isinstance(twin, Checkpoint)
        same(twin, load(made / "int4", torch.float32))
        assert (twin._held is not None) == (keep == "stored")
        assert twin.notes == weights.notes


@pytest.mark.parametrize("keep", ["expanded", "stored", "disk"])
def test_the_router_and_its_bias_stay_fp32(keep: Any, made: Path) -> None:
    weights = load(made / "fp8", torch.float16, keep=keep)
    for name in FP32:
        assert weights.read(1, name).dtype == torch.float32
    assert weights.read(1, "W_O").dtype == torch.float16


def test_a_weight_or_an_expert_that_is_not_there(made: Path) -> None:
    weights = load(made / "fp8", keep="disk")
    for block, name in ((0, "W_1_e"), (1, "W_1"), (7, "W_O"), (None, "W_O"), (0, "nonsense")):
        with pytest.raises(Missing, match=name):
            weights.read(block, name)
    for e in (RAGGED.e, -1):
        with pytest.raises(OutOfRange, match=f"there is no expert {e}"):
            weights.read(1, "W_1_e", [0, e])


def test_a_tensor_is_alone_in_its_memory(made: Path) -> None:
    """A view would hold the 512 rows of its neighbour for the 64 of W_KR."""
    for tensor in load(made / "fp8").tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_what_changes_under_us_is_an_error(fp8: Path) -> None:
    weights = load(fp8, keep="disk")
    (fp8 / "model.safetensors").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: model\.\S+ cannot be read .* since it was opened"):
        weights.read(1, "W_O")


# --- notes -------------------------------------------------------------------------------------


def test_quantised_weights_say_what_their_numbers_are_not(made: Path, plain: Path) -> None:
    for kind in KINDS:
        for keep in ("expanded", "stored", "disk"):
            (note,) = load(made / kind, keep=keep).notes
            assert note.startswith(f"stored as {KINDS[kind]['form'].upper()} and expanded to bf16")
            assert "a server that quantises activations too gives other numbers" in note
    moved = load(made / "fp8").to(torch.float32)
    assert moved.notes == pickle.loads(pickle.dumps(moved)).notes == load(made / "fp8").notes
    assert load(plain / "fp8").notes == ()
    assert random_weights(SMALL).notes == ()


def test_scales_of_powers_of_two_are_told(fp8: Path) -> None:
    edit_json(fp8 / "config.json", lambda config: config["quantization_config"].update(scale_fmt="ue8m0"))
    assert any("ue8m0" in note for note in load(fp8).notes)


def test_keys_that_nobody_reads_are_told(fp8: Path) -> None:
    edit_json(fp8 / "config.json", lambda config: config.update(new_multiplier=2.0, head_dim=64, nothing=None))
    notes = Checkpoint(fp8).notes
    assert notes[-1] == "config.json has keys that are not read here and might mean something: new_multiplier"


# --- refused: FP8 ------------------------------------------------------------------------------

O_PROJ, GATE = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.gate.weight"
SCALE = f"{O_PROJ}_scale_inv"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def refusal(directory: Path, kind: type[ProbeError] = BadCheckpoint, ask: Callable[[Path], Any] = Checkpoint) -> str:
    with pytest.raises(kind) as error:
        ask(directory)
    assert str(directory) in str(error.value)
    return str(error.value)


DAMAGED_FP8: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({SCALE: None}, f"{SCALE} is missing: the FP8 values {O_PROJ} mean nothing without it"),
    "a scale of rows // 128": ({SCALE: torch.ones(1, 1)}, f"{SCALE} should be [2, 2], and is [1, 1]"),
    "a scale transposed": (
        {"model.layers.0.mlp.down_proj.weight_scale_inv": torch.ones(3, 2)},
        "weight_scale_inv should be [2, 2], and is [3, 2]",
    ),
    "a scale for the whole": ({SCALE: torch.ones(())}, "should be [2, 2], and is []"),
    "a scale in bf16": ({SCALE: torch.ones(2, 2).bfloat16()}, f"{SCALE} should be F32, and is BF16"),
    "a scale in fp64": ({SCALE: torch.ones(2, 2).double()}, "should be F32, and is F64"),
    "a weight of another shape": (
        {O_PROJ: torch.ones(144, 160).to(torch.float8_e4m3fn)},
        f"{O_PROJ} should be [160, 144], and is [144, 160]",
    ),
    "a weight of the other FP8": (
        {O_PROJ: torch.ones(160, 144).to(torch.float8_e5m2)},
        f"{O_PROJ} is F8_E5M2; it should be one of BF16, F16, F32, or F8_E4M3 with its scales",
    ),
    "a scale of a plain weight": (
        {O_PROJ: torch.ones(160, 144).bfloat16()},
        f"{SCALE} is no tensor of this model: {O_PROJ} is BF16, and goes without",
    ),
    "a scale of nothing": ({"model.odd_scale_inv": torch.ones(1)}, "model.odd_scale_inv is no tensor of this model"),
    "a static input scale": (
        {O_PROJ.replace("weight", "input_scale"): torch.ones(1)},
        "o_proj.input_scale is no tensor of this model",
    ),
    "a gain in FP8": (
        {"model.norm.weight": torch.ones(160).to(torch.float8_e4m3fn)},
        "model.norm.weight is stored as FP8, which only a matrix can be",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_FP8)
def test_damaged_fp8_is_refused_from_headers(case: str, fp8: Path, reads: list[str]) -> None:
    tensors, said = DAMAGED_FP8[case]
    change(fp8, **tensors)
    assert said in refusal(fp8)
    assert reads == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_no_number_is_refused_when_it_is_read(bad: float, fp8: Path) -> None:
    scale = load_file(fp8 / "model.safetensors")[SCALE]
    scale[1, 0] = bad
    change(fp8, **{SCALE: scale})
    weights = Checkpoint(fp8)
    weights.read(0, "W_O")
    for ask in (load, lambda directory: Checkpoint(directory).read(1, "W_O")):
        message = refusal(fp8, ask=ask)
        assert f"model.safetensors: {O_PROJ}: the scale of block [1, 0] is NaN or infinite" in message


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_an_fp8_weight_that_is_no_number_is_refused_when_it_is_read(byte: int, fp8: Path) -> None:
    values = load_file(fp8 / "model.safetensors")[O_PROJ].view(torch.uint8)
    values[130, 7] = byte
    change(fp8, **{O_PROJ: values.view(torch.float8_e4m3fn)})
    assert f"{O_PROJ}: the weight at row 130, column 7 is NaN" in refusal(fp8, ask=load)


def test_fp8_without_a_word_in_the_config(fp8: Path) -> None:
    edit_json(fp8 / "config.json", lambda config: config.pop("quantization_config"))
    assert "is F8_E4M3, but no quantization_config says fp8 and how large a scale's block is" in refusal(fp8)


QUANTISED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "another method": ({"quant_method": "gptq", "bits": 4}, ("quant_method", "'gptq'", "fp8", "compressed-tensors")),
    "no method": ({}, ("quant_method", "None")),
    "no object": ("fp8", ("quantization_config: 'fp8' should be an object",)),
    "another block": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ("weight_block_size", "[64, 64]")),
    "no block": ({"quant_method": "fp8"}, ("weight_block_size", "None", "[128, 128]")),
    "a block of a row": ({"quant_method": "fp8", "weight_block_size": [1, 128]}, ("weight_block_size", "[1, 128]")),
    "another float": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
        ("quantization_config.fmt", "'e5m2'", "'e4m3'"),
    ),
    "other scales": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue4m3"},
        ("scale_fmt", "'ue4m3'"),
    ),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_another_quantisation_is_refused_under_its_key(case: str, fp8: Path) -> None:
    said, words = QUANTISED[case]
    edit_json(fp8 / "config.json", lambda config: config.update(quantization_config=said))
    message = refusal(fp8, BadConfig)
    assert message.startswith(f"{fp8 / 'config.json'}: quantization_config")
    assert all(word in message for word in words)


# --- refused: INT4 -----------------------------------------------------------------------------

DAMAGED_INT4: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({f"{EXPERT}_scale": None}, f"{EXPERT}_scale is missing: the INT4 values {EXPERT}_packed mean nothing"),
    "no shape": ({f"{EXPERT}_shape": None}, f"{EXPERT}_shape is missing"),
    "no values": ({f"{EXPERT}_packed": None}, f"{EXPERT} is missing"),
    "a scale of groups of 128": (
        {f"{EXPERT}_scale": torch.ones(96, 2).bfloat16()},
        f"{EXPERT}_scale should be [96, 5], and is [96, 2]",
    ),
    "a scale in fp32": ({f"{EXPERT}_scale": torch.ones(96, 5)}, f"{EXPERT}_scale should be BF16, and is F32"),
    "values in bytes": (
        {f"{EXPERT}_packed": torch.zeros(96, 20, dtype=torch.uint8)},
        f"{EXPERT}_packed should be I32, and is U8",
    ),
    "values of another shape": (
        {f"{EXPERT}_packed": torch.zeros(96, 21, dtype=torch.int32)},
        f"{EXPERT} should be [96, 160], and is [96, 168]",
    ),
    "plain values as well": (
        {EXPERT: torch.zeros(96, 160).bfloat16()},
        f"{EXPERT} is no tensor of this model",
    ),
    "zero points": ({f"{EXPERT}_zero_point": torch.zeros(96, 5)}, f"{EXPERT}_zero_point is no tensor of this model"),
    "an order of groups": ({f"{EXPERT}_g_idx": torch.zeros(160)}, f"{EXPERT}_g_idx is no tensor of this model"),
    "FP8 among them": (
        {f"{EXPERT}_packed": None, EXPERT: torch.zeros(96, 160).to(torch.float8_e4m3fn)},
        f"{EXPERT} is F8_E4M3, but no quantization_config says fp8",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_INT4)
def test_damaged_int4_is_refused_from_headers(case: str, int4: Path, reads: list[str]) -> None:
    tensors, said = DAMAGED_INT4[case]
    change(int4, **tensors)
    assert said in refusal(int4)
    assert reads == []


def test_a_stated_shape_that_is_another(int4: Path) -> None:
    change(int4, **{f"{EXPERT}_shape": torch.tensor([160, 96], dtype=torch.int32)})
    message = refusal(int4, ask=load)
    assert f"model.safetensors: {EXPERT}_packed: it says that it is [160, 96], and is packed as [96, 160]" in message


def test_a_stated_shape_in_int64(int4: Path) -> None:
    before = load(int4)
    change(int4, **{f"{EXPERT}_shape": torch.tensor([96, 160])})
    same(load(int4), before)


def test_an_int4_scale_that_is_no_number(int4: Path) -> None:
    scale = load_file(int4 / "model.safetensors")[f"{EXPERT}_scale"]
    scale[95, 4] = float("nan")
    change(int4, **{f"{EXPERT}_scale": scale})
    assert f"{EXPERT}_packed: the scale of group [95, 4] is NaN or infinite" in refusal(int4, ask=load)


def test_int4_without_a_word_in_the_config(int4: Path) -> None:
    edit_json(int4 / "config.json", lambda config: config.pop("quantization_config"))
    message = refusal(int4)
    assert "_packed is there, but no quantization_config says how it is packed" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("group_size", 128), ("symmetric", False), ("type", "float"), ("strategy", "channel"),
     ("actorder", "group"), ("num_bits", None), ("group_size", None)],
)  # fmt: skip
def test_other_int4_is_refused_under_its_key(key: str, value: Any, int4: Path) -> None:
    edit_json(
        int4 / "config.json",
        lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update({key: value}),
    )
    assert f"quantization_config.config_groups.group_0.weights.{key}: {value!r} is not read" in refusal(int4, BadConfig)


@pytest.mark.parametrize("groups", [None, {}, [], {"group_0": None}, {"group_0": {"weights": 4}}])
def test_int4_groups_that_are_none(groups: Any, int4: Path) -> None:
    edit_json(int4 / "config.json", lambda config: config["quantization_config"].update(config_groups=groups))
    assert "quantization_config.config_groups" in refusal(int4, BadConfig)


def test_another_packing(int4: Path) -> None:
    edit_json(int4 / "config.json", lambda config: config["quantization_config"].update(format="marlin-24"))
    assert "quantization_config.format: 'marlin-24' is not read" in refusal(int4, BadConfig)


# --- a model that sees -------------------------------------------------------------------------


@pytest.fixture
def k25(made: Path, tmp_path: Path) -> Path:
    """With a little tower and projector beside its text part."""
    sees = {
        "vision_tower.encoder.blocks.0.wo.weight": torch.ones(4, 4).bfloat16(),
        "mm_projector.proj.0.bias": torch.ones(4).bfloat16(),
    }
    directory = single(made / "k25", tmp_path / "k25")
    edit_shard(directory / "model.safetensors", lambda state: state.update(sees))
    return directory


def test_the_text_part_is_read_and_the_rest_left_out_and_told(k25: Path, made: Path) -> None:
    checkpoint = Checkpoint(k25)
    assert checkpoint.dims == RAGGED
    assert {what: len(names) for what, names in checkpoint.survey.left_out.items()} == {SIGHT: 2}
    assert f"left out: 2 tensors, {SIGHT}" in checkpoint.notes
    same(load(k25), load(made / "int4"))


def test_its_quantisation_may_be_said_around_the_text_part(k25: Path, made: Path) -> None:
    edit_json(
        k25 / "config.json",
        lambda config: config.update(quantization_config=config["text_config"].pop("quantization_config")),
    )
    same(load(k25), load(made / "int4"))


def test_without_a_text_part(k25: Path) -> None:
    edit_json(k25 / "config.json", lambda config: config.pop("text_config"))
    assert "config.json: text_config: a kimi_k25 config should hold" in refusal(k25, BadConfig)


def test_a_text_part_that_is_another_block(k25: Path) -> None:
    edit_json(k25 / "config.json", lambda config: config["text_config"].update(model_type="deepseek_v2"))
    assert "config.json: text_config: model_type: 'deepseek_v2' is another block" in refusal(k25, BadConfig)


def test_names_without_the_prefix(k25: Path, int4: Path) -> None:
    shutil.copy(k25 / "config.json", int4)
    assert f"{PREFIX}model.embed_tokens.weight is missing" in refusal(int4)


def test_a_stray_tensor_beside_the_text_part(k25: Path) -> None:
    edit_shard(k25 / "model.safetensors", lambda state: state.update({"audio_tower.x": torch.ones(1)}))
    assert "audio_tower.x is no tensor of this model" in refusal(k25)


def test_every_leaf_is_read(made: Path) -> None:
    """No weight of the card is forgotten here, and the shapes are the card's."""
    assert {leaf.name for _, leaf in weight_sites(RAGGED)} == {n for n, leaf in LEAVES.items() if leaf.kind == "weight"}
    names = {name.removeprefix(PREFIX) for name in naive(files(made / "k25"))}
    assert names == set(stored_shapes(RAGGED))
    assert bits(load(made / "fp8").read(None, "W_E")).shape == (RAGGED.V, RAGGED.d)
    assert isinstance(load(made / "fp8"), InMemory)
