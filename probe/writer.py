"""Writing checkpoint directories as they are published: plain, FP8 like Kimi K2's, INT4 like Kimi-K2-Thinking's.

A weight is read, put into its stored form and written before the next one is read, so a model of any size can be
written from `Drawn` weights, and any checkpoint made into another form. Each file is written under a temporary name;
what the directory held before is replaced when all of them are there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from probe.card import Leaf
from probe.config import Layout, layout, wrapper
from probe.dims import Dims
from probe.engine import Weights
from probe.errors import BadCheckpoint, BadConfig, ShapeMismatch, asking
from probe.files import together
from probe.forms import PLAIN, Form
from probe.headers import INDEX, READ, SINGLE, expanded
from probe.leaves import FP32
from probe.names import SOURCES, stored_name, stored_shapes
from probe.quantised import BLOCK, GROUP, fp8_scales, int4_scales, quantise_fp8, quantise_int4
from probe.weights import place_of, weight_shape, weight_sites

_Kept = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Stored tensors by their full names, with dtype and shape."""

_SPELT = {dtype: spelt for spelt, dtype in READ.items()}


class _Module(NamedTuple):
    """What is read, made and written together: one stored matrix or vector.

    Attributes:
        name: its full name.
        block: the block that it stands in, or next to.
        shape: as it is stored, [out in].
        sources: the block, weight and expert of each weight in it.
        kept: the tensors that it is written as.
        made: makes them, from the matrix.
    """

    name: str
    block: int
    shape: tuple[int, ...]
    sources: list[tuple[int | None, Leaf, int | None]]
    kept: _Kept
    made: Callable[[Tensor], tuple[Tensor, ...]]


class _Quantised(NamedTuple):
    """A quantised form: which weights it takes, what it keeps of one, how that is made, what the config says of it."""

    takes: Callable[[int | None, Leaf], bool]
    kept: Callable[[str, tuple[int, ...]], _Kept]
    made: Callable[[Tensor], tuple[Tensor, ...]]
    config: Mapping[str, Any]


def _fp8_kept(name: str, shape: tuple[int, ...]) -> _Kept:
    return {
        name: (torch.float8_e4m3fn, shape),
        f"{name}_scale_inv": (torch.float32, fp8_scales(*shape)),
    }


def _int4_kept(name: str, shape: tuple[int, ...]) -> _Kept:
    outputs, inputs = shape
    return {
        f"{name}_packed": (torch.int32, (outputs, inputs // 8)),
        f"{name}_scale": (torch.bfloat16, int4_scales(outputs, inputs)),
        f"{name}_shape": (torch.int32, (2,)),
    }


_QUANTISED = {
    "fp8": _Quantised(
        takes=lambda block, leaf: block is not None and len(leaf.shape) > 1 and leaf.name not in FP32,
        kept=_fp8_kept,
        made=quantise_fp8,
        config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
    ),
    "int4": _Quantised(
        takes=lambda block, leaf: leaf.routed,
        kept=_int4_kept,
        made=lambda weight: (*quantise_int4(weight), torch.tensor(weight.shape, dtype=torch.int32)),
        config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP,
                        "dynamic": False,
                        "actorder": None,
                    },
                }
            },
        },
    ),
}


