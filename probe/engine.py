"""One verb: evaluate what is *wanted*, given what is *known*. `plan` decides, `evaluate` loops.

A plan is data: it can be printed, and says which steps run, which weights are read and when each value is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from probe.card import Card, Leaf, Step, Values
from probe.dims import Dims
from probe.errors import Missing
from probe.leaves import FP32
from probe.numerics import Show

Numerics = Literal["reference", "careful"]
"""``reference``: bit for bit as transformers. ``careful``: residual stream, norms, router and attention in fp32,
products in the stored precision; the two are one where weights are fp32."""

HEAD_CHUNK = 8192
"""Columns of the head that are in fp32 at a time."""


class Fork(NamedTuple):
    """A value that only some readers see edited: each in ``edited`` reads its own, all others ``value``; ``shown`` is
    what a run returns."""

    value: Tensor
    edited: Mapping[str, Tensor]
    shown: Tensor


Tap = Callable[[str, Tensor], Tensor | Fork]
"""Sees each value as it is made, by name, and returns what the steps below it shall see."""


class Weights(Protocol):
    """Where weights come from: memory, a checkpoint, a seed."""

    dims: Dims
    resident: bool
    """Whether all weights are in memory. If not, routed weights are read by the rows that tokens chose."""

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        """One weight of a block (None: of the model around) as the card shows it, [in out]; only these rows of e."""
        ...


@dataclass(frozen=True)
class Plan:
    """What `evaluate` will do.

    Attributes:
        want: the names to return.
        taken: the given names that are used, as they are.
        tapped: those of them that the tap sees: the card's hooked inputs and what is edited or watched.
        steps: what is computed, in the card's order.
        drops: for each step, the names whose last reader it is.
    """

    card: Card
    want: tuple[str, ...]
    taken: tuple[str, ...]
    tapped: frozenset[str]
    steps: tuple[Step, ...]
    drops: tuple[tuple[str, ...], ...]
    shown: frozenset[str] = frozenset()
    """Names that are never made whole: the step that does without them shows each chunk of queries as it is made."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The weights that are read, in order. Of a routed one at most all rows, in truth those that tokens choose."""
        needs = dict.fromkeys(need for row in self.steps for need in row.needs)
        return tuple(need for need in needs if need in self.card.leaves and self.card.leaves[need].kind == "weight")

    def __str__(self) -> str:
        lines = [f"want {', '.join(self.want)} given {', '.join(self.taken) or 'nothing'}: {len(self.steps)} steps"]
        for row, drop in zip(self.steps, self.drops, strict=True):
            dims = " ".join(row.shape)
            lines.append(f"  {row.name:<14}= {row.plain + ' from ' + ', '.join(row.needs):<48} [{dims}]")
            if drop:
                lines[-1] += f"  drop {', '.join(drop)}"
        leaves = self.card.leaves
        reads = [name + (" (the chosen rows of e)" if leaves[name].routed else "") for name in self.reads]
        lines.append(f"reads {', '.join(reads) or 'no weights'}")
        return "\n".join(lines)


def plan(
    card: Card,
    want: Iterable[str],
    given: Collection[str],
    edited: Collection[str] = (),
    watched: Collection[str] = (),
    chunks: Collection[str] = (),
    *,
    exact: bool = True,
) -> Plan:
    """Decide which steps give ``want`` from ``given``: no others run, and each value is dropped after its last reader.

    Args:
        want: exact names of tensors of the card (or of given inputs).
        given: names whose values are known. One below an edit is stale, and made anew.
        edited: names whose value the tap may change; each is made (or taken, if known and not stale) and tapped. An
            edited weight only makes what reads it stale.
        watched: names that the tap shall see, and that need not stay.
        chunks: names of which chunks of queries will do (``S``, ``A``): shown as they are made, unless somebody asks
            for the whole, which the tap then sees.
        exact: whether every value shall have the bits that it has when all are looked at.

    Raises:
        Missing: something is needed that is neither given nor a step.
    """
    seen = (frozenset(edited), frozenset(watched), frozenset(chunks))
    return _plan(card, tuple(dict.fromkeys(want)), tuple(given), *seen, exact)


@lru_cache(maxsize=256)
def _plan(
    card: Card,
    want: tuple[str, ...],
    given: tuple[str, ...],
    edited: frozenset[str],
    watched: frozenset[str],
    chunks: frozenset[str],
    exact: bool,
) -> Plan:
    """A run plans each block anew, and most blocks alike."""
    known = set(given) - card.descendants(edited)
    lean = _lean_ways(card, {*want, *known, *edited, *watched}, exact)
    shown = {name: way.name for way in lean.values() for name in way.without if name in chunks}
    known -= set(shown.values())  # what shows them runs, even if its value is known
    needed: set[str] = set()
    stack = [*want, *watched, *(shown.get(name, name) for name in chunks)]
    stack += [name for name in edited if name not in card.leaves or card.leaves[name].kind == "input"]
    while stack:
        name = stack.pop()
        if name in needed:
            continue
        needed.add(name)
        if name not in known and name in card:
            stack += _inputs(card, lean.get(name, card[name]))
        elif name not in known:
            raise Missing(
                f"{', '.join(want)} needs {name}, which is not given; given are {', '.join(given) or 'none'}."
            )
    steps = tuple(lean.get(name, row) for name, row in card.items() if name in needed and name not in known)
    taken = tuple(name for name in given if name in needed and name in known)
    hooked = {name for name in taken if name in card.leaves and card.leaves[name].hook}
    tapped = frozenset(hooked | ({*edited, *watched, *chunks} & set(taken)))
    return Plan(card, want, taken, tapped, steps, _drops(card, steps, want), frozenset(shown))


