"""Position ids and packed texts in runs, caches, gradients, edits, sweeps and decoding: each against the same text by
itself, a whole run, or transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.measure import stayed
from hooks import (
    Cache,
    Cell,
    Edit,
    Live,
    Run,
    Site,
    add,
    edit,
    freeze,
    knock_out,
    mean,
    noise,
    patch,
    resample,
    scale,
    set_to,
    sweep,
    zero,
)
from hooks.apply import bound
from hooks.estimate import of as estimate_of
from hooks.generate import generate
from hooks.keep import Keep
from hooks.staged import Staged
from hooks.where import Rows
from probe.errors import BadEdit, BadText, ProbeError, ShapeMismatch, Unmatched
from probe.numerics import rotate, rotation
from tests.hooks import test_sweep
from tests.hooks.small import DENSE, EDITABLE, LAST, MODEL, MOE, ORACLE, close, padded
from tests.hooks.twin import Ask, agree, swept
from tests.oracle import draw, padding

B, T = 3, 7
KEEP = padding([7, 5, 6], "right")
FAR = torch.tensor([[0, 1, 5, 6, 7, 200, 201], [40, 41, 42, 43, 44, 45, 46], [3, 90, 91, 4000, 4001, 4095, 4096]])
TEXTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 4, 9, 9], [2, 2, 5, 5, 5, 8, 8]])
FAR_TEXTS = torch.tensor([[9, 10, 40, 0, 5, 6, 7], [0, 3, 4, 9, 10, 11, 40], [3, 4, 3, 4, 7, 0, 1]])
PLACES: dict[str, dict[str, Tensor]] = {
    "far": {"positions": FAR},
    "packed": {"segments": TEXTS},
    "both": {"positions": FAR_TEXTS, "segments": TEXTS},
}
PADS = {None: None, "left": KEEP.flip(-1), "right": KEEP}
placed = pytest.mark.parametrize("places", PLACES)
side = pytest.mark.parametrize("side", PADS)

TOKENS, _ = draw(ORACLE, B, T, seed=5)
OTHER, _ = draw(ORACLE, B, T, seed=6)
REFERENCE, _ = draw(ORACLE, 12, T, seed=7)
SITES = list(MODEL.sites)
LOGITS = Site(None, "logits")


def places_of(places: str, batch: int = B) -> dict[str, Tensor]:
    """The first row's places, for any number of rows."""
    return {name: given[:1].expand(batch, -1) for name, given in PLACES[places].items()}


def everything(tokens: Tensor, keep: Tensor | None = None, **kwargs: Any) -> Run:
    return MODEL.run(tokens, keep, want=SITES, **kwargs)


# ---- runs, caches, gradients ----------------------------------------------------------------------------------------


@side
@placed
def test_all_ways_to_run_have_the_decoders_bits(places: str, side: str | None, tmp_path: Path) -> None:
    """Whose values are transformers' own (tests/probe/test_positions.py)."""
    keep, given = PADS[side], PLACES[places]
    made = MODEL.decoder.run(TOKENS, keep, want=SITES, **given)
    run = everything(TOKENS, keep, **given)
    logits, cache = MODEL.run_with_cache(TOKENS, keep, names_filter=[str(site) for site in SITES], **given)
    cache.save(tmp_path / "cache")
    for held in (run.cache, cache, Cache.load(tmp_path / "cache")):
        assert all(torch.equal(held[site], made[site]) for site in SITES)
        for name, told in (("ids", "positions"), ("segments", "segments")):
            assert (
                getattr(held.rows, name) is None
                if told not in given
                else torch.equal(getattr(held.rows, name), given[told])
            )
    for said in (logits, MODEL(TOKENS, keep, **given), MODEL.run_with_hooks(TOKENS, keep, **given)):
        assert torch.equal(said, made[LOGITS])
    assert not torch.equal(run["logits"], everything(TOKENS, keep)["logits"])
    for block in (DENSE, MOE, LAST):
        stream = run["x_n", block]
        told = MODEL.run_block(block, stream, keep, **given)
        assert torch.equal(told["x_next", block], run["x_next", block])
        assert torch.equal(MODEL.run_block(block, run)["x_next", block], run["x_next", block])
        assert torch.equal(
            MODEL.run_block(block, Cache.load(tmp_path / "cache")).cache["x_next", block], run["x_next", block]
        )


