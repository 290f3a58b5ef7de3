"""Pictures of frames: each function takes a frame and an optional `Axes`, draws, and returns the `Axes`.

Labels come from the card (symbols) and the frame (metric, unit, tokens). Signed data is centred at zero; what was not
measured is grey, what was measured and has no value is crossed out, what is not told from rounding is hatched, and a
frame without rows says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, Normalize, to_rgb
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.text import Text

from experiments.effects import changed, told, where
from experiments.frames import COLUMNS, IDENTITY, BadFrame, check_one, tensors
from experiments.stats import below_floor
from probe.errors import nearest

DIVERGING, SEQUENTIAL = "RdBu", "Blues"
"""Red below zero, white at zero, blue above; the second for data that is never below."""

INK, SOFT, FAINT, UNMEASURED = "#22262b", "#6b7280", "#9ea4ad", "#e3e4e6"
"""Of text and outlines, of notes and wires, of hatching, and the fill of what was not measured."""

CROSSED, HATCHED = "xxxx", "////"
"""The marks of what has no value, and of what is not told from rounding."""

SIZE, SMALL, SYMBOL = 9.5, 8.0, 10.5
"""Font sizes in points, of text, notes and symbols."""

MATH = "dejavuserif"
"""The font of symbols: its strokes, hats and primes hold at screen resolution, which Computer Modern's don't."""

RESIDUAL = {"x_n": 0.0, "x_mid": 0.5, "x_next": 1.0}
"""The residual stream's three places in a block, with how far through it they stand."""

AXES = {
    "tensor": "",
    "block": "block",
    "pos": "position",
    "key": "key position",
    "role": "role",
    "head": "head",
    "expert": "expert",
    "token": "token",
    "example": "prompt",
    "prompts": "set of prompts",
    "group": "group",
    "feature": "feature",
    "alpha": "α",
    "sender": "sender",
    "receiver": "receiver",
}
"""The columns that an axis of a heat map may show, with their labels."""

NUMBERED, MOST_ROWS = ("pos", "key", "expert", "feature", "example"), 64
"""Axes that may be hundreds long, and with how many rows a picture stops to grow: then not every row has a label."""


