"""The block diagram: the card's graph as boxes in streams, each filled by its effect.

The drawing is derived from the card. A row is a tensor's depth in the graph; the residual stream is the shortest way
through the block and runs straight down; a branch's streams stand side by side and each run of tensors keeps a column
of its own. The only facts placed by hand are which streams stand side by side (`LANES`) and the sizes of a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations, product
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.mathtext import MathTextParser
from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path as MplPath
from matplotlib.text import Text

from experiments import plots
from experiments.frames import BadFrame
from probe.card import Card

LANES: dict[str, tuple[str, ...]] = {
    "attention": ("query", "key", "value"),
    "ffn": ("router", "experts", "shared"),
}
"""Stream → the streams that it opens into, from left to right."""

PITCH, COLUMN, HEIGHT = 0.41, 1.5, 0.27
"""Distance of rows and of columns, height of a box; inches, as all sizes here."""

WIDTH, SCALE_WIDTH, LEAF_WIDTH = 1.04, 1.16, 0.2
"""Width of a box, of a norm scale's, and of a small input's."""

SPINE, FIRST = 0.66, 2.35
"""Where the residual stream runs, and the centre of the first column beside it."""


Point = tuple[float, float]
Way = tuple[Point, ...]


@dataclass(frozen=True)
class Box:
    """A tensor's place: its centre and size in inches, y upwards."""

    name: str
    x: float
    y: float
    width: float
    height: float

    def meets(self, a: Point, b: Point, margin: float = 0.0) -> bool:
        """Whether the upright or level line from a to b runs through the box."""
        return (
            min(a[0], b[0]) < self.x + self.width / 2 + margin
            and max(a[0], b[0]) > self.x - self.width / 2 - margin
            and min(a[1], b[1]) < self.y + self.height / 2 + margin
            and max(a[1], b[1]) > self.y - self.height / 2 - margin
        )


@dataclass(frozen=True)
class Wire:
    """An arrow along one data dependency, with the corners of its way."""

    source: str
    reader: str
    way: Way


@dataclass(frozen=True)
class Layout:
    """Where everything is: tensors, small inputs, arrows; `spine` names the residual stream from top to bottom."""

    boxes: dict[str, Box]
    inputs: dict[str, Box]
    wires: tuple[Wire, ...]
    spine: tuple[str, ...]
    width: float
    height: float


class _Graph:
    """The card's tensors with who reads whom, and what the drawing needs to know of each."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.names = card.hooked
        self.parents = {name: [need for need in self._needs(name) if need in self.names] for name in self.names}
        self.readers = {name: [row.name for row in card.readers(name)] for name in self.names}
        self.spine = self._spine()
        self.scales = {name for name in self.names if card.shape(name)[-1] == "1"}
        self.lanes = {side: hub for hub, sides in LANES.items() for side in sides if side in self._streams()}
        self.lanes |= {hub: hub for hub in LANES if hub in self._streams() and hub not in self.lanes.values()}

    def _needs(self, name: str) -> tuple[str, ...]:
        return self.card[name].needs if name in self.card else ()

    def _streams(self) -> set[str]:
        return {row.stream for row in self.card.values()}

    def stream(self, name: str) -> str:
        return self.card[name].stream if name in self.card else "residual"

    def _spine(self) -> tuple[str, ...]:
        """The shortest way from the block's input to its output: what only ever is added to."""
        ways: dict[str, tuple[str, ...]] = {}
        for name in self.names:
            ways[name] = (*min((ways[p] for p in self.parents[name]), key=len, default=()), name)
        return ways[self.names[-1]]

    def main(self, name: str) -> list[str]:
        """What a tensor reads besides scales and the residual stream."""
        return [p for p in self.parents[name] if p not in self.scales and p not in self.spine]

    def step(self, source: str, reader: str) -> int:
        """Rows between the two at least: a scale stands beside what it scales, an update beside the residual."""
        beside = source in self.scales or (reader in self.spine and source not in self.spine)
        return 0 if beside else 1

    def rows(self) -> dict[str, int]:
        """Name → row. As high as its sources allow; a tensor that is read once sinks to its reader."""
        row: dict[str, int] = {}
        for name in self.names:
            row[name] = max((row[p] + self.step(p, name) for p in self.parents[name]), default=0)
        for name in reversed(self.names):
            if len(self.readers[name]) == 1 and name not in self.spine:
                (reader,) = self.readers[name]
                row[name] = max(row[name], row[reader] - self.step(name, reader))
        return row

    def chains(self, stream: str) -> list[list[str]]:
        """The tensors of one stream in runs without a fork or a join."""
        inside = [n for n in self.names if self.stream(n) == stream and n not in self.scales]
        chains: list[list[str]] = []
        for name in inside:
            above = [p for p in self.parents[name] if p in inside]
            for chain in chains:
                if above == [chain[-1]] and [r for r in self.readers[chain[-1]] if r in inside] == [name]:
                    chain.append(name)
                    break
            else:
                chains.append([name])
        return chains


