"""Many edits at the price of a few runs: one walk over the blocks, in which every cell computes only what it changes.

When a block's weights are at hand, so are the base's and the sources' values in it, and the cells that edit this block
start there. A cell holds rows only where it differs from the base (`hooks.stream`): at the edited positions until they
are read as keys, from the first of them on after that, and where nothing but what is read matters, there alone. The
rows of all cells meet each weight in one product; keys and values that a cell has not changed are the base's
(`hooks.attend`). Whether a cell changes anything is seen by the bits: where it doesn't, it costs nothing.

The twin of it all is `HookedModel.run`, one whole run a cell; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from hooks.cells import BUDGET, Cell, Live, Look, Outcome, Read
from hooks.staged import Staged
from hooks.walk import Walk
from probe.errors import BadEdit
from probe.sites import Site, Sites

if TYPE_CHECKING:
    from hooks.model import HookedModel


def sweep(
    model: HookedModel,
    base: Live,
    cells: Sequence[Cell],
    look: Look,
    *,
    sources: Sequence[Live] = (),
    want: Sequence[Site | str] = ("logits",),
    whole: Sequence[Site | str] = (),
    read: Read | None = None,
    first: int = -1,
    budget: int = BUDGET,
    tick: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Run many cells in one walk.

    Args:
        base: what the cells start from; its edits, if any, act in every cell.
        cells: see `Cell`. Their edits take values from runs, caches, or from ``sources``.
        look: see `Look`.
        sources: run along, and lend their values to the cells' edits.
        want: sites to look at, in base, sources and cells, at the positions read.
        whole: sites to look at, at all positions.
        read: for each prompt of the base the positions that are read; None: its last.
        first: the block to start in, from ``x_n`` of base and sources; -1: the embedding.
        budget: bytes for base, sources and cells at a time; cells go in as many batches as that needs.
        tick: called with steps done and steps in all, as work goes on.

    Returns:
        An outcome for each cell.

    Raises:
        BadEdit, UnknownTensor, UnknownDim, OutOfRange: an edit that cannot mean what it says, before anything runs; or
            hooks on the model, which a sweep would pass by.
    """
    if hooked := sorted(map(str, model.acting())):
        raise BadEdit(f"hooks are on ({', '.join(hooked)}), and a sweep would pass them by; make them edits.")
    with _lent(model.sites, (base, *sources)), torch.no_grad():
        walk = Walk(Staged(model, base, sources, cells, want, whole, read, first, budget), look, tick)
        walk.go()
        return walk.outcomes()


@contextmanager
def _lent(sites: Sites, lives: Sequence[Live]) -> Iterator[None]:
    """What runs along knows the model's sites for as long as a sweep lasts, and holds nothing after it."""

    def forget() -> None:
        for live in lives:
            live.cache.forget()

    try:
        try:
            for live in lives:
                live.cache.sites = sites
            yield
        finally:
            forget()
    finally:
        forget()  # once more, as Ctrl-C may have ended the first


class Outlook(NamedTuple):
    """What a sweep would take, from the rows that cells may come to hold; those that change nothing will cost less.

    Attributes:
        forwards: computing, in plain forward passes over the base's prompts: base, sources and cells.
        bytes: that are alive at one time, beside the weights: of base, sources and a batch of cells.
    """

    forwards: float
    bytes: int


def outlook(
    model: HookedModel, base: Live, cells: Sequence[Cell], *, sources: Sequence[Live] = (), budget: int = BUDGET
) -> Outlook:
    """What a sweep would take; nothing is run.

    Raises:
        BadEdit, UnknownTensor, UnknownDim, OutOfRange: as `sweep`.
    """
    with _lent(model.sites, (base, *sources)):
        staged = Staged(model, base, sources, cells, budget=budget)
        ahead = staged.forecast
    blocks, tokens = model.dims.blocks, sum(base.rows.lengths)
    roots = sum(sum(live.rows.lengths) for live in (base, *sources)) / tokens
    left = (blocks - ahead.cells.first.clip(min=0)).clip(min=0)
    return Outlook(roots + float((ahead.cells.after * left).sum()) / (tokens * blocks), ahead.bytes)
