"""One schema for every study: one measurement a row, so that frames of different studies join.

`COLUMNS` is the table of what a column is called, holds and means; nothing else says it. `frame` makes a frame of
rows and checks it, `join` puts frames together, `write` and `read` keep one as parquet or CSV and give back an equal
frame.

What identifies a row stands in its columns, up to ``unit``; the rest is what was measured. NA in a column of the
first kind means *all* (all positions, all heads), in the second *not measured*.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from probe.blocks import around, card
from probe.card import Leaf, Step
from probe.errors import BadPath, ProbeError, nearest
from probe.files import read_bytes, replacing
from probe.headers import brief, expanded, parsed, told

VERSION = 2
"""Of the schema; it travels in ``df.attrs`` and in parquet files."""

ATTRS = b"PANDAS_ATTRS"
"""Where attrs stand in a parquet file's metadata: pandas' own place, so that it finds them too."""

Kind = Literal["string", "Int64", "Float64", "tensor"]


class BadFrame(ProbeError, ValueError):
    """Rows that break the schema, or a frame that cannot be asked this."""


@dataclass(frozen=True)
class Column:
    """What a column holds: ``Int64`` and ``Float64`` are nullable, ``tensor`` is a category in the card's order."""

    dtype: Kind
    meaning: str


COLUMNS: dict[str, Column] = {
    # what
    "study": Column("string", "the study that measured it: ablate, norms"),
    "model": Column("string", "the model, by name or folder, and what tells its weights from others'"),
    "prompts": Column("string", "the set of prompts"),
    "block": Column("Int64", "index of the block, from 0; NA for what is not in a block"),
    "step": Column("Int64", "the tensor's number among the card's 28 steps; NA where it has none"),
    "tensor": Column("tensor", "name of the tensor that was measured or edited"),
    "symbol": Column("string", "its symbol, LaTeX without dollars"),
    "edit": Column("string", "what was done to it: zero, resample; NA where nothing was"),
    "into": Column("string", "the readers that saw the edit; NA: all"),
    "within": Column("string", "the subspace that the edit, or what was read, was limited to; NA: none"),
    "hold": Column("string", "what kept its base value between sender and receiver"),
    "frozen": Column("string", "what was held at the base's value after the edit"),
    "sender": Column("string", "site that a path starts from"),
    "receiver": Column("string", "site that a path ends in"),
    "test": Column("string", "what a circuit is tested for: faithfulness, minimality, completeness"),
    "kept": Column("string", "the nodes that a circuit keeps while all others are ablated"),
    "removed": Column("string", "the nodes that were taken out of the circuit, or out of it and of the whole model"),
    "label": Column("string", "what a probe reads out: answer, continent"),
    "probe": Column("string", "kind of linear probe: ridge, logistic, means"),
    "against": Column(
        "string", "what a probe is held against (shuffled, random, tokens) or a circuit (random); NA: itself"
    ),
    "alpha": Column("Float64", "strength of the edit: the factor of a scaling; of a direction, in multiples of an rms"),
    "when": Column("string", "whose tokens were steered: prompt, steps (of decoding), both; NA: a plain text's"),
    "seed": Column(
        "Int64", "seed of all that was drawn, of several draws the first's; of an interval's resamples, too"
    ),
    # where
    "example": Column("Int64", "index of the prompt, from 0; NA: over all"),
    "group": Column("string", "group of prompts that an average was taken over; held out: they chose no cell"),
    "role": Column("string", "named span that the position belongs to: S1, S2, IO, END"),
    "pos": Column("Int64", "position among the row's real tokens, from 0 (queries, or what is not a key); NA: all"),
    "key": Column("Int64", "position of the key, from 0; NA: all"),
    "token": Column("string", "the token at pos, as text"),
    "context": Column("string", "the tokens around pos, the one there in ⟦ ⟧"),
    "head": Column("Int64", "attention head, from 0; NA: all"),
    "expert": Column("Int64", "routed expert, from 0; NA: all"),
    "feature": Column("Int64", "index in the tensor's last axis, or of a dictionary; NA: all"),
    # how
    "direction": Column("string", "denoise: clean into corrupt; noise: corrupt into clean"),
    "source": Column("string", "where values came from: a run, a reference set, the prompts a probe was fitted to"),
    "dtype": Column("string", "activation dtype of the run"),
    "numerics": Column("string", "profile of the numerics: reference, careful"),
    "beyond": Column("Int64", "the model's max_position_embeddings, where longer texts were let in; NA: refused"),
    "options": Column("string", "what no other column tells of the study's arguments, where not the default: draws=4"),
    # what came out
    "metric": Column("string", "what was measured"),
    "unit": Column("string", "its unit; 1 for a ratio"),
    "value": Column("Float64", "the metric in the edited run, or of what was looked at"),
    "base": Column("Float64", "the metric in the run without the edit; of a probe, of always guessing the same"),
    "effect": Column("Float64", "value - base"),
    "recovered": Column("Float64", "(value - base) / (source - base), over prompts the ratio of the means"),
    "completeness_gap": Column(
        "Float64",
        "the whole less the sum of its parts: source - base less the estimates at the embedding, base less all that is"
        " added up to it",
    ),
    "n": Column("Int64", "number of independent units, prompts as a rule, behind value"),
    "small_gaps": Column("Int64", "number of prompts with source near base: kept out of rows by prompt, not of means"),
    "mistaken": Column("Int64", "number of prompts that the model gets wrong: see experiments.stats.mistaken"),
    "stderr": Column("Float64", "standard error of effect over the n, or of value where there is no effect"),
    "ci_low": Column(
        "Float64",
        "lower end of the 95 % interval of recovered; where there is no source of effect, else of value: one cell's, by"
        " bootstrap over the n, and too short where they are very skewed",
    ),
    "ci_high": Column("Float64", "upper end of it"),
    "p": Column(
        "Float64",
        "p value of effect, of either sign (of a probe: of more than base), corrected within p_family; takes the n for"
        " independent, and enough to show how skewed effects are: see experiments.stats.p_values",
    ),
    "p_family": Column(
        "string", "how p was made, and the family of tests that it was corrected for; or why there is none"
    ),
    "load": Column("Float64", "share of the tokens that choose the expert"),
    "control": Column(
        "Float64", "mean effect of what it is held against: other experts of about equal load, random directions"
    ),
    "spread": Column("Float64", "standard deviation of the effects of these random directions"),
    "routing_agreement": Column("Float64", "mean share of chosen experts that base and edited run have in common"),
    "flips": Column("Int64", "number of changed choices of an expert"),
    "touched": Column("Int64", "number of places that the edits met (rows of a tensor's last axis), each counted once"),
    "noise_floor": Column("Float64", "twice the root mean square of the effects of one-ulp noise at the edited place"),
    "same_as": Column("string", "tensor of the same block, edit and place whose cell this equals by construction"),
}
"""Name → dtype and meaning, in the order of a frame's columns."""

