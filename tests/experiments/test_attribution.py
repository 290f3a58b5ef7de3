"""Attribution against autograd through transformers' own model and against finite differences, tensor by tensor; what
must be exact; what it shows of the tiny model; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex
from scipy.stats import pearsonr
from torch import Tensor
from typer.testing import CliRunner

from experiments import causal_plots, frames
from experiments.attribution import FIRST_ORDER, agreement, attribute, outlook, paired
from experiments.cli import app
from experiments.effects import gaps
from experiments.frames import BadFrame
from experiments.metrics import BadMetric
from experiments.options import By
from experiments.parts import can_go
from experiments.patch import patch
from experiments.plots import short
from experiments.prompts import Answer, Prompt, Prompts
from experiments.tables import agreement_table
from hooks import Edit, HookedModel, Run, edit, freeze
from hooks.edits import PER_SLOT
from probe.errors import BadEdit, BadText, OutOfRange, UnknownDim, UnknownTensor
from probe.sites import Site
from tests.oracle import Oracle, config, draw, padding

TINY = HookedModel.load()
assert TINY.tokenizer is not None
TOKENIZER = TINY.tokenizer

ORACLE = Oracle(config(n_group=4, topk_group=2), seed=11)
"""Small, with wide weights: everything does some work. Its words are numbers."""

MODEL = HookedModel(ORACLE.weights())
LENGTHS = [6, 4, 6, 5]
THIS, OTHER = 1, 2
"""The answer, and the wrong one, of all prompts that are drawn."""

STEP = 2e-3
"""Of finite differences."""


def drawn(oracle: Oracle, lengths: Sequence[int] = LENGTHS, seed: int = 1) -> Prompts:
    """Pairs of any tokens, without a near-tie of the router."""
    n, keep = len(lengths), padding([*lengths, *lengths], "right")
    tokens, _ = draw(oracle, 2 * n, max(lengths), keep, seed)
    this, other = (Answer((str(i),), ((i,),)) for i in (THIS, OTHER))
    rows = []
    for i, length in enumerate(lengths):
        spans = {"first": range(1), "middle": range(1, 3), "END": range(length - 1, length)}
        clean, corrupt = (tuple(tokens[j, :length].tolist()) for j in (i, n + i))
        rows.append(Prompt(str(i), clean, f"not {i}", this, other, str(i), "", spans, corrupt, spans))
    return Prompts(tuple(rows), TOKENIZER, "drawn")


PAIRS = drawn(ORACLE)


@cache
def task(name: str) -> Prompts:
    return Prompts.load(name, TOKENIZER)


def some(name: str, n: int) -> Prompts:
    """A few rows, of several shapes where there are."""
    by_shape = list(task(name).shapes().values())
    return task(name).subset(sorted(rows[i] for i in range(n) for rows in by_shape if i < len(rows))[:n])


CAPITAL, IOI = some("capital", 4), some("ioi", 4)


def effects(df: pd.DataFrame, edit: str = FIRST_ORDER, **columns: Any) -> Any:
    """The effects of these rows, by prompt or not, NaN where there is none."""
    here = df[df["edit"] == edit]
    for name, value in columns.items():
        here = here[here[name].eq(value).fillna(False)]
    return here["effect"].to_numpy(dtype=float, na_value=np.nan)


# ---- transformers' own model -----------------------------------------------------------------------------------------


def theirs(prompts: Prompts, start: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The differences of transformers' logits at each prompt's end, [prompts], and what some modules gave.

    Args:
        start: the embedding, in place of the tokens' own.
    """
    model, found, handles = ORACLE.model, dict[str, Tensor](), []

    def keeper(name: str) -> Callable[..., None]:
        def keep_it(_: Any, __: Any, out: Any) -> None:
            found[name] = out[0] if isinstance(out, tuple) else out

        return keep_it

    for i, layer in enumerate(model.model.layers):
        modules = {"delta_attn": layer.self_attn, "delta_ffn": layer.mlp, "x_next": layer}
        modules |= {"c_KV_hat": layer.self_attn.kv_a_layernorm, "c_Q": layer.self_attn.q_a_proj}
        handles += [module.register_forward_hook(keeper(f"blocks.{i}.{name}")) for name, module in modules.items()]
    tokens, keep = prompts.batch()
    assert keep is not None
    found["blocks.0.x_n"] = (model.model.embed_tokens(tokens) if start is None else start).detach().requires_grad_()
    given = {"attention_mask": keep.long(), "position_ids": (keep.long().cumsum(-1) - 1).clamp(min=0)}
    try:
        logits = model(inputs_embeds=found["blocks.0.x_n"], use_cache=False, **given).logits
    finally:
        for handle in handles:
            handle.remove()
    ends = logits[range(len(prompts)), [len(prompt.tokens) - 1 for prompt in prompts.rows]]
    return ends[:, THIS] - ends[:, OTHER], found


