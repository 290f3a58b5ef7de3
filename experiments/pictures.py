"""Pictures of studies on disk: saving them, and which ones a frame makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from experiments import plots
from probe.files import replacing
from probe.headers import expanded

DPI = 110


def save(ax: Axes, path: str | Path) -> Path:
    """Write the figure that axes stand in, and let go of it.

    Raises:
        BadPath: it can't be written.
    """
    path = expanded(path)
    figure = ax.get_figure(root=True)
    assert figure is not None, "axes that a picture returns stand in a figure"
    try:
        with replacing(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=DPI)
    finally:
        plt.close(figure)
    return path


def head_maps(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """Heat maps of a frame of scores, block by head: the share of content, what content and position alone would leave
    of the patterns, and the kinds of head; each with a name for its file."""
    edits = df["edit"].fillna("") if "edit" in df else pd.Series("", df.index)
    shown = (edits == "") | ((df["metric"] == "overlap") & (edits != "zero Q"))
    for (metric, edit), part in df[shown].groupby(["metric", edits[shown]], sort=False):
        name = "_".join([str(metric), *str(edit).split()])
        yield name, plots.heatmap(part, y="block", x="head", limit=1.0)


def size_maps(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """Pictures of a frame of norms: the residual stream through the blocks, and what heads give to position 0."""
    yield "norms", plots.norms(df)
    if len(sinks := df[df["metric"] == "sink"]):
        title = "Attention to position 0, the mean over later queries"
        yield "sinks", plots.heatmap(sinks, y="block", x="head", limit=1.0, title=title)


def load_maps(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """Heat maps of a frame of routing, by expert: how far loads are from even, and of several sets how far from what
    tokens predict. Of one set by block; of several a picture a block, set by set."""
    several = df["prompts"].nunique() > 1
    for metric, what in {"load": "less an even share", "load_given_token": "less what tokens predict"}.items():
        here = df[df["metric"] == metric]
        if not several and len(here):
            yield metric, plots.heatmap(here, y="block", x="expert", title=f"Load, {what}", numbers=False)
        for block in here["block"].unique() if several else ():
            part, title = here[here["block"] == block], f"Load, {what}: block {block}"
            yield f"{metric}_block{block}", plots.heatmap(part, y="prompts", x="expert", title=title, numbers=False)


def comparison_maps(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """Heat maps of two models: weights by block, sizes relative to the first model's, loads by expert."""
    if not len(df):
        return
    inside = df[df["block"].notna()]
    whole = inside[inside["expert"].isna()] if "expert" in df else inside
    yield "weights", plots.heatmap(whole, metric="relative_change", title=f"Weights: {df['model'].iloc[0]}")
    sizes = whole[(whole["metric"] == "rms") & whole["pos"].isna()] if "pos" in df else whole[:0]
    if len(sizes):
        shares = sizes.assign(effect=sizes["effect"] / sizes["base"])
        yield "sizes", plots.heatmap(shares, title=f"Sizes, as a share of the first model's: {df['model'].iloc[0]}")
    loads = inside[inside["metric"] == "load"]
    if len(loads):
        title = f"Loads of experts: {df['model'].iloc[0]}"
        yield "loads", plots.heatmap(loads, y="block", x="expert", title=title, numbers=False)