IDENTITY = tuple(COLUMNS)[: list(COLUMNS).index("value")]
"""The columns that say what a row is about. No two rows of a frame agree in all of them."""

CORE = ("study", "model", "prompts", "block", "step", "tensor", "symbol", "metric", "unit", "value")
"""The columns that a frame has even where they are NA throughout; of the others it has those that say something."""


def _nodes() -> list[tuple[str, Step | Leaf]]:
    """Every tensor that can be a row, with what the card says about it: from the embedding to the logits, then
    weights."""
    dense, moe = card(moe=False), card(moe=True)
    late = dict.fromkeys(moe.hooked)  # a merge of two orders that agree on what they share
    block: dict[str, Step | Leaf] = {}
    for name in dense.hooked:
        if name in late:
            while (head := next(iter(late))) != name:
                block[head] = moe.node(head)
                del late[head]
            del late[name]
        block[name] = dense.node(name)
    block |= {name: moe.node(name) for name in late}
    first, *last = [(name, around().node(name)) for name in around().hooked]
    weights = {leaf.name: leaf for made in (dense, moe, around()) for leaf in made.weights}
    return [first, *block.items(), *last, *weights.items()]


@cache
def tensors() -> dict[str, Step | Leaf]:
    """Name → step or input, for each value that the column ``tensor`` may take, in the order of its category:
    ``x_0``, the block's tensors (dense and MoE merged), the final norm, ``logits``, the weights."""
    return dict(_nodes())


def tensor_dtype() -> pd.CategoricalDtype:
    """The ordered category of the column ``tensor``."""
    return pd.CategoricalDtype(list(tensors()), ordered=True)


def frame(rows: Iterable[Mapping[str, Any]] | pd.DataFrame, *, study: str) -> pd.DataFrame:
    """A frame of the schema from rows, each a mapping from column to value.

    Columns come in the order and dtype of `COLUMNS`; those NA throughout are left out, except `CORE`. ``symbol`` is
    filled in from the card where a row has none, ``step`` where both kinds of block agree on it. No rows make a frame
    with the core's columns and no rows.

    Raises:
        BadFrame: a column that the schema lacks (with the nearest that it has), a tensor that no card has, a value
            that is not of its column's dtype, a row without a metric, or two rows about the same thing.
    """
    df = pd.DataFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    df = df.reset_index(drop=True)
    if "study" not in df:
        df["study"] = study
    known = tensors()
    if "tensor" in df:
        names = df["tensor"].astype(object)
        symbols = names.map(lambda name: known[name].symbol if name in known else pd.NA)
        numbers = names.map(lambda name: _number(name) if name in known else pd.NA)
        df["symbol"] = symbols if "symbol" not in df else df["symbol"].where(df["symbol"].notna(), symbols)
        df["step"] = numbers if "step" not in df else df["step"].where(df["step"].notna(), numbers)
    return _typed(df)


