"""Scores split in two against edited runs and loops; kinds of head against TransformerLens and switched-off heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformer_lens import head_detector
from typer.testing import CliRunner

from experiments import frames
from experiments.cli import app
from experiments.frames import BadFrame
from experiments.pictures import head_maps
from experiments.prompts import Prompt, Prompts
from experiments.scores import KINDS, heads_above, repeated, scores
from experiments.study import Reading, report
from hooks import Edit, HookedModel, zero
from hooks.cache import Cache
from probe import Decoder, Tokenizer, numerics, random_weights
from probe.errors import BadText, OutOfRange
from training.facts import above, head_scores
from training.language import NAMES
from training.quiz import Quiz

ALONE = {"zero Q_R": "Q_R", "zero Q_C": "Q_C", "zero Q": "Q"}
Heads = list[tuple[int, int]]


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


@pytest.fixture(scope="module")
def tokenizer(model: HookedModel) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


@pytest.fixture(scope="module")
def some(tokenizer: Tokenizer) -> Prompts:
    """Prompts of unequal length, in which each kind of head has something to attend to."""
    texts = [
        "Mary gave John a book , John gave Mary a",
        "Paul Jones ; Paul",
        "When Mary and John went to the shop , John gave a drink to",
    ]
    return Prompts.of([{"clean": text} for text in texts], tokenizer)


def pattern(model: HookedModel, prompts: Prompts, block: int, edits: Sequence[Edit] = ()) -> Tensor:
    return model.run(*prompts.batch(), want=[f"blocks.{block}.A"], edits=edits)[f"blocks.{block}.A"].double()


def keys_of(kind: str, tokens: Sequence[int], t: int) -> list[int]:
    """Read off the definition."""
    if kind == "previous_token":
        return [t - 1] if t > 1 else []
    if kind == "duplicate_token":
        return [s for s in range(1, t) if tokens[s] == tokens[t]]
    return [s for s in range(1, t + 1) if tokens[s - 1] == tokens[t] and s - 1 < t]


def number(df: pd.DataFrame, edit: str | None = None, **where: Any) -> float:
    here = df[df["edit"].isna() if edit is None else df["edit"] == edit]
    for name, wanted in where.items():
        here = here[here[name] == wanted]
    (value,) = here["value"]
    return float(value)


# ---- right numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", [None, *ALONE])
@pytest.mark.parametrize("block", [0, 3])
def test_patterns_are_those_of_the_edited_run(block: int, edit: str | None, model: HookedModel, some: Prompts) -> None:
    """What content, position or neither would leave, from a run in which the other part is really zero."""
    df = scores(model, some, blocks=[block], per_prompt=True)
    whole = pattern(model, some, block)
    left = whole if edit is None else pattern(model, some, block, [zero(ALONE[edit], block)])
    for b, prompt in enumerate(some.rows):
        queries = range(1, len(prompt.tokens))
        for head in range(model.dims.h):
            where = {"example": b, "head": head}
            for kind in KINDS:
                keys = {t: found for t in queries if (found := keys_of(kind, prompt.tokens, t))}
                assert keys, f"{kind}: prompt {b} has none"
                expected = np.mean([sum(float(left[b, head, t, s]) for s in found) for t, found in keys.items()])
                assert number(df, edit, metric=kind, **where) == pytest.approx(expected, abs=1e-5)
            if edit is not None:
                shared = [float(torch.minimum(whole[b, head, t], left[b, head, t]).sum()) for t in queries]
                assert number(df, edit, metric="overlap", **where) == pytest.approx(np.mean(shared), abs=1e-5)


@pytest.mark.parametrize("block", [1, 3])
def test_the_share_of_content_by_numpy(block: int, model: HookedModel, some: Prompts) -> None:
    cache: Cache
    _, cache = model.run_with_cache(*some.batch(), names_filter=[f"blocks.{block}.{x}" for x in ("S", "Q_C", "K_C")])
    S, Q_C, K_C = (cache[f"blocks.{block}.{name}"].double().numpy() for name in ("S", "Q_C", "K_C"))
    df = scores(model, some, blocks=[block], per_prompt=True)
    average, apart = scores(model, some, blocks=[block]), []
    for head in range(model.dims.h):
        sums = np.zeros((len(some), 2))
        for b, prompt in enumerate(some.rows):
            for t in range(1, len(prompt.tokens)):
                content = K_C[b, : t + 1, head] @ Q_C[b, t, head] * model.dims.tau
                sums[b] += np.cov(content, S[b, head, t, : t + 1], bias=True)[:, 1]
        got = [number(df, metric="content_share", head=head, example=b) for b in range(len(some))]
        np.testing.assert_allclose(got, sums[:, 0] / sums[:, 1], rtol=1e-4)
        ratio_of_means = sums[:, 0].mean() / sums[:, 1].mean()
        assert number(average, metric="content_share", head=head) == pytest.approx(ratio_of_means, rel=1e-4)
        apart.append(abs(ratio_of_means - np.mean(got)))
    assert max(apart) > 1e-3  # the mean of ratios is another number


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_those_of_transformer_lens(kind: str, model: HookedModel, some: Prompts) -> None:
    """Its detector divides by the attention of all queries; ours by the queries that have such a key."""
    df = scores(model, some, per_prompt=True)
    for b, prompt in enumerate(some.rows):
        tokens = torch.tensor([prompt.tokens])
        mask = getattr(head_detector, f"get_{kind}_head_detection_pattern")(tokens).clone()
        mask[:, 0] = 0
        queries = int(mask.any(-1).sum())
        for block in (0, 2, 3):
            A = model.run(tokens, want=[f"blocks.{block}.A"])[f"blocks.{block}.A"][0]
            for head in range(model.dims.h):
                theirs = head_detector.compute_head_attention_similarity_score(
                    A[head].clone(), mask, exclude_bos=True, exclude_current_token=False, error_measure="mul"
                )
                ours = number(df, metric=kind, block=block, head=head, example=b)
                assert ours * queries == pytest.approx(theirs * float(A[head, :, 1:].sum()), abs=1e-4)


def test_the_same_by_chunks_of_queries(model: HookedModel, some: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores(model, some)
    monkeypatch.setattr(numerics, "QUERY_CHUNK", 4)
    np.testing.assert_allclose(scores(model, some)["value"], whole["value"], atol=1e-6)


def test_the_same_batched_and_alone(model: HookedModel, some: Prompts) -> None:
    together = scores(model, some, per_prompt=True)
    for b in range(len(some)):
        alone = scores(model, some.subset([b]), per_prompt=True)
        np.testing.assert_allclose(together[together["example"] == b]["value"], alone["value"], atol=1e-5)


def test_a_prompt_without_such_a_query_does_not_count(model: HookedModel, tokenizer: Tokenizer) -> None:
    rows = [{"clean": "Mary and John"}, {"clean": "Mary and Mary"}, {"clean": "John and John"}]
    df = scores(model, Prompts.of(rows, tokenizer), blocks=[0])
    each = scores(model, Prompts.of(rows, tokenizer), blocks=[0], per_prompt=True)
    here = df[(df["metric"] == "duplicate_token") & df["edit"].isna()]
    assert here["n"].eq(2).all()
    two = each[(each["metric"] == "duplicate_token") & each["edit"].isna() & (each["example"] > 0)]
    np.testing.assert_allclose(here["value"].astype(float), two.groupby("head")["value"].mean(), atol=1e-9)
    none = scores(model, Prompts.of(rows[:1], tokenizer), blocks=[0])
    nothing = none[none["metric"] == "duplicate_token"]
    assert nothing["n"].eq(0).all()
    assert nothing["value"].isna().all()


def test_averages_are_over_groups_and_ratios_of_means(model: HookedModel, tokenizer: Tokenizer) -> None:
    """By hand: prompts of a group first, those without a value left out above and below."""
    rows = [{"clean": "Mary and John", "group": group} for group in ("a", "a", "a", "b")]
    values, per = torch.tensor([1.0, 3.0, torch.nan, 6.0]), torch.tensor([2.0, 4.0, 100.0, 5.0])
    what = {"block": 0, "tensor": "S", "head": 1}
    readings = [Reading(what, "plain", "1", values), Reading(what, "ratio", "1", values, base=per, per=per)]
    df = report(model, Prompts.of(rows, tokenizer), readings, study="test", per_prompt=False, name=None)
    assert df["value"].tolist() == [(2 + 6) / 2, (2 + 6) / (3 + 5)]
    assert df["n"].tolist() == [2, 2]
    assert df["base"].tolist()[1] == ((2 + 4 + 100) / 3 + 5) / 2
    assert df["stderr"].tolist()[0] == pytest.approx(2.0)  # of 2 and 6
    assert df["stderr"].isna().tolist() == [False, True]
    each = report(model, Prompts.of(rows, tokenizer), readings, study="test", per_prompt=True, name=None)
    assert each[each["metric"] == "ratio"]["value"].tolist()[:2] == [0.5, 0.75]
    assert each["group"].tolist() == ["a", "a", "a", "b"] * 2


# ---- what it shows ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lists(model: HookedModel, tokenizer: Tokenizer) -> pd.DataFrame:
    return scores(model, repeated(tokenizer, NAMES, length=12))


@pytest.fixture(scope="module")
def left(model: HookedModel) -> Callable[[Sequence[Edit]], float]:
    """The share of fresh lists that are said on rightly under edits."""
    quiz = Quiz(model.decoder, n=200)
    return lambda edits: quiz.accuracy("induction", lambda _, tokens: model.run(tokens, edits=edits)["logits"])


def off(heads: Heads, tensor: str = "O") -> list[Edit]:
    blocks = sorted({block for block, _ in heads})
    return [zero(tensor, block, h=[head for b, head in heads if b == block]) for block in blocks]


def test_the_heads_are_found_as_sets(model: HookedModel, tokenizer: Tokenizer, lists: pd.DataFrame) -> None:
    """On random lists, on the shipped task, and by another hand on other lists: the same heads."""
    previous, successor = (above(score) for score in head_scores(model.decoder))
    shipped = scores(model, Prompts.load("induction", tokenizer))
    for df in (lists, shipped):
        assert heads_above(df, "previous_token") == previous != []
        assert heads_above(df, "induction") == successor != []
        assert heads_above(df, "duplicate_token") == []


def test_only_attention_as_it_is_makes_a_kind(lists: pd.DataFrame) -> None:
    edited = lists.assign(value=lists["value"].mask(lists["edit"].notna(), 1.0))
    assert heads_above(edited, "previous_token") == heads_above(lists, "previous_token")
    assert heads_above(lists, "previous_token", least=0.0) == [(b, h) for b in range(4) for h in range(4)]


def test_without_them_no_induction(
    model: HookedModel, lists: pd.DataFrame, left: Callable[[Sequence[Edit]], float]
) -> None:
    previous, successor = (heads_above(lists, kind) for kind in ("previous_token", "induction"))
    assert left([]) >= 0.95
    assert left(off(previous)) <= 0.3
    assert left(off(successor)) <= 0.1
    others = [(b, h) for b in range(4) for h in range(4) if (b, h) not in previous + successor]
    for kind in (previous, successor):  # controls: as many others, as late as they come
        assert left(off(others[-len(kind) :])) >= 0.95


def test_each_kind_goes_by_what_it_is_said_to(lists: pd.DataFrame, left: Callable[[Sequence[Edit]], float]) -> None:
    """A previous-token head by position, induction heads by content: the other part can be taken away."""
    previous, successor = (heads_above(lists, kind) for kind in ("previous_token", "induction"))
    for block, head in previous:
        assert number(lists, metric="content_share", block=block, head=head) < 0.05
        assert number(lists, "zero Q_C", metric="overlap", block=block, head=head) > 0.95
        assert number(lists, "zero Q_R", metric="overlap", block=block, head=head) < 0.3
    for block, head in successor:
        assert number(lists, metric="content_share", block=block, head=head) > 0.6
        assert number(lists, "zero Q_R", metric="induction", block=block, head=head) > 0.7
        assert number(lists, "zero Q_C", metric="induction", block=block, head=head) < 0.35
        assert number(lists, "zero Q", metric="induction", block=block, head=head) < 0.1
    assert left(off(previous, "Q_C")) >= 0.95
    assert left(off(previous, "Q_R")) <= 0.3
    assert left(off(successor, "Q_R")) >= 0.9
    assert left(off(successor, "Q_C")) <= 0.6


def test_a_model_that_has_learnt_nothing_has_no_such_heads(model: HookedModel, tokenizer: Tokenizer) -> None:
    untrained = HookedModel(random_weights(model.dims), tokenizer)
    df = scores(untrained, repeated(tokenizer, NAMES))
    assert [heads_above(df, kind) for kind in KINDS] == [[], [], []]
    assert not above(head_scores(Decoder(random_weights(model.dims)))[1])


def test_intervals_hold_the_number(lists: pd.DataFrame) -> None:
    assert lists["n"].eq(32).all()
    inside = (lists["ci_low"] <= lists["value"] + 1e-9) & (lists["value"] <= lists["ci_high"] + 1e-9)
    assert inside.all()


# ---- lists, errors, pictures, the command ----------------------------------------------------------------------------


def test_lists_are_said_twice(tokenizer: Tokenizer) -> None:
    prompts = repeated(tokenizer, NAMES, length=5, n=8)
    for prompt in prompts.rows:
        bos, *said = prompt.tokens
        assert bos == tokenizer.id("<bos>")
        assert said[:5] == said[5:]
        assert len(set(said)) == 5
        assert tokenizer.encode(prompt.clean) == list(prompt.tokens)
        assert prompt.spans == {"END": range(10, 11)}
    assert len({prompt.tokens for prompt in prompts.rows}) == len({prompt.group for prompt in prompts.rows}) == 8
    assert repeated(tokenizer, NAMES, length=5, n=8).rows == prompts.rows
    assert repeated(tokenizer, NAMES, length=5, n=8, seed=1).rows != prompts.rows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 3}, "can't be drawn from 2"),
        ({"length": 1}, "can't be drawn"),
        ({"length": 2, "n": 0}, "can't be drawn"),
        ({"words": ["Mary", "Maryland"]}, "not one token"),
        ({"words": []}, "can't be drawn from 0"),
    ],
)
def test_lists_that_cannot_be_made(options: dict[str, Any], says: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadText, match=says):
        repeated(tokenizer, **{"words": ["Mary", "John"], **options})


def test_what_cannot_be_asked(model: HookedModel, tokenizer: Tokenizer, some: Prompts, lists: pd.DataFrame) -> None:
    with pytest.raises(OutOfRange, match="block 4"):
        scores(model, some, blocks=[4])
    one = Prompts((Prompt("<bos>", (1,), None, None, None, "one", "", {"END": range(0, 1)}),), tokenizer)
    with pytest.raises(BadText, match="no prompt has a second token"):
        scores(model, one)
    with pytest.raises(BadFrame, match="no metric 'inductive'"):
        heads_above(lists, "inductive")
    with pytest.raises(BadFrame, match="by head"):
        heads_above(lists.drop(columns="head"), "induction")


@pytest.fixture
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.usefixtures("_no_figures_left")
def test_a_map_for_each_measure(lists: pd.DataFrame) -> None:
    drawn = dict(head_maps(lists))
    assert list(drawn) == ["content_share", "overlap_zero_Q_R", "overlap_zero_Q_C", *KINDS]
    for ax in drawn.values():
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "block")
        assert ax.images[0].norm.vmax == 1
    assert drawn["overlap_zero_Q_R"].get_title(loc="left") == "Zero Q_R, $A$: overlap, n = 32"
    shown = drawn["induction"].images[0].get_array()
    assert shown is not None
    expected = lists[(lists["metric"] == "induction") & lists["edit"].isna()]
    np.testing.assert_allclose(np.asarray(shown).ravel(), expected["value"].to_numpy(dtype=float))


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["scores", "--task", "induction", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "above 0.5 in previous token: 2.1" in result.output
    assert "above 0.5 in duplicate token: no head" in result.output
    assert "above 0.5 in induction: 3.1, 3.2, 3.3" in result.output
    assert {"scores.parquet", "scores.csv", "content_share.png"} <= {path.name for path in tmp_path.iterdir()}
    df = frames.read(tmp_path / "scores.parquet")
    assert heads_above(df, "induction") == [(3, 1), (3, 2), (3, 3)]
