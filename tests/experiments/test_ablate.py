"""The ablation against edits done by hand: to the weights, by plain hooks, by loops over prompts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from experiments.ablate import ablate, outlook
from experiments.equal import _small, coinciding
from experiments.metrics import BadMetric
from experiments.prompts import Prompts
from experiments.stats import BadSample
from hooks import HookedModel, noise, resample, zero
from probe import Decoder, InMemory, random_weights
from probe.errors import BadEdit, BadText, OutOfRange, UnknownDim, UnknownTensor

EDITABLE = {False: 39, True: 51}  # tensors of a dense and of a MoE block, x_n among them, less experts and delta_heads


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


@pytest.fixture(scope="module")
def prompts(model: HookedModel) -> Prompts:
    """Ten rows of three shapes, of different lengths and with their spans at different places."""
    assert model.tokenizer is not None
    whole = Prompts.load("ioi", model.tokenizer)
    by_length = {shape.length: rows for shape, rows in whole.shapes().items()}
    return whole.subset([i for rows in list(by_length.values())[:3] for i in rows[:4]][:10])


def cell(df: pd.DataFrame, metric: str = "logit_difference", **columns: Any) -> dict[str, Any]:
    """The one row of these columns."""
    here = df[df["metric"] == metric]
    for name, value in columns.items():
        here = here[here[name].eq(value).fillna(False)]
    (row,) = here.to_dict("records")
    return row


def difference(prompts: Prompts, logits: Tensor) -> np.ndarray[Any, Any]:
    """The logit difference of each prompt, out of logits [B T V]."""
    end = [len(prompt.tokens) - 1 for prompt in prompts.rows]
    rows = zip(logits.double(), end, prompts.ids("answer"), prompts.ids("wrong"), strict=True)
    return np.array([float(z[t, a] - z[t, w]) for z, t, a, w in rows])


def hooked(model: HookedModel, prompts: Prompts, site: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The logits of a plain run with one hook: no plan, no base, no edit."""
    with torch.no_grad():
        return model.run_with_hooks(*prompts.batch(), fwd_hooks=[(site, lambda value, hook: change(value))])


# ---- equal by construction -------------------------------------------------------------------------------------------


def zeroed_by_hand(moe: bool) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a small block, the integers of `experts` too, zeroed by a plain hook: what leaves the block."""
    model = HookedModel(random_weights(_small(moe, True, True), seed=5))
    tokens = torch.randint(model.dims.V, (2, 7), generator=torch.Generator().manual_seed(5))
    causal = torch.ones(7, 7).tril().bool()
    for name in model.sites.card(0).hooked:
        zero = partial(torch.where, causal, 0.0) if name == "S" else torch.zeros_like  # the mask stays
        with model.hooks(fwd_hooks=[(f"blocks.0.{name}", lambda value, hook, zero=zero: zero(value))]), torch.no_grad():
            if name != "delta_heads":
                yield name, model.run_with_cache(tokens)[1]["blocks.0.x_next"]


@pytest.mark.parametrize(("moe", "values"), [(False, 6), (True, 11)])
def test_zeros_of_whole_tensors_take_few_values(moe: bool, values: int) -> None:
    """The MoE block's eleventh is to zero `experts`, which an edit refuses: they are integers."""
    seen: dict[str, Tensor] = {}
    roots: dict[str, str] = {}
    for name, x in zeroed_by_hand(moe):
        roots[name] = next((other for other, y in seen.items() if (x - y).norm() <= 1e-5 * x.norm()), name)
        seen.setdefault(roots[name], x)
    assert len(seen) == values
    refused = roots.pop("experts", None)
    assert refused == ("experts" if moe else None)
    assert coinciding("zero", moe=moe) == roots
    assert len(roots) == EDITABLE[moe]


def test_resampling_keeps_what_zeroing_confounds() -> None:
    zero, resample = coinciding("zero", moe=True), coinciding("resample", moe=True)
    assert zero["v"] == zero["O"] == zero["s_attn"]
    assert len({resample[name] for name in ("v", "O", "s_attn")}) == 3
    assert resample["O"] == resample["x_attn"] == resample["delta_attn"]
    assert len(set(resample.values())) > 2 * len(set(zero.values()))


