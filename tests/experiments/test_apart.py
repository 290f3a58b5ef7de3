"""Every argument of every study: units that differ in it alone are told apart by a column, hold alike what they share,
or are refused before the first unit runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from experiments import frames, runs
from experiments.frames import IDENTITY
from experiments.prompts import Prompts
from experiments.runs import BadRun, plan, run
from experiments.spec import Spec, parse
from experiments.studies import STUDIES
from hooks import HookedModel

BASE: dict[str, dict[str, Any]] = {
    "ablate": {"prompts": "ioi", "tensors": ["O"], "blocks": [3], "metrics": ["kl"]},
    "patch": {"prompts": "ioi", "tensors": ["O"], "blocks": [3], "metrics": ["kl"], "by": "head"},
    "paths": {"prompts": "ioi", "senders": ["blocks.2.O h=1"], "metrics": ["kl"]},
    "circuit": {
        "prompts": "ioi", "kept": ["blocks.0.O h=1", "blocks.3.O h=1"], "random_sets": 1, "subsets": 1,
        "metrics": ["kl"], "among": ["blocks.0.O h=*", "blocks.3.O h=*"],
    },
    "attribute": {"prompts": "ioi", "tensors": ["O"], "blocks": [2, 3]},
    "norms": {"prompts": "ioi", "tensors": ["x_n"], "blocks": [1]},
    "lens": {"prompts": "ioi", "tensors": ["x_n"], "blocks": [1, 2], "metrics": ["kl"]},
    "direct": {"prompts": "ioi"},
    "probes": {
        "prompts": "capital", "labels": "answer", "of": "continent", "tensors": ["x_n"], "blocks": [1], "width": 8,
        "at": ["END"],
    },
    "routing": {"prompts": ["ioi", "job"], "blocks": [1]},
    "split": {"prompts": "job", "edits": "zero blocks.2.O h=1", "metrics": ["kl"]},
    "scores": {"prompts": "ioi", "blocks": [0]},
    "steer": {
        "prompts": "agreement", "direction": "token:are", "tensor": "x_next", "block": 2, "doses": [0.5],
        "random_directions": 2, "neutral": "job", "metrics": ["kl"],
    },
    "top": {"texts": "job", "tensor": "h", "block": 0, "where": {"f": 1}, "n": 3},
    "compare": {"second": "random", "prompts": "job"},
}  # fmt: skip
"""A quick unit of each study."""

OTHER: dict[str, dict[str, list[Any]]] = {
    "ablate": {
        "prompts": ["ioi", "job"], "tensors": [["O"], ["V"]], "blocks": [[3], [2]], "by": ["head", "role"],
        "at": ["END", -1], "how": ["zero", "resample"], "reference": ["job", "ioi"], "metrics": [["kl"], ["rank"]],
        "seed": [0, 1], "draws": [1, 2], "per_prompt": [False, True],
    },
    "patch": {
        "prompts": ["ioi", "job"], "tensors": [["O"], ["V"]], "blocks": [[3], [2]], "by": ["head", "role"],
        "at": ["END", -1], "window": [1, 2], "direction": ["denoise", "noise"], "noise_at": ["END", -1],
        "noise_std": [3.0, 2.0], "frozen": [["experts"], ["A"]], "metrics": [["kl"], ["rank"]], "seed": [0, 1],
        "draws": [1, 2], "per_prompt": [False, True],
    },
    "paths": {
        "prompts": ["ioi", "job"], "senders": [["blocks.2.O h=1"], ["blocks.2.O h=2"]],
        "receivers": [["logits"], ["blocks.3.V h=0"]], "hold": ["all", "none"], "direction": ["denoise", "noise"],
        "frozen": [["experts"], ["A"]], "metrics": [["kl"], ["rank"]], "seed": [0, 1], "per_prompt": [False, True],
    },
    "circuit": {
        "prompts": ["ioi", "job"], "kept": [["blocks.0.O h=1"], ["blocks.0.O h=2"]],
        "among": [["blocks.0.O h=*", "blocks.3.O h=*"], ["O h=*"]], "how": ["zero", "resample"],
        "reference": ["job", "ioi"], "random_sets": [1, 2], "subsets": [1, 2], "metrics": [["kl"], ["rank"]],
        "seed": [0, 1], "draws": [1, 2], "per_prompt": [False, True],
    },
    "attribute": {
        "prompts": ["ioi", "job"], "tensors": [["O"], ["V"]], "blocks": [[3], [2]], "by": ["head", "role"],
        "at": ["END", -1], "steps": [1, 2], "direction": ["denoise", "noise"],
        "metric": ["logit_difference", "log_probability"], "seed": [0, 1], "per_prompt": [False, True],
    },
    "norms": {
        "prompts": ["ioi", "job"], "tensors": [["x_mid"], ["O"]], "blocks": [[1], [2]],
    },
    "lens": {
        "prompts": ["ioi", "job"], "tensors": [["x_mid"], ["x_next"]], "blocks": [[1], [2]],
        "roles": [["END"], ["S2"]], "scale": ["own", "final"], "metrics": [["kl"], ["rank"]],
        "per_prompt": [False, True],
    },
    "direct": {"prompts": ["ioi", "job"], "by": [["head"], ["head", "expert"]], "role": ["END", "S2"],
               "per_prompt": [False, True]},
    "probes": {
        "prompts": ["capital", "language"], "labels": ["answer"], "of": ["continent"],
        "tensors": [["x_n"], ["x_mid"]], "blocks": [[1], [2]], "at": [["END"], ["subject"]], "e": [1, 2],
        "probe": ["ridge", "means"], "width": [8, 6], "folds": [6, 5], "draws": [5, 2], "test": ["language"],
        "test_labels": ["answer"], "seed": [0, 1],
    },
    "routing": {"prompts": [["ioi", "job"], ["ioi"]], "blocks": [[1], [2]]},
    "split": {
        "prompts": ["ioi", "job"], "edits": ["zero blocks.2.O h=1", "zero blocks.2.O h=2"],
        "metrics": [["kl"], ["rank"]], "gates": [False, True], "reference": ["job", "ioi"], "seed": [0, 1],
    },
    "scores": {"prompts": ["ioi", "job"], "blocks": [[0], [1]], "per_prompt": [False, True]},
    "steer": {
        "prompts": ["agreement", "job"], "direction": ["token:are", "token:is"], "tensor": ["x_next", "x_mid"],
        "block": [1, 2], "h": [0, 1], "e": [1, 5], "at": ["END", -1], "when": ["both", "prompt"],
        "doses": [[0.5], [1.0]], "random_directions": [2, 3], "label": ["one", "other"], "learn": ["agreement"],
        "neutral": ["job", "ioi"], "metrics": [["kl"], ["rank"]], "seed": [0, 1],
    },
    "top": {
        "texts": ["job", "ioi"], "tensor": ["h", "u"], "block": [0, 1], "where": [{"f": 1}, {"f": 2}],
        "smallest": [False, True], "direction": [[1.0] * 128, [2.0] * 128],
    },
    "compare": {"second": ["random"], "prompts": ["job", "ioi"]},
}  # fmt: skip
"""Two values of each argument that tells units apart, or leaves them rows in common that are equal."""

for of_study in OTHER.values():
    of_study["beyond"] = [False, True]

NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("ablate", "reference"): {"how": "mean"},
    ("ablate", "seed"): {"how": "zero"},
    ("patch", "window"): {"blocks": [2, 3]},
    ("patch", "noise_std"): {"noise_at": "END"},
    ("patch", "draws"): {"noise_at": "END"},
    ("patch", "seed"): {"noise_at": "END"},
    ("circuit", "reference"): {"how": "mean"},
    ("split", "reference"): {"edits": "mean blocks.2.O h=1"},
    ("probes", "e"): {"tensors": ["delta_experts"], "blocks": [2]},
    ("probes", "test_labels"): {"test": "language"},
    ("steer", "h"): {"tensor": "O", "direction": "means:answer=are"},
    ("steer", "e"): {"tensor": "delta_experts", "direction": "means:answer=are"},
    ("steer", "when"): {"metrics": ["continuation:2:contains"]},
    ("top", "block"): {"tensor": "x_ffn", "where": {"d": 1}},
    ("top", "direction"): {"tensor": "x_next", "where": None},
}
"""What else an argument takes to mean anything; None: without."""


LIKE: list[tuple[str, dict[str, Any], str, list[Any], str]] = [
    ("ablate", {}, "budget", [10**9, 10**8], "budget"),
    ("patch", {}, "budget", [10**9, 10**8], "budget"),
    ("paths", {}, "budget", [10**9, 10**8], "budget"),
    ("circuit", {}, "budget", [10**9, 10**8], "budget"),
    ("attribute", {}, "budget", [10**9, 10**8], "budget"),
    ("steer", {}, "budget", [10**9, 10**8], "budget"),
    ("attribute", {}, "exact", [True, False], "exact"),
    ("attribute", {}, "steps", [2, 0], "steps"),
    ("norms", {}, "channels", [2, 1], "channels"),
    ("probes", {}, "controls", [["shuffled"], ["random"]], "controls"),
    ("top", {}, "n", [3, 4], "n"),
    ("top", {}, "batch", [32, 16], "batch"),
    ("ablate", {}, "tensors", [["O"], ["V", "O"]], "tensors"),
    ("ablate", {}, "tensors", [["O"], ["attn.hook_z"]], "tensors"),
    ("ablate", {}, "blocks", [[3], [2, 3]], "blocks"),
    ("ablate", {}, "metrics", [["kl"], ["rank", "kl"]], "metrics"),
    ("ablate", {"blocks": None}, "tensors", [["O"], ["blocks.3.O"]], "tensors"),
    ("patch", {}, "by", [["head", "role"], ["role", "head"]], "by"),
    ("scores", {}, "blocks", [[0], [0, 1]], "blocks"),
    ("routing", {}, "blocks", [[1], [1, 2]], "blocks"),
    ("lens", {}, "roles", [["END"], ["S2", "END"]], "roles"),
    ("steer", {}, "doses", [[0.5], [1.0, 0.5]], "doses"),
    ("steer", {"label": "mine"}, "direction", ["token:are", "token:is"], "direction"),
    ("top", {}, "where", [{"f": 1}, {"f": [1, 2]}], "where"),
    ("top", {"block": None}, "tensor", ["blocks.0.h", "blocks.0.mlp.hook_post"], "tensor"),
    ("circuit", {}, "kept", [["blocks.0.O h=1", "blocks.0.O h=2"], ["blocks.0.O h=2", "blocks.0.O h=1"]], "kept"),
    ("split", {}, "edits", ["zero blocks.2.O h=1", "zero blocks.2.attn.hook_z h=1"], "edits"),
    ("paths", {}, "senders", [["blocks.2.O h=1"], ["blocks.2.O h=*"]], "senders"),
    ("ablate", {}, "model.device", ["cpu", "cpu:0"], "model.device"),
    ("ablate", {}, "model.keep", ["expanded", "disk"], "model.keep"),
]
"""Units that hold rows about one thing, and differ in what no column tells."""

IDLE: list[tuple[str, dict[str, Any], str]] = [
    ("patch", {"noise_std": 2.0}, "there is no noise"),
    ("ablate", {"how": "zero", "reference": "job"}, "takes nothing from other prompts"),
    ("circuit", {"how": "zero", "reference": "job"}, "takes nothing from other prompts"),
    ("split", {"reference": "ioi"}, "no edit takes from other prompts"),
    ("steer", {"learn": "job"}, "is not learnt from prompts"),
    ("probes", {"draws": 2, "controls": ["tokens"]}, "'shuffled' is not among the controls"),
]
"""Arguments that would do nothing."""


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models and prompts are loaded once; of prompts as many as have intervals, but where probes need more."""
    load = Prompts.load
    monkeypatch.setattr(Prompts, "load", functools.cache(lambda *a: _some(load(*a))))
    monkeypatch.setattr(HookedModel, "load", LOAD)
    yield
    plt.close("all")


