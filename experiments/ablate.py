"""What each named tensor is worth: replace it, one at a time, and see what the model makes of it.

A *cell* is a tensor of a block, or a part of it: a head, a position, a named span, an expert. Each cell is one edited
run that starts from the base's values at the edited tensor, so a cell costs what lies below it. By default a cell's
values are resampled from reference prompts of the same shape; zero is for switching off, but many zeros coincide
(whole tensors of a dense block take 6 different ones). Cells that are equal by construction (`experiments.equal`) are
computed once and marked ``same_as``. Memory: the base holds every tensor of the blocks asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch

from experiments.equal import can_go, coinciding, dim_of
from experiments.frames import frame
from experiments.metrics import Metric, View, choose, last_logits
from experiments.options import By, How
from experiments.prompts import Prompts, Shape
from experiments.study import activation_dtype, chosen_sites, identity, progress
from hooks import Edit, HookedModel, Run, resample, zero
from hooks.edits import PER_SLOT
from probe.errors import BadEdit, UnknownDim, Unmatched
from probe.sites import Site

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Columns = tuple[tuple[str, Any], ...]
"""The part of a tensor that a cell is, as columns of the frame: ``(("head", 3),)``; empty: all of it."""


def ablate(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    by: By | None = None,
    how: How = "resample",
    reference: Prompts | None = None,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = 1,
    per_prompt: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Edit every tensor of every block, or those named, and measure what changes; a row for each cell and metric.

    Args:
        tensors: any spellings; None: all that can be edited. ``experts`` (integers) and ``delta_heads`` (a reading)
            are left out then, and ``attrs["left_out"]`` says why.
        blocks: None: all that have the tensor.
        by: a cell for each head, position, named span (role) or routed expert of the tensors that have it; None: whole
            tensors.
        how: ``resample`` from reference prompts, at the same positions; or ``zero``.
        reference: what to resample from; None: the prompts' own.
        metrics: names out of `experiments.metrics.METRICS`; None: all that the prompts have answers for.
        seed: of the draw of reference rows; with several ``draws``, of the first. Metrics are averaged over draws.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame (see `experiments.frames.COLUMNS`). ``value``, ``base`` and ``effect`` = value − base are averages over
        prompts: over those of one group first, then over groups, which ``n`` counts and ``stderr`` is over. A cell
        that would need an expert which no reference token chose has no value there; ``attrs["unmatched"]`` counts such
        cells. ``touched`` is NA where a cell was not computed but taken from ``same_as``.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, BadEdit: a tensor, a block or a part that doesn't exist or can't be
            edited so.
        BadMetric, BadText: a metric that these prompts give no ground for (answers of several tokens: see
            `experiments.metrics.teacher_forced`); prompts without a reference of their shape.
    """
    _check(by, how, draws)
    chosen = choose(metrics, prompts.has())
    for key in {need for metric in chosen for need in metric.needs}:
        prompts.spellings(key)  # raises where one next token doesn't tell
    sites, left_out = _editable(model, tensors, blocks, by)
    twins = _twins(model, sites, by, how)
    computed = [site for site in sites if site not in twins]
    seeds = range(seed, seed + draws)
    scenes = _scenes(model, prompts, reference or prompts.reference, computed, by, how, seeds)
    found = _measure(scenes, computed, by, how, chosen)
    rows = list(_rows(model, prompts, found, twins, sites, chosen, per_prompt))
    theirs = reference or prompts.reference
    common: dict[str, Any] = {
        "model": identity(model, name),
        "prompts": prompts.name,
        "edit": how,
        "seed": seed if how == "resample" and draws == 1 else pd.NA,
        "source": _source_name(prompts, theirs) if how == "resample" else pd.NA,
        "dtype": activation_dtype(model),
        "numerics": "reference",
    }
    df = frame(pd.DataFrame(rows).assign(**common), study="ablate")
    df.attrs["left_out"] = left_out
    df.attrs["unmatched"] = sum(cell.unmatched for cell in found.values())
    return df


