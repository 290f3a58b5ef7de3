"""Sizes against sums written out over a cache."""

import dataclasses
import statistics
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from experiments import norms as module
from experiments.cli import app
from experiments.frames import BadFrame
from experiments.norms import massive, norms
from experiments.prompts import Prompts
from experiments.tables import stream_tables
from hooks import HookedModel
from hooks.cache import Cache
from probe import random_weights
from probe.errors import OutOfRange, UnknownTensor


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


@pytest.fixture(scope="module")
def prompts(model: HookedModel) -> Prompts:
    assert model.tokenizer is not None
    rows = [{"clean": "Paul Jones lives in"}, {"clean": "When Mary and John went to the shop", "spans": {"IO": [5, 9]}}]
    return Prompts.of(rows, model.tokenizer)


@pytest.fixture(scope="module")
def cache(model: HookedModel, prompts: Prompts) -> Cache:
    with torch.no_grad():
        made: Cache = model.run_with_cache(*prompts.batch(), names_filter=lambda name: True)[1]
    return made


@pytest.fixture(scope="module")
def table(model: HookedModel, prompts: Prompts) -> pd.DataFrame:
    return norms(model, prompts, channels=3)


def at(df: pd.DataFrame, block: int, tensor: str, example: int, pos: int, metric: str) -> pd.DataFrame:
    here = (df["block"] == block) & (df["tensor"] == tensor) & (df["example"] == example)
    return df[here & (df["pos"] == pos) & (df["metric"] == metric)]


@pytest.mark.parametrize("block", [0, 1])
def test_every_tensor_at_every_real_position(block: int, table: pd.DataFrame, cache: Cache, model: HookedModel) -> None:
    for name in model.sites.card(block).hooked:
        if name in ("experts", "delta_heads") or (name == "x_n" and block):
            assert not (table[table["block"] == block]["tensor"] == name).any()
            continue
        value = cache[f"blocks.{block}.{name}"].double()
        for example, length in ((0, 5), (1, 9)):
            for pos in (0, length - 1):
                one = value[example, :, pos, : pos + 1] if name in ("S", "A") else value[example, pos]  # visible keys
                (l2,) = at(table, block, name, example, pos, "l2")["value"]
                (rms,) = at(table, block, name, example, pos, "rms")["value"]
                assert l2 == pytest.approx(float(one.norm()), rel=1e-6)
                assert rms == pytest.approx(float(one.square().mean().sqrt()), rel=1e-6)
    assert (
        table[(table["block"] == block) & (table["metric"] == "rms")]
        .groupby("tensor", observed=True)
        .size()
        .eq(14)
        .all()
    )


WHERE = {
    "x_next": ("feature",),
    "q_C": ("feature",),
    "Q_C": ("head", "feature"),
    "K": ("head", "feature"),
    "A": ("head", "key"),
    "router_logits": ("feature",),
    "gates": ("expert",),
    "h_e": ("expert", "feature"),
}


@pytest.mark.parametrize("tensor", WHERE)
def test_the_largest_channels_are_where_they_are_said_to_be(tensor: str, table: pd.DataFrame, cache: Cache) -> None:
    example, pos = 1, 4
    value, experts = cache[f"blocks.2.{tensor}"], cache["blocks.2.experts"][example, pos].tolist()
    rows = at(table, 2, tensor, example, pos, "max").dropna(axis=1, how="all").to_dict("records")
    one = value[example, :, pos, : pos + 1] if tensor == "A" else value[example, pos]
    largest = one.abs().flatten().sort(descending=True).values[:3].tolist()
    assert [abs(row["value"]) for row in rows] == pytest.approx(largest)
    for row in rows:
        assert {"head", "key", "expert", "feature"} & set(row) == set(WHERE[tensor])
        index: list[Any] = [row[name] for name in WHERE[tensor]]
        if "expert" in row:
            index[0] = experts.index(index[0])
        assert float(one[tuple(index)]) == pytest.approx(row["value"])


# ---- growth, massive activations, sinks ------------------------------------------------------------------------------


def test_keys_that_a_query_does_not_see_are_no_channels(model: HookedModel, prompts: Prompts) -> None:
    df = norms(model, prompts, tensors=["S", "A"], blocks=[1], channels=6)
    top = df[df["metric"] == "max"]
    assert (top["key"] <= top["pos"]).all()
    seen = top.groupby(["tensor", "example", "pos"], observed=True).size()
    assert seen.to_dict() == {
        (tensor, example, pos): min(6, model.dims.h * (pos + 1))
        for tensor in ("S", "A")
        for example, prompt in enumerate(prompts.rows)
        for pos in range(len(prompt.tokens))
    }


def test_scores_that_are_no_numbers_have_no_size(model: HookedModel, prompts: Prompts) -> None:
    weights = random_weights(model.dims, 0)
    weights.read(1, "W_KR").fill_(torch.nan)
    df = norms(HookedModel(weights, model.tokenizer), prompts, tensors=["S", "A", "Q"], blocks=[1], channels=0)
    lost = df[df["metric"] == "rms"].groupby("tensor", observed=True)["value"].agg(lambda values: values.isna().all())
    assert lost.to_dict() == {"S": True, "A": True, "Q": False}


