"""Tables as text: of the card, of parameters, and short ones of what a study found.

On a terminal they fit its width; anywhere else (a pipe, a file) columns are aligned by spaces and nothing is cut or
folded.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.effects import changed, full, keys, layout, place_name, told, where
from experiments.options import Kind
from experiments.plain import shown
from probe import KIMI_K2, Dims, account, around, card
from probe.card import Card, Leaf, Step, plain
from probe.params import Part, Tally

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
        cells = [list(self.header), *([_cell(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        sides = [str.rjust if name in self.right else str.ljust for name in self.header]
        lines = [
            "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in cells
        ]
        return "\n".join([shown(self.title), *(line.rstrip() for line in lines), *map(shown, self.notes)])

    def _rich(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, title=Text(shown(self.title)), title_justify="left", pad_edge=False)
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if name in self.right else "left", overflow="fold", no_wrap=i < 2)
        for row in self.rows:
            table.add_row(*(Text(_cell(cell)) for cell in row))
        console = Console(highlight=False)
        console.print(table)
        for note in self.notes:
            console.print(Text(shown(note)))


def _cell(text: str) -> str:
    return shown(text).replace("\n", "⏎")


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
    yield Table(f"{of}the model", _PARTS, rows, _RIGHT)


def tally_tables(name: str, found: Tally) -> Iterator[Table]:
    """The same of a checkpoint's own tensors: each kind of block once, what stands around them, the sums, the rest."""
    rows = []
    for blocks, moe, parts in found.counted:
        kind = "around the blocks" if moe is None else f"{'MoE' if moe else 'dense'} {_span(blocks)}"
        yield _parts(f"{name}: {kind}{', one of them' if len(blocks) > 1 else ''}", parts)
        each = f"{len(blocks)} × {_total(parts):,}" if len(blocks) > 1 else ""
        rows.append([kind.capitalize() if moe is None else kind, each, f"{_total(parts) * max(len(blocks), 1):,}"])
    notes = [f"left out: {n:,} numbers in {tensors:,} tensors: {what}" for what, tensors, n in found.beside]
    notes += [f"differs: {fault}" for fault in found.faults]
    notes += [] if found.faults else ["equal to what config.json says, tensor by tensor"]
    yield Table(f"{name}: the checkpoint", _PARTS, [*rows, ["Total", "", f"{found.total:,}"]], _RIGHT, notes)


def _span(blocks: range) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"


_PARTS = ("component", "calculation", "parameters")
_RIGHT = frozenset({"parameters"})


def _total(parts: Sequence[Part]) -> int:
    return sum(part.parameters for part in parts)


def _parts(title: str, parts: Sequence[Part]) -> Table:
    rows = [[part.component, part.calculation, f"{part.parameters:,}"] for part in parts]
    return Table(title, _PARTS, [*rows, ["Total", "", f"{_total(parts):,}"]], _RIGHT)


# ---- what studies found ----------------------------------------------------------------------------------------------


_ACROSS, _TABLES = 24, 6
"""As many columns, and as many tables, as a reader can take in."""


def effect_tables(df: pd.DataFrame) -> Iterator[Table]:
    """A study's first metric: grids of its cells, a tensor of a block down, its parts across; then the largest cells
    with their intervals.

    Where a grid would be too wide (hundreds of experts), there would be too many (each position of each head), or each
    cell has a control beside it, the list says it alone.
    """
    here = full(df[df["metric"] == df["metric"].iloc[0]])
    lies = layout(here)
    lies = lies._replace(apart=tuple(name for name in lies.apart if name != "block"))
    grids = list(lies.split(here))
    if "control" not in here and len(grids) <= _TABLES and here[lies.across].nunique() <= _ACROSS:
        for _, part in grids:
            yield effect_grid(part, lies.across, lies.down)
    if len(here) > 1:
        yield largest_effects(here)