def by_autograd(prompts: Prompts, starts: Sequence[float | None]) -> dict[str, Tensor]:
    """Gradient · (source − base), [prompts, positions], of corrupt prompts as the base; the gradient is the mean of
    those with the embedding at these places between base and source."""
    _, base = theirs(prompts.swapped())
    _, source = theirs(prompts)
    keep = prompts.batch().keep
    assert keep is not None
    sums: dict[str, Tensor] = {}
    for share in starts:
        x_0 = None if share is None else torch.lerp(base["blocks.0.x_n"], source["blocks.0.x_n"], share)
        score, values = theirs(prompts.swapped(), x_0)
        for name, gradient in zip(values, torch.autograd.grad(score.sum(), list(values.values())), strict=True):
            product = gradient * (source[name] - base[name]).detach()
            sums[name] = sums.get(name, 0) + product.sum(-1).masked_fill(~keep, 0) / len(starts)
    return sums


@pytest.mark.parametrize("steps", [0, 3])
def test_estimates_are_autograd_through_transformers(steps: int) -> None:
    kind = f"integrated gradients, {steps} steps" if steps else FIRST_ORDER
    expected = by_autograd(PAIRS, [(i + 0.5) / steps for i in range(steps)] or [None])
    whole = attribute(MODEL, PAIRS, exact=False, steps=steps, per_prompt=True)
    assert len(expected) == 16
    for name, value in expected.items():
        site = MODEL.sites.find(name)
        np.testing.assert_allclose(effects(whole, kind, block=site.block, tensor=site.tensor), value.sum(-1), atol=2e-4)
    assert min(float(value.sum(-1).abs().max()) for value in expected.values()) > 0.1
    left = theirs(PAIRS)[0] - theirs(PAIRS.swapped())[0] - expected["blocks.0.x_n"].sum(-1)
    for site in ("blocks.0.x_n", "blocks.2.delta_ffn"):  # whatever is asked for
        of = MODEL.sites.find(site)
        here = whole[(whole["edit"] == kind) & (whole["block"] == of.block) & (whole["tensor"] == of.tensor)]
        np.testing.assert_allclose(here["completeness_gap"].astype(float), left.detach(), atol=2e-4)
    roles = attribute(MODEL, PAIRS, tensors=["delta_attn"], by="role", exact=False, steps=steps, per_prompt=True)
    for block in range(3):
        value = expected[f"blocks.{block}.delta_attn"]
        for role, places in (("first", [0]), ("middle", [1, 2])):
            at = effects(roles, kind, block=block, role=role)
            np.testing.assert_allclose(at, value[:, places].sum(-1), atol=2e-4)


# ---- finite differences ----------------------------------------------------------------------------------------------


@cache
def both() -> tuple[Run, Run]:
    """Base and source of the pairs, whole."""
    tokens, keep = PAIRS.swapped().batch()
    other, there = PAIRS.batch()
    return MODEL.run(tokens, keep, want=list(MODEL.sites)), MODEL.run(other, there, want=list(MODEL.sites))


def change(site: Site) -> Tensor:
    """Source − base of a tensor, slots by their experts one by one: NaN where the source has none."""
    base, source = (run[site] for run in both())
    if "k" not in MODEL.sites.node(site).shape:
        return torch.where(base.isfinite() & source.isfinite(), source - base, 0.0)
    ours, theirs = (run[Site(site.block, "experts")] for run in both())
    found = torch.full_like(base, torch.nan)
    for at in np.ndindex(*ours.shape):
        for slot in range(MODEL.dims.k):
            if theirs[(*at[:2], slot)] == ours[at]:
                found[at] = source[(*at[:2], slot)] - base[at]
    return found


def moved(site: Site | str, way: Tensor) -> Edit:
    """A tensor with something added."""
    return edit(str(site), lambda value: value + way.to(value.dtype), "a step")


def derivative(site: Site, way: Tensor, *start: Edit) -> Any:
    """[prompts]: of the logit difference, along a way that a tensor goes, by central differences; the base's experts
    are held, or come about after edits that the run starts with."""
    tokens, keep = PAIRS.swapped().batch()
    others = list(start) or [freeze("experts")]
    base = None if start else both()[0]
    scores = []
    for step in (STEP, -STEP):
        logits = MODEL.run(tokens, keep, edits=[*others, moved(site, step * way)], base=base)["logits"]
        ends = logits[range(len(PAIRS)), [len(prompt.tokens) - 1 for prompt in PAIRS.rows]].double()
        scores.append(ends[:, THIS] - ends[:, OTHER])
    return (scores[0] - scores[1]).numpy() / (2 * STEP)


def held(site: Site) -> bool:
    """Whether a change can be made along with held experts, and matters then."""
    node = MODEL.sites.node(site)
    return site.block is not None and node.dtype != "int64" and site.tensor not in ("delta_heads", "choice_score")