def test_by_head_only_tensors_with_heads_coincide() -> None:
    roots = coinciding("zero", "head", moe=True)
    assert roots["O"] == roots["A"] == roots["V"] == "v"
    assert roots["K_C"] == "q_C"  # no content score: either factor
    assert "c_KV" not in roots


def test_a_part_without_effect_coincides_with_none() -> None:
    assert coinciding("zero", "expert", moe=False) == {}
    roots = coinciding("zero", "expert", moe=True)
    assert roots["gates"] == roots["y_e"] == roots["delta_experts"] == "gates"
    assert roots["router_logits"] == "router_logits"


# ---- effects, by hand ------------------------------------------------------------------------------------------------


def test_zeroing_a_head_is_zeroing_its_rows_of_the_output_weight(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, tensors=["O"], blocks=[1], by="head", how="zero")
    weights = model.decoder.weights
    assert isinstance(weights, InMemory)
    v = model.dims.v
    for head in range(model.dims.h):
        W_O = weights.read(1, "W_O").clone()
        W_O[head * v : (head + 1) * v] = 0
        cut = Decoder(InMemory(model.dims, {**weights.tensors, (1, "W_O"): W_O}))
        with torch.no_grad():
            after, before = (difference(prompts, d(*prompts.batch())) for d in (cut, model.decoder))
        row = cell(df, head=head)
        assert row["value"] == pytest.approx(after.mean(), abs=1e-4)
        assert row["base"] == pytest.approx(before.mean(), abs=1e-4)
        assert row["effect"] == pytest.approx((after - before).mean(), abs=1e-4)
        assert row["stderr"] == pytest.approx((after - before).std(ddof=1) / len(prompts) ** 0.5, abs=1e-4)
    assert df["effect"].abs().max() > 0.1


@pytest.mark.parametrize("tensor", ["c_KV", "S", "delta_ffn"])
def test_resampling_is_two_plain_runs_patched_by_hand(tensor: str, model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, tensors=[tensor], blocks=[2], seed=3)
    reference = prompts.reference
    assert reference is not None
    site = f"blocks.2.{tensor}"
    values = []
    for prompt, j in zip(range(len(prompts)), prompts.draw(reference, 3), strict=True):
        one, other = prompts.subset([prompt]), Prompts((reference.rows[j],), reference.tokenizer)
        _, cache = model.run_with_cache(*other.batch(), names_filter=site)
        values.append(difference(one, hooked(model, one, site, lambda value, new=cache[site]: new))[0])
    row = cell(df)
    assert row["value"] == pytest.approx(np.mean(values), abs=1e-4)
    assert row["seed"] == 3
    assert row["source"] == "reference/ioi"
    assert abs(row["effect"]) > 0.01


