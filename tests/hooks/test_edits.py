"""What an edit does, against transformers with the same thing done by other means, or against values put in by hand."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hooks import Cell, Edit, HookedModel, Live, Run, Site, freeze, knock_out, patch, resample, scale, sweep, zero
from probe import ProbeError, random_weights
from probe.errors import BadEdit, OutOfRange, UnknownDim, UnknownTensor, Unmatched
from tests.hooks.small import (
    DENSE,
    DIMS,
    EDITABLE,
    LAST,
    LENGTHS,
    MODEL,
    MOE,
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
    theirs,
)

OPPOSITE = {"left": "right", "right": "left"}


@pytest.fixture(scope="module")
def base() -> Run:
    return everything()


@pytest.fixture(scope="module")
def source() -> Run:
    return everything(REFERENCE)


def one(edit: Edit, *want: str, **kwargs: Any) -> Run:
    return MODEL.run(TOKENS, want=want or ("logits",), edits=[edit], **kwargs)


def logits(*edits: Edit) -> Tensor:
    return MODEL.run(TOKENS, edits=edits)["logits"]


# ---- zero, against transformers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", range(DIMS.h))
@pytest.mark.parametrize("block", range(DIMS.blocks))
def test_a_head_is_switched_off_as_by_zeroing_its_columns_of_o_proj(block: int, head: int) -> None:
    def columns(state: dict[str, Tensor]) -> None:
        state[f"model.layers.{block}.self_attn.o_proj.weight"][:, head * DIMS.v : (head + 1) * DIMS.v] = 0

    close(logits(zero("O", block, h=head)), theirs(columns))


@pytest.mark.parametrize("expert", range(DIMS.e))
@pytest.mark.parametrize("tensor", ["gates", "y_e", "delta_experts"])
def test_an_expert_is_switched_off_as_by_zeroing_its_down_projection(tensor: str, expert: int, base: Run) -> None:
    """The others keep their gates. Where nobody chose it, nothing is touched and nothing moves."""

    def silent(state: dict[str, Tensor]) -> None:
        state["model.layers.1.mlp.experts.down_proj"][expert] = 0

    run = one(zero(tensor, MOE, e=expert))
    close(run["logits"], theirs(silent))
    chose = int((base["experts", MOE] == expert).sum())
    assert run.touched == (chose,)
    assert torch.equal(run["logits"], base["logits"]) == (chose == 0)


def test_some_expert_is_chosen_by_some_and_some_by_nobody(base: Run) -> None:
    counts = torch.bincount(base["experts", MOE].flatten(), minlength=DIMS.e)
    assert counts.min() == 0
    assert counts.max() > 2


def cut(*index: Any) -> Callable[[Tensor], None]:
    """Zero these numbers of a module's output."""

    def change(x: Tensor) -> None:
        x[index] = 0

    return change


def cut_by_head(*index: Any) -> Callable[[Tensor], None]:
    """The same, of a projection that holds all heads, [B T h ·]."""
    return lambda x: cut(*index)(x.view(B, T, DIMS.h, -1))


ATTN = "model.layers.1.self_attn."
DOWN, QUERIES, KEYS_VALUES = ATTN + "kv_a_proj_with_mqa", ATTN + "q_b_proj", ATTN + "kv_b_proj"
ALL, N, RKV = slice(None), DIMS.n, DIMS.r_kv
BY_HOOK: list[tuple[Edit, str, Callable[[Tensor], None]]] = [
    (zero("c_Q", MOE, r_q=slice(0, 5)), ATTN + "q_a_proj", cut(..., slice(0, 5))),
    (zero("c_KV", MOE), DOWN, cut(..., slice(0, RKV))),
    (zero("c_KV", MOE, T=2, r_kv=[3, -1]), DOWN, cut(ALL, 2, [3, RKV - 1])),
    (zero("k_R", MOE), DOWN, cut(..., slice(RKV, None))),
    (zero("k_pe", MOE, r=5, B=1), DOWN, cut(1, ALL, RKV + 5)),
    (zero("q_C", MOE, h=1), QUERIES, cut_by_head(..., 1, slice(0, N))),
    (zero("q_C", MOE, n=2), QUERIES, cut_by_head(..., 2)),
    (zero("q_C", MOE, h=[0, 2], n=[1, 11]), QUERIES, cut_by_head(..., slice(0, 3, 2), [1, 11])),
    (zero("Q_C", MOE, h=2, T=-1), QUERIES, cut_by_head(ALL, -1, 2, slice(0, N))),
    (zero("q_pe", MOE, h=0, r=[2, 3]), QUERIES, cut_by_head(..., 0, [N + 2, N + 3])),
    (zero("Q_R", MOE, h=0, r=[1, 5]), QUERIES, cut_by_head(..., 0, [N + 2, N + 3])),
    (zero("k_C", MOE, h=1, n=slice(4, None)), KEYS_VALUES, cut_by_head(..., 1, slice(4, N))),
    (zero("K_C", MOE, T=[0, 3]), KEYS_VALUES, cut_by_head(ALL, [0, 3], ALL, slice(0, N))),
    (zero("v", MOE, h=2), KEYS_VALUES, cut_by_head(..., 2, slice(N, None))),
    (zero("v", MOE, v=-1), KEYS_VALUES, cut_by_head(..., -1)),
    (zero("V", MOE, S=slice(1, 3), v=0), KEYS_VALUES, cut_by_head(ALL, slice(1, 3), ALL, N)),
    (zero("x_attn", DENSE, d=[0, 31]), "model.layers.0.input_layernorm", cut(..., [0, 31])),
    (zero("x_ffn", MOE, T=[1, 4]), "model.layers.1.post_attention_layernorm", cut(ALL, [1, 4])),
    (zero("delta_attn", LAST), "model.layers.2.self_attn.o_proj", cut(...)),
    (zero("O", MOE, h=1, v=3, T=4), "<" + ATTN + "o_proj", cut(ALL, 4, DIMS.v + 3)),
    (zero("g", DENSE, f=7), "model.layers.0.mlp.gate_proj", cut(..., 7)),
    (zero("u", DENSE, f=slice(-3, None)), "model.layers.0.mlp.up_proj", cut(..., slice(-3, None))),
    (zero("a", DENSE, f=9), "model.layers.0.mlp.act_fn", cut(..., 9)),
    (zero("h", DENSE, f=[0, -1], T=0), "<model.layers.0.mlp.down_proj", cut(ALL, 0, [0, -1])),
    (zero("delta_ffn", DENSE, B=[0, 2]), "model.layers.0.mlp", cut([0, 2])),
    (zero("delta_ffn", MOE), "model.layers.1.mlp", cut(...)),
    (zero("delta_routed", MOE, T=3), "model.layers.1.mlp.experts", lambda x: cut(ALL, 3)(x.view(B, T, -1))),
    (zero("g_s", MOE, m_s=3), "model.layers.1.mlp.shared_experts.gate_proj", cut(..., 3)),
    (zero("u_s", MOE, m_s=-3), "model.layers.1.mlp.shared_experts.up_proj", cut(..., -3)),
    (zero("h_s", MOE, T=1), "<model.layers.1.mlp.shared_experts.down_proj", cut(ALL, 1)),
    (zero("delta_shared", LAST), "model.layers.2.mlp.shared_experts", cut(...)),
    (zero("x_next", DENSE, d=4), "model.layers.0", cut(..., 4)),
    (zero("x_n", MOE, d=4), "model.layers.0", cut(..., 4)),
    (zero("x_0", T=0), "model.embed_tokens", cut(ALL, 0)),
    (zero("x_final", d=slice(None, None, 2)), "model.norm", cut(..., slice(None, None, 2))),
    (zero("logits", V=[0, -1]), "lm_head", cut(..., [0, -1])),
    (zero("s_attn", MOE), "model.layers.1.input_layernorm", cut(...)),
    (zero("s_KV", MOE, T=1), ATTN + "kv_a_layernorm", cut(ALL, 1)),
    (zero("n_Q", MOE, r_q=0), ATTN + "q_a_layernorm", cut(..., 0)),
]
"""An edit, the module of transformers' that makes those numbers, and how to zero them there."""


