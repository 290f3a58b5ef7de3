"""The room's own names, found lazily."""

import pytest

import experiments


def test_names_are_where_they_are_said_to_be() -> None:
    from experiments import METRICS, Prompts, metrics, prompts

    assert METRICS is metrics.METRICS
    assert Prompts is prompts.Prompts
    assert set(experiments.__all__) <= set(dir(experiments))
    assert all(hasattr(experiments, name) for name in dir(experiments))


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'experiments' has no attribute 'frobs'"):
        _ = experiments.frobs
