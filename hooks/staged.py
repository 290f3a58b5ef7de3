"""What a sweep is asked, bound and checked before anything runs: who runs, with which edits, through which blocks, what
is shown of it, and which cells go together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooks.apply import At, bound, check_no_cut
from hooks.attend import PIECE
from hooks.cells import BUDGET, Cell, Live, Read
from hooks.edits import SCORES, Freeze
from hooks.layout import Layout
from hooks.run import check_stream
from hooks.stream import Stream
from probe.card import Card
from probe.engine import plan
from probe.errors import BadEdit, OutOfRange
from probe.sites import Site
from probe.weights import weight_shape

if TYPE_CHECKING:
    from hooks.model import HookedModel

NEAR = 1 << 28
"""Bytes of rows beyond which a CPU loses more by fetching them, and by fresh memory, than larger products save; unless
a block's weights, which every batch reads, are more than that."""


class Staged:
    """A sweep that has not begun; the arguments are `hooks.sweep`'s.

    Attributes:
        lives: the base, then the sources; `roots` are their streams.
        ats: the edits of each cell, bound; `root_ats` those of base and sources.
        chunks: cells in batches; `members` says which cells each holds.
        looked: all sites that are shown of anybody; `last` is the part of the last of them.
        trimmed: parts in which only the positions read matter.
        used: for each source the last part in which cells take from it.
        lasting: tensors of a part that edits after their last reader may still ask for.
    """

    def __init__(
        self,
        model: HookedModel,
        base: Live,
        sources: Sequence[Live],
        cells: Sequence[Cell],
        want: Sequence[Site | str] = ("logits",),
        whole: Sequence[Site | str] = (),
        read: Read | None = None,
        first: int = -1,
        budget: int = BUDGET,
    ) -> None:
        self.model, self.sites, self.dims = model, model.sites, model.dims
        self.device = model.device
        self.cells = list(cells)
        self.lives = [base, *sources]
        if len({id(live) for live in self.lives}) < len(self.lives):
            raise BadEdit("a source is named twice, or is the base itself; the base's values are always at hand.")
        if base.read is not None:
            raise BadEdit("the base is looked at where the sweep says: give it read=.")
        for live in sources:
            _checked_read(live, live.read)
        self.read = _checked_read(base, read)
        self.reads = [self.read if cell.read is None else _checked_read(base, cell.read) for cell in self.cells]
        self.want = {self.sites.find(site) for site in want}
        self.whole = {self.sites.find(site) for site in whole}
        self.wholes = [{self.sites.find(site) for site in cell.whole} for cell in self.cells]
        if squares := sorted(str(site) for site in self.want if site.tensor in SCORES):
            raise BadEdit(f"{squares[0]} is over pairs of positions; look at it whole.")
        self.first = first
        if first != -1:
            self.sites.card(first)
        self.starts = [self._start(live) for live in self.lives]
        ats = self._bind(base, sources)
        self.looked = looked = self.want.union(self.whole, *self.wholes)
        self.last = max(map(self.sites.depth, looked), default=-1)
        self._check_first(ats)
        everywhere = self.whole.union(*self.wholes, *map(self._see_all, ats))
        self.trimmed = self._trimmed(set(map(self.sites.depth, everywhere)))
        self.base = self._root(base, None)
        self.sources = [self._root(live, self.base) for live in sources]
        self.roots = [self.base, *self.sources]
        self.used = [max(map(self.sites.depth, self.taken_from(live, ats)), default=-2) for live in sources]
        self.piece = PIECE
        redo = any(getattr(at.edit.how, "rotate", None) == "redo" for some in ats for at in some)
        self.lasting = frozenset(("experts", "choice_score", *(("Q_C", "Q_pe", "K_C", "k_pe") if redo else ())))
        self.chunks, self.members = self._chunked(ats, budget)
        self.ats = ats

    def _bind(self, base: Live, sources: Sequence[Live]) -> list[list[At]]:
        """The cells' edits, bound and checked; the roots' own are kept with them."""
        self.root_ats = []
        for live in self.lives:
            if any(isinstance(edit.how, Freeze) for edit in live.edits):
                raise BadEdit("the base or a source of a sweep has nothing to be frozen to.")
            ats = bound(live.edits, self.sites, live.rows, None)
            if any(at.source in self.lives for at in ats):
                raise BadEdit("the edits of a base or a source take values from runs, not from what runs along.")
            if live is base and any(at.is_weight for at in ats):
                raise BadEdit("an edited weight of the base is a weight of every cell: give the model edited weights.")
            check_no_cut(ats, self.sites)
            live.cache.added = frozenset(at.site for at in ats if at.adds)
            self.root_ats.append(ats)
        made = []
        for cell in self.cells:
            ats = bound(cell.edits, self.sites, base.rows, base)
            check_no_cut(ats, self.sites)
            known = {id(live) for live in self.lives}
            for at in ats:
                taken = [getattr(at.edit.how, "source", None)]
                if lost := [source for source in taken if isinstance(source, Live) and id(source) not in known]:
                    raise BadEdit(f"{at.edit}: its source {lost[0]!r} is not among the sweep's sources.")
            made.append(ats)
        return made

    def _check_first(self, ats: Sequence[Sequence[At]]) -> None:
        """A walk that starts in a block neither edits nor shows what comes before."""
        if self.first < 0:
            return
        before = [site for site in self.looked if self.sites.depth(site) < self.first]
        before += [at.site for some in (*self.root_ats, *ats) for at in some if self.sites.depth(at.site) < self.first]
        if before:
            raise BadEdit(f"the walk starts in block {self.first}, so {before[0]} is never made.")

    def _see_all(self, ats: Sequence[At]) -> set[Site]:
        """Where a cell's edits must see rows that nobody reads: those that mix positions, or hang on chosen experts
        that an edit before may have changed."""
        seen = {at.site for at in (*self.root_ats[0], *ats) if at.mixes}
        for at in (*self.root_ats[0], *ats):
            block = at.site.block
            if (
                at.by_slot
                and block is not None
                and any(bool(other.reach(block, self.lives[0].rows).any()) for other in ats)
            ):
                seen.add(at.site)
        return seen

    def _trimmed(self, whole: set[int]) -> set[int]:
        """The parts in which only the positions read matter: the last one, and before the head the last block too."""
        trimmed: set[int] = set()
        for part in (self.dims.blocks, self.dims.blocks - 1) if self.last == self.dims.blocks else (self.last,):
            if part in whole:
                break
            trimmed.add(part)
        return trimmed

    def taken_from(self, live: Live, ats: Sequence[Sequence[At]]) -> list[Site]:
        """The sites at which cells take values of a source."""
        return [at.site for cell in ats for at in cell if getattr(at.edit.how, "source", None) is live]

    def _start(self, live: Live) -> Tensor:
        """What a root starts from, [B T] or [B T d]; checked."""
        rows = live.rows
        if live.tokens is not None:
            self.model.decoder.check_tokens(live.tokens, rows.keep, positions=rows.ids, segments=rows.segments)
        if live.x_n is not None:
            self.model.decoder.check_rows(rows.keep, rows.batch, rows.length, rows.ids, rows.segments)
            check_stream(self.model, Site(max(0, self.first), "x_n"), live.x_n)
        start = live.tokens if self.first < 0 else live.x_n
        if start is None:
            raise BadEdit("a walk from the embedding starts from tokens, and one from a block from x_n: give that.")
        return start.to(self.device)

    def _root(self, live: Live, base: Stream | None) -> Stream:
        """The base, or a source: which holds, of each text, the positions from the first that differs from the base's
        in its token or its place."""
        at = self.lives.index(live)
        start, ats = self.starts[at], self.root_ats[at]
        real = live.rows.mask(None, "T").to(self.device)
        own = real
        shared = base is not None and live.rows.batch == base.batch and not self.root_ats[0]
        if shared:
            assert base is not None
            theirs = self.starts[0]
            length = min(start.shape[1], theirs.shape[1])
            same = (start[:, :length] == theirs[:, :length]).flatten(2 if start.ndim > 2 else 1)
            same = (same if start.ndim == 2 else same.all(-1)) & real[:, :length] & base.real[:, :length]
            differs = torch.ones_like(real)
            differs[:, :length] = ~(same & live.rows.meets(base.rows).to(self.device))
            own = real & live.rows.onward(differs)
        made = Stream(live.rows, base if shared else None, [ats], self.device)
        layout = Layout(own)
        if len(layout) or not shared:
            world, pos = layout.places
            made.put("x_n" if self.first >= 0 else "tokens", start[world, pos][None], layout)
        return made

    def _chunked(self, ats: Sequence[Sequence[At]], budget: int) -> tuple[list[Stream], list[list[int]]]:
        """The cells in batches whose rows fit the budget, and which cells each holds.

        Cells that start at the same positions stand together, so that their attention is one product.
        """
        each = self.bytes_per_row()
        if self.device.type == "cpu" and self.model.decoder.weights.resident:
            weights = max(_bytes(card, self.dims, self.starts[0]) for card in self.sites.cards)
            budget = min(budget, max(NEAR, weights))
        self.sizes = sizes = [self._most(i, some) for i, some in enumerate(ats)]
        rows = [int(after(some, self.base).sum()) for some in ats]
        members: list[list[int]] = []
        full = budget
        for i in sorted(range(len(ats)), key=lambda i: -rows[i]):
            if full + sizes[i] * each > budget:
                members.append([])
                full = 0
            members[-1].append(i)
            full += sizes[i] * each
        return [Stream(self.base.rows, self.base, [ats[i] for i in part], self.device) for part in members], members

    def _most(self, i: int, ats: Sequence[At]) -> int:
        """The most rows that a cell may come to hold at a time."""
        first = min(map(self.sites.depth, (at.site for at in ats)), default=self.last)
        if all(part in self.trimmed for part in range(first, self.last + 1)):
            named = sum(int(_named(at, self.base).sum()) for at in ats)
            return max(named, sum(map(len, self.reads[i])))
        return int(after(ats, self.base).sum())

    def bytes_per_row(self) -> int:
        """The most that one row takes in a block: all values that are alive at one time."""
        return max(_peak(card, self.dims, self.starts[0]) for card in set(self.sites.cards))


