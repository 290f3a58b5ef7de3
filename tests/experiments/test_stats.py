"""Statistics against scipy, against loops and by hand; and by simulation, where a promise is about chance."""

import random
import re
import statistics
from collections.abc import Iterator
from itertools import islice
from statistics import NormalDist

import numpy as np
import pytest
import scipy.stats

from benchmarks import calibration
from experiments import frames, stats
from experiments.prompts import Prompts
from experiments.stats import (
    BadSample,
    below_floor,
    check_average,
    interval,
    mistaken,
    noise_floor,
    p_values,
    recovered,
    small_gaps,
    summary,
    units,
)
from probe import TINY, Tokenizer
from probe.errors import ProbeError

nan, inf = np.nan, np.inf


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_groups_are_averaged_first_and_counted_once():
    got = units([[1.0, 3.0, 10.0, nan], [nan, nan, 7.0, 9.0]], ["a", "a", "b", "b"])
    np.testing.assert_array_equal(got, [[2.0, 10.0], [nan, 8.0]])
    np.testing.assert_array_equal(units([5.0, 1.0, 3.0], ["b", "a", "b"]), [4.0, 1.0])  # in order of first sight


def test_a_summary_by_hand():
    got = summary([[4.0, 6.0, 9.0], [2.0, nan, nan]], [1.0, 3.0, 2.0], ["a", "a", "b"], [5.0, 7.0, 4.0])
    for name, expected in {
        "value": [(5 + 9) / 2, 2.0],
        "base": [(2 + 2) / 2, 1.0],
        "effect": [(3 + 7) / 2, 1.0],
        "recovered": [(3 + 7) / (4 + 2), 1 / 4],
        "n": [2, 1],
        "stderr": [np.std([3, 7], ddof=1) / 2**0.5, nan],
        "small_gaps": [0, 0],
    }.items():
        np.testing.assert_allclose(got[name], expected, err_msg=name)
    assert list(got["p_family"]) == ["too few units (2 of 8)", "too few units (1 of 8)"]
    assert np.isnan([got["p"], got["ci_low"], got["ci_high"]]).all()


def test_mean_of_ratios_instead_of_ratio_of_means(rng):
    gaps = np.array([[0.01, 4.0, 5.0, 3.0]])
    effects = np.array([[0.05, 2.0, 2.5, 1.5]])  # half of each, but for the pair whose gap is nearly nothing
    assert recovered(effects, gaps) == pytest.approx(6.05 / 12.01)
    assert (effects / gaps).mean() == pytest.approx(1.625)  # what must not come out
    assert small_gaps(np.zeros(4), gaps).tolist() == [[True, False, False, False]]
    effects[0, 1] = nan  # a unit that the cell lacks is in neither mean
    assert recovered(effects, gaps) == pytest.approx(4.05 / 8.01)
    effects[0, 1] = 2.0
    base = rng.normal(size=4)
    got = summary(base + effects, base, range(4), base + gaps)
    assert got["recovered"] == pytest.approx(6.05 / 12.01)
    assert got["small_gaps"] == [1]


def test_averages_over_pos_across_prompts_of_different_shape():
    prompts = Prompts.load("ioi", Tokenizer(TINY))
    shapes = [prompt.shape for prompt in prompts.rows]
    alike = [shapes[i] for i in next(iter(prompts.shapes().values()))]
    assert len(set(shapes)) > 1
    assert len(alike) > 1
    with pytest.raises(BadSample, match=rf"of {len(set(shapes))} shapes, in which one position is different words"):
        check_average(shapes, "position")
    check_average(alike, "position")
    for by in (None, "role", "head", "expert"):
        check_average(shapes, by)


def test_small_gaps_and_mistakes():
    assert small_gaps([0, 0, 0], [10.0, -10.0, 0.3]).tolist() == [False, False, True]  # 0.3 of 6.8 on the mean
    assert small_gaps([1.0, 2.0], [1.0, 2.0]).tolist() == [True, True]
    assert mistaken([1.0, -1.0, 0.0, 2.0]).tolist() == [False, True, True, False]
    assert mistaken([1.0, -1.0, 2.0], [-1.0, -1.0, 0.5]).tolist() == [False, True, True]


def test_a_recovery_of_nothing_is_none():
    got = summary(np.ones((1, 9)), np.zeros(9), range(9), np.zeros(9))
    assert np.isnan([got["recovered"], got["ci_low"], got["ci_high"]]).all()
    assert got["effect"] == [1.0]