def test_kl_and_change_of_a_cell_are_those_of_the_runs(model: HookedModel, prompts: Prompts) -> None:
    one = prompts.subset([0])
    df = ablate(model, one, tensors=["delta_attn"], blocks=[1], how="zero")
    with torch.no_grad():
        before, base = model.run_with_cache(*one.batch())
        with model.hooks(fwd_hooks=[("blocks.1.delta_attn", lambda value, hook: torch.zeros_like(value))]):
            after, edited = model.run_with_cache(*one.batch())
    p, q = (x[0, -1].double().log_softmax(-1) for x in (before, after))
    assert cell(df, "kl")["value"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    x, y = (cache["blocks.1.x_next"][0] for cache in (base, edited))
    change = ((y - x).norm(dim=-1) / x.norm(dim=-1)).tolist()
    assert cell(df, "relative_change")["effect"] == pytest.approx(np.mean(change[1:]), rel=1e-4)
    assert cell(df, "relative_change_first")["effect"] == pytest.approx(change[0], rel=1e-4)
    assert cell(df, "kl")["base"] == 0


def test_an_expert_switched_off_by_hand(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, tensors=["delta_experts"], blocks=[3], by="expert", how="zero")
    assert list(df[df["metric"] == "kl"]["expert"]) == list(range(model.dims.e))
    _, cache = model.run_with_cache(*prompts.batch(), names_filter="blocks.3.experts")
    keep = prompts.batch().keep
    for expert in range(model.dims.e):
        chosen = (cache["blocks.3.experts"] == expert) & (True if keep is None else keep[..., None])
        logits = hooked(model, prompts, "blocks.3.delta_experts", lambda x, c=chosen: x.masked_fill(c[..., None], 0.0))
        row = cell(df, expert=expert)
        assert row["value"] == pytest.approx(difference(prompts, logits).mean(), abs=1e-4)
        assert row["touched"] == int(chosen.sum())
        if not row["touched"]:
            assert row["effect"] == 0


def test_roles_are_resolved_for_each_prompt(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, tensors=["x_mid", "K"], blocks=[1], by="role", how="zero")
    assert [cell(df, tensor="K", role=role)["n"] for role in ("IO", "S1", "S2", "END")] == [10] * 4
    assert len({prompt.spans["END"].start for prompt in prompts.rows}) > 1  # the shapes differ
    for role in ("S2", "END"):
        places = [prompt.spans[role].start for prompt in prompts.rows]

        def zero(value: Tensor, places: list[int] = places) -> Tensor:
            value[range(len(places)), places] = 0  # positions are axis 1, in K too
            return value

        for tensor in ("x_mid", "K"):
            logits = hooked(model, prompts, f"blocks.1.{tensor}", zero)
            assert cell(df, tensor=tensor, role=role)["value"] == pytest.approx(
                difference(prompts, logits).mean(), abs=1e-4
            )


def test_positions_are_never_averaged_over_shapes(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, tensors=["c_KV"], blocks=[0], by="position", how="zero", metrics=["kl"])
    shapes = prompts.shapes()
    assert df["group"].nunique() == len(shapes) == 3
    for (shape, rows), (label, part) in zip(shapes.items(), df.groupby("group", sort=False), strict=True):
        assert label == shape.template
        assert list(part["pos"]) == list(range(shape.length))
        assert set(part["n"]) == {len(rows)}
        by_role = {role: pos for role, pos in zip(part["role"], part["pos"], strict=True) if isinstance(role, str)}
        assert by_role == {name: first for name, first, _ in shape.spans}
        assert part["token"].iloc[0] == "<bos>"
        assert part.loc[part["role"].eq("IO").fillna(False), "token"].isna().all()  # names differ
    one = ablate(model, prompts.subset([0]), tensors=["c_KV"], blocks=[0], by="position", how="zero", metrics=["kl"])
    assert "group" not in one
    assert list(one["token"]) == ["<bos>", *prompts.rows[0].clean.split()]


# ---- averages --------------------------------------------------------------------------------------------------------


def test_groups_are_the_units(model: HookedModel) -> None:
    assert model.tokenizer is not None
    rows = [
        {"clean": f"{name} Jones is a", "answer": "teacher", "wrong": "nurse", "group": group}
        for name, group in (("Paul", "p"), ("Anna", "q"), ("Tom", "q"))
    ]
    three = Prompts.of(rows, model.tokenizer)
    df = ablate(model, three, tensors=["O"], blocks=[1], how="zero", metrics=["logit_difference"])
    each = ablate(model, three, tensors=["O"], blocks=[1], how="zero", metrics=["logit_difference"], per_prompt=True)
    assert list(each["example"]) == [0, 1, 2]
    assert list(each["group"]) == ["p", "q", "q"]
    p, q1, q2 = each["effect"]
    (row,) = df.to_dict("records")
    assert row["n"] == 2
    assert row["effect"] == pytest.approx((p + (q1 + q2) / 2) / 2)
    assert row["stderr"] == pytest.approx(np.std([p, (q1 + q2) / 2], ddof=1) / 2**0.5)


def test_draws_are_averaged(model: HookedModel, prompts: Prompts) -> None:
    options: dict[str, Any] = {"tensors": ["O", "gates"], "blocks": [1], "metrics": ["kl"]}
    both = ablate(model, prompts, draws=2, seed=4, **options)
    first, second = (ablate(model, prompts, seed=seed, **options) for seed in (4, 5))
    assert not np.allclose(first["value"], second["value"])
    np.testing.assert_allclose(both["value"], (first["value"] + second["value"]) / 2, rtol=1e-4)
    assert set(both["seed"]) == set(first["seed"]) == {4}
    assert set(both["options"]) == {"draws=2"}
    assert "options" not in first


def test_routing_agreement_and_flips_are_those_of_the_sets(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, tensors=["delta_attn"], blocks=[1], how="zero", metrics=["kl"])
    tokens, keep = prompts.batch()
    real = torch.ones_like(tokens).bool() if keep is None else keep
    with torch.no_grad():
        _, base = model.run_with_cache(tokens, keep)
        with model.hooks(fwd_hooks=[("blocks.1.delta_attn", lambda value, hook: torch.zeros_like(value))]):
            _, edited = model.run_with_cache(tokens, keep)
    kept = total = 0
    last = torch.zeros_like(real)
    last[range(len(prompts)), [len(prompt.tokens) - 1 for prompt in prompts.rows]] = True
    for block, counted in ((1, real), (2, real), (3, last)):  # of the last block only what is read is computed
        for ours, theirs in zip(
            edited[f"blocks.{block}.experts"][counted], base[f"blocks.{block}.experts"][counted], strict=True
        ):
            kept += len(set(ours.tolist()) & set(theirs.tolist()))
            total += model.dims.k
    row = cell(df, "kl")
    assert row["routing_agreement"] == pytest.approx(kept / total)
    assert row["flips"] == total - kept > 0


# ---- the whole table -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(model: HookedModel, prompts: Prompts) -> pd.DataFrame:
    return ablate(model, prompts.subset(range(4)), name="tiny", metrics=["logit_difference", "relative_change"])


def test_every_tensor_of_every_block_has_a_cell(table: pd.DataFrame, model: HookedModel) -> None:
    cells = set(zip(table["block"], table["tensor"].astype(str), strict=True))
    expected = {
        (i, name)
        for i in range(model.dims.blocks)
        for name in model.sites.card(i).hooked
        if name not in ("experts", "delta_heads") and (name != "x_n" or i == 0)
    }
    assert cells == expected
    assert len(table) == 2 * len(cells) == 2 * (EDITABLE[False] + 3 * (EDITABLE[True] - 1))
    assert set(table.attrs["left_out"]) == {"experts", "delta_heads"}
    assert "edit `O`" in table.attrs["left_out"]["delta_heads"]
    assert table.attrs["unmatched"] == 0


def test_columns_say_what_was_done(table: pd.DataFrame) -> None:
    for column, said in {"study": "ablate", "prompts": "ioi", "edit": "resample", "dtype": "float32"}.items():
        assert set(table[column]) == {said}
    assert set(table["numerics"]) == {"reference"}
    (name,) = set(table["model"])
    assert name.startswith("tiny ")
    assert cell(table, block=0, tensor="delta_ffn")["step"] == 27
    assert pd.isna(cell(table, block=1, tensor="delta_ffn")["step"])
    assert table["effect"].equals(table["value"] - table["base"])


def test_copied_cells_equal_those_computed_apart(table: pd.DataFrame, model: HookedModel, prompts: Prompts) -> None:
    copied = table[table["same_as"].notna()]
    assert copied["touched"].isna().all()
    assert table[table["same_as"].isna()]["touched"].notna().all()
    last = copied.groupby(["block", "same_as"])["tensor"].last()
    assert len(last) > 40
    four = prompts.subset(range(4))
    apart = ablate(
        model, four, tensors=[f"blocks.{i}.{tensor}" for (i, _), tensor in last.items()], metrics=["logit_difference"]
    )
    assert "same_as" not in apart
    for (i, other), tensor in last.items():
        ours, theirs = cell(apart, block=i, tensor=tensor), cell(table, block=i, tensor=other)
        assert ours["value"] == pytest.approx(theirs["value"], abs=1e-3)


def test_the_digest_tells_weights_apart(model: HookedModel, prompts: Prompts) -> None:
    weights = model.decoder.weights
    assert isinstance(weights, InMemory)
    w = weights.read(3, "w_ffn").clone()
    w[7] *= 1.01
    other = HookedModel(InMemory(model.dims, {**weights.tensors, (3, "w_ffn"): w}))
    names = [
        ablate(m, prompts.subset([0]), tensors=["O"], blocks=[0], how="zero")["model"].iloc[0] for m in (model, other)
    ]
    assert names[0] != names[1]


# ---- what can't be ---------------------------------------------------------------------------------------------------


def test_a_cell_without_a_matching_expert_has_no_value(model: HookedModel, prompts: Prompts) -> None:
    one = Prompts(prompts.rows[:1], prompts.tokenizer, "one")
    assert prompts.reference is not None
    few = Prompts((prompts.reference.rows[one.draw(prompts.reference, 0)[0]],), prompts.tokenizer, "one other")
    df = ablate(model, one, tensors=["gates", "delta_experts"], blocks=[2], by="expert", reference=few, metrics=["kl"])
    _, ours = model.run_with_cache(*one.batch(), names_filter="blocks.2.experts")
    _, theirs = model.run_with_cache(*few.batch(), names_filter="blocks.2.experts")
    lost = set(ours["blocks.2.experts"].flatten().tolist()) - set(theirs["blocks.2.experts"].flatten().tolist())
    assert lost
    gates = df[df["tensor"] == "gates"]
    assert set(gates[gates["value"].isna()]["expert"]) == lost
    assert set(gates[gates["value"].isna()]["n"]) == {0}
    assert df.attrs["unmatched"] == len(lost)
    assert df[df["tensor"] == "delta_experts"]["value"].notna().all()  # unchosen contributes 0


def test_prompts_without_answers_are_judged_by_kl_and_change(model: HookedModel) -> None:
    assert model.tokenizer is not None
    prompts = Prompts.text("The capital of Peru is", model.tokenizer)
    df = ablate(model, prompts, tensors=["O"], blocks=[0])
    assert set(df["metric"]) == {"kl", "relative_change", "relative_change_first"}
    assert set(df["n"]) == {1}
    assert "stderr" not in df
    with pytest.raises(BadMetric, match="needs answer and wrong"):
        ablate(model, prompts, tensors=["O"], metrics=["logit_difference"])


def test_a_reference_that_holds_the_prompts_is_said_so(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, tensors=["O"], blocks=[3], reference=prompts, metrics=["kl"])
    assert set(df["source"]) == {"ioi (holds 10 of the prompts)"}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tensors": ["c_kvv"]}, UnknownTensor, "Nearest: c_KV"),
        ({"tensors": ["g"], "blocks": [1]}, UnknownTensor, "g_e"),
        ({"tensors": ["logits"]}, UnknownTensor, "outside the blocks"),
        ({"tensors": []}, UnknownTensor, "no tensor is asked for"),
        ({"blocks": [4]}, OutOfRange, "blocks 0 to 3"),
        ({"blocks": [-1]}, OutOfRange, "block -1 does not exist"),
        ({"blocks": []}, OutOfRange, "no block is asked for"),
        ({"tensors": ["blocks.2.O"], "blocks": [1]}, OutOfRange, "blocks.2.O is not in the blocks"),
        ({"tensors": ["experts"]}, BadEdit, "zero `gates`"),
        ({"tensors": ["delta_heads"]}, BadEdit, "edit `O`"),
        ({"tensors": ["c_KV"], "by": "head"}, UnknownDim, "c_KV has no dim 'h'"),
        ({"blocks": [0], "by": "expert"}, UnknownDim, "by expert"),
        ({"by": "neuron"}, UnknownDim, "head, position, role, key, expert, feature"),
        ({"by": ["head", "head"]}, UnknownDim, "named twice"),
        ({"by": ["position", "role"]}, UnknownDim, "named twice"),
        ({"by": "role", "at": "END"}, UnknownDim, "T is limited twice"),
        ({"at": "subject"}, BadEdit, "row 0 has no span 'subject'"),
        ({"at": 3}, BadSample, "of 3 shapes"),
        ({"how": "median"}, BadEdit, "resample, mean, zero, noise, exclude"),
        ({"how": "exclude"}, BadEdit, "by='expert'"),
        ({"how": "exclude", "by": "expert", "tensors": ["gates"]}, BadEdit, "choice_score"),
        ({"how": "exclude", "by": "expert", "blocks": [0]}, UnknownDim, "by expert"),
        ({"draws": 0}, BadEdit, "one draw or more"),
        ({"how": "mean", "draws": 2}, BadEdit, "nothing to draw"),
        ({"how": "zero", "draws": 2}, BadEdit, "nothing to draw"),
        ({"metrics": ["kll"]}, BadMetric, "Nearest: kl"),
    ],
)
def test_what_cannot_be_asked(
    options: dict[str, Any], error: type[Exception], says: str, model: HookedModel, prompts: Prompts
) -> None:
    with pytest.raises(error, match=says):
        ablate(model, prompts, **options)


