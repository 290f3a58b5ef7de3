"""Headers, index and bytes: what the safetensors library writes is read the same; all that is damaged is refused."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from probe import headers
from probe.errors import BadCheckpoint
from probe.headers import INDEX, READ, SINGLE, read_header, read_headers, read_json, read_tensor, told
from tests.probe.files import K2_BYTES, K2_NUMBERS, entry, hollow_k2, write

ONE = {"x": entry("F32", [2], 0, 8)}
EIGHT = bytes(range(8))


def refusal(directory: Path, ask: Callable[[Path], Any] = read_headers) -> str:
    with pytest.raises(BadCheckpoint) as error:
        ask(directory)
    assert str(directory) in str(error.value)
    return str(error.value)


def tensors(seed: int) -> dict[str, Tensor]:
    """One of each dtype that is read, in odd shapes: a scalar and an empty one among them."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for i, (shape, dtype) in enumerate(
        zip([(3, 5), (7,), (), (2, 0, 4), (1, 1, 2), (9, 2)], READ.values(), strict=True)
    ):
        made[f"t{i}.ü {dtype}"] = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    return made


# --- read --------------------------------------------------------------------------------------


def test_what_the_library_writes_is_read_the_same(tmp_path: Path) -> None:
    state = tensors(0)
    save_file(state, tmp_path / SINGLE, metadata={"format": "pt"})
    found = read_headers(tmp_path)
    assert found.keys() == state.keys()
    for name, stored in found.items():
        read = read_tensor(tmp_path, name, stored)
        assert (read.dtype, read.shape) == (state[name].dtype, state[name].shape)
        assert torch.equal(read.float(), state[name].float())
        assert (stored.elements, stored.nbytes) == (state[name].numel(), state[name].nbytes)
    assert load_file(tmp_path / SINGLE).keys() == state.keys()


def test_a_tensor_that_is_read_is_ones_own(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4)}, tmp_path / SINGLE)
    stored = read_headers(tmp_path)["x"]
    read_tensor(tmp_path, "x", stored).zero_()
    assert torch.equal(read_tensor(tmp_path, "x", stored), torch.ones(4))


def test_shards_may_have_any_names(tmp_path: Path) -> None:
    files = ["model-00001-of-000062.safetensors", "b.safetensors", "a b.safetensors", "ü"]
    listed = {}
    for i, file in enumerate(files):
        save_file({f"t{i}": torch.full((2,), float(i))}, tmp_path / file)
        listed[f"t{i}"] = file
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}), encoding="utf-8")
    found = read_headers(tmp_path)
    assert {name: stored.file for name, stored in found.items()} == listed
    assert all(read_tensor(tmp_path, f"t{i}", found[f"t{i}"])[0] == i for i in range(4))


def test_all_of_kimi_k2s_headers_at_once(tmp_path: Path) -> None:
    """139,644 tensors in 61 files of a terabyte that is all holes. Two seconds; four here, where others run as well."""
    hollow_k2(tmp_path)
    start = time.process_time()
    found = read_headers(tmp_path)
    assert time.process_time() - start < 4
    assert len(found) == 139_644
    assert sum(stored.elements for stored in found.values()) == K2_NUMBERS
    assert sum(stored.nbytes for stored in found.values()) == K2_BYTES


# --- one file ----------------------------------------------------------------------------------

DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "not JSON": (b"{", b"", "not a readable safetensors file: Expecting"),
    "not UTF-8": (b'{"\xff": 1}', b"", "can't decode"),
    "UTF-16": ("{}".encode("utf-16"), b"", "can't decode"),
    "an array": ([], b"", "no JSON object"),
    "a number": (b"1", b"", "no JSON object"),
    "too deep": (b"[" * 10_000, b"", "nested too deeply"),
    "a tensor twice": (
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        EIGHT,
        "x is in it twice",
    ),
    "a field twice": (b'{"x":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', EIGHT, "shape is in it"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, **ONE}, EIGHT, "__metadata__ is not"),
    "metadata no object": ({"__metadata__": "a", **ONE}, EIGHT, "__metadata__ is not"),
    "half a character": (b'{"\\ud800":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', EIGHT, "can't encode"),
    "half a character in the metadata": (b'{"__metadata__":{"a":"\\udc00"}}', b"", "can't encode"),
    "no entry": ({"x": None}, b"", "x should have dtype, shape and data_offsets"),
    "an entry without shape": ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT, "x should have"),
    "an entry with more": ({"x": {**ONE["x"], "strides": [1]}}, EIGHT, "and no more"),
    "an unknown dtype": ({"x": entry("F12", [2], 0, 8)}, EIGHT, "dtype 'F12', none of BOOL"),
    "a dtype that is no word": ({"x": entry(["F32"], [2], 0, 8)}, EIGHT, r"dtype ['F32']"),  # type: ignore[arg-type]
    "a shape below 0": ({"x": entry("F32", [-2], 0, 8)}, EIGHT, "shape [-2], not up to 8 whole numbers"),
    "two below 0": ({"x": entry("F32", [-2, -1], 0, 8)}, EIGHT, "shape [-2, -1]"),
    "a broken shape": ({"x": entry("F32", [2.0], 0, 8)}, EIGHT, "shape [2.0]"),  # type: ignore[list-item]
    "a true shape": ({"x": entry("F64", [True], 0, 8)}, EIGHT, "shape [True]"),
    "a shape of words": ({"x": entry("F32", ["2"], 0, 8)}, EIGHT, "shape ['2']"),  # type: ignore[list-item]
    "a shape that is none": ({"x": entry("F32", 2, 0, 8)}, EIGHT, "shape 2,"),  # type: ignore[arg-type]
    "nine axes": ({"x": entry("U8", [1] * 8 + [8], 0, 8)}, EIGHT, "up to 8 whole numbers"),
    "a shape beyond all": ({"x": entry("U8", [2**63, 0], 0, 0)}, b"", "whole numbers from 0 on"),
    "a size that wraps around": ({"x": entry("U8", [2**32, 2**32], 0, 0)}, b"", "takes 18446744073709551616 bytes"),
    "a number of a million digits": (b'{"x":{"dtype":"U8","shape":[' + b"9" * 10**6 + b"]}}", b"", "not a readable"),
    "three offsets": ({"x": {**ONE["x"], "data_offsets": [0, 8, 8]}}, EIGHT, "data_offsets are [0, 8, 8]"),
    "one offset": ({"x": {**ONE["x"], "data_offsets": [8]}}, EIGHT, "data_offsets are [8]"),
    "offsets the wrong way": ({"x": entry("F32", [2], 8, 0)}, EIGHT, "takes 8 bytes; its data_offsets are [8, 0]"),
    "offsets below 0": ({"x": entry("F32", [2], -8, 0)}, EIGHT, "data_offsets [-8, 0], not"),
    "fewer bytes than its shape": ({"x": entry("F32", [2], 0, 7)}, EIGHT[:7], "takes 8 bytes"),
    "more bytes than its shape": ({"x": entry("F32", [1], 0, 8)}, EIGHT, "takes 4 bytes"),
    "bytes past the end": ({"x": entry("F32", [3], 0, 12)}, EIGHT, "it is cut"),
    "a terabyte past the end": ({"x": entry("U8", [2**40], 0, 2**40)}, EIGHT, "it is cut"),
    "bytes left over": (ONE, EIGHT + b"!", "there is more than its header says"),
    "a hole at the start": (
        {"x": entry("U8", [7], 1, 8)},
        EIGHT,
        "x leaves a hole before it: it starts at byte 1, not",
    ),
    "a hole": ({"x": entry("U8", [3], 0, 3), "y": entry("U8", [4], 4, 8)}, EIGHT, "y leaves a hole"),
    "an overlap": ({"x": entry("U8", [5], 0, 5), "y": entry("U8", [4], 4, 8)}, EIGHT, "y overlaps"),
    "one in another": ({"x": entry("U8", [8], 0, 8), "y": entry("U8", [2], 3, 5)}, EIGHT, "y overlaps"),
    "two in one place": ({"x": entry("U8", [8], 0, 8), "y": entry("U8", [8], 0, 8)}, EIGHT, "y overlaps"),
    "an empty one astray": ({"x": entry("U8", [8], 0, 8), "y": entry("U8", [0], 4, 4)}, EIGHT, "overlaps"),
    "no tensor but bytes": ({}, EIGHT, "there is more than its header says"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused(case: str, tmp_path: Path) -> None:
    header, payload, said = DAMAGED[case]
    write(tmp_path / SINGLE, header, payload)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / SINGLE}: not a readable safetensors file: ")
    assert said in message
    assert message.endswith("Fetch it anew.")


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_short_for_a_header(size: int, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(bytes(size))
    assert ("it is empty" if size == 0 else f"it has {size} bytes") in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 3, 100, 10**6, headers.MOST, headers.MOST + 1, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_another_length(length: int, tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {}, EIGHT, length=length)
    assert "not a readable safetensors file" in refusal(tmp_path)


def test_a_header_that_is_longer_than_any_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MOST", 100)
    write(tmp_path / SINGLE, b" " * 101)
    assert "its header would have 101 bytes, and at most 100 are read" in refusal(tmp_path)
    write(tmp_path / SINGLE, b"{}" + b" " * 98)
    assert read_headers(tmp_path) == {}


def test_a_pipe_or_a_device_is_no_shard(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)  # to open it would wait for a writer
    assert "no regular file" in refusal(tmp_path)


def test_a_name_that_would_act_on_a_terminal_is_quoted(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {"\x1b[2J\n\u202e": entry("U9", [1], 0, 1)}, b"!")
    message = refusal(tmp_path)
    assert message.isprintable()
    assert r"'\x1b[2J\n\u202e'" in message
    write(tmp_path / SINGLE, {"n" * 10**6: entry("U9", [1], 0, 1)}, b"!")
    assert len(refusal(tmp_path)) < 1000
    assert told("plain.name") == "plain.name"


# --- index and files ---------------------------------------------------------------------------

A, B = "a.safetensors", "b.safetensors"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two sound shards and their index."""
    save_file({"x": torch.zeros(2)}, tmp_path / A)
    save_file({"y": torch.ones(3)}, tmp_path / B)
    index(tmp_path, {"x": A, "y": B})
    return tmp_path


def index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def test_the_pair_is_sound(pair: Path) -> None:
    assert {name: stored.file for name, stored in read_headers(pair).items()} == {"x": A, "y": B}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", "1", '{"weight_map": [1]}', '{"weight_map": null}', '{"weight_map": {"x": 1}}'],
)
def test_an_index_that_is_none(text: str, pair: Path) -> None:
    (pair / INDEX).write_text(text, encoding="utf-8")
    message = refusal(pair)
    assert message.startswith(f"{pair / INDEX}: not an index: ")


def test_an_index_that_lists_a_tensor_twice(pair: Path) -> None:
    (pair / INDEX).write_text(f'{{"weight_map": {{"x": "{A}", "y": "{B}", "x": "{B}"}}}}', encoding="utf-8")
    assert f"{INDEX}: not an index: x is in it twice" in refusal(pair)


def test_an_index_longer_than_any(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MOST", 10)
    assert "more than the 10 that are read" in refusal(pair)


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/etc/passwd", "..", ".", "", "sub/a.safetensors", "a\0b", "a\nb"]
)
def test_an_index_that_names_a_file_elsewhere(file: str, pair: Path) -> None:
    index(pair, {"x": file, "y": B})
    message = refusal(pair)
    assert message.startswith(f"{pair / INDEX}: it names {file!r}, which is not a file of this directory")


def test_a_file_of_an_unspeakable_name(pair: Path) -> None:
    for name in ("\ud800.safetensors", "n" * 5000):
        index(pair, {"x": name, "y": B})
        assert str(pair) in refusal(pair)


def test_a_link_out_of_the_directory(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (pair / A).rename(elsewhere / A)
    (pair / A).symlink_to(elsewhere / A)
    assert f"{pair / A}: a link out of this directory, to {elsewhere / A}" in refusal(pair)
    (pair / A).unlink()
    (elsewhere / A).rename(pair / A)
    (pair / INDEX).rename(elsewhere / INDEX)
    (pair / INDEX).symlink_to(elsewhere / INDEX)
    assert f"{pair / INDEX}: a link out" in refusal(pair)
    (pair / INDEX).unlink()
    (pair / SINGLE).symlink_to("/dev/zero")
    assert f"{pair / SINGLE}: a link out" in refusal(pair)


def test_links_within_the_directory_and_within_the_hubs_cache(
    pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (pair / A).rename(pair / "kept.bin")
    (pair / A).symlink_to("kept.bin")
    assert read_headers(pair).keys() == {"x", "y"}
    home = tmp_path_factory.mktemp("models--a--b")
    (home / "blobs").mkdir()
    snapshot = home / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(("kept.bin", B, INDEX)):
        (pair / file).rename(home / "blobs" / f"{i}")
        (snapshot / (A if file == "kept.bin" else file)).symlink_to(f"../../blobs/{i}")
    found = read_headers(snapshot)
    assert torch.equal(read_tensor(snapshot, "y", found["y"]), torch.ones(3))
    (link := home.parent / f"{home.name}-link").symlink_to(snapshot)  # a link to the directory itself
    assert read_headers(link).keys() == {"x", "y"}


def test_a_missing_shard(pair: Path) -> None:
    (pair / B).unlink()
    assert f"{pair / B}: the shard is missing" in refusal(pair)
    (pair / B).symlink_to(pair / "gone")
    assert f"{pair / B}: the shard is missing" in refusal(pair)


def test_an_unlisted_shard(pair: Path) -> None:
    save_file({"z": torch.zeros(1)}, pair / "c.safetensors")
    assert f"{pair / 'c.safetensors'}: an unlisted shard: the weights are in {A}, {B}" in refusal(pair)
    (pair / "c.safetensors").rename(pair / ".c.safetensors")  # a download under way
    assert read_headers(pair).keys() == {"x", "y"}


def test_a_single_file_beside_an_index_that_does_not_name_it(pair: Path) -> None:
    """One library would read the one, another the other."""
    save_file({"x": torch.zeros(2), "y": torch.ones(3)}, pair / SINGLE)
    assert f"{pair / SINGLE}: an unlisted shard" in refusal(pair)


def test_a_tensor_in_two_shards(pair: Path) -> None:
    save_file({"x": torch.zeros(2), "y": torch.ones(3)}, pair / B)
    assert f"{pair / B}: it holds x, which the index does not list there" in refusal(pair)


def test_an_unlisted_tensor(pair: Path) -> None:
    save_file({"y": torch.ones(3), "z": torch.ones(3)}, pair / B)
    assert f"{pair / B}: it holds z, which the index does not list there" in refusal(pair)


def test_an_absent_tensor(pair: Path) -> None:
    index(pair, {"x": A, "y": B, "z": B})
    assert f"{pair / B}: the index says that it holds z; it does not" in refusal(pair)


def test_neither_index_nor_single_file(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / A)
    assert f"neither {INDEX} nor {SINGLE}" in refusal(tmp_path)


# --- after it was opened -----------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_file_that_shrinks_under_us_is_an_error_and_no_crash(keep: int, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(10_000)}, tmp_path / SINGLE)
    stored = read_headers(tmp_path)["x"]
    os.truncate(tmp_path / SINGLE, keep if keep >= 0 else stored.stop - 1)
    message = refusal(tmp_path, lambda directory: read_tensor(directory, "x", stored))
    fact = f"it had {stored.stop:,} bytes, and has {(tmp_path / SINGLE).stat().st_size:,}"
    assert f"{tmp_path / SINGLE}: x cannot be read ({fact})" in message
    assert "has changed since it was opened" in message


def test_a_file_that_goes_away(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4)}, tmp_path / SINGLE)
    stored = read_headers(tmp_path)["x"]
    (tmp_path / SINGLE).unlink()
    assert "x cannot be read (No such file" in refusal(tmp_path, lambda directory: read_tensor(directory, "x", stored))


def test_the_collector_is_as_it_was(pair: Path) -> None:
    import gc

    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            read_headers(pair)
            assert gc.isenabled() == enabled
            (pair / "z.safetensors").write_bytes(b"")
            refusal(pair)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
            (pair / "z.safetensors").unlink()


def test_read_json_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": {"b": 1, "b": 2}}', encoding="utf-8")
    with pytest.raises(ValueError, match="b is in it twice"):
        read_json(tmp_path / "a")
    with pytest.raises(OSError, match="regular"):
        read_json(tmp_path)


def test_one_file_alone(pair: Path) -> None:
    assert read_header(pair, A)["x"].shape == (2,)
