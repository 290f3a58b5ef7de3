"""What goes wrong in studies, frames and pictures, kind by kind, as far as no test by a study's side shows it."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.axes import Axes
from traitlets.config import Config

from experiments import bars, causal_plots, effect_plots, frames, lens_plots, pictures, plots, probe_plots, steer_plots
from experiments.ablate import ablate
from experiments.attribution import agreement, attribute
from experiments.circuit import circuit
from experiments.diagram import block_diagram
from experiments.frames import COLUMNS, frame
from experiments.lens import direct, lens
from experiments.nodes import largest
from experiments.norms import massive, norms
from experiments.paths import paths
from experiments.prompts import Prompt, Prompts
from experiments.routing import coactivation, routing
from experiments.scores import heads_above, scores
from experiments.tables import largest_effects
from experiments.top import top
from experiments.vectors import count_tokens, find_places
from hooks import HookedModel, zero
from probe import InMemory, card
from probe.errors import ProbeError

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
WORDS = MODEL.tokenizer
JOB = Prompts.load("job", WORDS).subset(range(10))


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


# ==== Analysis ========================================================================================================

NO_ATTENTION = ("x_attn", "c_KV", "c_KV_hat", "v", "V", "A", "O", "delta_attn")
"""To zero any of these is to leave the block's attention out."""


def test_eight_coinciding_zero_ablations_read_as_eight_findings() -> None:
    """They are one finding: one is computed, seven say so, one is listed, and p is as if there were but one."""
    options: dict[str, Any] = {"blocks": [1], "how": "zero", "metrics": ["logit_difference"]}
    df = ablate(MODEL, JOB, tensors=NO_ATTENTION, **options)
    assert len(df) == 8
    assert df["effect"].nunique() == 1
    own = df[df["same_as"].isna()]
    assert len(own) == 1
    assert set(df["same_as"].dropna()) == set(own["tensor"].astype(str))
    assert len(largest_effects(df).rows) == 1
    assert len(effect_plots.largest(df).patches) == 1
    (alone,) = ablate(MODEL, JOB, tensors=["v"], **options)["p"]
    assert df["p"].tolist() == [alone] * 8
    by_hand = [MODEL.run(*JOB.batch(), edits=[zero(name, 1)])["logits"] for name in NO_ATTENTION]
    for logits in by_hand[1:]:
        torch.testing.assert_close(logits, by_hand[0], atol=1e-4, rtol=1e-4)
    apart = ablate(MODEL, JOB, tensors=NO_ATTENTION, blocks=[1], metrics=["logit_difference"])
    assert len(largest_effects(apart).rows) == 4, "resampled, x_attn, c_KV, v and A are four findings"


ASKED: dict[str, Callable[[Prompts], Any]] = {
    "norms": lambda prompts: norms(MODEL, prompts, tensors=["x_next"], blocks=[0], channels=0)["pos"].max(),
    "scores": lambda prompts: scores(MODEL, prompts, blocks=[0])["n"].max(),
    "routing": lambda prompts: round(4 * routing(MODEL, prompts, blocks=[1]).query("metric == 'load'")["value"].sum()),
    "top": lambda prompts: sorted(top(MODEL, prompts, "s_ffn", 1, n=9)["pos"]),
    "bag of tokens": lambda prompts: count_tokens(prompts, find_places([prompts], ["END"]).tokens[0]).values.sum(),
    "lens": lambda prompts: lens(MODEL, prompts, blocks=[0])["n"].max(),
}


@pytest.mark.parametrize("study", ASKED)
def test_pad_or_bos_id_0_treated_as_absent(study: str) -> None:
    """Id 0 within a prompt, at its end and as its answer is a token like any other: as many are measured."""
    found = []
    for word in (0, WORDS.id("Paul")):
        tokens = (WORDS.id("<bos>"), word, WORDS.id("Jones"), word)
        answer = replace(JOB.rows[0].answer, tokens=((word,),))  # type: ignore[type-var]
        row = Prompt("a text", tokens, None, answer, None, "one", "", {"END": range(3, 4)})
        found.append(ASKED[study](Prompts((row,), WORDS)))
    assert found[0] == found[1]


