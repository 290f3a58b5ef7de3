"""How a frame of effects is looked at: which column is the number to show, and which tell its cells apart.

Tables and pictures of ablations and patches are laid out by this alone, so that a frame from a file is shown as the
study shows it. Nothing heavy is imported here: the command line lists its tables without pandas.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("head", "expert", "feature", "key", "pos", "role")
"""The columns that tell the parts of a tensor apart; of several that do, the first goes across."""


class Layout(NamedTuple):
    """Which columns go down and across, and which make a table or a picture of their own for each value."""

    down: str
    across: str
    apart: tuple[str, ...]

    def split(self, df: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
        """The rows of each table or picture, with a name for its file: ``END_block3``."""
        if not self.apart:
            yield "", df
            return
        for key, part in df.groupby(list(self.apart), sort=False, dropna=False, observed=True):
            names = zip(self.apart, key, strict=True)
            yield "_".join(_file_name(name, value, df) for name, value in names), part


def _file_name(column: str, value: Any, df: pd.DataFrame) -> str:
    if column == "group":
        return f"shape{list(df['group'].unique()).index(value)}"
    return re.sub(r"[^\w.+-]+", "_", str(value) if column == "role" else f"{column}{value}")


def told(df: pd.DataFrame, by: Sequence[str] = ()) -> str:
    """The column to show, by some columns: ``recovered`` where it was measured, else ``effect``, else ``value``.

    ``recovered`` is no average of what the prompts recover: rows by prompt show it prompt by prompt, or not at all.
    """
    mixed = "example" in df and "example" not in by
    for name in ("effect",) if mixed else ("recovered", "effect"):
        if name in df and df[name].notna().any():
            return name
    return "value"


def full(df: pd.DataFrame) -> pd.DataFrame:
    """A frame with the columns that all effects have, also where none has a number: what was run was not finite."""
    import pandas as pd

    missing = [name for name in ("value", "base", "effect") if name not in df]
    return df.assign(**{name: pd.array([pd.NA] * len(df), dtype="Float64") for name in missing})


def changed(df: pd.DataFrame, metric: str) -> str:
    """What a metric's effects are called, in its rows: a distance starts from 0, and its change is itself."""
    from_zero = "base" in df and bool(df["base"].eq(0).fillna(False).all())
    return ("" if from_zero else "change of ") + metric.replace("_", " ")


def gaps(df: pd.DataFrame) -> dict[str, str]:
    """What the estimates of each kind, over the whole embedding, leave of source − base: ``+0.11 of 30.7 logits``."""
    from experiments.plots import short

    said = {}
    there = df[df["completeness_gap"].notna()] if "completeness_gap" in df else df[:0]
    for edit, part in there.groupby("edit", sort=False):
        most = part[part["n"] == part["n"].max()]
        row = most.loc[[most["recovered"].abs().fillna(0.0).idxmax()]].to_dict("records")[0]
        whole = f" of {short(row['effect'] / row['recovered'])}" if row["recovered"] else ""
        unit = "" if row["unit"] == "1" else f" {row['unit']}"
        said[str(edit)] = f"{short(row['completeness_gap'], signed=True)}{whole}{unit}"
    return said


def keys(df: pd.DataFrame) -> list[str]:
    """The columns that tell the cells of a frame of one metric apart."""
    parts = [name for name in PARTS if name in df and df[name].notna().any() and (name != "role" or "pos" not in df)]
    return ["block", "tensor", *parts, *(["group"] if {"pos", "key"} & set(parts) and _by_shape(df) else [])]


def layout(df: pd.DataFrame) -> Layout:
    """How to lay out a frame of one metric: by whatever varies in it.

    Whole tensors: tensor by block. Parts: one tensor by block; several, apart by block. Of several kinds of parts one
    goes across, the others apart. Positions of prompts of several shapes: apart by shape.
    """
    varies = [name for name in PARTS if name in df and df[name].nunique() > 1]
    if "pos" in varies and "role" in varies:
        varies.remove("role")  # a position tells its roles
    one, blocks = df["tensor"].nunique() <= 1, df["block"].nunique() > 1
    if not varies:
        return Layout("tensor", "block", ())
    across, *rest = varies
    down = "tensor" if not one else "block" if blocks or not rest else rest.pop(0)
    shape = ["group"] if {"pos", "key"} & {across, down, *rest} and _by_shape(df) else []
    return Layout(down, across, (*shape, *rest, *(["block"] if down == "tensor" and blocks else [])))


def _by_shape(df: pd.DataFrame) -> bool:
    """Whether ``group`` says the shape of prompts. (In rows by prompt it may say their group.)"""
    if "group" not in df or df["group"].nunique() < 2:
        return False
    return "example" not in df or bool((df.groupby("group")["example"].nunique() > 1).any())


def place_name(row: Mapping[Hashable, Any]) -> str:
    """A position, with its token or, where prompts differ in it, its role."""
    named = [row[name] for name in ("token", "role") if isinstance(row.get(name), str)]
    return " ".join([str(row["pos"]), *named[:1]])


def where(df: pd.DataFrame, shown: Sequence[str]) -> str:
    """What all rows of a frame are about, besides what its axes show: ``block 3, head 1, at END``."""
    said = []
    words = {"role": "at", "pos": "at position"}
    for name in ("block", *PARTS):
        if name in shown or name not in df or df[name].isna().any() or (name == "role" and "pos" in df):
            continue
        if df[name].nunique() == 1:
            said.append(f"{words.get(name, name)} {df[name].iloc[0]}")
    return ", ".join(said)