def slotted(site: Site) -> bool:
    return "k" in MODEL.sites.node(site).shape


def test_every_tensors_estimate_is_its_finite_difference() -> None:
    sites = [site for site in MODEL.sites if held(site) and not slotted(site) and site.block in (0, 1)]
    df = attribute(MODEL, PAIRS, blocks=[0, 1], exact=False, per_prompt=True)
    sizes: dict[str, float] = {}
    for site in sites:
        if site != Site(1, "x_n"):  # the x_next of the block before
            expected = derivative(site, change(site))
            ours = effects(df, block=site.block, tensor=site.tensor)
            np.testing.assert_allclose(ours, expected, atol=3e-3, rtol=3e-3, err_msg=str(site))
            sizes[site.tensor] = max(sizes.get(site.tensor, 0), abs(expected).max())
    assert len(sizes) > 40
    assert min(sizes.values()) > 0.02
    assert (effects(df, tensor="choice_score") == 0).all(), "nothing but the choice reads it"


def test_slots_are_matched_by_expert() -> None:
    """Expert by expert. What both runs chose is compared, in whichever slots they hold it; else there is no number, but
    for contributions, which an expert that one run alone chose adds or takes away."""
    chosen = [run["blocks.1.experts"] for run in both()]
    keep = PAIRS.batch().keep
    assert keep is not None
    same = chosen[0] == chosen[1]
    there = (chosen[0][..., :, None] == chosen[1][..., None, :]).any(-1)
    assert int((there & ~same & keep[..., None]).sum()) > 5, "they lie in other slots"
    df = attribute(
        MODEL, PAIRS, tensors=[*PER_SLOT, "delta_experts"], blocks=[1], by="expert", exact=False, per_prompt=True
    )
    lost = numbers = 0
    for tensor in PER_SLOT:
        site = Site(1, tensor)
        ways = change(site)
        for expert in range(0, MODEL.dims.e, 2):
            own = (chosen[0] == expert) & keep[..., None]
            odd = (own & ~there).any((1, 2)).numpy()
            way = torch.zeros_like(ways)
            way[own & there] = ways[own & there]
            expected = np.where(odd, np.nan, derivative(site, way))
            ours = effects(df, tensor=tensor, expert=expert)
            np.testing.assert_allclose(ours, expected, atol=2e-3, rtol=3e-3, err_msg=f"{site}, expert {expert}")
            lost, numbers = lost + odd.sum(), numbers + (abs(expected) > 0.01).sum()
    assert lost > 30
    assert numbers > 15
    for expert in range(MODEL.dims.e):
        base, source = (
            (run["blocks.1.delta_experts"] * (run["blocks.1.experts"] == expert)[..., None]).sum(2) for run in both()
        )
        expected = derivative(Site(1, "delta_routed"), source - base)
        np.testing.assert_allclose(effects(df, tensor="delta_experts", expert=expert), expected, atol=2e-3, rtol=3e-3)
    assert np.isfinite(effects(df, tensor="delta_experts")).all()


def test_steps_have_their_own_experts() -> None:
    """On the way from base to source others are chosen, in other slots: what a step doesn't choose has no gradient
    there."""
    site, (base, source) = Site(1, "y_e"), both()
    df = attribute(MODEL, PAIRS, tensors=["y_e"], blocks=[1], by="expert", steps=2, exact=False, per_prompt=True)
    way, ours = change(site), base["blocks.1.experts"]
    (tokens, keep), found, lost = PAIRS.swapped().batch(), dict[int, Any](), 0
    assert keep is not None
    for share in (0.25, 0.75):
        start = moved("x_0", share * (source["blocks.0.x_n"] - base["blocks.0.x_n"]))
        step = MODEL.run(tokens, keep, want=["blocks.1.experts"], edits=[start])["blocks.1.experts"]
        lost += int((step.sort(-1).values != ours.sort(-1).values)[keep].sum())
        for expert in range(MODEL.dims.e):
            mine = torch.zeros_like(way)
            for b, t, slot in (ours == expert).nonzero().tolist():
                mine[b, t, step[b, t] == expert] = way[b, t, slot].nan_to_num()
            found[expert] = found.get(expert, 0) + derivative(site, mine, start) / 2
    assert lost > 5
    numbers = 0
    for expert, expected in found.items():
        got = effects(df, "integrated gradients, 2 steps", expert=expert)
        there = ~np.isnan(got)
        np.testing.assert_allclose(got[there], expected[there], atol=3e-3, rtol=3e-3)
        numbers += int((abs(expected[there]) > 0.01).sum())
    assert numbers > 5


