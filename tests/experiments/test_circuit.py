"""Circuits against ablations by hand, prompt by prompt, by plain hooks; what circuits of the tiny model do, with random
sets, a node too few and a backup too few as controls; and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from experiments import causal_plots, frames, stats
from experiments.circuit import circuit, outlook
from experiments.cli import app
from experiments.metrics import BadMetric
from experiments.nodes import nodes
from experiments.prompts import Prompt, Prompts
from experiments.stats import BadSample
from experiments.tables import circuit_tables
from hooks import HookedModel, resample, zero
from probe.errors import BadEdit, BadText, OutOfRange, UnknownTensor

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
TOKENIZER = MODEL.tokenizer
DIFFERENCE = ["logit_difference"]
HEADS, BLOCKS = MODEL.dims.h, MODEL.dims.blocks


@cache
def task(name: str) -> Prompts:
    return Prompts.load(name, TOKENIZER)


def every(name: str, step: int) -> Prompts:
    return task(name).subset(range(0, len(task(name)), step))


CAPITAL = every("capital", 7)
FEW = CAPITAL.subset(range(3))
KEPT = ["blocks.0.O h=3", "blocks.3.O h=3", "blocks.3.delta_ffn"]
CAPITALS = [f"blocks.{b}.O h={h}" for b in (0, 3) for h in (1, 2, 3)] + ["blocks.3.delta_ffn"]
INDUCTION = ["blocks.0.O h=*", "blocks.2.O h=1", *(f"blocks.3.O h={h}" for h in (1, 2, 3))]

Node = tuple[str, int | None]
"""A site, and a head or all of it."""

ALL: list[Node] = [(f"blocks.{b}.O", h) for b in range(BLOCKS) for h in range(HEADS)]
ALL += [(f"blocks.{b}.delta_ffn", None) for b in range(BLOCKS)]


def named(text: Any) -> set[Node]:
    """The nodes that a frame's ``kept`` or ``removed`` names."""
    found: set[Node] = set()
    for one in [] if pd.isna(text) else text.split(", "):
        site, _, head = one.partition(" h=")
        found.add((site, int(head) if head else None))
    return found


def of_test(df: pd.DataFrame, test: str, **columns: Any) -> pd.DataFrame:
    df = df[df["test"] == test]
    for name, value in columns.items():
        df = df[df[name].eq(value).fillna(False)]
    return df


def own(df: pd.DataFrame) -> dict[Any, Any]:
    """The row of the circuit's own faithfulness."""
    here = of_test(df, "faithfulness")
    (row,) = here[here["against"].isna()].to_dict("records") if "against" in here else here.to_dict("records")
    return row


def others(df: pd.DataFrame) -> pd.DataFrame:
    return of_test(df, "faithfulness", against="random")


# ---- by hand ---------------------------------------------------------------------------------------------------------


def difference(prompt: Prompt, logits: Tensor) -> float:
    assert prompt.answer is not None
    assert prompt.wrong is not None
    end = logits[0, -1].double()
    return float(end[prompt.answer.tokens[0][0]] - end[prompt.wrong.tokens[0][0]])


