"""How ablations and patches are shown: laid out by what varies in their frames, in tables and in pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from typer.testing import CliRunner

from experiments import frames, plots
from experiments.cli import app
from experiments.effect_plots import largest, pictures
from experiments.effects import Layout, changed, keys, layout, place_name, told, where
from experiments.frames import BadFrame, frame
from experiments.spec import read
from experiments.studies import STUDIES
from experiments.tables import effect_tables, largest_effects


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


def made(**columns: list[Any]) -> pd.DataFrame:
    """A row for each combination of these columns; the i-th effect is i - 2, and recovers a tenth of it."""
    index = pd.MultiIndex.from_product(columns.values(), names=columns.keys()).to_frame(index=False)
    rows = index.assign(study="patch", model="tiny", prompts="ioi", metric="logit_difference", unit="logits", n=12)
    rows = rows.assign(edit="patch", direction="denoise", source="clean", base=-9.0)
    rows["effect"] = [float(i - 2) for i in range(len(rows))]
    rows["value"] = rows["base"] + rows["effect"]
    rows["recovered"] = rows["effect"] / 10
    for name in ("tensor", "block"):
        if name not in rows:
            rows[name] = {"tensor": "O", "block": 3}[name]
    return frame(rows, study="patch")


# ---- what is shown, and how it lies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"block": [0, 1], "tensor": ["O", "V"]}, Layout("tensor", "block", ())),
        ({"block": [0, 1]}, Layout("tensor", "block", ())),
        ({"block": [0, 1], "head": [0, 1]}, Layout("block", "head", ())),
        ({"block": [0, 1], "tensor": ["O", "V"], "head": [0, 1]}, Layout("tensor", "head", ("block",))),
        ({"tensor": ["O", "V"], "head": [0, 1]}, Layout("tensor", "head", ())),
        ({"block": [0, 1], "head": [0, 1], "role": ["S2", "END"]}, Layout("block", "head", ("role",))),
        ({"block": [0, 1], "expert": [0, 1], "role": ["S2", "END"]}, Layout("block", "expert", ("role",))),
        ({"block": [0, 1], "head": [0, 1], "role": ["END"]}, Layout("block", "head", ())),
        ({"block": [0, 1], "pos": [0, 1]}, Layout("block", "pos", ())),
        ({"pos": [0, 1], "key": [0, 1]}, Layout("pos", "key", ())),
        ({"pos": [0, 1], "head": [0, 1], "key": [0, 1]}, Layout("key", "head", ("pos",))),
        ({"block": [0, 1], "group": ["a", "b"], "pos": [0, 1]}, Layout("block", "pos", ("group",))),
        ({"block": [0, 1], "group": ["a", "b"], "head": [0, 1]}, Layout("block", "head", ())),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_a_frame_lies_by_what_varies_in_it(columns: dict[str, list[Any]], expected: Layout) -> None:
    df = made(**columns)
    assert layout(df) == expected
    parts = list(expected.split(df))
    assert sum(len(part) for _, part in parts) == len(df)
    assert len({name for name, _ in parts}) == len(parts)
    for _, part in parts:
        if len({"group"} & set(columns)) == ("group" in expected.apart):
            ax = plots.heatmap(part, y=expected.down, x=expected.across)
            assert ax.images, "and can be drawn so"


def test_roles_follow_positions() -> None:
    df = made(block=[0, 1], pos=[0, 1, 2])
    named = frame(df.assign(role=[None, "S1", "END"] * 2), study="patch")
    assert layout(named) == Layout("block", "pos", ())
    assert keys(named) == ["block", "tensor", "pos"]
    assert where(named[named["pos"] == 2], ("block",)) == "at position 2"


def test_files_are_named_by_what_sets_them_apart() -> None:
    df = made(tensor=["O", "V"], block=[0, 1], head=[0, 1], role=["subject[-1]", "END"])
    names = [name for name, _ in layout(df).split(df)]
    assert names == ["subject_-1__block0", "END_block0", "subject_-1__block1", "END_block1"]
    shapes = made(block=[0, 1], group=["The {x} is", "A {y}"], pos=[0, 1])
    assert [name for name, _ in layout(shapes).split(shapes)] == ["shape0", "shape1"]


def test_what_is_told_is_recovered_else_the_effect_else_the_value() -> None:
    df = made(block=[0, 1])
    assert told(df) == "recovered"
    assert told(df.drop(columns="recovered")) == "effect"
    assert told(df.assign(recovered=pd.NA)) == "effect"
    assert told(df[["metric", "value"]]) == "value"
    by_prompt = made(block=[0, 1], example=[0, 1])
    assert told(by_prompt) == "effect"
    assert told(by_prompt, ("block", "example")) == "recovered"


def test_a_distance_that_starts_from_zero_is_no_change_of_itself() -> None:
    df = pd.DataFrame({"base": [0.0, 0.0]})
    assert changed(df, "relative_change") == "relative change"
    assert changed(df.assign(base=[0.0, 1.0]), "logit_difference") == "change of logit difference"
    assert changed(df[[]], "loss") == "change of loss"
    (title,) = [table.title for table in effect_tables(made(tensor=["O"], block=[0]).assign(metric="kl", base=0.0))][:1]
    assert "change" not in title
    assert "(base" not in title


def test_what_all_rows_share_is_said() -> None:
    df = made(block=[0, 1], head=[3], role=["END"])
    assert where(df, ("block",)) == "head 3, at END"
    assert where(df, ("block", "head")) == "at END"
    assert where(made(block=[2], expert=[1, 2]), ("expert",)) == "block 2"
    assert place_name({"pos": 4, "token": "Peru", "role": "subject"}) == "4 Peru"
    assert place_name({"pos": 4, "token": pd.NA, "role": "subject"}) == "4 subject"
    assert place_name({"pos": 4}) == "4"


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_grid_for_each_place_and_the_largest_cells_below() -> None:
    df = made(block=[0, 1], head=[0, 1], role=["S2", "END"])
    s2, end, top = effect_tables(df)
    assert s2.title == "patch (denoise) from clean: logit difference recovered, at S2, ioi, n = 12"
    assert list(s2.header) == ["block", "tensor", "head 0", "head 1"]
    assert [list(row) for row in s2.rows] == [["0", "O", "−0.20", "0"], ["1", "O", "0.20", "0.40"]]
    assert ", at END, ioi" in end.title
    assert top.title.startswith("The largest of 8: ")
    assert list(top.header) == ["block", "tensor", "head", "role", "recovered", "n"]
    assert list(top.rows[0]) == ["1", "O", "1", "END", "0.50", "12"]
    assert len(top.rows) == 7, "a zero is no large cell"


def test_grids_of_several_tensors_say_block_and_tensor_and_those_of_two_positions_both() -> None:
    grid, _ = effect_tables(made(block=[0, 1], tensor=["V", "O"], head=[0, 1]))
    assert [list(row[:2]) for row in grid.rows] == [["0", "V"], ["0", "O"], ["1", "V"], ["1", "O"]]
    grid, _ = effect_tables(made(pos=[0, 1], key=[0, 1]))
    assert list(grid.header) == ["block", "tensor", "pos", "key 0", "key 1"]
    assert [list(row[2:]) for row in grid.rows] == [["0", "−0.20", "−0.10"], ["1", "0", "0.10"]]


def test_hundreds_of_experts_and_dozens_of_places_are_told_by_their_largest() -> None:
    (top,) = effect_tables(made(block=[0, 1], expert=list(range(300))))
    assert top.title.startswith("The largest of 600")
    assert len(top.rows) == 10
    (top,) = effect_tables(made(block=[0, 1], head=[0, 1], pos=list(range(20))))
    assert list(top.header)[:4] == ["block", "tensor", "head", "pos"]


def test_experts_stand_beside_their_controls_and_loads() -> None:
    df = made(block=[2], expert=[0, 1, 2, 3]).drop(columns=["recovered", "direction"])
    df = frame(df.assign(control=[0.5, 0.25, 0.0, 0.125], load=0.25, tensor="choice_score", edit="exclude"), study="x")
    (top,) = effect_tables(df)
    assert list(top.header) == ["block", "tensor", "expert", "effect", "control", "load", "n"]
    assert list(top.rows[0]) == ["2", "choice_score", "0", "−2.00", "0.50", "0.25", "12"]
    assert top.notes == ["control: the mean effect of other experts of the block, of about equal load"]


def test_what_must_be_known_of_the_numbers_is_noted() -> None:
    df = made(block=[0, 1], head=[0, 1])
    sound = df.assign(
        ci_low=0.0, ci_high=1.0, p=0.5, p_family="bootstrap-t, largest of 4 cells", small_gaps=2, mistaken=3
    )
    top = largest_effects(frame(sound, study="patch"))
    assert list(top.header) == ["block", "tensor", "head", "recovered", "from", "to", "p", "n"]
    assert top.notes == [
        "from, to: 95 % interval; p: bootstrap-t, largest of 4 cells",
        "in 2 pairs of prompts clean and corrupt hardly differ",
        "the model gets 3 of these prompts wrong",
    ]
    distance = df.assign(ci_low=0.0, ci_high=1.0, p_family="a distance")
    assert largest_effects(frame(distance, study="patch")).notes == ["from, to: 95 % interval; no p: a distance"]
    few = largest_effects(frame(df.assign(p_family="too few units (2 of 8)", stderr=0.5), study="patch"))
    assert few.notes == ["no interval and no p: too few units (2 of 8)"]
    assert "stderr" in few.header
    assert largest_effects(frame(df.assign(small_gaps=0, mistaken=0), study="patch")).notes == []


def test_what_is_not_told_from_rounding_is_in_brackets() -> None:
    df = frame(made(block=[0, 1], head=[0, 1]).assign(noise_floor=1.5), study="patch")
    grid, top = effect_tables(df)
    assert [list(row[2:]) for row in grid.rows] == [["−0.20", "(−0.10)"], ["(0)", "(0.10)"]]
    assert grid.notes == ["(x): below the noise floor"]
    assert [row[3] for row in top.rows] == ["−0.20", "(−0.10)", "(0.10)"]


# ---- pictures --------------------------------------------------------------------------------------------------------


def words(ax: Axes) -> list[str]:
    return [ax.get_title(loc="left"), *(text.get_text() for text in ax.texts)]


def test_the_pictures_of_a_study_share_their_scale() -> None:
    df = made(block=[0, 1], head=[0, 1], role=["S2", "END"])
    drawn = dict(pictures(df))
    assert list(drawn) == ["recovered_S2", "recovered_END", "largest"]
    limits = {name: ax.images[0].get_clim()[1] for name, ax in drawn.items() if ax.images}
    assert set(limits.values()) == {0.5}
    assert words(drawn["recovered_END"])[0] == (
        f"Patch, denoise, {plots.symbol('O')}, at END: logit difference recovered, n = 12"
    )


def test_the_largest_cells_are_bars_with_intervals() -> None:
    df = made(block=[0, 1], head=[0, 1], role=["S2", "END"])
    low, high = df["recovered"] - 0.1, df["recovered"] + 0.1
    df = frame(df.assign(ci_low=low, ci_high=high, noise_floor=1.5), study="patch")
    _, given = plt.subplots()
    ax = largest(df, given, most=3)
    assert ax is given
    bars = list(ax.patches)
    assert [round(bar.get_width(), 2) for bar in bars] == [0.5, 0.4, 0.3]
    (lines,) = ax.collections
    assert [[round(x, 2) for x in path.vertices[:, 0]] for path in lines.get_paths()] == [
        [0.4, 0.6],
        [0.3, 0.5],
        [0.2, 0.4],
    ]
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels[0] == f"block 1, head 1, at END  {plots.symbol('O')}"
    assert "prompts: ioi · the 3 largest of 8 · lines: 95 % intervals · hatched: below the noise floor" in words(ax)
    every = largest(df)
    hatched = [round(bar.get_width(), 2) for bar in every.patches if bar.get_hatch()]
    assert sorted(hatched) == [-0.1, 0.1], "effects of -1 and 1; a zero has no bar"
    few = largest(frame(made(block=[0, 1]).assign(p_family="too few units (1 of 8)"), study="patch"))
    assert "prompts: ioi · no intervals: too few units (1 of 8)" in words(few)


def test_positions_are_named_and_a_dollar_is_no_mathematics() -> None:
    df = frame(made(block=[0], pos=[0, 1]).assign(token=["$", "Peru"]), study="patch")
    ax = largest(df)
    ax.figure.draw_without_rendering()
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == [f"block 0, at 0 \\$  {plots.symbol('O')}", f"block 0, at 1 Peru  {plots.symbol('O')}"]


def test_pictures_say_of_which_prompts_they_are() -> None:
    def notes(ax: Axes) -> str:
        return " · ".join(text.get_text() for text in ax.texts)

    df = made(tensor=["O"], block=[0, 1], head=[0, 1]).assign(prompts="the $ and the $")
    for ax in (plots.heatmap(df, y="block", x="head"), largest(df)):
        assert "prompts: the $ and the $" in notes(ax)
        ax.get_figure(root=True).canvas.draw()  # type: ignore[union-attr]
    two = pd.concat([df, df.assign(prompts="job")], ignore_index=True)
    two = two[two["block"] == 0]
    assert "prompts:" not in notes(plots.heatmap(two, y="prompts", x="head"))


def test_what_cannot_be_drawn_says_so() -> None:
    empty = largest(made(block=[0, 1])[:0])
    assert "no cell other than 0 to draw" in words(empty)[1]
    zeros = largest(frame(made(block=[0, 1]).assign(effect=0.0, recovered=0.0), study="patch"))
    assert "no cell other than 0 to draw" in words(zeros)[1]
    with pytest.raises(BadFrame, match="averages over prompts"):
        largest(made(block=[0], example=[0, 1]))
    two = frames.join(made(block=[0]), made(block=[0]).assign(metric="kl"))
    with pytest.raises(BadFrame, match="2 metrics; choose one"):
        largest(two)
    assert largest(two, metric="kl").patches
    by_prompt = dict(pictures(made(block=[0, 1], role=["S2", "END"], example=[0, 1])))
    assert list(by_prompt) == ["effects"]


# ---- from the shell --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ablate", "experts", "patch", "heads", "facts"])
def test_shipped_specs_say_what_they_would_cost(name: str) -> None:
    done = CliRunner().invoke(app, ["run", name, "--dry-run"])
    assert done.exit_code == 0, done.output
    header = done.stdout.splitlines()[1].split()
    assert header == ["unit", "with", "cells", "worlds", "forwards", "bytes", "seconds"]
    assert STUDIES[read(name).study].plan is not None


def test_ablate_goes_by_products_at_places_and_says_what_it_would_cost(tmp_path: Path) -> None:
    asked = ["ablate", "--task", "job", "--tensor", "O", "--how", "zero", "--metric", "kl"]
    runner = CliRunner()
    done = runner.invoke(app, [*asked, "--block", "3", "--by", "head", "--by", "role", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    df = frames.read(tmp_path / "ablation.parquet")
    assert len(df) == 4 * 3
    assert {path.name for path in tmp_path.glob("*.png")} == {"effects.png", "largest.png"}
    dry = runner.invoke(app, [*asked, "--by", "head", "--at", "END", "--dry-run"])
    assert dry.stdout.splitlines()[2].split()[:4] == ["1", "job", "16", "1,280"]
    exclude = runner.invoke(app, ["ablate", "--task", "job", "--how", "exclude", "--by", "expert", "--block", "2"])
    assert "control: the mean effect of other experts" in exclude.stdout
    assert runner.invoke(app, [*asked, "--by", "neuron"]).exit_code == 2
