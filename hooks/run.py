"""One run: tokens in, wanted tensors out, with edits, recomputing only what the edits reach.

Or a residual stream in, and one block alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hooks.apply import bound, check_no_cut, check_seen
from hooks.cache import Cache, Names, own
from hooks.edits import Edit, Freeze
from hooks.estimate import check_fits
from hooks.keep import Keep, Keeper, Reduce
from hooks.recorder import Recorder
from hooks.sources import Source
from hooks.where import Index, Rows, Spans
from probe.engine import Weights
from probe.errors import BadEdit, ShapeMismatch
from probe.sites import Site, Sites

if TYPE_CHECKING:
    from hooks.model import HookedModel


@dataclass(frozen=True, eq=False)
class Run:
    """What a run was asked and what it found.

    Attributes:
        tokens: [B, T] token ids; -1 where a block ran alone.
        keep: [B, T], true where a token is real; None: all are.
        edits: the edits that acted.
        cache: the wanted tensors as everything below them saw them, and what a later run needs to start from: each
            block's residual stream and chosen experts. Kept elsewhere or otherwise (device, dtype, pos, reduce), it
            has the wanted tensors alone.
        natural: at the edited sites, the values that would have been.
        touched: for each edit, how many places it met: rows along the tensor's last axis (positions, times heads or
            slots where the tensor has such axes) that it named, at least in part. A place that several edits met counts
            once, with the first of them.
        routing_agreement: mean over MoE blocks and real positions that the edits can reach of the share of experts that
            the base chose too; None without a base, or where the edits reach no router.
        flips: how many choices changed there.
        spans: each row's named spans.
        hooked: sites that had hooks on; a run with any is no base.
        version: of the weights: it grows when somebody writes into one.
        spoken: of each row, the tokens that named positions count; None: all.
        positions: [B, T], position ids; None: they count each text's real tokens from 0.
        segments: [B, T], which of a row's texts a token belongs to; None: a row is one text.
        plain: whether the cache holds tensors as they were; a run without is no base.
        content: what is drawn for its rows hangs on; see `hooks.where.Rows`.
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
    spoken: tuple[int, ...] | None = None
    positions: Tensor | None = None
    segments: Tensor | None = None
    content: Tensor | None = field(default=None, repr=False)

    @cached_property
    def rows(self) -> Rows:
        """The rows of this run."""
        values = self.tokens if self.content is None else self.content
        return Rows.of(values, self.keep, self.spans, self.spoken, self.positions, self.segments)

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
    spoken: Sequence[int] | None = None,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
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
        spoken: of each row, how many real tokens named positions count: a prompt's, with an answer behind it.
        positions: [B, T], position ids, by which queries and keys are rotated: they rise within a text, as far apart
            as you like; those of pads say nothing. None: they count each text's real tokens from 0. In ``where``, `T`
            counts a row's real tokens all the same.
        segments: [B, T], an id for each of the texts that a row packs, one behind the other: each runs as if it were
            alone. None: a row is one text.
        device, dtype, pos, reduce: how what is wanted is kept; see `hooks.keep.Keep`.
        budget: bytes that the run may take beside the weights; see `hooks.estimate`.

    Raises:
        UnknownTensor, UnknownDim, OutOfRange: a site or a place that does not exist.
        BadEdit: an edit that cannot mean what it says, two that overlap, one that another cuts off.
        BadText: tokens, positions or segments that no run can have.
        TooLarge: it would not fit the budget.
    """
    model.decoder.check_tokens(tokens, keep, positions=positions, segments=segments)
    rows = Rows.of(tokens, keep, spans, spoken, positions, segments)
    how = Keep(want, device, dtype, pos, reduce)
    if budget is not None:
        check_fits(model, rows, how, budget)
    _check_base(model, rows, base)
    if base is not None and not torch.equal(tokens, base.tokens.to(tokens.device)):
        raise BadEdit("the base was run on other tokens, or with another mask.")
    return _carry_out(model, _Start(model.sites, rows, tokens), how, edits, base)


def run_block(
    model: HookedModel,
    block: int,
    x_n: Tensor | Source,
    keep: Tensor | None = None,
    *,
    want: Names = "x_next",
    edits: Sequence[Edit] | Edit = (),
    base: Run | None = None,
    spans: Sequence[Spans] | None = None,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    pos: Index | None = None,
    reduce: Reduce | None = None,
) -> Run:
    """Run one block alone, on a residual stream from elsewhere; no other weight is read. Without gradients.

    In a whole run on the same stream, the block gives the same bits. What comes out serves as base and source like any
    run. Names without a block (``O``, ``zero("O")``) are of this one.

    Args:
        x_n: [B, T, d], on the device of the block's weights and in their dtype (in careful numerics in fp32); or a run
            or cache that holds this block's ``x_n``, which brings its mask, spans, positions and segments.
        base: a run of this block, or of the whole model, on the same stream without edits.
        keep, want, edits, spans, positions, segments, device, dtype, pos, reduce: as in `run`.

    Raises:
        ShapeMismatch: the stream does not fit this block; or the mask the stream.
        OutOfRange: there is no such block, or another one is named.
        BadEdit: as in `run`; or a hook stands where this run never comes.
    """
    model.sites.card(block)
    site, rows = Site(block, "x_n"), None
    if not isinstance(x_n, Tensor):
        if any(said is not None for said in (keep, spans, positions, segments)):
            raise BadEdit(
                "a run or a cache brings its own mask, spans, positions and segments; `keep`, `spans`, `positions` and"
                " `segments` go with a tensor."
            )
        rows, x_n = x_n.rows, x_n.cache[site]
    check_stream(model, site, x_n)
    x_n = own(x_n)  # the caller may write into theirs
    rows = rows or Rows.of(x_n, keep, spans, None, positions, segments)
    model.decoder.check_rows(rows.keep, x_n.shape[0], x_n.shape[1], rows.ids, rows.segments)
    _check_base(model, rows, base)
    if base is not None and not (site in base.cache and torch.equal(x_n, base.cache[site])):
        raise BadEdit(f"the base was run on another {site}.")
    sites = Sites(model.dims, only=block)
    elsewhere = model.acting() - set(sites)
    if lost := [str(hooked) for hooked in model.sites if hooked in elsewhere]:
        raise BadEdit(f"block {block} runs alone, so the hooks on {', '.join(lost)} would never fire; take them off.")
    start = _Start(sites, rows, None, {site: x_n})
    return _carry_out(model, start, Keep(want, device, dtype, pos, reduce), edits, base)


class _Start(NamedTuple):
    """What a run starts from: tokens; or the stream into the one block of ``sites``."""

    sites: Sites
    rows: Rows
    tokens: Tensor | None
    known: Mapping[Site, Tensor] = {}


def _carry_out(model: HookedModel, start: _Start, how: Keep, edits: Sequence[Edit] | Edit, base: Run | None) -> Run:
    """A run whose base is known to fit."""
    edits = (edits,) if isinstance(edits, Edit) else tuple(edits)
    sites, rows, tokens, known = start
    keeper = Keeper(sites, rows, tokens, how)
    base = _with_frozen(model, start, base, edits)
    applied = bound(edits, sites, rows, base)
    check_no_cut(applied, sites)
    check_seen(applied)
    recorder = Recorder(model, applied, keeper, fresh=base is None)
    with torch.no_grad():
        recorder.decoder.run(
            tokens,
            rows.keep,
            want=(),
            positions=rows.ids,
            segments=rows.segments,
            edited=recorder.edited,
            known=known if base is None else base.cache,
            tap=recorder,
            watched=keeper.watched,
            chunks=keeper.chunks,
            show=recorder.show,
        )
    agreement, flips = _routing(model, recorder, base, rows)
    return Run(
        torch.full((rows.batch, rows.length), -1) if tokens is None else tokens.clone(),  # the caller may write into it
        rows.keep,
        tuple(edits),
        recorder.cache if how.plain else keeper.cache,
        recorder.natural,
        model.decoder.weights,
        tuple(sum(at.touched for at in applied if at.number == i) for i in range(len(edits))),
        agreement,
        flips,
        rows.spans,
        tuple(site for site in sites if site in recorder.watched),
        how.plain,
        version_of(model.decoder.weights),
        rows.spoken,
        rows.ids,
        rows.segments,
        rows.content,
    )


def version_of(weights: Weights) -> int:
    """How often somebody has written into the weights, where that can be told."""
    return int(getattr(weights, "version", 0))


def _check_base(model: HookedModel, rows: Rows, base: Run | None) -> None:
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
    keep = rows.keep
    same_keep = (keep is None and base.keep is None) or (
        keep is not None and base.keep is not None and torch.equal(keep, base.keep.to(keep.device))
    )
    if not same_keep:
        raise BadEdit("the base was run on other tokens, or with another mask.")
    if rows.batch == base.rows.batch and not bool(rows.meets(base.rows).all()):
        raise BadEdit("the base was run at other positions, or with other segments; run it with these.")


def check_stream(model: HookedModel, site: Site, x_n: Tensor) -> None:
    """Refuse a residual stream that does not fit the block whose ``x_n`` it should be.

    Raises:
        ShapeMismatch: its shape, dtype or device is another.
    """
    gain = model.decoder.weights.read(site.block, "w_attn")
    dtype = torch.float32 if model.decoder.numerics == "careful" else gain.dtype
    if x_n.ndim != 3 or x_n.shape[-1] != model.dims.d or not x_n.numel():
        raise ShapeMismatch(f"{site} should be [B T d], at least one, d = {model.dims.d}; it is {list(x_n.shape)}.")
    if (x_n.dtype, x_n.device) != (dtype, gain.device):
        raise ShapeMismatch(
            f"{site} is {x_n.dtype} on {x_n.device}, and the block takes {dtype} on {gain.device};"
            " cast or move the one or the other: .to(dtype, device)."
        )


def base_for(model: HookedModel, rows: Rows, tokens: Tensor, edits: Sequence[Edit]) -> Run | None:
    """The base that edits freeze to, made now; None where none does."""
    return _with_frozen(model, _Start(model.sites, rows, tokens), None, edits)


def _with_frozen(model: HookedModel, start: _Start, base: Run | None, edits: Sequence[Edit]) -> Run | None:
    """A base that holds what is frozen: the one given, or one made now."""
    frozen = {site for edit in edits if isinstance(edit.how, Freeze) for site in edit.sites(start.sites)}
    slots = {Site(site.block, "experts") for site in frozen if "k" in start.sites.node(site).shape}
    missing = [site for site in frozen | slots if base is None or site not in base.cache]
    if not missing:
        return base
    held = [site for site in start.sites if base is not None and site in base.cache]
    fresh = _carry_out(model, start, Keep([*missing, *held]), (), None)
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
            reach |= at.reach(block, rows)
        same = (ours[..., :, None] == theirs[..., None, :]).any(-1)[reach.to(ours.device)]
        kept += int(same.sum())
        total += same.numel()
    return (kept / total, total - kept) if total else (None, None)