class Hand:
    """Sets of nodes ablated, each prompt alone by plain hooks; a set that was asked for is remembered."""

    def __init__(self, prompts: Prompts, how: str, seeds: Sequence[int]) -> None:
        self.prompts, self.how = prompts, how
        assert prompts.reference is not None
        self.theirs = prompts.reference.rows
        self.draws = [prompts.draw(prompts.reference, seed) for seed in seeds] if how == "resample" else [[]]
        self.caches: dict[int, Any] = {}
        self.means = {} if how != "mean" else self.averages()
        self.known: dict[frozenset[Node], Any] = {}

    def cached(self, r: int) -> Any:
        """What a reference prompt alone holds."""
        if r not in self.caches:
            with torch.no_grad():
                tokens = torch.tensor([self.theirs[r].tokens])
                _, self.caches[r] = MODEL.run_with_cache(tokens, names_filter=[site for site, _ in ALL])
        return self.caches[r]

    def averages(self) -> dict[str, Tensor]:
        """Of each site, over every token of every reference prompt."""
        caches = [self.cached(r) for r in range(len(self.theirs))]
        return {site: torch.cat([one[site][0] for one in caches]).mean(0) for site, _ in ALL}

    def values(self, some: set[Node]) -> Any:
        """[prompts]: the logit difference without these nodes."""
        key = frozenset(some)
        if key not in self.known:
            draws = [[self.value(some, p, draw) for p in range(len(self.prompts))] for draw in self.draws]
            self.known[key] = np.array(draws).mean(0)
        return self.known[key]

    def value(self, some: set[Node], p: int, draw: Sequence[int]) -> float:
        prompt = self.prompts.rows[p]
        other = self.cached(draw[p]) if draw else None
        heads: dict[str, list[int | None]] = {}
        for site, head in some:
            heads.setdefault(site, []).append(head)

        def put(value: Tensor, hook: Any, site: str) -> Tensor:
            new = torch.zeros_like(value)
            if self.how != "zero":
                new = new + (self.means[site] if other is None else other[site])
            for head in heads[site]:
                where = (slice(None), slice(None)) if head is None else (slice(None), slice(None), head)
                value[where] = new[where]
            return value

        hooks: list[tuple[Any, Any]] = [(site, lambda value, hook, site=site: put(value, hook, site)) for site in heads]
        with torch.no_grad():
            return difference(prompt, MODEL.run_with_hooks(torch.tensor([prompt.tokens]), fwd_hooks=hooks))


@pytest.mark.parametrize(("how", "draws"), [("resample", 2), ("mean", 1), ("zero", 1)])
def test_circuits_are_ablations_by_hand(how: Any, draws: int) -> None:
    df = circuit(MODEL, CAPITAL, KEPT, how=how, random_sets=1, subsets=0, metrics=DIFFERENCE, seed=3, draws=draws)
    hand = Hand(CAPITAL, how, range(3, 3 + draws))
    whole, everything = set[Node](), set(ALL)
    groups = [prompt.group for prompt in CAPITAL.rows]
    assert len(df) == 2 + len(KEPT) + len(KEPT) + 1
    means_of_ratios = []
    for row in df.to_dict("records"):
        kept, removed = named(row["kept"]), named(row["removed"])
        assert removed <= kept <= everything
        rest = everything - kept
        value = hand.values(rest | removed)
        base = {"faithfulness": everything, "minimality": rest, "completeness": removed}[row["test"]]
        expected = hand.values(base)
        assert row["value"] == pytest.approx(value.mean(), abs=2e-4)
        assert row["base"] == pytest.approx(expected.mean(), abs=2e-4)
        assert row["effect"] == pytest.approx((value - expected).mean(), abs=2e-4)
        effects, gaps = (stats.units([x], groups) for x in (value - expected, hand.values(whole) - expected))
        ends = stats.interval(effects, gaps if row["test"] == "faithfulness" else None, seed=3)
        np.testing.assert_allclose([row["ci_low"], row["ci_high"]], np.ravel(ends), atol=1e-3)
        if row["test"] == "faithfulness":
            everywhere = hand.values(everything).mean()
            share = (value.mean() - everywhere) / (hand.values(whole).mean() - everywhere)
            assert row["recovered"] == pytest.approx(share, abs=1e-4)
            ratios = (value - expected) / (hand.values(whole) - expected)
            means_of_ratios.append(abs(row["recovered"] - ratios.mean()))
        else:
            assert pd.isna(row["recovered"])
    assert max(means_of_ratios) > 1e-4, "which are something else"


def test_prompt_by_prompt() -> None:
    df = circuit(MODEL, CAPITAL, KEPT, random_sets=1, subsets=0, metrics=DIFFERENCE, seed=3, per_prompt=True)
    hand, everything = Hand(CAPITAL, "resample", [3]), set(ALL)
    here = of_test(df, "faithfulness", kept=", ".join(KEPT))
    value, base, whole = (hand.values(some) for some in (everything - named(", ".join(KEPT)), everything, set[Node]()))
    np.testing.assert_allclose(here["value"].astype(float), value, atol=2e-4)
    small = stats.small_gaps(base, whole)
    np.testing.assert_allclose(
        here["recovered"].astype(float), np.where(small, np.nan, (value - base) / (whole - base)), atol=1e-4
    )
    assert list(here["example"]) == list(range(len(CAPITAL)))


