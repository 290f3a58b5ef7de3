"""Wherever a path is taken, ``~`` is the user's home, as in a shell; and nothing is made in a folder of that name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from safetensors.torch import save_file

from experiments import compare, frames, pictures, runs, spec
from experiments.prompts import Prompts, tasks
from hooks import Cache, Dictionary, HookedModel
from probe import TINY, Checkpoint, Dims, Tokenizer, load, memory, random_weights, save
from probe.params import tally
from tests.experiments.test_cli import run
from tests.probe.ranks import BYTES, kimi
from tests.probe.small import DENSE

MODEL = HookedModel.load()
ROW = '{"clean": "When Mary"}\n'


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A home with a file of each kind, and another folder to work in."""
    made = tmp_path_factory.mktemp("home")
    shutil.copytree(TINY, made / "tiny")
    save(random_weights(DENSE), made / "small")
    kimi(made / "ranks", BYTES)
    (made / "mine.jsonl").write_text(ROW)
    (made / "mine.toml").write_text('study = "norms"\nprompts = "~/mine.jsonl"\n[model]\ndirectory = "~/tiny"\n')
    save_file(
        {"W_enc": torch.ones(2, 3), "b_enc": torch.ones(3), "W_dec": torch.ones(3, 2), "b_dec": torch.ones(2)},
        made / "sae.safetensors",
    )
    _, cache = MODEL.run_with_cache("When Mary", names_filter="x_0")
    cache.save(made / "cache.safetensors")
    frames.write(_frame(), made / "frame.csv")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(made))
        patched.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield made
        assert not Path("~").exists()


def _frame() -> Any:
    return frames.frame([{"block": 0, "tensor": "O", "metric": "rms", "unit": "1", "value": 1.0}], study="norms")


def _picture() -> None:
    pictures.save(plt.subplots()[1], "~/picture.png")


READERS: dict[str, Callable[[], Any]] = {
    "Checkpoint": lambda: Checkpoint("~/small"),
    "load": lambda: load("~/small"),
    "memory": lambda: memory("~/small"),
    "tally": lambda: tally("~/small"),
    "Dims of a directory": lambda: Dims.from_config("~/small"),
    "Dims of a file": lambda: Dims.from_config("~/small/config.json"),
    "Tokenizer of a directory": lambda: Tokenizer("~/ranks"),
    "Tokenizer of a file": lambda: Tokenizer("~/tiny/tokenizer.json"),
    "Tokenizer.find": lambda: len(Tokenizer.find("~/tiny") or ()) or pytest.fail("none is found"),
    "HookedModel.load": lambda: HookedModel.load("~/tiny"),
    "Cache.load": lambda: Cache.load("~/cache.safetensors"),
    "Dictionary.load": lambda: Dictionary.load("~/sae.safetensors"),
    "Prompts.load of a file": lambda: Prompts.load("~/mine.jsonl", Tokenizer(TINY)),
    "Prompts.load of a directory": lambda: Prompts.load("ioi", Tokenizer(TINY), "~/tiny"),
    "Prompts.text": lambda: (
        Prompts.text("When Mary", Tokenizer(TINY), directory="~/tiny").reference or pytest.fail("none is found")
    ),
    "Prompts.documents": lambda: Prompts.documents(Tokenizer(TINY), 1, "~/tiny"),
    "tasks": lambda: tasks("~/tiny") or pytest.fail("none is found"),
    "frames.read": lambda: frames.read("~/frame.csv"),
    "compare.load_both": lambda: compare.load_both("~/tiny", "~/tiny"),
    "spec.read": lambda: spec.read("~/mine.toml"),
}
WRITERS: dict[str, tuple[Callable[[], Any], str]] = {
    "save": (lambda: save(random_weights(DENSE), "~/written"), "written/config.json"),
    "Cache.save": (lambda: MODEL.run("When", want="x_0").cache.save("~/c.safetensors"), "c.safetensors"),
    "frames.write": (lambda: frames.write(_frame(), "~/frames/f.parquet"), "frames/f.parquet"),
    "pictures.save": (_picture, "picture.png"),
    "runs.run": (lambda: (runs.run(spec.read("~/mine.toml"), "~/run"), runs.finished("~/run")), "run/frame.parquet"),
}


@pytest.mark.parametrize("what", READERS)
def test_what_is_at_home_is_read(what: str) -> None:
    READERS[what]()


@pytest.mark.parametrize("what", WRITERS)
def test_what_goes_home_is_written_there(what: str, home: Path) -> None:
    write, file = WRITERS[what]
    write()
    assert (home / file).exists()


def test_commands_know_home(home: Path) -> None:
    assert run("params", "~/small").exit_code == 0
    assert run("params", "~/small/config.json").exit_code == 0
    result = run("norms", "--task", "~/mine.jsonl", "--tensor", "O", "--model", "~/tiny", "--out", "~/out")
    assert result.exit_code == 0, result.output
    assert (home / "out" / "norms.csv").exists()


def test_a_home_that_is_none_stays_a_name() -> None:
    with pytest.raises(Exception, match="~nobody-of-this-name"):
        Checkpoint("~nobody-of-this-name/model")
