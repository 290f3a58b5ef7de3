"""What holds for every study of the registry: its columns, what it says it costs, what it refuses before it runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import Tensor

from experiments import runs, spec
from experiments.metrics import BadMetric
from experiments.probes import DRAWS
from experiments.prompts import Prompts
from experiments.runs import plan, run
from experiments.spec import Spec, parse, read, shipped
from experiments.studies import STUDIES
from hooks import HookedModel
from probe import InMemory
from probe.errors import OutOfRange, ProbeError

SPECS = {read(name).study: name for name in reversed(shipped())}
"""A shipped spec of each study."""

LESS: dict[str, dict[str, Any]] = {
    "attribute": {"tensors": ["O", "gates"], "steps": 0},
    "circuit": {"random_sets": 1, "subsets": 1, "among": ["blocks.0.O h=*", "blocks.3.O h=*", "delta_ffn"]},
    "norms": {"channels": 1},
    "paths": {"senders": ["blocks.0.O h=1"]},
    "probes": {"draws": 1, "tensors": ["x_n"], "width": 8},
    "steer": {"block": 2, "doses": [0.5], "random_directions": 2, "neutral": "job"},
}
"""What makes them quick."""

LOAD = functools.cache(HookedModel.load)
"""Over all tests."""

NO_SWEEP = ("norms", "lens", "direct", "probes", "routing", "split", "scores", "top", "compare")


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models and prompts are loaded once; of prompts a few, but where probes need more."""
    load = Prompts.load
    monkeypatch.setattr(Prompts, "load", functools.cache(lambda *a: _some(load(*a))))
    monkeypatch.setattr(HookedModel, "load", LOAD)
    yield
    plt.close("all")


def _some(prompts: Prompts) -> Prompts:
    return (
        prompts if prompts.name in ("capital", "language", "continent") else prompts.subset(range(min(4, len(prompts))))
    )


def of(study: str, **model: Any) -> Spec:
    """The first unit of the shipped spec of a study, cut down, on the tiny model."""
    (first, *_) = read(SPECS[study]).units
    given = {key: value for key, value in (first.arguments | LESS.get(study, {})).items() if value is not None}
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    return parse({"study": study, "model": model, **given}, study, spec.SHIPPED)


def done(asked: Spec) -> Any:
    """The frame of the only unit of a spec."""
    shelf, (unit,) = runs._Shelf(asked.folder), asked.units
    return STUDIES[asked.study].run(shelf.model(unit), **shelf.arguments(STUDIES[asked.study].run, unit))


def test_every_study_has_a_spec_that_ships_and_says_its_cost() -> None:
    assert set(SPECS) == set(STUDIES)
    assert [name for name, study in STUDIES.items() if study.plan is None] == []