def effect_grid(df: pd.DataFrame, across: str, down: str = "tensor", *, most: int | None = None) -> Table:
    """One metric's cells: a tensor (of a block) down; ``= x`` is what equals the cell of x.

    Args:
        down: what tells rows apart besides: a part of the tensor.
        most: only the rows with the largest effects, without those that equal earlier ones throughout.
    """
    import pandas as pd

    lines = ["tensor"] if across == "block" else ["block", "tensor"]
    lines += [down] if down not in ("tensor", "block") else []
    same = df["same_as"].notna() if "same_as" in df else pd.Series(False, df.index)
    words = _words(df)
    faint = words.str.startswith("(").any()
    if same.any():
        words = words.mask(same, "= " + df["same_as"])
    names = [_part_name(across, row) for row in df.to_dict("records")]
    grid = df.assign(words=words, part=names).pivot(index=lines, columns="part", values="words").fillna("")
    grid = grid[list(dict.fromkeys(names))]
    if most is not None:
        size = df["effect"].abs().mask(same).groupby([df[name] for name in lines], observed=True).max()
        grid = grid.loc[size[size > 0].sort_values(ascending=False).index[:most]]
    index = grid.index.to_frame().astype(str).to_numpy().tolist()
    rows = [[*key, *cells] for key, cells in zip(index, grid.to_numpy().tolist(), strict=True)]
    notes = ["= x: equals the cell of x by construction, and is computed once"] if same.any() else []
    notes += ["(x): below the noise floor"] if faint else []
    header = (*lines, *grid.columns)
    return Table(_heading(df, [*lines, across]), header, rows, frozenset({"block", *grid.columns}), notes)


def _words(df: pd.DataFrame) -> pd.Series[str]:
    """The number of each cell; in brackets what is below the noise floor."""
    from experiments.plots import short

    column = told(df)
    numbers = df[column].astype(object)
    words = numbers.map(lambda x: short(float(x), signed=column == "effect"), na_action="ignore").fillna("–")
    if not {"effect", "noise_floor"} <= set(df):
        return words
    return words.mask((df["effect"].abs() < df["noise_floor"]).fillna(False), "(" + words + ")")


def _part_name(column: str, row: Mapping[Hashable, Any]) -> str:
    """What heads a column of effects: ``head 3``, a role, a position with its token."""
    if column == "pos":
        return place_name(row)
    return str(row[column]) if column == "role" else f"{column} {row[column]}"


def largest_effects(df: pd.DataFrame, most: int = 10) -> Table:
    """One metric's largest cells, a line each, with intervals and, of experts, what others of about equal load do."""
    import pandas as pd

    from experiments.plots import short

    own = df[df["same_as"].isna()] if "same_as" in df else df
    column, down = told(df), keys(df)
    sizes = own[column].abs()
    top = own.loc[sizes[sizes > 0].sort_values(ascending=False, kind="stable").index[:most]].reset_index(drop=True)
    words = {name: top[name].astype(str) for name in down}
    if "pos" in words:
        words["pos"] = pd.Series([place_name(row) for row in top.to_dict("records")], dtype=str)
    beside = {"ci_low": "from", "ci_high": "to", "stderr": "stderr", "control": "control", "load": "load", "p": "p"}
    if "ci_low" in df:
        del beside["stderr"]
    beside = {name: head for name, head in beside.items() if name in df}
    numbers = [top[name].astype(float).map(short, na_action="ignore").fillna("–") for name in beside]
    header = (*down, column, *beside.values(), "n")
    rows = list(zip(*words.values(), _words(top), *numbers, top["n"].astype(str), strict=True))
    return Table(f"The largest of {len(own)}: {_heading(df, down)}", header, rows, frozenset(header[2:]), _caveats(df))


def _caveats(df: pd.DataFrame) -> list[str]:
    """What must be known of the numbers, as far as a frame of effects says it."""
    notes = []
    if "p_family" in df:
        families = ", ".join(sorted(df["p_family"].dropna().unique()))
        there = "from, to: 95 % interval; " if "ci_low" in df else "no interval and "
        notes.append(f"{there}{'p' if 'p' in df else 'no p'}: {families}")
    if "control" in df:
        notes.append("control: the mean effect of other experts of the block, of about equal load")
    if "small_gaps" in df and (few := df["small_gaps"].max()):
        notes.append(f"in {few} pairs of prompts clean and corrupt hardly differ")
    if "mistaken" in df and (wrong := df["mistaken"].max()):
        notes.append(f"the model gets {wrong} of these prompts wrong")
    return notes