@placed
def test_gradients_of_a_row_are_those_of_its_texts_alone(places: str) -> None:
    """At every site; a score of one text's logits has none in another text."""
    given = PLACES[places]
    weight = torch.randn(B, T, MODEL.dims.V, generator=torch.Generator().manual_seed(1))
    names = [str(site) for site in SITES]
    _, whole = MODEL.run_with_cache(TOKENS, names_filter=names, grads=lambda logits: (logits * weight).sum(), **given)
    segments = given.get("segments", torch.zeros(B, T))
    assert whole.gradients is not None
    for text in segments[0].unique():
        at = (segments[0] == text).nonzero()[:, 0]
        first, n = int(at[0]), len(at)
        alone = {"positions": given["positions"][:1, at]} if "positions" in given else {}
        score = partial(lambda w, logits: (logits * w).sum(), weight[:1, at])
        _, cache = MODEL.run_with_cache(TOKENS[:1, at], names_filter=names, grads=score, **alone)
        assert cache.gradients is not None
        for site, theirs in cache.gradients.items():
            ours = whole.gradients[site][:1]
            for axis, dim in enumerate(MODEL.sites.node(site).shape):
                ours = ours.narrow(axis, first, n) if dim in ("T", "S") else ours
            if "k" not in MODEL.sites.node(site).shape:  # slots of equal choices may stand in another order
                close(ours, theirs, 1e-4)


def test_what_a_user_writes_into_later_is_not_what_was_run() -> None:
    positions, segments = FAR_TEXTS.clone(), TEXTS.clone()
    run = everything(TOKENS, positions=positions, segments=segments)
    live = Live(TOKENS, KEEP, positions=positions, segments=segments)
    positions.zero_()
    segments.zero_()
    for rows in (run.rows, run.cache.rows, live.rows):
        assert torch.equal(rows.ids, FAR_TEXTS)
        assert torch.equal(rows.segments, TEXTS)


def test_scores_and_rotations_of_their_own_count_in_the_estimate() -> None:
    plain, placed = (Rows(None, 64, 64, ids=ids) for ids in (None, torch.arange(64).expand(64, -1)))
    padded_ = Rows(torch.ones(64, 64, dtype=torch.bool), 64, 64)
    kept = Keep("blocks.0.c_KV")
    assert estimate_of(MODEL, placed, kept).live == estimate_of(MODEL, padded_, kept).live
    assert estimate_of(MODEL, placed, kept).live > estimate_of(MODEL, plain, kept).live


# ---- from a base ----------------------------------------------------------------------------------------------------