@pytest.mark.parametrize("by", ["head", "position", "expert", "feature", "key"])
def test_parts_add_up_to_the_whole(by: By) -> None:
    """First order is additive; where a part has no number, the whole has none."""
    sites = [site for site in MODEL.sites if site.block in (0, 1) and (held(site) or site.tensor == "delta_experts")]
    sites = [site for site in sites if can_go(by, MODEL.sites.node(site))]
    asked: dict[str, Any] = {"tensors": list(map(str, sites)), "exact": False, "steps": 2, "per_prompt": True}
    whole, parts = attribute(MODEL, PAIRS, **asked), attribute(MODEL, PAIRS, by=by, **asked)
    keys = ["edit", "block", "tensor", "example"]
    sums = parts.groupby(keys, observed=True)["effect"].agg(lambda x: x.sum(skipna=False))
    one = whole.set_index(keys)["effect"]
    assert len(one) == len(sums) == 2 * len(PAIRS) * len(sites) > 0
    sums, one = (x.astype(float) for x in (sums.loc[one.index], one))
    np.testing.assert_allclose(sums, one, atol=1e-4)
    assert one.abs().max() > 0.5
    assert len(parts) > 2 * len(whole)


# ---- what must be exact ----------------------------------------------------------------------------------------------


def test_where_the_model_is_linear_the_estimate_is_the_patch() -> None:
    """With an eps far above the squares, a norm is a product with a number. So the logits are linear in all that the
    last block adds, contributions of experts that only one of the runs chose among it."""
    eps = 1e8
    oracle = Oracle(config(rms_norm_eps=eps), seed=4)
    for name, weight in oracle.model.state_dict().items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")):
            weight.mul_(eps**0.5)
    model, pairs = HookedModel(oracle.weights()), drawn(oracle, seed=3)
    linear = ["delta_experts", "delta_routed", "delta_shared", "delta_ffn", "x_next", "h_s"]
    pair = paired(attribute(model, pairs, tensors=[*linear, "g_s", "x_ffn"], blocks=[2], per_prompt=True))
    straight = pair["tensor"].isin(linear)
    off = (pair["estimate"] - pair["patch"]).abs() / pair["patch"].abs()
    assert off[straight].max() < 1e-3
    assert off[~straight].max() > 0.5, "the control: a gate of the SwiGLU, and what the router reads"
    assert len(pair[straight]) == 6 * len(pairs)
    by_expert = paired(attribute(model, pairs, tensors=["delta_experts"], blocks=[2], by="expert", per_prompt=True))
    np.testing.assert_allclose(by_expert["estimate"], by_expert["patch"], rtol=1e-3, atol=1e-3)
    chosen = [model.run(*one.batch(), want="blocks.2.experts")["blocks.2.experts"] for one in (pairs, pairs.swapped())]
    assert not torch.equal(*(experts.sort(-1).values for experts in chosen))


def test_integrated_gradients_of_the_embedding_add_up_to_the_whole_difference() -> None:
    """Of a dense model the more exactly, the more steps: what all positions' embeddings do is to swap the prompt."""
    oracle = Oracle(config(first_k_dense_replace=3), seed=5)
    model, pairs = HookedModel(oracle.weights()), drawn(oracle, seed=2)
    asked: dict[str, Any] = {"tensors": ["x_n"], "blocks": [0], "per_prompt": True}
    whole = attribute(model, pairs, **asked)
    exact = effects(whole, "patch")
    assert np.allclose(whole.loc[whole["edit"] == "patch", "recovered"].astype(float), 1)
    errors = [abs(effects(whole) - exact).max()]
    for steps in (4, 16, 64):
        df = attribute(model, pairs, by="position", steps=steps, exact=False, **asked)
        df = df[df["edit"] == f"integrated gradients, {steps} steps"]
        sums = df.groupby("example")["effect"].sum().to_numpy(float)
        errors.append(abs(sums - exact).max())
        left = df.groupby("example")["completeness_gap"].agg(["min", "max"]).to_numpy(float)
        np.testing.assert_allclose(left, np.stack([exact - sums] * 2, -1), atol=2e-4)
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 2e-3 < 0.1 * errors[2]
    assert errors[0] > 1


def test_what_flips_on_the_way_is_left_over_and_said() -> None:
    """However many steps: a choice of experts that flips is a jump, which no gradient sees. An average leaves the
    average of what its prompts leave, and says so in words."""
    asked: dict[str, Any] = {"tensors": ["x_n"], "blocks": [0], "steps": 256, "exact": False}
    rows = attribute(MODEL, PAIRS, per_prompt=True, **asked)
    left = rows.loc[rows["edit"] != FIRST_ORDER, "completeness_gap"].astype(float)
    assert left.abs().max() > 0.1, "a dense model's is 50 times smaller with a quarter of the steps"
    df = attribute(MODEL, PAIRS, **asked)
    first, last = df.to_dict("records")
    assert last["completeness_gap"] == pytest.approx(left.mean(), abs=1e-6)
    total = theirs(PAIRS)[0].mean().item() - theirs(PAIRS.swapped())[0].mean().item()
    assert last["completeness_gap"] + last["effect"] == pytest.approx(total, abs=1e-3)
    assert gaps(df) == {
        row["edit"]: f"{short(row['completeness_gap'], signed=True)} of {short(total)} logits" for row in (first, last)
    }
    assert gaps(patch(MODEL, PAIRS, tensors=["x_n"], blocks=[0], by=None)) == {}


