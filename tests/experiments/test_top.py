"""The strongest tokens, against everything held at once and sorted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from experiments import Prompts, bars
from experiments import top as module
from experiments.cli import app
from experiments.tables import top_tables
from experiments.top import top
from hooks import HookedModel, Run
from probe.errors import BadEdit, BadText, OutOfRange, ShapeMismatch, UnknownDim, UnknownTensor

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
JOB, LISTS = (Prompts.load(task, MODEL.tokenizer) for task in ("job", "induction"))
TEXTS = [prompt.clean for prompts in (JOB, LISTS) for prompt in prompts.rows[:20]]
DIRECTION = torch.randn(128, generator=torch.Generator().manual_seed(1))
NARROW = torch.randn(32, generator=torch.Generator().manual_seed(2))

ASKED: dict[str, tuple[str, int | None, dict[str, int], Tensor | None]] = {
    "a neuron": ("h", 0, {"f": 17}, None),
    "an expert's neuron": ("h_e", 2, {"e": 5, "m": 7}, None),
    "an expert": ("affinity", 2, {"e": 5}, None),
    "a gate": ("gates", 1, {"e": 3}, None),
    "a direction": ("x_next", 3, {}, DIRECTION),
    "a direction in a head": ("O", 1, {"h": 2}, NARROW),
    "a direction in an expert": ("delta_experts", 2, {"e": 9}, DIRECTION),
    "a head's feature": ("Q_R", 1, {"h": 3, "r": 4}, None),
    "a composite axis": ("q_C", 1, {"h": 1, "n": 2}, None),
    "a scale": ("s_ffn", 2, {}, None),
    "a key": ("K", 2, {"h": 0, "q": 3}, None),
    "a logit": ("logits", None, {"V": 33}, None),
}
SITES = [tensor if block is None else f"blocks.{block}.{tensor}" for tensor, block, *_ in ASKED.values()]


@cache
def runs() -> list[tuple[list[int], Run]]:
    """Each text alone."""
    ids = [MODEL.tokenizer.encode(text) for text in TEXTS]  # type: ignore[union-attr]
    return [(one, MODEL.run(torch.tensor([one]), want=[*SITES, "blocks.*.experts"])) for one in ids]


def number(run: Run, name: str, t: int) -> float | None:
    """What is asked, at one token of a text; None where it does not exist."""
    tensor, block, where, direction = ASKED[name]
    one = run[tensor if block is None else f"blocks.{block}.{tensor}"][0, t]
    if tensor in ("h_e", "gates", "delta_experts"):
        chosen = run["experts", block][0, t].tolist()
        if where["e"] not in chosen:
            return None
        one = one[chosen.index(where["e"])]
    if tensor == "q_C":
        return float(one[where["h"] * MODEL.dims.n + where["n"]])
    if "h" in where:
        one = one[where["h"]]
    if direction is not None:
        return float(one @ direction)
    rest = [i for dim, i in where.items() if dim != "h" and (dim != "e" or tensor == "affinity")]
    return float(one[rest[0]] if rest else one)


@cache
def everything(name: str) -> list[tuple[float, int, int]]:
    """Every context's value, text and position, strongest first; each context where it first stands."""
    seen, found = set(), []
    for i, (ids, run) in enumerate(runs()):
        for t in range(len(ids)):
            value = number(run, name, t)
            if value is not None and tuple(ids[: t + 1]) not in seen:
                found.append((value, i, t))
            seen.add(tuple(ids[: t + 1]))
    return sorted(found, key=lambda one: -one[0])


@pytest.mark.parametrize("batch", [1, 7, 100])
@pytest.mark.parametrize("name", ASKED)
def test_the_strongest_are_those_of_all_sorted(name: str, batch: int) -> None:
    tensor, block, where, direction = ASKED[name]
    expected = everything(name)
    df = top(MODEL, TEXTS, tensor, block, where=where, direction=direction, n=9, batch=batch)
    assert df["value"].tolist() == pytest.approx([value for value, _, _ in expected[:9]], rel=1e-5, abs=2e-5)
    by_place = {(i, t): value for value, i, t in expected}
    for row in df.to_dict("records"):  # near ties may stand in either order
        assert by_place[row["example"], row["pos"]] == pytest.approx(row["value"], rel=1e-5, abs=2e-5)
    assert not df.duplicated(["example", "pos"]).any()
    assert set(df["metric"]) == {"largest"}


