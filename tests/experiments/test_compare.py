"""Two models side by side: planted differences, against sums written out, and nothing where they are equal."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from experiments import Prompts
from experiments.cli import app
from experiments.compare import Unequal, compare, load_both
from experiments.tables import comparison_tables
from hooks import HookedModel
from probe import TINY, InMemory, Tokenizer, Weights, load, random_weights
from probe.errors import BadText
from probe.writer import save

FIRST = HookedModel.load()
assert FIRST.tokenizer is not None
PROMPTS = Prompts.load("job", FIRST.tokenizer).subset(range(20))
GROUPS = [prompt.group for prompt in PROMPTS.rows]
E, K = FIRST.dims.e, FIRST.dims.k


def changed(**by: Tensor) -> HookedModel:
    """The tiny model, with noise on what is named (``block2_W_O``)."""
    weights = FIRST.decoder.weights
    assert isinstance(weights, InMemory)
    tensors = dict(weights.tensors)
    for place, new in by.items():
        block, name = place.removeprefix("block").split("_", 1)
        tensors[int(block), name] = new
    return HookedModel(InMemory(FIRST.dims, tensors), FIRST.tokenizer)


def noisy(block: int, name: str, size: float, expert: int | None = None) -> Tensor:
    old = FIRST.decoder.weights.read(block, name)
    noise = size * torch.randn(old.shape, generator=torch.Generator().manual_seed(block))
    if expert is not None:
        noise[[e for e in range(E) if e != expert]] = 0
    return old + noise


SECOND = changed(block2_W_O=noisy(2, "W_O", 0.02), block3_W_2_e=noisy(3, "W_2_e", 0.1, expert=5))


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return compare(FIRST, SECOND, PROMPTS, names=("one", "two"))


def pick(df: pd.DataFrame, metric: str, **at: object) -> pd.DataFrame:
    here = df[df["metric"] == metric]
    for name, value in at.items():
        here = here[here[name].isna() if value is None else here[name] == value]
    return here


# ---- weights ---------------------------------------------------------------------------------------------------------


def naive(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Relative change, cosine and largest change, summed in a loop."""
    pairs = list(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))
    xx, yy, xy = (
        sum(a * b for a, b in terms) for terms in (((p[0],) * 2 for p in pairs), ((p[1],) * 2 for p in pairs), pairs)
    )
    dd = sum((b - a) ** 2 for a, b in pairs)
    return (dd / xx) ** 0.5, xy / (xx * yy) ** 0.5, max(abs(b - a) for a, b in pairs)


@pytest.mark.parametrize(
    ("block", "tensor", "expert"),
    [(2, "W_O", None), (3, "W_2_e", 5), (3, "W_2_e", None)],
    ids=["W_O", "expert", "experts"],
)
def test_planted_changes_are_measured(block: int, tensor: str, expert: int | None, table: pd.DataFrame) -> None:
    x, y = (model.decoder.weights.read(block, tensor) for model in (FIRST, SECOND))
    if expert is not None:
        x, y = x[expert], y[expert]
    metrics = ("relative_change", "cosine", "largest_change")
    found = [pick(table, metric, block=block, tensor=tensor, expert=expert)["value"].item() for metric in metrics]
    assert found == pytest.approx(naive(x, y))


def test_what_is_equal_has_no_change_at_all(table: pd.DataFrame) -> None:
    changes = pick(table, "relative_change")
    moved = changes[changes["value"] != 0]
    places = {
        (r["block"], r["tensor"], r["expert"] if r["expert"] == r["expert"] else None) for r in moved.to_dict("records")
    }
    assert {(b, t) for b, t, _ in places} == {(2, "W_O"), (3, "W_2_e")}
    assert len(moved) == 3
    assert pick(table, "largest_change")["value"].ne(0).sum() == 3
    assert (pick(table, "cosine")["value"] <= 1 + 1e-12).all()


def test_every_weight_is_there_and_every_expert(table: pd.DataFrame) -> None:
    changes = pick(table, "relative_change")
    weights = FIRST.decoder.weights
    assert isinstance(weights, InMemory)
    whole = changes[changes["expert"].isna()]
    assert len(whole) == len(weights.tensors)
    assert {(None if pd.isna(b) else b, t) for b, t in zip(whole["block"], whole["tensor"], strict=True)} == set(
        weights.tensors
    )
    assert len(changes) - len(whole) == 3 * 3 * E


