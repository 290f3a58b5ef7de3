"""Copies, pickles and compiled models: each acts with its own weights and hooks, or says why it cannot."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import HookedModel, Site, zero
from probe import TINY, Checkpoint
from probe.errors import BadEdit
from tests.hooks.small import MODEL, ORACLE, TOKENS
from tests.oracle import Oracle, config

NAME = "blocks.1.O"
FEW = TOKENS[:1, :4]


@pytest.fixture
def model() -> HookedModel:
    return HookedModel(ORACLE.weights())


def double(value: Tensor, hook: Any) -> Tensor:
    hook.ctx["fired"] = hook.ctx.get("fired", 0) + 1
    return 2 * value


PLAIN = MODEL(FEW)
DOUBLED = MODEL.run_with_hooks(FEW, fwd_hooks=[(NAME, double)])
MODEL.reset_hooks()
assert not torch.equal(PLAIN, DOUBLED)


def pickled(model: HookedModel) -> HookedModel:
    return pickle.loads(pickle.dumps(model))


def saved(model: HookedModel) -> HookedModel:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled, saved])
def test_a_copy_has_its_own_weights(twin_of: Callable[[HookedModel], HookedModel]) -> None:
    model = HookedModel.from_hf(Oracle(config(tie_word_embeddings=True)).model)
    before, twin = model(FEW), twin_of(model)
    assert torch.equal(twin(FEW), before)
    ours = {t.untyped_storage().data_ptr() for t in model.decoder.weights.tensors.values()}
    theirs = {t.untyped_storage().data_ptr() for t in twin.decoder.weights.tensors.values()}
    assert not ours & theirs
    twin.decoder.weights.read(1, "W_1_e").mul_(3)
    twin.decoder.weights.read(None, "W_E").mul_(2)
    assert torch.equal(model(FEW), before)
    assert torch.equal(twin.decoder.weights.read(None, "W_U"), 2 * model.decoder.weights.read(None, "W_U")), (
        "still tied"
    )
    changed = twin(FEW)
    assert not torch.equal(changed, before)
    model.decoder.weights.read(1, "W_2_e").zero_()
    assert torch.equal(twin(FEW), changed)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled, saved])
def test_a_copy_does_all_that_the_model_does(twin_of: Callable[[HookedModel], HookedModel], model: HookedModel) -> None:
    twin = twin_of(model)
    assert torch.equal(twin.run_with_hooks(FEW, fwd_hooks=[(NAME, double)]), DOUBLED)
    assert not twin.watched()
    edit = zero("gates", 2, k=0)
    assert torch.equal(twin.run(FEW, edits=[edit])["logits"], model.run(FEW, edits=[edit])["logits"])
    _, cache = twin.run_with_cache(FEW, names_filter=NAME)
    assert torch.equal(cache[NAME], model.run_with_cache(FEW, names_filter=NAME)[1][NAME])
    assert torch.equal(twin.generate(FEW, n=2).new, model.generate(FEW, n=2).new)
    assert [p.site for p in twin.hook_points()] == [p.site for p in model.hook_points()]
    twin.add_hook(NAME, double)
    assert torch.equal(model(FEW), PLAIN)
    assert torch.equal(twin(FEW), DOUBLED)


def test_a_copy_keeps_hooks_as_its_own(model: HookedModel) -> None:
    seen: list[int] = []

    def whose(value: Tensor, hook: Any) -> None:
        seen.append(id(hook))

    model.add_hook(NAME, double)
    model.add_perma_hook("blocks.0.ln1.hook_scale", whose)
    model.add_hook("blocks.2.O", lambda grad, hook: None, dir="bwd")
    model(FEW)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(FEW), DOUBLED)
    points = [next(p for p in m.hook_points() if p.site == Site(0, "s_attn")) for m in (model, twin)]
    assert seen == [id(point) for point in points], "a hook learns of its own model's point"
    assert [m.blocks[1].hook_O.ctx["fired"] for m in (model, twin)] == [1, 2], "it was copied with its count"
    assert twin.watched() == model.watched()
    twin.reset_hooks()
    assert twin.watched() == {Site(0, "s_attn")}
    assert torch.equal(model(FEW), DOUBLED)
    assert torch.equal(twin(FEW), PLAIN)
    model.reset_hooks(including_permanent=True)
    assert twin.watched() == {Site(0, "s_attn")}


def test_hooks_that_torch_itself_put_on_a_point_are_copied_and_not_pickled(model: HookedModel) -> None:
    handle = model.blocks[1].hook_O.register_forward_hook(lambda module, args, out: 2 * out)
    twin = copy.deepcopy(model)
    with pytest.raises(BadEdit, match=r"blocks\.1\.O has hooks on"):
        pickle.dumps(model)
    handle.remove()
    assert torch.equal(model(FEW), PLAIN)
    assert torch.equal(twin(FEW), DOUBLED)


def test_a_copy_inside_a_context_keeps_its_hooks_when_the_context_ends(model: HookedModel) -> None:
    with model.hooks(fwd_hooks=[(NAME, double)]):
        twin = copy.deepcopy(model)
    assert torch.equal(model(FEW), PLAIN)
    assert torch.equal(twin(FEW), DOUBLED)
    with twin.hooks(fwd_hooks=[("blocks.0.O", double)]):
        pass
    assert twin.watched() == {Site(1, "O")}
    twin.reset_hooks()
    assert torch.equal(twin(FEW), PLAIN)


def test_a_model_with_hooks_on_is_not_pickled_and_says_which(model: HookedModel) -> None:
    with model.hooks(fwd_hooks=[(NAME, double)]):
        with pytest.raises(BadEdit, match=r"blocks\.1\.O has hooks on.*reset_hooks"):
            pickle.dumps(model)
        with pytest.raises(BadEdit, match="has hooks on"):
            torch.save(model, io.BytesIO())
    assert torch.equal(pickled(model)(FEW), PLAIN)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled])
def test_a_model_on_an_open_checkpoint_is_copied_by_opening_it_anew(twin_of: Callable[[Any], Any]) -> None:
    model = HookedModel(Checkpoint(TINY, torch.float32))
    tokens = torch.arange(5)[None]
    twin = twin_of(model)
    assert torch.equal(twin(tokens), model(tokens))
    assert twin.decoder.weights.directory == model.decoder.weights.directory
    assert twin.decoder.weights.dtype == torch.float32


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_compiled_code_stays() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def compiled_module(model: HookedModel) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: HookedModel) -> Callable[[Tensor], Tensor]:
    model.compile(backend="eager")
    return model


def compiled_forward(model: HookedModel) -> Callable[[Tensor], Tensor]:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_caller(model: HookedModel) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda tokens: model(tokens) + 0, backend="eager")


def compiled_block(model: HookedModel) -> Callable[[Tensor], Tensor]:
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model


def compiled_point(model: HookedModel) -> Callable[[Tensor], Tensor]:
    model.blocks[1].hook_O.compile(backend="eager")
    return model


WAYS = [compiled_module, compiled_in_place, compiled_forward, compiled_caller, compiled_block, compiled_point]


@pytest.mark.parametrize("way", WAYS)
def test_hooks_and_caches_act_after_compilation(way: Callable[[Any], Callable[[Tensor], Tensor]], model) -> None:
    run = way(model)
    assert torch.equal(run(FEW), PLAIN)
    model.add_hook(NAME, double)  # added after the compiled code was made
    assert torch.equal(run(FEW), DOUBLED)
    model.reset_hooks()
    assert torch.equal(run(FEW), PLAIN)
    with model.hooks(fwd_hooks=[(NAME, lambda value, hook: 4 * value)]), model.hooks(fwd_hooks=[(NAME, halve)]):
        assert torch.equal(run(FEW), DOUBLED)
    held = model.add_caching_hooks(NAME)
    run(FEW)
    model.reset_hooks()
    assert torch.equal(held["blocks.1.hook_O"], MODEL.run(FEW, want=NAME)[NAME])
    assert torch.equal(model.run_with_hooks(FEW, fwd_hooks=[(NAME, double)]), DOUBLED)
    assert len(model.run_with_cache(FEW)[1]) == len(MODEL.run_with_cache(FEW)[1])
    edited = model.run(FEW, edits=[zero("O", 1, h=1)])
    assert torch.equal(edited["logits"], MODEL.run(FEW, edits=[zero("O", 1, h=1)])["logits"])


def halve(value: Tensor, hook: Any) -> Tensor:
    return value / 2


def test_compiled_runs_and_caches_act_too(model: HookedModel) -> None:
    cached = torch.compile(model.run_with_cache, backend="eager")
    assert torch.equal(cached(FEW, names_filter=NAME)[1][NAME], MODEL.run(FEW, want=NAME)[NAME])
    edited = torch.compile(model.run, backend="eager")
    for h in (0, 1):
        edits = [zero("O", 1, h=h)]
        assert torch.equal(edited(FEW, edits=edits)["logits"], MODEL.run(FEW, edits=edits)["logits"])


def test_who_compiles_nothing_loads_no_compiler() -> None:
    code = (
        "import sys, torch; from hooks import HookedModel; HookedModel.load()('Mary went');"
        "assert 'torch._dynamo' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
