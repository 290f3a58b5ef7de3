"""The walk of a sweep: part by part (embedding, blocks, head), step by step, for the rows of all streams at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hooks.apply import At
from hooks.attend import Packed, attend_rows, attend_worlds
from hooks.cells import Cell, Live, Look, Outcome, Read
from hooks.edits import SCORES, Freeze
from hooks.finite import noticing
from hooks.flips import Flips
from hooks.heap import give_back, resident
from hooks.layout import Layout
from hooks.staged import Staged
from hooks.stream import Stream, fitted
from hooks.where import Rows
from probe.card import Step
from probe.engine import compute
from probe.errors import Unmatched
from probe.numerics import Rotation, causal_mask, mix, pattern, rotation, scores
from probe.sites import Site

FEW = 512
"""Rows up to which a stream shares its products with others."""


class Walk:
    """A sweep under way.

    Args:
        asked: what it is asked, and who runs.
        look: see `hooks.cells.Look`.
        tick: called with parts done and parts in all.
    """

    def __init__(self, asked: Staged, look: Look, tick: Callable[[int, int], None] | None) -> None:
        self.asked, self.look, self.tick = asked, look, tick
        self.sites, self.dims, self.device, self.base = asked.sites, asked.dims, asked.device, asked.base
        self.weights, self.numerics = asked.model.decoder.weights, asked.model.decoder.numerics
        self.most = resident() + asked.forecast.bytes
        self.flips = Flips(self.sites, self.base, asked.ats)
        self.noticing: dict[int, Callable[[Site, Tensor], None]] = {}

    def go(self) -> None:
        """Part by part, to the last one that somebody looks at."""
        parts = range(self.asked.first, min(self.asked.last, self.dims.blocks) + 1)
        for i, part in enumerate(parts):
            self._part(part)
            if self.tick is not None:
                self.tick(i + 1, len(parts))

    def _part(self, part: int) -> None:
        block = part if 0 <= part < self.dims.blocks else None
        self.block, self.card = block, self.sites.card(block)
        todo, self.explicit = self.asked.plan(part), self.asked.explicit(part)
        self._needs(part)
        self._constants()
        held: dict[str, Tensor] | None = {} if len(self.asked.chunks) > 1 else None
        running = [self.base]
        for live, stream, used in zip(self.asked.lives[1:], self.asked.sources, self.asked.used, strict=True):
            if live.read is not None or used >= part:  # a source stops where nobody takes from it any more
                running.append(stream)
                stream.idle = self._untaken(live, part) if live.read is None and used == part else frozenset()
        for live, stream in zip(self.asked.lives, self.asked.roots, strict=True):
            live.cache.stream, live.cache.block = stream, block
        chunks = self.asked.chunks or [Stream(self.base.rows, self.base, [], self.device)]
        for i, chunk in enumerate(chunks):
            members = self.asked.members[i] if self.asked.members else []
            roots = running if i == 0 else []
            chunk.useful = self._useful(chunk, members)
            self._arrive(block, roots, chunk, members)
            for row, drops in zip(todo.steps, todo.drops, strict=True):
                self._step(row, roots, chunk, members, held)
                for stream in (chunk, *(running if chunk is chunks[-1] else ())):
                    for name in set(drops) - self.asked.lasting:
                        stream.drop(name)
                if drops and resident() > self.most:  # blocks of ever other sizes leave gaps in the heap
                    give_back()
            self._leave(chunk)
        for stream in running:
            if stream.unmatched:
                raise Unmatched(stream.unmatched[0])
            self._leave(stream)
            for (name, _), passed in stream.values.items():  # a source may be looked at nowhere else
                self._notice(self.asked.lives[self.asked.roots.index(stream)], Site(block, name), passed.value)

    def _needs(self, part: int) -> None:
        """Where only what is read matters: in the head; in the last block past keys and values."""
        B, T = self.base.batch, self.base.length
        self.head = part >= self.dims.blocks
        self.key_side = frozenset() if self.head else self.card.key_side
        if part not in self.asked.trimmed:
            return
        union = _mask(self.asked.read, B, T)
        for chunk, members in zip(self.asked.chunks, self.asked.members, strict=True):
            mask = torch.cat([_mask(self.asked.reads[i], B, T) for i in members])
            union = union | mask.view(len(members), B, T).any(0)
            chunk.needed = Layout(mask.to(self.device))
        edited = {site for stream in (*self.asked.roots, *self.asked.chunks) for site in stream.by_site}
        if self.head and all(self.sites.depth(site) < part for site in edited):
            for live, stream in zip(self.asked.lives[1:], self.asked.sources, strict=True):
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
            here = [at for at in self.asked.ats[i] if at.site.block == self.block]
            held = frozenset(at.site.tensor for at in here if at.whole and isinstance(at.edit.how, Freeze))
            for name in self._idle(held, self.asked.wholes[i]) if held else ():
                idle.setdefault(name, []).append(cell)
        layouts = {}
        for cells in set(map(tuple, idle.values())):
            mask = torch.ones(chunk.cells, chunk.batch, chunk.length, dtype=torch.bool, device=self.device)
            mask[list(cells)] = False
            layouts[cells] = Layout(mask.flatten(0, 1))
        return {name: layouts[tuple(cells)] for name, cells in idle.items()}

    def _idle(self, held: frozenset[str], looked: set[Site]) -> frozenset[str]:
        """The steps of this block from which all ways on lead to what is held; not the router's, whose flips count."""
        shown = {site.tensor for site in (*self.asked.want, *self.asked.whole, *looked) if site.block == self.block}
        return self._needless([*shown, "experts", "x_next" if self.block is not None else "logits"], held)

    def _untaken(self, live: Live, part: int) -> frozenset[str]:
        """The steps of this part that a source does without: nobody takes from them, nor from what is made of them."""
        taken = [site.tensor for site in self.asked.taken_from(live, self.asked.ats) if self.sites.depth(site) == part]
        return self._needless(["experts", *("O" if name in SCORES else name for name in taken)])

    def _needless(self, wanted: Sequence[str], held: frozenset[str] = frozenset()) -> frozenset[str]:
        """The steps of this part that nothing wanted needs, unless by way of what is held."""
        stack, needed = [*wanted], set[str]()
        while stack:
            name = stack.pop()
            if name in self.card and name not in needed:
                needed.add(name)
                stack += () if name in held else self.card[name].needs
        return frozenset(self.card) - needed

    def _constants(self) -> None:
        x = self.base.own("x_n") or self.base.own("x_next") or self.base.own("x_0") or self.base.own("x_L")
        if x is None or hasattr(self, "R"):
            return
        self.dt = x.value.dtype
        self.R: dict[Rows, Rotation] = {}
        for rows in (stream.rows for stream in self.asked.roots):
            ids = torch.arange(rows.length)[None] if rows.counted else rows.position_ids  # pads stand right
            self.R[rows] = rotation(ids.to(self.device), self.dims, self.dt)

    def _arrive(self, block: int | None, roots: Sequence[Stream], chunk: Stream, members: Sequence[int]) -> None:
        """The residual stream comes in, and its edits act."""
        if block is not None:
            for stream in (*roots, chunk):
                stream.edit(Site(block, "x_n"))
            self._shown("x_n", roots, chunk, members)

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
        streams = [stream for stream in (*roots, chunk) if row.name not in stream.idle]
        if row.name == "O":
            for stream in streams[:-1]:
                self._attend_whole(stream)
            for name in SCORES if self.explicit else ():
                self._show_roots(Site(self.block, name), roots)
            self._attend(chunk, members)
        else:
            self._make(row, streams, held)
        trim = self.head or row.name not in self.key_side
        site = Site(self.block, row.name)
        for stream in streams:
            if stream.on_weights:
                self._edited_weights(row, stream, trim)
            stream.edit(site, trim=trim)
            if row.name == "choice_score":
                stream.check_choice(self.block, self.dims)
        if row.name == "experts":
            assert self.block is not None
            self.flips.count(chunk, members, self.block)
        self._shown(row.name, roots, chunk, members)

    # ---- one step ------------------------------------------------------------------------------------------------

    def _make(self, row: Step, streams: Sequence[Stream], held: dict[str, Tensor] | None) -> None:
        """One step for all rows that are there; its weights are read once."""
        there = [(stream, layout) for stream in streams if (layout := self._layout(row, stream)) is not None]
        if not there:
            return
        read = self._read(row, there, held)
        weighs = any(need in read and need != "experts" for need in row.needs)
        apart = held is not None  # what a product gives all of them stays for as long as one of them needs it
        for batch in _batches(there, self.asked.roots if apart else ()) if weighs else [[one] for one in there]:
            each = [[self._arg(need, row, *one, read) for need in row.needs] for one in batch]
            args = [
                self._joined(need, parts, read) for need, parts in zip(row.needs, zip(*each, strict=True), strict=True)
            ]
            made = compute(row, args, self.card.leaves, self.numerics).split(
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
            world, pos = layout.places
            return Rotation(*(part[world % len(part), pos][None] for part in self.R[stream.rows]))
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
        """Cells with edited weights make the step anew with all that it reads of them, at every position."""
        edited: dict[int, dict[str, list[At]]] = {}
        for need in row.needs:
            for cell, ats in stream.by_site.get(Site(self.block, need), {}).items() if need in self.card.leaves else ():
                if ats[0].is_weight:
                    edited.setdefault(cell, {})[need] = ats
        for cell, mine in edited.items():
            made = compute(row, self._whole_args(row, stream, cell, mine), self.card.leaves, self.numerics)
            stream.enter(row.name, [stream.new(cell, made, stream.grid(row.name, cell))], trim=trim)

    def _whole_args(self, row: Step, stream: Stream, cell: int, edited: Mapping[str, Sequence[At]]) -> list[Any]:
        """What a step reads of a cell at every position, with the weights that the cell edits."""
        args: list[Any] = []
        for need in row.needs:
            leaf = self.card.leaves.get(need)
            if leaf is not None and leaf.kind == "weight":
                weight = self.weights.read(self.block, need)
                for at in edited.get(need, ()):
                    weight = at(weight, {})
                args.append(weight)
            elif (constant := self._constant(need)) is not None:
                args.append(constant)
            elif need == "R":
                args.append(self.R[stream.rows])
            else:
                args.append(stream.grid(need, cell, row.name))
        return args

    # ---- attention -----------------------------------------------------------------------------------------------

    def _attend_whole(self, stream: Stream) -> None:
        """A root's O, on all its positions at once, as a plain run makes it."""
        layout = self._attended(stream)
        if layout is None and not self.explicit:
            return
        if self.explicit:
            O = self._square(stream, 0)
        else:
            O = attend_rows(*self._heads(stream, 0), partial(self._hidden, stream))
        if layout is not None:
            stream.put("O", O[layout.places][None], layout)
        if stream.base is not None and any(Site(self.block, name) in stream.by_site for name in SCORES):
            stream.enter("O", [stream.new(0, O, stream.grid("O"))], trim=True)  # also where it is the base so far

    def _heads(self, stream: Stream, cell: int) -> tuple[Tensor, Tensor, Tensor, float]:
        Q, K, V = (stream.grid(name, cell, "O") for name in "QKV")
        return Q, K, V, self.dims.tau

    def _hidden(self, stream: Stream, queries: slice = slice(None)) -> Tensor:
        rows = stream.rows
        return causal_mask(rows.keep, rows.length, self.dt, self.device, queries, rows.segments)

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
                mask |= stream.rows.onward(key)
        if asked is not None:
            mask |= asked
        mask &= stream.real.repeat(stream.cells, 1)
        if stream.needed is not None:
            mask &= stream.needed.mask
        known = next((part.layout for part in own if part is not None and torch.equal(part.layout.mask, mask)), None)
        layout = Layout(mask) if known is None else known
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
                self.asked.piece,
                None if self.base.rows.starts is None else self.base.rows.starts.to(self.device),
            )
            chunk.put("O", O, layout)
        if not self.explicit:
            return
        special = {cell for name in SCORES for cell in chunk.by_site.get(Site(self.block, name), {})}
        shown = {Site(self.block, name) for name in SCORES}
        special |= {c for c, i in enumerate(members) if shown & (self.asked.whole | self.asked.wholes[i])}
        if layout is not None and any(chunk.of_base_at(site) for site in shown):
            special |= set(layout.mask.view(chunk.cells, -1).any(-1).nonzero()[:, 0].tolist())
        for cell in sorted(special):
            O = self._square(chunk, cell)
            for name in SCORES:
                self._show_cell(Site(self.block, name), chunk, cell, members[cell])
            chunk.squares.clear()
            chunk.enter("O", [chunk.new(cell, O, chunk.grid("O", cell))], trim=True)

    # ---- what comes of it ----------------------------------------------------------------------------------------

    def _shown(self, name: str, roots: Sequence[Stream], chunk: Stream, members: Sequence[int]) -> None:
        """Show a value to whoever asked for it."""
        site = Site(self.block, name)
        if site in self.asked.looked:
            self._show_roots(site, roots)
            for cell, i in enumerate(members):
                self._show_cell(site, chunk, cell, i)

    def _show_roots(self, site: Site, roots: Sequence[Stream]) -> None:
        """Base and sources."""
        for stream in roots:
            live = self.asked.lives[self.asked.roots.index(stream)]
            read = self.asked.read if live is self.asked.lives[0] else live.read
            if read is None:
                continue
            if site in self.asked.whole | (set().union(*self.asked.wholes) if live is self.asked.lives[0] else set()):
                self._look(live, site, stream.grid(site.tensor, 0, stream.shown_to(site, 0)))
            elif site in self.asked.want:
                self._look(live, site, self._at_reads(stream, site, 0, read))

    def _look(self, who: Cell | Live, site: Site, value: Tensor) -> None:
        self._notice(who, site, value)
        self.look(who, site, value)

    def _notice(self, who: Cell | Live, site: Site, value: Tensor) -> None:
        """See `hooks.finite.noticing`."""
        if id(who) not in self.noticing:
            tokens, rows = (who.tokens, who.rows) if isinstance(who, Live) else (None, None)
            self.noticing[id(who)] = noticing(self.asked.model, tokens, rows, who.edits)
        self.noticing[id(who)](site, value)

    def _show_cell(self, site: Site, chunk: Stream, cell: int, i: int) -> None:
        """A cell of a batch, the i-th of all."""
        if cell in chunk.unmatched:
            return
        if site in self.asked.whole or site in self.asked.wholes[i]:
            self._look(self.asked.cells[i], site, chunk.grid(site.tensor, cell, chunk.shown_to(site, cell)))
        elif site in self.asked.want:
            self._look(self.asked.cells[i], site, self._at_reads(chunk, site, cell, self.asked.reads[i]))

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
        for chunk, members in zip(self.asked.chunks, self.asked.members, strict=True):
            met = chunk.met.view(len(members), -1).sum(-1).tolist()
            for cell, i in enumerate(members):
                touched = sum(at.touched for at in self.asked.ats[i])
                made[i] = Outcome(touched, met[cell], *self.flips.of(i), chunk.unmatched.get(cell))
        return [made[i] for i in range(len(self.asked.cells))]


def _batches(there: Sequence[tuple[Stream, Layout]], apart: Sequence[Stream]) -> list[list[tuple[Stream, Layout]]]:
    """Streams whose rows go into one product: few rows alone are slow, and many are not worth the copy. Those that
    stand ``apart`` go among themselves."""
    few = [one for one in there if len(one[1]) <= FEW]
    groups = [[one for one in few if (one[0] in apart) == own] for own in (True, False)]
    return [group for group in groups if group] + [[one] for one in there if len(one[1]) > FEW]


def _mask(read: Read, batch: int, length: int) -> Tensor:
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for b, places in enumerate(read):
        mask[b, list(places)] = True
    return mask
