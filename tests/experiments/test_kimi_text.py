"""Kimi's tokenizer and chats in studies: chats as prompts, and the command line on a directory with a rank file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner, Result

from experiments import Prompts
from experiments.cli import app
from hooks import HookedModel, patch, zero
from probe import Tokenizer, random_weights, save
from probe.errors import BadText
from tests.probe.ranks import grown, kimi
from tests.probe.small import SMALL

TOKENS = grown(
    ["The", " capital", " of", " France", " Chile", " is", " Paris", " Santiago", "user", "assistant"], 90, 0
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with Kimi's kind of tokenizer."""
    place = tmp_path_factory.mktemp("kimi")
    save(random_weights(replace(SMALL, V=len(TOKENS) + 256), seed=0), place, dtype=torch.float32)
    return kimi(place, TOKENS)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def asks(country: str, *more: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"The capital of{country} is"}, *more]


# ---- chats as prompts ------------------------------------------------------------------------------------------------


def test_a_chat_is_a_prompt_with_its_spans(tokenizer: Tokenizer) -> None:
    row = {"clean": asks(" France"), "corrupt": asks(" Chile"), "answer": " Paris", "wrong": " Santiago"}
    prompts = Prompts.of([row], tokenizer)
    chat = tokenizer.chat(asks(" France"))
    (prompt,) = prompts.rows
    assert prompts.batch().tokens.tolist() == chat.tokens.tolist()
    assert (prompt.clean, prompt.group) == (chat.text, chat.text)
    assert prompt.spans == {**chat.spans, "END": range(len(prompt.tokens) - 1, len(prompt.tokens))}
    assert prompt.corrupt_spans is not None
    assert prompt.corrupt_spans.keys() == prompt.spans.keys()
    assert prompts.swapped().rows[0].tokens == tuple(tokenizer.chat(asks(" Chile")).tokens[0].tolist())


def test_edits_by_role(directory: Path, tokenizer: Tokenizer) -> None:
    model = HookedModel.load(directory)
    prompts = Prompts.of([{"clean": asks(" France"), "corrupt": asks(" Chile, please,")}], tokenizer)
    other = prompts.swapped()
    (spans,), (theirs,) = prompts.spans, other.spans
    assert spans["after_user"] != theirs["after_user"]
    source = model.run(*other.batch(), spans=other.spans, want=None)
    edit = patch("x_mid", block=1, source=source, T="after_user")
    run = model.run(*prompts.batch(), spans=prompts.spans, edits=[edit], want=["blocks.1.x_mid"])
    assert torch.equal(
        run["blocks.1.x_mid"][0, [*spans["after_user"]]], source["blocks.1.x_mid"][0, [*theirs["after_user"]]]
    )
    base = model.run(*prompts.batch(), want=["blocks.1.x_mid"])
    assert torch.equal(run["blocks.1.x_mid"][0, [*spans["user"]]], base["blocks.1.x_mid"][0, [*spans["user"]]])
    chat = tokenizer.chat(asks(" France"))
    zeroed = model.run(chat.tokens, spans=[chat.spans], edits=[zero("O", block=0, T="user")], want=["blocks.0.O"])
    assert (zeroed["blocks.0.O"].abs().sum((2, 3))[0] == 0).nonzero().flatten().tolist() == [*chat.spans["user"]]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"clean": asks(" France"), "corrupt": "The capital"}, "one of clean and corrupt is a chat"),
        ({"clean": "The capital", "corrupt": asks(" France")}, "one of clean and corrupt is a chat"),
        (
            {"clean": asks(" France"), "spans": {"a": [0, 3]}},
            "spans are ranges of a text; those of a chat are its roles",
        ),
        ({"clean": asks(" F"), "corrupt": asks(" C"), "corrupt_spans": {"a": [0, 3]}}, "those of a chat are its roles"),
        (
            {"clean": asks(" F"), "corrupt": asks(" C", {"role": "assistant", "content": "x"})},
            "only one of them has 'assistant'",
        ),
        ({"clean": []}, "a chat is a list of messages"),
        ({"clean": ["The capital"]}, "message 0 is 'The capital'"),
        ({"clean": 5}, "clean is 5; it should be text, or a list of messages"),
    ],
)
def test_chats_that_are_no_prompts(tokenizer: Tokenizer, row: dict[str, Any], says: str) -> None:
    with pytest.raises(BadText) as error:
        Prompts.of([row], tokenizer)
    assert says in str(error.value)
    assert str(error.value).startswith("prompts, row 0: ")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_in_a_file(tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    rows = [{"clean": asks(country), "answer": " Paris"} for country in (" France", " Chile")]
    file = tmp_path / f"mine.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pd.DataFrame(rows).to_parquet(file)
    assert [prompt.tokens for prompt in Prompts.load(file, tokenizer).rows] == [
        tuple(tokenizer.chat(row["clean"]).tokens[0].tolist()) for row in rows
    ]


# ---- the command line ------------------------------------------------------------------------------------------------


def run(directory: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--model", str(directory)])


def test_ablate_speaks_in_labels(directory: Path) -> None:
    text = "The capital of France is"
    result = run(directory, "ablate", "--prompt", text, "--how", "zero", "--tensor", "x_mid", "--by", "position")
    assert result.exit_code == 0, result.output
    assert "note: no BOS: position 0 is the text's first token" in result.stdout
    assert "0 The" in result.stdout
    assert "4 ␣is" in result.stdout


def test_answers_by_text_or_label(directory: Path) -> None:
    words = ("ablate", "--prompt", "The capital of France is", "--how", "zero", "--tensor", "O", "--wrong", " Santiago")
    tables = [run(directory, *words, "--answer", answer) for answer in (" Paris", "␣Paris")]
    assert [table.exit_code for table in tables] == [0, 0], tables[0].output
    assert len({table.stdout.split("note: ")[1] for table in tables}) == 1


def test_norms_shows_tokens(directory: Path) -> None:
    result = run(directory, "norms", "--prompt", "The capital 你", "--tensor", "x_n")
    assert result.exit_code == 0, result.output
    assert any(token in result.stdout for token in ("The (0)", "␣capital (1)", "⟨BD⟩ (4)"))


def test_no_reference_prompts_is_told_with_the_remedy(directory: Path) -> None:
    result = run(directory, "ablate", "--prompt", "The capital", "--tensor", "O")
    assert result.exit_code == 1
    assert "--how zero" in result.stderr


def test_a_model_without_text_is_told(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    result = run(tmp_path, "norms", "--prompt", "The capital")
    assert result.exit_code == 1
    assert result.stderr == f"k2probe: {tmp_path}: there is no tokenizer, so it can't be asked in words.\n"
