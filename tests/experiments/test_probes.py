"""Probes against scikit-learn by hand, against the tiny model's known facts, and against controls that must fail."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

from experiments import cli, frames, probe_plots
from experiments.frames import BadFrame
from experiments.labels import BadProbe, Lesson, lesson, shuffled, truth
from experiments.probes import direction, probes
from experiments.prompts import Prompts
from experiments.readout import STRENGTHS, Fits, How
from experiments.stats import BadSample
from experiments.tables import probe_tables
from experiments.vectors import count_tokens, find_places, read, readable
from hooks import HookedModel, add
from probe.errors import BadEdit, OutOfRange, ProbeError, ShapeMismatch, UnknownDim, UnknownTensor
from probe.sites import Site

CONTINENTS = ("Africa", "America", "Asia", "Europe")


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


def load(model: HookedModel, task: str) -> Prompts:
    assert model.tokenizer is not None
    return Prompts.load(task, model.tokenizer)


@pytest.fixture(scope="module")
def capital(model: HookedModel) -> Prompts:
    return load(model, "capital")


@pytest.fixture(scope="module")
def continent(model: HookedModel) -> Prompts:
    return load(model, "continent")


@pytest.fixture(scope="module")
def sweep(model: HookedModel, capital: Prompts, continent: Prompts) -> pd.DataFrame:
    """Continents, read out of prompts that ask for capitals."""
    tensors = ["blocks.0.x_n", "x_mid", "x_next", "q_C", "Q_C"]
    return probes(model, capital, "answer", of=continent, tensors=tensors, test=load(model, "language"))


def at(df: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows where columns are so; of ``against``, ``group`` and ``source``, NA where they are not named."""
    for name in ("against", "group", "source"):
        df = df[df[name].isna()] if name in df and name not in where else df
    for name, value in where.items():
        df = df[df[name] == value]
    return df


# ---- what must be seen -----------------------------------------------------------------------------------------------


def test_continents_are_read_at_countries_that_the_probe_has_not_seen(sweep: pd.DataFrame) -> None:
    for tensor in ("x_mid", "x_next"):
        read_out = at(sweep, role="subject", tensor=tensor)
        assert list(read_out["block"]) == [0, 1, 2, 3]
        assert read_out["value"].min() >= 0.9
        assert (read_out["p"] < 0.01).all()
    assert set(sweep["n"]) == {64, 12, 76}


def test_not_at_the_end_before_it_is_moved_there(sweep: pd.DataFrame) -> None:
    end = at(sweep, role="END", tensor="x_mid").set_index("block")["value"]
    assert end[3] >= 0.9
    (before,) = at(sweep, role="END", tensor="x_n")["value"]
    assert before <= 0.45


@pytest.mark.parametrize("against", ["random", "shuffled", "tokens"])
def test_no_control_reads_them(against: str, sweep: pd.DataFrame) -> None:
    held = at(sweep, against=against)
    assert len(held) == (2 if against == "tokens" else 34)
    assert held["value"].max() <= 0.45
    assert (held["value"] - held["base"]).max() <= 0.15
    assert held["p"].min() > 0.05


def test_nor_do_other_random_weights(model: HookedModel, continent: Prompts) -> None:
    for seed in (1, 2, 3):
        df = probes(model, continent, "answer", tensors=["x_mid"], at=["subject"], controls=["random"], seed=seed)
        assert at(df, against="random")["value"].max() <= 0.45
        assert at(df)["value"].min() >= 0.9


def test_the_best_cell_is_scored_on_groups_set_aside(sweep: pd.DataFrame) -> None:
    (row,) = at(sweep, group="held out").to_dict("records")
    main = at(sweep)
    assert row["value"] >= 0.9
    assert row["n"] == 12
    best = main.loc[main["value"].astype(float).idxmax()]
    assert (row["block"], row["tensor"], row["role"]) == (best["block"], best["tensor"], best["role"])