LOAD = functools.cache(HookedModel.load)


def _some(prompts: Prompts) -> Prompts:
    return (
        prompts if prompts.name in ("capital", "language", "continent") else prompts.subset(range(min(9, len(prompts))))
    )


def of(study: str, more: dict[str, Any], key: str, values: list[Any], folder: Path = Path()) -> Spec:
    """A spec of two units."""
    given = {name: value for name, value in {**BASE[study], **more}.items() if value is not None and name != key}
    model, _, inner = key.rpartition("model.")
    grid = {"model": {inner: values}} if model or key.startswith("model.") else {key: values}
    return parse({"study": study, **given, "grid": grid}, study, folder)


def units(spec: Spec) -> list[pd.DataFrame]:
    """The frame of each."""
    shelf, made = runs._Shelf(spec.folder), []
    for unit in spec.units:
        study = STUDIES[spec.study].run
        made.append(study(shelf.model(unit), **shelf.arguments(study, unit)))
    return made


def test_every_argument_of_every_study_is_here() -> None:
    refused = {(study, key) for study, _, key, _, _ in LIKE}
    for name, study in STUDIES.items():
        arguments = set(inspect.signature(study.run).parameters) - {"model", "name", "names", "first"}
        if name == "direct":
            arguments -= {"direction"}  # a tensor, which no spec can say
        assert arguments == set(OTHER[name]) | {key for of, key in refused if of == name and "." not in key}


