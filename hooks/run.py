"""One run: tokens in, wanted tensors out, with edits, recomputing only what the edits reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooks.apply import At, bound, check_no_cut
from hooks.cache import Cache, Names
from hooks.edits import Edit, Freeze
from hooks.estimate import check_fits
from hooks.keep import Keep, Keeper, Reduce
from hooks.recorder import Recorder
from hooks.where import Index, Rows, Spans
from probe.engine import Weights
from probe.errors import BadEdit
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel


@dataclass(frozen=True, eq=False)
class Run:
    """What a run was asked and what it found.

    Attributes:
        tokens: [B, T] token ids.
        keep: [B, T], true where a token is real; None: all are.
        edits: the edits that acted.
        cache: the wanted tensors as everything below them saw them, and what a later run needs to start from: each
            block's residual stream and chosen experts. Kept elsewhere or otherwise (device, dtype, pos, reduce), it
            has the wanted tensors alone.
        natural: at the edited sites, the values that would have been.
        touched: for each edit, how many rows along the tensor's last axis it replaced, at least in part: positions,
            times heads or slots where the tensor has such axes.
        routing_agreement: mean over MoE blocks and real positions that the edits can reach of the share of experts that
            the base chose too; None without a base, or where the edits reach no router.
        flips: how many choices changed there.
        spans: each row's named spans.
        hooked: sites that had hooks on; a run with any is no base.
        version: of the weights: it grows when somebody writes into one.
        plain: whether the cache holds tensors as they were; a run without is no base.
    """

    tokens: Tensor
    keep: Tensor | None
    edits: tuple[Edit, ...]
    cache: Cache
    natural: Cache
    weights: Any = field(repr=False)
    touched: tuple[int, ...] = ()
    routing_agreement: float | None = None
    flips: int | None = None
    spans: tuple[Spans, ...] | None = None
    hooked: tuple[Site, ...] = ()
    plain: bool = True
    version: int = 0

    @cached_property
    def rows(self) -> Rows:
        """The rows of this run."""
        return Rows(self.keep, self.tokens.shape[0], self.tokens.shape[1], self.spans)

    @property
    def frozen(self) -> tuple[str, ...]:
        """What was held at the base's values, by name; frozen routing makes `routing_agreement` 1 by force."""
        return tuple(dict.fromkeys(edit.tensor for edit in self.edits if isinstance(edit.how, Freeze)))

    def __getitem__(self, key: Any) -> Tensor:
        return self.cache[key]


def run(
    model: HookedModel,
    tokens: Tensor,
    keep: Tensor | None = None,
    *,
    want: Names = ("logits",),
    edits: Sequence[Edit] | Edit = (),
    base: Run | None = None,
    spans: Sequence[Spans] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    pos: Index | None = None,
    reduce: Reduce | None = None,
    budget: int | None = None,
) -> Run:
    """Run a model with edits; without gradients.

    Args:
        tokens: [B, T] token ids.
        keep: [B, T], true where a token is real.
        want: sites to return: a spelling, several, a function of hook names, or None for all but ``delta_heads``.
        edits: act in the card's order, each on the value of the edited run; at one site in the order given.
        base: a run of the same model on the same tokens without edits. What no edit reaches is taken from it; the
            result is the same, bit for bit. A freeze without a base that holds its tensors makes one.
        spans: each row's named spans, for edits, ``pos`` and means over roles.
        device, dtype, pos, reduce: how what is wanted is kept; see `hooks.keep.Keep`.
        budget: bytes that the run may take beside the weights; see `hooks.estimate`.

    Raises:
        UnknownTensor, UnknownDim, OutOfRange: a site or a place that does not exist.
        BadEdit: an edit that cannot mean what it says, two that overlap, one that another cuts off.
        TooLarge: it would not fit the budget.
    """
    model.decoder.check_tokens(tokens, keep)
    edits = (edits,) if isinstance(edits, Edit) else tuple(edits)
    rows = Rows(keep, tokens.shape[0], tokens.shape[1], None if spans is None else tuple(spans))
    how = Keep(want, device, dtype, pos, reduce)
    keeper = Keeper(model.sites, rows, tokens, how)
    if budget is not None:
        check_fits(model, rows, how, budget)
    _check_base(model, tokens, keep, base)
    base = _with_frozen(model, tokens, keep, base, edits)
    applied = bound(edits, model.sites, rows, base)
    check_no_cut(applied, model.sites)
    recorder = Recorder(model, applied, keeper)
    with torch.no_grad():
        recorder.decoder.run(
            tokens,
            keep,
            want=(),
            edited=recorder.edited,
            known={} if base is None else base.cache,
            tap=recorder,
            watched=keeper.watched,
            chunks=keeper.chunks,
            show=keeper.see_chunk,
        )
    agreement, flips = _routing(model, recorder, base, rows)
    return Run(
        tokens.clone(),  # the caller may write into theirs
        None if keep is None else keep.clone(),
        tuple(edits),
        recorder.cache if how.plain else keeper.cache,
        recorder.natural,
        model.decoder.weights,
        tuple(sum(at.touched for at in applied if at.edit is edit) for edit in edits),
        agreement,
        flips,
        rows.spans,
        tuple(site for site in model.sites if site in recorder.watched),
        how.plain,
        version_of(model.decoder.weights),
    )