@side
@placed
def test_from_a_base_an_edit_of_any_tensor_has_the_bits_of_a_whole_run(
    places: str, side: str | None, long: bool
) -> None:
    keep, given = PADS[side], PLACES[places]
    base = everything(TOKENS, keep, **given)
    every = long or (places == "both" and side is None)
    for site in EDITABLE if every else EDITABLE[:: len(EDITABLE) // 20]:
        dim = "T" if "T" in MODEL.sites.node(site).shape else "S"
        one = scale(str(site), factor=-0.5, **{dim: 2})
        whole, part = (MODEL.run(TOKENS, keep, edits=[one], base=start, **given) for start in (None, base))
        assert torch.equal(whole["logits"], part["logits"]), site


def test_a_base_stands_where_the_run_does() -> None:
    base = MODEL.run(TOKENS, positions=FAR_TEXTS, segments=TEXTS)
    alike = {"positions": FAR_TEXTS.int(), "segments": TEXTS * 3 - 1}  # other names of the same texts
    MODEL.run(TOKENS, base=base, edits=[zero("O", 0, T=1)], **alike)
    counted = torch.arange(T).expand(B, -1)
    MODEL.run(TOKENS, base=MODEL.run(TOKENS), positions=counted)
    for given in ({}, {"positions": FAR}, {"segments": TEXTS}, {"positions": FAR_TEXTS + 1, "segments": TEXTS}):
        with pytest.raises(BadEdit, match="the base was run at other positions, or with other segments"):
            MODEL.run(TOKENS, base=base, **given)
    whole = MODEL.run(TOKENS, want="blocks.1.x_n", segments=TEXTS)
    with pytest.raises(BadEdit, match="at other positions"):
        MODEL.run_block(1, whole["x_n", 1], base=whole)


# ---- edits ----------------------------------------------------------------------------------------------------------


def test_an_edit_stays_within_its_text() -> None:
    """Nothing moves in the texts beside it but the rounding of products with other rows, and its own text alone counts
    as reached."""
    base = everything(TOKENS, segments=TEXTS)
    for site in EDITABLE:
        dim = "T" if "T" in MODEL.sites.node(site).shape else "S"
        made = MODEL.run(TOKENS, edits=[scale(str(site), factor=-0.5, B=0, **{dim: 1})], base=base, segments=TEXTS)
        moved = (made["logits"] - base["logits"]).abs().amax(-1)
        assert float(moved[0, 1:3].max()) > 1e-4, site
        assert max(float(moved[0, [0, 3, 4, 5, 6]].max()), float(moved[1:].max())) < 1e-5, site
    at = bound([zero("x_n", 0, B=0, T=1)], MODEL.sites, base.rows, None)[0]
    assert at.reach(LAST, base.rows).nonzero().tolist() == [[0, 1], [0, 2]]


def test_edits_of_scores_act_on_pairs_of_one_text() -> None:
    run = everything(TOKENS, segments=TEXTS)
    made = everything(TOKENS, segments=TEXTS, edits=[set_to("S", MOE, value=0.0)])
    seen = (run["S", MOE] > -1e30) & True
    assert seen.sum() == MODEL.dims.h * sum(
        n * (n + 1) // 2 for row in TEXTS for n in row.unique(return_counts=True)[1].tolist()
    )
    assert torch.equal(made["S", MOE] == 0, seen), "the mask stays, between texts too"
    relative = noise("S", MOE, std=1.0, relative=True)
    spread = bound([relative], MODEL.sites, run.rows, None)[0].spread(run["S", MOE])
    for b, row in enumerate(TEXTS):
        for text in row.unique():
            own = torch.where((row == text)[:, None], seen[b], False)
            stds = spread[b, 0, row == text, 0]
            torch.testing.assert_close(stds, run["S", MOE][b][own].std().expand_as(stds))
    with pytest.raises(BadEdit, match=r"no key left at position 3 of row 0"):
        MODEL.run(TOKENS, segments=TEXTS, edits=[knock_out(MOE, B=0, T=3, S=3)])


ROTATED = ("Q_R", "k_R", "Q", "K")


@pytest.mark.parametrize("tensor", ROTATED)
def test_a_rotated_tensor_of_other_positions_is_moved_by_a_word_alone(tensor: str) -> None:
    """At the same place in the row, at another position id; ``redo`` is what the source would have been here."""
    dim = "S" if tensor == "K" else "T"
    source, here = everything(OTHER, positions=FAR), everything(OTHER)
    for site_dim in ({}, {dim: 3}):
        with pytest.raises(BadEdit, match="holds its position's rotation; from another position say"):
            MODEL.run(TOKENS, edits=[patch(tensor, DENSE, source=source, **site_dim)])
    kept = MODEL.run(TOKENS, want=Site(DENSE, tensor), edits=[patch(tensor, DENSE, source=source, rotate="keep")])
    assert torch.equal(kept[Site(DENSE, tensor)], source[Site(DENSE, tensor)])
    redone = MODEL.run(TOKENS, want=Site(DENSE, tensor), edits=[patch(tensor, DENSE, source=source, rotate="redo")])
    close(redone[Site(DENSE, tensor)], here[Site(DENSE, tensor)])  # block 0: what isn't rotated is the same
    R = rotation(FAR, MODEL.dims, torch.float32)
    back = MODEL.run(
        TOKENS,
        want=Site(MOE, tensor),
        positions=FAR,
        edits=[patch(tensor, MOE, source=here, rotate="redo", **{dim: [2, 5]})],
    )[Site(MOE, tensor)]
    unrotated = here["Q_pe" if tensor[0] == "Q" else "k_pe", MOE]
    theirs = rotate(unrotated, R)
    turned = back[..., -MODEL.dims.r :]
    if tensor == "K":
        turned = turned[:, :, 0]
    assert torch.equal(turned[:, [2, 5]], theirs[:, [2, 5]])


@pytest.mark.parametrize("tensor", ROTATED)
def test_where_position_ids_are_one_no_word_is_needed(tensor: str) -> None:
    """Row 0's token 2 stands at 5: there the source's token 5 does, counted."""
    source, dim = everything(OTHER), "S" if tensor == "K" else "T"
    at = {dim: 2, "source_T": 5}
    made = MODEL.run(
        TOKENS[:1], want=Site(MOE, tensor), positions=FAR[:1], edits=[patch(tensor, MOE, source=source, rows=[0], **at)]
    )
    assert torch.equal(made[Site(MOE, tensor)][0, 2], source[Site(MOE, tensor)][0, 5])
    with pytest.raises(BadEdit, match="holds its position's rotation"):
        MODEL.run(
            TOKENS[:1], positions=FAR[:1], edits=[patch(tensor, MOE, source=source, rows=[0], **at | {"source_T": 2})]
        )


@pytest.mark.parametrize("tensor", ROTATED)
def test_references_of_a_rotated_tensor_stand_at_the_same_positions(tensor: str) -> None:
    dim = "S" if tensor == "K" else "T"
    alike = everything(REFERENCE, positions=FAR[:1].expand(12, -1))
    mixed = everything(REFERENCE, positions=torch.cat([FAR[:1].expand(3, -1), FAR[1:2].expand(9, -1)]))
    counted = everything(REFERENCE)
    tokens, here = TOKENS[:1], {"positions": FAR[:1]}
    made = MODEL.run(tokens, want=Site(MOE, tensor), edits=[mean(tensor, MOE, source=alike, over="position")], **here)
    close(made[Site(MOE, tensor)][0], alike[Site(MOE, tensor)].mean(0))
    drawn = MODEL.run(tokens, want=Site(MOE, tensor), edits=[resample(tensor, MOE, source=mixed, seed=3)], **here)
    assert any(torch.equal(drawn[Site(MOE, tensor)][0], mixed[Site(MOE, tensor)][j]) for j in range(3)), (
        "of the three that do"
    )
    MODEL.run(
        tokens, edits=[mean(tensor, MOE, source=counted, over="position", **{dim: [0, 1]})], **here
    )  # there they agree
    for one in (
        mean(tensor, MOE, source=counted, over="position"),
        mean(tensor, MOE, source=mixed, over="position"),
        resample(tensor, MOE, source=counted),
        resample(tensor, MOE, source=mixed, rows=[5]),
    ):
        with pytest.raises(BadEdit, match="the source has other positions there; run it at these"):
            MODEL.run(tokens, edits=[one], **here)
    with pytest.raises(BadEdit, match="the source has other positions there"):
        MODEL.run(tokens, edits=[mean(tensor, MOE, source=alike, over="position")])
    for name in ("c_KV", "Q_pe", "O", "x_n"):  # what isn't rotated is any position's
        for one in (mean(name, MOE, source=counted, over="position"), resample(name, MOE, source=mixed)):
            MODEL.run(tokens, edits=[one], **here)


@pytest.mark.parametrize("tensor", ["S", "A"])
def test_scores_are_taken_from_texts_that_begin_alike(tensor: str) -> None:
    """A pattern over far positions goes into a run at near ones; over other keys it does not."""
    source = everything(OTHER, segments=TEXTS)
    far = everything(OTHER, positions=FAR)
    made = MODEL.run(TOKENS, want=Site(MOE, tensor), edits=[patch(tensor, MOE, source=far)])
    assert torch.equal(made[Site(MOE, tensor)], far[Site(MOE, tensor)])
    made = MODEL.run(TOKENS, want=Site(MOE, tensor), edits=[patch(tensor, MOE, source=source)], segments=TEXTS)
    assert torch.equal(made[Site(MOE, tensor)], source[Site(MOE, tensor)])
    packed = everything(REFERENCE, segments=TEXTS[:1].expand(12, -1))
    one = mean(tensor, MOE, source=packed)
    made = MODEL.run(TOKENS[:1], want=Site(MOE, tensor), edits=[one], segments=TEXTS[:1])
    seen = torch.ones(T, T, dtype=torch.bool).tril() & (TEXTS[0][:, None] == TEXTS[0])
    close(made[Site(MOE, tensor)][0][:, seen], packed[Site(MOE, tensor)].mean(0)[:, seen])
    MODEL.run(TOKENS, edits=[patch(tensor, MOE, source=source, B=0, T=2)])  # where the first texts are one
    for bad in (
        patch(tensor, MOE, source=source),
        patch(tensor, MOE, source=source, T=-1),
        mean(tensor, MOE, source=packed),
        resample(tensor, MOE, source=packed),
    ):
        with pytest.raises(BadEdit, match="is over the keys of its own text, and the source's begins elsewhere"):
            MODEL.run(TOKENS, edits=[bad])


# ---- sweeps ---------------------------------------------------------------------------------------------------------

SWEPT = test_sweep.SMALL["latent"]
LIVES: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {
    "far": ({"positions": FAR}, {"positions": FAR}),
    "packed": ({"segments": TEXTS}, {"segments": TEXTS}),
    "both": ({"positions": FAR_TEXTS, "segments": TEXTS}, {"positions": FAR_TEXTS, "segments": TEXTS}),
    "a far source": ({}, {"positions": FAR}),
    "a packed source": ({}, {"segments": TEXTS}),
    "a packed base": ({"segments": TEXTS}, {}),
}
"""Where base and source stand."""

HOWS = [
    "zero at a place",
    "mean by position",
    "patch at a place",
    "patch from elsewhere",
    "noise",
    "mean of what runs along",
    "resample at a place",
    "patch",
    "freeze",
    "function",
]
SHORT = {("both", how) for how in HOWS[:5]} | {(lives, "patch at a place") for lives in LIVES} | {("far", "patch")}


def lives_of(lives: str, **kwargs: Any) -> tuple[Live, Live]:
    base, source = LIVES[lives]
    return Live(test_sweep.TOKENS, test_sweep.KEEP, **base), Live(test_sweep.OTHER, test_sweep.KEEP, **source, **kwargs)


@pytest.mark.parametrize(
    ("lives", "how"),
    [
        pytest.param(lives, how, marks=() if (lives, how) in SHORT else pytest.mark.long)
        for lives in LIVES
        for how in HOWS
    ],
)
def test_every_tensor_under_an_edit_of_a_sweep_is_a_whole_run(lives: str, how: str) -> None:
    """What a run refuses, a sweep refuses likewise; all else is one sweep, and each of its cells a run."""
    base, live = lives_of(lives, read=[[3], [4], [5, 2]])
    plain, other = (
        SWEPT.run(one.tokens, one.rows.keep, want=list(SWEPT.sites), positions=one.rows.ids, segments=one.rows.segments)
        for one in (base, live)
    )
    there = {name: value[:1].expand(90, -1) for name, value in LIVES[lives][0].items()}
    reference = SWEPT.run(test_sweep.draw(90, 7, 3), want=list(SWEPT.sites), **there)
    cells, refused = [], set()
    for site in SWEPT.sites:
        at = {"T" if "T" in SWEPT.sites.node(site).shape else "S": 2}
        one = test_sweep.EDITS[how](str(site), at, reference[site].shape[-1], reference, live)
        twin = replace(one, how=replace(one.how, source=other)) if getattr(one.how, "source", None) is live else one
        try:
            SWEPT.run(base.tokens, base.rows.keep, edits=[twin], base=plain, want=[site], **LIVES[lives][0])
        except Unmatched:
            pass
        except ProbeError as why:
            with pytest.raises(type(why)):
                swept(SWEPT, Ask(base, [Cell(()), Cell((one,))], [live], want=("x_0",)))
            refused.add(site.tensor)
            continue
        cells.append(Cell((one,)))
    assert len(cells) > 60
    want, read = ["logits", "blocks.0.x_mid", "blocks.1.x_next"], [[2, 6], [4], [0, 3, 5]]
    agree(SWEPT, Ask(base, cells, [live], want, read=read))


@pytest.mark.parametrize(("lives", "budget"), [*((lives, 1 << 30) for lives in LIVES), ("both", 1)])
def test_every_tensor_of_a_sweep_is_shown_as_a_run_has_it(lives: str, budget: int) -> None:
    base, live = lives_of(lives, read=[[0]] * 3)
    model = test_sweep.MODELS["latent"]
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in range(3) for pos in (0, 3, -1)]
    cells += [Cell((zero("S", 1, h=1, T=3),)), Cell((zero("A", 2, S=2),)), Cell((zero("W_O", 1), zero("W_UK", 2)))]
    cells += [Cell((zero("x_n", 0, T=2), freeze("experts"), freeze("A"))), Cell((scale("W_KR", 1, factor=0.5),))]
    agree(model, Ask(base, cells, [live], want=(), whole=list(model.sites), budget=budget))