def test_a_gap_of_mere_rounding_is_none():
    base = np.full(9, -1.9)
    got = summary((base + 1e-7)[None], base, range(9), base + 3e-7)  # two runs of one prompt
    assert np.isnan([got["recovered"], got["ci_low"], got["ci_high"]]).all()
    assert got["small_gaps"] == [9]
    assert small_gaps(base, base + 3e-7).all()
    real = summary((base + 1e-5)[None], base, range(9), base + 3e-5)
    assert real["recovered"] == pytest.approx(1 / 3)
    lost = summary((base + 1e-5)[None], base, range(9), np.append(base[1:] + 3e-5, np.inf))  # which is no rounding
    assert np.isnan(lost["recovered"]).all()


def test_columns_go_into_a_frame(rng):
    got = summary(rng.normal(size=(3, 10)), np.zeros(10), range(10), np.ones(10))
    assert got.keys() <= frames.COLUMNS.keys()
    rows = [{name: values[i] for name, values in got.items()} | {"head": i, "metric": "m"} for i in range(3)]
    df = frames.frame(rows, study="s")
    np.testing.assert_array_equal(df["ci_low"], got["ci_low"])


def test_an_infinite_value_is_told_and_not_tested(rng):
    edited = rng.normal(size=(3, 10))
    edited[1, 4] = -inf
    got = summary(edited, np.zeros(10), range(10))
    assert got["value"][1] == got["effect"][1] == -inf
    assert list(np.isnan(got["p"])) == list(np.isnan(got["ci_low"])) == [False, True, False]
    family = "bootstrap-t, largest of 2 cells"
    assert list(got["p_family"]) == [family, "a value is infinite", family]
    both = summary(edited, np.where(np.arange(10) == 4, -inf, 0.0), range(10))
    assert np.isnan(both["effect"][1])


