"""What metrics ask of a run, and what they make of it, against transformers and against one forward a token."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from experiments import asking
from experiments.asking import LOGITS, Ask
from experiments.metrics import BadMetric, Metric, View
from experiments.prompts import Prompts
from hooks import Edit, HookedModel, Run, Site, add, patch, zero
from probe import TINY
from probe.errors import BadEdit, BadText, OutOfRange, UnknownTensor

PERU, PAUL = "The capital of Peru is", "Paul Jones is a"


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


@cache
def oracle() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config.from_pretrained(TINY)
    config.model_type = "deepseek_v3"  # as kimi_k2 it would load with random experts, and only a warning
    how = {"attn_implementation": "eager", "experts_implementation": "grouped_mm", "dtype": torch.float32}
    return DeepseekV3ForCausalLM.from_pretrained(TINY, config=config, **how).eval()


def theirs(tokens: list[int] | tuple[int, ...]) -> Tensor:
    """Transformers' logits of one row, [T V]."""
    with torch.no_grad():
        return oracle()(torch.tensor([tokens])).logits[0].double()


def prompts(model: HookedModel, *rows: dict[str, Any]) -> Prompts:
    return Prompts.of(rows, model.tokenizer)  # type: ignore[arg-type]


def run(model: HookedModel, ask: Ask, *edits: Edit, block: int | None = None) -> Run:
    want = ask.sites(block)
    return model.run(ask.tokens, ask.keep, want=want, edits=edits, spans=ask.spans, spoken=ask.spoken)


def measure(model: HookedModel, ask: Ask, *edits: Edit, block: int | None = None) -> dict[str, Tensor]:
    """Every metric of an edited run."""
    base, edited = (ask.seen(run(model, ask, *some, block=block), block) for some in ((), edits))
    return {metric.name: ask.values(metric, edited, base, block) for metric in ask.metrics}


def near(got: Tensor, expected: Any, tolerance: float = 1e-4) -> None:
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(torch.as_tensor(expected).tolist(), abs=tolerance)