def _number(name: str) -> Any:
    """The step number of a tensor, NA where it has none or the two kinds of block differ."""
    numbers = {getattr(c[name], "number", None) for c in (card(moe=False), card(moe=True)) if name in c}
    return numbers.pop() or pd.NA if len(numbers) == 1 else pd.NA


def _typed(df: pd.DataFrame) -> pd.DataFrame:
    """``df`` with the schema's columns, order, dtypes and attrs, checked."""
    for name in df.columns:
        if name not in COLUMNS:
            near = nearest(str(name), COLUMNS)
            raise BadFrame(
                f"a frame has no column {brief(str(name))}."
                + (f" Nearest: {', '.join(near)}." if near else "")
                + " experiments.frames.COLUMNS lists all."
            )
    columns: dict[str, pd.Series[Any]] = {}
    for name, column in COLUMNS.items():
        given = df[name] if name in df else pd.Series(pd.NA, index=df.index, dtype=object)
        if name in CORE or given.notna().any():
            columns[name] = _cast(name, column.dtype, given)
    out = pd.DataFrame(columns, index=df.index)
    if len(bare := out.index[out["metric"].isna()]):
        raise BadFrame(f"row {bare[0]} has no metric; every row of a frame is one measurement.")
    identity = [name for name in out.columns if name in IDENTITY]
    if (twice := out.duplicated(identity)).any():
        row = out.loc[twice, identity].iloc[0].dropna()
        raise BadFrame("two rows measure one thing: " + ", ".join(f"{k}={told(v)}" for k, v in row.items()) + ".")
    out.attrs = {"schema": VERSION}
    return out


def _cast(name: str, dtype: Kind, given: pd.Series[Any]) -> pd.Series[Any]:
    """One column in its dtype."""
    try:
        if dtype == "tensor":
            category = tensor_dtype()
            unknown = [x for x in given.astype(object).dropna().unique() if x not in category.categories]
            if unknown:
                near = nearest(str(unknown[0]), category.categories)
                raise BadFrame(
                    f"no card has a tensor named {brief(unknown[0])}."
                    + (f" Nearest: {', '.join(near)}." if near else "")
                )
            return given.astype(object).astype(category)
        if dtype == "string":
            if any(not isinstance(x, str) for x in given.astype(object).dropna()):
                raise TypeError("not text")
            return given.astype("string")
        return pd.to_numeric(given.astype(object).where(given.notna(), None)).astype(dtype)
    except (TypeError, ValueError) as error:
        if isinstance(error, BadFrame):
            raise
        raise BadFrame(f"column {name!r} holds {dtype} ({COLUMNS[name].meaning}): {error!s:.300}.") from error


def join(*frames: pd.DataFrame) -> pd.DataFrame:
    """One frame of the rows of several, in the order given. A column that one of them lacks is NA in its rows.

    The category of ``tensor`` stays as it is, which ``pd.concat`` does not see to. What attrs say of one of several
    is not said of all, and is left out.

    Raises:
        BadFrame: nothing to join, a column that the schema lacks, or a row that two of the frames hold.
    """
    if not frames:
        raise BadFrame("nothing to join: give at least one frame.")
    loose = [df.astype(object) for df in frames]
    return _typed(pd.concat(loose, ignore_index=True))


def check_one(df: pd.DataFrame, names: Sequence[str] = ("model", "prompts", "dtype", "numerics")) -> None:
    """Refuse rows of several models, sets of prompts or numerics, which read together would be shown as one's.

    Raises:
        BadFrame: there are several of one of these columns.
    """
    for name in names:
        if name in df and df[name].nunique(dropna=False) > 1:
            raise BadFrame(f"the frame has several of {name} ({', '.join(map(str, df[name].unique()))}): keep one.")


