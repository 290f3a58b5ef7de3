"""The lens and the direct attribution against transformers' own norm and head, sums by hand, and edits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from typer.testing import CliRunner

from experiments import frames, lens_plots
from experiments.cli import app
from experiments.frames import BadFrame
from experiments.lens import direct, lens, unembed
from experiments.metrics import BadMetric
from experiments.prompts import Prompts
from experiments.scores import heads_above, scores
from experiments.stats import BadSample
from hooks import HookedModel, zero
from hooks.cache import Cache
from probe import TINY, random_weights
from probe.errors import BadEdit, BadText, OutOfRange, ShapeMismatch, UnknownDim, UnknownTensor

SPLITS = [(), ("head",), ("expert",), ("head", "expert")]


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


def task(model: HookedModel, name: str, n: int | None = None) -> Prompts:
    assert model.tokenizer is not None
    prompts = Prompts.load(name, model.tokenizer)
    return prompts if n is None else prompts.subset(range(n))


@pytest.fixture(scope="module")
def ioi(model: HookedModel) -> Prompts:
    """Twelve prompts of twelve shapes, of unequal length."""
    prompts = task(model, "ioi", 12)
    assert len({len(prompt.tokens) for prompt in prompts.rows}) > 1
    return prompts


def cached(model: HookedModel, prompts: Prompts) -> Cache:
    """Every tensor of a plain run."""
    with torch.no_grad():
        made: Cache = model.run_with_cache(*prompts.batch(), names_filter=lambda name: True)[1]
    return made


def at_end(value: Tensor, prompts: Prompts) -> Tensor:
    return torch.stack([value[b, len(prompt.tokens) - 1] for b, prompt in enumerate(prompts.rows)])


def column(df: pd.DataFrame, value: str = "value", **where: Any) -> np.ndarray[Any, Any]:
    for name, wanted in where.items():
        df = df[df[name] == wanted]
    return df.sort_values("example")[value].to_numpy(dtype=float)


# ---- the lens: right numbers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(ioi: Prompts) -> list[Tensor]:
    """The logits that transformers' own norm and head make of what enters each block, and the model's own."""
    config = DeepseekV3Config.from_pretrained(TINY)
    config.model_type = "deepseek_v3"  # as kimi_k2 it would load with random experts
    oracle = DeepseekV3ForCausalLM.from_pretrained(TINY, config=config, dtype=torch.float32)
    made = []
    with torch.no_grad():
        for prompt in ioi.rows:
            out = oracle(torch.tensor([prompt.tokens]), output_hidden_states=True, use_cache=False)
            into = [hidden[0, -1] for hidden in out.hidden_states[:-1]]  # the last one is normed already
            made.append([*(oracle.lm_head(oracle.model.norm(x)) for x in into), out.logits[0, -1]])
    return [torch.stack(logits).double() for logits in zip(*made, strict=True)]


def test_the_lens_is_the_models_own_norm_and_head(model: HookedModel, ioi: Prompts, theirs: list[Tensor]) -> None:
    df = lens(model, ioi, per_prompt=True)
    rows, last = torch.arange(len(ioi)), theirs[-1].log_softmax(-1)
    for block, z in enumerate(theirs):
        where = {"block": block, "tensor": "x_n"} if block == 0 else {"block": block - 1, "tensor": "x_next"}
        p, answer, wrong = z.log_softmax(-1), ioi.ids("answer"), ioi.ids("wrong")
        expected = {
            "logit_difference": z[rows, answer] - z[rows, wrong],
            "log_probability": p[rows, answer],
            "rank": torch.tensor([z[b].argsort(descending=True).tolist().index(a) + 1 for b, a in enumerate(answer)]),
            "kl": (last.exp() * (last - p)).sum(-1),
        }
        for metric, values in expected.items():
            got = column(df, metric=metric, **where)
            np.testing.assert_allclose(got, values.numpy(), rtol=1e-4, atol=1e-4, err_msg=f"{metric} {where}")
            own = column(df, "base", metric=metric, **where)
            np.testing.assert_allclose(own, column(df, metric=metric, block=3, tensor="x_next"), atol=1e-12)


def test_each_scale_by_hand(model: HookedModel, ioi: Prompts) -> None:
    """w ⊙ x · s, with the place's own s or the last one's: they differ where the stream is of another size."""
    cache = cached(model, ioi)
    w, W_U = (model.decoder.weights.read(None, name) for name in ("w_final", "W_U"))
    answer, wrong = ioi.ids("answer"), ioi.ids("wrong")
    direction = (W_U[:, answer] - W_U[:, wrong]).T
    found = {}
    for scale in ("own", "final"):
        df = lens(model, ioi, scale=scale, per_prompt=True)
        for block, name in ((0, "x_n"), (1, "x_mid"), (2, "x_next"), (3, "x_next")):
            x = at_end(cache[f"blocks.{block}.{name}"], ioi)
            final = at_end(cache["s_final"], ioi)
            s = final if scale == "final" else (x.pow(2).mean(-1, keepdim=True) + model.dims.eps).rsqrt()
            found[scale, block] = column(df, metric="logit_difference", block=block, tensor=name)
            np.testing.assert_allclose(found[scale, block], ((w * x * s) * direction).sum(-1), rtol=1e-4, atol=1e-5)
    for block in (0, 1, 2):
        assert np.abs(found["own", block]).sum() > 1.3 * np.abs(found["final", block]).sum()
    np.testing.assert_array_equal(found["own", 3], found["final", 3])


def test_the_scale_is_said(model: HookedModel, ioi: Prompts) -> None:
    assert "frozen" not in lens(model, ioi, blocks=[3])
    assert set(lens(model, ioi, blocks=[3], scale="final")["frozen"]) == {"s_final"}
    both = frames.join(*(lens(model, ioi, blocks=[3], scale=scale) for scale in ("own", "final")))
    assert len(both) == 2 * 3 * 4


def test_two_places_of_one_scale_differ_by_what_is_written_between(model: HookedModel, ioi: Prompts) -> None:
    df = lens(model, ioi, scale="final", per_prompt=True)
    parts = direct(model, ioi, by=[], per_prompt=True)
    for block in range(1, 4):
        before = column(df, metric="logit_difference", block=block - 1, tensor="x_next")
        middle = column(df, metric="logit_difference", block=block, tensor="x_mid")
        np.testing.assert_allclose(middle - before, column(parts, block=block, tensor="delta_attn"), atol=2e-5)


def test_positions_and_roles_are_the_same_places(model: HookedModel) -> None:
    prompts = task(model, "capital")
    rows = next(iter(prompts.shapes().values()))
    prompts = prompts.subset(rows)
    by_position = lens(model, prompts, roles=None)
    by_role = lens(model, prompts, roles=["subject[-1]", "END"])
    length = len(prompts.rows[0].tokens)
    assert set(by_position["pos"]) == set(range(length))
    assert by_position[by_position["pos"] == 0]["token"].eq("<bos>").all()
    assert by_position[by_position["pos"] == length - 1]["role"].eq("END").all()
    places = {"subject[-1]": prompts.rows[0].spans["subject"][-1], "END": length - 1}
    for role, pos in places.items():
        np.testing.assert_array_equal(
            by_role[by_role["role"] == role]["value"], by_position[by_position["pos"] == pos]["value"]
        )


def test_what_is_written_can_be_read_by_itself(model: HookedModel, ioi: Prompts) -> None:
    df = lens(model, ioi, tensors=["hook_attn_out", "hook_mlp_out"], blocks=[3], scale="final")
    parts = direct(model, ioi, by=[])
    for tensor in ("delta_attn", "delta_ffn"):
        (got,) = df[(df["tensor"] == tensor) & (df["metric"] == "logit_difference")]["value"]
        (expected,) = parts[(parts["tensor"] == tensor) & (parts["block"] == 3)]["value"]
        assert got == pytest.approx(expected, abs=1e-4)


def test_prompts_without_answers_have_a_distance_only(model: HookedModel) -> None:
    assert model.tokenizer is not None
    df = lens(model, Prompts.of([{"clean": "The capital of Peru is"}], model.tokenizer))
    assert set(df["metric"]) == {"kl"}


def test_several_spellings_count_together(model: HookedModel) -> None:
    assert model.tokenizer is not None
    answers = [["Lima"], ["Paris", "Lima"]]
    text = "The capital of Peru is"
    prompts = Prompts.of([{"clean": text, "answer": answer, "wrong": "Tokyo"} for answer in answers], model.tokenizer)
    df = lens(model, prompts, blocks=[3], per_prompt=True)
    logits = model(text)[0, -1].double()
    ids = [[model.tokenizer.id(word) for word in answer] for answer in answers]
    p, z = logits.log_softmax(-1), logits - logits[model.tokenizer.id("Tokyo")]
    for metric, of in (("log_probability", p), ("logit_difference", z)):
        expected = [float(of[i].logsumexp(-1)) for i in ids]
        np.testing.assert_allclose(column(df, metric=metric, tensor="x_next"), expected, atol=1e-4)
    np.testing.assert_array_equal(column(df, metric="rank", tensor="x_next"), [1, 1])


def test_an_answer_of_several_tokens_is_forced_at_every_depth(model: HookedModel) -> None:
    """By hand: each token behind the prompt up to the place, and the tokens before; spellings together."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text, answers = "The capital of Peru is", [["Lima and Paris", "Rome"], ["Lima"]]
    rows = [
        {"clean": text, "answer": answer, "wrong": "Tokyo in Japan", "spans": {"land": [15, 19]}} for answer in answers
    ]
    prompts = Prompts.of(rows, tokenizer)
    roles = {"END": len(prompts.rows[0].tokens), "land": prompts.rows[0].spans["land"][-1] + 1}
    df = lens(model, prompts, roles=list(roles), per_prompt=True)
    w, W_U = (model.decoder.weights.read(None, name).double() for name in ("w_final", "W_U"))

    def total(words: str, stop: int, site: str) -> tuple[float, int]:
        """The sum of log-probabilities, and the worst rank."""
        ids = [tokenizer.id(word) for word in words.split()]
        said = torch.tensor([[*prompts.rows[0].tokens[:stop], *ids]])
        x = model.run(said, want=[site])[site][0].double()[stop - 1 : -1]
        z = (w * x * (x.pow(2).mean(-1, keepdim=True) + model.dims.eps).rsqrt()) @ W_U
        own = z.gather(-1, torch.tensor(ids)[:, None])
        return float((own - z.logsumexp(-1, keepdim=True)).sum()), int((z > own).sum(-1).max()) + 1

    for role, stop in roles.items():
        for block, tensor in ((0, "x_n"), (1, "x_mid"), (3, "x_next")):
            where = {"role": role, "block": block, "tensor": tensor}
            of = {one: total(one, stop, f"blocks.{block}.{tensor}") for one in (*answers[0], "Lima", "Tokyo in Japan")}
            p = [float(torch.tensor([of[one][0] for one in answer]).logsumexp(0)) for answer in answers]
            expected = {
                "log_probability": p,
                "logit_difference": [one - of["Tokyo in Japan"][0] for one in p],
                "rank": [min(of[one][1] for one in answer) for answer in answers],
            }
            for metric, values in expected.items():
                got = column(df, metric=metric, **where)
                np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-4, err_msg=f"{metric} {where}")
    first = Prompts.of([{**rows[0], "answer": ["Lima", "Rome"]}], tokenizer)
    short = column(lens(model, first, per_prompt=True), metric="log_probability", block=3, tensor="x_next")
    long = column(df, metric="log_probability", block=3, tensor="x_next", role="END")
    assert abs(short[0] - long[0]) > 0.01, "the tokens behind the first count"