def _slots(graph: _Graph, row: Mapping[str, int], lane: str) -> tuple[int, list[tuple[list[str], int | None]]]:
    """How many columns a lane needs, and its runs of tensors with the column of each; None: alone, in the middle."""
    chains = graph.chains(lane)
    spans = []
    for chain in chains:  # a run takes its column from where its wire comes down
        above = max((row[p] + 1 for p in graph.parents[chain[0]]), default=row[chain[0]])
        spans.append(set(range(min(above, row[chain[0]]), row[chain[-1]] + 1)))
    slots: list[int | None] = []
    for i, span in enumerate(spans):
        rivals = [j for j, other in enumerate(spans) if j != i and span & other]
        taken = {slots[j] for j in rivals if j < i}
        slots.append(next(k for k in range(len(chains)) if k not in taken) if rivals else None)
    return max((slot + 1 for slot in slots if slot is not None), default=1), list(zip(chains, slots, strict=True))


def _columns(graph: _Graph, row: Mapping[str, int]) -> list[dict[str, float]]:
    """Every choice of columns for the tensors that stand in lanes: name → column, counted from 0."""
    branches = [[_slots(graph, row, lane) for lane, of in graph.lanes.items() if of == hub] for hub in LANES]
    widest = max(sum(count for count, _ in lanes) for lanes in branches)
    found: list[dict[str, float]] = [{}]
    for lanes in branches:
        choices = []
        for order in product(*(list(permutations(range(count))) for count, _ in lanes)):
            place: dict[str, float] = {}
            left = (widest - sum(count for count, _ in lanes)) / 2  # a narrow branch stands in the middle
            for (count, chains), swap in zip(lanes, order, strict=True):
                for chain, slot in chains:
                    at = left + ((count - 1) / 2 if slot is None else swap[slot])
                    place.update(dict.fromkeys(chain, at))
                left += count
            choices.append(place)
        found = [{**a, **b} for a, b in product(found, choices)]
    return found


def _across(graph: _Graph, columns: dict[str, float]) -> dict[str, float]:
    """Name → x of every tensor, once those in lanes have their columns."""
    x = {name: FIRST + COLUMN * column for name, column in columns.items()}
    x |= dict.fromkeys(graph.spine, SPINE)

    def opens_into(name: str) -> list[float]:
        """Where the lanes are that a tensor opens into."""
        nexts = [r for r in graph.readers[name] if r not in graph.spine and r not in graph.scales]
        return [x[r] for r in nexts if r in columns] or [at for r in nexts for at in opens_into(r)]

    for name in graph.names:
        if name in x or name in graph.scales:
            continue
        above = [p for p in graph.main(name) if graph.stream(p) == graph.stream(name)] or graph.main(name)
        x[name] = fmean([x[p] for p in above] if above else sorted(set(opens_into(name))))
        if not graph.readers[name]:
            x[name] += COLUMN  # a dead end steps aside
    for name in graph.scales:
        (reader,) = graph.readers[name]
        x[name] = x[reader] - (WIDTH + SCALE_WIDTH) / 2 - 0.2
    return x