STUDIES: dict[str, Callable[[HookedModel], pd.DataFrame]] = {
    "norms": lambda model: norms(model, JOB, tensors=["x_next"], blocks=[0]),
    "lens": lambda model: lens(model, JOB, blocks=[0]),
    "direct": lambda model: direct(model, JOB, by=[]),
    "scores": lambda model: scores(model, JOB, blocks=[0]),
    "routing": lambda model: routing(model, JOB, blocks=[1]),
    "coactivation": lambda model: coactivation(model, JOB, 1),
    "top": lambda model: top(model, JOB, "h", 0, where={"f": 3}),
}


@pytest.mark.parametrize("study", STUDIES)
def test_results_of_one_model_shown_for_another(study: str) -> None:
    """A weight in the last block, which none of these looks at, makes other rows: the two can be joined, and one model
    can't be joined with itself."""
    weights = MODEL.decoder.weights
    assert isinstance(weights, InMemory)
    gain = weights.read(3, "w_Q") * 1.01
    other = HookedModel(InMemory(MODEL.dims, {**weights.tensors, (3, "w_Q"): gain}), WORDS)
    first, second, again = (STUDIES[study](model) for model in (MODEL, other, MODEL))
    assert (first["model"].nunique(), set(first["model"])) == (1, set(again["model"]))
    assert len(frames.join(first, second)) == 2 * len(first)
    with pytest.raises(frames.BadFrame, match="two rows measure one thing"):
        frames.join(first, again)


METRIC = ["logit_difference"]
READ: dict[str, tuple[Callable[[], pd.DataFrame], Sequence[Callable[[pd.DataFrame], Any]]]] = {
    "norms": (
        lambda: norms(MODEL, JOB, tensors=["x_n", "x_next", "A"], blocks=[2, 3]),
        [plots.norms, massive, lambda df: list(pictures.size_maps(df))],
    ),
    "scores": (
        lambda: scores(MODEL, JOB, blocks=[3]),
        [lambda df: heads_above(df, "induction"), lambda df: list(pictures.head_maps(df))],
    ),
    "lens": (lambda: lens(MODEL, JOB, blocks=[3]), [lambda df: lens_plots.lens(df, metric="rank")]),
    "direct": (lambda: direct(MODEL, JOB, by=[]), [lens_plots.direct]),
    "routing": (lambda: routing(MODEL, JOB, blocks=[1]), [lambda df: list(pictures.load_maps(df))]),
    "top": (lambda: top(MODEL, JOB, "h", 0, where={"f": 3}, n=4), [bars.ranking, lambda df: list(bars.rankings(df))]),
    "ablate": (
        lambda: ablate(MODEL, JOB, tensors=["O"], blocks=[3], by="head", how="zero", metrics=METRIC),
        [lambda df: list(effect_plots.pictures(df)), effect_plots.largest, lambda df: largest(df, 3)],
    ),
    "paths": (lambda: paths(MODEL, JOB, senders=["blocks.3.O h=1"], metrics=METRIC), [causal_plots.paths]),
    "circuit": (
        lambda: circuit(MODEL, JOB, ["blocks.3.O h=1"], random_sets=2, subsets=2, metrics=METRIC),
        [causal_plots.faithfulness, causal_plots.minimality, causal_plots.completeness],
    ),
    "attribute": (
        lambda: attribute(MODEL, JOB, tensors=["O"], blocks=[3], by="head"),
        [causal_plots.scatter, agreement],
    ),
}


@pytest.mark.parametrize("study", READ)
def test_results_of_two_models_are_never_read_as_one_models(study: str) -> None:
    """Joined, they are two models' rows: what draws or sums them up takes the rows of one, and no mixture."""
    ask, readers = READ[study]
    df = ask()
    both = frames.join(df, df.assign(model="another"))
    for read in readers:
        read(df)
        with pytest.raises(frames.BadFrame, match="model"):
            read(both)


# ==== Frames and plots ================================================================================================


