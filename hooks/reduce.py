"""Reductions: what is kept of a tensor in its place, made at its hook, so that the whole never stays.

    from hooks import reduce
    _, cache = model.run_with_cache(text, reduce={"blocks.*.x_n": reduce.norms(), "blocks.*.A": reduce.mean()})
    cache.reduced["blocks.3.x_n"].rms

Scores and patterns (``S``, ``A``) are reduced one chunk of queries at a time: at 4,096 positions they never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hooks.where import Frozen, Place, Rows, along
from probe.errors import BadEdit, OutOfRange, ShapeMismatch

Over = Literal["positions", "all", "roles"]


class Norms(NamedTuple):
    """Of each position (and head, or slot), over the last axis, fp32."""

    rms: Tensor
    l2: Tensor


class Top(NamedTuple):
    """The largest channels of each position by magnitude, largest first, signs kept: [.. n] each."""

    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Reduction:
    """One that treats each position by itself, so that chunks can be reduced apart and joined."""

    label: str
    f: Callable[[Tensor], Any]

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class Mean:
    """The mean over positions; see `mean`."""

    over: Over

    def __str__(self) -> str:
        return f"mean over {self.over}"

    def masks(self, rows: Rows, place: Place | None) -> dict[str, Tensor]:
        """Which positions of the padded batch are averaged, [B, T] each; one mask a role, or one in all."""
        if self.over != "roles":
            return {"": rows.mask(place, "pos")}
        roles = [set(spans) for spans in rows.spans or ()]
        if not roles or not all(roles) or any(role != roles[0] for role in roles):
            raise BadEdit("a mean over roles takes each row's named spans, the same names in all; give spans=.")
        if place is not None:
            raise BadEdit("a mean over roles names its own positions; leave pos= out.")
        assert rows.spans is not None
        masks = {name: rows.mask(name, "roles") for name in rows.spans[0]}
        for name, mask in masks.items():
            if empty := [b for b, row in enumerate(mask.any(-1).tolist()) if not row]:
                raise BadEdit(f"span {name!r} of row {empty[0]} is empty: there is nothing to average.")
        return masks

    def part(self, value: Tensor, mask: Tensor, axis: int) -> Tensor:
        """The sum of ``value`` at the mask ([B, t], along ``axis``), fp32 or better."""
        wide = value if value.dtype == torch.float64 else value.float()
        at = along(mask.to(value.device), axis, value.ndim)
        total = torch.where(at, wide, torch.zeros_like(wide)).sum(axis)
        return total.sum(0) if self.over == "all" else total

    def join(self, parts: Sequence[Tensor], mask: Tensor) -> Tensor:
        """The mean, from the sums of all chunks; ``mask`` is that of all positions."""
        total = torch.stack(list(parts)).sum(0)
        count = (mask.sum() if self.over == "all" else mask.sum(-1)).to(total.device)
        return total / count.view(*count.shape, *[1] * (total.ndim - count.ndim))


def norms() -> Reduction:
    """rms and l2 of each position (and head, or slot) over the last axis: `Norms`, [B T] for [B T d]."""

    def f(value: Tensor) -> Norms:
        l2 = torch.linalg.vector_norm(_numbers(value).float(), dim=-1)
        return Norms(l2 / value.shape[-1] ** 0.5, l2)

    return Reduction("norms", f)


def top(n: int) -> Reduction:
    """The ``n`` channels of largest magnitude of each position, with their indices: `Top`, [B T n] for [B T d].

    Raises:
        OutOfRange: n is not positive, or (in the run) more than the tensor is wide.
    """
    if n < 1:
        raise OutOfRange(f"top({n}): at least one channel is taken.")

    def f(value: Tensor) -> Top:
        if n > value.shape[-1]:
            raise OutOfRange(f"top({n}) of a tensor that is {value.shape[-1]} wide.")
        indices = _numbers(value).abs().topk(n, dim=-1).indices
        return Top(value.gather(-1, indices), indices)

    return Reduction(f"top {n}", f)


def onto(directions: Tensor) -> Reduction:
    """The dot product of each position with each direction, [.. n], fp32; directions are taken at the length they have.

    Args:
        directions: [n, width of the tensor's last axis], or one, [width].

    Raises:
        ShapeMismatch: they have other axes, or (in the run) another width.
    """
    if directions.ndim not in (1, 2):
        raise ShapeMismatch(f"directions are [n, width] or [width]; these are {list(directions.shape)}.")
    frozen = Frozen(torch.atleast_2d(directions))

    def f(value: Tensor) -> Tensor:
        span = frozen.tensor
        if span.shape[-1] != value.shape[-1]:
            raise ShapeMismatch(f"directions of width {span.shape[-1]}, onto a tensor that is {value.shape[-1]} wide.")
        return _numbers(value).float() @ span.to(value.device, torch.float32).T

    return Reduction(f"onto {frozen.tensor.shape[0]} directions", f)


def mean(over: Over = "positions") -> Mean:
    """The mean over each row's real positions (``positions``: [B d] for [B T d]), over those of all rows (``all``:
    [d]), or over each named span (``roles``: a dict, name → [B d]); with ``pos=``, of these positions alone. Of ``A``,
    over queries: what each key gets, [B h S].

    Raises:
        BadEdit: ``over`` is none of these.
    """
    if over not in ("positions", "all", "roles"):
        raise BadEdit(f"mean(over={over!r}) is not one of positions, all, roles.")
    return Mean(over)


def _numbers(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        raise BadEdit("it holds numbers of experts: neither norm nor mean nor direction of these means anything.")
    return value


def check(reduction: Any, name: str) -> Reduction | Mean:
    """A reduction from what a user gave: one of these, or a function of the value.

    Raises:
        BadEdit: it is neither, or means nothing for this tensor.
    """
    if isinstance(reduction, Reduction | Mean):
        if name == "S":
            raise BadEdit(
                f"{reduction} of S: hidden pairs hold the dtype's least number and drown the rest; reduce A, or give a"
                " function of S."
            )
        if name == "experts":
            raise BadEdit(f"{reduction} of experts: they are numbers of experts; give a function of them.")
        return reduction
    if not callable(reduction):
        raise BadEdit(f"{reduction!r} is no reduction; give norms(), top(n), onto(directions), mean(), or a function.")
    return Reduction(getattr(reduction, "__name__", "a function"), lambda value: reduction(value.clone()))


def mapped(f: Callable[[Tensor], Any], made: Any) -> Any:
    """A reduction's result with ``f`` on each tensor: a tensor, a tuple of them, a dict of them; else as it is."""
    if isinstance(made, Tensor):
        return f(made)
    if isinstance(made, dict):
        return {name: mapped(f, part) for name, part in made.items()}
    if isinstance(made, tuple | list):
        parts = [mapped(f, part) for part in made]
        return type(made)(*parts) if hasattr(made, "_fields") else type(made)(parts)
    return made


def joined(parts: Sequence[Any], axis: int) -> Any:
    """Results of consecutive chunks as one, tensors joined along ``axis``."""
    first = parts[0]
    if isinstance(first, Tensor):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=axis)
    if isinstance(first, dict):
        return {name: joined([part[name] for part in parts], axis) for name in first}
    made = [joined(column, axis) for column in zip(*parts, strict=True)]
    return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