def _checked_read(base: Live, read: Read | None) -> list[list[int]]:
    """Real positions for each prompt; None: its last."""
    lengths = base.rows.lengths
    if read is None:
        return [[length - 1] for length in lengths]
    if len(read) != len(lengths):
        raise BadEdit(f"positions are read for {len(read)} prompts; there are {len(lengths)}.")
    for b, (places, length) in enumerate(zip(read, lengths, strict=True)):
        if not len(places) or min(places) < 0 or max(places) >= length:
            raise OutOfRange(f"prompt {b} has positions 0 to {length - 1}, and {list(places)} are read.")
    return [list(places) for places in read]


def after(ats: Sequence[At], base: Stream) -> Tensor:
    """[B T]: the rows that a cell may come to hold: of each text, the real positions from its first edited one on."""
    mask = torch.zeros(base.batch, base.length, dtype=torch.bool)
    for at in ats:
        mask |= _named(at, base)
    return base.rows.onward(mask) & base.real.cpu()


def _named(at: At, base: Stream) -> Tensor:
    """[B T]: the positions that an edit acts at; all real ones, where it names none."""
    place = None if at.is_weight else at.where.get("T", at.where.get("S"))
    return base.rows.mask(place, "T", None if at.is_weight else at.among)


def _itemsize(start: Tensor) -> int:
    """Bytes of a number, as far as what a walk starts from tells: tokens don't."""
    return start.element_size() if start.is_floating_point() else 4


def _bytes(card: Card, dims: Any, like: Tensor) -> int:
    """Bytes of a block's weights."""
    return _itemsize(like) * sum(math.prod(weight_shape(leaf, dims)) for leaf in card.weights)


def _peak(card: Card, dims: Any, like: Tensor) -> int:
    """Bytes of one row's values, where most are alive."""
    itemsize = _itemsize(like)
    todo = plan(card, ("x_next",), ("x_n", "R", "M"))
    width = {
        name: itemsize_of(card, name, itemsize)
        * max(1, torch.Size([dims.size(axis) for axis in card[name].axes if axis not in "BTS"]).numel())
        for name in card
    }
    alive, most = {"x_n": dims.d * itemsize}, 0
    for row, drops in zip(todo.steps, todo.drops, strict=True):
        alive[row.name] = width[row.name]
        most = max(most, sum(alive.values()))
        for name in drops:
            alive.pop(name, None)
    return 2 * most  # a step's own copies of what it reads


def itemsize_of(card: Card, name: str, act: int) -> int:
    """Bytes of one number of a tensor."""
    return {"act": act, "fp32": 4, "int64": 8}[card.node(name).dtype]