@cache
def layout(card: Card) -> Layout:
    """The drawing of a block's card, in inches: rows by depth, columns with the least wire, arrows around the boxes.

    Raises:
        BadFrame: the card is not a block's.
    """
    graph = _Graph(card)
    if not graph.lanes:
        raise BadFrame(f"the diagram draws a block; the {card.kind} card has no attention and no FFN.")
    row = graph.rows()
    small = {
        leaf.name: [r.name for r in card.readers(leaf.name)]
        for leaf in card.leaves.values()
        if leaf.kind == "input" and not leaf.hook
    }

    def wire(x: dict[str, float]) -> float:
        long = sum(abs(x[p] - x[n]) for n in graph.names for p in graph.parents[n])
        return long + sum(abs(x[a] - x[b]) for names in small.values() for a, b in pairwise(names))

    x = min((_across(graph, columns) for columns in _columns(graph, row)), key=wire)
    deepest = max(row.values())

    def down(name: str) -> float:
        return PITCH * (deepest - row[name]) + PITCH / 2

    boxes = {n: Box(n, x[n], down(n), SCALE_WIDTH if n in graph.scales else WIDTH, HEIGHT) for n in graph.names}
    inputs = {}
    for name, readers in small.items():
        at = fmean(x[r] for r in readers) if len(readers) > 1 else x[readers[0]] - WIDTH / 2 - 0.35
        inputs[name] = Box(name, at, down(readers[0]), LEAF_WIDTH, LEAF_WIDTH)
    wires: list[Wire] = []
    pairs = [(p, n) for n in graph.names for p in graph.parents[n]]
    pairs += [(name, reader) for name, readers in small.items() for reader in readers]
    everything = {**boxes, **inputs}
    for source, reader in sorted(pairs, key=lambda p: _distance(everything[p[0]], everything[p[1]])):
        wires.append(_route(everything[source], everything[reader], everything.values(), wires))
    width = max(box.x + box.width / 2 for box in boxes.values()) + 0.25
    return Layout(boxes, inputs, tuple(wires), graph.spine, width, PITCH * (deepest + 1))


def _distance(a: Box, b: Box) -> float:
    return abs(a.x - b.x) + abs(a.y - b.y)


def _ways(a: Box, b: Box) -> Iterable[Way]:
    """Ways from a to b, plain ones first: level, straight down, by a level run under a or above b, round the side."""
    if abs(a.y - b.y) < 1e-6:
        side = 1 if b.x > a.x else -1
        yield ((a.x + side * a.width / 2, a.y), (b.x - side * b.width / 2, b.y))
        return
    top, bottom = b.y + b.height / 2, a.y - a.height / 2
    if abs(a.x - b.x) < 1e-6:
        yield ((a.x, bottom), (b.x, top))
    else:
        gap = PITCH - HEIGHT
        for share in (0.5, 0.3, 0.7):
            for level in (bottom - share * gap, top + share * gap):
                yield ((a.x, bottom), (a.x, level), (b.x, level), (b.x, top))
    for out in (0.13, 0.2, 0.3):
        for side in (-1, 1):
            edge = max(side * a.x + a.width / 2, side * b.x + b.width / 2) * side + side * out
            yield ((a.x + side * a.width / 2, a.y), (edge, a.y), (edge, b.y), (b.x + side * b.width / 2, b.y))


def _route(a: Box, b: Box, boxes: Iterable[Box], wires: Sequence[Wire]) -> Wire:
    """The way from a to b that runs through fewest boxes, then over fewest other wires."""
    others = [box for box in boxes if box not in (a, b)]

    def faults(way: Way) -> tuple[int, float, int]:
        through = sum(box.meets(p, q, 0.03) for p, q in pairwise(way) for box in others)
        own = [w for w in wires if w.source != a.name and w.reader != b.name]
        shared = sum(_overlap(p, q, r, s) for p, q in pairwise(way) for w in own for r, s in pairwise(w.way))
        crossings = sum(_cross(p, q, r, s) for p, q in pairwise(way) for w in own for r, s in pairwise(w.way))
        return through, round(shared, 6), crossings

    return Wire(a.name, b.name, min(_ways(a, b), key=faults))


