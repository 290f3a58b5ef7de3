"""What estimating every patch costs, in forward passes over the same prompts: ratios of CPU time, medians.

    python -m benchmarks.attribution [--repeats 5]

One thread, fp32, `benchmarks.forward`'s model (hidden 512, one dense and seven MoE blocks), 16 pairs of 64 tokens. An
estimate is of all tensors of all blocks: two runs, one backward pass, intervals and the frame; less the digest of the
weights, which names the model in every frame and has nothing to do with the estimate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.forward import build
from experiments.attribution import attribute
from experiments.prompts import Answer, Prompt, Prompts
from experiments.study import identity
from probe import TINY, Tokenizer

T, PAIRS = 64, 16


def pairs() -> Prompts:
    """Random tokens, of which a corrupt prompt has another one at a quarter of the way."""
    tokenizer = Tokenizer.find(TINY)
    assert tokenizer is not None, "the tiny model has one"
    tokens = torch.randint(3, 1000, (PAIRS, T)).tolist()
    answer, wrong = (Answer((text,), ((i,),)) for text, i in (("one", 1), ("two", 2)))
    rows = []
    for i, ids in enumerate(tokens):
        end = {"END": range(T - 1, T)}
        corrupt = (*ids[: T // 4], 1, *ids[T // 4 + 1 :])
        rows.append(Prompt(str(i), tuple(ids), f"not {i}", answer, wrong, str(i), "", end, corrupt, end))
    return Prompts(tuple(rows), tokenizer)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    _, model = build()
    prompts = pairs()
    tokens, _ = prompts.batch()

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    runs: dict[str, Callable[[], object]] = {
        "forward": forward,
        "digest": lambda: identity(model),
        "all tensors, to first order": lambda: attribute(model, prompts, exact=False),
        "the same by head": lambda: attribute(model, prompts, by="head", exact=False),
        "with integrated gradients, 4 steps": lambda: attribute(model, prompts, exact=False, steps=4),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats + 1):  # the first is not counted
        for name, run in runs.items():
            start = time.process_time()
            run()
            if i:
                times[name].append(time.process_time() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    digest, one = medians.pop("digest"), medians["forward"]
    print("| run | ms | forward passes |\n|---|---|---|")
    for name, median in medians.items():
        median -= digest if name != "forward" else 0.0
        print(f"| {name} | {median * 1e3:.0f} | {median / one:.2f} |")


if __name__ == "__main__":
    main()
