"""Specs: what they say, what they refuse, and that the functions' signatures are the only list of options."""

import inspect
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from experiments import spec
from experiments.ablate import ablate
from experiments.prompts import Prompts
from experiments.spec import BadSpec, Spec, parse, read, shipped, that_take
from experiments.studies import STUDIES, Study
from hooks import HookedModel
from probe.errors import ProbeError

ABLATE: dict[str, Any] = {"study": "ablate", "prompts": "ioi"}


def labels(made: Spec) -> list[str]:
    return [unit.label for unit in made.units]


def test_a_spec_is_a_call_with_its_defaults() -> None:
    (unit,) = parse({**ABLATE, "tensors": ["O"], "model": {"dtype": "bfloat16"}}).units
    assert unit.label == ""
    assert unit.model == {"dtype": "bfloat16"}
    known = inspect.signature(ablate).parameters
    assert set(unit.arguments) == set(known) - {"model", "name"}
    changed = {key: value for key, value in unit.arguments.items() if value != known[key].default}
    assert changed == {"prompts": "ioi", "tensors": ["O"]}


def test_a_grid_is_the_product_of_its_lists() -> None:
    grid = {"by": ["head", "role"], "seed": [0, 1, 2]}
    made = parse({**ABLATE, "grid": grid})
    assert [(u.arguments["by"], u.arguments["seed"]) for u in made.units] == list(product(*grid.values()))
    assert labels(made)[:2] == ["by=head seed=0", "by=head seed=1"]


def test_units_of_one_model_stand_together() -> None:
    grid = {"seed": [0, 1], "model": {"dtype": ["float32", "bfloat16"]}}
    made = parse({**ABLATE, "grid": grid})
    assert [unit.model["dtype"] for unit in made.units] == ["float32"] * 2 + ["bfloat16"] * 2
    assert labels(made)[0] == "seed=0 model.dtype=float32"


def test_a_lone_value_is_a_list_of_one() -> None:
    made = parse({**ABLATE, "metrics": "kl", "grid": {"tensors": ["O", ["V", "A"]], "blocks": [0, 3]}})
    assert [(u.arguments["tensors"], u.arguments["blocks"]) for u in made.units] == [
        (["O"], [0]),
        (["O"], [3]),
        (["V", "A"], [0]),
        (["V", "A"], [3]),
    ]
    assert made.units[0].arguments["metrics"] == ["kl"]
    assert labels(made)[2] == "tensors=V+A blocks=0"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "study is None; it should be a study's name. There are ablate"),
        ({"study": "ablat"}, "study is 'ablat'.*Nearest: ablate"),
        ({"study": ["ablate"]}, "study is"),
        ({"study": "ablate"}, "prompts is missing; ablate can't do without"),
        ({**ABLATE, "tensrs": ["O"]}, "tensrs is no key of a spec for ablate. Nearest: tensors"),
        ({**ABLATE, "grid": {"sed": [0]}}, "sed is no key of a spec for ablate. Nearest: seed"),
        ({**ABLATE, "channels": 1}, "channels is no key of a spec for ablate"),
        ({**ABLATE, "name": "mine"}, "name is no key"),
        ({**ABLATE, "model": {"dtyp": "float32"}}, "model.dtyp is no key.*Nearest: model.dtype"),
        ({**ABLATE, "model": {"dtype": "fp32"}}, "model.dtype is 'fp32': input should be 'float32'"),
        ({**ABLATE, "model": "tiny"}, r"model is 'tiny'; it should be a table, \[model\]"),
        ({**ABLATE, "grid": []}, r"grid is \[\]; it should be a table"),
        ({**ABLATE, "by": "heads"}, "by is 'heads': input should be 'head'"),
        ({**ABLATE, "seed": "0"}, "seed is '0': input should be a valid integer"),
        ({**ABLATE, "seed": True}, "seed is True"),
        ({**ABLATE, "seed": 0.5}, "seed is 0.5"),
        ({**ABLATE, "per_prompt": 1}, "per_prompt is 1"),
        ({**ABLATE, "tensors": [3]}, r"tensors is \[3\]: input should be a valid string"),
        ({**ABLATE, "prompts": ["ioi"]}, r"prompts is \['ioi'\]"),
        ({**ABLATE, "grid": {"by": "head"}}, "grid: by is 'head'; it should be a list"),
        ({**ABLATE, "grid": {"by": []}}, r"grid: by is \[\]"),
        ({**ABLATE, "grid": {"model": {"dtype": "float32"}}}, "grid: dtype is 'float32'; it should be a list"),
        ({**ABLATE, "grid": {"model": []}}, r"grid.model is \[\]; it should be a table"),
        ({**ABLATE, "grid": {"blocks": [0, [0]]}}, r"grid: blocks has \[0\] twice"),
        ({**ABLATE, "seed": 0, "grid": {"seed": [1]}}, "seed is given twice"),
        (
            {**ABLATE, "model": {"dtype": "float32"}, "grid": {"model": {"dtype": ["float16"]}}},
            "model.dtype is given twi",
        ),
    ],
)
def test_what_a_spec_cannot_mean_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(BadSpec, match=why) as error:
        parse(given)
    assert isinstance(error.value, ProbeError)


