"""What a study asks of a sweep, against its slow twin: a whole run for each cell and draw, over every option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from experiments import ablate as ablation
from experiments import measure as measuring
from experiments import patch as patching
from experiments import stats
from experiments.ablate import ablate
from experiments.asking import Ask
from experiments.circuit import circuit
from experiments.measure import NOISE_SEEDS, Asked, Measured, Source, measure, table
from experiments.metrics import METRICS, BadMetric, Metric, View
from experiments.prompts import Prompts
from experiments.routing import split
from hooks import Edit, HookedModel, Live, Run, add, freeze, patch, rounded, zero
from hooks.apply import first_edited
from hooks.edits import Freeze
from probe.errors import BadEdit, Unmatched

Numbers = NDArray[np.float64]

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
TOKENIZER = MODEL.tokenizer
LOGITS = ["logit_difference", "kl:all", "rank"]
TENSORS = [
    "kl",
    "relative_change",
    "relative_change_first",
    "relative_change:A",
    "relative_change:blocks.3.delta_experts",
]


def some(task: str, n: int) -> Prompts:
    """The first prompts of each shape of a task, in turn."""
    whole = Prompts.load(task, TOKENIZER)
    by_shape = list(whole.shapes().values())
    return whole.subset(sorted(rows[i] for i in range(n) for rows in by_shape if i < len(rows))[:n])


IOI, JOB, CAPITAL = some("ioi", 4), some("job", 5), some("capital", 4)
MIXED = Prompts((*IOI.rows[:2], *JOB.rows[:2]), TOKENIZER, "mixed")
"""Of two tasks, whose spans have other names."""


def capital(clean: str, corrupt: str, answer: Any, wrong: Any, **more: Any) -> dict[str, Any]:
    text = "The capital of {subject} is"
    row = {"template": text, "slots": {"subject": clean}, "corrupt_slots": {"subject": corrupt}}
    return row | {"answer": answer, "wrong": wrong} | more


MULTI = Prompts.of(
    [
        capital("Peru", "Mongolia", "Lima and", "Budapest and"),
        capital("Hungary", "Peru", ["Budapest and the", "Budapest ,"], "Lima"),
        capital("Mongolia", "Peru", "Ulaanbaatar", "Lima and the", group="twice"),
        capital("Mongolia", "Hungary", "Ulaanbaatar", "Budapest", group="twice"),
    ],
    TOKENIZER,
    name="multi",
)
"""Answers of several tokens and spellings; two prompts of one group."""

UNEQUAL = Prompts.of(
    [
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
    ],
    TOKENIZER,
    name="unequal",
)
"""Clean and corrupt of other lengths."""


class Study(NamedTuple):
    """What a study asks `measure`."""

    ask: Ask
    asked: Sequence[Asked]
    source: Live | None
    source_ask: Ask | None = None
    base_edits: Sequence[Edit] = ()

    def measured(self, model: HookedModel = MODEL, **how: Any) -> Measured:
        ask, asked, source, source_ask, base_edits = self
        return measure(model, ask, asked, source=source, source_ask=source_ask, base_edits=base_edits, **how)


def of_patch(prompts: Prompts, metrics: Sequence[str], model: HookedModel = MODEL, **asked: Any) -> Study:
    options = patching._Options(
        **{"tensors": ("x_n",), "blocks": None, "by": "role", "at": None, "window": 1, "direction": "denoise"}
        | {"noise_at": None, "noise_std": 3.0, "frozen": ()}
        | asked
    )
    pair = patching._Pair.of(model, prompts, options, metrics, 0)
    return Study(pair.ask, pair.asked, pair.source, pair.source_ask, pair.base_edits)


def of_ablation(prompts: Prompts, metrics: Sequence[str], model: HookedModel = MODEL, **asked: Any) -> Study:
    given = {"tensors": None, "blocks": None, "by": None, "at": None, "how": "resample", "reference": None, "draws": 1}
    cells = ablation._Cells.of(model, prompts, metrics=metrics, seed=0, **given | asked)
    return Study(cells.ask, cells.asked, cells.source)


# ---- the slow twin ---------------------------------------------------------------------------------------------------


def run(model: HookedModel, ask: Ask, block: int | None, edits: Sequence[Edit]) -> Run:
    return model.run(ask.tokens, ask.keep, want=ask.sites(block), edits=edits, spans=ask.spans, spoken=ask.spoken)


def slowly(study: Study, model: HookedModel = MODEL) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Values and bases, [cells, prompts] by metric: a whole run for each cell and draw, and a base for it."""
    ask, asked, live, _, base_edits = study
    source = None
    if live is not None:
        assert live.tokens is not None
        rows = live.rows
        source = model.run(live.tokens, rows.keep, want=None, edits=live.edits, spans=rows.spans, spoken=rows.spoken)
    held = model.run(ask.tokens, ask.keep, want=None, edits=base_edits, spans=ask.spans, spoken=ask.spoken)
    values, bases = ({metric.name: [] for metric in ask.metrics} for _ in range(2))
    for one in asked:
        base = ask.seen(run(model, ask, one.block, base_edits), one.block)
        drawn = [drawing(study, one, i, source, held, model) for i in range(len(one.edits))]
        for metric in ask.metrics:
            each = [ask.values(metric, seen, base, one.block) for seen in drawn if seen is not None]
            mean = np.mean([x.numpy() for x in each], axis=0) if each else np.full(len(ask.prompts), np.nan)
            about = [one.prompts is None or p in one.prompts for p in range(len(ask.prompts))]
            values[metric.name].append(np.where(about, mean, np.nan))
            there = ~np.isnan(values[metric.name][-1])
            bases[metric.name].append(np.where(there, ask.values(metric, base, base, one.block).numpy(), np.nan))
    return tuple({name: np.array(rows) for name, rows in kind.items()} for kind in (values, bases))


