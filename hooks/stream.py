"""Rows in flight of one kind, the base's, a source's or those of many worlds, and how edits enter them.

A *world* is a cell on a prompt: world w of a stream is cell w // B on prompt w % B. It holds rows only where it differs
from the base, tensor by tensor; everything else it reads from the base.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooks.apply import ROUTER, At, acted, check_overlap, short_of_experts, too_few
from hooks.attend import Packed
from hooks.layout import Layout, Layouts, gather
from hooks.where import Rows
from probe.dims import Dims
from probe.errors import Unmatched
from probe.sites import Site


class Stream:
    """Packed values by name, and the edits that act on them.

    Args:
        rows: the prompts that it stands on, right-padded.
        base: the stream that its worlds differ from; None: it holds every real position itself.
        cells: how many cells it has; worlds are cells × prompts.
        edits: for each cell, its bound edits in the order given.
    """

    def __init__(self, rows: Rows, base: Stream | None, edits: Sequence[Sequence[At]], device: torch.device) -> None:
        self.rows, self.base, self.device = rows, base, device
        self.batch, self.length, self.cells = rows.batch, rows.length, len(edits)
        self.real = rows.mask(None, "T").to(device)
        self.by_site: dict[Site, dict[int, list[At]]] = {}
        self.on_weights = any(at.is_weight for ats in edits for at in ats)
        for cell, ats in enumerate(edits):
            for at in ats:
                self.by_site.setdefault(at.site, {}).setdefault(cell, []).append(at)
        self.values: dict[tuple[str, str], Packed] = {}
        self.before: dict[str, Packed] = {}
        """Of the base: values at edited sites as they were before; its edits act on its worlds' values anew."""
        self._grids: dict[tuple[str, str], tuple[Packed | None, Tensor]] = {}
        """Whole values of a root, which every cell's edits ask for; each with the rows that it was made of."""
        self.squares: dict[tuple[str, int], Tensor] = {}
        """S and A of a cell, whole, where somebody asks for them."""
        self.layouts = Layouts()
        self.needed: Layout | None = None
        """Rows that matter where only what is read does; None: all."""
        self.idle: frozenset[str] = frozenset()
        """Steps that are not made."""
        self.useful: dict[str, Layout] = {}
        """Step → the rows of those worlds for which it matters, where it doesn't for all."""
        self.unmatched: dict[int, str] = {}
        self.met = torch.zeros(self.worlds, dtype=torch.bool, device=device)
        """Worlds that came to differ from the base."""

    @property
    def worlds(self) -> int:
        """Cells × prompts."""
        return self.cells * self.batch

    def own(self, name: str, reader: str = "") -> Packed | None:
        """The stream's own rows of a value, as ``reader`` sees it."""
        return self.values.get((name, reader)) or self.values.get((name, ""))

    def put(self, name: str, value: Tensor, layout: Layout) -> None:
        """Keep a value that was made."""
        self.values[name, ""] = Packed(value, layout)

    def drop(self, name: str) -> None:
        """Forget a value."""
        self.before.pop(name, None)
        for kept in (self.values, self._grids):
            for key in [key for key in kept if key[0] == name]:
                del kept[key]

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()
        self.before.clear()
        self.squares.clear()
        self._grids.clear()

    def at(self, name: str, layout: Layout, reader: str = "") -> Tensor:
        """A value's rows in a layout, [1 N ·]: the stream's own, the base's where it has none."""
        own = self.own(name, reader)
        if own is not None and own.layout is layout:
            return own.value
        return self.pick(name, *layout.places, reader)

    def pick(self, name: str, world: Tensor, pos: Tensor, reader: str = "") -> Tensor:
        """A value's rows by world and position, [1 N ·]."""
        own = self.own(name, reader)
        if own is None:
            return self.of_base(name, world, pos, reader)
        index = own.layout.table[world, pos]
        mine = index >= 0
        if self.base is None or bool(mine.all()):
            return own.value.index_select(1, index)
        out = fitted(self.of_base(name, world, pos, reader), own.value.shape[2:])
        out[:, mine] = fitted(own.value.index_select(1, index[mine]), out.shape[2:])
        return out

    def of_base(self, name: str, world: Tensor, pos: Tensor, reader: str = "") -> Tensor:
        """The base's rows where these worlds stand, [1 N ·]; behind its last position they mean nothing."""
        assert self.base is not None
        value, layout = self.base.own(name, reader) or (None, None)
        assert value is not None, f"the base has no {name}"
        assert layout is not None
        return gather(value, layout, world % self.batch, pos.clamp(max=self.base.length - 1))

    def grid(self, name: str, cell: int = 0, reader: str = "") -> Tensor:
        """A value of a cell on all prompts, [B T ·]; what stands on pads means nothing."""
        if (name, cell) in self.squares:
            return self.squares[name, cell]
        if self.cells > 1:
            return self._grid(name, cell, reader)
        own = self.own(name, reader)
        if (name, reader) not in self._grids or self._grids[name, reader][0] is not own:
            self._grids[name, reader] = own, self._grid(name, cell, reader)
        return self._grids[name, reader][1]

    def _grid(self, name: str, cell: int, reader: str) -> Tensor:
        own = self.own(name, reader)
        here = slice(cell * self.batch, (cell + 1) * self.batch)
        if own is None or not bool(own.layout.mask[here].any()):
            return self._of_whole_base(name, reader)
        index = own.layout.table[here]
        if own.layout.whole and self.cells == 1:
            return own.value.view(*index.shape, *own.value.shape[2:])
        if self.base is None:
            return own.value[0, index.clamp(min=0)]
        return self._over(self._of_whole_base(name, reader), own, index)

    def _of_whole_base(self, name: str, reader: str) -> Tensor:
        """The base's value at this stream's positions, [B T ·]; behind its last one it means nothing."""
        assert self.base is not None
        value = self.base.grid(name, 0, reader)
        if self.length <= self.base.length:
            return value[:, : self.length]
        return value[:, torch.arange(self.length, device=self.device).clamp(max=self.base.length - 1)]

    def _over(self, theirs: Tensor, own: Packed, index: Tensor) -> Tensor:
        """The base's value with a cell's own rows, which stand at ``index`` [B T], in their places."""
        missing = index < 0
        mine = fitted(own.value[0, index.clamp(min=0)], theirs.shape[2:])
        theirs = fitted(theirs, mine.shape[2:])
        return torch.where(missing.view(*missing.shape, *[1] * (mine.ndim - 2)), theirs, mine)

    def _unedited(self, name: str, cell: int) -> Tensor:
        """A cell's value, [B T ·], as it is before the edits of its base act."""
        assert self.base is not None
        value, layout = self.base.before[name]
        theirs, own = value[0, layout.table.clamp(min=0)], self.own(name)
        here = slice(cell * self.batch, (cell + 1) * self.batch)
        return theirs if own is None else self._over(theirs, own, own.layout.table[here])

    # ---- edits ---------------------------------------------------------------------------------------------------

    def enter(self, name: str, found: Sequence[New], reader: str = "", *, trim: bool = False) -> None:
        """Take in new values of some cells: rows that differ from what was there become the cell's own.

        Args:
            trim: keep those rows alone that are needed.
        """
        own = self.own(name, reader)
        mask = torch.zeros(self.worlds, self.length, dtype=torch.bool, device=self.device)
        if own is not None:
            mask |= own.layout.mask
        worlds, places, rows = [], [], []
        for new in found:
            moved = differs(new.value, new.old) & self.real[new.world % self.batch, new.places]
            b, i = moved.nonzero(as_tuple=True)
            worlds.append(new.world[b, i])
            places.append(new.places[b, i])
            rows.append(new.value[b, i])
        world, pos = torch.cat(worlds), torch.cat(places)
        mask[world, pos] = True
        if trim and self.needed is not None:
            mask &= self.needed.mask
        self.met |= mask.any(-1)
        layout = own.layout if own is not None and torch.equal(mask, own.layout.mask) else Layout(mask)
        if not len(layout):
            return
        value = self.at(name, layout, reader)
        widest = max(value.shape[2:], *(part.shape[1:] for part in rows))
        value = fitted(value, widest).clone()
        index = layout.table[world, pos]
        value[0, index[index >= 0]] = torch.cat([fitted(part[None], widest)[0] for part in rows])[index >= 0]
        self.values[name, reader] = Packed(value, layout)

    def edit(self, site: Site, *, trim: bool = False) -> None:
        """Let the edits at a site act, each on its cell's value."""
        name, anew = site.tensor, self.of_base_at(site)
        found: list[New] = []
        forked: list[tuple[int, dict[str, Tensor]]] = []
        alike: dict[Hashable, list[tuple[int, At]]] = {}
        if self.base is None and site in self.by_site:
            self.before[name] = self.values[name, ""]
        for cell, ats in self._acting(site, anew).items():
            if cell in self.unmatched:
                continue
            try:
                if len(ats) == 1 and ats[0].window is not None and not ats[0].into and not anew:
                    if (kind := ats[0].kind) is None:
                        found.append(self._in_windows(name, [(cell, ats[0])]))
                    else:
                        alike.setdefault(kind, []).append((cell, ats[0]))
                    continue
                new, by_reader = self._acted(name, cell, ats, anew)
            except Unmatched as fact:
                self.unmatched[cell] = str(fact)
                continue
            found.append(new)
            forked.append((cell, by_reader))
        found += [self._in_windows(name, some) for some in alike.values()]
        if found:
            self.enter(name, found, trim=trim)
        for reader in dict.fromkeys(reader for _, by_reader in forked for reader in by_reader):
            of = [(cell, by_reader[reader]) for cell, by_reader in forked if reader in by_reader]
            self.enter(name, [self.new(c, value, self.grid(name, c, reader)) for c, value in of], reader, trim=trim)

    def of_base_at(self, site: Site) -> list[At]:
        """The edits of the base at a site, which act in its cells too."""
        return [] if self.base is None else self.base.by_site.get(site, {}).get(0, [])

    def _acting(self, site: Site, anew: Sequence[At]) -> dict[int, list[At]]:
        """Each cell's own edits at a site; or none, where the base's act anew on rows that aren't the base's."""
        own, held = self.by_site.get(site, {}), self.own(site.tensor)
        if not anew or held is None:
            return own
        changed = held.layout.mask.view(self.cells, -1).any(-1).nonzero()[:, 0].tolist()
        return own | {cell: own.get(cell, []) for cell in changed}

    def check_choice(self, block: int | None, dims: Dims) -> None:
        """Refuse a cell whose edits of a block's router leave a token too few experts."""
        own, sites = self.own("choice_score", "experts"), [Site(block, name) for name in ROUTER]
        if own is None or not any(self.by_site.get(site) or self.of_base_at(site) for site in sites):
            return
        short = own.layout.places[0][short_of_experts(own.value, dims)[0]]
        if len(short):
            cell = int(short[0]) // self.batch
            each = [[*self.of_base_at(site), *self.by_site.get(site, {}).get(cell, [])] for site in sites]
            raise too_few([at for ats in each for at in ats], dims)

    def shown_to(self, site: Site, cell: int) -> str:
        """The reader whose value of a site is shown: the last that an edit names; for all, if none does."""
        ats = [*self.of_base_at(site), *self.by_site.get(site, {}).get(cell, [])]
        return next((at.into[-1] for at in reversed(ats) if at.into), "")

    def new(self, cell: int, value: Tensor, old: Tensor) -> New:
        """A cell's new value on all prompts, [B T ·], beside the one that was there."""
        everywhere = torch.arange(self.length, device=self.device).expand(self.batch, -1)
        return New(self._worlds([cell])[:, :1].expand_as(everywhere), everywhere, value, old)

    def _worlds(self, cells: Sequence[int]) -> Tensor:
        """[cells × B, 1]: their worlds."""
        starts = torch.tensor(cells, device=self.device)[:, None] * self.batch
        return (starts + torch.arange(self.batch, device=self.device)).view(-1, 1)

    def _in_windows(self, name: str, some: Sequence[tuple[int, At]]) -> New:
        """Edits that differ in nothing but their positions see these alone, all in one go."""
        cells, ats = zip(*some, strict=True)
        C, B = len(cells), self.batch
        places = torch.cat([at.window for at in ats]).to(self.device)  # [C × B, n]
        world = self._worlds(cells).expand_as(places)

        def by_prompt(value: Tensor) -> Tensor:
            return value.view(C, B, *value.shape[1:]).transpose(0, 1).flatten(1, 2)

        def here(name: str) -> Tensor:
            value = self.pick(name, world.flatten(), places.flatten())
            return by_prompt(value.view(*places.shape, *value.shape[2:]))

        old = here(name)
        new = ats[0].together(ats, by_prompt(places))(old, Lazily(here))
        return New(by_prompt(world), by_prompt(places), new, old)

    def _acted(self, name: str, cell: int, ats: Sequence[At], anew: Sequence[At]) -> tuple[New, dict[str, Tensor]]:
        """What all readers see of a cell's value, after the base's edits and its own; and what those see that ``into``
        names."""
        old, seen = self.grid(name, cell), Lazily(partial(self.grid, cell=cell))
        value = self._unedited(name, cell) if anew else old
        check_overlap(ats, value, seen)
        plain, by_reader, _ = acted(value, [*anew, *ats], seen)
        return self.new(cell, plain, old), by_reader

    def through(self, site: Site, cell: int, value: Tensor) -> Tensor:
        """A cell's S or A, [B h T S], through the edits there; kept for who asks."""
        ats, seen = self.by_site.get(site, {}).get(cell, []), Lazily(partial(self.grid, cell=cell))
        check_overlap(ats, value, seen)
        for at in (*self.of_base_at(site), *ats):
            value = at(value, seen)
        self.squares[site.tensor, cell] = value
        return value


class New(NamedTuple):
    """New values of some places of some worlds, [B n ·] each, and those that were there."""

    world: Tensor
    places: Tensor
    value: Tensor
    old: Tensor


class Lazily(dict[str, Tensor]):
    """What a block has shown of a cell so far, made when an edit asks for it: ``experts``, ``choice_score``."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Tensor:
        return self.make(name)


def differs(new: Tensor, old: Tensor) -> Tensor:
    """[B T], true where rows of two values are not equal; added slots count where they hold anything."""
    if new.shape != old.shape:
        old = fitted(old, new.shape[2:])
        new = fitted(new, old.shape[2:])
    return (new != old).flatten(2).any(-1)


def fitted(value: Tensor, shape: Sequence[int]) -> Tensor:
    """[· · *shape]: with slots of zeros behind a value's own, where edits have added experts elsewhere."""
    if len(shape) < 2 or value.shape[2] >= shape[0]:
        return value
    more: Any = value.new_zeros(*value.shape[:2], shape[0] - value.shape[2], *value.shape[3:])
    return torch.cat([value, more], dim=2)
