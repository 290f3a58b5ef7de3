"""What can go wrong, by name. Every message says the thing, the fact and the remedy.

Deep code raises a terse fact; the boundary that knows what was asked adds the rest with `asking`.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

NOT_THE_USERS = (
    *(f"{Path(__file__).parents[1] / room}/" for room in ("probe", "hooks", "experiments")),
    f"{Path(contextlib.__file__).parent}/",
)
"""Where code lies that a user has not written: ours, Python's; and in any ``site-packages``."""


class ProbeError(Exception):
    """The root of every error that this toolkit raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the user's own lines that led here, and the fact. Our lines between them say nothing
        that it doesn't; ``%debug`` walks through all."""
        frames = traceback.extract_tb(self.__traceback__)
        own = [f for f in frames if not (f.filename.startswith(NOT_THE_USERS) or "site-packages" in f.filename)]
        where = f"(raised in {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        return [*traceback.format_list(own), f"{type(self).__name__}: {self}", where]


class UnknownTensor(ProbeError, KeyError):
    """A spelling that names no tensor, weight or site here."""

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])


class UnknownDim(ProbeError):
    """A dim that the tensor lacks."""


class OutOfRange(ProbeError, IndexError):
    """A block, head, position, expert or feature that does not exist. Nothing is clipped."""


class ShapeMismatch(ProbeError, ValueError):
    """A tensor of another shape, dtype or device than its place on the card."""


class Missing(ProbeError):
    """A plan needs a value that was not given and cannot be computed."""


class BadConfig(ProbeError, ValueError):
    """A ``config.json`` that we cannot honour, by the key that is wrong."""


class BadCheckpoint(ProbeError, ValueError):
    """A checkpoint directory that cannot be read, by file and tensor."""


class BadPath(ProbeError, OSError):
    """A file that cannot be written or read."""


class BadText(ProbeError, ValueError):
    """Text or tokens that the tokenizer or the model cannot take."""


class BadEdit(ProbeError, ValueError):
    """An edit that cannot mean what it says."""


class Unmatched(BadEdit):
    """A value of another run that does not exist: no token of the reference prompts chose this expert."""


class TooLarge(ProbeError, MemoryError):
    """A run that would not fit the bytes it was given; refused before it starts."""


class TextWarning(UserWarning):
    """Something in a text that may not be meant."""


def warn_of_text(message: str) -> None:
    """Give a `TextWarning` at the user's own line, the last that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, TextWarning, stacklevel=level)


def nearest(spelling: str, known: Iterable[str], n: int = 3) -> list[str]:
    """The ``n`` known spellings closest to ``spelling``, upper and lower case alike; best first."""
    by_fold: dict[str, list[str]] = {}
    for name in known:
        by_fold.setdefault(name.casefold(), []).append(name)
    folds = difflib.get_close_matches(spelling[:200].casefold(), by_fold, n=n, cutoff=0.5)
    return [name for fold in folds for name in by_fold[fold]][:n]


def check_number(what: str, value: int, low: int, high: int) -> None:
    """Refuse what is no whole number of a range; nothing is clipped.

    Raises:
        OutOfRange: it isn't.
    """
    if type(value) is not int or not low <= value <= high:
        short = f"{value!r:.40}" if type(value) is not int or abs(value) < 10**40 else "a number beyond that"
        raise OutOfRange(f"{what}={short}: it is a whole number from {low} to {high:,}.")


def check_seed(seed: int) -> None:
    """Refuse a seed that not every generator takes, or that one takes for another's, as Python's does -1 for 1.

    Raises:
        OutOfRange: it is one.
    """
    check_number("seed", seed, 0, 2**63 - 1)


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Put what was asked in front of a `ProbeError` that passes through."""
    try:
        yield
    except ProbeError as fact:
        fact.args = (f"{what}: {fact}", *fact.args[1:])
        raise
