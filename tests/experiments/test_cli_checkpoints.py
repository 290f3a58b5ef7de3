"""The command line on every kind of checkpoint, however its weights are kept: params, check, ablate, norms."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.options import Keeping
from hooks import HookedModel
from probe import TINY, Dims, account, load, memory, random_weights, save
from probe.memory import Keeping as OfProbe
from probe.memory import byte_count
from tests.experiments.test_cli import lines, run
from tests.probe.files import edit_json, hollow_k2

DIMS = replace(Dims.from_config(TINY), moe=(False, True), e=4)
DENSE = replace(DIMS, moe=(False, False), e=0, k=0, m=0, m_s=0, scaling=1.0, tied=True)
MIXED = replace(DIMS, moe=(True, False), yarn=None, n=24, v=40)

KINDS: dict[str, tuple[Dims, dict[str, Any], str]] = {
    "plain": (DIMS, {}, "expanded"),
    "fp8": (DIMS, {"form": "fp8", "shards": "blocks"}, "stored"),
    "int4": (DIMS, {"form": "int4", "shards": "blocks"}, "disk"),
    "k25": (DIMS, {"form": "int4", "model_type": "kimi_k25"}, "expanded"),
    "youtu": (DENSE, {"model_type": "youtu"}, "disk"),
    "glm": (MIXED, {"form": "fp8"}, "stored"),
}
"""Sizes, how it is written, how it is kept."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind, with the tiny model's tokenizer; and the tiny model in FP8, with its prompts."""
    made = tmp_path_factory.mktemp("home")
    for kind, (dims, how, _) in KINDS.items():
        save(random_weights(dims, 1), made / kind, **how)
    save(load(TINY, torch.float32), made / "tiny8", form="fp8")
    for directory in made.iterdir():
        shutil.copy(TINY / "tokenizer.json", directory)
    for folder in ("prompts", "reference"):
        shutil.copytree(TINY / folder, made / "tiny8" / folder)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_params_counts_the_tensors_themselves(kind: str, home: Path) -> None:
    result = run("params", str(home / kind))
    got = lines(result)
    said = account(KINDS[kind][0])
    assert ["Total", f"{said.total:,}"] in got
    assert ["Total", f"{sum(part.parameters for part in said.dense):,}"] in got
    assert ["equal to what config.json says, tensor by tensor"] in got
    assert ("scales and stated shapes" in result.stdout) == ("form" in KINDS[kind][1])


@pytest.mark.parametrize("kind", KINDS)
def test_check_passes(kind: str, home: Path) -> None:
    result = run("check", "--model", str(home / kind), "--keep", KINDS[kind][2])
    assert result.exit_code == 0, result.output
    assert sum(line.startswith("ok ") for line in result.stdout.splitlines()) == 6
    assert "FAILED" not in result.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_ablate_and_norms_run(kind: str, home: Path) -> None:
    asked = ("--prompt", "The capital of Peru is", "--tensor", "delta_attn", "--tensor", "x_n", "--block", "1")
    kept = ("--model", str(home / kind), "--keep", KINDS[kind][2])
    for result in (run("ablate", *asked, "--how", "zero", *kept), run("norms", *asked, *kept)):
        assert result.exit_code == 0, result.output
        assert "delta_attn" in result.stdout


def test_every_way_to_keep_gives_the_same_table(home: Path) -> None:
    task = ("ablate", "--task", "capital", "--tensor", "O", "--block", "3", "--model", str(home / "tiny8"))
    tables = {keep: run(*task, "--keep", keep) for keep in get_args(Keeping)}
    assert {result.exit_code for result in tables.values()} == {0}, tables
    assert len({result.stdout.split("note: stored as")[1] for result in tables.values()}) == 1


def test_memory_and_notes_are_said_before_the_numbers(home: Path) -> None:
    asked = ("norms", "--prompt", "The capital of Peru is", "--tensor", "x_n", "--model")
    rows = run(*asked, str(home / "fp8")).stdout.splitlines()
    assert rows[0] == f"Memory for the weights of {home / 'fp8'}"
    assert [line.split()[0] for line in rows[1:5]] == ["keep", "expanded", "stored", "disk"]
    assert (
        "note: stored as FP8 and expanded to bf16: a server that quantises activations too gives other numbers" in rows
    )
    assert "note: stored" not in run(*asked, str(home / "plain")).stdout