def odd(
    model: HookedModel,
    prompts: Prompts,
    *,
    direction: torch.Tensor | None = None,
    f: Callable[[int], int] | None = None,
    alphas: Sequence[float] = (1.0,),
    roles: Sequence[str | int] = ("END",),
    others: Prompts | None = None,
    where: Path | None = None,
    pair: tuple[int, ...] = (1, 2),
    name: str | None = None,
) -> pd.DataFrame:
    raise NotImplementedError


def test_options_are_those_of_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "odd", Study(odd, lambda df, arguments: iter(())))
    given = {"study": "odd", "prompts": "ioi", "alphas": [1, 2.5], "roles": ["S1", 3], "others": "job", "where": "here"}
    (unit,) = parse({**given, "pair": [4, 5, 6]}).units
    assert unit.arguments["alphas"] == [1.0, 2.5]
    assert unit.arguments["pair"] == [4, 5, 6]
    assert that_take(Prompts, odd) == {"prompts", "others"}
    for key in ("direction", "f"):
        with pytest.raises(BadSpec, match=f"{key} can't be said in TOML"):
            parse({**given, key: "x"})


@pytest.mark.parametrize("name", shipped())
def test_shipped_specs_are_found_by_name(name: str) -> None:
    assert read(name).units
    assert read(spec.SHIPPED / f"{name}.toml") == read(name)


def test_the_modules_own_example(tmp_path: Path) -> None:
    assert spec.__doc__ is not None
    path = tmp_path / "mine.toml"
    path.write_text(spec.__doc__.split(".. code-block:: toml")[1].split("\n\nKeys, values")[0].replace("\n    ", "\n"))
    made = read(path)
    assert (made.name, made.folder, len(made.units)) == ("mine", tmp_path, 4)


def test_files_that_are_no_spec(tmp_path: Path) -> None:
    with pytest.raises(BadSpec, match=r"there is no spec 'ablat'. Nearest: ablate. A file of yours ends in .toml"):
        read("ablat")
    with pytest.raises(BadSpec, match=r"none.toml: can't be read \(No such file"):
        read(tmp_path / "none.toml")
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbfstudy = 'ablate'\nprompts = 'ioi'")
    assert read(path).study == "ablate", "a byte order mark says nothing"
    path = tmp_path / "bad.toml"
    for text, why in (("study = ", "not TOML: "), ("study = 'ablate'\nbys = 'head'", "bys is no key.*Nearest: by")):
        path.write_text(text)
        with pytest.raises(BadSpec, match=rf"bad.toml: {why}"):
            read(path)
