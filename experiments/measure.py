"""Cells × metrics on prompts, by one sweep: what a study asks of the engine, and what it gets back as numbers.

A study says what its cells are (`Asked`: edits, made from the source that runs along, and the columns that tell the
cell in a frame). `measure` runs all of them in one walk (`hooks.sweep`) and hands back a number for each metric, cell
and prompt, with those of the base and of the source; `table` makes the frame's rows of them (`experiments.stats`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments import stats
from experiments.asking import LOGITS, Ask
from experiments.metrics import BadMetric, Metric
from experiments.study import progress, seconds
from hooks import Cell, Edit, HookedModel, Live, Outcome, Run, outlook, rounded, sweep
from hooks.cells import BUDGET
from hooks.edits import Freeze
from hooks.generate import When
from probe.errors import BadEdit, Unmatched
from probe.sites import Site

Source = Live | Run | None
"""What the edits of a cell take values from: in a sweep what runs along, in its twin a run."""

NOISE_SEEDS = 4
"""Draws of another rounding in each edited block, where precision is low."""


@dataclass(frozen=True)
class Asked:
    """A cell of a study.

    Attributes:
        edits: for each draw, the edits of the cell, made from the source. A metric is averaged over draws.
        columns: what tells the cell from others in the frame.
        block: the edited block, of several the last; None: the edits are in none.
        prompts: which prompts the cell is about; None: all.
    """

    edits: tuple[Callable[[Source], Sequence[Edit]], ...]
    columns: Mapping[str, Any]
    block: int | None
    prompts: Sequence[int] | None = None


@dataclass
class Measured:
    """Numbers by metric, [cells, prompts]; NaN where a cell has none for a prompt.

    Attributes:
        source: [prompts]; only of metrics that a source has (of tensors none).
        noise: [cells, seeds, prompts], the effects of rounding alone in the cell's block; only where precision is low.
        outcomes: of each cell, one for each draw.
        gap: [prompts], what a sum that should be complete leaves of the whole; only where there is such a sum.
    """

    asked: Sequence[Asked]
    values: dict[str, stats.Numbers]
    base: dict[str, stats.Numbers]
    source: dict[str, stats.Numbers] = field(default_factory=dict)
    noise: dict[str, stats.Numbers] = field(default_factory=dict)
    outcomes: list[list[Outcome]] = field(default_factory=list)
    gap: dict[str, stats.Numbers] = field(default_factory=dict)

    @property
    def unmatched(self) -> int:
        """Cells without a value: they need an expert that the source didn't choose."""
        return sum(all(one.unmatched is not None for one in draws) for draws in self.outcomes)


def measure(
    model: HookedModel,
    ask: Ask,
    asked: Sequence[Asked],
    *,
    source: Live | Run | None = None,
    source_ask: Ask | None = None,
    base_edits: Sequence[Edit] = (),
    when: When | None = None,
    budget: int = BUDGET,
    what: str = "sweep",
) -> Measured:
    """Run all cells of a study in one walk.

    Args:
        source: what the cells' edits take from; what runs along (`Live`) is measured too, with ``source_ask``.
        base_edits: act on the base, and so in every cell.
        when: which tokens edits act on where metrics decode: the ``prompt``'s, those of the ``steps`` (other metrics
            then see the base), or ``both``. None: both, but the prompt's where they take values from another run.
        budget: bytes for the rows in flight.
        what: heads the progress bar.

    Raises:
        ProbeError: a cell whose edits can't mean what they say, a metric that can't be had of the source or of an edit.
    """
    if not asked:
        raise BadEdit("there is no cell to measure.")
    check_source(ask, source_ask)
    base = ask.live(base_edits)
    cells = _cells(ask, asked, source, when)
    owners = [i for i, one in enumerate(asked) for _ in one.edits]
    noise = _noise(model, asked)
    cells += [Cell((edit,), whole=_whole(ask, block)) for block, edit in noise]
    lives = [source] if isinstance(source, Live) else []
    reader = _Reader(ask, source_ask, base, lives, cells, [*(asked[i].block for i in owners), *(b for b, _ in noise)])
    read = [some or [spoken - 1] for some, spoken in zip(ask.read, ask.spoken, strict=True)]
    with torch.no_grad(), progress(model.dims.blocks + 2, what) as bar:
        outcomes = sweep(
            model,
            base,
            cells,
            reader.look,
            sources=lives,
            want=[LOGITS] if any(ask.read) or ask.decodes else [],
            read=read,
            budget=budget,
            tick=lambda done, total: _move(bar, done, total),
        )
    if ask.decodes:
        makers = [edits for one in asked for edits in one.edits]
        _decode(model, ask, makers, [edit for _, edit in noise], source, base_edits, when, reader)
    return _collected(ask, asked, owners, noise, outcomes, reader)


