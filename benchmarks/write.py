"""What it costs to write a checkpoint: one block of Kimi K2 in its true sizes, of random weights, in FP8 or INT4.

    python -m benchmarks.write DIR [--moe] [--form fp8]

One thread. DIR then holds a model of that one block and a vocabulary of 1,024, and can be opened as any other: a dense
block of 0.5 GB, or with --moe all 384 experts, 17 GB in FP8. Memory is the growth of the process's peak.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path

import torch

from probe import KIMI_K2, Drawn, save

NO_EXPERTS = {"e": 0, "k": 0, "m": 0, "m_s": 0, "scaling": 1.0}


def peak() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--form", choices=["plain", "fp8", "int4"], default="fp8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dims = replace(KIMI_K2, V=1024, moe=(options.moe,), **({} if options.moe else NO_EXPERTS))
    before, start, cpu = peak(), time.perf_counter(), time.process_time()
    save(Drawn(dims, dtype=torch.bfloat16), options.directory, form=options.form)
    taken, worked = time.perf_counter() - start, time.process_time() - cpu
    size = sum(file.stat().st_size for file in options.directory.glob("*.safetensors"))
    print("| form | GB | s | s of CPU | GB of memory |\n|---|---|---|---|---|")
    print(f"| {options.form} | {size / 1e9:.2f} | {taken:.1f} | {worked:.1f} | {(peak() - before) / 1e9:.2f} |")


if __name__ == "__main__":
    main()
