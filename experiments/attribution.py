"""Attribution patching: what patching every tensor would do, to first order, from two runs and one backward pass.

The estimate of a patch is Σ gradient · (source − base), with the gradient of the metric at the base (Nanda, Attribution
patching, 2023). Integrated gradients take the mean gradient at steps on the straight way of the embedding from base to
source instead (Sundararajan et al., 2017; for all tensors at once, Hanna et al., Have faith in faithfulness, 2024). The
choice of experts has no derivative: an attribution holds the base's experts, integrated gradients each step's own.
Beside them stands what they estimate, the patches themselves: where routing flips, first order knows nothing of it.

Integrated gradients are complete at the embedding: over all its numbers they add up to source − base, were there steps
without end. Choices of experts that flip on the way are jumps that no gradient sees, so in a mixture of experts the sum
stays off. Every estimate's row says by how much, in ``completeness_gap``.

An estimate compares the two runs position by position; texts whose spans stand elsewhere can only be patched. Slots of
two runs are matched by expert. A contribution (``delta_experts``) of an expert that only one run chose counts
0 in the other; ``gates`` and ``g_e`` … ``y_e`` of such a one don't exist, and a prompt that needs them has no value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments import stats
from experiments.asking import LOGITS, Ask
from experiments.effects import full
from experiments.finite import telling
from experiments.frames import IDENTITY, BadFrame, check_one, frame, join
from experiments.measure import Asked, Measured, table
from experiments.metrics import BadMetric, Metric
from experiments.options import By, Direction
from experiments.parts import Part, can_go, columns, listed, parts, place
from experiments.patch import Sides, check_lengths, patch, sides, usual, wrong
from experiments.patch import outlook as of_patches
from experiments.prompts import Prompts
from experiments.study import check_drawn, chosen_sites, common, numel, progress, seconds
from hooks import HookedModel
from hooks.cells import BUDGET
from hooks.finite import noticing
from hooks.gradients import each_gradient, why_none
from hooks.where import Rows, along, where_of
from probe.card import letters
from probe.errors import BadEdit, UnknownDim
from probe.sites import Site

X_0 = Site(None, "x_0")

FIRST_ORDER = "attribution"
"""The kind of estimate that one gradient at the base gives."""

KEPT = 16
"""Bytes for each number of the model's tensors: of the source, of the base, and what its gradient needs of them."""

FORWARDS = 4
"""What an estimate of all tensors takes, in forward passes; see ``benchmarks/attribution.py``."""

FLAT = 1e-9
"""A gradient of the logits up to here is none: of KL at its least it is what rounding leaves."""


