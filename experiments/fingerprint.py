"""What tells weights from others': the content of the files that they were read from, or their own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from probe.checkpoint import Checkpoint
from probe.engine import Weights
from probe.errors import BadCheckpoint
from probe.files import read_bytes, replacing
from probe.headers import OpenFile, Stamp, blob
from probe.memory import byte_count
from probe.weights import InMemory, digest_of

LIMIT = 64 * 10**9
"""Bytes of files that are read for their digest without being asked to; see `by_content`."""

TOLD = 2.0
"""Seconds that this may take without a word before."""

SETTLED = 2.0
"""Seconds that a file must have stood before its digest is kept: file systems' clocks tick, some no faster than that,
and what is written twice within one tick has one time."""

BY_STAT = "by stat"

_PIECE = 2**24
"""Bytes of a file that are hashed at a time."""

_asked: ContextVar[bool] = ContextVar("by content", default=False)


@contextmanager
def by_content() -> Iterator[None]:
    """Within this, checkpoints of any size are named by their content; without, those above `LIMIT` by stat."""
    before = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(before)


def fingerprint(weights: Weights) -> str:
    """What tells weights from others'.

    Of a checkpoint it is one, however its weights are kept and whatever they are cast to: the content of its files. In
    a snapshot of the hub's cache that stands in the names of the blobs; other files are read once for their SHA-256,
    which is what the hub takes, too. Where that would be more than `LIMIT` bytes, and `by_content` doesn't ask for it,
    it is ``by stat``: the files' names, sizes and times.

    Of other weights (random ones, another library's), and of those in memory that somebody has written into since they
    were read, it covers all values, with names, dtypes and shapes. Weights that have a ``fingerprint`` of their own say
    it themselves.

    Raises:
        BadCheckpoint: a file that weights are still read from has changed since it was opened.
    """
    own = getattr(weights, "fingerprint", None)
    if own is not None:
        return str(own)
    if isinstance(weights, Checkpoint | InMemory) and weights.origin is not None:
        files, in_memory = weights.origin
        if in_memory is None:
            return _of_files(files)
        if in_memory == weights.digest():
            asked = (*files.items(), _asked.get())
            with suppress(BadCheckpoint):  # what is in memory stays as it is, whatever becomes of the files
                _NAMES[asked] = _of_files(files)
            if asked in _NAMES:
                return _NAMES[asked]
    return digest_of(weights)


_NAMES: dict[tuple[object, ...], str] = {}
"""Of weights in memory by their files, for when these have gone: a name stays, too."""


def _of_files(files: Mapping[Path, Stamp]) -> str:
    for path, stamp in files.items():
        _opened(path, stamp)
    named = {path: name for path in files if (name := blob(path)) is not None}
    rest = {path: stamp for path, stamp in files.items() if path not in named}
    size = sum(stamp.size for stamp in rest.values())
    if size <= LIMIT or _asked.get():
        return _joined({**named, **_digests(rest)}.values())
    _say_by_stat(next(iter(rest)).parent, size)
    return f"{BY_STAT} {_joined(f'{path.name} {stamp.size} {stamp.modified}' for path, stamp in files.items())}"


def _opened(path: Path, stamp: Stamp) -> OpenFile:
    try:
        opened = OpenFile.at(path)
    except OSError as error:
        raise BadCheckpoint(f"{path}: it cannot be read any more ({error.strerror}).") from None
    if opened.stamp != stamp:
        raise BadCheckpoint(f"{path}: the file has changed since it was opened. Open the checkpoint anew.")
    return opened


def _joined(parts: Iterable[str]) -> str:
    return blake2b("\n".join(sorted(parts)).encode(), digest_size=16).hexdigest()


@cache
def _say_by_stat(directory: Path, size: int) -> None:
    print(
        f"{directory}: frames name this model {BY_STAT}: its files' names, sizes and times. To name it by content,"
        f" {byte_count(size)} have to be read once: `k2probe --digest ...`, or experiments.fingerprint.by_content().",
        file=sys.stderr,
    )


# ---- digests of files, made once -------------------------------------------------------------------------------------


def kept() -> Path:
    """The folder of the digests that have been made, ``k2-probe/digests`` in the user's cache folder: that is
    ``XDG_CACHE_HOME``, or else ``~/.cache``. All of it may be deleted.

    Raises:
        RuntimeError: there is no home.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path("~/.cache").expanduser()) / "k2-probe" / "digests"