CASES = [(study, key) for study, of_study in OTHER.items() for key, values in of_study.items() if len(values) > 1]
SHORT = (
    ("patch", "noise_std"),
    ("ablate", "draws"),
    ("ablate", "seed"),
    ("circuit", "random_sets"),
    ("split", "gates"),
    ("top", "direction"),
)


@pytest.mark.parametrize(("study", "key"), CASES, ids=[f"{study}-{key}" for study, key in CASES])
def test_units_that_differ_in_one_argument_are_told_apart(study: str, key: str, tmp_path: Path, long: bool) -> None:
    """Not refused; and rows of one identity are equal in every column, whichever unit is the first."""
    if not long and (study, key) not in SHORT:
        pytest.skip("long: run with --long")
    spec = of(study, NEEDS.get((study, key), {}), key, OTHER[study][key])
    assert len(runs._jobs(spec, runs._Shelf(spec.folder), tmp_path)) == 2
    one, other = units(spec)
    rows = len(frames.join(*runs._once([one, other])))
    assert len(frames.join(*runs._once([other, one]))) == rows
    assert rows > max(len(one), len(other)), "nothing is new: it should be refused"


@pytest.mark.parametrize("case", LIKE, ids=[f"{study}-{key}-{i}" for i, (study, _, key, _, _) in enumerate(LIKE)])
def test_units_that_nothing_tells_apart_are_refused_before_the_first_runs(
    case: tuple[str, dict[str, Any], str, list[Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, more, key, values, says = case
    spec = of(study, more, key, values)
    monkeypatch.setattr(runs, "_do", lambda *_: pytest.fail("a unit was run"))
    with pytest.raises(BadRun, match=rf"^unit 2 of 2 .*: unit 1 of 2 .* differ in {says}, and no column") as told:
        run(spec, tmp_path)
    assert "Leave one out" in str(told.value)
    assert list(tmp_path.iterdir()) == []
    if study == "ablate":
        with pytest.raises(BadRun, match="no column tells one from the other"):
            plan(spec)


@pytest.mark.parametrize(("study", "more", "says"), IDLE, ids=[study for study, _, _ in IDLE])
def test_an_argument_that_would_do_nothing_is_refused(
    study: str, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    given = {**BASE[study], **more}
    with pytest.raises(frames.ProbeError, match=says):
        run(parse({"study": study, **given}, study), tmp_path)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder, word in (("a", "Peru"), ("b", "Japan")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.jsonl").write_text(f'{{"clean": "The capital of {word} is", "answer": "Lima"}}')
    spec = of("scores", {}, "prompts", ["a/mine.jsonl", "b/mine.jsonl"], tmp_path)
    with pytest.raises(BadRun, match="differ in prompts, and no column"):
        run(spec, tmp_path / "run")


def test_a_random_set_is_told_from_a_circuit_of_the_same_nodes(tmp_path: Path) -> None:
    """Each of three heads as a circuit, against the other two as random sets."""
    heads = [[f"blocks.0.O h={i}"] for i in range(3)]
    more = {"among": ["blocks.0.O h=0", "blocks.0.O h=1", "blocks.0.O h=2"], "random_sets": 2}
    df = run(of("circuit", more, "kept", heads), tmp_path)
    assert df is not None
    faithful = df[df["test"] == "faithfulness"]
    assert (faithful["against"].eq("random").fillna(False).sum(), len(faithful)) == (6, 9)
    assert not faithful.duplicated([name for name in faithful if name in IDENTITY]).any()
