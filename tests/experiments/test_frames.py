"""The schema: one order, one dtype, one meaning a column; frames join, and come back from disk as they went."""

import os

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from experiments import frames
from experiments.frames import COLUMNS, CORE, IDENTITY, BadFrame, BadPath
from probe.blocks import around, card
from probe.errors import ProbeError

SCHEMA = """study model prompts block step tensor symbol edit into within hold frozen sender receiver alpha seed
example group role pos key token head expert feature direction source dtype numerics
metric unit value base effect recovered n ci_low ci_high p p_family routing_agreement flips touched noise_floor
same_as""".split()  # what every study's frame may be asked for, in this order; others stand between


def row(**more):
    return {
        "model": "tiny",
        "prompts": "ioi",
        "block": 0,
        "tensor": "O",
        "metric": "m",
        "unit": "logits",
        "value": 1.5,
    } | more


@pytest.fixture
def df():
    """Rows that make trouble: blocks out of order and past 9, tokens that look like nothing, values that are none."""
    tokens = ["", "NA", "nan", None, 'a "b", c', "l\nm", "$x$", "Δ", " "]
    rows = [
        row(block=block, tensor=tensor, token=token, pos=i, value=float("nan") if i == 2 else i / 3 - 1e-300, head=None)
        for block in (10, 2, 0)
        for tensor in ("x_next", "c_KV", "O", "x_0")
        for i, token in enumerate(tokens)
    ]
    return frames.frame([*rows, row(block=3, expert=2**60, same_as="V", value=float("inf"))], study="ablate")


def test_the_schema_has_its_columns_in_order_and_each_says_what_it_means():
    assert [name for name in COLUMNS if name in SCHEMA] == SCHEMA
    assert all(column.meaning for column in COLUMNS.values())
    assert set(CORE) <= set(COLUMNS)
    assert IDENTITY[-1] == "unit"


def test_frame_has_order_dtypes_and_only_what_applies(df):
    assert list(df) == [name for name in COLUMNS if name in df]
    assert {"token", "pos", "expert", "same_as"} <= set(df)
    assert "head" not in df  # NA throughout
    assert set(CORE) <= set(df)
    for name in df.columns.drop("tensor"):
        assert str(df[name].dtype) == COLUMNS[name].dtype, name
    assert df["tensor"].cat.ordered
    assert df.attrs == {"schema": frames.VERSION}


def test_order_of_tensors_keeps_every_card():
    order = list(frames.tensors())
    for names in (card(moe=False).hooked, card(moe=True).hooked):
        assert [name for name in order if name in names] == list(names)
    cards = (card(moe=False), card(moe=True), around())
    values, weights = {n for c in cards for n in c.hooked}, {leaf.name for c in cards for leaf in c.weights}
    last = order.index("logits") + 1
    assert (order[0], set(order[:last]), set(order[last:])) == ("x_0", values, weights)
    assert len(order) == len(set(order))


def test_symbols_and_steps_come_from_the_card(df):
    here = df[df["tensor"] == "c_KV"].iloc[0]
    assert here["symbol"] == card(moe=False)["c_KV"].symbol
    assert here["step"] == 4
    own = frames.frame([row(step=99, symbol="mine")], study="s").iloc[0]
    assert (own["step"], own["symbol"]) == (99, "mine")
    assert pd.isna(frames.frame([row(tensor="A")], study="s")["step"][0])


def test_sorting_follows_card_and_number(df):
    ordered = df.sort_values(["tensor", "block"])
    assert list(dict.fromkeys(ordered["tensor"])) == ["x_0", "c_KV", "O", "x_next"]
    assert list(dict.fromkeys(df.sort_values("block")["block"])) == [0, 2, 3, 10]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_comes_back_from_disk_as_it_went(df, tmp_path, ending):
    path = frames.write(df, tmp_path / "new" / f"f.{ending}")
    back = frames.read(path)
    assert_frame_equal(back, df)
    assert back["tensor"].dtype == df["tensor"].dtype
    assert back.attrs == df.attrs
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half-written is left
    part = df[df["block"] == 2]  # written over the first, its rows numbered from 0
    assert_frame_equal(frames.read(frames.write(part, path)), frames.frame(part, study="ablate"))