PARTS = ["blocks.0.O h=* T=*", "blocks.1.delta_experts e=*", "blocks.2.V h=* S=subject", "blocks.3.delta_ffn T=END"]
SOME = ["blocks.0.O T=subject h=1", "blocks.0.O h=2 T=END", "blocks.1.delta_experts e=3", "blocks.2.V S=subject h=0"]


@pytest.mark.parametrize("how", ["resample", "zero"])
def test_nodes_of_all_kinds_are_ablated_one_by_one(how: Any) -> None:
    """Heads at spans, experts, values at keys: one edit for each node, in one whole run for each set."""
    df = circuit(MODEL, CAPITAL, SOME, among=PARTS, how=how, random_sets=1, subsets=1, metrics=DIFFERENCE, seed=1)
    assert CAPITAL.reference is not None
    tokens, keep = CAPITAL.batch()
    theirs, draw = CAPITAL.reference, CAPITAL.draw(CAPITAL.reference, 1)
    sites = {str(node.site) for node in nodes(MODEL, CAPITAL, PARTS)}
    source = MODEL.run(*theirs.batch(), want=[*sites, "blocks.1.experts"], spans=theirs.spans)
    given: dict[str, Any] = {} if how == "zero" else {"source": source, "rows": draw}
    every_one = {str(node): node for node in nodes(MODEL, CAPITAL, PARTS)}
    assert len(every_one) == 2 * HEADS + MODEL.dims.e + HEADS + 1

    def without(some: set[str]) -> float:
        make: Any = resample if how == "resample" else zero
        edits = [make(str(every_one[one].site), **every_one[one].part.where, **given) for one in some]
        logits = MODEL.run(tokens, keep, edits=edits, spans=CAPITAL.spans)["logits"]
        ends = [logits[i, len(prompt.tokens) - 1][None, None] for i, prompt in enumerate(CAPITAL.rows)]
        return float(np.mean([difference(prompt, end) for prompt, end in zip(CAPITAL.rows, ends, strict=True)]))

    moved = 0
    for row in df.to_dict("records"):
        kept, removed = (set() if pd.isna(row[name]) else set(row[name].split(", ")) for name in ("kept", "removed"))
        rest = set(every_one) - kept
        base = {"faithfulness": set(every_one), "minimality": rest, "completeness": removed}[row["test"]]
        assert row["value"] == pytest.approx(without(rest | removed), abs=2e-4)
        assert row["base"] == pytest.approx(without(base), abs=2e-4)
        moved += abs(row["effect"]) > 0.1
    assert moved > 3
    assert set(df.loc[df["test"] == "minimality", "removed"]) == {str(node) for node in nodes(MODEL, CAPITAL, SOME)}


def test_answers_of_several_tokens_stand_behind_the_prompt() -> None:
    """They are no part of the reference prompts: only what stands in the prompt is resampled, or averaged."""
    row = {"clean": "The capital of Peru is", "answer": "Lima .", "wrong": "Budapest .", "spans": {"subject": [15, 19]}}
    theirs = [{"clean": f"The capital of {x} is", "spans": {"subject": [15, 15 + len(x)]}} for x in ("Laos", "Hungary")]
    prompts = Prompts.of([row], TOKENIZER, reference=theirs)
    assert prompts.reference is not None
    (prompt,), (place,) = prompts.rows, prompts.draw(prompts.reference, 0)
    length, heads = len(prompt.tokens), [0, 2, 3]
    both = [MODEL.run(torch.tensor([one.tokens]), want="blocks.0.O")["blocks.0.O"] for one in prompts.reference.rows]
    assert prompt.answer is not None
    first, second = prompt.answer.tokens[0]
    for how, new in (("resample", both[place]), ("mean", torch.cat(both).mean((0, 1), keepdim=True)), ("zero", None)):

        def put(value: Tensor, hook: Any, new: Tensor | None = new) -> Tensor:
            value[:, :length, heads] = 0 if new is None else new[:, :, heads]
            value[:, length:, heads] *= float(new is not None)
            return value

        with torch.no_grad():
            logits = MODEL.run_with_hooks(torch.tensor([[*prompt.tokens, first]]), fwd_hooks=[("blocks.0.O", put)])
        said = logits[0].double().log_softmax(-1)
        asked: dict[str, Any] = {"how": how, "among": ["blocks.0.O h=*"], "metrics": ["log_probability"]}
        df = circuit(MODEL, prompts, ["blocks.0.O h=1"], random_sets=0, **asked)
        expected = float(said[length - 1, first] + said[length, second])
        assert own(df)["value"] == pytest.approx(expected, abs=1e-4), how


