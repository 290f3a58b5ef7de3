"""What a sweep would take, from the rows that its cells may come to hold; and from that, which cells go together."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hooks.apply import At
from hooks.attend import attention_bytes, largest_group
from hooks.edits import SCORES, Patch
from hooks.peak import Kind, Load, Numbers, peak
from hooks.stream import Stream
from probe.weights import weight_shape

if TYPE_CHECKING:
    from hooks.cells import Live
    from hooks.staged import Staged

NEAR = 1 << 28
"""Bytes of rows beyond which a CPU loses more by fetching them, and by fresh memory, than larger products save; unless
a block's weights, which every batch reads, are more than that."""

Counts = npt.NDArray[np.int64]


class Cells(NamedTuple):
    """Of each cell, [cells] each: in rows of all its prompts.

    Attributes:
        first: the first part that it edits.
        named: rows that it edits there.
        after: from the first of these on, to the end of each prompt.
        read: rows that are read.
        group: the earliest group of rows that an edit there is of; see `hooks.peak.Load.rows`.
    """

    first: Counts
    named: Counts
    after: Counts
    read: Counts
    group: Counts


class Entering(NamedTuple):
    """Of each edit, [edits] each: its cell's place in the order of batches; its place among ``keys``, each a part and a
    tensor; the rows that it acts on."""

    cell: Counts
    key: Counts
    rows: Counts
    keys: list[tuple[int, str]]


