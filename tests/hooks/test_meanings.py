"""What each edit means, line by line of the specification; oracles are by hand: weights, hooks, formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import (
    Cell,
    Dictionary,
    Edit,
    HookedModel,
    Live,
    Run,
    add,
    edit,
    exclude,
    force,
    freeze,
    knock_out,
    mean,
    noise,
    patch,
    project_out,
    resample,
    scale,
    set_to,
    splice,
    sweep,
    zero,
)
from probe import Dims, InMemory, random_weights
from probe.errors import BadEdit, OutOfRange, ShapeMismatch, UnknownDim, Unmatched

DIMS = Dims(
    d=40, r_q=20, r_kv=16, h=3, n=8, r=4, v=10, f=56, e=12, k=3, m=16, m_s=16, V=40, moe=(False, True, True),
    eps=1e-6, scaling=2.5, norm_topk=True, n_group=1, topk_group=1, theta=1e3, yarn=None,
)  # fmt: skip
WEIGHTS = random_weights(DIMS, 1)
MODEL = HookedModel(WEIGHTS)
OTHER = HookedModel(random_weights(DIMS, 2))


def draw(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, DIMS.V, (rows, length), generator=torch.Generator().manual_seed(seed))


TOKENS, SOURCE_TOKENS, REFERENCE = draw(3, 7, 3), draw(3, 7, 4), draw(80, 9, 5)


@pytest.fixture(scope="module")
def base() -> Run:
    return MODEL.run(TOKENS, want=list(MODEL.sites))


@pytest.fixture(scope="module")
def source() -> Run:
    return MODEL.run(SOURCE_TOKENS, want=list(MODEL.sites))


@pytest.fixture(scope="module")
def reference() -> Run:
    return MODEL.run(REFERENCE, want=list(MODEL.sites))


def logits(*edits, tokens: Tensor = TOKENS, **kwargs) -> Tensor:
    return MODEL.run(tokens, edits=list(edits), **kwargs)["logits"]


def by_hand(tokens: Tensor = TOKENS, **hooks) -> Tensor:
    """A plain run with hooks, ``block_tensor=function``."""
    fwd = [(f"blocks.{name[1]}.{name[3:]}", lambda value, hook, f=f: f(value)) for name, f in hooks.items()]
    return MODEL.run_with_hooks(tokens, fwd_hooks=fwd)


def close(one: Tensor, two: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=atol)


# ---- 1: base and source ----------------------------------------------------------------------------------------------


def test_a_patch_takes_the_sources_values(source: Run) -> None:
    assert torch.equal(logits(patch("c_KV", 1, source=source)), by_hand(b1_c_KV=lambda v: source["c_KV", 1]))


def test_a_source_may_be_another_checkpoint_of_equal_dims() -> None:
    theirs = OTHER.run(TOKENS, want=["blocks.1.delta_attn"])
    made = logits(patch("delta_attn", 1, source=theirs))
    assert torch.equal(made, by_hand(b1_delta_attn=lambda v: theirs["delta_attn", 1]))


def test_a_source_may_be_a_cache(source: Run) -> None:
    _, cache = MODEL.run_with_cache(SOURCE_TOKENS, names_filter="blocks.1.O")
    assert torch.equal(logits(patch("O", 1, source=cache)), logits(patch("O", 1, source=source)))


def test_a_source_of_other_sizes_is_refused() -> None:
    small = HookedModel(random_weights(Dims(**{**vars(DIMS), "d": 48})))
    with pytest.raises(BadEdit, match="d = 48"):
        logits(patch("x_n", 1, source=small.run(TOKENS, want=["blocks.1.x_n"])))


def test_one_source_row_serves_all_and_other_counts_are_refused(source: Run) -> None:
    one = MODEL.run(SOURCE_TOKENS[:1], want=["blocks.1.O"])
    close(logits(patch("O", 1, source=one)), logits(patch("O", 1, source=source, rows=[0, 0, 0])))
    with pytest.raises(BadEdit, match="2 rows for 3"):
        logits(patch("O", 1, source=MODEL.run(SOURCE_TOKENS[:2], want=["blocks.1.O"])))


# ---- 2: positions, spans, masks --------------------------------------------------------------------------------------

SPANS = [
    {"S1": [1], "S2": [3, 4], "END": [6]},
    {"S1": [2], "S2": [4, 5], "END": [6]},
    {"S1": [0], "S2": [1, 2], "END": [6]},
]


def rowwise(places: list[list[int]], f=torch.zeros_like):
    def change(value: Tensor) -> Tensor:
        for b, ps in enumerate(places):
            value[b, ps] = f(value[b, ps])
        return value

    return change


def test_span_names_stand_for_positions_row_by_row() -> None:
    made = logits(zero("O", 1, T="S2"), spans=SPANS)
    assert torch.equal(made, by_hand(b1_O=rowwise([[3, 4], [4, 5], [1, 2]])))
    made = logits(zero("O", 1, T="S2[-1]"), spans=SPANS)
    assert torch.equal(made, by_hand(b1_O=rowwise([[4], [5], [2]])))


def test_an_unknown_span_is_named_with_those_there_are() -> None:
    with pytest.raises(BadEdit, match="row 0 has no span 'IO'; it has S1, S2, END"):
        logits(zero("O", 1, T="IO"), spans=SPANS)
    with pytest.raises(BadEdit, match="no spans"):
        logits(zero("O", 1, T="IO"))
    with pytest.raises(OutOfRange, match="span 'S2'"):
        logits(zero("O", 1, T="S2[2]"), spans=SPANS)


def test_masks_name_places_row_by_row_and_no_pads() -> None:
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 2] = mask[1, 5] = mask[1, 6] = True
    assert torch.equal(logits(zero("O", 1, T=mask)), by_hand(b1_O=rowwise([[2], [5, 6], []])))
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[0, 2:] = False
    with pytest.raises(OutOfRange, match="names a pad of row 0"):
        logits(zero("O", 1, T=mask), keep=keep)
    with pytest.raises(BadEdit, match="the mask is"):
        logits(zero("O", 1, T=mask[:2]))


def test_a_span_maps_positions_between_prompts_of_unequal_length() -> None:
    longer = draw(3, 9, 8)
    theirs = MODEL.run(longer, want=["blocks.1.c_KV"], spans=[{"S2": [6, 7]}] * 3)
    made = logits(patch("c_KV", 1, source=theirs, T="S2"), spans=SPANS)

    def put(value: Tensor) -> Tensor:
        for b, spans in enumerate(SPANS):
            value[b, spans["S2"]] = theirs["c_KV", 1][b, [6, 7]]
        return value

    assert torch.equal(made, by_hand(b1_c_KV=put))
    with pytest.raises(BadEdit, match="names 2 positions here and 1 in the source"):
        logits(patch("c_KV", 1, source=theirs, T="S2", source_T=3), spans=SPANS)


# ---- 3: scores and pattern -------------------------------------------------------------------------------------------


def test_the_mask_wins_after_any_edit_of_the_scores(base: Run) -> None:
    for change in (
        zero("S", 1),
        set_to("S", 1, value=5.0),
        add("S", 1, direction=[1.0], alpha=3.0),
        noise("S", 1, std=2.0),
    ):
        run = MODEL.run(TOKENS, edits=[change], want=["blocks.1.S", "blocks.1.A"])
        future = torch.ones(7, 7, dtype=torch.bool).triu(1)
        assert (run["A", 1][..., future] == 0).all(), change
        assert torch.equal(run["S", 1][..., future], base["S", 1][..., future])


def test_an_edited_pattern_is_not_renormalised(base: Run) -> None:
    run = MODEL.run(TOKENS, edits=[zero("A", 1, S=3)], want=["blocks.1.A", "blocks.1.O"])
    assert (run["A", 1][..., 3] == 0).all()
    assert torch.equal(run["A", 1][..., :3], base["A", 1][..., :3])
    close(run["A", 1][:, :, 6].sum(-1), 1 - base["A", 1][:, :, 6, 3])


def test_a_knocked_out_edge_is_renormalised(base: Run) -> None:
    run = MODEL.run(TOKENS, edits=[knock_out(1, T=[4, 5], S=[0, 2], h=1)], want=["blocks.1.A"])
    expected = base["A", 1].clone()
    part = expected[:, 1, 4:6]
    part[..., [0, 2]] = 0
    part /= part.sum(-1, keepdim=True)
    close(run["A", 1], expected, 1e-6)


def test_a_query_left_without_a_key_is_refused() -> None:
    with pytest.raises(BadEdit, match="no key left at position 0"):
        logits(knock_out(1, S=0))
    with pytest.raises(BadEdit, match="needs the edges"):
        knock_out(1, h=1)


def test_noise_of_the_scores_is_relative_to_visible_keys(base: Run) -> None:
    run = MODEL.run(TOKENS, edits=[noise("S", 1, std=1.0, relative=True, seed=3)], want=["blocks.1.S"])
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    change = (run["S", 1] - base["S", 1])[..., visible]
    assert 0.85 < change.std() / base["S", 1][..., visible].std() < 1.15


# ---- 4: switching a head off, and what keys and queries at zero mean -------------------------------------------------


def edited_weights(name: str, block: int, change) -> HookedModel:
    tensors = {key: t.clone() for key, t in WEIGHTS.tensors.items()}
    tensors[block, name] = change(tensors[block, name])
    return HookedModel(InMemory(DIMS, tensors))


@pytest.mark.parametrize("h", range(DIMS.h))
def test_a_head_off_at_O_is_its_rows_of_W_O_at_zero(h: int) -> None:
    def blank(W_O: Tensor) -> Tensor:
        W_O.view(DIMS.h, DIMS.v, DIMS.d)[h] = 0
        return W_O

    close(logits(zero("O", 1, h=h)), edited_weights("W_O", 1, blank)(TOKENS))
    close(logits(zero("W_O", 1, h=h)), edited_weights("W_O", 1, blank)(TOKENS), 0)


def test_a_query_at_zero_attends_uniformly() -> None:
    run = MODEL.run(TOKENS, edits=[zero("Q", 1, h=2)], want=["blocks.1.A"])
    close(run["A", 1][:, 2], (torch.ones(7, 7).tril() / torch.arange(1, 8)[:, None]).expand(3, 7, 7), 1e-6)


def test_an_equal_shift_of_all_keys_drops_out_of_the_softmax(reference: Run) -> None:
    close(logits(mean("k_C", 1, source=reference)), logits(zero("k_C", 1)))


# ---- 6: rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q_R", "k_R", "Q", "K"])
def test_rotated_tensors_from_another_position_need_a_word(name: str, source: Run) -> None:
    at = {"S" if name == "K" else "T": 5}
    with pytest.raises(BadEdit, match='rotate="redo"'):
        logits(patch(name, 1, source=source, source_T=2, **at))
    kept = MODEL.run(
        TOKENS, edits=[patch(name, 1, source=source, source_T=2, rotate="keep", **at)], want=[f"blocks.1.{name}"]
    )
    assert torch.equal(kept[name, 1][:, 5], source[name, 1][:, 2])
    redone = MODEL.run(
        TOKENS, edits=[patch(name, 1, source=source, source_T=2, rotate="redo", **at)], want=[f"blocks.1.{name}"]
    )
    parts = {"Q_R": ["Q_pe"], "k_R": ["k_pe"], "Q": ["Q_C", "Q_pe"], "K": ["K_C", "k_pe"]}[name]
    whole = MODEL.run(
        TOKENS, edits=[patch(part, 1, source=source, source_T=2, T=5) for part in parts], want=[f"blocks.1.{name}"]
    )
    close(redone[name, 1], whole[name, 1], 1e-6)


@pytest.mark.parametrize("name", ["S", "A"])
def test_scores_and_pattern_cannot_be_moved(name: str, source: Run) -> None:
    with pytest.raises(BadEdit, match="belongs to its positions"):
        logits(patch(name, 1, source=source, source_T=2, T=5))


@pytest.mark.parametrize("name", ["Q_R", "k_R", "Q", "K", "S", "A"])
def test_a_mean_over_positions_of_what_belongs_to_one_is_refused(name: str, reference: Run) -> None:
    with pytest.raises(BadEdit, match="belongs to its position"):
        logits(mean(name, 1, source=reference, over="all"))
    run = MODEL.run(TOKENS, edits=[mean(name, 1, source=reference)], want=[f"blocks.1.{name}"])
    value, pool = run[name, 1], reference[name, 1]
    if name in "SA":
        visible = torch.ones(7, 7, dtype=torch.bool).tril()
        close(value[0][:, visible], pool[:, :, :7, :7].mean(0)[:, visible], 1e-5)
    else:
        close(value[0], pool[:, :7].mean(0), 1e-5)


# ---- 7: slots --------------------------------------------------------------------------------------------------------


def test_slots_are_patched_by_expert_and_what_the_source_lacks_is_refused(base: Run, source: Run) -> None:
    with pytest.raises(Unmatched, match="patch delta_experts"):
        logits(patch("y_e", 1, source=source))
    shared = [
        (b, t, int(e))
        for b in range(3)
        for t in range(7)
        for e in base["experts", 1][b, t]
        if e in source["experts", 1][b, t]
    ]
    b, t, e = shared[0]
    run = MODEL.run(TOKENS, edits=[patch("y_e", 1, source=source, B=b, T=t, e=e)], want=["blocks.1.y_e"])
    ours = (base["experts", 1][b, t] == e).nonzero().item()
    theirs = (source["experts", 1][b, t] == e).nonzero().item()
    assert torch.equal(run["y_e", 1][b, t, ours], source["y_e", 1][b, t, theirs])
    assert run.touched == (1,)


def test_a_whole_patch_of_contributions_writes_what_the_source_wrote(source: Run) -> None:
    close(logits(patch("delta_experts", 1, source=source)), logits(patch("delta_routed", 1, source=source)))


def test_one_added_expert_joins_the_sum(base: Run, source: Run) -> None:
    chosen = [[[set(e) for e in row] for row in r["experts", 1].tolist()] for r in (base, source)]
    b, t = next((b, t) for b in range(3) for t in range(7) if chosen[0][b][t] != chosen[1][b][t])
    ours, theirs = base["experts", 1][b, t].tolist(), source["experts", 1][b, t].tolist()
    added, dropped = (min(set(x) - set(y)) for x, y in ((theirs, ours), (ours, theirs)))
    gain = source["delta_experts", 1][b, t, theirs.index(added)]
    loss = base["delta_experts", 1][b, t, ours.index(dropped)]
    for e, change in ((added, gain), (dropped, -loss)):
        one = patch("delta_experts", 1, source=source, B=b, T=t, e=e)
        run = MODEL.run(TOKENS, edits=[one], want=["blocks.1.delta_routed"])
        close(run["delta_routed", 1][b, t], base["delta_routed", 1][b, t] + change, 1e-5)
        assert run.touched == (1,)


def test_an_expert_that_nobody_chose_touches_nothing(base: Run) -> None:
    absent = next(e for e in range(DIMS.e) if not (base["experts", 1] == e).any())
    run = MODEL.run(TOKENS, edits=[zero("gates", 1, e=absent)])
    assert run.touched == (0,)
    assert torch.equal(run["logits"], base["logits"])


@pytest.mark.parametrize(
    "change",
    [
        zero,
        lambda t, b: scale(t, b, factor=2),
        lambda t, b: noise(t, b, std=1),
        lambda t, b: add(t, b, direction=[1.0]),
    ],
)
def test_experts_are_integers(change) -> None:
    with pytest.raises(BadEdit, match="only set, force, patch and freeze"):
        logits(change("experts", 1))


# ---- 8: switching experts --------------------------------------------------------------------------------------------


def test_a_gate_at_zero_loses_that_expert_and_no_other(base: Run) -> None:
    e = int(base["experts", 1][0, 3, 0])
    run = MODEL.run(TOKENS, edits=[zero("gates", 1, e=e)], want=["blocks.1.delta_experts", "blocks.1.gates"])
    held = base["experts", 1] == e
    assert (run["delta_experts", 1][held] == 0).all()
    assert torch.equal(run["delta_experts", 1][~held], base["delta_experts", 1][~held])


def test_the_other_gates_are_rescaled_on_request(base: Run) -> None:
    e = int(base["experts", 1][0, 3, 0])
    run = MODEL.run(TOKENS, edits=[zero("gates", 1, e=e, renorm=True)], want=["blocks.1.gates"])
    held = base["experts", 1] == e
    expected = base["gates", 1].masked_fill(held, 0)
    expected = DIMS.scaling * expected / expected.sum(-1, keepdim=True)
    close(run["gates", 1], expected, 1e-6)
    assert torch.equal(run["gates", 1][~held.any(-1)], base["gates", 1][~held.any(-1)])
    assert (MODEL.run(TOKENS, edits=[zero("gates", 1, renorm=True)], want=["blocks.1.gates"])["gates", 1] == 0).all()
    with pytest.raises(BadEdit, match="renorm"):
        logits(zero("O", 1, renorm=True))


def test_one_expert_off_for_one_token_changes_that_tokens_outputs_alone(base: Run) -> None:
    e = int(base["experts", 1][1, 4, 0])
    run = MODEL.run(TOKENS, edits=[zero("gates", 1, e=e, B=1, T=4)], want=["blocks.1.x_next"])
    moved = (run["x_next", 1] != base["x_next", 1]).any(-1)
    assert moved.nonzero().tolist() == [[1, 4]]


def test_an_excluded_expert_is_replaced_by_the_next_and_gates_are_made_anew(base: Run) -> None:
    e = int(base["experts", 1][0, 3, 0])
    run = MODEL.run(TOKENS, edits=[exclude(1, e)], want=["blocks.1.experts", "blocks.1.gates", "blocks.1.affinity"])
    score = base["choice_score", 1].clone()
    score[..., e] = -torch.inf
    expected = score.topk(DIMS.k).indices
    assert torch.equal(run["experts", 1].sort().values, expected.sort().values)
    chosen = base["affinity", 1].gather(-1, run["experts", 1])
    close(run["gates", 1], DIMS.scaling * chosen / chosen.sum(-1, keepdim=True), 1e-6)
    assert run["gates", 1].sum(-1).allclose(torch.tensor(DIMS.scaling))


def test_too_many_excluded_experts_are_refused() -> None:
    with pytest.raises(BadEdit, match="fewer than 3 experts are left"):
        logits(exclude(1, range(10)))


NONE = float("-inf")
BEST = 5.0 * (torch.arange(16) // 4 < 2)
"""Makes the first two groups the best."""
GROUPS = HookedModel(random_weights(replace(DIMS, e=16, k=5, n_group=4, topk_group=2), 1))
"""Four experts a group, of which a token may choose from two."""
TOO_FEW: dict[str, tuple[HookedModel, list[Edit]]] = {
    "all": (MODEL, [set_to("choice_score", 1, value=NONE)]),
    "all but two": (MODEL, [set_to("choice_score", 1, value=NONE, e=range(10))]),
    "at a place": (MODEL, [set_to("choice_score", 1, value=NONE, e=range(10), T=3, B=1)]),
    "by a tensor": (MODEL, [set_to("choice_score", 1, value=torch.tensor([0.0] * 2 + [NONE] * 10))]),
    "affinity": (MODEL, [set_to("affinity", 1, value=NONE, e=range(10))]),
    "bias": (MODEL, [set_to("blocks.1.b", value=NONE, e=range(10))]),
    "two excluded one after the other": (MODEL, [exclude(1, range(6)), exclude(1, range(6, 10))]),
    "two kinds": (MODEL, [exclude(1, range(6)), set_to("choice_score", 1, value=NONE, e=range(6, 10))]),
    "two sites": (MODEL, [set_to("affinity", 1, value=NONE, e=range(6)), exclude(1, range(6, 10))]),
    "what was excluded, times nothing": (MODEL, [exclude(1, 3), scale("choice_score", 1, factor=0.0)]),
    "a function": (
        MODEL,
        [edit("choice_score", lambda v: v.masked_fill(v < v.topk(2).values[..., -1:], NONE), block=1)],
    ),
    "one a group": (GROUPS, [exclude(1, [e for e in range(16) if e % 4])]),
    "of the best groups one": (GROUPS, [exclude(1, [0, 1, 4, 5, 8, 9, 12]), add("choice_score", 1, direction=BEST)]),
}


@pytest.mark.parametrize("case", TOO_FEW)
def test_edits_of_the_router_that_leave_a_token_too_few_experts_are_refused(case: str) -> None:
    """In a run, and in a sweep as a cell, or of its base; the message names all of them."""
    model, edits = TOO_FEW[case]
    cell, plain = Cell(tuple(edits)), Live(TOKENS)
    ways: list[Callable[[], Any]] = [
        lambda: model.run(TOKENS, edits=edits),
        lambda: sweep(model, plain, [Cell((zero("O", 1),)), cell], lambda *_: None, whole=["blocks.1.x_next"]),
    ]
    if not any(one.tensor == "blocks.1.b" for one in edits):
        base = Live(TOKENS, edits=edits)
        ways.append(lambda: sweep(model, base, [Cell((zero("O", 1),))], lambda *_: None, whole=["blocks.1.x_next"]))
    for way in ways:
        with pytest.raises(BadEdit, match=rf"fewer than {model.dims.k} experts are left") as error:
            way()
        last_two = [edits[-1]] if case in ("all", "at a place") else edits
        assert all(str(one) in str(error.value) for one in last_two) or len(edits) == 1


def test_as_many_experts_as_a_token_takes_may_be_left() -> None:
    """Never a forbidden one is chosen; by affinity alone nothing is forbidden."""
    for change in (
        set_to("choice_score", 1, value=NONE, e=[e for e in range(12) if e not in (2, 7, 9)]),
        set_to("affinity", 1, value=NONE, e=[e for e in range(12) if e not in (2, 7, 9)]),
    ):
        run = MODEL.run(TOKENS, edits=[change], want=["blocks.1.experts"])
        assert run["experts", 1].sort().values.tolist() == [[[2, 7, 9]] * 7] * 3
    run = MODEL.run(TOKENS, edits=[set_to("router_logits", 1, value=NONE)], want=["blocks.1.experts"])
    best = WEIGHTS.read(1, "b").topk(3).indices.sort().values.tolist()
    assert run["experts", 1].sort().values.tolist() == [[best] * 7] * 3
    in_two = [0, 1, 2, 3, 4, 5]
    groups = GROUPS.run(TOKENS, edits=[exclude(1, [e for e in range(16) if e not in in_two])], want="blocks.1.experts")
    assert set(groups["experts", 1].flatten().tolist()) <= set(in_two)


def test_forced_experts_get_gates_from_their_own_affinities(base: Run) -> None:
    run = MODEL.run(TOKENS, edits=[force(1, [2, 5, 7], T=3)], want=["blocks.1.experts", "blocks.1.gates"])
    assert run["experts", 1][:, 3].tolist() == [[2, 5, 7]] * 3
    chosen = base["affinity", 1][:, 3, [2, 5, 7]]
    close(run["gates", 1][:, 3], DIMS.scaling * chosen / chosen.sum(-1, keepdim=True), 1e-6)
    assert torch.equal(run["experts", 1][:, :3], base["experts", 1][:, :3])
    for bad, why in (([1, 1, 2], "named twice"), ([1, 2], "2 are named"), ([1, 2, 99], "0 to 11")):
        with pytest.raises((BadEdit, OutOfRange), match=why):
            logits(force(1, bad))


# ---- 9, 10: freezing, routing agreement ------------------------------------------------------------------------------


def test_frozen_experts_hold_the_choice_and_recompute_gates(base: Run) -> None:
    change = add("x_n", 1, direction=torch.randn(DIMS.d, generator=torch.Generator().manual_seed(1)), alpha=2.0)
    free = MODEL.run(TOKENS, edits=[change], want=["blocks.1.experts"], base=base)
    assert free.flips
    assert free.routing_agreement < 1
    run = MODEL.run(TOKENS, edits=[change, freeze("experts")], want=["blocks.1.gates", "blocks.1.affinity"], base=base)
    assert (run.flips, run.routing_agreement, run.frozen) == (0, 1.0, ("experts",))
    for block in (1, 2):
        assert torch.equal(run["experts", block], base["experts", block])
    chosen = run["affinity", 1].gather(-1, base["experts", 1])
    close(run["gates", 1], DIMS.scaling * chosen / chosen.sum(-1, keepdim=True), 1e-6)
    assert not torch.equal(run["gates", 1], base["gates", 1])
    both = MODEL.run(TOKENS, edits=[change, freeze("experts"), freeze("gates")], want=["blocks.2.gates"], base=base)
    assert torch.equal(both["gates", 2], base["gates", 2])


def test_frozen_patterns_let_values_move(base: Run) -> None:
    change = scale("x_n", 1, factor=1.5, T=2)
    run = MODEL.run(TOKENS, edits=[change, freeze("A")], want=["blocks.1.A", "blocks.2.A", "blocks.1.O"])
    assert torch.equal(run["A", 1], base["A", 1])
    assert torch.equal(run["A", 2], base["A", 2])
    assert not torch.equal(run["O", 1], base["O", 1])


def test_frozen_norms(base: Run) -> None:
    names = [f"blocks.{b}.{n}" for b in (1, 2) for n in ("s_attn", "s_Q", "s_KV", "s_ffn")] + ["s_final"]
    run = MODEL.run(TOKENS, edits=[zero("delta_attn", 1), freeze("s_*")], want=[*names, "logits"])
    assert all(torch.equal(run[name], base[name]) for name in names)
    assert not torch.equal(run["logits"], base["logits"])


def test_agreement_is_of_sets_over_the_places_that_the_edit_reaches(base: Run) -> None:
    change = add("x_mid", 1, direction=torch.randn(DIMS.d, generator=torch.Generator().manual_seed(2)), alpha=3.0, T=4)
    run = MODEL.run(TOKENS, edits=[change], base=base)
    same = total = 0
    for block, places in ((1, [4]), (2, [4, 5, 6])):
        for b in range(3):
            for t in places:
                ours, theirs = (set(r["experts", block][b, t].tolist()) for r in (run, base))
                same, total = same + len(ours & theirs), total + DIMS.k
    assert run.routing_agreement == same / total
    assert run.flips == total - same > 0


# ---- 11: composition -------------------------------------------------------------------------------------------------


def test_edits_act_in_the_cards_order_each_on_the_edited_run(source: Run) -> None:
    made = logits(zero("O", 1, h=0), scale("delta_attn", 1, factor=2.0), patch("x_n", 1, source=source, T=2))

    def swap(value: Tensor) -> Tensor:
        value[:, 2] = source["x_n", 1][:, 2]
        return value

    def off(value: Tensor) -> Tensor:
        value[:, :, 0] = 0
        return value

    assert torch.equal(made, by_hand(b1_x_n=swap, b1_O=off, b1_delta_attn=lambda v: v * 2.0))


def test_at_one_site_changes_compose_in_the_order_given() -> None:
    one = torch.full((DIMS.d,), 0.3)
    first = logits(scale("x_mid", 1, factor=2.0), add("x_mid", 1, direction=one))
    assert torch.equal(first, by_hand(b1_x_mid=lambda v: v * 2.0 + one))
    second = logits(add("x_mid", 1, direction=one), scale("x_mid", 1, factor=2.0))
    assert torch.equal(second, by_hand(b1_x_mid=lambda v: (v + one) * 2.0))
    assert torch.equal(
        logits(zero("x_mid", 1), add("x_mid", 1, direction=one)), by_hand(b1_x_mid=lambda v: v * 0 + one)
    )


def test_replacing_edits_that_overlap_are_refused_and_others_not(source: Run) -> None:
    with pytest.raises(BadEdit, match="overlap"):
        logits(zero("O", 1), patch("O", 1, source=source, h=2))
    with pytest.raises(BadEdit, match="overlap"):
        logits(scale("O", 1, factor=2), zero("O", 1, T=3))
    apart = logits(zero("O", 1, h=0), patch("O", 1, source=source, h=2))

    def change(value: Tensor) -> Tensor:
        value[:, :, 0], value[:, :, 2] = 0, source["O", 1][:, :, 2]
        return value

    assert torch.equal(apart, by_hand(b1_O=change))


def test_an_edit_that_another_cuts_off_is_refused() -> None:
    with pytest.raises(BadEdit, match="would do nothing"):
        logits(scale("choice_score", 1, factor=-1.0), freeze("experts"))
    with pytest.raises(BadEdit, match="would do nothing"):
        logits(zero("S", 1), zero("O", 1))
    logits(scale("router_logits", 1, factor=-1.0), freeze("experts"))  # its gates still move


def test_an_edit_that_a_later_stream_replaces_is_refused(base: Run) -> None:
    later = patch("x_n", 2, source=base)
    for change in (zero("O", 1), zero("x_next", 1), scale("x_0", factor=2.0), scale("W_O", 0, factor=2.0)):
        with pytest.raises(BadEdit, match="would do nothing"):
            logits(change, later)
    logits(patch("x_n", 2, source=base, T=3), zero("O", 1))  # other positions pass
    logits(later, zero("s_final"))


def test_what_is_no_number_is_refused() -> None:
    for make in (
        lambda: scale("O", 1, factor=float("nan")),
        lambda: add("O", 1, direction=[float("inf")]),
        lambda: noise("O", 1, std=float("nan")),
        lambda: set_to("O", 1, value=float("nan")),
    ):
        with pytest.raises(BadEdit, match=r"not finite|NaN"):
            make()
    run = MODEL.run(TOKENS, edits=[set_to("choice_score", 1, value=-torch.inf, e=2)], want=["blocks.1.experts"])
    assert not (run["experts", 1] == 2).any()


def test_one_edit_may_stand_alone() -> None:
    assert torch.equal(MODEL.run(TOKENS, edits=zero("O", 1))["logits"], logits(zero("O", 1)))


# ---- 12, 13: readers and subspaces -----------------------------------------------------------------------------------


def test_only_the_named_readers_see_the_edit(base: Run, source: Run) -> None:
    change = patch("c_KV_hat", 1, source=source, into="k_C")
    run = MODEL.run(TOKENS, edits=[change], want=["blocks.1.k_C", "blocks.1.v", "logits"])
    assert torch.equal(run["k_C", 1], source["k_C", 1])
    assert torch.equal(run["v", 1], base["v", 1])
    assert torch.equal(run["logits"], by_hand(b1_k_C=lambda v: source["k_C", 1]))
    past = logits(patch("x_n", 1, source=source, into=("s_attn", "n_attn")))
    assert torch.equal(past, by_hand(b1_n_attn=lambda v: source["n_attn", 1]))
    rest = logits(patch("x_n", 1, source=source, into="x_mid"))
    assert torch.equal(rest, by_hand(b1_x_mid=lambda v: source["x_n", 1] + base["delta_attn", 1]))


def test_readers_split_under_chunked_attention_too(base: Run, source: Run) -> None:
    made = logits(patch("Q", 1, source=source, into="S"))
    assert torch.equal(made, logits(patch("Q", 1, source=source)))


def test_a_name_that_does_not_read_it_is_an_error_that_lists_them() -> None:
    with pytest.raises(BadEdit, match=r"v does not read blocks\.1\.c_KV directly; its readers are s_KV, n_KV"):
        logits(zero("c_KV", 1, into="v"))


def test_a_subspace_limits_what_changes(base: Run, source: Run) -> None:
    U = torch.randn(3, DIMS.d, generator=torch.Generator().manual_seed(5))
    run = MODEL.run(TOKENS, edits=[patch("x_mid", 1, source=source, within=U)], want=["blocks.1.x_mid"])
    Q = torch.linalg.qr(U.double().T).Q.T.float()
    close(run["x_mid", 1] @ Q.T, source["x_mid", 1] @ Q.T)
    close(run["x_mid", 1] - run["x_mid", 1] @ Q.T @ Q, base["x_mid", 1] - base["x_mid", 1] @ Q.T @ Q)
    out = MODEL.run(TOKENS, edits=[project_out("x_mid", 1, span=U)], want=["blocks.1.x_mid"])
    close(out["x_mid", 1], base["x_mid", 1] - base["x_mid", 1] @ Q.T @ Q)
    close(logits(zero("x_mid", 1, within=U)), logits(project_out("x_mid", 1, span=U)))
    with pytest.raises(ShapeMismatch, match="width 5"):
        logits(project_out("x_mid", 1, span=torch.eye(5)))
    with pytest.raises(BadEdit, match="span nothing"):
        project_out("x_mid", 1, span=torch.zeros(2, DIMS.d))


# ---- 15: weights -----------------------------------------------------------------------------------------------------


def test_weight_edits_act_and_leave_the_weights_alone() -> None:
    before = {key: t.clone() for key, t in WEIGHTS.tensors.items()}
    close(logits(scale("W_2", 0, factor=0.5)), edited_weights("W_2", 0, lambda w: w * 0.5)(TOKENS), 0)
    made = logits(patch("W_1_e", 1, source=OTHER.decoder.weights, e=4))

    def swap(w: Tensor) -> Tensor:
        w[4] = OTHER.decoder.weights.read(1, "W_1_e")[4]
        return w

    close(made, edited_weights("W_1_e", 1, swap)(TOKENS), 0)
    close(
        logits(zero("model.layers.1.self_attn.o_proj.weight", d=3)),
        edited_weights("W_O", 1, lambda w: w.index_fill(1, torch.tensor(3), 0))(TOKENS),
        0,
    )
    assert all(torch.equal(WEIGHTS.tensors[key], t) for key, t in before.items())


@pytest.mark.parametrize(
    "weight", ["blocks.2.W_O", "blocks.0.W_2", "blocks.1.W_g", "blocks.1.W_2_e", "W_E", "W_U", "w_final"]
)
def test_a_weight_edit_starts_from_the_base_before_it(weight: str, base: Run) -> None:
    change = scale(weight, factor=-0.5)
    assert torch.equal(logits(change, base=base), logits(change))
    assert not torch.equal(logits(change), base["logits"])


def test_what_a_weight_has_not_is_refused(base: Run) -> None:
    with pytest.raises(BadEdit, match="a weight has no readers"):
        logits(mean("W_O", 1, source=base))
    with pytest.raises(UnknownDim, match="no dim 'T'"):
        logits(zero("W_O", 1, T=2))


# ---- 17: means and resamples -----------------------------------------------------------------------------------------


def test_a_mean_leaves_pads_out() -> None:
    keep = torch.ones(80, 9, dtype=torch.bool)
    keep[::2, 5:] = False
    padded = MODEL.run(REFERENCE, keep, want=["blocks.1.O"])
    run = MODEL.run(TOKENS, edits=[mean("O", 1, source=padded)], want=["blocks.1.O"])
    close(run["O", 1][0, 0], padded["O", 1][keep].mean(0), 1e-5)
    run = MODEL.run(TOKENS, edits=[mean("O", 1, source=padded, over="position")], want=["blocks.1.O"])
    close(run["O", 1][0, 6], padded["O", 1][1::2, 6].mean(0), 1e-5)


def test_the_mean_of_an_experts_tensor_is_over_tokens_that_chose_it(base: Run, reference: Run) -> None:
    e = int(base["experts", 1][0, 3, 0])
    run = MODEL.run(TOKENS, edits=[mean("y_e", 1, source=reference, e=e)], want=["blocks.1.y_e"])
    chose = reference["experts", 1] == e
    close(run["y_e", 1][0, 3, 0], reference["y_e", 1][chose].mean(0), 1e-5)
    lone = MODEL.run(REFERENCE[:1, :1], want=["blocks.1.y_e"])
    absent = next(int(x) for x in base["experts", 1].unique() if x not in lone["experts", 1])
    with pytest.raises(Unmatched, match=f"no reference token chose expert {absent}"):
        logits(mean("y_e", 1, source=lone, e=absent))


def test_draws_are_seeded(reference: Run) -> None:
    one, same, other = (logits(resample("O", 1, source=reference, seed=s)) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    one, same, other = (logits(noise("O", 1, std=1.0, seed=s)) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# ---- 19: functions and dictionaries ----------------------------------------------------------------------------------


def test_a_function_sees_a_clone_and_must_give_its_kind_back(base: Run) -> None:
    def spoil(value: Tensor) -> None:
        value.zero_()

    with pytest.warns(UserWarning, match=r"spoil wrote into its copy of blocks\.1\.Q_C and returned None"):
        assert torch.equal(logits(edit("Q_C", spoil, block=1)), base["logits"])
    made = logits(edit("O", lambda v: v * 2, "double", block=1, h=1))
    assert torch.equal(made, logits(scale("O", 1, factor=2.0, h=1)))
    for bad in (lambda v: v[:1], lambda v: v.double(), lambda v: 3):
        with pytest.raises(ShapeMismatch, match="double"):
            logits(edit("O", bad, "double", block=1))
    assert edit("O", spoil, block=1).label == "spoil on O of block 1"


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> Dictionary:
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(6)
    file = tmp_path_factory.mktemp("sae") / "sae.safetensors"
    parts = {"W_enc": (DIMS.d, 64), "b_enc": (64,), "W_dec": (64, DIMS.d), "b_dec": (DIMS.d,), "threshold": (64,)}
    save_file({name: torch.randn(shape, generator=g) * 0.3 for name, shape in parts.items()}, file)
    return Dictionary.load(file)


def test_an_untouched_splice_changes_nothing(base: Run, dictionary: Dictionary) -> None:
    assert torch.equal(logits(splice("x_mid", 1, dictionary=dictionary)), base["logits"])


def test_latents_are_edited_with_the_error_kept(base: Run, dictionary: Dictionary) -> None:
    x = base["x_mid", 1]
    z = dictionary.encode(x)
    feature = int((z > 0).float().mean((0, 1)).argmax())
    run = MODEL.run(TOKENS, edits=[zero("x_mid", 1, feature=feature, through=dictionary)], want=["blocks.1.x_mid"])
    close(run["x_mid", 1], x - z[..., feature, None] * dictionary.W_dec[feature], 1e-5)
    with pytest.raises(OutOfRange, match="feature"):
        logits(zero("x_mid", 1, feature=64, through=dictionary))
    with pytest.raises(BadEdit, match="give through="):
        logits(zero("x_mid", 1, feature=3))
    with pytest.raises(ShapeMismatch, match="reads 40"):
        logits(zero("g_s", 1, feature=3, through=dictionary))


def test_latents_can_be_patched_from_a_source(base: Run, source: Run, dictionary: Dictionary) -> None:
    run = MODEL.run(
        TOKENS,
        edits=[patch("x_mid", 1, source=source, feature=[1, 2], T=4, through=dictionary)],
        want=["blocks.1.x_mid"],
    )
    z, theirs = (dictionary.encode(r["x_mid", 1][:, 4]) for r in (base, source))
    change = (theirs - z)[:, [1, 2]] @ dictionary.W_dec[[1, 2]]
    close(run["x_mid", 1][:, 4], base["x_mid", 1][:, 4] + change, 1e-5)


@pytest.mark.parametrize("name", ["W_UQ", "W_QR"])
def test_without_a_query_latent_the_input_axis_of_a_weight_is_the_streams(name: str) -> None:
    weights = random_weights(replace(DIMS, r_q=None), 3)
    model = HookedModel(weights)
    blanked = {key: tensor.clone() for key, tensor in weights.tensors.items()}
    blanked[1, name][[2, 5]] = 0
    made = model.run(TOKENS, edits=[zero(name, 1, d=[2, 5])])["logits"]
    assert torch.equal(made, HookedModel(InMemory(weights.dims, blanked)).run(TOKENS)["logits"])
    assert not torch.equal(made, model.run(TOKENS)["logits"])
    with pytest.raises(UnknownDim, match=rf"{name} has no dim 'r_q'; it has d \(h "):
        model.run(TOKENS, edits=[zero(name, 1, r_q=2)])


# ---- values ----------------------------------------------------------------------------------------------------------


def test_both_the_value_seen_and_the_one_that_would_have_been_are_at_hand(base: Run) -> None:
    run = MODEL.run(TOKENS, edits=[zero("O", 1, h=1), scale("delta_attn", 1, factor=2.0)], want=["blocks.1.O"])
    assert (run["O", 1][:, :, 1] == 0).all()
    assert torch.equal(run.natural["O", 1], base["O", 1])
    assert not torch.equal(run.natural["delta_attn", 1], base["delta_attn", 1]), "it follows from the edited O"


def test_edits_are_frozen_comparable_values_that_print_as_sentences(source: Run) -> None:
    a, b = add("O", 1, direction=[1.0, 2.0], alpha=2), add("O", 1, direction=[1.0, 2.0], alpha=2)
    assert a == b
    assert hash(a) == hash(b)
    assert a != add("O", 1, direction=[1.0, 3.0], alpha=2)
    with pytest.raises(AttributeError):
        a.block = 2  # type: ignore[misc]
    labels = {
        zero("Q_R", 3, h=5, T=-1): "zero Q_R of block 3 at h=5, T=-1",
        noise("x_0", std=0.5, relative=True): "add noise of std 0.5 × its spread to x_0",
        a: "add 2 × a direction to O of block 1",
        scale("A", 2, factor=0.5, S=slice(0, 3)): "scale A of block 2 at S=0:3 by 0.5",
        set_to("g", 0, value=1.0): "set g of block 0 to 1",
        freeze("s_*"): "freeze s_* to the base",
        knock_out(1, S="S1"): "knock out edges of S of block 1 at S=S1",
        exclude(1, e=3): "exclude experts: -inf in choice_score of block 1 at e=3",
        force(1, [1, 2]): "force experts 1, 2 in experts of block 1",
        patch("c_KV_hat", 1, source=source, into="k_C"): "patch c_KV_hat of block 1 from the source into k_C",
    }  # fmt: skip
    for change, sentence in labels.items():
        assert str(change) == sentence


def test_a_function_is_called_once_for_readers_that_see_the_same() -> None:
    calls: list[int] = []

    def count(value: Tensor) -> Tensor:
        calls.append(1)
        return value * 2

    logits(edit("x_mid", count, block=1))
    assert len(calls) == 1
