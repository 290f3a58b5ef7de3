"""What it costs to expand FP8 and INT4: stored bytes a second and core, beside the obvious cast and multiply.

    python -m benchmarks.dequantise [--repeats 9]

One thread, one interleaved run, medians of CPU time, on shapes of Kimi K2: an expert's gate and down, the ragged matrix
of 576 rows, the dense block's gate. Bits are compared first. "In place" writes into a tensor that is there already, as
experts are read into one; a new one costs its page faults too, unless its memory was freed a moment ago. The measure of
the machine, there and then, is a copy of the expanded matrix, which reads and writes two bytes a weight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from probe.quantised import dequantise_fp8, dequantise_int4, plain_fp8, quantise_fp8, quantise_int4

GATE, DOWN = (2048, 7168), (7168, 2048)
RUNS = [("FP8", GATE), ("FP8", DOWN), ("FP8", (576, 7168)), ("FP8", (18432, 7168)), ("INT4", GATE), ("INT4", DOWN)]


def plain_int4(packed: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """Shift, mask, multiply, round, each over the whole matrix."""
    nibbles = packed[..., None] >> 4 * torch.arange(8) & 15
    return ((nibbles - 8).view(shape[0], -1, 32).float() * scale.float()[..., None]).to(torch.bfloat16).view(shape)


def ways(form: str, shape: tuple[int, int]) -> tuple[int, dict[str, Callable[[], Tensor]]]:
    """The bytes of the stored values, and each way's call."""
    weight, out = torch.randn(shape), torch.empty(shape, dtype=torch.bfloat16)
    plain: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    if form == "FP8":
        parts = quantise_fp8(weight)
        plain, ours = partial(plain_fp8, *parts), partial(dequantise_fp8, *parts)
    else:
        parts = quantise_int4(weight)
        plain, ours = partial(plain_int4, *parts, shape), partial(dequantise_int4, *parts, shape)
    copy = partial(out.copy_, plain())
    return parts[0].nbytes, {"the obvious": plain, "ours": ours, "ours, in place": partial(ours, out=out), "copy": copy}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| form | shape | way | GB/s stored | GB/s expanded | times the obvious | of a copy's rate | a copy, GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for form, shape in RUNS:
        nbytes, calls = ways(form, shape)
        want = calls["the obvious"]().view(torch.int16)
        assert all(bool((call().view(torch.int16) == want).all()) for call in calls.values()), f"{form}: other bits"
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.process_time()
                call()
                times[name].append(time.process_time() - start)
        taken = {name: statistics.median(all_of) for name, all_of in times.items()}
        expanded, copy = 2 * shape[0] * shape[1] / 1e9, taken.pop("copy")
        for name, seconds in taken.items():
            rates = f"{nbytes / seconds / 1e9:.2f} | {expanded / seconds:.2f}"
            ratios = f"{taken['the obvious'] / seconds:.1f} | {copy / seconds:.2f} | {expanded / copy:.1f}"
            print(f"| {form} | {shape[0]} × {shape[1]} | {name} | {rates} | {ratios} |")


if __name__ == "__main__":
    main()