def test_no_reference_names_the_remedy(model: HookedModel) -> None:
    assert model.tokenizer is not None
    long = Prompts.text("the " * 40, model.tokenizer)
    with pytest.raises(BadEdit, match=r"41 tokens.*--how zero"):
        ablate(model, long, tensors=["O"])
    assert len(ablate(model, long, tensors=["O"], blocks=[0], how="zero")) == 3


def test_a_reference_of_another_shape_is_refused(model: HookedModel, prompts: Prompts) -> None:
    other = Prompts.of([{"clean": "Paul Jones is a"}], prompts.tokenizer, name="jobs")
    with pytest.raises(BadText, match="jobs has no other prompt of the shape"):
        ablate(model, prompts, tensors=["O"], reference=other)


def test_spellings_and_blocks_are_taken_as_everywhere(model: HookedModel, prompts: Prompts) -> None:
    one = prompts.subset([0])
    df = ablate(model, one, tensors=["c^KV", "hook_attn_out", "g", "blocks.2.attn.hook_v"], how="zero", metrics=["kl"])
    by_tensor = {name: list(part["block"]) for name, part in df.groupby("tensor", observed=True)}
    assert by_tensor == {"c_KV": [0, 1, 2, 3], "V": [2], "delta_attn": [0, 1, 2, 3], "g": [0]}
    assert list(df["tensor"].iloc[:3]) == ["c_KV", "delta_attn", "g"]  # block by block, in the card's order