def drawing(study: Study, one: Asked, i: int, source: Source, held: Run, model: HookedModel) -> Any:
    """What one draw of a cell shows; None where it needs an expert that the source didn't choose."""
    edits = list(one.edits[i](source))
    if study.base_edits:  # a run's base has no edits, so that what is frozen is put there by a patch
        first = first_edited(edits, model.sites)
        frozen = [site for e in edits if isinstance(e.how, Freeze) for site in e.sites(model.sites, first)]
        edits = [e for e in edits if not isinstance(e.how, Freeze)]
        edits += [patch(site.tensor, site.block, source=held) for site in frozen]
    try:
        made = run(model, study.ask, one.block, [*study.base_edits, *edits])
    except Unmatched:
        return None
    return study.ask.seen(made, one.block)


def agree(fast: Numbers, slow: Numbers) -> None:
    assert fast.shape == slow.shape
    np.testing.assert_array_equal(np.isnan(fast), np.isnan(slow))
    most = float(np.nanmax(np.abs(slow), initial=0.0))
    assert float(np.nanmax(np.abs(fast - slow), initial=0.0)) <= 1e-5 * max(1.0, most)


def compare(study: Study, model: HookedModel = MODEL, **how: Any) -> Measured:
    """A study against its twin; what it did is not nothing."""
    found = study.measured(model, **how)
    values, bases = slowly(study, model)
    for metric in study.ask.metrics:
        agree(found.values[metric.name], values[metric.name])
        agree(found.base[metric.name], bases[metric.name])
    moved = [np.nanmax(np.abs(found.values[m.name] - found.base[m.name]), initial=0) for m in study.ask.metrics]
    assert max(moved) > 1e-3
    return found


# ---- every option ----------------------------------------------------------------------------------------------------

