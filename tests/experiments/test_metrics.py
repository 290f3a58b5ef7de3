"""Metrics against torch's own functions, and against sums written out; and their names."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matplotlib.mathtext import MathTextParser
from torch import Tensor

from experiments.metrics import METRICS, BadMetric, Compared, Metric, Read, View, choose, metric
from probe.errors import UnknownTensor

V = 11
ANSWERS = [[(1,)], [(5,)], [(9,)]]
WRONGS = [[(2,)], [(5,)], [(0,)]]
Spelt = list[list[tuple[int, ...]]]


def read(spelt: Spelt, seed: int, logits: Tensor | None = None) -> Read:
    """Random logits before every token of every spelling of three prompts."""
    flat = [(p, spelling) for p, some in enumerate(spelt) for spelling in some]
    token = torch.tensor([token for _, spelling in flat for token in spelling])
    if logits is None:
        logits = 3 * torch.randn(len(token), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Read(
        logits,
        token,
        torch.tensor([p for p, spelling in flat for _ in spelling]),
        torch.tensor([s for s, (_, spelling) in enumerate(flat) for _ in spelling]),
        torch.tensor([p for p, _ in flat]),
        len(spelt),
    )


def view(seed: int, **reads: Read) -> View:
    return View((), {"read": read([[(4,)], [(0,)], [(7,)]], seed), "answer": read(ANSWERS, seed), **reads})


BASE, EDITED = view(0), view(1)


def of(name: str, run: View = EDITED, base: View = BASE) -> Tensor:
    return metric(name).of(run, base)


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_logit_difference_is_answer_minus_wrong() -> None:
    logits = EDITED.answer.logits
    run = view(1, wrong=read(WRONGS, 0, logits))
    rows = zip(logits, (1, 5, 9), (2, 5, 0), strict=True)
    assert of("logit_difference", run).tolist() == [float(z[a] - z[w]) for z, a, w in rows]


def test_given_texts_are_read_as_answers_are() -> None:
    """Whatever the prompts' own are, which are left alone."""
    logits = EDITED.answer.logits
    run = View((), {"=are": read(ANSWERS, 0, logits), "=is": read(WRONGS, 0, logits)})
    own = view(1, wrong=read(WRONGS, 0, logits))
    assert of("logit_difference:are/is", run).tolist() == of("logit_difference", own).tolist()
    assert of("logit_difference:is/are", run).tolist() == (-of("logit_difference", own)).tolist()
    assert of("log_probability:are", run).tolist() == of("log_probability", own).tolist()
    assert metric("logit_difference:are/is").needs == ("=are", "=is")
    assert [m.name for m in choose(["log_probability:a b"], ())] == ["log_probability:a b"]


def test_log_probability_is_minus_cross_entropy() -> None:
    theirs = -F.cross_entropy(EDITED.answer.logits, EDITED.answer.token, reduction="none")
    torch.testing.assert_close(of("log_probability"), theirs)


def test_rank_is_the_place_in_a_sort() -> None:
    order = EDITED.answer.logits.argsort(-1, descending=True)
    places = [1 + row.tolist().index(i) for row, i in zip(order, (1, 5, 9), strict=True)]
    assert len(set(places)) > 1
    assert of("rank").tolist() == places
    best = read([[(int(i),)] for i in EDITED.answer.logits.topk(1).indices], 0, EDITED.answer.logits)
    assert of("rank", view(1, answer=best)).tolist() == [1, 1, 1]


def test_spellings_are_added_up_and_the_best_ranks() -> None:
    spelt: Spelt = [[(1,), (4,), (7,)], [(5,)], [(9,), (0,)]]
    z = EDITED.answer.logits
    each = z[torch.tensor([0, 0, 0, 1, 2, 2])]  # a prompt's spellings are read from one place
    run = view(1, answer=read(spelt, 0, each), wrong=read(WRONGS, 0, z))
    ids = [[spelling[0] for spelling in some] for some in spelt]
    p = z.softmax(-1)
    by_hand = torch.stack([p[row, some].sum().log() for row, some in enumerate(ids)])
    torch.testing.assert_close(of("log_probability", run), by_hand)
    odds = [
        (z[row].exp()[some].sum() / z[row].exp()[w[0][0]]).log()
        for row, (some, w) in enumerate(zip(ids, WRONGS, strict=True))
    ]
    torch.testing.assert_close(of("logit_difference", run), torch.stack(odds))
    ranks = [min(1 + int((z[row] > z[row, i]).sum()) for i in some) for row, some in enumerate(ids)]
    assert of("rank", run).tolist() == ranks


