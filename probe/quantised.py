"""The two quantised forms of published checkpoints, both ways: FP8 in blocks of 128 × 128, INT4 in groups of 32.

A dequantised weight is a bf16 number: what is stored times its scale, multiplied in fp32, rounded to bf16, ties to
even. In any other dtype it is that number, cast: an fp32 product that skips the rounding would be a weight that no
bf16 model has.

Both ways back go a stripe of rows at a time, through scratch that is made once and stays in the cache: bits are moved
to where a 16-bit type has them, and what that type reads in them is cast, multiplied and rounded. Most of the time of
the plain expression (`plain_fp8`) is the making of its whole-matrix temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from probe.errors import BadCheckpoint, ShapeMismatch

BLOCK = 128
"""Rows and columns that share an FP8 scale, always: 576 rows have 5 scales, the last for 64 of them."""

GROUP = 32
"""Inputs of one output that share an INT4 scale."""

FP8_MAX = 448.0
_TINY = torch.finfo(torch.float32).tiny
_STRIPE = 2**19
"""Elements of a stripe, six bytes of scratch each: few enough for a CPU's cache, and enough that a call's own cost is
small beside its work. A GPU takes 64 times as many."""


def fp8_scales(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales of an FP8 matrix [rows columns]: one a block, ragged blocks included."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def int4_scales(outputs: int, inputs: int) -> tuple[int, int]:
    """The shape of the scales of an INT4 matrix [outputs inputs]: one a group of an output's inputs.

    Raises:
        BadCheckpoint: inputs that are no whole number of groups.
    """
    if inputs % GROUP:
        raise BadCheckpoint(f"INT4 has one scale for {GROUP} inputs, and {inputs} is no multiple of that.")
    return outputs, inputs // GROUP


def dequantise_fp8(
    stored: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, *, out: Tensor | None = None
) -> Tensor:
    """[M N] from float8_e4m3fn [M N] and fp32 scales [⌈M/128⌉ ⌈N/128⌉]; DeepSeek-V3's ``weight_scale_inv``.

    The scale is multiplied by, whatever its name says: W[i, j] = bf16(fp32(stored[i, j]) · scale[i // 128, j // 128]).

    Args:
        dtype: of the new tensor.
        out: written instead of a new tensor, in its own dtype.

    Raises:
        BadCheckpoint: another dtype or shape; a NaN among the weights; a scale that is NaN or infinite.
    """
    m, n = stored.shape
    _expect("FP8 weight", stored, torch.float8_e4m3fn, (m, n))
    _expect("FP8 scale", scale, torch.float32, fp8_scales(m, n))
    _refuse_infinite(scale, "the scale of block {} is NaN or infinite. Fetch the file anew.")
    codes = stored.view(torch.int8)
    made = _target(out, (m, n), dtype, stored.device)

    def halves(part: Tensor, half: Tensor) -> Tensor:
        """fp16: seeeemmm becomes s0eeeemmm0000000, which is the number times 2^-8, subnormals included."""
        _refuse_nan(part, codes)
        return half.copy_(part).mul_(2**7).bitwise_and_(~0x4000).view(torch.float16)

    if scale.abs().amax() < 2.0**120:  # so that the missing 2^8 can go to the scale, exactly
        _by_stripes(codes, halves, (scale * 2.0**8).repeat_interleave(BLOCK, 0)[:m], BLOCK, made)
    else:
        _refuse_nan(codes, codes)
        made.copy_(plain_fp8(stored, scale))
    return made


def plain_fp8(stored: Tensor, scale: Tensor) -> Tensor:
    """`dequantise_fp8` as its rule is written, unchecked, in bf16: what it must equal, at any scale."""
    full = scale.repeat_interleave(BLOCK, 0)[: len(stored)].repeat_interleave(BLOCK, 1)[:, : stored.shape[1]]
    return full.mul_(stored.float()).to(torch.bfloat16)


def _by_stripes(
    stored: Tensor, widen: Callable[[Tensor, Tensor], Tensor], factors: Tensor, width: int, made: Tensor
) -> None:
    """``made``[i, j] = bf16(fp32(widen(``stored``)[i, j]) · factors[i, j // width]), cast.

    Args:
        widen: some rows of what is stored, and int16 scratch for them, in which it leaves their 16-bit numbers.
        factors: fp32.
    """
    m, n = made.shape
    step = min(max((_STRIPE if made.is_cpu else 64 * _STRIPE) // n, 1), m)
    half = torch.empty((step, n), dtype=torch.int16, device=made.device)
    full = torch.empty((step, factors.shape[1], width), dtype=torch.float32, device=made.device)
    for part, factor, out in zip(stored.split(step), factors[..., None].split(step), made.split(step), strict=True):
        h, groups = half[: len(part)], full[: len(part)]
        f = groups.flatten(1)[:, :n]  # of a ragged last group what lies beyond n is multiplied too, and never read
        f.copy_(widen(part, h))
        groups.mul_(factor)
        out.copy_(f if made.dtype == torch.bfloat16 else h.view(torch.bfloat16).copy_(f))


def _refuse_nan(part: Tensor, codes: Tensor) -> None:
    """0x7f is the largest signed byte, 0xff the largest unsigned one: two passes that cost next to nothing."""
    if int(part.max()) == 0x7F or int(part.view(torch.uint8).max()) == 0xFF:
        row, column = (codes.bitwise_and(0x7F) == 0x7F).nonzero()[0].tolist()
        raise BadCheckpoint(f"the weight at row {row}, column {column} is NaN. Fetch the file anew.")


def quantise_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[M N] as float8_e4m3fn [M N] and fp32 scales [⌈M/128⌉ ⌈N/128⌉], each a block's largest magnitude / 448.

    Raises:
        BadCheckpoint: a weight is NaN or infinite.
    """
    m, n = weight.shape
    stored = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(fp8_scales(m, n), dtype=torch.float32, device=weight.device)
    for i, part in enumerate(weight.detach().split(BLOCK)):
        rows = part.float().contiguous()
        largest = F.pad(rows.abs().amax(0), (0, -n % BLOCK)).view(-1, BLOCK).amax(1)
        scale[i] = (largest / FP8_MAX).clamp(min=_TINY)
        factor = scale[i].repeat_interleave(BLOCK)[:n]
        stored[i * BLOCK : i * BLOCK + len(rows)] = rows / factor
    _refuse_infinite(scale, "a weight of block {} is NaN or infinite, which FP8 cannot hold.")
    return stored, scale


def dequantise_int4(
    packed: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """[O I] from int32 [O I/8] and bf16 scales [O I/32]; compressed-tensors' ``pack-quantized``, symmetric.

    Eight weights a word, the first in its lowest four bits: W[o, i] = bf16((nibble − 8) · scale[o, i // 32]).

    Args:
        shape: (O, I), stored beside them as ``weight_shape``.
        dtype, out: as `dequantise_fp8`.

    Raises:
        BadCheckpoint: another dtype or shape; I is no multiple of 32; a scale that is NaN or infinite.
    """
    o, i = shape
    scales = int4_scales(o, i)
    _expect("INT4 weight", packed, torch.int32, (o, i // 8))
    _expect("INT4 scale", scale, torch.bfloat16, scales)
    factors = scale.float() * 2.0**-12  # exactly: no bf16 has a digit below 2^-133, and fp32 goes down to 2^-149
    _refuse_infinite(factors, "the scale of group {} is NaN or infinite. Fetch the file anew.")
    made = _target(out, (o, i), dtype, packed.device)
    eights = torch.tensor((8 << 12) - (8 << 28), dtype=torch.int32, device=packed.device)

    def nibbles(pairs: Tensor, half: Tensor) -> Tensor:
        """int16: a byte's low nibble goes to bits 12 to 15, its high one to 28 to 31, and 8 is added to both.

        Which, modulo 16, is the nibble less 8 in two's complement, times 2^12.
        """
        words = half.view(torch.int32).copy_(pairs)
        torch.add(eights, words, alpha=(1 << 12) + (1 << 24), out=words).bitwise_and_(~0x0FFF0FFF)
        return half

    _by_stripes(packed.contiguous().view(torch.uint8), nibbles, factors, GROUP, made)
    return made


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O I] as int32 [O I/8] and bf16 scales [O I/32], each a group's largest magnitude / 7; -8 is left unused.

    Raises:
        BadCheckpoint: I is no multiple of 32; a weight is NaN or infinite.
    """
    o, i = weight.shape
    scale = torch.empty(int4_scales(o, i), dtype=torch.bfloat16, device=weight.device)
    packed = torch.empty((o, i // 8), dtype=torch.int32, device=weight.device)
    step = max(_STRIPE // i, 1)
    for at in range(0, o, step):
        groups = weight.detach()[at : at + step].float().contiguous().unflatten(1, (-1, GROUP))
        factor = (groups.abs().amax(-1) / 7).clamp_(min=_TINY).to(torch.bfloat16)
        nibbles = (groups / factor[..., None]).round_().add_(8).to(torch.uint8).flatten(1)
        packed[at : at + step] = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(torch.int32)
        scale[at : at + step] = factor
    _refuse_infinite(scale, "a weight of group {} is NaN or infinite, which INT4 cannot hold.")
    return packed, scale


def _refuse_infinite(scale: Tensor, fact: str) -> None:
    if not bool(scale.abs().amax() < math.inf):  # NaN is not smaller either
        raise BadCheckpoint(fact.format((~scale.isfinite()).nonzero()[0].tolist()))


def _expect(what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise BadCheckpoint(f"the {what} should be {dtype} {list(shape)}, and is {tensor.dtype} {list(tensor.shape)}.")


def _target(out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if out.shape != shape or out.device != device:
        raise ShapeMismatch(f"out should be {list(shape)} on {device}, and is {list(out.shape)} on {out.device}.")
    return out