@pytest.mark.parametrize("block", [0, 2])
def test_growth_is_length_out_over_length_in(block: int, table: pd.DataFrame, cache: Cache) -> None:
    for example, pos in ((0, 0), (1, 8)):
        before, after = (cache[f"blocks.{block}.{name}"][example, pos].double().norm() for name in ("x_n", "x_next"))
        (value,) = at(table, block, "x_next", example, pos, "growth")["value"]
        assert value == pytest.approx(float(after / before), rel=1e-6)


def test_growth_needs_what_goes_in(model: HookedModel, prompts: Prompts) -> None:
    alone = norms(model, prompts, tensors=["x_next"], blocks=[1, 2], channels=0)
    assert set(alone[alone["metric"] == "growth"]["block"]) == {2}  # block 1's own input was not asked for
    assert "growth" not in set(norms(model, prompts, tensors=["x_mid"], channels=0)["metric"])


def test_sinks_are_means_over_the_queries_after_the_first(
    table: pd.DataFrame, cache: Cache, model: HookedModel
) -> None:
    sinks = table[table["metric"] == "sink"]
    assert len(sinks) == model.dims.blocks * model.dims.h * 2
    for row in sinks.to_dict("records"):
        length = (5, 9)[row["example"]]
        given = [float(cache["A", row["block"]][row["example"], row["head"], t, 0]) for t in range(1, length)]
        assert row["value"] == pytest.approx(sum(given) / len(given), rel=1e-5)
        assert row["base"] == pytest.approx(sum(1 / (t + 1) for t in range(1, length)) / (length - 1))
        assert row["key"] == 0


def test_a_prompt_of_one_token_has_no_sink(model: HookedModel) -> None:
    ids = Prompts.of([{"clean": "Paul"}], model.tokenizer).rows[0].tokens  # type: ignore[arg-type]
    assert len(ids) == 2  # <bos> is put in front
    one = Prompts.of([{"clean": "Paul"}, {"clean": "Paul Jones"}], model.tokenizer)  # type: ignore[arg-type]
    cut = dataclasses.replace(one, rows=(dataclasses.replace(one.rows[0], tokens=ids[:1], spans={}), one.rows[1]))
    df = norms(model, cut, tensors=["A", "x_n"], channels=0)
    assert set(df[df["metric"] == "sink"]["example"]) == {1}


def test_the_tiny_model_rests_on_its_first_token(model: HookedModel) -> None:
    """Heads of the last block that find nothing look at <bos>, which holds the largest channels by far."""
    assert model.tokenizer is not None
    df = norms(model, Prompts.load("job", model.tokenizer), tensors=["A", "x_n", "x_next"])
    sinks = df[df["metric"] == "sink"].groupby(["block", "head"])[["value", "base"]].mean()
    assert (sinks["value"] > 2 * sinks["base"]).sum() >= 6
    assert sinks.loc[0, "value"].max() < 0.1  # in block 0 it says nothing yet
    largest = massive(df, n=1)
    last = largest[(largest["block"] == 3) & (largest["tensor"] == "x_next")].to_dict("records")[0]
    assert (last["token"], last["pos"], last["n"]) == ("<bos>", 0, 80)
    assert abs(last["value"]) > 15 * last["base"]


@pytest.mark.parametrize("seed", [0, 1])
def test_with_random_weights_nothing_is_massive_and_nothing_rests(seed: int, model: HookedModel) -> None:
    """The control of what was found: it is learnt, no matter of <bos>, of where it stands or of how it is measured."""
    assert model.tokenizer is not None
    untrained = HookedModel(random_weights(model.dims, seed), model.tokenizer)
    df = norms(untrained, Prompts.load("job", model.tokenizer), tensors=["A", "x_n", "x_next"])
    sinks = df[df["metric"] == "sink"].groupby(["block", "head"])[["value", "base"]].mean()
    assert (sinks["value"] / sinks["base"]).between(0.4, 1.7).all()
    largest = massive(df, n=1)
    assert (largest["value"].abs() < 8 * largest["base"]).all()
    assert not largest["token"].eq("<bos>").any()


def test_massive_channels_are_each_at_their_largest(table: pd.DataFrame, cache: Cache) -> None:
    found = massive(table, n=2)
    for block, tensor in ((0, "x_n"), (2, "x_mid"), (3, "x_next")):
        here = found[(found["block"] == block) & (found["tensor"] == tensor)].to_dict("records")
        value = cache[f"blocks.{block}.{tensor}"]
        real = [(value[i, t], i, t) for i, n in ((0, 5), (1, 9)) for t in range(n)]
        rms = sorted(float(x.square().mean().sqrt()) for x, _, t in real if t)
        by_channel = {c: max(float(x[c].abs()) for x, _, _ in real) for c in range(128)}
        ranked = sorted(by_channel, key=lambda c: -by_channel[c])[:2]
        assert [row["feature"] for row in here] == ranked
        for row in here:
            assert abs(row["value"]) == pytest.approx(by_channel[row["feature"]])
            assert float(value[row["example"], row["pos"], row["feature"]]) == pytest.approx(row["value"])
            assert row["base"] == pytest.approx(statistics.median(rms), rel=1e-6)
    assert not found.duplicated(["block", "tensor", "feature"]).any()