class Forecast:
    """What a staged sweep would take.

    Attributes:
        cells: what each cell may come to hold.
        members: the cells in batches that fit the budget together with base and sources; in each at least one.
    """

    def __init__(self, staged: Staged, budget: int) -> None:
        self.staged, self.dims, self.parts = staged, staged.dims, list(staged.parts)
        self.stored = staged.model.decoder.weights.read(None, "w_final").dtype
        numerics = staged.model.decoder.numerics
        self.kinds = {p: Kind(staged.plan(p), self.dims, self.stored, numerics, staged.lasting) for p in self.parts}
        self.cells = self._cells()
        order = np.argsort(-self.cells.after, kind="stable")  # whose attention is one product stand together
        self._ordered = Cells(*(each[order] for each in self.cells))
        self._entering = self._edits(order)
        self._fixed = {part: self._whole_values(part) for part in self.parts}
        self.members = [order[i:j].tolist() for i, j in self._batches(budget)]

    @cached_property
    def bytes(self) -> int:
        """The most that is alive at one time, beside the weights."""
        bounds = np.cumsum([0, *map(len, self.members)]).tolist()
        pairs = list(pairwise(bounds)) or [(0, 0)]
        return max(self._peak(i, j, len(pairs)) for i, j in pairs)

    # ---- which cells go together ---------------------------------------------------------------------------------

    def _batches(self, budget: int) -> list[tuple[int, int]]:
        """The cells from i to j of each batch. Cells have what base and sources leave of the budget, and a quarter of
        it at the least."""
        count, near = len(self._ordered.first), self._near()
        if self._peak(0, count, 1) <= budget and self._peak(0, count, 1) - self._peak(0, 0, 1) <= near:
            return [(0, count)] if count else []
        roots = self._peak(0, 0, 3)
        most = min(max(budget - roots, budget // 4), near) + roots
        found, i = [], 0
        while i < count:
            j = i + 1 + bisect_right(range(i + 2, count + 1), most, key=partial(self._peak, i, batches=3))
            found.append((i, j))
            i = j
        return found

    def _near(self) -> float:
        weights = self.staged.model.decoder.weights
        if self.staged.device.type != "cpu" or not weights.resident:
            return math.inf
        sizes = (sum(math.prod(weight_shape(leaf, self.dims)) for leaf in c.weights) for c in self.staged.sites.cards)
        return max(NEAR, max(sizes) * self.stored.itemsize)

    # ---- what a batch takes --------------------------------------------------------------------------------------

    def _peak(self, i: int, j: int, batches: int) -> int:
        """Of the cells from i to j; the parts of a kind are taken as one, with the most that any of them has."""
        rows, entering = self._rows(i, j), self._edited_rows(i, j)
        most = 0
        for (kind, trimmed), parts in self._alike.items():
            here = [self.parts.index(part) for part in parts]
            names = {name for part in parts for name in entering.get(part, {})}
            load = Load(
                rows[here].max(0),
                {name: max(entering.get(part, {}).get(name, 0) for part in parts) for name in names},
                max(map(self._root_rows, parts)),
                batches,
                self.staged.base.batch,
                self.staged.base.length,
                (j - i) * self.staged.base.batch,
                self._attended(i, j, here[-1], trimmed),
                max(self._fixed[part] + self._waiting(i, j, at) for part, at in zip(parts, here, strict=True)),
            )
            most = max(most, peak(kind, load))
        return most

    @cached_property
    def _alike(self) -> dict[tuple[Kind, bool], list[int]]:
        """Parts that take the same for a row, trimmed ones apart."""
        alike: dict[tuple[Kind, bool], list[int]] = {}
        for part, kind in self.kinds.items():
            alike.setdefault((kind, part in self.staged.trimmed), []).append(part)
        return alike

    def _rows(self, i: int, j: int) -> Numbers:
        """[parts, 3]: the rows that the cells from i to j may have in each part; see `hooks.peak.Load.rows`."""
        first, named, after, read, group = (np.asarray(each[i:j]) for each in self._ordered)
        count = len(self.parts)
        at = np.clip(first - self.parts[0] if count else first, 0, count)

        def by_part(rows: Counts) -> Numbers:
            return np.bincount(at, rows, count + 1)[:count].astype(np.float64)

        before = np.cumsum(by_part(after)) - by_part(after)
        late = np.where(group == 0, after, named)
        parts = [before + by_part(here) for here in (named * (group <= 0), named * (group <= 1), late)]
        rows: Numbers = np.stack(parts, axis=1, dtype=np.float64)
        for p in (self.parts.index(part) for part in self.staged.trimmed if part in self.parts):
            rows[p, 1:] = sum(np.minimum(after, read)[at < p]) + np.minimum(late, read)[at == p].sum()
        return rows

    def _waiting(self, i: int, j: int, at: int) -> int:
        """The residual stream of the cells of other batches, into a part or out of it."""
        rows = self._all_rows[at].max() - self._rows(i, j)[at].max()
        act = torch.float32 if self.staged.model.decoder.numerics == "careful" else self.stored
        return int(rows) * self.dims.d * act.itemsize

    @cached_property
    def _all_rows(self) -> Numbers:
        return self._rows(0, len(self._ordered.first))

    def _attended(self, i: int, j: int, at: int, trimmed: bool) -> float:
        """Bytes of the cells' attention in a part, which goes in pieces of groups; see `hooks.attend`."""
        first, named, after, read, group = (np.asarray(each[i:j]) for each in self._ordered)
        past, here = first < self.parts[at], (first == self.parts[at]) & (group < 2)
        queries = np.where(past | (group == 0), after, named)
        queries = np.minimum(queries, read) if trimmed else queries
        own = np.where(past, after, named * (group == 0))
        h, width = self.dims.h, self.dims.h * (self.dims.q + self.dims.v)
        kinds = np.stack([queries, own], axis=1) / self.staged.base.batch
        most = 0.0
        for some in (past, here):
            alike, count = np.unique(kinds[some], axis=0, return_counts=True)
            worlds, a_world = largest_group(alike, count * self.staged.base.batch, self.staged.base.length, width)
            most = max(most, worlds * attention_bytes(a_world[0], self.staged.base.length, a_world[1], width, h))
        return min(self.staged.piece, most)

    def _edited_rows(self, i: int, j: int) -> dict[int, dict[str, int]]:
        """Part → tensor → rows that edits of the cells from i to j act on."""
        found: dict[int, dict[str, int]] = {}
        start, stop = np.searchsorted(self._entering.cell, [i, j])
        keys, rows = self._entering.key[start:stop], self._entering.rows[start:stop]
        for key, count in zip(self._entering.keys, np.bincount(keys, rows, len(self._entering.keys)), strict=True):
            found.setdefault(key[0], {})[key[1]] = int(count)
        return found

    def _root_rows(self, part: int) -> int:
        """Of base and those sources that still run."""
        staged = self.staged
        if part >= self.dims.blocks and part in staged.trimmed:
            return sum(
                len(places) for live in (staged.read, *(s.read or [] for s in staged.lives[1:])) for places in live
            )
        running = (root for live, root in zip(staged.lives, staged.roots, strict=True) if self._runs(live, part))
        return sum(int(_own(root).sum()) for root in running)

    def _runs(self, live: Live, part: int) -> bool:
        """Whether base or a source runs in a part: a source stops after what is taken from it."""
        at = self.staged.lives.index(live)
        return at == 0 or live.read is not None or self.staged.used[at - 1] >= part

    def _whole_values(self, part: int) -> int:
        """Values of base and sources on all positions, where they have some alone; scores that are made whole; edited
        weights."""
        staged, kind = self.staged, self.kinds[part]
        total = 0
        for live, root in zip(staged.lives, staged.roots, strict=True):
            places = root.batch * root.length
            if self._runs(live, part) and int(_own(root).sum()) < places:
                asked = {
                    site.tensor for site in staged.taken_from(live, staged.ats) if staged.sites.depth(site) == part
                }
                asked |= set("QKV") if "O" in kind.todo.card else set()
                total += sum(places * kind.width(name) for name in asked if name not in SCORES)
            if staged.explicit(part) and self._runs(live, part):
                total += 2 * places * root.length * kind.width("S")
        if staged.explicit(part):
            total += 3 * staged.base.batch * staged.base.length**2 * kind.dims.h * 4
        edited = {at.site for ats in staged.ats for at in ats if at.is_weight and staged.sites.depth(at.site) == part}
        leaves = kind.todo.card.leaves
        sizes = (math.prod(weight_shape(leaves[site.tensor], self.dims)) for site in edited)
        return total + 3 * kind.stored.itemsize * max(sizes, default=0)

    # ---- what cells may come to hold -----------------------------------------------------------------------------

    def _cells(self) -> Cells:
        sites, beyond = self.staged.sites, self.staged.last + 1
        made = []
        for ats, read in zip(self.staged.ats, self.staged.reads, strict=True):
            first = min((sites.depth(at.site) for at in ats), default=beyond)
            here = [at for at in ats if sites.depth(at.site) == first]
            named, after = (
                self._named(here),
                self.staged.base.rows.onward(self._named(ats)) & self.staged.base.real.cpu(),
            )
            group = min(map(self._group, here), default=2)
            made.append((first, int(named.sum()), int(after.sum()), sum(map(len, read)), group))
        return Cells(*np.array(made, dtype=np.int64).reshape(-1, 5).T)

    def _group(self, at: At) -> int:
        """The earliest rows that an edit is of."""
        kind = self.kinds.get(self.staged.sites.depth(at.site))
        if kind is None:
            return 2
        names = [step.name for step in kind.todo.card.readers(at.site.tensor)] if at.is_weight else [at.site.tensor]
        return min((kind.group(name) for name in names), default=2)

    def _named(self, ats: Sequence[At]) -> Tensor:
        """[B T]: the positions that edits may change; of a patch from what runs along only those where that differs
        from the base."""
        base = self.staged.base
        mask = torch.zeros(base.batch, base.length, dtype=torch.bool)
        for at in ats:
            place = None if at.is_weight else at.where.get("T", at.where.get("S"))
            named = base.rows.mask(place, "T", None if at.is_weight else at.among)
            if isinstance(at.edit.how, Patch) and not at.moved and at.draw == list(range(base.batch)):
                named = named & self._differing(at, named)
            mask |= named
        return mask

    def _differing(self, at: At, named: Tensor) -> Tensor:
        root = next(
            (r for live, r in zip(self.staged.lives, self.staged.roots, strict=True) if live is at.source), None
        )
        if root is None or root.base is None:
            return named
        own = _own(root)[:, : named.shape[1]]
        return torch.nn.functional.pad(own, (0, named.shape[1] - own.shape[1]), value=True)

    def _edits(self, order: Counts) -> Entering:
        keys: dict[tuple[int, str], int] = {}
        made = []
        for place, i in enumerate(order.tolist()):
            for at in self.staged.ats[i]:
                part = self.staged.sites.depth(at.site)
                whole = at.is_weight or at.window is None
                rows = self.staged.base.batch * self.staged.base.length if whole else int(self._named([at]).sum())
                card = self.staged.sites.card(at.site.block)
                for name in [row.name for row in card.readers(at.site.tensor)] if at.is_weight else [at.site.tensor]:
                    if at.is_weight and (part, name) in keys:  # these cells go one after the other
                        continue
                    if part in self.kinds and name not in SCORES:
                        made.append((place, keys.setdefault((part, name), len(keys)), rows))
        columns = np.array(made, dtype=np.int64).reshape(-1, 3).T
        return Entering(columns[0], columns[1], columns[2], list(keys))


def _own(root: Stream) -> Tensor:
    """[B T]: the positions that base or a source hold themselves."""
    start = next(iter(root.values.values()), None)
    return torch.zeros_like(root.real).cpu() if start is None else start.layout.mask.cpu()
