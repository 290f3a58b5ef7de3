"""Rows packed one after another: which position of which world each is, and how to go from one packing to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """N rows, sorted by world, then by position.

    Attributes:
        mask: [W T], true where a world's position has a row.
    """

    mask: Tensor

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """The world and the position of each row, [N] each."""
        world, pos = self.mask.nonzero(as_tuple=True)
        return world, pos

    @cached_property
    def table(self) -> Tensor:
        """[W T]: the row of each world's position; -1 where there is none."""
        world, pos = self.places
        table = torch.full(self.mask.shape, -1, device=self.mask.device)
        table[world, pos] = torch.arange(len(world), device=self.mask.device)
        return table

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each world, if it has any; its others follow. And where the last one's end."""
        starts: list[int] = [0, *self.mask.sum(-1).cumsum(0).tolist()]
        return starts

    @cached_property
    def whole(self) -> bool:
        """Whether every position of every world has a row: packed is then a view of [W T]."""
        return bool(self.mask.all())

    @cached_property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.places[0])

    def __len__(self) -> int:
        return self.count


class Layouts:
    """Unions and cuts of layouts, each made once, so that equal ones are the same object."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, int], tuple[Layout, Layout, Layout]] = {}

    def union(self, a: Layout, b: Layout) -> Layout:
        """The rows of either."""
        return a if a is b else self._once("|", a, b)

    def cut(self, a: Layout, b: Layout) -> Layout:
        """The rows of both."""
        return a if a is b else self._once("&", a, b)

    def _once(self, how: str, a: Layout, b: Layout) -> Layout:
        key = (how, id(a), id(b))
        if key not in self._made:  # the operands are kept with the result, lest another take their id
            mask = a.mask | b.mask if how == "|" else a.mask & b.mask
            same = next((given for given in (a, b) if torch.equal(given.mask, mask)), None)
            self._made[key] = (a, b, Layout(mask) if same is None else same)
        return self._made[key][2]


def gather(value: Tensor, layout: Layout, world: Tensor, pos: Tensor) -> Tensor:
    """Rows of a packed value by world and position, [1 N ·]. All must have a row."""
    return value.index_select(1, layout.table[world, pos].clamp(min=0))
