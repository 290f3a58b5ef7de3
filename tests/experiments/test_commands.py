"""What all studies' commands have in common: their options, dry runs, rows by prompt, checkpoints of any precision."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from experiments import frames
from experiments.cli import app
from experiments.prompts import Prompts
from experiments.studies import STUDIES
from probe import TINY, load, save
from tests.probe.files import edit_json

OF: dict[str, tuple[str, ...]] = {
    "ablate": ("--task", "job", "--tensor", "O", "--by", "head"),
    "patch": ("--task", "job", "--by", "role", "--block", "2"),
    "paths": ("--task", "job", "--sender", "blocks.0.O h=1"),
    "circuit": ("--task", "ioi", "--node", "blocks.0.O h=1", "--random", "1"),
    "attribute": ("--task", "job", "--tensor", "O"),
    "norms": ("--task", "job", "--tensor", "x_next"),
    "lens": ("--task", "job", "--block", "3"),
    "scores": ("--task", "job", "--block", "0"),
    "routing": ("--task", "job", "--block", "1"),
    "split": ("zero blocks.2.O h=1", "--task", "job", "--metric", "kl"),
    "top": ("blocks.2.h_e", "--task", "job", "--at", "e=1", "--at", "m=3"),
    "probe": ("--task", "capital", "--label", "continent", "--tensor", "x_n", "--block", "1", "--width", "8"),
    "steer": (
        "token:Paris",
        "--tensor",
        "blocks.2.x_next",
        *"--task job --dose 1 --random 2 --neutral job".split(),
    ),
    "compare": ("random", "--task", "job"),
}
"""Every study's command, with little to do."""

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
BY_PROMPT = ("ablate", "patch", "paths", "circuit", "attribute", "lens", "scores")


def run(name: str, *more: str, model: Path = TINY) -> Result:
    where = [str(model)] if name == "compare" else ["--model", str(model)] if model != TINY else []
    words = [*where, *OF[name]] if name == "compare" else [*OF[name], *where]
    return CliRunner().invoke(app, [name, *words, *more])


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few prompts, but where a probe needs more; and pictures are made, but not drawn to files."""
    whole = Prompts.load

    def few(*asked: object) -> Prompts:
        made = whole(*asked)  # type: ignore[arg-type]
        return made if made.name in ("capital", "continent") else made.subset(range(4))

    monkeypatch.setattr(Prompts, "load", functools.cache(few))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(b"drawn"))
    yield
    plt.close("all")


def test_every_study_has_a_command_or_shares_one() -> None:
    names = {"probe": "probes"}
    assert {names.get(name, name) for name in OF} | {"direct"} == set(STUDIES)
    assert set(OF) <= set(COMMANDS)


@pytest.mark.parametrize("name", OF)
def test_the_options_that_all_share_are_spelt_alike(name: str) -> None:
    options = {spelling: one for one in COMMANDS[name].params for spelling in one.opts}
    wanted = {"--task", "--keep", "--dtype", "--beyond", "--out", "--dry-run"}
    wanted |= set() if name == "compare" else {"--model"}
    wanted |= {"--per-prompt"} if name in BY_PROMPT else set()
    drawn = ("ablate", "patch", "paths", "circuit", "attribute", "split", "probe", "steer")
    wanted |= {"--seed"} if name in drawn else set()
    assert wanted <= set(options)
    for spelling, one in options.items():
        assert one.help or spelling == "--help", spelling
        assert one.help is None or one.help.endswith("."), spelling
        assert one.help == next((o.help for o in COMMANDS["ablate"].params if spelling in o.opts), one.help) or (
            spelling in ("--task", "--tensor", "--how", "--at", "--metric", "--draws")
        ), f"{spelling} means one thing"
    help = COMMANDS[name].help
    assert help
    assert help.strip().endswith(".")


@pytest.mark.parametrize("name", OF)
def test_a_dry_run_says_the_cost_and_writes_nothing(name: str, tmp_path: Path) -> None:
    done = run(name, "--dry-run", "--out", str(tmp_path / "no"))
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    header, *rows = lines[next(i for i, line in enumerate(lines) if line[0] == "unit") :]
    assert len(rows) == (3 if name == "lens" else 1)  # with direct, and both together
    assert {"cells", "forwards", "bytes", "seconds"} <= set(header)
    for row in rows:
        numbers = dict(zip(reversed(header), reversed(row), strict=False))
        assert float(numbers["forwards"].replace(",", "")) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made for three positions."""
    directory = shutil.copytree(TINY, tmp_path_factory.mktemp("short") / "tiny")
    edit_json(directory / "config.json", lambda config: config.update(max_position_embeddings=3))
    return directory


