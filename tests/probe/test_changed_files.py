"""Files that change after they were opened: what is read later is of the files whose headers were read, or refused."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from probe import TINY, Checkpoint, load
from probe import checkpoint as module
from probe.errors import BadCheckpoint
from probe.headers import INDEX, OpenFile, read_headers
from probe.memory import Keeping
from probe.weights import weight_sites

A, B = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
KEPT: list[Keeping] = ["expanded", "stored", "disk"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def replaced(path: Path) -> None:
    """By a sound shard of the same names, shapes and time, as a download or a copy puts it there."""
    other = path.with_name("other")
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, other, {"format": "pt"})
    assert other.stat().st_size == path.stat().st_size
    shutil.copystat(path, other)
    other.replace(path)


def overwritten(path: Path) -> None:
    """In its last tensor, in place: the header is as it was."""
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def relinked(path: Path) -> None:
    other = path.with_name("elsewhere")
    shutil.copy2(path, other)
    path.unlink()
    path.symlink_to(other)


def gone(path: Path) -> None:
    path.unlink()


CHANGES = {
    replaced: "another file has taken its place",
    overwritten: "it has been written into",
    cut: "it had [0-9,]+ bytes, and has ",
    appended: "it had [0-9,]+ bytes, and has ",
    relinked: "another file has taken its place",
    gone: "No such file",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_under_an_open_checkpoint_is_refused_by_name(
    change: Callable[[Path], None], tiny: Path
) -> None:
    """Every weight of it, and none of the other shard's."""
    weights, plain = Checkpoint(tiny), load(TINY)
    change(tiny / B)
    lost = 0
    for block, leaf in weight_sites(weights.dims):
        files = {weights.survey.stored[name].file for name in module.stored_names(block, leaf, weights.dims)}
        if B not in files:
            assert torch.equal(weights.read(block, leaf.name), plain.read(block, leaf.name))
            continue
        lost += 1
        with pytest.raises(BadCheckpoint, match=rf"{tiny / B}: .* cannot be read \({CHANGES[change]}.*changed"):
            weights.read(block, leaf.name)
    assert 0 < lost < len(list(weight_sites(weights.dims)))


@pytest.mark.parametrize("change", [replaced, overwritten, cut, gone])
@pytest.mark.parametrize("keep", KEPT)
def test_a_shard_that_changes_while_weights_are_loaded_is_refused(
    keep: Keeping, change: Callable[[Path], None], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between headers and weights, where memory is looked at."""
    real = module.table

    def table(*given: object) -> object:
        change(tiny / B)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "table", table)
    with pytest.raises(BadCheckpoint, match=f"{tiny / B}: .*the file has changed since it was opened"):
        load(tiny, keep=keep).read(3, "W_O")


def test_a_shard_that_is_written_into_while_it_is_read_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, real = Checkpoint(tiny), OpenFile.read

    def read(self: OpenFile, place: memoryview, start: int) -> None:
        real(self, place, start)
        overwritten(tiny / B)

    monkeypatch.setattr(OpenFile, "read", read)
    with pytest.raises(BadCheckpoint, match=f"{tiny / B}: .*it has been written into"):
        weights.read(3, "W_O")


@pytest.mark.parametrize("keep", ["expanded", "stored"])
def test_what_is_in_memory_outlives_its_files(keep: Keeping, tiny: Path) -> None:
    weights, plain = load(tiny, keep=keep), load(TINY)
    shutil.rmtree(tiny)
    for block, leaf in weight_sites(weights.dims):
        assert torch.equal(weights.read(block, leaf.name), plain.read(block, leaf.name))


def copied(weights: Checkpoint) -> Callable[[], Checkpoint]:
    return lambda: copy.deepcopy(weights)


def pickled(weights: Checkpoint) -> Callable[[], Checkpoint]:
    data = pickle.dumps(weights)
    return lambda: pickle.loads(data)


@pytest.mark.parametrize("way", [copied, pickled])
@pytest.mark.parametrize("keep", ["stored", "disk"])
def test_a_copy_is_of_the_files_that_were_opened_or_none(
    keep: Keeping, way: Callable[[Checkpoint], Callable[[], Checkpoint]], tiny: Path
) -> None:
    weights = load(tiny, keep=keep)
    assert isinstance(weights, Checkpoint)
    make = way(weights)
    assert torch.equal(make().read(3, "W_O"), weights.read(3, "W_O"))
    path = tiny / B
    path.write_bytes(path.read_bytes())  # the same, at another time
    with pytest.raises(BadCheckpoint, match=f"{path}: it has changed since the model that this is a copy of"):
        make()


# --- descriptors -------------------------------------------------------------------------------


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_open_once_and_as_long_as_it_is_read(tiny: Path) -> None:
    before = descriptors()
    one, other = Checkpoint(tiny), load(tiny, keep="disk")
    assert descriptors() == before + 2
    del one
    assert torch.equal(other.read(3, "W_O"), load(TINY).read(3, "W_O"))
    del other
    assert descriptors() == before
    resident = load(tiny)
    assert descriptors() == before
    assert resident.resident


def test_a_file_that_cannot_be_opened_or_is_damaged_is_left_closed(tiny: Path) -> None:
    before = descriptors()
    cut(tiny / B)
    with pytest.raises(BadCheckpoint, match="it is cut"):
        Checkpoint(tiny)
    assert descriptors() == before


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """So many descriptors besides those that are open: each is the lowest number that is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(soft) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """As many as Kimi K2 has."""
    files = {f"t{i}": f"model-{i}.safetensors" for i in range(61)}
    for name, file in files.items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return tmp_path


def test_many_shards_are_opened_often_with_few_descriptors(shards: Path) -> None:
    with at_most(70):
        held = [read_headers(shards) for _ in range(10)]
    assert all(len(found) == 61 for found in held)


def test_too_many_open_files_are_said_to_be_that(shards: Path) -> None:
    with at_most(30), pytest.raises(BadCheckpoint, match=r"too many files are open.*\(ulimit -n\), or let go of other"):
        read_headers(shards)


def test_an_open_file_has_no_copies(tiny: Path) -> None:
    opened = OpenFile.at(tiny / A)
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="open it anew"):
            way(opened)
