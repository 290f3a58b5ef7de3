"""What it costs to expand FP8 and INT4: stored bytes a second and core, beside the obvious cast and multiply.

    python -m benchmarks.dequantise [--repeats 7]

One thread, one interleaved run, medians of CPU time, on shapes of Kimi K2: an expert's gate, the ragged matrix of 576
rows, the dense block's gate. Bits are compared first. "In place" writes into a tensor that is there already, as experts
are read into one; a new one costs its page faults too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from probe.quantised import dequantise_fp8, dequantise_int4, plain_fp8, quantise_fp8, quantise_int4

SHAPES = [(2048, 7168), (576, 7168), (18432, 7168)]


def plain_int4(packed: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """Shift, mask, multiply, round, each over the whole matrix."""
    nibbles = packed[..., None] >> 4 * torch.arange(8) & 15
    return ((nibbles - 8).view(shape[0], -1, 32).float() * scale.float()[..., None]).to(torch.bfloat16).view(shape)


def ways(shape: tuple[int, int]) -> dict[tuple[str, str], tuple[int, Callable[[], Tensor]]]:
    """By form and way: the bytes of the stored values, and the call."""
    weight, out = torch.randn(shape), torch.empty(shape, dtype=torch.bfloat16)
    fp8, int4 = quantise_fp8(weight), quantise_int4(weight)
    return {
        ("FP8", "the obvious"): (fp8[0].nbytes, lambda: plain_fp8(*fp8)),
        ("FP8", "ours"): (fp8[0].nbytes, lambda: dequantise_fp8(*fp8)),
        ("FP8", "ours, in place"): (fp8[0].nbytes, lambda: dequantise_fp8(*fp8, out=out)),
        ("INT4", "the obvious"): (int4[0].nbytes, lambda: plain_int4(*int4, shape)),
        ("INT4", "ours"): (int4[0].nbytes, lambda: dequantise_int4(*int4, shape)),
        ("INT4", "ours, in place"): (int4[0].nbytes, lambda: dequantise_int4(*int4, shape, out=out)),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| shape | form | way | GB/s of stored bytes | G weights/s | times the obvious |\n|---|---|---|---|---|---|")
    for shape in SHAPES:
        runs = ways(shape)
        for form, way in runs:
            same = runs[form, way][1]().view(torch.int16) == runs[form, "the obvious"][1]().view(torch.int16)
            assert bool(same.all()), f"{form}, {way}: other bits"
        times: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, (_, fn) in runs.items():
                start = time.process_time()
                fn()
                times[name].append(time.process_time() - start)
        for (form, way), (nbytes, _) in runs.items():
            taken = statistics.median(times[form, way])
            ratio = statistics.median(times[form, "the obvious"]) / taken
            weights = shape[0] * shape[1] / taken
            print(f"| {shape} | {form} | {way} | {nbytes / taken / 1e9:.2f} | {weights / 1e9:.2f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