def test_one_row_a_prompt_is_enough_for_single_tokens(
    model: HookedModel, ioi: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place is read in the longest row that begins so; only a forced answer takes a row of its own."""
    asked: list[Tensor] = []
    run = HookedModel.run
    monkeypatch.setattr(
        HookedModel, "run", lambda self, tokens, *a, **k: (asked.append(tokens), run(self, tokens, *a, **k))[1]
    )
    lens(model, ioi, roles=["S2", "END"])
    assert asked[0].shape == ioi.batch()[0].shape
    same = ioi.subset([0, 0])
    lens(model, same, roles=None)
    assert asked[1].shape == (1, len(same.rows[0].tokens)), "equal prompts are one row"


def test_metrics_may_be_named(model: HookedModel, ioi: Prompts) -> None:
    df = lens(model, ioi, blocks=[3], metrics=["top1_agreement", "log_probability:Mary"], per_prompt=True)
    assert set(df["metric"]) == {"top1_agreement", "log_probability:Mary"}
    assert (column(df, metric="top1_agreement", tensor="x_next") == 1).all()
    for metric in ("kl:all", "loss", "relative_change", "continuation:2:exact"):
        with pytest.raises(BadMetric, match="a lens reads logits where roles say"):
            lens(model, ioi, metrics=[metric])


def test_nothing_but_the_read_positions_is_kept(
    model: HookedModel, ioi: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []

    def seen(keep: Any) -> Any:
        def see(self: Cache, site: Any, x: Any, *more: Any) -> Any:
            kept.extend(x if isinstance(x, tuple) else [x])
            return keep(self, site, x, *more)

        return see

    for name in ("keep", "keep_reduced"):
        monkeypatch.setattr(Cache, name, seen(getattr(Cache, name)))
    lens(model, ioi)
    direct(model, ioi)
    assert len(kept) > 10
    floats = [x for x in kept if x.is_floating_point()]
    assert max(x.numel() for x in floats) <= len(ioi) * model.dims.d


# ---- the lens: what it shows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ioi", "capital", "induction"])
def test_the_answer_shows_late_and_where_it_is_read(name: str, model: HookedModel) -> None:
    prompts = task(model, name)
    other = {"ioi": "S2", "capital": "subject[-1]", "induction": "B1"}[name]
    df = lens(model, prompts, roles=[other, "END"])

    def rank(block: int, tensor: str, role: str = "END") -> float:
        here = df[(df["metric"] == "rank") & (df["role"] == role)]
        (value,) = here[(here["block"] == block) & (here["tensor"] == tensor)]["value"]
        return float(value)

    assert min(rank(block, "x_next") for block in range(3)) > 10  # until the last block
    assert rank(3, "x_mid") < 1.5  # whose attention brings it
    assert rank(3, "x_next") < 1.1
    assert min(rank(block, "x_next", other) for block in range(4)) > 10  # and nowhere else


def test_a_model_that_has_learnt_nothing_shows_nothing(model: HookedModel) -> None:
    prompts = task(model, "capital")
    df = lens(HookedModel(random_weights(model.dims), model.tokenizer), prompts)
    assert df[df["metric"] == "rank"]["value"].min() > 50


# ---- direct attribution: right numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("by", SPLITS, ids=lambda by: "+".join(by) or "whole")
@pytest.mark.parametrize("name", ["ioi", "job"])
def test_the_parts_sum_to_the_logit_difference(name: str, by: tuple[str, ...], model: HookedModel) -> None:
    prompts = task(model, name, 24)
    df = direct(model, prompts, by=by, per_prompt=True)  # type: ignore[arg-type]
    z = at_end(model.run(*prompts.batch())["logits"], prompts).double()
    rows = torch.arange(len(z))
    true = (z[rows, prompts.ids("answer")] - z[rows, prompts.ids("wrong")]).numpy()
    summed = df.groupby("example")["value"].sum().to_numpy(dtype=float)
    np.testing.assert_allclose(summed, true, atol=1e-5 * np.abs(true).max())
    np.testing.assert_allclose(df.groupby("example")["base"].first().to_numpy(dtype=float), true, atol=1e-5)
    assert df.attrs["rounding"] == pytest.approx(np.abs(summed - true).max(), abs=1e-6)
    left = df["base"].to_numpy(dtype=float) - summed[df["example"].to_numpy(dtype=int)]
    np.testing.assert_allclose(df["completeness_gap"].to_numpy(dtype=float), left, atol=1e-12)
    mean = direct(model, prompts, by=by)  # type: ignore[arg-type]
    rest = float(mean["base"].iloc[0] - mean["value"].sum())
    assert mean["completeness_gap"].to_numpy(dtype=float) == pytest.approx(np.full(len(mean), rest), abs=1e-12)
    heads, experts = 4 * 4 if "head" in by else 4, 3 * (16 + 1) if "expert" in by else 3
    assert len(df) == len(prompts) * (1 + heads + 1 + experts)


def test_every_part_by_taking_it_away(model: HookedModel, ioi: Prompts) -> None:
    """Each part subtracted from the last residual stream, and the rest read at the scale that the whole had."""
    df = direct(model, ioi, per_prompt=True)
    cache, rows = cached(model, ioi), torch.arange(len(ioi))
    x, s = (at_end(cache[name], ioi)[:, None] for name in ("blocks.3.x_next", "s_final"))

    def difference(stream: Tensor) -> Tensor:
        z = unembed(model, stream, s)[:, 0].double()
        return z[rows, ioi.ids("answer")] - z[rows, ioi.ids("wrong")]

    def without(part: Tensor, **where: Any) -> None:
        expected = difference(x) - difference(x - at_end(part, ioi)[:, None])
        np.testing.assert_allclose(column(df, **where), expected.numpy(), atol=2e-5, err_msg=str(where))

    without(cache["x_0"], tensor="x_0")
    without(cache["blocks.0.delta_ffn"], tensor="delta_ffn", block=0)
    for block in range(4):
        for head in range(4):
            without(cache[f"blocks.{block}.delta_heads"][:, :, head], tensor="delta_heads", block=block, head=head)
    for block in (1, 3):
        without(cache[f"blocks.{block}.delta_shared"], tensor="delta_shared", block=block)
        slots, experts = (cache[f"blocks.{block}.{name}"] for name in ("delta_experts", "experts"))
        for e in range(16):
            part = torch.where((experts == e)[..., None], slots, 0.0).sum(2)
            without(part, tensor="delta_experts", block=block, expert=e)


def test_any_direction_of_logits(model: HookedModel, ioi: Prompts) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((model.dims.V,), (len(ioi), model.dims.V)):
        direction = torch.randn(shape, generator=generator)
        df = direct(model, ioi, direction=direction, per_prompt=True)
        z = at_end(model.run(*ioi.batch())["logits"], ioi).double()
        expected = (z * direction).sum(-1).numpy()
        assert set(df["metric"]) == {"logit_direction"}
        summed = df.groupby("example")["value"].sum().to_numpy(dtype=float)
        np.testing.assert_allclose(summed, expected, atol=1e-5 * np.abs(expected).max())
    answer = torch.nn.functional.one_hot(ioi.ids("answer"), model.dims.V)
    wrong = torch.nn.functional.one_hot(ioi.ids("wrong"), model.dims.V)
    same = direct(model, ioi, direction=(answer - wrong).float())
    np.testing.assert_allclose(same["value"], direct(model, ioi)["value"], atol=1e-9)


def test_another_place_has_other_parts(model: HookedModel, ioi: Prompts) -> None:
    df = direct(model, ioi, role="S2", per_prompt=True)
    z = model.run(*ioi.batch())["logits"].double()
    for b, prompt in enumerate(ioi.rows):
        here = z[b, prompt.spans["S2"][0]]
        true = float(here[ioi.ids("answer")[b]] - here[ioi.ids("wrong")[b]])
        assert column(df[df["example"] == b]).sum() == pytest.approx(true, abs=1e-5)


def test_rounding_is_told(ioi: Prompts) -> None:
    low = HookedModel.load(dtype=torch.bfloat16)
    df = direct(low, ioi, per_prompt=True)
    lost = df.groupby("example")["value"].sum() - df.groupby("example")["base"].first()
    assert df.attrs["rounding"] == pytest.approx(float(lost.abs().max()), abs=1e-9)
    assert 1e-3 < df.attrs["rounding"] < 1


# ---- direct attribution: what it shows -------------------------------------------------------------------------------


def by_head(df: pd.DataFrame) -> dict[tuple[int, int], float]:
    here = df[df["tensor"] == "delta_heads"]
    return {(b, h): float(x) for b, h, x in zip(here["block"], here["head"], here["value"], strict=True)}


def test_the_head_that_names_the_receiver_has_most_of_it(model: HookedModel) -> None:
    """The head without which the answer is lost, found by switching each off at the end; and no other has much."""
    prompts = task(model, "ioi")
    tokens, keep = prompts.batch()
    rows = torch.arange(len(prompts))

    def difference(logits: Tensor) -> float:
        z = at_end(logits, prompts)
        return float((z[rows, prompts.ids("answer")] - z[rows, prompts.ids("wrong")]).mean())

    base = model.run(tokens, keep)
    whole = difference(base["logits"])
    places = [(block, head) for block in range(4) for head in range(4)]
    cost = {
        (block, head): whole
        - difference(model.run(tokens, keep, edits=zero("O", block, h=head, T=-1), base=base)["logits"])
        for block, head in places
    }
    mover, share = max(cost, key=lambda place: cost[place]), by_head(direct(model, prompts))
    assert cost[mover] > 0.7 * whole
    assert share[mover] > 0.7 * whole
    assert max(abs(share[place]) for place in places if place != mover) < 0.1 * whole


def test_induction_heads_have_most_of_it_together(model: HookedModel) -> None:
    """Any one of them can be spared, which switching off one by one can't tell from doing nothing."""
    prompts = task(model, "induction")
    heads = heads_above(scores(model, prompts), "induction")
    df = direct(model, prompts)
    share, whole = by_head(df), float(df["base"].iloc[0])
    assert sum(share[head] for head in heads) > 0.8 * whole
    others = [place for place in share if place not in heads]
    assert max(abs(sum(share[place] for place in some)) for some in combinations(others, len(heads))) < 0.1 * whole


def test_jobs_come_by_way_of_experts_and_lists_do_not(model: HookedModel) -> None:
    def by_experts(name: str) -> float:
        df = direct(model, task(model, name))
        return float(df[df["tensor"] == "delta_experts"]["value"].sum() / df["base"].iloc[0])

    assert by_experts("job") > 0.4
    assert by_experts("induction") < 0.15


# ---- what cannot be asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"scale": "base"}, BadEdit, "own or final"),
        ({"roles": ["S3"]}, BadEdit, "has no span 'S3'"),
        ({"roles": []}, BadEdit, "a list of spans' names"),
        ({"roles": "END"}, BadEdit, "a list of spans' names"),
        ({"roles": ["both"]}, BadEdit, r"of 2 tokens.*both\[-1\]"),
        ({"roles": None}, BadSample, "2 shapes"),
        ({"tensors": ["c_KV"]}, UnknownTensor, r"\[B T r_kv\]"),
        ({"tensors": ["x_nn"]}, UnknownTensor, "Nearest"),
        ({"blocks": [4]}, OutOfRange, "block 4"),
    ],
)
def test_what_the_lens_cannot_read(
    options: dict[str, Any], error: type[Exception], says: str, model: HookedModel
) -> None:
    assert model.tokenizer is not None
    rows: list[dict[str, Any]] = [
        {"clean": "The capital of Peru is", "spans": {"both": [0, 11]}},
        {"clean": "When Mary and John went", "spans": {"both": [0, 9]}, "template": "another"},
    ]
    with pytest.raises(error, match=says):
        lens(model, Prompts.of(rows, model.tokenizer), **options)