def test_what_does_not_fit_is_refused_in_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {keep: row.most for keep, row in memory(home / "fp8").choices.items()}
    monkeypatch.setattr(sys.modules["probe.memory"], "available", lambda device: most["stored"])
    result = run("check", "--model", str(home / "fp8"))
    assert result.exit_code == 1
    assert f"keep='expanded' takes {byte_count(most['expanded'])} of memory" in result.stderr
    assert f"keep='stored' takes {byte_count(most['stored'])}" in result.stderr
    assert "Memory for the weights" in result.stdout  # the choices were told before


def test_the_tiny_model_says_nothing_of_memory() -> None:
    assert "Memory" not in run("norms", "--prompt", "The capital of Peru is", "--tensor", "x_n").stdout


def test_a_wrong_way_to_keep_is_wrong_usage(home: Path) -> None:
    assert run("check", "--model", str(home / "fp8"), "--keep", "gpu").exit_code == 2
    assert get_args(Keeping) == get_args(OfProbe)


def test_params_tells_what_differs_and_fails(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "plain", tmp_path / "cut")
    state = load_file(tmp_path / "cut" / "model.safetensors")
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    del state[gone]
    save_file(state, tmp_path / "cut" / "model.safetensors")
    result = run("params", str(tmp_path / "cut"))
    assert result.exit_code == 1
    assert f"differs: {gone} is missing" in result.stdout.splitlines()
    assert "not as its config says in 1 of its tensors, listed above" in result.stderr
    assert "equal to" not in result.stdout


def test_params_of_kimi_k2_from_its_headers(tmp_path: Path) -> None:
    """The atlas page's table, of a terabyte of holes."""
    hollow_k2(tmp_path)
    out = run("params", str(tmp_path)).stdout
    for number in ("497,500,160", "101,124,096", "396,361,728", "17,059,365,248", "1,026,408,232,448"):
        assert number in out
    assert "left out: 62,495,192 numbers in 69,608 tensors: scales" in out
    assert "left out: 3,416 numbers in 61 tensors: rotary buffers" in out


def test_params_of_a_config_alone(tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        assert f"{account(Dims.from_config(TINY)).total:,}" in run("params", str(place)).stdout
    edit_json(tmp_path / "config.json", lambda config: config.update(model_type="deepseek_v2"))
    result = run("params", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path / 'config.json'}: model_type: 'deepseek_v2' is another block than ours" in result.stderr


def test_the_hooked_model_takes_the_same_choices(home: Path) -> None:
    tokens = torch.tensor([[1, 5, 9, 13]])
    models = [HookedModel.load(home / "fp8", keep=keep) for keep in get_args(Keeping)]
    logits = [model(tokens) for model in models]
    assert all(torch.equal(one, logits[0]) for one in logits)
    assert all(set(load(home / "fp8").notes) <= set(model.notes) for model in models)
    wide = HookedModel.load(home / "fp8", torch.float32, keep="disk")
    assert wide.run(tokens, want=["blocks.0.x_n"])["blocks.0.x_n"].dtype == torch.float32


def test_only_the_tiny_model_is_fp32_by_itself(home: Path) -> None:
    assert HookedModel.load().decoder.weights.read(0, "W_O").dtype == torch.float32
    assert HookedModel.load(TINY, torch.bfloat16).decoder.weights.read(0, "W_O").dtype == torch.bfloat16
    assert HookedModel.load(home / "plain").decoder.weights.read(0, "W_O").dtype == torch.bfloat16


def test_the_tiny_model_in_fp8_still_knows_its_capitals(home: Path) -> None:
    """Quantised as Kimi K2 is, and read back: what the model has learnt is still there."""
    asked = ("ablate", "--task", "capital", "--tensor", "O", "--block", "3")
    said, sound = run(*asked, "--model", str(home / "tiny8")), run(*asked)

    def base(out: str) -> float:
        return float(out.split("(base ")[1].split(")")[0])

    assert base(said.stdout) == pytest.approx(base(sound.stdout), rel=0.05)
