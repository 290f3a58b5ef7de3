"""The files of a checkpoint: what safetensors headers and the index say, and the bytes of one tensor.

A safetensors file is eight bytes (little-endian, the header's length), the header (a JSON object: tensor → dtype, shape
and its bytes' place), and the tensors' bytes, one after the other without a hole. All that is said here is checked
before anything that it could make large is allocated; nothing is executed and nothing unpickled. A file stays open as
long as somebody may read of it, and is looked at before and after each read: one that is replaced, written into or cut
meanwhile is an error. It is never mapped, so that it is no crash either.
"""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import re
import weakref
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from probe.errors import BadCheckpoint, BadPath
from probe.files import check_name, read_bytes, size_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MOST = 64 * 2**20
"""The longest JSON that is read, in bytes. Kimi K2's 61 headers have 0.3 MB each, its index has 13 MB."""

ITEM = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes of one element of each dtype that a header may name."""

READ = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Those of them that a checkpoint's weights are read from."""

TORCH = {
    **READ,
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16},
    **{"U32": torch.uint32, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64},
    "F8_E5M2": torch.float8_e5m2,
}
"""Those that torch has; of caches and dictionaries each is read."""


class Stamp(NamedTuple):
    """What tells a file from others, and from itself before somebody wrote into it; the time is in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, said: os.stat_result) -> Stamp:
        """Out of what the system says of a file."""
        return cls(said.st_dev, said.st_ino, said.st_size, said.st_mtime_ns)


class OpenFile:
    """A file that stays open until nobody needs it any more: so its inode is no other file's meanwhile.

    Attributes:
        stamp: of the file as it was opened.
    """

    def __init__(self, descriptor: int, stamp: Stamp) -> None:
        self.descriptor, self.stamp = descriptor, stamp
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def at(cls, path: Path) -> OpenFile:
        """The file at a path, open once in this process however often it is asked for: descriptors are few.

        Raises:
            OSError: it cannot be opened, or is no regular file.
        """
        size_of(path)
        descriptor = os.open(path, os.O_RDONLY)
        made = cls(descriptor, Stamp.of(os.fstat(descriptor)))
        return _OPEN.setdefault(made.stamp, made)

    def __reduce__(self) -> NoReturn:
        """A copy would have the number of a descriptor, and not keep it open."""
        raise TypeError("an open file can't be copied or pickled; open it anew.")

    def read(self, place: memoryview, start: int) -> None:
        """Fill ``place`` with the bytes from ``start`` on.

        Raises:
            OSError: there are fewer.
        """
        while place:
            count = os.preadv(self.descriptor, [place], start)
            if not count:
                raise OSError(None, f"it ends {len(place):,} bytes too early")
            place, start = place[count:], start + count

    def check(self, path: Path | None = None) -> None:
        """See that it is as it was opened; and, with a path, that it is still what stands there.

        Raises:
            OSError: it isn't.
        """
        now = Stamp.of(os.fstat(self.descriptor) if path is None else path.stat())
        if now[:2] != self.stamp[:2]:
            raise OSError(None, "another file has taken its place")
        if now.size != self.stamp.size:
            raise OSError(None, f"it had {self.stamp.size:,} bytes, and has {now.size:,}")
        if now != self.stamp:
            raise OSError(None, "it has been written into")


_OPEN: weakref.WeakValueDictionary[Stamp, OpenFile] = weakref.WeakValueDictionary()


class Stored(NamedTuple):
    """A tensor as its header describes it: the file, the dtype in the header's spelling, the shape, bytes from … to."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    opened: OpenFile

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes, there and in memory."""
        return self.stop - self.start


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector, which would walk the hundreds of thousands of entries again and again while
    they are made, for more than half of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path as a user gives it: ``~`` is their home, as in a shell.

    Raises:
        BadPath: no file can be called so.
    """
    made = Path(os.path.expanduser(path))  # a Path's own raises where there is no such user
    try:
        check_name(made)
    except OSError as error:
        raise BadPath(f"{told(path)}: {error.strerror}.") from None
    return made


def told(name: object) -> str:
    """A name from a file as an error may show it: short, and without what would act on a terminal."""
    text = str(name)
    return text if text.isprintable() and len(text) <= 200 else f"{text[:200]!r}{'…' if len(text) > 200 else ''}"


def brief(value: object) -> str:
    """A value from a file as an error may show it."""
    try:
        return told(repr(value))
    except (RecursionError, ValueError):  # nested too deeply, or a number of more digits than Python prints
        return f"a {type(value).__name__} beyond telling"


def read_json(path: Path) -> Any:
    """The JSON in a file; see `parsed`.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer than `MOST`.
        ValueError: as `parsed`.
    """
    return parsed(read_bytes(path, MOST))


