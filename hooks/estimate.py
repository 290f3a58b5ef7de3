"""The bytes of a run, from its plans, before it starts; and a run that would not fit refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooks.cache import Names
from hooks.keep import Keep, Keeper, Reduce
from hooks.where import Index, Rows, Spans
from probe.card import Card, letters
from probe.engine import Plan, plan
from probe.errors import BadEdit, ProbeError, TooLarge
from probe.memory import byte_count
from probe.numerics import QUERY_CHUNK
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel


@dataclass(frozen=True)
class Estimate:
    """What a run would take beside the weights.

    Attributes:
        kept: site → bytes of what is kept of it (with gradients, of both).
        live: bytes of the values that live at once while the worst block is made, views counted as copies. With
            gradients nothing is dropped before the end, so they are those of all blocks.
    """

    kept: Mapping[Site, int]
    live: int

    @property
    def cached(self) -> int:
        """Bytes of all that is kept."""
        return sum(self.kept.values())

    @property
    def total(self) -> int:
        """Bytes kept and live."""
        return self.cached + self.live

    def __str__(self) -> str:
        largest = sorted(self.kept, key=lambda site: -self.kept[site])[:3]
        named = ", ".join(f"{site} {byte_count(self.kept[site])}" for site in largest)
        return (
            f"{byte_count(self.cached)} kept of {len(self.kept)} tensors (largest: {named or 'none'}),"
            f" {byte_count(self.live)} live at most: {byte_count(self.total)}"
        )


def estimate(
    model: HookedModel,
    tokens_shape: Sequence[int],
    names_filter: Names = None,
    *,
    dtype: torch.dtype | None = None,
    pos: Index | None = None,
    reduce: Reduce | None = None,
    spans: Sequence[Spans] | None = None,
    gradients: bool = False,
) -> Estimate:
    """The bytes of ``run_with_cache`` with these arguments on tokens [B, T], without running anything.

    Raises:
        UnknownTensor, BadEdit, OutOfRange: as the run itself.
    """
    batch, length = tokens_shape
    rows = Rows(None, batch, length, None if spans is None else tuple(spans))
    return of(model, rows, Keep(names_filter, None, dtype, pos, reduce), gradients)


def check_budget(budget: Any) -> int:
    """A budget in bytes, at least one.

    Raises:
        BadEdit: it is no positive number.
    """
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or not 1 <= budget < math.inf:
        raise BadEdit(f"budget={budget!r}: a budget is a positive number of bytes, as 2 << 30 for 2 GiB.")
    return int(budget)


def check_fits(model: HookedModel, rows: Rows, keep: Keep, budget: int, gradients: bool = False) -> None:
    """Refuse a run that would take more than ``budget`` bytes.

    Raises:
        TooLarge: with the numbers, and what can be done.
        BadEdit: see `check_budget`.
    """
    budget = check_budget(budget)
    found = of(model, rows, keep, gradients)
    if found.total > budget:
        raise TooLarge(
            f"this run would take {found}; the budget is {byte_count(budget)} ({found.total:,} against {budget:,}"
            " bytes). Keep fewer names (names_filter=), some positions (pos=), reductions (reduce=) or another dtype"
            " (dtype=torch.bfloat16); or run fewer rows."
        )


def of(model: HookedModel, rows: Rows, keep: Keep, gradients: bool = False) -> Estimate:
    """The estimate of a run on ``rows``; see `estimate`."""
    sizes = _Sizes(model, rows)
    keeper = Keeper(model.sites, rows, None, keep._replace(device=None), in_chunks=not gradients)
    kept = {site: _kept(keeper, site, sizes) * (1 + gradients) for site in keeper.asked}
    made = [_live(todo, sizes, gradients) for todo in _plans(model, keeper)]
    return Estimate(kept, sum(made) if gradients else max(made))


def _kept(keeper: Keeper, site: Site, sizes: _Sizes) -> int:
    """Bytes kept of one site: its keeper is shown a tensor without storage. A function that can't take that counts as
    if the whole were kept."""
    card = keeper.sites.card(site.block)
    value = torch.empty(sizes.of(card, site.tensor), dtype=sizes.dtype(card, site.tensor), device="meta")
    try:
        keeper.see(site, value)
    except ProbeError:
        raise
    except Exception:  # of the user's function; if it is wrong, the run will say so
        return value.nbytes
    return _nbytes(keeper.cache[site] if site in keeper.cache else keeper.cache.reduced[site])


def _nbytes(made: Any) -> int:
    if isinstance(made, Tensor):
        return made.nbytes
    parts = made.values() if isinstance(made, dict) else made if isinstance(made, tuple | list) else ()
    return sum(_nbytes(part) for part in parts)


def _plans(model: HookedModel, keeper: Keeper) -> list[Plan]:
    """The plan of each part of the model, as the run would make it."""
    edited = model.watched()
    made = []
    for block in (None, *range(model.sites.dims.blocks)):
        card = model.sites.card(block)
        names = [[s.tensor for s in of if s.block == block] for of in (edited, keeper.watched, keeper.chunks)]
        given = ("tokens", "x_L") if block is None else ("x_n", "R", "M")
        made.append(plan(card, ("logits",) if block is None else ("x_next",), given, *names))
    return made


def _live(todo: Plan, sizes: _Sizes, keep_all: bool) -> int:
    """The most bytes that live at once in a plan; of what a step does without, one chunk of queries lives with it."""
    now = most = sum(sizes.bytes(todo.card, name) for name in todo.taken)
    for row, drop in zip(todo.steps, todo.drops, strict=True):
        chunk = sum(sizes.bytes(todo.card, name, None if keep_all else QUERY_CHUNK) for name in row.without)
        now += sizes.bytes(todo.card, row.name) + (chunk if keep_all else 0)
        most = max(most, now + (0 if keep_all else chunk))
        now -= 0 if keep_all else sum(sizes.bytes(todo.card, name) for name in drop)
    return most


class _Sizes:
    """Shapes and bytes of a card's tensors on some rows."""

    def __init__(self, model: HookedModel, rows: Rows) -> None:
        self.model, self.rows = model, rows
        self.act = model.decoder.weights.read(None, "w_final").dtype

    def of(self, card: Card, name: str, queries: int | None = None) -> tuple[int, ...]:
        """The shape of a step or an input, with at most so many queries."""
        run = {"B": self.rows.batch, "S": self.rows.length, "1": 1}
        run["T"] = min(self.rows.length, queries or self.rows.length)
        sizes = []
        for axis in card.shape(name):
            parts = letters(axis)
            sizes.append(math.prod(run[p] if p in run else self.model.dims.size(p) for p in parts))
        if name in ("R", "M") and not (self.rows.keep is None and self.rows.counted):  # one a row
            sizes.insert(0, self.rows.batch)
        return tuple(sizes)

    def dtype(self, card: Card, name: str) -> torch.dtype:
        """The dtype of a step or an input."""
        kind = "int64" if name == "tokens" else card.node(name).dtype
        return {"act": self.act, "fp32": torch.float32, "int64": torch.int64}[kind]

    def bytes(self, card: Card, name: str, queries: int | None = None) -> int:
        """The bytes of a step or an input."""
        return math.prod(self.of(card, name, queries)) * self.dtype(card, name).itemsize