@pytest.mark.parametrize("chooses", [False, True])
def test_groups_set_aside_have_no_part_in_choosing(
    chooses: bool, model: HookedModel, continent: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their labels turned to wrong ones, all cells have the same value and the same one is the best; it alone is
    then read wrong. The control: with those of a fold that chooses turned, all is otherwise."""

    def turned(*args: Any, **kwargs: Any) -> Lesson:
        made = lesson(*args, **kwargs)
        rows = made.fold == (0 if chooses else -1)
        targets = np.where(rows[:, None, None], np.roll(made.targets, 1, axis=-1), made.targets)
        return Lesson(targets, made.fold, made.teaches)

    options: dict[str, Any] = {"tensors": ["x_mid", "O"], "at": ["subject"], "probe": "means", "controls": []}
    honest = probes(model, continent, "answer", **options)
    monkeypatch.setattr("experiments.probes.lesson", turned)
    df = probes(model, continent, "answer", **options)
    if chooses:
        assert (at(df, tensor="x_mid")["value"] < at(honest, tensor="x_mid")["value"] - 0.2).all()
        return
    pd.testing.assert_frame_equal(at(df), at(honest))
    ((before,), (after,)) = (at(one, group="held out").to_dict("records") for one in (honest, df))
    assert [before[name] == after[name] for name in ("block", "tensor")] == [True, True]
    assert (before["value"], after["value"]) == (pytest.approx(1, abs=0.1), pytest.approx(0, abs=0.1))


def test_the_time_of_a_sweep_is_its_probes(
    model: HookedModel, continent: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors are read in one pass, which is hardly anything beside fitting even the quickest probe to each."""
    spent = []

    def timed(*args: Any) -> Any:
        start = time.process_time()
        made = read(*args)
        spent.append(time.process_time() - start)
        return made

    monkeypatch.setattr("experiments.probes.read", timed)
    start = time.process_time()
    df = probes(model, continent, "answer", blocks=[0, 3], at=["subject"], probe="means", controls=[])
    assert len(at(df)) > 70
    assert len(spent) == 1
    assert spent[0] < 0.2 * (time.process_time() - start)


def test_a_wide_tensor_fits_noise_no_better_than_a_narrow_one(model: HookedModel) -> None:
    """Of both a probe sees as many components. Without, it would have room for any labels in the wide one."""
    labels = ["a", "b"] * 60
    taught = a_lesson(labels, [str(i) for i in range(120)], model)
    rows = taught.teaches

    def learnt(width: int, of: int) -> float:
        """How often its own training rows are read right, by the weakest regularisation."""
        scores = Fits(noise(120, of), taught, How("ridge", width, 0)).fit().scores(noise(120, of)[rows])[-1][:, 0]
        return float((scores.argmax(-1) == taught.targets[rows, 0].argmax(-1)).mean())

    narrow, wide, whole = learnt(8, 8), learnt(8, 400), learnt(90, 400)
    assert abs(wide - narrow) < 0.12
    assert whole > 0.95 > wide + 0.15


def test_a_direction_carries_over_to_another_wording_where_the_answer_is_made(sweep: pd.DataFrame) -> None:
    moved = at(sweep, prompts="language", source="capital")
    assert moved[(moved["role"] == "subject") & (moved["tensor"] == "x_mid")]["value"].min() >= 0.9
    end = moved[(moved["role"] == "END") & (moved["tensor"] == "x_mid")].set_index("block")["value"]
    own = at(sweep, role="END", tensor="x_mid").set_index("block")["value"]
    assert own[1] >= 0.7  # read in one wording, by something that is not so in the other
    assert end[1] <= 0.45
    assert end[3] >= 0.9


def test_what_any_network_keeps_is_no_finding(model: HookedModel, capital: Prompts) -> None:
    df = probes(model, capital, lambda row: float(len(row.tokens)), tensors=["x_mid"], blocks=[1], at=["END"])
    (value,), (untrained,), (words,) = (
        at(df)["value"],
        at(df, against="random")["value"],
        at(df, against="tokens")["value"],
    )
    assert value >= 0.8
    assert untrained >= 0.7
    assert words >= 0.7
    assert set(df["metric"]) == {"r2"}
    assert set(df["base"]) == {0.0}


# ---- scikit-learn by hand --------------------------------------------------------------------------------------------

GRID = {
    "ridge": (RidgeClassifier(), {"ridgeclassifier__alpha": STRENGTHS}),
    "logistic": (LogisticRegression(max_iter=1000), {"logisticregression__C": [1 / x for x in STRENGTHS]}),
    "means": (NearestCentroid(), {}),
}


def by_hand(X: Any, y: Any, fold: Any, estimator: Any, grid: dict[str, Any], width: int) -> Any:
    """Predictions of every row of a fold that isn't -1, by scikit-learn alone."""
    said = np.empty_like(y)
    for f in range(fold.max() + 1):
        train = (fold >= 0) & (fold != f)
        pipe = make_pipeline(StandardScaler(), PCA(width, random_state=0), estimator)
        scoring = "neg_mean_squared_error" if isinstance(estimator, Ridge) else "accuracy"
        search = GridSearchCV(pipe, grid, cv=PredefinedSplit(fold[train]), scoring=scoring) if grid else pipe
        said[fold == f] = search.fit(X[train], y[train]).predict(X[fold == f])
    return said


@pytest.mark.parametrize("probe", GRID)
@pytest.mark.parametrize("of_two", [False, True])
def test_accuracy_is_scikit_learns(probe: Any, of_two: bool, model: HookedModel, continent: Prompts) -> None:
    words = [str(answer) for answer in continent.answers("answer")]
    words = ["Europe" if word == "Europe" else "elsewhere" for word in words] if of_two else words
    df = probes(
        model, continent, words, tensors=["delta_ffn"], blocks=[0], at=["subject"], probe=probe, width=16, controls=[]
    )
    true = truth([continent], words)
    fold = lesson([continent], true, 6, 0, 0).fold
    run = model.run(*continent.batch(), want=["blocks.0.delta_ffn"])
    X = np.stack(
        [run["blocks.0.delta_ffn"][b, row.spans["subject"][0]].double().numpy() for b, row in enumerate(continent.rows)]
    )
    y = true.values.astype(int)
    said = by_hand(X, y, fold, *GRID[probe], 16)
    (row,) = at(df).to_dict("records")
    assert 0.3 < row["value"] < 0.98  # neither trivial nor saturated
    assert row["value"] == pytest.approx((said == y)[fold >= 0].mean(), abs=1e-12)
    guess = np.concatenate(
        [
            DummyClassifier().fit(X[(fold >= 0) & (fold != f)], y[(fold >= 0) & (fold != f)]).predict(X[fold == f])
            == y[fold == f]
            for f in range(fold.max() + 1)
        ]
    )
    assert row["base"] == pytest.approx(guess.mean(), abs=1e-12)
    assert row["ci_low"] <= row["value"] <= row["ci_high"]


def test_r2_is_scikit_learns(model: HookedModel, continent: Prompts) -> None:
    def size(row: Any) -> float:
        return float(len(row.clean))

    df = probes(model, continent, size, tensors=["x_mid"], blocks=[0], at=["subject"], width=16, controls=[])
    true = truth([continent], size)
    fold = lesson([continent], true, 6, 0, 0).fold
    run = model.run(*continent.batch(), want=["blocks.0.x_mid"])
    X = np.stack(
        [run["blocks.0.x_mid"][b, row.spans["subject"][0]].double().numpy() for b, row in enumerate(continent.rows)]
    )
    grid = {"ridge__alpha": STRENGTHS}
    said, good = by_hand(X, true.values, fold, Ridge(), grid, 16), fold >= 0
    (row,) = at(df).to_dict("records")
    means = np.array([true.values[good & (fold != f)].mean() for f in fold[good]])
    r2 = 1 - ((said - true.values)[good] ** 2).sum() / ((means - true.values[good]) ** 2).sum()
    assert 0.1 < row["value"] < 0.99
    assert row["value"] == pytest.approx(r2, abs=1e-9)
    assert row["value"] == pytest.approx(r2_score(true.values[good], said[good]), abs=0.02)
    assert row["label"] == "size"


# ---- who teaches whom ------------------------------------------------------------------------------------------------


def noise(rows: int, width: int) -> Any:
    return np.random.default_rng(0).normal(size=(rows, width))


def a_lesson(labels: Any, groups: list[str], model: HookedModel, folds: int = 6) -> Lesson:
    assert model.tokenizer is not None
    rows = [{"clean": "France", "group": group} for group in groups]
    some = Prompts.of(rows, model.tokenizer)
    return lesson([some], truth([some], labels), folds, 0, 0)


def right(X: Any, taught: Lesson) -> float:
    scores = Fits(X, taught, How("ridge", X.shape[1], 0)).scores()[:, 0].argmax(-1)
    return float((scores == taught.targets[:, 0].argmax(-1))[taught.teaches].mean())


def test_a_group_is_never_in_both(model: HookedModel) -> None:
    groups = [f"g{i // 8}" for i in range(240)]
    labels = np.random.default_rng(1).permutation(["a", "b"] * 15)[np.arange(240) // 8]
    X = noise(30, 25)[np.arange(240) // 8] + 0.01 * noise(240, 25)  # rows tell their group, and nothing else
    assert right(X, a_lesson(labels, groups, model)) <= 0.65
    assert right(X, a_lesson(labels, [str(i) for i in range(240)], model)) >= 0.9


def test_rows_that_do_not_teach_change_nothing(model: HookedModel) -> None:
    taught = a_lesson(["a", "b"] * 30, [str(i) for i in range(60)], model)
    aside, X = ~taught.teaches, noise(60, 12)
    assert aside.sum() == 10
    before = Fits(X, taught, How("ridge", 8, 0)).scores()
    targets, other = taught.targets.copy(), X.copy()
    targets[aside], other[aside] = targets[aside][:, :, ::-1], 100.0
    after = Fits(other, Lesson(targets, taught.fold, taught.teaches), How("ridge", 8, 0)).scores()
    assert np.array_equal(before[~aside], after[~aside])
    assert not np.array_equal(before[aside], after[aside])


def test_folds_have_as_many_groups_and_of_each_class(model: HookedModel) -> None:
    labels = ["a"] * 12 + ["b"] * 36
    taught = a_lesson(labels, [str(i) for i in range(48)], model)
    for fold in (-1, *taught.folds):
        assert sorted(np.array(labels)[taught.fold == fold]) == ["a"] * 2 + ["b"] * 6


def test_a_test_row_is_read_by_a_probe_that_has_not_seen_its_group(model: HookedModel, continent: Prompts) -> None:
    df = probes(
        model, continent, "answer", tensors=["delta_ffn"], blocks=[0], at=["subject"], controls=[], test=continent
    )
    (own,), (aside,), (moved,) = at(df)["value"], at(df, group="held out")["value"], at(df, source="continent")["value"]
    assert moved == pytest.approx((64 * own + 12 * aside) / 76)
    assert own < 0.95  # else a probe that has seen it couldn't be told


def test_shuffled_labels_keep_what_hangs_together() -> None:
    rng = np.random.default_rng(0)
    groups = [f"g{i // 3}" for i in range(90)]
    one_each = np.repeat(np.arange(30.0), 3)
    fold = np.zeros(90, dtype=int)
    made = shuffled(one_each, groups, fold, rng)
    assert all(len(set(made[i : i + 3])) == 1 for i in range(0, 90, 3))  # a group still has one label
    assert sorted(made) == sorted(one_each)
    assert (made == one_each).mean() < 0.2
    mixed = np.tile([0.0, 1.0, 1.0], 30)
    made = shuffled(mixed, groups, fold, rng)
    assert all(sorted(made[i : i + 3]) == [0, 1, 1] for i in range(0, 90, 3))
    assert 0.2 < (made == mixed).mean() < 0.8
    uneven = shuffled(np.array([0.0, 0.0, 0.0, 1.0]), ["a", "a", "a", "b"], fold[:4], np.random.default_rng(1))
    assert uneven.tolist() in ([1, 1, 1, 0], [0, 0, 0, 1])


def test_shuffled_labels_stay_as_evenly_dealt() -> None:
    """Each fold has some fold's labels of before, the one that teaches nobody its own; and over draws a group has any
    label as often as the others have."""
    fold, groups = np.arange(26) % 6 - 1, [str(i) for i in range(26)]
    values = (np.arange(26) // 6 % 4).astype(float)

    def by_fold(labels: Any) -> list[list[float]]:
        return [sorted(labels[fold == one]) for one in range(-1, 5)]

    same, rng = [], np.random.default_rng(0)
    for _ in range(200):
        made = shuffled(values, groups, fold, rng)
        aside, *others = by_fold(made)
        assert aside == by_fold(values)[0]
        assert sorted(others) == sorted(by_fold(values)[1:])
        same.append((made == values)[fold >= 0].mean())
    assert np.mean(same) == pytest.approx(1 / 4, abs=0.03)


@pytest.mark.parametrize(
    ("n", "classes"), [(24, 4), (26, 2), (24, 0)], ids=["four-classes", "two-classes-unevenly-dealt", "numbers"]
)
def test_law_15_a_control_on_random_labels_is_unbiased(
    n: int, classes: int, model: HookedModel, continent: Prompts, long: bool
) -> None:
    """What is read of random labels, less what is read of shuffled ones, is 0 within its error; and that is chance."""
    some, found, control = continent.subset(range(n)), [], []
    options: dict[str, Any] = {"tensors": ["x_mid"], "blocks": [0, 2], "at": ["subject"], "width": 4}
    for seed in range(500 if long else 40):
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(n) % classes).astype(str) if classes else rng.normal(size=n)
        df = probes(model, some, labels, controls=["shuffled"], seed=seed, **options)
        control.append(at(df, against="shuffled")["value"].mean())
        found.append(at(df)["value"].mean() - control[-1])
    assert abs(np.mean(found)) < 3 * np.std(found) / len(found) ** 0.5
    if classes == 4:
        assert np.mean(control) == pytest.approx(1 / 4, abs=0.02)


def test_a_probe_of_nothing_reads_no_more_than_a_guess(model: HookedModel, capital: Prompts) -> None:
    """Its r² lies below 0, in some cells surely; that is not told as a finding."""
    noise = np.random.default_rng(0).normal(size=len(capital))
    df = probes(model, capital, noise, tensors=["x_next", "O"], at=["subject"], controls=["shuffled"])
    assert (df["value"] < 0).sum() > 4
    assert (df["p"] > 0.05).all()
    assert set(df.loc[df["value"] < 0, "p"]) == {1.0}


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_labels_are_said_in_many_ways(model: HookedModel, continent: Prompts, capital: Prompts) -> None:
    assert model.tokenizer is not None
    words = [str(answer) for answer in continent.answers("answer")]
    want = truth([continent], "answer")
    assert want.classes == CONTINENTS
    by_group = {row.group: word for row, word in zip(continent.rows, words, strict=True)}
    rows = [{"clean": row.clean, "label": word} for row, word in zip(continent.rows, words, strict=True)]
    ways: list[Any] = [words, np.array(words), pd.Series(words), by_group, lambda row: by_group[row.group]]
    for way in ways:
        assert truth([continent], way).values.tolist() == want.values.tolist()
    assert truth([Prompts.of(rows, model.tokenizer)], "label").values.tolist() == want.values.tolist()
    joined = truth([capital], "answer", continent)
    assert [CONTINENTS[int(i)] for i in joined.values] == [by_group[row.group] for row in capital.rows]
    numbers = torch.arange(76.0)
    assert truth([continent], numbers).values.tolist() == numbers.tolist()
    assert truth([continent], numbers).classes == ()
    assert truth([continent], [i % 2 for i in range(76)]).classes == ("0", "1")


A, ONE = {"tensors": ["x_next"], "blocks": [1], "controls": []}, {"tensors": ["h_e"]}


@pytest.mark.parametrize(
    ("labels", "options", "error", "says"),
    [
        (["a"] * 3, A, BadProbe, "3 labels for the 76 rows of continent"),
        (["a"] * 76, A, BadProbe, "all labels are 'a'"),
        (lambda row: 1.0, A, BadProbe, "all labels are 1;"),
        (lambda row: float("nan"), A, BadProbe, "nan is no finite number"),
        ([1.0] * 70 + ["x"] * 6, A, BadProbe, "'x' is no finite number, as the others are"),
        (["a", None] * 38, A, BadProbe, "has no label"),
        ("label", A, BadProbe, "has no label"),
        ("continent", A, BadProbe, "those of another set are joined by of="),
        (lambda row: row.group, A, BadProbe, "are in one group of prompts alone"),
        ("answer", A | {"folds": 100}, BadProbe, "76 groups of prompts for 100 folds"),
        ("answer", A | {"folds": 3}, OutOfRange, "4 or more"),
        ("answer", A | {"width": 60}, OutOfRange, "width=60: 1 to 38"),
        ("answer", A | {"width": 0}, OutOfRange, "width=0: 1 to 38"),
        ("answer", A | {"draws": 0}, OutOfRange, "draws=0"),
        ("answer", A | {"at": ["relation"]}, BadEdit, "no span 'relation'; it has END, subject"),
        ("answer", A | {"at": ["END", 2]}, BadSample, "continent: the prompts are of 4 shapes"),
        ("answer", A | {"at": [-1]}, OutOfRange, "the span 'END'"),
        ("answer", A | {"at": "END"}, BadProbe, "a list of spans"),
        ("answer", A | {"at": [[1, 2]]}, BadProbe, "a list of spans"),
        ("answer", A | {"at": []}, BadProbe, "names no place"),
        ("answer", A | {"e": 3}, UnknownDim, "no tensor that is asked for has slots"),
        ("answer", A | {"probe": "svm"}, BadProbe, "probes are ridge, logistic, means"),
        ("answer", A | {"controls": "random"}, BadProbe, "out of shuffled, random, tokens"),
        (lambda row: float(len(row.clean)), A | {"probe": "means"}, BadProbe, "take 'ridge'"),
        ("answer", ONE, UnknownDim, "name one by e="),
        ("answer", ONE | {"e": 16}, OutOfRange, "experts are 0 to 15"),
        ("answer", {"tensors": ["A"]}, BadProbe, "of 4 shapes share no keys"),
        ("answer", {"tensors": ["c_kvv"]}, UnknownTensor, "Nearest"),
        ("answer", A | {"test": "capital"}, BadProbe, "capital has the label"),
        (["a", "b"] * 38, A | {"test": "capital"}, BadProbe, "give capital its own by test_labels="),
        ("answer", A | {"of": "capital"}, BadProbe, "are in one group of prompts alone"),
        ("answer", A | {"of": "ioi"}, BadProbe, "has no label"),
    ],
)
def test_what_cannot_be_asked(
    labels: Any, options: dict[str, Any], error: type[Exception], says: str, model: HookedModel, continent: Prompts
) -> None:
    options = {key: load(model, x) if key in ("test", "of") else x for key, x in options.items()}
    with pytest.raises(error, match=says):
        probes(model, continent, labels, **options)


def test_a_span_of_several_tokens(model: HookedModel) -> None:
    assert model.tokenizer is not None
    rows = [{"clean": "In France , the capital is", "spans": {"two": [3, 11]}}] * 2
    some = Prompts.of(rows, model.tokenizer)
    with pytest.raises(BadProbe, match=r"'two\[-1\]' is the last"):
        find_places([some], ["two"])
    places = find_places([some], None)
    assert list(places.columns) == [{"role": "two[-1]"}, {"role": "END"}]
    assert places.tokens[0].tolist() == [[3, 6]] * 2


def test_positions_are_read_of_prompts_of_one_shape(model: HookedModel, continent: Prompts) -> None:
    """There a position is a role; over several shapes it would be other words in each, as a test set may have them."""
    alike = continent.subset(next(iter(continent.shapes().values())))
    (where,) = {prompt.spans["subject"][0] for prompt in alike.rows}
    options: dict[str, Any] = {"tensors": ["x_mid"], "blocks": [1], "width": 4, "probe": "means", "controls": []}
    by_position = probes(model, alike, "answer", at=[where], **options)
    by_role = probes(model, alike, "answer", at=["subject"], **options)
    assert at(by_position, pos=where)["value"].tolist() == at(by_role, role="subject")["value"].tolist()
    assert [name for name, _ in probe_plots.pictures(by_position)] == [f"continent_{where}"]
    plt.close("all")
    with pytest.raises(OutOfRange, match="99 does not exist"):
        probes(model, alike, "answer", at=[99], **options)
    with pytest.raises(BadSample, match="capital: the prompts are of 5 shapes"):
        probes(model, alike, "answer", at=[where], test=load(model, "capital"), test_labels=["Asia"] * 76, **options)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 2])
def test_vectors_are_the_caches(block: int, model: HookedModel) -> None:
    some = load(model, "continent").subset(range(4))  # of one shape
    places = find_places([some], ["subject", 2, "END"])
    e = 5
    sites, left_out = readable(model, [some], None, [block], e if block else None)
    assert set(left_out) == {"delta_heads"}
    found = read(model, [some], places.tokens, [*sites, Site(block, "delta_heads")], e if block else None)
    _, cache = model.run_with_cache(*some.batch(), names_filter=lambda name: f"blocks.{block}." in name)
    chosen = cache[f"blocks.{block}.experts"] if block else None
    met = 0
    for site in found:
        assert site is not None
        whole, vectors = cache[site], found[site]
        for b, row in enumerate(places.tokens[0].tolist()):
            for i, pos in enumerate(row):
                there, one = True, whole[b, pos] if site.tensor not in ("S", "A") else whole[b]
                if site.tensor in ("S", "A"):
                    one = torch.stack([head[pos] * (torch.arange(head.shape[-1]) <= pos) for head in one])
                elif site.tensor == "experts":
                    one = torch.tensor([float(n in one) for n in range(model.dims.e)])
                elif "k" in model.sites.node(site).shape:
                    assert chosen is not None
                    slots = [k for k in range(model.dims.k) if chosen[b, pos, k] == e]
                    met += len(slots)
                    there = bool(slots) or site.tensor in ("gates", "delta_experts")
                    one = one[slots[0]] if slots else torch.zeros_like(one[0])
                    one = one.reshape(1) if site.tensor == "gates" else one
                assert bool(vectors.there[b, i]) == there
                torch.testing.assert_close(vectors.values[b, i], one.float())
    assert not block or met


def test_tokens_are_counted_up_to_the_place(model: HookedModel) -> None:
    some = load(model, "induction").subset(range(3))
    places = find_places([some], ["B1", "END"])
    counts = count_tokens(some, places.tokens[0]).values
    words = sorted(
        {token for row in some.rows for token in row.tokens} | ({0} if some.batch().keep is not None else set())
    )
    for b, row in enumerate(some.rows):
        for i, name in enumerate(("B1", "END")):
            seen = Counter(row.tokens[: row.spans[name][-1] + 1])
            assert counts[b, i].tolist() == [seen[word] for word in words]


def test_an_experts_tensors_are_read_where_it_was_chosen(model: HookedModel, continent: Prompts) -> None:
    experts = model.run(*continent.batch(), want=["blocks.2.experts"])["blocks.2.experts"]
    chosen = [
        int((experts[torch.arange(76), [row.spans["subject"][0] for row in continent.rows]] == e).any(-1).sum())
        for e in range(16)
    ]
    busy, idle = int(np.argmax(chosen)), int(np.argmin(chosen))
    options: dict[str, Any] = {
        "tensors": ["h_e", "delta_experts"],
        "blocks": [2],
        "at": ["subject"],
        "width": 4,
        "controls": [],
    }
    df = probes(model, continent, "answer", e=busy, **options)
    h_e, added = (at(df, tensor=name).to_dict("records")[0] for name in ("h_e", "delta_experts"))
    assert h_e["n"] < added["n"] == 64
    assert h_e["expert"] == added["expert"] == busy
    df = probes(model, continent, "answer", e=idle, **options)
    assert at(df, tensor="h_e")["value"].isna().all()
    assert df.attrs["unmatched"] == 1


def test_one_forward_pass_and_equal_vectors_once(
    model: HookedModel, continent: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, fitted = [], []
    run, scores = HookedModel.run, Fits.scores
    monkeypatch.setattr(HookedModel, "run", lambda self, *a, **k: ran.append(self) or run(self, *a, **k))
    monkeypatch.setattr(Fits, "scores", lambda self: fitted.append(self) or scores(self))
    df = probes(model, continent, "answer", tensors=["q_C", "Q_C", "x_mid"], controls=["random"], probe="means")
    assert len(ran) == 2
    assert ran[0] is model
    assert len(fitted) == 2 * 2 * 4 * 2  # models, places, blocks, tensors
    assert set(at(df, tensor="Q_C")["same_as"]) == {"q_C"}
    assert at(df, tensor="x_mid")["same_as"].isna().all()
    assert at(df, tensor="Q_C")["value"].tolist() == at(df, tensor="q_C")["value"].tolist()
    assert not model.watched()


# ---- the direction ---------------------------------------------------------------------------------------------------


def score_of_europe(model: HookedModel, continent: Prompts, edits: Any) -> float:
    """How far the logit of Europe is above the other continents' mean, over prompts."""
    run = model.run(*continent.batch(), edits=edits, spans=continent.spans)
    last = run["logits"][torch.arange(76), [len(row.tokens) - 1 for row in continent.rows]]
    assert model.tokenizer is not None
    each = [last[:, model.tokenizer.id(word)].mean() for word in CONTINENTS]
    return float(each[3] - torch.stack(each[:3]).mean())


@pytest.mark.parametrize("probe", ["ridge", "logistic", "means"])
def test_a_direction_steers(probe: Any, model: HookedModel, continent: Prompts) -> None:
    found = direction(model, continent, "answer", "x_next", 1, "subject", to="Europe", probe=probe)
    assert (found.site, found.at, found.prompts, found.n) == (Site(1, "x_next"), "subject", "continent", 76)
    assert float(found.vector.norm()) == pytest.approx(1, abs=1e-5)
    assert found.unit > 0
    read_out = []
    for alpha in (0.0, 1.0):
        run = model.run(
            *continent.batch(), want=["blocks.1.x_next"], edits=[found.edit(alpha, T="subject")], spans=continent.spans
        )
        rows = [row.spans["subject"][0] for row in continent.rows]
        read_out.append(found.read(run["blocks.1.x_next"][torch.arange(76), rows]))
    moved = (read_out[1] - read_out[0]).numpy()
    assert moved == pytest.approx(found.unit * float((found.weights * found.vector).sum()), rel=1e-4)
    assert moved.min() > 0
    base = score_of_europe(model, continent, ())
    more, less = (score_of_europe(model, continent, [found.edit(alpha, T="subject")]) - base for alpha in (1, -1))
    assert more > 5
    assert less < -2
    others = []
    for seed in range(5):
        other = torch.randn(128, generator=torch.Generator().manual_seed(seed))
        edit = add("x_next", 1, direction=other / other.norm(), alpha=found.unit, T="subject")
        others.append(abs(score_of_europe(model, continent, [edit]) - base))
    assert np.mean(others) < more / 5


def test_a_readout_is_scikit_learns(model: HookedModel, continent: Prompts) -> None:
    words = ["Europe" if str(answer) == "Europe" else "elsewhere" for answer in continent.answers("answer")]
    found = direction(model, continent, words, "O", 2, "subject", to="Europe", probe="logistic", width=8)
    run = model.run(*continent.batch(), want=["blocks.2.O"])
    O = torch.stack([run["blocks.2.O"][b, row.spans["subject"][0]] for b, row in enumerate(continent.rows)])
    assert found.vector.shape == O.shape[1:]
    y = np.array(words) == "Europe"
    pipe = make_pipeline(StandardScaler(), PCA(8, random_state=0), LogisticRegression(max_iter=1000))
    fold = lesson([continent], truth([continent], words), 6, 0, 0, aside=False).fold
    grid = {"logisticregression__C": [1 / x for x in STRENGTHS]}
    by_hand = GridSearchCV(pipe, grid, cv=PredefinedSplit(fold)).fit(O.flatten(1).numpy(), y)
    want = by_hand.decision_function(O.flatten(1).numpy())
    assert found.read(O).numpy() == pytest.approx(want, abs=1e-3 * float(np.abs(want).max()))
    along = O.double().flatten(1) @ found.vector.double().flatten()
    assert found.unit == pytest.approx(float(along[y].mean() - along[~y].mean()), rel=1e-4)


def test_a_direction_of_numbers(model: HookedModel, capital: Prompts) -> None:
    found = direction(model, capital, lambda row: float(len(row.tokens)), "x_mid", 0, "END")
    run = model.run(*capital.batch(), want=["blocks.0.x_mid"])
    x_mid = run["blocks.0.x_mid"][torch.arange(76), [len(row.tokens) - 1 for row in capital.rows]]
    lengths = torch.tensor([float(len(row.tokens)) for row in capital.rows])
    assert float((found.read(x_mid) - lengths).abs().mean()) < 0.25
    assert found.to is None
    assert "given in blocks.0.x_mid, read at 'END' by ridge from 76 groups of capital" in str(found)


def ask(**options: Any) -> Callable[[HookedModel, Prompts], Any]:
    given = {"labels": "answer", "tensor": "x_next", "block": 1, "at": "subject", "to": "Asia"} | options
    return lambda model, some: direction(model, some, **given)


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        (ask(to=None), BadProbe, "the classes are Africa, America, Asia, Europe"),
        (ask(to="Mars"), BadProbe, "to='Mars'"),
        (ask(labels=lambda row: float(len(row.clean))), BadProbe, "labels are numbers; leave it out"),
        (ask(at=2), BadSample, "of 4 shapes, in which one position is different words"),
        (lambda model, some: ask(at=0, width=4)(model, some.subset(range(19))), BadProbe, "nothing differs"),
        (ask(tensor="h_e"), UnknownDim, "name one by e="),
        (lambda model, some: ask()(model, some).read(torch.zeros(2, 3)), ShapeMismatch, "ends in"),
        (
            lambda model, some: model.run(*some.batch(), edits=[ask(tensor="experts")(model, some).edit()]),
            BadEdit,
            "holds integers",
        ),
        (lambda model, some: ask(tensor="A", width=4)(model, some.subset(range(19))).edit(), BadEdit, "over the keys"),
    ],
)
def test_directions_that_cannot_be(
    what: Callable[..., Any], error: type[ProbeError], says: str, model: HookedModel, continent: Prompts
) -> None:
    with pytest.raises(error, match=says):
        what(model, continent)


