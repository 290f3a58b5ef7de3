"""Files, whole: read only where they are regular ones, and put in place only once they are complete."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from probe.errors import BadPath, ProbeError


def check_name(path: Path) -> None:
    """Refuse a name that the system's calls don't take: with a NUL or half a surrogate pair in it, or too long.

    Raises:
        OSError: it is one.
    """
    try:
        named = os.fsencode(path)
    except ValueError:
        named = b"\0"
    if b"\0" in named:
        raise OSError(None, "no file can be called so")
    if max(map(len, named.split(b"/"))) > 255:
        raise OSError(None, "a name of more than 255 bytes, which no file can have")


def size_of(path: Path) -> int:
    """The size of a regular file: to open a pipe would wait for ever, and a device has no end.

    Raises:
        OSError: there is none; also where the path is none that the system knows.
    """
    check_name(path)
    said = path.stat()
    if not stat.S_ISREG(said.st_mode):
        raise OSError(None, "it is no regular file")
    return said.st_size


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """What a regular file holds.

    Args:
        most: how many bytes are believed; None: any.

    Raises:
        OSError: it cannot be read, is no regular file, or holds more.
    """
    size = size_of(path)
    if most is not None and size > most:
        raise OSError(None, f"{size:,} bytes are more than the {most:,} that are read")
    return path.read_bytes()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write what shall stand at ``path``: it takes that place once it is complete and on the disk, whatever
    ends the program before. Folders are made.

    Until then it has a name of its own beside it, so that two who write to one path don't meet: the last one's stands,
    whole. A link that stands there is replaced, and not followed.

    Raises:
        BadPath: it can't be written; what stood there stands.
    """
    with together() as write, write(path) as file:
        yield file


@contextmanager
def together() -> Iterator[Callable[[Path], AbstractContextManager[BinaryIO]]]:
    """Several files that take their places, as in `replacing`, when all of them are complete, or none does.

    Raises:
        BadPath: one can't be written, or put in its place.
    """
    made: dict[Path, Path] = {}

    @contextmanager
    def write(path: Path) -> Iterator[BinaryIO]:
        with _told(path):
            check_name(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{_start(path)}{secrets.token_hex(8)}.part")
            with open(aside, "xb") as file:  # x: a file that nobody has made, of the rights that others get here
                made[path] = aside
                yield file
                file.flush()
                os.fsync(file.fileno())

    try:
        yield write
        for path, aside in made.items():
            with _told(path):
                aside.replace(path)
    finally:
        for aside in made.values():
            aside.unlink(missing_ok=True)


def clear(path: Path) -> None:
    """Remove what processes that were killed have left half-written of a file that nobody else writes now."""
    for name in os.listdir(path.parent) if path.parent.exists() else ():
        if name.startswith(_start(path)) and name.endswith(".part"):
            (path.parent / name).unlink(missing_ok=True)


def _start(path: Path) -> str:
    """How the temporary names for a path start; with what follows no longer than a name may be."""
    return f".{os.fsdecode(os.fsencode(path.name)[:200])}."


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except ProbeError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise BadPath(f"can't write {path}: {path.parent} is not a folder.") from error
    except OSError as error:
        raise BadPath(f"can't write {path}: {error.strerror or error}.") from error