def test_an_equal_pair_has_no_effect_and_another_direction_another_base() -> None:
    same = tuple(replace(row, corrupt_tokens=row.tokens) for row in PAIRS.rows)
    df = attribute(MODEL, replace(PAIRS, rows=same), exact=False, steps=1)
    assert (df["effect"].dropna() == 0).all()
    noise = attribute(MODEL, PAIRS, tensors=["delta_attn"], direction="noise", exact=False)
    turned = tuple(row.swapped() for row in PAIRS.rows)
    denoise = attribute(MODEL, replace(PAIRS, rows=turned), tensors=["delta_attn"], exact=False)
    np.testing.assert_array_equal(effects(noise), effects(denoise))
    assert (set(noise["source"]), set(denoise["source"])) == ({"corrupt"}, {"clean"})
    assert (set(noise["direction"]), set(noise["frozen"])) == ({"noise"}, {"experts"})


def test_prompts_in_parts_and_one_by_one_give_the_same() -> None:
    tensors = ["x_n", "O", "S", "K", "gates", "y_e", "delta_experts"]
    asked: dict[str, Any] = {"exact": False, "steps": 2, "by": "role", "tensors": tensors}
    whole = attribute(MODEL, PAIRS, per_prompt=True, **asked)
    parts = attribute(MODEL, PAIRS, per_prompt=True, budget=1, **asked)
    assert list(whole["effect"].isna()) == list(parts["effect"].isna())
    np.testing.assert_allclose(effects(whole), effects(parts), atol=2e-4)
    for i, row in enumerate(PAIRS.rows):
        alone = attribute(MODEL, replace(PAIRS, rows=(row,)), **asked)
        np.testing.assert_allclose(effects(whole, example=i), effects(alone), atol=2e-4)
    averaged = attribute(MODEL, PAIRS, budget=1, **asked)
    by_cell = whole[whole["edit"] == FIRST_ORDER].groupby(["block", "tensor", "role"], observed=True)["effect"].mean()
    first = averaged[averaged["edit"] == FIRST_ORDER].set_index(["block", "tensor", "role"])
    np.testing.assert_allclose(first["effect"].astype(float), by_cell.loc[first.index].astype(float), atol=2e-4)
    counts = first.xs((1, "gates"))["n"]
    assert (counts < len(PAIRS)).any(), "prompts that need an expert that isn't there are not counted"


def test_patches_beside_are_those_of_the_study_patch() -> None:
    df = attribute(TINY, IOI, tensors=["O", "V"], by=["head", "role"], metric="log_probability", direction="noise")
    exact = patch(TINY, IOI, tensors=["O", "V"], by=["head", "role"], metrics=["log_probability"], direction="noise")
    mine = df[df["edit"] == "patch"].reset_index(drop=True)
    for name in ("value", "base", "effect", "recovered", "flips", "block", "head", "role"):
        assert mine[name].equals(exact[name]), name
    one = df[df["edit"] == FIRST_ORDER].reset_index(drop=True)
    for name in ("base", "n", "block", "head", "role", "tensor"):
        assert np.array_equal(one[name].to_numpy(), exact[name].to_numpy()) or np.allclose(one[name], exact[name]), name
    np.testing.assert_allclose(
        (one["recovered"] / exact["recovered"]).astype(float),
        (one["effect"] / exact["effect"]).astype(float),
        rtol=1e-4,
    )


def test_answers_of_several_tokens() -> None:
    """A prompt has a row for its answer and one for the wrong one, and both count; as in its patch, a cell without
    positions is about what stands behind the prompt, too."""
    rows = [
        {"clean": f"The capital of {a} is", "corrupt": f"The capital of {b} is", "answer": f"{x} .", "wrong": f"{y} ,"}
        for a, b, x, y in (("Peru", "Hungary", "Lima", "Budapest"), ("Hungary", "Peru", "Budapest", "Lima"))
    ]
    prompts = Prompts.of(rows, TOKENIZER)
    df = attribute(TINY, prompts, tensors=["h", "delta_attn"], blocks=[0], per_prompt=True)
    for i, row in enumerate(prompts.rows):
        assert row.answer is not None
        assert row.wrong is not None
        tails = [word.tokens[0] for word in (row.answer, row.wrong)]
        ours, theirs = (torch.tensor([[*ids, tail[0]] for tail in tails]) for ids in (row.swapped().tokens, row.tokens))
        end = len(row.tokens) - 1

        def score(logits: Tensor, tails: Any = tails, end: int = end) -> float:
            logs = logits.double().log_softmax(-1)
            said = [logs[r, end, tail[0]] + logs[r, end + 1, tail[1]] for r, tail in enumerate(tails)]
            return float(said[0] - said[1])

        for tensor in ("h", "delta_attn"):
            site = f"blocks.0.{tensor}"
            source, base = (TINY.run(one, want=site) for one in (theirs, ours))
            way = source[site] - base[site]
            steps = ([moved(site, x * way)] for x in (STEP, -STEP))
            up, down = (score(TINY.run(ours, edits=edits, base=base)["logits"]) for edits in steps)
            expected = (up - down) / (2 * STEP)
            assert abs(expected) > 0.01
            assert effects(df, tensor=tensor, example=i).item() == pytest.approx(expected, rel=0.02, abs=5e-3)


