"""The self-test finds nothing on the tiny model, and names each fault that is planted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from experiments import check as study
from experiments.check import Finding, check, failures
from experiments.cli import app
from hooks import HookedModel, Site
from probe import TINY


@pytest.fixture
def model() -> HookedModel:
    return HookedModel.load()


def failed(model: HookedModel) -> dict[str, tuple[str, ...]]:
    """What failed, by what should hold."""
    return {finding.what: finding.failed for finding in failures(check(model))}


def through(monkeypatch: pytest.MonkeyPatch, tensor: str, change: Callable[..., Tensor]) -> None:
    """Break the hook point of one tensor: ``change(model, site, value, pass_through)`` in place of passing through."""
    right = HookedModel.pass_through

    def broken(self: HookedModel, site: Site, value: Tensor) -> Tensor:
        return change(self, site, value, right) if str(site) == tensor else right(self, site, value)

    monkeypatch.setattr(HookedModel, "pass_through", broken)


def test_the_tiny_model_passes(model: HookedModel) -> None:
    findings = check(model)
    assert len(findings) == 6
    assert not failures(findings)
    assert all(finding.of for finding in findings)
    by_name = {finding.what: finding.of for finding in findings}
    assert by_name["each hook fires exactly once a run"] == len(list(model.sites))
    assert not model.watched()


def test_a_hook_that_never_fires_is_named(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    through(monkeypatch, "blocks.1.c_KV", lambda self, site, value, right: value)
    assert failed(model) == {
        "each hook fires exactly once a run": ("blocks.1.hook_c_KV",),
        "an edit at each hook moves the output": ("blocks.1.c_KV",),
    }


def test_a_hook_that_fires_twice_is_named(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = lambda self, site, value, right: right(self, site, right(self, site, value))  # noqa: E731
    through(monkeypatch, "blocks.3.v", twice)
    assert failed(model) == {"each hook fires exactly once a run": ("blocks.3.hook_v",)}


def test_a_hook_whose_edit_is_lost_is_named(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: HookedModel, site: Site, value: Tensor, right: Callable[..., Tensor]) -> Tensor:
        right(self, site, value)
        return value

    through(monkeypatch, "blocks.1.gates", lost)
    assert failed(model) == {"an edit at each hook moves the output": ("blocks.1.gates",)}


@pytest.mark.parametrize(
    ("tensor", "what"), [("A", "attention rows sum to one"), ("gates", "gates sum to the scaling factor")]
)
def test_wrong_sums_are_named(tensor: str, what: str, model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HookedModel.run

    def larger(self: HookedModel, *words: Any, **options: Any) -> Any:
        run = sound(self, *words, **options)
        if Site(1, tensor) in run.cache and "base" not in options:
            run.cache.keep(Site(1, tensor), run.cache[Site(1, tensor)] * 1.1)
        return run

    monkeypatch.setattr(HookedModel, "run", larger)
    assert failed(model)[what] == (f"blocks.1.{tensor}",)


def test_a_null_edit_that_changes_something_is_named(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    resample = study.resample

    def other_rows(tensor: str, *, source: Any, rows: range) -> Any:
        return resample(tensor, source=source, rows=rows if tensor != "blocks.1.O" else rows[::-1])

    monkeypatch.setattr(study, "resample", other_rows)
    assert failed(model) == {"an edit that does nothing changes nothing, bit for bit": ("blocks.1.O",)}


def test_a_hook_that_is_left_is_named(model: HookedModel) -> None:
    what = "no hook is left, and a plain run gives the decoder's own bits"
    with model.hooks(fwd_hooks=[("blocks.1.O", lambda value, hook: torch.zeros_like(value))]):
        assert failed(model) == {what: ("blocks.1.hook_O", "a run's logits aren't the decoder's own")}
    with model.hooks(fwd_hooks=[("blocks.1.O", lambda value, hook: None)]):
        assert failed(model) == {what: ("blocks.1.hook_O",)}
    assert not failed(model)


def test_a_finding_is_a_sentence() -> None:
    assert str(Finding("it holds", (), 3)) == "ok      it holds (3)"
    assert str(Finding("it holds", ("a", "b"), 3)) == "FAILED  it holds: 2 of 3: a, b"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_what_holds() -> None:
    result = CliRunner().invoke(app, ["check", "--model", str(TINY)])
    assert result.exit_code == 0, result.output
    assert [line[:8] for line in result.stdout.splitlines() if line.startswith("ok ")] == ["ok      "] * 6
    assert "FAILED" not in result.stdout
    assert result.stderr == ""


def test_the_command_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    through(monkeypatch, "blocks.1.c_KV", lambda self, site, value, right: value)
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 1
    assert len(re.findall("^FAILED ", result.stdout, re.M)) == 2
    assert len(re.findall("^ok ", result.stdout, re.M)) == 4
    assert result.stderr == (
        "k2probe: 2 of 6 checks failed: each hook fires exactly once a run (blocks.1.hook_c_KV);"
        " an edit at each hook moves the output (blocks.1.c_KV).\n"
    )


def test_a_directory_that_holds_no_model_is_told() -> None:
    result = CliRunner().invoke(app, ["check", "--model", "/nonexistent"])
    assert (result.exit_code, result.stderr) == (1, "k2probe: /nonexistent: there is no such directory.\n")