@pytest.mark.parametrize(("edit", "module", "change"), BY_HOOK, ids=lambda it: it.label if isinstance(it, Edit) else "")
def test_zero_equals_zeroing_the_same_numbers_in_transformers(edit: Edit, module: str, change, base: Run) -> None:
    made = logits(edit)
    close(made, theirs(hook=(module, change)))
    assert (made - base["logits"]).abs().max() > 1e-3


def test_zeroing_one_neuron_of_one_expert_is_zeroing_its_weights(base: Run) -> None:
    e = int(base["experts", MOE].flatten().mode().values)

    def column(name: str, index: Any) -> Callable[[dict[str, Tensor]], None]:
        def change(state: dict[str, Tensor]) -> None:
            state[f"model.layers.1.mlp.experts.{name}"][e][index] = 0

        return change

    m = DIMS.m
    everywhere = slice(None)
    for edit, change in [
        (zero("h_e", MOE, e=e, m=3), column("down_proj", (everywhere, 3))),
        (zero("g_e", MOE, e=e, m=[3, 5]), column("gate_up_proj", [3, 5])),
        (zero("a_e", MOE, e=e, m=-1), column("gate_up_proj", m - 1)),
        (zero("u_e", MOE, e=e, m=3), column("gate_up_proj", m + 3)),
        (zero("y_e", MOE, e=e, d=4), column("down_proj", 4)),
        (zero("delta_experts", MOE, e=e, d=[4, 6]), column("down_proj", [4, 6])),
    ]:
        made = logits(edit)
        close(made, theirs(change))
        assert (made - base["logits"]).abs().max() > 1e-5, edit.label


def test_zeroing_a_heads_query_makes_it_attend_uniformly(base: Run) -> None:
    pattern = one(zero("Q", MOE, h=1), "blocks.1.A")["A", MOE]
    uniform = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    close(pattern[:, 1], uniform.expand(B, T, T))
    assert torch.equal(pattern[:, [0, 2]], base["A", MOE][:, [0, 2]])


# ---- scores and pattern ----------------------------------------------------------------------------------------------


def test_zero_scores_touch_allowed_pairs_only_and_the_mask_stays(base: Run) -> None:
    run = one(zero("S", MOE), "blocks.1.S", "blocks.1.A", "logits")
    allowed = torch.ones(T, T).tril().bool()
    assert not run["S", MOE][..., allowed].any()
    assert torch.equal(run["S", MOE][..., ~allowed], base["S", MOE][..., ~allowed])
    assert not run["A", MOE][..., ~allowed].any()
    assert run.touched == (B * DIMS.h * T,)


@pytest.mark.parametrize(
    "edit", [zero("S", MOE), zero("S", MOE, h=1), zero("A", MOE, S=2), zero("S", MOE, T=4)], ids=str
)
def test_the_future_stays_invisible(edit: Edit) -> None:
    other = TOKENS.clone()
    other[:, -1] = (other[:, -1] + 1) % DIMS.V
    now, then = (MODEL.run(tokens, edits=[edit])["logits"] for tokens in (TOKENS, other))
    close(now[:, :-1], then[:, :-1])
    assert (now[:, -1] - then[:, -1]).abs().max() > 1e-3


def test_the_pattern_is_not_renormalised(base: Run) -> None:
    run = one(zero("A", MOE, S=2, h=[0, 2]), "blocks.1.A", "blocks.1.O")
    by_hand = base["A", MOE].clone()
    by_hand[:, [0, 2], :, 2] = 0
    assert torch.equal(run["A", MOE], by_hand)
    close(run["O", MOE], torch.einsum("bhts,bshv->bthv", by_hand, base["V", MOE]))
    assert (run["A", MOE][:, 0, 2:].sum(-1) < 0.999).all()
    assert run.touched == (B * 2 * (T - 2),), "queries before the key are not allowed to see it"


