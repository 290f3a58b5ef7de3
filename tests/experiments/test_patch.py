"""Activation patching against patches done by hand, by plain hooks, prompt by prompt; what it finds in the tiny model,
with controls; and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from experiments import frames
from experiments.ablate import ablate
from experiments.cli import app
from experiments.metrics import BadMetric
from experiments.patch import outlook, patch
from experiments.prompts import Prompt, Prompts
from hooks import HookedModel, noise
from probe.errors import BadEdit, BadText, OutOfRange, UnknownDim, UnknownTensor

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
TOKENIZER = MODEL.tokenizer
DIFFERENCE = ["logit_difference"]
BOTH = pytest.mark.parametrize("direction", ["denoise", "noise"])

Change = Callable[[Tensor, Tensor], Tensor]
"""The base's value of one prompt, [1 T ...], and the source's → the patched one."""


@cache
def task(name: str) -> Prompts:
    return Prompts.load(name, TOKENIZER)


def some(name: str, n: int) -> Prompts:
    whole = task(name)
    by_shape = list(whole.shapes().values())
    return whole.subset(sorted(rows[i] for i in range(n) for rows in by_shape if i < len(rows))[:n])


JOB, IOI = some("job", 6), some("ioi", 4)


def cell(df: pd.DataFrame, metric: str = "logit_difference", **columns: Any) -> dict[str, Any]:
    """The one row of these columns."""
    here = df[df["metric"] == metric]
    for name, value in columns.items():
        here = here[here[name].eq(value).fillna(False)]
    (row,) = here.to_dict("records")
    return row


# ---- by hand ---------------------------------------------------------------------------------------------------------


def difference(prompt: Prompt, logits: Tensor) -> float:
    assert prompt.answer is not None
    assert prompt.wrong is not None
    answer, wrong = prompt.answer.tokens[0][0], prompt.wrong.tokens[0][0]
    return float(logits[0, -1, answer].double() - logits[0, -1, wrong].double())


def by_hand(prompts: Prompts, direction: str, changes: Mapping[str, Callable[[Prompt, Prompt], Change]]) -> Any:
    """Value, base and source of each prompt, [3, prompts]: three plain runs each, one of them hooked at these sites."""
    rows = []
    for clean in prompts.rows:
        base, source = (clean.swapped(), clean) if direction == "denoise" else (clean, clean.swapped())
        with torch.no_grad():
            theirs, cache = MODEL.run_with_cache(torch.tensor([source.tokens]), names_filter=list(changes))
            ours = MODEL(torch.tensor([base.tokens]))
            hooks = [(site, hooked(change(base, source), cache[site])) for site, change in changes.items()]
            edited = MODEL.run_with_hooks(torch.tensor([base.tokens]), fwd_hooks=hooks)
        rows.append([difference(clean, logits) for logits in (edited, ours, theirs)])
    return np.array(rows).T


def hooked(change: Change, theirs: Tensor) -> Any:
    return lambda value, hook: change(value, theirs)


def at(role: str, *where: Any) -> Callable[[Prompt, Prompt], Change]:
    """The source's values at its span, to the base's."""

    def of(base: Prompt, source: Prompt) -> Change:
        here, there = list(base.spans[role]), list(source.spans[role])

        def change(value: Tensor, theirs: Tensor) -> Tensor:
            value[(slice(None), here, *where)] = theirs[(slice(None), there, *where)]
            return value

        return change

    return of


def agrees(row: Mapping[str, Any], expected: Any) -> None:
    """A row of the frame is what was done by hand."""
    value, base, source = expected
    assert row["value"] == pytest.approx(value.mean(), abs=2e-4)
    assert row["base"] == pytest.approx(base.mean(), abs=2e-4)
    assert row["effect"] == pytest.approx((value - base).mean(), abs=2e-4)
    assert row["recovered"] == pytest.approx((value - base).mean() / (source - base).mean(), abs=2e-5)


@BOTH
def test_direction_of_a_patch_unclear(direction: Any) -> None:
    """Denoising starts from corrupt and takes from clean, noising the reverse; base, source and direction say so."""
    df = patch(MODEL, JOB, tensors=["x_n"], by="role", direction=direction, metrics=DIFFERENCE)
    told = {"denoise": "clean", "noise": "corrupt"}[direction]
    assert (set(df["direction"]), set(df["source"]), set(df["edit"])) == ({direction}, {told}, {"patch"})
    assert (df["base"] < 0).all() if direction == "denoise" else (df["base"] > 0).all()
    for block, role in product(range(4), ("first", "last", "END")):
        agrees(cell(df, block=block, role=role), by_hand(JOB, direction, {f"blocks.{block}.x_n": at(role)}))
    assert df["recovered"].max() > 0.9, "1 is all that swapping the prompt does, in both directions"
    assert df["recovered"].min() > -0.1


@BOTH
def test_heads_at_a_place(direction: Any) -> None:
    df = patch(MODEL, JOB, tensors=["O"], blocks=[2, 3], by="head", at="END", direction=direction, metrics=DIFFERENCE)
    assert set(df["role"]) == {"END"}
    for block, head in product((2, 3), range(MODEL.dims.h)):
        agrees(cell(df, block=block, head=head), by_hand(JOB, direction, {f"blocks.{block}.O": at("END", head)}))
    assert df["recovered"].max() > 0.2


@BOTH
def test_a_window_of_blocks_is_patched_together(direction: Any) -> None:
    df = patch(MODEL, JOB, tensors=["delta_ffn"], by="role", window=2, direction=direction, metrics=DIFFERENCE)
    assert (set(df["edit"]), sorted(set(df["block"]))) == ({"patch of 2 blocks"}, [0, 1, 2])
    for block in (1, 2):
        sites = {f"blocks.{b}.delta_ffn": at("last") for b in (block, block + 1)}
        agrees(cell(df, block=block, role="last"), by_hand(JOB, direction, sites))
    one = patch(MODEL, JOB, tensors=["delta_ffn"], by="role", direction=direction, metrics=DIFFERENCE)
    both = cell(df, block=2, role="last")["effect"]
    assert abs(both - cell(one, block=2, role="last")["effect"]) > 0.01 or abs(both) > 0.1


def experts(expert: int, cache: Callable[[Prompt], Tensor]) -> Callable[[Prompt, Prompt], Change]:
    """One expert's contribution at END: what it adds in the base is taken away, what it adds in the source is added."""

    def of(base: Prompt, source: Prompt) -> Change:
        theirs, ours = cache(source), cache(base)

        def change(value: Tensor, other: Tensor) -> Tensor:
            mine = ours[0, -1] == expert
            value[0, -1, mine] = 0
            value[0, -1, 0] += other[0, -1, theirs[0, -1] == expert].sum(0)
            return value

        return change

    return of


