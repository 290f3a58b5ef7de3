"""What is drawn hangs on a seed and on texts: never on how rows stand, how they are padded, or what is beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import Cache, Cell, Edit, Live, Run, noise, resample, rounded
from hooks.draws import below, hashed, normal, texts
from probe.errors import BadEdit
from tests.hooks.small import DIMS, LENGTHS, MODEL, MOE, REFERENCE, SIDES, TOKENS, B, T, close, padded, ragged
from tests.hooks.twin import LOGITS, Ask, swept

N = 200_000


def test_normal_numbers_are_normal_and_apart() -> None:
    """Moments to four standard errors; what lies beside each other (numbers, texts, seeds) is no more alike than chance
    has it."""
    drawn = normal(hashed(torch.arange(N), 3)).double()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (drawn**power).mean() == pytest.approx(expected, abs=4 * (variance / N) ** 0.5)
    grid = normal(hashed(torch.arange(300)[:, None], 3, torch.arange(1000))).double()
    others = [grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]]
    others.append(grid * normal(hashed(torch.arange(300)[:, None], 4, torch.arange(1000))).double())
    for product in others:
        assert abs(float(product.mean())) < 4 * product.numel() ** -0.5
    assert torch.equal(normal(hashed(torch.tensor(-(2**63)), 1)), normal(hashed(torch.tensor(-(2**63)), 1)))
    assert drawn.isfinite().all()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_whole_numbers_come_equally_often(n: int) -> None:
    counts = torch.bincount(below(hashed(torch.arange(N), n), n), minlength=n).double()
    assert len(counts) == n
    assert float(((counts - N / n) ** 2 / (N / n)).sum()) < n + 6 * (2 * n) ** 0.5


def test_a_text_is_its_tokens_in_their_order() -> None:
    rows = torch.tensor([[1, 2, 3], [1, 2, 4], [2, 1, 3], [1, 2, 3]])
    found = texts(rows, None)
    assert torch.equal(found[0], found[3])
    assert torch.equal(found[0, :2], found[1, :2])
    assert len({*found[:3, 2].tolist(), *found[:3, 0].tolist()}) == 5
    left, right = (texts(*padded(ragged(), side)) for side in SIDES)
    for b, n in enumerate(LENGTHS):
        assert torch.equal(left[b, -n:], right[b, :n])
        assert torch.equal(right[b, :n], texts(TOKENS[b : b + 1, :n], None)[0])


# ---- in runs and sweeps ----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Run], Edit]] = {
    "noise": lambda run: noise("x_n", MOE, std=1.0, seed=3),
    "noise by head": lambda run: noise("O", MOE, std=1.0, seed=3, T=[1, -1]),
    "noise of keys": lambda run: noise("K", MOE, std=1.0, seed=3, S=-1),
    "noise of scores": lambda run: noise("S", MOE, std=1.0, seed=3),
    "relative noise": lambda run: noise("x_mid", MOE, std=1.0, relative=True, seed=3),
    "relative noise of a scale": lambda run: noise("s_attn", MOE, std=1.0, relative=True, seed=3),
    "relative noise of scores": lambda run: noise("S", MOE, std=1.0, relative=True, seed=3),
    "another rounding": lambda run: rounded("x_n", MOE, seed=3),
    "resample": lambda run: resample("x_n", MOE, source=run, seed=3),
    "resample at a place": lambda run: resample("O", MOE, source=run, seed=3, h=1, T=[0, 2]),
    "resample by slot": lambda run: resample("y_e", MOE, source=run, seed=3),
    "resample gates at a place": lambda run: resample("gates", MOE, source=run, seed=3, T=[0, 2]),
    "resample by expert": lambda run: resample("delta_experts", MOE, source=run, seed=3),
}
WANT = ["blocks.1.x_n", "blocks.1.O", "blocks.1.y_e", "blocks.1.gates", "blocks.1.delta_experts", "blocks.1.experts"]


@pytest.fixture(scope="module")
def reference() -> Run:
    """Of many prompts, so that each expert is chosen by some."""
    more = torch.randint(0, DIMS.V, (60, T + 1), generator=torch.Generator().manual_seed(8))
    return MODEL.run(torch.cat([REFERENCE, more]), want=WANT)


def last(tokens: Tensor, keep: Tensor | None, edit: Edit) -> Tensor:
    """[B V], the logits at each row's last real token."""
    run = MODEL.run(tokens, keep, edits=[edit])
    at = [first + n - 1 for first, n in zip(run.rows.first, run.rows.lengths, strict=True)]
    return run["logits"][range(len(at)), at]


def last_swept(tokens: Tensor, keep: Tensor | None, edit: Edit) -> Tensor:
    shown, _ = swept(MODEL, Ask(Live(tokens, keep), [Cell((edit,))]))
    return shown["cell", 0, LOGITS][:, 0]


ENGINES = pytest.mark.parametrize("engine", [last, last_swept])