def _heading(df: pd.DataFrame, shown: Sequence[str]) -> str:
    """What a table of effects shows, from what the frame says of itself."""
    row, column = df.iloc[0].to_dict(), told(df)
    name, unit = row["metric"].replace("_", " "), f" [{row['unit']}]" if row["unit"] != "1" else ""
    bases = df["base"].dropna().unique()
    base = f" (base {bases[0]:.2f})" if len(bases) == 1 and bases[0] else ""
    what = f"{name} recovered" if column == "recovered" else f"{changed(df, name)}{unit}{base}"
    way = f" ({row['direction']})" if "direction" in df else ""
    source = f" from {row['source']}" if "source" in df else ""
    place = f", {said}" if (said := where(df, shown)) else ""
    if {"pos", "key"} & set(shown) and "group" in df and df["group"].nunique() == 1:
        place += f" of {row['group']!r}"
    return f"{row['edit']}{way}{source}: {what}{place}, {row['prompts']}, n = {df['n'].max()}"


def norm_table(df: pd.DataFrame) -> Table:
    """Each tensor's rms, at the first position and the median of the others, and its largest channel."""
    import pandas as pd

    from experiments.plots import short

    rows = []
    for (block, tensor), part in df.groupby(["block", "tensor"], observed=True):
        rms = part[part["metric"] == "rms"]
        rest, first = rms.loc[rms["pos"] > 0, "value"].median(), rms.loc[rms["pos"] == 0, "value"].median()
        row = [str(block), str(tensor), *(short(float(x)) if pd.notna(x) else "–" for x in (first, rest))]
        top = part[part["metric"] == "max"]
        rows.append([*row, *_largest(top)])
    header = ("block", "tensor", "rms at 0", "rms, median of others", "largest", "where", "token")
    return Table("Sizes, in the activations' own unit", header, rows, frozenset(header[2:5]))


def _largest(top: pd.DataFrame) -> list[str]:
    from experiments.plots import short

    if top["value"].isna().all():
        return ["", "", ""]
    row = top.loc[[top["value"].abs().idxmax()]].to_dict("records")[0]
    names = [name for name in ("head", "expert", "key", "feature") if isinstance(row.get(name), int)]
    where = ", ".join(f"{name} {row[name]}" for name in names)
    return [short(float(row["value"])), where, f"{row['token']} ({row['pos']})"]


def lens_tables(df: pd.DataFrame) -> Iterator[Table]:
    """The residual stream through the blocks, a metric a column; a table for each role. The last row is the output."""
    from experiments.plots import short

    scale = "that of the last place" if "frozen" in df else "each place's own"
    for role, part in full(df).groupby("role", sort=False):
        title = f"Logit lens at {role}: {_of(part)}; the final norm's scale is {scale}"
        table = _values(part, title, ["block", "tensor"], [_with_unit(row) for row in part.to_dict("records")])
        output = part.drop_duplicates("metric")["base"].astype(float).map(short).replace("", "–")
        yield replace(table, rows=[*table.rows, ["", "output", *output]])


def direct_table(df: pd.DataFrame, most: int = 20) -> Table:
    """The largest parts of a logit difference, a line each, in the order in which the model adds them."""
    from experiments.plots import short

    df = full(df)
    top = df.loc[df["value"].abs().sort_values(ascending=False).index[:most]].sort_index()
    numbers = [top[name].astype(float).map(short) for name in ("value", "ci_low", "ci_high") if name in top]
    names = [name for name in ("block", "tensor", "head", "expert") if name in top]
    words = [top[name].astype(object).where(top[name].notna(), "").astype(str) for name in names]
    header = (*names, "adds", "from", "to")[: len(names) + len(numbers)]
    whole, rest, base = df.iloc[0].to_dict(), df["value"].drop(top.index), df["base"].astype(float).iloc[0]
    title = f"What adds up to {short(base) or 'no number'}, the {_with_unit(whole)}: {_of(df)}"
    notes = [f"the other {len(rest)} together: {short(float(rest.sum()))}"] if len(rest) else []
    notes.append(f"left by rounding: {short(float(base - df['value'].sum()), signed=True) or '–'}")
    notes += ["from, to: 95 % interval"] if len(numbers) > 1 else []
    return Table(title, header, list(zip(*words, *numbers, strict=True)), frozenset(header[2:]), notes)


