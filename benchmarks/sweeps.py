"""What a sweep costs beside one forward pass per patch: ratios of CPU time in one interleaved run, medians.

    python -m benchmarks.sweeps [--repeats 3] [--only residual,bf16,block,neurons]

One thread. The model is `benchmarks.forward`'s: hidden 512, one dense and seven MoE blocks of 16 experts (top 4), 64
tokens; a patch is the clean residual stream of one block at one position in the corrupt run, read at the last token.
Peers are run on a sample of the same patches (they cost the same wherever they are), and every sampled number must
agree with ours. One full-size dense block of Kimi K2 in bf16 is the last part. Ratios hold from machine to machine,
times don't.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedTokenizerFast

from benchmarks.forward import build
from hooks import Cell, Edit, HookedModel, Live, patch, sweep, zero
from hooks.neurons import neuron_effects
from probe import KIMI_K2, random_weights
from probe.sites import Site

T, BLOCKS = 64, 8
LOGITS = Site(None, "logits")
SAMPLE = 8
"""Patches that a peer runs one by one."""


def cpu(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of CPU that something takes, and what it gives."""
    start = time.process_time()
    given = act()
    return time.process_time() - start, given


def interleaved(
    ways: dict[str, tuple[int, Callable[[], Any]]], repeats: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Milliseconds a patch of each way (its number of patches, what runs them), medians; and what each gave."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    given: dict[str, Any] = {}
    for _ in range(repeats):
        for name, (patches, act) in ways.items():
            seconds, given[name] = cpu(act)
            times[name].append(1e3 * seconds / patches)
    return {name: statistics.median(all_) for name, all_ in times.items()}, given


# ---- the peers -------------------------------------------------------------------------------------------------------


def streams(hf: Any, tokens: Tensor) -> list[Tensor]:
    """The residual stream into each block, by forward hooks."""
    seen: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone())) for layer in hf.model.layers]
    hf(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def by_hooks(hf: Any, clean: Sequence[Tensor], corrupt: Tensor, cells: Iterable[tuple[int, int]]) -> Tensor:
    """One hooked forward pass a patch: the last token's logits, [patches V]."""
    made = []
    for block, pos in cells:

        def put(_: Any, args: Any, block: int = block, pos: int = pos) -> Any:
            x = args[0].clone()
            x[:, pos] = clean[block][:, pos]
            return (x, *args[1:])

        hook = hf.model.layers[block].register_forward_pre_hook(put)
        made.append(hf(corrupt).logits[0, -1])
        hook.remove()
    return torch.stack(made)


def by_batch(hf: Any, clean: Sequence[Tensor], corrupt: Tensor, block: int, size: int) -> Tensor:
    """As many patches of one block as rows in a batch: the best that a loop can be made by hand."""

    def put(_: Any, args: Any) -> Any:
        x = args[0].clone()
        rows = torch.arange(size)
        x[rows, rows % T] = clean[block][0, rows % T]
        return (x, *args[1:])

    hook = hf.model.layers[block].register_forward_pre_hook(put)
    made: Tensor = hf(corrupt.expand(size, -1)).logits[:, -1]
    hook.remove()
    return made


def by_lens(bridge: Any, clean: Any, corrupt: Tensor, cells: Iterable[tuple[int, int]]) -> Tensor:
    """TransformerLens' own way: a hooked run of the bridge a patch."""
    made = []
    for block, pos in cells:

        def put(x: Tensor, hook: Any, block: int = block, pos: int = pos) -> Tensor:
            x[:, pos] = clean[f"blocks.{block}.hook_resid_pre"][:, pos]
            return x

        logits = bridge.run_with_hooks(corrupt, fwd_hooks=[(f"blocks.{block}.hook_resid_pre", put)])
        made.append(logits[0, -1])
    return torch.stack(made)


def booted(hf: Any) -> Any:
    """TransformerLens' bridge on a copy of the model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")))
    tokenizer.init_kwargs["name_or_path"] = "none"
    model = copy.deepcopy(hf)  # the bridge takes it apart
    model.config.architectures = ["DeepseekV3ForCausalLM"]
    return TransformerBridge.boot_transformers("bench", hf_model=model, tokenizer=tokenizer)


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours(model: HookedModel, clean: Tensor, corrupt: Tensor, edits: Callable[[Live], list[Edit]]) -> Tensor:
    """All cells in one walk, both caching passes included: the last token's logits, [cells V]."""
    base, source = Live(corrupt), Live(clean)
    cells = [Cell((edit,)) for edit in edits(source)]
    made: dict[int, Tensor] = {}
    sweep(model, base, cells, lambda who, _, value: made.update({id(who): value[0, 0]}), sources=[source])
    return torch.stack([made[id(cell)] for cell in cells])


def residual(source: Live) -> list[Edit]:
    """Every block × position."""
    return [patch("x_n", block, source=source, T=pos) for block in range(BLOCKS) for pos in range(T)]


def heads(source: Live) -> list[Edit]:
    """Every block × head at the last position."""
    return [patch("O", block, source=source, T=-1, h=h) for block in range(BLOCKS) for h in range(8)]


def agree(mine: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal to 1e-5 of the largest value; in bf16 routing flips, and only the general run is compared."""
    far = float((mine - theirs).abs().max())
    if dtype == torch.float32:
        assert far <= 1e-5 * max(1.0, float(theirs.abs().max())), f"the sweep is off by {far:.2g}"


# ---- the parts -------------------------------------------------------------------------------------------------------


def against_peers(repeats: int) -> None:
    """The residual sweep, fp32, beside its peers; a pair that differs at one token; heads at the last position."""
    hf, model = build()
    bridge = booted(hf)
    clean, corrupt = torch.randint(0, 1000, (2, 1, T), generator=torch.Generator().manual_seed(1))
    stream = streams(hf, clean)
    cache = bridge.run_with_cache(clean)[1]
    cells = [(i * 7 % BLOCKS, i * 23 % T) for i in range(SAMPLE)]
    one = corrupt.clone()
    one[0, :] = clean[0, :]
    one[0, T // 3] = (one[0, T // 3] + 1) % 1000
    ways = {
        "transformers, a hooked forward a patch": (SAMPLE, lambda: by_hooks(hf, stream, corrupt, cells)),
        "TransformerLens' bridge, a run a patch": (SAMPLE, lambda: by_lens(bridge, cache, corrupt, cells)),
        "transformers, 64 patches a batch": (T, lambda: by_batch(hf, stream, corrupt, 3, T)),
        "ours, 512 cells": (BLOCKS * T, lambda: ours(model, clean, corrupt, residual)),
        "ours, one token differs a third in": (BLOCKS * T, lambda: ours(model, clean, one, residual)),
        "ours, 64 heads at the last position": (BLOCKS * 8, lambda: ours(model, clean, corrupt, heads)),
    }
    times, given = interleaved(ways, repeats)
    mine = given["ours, 512 cells"]
    agree(mine[[block * T + pos for block, pos in cells]], given["transformers, a hooked forward a patch"])
    agree(given["TransformerLens' bridge, a run a patch"], given["transformers, a hooked forward a patch"])
    agree(mine[3 * T : 4 * T], given["transformers, 64 patches a batch"])
    agree(
        given["ours, one token differs a third in"][cells[0][0] * T + cells[0][1]],
        by_hooks(hf, stream, one, cells[:1])[0],
    )
    show("fp32", times)


def low_precision(repeats: int) -> None:
    """bf16 against bf16, with what rounding alone does beside it."""
    hf, model = build()
    low = HookedModel(model.decoder.weights.to(torch.bfloat16))  # type: ignore[attr-defined]
    hf = hf.to(torch.bfloat16)
    clean, corrupt = torch.randint(0, 1000, (2, 1, T), generator=torch.Generator().manual_seed(1))
    stream = streams(hf, clean)
    cells = [(i * 7 % BLOCKS, i * 23 % T) for i in range(SAMPLE)]
    ways = {
        "transformers, a hooked forward a patch": (SAMPLE, lambda: by_hooks(hf, stream, corrupt, cells)),
        "ours, 512 cells": (BLOCKS * T, lambda: ours(low, clean, corrupt, residual)),
    }
    times, given = interleaved(ways, repeats)
    show("bf16", times)
    exact = ours(model, clean, corrupt, residual)
    picked = exact[[block * T + pos for block, pos in cells]]
    far = (given["ours, 512 cells"].float() - exact).abs().mean()
    theirs = (given["transformers, a hooked forward a patch"].float() - picked).abs().mean()
    print(f"  mean distance of a logit to fp32's: ours {far:.3f}, transformers' {theirs:.3f}")


def show(what: str, times: dict[str, float]) -> None:
    """A table of one run."""
    first = next(iter(times.values()))
    print(f"{what}: CPU ms a patch, and how many times the first way's speed")
    for name, each in times.items():
        print(f"  {name:<42} {each:8.2f} {first / each:7.1f}")


def block(repeats: int) -> None:
    """One full-size dense block, bf16, 128 positions: every step × position, and g, u, a, h alone."""
    length = 128
    dims = replace(KIMI_K2, moe=(False,), V=8)
    model = HookedModel(random_weights(dims, dtype=torch.bfloat16))
    x, other = torch.randn(2, 1, length, dims.d, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    card = model.sites.card(0)
    steps = [name for name, step in card.items() if step.number is not None and name != "x_next"]

    def cells(source: Live, names: Sequence[str]) -> list[Cell]:
        made = []
        for name in ["x_n", *names] if names is steps else names:
            last = name == "x_n" or {"K", "V"} & ({name} | card.descendants([name]))
            dim = "S" if "S" in card.shape(name) else "T"
            for pos in range(length):
                edit = patch(name, 0, source=source, **{dim: pos})
                made.append(Cell((edit,), read=[[length - 1 if last else pos]]))
        return made

    def mine(names: Sequence[str]) -> list[Tensor]:
        base, source = Live(None, x_n=x), Live(None, x_n=other)
        asked = cells(source, names)
        made: dict[int, Tensor] = {}
        sweep(
            model,
            base,
            asked,
            lambda who, _, value: made.update({id(who): value[0, 0].clone()}),
            sources=[source],
            want=["blocks.0.x_next"],
            first=0,
        )
        return [made[id(cell)] for cell in asked]

    source = model.run_block(0, other, want=None)
    base = model.run_block(0, x)
    few = [("g", 5), ("x_n", 40), ("c_KV", 100), ("Q", 64)]

    def one_by_one() -> list[Tensor]:
        made = []
        for name, pos in few:
            last = name in ("x_n", "c_KV")
            run = model.run_block(0, x, edits=[patch(name, 0, source=source, T=pos)])
            made.append(run["blocks.0.x_next"][0, length - 1 if last else pos])
        return made

    swiglu = ["g", "u", "a", "h"]
    ways = {
        "a run of the block a patch": (len(few), one_by_one),
        f"ours, {len(steps) + 1} tensors × {length} positions": ((len(steps) + 1) * length, lambda: mine(steps)),
        f"ours, g, u, a, h × {length} positions": (len(swiglu) * length, lambda: mine(swiglu)),
    }
    times, given = interleaved(ways, repeats)
    every = given[f"ours, {len(steps) + 1} tensors × {length} positions"]
    names = ["x_n", *steps]
    for (name, pos), theirs in zip(few, given["a run of the block a patch"], strict=True):
        got = every[names.index(name) * length + pos].float()
        far = (got - theirs.float()).norm() / theirs.float().norm()
        assert far < 2e-2, f"{name} at {pos} is off by {far:.2g} of its size"
    del base
    show("one full-size dense block, bf16, 128 positions", times)


def neurons(repeats: int) -> None:
    """Every one of 18,432 neurons of the last block at one position, beside one forward pass of that block."""
    dims = replace(KIMI_K2, moe=(False,), V=64)
    model = HookedModel(random_weights(dims, dtype=torch.bfloat16))
    tokens = torch.randint(0, dims.V, (1, 128), generator=torch.Generator().manual_seed(0))
    held = model.run(tokens, want=["blocks.0.h", "blocks.0.x_next"])
    ways = {
        "one forward pass": (1, lambda: model.run(tokens)),
        "ours, 18,432 neurons, from a base": (
            1,
            lambda: neuron_effects(model, tokens, answer=[3], wrong=[5], base=held),
        ),
    }
    times, given = interleaved(ways, repeats)
    effects = given["ours, 18,432 neurons, from a base"]
    base = model.run(tokens, want=None)
    for neuron in (0, 777, int(effects[0].abs().argmax())):
        run = model.run(tokens, edits=[zero("h", 0, T=-1, f=neuron)], base=base)
        x, before = (
            one["x_final"][0, -1].float() for one in (model.run(tokens, want=["x_final"], edits=run.edits), base)
        )
        W = model.decoder.weights.read(None, "W_U").float()
        by_hand = (x - before) @ (W[:, 3] - W[:, 5])
        assert abs(float(effects[0, neuron] - by_hand)) < 0.05, "a neuron's effect is off"
    show("all neurons of a full-size block at one position, bf16 (ms for all)", times)


PARTS = {"residual": against_peers, "bf16": low_precision, "block": block, "neurons": neurons}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, out of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        for part in arguments.only.split(","):
            PARTS[part](arguments.repeats)


if __name__ == "__main__":
    main()