def _digests(files: Mapping[Path, Stamp]) -> dict[Path, str]:
    """The SHA-256 of each file, made now where it isn't kept."""
    found = {p: digest for p, stamp in files.items() if (digest := _recalled(_entry(_opened(p, stamp)))) is not None}
    new = {path: stamp for path, stamp in files.items() if path not in found}
    size = sum(stamp.size for stamp in new.values())
    seconds = size * _seconds(*next(iter(new.items()))) if new else 0.0
    if seconds > TOLD:
        where = next(iter(new)).parent
        print(f"{where}: {byte_count(size)} are read once for their digest: {seconds:,.0f} seconds", file=sys.stderr)
    hidden = not sys.stderr.isatty()
    with tqdm(total=size, desc="digest", unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
        return found | {path: _made(path, stamp, bar) for path, stamp in new.items()}


def _seconds(path: Path, stamp: Stamp) -> float:
    """How long a byte takes, by the first of a file."""
    start = time.perf_counter()
    piece = memoryview(bytearray(min(_PIECE, stamp.size)))
    _read(path, _opened(path, stamp), piece, 0)
    sha256(piece)
    return (time.perf_counter() - start) / len(piece)


def _made(path: Path, stamp: Stamp, bar: tqdm[NoReturn]) -> str:
    """The SHA-256 of a file, made and kept."""
    began, file, made = time.time(), _opened(path, stamp), sha256()
    entry, said = _entry(file), os.fstat(file.descriptor)
    piece = memoryview(bytearray(_PIECE))
    for start in range(0, stamp.size, _PIECE):
        part = piece[: stamp.size - start]
        _read(path, file, part, start)
        made.update(part)
        bar.update(len(part))
    _opened(path, stamp)
    if _entry(file) == entry and began - max(said.st_mtime, said.st_ctime) > SETTLED:
        _keep(entry, made.hexdigest())
    return made.hexdigest()


def _read(path: Path, file: OpenFile, place: memoryview, start: int) -> None:
    try:
        file.read(place, start)
    except OSError as error:
        raise BadCheckpoint(f"{path}: it cannot be read any more ({error.strerror}).") from None


def _entry(file: OpenFile) -> str:
    """The name that a file's digest is kept under: device, inode, size, times of its content and of its state."""
    said = os.fstat(file.descriptor)
    return "-".join(map(str, (*Stamp.of(said), said.st_ctime_ns)))


_KEPT: dict[str, str] = {}
"""What has been recalled or kept, for where no file can be."""


def _sealed(entry: str, digest: str) -> str:
    """An entry's line, by which a damaged one is told."""
    return f"{digest} {blake2b(f'{entry} {digest}'.encode(), digest_size=8).hexdigest()}\n"


def _recalled(entry: str) -> str | None:
    if entry not in _KEPT:
        with suppress(OSError, ValueError, RuntimeError):
            line = read_bytes(kept() / entry).decode("ascii")
            if line == _sealed(entry, line[:64]):
                _KEPT[entry] = line[:64]
    return _KEPT.get(entry)


def _keep(entry: str, digest: str) -> None:
    """Keep a digest, whole or not at all; without a folder to write to, for this process."""
    _KEPT[entry] = digest
    with suppress(OSError, RuntimeError), replacing(kept() / entry) as file:
        file.write(_sealed(entry, digest).encode("ascii"))