def _overlap(p: Point, q: Point, r: Point, s: Point) -> float:
    """Length that two level or two upright lines share, near enough to look like one."""
    for along in (0, 1):
        across = 1 - along
        if max(abs(t[across] - p[across]) for t in (q, r, s)) < 0.03:
            return max(
                0.0,
                min(max(p[along], q[along]), max(r[along], s[along]))
                - max(min(p[along], q[along]), min(r[along], s[along])),
            )
    return 0.0


def _cross(p: Point, q: Point, r: Point, s: Point) -> bool:
    """Whether a level and an upright line cross."""
    if abs(p[0] - q[0]) < 1e-6:
        p, q, r, s = r, s, p, q
    level = abs(p[1] - q[1]) < 1e-6 and abs(r[0] - s[0]) < 1e-6
    return level and min(p[0], q[0]) < r[0] < max(p[0], q[0]) and min(r[1], s[1]) < p[1] < max(r[1], s[1])


# ---------------------------------------------------------------- drawing

TOP, BOTTOM = 0.46, 0.36
"""Room above the drawing for title and colour bar, below it for the legend; inches."""


def block_diagram(
    card: Card,
    values: pd.DataFrame | Mapping[str, float] | None = None,
    ax: Axes | None = None,
    *,
    block: int | None = None,
    value: str | None = None,
    metric: str | None = None,
    label: str = "value",
    limit: float | None = None,
    title: str | None = None,
) -> Axes:
    """The card as a picture: a box for every tensor, an arrow for every dependency, each box filled by its number.

    Args:
        card: which kind of block.
        values: a frame with rows by tensor, or numbers by tensor name; without, the boxes carry the card's step
            numbers.
        ax: where to draw; a new figure of notebook width without.
        block: the block to draw, where the frame has several.
        value, metric, limit: as for `plots.heatmap`.
        label: what the numbers are, with their unit, where they come as a mapping.
        title: above the picture; by default what the frame says of itself.

    Dashed grey boxes were not measured (``experts`` and ``delta_heads`` cannot be), crossed ones have no value, hatched
    ones are below the noise floor. Boxes with alike discs are equal by construction (``same_as``). Weights and
    constants are not drawn.

    Raises:
        BadFrame: a frame of several blocks, metrics or places without a choice, tensors that this card lacks, or a
            card that is not a block's.
    """
    plan = layout(card)
    picture = _picture(card, values, block=block, value=value, metric=metric, label=label)
    numbers = dict(zip(picture.table["tensor"].astype(str), picture.values, strict=True))
    groups = {str(picture.table.loc[i, "tensor"]): k for i, k in plots.coincide(picture.table).items()}
    faint = set(picture.table.loc[picture.table.get("faint", np.zeros(len(picture.table))).astype(bool), "tensor"])
    colours = plots.Colours.of(np.array(list(numbers.values()), dtype=float), limit=limit)

    top = plan.height + TOP
    height = top + BOTTOM
    if ax is None:
        figure = plt.figure(figsize=(plan.width, height))
        ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_axis_off()
    ax.set_xlim(0, plan.width)
    ax.set_ylim(-BOTTOM, top)
    ax.set_aspect("equal")
    ratio = _ratio(ax, plan.width, height)

    _panels(ax, card, plan, ratio)
    _arrows(ax, plan, ratio)
    for box in plan.inputs.values():
        ax.add_patch(
            Circle((box.x, box.y), box.width / 2, facecolor="white", edgecolor=plots.SOFT, lw=0.7 * ratio, zorder=4)
        )
        _text(ax, box.x, box.y, plots.mathtext(card.node(box.name).symbol), plots.SMALL * ratio, plots.SOFT)
    for box in plan.boxes.values():
        hatch = plots.HATCHED if box.name in faint else None
        _box(ax, card, box, numbers if values is not None else None, groups.get(box.name), colours, ratio, hatch)
    if values is not None:
        bar = ax.inset_axes((plan.width - 3.95, top - 0.29, 3.7, 0.13), transform=ax.transData)
        colours.bar(picture, ratio=ratio, cax=bar, orientation="horizontal")
    _words(
        ax,
        plan,
        title if title is not None else _title(card, values, block),
        numbers,
        groups,
        ratio,
        values is not None,
        bool(faint),
    )
    return ax