def test_a_weight_of_zeros_has_no_relative_change() -> None:
    zeros = changed(block1_b=torch.zeros(E))
    df = compare(zeros, FIRST)
    assert pick(df, "relative_change", block=1, tensor="b")["value"].isna().all()
    assert pick(df, "largest_change", block=1, tensor="b")["value"].item() > 0
    same = compare(zeros, zeros)
    assert pick(same, "relative_change", block=1, tensor="b")["value"].item() == 0
    assert pick(same, "cosine", block=1, tensor="b")["value"].isna().all()


class Counting:
    """Weights that note the largest tensor read of them."""

    resident = False

    def __init__(self, weights: Weights) -> None:
        self.weights, self.dims, self.fingerprint = weights, weights.dims, "counted"
        self.experts_at_once = 0

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        if name.endswith("_e"):
            self.experts_at_once = max(self.experts_at_once, E if experts is None else len(experts))
        return self.weights.read(block, name, experts)


def test_routed_weights_are_read_an_expert_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.compare.SLICE", 64)
    weights = Counting(FIRST.decoder.weights)
    df = compare(HookedModel(weights), SECOND)
    assert weights.experts_at_once == 1
    relative, _, largest = naive(FIRST.decoder.weights.read(2, "W_O"), SECOND.decoder.weights.read(2, "W_O"))
    assert pick(df, "relative_change", block=2, tensor="W_O")["value"].item() == pytest.approx(relative)
    assert pick(df, "largest_change", block=2, tensor="W_O")["value"].item() == pytest.approx(largest)


# ---- activations and routing -----------------------------------------------------------------------------------------


def test_sizes_are_medians_over_positions_and_means_over_groups(table: pd.DataFrame) -> None:
    for name, column in ((FIRST, "base"), (SECOND, "value")):
        typical, first = [], []
        for prompt in PROMPTS.rows:
            x = name.run(torch.tensor([prompt.tokens]), want="blocks.3.x_next")["x_next", 3][0].double()
            rms = x.square().mean(-1).sqrt().tolist()
            typical.append(float(np.median(rms)))
            first.append(rms[0])
        for pos, values in ((None, typical), (0, first)):
            by_group = pd.Series(values).groupby(GROUPS).mean()
            found = pick(table, "rms", block=3, tensor="x_next", pos=pos)
            assert found[column].item() == pytest.approx(by_group.mean(), rel=1e-5)
            assert found["n"].item() == len(by_group)


def test_nothing_above_the_first_change_moves(table: pd.DataFrame) -> None:
    sizes = pick(table, "rms")
    early = sizes[(sizes["block"] < 2) | ((sizes["block"] == 2) & (sizes["tensor"] <= "O"))]
    assert early["effect"].eq(0).all()
    assert pick(table, "rms", block=2, tensor="delta_attn")["effect"].ne(0).all()


def test_agreement_is_counted_as_sets_each_model_on_its_own_stream(table: pd.DataFrame) -> None:
    for block in (1, 2, 3):
        shares, loads = [], [[], []]
        for prompt in PROMPTS.rows:
            tokens = torch.tensor([prompt.tokens])
            ours, theirs = (
                m.run(tokens, want=f"blocks.{block}.experts")["experts", block][0].tolist() for m in (FIRST, SECOND)
            )
            shares.append(np.mean([len(set(a) & set(b)) / K for a, b in zip(ours, theirs, strict=True)]))
            for which, chosen in ((0, ours), (1, theirs)):
                loads[which].append([np.mean([e in one for one in chosen]) for e in range(E)])
        row = pick(table, "agreement", block=block)
        assert row["value"].item() == pytest.approx(pd.Series(shares).groupby(GROUPS).mean().mean())
        assert row["base"].item() == 1
        assert row["p"].isna().all()  # it can't be above, so that any difference at all would be one
        for which, column in ((0, "base"), (1, "value")):
            expected = pd.DataFrame(loads[which]).groupby(GROUPS).mean().mean()
            assert pick(table, "load", block=block)[column].tolist() == pytest.approx(expected.tolist())


def test_on_the_same_stream_only_the_changed_block_chooses_otherwise(table: pd.DataFrame) -> None:
    own, same = (pick(table, metric).set_index("block")["value"] for metric in ("agreement", "agreement_same_stream"))
    assert own[1] == same[1] == 1
    assert own[2] == same[2] < 0.99  # its attention writes something else, and its router reads that
    assert own[3] < 0.99
    assert same[3] == 1  # its router is as it was, and hears the same


