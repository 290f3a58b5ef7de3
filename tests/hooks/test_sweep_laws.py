"""What a sweep must not do: cost where nothing changes, move what it can't reach, leave traces, fail late."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooks import (
    Cell,
    Dictionary,
    Edit,
    HookedModel,
    Live,
    Site,
    add,
    edit,
    exclude,
    force,
    freeze,
    knock_out,
    mean,
    noise,
    outlook,
    patch,
    project_out,
    resample,
    scale,
    set_to,
    splice,
    sweep,
    walk,
    zero,
)
from hooks.edits import PER_SLOT
from probe import TINY, ProbeError, load, random_weights
from probe.engine import compute
from probe.errors import BadEdit, BadText, OutOfRange, ShapeMismatch, UnknownDim, UnknownTensor
from probe.weights import weight_sites
from tests.hooks.small import close
from tests.hooks.test_sweep import KEEP, SHORT, TOKENS, base, draw, randn
from tests.hooks.twin import LOGITS, Ask, agree, one_by_one, swept

DIMS = SHORT["latent"]
MODELS = {
    "latent": HookedModel(random_weights(DIMS, 3)),
    "direct": HookedModel(random_weights(replace(DIMS, r_q=None, moe=(True, False), n_group=1), 4)),
}
MODEL = MODELS["latent"]

OTHER = draw(3, 7, 2)
both = pytest.mark.parametrize("kind", MODELS)


def dictionary(width: int) -> Dictionary:
    return Dictionary(randn(width, 9), randn(9), randn(9, width), randn(width))


def nothing(*_: Any) -> None:
    pass


# ---- what changes nothing --------------------------------------------------------------------------------------------


def spoil(value: Tensor) -> None:
    value.clone().zero_()


Place = dict[str, int]
NULL: dict[str, Callable[[str, Place, int, Live], Edit]] = {
    "patch": lambda s, place, w, live: patch(s, source=live),
    "patch at a place": lambda s, place, w, live: patch(s, source=live, **place),
    "freeze": lambda s, place, w, live: freeze(s),
    "scale": lambda s, place, w, live: scale(s, factor=1.0),
    "scale at a place": lambda s, place, w, live: scale(s, factor=1.0, **place),
    "add": lambda s, place, w, live: add(s, direction=randn(w), alpha=0.0),
    "noise": lambda s, place, w, live: noise(s, std=0.0, relative=True, seed=3),
    "function": lambda s, place, w, live: edit(s, spoil),
    "splice": lambda s, place, w, live: splice(s, dictionary=dictionary(w)),
    "resample": lambda s, place, w, live: resample(s, source=live, rows=range(3)),
}
LACKS = {"splice": ("S", "A"), "resample": PER_SLOT}
"""Tensors that a kind is refused at, beside ``experts`` for those that are not of values."""


@both
@pytest.mark.parametrize("null", NULL)
def test_edits_that_change_nothing_cost_nothing(null: str, kind: str) -> None:
    """At every tensor: no world is computed, and what is shown is the base's, bit for bit."""
    model, live = MODELS[kind], base()
    run = model.run(TOKENS, KEEP, want=list(model.sites))
    cells = []
    for site in model.sites:
        on_integers = site.tensor != "experts" or null in ("patch", "patch at a place", "freeze")
        if site.tensor != "delta_heads" and site.tensor not in LACKS.get(null, ()) and on_integers:
            place = {"T" if "T" in model.sites.node(site).shape else "S": 2}
            cells.append(Cell((NULL[null](str(site), place, run[site].shape[-1], live),)))
    assert len(cells) > 80
    whole = ["blocks.0.A", "blocks.1.x_next"]
    shown, outcomes = swept(model, Ask(live, cells, whole=whole, read=[[2, 6], [4], [0, 5]]))
    assert {(outcome.worlds, outcome.flips) for outcome in outcomes} == {(0, 0)}
    assert all(torch.equal(value, shown["base", 0, site]) for (_, _, site), value in shown.items())
    assert all(outcome.touched for outcome in outcomes)


