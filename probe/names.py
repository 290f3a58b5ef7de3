"""The checkpoint's own names of the card's weights, and the shapes they are stored in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from probe.card import Leaf
from probe.dims import Dims
from probe.weights import weight_shape, weight_sites


@dataclass(frozen=True)
class Source:
    """Where a weight is kept: the module, and which rows of its stored ``.weight`` ([out in]) are this weight's.

    Args:
        module: the module's path inside its block (or inside the model).
        rows: which stored rows, given the sizes; None: all. A pair of weights that share a module partition its rows.
        tensor: the tensor of the module.
    """

    module: str
    rows: Callable[[Dims], Tensor] | None = None
    tensor: str = "weight"


def _by_head(first: Callable[[Dims], int], second: Callable[[Dims], int], take: int) -> Callable[[Dims], Tensor]:
    """Rows of a module that alternates two weights by head: ``first`` rows, then ``second``; take part 0 or 1."""

    def rows(dims: Dims) -> Tensor:
        a, b = first(dims), second(dims)
        table = torch.arange(dims.h * (a + b)).view(dims.h, a + b)
        return (table[:, a:] if take else table[:, :a]).reshape(-1)

    return rows


_Q_ROWS = [_by_head(lambda dims: dims.n, lambda dims: dims.r, part) for part in (0, 1)]
_KV_ROWS = [_by_head(lambda dims: dims.n, lambda dims: dims.v, part) for part in (0, 1)]

SOURCES: dict[str, Source] = {
    "W_E": Source("embed_tokens"),
    "w_attn": Source("input_layernorm"),
    "W_DQ": Source("self_attn.q_a_proj"),
    "w_Q": Source("self_attn.q_a_layernorm"),
    "W_UQ": Source("self_attn.q_b_proj", _Q_ROWS[0]),
    "W_QR": Source("self_attn.q_b_proj", _Q_ROWS[1]),
    "W_DKV": Source("self_attn.kv_a_proj_with_mqa", lambda dims: torch.arange(dims.r_kv)),
    "W_KR": Source("self_attn.kv_a_proj_with_mqa", lambda dims: dims.r_kv + torch.arange(dims.r)),
    "w_KV": Source("self_attn.kv_a_layernorm"),
    "W_UK": Source("self_attn.kv_b_proj", _KV_ROWS[0]),
    "W_UV": Source("self_attn.kv_b_proj", _KV_ROWS[1]),
    "W_O": Source("self_attn.o_proj"),
    "w_ffn": Source("post_attention_layernorm"),
    "W_1": Source("mlp.gate_proj"),
    "W_3": Source("mlp.up_proj"),
    "W_2": Source("mlp.down_proj"),
    "W_g": Source("mlp.gate"),
    "b": Source("mlp.gate", tensor="e_score_correction_bias"),
    "W_1_e": Source("mlp.experts.{e}.gate_proj"),
    "W_3_e": Source("mlp.experts.{e}.up_proj"),
    "W_2_e": Source("mlp.experts.{e}.down_proj"),
    "W_1_s": Source("mlp.shared_experts.gate_proj"),
    "W_3_s": Source("mlp.shared_experts.up_proj"),
    "W_2_s": Source("mlp.shared_experts.down_proj"),
    "w_final": Source("norm"),
    "W_U": Source("lm_head"),
}
"""Where each weight of the card comes from. W_UQ and W_QR alternate by head in one module, so do W_UK and W_UV."""

INDEXER = re.compile(r"\.self_attn\.indexer\.(?:(?:wq_b|wk|k_norm|weights_proj)\.weight|k_norm\.bias)(?:_[a-z_]+)?$")
"""Ends the name of a tensor of a block's indexer, or of a part that it is quantised into."""


def stored_name(block: int | None, name: str, dims: Dims, expert: int | None = None) -> str:
    """A weight's full name in a checkpoint, e.g. ``model.layers.3.self_attn.o_proj.weight``."""
    source = SOURCES[name]
    module = source.module
    if dims.r_q is None:
        module = module.replace("q_b_proj", "q_proj") if module == "self_attn.q_b_proj" else module
    module = module.format(e=expert)
    if name == "W_U":
        return "lm_head.weight"
    return f"model.{'' if block is None else f'layers.{block}.'}{module}.{source.tensor}"


def shown(stored: Tensor, name: str, dims: Dims) -> Tensor:
    """A stored tensor as the card shows it: this weight's rows, [in out]. W_E is kept [V d], a row a token."""
    rows = SOURCES[name].rows
    if rows is not None:
        stored = _take(stored, rows(dims))
    return stored if stored.ndim == 1 or name == "W_E" else stored.T


def _take(stored: Tensor, rows: Tensor) -> Tensor:
    """Those rows: a view where they lie together, else a copy."""
    start, count = int(rows[0]), len(rows)
    together = int(rows[-1]) - start + 1 == count
    return stored[start : start + count] if together else stored[rows]


def stored_names(block: int | None, leaf: Leaf, dims: Dims) -> list[str]:
    """The names of what a weight is kept in: one, or one for each expert."""
    experts = range(dims.e) if leaf.routed else [None]
    return [stored_name(block, leaf.name, dims, expert) for expert in experts]


def stored_shapes(dims: Dims) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of these sizes holds, by its original name, with its stored shape ([out in])."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block, leaf in weight_sites(dims):
        sizes = weight_shape(leaf, dims)
        if leaf.routed:
            shapes.update({stored_name(block, leaf.name, dims, e): (sizes[2], sizes[1]) for e in range(dims.e)})
        elif len(sizes) == 1 or leaf.name == "W_E":
            shapes[stored_name(block, leaf.name, dims)] = tuple(sizes)
        else:
            name = stored_name(block, leaf.name, dims)
            before = shapes.get(name, (0,))[0]
            shapes[name] = (before + sizes[1], sizes[0])
    return shapes
