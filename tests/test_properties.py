"""Laws on inputs that vary: random sizes, wide weights with 32 experts, random edits at random places, padded rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooks import (
    Dictionary,
    Edit,
    HookedModel,
    Run,
    Site,
    add,
    edit,
    freeze,
    mean,
    noise,
    patch,
    project_out,
    resample,
    scale,
    set_to,
    splice,
    zero,
)
from hooks.edits import PER_SLOT, SCORES
from hooks.where import indices, where_of
from probe import Dims, random_weights
from probe.card import Leaf, Step, letters
from probe.dims import DIMS, Yarn
from probe.errors import BadEdit, OutOfRange, ProbeError, Unmatched
from tests.oracle import by_expert, padding

B, LONG = 3, 7


def examples(n: int) -> settings:
    """So many; drawing one may build a model, which hypothesis would call slow."""
    return settings(max_examples=n, suppress_health_check=[HealthCheck.too_slow])


YARN = Yarn(factor=4.0, original=16, beta_fast=4.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=1.3)


SIZES = Dims(
    d=32, r_q=20, r_kv=12, h=2, n=6, r=4, v=10, f=24, e=32, k=4, m=16, m_s=8, V=40, moe=(False, True), eps=1e-5,
    scaling=2.5, norm_topk=True, n_group=1, topk_group=1, theta=1e3, yarn=None,
)  # fmt: skip


@st.composite
def _sizes(draw: st.DrawFn) -> Dims:
    """Small and wide: 32 experts of which a token takes 4, in one group or four."""
    groups = draw(st.sampled_from([1, 4]))
    r_q, yarn = draw(st.sampled_from([None, 20])), draw(st.sampled_from([None, YARN]))
    d, h, moe = draw(st.sampled_from([(32, 2, (False, True)), (30, 3, (True, True)), (40, 1, (True, False, True))]))
    return replace(
        SIZES, d=d, h=h, r_q=r_q, moe=moe, yarn=yarn, n_group=groups, topk_group=draw(st.integers(1, groups)),
        norm_topk=draw(st.booleans()), tied=draw(st.booleans()),
    )  # fmt: skip


@cache
def model_of(dims: Dims) -> HookedModel:
    return HookedModel(random_weights(dims, 5))


def tokens_of(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


class Setting:
    """A model, tokens of rows that may be of unequal length, and a run of them that holds everything."""

    def __init__(self, dims: Dims, lengths: list[int], side: str, seed: int) -> None:
        self.dims, self.lengths, self.side, self.seed = dims, lengths, side, seed
        self.model = model_of(dims)
        self.sites = list(self.model.sites)
        self.tokens = tokens_of(len(lengths), max(lengths), seed)
        self.keep = padding(lengths, side) if len(set(lengths)) > 1 else None

    def __repr__(self) -> str:
        return f"Setting({self.dims}, {self.lengths}, {self.side!r}, {self.seed})"

    def run(self, *edits: Edit, **kwargs: Any) -> Run:
        return self.model.run(self.tokens, self.keep, edits=edits, **{"want": self.sites, **kwargs})

    @property
    def real(self) -> Tensor:
        """[B T], true at real tokens."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.keep is None else self.keep

    def no_near_tie(self, run: Run) -> None:
        """Rounding may not decide the routes: two products of other shapes differ by some 1e-7."""
        for block, moe in enumerate(self.dims.moe):
            if moe:
                score = run["choice_score", block][self.real]
                ranked = score.sort(-1).values.diff(dim=-1)
                assume(float(ranked.min()) > 1e-6)


@st.composite
def _settings(draw: st.DrawFn, unequal: bool = True) -> Setting:
    some = st.lists(st.integers(3, LONG), min_size=B, max_size=B) if unequal else st.just([LONG] * B)
    side = draw(st.sampled_from(["left", "right"]))
    return Setting(draw(_sizes()), draw(some), side, draw(st.integers(0, 99)))