@BOTH
def test_an_expert_that_only_the_source_chose_joins_the_sum(direction: Any) -> None:
    three = JOB.subset(range(3))
    df = patch(MODEL, three, tensors=["delta_experts"], blocks=[3], by="expert", at="END", direction=direction)

    def chosen(prompt: Prompt) -> Tensor:
        return MODEL.run(torch.tensor([prompt.tokens]), want="blocks.3.experts")["blocks.3.experts"]

    for expert in range(MODEL.dims.e):
        expected = by_hand(three, direction, {"blocks.3.delta_experts": experts(expert, chosen)})
        agrees(cell(df, expert=expert), expected)
    sides = [chosen(prompt)[0, -1].tolist() for prompt in (*three.rows, *three.swapped().rows)]
    never = set(range(MODEL.dims.e)) - {e for side in sides for e in side}
    assert all(cell(df, expert=e)["effect"] == 0 == cell(df, expert=e)["touched"] for e in never)
    assert df["effect"].abs().max() > 1


@BOTH
def test_texts_of_unequal_length_are_aligned_by_their_spans(direction: Any) -> None:
    rows = [
        {"clean": "The capital of Peru is", "corrupt": "When the capital of Mongolia is"}
        | {
            "spans": {"subject": [15, 19]},
            "corrupt_spans": {"subject": [20, 28]},
            "answer": "Lima",
            "wrong": "Budapest",
        },
        {"clean": "The capital of Hungary is", "corrupt": "capital of Mongolia is"}
        | {
            "spans": {"subject": [15, 22]},
            "corrupt_spans": {"subject": [11, 19]},
            "answer": "Budapest",
            "wrong": "Lima",
        },
    ]
    prompts = Prompts.of(rows, TOKENIZER)
    df = patch(MODEL, prompts, tensors=["x_n"], by="role", direction=direction, metrics=DIFFERENCE)
    for block, role in product(range(4), ("subject", "END")):
        agrees(cell(df, block=block, role=role), by_hand(prompts, direction, {f"blocks.{block}.x_n": at(role)}))
    end = patch(MODEL, prompts, tensors=["O"], by="head", at="END", direction=direction, metrics=DIFFERENCE)
    agrees(cell(end, block=3, head=1), by_hand(prompts, direction, {"blocks.3.O": at("END", 1)}))


def test_clean_and_corrupt_prompts_of_different_lengths_accepted() -> None:
    """By position they are refused, before anything is run: no position of the one is one of the other."""
    row = {"clean": "The capital of Peru is", "corrupt": "When the capital of Mongolia is", "answer": "Lima"}
    longer = Prompts.of([row | {"spans": {"subject": [15, 19]}, "corrupt_spans": {"subject": [20, 28]}}], TOKENIZER)
    for by in ("position", None, ["head", "position"]):
        with pytest.raises(BadEdit, match=r"row 0: clean and corrupt are of 7 and 6 tokens.*go by role"):
            patch(MODEL, longer, tensors=["O"], by=by)
    with pytest.raises(BadText, match="clean and corrupt have 6 and 7 tokens and part at token 1"):
        Prompts.of([row], TOKENIZER)
    wide = {"subject": [0, 14]}, {"subject": [0, 8]}
    uneven = Prompts.of(
        [
            {"clean": "The capital of Peru is", "corrupt": "The capital is"}
            | dict(zip(("spans", "corrupt_spans"), wide, strict=True))
        ],
        TOKENIZER,
    )
    with pytest.raises(BadEdit, match=r"names \d positions here and \d in the source.*like subject\[-1\]"):
        patch(MODEL, uneven, by="role", metrics=["kl"])
    assert len(patch(MODEL, uneven, by=None, at="subject[-1]", metrics=["kl"])) == 4


