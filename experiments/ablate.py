"""What each named tensor is worth: replace it, one at a time, and see what the model makes of it.

A *cell* is a tensor of a block, or a part of it: a head, a position, a named span, an expert. All cells, the base and
the reference prompts go through the model together, block by block (`experiments.measure`), so that a cell costs what
lies below it and a block's weights are read once. By default a cell's values are resampled from reference prompts of
the same shape; zero is for switching off, but many zeros coincide (whole tensors of a dense block take 6 different
ones). Cells that are equal by construction (`experiments.equal`) are computed once and marked ``same_as``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch

from experiments.asking import Ask
from experiments.equal import coinciding
from experiments.finite import telling
from experiments.frames import frame
from experiments.measure import Asked, Source, cost, measure, table
from experiments.options import By, How
from experiments.parts import Part, ablation, can_go, columns, dim_of, listed, parts, place
from experiments.prompts import Prompts
from experiments.study import check_drawn, chosen_blocks, chosen_sites, common, other_options
from hooks import HookedModel, Live
from hooks.cells import BUDGET
from hooks.where import Rows, where_of
from probe.errors import BadEdit, UnknownDim
from probe.sites import Site

CONTROLS = 3
"""Experts of about equal load that an expert's effect is held against."""


@telling
def ablate(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    by: By | Sequence[By] | None = None,
    at: str | int | None = None,
    how: How = "resample",
    reference: Prompts | None = None,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = 1,
    per_prompt: bool = False,
    budget: int = BUDGET,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Edit every tensor of every block, or those named, and measure what changes; a row for each cell and metric.

    Args:
        tensors: any spellings; None: all that can be edited. ``experts`` (integers) and ``delta_heads`` (a reading)
            are left out then, and ``attrs["left_out"]`` says why.
        blocks: None: all that have the tensor.
        by: a cell for each head, position, named span (role), key, routed expert or feature of the tensors that have
            it, or for each of a product of several; None: whole tensors.
        at: a place to limit all cells to: a span's name (``END``) or a position.
        how: ``resample`` from reference prompts, at the same positions; their ``mean``; ``zero``; ``noise`` of the
            tensor's own spread; or, by expert, ``exclude`` from the choice, so that the next one takes its place.
        reference: what to resample from, or to average; None: the prompts' own.
        metrics: names, see `experiments.metrics.metric`; None: the usual ones that the prompts have answers for.
        seed: of the draw of reference rows or of noise, with several ``draws`` of the first; of the intervals'
            resamples. Metrics are averaged over draws.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        budget: bytes for the rows in flight.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame (see `experiments.frames.COLUMNS`). ``value``, ``base`` and ``effect`` = value − base are averages over
        prompts: over those of one group first, then over groups, which ``n`` counts and the interval is over. A cell
        that would need an expert which no reference token chose has no value there; ``attrs["unmatched"]`` counts such
        cells. ``touched`` is NA where a cell was not computed but taken from ``same_as``, and so are ``flips`` and
        ``routing_agreement`` where the block's own routing is not the same. By expert, ``load`` is the
        share of the cell's tokens that choose it, and ``control`` the mean effect of three others of the block whose
        loads are the nearest.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, BadEdit: a tensor, a block or a part that doesn't exist or can't be
            edited so.
        BadMetric, BadText: a metric that these prompts give no ground for; prompts without a reference of their shape.
    """
    check_drawn(seed, draws=draws)
    model = model.reaching(beyond)
    cells = _Cells.of(model, prompts, tensors, blocks, by, at, how, reference, metrics, seed, draws)
    found = measure(model, cells.ask, cells.asked, source=cells.source, budget=budget, what=how)
    df = _with_copies(table(cells.ask, found, per_prompt=per_prompt, seed=seed), cells.all, model)
    same: dict[str, Any] = {
        **common(model, name, prompts),
        "edit": how,
        "seed": seed,
        "options": other_options(ablate, draws=draws),
        "source": source_name(prompts, reference) if cells.source is not None else pd.NA,
    }
    if "expert" in listed(by):
        df = _with_controls(df)
    df = frame(df.assign(**same), study="ablate")
    df.attrs["left_out"] = cells.left_out
    df.attrs["unmatched"] = found.unmatched
    return df


def outlook(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    by: By | Sequence[By] | None = None,
    at: str | int | None = None,
    how: How = "resample",
    reference: Prompts | None = None,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = 1,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `ablate` would take; see `experiments.measure.cost`."""
    check_drawn(seed, draws=draws)
    model = model.reaching(beyond)
    cells = _Cells.of(model, prompts, tensors, blocks, by, at, how, reference, metrics, seed, draws)
    return cost(model, cells.ask, cells.asked, cells.source, timed=timed)


class _Cell(NamedTuple):
    """A cell of the frame.

    Attributes:
        computed: which of the cells that are computed it is, or equals by construction.
        routed: whether tokens are routed as in that one, too.
    """

    site: Site
    computed: int
    routed: bool


class _Cells(NamedTuple):
    """What is asked of the sweep: the batch, the cells, what they take values from; all cells; and what isn't asked."""

    ask: Ask
    asked: list[Asked]
    source: Live | None
    all: list[_Cell]
    left_out: dict[str, str]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        prompts: Prompts,
        tensors: Sequence[str] | None,
        blocks: Sequence[int] | None,
        by: By | Sequence[By] | None,
        at: str | int | None,
        how: How,
        reference: Prompts | None,
        metrics: Sequence[str] | None,
        seed: int,
        draws: int,
    ) -> _Cells:
        """All that follows from the arguments of `ablate`."""
        several = listed(by)
        _check(how, several, draws, tensors, reference)
        ask = Ask(model, prompts, metrics)
        sites, left_out = _editable(model, tensors, blocks, several, how)
        forced = how in ("resample", "mean") and forces(ask)
        placed = (at is not None or forced) and not {"position", "role"} & set(several)
        along: tuple[By, ...] = (*several, "role") if placed else several
        source: Live | None = None
        rows: list[list[int] | None] = [None] * draws
        if how in ("resample", "mean"):
            theirs = reference_of(prompts, reference)
            source = Live(*theirs.batch(model.device), theirs.spans)
            if how == "resample":
                drawn = (prompts.draw(theirs, seed + i) for i in range(draws))
                rows = [[draw[p] for p in ask.prompt_of] for draw in drawn]
        loads = _Loads(model, prompts) if "expert" in several else None
        asked: list[Asked] = []
        every: list[_Cell] = []
        first: dict[Any, tuple[int, str]] = {}
        for site in sites:
            node = model.sites.node(site)
            there, (root, routing) = place(prompts, node, at), _alike(model, ask, site, along, how)
            for part in parts(model, prompts, site, several, there.where):
                own = len(asked), routing
                computed, routed = first.setdefault((site.block, root, *part.columns.items()), own)
                every.append(_Cell(site, computed, routed == routing))
                if computed < len(asked):
                    continue
                said = {**columns(site, node, there, part), "cell": computed}
                if loads is not None:
                    said["load"] = loads.of(site, part)
                if forced:
                    part = replace(part, where={dim_of("position", node): slice(None), **part.where})
                asked.append(_cell(ask, site, part, said, how, rows, seed))
        return cls(ask, asked, source, every, left_out)


