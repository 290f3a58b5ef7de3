"""Numbers that can be trusted: averages over independent units, intervals, p values, the floor of rounding noise.

What comes in are a metric's values, [cells, prompts], in the edited run, in the base and, where there is one, in the
source; NaN where a cell does not exist for a prompt. The *unit* is the prompt's group: prompts of one group are not
independent, so they are averaged first. All that is drawn is drawn from a seed, and hangs on no order of the prompts;
a cell's interval does not depend on which other cells are asked about; its p does, and says so.

How often intervals and p values keep what they promise, and what they find, is in `docs/statistics.md`, simulated by
`benchmarks.calibration`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from probe.errors import ProbeError

Numbers = NDArray[np.float64]

MIN_UNITS = 8
"""With fewer units neither an interval nor a p is given: intervals would be too short, and no p could be small (7
units don't show how skewed their effects are)."""

SMALL_GAP = 0.05
"""A gap between base and source is small up to this share of the mean gap's size."""

ROUNDING = 1e-6
"""Numbers are one up to this share of their size: fp32 gives two runs of one prompt no more in common."""

LEVEL = 0.95
"""Of confidence."""

DRAWS = 2000
"""Resamples behind an interval."""

T_DRAWS = 4000
"""Resamples behind a p: a hundred of them beyond 0.05, on either side."""

LEAST_SPREAD = 30
"""In a resample n units spread √n/30 of what they do in the sample, at least: see `p_values`."""

_AT_ONCE = 512
"""Cells that are resampled together: 16 MB."""

_quiet = np.errstate(invalid="ignore", divide="ignore")
"""What there is nothing of has no average: 0 / 0 is NaN, and stands in the frame as NA."""


class BadSample(ProbeError, ValueError):
    """Numbers that can't be averaged or tested in the way that was asked for."""


@_quiet
def summary(
    edited: ArrayLike,
    base: ArrayLike,
    groups: Sequence[Hashable],
    source: ArrayLike | None = None,
    *,
    distance: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """All that a frame says about cells averaged over prompts: column (`experiments.frames.COLUMNS`) → [cells].

    Args:
        edited: [cells, prompts]; NaN: the cell does not exist for the prompt, which then isn't counted for it.
        base, source: [prompts], or [cells, prompts] where they differ by cell.
        groups: the group of each prompt.
        distance: the numbers are distances from the base, so that effects of both signs can't be.
        seed: of the resamples.

    Returns:
        ``value``, ``base``, ``effect``, ``n``, ``stderr``, ``ci_low``, ``ci_high``, ``p`` (see `p_values`),
        ``p_family``; with a source also ``recovered``, which the interval is then of, and ``small_gaps``. NaN where
        there is none.

    Raises:
        BadSample: shapes that don't go together, or a base or source that is missing where there is an edited value.
    """
    after = np.asarray(edited, dtype=np.float64)
    if after.ndim != 2:
        raise BadSample(f"edited is {list(after.shape)}; it should be [cells, prompts].")
    before = _like("base", base, after)
    goal = None if source is None else _like("source", source, after)
    there = ~np.isnan(after)
    _check(there, before, goal, groups)
    values, bases = (units(x, groups) for x in (after, before))
    effects = values - bases
    gaps = None if goal is None else units(_gaps(before, goal), groups)
    n = (units(there, groups) > 0).sum(-1)
    sound = _sound(effects, n, gaps)
    low, high = interval(sound, gaps, seed=seed)
    why = no_p(sound, n, distance)
    p = p_values(np.where((why == "")[:, None], sound, np.nan), seed=seed)
    why[why == ""] = f"bootstrap-t, largest of {(why == '').sum()} cells"
    columns = {
        "value": _mean(values),
        "base": _mean(bases),
        "effect": _mean(values) - _mean(bases),
        "n": n,
        "stderr": stderr(sound),
        "ci_low": low,
        "ci_high": high,
        "p": p,
        "p_family": why,
    }
    if gaps is not None and goal is not None:
        columns["recovered"] = recovered(sound, gaps)
        columns["small_gaps"] = (small_gaps(before, goal) & there).sum(-1)
    return columns


def known(edited: ArrayLike, *others: Numbers | None) -> Numbers:
    """Edited values [cells, prompts], NaN where another run that they are held against has none: it was not finite."""
    values = np.asarray(edited, dtype=np.float64)
    for other in others:
        values = values if other is None else np.where(np.isnan(other), np.nan, values)
    return values


def _like(name: str, given: ArrayLike, edited: Numbers) -> Numbers:
    """As [cells, prompts], NaN wherever ``edited`` is."""
    numbers = np.asarray(given, dtype=np.float64)
    if numbers.shape not in (edited.shape, edited.shape[1:]):
        raise BadSample(f"{name} is {list(numbers.shape)}, and edited [cells, prompts] = {list(edited.shape)}.")
    return np.where(np.isnan(edited), np.nan, numbers)


def _check(there: NDArray[np.bool_], before: Numbers, goal: Numbers | None, groups: Sequence[Hashable]) -> None:
    if len(groups) != there.shape[1]:
        raise BadSample(f"there are {there.shape[1]} prompts, and groups for {len(groups)}.")
    for name, values in (("base", before), ("source", goal)):
        if values is not None and (missing := there & np.isnan(values)).any():
            cell, prompt = np.argwhere(missing)[0]
            raise BadSample(
                f"{name}: there is no value for cell {cell} at prompt {prompt}, whose edited value is there."
            )


def _sound(effects: Numbers, n: NDArray[np.intp], gaps: Numbers | None) -> Numbers:
    """The effects, NaN throughout a cell that has an infinite one: its average is told, but not tested."""
    sound = np.isfinite(effects) if gaps is None else np.isfinite(effects) & np.isfinite(gaps)
    return np.where((sound.sum(-1) == n)[:, None], effects, np.nan)


# ---- units -----------------------------------------------------------------------------------------------------------


@_quiet
def units(values: ArrayLike, groups: Sequence[Hashable]) -> Numbers:
    """Averages inside groups, [..., prompts] → [..., units], in the order in which groups first come. NaN is left out
    of an average, and stands where a group has nothing else."""
    numbers = np.asarray(values, dtype=np.float64)
    place = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    unit = np.array([place[group] for group in groups], dtype=np.intp)
    order, starts = np.argsort(unit, kind="stable"), np.searchsorted(np.sort(unit), np.arange(len(place)))
    numbers = numbers[..., order]
    there = ~np.isnan(numbers)
    sums, counts = (np.add.reduceat(x, starts, axis=-1) for x in (np.where(there, numbers, 0.0), there.astype(float)))
    return np.asarray(sums / counts)


@_quiet
def _mean(values: Numbers) -> Numbers:
    there = ~np.isnan(values)
    return np.asarray(np.where(there, values, 0.0).sum(-1) / there.sum(-1))


@_quiet
def stderr(values: Numbers) -> Numbers:
    """The standard error of the mean over units, [..., units] → [...]; NaN for a single unit."""
    n = (~np.isnan(values)).sum(-1)
    squares = np.nansum((values - _mean(values)[..., None]) ** 2, axis=-1)
    return np.where(n > 1, np.sqrt(squares / (n - 1) / n), np.nan)


@_quiet
def recovered(effects: Numbers, gaps: Numbers) -> Numbers:
    """mean(edited − base) / mean(source − base) over units, [..., units] → [...].

    The ratio of the means: a mean of ratios is ruled by the units whose gap happens to be near 0. Such units stay in:
    to leave out what is small by chance would bias both means. NaN where the mean gap is exactly 0.
    """
    gaps = np.where(np.isnan(effects), np.nan, gaps)
    ratio = _mean(effects) / _mean(gaps)
    return np.where(np.isfinite(ratio), ratio, np.nan)


def _gaps(base: Numbers, source: Numbers) -> Numbers:
    """source − base; 0 where that is mere rounding, whose ratios would look like findings."""
    gaps, size = source - base, np.maximum(np.abs(base), np.abs(source))
    return np.where(np.abs(gaps) < ROUNDING * size, 0.0, gaps)


def small_gaps(base: ArrayLike, source: ArrayLike) -> NDArray[np.bool_]:
    """Which prompts' own ratio says nothing, [..., prompts]: |source − base| is at most 5 % of its mean over prompts.

    They are counted, and kept out of what is shown prompt by prompt; see `recovered` for the average.
    """
    gaps = np.abs(_gaps(np.asarray(base, dtype=np.float64), np.asarray(source, dtype=np.float64)))
    return np.asarray(gaps <= SMALL_GAP * _mean(gaps)[..., None])


def mistaken(clean: ArrayLike, corrupt: ArrayLike | None = None) -> NDArray[np.bool_]:
    """Which prompts the model gets wrong, [prompts], by a metric that is above 0 where the answer is preferred (a logit
    difference): not so in clean, or so in corrupt as well."""
    wrong = np.asarray(clean, dtype=np.float64) <= 0
    return wrong if corrupt is None else wrong | (np.asarray(corrupt, dtype=np.float64) >= 0)


# ---- intervals -------------------------------------------------------------------------------------------------------


@_quiet
def interval(effects: Numbers, gaps: Numbers | None = None, *, seed: int = 0) -> tuple[Numbers, Numbers]:
    """The ends of the 95 % bootstrap interval of the mean effect, or of `recovered`, over units.

    Units are drawn with replacement, 2000 times, and the ratio is taken anew each time. The percentiles are moved out
    to what a t interval would have (Hesterberg, What Teachers Should Know About the Bootstrap, 2015): simulated ratios
    of 8 to 40 units lie in it 93 to 96 times of 100, in plain or bias-corrected percentiles 85 to 95 times. Very skewed
    effects (lognormal) remain below, at 85 to 91. Where the draws don't agree on the sign of the mean gap, any ratio is
    possible: the interval is (−inf, inf), as Fieller's is.

    Args:
        effects: [cells, units], edited − base, NaN where a cell lacks a unit.
        gaps: the same, source − base; without, the interval is of the mean effect.

    Returns:
        Two of [cells]; NaN for cells of fewer than 8 units, or where all gaps are 0.
    """
    low, high = (np.full(len(effects), np.nan) for _ in range(2))
    masks, which = np.unique(~np.isnan(effects), axis=0, return_inverse=True)
    for i, mask in enumerate(masks):
        n = int(mask.sum())
        if n < MIN_UNITS:
            continue
        drawn = _draws(n, DRAWS, seed)
        for cells in _chunks(np.flatnonzero(which.ravel() == i)):
            there = np.stack([x[np.ix_(cells, mask)] for x in (effects, gaps) if x is not None])
            sums = np.take_along_axis(there, _order(there)[None], -1) @ drawn
            low[cells], high[cells] = _ends(sums[0], None if gaps is None else sums[1], n)
    return low, high


def _draws(n: int, draws: int, seed: int) -> Numbers:
    """How often each of n units is drawn, [units, draws], when n are drawn with replacement."""
    chance = np.full(n, 1 / max(n, 1))
    return np.random.default_rng(seed).multinomial(n, chance, size=draws).T.astype(np.float64)


@_quiet
def _order(keys: Numbers) -> NDArray[np.intp]:
    """An order of units, the last axis, that hangs on their numbers alone: by the size of the first key's, where they
    tie by the next. What differs by rounding ties, and NaN comes last."""
    keys = np.round(keys / np.fmax.reduce(np.abs(keys), axis=-1, keepdims=True) / ROUNDING)
    return np.lexsort(np.concatenate([np.abs(keys), keys])[::-1], axis=-1)


def _ends(effects: Numbers, gaps: Numbers | None, n: int) -> Numbers:
    """The interval's ends, [2, cells], from sums over n drawn units, [cells, draws]."""
    tail = _tail(n)
    ends = np.quantile(effects / (n if gaps is None else gaps), [tail, 1 - tail], axis=-1)
    if gaps is not None:
        undecided = np.minimum((gaps <= 0).mean(-1), (gaps >= 0).mean(-1)) > tail
        ends = np.where(undecided, np.array([[-np.inf], [np.inf]]), ends)
        ends[:, ~gaps.any(-1)] = np.nan
    return np.asarray(ends)


def _tail(n: int) -> float:
    """The share of draws beyond each end: of a normal's tail beyond √(n/(n−1)) t, with t of n − 1 degrees of freedom
    (expanded in 1/(n−1): Abramowitz and Stegun, 26.7.5)."""
    z, f = NormalDist().inv_cdf((1 + LEVEL) / 2), n - 1
    terms = (
        z,
        (z**3 + z) / 4 / f,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / f**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / f**3,
    )
    return NormalDist().cdf(-float(sum(terms)) * (n / f) ** 0.5)


def _chunks(cells: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    for start in range(0, len(cells), _AT_ONCE):
        yield cells[start : start + _AT_ONCE]


# ---- p values --------------------------------------------------------------------------------------------------------


@_quiet
def p_values(effects: Numbers, *, seed: int = 0) -> Numbers:
    """Two-sided p of each cell, [cells], that its mean effect is 0, corrected for all of them: a bootstrap-t over
    units, with the largest and the smallest t of all cells (Westfall and Young, Resampling-Based Multiple Testing,
    1993; Hall, The Bootstrap and Edgeworth Expansion, 1992, on t).

    Units are drawn with replacement, 4000 times, in all cells together. In each draw a cell's t is that of the drawn
    units' mean less the cell's own mean: of what chance alone does. A cell's p is twice the share of draws in which
    *some* cell's t is as far out, on the side of its own. So the chance of any false finding in the family is held
    however the cells hang together, and a cell that is there twice costs nothing. The family is the cells of one call:
    of one metric of one table, whatever other metrics are tested beside it.

    It is assumed that units are independent and drawn from one population, of which they are enough to show how skewed
    its effects are; that these are normal or symmetric is not. Simulated families of 20 cells without an effect
    (normal, t of 3 degrees of freedom, exponential, lognormal; of 8 to 96 units; apart or hanging together) have a p up
    to 0.05 in at most 8 of 100; a lognormal cell alone, of 8 units, in 10 of 100. No procedure holds for every
    distribution. With 8 units only large effects are found: `docs/statistics.md` has the table.

    In a draw a cell's variance counts as √n/30 squared of its own at least, n its units, a quarter at most. Else one
    cell that a single prompt rules would have next to no spread in each third draw, the one without that prompt, and
    with its t hide what is found in all other cells. Where all units of a cell have one effect, none of its draws shows
    what chance does: p is then that of n equal signs, 2^(1 − n), times the cells.

    Args:
        effects: [cells, units], edited − base, NaN where a cell lacks a unit.

    Returns:
        NaN for cells that can't be tested (see `no_p`), which are not of the family. Nothing hangs on the units' order.
    """
    p = np.full(len(effects), np.nan)
    tested = no_p(effects, (~np.isnan(effects)).sum(-1)) == ""
    d = effects[tested]
    if not len(d):
        return p
    d = d[:, _order(d)]
    there = ~np.isnan(d)
    n = there.sum(-1, keepdims=True)
    mean, spread = _mean(d)[:, None], stderr(d)[:, None] * np.sqrt(n - 1)
    spread = np.where(spread > ROUNDING * np.abs(mean), spread, 0.0)
    seen = np.where(mean == 0, 0.0, mean * np.sqrt(n) / spread)[:, 0]
    d = np.where(there & (spread > 0), (d - mean) / spread, 0.0)
    least, drawn = np.minimum(n / LEAST_SPREAD**2, 0.25), _draws(d.shape[1], T_DRAWS, seed)
    lowest, highest = np.zeros((2, T_DRAWS))
    for cells in _chunks(np.arange(len(d))):
        t = _drawn_t(d[cells], there[cells], drawn, least[cells])
        np.minimum(lowest, t.min(0), out=lowest)
        np.maximum(highest, t.max(0), out=highest)
    beyond = np.minimum(_reached(highest, seen), _reached(-lowest, -seen))
    alike = np.where(np.isinf(seen), len(d) * 2.0 ** (1 - n[:, 0]), 0.0)
    p[tested] = np.minimum(1.0, np.maximum(alike, 2 * (1 + beyond) / (1 + T_DRAWS)))
    return p


@_quiet
def _drawn_t(d: Numbers, there: NDArray[np.bool_], drawn: Numbers, least: Numbers) -> Numbers:
    """t in each draw, [cells, draws], of effects less their mean, in units of their spread: 0 where units are missing.

    Args:
        drawn: [units, draws], how often each unit is drawn.
        least: [cells 1], which the variance counts as at least.
    """
    n = there @ drawn
    mean = d @ drawn / n
    variance = np.maximum(d**2 @ drawn / n - mean**2, least)
    return np.where(n > 0, mean * np.sqrt(n / variance), 0.0)


def _reached(extremes: Numbers, seen: Numbers) -> NDArray[np.intp]:
    """How many draws' extremes are as far out as each t: equal ones are, whatever their last bits."""
    return len(extremes) - np.searchsorted(np.sort(extremes), seen * (1 - ROUNDING * np.sign(seen)))


def no_p(effects: Numbers, n: NDArray[np.intp], distance: bool = False) -> NDArray[np.object_]:
    """Why a cell can't be tested, [cells]; empty where it can.

    - It has fewer than 8 units, or moves fewer than 8 of them: more than by rounding. (A cell that moves none has p 1.)
    - The metric is a ``distance`` from the base, and effects of both signs can't be: any effect at all is one. What can
      be said is whether it is more than rounding's, see `noise_floor`, or than a control's.

    Args:
        effects: [cells, units]; NaN throughout a cell in which something is infinite.
        n: [cells], its units.
    """
    size = np.fmax.reduce(np.abs(effects), axis=-1, initial=0.0)
    moved = (np.abs(effects) > ROUNDING * size[:, None]).sum(-1)
    reasons = [
        (n < MIN_UNITS, [f"too few units ({i} of {MIN_UNITS})" for i in n]),
        (np.isnan(effects).all(-1), "a value is infinite"),
        (np.full(len(n), distance), "a distance, on one side of the base: see noise_floor, control"),
        ((moved > 0) & (moved < MIN_UNITS), f"moves fewer than {MIN_UNITS} units"),
    ]
    why = np.full(len(n), "", dtype=object)
    for holds, said in reversed(reasons):
        why = np.where(holds, np.array(said, dtype=object), why)
    return why


# ---- rounding, and what may be averaged ------------------------------------------------------------------------------


def noise_floor(effects: ArrayLike) -> Numbers:
    """Below what size an effect is not told from rounding, [..., seeds] → [...]: twice the root mean square of the
    effects of noise alone, each averaged over the same prompts as the effects that it stands beside.

    Raises:
        BadSample: there is no seed, or an effect that is no number.
    """
    noise = np.asarray(effects, dtype=np.float64)
    if not noise.shape or not noise.shape[-1] or not np.isfinite(noise).all():
        raise BadSample(
            f"noise effects are {list(noise.shape)}; they should be finite numbers, a seed or more of each."
        )
    return np.asarray(2 * np.sqrt((noise**2).mean(-1)))


def below_floor(effect: ArrayLike, floor: ArrayLike) -> NDArray[np.bool_]:
    """Which effects are not told from rounding; none where there is no floor (NaN)."""
    return np.asarray(np.abs(np.asarray(effect, dtype=np.float64)) < np.asarray(floor, dtype=np.float64))


def check_average(shapes: Sequence[Hashable], by: str | None) -> None:
    """Refuse an average over prompts in which one position is another word.

    Args:
        shapes: of each prompt, `experiments.prompts.Prompt.shape`.
        by: what the cells go by.

    Raises:
        BadSample: the cells go by position, and the prompts are of several shapes.
    """
    if by in ("position", "key") and (several := len(set(shapes))) > 1:
        raise BadSample(
            f"the prompts are of {several} shapes, in which one {by} is different words: no average goes by {by} over"
            " them. Go by role, or take prompts of one shape (Prompts.shapes tells which)."
        )