@pytest.mark.parametrize("lives", LIVES)
def test_a_sweep_from_a_block_and_one_from_an_edited_base(lives: str) -> None:
    (base, live), model = lives_of(lives), test_sweep.MODELS["latent"]
    cells = [Cell((patch("x_mid", 1, source=live, T=pos),)) for pos in (0, 2, -1)] + [Cell((zero("k_R", 1, T=3),))]
    x = [
        model.run(one.tokens, one.rows.keep, want="blocks.1.x_n", positions=one.rows.ids, segments=one.rows.segments)
        for one in (base, live)
    ]
    started = [
        Live(None, test_sweep.KEEP, x_n=run["x_n", 1], positions=run.positions, segments=run.segments) for run in x
    ]
    moved = [Cell((patch("x_mid", 1, source=started[1], T=pos),)) for pos in (0, 2, -1)] + cells[3:]
    agree(model, Ask(started[0], moved, started[1:], want=["blocks.1.x_next"], first=1))
    edited = Live(
        base.tokens, base.rows.keep, positions=base.rows.ids, segments=base.rows.segments, edits=[zero("O", 0, T=1)]
    )
    agree(model, Ask(edited, cells, [live]))


def test_edits_of_many_texts_in_one_sweep() -> None:
    """Worlds that changed other texts than they are read in, together with those that read what they changed."""
    base, live = lives_of("both")
    cells = [
        Cell((one,), read=[[t], [min(t, 4)], [min(t, 5)]])
        for t in range(7)
        for one in (zero("x_n", 1, T=2), add("V", 1, direction=torch.ones(10), S=3), patch("x_n", 0, source=live, T=1))
    ]
    _, outcomes = agree(test_sweep.MODELS["latent"], Ask(base, cells, [live], whole=["blocks.2.x_mid"]))
    assert any(outcome.routing_agreement not in (None, 1.0) for outcome in outcomes)


