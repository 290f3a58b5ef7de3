"""The demo from end to end, and that its self-checks can fail."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import check, demo, frames
from experiments.ablate import ablate
from experiments.prompts import Prompts
from hooks import HookedModel
from hooks.edits import PER_SLOT
from probe.errors import ProbeError


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


@pytest.fixture(scope="module")
def prompts(model: HookedModel) -> Prompts:
    assert model.tokenizer is not None
    return Prompts.load("job", model.tokenizer).subset(range(4))


@pytest.fixture(scope="module")
def table(model: HookedModel, prompts: Prompts) -> pd.DataFrame:
    return ablate(model, prompts, name="tiny")


def test_the_demo_tells_and_leaves_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = Prompts.subset
    monkeypatch.setattr(Prompts, "load", lambda *words, load=Prompts.load: few(load(*words), range(6)))
    df = demo.demo(tmp_path / "new" / "demo")
    out = capsys.readouterr().out
    names = ("ablation.parquet", "ablation.csv", "effects.png", "norms.png", "block.png")
    for name in names:
        assert (tmp_path / "new" / "demo" / name).stat().st_size > 1000
        assert f"{tmp_path / 'new' / 'demo' / name}" in out
    pd.testing.assert_frame_equal(df, frames.read(tmp_path / "new" / "demo" / "ablation.parquet"))
    assert set(df["block"]) == {0, 1, 2, 3}
    assert len([line for line in out.splitlines() if line.startswith("  to resample ")]) == 3
    for said in ("equal pairs are equal", "an edit that does nothing changes nothing", "no hook is left"):
        assert f"  {said}" in out


def test_the_largest_effects_are_the_largest(table: pd.DataFrame) -> None:
    effects = table[table["metric"] == demo.METRIC]
    first, *rest = demo.largest(effects, most=5)
    residual = {"x_n", "x_mid", "x_next"}
    own = effects[effects["same_as"].isna() & ~effects["tensor"].astype(str).isin(residual)]
    top = own.loc[[own["effect"].abs().idxmax()]].to_dict("records")[0]
    assert first.startswith(f"to resample {top['tensor']} (")
    assert f"of block {top['block']} takes the logit difference from {top['base']:.1f} to {top['value']:.1f}" in first
    assert len(rest) == 4
    twins = effects[(effects["block"] == top["block"]) & effects["same_as"].eq(top["tensor"]).fillna(False)]["tensor"]
    assert all(name in first for name in twins)


def test_equal_pairs_are_computed_apart(model: HookedModel, prompts: Prompts, table: pd.DataFrame) -> None:
    assert "delta_attn = n_attn" in demo.equal_pairs(model, prompts, table)
    wrong = table.copy()
    wrong.loc[wrong["same_as"].notna(), "value"] += 0.01
    with pytest.raises(demo.CheckFailed, match=r"equal by construction differ by 1\.0e-02"):
        demo.equal_pairs(model, prompts, wrong)


def test_what_the_self_test_finds_is_told(model: HookedModel, prompts: Prompts, table: pd.DataFrame) -> None:
    pairs, null, left = demo.checks(model, prompts, table)
    assert "equal pairs are equal" in pairs
    assert null == f"an edit that does nothing changes nothing, bit for bit ({tried(model)} tensors)"
    assert left.startswith("no hook is left")


def tried(model: HookedModel) -> int:
    readings = ("delta_heads", "experts", *PER_SLOT)
    return len([site for site in model.sites if site.tensor not in readings])


def test_a_null_edit_that_changes_something_stops_it(
    model: HookedModel, prompts: Prompts, table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    resample = check.resample
    monkeypatch.setattr(check, "resample", lambda site, source, rows: resample(site, source=source, rows=rows[::-1]))
    with pytest.raises(demo.CheckFailed, match=r"changes nothing, bit for bit; it does not at x_0, .*blocks\.0\.x_n,"):
        list(demo.checks(model, prompts, table))


def test_a_hook_that_is_left_stops_it(
    model: HookedModel, prompts: Prompts, table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = demo.null_edits

    def then_leave(*words: Any) -> Any:
        finding = sound(*words)
        model.add_hook("blocks.1.O", lambda value, hook: None)
        return finding

    monkeypatch.setattr(demo, "null_edits", then_leave)
    with pytest.raises(demo.CheckFailed, match=r"no hook is left.*blocks\.1\.hook_O"):
        list(demo.checks(model, prompts, table))
    model.reset_hooks()
    assert issubclass(demo.CheckFailed, ProbeError)