# ---- what it shows ---------------------------------------------------------------------------------------------------


def test_it_finds_the_heads_that_patches_find() -> None:
    prompts = task("capital").subset(range(0, 76, 4))
    df = attribute(TINY, prompts, tensors=["O"], by="head", steps=4)
    pair = paired(df)
    late = pair[pair["block"] == 3].sort_values(["edit", "patch"], ascending=False)
    for _, part in late.groupby("edit"):
        assert list(part["estimate"].rank()) == list(part["patch"].rank())
        assert part["estimate"].iloc[-1] < 0.1 * part["estimate"].iloc[0]
    numbers = agreement(df).groupby("edit")["correlation"].max()
    assert numbers.min() > 0.8
    slopes = agreement(df).groupby("edit")["slope"].min()
    assert slopes[FIRST_ORDER] > 1.5, "one gradient at a wrong answer sees half of it"


def test_more_steps_are_nearer_to_the_patches() -> None:
    prompts = task("capital").subset(range(0, 76, 4))
    df = attribute(TINY, prompts, tensors=["x_n", "delta_attn", "delta_ffn"], by="role", steps=8)
    pair = paired(df)
    off = (pair["estimate"] - pair["patch"]).abs().groupby(pair["edit"]).mean()
    assert off["integrated gradients, 8 steps"] < 0.5 * off[FIRST_ORDER]


def test_where_routing_flips_first_order_knows_nothing_of_it() -> None:
    df = attribute(TINY, CAPITAL, tensors=["choice_score", "delta_ffn"], metric="logit_difference")
    pair = paired(df)
    scores = pair[pair["tensor"] == "choice_score"]
    assert (scores["estimate"] == 0).all()
    assert scores["flipped"].all()
    assert scores["patch"].abs().max() > 0.05
    assert not pair[pair["tensor"] == "delta_ffn"].set_index("block").loc[3, "flipped"]


# ---- pairs and their agreement ---------------------------------------------------------------------------------------


def test_agreement_is_what_scipy_says() -> None:
    df = attribute(TINY, CAPITAL, tensors=["x_ffn", "O", "gates", "h_s"], steps=1)
    pair, numbers = paired(df), agreement(df)
    assert set(pair["edit"]) == {FIRST_ORDER, "integrated gradients, 1 step"}
    assert len(numbers) == 4
    for row in numbers.to_dict("records"):
        part = pair[(pair["edit"] == row["edit"]) & (pair["flipped"] == row["flipped"])]
        there = part.dropna(subset=["estimate", "patch"])
        assert (row["cells"], row["missing"]) == (len(there), len(part) - len(there))
        assert row["correlation"] == pytest.approx(pearsonr(there["estimate"], there["patch"]).statistic)
        slope = np.linalg.lstsq(there[["estimate"]].to_numpy(float), there["patch"].to_numpy(float), rcond=None)[0]
        assert row["slope"] == pytest.approx(slope.item())
    assert numbers["missing"].sum() == 2 * 3, "the gates of the blocks of experts"
    flips = df[df["edit"] == "patch"].set_index(["block", "tensor"])["flips"].fillna(0) > 0
    for row in pair.to_dict("records"):
        assert row["flipped"] == flips[row["block"], row["tensor"]]
    text = "\n".join(" ".join(line) for line in agreement_table(df).rows)
    assert "flipped" in text
    assert "as it was" in text
    for lack in (df[df["edit"] == "patch"], df[df["edit"] != "patch"]):
        with pytest.raises(BadFrame, match="takes estimates and the patches themselves"):
            paired(lack)


