"""A model with indexers refuses texts beyond ``index_topk`` tokens, whatever asks for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooks import Cell, HookedModel, Live, patch, sweep, zero
from hooks.sweep import outlook
from probe import TINY, random_weights, save
from probe.errors import BadText
from tests.oracle import Oracle, indexed

ORACLE = Oracle(indexed("deepseek_v32", 6))
MODEL = HookedModel(ORACLE.weights())
TOKENS = torch.randint(0, MODEL.dims.V, (2, 8), generator=torch.Generator().manual_seed(5))


def swept(tokens: Tensor, keep: Tensor | None = None) -> object:
    cells = [Cell([zero("O", block=1)])]
    outlook(MODEL, Live(tokens, keep), cells)
    return sweep(MODEL, Live(tokens, keep), cells, lambda *_: None)


def patched(tokens: Tensor) -> object:
    source = Live(tokens)
    return sweep(MODEL, Live(TOKENS[:, :4]), [Cell([patch("O", block=1, source=source, T=2)])], print, sources=[source])


ASKS: dict[str, Callable[[Tensor], object]] = {
    "call": MODEL,
    "run": MODEL.run,
    "cache": MODEL.run_with_cache,
    "gradients": lambda tokens: MODEL.run_with_cache(tokens, grads=lambda logits: logits.sum()),
    "block": lambda tokens: MODEL.run_block(1, torch.ones(*tokens.shape, MODEL.dims.d)),
    "sweep": swept,
    "sweep of a block": lambda tokens: sweep(
        MODEL, Live(None, x_n=torch.ones(*tokens.shape, MODEL.dims.d)), [], lambda *_: None, first=1
    ),
    "generate": lambda tokens: MODEL.generate(tokens, n=1),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_longer_text_is_refused(ask: str) -> None:
    ASKS[ask](TOKENS[:, :6])
    with pytest.raises(BadText, match=r"a text of 7 tokens is longer than index_topk: beyond 6 tokens .* Shorten it"):
        ASKS[ask](TOKENS[:, :7])


def test_so_is_a_sweeps_source() -> None:
    with pytest.raises(BadText, match="a text of 7 tokens"):
        patched(TOKENS[:, :7])


@pytest.mark.parametrize("ask", [MODEL, MODEL.run, MODEL.run_with_cache, swept])
def test_pads_do_not_count(ask: Callable[[Tensor, Tensor], object]) -> None:
    place = torch.arange(8)
    ask(TOKENS, place < torch.tensor([[6], [3]]))
    with pytest.raises(BadText, match="a text of 7 tokens"):
        ask(TOKENS, place < torch.tensor([[7], [3]]))


def test_a_generation_is_refused_before_its_first_step() -> None:
    """The last token is not read back, so one more may be decoded than the limit."""
    prompt, keep = TOKENS[:, :4], torch.ones(2, 4, dtype=torch.long)
    theirs = ORACLE.model.generate(
        prompt, attention_mask=keep, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(MODEL.generate(prompt, n=3).tokens, theirs)
    ran: list[int] = []
    hook = ("blocks.0.hook_x_n", lambda value, hook: ran.append(hook.step))
    with MODEL.hooks([hook]), pytest.raises(BadText, match="a text of 7 tokens"):
        MODEL.generate(prompt, n=4)
    assert ran == []
    MODEL.generate(TOKENS, torch.arange(8) >= torch.tensor([[4], [6]]), n=3)


def test_a_directory_brings_its_tokenizer_and_its_limit(tmp_path: Path) -> None:
    tiny = HookedModel.load()
    save(random_weights(replace(tiny.dims, index_topk=6), 1), tmp_path, dtype=torch.float32)
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    model = HookedModel.load(tmp_path)
    assert model("The capital of France is").shape == (1, 6, tiny.dims.V)
    with pytest.raises(BadText, match="a text of 7 tokens"):
        model("The capital of France is Paris")
