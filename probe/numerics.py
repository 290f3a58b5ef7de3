"""The numerics with more than a line: rotation and YaRN, masks, attention in chunks, products grouped by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from probe.dims import Dims

QUERY_CHUNK = 256
"""Queries per attention product. A product's bits may depend on its row count, so `S`, `A`, `O` are always made in
the same chunks, kept or not: that is why watching them changes nothing."""


Show = Callable[[str, slice, Tensor], None]
"""Sees a chunk of queries of a tensor that never exists whole: its name, which queries, the chunk; only to look."""


def finite(x: Tensor) -> bool:
    """Whether no number is NaN or infinite, from the least and the largest: to look at each takes 25 times as long."""
    if x.is_meta or not x.numel():
        return True
    low, high = x.detach().aminmax()
    return bool(low.isfinite() & high.isfinite())


class Rotation(NamedTuple):
    """Cosines and sines of the positions, [T, r/2] each, or [B, T, r/2]; in the activation dtype."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(dims: Dims, device: torch.device | None = None) -> Tensor:
    """Angle per position of each rotary pair, [r/2], fp32; YaRN's ramp between kept and stretched ones.

    Source: YaRN (Peng et al. 2023) as in DeepSeek-V3's reference: pairs that turn more than ``beta_fast`` times
    within the original context are kept, those that turn less than ``beta_slow`` times are slowed by ``factor``.
    """
    r, theta = dims.r, dims.theta
    kept = 1.0 / theta ** (torch.arange(0, r, 2, dtype=torch.float32, device=device) / r)
    if dims.yarn is None:
        return kept
    yarn = dims.yarn

    def pair_turning(times: float) -> float:
        return r * math.log(yarn.original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair_turning(yarn.beta_slow)), r - 1)
    if low == high:
        high += 0.001
    stretched = 1.0 / (yarn.factor * theta ** (torch.arange(0, r, 2, dtype=torch.float32, device=device) / r))
    keep = 1 - ((torch.arange(r // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
    return stretched * (1 - keep) + kept * keep


def rotation(positions: Tensor, dims: Dims, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of ``positions`` ([T] or [B, T], integers): angles in fp32, then one cast to ``dtype``."""
    angle = positions.to(torch.float32)[..., None] * inverse_frequencies(dims, positions.device)
    gain = dims.rotary_gain
    return Rotation((angle.cos() * gain).to(dtype), (angle.sin() * gain).to(dtype))


def rotate(x: Tensor, R: Rotation) -> Tensor:
    """Turn the stored pairs (2i, 2i+1) of the last axis; they come back as (i, r/2 + i), half-split.

    ``x`` is [B, T, r] or [B, T, h, r].
    """
    cos, sin = R
    if x.ndim == 4:  # one angle for all heads
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def position_ids(
    keep: Tensor | None, length: int, device: torch.device | None = None, segments: Tensor | None = None
) -> Tensor:
    """Positions of the tokens, [T], or [B, T] with a mask or segments: 0, 1, … over each row's real ones, anew in each
    segment, 0 before them."""
    if segments is not None:
        counted = position_ids(keep, length, device).expand(segments.shape)
        return counted - counted.gather(-1, text_starts(keep, segments).to(device))
    if keep is None:
        return torch.arange(length, device=device)
    return (keep.to(device=device, dtype=torch.long).cumsum(-1) - 1).clamp(min=0)


def text_starts(keep: Tensor | None, segments: Tensor) -> Tensor:
    """For each place of packed rows, [B, T], the place at which its text starts: the run of one id in ``segments``
    ([B, T], integers) that it stands in; of pads it means nothing."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    if keep is not None:
        real = keep.to(device=segments.device, dtype=torch.bool)
        begins[:, 1:] |= ~real[:, :-1]
        begins &= real
    places = torch.arange(segments.shape[1], device=segments.device)
    return torch.where(begins, places, 0).cummax(-1).values


def causal_mask(
    keep: Tensor | None,
    length: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
    queries: slice = slice(None),
    segments: Tensor | None = None,
) -> Tensor:
    """The additive mask: 0 where a query may look, a number below all scores elsewhere (see `forbidden`).

    [T, S] without pads and segments, [B, 1, T, S] with: pad keys are hidden from everyone, and the keys of a segment
    from all others. A pad query sees no key at all; its row is then equal everywhere, so that softmax stays finite. Of
    these ``queries`` alone.
    """
    places = torch.arange(length, device=device)
    allowed = places <= places[queries, None]
    if keep is not None:
        allowed = allowed & keep.to(device=device, dtype=torch.bool)[:, None, None, :]
    if segments is not None:
        allowed = allowed & (places >= text_starts(keep, segments).to(device)[:, None, queries, None])
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, forbidden(dtype))


def forbidden(dtype: torch.dtype) -> float:
    """What is added to a score that must not count: the dtype's least number, as in the references.

    In fp64 it is fp32's, as the softmax is fp32; in fp16 half of it, as a score added to the least would overflow to
    -inf, and a pad query, all of whose keys are hidden, would come out NaN.
    """
    if dtype == torch.float16:
        return torch.finfo(dtype).min / 2
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1/rms over the last axis, kept as an axis of 1, fp32."""
    return torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)


def normalise(x: Tensor, s: Tensor) -> Tensor:
    """x · s in fp32, cast to ``x``'s dtype *before* any gain: gain-then-cast gives other bits in bf16."""
    return (x.to(torch.float32) * s).to(x.dtype)


def query_chunks(length: int) -> Iterator[slice]:
    """The slices of queries that attention is made in."""
    return (slice(start, start + QUERY_CHUNK) for start in range(0, length, QUERY_CHUNK))


def scores(Q: Tensor, K: Tensor, tau: float, M: Tensor) -> Tensor:
    """tau · Q Kᵀ + M, [B, h, T, S], chunk by chunk of queries: product, then scale, then mask, each rounded."""
    keys = K.permute(0, 2, 3, 1)
    made = [_scores(Q[:, rows], keys, tau, M[..., rows, :]) for rows in query_chunks(Q.shape[1])]
    return made[0] if len(made) == 1 else torch.cat(made, dim=2)


def _scores(Q: Tensor, keys: Tensor, tau: float, M: Tensor) -> Tensor:
    return Q.transpose(1, 2) @ keys * tau + M


def pattern(S: Tensor) -> Tensor:
    """softmax over keys in fp32, cast to the scores' dtype."""
    return torch.softmax(S, dim=-1, dtype=torch.float32).to(S.dtype)


def mix(A: Tensor, V: Tensor) -> Tensor:
    """A V, [B, T, h, v], chunk by chunk of queries."""
    values = V.transpose(1, 2)
    made = [A[:, :, rows] @ values for rows in query_chunks(A.shape[2])]
    return (made[0] if len(made) == 1 else torch.cat(made, dim=2)).transpose(1, 2)


def attend(Q: Tensor, K: Tensor, V: Tensor, tau: float, M: Tensor, show: Show | None = None) -> Tensor:
    """`mix` of `pattern` of `scores` without ever holding more than one chunk of either; the same bits.

    ``show`` sees the chunks of S and of A, [B, h, t, S].
    """
    keys, values = K.permute(0, 2, 3, 1), V.transpose(1, 2)
    made = []
    for rows in query_chunks(Q.shape[1]):
        S = _scores(Q[:, rows], keys, tau, M[..., rows, :])
        A = pattern(S)
        if show is not None:
            show("S", rows, S)
            show("A", rows, A)
        del S  # half the chunk's bytes
        made.append(A @ values)
    return (made[0] if len(made) == 1 else torch.cat(made, dim=2)).transpose(1, 2)


def grouped(x: Tensor, experts: Tensor, W: Tensor) -> Tensor:
    """Each slot's row times its expert's matrix: out[b, t, j] = x[b, t(, j)] @ W[experts[b, t, j]].

    Rows are sorted by expert, so that each expert's tokens meet its weight in one product.

    Args:
        x: [B, T, in], one row a token, or [B, T, k, in], one a slot.
        experts: [B, T, k], integers, rows of ``W``.
        W: [E, in, out].

    Returns:
        [B, T, k, out], in ``x``'s dtype; the product is made in ``W``'s.
    """
    sort = _Sorted(experts, W.shape[0])
    rows = x.reshape(-1, x.shape[-1]).index_select(0, sort.order if x.ndim == 4 else sort.token)
    return sort.back(_by_expert(rows, W, sort.ends)).view(*experts.shape, W.shape[-1])


def mixture(x: Tensor, experts: Tensor, gates: Tensor, W_1: Tensor, W_3: Tensor, W_2: Tensor) -> Tensor:
    """Σ_k gates · SwiGLU of the chosen experts, summed in fp32, in one sorting; equal to slot by slot but for rounding.

    On a CPU one expert goes after the other, so that its rows stay in the cache from the first product to the last.

    Args:
        x: [B, T, d].
        experts, gates: [B, T, k].
        W_1, W_3, W_2: [E, d, m], [E, d, m], [E, m, d].

    Returns:
        [B, T, d], fp32.
    """
    sort = _Sorted(experts, W_1.shape[0])
    rows = x.reshape(-1, x.shape[-1])
    weight = gates.reshape(-1)[sort.order, None]
    if x.device.type == "cpu":
        return _one_by_one(rows, sort.token, weight, sort.ends, W_1, W_3, W_2).view(x.shape)
    here = rows.index_select(0, sort.token)
    h = F.silu(_by_expert(here, W_1, sort.ends), inplace=True).mul_(_by_expert(here, W_3, sort.ends))
    y = _by_expert(h, W_2, sort.ends).to(gates.dtype).mul_(weight)
    return sort.back(y).view(*experts.shape, -1).sum(2)


def _one_by_one(
    rows: Tensor, token: Tensor, weight: Tensor, ends: Tensor, W_1: Tensor, W_3: Tensor, W_2: Tensor
) -> Tensor:
    out = weight.new_zeros(rows.shape)
    for e, (a, b) in enumerate(pairwise([0, *ends.tolist()])):
        if b > a:
            here = rows.index_select(0, token[a:b]).to(W_1.dtype)
            h = F.silu((here @ W_1[e]).to(rows.dtype), inplace=True).mul_((here @ W_3[e]).to(rows.dtype))
            if h.dtype == weight.dtype == W_2.dtype:
                out.index_add_(
                    0, token[a:b], h.mul_(weight[a:b]) @ W_2[e]
                )  # the neurons are fewer than what they write
            else:
                out.index_add_(0, token[a:b], (h.to(W_2.dtype) @ W_2[e]).to(weight.dtype).mul_(weight[a:b]))
    return out


class _Sorted:
    """Slots in the order of their experts, with where each expert's end; and the way back."""

    def __init__(self, experts: Tensor, count: int) -> None:
        in_order, self.order = experts.reshape(-1).sort(stable=True)
        each = torch.arange(1, count + 1, dtype=in_order.dtype, device=in_order.device)
        self.ends = torch.searchsorted(in_order, each, out_int32=True)
        self.k = experts.shape[-1]

    @property
    def token(self) -> Tensor:
        """The tokens of the sorted slots."""
        return self.order // self.k

    def back(self, rows: Tensor) -> Tensor:
        """Sorted rows in their slots' own order."""
        places = torch.arange(len(self.order), device=self.order.device)
        return rows.index_select(0, torch.empty_like(self.order).scatter_(0, self.order, places))


def _by_expert(rows: Tensor, W: Tensor, ends: Tensor) -> Tensor:
    """Sorted rows times their experts' matrices; in the matrices' dtype, and back in the rows' own."""
    low = rows.to(W.dtype)
    made = F.grouped_mm(low, W, offs=ends) if _takes_grouped_mm(low, W) else grouped_by_hand(low, W, ends)
    return made.to(rows.dtype)


def grouped_by_hand(rows: Tensor, W: Tensor, ends: Tensor) -> Tensor:
    """``F.grouped_mm`` where that can't be had: one product for each expert that has tokens, and one host sync."""
    bounds = [0, *ends.tolist()]
    made = [rows[a:b] @ W[e] for e, (a, b) in enumerate(pairwise(bounds)) if b > a]
    return torch.cat(made) if made else rows.new_zeros(0, W.shape[-1])


def _takes_grouped_mm(rows: Tensor, W: Tensor) -> bool:
    """Whether ``F.grouped_mm`` takes these: 16-byte strides; bf16 (compute capability 8 up on a GPU), more on a CPU."""
    if not hasattr(F, "grouped_mm") or rows.dtype != W.dtype:
        return False
    if rows.device.type == "cpu":
        fits = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    elif rows.device.type == "cuda":
        fits = rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    else:
        fits = rows.dtype == torch.bfloat16
    aligned = all(size * rows.element_size() % 16 == 0 for size in W.shape[1:])
    unit = 1 in W.stride()[1:] and W.storage_offset() * W.element_size() % 16 == 0
    return fits and aligned and unit