def write(df: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a frame to ``path``, by its ending ``.parquet`` or ``.csv``; folders are made. An existing file is
    replaced only once the new one is complete. The index is not kept; nor are, in a CSV file, the attrs.

    Raises:
        BadPath: another ending, or a place that cannot be written.
        BadFrame: the frame breaks the schema, or its attrs are more than JSON.
    """
    path = expanded(path)
    if path.suffix not in (".parquet", ".csv"):
        raise BadPath(
            f"can't write {path}: a frame goes to .parquet or .csv, not {path.suffix or 'a name without ending'!r}."
        )
    written = as_csv(df) if path.suffix == ".csv" else _as_parquet(df)
    with replacing(path) as file:
        file.write(written)
    return path


def as_csv(df: pd.DataFrame) -> bytes:
    """What `write` puts into a CSV file."""
    made = BytesIO()
    pa_csv.write_csv(_table(df), made)
    return made.getvalue()


def _as_parquet(df: pd.DataFrame) -> bytes:
    """A parquet file, with a digest of all its other bytes among its metadata."""
    table, made = _table(df), BytesIO()
    said = {**(table.schema.metadata or {}), ATTRS: _json(df.attrs), _SEAL: _OPEN}
    pa_parquet.write_table(table.replace_schema_metadata(said), made)
    raw = made.getvalue()
    at = _sealed_at(raw)
    assert at is not None, "it was just put there"
    return raw[:at] + _digest(raw, at) + raw[at + len(_OPEN) :]


def _table(df: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(_typed(df.reset_index(drop=True)), preserve_index=False)


_SEAL, _OPEN = b"k2-probe digest", b"0" * 32
"""The key of the digest in a parquet file, and what stands in its place while it is made."""


def _sealed_at(raw: bytes) -> int | None:
    """Where the digest is; None: the file has none. Before it stands, as parquet writes a key with its value, the key,
    and two bytes: a text follows, and how long it is."""
    start = _SEAL + bytes([0x18, len(_OPEN)])
    at = raw.rfind(start)
    return None if at < 0 else at + len(start)


def _digest(raw: bytes, at: int) -> bytes:
    made = blake2b(raw[:at], digest_size=16)
    made.update(raw[at + len(_OPEN) :])
    return made.hexdigest().encode()


def _json(attrs: Mapping[Hashable, Any]) -> bytes:
    try:
        return json.dumps({**attrs, "schema": VERSION}).encode()
    except (TypeError, ValueError) as error:
        raise BadFrame(f"attrs go to a file as JSON, and these can't: {error}.") from None


def read(path: str | os.PathLike[str], *, sealed: bool = False) -> pd.DataFrame:
    """The frame that `write` put there: dtypes, categories, NA and (of parquet) attrs as they were, rows numbered
    from 0.

    Args:
        sealed: refuse a parquet file without the digest that `write` leaves in it: other programs write none.

    Raises:
        BadPath: no such file, another ending, a file that is no table, or one whose bytes are not those that `write`
            put there.
        BadFrame: a table that breaks the schema.
    """
    path = expanded(path)
    if path.suffix not in (".parquet", ".csv"):
        raise BadPath(f"can't read {path}: a frame is a .parquet or .csv file.")
    try:
        raw = read_bytes(path)
        table = _read_csv(path, raw) if path.suffix == ".csv" else _read_parquet(path, raw, sealed)
        attrs = parsed((table.schema.metadata or {}).get(ATTRS, b"{}"))
        if not isinstance(attrs, dict):
            raise ValueError("its attrs are no JSON object")
        _once(path, table.column_names)
        columns = {name: table[name].to_pylist() for name in table.column_names}
    except ProbeError:
        raise
    except (OSError, pa.ArrowException, ValueError, csv.Error) as error:
        raise BadPath(f"can't read {path}: {getattr(error, 'strerror', None) or error!s:.500}.") from error
    df = _typed(pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()}))
    df.attrs |= attrs | df.attrs
    return df


def _once(path: Path, columns: Sequence[str]) -> None:
    counts = Counter(columns)
    if len(counts) < len(columns):
        raise BadFrame(f"{path} has the column {told(counts.most_common(1)[0][0])!r} twice.")


def _read_parquet(path: Path, raw: bytes, sealed: bool) -> pa.Table:
    """A table whose digest, if it has one, is that of its bytes; which is seen before anything is made of them."""
    at = _sealed_at(raw)
    if sealed if at is None else raw[at : at + len(_OPEN)] != _digest(raw, at):
        raise BadPath(f"can't read {path}: it is damaged; its bytes are not those that were written.")
    return pa_parquet.read_table(pa.BufferReader(raw))


def _read_csv(path: Path, raw: bytes) -> pa.Table:
    """A CSV file as text, integers and floats by the schema. Nothing between two commas is NA, ``""`` is empty text."""
    arrow = {"Int64": pa.int64(), "Float64": pa.float64(), "string": pa.string(), "tensor": pa.string()}
    header = next(csv.reader(TextIOWrapper(BytesIO(raw), encoding="utf-8-sig", newline="")), None)
    if header is None:
        raise BadPath(f"can't read {path}: the file is empty.")
    _once(path, header)
    return pa_csv.read_csv(
        BytesIO(raw),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            column_types={name: arrow[COLUMNS[name].dtype] for name in header if name in COLUMNS},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
