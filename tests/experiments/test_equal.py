"""Law 12: what is said to be equal by construction (``same_as``) is equal when computed. Every copied cell of an
ablation against a whole run with its own edit, every part of every tensor there; every copied probe against its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

from experiments.ablate import ablate
from experiments.asking import Ask
from experiments.options import By, How
from experiments.parts import can_go, dim_of
from experiments.probes import probes
from experiments.prompts import Prompts
from hooks import Edit, HookedModel, Run, mean, noise, resample, zero
from hooks.edits import PER_SLOT
from probe import random_weights
from probe.sites import Site

COLUMN = {"head": "head", "feature": "feature", "expert": "expert", "position": "pos", "role": "role", "key": "key"}
METRICS = ("logit_difference", "relative_change", "relative_change:O", "relative_change:x_ffn")
"""One at the end of the model, one of what leaves the edited block, two within it."""

BYS: list[tuple[By, ...]] = [
    (),
    ("head",),
    ("feature",),
    ("head", "feature"),
    ("position",),
    ("role",),
    ("key",),
    ("expert",),
    ("role", "feature"),
    ("head", "role", "feature"),
    ("expert", "role"),
]
SHORT: dict[tuple[By, ...], tuple[How, ...]] = {
    (): ("zero",),
    ("feature",): ("zero", "resample"),
    ("head", "feature"): ("zero",),
    ("role",): ("mean",),
    ("expert",): ("zero",),
}
"""What is tried without ``--long``: a kind of parts with each kind of edit, and those that are of unequal number."""


def small(query_latent: bool) -> HookedModel:
    """A dense and a MoE block of few features, no two sizes alike; words as of the tiny model."""
    tiny = HookedModel.load()
    dims = replace(
        tiny.dims, d=11, r_q=7 if query_latent else None, r_kv=8, h=2, n=5, r=4, v=3, f=9, e=6, k=2, m=4, m_s=10,
        moe=(False, True), n_group=2 if query_latent else 1, topk_group=1, norm_topk=query_latent,
    )  # fmt: skip
    return HookedModel(random_weights(dims, seed=3), tokenizer=tiny.tokenizer)


@pytest.fixture(scope="module")
def models() -> dict[bool, HookedModel]:
    return {query_latent: small(query_latent) for query_latent in (True, False)}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Three rows of two lengths, with their spans at different places."""
    tokenizer = HookedModel.load().tokenizer
    assert tokenizer is not None
    whole = Prompts.load("ioi", tokenizer)
    by_length = {shape.length: rows for shape, rows in whole.shapes().items()}
    return whole.subset([i for rows in list(by_length.values())[:2] for i in rows[:2]][:3])


class Twin:
    """Whole runs, each with the edit that a row of a frame names."""

    def __init__(self, model: HookedModel, prompts: Prompts, how: How, by: Sequence[By], at: str | None) -> None:
        self.model, self.prompts, self.how, self.by, self.at = model, prompts, how, by, at
        self.ask = Ask(model, prompts, METRICS)
        assert prompts.reference is not None
        self.rows = prompts.draw(prompts.reference, 0)
        tokens, keep = prompts.reference.batch()
        self.source = model.run(tokens, keep, want=list(model.sites), spans=prompts.reference.spans)
        self.base = self.run()

    def run(self, *edits: Edit) -> Run:
        """From the tokens on."""
        base = self.base if edits else None
        want = [site for site in self.model.sites if site.tensor != "delta_heads"]
        return self.model.run(self.ask.tokens, self.ask.keep, want=want, edits=edits, spans=self.ask.spans, base=base)

    def edit(self, row: dict[str, Any], prompts: set[int]) -> Edit:
        """What a row says was done, to these prompts."""
        site, where = Site(row["block"], row["tensor"]), {"B": sorted(prompts)}
        node = self.model.sites.node(site)
        if self.at is not None:
            where[dim_of("role", node)] = self.at
        for one in self.by:
            where[dim_of(one, node)] = row[COLUMN[one]]
        if self.how == "zero":
            return zero(str(site), **where)
        if self.how == "noise":
            return noise(str(site), std=1.0, relative=True, seed=0, **where)
        if self.how == "mean":
            return mean(str(site), source=self.source, **where)
        rows = None if site.tensor in PER_SLOT else self.rows
        return resample(str(site), source=self.source, rows=rows, seed=0, **where)

    def check(self, rows: Sequence[dict[str, Any]]) -> None:
        """The numbers of one cell, a row for each metric and prompt."""
        edit = self.edit(rows[0], {row["example"] for row in rows})
        run, block = self.run(edit), rows[0]["block"]
        for metric in self.ask.metrics:
            seen = (self.ask.seen(one, block) for one in (run, self.base))
            expected = self.ask.values(metric, *seen, block)
            for row in (row for row in rows if row["metric"] == metric.name):
                close = pytest.approx(float(expected[row["example"]]), rel=1e-4, abs=2e-5)
                assert row["value"] == close, f"{edit.label}, said to be as {row['same_as']}: {metric.name}"
        for name, found in (("flips", run.flips), ("routing_agreement", run.routing_agreement)):
            if pd.notna(said := rows[0].get(name)):
                assert said == pytest.approx(found), f"{edit.label}, said to be as {rows[0]['same_as']}: {name}"