@pytest.mark.parametrize(
    ("row", "options", "error", "says"),
    [
        ({}, {}, BadText, "no answer"),
        ({"answer": "Lima"}, {}, BadText, "no wrong"),
        ({"answer": ["Lima", "Paris"], "wrong": "Tokyo"}, {}, BadText, "several spellings; .* direction="),
        ({"answer": "Lima", "wrong": "Tokyo in Japan"}, {}, BadText, "the wrong of row 0.*has several tokens"),
        ({"answer": "Lima", "wrong": "Paris"}, {"by": ["neuron"]}, UnknownDim, "'head' and 'expert'"),
        ({"answer": "Lima", "wrong": "Paris"}, {"by": "head"}, UnknownDim, "a list"),
        ({"answer": "Lima", "wrong": "Paris"}, {"role": "subject"}, BadEdit, "no span 'subject'"),
        ({}, {"direction": torch.ones(3)}, ShapeMismatch, r"\[410\]"),
        ({}, {"direction": torch.full((410,), torch.nan)}, ShapeMismatch, "finite"),
    ],
)
def test_what_cannot_be_taken_apart(
    row: dict[str, Any], options: dict[str, Any], error: type[Exception], says: str, model: HookedModel
) -> None:
    assert model.tokenizer is not None
    prompts = Prompts.of([{"clean": "The capital of Peru is", **row}], model.tokenizer)
    with pytest.raises(error, match=says):
        direct(model, prompts, **options)