def _numbers(size: int) -> st.SearchStrategy[Any]:
    """An int, several, or a slice, all within bounds."""
    one = st.integers(-size, size - 1)
    piece = st.integers(0, size - 1).flatmap(lambda i: st.integers(i + 1, size).map(lambda j: slice(i, j)))
    return st.one_of(one, st.lists(one, min_size=1, max_size=3), piece)


@st.composite
def _where(draw: st.DrawFn, it: Setting, site: Site, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Some dims of a tensor, each with a place; positions that every row has."""
    node = it.model.sites.node(site)
    dims = [p for axis in node.shape for p in letters(axis) if p not in ("1", *without)]
    dims += ["e"] if "k" in node.shape and "e" not in without else []
    chosen = draw(st.lists(st.sampled_from(dims), unique=True, max_size=2)) if dims else []
    sizes = {"B": len(it.lengths), "T": min(it.lengths), "S": min(it.lengths)}
    return {dim: draw(_numbers(sizes.get(dim) or it.dims.size(dim))) for dim in chosen}


def width(it: Setting, site: Site) -> int:
    last = it.model.sites.node(site).shape[-1]
    return {"S": max(it.lengths), "1": 1}.get(last) or it.dims.size(last)


def randn(*shape: int, seed: int = 6) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def reference(dims: Dims) -> Run:
    """Rows as long as any, enough that most experts are chosen by some token."""
    return model_of(dims).run(tokens_of(40, LONG, 7), want=list(model_of(dims).sites))


def close(ours: Tensor, theirs: Tensor, at: Any = "") -> None:
    """Equal to the tolerance of the laws."""
    assert ours.shape == theirs.shape, at
    limit = 2e-5 * max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0)
    assert not theirs.numel() or float((ours - theirs).abs().max()) <= limit, at


# ---- 1: null edits are null ------------------------------------------------------------------------------------------


def untouched(width: int) -> Dictionary:
    return Dictionary(randn(width, 9), randn(9, seed=1), randn(9, width, seed=2), randn(width, seed=3))


def spoil(value: Tensor) -> None:
    value.zero_()


NULL: dict[str, Callable[[str, Run, int, dict[str, Any]], Edit]] = {
    "set": lambda s, base, width, where: set_to(s, value=base[s], **where),
    "patch": lambda s, base, width, where: patch(s, source=base, **where),
    "freeze": lambda s, base, width, where: freeze(s, **where),
    "resample": lambda s, base, width, where: resample(s, source=base, rows=range(B), **where),
    "scale": lambda s, base, width, where: scale(s, factor=1.0, **where),
    "add": lambda s, base, width, where: add(s, direction=randn(width), alpha=0.0, **where),
    "noise": lambda s, base, width, where: noise(s, std=0.0, relative=True, seed=3, **where),
    "function": lambda s, base, width, where: edit(s, lambda value: None, **where),
    "in place": lambda s, base, width, where: edit(s, spoil, **where),
    "splice": lambda s, base, width, where: splice(s, dictionary=untouched(width), **where),
}
INTEGERS = ("set", "patch", "freeze")


@examples(40)
@given(st.data())
def test_null_edits_are_null(data: st.DataObject) -> None:
    it = data.draw(_settings())
    site = data.draw(st.sampled_from([s for s in it.sites if s.tensor != "delta_heads"]))
    no = {"resample"} if site.tensor in PER_SLOT else {"splice"} if site.tensor in SCORES else set()
    kinds = INTEGERS if site.tensor == "experts" else [kind for kind in NULL if kind not in no]
    kind = data.draw(st.sampled_from(kinds))
    taken = site.tensor == "delta_experts" and kind in ("patch", "resample", "freeze")
    without = ("k", "d") if taken else ("k", "e") if site.tensor == "experts" else ()
    where = data.draw(_where(it, site, without))
    base = it.run()
    null = NULL[kind](str(site), base, width(it, site), where)
    for made in (it.run(null), it.run(null, base=base)):
        for other in it.sites:
            assert torch.equal(made[other], base[other]), f"{null}: {other}"
    assert (made.flips or 0) == 0


# ---- 2, 3: partial equals whole, and nothing before the edited position moves ----------------------------------------

EDITS: dict[str, Callable[[str, Setting, int, dict[str, Any]], Edit]] = {
    "zero": lambda s, it, width, at: zero(s, **at),
    "zero within": lambda s, it, width, at: zero(s, within=randn(2, width), **at),
    "set": lambda s, it, width, at: set_to(s, value=0.5, **at),
    "scale": lambda s, it, width, at: scale(s, factor=-0.5, **at),
    "add": lambda s, it, width, at: add(s, direction=randn(width), alpha=2.0, **at),
    "noise": lambda s, it, width, at: noise(s, std=1.0, relative=True, seed=8, **at),
    "project out": lambda s, it, width, at: project_out(s, span=randn(3, width), **at),
    "mean": lambda s, it, width, at: mean(s, source=reference(it.dims), **at),
    "mean by position": lambda s, it, width, at: mean(s, source=reference(it.dims), over="position", **at),
    "resample": lambda s, it, width, at: resample(s, source=reference(it.dims), seed=9, **at),
    "patch": lambda s, it, width, at: patch(s, source=reference(it.dims), rows=[5, 1, 3], **at),
    "function": lambda s, it, width, at: edit(s, torch.sin, **at),
}
SUBSPACE = ("zero within", "project out")
"""The last axis of scores and patterns is positions: no subspaces there."""


@st.composite
def _edited(draw: st.DrawFn, it: Setting, at: dict[str, Any] | None = None) -> tuple[Site, Edit]:
    """A random edit at a random site and place (at least ``at``), now and then for some readers only."""
    site = draw(st.sampled_from([s for s in it.sites if s.tensor not in ("delta_heads", "experts")]))
    node = it.model.sites.node(site)
    no = {*SUBSPACE} if site.tensor in SCORES else {"patch"} if site.tensor in PER_SLOT else set()
    kind = draw(st.sampled_from([k for k in EDITS if k not in no]))
    whole = site.tensor == "delta_experts" and kind in ("patch", "resample")
    where = draw(_where(it, site, ("k", "d") if whole else ()))
    if at is not None:
        where |= {"T" if "T" in node.shape else "S": at["T"]}
    made = EDITS[kind](str(site), it, width(it, site), where)
    readers = [step.name for step in it.model.sites.card(site.block).readers(site.tensor)]
    if readers and draw(st.integers(0, 3)) == 0:
        made = Edit(made.tensor, made.block, made.how, made.where, (draw(st.sampled_from(readers)),), made.within)
    return site, made


def runs(it: Setting, made: Edit, **kwargs: Any) -> Run:
    """The edited run; where the reference has no token of an expert, another example is drawn."""
    try:
        return it.run(made, **kwargs)
    except Unmatched:
        assume(False)
        raise


@examples(50)
@given(st.data())
def test_partial_equals_whole(data: st.DataObject) -> None:
    it = data.draw(_settings())
    _, made = data.draw(_edited(it))
    whole = runs(it, made)
    spine = it.run(want="logits")  # what a base always holds: the stream between blocks, and the choices
    some = it.run(want=data.draw(st.lists(st.sampled_from(it.sites), min_size=1, max_size=12)))
    for base in (it.run(), spine, some):
        part = it.run(made, base=base)
        assert part.touched == whole.touched
        for site in it.sites:
            assert torch.equal(part[site], whole[site]), f"{made}: {site}"


@examples(40)
@given(st.data())
def test_nothing_before_the_edited_position_moves(data: st.DataObject) -> None:
    it = data.draw(_settings())
    first = data.draw(st.integers(1, min(it.lengths) - 1))
    places = data.draw(st.sampled_from([first, slice(first, None), [first, min(it.lengths) - 1]]))
    site, made = data.draw(_edited(it, {"T": places}))
    base, run = it.run(), runs(it, made)
    it.no_near_tie(base)
    for other in it.sites:
        shape = it.model.sites.node(other).shape
        for b, length in enumerate(it.lengths):
            start = max(it.lengths) - length if it.side == "left" else 0
            was, now = (value[other][b] for value in (base, run))
            for axis, dim in enumerate(shape[1:]):
                if dim in ("T", "S"):
                    was, now = (value.narrow(axis, start, first) for value in (was, now))
            if other.tensor == "delta_experts":  # experts that only the source chose stand behind the k slots
                now = now[:, : it.dims.k]
            close(now, was, f"{made}: {other}")
    here = base[site] if site.tensor != "delta_experts" else base[site].sum(2)
    there = run[site] if site.tensor != "delta_experts" else run[site].sum(2)
    moved = not torch.equal(here, there)
    assert not moved or run.touched != (0,), "what moved was touched"


# ---- 6: a batch is its rows ------------------------------------------------------------------------------------------

ALIKE: list[Callable[[str, int, dict[str, Any]], Edit]] = [
    lambda s, width, at: zero(s, **at),
    lambda s, width, at: scale(s, factor=-0.5, **at),
    lambda s, width, at: add(s, direction=randn(width), **at),
    lambda s, width, at: edit(s, torch.cos, **at),
]
"""Edits that mean the same of a row, whatever stands beside it."""


@examples(30)
@given(st.data())
def test_padded_rows_are_rows_alone(data: st.DataObject) -> None:
    it = data.draw(_settings())
    edits = []
    if data.draw(st.booleans()):
        site = data.draw(st.sampled_from([s for s in it.sites if s.tensor not in (*SCORES, "experts", "delta_heads")]))
        where = data.draw(_where(it, site, ("B", "k", "e")))
        edits = [data.draw(st.sampled_from(ALIKE))(str(site), width(it, site), where)]
    batch = it.run(*edits)
    it.no_near_tie(batch)
    for b, length in enumerate(it.lengths):
        start = max(it.lengths) - length if it.side == "left" else 0
        alone = it.model.run(it.tokens[b : b + 1, start : start + length], want=it.sites, edits=edits)
        for site in it.sites:
            node = it.model.sites.node(site)
            ours, theirs = batch[site][b : b + 1], alone[site]
            for axis, dim in enumerate(node.shape):
                if dim in ("T", "S"):
                    ours = ours.narrow(axis, start, length)
            if "k" in node.shape:
                place = batch["experts", site.block][b : b + 1, start : start + length]
                ours, theirs = by_expert(ours, place), by_expert(theirs, alone["experts", site.block])
            close(ours, theirs, site)


# ---- where -----------------------------------------------------------------------------------------------------------

ENDS = st.none() | st.integers(-12, 12)
PLACES = st.one_of(
    st.integers(-12, 12),
    st.lists(st.integers(-9, 9), max_size=4),
    st.builds(slice, ENDS, ENDS, st.none() | st.integers(-3, 3)),
)


def by_numpy(place: Any, size: int) -> list[int] | None:
    """What numpy takes; None where it takes nothing, or refuses."""
    try:
        return np.atleast_1d(np.arange(size)[place]).tolist() or None
    except (IndexError, ValueError):
        return None


def goes_beyond(place: Any, size: int) -> bool:
    """Whether a slice has an end that numpy would clip."""
    if not isinstance(place, slice):
        return False
    ends = [i for i in (place.start, place.stop) if i is not None]
    first = place.start is not None and (place.step or 1) < 0 and place.start == size
    return first or any(not -size <= i <= size for i in ends)


def understood(place: Any, size: int) -> list[int]:
    ((_, meant),) = where_of({"d": place})
    return indices(meant, size, "it")


@examples(400)
@given(PLACES, st.integers(1, 9))
def test_a_place_means_what_numpy_means_or_is_refused(place: Any, size: int) -> None:
    expected = None if goes_beyond(place, size) else by_numpy(place, size)
    if expected is not None:
        assert understood(place, size) == expected
        for other in (np.array, torch.tensor):  # of any library
            if isinstance(place, list):
                assert understood(other(place), size) == expected
        return
    with pytest.raises((OutOfRange, BadEdit)):
        understood(place, size)


WRONG = st.one_of(
    st.booleans(),
    st.none(),
    st.floats(),
    st.complex_numbers(),
    st.lists(st.booleans() | st.floats() | st.none() | st.text(), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 1), max_size=2), min_size=1, max_size=2),
    st.builds(slice, st.floats() | st.booleans(), st.none()),
    st.sampled_from([torch.tensor([0.0]), torch.tensor(1.0), np.array([1.5]), np.array([True]), "0", ..., object()]),
)


@examples(100)
@given(WRONG)
def test_what_is_no_place_is_refused(place: Any) -> None:
    with pytest.raises(BadEdit):
        where_of({"d": place})


@examples(25)
@given(st.data())
def test_positions_count_real_tokens_in_a_run(data: st.DataObject) -> None:
    it = data.draw(_settings())
    site = data.draw(st.sampled_from([s for s in it.sites if s.tensor in ("c_KV", "V", "x_mid", "s_ffn", "logits")]))
    dim, place = "S" if site.tensor == "V" else "T", data.draw(PLACES)
    expected = [None if goes_beyond(place, n) else by_numpy(place, n) for n in it.lengths]
    if None in expected:
        with pytest.raises((OutOfRange, BadEdit)):
            it.run(zero(str(site), **{dim: place}))
        return
    made, base = it.run(zero(str(site), **{dim: place})), it.run()
    zeroed = torch.zeros_like(it.real)
    for b, positions in enumerate(expected):
        zeroed[b, it.real[b].nonzero().flatten()[positions]] = True
    assert not made[site][zeroed].any()
    assert torch.equal(made[site][~zeroed], base[site][~zeroed])
    assert torch.equal(made.natural[site], base[site])


@pytest.mark.parametrize(
    "word", [add, edit, freeze, mean, noise, patch, project_out, resample, scale, set_to, splice, zero]
)
def test_every_dim_can_be_named_to_every_edit(word: Callable[..., Edit]) -> None:
    """No parameter of an edit is called as a dim is: ``f`` the function would hide ``f`` the FFN width."""
    named = {name for name, p in inspect.signature(word).parameters.items() if p.kind is not p.POSITIONAL_ONLY}
    assert not named & set(DIMS)


@pytest.mark.parametrize("tensor", SCORES)
def test_scores_and_patterns_have_no_dictionary(tensor: str) -> None:
    """Their last axis is positions; and a hidden score, the least of numbers, would make every latent NaN."""
    with pytest.raises(BadEdit, match="positions, not features"):
        model_of(SIZES).run(tokens_of(2, 7, 1), edits=[splice(tensor, 0, dictionary=untouched(7))])


@pytest.mark.parametrize("where", [{"e": 3}, {"k": 0}], ids=["e", "k"])
def test_a_tokens_experts_are_edited_together(where: dict[str, int]) -> None:
    """One alone could come to stand there twice."""
    base = model_of(SIZES).run(tokens_of(2, 4, 1), want="blocks.1.experts")
    for made in (freeze("experts", 1, **where), set_to("experts", 1, value=base["experts", 1], **where)):
        with pytest.raises(BadEdit, match="chosen together"):
            model_of(SIZES).run(base.tokens, edits=[made])


def test_a_function_of_some_neurons() -> None:
    model = model_of(replace(SIZES, moe=(False,)))
    run = model.run(tokens_of(2, 4, 1), want=["blocks.0.a"], edits=[edit("a", torch.exp, block=0, f=[3, -1])])
    before = run.natural["a", 0]
    assert torch.equal(run["a", 0][..., [3, 23]], before[..., [3, 23]].exp())
    assert torch.equal(run["a", 0][..., :3], before[..., :3])


# ---- composition -----------------------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[Callable[..., Edit], Callable[[Tensor], Tensor]]] = {
    "zero": (zero, torch.zeros_like),
    "double": (lambda s, **at: scale(s, factor=2.0, **at), lambda value: value * 2.0),
    "shift": (lambda s, **at: add(s, direction=torch.tensor([0.25]), alpha=3.0, **at), lambda value: value + 0.75),
    "sine": (lambda s, **at: edit(s, torch.sin, **at), torch.sin),
}
"""An edit, and the same by hand."""


def is_plain(node: Step | Leaf) -> bool:
    """One row a position, or one a head: no slots, no keys, no heads side by side."""
    return node.shape[1] == "T" and not any("(" in axis or axis == "k" for axis in node.shape) and not is_reading(node)


def is_reading(node: Step | Leaf) -> bool:
    return bool(getattr(node, "read_only", ""))


@examples(30)
@given(st.data())
def test_edits_together_are_hooks_one_after_another(data: st.DataObject) -> None:
    """At a few sites, so that some meet; a replacement of what an edit before it changed is refused."""
    it = data.draw(_settings(unequal=False))
    plain = [site for site in it.sites if is_plain(it.model.sites.node(site))]
    few = data.draw(st.lists(st.sampled_from(plain), min_size=1, max_size=3, unique=True))
    edits: list[Edit] = []
    by_hand: list[tuple[str, Any]] = []
    changed: dict[Site, Tensor] = {}
    overlap = False
    for _ in range(data.draw(st.integers(1, 4))):
        site, kind = data.draw(st.sampled_from(few)), data.draw(st.sampled_from(list(CHANGES)))
        places, rows = data.draw(_numbers(LONG)), data.draw(st.none() | _numbers(B))
        make, change = CHANGES[kind]
        edits.append(make(str(site), T=places, **({} if rows is None else {"B": rows})))
        mask = torch.zeros(B, LONG, dtype=torch.bool)
        there = np.arange(B) if rows is None else np.atleast_1d(np.arange(B)[rows])
        mask[np.ix_(there, np.atleast_1d(np.arange(LONG)[places]))] = True
        met = changed.setdefault(site, torch.zeros_like(mask))
        overlap = overlap or (kind == "zero" and bool((met & mask).any()))
        changed[site] = met | mask

        def hook(value: Tensor, hook: Any, mask: Tensor = mask, change: Any = change) -> Tensor:
            return torch.where(mask.view(B, LONG, *[1] * (value.ndim - 2)), change(value), value)

        by_hand.append((site.hook, hook))
    if overlap:
        with pytest.raises(BadEdit, match="overlap"):
            it.run(*edits)
        return
    run = it.run(*edits)
    assert torch.equal(run["logits"], it.model.run_with_hooks(it.tokens, fwd_hooks=by_hand))
    with it.model.hooks(fwd_hooks=by_hand):
        _, cache = it.model.run_with_cache(it.tokens, names_filter=it.sites)
    for site in it.sites:
        assert torch.equal(run[site], cache[site]), site


@examples(15)
@given(st.data())
def test_edits_of_different_sites_come_in_any_order(data: st.DataObject) -> None:
    it = data.draw(_settings())
    pairs = [data.draw(_edited(it)) for _ in range(2)]
    assume(pairs[0][0] != pairs[1][0])
    first, second = (made for _, made in pairs)
    try:
        run = it.run(first, second)
    except ProbeError as refused:
        with pytest.raises(type(refused)):
            it.run(second, first)
        return
    turned = it.run(second, first)
    assert run.touched == turned.touched[::-1]
    assert all(torch.equal(run[site], turned[site]) for site in it.sites)
