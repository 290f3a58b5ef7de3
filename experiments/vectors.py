"""One vector a prompt out of every tensor: places in prompts, and what stands there, from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from experiments.labels import BadProbe
from experiments.prompts import Prompts
from experiments.stats import check_average
from experiments.study import chosen_sites
from hooks import HookedModel
from hooks.edits import PER_SLOT, SCORES
from hooks.where import Rows, where_of
from probe.errors import OutOfRange, ProbeError, UnknownDim, asking
from probe.sites import Site

Place = str | int
"""A span's name, ``subject`` or ``subject[-1]``, or a position counted from 0."""

SLOTS = (*PER_SLOT, "delta_experts")
"""Tensors with a slot for each chosen expert; ``experts`` itself is read as a set."""


# ---- places ----------------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where tensors are read.

    Attributes:
        columns: of each place, what a frame says of it: ``role`` or ``pos``.
        tokens: for each set of prompts, the position of each place in each row, [B, places].
    """

    columns: Sequence[dict[str, Any]]
    tokens: Sequence[Tensor]


def find_places(sets: Sequence[Prompts], at: Sequence[Place] | None) -> Places:
    """The places asked for; without ``at``, every span that all prompts have, at its last token.

    Raises:
        BadProbe, BadEdit, OutOfRange: a place that some prompt lacks, or of several tokens.
        BadSample: a position, of a set in which it is different words.
    """
    if isinstance(at, str | int) or not all(isinstance(place, str | int) for place in at or ()):
        raise BadProbe(f"at={at!r}: give a list of spans and positions, as ['subject', 'END'].")
    chosen = list(dict.fromkeys(_spans(sets) if at is None else at))
    if not chosen:
        raise BadProbe("at names no place; leave it out for every span that all prompts have.")
    for one in sets if any(isinstance(place, int) and place >= 0 for place in chosen) else ():
        with asking(one.name):
            check_average([prompt.shape for prompt in one.rows], "position")
    columns = [{"pos": place} if isinstance(place, int) else {"role": place} for place in chosen]
    return Places(columns, [torch.tensor([_positions(one, place) for place in chosen]).T for one in sets])


def _spans(sets: Sequence[Prompts]) -> list[str]:
    rows = [prompt.spans for prompts in sets for prompt in prompts.rows]
    shared = [name for name in rows[0] if all(name in spans for spans in rows)]
    shared.sort(key=lambda name: rows[0][name][-1])
    return [name if all(len(spans[name]) == 1 for spans in rows) else f"{name}[-1]" for name in shared]


def _positions(prompts: Prompts, place: Place) -> list[int]:
    """Where a place is in each row."""
    tokens, keep = prompts.batch()
    rows, found = Rows(keep, len(tokens), tokens.shape[1], prompts.spans), []
    with asking(f"{prompts.name}, at {place!r}"):
        if isinstance(place, int) and place < 0:
            raise OutOfRange("positions are counted from 0; the last token is the span 'END'.")
        ((_, index),) = where_of({"T": place})
        for b in range(len(prompts)):
            here = rows.positions(b, index, "T")
            if len(here) > 1:
                raise BadProbe(f"row {b} has {len(here)} tokens there; name one: '{place}[-1]' is the last.")
            found.append(here[0])
    return found


# ---- tensors ---------------------------------------------------------------------------------------------------------


def readable(
    model: HookedModel,
    sets: Sequence[Prompts],
    tensors: Sequence[str] | None,
    blocks: Sequence[int] | None,
    e: int | None,
) -> tuple[list[Site], dict[str, str]]:
    """The sites that give a vector a prompt, and, where none is named, what is left out of all, with the reason.

    Raises:
        UnknownDim, BadProbe, OutOfRange: a tensor that was named, or an expert, can't be read so.
    """
    if e is not None and (isinstance(e, bool) or not 0 <= e < model.dims.e):
        raise OutOfRange(f"e={e}: " + (f"experts are 0 to {model.dims.e - 1}." if model.dims.e else "there are none."))
    shapes = {prompt.shape for prompts in sets for prompt in prompts.rows}
    sites: list[Site] = []
    left_out: dict[str, str] = {}
    why: ProbeError
    for site in chosen_sites(model, tensors, blocks):
        name = site.tensor
        if name in SLOTS and e is None:
            why = UnknownDim(f"{name} has a slot for each chosen expert, at each token for other ones; name one by e=.")
        elif name in SCORES and len(shapes) > 1:
            why = BadProbe(
                f"{name} has a number for each key, and these prompts of {len(shapes)} shapes share no keys."
            )
        elif getattr(model.sites.node(site), "on_request", False) and tensors is None:
            why = BadProbe(f"{name} is made only where it is named.")
        else:
            sites.append(site)
            continue
        if tensors is not None:
            raise why
        left_out[name] = str(why)
    if e is not None and not any(site.tensor in SLOTS for site in sites):
        raise UnknownDim(f"e={e} names an expert's slot, and no tensor that is asked for has slots; leave it out.")
    return sites, left_out


class Vectors(NamedTuple):
    """One tensor, or counts of tokens, at every place.

    Attributes:
        values: [rows, places, the tensor's axes but for slots: d, h v, ...], fp32.
        there: [rows, places], where there is such a vector: an expert's tensors are only where it was chosen.
    """

    values: Tensor
    there: Tensor


def read(
    model: HookedModel, sets: Sequence[Prompts], at: Sequence[Tensor], sites: Sequence[Site], e: int | None
) -> dict[Site | None, Vectors]:
    """Every tensor at every place, rows of all sets one below another; one forward pass over each set.

    Args:
        at: as `Places.tokens`.
    """
    parts = [_pass(model, prompts, tokens, sites, e) for prompts, tokens in zip(sets, at, strict=True)]
    return {site: Vectors(*map(torch.cat, zip(*(part[site] for part in parts), strict=True))) for site in sites}


def count_tokens(prompts: Prompts, at: Tensor) -> Vectors:
    """How often each token stands up to a place: all that a tensor there can depend on, but for the order.

    Args:
        at: [rows, places].
    """
    tokens, _ = prompts.batch()
    words, ids = tokens.unique(return_inverse=True)
    seen = torch.arange(tokens.shape[1]) <= at[..., None]
    counts = torch.zeros(*at.shape, len(words)).scatter_add(2, ids[:, None].expand(seen.shape), seen.float())
    return Vectors(counts, torch.ones(at.shape, dtype=torch.bool))


def _pass(
    model: HookedModel, prompts: Prompts, at: Tensor, sites: Sequence[Site], e: int | None
) -> dict[Site, Vectors]:
    at = at.to(model.device)
    rows = torch.arange(len(at), device=at.device)[:, None]
    chosen = {Site(site.block, "experts") for site in sites if site.tensor in SLOTS}
    scores = [site for site in sites if site.tensor in SCORES]  # their reductions see a few queries at a time

    def pick(value: Tensor) -> Tensor:
        return value[rows, at]

    run = model.run(
        *prompts.batch(model.device), want=scores or None, reduce=dict.fromkeys({*sites, *chosen} - {*scores}, pick)
    )
    made = {}
    for site in sites:
        if site in scores:
            hidden = torch.arange(run[site].shape[-1], device=at.device) > at[..., None]
            value = pick(run[site].movedim(2, 1)).masked_fill(hidden[:, :, None], 0.0)
        else:
            value = run.cache.reduced[site]
        there = torch.ones_like(at, dtype=torch.bool)
        if site.tensor == "experts":
            value = one_hot(value, model.dims.e).sum(-2)
        elif site.tensor in SLOTS:
            value, there = _slot(site.tensor, value, run.cache.reduced[Site(site.block, "experts")] == e)
        made[site] = Vectors(value.float().cpu(), there.cpu())
    return made


def _slot(name: str, value: Tensor, holds: Tensor) -> tuple[Tensor, Tensor]:
    """The slot that holds the expert, [rows places ...], and whether there is one. Without one the expert's gate and
    what it adds are 0; its other tensors don't exist."""
    value = value[..., None] if name == "gates" else value
    picked = torch.where(holds.view(*holds.shape, *[1] * (value.ndim - 3)), value, 0).sum(2)
    chosen = holds.any(-1)
    return picked, torch.ones_like(chosen) if name in ("gates", "delta_experts") else chosen
