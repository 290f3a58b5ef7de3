"""What it takes to open Kimi K2: 61 headers and an index of 139,644 tensors, checked one by one; no weight is read.

    python -m benchmarks.opening [--repeats 5]

The files are made for it, in their true sizes (a terabyte) and all holes, so that they take 30 MB of a disk. One core;
times are CPU time, the best of the repeats.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probe import Checkpoint, memory
from probe.headers import read_headers
from probe.params import tally
from tests.probe.files import hollow_k2

STEPS: dict[str, Callable[[Path], Any]] = {
    "headers and index": read_headers,
    "Checkpoint: these, and each tensor matched with the config": Checkpoint,
    "memory: the same, and the table of choices": memory,
    "tally: the same, and the parameters counted": tally,
}


def best(step: Callable[[Path], Any], directory: Path, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        step(directory)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as made:
        hollow_k2(Path(made))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name, step in STEPS.items():
            print(f"{best(step, Path(made), repeats):6.2f} s  {name}")
        print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000:6.0f} MB of memory at the peak")


if __name__ == "__main__":
    main()
