"""The numerics with more than a line, against known constants, definitions in fp64, and naive loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from probe import KIMI_K2, Decoder, Dims, random_weights
from probe.dims import Yarn
from probe.numerics import (
    attend,
    causal_mask,
    grouped,
    grouped_by_hand,
    inverse_frequencies,
    inverse_rms,
    mix,
    normalise,
    pattern,
    position_ids,
    rotate,
    rotation,
    scores,
)
from tests.oracle import config, padding


def yarn(**changes: float) -> Dims:
    """Kimi K2 with another YaRN."""
    return dataclasses.replace(KIMI_K2, yarn=dataclasses.replace(KIMI_K2.yarn, **changes))


PLAIN = dataclasses.replace(KIMI_K2, yarn=None)
K2_THINKING = yarn(factor=64.0)
K2_5 = yarn(factor=64.0, beta_fast=32.0)
V3 = dataclasses.replace(yarn(factor=40.0, beta_fast=32.0), theta=1e4)

# ---- frequencies ----------------------------------------------------------------------------------------------------


def kept(dims: Dims) -> Tensor:
    return inverse_frequencies(dataclasses.replace(dims, yarn=None))


def test_without_yarn_frequencies_fall_by_theta() -> None:
    exact = 50000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    made = inverse_frequencies(PLAIN)
    assert made.dtype == torch.float32
    assert made[0] == 1.0
    torch.testing.assert_close(made.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dims", [pytest.param(KIMI_K2, id="K2"), pytest.param(K2_THINKING, id="K2-Thinking")])
def test_k2s_ramp_is_a_step(dims: Dims) -> None:
    """Its two betas are one: pairs 0 to 19 turn as if there were no YaRN, pairs 20 to 31 slower by the factor."""
    made = inverse_frequencies(dims)
    assert torch.equal(made[:20], kept(dims)[:20])
    torch.testing.assert_close(made[20:], kept(dims)[20:] / dims.yarn.factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dims", "low", "high"), [pytest.param(K2_5, 8, 20, id="K2.5"), pytest.param(V3, 10, 23, id="V3")]
)
def test_a_ramp_between_two_pairs(dims: Dims, low: int, high: int) -> None:
    """Kept to ``low``, slowed from ``high`` on, and between them a straight line."""
    share = inverse_frequencies(dims).double() / kept(dims).double()  # 1 where kept, 1/factor where slowed
    ramp = ((torch.arange(32, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(share, 1 - ramp * (1 - 1 / dims.yarn.factor), rtol=1e-6, atol=0)
    assert torch.equal(inverse_frequencies(dims)[: low + 1], kept(dims)[: low + 1])


@pytest.mark.parametrize(
    ("dims", "turns", "at"),
    [pytest.param(KIMI_K2, 1.0, 19.1646, id="K2"), (V3, 32.0, 10.47), (V3, 1.0, 22.51)],
    ids=["K2-slow", "V3-fast", "V3-slow"],
)
def test_where_a_pair_turns_so_often(dims: Dims, turns: float, at: float) -> None:
    """The ramp's ends, from its definition: the (fractional) pair that turns so often within the original context."""
    pair = torch.linspace(0, 32, 320_001, dtype=torch.float64)
    often = dims.yarn.original * dims.theta ** (-2 * pair / 64) / (2 * math.pi)
    found = pair[(often - turns).abs().argmin()]
    assert found == pytest.approx(at, abs=6e-3)


def test_tiny_reference_numbers() -> None:
    """The reference's four pairs: the last is slowed."""
    dims = dataclasses.replace(KIMI_K2, r=8)
    expected = torch.tensor([1.0, 0.06687403, 0.004472136, 9.34593e-06])
    torch.testing.assert_close(inverse_frequencies(dims), expected, rtol=1e-6, atol=0)


def test_betas_left_out_are_32_and_1() -> None:
    """Right for V3, wrong for K2, which states its own."""
    there = config(yarn={"beta_fast": None, "beta_slow": None})
    assert Dims.from_config(there).yarn == Yarn(32.0, 4096, 32.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("dims", "tau"),
    [
        pytest.param(KIMI_K2, 0.1308607999629, id="K2"),
        pytest.param(K2_THINKING, 0.1446796258, id="factor-64"),
        pytest.param(V3, 0.1352337789, id="V3"),
        pytest.param(PLAIN, 0.0721687836, id="no-yarn"),
        pytest.param(yarn(mscale_all_dim=0.0), 0.0721687836, id="no-all-dim"),
        pytest.param(yarn(factor=1.0), 0.0721687836, id="factor-1"),
        pytest.param(yarn(mscale=0.3), 0.1308607999629, id="mscale-is-not-all-dim"),
        pytest.param(dataclasses.replace(KIMI_K2, n=16, r=8), 0.37013023618, id="tiny"),
    ],
)
def test_softmax_scale(dims: Dims, tau: float) -> None:
    assert dims.tau == pytest.approx(tau, rel=1e-9)