def row(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompts": "p", "block": 0, "tensor": "O", "metric": "m", "unit": "1", "value": 1.0} | more


@pytest.mark.parametrize("dtype", [object, "str", "string", "category"])
def test_dtype_object_no_longer_finds_strings_in_pandas_3(dtype: Any, tmp_path: Any) -> None:
    """Text is text of one kind, however it came: as Python's, as pandas 3 infers it, as a category or from a file. What
    finds columns of text finds all of them, and nothing asks for object."""
    loose = pd.DataFrame([row(token=token, role=pd.NA, same_as=None, pos=i) for i, token in enumerate(("1", "", "a"))])
    loose["token"] = loose["token"].astype(dtype)
    df = frame(loose, study="s")
    back = [frames.read(frames.write(df, tmp_path / f"f.{ending}")) for ending in ("parquet", "csv")]
    for one in (df, frames.join(df, df.assign(model="other")), *back):
        text = {name for name in COLUMNS if name in one and COLUMNS[name].dtype == "string"}
        assert text == set(one.select_dtypes("string").columns) == {n for n in one.columns if one[n].dtype == "string"}
        assert {"token", "study", "metric"} <= text
        assert not set(one.select_dtypes(object).columns)
        assert one["token"].tolist()[:3] == ["1", "", "a"]
        assert one[one["token"] == "1"]["pos"].tolist()[0] == 0
    labels = plots.heatmap(df, y="block", x="pos").get_xticklabels()
    assert [label.get_text() for label in labels] == ["1", "", "a"]


DRAWN: Mapping[str, Callable[[pd.DataFrame], Axes]] = {
    "heatmap": plots.heatmap,
    "norms": plots.norms,
    "split": bars.split,
    "ranking": bars.ranking,
    "lens": lens_plots.lens,
    "direct": lens_plots.direct,
    "probes": probe_plots.probes,
    "dose": steer_plots.dose,
    "largest": effect_plots.largest,
    "paths": causal_plots.paths,
    "faithfulness": causal_plots.faithfulness,
    "minimality": causal_plots.minimality,
    "completeness": causal_plots.completeness,
    "scatter": causal_plots.scatter,
    "diagram": lambda df: block_diagram(card(moe=True), df),
}
LISTED: Sequence[Callable[[pd.DataFrame], Iterator[tuple[str, Axes]]]] = (
    *(pictures.head_maps, pictures.size_maps, pictures.load_maps, pictures.comparison_maps, bars.rankings),
    *(lens_plots.pictures, probe_plots.pictures, steer_plots.pictures, effect_plots.pictures),
    *(causal_plots.circuits, causal_plots.attributions),
)


@pytest.mark.parametrize("name", DRAWN)
def test_an_empty_frame_crashes_the_plot(name: str) -> None:
    """Every picture of a frame without rows says in words why there is nothing to see; no bar, no line, no image."""
    ax = DRAWN[name](frame([], study="s"))
    ax.figure.draw_without_rendering()
    if name != "diagram":  # which draws the block itself
        assert [*ax.lines, *ax.images, *ax.patches, *ax.collections] == []
    said = " ".join(text.get_text() for text in ax.texts)
    assert any(word in said for word in ("no ", "not measured")), said


@pytest.mark.parametrize("of", LISTED, ids=lambda of: f"{of.__module__.split('.')[-1]}.{of.__name__}")
def test_an_empty_frame_has_no_pictures_but_those_that_say_so(of: Callable[..., Iterator[tuple[str, Axes]]]) -> None:
    for _, ax in of(frame([], study="s")):
        assert [text.get_text()[:3] for text in ax.texts] == ["no "]


@pytest.fixture(scope="module")
def shell() -> Any:
    """A notebook's shell, without its history file."""
    made: Any = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}), colors="nocolor")
    made.push({"MODEL": MODEL, "JOB": JOB, "zero": zero, "ablate": ablate, "norms": norms})
    return made


