"""The slow twin of a sweep: every cell as one whole `HookedModel.run`, and the two held against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import Cell, Edit, HookedModel, Live, Outcome, Run, Site, sweep
from hooks.apply import first_edited
from hooks.cells import BUDGET, Read
from hooks.edits import Freeze, Function, Noise, Patch
from hooks.stream import fitted
from probe.errors import Unmatched

LOGITS = Site(None, "logits")

Key = tuple[str, int, Site]
"""Whose value (``base``, ``source`` or ``cell``, and which of them), of which site."""


@dataclass
class Ask:
    """One sweep, whatever carries it out."""

    base: Live
    cells: Sequence[Cell]
    sources: Sequence[Live] = ()
    want: Sequence[Site | str] = ("logits",)
    whole: Sequence[Site | str] = ()
    read: Read | None = None
    first: int = -1
    budget: int = BUDGET


def swept(model: HookedModel, ask: Ask) -> tuple[dict[Key, Tensor], list[Outcome]]:
    """What `sweep` shows, each value once, and its outcomes."""
    names: dict[int, tuple[str, int]] = {id(ask.base): ("base", 0)}
    names |= {id(source): ("source", i) for i, source in enumerate(ask.sources)}
    names |= {id(cell): ("cell", i) for i, cell in enumerate(ask.cells)}
    shown: dict[Key, Tensor] = {}

    def look(who: Cell | Live, site: Site, value: Tensor) -> None:
        key = (*names[id(who)], site)
        assert key not in shown, f"{key} is shown twice"
        shown[key] = value.clone()

    asked = {name: getattr(ask, name) for name in ("sources", "want", "whole", "read", "first", "budget")}
    return shown, sweep(model, ask.base, ask.cells, look, **asked)


@dataclass
class OneByOne:
    """The same from a run for each of base, sources and cells; an unmatched cell has none."""

    base: Run
    shown: dict[Key, Tensor]
    runs: list[Run | None]


def one_by_one(model: HookedModel, ask: Ask) -> OneByOne:
    """The twin."""
    everything = [site for site in model.sites if ask.first < 0 or site.block == ask.first]
    base = _run(model, ask, ask.base, ask.base.edits, everything)
    sources = {id(source): _run(model, ask, source, source.edits, everything) for source in ask.sources}
    asked = {model.sites.find(site): False for site in ask.want} | {model.sites.find(site): True for site in ask.whole}
    read = [[length - 1] for length in base.rows.lengths] if ask.read is None else ask.read
    twin = OneByOne(base, {}, [])
    _show(twin, ("base", 0), base, asked | {s: True for cell in ask.cells for s in _wholes(model, cell)}, read)
    for i, source in enumerate(ask.sources):
        if source.read is not None:
            _show(twin, ("source", i), sources[id(source)], asked, source.read)
    for i, cell in enumerate(ask.cells):
        mine = asked | dict.fromkeys(_wholes(model, cell), True)
        edits = [*ask.base.edits, *_of_runs(model, ask, cell, base, sources)]
        try:
            run = _run(model, ask, ask.base, edits, list(mine), None if ask.base.edits else base)
        except Unmatched:
            twin.runs.append(None)
            continue
        twin.runs.append(run)
        _show(twin, ("cell", i), run, mine, read if cell.read is None else cell.read)
    return twin


def _wholes(model: HookedModel, cell: Cell) -> list[Site]:
    return [model.sites.find(site) for site in cell.whole]


def _run(
    model: HookedModel, ask: Ask, live: Live, edits: Sequence[Edit], want: Sequence[Site], base: Run | None = None
) -> Run:
    rows = live.rows
    asked: dict[str, Any] = {"want": want, "edits": edits, "base": base, "spans": rows.spans}
    asked |= {"positions": rows.ids, "segments": rows.segments}
    if ask.first >= 0:
        assert live.x_n is not None
        return model.run_block(ask.first, live.x_n, rows.keep, **asked)
    assert live.tokens is not None
    return model.run(live.tokens, rows.keep, spoken=rows.spoken, **asked)


def _of_runs(model: HookedModel, ask: Ask, cell: Cell, base: Run, sources: Mapping[int, Run]) -> list[Edit]:
    """A cell's edits that take from what runs along, as edits that take from a run. A freeze to an edited base, which
    a run has not, is a patch from it."""
    made: list[Edit] = []
    for edit in cell.edits:
        if ask.base.edits and isinstance(edit.how, Freeze):
            sites = edit.sites(model.sites, first_edited(cell.edits, model.sites))
            made += [replace(edit, tensor=str(s), block=None, how=Patch(base, None, (), None)) for s in sites]
        elif (source := sources.get(id(getattr(edit.how, "source", None)))) is not None:
            made.append(replace(edit, how=replace(edit.how, source=source)))  # type: ignore[type-var]
        else:
            made.append(edit)
    return made


def _show(twin: OneByOne, who: tuple[str, int], run: Run, asked: Mapping[Site, bool], read: Read) -> None:
    for site, whole in asked.items():
        twin.shown[*who, site] = run[site] if whole else at(run[site], read)


def at(value: Tensor, read: Read) -> Tensor:
    """[B R ·]: the positions read, shorter rows padded with their last."""
    widest = max(map(len, read))
    return torch.stack([value[b, [*p, *[p[-1]] * (widest - len(p))]] for b, p in enumerate(map(list, read))])


# ---- held against each other -----------------------------------------------------------------------------------------


def agree(model: HookedModel, ask: Ask, tolerance: float = 1e-5) -> tuple[dict[Key, Tensor], list[Outcome]]:
    """A sweep and its twin show the same: every value to the tolerance × max(1, max|value|), what was touched, what had
    no match, which choices flipped."""
    shown, outcomes = swept(model, ask)
    twin = one_by_one(model, ask)
    lost = {("cell", i) for i, outcome in enumerate(outcomes) if outcome.unmatched is not None}
    shown = {key: value for key, value in shown.items() if key[:2] not in lost}  # what came before is shown
    assert set(shown) == set(twin.shown)
    for key, value in shown.items():
        _same(model, ask, key, value, twin.shown[key], tolerance)
    for i, (run, outcome) in enumerate(zip(twin.runs, outcomes, strict=True)):
        assert (outcome.unmatched is None) == (run is not None), ask.cells[i]
        if run is not None:
            _same_facts(model, ask, i, twin.base, run, outcome)
    return shown, outcomes


def _same(model: HookedModel, ask: Ask, key: Key, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    who, i, site = key
    if site.tensor == "delta_experts":  # slots of zeros, where edits have added experts elsewhere
        ours, theirs = fitted(ours, theirs.shape[2:]), fitted(theirs, ours.shape[2:])
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), key
    live = ask.sources[i] if who == "source" else ask.base
    axes = [axis for axis, dim in enumerate(model.sites.node(site).shape) if dim in ("T", "S")]
    whole = site in map(model.sites.find, (*ask.whole, *(s for cell in ask.cells for s in cell.whole)))
    for b, length in enumerate(live.rows.lengths):
        mine, other = ours[b], theirs[b]
        for axis in axes if whole and ours.shape[axes[0]] == live.rows.length else ():
            mine, other = (part.narrow(axis - 1, 0, length) for part in (mine, other))  # pads mean nothing
        size = other.abs()[other.abs() < 1e30]  # what is masked is below all numbers
        limit = tolerance * max(1.0, float(size.max()) if size.numel() else 0.0)
        far = float((mine - other).abs().max())
        assert far <= limit, f"{key}, row {b}: {far:.2g} apart, {limit:.2g} allowed"


def _same_facts(model: HookedModel, ask: Ask, i: int, base: Run, run: Run, outcome: Outcome) -> None:
    """What an outcome counts, as far as the walk goes and rows are computed."""
    cell, sites = ask.cells[i], model.sites
    own = list(zip(run.edits, run.touched, strict=True))[len(ask.base.edits) :]
    walked = max(map(sites.depth, map(sites.find, (*ask.want, *ask.whole, *cell.whole))), default=-1)
    acted = [site for edit, _ in own for site in edit.sites(sites, first_edited(cell.edits, sites))]
    if {site for edit in ask.base.edits for site in edit.sites(sites)} & set(acted):  # a run counts these for the base
        edits = [edit for edit, _ in own]
        own = list(zip(edits, _run(model, ask, ask.base, edits, ["logits"]).touched, strict=True))
    if all(sites.depth(site) <= walked for site in acted):
        assert outcome.touched == sum(n for _, n in own), (outcome, run.touched, cell)
    if LOGITS not in map(sites.find, ask.want):
        return
    last = sites.dims.blocks - 1
    whole = any(
        sites.depth(sites.find(site)) >= last for site in (*ask.whole, *(s for one in ask.cells for s in one.whole))
    )
    plain = not ask.base.edits and all(
        len(one.edits) < 2 and not isinstance(e.how, Function | Noise) for one in ask.cells for e in one.edits
    )
    if not ask.base.edits and whole:
        assert outcome.routing_agreement == pytest.approx(run.routing_agreement), cell
    read = cell.read or ask.read or [[length - 1] for length in base.rows.lengths]
    routers = [block for block in range(last + 1) if Site(block, "experts") in run.cache]
    everywhere, at_reads = (
        sum(_flips(run, base, block, some if block == last else None) for block in routers) for some in (None, read)
    )  # the last block may be computed where it is read alone; some edits must see it all
    assert outcome.flips in ({everywhere} if whole else {at_reads} if plain else {everywhere, at_reads}), cell


def _flips(run: Run, base: Run, block: int, read: Read | None) -> int:
    """Choices of a block that the base did not make, as sets; over real positions, or over those read."""
    changed = 0
    for b, length in enumerate(base.rows.lengths):
        for p in range(length) if read is None else set(read[b]):
            ours, theirs = (set(one["experts", block][b, p].tolist()) for one in (run, base))
            changed += len(ours - theirs)
    return changed
