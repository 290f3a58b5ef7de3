"""Where an edit acts, in the tensor's own dims; the one place where bounds are checked, and nothing is clipped.

Positions (``T``, and ``S`` where an axis holds keys) count each row's real tokens from 0 whatever the padding; -1 is
the last. Pads cannot be named. A span's name stands wherever a position does: ``T="S2"``, ``T="subject[-1]"``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hooks import draws
from probe.card import Leaf, Step, letters
from probe.dims import DIMS, Dims
from probe.errors import BadEdit, OutOfRange, UnknownDim, nearest
from probe.headers import brief
from probe.numerics import position_ids, text_starts

Index = int | str | Sequence[int] | slice | Tensor
"""A place, several, a slice, a span's name, or (for positions) a mask [B, T] of the batch as it is padded."""

Spans = Mapping[str, Sequence[int]]
"""A row's named spans: name → real positions."""

FEATURE = "feature"
"""The dim of a dictionary's latents; only edits with ``through=`` have it."""


@dataclass(frozen=True)
class Span:
    """A slice that can be hashed, as edits can: Python's own cannot before 3.12."""

    start: int | None
    stop: int | None
    step: int | None

    def __str__(self) -> str:
        parts = (self.start, self.stop) if self.step is None else (self.start, self.stop, self.step)
        return ":".join("" if i is None else str(i) for i in parts)


@dataclass(frozen=True)
class Mask:
    """A mask of positions, one tuple a row, as the batch is padded."""

    rows: tuple[tuple[bool, ...], ...]

    def __str__(self) -> str:
        return f"a mask of {sum(map(sum, self.rows))} places"


Numbers = tuple[int, ...] | Span
Place = Numbers | str | Mask
Where = tuple[tuple[str, Place], ...]


def where_of(where: Mapping[str, Index]) -> Where:
    """What a user wrote, as a frozen value.

    Raises:
        UnknownDim: a name that is no dim.
        BadEdit: an index that is none.
    """
    made: list[tuple[str, Place]] = []
    for dim, index in where.items():
        if dim not in DIMS and dim != FEATURE:
            near = nearest(dim, DIMS, n=1)
            raise UnknownDim(f"{dim!r} is no dim{f'; nearest: {near[0]}' if near else ''}. Dims are {', '.join(DIMS)}.")
        made.append((dim, _place(dim, index)))
    return tuple(made)


def _place(dim: str, index: Index) -> Place:
    if isinstance(index, str) or (isinstance(index, Tensor) and index.dtype == torch.bool):
        if dim not in "TS":
            raise BadEdit(f"{dim}={index!r}: span names and masks stand for positions, T or S.")
        if isinstance(index, str):
            return index
        if index.ndim != 2:
            raise BadEdit(f"{dim}: a mask is [B, T], one entry a token; this one is {list(index.shape)}.")
        return Mask(tuple(tuple(row) for row in index.tolist()))
    try:
        places: Numbers
        if isinstance(index, slice):
            places = Span(*(None if i is None else _whole(i) for i in (index.start, index.stop, index.step)))
        elif isinstance(index, Iterable) and getattr(index, "ndim", None) != 0:
            places = tuple(_whole(i) for i in index)
        else:
            places = (_whole(index),)
    except TypeError:
        raise BadEdit(f"{dim}={index!r}: an index is a whole number, several, or a slice.") from None
    if places == () or (isinstance(places, Span) and places.step == 0):
        raise BadEdit(f"{dim}={index!r} names nothing.")
    return places


def _whole(i: Any) -> int:
    """A whole number of any library; never a truth value, a rounded fraction or a digit in a text."""
    if isinstance(i, bool):
        raise TypeError
    return operator.index(i)


def shown(place: Place) -> str:
    """A place as a user would write it."""
    if isinstance(place, tuple):
        return str(place[0]) if len(place) == 1 else str(list(place))
    return str(place)


def axis_of(node: Step | Leaf, dim: str) -> int:
    """The axis that ``dim`` is (part of).

    Raises:
        UnknownDim: the tensor lacks it; the message says which it has.
    """
    if isinstance(node, Step):
        return node.axis(dim)
    for axis, name in enumerate(node.shape):
        if dim in letters(name):
            return axis
    raise UnknownDim(f"{node.name} has no dim {dim!r}; it has {' '.join(node.shape)}.")


def indices(place: Numbers, size: int, what: str) -> list[int]:
    """A place as a list of numbers 0 … size-1.

    Raises:
        OutOfRange: some of it does not exist.
    """
    if isinstance(place, Span):
        first = size if (place.step or 1) > 0 else size - 1  # what Python would clip a start to
        for end, most in ((place.start, first), (place.stop, size)):
            if end is not None and not -size <= end <= most:
                raise OutOfRange(f"{what} has {size}: the slice {shown(place)} goes beyond; nothing is clipped.")
        chosen = list(range(size))[place.start : place.stop : place.step]
        if not chosen:
            raise OutOfRange(f"{what} has {size}: the slice {shown(place)} is empty.")
        return chosen
    for i in place:
        if not -size <= i < size:
            raise OutOfRange(f"{what} has {size}, so {-size} to {size - 1}: {brief(i)} does not exist.")
    return [i % size for i in place]


