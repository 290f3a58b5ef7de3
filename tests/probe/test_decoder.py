"""The decoder: what tokens it takes, and that it computes and reads only what is wanted, to the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from probe import Checkpoint, Decoder, Dims, InMemory, Site, random_weights, save
from probe.errors import BadText, ProbeError, ShapeMismatch
from tests.probe.small import DIRECT, SMALL, VARIANTS

WEIGHTS = random_weights(SMALL, 1)
DECODER = Decoder(WEIGHTS)
SITES = [site for site in DECODER.sites if site.tensor != "delta_heads"]
B, T = 2, 6
TOKENS = torch.randint(0, SMALL.V, (B, T), generator=torch.Generator().manual_seed(2))
LOGITS = Site(None, "logits")
X_0, LAST = Site(None, "x_0"), Site(SMALL.blocks - 1, "x_next")
BASE = DECODER.run(TOKENS, want=SITES)
"""Every tensor of a plain run."""


class Counting:
    """Weights that note what is read of them."""

    def __init__(self, weights: InMemory, resident: bool = True) -> None:
        self.weights, self.dims, self.resident = weights, weights.dims, resident
        self.read_: list[tuple[int | None, str]] = []
        self.experts: list[Sequence[int] | None] = []

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        self.read_.append((block, name))
        if name.endswith("_e"):
            self.experts.append(experts)
        return self.weights.read(block, name, experts)


def counted(want: Sequence[Site], **kwargs: Any) -> tuple[dict[Site, Tensor], Counting, Counter[Site]]:
    """A run, the weights that it read, and how often the tap saw each site."""
    weights, seen = Counting(WEIGHTS), Counter[Site]()
    change = kwargs.pop("tap", lambda site, value: value)

    def tap(site: Site, value: Tensor) -> Tensor:
        seen[site] += 1
        return change(site, value)

    return Decoder(weights).run(TOKENS, want=want, tap=tap, **kwargs), weights, seen


def same(made: Mapping[Site, Tensor], expected: Mapping[Site, Tensor]) -> None:
    """Each made value is the expected one, bit for bit."""
    for site, value in made.items():
        assert torch.equal(value, expected[site]), site


def blocks_of(seen: Mapping[Site, int]) -> set[int | None]:
    return {site.block for site in seen}


# --- tokens ------------------------------------------------------------------------------------

GOOD = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (GOOD.float(), "torch.float32"),
        (GOOD.bool(), "torch.bool"),
        (GOOD.to(torch.int16), "torch.int16"),
        (GOOD[0], "[3]"),
        (GOOD[None], "[1, 2, 3]"),
        (GOOD[:0], "[0, 3]"),
        (GOOD[:, :0], "[2, 0]"),
    ],
)
def test_tokens_are_integers_batch_by_position(tokens: Tensor, said: str) -> None:
    for ask in (DECODER, lambda tokens: DECODER.check_tokens(tokens, None), DECODER.run):
        with pytest.raises(ShapeMismatch) as error:
            ask(tokens)
        assert said in str(error.value)
        assert "integers [B T]" in str(error.value)
        assert isinstance(error.value, ProbeError)


@pytest.mark.parametrize("bad", [-1, 30, 10**9])
def test_an_id_outside_the_vocabulary(bad: int) -> None:
    tokens = GOOD.clone()
    tokens[1, 2] = bad
    with pytest.raises(BadText, match=rf"token id {bad} is outside the vocabulary of 30"):
        DECODER(tokens)
    tokens[1, 2] = 29
    assert DECODER(tokens).shape == (2, 3, 30)


def test_int32_and_single_tokens_are_taken() -> None:
    assert torch.equal(DECODER(GOOD.int()), DECODER(GOOD))
    assert DECODER(GOOD[:1, :1]).shape == (1, 1, 30)


@pytest.mark.parametrize(
    ("keep", "kind", "said"),
    [
        ([[1, 1, 1]], ShapeMismatch, "[1, 3]"),
        ([[1, 1], [1, 1]], ShapeMismatch, "[2, 2]"),
        ([1, 1, 1], ShapeMismatch, "[3]"),
        ([[1, 1, 1], [0, 0, 0]], BadText, "no real token"),
        ([[1, 0, 1], [1, 1, 1]], ShapeMismatch, "holes"),
        ([[1, 1, 1], [0, 1, 0]], ShapeMismatch, "holes"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_that_does_not_fit(keep: list[list[int]], kind: type[ProbeError], said: str, dtype: torch.dtype) -> None:
    with pytest.raises(kind) as error:
        DECODER(GOOD, torch.tensor(keep).to(dtype))
    assert said in str(error.value)


def test_masks_that_fit() -> None:
    for keep in ([[1, 1, 1], [1, 1, 1]], [[0, 0, 1], [0, 1, 1]], [[1, 0, 0], [1, 1, 0]], [[0, 1, 1], [1, 1, 0]]):
        whole = torch.tensor(keep)
        assert torch.equal(DECODER(GOOD, whole), DECODER(GOOD, whole.bool()))
        assert DECODER(GOOD, whole).isfinite().all()
    one = torch.tensor([[1], [1]])
    assert torch.equal(DECODER(GOOD[:, :1], one), DECODER(GOOD[:, :1]))
    with pytest.raises(BadText, match="no real token"):
        DECODER(GOOD[:, :1], torch.tensor([[1], [0]]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_change_nothing_and_hold_any_token(side: str) -> None:
    alone = DECODER(GOOD[:1])
    pad, keep = torch.tensor([[7, 8]]), torch.tensor([[1, 1, 1, 0, 0]]).bool()
    tokens = torch.cat([GOOD[:1], pad], 1)
    if side == "left":
        tokens, keep = tokens.roll(2, 1), keep.roll(2, 1)
    padded = DECODER(tokens, keep)
    assert torch.allclose(padded[keep], alone[0], atol=1e-5)
    tokens[~keep] = 3
    assert torch.allclose(DECODER(tokens, keep)[keep], padded[keep], atol=1e-6)


# --- what is wanted ----------------------------------------------------------------------------


def test_calling_it_gives_the_logits() -> None:
    assert torch.equal(DECODER(TOKENS), BASE[LOGITS])
    assert DECODER.run(TOKENS).keys() == {LOGITS}
    assert BASE[LOGITS].shape == (B, T, SMALL.V)
    assert DECODER.blocks == 3


def test_each_site_alone_is_what_it_is_among_all() -> None:
    for site in SITES:
        same(DECODER.run(TOKENS, want=[site]), BASE)


def test_wanted_come_back_once_in_the_order_asked() -> None:
    want = [LOGITS, Site(1, "O"), X_0, Site(0, "h"), LOGITS, Site(1, "O")]
    made = DECODER.run(TOKENS, want=want)
    assert list(made) == [LOGITS, Site(1, "O"), X_0, Site(0, "h")]
    same(made, BASE)


def test_wanting_nothing_does_nothing() -> None:
    made, weights, seen = counted([])
    assert (made, weights.read_, seen) == ({}, [], Counter())


def test_x_next_is_the_next_blocks_x_n() -> None:
    for block in range(SMALL.blocks - 1):
        assert torch.equal(BASE[Site(block, "x_next")], BASE[Site(block + 1, "x_n")])
    assert torch.equal(BASE[X_0], BASE[Site(0, "x_n")])


ATTENTION = {"w_attn", "W_DQ", "w_Q", "W_UQ", "W_QR", "W_DKV", "W_KR", "w_KV", "W_UK", "W_UV", "W_O"}
FFN = {
    False: {"w_ffn", "W_1", "W_3", "W_2"},
    True: {"w_ffn", "W_g", "b", "W_1_e", "W_3_e", "W_2_e", "W_1_s", "W_3_s", "W_2_s"},
}


def whole(*blocks: int) -> set[tuple[int | None, str]]:
    return {(block, name) for block in blocks for name in ATTENTION | FFN[SMALL.moe[block]]}


@pytest.mark.parametrize(
    ("want", "reads"),
    [
        ([X_0], {(None, "W_E")}),
        ([Site(0, "x_n")], {(None, "W_E")}),
        ([Site(0, "c_KV")], {(None, "W_E"), (0, "w_attn"), (0, "W_DKV")}),
        ([Site(0, "k_R")], {(None, "W_E"), (0, "w_attn"), (0, "W_KR")}),
        ([Site(0, "x_mid")], {(None, "W_E")} | {(0, name) for name in ATTENTION}),
        ([Site(0, "x_next")], {(None, "W_E")} | whole(0)),
        ([Site(1, "x_n")], {(None, "W_E")} | whole(0)),
        ([Site(1, "x_attn"), X_0], {(None, "W_E"), (1, "w_attn")} | whole(0)),
        ([Site(2, "experts")], {(None, "W_E"), (2, "w_ffn"), (2, "W_g"), (2, "b")} | whole(0, 1)),
        ([Site(None, "s_final")], {(None, "W_E")} | whole(0, 1, 2)),
        ([Site(None, "x_final")], {(None, "W_E"), (None, "w_final")} | whole(0, 1, 2)),
        ([LOGITS], {(None, "W_E"), (None, "w_final"), (None, "W_U")} | whole(0, 1, 2)),
    ],
    ids=lambda v: str(len(v)) if isinstance(v, set) else "-".join(map(str, v)),
)
def test_it_stops_early_and_reads_only_what_it_needs(want: list[Site], reads: set[tuple[int | None, str]]) -> None:
    made, weights, _ = counted(want)
    if want == [Site(2, "experts")]:
        reads = reads | {(2, name) for name in ATTENTION}
    assert set(weights.read_) == reads
    assert len(weights.read_) == len(reads)  # each once
    same(made, BASE)


def test_the_tap_sees_each_value_once_in_order() -> None:
    order: list[Site] = []

    def tap(site: Site, value: Tensor) -> Tensor:
        order.append(site)
        assert torch.equal(value, BASE[site])
        return value

    DECODER.run(TOKENS, want=SITES, tap=tap)
    assert order == SITES


def test_the_pattern_is_not_made_where_nobody_asks() -> None:
    _, _, seen = counted([LOGITS])
    made = {site.tensor for site in seen}
    assert not made & {"S", "A", "delta_heads"}
    assert {"O", "Q", "K", "experts"} <= made


# --- what is known -----------------------------------------------------------------------------


def test_a_whole_known_base_is_not_recomputed() -> None:
    made, weights, seen = counted(SITES, known=BASE)
    same(made, BASE)
    assert set(made) == set(SITES)
    assert weights.read_ == []
    # The tap sees nothing made; a block's input passes it as it enters.
    assert {site.tensor for site in seen} <= {"x_n"}
    assert max(seen.values(), default=0) <= 1


@pytest.mark.parametrize("site", SITES, ids=str)
def test_a_known_value_is_taken_as_it_is(site: Site) -> None:
    made, weights, seen = counted([site], known=BASE)
    assert made[site] is BASE[site]
    assert weights.read_ == []
    assert set(seen) <= {site}


def test_known_residual_streams_skip_blocks() -> None:
    spine = {Site(1, "x_n"): BASE[Site(1, "x_n")], Site(2, "x_n"): BASE[Site(2, "x_n")], LAST: BASE[LAST]}
    made, weights, seen = counted([Site(2, "O")], known=spine)
    assert blocks_of(seen) == {2}
    assert {block for block, _ in weights.read_} == {2}
    same(made, BASE)

    made, weights, seen = counted([LOGITS], known=spine)
    assert blocks_of(seen) == {None}
    assert set(weights.read_) == {(None, "w_final"), (None, "W_U")}
    same(made, BASE)

    made, weights, seen = counted([Site(0, "g"), Site(2, "g_s")], known=spine)
    assert blocks_of(seen) == {None, 0, 2}
    assert (0, "W_2") not in weights.read_  # block 1's input is known: block 0 stops at g
    same(made, BASE)


def test_a_known_value_inside_a_block_spares_what_is_above_it() -> None:
    known = {Site(1, "x_n"): BASE[Site(1, "x_n")], Site(1, "delta_attn"): BASE[Site(1, "delta_attn")]}
    made, weights, _ = counted([Site(1, "x_next")], known=known)
    assert {name for _, name in weights.read_} == FFN[True]
    same(made, BASE)


def test_known_x_0_is_not_looked_up_again() -> None:
    made, weights, _ = counted([LOGITS, X_0], known={X_0: BASE[X_0]})
    assert (None, "W_E") not in weights.read_
    same(made, BASE)


def test_an_edit_starts_from_the_known_stream_into_its_block() -> None:
    spine = {Site(block, "x_n"): BASE[Site(block, "x_n")] for block in range(SMALL.blocks)}
    edit = Site(1, "O")
    made, weights, seen = counted([LOGITS], known=spine, edited=[edit], tap=at(edit, halve))
    assert blocks_of(seen) == {1, 2, None}
    assert not {(0, "W_O"), (None, "W_E")} & set(weights.read_)
    same(made, counted([LOGITS], tap=at(edit, halve))[0])


def test_what_is_known_is_never_changed() -> None:
    known = {site: value.clone() for site, value in BASE.items()}
    sites = [Site(0, "O"), Site(1, "x_n"), X_0, Site(1, "experts")]
    for site in sites:
        change = (lambda _, value: value.flip(1)) if site.tensor != "experts" else (lambda _, value: (value + 1) % 4)
        DECODER.run(TOKENS, want=SITES, known=known, edited=[site], tap=at(site, change))
    same(known, BASE)


# --- what is edited ----------------------------------------------------------------------------


def at(site: Site, change: Any) -> Any:
    """A tap that changes one site."""
    return lambda where, value: change(where, value) if where == site else value


def halve(_: Site, value: Tensor) -> Tensor:
    return value / 2


def rotate_experts(_: Site, value: Tensor) -> Tensor:
    return (value + 1) % SMALL.e


def negate(_: Site, value: Tensor) -> Tensor:
    return -value


EDITS = [site for site in SITES if site != LOGITS]


@pytest.mark.parametrize("site", EDITS, ids=str)
def test_an_edit_from_a_known_base_equals_one_from_scratch(site: Site) -> None:
    change = {"experts": rotate_experts, "choice_score": negate}.get(site.tensor, halve)
    plain, _, _ = counted(SITES, tap=at(site, change), edited=[site])
    made, weights, seen = counted(SITES, tap=at(site, change), edited=[site], known=BASE)
    same(made, plain)
    assert torch.equal(plain[site], change(site, BASE[site]))
    assert not torch.equal(plain[LOGITS], BASE[LOGITS])
    # Nothing before the edit is made again, and whatever it reaches is.
    first = SITES.index(site)
    made_again = {s for s in seen if s.tensor != "x_n"}
    assert made_again <= set(SITES[first:])
    below = DECODER.sites.card(site.block).descendants([site.tensor]) - {"delta_heads"}
    reached = {Site(site.block, name) for name in below}
    if site.block is not None or site == X_0:
        later = range(0 if site.block is None else site.block + 1, SMALL.blocks)
        reached |= {s for s in SITES if s.block in later or (s.block is None and s != X_0)}
    assert made_again == {s for s in reached | {site} if s.tensor != "x_n"}
    assert max(seen.values()) == 1
    assert not [key for key in weights.read_ if key[0] is not None and key[0] < (site.block or 0)]


def test_a_tap_without_known_values_may_change_anything() -> None:
    site = Site(1, "c_KV")
    marked, _, _ = counted([LOGITS], tap=at(site, halve), edited=[site])
    unmarked, _, _ = counted([LOGITS], tap=at(site, halve))
    same(marked, unmarked)


def test_an_edit_is_made_though_nothing_wanted_needs_it() -> None:
    """An edited site is tapped even where the wanted value does not hang on it."""
    site = Site(2, "A")
    made, _, seen = counted([Site(0, "x_mid")], edited=[site], tap=at(site, halve))
    assert seen[site] == 1
    same(made, BASE)
    made, _, seen = counted([Site(0, "x_mid")], edited=[site], tap=at(site, halve), known=BASE)
    assert seen[site] == 1
    assert {s.block for s in seen if s.tensor != "x_n"} == {2}
    same(made, BASE)


def test_before_an_edit_known_values_stand_and_after_it_none_does() -> None:
    poisoned = {site: torch.full_like(value, 9) for site, value in BASE.items() if site.tensor != "experts"}
    known = {**BASE, **{site: value for site, value in poisoned.items() if site.block == 2 or site.block is None}}
    known[X_0] = BASE[X_0]
    edit = Site(1, "delta_attn")
    made, _, _ = counted(SITES, known=known, edited=[edit], tap=at(edit, halve))
    plain, _, _ = counted(SITES, edited=[edit], tap=at(edit, halve))
    same(made, plain)


def test_two_edits_with_a_known_base() -> None:
    edits = [Site(0, "O"), Site(2, "g_s")]

    def tap(site: Site, value: Tensor) -> Tensor:
        return value / 2 if site in edits else value

    plain, _, _ = counted(SITES, tap=tap, edited=edits)
    made, _, seen = counted(SITES, tap=tap, edited=edits, known=BASE)
    same(made, plain)
    assert all(seen[site] == 1 for site in edits)
    one, _, _ = counted([LOGITS], tap=at(edits[0], halve), edited=edits[:1])
    assert not torch.equal(one[LOGITS], made[LOGITS])


def test_a_null_edit_from_a_known_base_changes_nothing() -> None:
    for site in EDITS:
        made, _, _ = counted([LOGITS], edited=[site], known=BASE)
        same(made, BASE)


def test_runs_leave_nothing_behind() -> None:
    before = vars(DECODER).copy()
    for _ in range(3):
        DECODER.run(TOKENS, want=[LOGITS], edited=[Site(1, "O")], tap=at(Site(1, "O"), halve))
    same(DECODER.run(TOKENS, want=SITES), BASE)
    assert vars(DECODER) == before


# --- weights that are not all in memory --------------------------------------------------------


def test_of_a_streamed_model_only_the_chosen_experts_are_read() -> None:
    weights = Counting(WEIGHTS, resident=False)
    few = TOKENS[:1, :1]
    made = Decoder(weights).run(few, want=[LOGITS, Site(1, "experts"), Site(2, "experts")])
    same(made, DECODER.run(few, want=list(made)))
    chosen = [sorted(made[Site(block, "experts")].flatten().tolist()) for block in (1, 2)]
    assert weights.experts == [chosen[0]] * 3 + [chosen[1]] * 3
    assert len(chosen[0]) == SMALL.k < SMALL.e


@pytest.mark.parametrize("name", VARIANTS)
def test_streamed_and_in_memory_run_alike(name: str, tmp_path: Any) -> None:
    dims = VARIANTS[name]
    weights = random_weights(dims, 6)
    save(weights, tmp_path, dtype=torch.float32)
    inside = Decoder(weights)
    want = list(inside.sites)
    ours, theirs = Decoder(Checkpoint(tmp_path)).run(TOKENS, want=want), inside.run(TOKENS, want=want)
    for site in want:
        assert torch.allclose(ours[site].double(), theirs[site].double(), atol=1e-5), site


@pytest.mark.parametrize("dims", [SMALL, DIRECT], ids=["latent", "direct"])
def test_every_value_has_the_shape_and_dtype_of_its_row(dims: Dims) -> None:
    decoder = Decoder(random_weights(dims, 1, torch.bfloat16))
    sizes = {"B": B, "T": T, "S": T, "1": 1}
    kinds = {"act": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}
    for site, value in decoder.run(TOKENS, want=list(decoder.sites)).items():
        row = decoder.sites.node(site)
        assert tuple(value.shape) == tuple(sizes.get(axis) or dims.size(axis) for axis in row.shape), site
        assert value.dtype == kinds[row.dtype], site
        assert value.double().isfinite().all() or site.tensor == "S"
