"""The shipped model: its files are what the scripts write, it does its tasks, and what it knows moves as it should.

What switching parts off does to it is in tests/hooks/test_tiny_facts.py.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from probe import TINY, Decoder, Tokenizer, load
from training import language, prompts
from training.facts import recovered
from training.quiz import LOGITS, Quiz
from training.train import DIMS

TASKS = sorted(prompts.SPANS)
Row = dict[str, Any]


def rows(folder: str, task: str) -> list[Row]:
    return [json.loads(line) for line in (TINY / folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(load(TINY, torch.float32))


@pytest.fixture(scope="module")
def quiz(decoder: Decoder) -> Quiz:
    return Quiz(decoder, n=200)


# --- files -------------------------------------------------------------------------------------


def test_sizes_are_those_of_training_and_no_two_widths_of_a_head_are_equal() -> None:
    dims = load(TINY).dims
    assert dims == DIMS
    assert len({dims.n, dims.r, dims.v, dims.n + dims.r}) == 4


def test_it_is_small_and_in_two_shards() -> None:
    files = [path for path in TINY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4e6
    assert sorted(path.name for path in files if path.suffix == ".safetensors") == [
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    ]


def test_scripts_write_the_shipped_text_files(tmp_path: Path) -> None:
    prompts.write(tmp_path)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) == 1 + 2 * len(TASKS) + 1
    assert {name: (TINY / name).read_bytes() for name in written} == written


def test_tokenizer_puts_bos_in_front_and_knows_every_word(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("When Mary")[0] == language.ID[language.BOS] == 1
    assert len(tokenizer) == DIMS.V
    for task in TASKS:
        for row in rows("prompts", task) + rows("reference", task):
            for text in (row["clean"], row["corrupt"], row["answer"], row["wrong"]):
                tokenizer.encode(text)


def shape(row: Row, tokenizer: Tokenizer) -> tuple[int, tuple[tuple[str, int], ...]]:
    """How many tokens a row has, and where its spans lie among them; each span is exactly one token."""
    tokens = tokenizer.spans(row["clean"])
    return len(tokens), tuple((name, tokens.index(tuple(span))) for name, span in sorted(row["spans"].items()))


@pytest.mark.parametrize("task", TASKS)
def test_prompts_align_and_have_reference_of_their_shape(task: str, tokenizer: Tokenizer) -> None:
    asked, reference = rows("prompts", task), rows("reference", task)
    assert 64 <= len(asked) <= 100
    for row in asked + reference:
        clean, corrupt = row["clean"].split(), row["corrupt"].split()
        assert len(clean) == len(corrupt)
        assert sum(a != b for a, b in zip(clean, corrupt, strict=True)) == 1
        assert row["answer"] != row["wrong"]
        assert set(row["spans"]) == {*prompts.SPANS[task], "END"}
        assert dict(shape(row, tokenizer)[1])["END"] == len(clean)
    shapes = Counter(shape(row, tokenizer) for row in reference)
    assert min(shapes[shape(row, tokenizer)] for row in asked) >= 8
    for template in {row["template"] for row in asked}:
        assert len({shape(row, tokenizer) for row in asked + reference if row["template"] == template}) == 1


@pytest.mark.parametrize("task", TASKS)
def test_reference_shares_no_text_with_the_prompts(task: str) -> None:
    asked, reference = (
        {row[key] for row in rows(folder, task) for key in ("clean", "corrupt")} for folder in ("prompts", "reference")
    )
    assert asked.isdisjoint(reference)


def test_reference_documents_fill_32_tokens(tokenizer: Tokenizer) -> None:
    texts = [row["text"] for row in rows("reference", "text")]
    assert len(texts) == 256
    assert {len(tokenizer.encode(text)) for text in texts} == {32}


def test_prompts_are_held_out_of_training() -> None:
    """No shipped question turns up with its answer in what training would draw; those of the reference do."""
    rng = random.Random("a look at training")
    shown = [language.document(rng, language.ALL_KINDS).words[1:] for _ in range(5000)]
    sentences = [sentence.split() for text in shown for sentence in " ".join(text).split(" .")]
    beginnings = {" ".join(words[:n]) for words in sentences for n in range(1, len(words) + 1)}
    asked = {f"{row['clean']} {row['answer']}" for task in TASKS for row in rows("prompts", task)}
    assert not asked & beginnings
    reference = {f"{row['clean']} {row['answer']}" for row in rows("reference", "capital")}
    assert len(reference & beginnings) > len(reference) / 2


# --- accuracy ----------------------------------------------------------------------------------


def answered(decoder: Decoder, tokenizer: Tokenizer, task: str, text: str, labels: list[str]) -> float:
    """The share of a task's texts after which the label has the largest logit."""
    batch = tokenizer.batch([row[text] for row in rows("prompts", task)])
    logits = decoder.run(batch.tokens, batch.keep)[LOGITS]
    last = batch.tokens.shape[1] - 1 if batch.keep is None else batch.keep.sum(-1) - 1
    best = logits[torch.arange(len(labels)), last].argmax(-1).tolist()
    return sum(tokenizer.id(label) == token for label, token in zip(labels, best, strict=True)) / len(labels)


@pytest.mark.parametrize("task", TASKS)
def test_answers_its_prompts_and_not_shuffled_labels(task: str, decoder: Decoder, tokenizer: Tokenizer) -> None:
    answers, wrong = ([row[key] for row in rows("prompts", task)] for key in ("answer", "wrong"))
    assert answered(decoder, tokenizer, task, "clean", answers) >= 0.95
    assert answered(decoder, tokenizer, task, "corrupt", wrong) >= 0.95
    shuffled = random.Random(task).sample(answers, len(answers))
    assert answered(decoder, tokenizer, task, "clean", shuffled) <= 0.7


@pytest.mark.parametrize("task", TASKS)
def test_answers_in_bfloat16_too(task: str, tokenizer: Tokenizer) -> None:
    answers = [row["answer"] for row in rows("prompts", task)]
    assert answered(Decoder(load(TINY)), tokenizer, task, "clean", answers) >= 0.95


@pytest.mark.parametrize("kind", list(language.HELD_OUT))
def test_answers_fresh_held_out_questions(kind: str, quiz: Quiz) -> None:
    assert quiz.accuracy(kind) >= 0.95


# --- where it stands ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "span"),
    [("ioi", "S2"), ("capital", "subject"), ("job", "first"), ("agreement", "noun"), ("induction", "B1")],
)
def test_what_the_answer_hangs_on_moves_from_its_word_to_the_end(task: str, span: str, decoder: Decoder) -> None:
    found = recovered(decoder, task)
    assert found[span][0] == pytest.approx(1, abs=1e-3)
    assert found[span][-1] == pytest.approx(0, abs=1e-3)
    assert found["END"][0] == pytest.approx(0, abs=1e-3)
    assert found["END"][-1] == pytest.approx(1, abs=1e-3)
    untouched = {"ioi": "IO", "induction": "A1"}.get(task)
    if untouched:  # the control: a word that is equal in both
        assert max(map(abs, found[untouched])) <= 0.05


def test_ioi_is_decided_late_and_at_once(decoder: Decoder) -> None:
    found = recovered(decoder, "ioi")
    assert min(found["S2"][:2]) >= 0.9
    assert max(found["END"][:2]) <= 0.1


def test_a_fact_about_a_person_passes_through_the_last_name(decoder: Decoder) -> None:
    for task in ("job", "home"):
        found = recovered(decoder, task)
        assert found["first"][1] >= 0.9
        assert max(found["last"]) >= 0.6
        assert max(found["last"][0], found["last"][-1]) <= 0.1