# ---- pictures and the command line -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


def test_the_lens_is_drawn_with_its_scale_and_the_output(model: HookedModel) -> None:
    prompts = task(model, "capital", 12)
    for scale, said in (("own", "each place's own"), ("final", "of the last place")):
        df = lens(model, prompts, roles=["subject[-1]", "END"], scale=scale)  # type: ignore[arg-type]
        ax = lens_plots.lens(df)
        assert any(said in text.get_text() for text in ax.texts)
        assert ax.get_ylabel() == "logit difference [logits]"
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["subject[-1]", "END"]
        end = df[(df["role"] == "END") & (df["metric"] == "logit_difference")]
        line = next(line for line in ax.lines if line.get_label() == "END")
        np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), end["value"].to_numpy(dtype=float))
        np.testing.assert_allclose(np.asarray(line.get_xdata(), dtype=float), [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4])
    ranks = lens_plots.lens(df, metric="rank")
    assert ranks.yaxis_inverted()
    assert ranks.get_yscale() == "log"
    with pytest.raises(BadFrame, match="no metric 'loss'"):
        lens_plots.lens(df, metric="loss")
    both = frames.join(df, lens(model, prompts, roles=["END"]))
    with pytest.raises(BadFrame, match="several rows"):
        lens_plots.lens(both)
    assert "no rows" in lens_plots.lens(df.iloc[:0]).texts[0].get_text()