def parsed(raw: bytes | bytearray | str) -> Any:
    """JSON, without a key twice in one object, of which libraries take different ones. A byte order mark in front says
    nothing.

    Raises:
        ValueError: it is not UTF-8, not JSON (a `json.JSONDecodeError`), or says something twice.
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8")
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"{told(next(key for key, n in counts.items() if n > 1))} is in it twice")
    return made


def holds_weights(place: Path) -> bool:
    """Whether this is a directory with weights in it, sound or not."""
    return any(os.path.lexists(place / name) for name in (INDEX, SINGLE))


@uncollected()
def read_headers(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint directory by its name: of the shards of its index, or of its one file.

    Raises:
        BadCheckpoint: there is no index and no single file, or both; a shard is missing, damaged, listed and not there
            or there and not listed; a tensor is absent, unlisted or in two files; a file is outside the directory.
    """
    if not holds_weights(directory):
        raise BadCheckpoint(f"{directory}: it holds neither {INDEX} nor {SINGLE}.")
    listed = _listed(directory / INDEX) if os.path.lexists(directory / INDEX) else None
    _check_files(directory, [SINGLE] if listed is None else list(listed))
    if listed is None:
        return read_header(directory, SINGLE)
    found: dict[str, Stored] = {}
    for file, names in listed.items():
        header = read_header(directory, file)
        if header.keys() != names:
            _refuse_other_names(directory / file, header.keys(), names)
        found.update(header)
    return found


def _listed(index: Path) -> dict[str, set[str]]:
    """File → its tensors, as the index says."""
    _check_inside(index.parent, index.name)
    try:
        said = read_json(index)
    except OSError as error:
        raise BadCheckpoint(f"{index}: it cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise BadCheckpoint(f"{index}: not an index: {error}. Fetch it anew.") from None
    weight_map = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise BadCheckpoint(f"{index}: not an index: a JSON object with a weight_map, tensor to file, is needed.")
    listed: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        listed.setdefault(file, set()).add(name)
    for file in listed:
        if file in ("", ".", "..") or "/" in file or os.sep in file or not file.isprintable():
            raise BadCheckpoint(f"{index}: it names {brief(file)}, which is not a file of this directory.")
    return listed


def _check_files(directory: Path, files: Collection[str]) -> None:
    """Each shard is a file of this directory, and no other safetensors file lies beside them."""
    for file in files:
        _check_inside(directory, file)
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in files and not path.name.startswith("."):
            raise BadCheckpoint(
                f"{path}: an unlisted shard: the weights are in {told(', '.join(sorted(files)))}."
                " Move it elsewhere, or fetch the index that lists it."
            )


def _check_inside(directory: Path, file: str) -> None:
    """Refuse a link that leaves the directory. Into the hub's own cache it may: a snapshot there is links to blobs."""
    target = Path(os.path.realpath(directory / file))
    if target.parent != Path(os.path.realpath(directory)) and not _in_blobs(directory, target):
        raise BadCheckpoint(
            f"{directory / told(file)}: a link out of this directory, to {told(target)}. Put the file itself here."
        )


def _in_blobs(directory: Path, target: Path) -> bool:
    """Whether a directory is a snapshot of the hub's cache, and a file one of the blobs beside it."""
    home = Path(os.path.realpath(directory))
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"


def blob(path: Path) -> str | None:
    """The digest of a file's content that stands in the name of the hub's blob which it is a link to: SHA-256, or of a
    small file git's SHA-1; None where it is no such link."""
    target = Path(os.path.realpath(path))
    found = _in_blobs(path.parent, target) and re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", target.name)
    return target.name if found else None


def _refuse_other_names(path: Path, held: AbstractSet[str], said: AbstractSet[str]) -> NoReturn:
    if absent := sorted(said - held):
        fact = f"the index says that it holds {told(absent[0])}; it does not"
    else:
        fact = f"it holds {told(min(held - said))}, which the index does not list there"
    raise BadCheckpoint(f"{path}: {fact}. Fetch index and shards anew.")


def read_header(directory: Path, file: str) -> dict[str, Stored]:
    """The tensors of one file, by name.

    Raises:
        BadCheckpoint: the file is missing, or its header or length is not what the format says.
    """
    path = directory / told(file)
    try:
        return open_header(directory / file)[0]
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: the shard is missing. Fetch it, or the whole checkpoint anew.") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise BadCheckpoint(
                f"{path}: too many files are open; a checkpoint keeps each of its shards open as long as it is used."
                " Raise the limit (ulimit -n), or let go of other models."
            ) from None
        raise BadCheckpoint(f"{path}: not a readable safetensors file ({error.strerror}).") from None
    except (ValueError, RecursionError) as fault:
        raise BadCheckpoint(f"{path}: not a readable safetensors file: {fault}. Fetch it anew.") from None