def test_frames_round_trip_and_join(tmp_path: Any) -> None:
    df = attribute(TINY, IOI, tensors=["O", "delta_experts"], blocks=[1], by="role", steps=1)
    assert set(df["study"]) == {"attribute"}
    assert set(df["edit"]) == {FIRST_ORDER, "integrated gradients, 1 step", "patch"}
    assert set(df.loc[df["edit"] == FIRST_ORDER, "frozen"]) == {"experts"}
    assert df.loc[df["edit"] != FIRST_ORDER, "frozen"].isna().all()
    for ending in ("parquet", "csv"):
        assert frames.read(frames.write(df, tmp_path / f"attribute.{ending}")).equals(df)
    assert len(frames.join(df, patch(TINY, IOI, metrics=["logit_difference"]))) > len(df)
    assert df.attrs["left_out"] == {}
    everything = attribute(TINY, IOI, exact=False)
    assert set(everything.attrs["left_out"]) == {"experts", "delta_heads"}
    assert everything.attrs["unmatched"] == everything["value"].isna().sum() > 0
    assert everything["block"].nunique() == 4
    assert set(everything["tensor"]) == {name for block in range(4) for name in TINY.sites.card(block).hooked} - {
        "experts",
        "delta_heads",
    }
    assert (everything.loc[everything["tensor"] == "x_n", "block"] == 0).all()


def test_spans_that_some_prompts_lack_are_about_the_others() -> None:
    mixed = Prompts((*IOI.rows[:2], *CAPITAL.rows[:2]), TOKENIZER, "mixed")
    df = attribute(TINY, mixed, tensors=["x_n"], blocks=[1], by="role", per_prompt=True)
    for kind in (FIRST_ORDER, "patch"):
        here = df[df["edit"] == kind]
        assert {role: set(part["example"]) for role, part in here.groupby("role")} == {
            **{role: {0, 1} for role in ("IO", "S1", "S2")},
            "subject": {2, 3},
            "END": {0, 1, 2, 3},
        }
    averaged = attribute(TINY, mixed, tensors=["x_n"], blocks=[1], by="role", exact=False)
    assert dict(zip(averaged["role"], averaged["n"], strict=True)) == {
        **dict.fromkeys(["IO", "S1", "S2", "subject"], 2),
        "END": 4,
    }
    assert effects(averaged, role="subject").item() == pytest.approx(effects(df, role="subject").mean())
    alone = attribute(
        TINY, CAPITAL.subset([0, 1]), tensors=["x_n"], blocks=[1], by="role", per_prompt=True, exact=False
    )
    np.testing.assert_allclose(effects(df, role="subject"), effects(alone, role="subject"), atol=1e-4)


