"""Bars: how an effect splits by the routing, and the strongest tokens of a neuron, an expert or a direction."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from experiments.effects import changed, full
from experiments.frames import BadFrame, check_one
from experiments.plots import INK, SIZE, SMALL, SOFT, UNMEASURED, heading, nothing, short, symbol

RANKED = ("tensor", "block", "head", "expert", "feature", "metric")
"""The columns that tell rankings apart."""

MOST = 8
"""Rankings that are drawn without being asked for."""

BLUE, RED = "#2166ac", "#b2182b"
"""Above zero, and below."""


def split(df: pd.DataFrame, ax: Axes | None = None, *, metric: str | None = None, title: str | None = None) -> Axes:
    """The four parts of an effect that `experiments.routing.split` tells apart, with their intervals.

    Args:
        ax: where to draw; a new figure of notebook width without.
        metric: None: the frame's first.

    Raises:
        BadFrame: the frame lacks the metric, or is of several edits.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
    if not len(df):
        return nothing(ax, "no rows to draw")
    metric = metric or str(df["metric"].iloc[0])
    here = df[df["metric"] == metric]
    if len(here) != 4:
        raise BadFrame(f"an edit's effect on {metric} has four rows; the frame has {len(here)}: keep one edit.")
    names = ["in all", "routing frozen", "routing alone", "interaction"]
    here = full(here)
    values = here["effect"].astype(float).to_list()
    _bars(ax, values, [f"{name}   {short(value)}" for name, value in zip(names, values, strict=True)])
    if known := "ci_low" in here:
        low, high = (here[name].astype(float).to_list() for name in ("ci_low", "ci_high"))
        ax.hlines(range(4), low, high, color=INK, lw=1.2)
    unit = str(here["unit"].iloc[0])
    ax.set_xlabel(changed(here, metric) + (f" [{unit}]" if unit != "1" else ""), fontsize=SIZE)
    label = str(here["edit"].iloc[0])
    agreed = here["routing_agreement"].iloc[0]
    note = f"routing agreement {float(agreed):.2f}, n = {here['n'].max()}{'; lines: 95 % intervals' if known else ''}"
    heading(ax, f"{label[:1].upper()}{label[1:]}" if title is None else title, [note])
    return ax


def splits(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """A picture of each metric of a frame of `experiments.routing.split`, with a name for its file."""
    for i, metric in enumerate(df["metric"].unique()):
        yield f"split{i}", split(df, metric=metric)


def ranking(df: pd.DataFrame, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """The strongest tokens of one ranking of `experiments.top.top`, strongest first, each with what stands around it.

    Args:
        ax: where to draw; a new figure of notebook width without.

    Raises:
        BadFrame: the frame has several rankings, or is of several models or sets of texts.
    """
    check_one(df)
    if ax is None:
        _, ax = plt.subplots(figsize=(9, max(1.6, 0.24 * len(df) + 0.9)), layout="constrained")
    if not len(df) or df["value"].isna().all():
        return nothing(ax, "no token to draw")
    row = df.iloc[0].to_dict()
    for name in RANKED:
        if name in df and df[name].nunique(dropna=False) > 1:
            raise BadFrame(f"the frame ranks several things, by {name}: keep one.")
    values = [float(x) for x in df["value"]]
    _bars(ax, values, [str(context) for context in df["context"]])
    for at, value in enumerate(values):
        side = 1 if value >= 0 else -1
        ax.annotate(
            short(value),
            (value, at),
            (4 * side, 0),
            textcoords="offset points",
            va="center",
            ha="left" if side > 0 else "right",
            fontsize=SMALL,
            color=SOFT,
        )
    ax.set_xlabel(f"{symbol(str(row['tensor']))} at the token in brackets", fontsize=SIZE)
    where = [f"{name} {row[name]}" for name in ("block", "head", "expert", "feature") if isinstance(row.get(name), int)]
    heading(ax, f"Where it is {row['metric']}: {', '.join(where)}" if title is None else title, [str(row["prompts"])])
    return ax


def rankings(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """A picture of each of the first few rankings, with a name for its file."""
    names = [name for name in RANKED if name in df]
    for i, (_, part) in zip(range(MOST), df.groupby(names, sort=False, dropna=False, observed=True), strict=False):
        yield f"top{i}", ranking(part)


def _bars(ax: Axes, values: list[float], names: list[str]) -> None:
    """Horizontal bars from zero, the first on top."""
    ax.barh(
        range(len(values)), values, color=[BLUE if value >= 0 else RED for value in values], height=0.62, alpha=0.85
    )
    ax.axvline(0, color=SOFT, lw=0.8)
    ax.set_yticks(range(len(names)), names, fontsize=SMALL, color=INK)
    for label in ax.get_yticklabels():
        label.set_parse_math(False)  # a token may be a dollar
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.tick_params(labelsize=SMALL, length=0, colors=INK)
    ax.grid(axis="x", color=UNMEASURED, lw=0.8)
    ax.set_axisbelow(True)
    for side in ax.spines.values():
        side.set_visible(False)