def test_one_edge_of_the_pattern(base: Run) -> None:
    run = one(zero("A", MOE, T=4, S=1, h=2), "blocks.1.A")
    changed = (run["A", MOE] != base["A", MOE]).nonzero()
    assert changed.tolist() == [[b, 2, 4, 1] for b in range(B)]
    assert run.touched == (B,)


def test_an_edge_that_the_mask_forbids_touches_nothing(base: Run) -> None:
    run = one(zero("S", MOE, T=1, S=4))
    assert run.touched == (0,)
    assert torch.equal(run["logits"], base["logits"])


# ---- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "places"),
    [
        ({"T": 2}, [2]),
        ({"T": -1}, [T - 1]),
        ({"T": [1, 3, 3]}, [1, 3]),
        ({"T": (0, -1)}, [0, T - 1]),
        ({"T": range(1, 3)}, [1, 2]),
        ({"T": slice(1, 3)}, [1, 2]),
        ({"T": slice(-2, None)}, [T - 2, T - 1]),
        ({"T": slice(None, None, 2)}, [0, 2, 4]),
        ({"T": slice(0, T)}, list(range(T))),
        ({"T": np.int64(2)}, [2]),
        ({"T": np.array([0, 4])}, [0, 4]),
        ({"T": torch.tensor(3)}, [3]),
        ({"T": torch.tensor([3, 4])}, [3, 4]),
    ],
    ids=str,
)
def test_every_way_to_write_positions(where: dict[str, Any], places: list[int], base: Run) -> None:
    run = one(zero("delta_attn", MOE, **where), "blocks.1.delta_attn")
    by_hand = base["delta_attn", MOE].clone()
    by_hand[:, places] = 0
    assert torch.equal(run["delta_attn", MOE], by_hand)
    assert run.touched == (B * len(places),)


def test_lists_in_several_dims_are_a_product(base: Run) -> None:
    run = one(zero("O", MOE, T=[1, 2], h=[0, 2], B=0), "blocks.1.O")
    changed = (run["O", MOE] != base["O", MOE]).any(-1).nonzero()
    assert changed.tolist() == [[0, 1, 0], [0, 1, 2], [0, 2, 0], [0, 2, 2]]
    assert run.touched == (4,)


@pytest.mark.parametrize(
    ("tensor", "block", "dim", "size"),
    [
        ("x_n", MOE, "B", B),
        ("x_n", MOE, "T", T),
        ("K", MOE, "S", T),
        ("x_n", MOE, "d", DIMS.d),
        ("c_Q", MOE, "r_q", DIMS.r_q),
        ("c_KV", MOE, "r_kv", DIMS.r_kv),
        ("q_C", MOE, "h", DIMS.h),
        ("q_C", MOE, "n", DIMS.n),
        ("q_pe", MOE, "r", DIMS.r),
        ("Q", MOE, "q", DIMS.n + DIMS.r),
        ("v", MOE, "v", DIMS.v),
        ("g", DENSE, "f", DIMS.f),
        ("affinity", MOE, "e", DIMS.e),
        ("gates", MOE, "e", DIMS.e),
        ("gates", MOE, "k", DIMS.k),
        ("h_e", MOE, "m", DIMS.m),
        ("h_s", MOE, "m_s", DIMS.m_s),
        ("logits", None, "V", DIMS.V),
    ],
)
def test_bounds_are_checked_in_every_dim_and_nothing_is_clipped(tensor, block, dim: str, size: int) -> None:
    for inside in (0, size - 1, -1, -size, slice(0, size), slice(-size, None)):
        one(zero(tensor, block, **{dim: inside}))
    beyond = (size, -size - 1, [0, size], slice(0, size + 1), slice(-size - 1, None), slice(2, 2), slice(2, 1))
    for outside in beyond:
        with pytest.raises(OutOfRange, match=rf"{tensor}: {dim}\b.* has {size}"):
            one(zero(tensor, block, **{dim: outside}))


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda: zero("O", MOE, z=3), UnknownDim, r"'z' is no dim.*Dims are B, T"),
        (lambda: zero("O", MOE, h=True), BadEdit, "h=True"),
        (lambda: zero("O", MOE, h=[True]), BadEdit, "whole number"),
        (lambda: zero("O", MOE, h=1.0), BadEdit, "h=1.0"),
        (lambda: zero("O", MOE, h=[1.7]), BadEdit, "h="),
        (lambda: zero("O", MOE, T=None), BadEdit, "T=None"),
        (lambda: zero("O", MOE, T=[]), BadEdit, "names nothing"),
        (lambda: zero("O", MOE, T=slice(0, 3, 0)), BadEdit, "names nothing"),
        (lambda: zero("O", MOE, T=slice(0, 1.5)), BadEdit, "slice"),
        (lambda: zero("O", "1"), BadEdit, "block='1'"),
    ],
)
def test_what_cannot_be_an_edit_is_refused_when_it_is_made(make, error, why: str) -> None:
    with pytest.raises(error, match=why) as caught:
        make()
    assert isinstance(caught.value, ProbeError)