def score_table(df: pd.DataFrame) -> Table:
    """Content against position, and the kinds of head, a head a line; then which heads are of a kind."""
    from experiments.scores import KINDS, heads_above

    as_it_is = df["edit"].isna() | ((df["metric"] == "overlap") & (df["edit"] != "zero Q"))
    here = df[as_it_is]
    names = here["metric"].str.replace("_", " ") + (" (" + here["edit"] + ")").fillna("")
    found = {kind: ", ".join(f"{block}.{head}" for block, head in heads_above(df, kind)) for kind in KINDS}
    notes = [f"above 0.5 in {kind.replace('_', ' ')}: {heads or 'no head'}" for kind, heads in found.items()]
    notes.append("zero Q_R: by content alone; zero Q_C: by position alone")
    return _values(here, f"Scores by head: {_of(df)}", ["block", "head"], list(names), notes)


def probe_tables(df: pd.DataFrame) -> Iterator[Table]:
    """What is read out of each tensor, a place a column, and below it what the controls give; a table for each set of
    prompts that was read."""
    from experiments.plots import short
    from experiments.probe_plots import CONTROLS, kinds, places, taught_by

    df = df.assign(place=places(df), kind=kinds(df))
    for (prompts, source), part in df.groupby(["prompts", taught_by(df)], sort=False):
        itself, row = part[part["kind"] == ""], part.iloc[0].to_dict()
        fitted = f" fitted to {source}" if source else ""
        notes = [f"always guessing the same: {short(itself['base'].astype(float).mean()) or '–'}"]
        for kind, (name, _) in CONTROLS.items():
            if len(values := part.loc[part["kind"] == kind, "value"].dropna().astype(float)):
                notes.append(f"{name}: {short(values.min())} to {short(values.max())}")
        for best in part[part["kind"] == "held out"].to_dict("records"):
            value, where = short(float(best["value"])), f"{best['tensor']} of block {best['block']} at {best['place']}"
            notes.append(f"the best, {where}, on {best['n']} groups that were set aside: {value}")
        metric = "r²" if row["metric"] == "r2" else row["metric"]
        title = f"{row['label']}, {metric} of {row['probe']} probes{fitted}: {prompts}, n = {itself['n'].max()}"
        yield _values(itself, title, ["block", "tensor"], list(itself["place"]), notes)


def _values(df: pd.DataFrame, title: str, down: list[str], across: Sequence[str], notes: Sequence[str] = ()) -> Table:
    """A frame's values as a grid; ``across`` is the heading of the column that each row goes to."""
    from experiments.plots import short

    words = df["value"].astype(float).map(short).replace("", "–")
    grid = df.assign(words=words, across=across).pivot(index=down, columns="across", values="words").dropna(how="all")
    grid = grid[list(dict.fromkeys(across))].fillna("")
    keys = grid.index.to_frame().astype(str).to_numpy().tolist()
    rows = [[*key, *cells] for key, cells in zip(keys, grid.to_numpy().tolist(), strict=True)]
    return Table(title, (*down, *grid.columns), rows, frozenset(grid.columns), notes)


def _with_unit(row: Mapping[Hashable, Any]) -> str:
    return str(row["metric"]).replace("_", " ") + (f" [{row['unit']}]" if row["unit"] != "1" else "")


def _change(df: pd.DataFrame) -> str:
    """What the effects of a frame of one metric are, with their unit."""
    row = df.iloc[0].to_dict()
    return changed(df, str(row["metric"])) + (f" [{row['unit']}]" if row["unit"] != "1" else "")


def _of(df: pd.DataFrame) -> str:
    """What a frame's averages are over."""
    return f"{df['prompts'].iloc[0]}, n = {df['n'].max()}"


# ---- sizes, experts, tokens, two models ------------------------------------------------------------------------------

_MOST = 12
"""Lines of a list of the largest."""


def stream_tables(df: pd.DataFrame) -> Iterator[Table]:
    """Of a frame of norms, as far as it has them: the stream's growth, its largest channels, the heads that rest at the
    first position."""
    from experiments.plots import RESIDUAL

    grown, sinks = (df[df["metric"] == metric] for metric in ("growth", "sink"))
    if len(grown):
        where = grown["pos"].eq(0).map({True: "at 0", False: "median of others"})
        medians = grown.groupby(["block", where.rename("where")], sort=False)["value"].median().reset_index()
        yield _values(medians, "Growth of the residual stream, ‖x_next‖ / ‖x_n‖", ["block"], list(medians["where"]))
    if len(df[(df["metric"] == "max") & df["tensor"].isin(list(RESIDUAL))]):
        yield _massive(df)
    if len(sinks):
        means = sinks.groupby(["block", "head"])[["value", "base"]].mean().reset_index().nlargest(_MOST, "value")
        columns = {"block": "block", "head": "head", "value": "to position 0", "base": "if all keys were alike"}
        yield _listed(means, "Heads that attend most to position 0", columns)