@pytest.mark.parametrize(
    ("dims", "gain"),
    [
        pytest.param(KIMI_K2, 1.0, id="K2"),
        pytest.param(V3, 1.0, id="V3"),
        pytest.param(PLAIN, 1.0, id="no-yarn"),
        pytest.param(yarn(factor=1.0), 1.0, id="factor-1"),
        pytest.param(
            yarn(mscale=0.7, mscale_all_dim=1.3),
            (0.07 * math.log(32) + 1) / (0.13 * math.log(32) + 1),
            id="mscales-differ",
        ),
        pytest.param(yarn(mscale_all_dim=0.0), 0.1 * math.log(32) + 1, id="no-all-dim"),
    ],
)
def test_gain_of_the_rotation(dims: Dims, gain: float) -> None:
    """At position 0 the cosine is the gain itself, the sine 0."""
    R = rotation(torch.arange(3), dims, torch.float32)
    assert dims.rotary_gain == pytest.approx(gain, rel=1e-12)
    torch.testing.assert_close(R.cos[0], torch.full((32,), gain), rtol=1e-7, atol=0)
    assert (R.sin[0] == 0).all()
    torch.testing.assert_close(R.cos[1:] ** 2 + R.sin[1:] ** 2, torch.full((2, 32), gain**2), rtol=1e-6, atol=0)


# ---- rotation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_rotation_turns_stored_pairs_and_returns_halves(heads: int, batched: bool) -> None:
    """By complex numbers: pair (2i, 2i+1) times exp(iωt); real parts first, then imaginary ones."""
    dims = dataclasses.replace(KIMI_K2, r=6, theta=100.0)
    x = torch.randn(2, 5, *([heads] if heads else []), 6, dtype=torch.float64)
    at = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 3, 100, 4096]]) if batched else torch.arange(5)
    made = rotate(x, rotation(at, dims, torch.float64))
    angle = at.double()[..., None] * inverse_frequencies(dims).double()
    angle = angle.expand(2, 5, 3)[:, :, None] if heads else angle.expand(2, 5, 3)
    turned = torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(made, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=3e-4)  # angles are fp32
    assert made.shape == x.shape


def test_scores_of_rotated_pairs_depend_on_distance_alone() -> None:
    dims = dataclasses.replace(KIMI_K2, r=8)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        turn = (rotate(x, rotation(torch.tensor([at]), dims, torch.float64)) for x, at in ((q, i), (k, j)))
        a, b = turn
        return float((a * b).sum())

    assert score(7, 3) == pytest.approx(score(4, 0), abs=1e-5)
    assert abs(score(7, 3) - score(3, 7)) > 1e-2
    assert abs(score(7, 3) - score(7, 5)) > 1e-2


# ---- positions and masks --------------------------------------------------------------------------------------------