def test_rows_by_prompt_are_drawn_as_their_mean(model: HookedModel, ioi: Prompts) -> None:
    for study, draw in ((lens, lens_plots.lens), (direct, lens_plots.direct)):
        drawn = []
        for per_prompt in (False, True):
            ax = draw(study(model, ioi, per_prompt=per_prompt))  # type: ignore[operator]
            widths = [patch.get_width() for patch in ax.patches]
            drawn.append(widths or [float(y) for y in ax.lines[0].get_ydata()])
        np.testing.assert_allclose(drawn[0], drawn[1], atol=1e-6)


def test_the_bars_add_up(model: HookedModel, ioi: Prompts) -> None:
    df = direct(model, ioi)
    ax = lens_plots.direct(df, most=5)
    *parts, whole = [patch.get_width() for patch in ax.patches]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert len(parts) == 6
    assert sum(parts) == pytest.approx(whole, abs=1e-4)
    assert names[-2:] == [f"the other {len(df) - 5} together", "all"]
    assert any(name.startswith("block 3, head 0") for name in names)
    with pytest.raises(BadFrame, match="several rows"):
        lens_plots.direct(frames.join(df, direct(model, ioi, role="S2")))
    assert "no parts" in lens_plots.direct(df.iloc[:0]).texts[0].get_text()


def test_all_pictures_of_a_frame(model: HookedModel) -> None:
    prompts = task(model, "capital", 1)
    for roles in (["END"], None):
        df = lens(model, prompts, roles=roles)
        assert [name for name, _ in lens_plots.pictures(df)] == ["logit_difference", "log_probability", "rank", "kl"]


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lens", "--task", "capital", "--role", "END", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "the final norm's scale is each place's own" in result.output
    assert "What adds up to 15.4" in result.output
    assert {"lens.parquet", "direct.csv", "direct.png", "rank.png"} <= {path.name for path in tmp_path.iterdir()}
    assert frames.read(tmp_path / "direct.parquet")["value"].sum() == pytest.approx(15.42, abs=0.01)


def test_the_command_without_a_wrong_answer() -> None:
    result = CliRunner().invoke(app, ["lens", "--prompt", "The capital of Peru is", "--answer", "Lima"])
    assert result.exit_code == 0, result.output
    assert "left out: what adds up" in result.output
    assert "What adds up to" not in result.output