def test_tokens_are_summed_and_the_worst_ranks() -> None:
    spelt: Spelt = [[(1, 2), (4, 4, 0)], [(5,)], [(9, 1)]]
    answer, wrong = read(spelt, 5), read([[(3,)], [(1,), (2, 6)], [(0, 0)]], 6)
    run = view(1, answer=answer, wrong=wrong)
    each = answer.logits.log_softmax(-1)
    a = each[0, 1] + each[1, 2]
    b = each[2, 4] + each[3, 4] + each[4, 0]
    sums = torch.stack([torch.logaddexp(a, b), each[5, 5], each[6, 9] + each[7, 1]])
    torch.testing.assert_close(of("log_probability", run), sums)
    q = wrong.logits.log_softmax(-1)
    wrongs = torch.stack([q[0, 3], torch.logaddexp(q[1, 1], q[2, 2] + q[3, 6]), q[4, 0] + q[5, 0]])
    torch.testing.assert_close(of("logit_difference", run), sums - wrongs)
    places = [1 + int((z > z[i]).sum()) for z, i in zip(answer.logits, answer.token.tolist(), strict=True)]
    worst = [min(max(places[:2]), max(places[2:5])), places[5], max(places[6:])]
    assert of("rank", run).tolist() == worst


def test_what_a_position_adds_to_all_logits_is_nothing() -> None:
    """A sum of logits over several tokens would move with it."""
    answer, wrong = read([[(1, 2)], [(3,)], [(4, 0, 5)]], 5), read(WRONGS, 6)
    run = view(1, answer=answer, wrong=wrong)
    shift = torch.randn(len(answer.token), 1, dtype=torch.float64)
    moved = view(1, answer=read([[(1, 2)], [(3,)], [(4, 0, 5)]], 5, answer.logits + shift), wrong=wrong)
    for name in ("logit_difference", "log_probability", "rank"):
        torch.testing.assert_close(of(name, moved), of(name, run))


def test_token_0_is_a_token_like_any_other() -> None:
    """In an answer, among its spellings, and in a text."""
    z = torch.zeros(3, V, dtype=torch.float64)
    z[:, 0] = 5.0
    zero = read([[(0,)], [(0,)], [(0,)]], 0, z)
    run = view(1, answer=zero, wrong=read([[(1,)], [(2,)], [(3,)]], 0, z), read=zero)
    assert of("logit_difference", run).tolist() == [5.0] * 3
    assert of("rank", run).tolist() == [1.0] * 3
    expected = float(z[0].log_softmax(-1)[0])
    assert of("log_probability", run).tolist() == pytest.approx([expected] * 3)
    assert of("loss", run).tolist() == pytest.approx([-expected] * 3)


@pytest.mark.parametrize("name", ["log_probability", "rank", "loss", "kl", "top1_agreement"])
def test_no_number_is_made_of_nan(name: str) -> None:
    """A rank would be the first, an agreement full."""
    spoilt = view(1)
    for one in spoilt.reads.values():
        one.logits[1, 3] = torch.nan
    made = of(name, spoilt)
    assert made.isnan().tolist() == [False, True, False]


def test_an_impossible_answer_is_minus_infinity_and_not_nan() -> None:
    z = torch.zeros(3, V, dtype=torch.float64)
    z[0, 1] = -torch.inf
    assert of("log_probability", view(1, answer=read(ANSWERS, 0, z))).tolist() == [-math.inf, *[-math.log(V)] * 2]
    two = read([[(1,), (2,)], [(5,)], [(9,)]], 0, z[[0, 0, 1, 2]])
    assert float(of("log_probability", view(1, answer=two))[0]) == pytest.approx(-math.log(V - 1))
    two.logits[:2, 2] = -torch.inf
    assert of("log_probability", view(1, answer=two)).tolist() == [-math.inf, *[-math.log(V)] * 2]


