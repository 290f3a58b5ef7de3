"""The process's memory, as the system sees it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache


def resident() -> int:
    """Bytes of the process that are in memory; 0 where the system doesn't tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def give_back() -> None:
    """Give the heap's empty pages back to the system; where the C library has no such call, do nothing."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc's
        return None