def _massive(df: pd.DataFrame) -> Table:
    from experiments.norms import massive

    found = massive(df)
    before = found.loc[found["tensor"] == "x_next", "block"] + 1  # where x_n is the same stream once more
    found = found[(found["tensor"] != "x_n") | ~found["block"].isin(before)]
    found = found.assign(
        times=(found["value"] / found["base"]).abs(), place=found["token"] + " (" + found["pos"].astype(str) + ")"
    )
    columns = {name: name for name in ("block", "tensor", "feature", "value")}
    columns |= {"feature": "channel", "times": "× typical rms", "place": "token", "n": "prompts"}
    return _listed(found.nlargest(_MOST, "times"), "The largest channels of the residual stream", columns)


def _listed(df: pd.DataFrame, title: str, columns: Mapping[str, str], notes: Sequence[str] = ()) -> Table:
    """Rows as they come, of these columns, those that there are, under these headings."""
    import pandas as pd

    from experiments.plots import short

    def words(column: pd.Series[Any]) -> list[str]:
        number = column.dtype.kind == "f"
        return ["" if pd.isna(x) else short(float(x)) if number else str(x) for x in column]

    columns = {name: head for name, head in columns.items() if name in df}
    right = frozenset(head for name, head in columns.items() if df[name].dtype.kind in "fi")
    rows = list(zip(*(words(df[name]) for name in columns), strict=True))
    return Table(title, list(columns.values()), rows, right, notes)


def routing_tables(df: pd.DataFrame) -> Iterator[Table]:
    """The routing of each set of prompts, a block a line."""
    for name, part in df.groupby("prompts", sort=False):
        rows = [_routed(str(block), here) for block, here in part.groupby("block")]
        header = ("block", "entropy [bits]", "of", "margin", "told by token", "by load", "most used", "off even")
        last = ("beyond the token",) if "load_given_token" in set(part["metric"]) else ()
        notes = ["most used: expert (share of a prompt's tokens)"]
        notes += ["off even, beyond the token: experts off an even share, off what tokens predict, with p < 0.05"]
        title = f"Routing: {name}, n = {part['n'].max()}"
        yield Table(title, (*header, *last), rows, frozenset((*header, *last)) - {"most used"}, notes)


def _routed(block: str, df: pd.DataFrame) -> list[str]:
    import pandas as pd

    from experiments.plots import short

    by = dict(list(df.groupby("metric")))
    entropy, margin, told = (by[name].to_dict("records")[0] for name in ("entropy", "margin", "told_by_token"))
    numbers = (entropy["value"], entropy["base"], margin["value"], told["value"], told["base"])
    used = by["load"].nlargest(3, "value").to_dict("records")
    most = ", ".join(f"{row['expert']} ({row['value']:.0%})" for row in used)
    tested = [by[name].get("p") for name in ("load", "load_given_token") if name in by]
    off = ["–" if p is None or p.isna().all() else f"{(p < 0.05).sum()} of {len(p)}" for p in tested]
    return [block, *("–" if pd.isna(x) else short(float(x)) for x in numbers), most, *off]


def top_tables(df: pd.DataFrame, most: int = 8) -> Iterator[Table]:
    """The strongest tokens of each ranking, of the first few."""
    from experiments.plots import short

    names = [name for name in ("expert", "head", "feature") if name in df]
    rankings = list(df.groupby(names, sort=False, dropna=False)) if names else [((), df)]
    for i, (key, part) in enumerate(rankings[:most], 1):
        row = part.iloc[0].to_dict()
        where = "".join(f", {name} {i}" for name, i in zip(names, key, strict=True))
        place = row["tensor"] if part["block"].isna().all() else f"{row['tensor']} of block {row['block']}"
        found = part.dropna(subset="value").to_dict("records")
        rows = [[short(r["value"]), str(r["example"]), str(r["pos"]), r["context"]] for r in found]
        header = (row["metric"], "text", "position", "context")
        notes = [] if rows else ["no token of these texts chose the expert"]
        if len(rankings) > most and i == most:
            notes.append(f"the first {most} of {len(rankings)} rankings; the frame holds all")
        yield Table(f"{place}{where}: {row['prompts']}", header, rows, frozenset(header[:3]), notes)


