"""Texts longer than the model was made for: refused wherever something runs, and run like others where that is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import Cell, HookedModel, Live, scale, sweep, zero
from hooks.sweep import outlook
from probe import Decoder, InMemory
from probe.errors import OutOfRange
from tests.hooks.small import LENGTHS, MODEL, ORACLE, TOKENS, close, padded, ragged

WEIGHTS = MODEL.decoder.weights
T = TOKENS.shape[1]


def made_for(positions: int | None) -> HookedModel:
    assert isinstance(WEIGHTS, InMemory)
    return HookedModel(InMemory(replace(WEIGHTS.dims, max_positions=positions), WEIGHTS.tensors))


SHORT, LONG, ANY = made_for(T - 1), made_for(T), made_for(None)


def swept(model: HookedModel, **how: Any) -> Tensor:
    seen: list[Tensor] = []
    live = Live(TOKENS, **how)
    sweep(model, live, [Cell((zero("O", 1),))], lambda who, site, value: seen.append(value.clone()))
    return torch.stack(seen)


X = MODEL.run(TOKENS, want="blocks.1.x_n")["x_n", 1]
RUNS: dict[str, Callable[..., Any]] = {
    "forward": lambda model, **how: model(TOKENS, **how),
    "run": lambda model, **how: model.run(TOKENS, **how)["logits"],
    "a weight edited": lambda model, **how: model.run(TOKENS, edits=scale("W_O", 1, factor=2.0), **how)["logits"],
    "run_with_cache": lambda model, **how: model.run_with_cache(TOKENS, **how)[1]["blocks.1.O"],
    "gradients": lambda model, **how: model.run_with_cache(TOKENS, grads=lambda x: x.sum(), **how)[1].gradients["x_0"],
    "run_with_hooks": lambda model, **how: model.run_with_hooks(TOKENS, fwd_hooks=[], **how),
    "run_block": lambda model, **how: model.run_block(1, X, **how)["x_next", 1],
    "sweep": swept,
    "generate": lambda model, **how: model.generate(TOKENS[:, :-1], n=2, **how).tokens,
}  # fmt: skip


@pytest.mark.parametrize("what", RUNS)
def test_texts_that_are_too_long_are_refused_unless_that_is_said(what: str) -> None:
    go = RUNS[what]
    expected = go(ANY)
    assert torch.equal(go(LONG), expected), "the last position id is below the maximum"
    with pytest.raises(OutOfRange, match=rf"position id {T - 1}, and the model's max_position_embeddings is {T - 1}: "):
        go(SHORT)
    assert torch.equal(go(SHORT, beyond=True), expected)
    assert torch.equal(go(SHORT.reaching()) if what != "sweep" else swept(SHORT.reaching()), expected)
    with pytest.raises(OutOfRange):
        go(SHORT)  # it was said of those runs


def test_what_is_run_beyond_is_what_transformers_runs() -> None:
    with torch.no_grad():
        close(SHORT.run(TOKENS, beyond=True)["logits"], ORACLE.model(TOKENS).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_take_no_position(side: str) -> None:
    model = made_for(max(LENGTHS))
    wide = [torch.cat([row, row[:1]]) if len(row) == min(LENGTHS) else row for row in ragged()]
    tokens, keep = padded([*wide, torch.cat([TOKENS[0], TOKENS[0]])], side)
    assert model.run(tokens[:-1], keep[:-1])["logits"].shape[1] == 2 * T > max(LENGTHS)
    with pytest.raises(OutOfRange, match=f"position id {2 * T - 1}"):
        model.run(tokens, keep)


def test_decoding_is_refused_before_it_begins_and_counts_what_is_read() -> None:
    assert LONG.generate(TOKENS, n=1).new.shape == (len(TOKENS), 1), "the new token is never read"
    calls: list[int] = []
    with LONG.hooks(fwd_hooks=[("x_0", lambda value, hook: calls.append(1))]), pytest.raises(OutOfRange):
        LONG.generate(TOKENS, n=2)
    assert calls == []


def test_a_source_of_a_sweep_is_held_to_it_too() -> None:
    live = Live(TOKENS[:, :2])
    for source, fine in ((Live(TOKENS), False), (Live(TOKENS, beyond=True), True)):
        if fine:
            assert outlook(SHORT, live, [], sources=[source]).forwards > 1
        else:
            with pytest.raises(OutOfRange, match="max_position_embeddings"):
                outlook(SHORT, live, [], sources=[source])


def test_a_model_that_reaches_beyond_has_the_same_hooks_and_weights() -> None:
    far = SHORT.reaching()
    assert far is not SHORT
    assert far.reaching() is far
    assert SHORT.reaching(False) is SHORT
    assert far.decoder.weights is SHORT.decoder.weights
    base = SHORT.run(TOKENS[:, :2], want=None)
    assert torch.equal(far.run(TOKENS[:, :2], base=base)["logits"], base["logits"])
    SHORT.add_hook("blocks.1.x_next", lambda value, hook: value * 0)
    try:
        assert far.watched() == SHORT.watched() != set()
        assert not torch.equal(far(TOKENS), ANY(TOKENS))
    finally:
        far.reset_hooks()
    assert SHORT.watched() == set()
    assert torch.equal(far(TOKENS), ANY(TOKENS))


def test_the_decoder_alone() -> None:
    with pytest.raises(OutOfRange, match="beyond=True"):
        SHORT.decoder.run(TOKENS)
    assert torch.equal(Decoder(SHORT.decoder.weights, beyond=True)(TOKENS), ANY.decoder(TOKENS))
