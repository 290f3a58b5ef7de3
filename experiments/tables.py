"""Tables as text: of the card, of parameters, and short ones of what a study found.

On a terminal they fit its width; anywhere else (a pipe, a file) columns are aligned by spaces and nothing is cut or
folded.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.options import By, Kind
from probe import KIMI_K2, Dims, account, around, card
from probe.card import Card, Leaf, Step, plain
from probe.params import Part

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Table:
    """A title, a header, rows of words, and notes below; ``right`` names the columns of numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()
    notes: Sequence[str] = ()

    def print(self) -> None:
        """To stdout, as a terminal or as a pipe likes it."""
        if sys.stdout.isatty():
            self._rich()
        else:
            print(self)
        print()

    def __str__(self) -> str:
        cells = [list(self.header), *map(list, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        sides = [str.rjust if name in self.right else str.ljust for name in self.header]
        lines = [
            "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in cells
        ]
        return "\n".join([self.title, *(line.rstrip() for line in lines), *self.notes])

    def _rich(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, title=Text(self.title), title_justify="left", pad_edge=False)
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if name in self.right else "left", overflow="fold", no_wrap=i < 2)
        for row in self.rows:
            table.add_row(*map(Text, row))
        console = Console(highlight=False)
        console.print(table)
        for note in self.notes:
            console.print(Text(note))


# ---- the card --------------------------------------------------------------------------------------------------------


def tensor_tables(kind: Kind | None, query_latent: bool) -> Iterator[Table]:
    """Every named tensor. Without a kind: the dense block, then what the MoE block has in other ways or besides."""
    dense, moe = (card(moe=is_moe, query_latent=query_latent) for is_moe in (False, True))
    both = set(dense.items()) & set(moe.items())
    if kind != "moe":
        yield _tensors(f"The dense block: {len(dense.hooked)} tensors.", dense, dense.hooked)
    if kind == "moe":
        yield _tensors(f"The MoE block: {len(moe.hooked)} tensors.", moe, moe.hooked)
    elif kind is None:
        own = [name for name in moe if (name, moe[name]) not in both]
        only = ", ".join(name for name in dense if name not in moe)
        title = f"The MoE block: {len(moe.hooked)} tensors; these {len(own)}, and the dense block's but for {only}."
        yield _tensors(title, moe, own)
    yield _tensors(f"Around the blocks: {len(around())} tensors.", around(), list(around()))


def _tensors(title: str, rows: Card, names: Iterable[str]) -> Table:
    header = ("step", "name", "symbol", "formula", "shape", "dtype", "also")
    return Table(title, header, [_tensor(rows.node(name)) for name in names], frozenset({"step"}))


def _tensor(node: Step | Leaf) -> list[str]:
    also = list(node.also)
    formula, number = "(the block's input)", "–"
    if isinstance(node, Step):
        formula, number = plain(node.formula), str(node.number or "–")
        also += [f"{node.inverse} (its reciprocal)"] if node.inverse else []
        also += ["only when asked for"] if node.on_request else []
    return [number, node.name, plain(node.symbol), formula, " ".join(node.shape), node.dtype, ", ".join(also)]


def parameter_tables(dims: Dims) -> Iterator[Table]:
    """The atlas page's table, for any sizes: a dense block, a MoE block, what stands around them, and the sums."""
    count = account(dims)
    of = "Kimi K2: " if dims == KIMI_K2 else ""
    for kind, parts, blocks in (("dense", count.dense, count.dense_blocks), ("MoE", count.moe, count.moe_blocks)):
        if parts:
            yield _parts(f"{of}{kind} block, of which there {'is' if blocks == 1 else 'are'} {blocks}", parts)
    yield _parts(f"{of}around the blocks", count.around)
    rows = [
        [
            "Dense blocks",
            f"{count.dense_blocks} × {_total(count.dense):,}",
            f"{count.dense_blocks * _total(count.dense):,}",
        ],
        ["MoE blocks", f"{count.moe_blocks} × {_total(count.moe):,}", f"{count.moe_blocks * _total(count.moe):,}"],
        ["Around the blocks", "", f"{_total(count.around):,}"],
        ["Model", "", f"{count.total:,}"],
        ["Active for one token", f"{dims.k} of {dims.e} routed experts" if dims.e else "", f"{count.active:,}"],
    ]
    yield Table(f"{of}the model", _PARTS, rows, frozenset({"parameters"}))


_PARTS = ("component", "calculation", "parameters")


def _total(parts: Sequence[Part]) -> int:
    return sum(part.parameters for part in parts)


def _parts(title: str, parts: Sequence[Part]) -> Table:
    rows = [[part.component, part.calculation, f"{part.parameters:,}"] for part in parts]
    return Table(title, _PARTS, [*rows, ["Total", "", f"{_total(parts):,}"]], frozenset({"parameters"}))


# ---- what studies found ----------------------------------------------------------------------------------------------


PART = {None: "block", "head": "head", "position": "pos", "role": "role", "expert": "expert"}
"""By → the frame's column that tells the cells of a tensor apart; whole tensors are told apart by block."""

_ACROSS = 24
"""As many columns as a reader can take in."""


def effect_tables(df: pd.DataFrame, by: By | None) -> Iterator[Table]:
    """The effects on an ablation's first metric: a tensor down, its parts across; a table for each shape of prompts.

    A part that has too many columns (hundreds of experts) makes a list of the largest effects.
    """
    here = df[df["metric"] == df["metric"].iloc[0]]
    column = PART[by]
    for _, part in here.groupby("group", sort=False) if by == "position" and "group" in here else [("", here)]:
        if part[column].nunique() > _ACROSS:
            yield largest_effects(part, column)
        else:
            yield effect_grid(part, column)


def effect_grid(df: pd.DataFrame, column: str, *, most: int | None = None) -> Table:
    """One metric's effects: a tensor (of a block) down, ``column`` across; ``= x`` is what equals the cell of x.

    Args:
        most: only the rows with the largest effects, without those that equal earlier ones throughout.
    """
    import pandas as pd

    from experiments.plots import short

    down = ["tensor"] if column == "block" else ["block", "tensor"]
    same = df["same_as"].notna() if "same_as" in df else pd.Series(False, df.index)
    words = df["effect"].map(lambda x: short(float(x), signed=True), na_action="ignore").fillna("–")
    if same.any():
        words = words.mask(same, "= " + df["same_as"])
    names = [_part_name(column, row) for row in df.to_dict("records")]
    grid = df.assign(words=words, part=names).pivot(index=down, columns="part", values="words").fillna("")
    grid = grid[list(dict.fromkeys(names))]
    if most is not None:
        size = df["effect"].abs().mask(same).groupby([df[name] for name in down], observed=True).max()
        grid = grid.loc[size[size > 0].sort_values(ascending=False).index[:most]]
    keys = grid.index.to_frame().astype(str).to_numpy().tolist()
    rows = [[*key, *cells] for key, cells in zip(keys, grid.to_numpy().tolist(), strict=True)]
    notes = ["= x: equals the cell of x by construction, and is computed once"] if same.any() else []
    return Table(_heading(df), (*down, *grid.columns), rows, frozenset({"block", *grid.columns}), notes)


def _part_name(column: str, row: Mapping[Hashable, Any]) -> str:
    """What heads a column of effects: ``head 3``, a role, a position with its token."""
    if column == "pos":
        token = row.get("token")
        return f"{row[column]} {token}" if isinstance(token, str) else str(row[column])
    return str(row[column]) if column == "role" else f"{column} {row[column]}"


def largest_effects(df: pd.DataFrame, column: str, most: int = 20) -> Table:
    """One metric's largest effects, a line each."""
    from experiments.plots import short

    top = df.loc[df["effect"].abs().sort_values(ascending=False).index[:most]]
    numbers = [top[name].astype(float).map(short, na_action="ignore").fillna("–") for name in ("effect", "stderr")]
    words = [top[name].astype(str) for name in ("block", "tensor", column)]
    header = ("block", "tensor", column, "effect", "stderr", "n")
    rows = list(zip(*words, *numbers, top["n"].astype(str), strict=True))
    notes = [f"the {len(top)} largest of {len(df)}"] if len(top) < len(df) else []
    return Table(_heading(df), header, rows, frozenset(header[2:]), notes)


def _heading(df: pd.DataFrame) -> str:
    """What a table of effects shows, from what the frame says of itself."""
    row = df.iloc[0].to_dict()
    unit = f" [{row['unit']}]" if row["unit"] != "1" else ""
    bases = df["base"].dropna().unique()
    base = f" (base {bases[0]:.2f})" if len(bases) == 1 else ""
    source = f" from {row['source']}" if "source" in df else ""
    group = f" of {row['group']!r}" if "group" in df and df["group"].nunique() == 1 else ""
    name = row["metric"].replace("_", " ")
    return f"{row['edit']}{source}: change of {name}{unit}{base}, {row['prompts']}{group}, n = {df['n'].max()}"


def norm_table(df: pd.DataFrame) -> Table:
    """Each tensor's rms, at the first position and the median of the others, and its largest channel."""
    from experiments.plots import short

    rows = []
    for (block, tensor), part in df.groupby(["block", "tensor"], observed=True):
        rms = part[part["metric"] == "rms"]
        rest, first = rms.loc[rms["pos"] > 0, "value"].median(), rms.loc[rms["pos"] == 0, "value"].median()
        row = [str(block), str(tensor), *(short(float(x)) if x == x else "–" for x in (first, rest))]
        top = part[part["metric"] == "max"]
        rows.append([*row, *_largest(top)])
    header = ("block", "tensor", "rms at 0", "rms, median of others", "largest", "where", "token")
    return Table("Sizes, in the activations' own unit", header, rows, frozenset(header[2:5]))


def _largest(top: pd.DataFrame) -> list[str]:
    from experiments.plots import short

    if not len(top):
        return ["", "", ""]
    row = top.loc[[top["value"].abs().idxmax()]].to_dict("records")[0]
    names = [name for name in ("head", "expert", "key", "feature") if isinstance(row.get(name), int)]
    where = ", ".join(f"{name} {row[name]}" for name in names)
    return [short(float(row["value"])), where, f"{row['token']} ({row['pos']})"]