def test_positions_count_real_tokens() -> None:
    assert position_ids(None, 4).tolist() == [0, 1, 2, 3]
    assert position_ids(padding([4, 2], "left"), 4).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    right = position_ids(padding([4, 2], "right"), 4)
    assert right[0].tolist() == [0, 1, 2, 3]
    assert right[1, :2].tolist() == [0, 1]
    assert (right >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_mask_opens_what_is_real_and_not_later(side: str | None, dtype: torch.dtype) -> None:
    keep = None if side is None else padding([4, 2, 1], side)
    M = causal_mask(keep, 4, dtype)
    assert M.dtype == dtype
    assert M.shape == ((4, 4) if keep is None else (3, 1, 4, 4))
    real = torch.ones(3, 4, dtype=torch.bool) if keep is None else keep
    for b in range(3):
        for t in range(4):
            for s in range(4):
                entry = M[t, s] if keep is None else M[b, 0, t, s]
                assert (entry == 0) == (s <= t and bool(real[b, s])), (b, t, s)
    shut = M[M != 0]
    assert shut.isfinite().all()
    least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    assert (shut <= (least / 2 if dtype == torch.float16 else least)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_masked_keys_get_nothing_and_pad_queries_stay_finite(dtype: torch.dtype) -> None:
    """Scores far below zero stay above the mask; a query that may look nowhere spreads evenly, and is no NaN."""
    keep = padding([5, 2], "left")
    size = 1 if dtype == torch.float16 else 10  # its mask is -65504: a score below -16 added to it overflows
    Q, K = (size * torch.randn(2, 5, 3, 4)).to(dtype), (size * torch.randn(2, 5, 3, 4)).to(dtype)
    M = causal_mask(keep, 5, dtype)
    A = pattern(scores(Q, K, 1.0, M))
    assert A.dtype == dtype
    assert A.isfinite().all()
    shut = (M != 0).expand_as(A)
    queries = keep[:, None, :, None].expand_as(A)
    assert (A[shut & queries] == 0).all()
    torch.testing.assert_close(A.float().sum(-1), torch.ones(2, 3, 5), rtol=0, atol=2e-2)
    torch.testing.assert_close(A[1, :, 0].float(), torch.full((3, 5), 0.2), rtol=0, atol=1e-3)


DIMS = Dims.from_config(config(n_group=4, topk_group=2))
DECODER = Decoder(random_weights(DIMS, 3))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_the_row_alone(side: str) -> None:
    lengths = [9, 4, 1]
    keep = padding(lengths, side)
    rows = [torch.randint(0, DIMS.V, (n,)) for n in lengths]
    tokens = torch.zeros(3, 9, dtype=torch.long)
    for at, real, row in zip(tokens, keep, rows, strict=True):
        at[real] = row
    made = DECODER(tokens, keep)
    assert made.isfinite().all()
    for logits, real, row in zip(made, keep, rows, strict=True):
        torch.testing.assert_close(logits[real], DECODER(row[None])[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_pads_hold_changes_nothing_real(side: str) -> None:
    keep = padding([9, 4, 1], side)
    tokens = torch.randint(0, DIMS.V, (3, 9))
    other = torch.where(keep, tokens, (tokens + 11) % DIMS.V)
    here, there = DECODER(tokens, keep)[keep], DECODER(other, keep)[keep]
    torch.testing.assert_close(here, there, rtol=0, atol=2e-5)  # not to the bit: experts see other numbers of rows


def test_a_full_mask_is_none() -> None:
    tokens = torch.randint(0, DIMS.V, (2, 7))
    assert torch.equal(DECODER(tokens, torch.ones(2, 7, dtype=torch.bool)), DECODER(tokens))


def test_integer_masks_mean_the_same() -> None:
    keep = padding([7, 3], "left")
    tokens = torch.randint(0, DIMS.V, (2, 7))
    assert torch.equal(DECODER(tokens, keep.long()), DECODER(tokens, keep))


# ---- norms and attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_by_definition(eps: float) -> None:
    x = torch.randn(3, 5, dtype=torch.float64) * 0.1
    s = inverse_rms(x, eps)
    assert s.dtype == torch.float32
    torch.testing.assert_close(s.double(), (x.pow(2).mean(-1, keepdim=True) + eps) ** -0.5, rtol=1e-6, atol=0)


def test_the_norm_is_cast_before_any_gain() -> None:
    x, w = torch.randn(200, 8).bfloat16(), torch.randn(8).bfloat16()
    s = inverse_rms(x, 1e-6)
    n = normalise(x, s)
    assert n.dtype == torch.bfloat16
    assert torch.equal(n, (x.float() * s).bfloat16())
    assert not torch.equal(w * n, (w.float() * x.float() * s).bfloat16()), "the order would not show"


@pytest.mark.parametrize("chunk", [1, 4, 7, 256])
def test_attention_by_definition(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, head by head; the chunk's size changes nothing but bits."""
    monkeypatch.setattr("probe.numerics.QUERY_CHUNK", chunk)
    Q, K, V = torch.randn(2, 7, 3, 5), torch.randn(2, 7, 3, 5), torch.randn(2, 7, 3, 4)
    M = causal_mask(padding([7, 4], "left"), 7, torch.float32)
    S = scores(Q, K, 0.3, M)
    O = mix(pattern(S), V)
    assert torch.equal(attend(Q, K, V, 0.3, M), O)
    assert (S.shape, O.shape) == ((2, 3, 7, 7), (2, 7, 3, 4))
    for b, h in ((0, 0), (0, 2), (1, 1)):
        exact = 0.3 * Q[b, :, h].double() @ K[b, :, h].double().T
        exact = exact.masked_fill(M[b, 0] != 0, -torch.inf)
        first = 3 if b else 0  # real queries
        torch.testing.assert_close(S[b, h].double()[M[b, 0] == 0], exact[M[b, 0] == 0], rtol=0, atol=1e-5)
        read = exact[first:].softmax(-1) @ V[b, :, h].double()
        torch.testing.assert_close(O[b, first:, h].double(), read, rtol=0, atol=1e-5)


def test_scores_are_rounded_product_then_scale_then_mask() -> None:
    Q, K = torch.randn(1, 6, 2, 8).bfloat16(), torch.randn(1, 6, 2, 8).bfloat16()
    M, tau = causal_mask(None, 6, torch.bfloat16), 0.1308607999629
    product = Q.transpose(1, 2) @ K.permute(0, 2, 3, 1)
    assert torch.equal(scores(Q, K, tau, M), product * tau + M)
    first = (Q * tau).transpose(1, 2) @ K.permute(0, 2, 3, 1) + M
    assert not torch.equal(scores(Q, K, tau, M), first), "the order would not show"


def test_the_pattern_is_made_in_fp32() -> None:
    S = 4 * torch.randn(2, 3, 5, 5).bfloat16()
    assert torch.equal(pattern(S), S.float().softmax(-1).bfloat16())


# ---- products grouped by expert -------------------------------------------------------------------------------------


def naive(x: Tensor, experts: Tensor, W: Tensor) -> Tensor:
    """Token by token, slot by slot."""
    B, T, k = experts.shape
    rows = [
        [[(x[b, t, j] if x.ndim == 4 else x[b, t]) @ W[experts[b, t, j]] for j in range(k)] for t in range(T)]
        for b in range(B)
    ]
    return torch.stack([torch.stack([torch.stack(slots) for slots in row]) for row in rows])


WIDTHS = {"whole-16-bytes": (16, 24), "odd-in": (15, 24), "odd-out": (16, 7), "odd": (5, 3), "one": (1, 1)}
ROUTES = {
    "spread": lambda: torch.stack([torch.randperm(6)[:2] for _ in range(10)]).view(2, 5, 2),
    "some-without-tokens": lambda: torch.tensor([1, 4]).expand(2, 5, 2).contiguous(),
    "first-and-last-without-tokens": lambda: torch.randint(1, 5, (2, 5, 2)),
    "all-to-the-last": lambda: torch.full((2, 5, 2), 5),
    "all-to-the-first": lambda: torch.zeros(2, 5, 2, dtype=torch.long),
}
PRECISE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def operands(widths: str, dtype: torch.dtype, slots: bool) -> tuple[Tensor, Tensor]:
    width, out = WIDTHS[widths]
    x = torch.randn(*((2, 5, 2) if slots else (2, 5)), width).to(dtype)
    return x, (torch.randn(6, width, out) / width**0.5).to(dtype)


@pytest.mark.parametrize("has_grouped_mm", [True, False], ids=["as-it-is", "torch-without-grouped_mm"])
@pytest.mark.parametrize("slots", [False, True], ids=["a-row-a-token", "a-row-a-slot"])
@pytest.mark.parametrize("dtype", PRECISE, ids=str)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("route", ROUTES)
def test_grouped_is_the_naive_loop(
    route: str, widths: str, dtype: torch.dtype, slots: bool, has_grouped_mm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_grouped_mm:
        monkeypatch.delattr(F, "grouped_mm", raising=False)
    x, W = operands(widths, dtype, slots)
    experts = ROUTES[route]()
    made = grouped(x, experts, W)
    assert made.dtype == dtype
    assert made.shape == (*experts.shape, W.shape[-1])
    torch.testing.assert_close(made.double(), naive(x.double(), experts, W.double()), rtol=0, atol=5 * PRECISE[dtype])


@pytest.mark.parametrize("stored", ["in-out", "out-in", "a-slice-of-fused", "expanded"])
@pytest.mark.parametrize("slots", [False, True], ids=["a-row-a-token", "a-row-a-slot"])
def test_grouped_takes_weights_as_they_are_stored(stored: str, slots: bool) -> None:
    """Views of every kind: transposed as checkpoints are, cut from gate and up fused, one matrix for all experts."""
    x, W = operands("whole-16-bytes", torch.float32, slots)
    W = {
        "in-out": lambda: W,
        "out-in": lambda: W.transpose(1, 2).contiguous().transpose(1, 2),
        "a-slice-of-fused": lambda: torch.cat([W, W], -1).transpose(1, 2).contiguous()[:, 24:].transpose(1, 2),
        "expanded": lambda: W[:1].expand(6, -1, -1),
    }[stored]()
    experts = ROUTES["spread"]()
    torch.testing.assert_close(grouped(x, experts, W), naive(x, experts, W), rtol=0, atol=5e-5)


def test_grouped_takes_rows_as_they_are_strided() -> None:
    x, W = operands("whole-16-bytes", torch.float32, False)
    experts = ROUTES["spread"]()
    strided = torch.stack([x, -x], -1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(grouped(strided, experts, W), grouped(x, experts, W))
    assert torch.equal(grouped(x[:1, :1].expand_as(x), experts, W), grouped(x[:1, :1].repeat(2, 5, 1), experts, W))
    assert torch.equal(grouped(x, experts.transpose(0, 1).contiguous().transpose(0, 1), W), grouped(x, experts, W))


def test_grouped_takes_no_tokens() -> None:
    W = torch.randn(6, 16, 24)
    made = grouped(torch.randn(0, 5, 16), torch.zeros(0, 5, 2, dtype=torch.long), W)
    assert made.shape == (0, 5, 2, 24)


@pytest.mark.parametrize("ends", [[3, 3, 7, 10], [0, 0, 0, 10], [10, 10, 10, 10], [1, 4, 9, 10]], ids=str)
def test_by_hand_is_torchs(ends: list[int]) -> None:
    """The fallback against the operator that it stands in for, where this torch has it."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    rows, W, at = torch.randn(10, 16), torch.randn(4, 16, 8), torch.tensor(ends, dtype=torch.int32)
    torch.testing.assert_close(grouped_by_hand(rows, W, at), F.grouped_mm(rows, W, offs=at), rtol=0, atol=1e-5)


LOSSES = {
    "weighted": lambda y: (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(),
    "sum": lambda y: y.sum(),  # its gradient is one number with strides 0
    "sum-of-some-slots": lambda y: y[:, :, :1].sum(),
    "mean-over-slots": lambda y: y.mean(2).pow(2).sum(),
}


@pytest.mark.parametrize("has_grouped_mm", [True, False], ids=["as-it-is", "torch-without-grouped_mm"])
@pytest.mark.parametrize("slots", [False, True], ids=["a-row-a-token", "a-row-a-slot"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("widths", ["whole-16-bytes", "odd"])
@pytest.mark.parametrize("route", ["spread", "some-without-tokens"])
def test_gradients_are_the_naive_loops(
    route: str, widths: str, loss: str, slots: bool, has_grouped_mm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_grouped_mm:
        monkeypatch.delattr(F, "grouped_mm", raising=False)
    x, W = operands(widths, torch.float32, slots)
    W = W.transpose(1, 2).contiguous().transpose(1, 2)  # as stored
    experts = ROUTES[route]()
    exact = [t.double().requires_grad_() for t in (x, W)]
    LOSSES[loss](naive(exact[0], experts, exact[1])).backward()
    ours = [t.clone().requires_grad_() for t in (x, W)]
    LOSSES[loss](grouped(ours[0], experts, ours[1])).backward()
    for here, there in zip(ours, exact, strict=True):
        torch.testing.assert_close(here.grad.double(), there.grad, rtol=0, atol=1e-4)
    if route == "some-without-tokens":
        assert (ours[1].grad[[0, 2, 3, 5]] == 0).all()


def test_gradients_in_fp64_by_differences() -> None:
    x, W = (t.double().requires_grad_() for t in operands("odd", torch.float64, False))
    experts = ROUTES["spread"]()
    assert torch.autograd.gradcheck(lambda x, W: grouped(x, experts, W), (x, W))


def test_gradients_reach_every_weight_of_a_decoder() -> None:
    """Through attention, router and experts; only the correction bias, which chooses alone, gets none."""
    dims = dataclasses.replace(DIMS, moe=(False, True), n_group=1, topk_group=1)
    weights = random_weights(dims, 4)
    for tensor in weights.tensors.values():
        tensor.requires_grad_()
    Decoder(weights)(torch.randint(0, dims.V, (3, 9))).sum().backward()
    without = {at for at, tensor in weights.tensors.items() if tensor.grad is None or not tensor.grad.any()}
    assert without == {(1, "b")}
    assert all(t.grad.isfinite().all() for at, t in weights.tensors.items() if at not in without)