PATCHES: dict[str, tuple[Prompts, Sequence[str], dict[str, Any]]] = {
    "position": (IOI.subset([0, 1]), LOGITS, {"by": "position", "blocks": [0, 3]}),
    "position-latent": (JOB, LOGITS, {"by": "position", "blocks": [2], "tensors": ["c_KV"]}),
    "role": (IOI, LOGITS, {"by": "role", "tensors": ["x_n", "O", "K", "x_next"]}),
    "head": (JOB, LOGITS, {"by": "head", "tensors": ["O", "Q", "K", "V"], "blocks": [0, 3]}),
    "key": (JOB, LOGITS, {"by": "key", "tensors": ["A", "S"], "blocks": [3]}),
    "expert": (
        JOB,
        LOGITS,
        {"by": "expert", "tensors": ["delta_experts", "router_logits", "choice_score"], "blocks": [2]},
    ),
    "feature": (JOB, LOGITS, {"by": "feature", "tensors": ["Q_C"], "at": "END", "blocks": [3]}),
    "whole": (JOB, LOGITS, {"by": None, "tensors": ["x_n", "A", "delta_ffn"]}),
    "head-role": (JOB, LOGITS, {"by": ["head", "role"], "tensors": ["O"], "blocks": [2, 3]}),
    "position-key": (JOB.subset([0, 1]), LOGITS, {"by": ["position", "key"], "tensors": ["A"], "blocks": [2]}),
    "expert-role": (JOB, LOGITS, {"by": ["expert", "role"], "tensors": ["delta_experts"], "blocks": [3]}),
    "at-span": (JOB, LOGITS, {"by": "head", "at": "last", "tensors": ["O", "V"], "blocks": [2, 3]}),
    "at-end": (JOB, LOGITS, {"by": None, "at": -1, "tensors": ["O", "delta_ffn"]}),
    "window": (JOB, LOGITS, {"window": 2, "tensors": ["delta_ffn", "c_KV"]}),
    "window-of-all": (JOB, LOGITS, {"window": 4, "tensors": ["x_n"]}),
    "frozen-choice": (JOB, LOGITS, {"frozen": ["experts"], "tensors": ["x_n", "O"]}),
    "frozen-router": (JOB, LOGITS, {"frozen": ["experts", "gates"]}),
    "frozen-patterns": (JOB, LOGITS, {"frozen": ["A"]}),
    "frozen-scales": (JOB, LOGITS, {"frozen": ["s_*"]}),
    "noise-at": (JOB, LOGITS, {"noise_at": "first", "tensors": ["x_n", "delta_ffn"]}),
    "noise-at-frozen": (JOB, LOGITS, {"noise_at": "first", "frozen": ["experts", "A"], "blocks": [1, 2]}),
    "several-tokens": (MULTI, LOGITS, {"tensors": ["x_n", "O"], "blocks": [1, 3]}),
    "several-tokens-by-position": (MULTI, LOGITS, {"by": "position", "blocks": [2]}),
    "several-tokens-whole": (MULTI, LOGITS, {"by": None, "tensors": ["c_KV", "delta_experts", "A"]}),
    "several-tokens-noise": (MULTI, LOGITS, {"noise_at": "END"}),
    "unequal": (UNEQUAL, ["logit_difference", "kl"], {"tensors": ["x_n", "O", "c_KV", "V", "delta_experts"]}),
    "unequal-at": (UNEQUAL, ["logit_difference"], {"by": "head", "at": "END", "tensors": ["O"]}),
    "other-spans": (MIXED, LOGITS, {"by": ["role", "head"], "tensors": ["O"], "blocks": [0, 3]}),
    "tensors": (JOB, TENSORS, {"tensors": ["x_n", "O", "h_s"], "blocks": [2, 3]}),
}


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", PATCHES)
def test_patches_are_those_of_whole_runs(name: str, direction: str) -> None:
    prompts, metrics, asked = PATCHES[name]
    found = compare(of_patch(prompts, metrics, **asked, direction=direction))
    assert found.unmatched == 0