def test_where_source_and_base_are_one_there_is_nothing_to_compute() -> None:
    """Before the first token that differs, and on the prompts that do not differ."""
    other = OTHER.clone()
    other[:, :3] = TOKENS[:, :3]
    other[1] = TOKENS[1]
    live = Live(other, KEEP)
    cells = [Cell((patch("x_n", 1, source=live, T=pos),)) for pos in range(5)]
    _, outcomes = swept(MODEL, Ask(base(), cells, [live]))
    assert [outcome.worlds for outcome in outcomes] == [0, 0, 0, 2, 2]


@both
def test_a_source_stops_after_what_is_taken_from_it(kind: str) -> None:
    """Alone, each tensor is all that is taken: what it is made of is there, and what is made of it isn't."""
    model = MODELS[kind]
    for site in (site for site in model.sites if site.tensor not in ("experts", "delta_heads")):
        live, other = base(), Live(OTHER, KEEP, edits=[scale("x_n", 0, factor=0.5, T=2)])
        agree(model, Ask(live, [Cell((patch(str(site), source=other),))], [other]))


def test_what_nobody_takes_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()

    def counted(row: Any, args: Any, *others: Any) -> Tensor:
        value = compute(row, args, *others)
        made[row.name] += value.shape[1]
        return value

    monkeypatch.setattr(walk, "compute", counted)
    other = Live(OTHER)
    swept(MODEL, Ask(Live(TOKENS), [Cell((patch("h", 0, source=other, T=6),))], [other], ["blocks.0.x_next"]))
    rows, cell = TOKENS.numel(), len(TOKENS)  # of the base, of a source of which nothing is shared; of the cell
    assert made["h"] == rows + rows
    assert made["delta_ffn"] == made["x_next"] == rows + cell


# ---- what moves, and what can't --------------------------------------------------------------------------------------


@both
def test_only_what_is_below_moves_and_nothing_before_the_position(kind: str) -> None:
    """An edit of each tensor at position 3, everything looked at: bit for bit."""
    model, sites = MODELS[kind], list(MODELS[kind].sites)
    edited = [site for site in sites if site.tensor not in ("experts", "delta_heads")]
    axes = {
        site: model.sites.node(site).shape.index("T" if "T" in model.sites.node(site).shape else "S") for site in sites
    }
    cells = [
        Cell((noise(str(site), std=1.0, seed=1, **{model.sites.node(site).shape[axes[site]]: 3}),)) for site in edited
    ]
    shown, outcomes = swept(model, Ask(Live(TOKENS), cells, want=(), whole=sites))
    assert all(outcome.worlds == 3 for outcome in outcomes)
    for i, start in enumerate(edited):
        below = {Site(start.block, name) for name in model.sites.card(start.block).descendants([start.tensor])}
        for site in sites:
            value, plain = shown["cell", i, site], shown["base", 0, site]
            assert torch.equal(value.narrow(axes[site], 0, 3), plain.narrow(axes[site], 0, 3)), (start, site)
            if site != start and site not in below and model.sites.depth(site) <= model.sites.depth(start):
                assert torch.equal(value, plain), (start, site)


def test_all_is_shown_once_the_base_first_and_stays_as_it_was() -> None:
    """No later edit reaches what has been shown; the same sweep again gives the same bits."""
    live = Live(OTHER, KEEP, read=[[0]] * 3)
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in range(2) for pos in (1, 3)]
    seen: list[tuple[Any, Site, Tensor, Tensor]] = []
    asked: dict[str, Any] = {"sources": [live], "whole": ["blocks.0.O", "blocks.1.A", "blocks.1.experts"]}
    first_base, second_base = base(), base()
    for start in (first_base, second_base):
        sweep(MODEL, start, cells, lambda *shown: seen.append((*shown, shown[2].clone())), **asked)
    assert all(torch.equal(value, copy) for _, _, value, copy in seen)
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(first, second, strict=True))
    for site in {site for _, site, _, _ in first}:
        who = [one for one, here, _, _ in first if here == site]
        assert who[:2] == [first_base, live]
        assert {id(one) for one in who[2:]} == {id(cell) for cell in cells}
        assert len(who) == 2 + len(cells)


