"""What a sweep is asked, bound and checked before anything runs: who runs, with which edits, through which blocks, what
is shown of it, and which cells go together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hooks.apply import At, bound, check_no_cut, check_seen
from hooks.attend import PIECE
from hooks.cells import BUDGET, Cell, Live, Read
from hooks.edits import SCORES, Freeze
from hooks.estimate import check_budget
from hooks.forecast import Forecast
from hooks.layout import Layout
from hooks.run import check_stream
from hooks.stream import Stream
from probe.engine import Plan, plan
from probe.errors import BadEdit, OutOfRange
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel


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
        redo = any(getattr(at.edit.how, "rotate", None) == "redo" for some in ats for at in some)
        self.lasting = frozenset(("experts", "choice_score", *(("Q_C", "Q_pe", "K_C", "k_pe") if redo else ())))
        self.ats = ats
        budget = check_budget(budget)
        self.piece = min(PIECE, budget // 8)
        self.forecast = Forecast(self, budget)
        self.members = self.forecast.members
        self.chunks = [Stream(base.rows, self.base, [ats[i] for i in part], self.device) for part in self.members]

    # ---- its parts -----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> range:
        """The parts that are walked: -1 the embedding, then the blocks, behind them the head."""
        return range(self.first, min(self.last, self.dims.blocks) + 1)

    def plan(self, part: int) -> Plan:
        """The steps of a part: towards what is passed on, looked at, or edited."""
        here = [site.tensor for site in self.looked if self.sites.depth(site) == part]
        edited = self._edited(part)
        ends = {-1: ["x_0"], self.dims.blocks: []}.get(part, ["x_next"])
        want = ["O" if name in SCORES else name for name in here] + (ends if part < self.last else [])
        given = {-1: ("tokens",), self.dims.blocks: ("x_L",)}.get(part, ("x_n", "R", "M"))
        edited = {"O" if name in SCORES else name for name in edited} - {"x_n"}
        return plan(self.sites.card(self.block(part)), want or ends, given, edited, exact=False)

    def explicit(self, part: int) -> bool:
        """Whether scores are made whole, cell by cell: somebody sees or edits them."""
        here = {site.tensor for site in self.looked if self.sites.depth(site) == part}
        return bool((here | self._edited(part)) & set(SCORES))

    def block(self, part: int) -> int | None:
        """The block that a part is; None: it is around them."""
        return part if 0 <= part < self.dims.blocks else None

    def _edited(self, part: int) -> set[str]:
        """What is edited in a part, and the readers that edits name."""
        return {name for at in self._edits_of[part] for name in (at.site.tensor, *at.into)}

    @cached_property
    def _edits_of(self) -> dict[int, list[At]]:
        """The edits of activations, by part."""
        made: dict[int, list[At]] = defaultdict(list)
        for at in (at for ats in (*self.root_ats, *self.ats) for at in ats if not at.is_weight):
            made[self.sites.depth(at.site)].append(at)
        return made

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
            check_seen(ats)
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
        decoder, rows = self.model.reaching(live.beyond).decoder, live.rows
        if live.tokens is not None:
            decoder.check_tokens(live.tokens, rows.keep, positions=rows.ids, segments=rows.segments)
        if live.x_n is not None:
            decoder.check_rows(rows.keep, rows.batch, rows.length, rows.ids, rows.segments)
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
