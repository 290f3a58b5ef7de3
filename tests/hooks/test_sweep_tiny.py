"""A sweep on the trained model is, cell by cell, what whole runs are; on prompts of several lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from experiments import Prompts
from hooks import (
    Cell,
    Edit,
    HookedModel,
    Live,
    Run,
    add,
    exclude,
    freeze,
    knock_out,
    noise,
    patch,
    sweep,
    zero,
)
from probe.errors import BadEdit, OutOfRange
from probe.sites import Site

LOGITS = Site(None, "logits")
Source = Live | Run
Make = Callable[[int, Source], list[Edit]]

DIRECTION = torch.randn(128, generator=torch.Generator().manual_seed(3))
PATCHED = "x_n c_Q Q_C c_KV k_C K_C v V O delta_attn x_mid x_ffn delta_ffn x_next s_attn k_pe q_pe S A".split()


def _patched(name: str, pos: int) -> Make:
    dim = "S" if name in ("K", "V", "S", "A", "K_C") and name != "K_C" else "T"
    return lambda block, source: [patch(name, block, source=source, **{dim: pos})]


CELLS: dict[str, Make] = {
    **{f"patch {name} at {pos}": _patched(name, pos) for name in PATCHED for pos in (10, -1)},
    **{
        f"patch {name}": (lambda block, source, name=name: [patch(name, block, source=source)]) for name in ("Q_R", "K")
    },
    "zero a head": lambda block, source: [zero("O", block, h=1)],
    "zero W_O of a head": lambda block, source: [zero(f"blocks.{block}.W_O", h=2)],
    "zero for some readers": lambda block, source: [zero("x_n", block, T=2, into=("s_attn", "n_attn"))],
    "knock out an edge": lambda block, source: [knock_out(block, T=-1, S=2)],
    "add a direction": lambda block, source: [add("x_n", block, direction=DIRECTION, alpha=3.0, T=2)],
    "noise": lambda block, source: [noise("x_mid", block, std=0.5)],
    "patch with routing frozen": lambda block, source: [patch("x_n", block, source=source, T=2), freeze("experts")],
    "two blocks at once": lambda block, source: [
        patch("O", block, source=source, h=0),
        zero("delta_ffn", min(block + 1, 3), T=3),
    ],
}
ROUTED: dict[str, Make] = {
    "exclude an expert": lambda block, source: [exclude(block, e=5)],
    "zero an expert": lambda block, source: [zero("delta_experts", block, e=7)],
    "patch all experts": lambda block, source: [patch("delta_experts", block, source=source)],
    "patch the choice": lambda block, source: [patch("experts", block, source=source)],
    "patch the affinity": lambda block, source: [patch("affinity", block, source=source)],
}


@cache
def model() -> HookedModel:
    return HookedModel.load()


@cache
def prompts() -> Prompts:
    """Of three lengths, so that rows are padded."""
    every = Prompts.load("ioi", model().tokenizer)  # type: ignore[arg-type]
    return every.subset(range(6))


@cache
def runs() -> tuple[Run, Run]:
    mine, other = prompts(), prompts().swapped()
    return tuple(model().run(*some.batch(), want=None, spans=some.spans) for some in (mine, other))  # type: ignore[return-value]


def lives() -> tuple[Live, Live]:
    mine, other = prompts(), prompts().swapped()
    ends = [[len(prompt.tokens) - 1] for prompt in other.rows]
    return Live(*mine.batch(), mine.spans), Live(*other.batch(), other.spans, read=ends)


def last(logits: Tensor) -> Tensor:
    return torch.stack([logits[b, len(prompt.tokens) - 1] for b, prompt in enumerate(prompts().rows)])


@pytest.mark.parametrize("budget", [1, 2 << 30], ids=["a cell a batch", "all at once"])
@pytest.mark.parametrize("block", range(4))
def test_every_kind_of_edit_equals_its_run(block: int, budget: int) -> None:
    """One sweep of all kinds, in one batch or a batch for each cell: values, what was touched, what changed routes."""
    base, source = lives()
    whole, taken = runs()
    makes = CELLS | (ROUTED if block else {})
    cells = {name: Cell(tuple(make(block, source)), name) for name, make in makes.items()}
    seen: dict[int, Tensor] = {}
    outcomes = sweep(
        model(),
        base,
        list(cells.values()),
        lambda who, site, value: seen.update({id(who): value[:, 0].clone()}),
        sources=[source],
        budget=budget,
    )
    torch.testing.assert_close(seen[id(base)], last(whole["logits"]), rtol=0, atol=2e-4)
    moved = 0
    for (name, make), outcome in zip(makes.items(), outcomes, strict=True):
        run = model().run(
            whole.tokens, whole.keep, edits=make(block, taken), base=whole, spans=prompts().spans, want=["logits"]
        )
        there, mine = last(run["logits"]), seen[id(cells[name])]
        far = float((mine - there).abs().max())
        assert far <= 1e-5 * max(1.0, float(there.abs().max())), f"{name}: {far:.2g} off"
        assert outcome.touched == sum(run.touched), name
        moved += float((there - last(whole["logits"])).abs().max()) > 1e-3
    assert moved > len(makes) / 3, "many of these edits do something"


def test_what_changes_nothing_costs_nothing() -> None:
    """A patch of a position that clean and corrupt share, before they part: no world, the base's bits."""
    base, source = lives()
    cell = Cell((patch("x_n", 2, source=source, T=1),))
    seen: dict[int, Tensor] = {}
    (outcome,) = sweep(
        model(), base, [cell], lambda who, site, value: seen.update({id(who): value.clone()}), sources=[source]
    )
    assert outcome.worlds == 0
    assert outcome.touched == len(prompts())
    assert torch.equal(seen[id(cell)], seen[id(base)])


def test_hooks_would_be_passed_by_so_they_are_refused() -> None:
    base, _ = lives()
    with (
        model().hooks([("blocks.1.hook_O", lambda value, hook: value * 0)]),
        pytest.raises(BadEdit, match="hooks are on"),
    ):
        sweep(model(), base, [Cell((zero("O", 1),))], lambda *_: None)


def test_a_place_that_does_not_exist_is_told_before_anything_runs() -> None:
    base, _ = lives()
    cells = [Cell((zero("O", 0, h=0),)), Cell((zero("O", 3, T=99),))]
    with pytest.raises(OutOfRange, match="99"):
        sweep(model(), base, cells, lambda *_: pytest.fail("something ran"))


def test_a_source_that_does_not_run_along_is_refused() -> None:
    base, source = lives()
    with pytest.raises(BadEdit, match="run along"):
        sweep(model(), base, [Cell((patch("x_n", 1, source=source),))], lambda *_: None)