def steer_tables(df: pd.DataFrame) -> Iterator[Table]:
    """What each dose changes, of the prompts and of plain text, and beside it what random directions change."""
    import pandas as pd

    from experiments.plots import short

    df = full(df)
    doses, unit_row = df[df["alpha"].notna()], df[df["metric"] == "rms"]
    rms, size = unit_row.iloc[0].to_dict(), unit_row["value"].astype(float).iloc[0]
    where = "" if pd.isna(rms["block"]) else f" of block {rms['block']}"
    unit = f"α is in multiples of the rms of {rms['tensor']}{where}, {short(size) or 'not finite'}"
    for aside, part in doses.groupby(doses["when"].isna(), sort=False):
        by_metric = dict(list(part.groupby("metric", sort=False)))
        header, columns = ["α"], [[short(x, signed=True) for x in sorted(set(part["alpha"].astype(float)))]]
        for rows in by_metric.values():
            numbers = rows.reindex(columns=["effect", "control", "spread"]).astype(float)
            effect, mean, sd = (numbers[name].map(short).replace("", "–") for name in numbers)
            header += [_change(rows), "random directions"]
            columns += [list(effect), list(mean + " ± " + sd)]
        what = "plain text, every position" if aside else str(part["edit"].iloc[0])
        rows_of = [list(row) for row in zip(*columns, strict=True)]
        yield Table(f"{what}: {_of(part)}", header, rows_of, frozenset(header), [] if aside else [unit])


def path_table(df: pd.DataFrame, most: int = 20) -> Table:
    """The largest paths of the first metric, a line each."""
    here = full(df[df["metric"] == df["metric"].iloc[0]])
    top = here.loc[here["effect"].abs().sort_values(ascending=False, kind="stable").index[:most]]
    row = here.iloc[0].to_dict()
    names = {"sender": "sender", "receiver": "receiver", "effect": "effect", "recovered": "recovered"}
    names |= {"ci_low": "from", "ci_high": "to", "p": "p"}
    what = f"{_change(here)}, {row['direction']}: {_of(here)}"
    held = "every Δ in between held" if row["hold"] == "all" else f"held in between: {row['hold']}"
    notes = [f"the {len(top)} largest of {len(here)}; {held}; from, to: 95 % interval of recovered"]
    return _listed(top, f"Paths: {what}", names, notes)


def circuit_tables(df: pd.DataFrame) -> Iterator[Table]:
    """What is left of the first metric in a circuit and in random sets, what each node adds, what the circuit lacks."""
    here = df[df["metric"] == df["metric"].iloc[0]]
    unit, ends = _with_unit(here.iloc[0].to_dict()), {"ci_low": "from", "ci_high": "to"}
    by_test = {str(test): part.copy() for test, part in here.groupby("test", sort=False)}
    sets = by_test["faithfulness"]
    sets["set"] = sets["against"].fillna("circuit") if "against" in sets else "circuit"
    sets["nodes"] = [0 if kept is None else kept.count(", ") + 1 for kept in sets["kept"].astype(object)]
    columns = {"set": "kept", "nodes": "nodes", "value": unit, "base": "all ablated", "recovered": "faithfulness"}
    yield _listed(sets, f"Faithfulness ({sets['edit'].iloc[0]}): {_of(sets)}", columns | ends)
    if "minimality" in by_test:
        columns = {"removed": "without", "value": unit, "base": "circuit", "effect": "change", **ends, "p": "p"}
        yield _listed(by_test["minimality"], "Minimality: the circuit without a node", columns)
    if "completeness" in by_test:
        columns = {"removed": "without", "value": "circuit", "base": "whole model", "effect": "difference", **ends}
        lacks = by_test["completeness"]
        lacks["removed"] = lacks["removed"].mask(lacks["removed"] == lacks["kept"], "the whole circuit")
        yield _listed(lacks, f"Completeness: {unit} without some of its nodes", columns)


