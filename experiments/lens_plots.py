"""Pictures of `experiments.lens`: how the answer comes about through the blocks, and which parts add up to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from experiments.effects import full
from experiments.frames import BadFrame, tensors
from experiments.plots import (
    DIVERGING,
    INK,
    RESIDUAL,
    SIZE,
    SMALL,
    SOFT,
    UNMEASURED,
    group_colour,
    heading,
    heatmap,
    mathtext,
    nothing,
    of_prompts,
    set_math,
    short,
    stream_ticks,
)


def pictures(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """All pictures of a frame of `experiments.lens.lens`, each with a name for its file: by position heat maps of the
    stream out of the blocks, by role lines."""
    for metric in df["metric"].unique():
        if "pos" in df:
            yield metric, heatmap(df[df["tensor"] == "x_next"], y="block", x="pos", metric=metric)
        else:
            yield metric, lens(df, metric=metric)


def lens(df: pd.DataFrame, ax: Axes | None = None, *, metric: str | None = None, title: str | None = None) -> Axes:
    """A metric of the residual stream through the blocks, a line for each role, with its interval.

    Args:
        df: of `experiments.lens.lens`, by role. Other tensors than the residual stream are not drawn.
        ax: where to draw; a new figure of notebook width without.
        metric: None: the first that the frame has.

    The dashed line is the model's own output. Ranks are on a log axis, the first on top.

    Raises:
        BadFrame: a metric or roles that the frame lacks, or several rows of one place and role.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
    here = full(df[df["tensor"].astype(object).isin(list(RESIDUAL)) & df["block"].notna()])
    if not len(here):
        return nothing(ax, "no rows of the residual stream to draw")
    there = list(here["metric"].unique())
    metric = metric or there[0]
    if metric not in there or "role" not in here:
        raise BadFrame(f"the frame has no metric {metric!r} by role; its metrics are {', '.join(there)}.")
    here = _average(here[here["metric"] == metric], ["block", "tensor", "role"])
    if not np.isfinite(here["value"].to_numpy(dtype=float, na_value=np.nan)).any():
        return nothing(ax, f"no {metric.replace('_', ' ')} to draw: none is finite")
    here = here.assign(spot=here["block"].astype(float) + here["tensor"].astype(object).map(RESIDUAL).astype(float))
    for i, (role, part) in enumerate(here.groupby("role", sort=False), 1):
        _line(ax, part.sort_values("spot"), group_colour(i), str(role))
    stream_ticks(ax, sorted(set(here["spot"])))
    if metric == "rank":
        ax.set_yscale("log")
        ax.invert_yaxis()
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    unit, name = here["unit"].iloc[0], metric.replace("_", " ")
    _axes(ax, (f"{name} from the output" if metric == "kl" else name) + (f" [{unit}]" if unit != "1" else ""))
    for text in ax.legend(frameon=False, fontsize=SIZE, loc="best").get_texts():
        text.set_parse_math(False)
    held = "frozen" in here and here["frozen"].notna().all()
    scale = "of the last place" if held else "each place's own"
    notes = [*of_prompts(here), f"final norm's scale: {scale}", "dashed: the output"]
    heading(ax, f"Logit lens: {name}{_n(here)}" if title is None else title, notes)
    return ax


def _line(ax: Axes, part: pd.DataFrame, colour: Any, role: str) -> None:
    x, value = part["spot"], part["value"].astype(float)
    if {"ci_low", "ci_high"} <= set(part):
        low, high = (part[name].astype(float) for name in ("ci_low", "ci_high"))
        ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    ax.plot(x, value, color=colour, lw=1.8, marker="o", ms=3.5 if len(part) <= 32 else 0, label=role)
    ax.axhline(part["base"].astype(float).iloc[0], color=colour, lw=0.9, ls="--")


def direct(df: pd.DataFrame, ax: Axes | None = None, *, most: int = 14, title: str | None = None) -> Axes:
    """The largest parts of a logit difference as bars, in the order in which the model adds them, with intervals; then
    all others together, and the whole.

    Args:
        df: of `experiments.lens.direct`.
        ax: where to draw; a new figure of notebook width without.
        most: how many parts have a bar of their own.

    Raises:
        BadFrame: several rows of one part.
    """
    if not len(df):
        return nothing(plt.subplots(figsize=(9, 2.8))[1] if ax is None else ax, "no parts to draw")
    df = _average(full(df), ["block", "tensor", *(name for name in ("head", "expert") if name in df)])
    own = df.loc[df["value"].abs().sort_values(ascending=False).index[:most]].sort_index()
    rest, whole = df["value"].drop(own.index), df["base"].astype(float).iloc[0]
    names = [_part(row) for row in own.to_dict("records")]
    values = own["value"].astype(float).to_list()
    if len(rest):
        names.append(f"the other {len(rest)} together")
        values.append(float(rest.astype(float).sum()))
    names, values = [*names, "all"], [*values, whole]
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 0.24 * len(names) + 1.3), layout="constrained")
    ends = mpl.colormaps[DIVERGING]
    colours = [ends(0.15 if value < 0 else 0.85) for value in values]
    y = range(len(names))
    ax.barh(y, values, color=[*colours[:-1], SOFT], height=0.72)
    if {"ci_low", "ci_high"} <= set(own):
        ax.hlines(y[: len(own)], own["ci_low"].astype(float), own["ci_high"].astype(float), color=INK, lw=1.2)
    ax.axvline(0, color=INK, lw=0.8)
    ax.set_yticks(y, names)
    ax.invert_yaxis()
    set_math(*ax.get_yticklabels())
    unit, name = df["unit"].iloc[0], df["metric"].iloc[0].replace("_", " ")
    _axes(ax, f"what it adds to the {name} [{unit}]", across=True)
    said = f"The parts of the {name}, {short(whole)} in all{_n(df)}"
    gap = short(whole - float(df["value"].sum()), signed=True)
    heading(ax, said if title is None else title, ["given the final norm's scale", f"left by rounding: {gap}"])
    return ax


def _part(row: dict[Any, Any]) -> str:
    """What a part is called: its block, its symbol, its head or expert."""
    symbol = tensors()[str(row["tensor"])].symbol
    if pd.isna(row["block"]):
        return f"embedding {mathtext(symbol)}"
    which = "".join(f", {name} {row[name]}" for name in ("head", "expert") if pd.notna(row.get(name)))
    return f"block {row['block']}{which}  {mathtext(symbol)}"


def _average(df: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """One row a cell: rows by prompt averaged, without an interval.

    Raises:
        BadFrame: the rows of a cell differ in more than the prompt.
    """
    if df.duplicated([*by, *(["example"] if "example" in df else [])]).any():
        raise BadFrame(f"several rows of one {', '.join(by)}: keep one model, set of prompts, role and scale.")
    if "example" not in df:
        return df
    n = df["example"].nunique()
    means = df.groupby(list(by), dropna=False, observed=True, sort=False)[["value", "base"]].mean().reset_index()
    common = {name: df[name].iloc[0] for name in ("metric", "unit", "frozen") if name in df}
    return means.assign(n=n, **common)


def _n(df: pd.DataFrame) -> str:
    return f", n = {df['n'].max()}" if df["n"].max() > 1 else ""


def _axes(ax: Axes, label: str, *, across: bool = False) -> None:
    """The label of the axis of values, a grid along it, and no frame."""
    (ax.set_xlabel if across else ax.set_ylabel)(label, fontsize=SIZE, color=INK)
    ax.tick_params(labelsize=SMALL, colors=INK, length=2)
    ax.grid(axis="x" if across else "y", color=UNMEASURED, lw=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
