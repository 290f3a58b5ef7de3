"""Checkpoint files: made byte by byte, sound or not; changed; compared; and a hollow Kimi K2, headers over holes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from probe import KIMI_K2, Checkpoint, InMemory
from probe.names import stored_shapes
from probe.weights import weight_sites
from tests.probe.small import K2_CONFIG

INDEX = "model.safetensors.index.json"

K2_NUMBERS, K2_BYTES = 1_026_470_731_056, 1_029_173_256_720
"""Of all tensors of Kimi-K2-Instruct's files, by a dump of their headers."""


def write(path: Path, header: Any, payload: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with this header (bytes as they are, all else as JSON), whatever it says."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + payload)


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def hollow_k2(directory: Path) -> None:
    """Kimi-K2-Instruct's 61 files with all their headers, in their true sizes, and nothing but holes for weights."""
    shards: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, shape in stored_shapes(KIMI_K2).items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0 if "embed" in name else 60
        tensors = shards.setdefault(f"model-{layer + 1}-of-61.safetensors", {})
        if "_proj" in name:
            tensors[name] = ("F8_E4M3", shape)
            tensors[f"{name}_scale_inv"] = ("F32", tuple(math.ceil(size / 128) for size in shape))
        else:
            tensors[name] = ("F32" if name.endswith("bias") else "BF16", shape)
        if name.endswith("input_layernorm.weight"):
            tensors[name.replace("input_layernorm.weight", "self_attn.rotary_emb.inv_freq")] = ("BF16", (56,))
    for file, tensors in shards.items():
        _hollow(directory / file, tensors)
    listed = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": K2_BYTES}, "weight_map": listed}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(K2_CONFIG), encoding="utf-8")


def _hollow(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        header[name] = entry(dtype, list(shape), start, end)
    write(path, header)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + end)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bits, so that NaNs and signed zeros count too."""
    whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(whole)


def same(ours: InMemory | Checkpoint, theirs: InMemory | Checkpoint) -> None:
    """Every weight equal, bit for bit."""
    assert ours.dims == theirs.dims
    for block, leaf in weight_sites(ours.dims):
        a, b = ours.read(block, leaf.name), theirs.read(block, leaf.name)
        assert a.dtype == b.dtype, leaf.name
        assert torch.equal(bits(a), bits(b)), (block, leaf.name)


def files_of(directory: Path) -> set[str]:
    return {stored.file for stored in Checkpoint(directory).survey.stored.values()}


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    made = json.loads(path.read_text(encoding="utf-8"))
    change(made)
    path.write_text(json.dumps(made), encoding="utf-8")


def edit_shard(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    state = load_file(path)
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