def test_a_cell_computes_nothing_in_the_texts_beside_its_own() -> None:
    """There it has the base's rows, so the base's bits."""
    base, _ = lives_of("packed")
    cells = [Cell((zero("x_n", 0, B=0, T=1),)), Cell((zero("V", 1, B=0, S=2),))]
    shown, _ = swept(SWEPT, Ask(base, cells, whole=["logits"], want=()))
    for i, texts_own in enumerate(([1, 2], [2])):
        moved = (shown["cell", i, LOGITS] != shown["base", 0, LOGITS]).any(-1)
        assert moved.nonzero().tolist() == [[0, t] for t in texts_own]


def test_a_source_shares_each_text_up_to_what_differs_in_token_position_or_text() -> None:
    tokens = test_sweep.TOKENS
    changed = tokens.clone()
    changed[0, 1] = (changed[0, 1] + 1) % 40

    def own(source: dict[str, Any], base: dict[str, Any]) -> list[list[int]]:
        lives = Live(tokens, **base), Live(changed, **source)
        held = _staged(*lives).sources[0].own("tokens")
        return [[]] * B if held is None else [row.nonzero()[:, 0].tolist() for row in held.layout.mask]

    moved = FAR.clone()
    moved[1, 4:] += 1
    rest = list(range(1, 7))
    assert own({}, {}) == [rest, [], []]
    assert own({"positions": FAR}, {"positions": FAR}) == [rest, [], []]
    assert own({"positions": moved}, {"positions": FAR}) == [rest, [4, 5, 6], []]
    assert own({"segments": TEXTS}, {"segments": TEXTS + 1}) == [[1, 2], [], []], "the second text is the base's"
    assert own({}, {"segments": TEXTS}) == [rest, [5, 6], [2, 3, 4, 5, 6]]
    assert own({"segments": TEXTS}, {}) == [[1, 2, 3, 4, 5, 6], [5, 6], [2, 3, 4, 5, 6]]


