"""The two quantised forms of published checkpoints, both ways: FP8 in blocks of 128 × 128, INT4 in groups of 32.

A dequantised weight is a bf16 number: what is stored times its scale, multiplied in fp32, rounded to bf16, ties to
even. In any other dtype it is that number, cast: an fp32 product that skips the rounding would be a weight that no
bf16 model has.

On a CPU both ways back go a stripe of rows at a time through scratch that stays in the cache. Most of the time of the
plain expression (`plain_fp8`) is the making of its whole-matrix temporaries.
"""

from __future__ import annotations

import math
from functools import cache

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
_STRIPE = 2**18
"""Elements of a stripe: six bytes of scratch each, so that it stays in a core's cache, and a call is worth its cost."""


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
    made = _target(out, (m, n), dtype, stored.device)
    if stored.is_cpu:
        _fp8_by_stripes(stored.view(torch.int8), scale, made)
    else:
        _refuse_nan(stored.view(torch.int8), 0)
        made.copy_(plain_fp8(stored, scale))
    return made


def plain_fp8(stored: Tensor, scale: Tensor) -> Tensor:
    """`dequantise_fp8` as its rule is written, unchecked, in bf16: what it must equal, and what runs on a GPU."""
    full = scale.repeat_interleave(BLOCK, 0)[: len(stored)].repeat_interleave(BLOCK, 1)[:, : stored.shape[1]]
    return full.mul_(stored.float()).to(torch.bfloat16)


def _fp8_by_stripes(codes: Tensor, scale: Tensor, made: Tensor) -> None:
    """The bits of e4m3, moved to their places in an fp16, are the number times 2^-8, subnormals included.

    Sign s, exponent e and mantissa m: seeeemmm becomes s0eeeemmm0000000. The missing 2^8 goes to the scale, which is
    exact unless it overflows; then it goes to the numbers.
    """
    m, n = codes.shape
    late = bool(scale.abs().amax() >= 2.0**120)
    scale = scale if late else scale * 2.0**8
    step = _rows_of_a_stripe(n)
    half = torch.empty((step, n), dtype=torch.int16, device=codes.device)
    full = torch.empty((step, n), dtype=torch.float32, device=codes.device)
    for at in range(0, m, step):
        if at % BLOCK == 0:
            factor = scale[at // BLOCK].repeat_interleave(BLOCK)[:n]
        part = codes[at : at + step]
        _refuse_nan(part, at)
        h, f = half[: len(part)], full[: len(part)]
        h.copy_(part).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        f.copy_(h.view(torch.float16))
        if late:
            f.mul_(2.0**8)
        f.mul_(factor)
        made[at : at + step].copy_(f if made.dtype == torch.bfloat16 else h.view(torch.bfloat16).copy_(f))


def _rows_of_a_stripe(columns: int) -> int:
    """A power of two up to 128, so that no stripe crosses a row of blocks."""
    return 1 << min(max(_STRIPE // columns, 1).bit_length() - 1, 7)


def _refuse_nan(codes: Tensor, first: int) -> None:
    """0x7f is the largest signed byte, 0xff the largest unsigned one: two passes that cost next to nothing."""
    if codes.amax() == 0x7F or codes.view(torch.uint8).amax() == 0xFF:
        row, column = (codes.bitwise_and(0x7F) == 0x7F).nonzero()[0].tolist()
        raise BadCheckpoint(f"the weight at row {first + row}, column {column} is NaN. Fetch the file anew.")


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
    _refuse_infinite(scale, "the scale of group {} is NaN or infinite. Fetch the file anew.")
    made = _target(out, (o, i), dtype, packed.device)
    quads = packed.contiguous().view(torch.uint16)
    step = max(_STRIPE // i, 1) if packed.is_cpu else o
    looked_up = torch.empty(step * i // 4, dtype=torch.int64, device=packed.device)
    for at in range(0, o, step):
        part = quads[at : at + step].to(torch.int32).view(-1)
        four = torch.index_select(_quads(packed.device), 0, part, out=looked_up[: len(part)])
        values = four.view(torch.bfloat16).view(-1, i // GROUP, GROUP)
        torch.mul(values, scale[at : at + step, :, None], out=made[at : at + step].unflatten(1, (-1, GROUP)))
    return made


@cache
def _quads(device: torch.device) -> Tensor:
    """For each 16 bits the four bf16 numbers that they stand for, as one int64: [2^16], 512 KiB."""
    nibbles = torch.arange(2**16, device=device)[:, None] >> torch.tensor([0, 4, 8, 12], device=device) & 0xF
    return (nibbles - 8).to(torch.bfloat16).view(torch.int64).view(-1)


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
