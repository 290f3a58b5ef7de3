"""Parameter accounting, part by part: from the card, what a block's weights count; from headers, what is stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from probe.card import Card, Leaf
from probe.dims import Dims
from probe.forms import Survey, survey
from probe.headers import expanded
from probe.names import stored_names
from probe.sites import Sites
from probe.weights import weight_shape, weight_sites


class Part(NamedTuple):
    """A line of the table: a component, how its number comes about, the number."""

    component: str
    calculation: str
    parameters: int


def count(leaves: Iterable[Leaf], dims: Dims) -> int:
    """How many parameters these weights hold."""
    return sum(math.prod(weight_shape(leaf, dims)) for leaf in leaves)


def parts(card: Card, dims: Dims) -> list[Part]:
    """A card's components in order, each with the sum that makes its number."""
    by_part: dict[str, list[Leaf]] = {}  # leaves come in the order of the closed list, so parts do too
    for leaf in card.weights:
        by_part.setdefault(leaf.part, []).append(leaf)
    return [Part(part, _sum(by_part[part], dims), count(by_part[part], dims)) for part in by_part]


def _sum(leaves: list[Leaf], dims: Dims) -> str:
    return " + ".join(" × ".join(f"{size:,}" for size in weight_shape(leaf, dims)) for leaf in leaves)


class Account(NamedTuple):
    """A whole model's parameters."""

    dense: list[Part]
    moe: list[Part]
    around: list[Part]
    dense_blocks: int
    moe_blocks: int
    total: int
    active: int
    """Those that one token meets: of the routed experts only the chosen; embedding and head whole."""


def account(dims: Dims) -> Account:
    """Count a model: one dense block, one MoE block, what stands around them, all of it, and what one token meets."""
    sites = Sites(dims)
    by_kind = {moe: parts(sites.cards[dims.moe.index(moe)], dims) for moe in set(dims.moe)}
    around = [part for part in parts(sites.around, dims) if not (dims.tied and part.component == "Head")]
    dense, moe = by_kind.get(False, []), by_kind.get(True, [])
    dense_blocks, moe_blocks = dims.moe.count(False), dims.moe.count(True)
    total = sum(p.parameters for p in dense) * dense_blocks + sum(p.parameters for p in moe) * moe_blocks
    total += sum(p.parameters for p in around)
    routed = sum(p.parameters for p in moe if p.component == "Routed experts")
    idle = routed * (dims.e - dims.k) // dims.e * moe_blocks if dims.e else 0
    return Account(dense, moe, around, dense_blocks, moe_blocks, total, total - idle)


class Counted(NamedTuple):
    """Parameters counted in a checkpoint: of a run of like blocks, of one of them part by part, or around the blocks.

    ``moe`` is None around the blocks.
    """

    blocks: range
    moe: bool | None
    parts: list[Part]


class Beside(NamedTuple):
    """What a checkpoint holds that is no parameter: what it is, how many tensors, how many numbers."""

    what: str
    tensors: int
    numbers: int


class Tally(NamedTuple):
    """A checkpoint's own tensors, counted.

    Attributes:
        counted: the parameters, block by block, then around.
        total: all of them.
        beside: what was left out of the count.
        faults: what differs from the config's expectation, tensor by tensor, as sentences.
    """

    counted: list[Counted]
    total: int
    beside: list[Beside]
    faults: list[str]


def tally(directory: str | Path) -> Tally:
    """Count a checkpoint's parameters from its headers; no weight is read. A quantised weight counts as it is expanded.

    Raises:
        BadConfig, BadCheckpoint: config or files are damaged. A tensor that is not as expected is told and counted.
    """
    found = survey(expanded(directory))
    shapes: dict[int | None, dict[str, list[tuple[int, ...]]]] = {}
    rest = dict.fromkeys(found.kept)
    for block, leaf in weight_sites(found.dims):
        parts = shapes.setdefault(block, {}).setdefault(leaf.part, [])
        parts += [found.kept[name].shape for name in stored_names(block, leaf, found.dims) if _first(name, rest)]
    by_block = {block: [_stored_part(part, held) for part, held in parts.items()] for block, parts in shapes.items()}
    moe = found.dims.moe
    counted = []
    for (is_moe, alike), run in groupby(range(len(moe)), lambda block: (moe[block], by_block[block])):
        blocks = list(run)
        counted.append(Counted(range(blocks[0], blocks[-1] + 1), is_moe, alike))
    counted.append(Counted(range(0), None, by_block[None]))
    total = sum(part.parameters for parts in by_block.values() for part in parts)
    return Tally(counted, total, _beside(found), [f"{fault}" for fault in found.faults])


def _first(name: str, rest: dict[str, None]) -> bool:
    """Whether a stored matrix is there and has not been counted: two weights may share one."""
    return rest.pop(name, rest) is None


def _stored_part(part: str, shapes: Sequence[tuple[int, ...]]) -> Part:
    calculation = [
        (f"{n:,} × " if n > 1 else "") + " × ".join(f"{size:,}" for size in shape)
        for shape, n in Counter(shapes).items()
    ]
    return Part(part, " + ".join(calculation), sum(map(math.prod, shapes)))


def _beside(found: Survey) -> list[Beside]:
    scales = [part for kept in found.kept.values() for part in kept.parts[1:] if part in found.stored]
    groups = {"scales and stated shapes of quantised weights": scales, **found.left_out}
    return [
        Beside(what, len(names), sum(found.stored[name].elements for name in names))
        for what, names in groups.items()
        if names
    ]
