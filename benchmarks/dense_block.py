"""What a full-size dense block of Kimi K2 costs: forward, and an ablation of each of its tensors, a zero at a time.

    python -m benchmarks.dense_block [--tokens 64] [--repeats 5] [--threads 2] [--dir DIR]

The block, of 497.5 M drawn weights, is written as the FP8 checkpoint of a model that has no other (and a vocabulary of
256), then opened and run alone on a drawn residual stream, in careful numerics as real checkpoints are: products in
bf16, all else in fp32. One interleaved run, medians. The machine's own rate is that of torch's bf16 product of the same
tokens with the block's largest matrix, in the same run; the share is of CPU time. On a machine with neighbours take
``--threads 1``: threads that wait for each other burn time.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch

from hooks import HookedModel, Run, zero
from probe import KIMI_K2, Drawn, save
from probe.engine import plan

DIMS = replace(KIMI_K2, moe=(False,), e=0, k=0, m=0, m_s=0, scaling=1.0, V=256)


def flops(model: HookedModel, tokens: int, given: Collection[str], edited: Collection[str] = ()) -> int:
    """Of the products in a run of the block to x_next: two for each weight and token, and scores and mixes in full."""
    dims, total = model.dims, 0
    for row in plan(model.sites.card(0), ["x_next"], [*given, "R", "M"], edited).steps:
        weights = [need for need in row.needs if need.startswith("W_")]
        total += sum(2 * tokens * model.decoder.weights.read(0, name).numel() for name in weights)
        pairs = {"S": dims.q, "O": dims.v + (dims.q if row.without else 0)}
        total += 2 * tokens**2 * dims.h * pairs.get(row.name, 0)
    return total


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("tokens", 64), ("repeats", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dir", type=Path, help="where the checkpoint is kept, or found; else it is made and deleted")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as place:
        directory = asked.dir or Path(place)
        if not (directory / "config.json").exists():
            save(Drawn(DIMS, dtype=torch.bfloat16), directory, form="fp8")
        measure(directory, asked.tokens, asked.repeats)


def measure(directory: Path, tokens: int, repeats: int) -> None:
    """Run, and print the table."""
    expanded, stored = (HookedModel.load(directory, keep=keep) for keep in ("expanded", "stored"))
    stream = torch.randn(1, tokens, DIMS.d, generator=torch.Generator().manual_seed(0))
    plain, plain_stream = HookedModel(expanded.decoder.weights), stream.to(torch.bfloat16)
    base = expanded.run_block(0, stream, want=None)
    tensors = [site.tensor for site in base.cache]

    def ablate_all() -> None:
        for tensor in tensors:
            expanded.run_block(0, stream, edits=[zero(tensor)], base=base)

    x, W = plain_stream[0], expanded.decoder.weights.read(0, "W_1")
    whole = flops(expanded, tokens, ["x_n"])
    runs: dict[str, tuple[int, Callable[[], object]]] = {
        "torch's product with the largest matrix": (2 * tokens * W.numel(), lambda: x @ W),
        "forward, expanded": (whole, lambda: expanded.run_block(0, stream)),
        "forward, expanded, reference numerics": (whole, lambda: plain.run_block(0, plain_stream)),
        "forward, stored in FP8": (whole, lambda: stored.run_block(0, stream)),
        "forward, every tensor kept": (whole, lambda: expanded.run_block(0, stream, want=None)),
        f"an ablation of each of {len(tensors)} tensors": (_ablations(expanded, base, tokens), ablate_all),
    }
    clocks = time.perf_counter, time.process_time
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    for i in range(repeats + 1):  # the first is not counted
        for name, (_, fn) in runs.items():
            start = [clock() for clock in clocks]
            fn()
            if i:
                times[name].append([clock() - then for clock, then in zip(clocks, start, strict=True)])
    print("| run | time [s] | CPU time [s] | GFLOP | GFLOP/s and core | share of torch's product |")
    print("|---|---|---|---|---|---|")
    own = 0.0
    for name, (count, _) in runs.items():
        wall, cpu = (statistics.median(column) for column in zip(*times[name], strict=True))
        rate = count / cpu / 1e9
        own = own or rate
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {count / 1e9:.1f} | {rate:.0f} | {rate / own:.0%} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"\n{tokens} tokens, {torch.get_num_threads()} threads; peak memory {peak:.1f} GB, both models together")


def _ablations(model: HookedModel, base: Run, tokens: int) -> int:
    held = [site.tensor for site in base.cache]
    return sum(flops(model, tokens, held, [tensor]) for tensor in held)


if __name__ == "__main__":
    main()
