"""What studies draw hangs on seeds and texts, never on how prompts stand; and each seed or number of draws is heard."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.ablate import ablate
from experiments.circuit import circuit
from experiments.labels import Truth, lesson
from experiments.patch import patch
from experiments.prompts import Prompts
from experiments.studies import STUDIES
from hooks import HookedModel

MODEL = HookedModel.load()
DIFFERENCE = ["logit_difference"]


@cache
def some(name: str, count: int) -> Prompts:
    """Every so many of a task's prompts, so that groups differ."""
    assert MODEL.tokenizer is not None
    prompts = Prompts.load(name, MODEL.tokenizer)
    return prompts.subset(range(0, len(prompts), max(1, len(prompts) // count)))


JOB, CAPITAL, CONTINENT = some("job", 9), some("capital", 40), some("continent", 99)

ASKED: dict[str, dict[str, Any]] = {
    "ablate": {"prompts": JOB, "tensors": ["V"], "blocks": [1], "metrics": DIFFERENCE},
    "patch": {"prompts": JOB, "by": "role", "blocks": [1], "noise_at": "first", "metrics": DIFFERENCE},
    "paths": {"prompts": JOB, "senders": ["blocks.0.O h=1"], "metrics": DIFFERENCE},
    "circuit": {"prompts": JOB, "kept": ["blocks.3.y_e e=1"], "among": ["blocks.3.y_e e=*"], "random_sets": 0},
    "attribute": {"prompts": JOB, "tensors": ["O"], "blocks": [1], "steps": 0},
    "probes": {
        "prompts": CAPITAL,
        "labels": "answer",
        "of": CONTINENT,
        "tensors": ["x_n"],
        "blocks": [1],
        "width": 8,
    },
    "split": {"prompts": JOB, "edits": "resample blocks.1.V", "metrics": DIFFERENCE},
    "steer": {
        "prompts": JOB,
        "direction": "token:doctor",
        "tensor": "blocks.2.x_next",
        "doses": [0.5],
        "random_directions": 2,
    },
}
"""Every study that takes a seed, so that it draws something."""


def numbers(df: pd.DataFrame) -> pd.DataFrame:
    return df.select_dtypes("number").drop(columns="seed", errors="ignore")


def test_these_are_the_studies_that_draw() -> None:
    takes = {name for name, study in STUDIES.items() if "seed" in inspect.signature(study.run).parameters}
    assert takes == set(ASKED)


@pytest.mark.parametrize(
    ("study", "option"),
    [
        (name, option)
        for name in ASKED
        for option in ("seed", "draws")
        if option in inspect.signature(STUDIES[name].run).parameters
    ],
)
def test_every_seed_and_number_of_draws_is_heard(study: str, option: str) -> None:
    """A number changes with it, the value itself where that is drawn; and none without."""
    run = STUDIES[study].run
    values = [1, 2]
    first, second = (run(MODEL, **ASKED[study], **{option: value}) for value in values)
    assert not numbers(first).equals(numbers(second))
    if study in ("ablate", "circuit", "patch", "split"):
        assert not first["value"].equals(second["value"])
    if option == "seed":
        assert "seed" not in first or set(first["seed"].dropna()) == {1}
        pd.testing.assert_frame_equal(first, run(MODEL, **ASKED[study], seed=1))


# ---- the order of prompts --------------------------------------------------------------------------------------------

ORDER = [3, 0, 4, 1, 2]
FIVE = JOB.subset(range(5))
PER_PROMPT: dict[str, Any] = {"metrics": ["log_probability"], "per_prompt": True, "seed": 3}

DRAWING: dict[str, Callable[[Prompts], pd.DataFrame]] = {
    "resample": lambda p: ablate(MODEL, p, tensors=["O", "y_e"], blocks=[3], **PER_PROMPT),
    "several draws": lambda p: ablate(MODEL, p, tensors=["O"], blocks=[3], by="head", draws=2, **PER_PROMPT),
    "noise": lambda p: ablate(MODEL, p, tensors=["x_n", "s_attn", "S"], blocks=[1], how="noise", **PER_PROMPT),
    "circuit": lambda p: circuit(
        MODEL, p, ["blocks.3.O h=1"], among=["blocks.3.O h=*", "blocks.3.y_e"], random_sets=0, **PER_PROMPT
    ),
    "noise on the clean text": lambda p: patch(MODEL, p, by="role", blocks=[1], noise_at="first", **PER_PROMPT),
}


def by_text(df: pd.DataFrame, prompts: Prompts) -> pd.Series[Any]:
    """A frame's values by prompt's text and cell."""
    df = df.astype(object).assign(text=[prompts.rows[i].clean for i in df["example"]])
    keys = [name for name in ("text", "tensor", "head", "role", "test", "kept", "removed") if name in df]
    return df.fillna(dict.fromkeys(keys, "")).set_index(keys)["value"].astype(float)


@pytest.mark.parametrize("kind", DRAWING)
def test_reordering_prompts_permutes_results_and_another_prompt_changes_none(kind: str) -> None:
    """Nor does the order of the reference prompts."""
    assert FIVE.reference is not None
    longest = max(JOB.rows[5:], key=lambda prompt: len(prompt.tokens))
    reference = FIVE.reference.subset(range(len(FIVE.reference))[::-1])
    other = {
        "turned": FIVE.subset(ORDER),
        "beside another": replace(FIVE, rows=(longest, *FIVE.rows)),
        "alone": FIVE.subset([2]),
        "of a turned reference": replace(FIVE, reference=reference),
    }
    found = by_text(DRAWING[kind](FIVE), FIVE)
    assert found.index.is_unique
    for what, prompts in other.items():
        made = by_text(DRAWING[kind](prompts), prompts)
        both = found.index.intersection(made.index)
        assert len(both) == len(found) * min(len(prompts), 5) // 5, what
        np.testing.assert_allclose(made[both], found[both], atol=2e-4, err_msg=what)


def test_low_precision_draws_its_rounding_by_text() -> None:
    """The noise worlds of a sweep: a prompt's floor is the same in any order."""
    model = HookedModel.load(dtype=torch.bfloat16)
    asked: dict[str, Any] = {"tensors": ["O"], "blocks": [1], "metrics": ["log_probability"], "per_prompt": True}
    floors = []
    for prompts in (FIVE, FIVE.subset(ORDER)):
        df = ablate(model, prompts, how="zero", **asked)
        texts = [prompts.rows[i].clean for i in df["example"]]
        floors.append(pd.Series(df["noise_floor"].to_numpy(float), index=texts))
    assert floors[0].min() > 0
    np.testing.assert_allclose(floors[1][floors[0].index], floors[0], rtol=1e-3)


def test_shuffled_labels_are_the_same_in_any_order() -> None:
    """Folds go by groups' names, and within a group rows by their texts."""
    prompts = some("capital", 60)
    values = np.arange(len(prompts), dtype=float)
    order = np.random.default_rng(1).permutation(len(prompts))
    one, other = (
        lesson([prompts.subset(rows)], Truth(values[rows], []), 5, 3, 7) for rows in (np.arange(len(prompts)), order)
    )
    np.testing.assert_array_equal(other.targets, one.targets[order])
    np.testing.assert_array_equal(other.fold, one.fold[order])
