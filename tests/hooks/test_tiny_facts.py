"""Why the shipped model does its tasks: what is left when parts are switched off, with a control beside each fact.

Heads and experts are found by score in the file at hand, never by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from hooks import Edit, HookedModel, zero
from probe import Decoder, random_weights
from training.facts import above, head_scores
from training.quiz import Quiz

Heads = list[tuple[int, int]]
Left = Callable[[str, Sequence[Edit]], float]


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


@pytest.fixture(scope="module")
def left(model: HookedModel) -> Left:
    """The share of fresh held-out questions of a kind that are answered under edits."""
    quiz = Quiz(model.decoder, n=200)

    def accuracy(kind: str, edits: Sequence[Edit]) -> float:
        def run(_: Decoder, tokens: Tensor) -> Tensor:
            return model.run(tokens, edits=edits)["logits"]

        return quiz.accuracy(kind, run)

    return accuracy


@pytest.fixture(scope="module")
def scores(model: HookedModel) -> tuple[Tensor, Tensor]:
    return head_scores(model.decoder)


@pytest.fixture(scope="module")
def previous(scores: tuple[Tensor, Tensor]) -> Heads:
    """Heads that give more than half of their attention to the token before."""
    return above(scores[0])


@pytest.fixture(scope="module")
def successor(scores: tuple[Tensor, Tensor]) -> Heads:
    """Heads that give more than half of it to what followed the same token earlier: induction heads."""
    return above(scores[1])


def off(heads: Heads) -> list[Edit]:
    """Those heads switched off: one edit a block, since two of one tensor would overlap."""
    blocks = sorted({block for block, _ in heads})
    return [zero("O", block=block, h=[head for b, head in heads if b == block]) for block in blocks]


def absent(model: HookedModel, tensor: str) -> list[Edit]:
    """A tensor of the MoE blocks set to zero in all of them."""
    return [zero(tensor, block=block) for block, moe in enumerate(model.dims.moe) if moe]


# --- heads -------------------------------------------------------------------------------------


def test_without_previous_token_heads_no_induction(left: Left, previous: Heads) -> None:
    assert previous
    assert left("induction", []) >= 0.95
    assert left("induction", off(previous)) <= 0.3


def test_other_heads_of_those_blocks_are_not_needed(
    model: HookedModel, left: Left, previous: Heads, successor: Heads
) -> None:
    blocks = sorted({block for block, _ in previous})
    others = [(b, h) for b in blocks for h in range(model.dims.h) if (b, h) not in previous + successor]
    assert others
    for head in others:
        assert left("induction", off([head])) >= 0.95, head


def test_without_induction_heads_no_induction(
    model: HookedModel, left: Left, previous: Heads, successor: Heads
) -> None:
    assert len(successor) > 1
    assert left("induction", off(successor)) <= 0.1
    found = {*previous, *successor}
    others = [(b, h) for b in range(model.dims.blocks) for h in range(model.dims.h) if (b, h) not in found]
    assert left("induction", off(others[-len(successor) :])) >= 0.95  # the control: as many others, as late


def test_each_induction_head_can_be_spared(left: Left, successor: Heads) -> None:
    for head in successor:
        assert left("induction", off([head])) >= 0.9, head


def test_an_untrained_model_has_no_such_heads(model: HookedModel) -> None:
    for scores in head_scores(Decoder(random_weights(model.dims))):
        assert not above(scores)


# --- experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["job", "home"])
def test_facts_about_persons_need_the_routed_experts(kind: str, model: HookedModel, left: Left) -> None:
    assert left(kind, []) >= 0.95
    assert left(kind, absent(model, "delta_routed")) <= 0.6
    assert left(kind, absent(model, "gates")) <= 0.6  # the same by another way
    assert left(kind, absent(model, "delta_shared")) >= 0.85  # the control


@pytest.mark.parametrize(("kind", "least"), [("induction", 0.95), ("ioi", 0.95), ("agreement", 0.9)])
def test_the_rest_does_without_the_routed_experts(kind: str, least: float, model: HookedModel, left: Left) -> None:
    assert left(kind, absent(model, "delta_routed")) >= least