def test_a_model_beside_itself(table: pd.DataFrame) -> None:
    df = compare(FIRST, FIRST, PROMPTS)
    assert df["effect"].dropna().eq(0).all()
    assert pick(df, "agreement")["value"].eq(1).all()
    assert set(df["metric"]) == set(table["metric"])
    assert table["model"].nunique() == 1
    one, two = table["model"][0].split(" → ")
    assert (one.split()[0], two.split()[0]) == ("one", "two")


# ---- one model in two precisions -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32 weights that no bf16 has."""
    place = tmp_path_factory.mktemp("wide")
    save(random_weights(FIRST.dims, 1), place, dtype=torch.float32)
    return place


PRECISIONS = {
    "its own files in bf16": lambda wide: HookedModel.load(wide, torch.bfloat16),
    "read from disk in bf16": lambda wide: HookedModel.load(wide, torch.bfloat16, keep="disk"),
    "stored, in fp16": lambda wide: HookedModel.load(wide, torch.float16, keep="stored"),
    "cast in memory": lambda wide: HookedModel(load(wide).to(torch.bfloat16), numerics="careful"),
    "in fp32, careful": lambda wide: HookedModel.load(wide, numerics="careful"),
}


@pytest.mark.parametrize("second", PRECISIONS.values(), ids=PRECISIONS)
def test_one_model_in_two_precisions_shows_its_drift(second: Callable[[Path], HookedModel], wide: Path) -> None:
    """Numbers of the two models run apart, and weights by their rounding alone."""
    first, low = HookedModel.load(wide), second(wide)
    prompts = PROMPTS.subset(range(4))
    df = compare(first, low, prompts)
    dtype, numerics = low.decoder.weights.read(0, "W_O").dtype, low.decoder.numerics
    names = ["float32 → " + str(dtype).removeprefix("torch."), f"reference → {numerics}"]
    said = [name if len({*name.split(" → ")}) > 1 else name.split(" → ")[0] for name in names]
    assert [df["dtype"].unique().tolist(), df["numerics"].unique().tolist()] == [[said[0]], [said[1]]]
    changes = pick(df, "relative_change").set_index(["tensor"])["value"]
    assert changes.loc[["W_g", "b"]].eq(0).all(), "fp32 under every cast"
    assert changes.loc["W_O"].between(0 if dtype == torch.float32 else 1e-5, torch.finfo(dtype).eps).all()
    for block in (1, 2, 3):
        shares, alone = [], []
        for prompt in prompts.rows:
            tokens = torch.tensor([prompt.tokens])
            ours, theirs = (model.run(tokens, want=f"blocks.{block}.experts") for model in (first, low))
            x_n = ours["x_n", block].to(theirs["x_n", block].dtype)
            same = low.run_block(block, x_n, want="experts")
            chosen = [run["experts", block][0].tolist() for run in (ours, theirs, same)]
            for into, other in ((shares, chosen[1]), (alone, chosen[2])):
                into.append(np.mean([len({*a} & {*b}) / K for a, b in zip(chosen[0], other, strict=True)]))
        groups = GROUPS[:4]
        for metric, values in (("agreement", shares), ("agreement_same_stream", alone)):
            expected = pd.Series(values).groupby(groups).mean().mean()
            assert pick(df, metric, block=block)["value"].item() == pytest.approx(expected)
    sizes = pick(df, "rms", block=3, tensor="x_next", pos=0)
    assert sizes["value"].item() == pytest.approx(sizes["base"].item(), rel=0.1)
    if dtype != torch.float32:
        assert sizes["value"].item() != sizes["base"].item()


def test_quantised_and_expanded_are_one_model_in_two_precisions(tmp_path: Path) -> None:
    """FP8 weights, and files of what they expand to, in fp32."""
    save(random_weights(FIRST.dims, 2), tmp_path / "fp8", form="fp8")
    save(load(tmp_path / "fp8"), tmp_path / "expanded", dtype=torch.float32)
    low, high = HookedModel.load(tmp_path / "fp8", keep="stored"), HookedModel.load(tmp_path / "expanded", keep="disk")
    df = compare(low, high)
    assert df["dtype"].unique().tolist() == ["bfloat16 → float32"]
    assert pick(df, "relative_change")["value"].eq(0).all()
    one, other = df["model"][0].split(" → ")
    assert one != other