def test_several_spellings_are_one_answer(model: HookedModel) -> None:
    assert model.tokenizer is not None
    row = {"clean": "The capital of Peru is", "answer": ["Lima", "Quito"]}
    prompts = Prompts.of([row], model.tokenizer)
    df = ablate(model, prompts, tensors=["O"], blocks=[2], how="zero", metrics=["log_probability"])
    tokens, _ = prompts.batch()
    after = hooked(model, prompts, "blocks.2.O", torch.zeros_like)[0, -1].double().softmax(-1)
    before = model.run(tokens)["logits"][0, -1].double().softmax(-1)
    ids = [model.tokenizer.id(word) for word in row["answer"]]
    (found,) = df.to_dict("records")
    assert found["value"] == pytest.approx(float(after[ids].sum().log()), abs=1e-4)
    assert found["base"] == pytest.approx(float(before[ids].sum().log()), abs=1e-4)


def test_answers_of_several_tokens_are_read_token_by_token(model: HookedModel) -> None:
    """What is resampled is the prompt: behind it stand no reference's tokens, and the answer's own stay."""
    assert model.tokenizer is not None
    prompts = Prompts.text("The capital of Peru is", model.tokenizer, answer="Lima and")
    assert prompts.reference is not None
    df = ablate(model, prompts, tensors=["x_mid"], blocks=[2], metrics=["log_probability", "kl"])
    whole = Prompts.of([{"clean": "The capital of Peru is Lima"}], model.tokenizer)
    n = len(prompts.rows[0].tokens)
    other = Prompts((prompts.reference.rows[prompts.draw(prompts.reference, 0)[0]],), model.tokenizer)
    new = model.run_with_cache(*other.batch(), names_filter="blocks.2.x_mid")[1]["blocks.2.x_mid"]

    def put(value: Tensor) -> Tensor:
        value[:, :n] = new[:, :n]
        return value

    words = [model.tokenizer.id(word) for word in ("Lima", "and")]
    scores = hooked(model, whole, "blocks.2.x_mid", put)[0, -2:].double().log_softmax(-1)
    expected = float(sum(score[word] for score, word in zip(scores, words, strict=True)))
    assert cell(df, "log_probability")["value"] == pytest.approx(expected, abs=1e-4)
    assert cell(df, "log_probability")["effect"] < -1
    assert cell(df, "kl")["value"] > 0
    both = ablate(model, prompts, blocks=[2], metrics=["log_probability"])
    by_tensor = dict(zip(both["tensor"].astype(str), both["value"], strict=True))
    assert by_tensor["x_attn"] != pytest.approx(by_tensor["O"], abs=1e-3), "equal for the prompt, not behind it"