def test_a_metric_of_the_edited_block_is_of_one_block_in_all_sets() -> None:
    """The last that has nodes: else a set that ends in block 0 would be held against one that ends in block 3."""
    asked: dict[str, Any] = {"random_sets": 1, "subsets": 0}
    df = circuit(MODEL, FEW, KEPT, metrics=["relative_change"], **asked)
    named_block = circuit(MODEL, FEW, KEPT, metrics=["relative_change:blocks.3.x_next"], **asked)
    for name in ("value", "base"):
        assert np.allclose(df[name].astype(float), named_block[name].astype(float)), name
    assert (of_test(df, "completeness")["base"] > 0.01).all()


# ---- what it finds ---------------------------------------------------------------------------------------------------


def test_heads_and_ffns_that_name_a_capital() -> None:
    prompts = every("capital", 3)
    df = circuit(MODEL, prompts, CAPITALS, metrics=DIFFERENCE, subsets=0)
    row, random = own(df), others(df)
    assert row["ci_low"] > 0.85
    assert len(random) == 10
    assert random["recovered"].max() < 0.4
    assert random["recovered"].median() < 0.15
    lost = of_test(df, "minimality").set_index("removed")
    assert lost["effect"].max() < -1, "none of its nodes can be spared"
    assert lost["effect"].min() < -4
    assert (lost["ci_high"] < 0).all()
    assert lost["p"].max() < 0.05
    more = circuit(MODEL, prompts, [*CAPITALS, "blocks.1.O h=0"], metrics=DIFFERENCE, subsets=0, random_sets=0)
    spare = of_test(more, "minimality", removed="blocks.1.O h=0")
    assert abs(spare["effect"].item()) < 0.3, "the control: a head that does nothing for it"


def test_indirect_objects_need_the_heads_of_the_first_and_the_last_block() -> None:
    kept = ["blocks.0.O h=*", "blocks.3.O h=*", "blocks.3.delta_ffn"]
    df = circuit(MODEL, every("ioi", 4), kept, metrics=DIFFERENCE, seed=4)
    assert own(df)["recovered"] == pytest.approx(1, abs=0.05)
    assert others(df)["recovered"].median() < 0.25
    assert others(df)["recovered"].max() < 0.75
    lost = of_test(df, "minimality").set_index("removed")["effect"]
    assert lost.idxmin() == "blocks.3.O h=0"
    assert lost.min() < -10
    assert lost.drop("blocks.3.O h=0").min() > -4


def test_a_circuit_without_a_backup_is_not_complete() -> None:
    """Three heads of the last block copy what came next before. With all of them the circuit falls as the model does;
    with two, it looks minimal, and yet the model does by the third what the circuit can't."""
    prompts = every("induction", 4)
    asked: dict[str, Any] = {"among": ["O h=*"], "metrics": DIFFERENCE, "random_sets": 4}
    whole = circuit(MODEL, prompts, INDUCTION, **asked)
    assert own(whole)["recovered"] == pytest.approx(1, abs=0.05)
    assert others(whole)["recovered"].max() < 0.7
    complete = of_test(whole, "completeness")
    assert len(complete) == 8 + 10 + 1
    assert complete["effect"].abs().max() < 1.5
    assert complete["base"].max() - complete["base"].min() > 10, "and sets fall in all degrees"
    lacking = circuit(MODEL, prompts, INDUCTION[:-1], subsets=0, **asked)
    assert own(lacking)["recovered"] < 0.75
    by_node = of_test(lacking, "completeness").set_index("removed")
    for node in INDUCTION[2:4]:
        assert float(by_node["ci_high"][node]) < -5
    assert of_test(lacking, "minimality")["effect"].max() < 0


# ---- sets of nodes ---------------------------------------------------------------------------------------------------


