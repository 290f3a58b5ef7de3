"""NaN or infinite activations: each study gives its frame and says where they begin; each command writes, and exits 1.

An expert that was not chosen has no value, too, and nobody tells of that.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from experiments import frames, runs
from experiments.check import check, failures
from experiments.cli import app
from experiments.finite import NOT_FINITE, NotFinite, NotFiniteWarning
from experiments.frames import BadPath
from experiments.patch import patch
from experiments.pictures import save as draw
from experiments.prompts import Prompts
from experiments.spec import read
from experiments.steer import steer
from experiments.studies import STUDIES
from hooks import HookedModel
from hooks.finite import begins, is_watched, watching
from probe import TINY, InMemory, Site, save
from probe.weights import weight_sites
from tests.experiments.test_commands import OF, _few, run  # noqa: F401  # few prompts, and undrawn pictures
from tests.hooks.small import DIMS, MODEL, TOKENS

SOUND = HookedModel.load()
IOI = Prompts.load("ioi", SOUND.tokenizer)
CONTINENT = Prompts.load("continent", SOUND.tokenizer)
FEW = IOI.subset(range(8))
SAID = "logits are not finite from blocks.0.delta_ffn on"


def changed(change: Callable[[dict[tuple[int | None, str], Tensor]], Any], model: HookedModel = SOUND) -> HookedModel:
    """A model with other weights."""
    tensors = {key: tensor.clone() for key, tensor in model.decoder.weights.tensors.items()}
    change(tensors)
    tensors = {key: t for key, t in tensors.items() if not (model.dims.tied and key == (None, "W_U"))}
    return HookedModel(InMemory(model.dims, tensors), model.tokenizer)


def overflow(tensors: dict[tuple[int | None, str], Tensor]) -> None:
    """Finite weights, whose products are not."""
    W_2 = tensors[0, "W_2"]
    W_2.div_(W_2.abs().max()).mul_(3.3e38)


def one_word(word: str) -> Callable[[dict[tuple[int | None, str], Tensor]], None]:
    assert SOUND.tokenizer is not None
    token = SOUND.tokenizer.id(word)
    return lambda tensors: tensors[None, "W_E"][token].fill_(torch.nan)


ALL = changed(overflow)
MARY = changed(one_word("Mary"))


# ---- where it begins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_tensor_is_that_which_reads_the_weight(bad: float) -> None:
    """Every weight of every block, dense and MoE, and around the blocks; the card says who reads it first."""
    for block, leaf in weight_sites(DIMS):
        model = changed(lambda tensors, at=(block, leaf.name): tensors[at].fill_(bad), MODEL)
        steps = (step for step in model.sites.card(block).values() if not step.on_request)
        first, rows = begins(model, TOKENS)
        assert first == Site(block, next(step.name for step in steps if leaf.name in step.needs))
        assert rows.all() or leaf.name == "b", "which chooses experts, and enters nowhere else"


def test_scores_that_overflow_are_named_though_no_run_makes_them_whole() -> None:
    def loud(tensors: dict[tuple[int | None, str], Tensor]) -> None:
        for name in ("W_UQ", "W_UK"):
            tensors[1, name].mul_(1e25)

    assert begins(changed(loud, MODEL), TOKENS)[0] == Site(1, "S")
    assert begins(MODEL, TOKENS)[0] is None


def test_rows_that_are_finite_are_not_counted() -> None:
    first, rows = begins(MARY, *IOI.batch())
    assert first == Site(None, "x_0")
    assert rows.tolist() == ["Mary" in prompt.clean.split() for prompt in IOI.rows]


def test_only_who_watches_notices_and_only_there() -> None:
    tokens = torch.arange(4)[None]
    with watching() as lost:
        SOUND.run(tokens)
        assert not lost
        ALL.run(tokens)
        ALL.run(tokens, want="blocks.0.x_n")  # which is sound so far
    ALL.run(tokens)
    assert [(one.model is ALL, one.site) for one in lost] == [(True, Site(0, "delta_ffn"))]
    assert not is_watched()


# ---- every study -----------------------------------------------------------------------------------------------------

ASKED: dict[str, dict[str, Any]] = {
    "ablate": {"tensors": ["O", "delta_experts"], "blocks": [1]},
    "patch": {"tensors": ["x_n"], "by": "role", "blocks": [1]},
    "paths": {"senders": ["blocks.0.O h=1"]},
    "circuit": {"kept": ["blocks.3.O h=0"], "random_sets": 1, "subsets": 1},
    "attribute": {"tensors": ["O", "h_s"], "blocks": [1]},
    "lens": {},
    "direct": {},
    "norms": {"tensors": ["x_n", "x_next", "A"]},
    "routing": {"blocks": [1]},
    "split": {"edits": "zero blocks.1.O h=1"},
    "scores": {"blocks": [1]},
    "steer": {"direction": "token:Paris", "tensor": "blocks.1.x_next", "random_directions": 2, "doses": [1.0]},
    "top": {"tensor": "blocks.1.delta_shared", "where": {"d": [1]}},
    "probes": {"tensors": ["x_n"], "controls": [], "width": 4},
    "compare": {},
}


def ask(name: str, model: HookedModel, n: int = 8) -> pd.DataFrame:
    prompts = IOI.subset(range(32 if name == "probes" else n))
    if name == "compare":
        return STUDIES[name].run(SOUND, model, prompts)
    more: dict[str, Any] = {"neutral": prompts} if name == "steer" else {}
    if name == "probes":
        more["labels"] = ["ab"[i % 2] for i in range(len(prompts))]
    return STUDIES[name].run(model, prompts, **ASKED[name], **more)


def test_no_study_is_left_out() -> None:
    assert set(ASKED) == set(STUDIES)


@pytest.mark.parametrize("name", ASKED)
def test_a_study_of_a_broken_model_gives_its_frame_and_says_where(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # draw in truth
    with pytest.warns(NotFiniteWarning) as said:
        df = ask(name, ALL)
    assert [str(one.message) for one in said if one.category is NotFiniteWarning] == [SAID]
    assert said[0].filename == __file__, "the line that asked"
    assert len(df)
    path = frames.write(df, tmp_path / "frame.parquet")
    assert frames.read(path).attrs[NOT_FINITE] == SAID
    pictures = list(STUDIES[name].pictures(frames.read(path), ASKED[name]))
    assert pictures
    for label, ax in pictures:
        draw(ax, tmp_path / f"{label}.png")


@pytest.mark.parametrize("name", ASKED)
def test_one_prompt_of_many_is_told_and_the_others_keep_their_numbers(name: str) -> None:
    """The word 'Mary' is NaN; the prompts of other names have what they have in the sound model."""
    with pytest.warns(NotFiniteWarning, match=r"^logits are not finite from x_0 on \(\d+ of \d+ rows\)"):
        df = ask(name, MARY)
    assert NOT_FINITE in df.attrs
    if "example" in df and name != "top":
        sound = ask(name, SOUND)
        rows = [i for i, prompt in enumerate(FEW.rows) if "Mary" not in prompt.clean]
        same = [frame[frame["example"].isin(rows)]["value"].reset_index(drop=True) for frame in (df, sound)]
        pd.testing.assert_series_equal(*same)
        assert rows


@pytest.mark.parametrize("name", ASKED)
def test_a_study_of_a_sound_model_tells_nothing(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFiniteWarning)
        assert NOT_FINITE not in ask(name, SOUND).attrs


def test_an_expert_that_was_not_chosen_is_nothing_to_tell() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFiniteWarning)
        df = patch(SOUND, FEW, tensors=["y_e"], by="expert", blocks=[2])
        excluded = STUDIES["ablate"].run(
            SOUND, FEW, by="expert", how="exclude", blocks=[2], metrics=["relative_change:choice_score"]
        )
    assert df.attrs["unmatched"]
    assert df["value"].isna().any()
    assert len(excluded)


def test_a_source_that_is_not_finite_beside_a_base_that_is() -> None:
    """The reference prompts alone say 'Mary'."""
    alone = IOI.subset([i for i, prompt in enumerate(IOI.rows) if "Mary" not in prompt.clean][:4])
    with pytest.warns(NotFiniteWarning, match=r"^logits are not finite from x_0 on \(\d+ of 96 rows\)$"):
        df = STUDIES["ablate"].run(MARY, alone, tensors=["O"], blocks=[1], seed=1)
    assert df["base"].notna().any()


def test_an_edit_that_no_number_can_follow_is_told_by_itself() -> None:
    said = r"^(logits are|\S+ is) not finite after add .*x_next, nor in \d+ other edited runs$"
    far: dict[str, Any] = {"doses": [3e38], "random_directions": 2, "neutral": FEW}
    with pytest.warns(NotFiniteWarning, match=said):
        df = steer(SOUND, FEW, "token:Paris", tensor="blocks.1.x_next", **far)
    assert df["value"].isna().any()


def test_what_can_give_no_frame_is_refused_with_where_it_begins() -> None:
    with pytest.raises(NotFinite, match=f"^{SAID}, and nothing can be made of it"):
        steer(ALL, FEW, "means:answer=Europe", tensor="blocks.1.x_next", doses=[1.0], learn=CONTINENT)


# ---- the commands, a run of units, the self-test ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk: its weights are finite, and what block 0 writes is not."""
    directory = tmp_path_factory.mktemp("broken") / "model"
    save(ALL.decoder.weights, directory, dtype=torch.float32)
    for name in ("tokenizer.json", "prompts", "reference"):
        (shutil.copytree if (TINY / name).is_dir() else shutil.copy)(TINY / name, directory / name)
    return directory