# ---- frame, table, pictures, command ---------------------------------------------------------------------------------


def test_a_frame_comes_back_and_joins(sweep: pd.DataFrame, tmp_path: Any) -> None:
    back = frames.read(frames.write(sweep, tmp_path / "probes.parquet"))
    pd.testing.assert_frame_equal(back, sweep, check_names=False)
    other = sweep.assign(probe="means")
    assert len(frames.join(sweep, other)) == 2 * len(sweep)
    with pytest.raises(BadFrame, match="two rows measure one thing"):
        frames.join(sweep, sweep)


def test_the_tables_say_what_the_controls_give(sweep: pd.DataFrame) -> None:
    own, moved = map(str, probe_tables(sweep))
    assert "answer of continent, accuracy of ridge probes: capital, n = 64" in own
    for note in ("always guessing the same: 0.30", "shuffled labels: 0.", "random weights: 0.", "bag of tokens: 0."):
        assert note in own
    assert "on 12 groups that were set aside: 1.00" in own
    assert "fitted to capital: language, n = 76" in moved


def test_pictures(sweep: pd.DataFrame) -> None:
    names = [name for name, ax in probe_plots.pictures(sweep)]
    assert names == ["capital_subject", "capital_END", "language_subject_test", "language_END_test"]
    here = sweep[(sweep["prompts"] == "capital") & (sweep["role"] == "subject")]
    ax = probe_plots.probes(here)
    legend = ax.get_legend()
    assert legend is not None
    said = [text.get_text() for text in legend.get_texts()]
    assert said[:2] == ["$x$, the residual stream", "$q^C$"]
    assert {"shuffled labels", "random weights", "bag of tokens", "the commonest label"} <= set(said)
    assert ax.get_ylabel() == "accuracy"
    assert "at subject" in ax.get_title(loc="left")
    stream = next(line for line in ax.get_lines() if "residual" in str(line.get_label()))
    values = at(here[here["tensor"].isin(["x_n", "x_mid", "x_next"])]).sort_values(["block", "tensor"])["value"]
    assert list(stream.get_ydata()) == values.tolist()
    assert list(stream.get_xdata()) == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    plt.close("all")