def save(
    weights: Weights,
    directory: str | Path,
    *,
    form: Form = "plain",
    dtype: torch.dtype = torch.bfloat16,
    shards: int | Literal["blocks"] = 1,
    **config: Any,
) -> None:
    """Write weights as a checkpoint in the original names: ``model-1-of-2.safetensors`` …, an index, ``config.json``.

    In memory are at most one weight as it is read and the same as it is stored; of a routed weight one expert.

    Args:
        weights: in memory, in another checkpoint, or `Drawn`.
        form: ``plain``; ``fp8``, every matrix of a block but the router's; or ``int4``, the routed experts alone.
        dtype: of all that is not quantised, but the correction bias, which stays fp32.
        shards: how many files, each with consecutive tensors; or ``blocks``: a file a block, as Kimi K2 has it.
        config: further keys for ``config.json`` (token ids, say), or other values. ``model_type="kimi_k25"`` (or
            ``"kimi_vl"``) writes the text part of a model that sees: a prefix before all names, the config inside
            ``text_config``.

    Raises:
        BadConfig: sizes that a config cannot say: a shared expert that is no multiple of the others, say.
        BadCheckpoint: another form or dtype; no file, or more than tensors; INT4 without routed experts, or of a width
            that is no multiple of 32; a weight to be quantised that is NaN or infinite.
        ShapeMismatch: a weight of another shape than its ``dims`` say.
    """
    _check(weights.dims, form, dtype)
    full = _config(weights.dims, form, dtype, config)
    said = json.dumps(full, indent=1) + "\n"
    modules = _modules(weights.dims, form, dtype, layout(full))
    parts = _cut(modules, shards, weights.dims.blocks)
    directory = expanded(directory)
    tensors = _tensors(weights, modules)
    weight_map: dict[str, str] = {}
    with together() as write:
        for i, kept in enumerate(parts):
            name = f"model-{i + 1}-of-{len(parts)}.safetensors" if len(parts) > 1 else SINGLE
            with write(directory / name) as file:
                _write(file, kept, islice(tensors, len(kept)))
            weight_map.update(dict.fromkeys(kept, name))
        if len(parts) > 1:
            index = {"metadata": {"total_size": sum(map(_bytes, parts))}, "weight_map": weight_map}
            with write(directory / INDEX) as file:
                file.write((json.dumps(index, indent=1) + "\n").encode())
        with write(directory / "config.json") as file:
            file.write(said.encode())
    for old in (SINGLE, INDEX, *(path.name for path in directory.glob("model-*-of-*.safetensors"))):
        if old not in weight_map.values() and not (old == INDEX and len(parts) > 1):
            (directory / old).unlink(missing_ok=True)


def _check(dims: Dims, form: str, dtype: torch.dtype) -> None:
    if form not in get_args(Form):
        raise BadCheckpoint(f"form: {form!r} is not one of {', '.join(get_args(Form))}.")
    if _SPELT.get(dtype) not in PLAIN:
        raise BadCheckpoint(f"dtype: {dtype} is not one of {', '.join(str(READ[plain]) for plain in PLAIN)}.")
    if form == "int4" and not any(dims.moe):
        raise BadCheckpoint("form: int4 is for routed experts alone, and this model has none; take fp8 or plain.")


def _config(dims: Dims, form: Form, dtype: torch.dtype, more: Mapping[str, Any]) -> dict[str, Any]:
    text = dims.to_config()
    read = vars(Dims.from_config(text))
    for name, value in vars(dims).items():
        if value != read[name]:
            raise BadConfig(f"{name}: {value} of these sizes would be read from their config.json as {read[name]}.")
    text["torch_dtype"] = str(dtype).removeprefix("torch.")
    if form != "plain":
        text["quantization_config"] = _QUANTISED[form].config
    whole = wrapper(more)
    if whole is None:
        return {**text, **more}
    text = {**text, **more, "model_type": text["model_type"]}
    outer = {"architectures": [whole.architecture], "model_type": more["model_type"]}
    return {**outer, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}


def _modules(dims: Dims, form: Form, dtype: torch.dtype, spelt: Layout) -> list[_Module]:
    """All that a checkpoint stores, in the order of the blocks."""
    sources: dict[str, list[tuple[int | None, Leaf, int | None]]] = {}
    for block, leaf in weight_sites(dims):
        for expert in range(dims.e) if leaf.routed else (None,):
            sources.setdefault(stored_name(block, leaf.name, dims, expert), []).append((block, leaf, expert))
    shapes, near = stored_shapes(dims), 0
    modules = []
    for name, found in sources.items():
        block, leaf, _ = found[0]
        near = near if block is None else block
        full = spelt.full(name)
        kept, made = _form_of(full, shapes[name], block, leaf, form, dtype)
        modules.append(_Module(full, near, shapes[name], found, kept, made))
    return modules