@pytest.mark.parametrize(
    ("edit", "error", "why"),
    [
        (zero("c_kvv", MOE), UnknownTensor, r"'c_kvv'.*Nearest: c_KV.*k2probe tensors"),
        (zero("O"), UnknownTensor, r"in every block.*blocks\.0\.O"),
        (zero("O", 9), OutOfRange, "block 9 does not exist: this model has blocks 0 to 2"),
        (zero("O", -1), OutOfRange, "block -1 does not exist"),
        (zero("logits", MOE), UnknownTensor, "logits"),
        (zero("blocks.1.O", MOE), UnknownTensor, "blocks.1.O"),
        (zero("g", MOE), UnknownTensor, "name g_e"),
        (zero("mlp.hook_post", MOE), UnknownTensor, "delta_ffn, or h_e and h_s"),
        (zero("self_attn.q_b_proj", MOE), UnknownTensor, "q_C and q_pe"),
        (zero("W_O", MOE, B=1), UnknownDim, r"W_O has no dim 'B'; it has \(h v\) d"),
        (zero("O", MOE, T="S2"), BadEdit, "row 0 has no span 'S2'"),
        (zero("O", MOE, T="3"), BadEdit, "row 0 has no span '3'"),
        (zero("R", MOE), UnknownTensor, "R"),
        (zero("experts", MOE), BadEdit, "zero `gates` to ablate, `exclude` to re-route"),
        (zero("delta_heads", MOE), BadEdit, "edit `O`"),
        (zero("ln1.hook_scale", MOE), BadEdit, r"rms.*blocks\.1\.s_attn"),
        (zero("c_KV", MOE, h=1), UnknownDim, "c_KV has no dim 'h'; it has B T r_kv"),
        (zero("K", MOE, T=1), UnknownDim, "positions are S, not T"),
        (zero("V", MOE, T=1), UnknownDim, "positions are S, not T"),
        (zero("O", MOE, S=1), UnknownDim, "O has no dim 'S'; it has B T h v"),
        (zero("x_n", MOE, e=1), UnknownDim, "x_n has no dim 'e'"),
        (zero("affinity", MOE, k=1), UnknownDim, "affinity has no dim 'k'"),
        (zero("s_attn", MOE, d=1), UnknownDim, "s_attn has no dim 'd'"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(edit: Edit, error, why: str) -> None:
    with pytest.raises(error, match=why) as caught:
        one(edit)
    assert isinstance(caught.value, ProbeError)


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("at", [0, 2, -1, -2, slice(1, 3), slice(-3, None)], ids=str)
@pytest.mark.parametrize("tensor", ["delta_attn", "K", "O", "gates"])
def test_positions_count_each_rows_real_tokens(tensor: str, at, side: str) -> None:
    """-1 is each row's last real one, whatever the padding: as each row gives alone."""
    tokens, keep = padded(ragged(), side)
    edit = zero(tensor, MOE, **{"S" if tensor == "K" else "T": at})
    together = MODEL.run(tokens, keep, edits=[edit])
    alone = [MODEL.run(row[None], edits=[edit]) for row in ragged()]
    for b, run in enumerate(alone):
        close(together["logits"][b][keep[b]], run["logits"][0])
    assert together.touched == (sum(run.touched[0] for run in alone),)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("at", [4, -5, slice(0, 5)], ids=str)
def test_a_row_too_short_is_named(at, side: str) -> None:
    tokens, keep = padded(ragged(), side)
    with pytest.raises(OutOfRange, match=r"T of row 1 \(its real tokens\) has 4"):
        MODEL.run(tokens, keep, edits=[zero("O", MOE, T=at)])
    MODEL.run(tokens, keep, edits=[zero("O", MOE, T=at, B=[0, 2])])  # of these rows, every one has it


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("site", EDITABLE, ids=str)
def test_an_edit_without_positions_leaves_pads_alone(site: Site, side: str) -> None:
    tokens, keep = padded(ragged(), side)
    shape = MODEL.sites.node(site).shape
    before = MODEL.run(tokens, keep, want=site)[site]
    run = MODEL.run(tokens, keep, want=site, edits=[zero(str(site))])
    for b, n in enumerate(LENGTHS):
        first = T - n if side == "left" else 0
        real = real_part(run[site], site, b, first, n)
        allowed = torch.ones(n, n).tril().bool() if "S" in shape and "T" in shape else torch.tensor(True)
        assert not (real * allowed).any()
        rest = run[site][b] != before[b]
        real_part(rest[None], site, 0, first, n).zero_()
        assert not rest.any(), "a pad moved"


# ---- slots -----------------------------------------------------------------------------------------------------------


def best_first(run: Run) -> Tensor:
    """[B T k]: each token's experts by falling choice score, from a plain sort of all experts."""
    experts, score = run["experts", MOE], run["choice_score", MOE]
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter(-1, experts, True)
    return torch.where(chosen, score, -torch.inf).sort(-1, descending=True).indices[..., : DIMS.k]


@pytest.mark.parametrize("rank", [0, 1, DIMS.k - 1, -1])
def test_k_counts_slots_by_falling_choice_score(rank: int, base: Run) -> None:
    run = one(zero("gates", MOE, k=rank), "blocks.1.gates")
    gone = run["gates", MOE] == 0
    assert (gone.sum(-1) == 1).all()
    assert torch.equal(base["experts", MOE][gone].view(B, T), best_first(base)[..., rank])
    assert torch.equal(run["gates", MOE][~gone], base["gates", MOE][~gone])


def test_k_is_not_the_slots_place(base: Run) -> None:
    assert not torch.equal(base["experts", MOE], best_first(base))


@pytest.mark.parametrize("tensor", SLOTS)
def test_e_picks_the_slots_that_hold_the_expert(tensor: str, base: Run) -> None:
    pair = base["experts", MOE].flatten().unique()[:2].tolist()
    run = one(zero(tensor, MOE, e=pair, T=[1, 3, 4]), f"blocks.1.{tensor}")
    hit = torch.isin(base["experts", MOE], torch.tensor(pair))
    hit[:, [0, 2, 5]] = False
    by_hand = base[tensor, MOE].clone()
    by_hand[hit] = 0
    assert torch.equal(run[tensor, MOE], by_hand)
    rows = hit.any(-1) if tensor == "gates" else hit
    assert run.touched == (int(rows.sum()),)


def test_e_means_the_experts_of_the_edited_run(base: Run) -> None:
    """An edit above the router changes who holds the expert; the zero follows."""
    up = zero("delta_attn", MOE)
    moved = MODEL.run(TOKENS, want="blocks.1.experts", edits=[up])["experts", MOE]
    assert not torch.equal(moved.sort(-1).values, base["experts", MOE].sort(-1).values)
    e = int(moved.flatten().mode().values)
    for start in (None, base):
        run = MODEL.run(TOKENS, want="blocks.1.gates", edits=[zero("gates", MOE, e=e), up], base=start)
        assert torch.equal(run["gates", MOE] == 0, moved == e)


# ---- resample --------------------------------------------------------------------------------------------------------

ALIGNED = [site for site in EDITABLE if site.tensor not in SLOTS]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("site", ALIGNED, ids=str)
def test_resampling_is_patching_position_by_position(site: Site, side: str) -> None:
    """By hand: a hook that puts the source row's value at real position p where the base has its own p."""
    rows, lengths = [4, 2, 3], [5, 7, 7, 6, 6]
    tokens, keep = padded(ragged(), side)
    theirs_, there = padded(ragged(REFERENCE[:5], lengths), OPPOSITE[side])
    source = MODEL.run(theirs_, there, want=site)
    shape = MODEL.sites.node(site).shape

    def patch(value: Tensor, hook: object) -> Tensor:
        for b, j in enumerate(rows):
            for p in range(LENGTHS[b]):
                here = p + (T - LENGTHS[b] if side == "left" else 0)
                ours = p + (7 - lengths[j] if side == "right" else 0)
                if "T" in shape and "S" in shape:
                    start = ours - p
                    value[b, :, here, here - p : here + 1] = source[site][j, :, ours, start : ours + 1]
                else:
                    value[b, here] = source[site][j, ours]
        return value

    by_hand = MODEL.run_with_hooks(tokens, keep, fwd_hooks=[(site, patch)])
    run = MODEL.run(tokens, keep, want=[site, "logits"], edits=[resample(str(site), source=source, rows=rows)])
    assert torch.equal(run["logits"], by_hand)


def test_the_part_that_where_names_comes_from_the_source_and_no_other(base: Run, source: Run) -> None:
    run = one(resample("q_C", MOE, source=source, rows=[5, 0, 9], T=[1, 4], h=2, n=[0, 3]), "blocks.1.q_C")
    by_hand = base["q_C", MOE].clone().view(B, T, DIMS.h, DIMS.n)
    values = source["q_C", MOE].view(12, T + 1, DIMS.h, DIMS.n)
    for b, j in enumerate([5, 0, 9]):
        for t in (1, 4):
            by_hand[b, t, 2, [0, 3]] = values[j, t, 2, [0, 3]]
    assert torch.equal(run["q_C", MOE], by_hand.flatten(2))
    assert run.touched == (B * 2,)


def test_draws_depend_on_the_seed_and_are_whole_rows_that_are_long_enough(source: Run) -> None:
    theirs_, keep = padded(ragged(REFERENCE, [6, 3, 4, 7, 2, 6, 3, 3, 3, 3, 3, 5]), "left")
    source = MODEL.run(theirs_, keep, want="blocks.1.c_KV")
    seen = set()
    for seed in range(12):
        edit = resample("c_KV", MOE, source=source, seed=seed)
        made = one(edit, "blocks.1.c_KV")["c_KV", MOE]
        assert torch.equal(made, one(edit, "blocks.1.c_KV")["c_KV", MOE])
        for row in made:
            from_row = [j for j in (0, 3, 5) if torch.equal(row, source["c_KV", MOE][j][keep[j]][:T])]
            assert len(from_row) == 1
            seen.add(from_row[0])
    assert seen == {0, 3, 5}


@pytest.mark.parametrize("tensor", ["gates", "g_e", "u_e", "a_e", "h_e", "y_e"])
def test_slots_take_values_of_reference_tokens_that_chose_the_same_expert(tensor: str, base: Run) -> None:
    """Each slot's value is, as a whole, one that a real token of the source has for that expert; pads lend nothing."""
    theirs_, keep = padded(ragged(REFERENCE, [7, 3] * 6), "left")
    source = MODEL.run(theirs_, keep, want=f"blocks.1.{tensor}")
    experts = base["experts", MOE]
    common = [e for e in range(DIMS.e) if bool(((source["experts", MOE] == e) & keep[..., None]).any())]
    run = one(resample(tensor, MOE, source=source, e=common, seed=4), f"blocks.1.{tensor}")
    different = 0
    for e in experts.unique().tolist():
        here, real = run[tensor, MOE][experts == e], (source["experts", MOE] == e) & keep[..., None]
        pool = source[tensor, MOE][real] if e in common else base[tensor, MOE][experts == e]
        for value in here:
            assert any(torch.equal(value, other) for other in pool)
        different += len(here.unique(dim=0))
    assert different > len(common), "one draw for each slot, not for each expert"
    other = one(resample(tensor, MOE, source=source, e=common, seed=5), f"blocks.1.{tensor}")
    assert not torch.equal(run[tensor, MOE], other[tensor, MOE])
    again = one(resample(tensor, MOE, source=source, e=common, seed=4), f"blocks.1.{tensor}")
    assert torch.equal(run[tensor, MOE], again[tensor, MOE])


def test_slots_need_no_long_rows_and_touch_what_is_named(base: Run) -> None:
    short = everything(REFERENCE[:, :2])
    e = next(int(e) for e in base["experts", MOE].unique() if bool((short["experts", MOE] == e).any()))
    run = one(resample("y_e", MOE, source=short, e=e), "blocks.1.y_e")
    assert run.touched == (int((base["experts", MOE] == e).sum()),)
    hit = base["experts", MOE] == e
    assert torch.equal(run["y_e", MOE][~hit], base["y_e", MOE][~hit])


def test_an_expert_that_no_reference_token_chose_is_named(base: Run) -> None:
    lone = everything(REFERENCE[:1, :1])
    chosen = set(lone["experts", MOE].flatten().tolist())
    e = next(int(e) for e in base["experts", MOE].unique() if int(e) not in chosen)
    with pytest.raises(Unmatched, match=rf"resample y_e of block 1 at e={e}.*no reference token chose expert {e}"):
        one(resample("y_e", MOE, source=lone, e=e))


# ---- contributions of experts ----------------------------------------------------------------------------------------


def contribution(run: Run, b: int, t: int, e: int) -> Tensor:
    """What an expert adds at a token: 0 where it is not chosen."""
    return (run["delta_experts", MOE][b, t] * (run["experts", MOE][b, t] == e)[:, None]).sum(0)


@pytest.mark.parametrize("side", SIDES)
def test_taking_every_contribution_gives_the_sources_sum(side: str) -> None:
    rows, lengths = [2, 0, 1], [5, 6, 7]
    tokens, keep = padded(ragged(), side)
    source = everything(*padded(ragged(REFERENCE[:3], lengths), OPPOSITE[side]))
    run = everything(tokens, keep, edits=[resample("delta_experts", MOE, source=source, rows=rows)])
    plain = everything(tokens, keep)
    for b, j in enumerate(rows):
        n = LENGTHS[b]
        there = source["delta_routed", MOE][j][source.keep[j]][:n]
        close(run["delta_routed", MOE][b][keep[b]], there)
        assert (plain["delta_routed", MOE][b][keep[b]] - there).abs().max() > 0.1
        assert torch.equal(run["delta_routed", MOE][b][~keep[b]], plain["delta_routed", MOE][b][~keep[b]])


def test_an_expert_of_both_of_one_or_of_neither(base: Run, source: Run) -> None:
    """By expert, never by slot: replaced, removed or added, and nothing else at that token moves."""
    kinds: set[str] = set()
    b, t = 1, 4
    ours = set(base["experts", MOE][b, t].tolist())
    j = next(j for j in range(12) if 0 < len(ours & set(source["experts", MOE][j, t].tolist())) < DIMS.k)
    for e in range(DIMS.e):
        run = everything(edits=[resample("delta_experts", MOE, source=source, rows=[0, j, 0], e=e, T=t, B=b)])
        ours, others = (bool((one_["experts", MOE][row, t] == e).any()) for one_, row in ((base, b), (source, j)))
        by_hand = base["delta_routed", MOE].clone()
        by_hand[b, t] += contribution(source, j, t, e) - contribution(base, b, t, e)
        close(run["delta_routed", MOE], by_hand)
        assert run.touched == (int(ours or others),), (ours, others)
        assert torch.equal(run["logits"], base["logits"]) == (not ours and not others)
        kinds.add({(1, 1): "both", (1, 0): "ours", (0, 1): "theirs", (0, 0): "neither"}[ours, others])
    assert set(kinds) == {"both", "ours", "theirs", "neither"}


def test_added_experts_stand_behind_the_slots(base: Run, source: Run) -> None:
    run = one(resample("delta_experts", MOE, source=source, rows=[3, 4, 5]), "blocks.1.delta_experts")
    made = run["delta_experts", MOE]
    assert made.shape == (B, T, 2 * DIMS.k, DIMS.d)
    experts, others = base["experts", MOE], source["experts", MOE][[3, 4, 5], :T]
    removed = ~(experts[..., :, None] == others[..., None, :]).any(-1)
    assert not made[:, :, : DIMS.k][removed].any()
    assert bool(made[:, :, : DIMS.k][~removed].any(-1).all())
    added = made[:, :, DIMS.k :].any(-1).sum(-1)
    assert torch.equal(added, removed.sum(-1))


def test_two_edits_of_contributions_compose_at_different_experts(base: Run, source: Run) -> None:
    rows = [3, 4, 5]
    e, f = source["experts", MOE][3, 2].tolist()[:2]
    pair = [resample("delta_experts", MOE, source=source, rows=rows, e=x, T=2) for x in (e, f)]
    both = resample("delta_experts", MOE, source=source, rows=rows, e=[e, f], T=2)
    close(logits(*pair), logits(both))
    close(logits(*pair), logits(*pair[::-1]))
    assert (logits(*pair) - logits(pair[0])).abs().max() > 1e-4


def test_two_edits_that_add_the_same_expert_overlap(base: Run, source: Run) -> None:
    """Nobody holds it in the edited run, so no slot shows the clash; taken twice it would count double."""
    ours, others = base["experts", MOE][0, 2].tolist(), source["experts", MOE][3, 2].tolist()
    e = next(e for e in others if e not in ours)
    add = resample("delta_experts", MOE, source=source, rows=[3, 3, 3], e=e, T=2, B=0)
    for second in (add, zero("delta_experts", MOE, e=e), zero("delta_experts", MOE, T=2)):
        for edits in ([add, second], [second, add]):
            with pytest.raises(BadEdit, match="overlap"):
                logits(*edits)
    logits(add, zero("delta_experts", MOE, T=3))
    logits(add, zero("delta_experts", MOE, e=ours[0]))
    logits(add, zero("delta_experts", MOE, k=0))


@pytest.mark.parametrize("where", [{"k": 0}, {"d": 3}], ids=str)
def test_a_contribution_is_taken_whole_and_by_expert(where: dict[str, int], source: Run) -> None:
    with pytest.raises(BadEdit, match="name it by e"):
        one(resample("delta_experts", MOE, source=source, **where))


# ---- what a source must be -------------------------------------------------------------------------------------------


def test_rows_that_are_too_short_are_refused(source: Run) -> None:
    theirs_, keep = padded(ragged(REFERENCE[:3], [6, 5, 7]), "right")
    short = MODEL.run(theirs_, keep, want="blocks.1.O")
    with pytest.raises(BadEdit, match="source row 1 has 5 tokens, so it has no position 5 for row 2"):
        one(resample("O", MOE, source=short, rows=[0, 2, 1]))
    one(resample("O", MOE, source=short, rows=[0, 2, 1], B=[0, 1]))
    with pytest.raises(BadEdit, match="no reference prompt has the 6 tokens of row 0"):
        one(resample("O", MOE, source=MODEL.run(REFERENCE[:, :5], want="blocks.1.O")))


@pytest.mark.parametrize(
    ("rows", "error", "why"),
    [
        ([0, 1], BadEdit, "names 2 source rows for 3 rows"),
        ([0, 1, 12], OutOfRange, "has 12.*12 does not exist"),
        ([0, 1, -13], OutOfRange, "-13 does not exist"),
    ],
)
def test_rows_are_checked(rows: list[int], error, why: str, source: Run) -> None:
    with pytest.raises(error, match=why):
        one(resample("O", MOE, source=source, rows=rows))


@pytest.mark.parametrize("tensor", ["O", "y_e", "delta_experts"])
def test_a_source_without_the_tensor_is_refused_by_name(tensor: str) -> None:
    bare = MODEL.run(REFERENCE, want="blocks.1.x_mid")
    made: list[str] = []
    with (
        pytest.raises(UnknownTensor, match=rf"resample {tensor} of block 1.*source.*\.{tensor} was not cached"),
        MODEL.hooks(fwd_hooks=[("x_0", lambda value, hook: made.append(hook.name))]),
    ):
        one(resample(tensor, MOE, source=bare))
    assert not made, "refused before anything ran"


def test_a_source_of_other_sizes_is_refused_by_the_size() -> None:
    wide = HookedModel(random_weights(dataclasses.replace(DIMS, d=40)))
    with pytest.raises(BadEdit, match="source's model has d = 40, this one 32"):
        one(resample("O", MOE, source=wide.run(REFERENCE, want="blocks.1.O")))


def test_a_source_may_come_from_other_weights_of_equal_sizes(base: Run) -> None:
    other = HookedModel(random_weights(DIMS, 5)).run(REFERENCE, want="blocks.1.O")
    made = one(resample("O", MOE, source=other, rows=[0, 1, 2]), "blocks.1.O")["O", MOE]
    assert torch.equal(made, other["O", MOE][:3, :T])


def test_contributions_that_an_edit_added_have_no_expert_to_be_matched_by(source: Run) -> None:
    widened = one(resample("delta_experts", MOE, source=source, rows=[3, 4, 5]), "blocks.1.delta_experts")
    with pytest.raises(BadEdit, match="added experts"):
        one(resample("delta_experts", MOE, source=widened, rows=[0, 1, 2]))


# ---- several edits ---------------------------------------------------------------------------------------------------


def test_edits_act_in_the_cards_order_whatever_order_they_come_in(source: Run) -> None:
    edits = [
        zero("x_next", LAST, d=3),
        zero("gates", MOE, k=0),
        resample("x_mid", DENSE, source=source, T=2),
        zero("O", MOE, h=1),
    ]
    assert torch.equal(logits(*edits), logits(*edits[::-1]))


def test_each_edit_acts_on_the_value_of_the_edited_run(base: Run) -> None:
    """Head 1 off in both blocks, as both columns off in the weights."""

    def columns(state: dict[str, Tensor]) -> None:
        for block in (0, 1):
            state[f"model.layers.{block}.self_attn.o_proj.weight"][:, DIMS.v : 2 * DIMS.v] = 0

    close(logits(zero("O", 0, h=1), zero("O", 1, h=1)), theirs(columns))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (zero("O", MOE, h=1), zero("O", MOE, h=1)),
        (zero("O", MOE, h=1), zero("O", MOE, T=2)),
        (zero("O", MOE, h=[0, 1]), zero("attn.hook_z", MOE, h=[1, 2])),
        (zero("O", MOE), zero("blocks.1.O", T=-1)),
        (zero("gates", MOE, k=0), zero("gates", MOE)),
    ],
    ids=str,
)
def test_replacing_edits_that_overlap_are_refused(first: Edit, second: Edit) -> None:
    with pytest.raises(BadEdit, match="overlap") as caught:
        logits(first, second)
    assert first.label in str(caught.value)
    assert second.label in str(caught.value)


def test_edits_of_one_site_at_different_places_are_one_edit_of_both(base: Run) -> None:
    apart = MODEL.run(TOKENS, edits=[zero("O", MOE, h=0), zero("O", MOE, h=2)])
    assert torch.equal(apart["logits"], logits(zero("O", MOE, h=[0, 2])))
    assert apart.touched == (B * T, B * T)


def test_touched_is_in_the_order_in_which_edits_were_given() -> None:
    run = MODEL.run(TOKENS, edits=[zero("x_next", LAST, T=1), zero("O", DENSE), zero("x_0", T=[0, 1], B=0)])
    assert run.touched == (B, B * T * DIMS.h, 2)


def test_a_place_counts_once_however_many_edits_meet_it(base: Run) -> None:
    """With the first of them, in a run as in a sweep. Places of different sites, heads and slots are different."""
    twice, other = scale("O", MOE, factor=2.0, h=1), scale("O", MOE, factor=3.0, T=[1, 2])
    e = int(base["experts", MOE][0, 0, 0])
    chose = int((base["experts", MOE] == e).sum())
    pairs = B * 2 * T
    cases: list[tuple[list[Edit], tuple[int, ...]]] = [
        ([twice, twice], (B * T, 0)),
        ([twice, dataclasses.replace(twice, where=())], (B * T, B * T * (DIMS.h - 1))),
        ([twice, other], (B * T, B * 2 * (DIMS.h - 1))),
        ([other, twice], (B * 2 * DIMS.h, B * (T - 2))),
        ([twice, other, twice], (B * T, B * 2 * (DIMS.h - 1), 0)),
        ([twice, scale("O", LAST, factor=2.0, h=1), scale("V", MOE, factor=2.0, h=1)], (B * T,) * 3),
        ([scale("S", MOE, factor=2.0, h=[0, 1]), scale("A", MOE, factor=2.0, h=[0, 1])], (pairs, pairs)),
        ([scale("S", MOE, factor=2.0, h=[0, 1], S=0), scale("S", MOE, factor=2.0, h=0, S=T - 1)], (pairs, 0)),
        ([scale("y_e", MOE, factor=2.0, e=e), scale("y_e", MOE, factor=2.0)], (chose, B * T * DIMS.k - chose)),
        ([scale("x_n", MOE, factor=2.0, into="x_mid"), scale("x_n", MOE, factor=2.0)], (B * T, 0)),
        ([scale("W_O", MOE, factor=2.0), scale("W_O", MOE, factor=2.0, h=1)], (DIMS.h * DIMS.v, 0)),
        ([zero("x_n", MOE, T=1), freeze("A"), scale("O", MOE, factor=2.0)], (B, 2 * B * DIMS.h * T, B * T * DIMS.h)),
    ]
    for edits, expected in cases:
        assert MODEL.run(TOKENS, edits=edits).touched == expected, edits
    outcomes = sweep(MODEL, Live(TOKENS), [Cell(tuple(edits)) for edits, _ in cases], lambda *_: None)
    assert [outcome.touched for outcome in outcomes] == [sum(expected) for _, expected in cases]


@pytest.mark.parametrize(
    "where",
    [{"T": 1, "S": 4}, {"T": slice(0, 2), "S": [3, 4]}, {"T": 0, "S": -1, "h": 2}, {"T": 2, "S": 3, "B": 1}],
    ids=str,
)
def test_an_edge_that_no_query_sees_is_refused_by_name_and_answered_in_a_sweep(
    where: dict[str, Any], base: Run
) -> None:
    edge = knock_out(MOE, **where)
    with pytest.raises(BadEdit, match=r"knock out .* would do nothing: none of its queries sees any of its keys"):
        MODEL.run(TOKENS, edits=[edge])
    with pytest.raises(BadEdit, match="would do nothing"):
        MODEL.generate(TOKENS, n=2, edits=[edge])
    with pytest.raises(BadEdit, match="would do nothing"):
        sweep(MODEL, Live(TOKENS, edits=[edge]), [], lambda *_: None)
    shown: dict[int, Tensor] = {}
    cells = [Cell((edge,)), Cell((zero("A", MOE, **where),)), Cell((knock_out(MOE, T=4, S=1),))]
    outcomes = sweep(
        MODEL, Live(TOKENS), cells, lambda who, site, value: shown.update({id(who): value}), whole=["logits"], want=[]
    )
    for cell, outcome in zip(cells[:2], outcomes, strict=False):
        assert (outcome.touched, outcome.worlds, outcome.flips) == (0, 0, 0)
        close(shown[id(cell)], base["logits"])
    assert outcomes[2].touched == B * DIMS.h
    MODEL.run(TOKENS, edits=[knock_out(MOE, T=[1, 4], S=[0, 4])])  # some of it is there
    lone = MODEL.run(TOKENS, edits=[knock_out(MOE, T=4, S=1, B=1)])
    assert lone.touched == (DIMS.h,), "rows that it doesn't name have all their keys"
    assert [torch.equal(*pair) for pair in zip(lone["logits"], base["logits"], strict=True)] == [True, False, True]


def test_a_mask_that_names_no_position_is_refused(base: Run) -> None:
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1, 2] = True
    for edit in (
        zero("O", MOE, T=mask & False),
        zero("O", MOE, T=mask, B=0),
        patch("V", MOE, source=base, S=mask, B=2),
    ):
        with pytest.raises(BadEdit, match="would do nothing: its mask names no position"):
            MODEL.run(TOKENS, edits=[edit])
    assert MODEL.run(TOKENS, edits=[zero("O", MOE, T=mask, B=[0, 1])]).touched == (DIMS.h,)