def shown(shell: Any, source: str) -> list[str]:
    """What a cell prints that fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        result = shell.run_cell(source)
    assert result.error_in_exec is not None
    return [line for line in out.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        ('ablate(MODEL, JOB, tensors=["c_KVV"])', "UnknownTensor: no tensor of a dense block is spelt 'c_KVV'"),
        ('MODEL.run("Paul is a", edits=[zero("O", 1, h=9)])', "OutOfRange: "),
        ('norms(MODEL, JOB, tensors=["experts"])', "UnknownTensor: blocks.1.experts holds integers"),
    ],
)
def test_a_notebook_error_that_points_at_the_library_instead_of_the_users_line(
    call: str, fact: str, shell: Any
) -> None:
    """Of a call that can't be, a notebook shows the user's lines and the fact; and where it was raised, in one line."""
    lines = shown(shell, f"def study():\n    return {call}\n\nstudy()")
    code = [line.strip() for line in lines if line.startswith("    ") and "^" not in line]
    places = [line.split(", ")[1:] for line in lines if line.startswith("  File")]
    assert code == ["study()", f"return {call}"]
    assert places == [["line 4", "in <module>"], ["line 2", "in study"]]
    assert lines[-2].startswith(fact)
    assert lines[-1].startswith("(raised in ")


def test_an_error_in_the_users_own_function_ends_at_its_line(shell: Any) -> None:
    """It isn't ours, and is shown whole: from the call, through us, to the line that failed."""
    call = 'MODEL.run_with_hooks("Paul is a", fwd_hooks=[("x_0", fold)])'
    lines = shown(shell, f"def fold(value, hook):\n    return value.reshape(3)\n\n{call}")
    marked = [line.split(maxsplit=2)[2] for line in lines if line.startswith("--") and "> " in line]
    assert (marked[0], marked[-1]) == (call, "return value.reshape(3)")
    assert lines[-1].startswith("RuntimeError")


def test_a_raised_error_is_an_ordinary_one_elsewhere() -> None:
    """Its text is the fact alone, and what a notebook would show needs no traceback to be there."""
    assert ProbeError("a fact")._render_traceback_() == ["ProbeError: a fact", ""]
    with pytest.raises(ProbeError) as caught:
        MODEL.run("Paul is a", edits=[zero("O", 1, h=9)])
    *_, here, fact, where = caught.value._render_traceback_()
    assert "test_a_raised_error_is_an_ordinary_one_elsewhere" in here
    assert fact.endswith(str(caught.value))
    assert "where.py" in where


TOKENS = 512


CELLS = {
    "stream": [row(tensor="x_n", block=b, pos=p, token=f"word{p}") for b in range(16) for p in range(TOKENS)],
    "pattern": [row(tensor="A", pos=p, key=k) for p in range(TOKENS) for k in range(p + 1)],
}


@pytest.mark.parametrize(("kind", "y", "x"), [("stream", "block", "pos"), ("pattern", "pos", "key")])
def test_a_widget_that_hangs_at_512_tokens(kind: str, y: str, x: str, tmp_path: Any) -> None:
    """Pictures are what is shown here. One of 512 tokens, or of 512 by 512, most of its cells marked as no value or as
    noise, is there in seconds, no larger than a screen, and its labels don't lie on one another."""
    df = pd.DataFrame(CELLS[kind])
    effect = np.random.default_rng(0).normal(size=len(df))
    effect[::7] = np.nan
    df = frame(df.assign(effect=effect, noise_floor=1.0), study="patch")
    start = time.process_time()
    ax = plots.heatmap(df, y=y, x=x)
    assert len(ax.patches) == 2, "crossed and hatched: a shape each, not one a cell, which would take minutes to draw"
    picture = plt.imread(pictures.save(ax, tmp_path / "picture.png"))
    assert time.process_time() - start < 15
    assert max(picture.shape) < 1500
    for labels, side in ((ax.get_xticklabels(), 0), (ax.get_yticklabels(), 1)):
        ends = [np.sort(label.get_window_extent().get_points()[:, side]) for label in labels]
        line = 7.0 if labels[0].get_rotation() else max(float(end - start) for start, end in ends)
        assert np.abs(np.diff([end for _, end in ends])).min() >= line, "what lies beside it, level or turned, is free"
