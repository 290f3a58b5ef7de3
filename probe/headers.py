"""The files of a checkpoint: what safetensors headers and the index say, and the bytes of one tensor.

A safetensors file is eight bytes (little-endian, the header's length), the header (a JSON object: tensor → dtype, shape
and its bytes' place), and the tensors' bytes, one after the other without a hole. All that is said here is checked
before anything that it could make large is allocated; nothing is executed and nothing unpickled. Files are opened for
each read and never mapped, so one that shrinks under us is an error and not a crash.
"""

from __future__ import annotations

import gc
import json
import math
import os
import stat
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from probe.errors import BadCheckpoint

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
"""Those of them that are ever read."""


class Stored(NamedTuple):
    """A tensor as its header describes it: the file, the dtype in the header's spelling, the shape, bytes from … to."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

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
    """A path as a user gives it: ``~`` is their home, as in a shell."""
    return Path(os.path.expanduser(path))  # a Path's own raises where there is no such user


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
        OSError: it cannot be read, or is no regular file.
        ValueError: it is longer than `MOST`, or as `parsed`.
    """
    size = _size(path)
    if size > MOST:
        raise ValueError(f"{size:,} bytes are more than the {MOST:,} that are read")
    with path.open("rb") as file:
        return parsed(file.read(MOST))


def parsed(raw: bytes | str) -> Any:
    """JSON, without a key twice in one object, of which libraries take different ones. A byte order mark in front says
    nothing.

    Raises:
        ValueError: it is not UTF-8, not JSON (a `json.JSONDecodeError`), or says something twice.
    """
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
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


def _size(path: Path) -> int:
    """The size of a regular file: to open a pipe would wait for ever, and a device has no end."""
    said = path.stat()
    if not stat.S_ISREG(said.st_mode):
        raise OSError(None, "it is no regular file")
    return said.st_size


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
    home = Path(os.path.realpath(directory))
    target = Path(os.path.realpath(directory / file))
    cache = home.parent.parent / "blobs"
    if target.parent != home and not (home.parent.name == "snapshots" and target.parent == cache):
        raise BadCheckpoint(
            f"{directory / told(file)}: a link out of this directory, to {told(target)}. Put the file itself here."
        )


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
        size = _size(directory / file)
        with (directory / file).open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, MOST):
                raise ValueError(_too_short(size, length))
            header = _header(opened.read(length))
        return _checked(header, file, 8 + length, size)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: the shard is missing. Fetch it, or the whole checkpoint anew.") from None
    except OSError as error:
        raise BadCheckpoint(f"{path}: not a readable safetensors file ({error.strerror}).") from None
    except (ValueError, RecursionError) as fault:
        raise BadCheckpoint(f"{path}: not a readable safetensors file: {fault}. Fetch it anew.") from None


def _header(raw: bytes) -> Any:
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


def _checked(header: Any, file: str, data: int, size: int) -> dict[str, Stored]:
    """The header's entries; their bytes fill the file from ``data`` to its end, without overlap or hole."""
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not an object of strings")
    "".join([*header, *metadata, *metadata.values()]).encode()  # half a surrogate pair is no text
    found = {name: _entry(name, said, file, data) for name, said in header.items()}
    end = data
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            what = "overlaps the tensor before it" if stored.start < end else "leaves a hole before it"
            raise ValueError(f"{told(name)} {what}: it starts at byte {stored.start - data:,}, not {end - data:,}")
        end = stored.stop
    if end != size:
        fault = "it is cut" if size < end else "there is more than its header says"
        raise ValueError(f"its tensors end at byte {end:,} and the file at {size:,}: {fault}")
    return found


def _entry(name: str, said: Any, file: str, data: int) -> Stored:
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
    return Stored(file, dtype, tuple(shape), data + offsets[0], data + offsets[1])


_FIELDS = {"dtype", "shape", "data_offsets"}


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63  # a longer one would take its time to multiply


def read_tensor(directory: Path, name: str, stored: Stored) -> Tensor:
    """One tensor's bytes, in a tensor of their own, on the CPU.

    Raises:
        BadCheckpoint: the file has become shorter since its header was read, or cannot be read any more.
    """
    made = torch.empty(stored.shape, dtype=READ[stored.dtype])
    left = made.view(-1).view(torch.uint8).numpy().data
    path = directory / stored.file
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(stored.start)
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError(None, f"it ends {len(left):,} bytes before the tensor does")
                left = left[count:]
    except OSError as error:
        raise BadCheckpoint(
            f"{path}: {told(name)} cannot be read ({error.strerror}): the file has changed since it was opened."
        ) from None
    return made


def same_bytes(directory: Path, one: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same bytes, read piece by piece.

    Raises:
        BadCheckpoint: a file cannot be read.
    """
    if one.nbytes != other.nbytes:
        return False
    try:
        with (directory / one.file).open("rb") as first, (directory / other.file).open("rb") as second:
            first.seek(one.start)
            second.seek(other.start)
            left = one.nbytes
            while left and (piece := first.read(min(left, PIECE))) == second.read(len(piece)) and piece:
                left -= len(piece)
            return not left
    except OSError as error:
        raise BadCheckpoint(f"{directory}: {one.file} or {other.file} cannot be read ({error.strerror}).") from None


PIECE = 2**24
"""Bytes that are compared at a time."""