def test_cells_do_not_know_of_each_other() -> None:
    """Alone or in company, in any order, in any number of batches."""
    live = Live(OTHER, KEEP)
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in range(2) for pos in range(5)]
    cells += [Cell((zero("O", 1, h=h),)) for h in range(3)] + [Cell((exclude(1, e=2),))]
    together, outcomes = swept(MODEL, Ask(base(), cells, [live]))
    back, reversed_ = swept(MODEL, Ask(base(), cells[::-1], [live], budget=60_000))
    assert reversed_ == outcomes[::-1]
    for i, cell in enumerate(cells):
        alone, (outcome,) = swept(MODEL, Ask(base(), [cell], [live]))
        assert outcome == outcomes[i]
        for other in (alone["cell", 0, LOGITS], back["cell", len(cells) - 1 - i, LOGITS]):
            close(together["cell", i, LOGITS], other)


# ---- no traces -------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


@pytest.mark.parametrize("error", [None, Stopped, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 5, 11])
def test_a_sweep_leaves_model_and_prompts_as_they_were(after: int, error: type[BaseException] | None) -> None:
    """Also one that stops in the middle: nothing is held, the next runs give the same bits."""
    live, plain = Live(OTHER, KEEP, read=[[0]] * 3), MODEL.run(TOKENS, KEEP)["logits"]
    cells = [Cell((patch("x_n", block, source=live, T=3), scale("W_O", 0, factor=0.5))) for block in range(2)]
    start = base()
    before, _ = swept(MODEL, Ask(start, cells, [live]))
    seen: list[weakref.ref[Tensor]] = []

    def look(who: Any, site: Site, value: Tensor) -> None:
        seen.append(weakref.ref(value))
        if error is not None and len(seen) > after:
            raise error

    asked: dict[str, Any] = {"sources": [live], "want": ["logits", "blocks.0.O", "blocks.1.g_s"]}
    if error is None:
        sweep(MODEL, start, cells, look, **asked)
    else:
        with pytest.raises(error):
            sweep(MODEL, start, cells, look, **asked)
        assert len(seen) == after + 1
    gc.collect()
    assert all(ref() is None for ref in seen)
    assert torch.equal(MODEL.run(TOKENS, KEEP)["logits"], plain)
    again, _ = swept(MODEL, Ask(start, cells, [live]))
    assert all(torch.equal(again[key], value) for key, value in before.items())


def test_prompts_that_run_along_lend_nothing_outside_a_sweep() -> None:
    live = Live(OTHER, KEEP)
    for _ in range(2):
        with pytest.raises(BadEdit, match="in a sweep"):
            MODEL.run(TOKENS, KEEP, edits=[patch("x_n", 1, source=live)])
        swept(MODEL, Ask(base(), [], [live]))
        outlook(MODEL, base(), [], sources=[live])


def test_tick_counts_up_to_its_end() -> None:
    ticks: list[tuple[int, int]] = []
    sweep(MODEL, base(), [Cell(())], nothing, tick=lambda *now: ticks.append(now))
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)]  # embedding, two blocks, head
    ticks.clear()
    sweep(MODEL, base(), [Cell(())], nothing, want=["blocks.0.O"], tick=lambda *now: ticks.append(now))
    assert ticks == [(1, 2), (2, 2)]


# ---- weights ---------------------------------------------------------------------------------------------------------


class Counting:
    """Weights that are not in memory, and note what is read of them."""

    resident = False

    def __init__(self) -> None:
        self.weights, self.dims = random_weights(DIMS, 3), DIMS
        self.reads: Counter[tuple[int | None, str]] = Counter()
        self.rows: dict[tuple[int | None, str], set[int]] = {}

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        self.reads[block, name] += 1
        if experts is not None:
            self.rows.setdefault((block, name), set()).update(experts)
        return self.weights.read(block, name, experts)


