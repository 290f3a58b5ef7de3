"""Law 11: every pair composes. For every two edits of one block, weights included, a cell equals a run with both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
import torch

from hooks import Cell, Edit, HookedModel, Live, Site, add, force, freeze, knock_out, noise, patch, scale, set_to, zero
from probe.errors import BadEdit, ProbeError, Unmatched
from probe.weights import weight_shape
from tests.hooks.test_sweep import KEEP, OTHER, SMALL, TOKENS, base
from tests.hooks.twin import Ask, agree, swept

SHARE = 8
"""One pair of so many is tried without ``--long``."""

Make = Callable[[Site, int, Live], Edit]
"""Of a site, its width and what runs along: an edit."""

OF_VALUES: dict[str, Make] = {
    "scale": lambda s, w, live: scale(str(s), factor=-0.5),
    "zero": lambda s, w, live: zero(str(s)),
    "add": lambda s, w, live: add(str(s), direction=torch.linspace(-1, 1, w)),
    "noise": lambda s, w, live: noise(str(s), std=0.5, seed=2),
    "patch": lambda s, w, live: patch(str(s), source=live),
    "freeze": lambda s, w, live: freeze(str(s)),
}
OF_WEIGHTS: dict[str, Make] = {
    "scale": lambda s, w, live: scale(str(s), factor=1.5),
    "zero": lambda s, w, live: zero(str(s)),
    "add": lambda s, w, live: add(str(s), direction=torch.linspace(-1, 1, w)),
    "set": lambda s, w, live: set_to(str(s), value=0.1),
}
OF_EXPERTS: dict[str, Make] = {
    "force": lambda s, w, live: force(s.block or 0, [0, 1, 4]),
    "patch": lambda s, w, live: patch(str(s), source=live),
    "freeze": lambda s, w, live: freeze(str(s)),
}


def makers(model: HookedModel, block: int) -> dict[Site, list[Callable[[Live], Edit]]]:
    """Every site of a block, weights and activations, and the edits that are tried there."""
    card = model.sites.card(block)
    made: dict[Site, list[Callable[[Live], Edit]]] = {}
    for name in (*card.hooked, *(leaf.name for leaf in card.weights)):
        site, node = Site(block, name), card.node(name)
        if getattr(node, "read_only", ""):
            continue
        weight = name in card.leaves and card.leaves[name].kind == "weight"
        kinds = OF_WEIGHTS if weight else OF_EXPERTS if node.dtype == "int64" else OF_VALUES
        shape = weight_shape(card.leaves[name], model.dims) if weight else base().rows.shape(node, model.dims)
        made[site] = [lambda live, m=m, s=site, w=shape[-1]: m(s, w, live) for m in kinds.values()]  # type: ignore[misc]
    made[Site(block, "S")].append(lambda live: knock_out(block, T=3, S=1))
    return made


def pairs(model: HookedModel, live: Live, block: int, long: bool) -> Iterator[tuple[Edit, Edit]]:
    """Two edits for every pair of sites of a block, in turn of each kind; without ``--long`` a share of them."""
    draw = random.Random(block)
    for one, two in combinations(makers(model, block).values(), 2):
        kinds = draw.choice(one), draw.choice(two)
        if long or draw.randrange(SHARE) == 0:
            yield kinds[0](live), kinds[1](live)


def together(model: HookedModel, ask: Ask) -> None:
    """The sweep's cells equal runs; a pair that one refuses, the other refuses too."""
    refused = []
    for cell in ask.cells:
        try:
            model.run(TOKENS, KEEP, edits=[_of_a_run(model, edit, ask) for edit in cell.edits])
        except ProbeError as fact:
            refused.append((cell, type(fact)))
    for cell, kind in refused:
        assert refusal(model, Ask(ask.base, [cell], ask.sources)) is kind, cell.edits
    cells = [cell for cell in ask.cells if cell not in [other for other, _ in refused]]
    assert len(cells) > len(ask.cells) // 2
    agree(model, Ask(ask.base, cells, ask.sources, want=ask.want))


def refusal(model: HookedModel, ask: Ask) -> type[ProbeError] | None:
    """What a sweep of one cell says that it can't be."""
    try:
        return None if swept(model, ask)[1][0].unmatched is None else Unmatched
    except ProbeError as fact:
        return type(fact)


def _of_a_run(model: HookedModel, edit: Edit, ask: Ask) -> Edit:
    return edit if getattr(edit.how, "source", None) is None else patch(edit.tensor, source=SOURCES[id(model)])


SOURCES = {id(model): model.run(OTHER, KEEP, want=list(model.sites)) for model in SMALL.values()}


def weights_of(model: HookedModel, block: int) -> list[Site]:
    return [Site(block, leaf.name) for leaf in model.sites.card(block).weights]


both = pytest.mark.parametrize("kind", SMALL)
blocks = pytest.mark.parametrize("block", [0, 1])


@both
@blocks
def test_two_weights_of_a_block(kind: str, block: int) -> None:
    """The sweep takes its lean way, whose one step reads three routed weights."""
    model, live = SMALL[kind], Live(OTHER, KEEP)
    made = makers(model, block)
    cells = [
        Cell((made[one][i % len(made[one])](live), made[two][(i + 1) % len(made[two])](live)))
        for i, (one, two) in enumerate(combinations(weights_of(model, block), 2))
    ]
    assert len(cells) > 60
    together(model, Ask(base(), cells))


@both
def test_three_edits_of_routed_weights(kind: str) -> None:
    model = SMALL[kind]
    block = model.dims.moe.index(True)
    routed = [leaf.name for leaf in model.sites.card(block).weights if leaf.routed]
    every = tuple(scale(name, block, factor=2.0) for name in routed)
    some = tuple(scale(name, block, factor=3.0, e=[0, 2]) for name in routed)
    twice = (*some, *(zero(name, block, e=1) for name in routed))
    together(model, Ask(base(), [Cell(edits) for edits in (every, some, twice)]))


@both
@blocks
def test_every_pair_of_edits_of_a_block(kind: str, block: int, long: bool) -> None:
    """All in one sweep, which takes no lean way."""
    model, live = SMALL[kind], Live(OTHER, KEEP)
    cells = [Cell(edits) for edits in pairs(model, live, block, long)]
    assert len(cells) > 50
    together(model, Ask(base(), cells, [live]))


@both
@blocks
def test_a_weight_and_an_activation_alone(kind: str, block: int, long: bool) -> None:
    """One sweep a pair, so that each takes the leanest way that its own edits leave."""
    model, live = SMALL[kind], Live(OTHER, KEEP)
    draw, weights = random.Random(7), set(weights_of(model, block))
    made = makers(model, block)
    tried = [(one, two) for one, two in combinations(made, 2) if (one in weights or two in weights)]
    for one, two in tried if long else draw.sample(tried, 24):
        cell = Cell((draw.choice(made[one])(live), draw.choice(made[two])(live)))
        try:
            agree(model, Ask(base(), [cell], [live]))
        except BadEdit:  # which pairs are refused, and that both refuse them, is seen above
            continue