def _check(by: str | None, how: str, draws: int) -> None:
    if by is not None and by not in get_args(By):
        raise UnknownDim(f"by={by!r}: cells go by {', '.join(get_args(By))}; or are whole tensors, without it.")
    if how not in get_args(How):
        raise BadEdit(f"how={how!r}: a tensor is ablated by {' or '.join(get_args(How))}.")
    if draws < 1 or (how == "zero" and draws > 1):
        raise BadEdit(f"draws={draws}: resampling takes one draw or more, zeroing has nothing to draw.")


# ---- which tensors ---------------------------------------------------------------------------------------------------


def _editable(
    model: HookedModel, tensors: Sequence[str] | None, blocks: Sequence[int] | None, by: By | None
) -> tuple[list[Site], dict[str, str]]:
    """The sites to edit, and what an ablation over all tensors leaves out, with the reason.

    Raises:
        BadEdit, UnknownDim: a tensor that was named can't be edited, or has no such parts.
    """
    sites: list[Site] = []
    left_out: dict[str, str] = {}
    for site in chosen_sites(model, tensors, blocks):
        node = model.sites.node(site)
        if by and tensors is None and not can_go(by, node):
            continue
        try:
            _edit(site, None, {dim_of(by, node): 0} if by else {}).sites(model.sites)
        except BadEdit as reason:
            if tensors is not None:
                raise
            left_out.setdefault(site.tensor, str(reason))
        else:
            sites.append(site)
    if not sites:
        raise UnknownDim(f"no tensor of these blocks has parts by {by}.")
    return sites, left_out


def _twins(model: HookedModel, sites: Sequence[Site], by: By | None, how: How) -> dict[Site, Site]:
    """Each site whose edit equals, by construction, that of an earlier one in its block: which one."""
    dims = model.dims
    first: dict[tuple[int | None, str], Site] = {}
    twins = {}
    for site in sites:
        assert site.block is not None, "chosen_sites are in blocks"
        roots = coinciding(
            how, by, moe=dims.moe[site.block], query_latent=dims.r_q is not None, norm_topk=dims.norm_topk
        )
        other = first.setdefault((site.block, roots[site.tensor]), site)
        if other != site:
            twins[site] = other
    return twins


def _edit(site: Site, source: Run | None, where: dict[str, Any], rows: Sequence[int] = (), seed: int = 0) -> Edit:
    """Zero where there is nothing to resample from."""
    if source is None:
        return zero(site.tensor, site.block, **where)
    drawn = None if site.tensor in PER_SLOT else rows  # slots are drawn token by token
    return resample(site.tensor, site.block, source=source, rows=drawn, seed=seed, **where)


# ---- prompts that run together ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scene:
    """Prompts that share a batch: all of them, or, by position, those of one shape.

    Attributes:
        rows: their places among all prompts.
        label: tells the shape from others; empty where there is but one.
        source: the run to resample from; None: zero.
        draws: for each draw, the row of ``source`` that each prompt takes its values from, and the seed.
    """

    model: HookedModel
    prompts: Prompts
    rows: Sequence[int]
    label: str
    base: Run
    source: Run | None
    draws: Sequence[tuple[Sequence[int], int]]

    def run(self, edit: Edit, into: Sequence[Site]) -> Run:
        """The edited run, from the base; ``into``: what is wanted beside the logits."""
        return self.model.run(self.base.tokens, self.base.keep, want=["logits", *into], edits=[edit], base=self.base)

    def view(self, run: Run, site: Site | None = None) -> View:
        """What metrics see of a run; ``site``: the x_next that they look at."""
        tokens, keep = run.tokens, run.keep
        real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
        ours = self.prompts
        words = {key: ours.spellings(key).to(tokens.device) for key in ours.has() if ours.one_token(key)}
        return View(last_logits(run["logits"], real), run[site] if site else None, real, **words)

    def places(self, site: Site, by: By | None) -> list[tuple[Columns, dict[str, Any]]]:
        """The parts of a tensor: the columns that say which, and the edit's ``where``."""
        if by is None:
            return [((), {})]
        dim = dim_of(by, self.model.sites.node(site))
        if by in ("head", "expert"):
            return [(((by, i),), {dim: i}) for i in range(self.model.dims.size(dim))]
        prompt = self.prompts.rows[0]
        if by == "role":
            return [((("role", name),), {dim: list(span)}) for name, span in prompt.spans.items()]
        return [(self._position(pos), {dim: pos}) for pos in range(len(prompt.tokens))]

    def _position(self, pos: int) -> Columns:
        """A position's columns: its token, where all prompts agree on it, and the spans that it is in."""
        ids = {prompt.tokens[pos] for prompt in self.prompts.rows}
        token = [("token", self.prompts.tokenizer.token(ids.pop()))] if len(ids) == 1 else []
        roles = [name for name, span in self.prompts.rows[0].spans.items() if pos in span]
        role = [("role", ", ".join(roles))] if roles else []
        return (*([("group", self.label)] if self.label else []), ("pos", pos), *token, *role)