def _staged(base: Live, source: Live) -> Staged:
    for live in (base, source):
        live.cache.sites = SWEPT.sites
    return Staged(SWEPT, base, [source], [Cell((patch("x_n", 1, source=source),))])


def test_prompts_that_run_along_are_checked_like_a_run() -> None:
    base, _ = lives_of("far")
    for given, kind in (
        ({"positions": FAR_TEXTS}, BadText),
        ({"positions": FAR[:, :5]}, ShapeMismatch),
        ({"segments": TEXTS * (torch.arange(T) != 5)}, BadText),
    ):
        bad = Live(test_sweep.OTHER, **given)
        for lives in ((bad, []), (base, [bad])):
            with pytest.raises(kind):
                sweep(SWEPT, lives[0], [Cell(())], lambda *_: None, sources=lives[1])


def test_a_source_that_is_run_apart_stands_where_it_would_run_along() -> None:
    _, live = lives_of("both")
    run = stayed(SWEPT, live, [zero("c_KV", 1)])
    plain = SWEPT.run(live.tokens, live.rows.keep, want="blocks.1.c_KV", positions=FAR_TEXTS, segments=TEXTS)
    assert torch.equal(run["c_KV", 1], plain["c_KV", 1])


# ---- decoding -------------------------------------------------------------------------------------------------------