@pytest.mark.parametrize("name", ["a neuron", "an expert's neuron", "a direction"])
def test_the_smallest_are_the_other_end(name: str) -> None:
    tensor, block, where, direction = ASKED[name]
    df = top(MODEL, TEXTS, tensor, block, where=where, direction=direction, n=5, smallest=True, batch=16)
    assert df["value"].tolist() == pytest.approx([value for value, _, _ in everything(name)[:-6:-1]], abs=2e-5)
    assert set(df["metric"]) == {"smallest"}


def test_several_are_ranked_apart_and_a_dim_that_is_not_named_is_all_of_its_own() -> None:
    both = top(MODEL, TEXTS, "h", 0, where={"f": [17, 3]}, n=4)
    assert list(both.groupby("feature", sort=False).size().items()) == [(17, 4), (3, 4)]
    alone = top(MODEL, TEXTS, "h", 0, where={"f": 3}, n=4)
    assert both[both["feature"] == 3]["value"].tolist() == alone["value"].tolist()
    heads = top(MODEL, TEXTS[:4], "O", 1, direction=NARROW, n=2)
    assert heads["head"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    neurons = top(MODEL, TEXTS[:4], "h_e", 2, where={"e": [5, 9]}, n=1)
    assert neurons.groupby("expert")["feature"].nunique().to_dict() == dict.fromkeys([5, 9], MODEL.dims.m)
    every = top(MODEL, TEXTS[:4], "h", 0, n=1)
    assert every["feature"].tolist() == list(range(MODEL.dims.f))


def test_contexts_show_the_token_and_what_stands_around_it() -> None:
    df = top(MODEL, ["Paul Jones lives in", "Mary and John went to the shop"], "x_mid", 0, direction=DIRECTION, n=50)
    assert len(df) == 5 + 7  # <bos> counts once
    for row in df.to_dict("records"):
        assert f"⟦{row['token']}⟧" in row["context"]
        words = ["<bos>", *["Paul Jones lives in", "Mary and John went to the shop"][row["example"]].split()]
        assert words[row["pos"]] == row["token"]
        assert row["context"].replace("⟦", "").replace("⟧", "") == " ".join(
            words[max(0, row["pos"] - 6) : row["pos"] + 7]
        )


def test_one_text_said_many_times_counts_once() -> None:
    once = top(MODEL, TEXTS[:1], "h", 0, where={"f": 17}, n=30)
    often = top(MODEL, TEXTS[:1] * 9, "h", 0, where={"f": 17}, n=30, batch=2)
    assert len(often) == len(once) == len(MODEL.tokenizer.encode(TEXTS[0]))  # type: ignore[union-attr]
    assert often["example"].eq(0).all()


def test_texts_may_be_a_stream_of_which_little_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []

    def stream() -> Iterator[str]:
        for i, text in enumerate(TEXTS):
            passed.append(i)
            yield text

    held: list[int] = []
    padded = module.padded

    def seen(rows: Any, device: Any) -> Any:
        held.append(len(passed))
        return padded(rows, device)

    monkeypatch.setattr(module, "padded", seen)
    df = top(MODEL, stream(), "h", 0, where={"f": 17}, n=5, batch=8)
    assert held == list(range(8, len(TEXTS) + 1, 8))  # a batch is read when it is run
    assert set(df["prompts"]) == {"texts"}
    assert df["value"].tolist() == top(MODEL, TEXTS, "h", 0, where={"f": 17}, n=5, batch=8)["value"].tolist()


def test_prompts_give_their_tokens_and_their_name() -> None:
    df = top(MODEL, JOB, "h", 0, where={"f": 17}, n=3)
    assert set(df["prompts"]) == {"job"}
    assert set(df["token"]) == {"as"}  # what a fact of this neuron looks like: it opens on 'works as'


def test_nothing_below_the_tensor_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int | None] = []
    weights = MODEL.decoder.weights

    class Seen:
        dims, resident, fingerprint = weights.dims, True, "seen"

        def read(self, block: int | None, name: str, experts: Any = None) -> Tensor:
            read.append(block)
            return weights.read(block, name, experts)

    model = HookedModel(Seen(), MODEL.tokenizer)
    read.clear()
    top(model, TEXTS[:3], "affinity", 1, where={"e": 2})
    assert {block for block in read if block is not None} == {0, 1}