def version_of(weights: Weights) -> int:
    """How often somebody has written into the weights, where that can be told."""
    return int(getattr(weights, "version", 0))


def _check_base(model: HookedModel, tokens: Tensor, keep: Tensor | None, base: Run | None) -> None:
    if base is None:
        return
    if base.edits:
        raise BadEdit("the base has edits itself; a base is the run on the same tokens without any.")
    if base.hooked:
        raise BadEdit(f"the base was run with hooks on ({', '.join(map(str, base.hooked))}); run it without any.")
    if not base.plain:
        raise BadEdit("the base was kept on a device, in a dtype, at positions or reduced; run it without these.")
    if base.weights is not model.decoder.weights:
        raise BadEdit("the base was run on other weights.")
    if changed := base.cache.changed():
        raise BadEdit(f"the base's {changed[0]} has been written into since it was run; run the base anew.")
    if base.version != version_of(model.decoder.weights):
        raise BadEdit("weights have been written into since the base was run; run it anew.")
    same_keep = (keep is None and base.keep is None) or (
        keep is not None and base.keep is not None and torch.equal(keep, base.keep)
    )
    if not (torch.equal(tokens, base.tokens) and same_keep):
        raise BadEdit("the base was run on other tokens, or with another mask.")


def _with_frozen(
    model: HookedModel, tokens: Tensor, keep: Tensor | None, base: Run | None, edits: Sequence[Edit]
) -> Run | None:
    """A base that holds what is frozen: the one given, or one made now."""
    frozen = {site for edit in edits if isinstance(edit.how, Freeze) for site in edit.sites(model.sites)}
    slots = {Site(site.block, "experts") for site in frozen if "k" in model.sites.node(site).shape}
    missing = [site for site in frozen | slots if base is None or site not in base.cache]
    if not missing:
        return base
    fresh = run(model, tokens, keep, want=[*missing, *(base.cache if base else ())])
    return fresh if base is None else replace(base, cache=fresh.cache)


def _routing(model: HookedModel, recorder: Recorder, base: Run | None, rows: Rows) -> tuple[float | None, int | None]:
    """Agreement of chosen experts with the base, as sets, over the positions that the edits can reach."""
    if base is None:
        return None, None
    kept = total = 0
    for block, moe in enumerate(model.sites.dims.moe):
        site = Site(block, "experts")
        if not moe or site not in recorder.cache or site not in base.cache:
            continue
        ours, theirs = recorder.cache[site], base.cache[site]
        reach = torch.zeros(rows.batch, rows.length, dtype=torch.bool)
        for at in recorder.applied:
            reach |= _reach(at, rows, block)
        same = (ours[..., :, None] == theirs[..., None, :]).any(-1)[reach.to(ours.device)]
        kept += int(same.sum())
        total += same.numel()
    return (kept / total, total - kept) if total else (None, None)


def _reach(at: At, rows: Rows, block: int) -> Tensor:
    """[B, T]: the real positions at which an edit can change what a block's router chooses."""
    site, card = at.site, at.sites.card(at.site.block)
    below = {site.tensor} | card.descendants([site.tensor])
    depth = at.sites.depth(site)
    if block < depth or (block == depth and "experts" not in below):
        return torch.zeros(rows.batch, rows.length, dtype=torch.bool)
    if at.is_weight:
        return rows.mask(None, "T")
    named = rows.mask(at.where.get("T", at.where.get("S")), "T", at.among)
    read_as_keys = any(card.shape(name)[1] == "S" for name in below)
    if block == site.block and not read_as_keys and not ("S" in at.where and "T" not in at.where):
        return named
    real = rows.mask(None, "T", at.among)
    return real & named.long().cummax(-1).values.bool()