# ---- distributions ---------------------------------------------------------------------------------------------------


def test_kl_is_from_base_to_edited() -> None:
    p, q = (one.read.logits.log_softmax(-1) for one in (BASE, EDITED))
    torch.testing.assert_close(of("kl"), F.kl_div(q, p, log_target=True, reduction="none").sum(-1))
    backwards = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)
    assert not torch.allclose(of("kl"), backwards, rtol=0.05)
    by_hand = [sum(a * math.log(a / b) for a, b in zip(*two, strict=True)) for two in zip(*_shares(), strict=True)]
    assert of("kl").tolist() == pytest.approx(by_hand)


def _shares() -> list[list[list[float]]]:
    return [one.read.logits.softmax(-1).tolist() for one in (BASE, EDITED)]


def test_kl_where_the_base_rules_a_token_out() -> None:
    base, run = view(0), view(1)
    base.read.logits[:, 2] = -torch.inf
    assert of("kl", base, base).tolist() == [0.0, 0.0, 0.0]
    assert of("kl", run, base).isfinite().all()
    assert of("kl", base, run).tolist() == [math.inf] * 3


def test_several_positions_are_averaged_prompt_by_prompt() -> None:
    spelt: Spelt = [[(1, 2, 3)], [(5,)], [(9, 1)]]
    run, base = (View((), {"read": read(spelt, seed)}) for seed in (1, 2))
    z, token = run.read.logits, run.read.token
    losses = F.cross_entropy(z, token, reduction="none")
    means = [losses[:3].mean(), losses[3], losses[4:].mean()]
    torch.testing.assert_close(of("loss", run, base), torch.stack(means))
    base.read.logits[[0, 4]] = z[[0, 4]]
    same = (z.argmax(-1) == base.read.logits.argmax(-1)).double()
    assert 0 < same.sum() < len(same)
    agree = torch.stack([same[:3].mean(), same[3], same[4:].mean()])
    torch.testing.assert_close(of("top1_agreement", run, base), agree)


# ---- tensors ---------------------------------------------------------------------------------------------------------

REAL = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()


def compared(value: Tensor, experts: Tensor | None = None) -> View:
    return View((), tensor=Compared(value, REAL, experts))


def test_relative_change_is_by_position_and_leaves_the_first_apart() -> None:
    before, after = torch.randn(3, 4, 2, 6), torch.randn(3, 4, 2, 6)
    run, base = compared(after), compared(before)
    for row in range(3):
        places = [t for t in range(4) if REAL[row, t]]
        share = [float((after[row, t] - before[row, t]).norm() / before[row, t].norm()) for t in places]
        assert float(of("relative_change", run, base)[row]) == pytest.approx(sum(share[1:]) / len(share[1:]), rel=1e-5)
        assert float(of("relative_change_first", run, base)[row]) == pytest.approx(share[0], rel=1e-5)


def test_relative_change_of_nothing() -> None:
    zeros = torch.zeros(3, 4, 6)
    for name in ("relative_change", "relative_change_first"):
        assert of(name, compared(zeros), compared(zeros)).tolist() == [0.0, 0.0, 0.0]
        assert of(name, compared(zeros + 1), compared(zeros)).tolist() == [math.inf] * 3
        assert of(name, compared(zeros * torch.nan), compared(zeros)).isnan().all()


def by_expert(value: Tensor, experts: Tensor, e: int) -> Tensor:
    """[P T e ...]: 0 for an expert that was not chosen."""
    dense = value.new_zeros(*value.shape[:2], e, *value.shape[3:])
    for p, t, k in torch.cartesian_prod(*map(torch.arange, experts.shape)).tolist():
        dense[p, t, experts[p, t, k]] = value[p, t, k]
    return dense


