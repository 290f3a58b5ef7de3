"""How far the cells of a sweep choose other experts than the base."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hooks.apply import At
from hooks.stream import Stream
from probe.sites import Sites


class Flips:
    """Choices that differ from the base's, by expert and not by slot; over the rows that a cell's edits reach.

    Args:
        ats: the bound edits of each cell.
    """

    def __init__(self, sites: Sites, base: Stream, ats: Sequence[Sequence[At]]) -> None:
        self.sites, self.base, self.ats = sites, base, ats
        self.changed, self.all = torch.zeros(len(ats), dtype=torch.long), [0] * len(ats)
        depths = [[sites.depth(at.site) for at in some] for some in ats]
        self.first, self.last = ([of(some, default=-1) for some in depths] for of in (min, max))
        self._past: dict[int, tuple[Tensor, int]] = {}

    def of(self, i: int) -> tuple[float | None, int]:
        """The share of a cell's choices that are the base's, None where it has none; and how many are not."""
        changed = int(self.changed[i])
        return 1 - changed / self.all[i] if self.all[i] else None, changed

    def count(self, chunk: Stream, members: Sequence[int], block: int) -> None:
        """Count those of one block, whose experts are chosen."""
        B, needed = self.base.batch, None if chunk.needed is None else chunk.needed.mask.cpu()
        for cell, i in enumerate(members):
            if block < self.first[i]:
                continue
            reached, count = self._reached(i, block)
            if needed is not None and count:
                count = int((reached & needed[cell * B : (cell + 1) * B]).sum())
            self.all[i] += count * self.sites.dims.k
        own = chunk.own("experts")
        if own is None:
            return
        world, pos = own.layout.places
        theirs = chunk.of_base("experts", world, pos)
        changed = ~(own.value[..., :, None] == theirs[..., None, :]).any(-1)
        by_cell = torch.zeros(len(members), dtype=torch.long, device=chunk.device)
        by_cell.index_add_(0, world // B, changed[0].sum(-1))
        self.changed[list(members)] += by_cell.cpu()

    def _reached(self, i: int, block: int) -> tuple[Tensor, int]:
        """[B T]: where a cell can change what a block's router chooses, and how many places these are; the same for
        all blocks past its edits."""
        past = block > self.last[i]
        if past and i in self._past:
            return self._past[i]
        reached = torch.zeros(self.base.batch, self.base.length, dtype=torch.bool)
        for at in self.ats[i]:
            reached |= at.reach(block, self.base.rows)
        found = reached, int(reached.sum())
        if past:
            self._past[i] = found
        return found