@ENGINES
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_draws_alike_in_any_batch(kind: str, engine: Any, reference: Run) -> None:
    """In another order, beside fewer, beside others that are longer, padded on either side, alone, twice."""
    edit, rows = KINDS[kind](reference), ragged()
    found = engine(*padded(rows, "right"), edit)
    assert (found - last(*padded(rows, "right"), noise("x_n", MOE, std=0.0))).abs().amax(-1).min() > 1e-4, "it acts"
    turned = engine(*padded([rows[i] for i in (2, 0, 1)], "right"), edit)
    close(turned, found[[2, 0, 1]])
    beside = engine(*padded([TOKENS[0].flip(0).repeat(2)[: T + 1], *rows, rows[1]], "right"), edit)
    close(beside[1 : B + 1], found)
    close(beside[B + 1], found[1])
    close(torch.cat([engine(row[None], None, edit) for row in rows]), found)
    if engine is last:
        close(last(*padded(rows, "left"), edit), found)


@ENGINES
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("resample")])
def test_what_is_drawn_does_not_hang_on_the_order_of_the_reference(kind: str, engine: Any, reference: Run) -> None:
    order = torch.randperm(reference.rows.batch, generator=torch.Generator().manual_seed(1))
    turned = MODEL.run(reference.tokens[order], want=WANT)
    close(*(engine(TOKENS, None, KINDS[kind](run)) for run in (reference, turned)))


def test_rows_and_texts_tell_draws_apart(reference: Run) -> None:
    """Different prompts meet different noise, and take from different references; the same as long as they say the
    same."""
    alike = TOKENS[:1].repeat(2, 1)
    alike[1, 3] = (alike[1, 3] + 1) % DIMS.V
    made = MODEL.run(alike, want=["blocks.1.x_n"], edits=[noise("x_n", MOE, std=1.0, seed=3)])
    drawn = made["x_n", MOE] - made.natural["x_n", MOE]
    close(drawn[0, :3], drawn[1, :3])
    assert ((drawn[0, 3:] - drawn[1, 3:]).abs().amax(-1) > 0.5).all()
    many = torch.randint(0, DIMS.V, (40, T), generator=torch.Generator().manual_seed(4))
    seeds = [MODEL.run(many, want=["blocks.1.O"], edits=[resample("O", MOE, source=reference, seed=s)]) for s in (1, 2)]
    taken = [(run["O", MOE][:, None] == reference["O", MOE][:, :T]).flatten(2).all(-1).nonzero()[:, 1] for run in seeds]
    assert all(len(some) == 40 for some in taken)
    assert len(set(taken[0].tolist())) > 25, "of 72"
    assert int((taken[0] == taken[1]).sum()) < 6


def test_a_stored_reference_is_drawn_from_as_the_run_itself(reference: Run, tmp_path: Path) -> None:
    reference.cache.save(tmp_path / "reference.safetensors")
    stored = Cache.load(tmp_path / "reference.safetensors")
    for kind in ("resample", "resample by slot"):
        assert torch.equal(*(last(TOKENS, None, KINDS[kind](source)) for source in (reference, stored)))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["noise", "resample", "resample by slot"])
def test_a_bare_stream_draws_by_its_own_numbers(kind: str, reference: Run) -> None:
    """It has no tokens; still no row's place matters."""
    x_n = MODEL.run(TOKENS, want="blocks.1.x_n")["x_n", MOE]
    found, turned = (
        MODEL.run_block(MOE, x_n[rows], edits=[KINDS[kind](reference)])["x_next", MOE]
        for rows in ([0, 1, 2], [2, 0, 1])
    )
    close(turned, found[[2, 0, 1]])
    cell = Cell((KINDS[kind](reference),))
    ask = Ask(Live(None, x_n=x_n), [cell], want=["blocks.1.x_next"], first=MOE)
    close(swept(MODEL, ask)[0]["cell", 0, MODEL.sites.find("blocks.1.x_next")][:, 0], found[:, -1])


def test_a_spread_of_one_number_is_refused() -> None:
    with pytest.raises(BadEdit, match="position 0 of row 0 is a text of one token, where s_attn has one number"):
        MODEL.run(TOKENS[:, :1], edits=[noise("s_attn", MOE, std=1.0, relative=True)])


def test_a_forced_answer_changes_nothing_of_what_its_prompt_draws(reference: Run) -> None:
    """Named positions are the prompt's, and so is what it draws."""
    rows = torch.cat([TOKENS, TOKENS.flip(1)[:, :1]], 1)
    for edit in (
        resample("x_n", MOE, source=reference, seed=3, T=slice(None)),
        noise("x_mid", 1, std=1.0, relative=True),
    ):
        plain = MODEL.run(TOKENS, edits=[edit])["logits"]
        forced = MODEL.run(rows, edits=[edit], spoken=[T] * B)["logits"]
        close(forced[:, :T], plain)


@pytest.mark.parametrize(
    "kind",
    [
        "noise",
        "noise of scores",
        *(kind for kind in KINDS if "relative" in kind),
        "another rounding",
        "resample by slot",
    ],
)
def test_texts_that_a_row_packs_draw_as_they_do_alone(kind: str, reference: Run) -> None:
    edit, alone = KINDS[kind](reference), ragged()
    segments = torch.repeat_interleave(torch.arange(B), torch.tensor(LENGTHS))[None]
    packed = MODEL.run(torch.cat(alone)[None], segments=segments, edits=[edit])["logits"][0]
    close(packed, torch.cat([MODEL.run(row[None], edits=[edit])["logits"][0] for row in alone]))