def test_slots_are_compared_by_expert() -> None:
    experts = torch.stack([torch.stack([torch.randperm(5)[:3] for _ in range(4)]) for _ in range(3)])
    before = torch.randn(3, 4, 3, 6)
    order = torch.tensor([2, 0, 1])
    base, turned = compared(before, experts), compared(before[:, :, order], experts[:, :, order])
    for tensor in ("delta_experts", "y_e"):
        assert of(f"relative_change:{tensor}", turned, base).tolist() == [0.0, 0.0, 0.0]
    others = torch.stack([torch.stack([torch.randperm(5)[:3] for _ in range(4)]) for _ in range(3)])
    after = torch.randn(3, 4, 3, 6)
    run = compared(after, others)
    old, new = by_expert(before, experts, 5), by_expert(after, others, 5)
    share = (new - old).flatten(2).norm(dim=-1) / old.flatten(2).norm(dim=-1)
    assert_mean(of("relative_change:delta_experts", run, base), share)
    gates = compared(after[..., 0], others), compared(before[..., 0], experts)
    share = (new - old)[..., 0].norm(dim=-1) / old[..., 0].norm(dim=-1)
    assert_mean(of("relative_change:gates", *gates), share)
    chosen = (by_expert(torch.ones(3, 4, 3, 1), some, 5) for some in (experts, others))
    both = torch.stack(list(chosen)).prod(0)  # each pair of threes out of five shares one
    share = ((new - old) * both).flatten(2).norm(dim=-1) / (old * both).flatten(2).norm(dim=-1)
    assert_mean(of("relative_change:y_e", run, base), share)


def assert_mean(got: Tensor, share: Tensor) -> None:
    """The mean over each row's real positions, the first apart."""
    torch.testing.assert_close(got, torch.stack([s[r][1:].mean() for s, r in zip(share, REAL, strict=True)]).double())


def test_experts_without_a_counterpart_have_no_change() -> None:
    before, after = torch.randn(3, 4, 1, 6), torch.randn(3, 4, 1, 6)
    base, run = compared(before, torch.zeros(3, 4, 1).long()), compared(after, torch.ones(3, 4, 1).long())
    run.tensor.experts[1, 1] = 0  # type: ignore[union-attr,index]
    made = of("relative_change:y_e", run, base)
    assert made.isnan().tolist() == [True, False, True]
    assert float(made[1]) == pytest.approx(float((after - before)[1, 1].norm() / before[1, 1].norm()), rel=1e-5)
    assert of("relative_change_first:y_e", run, base).isnan().all()
    assert of("relative_change:delta_experts", run, base).isfinite().all()


# ---- by name ---------------------------------------------------------------------------------------------------------

NAMES = [*METRICS, "kl:S2", "top1_agreement:all", "relative_change:c_KV", "continuation:3:contains", "kl:-2"]
NAMES += ["logit_difference:are/is", "log_probability:$ a_b"]


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_unit_and_a_formula_that_can_be_drawn(name: str) -> None:
    made = metric(name)
    assert made.name == str(made) == name
    assert made.unit in ("logits", "nats", "places", "1")
    MathTextParser("agg").parse(f"${made.formula}$")


@pytest.mark.parametrize("name", ["loss", "kl", "top1_agreement", "relative_change", "relative_change_first"])
def test_the_base_against_itself(name: str) -> None:
    base = View((), {"read": BASE.read}, Compared(torch.randn(3, 4, 6), REAL, None))
    made = of(name, base, base)
    assert made.dtype == torch.float64
    expected = {"loss": of("loss", BASE).tolist(), "top1_agreement": [1.0] * 3}
    assert made.tolist() == expected.get(name, [0.0] * 3)