def test_pictures_that_cannot_be(sweep: pd.DataFrame) -> None:
    with pytest.raises(BadFrame, match=r"several of place \(subject, END\)|several of place \(END, subject\)"):
        probe_plots.probes(sweep)
    assert not probe_plots.probes(sweep[:0]).get_lines()
    many = pd.concat([sweep.assign(tensor=name) for name in ("q_C", "k_C", "v", "O", "c_Q", "c_KV", "Q")])
    many = frames.frame(
        at(many, role="END", prompts="capital").drop_duplicates(["block", "tensor"]).drop(columns=["symbol", "step"]),
        study="probes",
    )
    ((name, ax),) = probe_plots.pictures(many)
    assert name == "capital_END"
    assert len(ax.get_yticklabels()) == 7
    plt.close("all")


def test_the_command(tmp_path: Any) -> None:
    asked = "probe --task capital --label continent --tensor x_mid --block 1 --at subject --at END --probe means"
    done = CliRunner().invoke(cli.app, [*asked.split(), "--control", "tokens", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "answer of continent, accuracy of means probes: capital, n = 64" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "capital_END.png",
        "capital_subject.png",
        "probes.csv",
        "probes.parquet",
    ]
    wrong = CliRunner().invoke(cli.app, ["probe", "--task", "capital", "--label", "answer"])
    assert wrong.exit_code == 1
    assert "in one group of prompts alone" in wrong.output