@pytest.mark.parametrize(
    ("study", "numerics"),
    [*((study, "careful") for study in STUDIES), *((study, "reference") for study in NO_SWEEP if study != "probes")],
)
def test_every_frame_says_what_it_was_computed_in(study: str, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every model that runs is in the same: what it is held against, too."""
    ran, whole = set(), HookedModel.run

    def seen(self: HookedModel, *rest: Any, **more: Any) -> Any:
        if self.dims == LOAD().dims:  # not the small one that tells equal cells by their bits
            ran.add(self.decoder.numerics)
        return whole(self, *rest, **more)

    monkeypatch.setattr(HookedModel, "run", seen)
    df = done(of(study, dtype="bfloat16", numerics=numerics))
    assert set(df["numerics"]) == {numerics} >= ran
    assert set(df["dtype"]) == {"bfloat16"}
    assert set(df["study"]) == {study}
    assert df["model"].str.startswith("tiny ").all()
    assert df["value"].notna().any()


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_says_what_it_would_cost(study: str) -> None:
    (cost,) = plan(of(study))
    assert {"cells", "forwards", "bytes", "seconds"} <= set(cost)
    assert all(np.isfinite(number) for number in cost.values()), cost
    assert cost["cells"] >= 1
    assert cost["forwards"] > 0
    assert 0 < cost["seconds"] < 600


@pytest.mark.parametrize("study", NO_SWEEP)
def test_a_study_without_a_sweep_makes_the_passes_that_it_says(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: the tokens of every run, in passes over the prompts; a block that runs alone is a part of one."""
    ran, whole = [], HookedModel.run
    alone = HookedModel.run_block

    def counted(self: HookedModel, tokens: Tensor, *rest: Any, **more: Any) -> Any:
        ran.append(float(tokens.numel()))
        return whole(self, tokens, *rest, **more)

    def counted_alone(self: HookedModel, block: int, x_n: Tensor, *rest: Any, **more: Any) -> Any:
        ran.append(x_n[..., 0].numel() / self.dims.blocks)
        return alone(self, block, x_n, *rest, **more)

    asked = of(study)
    (cost,) = plan(asked)
    monkeypatch.setattr(HookedModel, "run", counted)
    monkeypatch.setattr(HookedModel, "run_block", counted_alone)
    done(asked)
    shelf, (unit,) = runs._Shelf(asked.folder), asked.units
    given = shelf.arguments(STUDIES[study].run, unit)
    sets = given.get("prompts") or given["texts"]
    one = sum(some.batch()[0].numel() for some in ([sets] if isinstance(sets, Prompts) else sets))
    part = 0.2 if study == "top" else 1.0  # it ends in the first block
    assert cost["forwards"] == pytest.approx(part * sum(ran) / one, rel=0.06 if study == "compare" else 0.01)


def test_a_plan_for_a_check_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for steering, whose doses are in sizes of the run."""
    for study in STUDIES:
        if study == "steer":
            continue
        asked = of(study)
        shelf, (unit,) = runs._Shelf(asked.folder), asked.units
        estimate = STUDIES[study].plan
        assert estimate is not None
        model, given = shelf.model(unit), shelf.arguments(estimate, unit)
        with monkeypatch.context() as patched:
            patched.setattr(HookedModel, "run", lambda *a, **k: pytest.fail("it runs"))
            found = estimate(model, **given, timed=False)
        assert np.isnan(found["seconds"]), study


# ---- what is refused before anything runs ----------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str, list[Any], str]] = [
    ({"study": "ablate", "prompts": "job", "how": "zero"}, "tensors", ["O", "Oo"], "'Oo'"),
    ({"study": "ablate", "prompts": "job", "tensors": "O"}, "metrics", ["kl", "relative_change:h"], "no tensor|'h'|h "),
    ({"study": "ablate", "prompts": "job", "tensors": "O"}, "at", ["END", "S3"], "'S3'"),
    ({"study": "ablate", "prompts": "job", "tensors": ["O"]}, "blocks", [[0], [9]], "block 9"),
    ({"study": "patch", "prompts": "job", "by": "role"}, "frozen", [["A"], ["AA"]], "'AA'"),
    ({"study": "paths", "prompts": "job", "senders": "O h=*"}, "receivers", ["logits", "V g=1"], "g"),
    ({"study": "circuit", "prompts": "job", "random_sets": 1}, "kept", [["blocks.0.O h=1"], ["blocks.0.O h=9"]], "9"),
    ({"study": "attribute", "prompts": "job"}, "tensors", ["O", "experts"], "experts"),
    ({"study": "attribute", "prompts": "job", "tensors": "O"}, "metric", ["logit_difference", "rank"], "no derivative"),
    ({"study": "norms", "prompts": "job"}, "tensors", ["O", "experts"], "integers"),
    ({"study": "lens", "prompts": "capital"}, "roles", [["END"], ["nowhere"]], "nowhere"),
    ({"study": "lens", "prompts": "capital"}, "metrics", [["kl"], ["loss"]], "loss"),
    ({"study": "direct", "prompts": "capital"}, "role", ["END", "nowhere"], "nowhere"),
    ({"study": "probes", "prompts": "capital", "labels": "answer", "of": "continent"}, "at", [["END"], ["no"]], "'no'"),
    ({"study": "routing", "prompts": ["job"]}, "blocks", [[1], [0]], "dense"),
    ({"study": "split", "prompts": "job"}, "edits", ["zero blocks.1.O", "none blocks.1.O"], "none"),
    ({"study": "split", "prompts": "job"}, "edits", ["zero blocks.1.O", "zero blocks.1.choice_score"], "do nothing"),
    ({"study": "scores", "prompts": "job"}, "blocks", [[1], [7]], "block 7"),
    (
        {"study": "steer", "prompts": "job", "direction": "token:Paris", "block": 1, "random_directions": 2},
        "tensor",
        ["x_next", "O"],
        r"\[",
    ),
    ({"study": "top", "texts": "job", "block": 0}, "tensor", ["h", "A"], "no number at a position"),
    ({"study": "compare", "second": "random"}, "prompts", ["job", "jobs"], "jobs"),
]


@pytest.mark.parametrize("case", WRONG, ids=[f"{given['study']}-{key}" for given, key, _, _ in WRONG])
def test_all_units_are_looked_at_before_the_first_runs(
    case: tuple[dict[str, Any], str, list[Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, key, values, says = case
    asked = parse({**given, "grid": {key: values}})
    monkeypatch.setattr(runs, "_do", lambda *_: pytest.fail("a unit was run"))
    with pytest.raises(ProbeError, match=says) as error:
        run(asked, tmp_path)
    assert str(error.value).startswith(f"unit 2 of 2 ({key}=")
    assert list(tmp_path.iterdir()) == [], "nothing is written: the same folder will do"
    monkeypatch.setattr(runs, "_do", lambda *_: pytest.fail("all is well"))
    with pytest.raises(pytest.fail.Exception, match="all is well"):
        run(parse({**given, "grid": {key: values[:1]}}), tmp_path)  # the first unit alone would do


def test_a_metric_that_the_source_does_not_have_is_seen_before(tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    row: dict[str, Any] = {"clean": "The capital of Peru is", "corrupt": "Peru and Japan is", "answer": "Lima"}
    row |= {"spans": {"land": [15, 19]}, "corrupt_spans": {"land": [9, 14]}}
    rows.write_text(json.dumps(row))
    given = {"study": "patch", "prompts": "mine.jsonl", "by": "role", "grid": {"metrics": [["kl"], ["kl:all"]]}}
    with pytest.raises(BadMetric, match=r"unit 2 of 2 .*unequal length"):
        run(parse(given, "mine", tmp_path), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_what_is_finished_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = parse({"study": "scores", "prompts": "job", "grid": {"blocks": [[0], [1]]}})
    assert run(asked, tmp_path, shard=(1, 2)) is None
    seen: list[Any] = []
    scores = STUDIES["scores"]
    looks = scores._replace(plan=lambda *a, blocks, **k: seen.append(blocks) or {}, pictures=lambda *a: iter(()))
    monkeypatch.setitem(STUDIES, "scores", looks)
    assert run(asked, tmp_path) is not None
    assert seen == [[1]]


# ---- two models ------------------------------------------------------------------------------------------------------


def test_a_comparison_hangs_on_both_models(tmp_path: Path) -> None:
    given = {"study": "compare", "second": "random", "model": {"dtype": "bfloat16"}}
    df = run(parse(given, "both"), tmp_path)
    assert df is not None
    first, second = df["model"].iloc[0].split(" → ")
    assert (first.split()[0], second.split()[0]) == ("tiny", "random")
    assert first.split()[1] != second.split()[1]
    assert set(df["dtype"]) == {"bfloat16"}
    cosine = df[(df["metric"] == "cosine") & (df["tensor"] == "W_O")]["value"]
    assert cosine.abs().max() < 0.1, "random weights know nothing of trained ones"
    with pytest.raises(ProbeError, match=r"is another run's.*arguments\.second"):
        run(parse({**given, "second": str(spec.SHIPPED.parents[1] / "probe" / "tiny")}, "both"), tmp_path)


def test_an_edit_said_in_text_is_the_edit() -> None:
    from experiments.routing import split
    from hooks import mean, zero

    model = HookedModel.load()
    assert model.tokenizer is not None
    job = Prompts.load("job", model.tokenizer)
    same: dict[str, Any] = {"metrics": ["logit_difference"]}
    told, made = (split(model, job, edits, **same) for edits in ("zero blocks.2.O h=1", zero("O", 2, h=1)))
    assert told["effect"].tolist() == made["effect"].tolist()
    assert told["effect"].abs().min() > 0
    theirs = job.reference
    assert theirs is not None
    source = model.run(*theirs.batch(), want=["blocks.1.O"], spans=theirs.spans)
    by_hand = split(model, job, [mean("O", 1, source=source, h=1), zero("O", 2, h=1)], **same)
    told = split(model, job, ["mean blocks.1.O h=1", zero("O", 2, h=1)], **same)
    torch.testing.assert_close(torch.tensor(told["effect"]), torch.tensor(by_hand["effect"]), atol=1e-5, rtol=0)


# ---- texts that are too long -----------------------------------------------------------------------------------------

SHORT = 3
"""Positions that a model is made for; every prompt here has more."""


@pytest.mark.parametrize("study", STUDIES)
def test_texts_beyond_the_models_positions_are_refused_or_recorded(study: str) -> None:
    shelf, (unit,) = runs._Shelf(Path(spec.SHIPPED)), of(study).units
    given, tiny = shelf.arguments(STUDIES[study].run, unit), shelf.model(unit)
    weights = tiny.decoder.weights
    assert isinstance(weights, InMemory)
    short = HookedModel(InMemory(replace(tiny.dims, max_positions=SHORT), weights.tensors), tiny.tokenizer)
    given |= {"second": short} if "second" in given else {"controls": (), "draws": DRAWS} if "controls" in given else {}
    outlook = STUDIES[study].plan
    assert outlook is not None
    for ask in (STUDIES[study].run, functools.partial(outlook, timed=False)):
        with pytest.raises(OutOfRange, match=r"max_position_embeddings is 3: .* or say beyond=True"):
            ask(short, **given)
    given["beyond"] = True
    assert outlook(short, **given, timed=False)["cells"] >= 1
    df = STUDIES[study].run(short, **given)
    assert set(df["beyond"]) == {SHORT}
    assert df["value"].notna().any()
    assert not short.decoder.beyond, "for this study alone"