ABLATIONS: dict[str, tuple[Prompts, Sequence[str], dict[str, Any]]] = {
    **{f"{how}-all": (JOB, LOGITS, {"how": how, "blocks": [2]}) for how in ("resample", "mean", "zero", "noise")},
    **{f"{how}-head": (JOB, LOGITS, {"how": how, "by": "head", "blocks": [3]}) for how in ("mean", "zero", "noise")},
    "resample-expert": (JOB, LOGITS, {"by": "expert", "blocks": [2], "tensors": ["gates", "y_e", "delta_experts"]}),
    "resample-role": (JOB, LOGITS, {"by": "role", "blocks": [3], "tensors": ["O", "K", "A", "gates", "u_s"]}),
    "resample-draws": (JOB, LOGITS, {"draws": 3, "blocks": [1], "tensors": ["O", "gates", "delta_experts"]}),
    "mean-position": (JOB, LOGITS, {"how": "mean", "by": "position", "tensors": ["Q", "K", "S", "O"], "blocks": [3]}),
    "zero-key": (JOB, LOGITS, {"how": "zero", "by": "key", "blocks": [3]}),
    "zero-feature": (JOB.subset([0, 1]), LOGITS, {"how": "zero", "by": "feature", "tensors": ["h_s"], "blocks": [3]}),
    "noise-draws": (JOB, LOGITS, {"how": "noise", "draws": 2, "tensors": ["x_n", "v"], "blocks": [2]}),
    "exclude": (JOB, LOGITS, {"how": "exclude", "by": "expert"}),
    "exclude-at": (JOB, LOGITS, {"how": "exclude", "by": "expert", "at": "END"}),
    "product": (JOB, LOGITS, {"how": "zero", "by": ["head", "role"], "blocks": [2]}),
    "tensors": (JOB, TENSORS, {"how": "zero", "blocks": [2], "tensors": ["O", "h_s", "gates", "x_n"]}),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_are_those_of_whole_runs(name: str) -> None:
    prompts, metrics, asked = ABLATIONS[name]
    compare(of_ablation(prompts, metrics, **asked))


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("tensor", ["y_e", "gates"])
def test_cells_that_need_an_expert_of_the_source_have_no_value_and_are_counted(tensor: str, direction: str) -> None:
    study = of_patch(JOB, LOGITS, tensors=[tensor], by="expert", blocks=[2, 3], direction=direction)
    found = compare(study)
    lost = np.isnan(found.values["rank"]).all(axis=1)
    assert 0 < found.unmatched == lost.sum() < len(study.asked)
    df = table(study.ask, found)
    assert set(df.loc[df["value"].isna(), "n"]) == {0}
    assert df["touched"].isna().sum() == found.unmatched * len(LOGITS)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_batches_of_few_rows_give_the_same(rows: int) -> None:
    study = of_patch(JOB, LOGITS, tensors=["x_n", "delta_experts"], by="role")
    whole = study.measured()
    model_rows = MODEL.dims.d * 4 * rows
    parts = study.measured(budget=model_rows)
    for metric in LOGITS:
        agree(parts.values[metric], whole.values[metric])
    assert [d[0].touched for d in parts.outcomes] == [d[0].touched for d in whole.outcomes]


def test_weights_from_disk_give_the_same() -> None:
    disk = HookedModel.load(keep="disk")
    whole, read = (
        of_patch(JOB, LOGITS, model, tensors=["x_n", "delta_experts"]).measured(model) for model in (MODEL, disk)
    )
    for metric in LOGITS:
        agree(read.values[metric], whole.values[metric])


def test_another_kind_of_model_gives_the_same() -> None:
    """In bf16, by both profiles; compared as the twin rounds, so to what one rounding of a logit is."""
    for numerics in ("reference", "careful"):
        low = HookedModel.load(dtype=torch.bfloat16, numerics=numerics)
        study = of_patch(JOB, ["logit_difference"], low, tensors=["x_n"], blocks=[0, 3])
        fast, slow = study.measured(low).values["logit_difference"], slowly(study, low)[0]["logit_difference"]
        assert np.abs(fast - slow).max() < (1.0 if numerics == "reference" else 0.2)
        assert np.abs(fast - slow).mean() < 0.1
        assert np.abs(slow).max() > 10


# ---- a cell by hand --------------------------------------------------------------------------------------------------


def by_hand(*edits: Edit, block: int | None = 2, prompts: Sequence[int] | None = None) -> Asked:
    return Asked((lambda _: edits,), {"block": block, "tensor": "O"}, block, prompts)


def test_a_cell_is_a_set_of_edits() -> None:
    """All that act together, here the writes of two blocks, in one cell; and the cells by themselves in others."""
    ask = Ask(MODEL, JOB, ["logit_difference"])
    both = by_hand(zero("delta_ffn", 1), zero("delta_attn", 2))
    apart = [by_hand(zero("delta_ffn", 1)), by_hand(zero("delta_attn", 2))]
    found = compare(Study(ask, [both, *apart], None))
    together, one, other = found.values["logit_difference"]
    assert np.abs(together - one).max() > 0.1
    assert np.abs(together - other).max() > 0.1


def test_overlapping_edits_of_a_cell_are_refused_as_in_a_run() -> None:
    ask = Ask(MODEL, JOB, ["kl"])
    for tensor in ("O", "A"):
        with pytest.raises(BadEdit, match="overlap"):
            measure(MODEL, ask, [by_hand(zero(tensor, 2, h=1), zero(tensor, 2, T=2))])


def test_freezing_to_the_sources_values_and_calling_it_a_control() -> None:
    """What is frozen is the base's in either direction: to hold the source's patterns would be another edit."""
    for direction in ("denoise", "noise"):
        study = of_patch(
            JOB, ["logit_difference"], tensors=["x_n"], by=None, blocks=[2], frozen=["A"], direction=direction
        )
        assert study.source is not None
        base = MODEL.run(study.ask.tokens, study.ask.keep, want=None)
        source = MODEL.run(study.source.tokens, study.source.rows.keep, want=None)
        held = {
            name: [patch("A", block, source=of) for block in (2, 3)]
            for name, of in (("base", base), ("source", source))
        }
        swap = patch("x_n", 2, source=source)
        by_patch = {
            name: study.ask.values(
                study.ask.metrics[0],
                study.ask.seen(run(MODEL, study.ask, 2, [swap, *edits])),
                study.ask.seen(base),
            ).numpy()
            for name, edits in held.items()
        }
        (made,) = study.measured().values["logit_difference"]
        np.testing.assert_allclose(made, by_patch["base"], atol=1e-3)
        assert np.abs(made - by_patch["source"]).max() > 0.1


def test_base_edits_act_in_the_base_and_in_every_cell() -> None:
    ask, push = Ask(MODEL, JOB, ["logit_difference"]), add("x_0", direction=torch.ones(MODEL.dims.d), T="last")
    study = Study(ask, [by_hand(zero("O", 2), freeze("experts"))], None, None, [push])
    found = compare(study)
    plain = measure(MODEL, ask, study.asked)
    assert np.abs(found.base["logit_difference"] - plain.base["logit_difference"]).max() > 0.1


def test_prompts_that_a_cell_is_not_about_have_no_value() -> None:
    ask = Ask(MODEL, JOB, ["kl"])
    found = compare(Study(ask, [by_hand(zero("O", 2, B=[1, 3]), prompts=(1, 3)), by_hand(zero("O", 2))], None))
    assert (~np.isnan(found.values["kl"])).tolist() == [[False, True, False, True, False], [True] * 5]
    df = table(ask, found)
    assert list(df["n"]) == [2, 5]
    assert len(table(ask, found, per_prompt=True)) == 2 + 5


def test_what_cannot_be_measured() -> None:
    ask = Ask(MODEL, JOB, ["kl"])
    with pytest.raises(BadEdit, match="there is no cell"):
        measure(MODEL, ask, [])
    other = Ask(MODEL, UNEQUAL, ["loss"])
    with pytest.raises(BadMetric, match="prompts can't be compared"):
        measure(MODEL, Ask(MODEL, JOB, ["loss"]), [by_hand(zero("O", 2))], source=Live(other.tokens), source_ask=other)
    held = by_hand(zero("O", 2), freeze("experts"))
    with pytest.raises(BadEdit, match="nothing to hold in what is decoded"):
        measure(MODEL, Ask(MODEL, JOB, ["continuation:1:contains"]), [held])


# ---- p values --------------------------------------------------------------------------------------------------------

TWELVE = some("ioi", 12)

DISTANCE = "a distance, on one side of the base: see noise_floor, control"


def entropy(run: View, base: View) -> torch.Tensor:
    p = run.read.logits.softmax(-1)
    return run.read.mean(-torch.xlogy(p, p).sum(-1))


def moved(run: View, base: View) -> torch.Tensor:
    return run.read.mean((run.read.logits - base.read.logits).square().mean(-1))


def test_a_metric_that_cannot_be_negative_gets_no_p() -> None:
    """Each that can be asked for by name, and the user's own: one that is a distance, whether or not it says so. Where
    all bases are at the end of what they can be (every answer the first, every continuation right), there is no p."""
    one_way = {name for name, metric in METRICS.items() if metric.distance}
    assert one_way == {"kl", "top1_agreement", "relative_change", "relative_change_first"}
    own = [
        Metric("entropy", "nats", "H", entropy),
        Metric("moved", "1", "d", moved),
        Metric("moved, it says", "1", "d", moved, distance=True),
    ]
    df = ablate(MODEL, TWELVE, tensors=["delta_attn", "O"], metrics=[*METRICS, "kl:all", "continuation:1:exact", *own])
    one_way |= {"kl:all", "moved", "moved, it says", "rank", "continuation:1:exact"}
    assert set(df.loc[df["p_family"] == DISTANCE, "metric"]) == one_way
    assert (df["p_family"] == DISTANCE).sum() == len(one_way) * 8
    assert df.loc[df["p_family"] == DISTANCE, "p"].isna().all()
    assert df.loc[df["p_family"] != DISTANCE, "p"].notna().all()
    assert df["ci_low"].notna().all()


def test_a_difference_of_two_distances_gets_one() -> None:
    """A circuit is held against another edited run, whose distance from the base may be larger or smaller."""
    df = circuit(MODEL, TWELVE, ["blocks.3.O h=*"], among=["O h=*"], metrics=["kl"], random_sets=0, subsets=0)
    assert df.loc[df["test"] == "minimality", "p"].notna().all()
    parts = split(MODEL, TWELVE, "zero blocks.0.O h=1", metrics=["kl", "logit_difference"])
    assert parts.loc[parts["metric"] == "kl", "p"].isna().all()
    assert parts.loc[parts["metric"] == "logit_difference", "p"].notna().all()


# ---- low precision ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def low() -> HookedModel:
    return HookedModel.load(dtype=torch.bfloat16)


def test_the_noise_floor_is_what_rounding_alone_does(low: HookedModel) -> None:
    study = of_patch(MULTI, ["logit_difference", "kl"], low, tensors=["x_n"], blocks=[1, 3])
    ask, found = study.ask, study.measured(low)
    groups = [prompt.group for prompt in ask.prompts.rows]
    for per_prompt in (False, True):
        df = table(ask, found, per_prompt=per_prompt)
        for metric in ask.metrics:
            here = df[df["metric"] == metric.name]
            for block in (1, 3):
                base = ask.seen(run(low, ask, block, ()))
                effects = []
                for seed in range(NOISE_SEEDS):
                    seen = ask.seen(run(low, ask, block, [rounded("x_n", block, like=torch.bfloat16, seed=seed)]))
                    effects.append((ask.values(metric, seen, base) - ask.values(metric, base, base)).numpy())
                each = np.array(effects) if per_prompt else stats.units(effects, groups).mean(-1, keepdims=True)
                floor = np.tile(2 * np.sqrt((each**2).mean(0)), len(here[here["block"] == block]) // each.shape[1])
                np.testing.assert_allclose(
                    here.loc[here["block"] == block, "noise_floor"].astype(float), floor, rtol=0.35
                )
                assert (floor > 0).all()


def test_full_precision_has_no_noise_floor() -> None:
    df = table(*(lambda s: (s.ask, s.measured()))(of_patch(JOB, ["kl"], blocks=[1])))
    assert "noise_floor" not in df


def test_an_edit_that_does_nothing_has_an_effect_of_exactly_0_and_rounding_has_not(low: HookedModel) -> None:
    ask = Ask(low, JOB, ["logit_difference"])
    base = low.run(ask.tokens, ask.keep, want=["blocks.2.O"])
    found = measure(low, ask, [by_hand(patch("O", 2, source=base)), by_hand(zero("O", 2))])
    df = table(ask, found)
    assert df["effect"].iloc[0] == 0 < df["noise_floor"].iloc[0] < abs(df["effect"].iloc[1])


def test_a_floor_is_over_the_prompts_of_its_cell(low: HookedModel) -> None:
    ask = Ask(low, JOB, ["logit_difference"])
    cells = [
        by_hand(zero("O", 2)),
        by_hand(zero("O", 2, B=[0]), prompts=(0,)),
        by_hand(zero("O", 2, B=[4]), prompts=(4,)),
    ]
    floors = table(ask, measure(low, ask, cells))["noise_floor"].tolist()
    assert len(set(floors)) == 3
    alone = table(ask, measure(low, ask, cells), per_prompt=True)
    every = alone["noise_floor"].tolist()
    assert every[5:] == pytest.approx(floors[1:])
    assert measuring.NOISE_SEEDS > 1
