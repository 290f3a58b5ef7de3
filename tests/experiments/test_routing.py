"""Routing: numbers from transformers' router logits and plain loops, planted specialisation, the tiny model's facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from typer.testing import CliRunner

from experiments import Prompts
from experiments import routing as module
from experiments.cli import app
from experiments.frames import BadFrame, join
from experiments.pictures import load_maps
from experiments.routing import coactivation, entropy_bits, moe_blocks, routing, split
from experiments.tables import routing_tables
from hooks import Edit, HookedModel, add, exclude, force, freeze, patch, zero
from probe import InMemory, random_weights
from probe.errors import BadEdit, OutOfRange
from tests.oracle import Oracle, config
from training.language import COUNTRIES, NAMES, OBJECTS, PLACES

TINY = HookedModel.load()
assert TINY.tokenizer is not None
ORACLE = Oracle(config(vocab_size=410, n_group=4, topk_group=2), seed=3)
MODEL = HookedModel(ORACLE.weights(), TINY.tokenizer)
E, K, MOE = MODEL.dims.e, MODEL.dims.k, (1, 2)

TEXTS = [
    ("The capital of France is", "France"),
    ("When Mary and John went to the shop , John gave", "shop"),
    ("The capital of Japan is", "Japan"),
    ("Mary and John went to the shop", "shop"),
    ("Paul Jones lives in", "Paul"),
    ("The language of France is", "France"),
    ("Tom Smith works as a", "Tom"),
    ("People in Japan speak", "Japan"),
    ("The table beside the house", "table"),
    ("John gave a drink to", "drink"),
]
GROUPS = list(dict.fromkeys(group for _, group in TEXTS))


def prompts_of(rows: list[tuple[str, str]], name: str = "texts") -> Prompts:
    assert TINY.tokenizer is not None
    return Prompts.of([{"clean": text, "group": group} for text, group in rows], TINY.tokenizer, name=name)


PROMPTS = prompts_of(TEXTS)


def theirs(block: int, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """From transformers' router logits of one prompt alone: the chosen experts by token, [T] of sets, and margins."""
    tokens = torch.tensor([PROMPTS.rows[prompt].tokens])
    with torch.no_grad():
        logits = ORACLE.model(tokens, use_cache=False, output_router_logits=True).router_logits[block - 1]
    scores = logits.sigmoid() + ORACLE.weights().read(block, "b")
    sets, margins = [], []
    for row in scores.tolist():
        groups = [row[i : i + E // 4] for i in range(0, E, E // 4)]
        allowed = sorted(range(4), key=lambda g: -sum(sorted(groups[g])[-2:]))[:2]
        ranked = sorted((e for e in range(E) if e // (E // 4) in allowed), key=lambda e: -row[e])
        sets.append(set(ranked[:K]))
        margins.append(row[ranked[K - 1]] - row[ranked[K]])
    return np.array(sets), np.array(margins)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return routing(MODEL, PROMPTS)


def rows(df: pd.DataFrame, metric: str, block: int) -> pd.DataFrame:
    return df[(df["metric"] == metric) & (df["block"] == block)]


def by_group(values: list[float]) -> list[float]:
    return [float(np.mean([v for v, (_, g) in zip(values, TEXTS, strict=True) if g == group])) for group in GROUPS]


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", MOE)
def test_loads_are_those_of_transformers_router_by_prompt_and_then_by_group(block: int, table: pd.DataFrame) -> None:
    sets = [theirs(block, p)[0] for p in range(len(TEXTS))]
    here = rows(table, "load", block)
    assert here["expert"].tolist() == list(range(E))
    for e, value in zip(range(E), here["value"], strict=True):
        groups = by_group([sum(e in one for one in some) / len(some) for some in sets])
        assert value == pytest.approx(np.mean(groups))
    assert here["base"].eq(K / E).all()
    assert here["value"].sum() == pytest.approx(K)
    assert here["n"].eq(len(GROUPS)).all()


@pytest.mark.parametrize("block", MOE)
def test_margins_are_to_the_next_expert_within_the_allowed_groups(block: int, table: pd.DataFrame) -> None:
    expected = np.mean(by_group([float(np.median(theirs(block, p)[1])) for p in range(len(TEXTS))]))
    assert rows(table, "margin", block)["value"].item() == pytest.approx(expected, rel=1e-4)
    assert 0 < expected < 0.2


def test_a_margin_to_nothing_is_none() -> None:
    """Where the allowed groups hold k experts, no other can take a place."""
    dims = dataclasses.replace(MODEL.dims, n_group=4, topk_group=1)
    df = routing(HookedModel(random_weights(dims), TINY.tokenizer), PROMPTS, blocks=[1])
    assert rows(df, "margin", 1)["value"].isna().all()


@pytest.mark.parametrize("block", MOE)
def test_entropy_is_scipys_and_its_error_the_jackknifes(block: int, table: pd.DataFrame) -> None:
    sets = [theirs(block, p)[0] for p in range(len(TEXTS))]
    loads = np.array([by_group([sum(e in one for one in some) / len(some) for some in sets]) for e in range(E)])
    row = rows(table, "entropy", block).iloc[0]
    assert row["value"] == pytest.approx(scipy.stats.entropy(loads.mean(1), base=2))
    assert row["base"] == np.log2(E)
    n = len(GROUPS)
    less = [scipy.stats.entropy(np.delete(loads, i, axis=1).mean(1), base=2) for i in range(n)]
    assert row["stderr"] == pytest.approx(np.sqrt((n - 1) / n * np.sum((less - np.mean(less)) ** 2)))


def test_entropy_of_an_unused_expert_is_finite() -> None:
    load = np.array([0.5, 0.0, 1.5, 0.0])
    assert float(entropy_bits(load)) == pytest.approx(scipy.stats.entropy(load, base=2))


def test_gates_and_contributions_are_means_over_the_tokens_that_chose_the_expert(table: pd.DataFrame) -> None:
    block, values = 2, {"gate": [[] for _ in range(E)], "contribution": [[] for _ in range(E)]}
    for p in range(len(TEXTS)):
        run = MODEL.run(
            torch.tensor([PROMPTS.rows[p].tokens]),
            want=["blocks.2.experts", "blocks.2.gates", "blocks.2.delta_experts"],
        )
        held: dict[str, dict[int, list[float]]] = {"gate": {}, "contribution": {}}
        for t, chosen in enumerate(run["experts", 2][0].tolist()):
            for k, e in enumerate(chosen):
                held["gate"].setdefault(e, []).append(float(run["gates", 2][0, t, k]))
                held["contribution"].setdefault(e, []).append(float(run["delta_experts", 2][0, t, k].norm()))
        for metric, found in held.items():
            for e in range(E):
                values[metric][e].append(float(np.mean(found[e])) if e in found else np.nan)
    for metric, by_expert in values.items():
        here = rows(table, metric, block).set_index("expert")
        for e in range(E):
            groups = [
                [v for v, (_, g) in zip(by_expert[e], TEXTS, strict=True) if g == group and v == v] for group in GROUPS
            ]
            means = [np.mean(some) for some in groups if some]
            assert here.loc[e, "n"] == len(means)
            if means:
                assert here.loc[e, "value"] == pytest.approx(np.mean(means), rel=1e-5)
            else:
                assert pd.isna(here.loc[e, "value"])


def test_coactivation_is_counted_pair_by_pair() -> None:
    df = coactivation(MODEL, PROMPTS, 1)
    sets = [theirs(1, p)[0] for p in range(len(TEXTS))]
    assert list(zip(df["expert"], df["feature"], strict=True)) == list(combinations(range(E), 2))
    for (i, j), value in zip(combinations(range(E), 2), df["value"], strict=True):
        assert value == pytest.approx(np.mean(by_group([sum({i, j} <= s for s in some) / len(some) for some in sets])))
    for column in ("value", "base"):
        assert df[column].sum() == pytest.approx(K * (K - 1) / 2)
    assert df["base"].ge(0).all()


# ---- what the token would say ----------------------------------------------------------------------------------------


def contexts(sets: list[Prompts]) -> list[tuple[tuple[int, ...], int, tuple[int, str]]]:
    """Each token of all sets: what stands before it and itself, its set, its group."""
    return [
        (prompt.tokens[: t + 1], i, (i, prompt.group))
        for i, some in enumerate(sets)
        for prompt in some.rows
        for t in range(len(prompt.tokens))
    ]


@pytest.mark.parametrize("apart", ["set", "group"])
@pytest.mark.parametrize("alike", [True, False], ids=["same token", "any"])
def test_the_mean_elsewhere_counts_each_context_once_and_none_of_its_own(apart: str, alike: bool) -> None:
    sets = [PROMPTS, prompts_of([*TEXTS[4:], ("Mary has a house in", "Mary")], "others")]
    places = contexts(sets)
    values = np.array([[hash(context) % 7, len(context)] for context, _, _ in places], dtype=float)  # equal if alike
    found = module._Contexts.of(sets).mean_elsewhere(values, apart, alike)  # type: ignore[arg-type]
    for i, (context, one_set, group) in enumerate(places):
        own = {c for c, s, g in places if (s == one_set if apart == "set" else g == group)}
        other = {c: v for (c, _, _), v in zip(places, values.tolist(), strict=True) if c not in own}
        kept = [v for c, v in other.items() if not alike or c[-1] == context[-1]]
        if kept:
            assert found[i] == pytest.approx(np.mean(kept, axis=0))
        else:
            assert np.isnan(found[i]).all()


def planted(choose: Callable[[int, int], int], sets: list[Prompts], monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """The study of a router that chooses one of four experts for a token of a set."""

    def look(model: HookedModel, prompts: Prompts, blocks: list[int]) -> dict[int, module._Look]:
        which = [some.name for some in sets].index(prompts.name)
        chosen = np.array([np.eye(4)[choose(token, which)] for row in prompts.rows for token in row.tokens])
        nothing = np.full_like(chosen, np.nan)
        return dict.fromkeys(blocks, module._Look(chosen, nothing, nothing, np.zeros(len(chosen))))

    monkeypatch.setattr(module, "_look", look)
    return routing(MODEL, sets, blocks=[1])


SUBJECTS = ("France", "Japan", "Peru", "Chile", "Kenya", "Egypt", "Cuba", "Nepal", "Ghana", "Qatar")


def two_sets() -> list[Prompts]:
    known = [s for s in SUBJECTS if s in _vocabulary()]
    assert len(known) >= 9
    capital = prompts_of([(f"The capital of {s} is", s) for s in known], "capital")
    people = prompts_of([(f"People in {s} speak", s) for s in known], "people")
    return [capital, people]


def _vocabulary() -> set[str]:
    assert TINY.tokenizer is not None
    return {TINY.tokenizer.token(i) for i in range(410)}


def test_what_follows_the_token_alone_is_no_specialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    df = planted(lambda token, which: token % 4, two_sets(), monkeypatch)
    assert (df[df["metric"] == "load"]["p"] < 0.01).any()  # the sets use other experts: they have other words
    beyond = df[df["metric"] == "load_given_token"]
    assert beyond["effect"].eq(0).all()
    assert (df[df["metric"] == "told_by_token"]["value"] == 1).all()
    assert (df[df["metric"] == "told_by_token"]["base"] < 0.6).all()


def test_what_follows_the_set_is_seen_beyond_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = two_sets()[0].rows[0].tokens[0]  # <bos> is one context, whatever comes after
    df = planted(lambda token, which: 3 if token == shared else which, two_sets(), monkeypatch)
    beyond = df[df["metric"] == "load_given_token"]
    assert len(beyond) == 8
    assert (beyond["p"] < 0.05).sum() == 4
    assert sorted(beyond["effect"]) == [-1, -1, 0, 0, 0, 0, 1, 1]
    assert beyond.groupby("prompts")["effect"].sum().abs().max() < 1e-12  # what one expert gets, others lose


def test_one_set_says_nothing_of_specialisation(table: pd.DataFrame) -> None:
    assert "load_given_token" not in set(table["metric"])


# ---- the tiny model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks() -> pd.DataFrame:
    assert TINY.tokenizer is not None
    return routing(TINY, [Prompts.load(task, TINY.tokenizer) for task in ("ioi", "induction", "job")])


def test_the_first_router_goes_by_the_token_and_no_more(tasks: pd.DataFrame) -> None:
    """Words of a kind go to experts of their own; that lists of names use other experts than stories is because they
    hold other words."""
    told = rows(tasks, "told_by_token", 1)
    assert (told["value"] > 0.75).all()
    assert (told["base"] < 0.25).all()
    lists = tasks[tasks["prompts"] == "induction"]
    off_even = rows(lists, "load", 1)["effect"].abs().sum()
    beyond = rows(lists, "load_given_token", 1)["effect"].abs().sum()
    assert off_even > 1.5
    assert beyond < 0.35 * off_even


KINDS = {"names": NAMES, "countries": [country for country, *_ in COUNTRIES], "places": PLACES, "objects": OBJECTS}


def apart(model: HookedModel) -> float:
    """How many experts of block 1, of k, two words of a kind have in common, less two of different kinds: means over
    the words of four kinds as they stand in the shipped prompts."""
    assert TINY.tokenizer is not None
    chose: dict[int, list[torch.Tensor]] = {}
    for task in ("ioi", "capital", "job"):
        prompts = Prompts.load(task, TINY.tokenizer)
        experts = model.run(*prompts.batch(), want="blocks.1.experts")["experts", 1]
        for row, found in zip(prompts.rows, experts, strict=True):
            for token, chosen in zip(row.tokens, found, strict=False):
                chose.setdefault(token, []).append(torch.nn.functional.one_hot(chosen, model.dims.e).sum(0).double())
    ids = {kind: [TINY.tokenizer.id(word) for word in words] for kind, words in KINDS.items()}
    shares = {
        kind: torch.stack([torch.stack(chose[i]).mean(0) for i in some if i in chose]) for kind, some in ids.items()
    }
    assert min(map(len, shares.values())) >= 10
    same = []
    for share in shares.values():
        pairs = share @ share.T
        same.append(float((pairs.sum() - pairs.trace()) / (len(share) * (len(share) - 1))))
    other = [float((a @ b.T).mean()) for a, b in combinations(shares.values(), 2)]
    return (float(np.mean(same)) - float(np.mean(other))) / model.dims.k


def test_words_of_a_kind_go_to_experts_of_their_own() -> None:
    """With random weights they don't, whatever the seed."""
    assert apart(TINY) > 0.35
    for seed in (0, 1, 2):
        assert abs(apart(HookedModel(random_weights(TINY.dims, seed), TINY.tokenizer))) < 0.1


def test_an_expert_that_writes_far_more_than_others_is_told() -> None:
    """A planted outlier: its down-projection tenfold. Who chooses it, and by what gate, is as before; what it adds is
    ten times as much, and what others of its block add is the same."""
    weights, before = (
        MODEL.decoder.weights,
        routing(MODEL, PROMPTS, blocks=[2]).set_index(["metric", "expert"])["value"],
    )
    assert isinstance(weights, InMemory)
    added = before["contribution"].dropna()
    assert added.max() < 4 * added.median(), "no outlier yet"
    e = int((added - added.median()).abs().idxmin())
    tenfold = weights.read(2, "W_2_e").clone()
    tenfold[e] *= 10
    planted = HookedModel(InMemory(MODEL.dims, {**weights.tensors, (2, "W_2_e"): tenfold}), TINY.tokenizer)
    after = routing(planted, PROMPTS, blocks=[2]).set_index(["metric", "expert"])["value"]
    for metric in ("load", "gate"):
        pd.testing.assert_series_equal(after[metric], before[metric])
    times = (after["contribution"] / before["contribution"]).dropna().astype(float)
    assert times[e] == pytest.approx(10, rel=1e-4)
    assert times.drop(e).to_numpy() == pytest.approx(1, rel=1e-5)
    assert after["contribution"].dropna().idxmax() == e


def test_the_last_router_hears_the_context(tasks: pd.DataFrame) -> None:
    """The contrast: there the same names are routed otherwise in a list than in a story."""
    lists = tasks[tasks["prompts"] == "induction"]
    assert rows(lists, "load_given_token", 3)["effect"].abs().sum() > 1.0
    assert (rows(lists, "load_given_token", 3)["p"] < 0.01).sum() >= 4
    assert (rows(tasks, "told_by_token", 3)["value"] < 0.7).all()


def test_a_router_of_random_weights_tells_tokens_apart_less(tasks: pd.DataFrame) -> None:
    assert TINY.tokenizer is not None
    random = HookedModel(random_weights(TINY.dims), TINY.tokenizer)
    df = routing(random, [Prompts.load("job", TINY.tokenizer), Prompts.load("ioi", TINY.tokenizer)], blocks=[1])
    trained = rows(tasks, "told_by_token", 1)
    assert rows(df, "told_by_token", 1)["effect"].max() < 0.5 * trained["effect"].min()


# ---- the split of an effect ------------------------------------------------------------------------------------------


JOB = Prompts.load("job", TINY.tokenizer).subset(range(24))
LOGIT = ["logit_difference"]


def parts(df: pd.DataFrame) -> list[float]:
    return [float(x) for x in df["effect"]]


@pytest.mark.parametrize("gates", [False, True], ids=["choice", "choice and gates"])
def test_the_three_parts_are_runs_by_hand_and_add_up(gates: bool) -> None:
    edit, router = zero("O", 1, h=1), ("experts", "gates") if gates else ("experts",)
    df = split(TINY, JOB, edit, metrics=LOGIT, gates=gates)
    tokens, keep = JOB.batch()
    want = ["logits", *(f"blocks.{b}.{t}" for b in (1, 2, 3) for t in ("experts", "gates"))]
    base = TINY.run(tokens, keep, want=want)
    whole = TINY.run(tokens, keep, want=want, edits=[edit], base=base)
    frozen = TINY.run(tokens, keep, edits=[edit, *map(freeze, router)], base=base)
    moved = [patch(tensor, block, source=whole) for block in (1, 2, 3) for tensor in router]
    alone = TINY.run(tokens, keep, edits=moved, base=base)
    last = torch.tensor([len(prompt.tokens) - 1 for prompt in JOB.rows])
    right, wrong = JOB.ids("answer"), JOB.ids("wrong")

    def difference(run: object) -> float:
        logits = run["logits"][torch.arange(len(last)), last].double()  # type: ignore[index]
        each = logits.gather(1, right[:, None]) - logits.gather(1, wrong[:, None])
        return float(each.mean())

    effects = [difference(run) - difference(base) for run in (whole, frozen, alone)]
    assert parts(df)[:3] == pytest.approx(effects, abs=1e-9)
    assert parts(df)[3] == pytest.approx(effects[0] - effects[1] - effects[2], abs=1e-9)
    assert df["frozen"].tolist()[1] == ", ".join(router)
    assert df["frozen"].isna().tolist() == [True, False, True, True]
    assert df["routing_agreement"].tolist()[:3] == [whole.routing_agreement, 1.0, alone.routing_agreement]
    assert df["flips"][0] > 0
    assert pd.isna(df["value"][3])


def test_an_edit_that_moves_no_choice_has_no_part_in_the_routing() -> None:
    df = split(TINY, JOB, zero("h_s", 3), metrics=LOGIT)
    assert parts(df)[0] == parts(df)[1] != 0
    assert parts(df)[2:] == [0, 0]


def test_an_edit_by_the_routing_alone_is_all_routing() -> None:
    """A direction that only the router of the last block reads."""
    direction = torch.randn(TINY.dims.d, generator=torch.Generator().manual_seed(1)) * 3
    df = split(TINY, JOB, add("x_ffn", 3, direction=direction, into="router_logits"), metrics=LOGIT, gates=True)
    whole, frozen, alone, interaction = parts(df)
    assert abs(whole) > 0.1
    assert frozen == 0
    assert alone == pytest.approx(whole, abs=1e-4)
    assert interaction == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("edits", "error", "says"),
    [
        (exclude(2, e=3), BadEdit, "would do nothing"),
        (force(2, [1, 2]), BadEdit, "overlap|replaces"),
        (zero("logits"), OutOfRange, "no block that these edits reach has experts"),
    ],
    ids=["exclude", "force", "after the blocks"],
)
def test_edits_that_frozen_routing_would_cut_off_are_refused(edits: Edit, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        split(TINY, JOB, edits, metrics=LOGIT)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_asked() -> None:
    with pytest.raises(OutOfRange, match="block 0 is dense"):
        routing(TINY, JOB, blocks=[0])
    with pytest.raises(OutOfRange, match="block 9"):
        routing(TINY, JOB, blocks=[9])
    with pytest.raises(BadFrame, match="told apart by name; these are texts, texts"):
        routing(MODEL, [PROMPTS, PROMPTS])
    with pytest.raises(BadFrame, match="none"):
        routing(MODEL, [])
    dense = dataclasses.replace(TINY.dims, moe=(False, False))
    with pytest.raises(OutOfRange, match="no block of this model has experts"):
        moe_blocks(HookedModel(random_weights(dense)), None)


def test_rows_of_two_splits_are_told_apart() -> None:
    """By what was patched in, by the seed and by the reference set, each where it counts."""
    drawn = [split(MODEL, PROMPTS, "noise blocks.1.O h=1", metrics=["kl"], seed=seed) for seed in (0, 1)]
    assert len(join(*drawn)) == 8
    text = "zero blocks.1.O h=1"
    choice, both = (split(MODEL, PROMPTS, text, metrics=["kl"], gates=gates) for gates in (False, True))
    assert set(choice["edit"]) & set(both["edit"]) == {choice["edit"][0]}  # the whole, which is the same
    assert "options" not in choice
    assert set(both["options"]) == {"gates=True"}
    assert len(join(choice, both)) == 8
    assert "source" not in choice
    others = [dataclasses.replace(PROMPTS, name=name) for name in ("one", "other")]
    text = "mean blocks.1.O h=1"
    assert len(join(*(split(MODEL, PROMPTS, text, metrics=["kl"], reference=some) for some in others))) == 8


def test_a_split_needs_an_edit() -> None:
    for edits in ([], [freeze("A")]):
        with pytest.raises(BadEdit, match="nothing is edited"):
            split(TINY, JOB, edits, metrics=LOGIT)
    held = split(TINY, JOB, [zero("O", 1, h=1), freeze("A", 2)], metrics=LOGIT)
    assert held["frozen"].fillna("").tolist() == ["A", "A, experts", "", ""]


def test_one_prompt_is_enough_and_says_how_little_it_is() -> None:
    df = routing(MODEL, PROMPTS.subset([1]), blocks=[1])
    assert df["n"].dropna().isin([0, 1]).all()
    assert "stderr" not in df
    for metric in ("load", "entropy", "margin"):
        assert rows(df, metric, 1)["value"].notna().all()
    assert rows(df, "told_by_token", 1)["value"].isna().all()  # nobody else says anything
    (table,) = routing_tables(df)
    assert "–" in table.rows[0]


def test_watching_leaves_nothing_behind_and_stops_early() -> None:
    df = routing(MODEL, PROMPTS, blocks=[1])
    assert set(df["block"]) == {1}
    assert not MODEL.watched()
    assert set(df["study"]) == {"routing"}


# ---- from the shell --------------------------------------------------------------------------------------------------


def test_the_command_holds_tasks_against_each_other(tmp_path: Path) -> None:
    asked = ["routing", "--task", "job", "--task", "induction", "--block", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    for words in ("Routing: job, n = 80", "Routing: induction, n = 62", "told by token", "beyond the token"):
        assert words in done.output
    names = {"routing.parquet", "routing.csv", "load_block1.png", "load_given_token_block1.png"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_one_task_is_drawn_block_by_block() -> None:
    assert TINY.tokenizer is not None
    df = routing(TINY, JOB)
    ((name, ax),) = load_maps(df)
    assert (name, ax.get_ylabel(), ax.get_xlabel()) == ("load", "block", "expert")
    (table,) = routing_tables(df)
    assert [row[0] for row in table.rows] == ["1", "2", "3"]
    load = rows(df, "load", 2).set_index("expert")["value"]
    assert table.rows[1][6].startswith(f"{load.idxmax()} ({load.max():.0%})")
    assert "beyond the token" not in table.header
