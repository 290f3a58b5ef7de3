"""Parameter accounting, from the card: what a block's weights count, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from probe.card import Card, Leaf
from probe.dims import Dims
from probe.sites import Sites
from probe.weights import weight_shape


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