@pytest.mark.parametrize("name", OF)
def test_texts_that_are_too_long_are_refused_in_one_sentence_unless_that_is_said(name: str, short: Path) -> None:
    done = run(name, "--dry-run", model=short)
    assert done.exit_code == 1
    assert "max_position_embeddings is 3: it has not learnt what is beyond. " in done.stderr
    assert "say beyond=True (--beyond)" in done.stderr
    assert run(name, "--dry-run", "--beyond", model=short).exit_code == 0


def test_a_text_that_is_too_long_has_no_answer_of_the_models_own_either(short: Path, tmp_path: Path) -> None:
    asked = ("ablate", "--prompt", "The capital of Peru is", "--tensor", "O", "--block", "1", "--model", str(short))
    assert CliRunner().invoke(app, asked).exit_code == 1
    done = CliRunner().invoke(app, [*asked, "--beyond", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert set(frames.read(tmp_path / "ablation.csv")["beyond"]) == {3}


@pytest.mark.parametrize("name", BY_PROMPT)
def test_rows_by_prompt_go_to_files(name: str, tmp_path: Path) -> None:
    assert run(name, "--per-prompt").exit_code == 2
    done = run(name, "--per-prompt", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith("wrote ")
    tables = [frames.read(path) for path in tmp_path.glob("*.parquet")]
    assert len(tables) == (2 if name == "lens" else 1)
    for df in tables:
        assert df["example"].notna().all()
        assert df["example"].nunique() > 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet", ".csv"}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as Kimi K2 is stored, with its words."""
    made = tmp_path_factory.mktemp("tiny8")
    save(load(TINY, torch.float32), made, form="fp8")
    shutil.copy(TINY / "tokenizer.json", made)
    for folder in ("prompts", "reference"):
        shutil.copytree(TINY / folder, made / folder)
    return made


@pytest.mark.parametrize("name", OF)
def test_every_command_runs_on_a_quantised_checkpoint(name: str, quantised: Path, tmp_path: Path) -> None:
    done = run(name, "--keep", "stored", "--out", str(tmp_path), model=quantised)
    assert done.exit_code == 0, done.output
    (first, *_) = tmp_path.glob("*.parquet")
    df = frames.read(first)
    assert set(df["dtype"]) == {"bfloat16"}
    assert set(df["numerics"]) == {"careful"}
    assert any(path.suffix == ".png" for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["norms", "lens", "compare"])
def test_a_dtype_is_what_is_computed_in(name: str, tmp_path: Path) -> None:
    done = run(name, "--dtype", "bfloat16", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert set(frames.read(next(tmp_path.glob("*.parquet")))["dtype"]) == {"bfloat16"}
    assert run(name, "--dtype", "fp8").exit_code == 2


def test_what_goes_with_a_text_is_refused_with_a_task() -> None:
    for name, option in (("ablate", "--wrong"), ("lens", "--answer"), ("paths", "--corrupt"), ("split", "--answer")):
        done = CliRunner().invoke(app, [name, *OF[name], option, "Lima"])
        assert done.exit_code == 2
        assert "goes with --prompt" in done.stderr
    lone = CliRunner().invoke(app, ["paths", "--sender", "O h=*", "--prompt", "The capital of Peru is"])
    assert lone.exit_code == 2
    assert "--corrupt TEXT" in lone.stderr


def test_the_lens_takes_answers_of_several_tokens_and_says_what_it_leaves_out() -> None:
    asked = ["lens", "--prompt", "The capital of Peru is", "--answer", "Lima and Paris", "--wrong", "Tokyo"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "left out: what adds up to the logit difference: " in done.stdout
    assert "'Lima and Paris', has several tokens" in done.stdout
    assert "log probability" in done.stdout
    paths = CliRunner().invoke(
        app, ["paths", "--sender", "x_0", "--prompt", "The capital of Peru is", "--corrupt", "The capital of Japan is"]
    )
    assert paths.exit_code == 0, paths.output
    assert "answer: 'Lima'" in paths.stdout


def test_a_seed_is_a_number_that_a_generator_takes() -> None:
    for seed in ("-1", str(2**63), "x"):
        assert run("ablate", "--seed", seed).exit_code == 2
