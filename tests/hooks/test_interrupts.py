"""Law 7 under Ctrl-C: wherever it comes, no hook is left or lost, and the interrupt arrives.

A trace function signals it at the n-th call, line or instruction (ours, TransformerLens', torch's, Python's), for every
n until nothing is left to interrupt. Not where a frame is left: Python looks for signals between instructions.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import HookedModel, Live, Site, sweep
from hooks.sweep import _lent
from probe.errors import BadEdit
from tests.hooks.small import ORACLE, TOKENS

FEW = TOKENS[:1, :3]
PLAIN = HookedModel(ORACLE.weights())(FEW)
MODEL = HookedModel(ORACLE.weights())
MINE, ITS = Site(0, "O"), {Site(0, "c_KV"), Site(1, "O"), Site(2, "x_next")}
PAIRS = [("blocks.0.c_KV", lambda value, hook: 2 * value), (lambda name: name in AT, lambda value, hook: 3 * value)]
AT = ("blocks.1.hook_O", "blocks.2.hook_x_next")


def interrupted(call: Callable[[], Any], n: int, every: bool) -> bool:
    """Whether a Ctrl-C at the n-th event of a call's frames was in time; it has then arrived here. ``every``: each
    instruction counts as an event, not each line alone."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = every, not every
        if event in ("call", "line", "opcode"):
            count += 1
            if count == n:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)  # whose handler raises KeyboardInterrupt at once
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def everywhere(call: Callable[[], Any], check: Callable[[bool], None], every: bool) -> int:
    """Interrupt a call at each of its events, one after the other, and check what is left; how many there were."""
    for n in itertools.count(1):
        arrived = interrupted(call, n, every)
        check(arrived)
        if not arrived:
            return n - 1
    raise AssertionError


def nothing_left(model: HookedModel, mine: bool = True) -> None:
    assert model.watched() == ({MINE} if mine else set())
    assert sorted(model.list_hooks()) == ([MINE.hook] if mine else [])
    assert model.context_level == 0


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["lines", "instructions"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_context_leaves_nothing_on_wherever_ctrl_c_comes(direction: str, every: bool) -> None:
    """In what puts its hooks on, between, and in what takes them off. A hook that was on before stays on."""
    model = HookedModel(ORACLE.weights())
    model.add_hook(str(MINE), lambda value, hook: None)

    def enter_and_leave() -> None:
        with model.hooks(**{f"{direction}_hooks": PAIRS}):
            assert True

    assert everywhere(enter_and_leave, lambda arrived: nothing_left(model), every) > 100
    model.reset_hooks()
    assert torch.equal(model(FEW), PLAIN)


def test_what_is_added_at_once_is_all_there_or_not_at_all() -> None:
    model = HookedModel(ORACLE.weights())
    with pytest.raises(BadEdit, match="has no gradient"):
        model.add_hook(lambda name: True, lambda value, hook: None, dir="bwd")  # which some points refuse
    nothing_left(model, mine=False)

    def check(arrived: bool) -> None:
        assert len(model.watched()) in ((0, 2) if arrived else (2,))
        assert len(model.list_hooks()) == len(model.watched())
        model.reset_hooks()

    everywhere(lambda: model.add_hook(*PAIRS[1]), check, every=False)
    everywhere(lambda: model.add_caching_hooks(list(AT)), check, every=False)


def test_hooks_that_are_reset_are_all_off_or_all_on() -> None:
    model = HookedModel(ORACLE.weights())

    def put_on() -> None:
        for pair in PAIRS:
            model.add_hook(*pair)
        model.blocks[1].hook_O.ctx["kept"] = 1

    def check(arrived: bool) -> None:
        assert model.watched() in (ITS, set()) if arrived else not model.watched()
        assert len(model.list_hooks()) == len(model.watched())
        assert all(isinstance(point.ctx, dict) for point in model.hook_points())
        put_on()

    put_on()
    points = model.hook_dict
    model.hook_dict = {site.hook: points[site.hook] for site in sorted(ITS)}  # fewer, for speed
    everywhere(model.reset_hooks, check, every=False)
    model.hook_dict = points
    model.reset_hooks()
    assert torch.equal(model(FEW), PLAIN)


def test_a_sweeps_sources_hold_nothing_wherever_ctrl_c_comes() -> None:
    lives = [Live(FEW), Live(FEW)]

    def lend() -> None:
        with _lent(MODEL.sites, lives):
            lives[0].cache.block = 1

    def check(arrived: bool) -> None:
        for live in lives:
            assert (live.cache.sites, live.cache.stream, live.cache.block) == (None, None, None)

    assert everywhere(lend, check, every=True) > 100


def test_a_decoding_that_ends_early_leaves_no_step_behind() -> None:
    """The next plain run's hooks are in step 0, wherever the decoding before it ended."""
    steps: list[int] = []

    def note(value: Tensor, hook: Any) -> None:
        steps.append(hook.step)
        if steps == [0, 1, 2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), MODEL.hooks(fwd_hooks=[("blocks.1.O", note)]):
        MODEL.generate(FEW, n=5)
    steps.clear()
    MODEL.run_with_hooks(FEW, fwd_hooks=[("blocks.1.O", note)])
    assert steps == [0]


def test_a_run_that_is_interrupted_leaves_no_hook_and_the_next_gives_the_same_bits() -> None:
    """At every hundredth event or so of a whole run with hooks, of a sweep and of a run with gradients."""

    def hooked() -> None:
        MODEL.run_with_hooks(FEW, fwd_hooks=PAIRS)

    def swept() -> None:
        sweep(MODEL, Live(FEW), [], lambda *_: None)

    def differentiated() -> None:
        MODEL.run_with_cache(FEW, names_filter="x_0", grads=lambda logits: logits.sum())

    for call in (hooked, swept, differentiated):
        n = 1
        while interrupted(call, n, every=False):
            nothing_left(MODEL, mine=False)
            assert torch.equal(MODEL(FEW), PLAIN)
            n = n * 5 // 4 + 1