def test_massive_needs_channels_of_the_stream(model: HookedModel, prompts: Prompts) -> None:
    with pytest.raises(BadFrame, match="no channels of the residual stream"):
        massive(norms(model, prompts, tensors=["A"]))


def test_scores_and_patterns_are_never_whole(
    model: HookedModel, prompts: Prompts, table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of queries at a time, and nothing of it stays but its sizes."""
    monkeypatch.setattr("probe.numerics.QUERY_CHUNK", 4)
    seen = []
    measured = module._of_pairs

    def spy(channels: int, value: torch.Tensor) -> Any:
        seen.append(value.shape[2])
        return measured(channels, value)

    monkeypatch.setattr(module, "_of_pairs", spy)
    df = norms(model, prompts, tensors=["S", "A"], channels=3)
    assert max(seen) == 4
    columns = ["block", "tensor", "example", "pos", "metric", "value"]
    whole = table[table["tensor"].isin(["S", "A"])]
    pairs = [
        frame[frame["metric"].isin(["rms", "l2", "sink"])].sort_values(columns[:-1])["value"].to_numpy(dtype=float)
        for frame in (df, whole)
    ]
    assert pairs[0] == pytest.approx(pairs[1], rel=1e-5)


class Living(TorchDispatchMode):
    """Follows every tensor that is made, and how many bytes of them lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.made = [ref for ref in self.made if ref() is not None]
        living = [x.untyped_storage() for ref in self.made if (x := ref()) is not None]
        self.most = max(self.most, sum({storage.data_ptr(): storage.nbytes() for storage in living}.values()))
        return out


def test_a_blocks_activations_are_never_held_at_once(model: HookedModel) -> None:
    """The sizes of all that a block makes take little more memory than a plain run; what it makes, kept, much more."""
    assert model.tokenizer is not None
    prompts = Prompts.load("job", model.tokenizer)

    def most(act: Callable[[], Any]) -> int:
        with Living() as living, torch.no_grad():
            act()
        return living.most

    plain = most(lambda: model.run(*prompts.batch(), want="blocks.2.x_next"))
    sized = most(lambda: module.measure(model, prompts, module.sized(model, blocks=[2]), 1))
    kept = most(lambda: model.run(*prompts.batch(), want="blocks.2.*"))
    assert sized - plain < 0.3 * (kept - plain)
    assert kept > 2.5 * plain


def test_the_command_tells_growth_channels_and_sinks(tmp_path: Path) -> None:
    asked = ["norms", "--task", "job", "--tensor", "x_n", "--tensor", "x_next", "--tensor", "A", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    for words in ("Growth of the residual stream", "The largest channels", "Heads that attend most to position 0"):
        assert words in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"norms.parquet", "norms.csv", "norms.png", "sinks.png"}
    alone = CliRunner().invoke(app, ["norms", "--task", "job", "--tensor", "c_KV"])
    assert alone.exit_code == 0, alone.output
    assert "Growth" not in alone.output


def test_one_stream_is_listed_once(table: pd.DataFrame) -> None:
    """x_next of a block is x_n of the next: the list of channels shows one of the two."""
    (found,) = (made for made in stream_tables(table) if "largest channels" in made.title)
    assert {(row[0], row[1]) for row in found.rows if row[1] == "x_n"} <= {("0", "x_n")}


def test_places_are_named(table: pd.DataFrame) -> None:
    (row,) = at(table, 0, "x_mid", 1, 2, "rms").to_dict("records")
    assert (row["token"], row["role"]) == ("Mary", "IO")
    assert set(table["study"]) == {"norms"}


def test_delta_heads_only_where_it_is_named(model: HookedModel, prompts: Prompts, cache: Cache) -> None:
    df = norms(model, prompts, tensors=["attn.hook_result"], blocks=[3], channels=0)
    assert set(df["tensor"].astype(str)) == {"delta_heads"}
    (l2,) = at(df, 3, "delta_heads", 0, 2, "l2")["value"]
    assert l2 == pytest.approx(float(cache["blocks.3.delta_heads"][0, 2].norm()), rel=1e-5)
    assert set(df["metric"]) == {"rms", "l2"}


def test_nothing_is_left_behind(model: HookedModel, prompts: Prompts, table: pd.DataFrame) -> None:
    assert not model.watched()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tensors": ["experts"]}, UnknownTensor, "holds integers"),
        ({"tensors": ["c_kvv"]}, UnknownTensor, "Nearest"),
        ({"channels": -1}, OutOfRange, "0 or more"),
        ({"blocks": [9]}, OutOfRange, "block 9"),
    ],
)
def test_what_cannot_be_asked(
    options: dict[str, Any], error: type[Exception], says: str, model: HookedModel, prompts: Prompts
) -> None:
    with pytest.raises(error, match=says):
        norms(model, prompts, **options)
