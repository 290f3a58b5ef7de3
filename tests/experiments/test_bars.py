"""Bars: what they show is what the frame holds."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments import bars
from experiments.frames import BadFrame, frame


@pytest.fixture(autouse=True)
def _closed() -> None:
    plt.close("all")


def effects(metric: str = "logit_difference") -> pd.DataFrame:
    parts = {"zero O": -4.0, "zero O frozen": -3.0, "the routing of: zero O": 1.5, "interaction": -2.5}
    rows = [
        {
            "metric": metric,
            "unit": "logits",
            "edit": edit,
            "effect": effect,
            "ci_low": effect - 1,
            "ci_high": effect + 1,
        }
        for edit, effect in parts.items()
    ]
    return frame([{**row, "routing_agreement": 0.5, "n": 9, "prompts": "job"} for row in rows], study="routing")


def ranked(feature: int = 17) -> pd.DataFrame:
    words = [("<bos> works ⟦as⟧ a", 2.5), ("costs ⟦$⟧ 5 $", 1.0), ("say ⟦no⟧", -0.5)]
    rows = [
        {"metric": "largest", "unit": "1", "tensor": "h", "block": 0, "feature": feature, "example": i, "pos": 1}
        | {"context": context, "value": value, "prompts": "job"}
        for i, (context, value) in enumerate(words)
    ]
    return frame(rows, study="top")


def widths(ax: Axes) -> list[float]:
    return [bar.get_width() for bar in ax.patches]


def labels(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def test_a_split_shows_its_four_parts_with_intervals() -> None:
    ax = bars.split(effects())
    assert widths(ax) == [-4.0, -3.0, 1.5, -2.5]
    assert [label.split("   ") for label in labels(ax)] == [
        ["in all", "−4.00"],
        ["routing frozen", "−3.00"],
        ["routing alone", "1.50"],
        ["interaction", "−2.50"],
    ]
    (lines,) = ax.collections
    assert [segment[:, 0].tolist() for segment in lines.get_segments()] == [
        [-5, -3],
        [-4, -2],
        [0.5, 2.5],
        [-3.5, -1.5],
    ]
    assert ax.get_xlabel() == "change of logit difference [logits]"
    assert ax.get_title(loc="left") == "Zero O"


def test_a_split_of_several_metrics_is_asked_for_one() -> None:
    both = pd.concat([effects(), effects("kl").assign(effect=lambda df: df["effect"] * 2)], ignore_index=True)
    ax = bars.split(both, metric="kl")
    assert widths(ax) == [-8.0, -6.0, 3.0, -5.0]
    assert ax.get_xlabel() == "change of kl [logits]"
    from_zero = both[both["metric"] == "kl"].assign(base=0.0)
    assert bars.split(from_zero).get_xlabel() == "kl [logits]", "a distance from the base is a change already"
    with pytest.raises(BadFrame, match="has 0: keep one edit"):
        bars.split(both, metric="rank")
    with pytest.raises(BadFrame, match="has 8: keep one edit"):
        bars.split(pd.concat([effects(), effects()]))


def test_a_ranking_shows_contexts_as_they_are_and_the_first_on_top() -> None:
    ax = bars.ranking(ranked())
    assert widths(ax) == [2.5, 1.0, -0.5]
    assert labels(ax) == ["<bos> works ⟦as⟧ a", "costs ⟦$⟧ 5 $", "say ⟦no⟧"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert ax.get_title(loc="left") == "Where it is largest: block 0, feature 17"
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.canvas.draw()  # dollars are no formula


def test_several_rankings_are_drawn_apart() -> None:
    both = pd.concat([ranked(17), ranked(3)], ignore_index=True)
    with pytest.raises(BadFrame, match="several things, by feature"):
        bars.ranking(both)
    made = dict(bars.rankings(both))
    assert list(made) == ["top0", "top1"]
    assert [ax.get_title(loc="left")[-10:] for ax in made.values()] == ["feature 17", " feature 3"]
    many = pd.concat([ranked(i) for i in range(12)], ignore_index=True)
    assert len(dict(bars.rankings(many))) == bars.MOST


@pytest.mark.parametrize("draw", [bars.split, bars.ranking])
def test_an_empty_frame_says_so(draw: object) -> None:
    ax = draw(effects()[:0])  # type: ignore[operator]
    assert "to draw" in ax.texts[0].get_text()