def test_what_it_would_cost() -> None:
    asked: dict[str, Any] = {"tensors": ["O"], "by": "head"}
    cost = outlook(TINY, CAPITAL, exact=False, **asked)
    assert cost["cells"] == 16
    assert cost["forwards"] == 4
    assert cost["seconds"] > 0
    assert outlook(TINY, CAPITAL, exact=False, steps=3, **asked)["forwards"] == 16
    assert outlook(TINY, CAPITAL, **asked)["forwards"] > 4
    assert outlook(TINY, CAPITAL, exact=False, budget=1, **asked)["bytes"] < cost["bytes"]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"steps": -1}, BadEdit, "steps=-1"),
        ({"tensors": ["delta_heads"]}, BadEdit, "delta_heads can't be attributed to: nothing reads it"),
        ({"tensors": ["experts"]}, BadEdit, "experts can't be attributed to: its values are integers"),
        ({"tensors": ["c_kv"]}, UnknownTensor, "Nearest: c_KV"),
        ({"tensors": ["g"], "blocks": [1]}, UnknownTensor, "g_e"),
        ({"blocks": [7]}, OutOfRange, "blocks 0 to 3"),
        ({"by": "heads"}, UnknownDim, "by='heads'"),
        ({"tensors": ["x_n"], "by": "head"}, UnknownDim, "no parts by head"),
        ({"blocks": [0], "by": "expert"}, UnknownDim, "no tensor of these blocks has parts by expert"),
        ({"direction": "up"}, BadEdit, "direction='up'"),
        ({"metric": "rank"}, BadMetric, "rank has no derivative"),
        ({"metric": "kl"}, BadMetric, "kl is flat at the base"),
        ({"metric": "relative_change:blocks.3.x_next"}, BadMetric, "not made of logits"),
        ({"metric": "continuation:1:contains=are"}, BadMetric, "not made of logits"),
        ({"metric": "nothing"}, BadMetric, "there is no metric"),
        ({"at": "nowhere"}, BadEdit, "nowhere"),
    ],
)
def test_refusals(asked: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        attribute(TINY, CAPITAL, **asked)


def test_texts_whose_places_are_not_the_same() -> None:
    """Patches align spans; an estimate, which would compare a subject with another word, is refused."""
    row = {
        "clean": "When the capital of Peru is",
        "answer": "Lima",
        "wrong": "Budapest",
        "spans": {"subject": [20, 24]},
    }
    cases = {"The capital of Hungary is a": [15, 22], "The capital of Hungary is": [15, 22]}
    apart, shorter = (
        Prompts.of([{**row, "corrupt": text, "corrupt_spans": {"subject": span}}], TOKENIZER)
        for text, span in cases.items()
    )
    cells: list[dict[str, Any]] = [{"by": "role"}, {"at": "subject"}, {"at": "subject[-1]"}]
    for asked in cells:
        assert len(patch(TINY, apart, tensors=["x_n"], **{"by": None, **asked})) >= 4
        with pytest.raises(BadEdit, match=r"row 0: the span 'subject' of clean and of corrupt .* patch aligns"):
            attribute(TINY, apart, tensors=["x_n"], **asked)
    assert len(attribute(TINY, apart, tensors=["x_n"], at="END")) == 8
    for by in ("role", None):
        with pytest.raises(BadEdit, match=r"row 0: clean and corrupt are of \d and \d tokens.* patch aligns"):
            attribute(TINY, shorter, tensors=["x_n"], by=by)
    with pytest.raises(BadText, match="no corrupt text"):
        attribute(TINY, Prompts.text("The capital of France is", TOKENIZER, answer="Paris"))


def test_hooks_are_not_passed_by() -> None:
    hook = ("blocks.1.O", lambda value, hook: value * 0)
    with TINY.hooks(fwd_hooks=[hook]), pytest.raises(BadEdit, match="hooks are on"):
        attribute(TINY, CAPITAL, tensors=["O"])
    assert len(attribute(TINY, CAPITAL, tensors=["O"], exact=False)) == 4


# ---- pictures and command --------------------------------------------------------------------------------------------


def test_the_pictures() -> None:
    df = attribute(TINY, CAPITAL, tensors=["x_ffn", "O", "gates", "h_s"], steps=2)
    made: dict[str, Any] = dict(causal_plots.attributions(df))
    assert list(made) == ["attribution", "integrated_gradients_2_steps"]
    for ax, kind in zip(made.values(), (FIRST_ORDER, "integrated gradients, 2 steps"), strict=True):
        pair, numbers = (of[of["edit"] == kind] for of in (paired(df), agreement(df)))
        kept, flipped = ax.collections
        assert (to_hex(kept.get_facecolor()[0]), to_hex(flipped.get_facecolor()[0])) == (
            causal_plots.BLUE,
            causal_plots.ORANGE,
        )
        for dots, which in ((kept, False), (flipped, True)):
            rows = pair[pair["flipped"] == which]
            np.testing.assert_allclose(dots.get_offsets(), rows[["estimate", "patch"]].astype(float))
        assert ax.get_legend().get_title().get_text() == f"left over the embedding: {gaps(df)[kind]}"
        said = [text.get_text() for text in ax.get_legend().get_texts()]
        for text, row in zip(said, numbers.sort_values("flipped").to_dict("records"), strict=True):
            assert f": {row['cells']} cells, r = {row['correlation']:.2f}" in text
            assert text.startswith("some choices flipped" if row["flipped"] else "routing as it was")
        assert ax.get_xlabel() == "estimate of the change of logit difference [logits]"
        assert ax.get_ylabel() == "change by the patch itself"
        assert ax.get_xlim() == ax.get_ylim()
        texts = [text.get_text() for text in ax.texts]
        assert f"capital, denoise, n = {len(CAPITAL)} · 3 cells lack a patch or an estimate" in texts
        worst = pair["block"].iloc[int((pair["estimate"] - pair["patch"]).abs().argmax())]
        assert any(text.endswith(f"of block {worst}") for text in texts)
    with pytest.raises(BadFrame, match="no estimates by 'guesses'"):
        causal_plots.scatter(df, kind="guesses")
    assert list(causal_plots.attributions(df[df["edit"] != "patch"])) == []
    plt.close("all")


def test_the_command(tmp_path: Any) -> None:
    asked = ["attribute", "--task", "capital", "--tensor", "O", "--block", "3", "--by", "head", "--steps", "2"]
    out = CliRunner().invoke(app, [*asked, "--out", str(tmp_path)])
    assert out.exit_code == 0, out.output
    assert "Estimates against patches" in out.stdout
    assert "2 steps: over the whole embedding the estimates leave" in out.stdout
    pictures = {"attribution.png", "integrated_gradients_2_steps.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"attribution.parquet", "attribution.csv", *pictures}
    dry = CliRunner().invoke(app, [*asked, "--dry-run", "--out", str(tmp_path / "not")])
    assert dry.exit_code == 0, dry.output
    assert "forwards" in dry.stdout
    assert not (tmp_path / "not").exists()
    quick = CliRunner().invoke(app, ["attribute", "--task", "capital", "--block", "1", "--at", "END", "--no-exact"])
    assert quick.exit_code == 0, quick.output
    assert "left out: experts" in quick.stdout
    wrong = CliRunner().invoke(app, [*asked, "--metric", "rank"])
    assert wrong.exit_code == 1
    assert "no derivative" in wrong.output