# ---- the other ways, by hand -----------------------------------------------------------------------------------------


def test_mean_ablation_over_pad_tokens_or_without_its_reference_set(model: HookedModel, prompts: Prompts) -> None:
    """The mean is over the real tokens of the reference prompts, of several lengths, and of nothing else."""
    reference = prompts.reference
    assert reference is not None
    df = ablate(model, prompts, tensors=["O"], blocks=[3], how="mean", metrics=["logit_difference"])
    assert set(df["source"]) == {"reference/ioi"}
    rows = [
        model.run_with_cache(*Prompts((row,), prompts.tokenizer).batch(), names_filter="blocks.3.O")[1]
        for row in reference.rows
    ]
    every = torch.cat([cache["blocks.3.O"][0] for cache in rows])
    assert len({len(row.tokens) for row in reference.rows}) > 1
    logits = hooked(model, prompts, "blocks.3.O", lambda value: every.mean(0).expand_as(value))
    assert cell(df)["value"] == pytest.approx(difference(prompts, logits).mean(), abs=1e-3)
    assert abs(cell(df)["effect"]) > 0.1
    alone = Prompts(prompts.rows, prompts.tokenizer)
    with pytest.raises(BadEdit, match="no reference prompts"):
        ablate(model, alone, tensors=["O"], how="mean")