def _scenes(
    model: HookedModel,
    prompts: Prompts,
    reference: Prompts | None,
    sites: Sequence[Site],
    by: By | None,
    how: How,
    seeds: Iterable[int],
) -> list[_Scene]:
    """The batches, each with its base and its source run. One batch, unless positions must mean the same in all its
    rows."""
    shapes = prompts.shapes()
    parts = list(shapes.values()) if by in ("position", "role") else [list(range(len(prompts)))]
    labels = _labels(list(shapes)) if by == "position" and len(shapes) > 1 else [""] * len(parts)
    blocks = {site.block for site in sites}
    held = [site for site in model.sites if site.block in blocks and site.tensor != "delta_heads"]
    source = None
    if how == "resample":
        theirs = _reference(prompts, reference)
        source = model.run(*theirs.batch(model.device), want=sites)
    scenes = []
    for label, rows in zip(labels, parts, strict=True):
        part = prompts.subset(rows)
        base = model.run(*part.batch(model.device), want=["logits", *held])
        draws = [(part.draw(_reference(prompts, reference), seed) if source else (), seed) for seed in seeds]
        scenes.append(_Scene(model, part, rows, label, base, source, draws))
    return scenes


def _reference(prompts: Prompts, reference: Prompts | None) -> Prompts:
    if reference is None:
        notes = " ".join(prompts.notes)
        raise BadEdit(
            f"{prompts.name}: there are no reference prompts to resample from.{' ' + notes if notes else ''}"
            " Give some, or ablate by zero (--how zero)."
        )
    return reference


def _labels(shapes: Sequence[Shape]) -> list[str]:
    """A name for each shape: its template, with its length or number where several share it."""
    names = [shape.template or f"{shape.length} tokens" for shape in shapes]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def _source_name(prompts: Prompts, reference: Prompts | None) -> str:
    """The reference set's name, and how many of the evaluated prompts it holds."""
    assert reference is not None
    held = len({prompt.tokens for prompt in prompts.rows} & {prompt.tokens for prompt in reference.rows})
    return reference.name + (f" (holds {held} of the prompts)" if held else "")


# ---- measuring -------------------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    site: Site
    columns: Columns


class _Ran(NamedTuple):
    """What the edited runs of a cell say of themselves in one scene, averaged over draws."""

    prompts: int
    touched: float
    agreement: float | None
    flips: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Ran:
        """A cell's runs, one for each draw. The agreement is None where the edit reaches no router."""
        agreements = [run.routing_agreement for run in runs if run.routing_agreement is not None]
        return cls(
            prompts=len(runs[0].tokens),
            touched=fmean(run.touched[0] for run in runs),
            agreement=fmean(agreements) if agreements else None,
            flips=fmean(run.flips or 0 for run in runs),
        )


@dataclass
class _Cell:
    """What one cell gave: metrics × prompts in the edited runs (averaged over draws) and in the base, NaN where not
    measured."""

    values: Numbers
    base: Numbers
    ran: list[_Ran] = field(default_factory=list)
    unmatched: bool = False

    def fill(self, scene: _Scene, site: Site, where: dict[str, Any], metrics: Sequence[Metric]) -> None:
        """Run the edit on a scene's prompts, once for each seed."""
        into = [Site(site.block, "x_next")] if any(metric.looks_at_block for metric in metrics) else []
        base = scene.view(scene.base, *into)
        try:
            runs = [scene.run(_edit(site, scene.source, where, *draw), into) for draw in scene.draws]
        except Unmatched:
            self.unmatched = True
            return
        views = [scene.view(run, *into) for run in runs]
        for i, metric in enumerate(metrics):
            self.values[i, scene.rows] = torch.stack([metric.of(view, base) for view in views]).mean(0).cpu()
            self.base[i, scene.rows] = metric.of(base, base).cpu()
        self.ran.append(_Ran.of(runs))


