"""Numbers that can be trusted: averages over independent units, intervals, p values, the floor of rounding noise.

What comes in are a metric's values, [cells, prompts], in the edited run, in the base and, where there is one, in the
source; NaN where a cell does not exist for a prompt. The *unit* is the prompt's group: prompts of one group are not
independent, so they are averaged first. All that is drawn is drawn from a seed, and a cell's interval does not depend
on which other cells are asked about; its p does, and says so.
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
"""With fewer units neither an interval nor a p is given: intervals would be too short, and no p could be small (with 7
units 1/64 at best, before it is corrected)."""

SMALL_GAP = 0.05
"""A gap between base and source is small up to this share of the mean gap's size."""

ROUNDING = 1e-6
"""Numbers are one up to this share of their size: fp32 gives two runs of one prompt no more in common."""

LEVEL = 0.95
"""Of confidence."""

DRAWS = 2000
"""Resamples behind an interval."""

FLIPS = 4096
"""Sign flips behind a p; all there are, up to 13 units."""

_AT_ONCE = 512
"""Cells that are resampled together: 8 MB."""

_quiet = np.errstate(invalid="ignore", divide="ignore")
"""What there is nothing of has no average: 0 / 0 is NaN, and stands in the frame as NA."""


class BadSample(ProbeError, ValueError):
    """Numbers that can't be averaged or tested in the way that was asked for."""


@_quiet
def summary(
    edited: ArrayLike, base: ArrayLike, groups: Sequence[Hashable], source: ArrayLike | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """All that a frame says about cells averaged over prompts: column (`experiments.frames.COLUMNS`) → [cells].

    Args:
        edited: [cells, prompts]; NaN: the cell does not exist for the prompt, which then isn't counted for it.
        base, source: [prompts], or [cells, prompts] where they differ by cell.
        groups: the group of each prompt.
        seed: of the resamples and of the flips.

    Returns:
        ``value``, ``base``, ``effect``, ``n``, ``stderr``, ``ci_low``, ``ci_high``, ``p``, ``p_family``; with a source
        also ``recovered``, which the interval is then of, and ``small_gaps``. NaN where there is none.

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
    p = p_values(sound, seed=seed)
    columns = {
        "value": _mean(values),
        "base": _mean(bases),
        "effect": _mean(values) - _mean(bases),
        "n": n,
        "stderr": _stderr(sound),
        "ci_low": low,
        "ci_high": high,
        "p": p,
        "p_family": _families(p, n),
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


def _stderr(values: Numbers) -> Numbers:
    """The standard error of the mean; NaN for a single unit."""
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
    effects (lognormal) remain below, at 85 to 89. Where the draws don't agree on the sign of the mean gap, any ratio is
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
        drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS).T.astype(np.float64)
        for cells in _chunks(np.flatnonzero(which.ravel() == i)):
            sums = [None if x is None else x[np.ix_(cells, mask)] @ drawn for x in (effects, gaps)]
            assert sums[0] is not None
            low[cells], high[cells] = _ends(sums[0], sums[1], n)
    return low, high


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


def p_values(effects: Numbers, *, seed: int = 0) -> Numbers:
    """Two-sided p of each cell, [cells], corrected for all of them: sign flips over units, with the largest statistic.

    Were nothing there, each unit's effects could as well have the other sign, in all cells together. A cell's p is the
    share of such flips in which *some* cell is as extreme as this one was. So the chance of any false finding in the
    family is held, however the cells hang together, and a cell that is there twice costs nothing.

    The statistic is |Σ d| / √(Σ d²), d the effects of the units: over flips its variance is exactly 1 in every cell,
    so that cells of large numbers don't rule the family. (It orders flips as Student's t does.) All flips are taken up
    to 13 units; beyond, 4096, the identity among them, so that no p is 0.

    Args:
        effects: [cells, units], edited − base, NaN where a cell lacks a unit.

    Returns:
        NaN for cells of fewer than 8 units, which are not of the family.
    """
    tested = (~np.isnan(effects)).sum(-1) >= MIN_UNITS
    d = np.nan_to_num(effects[tested])
    d = d[:, d.any(0)]
    size = np.sqrt((d**2).sum(-1, keepdims=True))
    d = np.divide(d, size, out=np.zeros_like(d), where=size > 0)
    flips = _flips(d.shape[1], seed)
    highest = np.zeros(len(flips))
    for cells in _chunks(np.arange(len(d))):
        np.maximum(highest, np.abs(flips @ d[cells].T).max(-1), out=highest)
    highest.sort()
    seen = np.abs(d.sum(-1)) * (1 - ROUNDING)  # equal ones are as extreme, whatever their last bits
    p = np.full(len(effects), np.nan)
    p[tested] = 1 - np.searchsorted(highest, seen) / len(highest)
    return p


def _flips(n: int, seed: int) -> Numbers:
    """Signs, [flips, n], all + first. The first unit keeps its own: the statistic is the same with all signs turned."""
    if n < 2:
        return np.ones((1, n))
    if 2 ** (n - 1) <= FLIPS:
        bits = np.arange(2 ** (n - 1))[:, None] >> np.arange(n - 1) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, (FLIPS, n - 1))
        bits[0] = 0
    return np.concatenate([np.ones((len(bits), 1)), 1.0 - 2.0 * bits], axis=1)


def _families(p: Numbers, n: NDArray[np.intp]) -> NDArray[np.object_]:
    """What each p was corrected for, or why there is none."""
    family = f"sign flips, largest of {int((~np.isnan(p)).sum())} cells"
    why = [f"too few units ({i} of {MIN_UNITS})" if i < MIN_UNITS else "a value is infinite" for i in n]
    return np.where(np.isnan(p), np.array(why, dtype=object), family)


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