def test_an_expert_excluded_by_hand(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, how="exclude", by="expert", blocks=[0, 2], metrics=["logit_difference"])
    assert set(df["tensor"]) == {"choice_score"}
    assert set(df["block"]) == {2}, "block 0 is dense"
    for expert in (0, 11, 14):

        def shut(value: Tensor, e: int = expert) -> Tensor:
            value[..., e] = -torch.inf
            return value

        logits = hooked(model, prompts, "blocks.2.choice_score", shut)
        assert cell(df, expert=expert)["value"] == pytest.approx(difference(prompts, logits).mean(), abs=1e-4)
    assert (df["routing_agreement"] < 1).any()


def test_noise_is_of_the_tensors_own_spread_and_drawn_by_seed(model: HookedModel, prompts: Prompts) -> None:
    options: dict[str, Any] = {"tensors": ["v"], "blocks": [3], "how": "noise", "metrics": ["logit_difference"]}
    first, again, other = (cell(ablate(model, prompts, seed=seed, **options)) for seed in (1, 1, 2))
    assert first["value"] == again["value"] != other["value"]
    noisy = model.run(*prompts.batch(), want="blocks.3.v")["blocks.3.v"].clone()
    for b, prompt in enumerate(prompts.rows):
        n, edit = len(prompt.tokens), noise("v", 3, std=1.0, seed=1)
        alone = model.run(torch.tensor([prompt.tokens]), want="blocks.3.v", edits=[edit])["blocks.3.v"][0]
        drawn = alone - noisy[b, :n]
        assert drawn.std() == pytest.approx(1, abs=0.1)
        noisy[b, :n] += noisy[b, :n].std() * drawn
    logits = hooked(model, prompts, "blocks.3.v", lambda value: noisy)
    assert first["value"] == pytest.approx(difference(prompts, logits).mean(), abs=1e-3)
    assert (first["seed"], other["seed"]) == (1, 2)


def test_a_product_of_parts_at_a_place(model: HookedModel, prompts: Prompts) -> None:
    """Position sweeps labelled as heads: each cell is the head and the place that its row says."""
    df = ablate(model, prompts, tensors=["O"], blocks=[3], by=["head", "role"], how="zero", metrics=["kl"])
    roles = list(dict.fromkeys(df["role"]))
    assert set(roles[:2]) == {"IO", "S1"}, "in the order of the text"
    assert roles[2:] == ["S2", "END"]
    assert list(zip(df["head"], df["role"], strict=True)) == list(product(range(model.dims.h), roles))
    at_end = ablate(model, prompts, tensors=["O"], blocks=[3], by="head", at="END", how="zero", metrics=["kl"])
    last = ablate(model, prompts, tensors=["O"], blocks=[3], by="head", at=-1, how="zero", metrics=["kl"])
    assert (set(at_end["role"]), set(last["role"])) == ({"END"}, {"-1"})
    places = [len(prompt.tokens) - 1 for prompt in prompts.rows]
    for head in range(model.dims.h):

        def off(value: Tensor, head: int = head) -> Tensor:
            value[range(len(places)), places, head] = 0
            return value

        logits = hooked(model, prompts, "blocks.3.O", off)
        expected = difference(prompts, logits).mean()
        row = cell(ablate(model, prompts, tensors=["O"], blocks=[3], by="head", at="END", how="zero"), head=head)
        assert row["value"] == pytest.approx(expected, abs=1e-4)
        for other in (at_end, last):
            assert cell(other, "kl", head=head)["value"] == pytest.approx(
                cell(df, "kl", head=head, role="END")["value"], abs=1e-6
            )