@pytest.mark.parametrize("name", OF)
def test_a_command_writes_everything_then_says_where_and_exits_with_1(name: str, broken: Path, tmp_path: Path) -> None:
    beyond = ("--block", "1") if name == "scores" else ()  # those of block 0 are sound
    done = run(name, "--out", str(tmp_path), *beyond, model=broken)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    assert done.stderr == f"k2probe: {SAID}: see the weights there, or take another dtype.\n"
    made = {path.suffix for path in tmp_path.iterdir()}
    assert {".parquet", ".csv", ".png"} <= made
    for path in tmp_path.glob("*.parquet"):
        assert frames.read(path).attrs[NOT_FINITE] == SAID
    assert "wrote" in done.stdout


def test_the_frame_is_on_disk_before_anything_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BadPath("no table today")

    monkeypatch.setattr("experiments.tables.Table.print", fail)
    done = run("ablate", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert len(frames.read(tmp_path / "ablation.parquet"))


SPEC = """
study = "norms"
prompts = "job"
[model]
directory = "{directory}"
[grid]
tensors = [["x_n"], ["x_next"]]
"""


def test_a_run_finishes_and_joins_its_units_then_exits_with_1(broken: Path, tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.format(directory=broken), encoding="utf-8")
    place = tmp_path / "out"
    for again in (False, True):
        done = CliRunner().invoke(app, ["run", str(path), "--out", str(place)])
        assert done.exit_code == 1, again
        assert "2 of 2 units are finished, and joined" in done.stdout
        assert done.stderr.count(SAID) == 2, "each unit by its label"
        assert done.stderr.startswith("k2probe: ")
    assert (place / "frame.parquet").exists()
    assert list((place / "pictures").iterdir())
    assert [said.partition(": ")[2] for said in runs.not_finite(place)] == [SAID, SAID]
    with pytest.warns(NotFiniteWarning):
        assert len(runs.run(read(path), tmp_path / "more"))


def test_the_self_test_says_so_and_says_no_more(broken: Path) -> None:
    (only,) = check(ALL)
    assert str(only) == "FAILED  every tensor of a run is finite: 1 of 204: not finite from blocks.0.delta_ffn on"
    assert not failures(check(SOUND))
    done = CliRunner().invoke(app, ["check", "--model", str(broken)])
    assert done.exit_code == 1
    assert "not finite from blocks.0.delta_ffn on" in done.stderr