@pytest.mark.parametrize(
    ("spelling", "reads"),
    [("kl", -1), ("kl:-1", -1), ("kl:3", 3), ("kl:all", slice(None)), ("kl:subject[-1]", "subject[-1]")],
)
def test_places_to_read(spelling: str, reads: Any) -> None:
    assert metric(spelling).reads == reads


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("relative_change:c^KV", "relative_change:c_KV"),
        ("relative_change:x_{n+1}", "relative_change"),
        ("relative_change:hook_resid_post", "relative_change"),
        ("relative_change:hook_c_KV", "relative_change:c_KV"),
        ("relative_change_first:blocks.3.hook_resid_post", "relative_change_first:blocks.3.x_next"),
        ("relative_change:model.layers.2.self_attn.o_proj", "relative_change:blocks.2.delta_attn"),
        ("relative_change:h", "relative_change:h"),
        ("relative_change:h_e", "relative_change:h_e"),
        ("kl:-1", "kl"),
        ("continuation:03:exact=the end: now", "continuation:3:exact=the end: now"),
    ],
)
def test_one_metric_has_one_name(spelling: str, name: str) -> None:
    assert metric(spelling).name == name
    assert metric(name).name == name


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("kll", r"no metric 'kll'\. Nearest: kl"),
        ("KL", r"no metric 'KL'\. Nearest: kl"),
        ("zzz", r"There are logit_difference, .*continuation"),
        ("", r"There are"),
        ("kl:", "nothing stands behind the colon"),
        ("loss:3", "loss takes nothing behind a colon"),
        ("rank:3", "rank takes nothing behind a colon"),
        ("log_probability:", "nothing stands behind the colon"),
        ("logit_difference:are", "logit_difference:TEXT/OTHER"),
        ("logit_difference:are/", "logit_difference:TEXT/OTHER"),
        ("logit_difference:/is", "logit_difference:TEXT/OTHER"),
        ("logit_difference:are/are", "two different texts"),
        ("logit_difference:a/b/c", "in which no / stands"),
        ("relative_change:x_0", "x_0 is outside the blocks"),
        ("relative_change:logits", "logits is outside the blocks"),
        ("relative_change:W_O", "W_O is a weight"),
        ("relative_change:ln1.hook_scale", "a reciprocal"),
        ("relative_change:experts", "see the column routing_agreement"),
        ("continuation", "continuation:N:contains"),
        ("continuation:0:contains", "continuation:N:contains"),
        ("continuation:2:regex", "continuation:N:regex=PATTERN"),
        ("continuation:2:regex=(", "is no regular expression"),
        ("continuation:2:contains=", "continuation:N:contains"),
    ],
)
def test_metrics_that_cannot_be(spelling: str, says: str) -> None:
    with pytest.raises(BadMetric, match=says):
        metric(spelling)


def test_a_tensor_that_no_card_has() -> None:
    with pytest.raises(UnknownTensor, match=r"'relative_change:gate'.*Nearest: gates"):
        metric("relative_change:gate")
    with pytest.raises(UnknownTensor, match="it holds q_C and q_pe"):
        metric("relative_change:self_attn.q_b_proj")


def test_what_is_chosen() -> None:
    assert [m.name for m in choose(None, ())] == ["kl", "relative_change", "relative_change_first"]
    assert [m.name for m in choose(None, ("answer", "wrong"))][:2] == ["logit_difference", "log_probability"]
    assert [m.name for m in choose(["kl", "rank", "kl"], ("answer",))] == ["kl", "rank"]
    own = Metric("mine", "1", "1", lambda run, base: run.read.logits[:, 0])
    assert choose([own, "kl", own], ()) == [own, METRICS["kl"]]
    for names, has, says in (
        (["logit_difference"], ("answer",), "logit_difference needs wrong"),
        (["continuation:2:exact"], (), "needs answer"),
        ([], (), "no metric is asked for"),
        ([Metric("kl", "1", "1", own.of), "kl"], (), "two metrics are called kl"),
        (["kl", Metric("kl", "1", "1", own.of)], (), "two metrics are called kl"),
    ):
        with pytest.raises(BadMetric, match=says):
            choose(names, has)


def test_a_view_says_what_a_metric_forgot_to_ask_for() -> None:
    for key in ("read", "answer", "wrong"):
        with pytest.raises(BadMetric, match=f"looks at {key} says so"):
            getattr(View(()), key)
