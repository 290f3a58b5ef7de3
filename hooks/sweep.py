"""Many edits at the price of a few runs: one walk over the blocks, in which every cell computes only what it changes.

When a block's weights are at hand, so are the base's and the sources' values in it, and the cells that edit this block
start there. A cell holds rows only where it differs from the base (`hooks.stream`): at the edited positions until they
are read as keys, from the first of them on after that, and where nothing but what is read matters, there alone. The
rows of all cells meet each weight in one product; keys and values that a cell has not changed are the base's
(`hooks.attend`). Whether a cell changes anything is seen by the bits: where it doesn't, it costs nothing.

The twin of it all is `HookedModel.run`, one whole run a cell; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hooks.apply import At, bound, check_no_cut
from hooks.attend import Packed, attend_worlds
from hooks.cells import Cell, Live, Look, Outcome, Read
from hooks.edits import SCORES, Freeze
from hooks.layout import Layout
from hooks.run import check_stream
from hooks.stream import Stream, fitted
from probe.card import Card, Step
from probe.engine import Plan, compute, plan
from probe.errors import BadEdit, OutOfRange, Unmatched
from probe.numerics import Rotation, attend, causal_mask, mix, pattern, rotation, scores
from probe.sites import Site, Sites

if TYPE_CHECKING:
    from hooks.model import HookedModel

FEW = 512
"""Rows up to which a stream shares its products with others."""

BUDGET = 2 << 30
"""Bytes that the rows in flight may take beside the weights, where nobody says otherwise."""


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
        budget: bytes for the rows in flight; cells go in as many batches as that needs.
        tick: called with steps done and steps in all, as work goes on.

    Returns:
        An outcome for each cell.

    Raises:
        BadEdit, UnknownTensor, UnknownDim, OutOfRange: an edit that cannot mean what it says, before anything runs; or
            hooks on the model, which a sweep would pass by.
    """
    if hooked := sorted(map(str, model.watched())):
        raise BadEdit(f"hooks are on ({', '.join(hooked)}), and a sweep would pass them by; make them edits.")
    with _lent(model.sites, (base, *sources)), torch.no_grad():
        walk = _Walk(model, base, sources, cells, look, want, whole, read, first, budget, tick)
        walk.go()
        return walk.outcomes()


@contextmanager
def _lent(sites: Sites, lives: Sequence[Live]) -> Iterator[None]:
    """What runs along knows the model's sites for as long as a sweep lasts, and holds nothing after it."""
    for live in lives:
        live.cache.sites = sites
    try:
        yield
    finally:
        for live in lives:
            live.cache.forget()