def test_attrs_go_with_a_parquet_file(df, tmp_path):
    df = df.copy()
    df.attrs |= {"left_out": {"experts": "it holds integers, «e»"}, "unmatched": 3, "rounding": 1e-9, "mistaken": None}
    path = frames.write(df, tmp_path / "f.parquet")
    assert frames.read(path).attrs == df.attrs
    assert pd.read_parquet(path).attrs == df.attrs  # as pandas itself keeps them
    assert frames.read(frames.write(df, tmp_path / "f.csv")).attrs == {"schema": frames.VERSION}
    assert "unmatched" not in frames.join(df).attrs, "of one of several, it would be read as of all"
    df.attrs["model"] = object()
    with pytest.raises(BadFrame, match="attrs go to a file as JSON"):
        frames.write(df, tmp_path / "g.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.csv", "f.parquet"]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_no_rows_come_back_too(tmp_path, ending):
    empty = frames.frame([], study="ablate")
    assert list(empty) == list(CORE)
    assert_frame_equal(frames.read(frames.write(empty, tmp_path / f"e.{ending}")), empty)


def test_join_keeps_the_category_where_concat_loses_it(df):
    other = frames.frame([row(tensor="logits", block=None, head=3, metric="rms")], study="norms")
    both = frames.join(df, other)
    assert both["tensor"].dtype == frames.tensor_dtype()
    assert list(both) == [name for name in COLUMNS if name in df or name in other]
    assert len(both) == len(df) + 1
    assert both.attrs == df.attrs
    assert both["head"].isna().sum() == len(df)
    assert both["study"].iloc[-1] == "norms"
    assert_frame_equal(frames.join(df), df)
    with pytest.raises(BadFrame, match="nothing to join"):
        frames.join()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(tensr="O")], "no column 'tensr'. Nearest: tensor"),
        ([row(tensor="c_kv")], "no card has a tensor named 'c_kv'. Nearest: c_KV"),
        ([row(head=1.5)], "'head' holds Int64"),
        ([row(value="much")], "'value' holds Float64"),
        ([row(token=7)], "'token' holds string"),
        ([row(metric=None)], "row 0 has no metric"),
        ([row(), row(value=2.0)], "two rows measure one thing: study=s"),
    ],
)
def test_rows_that_break_the_schema_are_refused(rows, words):
    with pytest.raises(BadFrame) as error:
        frames.frame(rows, study="s")
    assert words in str(error.value)
    assert isinstance(error.value, ProbeError)


def test_joining_a_frame_twice_is_refused(df):
    with pytest.raises(BadFrame, match="two rows measure one thing"):
        frames.join(df, df)


def test_places_that_cannot_be_written_or_read(df, tmp_path):
    taken = tmp_path / "file.csv"
    frames.write(df, taken)
    (tmp_path / "folder.csv").mkdir()
    for path in (taken / "below.csv", tmp_path / "x.xlsx", tmp_path / "folder.csv"):
        with pytest.raises(BadPath, match="can't write"):
            frames.write(df, path)
    (tmp_path / "empty.csv").touch()
    (tmp_path / "junk.parquet").write_text("junk")
    for name in ("none.csv", "none.parquet", "empty.csv", "junk.parquet", "folder.csv", "x.txt"):
        with pytest.raises(BadPath, match="can't read"):
            frames.read(tmp_path / name)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadFrame, match="no column 'a'"):
        frames.read(tmp_path / "other.csv")


def test_a_csv_file_as_a_spreadsheet_writes_it_and_one_with_a_column_twice(df, tmp_path):
    path = frames.write(df, tmp_path / "f.csv")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert_frame_equal(frames.read(path), df)
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    first = lines[0].partition(",")[0]
    twice = [f"{lines[0]},{first}", *(f"{line},x" for line in lines[1:])]
    path.write_text("\n".join(twice))
    with pytest.raises(BadFrame, match=r"f\.csv has the column 'study' twice"):
        frames.read(path)


def test_a_failed_write_leaves_the_old_file(df, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    path = frames.write(df, tmp_path / "f.csv")
    with pytest.raises(BadFrame):
        frames.write(df.assign(odd=1), path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadPath, match=r"f\.csv: No space left on device"):
        frames.write(df.head(1), path)
    assert list(tmp_path.iterdir()) == [path]
    assert_frame_equal(frames.read(path), df)