def _measure(
    scenes: Sequence[_Scene], sites: Sequence[Site], by: By | None, how: How, metrics: Sequence[Metric]
) -> dict[_Key, _Cell]:
    """Every cell, over all scenes that have it."""
    work = [(scene, site, *place) for scene in scenes for site in sites for place in scene.places(site, by)]
    shape = len(metrics), sum(len(scene.rows) for scene in scenes)
    found: dict[_Key, _Cell] = {}
    with progress(len(work), f"{how} by {by}" if by else how) as bar:
        for scene, site, columns, where in work:
            cell = found.setdefault(_Key(site, columns), _Cell(np.full(shape, np.nan), np.full(shape, np.nan)))
            cell.fill(scene, site, where, metrics)
            bar.update()
    return found


# ---- reporting -------------------------------------------------------------------------------------------------------


def _rows(
    model: HookedModel,
    prompts: Prompts,
    found: dict[_Key, _Cell],
    twins: dict[Site, Site],
    sites: Sequence[Site],
    metrics: Sequence[Metric],
    per_prompt: bool,
) -> Iterator[dict[str, Any]]:
    """The frame's rows, site by site in the card's order; a twin's are those of the site that it equals."""
    parts: dict[Site, list[tuple[Columns, _Cell]]] = {}
    for (site, columns), cell in found.items():
        parts.setdefault(site, []).append((columns, cell))
    for site in sites:
        node, twin = model.sites.node(site), twins.get(site)
        what = {
            "block": site.block,
            "step": getattr(node, "number", None) or pd.NA,
            "tensor": site.tensor,
            "symbol": node.symbol,
            "same_as": twin.tensor if twin else pd.NA,
        }
        for columns, cell in parts[twin or site]:
            for i, metric in enumerate(metrics):
                row = {**what, **dict(columns), "metric": metric.name, "unit": metric.unit}
                if per_prompt:
                    yield from _by_prompt(prompts, row, cell.values[i], cell.base[i])
                else:
                    yield {**row, **_average(prompts, cell.values[i], cell.base[i]), **_of_runs(cell.ran, bool(twin))}


def _by_prompt(prompts: Prompts, row: dict[str, Any], values: Numbers, base: Numbers) -> Iterator[dict[str, Any]]:
    for i in np.flatnonzero(~np.isnan(base)):
        yield {"group": prompts.rows[i].group, **row, "example": i, **_numbers(values[i], base[i]), "n": 1}


def _average(prompts: Prompts, values: Numbers, base: Numbers) -> dict[str, Any]:
    """Over the prompts of a group, then over groups, which are the independent units."""
    good = ~np.isnan(values)
    if not good.any():
        return {"value": pd.NA, "base": pd.NA, "effect": pd.NA, "n": 0}
    _, unit = np.unique(
        [prompt.group for prompt, there in zip(prompts.rows, good, strict=True) if there], return_inverse=True
    )
    size = np.bincount(unit)
    before, after = (np.bincount(unit, weights=x[good]) / size for x in (base, values))
    n = len(size)
    spread = (after - before).std(ddof=1) / n**0.5 if n > 1 else pd.NA
    return {**_numbers(after.mean(), before.mean()), "n": n, "stderr": spread}


def _numbers(value: float, base: float) -> dict[str, Any]:
    return {"value": value, "base": base, "effect": value - base}


def _of_runs(ran: Sequence[_Ran], copied: bool) -> dict[str, Any]:
    """What the runs behind a cell say of themselves. ``touched`` is of a cell's own edit, so a copied cell has none."""
    row: dict[str, Any] = {}
    if ran and not copied:
        row["touched"] = round(sum(one.touched for one in ran))
    if agreements := {i: one.agreement for i, one in enumerate(ran) if one.agreement is not None}:
        prompts = [ran[i].prompts for i in agreements]
        row["routing_agreement"] = float(np.average(list(agreements.values()), weights=prompts))
        row["flips"] = round(sum(ran[i].flips for i in agreements))
    return row