def ablated(model: HookedModel, prompts: Prompts, how: How, by: tuple[By, ...], at: str | None = None) -> pd.DataFrame:
    df = ablate(model, prompts, how=how, by=by or None, at=at, metrics=METRICS, per_prompt=True)
    return df.astype({"tensor": str})


def check_copies(model: HookedModel, prompts: Prompts, df: pd.DataFrame, most: int, *how: Any) -> int:
    """Copied cells against runs, as many; and how many there are."""
    copied = df[df["same_as"].notna()] if "same_as" in df else df[:0]
    keys = [
        "block",
        "tensor",
        *(["group"] if "pos" in copied or "key" in copied else []),
        *(column for column in COLUMN.values() if column in df),
    ]
    cells = [cell.to_dict("records") for _, cell in copied.groupby(keys, dropna=False, sort=False)]
    twin = Twin(model, prompts, *how)
    for cell in random.Random(0).sample(cells, min(most, len(cells))):
        twin.check(cell)
    return len(cells)


CASES = [(how, by) for by in BYS for how in ("zero", "mean", "resample", "noise")]


@pytest.mark.parametrize(("how", "by"), CASES, ids=[f"{how}-{'-'.join(by) or 'whole'}" for how, by in CASES])
def test_law_12_what_is_said_to_be_equal_is_equal_in_a_run(
    how: How, by: tuple[By, ...], models: dict[bool, HookedModel], prompts: Prompts, long: bool
) -> None:
    if not long and how not in SHORT.get(by, ()):
        pytest.skip("long: run with --long")
    for model in models.values() if long else [models[True]]:
        check_copies(model, prompts, ablated(model, prompts, how, by), 150 if long else 15, how, by, None)


@pytest.mark.parametrize("how", ["zero", "mean", "resample", "noise"])
def test_law_12_at_a_place(how: How, models: dict[bool, HookedModel], prompts: Prompts, long: bool) -> None:
    if not long and how != "resample":
        pytest.skip("long: run with --long")
    for by in ((), ("head",), ("feature",)) if long else ((),):
        df = ablated(models[True], prompts, how, by, "S1")
        assert check_copies(models[True], prompts, df, 150 if long else 15, how, by, "S1") > 0


@pytest.mark.parametrize("by", [("feature",), ("head", "feature")])
def test_every_part_of_every_tensor_has_a_row(
    by: tuple[By, ...], models: dict[bool, HookedModel], prompts: Prompts
) -> None:
    """The narrower Q_C has no rotary features to copy Q's from."""
    model = models[True]
    df = ablate(model, prompts, how="zero", by=by, metrics=["kl"]).astype({"tensor": str})
    for site in model.sites:
        node = model.sites.node(site)
        if site.block is None or site.tensor == "delta_heads" or not all(can_go(one, node) for one in by):
            continue
        if site == Site(1, "x_n"):  # the block before's x_next
            continue
        here = df[(df["block"] == site.block) & (df["tensor"] == site.tensor)]
        every = torch.cartesian_prod(*(torch.arange(model.dims.size(dim_of(one, node))) for one in by))
        there = here[list(by)].to_numpy(dtype=int)
        assert there.squeeze().tolist() == every.tolist(), f"{site} by {by}"


def test_what_a_metric_sees_within_a_block_is_not_what_leaves_it(
    models: dict[bool, HookedModel], prompts: Prompts
) -> None:
    """To zero v or what attention writes leaves the same stream, but the one leaves nothing of O, the other all."""
    both: dict[str, Any] = {"tensors": ["v", "delta_attn"], "blocks": [1], "how": "zero"}
    df = ablate(models[True], prompts, **both, metrics=["relative_change:O"])
    assert dict(zip(df["tensor"], df["value"], strict=True)) == {"v": 1.0, "delta_attn": 0.0}
    assert "same_as" not in df
    assert "same_as" in ablate(models[True], prompts, **both, metrics=["kl"])


def test_the_same_stream_by_another_choice_has_no_flips_of_its_own(
    models: dict[bool, HookedModel], prompts: Prompts
) -> None:
    """To zero what experts read flips the choice, to zero what they add does not; both leave delta_ffn = 0."""
    df = ablate(models[True], prompts, tensors=["x_ffn", "delta_ffn"], blocks=[1], how="zero", metrics=["kl"])
    read, added = df.to_dict("records")
    assert added["same_as"] == "x_ffn"
    assert added["value"] == read["value"]
    assert read["flips"] > 0
    assert pd.isna(added["flips"])
    assert pd.isna(added["routing_agreement"])


def test_a_copied_probe_is_the_probe_of_its_own_tensor(long: bool) -> None:
    model = HookedModel.load()
    assert model.tokenizer is not None
    capitals, continents = (Prompts.load(task, model.tokenizer) for task in ("capital", "continent"))
    asked: dict[str, Any] = {"labels": "answer", "of": continents, "blocks": [1], "at": ["END"], "controls": []}
    tensors = None if long else ["q_C", "Q_C", "V", "v"]
    df = probes(model, capitals, **asked, width=8, tensors=tensors).astype({"tensor": str})
    copied = df[df["same_as"].notna() & df["group"].isna()]
    assert {"Q_C", "V"} <= set(copied["tensor"])
    for row in copied.to_dict("records"):
        own = probes(model, capitals, **asked, width=8, tensors=[row["tensor"]])
        assert own["value"].iloc[0] == row["value"], row["tensor"]
        assert "same_as" not in own