def check_source(ask: Ask, source_ask: Ask | None) -> None:
    """Refuse a source that metrics can't be had of.

    Raises:
        BadMetric: see `experiments.asking.Ask.check`.
    """
    if source_ask is not None:
        for metric in _of_source(ask):
            ask.check(metric, source_ask)


def _cells(ask: Ask, asked: Sequence[Asked], source: Source, when: When | None = None) -> list[Cell]:
    """A cell of the sweep for each draw of each cell that is asked for."""
    return [
        Cell(() if when == "steps" else tuple(edits(source)), whole=_whole(ask, one.block))
        for one in asked
        for edits in one.edits
    ]


def _whole(ask: Ask, block: int | None) -> tuple[Site, ...]:
    """What metrics compare, past an edit of a block."""
    return tuple(site for site in ask.sites(block) if site != LOGITS)


def _move(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


class _Reader:
    """Makes numbers of what a sweep shows, as it is shown: nothing is kept longer than metrics need it."""

    def __init__(
        self,
        ask: Ask,
        source_ask: Ask | None,
        base: Live,
        sources: Sequence[Live],
        cells: Sequence[Cell],
        blocks: Sequence[int | None],
    ) -> None:
        self.ask, self.source_ask, self.base = ask, source_ask, base
        self.place = {id(cell): i for i, cell in enumerate(cells)}
        self.sources = {id(source) for source in sources}
        self.blocks = blocks
        prompts = len(ask.prompts)
        self.values = {metric.name: np.full((len(cells), prompts), np.nan) for metric in ask.metrics}
        self.of_base = {metric.name: np.full((len(cells), prompts), np.nan) for metric in ask.metrics}
        self.of_source: dict[str, stats.Numbers] = {}
        self.bases: dict[tuple[str, int | None], stats.Numbers] = {}
        self.base_seen: dict[Site, Tensor] = {}
        self.seen: dict[int, dict[Site, Tensor]] = {}

    def look(self, who: Cell | Live, site: Site, value: Tensor) -> None:
        """See `hooks.cells.Look`."""
        if who is self.base:
            self.base_seen[site] = value
            return
        if id(who) in self.sources:
            self._source(site, value)
            return
        i = self.place[id(who)]
        seen = self.seen.setdefault(i, {})
        seen[site] = value
        for metric in self.ask.metrics:
            needed = self._needs(metric, self.blocks[i])
            if site == (needed[0] if needed else None):
                self._fill(i, metric, seen)
        if site.tensor != "experts":  # which come before the slots that they are needed for
            del seen[site]

    def _needs(self, metric: Metric, block: int | None) -> list[Site]:
        """The site whose arrival completes what a metric needs."""
        if metric.decodes:
            return []
        return [self.ask.site(metric, block)] if metric.tensor is not None else [LOGITS]

    def _fill(self, i: int, metric: Metric, seen: Mapping[Site, Tensor]) -> None:
        block = self.blocks[i]
        self.values[metric.name][i] = self.ask.values(metric, seen, self.base_seen, block)
        key = metric.name, block if metric.tensor is not None else None
        if key not in self.bases:
            self.bases[key] = self.ask.values(metric, self.base_seen, self.base_seen, block).numpy()
        self.of_base[metric.name][i] = self.bases[key]

    def _source(self, site: Site, value: Tensor) -> None:
        assert self.source_ask is not None, "a source that is looked at has an ask"
        for metric in _of_source(self.ask) if site == LOGITS else ():
            made = self.ask.values(metric, {LOGITS: value}, self.base_seen, whose=self.source_ask)
            self.of_source[metric.name] = made.numpy()


def _of_source(ask: Ask) -> list[Metric]:
    """The metrics of logits. (Tensors of the source aren't kept; what is decoded comes later.)"""
    return [metric for metric in ask.metrics if metric.tensor is None and not metric.decodes]


def _noise(model: HookedModel, asked: Sequence[Asked]) -> list[tuple[int, Edit]]:
    """The base with another rounding of the residual stream into each edited block, where precision is low."""
    stored = model.decoder.weights.read(None, "W_E").dtype
    if stored == torch.float32:
        return []
    blocks = sorted({one.block for one in asked if one.block is not None})
    return [(b, rounded("x_n", b, like=stored, seed=seed)) for b in blocks for seed in range(NOISE_SEEDS)]


def _decode(
    model: HookedModel,
    ask: Ask,
    makers: Sequence[Callable[[Source], Sequence[Edit]]],
    noise: Sequence[Edit],
    source: Source,
    base_edits: Sequence[Edit],
    when: When | None,
    reader: _Reader,
) -> None:
    """What is decoded, a generation for each cell: no sweep can share what comes after the prompt.

    Edits without a source may act in every step, others on the prompt alone: beyond the source there is nothing to
    take.
    """
    wanted = [metric for metric in ask.metrics if metric.decodes]
    if len(ask.prompt_of) > len(ask.prompts):
        raise BadMetric(f"{wanted[0].name} takes each prompt once: measure answers of several tokens apart from it.")
    batch, spans = ask.prompts.batch(model.device), ask.prompts.spans

    def decoded(edits: Sequence[Edit]) -> Tensor:
        edits = [*base_edits, *edits]
        if frozen := [edit for edit in edits if isinstance(edit.how, Freeze)]:
            raise BadEdit(f"{wanted[0].name}: {frozen[0]} has nothing to hold in what is decoded.")
        return model.generate(*batch, n=ask.decodes, edits=edits, spans=spans, when=acting).new

    acting = when or ("both" if source is None and not base_edits else "prompt")
    base, stays = decoded(()), source
    if isinstance(source, Live):
        stays = stayed(model, source, [edit for make in makers for edit in make(source)])
    if isinstance(source, Live) and reader.source_ask is not None:
        new = _decoded(model, source, ask.decodes)
        reader.of_source |= {metric.name: ask.of_decoded(metric, new, base).numpy() for metric in wanted}
    for i, edits in enumerate([*(make(stays) for make in makers), *([edit] for edit in noise)]):
        with suppress(Unmatched):
            new = decoded(edits)
            for metric in wanted:
                reader.values[metric.name][i] = ask.of_decoded(metric, new, base)
                reader.of_base[metric.name][i] = ask.of_decoded(metric, base, base)


def stayed(model: HookedModel, source: Live, edits: Sequence[Edit]) -> Run:
    """What would run along, as a run that keeps what edits take from it."""
    sites = {site for edit in edits for site in edit.sites(model.sites)}
    slots = {Site(site.block, "experts") for site in sites if "k" in model.sites.node(site).shape}
    assert source.tokens is not None, "prompts are tokens"
    rows = source.rows
    return model.run(
        source.tokens,
        rows.keep,
        want=[*sites, *slots],
        edits=source.edits,
        spans=rows.spans,
        positions=rows.ids,
        segments=rows.segments,
    )


def _decoded(model: HookedModel, source: Live, n: int) -> Tensor:
    """What a source says, token by token."""
    rows = source.rows
    if rows.segments is not None:
        raise BadEdit("a source whose rows pack several texts can't go on; give each text a row of its own.")
    assert source.tokens is not None, "prompts are tokens"
    return model.generate(
        source.tokens, rows.keep, n=n, edits=source.edits, spans=rows.spans, positions=rows.ids, when="prompt"
    ).new


def _collected(
    ask: Ask,
    asked: Sequence[Asked],
    owners: Sequence[int],
    noise: Sequence[tuple[int, Edit]],
    outcomes: Sequence[Outcome],
    reader: _Reader,
) -> Measured:
    """Draws averaged, prompts that a cell isn't about left out, noise in its own place."""
    count, about = len(owners), _about(asked, len(ask.prompts))
    draws: list[list[int]] = [[] for _ in asked]
    for draw, i in enumerate(owners):
        draws[i].append(draw)
    made = Measured(asked, {}, {}, reader.of_source)
    for metric in ask.metrics:
        values, base = reader.values[metric.name], reader.of_base[metric.name]
        averaged = np.stack([_average(values[rows]) for rows in draws])
        made.values[metric.name] = np.where(about, averaged, np.nan)
        made.base[metric.name] = np.where(
            np.isnan(made.values[metric.name]), np.nan, np.stack([base[r[0]] for r in draws])
        )
        if noise:
            made.noise[metric.name] = _rounding(asked, [block for block, _ in noise], values[count:] - base[count:])
    made.outcomes = [[outcomes[draw] for draw in rows] for rows in draws]
    return made


def _average(values: stats.Numbers) -> stats.Numbers:
    """Over draws, of those that have a value."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, values, 0.0).sum(0) / there.sum(0))


def _about(asked: Sequence[Asked], prompts: int) -> NDArray[np.bool_]:
    """[cells, prompts]: whether a cell is about a prompt."""
    about = np.zeros((len(asked), prompts), dtype=bool)
    for row, one in zip(about, asked, strict=True):
        row[slice(None) if one.prompts is None else list(one.prompts)] = True
    return about


def _rounding(asked: Sequence[Asked], blocks: Sequence[int], effects: stats.Numbers) -> stats.Numbers:
    """[cells, seeds, prompts]: what rounding alone does in each cell's block, out of that of each block and seed."""
    by = {block: effects[np.array(blocks) == block] for block in blocks}
    none = np.full((NOISE_SEEDS, effects.shape[-1]), np.nan)
    return np.stack([none if one.block is None else by[one.block] for one in asked])


# ---- the frame's rows ------------------------------------------------------------------------------------------------


def table(
    ask: Ask,
    found: Measured,
    *,
    per_prompt: bool = False,
    seed: int = 0,
    wrong: NDArray[np.bool_] | None = None,
) -> pd.DataFrame:
    """A row for each cell and metric, with what `experiments.stats.summary` says; or for each prompt too.

    Args:
        wrong: [prompts], those that the model gets wrong, to be counted in ``mistaken``; None: nobody knows.
    """
    parts = []
    what = pd.DataFrame(
        [{**one.columns, **_of_outcomes(draws)} for one, draws in zip(found.asked, found.outcomes, strict=True)]
    )
    for metric in ask.metrics:
        said = what.assign(metric=metric.name, unit=metric.unit)
        rows = (_by_prompt if per_prompt else _averaged)(ask, found, metric, said, seed)
        if wrong is not None:
            here = wrong & ~np.isnan(found.values[metric.name])
            rows["mistaken"] = here[_about(found.asked, len(wrong))] if per_prompt else here.sum(-1)
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def _averaged(ask: Ask, found: Measured, metric: Metric, what: pd.DataFrame, seed: int) -> pd.DataFrame:
    groups = [prompt.group for prompt in ask.prompts.rows]
    source = found.source.get(metric.name)
    base = found.base[metric.name]
    values = stats.known(found.values[metric.name], base, source)
    columns = stats.summary(values, base, groups, source, distance=_one_way(metric, values, base), seed=seed)
    if metric.name in found.noise:
        there = ~np.isnan(values)[:, None]
        noise = stats.units(np.where(there, found.noise[metric.name], np.nan), groups)
        columns["noise_floor"] = _floor(stats.recovered(noise, np.ones_like(noise)))
    if metric.name in found.gap:
        gap = stats.units(np.where(np.isnan(found.values[metric.name]), np.nan, found.gap[metric.name]), groups)
        columns["completeness_gap"] = stats.recovered(gap, np.ones_like(gap))
    return what.assign(**columns)


def _one_way(metric: Metric, values: stats.Numbers, base: stats.Numbers) -> bool:
    """Whether effects of both signs can't be: all are distances from the base itself. Of a metric that doesn't say that
    it is one, the numbers do: all bases are equal, and no value is on the one side of them, as where all continuations
    are right before the edit."""
    known = base[~np.isnan(base)]
    if not len(known) or (known != known[0]).any():
        return False
    return metric.distance or not (values > known[0]).any() or not (values < known[0]).any()


def _floor(effects: stats.Numbers) -> stats.Numbers:
    """[cells, seeds, ...] → [cells, ...]; NaN where there is no noise to tell from."""
    seeds_last = np.moveaxis(effects, 1, -1)
    floor = np.full(seeds_last.shape[:-1], np.nan)
    known = np.isfinite(seeds_last).all(-1)
    floor[known] = stats.noise_floor(seeds_last[known])
    return floor


def _by_prompt(ask: Ask, found: Measured, metric: Metric, what: pd.DataFrame, seed: int) -> pd.DataFrame:
    """A row for each prompt; ``recovered`` only where the prompt's own gap says something."""
    values, base = found.values[metric.name], found.base[metric.name]
    cells, prompts = values.shape
    rows = what.loc[what.index.repeat(prompts)].reset_index(drop=True)
    rows["example"] = np.tile(np.arange(prompts), cells)
    if "group" not in rows:
        rows["group"] = np.tile(np.array([prompt.group for prompt in ask.prompts.rows], dtype=object), cells)
    rows = rows.assign(value=values.ravel(), base=base.ravel(), effect=(values - base).ravel(), n=1)
    if metric.name in found.source:
        source = np.broadcast_to(found.source[metric.name], base.shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = (values - base) / (source - base)
        rows["recovered"] = np.where(stats.small_gaps(base, source), np.nan, ratio).ravel()
    if metric.name in found.noise:
        rows["noise_floor"] = _floor(found.noise[metric.name]).ravel()
    if metric.name in found.gap:
        rows["completeness_gap"] = np.broadcast_to(found.gap[metric.name], values.shape).ravel()
    return rows[_about(found.asked, prompts).ravel()]


def _of_outcomes(draws: Sequence[Outcome]) -> dict[str, Any]:
    """What the runs of a cell say of themselves, averaged over draws."""
    ran = [one for one in draws if one.unmatched is None]
    if not ran:
        return {}
    row: dict[str, Any] = {"touched": round(np.mean([one.touched for one in ran]))}
    if agreements := [one.routing_agreement for one in ran if one.routing_agreement is not None]:
        row["routing_agreement"] = float(np.mean(agreements))
        row["flips"] = round(np.mean([one.flips for one in ran]))
    return row


# ---- what it would cost ----------------------------------------------------------------------------------------------


def cost(
    model: HookedModel,
    ask: Ask,
    asked: Sequence[Asked],
    source: Live | Run | None = None,
    *,
    source_ask: Ask | None = None,
    timed: bool = True,
) -> dict[str, float]:
    """What `measure` would take: ``cells``, ``worlds`` (cells × prompts, draws apart), ``forwards`` (in plain forward
    passes over the prompts, from the rows that cells may come to hold), ``bytes`` in flight, ``seconds``.

    Args:
        source_ask: as in `measure`.
        timed: whether to make one forward pass, for ``seconds``; else they are NaN, and nothing is run.

    Raises:
        ProbeError: as `measure`, but for what only values tell.
    """
    check_source(ask, source_ask)
    base = ask.live()
    cells = [*_cells(ask, asked, source), *(Cell((edit,)) for _, edit in _noise(model, asked))]
    lives = [source] if isinstance(source, Live) else []
    ahead = outlook(model, base, cells, sources=lives)
    return {
        "cells": float(len(asked)),
        "worlds": float(len(cells) * len(ask.prompts)),
        "forwards": ahead.forwards,
        "bytes": float(ahead.bytes),
        "seconds": ahead.forwards * (seconds(model, ask.tokens, ask.keep) if timed else nan),
    }