N = 5


@pytest.mark.parametrize("side", ["left", "right"])
def test_new_tokens_count_on_from_the_last_position(side: str) -> None:
    """Cached = everything anew at each step = transformers at these position ids, row by row."""
    rows = [row[:n] for row, n in zip(TOKENS, (7, 5, 6), strict=True)]
    ids = [row[:n] for row, n in zip(FAR, (7, 5, 6), strict=True)]
    tokens, keep = padded(rows, side)
    positions, _ = padded(ids, side)
    found = MODEL.generate(tokens, keep, n=N, positions=positions)
    slow = generate(MODEL, tokens, keep, n=N, positions=positions, use_cache=False)
    assert torch.equal(found.new, slow.new)
    close(found.logits, slow.logits, 3e-5)
    assert not torch.equal(found.logits, MODEL.generate(tokens, keep, n=N).logits)
    for b, (row, at) in enumerate(zip(rows, ids, strict=True)):
        for step in range(N):
            shown = ORACLE.show(row[None], positions=at[None])
            close(found.logits[b, step], shown[None, "logits"][0, -1], 3e-5)
            row, at = torch.cat([row, found.new[b, step : step + 1]]), torch.cat([at, at[-1:] + 1])


def test_positions_that_do_not_rise_are_refused_in_decoding() -> None:
    with pytest.raises(BadText, match="do not rise at token 3, from 40 to 0"):
        MODEL.generate(TOKENS, n=1, positions=FAR_TEXTS)


def test_edits_in_decoding_act_at_positions_of_the_users_own() -> None:
    change: list[Edit] = [edit("k_R", lambda value: value * 0.5, block=1), zero("V", 1, S=2)]
    found, slow = (
        generate(MODEL, TOKENS, n=N, positions=FAR, edits=change, use_cache=cached) for cached in (True, False)
    )
    assert torch.equal(found.new, slow.new)
    close(found.logits, slow.logits, 3e-5)
