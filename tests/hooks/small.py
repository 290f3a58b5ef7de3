"""What the tests of this room share: a small model, transformers' model on the same weights, and padded tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hooks import HookedModel, Run, Site
from tests.oracle import Oracle, config, draw, padding

ORACLE = Oracle(config(n_group=4, topk_group=2), seed=11)
MODEL = HookedModel(ORACLE.weights())
DIMS = MODEL.dims
DENSE, MOE, LAST = 0, 1, 2
B, T = 3, 6
LENGTHS = [6, 4, 5]
TOKENS, _ = draw(ORACLE, B, T, seed=1)
REFERENCE, _ = draw(ORACLE, 12, T + 1, seed=2)
SIDES = ("left", "right")
SLOTS = ("gates", "g_e", "u_e", "a_e", "h_e", "y_e", "delta_experts")
EDITABLE = [site for site in MODEL.sites if site.tensor not in ("experts", "delta_heads")]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to the tolerance of the laws, and of one shape."""
    assert ours.shape == theirs.shape
    limit = tolerance * max(1.0, float(theirs.abs().max()))
    assert float((ours - theirs).abs().max()) <= limit


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows of any lengths as a batch, and its mask; pads hold a token that is real elsewhere."""
    longest = max(map(len, rows))
    fill = [torch.full((longest - len(row),), 7) for row in rows]
    made = [torch.cat([f, row] if side == "left" else [row, f]) for f, row in zip(fill, rows, strict=True)]
    return torch.stack(made), padding([len(row) for row in rows], side)


def ragged(tokens: Tensor = TOKENS, lengths: list[int] | None = None) -> list[Tensor]:
    """The first few tokens of each row."""
    return [row[:n] for row, n in zip(tokens, lengths or LENGTHS, strict=True)]


def everything(tokens: Tensor = TOKENS, keep: Tensor | None = None, **kwargs: Any) -> Run:
    """A run that keeps every tensor."""
    return MODEL.run(tokens, keep, want=list(MODEL.sites), **kwargs)


def theirs(
    weights: Callable[[dict[str, Tensor]], Any] | None = None,
    hook: tuple[str, Callable[[Tensor], Any]] | None = None,
    tokens: Tensor = TOKENS,
) -> Tensor:
    """Transformers' logits on a copy with changed weights, or with a module's output (``<`` in front: its input)
    changed in place."""
    model = copy.deepcopy(ORACLE.model)
    if weights is not None:
        weights(model.state_dict())
    if hook is not None:
        module, change = hook

        def before(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            change(made := args[0].clone())
            return (made, *args[1:])

        def after(_: Any, __: Any, out: Any) -> Any:
            change(made := (out[0] if isinstance(out, tuple) else out).clone())
            return (made, *out[1:]) if isinstance(out, tuple) else made

        at = model.get_submodule(module.lstrip("<"))
        if module[0] == "<":
            at.register_forward_pre_hook(before)
        else:
            at.register_forward_hook(after)
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def real_part(value: Tensor, site: Site, b: int, first: int, length: int) -> Tensor:
    """One row's value at its real positions (and keys)."""
    row = value[b]
    for axis, dim in enumerate(MODEL.sites.node(site).shape[1:]):
        if dim in ("T", "S"):
            row = row.narrow(axis, first, length)
    return row