def _picture(
    card: Card,
    values: pd.DataFrame | Mapping[str, float] | None,
    *,
    block: int | None,
    value: str | None,
    metric: str | None,
    label: str,
) -> plots.Cells:
    """The numbers to draw, one a tensor."""
    if values is None or not isinstance(values, pd.DataFrame):
        given = dict(values or {})
        picture = plots.Cells(pd.DataFrame({"tensor": list(given), "value": list(given.values())}), label, 0.0)
    else:
        if block is not None and "block" in values:
            blocks = values["block"].dropna().unique()
            if len(values) and block not in blocks:
                raise BadFrame(f"the frame has no block {block}; it has {', '.join(map(str, sorted(blocks)))}.")
            values = values[values["block"] == block]
        elif "block" in values and values["block"].nunique() > 1:
            blocks = values["block"].dropna().unique()
            raise BadFrame(f"the frame has blocks {', '.join(map(str, sorted(blocks)))}: choose one with block=.")
        picture = plots.cells(values, ("tensor",), value=value, metric=metric)
    for name in picture.table["tensor"].dropna():
        if str(name) not in card.hooked:
            raise BadFrame(
                f"{name} is no tensor of a {card.kind} block: is this the card of the block that was measured?"
            )
    return picture


def _title(card: Card, values: pd.DataFrame | Mapping[str, float] | None, block: int | None) -> str:
    """What is drawn: the block, its kind, the edit."""
    if isinstance(values, pd.DataFrame) and block is None and "block" in values and values["block"].nunique() == 1:
        block = int(values["block"].dropna().iloc[0])
    edits = list(values["edit"].dropna().unique()) if isinstance(values, pd.DataFrame) and "edit" in values else []
    kind = f"{card.kind} block" if block is None else f"Block {block} ({card.kind})"
    kind = kind[:1].upper() + kind[1:]
    return f"{kind}: {edits[0]} each tensor" if len(edits) == 1 else kind


