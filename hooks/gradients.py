"""Gradients of a number made of the logits, at every float site, without changing a value."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooks.finite import noticing
from hooks.keep import Keeper
from hooks.where import Rows
from probe.decoder import SiteTap
from probe.errors import BadEdit
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel

Score = Callable[[Tensor], Tensor]
"""From the logits [B T V] to one number."""


def run_with_gradients(model: HookedModel, tokens: Tensor, values: Keeper, gradients: Keeper, score: Score) -> Tensor:
    """Run, differentiate ``score`` of the logits, and show values and gradients to their keepers; return the logits.

    A gradient at a site is with respect to the value that everything below it saw, and through all paths. The chosen
    experts are held: a choice has no derivative, so that of ``choice_score``, which nothing else reads, is 0. Sites
    without any (``experts``, whose values are integers, and readings) are named in the gradients' ``skipped``.

    Raises:
        BadEdit: none of the sites has a gradient; ``score`` is not one number, or does not depend on the logits.
    """
    cache = gradients.cache
    for site in gradients.asked:
        if reason := why_none(model, site):
            cache.skipped[site] = cache.reduced.skipped[site] = reason
    asked = [site for site in gradients.asked if site not in cache.skipped]
    if not asked:
        raise BadEdit(f"no gradient is left to take: {gradients.asked[0]}: {cache.skipped[gradients.asked[0]]}.")
    live: dict[Site, Tensor] = {}

    def show(site: Site, value: Tensor) -> None:
        values.see(site, value)
        live[site] = value

    roots, tap = _differentiable(model, show)
    logits = Site(None, "logits")
    with torch.inference_mode(False), torch.enable_grad():
        made = model.decoder.run(
            tokens,
            values.rows.keep,
            want=(logits,),
            positions=values.rows.ids,
            segments=values.rows.segments,
            edited=model.acting(),
            tap=tap,
            watched=values.watched | {logits},
        )[logits]
        made_of = score(made)
        _check_score(made_of)
        found = torch.autograd.grad(made_of, [*(live[site] for site in asked), *roots], allow_unused=True)
    for site, gradient in zip(asked, found, strict=False):
        gradients.see(site, torch.zeros_like(live[site]) if gradient is None else gradient)
    return made.detach()


def each_gradient(
    model: HookedModel,
    tokens: Tensor,
    keep: Tensor | None,
    score: Score,
    sites: Collection[Site],
    see: Callable[[Site, Tensor], None],
    take: Callable[[Site, Tensor], None],
    x_0: Tensor | None = None,
) -> Tensor:
    """As `run_with_gradients`, but what is asked for is shown as soon as it is there, and neither copied nor kept.

    Args:
        see: is shown each site's value on the way; not to be written into.
        take: and its gradient on the way back, where the score hangs on it.
        x_0: [B T d], to start from in place of the tokens' embedding.
    """
    leaves: dict[Site, Tensor] = {}

    def show(site: Site, value: Tensor) -> None:
        if site in sites:
            see(site, value.detach())
            if value.is_leaf and value.requires_grad:
                leaves[site] = value
            elif value.requires_grad:
                value.register_hook(partial(take, site))

    roots, tap = _differentiable(model, show)
    logits, start = Site(None, "logits"), Site(None, "x_0")
    with torch.inference_mode(False), torch.enable_grad():
        made = model.decoder.run(
            tokens,
            keep,
            want=(logits,),
            edited=model.acting(),
            known={} if x_0 is None else {start: x_0},
            tap=tap,
            watched={*sites, logits, start},
        )[logits]
        noticing(model, tokens, Rows(keep, *tokens.shape))(logits, made)
        made_of = score(made)
        _check_score(made_of)
        found = torch.autograd.grad(made_of, [*leaves.values(), *roots], allow_unused=True)
    for site, gradient in zip(leaves, found, strict=False):
        if gradient is not None:
            take(site, gradient)
    return made.detach()


def _differentiable(model: HookedModel, show: Callable[[Site, Tensor], None]) -> tuple[list[Tensor], SiteTap]:
    """A tap that makes a run differentiable from its first values on and shows each one, and the list of these first
    ones as it grows: to be asked for too, so that backward hooks fire at the first site that is asked for."""
    roots: list[Tensor] = []

    def tap(site: Site, value: Tensor) -> Tensor:
        value = _leaf(value)
        if value.is_leaf and value.requires_grad:
            roots.append(value)
        value = _leaf(model.pass_in(0, site, value))  # a hook's own tensor starts anew
        show(site, value)
        return value

    return roots, tap


def why_none(model: HookedModel, site: Site) -> str:
    """Why a site has no gradient; empty where it has one."""
    node = model.sites.node(site)
    if node.dtype == "int64":
        return "its values are integers (which experts), and have no derivative"
    if getattr(node, "read_only", ""):
        return "nothing reads it, so it has no gradient"
    return ""


def _leaf(value: Tensor) -> Tensor:
    """The value itself, differentiable: from here on where nothing above it is."""
    return value if value.requires_grad or not value.is_floating_point() else value.detach().requires_grad_()


def _check_score(made: Any) -> None:
    if not isinstance(made, Tensor) or made.numel() != 1:
        what = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise BadEdit(f"gradients= takes a function from the logits to one number; this one returned {what}.")
    if not made.requires_grad:
        raise BadEdit("the number that gradients= returned does not depend on the logits (was it detached?).")
