"""Sizes against sums written out over a cache."""

from typing import Any

import pandas as pd
import pytest
import torch

from experiments.norms import norms
from experiments.prompts import Prompts
from hooks import HookedModel
from hooks.cache import Cache
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
