"""The weights of a model that transformers has loaded: the same storage, shown as the card shows it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from probe.config import LOADED, Layout
from probe.dims import Dims
from probe.errors import BadCheckpoint
from probe.forms import CHOOSING, SIGHT, told_apart
from probe.leaves import FP32
from probe.names import INDEXER, shown, stored_name, stored_shapes
from probe.weights import Copied, InMemory, weight_sites

_FUSED = {"W_1_e": "gate_up_proj", "W_3_e": "gate_up_proj", "W_2_e": "down_proj"}
"""Transformers keeps the experts of a block in two tensors: gate above up, [e, 2m, d], and down, [e, d, m]."""


def from_state(state: Mapping[str, Tensor], dims: Dims) -> InMemory:
    """The state dict of transformers' ``DeepseekV3ForCausalLM``, or of another class of this block, as weights.

    Indexers are left out, and of a model that sees all but the text part; ``notes`` say what.

    They are views of what it holds, the fused experts among them, so a change there is a change here. Copied are only
    ``W_UQ``, ``W_QR``, ``W_UK`` and ``W_UV``, whose rows alternate by head, and router weight and correction bias
    where a cast of the whole model has rounded them: they are fp32 here, always. After a change of what was copied they
    are refused where they are read. Torch counts writes, by which it is seen; those through ``.data`` (``model.to``
    among them) and into inference tensors it doesn't count, nor does a tensor tell that another took its place.

    Raises:
        BadCheckpoint: a tensor is missing, unknown, quantised, not loaded (on the meta device) or of another shape
            than ``dims`` say; tensors on several devices; a head that contradicts the config.
    """
    state, notes = _read(state, dims)
    _check(state, dims)
    tensors, copied = {}, {}
    for block, leaf in weight_sites(dims):
        name, at = _name(block, leaf.name, dims), (block, leaf.name)
        tensors[at] = _weight(state[name], leaf.name, dims)
        if tensors[at].untyped_storage().data_ptr() != state[name].untyped_storage().data_ptr():
            copied[at] = Copied.of(name, state[name])
    return InMemory(dims, tensors, notes, copied=copied)


def _read(state: Mapping[str, Tensor], dims: Dims) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors by their original names, without those that are known and not read; and what these are."""
    spelt = LOADED if any(name.startswith(LOADED.layers) for name in state) else Layout()
    read: dict[str, Tensor] = {}
    left_out: dict[str, list[str]] = {}
    for name, tensor in state.items():
        if name.startswith(spelt.apart):
            left_out.setdefault(SIGHT, []).append(name)
        elif dims.index_topk is not None and INDEXER.search(name):
            left_out.setdefault(CHOOSING, []).append(name)
        else:
            read[spelt.original(name)] = tensor
    return read, tuple(told_apart(left_out))


def _weight(stored: Tensor, name: str, dims: Dims) -> Tensor:
    if name in _FUSED:
        half = {"W_1_e": stored[:, : dims.m], "W_3_e": stored[:, dims.m :]}.get(name, stored)
        return half.transpose(1, 2)
    made = shown(stored, name, dims)
    return made.to(torch.float32) if name in FP32 else made


def _name(block: int | None, name: str, dims: Dims) -> str:
    return f"model.layers.{block}.mlp.experts.{_FUSED[name]}" if name in _FUSED else stored_name(block, name, dims)


def _shapes(dims: Dims) -> dict[str, tuple[int, ...]]:
    """Every tensor of the state dict, by its name there, with its shape."""
    shapes = {name: shape for name, shape in stored_shapes(dims).items() if ".mlp.experts." not in name}
    for block, moe in enumerate(dims.moe):
        if moe:
            shapes[_name(block, "W_1_e", dims)] = (dims.e, 2 * dims.m, dims.d)
            shapes[_name(block, "W_2_e", dims)] = (dims.e, dims.d, dims.m)
    return shapes


def _check(state: Mapping[str, Tensor], dims: Dims) -> None:
    expected = _shapes(dims)
    for name, shape in expected.items():
        if name not in state:
            raise BadCheckpoint(f"the model holds no {name}; a DeepseekV3ForCausalLM as loaded is needed.")
        tensor = state[name]
        if tuple(tensor.shape) != shape:
            raise BadCheckpoint(f"the model's {name} should be {list(shape)}, and is {list(tensor.shape)}.")
        if tensor.device.type == "meta":
            raise BadCheckpoint(f"the model's {name} is not loaded (it is on the meta device); load it whole.")
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise BadCheckpoint(f"the model's {name} is {tensor.dtype}; quantised models are not read.")
    if len(devices := {str(state[name].device) for name in expected}) > 1:
        raise BadCheckpoint(f"the model is spread over {', '.join(sorted(devices))}; load it onto one device.")
    for name, tensor in state.items():
        if dims.tied and name == "lm_head.weight":
            if tensor.data_ptr() != state["model.embed_tokens.weight"].data_ptr():
                raise BadCheckpoint("the model's lm_head.weight is not its embedding, but tie_word_embeddings is true.")
        elif name not in expected:
            raise BadCheckpoint(f"the model holds {name}, which is no tensor of this block; load it without adapters.")
