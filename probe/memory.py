"""What a checkpoint's weights take in memory, for each way to keep them; from headers, before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from probe.errors import TooLarge
from probe.forms import Survey, survey
from probe.headers import expanded
from probe.names import stored_names
from probe.weights import weight_shape, weight_sites

Keeping = Literal["expanded", "stored", "disk"]
"""How weights are kept: made into the asked dtype once and held in memory; held as they are stored, and expanded where
a step reads them; or left on disk, and read where a step reads them, of the experts those chosen."""


class Bytes(NamedTuple):
    """What one way to keep weights takes.

    Attributes:
        held: all along.
        block: the largest block's share, or on disk what a run of it may read.
        once: beside what is held, for a moment: the largest tensor that is read or expanded at once. A routed weight
            counts with all experts; fewer are expanded where tokens choose fewer.
    """

    held: int
    block: int
    once: int

    @property
    def most(self) -> int:
        """Bytes at the worst moment."""
        return self.held + self.once


@dataclass(frozen=True)
class Memory:
    """A table of the choices, cheapest last.

    Attributes:
        directory: of the checkpoint.
        choices: what each takes.
        available: what this machine, or the device, has left; None where nobody can say.
    """

    directory: Path
    choices: Mapping[Keeping, Bytes]
    available: int | None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("keep", "in memory", "largest block", "besides, at once")]
        rows += [(keep, *(byte_count(n) for n in row)) for keep, row in self.choices.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        here = [] if self.available is None else [f"available: {byte_count(self.available)}"]
        return "\n".join([f"Memory for the weights of {self.directory}", *lines, *here])

    def check(self, keep: Keeping) -> None:
        """Refuse a choice that cannot fit.

        Raises:
            TooLarge: it takes more than is available; the message names what takes less.
        """
        takes = self.choices[keep].most
        if self.available is None or takes <= self.available:
            return
        less = [f"keep={name!r} takes {byte_count(row.most)}" for name, row in self.choices.items() if row.most < takes]
        raise TooLarge(
            f"{self.directory}: keep={keep!r} takes {byte_count(takes)} of memory, and {byte_count(self.available)} are"
            f" available; {', '.join(less) or 'no other way to keep the weights takes less'}."
        )


def memory(directory: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Memory:
    """What `load` of a checkpoint would take, for each way to keep its weights; ask before you choose.

    Args:
        directory, dtype, device: as `load`'s.

    Raises:
        BadConfig, BadCheckpoint: as `Checkpoint`; but tensors that are missing count as none.
    """
    directory = expanded(directory)
    found = survey(directory)
    if any(fault.file for fault in found.faults):  # something is there that nobody can read
        found.refuse_faults(directory)
    return table(directory, found, dtype, device)


def table(directory: Path, found: Survey, dtype: torch.dtype | None, device: torch.device | str | None) -> Memory:
    """The same, of a directory whose headers have been read."""
    expanded: dict[int | None, int] = {}
    stored: dict[int | None, int] = {}
    largest_weight = largest_stored = 0
    counted: set[str] = set()  # two weights may share a matrix
    for block, leaf in weight_sites(found.dims):
        names = [name for name in stored_names(block, leaf, found.dims) if name in found.kept]
        wide = max((found.dtype(name, leaf.name, dtype).itemsize for name in names), default=0)
        takes = wide * math.prod(weight_shape(leaf, found.dims))
        expanded[block] = expanded.get(block, 0) + takes
        largest_weight = max(largest_weight, takes)
        for name in names:
            nbytes = sum(found.stored[part].nbytes for part in found.kept[name].parts if part in found.stored)
            stored[block] = stored.get(block, 0) + (nbytes if name not in counted else 0)
            largest_stored = max(largest_stored, nbytes)
            counted.add(name)
    once = largest_weight + largest_stored
    choices: dict[Keeping, Bytes] = {
        "expanded": Bytes(sum(expanded.values()), _of_a_block(expanded), largest_stored),
        "stored": Bytes(sum(stored.values()), _of_a_block(stored), once),
        "disk": Bytes(0, _of_a_block(stored), once),
    }
    return Memory(directory, choices, available(device))


def _of_a_block(nbytes: Mapping[int | None, int]) -> int:
    return max((size for block, size in nbytes.items() if block is not None), default=0)


def available(device: torch.device | str | None = None) -> int | None:
    """Bytes that can still be had: of a GPU, or of this machine within its control group's limit; None: unknown."""
    place = torch.device(device or "cpu")
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    free = _numbers(Path("/proc/meminfo")).get("MemAvailable:")
    if place.type != "cpu" or free is None:
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{what}").read_text(encoding="ascii")) for what in ("max", "current"))
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return free * 1024
    return min(free * 1024, limit - used + _numbers(group / "memory.stat").get("file", 0))  # files' pages are given up


def _numbers(path: Path) -> dict[str, int]:
    """The lines ``name number …`` of one of the kernel's files."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def byte_count(n: int) -> str:
    """Bytes as people read them: ``1.5 GB``."""
    size, unit = float(n), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