@pytest.mark.parametrize(
    ("edited", "base", "source", "groups", "why"),
    [
        (np.zeros(3), np.zeros(3), None, range(3), r"edited is \[3\]; it should be \[cells, prompts\]"),
        (np.zeros((2, 3)), np.zeros(2), None, range(3), r"base is \[2\], and edited \[cells, prompts\] = \[2, 3\]"),
        (np.zeros((2, 3)), np.zeros(3), np.zeros((3, 2)), range(3), r"source is \[3, 2\]"),
        (np.zeros((2, 3)), np.zeros(3), None, range(4), "there are 3 prompts, and groups for 4"),
        (np.zeros((2, 3)), np.array([0, nan, 0]), None, range(3), "base: there is no value for cell 0 at prompt 1"),
        (
            np.zeros((1, 2)),
            np.zeros(2),
            np.array([0, nan]),
            range(2),
            "source: there is no value for cell 0 at prompt 1",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(edited, base, source, groups, why):
    with pytest.raises(BadSample, match=why) as error:
        summary(edited, base, groups, source)
    assert isinstance(error.value, ProbeError)


def test_no_cells_and_nothing_measured():
    assert all(len(values) == 0 for values in summary(np.zeros((0, 4)), np.zeros(4), range(4), np.ones(4)).values())
    got = summary(np.full((1, 4), nan), np.zeros(4), range(4), np.ones(4))
    assert got["n"] == [0]
    assert got["p_family"] == ["too few units (0 of 8)"]


# ---- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 9, 13, 30, 200])
def test_the_tail_is_students(n):
    t = scipy.stats.t.ppf(0.975, n - 1)
    assert stats._tail(n) == pytest.approx(NormalDist().cdf(-t * (n / (n - 1)) ** 0.5), rel=5e-3)


@pytest.mark.parametrize("n", [8, 25])
def test_intervals_are_scipys(rng, n):
    gaps = rng.normal(5, 2, n)
    effects = 0.4 * gaps + rng.normal(size=n)
    level = 1 - 2 * stats._tail(n)
    more = {"confidence_level": level, "n_resamples": 20000, "method": "percentile", "random_state": 1}
    mean = scipy.stats.bootstrap((effects,), np.mean, **more).confidence_interval
    ratio = scipy.stats.bootstrap(
        (effects, gaps), lambda a, b, axis: a.mean(axis) / b.mean(axis), paired=True, vectorized=True, **more
    ).confidence_interval
    for theirs, ours in ((mean, interval(effects[None])), (ratio, interval(effects[None], gaps[None]))):
        np.testing.assert_allclose(np.ravel(ours), theirs, atol=0.06 * (theirs.high - theirs.low))


def samples(kind: str, n: int, cells: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None, float]:
    """Effects, gaps, and what recovered, or the mean effect, truly is."""
    if kind == "effect":
        return rng.normal(1, 1, (cells, n)), None, 1.0
    gaps = rng.normal(5, 2, (cells, n)) if kind == "ratio" else rng.lognormal(1, 0.8, (cells, n))
    share = 0.4 * gaps + rng.normal(0, 1.5, (cells, n)) if kind == "ratio" else gaps * rng.beta(2, 3, (cells, n))
    return share, gaps, 0.4


def coverage(kind: str, n: int, rng: np.random.Generator) -> float:
    effects, gaps, truth = samples(kind, n, 2000, rng)
    low, high = interval(effects, gaps)
    return float(((low <= truth) & (truth <= high)).mean())


@pytest.mark.parametrize("n", [8, 16, 40])
@pytest.mark.parametrize("kind", ["effect", "ratio", "skewed ratio"])
def test_intervals_cover_what_they_say(rng, kind, n):
    assert 0.915 < coverage(kind, n, rng) < 0.97


def test_plain_percentiles_would_be_too_short(rng, monkeypatch):
    monkeypatch.setattr(stats, "_tail", lambda n: 0.025)
    assert coverage("ratio", 8, rng) < 0.905


def test_where_the_gap_may_be_of_either_sign_any_ratio_is_possible(rng):
    gaps = np.stack([rng.normal(0.1, 3, 20), rng.normal(3, 1, 20)])
    low, high = interval(gaps + rng.normal(size=(2, 20)), gaps)
    assert (low[0], high[0]) == (-inf, inf)
    assert 0 < low[1] < high[1] < 2


def test_a_gap_below_zero_recovers_as_one_above(rng):
    gaps = rng.normal(3, 1, (2, 20))
    effects = gaps * rng.uniform(size=(2, 20))
    np.testing.assert_allclose(interval(-effects, -gaps), interval(effects, gaps))


def test_an_interval_is_the_cells_own(rng):
    effects = rng.normal(size=(700, 20))  # more than are resampled together
    low, high = interval(effects)
    effects[3, [2, 5]] = nan
    some = interval(effects[[650, 3, 12]])
    np.testing.assert_allclose(some[0][[0, 2]], low[[650, 12]], rtol=1e-12)
    without = np.delete(effects[3], [2, 5])[None]
    np.testing.assert_allclose([end[1] for end in some], np.ravel(interval(without)), rtol=1e-12)
    assert not np.array_equal(interval(effects, seed=1)[0], interval(effects)[0])
    np.testing.assert_array_equal(interval(effects, seed=1), interval(effects, seed=1))
    assert (low < high).all()


# ---- p values --------------------------------------------------------------------------------------------------------


def by_loops(effects: np.ndarray, draws: int = 2000) -> list[float]:
    """Every draw of units, every cell, one after the other; with other draws than `p_values` takes."""
    rng, n = random.Random(1), effects.shape[1]

    def statistic(units: list[float], own: list[float], null: float) -> float:
        mean, variance = statistics.fmean(units), statistics.pvariance(own)
        least = min(n / 900, 0.25) * variance
        return (mean - null) * (n / max(statistics.pvariance(units), least)) ** 0.5

    rows = effects.tolist()
    lowest, highest = [], []
    for _ in range(draws):
        picks = [rng.randrange(n) for _ in range(n)]
        drawn = [statistic([d[i] for i in picks], d, statistics.fmean(d)) for d in rows]
        lowest.append(min(drawn))
        highest.append(max(drawn))
    seen = [statistic(d, d, 0.0) for d in rows]
    beyond = [sum(x >= t for x in highest) if t > 0 else sum(x <= t for x in lowest) for t in seen]
    return [min(1.0, 2 * (1 + count) / (1 + draws)) for count in beyond]


def test_the_largest_of_a_family_by_loops(rng):
    effects = rng.exponential(size=(5, 12)) * np.array([1e-3, 1, -10, 1, 1])[:, None]
    effects += np.array([-0.0004, -1, 10, 0, -2])[:, None]
    found = p_values(effects)
    np.testing.assert_allclose(found, by_loops(effects), atol=0.025)
    assert 0.01 < np.sort(found)[1] < 0.3  # not all are none, or sure


@pytest.mark.parametrize("n", [24, 96])
def test_one_cell_of_normal_effects_is_near_students(rng, n):
    for shift in (0.1, 0.3, 0.5):
        effects = rng.normal(shift * (24 / n) ** 0.5, 1, n)
        assert p_values(effects[None])[0] == pytest.approx(scipy.stats.ttest_1samp(effects, 0).pvalue, abs=0.03)


def test_a_p_is_never_0_and_drawn_from_a_seed(rng):
    assert p_values(rng.normal(9, 1, (1, 24)))[0] == 2 / (1 + stats.T_DRAWS)
    effects = rng.normal(0.4, 1, (1, 24))
    assert p_values(effects, seed=1) != p_values(effects)
    assert p_values(effects, seed=1) == p_values(effects, seed=1)
    np.testing.assert_array_equal(p_values(-effects), p_values(effects))


def test_nothing_hangs_on_the_order_of_prompts(rng):
    """Groups of one prompt and of several; with a cell that lacks some, and with ties."""
    base, source = rng.normal(size=40), rng.normal(5, 1, 40)
    edited = base + rng.normal(0.3, 1, (6, 40))
    edited[1, :5] = nan
    edited[2] = np.where(rng.random(40) < 0.5, base, base + 1)
    groups = [str(i // 2) if i < 20 else str(i) for i in range(40)]
    order = rng.permutation(40)
    one = summary(edited, base, groups, source)
    other = summary(edited[:, order], base[order], [groups[i] for i in order], source[order])
    for name in ("p", "ci_low", "ci_high", "effect", "recovered"):
        np.testing.assert_allclose(other[name], one[name], rtol=1e-9, err_msg=name)


@pytest.fixture
def quick(monkeypatch):
    """A fourth of the draws, for hundreds of families."""
    monkeypatch.setattr(stats, "T_DRAWS", 1000, raising=False)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("n", calibration.UNITS)
@pytest.mark.parametrize("kind", calibration.KINDS)
def test_law_15_false_findings_are_as_rare_as_said(quick, long, kind, n, together):
    families, error = (1000, 0.0) if long else (60, 0.07)  # two standard errors of so few
    assert calibration.false_findings(p_values, kind, n, families, together=together) <= 0.08 + error


def test_the_page_keeps_the_promise_and_sign_flips_would_not():
    """The page's own numbers, which `test_the_page_is_what_is_simulated` makes anew."""
    tables = dict(calibration.shown(calibration.PAGE.read_text(encoding="utf-8")))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables["error"].splitlines()[2:]]
    assert [tuple(row[:2]) for row in rows] == [(k, str(n)) for k in calibration.KINDS for n in calibration.UNITS]
    assert max(float(x) for row in rows for x in row[2:4]) <= 0.08
    assert max(float(row[4]) for row in rows) <= 0.12
    assert max(float(row[5]) for row in rows if row[0] == "lognormal") > 0.3


@pytest.mark.long
def test_the_page_is_what_is_simulated():
    made = calibration.tables(500)
    for name, old in calibration.shown(calibration.PAGE.read_text(encoding="utf-8")):
        numbers = [[float(x) for x in re.findall(r"\d\.\d\d", text)] for text in (made[name], old)]
        np.testing.assert_allclose(*numbers, atol=0.011, err_msg=name)


def correlated(cells: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Effects of nothing, in cells that hang together and are of very different size."""
    common = rng.normal(size=(3, n))
    return (rng.normal(size=(cells, 3)) @ common + rng.normal(size=(cells, n))) * 10 ** rng.uniform(-3, 3, (cells, 1))


def families(rng: np.random.Generator) -> Iterator[np.ndarray]:
    for _ in range(150):
        yield correlated(100, 24, rng)


def test_false_findings_of_a_family_are_as_rare_as_said(quick, rng):
    found = [p_values(effects).min() <= 0.05 for effects in families(rng)]
    assert 0.02 < np.mean(found) < 0.08


def test_cell_by_cell_they_would_not_be(quick, rng):
    found = [min(p_values(cell[None])[0] for cell in effects[::10]) <= 0.05 for effects in islice(families(rng), 40)]
    assert np.mean(found) > 0.2


def test_an_effect_is_found_among_many_cells_without(rng):
    effects = correlated(200, 16, rng)
    effects[17] += 2 * np.abs(effects[17]).mean()
    p = p_values(effects)
    assert p[17] < 0.05
    assert np.delete(p, 17).min() > 0.05


def test_a_cell_that_one_prompt_rules_hides_no_other(rng):
    effects = np.concatenate([rng.normal(2, 1, (1, 24)), rng.normal(0, 1e-4, (3, 24))])
    effects[1, 0], effects[2, 1], effects[3, 2] = 1, -1, 5
    p = p_values(effects)
    assert p[0] < 0.01
    assert p[1:].min() > 0.2


def test_a_cell_that_is_there_twice_costs_nothing(rng):
    effects = correlated(20, 10, rng)
    np.testing.assert_array_equal(p_values(np.concatenate([effects, effects]))[:20], p_values(effects))


def test_no_effect_is_no_finding(rng):
    p = p_values(np.concatenate([np.zeros((1, 12)), rng.normal(3, 1, (1, 12))]))
    assert p[0] == 1.0
    assert p[1] < 0.01


def test_what_cannot_be_tested_says_why_and_is_not_of_the_family(rng):
    """Few that are moved; few, and others by rounding; a cell that moves none; one that is tested."""
    effects = np.zeros((4, 24))
    effects[0, :7] = rng.normal(3, 1, 7)
    effects[1] = np.where(np.arange(24) < 7, 3.0, 1e-9 * rng.normal(size=24))
    effects[3] = rng.normal(2, 1, 24)
    got = summary(effects, np.zeros(24), range(24))
    family, few = "bootstrap-t, largest of 2 cells", "moves fewer than 8 units"
    assert list(got["p_family"]) == [few, few, family, family]
    np.testing.assert_array_equal(got["p"][:3], [nan, nan, 1.0])
    np.testing.assert_array_equal(got["p"], p_values(effects))
    assert got["p"][3] == p_values(effects[3:])[0] < 0.01
    assert np.isfinite([got["ci_low"], got["ci_high"]]).all()


@pytest.mark.parametrize("rounding", [0.0, 1e-9])
def test_where_all_units_have_one_effect_their_number_counts(rng, rounding):
    alike = -2.0 + rounding * rng.normal(size=(1, 24))
    assert p_values(alike)[0] == 2 / (1 + stats.T_DRAWS), "never 0"
    family = np.concatenate([alike, rng.normal(size=(9, 24))])
    family[:, 8:] = nan
    p = p_values(family)
    assert p[0] == 10 / 2**7
    np.testing.assert_array_equal(p[1:], p_values(family[1:]))


def test_a_distance_from_the_base_gets_no_p(rng):
    values = np.abs(rng.normal(size=(2, 24)))
    assert p_values(values).max() < 0.05  # what must not be told
    got = summary(values, np.zeros(24), range(24), distance=True)
    assert np.isnan(got["p"]).all()
    assert set(got["p_family"]) == {"a distance, on one side of the base: see noise_floor, control"}
    assert np.isfinite([got["ci_low"], got["ci_high"], got["stderr"]]).all()


def test_fewer_than_8_units_give_none_and_say_why(rng):
    edited = rng.normal(5, 1, (3, 9))
    edited[0, :2] = nan
    edited[1, :1] = nan
    got = summary(edited, np.zeros(9), range(9))
    assert list(np.isnan(got["p"])) == list(np.isnan(got["ci_high"])) == [True, False, False]
    family = "bootstrap-t, largest of 2 cells"
    assert list(got["p_family"]) == ["too few units (7 of 8)", family, family]


def test_the_unit_is_the_group(rng):
    """The same prompt five times over says nothing more; taken for five prompts it would."""
    once = rng.normal(0.5, 1, (4, 9))
    often, groups = np.repeat(once, 5, axis=1), np.repeat(np.arange(9), 5)
    alone, grouped = (summary(x, np.zeros(x.shape[1]), list(g)) for x, g in ((once, range(9)), (often, groups)))
    for name in ("value", "n", "stderr", "ci_low", "ci_high", "p"):
        np.testing.assert_allclose(grouped[name], alone[name], rtol=1e-9, err_msg=name)
    wrong = summary(often, np.zeros(45), range(45))
    assert (wrong["p"] < alone["p"]).all()
    assert (wrong["ci_high"] - wrong["ci_low"] < 0.6 * (alone["ci_high"] - alone["ci_low"])).all()


# ---- rounding --------------------------------------------------------------------------------------------------------


def test_the_noise_floor(rng):
    np.testing.assert_allclose(noise_floor([[3.0, -4.0], [0.0, 0.0]]), [2 * 12.5**0.5, 0.0])
    noise = rng.normal(0, 0.1, (1, 400))
    assert below_floor(noise, noise_floor(noise)[:, None]).mean() == pytest.approx(0.95, abs=0.02)
    assert below_floor([0.1, -0.3, 0.0, 5.0], [0.2, 0.2, 0.0, nan]).tolist() == [True, False, False, False]
    for bad in ([], [[]], [nan], 1.0):
        with pytest.raises(BadSample, match="noise effects"):
            noise_floor(bad)