def word_by_word(model: HookedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[Tensor]:
    """Log-probabilities before each token of an answer, each from a whole forward on the text so far."""
    return [theirs((*prompt, *answer[:i]))[-1].log_softmax(-1) for i in range(len(answer))]


# ---- against transformers --------------------------------------------------------------------------------------------

ROWS = [
    {"clean": PERU, "answer": ["Lima", "Quito and Lima", "Rome ."], "wrong": "Quito and Rome"},
    {"clean": PAUL, "answer": "teacher in Rome", "wrong": ["nurse", "doctor"]},
    {"clean": "Paul Jones lives in", "answer": "Rome", "wrong": "Quito"},
]


def test_answers_of_several_tokens_and_spellings(model: HookedModel) -> None:
    some = prompts(model, *ROWS)
    made = measure(model, Ask(model, some, ["log_probability", "logit_difference", "rank"]))
    totals: dict[str, list[float]] = {"answer": [], "wrong": []}
    ranks = []
    for key, found in totals.items():
        for prompt, answer in zip(some.rows, some.answers(key), strict=True):
            each = [(word_by_word(model, prompt.tokens, tokens), tokens) for tokens in answer.tokens]
            sums = [sum(float(p[i]) for p, i in zip(ps, tokens, strict=True)) for ps, tokens in each]
            found.append(math.log(sum(math.exp(one) for one in sums)))
            if key == "answer":
                places = [
                    max(1 + p.argsort(descending=True).tolist().index(i) for p, i in zip(ps, tokens, strict=True))
                    for ps, tokens in each
                ]
                ranks.append(min(places))
    near(made["log_probability"], totals["answer"])
    near(made["logit_difference"], torch.tensor(totals["answer"]) - torch.tensor(totals["wrong"]))
    assert made["rank"].tolist() == ranks
    assert max(ranks) > 1


def test_a_single_token_is_read_as_ever(model: HookedModel) -> None:
    some = prompts(model, {"clean": PERU, "answer": "Lima", "wrong": "Quito"}, {"clean": "Paul Jones is", **ONE})
    ask = Ask(model, some, ["logit_difference", "rank"])
    assert (ask.tokens.shape, ask.read, ask.prompt_of) == ((2, 6), [[5], [3]], [0, 1])
    made = measure(model, ask)
    for p, prompt in enumerate(some.rows):
        z = theirs(prompt.tokens)[-1]
        answer, wrong = (int(some.ids(key)[p]) for key in ("answer", "wrong"))
        near(made["logit_difference"][p], z[answer] - z[wrong])
        assert int(made["rank"][p]) == 1 + int((z > z[answer]).sum())


ONE = {"answer": "a", "wrong": "the"}


def test_texts_that_are_the_same_for_all_prompts(model: HookedModel) -> None:
    """Of one token or several, beside answers or without any."""
    some = prompts(model, {"clean": PERU, "answer": "Lima"}, {"clean": PAUL, "answer": "teacher in Rome"})
    assert model.tokenizer is not None
    made = measure(
        model, Ask(model, some, ["logit_difference:Lima/a nurse", "log_probability:Rome", "log_probability"])
    )

    def log_p(prompt: tuple[int, ...], text: str) -> float:
        tokens = tuple(map(model.tokenizer.id, text.split()))  # type: ignore[union-attr]
        return sum(float(p[i]) for p, i in zip(word_by_word(model, prompt, tokens), tokens, strict=True))

    rows = [prompt.tokens for prompt in some.rows]
    near(made["logit_difference:Lima/a nurse"], [log_p(row, "Lima") - log_p(row, "a nurse") for row in rows])
    near(made["log_probability:Rome"], [log_p(row, "Rome") for row in rows])
    near(made["log_probability"], [log_p(rows[0], "Lima"), log_p(rows[1], "teacher in Rome")])
    bare = prompts(model, {"clean": PERU}, {"clean": "Paul Jones is"})
    made = measure(model, Ask(model, bare, ["logit_difference:Lima/the"]))
    z = [theirs(prompt.tokens)[-1] for prompt in bare.rows]
    near(
        made["logit_difference:Lima/the"],
        [one[model.tokenizer.id("Lima")] - one[model.tokenizer.id("the")] for one in z],
    )
    with pytest.raises(BadText, match="zzz"):
        Ask(model, bare, ["log_probability:zzz"])


def test_loss_is_cross_entropy_of_the_text(model: HookedModel) -> None:
    """Of the prompt's own tokens alone, though an answer stands behind, and pads behind the shorter one."""
    some = prompts(model, {"clean": PERU, "answer": "Lima and"}, {"clean": "Paul Jones is", "answer": "a nurse ."})
    made = measure(model, Ask(model, some, ["loss", "log_probability"]))
    losses = [F.cross_entropy(theirs(row.tokens)[:-1], torch.tensor(row.tokens[1:])) for row in some.rows]
    near(made["loss"], torch.stack(losses))


def test_token_0_in_a_text_counts(model: HookedModel) -> None:
    """Pads are 0 too; here it stands inside a text, and is an answer. ``<bos>`` counts as well."""
    assert model.tokenizer is not None
    assert model.tokenizer.id("<pad>") == 0
    some = prompts(
        model,
        {"clean": "The capital <pad> of Peru is", "answer": "<pad>", "wrong": "Lima"},
        {"clean": PERU, "answer": "Lima", "wrong": "<pad>"},
    )
    assert (some.rows[0].tokens.count(0), Ask(model, some, ["kl"]).tokens.eq(0).sum()) == (1, 2)
    made = measure(model, Ask(model, some, ["loss", "log_probability", "logit_difference"]))
    for p, row in enumerate(some.rows):
        z = theirs(row.tokens)
        answer, wrong = (int(some.ids(key)[p]) for key in ("answer", "wrong"))
        near(made["loss"][p], F.cross_entropy(z[:-1], torch.tensor(row.tokens[1:])))
        near(made["log_probability"][p], z[-1].log_softmax(-1)[answer])
        near(made["logit_difference"][p], z[-1, answer] - z[-1, wrong])


def test_distributions_at_other_places(model: HookedModel) -> None:
    some = prompts(
        model,
        {"clean": PERU, "answer": "Lima and", "spans": {"subject": [15, 19]}},
        {"clean": "The capital city of Peru is", "answer": "Lima", "spans": {"subject": [12, 24]}},
    )
    names = ["kl", "kl:subject", "kl:subject[-1]", "kl:2", "kl:all", "top1_agreement:all", "log_probability"]
    edit = zero("O", 2, h=1)
    made = measure(model, Ask(model, some, names), edit)
    for p, row in enumerate(some.rows):
        tokens = torch.tensor([row.tokens])
        z, new = (model.run(tokens, edits=edits)["logits"][0].double() for edits in ((), [edit]))
        kl = F.kl_div(new.log_softmax(-1), z.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        span = list(row.spans["subject"])
        for name, places in (
            ("kl", [-1]),
            ("kl:subject", span),
            ("kl:subject[-1]", span[-1:]),
            ("kl:2", [2]),
            ("kl:all", list(range(len(kl)))),
        ):
            near(made[name][p], kl[places].mean(), 1e-5)
        near(made["top1_agreement:all"][p], (z.topk(1).indices == new.topk(1).indices).double().mean())
    assert len(some.rows[1].spans["subject"]) > 1
    assert made["kl:all"].min() > 1e-3


def test_continuations_are_those_of_generate(model: HookedModel) -> None:
    some = prompts(
        model,
        {"clean": PERU, "answer": "Lima", "spans": {"who": [15, 19]}},
        {"clean": PAUL, "answer": ["nurse", "teacher ."], "spans": {"who": [0, 10]}},
    )
    n, names = 3, ["continuation:1:exact", "continuation:3:contains", "continuation:2:exact"]
    names += [
        "continuation:2:exact=Lima .",
        "continuation:3:regex=^(Lima|teach\\w+) [.]",
        "continuation:3:contains=Quito",
    ]
    ask = Ask(model, some, names)
    assert (ask.decodes, ask.sites(), ask.read) == (n, [], [[], []])
    said = []
    for row in some.rows:
        tokens = torch.tensor([row.tokens])
        whole = oracle().generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n, do_sample=False)
        said.append([model.tokenizer.token(int(i)) for i in whole[0, len(row.tokens) :]])  # type: ignore[union-attr]
    assert said == [["Lima", ".", "The"], ["teacher", ".", "The"]]
    tokens, keep = some.batch()
    new = model.generate(tokens, keep, n=n, spans=some.spans).new
    made = {metric.name: ask.of_decoded(metric, new, new).tolist() for metric in ask.metrics}
    assert list(made.values()) == [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    unnamed = [zero("x_n", 0, T="who")]
    edited = model.generate(tokens, keep, n=n, edits=unnamed, spans=some.spans).new
    assert float(ask.of_decoded(ask.metrics[1], edited, new)[0]) == 0.0


# ---- forced answers under edits --------------------------------------------------------------------------------------


def test_named_places_are_the_prompts(model: HookedModel) -> None:
    """T=-1, a slice's end and a span are places of the prompt; without T an edit acts on the answer too."""
    some = prompts(
        model, {"clean": PERU, "answer": "Quito and Lima"}, {"clean": PAUL, "answer": ["teacher in", "nurse"]}
    )
    ask = Ask(model, some, ["log_probability"])
    assert model.tokenizer.decode(ask.tokens[0].tolist()).endswith("Peru is Quito and")  # type: ignore[union-attr]
    assert ask.spoken == (6, 5)
    plain = measure(model, ask)["log_probability"]
    for where in ({"T": -1}, {"T": "END"}, {"T": slice(-2, None)}, {"T": slice(None)}, {"T": 2}, {}):
        made = measure(model, ask, zero("O", 2, **where), zero("g_e", 1, **where))["log_probability"]
        by_hand = []
        for row in some.rows:
            length = len(row.tokens)
            here = {k: range(length)[v] if isinstance(v, slice) else v for k, v in where.items()}
            here = {k: length - 1 if v in (-1, "END") else v for k, v in here.items()}
            here = {k: list(v) if isinstance(v, range) else v for k, v in here.items()}
            sums = []
            for tokens in row.answer.tokens:  # type: ignore[union-attr]
                total = 0.0
                for i, token in enumerate(tokens):
                    whole = torch.tensor([[*row.tokens, *tokens[:i]]])
                    edits = [zero("O", 2, **here), zero("g_e", 1, **here)]
                    total += float(model.run(whole, edits=edits)["logits"][0, -1].double().log_softmax(-1)[token])
                sums.append(total)
            by_hand.append(math.log(sum(math.exp(one) for one in sums)))
        near(made, by_hand)
        assert (made - plain).abs().max() > 1e-3
    with pytest.raises(OutOfRange, match=r"T of row 0 \(its real tokens\) has 6"):
        measure(model, ask, zero("O", 2, T=6))  # a token of the answer


def test_a_patch_from_the_corrupt_prompt(model: HookedModel) -> None:
    """Source rows are those of the swapped prompts, with the same answers behind."""
    corrupt = "The capital of France is"
    some = prompts(model, {"clean": PERU, "corrupt": corrupt, "answer": ["Lima .", "Quito"], "wrong": "Paris ."})
    ask, other = (Ask(model, one, ["logit_difference", "kl", "relative_change"]) for one in (some, some.swapped()))
    assert (ask.prompt_of, other.prompt_of) == ([0, 0], [0, 0])
    assert torch.equal(ask.tokens[:, 6:], other.tokens[:, 6:])
    base, source = (model.run(a.tokens, a.keep, want=None, spoken=a.spoken, spans=a.spans) for a in (ask, other))
    base_seen, source_seen = ask.seen(base, 1), other.seen(source, 1)
    whole = run(model, ask, patch("x_next", 1, source=source), block=1)
    last = run(model, ask, patch("x_next", 3, source=source, T=-1), block=3)
    difference, kl, change = ask.metrics
    swapped = ask.values(difference, source_seen, base_seen, 1, whose=other)
    near(ask.values(difference, ask.seen(whole, 1), base_seen, 1), swapped)
    assert float(swapped[0]) < 0 < float(ask.values(difference, base_seen, base_seen, 1)[0])
    near(ask.values(kl, ask.seen(last, 3), base_seen, 3), ask.values(kl, source_seen, base_seen, whose=other))
    assert float(ask.values(change, source_seen, base_seen, 1, whose=other)[0]) > 0


def test_rows_are_as_few_as_can_be(model: HookedModel) -> None:
    some = prompts(
        model,
        {"clean": PERU, "answer": ["Lima and Quito", "Lima .", "Rome"], "wrong": ["Lima and Rome", "Rome ."]},
        {"clean": PAUL, "answer": "nurse", "wrong": "doctor"},
    )
    ask = Ask(model, some, ["logit_difference", "kl"])
    decode = model.tokenizer.decode  # type: ignore[union-attr]
    lengths = ask.tokens.shape[1] if ask.keep is None else ask.keep.sum(-1).tolist()
    texts = [decode(row[:n]) for row, n in zip(ask.tokens.tolist(), lengths, strict=True)]  # type: ignore[arg-type]
    assert texts == [f"<bos> {PERU} Lima and", f"<bos> {PERU} Rome", f"<bos> {PAUL}"]
    assert ask.read == [[5, 6, 7], [5, 6], [4]]
    assert ask.prompt_of == [0, 0, 1]
    assert ask.spans == (*[some.rows[0].spans] * 2, some.rows[1].spans)
    first_only = Ask(model, some, ["kl"])  # no answer is needed
    assert (len(first_only.tokens), first_only.read) == (2, [[5], [4]])


# ---- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["x_next", "K", "A", "S", "q_C", "delta_experts", "blocks.3.h_s"])
def test_any_tensor_of_a_block_at_the_prompts_tokens(model: HookedModel, tensor: str) -> None:
    some = prompts(model, {"clean": PERU, "answer": "Lima and Rome"}, {"clean": "Paul Jones is", "answer": "a"})
    block, edit = 2, add("x_n", 2, direction=torch.randn(model.dims.d), alpha=0.5, T=slice(1, None))
    ask = Ask(model, some, ["log_probability", f"relative_change:{tensor}", f"relative_change_first:{tensor}"])
    made = [one.tolist() for one in list(measure(model, ask, edit, block=block).values())[1:]]
    site = model.sites.find(tensor if tensor.startswith("blocks") else f"blocks.{block}.{tensor}")
    for p, row in enumerate(some.rows):
        tokens = torch.tensor([row.tokens])
        runs = [model.run(tokens, want=[site, Site(2, "experts")], edits=edits) for edits in ((), [edit])]
        before, after = (_dense(one, site) for one in runs)
        share = (after - before).flatten(1).norm(dim=-1) / before.flatten(1).norm(dim=-1)
        assert made[0][p] == pytest.approx(float(share[1:].mean()), rel=1e-4)
        assert made[1][p] == 0.0
        assert share[1:].min() > 0


def _dense(run: Run, site: Site) -> Tensor:
    """[T ...]: queries first; keys that the mask hides left out; by expert, not by slot."""
    value = run[site][0].double()
    if site.tensor in ("S", "A"):
        return value.tril().movedim(1, 0)
    if site.tensor != "delta_experts":
        return value
    experts = run[Site(2, "experts")][0]
    made = value.new_zeros(len(value), 16, value.shape[-1])
    return made.scatter(1, experts[..., None].expand_as(value), value)


def test_which_tensors_are_wanted(model: HookedModel) -> None:
    some = prompts(model, {"clean": PERU})
    ask = Ask(model, some, ["relative_change:y_e", "relative_change", "relative_change:blocks.0.c_KV"])
    assert ask.sites(2) == [Site(2, "y_e"), Site(2, "experts"), Site(2, "x_next"), Site(0, "c_KV")]
    assert Ask(model, some, ["relative_change:blocks.0.c_KV", "kl"]).sites() == [LOGITS, Site(0, "c_KV")]
    with pytest.raises(BadMetric, match=r"this edit is in none: say of which block, relative_change:blocks\.0\.y_e"):
        ask.sites()
    with pytest.raises(UnknownTensor, match=r"relative_change:y_e: .*block 0 is dense"):
        ask.sites(0)
    with pytest.raises(OutOfRange, match="block 9 does not exist"):
        Ask(model, some, ["relative_change:blocks.9.c_KV"]).sites()


def test_experts_that_a_patch_has_added(model: HookedModel) -> None:
    some = prompts(model, {"clean": PERU, "corrupt": "The capital of France is"})
    ask, other = Ask(model, some, ["relative_change:delta_experts"]), Ask(model, some.swapped(), ["kl"])
    source = model.run(other.tokens, want=["blocks.2.delta_experts", "blocks.2.experts"])
    with pytest.raises(BadMetric, match="edits have added experts"):
        measure(model, ask, patch("delta_experts", 2, source=source), block=2)


# ---- the user's own --------------------------------------------------------------------------------------------------


def entropy(run: View, base: View) -> Tensor:
    p = run.read.logits.softmax(-1)
    return run.read.mean(-torch.xlogy(p, p).sum(-1))


def test_a_function_of_the_users(model: HookedModel) -> None:
    some = prompts(model, {"clean": PERU, "spans": {"s": [15, 19]}}, {"clean": PAUL, "spans": {"s": [0, 10]}})
    own = [Metric(f"entropy {i}", "nats", "H", entropy, reads=i) for i in ("s", -1, [0, -2])]  # type: ignore[arg-type]
    made = measure(model, Ask(model, some, [*own, "kl"]))
    for p, row in enumerate(some.rows):
        H = torch.distributions.Categorical(logits=theirs(row.tokens)).entropy()
        expected = H[list(row.spans["s"])].mean(), H[-1], (H[0] + H[-2]) / 2
        for one, value in zip(own, expected, strict=True):
            near(made[one.name][p], value)


@pytest.mark.parametrize("reads", ["where", 9, slice(2, 2)])
def test_places_that_a_prompt_lacks(model: HookedModel, reads: Any) -> None:
    with pytest.raises((BadEdit, OutOfRange), match=f"mine of '{PAUL}': T"):
        Ask(model, prompts(model, {"clean": PAUL}), [Metric("mine", "1", "1", entropy, reads=reads)])


def test_a_text_of_one_token_has_no_loss(model: HookedModel) -> None:
    lone = prompts(model, {"clean": "Paul"})
    alone = Prompts((lone.rows[0].__class__(**{**lone.rows[0].__dict__, "tokens": (5,)}),), lone.tokenizer)
    with pytest.raises(OutOfRange, match="loss of 'Paul': T of row 0"):
        Ask(model, alone, ["loss"])
    made = measure(model, Ask(model, alone, ["relative_change"]), zero("O", 1), block=1)
    assert made["relative_change"].isnan().all()  # no position but the first


def test_what_is_refused(model: HookedModel) -> None:
    some = prompts(model, {"clean": PERU, "answer": "Lima"}, {"clean": PAUL, "answer": "nurse"})
    ask = Ask(model, some, ["kl", "continuation:2:contains"])
    seen, (kl, decoded) = ask.seen(run(model, ask)), ask.metrics
    new = torch.zeros(2, 1, dtype=torch.long)
    other = Ask(model, some.subset([0]), ask.metrics)
    for call, says in (
        (lambda: ask.values(decoded, seen, seen), "see Ask.of_decoded"),
        (lambda: ask.of_decoded(decoded, new, new), "looks at 2 decoded tokens; there are 1"),
        (lambda: ask.of_decoded(kl, new, new), "looks at 0 decoded tokens"),
        (lambda: ask.values(Metric("mine", "1", "1", entropy), seen, seen), "mine was not asked for"),
        (lambda: ask.values(kl, seen, seen, whose=other), "1 prompts can't be compared with 2"),
    ):
        with pytest.raises(BadMetric, match=says):
            call()
    odd = Metric("odd", "1", "1", lambda run, base: run.read.logits)
    scalar = Metric("scalar", "1", "1", lambda run, base: 1.0)  # type: ignore[arg-type,return-value]
    for metric, says in ((odd, r"odd gave \[2, 410\] for 2 prompts"), (scalar, "scalar gave float")):
        asked = Ask(model, some, [metric])
        with pytest.raises(BadMetric, match=says):
            asked.values(metric, asked.seen(run(model, asked)), asked.seen(run(model, asked)))
    with pytest.raises(BadMetric, match="rank needs answer"):
        Ask(model, prompts(model, {"clean": PERU}), ["rank"])
    with pytest.raises(BadText, match="the answer of row 0, 'Lima and', has several tokens"):
        prompts(model, {"clean": PERU, "answer": "Lima and"}).spellings("answer")


def test_runs_of_unequal_length_are_not_compared_by_position(model: HookedModel) -> None:
    row = {"clean": PERU, "spans": {"s": [15, 19]}, "corrupt": "The capital city of Peru is"}
    some = prompts(model, {**row, "corrupt_spans": {"s": [12, 24]}})
    names = ["kl", "kl:s", "relative_change:blocks.1.x_next"]
    ask, other = Ask(model, some, names), Ask(model, some.swapped(), names)
    seen, theirs = (a.seen(run(model, a)) for a in (ask, other))
    kl, at_span, change = ask.metrics
    assert float(ask.values(kl, theirs, seen, whose=other)) > 0
    for metric in (at_span, change):
        with pytest.raises(BadMetric, match="compares position by position"):
            ask.values(metric, theirs, seen, whose=other)


def test_in_parts_is_as_at_once(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    some = prompts(model, *ROWS)
    ask = Ask(model, some, ["logit_difference", "rank", "loss", "kl:all", "relative_change", "relative_change:y_e"])
    edit = zero("O", 1, h=2)
    whole = measure(model, ask, edit, block=2)
    for at_once in (1, 410 * 16):
        monkeypatch.setattr(asking, "AT_ONCE", at_once)
        parts = measure(model, ask, edit, block=2)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=0)