# ---------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Cells:
    """One number a cell, out of a frame: ``table`` has the columns asked for, ``value`` and, if known, ``same_as`` and
    ``faint``, whether it is below the noise floor."""

    table: pd.DataFrame
    label: str
    noise: float

    @property
    def values(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The numbers, NaN where there is none."""
        return self.table["value"].to_numpy(dtype=float, na_value=np.nan)


def cells(df: pd.DataFrame, by: Sequence[str], *, value: str | None = None, metric: str | None = None) -> Cells:
    """The numbers to draw: column ``value`` (by default as `experiments.effects.told`) of one metric by some columns.

    Several prompts in a cell are averaged, over ``example`` alone: a plot never averages positions, heads or blocks.

    Raises:
        BadFrame: a column or a metric that the frame lacks, more than one metric or unit to choose from, rows of one
            cell that differ in more than the prompt, or a mean of what prompts recover, which says nothing.
    """
    for name in (*by, *([value] if value else []), "metric"):
        if name not in df:
            near = nearest(name, list(df.columns))
            raise BadFrame(f"the frame has no column {name!r}." + (f" Nearest: {', '.join(near)}." if near else ""))
    df, metric = of_metric(df, metric)
    value = value or told(df, by)
    by_prompt = "example" in df and "example" not in by
    if value == "recovered" and by_prompt:
        raise BadFrame("a mean of what prompts recover says nothing: measure without per_prompt, or draw by example.")
    if COLUMNS[value].dtype != "Float64" or value in IDENTITY:
        raise BadFrame(f"column {value!r} is {COLUMNS[value].meaning}: not a measurement to draw.")
    units = [str(unit) for unit in df["unit"].dropna().unique()] if "unit" in df else []
    if len(units) > 1:
        raise BadFrame(f"{metric} comes in {len(units)} units: {', '.join(units)}.")
    if {"effect", "noise_floor"} <= set(df) and not by_prompt:
        effect, floor = (df[name].to_numpy(dtype=float, na_value=np.nan) for name in ("effect", "noise_floor"))
        df = df.assign(faint=below_floor(effect, floor))
    groups = df.groupby(list(by), dropna=False, observed=True, sort=True)
    _check_alike(df, groups, by)
    keep = [name for name in ("same_as", "token", "role", "faint") if name in df and name not in by]
    table = groups.agg(**{"value": (value, "mean")}, **{name: (name, "first") for name in keep}).reset_index()
    band = df["noise_floor"].max() if "noise_floor" in df and value != "recovered" else pd.NA  # it is of the metric
    unit = f" [{units[0]}]" if units and units[0] != "1" and value != "recovered" else ""
    return Cells(table, _label(df, metric, value) + unit, float(band) if pd.notna(band) else 0.0)


def of_metric(df: pd.DataFrame, metric: str | None) -> tuple[pd.DataFrame, str]:
    """The rows of one metric, and its name; None: of the only one.

    Raises:
        BadFrame: the frame lacks it, or has several to choose from.
    """
    metrics = list(df["metric"].dropna().unique())
    if metric is not None and len(df) and metric not in metrics:
        raise BadFrame(f"the frame has no metric {metric!r}; it has {', '.join(metrics)}.")
    if metric is None and len(metrics) > 1:
        raise BadFrame(f"the frame has {len(metrics)} metrics; choose one with metric=: {', '.join(metrics)}.")
    metric = metric or (metrics[0] if metrics else "nothing measured")
    return df[df["metric"] == metric], metric


def _check_alike(df: pd.DataFrame, groups: Any, by: Sequence[str]) -> None:
    """Refuse rows of one cell that differ in more than the prompt."""
    follows = {"symbol", "step", "example", "metric", "unit"}  # what may differ between the rows of one cell
    follows |= {"group"} if "example" in df else set()
    follows |= {"token", "role"} if "pos" in by else {"token", "pos"} if "role" in by else set()
    for name in IDENTITY:
        if name in df and name not in by and name not in follows and (groups[name].nunique(dropna=False) > 1).any():
            some = ", ".join(str(x) for x in df[name].unique()[:4])
            raise BadFrame(f"rows of one cell differ in {name!r} ({some}): keep one, or put {name!r} on an axis.")
    if df.duplicated([*by, *(["example"] if "example" in df else [])]).any():
        raise BadFrame(f"several rows of one prompt in a cell by {', '.join(by)}: keep one of them.")


def _label(df: pd.DataFrame, metric: str, value: str) -> str:
    """What the numbers are, without their unit."""
    if value == "effect":
        return changed(df, metric)
    named = {"value": "{}", "base": "{} of the base", "recovered": "{} recovered"}
    return named.get(value, f"{{}}: {value.replace('_', ' ')}").format(metric.replace("_", " "))


@dataclass(frozen=True)
class Colours:
    """Number → colour: symmetric about zero where any number is negative, else from zero up."""

    cmap: Colormap
    norm: Normalize

    @classmethod
    def of(cls, values: np.ndarray[Any, Any], *, limit: float | None = None) -> Colours:
        """For these numbers; NaN and infinities don't count. ``limit``: the largest size with a colour of its own."""
        finite = values[np.isfinite(values)]
        most = limit if limit is not None else float(np.abs(finite).max(initial=0.0)) or 1.0
        signed = bool((finite < 0).any())
        cmap = mpl.colormaps[DIVERGING if signed else SEQUENTIAL]
        return cls(cmap, Normalize(-most if signed else 0.0, most))

    def fill(self, value: float) -> tuple[float, float, float]:
        """The colour of a number."""
        return to_rgb(self.cmap(float(np.clip(self.norm(value), 0.0, 1.0))))

    def ink(self, value: float) -> str:
        """The colour of text on it: dark on pale, white on dark."""
        red, green, blue = self.fill(value)
        return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else "white"

    def bar(self, cells: Cells, *, ratio: float = 1.0, **place: Any) -> Colorbar:
        """The colour bar with metric and unit, the noise floor a grey band; ``place`` goes to ``Figure.colorbar``."""
        values = cells.values[np.isfinite(cells.values)]
        over, under = (values > self.norm.vmax).any(), (values < self.norm.vmin).any()
        extend = {(True, True): "both", (True, False): "max", (False, True): "min"}.get(
            (bool(over), bool(under)), "neither"
        )
        host: Axes = place.get("ax") or place["cax"]
        figure = host.get_figure(root=True)
        assert figure is not None
        bar = figure.colorbar(ScalarMappable(self.norm, self.cmap), extend=extend, **place)
        tight = bar.orientation == "vertical" and figure.get_figheight() < 4
        bar.ax.yaxis.labelpad = bar.ax.xaxis.labelpad = 3 * ratio
        bar.set_label(cells.label.replace(" [", "\n[") if tight else cells.label, size=SIZE * ratio, color=INK)
        bar.ax.tick_params(labelsize=SMALL * ratio, colors=INK, length=2, pad=3 * ratio)
        bar.outline.set_visible(False)
        if cells.noise:
            span = bar.ax.axhspan if bar.orientation == "vertical" else bar.ax.axvspan
            span(max(-cells.noise, self.norm.vmin or 0.0), cells.noise, color=SOFT, alpha=0.45, lw=0)
        return bar


def short(value: float, *, signed: bool = False) -> str:
    """A number in at most five characters or so: ``−3.21``, ``0.04``, ``1.2e6``; nothing for NaN."""
    if not np.isfinite(value):
        return ""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 9999.5 or size < 0.005:
        text = f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    else:
        text = f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
    return ("+" if signed and value > 0 else "") + text.replace("-", "−")


def coincide(table: pd.DataFrame) -> dict[Any, int]:
    """Row of a table of cells → number of the group of tensors that it equals by construction.

    Groups are those of ``same_as``, followed to its end, within whatever columns tell cells apart besides the tensor. A
    row that equals no other has no number. Two rows of one place have one number exactly if they are equal; a group
    keeps its number from place to place as far as it has the same tensors.
    """
    if "same_as" not in table or "tensor" not in table or not len(table):
        return {}
    apart = [name for name in table.columns if name in AXES and name not in ("tensor", "token")]
    numbers: dict[Any, int] = {}
    known: list[set[str]] = []  # the tensors that have carried a number
    for _, part in table.sort_values("tensor").groupby(apart, dropna=False) if apart else [((), table)]:
        same = {str(t): str(s) for t, s in zip(part["tensor"], part["same_as"], strict=True) if pd.notna(s) and s != t}
        groups: dict[str, list[Any]] = {}
        for index, tensor in part["tensor"].items():
            root, seen = str(tensor), set[str]()
            while root in same and root not in seen:
                seen.add(root)
                root = same[root]
            groups.setdefault(root, []).append(index)
        free = set(range(len(known)))
        for members in groups.values():
            if len(members) < 2:
                continue
            names = set(part.loc[members, "tensor"].astype(str))
            number = max((k for k in free if known[k] & names), key=lambda k: len(known[k] & names), default=len(known))
            if number == len(known):
                known.append(set())
            known[number] |= names
            free.discard(number)
            numbers.update(dict.fromkeys(members, number + 1))
    return numbers


# ---------------------------------------------------------------- shared strokes


def symbol(name: str) -> str:
    """A tensor's symbol for Matplotlib, between dollars; a name that no card has as it is."""
    node = tensors().get(name)
    return mathtext(node.symbol) if node else name


def mathtext(latex: str) -> str:
    """LaTeX of the card for Matplotlib: between dollars, a prime as the superscript that LaTeX makes of it."""
    return (
        "$"
        + re.sub(r"'(?:\^\{?([a-zA-Z0-9]+)\}?)?", lambda m: rf"^{{\prime {m[1] or ''}}}".replace(" }", "}"), latex)
        + "$"
    )


def set_math(*texts: Text) -> None:
    """Set the symbols in these labels in the card's font and size."""
    for text in texts:
        text.set_math_fontfamily(MATH)
        text.set_fontsize(SYMBOL - 1)


def nothing(ax: Axes, why: str) -> Axes:
    """An empty picture that says why it is empty."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=SIZE, color=SOFT)
    return ax


def badge(ax: Axes, x: float, y: float, number: int, *, size: float = SMALL, beside: bool = False) -> None:
    """A numbered disc (none for 0): what carries one number is equal by construction.

    At a place in the data; ``beside`` the axes, x counts points from their left edge.
    """
    if not number:
        return
    shape = "circle,pad=0.14" if number < 10 else "round,pad=0.18,rounding_size=0.65"
    ax.annotate(
        str(number),
        (0, y) if beside else (x, y),
        (x, 0) if beside else (0, 0),
        xycoords=("axes fraction", "data") if beside else "data",
        textcoords="offset points",
        fontsize=size,
        color="white",
        ha="center",
        va="center",
        fontweight="bold",
        zorder=6,
        bbox={"boxstyle": shape, "facecolor": group_colour(number), "edgecolor": "white", "linewidth": 0.6},
    )


def group_colour(number: int) -> Any:
    """The colour of a group of equal cells: dark, apart from the colours of the fills."""
    palette = (
        *("#7a4e9e", "#b8620b", "#1b7f5c", "#8c2d56", "#5b6b12", "#36506b"),
        *("#a0522d", "#3f3f3f", "#0f7c8a", "#c23b6f", "#8a7300", "#4f5bd5"),
    )
    return palette[(number - 1) % len(palette)]


def heading(ax: Axes, title: str, notes: Sequence[str]) -> None:
    """A title above the axes at the left, and under it a line of notes."""
    ax.set_title(title, loc="left", fontsize=SIZE + 1.5, fontweight="bold", color=INK, pad=20 if notes else 8)
    if notes:
        ax.annotate(
            " · ".join(notes),
            (0, 1),
            (0, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=SMALL,
            color=SOFT,
            va="bottom",
            parse_math=False,  # a name of prompts may hold a dollar
        )


# ---------------------------------------------------------------- the pictures


def heatmap(
    df: pd.DataFrame,
    ax: Axes | None = None,
    *,
    y: str = "tensor",
    x: str = "block",
    value: str | None = None,
    metric: str | None = None,
    limit: float | None = None,
    numbers: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Effects as colours: one column of the frame down, another across.

    Args:
        df: rows of one metric, or of several with ``metric``.
        ax: where to draw; a new figure of notebook width without.
        y, x: columns for the two axes (see `AXES`). Positions are labelled with their tokens.
        value: the column to draw, in the metric's unit; see `cells`.
        limit: the largest size with a colour of its own (unit of the data); by default the largest there is.
        numbers: write each number into its cell; by default where cells are wide enough.

    Cells equal by construction (``same_as``) carry like discs; grey cells were not measured, crossed ones have no
    value, hatched ones are below the noise floor.

    Raises:
        BadFrame: see `cells`; an axis that is none; or positions of prompts of different shape on one axis.
    """
    for axis in (y, x):
        if axis not in AXES:
            raise BadFrame(f"no axis for {axis!r}; a heat map can show {', '.join(AXES)}.")
    if x == y:
        raise BadFrame(f"both axes show {x!r}.")
    picture = cells(df, (y, x), value=value, metric=metric)
    table = picture.table
    tokens = {axis: _tokens(df, axis) for axis in (x, y) if axis == "pos" and len(table)}
    rows, columns = (_levels(of_metric(df, metric)[0][axis]) for axis in (y, x))
    if ax is None:
        height = max(2.8, 0.175 * (min(len(rows), MOST_ROWS) if y in NUMBERED else len(rows)) + 1.4)
        _, ax = plt.subplots(figsize=(9, height), layout="constrained")
    if not len(table):
        return nothing(ax, f"no rows to draw ({picture.label})")
    grid = np.full((len(rows), len(columns)), np.nan)
    measured = np.zeros(grid.shape, dtype=bool)
    number_of = coincide(table)
    at = [(rows.index(_level(a)), columns.index(_level(b))) for a, b in zip(table[y], table[x], strict=True)]
    for cell, number in zip(at, picture.values, strict=True):
        grid[cell], measured[cell] = number, True
    colours = Colours.of(grid, limit=limit)
    ax.set_facecolor(UNMEASURED)
    ax.imshow(grid, cmap=colours.cmap, norm=colours.norm, aspect="auto", interpolation="nearest")
    lost, faint = measured & ~np.isfinite(grid), np.zeros(grid.shape, dtype=bool)
    faint[tuple(np.array(at).T)] = table.get("faint", False)
    _strike(ax, lost, facecolor="white", hatch=CROSSED)
    _strike(ax, faint & ~lost, facecolor="none", hatch=HATCHED)
    wide = len(columns) <= 9 if numbers is None else numbers
    if wide:
        for i, j in zip(*np.nonzero(np.isfinite(grid)), strict=True):
            ax.text(j, i, short(grid[i, j]), ha="center", va="center", fontsize=SMALL, color=colours.ink(grid[i, j]))
    _ticks(ax, rows, columns, y, x, tokens)
    if number_of:
        by_row: dict[int, dict[int, int]] = {}
        for index, (down, across) in zip(table.index, at, strict=True):
            by_row.setdefault(down, {})[across] = number_of.get(index, 0)
        _discs(ax, by_row, at_names=y == "tensor", wide=wide, small=len(columns) > 30)
    colours.bar(picture, ax=ax, pad=0.015, aspect=40, fraction=0.04)
    notes = of_prompts(df, (x, y)) + [
        note
        for note, there in (
            ("grey: not measured", not measured.all()),
            ("crossed: no value", bool(lost.any())),
            ("hatched: below the noise floor", bool(faint.any())),
            (
                f"alike discs: equal {'along a row' if x == 'tensor' else 'in a column'} by construction",
                bool(number_of),
            ),
            ("grey band in the colour bar: noise floor", bool(picture.noise)),
        )
        if there
    ]
    heading(ax, titled(df, picture, (x, y)) if title is None else title, notes)
    return ax


def _strike(ax: Axes, marked: np.ndarray[Any, Any], **how: Any) -> None:
    """Mark cells all over: all of them as one shape, since at 512 tokens a patch for each would take minutes."""
    edges = np.diff(np.pad(marked.astype(int), ((0, 0), (1, 1))))
    (rows, left), (_, right) = np.nonzero(edges > 0), np.nonzero(edges < 0)  # cells side by side are one rectangle
    if len(rows):
        x, y = np.stack([left, right, right, left, left], 1) - 0.5, rows[:, None] + np.array([-1, -1, 1, 1, -1]) / 2
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(rows)
        ax.add_artist(PathPatch(Path(np.stack([x, y], -1).reshape(-1, 2), codes), edgecolor=FAINT, lw=0, **how))


def _discs(ax: Axes, by_row: Mapping[int, Mapping[int, int]], *, at_names: bool, wide: bool, small: bool) -> None:
    """The numbered discs of equal cells; at a row's name where all of it has one; ``small``: dots of its colour."""
    dots: list[tuple[int, int, int]] = []
    for down, discs in by_row.items():
        if len(set(discs.values())) == 1 and at_names:
            ax.tick_params(axis="y", pad=17)
            badge(ax, -9, down, discs[min(discs)], beside=True)
        elif small:
            dots += [(across, down, number) for across, number in discs.items() if number]
        else:
            for across, number in discs.items():
                badge(ax, across - 0.4 if wide else across, down, number)
    if dots:
        x, y, numbers = zip(*dots, strict=True)
        ax.scatter(x, y, s=16, lw=0, color=[group_colour(number) for number in numbers])


def _level(x: Any) -> Any:
    return None if pd.isna(x) else x


def _levels(column: pd.Series[Any]) -> list[Any]:
    """The values of an axis in order: a category's order, numbers rising, words as they come; NA (all) last."""
    there = column.dropna()
    if isinstance(column.dtype, pd.CategoricalDtype):
        levels = [c for c in column.dtype.categories if (there == c).any()]
    elif pd.api.types.is_numeric_dtype(column.dtype):
        levels = sorted(there.unique())
    else:
        levels = list(dict.fromkeys(there))
    return [*levels, None] if column.isna().any() else levels


def _tokens(df: pd.DataFrame, axis: str) -> Mapping[Any, str]:
    """Position → its token; where prompts differ in it, its role.

    Raises:
        BadFrame: the prompts have other positions, or other roles at them: they share no axis.
    """
    shapes = {frozenset(part["pos"].dropna()) for _, part in df.groupby("example")} if "example" in df else set()
    if len(shapes) > 1:
        raise BadFrame("prompts of different length share no axis of positions: keep one example, or use 'role'.")
    labels: dict[Any, str] = {}
    for pos, part in df.groupby("pos"):
        for name in ("token", "role"):
            found = list(part[name].dropna().unique()) if name in part else []
            if len(found) == 1 and part[name].notna().all():
                labels[pos] = str(found[0])
                break
            if name == "role" and len(found) > 1:
                raise BadFrame(f"position {pos} has roles {', '.join(found)}: keep one group, or use 'role'.")
        else:
            labels[pos] = str(pos)
    return labels


def _ticks(
    ax: Axes, rows: list[Any], columns: list[Any], y: str, x: str, tokens: Mapping[str, Mapping[Any, str]]
) -> None:
    """Ticks and labels of both axes; symbols for tensors, tokens for positions."""

    def names(levels: list[Any], axis: str) -> list[str]:
        if axis == "tensor":
            return [symbol(str(level)) for level in levels]
        return ["all" if level is None else tokens.get(axis, {}).get(level, str(level)) for level in levels]

    across, down = names(columns, x), names(rows, y)
    every = 1 + (len(across) - 1) // (64 if x == "pos" else 32)
    shown = across[::every]
    tilt = 60 if x != "tensor" and max(map(len, shown)) * len(shown) > 90 else 0
    ax.set_xticks(
        range(0, len(across), every),
        shown,
        rotation=tilt,
        ha="right" if tilt else "center",
        rotation_mode="anchor",
    )
    thin = 1 + (len(down) - 1) // MOST_ROWS if y in NUMBERED else 1
    ax.set_yticks(range(0, len(down), thin), down[::thin])
    for label in (*ax.get_xticklabels(), *ax.get_yticklabels()):
        label.set_fontsize(SMALL + 0.5)
        label.set_color(INK)
    for axis, labels in ((x, ax.get_xticklabels()), (y, ax.get_yticklabels())):
        if axis == "tensor":
            set_math(*labels)
        else:
            for label in labels:
                label.set_parse_math(False)  # a token may be a dollar
    ax.tick_params(length=0)
    ax.set_xlabel(AXES[x], fontsize=SIZE, color=INK)
    ax.set_ylabel(AXES[y], fontsize=SIZE, color=INK)
    for side in ax.spines.values():
        side.set_visible(False)
    if len(columns) <= 64:
        ax.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="white", lw=0.8)
    ax.tick_params(which="minor", length=0)


