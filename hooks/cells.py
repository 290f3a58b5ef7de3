"""What a sweep is asked and what it answers: cells, sources that run along, outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hooks.edits import Edit
from hooks.stream import Stream
from hooks.where import Rows, Spans
from probe.errors import BadEdit, ShapeMismatch
from probe.sites import Site, Sites

BUDGET = 2 << 30
"""Bytes that the rows in flight may take beside the weights, where nobody says otherwise."""

Read = Sequence[Sequence[int]]
"""For each prompt, the real positions that are read."""


@dataclass(frozen=True)
class Cell:
    """A set of edits under one label.

    Attributes:
        edits: act together, as in one run.
        read: the positions that are read in this cell; None: those of the sweep.
        whole: sites that are looked at in this cell at all positions, beside those of the sweep.
    """

    edits: tuple[Edit, ...]
    label: str = ""
    read: Read | None = None
    whole: tuple[Site | str, ...] = ()


class Live:
    """Prompts that run along with a sweep: what its edits take values from, like any run, as they are made.

    Args:
        tokens: [B T] ids; None where a block runs alone.
        keep: [B T], true where a token is real; pads stand right.
        spans, spoken: each row's named spans, and how many of its tokens names count; see `hooks.where.Rows`.
        positions, segments: [B T], position ids, and the texts that rows pack; see `hooks.run.run`.
        edits: act on it (a corrupt run may be edits on the clean prompt).
        read: the positions at which it is looked at itself; None: it isn't.
        x_n: [B T d], the residual stream into the first block that runs, where it starts there.
        beyond: whether texts may be longer than the model's ``max_position_embeddings``.
    """

    def __init__(
        self,
        tokens: Tensor | None,
        keep: Tensor | None = None,
        spans: Sequence[Spans] | None = None,
        *,
        spoken: Sequence[int] | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        edits: Sequence[Edit] = (),
        read: Read | None = None,
        x_n: Tensor | None = None,
        beyond: bool = False,
    ) -> None:
        first = tokens if x_n is None else x_n
        if first is None:
            raise BadEdit("a source needs tokens, or the x_n that it starts from.")
        if first.ndim != (2 if x_n is None else 3):
            raise ShapeMismatch(f"tokens are [B T] and x_n is [B T d]; this is {list(first.shape)}.")
        self.tokens, self.edits, self.read, self.x_n, self.beyond = tokens, tuple(edits), read, x_n, beyond
        self.rows = Rows.of(first, keep, spans, spoken, positions, segments)
        if keep is not None and bool((keep.long().diff(dim=-1) > 0).any()):
            raise BadEdit("a sweep takes rows padded on the right, as Prompts.batch and HookedModel.batch make them.")
        self.cache: Any = Held(self.rows)


class Held:
    """The values of a source in the block that is under way, found by site as in a cache; empty ones of the right
    shape before the walk, so that edits can be checked."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.sites: Sites | None = None
        self.forget()

    def forget(self) -> None:
        """As before any sweep."""
        self.sites, self.added = None, frozenset[Site]()
        self.stream: Stream | None = None
        self.block: int | None = None

    @property
    def dims(self) -> Any:
        """The sizes of the model that it runs on.

        Raises:
            BadEdit: it runs on none.
        """
        return self._lent.dims

    @property
    def _lent(self) -> Sites:
        if self.sites is None:
            raise BadEdit(
                "prompts that run along have values in a sweep that has them among its sources, and there alone."
            )
        return self.sites

    def __getitem__(self, site: Site) -> Tensor:
        if self.stream is not None:
            assert site.block == self.block, f"{site} is asked for in block {self.block}"
            return self.stream.grid(site.tensor, 0, self.stream.shown_to(site, 0))
        shape = self.rows.shape(self._lent.node(site), self.dims)
        empty = torch.empty(shape, device="meta")
        return torch.cat([empty, empty], dim=2) if site in self.added else empty


Look = Callable[["Cell | Live", Site, Tensor], None]
"""Sees each site that is asked for: of the base and the sources first, then of each cell. [B R ·] at the positions
read, shorter rows padded with their last; or [B T ·] whole (of S and A [B h T S]). Not to be written into."""


@dataclass
class Outcome:
    """What a cell came to.

    Attributes:
        touched: places that its edits met, each once however many of them did: rows along a tensor's last axis that
            they named, at least in part. Places of different sites are different places.
        worlds: prompts on which it changed anything and was computed; on the others its values are the base's.
        routing_agreement: share of chosen experts that the base chose too, over MoE blocks and the positions that the
            edits can reach and that are computed (in the last block, those read); None where they reach no router.
        flips: how many choices changed there.
        unmatched: why it has no value: an expert that the source didn't choose; None where it has.
    """

    touched: int = 0
    worlds: int = 0
    routing_agreement: float | None = None
    flips: int = 0
    unmatched: str | None = None
