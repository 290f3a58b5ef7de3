"""How often p values and intervals keep what they promise, and what they find: the tables of docs/statistics.md.

    python -m benchmarks.calibration [--families 500] [--write]

A family is 20 cells of n units. Effects have mean 0 and are normal, of Student's t with 3 degrees of freedom,
exponential or lognormal; ``apart`` a cell has nothing of another's, ``together`` half of its variance is common to all.
Power is the share of families in which a cell is found that was moved, to a mean of 4.2 standard errors: against the
long tail of its effects (where they have one), or towards it. Beside it stands what sign flips of the same families do,
the test that is exact where effects are symmetric. It takes a few minutes; ``--write`` puts the tables into the page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments import stats

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"

Numbers = NDArray[np.float64]

CELLS, LEVEL = 20, 0.05

MOVED = 4.2
"""Standard errors."""

UNITS = (8, 12, 24, 96)

KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Numbers]] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "t, 3 degrees": lambda rng, size: rng.standard_t(3, size) / 3**0.5,
    "exponential": lambda rng, size: rng.exponential(size=size) - 1,
    "lognormal": lambda rng, size: (rng.lognormal(size=size) - np.exp(0.5)) / (np.exp(2) - np.exp(1)) ** 0.5,
}
"""Effects of mean 0 and variance 1; those that are skewed have their long tail above."""


def family(kind: str, n: int, rng: np.random.Generator, *, cells: int = CELLS, together: bool = False) -> Numbers:
    """Effects of nothing, [cells, n]."""
    own = KINDS[kind](rng, (cells, n))
    return (own + KINDS[kind](rng, (1, n))) / 2**0.5 if together else own


def sign_flips(effects: Numbers, flips: int = 1000) -> Numbers:
    """p of each cell, [cells], by random signs of units, with the largest |t| of all cells."""
    signs = _signs(effects.shape[1], flips)
    size = np.sqrt((effects**2).sum(-1, keepdims=True))  # which flips leave, and which orders them as t does
    highest = np.abs(effects / size @ signs).max(0)
    return (1 + (highest >= np.abs(effects.sum(-1, keepdims=True) / size)).sum(-1)) / (1 + flips)


@cache
def _signs(n: int, flips: int) -> Numbers:
    return np.random.default_rng(0).choice([-1.0, 1.0], (n, flips))


def false_findings(
    p: Callable[[Numbers], Numbers], kind: str, n: int, families: int, *, cells: int = CELLS, together: bool = False
) -> float:
    """The share of families of nothing in which anything is found."""
    rng = np.random.default_rng(n)
    return float(
        np.mean([p(family(kind, n, rng, cells=cells, together=together)).min() <= LEVEL for _ in range(families)])
    )


def power(p: Callable[[Numbers], Numbers], kind: str, n: int, families: int) -> tuple[float, float]:
    """How often a cell is found that was moved against the long tail, and one that was moved towards it."""
    rng, found = np.random.default_rng(n), []
    for _ in range(families):
        effects = family(kind, n, rng)
        effects[:2] += np.array([[-1.0], [1.0]]) * MOVED / n**0.5
        found.append(p(effects)[:2] <= LEVEL)
    against, towards = np.mean(found, axis=0).tolist()
    return against, towards


def coverage(kind: str, n: int, families: int) -> float:
    """How often an interval holds the true mean."""
    low, high = stats.interval(family(kind, n, np.random.default_rng(n), cells=CELLS * families // 5))
    return float(((low <= 0) & (high >= 0)).mean())


# ---- the page --------------------------------------------------------------------------------------------------------


def tables(families: int) -> dict[str, str]:
    """Each table of the page, by its name."""
    studies = stats.T_DRAWS, stats._draws
    stats.T_DRAWS, stats._draws = 1000, cache(stats._draws)  # a fourth of a study's; the same for all families of n
    try:
        return _tables(families)
    finally:
        stats.T_DRAWS, stats._draws = studies


def _tables(families: int) -> dict[str, str]:
    return {
        "error": _table(
            ("effects", "n", "apart", "together", "one cell alone", "sign flips, apart"),
            lambda kind, n: (
                false_findings(stats.p_values, kind, n, families),
                false_findings(stats.p_values, kind, n, families, together=True),
                false_findings(stats.p_values, kind, n, families, cells=1),
                false_findings(sign_flips, kind, n, families),
            ),
        ),
        "power": _table(
            ("effects", "n", "against the tail", "towards it", "sign flips: against", "towards"),
            lambda kind, n: (*power(stats.p_values, kind, n, families), *power(sign_flips, kind, n, families)),
        ),
        "coverage": _table(("effects", "n", "holds the mean"), lambda kind, n: (coverage(kind, n, families),)),
    }


def _table(header: tuple[str, ...], numbers: Callable[[str, int], tuple[float, ...]]) -> str:
    rows = ([kind, str(n), *(f"{x:.2f}" for x in numbers(kind, n))] for kind in KINDS for n in UNITS)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def shown(page: str) -> Iterator[tuple[str, str]]:
    """The tables in a page, with their names."""
    yield from re.findall(r"<!-- (\w+) -->\n((?:\|.*\n)*)", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=int, default=500)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    made, page = tables(asked.families), PAGE.read_text(encoding="utf-8")
    for name, old in shown(page):
        print(f"{name}\n\n{made[name]}\n")
        page = page.replace(f"<!-- {name} -->\n{old}", f"<!-- {name} -->\n{made[name]}\n")
    if asked.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
