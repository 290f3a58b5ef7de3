"""Pictures of ablations and patches: heat maps of their cells, and the largest cells with their intervals."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from experiments.effects import keys, layout, place_name, told
from experiments.frames import BadFrame
from experiments.plots import (
    HATCHED,
    INK,
    SIZE,
    SMALL,
    SOFT,
    UNMEASURED,
    Colours,
    cells,
    heading,
    heatmap,
    nothing,
    of_metric,
    of_prompts,
    set_math,
    symbol,
    titled,
)


def pictures(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """The first metric of an ablation or of patches, each picture with a name for its file: heat maps, laid out as
    `experiments.effects.layout` says, and the largest cells."""
    if not len(df):
        return
    here = df[df["metric"] == df["metric"].iloc[0]]
    lies, name = layout(here), told(here)
    sizes = here[name].abs().replace(np.inf, np.nan)
    most = sizes.max()
    limit = float(most) if pd.notna(most) and most > 0 else None  # one scale for all, to hold them against each other
    for label, part in lies.split(here):
        file = "_".join(filter(None, ("effects" if name == "effect" else name, label)))
        yield file, heatmap(part, y=lies.down, x=lies.across, limit=limit)
    if "example" not in here:
        yield "largest", largest(here)


def largest(
    df: pd.DataFrame, ax: Axes | None = None, *, metric: str | None = None, most: int = 16, title: str | None = None
) -> Axes:
    """The largest cells as bars, with their intervals; cells that equal earlier ones by construction are left out.

    Args:
        ax: where to draw; a new figure of notebook width without.
        metric: of a frame that has several.
        most: how many cells.

    What is below the noise floor is hatched.

    Raises:
        BadFrame: a metric that the frame lacks, or several to choose from; rows by prompt.
    """
    if "example" in df:
        raise BadFrame("the largest cells are averages over prompts: measure without per_prompt.")
    own, metric = of_metric(df[df["same_as"].isna()] if "same_as" in df else df, metric)
    by = keys(own) if len(own) else ["block", "tensor"]
    picture = cells(own, by, metric=metric)
    sizes = picture.table["value"].abs()
    top = picture.table.loc[sizes[sizes > 0].sort_values(ascending=False, kind="stable").index[:most]]
    if ax is None:
        _, ax = plt.subplots(figsize=(9, max(1.8, 0.24 * len(top) + 1.1)), layout="constrained")
    if not len(top):
        return nothing(ax, f"no cell other than 0 to draw ({picture.label})")
    _bars(ax, top, [_named(row, by) for row in top.to_dict("records")])
    if {"ci_low", "ci_high"} <= set(own):
        ends = own.merge(top[by], on=by, how="right")[["ci_low", "ci_high"]].astype(float)
        ax.hlines(range(len(top)), ends["ci_low"], ends["ci_high"], color=INK, lw=1.2)
    ax.set_xlabel(picture.label, fontsize=SIZE, color=INK)
    notes = of_prompts(own) + _notes(own, picture.table, len(top))
    heading(ax, titled(own, picture, by) if title is None else title, notes)
    return ax


def _bars(ax: Axes, top: pd.DataFrame, names: Sequence[str]) -> None:
    """A bar for each row, the first on top."""
    colours = Colours.of(np.array([-1.0, 1.0]))
    values = [float(value) for value in top["value"]]
    drawn = ax.barh(range(len(top)), values, color=[colours.fill(0.7 if x >= 0 else -0.7) for x in values], height=0.66)
    for bar, faint in zip(drawn, top.get("faint", [False] * len(top)), strict=True):
        bar.set(hatch=HATCHED if faint else None, edgecolor=SOFT, lw=0)
    ax.axvline(0, color=INK, lw=0.8)
    ax.set_yticks(range(len(top)), names)
    ax.invert_yaxis()
    set_math(*ax.get_yticklabels())
    ax.tick_params(labelsize=SMALL, colors=INK, length=0)
    ax.grid(axis="x", color=UNMEASURED, lw=0.8)
    ax.set_axisbelow(True)
    for side in ax.spines.values():
        side.set_visible(False)


def _named(row: Mapping[Hashable, Any], parts: Sequence[str]) -> str:
    """A cell in words, its tensor last."""
    words = []
    for name in (name for name in parts if name != "tensor" and pd.notna(row[name])):
        which = place_name(row) if name == "pos" else shorten(str(row[name]), 24, placeholder=" …")
        words.append(" ".join(filter(None, ({"role": "at", "pos": "at", "group": ""}.get(name, name), which))))
    return f"{', '.join(words)}  ".replace("$", r"\$") + symbol(str(row["tensor"]))


def _notes(df: pd.DataFrame, table: pd.DataFrame, drawn: int) -> list[str]:
    notes = [f"the {drawn} largest of {len(table)}"] if drawn < len(table) else []
    if {"ci_low", "ci_high"} <= set(df):
        notes.append("lines: 95 % intervals")
    elif "p_family" in df:
        notes.append("no intervals: " + ", ".join(sorted(df["p_family"].dropna().unique())))
    return [*notes, *(["hatched: below the noise floor"] if "faint" in table and table["faint"].any() else [])]