@telling
def attribute(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    by: By | Sequence[By] | None = None,
    at: str | int | None = None,
    steps: int = 0,
    exact: bool = True,
    direction: Direction = "denoise",
    metric: str | None = None,
    seed: int = 0,
    per_prompt: bool = False,
    budget: int = BUDGET,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Estimate the effect of every patch, and patch; a row for each cell and kind, told apart by ``edit``.

    Estimates of all tensors of a model cost less than four forward passes (see ``benchmarks/attribution.py``), of
    integrated gradients as much again for each step; patches what `experiments.patch` costs.

    Args:
        tensors: any spellings; None: all that have a gradient and the parts.
        blocks: None: all that have the tensor.
        by: a cell for each position, named span (role), head, key, expert or feature, or for each of a product of
            several; None: whole tensors.
        at: a place to limit all cells to: a span's name (``END``) or a position.
        steps: of integrated gradients, at the middles of as many parts of the way; 0: without them.
        exact: whether to patch, too.
        direction: as in `experiments.patch`.
        metric: one that has a derivative; None: the logit difference, or the answer's log-probability.
        seed: of the intervals' resamples.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        budget: bytes for what is kept of two runs and of gradients, in as many parts of the prompts as that needs;
            and for the rows in flight of the patches.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame (see `experiments.frames.COLUMNS`). Of an estimate ``effect`` is the estimated change, and ``frozen``
        says that experts were held; ``completeness_gap`` is source − base less the sum of such estimates over the whole
        embedding, whatever cells are asked for. ``attrs["left_out"]`` says which tensors have none and why,
        ``attrs["unmatched"]`` counts cells without a value.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, BadEdit: a tensor, a block or a part that doesn't exist, has no gradient
            or can't be patched so; clean and corrupt that aren't of one length, or have the spans elsewhere.
        BadMetric, BadText: a metric that these prompts give no ground for, or without a derivative; prompts without a
            corrupt text.
    """
    check_drawn(seed, steps=steps)
    model = model.reaching(beyond)
    _check_steps(steps)
    if hooked := sorted(map(str, model.acting())):
        raise BadEdit(f"hooks are on ({', '.join(hooked)}), and an attribution would pass them by; take them off.")
    asked = _Asked.of(model, prompts, tensors, blocks, listed(by), at, direction, metric)
    found = asked.estimated(model, prompts, steps, budget)
    same: dict[str, Any] = {
        **common(model, name, prompts),
        "direction": direction,
        "source": asked.sides.of_source,
        "seed": seed,
    }
    made = []
    for edit, one in found.items():
        held: Any = "experts" if edit == FIRST_ORDER else pd.NA
        those = wrong(one, direction)
        df = table(asked.sides.ask, one, per_prompt=per_prompt, seed=seed, wrong=those)
        made.append(frame(df.assign(edit=edit, frozen=held, **same), study="attribute"))
    if exact:
        df = patch(
            model,
            prompts,
            tensors=[str(site) for site in asked.parts],
            by=by,
            at=at,
            direction=direction,
            metrics=[str(asked.metric)],
            seed=seed,
            per_prompt=per_prompt,
            budget=budget,
            name=name,
        )
        made.append(df.assign(study="attribute"))
    df = join(*made)
    df.attrs["left_out"] = asked.left_out
    df.attrs["unmatched"] = int(df["value"].isna().sum())
    return df


def outlook(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    by: By | Sequence[By] | None = None,
    at: str | int | None = None,
    steps: int = 0,
    exact: bool = True,
    direction: Direction = "denoise",
    metric: str | None = None,
    budget: int = BUDGET,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `attribute` would take; see `experiments.measure.cost`."""
    check_drawn(steps=steps)
    model = model.reaching(beyond)
    _check_steps(steps)
    asked = _Asked.of(model, prompts, tensors, blocks, listed(by), at, direction, metric)
    # A metric without a derivative is refused here as it would be there.
    first = sides(model, prompts.subset([0]), direction, [str(asked.metric)]).ask
    _score(first, asked.metric, torch.zeros(*first.tokens.shape, model.dims.V, device=model.device, requires_grad=True))
    ask, size = asked.sides.ask, asked.size(model)
    found = {"cells": float(len(asked.cells)), "forwards": float(FORWARDS * (1 + steps))}
    found["bytes"] = float(size * min(len(prompts), max(1, budget // size)))
    if exact:
        of, judged = [str(site) for site in asked.parts], [str(asked.metric)]
        same: dict[str, Any] = {"by": by, "at": at, "direction": direction, "metrics": judged, "timed": False}
        patches = of_patches(model, prompts, tensors=of, **same)
        found["forwards"] += patches["forwards"]
        found["bytes"] = max(found["bytes"], patches["bytes"])
    return {**found, "seconds": found["forwards"] * (seconds(model, ask.tokens, ask.keep) if timed else np.nan)}


def paired(df: pd.DataFrame) -> pd.DataFrame:
    """Each estimate beside the patch that it estimates: the cell's columns, ``edit``, ``estimate``, ``patch``, both NaN
    where there is none, and ``flipped``, whether any expert's choice did.

    Args:
        df: of `attribute`.

    Raises:
        BadFrame: it has no patches, or no estimates.
    """
    same = [name for name in IDENTITY if name in df and name not in ("edit", "frozen")]
    df = full(df)
    loose = df.astype({"tensor": object}).assign(effect=df["effect"].astype(float))
    exact = loose[loose["edit"] == "patch"]
    flipped = exact["flips"].fillna(0) > 0 if "flips" in df else False
    exact = exact.assign(patch=exact["effect"], flipped=flipped)[[*same, "patch", "flipped"]]
    estimates = loose[loose["edit"] != "patch"].rename(columns={"effect": "estimate"})[[*same, "edit", "estimate"]]
    if not len(exact) or not len(estimates):
        raise BadFrame("to compare them takes estimates and the patches themselves: attribute(..., exact=True).")
    return estimates.merge(exact, on=same, how="inner")


def agreement(df: pd.DataFrame) -> pd.DataFrame:
    """How well estimates of each kind agree with patches, with choices of experts as they were and flipped.

    Args:
        df: of `attribute`.

    Returns:
        ``edit``, ``flipped``, ``cells`` that have both, ``correlation`` (Pearson's), ``slope`` (patch on estimate,
        through the origin: 1, they agree; NaN where all estimates are 0), ``missing`` cells, that lack one.

    Raises:
        BadFrame: as `paired`; or it is of several models or sets of prompts.
    """
    check_one(df)
    rows = []
    for (edit, flipped), part in paired(df).groupby(["edit", "flipped"], sort=False):
        there = part.dropna(subset=["estimate", "patch"])
        x, y = there["estimate"].to_numpy(), there["patch"].to_numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            r = float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 else np.nan
            slope = float(np.divide(x @ y, x @ x))
        rows.append((edit, flipped, len(there), r, slope, len(part) - len(there)))
    return pd.DataFrame(rows, columns=["edit", "flipped", "cells", "correlation", "slope", "missing"])


# ---- what is asked ---------------------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """All that follows from the arguments of `attribute`."""

    sides: Sides
    metric: Metric
    parts: dict[Site, list[Part]]
    cells: list[Asked]
    left_out: dict[str, str]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        prompts: Prompts,
        tensors: Sequence[str] | None,
        blocks: Sequence[int] | None,
        by: Sequence[By],
        at: str | int | None,
        direction: Direction,
        metric: str | None,
    ) -> _Asked:
        both = sides(model, prompts, direction, [metric or usual(prompts)[0]])
        check_lengths(both.ask, both.source_ask, by_role=True)
        _check_places(both, by, at)
        (judged,) = both.ask.metrics
        if judged.tensor is not None or judged.decodes:
            raise BadMetric(f"{judged} is not made of logits; take one that is, logit_difference or log_probability.")
        found: dict[Site, list[Part]] = {}
        cells: list[Asked] = []
        sites, left_out = _sites(model, tensors, blocks, by)
        for site in sites:
            node = model.sites.node(site)
            there = place(both.prompts, node, at)
            found[site] = parts(model, both.prompts, site, by, there.where)
            cells += [Asked((), columns(site, node, there, part), site.block, part.prompts) for part in found[site]]
        return cls(both, judged, found, cells, left_out)

    def estimated(self, model: HookedModel, prompts: Prompts, steps: int, budget: int) -> dict[str, Measured]:
        """The estimates of each kind, as if they had been measured."""
        count = max(1, budget // self.size(model))
        parts = [range(i, min(i + count, len(prompts))) for i in range(0, len(prompts), count)]
        made: dict[str, list[_Numbers]] = {}
        direction: Direction = "denoise" if self.sides.of_source == "clean" else "noise"
        with progress(len(parts), "attribution") as bar:
            for some in parts:
                both = sides(model, prompts.subset(some), direction, [str(self.metric)])
                for kind, numbers in _estimated(model, both, self.parts, list(some), steps).items():
                    made.setdefault(kind, []).append(numbers)
                bar.update()
        return {kind: self._measured(numbers) for kind, numbers in made.items()}

    def size(self, model: HookedModel) -> int:
        """Bytes that one prompt takes."""
        rows, length = max(Counter(self.sides.ask.prompt_of).values()), self.sides.ask.tokens.shape[1]
        made_anyway = (site for site in model.sites if not getattr(model.sites.node(site), "on_request", False))
        return KEPT * sum(numel(model, site, rows, length) for site in made_anyway)

    def _measured(self, numbers: Sequence[_Numbers]) -> Measured:
        effects, whole, base, source = (np.concatenate(each, axis=-1) for each in zip(*numbers, strict=True))
        key, lost = self.metric.name, np.isnan(effects)
        bases = np.where(lost, np.nan, base)
        return Measured(
            self.cells,
            {key: bases + effects},
            {key: bases},
            {key: source},
            outcomes=[[] for _ in self.cells],
            gap={key: source - base - whole},
        )


def _check_steps(steps: int) -> None:
    if steps < 0:
        raise BadEdit(f"steps={steps}: integrated gradients take one step or more.")


def _check_places(both: Sides, by: Sequence[By], at: str | int | None) -> None:
    """Refuse a base and a source that can't be compared position by position.

    Raises:
        BadEdit: rows of other lengths; spans of the parts that stand elsewhere.
    """
    sides = [zip(ask.spoken, ask.spans, strict=True) for ask in (both.ask, both.source_ask)]
    for row, ((ours, here), (theirs, there)) in enumerate(zip(*sides, strict=True)):
        names = list(here) if "role" in by else [at.partition("[")[0]] if isinstance(at, str) else []
        odd = f"clean and corrupt are of {ours} and {theirs} tokens" if ours != theirs else ""
        for name in (name for name in names if not odd and here.get(name) != there.get(name)):
            odd = f"the span {name!r} of clean and of corrupt are at different positions"
        if odd:
            raise BadEdit(f"row {row}: {odd}, and estimates go position by position; patch aligns spans by role.")


def _sites(
    model: HookedModel, tensors: Sequence[str] | None, blocks: Sequence[int] | None, by: Sequence[By]
) -> tuple[list[Site], dict[str, str]]:
    """The sites that have a gradient (and the parts), and what is left out of all tensors, with the reason.

    Raises:
        BadEdit: a tensor that was named has none.
        UnknownDim: no tensor has such parts.
    """
    found, left_out = [], {}
    for site in chosen_sites(model, tensors, blocks):
        if reason := why_none(model, site):
            if tensors is not None:
                raise BadEdit(f"{site} can't be attributed to: {reason}.")
            left_out[site.tensor] = f"{site.tensor}: {reason}"
        elif tensors is not None or all(can_go(one, model.sites.node(site)) for one in by):
            found.append(site)
    if not found:
        raise UnknownDim(f"no tensor of these blocks has parts by {' and '.join(by)}.")
    return found, left_out


# ---- two runs and a gradient -----------------------------------------------------------------------------------------


class _Numbers(NamedTuple):
    """Estimated effects, [cells, prompts], and the metric of base and source, [prompts].

    Attributes:
        whole: [prompts], the estimate of the whole embedding.
    """

    effects: stats.Numbers
    whole: stats.Numbers
    base: stats.Numbers
    source: stats.Numbers


Held = dict[Site, Tensor]
"""What a run shows, as it is: nothing is copied, and nobody writes into it."""


def _estimated(
    model: HookedModel, both: Sides, parts: Mapping[Site, Sequence[Part]], prompts: Sequence[int], steps: int
) -> dict[str, _Numbers]:
    """Estimates of all cells on some prompts, which are counted among all."""
    ask, (metric,) = both.ask, both.ask.metrics
    slots = {Site(site.block, "experts") for site in parts if "k" in model.sites.node(site).shape}
    names = {*parts, *slots, X_0, LOGITS}
    source = _held(model, both.source_ask, names)
    base: Held = {}
    most = max(source[site].numel() for site in (X_0, *parts))
    scratch = torch.empty(most, dtype=torch.promote_types(source[X_0].dtype, torch.float32), device=model.device)
    cells = _Cells(model, ask, {X_0: [Part()], **parts}, prompts, base, source, scratch)
    first = cells.sums(metric, [None])
    numbers = [
        ask.values(metric, seen, ask.seen(base), whose=whose).numpy()
        for seen, whose in ((ask.seen(base), ask), (both.source_ask.seen(source), both.source_ask))
    ]
    sums = {FIRST_ORDER: first}
    if steps:
        between = [torch.lerp(base[X_0], source[X_0], (i + 0.5) / steps) for i in range(steps)]
        sums[f"integrated gradients, {steps} step{'s' if steps > 1 else ''}"] = cells.sums(metric, between) / steps
    return {kind: _Numbers(made[1:], made[0], *numbers) for kind, made in sums.items()}


def _held(model: HookedModel, ask: Ask, names: Collection[Site]) -> Held:
    """A plain run."""
    held: Held = {}
    notice = noticing(model, ask.tokens, ask.rows)

    def tap(site: Site, value: Tensor) -> Tensor:
        notice(site, value)
        if site in names:
            held[site] = value
        return value

    with torch.no_grad():
        model.decoder.run(ask.tokens, ask.keep, tap=tap, watched=names)
    return held


class _Cells(NamedTuple):
    """The cells of some prompts, and the two runs whose values they exchange.

    Attributes:
        prompts: counted among all.
        base: is filled in the first run that is differentiated.
        scratch: room for the largest product; new memory for each would cost more than the product itself.
    """

    model: HookedModel
    ask: Ask
    parts: Mapping[Site, Sequence[Part]]
    prompts: Sequence[int]
    base: Held
    source: Held
    scratch: Tensor

    def sums(self, metric: Metric, starts: Sequence[Tensor | None]) -> stats.Numbers:
        """Gradient · (source − base), [cells, prompts], summed over runs.

        Args:
            starts: the embedding of each run; None: the base's own.
        """
        made = {site: self._zeros(parts) for site, parts in self.parts.items()}
        for start in starts:
            seen = self.base if start is None else {}

            def look(site: Site, value: Tensor, seen: Held = seen) -> None:
                if seen is self.base or site.tensor == "experts":  # of a step no more is asked
                    seen[site] = value

            def take(site: Site, gradient: Tensor, seen: Held = seen) -> None:
                if site in made:
                    made[site] += self._by_part(site, gradient, seen)
                elif site == LOGITS and not bool((gradient.abs() > FLAT).any()):
                    raise BadMetric(f"{metric} is flat at the base: to first order nothing changes it; take another.")

            ask, names, score = self.ask, set(self.source), partial(_score, self.ask, metric)
            each_gradient(self.model, ask.tokens, ask.keep, score, names, look, take, start)
        return np.concatenate([made[site] for site in self.parts])

    def _zeros(self, parts: Sequence[Part]) -> stats.Numbers:
        """[parts, prompts]; NaN where a prompt has no such part."""
        about = [part.prompts is None or set(part.prompts) for part in parts]
        return np.array([[0.0 if some is True or p in some else np.nan for p in self.prompts] for some in about])

    def _by_part(self, site: Site, gradient: Tensor, seen: Held) -> stats.Numbers:
        """[parts, prompts]."""
        parts = self.parts[site]
        value, dims = self._products(site, gradient, seen, {dim for part in parts for dim in part.where})
        made = np.zeros((len(parts), len(self.prompts)))
        for row, part in zip(made, parts, strict=True):
            about = None if part.prompts is None else set(part.prompts)
            among = [b for b, p in enumerate(self.ask.prompt_of) if about is None or self.prompts[p] in about]
            np.add.at(row, self.ask.prompt_of, _of_part(value, dims, part, self.ask.rows, among).cpu().numpy())
        return made

    def _products(self, site: Site, gradient: Tensor, seen: Held, wanted: set[str]) -> tuple[Tensor, list[str]]:
        """Gradient · (source − base) in float64, summed over all dims but rows and those wanted; and these dims."""
        node, base = self.model.sites.node(site), self.base[site]
        if "k" in node.shape:
            return self._of_slots(site, gradient, seen, wanted)
        # Nothing is masked: pads have no gradient; hidden keys have none in S, and are 0 in the A of both runs.
        value = torch.sub(self.source[site], base, out=self._room(base)).mul_(gradient)
        dims: list[str] = []
        for axis in node.shape:
            if len(several := letters(axis)) > 1:
                value = value.unflatten(len(dims), [self.model.dims.size(dim) for dim in several])
            dims += several
        return _summed(value, dims, {"B", *wanted})

    def _of_slots(self, site: Site, gradient: Tensor, seen: Held, wanted: set[str]) -> tuple[Tensor, list[str]]:
        """The same of slots, matched by expert."""
        ours, theirs, here = (run[Site(site.block, "experts")] for run in (self.base, self.source, seen))
        base, source, experts = self.base[site], self.source[site], ours
        dims, kept = list(self.model.sites.node(site).shape), {"B", "T", "k", *wanted}
        if site.tensor == "delta_experts":  # slots are added up, so that one of either run has the gradient of any
            more, less = (torch.mul(x, gradient[:, :, :1], out=self._room(x)).sum(-1) for x in (source, base))
            value, experts, dims = torch.cat([more, -less], 2).double(), torch.cat([theirs, ours], 2), dims[:3]
        else:
            same, slot = _matched(ours, theirs)
            if here is not ours:
                chosen, place = _matched(ours, here)
                gradient = _in_slots(gradient, place) * _spread(chosen, gradient)
            value = torch.sub(_in_slots(source, slot), base, out=self._room(base)).mul_(gradient)
            value, dims = _summed(value, dims, kept)
            value.masked_fill_(~_spread(same, value), torch.nan)
        value.masked_fill_(~_spread(self.ask.rows.mask(None, "T").to(value.device), value), 0.0)
        if "e" in wanted:
            whole = value.new_zeros(*value.shape[:2], self.model.dims.e, *value.shape[3:])
            value, dims = whole.scatter_add(2, _spread(experts, value), value), ["B", "T", "e", *dims[3:]]
        return _summed(value, dims, {"B", *wanted})

    def _room(self, like: Tensor) -> Tensor:
        return self.scratch[: like.numel()].view(like.shape)


def _score(ask: Ask, metric: Metric, logits: Tensor) -> Tensor:
    """A metric summed over prompts: the gradient at a prompt's rows is its own."""
    seen = ask.seen({LOGITS: logits})
    made = ask.values(metric, seen, {LOGITS: seen[LOGITS].detach()}).sum()
    if not made.requires_grad:
        raise BadMetric(f"{metric} has no derivative; take logit_difference, log_probability or loss.")
    return made


def _summed(value: Tensor, dims: Sequence[str], kept: Collection[str]) -> tuple[Tensor, list[str]]:
    """A new tensor, summed over all dims but those kept, in float64; and these dims."""
    away = [axis for axis, dim in enumerate(dims) if dim not in kept]
    return (value.sum(away) if away else value.clone()).double(), [dim for dim in dims if dim in kept]


def _matched(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """[B T k] both: whether another run chose the expert of a slot, and in which of its slots."""
    same = ours[..., :, None] == theirs[..., None, :]
    return same.any(-1), same.int().argmax(-1)


def _in_slots(value: Tensor, slot: Tensor) -> Tensor:
    """[B T k ...]: of each token these slots."""
    token = torch.arange(slot[..., 0].numel(), device=slot.device).view(*slot.shape[:2], 1)
    return value.flatten(0, 2).index_select(0, (token * slot.shape[2] + slot).flatten()).view_as(value)


def _spread(index: Tensor, value: Tensor) -> Tensor:
    """Something of the first dims, spread over those of a value."""
    return index.view(*index.shape, *[1] * (value.ndim - index.ndim)).expand(*index.shape, *value.shape[index.ndim :])


def _of_part(value: Tensor, dims: Sequence[str], part: Part, rows: Rows, among: Sequence[int]) -> Tensor:
    """[B]: what the places of a part add up to, of these rows."""
    left = list(dims)
    for dim, at in part.where.items():
        axis = left.index(dim)
        if dim in ("T", "S"):
            ((_, named),) = where_of({dim: at})
            there = along(rows.mask(named, dim, among), axis, value.ndim).to(value.device)
            value = value.masked_fill(~there, 0.0).sum(axis)
        else:
            value = value.select(axis, at)
        left.pop(axis)
    return value