def open_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of one file, by name, and its metadata.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
        ValueError: its header or length is not what the format says.
    """
    opened = OpenFile.at(path)
    size, length = opened.stamp.size, 0
    if size >= 8:
        length = int.from_bytes(_bytes(opened, 0, 8), "little")
    if size < 8 or length > min(size - 8, MOST):
        raise ValueError(_too_short(size, length))
    return _checked(_header(_bytes(opened, 8, length)), path.name, 8 + length, opened)


def _bytes(opened: OpenFile, start: int, count: int) -> bytearray:
    made = bytearray(count)
    opened.read(memoryview(made), start)
    return made


def _header(raw: bytes | bytearray) -> Any:
    """The format knows no byte order mark."""
    if raw.startswith(BOM_UTF8):
        raise ValueError("its header begins with a byte order mark")
    return parsed(raw)


def _too_short(size: int, length: int) -> str:
    if size < 8:
        return f"it has {size} bytes" if size else "it is empty"
    if length > MOST:
        return f"its header would have {length:,} bytes, and at most {MOST:,} are read"
    return f"its header should have {length:,} bytes, and the file ends after {size - 8:,}"


def _checked(header: Any, file: str, data: int, opened: OpenFile) -> tuple[dict[str, Stored], dict[str, str]]:
    """The header's entries, and its metadata; the entries' bytes fill the file from ``data`` to its end, without hole
    or overlap."""
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not an object of strings")
    "".join([*header, *metadata, *metadata.values()]).encode()  # half a surrogate pair is no text
    found = {name: _entry(name, said, file, data, opened) for name, said in header.items()}
    end, size = data, opened.stamp.size
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            what = "overlaps the tensor before it" if stored.start < end else "leaves a hole before it"
            raise ValueError(f"{told(name)} {what}: it starts at byte {stored.start - data:,}, not {end - data:,}")
        end = stored.stop
    if end != size:
        fault = "it is cut" if size < end else "there is more than its header says"
        raise ValueError(f"its tensors end at byte {end:,} and the file at {size:,}: {fault}")
    return found, metadata


def _entry(name: str, said: Any, file: str, data: int, opened: OpenFile) -> Stored:
    if not isinstance(said, dict) or said.keys() != _FIELDS:
        raise ValueError(f"{told(name)} should have dtype, shape and data_offsets, and no more")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM:
        raise ValueError(f"{told(name)} has the dtype {brief(dtype)}, none of {', '.join(ITEM)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or len(numbers) > 8 or not all(map(_is_size, numbers)):
            raise ValueError(f"{told(name)} has the {what} {brief(numbers)}, not up to 8 whole numbers from 0 on")
    nbytes = math.prod(shape) * ITEM[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{told(name)}, {dtype} {shape}, takes {nbytes} bytes; its data_offsets are {offsets}")
    return Stored(file, dtype, tuple(shape), data + offsets[0], data + offsets[1], opened)


_FIELDS = {"dtype", "shape", "data_offsets"}


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63  # a longer one would take its time to multiply


def read_tensor(directory: Path, name: str, stored: Stored) -> Tensor:
    """One tensor's bytes, in a tensor of their own, on the CPU.

    Raises:
        BadCheckpoint: the file is not the one whose header was read any more, or cannot be read.
    """
    path = directory / stored.file
    try:
        stored.opened.check(path)
        made = read_stored(stored)
        stored.opened.check(path)
    except OSError as error:
        raise BadCheckpoint(
            f"{path}: {told(name)} cannot be read ({error.strerror}): the file has changed since it was opened."
            " Open the checkpoint anew."
        ) from None
    return made


def read_stored(stored: Stored) -> Tensor:
    """One tensor's bytes, out of the file that was opened, whatever stands at its path by now.

    Raises:
        OSError: somebody has written into the file, or cut it, since.
    """
    made = torch.empty(stored.shape, dtype=TORCH[stored.dtype])
    stored.opened.check()
    stored.opened.read(made.view(-1).view(torch.uint8).numpy().data, stored.start)
    stored.opened.check()
    return made


def same_bytes(directory: Path, one: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same bytes, read piece by piece.

    Raises:
        BadCheckpoint: a file cannot be read, or has changed since it was opened.
    """
    if one.nbytes != other.nbytes:
        return False
    try:
        for done in range(0, one.nbytes, PIECE):
            count = min(PIECE, one.nbytes - done)
            first, second = (_bytes(part.opened, part.start + done, count) for part in (one, other))
            if first != second:
                return False
        for part in (one, other):
            part.opened.check(directory / part.file)
        return True
    except OSError as error:
        raise BadCheckpoint(f"{directory}: {one.file} or {other.file} cannot be read ({error.strerror}).") from None


PIECE = 2**24
"""Bytes that are compared at a time."""