def forces(ask: Ask) -> bool:
    """Whether answers stand behind prompts, of several tokens each: there is nothing to put in their place."""
    return ask.rows.lengths != list(ask.spoken)


def _check(how: str, by: Sequence[By], draws: int, tensors: Sequence[str] | None, reference: Prompts | None) -> None:
    if how not in get_args(How):
        raise BadEdit(f"how={how!r}: a tensor is ablated by {', '.join(get_args(How))}.")
    if draws < 1 or (how not in ("resample", "noise") and draws > 1):
        raise BadEdit(f"draws={draws}: resampling and noise take one draw or more; to {how} has nothing to draw.")
    if reference is not None and how not in ("resample", "mean"):
        raise BadEdit(f"reference={reference.name}: to {how} takes nothing from other prompts; leave it out.")
    if how == "exclude" and (by != ("expert",) or tensors not in (None, ["choice_score"], ("choice_score",))):
        raise BadEdit("exclude goes by expert, and is an edit of choice_score; say by='expert', and no tensors.")


def _cell(
    ask: Ask,
    site: Site,
    part: Part,
    said: Mapping[str, Any],
    how: How,
    rows: Sequence[Sequence[int] | None],
    seed: int,
) -> Asked:
    """One part of a tensor, replaced once for each draw."""
    where = part.rows(ask)

    def draw(i: int, source: Source) -> Sequence[Any]:
        return (ablation(how, site, source, where, rows[i], seed + i),)

    return Asked(tuple(partial(draw, i) for i in range(len(rows))), said, site.block, part.prompts)


# ---- which tensors ---------------------------------------------------------------------------------------------------


def _editable(
    model: HookedModel, tensors: Sequence[str] | None, blocks: Sequence[int] | None, by: Sequence[By], how: How
) -> tuple[list[Site], dict[str, str]]:
    """The sites to edit, and what an ablation over all tensors leaves out, with the reason.

    Raises:
        BadEdit, UnknownDim: a tensor that was named can't be edited, or has no such parts.
    """
    left_out: dict[str, str] = {}
    sites = [Site(b, "choice_score") for b in chosen_blocks(model, blocks) if how == "exclude" and model.dims.moe[b]]
    for site in chosen_sites(model, tensors, blocks) if how != "exclude" else ():
        node = model.sites.node(site)
        if tensors is None and not all(can_go(one, node) for one in by):
            continue
        try:
            ablation("zero", site, None, {dim_of(one, node): 0 for one in by}, None, 0).sites(model.sites)
        except BadEdit as reason:
            if tensors is not None:
                raise
            left_out.setdefault(site.tensor, str(reason))
        else:
            sites.append(site)
    if not sites:
        raise UnknownDim(f"no tensor of these blocks has parts by {' and '.join(by)}.")
    return sites, left_out