@pytest.mark.parametrize("budget", [1, 1 << 30])
@pytest.mark.parametrize("watched", [False, True])
def test_each_weight_is_read_once_and_of_experts_those_chosen(watched: bool, budget: int) -> None:
    weights = Counting()
    model, live = HookedModel(weights), Live(OTHER[:1, :3])
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in range(2) for pos in range(3)]
    ask = Ask(Live(TOKENS[:1, :3]), cells, [live], whole=["blocks.1.y_e"] if watched else (), budget=budget)
    weights.reads.clear()
    _, outcomes = swept(model, ask)
    computed = [
        run for run, outcome in zip(one_by_one(MODEL, ask).runs, outcomes, strict=True) if outcome.worlds and run
    ]
    computed += [MODEL.run(tokens[:1, :3], want="*experts") for tokens in (TOKENS, OTHER)]
    chosen = set(torch.cat([run["experts", 1].flatten() for run in computed]).tolist())
    for block, leaf in weight_sites(DIMS):
        key = block, leaf.name
        if leaf.routed:  # of them each batch reads those of its own
            assert weights.reads[key] <= (1 if budget > 1 else len(cells))
            assert weights.rows[key] <= chosen
            assert len(weights.rows[key]) < DIMS.e
        elif leaf.name != "w_final":  # which says where the model is
            assert weights.reads[key] == 1, key