class Outlook(NamedTuple):
    """What a sweep would take, from the rows that cells may come to hold; those that change nothing will cost less.

    Attributes:
        forwards: computing, in plain forward passes over the base's prompts: base, sources and cells.
        bytes: of the rows in flight at a time, beside the weights.
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
        walk = _Walk(model, base, sources, cells, lambda *_: None, ("logits",), (), None, -1, budget, None)
    blocks, tokens = model.dims.blocks, sum(base.rows.lengths)
    roots = sum(sum(live.rows.lengths) for live in (base, *sources)) / tokens
    rows = [int(_after(ats, walk.base).sum()) for ats in walk.ats]
    left = [blocks - max(0, min((model.sites.depth(at.site) for at in ats), default=blocks)) for ats in walk.ats]
    forwards = roots + sum(n * b for n, b in zip(rows, left, strict=True)) / (tokens * blocks)
    chunks = [sum(walk.sizes[i] for i in members) for members in walk.members]
    return Outlook(forwards, max(chunks, default=0) * walk.bytes_per_row())


class _Walk:
    """One pass over the parts of the model: embedding (-1), blocks, head."""

    def __init__(
        self,
        model: HookedModel,
        base: Live,
        sources: Sequence[Live],
        cells: Sequence[Cell],
        look: Look,
        want: Sequence[Site | str],
        whole: Sequence[Site | str],
        read: Read | None,
        first: int,
        budget: int,
        tick: Callable[[int, int], None] | None,
    ) -> None:
        self.model, self.sites, self.dims = model, model.sites, model.dims
        self.weights, self.device = model.decoder.weights, model.device
        self.look, self.tick = look, tick
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
        self.used = [max(map(self.sites.depth, self._taken_from(live, ats)), default=-2) for live in sources]
        self.chunks, self.members = self._chunked(ats, budget)
        self.flips = torch.zeros(len(self.cells), dtype=torch.long)
        self.reached = [0] * len(self.cells)
        self.reach: dict[int, Tensor] = {}
        self.ats = ats

    # ---- before the walk -----------------------------------------------------------------------------------------

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

    def _taken_from(self, live: Live, ats: Sequence[Sequence[At]]) -> list[Site]:
        """The sites at which cells take values of a source."""
        return [at.site for cell in ats for at in cell if getattr(at.edit.how, "source", None) is live]

    def _start(self, live: Live) -> Tensor:
        """What a root starts from, [B T] or [B T d]; checked."""
        if live.tokens is not None:
            self.model.decoder.check_tokens(live.tokens, live.rows.keep)
        if live.x_n is not None:
            self.model.decoder.check_keep(live.rows.keep, live.rows.batch, live.rows.length)
            check_stream(self.model, Site(max(0, self.first), "x_n"), live.x_n)
        start = live.tokens if self.first < 0 else live.x_n
        if start is None:
            raise BadEdit("a walk from the embedding starts from tokens, and one from a block from x_n: give that.")
        return start

    def _root(self, live: Live, base: Stream | None) -> Stream:
        """The base, or a source: which holds the positions from the first that differs from the base's."""
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
            prefix = torch.zeros_like(real)
            prefix[:, :length] = same.long().cumprod(-1).bool()
            own = real & ~prefix
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
        self.sizes = sizes = [self._most(i, some) for i, some in enumerate(ats)]
        after = [int(_after(some, self.base).sum()) for some in ats]
        members: list[list[int]] = []
        full = budget
        for i in sorted(range(len(ats)), key=lambda i: -int(after[i])):
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
        return int(_after(ats, self.base).sum())

    def bytes_per_row(self) -> int:
        """The most that one row takes in a block: all values that are alive at one time."""
        return max(_peak(card, self.dims, self.starts[0]) for card in set(self.sites.cards))

    # ---- the walk ------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Part by part, to the last one that somebody looks at."""
        parts = range(self.first, min(self.last, self.dims.blocks) + 1)
        for i, part in enumerate(parts):
            self._part(part)
            if self.tick is not None:
                self.tick(i + 1, len(parts))

    def _part(self, part: int) -> None:
        block = part if 0 <= part < self.dims.blocks else None
        self.block, self.card = block, self.sites.card(block)
        todo = self._plan(part)
        self._needs(part)
        self._constants()
        held: dict[str, Tensor] | None = {} if len(self.chunks) > 1 else None
        running = [self.base]  # a source stops where nobody takes from it any more, nor looks at it
        for live, stream, used in zip(self.lives[1:], self.sources, self.used, strict=True):
            running += [stream] if used >= part or live.read is not None else []
        for live, stream in zip(self.lives, self.roots, strict=True):
            live.cache.stream, live.cache.block = stream, block
        for i, chunk in enumerate(self.chunks or [Stream(self.base.rows, self.base, [], self.device)]):
            members = self.members[i] if self.members else []
            roots = running if i == 0 else []
            chunk.useful = self._useful(chunk, members)
            self._arrive(block, roots, chunk, members)
            for row, drops in zip(todo.steps, todo.drops, strict=True):
                self._step(row, roots, chunk, members, held)
                for name in drops:
                    if name not in ("experts", "choice_score"):
                        chunk.drop(name)
            self._leave(chunk)
        for stream in running:
            if stream.unmatched:
                raise Unmatched(stream.unmatched[0])
            self._leave(stream)

    def _plan(self, part: int) -> Plan:
        """The steps of this part: towards what is passed on, looked at, or edited."""
        here = [site.tensor for site in self.looked if self.sites.depth(site) == part]
        edited = {
            name
            for ats in (*self.root_ats, *self.ats)
            for at in ats
            if self.sites.depth(at.site) == part and not at.is_weight
            for name in (at.site.tensor, *at.into)
        }
        self.explicit = bool({*here, *edited} & set(SCORES))  # which are made with O, cell by cell
        ends = {-1: ["x_0"], self.dims.blocks: []}.get(part, ["x_next"])
        want = ["O" if name in SCORES else name for name in here] + (ends if part < self.last else [])
        given = {-1: ("tokens",), self.dims.blocks: ("x_L",)}.get(part, ("x_n", "R", "M"))
        edited = {"O" if name in SCORES else name for name in edited} - {"x_n"}
        return plan(self.card, want or ends, given, edited, exact=False)

    def _needs(self, part: int) -> None:
        """Where only what is read matters: in the head; in the last block past keys and values."""
        B, T = self.base.batch, self.base.length
        self.head = part >= self.dims.blocks
        below = {name for name in self.card if {"K", "V"} & ({name} | self.card.descendants([name]))}
        self.key_side = frozenset() if self.head else frozenset(below | {"x_n"})
        if part not in self.trimmed:
            return
        union = _mask(self.read, B, T)
        for chunk, members in zip(self.chunks, self.members, strict=True):
            mask = torch.cat([_mask(self.reads[i], B, T) for i in members])
            union = union | mask.view(len(members), B, T).any(0)
            chunk.needed = Layout(mask.to(self.device))
        edited = {site for stream in (*self.roots, *self.chunks) for site in stream.by_site}
        if self.head and all(self.sites.depth(site) < part for site in edited):
            for live, stream in zip(self.lives[1:], self.sources, strict=True):
                read = [[]] * stream.batch if live.read is None else live.read
                mask = _mask(read, stream.batch, stream.length)
                stream.needed = Layout(mask.to(self.device))
                if stream.base is not None:  # what it shares with the base it reads there
                    shared = min(T, stream.length)
                    union[:, :shared] |= mask[:, :shared]
            self.base.needed = Layout(union.to(self.device))

    def _useful(self, chunk: Stream, members: Sequence[int]) -> dict[str, Layout]:
        """Steps that some cells do without, as what comes of them is held at the base's value; and the others' rows."""
        idle: dict[str, list[int]] = {}
        for cell, i in enumerate(members):
            here = [at for at in self.ats[i] if at.site.block == self.block]
            held = frozenset(at.site.tensor for at in here if at.whole and isinstance(at.edit.how, Freeze))
            for name in self._idle(held, self.wholes[i]) if held else ():
                idle.setdefault(name, []).append(cell)
        layouts = {}
        for cells in set(map(tuple, idle.values())):
            mask = torch.ones(chunk.cells, chunk.batch, chunk.length, dtype=torch.bool, device=self.device)
            mask[list(cells)] = False
            layouts[cells] = Layout(mask.flatten(0, 1))
        return {name: layouts[tuple(cells)] for name, cells in idle.items()}

    def _idle(self, held: frozenset[str], looked: set[Site]) -> list[str]:
        """The steps of this block from which all ways on lead to what is held; not the router's, whose flips count."""
        shown = {site.tensor for site in (*self.want, *self.whole, *looked) if site.block == self.block}
        stack = [*shown, "experts", "x_next" if self.block is not None else "logits"]
        alive: set[str] = set()
        while stack:
            name = stack.pop()
            if name in self.card and name not in alive:
                alive.add(name)
                stack += () if name in held else self.card[name].needs
        return [name for name in self.card if name not in alive]

    def _constants(self) -> None:
        x = self.base.own("x_n") or self.base.own("x_next") or self.base.own("x_0") or self.base.own("x_L")
        if x is None or hasattr(self, "R"):
            return
        self.dt = x.value.dtype
        longest = max(stream.length for stream in self.roots)
        self.R = rotation(torch.arange(longest, device=self.device), self.dims, self.dt)

    def _arrive(self, block: int | None, roots: Sequence[Stream], chunk: Stream, members: Sequence[int]) -> None:
        """The residual stream comes in, and its edits act."""
        if block is not None:
            for stream in (*roots, chunk):
                stream.edit(Site(block, "x_n"))
            self._shown("x_n", roots, [(chunk, members)])

    def _leave(self, stream: Stream) -> None:
        """Only the residual stream goes on, under the next part's name for it."""
        passed = stream.own("x_0" if self.block is None else "x_next")
        stream.clear()
        if passed is not None:
            name = "x_L" if self.block == self.dims.blocks - 1 else "x_n"
            stream.values[name, ""] = passed

    def _step(
        self, row: Step, roots: Sequence[Stream], chunk: Stream, members: Sequence[int], held: dict[str, Tensor] | None
    ) -> None:
        streams = [*roots, chunk]
        if row.name == "O":
            for stream in roots:
                self._attend_whole(stream)
            self._attend(chunk, members)
        else:
            self._make(row, streams, held)
        trim = self.head or row.name not in self.key_side
        site = Site(self.block, row.name)
        for stream in streams:
            if stream.on_weights:
                self._edited_weights(row, stream, trim)
            stream.edit(site, trim=trim)
        if row.name == "experts":
            self._count_routing(chunk, members)
        for name in (*(SCORES if row.name == "O" and self.explicit else ()), row.name):
            self._shown(name, roots, [(chunk, members)])

    # ---- one step ------------------------------------------------------------------------------------------------

    def _make(self, row: Step, streams: Sequence[Stream], held: dict[str, Tensor] | None) -> None:
        """One step for all rows that are there; its weights are read once."""
        there = [(stream, layout) for stream in streams if (layout := self._layout(row, stream)) is not None]
        if not there:
            return
        read = self._read(row, there, held)
        for batch in _batches(there):
            each = [[self._arg(need, row, *one, read) for need in row.needs] for one in batch]
            args = [
                self._joined(need, parts, read) for need, parts in zip(row.needs, zip(*each, strict=True), strict=True)
            ]
            made = compute(row, args, self.card.leaves, self.model.decoder.numerics).split(
                [len(layout) for _, layout in batch], dim=1
            )
            for (stream, layout), value in zip(batch, made, strict=True):
                stream.put(row.name, value, layout)

    def _joined(self, need: str, parts: Sequence[Any], read: Mapping[str, Any]) -> Any:
        """One argument for the rows of several streams."""
        if len(parts) == 1 or (need in read and need != "experts") or self._constant(need) is not None:
            return parts[0]
        if need == "R":
            return Rotation(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))
        return torch.cat([fitted(part, max((p.shape[2:] for p in parts), default=())) for part in parts], dim=1)

    def _layout(self, row: Step, stream: Stream) -> Layout | None:
        """A step has the rows that any of what it reads has; None: not one."""
        layout: Layout | None = None
        for need in row.needs:
            own = stream.own(need, row.name)
            if own is not None:
                layout = own.layout if layout is None else stream.layouts.union(layout, own.layout)
        if layout is not None and row.name in stream.useful:
            layout = stream.layouts.cut(layout, stream.useful[row.name])
        if layout is not None and stream.needed is not None and (self.head or row.name not in self.key_side):
            layout = stream.layouts.cut(layout, stream.needed)
        return layout if layout is not None and len(layout) else None

    def _read(
        self, row: Step, there: Sequence[tuple[Stream, Layout]], held: dict[str, Tensor] | None
    ) -> Mapping[str, Any]:
        """The weights of a step; of a routed one the rows that tokens chose, and ``experts`` as places among them."""
        read: dict[str, Any] = {}
        for need in row.needs:
            leaf = self.card.leaves.get(need)
            if leaf is None or leaf.kind != "weight":
                continue
            if leaf.routed and not self.weights.resident:
                chosen = torch.unique(torch.cat([s.at("experts", layout).flatten() for s, layout in there]))
                read[need] = self.weights.read(self.block, need, chosen.tolist())
                read["experts"] = chosen
            elif held is None or leaf.routed:
                read[need] = self.weights.read(self.block, need)
            else:
                if need not in held:
                    held[need] = self.weights.read(self.block, need)
                read[need] = held[need]
        return read

    def _arg(self, need: str, row: Step, stream: Stream, layout: Layout, read: Mapping[str, Any]) -> Any:
        if need in read and need != "experts":
            return read[need]
        constant = self._constant(need)
        if constant is not None:
            return constant
        if need == "R":
            pos = layout.places[1]
            return Rotation(*(part[pos][None] for part in self.R))
        value = stream.at(need, layout, row.name)
        return torch.searchsorted(read["experts"], value) if need == "experts" and "experts" in read else value

    def _constant(self, need: str) -> Any:
        if need == "dims":
            return self.dims
        if need == "dt":
            return self.dt
        leaf = self.card.leaves.get(need)
        return getattr(self.dims, need) if leaf is not None and leaf.kind == "constant" else None

    def _edited_weights(self, row: Step, stream: Stream, trim: bool) -> None:
        """Cells with an edited weight make the step anew with it, at every position."""
        for need in row.needs:
            for cell, ats in stream.by_site.get(Site(self.block, need), {}).items() if need in self.card.leaves else ():
                if not ats[0].is_weight:
                    continue
                weight = self.weights.read(self.block, need)
                for at in ats:
                    weight = at(weight, {})
                args: list[Any] = []
                for name in row.needs:
                    leaf = self.card.leaves.get(name)
                    if name == need:
                        args.append(weight)
                    elif leaf is not None and leaf.kind == "weight":
                        args.append(self.weights.read(self.block, name))
                    elif (constant := self._constant(name)) is not None:
                        args.append(constant)
                    elif name == "R":
                        args.append(Rotation(*(part[: stream.length] for part in self.R)))
                    else:
                        args.append(stream.grid(name, cell, row.name))
                made = compute(row, args, self.card.leaves, self.model.decoder.numerics)
                stream.enter(row.name, [stream.new(cell, made, stream.grid(row.name, cell))], trim=trim)

    # ---- attention -----------------------------------------------------------------------------------------------

    def _attend_whole(self, stream: Stream) -> None:
        """A root's O, on all its positions at once, as a plain run makes it."""
        layout = self._attended(stream)
        if layout is None:
            return
        O = self._square(stream, 0) if self.explicit else attend(*self._heads(stream, 0), self._hidden(stream))
        stream.put("O", O[layout.places][None], layout)

    def _heads(self, stream: Stream, cell: int) -> tuple[Tensor, Tensor, Tensor, float]:
        Q, K, V = (stream.grid(name, cell, "O") for name in "QKV")
        return Q, K, V, self.dims.tau

    def _hidden(self, stream: Stream) -> Tensor:
        return causal_mask(stream.rows.keep, stream.length, self.dt, self.device)

    def _square(self, stream: Stream, cell: int) -> Tensor:
        """O of a cell through S and A, which others may see and edit; [B T h v]."""
        Q, K, V, tau = self._heads(stream, cell)
        S = stream.through(Site(self.block, "S"), cell, scores(Q, K, tau, self._hidden(stream)))
        A = stream.through(Site(self.block, "A"), cell, pattern(S))
        return mix(A, V)

    def _attended(self, stream: Stream) -> Layout | None:
        """The queries that come out changed: those with a query of their own, and all that see a changed key."""
        own = [stream.own(name) for name in "QKV"]
        if not any(own):
            return None
        asked, *keys = (None if part is None else part.layout.mask for part in own)
        mask = torch.zeros(stream.worlds, stream.length, dtype=torch.bool, device=self.device)
        for key in keys:
            if key is not None:
                mask |= key.long().cummax(-1).values.bool()
        if asked is not None:
            mask |= asked
        mask &= stream.real.repeat(stream.cells, 1)
        if stream.needed is not None:
            mask &= stream.needed.mask
        layout = Layout(mask)
        return layout if len(layout) else None

    def _attend(self, chunk: Stream, members: Sequence[int]) -> None:
        """The cells' O: of all together; of those that edit or show S or A one by one."""
        layout = self._attended(chunk)
        if layout is not None:
            K, V = chunk.own("K"), chunk.own("V")
            none = Layout(torch.zeros_like(layout.mask))
            keys = [part.layout for part in (K, V) if part is not None]
            changed = chunk.layouts.union(keys[0], keys[-1]) if keys else none
            O = attend_worlds(
                Packed(chunk.at("Q", layout), layout),
                Packed(chunk.at("K", changed), changed),
                Packed(chunk.at("V", changed), changed),
                self.base.grid("K"),
                self.base.grid("V"),
                self.dims.tau,
            )
            chunk.put("O", O, layout)
        if not self.explicit:
            return
        special = {cell for name in SCORES for cell in chunk.by_site.get(Site(self.block, name), {})}
        shown = {Site(self.block, name) for name in SCORES}
        special |= {c for c, i in enumerate(members) if shown & (self.whole | self.wholes[i])}
        if layout is not None and any(chunk.of_base_at(site) for site in shown):
            special |= set(layout.mask.view(chunk.cells, -1).any(-1).nonzero()[:, 0].tolist())
        for cell in sorted(special):
            O = self._square(chunk, cell)
            chunk.enter("O", [chunk.new(cell, O, chunk.grid("O", cell))], trim=True)

    # ---- what comes of it ----------------------------------------------------------------------------------------

    def _count_routing(self, chunk: Stream, members: Sequence[int]) -> None:
        """Choices that differ from the base's, by expert and not by slot; over the rows that edits reach."""
        assert self.block is not None
        for cell, i in enumerate(members):
            reached = self._reach(i)
            if chunk.needed is not None:
                here = slice(cell * self.base.batch, (cell + 1) * self.base.batch)
                reached = reached & chunk.needed.mask[here].cpu()
            self.reached[i] += int(reached.sum()) * self.dims.k
        own = chunk.own("experts")
        if own is None:
            return
        world, pos = own.layout.places
        theirs = chunk.of_base("experts", world, pos)
        changed = ~(own.value[..., :, None] == theirs[..., None, :]).any(-1)
        by_cell = torch.zeros(len(members), dtype=torch.long, device=self.device)
        by_cell.index_add_(0, world // self.base.batch, changed[0].sum(-1))
        self.flips[list(members)] += by_cell.cpu()

    def _reach(self, i: int) -> Tensor:
        """[B T]: where a cell can change what this block's router chooses; one mask for all blocks past its edits."""
        assert self.block is not None
        past = self.block > max((self.sites.depth(at.site) for at in self.ats[i]), default=-1)
        if past and i in self.reach:
            return self.reach[i]
        reached = torch.zeros(self.base.batch, self.base.length, dtype=torch.bool)
        for at in self.ats[i]:
            reached |= at.reach(self.block, self.base.rows)
        if past:
            self.reach[i] = reached
        return reached

    def _shown(self, name: str, roots: Sequence[Stream], chunks: Sequence[tuple[Stream, Sequence[int]]]) -> None:
        """Show a value to whoever asked for it."""
        site = Site(self.block, name)
        if site not in self.looked:
            return
        for stream in roots:
            live = self.lives[self.roots.index(stream)]
            read = self.read if live is self.lives[0] else live.read
            if read is None:
                continue
            if site in self.whole | (set().union(*self.wholes) if live is self.lives[0] else set()):
                self.look(live, site, stream.grid(name, 0, stream.shown_to(site, 0)))
            elif site in self.want:
                self.look(live, site, self._at_reads(stream, site, 0, read))
        for chunk, members in chunks:
            for cell, i in enumerate(members):
                if cell in chunk.unmatched:
                    continue
                if site in self.whole or site in self.wholes[i]:
                    self.look(self.cells[i], site, chunk.grid(name, cell, chunk.shown_to(site, cell)))
                elif site in self.want:
                    self.look(self.cells[i], site, self._at_reads(chunk, site, cell, self.reads[i]))

    def _at_reads(self, stream: Stream, site: Site, cell: int, read: Read) -> Tensor:
        """[B R ·]: a cell's value at the positions read, shorter rows padded with their last."""
        widest = max(map(len, read))
        pos = torch.tensor([[*row, *[row[-1]] * (widest - len(row))] for row in read], device=self.device)
        world = (cell * stream.batch + torch.arange(stream.batch, device=self.device))[:, None].expand_as(pos)
        picked = stream.pick(site.tensor, world.flatten(), pos.flatten(), stream.shown_to(site, cell))
        return picked.view(*pos.shape, *picked.shape[2:])

    def outcomes(self) -> list[Outcome]:
        """What each cell came to."""
        made: dict[int, Outcome] = {}
        for chunk, members in zip(self.chunks, self.members, strict=True):
            met = chunk.met.view(len(members), -1).sum(-1).tolist()
            for cell, i in enumerate(members):
                flips, reached = int(self.flips[i]), self.reached[i]
                made[i] = Outcome(
                    sum(at.touched for at in self.ats[i]),
                    met[cell],
                    1 - flips / reached if reached else None,
                    flips,
                    chunk.unmatched.get(cell),
                )
        return [made[i] for i in range(len(self.cells))]


def _batches(there: Sequence[tuple[Stream, Layout]]) -> list[list[tuple[Stream, Layout]]]:
    """Streams whose rows go into one product: few rows alone are slow, and many are not worth the copy."""
    few = [one for one in there if len(one[1]) <= FEW]
    return ([few] if few else []) + [[one] for one in there if len(one[1]) > FEW]


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


def _mask(read: Read, batch: int, length: int) -> Tensor:
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for b, places in enumerate(read):
        mask[b, list(places)] = True
    return mask


def _after(ats: Sequence[At], base: Stream) -> Tensor:
    """[B T]: the rows that a cell may come to hold, the real positions from its first edited one on."""
    mask = torch.zeros(base.batch, base.length, dtype=torch.bool)
    for at in ats:
        mask |= _named(at, base)
    return mask.long().cummax(-1).values.bool() & base.real.cpu()


def _named(at: At, base: Stream) -> Tensor:
    """[B T]: the positions that an edit acts at; all real ones, where it names none."""
    place = None if at.is_weight else at.where.get("T", at.where.get("S"))
    return base.rows.mask(place, "T", None if at.is_weight else at.among)


def _peak(card: Card, dims: Any, like: Tensor) -> int:
    """Bytes of one row's values, where most are alive."""
    itemsize = like.element_size() if like.is_floating_point() else 4
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