def _inputs(card: Card, row: Step) -> list[str]:
    """What a step reads that must be computed or given: weights and constants are always at hand."""
    return [need for need in row.needs if need in card or (need in card.leaves and card.leaves[need].kind == "input")]


def _lean_ways(card: Card, asked: set[str], exact: bool) -> dict[str, Step]:
    """The steps that take their lean way: nobody asks for what it does without."""
    ways = ((name, card.lean(name)) for name in card)
    free = {name: way for name, way in ways if way is not None and not asked & set(way.without)}
    return {name: way for name, way in free.items() if way.exact or not exact}


def _drops(card: Card, steps: Sequence[Step], want: Collection[str]) -> tuple[tuple[str, ...], ...]:
    last: dict[str, int] = {}
    for i, row in enumerate(steps):
        last.update(dict.fromkeys((row.name, *_inputs(card, row)), i))
    return tuple(tuple(name for name, at in last.items() if at == i and name not in want) for i in range(len(steps)))


def evaluate(
    todo: Plan,
    given: Mapping[str, Any],
    weights: Weights,
    block: int | None = None,
    tap: Tap | None = None,
    show: Show | None = None,
    numerics: Numerics = "reference",
) -> dict[str, Tensor]:
    """Carry out a plan; no decisions are taken here.

    Args:
        given: the values of the plan's ``taken`` names, never changed; ``dt``, the activation dtype, where there is
            no x_n.
        block: which block's weights to read, None for the model around the blocks.
        tap: sees every value made, and the tapped ones among the given.
        show: sees each chunk of queries of the plan's ``shown`` names: name, queries, value.
        numerics: see `compute`.

    Returns:
        The wanted values, as the steps below see them.
    """
    dims = weights.dims
    values: Values = {name: given[name] for name in todo.taken}
    if tap is not None:
        for name in todo.taken:
            if name in todo.tapped:
                values[name] = tap(name, values[name])
    rows = _Rows(weights, block)
    leaves = todo.card.leaves
    for row, drop in zip(todo.steps, todo.drops, strict=True):
        args = []
        for need in row.needs:
            if need in values:
                args.append(_seen_by(row.name, values[need]))
            elif need == "dims":
                args.append(dims)
            elif need == "show":
                args.append(_only(show, todo.shown))
            elif need == "dt":
                args.append(_activation_dtype(given))
            elif leaves[need].kind == "constant":
                args.append(getattr(dims, need))
            elif leaves[need].routed and not weights.resident:
                args[row.needs.index("experts")], weight = rows.of(need, values["experts"])
                args.append(weight)
            else:
                args.append(weights.read(block, need))
        value = compute(row, args, leaves, numerics)
        values[row.name] = value if tap is None else tap(row.name, value)
        del args, value
        for name in drop:
            values.pop(name, None)
    return {name: _shown(values[name]) for name in todo.want}


def compute(row: Step, args: list[Any], leaves: Mapping[str, Leaf], numerics: Numerics) -> Tensor:
    """One step. ``careful``: activations are fp32 throughout; a product with a stored matrix is made in the matrix's
    precision and comes back as fp32, the head's in fp32."""
    if numerics == "reference":
        return row.fn(*args)
    stored = [w for need, w in zip(row.needs, args, strict=True) if need in leaves and _is_matrix(leaves[need])]
    if row.name == "logits":
        x, W = args
        return torch.cat([x @ part.to(x.dtype) for part in W.split(HEAD_CHUNK, dim=1)], dim=-1)
    if stored:
        low = stored[0].dtype
        args = [a.to(low) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    value = row.fn(*args)
    return value.to(torch.float32) if row.dtype == "act" else value


def _is_matrix(leaf: Leaf) -> bool:
    """Routed ones apart: `probe.numerics.grouped` sees to these itself."""
    return leaf.kind == "weight" and len(leaf.shape) == 2 and leaf.name not in FP32


def _only(show: Show | None, names: Collection[str]) -> Show | None:
    if show is None or not names:
        return None
    return lambda name, queries, value: show(name, queries, value) if name in names else None


def _seen_by(reader: str, value: Any) -> Any:
    if not isinstance(value, Fork):
        return value
    return value.edited.get(reader, value.value)


def _shown(value: Any) -> Tensor:
    return value.shown if isinstance(value, Fork) else value


def _activation_dtype(given: Mapping[str, Any]) -> torch.dtype:
    if "dt" in given:
        return given["dt"]
    if "x_n" in given:
        return given["x_n"].dtype
    raise Missing("delta_routed is cast to the activation dtype: give x_n, or dt.")


class _Rows:
    """Reads routed weights by the rows that tokens chose: the one data-dependent read, and the one host sync."""

    def __init__(self, weights: Weights, block: int | None) -> None:
        self.weights, self.block = weights, block
        self.experts: Tensor | None = None

    def of(self, name: str, experts: Tensor) -> tuple[Tensor, Tensor]:
        """The slots' places among the chosen rows, and those rows."""
        if self.experts is not experts:
            self.experts = experts
            chosen, self.places = torch.unique(experts, return_inverse=True)
            self.chosen: list[int] = chosen.tolist()
        return self.places, self.weights.read(self.block, name, self.chosen)
