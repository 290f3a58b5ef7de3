"""What is drawn, at random but for good: it hangs on a seed and on the text that it is drawn for, and on nothing else.

So a prompt draws alike in any batch, in any order, beside any others, alone, padded, or while it is decoded; and equal
texts draw alike. A generator that hands out one number after the other can't do that: here each number is made by
itself, as a hash of the seed, the text up to its position, and its place there.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014), as signed integers."""


def hashed(number: Tensor, *more: Tensor | int) -> Tensor:
    """64 bits of a number, and of those after it; each bit hangs on all of them. They broadcast."""
    made = _mixed(number)
    for one in more:
        made = _mixed(made + one)
    return made


def _mixed(number: Tensor) -> Tensor:
    """SplitMix64's output function; integers wrap around."""
    x = number + _STEP
    for by, factor in zip((30, 27), _MIX, strict=True):
        x.bitwise_xor_(_right(x, by)).mul_(factor)
    return x.bitwise_xor_(_right(x, 31))


def _right(x: Tensor, by: int) -> Tensor:
    """Shifted to the right, zeros coming in."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def texts(ids: Tensor, keep: Tensor | None, starts: Tensor | None = None) -> Tensor:
    """[B T], a number for the text of a row's real tokens up to each position.

    Args:
        ids: [B T], token ids; or [B T d], a residual stream, whose bits then stand for them.
        keep: [B T], true where a token is real; None: all are.
        starts: [B T], the place at which each token's text starts; None: a row is one text.
    """
    if ids.is_floating_point():
        bits = ids.cpu().contiguous().view(torch.int16 if ids.element_size() == 2 else torch.int32).long()
        ids = hashed(bits, torch.arange(bits.shape[-1])).sum(-1)
    made = torch.zeros(ids.shape, dtype=torch.int64)
    real = torch.ones_like(made, dtype=torch.bool) if keep is None else keep.bool().cpu()
    so_far = torch.zeros(len(ids), dtype=torch.int64)
    for t, column in enumerate(ids.cpu().long().unbind(1)):
        if starts is not None:
            so_far = so_far.masked_fill(starts[:, t] == t, 0)
        so_far = torch.where(real[:, t], hashed(so_far, column), so_far)
        made[:, t] = so_far
    return made


def normal(bits: Tensor) -> Tensor:
    """Standard normal numbers in fp32, of hashes."""
    middle = (_right(bits, 41).float() + 0.5) / (1 << 22) - 1  # of 2²³ equal parts of (−1, 1): none of them ends it
    return torch.erfinv(middle) * 2**0.5


def below(bits: Tensor, n: int) -> Tensor:
    """Whole numbers 0 … n-1, of hashes."""
    return _right(bits, 1) % n