def _alike(model: HookedModel, ask: Ask, site: Site, by: tuple[By, ...], how: How) -> tuple[str, str]:
    """What tensors of a block have in common that are edited alike by construction, in the parts that they share; and
    what those have that are routed alike, too.

    Not all of the first kind are: to zero what the experts read, or what they add, leaves the same stream, but not the
    same choice.
    """
    if how == "exclude":
        return site.tensor, site.tensor
    assert site.block is not None, "chosen_sites are in blocks"
    dims, looked = model.dims, {one.tensor for one in ask.sites(site.block) if one.block == site.block}
    kind = {"moe": dims.moe[site.block], "query_latent": dims.r_q is not None, "norm_topk": dims.norm_topk}
    both = (looked, looked | {"experts"} if dims.moe[site.block] else looked)
    stream, routing = (coinciding(how, by, tuple(sorted(reads)), **kind)[site.tensor] for reads in both)
    return stream, routing


def reference_of(prompts: Prompts, reference: Prompts | None) -> Prompts:
    """The reference prompts: those given, or the prompts' own.

    Raises:
        BadEdit: there are none.
    """
    theirs = reference or prompts.reference
    if theirs is None:
        notes = " ".join(prompts.notes)
        raise BadEdit(
            f"{prompts.name}: there are no reference prompts to resample from.{' ' + notes if notes else ''}"
            " Give some, or ablate by zero (--how zero)."
        )
    return theirs


def source_name(prompts: Prompts, reference: Prompts | None) -> str:
    """The reference set's name, and how many of the evaluated prompts it holds."""
    theirs = reference_of(prompts, reference)
    held = len({prompt.tokens for prompt in prompts.rows} & {prompt.tokens for prompt in theirs.rows})
    return theirs.name + (f" (holds {held} of the prompts)" if held else "")


# ---- what is added to the sweep's own numbers ------------------------------------------------------------------------


def _with_copies(df: pd.DataFrame, cells: Sequence[_Cell], model: HookedModel) -> pd.DataFrame:
    """The rows of all cells, tensor by tensor and metric by metric, out of those of the cells that were computed."""
    nodes = [model.sites.node(cell.site) for cell in cells]
    every = pd.DataFrame(
        {
            "cell": [cell.computed for cell in cells],
            "routed": [cell.routed for cell in cells],
            "site": pd.factorize(pd.Series([str(cell.site) for cell in cells]))[0],
            "tensor": [cell.site.tensor for cell in cells],
            "symbol": [node.symbol for node in nodes],
            "step": pd.Series([getattr(node, "number", None) or pd.NA for node in nodes], dtype=object),
        }
    )
    computed = df.assign(order=df["metric"].map({name: i for i, name in enumerate(df["metric"].unique())}))
    made = every.merge(computed, on="cell", suffixes=("", "_computed"))
    made = made.sort_values(["site", "order"], kind="stable", ignore_index=True)
    copied = made["tensor"] != made["tensor_computed"]
    made["same_as"] = made["tensor_computed"].astype(object).where(copied, pd.NA)
    for name, known in {"touched": ~copied, "routing_agreement": made["routed"], "flips": made["routed"]}.items():
        if name in made:
            made[name] = made[name].astype(object).where(known, pd.NA)
    return made[[*df, "same_as"]].drop(columns="cell")


class _Loads:
    """How much the experts are used, on the prompts as they are."""

    def __init__(self, model: HookedModel, prompts: Prompts) -> None:
        tokens, keep = prompts.batch(model.device)
        sites = [Site(block, "experts") for block, moe in enumerate(model.dims.moe) if moe]
        self.chosen, self.e = model.run(tokens, keep, want=sites), model.dims.e
        self.rows = Rows(keep, tokens.shape[0], tokens.shape[1], prompts.spans)
        self.known: dict[Any, torch.Tensor] = {}

    def of(self, site: Site, part: Part) -> float:
        """The share of a part's tokens that choose its expert."""
        ((_, at),) = where_of({"T": part.where["T"]}) if "T" in part.where else ((None, None),)
        key = site.block, at, part.prompts
        if key not in self.known:
            there = self.rows.mask(at, "T", part.prompts).to(self.chosen.tokens.device)
            chosen = self.chosen[Site(site.block, "experts")][there]
            self.known[key] = torch.bincount(chosen.flatten(), minlength=self.e).double() / len(chosen)
        return float(self.known[key][part.where["e"]])


def _with_controls(df: pd.DataFrame) -> pd.DataFrame:
    """Beside each expert's effect the mean effect of those experts whose loads are the nearest."""
    alike = [
        name for name in ("block", "tensor", "metric", "group", "pos", "role", "head", "key", "example") if name in df
    ]
    effect, load = (df[name].to_numpy(dtype=float) for name in ("effect", "load"))
    control = np.full(len(df), np.nan)
    for cells in df.groupby(alike, dropna=False, observed=True).indices.values():
        far = np.abs(load[cells, None] - load[cells])
        np.fill_diagonal(far, np.inf)
        near = far.argsort(axis=1, kind="stable")[:, : min(CONTROLS, len(cells) - 1)]
        control[cells] = pd.DataFrame(effect[cells][near]).mean(axis=1)  # of those that have an effect
    return df.assign(control=control)
