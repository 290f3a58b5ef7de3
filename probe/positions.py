"""Where tokens stand: position ids of the user's own, and texts packed in one row; what can't be meant is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from probe.errors import BadText, OutOfRange, ShapeMismatch

FARTHEST = 1 << 24
"""The last position that angles tell from its neighbours: they are made in fp32."""


def check_positions(keep: Tensor | None, positions: Tensor | None, segments: Tensor | None, shape: list[int]) -> None:
    """Refuse positions or segments that rows of this shape, [B, T], can't have; what stands on pads is not looked at.

    Raises:
        ShapeMismatch: they are no integers [B T].
        BadText: a segment stands in two parts; or positions do not rise within a text.
        OutOfRange: a position below 0, or too far for its angle.
    """
    for name, given in (("positions", positions), ("segments", segments)):
        if given is not None and (list(given.shape) != shape or given.dtype not in (torch.int64, torch.int32)):
            raise ShapeMismatch(
                f"{name} should be integers [B T] = {shape}; they are {given.dtype} {list(given.shape)}."
            )
    real = torch.ones(shape, dtype=torch.bool) if keep is None else keep.cpu().bool()
    segments = None if segments is None else segments.cpu()
    if segments is not None:
        _check_segments(real, segments)
    if positions is not None:
        _check_rising(real, positions.cpu(), segments)


def _check_segments(real: Tensor, segments: Tensor) -> None:
    for b, row in enumerate(segments):
        texts, each = torch.unique_consecutive(row[real[b]], return_counts=True)
        names = texts.tolist()
        for i, text in enumerate(names):
            if text in names[:i]:
                raise BadText(
                    f"segment {text} of row {b} comes again at token {int(each[:i].sum())}, behind another; a text"
                    " stands in one piece, under an id of its own in its row."
                )


def _check_rising(real: Tensor, positions: Tensor, segments: Tensor | None) -> None:
    out = real & ((positions < 0) | (positions > FARTHEST))
    if bool(out.any()):
        b, t = (int(i) for i in out.nonzero()[0])
        raise OutOfRange(
            f"position {int(positions[b, t])} of row {b}, at token {_token(real, b, t)}: positions count from 0, and"
            f" their angles, in fp32, tell them apart up to {FARTHEST:,}."
        )
    within = real[:, 1:] & real[:, :-1]
    if segments is not None:
        within = within & (segments[:, 1:] == segments[:, :-1])
    back = within & (positions[:, 1:] <= positions[:, :-1])
    if bool(back.any()):
        b, t = (int(i) for i in back.nonzero()[0])
        remedy = (
            "texts packed in one row go with segments=, which keeps attention within each"
            if segments is None
            else "within a segment they rise from token to token"
        )
        raise BadText(
            f"positions of row {b} do not rise at token {_token(real, b, t + 1)}, from {int(positions[b, t])} to"
            f" {int(positions[b, t + 1])}; {remedy}."
        )


def _token(real: Tensor, b: int, place: int) -> int:
    """A place of the padded batch as a row counts its real tokens."""
    return int(real[b, :place].sum())