def test_random_sets_have_the_circuits_make_up_and_halves_half_of_it() -> None:
    df = circuit(MODEL, FEW, CAPITALS, metrics=DIFFERENCE, random_sets=12, subsets=9, seed=5)
    drawn = [named(text) for text in others(df)["kept"]]
    assert len({frozenset(one) for one in drawn}) == 12
    for one in drawn:
        assert one != named(", ".join(CAPITALS))
        assert len([site for site, head in one if head is not None]) == 6
        assert len([site for site, head in one if head is None]) == 1
    assert len({node for one in drawn for node in one}) > 15, "all over the model"
    sizes = [len(named(text)) for text in of_test(df, "completeness")["removed"]]
    assert sizes == [1] * 7 + [3] * 9 + [7]
    again = circuit(MODEL, FEW, CAPITALS, metrics=DIFFERENCE, random_sets=12, subsets=9, seed=5)
    pd.testing.assert_frame_equal(df, again)
    other = circuit(MODEL, FEW, CAPITALS, metrics=DIFFERENCE, random_sets=12, subsets=9, seed=6)
    assert set(others(df)["kept"]) != set(others(other)["kept"])


def test_there_are_as_many_sets_as_there_are() -> None:
    asked: dict[str, Any] = {"among": ["blocks.3.O h=*"], "metrics": DIFFERENCE}
    df = circuit(MODEL, FEW, ["blocks.3.O h=1"], random_sets=HEADS - 1, subsets=10, **asked)
    assert set(others(df)["kept"]) == {f"blocks.3.O h={h}" for h in range(HEADS) if h != 1}
    assert len(of_test(df, "completeness")) == 1, "one node has no half, and is itself all of it"
    with pytest.raises(BadEdit, match=r"random_sets=4: there are 3 other sets with as many nodes of each tensor"):
        circuit(MODEL, FEW, ["blocks.3.O h=1"], random_sets=HEADS, **asked)
    everything = circuit(MODEL, FEW, ["blocks.3.O h=*"], random_sets=0, **asked)
    assert own(everything)["recovered"] == 1
    assert (of_test(everything, "completeness")["effect"] == 0).all(), "the whole model is a complete circuit of itself"


def test_the_order_of_words_makes_no_other_node() -> None:
    one, other = (nodes(MODEL, FEW, text) for text in ("blocks.0.O h=1 T=subject", "blocks.0.O T=subject h=1"))
    assert [str(node) for node in one] == [str(node) for node in other] == ["blocks.0.O h=1 T=subject"]
    for among in ("blocks.0.O h=* T=subject", "blocks.0.O T=subject h=*", "blocks.0.O T=* h=*"):
        df = circuit(
            MODEL, FEW, ["blocks.0.O T=subject h=1"], among=[among], random_sets=1, metrics=DIFFERENCE, how="zero"
        )
        assert own(df)["kept"] == "blocks.0.O h=1 T=subject"
    assert next(str(node) for node in nodes(MODEL, FEW, "A S=1 T=END h=2")) == "blocks.0.A h=2 S=1 T=END"


# ---- frames and cost -------------------------------------------------------------------------------------------------


def test_the_frame_says_what_each_row_is(tmp_path: Any) -> None:
    df = circuit(MODEL, FEW, KEPT, random_sets=1)
    assert list(df["test"].unique()) == ["faithfulness", "minimality", "completeness"]
    assert set(df["metric"]) == {"logit_difference", "log_probability", "kl"}
    assert set(df["edit"]) == {"resample"}
    assert set(df["source"]) == {"reference/capital"}
    assert set(df["seed"]) == {0}
    row = of_test(df, "minimality", metric="kl", removed="blocks.3.O h=3").iloc[0]
    assert (row["block"], str(row["tensor"]), row["head"], row["step"]) == (3, "O", 3, 19)
    assert of_test(df, "faithfulness")["tensor"].isna().all()
    assert own(df[df["metric"] == "kl"])["recovered"] == pytest.approx(
        1 - own(df[df["metric"] == "kl"])["value"] / own(df[df["metric"] == "kl"])["base"], abs=1e-6
    )
    for ending in ("parquet", "csv"):
        assert frames.read(frames.write(df, tmp_path / f"circuit.{ending}")).equals(df)
    assert df.attrs["unmatched"] == 0
    zeroed = circuit(MODEL, FEW, KEPT, random_sets=1, how="zero", metrics=DIFFERENCE)
    assert "source" not in zeroed
    assert len(frames.join(df, zeroed)) == len(df) + len(zeroed)


