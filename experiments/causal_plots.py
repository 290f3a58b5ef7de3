"""Pictures of `experiments.paths`, `experiments.circuit` and `experiments.attribution`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from experiments.attribution import agreement, paired
from experiments.effects import full, gaps
from experiments.frames import BadFrame, check_one
from experiments.plots import INK, SIZE, SMALL, SOFT, UNMEASURED, heading, heatmap, nothing, short, symbol

BLUE, ORANGE, RED = "#2166ac", "#d1731c", "#b2182b"
"""Of what is as it should be, of flipped choices, and of losses."""

PALE = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5}
"""Behind text that stands on lines."""

NAMED = 4
"""Cells that a scatter names: those that disagree most."""


def _one(df: pd.DataFrame, metric: str | None) -> pd.DataFrame:
    """The rows of one metric, averaged over prompts.

    Raises:
        BadFrame: the frame lacks the metric, is by prompt, or of several models or sets of prompts.
    """
    check_one(df)
    names = list(df["metric"].dropna().unique())
    if metric is not None and metric not in names:
        raise BadFrame(f"the frame has no metric {metric!r}; it has {', '.join(names)}.")
    if "example" in df:
        raise BadFrame("the frame is by prompt; these pictures are of averages.")
    return df[df["metric"] == (metric or names[0])] if names else df


def _unit(df: pd.DataFrame) -> str:
    """A metric's name and unit, for an axis."""
    row = df.iloc[0]
    return str(row["metric"]).replace("_", " ") + (f" [{row['unit']}]" if row["unit"] != "1" else "")