def of_prompts(df: pd.DataFrame, shown: Sequence[str] = ()) -> list[str]:
    """A note: of which prompts a picture is, where it is of one set; by position of one shape, of which."""
    shape = "group" in df and "example" not in df and bool({"pos", "key"} & set(shown))
    for name in ("group", "prompts") if shape else ("prompts",):
        if name in df and name not in shown and len(names := df[name].dropna().unique()) == 1:
            return [f"prompts: {names[0]}"]
    return []


def titled(df: pd.DataFrame, picture: Cells, shown: Sequence[str]) -> str:
    """What the frame says of itself besides what is shown: the edit, of what, what was measured, over how many."""
    edits = [str(e) for e in df["edit"].dropna().unique()] if "edit" in df else []
    ways = list(df["direction"].dropna().unique()) if "direction" in df else []
    names = [] if "tensor" in shown or "tensor" not in df else list(df["tensor"].dropna().unique())
    what = [*(edits if len(edits) == 1 else []), *(ways if len(ways) == 1 else [])]
    what += [symbol(str(names[0]))] if len(names) == 1 else []
    what += [place] if edits and (place := where(df, shown)) else []
    n = df["n"].max() if "n" in df else df["example"].nunique() if "example" in df else 0
    label = picture.label.split(" [")[0]
    label = f"{', '.join(what)}: {label}" if what else label
    return label[:1].upper() + label[1:] + _base(df, picture) + (f", n = {n}" if pd.notna(n) and n > 1 else "")