def _ratio(ax: Axes, width: float, height: float) -> float:
    """How large the drawing comes out on these axes, beside its own size: what fonts and lines follow."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    spot = ax.get_position()
    return float(min(figure.get_figwidth() * spot.width / width, figure.get_figheight() * spot.height / height))


def _panels(ax: Axes, card: Card, plan: Layout, ratio: float) -> None:
    """A pale ground and a name for each stream that has columns of its own."""
    graph = _Graph(card)
    for lane in graph.lanes:
        members = [box for box in plan.boxes.values() if graph.stream(box.name) == lane]
        scales = [box for box in members if box.name in graph.scales]
        main = [box for box in members if box not in scales]
        left, right = (pick(box.x + side * box.width / 2 for box in main) for pick, side in ((min, -1), (max, 1)))
        low, high = min(box.y for box in main), max(box.y for box in main)
        grounds = [(left, low, right, high)]
        grounds += [(box.x - box.width / 2, box.y, box.x + box.width, box.y) for box in scales]
        for x0, y0, x1, y1 in grounds:
            pad = (PITCH - HEIGHT) / 2 - 0.01
            box = FancyBboxPatch(
                (x0 - 0.1, y0 - HEIGHT / 2 - pad),
                x1 - x0 + 0.3,
                y1 - y0 + HEIGHT + 2 * pad,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=GROUND,
                edgecolor="none",
                zorder=0,
            )
            ax.add_patch(box)
        ax.text(
            right + 0.105,
            high + HEIGHT / 2,
            lane,
            rotation=270,
            fontsize=plots.SMALL * ratio,
            color=plots.SOFT,
            ha="center",
            va="top",
            zorder=1,
        )


def _arrows(ax: Axes, plan: Layout, ratio: float) -> None:
    """All wires, with round corners and a head each. What wires share is drawn once, or it would come out bolder."""
    lines: dict[tuple[bool, bool, float], list[tuple[float, float]]] = {}
    corners: dict[tuple[Point, ...], None] = {}
    for wire in plan.wires:
        thick = wire.source in plan.spine and wire.reader in plan.spine
        long, half = (0.1, 0.055) if thick else (0.07, 0.035)
        way = list(wire.way)
        ax.add_patch(
            Polygon(_head(way[-2], way[-1], long, half), facecolor=SPINE_INK if thick else WIRE_INK, lw=0, zorder=3)
        )
        way[-1] = _toward(way[-1], way[-2], long * 0.9)
        for before, corner, after in zip(way, way[1:], way[2:], strict=False):
            ends = [_toward(corner, end, min(0.06, _length(corner, end) / 2)) for end in (before, after)]
            corners[tuple((round(x, 6), round(y, 6)) for x, y in (ends[0], corner, ends[1]))] = None
        for i, (p, q) in enumerate(pairwise(way)):
            start = _toward(p, q, min(0.06, _length(p, q) / 2)) if i else p
            end = _toward(q, p, min(0.06, _length(p, q) / 2)) if i < len(way) - 2 else q
            upright = abs(p[0] - q[0]) < 1e-6
            low, high = sorted((start[upright], end[upright]))
            lines.setdefault((thick, upright, round(p[not upright], 6)), []).append((low, high))
    for (thick, upright, at), pieces in lines.items():
        for low, high in _merged(pieces):
            x, y = ((at, at), (low, high)) if upright else ((low, high), (at, at))
            ax.add_line(
                Line2D(
                    x,
                    y,
                    color=SPINE_INK if thick else WIRE_INK,
                    lw=(2.6 if thick else 0.9) * ratio,
                    solid_capstyle="butt",
                    snap=False,  # or it would part from the bends
                    zorder=2 + thick,
                )
            )
    for bend in corners:
        path = MplPath(bend, [MplPath.MOVETO, MplPath.CURVE3, MplPath.CURVE3])
        ax.add_patch(PathPatch(path, facecolor="none", edgecolor=WIRE_INK, lw=0.9 * ratio, capstyle="butt", zorder=2))


def _length(p: Point, q: Point) -> float:
    return abs(p[0] - q[0]) + abs(p[1] - q[1])


def _toward(p: Point, q: Point, far: float) -> Point:
    """The point ``far`` on the way from p to q."""
    share = far / (_length(p, q) or 1.0)
    return p[0] + (q[0] - p[0]) * share, p[1] + (q[1] - p[1]) * share


def _head(p: Point, q: Point, long: float, half: float) -> list[Point]:
    """The three corners of an arrow's head at q, coming from p."""
    foot = _toward(q, p, long)
    across = (half, 0.0) if abs(p[0] - q[0]) < 1e-6 else (0.0, half)
    return [q, (foot[0] + across[0], foot[1] + across[1]), (foot[0] - across[0], foot[1] - across[1])]