def split_tables(df: pd.DataFrame) -> Iterator[Table]:
    """The parts of an edit's effect, metric by metric."""
    for _, part in full(df).groupby("metric", sort=False):
        row = part.iloc[0].to_dict()
        shown = part.assign(part=["in all", "routing frozen", "routing alone", "interaction"])
        columns = {"part": "part", "effect": "effect", "ci_low": "from", "ci_high": "to", "p": "p"}
        columns |= {"routing_agreement": "routing agreement", "flips": "flips"}
        yield _listed(shown, f"{row['edit']}: {_change(part)}, {_of(part)}", columns)


def attribution_tables(df: pd.DataFrame) -> Iterator[Table]:
    """The best estimates that a frame of attributions has; and how well all agree with patches, where there are any."""
    best = df.loc[df["edit"] != "patch", "edit"].iloc[-1]
    yield from effect_tables(df[df["edit"] == best])
    if (df["edit"] == "patch").any():
        yield agreement_table(df)


def agreement_table(df: pd.DataFrame) -> Table:
    """How well attributions agree with the patches that they estimate."""
    from experiments.attribution import agreement

    found = agreement(df)
    found["flipped"] = found["flipped"].map({False: "as it was", True: "flipped"})
    columns = {"edit": "estimate", "flipped": "routing", "cells": "cells", "correlation": "r", "slope": "slope"}
    lost = int(found["missing"].sum())
    notes = ["slope: patch on estimate; 1: they agree"] + ([f"{lost} cells lack one of the two"] if lost else [])
    return _listed(found, f"Estimates against patches: {_of(df)}", columns, notes)


def comparison_tables(df: pd.DataFrame) -> Iterator[Table]:
    """Two models: the weights that differ most, the routing by block, the tensors whose size differs most."""
    whole = df[df["expert"].isna()] if "expert" in df else df
    keys = ["block", "tensor"]
    changes, cosine = (whole[whole["metric"] == metric] for metric in ("relative_change", "cosine"))
    equal = [f"{(changes['value'] == 0).sum()} of {len(changes)} weights are equal, entry by entry"]
    equal += [f"{name}: {one} in the first, {two} in the second" for name, (one, two) in df.attrs["constants"].items()]
    most = changes[changes["value"] != 0].nlargest(_MOST, "value")[[*keys, "value"]]
    most = most.merge(cosine[[*keys, "value"]].rename(columns={"value": "cosine"}), on=keys)
    columns = {"block": "block", "tensor": "weight", "value": "relative change", "cosine": "cosine"}
    yield _listed(most, f"Weights: {df['model'].iloc[0]}", columns, equal)
    agreed = whole[whole["metric"].str.startswith("agreement")]
    if len(agreed):
        names = agreed["metric"].str.replace("_", " ")
        yield _values(agreed, f"Chosen experts in common: {_of(agreed)}", ["block"], list(names))
    sizes = whole[(whole["metric"] == "rms") & whole["pos"].isna()] if "pos" in whole else whole[:0]
    if len(sizes):
        by = (sizes["effect"] / sizes["base"]).abs().sort_values(ascending=False).index[:_MOST]
        columns = {"block": "block", "tensor": "tensor", "base": "rms, first", "value": "rms, second", "p": "p"}
        yield _listed(sizes.loc[by], f"Sizes that differ most: {_of(sizes)}", columns)


# ---- runs ------------------------------------------------------------------------------------------------------------


def unit_table(study: str, labels: Sequence[str], costs: Sequence[Mapping[str, float]]) -> Table:
    """The units of a run with what each would cost; below, the sum, of bytes the most that are needed at once."""
    names = list(dict.fromkeys(name for cost in costs for name in cost))
    rows = [
        [str(i), label, *(_count(cost[name]) if name in cost else "" for name in names)]
        for i, (label, cost) in enumerate(zip(labels, costs, strict=True), 1)
    ]
    if names and len(rows) > 1:
        all_of = {name: [cost[name] for cost in costs if name in cost] for name in names}
        rows.append(["", "in all", *(_count(max(x) if name == "bytes" else sum(x)) for name, x in all_of.items())])
    title = f"{study}: {len(labels)} unit{'' if len(labels) == 1 else 's'}"
    return Table(title, ("unit", "with", *names), rows, frozenset({"unit", *names}))


def _count(x: float) -> str:
    return f"{x:,.0f}" if x == int(x) or x >= 100 else f"{x:.3g}"
