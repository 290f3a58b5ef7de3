"""Hooks of one thread never act in another thread's runs: such a run is refused, and says what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.attribution import attribute
from hooks import HookedModel, Live, Site, edit, sweep, zero
from probe.errors import BadEdit
from tests.hooks.small import ORACLE, TOKENS

NAME = "blocks.1.O"
FEW = TOKENS[:1, :4]
REMEDY = r"hook of another thread on \(theirs.*HookedModel\(model\.decoder\.weights"


@pytest.fixture
def model() -> HookedModel:
    return HookedModel(ORACLE.weights())


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives in a thread of its own."""
    with ThreadPoolExecutor(1, thread_name_prefix="theirs") as pool:
        return pool.submit(call).result()


def double(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


def swept(model: HookedModel) -> None:
    sweep(model, Live(FEW), [], lambda *_: None)


RUNS: dict[str, Callable[[HookedModel], Any]] = {
    "forward": lambda model: model(FEW),
    "run_with_cache": lambda model: model.run_with_cache(FEW),
    "gradients": lambda model: model.run_with_cache(FEW, names_filter=NAME, grads=lambda logits: logits.sum()),
    "run": lambda model: model.run(FEW),
    "run with edits": lambda model: model.run(FEW, edits=[zero("O", 1)]),
    "run_block": lambda model: model.run_block(1, torch.ones(1, 2, model.dims.d)),
    "generate": lambda model: model.generate(FEW, n=2),
    "run_with_hooks": lambda model: model.run_with_hooks(FEW, fwd_hooks=[("blocks.0.O", double)]),
    "sweep": swept,
    "attribute": lambda model: attribute(model, None),  # type: ignore[arg-type]  # hooks are looked for first
}
PUT_ON: dict[str, Callable[[HookedModel], Any]] = {
    "add_hook": lambda model: model.add_hook(NAME, double),
    "by a function": lambda model: model.add_hook(lambda name: name == "blocks.1.hook_O", double),
    "permanent": lambda model: model.add_perma_hook(NAME, double),
    "backward": lambda model: model.add_hook(NAME, double, dir="bwd"),
    "caching": lambda model: model.add_caching_hooks(NAME),
    "left on": lambda model: model.run_with_hooks(FEW, fwd_hooks=[(NAME, double)], reset_hooks_end=False),
    "torch's own": lambda model: model.blocks[1].hook_O.register_forward_hook(lambda module, args, out: 2 * out),
    "torch's before": lambda model: model.blocks[1].hook_O.register_forward_pre_hook(lambda module, args: None),
    "torch's backward": lambda model: model.blocks[1].hook_O.register_full_backward_pre_hook(lambda module, grad: None),
}


@pytest.mark.parametrize("way", RUNS)
def test_no_run_begins_while_another_thread_has_hooks_on(way: str, model: HookedModel) -> None:
    plain = model(FEW)
    elsewhere(lambda: model.add_hook(NAME, double))
    with pytest.raises(BadEdit, match=REMEDY):
        RUNS[way](model)
    assert {Site(1, "O")} == model.watched(), "what was on stays, and nothing has been added"
    model.reset_hooks()
    assert torch.equal(model(FEW), plain)


@pytest.mark.parametrize("way", PUT_ON)
def test_whatever_way_the_hook_was_put_on(way: str, model: HookedModel) -> None:
    elsewhere(lambda: PUT_ON[way](model))
    with pytest.raises(BadEdit, match=REMEDY):
        model(FEW)


def test_the_thread_whose_hooks_they_are_runs_on_and_the_remedy_shares_the_weights(model: HookedModel) -> None:
    with model.hooks(fwd_hooks=[(NAME, double)]):
        doubled = model(FEW)
        own = HookedModel(model.decoder.weights, model.tokenizer, model.decoder.numerics)
        assert torch.equal(elsewhere(lambda: own(FEW)), HookedModel(ORACLE.weights())(FEW))
        assert torch.equal(model(FEW), doubled)
    assert own.decoder.weights is model.decoder.weights
    assert not torch.equal(elsewhere(lambda: model(FEW)), doubled), "none is on any more"


def test_hooks_that_come_while_another_threads_run_is_under_way_do_not_act_in_it(model: HookedModel) -> None:
    """With hooks of its own, or an edit, a run passes values through points: there it is refused, not changed."""
    plain, doubled = model(FEW), model.run_with_hooks(FEW, fwd_hooks=[("blocks.0.O", double)])

    def late(value: Tensor, hook: Any) -> Tensor:
        elsewhere(lambda: model.add_hook(NAME, double))
        return 2 * value

    with pytest.raises(BadEdit, match=REMEDY):
        model.run_with_hooks(FEW, fwd_hooks=[("blocks.0.O", late)])
    assert {Site(1, "O")} == model.watched()
    model.reset_hooks()
    assert torch.equal(model(FEW), plain)
    assert torch.equal(model.run_with_hooks(FEW, fwd_hooks=[("blocks.0.O", double)]), doubled)


def test_two_threads_that_hook_and_run_at_once_get_their_own_numbers_or_a_refusal(model: HookedModel) -> None:
    plain, doubled = model(FEW), model.run_with_hooks(FEW, fwd_hooks=[(NAME, double)])
    seen: dict[str, list[Tensor | None]] = {"hooked": [], "plain": []}
    start = threading.Barrier(2)

    def repeat(kind: str, run: Callable[[], Tensor]) -> None:
        start.wait()
        for _ in range(40):
            try:
                seen[kind].append(run())
            except BadEdit:
                seen[kind].append(None)

    work = [
        ("hooked", lambda: model.run_with_hooks(FEW, fwd_hooks=[(NAME, double)])),
        ("plain", lambda: model(FEW)),
    ]
    threads = [threading.Thread(target=repeat, args=args) for args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(logits, doubled) for logits in seen["hooked"]), "nobody else has hooks on"
    assert all(logits is None or torch.equal(logits, plain) for logits in seen["plain"])
    assert not model.watched()
    assert model.context_level == 0


def test_a_hook_learns_the_step_of_its_own_run_whatever_another_thread_decodes(model: HookedModel) -> None:
    steps: list[int] = []
    reads, holding, go_on = [0], threading.Event(), threading.Event()

    def hold(logits: Tensor) -> Tensor:
        reads[0] += 1
        if reads[0] == 3:
            holding.set()
            assert go_on.wait(60)
        return logits

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: model.generate(FEW, n=4, edits=[edit("logits", hold, "hold")]))
        assert holding.wait(60)
        model.run_with_hooks(FEW, fwd_hooks=[(NAME, lambda value, hook: steps.append(hook.step))])
        go_on.set()
        assert other.result().new.shape == (1, 4)
    assert steps == [0]


def test_a_run_that_a_hook_makes_is_no_step_and_ends_none(model: HookedModel) -> None:
    steps: list[int] = []
    within: list[bool] = []

    def note(value: Tensor, hook: Any) -> None:
        if not within:
            within.append(True)
            model(FEW)
            within.clear()
        steps.append(hook.step)

    with model.hooks(fwd_hooks=[(NAME, note)]):
        model.generate(FEW, n=3)
    assert steps == [0, 0, 0, 1, 0, 2]