def _numbers(df: pd.DataFrame, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A column as numbers, NaN throughout where there is none: of few prompts there are no intervals."""
    return np.asarray(df[name].to_numpy(dtype=float, na_value=np.nan) if name in df else np.full(len(df), np.nan))


def _axes(ax: Axes | None, height: float, width: float = 9.0) -> Axes:
    return plt.subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax


def _plain(ax: Axes, axis: Any = "both") -> None:
    """A light grid behind the data, and no frame."""
    ax.tick_params(labelsize=SMALL, length=0, colors=INK)
    ax.grid(axis=axis, color=UNMEASURED, lw=0.8)
    ax.set_axisbelow(True)
    for side in ax.spines.values():
        side.set_visible(False)


# ---- paths -----------------------------------------------------------------------------------------------------------


def paths(df: pd.DataFrame, ax: Axes | None = None, *, metric: str | None = None, title: str | None = None) -> Axes:
    """Paths as colours: a sender down, a receiver across; the share of the source's effect that comes that way.

    Args:
        df: of `experiments.paths.paths`.
        ax: where to draw; a new figure of notebook width without.
        metric: None: the frame's first.

    Raises:
        BadFrame: see `experiments.plots.heatmap`.
    """
    here = _one(df, metric)
    if not len(here):
        return nothing(_axes(ax, 2.8), "no paths to draw")
    ordered = {
        name: pd.Categorical(here[name], list(dict.fromkeys(here[name])), ordered=True)
        for name in ("sender", "receiver")
    }
    if title is None:
        held = {"all": "all between held", "attn": "heads between held", "none": "nothing held"}[here["hold"].iloc[0]]
        where = f"{here['direction'].iloc[0]}, n = {here['n'].max()}"
        title = f"Paths ({held}): {_unit(here).split(' [')[0]} recovered; {where}"
    value = "recovered" if "recovered" in here else "effect"
    return heatmap(full(here).assign(**ordered), ax, y="sender", x="receiver", value=value, title=title)


# ---- circuits --------------------------------------------------------------------------------------------------------


def circuits(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """The three pictures of a circuit, each with a name for its file."""
    for name, draw in (("faithfulness", faithfulness), ("minimality", minimality), ("completeness", completeness)):
        yield name, draw(df)


def faithfulness(
    df: pd.DataFrame, ax: Axes | None = None, *, metric: str | None = None, title: str | None = None
) -> Axes:
    """A circuit's faithfulness with its interval, and below it that of each random set, most faithful first.

    Args:
        df: of `experiments.circuit.circuit`.
        ax: where to draw; a new figure of notebook width without.
        metric: None: the frame's first.
    """
    here = _tested(df, metric, "faithfulness")
    ax = _axes(ax, max(1.8, 0.22 * len(here) + 1.2))
    if np.isnan(_numbers(here, "recovered")).all():
        return nothing(ax, "no faithfulness to draw")
    random = here["against"].notna().to_numpy() if "against" in here else np.zeros(len(here), bool)
    sets = here.iloc[np.lexsort((-_numbers(here, "recovered"), random))]
    share, low, high = (_numbers(sets, name) for name in ("recovered", "ci_low", "ci_high"))
    high[np.isinf(high)] = np.nan
    colours = [BLUE, *[SOFT] * (len(sets) - 1)]
    ax.hlines(range(len(sets)), low, high, color=colours, lw=1.6)
    ax.scatter(share, range(len(sets)), color=colours, s=28, zorder=3)
    for at in np.flatnonzero(np.isfinite(share)):
        end, text = (np.fmax(share, high)[at], at), short(share[at])
        ax.annotate(text, end, (6, 0), textcoords="offset points", va="center", fontsize=SMALL, color=INK, bbox=PALE)
    for x in (0, 1):
        ax.axvline(x, color=SOFT, lw=0.8, ls="--")
    size = str(sets["kept"].iloc[0]).count(", ") + 1
    named = f"circuit ({size} node{'s' if size > 1 else ''})"
    ax.set_yticks(range(len(sets)), [named, *["random set"] * (len(sets) - 1)])
    ax.set_ylim(len(sets) - 0.5, -0.5)
    ax.set_xlabel(f"share of the {_unit(here).split(' [')[0]} that is left", fontsize=SIZE, color=INK)
    _plain(ax, "x")
    notes = [
        "dashed: all ablated, and the whole model",
        *(["some intervals have no end"] if np.isinf(low).any() else []),
    ]
    heading(ax, _about(here, "Faithfulness") if title is None else title, notes)
    return ax


def minimality(
    df: pd.DataFrame, ax: Axes | None = None, *, metric: str | None = None, title: str | None = None
) -> Axes:
    """What a circuit loses without each of its nodes, most needed first, with intervals.

    Args:
        df: of `experiments.circuit.circuit`.
        ax: where to draw; a new figure of notebook width without.
        metric: None: the frame's first.
    """
    here = _tested(df, metric, "minimality")
    here = here.iloc[np.argsort(-np.abs(_numbers(here, "effect")), kind="stable")]
    ax = _axes(ax, max(1.8, 0.22 * len(here) + 1.2))
    if np.isnan(_numbers(here, "effect")).all():
        return nothing(ax, "no node to take out")
    effect, low, high = (_numbers(here, name) for name in ("effect", "ci_low", "ci_high"))
    ax.barh(range(len(here)), effect, height=0.62, color=[RED if x < 0 else BLUE for x in effect], alpha=0.85)
    ax.hlines(range(len(here)), low, high, color=INK, lw=1.2)
    ax.axvline(0, color=SOFT, lw=0.8)
    ax.set_yticks(range(len(here)), list(here["removed"]))
    ax.set_ylim(len(here) - 0.5, -0.5)
    ax.set_xlabel(f"change of {_unit(here)} without the node", fontsize=SIZE, color=INK)
    _plain(ax, "x")
    notes = [f"the circuit itself: {short(_numbers(here, 'base')[0])}"]
    heading(ax, _about(here, "Minimality") if title is None else title, notes)
    return ax


def completeness(
    df: pd.DataFrame, ax: Axes | None = None, *, metric: str | None = None, title: str | None = None
) -> Axes:
    """The whole model without some of a circuit's nodes against the circuit without them: on the line, it is complete.

    Args:
        df: of `experiments.circuit.circuit`.
        ax: where to draw; a new figure without.
        metric: None: the frame's first.
    """
    here = _tested(df, metric, "completeness")
    ax = _axes(ax, 4.2, 5.2)
    whole, own = _numbers(here, "base"), _numbers(here, "value")
    if np.isnan(whole + own).all():
        return nothing(ax, "no nodes to take out")
    all_of, one = (here["removed"] == here["kept"]).to_numpy(), ~here["removed"].str.contains(", ").to_numpy(dtype=bool)
    kinds = {"one node": one & ~all_of, "a random half": ~one & ~all_of, "the whole circuit": all_of}
    for (name, rows), colour, mark in zip(kinds.items(), (BLUE, ORANGE, INK), "os*", strict=True):
        if rows.any():
            ax.scatter(
                whole[rows], own[rows], s=60 if mark == "*" else 26, color=colour, marker=mark, label=f"without {name}"
            )
    _diagonal(ax, [*whole, *own])
    ax.set_xlabel(f"whole model without them: {_unit(here)}", fontsize=SIZE, color=INK)
    ax.set_ylabel("circuit without them", fontsize=SIZE, color=INK)
    _plain(ax)
    ax.legend(frameon=False, fontsize=SMALL, loc="upper left")
    heading(ax, _about(here, "Completeness") if title is None else title, ["on the line: complete"])
    return ax


def _tested(df: pd.DataFrame, metric: str | None, test: str) -> pd.DataFrame:
    """The rows of one test of a circuit; none of a frame without rows, which has no such column."""
    here = _one(df, metric)
    return here[here["test"] == test] if "test" in here else here[:0]


def _about(df: pd.DataFrame, what: str) -> str:
    row = df.iloc[0]
    return f"{what} ({row['edit']}), {row['prompts']}, n = {df['n'].max()}"


def _diagonal(ax: Axes, values: list[float]) -> None:
    """Where two numbers are equal; both axes over the same range."""
    there = np.array(values)[np.isfinite(values)]
    low, high = (float(there.min()), float(there.max())) if len(there) else (0.0, 1.0)
    room = 0.06 * ((high - low) or 1.0)
    ax.plot([low - room, high + room], [low - room, high + room], color=SOFT, lw=0.8, ls="--", zorder=0)
    ax.set_xlim(low - room, high + room)
    ax.set_ylim(low - room, high + room)


# ---- attribution -----------------------------------------------------------------------------------------------------


def attributions(df: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """A scatter of each kind of estimate against the patches, with a name for its file; none without patches."""
    if "edit" not in df or not (df["edit"] == "patch").any():
        return
    for kind in df.loc[df["edit"] != "patch", "edit"].unique():
        yield "_".join(str(kind).replace(",", "").split()), scatter(df, kind=str(kind))


def scatter(df: pd.DataFrame, ax: Axes | None = None, *, kind: str = "attribution", title: str | None = None) -> Axes:
    """Estimates against the patches that they estimate, a point a cell; flipped choices of experts in their own colour.

    Args:
        df: of `experiments.attribution.attribute`, with patches.
        ax: where to draw; a new figure without.
        kind: which estimates, a value of ``edit``.

    The cells that disagree most are named. Dashed: the two are equal.

    Raises:
        BadFrame: there are no such estimates, or no patches.
    """
    if not len(df):
        return nothing(_axes(ax, 4.6, 5.6), "no estimates to draw")
    pairs, numbers = paired(df), agreement(df)
    if kind not in set(pairs["edit"]):
        raise BadFrame(f"the frame has no estimates by {kind!r}; it has {', '.join(pairs['edit'].unique())}.")
    pairs, numbers = pairs[pairs["edit"] == kind], numbers[numbers["edit"] == kind]
    ax = _axes(ax, 4.6, 5.6)
    for flipped, colour, name in ((False, BLUE, "routing as it was"), (True, ORANGE, "some choices flipped")):
        part = pairs[pairs["flipped"] == flipped]
        if len(part):
            ((count, r),) = numbers.loc[numbers["flipped"] == flipped, ["cells", "correlation"]].to_numpy().tolist()
            label = f"{name}: {count:.0f} cell{'s' * (count != 1)}" + (f", r = {r:.2f}" if np.isfinite(r) else "")
            ax.scatter(part["estimate"], part["patch"], s=16, color=colour, alpha=0.65, lw=0, label=label)
    _diagonal(ax, [*pairs["estimate"], *pairs["patch"]])
    _name_worst(ax, pairs)
    unit = _unit(df)
    ax.set_xlabel(f"estimate of the change of {unit}", fontsize=SIZE, color=INK)
    ax.set_ylabel("change by the patch itself", fontsize=SIZE, color=INK)
    _plain(ax)
    left = gaps(df).get(kind)
    ax.legend(
        frameon=False,
        fontsize=SMALL,
        loc="lower right",
        title=left and f"left over the embedding: {left}",
        title_fontsize=SMALL,
    )
    lost = int(numbers["missing"].sum())
    notes = [f"{lost} cells lack a patch or an estimate"] if lost else []
    row = df.iloc[0]
    notes = [f"{row['prompts']}, {row['direction']}, n = {df['n'].max()}", *notes]
    what = f"{kind[:1].upper()}{kind[1:]}, and patches"
    heading(ax, what if title is None else title, notes)
    return ax


def _name_worst(ax: Axes, pairs: pd.DataFrame) -> None:
    """Labels for the cells that disagree most, of those that lie together for one; where fewer points are beneath."""
    there = pairs.dropna(subset=["patch", "estimate"])
    far = (there["patch"] - there["estimate"]).abs().sort_values(ascending=False, kind="stable").index
    names = [name for name in ("head", "expert", "role", "pos", "key", "feature") if name in pairs]
    (left, right), high = ax.get_xlim(), 0.05 * np.ptp(ax.get_ylim())
    wide = 0.35 * (right - left)
    named: list[tuple[float, float]] = []
    for row in there.loc[far].to_dict("records"):
        x, y = row["estimate"], row["patch"]
        if len(named) == NAMED:
            break
        if any(abs(x - a) < 1.2 * wide and abs(y - b) < high for a, b in named):
            continue
        named.append((x, y))
        beside = there[(there["patch"] - y).abs() < high / 2]["estimate"] - x
        before, behind = beside.between(-wide, 0, "neither").sum(), beside.between(0, wide, "neither").sum()
        ahead = x + wide < right and (behind <= before or x - wide < left)
        crowd = beside[beside.abs() < wide / 5]  # the point itself among them; the label stands past them
        parts = "".join(f", {name} {row[name]}" for name in names if pd.notna(row[name]))
        ax.annotate(
            f"{symbol(row['tensor'])} of block {row['block']}{parts}",
            (x + (crowd.max() if ahead else crowd.min()), y),
            (7 if ahead else -7, -3),
            textcoords="offset points",
            ha="left" if ahead else "right",
            fontsize=SMALL,
            color=SOFT,
            bbox=PALE,
            zorder=0.9,
        )
