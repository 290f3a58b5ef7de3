"""Runs: rows of a padded batch, what may be a base, what is asked for and what is read for it, agreement by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hooks import Edit, HookedModel, Run, Site, resample, zero
from probe import TINY, Dims, ProbeError, Weights, random_weights
from probe.errors import BadEdit, BadText, OutOfRange, ShapeMismatch, UnknownTensor
from tests.hooks.small import (
    DENSE,
    DIMS,
    LAST,
    LENGTHS,
    MODEL,
    MOE,
    ORACLE,
    REFERENCE,
    SIDES,
    SLOTS,
    TOKENS,
    B,
    T,
    close,
    everything,
    padded,
    ragged,
    real_part,
)
from tests.oracle import by_expert


@pytest.fixture(scope="module")
def base() -> Run:
    return everything()


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_rows_of_a_padded_batch_equal_the_rows_alone_in_every_tensor(side: str) -> None:
    tokens, keep = padded(ragged(), side)
    together = everything(tokens, keep)
    for b, row in enumerate(ragged()):
        alone = everything(row[None])
        first = T - len(row) if side == "left" else 0
        for site in MODEL.sites:
            ours = real_part(together[site], site, b, first, len(row))[None]
            single = alone[site]
            if site.tensor in (*SLOTS, "experts"):
                at = Site(site.block, "experts")
                ours = by_expert(ours, real_part(together[at], at, b, first, len(row))[None])
                single = by_expert(single, alone[at])
            if "T" in MODEL.sites.node(site).shape and "S" in MODEL.sites.node(site).shape:
                visible = torch.ones(len(row), len(row)).tril().bool()
                ours, single = ours * visible, single * visible
            close(ours, single)


@pytest.mark.parametrize("side", SIDES)
def test_pads_are_finite_everywhere_and_what_they_hold_moves_nothing_real(side: str) -> None:
    tokens, keep = padded(ragged(), side)
    before = everything(tokens, keep)
    assert all(value.isfinite().all() for value in before.cache.values())
    other = torch.where(keep, tokens, 31)
    assert not torch.equal(other, tokens)
    after = everything(other, keep)
    for b, n in enumerate(LENGTHS):
        for site in MODEL.sites:
            now, was = (real_part(run[site], site, b, T - n if side == "left" else 0, n) for run in (after, before))
            assert site.tensor in SLOTS or torch.allclose(now, was, rtol=0, atol=1e-5), site


def test_a_mask_of_numbers_is_a_mask() -> None:
    tokens, keep = padded(ragged(), "left")
    edit = zero("O", MOE, T=-1)
    run = MODEL.run(tokens, keep, edits=[edit])
    same = MODEL.run(tokens, keep.long(), edits=[edit])
    assert torch.equal(run["logits"], same["logits"])
    assert run.touched == same.touched


# ---- what may be a base ----------------------------------------------------------------------------------------------


def test_a_base_must_be_the_run_without_edits_on_these_tokens_and_weights(base: Run) -> None:
    tokens, keep = padded(ragged(), "left")
    other = HookedModel(random_weights(DIMS, 3))
    cases: list[tuple[Run, str]] = [
        (MODEL.run(TOKENS.flip(0)), "other tokens"),
        (MODEL.run(TOKENS[:, :-1]), "other tokens"),
        (MODEL.run(TOKENS[:2]), "other tokens"),
        (MODEL.run(TOKENS, keep), "another mask"),
        (MODEL.run(TOKENS, edits=[zero("O", MOE)]), "edits itself"),
        (other.run(TOKENS), "other weights"),
    ]
    for start, why in cases:
        with pytest.raises(BadEdit, match=why):
            MODEL.run(TOKENS, edits=[zero("O", MOE)], base=start)
    with pytest.raises(BadEdit, match="another mask"):
        MODEL.run(tokens, keep, base=MODEL.run(tokens))
    with pytest.raises(BadEdit, match="another mask"):
        MODEL.run(tokens, keep, base=MODEL.run(tokens, keep.flip(1)))


def test_a_base_may_not_come_from_under_hooks(base: Run) -> None:
    """It would be taken for the plain run, and a hook still on would act twice on what it made."""
    with MODEL.hooks(fwd_hooks=[("blocks.1.O", lambda value, hook: 2 * value)]):
        under = everything()
        with pytest.raises(BadEdit, match=r"hooks on \(blocks\.1\.O\)"):
            MODEL.run(TOKENS, base=under)
        from_plain = MODEL.run(TOKENS, base=base)
    with pytest.raises(BadEdit, match="hooks on"):
        MODEL.run(TOKENS, base=under)
    assert torch.equal(from_plain["logits"], under["logits"])
    assert not torch.equal(under["logits"], base["logits"])


def test_tokens_changed_in_place_after_the_base_was_run_are_other_tokens() -> None:
    tokens, keep = padded(ragged(), "left")
    start = MODEL.run(tokens, keep)
    tokens[0, -1] += 1
    with pytest.raises(BadEdit, match="other tokens"):
        MODEL.run(tokens, keep, base=start)
    tokens[0, -1] -= 1
    keep[1, -3] = False
    keep[1, :-2] = False
    with pytest.raises(BadEdit, match="another mask"):
        MODEL.run(tokens, keep, base=start)


@pytest.mark.parametrize("held", ["logits", "blocks.1.x_n", "blocks.0.c_KV", None])
@pytest.mark.parametrize("edit", [zero("O", DENSE, h=0), zero("gates", MOE, k=0), zero("x_final", d=1)])
def test_a_base_that_holds_little_serves_as_well(held: str | None, edit: Edit) -> None:
    start = MODEL.run(TOKENS, want=held)
    part, whole = (everything(edits=[edit], base=one) for one in (start, None))
    assert all(torch.equal(part[site], whole[site]) for site in MODEL.sites if site in whole.cache)


@pytest.mark.parametrize("side", SIDES)
def test_from_a_padded_base(side: str) -> None:
    tokens, keep = padded(ragged(), side)
    start = everything(tokens, keep)
    for edit in (zero("O", MOE, T=-1), resample("c_KV", MOE, source=everything(REFERENCE), T=[0, 1])):
        part, whole = (everything(tokens, keep, edits=[edit], base=one) for one in (start, None))
        assert all(torch.equal(part[site], whole[site]) for site in MODEL.sites)


# ---- what is wanted --------------------------------------------------------------------------------------------------


def test_wanted_before_at_and_after_the_edit(base: Run) -> None:
    want = ["blocks.2.x_next", "x_0", "blocks.1.c_KV", "blocks.1.delta_heads", "blocks.0.A", "blocks.1.O"]
    for start in (base, None):
        run = MODEL.run(TOKENS, want=want, edits=[zero("O", MOE, h=1)], base=start)
        for name in ("x_0", "blocks.1.c_KV", "blocks.0.A"):
            assert torch.equal(run[name], base[name]), "nothing above the edit moves"
        for name in ("blocks.2.x_next", "blocks.1.delta_heads", "blocks.1.O"):
            assert not torch.equal(run[name], base[name])
        assert not run["blocks.1.delta_heads"][:, :, 1].any()
        assert "logits" not in run.cache


@pytest.mark.parametrize(
    "want", ["blocks.1.c^KV", Site(1, "c_KV"), {"blocks.1.c_KV"}, lambda name: name == "blocks.1.hook_c_KV"]
)
def test_one_thing_may_be_wanted_by_itself(want, base: Run) -> None:
    assert torch.equal(MODEL.run(TOKENS, want=want)["c_KV", 1], base["c_KV", 1])


def test_wanting_all_or_nothing() -> None:
    assert len(MODEL.run(TOKENS, want=None).cache) == len(list(MODEL.sites)) - DIMS.blocks  # but delta_heads
    for nothing in ([], lambda name: False):
        with pytest.raises(UnknownTensor, match="no tensor at all"):
            MODEL.run(TOKENS, want=nothing)


@pytest.mark.parametrize("want", ["blocks.1.c_kvv", ["logits", "blocks.7.O"], "O", "blocks.1.R"])
def test_wanting_what_does_not_exist_is_an_error(want) -> None:
    with pytest.raises((UnknownTensor, OutOfRange)) as caught:
        MODEL.run(TOKENS, want=want)
    assert isinstance(caught.value, ProbeError)


def test_the_values_of_a_run_have_no_graph_and_share_no_memory(base: Run) -> None:
    run = everything(edits=[zero("Q_C", MOE, h=1)], base=base)
    assert not any(value.requires_grad for value in run.cache.values())
    pointers = [value.untyped_storage().data_ptr() for one in (run, base) for value in one.cache.values()]
    assert len(set(pointers)) == len(pointers)


def test_running_text() -> None:
    tiny = HookedModel.load()
    text = json.loads((TINY / "prompts" / "ioi.jsonl").read_text().splitlines()[0])["clean"]
    run = tiny.run([text, text], edits=[zero("O", 0, T=-1)])
    assert torch.equal(run["logits"], tiny.run(*tiny.batch([text, text]), edits=[zero("O", 0, T=-1)])["logits"])
    with pytest.raises(BadText, match="no tokenizer"):
        MODEL.run("a b")
    for wrong in ([], [[1, 2]], 3, None):
        with pytest.raises(BadText, match="token ids as a tensor"):
            tiny.run(wrong)
    with pytest.raises(BadText, match="own mask"):
        tiny.run("When", torch.ones(1, 2))


def test_tokens_that_do_not_fit_are_refused() -> None:
    edit = [zero("O", MOE, T=-1)]
    for tokens, keep, error, why in [
        (TOKENS[0], None, ShapeMismatch, r"\[B T\]"),
        (TOKENS.float(), None, ShapeMismatch, "integers"),
        (TOKENS[:, :0], None, ShapeMismatch, "at least one"),
        (TOKENS + DIMS.V, None, BadText, "outside the vocabulary of 50"),
        (TOKENS - 50, None, BadText, "outside the vocabulary"),
        (TOKENS, torch.ones(2, 2), ShapeMismatch, "mask of real tokens"),
        (TOKENS, torch.zeros(B, T), BadText, "no real token"),
        (TOKENS, torch.tensor([[1, 0, 1, 1, 1, 1]] * B), ShapeMismatch, "holes"),
    ]:
        with pytest.raises(error, match=why):
            MODEL.run(tokens, keep, edits=edit)


# ---- what is read ----------------------------------------------------------------------------------------------------


class Counting:
    """Weights that note what is read of them; routed ones by the experts asked for."""

    def __init__(self, weights: Weights, resident: bool = True) -> None:
        self.weights, self.dims, self.resident = weights, weights.dims, resident
        self.reads: list[tuple[int | None, str]] = []
        self.rows: dict[tuple[int | None, str], Sequence[int] | None] = {}

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        self.reads.append((block, name))
        self.rows[block, name] = experts
        return self.weights.read(block, name, experts)


def counting(resident: bool = True) -> tuple[HookedModel, Counting]:
    weights = Counting(ORACLE.weights(), resident)
    return HookedModel(weights), weights


@pytest.mark.parametrize(
    ("want", "reads"),
    [
        ("x_0", [(None, "W_E")]),
        ("blocks.0.x_n", [(None, "W_E")]),
        ("blocks.0.c_KV", [(None, "W_E"), (0, "w_attn"), (0, "W_DKV")]),
        ("blocks.0.k_R", [(None, "W_E"), (0, "w_attn"), (0, "W_KR")]),
        ("blocks.0.Q_C", [(None, "W_E"), (0, "w_attn"), (0, "W_DQ"), (0, "w_Q"), (0, "W_UQ")]),
    ],
)
def test_an_early_stop_reads_only_what_it_needs(want: str, reads: list[tuple[int | None, str]]) -> None:
    model, weights = counting()
    model.run(TOKENS, want=want)
    assert weights.reads == reads


def test_a_partial_run_reads_nothing_above_its_edit() -> None:
    model, weights = counting()
    start = model.run(TOKENS, want=["logits", "blocks.1.O"])
    assert {block for block, _ in weights.reads} == {None, 0, 1, 2}
    weights.reads.clear()
    model.run(TOKENS, edits=[zero("O", MOE, h=1)], base=start)
    assert (1, "W_O") in weights.reads
    assert not {(1, name) for name in ("w_attn", "W_DQ", "W_UQ", "W_DKV", "W_UK", "W_UV")} & set(weights.reads)
    assert not {(0, "w_attn"), (None, "W_E")} & set(weights.reads)
    weights.reads.clear()
    model.run(TOKENS, edits=[zero("x_final", d=0)], base=start)
    assert weights.reads == [(None, "w_final"), (None, "W_U")]


def test_weights_that_are_not_in_memory_are_read_by_the_experts_of_the_edited_run(base: Run) -> None:
    model, weights = counting(resident=False)
    edits = [zero("x_mid", MOE, T=2), zero("gates", MOE, k=0)]
    run = model.run(TOKENS, want=["logits", "blocks.1.experts"], edits=edits)
    chosen = sorted(set(run["blocks.1.experts"].flatten().tolist()))
    for name in ("W_1_e", "W_3_e", "W_2_e"):
        assert list(weights.rows[1, name] or ()) == chosen
    close(run["logits"], MODEL.run(TOKENS, edits=edits)["logits"])


# ---- agreement -------------------------------------------------------------------------------------------------------


def by_hand(run: Run, base: Run, reached: dict[int, list[tuple[int, int]]]) -> tuple[float, int]:
    """Over (row, place) pairs by block: the share of common experts, and how many choices changed."""
    same = total = 0
    for block, places in reached.items():
        for b, t in places:
            ours, others = (set(one["experts", block][b, t].tolist()) for one in (run, base))
            same += len(ours & others)
            total += DIMS.k
    return same / total, total - same


ROWS = range(B)
EVERYWHERE = [(b, t) for b in ROWS for t in range(T)]
AGREEMENTS: list[tuple[Edit, dict[int, list[tuple[int, int]]]]] = [
    (zero("delta_attn", DENSE), {1: EVERYWHERE, 2: EVERYWHERE}),
    (zero("x_0", T=2), {1: [p for p in EVERYWHERE if p[1] >= 2], 2: [p for p in EVERYWHERE if p[1] >= 2]}),
    (zero("delta_attn", DENSE, B=1), {i: [p for p in EVERYWHERE if p[0] == 1] for i in (1, 2)}),
    (zero("x_ffn", MOE, T=3), {1: [(b, 3) for b in ROWS], 2: [p for p in EVERYWHERE if p[1] >= 3]}),
    (zero("x_ffn", MOE, T=3, B=1), {1: [(1, 3)], 2: [(1, t) for t in range(3, T)]}),
    (zero("Q", MOE, T=1), {1: [(b, 1) for b in ROWS], 2: [p for p in EVERYWHERE if p[1] >= 1]}),
    (zero("K", MOE, S=4), {1: [p for p in EVERYWHERE if p[1] >= 4], 2: [p for p in EVERYWHERE if p[1] >= 4]}),
    (zero("A", MOE, T=5, S=1), {1: [(b, 5) for b in ROWS], 2: [(b, 5) for b in ROWS]}),
    (zero("A", MOE, S=3), {1: [p for p in EVERYWHERE if p[1] >= 3], 2: [p for p in EVERYWHERE if p[1] >= 3]}),
    (zero("choice_score", MOE, e=[0, 1]), {1: EVERYWHERE, 2: EVERYWHERE}),
    (zero("gates", MOE, k=0), {2: EVERYWHERE}),
    (zero("y_e", MOE, e=3), {2: EVERYWHERE}),
    (zero("x_next", MOE, T=-1), {2: [(b, T - 1) for b in ROWS]}),
    (zero("x_mid", LAST), {2: EVERYWHERE}),
]


@pytest.mark.parametrize(("edit", "reached"), AGREEMENTS, ids=lambda it: it.label if isinstance(it, Edit) else "")
def test_agreement_is_over_the_blocks_and_rows_that_the_edit_can_reach(edit: Edit, reached, base: Run) -> None:
    run = MODEL.run(TOKENS, want=["logits", "blocks.1.experts", "blocks.2.experts"], edits=[edit], base=base)
    agreement, flips = by_hand(run, base, reached)
    assert run.routing_agreement == pytest.approx(agreement)
    assert run.flips == flips
    outside = {i: [p for p in EVERYWHERE if p not in reached.get(i, [])] for i in (1, 2)}
    if any(outside.values()):
        assert by_hand(run, base, outside) == (1.0, 0), "nothing that it can't reach flips"


def test_some_of_these_edits_flip_experts(base: Run) -> None:
    flips = [MODEL.run(TOKENS, edits=[edit], base=base).flips or 0 for edit, _ in AGREEMENTS]
    assert sum(n > 0 for n in flips) > len(flips) // 2


def test_several_edits_reach_what_any_of_them_reaches(base: Run) -> None:
    edits = [zero("x_mid", LAST, T=0), zero("delta_attn", DENSE, T=4)]
    run = MODEL.run(TOKENS, edits=edits, base=base)
    late = [p for p in EVERYWHERE if p[1] >= 4]
    assert (run.routing_agreement, run.flips) == pytest.approx(
        by_hand(run, base, {1: late, 2: late + [(b, 0) for b in ROWS]})
    )


@pytest.mark.parametrize("side", SIDES)
def test_pads_are_out_of_the_agreement(side: str) -> None:
    tokens, keep = padded(ragged(), side)
    start = everything(tokens, keep)
    run = everything(tokens, keep, edits=[zero("delta_attn", DENSE, T=slice(1, None))], base=start)
    first = [T - n if side == "left" else 0 for n in LENGTHS]
    real = [(b, first[b] + t) for b, n in enumerate(LENGTHS) for t in range(1, n)]
    assert (run.routing_agreement, run.flips) == pytest.approx(by_hand(run, start, {1: real, 2: real}))


def test_the_agreement_asks_no_position_of_rows_that_the_edit_leaves_alone() -> None:
    tokens, keep = padded(ragged(), "right")
    start = everything(tokens, keep)
    run = everything(tokens, keep, edits=[zero("delta_attn", DENSE, B=0, T=T - 1)], base=start)
    assert (run.routing_agreement, run.flips) == pytest.approx(by_hand(run, start, {1: [(0, T - 1)], 2: [(0, T - 1)]}))


@pytest.mark.parametrize("edit", [zero("x_final"), zero("logits", V=0), zero("gates", LAST), zero("h_s", LAST)])
def test_an_edit_below_every_router_has_no_agreement(edit: Edit, base: Run) -> None:
    run = MODEL.run(TOKENS, want=["logits", "blocks.2.experts"], edits=[edit], base=base)
    assert run.routing_agreement is None
    assert run.flips is None


def test_without_a_base_or_an_edit_there_is_no_agreement(base: Run) -> None:
    for run in (MODEL.run(TOKENS, edits=[zero("O", DENSE)]), MODEL.run(TOKENS, base=base), base):
        assert run.routing_agreement is None
        assert run.flips is None


def test_agreement_compares_sets_not_slots(base: Run) -> None:
    """The same experts in other slots agree wholly."""

    def shuffle(value: Tensor, hook: object) -> Tensor:
        return value.flip(-1)

    nothing = resample("delta_shared", MOE, source=base, rows=range(B))
    up = resample("x_ffn", MOE, source=base, rows=range(B))
    with MODEL.hooks(fwd_hooks=[("blocks.1.experts", shuffle)]):
        run = MODEL.run(TOKENS, edits=[nothing, up], base=base)
    assert run.routing_agreement == 1.0
    assert run.flips == 0
    assert not torch.equal(run["blocks.1.experts"], base["blocks.1.experts"])
    close(run["logits"], base["logits"])


def test_a_run_of_a_dense_model_has_no_experts() -> None:
    dims: Dims = dataclasses.replace(DIMS, moe=(False, False))
    dense = HookedModel(random_weights(dims))
    run = dense.run(TOKENS, edits=[zero("O", 0, h=1)], base=dense.run(TOKENS))
    assert run.routing_agreement is None


def test_a_base_that_was_written_into_is_refused() -> None:
    base = MODEL.run(TOKENS, want=None)
    base[f"blocks.{MOE}.x_n"].zero_()
    with pytest.raises(BadEdit, match=rf"blocks\.{MOE}\.x_n has been written into"):
        MODEL.run(TOKENS, edits=[zero("O", MOE)], base=base)


def test_a_base_of_weights_that_were_written_into_is_refused() -> None:
    model = HookedModel(random_weights(MODEL.dims, 9))
    base = model.run(TOKENS)
    model.decoder.weights.read(MOE, "W_O").mul_(0.5)
    with pytest.raises(BadEdit, match="weights have been written into"):
        model.run(TOKENS, edits=[zero("O", MOE)], base=base)
    model.run(TOKENS, edits=[zero("O", MOE)], base=model.run(TOKENS))
