"""The room's own names, found lazily."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import experiments

ROOT = Path(__file__).parents[2]


def test_names_are_where_they_are_said_to_be() -> None:
    from experiments import METRICS, Ask, Prompts, asking, metrics, prompts

    assert Ask is asking.Ask
    assert METRICS is metrics.METRICS
    assert Prompts is prompts.Prompts
    assert set(experiments.__all__) <= set(dir(experiments))
    assert all(hasattr(experiments, name) for name in dir(experiments))


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'experiments' has no attribute 'frobs'"):
        _ = experiments.frobs


def texts() -> dict[str, str]:
    """All that is written for readers; a notebook's code has its newlines and quotes escaped."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    return {str(path): path.read_text(encoding="utf-8").replace("\\n", "\n") for path in paths}


def test_what_the_docs_import_is_there() -> None:
    """Every import of ours that the README, the documents and the notebooks show."""
    found = 0
    for place, text in texts().items():
        for module, names in re.findall(r"from ((?:experiments|hooks|probe)[\w.]*) import ([\w, ]+)", text):
            for name in names.split(","):
                bare = name.split(" as ")[0].strip()
                assert hasattr(import_module(module), bare), f"{place}: from {module} import {bare}"
                found += 1
    assert found > 20


def test_what_the_docs_name_is_there() -> None:
    """Every dotted name between backticks, and every file of ours."""
    found = 0
    for place, text in texts().items():
        for dotted in re.findall(r"`((?:experiments|hooks|probe)\.[\w.]+)`", text):
            room, *names = dotted.split(".")
            here = import_module(room)
            for i, name in enumerate(names, 1):
                module = ".".join([room, *names[:i]])
                here = getattr(here, name) if hasattr(here, name) else import_module(module)
            found += 1
            assert here is not None, f"{place}: {dotted}"
    assert found