@pytest.mark.parametrize("keeping", ["stored", "disk"])
def test_a_checkpoint_that_is_not_in_memory(keeping: Any) -> None:
    tokens, other = (torch.randint(0, 100, (2, 6), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    shown = []
    for keep in ("expanded", keeping):
        model, live = HookedModel(load(TINY, torch.float32, keep=keep)), Live(other)
        cells = [Cell((patch(name, block, source=live, T=3),)) for block in range(4) for name in ("x_n", "O")]
        cells += [Cell((zero("delta_experts", 2, e=range(4)),)), Cell((scale("W_1_e", 2, factor=0.5, e=1),))]
        shown.append(swept(model, Ask(Live(tokens), cells, [live]))[0])
    for key, value in shown[0].items():
        close(shown[1][key], value)


# ---- precision -------------------------------------------------------------------------------------------------------


def precise(live: Live) -> list[Cell]:
    cells = [
        Cell((patch(name, block, source=live, T=3),)) for block in range(2) for name in ("x_n", "O", "delta_ffn", "Q")
    ]
    return [
        *cells,
        Cell((zero("A", 1, h=1, S=2),)),
        Cell((zero("x_n", 1, T=2, into="x_mid"),)),
        Cell((zero("W_UK", 0),)),
    ]


def test_careful_numerics_are_the_same_in_fp32() -> None:
    live = Live(OTHER, KEEP)
    careful = HookedModel(MODEL.decoder.weights, numerics="careful")
    for whole in ((), ["blocks.1.x_next", "blocks.1.A"]):
        agree(careful, Ask(base(), precise(live), [live], whole=whole))


@pytest.mark.parametrize("numerics", ["careful", "reference"])
def test_bf16_to_its_rounding(numerics: Any) -> None:
    """No choice of experts hangs on a rounding here, so a sweep and its twin differ by roundings alone: some 2⁻⁸ of
    the largest value after each of the products that stand one above the other."""
    low = HookedModel(random_weights(DIMS, 3, dtype=torch.bfloat16), numerics=numerics)
    live = Live(OTHER, KEEP)
    agree(low, Ask(base(), precise(live), [live], want=["logits", "blocks.0.x_mid"]), tolerance=0.03)


# ---- what it would take ----------------------------------------------------------------------------------------------


def test_an_outlook_computes_nothing_and_bounds_what_runs() -> None:
    weights = Counting()
    model, live = HookedModel(weights), Live(OTHER)
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in range(2) for pos in range(7)]
    weights.reads.clear()
    ahead = outlook(model, Live(TOKENS), cells, sources=[live])
    assert set(weights.reads) <= {(None, "w_final")}
    # base and source once each; a cell of block b and position p has 7 - p of 7 positions in 2 - b of 2 blocks
    shares = [(7 - pos) / 7 * (2 - block) / 2 for block in range(2) for pos in range(7)]
    assert ahead.forwards == pytest.approx(2 + sum(shares))
    roots = outlook(model, Live(TOKENS), cells[:1], sources=[live]).bytes
    many = outlook(model, Live(TOKENS), cells * 40, sources=[live])
    small = outlook(model, Live(TOKENS), cells * 40, sources=[live], budget=4 * roots)
    assert roots < small.bytes < many.bytes / 2  # the residual stream of all cells waits, whatever the budget
    assert small.forwards == many.forwards
    with pytest.raises(OutOfRange, match="99"):
        outlook(model, Live(TOKENS), [Cell((zero("O", 1, T=99),))])


# ---- what cannot be asked --------------------------------------------------------------------------------------------

OTHERS = HookedModel(random_weights(replace(DIMS, d=32), 1))
SHORT = MODEL.run(draw(4, 3, 5), want=list(MODEL.sites))
LIVE = Live(OTHER, KEEP)
ADDS = patch("delta_experts", 1, source=MODEL.run(OTHER, KEEP, want=["*delta_experts", "*.experts"]))
ADDED = Live(TOKENS, KEEP, edits=[ADDS])
STREAM = randn(3, 7, 40)


def last(*edits: Edit, **kwargs: Any) -> dict[str, Any]:
    """Two cells, of which this is the last."""
    return {"cells": [Cell((zero("O", 0),)), Cell(edits, **kwargs)]}


def alone(first: int = 0, x_n: Tensor = STREAM, **kwargs: Any) -> dict[str, Any]:
    """A walk that starts in a block."""
    return {"base": Live(None, x_n=x_n), "first": first, "sources": [], **kwargs}


def from_base(*edits: Edit) -> dict[str, Any]:
    return {"base": Live(TOKENS, KEEP, edits=edits)}


Bad = tuple[type[ProbeError], str, dict[str, Any]]
BAD: dict[str, Bad] = {
    # places
    "a position": (OutOfRange, "99", last(zero("O", 1, T=99))),
    "a position of a short row": (OutOfRange, "row 1", last(zero("O", 1, T=5))),
    "a key": (OutOfRange, "7 does not exist", last(zero("V", 1, S=7))),
    "a block": (OutOfRange, "block 2", last(zero("O", 2))),
    "a head": (OutOfRange, "3 does not exist", last(zero("O", 1, h=3))),
    "a row": (OutOfRange, "3 does not exist", last(zero("O", 1, B=3))),
    "a latent": (OutOfRange, "9 does not exist", last(zero("x_n", 1, through=dictionary(40), feature=9))),
    "a tensor": (UnknownTensor, "c_KV", last(zero("c_kv", 1))),
    "a dim": (UnknownDim, "no dim", last(zero("O", 1, f=3))),
    "a span": (BadEdit, "no span", last(zero("O", 1, T="subject"))),
    "a reader": (BadEdit, "does not read", last(zero("x_n", 1, into="k_C"))),
    "what is read only": (BadEdit, "edit `O`", last(zero("delta_heads", 1))),
    # values
    "a direction's width": (ShapeMismatch, "direction", last(add("O", 1, direction=randn(9)))),
    "a value's width": (ShapeMismatch, "value", last(set_to("O", 1, value=randn(9)))),
    "a subspace's width": (ShapeMismatch, "wide", last(zero("O", 1, within=randn(2, 9)))),
    "a projection's width": (ShapeMismatch, "wide", last(project_out("O", 1, span=randn(2, 9)))),
    "a dictionary's width": (ShapeMismatch, "dictionary", last(splice("O", 1, dictionary=dictionary(12)))),
    "a latents' direction": (
        ShapeMismatch,
        "direction",
        last(add("x_n", 1, through=dictionary(40), direction=randn(8))),
    ),
    "an expert to force": (OutOfRange, "experts are", last(force(1, experts=[0, 1, 8]))),
    "too few to force": (BadEdit, "3 experts", last(force(1, experts=[0, 1]))),
    "experts set twice": (BadEdit, "twice", last(set_to("experts", 1, value=torch.tensor([1, 1, 2])))),
    "too many excluded": (BadEdit, "left to choose", last(exclude(1, e=range(6)))),
    "no key left": (BadEdit, "no key left", last(knock_out(1, S=0))),
    "slots of contributions": (BadEdit, "by expert", last(patch("delta_experts", 1, source=LIVE, k=0))),
    # sources
    "a mean that rotation forbids": (BadEdit, "belongs to its position", last(mean("Q", 1, source=SHORT, over="all"))),
    "a mean beyond its reference": (BadEdit, "longest reference", last(mean("O", 1, source=SHORT, over="position"))),
    "a draw beyond its reference": (BadEdit, "no reference prompt", last(resample("O", 1, source=SHORT))),
    "a source of other rows": (BadEdit, "say which by rows=", last(patch("O", 1, source=SHORT, T=0))),
    "a source beyond its last": (BadEdit, "nothing lies beyond", last(patch("O", 1, source=SHORT, rows=[0, 1, 2]))),
    "a rotated source": (BadEdit, "rotate=", last(patch("Q", 1, source=LIVE, T=2, source_T=1))),
    "a source of other sizes": (BadEdit, "d = 32", last(mean("x_n", 1, source=OTHERS.run(TOKENS, want=None)))),
    "a source without the tensor": (UnknownTensor, "not cached", last(mean("V", 1, source=MODEL.run(TOKENS)))),
    "a source that doesn't run along": (BadEdit, "among", last(patch("O", 1, source=Live(OTHER, KEEP)))),
    "a source with added experts": (
        BadEdit,
        "added experts",
        {"sources": [ADDED], **last(patch("delta_experts", 1, source=ADDED))},
    ),
    "a weight from a run": (BadEdit, "comes from weights", last(patch("W_O", 1, source=SHORT))),
    "a tensor from weights": (BadEdit, "comes from a run", last(patch("O", 1, source=MODEL.decoder.weights))),
    "a weight of another shape": (ShapeMismatch, "W_O", last(patch("W_O", 1, source=OTHERS.decoder.weights))),
    "a weight's mean": (BadEdit, "weight has no readers", last(mean("W_O", 1, source=SHORT))),
    # edits together
    "two that overlap": (BadEdit, "overlap", last(zero("O", 1, h=1), patch("O", 1, source=LIVE, T=2))),
    "two weights that overlap": (BadEdit, "overlap", last(zero("W_O", 1, h=1), set_to("W_O", 1, value=1.0))),
    "one cut off": (BadEdit, "would do nothing", last(zero("O", 1), freeze("x_mid"))),
    # what is looked at
    "a read of other prompts": (BadEdit, "2 prompts", {"read": [[0], [1]]}),
    "a read beyond": (OutOfRange, "prompt 1", {"read": [[0], [5], [0]]}),
    "a read from behind": (OutOfRange, "prompt 0", {"read": [[-1], [0], [0]]}),
    "a read of nothing": (OutOfRange, "prompt 2", {"read": [[0], [0], []]}),
    "a cell's read": (OutOfRange, "prompt 1", last(zero("O", 1), read=[[0], [5], [0]])),
    "a source's read": (OutOfRange, "prompt 1", {"sources": [Live(OTHER, KEEP, read=[[0], [6], [0]])]}),
    "the base's own read": (BadEdit, "give it read=", {"base": Live(TOKENS, KEEP, read=[[0]] * 3)}),
    "an unknown want": (UnknownTensor, "c_KV", {"want": ["blocks.0.c_kv"]}),
    "a want without a block": (UnknownTensor, "say which", {"want": ["O"]}),
    "pairs at positions": (BadEdit, "look at it whole", {"want": ["blocks.0.S"]}),
    "an unknown whole": (UnknownTensor, "c_KV", {"whole": ["blocks.0.c_kv"]}),
    "a cell's whole": (OutOfRange, "block 5", last(zero("O", 1), whole=("blocks.5.O",))),
    # base, sources, starts
    "a frozen base": (BadEdit, "nothing to be frozen", from_base(freeze("O", 1))),
    "a base of other weights": (BadEdit, "edited weights", from_base(zero("W_O", 1))),
    "a base from what runs along": (BadEdit, "not from what runs along", from_base(patch("O", 1, source=LIVE))),
    "a base's bad edit": (OutOfRange, "99", from_base(zero("O", 1, T=99))),
    "a source twice": (BadEdit, "named twice", {"sources": [LIVE, LIVE]}),
    "a token": (BadText, "99", {"base": Live(torch.full((1, 3), 99))}),
    "floats for tokens": (ShapeMismatch, "integers", {"base": Live(torch.ones(1, 3))}),
    "a mask of another shape": (ShapeMismatch, "the mask", {"base": Live(TOKENS, KEEP[:2])}),
    "a row of pads": (BadText, "no real token", {"base": Live(TOKENS, KEEP & torch.tensor([[1], [1], [0]]).bool())}),
    "a source's token": (BadText, "99", {"sources": [Live(torch.full((1, 3), 99))]}),
    "a start without a stream": (BadEdit, "x_n: give that", {"first": 0}),
    "a start without tokens": (BadEdit, "starts from tokens", alone(-1)),
    "a start beyond": (OutOfRange, "block 2", alone(2)),
    "a start before all": (OutOfRange, "block -2", alone(-2)),
    "a stream's width": (ShapeMismatch, "d = 40", alone(x_n=STREAM[..., :9])),
    "a stream's dtype": (ShapeMismatch, "float64", alone(x_n=STREAM.double())),
    "a want before the start": (BadEdit, "never made", alone(1, want=["blocks.0.O"])),
    "an edit before the start": (BadEdit, "never made", alone(1, **last(zero("O", 0)))),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_asked_is_told_before_anything_runs(what: str) -> None:
    error, message, given = BAD[what]
    weights = Counting()
    model = HookedModel(weights)
    weights.reads.clear()
    asked: dict[str, Any] = {"base": base(), "cells": [], "sources": [LIVE], **given}
    first, some = asked.pop("base"), asked.pop("cells")
    with pytest.raises(error, match=message):
        sweep(model, first, some, lambda *_: pytest.fail("something ran"), **asked)
    assert set(weights.reads) <= {(None, "w_final"), (0, "w_attn"), (1, "w_attn")}  # device and dtype


@pytest.mark.parametrize(
    "make",
    [
        lambda: Live(None),
        lambda: Live(TOKENS[0]),
        lambda: Live(None, x_n=STREAM[0]),
        lambda: Live(TOKENS, KEEP.flip(-1)),
        lambda: Live(TOKENS, spoken=[8, 1, 1]),
        lambda: Live(TOKENS, spans=[{}]),
    ],
    ids=["nothing", "one row", "one row's stream", "left pads", "too much spoken", "too few spans"],
)
def test_prompts_that_cannot_run_along(make: Callable[[], Live]) -> None:
    with pytest.raises(ProbeError):
        make()


# ---- any cells at all ------------------------------------------------------------------------------------------------

LONG = 6
WIDER = {
    name: HookedModel(random_weights(dims, 8))
    for name, dims in {
        "latent": replace(DIMS, moe=(False, True, True)),
        "direct": replace(DIMS, r_q=None, moe=(True, False, True), n_group=1, h=2),
    }.items()
}
REFERENCE = {name: model.run(draw(30, LONG, 9), want=list(model.sites)) for name, model in WIDER.items()}

Where = dict[str, Any]
ANY: dict[str, Callable[[str, Where, int, int, str, Live], Edit]] = {
    "zero": lambda s, where, w, seed, kind, live: zero(s, **where),
    "patch": lambda s, where, w, seed, kind, live: patch(s, source=live, **where),
    "patch from a run": lambda s, where, w, seed, kind, live: patch(
        s, source=REFERENCE[kind], rows=[seed, 3, 4], **where
    ),
    "mean": lambda s, where, w, seed, kind, live: mean(s, source=REFERENCE[kind], **where),
    "mean by position": lambda s, where, w, seed, kind, live: mean(s, source=live, over="position", **where),
    "resample": lambda s, where, w, seed, kind, live: resample(s, source=REFERENCE[kind], seed=seed, **where),
    "noise": lambda s, where, w, seed, kind, live: noise(s, std=0.5, relative=seed > 4, seed=seed, **where),
    "add": lambda s, where, w, seed, kind, live: add(s, direction=randn(w, seed=seed), **where),
    "scale": lambda s, where, w, seed, kind, live: scale(s, factor=0.5, **where),
    "project": lambda s, where, w, seed, kind, live: project_out(s, span=randn(2, w, seed=seed), **where),
    "function": lambda s, where, w, seed, kind, live: edit(s, halve, **where),
    "freeze": lambda s, where, w, seed, kind, live: freeze(s, **{k: v for k, v in where.items() if k in "TS"}),
}


def halve(value: Tensor) -> Tensor:
    return value / 2


@st.composite
def _edits(draw_: st.DrawFn, kind: str, live: Live, shortest: int, hows: Sequence[str] = tuple(ANY)) -> Edit:
    model = WIDER[kind]
    none = {"delta_heads"} if "freeze" in hows else {"delta_heads", "experts"}
    site = draw_(st.sampled_from([s for s in model.sites if s.tensor not in none]))
    node = model.sites.node(site)
    how = draw_(st.sampled_from(hows if site.tensor != "experts" else ["patch", "freeze"]))
    where: Where = {}
    place = st.integers(-shortest, shortest - 1)
    if draw_(st.integers(0, 3)):
        where["T" if "T" in node.shape else "S"] = draw_(st.one_of(place, st.lists(place, min_size=1, max_size=3)))
    if "h" in node.shape and draw_(st.booleans()):
        where["h"] = draw_(st.integers(0, model.dims.h - 1))
    if "k" in node.shape and site.tensor != "experts" and draw_(st.booleans()):
        where["e"] = draw_(st.integers(0, model.dims.e - 1))
    readers = [step.name for step in model.sites.card(site.block).readers(site.tensor)]
    if readers and how != "freeze" and site.tensor != "experts" and not draw_(st.integers(0, 2)):
        where["into"] = draw_(st.lists(st.sampled_from(readers), min_size=1, max_size=2, unique=True))
    width = REFERENCE[kind][site].shape[-1]
    return ANY[how](str(site), where, width, draw_(st.integers(0, 9)), kind, live)


@st.composite
def _asks(draw_: st.DrawFn) -> tuple[str, Ask]:
    kind = draw_(st.sampled_from(sorted(WIDER)))
    lengths = draw_(st.lists(st.integers(3, LONG), min_size=3, max_size=3))
    keep = torch.arange(LONG)[None, :] < torch.tensor(lengths)[:, None]
    tokens, other, shared = draw(3, LONG, 1), draw(3, LONG, draw_(st.integers(2, 9))), draw_(st.integers(0, LONG))
    other[:, :shared] = tokens[:, :shared]
    alone = ("zero", "noise", "add", "scale", "function")
    of_roots = [draw_(st.lists(_edits(kind, LIVE, min(lengths), alone), max_size=1)) for _ in range(2)]
    live = Live(other, keep, edits=of_roots[0], read=draw_(st.sampled_from([None, [[2], [0, 1], [1]]])))
    made = draw_(st.lists(st.lists(_edits(kind, live, min(lengths)), min_size=1, max_size=3), min_size=1, max_size=5))
    sites = [str(site) for site in WIDER[kind].sites]
    at_reads = [site for site in sites if site.rsplit(".")[-1] not in ("S", "A", "logits")]
    return kind, Ask(
        Live(tokens, keep, edits=of_roots[1]),
        [Cell(tuple(edits)) for edits in made],
        [live],
        ["logits", *draw_(st.lists(st.sampled_from(at_reads), max_size=2, unique=True))],
        draw_(st.lists(st.sampled_from(sites), max_size=2, unique=True)),
        [draw_(st.lists(st.integers(0, n - 1), min_size=1, max_size=3)) for n in lengths],
        budget=draw_(st.sampled_from([1, 30_000, 1 << 30])),
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(_asks())
def test_any_cells_equal_their_runs(drawn: tuple[str, Ask]) -> None:
    """What a run refuses, a sweep refuses too; of all else, both show the same."""
    kind, ask = drawn
    kept = []
    for cell in ask.cells:
        one = replace(ask, cells=[cell])
        try:
            one_by_one(WIDER[kind], one)
        except ProbeError as why:
            if not ask.base.edits:  # over those a cell may do more than a run
                with pytest.raises(type(why)):
                    swept(WIDER[kind], one)
        else:
            kept.append(cell)
    ask = replace(ask, cells=kept)
    try:
        agree(WIDER[kind], ask)
    except (AssertionError, ProbeError):
        assume(not _on_the_edge(WIDER[kind], ask))
        raise


def _on_the_edge(model: HookedModel, ask: Ask) -> bool:
    """Whether some choice of experts hangs on a rounding."""
    scores = [f"blocks.{block}.choice_score" for block, moe in enumerate(model.dims.moe) if moe]
    shown = one_by_one(model, replace(ask, want=(), whole=scores)).shown
    return min(float(value.sort(-1).values.diff(dim=-1).min()) for value in shown.values()) < 1e-6
