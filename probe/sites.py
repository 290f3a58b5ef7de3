"""Where a tensor is: a block and a name; and every way to write it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from probe.blocks import around, card
from probe.card import Card, Leaf, Step
from probe.dims import Dims
from probe.errors import OutOfRange, UnknownTensor
from probe.headers import brief


class Site(NamedTuple):
    """A tensor of a block, or (block None) of the model around the blocks."""

    block: int | None
    tensor: str

    def __str__(self) -> str:
        return self.tensor if self.block is None else f"blocks.{self.block}.{self.tensor}"

    @property
    def hook(self) -> str:
        """The hook's name: ``blocks.3.hook_c_KV``."""
        return f"hook_{self.tensor}" if self.block is None else f"blocks.{self.block}.hook_{self.tensor}"


class Sites:
    """All sites of a model, in the order in which they are computed.

    Args:
        only: the one block that there is, where a block runs alone. A name without a block is then of that block.
    """

    def __init__(self, dims: Dims, only: int | None = None) -> None:
        self.dims = dims
        self.cards = tuple(card(moe=moe, query_latent=dims.r_q is not None) for moe in dims.moe)
        self.around = around()
        self.only = only
        self._all = tuple(self._in_order())

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks that there are."""
        return range(len(self.cards)) if self.only is None else (self.only,)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._all)

    def _in_order(self) -> Iterator[Site]:
        outer = [Site(None, name) for name in self.around] if self.only is None else []
        yield from outer[:1]  # x_0
        for block in self.blocks:
            for name in self.cards[block].hooked:
                yield Site(block, name)
        yield from outer[1:]

    def card(self, block: int | None) -> Card:
        """The card of one block, or of the model around (None).

        Raises:
            OutOfRange: there is no such block, or another one runs alone.
        """
        if self.only is not None and block != self.only:
            there = "the model around the blocks" if block is None else f"block {block}"
            raise OutOfRange(f"block {self.only} runs alone here, without {there}.")
        if block is None:
            return self.around
        if not 0 <= block < len(self.cards):
            raise OutOfRange(f"block {brief(block)} does not exist: this model has blocks 0 to {len(self.cards) - 1}.")
        return self.cards[block]

    def depth(self, site: Site) -> int:
        """How far along a site or a weight is: its block; -1 at the embedding, the number of blocks at the head."""
        if site.block is not None:
            return site.block
        return -1 if site.tensor in ("x_0", "W_E") else len(self.cards)

    def node(self, site: Site) -> Step | Leaf:
        """The card's row for a site."""
        return self.card(site.block).node(site.tensor)

    def find(self, spelling: str | Site) -> Site:
        """The site of any spelling: ``blocks.3.c_KV``, ``blocks.3.attn.hook_v``, ``model.layers.3.mlp.down_proj``.

        Raises:
            UnknownTensor: nothing is spelt so, or a block is missing (``c_KV`` alone).
            OutOfRange: the block does not exist.
        """
        site, _ = self.find_with_inverse(spelling)
        return site

    def find_any(self, spelling: str | Site) -> tuple[Site, bool]:
        """As `find_with_inverse`, and weights too: ``blocks.3.W_O``, ``model.layers.3.self_attn.o_proj.weight``."""
        found, node, inverse = self._look_up(spelling)
        if not node.hook and getattr(node, "kind", "") != "weight":
            raise UnknownTensor(f"{str(spelling)!r}: {node.name} is shown, never watched or edited.")
        return found, inverse

    def find_with_inverse(self, spelling: str | Site) -> tuple[Site, bool]:
        """As `find`; also whether it means the reciprocal (TransformerLens' ``hook_scale`` is rms, ours 1/rms)."""
        found, node, inverse = self._look_up(spelling)
        if not node.hook:
            raise UnknownTensor(
                f"{str(spelling)!r} is not a tensor with a hook: {node.name} is shown, never watched or edited."
            )
        return found, inverse

    def _look_up(self, spelling: str | Site) -> tuple[Site, Step | Leaf, bool]:
        if isinstance(spelling, Site) and spelling.tensor in self.card(spelling.block).hooked:  # the usual way, at once
            return spelling, self.node(spelling), False
        spelling = str(spelling)
        match = re.fullmatch(r"(?:blocks|(?:language_model\.)?model\.layers)\.(-?\d{1,18})\.(.+)", spelling)
        block = int(match[1]) if match else self.only
        inner = match[2] if match else re.sub(r"^(language_model\.)?model\.", "", spelling)
        node = self._node(self.card(block), inner, spelling, block)
        return Site(block, node.name), node, inner == getattr(node, "inverse", None)

    def _node(self, found: Card, inner: str, spelling: str, block: int | None) -> Step | Leaf:
        plain = inner.removeprefix("hook_")
        if plain in found.hooked:  # blocks.3.hook_c_KV
            return found.node(plain)
        try:
            return found.find(inner)
        except UnknownTensor:
            if block is None:
                for kind in self.cards:
                    if inner in kind.spellings():
                        name = kind.find(inner).name
                        raise UnknownTensor(
                            f"{spelling!r} is in every block: say which, as in blocks.0.{name}."
                        ) from None
            else:
                for kind in self.cards:
                    if kind is not found and inner in kind.spellings() and inner not in found.refused:
                        raise UnknownTensor(
                            f"{spelling!r}: {inner} is a tensor of {kind.kind} blocks; block {block} is {found.kind}."
                        ) from None
            raise
