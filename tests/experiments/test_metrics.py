"""Metrics against torch's own functions, and against sums written out."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from experiments.metrics import METRICS, BadMetric, View, choose, last_logits, teacher_forced
from experiments.prompts import Prompts
from hooks import HookedModel, patch, zero
from probe.errors import BadEdit, BadText

REAL = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]]).bool()  # full, right pads, left pad
LAST = (3, 1, 3)


def view(seed: int) -> View:
    draw = torch.Generator().manual_seed(seed)
    logits, x = torch.randn(3, 4, 11, generator=draw), torch.randn(3, 4, 6, generator=draw)
    words = {"answer": torch.tensor([[1], [5], [9]]), "wrong": torch.tensor([[2], [5], [0]])}
    return View(last_logits(3 * logits, REAL), x, REAL, **words)


BASE, EDITED = view(0), view(1)


def of(name: str) -> torch.Tensor:
    return METRICS[name].of(EDITED, BASE)


def test_logits_are_read_at_the_last_real_token_in_float64() -> None:
    logits = torch.randn(3, 4, 11)
    got = last_logits(logits, REAL)
    assert got.dtype == torch.float64
    for row, place in enumerate(LAST):
        assert torch.equal(got[row], logits[row, place].double())


def test_logit_difference_is_answer_minus_wrong() -> None:
    rows = zip(EDITED.logits, (1, 5, 9), (2, 5, 0), strict=True)
    assert of("logit_difference").tolist() == [float(z[a] - z[w]) for z, a, w in rows]


def test_log_probability_is_minus_cross_entropy() -> None:
    assert EDITED.answer is not None
    torch.testing.assert_close(
        of("log_probability"), -F.cross_entropy(EDITED.logits, EDITED.answer[:, 0], reduction="none")
    )


def test_kl_is_from_base_to_edited() -> None:
    p, q = BASE.logits.log_softmax(-1), EDITED.logits.log_softmax(-1)
    torch.testing.assert_close(of("kl"), F.kl_div(q, p, log_target=True, reduction="none").sum(-1))
    backwards = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)
    assert not torch.allclose(of("kl"), backwards, rtol=0.05)


def test_relative_change_is_by_position_and_leaves_the_first_apart() -> None:
    for row in range(3):
        places = [t for t in range(4) if REAL[row, t]]
        share = [
            float((EDITED.x_next[row, t] - BASE.x_next[row, t]).norm() / BASE.x_next[row, t].norm()) for t in places
        ]
        assert float(of("relative_change")[row]) == pytest.approx(sum(share[1:]) / len(share[1:]), rel=1e-5)
        assert float(of("relative_change_first")[row]) == pytest.approx(share[0], rel=1e-5)


@pytest.mark.parametrize("name", METRICS)
def test_base_against_itself(name: str) -> None:
    metric = METRICS[name]
    assert metric.of(BASE, BASE).shape == (3,)
    assert metric.of(BASE, BASE).dtype == torch.float64
    if not metric.needs:
        assert metric.of(BASE, BASE).tolist() == [0.0, 0.0, 0.0]


def test_without_answers_only_kl_and_change_are_left() -> None:
    assert {m.name for m in choose(None, ())} == {"kl", "relative_change", "relative_change_first"}
    assert [m.name for m in choose(None, ("answer", "wrong"))] == list(METRICS)
    assert [m.name for m in choose(["kl", "log_probability"], ("answer",))] == ["kl", "log_probability"]


@pytest.mark.parametrize(
    ("names", "has", "says"),
    [
        (["kll"], (), r"no metric 'kll'\. Nearest: kl"),
        (["logit_difference"], ("answer",), "logit_difference needs wrong"),
        ([], (), "no metric is asked for"),
    ],
)
def test_metrics_that_cannot_be(names: list[str], has: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadMetric, match=says):
        choose(names, has)


# ---- several spellings, several tokens -------------------------------------------------------------------------------


def test_spellings_are_added_up() -> None:
    some = torch.tensor([[1, 4, 7], [5, -1, -1], [9, 0, -1]])
    p = EDITED.logits.softmax(-1)
    by_hand = [p[row, [i for i in ids if i >= 0]].sum().log() for row, ids in enumerate(some.tolist())]
    view = replace(EDITED, answer=some)
    torch.testing.assert_close(METRICS["log_probability"].of(view, BASE), torch.stack(by_hand))
    z = EDITED.logits.exp()
    assert EDITED.wrong is not None
    ratio = [
        (z[row, [i for i in ids if i >= 0]].sum() / z[row, EDITED.wrong[row, 0]]).log()
        for row, ids in enumerate(some.tolist())
    ]
    torch.testing.assert_close(METRICS["logit_difference"].of(view, BASE), torch.stack(ratio))


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


def prompts(model: HookedModel, *answers: str | list[str]) -> Prompts:
    """Two prompts of unequal length."""
    assert model.tokenizer is not None
    texts = ("The capital of Peru is", "Paul Jones is a")
    rows = [{"clean": text, "answer": answer} for text, answer in zip(texts, answers, strict=True)]
    return Prompts.of(rows, model.tokenizer)


def by_hand(model: HookedModel, text: str, answer: str) -> tuple[float, float]:
    """The log-probability and the logit of one answer, word by word, each from a run of its own on the text so far."""
    assert model.tokenizer is not None
    log_probability = logit = 0.0
    for word in answer.split():
        with torch.no_grad():
            z = model(text)[0, -1].double()
        i = model.tokenizer.id(word)
        log_probability, logit = log_probability + float(z.log_softmax(-1)[i]), logit + float(z[i])
        text = f"{text} {word}"
    return log_probability, logit


def test_answers_of_several_tokens_are_sums_of_teacher_forced_ones(model: HookedModel) -> None:
    said = teacher_forced(model, prompts(model, ["Lima", "Quito and Lima", "Rome ."], "teacher in Rome"))
    first = [by_hand(model, "The capital of Peru is", words) for words in ("Lima", "Quito and Lima", "Rome .")]
    second = by_hand(model, "Paul Jones is a", "teacher in Rome")
    for got, i in ((said.log_probability, 0), (said.logit, 1)):
        expected = [math.log(sum(math.exp(one[i]) for one in first)), second[i]]
        assert got.dtype == torch.float64
        assert got.tolist() == pytest.approx(expected, abs=1e-4)


def test_of_one_token_they_are_the_metrics(model: HookedModel) -> None:
    rows = prompts(model, ["Lima", "Quito"], "teacher")
    tokens, keep = rows.batch()
    assert keep is not None
    view = View(last_logits(model.run(tokens, keep)["logits"], keep), None, keep, rows.spellings("answer"))
    said = teacher_forced(model, rows)
    torch.testing.assert_close(said.log_probability, METRICS["log_probability"].of(view, view))


def test_edits_act_on_teacher_forced_runs(model: HookedModel) -> None:
    rows = prompts(model, "Quito and", "teacher in")
    plain = teacher_forced(model, rows)
    at_end = teacher_forced(model, rows, edits=[zero("O", 2, T="END")])
    for b, (text, words) in enumerate((("The capital of Peru is", "Quito and"), ("Paul Jones is a", "teacher in"))):
        assert model.tokenizer is not None
        place = len(model.tokenizer.encode(text)) - 1
        first, second = (model.tokenizer.id(word) for word in words.split())
        run = model.run(f"{text} {words.split()[0]}", edits=[zero("O", 2, T=place)])["logits"][0].double()
        expected = run[place].log_softmax(-1)[first] + run[place + 1].log_softmax(-1)[second]
        assert float(at_end.log_probability[b]) == pytest.approx(float(expected), abs=1e-4)
    assert (at_end.log_probability - plain.log_probability).abs().min() > 1e-3


def test_what_several_tokens_rule_out_is_refused(model: HookedModel) -> None:
    rows = prompts(model, "Quito and", "teacher")
    for ask in (rows.ids, rows.spellings):
        with pytest.raises(BadText, match="the answer of row 0, 'Quito and', has several tokens"):
            ask("answer")
    two = prompts(model, ["Quito", "Lima"], "teacher")
    with pytest.raises(BadText, match="several spellings of answer"):
        two.ids("answer")
    assert two.spellings("answer")[1].tolist() == [*prompts(model, "Quito", "teacher").ids("answer")[1:].tolist(), -1]
    for place in (-1, [1, -1], slice(-2, None)):
        with pytest.raises(BadEdit, match=r"zero O of block 2 at T=.*: counted from the end"):
            teacher_forced(model, rows, edits=[zero("O", 2, T=place)])
    source = model.run(*rows.batch(), want=["blocks.1.O"])
    with pytest.raises(BadEdit, match="nothing lies beyond its last"):
        teacher_forced(model, rows, edits=[patch("O", 1, source=source)])
    with pytest.raises(BadText, match="row 0 has no wrong"):
        teacher_forced(model, rows, "wrong")
    one = prompts(model, "Quito", "teacher")
    last_one, end = (teacher_forced(model, one, edits=[zero("O", 2, T=place)]) for place in (-1, "END"))
    assert torch.equal(last_one.logit, end.logit)  # nothing is appended, so nothing moves the last
