"""Pictures of `experiments.steer`: what doses do to the prompts, and beside it what they do to plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from experiments.effects import changed
from experiments.frames import BadFrame, check_one
from experiments.plots import INK, SIZE, SMALL, SOFT, UNMEASURED, group_colour, heading, nothing, symbol

APART = ("model", "prompts", "block", "tensor", "head", "expert", "edit", "role", "pos", "when", "seed")
"""What tells one curve of doses from another, but for the metric."""


def pictures(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """Of each metric of the prompts a picture, with plain text beside it, and a name for its file."""
    doses = df[df["alpha"].notna()] if len(df) else df
    if not len(doses):
        return
    steered, aside = doses[doses["when"].notna()], doses[doses["when"].isna()]
    for metric in steered["metric"].unique():
        _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
        dose(steered, left, metrics=[metric])
        dose(aside, right, title=f"Plain text, every position (n = {aside['n'].max()})")
        yield re.sub(r"\W+", "_", f"steer_{metric}"), left


def dose(
    df: pd.DataFrame, ax: Axes | None = None, *, metrics: Sequence[str] | None = None, title: str | None = None
) -> Axes:
    """The change of one or several metrics of one unit, a line each, against the dose.

    Args:
        df: of `experiments.steer.steer`, one steering of one set of prompts.
        ax: where to draw; a new figure without.
        metrics: None: all that the frame has.

    Shades about lines are 95 % intervals; the dashed lines and paler bands are what random directions of equal norm do,
    mean ± 2 standard deviations.

    Raises:
        BadFrame: a metric that the frame lacks; several units, steerings or sets of prompts.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
    here = df[df["alpha"].notna()] if "alpha" in df else df[:0]
    if metrics is not None and (lacking := [metric for metric in metrics if metric not in set(here["metric"])]):
        raise BadFrame(
            f"the frame has no doses of {lacking[0]}; it has {', '.join(here['metric'].unique()) or 'none'}."
        )
    here = here if metrics is None else here[here["metric"].isin(list(metrics))]
    if not len(here):
        return nothing(ax, "no doses to draw")
    check_one(here, ("unit", *APART))
    for i, (metric, part) in enumerate(here.groupby("metric", sort=False), 1):
        _curve(ax, part.sort_values("alpha"), str(metric).replace("_", " "), group_colour(i))
    _axes(ax, here)
    row = here.iloc[0].to_dict()
    there = "".join(f" at {row[name]}" for name in ("role", "pos") if pd.notna(row.get(name)))
    heading(ax, f"{row['prompts']}{there}, n = {here['n'].max()}" if title is None else title, [str(row["edit"])])
    return ax


def _curve(ax: Axes, part: pd.DataFrame, name: str, colour: object) -> None:
    """One metric and its control, through the base at 0."""
    names = ("effect", "ci_low", "ci_high", "control", "spread")
    numbers = part.reindex(columns=["alpha", *names]).astype(float)  # too few prompts have no interval
    numbers = pd.concat([numbers, pd.DataFrame([dict.fromkeys(numbers, 0.0)])]).sort_values("alpha")
    x, effect, low, high, control, spread = (numbers[name] for name in ("alpha", *names))
    ax.fill_between(x, control - 2 * spread, control + 2 * spread, color=colour, alpha=0.12, lw=0)
    ax.plot(x, control, color=colour, lw=1.1, ls="--")
    ax.fill_between(x, low, high, color=colour, alpha=0.3, lw=0)
    ax.plot(x, effect, color=colour, lw=1.8, marker="o", ms=3.5, label=name)


def _axes(ax: Axes, here: pd.DataFrame) -> None:
    """Labels with units, a legend, zero marked."""
    row = here.iloc[0].to_dict()
    block = "" if pd.isna(row["block"]) else f" of block {row['block']}"
    ax.set_xlabel(f"α, in multiples of the rms of {symbol(str(row['tensor']))}{block}", fontsize=SIZE, color=INK)
    one = here["metric"].nunique() == 1
    what = changed(here, str(row["metric"])) if one else "change"
    ax.set_ylabel(what + (f" [{row['unit']}]" if row["unit"] != "1" else ""), fontsize=SIZE, color=INK)
    ax.plot([], [], color=SOFT, lw=1.1, ls="--", label="random directions, mean ± 2 sd")
    for text in ax.legend(frameon=False, fontsize=SMALL, loc="best").get_texts():
        text.set_parse_math(False)
    ax.axhline(0, color=SOFT, lw=0.8)
    ax.tick_params(labelsize=SMALL, colors=INK, length=2)
    ax.grid(color=UNMEASURED, lw=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