# ---- edits are values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "label"),
    [
        (zero("Q_R", block=3, h=5, T=-1), "zero Q_R of block 3 at h=5, T=-1"),
        (zero("O", 1, T=[1, 2], h=slice(0, 2)), "zero O of block 1 at T=[1, 2], h=0:2"),
        (zero("O", 1, T=slice(None, None, 2)), "zero O of block 1 at T=::2"),
        (zero("O", 1, T=slice(-2, None)), "zero O of block 1 at T=-2:"),
        (zero("blocks.1.O"), "zero blocks.1.O"),
        (zero("logits", V=3), "zero logits at V=3"),
    ],
    ids=str,
)
def test_an_edit_says_what_it_does(edit: Edit, label: str) -> None:
    assert edit.label == str(edit) == label


def test_a_resample_says_where_it_takes_from(source: Run) -> None:
    edit = resample("c_KV", 1, source=source, T=2)
    assert str(edit) == "resample c_KV of block 1 at T=2 from 12 reference prompts"


def test_edits_can_be_compared_hashed_and_not_changed(source: Run) -> None:
    made = [
        zero("O", 1, h=2),
        zero("O", 1, h=3),
        zero("O", 2, h=2),
        zero("O", 1, T=slice(0, 2)),
        zero("O", 1, T=slice(0, 2, 1)),
        resample("O", 1, source=source),
        resample("O", 1, source=source, seed=1),
        resample("O", 1, source=source, rows=[0, 1, 2]),
    ]
    assert len(set(made)) == len(made)
    assert zero("O", 1, h=2) == zero("O", 1, h=[2]) == made[0]
    assert hash(zero("O", 1, T=slice(0, 2))) == hash(made[3])
    assert resample("O", 1, source=source, rows=range(3)) == made[-1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made[0].block = 2


def test_edits_can_be_copied_and_pickled() -> None:
    edit = zero("O", 1, h=2, T=slice(0, 2))
    assert copy.deepcopy(edit) == pickle.loads(pickle.dumps(edit)) == edit


def test_one_edit_serves_many_runs_and_holds_nothing_of_them(base: Run) -> None:
    edit = zero("O", MOE, T=-1)
    first = one(edit)["logits"]
    tokens, keep = padded(ragged(), "left")
    MODEL.run(tokens, keep, edits=[edit])
    assert torch.equal(one(edit)["logits"], first)
