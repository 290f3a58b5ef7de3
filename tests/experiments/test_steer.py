"""Steering: doses by hand in transformers and in single runs, what number and tokens do, where and when it acts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from typer.testing import CliRunner

from experiments import frames
from experiments.cli import app
from experiments.frames import BadFrame
from experiments.labels import BadProbe
from experiments.metrics import BadMetric
from experiments.probes import direction
from experiments.prompts import Prompt, Prompts
from experiments.stats import BadSample
from experiments.steer import difference, outlook, steer
from experiments.steer_plots import dose, pictures
from experiments.study import direction_name
from hooks import HookedModel, add
from probe import TINY
from probe.errors import BadEdit, BadText, OutOfRange, ProbeError, ShapeMismatch, UnknownTensor

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
WORDS = MODEL.tokenizer
NUMBER = Prompts.load("agreement", WORDS)
FEW = NUMBER.subset(range(12))  # of three shapes
ALIKE = NUMBER.subset(next(iter(NUMBER.shapes().values())))
TEXT = Prompts.documents(WORDS, 2)
ARE = "logit_difference:are/is"
QUICK: dict[str, Any] = {"doses": (0.5, 1.0), "random_directions": 2, "neutral": TEXT}


def of(df: pd.DataFrame, metric: str) -> pd.DataFrame:
    return df[df["metric"] == metric].set_index("alpha")


def numbers(df: pd.DataFrame, column: str = "effect") -> list[float]:
    return [float(x) for x in df[column]]


# ---- what it shows of the tiny model ---------------------------------------------------------------------------------


@cache
def at_the_noun(block: int) -> pd.DataFrame:
    doses = (0.25, 0.5, 1.0)
    return steer(
        MODEL,
        NUMBER,
        "means:answer=are",
        tensor="x_next",
        block=block,
        at="noun",
        doses=doses,
        metrics=[ARE],
        neutral=TEXT,
    )


@pytest.mark.parametrize("block", [0, 1])
def test_number_at_the_noun_moves_the_verb_and_random_directions_of_equal_norm_dont(block: int) -> None:
    found = of(at_the_noun(block), ARE)
    effects, control, spread = (np.array(numbers(found, name)) for name in ("effect", "control", "spread"))
    assert found.index.tolist() == [-1, -0.5, -0.25, 0.25, 0.5, 1]
    assert (np.diff([*effects[:3], 0, *effects[3:]]) > 0.5).all()
    assert (np.sign(effects) == np.sign(found.index)).all()
    assert (np.abs(effects) > np.abs(control) + 4 * spread).all()
    assert abs(effects[[0, -1]]).min() > 10  # from a verb that is sure to one that is sure of the other
    assert (found["p"] < 0.01).all()
    assert (found["ci_low"] < found["effect"]).all()
    assert (found["effect"] < found["ci_high"]).all()


def test_what_no_later_token_reads_steers_nothing() -> None:
    """The noun's stream out of the last block reaches its own prediction alone; on plain text it acts at all tokens."""
    df = at_the_noun(3)
    assert numbers(of(df, ARE)) == [0] * 6
    assert numbers(of(df, ARE), "control") == numbers(of(df, ARE), "spread") == [0] * 6
    assert min(numbers(of(df, "kl:all"))) > 0.001


def test_side_effects_on_plain_text_grow_with_the_dose() -> None:
    df = at_the_noun(1)
    kl, loss = (np.array(numbers(of(df, metric))) for metric in ("kl:all", "loss"))
    assert (np.diff(kl[:3]) < 0).all()
    assert (np.diff(kl[3:]) > 0).all()
    assert min(kl[0], kl[-1], loss[0], loss[-1]) > 0.3
    assert set(of(df, "loss")["prompts"]) == {"reference/text"}
    assert of(df, "loss")["when"].isna().all()
    assert of(df, "loss")["role"].isna().all()


def test_what_is_said_next_turns_over() -> None:
    df = steer(
        MODEL,
        FEW,
        "means:answer=are",
        tensor="x_next",
        block=1,
        at="noun",
        metrics=["continuation:1:contains=are", ARE],
        doses=[1.0],
        random_directions=2,
        neutral=TEXT,
    )
    assert numbers(of(df, "continuation:1:contains=are"), "value") == [0, 1]
    assert numbers(of(df, "continuation:1:contains=are"), "base") == [0.5, 0.5]
    assert numbers(of(df, "continuation:1:contains=are"), "control") == [0, 0]