@pytest.mark.parametrize(
    ("tensor", "block", "options", "error", "says"),
    [
        ("h", 1, {}, UnknownTensor, "h_e"),
        ("A", 1, {}, BadEdit, "no number at a position"),
        ("experts", 1, {}, BadEdit, "affinity or gates"),
        ("h_e", 1, {"where": {"m": 3}}, BadEdit, "name the expert, e="),
        ("h", 0, {"where": {"e": 3}}, UnknownDim, "e can't be named here; what can is f"),
        ("h", 0, {"where": {"T": 3}}, UnknownDim, "T can't be named"),
        ("O", 0, {"direction": NARROW, "where": {"v": 1}}, UnknownDim, "v can't be named here; what can is h"),
        ("gates", 1, {"where": {"e": 2, "k": 0}}, UnknownDim, "k can't be named"),
        ("h", 0, {"where": {"f": 160}}, OutOfRange, "160"),
        ("affinity", 1, {"where": {"e": 16}}, OutOfRange, "16"),
        ("x_next", 0, {"direction": NARROW}, ShapeMismatch, r"\[32\]; the last axis is 128 wide"),
        ("x_next", 0, {"direction": torch.zeros(128)}, BadEdit, "points nowhere"),
        ("x_next", 0, {"direction": torch.full((128,), torch.nan)}, BadEdit, "points nowhere"),
        ("x_next", 0, {"direction": [*[1.0] * 127, float("inf")]}, BadEdit, "points nowhere"),
        ("h", 0, {"n": 0}, OutOfRange, "at least one"),
        ("h", 0, {"batch": 0}, OutOfRange, "at least one"),
        ("h", 7, {}, OutOfRange, "block 7"),
    ],
)
def test_what_cannot_be_ranked(
    tensor: str, block: int, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        top(MODEL, TEXTS[:2], tensor, block, **options)


def test_an_expert_that_nobody_chose_is_said() -> None:
    text = [TEXTS[0]]
    chosen = set(
        MODEL.run(torch.tensor([MODEL.tokenizer.encode(text[0])]), want="blocks.2.experts")["experts", 2]
        .flatten()
        .tolist()
    )  # type: ignore[union-attr]
    (other, *_) = set(range(MODEL.dims.e)) - chosen
    (one, *_) = chosen
    df = top(MODEL, text, "gates", 2, where={"e": [other, one]})
    assert df[df["expert"] == other]["value"].isna().tolist() == [True]
    assert df[df["expert"] == one]["value"].notna().all()
    first, second = top_tables(df)
    assert "no token of these texts chose the expert" in str(first)
    assert "⟦" in str(second)
    assert len(dict(bars.rankings(df))) == 2
    alone = top(MODEL, text, "gates", 2, where={"e": other})
    assert alone["value"].isna().tolist() == [True]


def test_rankings_that_are_not_told_are_counted() -> None:
    df = top(MODEL, TEXTS[:2], "affinity", 2, n=1)
    told = list(top_tables(df))
    assert [bool(table.notes) for table in told] == [False] * 7 + [True]
    assert told[-1].notes == [f"the first 8 of {MODEL.dims.e} rankings; the frame holds all"]
    assert not any(table.notes for table in top_tables(df, most=MODEL.dims.e))


def test_a_place_named_twice_is_one() -> None:
    assert len(top(MODEL, TEXTS[:2], "h", 0, where={"f": [3, 3, -157]}, n=2)) == 2


def test_texts_and_a_tokenizer_are_needed() -> None:
    with pytest.raises(BadText, match="put it in a list"):
        top(MODEL, TEXTS[0], "h", 0)
    with pytest.raises(BadText, match="there is no text"):
        top(MODEL, [], "h", 0)
    with pytest.raises(BadText, match="no tokenizer"):
        top(HookedModel(MODEL.decoder.weights), TEXTS, "h", 0)


def test_the_command(tmp_path: Any) -> None:
    asked = ["top", "blocks.0.h", "--task", "job", "--at", "f=17", "--at", "f=3", "--n", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "⟦as⟧" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"top.parquet", "top.csv", "top0.png", "top1.png"}
    read = pd.read_parquet(tmp_path / "top.parquet")
    assert len(read) == 8
    wrong = CliRunner().invoke(app, ["top", "blocks.0.h", "--task", "job", "--at", "f"])
    assert wrong.exit_code == 2