# ---- averages --------------------------------------------------------------------------------------------------------


def test_mean_of_ratios_instead_of_ratio_of_means() -> None:
    df = patch(MODEL, IOI, tensors=["O"], blocks=[0], by="head", at="S2", metrics=DIFFERENCE)
    each = patch(MODEL, IOI, tensors=["O"], blocks=[0], by="head", at="S2", metrics=DIFFERENCE, per_prompt=True)
    for head in range(MODEL.dims.h):
        value, base, source = by_hand(IOI, "denoise", {"blocks.0.O": at("S2", head)})
        ratios = (value - base) / (source - base)
        here = each[each["head"] == head]
        np.testing.assert_allclose(here["recovered"].astype(float), ratios, atol=1e-4)
        row = cell(df, head=head)
        assert row["recovered"] == pytest.approx((value - base).mean() / (source - base).mean(), abs=1e-5)
        assert abs(row["recovered"] - ratios.mean()) > 1e-5, "which is something else"


def test_groups_are_the_units_of_the_ratio() -> None:
    rows = [
        {"clean": f"{name} Jones is a", "corrupt": f"{other} Jones is a", "answer": "teacher", "wrong": "nurse"}
        | {"group": group, "spans": {"first": [0, len(name)]}}
        for name, other, group in (("Paul", "Lucy", "p"), ("Anna", "Paul", "q"), ("Tom", "Lucy", "q"))
    ]
    three = Prompts.of(rows, TOKENIZER)
    df = patch(MODEL, three, by=None, at="first", blocks=[1], metrics=DIFFERENCE)
    value, base, source = by_hand(three, "denoise", {"blocks.1.x_n": at("first")})
    effect, gap = value - base, source - base
    expected = (effect[0] + (effect[1] + effect[2]) / 2) / (gap[0] + (gap[1] + gap[2]) / 2)
    (row,) = df.to_dict("records")
    assert row["n"] == 2
    assert row["recovered"] == pytest.approx(expected, abs=1e-5)
    assert "ci_low" not in df, "of two units there is no interval"
    assert row["p_family"] == "too few units (2 of 8)"


def test_pairs_that_hardly_differ_are_counted_and_kept_out_of_rows_by_prompt() -> None:
    words = {key: getattr(task("capital").rows[6], key) for key in ("answer", "wrong")}
    beside = replace(JOB.rows[0], **words, group="beside")  # two cities: neither job has much to do with them
    prompts = replace(JOB, rows=(*JOB.rows, beside))
    df = patch(MODEL, prompts, by="role", blocks=[0], metrics=DIFFERENCE)
    assert set(df["small_gaps"]) == {1}
    each = patch(MODEL, prompts, by="role", blocks=[0], metrics=DIFFERENCE, per_prompt=True)
    assert each.loc[each["example"] == 6, "recovered"].isna().all()
    assert each.loc[each["example"] < 6, "recovered"].notna().all()
    assert each.loc[each["example"] == 6, "effect"].abs().max() > 0
    clean = patch(MODEL, JOB, by="role", blocks=[0], metrics=DIFFERENCE)
    assert set(clean["small_gaps"]) == {0}
    assert cell(df, role="first")["recovered"] == pytest.approx(1, abs=1e-3), "of the means they stay a part"


def test_prompts_that_the_model_gets_wrong_are_reported() -> None:
    lies = [replace(row, answer=row.wrong, wrong=row.answer) for row in JOB.rows[:2]]
    prompts = replace(JOB, rows=(*lies, *JOB.rows[2:]))
    for direction in ("denoise", "noise"):
        df = patch(MODEL, prompts, by="role", blocks=[0], metrics=DIFFERENCE, direction=direction)
        assert set(df["mistaken"]) == {2}
        each = patch(MODEL, prompts, by="role", blocks=[0], metrics=DIFFERENCE, direction=direction, per_prompt=True)
        assert dict(zip(each["example"], each["mistaken"], strict=True)) == {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0}
        assert set(patch(MODEL, JOB, by="role", blocks=[0], direction=direction)["mistaken"]) == {0}
    assert "mistaken" not in patch(MODEL, JOB, by="role", blocks=[0], metrics=["kl"])


# ---- noise -----------------------------------------------------------------------------------------------------------