def test_small_budgets_give_the_same() -> None:
    asked: dict[str, Any] = {"random_sets": 2, "subsets": 2, "metrics": DIFFERENCE}
    whole, parts = circuit(MODEL, FEW, KEPT, **asked), circuit(MODEL, FEW, KEPT, budget=1, **asked)
    assert np.allclose(whole["value"].astype(float), parts["value"].astype(float), atol=1e-4)
    cost = outlook(MODEL, FEW, KEPT, **asked)
    assert cost["cells"] == 3 + 3 + 1 + 3 + 1, "a set that two tests need is measured once"
    assert cost["forwards"] > cost["cells"] / 2


@pytest.mark.parametrize("tensor", ["y_e", "gates"])
def test_experts_that_no_reference_chose_leave_rows_without_a_value(tensor: str) -> None:
    asked: dict[str, Any] = {"among": [f"{tensor} e=*"], "random_sets": 1, "metrics": DIFFERENCE, "seed": 2}
    df = circuit(MODEL, FEW, [f"blocks.1.{tensor} e=1"], **asked)
    assert pd.isna(own(df)["value"])
    assert df.attrs["unmatched"] == df["value"].isna().sum() == 4
    for _, ax in causal_plots.circuits(df):
        assert "to" in ax.texts[0].get_text()
    plt.close("all")
    assert len(list(circuit_tables(df))) == 3


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "asked", "error", "why"),
    [
        (["blocks.0.V h=1"], {}, BadEdit, r"blocks.0.V h=1 can't be kept: it is not among the 20 nodes"),
        (["blocks.0.O"], {}, BadEdit, "blocks.0.O can't be kept"),
        (["blocks.9.O h=1"], {}, OutOfRange, "blocks 0 to 3"),
        (["blocks.0.o h=1"], {}, UnknownTensor, "Nearest: "),
        ([], {}, UnknownTensor, "no node is named"),
        (KEPT, {"among": ["O h=*", "O"]}, BadEdit, r"blocks.0.O h=0 and blocks.0.O overlap|O and .* overlap"),
        (KEPT, {"among": ["x_0 T=END", "x_0 T=5"]}, BadEdit, "x_0 T=END and x_0 T=5 overlap|T=5 and x_0 T=END overlap"),
        (KEPT, {"among": ["O h=* T=END", "O h=1"]}, BadEdit, "overlap: take the model apart into nodes that don't"),
        (KEPT, {"how": "exclude"}, BadEdit, "how='exclude': .* resample, mean, zero"),
        (KEPT, {"draws": 0}, BadEdit, "draws=0"),
        (KEPT, {"how": "zero", "draws": 2}, BadEdit, "zero has nothing to draw"),
        (KEPT, {"random_sets": -1}, BadEdit, "random_sets=-1"),
        (KEPT, {"subsets": -1}, BadEdit, "subsets=-1"),
        (["delta_heads"], {"among": ["delta_heads"], "random_sets": 0}, BadEdit, "edit `O`"),
        (["blocks.1.experts"], {"among": ["experts"], "random_sets": 0}, BadEdit, "experts"),
        (KEPT, {"metrics": ["nothing"]}, BadMetric, "there is no metric"),
        (["x_0 T=END"], {"among": ["x_0 T=*"], "random_sets": 0, "metrics": ["relative_change"]}, BadMetric, "in none"),
    ],
)
def test_refusals(kept: list[str], asked: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        circuit(MODEL, FEW, kept, **asked)


def test_prompts_that_do_not_fit() -> None:
    bare = Prompts.text("The capital of France is", TOKENIZER, answer="Paris", wrong="Lima")
    alone = Prompts(bare.rows, TOKENIZER, "alone")
    with pytest.raises(BadEdit, match="no reference prompts to resample from"):
        circuit(MODEL, alone, KEPT)
    assert len(circuit(MODEL, alone, KEPT, how="zero", random_sets=0, metrics=DIFFERENCE)) > 3
    with pytest.raises(BadText, match="no other prompt of the shape"):
        circuit(MODEL, FEW, KEPT, reference=task("ioi"))
    held = circuit(MODEL, FEW, KEPT, reference=FEW, random_sets=0, metrics=DIFFERENCE, how="mean")
    assert set(held["source"]) == {"capital (holds 3 of the prompts)"}
    mixed = Prompts((*FEW.rows[:1], *task("ioi").rows[:1]), TOKENIZER, "mixed")
    with pytest.raises(BadSample, match="of 2 shapes"):
        circuit(MODEL, mixed, ["O T=3"], among=["O T=3"], how="zero")


# ---- pictures and command --------------------------------------------------------------------------------------------


def test_the_pictures() -> None:
    df = circuit(MODEL, CAPITAL, CAPITALS, metrics=["logit_difference", "kl"], random_sets=3, subsets=4)
    first = df[df["metric"] == "logit_difference"]
    made: dict[str, Any] = dict(causal_plots.circuits(df))
    assert list(made) == ["faithfulness", "minimality", "completeness"]
    ax = made["faithfulness"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["circuit (7 nodes)", *["random set"] * 3]
    shown = ax.collections[-1].get_offsets()[:, 0]
    assert shown[0] == pytest.approx(own(first)["recovered"])
    assert list(shown[1:]) == sorted(others(first)["recovered"], reverse=True)
    assert ax.get_xlabel() == "share of the logit difference that is left"
    assert ax.get_title(loc="left") == f"Faithfulness (resample), capital, n = {len(CAPITAL)}"
    ax = made["minimality"]
    lost = of_test(first, "minimality")
    order = lost.loc[lost["effect"].abs().sort_values(ascending=False).index]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(order["removed"])
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(list(order["effect"]))
    assert ax.get_xlabel() == "change of logit difference [logits] without the node"
    ax = made["completeness"]
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert said == ["without one node", "without a random half", "without the whole circuit"]
    points = np.concatenate([one.get_offsets() for one in ax.collections])
    rows = of_test(first, "completeness")
    assert len(points) == len(rows) == 7 + 4 + 1
    assert {tuple(np.round(p, 6)) for p in points} == {
        (round(a, 6), round(b, 6)) for a, b in zip(rows["base"], rows["value"], strict=True)
    }
    assert "[nats]" in causal_plots.completeness(df, metric="kl").get_xlabel()
    with pytest.raises(frames.BadFrame, match="no metric 'rank'"):
        causal_plots.minimality(df, metric="rank")
    for _, ax in causal_plots.circuits(df[:0]):
        assert ax.texts
    plt.close("all")


def test_few_prompts_have_neither_intervals_nor_a_crash() -> None:
    df = circuit(MODEL, FEW, ["blocks.3.O h=1"], random_sets=1, metrics=DIFFERENCE)
    assert "ci_low" not in df
    made: dict[str, Any] = dict(causal_plots.circuits(df))
    assert next(label.get_text() for label in made["faithfulness"].get_yticklabels()) == "circuit (1 node)"
    said = [text.get_text() for text in made["completeness"].get_legend().get_texts()]
    assert said == ["without the whole circuit"]
    plt.close("all")
    with pytest.raises(frames.BadFrame, match="by prompt"):
        causal_plots.faithfulness(circuit(MODEL, FEW, KEPT, random_sets=0, metrics=DIFFERENCE, per_prompt=True))


def test_the_command(tmp_path: Any) -> None:
    asked = ["circuit", "--task", "capital", "--node", "blocks.3.O h=1", "--node", "blocks.3.O h=3"]
    asked += ["--among", "blocks.3.O h=*", "--random", "2", "--how", "zero"]
    out = CliRunner().invoke(app, [*asked, "--metric", "logit_difference", "--out", str(tmp_path)])
    assert out.exit_code == 0, out.output
    assert "Faithfulness (zero): capital" in out.stdout
    assert "the whole circuit" in out.stdout
    pictures = {f"{name}.png" for name in ("faithfulness", "minimality", "completeness")}
    assert {path.name for path in tmp_path.iterdir()} == {"circuit.parquet", "circuit.csv", *pictures}
    df = frames.read(tmp_path / "circuit.parquet")
    assert len(others(df)) == 2
    dry = CliRunner().invoke(app, [*asked, "--dry-run", "--out", str(tmp_path / "not")])
    assert dry.exit_code == 0
    assert "forwards" in dry.stdout
    assert not (tmp_path / "not").exists()
    wrong = CliRunner().invoke(app, ["circuit", "--task", "capital", "--node", "blocks.3.O h=9"])
    assert wrong.exit_code == 1
    assert "9" in wrong.output
