"""What is NaN or infinite in runs: noticed as values pass by, where somebody watches; and where it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hooks.edits import SCORES, Edit
from hooks.where import Rows
from probe.numerics import finite
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel

LOGITS = Site(None, "logits")


class Lost(NamedTuple):
    """A run in which something is not finite.

    Attributes:
        site: where it was seen first.
        tokens, rows: what was run; None where that is not known.
        edits: that acted.
    """

    model: HookedModel
    site: Site
    tokens: Tensor | None
    rows: Rows | None
    edits: tuple[Edit, ...]


_WATCHED: ContextVar[list[Lost] | None] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[list[Lost]]:
    """Notice every run and every cell of a sweep, of this thread and in this block, in which something isn't finite."""
    outer, lost = _WATCHED.get(), list[Lost]()
    try:
        _WATCHED.set(lost)
        yield lost
    finally:
        _WATCHED.set(outer)


def is_watched() -> bool:
    """Whether somebody watches."""
    return _WATCHED.get() is not None


def noticing(
    model: HookedModel, tokens: Tensor | None, rows: Rows | None, edits: Sequence[Edit] = ()
) -> Callable[[Site, Tensor], None]:
    """What a run shows its values to: it notes the first that is not finite, where somebody watches.

    What an edit itself puts somewhere may be infinite: -inf in ``choice_score`` re-routes.
    """
    lost = _WATCHED.get()
    if lost is None:
        return lambda site, value: None
    edited, sound = {site for edit in edits for site in edit.sites(model.sites)}, True

    def see(site: Site, value: Tensor) -> None:
        nonlocal sound
        if sound and site not in edited and value.is_floating_point() and not finite(value):
            sound = False
            lost.append(Lost(model, site, tokens, rows, tuple(edits)))

    return see


def begins(
    model: HookedModel,
    tokens: Tensor,
    keep: Tensor | None = None,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Site | None, Tensor]:
    """The first tensor of a plain run that is not finite, in the card's order; and which rows' logits are not, [B]."""
    found: list[Site] = []

    def see(site: Site, value: Tensor) -> Tensor:
        if not found and value.is_floating_point() and not finite(value):
            found.append(site)
        return value

    def show(site: Site, queries: slice, value: Tensor) -> None:
        see(site, value)

    with torch.no_grad():
        logits = model.decoder.run(
            tokens,
            keep,
            positions=positions,
            segments=segments,
            tap=see,
            chunks=[site for site in model.sites if site.tensor in SCORES],
            show=show,
        )[LOGITS]
    real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep.bool()
    return (found[0] if found else None), (~logits.isfinite().all(-1) & real.to(logits.device)).any(-1)