@BOTH
def test_the_corrupt_run_may_be_noise_on_the_clean_one(direction: Any) -> None:
    """Gaussian, on the embedding of a span, in units of the prompt's embeddings' own spread; one draw for each seed."""
    df = patch(MODEL, JOB, by="role", blocks=[1], noise_at="first", noise_std=2.0, seed=5, direction=direction)
    rows, noises = [], []
    for prompt in JOB.rows:
        place, end = prompt.spans["first"][0], len(prompt.tokens)
        plain = MODEL.run(torch.tensor([prompt.tokens]), want="x_0")["x_0"]
        noisy_run = MODEL.run(torch.tensor([prompt.tokens]), want="x_0", edits=[noise("x_0", std=1.0, seed=5, T=place)])
        drawn = noisy_run["x_0"][0, place] - plain[0, place]
        noises.append(drawn)
        scaled = 2.0 * plain.std() * drawn

        def corrupt(value: Tensor, hook: Any, more: Tensor = scaled, place: int = place) -> Tensor:
            value[0, place] += more
            return value

        def put(value: Tensor, hook: Any, of: Tensor, end: int = end) -> Tensor:
            value[0, end - 1] = of[0, end - 1]
            return value

        ids = torch.tensor([prompt.tokens])
        with torch.no_grad():
            with MODEL.hooks(fwd_hooks=[("x_0", corrupt)]):
                noisy, noised = MODEL.run_with_cache(ids)
            clean, cached = MODEL.run_with_cache(ids)
            other = (cached if direction == "denoise" else noised)["blocks.1.x_n"]
            hooks: list[Any] = [("x_0", corrupt)] if direction == "denoise" else []
            edited = MODEL.run_with_hooks(ids, fwd_hooks=[*hooks, ("blocks.1.x_n", partial(put, of=other))])
        base, source = (noisy, clean) if direction == "denoise" else (clean, noisy)
        rows.append([difference(prompt, logits) for logits in (edited, base, source)])
    agrees(cell(df, role="END"), np.array(rows).T)
    assert torch.stack(noises).std() == pytest.approx(1, abs=0.1)
    assert torch.stack(noises).mean() == pytest.approx(0, abs=0.1)
    assert set(df["source"]) == {f"{'clean' if direction == 'denoise' else 'corrupt'}, noise at first"}
    assert set(df["seed"]) == {5}
    assert abs(cell(df, role="first")["effect"]) > 1


def test_several_draws_are_averaged_before_the_ratio_is_taken() -> None:
    options: dict[str, Any] = {"by": "role", "blocks": [1], "noise_at": "first", "metrics": DIFFERENCE}
    both = patch(MODEL, JOB, **options, draws=2, seed=3)
    one, other = (patch(MODEL, JOB, **options, seed=seed) for seed in (3, 4))
    assert not np.allclose(one["base"], other["base"])
    for name in ("value", "base", "effect"):
        np.testing.assert_allclose(both[name], (one[name] + other[name]) / 2, rtol=1e-6)
    assert set(both["seed"]) == {3}
    assert set(both["options"]) == {"draws=2"}


def test_rows_of_a_prompt_get_the_same_noise() -> None:
    """Of two answers that part at once, each is read in a row of its own; of one of them alone in one row."""
    prompts = Prompts.of(
        [{"clean": "The capital of Peru is", "answer": "Lima and", "wrong": "Budapest and"}], TOKENIZER
    )
    options: dict[str, Any] = {"by": None, "at": "END", "blocks": [3], "noise_at": 4, "noise_std": 0.5}
    both = patch(MODEL, prompts, metrics=["log_probability", "logit_difference"], **options)
    alone = patch(MODEL, prompts, metrics=["log_probability"], **options)
    assert cell(both, "log_probability")["base"] == pytest.approx(cell(alone, "log_probability")["base"], abs=1e-4)
    swapped = replace(
        prompts, rows=(replace(prompts.rows[0], answer=prompts.rows[0].wrong, wrong=prompts.rows[0].answer),)
    )
    other = patch(MODEL, swapped, metrics=["log_probability"], **options)
    expected = cell(alone, "log_probability")["base"] - cell(other, "log_probability")["base"]
    assert cell(both)["base"] == pytest.approx(expected, abs=1e-3)


# ---- what it finds ---------------------------------------------------------------------------------------------------


@cache
def stream(name: str, direction: Any, labels: str = "own") -> pd.DataFrame:
    """What the residual stream carries at each span: before blocks 0 to 3, and as ``place`` 4 after the last."""
    prompts = task(name) if labels == "own" else shuffled(task(name))
    df = patch(MODEL, prompts, tensors=["x_n", "x_next"], by="role", direction=direction, metrics=DIFFERENCE)
    return df.assign(place=df["block"] + (df["tensor"] == "x_next"))[(df["tensor"] == "x_n") | (df["block"] == 3)]


