"""Pictures of `experiments.probes`: what is read out of the tensors at one place, and what the controls give there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from experiments.frames import BadFrame, tensors
from experiments.plots import (
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
    stream_ticks,
    symbol,
)

MOST = 6
"""Tensors that can be told apart as lines; more make a heat map."""

CONTROLS = {"shuffled": ("shuffled labels", ":"), "random": ("random weights", "--"), "tokens": ("bag of tokens", "-.")}
"""Control → its name, and how its lines are drawn."""

_BEFORE_FFN = list(tensors()).index("x_mid")


def pictures(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """A picture for each set of prompts and place, with a name for its file: lines, or a heat map of many tensors."""
    for (prompts, source, place), part in df.groupby(["prompts", taught_by(df), places(df)], sort=False):
        name = re.sub(r"\W+", "_", f"{prompts} {place} {'test' if source else ''}".strip())
        itself = part[kinds(part) == ""]
        if itself["tensor"].nunique() <= MOST:
            yield name, probes(part)
        else:
            yield name, heatmap(itself, value="value", title=_title(itself))


def probes(df: pd.DataFrame, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """What is read at one place, a line for each tensor through the blocks, and its controls in the same colour.

    Args:
        df: of `experiments.probes.probes`, one set of prompts and one place: ``df[df["role"] == "END"]``.
        ax: where to draw; a new figure of notebook width without.

    The residual stream is one line. Bands are 95 % intervals; the star is the best cell, on the groups set aside.

    Raises:
        BadFrame: several models, sets of prompts, places, labels, probes or seeds.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
    if not df["tensor"].notna().any():
        return nothing(ax, "no probes to draw")
    apart = {name: df[name] for name in ("model", "prompts", "label", "probe", "seed")}
    for name, column in {"place": places(df), "source": taught_by(df), **apart}.items():
        if column.nunique() > 1:
            raise BadFrame(f"the frame has several of {name} ({', '.join(map(str, column.unique()))}): keep one.")
    cells = df[df["tensor"].notna()]
    names = cells["tensor"].astype(object)
    cells = cells.assign(spot=_spots(cells), line=names.where(~names.isin(list(RESIDUAL)), "x_n"))
    for i, (line, part) in enumerate(cells.groupby("line", sort=False), 1):
        _line(ax, part.sort_values("spot"), str(line), group_colour(i))
    _levels(ax, df)
    stream_ticks(ax, sorted({x for spot in cells["spot"] for x in (spot // 0.5 * 0.5, -(-spot // 0.5) * 0.5)}))
    ax.set_xlabel(
        "through the blocks: $x$ into a block, between attention and FFN, out of it", fontsize=SIZE, color=INK
    )
    metric = str(df["metric"].iloc[0])
    ax.set_ylabel("r²" if metric == "r2" else metric, fontsize=SIZE, color=INK)
    ax.tick_params(labelsize=SMALL, colors=INK, length=2)
    ax.grid(axis="y", color=UNMEASURED, lw=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    set_math(*ax.legend(frameon=False, fontsize=SIZE, loc="center left", bbox_to_anchor=(1, 0.5)).get_texts())
    heading(ax, _title(df) if title is None else title, of_prompts(df))
    return ax


def _line(ax: Axes, part: pd.DataFrame, name: str, colour: Any) -> None:
    """One tensor: the probe with its interval, its star, and its controls."""
    kind = kinds(part)
    itself, star = part[kind == ""], part[kind == "held out"]
    label = f"{mathtext('x')}, the residual stream" if name == "x_n" else symbol(name)
    ax.plot(itself["spot"], _numbers(itself, "value"), color=colour, lw=1.8, marker="o", ms=3.5, label=label)
    if {"ci_low", "ci_high"} <= set(itself):
        low, high = (_numbers(itself, end) for end in ("ci_low", "ci_high"))
        ax.fill_between(itself["spot"], low, high, color=colour, alpha=0.15, lw=0)
    for held, (_, style) in CONTROLS.items():
        rows = part[kind == held]
        ax.plot(rows["spot"], _numbers(rows, "value"), color=colour, lw=1.1, ls=style)
    if len(star):
        ax.plot(star["spot"], _numbers(star, "value"), "*", color=colour, ms=13, mec="white")


def _levels(ax: Axes, df: pd.DataFrame) -> None:
    """What has no tensor: the bag of tokens and the commonest label; and the legend of all that has no colour."""
    kind = kinds(df)
    for value in _numbers(df[kind == "tokens"], "value"):
        ax.axhline(value, color=SOFT, lw=1.1, ls=CONTROLS["tokens"][1])
    ax.axhline(_numbers(df, "base").mean(), color=SOFT, lw=0.8)
    for held, (name, style) in CONTROLS.items():
        if (kind == held).any():
            ax.plot([], [], color=SOFT, lw=1.1, ls=style, label=name)
    guess = "the mean" if df["metric"].iloc[0] == "r2" else "the commonest label"
    ax.plot([], [], color=SOFT, lw=0.8, label=guess)
    if (kind == "held out").any():
        ax.plot([], [], "*", color=SOFT, ms=13, mec="white", label="best, on groups\nthat were set aside")


def _spots(cells: pd.DataFrame) -> pd.Series[float]:
    """How far through the blocks a tensor stands: attention's a quarter through its block, the FFN's three quarters."""
    order = {name: 0.25 if i < _BEFORE_FFN else 0.75 for i, name in enumerate(tensors())}
    return cells["block"].astype(float) + cells["tensor"].astype(object).map({**order, **RESIDUAL}).astype(float)


def _numbers(df: pd.DataFrame, column: str) -> pd.Series[float]:
    return df[column].astype(float)


def places(df: pd.DataFrame) -> pd.Series[str]:
    """Each row's place: its role, or its position."""
    pos = df["pos"].astype("string") if "pos" in df else pd.Series(pd.NA, df.index, dtype="string")
    return df["role"].fillna(pos) if "role" in df else pos


def taught_by(df: pd.DataFrame) -> pd.Series[str]:
    """The prompts that each row's probe was fitted to, where those are others than it read."""
    return df["source"].fillna("") if "source" in df else pd.Series("", df.index, dtype="string")


def kinds(df: pd.DataFrame) -> pd.Series[str]:
    """What each row is: empty for a probe, else the control, or ``held out``."""
    given = [df[name] for name in ("against", "group") if name in df]
    nothing = pd.Series(pd.NA, df.index, dtype="string")
    return pd.concat([*given, nothing], axis=1).bfill(axis=1).iloc[:, 0].fillna("")


def _title(df: pd.DataFrame) -> str:
    row = df.iloc[0].to_dict()
    fitted = f", fitted to {source}" if (source := taught_by(df).iloc[0]) else ""
    return f"{row['label']} at {places(df).iloc[0]} ({row['probe']}{fitted}), n = {df['n'].max()}"