def one_hot(place: Numbers, size: int, what: str) -> Tensor:
    """[size], true at the places."""
    mask = torch.zeros(size, dtype=torch.bool)
    mask[indices(place, size, what)] = True
    return mask


def along(mask: Tensor, axis: int, ndim: int) -> Tensor:
    """Something over one axis ([size]), or over rows and one axis ([B, size]), spread over ``ndim`` axes."""
    shape = [1] * ndim
    shape[axis] = mask.shape[-1]
    if mask.ndim == 2:
        shape[0] = mask.shape[0]
    return mask.view(shape)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a run: how long they are, where their real tokens stand in the batch, and their named spans."""

    keep: Tensor | None
    batch: int
    length: int
    spans: tuple[Spans, ...] | None = None
    past: Rows | None = None
    """In a step of decoding: the rows of all keys, old and new. None: the keys are these very positions."""
    spoken: tuple[int, ...] | None = None
    """Real tokens of each row that named positions count: the prompt's, where a forced answer stands behind it. What
    names no positions means all real ones. None: they count all."""
    ids: Tensor | None = None
    """[B T]: the position ids that rotate queries and keys. None: they count each text's real tokens from 0."""
    segments: Tensor | None = None
    """[B T]: which of the texts that a row packs each token belongs to. None: a row is one text."""
    content: Tensor | None = None
    """Token ids [B T], or the stream [B T d] that a block runs alone on: what is drawn for a row hangs on it. None: it
    isn't known, and nothing is drawn."""

    @classmethod
    def of(
        cls,
        values: Tensor,
        keep: Tensor | None,
        spans: Sequence[Spans] | None = None,
        spoken: Sequence[int] | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Rows:
        """The rows of tokens, or of a residual stream, as a user says them, who may write into theirs later."""
        keep, ids, segments = (None if given is None else given.clone() for given in (keep, positions, segments))
        batch, length = values.shape[:2]
        named = None if spans is None else tuple(spans)
        said = None if spoken is None else tuple(spoken)
        content = values if values.is_floating_point() else values.clone()
        return cls(keep, batch, length, named, None, said, ids, segments, content)

    @cached_property
    def _masks(self) -> dict[Any, Tensor]:
        """Masks that were asked for: a sweep asks for the same ones thousands of times."""
        return {}

    @property
    def keys(self) -> Rows:
        """The rows that attention's key axis counts."""
        return self.past or self

    def __post_init__(self) -> None:
        if self.spans is not None and len(self.spans) != self.batch:
            raise BadEdit(f"spans are given for {len(self.spans)} rows; there are {self.batch}.")
        if self.spoken is not None:
            self._check_spoken(self.spoken)

    def _check_spoken(self, spoken: tuple[int, ...]) -> None:
        if len(spoken) != self.batch:
            raise BadEdit(f"spoken counts the tokens of {len(spoken)} rows; there are {self.batch}.")
        for b, (some, real) in enumerate(zip(spoken, self.lengths, strict=True)):
            if not 0 < some <= real:
                raise OutOfRange(f"row {b} has {real} real tokens, so {some} of them can't be its prompt.")

    @cached_property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [self.length] * self.batch if self.keep is None else [int(n) for n in self.keep.sum(-1)]

    @property
    def nameable(self) -> list[int]:
        """Real tokens of each row that named positions count."""
        return self.lengths if self.spoken is None else list(self.spoken)

    @cached_property
    def first(self) -> list[int]:
        """The place of each row's first real token."""
        return [0] * self.batch if self.keep is None else [int(i) for i in self.keep.long().argmax(-1)]

    @property
    def counted(self) -> bool:
        """Whether each row is one text whose positions count its real tokens."""
        return self.ids is None and self.segments is None

    @cached_property
    def position_ids(self) -> Tensor:
        """[B T], on the CPU; those of pads say nothing."""
        ids = self.ids
        if ids is None:
            ids = position_ids(self.keep, self.length, torch.device("cpu"), self.segments)
        return ids.cpu().long().expand(self.batch, -1)

    @cached_property
    def starts(self) -> Tensor | None:
        """[B T]: the place at which each token's text starts; None: a row is one text."""
        return None if self.segments is None else text_starts(self.keep, self.segments).cpu()

    @cached_property
    def begun(self) -> Tensor:
        """[B T]: at which of its row's real tokens each token's text begins."""
        if self.starts is None:
            return torch.zeros(self.batch, self.length, dtype=torch.long)
        return self.starts - torch.tensor(self.first)[:, None]

    def onward(self, mask: Tensor) -> Tensor:
        """[W T]: of each text, the places from the first true one on. World w stands on row w mod B."""
        if self.starts is None:
            return mask.long().cummax(-1).values.bool()
        latest = torch.where(mask, torch.arange(self.length, device=mask.device), -1).cummax(-1).values
        return (latest.view(-1, self.batch, self.length) >= self.starts.to(mask.device)).view(mask.shape)

    def meets(self, other: Rows) -> Tensor:
        """[B t]: as far as both reach, the places at which rows have the same position, in a text that begins alike;
        a pad meets anything."""
        t = min(self.length, other.length)
        if self.counted and other.counted:
            return torch.ones(self.batch, t, dtype=torch.bool)
        real = self.mask(None, "T")[:, :t] & other.mask(None, "T")[:, :t]
        turned = self.position_ids[:, :t] != other.position_ids[:, :t]
        cut = self.begun[:, :t] != other.begun[:, :t]
        return ~(real & (turned | cut))

    @cached_property
    def texts(self) -> Tensor:
        """[B T], a number for each token's text up to it; see `hooks.draws`."""
        if self.past is not None:
            return self.past.texts[:, -self.length :]
        return self._texts(self.starts)

    def _texts(self, starts: Tensor | None = None) -> Tensor:
        assert self.content is not None, "rows that something is drawn for have tokens"
        return draws.texts(self.content, self.keep, starts)

    @cached_property
    def prompts(self) -> Tensor:
        """[B], a number for all that a row says, as far as named positions count it."""
        last = torch.tensor([first + n - 1 for first, n in zip(self.first, self.nameable, strict=True)])
        return self._texts().gather(1, last[:, None])[:, 0]

    @cached_property
    def in_order(self) -> list[int]:
        """The rows in an order that hangs on their texts; as they stand, where these aren't known."""
        return list(range(self.batch)) if self.content is None else self.prompts.argsort(stable=True).tolist()

    def shape(self, node: Step | Leaf, dims: Dims) -> tuple[int, ...]:
        """The shape that a tensor has on these rows."""
        keys = (self.keys if "T" in node.shape else self).length  # scores reach back to keys of earlier steps
        own = {"B": self.batch, "T": self.length, "S": keys, "1": 1}
        return tuple(own[axis] if axis in own else dims.size(axis) for axis in node.shape)

    def positions(self, b: int, place: Place | None, what: str) -> list[int]:
        """The real positions that ``place`` names in row ``b``; all of them for None.

        Raises:
            OutOfRange: the row is too short, or the mask names a pad.
            BadEdit: no such span.
        """
        if place is None:
            return list(range(self.lengths[b]))
        if isinstance(place, str):
            return self._span(b, place, what)
        if isinstance(place, Mask):
            return self._masked(b, place, what)
        return indices(place, self.nameable[b], f"{what} of row {b} (its real tokens)")

    def _span(self, b: int, name: str, what: str) -> list[int]:
        match = re.fullmatch(r"(.*?)(?:\[(-?\d{1,18})\])?", name)
        assert match is not None
        spans = {} if self.spans is None else self.spans[b]
        if match[1] not in spans:
            known = ", ".join(spans) or "no spans; give run() the prompts' spans"
            raise BadEdit(f"{what}: row {b} has no span {match[1]!r}; it has {known}.")
        places = list(spans[match[1]])
        if match[2] is not None:
            places = [
                places[i] for i in indices((int(match[2]),), len(places), f"{what}: span {match[1]!r} of row {b}")
            ]
        return indices(tuple(places), self.nameable[b], f"{what} of row {b} (its real tokens)")

    def _masked(self, b: int, mask: Mask, what: str) -> list[int]:
        if len(mask.rows) != self.batch or len(mask.rows[b]) != self.length:
            shape = [len(mask.rows), len(mask.rows[0]) if mask.rows else 0]
            raise BadEdit(f"{what}: the mask is {shape}; the tokens are {[self.batch, self.length]}.")
        places = [i - self.first[b] for i, named in enumerate(mask.rows[b]) if named]
        if any(not 0 <= p < self.lengths[b] for p in places):
            raise OutOfRange(f"{what}: the mask names a pad of row {b}.")
        return places

    def mask(self, place: Place | None, what: str, among: Iterable[int] | None = None) -> Tensor:
        """[B, T] of the padded batch, true at the named positions of each row's real tokens (None: at all of them); of
        these rows (None: of all). Not to be written into: it is kept."""
        key = (place, None if among is None else tuple(among))
        if key not in self._masks:
            self._masks[key] = self._mask(place, what, among)
        return self._masks[key]

    def _mask(self, place: Place | None, what: str, among: Iterable[int] | None) -> Tensor:
        mask = torch.zeros(self.batch, self.length, dtype=torch.bool)
        if place is None:
            real = torch.ones_like(mask) if self.keep is None else self.keep.bool().cpu()
            rows = slice(None) if among is None else list(among)
            mask[rows] = real[rows]
            return mask
        firsts = self.first
        for b in range(self.batch) if among is None else among:
            mask[b, [firsts[b] + i for i in self.positions(b, place, what)]] = True
        return mask


class Frozen:
    """A tensor inside a frozen value: compared by what it holds."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = torch.as_tensor(tensor).detach().clone()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Frozen)
            and self.tensor.dtype == other.tensor.dtype
            and torch.equal(self.tensor, other.tensor)
        )

    def __hash__(self) -> int:
        return hash((tuple(self.tensor.shape), self.tensor.dtype))

    def __repr__(self) -> str:
        return f"Frozen{list(self.tensor.shape)}"