def shuffled(prompts: Prompts) -> Prompts:
    """Each prompt with the answers of another that has neither of its own."""
    rows = list(prompts.rows)
    n = len(rows)
    made = []
    for i, row in enumerate(rows):
        own = {row.answer.tokens, row.wrong.tokens}  # type: ignore[union-attr]
        others = (rows[(i + j) % n] for j in range(n // 3, n + n // 3))
        other = next(r for r in others if not own & {r.answer.tokens, r.wrong.tokens})  # type: ignore[union-attr]
        made.append(replace(row, answer=other.answer, wrong=other.wrong))
    return replace(prompts, rows=tuple(made))


def along(df: pd.DataFrame, role: str) -> list[float]:
    here = df[df["role"] == role].sort_values("place")
    return [float(x) for x in here["recovered"]]


@BOTH
def test_facts_go_from_the_subject_to_the_last_position(direction: Any) -> None:
    for name in ("capital", "language"):
        df = stream(name, direction)
        *before, after = along(df, "subject")
        assert min(before) > 0.9
        assert abs(after) < 0.02
        *early, late = along(df, "END")
        assert max(map(abs, early)) < 0.1
        assert late == pytest.approx(1, abs=0.01)


@BOTH
def test_ioi_goes_from_s2_to_end(direction: Any) -> None:
    df = stream("ioi", direction)
    *before, after = along(df, "S2")
    assert min(before) > 0.95
    assert abs(after) < 0.02
    *early, late = along(df, "END")
    assert max(map(abs, early)) < 0.05
    assert late == pytest.approx(1, abs=0.01)
    for role in ("IO", "S1"):  # the controls: they are the same in both prompts
        assert along(df, role) == [0.0] * 5


@BOTH
@pytest.mark.parametrize("name", ["job", "home"])
def test_facts_about_persons_make_three_stops(name: str, direction: Any) -> None:
    df = stream(name, direction)
    first, last, end = (along(df, role) for role in ("first", "last", "END"))
    assert min(first[:3]) > 0.9
    assert max(map(abs, first[3:])) < 0.1
    assert last[3] > 0.8
    assert max(map(abs, (*last[:3], last[4]))) < 0.1
    assert max(map(abs, end[:4])) < 0.15
    assert end[4] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", ["capital", "ioi", "job"])
def test_shuffled_labels_show_nothing(name: str) -> None:
    """With the answers of other prompts there is no gap that a patch could close."""
    own, other = stream(name, "denoise"), stream(name, "denoise", "shuffled")
    assert other["effect"].abs().max() < 0.25 * own["effect"].abs().max()
    assert own["effect"].abs().max() > 10
    assert (other["p"] > 0.001).sum() > (own["p"] > 0.001).sum() or other["effect"].abs().max() < 1


def found(name: str, direction: Any, half: int, **asked: Any) -> pd.DataFrame:
    """Patches on every other prompt of a task."""
    prompts = task(name)
    return patch(MODEL, prompts.subset(range(half, len(prompts), 2)), direction=direction, metrics=DIFFERENCE, **asked)


def held_out(name: str, direction: Any, top: int, **asked: Any) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The cells that recover most on one half of the prompts, looked at on the other half; and all others there."""
    chosen, test = (found(name, direction, half, **asked) for half in (0, 1))
    keys = [key for key in ("block", "head", "expert", "role") if key in chosen]
    best = chosen.nlargest(top, "recovered")[keys].apply(tuple, axis=1)
    is_best = test[keys].apply(tuple, axis=1).isin(list(best))
    return test[is_best], test[~is_best]


@BOTH
def test_one_head_moves_what_ioi_hangs_on(direction: Any) -> None:
    best, others = held_out("ioi", direction, 1, tensors=["O"], by="head", at="END")
    assert best["block"].tolist() == [3]
    assert float(best["recovered"].iloc[0]) > 0.9
    assert float(best["ci_low"].iloc[0]) > 0.9
    assert others["recovered"].abs().max() < 0.05, "the controls: every other head"
    random = others.sample(3, random_state=0)
    assert random["effect"].abs().max() < 0.05 * best["effect"].abs().max()


@BOTH
@pytest.mark.parametrize("name", ["job", "home"])
def test_one_head_brings_the_first_name_to_the_last_and_two_bring_it_to_the_end(name: str, direction: Any) -> None:
    best, others = held_out(name, direction, 1, tensors=["O"], by="head", at="last")
    assert best["block"].tolist() == [2]
    assert float(best["recovered"].iloc[0]) > 0.75
    assert others["recovered"].abs().max() < 0.05
    best, others = held_out(name, direction, 2, tensors=["O"], by="head", at="END")
    assert best["block"].tolist() == [3, 3]
    assert best["recovered"].min() > 0.2
    assert others["recovered"].abs().max() < 0.25
    assert others[others["block"] < 3]["recovered"].abs().max() < 0.05


@BOTH
@pytest.mark.parametrize("name", ["job", "home"])
def test_the_experts_that_hold_facts_about_persons(name: str, direction: Any) -> None:
    """They stand at the last name in block 2 and at END in block 3, and others of the same load hold nothing."""
    for role, block, top in (("last", 2, 3), ("END", 3, 2)):
        best, others = held_out(name, direction, top, tensors=["delta_experts"], by="expert", at=role)
        assert set(best["block"]) == {block}
        assert best["recovered"].min() > 0.03
        assert best["recovered"].max() > 0.1
        assert best["recovered"].sum() > 0.25
        assert best["ci_low"].min() > 0.01
        assert others["recovered"].abs().max() < 0.06
    for elsewhere in ("first", "END"):
        quiet = found(name, direction, 1, tensors=["delta_experts"], by="expert", at=elsewhere, blocks=[2])
        assert quiet["recovered"].abs().max() < 0.03, "the experts of block 2 anywhere else"


def test_what_a_task_needs_of_block_3_is_its_own_expert() -> None:
    by_task = {
        name: patch(MODEL, task(name), tensors=["delta_experts"], by="expert", at="END", blocks=[3], metrics=DIFFERENCE)
        for name in ("job", "home", "ioi")
    }
    top = {name: int(df.loc[df["recovered"].idxmax(), "expert"]) for name, df in by_task.items()}
    assert top["job"] != top["home"]
    for name, other in (("job", "home"), ("home", "job")):
        own = cell(by_task[name], expert=top[name])
        theirs = cell(by_task[other], expert=top[name])
        assert own["ci_low"] > 0.1 > 2 * abs(theirs["recovered"])
    assert by_task["ioi"]["recovered"].abs().max() < 0.04, "which needs no expert"


@pytest.mark.parametrize("name", ["job", "home"])
def test_an_expert_that_holds_facts_is_missed_and_others_of_equal_load_are_not(name: str) -> None:
    df = ablate(MODEL, task(name), how="exclude", by="expert", metrics=DIFFERENCE)
    patched = patch(
        MODEL, task(name), tensors=["delta_experts"], by="expert", at="last", blocks=[2], metrics=DIFFERENCE
    )
    holds = int(patched.loc[patched["recovered"].idxmax(), "expert"])
    row = cell(df, block=2, expert=holds)
    assert row["ci_high"] < -1.5
    assert abs(row["control"]) < 0.3
    assert row["p"] < 0.01
    wrong = ablate(MODEL, shuffled(task(name)), how="exclude", by="expert", blocks=[2], metrics=DIFFERENCE)
    assert abs(cell(wrong, expert=holds)["effect"]) < 0.25 * abs(row["effect"]), "by shuffled labels it isn't"


# ---- the frame -------------------------------------------------------------------------------------------------------


def test_columns_say_what_was_done() -> None:
    df = patch(MODEL, JOB, tensors=["O"], by=["head", "role"], frozen=["experts", "gates"], name="tiny")
    said = {"study": "patch", "prompts": "job", "edit": "patch", "direction": "denoise", "source": "clean"}
    said |= {"frozen": "experts, gates", "dtype": "float32", "numerics": "reference", "tensor": "O"}
    for column, value in said.items():
        assert set(df[column]) == {value}
    assert len(df) == 3 * 4 * 4 * 3  # metrics, blocks, heads, roles
    assert set(df["metric"]) == {"logit_difference", "log_probability", "kl"}
    assert set(df[df["metric"] == "kl"]["base"]) == {0}
    assert set(df["routing_agreement"].dropna()) == {1.0}, "by force"
    assert df.attrs["unmatched"] == 0
    free = patch(MODEL, JOB, tensors=["x_n"], by="role", metrics=DIFFERENCE)
    assert (free["routing_agreement"] < 1).any()
    assert "frozen" not in free


def test_frames_of_other_places_and_windows_join() -> None:
    options: dict[str, Any] = {"tensors": ["O"], "by": "head", "blocks": [2, 3], "metrics": DIFFERENCE}
    parts = [patch(MODEL, JOB, **options, **more) for more in ({"at": "END"}, {"at": "last"}, {"at": -1}, {})]
    parts += [patch(MODEL, JOB, **options, window=2), patch(MODEL, JOB, **options, direction="noise")]
    whole = frames.join(*parts)
    assert len(whole) == sum(map(len, parts))
    assert set(whole["role"].dropna()) == {"END", "last", "-1"}


def test_a_frame_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    df = patch(MODEL, JOB, by="position", blocks=[0])
    for ending in ("parquet", "csv"):
        assert frames.read(frames.write(df, tmp_path / f"patch.{ending}")).equals(df)


def test_without_answers_it_is_judged_by_kl() -> None:
    rows = [{"clean": "The capital of Peru is", "corrupt": "The capital of Mongolia is"}]
    df = patch(MODEL, Prompts.of(rows, TOKENIZER), by="position")
    assert set(df["metric"]) == {"kl"}
    assert cell(df, "kl", block=0, pos=4)["recovered"] == pytest.approx(1)
    assert [row["token"] for row in df[df["block"] == 0].to_dict("records")] == [
        "<bos>",
        "The",
        "capital",
        "of",
        "Mongolia",
        "is",
    ]


def test_what_is_decoded_after_a_patch() -> None:
    metric = "continuation:2:contains"
    df = patch(MODEL, JOB, by="role", blocks=[0, 3], metrics=[metric])
    assert set(df["base"]) == {0.0}
    assert cell(df, metric, block=0, role="first")["value"] == 1.0
    assert cell(df, metric, block=0, role="first")["recovered"] == 1.0
    assert cell(df, metric, block=0, role="last")["value"] == 0.0
    noised = patch(MODEL, JOB, by="role", blocks=[0], metrics=[metric], direction="noise")
    assert (set(noised["base"]), cell(noised, metric, role="first")["value"]) == ({1.0}, 0.0)
    with pytest.raises(BadEdit, match="nothing to hold in what is decoded"):
        patch(MODEL, JOB, by="role", metrics=[metric], frozen=["experts"])


# ---- what can't be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tensors": ["c_kvv"]}, UnknownTensor, "Nearest: c_KV"),
        ({"tensors": ["experts"], "by": "expert"}, BadEdit, "experts are chosen together"),
        ({"tensors": ["delta_heads"], "by": None}, BadEdit, "edit `O`"),
        ({"tensors": ["c_KV"], "by": "head"}, UnknownDim, "no parts by head"),
        ({"tensors": ["delta_experts"], "by": "feature"}, UnknownDim, "no parts by feature"),
        ({"blocks": [4]}, OutOfRange, "blocks 0 to 3"),
        ({"blocks": [-1]}, OutOfRange, "block -1 does not exist"),
        ({"by": "neuron"}, UnknownDim, "parts go by head"),
        ({"by": "role", "at": "END"}, UnknownDim, "T is limited twice"),
        ({"by": None, "at": "subject"}, BadEdit, "no span 'subject'; it has END, first, last"),
        ({"by": None, "at": "last[3]"}, OutOfRange, "3 does not exist"),
        ({"window": 0}, BadEdit, "window=0: one block or more"),
        ({"window": 5}, BadEdit, "window=5: no tensor asked for has so many blocks"),
        ({"window": 2, "blocks": [0, 2]}, BadEdit, "one behind the other"),
        ({"window": 4, "tensors": ["delta_experts"]}, BadEdit, "window=4"),
        ({"window": 2, "by": None}, BadEdit, "would do nothing"),
        ({"direction": "forward"}, BadEdit, "denoise or noise"),
        ({"draws": 2}, BadEdit, "nothing to draw"),
        ({"draws": 0, "noise_at": "first"}, BadEdit, "one draw or more"),
        ({"noise_at": "subject"}, BadEdit, "no span 'subject'"),
        ({"noise_at": "first", "noise_std": 0.0}, BadEdit, "a standard deviation is above 0"),
        ({"noise_at": "first", "noise_std": float("nan")}, BadEdit, "a standard deviation is above 0"),
        ({"frozen": ["c_kvv"]}, UnknownTensor, "c_kvv"),
        ({"frozen": ["x_n"]}, UnknownTensor, "names no tensor from block 0 on"),
        ({"frozen": ["O"], "tensors": ["O"], "by": None}, BadEdit, "overlap|nothing"),
        ({"tensors": ["affinity"], "by": "expert", "frozen": ["gates", "experts"]}, BadEdit, "would do nothing"),
        ({"metrics": ["kll"]}, BadMetric, "Nearest: kl"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        patch(MODEL, JOB.subset([0, 1]), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"by": None, "at": 9}, "9 does not exist"),
        ({"by": None, "at": -9}, "-9 does not exist"),
        ({"noise_at": 9}, "9 does not exist"),
    ],
)
def test_negative_or_out_of_range_heads_and_positions_accepted_slices_clipped(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(OutOfRange, match=says):
        patch(MODEL, JOB.subset([0]), **options)


def test_without_a_corrupt_text_there_is_nothing_to_take() -> None:
    alone = Prompts.of([{"clean": "Paul Jones is a", "answer": "teacher"}], TOKENIZER, name="alone")
    with pytest.raises(BadText, match="alone: 'Paul Jones is a' has no corrupt text"):
        patch(MODEL, alone)
    assert len(patch(MODEL, alone, noise_at=1, blocks=[0])) == 2 * 5


def test_answers_of_other_lengths_in_clean_and_corrupt_are_one_batch() -> None:
    """Answer and wrong stay with the prompt, whichever of the two is run."""
    rows = [
        {"clean": "The capital of Peru is", "corrupt": "The capital of Mongolia is", "answer": "Lima and the"}
        | {"wrong": "Ulaanbaatar"}
    ]
    df = patch(MODEL, Prompts.of(rows, TOKENIZER), by="role", metrics=DIFFERENCE)
    assert cell(df, block=3, role="END")["n"] == 1


# ---- the command -----------------------------------------------------------------------------------------------------

PAIR = ["--prompt", "The capital of Peru is", "--corrupt", "The capital of Mongolia is"]


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["patch", *words])


def lines(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]


def test_the_command_patches_a_pair_of_texts_position_by_position(tmp_path: Path) -> None:
    got = lines(run(*PAIR, "--out", str(tmp_path)))
    assert got[0] == [
        "answer: 'Lima', the model's own first choice; wrong: 'Ulaanbaatar', its first for the corrupt text"
    ]
    assert ["block", "tensor", "0 <bos>", "1 The", "2 capital", "3 of", "4 Mongolia", "5 is"] in got
    assert ["0", "x_n", "0", "0", "0", "0", "1.00", "0"] in got
    assert ["no interval and no p: too few units (1 of 8)"] in got
    assert {path.name for path in tmp_path.iterdir()} == {"patch.parquet", "patch.csv", "recovered.png", "largest.png"}
    df = frames.read(tmp_path / "patch.parquet")
    assert set(df["direction"]) == {"denoise"}
    assert sorted(set(df["pos"])) == [0, 1, 2, 3, 4, 5]


def test_the_command_takes_every_option(tmp_path: Path) -> None:
    asked = ["--task", "job", "--tensor", "O", "--tensor", "delta_ffn", "--block", "2", "--block", "3", "--by", "role"]
    asked += ["--window", "2", "--direction", "noise", "--frozen", "experts", "--metric", "logit_difference"]
    got = lines(
        run(*asked, "--noise-at", "first", "--noise-std", "2", "--draws", "2", "--seed", "3", "--out", str(tmp_path))
    )
    df = frames.read(tmp_path / "patch.csv")
    expected = patch(
        MODEL,
        task("job"),
        tensors=["O", "delta_ffn"],
        blocks=[2, 3],
        by="role",
        window=2,
        direction="noise",
        frozen=["experts"],
        metrics=DIFFERENCE,
        noise_at="first",
        noise_std=2.0,
        draws=2,
        seed=3,
        name="tiny",
    )
    pd.testing.assert_frame_equal(df, expected, rtol=1e-4, atol=1e-4)
    assert got[0][0].startswith(
        "patch of 2 blocks (noise) from corrupt, noise at first: logit difference recovered, job"
    )


def test_heads_of_a_place_by_the_command() -> None:
    got = lines(run("--task", "ioi", "--tensor", "O", "--by", "head", "--at", "END", "--metric", "logit_difference"))
    assert got[0] == ["patch (denoise) from clean: logit difference recovered, at END, ioi, n = 96"]
    assert got[5][:3] == ["3", "O", "1.01"]
    largest = next(words for words in got if words[:4] == ["3", "O", "0", "END"])
    assert largest[4:7] == ["1.01", "1.01", "1.01"]
    assert any(words[0].startswith("from, to: 95 % interval; p: bootstrap-t") for words in got)


@pytest.mark.parametrize(("place", "columns"), [("1", {"pos"}), ("-1", {"role"}), ("END", {"role"})])
def test_a_place_is_a_number_or_a_name(place: str, columns: set[str], tmp_path: Path) -> None:
    result = run(*PAIR, "--at", place, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    df = frames.read(tmp_path / "patch.parquet")
    assert {"pos", "role"} & set(df) == columns
    assert len(df[df["metric"] == "kl"]) == MODEL.dims.blocks, "whole tensors of that place"


def test_a_dry_run_says_what_it_would_cost_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.patch.measure", lambda *_, **__: pytest.fail("it was run"))
    got = lines(run("--task", "job", "--by", "role", "--dry-run", "--out", str(tmp_path / "no")))
    assert got[1] == ["unit", "with", "cells", "worlds", "forwards", "bytes", "seconds"]
    assert got[2][:4] == ["1", "job", "12", "960"]
    assert not (tmp_path / "no").exists()


def test_the_outlook_is_that_of_the_arguments() -> None:
    cost = outlook(MODEL, JOB, by="role")
    assert (cost["cells"], cost["worlds"]) == (12, 72)
    assert outlook(MODEL, JOB, by="role", noise_at="first", draws=3)["worlds"] == 3 * 72
    assert outlook(MODEL, JOB, by="role", blocks=[3])["forwards"] < cost["forwards"]
    assert cost["forwards"] > 3


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--prompt", "The capital of Peru is"],
        ["--prompt", "The capital of Peru is", "--corrupt", "x", "--noise-at", "4"],
        ["--task", "job", "--corrupt", "The capital of Peru is"],
        ["--task", "job", "--answer", "Lima"],
        ["--task", "job", "--by", "neuron"],
        ["--task", "job", "--direction", "forward"],
        ["--task", "job", "--window", "0"],
        ["--task", "job", "--draws", "0"],
    ],
)
def test_wrong_usage_is_2(words: Sequence[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*PAIR, "--by", "head"], "x_n has no parts by head"),
        ([*PAIR[:3], "The capital is"], "clean and corrupt have 6 and 4 tokens"),
        ([*PAIR, "--answer", "Lima", "--wrong", "Lima"], "give two different words"),
        (["--task", "agreement", "--at", "2"], "one position is different words"),
        ([*PAIR, "--at", "7"], "7 does not exist"),
    ],
)
def test_a_run_that_fails_says_why_in_a_sentence(words: Sequence[str], says: str) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