def _merged(pieces: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals, those that meet made one."""
    whole: list[tuple[float, float]] = []
    for low, high in sorted(pieces):
        if whole and low <= whole[-1][1] + 1e-6:
            whole[-1] = (whole[-1][0], max(whole[-1][1], high))
        else:
            whole.append((low, high))
    return whole


GROUND, SPINE_INK, WIRE_INK = "#f5f5f2", "#4b5563", "#8b919a"
"""Of the streams' ground, the residual stream, and all other wires."""


def _text(ax: Axes, x: float, y: float, text: str, size: float, colour: str, *, ha: str = "center") -> Text:
    drawn = ax.text(x, y, text, fontsize=size, color=colour, ha=ha, va="center", zorder=5)
    drawn.set_math_fontfamily(plots.MATH)
    return drawn


def _box(
    ax: Axes,
    card: Card,
    box: Box,
    numbers: Mapping[str, float] | None,
    group: int | None,
    colours: plots.Colours,
    ratio: float,
    hatch: str | None,
) -> None:
    """A tensor's box: its symbol, and its number or its step."""
    number = np.nan if numbers is None else numbers.get(box.name, np.nan)
    fill: Any = "white"
    ink, edge, dashed, aside = plots.INK, plots.INK, False, ""
    if numbers is None:
        aside = str(getattr(card.node(box.name), "number", None) or "")
    elif np.isfinite(number):
        fill, ink, aside = colours.fill(number), colours.ink(number), plots.short(number)
    elif box.name in numbers:
        edge, hatch = plots.SOFT, plots.CROSSED
    else:
        fill, ink, edge, dashed = plots.UNMEASURED, plots.SOFT, plots.SOFT, True
    ax.add_patch(
        FancyBboxPatch(
            (box.x - box.width / 2, box.y - box.height / 2),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.06",
            gid=box.name,
            facecolor=fill,
            edgecolor=plots.group_colour(group) if group else edge,
            lw=(1.9 if group else 0.8) * ratio,
            linestyle=(0, (3, 2)) if dashed else "-",
            hatch=hatch,
            zorder=4,
        )
    )
    symbol = plots.mathtext(card.node(box.name).symbol)
    room = box.width - 0.12 - (0.07 * len(aside) + 0.06 if aside else 0)
    size = max(plots.SMALL, min(plots.SYMBOL, plots.SYMBOL * room / _wide(symbol)))
    texts = [_text(ax, box.x - box.width / 2 + 0.06 + room / 2, box.y, symbol, size * ratio, ink)]
    if aside:
        colour = plots.SOFT if numbers is None else ink
        texts.append(_text(ax, box.x + box.width / 2 - 0.07, box.y, aside, plots.SMALL * ratio, colour, ha="right"))
    for text in texts if hatch else ():
        text.set_bbox({"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"})
    if group:
        plots.badge(ax, box.x - box.width / 2, box.y + box.height / 2 - 0.02, group, size=plots.SMALL * ratio)


@cache
def _wide(symbol: str) -> float:
    """The width of a symbol in inches, at the full size."""
    font = FontProperties(size=plots.SYMBOL, math_fontfamily=plots.MATH)
    return float(MathTextParser("path").parse(symbol, dpi=72, prop=font).width) / 72


def _words(
    ax: Axes,
    plan: Layout,
    title: str,
    numbers: Mapping[str, float],
    groups: Mapping[str, int],
    ratio: float,
    filled: bool,
    faint: bool,
) -> None:
    """The title above, and under the drawing what the marks mean."""
    ax.text(
        0.14,
        plan.height + TOP - 0.22,
        title,
        fontsize=(plots.SIZE + 2.5) * ratio,
        fontweight="bold",
        color=plots.INK,
        ha="left",
        va="center",
    )
    notes = []
    if filled and any(name not in numbers for name in plan.boxes):
        notes.append("dashed grey: not measured")
    if any(not np.isfinite(number) for number in numbers.values()):
        notes.append("crossed: no value")
    if faint:
        notes.append("hatched: below the noise floor")
    if groups:
        notes.append("alike discs: equal by construction")
    if not filled:
        notes.append("small figures: the card's step numbers")
    notes.append("thick: the residual stream")
    ax.text(
        0.14, -BOTTOM / 2, " · ".join(notes), fontsize=plots.SMALL * ratio, color=plots.SOFT, ha="left", va="center"
    )