# ---- by hand: transformers, and one run an edit ----------------------------------------------------------------------


@cache
def oracle() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config.from_pretrained(TINY)
    config.model_type = "deepseek_v3"  # as kimi_k2 it would load with random experts, and only a warning
    how = {"attn_implementation": "eager", "experts_implementation": "grouped_mm", "dtype": torch.float32}
    return DeepseekV3ForCausalLM.from_pretrained(TINY, config=config, **how).eval()


@contextmanager
def adding(block: int, vector: Tensor, positions: slice | int) -> Iterator[None]:
    """Their decoder layer, with a vector added to what leaves it."""

    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, positions] += vector
        return out

    handle = oracle().model.layers[block].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def theirs(tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return oracle()(torch.tensor([list(tokens)])).logits[0]


def stream(tokens: Sequence[int], block: int) -> Tensor:
    """Transformers' residual stream out of a block, [T d]."""
    with torch.no_grad():
        made = oracle().model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    assert block < len(made) - 2, "the last one is normed"
    return made[block + 1][0]


def number_direction(block: int) -> Tensor:
    """The mean over reference prompts that go on with *are*, less that of the others, at the noun."""
    reference = NUMBER.reference
    assert reference is not None
    rows = [(str(p.answer), stream(p.tokens, block)[noun(p)]) for p in reference.rows]
    are, others = (torch.stack([x for a, x in rows if (a == "are") == sign]).mean(0) for sign in (True, False))
    return are - others


def median_rms(values: Sequence[Tensor]) -> float:
    return float(np.median([float(x.double().square().mean().sqrt()) for x in values]))


def by_groups(prompts: Prompts, values: Sequence[float]) -> float:
    groups: dict[str, list[float]] = {}
    for prompt, value in zip(prompts.rows, values, strict=True):
        groups.setdefault(prompt.group, []).append(value)
    return float(np.mean([np.mean(some) for some in groups.values()]))


def noun(prompt: Prompt) -> int:
    """Its position, told by its word and not by its span."""
    words = prompt.clean.lower().split()
    return int(prompt.tokens.index(WORDS.id(words[words.index("the") + 1])))


def test_off_by_one_in_steering() -> None:
    """A token's vector lands on that token: transformers', hooked at the place that the words tell, and beside it."""
    df = steer(MODEL, FEW, "means:answer=are", tensor="x_next", block=1, at="noun", metrics=[ARE], **QUICK)
    u = number_direction(1)
    unit = median_rms([stream(prompt.tokens, 1)[noun(prompt)] for prompt in FEW.rows]) / u.square().mean().sqrt()
    assert numbers(df[df["metric"] == "rms"], "value")[0] == pytest.approx(
        float(unit * u.square().mean().sqrt()), rel=1e-5
    )
    found: dict[int, list[float]] = {}
    for shift in (-1, 0, 1):
        for alpha in (-1.0, -0.5, 0.5, 1.0):
            each = []
            for prompt in FEW.rows:
                with adding(1, alpha * unit * u, noun(prompt) + shift):
                    z = theirs(prompt.tokens)[-1]
                each.append(float(z[WORDS.id("are")] - z[WORDS.id("is")]))
            found.setdefault(shift, []).append(by_groups(FEW, each))
    assert numbers(of(df, ARE), "value") == pytest.approx(found[0], abs=2e-4)
    for shift in (-1, 1):
        assert np.abs(np.subtract(found[shift], found[0])).min() > 1


@pytest.mark.parametrize("when", ["prompt", "steps", "both"])
def test_off_by_one_in_steering_what_is_decoded(when: Any) -> None:
    """Whole forwards of transformers, token by token, with the vector on the prompt's tokens, those behind, or all."""
    prompt = Prompts.of([{"clean": "Paul Jones lives in"}], WORDS)
    ids = prompt.rows[0].tokens
    u = MODEL.decoder.weights.read(None, "W_U")[:, WORDS.id("Paris")] * MODEL.decoder.weights.read(None, "w_final")
    vector = u * median_rms(list(stream(ids, 2))) / u.square().mean().sqrt()
    places = {"prompt": slice(0, len(ids)), "steps": slice(len(ids), None), "both": slice(None)}
    said: dict[str, str] = {}
    for name, place in places.items():
        tokens = list(ids)
        with adding(2, vector, place):
            for _ in range(4):
                tokens.append(int(theirs(tokens)[-1].argmax()))
        said[name] = WORDS.decode(tokens[len(ids) :])
    assert len(set(said.values())) == 3
    metrics = [f"continuation:4:exact={text}" for text in said.values()]
    df = steer(
        MODEL,
        prompt,
        "token:Paris",
        tensor="x_next",
        block=2,
        when=when,
        metrics=metrics,
        doses=[1.0],
        random_directions=2,
        neutral=TEXT,
    )
    for name, metric in zip(said, metrics, strict=True):
        assert numbers(of(df, metric), "value")[1] == float(name == when), (name, metric)
    assert set(of(df, metrics[0])["when"]) == {when}


def test_the_first_new_token_is_chosen_before_any_step() -> None:
    prompt = Prompts.of([{"clean": "The capital of Peru is", "answer": "Lima"}], WORDS)
    how: dict[str, Any] = {"tensor": "x_next", "block": 3, "doses": [4.0], "random_directions": 2, "neutral": TEXT}
    first = steer(MODEL, prompt, "token:Paris", when="steps", metrics=["continuation:1:exact"], **how)
    assert numbers(of(first, "continuation:1:exact"), "value") == [1, 1]
    assert of(first, "continuation:1:exact")["touched"].eq(0).all(), "nothing of the prompt"
    then = steer(MODEL, prompt, "token:Paris", when="steps", metrics=["continuation:2:contains=Paris"], **how)
    assert numbers(of(then, "continuation:2:contains=Paris"), "value") == [0, 1]


def test_at_minus_one_is_the_last_token_and_then_each_new_one() -> None:
    prompt = Prompts.of([{"clean": "The capital of Peru is"}], WORDS)
    how: dict[str, Any] = {"tensor": "x_next", "block": 3, "doses": [4.0], "random_directions": 2, "neutral": TEXT}
    for when, shares in {"prompt": (1.0, 0.0), "steps": (0.0, 1.0), "both": (1.0, 1.0)}.items():
        metrics = ["continuation:1:contains=Paris", "continuation:3:regex=Paris$"]
        df = steer(MODEL, prompt, "token:Paris", at=-1, when=when, metrics=metrics, **how)  # type: ignore[arg-type]
        assert tuple(numbers(of(df, metric), "value")[1] for metric in metrics) == shares, when


@pytest.mark.parametrize("when", ["prompt", "both"])
def test_an_answer_of_several_tokens_is_steered_as_decoded_ones_are(when: Any) -> None:
    """Its first token is read with the vector on the prompt alone, the next one with it on the first or not."""
    prompt = Prompts.of([{"clean": "Paul Jones lives in", "answer": "Paris Mary"}], WORDS)
    how: dict[str, Any] = {"tensor": "x_next", "block": 2, "metrics": ["log_probability"], **QUICK}
    df = steer(MODEL, prompt, ramp(128), when=when, **how)
    ids, answer = list(prompt.rows[0].tokens), [WORDS.id("Paris"), WORDS.id("Mary")]
    steered = slice(0, len(ids)) if when == "prompt" else slice(None)
    unit = median_rms(list(stream([*ids, answer[0]], 2)[steered]))
    assert numbers(df[df["metric"] == "rms"], "value")[0] == pytest.approx(unit, rel=1e-5)
    vector = ramp(128) * unit / ramp(128).square().mean().sqrt()
    values = {}
    for alpha in (-1.0, 1.0):
        for place in (slice(0, len(ids)), slice(None)):
            with adding(2, alpha * vector, place):
                log_p = theirs([*ids, answer[0]]).double().log_softmax(-1)
            values[alpha, place == steered] = float(log_p[-2, answer[0]] + log_p[-1, answer[1]])
    for alpha in (-1.0, 1.0):
        assert of(df, "log_probability").loc[alpha, "value"] == pytest.approx(values[alpha, True], abs=1e-4)
        assert abs(values[alpha, True] - values[alpha, False]) > 0.01


def test_low_precision_says_what_rounding_alone_does() -> None:
    model = HookedModel.load(dtype=torch.bfloat16)
    df = steer(model, FEW, "means:answer=are", tensor="x_next", block=1, at="noun", metrics=[ARE], **QUICK)
    found = of(df, ARE)
    assert (found["noise_floor"] > 0).all()
    assert (found["effect"].abs() > 10 * found["noise_floor"]).all()


def ramp(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


EXPERT = int(MODEL.run(*FEW.batch(), want="blocks.2.experts")["blocks.2.experts"][0, -1, 0])
CASES: dict[str, tuple[str, int | None, Tensor, dict[str, int], str | int | None]] = {
    "stream": ("x_next", 1, ramp(128), {}, "noun"),
    "everywhere": ("x_mid", 1, ramp(128), {}, None),
    "position": ("x_n", 0, ramp(128), {}, 2),
    "last": ("delta_ffn", 3, ramp(128), {}, -1),
    "a head": ("O", 2, ramp(32), {"h": 1}, "END"),
    "a head of all": ("O", 2, ramp(4, 32), {"h": 1}, "END"),
    "heads": ("O", 2, ramp(4, 32), {}, "END"),
    "every head": ("O", 2, ramp(32), {}, "END"),
    "a head in a composite": ("q_C", 1, ramp(64), {"h": 2}, "END"),
    "keys": ("K", 1, ramp(4, 24), {}, "noun"),
    "an expert": ("delta_experts", 2, ramp(128), {"e": EXPERT}, None),
    "embedding": ("x_0", None, ramp(128), {}, "noun"),
    "logits": ("logits", None, ramp(WORDS.__len__()), {}, "END"),
}


def place_of(prompt: Prompt, at: str | int | None) -> list[int]:
    if at is None:
        return list(range(len(prompt.tokens)))
    if isinstance(at, str):
        return list(prompt.spans[at])
    return [at % len(prompt.tokens)]


def steered_numbers(tensor: str, block: int | None, prompt: Prompt, pos: int, where: dict[str, int]) -> Tensor | None:
    """The numbers of one position of a prompt alone that a direction is added to; None: there are none."""
    tokens = torch.tensor([prompt.tokens])
    site = tensor if block is None else f"blocks.{block}.{tensor}"
    run = MODEL.run(tokens, want=[site] if tensor != "delta_experts" else [site, f"blocks.{block}.experts"])
    value = run[site][0, pos]
    if "e" in where:
        chosen = run[f"blocks.{block}.experts"][0, pos].tolist()
        return value[chosen.index(where["e"])] if where["e"] in chosen else None
    if tensor == "q_C":
        return value.view(4, 16)[where["h"]]
    return value[where["h"]] if "h" in where else value


def of_direction(vector: Tensor, tensor: str, where: dict[str, int]) -> Tensor:
    """The numbers of a direction that are added."""
    if tensor == "q_C":
        return vector.view(4, 16)[where["h"]]
    return vector[where["h"]] if "h" in where and vector.ndim == 2 else vector


@pytest.mark.parametrize("case", CASES)
def test_the_sweep_is_a_run_an_edit(case: str) -> None:
    """Every dose along every direction, its size by hand, as `HookedModel.run` has it."""
    tensor, block, vector, where, at = CASES[case]
    metrics = ["logit_difference", "kl"]
    some = ALIKE if case == "position" else FEW.subset(range(9))  # groups of unequal size
    df = steer(MODEL, some, vector, tensor=tensor, block=block, at=at, metrics=metrics, seed=5, **where, **QUICK)
    cells = [(prompt, t) for prompt in some.rows for t in place_of(prompt, at)]
    found = [x for prompt, t in cells if (x := steered_numbers(tensor, block, prompt, t, where)) is not None]
    unit = median_rms(found)
    assert numbers(df[df["metric"] == "rms"], "value") == [pytest.approx(unit, rel=1e-5)]
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(2, *vector.shape, generator=generator)
    tokens, keep = some.batch()
    base = MODEL.run(tokens, keep)["logits"].double()
    last = torch.tensor([len(prompt.tokens) - 1 for prompt in some.rows])
    rows = torch.arange(len(some))

    def measured(vector: Tensor, alpha: float) -> dict[str, float]:
        size = of_direction(vector, tensor, where).square().mean().sqrt()
        place = {} if at is None else {"S" if tensor == "K" else "T": at}
        edit = add(tensor, block, direction=vector * unit / size, alpha=alpha, **where, **place)
        z, before = (
            x[rows, last] for x in (MODEL.run(tokens, keep, edits=[edit], spans=some.spans)["logits"].double(), base)
        )
        kl = F.kl_div(z.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        difference = z[rows, some.ids("answer")] - z[rows, some.ids("wrong")]
        moved = difference - (before[rows, some.ids("answer")] - before[rows, some.ids("wrong")])
        return {"logit_difference": by_groups(some, moved.tolist()), "kl": by_groups(some, kl.tolist())}

    for alpha in (-1.0, -0.5, 0.5, 1.0):
        own = measured(vector, alpha)
        others = pd.DataFrame([measured(one, alpha) for one in drawn])
        for metric in metrics:
            row = of(df, metric).loc[alpha]
            assert row["effect"] == pytest.approx(own[metric], abs=1e-5 * max(1, abs(own[metric])))
            assert row["control"] == pytest.approx(others[metric].mean(), abs=2e-5)
            assert row["spread"] == pytest.approx(others[metric].std(), abs=2e-5)
    moved = [abs(x) for metric in metrics for x in numbers(of(df, metric))]
    assert max(moved) > 1e-3, "the edit does something"


def test_plain_text_by_hand() -> None:
    """KL and loss of transformers with the vector at every position, mean over positions, then over texts."""
    vector = ramp(128)
    df = steer(MODEL, FEW, vector, tensor="blocks.1.x_next", at="noun", metrics=[ARE], **QUICK)
    unit = numbers(df[df["metric"] == "rms"], "value")[0] / vector.square().mean().sqrt()
    for alpha in (-1.0, 0.5):
        kls, losses = [], []
        for prompt in TEXT.rows:
            base = theirs(prompt.tokens).double().log_softmax(-1)
            with adding(1, alpha * unit * vector, slice(None)):
                edited = theirs(prompt.tokens).double().log_softmax(-1)
            kls.append(float((base.exp() * (base - edited)).sum(-1).mean()))
            losses.append(float(F.nll_loss(edited[:-1], torch.tensor(prompt.tokens[1:]))))
        assert of(df, "kl:all").loc[alpha, "value"] == pytest.approx(np.mean(kls), rel=1e-3)
        assert of(df, "loss").loc[alpha, "value"] == pytest.approx(np.mean(losses), rel=1e-4)


# ---- directions ------------------------------------------------------------------------------------------------------


def test_a_difference_of_means_is_one() -> None:
    assert NUMBER.reference is not None
    rows = NUMBER.reference.rows
    sets = [
        NUMBER.reference.subset([i for i, p in enumerate(rows) if (str(p.answer) == "are") == sign])
        for sign in (True, False)
    ]
    made = difference(MODEL, *sets, "x_next", 1, at="noun")
    torch.testing.assert_close(made, number_direction(1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(made, difference(MODEL, *sets, "blocks.1.hook_resid_post", at="noun"))
    heads = difference(MODEL, *sets, "O", 2)
    means = [
        torch.stack(
            [MODEL.run(torch.tensor([p.tokens]), want="blocks.2.O")["blocks.2.O"][0, -1] for p in some.rows]
        ).mean(0)
        for some in sets
    ]
    torch.testing.assert_close(heads, means[0] - means[1], atol=1e-5, rtol=1e-4)


def test_the_mean_of_an_experts_slot_is_over_the_prompts_that_chose_it() -> None:
    sets = FEW.subset(range(0, 12, 2)), FEW.subset(range(1, 12, 2))
    wanted = ["blocks.2.experts", "blocks.2.h_e"]
    at_end: list[list[tuple[list[int], Tensor]]] = []
    for some in sets:
        runs = [MODEL.run(torch.tensor([prompt.tokens]), want=wanted) for prompt in some.rows]
        at_end.append([(run[wanted[0]][0, -1].tolist(), run[wanted[1]][0, -1]) for run in runs])
    chosen = [{e for experts, _ in rows for e in experts} for rows in at_end]
    e = max(chosen[0] & chosen[1], key=lambda e: sum(e not in experts for rows in at_end for experts, _ in rows))
    means = [torch.stack([h_e[experts.index(e)] for experts, h_e in rows if e in experts]).mean(0) for rows in at_end]
    assert any(e not in experts for rows in at_end for experts, _ in rows)
    torch.testing.assert_close(difference(MODEL, *sets, "h_e", 2, e=e), means[0] - means[1], atol=1e-5, rtol=1e-4)
    never = next(e for e in range(MODEL.dims.e) if e not in chosen[0] | chosen[1])
    with pytest.raises(BadEdit, match=f"no prompt chose expert {never} of block 2 at 'END'"):
        difference(MODEL, *sets, "h_e", 2, e=never)


def test_four_ways_to_the_same_direction() -> None:
    """A text, what a probe found, its vector at any length, a difference of means: one steering."""
    assert NUMBER.reference is not None
    how: dict[str, Any] = {"at": "noun", "metrics": [ARE], **QUICK}
    found = direction(MODEL, NUMBER.reference, "answer", "x_next", 1, "noun", to="are", probe="means")
    made = [
        steer(MODEL, FEW, "means:answer=are", tensor="x_next", block=1, **how),
        steer(MODEL, FEW, found, **how),
        steer(MODEL, FEW, found.vector * 17, tensor="x_next", block=1, label="mine", **how),
        steer(MODEL, FEW, number_direction(1), tensor="x_next", block=1, **how),
    ]
    for df in made[1:]:
        assert numbers(df, "value") == pytest.approx(numbers(made[0], "value"), rel=1e-3, abs=1e-4)
    assert [df["edit"].iloc[0] for df in made] == [
        "add means:answer=are",
        "add means:answer=are",
        "add mine",
        f"add {direction_name(number_direction(1))}",
    ]
    assert direction_name(number_direction(1)) != direction_name(found.vector)
    sources = [df["source"].iloc[0] if "source" in df else None for df in made]
    assert sources == ["reference/agreement", "reference/agreement", None, None]


def test_a_direction_learnt_from_the_steered_prompts_says_so() -> None:
    df = steer(
        MODEL, FEW, "means:answer=are", tensor="x_next", block=1, at="noun", learn=NUMBER, metrics=[ARE], **QUICK
    )
    assert set(df["source"]) == {"agreement (holds 12 of the prompts)"}


def test_a_tokens_direction_raises_its_logit_by_what_it_says() -> None:
    """Past the last block a logit is the final scale times the dot product: with the scale held, it grows linearly."""
    prompt = Prompts.of([{"clean": "The capital of Peru is"}], WORDS)
    df = steer(
        MODEL, prompt, "token:Paris", tensor="x_next", block=3, at="END", metrics=["log_probability:Paris"], **QUICK
    )
    W_U, w = (MODEL.decoder.weights.read(None, name) for name in ("W_U", "w_final"))
    x = MODEL.run(torch.tensor([prompt.rows[0].tokens]), want="blocks.3.x_next")["blocks.3.x_next"][0, -1].double()
    u = (W_U[:, WORDS.id("Paris")] * w).double()
    for alpha in (-1.0, 0.5, 1.0):
        moved = x + alpha * u * x.square().mean().sqrt() / u.square().mean().sqrt()
        z = (moved * (moved.square().mean() + MODEL.dims.eps).rsqrt() * w) @ W_U.double()
        expected = float(z.log_softmax(-1)[WORDS.id("Paris")])
        assert of(df, "log_probability:Paris").loc[alpha, "value"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("tensor", "vector", "dim", "number"), [("O", ramp(32), "h", 1), ("delta_experts", ramp(128), "e", EXPERT)]
)
def test_a_head_or_expert_counted_from_the_end_has_its_number(
    tensor: str, vector: Tensor, dim: str, number: int
) -> None:
    """As edits allow it; but no frame says of a head that it is the one before the first."""
    how: dict[str, Any] = {"tensor": tensor, "block": 2, "metrics": [ARE], **QUICK}
    size = MODEL.dims.size(dim)
    df = steer(MODEL, FEW, vector, **{dim: number - size}, **how)
    assert set(df[{"h": "head", "e": "expert"}[dim]]) == {number}
    pd.testing.assert_frame_equal(df, steer(MODEL, FEW, vector, **{dim: number}, **how))
    for outside in (size, -size - 1):
        with pytest.raises(OutOfRange, match=f"{outside} does not exist"):
            steer(MODEL, FEW, vector, **{dim: outside}, **how)


# ---- what can't be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options", "error", "says"),
    [
        (ramp(128), {"tensor": None}, BadEdit, "say what is steered"),
        (ramp(128), {"tensor": "x_nxt"}, UnknownTensor, "x_next"),
        (ramp(128), {"block": 4}, OutOfRange, "4"),
        (ramp(128), {"tensor": "A"}, BadEdit, "positions or slots"),
        (ramp(2), {"tensor": "gates", "block": 1}, BadEdit, "positions or slots"),
        (ramp(127), {}, ShapeMismatch, r"the direction is \[127\], and blocks.1.x_next \[B T d\]"),
        (ramp(1), {}, ShapeMismatch, r"the direction is \[1\]"),
        (ramp(5, 128), {}, ShapeMismatch, r"the direction is \[5, 128\]"),
        (torch.zeros(128), {}, BadEdit, "points nowhere"),
        (torch.full((128,), torch.nan), {}, BadEdit, "direction is not finite"),
        (ramp(4, 32) * torch.tensor([[1.0], [0], [1], [1]]), {"tensor": "O", "h": 1}, BadEdit, "points nowhere"),
        (ramp(32), {"tensor": "O", "h": 4}, OutOfRange, "4"),
        (ramp(128), {"h": 1}, ProbeError, "no dim 'h'"),
        (ramp(128), {"at": "verb"}, BadEdit, "no span 'verb'"),
        (ramp(128), {"at": 2}, BadSample, "of 3 shapes, in which one position is different words"),
        (ramp(128), {"at": -2}, BadSample, "of 3 shapes"),
        (ramp(128), {"doses": []}, OutOfRange, "sizes above 0"),
        (ramp(128), {"doses": [0.0, 1.0]}, OutOfRange, "sizes above 0"),
        (ramp(128), {"doses": [-1.0]}, OutOfRange, "sizes above 0"),
        (ramp(128), {"doses": [1.0, 1.0]}, OutOfRange, "each once"),
        (ramp(128), {"doses": [float("inf")]}, OutOfRange, "sizes above 0"),
        (ramp(128), {"random_directions": 1}, OutOfRange, "two random directions"),
        (ramp(128), {"when": "always"}, BadEdit, "prompt, steps, both"),
        (ramp(128), {"when": "steps"}, BadEdit, "logit_difference:are/is sees no step"),
        (
            ramp(128),
            {"when": "steps", "at": "noun", "metrics": ["continuation:2:contains=a"]},
            BadEdit,
            "a place of the prompt",
        ),
        (ramp(128), {"metrics": ["kll"]}, BadMetric, "Nearest: kl"),
        (ramp(128), {"metrics": ["logit_difference:are/zzz"]}, BadText, "zzz"),
        ("are", {}, BadEdit, "token:WORD"),
        ("token:", {}, BadEdit, "token:WORD"),
        ("token:zzz", {}, BadText, "zzz"),
        ("token:are", {"tensor": "c_KV"}, BadEdit, "in the residual stream"),
        ("means:are", {}, BadEdit, "answer=CLASS"),
        ("means:answer=am", {}, BadProbe, "the classes are are, is"),
        ("means:anser=are", {}, BadProbe, "anser"),
        ("means:label=are", {}, BadProbe, "no label"),
        ("means:answer=are", {"tensor": "x_0", "block": None}, BadEdit, "blocks.0.x_n"),
        ("means:answer=are", {"tensor": "h_e", "block": 2, "at": "END"}, ProbeError, "name one by e="),
    ],
)
def test_what_cannot_be_steered(given: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        steer(MODEL, FEW, given, **{"tensor": "x_next", "block": 1, "metrics": [ARE], **QUICK, **options})


def test_a_probes_direction_keeps_its_place() -> None:
    found = direction(MODEL, NUMBER, "answer", "x_next", 1, "noun", to="are", probe="means")
    with pytest.raises(BadEdit, match=r"blocks.2.x_next: the direction is another's"):
        steer(MODEL, FEW, found, tensor="x_next", block=2, metrics=[ARE], **QUICK)
    with pytest.raises(BadEdit, match="say what is steered"):
        steer(MODEL, FEW, found, block=2, metrics=[ARE], **QUICK)
    with pytest.raises(BadSample, match="reference/agreement: the prompts are of 3 shapes"):
        steer(MODEL, ALIKE, "means:answer=are", tensor="x_next", block=1, at=2, **QUICK)  # learnt where the noun is not
    bare = Prompts.of([{"clean": "The dog is"}], WORDS, name="bare")
    with pytest.raises(BadEdit, match="bare: it has no reference prompts to learn"):
        steer(MODEL, bare, "means:answer=are", tensor="x_next", block=2, **QUICK)


# ---- frame, picture, command -----------------------------------------------------------------------------------------


def test_the_frame(tmp_path: Path) -> None:
    df = at_the_noun(1)
    assert df.groupby("metric", sort=False).size().to_dict() == {ARE: 6, "kl:all": 6, "loss": 6, "rms": 1}
    assert df["value"].sub(df["base"]).sub(df["effect"]).abs().max() < 1e-9
    assert set(df["tensor"]) == {"x_next"}
    assert set(of(df, ARE)["role"]) == {"noun"}
    assert of(df, ARE)["routing_agreement"].between(0.3, 1).all()
    file = frames.write(df, tmp_path / "steer.parquet")
    pd.testing.assert_frame_equal(frames.read(file), df)
    again = frames.join(df, at_the_noun(0))
    assert len(again) == 38


def test_what_it_costs_is_told() -> None:
    ahead = outlook(MODEL, FEW, ramp(128), tensor="x_next", block=1, at="noun", metrics=[ARE], **QUICK)
    assert ahead["cells"] == 2 * 3 * 4
    assert ahead["worlds"] == 3 * 4 * (len(FEW) + len(TEXT))
    assert ahead["forwards"] > 1


def test_a_picture_shows_each_dose_beside_random_ones() -> None:
    df = at_the_noun(1)
    made = list(pictures(df))
    assert [name for name, _ in made] == ["steer_logit_difference_are_is"]
    left, right = made[0][1].get_figure(root=True).axes  # type: ignore[union-attr]
    assert left.get_ylabel() == "change of logit difference:are/is [logits]"
    assert left.get_xlabel().startswith("α, in multiples of the rms of $x_{n+1}$ of block 1")
    line = left.lines[1]
    assert line.get_xdata().tolist() == [-1, -0.5, -0.25, 0, 0.25, 0.5, 1]
    assert line.get_ydata().tolist() == pytest.approx([*numbers(of(df, ARE))[:3], 0, *numbers(of(df, ARE))[3:]])
    assert [text.get_text() for text in right.get_legend().get_texts()][:2] == ["kl:all", "loss"]
    plt.close("all")


def test_what_a_picture_cannot_show() -> None:
    df = at_the_noun(1)
    with pytest.raises(BadFrame, match="several of unit"):
        dose(df)
    with pytest.raises(BadFrame, match="no doses of kl; it has"):
        dose(df, metrics=["kl"])
    with pytest.raises(BadFrame, match=r"several of block \(1, 0\)"):
        dose(frames.join(df, at_the_noun(0)), metrics=[ARE])
    assert dose(df[:0]).texts[0].get_text() == "no doses to draw"
    plt.close("all")


def test_the_command(tmp_path: Path) -> None:
    asked = ["steer", "means:answer=are", "--tensor", "blocks.1.x_next", "--task", "agreement", "--at", "noun"]
    asked += ["--dose", "0.5", "--random", "2", "--metric", ARE, "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "add means:answer=are: agreement, n = 36" in done.output
    assert "plain text, every position: reference/text, n = 16" in done.output
    assert "α is in multiples of the rms of x_next of block 1, 0.68" in done.output
    names = {"steer.parquet", "steer.csv", "steer_logit_difference_are_is.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    ahead = CliRunner().invoke(app, [*asked, "--dry-run", "--at", "-1"])
    assert ahead.exit_code == 0, ahead.output
    assert "worlds" in ahead.output
    wrong = CliRunner().invoke(app, [*asked[:1], "are", *asked[2:]])
    assert wrong.exit_code == 1
    assert "token:WORD" in wrong.output