def test_products_that_coincide_are_computed_once(model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, blocks=[2], by=["head", "role"], how="zero", metrics=["logit_difference"])
    same = {t: s for t, s in zip(df["tensor"].astype(str), df["same_as"], strict=True) if isinstance(s, str)}
    views = {"Q_C": "q_C", "Q_pe": "q_pe", "Q_R": "q_pe", "K_C": "k_C", "V": "v"}
    assert same == {**views, "S": "Q", "O": "A"}, "no score: either factor; nothing read: either of the two"


# ---- controls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [None, "END"])
def test_an_experts_control_are_those_of_the_nearest_load(at: str | None, model: HookedModel, prompts: Prompts) -> None:
    df = ablate(model, prompts, how="exclude", by="expert", blocks=[3], at=at, metrics=["logit_difference", "kl"])
    _, cache = model.run_with_cache(*prompts.batch(), names_filter="blocks.3.experts")
    chosen = cache["blocks.3.experts"]
    tokens = [
        chosen[b, t].tolist()
        for b, prompt in enumerate(prompts.rows)
        for t in (range(len(prompt.tokens)) if at is None else prompt.spans[at])
    ]
    load = {e: sum(e in token for token in tokens) / len(tokens) for e in range(model.dims.e)}
    effect = {e: cell(df, "kl", expert=e)["effect"] for e in load}
    for e in load:
        row = cell(df, "kl", expert=e)
        assert row["load"] == pytest.approx(load[e])
        near = sorted((abs(load[e] - load[other]), other) for other in load if other != e)[:3]
        assert row["control"] == pytest.approx(np.mean([effect[other] for _, other in near]), abs=1e-9)
    assert sum(load.values()) == pytest.approx(model.dims.k)


# ---- what is decoded, and what it would cost -------------------------------------------------------------------------


def test_what_is_decoded_after_an_edit(model: HookedModel, prompts: Prompts) -> None:
    """Zeros act on every step; what takes values of other prompts acts on the prompt alone."""
    metric = "continuation:2:contains"
    four = prompts.subset([0, 4, 8])
    reference = four.reference
    assert reference is not None
    off = ablate(model, four, tensors=["O"], blocks=[3], how="zero", metrics=[metric])
    drawn = ablate(model, four, tensors=["x_n"], blocks=[3], metrics=[metric, "kl"])
    source = model.run(*reference.batch(), want=["blocks.3.x_n"])
    swap = resample("x_n", 3, source=source, rows=four.draw(reference, 0))
    for df, edits, when in ((off, [zero("O", 3)], "both"), (drawn, [swap], "prompt")):
        new = model.generate(*four.batch(), n=2, edits=edits, when=when).new
        texts = [four.tokenizer.decode(row.tolist()) for row in new]
        right = [str(prompt.answer) in text for prompt, text in zip(four.rows, texts, strict=True)]
        assert cell(df, metric)["value"] == pytest.approx(np.mean(right))
        assert cell(df, metric)["base"] == 1.0
    assert cell(drawn, metric)["value"] < 1
    two = Prompts.text("The capital of Peru is", four.tokenizer, answer="Lima and", wrong="Tokyo ,")
    with pytest.raises(BadMetric, match="takes each prompt once"):
        ablate(model, two, tensors=["O"], how="zero", metrics=[metric, "logit_difference"])


def test_the_outlook_counts_cells_and_rows(model: HookedModel, prompts: Prompts) -> None:
    asked: dict[str, Any] = {"tensors": ["O"], "by": "head", "how": "zero"}
    cost = outlook(model, prompts, **asked)
    n = len(prompts)
    assert (cost["cells"], cost["worlds"]) == (16, 16 * n)
    assert cost["forwards"] == pytest.approx(1 + 4 * (4 + 3 + 2 + 1) / 4, rel=0.01), "each from its block on"
    assert outlook(model, prompts, **asked, at="END")["forwards"] < cost["forwards"] / 3
    assert cost["bytes"] > 0
    assert outlook(model, prompts, tensors=["O"], draws=3)["worlds"] == 3 * 4 * n