def test_the_command_takes_a_dtype_for_each(wide: Path, tmp_path: Path) -> None:
    asked = ["compare", str(wide), str(wide), "--dtype", "float32", "--second-dtype", "bfloat16"]
    done = CliRunner().invoke(app, [*asked, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    df = pd.read_csv(tmp_path / "compare.csv")
    assert df["dtype"].unique().tolist() == ["float32 → bfloat16"]
    assert len({*df["model"][0].split(" → ")}) == 1
    random = CliRunner().invoke(app, ["compare", str(wide), "random", "--second-dtype", "bfloat16"])
    assert random.exit_code == 1
    assert "random weights are drawn in the first model's dtype" in random.stderr


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"f": 168}, r"f = 160 \(FFN width\), the second 168"),
        ({"k": 4}, r"k = 2 \(experts chosen per token\), the second 4"),
        ({"V": 400}, r"V = 410 \(vocabulary\), the second 400"),
        ({"moe": (False, False, True, True)}, "MoE blocks differ: 3 of 4 in the first model, 2 of 4"),
        ({"moe": (False, True, True)}, "MoE blocks differ: 3 of 4 in the first model, 2 of 3"),
    ],
    ids=["f", "k", "V", "moe", "blocks"],
)
def test_models_of_other_sizes_are_refused_by_dim(change: dict[str, int], says: str) -> None:
    other = HookedModel(random_weights(dataclasses.replace(FIRST.dims, **change)))
    with pytest.raises(Unequal, match=says):
        compare(FIRST, other)


def test_other_constants_are_said(table: pd.DataFrame) -> None:
    weights = FIRST.decoder.weights
    assert isinstance(weights, InMemory)
    other = HookedModel(InMemory(dataclasses.replace(FIRST.dims, theta=1e4, scaling=2.0), weights.tensors))
    df = compare(FIRST, other)
    assert df.attrs["constants"] == {"scaling": ["1.5", "2.0"], "theta": ["100.0", "10000.0"]}
    assert "theta: 100.0 in the first, 10000.0 in the second" in "\n".join(map(str, comparison_tables(df)))
    assert table.attrs["constants"] == {}


def test_other_weights_in_other_numerics_are_refused(directory: Path) -> None:
    weights = SECOND.decoder.weights
    assert isinstance(weights, InMemory)
    for second in (HookedModel(weights.to(torch.bfloat16)), HookedModel.load(directory, torch.bfloat16, keep="disk")):
        says = rf"one runs in float32, reference, the other in bfloat16, {second.decoder.numerics}, and their weights"
        with pytest.raises(Unequal, match=says):
            compare(FIRST, second)


def test_prompts_that_are_other_words_to_the_other_model_are_refused(tmp_path: Path) -> None:
    said = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    paul, mary = vocabulary["Paul"], vocabulary["Mary"]
    vocabulary |= {"Paul": mary, "Mary": paul}
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    second = HookedModel(FIRST.decoder.weights, Tokenizer(tmp_path))
    with pytest.raises(BadText, match=rf"token ({paul}|{mary}) is '(Paul|Mary)' in one and '(Mary|Paul)' in the other"):
        compare(FIRST, second, PROMPTS)
    compare(FIRST, HookedModel(FIRST.decoder.weights), PROMPTS.subset([0]))  # without a tokenizer, nothing to compare


# ---- from the shell --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tuned")
    save(SECOND.decoder.weights, place)
    shutil.copy(TINY / "tokenizer.json", place)
    return place


def test_two_directories_are_loaded_in_one_dtype(directory: Path) -> None:
    one, other = load_both(TINY, directory)
    assert one.decoder.weights.read(None, "w_final").dtype == other.decoder.weights.read(None, "w_final").dtype
    assert not one.decoder.weights.resident


def test_the_command_prints_and_writes(directory: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(TINY), str(directory), "--task", "job", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "W_O" in done.output
    assert "76 of 78 weights are equal, entry by entry" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "compare.parquet",
        "compare.csv",
        "weights.png",
        "sizes.png",
        "loads.png",
    }


def test_weights_alone_need_no_prompt(directory: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(TINY), str(directory)])
    assert done.exit_code == 0, done.output
    assert "Chosen experts" not in done.output
    assert (
        CliRunner().invoke(app, ["compare", str(TINY), str(directory), "--task", "job", "--prompt", "a"]).exit_code == 2
    )