def _form_of(
    name: str, shape: tuple[int, ...], block: int | None, leaf: Leaf, form: Form, dtype: torch.dtype
) -> tuple[_Kept, Callable[[Tensor], tuple[Tensor, ...]]]:
    quantised = _QUANTISED.get(form)
    if quantised and quantised.takes(block, leaf):
        return quantised.kept(name, shape), quantised.made
    plain = torch.float32 if leaf.name == "b" else dtype
    return {name: (plain, shape)}, lambda weight: (weight.to(plain, memory_format=torch.contiguous_format),)


def _cut(modules: list[_Module], shards: int | str, blocks: int) -> list[_Kept]:
    """The tensors of each file: those of a block, or as many as any other file's."""
    flat = [(module.block, name, what) for module in modules for name, what in module.kept.items()]
    count = blocks if shards == "blocks" else shards
    if not isinstance(count, int) or not 1 <= count <= len(flat):
        raise BadCheckpoint(f"shards: {shards!r} should be 1 to {len(flat)}, the number of tensors, or 'blocks'.")
    parts: list[_Kept] = [{} for _ in range(count)]
    for i, (block, name, what) in enumerate(flat):
        parts[block if shards == "blocks" else i * count // len(flat)][name] = what
    return parts


def _tensors(weights: Weights, modules: list[_Module]) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor with its name, made when it is asked for."""
    for module in modules:
        yield from zip(module.kept, _made(weights, module), strict=True)


def _made(weights: Weights, module: _Module) -> tuple[Tensor, ...]:
    with asking(module.name):
        return module.made(_stored(weights, module))


def _stored(weights: Weights, module: _Module) -> Tensor:
    """A module's matrix or vector, [out in]; two weights that share one put together."""
    parts = [(SOURCES[leaf.name].rows, _read(weights, block, leaf, expert)) for block, leaf, expert in module.sources]
    (_, first), *others = parts
    if not others:
        return first
    whole = first.new_empty(module.shape, dtype=reduce(torch.promote_types, (part.dtype for _, part in parts)))
    for rows, part in parts:
        assert rows is not None  # only a weight that has its module to itself takes all rows
        whole[rows(weights.dims)] = part.to(whole.dtype)
    return whole


def _read(weights: Weights, block: int | None, leaf: Leaf, expert: int | None) -> Tensor:
    read = weights.read(block, leaf.name, None if expert is None else [expert])
    shape = weight_shape(leaf, weights.dims)
    shape = (1, *shape[1:]) if leaf.routed else shape
    if read.shape != shape:
        raise ShapeMismatch(f"{place_of(block, leaf.name)} should be {list(shape)}, and is {list(read.shape)}.")
    read = read[0] if leaf.routed else read
    return read if read.ndim == 1 or leaf.name == "W_E" else read.T


def _write(file: BinaryIO, kept: _Kept, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """One safetensors file; each tensor goes to its place as it comes."""
    header, starts = _header(kept)
    file.write(header)
    for name, tensor in tensors:
        file.seek(len(header) + starts[name])
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        del tensor  # before the next one is made


def _header(kept: _Kept) -> tuple[bytes, dict[str, int]]:
    """A file's header, and where each tensor starts after it: large elements first, so that all are aligned."""

    def order(name: str) -> tuple[int, str, str]:
        dtype, _ = kept[name]
        return -dtype.itemsize, _SPELT[dtype], name

    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(kept, key=order):
        dtype, shape = kept[name]
        starts[name], end = end, end + _bytes({name: kept[name]})
        entries[name] = {"dtype": _SPELT[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def _bytes(kept: _Kept) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in kept.values())
