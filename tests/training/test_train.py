"""Training: a seed decides everything, pads don't count, and what the language promises is kept."""

from __future__ import annotations

import random

import pytest
import torch

from training import language
from training.train import Recipe, Trainer


def trained(steps: int, seed: int = 0) -> Trainer:
    trainer = Trainer(Recipe(seed=seed, documents=4))
    for step in range(steps):
        trainer.step(language.ALL_KINDS, trainer.recipe.rate_at(step, 0))
    return trainer


def test_a_seed_gives_the_same_weights_and_another_one_others() -> None:
    one, same, other = trained(3), trained(3), trained(3, seed=1)
    for key, weight in one.result().tensors.items():
        assert torch.equal(weight, same.result().tensors[key]), key
    assert not torch.equal(one.result().tensors[None, "W_E"], other.result().tensors[None, "W_E"])


def test_every_weight_is_learnt() -> None:
    before, after = Trainer(Recipe()).weights, trained(2).result()
    for key, weight in after.tensors.items():
        assert not torch.equal(before[key], weight), key


def test_balance_moves_each_bias_towards_equal_load_and_ignores_pads() -> None:
    trainer = Trainer(Recipe())
    experts = torch.tensor([[[0, 1], [0, 2], [9, 9]]])
    trainer.balance([experts] * len(trainer.biases), real=torch.tensor([[True, True, False]]))
    step = trainer.recipe.balance
    assert 4 / trainer.decoder.dims.e < 1  # the mean load
    for bias in trainer.biases:
        assert bias[:3].tolist() == pytest.approx([-step] * 3)
        assert bias[3:].tolist() == pytest.approx([step] * 13)


def test_rate_warms_up_then_falls_to_a_fiftieth() -> None:
    recipe = Recipe()
    assert recipe.rate_at(0, 0) == pytest.approx(recipe.rate / recipe.warm_up)
    assert recipe.rate_at(500, recipe.steps // 2) == recipe.rate
    assert recipe.rate_at(2000, recipe.steps - 1) == pytest.approx(recipe.rate / 50)


def test_documents_fit_and_their_unpredictable_words_weigh_nothing() -> None:
    rng = random.Random(0)
    for mix in (language.LONG_LISTS, language.ALL_KINDS):
        for _ in range(200):
            document = language.document(rng, mix)
            assert document.words[0] == language.BOS
            assert len(document.words) == len(document.weights) <= 32
            assert set(document.words) <= language.ID.keys()
    names = language.name_list(rng, language.LONG_LISTS)
    answers = [i for i, weight in enumerate(names.weights) if weight >= language.ANSWER]
    assert len(answers) >= 9
    assert all(names.words[i] in names.words[:i] for i in answers)
    assert not any(names.words[i] in names.words[:i] for i in range(answers[0] - 1))


def test_no_name_alone_says_anything_about_job_or_home() -> None:
    for kind in ("job", "home"):
        answers = language.FACTS[kind].answers
        for first in language.FIRST_NAMES:
            assert len({answers[first, last] for last in language.LAST_NAMES}) == 10
        for last in language.LAST_NAMES:
            assert len({answers[first, last] for first in language.FIRST_NAMES}) == 10


def test_unseen_names_are_in_lists_only() -> None:
    rng = random.Random(0)
    shown = {word for _ in range(2000) for word in language.sentence(rng, "ioi").words}
    assert not shown & set(language.IOI_UNSEEN_NAMES)
    assert set(language.IOI_NAMES) <= shown
