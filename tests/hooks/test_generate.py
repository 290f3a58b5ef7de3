"""Decoding: cached = uncached = transformers, token by token; hooks and edits at the prompt, at each step, or both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import (
    Dictionary,
    Edit,
    HookedModel,
    Run,
    add,
    edit,
    exclude,
    force,
    freeze,
    knock_out,
    mean,
    noise,
    patch,
    project_out,
    resample,
    rounded,
    scale,
    set_to,
    splice,
    zero,
)
from hooks.generate import generate, left_padded
from probe.errors import BadEdit
from tests.oracle import Oracle, config, padding

VARIANTS = {
    "kimi": config(yarn={"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}),
    "no-latent-groups": config(q_lora_rank=None, n_group=4, topk_group=2),
}
LENGTHS = [4, 7, 6]
N = 10


@cache
def made(variant: str) -> tuple[Oracle, HookedModel]:
    oracle = Oracle(VARIANTS[variant], seed=4)
    return oracle, HookedModel(oracle.weights())


MODEL = made("kimi")[1]
KEEP = padding(LENGTHS, "left")
TOKENS = torch.randint(0, MODEL.dims.V, KEEP.shape, generator=torch.Generator().manual_seed(5))


def slow_twin(edits: list[Edit], n: int = N) -> tuple[Tensor, Tensor]:
    """Everything anew at each step, by `run`: what decoding means."""
    tokens, keep, scores = TOKENS, KEEP, []
    for _ in range(n):
        logits = MODEL.run(tokens, keep, edits=edits)["logits"][:, -1]
        scores.append(logits)
        tokens = torch.cat([tokens, logits.argmax(-1)[:, None]], 1)
        keep = torch.cat([keep, torch.ones_like(keep[:, :1])], 1)
    return tokens[:, -n:], torch.stack(scores, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_is_transformers_own_with_left_padded_rows(variant: str) -> None:
    oracle, model = made(variant)
    expected = oracle.model.generate(
        TOKENS, attention_mask=KEEP.long(), max_new_tokens=N, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found = model.generate(TOKENS, KEEP, n=N)
    assert torch.equal(found.tokens, expected)
    assert torch.equal(found.new, expected[:, -N:])
    assert found.keep.sum(1).tolist() == [length + N for length in LENGTHS]


def test_cached_equals_uncached() -> None:
    found, twin = MODEL.generate(TOKENS, KEEP, n=N), slow_twin([])
    assert torch.equal(found.new, twin[0])
    torch.testing.assert_close(found.logits, twin[1], rtol=0, atol=3e-5)


def test_rows_alone_and_padded_on_the_right_decode_alike() -> None:
    found = MODEL.generate(TOKENS, KEEP, n=N)
    for row, length in enumerate(LENGTHS):
        alone = MODEL.generate(TOKENS[row : row + 1, -length:], n=N)
        assert torch.equal(alone.new[0], found.new[row])
    order = torch.argsort((~KEEP).long(), dim=1, stable=True)
    right = MODEL.generate(TOKENS.gather(1, order), KEEP.gather(1, order), n=N)
    assert torch.equal(right.tokens[right.keep], found.tokens[found.keep])


def test_left_padded_keeps_the_order_of_each_row() -> None:
    tokens = torch.tensor([[5, 6, 7, 0], [1, 2, 3, 4]])
    keep = torch.tensor([[True, True, True, False], [True] * 4])
    moved, kept = left_padded(tokens, keep)
    assert moved.tolist() == [[0, 5, 6, 7], [1, 2, 3, 4]]
    assert kept.tolist() == [[False, True, True, True], [True] * 4]


EDITS = {
    "a head off": zero("O", 1, h=2),
    "scores": scale("S", 1, factor=0.3, h=0),
    "pattern": scale("A", 2, factor=0.5),
    "a key forbidden": knock_out(1, S=2),
    "values of a position": zero("V", 1, S=2),
    "a position": zero("x_mid", 1, T=3),
    "an expert excluded": exclude(1, e=range(8)),
    "experts forced": force(2, [0, 1, 2, 3]),
    "an expert's gate": zero("gates", 1, e=5),
    "steering": add("x_n", 2, direction=torch.ones(MODEL.dims.d), alpha=0.3),
    "the embedding": scale("x_0", factor=1.3),
    "a weight": scale("W_O", 1, factor=0.5),
    "keys": scale("K", 2, factor=0.7),
    "some readers": scale("x_n", 2, factor=0.5, into="x_mid"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_at_prompt_and_steps_are_what_a_full_run_has(name: str) -> None:
    edits = [EDITS[name]]
    found, twin = generate(MODEL, TOKENS, KEEP, n=6, edits=edits), slow_twin(edits, 6)
    assert torch.equal(found.new, twin[0])
    torch.testing.assert_close(found.logits, twin[1], rtol=0, atol=5e-5)
    plain = MODEL.generate(TOKENS, KEEP, n=6)
    assert (found.logits - plain.logits).abs().max() > 1e-3, "the edit acts"


def test_when() -> None:
    change = add("x_n", 1, direction=torch.linspace(-1, 1, MODEL.dims.d), alpha=2.0)
    at = {
        when: MODEL.generate(TOKENS, KEEP, n=4, edits=[change], when=when).logits
        for when in ("prompt", "steps", "both")
    }
    plain = MODEL.generate(TOKENS, KEEP, n=4).logits
    assert torch.equal(at["steps"][:, 0], plain[:, 0]), "the first token is scored by the prompt"
    assert torch.equal(at["prompt"][:, 0], at["both"][:, 0])
    assert not torch.equal(at["prompt"][:, 0], plain[:, 0])
    assert not torch.equal(at["steps"][:, 1], plain[:, 1])
    with pytest.raises(BadEdit, match="not one of prompt, steps, both"):
        MODEL.generate(TOKENS, KEEP, n=1, edits=[change], when="never")  # type: ignore[arg-type]


def test_what_has_no_source_beyond_the_prompt_is_refused_in_steps() -> None:
    source = MODEL.run(TOKENS, KEEP, want=None)
    for change in (patch("O", 1, source=source), resample("O", 1, source=source), freeze("A", 1)):
        with pytest.raises(BadEdit, match="nothing to take"):
            MODEL.generate(TOKENS, KEEP, n=2, edits=[change])
    MODEL.generate(TOKENS, KEEP, n=2, edits=[patch("O", 1, source=source)], when="prompt")
    MODEL.generate(TOKENS, KEEP, n=2, edits=[patch("O", 1, source=source, T=1)])  # it names a place in the prompt


def test_a_hook_knows_its_step_and_sees_the_new_position_alone() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    with MODEL.hooks(fwd_hooks=[("blocks.1.K", lambda value, hook: seen.append((hook.step, tuple(value.shape))))]):
        MODEL.generate(TOKENS, KEEP, n=3)
    width = (MODEL.dims.h, MODEL.dims.q)
    assert seen == [(0, (3, 7, *width)), (1, (3, 1, *width)), (2, (3, 1, *width))]
    assert MODEL.clock.step == 0


def test_a_hook_acts_in_each_step_and_an_exception_leaves_nothing() -> None:
    def off(value: Tensor, hook: object) -> Tensor:
        value[:, :, 2] = 0
        return value

    with MODEL.hooks(fwd_hooks=[("blocks.1.O", off)]):
        hooked = MODEL.generate(TOKENS, KEEP, n=5)
    torch.testing.assert_close(hooked.logits, MODEL.generate(TOKENS, KEEP, n=5, edits=[zero("O", 1, h=2)]).logits)

    def fail(value: Tensor, hook: object) -> None:
        if hook.step == 2:  # type: ignore[attr-defined]
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), MODEL.hooks(fwd_hooks=[("blocks.1.O", fail)]):
        MODEL.generate(TOKENS, KEEP, n=5)
    assert MODEL.clock.step == 0
    assert torch.equal(MODEL.generate(TOKENS, KEEP, n=3).new, slow_twin([], 3)[0])


def test_sampling_is_seeded_and_follows_the_scores() -> None:
    one, same, other = (MODEL.generate(TOKENS, KEEP, n=8, temperature=1.0, seed=s).new for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    cold = MODEL.generate(TOKENS, KEEP, n=8, temperature=1e-4, seed=3).new
    assert torch.equal(cold, MODEL.generate(TOKENS, KEEP, n=8).new)
    rows = TOKENS[:1].expand(600, -1)
    drawn = MODEL.generate(rows, KEEP[:1].expand(600, -1), n=1, temperature=1.5, seed=4)
    expected = torch.softmax(drawn.logits[0, 0] / 1.5, -1)
    found = torch.bincount(drawn.new[:, 0], minlength=MODEL.dims.V) / 600
    assert (found - expected).abs().max() < 0.08


def test_a_row_ends_at_a_stop_token_and_the_others_go_on() -> None:
    plain = MODEL.generate(TOKENS, KEEP, n=N).new
    stop = int(plain[0, 2])
    found = MODEL.generate(TOKENS, KEEP, n=N, stop=[stop]).new
    for row in range(3):
        hit = (plain[row] == stop).nonzero()
        end = int(hit[0]) if len(hit) else N
        assert torch.equal(found[row, :end], plain[row, : min(end, found.shape[1])][:end])
        assert (found[row, end:] == stop).all()


def test_noise_in_steps_is_drawn_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = MODEL.generate(TOKENS, KEEP, n=3, edits=[noise("x_n", 1, std=1.0, seed=1)], when="steps")
    assert not torch.equal(found.logits[:, 1], MODEL.generate(TOKENS, KEEP, n=3).logits[:, 1])


def test_no_token_is_refused() -> None:
    with pytest.raises(BadEdit, match="at least one"):
        MODEL.generate(TOKENS, KEEP, n=0)


def test_open_slices_go_on_and_what_acts_in_no_step_is_refused() -> None:
    change = lambda **where: add("x_n", 1, direction=torch.linspace(-1, 1, MODEL.dims.d), alpha=2.0, **where)  # noqa: E731
    found, twin = (
        MODEL.generate(TOKENS, KEEP, n=5, edits=[change(T=slice(1, None))]),
        slow_twin([change(T=slice(1, None))], 5),
    )
    assert torch.equal(found.new, twin[0])
    torch.testing.assert_close(found.logits, twin[1], rtol=0, atol=5e-5)
    last = [
        MODEL.generate(TOKENS, KEEP, n=4, edits=[change(T=t)], when="steps").logits for t in (-1, slice(-1, None), [-1])
    ]
    assert torch.equal(last[0], last[1])
    assert torch.equal(last[0], last[2])
    for T in (3, slice(0, 2), [0, 1]):
        with pytest.raises(BadEdit, match="acts in no step"):
            MODEL.generate(TOKENS, KEEP, n=3, edits=[change(T=T)], when="steps")
    sink = knock_out(1, T=slice(1, None), S=0)
    assert torch.equal(MODEL.generate(TOKENS, KEEP, n=5, edits=[sink]).new, slow_twin([sink], 5)[0])


def test_the_slow_twin_keeps_to_what_a_full_run_can_do() -> None:
    for when in ("prompt", "steps"):
        with pytest.raises(BadEdit, match="use_cache=False"):
            generate(MODEL, TOKENS, KEEP, n=2, edits=[EDITS["a head off"]], when=when, use_cache=False)


# ---- with and without a cache, and by hand ---------------------------------------------------------------------------

SPANS = [{"name": [1, 2], "END": [-1]}, {"name": [3], "END": [-1]}, {"name": [1, 4], "END": [-1]}]
STEPS = 3
PLACES: dict[str, dict[str, Any]] = {
    "everywhere": {},
    "-1": {"T": -1},
    "-2 and -1": {"T": [-2, -1]},
    "the last ones": {"T": slice(-2, None)},
    "an open slice": {"T": slice(1, None)},
    "1": {"T": 1},
    "a span": {"T": "name"},
    "the prompt's end": {"T": "END"},
    "a mask": {"T": KEEP & (torch.arange(KEEP.shape[1]) % 2 == 1)},
}
NEW = ("everywhere", "-1", "-2 and -1", "the last ones", "an open slice")
"""Places that hold each new token."""

SAE = Dictionary(
    torch.randn(MODEL.dims.d, 9, generator=torch.Generator().manual_seed(1)),
    torch.zeros(9),
    torch.randn(9, MODEL.dims.d, generator=torch.Generator().manual_seed(2)),
    torch.zeros(MODEL.dims.d),
)
RAMP = torch.linspace(-1, 1, MODEL.dims.d)
KINDS: dict[str, Callable[..., Edit]] = {
    "zero": lambda **at: zero("O", 1, h=1, **at),
    "renorm": lambda **at: zero("gates", 1, k=0, renorm=True, **at),
    "mean": lambda **at: mean("x_mid", 1, source=reference(), **at),
    "noise": lambda **at: noise("x_n", 1, std=1.0, seed=1, **at),
    "relative noise": lambda **at: noise("s_attn", 1, std=0.5, relative=True, seed=2, **at),
    "noise of scores": lambda **at: noise("S", 1, std=2.0, seed=3, **at),
    "rounded": lambda **at: rounded("x_n", 1, like=torch.bfloat16, seed=4, **at),
    "add": lambda **at: add("x_next", 0, direction=RAMP, alpha=2.0, **at),
    "scale": lambda **at: scale("router_logits", 1, factor=-1.0, **at),
    "project": lambda **at: project_out("x_n", 1, span=RAMP, **at),
    "set": lambda **at: set_to("delta_ffn", 0, value=0.5, **at),
    "knock out": lambda **at: knock_out(1, S=1, **at),
    "exclude": lambda **at: exclude(1, e=range(6), **at),
    "force": lambda **at: force(1, [0, 1, 2, 3], **at),
    "a function": lambda **at: edit("x_mid", torch.sin, block=1, **at),
    "the last of what it sees": lambda **at: edit("x_mid", last_off, block=1, **at),
    "splice": lambda **at: splice("x_mid", 1, dictionary=SAE, **at),
    "a latent": lambda **at: scale("x_mid", 1, factor=3.0, through=SAE, feature=[0, 4], **at),
    "one reader": lambda **at: scale("x_n", 1, factor=0.5, into="x_mid", **at),
    "patch": lambda **at: patch("O", 1, source=reference(), rows=[3, 1, 2], **at),
    "patch by expert": lambda **at: patch("delta_experts", 1, source=reference(), rows=[3, 1, 2], **at),
    "resample": lambda **at: resample("x_n", 1, source=reference(), seed=3, **at),
    "freeze": lambda **at: freeze("A", 2, **at),
}
TAKING = ("patch", "patch by expert", "resample", "freeze")
"""What has nothing to take at a new token."""


@cache
def reference() -> Run:
    ids = torch.randint(0, MODEL.dims.V, (6, 9), generator=torch.Generator().manual_seed(6))
    return MODEL.run(ids, want=None, spans=[*SPANS, *SPANS])


def last_off(value: Tensor) -> Tensor:
    value[:, -1] = 0
    return value


def both_ways(edits: list[Edit], tokens: Tensor = TOKENS, keep: Tensor = KEEP, when: Any = "both") -> Tensor:
    """The logits with a cache, which are those without."""
    asked: dict[str, Any] = {"n": STEPS, "edits": edits, "spans": SPANS[: len(tokens)]}
    cached = generate(MODEL, tokens, keep, **asked, when=when)
    if when == "both":
        anew = generate(MODEL, tokens, keep, **asked, use_cache=False)
        torch.testing.assert_close(anew.logits, cached.logits, rtol=0, atol=5e-5)
        assert torch.equal(anew.new, cached.new)
    return cached.logits


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_edit_acts_alike_with_and_without_a_cache(kind: str, place: str) -> None:
    """At positions from either end, spans and masks; each acts on what it names, and in steps where it names these."""
    edits = [KINDS[kind](**PLACES[place])]
    plain = generate(MODEL, TOKENS, KEEP, n=1).logits
    if kind == "freeze":
        edits = [scale("x_n", 1, factor=2.0, T=1), *edits]
    if place in NEW and kind in TAKING:
        with pytest.raises(BadEdit, match="nothing to take"):
            both_ways(edits)
        assert not torch.equal(both_ways(edits, when="prompt")[:, :1], plain)
        return
    found = both_ways(edits)
    if kind == "the last of what it sees" and place not in (*NEW, "the prompt's end"):
        return
    assert torch.equal(found[:, :1], plain) == (kind == "splice")


def by_hand(act: Callable[[list[int], int, int], list[Edit]]) -> Tensor:
    """Logits of rows that grow alone and unpadded, each pass a plain run with the edits that ``act`` says: of a row's
    prompt and its newest token, each at plain positions from the front."""
    rows = []
    for b, length in enumerate(LENGTHS):
        ids, scores = TOKENS[b, -length:].tolist(), []
        for _ in range(STEPS):
            logits = MODEL.run(torch.tensor([ids]), edits=act(list(range(length, len(ids))), length, b))["logits"][
                0, -1
            ]
            scores.append(logits)
            ids.append(int(logits.argmax()))
        rows.append(torch.stack(scores))
    return torch.stack(rows)


def test_minus_one_is_the_newest_token_at_each_step() -> None:
    def act(new: list[int], length: int, b: int) -> list[Edit]:
        return [add("x_n", 1, direction=RAMP, alpha=2.0, T=[length - 1, *new])]

    found = both_ways([add("x_n", 1, direction=RAMP, alpha=2.0, T=-1)])
    torch.testing.assert_close(found, by_hand(act), rtol=0, atol=5e-5)


@pytest.mark.parametrize("offset", [1, 2])
def test_a_key_from_the_end_is_that_of_its_step(offset: int) -> None:
    """The newest (or the one before it) is hidden from the token that is read; once others have come it is seen."""

    def act(new: list[int], length: int, b: int) -> list[Edit]:
        hidden = [knock_out(1, T=slice(0, length), S=length - offset)]
        return hidden + [knock_out(1, T=t, S=t + 1 - offset) for t in new]

    found = both_ways([knock_out(1, S=-offset)])
    torch.testing.assert_close(found, by_hand(act), rtol=0, atol=5e-5)


def test_a_span_of_keys_is_the_prompts_at_each_step() -> None:
    """It failed from the second token on."""

    def act(new: list[int], length: int, b: int) -> list[Edit]:
        return [knock_out(1, S=[length - 1] if name == "END" else SPANS[b]["name"])]

    for name in ("name", "END"):
        found = both_ways([knock_out(1, S=name)])
        torch.testing.assert_close(found, by_hand(act), rtol=0, atol=5e-5)


def test_a_mask_of_keys_is_the_prompts_however_it_is_padded() -> None:
    mask = torch.zeros_like(KEEP)
    for b, length in enumerate(LENGTHS):
        mask[b, [p - length for p in SPANS[b]["name"]]] = True
    by_name = both_ways([knock_out(1, S="name")])
    assert torch.equal(both_ways([knock_out(1, S=mask)]), by_name)
    order = torch.argsort((~KEEP).long(), dim=1, stable=True)
    tokens, keep, mask = (value.gather(1, order) for value in (TOKENS, KEEP, mask))
    torch.testing.assert_close(both_ways([knock_out(1, S=mask)], tokens, keep), by_name)


def test_edits_that_meet_at_the_newest_token_go_on_after_the_first_step() -> None:
    """A replacement at -1 is no replacement of the whole: nothing is cut off, in steps as on the prompt."""
    edits = [scale("O", 0, factor=2.0, T=-1), zero("x_next", 1, T=-1), scale("x_next", 1, factor=3.0, T=-1)]
    both_ways([*edits, add("x_next", 1, direction=RAMP, T=-1)])


def test_noise_is_that_of_a_plain_run_on_the_grown_text() -> None:
    found = both_ways([noise("x_n", 1, std=1.0, seed=1), noise("A", 2, std=0.1, seed=2)])
    twin = slow_twin([noise("x_n", 1, std=1.0, seed=1), noise("A", 2, std=0.1, seed=2)], STEPS)
    torch.testing.assert_close(found, twin[1], rtol=0, atol=5e-5)


def test_relative_noise_takes_the_prompts_spread_in_steps_too() -> None:
    change = noise("s_attn", 1, std=0.5, relative=True, seed=2)
    alone = generate(MODEL, TOKENS[1:], KEEP[1:], n=STEPS, edits=[change]).logits
    torch.testing.assert_close(both_ways([change])[1:], alone, rtol=0, atol=5e-5)
    steps = generate(MODEL, TOKENS, KEEP, n=STEPS, edits=[change], when="steps").logits
    plain = generate(MODEL, TOKENS, KEEP, n=STEPS).logits
    assert torch.equal(steps[:, 0], plain[:, 0])
    assert not torch.equal(steps[:, 1], plain[:, 1])


def test_a_mean_by_position_is_refused_in_steps() -> None:
    for tensor in ("A", "K", "Q_R"):
        with pytest.raises(BadEdit, match="nothing to take"):
            MODEL.generate(TOKENS, KEEP, n=2, edits=[mean(tensor, 1, source=reference())])


def test_on_the_prompt_an_edit_freezes_as_in_a_run() -> None:
    edits = [scale("x_n", 1, factor=2.0), freeze("A", 1), freeze("experts", 2)]
    found = MODEL.generate(TOKENS, KEEP, n=1, edits=edits, when="prompt").logits[:, 0]
    assert torch.equal(found, MODEL.run(TOKENS, KEEP, edits=edits)["logits"][:, -1])