def _base(df: pd.DataFrame, picture: Cells) -> str:
    """What the metric is without the edit, where that is one number: what all of a change would be."""
    if "change" not in picture.label:
        return ""
    bases = {round(float(base), 3) for base in df["base"].dropna()} if {"base", "effect"} <= set(df) else set()
    return f" from {short(bases.pop())}" if len(bases) == 1 and bases != {0.0} else ""


def norms(df: pd.DataFrame, ax: Axes | None = None, *, metric: str = "rms", title: str | None = None) -> Axes:
    """The size of the residual stream through the model, on a log axis: position 0 apart, the others as median and
    band.

    Args:
        df: rows by block and position of ``x_n``, ``x_mid``, ``x_next`` (those that there are).
        ax: where to draw; a new figure of notebook width without.
        metric: ``rms`` or ``l2``, in the unit of the activations.

    The band holds the middle 80 % of positions and prompts. Sizes of 0 or none can't stand on a log axis: a note
    counts them.

    Raises:
        BadFrame: the frame lacks the metric, its rows are not by position, or of several models or sets of prompts.
    """
    check_one(df)
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
    here = df[df["tensor"].astype(object).isin(list(RESIDUAL)) & df["block"].notna()] if "tensor" in df else df
    if not len(here):
        return nothing(ax, "no rows of the residual stream to draw")
    if metric not in set(here["metric"]):
        raise BadFrame(f"the frame has no metric {metric!r}; it has {', '.join(here['metric'].dropna().unique())}.")
    here = here[here["metric"] == metric]
    if "pos" not in here or here["pos"].isna().any():
        raise BadFrame("norms draws position 0 apart: it needs rows by position, none over all.")
    spot = here["block"].astype(float) + here["tensor"].astype(object).map(RESIDUAL).astype(float)
    size = here["value"].astype(float)
    good = np.isfinite(size) & (size > 0)
    if not good.any():
        return nothing(ax, "no size to draw: all are 0 or not finite")
    # x_next of a block and x_n of the next are one value at one spot: quantiles don't mind it twice
    first = here["pos"] == 0
    lines = {}
    for name, rows in (("first", good & first), ("rest", good & ~first)):
        lines[name] = (
            size[rows].groupby(spot[rows]).quantile(np.array([0.1, 0.5, 0.9])).unstack() if rows.any() else None
        )
    rest, apart = lines["rest"], lines["first"]
    blue, red = "#2166ac", "#b2182b"
    dots = 3.5 if spot.nunique() <= 32 else 0
    if rest is not None:
        ax.fill_between(rest.index, rest[0.1], rest[0.9], color=blue, alpha=0.18, lw=0)
        ax.plot(
            rest.index, rest[0.5], color=blue, lw=1.8, marker="o", ms=dots, label="other positions: median, middle 80 %"
        )
    if apart is not None:
        token = list(here.loc[first, "token"].dropna().unique()) if "token" in here else []
        named = f" ({token[0]})" if len(token) == 1 else ""
        ax.plot(apart.index, apart[0.5], color=red, lw=1.8, marker="s", ms=dots, label=f"position 0{named}")
    ax.set_yscale("log")
    stream_ticks(ax, sorted(set(spot)))
    units = list(here["unit"].dropna().unique()) if "unit" in here else []
    ax.set_ylabel(metric + (f" [{units[0]}]" if len(units) == 1 and units[0] != "1" else ""), fontsize=SIZE, color=INK)
    ax.tick_params(labelsize=SMALL, colors=INK)
    ax.grid(axis="y", color=UNMEASURED, lw=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    legend = ax.legend(frameon=False, fontsize=SIZE, loc="upper left")  # a stream grows: that corner is empty
    for text in legend.get_texts():
        text.set_parse_math(False)
    missing = int((~good).sum())
    heading(
        ax,
        "The residual stream through the blocks" if title is None else title,
        [f"{missing} sizes are 0 or missing and not drawn"] if missing else [],
    )
    return ax


def stream_ticks(ax: Axes, spots: list[float]) -> None:
    """The residual stream's own symbols: $x_0$, then a block's middle and end."""
    last = max(spots)
    every = max(1, round(last / 16))
    ticks = [s for s in spots if s % every == 0 or (s % 1 and every == 1)]
    into, middle = (tensors()[name].symbol for name in ("x_n", "x_mid"))
    ax.set_xticks(ticks, [mathtext((middle if s % 1 else into).replace("n", f"{{{int(s)}}}")) for s in ticks])
    set_math(*ax.get_xticklabels())
    ax.set_xlabel("residual stream: into a block, between attention and FFN, out of it", fontsize=SIZE, color=INK)
