"""Path patching against two runs by hand, prompt by prompt, and against linear algebra; the hop that it finds in the
tiny model, with controls; and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from experiments import causal_plots, frames
from experiments.cli import app
from experiments.frames import BadFrame
from experiments.metrics import BadMetric
from experiments.nodes import largest, nodes
from experiments.options import Hold
from experiments.patch import patch
from experiments.paths import outlook, paths
from experiments.prompts import Prompt, Prompts
from experiments.stats import BadSample
from hooks import Cell, Edit, HookedModel, Live, Run, freeze, sweep, walk
from hooks import patch as patched
from probe.engine import compute
from probe.errors import BadEdit, BadText, OutOfRange, UnknownDim, UnknownTensor

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
TOKENIZER = MODEL.tokenizer
DIFFERENCE = ["logit_difference"]
DELTAS = ("delta_attn", "delta_ffn")


@cache
def task(name: str) -> Prompts:
    return Prompts.load(name, TOKENIZER)


def some(name: str, n: int) -> Prompts:
    """A few rows, of several shapes where there are."""
    by_shape = list(task(name).shapes().values())
    return task(name).subset(sorted(rows[i] for i in range(n) for rows in by_shape if i < len(rows))[:n])


IOI = some("ioi", 4)


def recovered(df: pd.DataFrame, sender: str, receiver: str) -> float:
    (row,) = df[(df["sender"] == sender) & (df["receiver"] == receiver)].to_dict("records")
    return float(row["recovered"])


# ---- two runs by hand ------------------------------------------------------------------------------------------------


def difference(prompt: Prompt, logits: Tensor) -> float:
    assert prompt.answer is not None
    assert prompt.wrong is not None
    end = logits[0, -1].double()
    return float(end[prompt.answer.tokens[0][0]] - end[prompt.wrong.tokens[0][0]])


def run(tokens: Sequence[int], prompt: Prompt, edits: Sequence[Edit] = (), base: Run | None = None) -> Run:
    """One prompt alone, whole: neither padding nor batch nor sweep."""
    return MODEL.run(torch.tensor([tokens]), want=list(MODEL.sites), edits=edits, base=base, spans=[prompt.spans])


def all_between(first: int, last: int) -> list[str]:
    """Every Δ of blocks first to last, both included."""
    return [f"blocks.{block}.{delta}" for block in range(first, last + 1) for delta in DELTAS]


def heads_between(first: int, last: int) -> list[str]:
    return [site for site in all_between(first, last) if site.endswith("attn")]


CASES: list[tuple[str, dict[str, Any], str, dict[str, Any], Hold, list[str]]] = [
    ("x_0", {"T": "S2"}, "blocks.0.Q", {"h": 3}, "all", []),
    ("x_0", {"T": "S2"}, "blocks.3.V", {"h": 0}, "all", all_between(0, 2)),
    ("x_0", {"T": "S2"}, "blocks.3.K", {"h": 0, "S": "S2"}, "attn", heads_between(0, 2)),
    ("x_0", {"T": "S2"}, "blocks.3.A", {"h": 0}, "all", all_between(0, 2)),
    ("x_0", {}, "blocks.2.S", {}, "none", []),
    ("x_0", {"T": "S2"}, "logits", {}, "none", []),
    ("x_0", {"T": "S2"}, "logits", {}, "all", all_between(0, 3)),
    ("blocks.0.O", {"h": 3}, "blocks.3.V", {"h": 0}, "all", ["blocks.0.delta_ffn", *all_between(1, 2)]),
    ("blocks.0.O", {"h": 3}, "blocks.3.V", {"h": 0}, "attn", heads_between(1, 2)),
    (
        "blocks.0.O",
        {"h": 2, "T": "S2"},
        "blocks.2.x_ffn",
        {},
        "all",
        ["blocks.0.delta_ffn", *all_between(1, 1), "blocks.2.delta_attn"],
    ),
    ("blocks.0.c_KV", {}, "blocks.1.delta_attn", {}, "all", ["blocks.0.delta_ffn"]),
    ("blocks.0.delta_attn", {}, "blocks.0.x_ffn", {}, "all", []),
    ("blocks.0.x_n", {"T": "S2"}, "blocks.0.x_ffn", {}, "all", ["blocks.0.delta_attn"]),
    ("blocks.1.x_ffn", {}, "blocks.2.delta_experts", {"e": 3}, "all", ["blocks.2.delta_attn"]),
    ("blocks.1.delta_experts", {"e": 5}, "blocks.3.Q", {"h": 0}, "all", all_between(2, 2)),
    ("blocks.2.V", {"h": 1}, "blocks.3.x_n", {}, "none", []),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{a}-{b}-{hold}" for a, _, b, _, hold, _ in CASES])
@pytest.mark.parametrize("frozen", [(), ("experts", "s_*")], ids=["", "frozen"])
def test_paths_are_two_runs_by_hand(case: Any, frozen: tuple[str, ...]) -> None:
    sender, where, receiver, place, hold, held = case
    text = [
        " ".join([name, *(f"{dim}={x}" for dim, x in at.items())]) for name, at in ((sender, where), (receiver, place))
    ]
    df = paths(
        MODEL,
        IOI,
        senders=[text[0]],
        receivers=[text[1]],
        hold=hold,
        frozen=frozen,
        metrics=DIFFERENCE,
        per_prompt=True,
    )
    kept = [freeze(name) for name in frozen]
    for i, prompt in enumerate(IOI.swapped().rows):
        base, source = run(prompt.tokens, prompt), run(IOI.rows[i].tokens, IOI.rows[i])
        start = patched(sender, source=source, **where)
        first = run(prompt.tokens, prompt, [start, *(freeze(site) for site in held), *kept], base)
        left = kept if receiver != "logits" else []  # past which nothing is left to hold
        second = run(prompt.tokens, prompt, [patched(receiver, source=first, **place), *left], base)
        (row,) = df[df["example"] == i].to_dict("records")
        assert (row["sender"], row["receiver"]) == tuple(text)
        assert row["base"] == pytest.approx(difference(prompt, base["logits"]), abs=1e-4)
        assert row["value"] == pytest.approx(difference(prompt, second["logits"]), abs=1e-3)


def test_what_is_held_keeps_the_base_s_value_and_not_the_source_s() -> None:
    """The negative control of the twin: held at the source's values, the path would carry something else."""
    df = paths(MODEL, IOI, senders=["x_0 T=S2"], receivers=["blocks.3.V h=0"], metrics=DIFFERENCE, per_prompt=True)
    prompt = IOI.swapped().rows[0]
    base, source = run(prompt.tokens, prompt), run(IOI.rows[0].tokens, IOI.rows[0])
    wrong = [patched(site, source=source) for site in all_between(0, 2)]
    first = run(prompt.tokens, prompt, [patched("x_0", source=source, T="S2"), *wrong], base)
    second = run(prompt.tokens, prompt, [patched("blocks.3.V", source=first, h=0)], base)
    assert abs(df["value"].iloc[0] - difference(prompt, second["logits"])) > 1


def test_a_direct_path_is_what_linear_algebra_says() -> None:
    """No edit, no freeze: a head's change through W_O, added to the base's stream, into another head's values by a
    plain hook."""
    df = paths(
        MODEL, IOI, senders=["blocks.0.O h=3"], receivers=["blocks.3.V h=0"], metrics=DIFFERENCE, per_prompt=True
    )
    W_O = MODEL.decoder.weights.read(0, "W_O").unflatten(0, (MODEL.dims.h, MODEL.dims.v))
    for i, prompt in enumerate(IOI.swapped().rows):
        base, source = run(prompt.tokens, prompt), run(IOI.rows[i].tokens, IOI.rows[i])
        change = (source["blocks.0.O"] - base["blocks.0.O"])[:, :, 3] @ W_O[3]
        V = MODEL.run_block(3, base["blocks.3.x_n"] + change, want="V")["blocks.3.V"]

        def put(value: Tensor, hook: Any, V: Tensor = V) -> Tensor:
            value[:, :, 0] = V[:, :, 0]
            return value

        with torch.no_grad():
            logits = MODEL.run_with_hooks(torch.tensor([prompt.tokens]), fwd_hooks=[("blocks.3.V", put)])
        assert df["value"].iloc[i] == pytest.approx(difference(prompt, logits), abs=1e-3)
        assert abs(df["effect"].iloc[i]) > 1  # and it is no path on which nothing goes


def test_all_held_and_the_final_scale_too_a_head_adds_what_its_direction_says() -> None:
    df = paths(MODEL, IOI, senders=["blocks.2.O h=1"], frozen=["s_final"], metrics=DIFFERENCE, per_prompt=True)
    weights = MODEL.decoder.weights
    W_O = weights.read(2, "W_O").unflatten(0, (MODEL.dims.h, MODEL.dims.v))[1]
    for i, prompt in enumerate(IOI.swapped().rows):
        base, source = run(prompt.tokens, prompt), run(IOI.rows[i].tokens, IOI.rows[i])
        change = (source["blocks.2.O"] - base["blocks.2.O"])[0, -1, 1] @ W_O
        assert prompt.answer is not None
        assert prompt.wrong is not None
        answer, wrong = (weights.read(None, "W_U")[:, one.tokens[0][0]] for one in (prompt.answer, prompt.wrong))
        adds = (change * base["s_final"][0, -1] * weights.read(None, "w_final")) @ (answer - wrong)
        assert df["effect"].iloc[i] == pytest.approx(float(adds), abs=1e-3)


def test_all_direct_edges_into_the_logits_sum_to_what_the_whole_stream_does() -> None:
    """The final norm's scale held, logits are linear in what is added up: the embedding, heads, FFNs."""
    senders = ["x_0", "O h=*", "delta_ffn"]
    df = paths(MODEL, IOI, senders=senders, frozen=["s_final"], metrics=DIFFERENCE, per_prompt=True)
    assert len(df) == len(IOI) * (1 + MODEL.dims.blocks * (MODEL.dims.h + 1))
    whole = patch(
        MODEL, IOI, tensors=["x_next"], blocks=[3], by=None, frozen=["s_final"], metrics=DIFFERENCE, per_prompt=True
    )
    summed = df.groupby("example")["effect"].sum().to_numpy(dtype=float)
    np.testing.assert_allclose(summed, whole["effect"].to_numpy(dtype=float), atol=1e-3)
    assert np.abs(summed).min() > 5


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_with_nothing_held_all_that_reaches_the_logits_is_a_patch(direction: Any) -> None:
    whole = patch(MODEL, IOI, tensors=["O"], by="head", direction=direction, metrics=DIFFERENCE)
    df = paths(MODEL, IOI, senders=["O h=*"], hold="none", direction=direction, metrics=DIFFERENCE)
    assert len(df) == len(whole) == MODEL.dims.blocks * MODEL.dims.h
    both = whole.merge(df, on=["block", "head", "direction", "source"], suffixes=("", "_path"))
    for name in ("value", "base", "effect", "recovered"):
        assert np.allclose(both[name].astype(float), both[f"{name}_path"].astype(float), atol=1e-5), name


# ---- what it finds ---------------------------------------------------------------------------------------------------


def test_the_hop_from_the_subject_to_the_last_position() -> None:
    """Country → capital: heads of a late block read it at the subject and bring it to the last position. Which ones is
    told by patches; by path it must be their values, neither queries nor keys, and none but theirs."""
    prompts = task("capital")
    heads = patch(MODEL, prompts, tensors=["O"], by="head", at="END", metrics=DIFFERENCE)
    carriers = {f"blocks.{row.block}.V h={row.head}" for row in heads[heads["recovered"] > 0.1].itertuples()}
    assert len(carriers) >= 2
    late = [text for text in ("Q h=*", "K h=*", "V h=*") for text in _past_first(text)]
    df = paths(MODEL, prompts, senders=["x_0 T=*"], receivers=late, hold="none", metrics=DIFFERENCE)
    from_subject = df[df["sender"] == "x_0 T=subject"]
    assert set(from_subject.loc[from_subject["recovered"] > 0.1, "receiver"]) == carriers
    assert from_subject.loc[~from_subject["receiver"].isin(carriers), "recovered"].abs().max() < 0.05
    ends = df[df["sender"] == "x_0 T=END"]  # the control: there clean and corrupt are one
    assert (ends["effect"] == 0).all()
    assert (df.loc[df["receiver"].isin(carriers) & (df["role"] == "subject"), "ci_low"] > 0.1).all()


def _past_first(text: str) -> list[str]:
    tensor, part = text.split()
    return [f"blocks.{block}.{tensor} {part}" for block in range(1, MODEL.dims.blocks)]


def test_the_first_leg_of_the_hop_is_not_direct() -> None:
    """The embedding itself is hardly read by the carriers: the first block's heads write it anew, and are."""
    prompts = task("capital")
    carriers = [f"blocks.3.V h={head}" for head in range(MODEL.dims.h)]
    df = paths(MODEL, prompts, senders=["x_0 T=subject", "blocks.0.O h=*"], receivers=carriers, metrics=DIFFERENCE)
    by_sender = df.groupby("sender")["recovered"].sum()
    assert by_sender["x_0 T=subject"] < 0.15
    heads = by_sender.drop("x_0 T=subject")
    assert heads.max() > 2 * by_sender["x_0 T=subject"]
    direct = paths(MODEL, prompts, senders=["blocks.0.O h=*"], metrics=DIFFERENCE)
    assert direct["recovered"].abs().max() < 0.02  # not by themselves to the logits


# ---- frames and cost -------------------------------------------------------------------------------------------------


def test_the_frame_says_what_each_path_is(tmp_path: Any) -> None:
    df = paths(MODEL, IOI, senders=["O h=1", "blocks.0.delta_ffn"], receivers=["x_ffn", "logits"], frozen=["experts"])
    assert (df["hold"] == "all").all()
    assert (df["frozen"] == "experts").all()
    assert (df["direction"] == "denoise").all()
    assert set(df["metric"]) == {"logit_difference", "log_probability", "kl"}
    row = df[(df["sender"] == "blocks.1.O h=1") & (df["receiver"] == "blocks.1.x_ffn")].iloc[0]
    assert (row["block"], str(row["tensor"]), row["head"], row["step"]) == (1, "O", 1, 19)
    pairs = {(sender, receiver) for sender, receiver in zip(df["sender"], df["receiver"], strict=True)}
    assert ("blocks.2.O h=1", "blocks.1.x_ffn") not in pairs  # nothing leads up
    assert ("blocks.0.delta_ffn", "blocks.0.x_ffn") not in pairs
    assert frames.read(frames.write(df, tmp_path / "paths.parquet")).equals(df)
    assert len(frames.join(df, patch(MODEL, IOI, metrics=DIFFERENCE))) > len(df)
    assert df.attrs["mistaken"] == 0


def test_senders_in_parts_give_the_same() -> None:
    asked: dict[str, Any] = {"senders": ["O h=*"], "receivers": ["V h=0", "logits"], "metrics": DIFFERENCE}
    whole, parts = paths(MODEL, IOI, **asked), paths(MODEL, IOI, budget=1, **asked)
    assert list(whole["sender"]) == list(parts["sender"])
    assert np.allclose(whole["value"].astype(float), parts["value"].astype(float), atol=1e-4)
    assert outlook(MODEL, IOI, budget=1, **asked)["forwards"] > outlook(MODEL, IOI, **asked)["forwards"]
    assert outlook(MODEL, IOI, **asked)["cells"] == len(whole)


def test_what_is_held_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held Δ's inputs have rows of the base and the source alone, and the values past it are those of a whole run."""
    rows: dict[str, int] = {}

    def counted(row: Any, *args: Any) -> Any:
        made = compute(row, *args)
        rows[row.name] = rows.get(row.name, 0) + made.shape[1]
        return made

    monkeypatch.setattr(walk, "compute", counted)
    tokens, keep = IOI.batch()
    source = MODEL.run(*IOI.swapped().batch(), want=["blocks.0.O"])
    held = [freeze(site) for site in ("blocks.0.delta_ffn", *all_between(1, 3))]
    edits = [patched("O", 0, source=source, h=3), *held]
    seen: dict[Any, Tensor] = {}

    def look(who: Any, site: Any, value: Tensor) -> None:
        seen[who if isinstance(who, Cell) else None] = value

    counts = []
    for cell in (Cell(tuple(edits)), Cell(tuple(edits[:1]))):
        rows.clear()
        sweep(MODEL, Live(tokens, keep), [cell], look)
        counts.append(dict(rows))
        whole = MODEL.run(tokens, keep, edits=cell.edits)["logits"]
        ends = torch.tensor([len(prompt.tokens) - 1 for prompt in IOI.rows])
        assert torch.allclose(seen[cell][:, 0], whole[torch.arange(len(ends)), ends], atol=1e-4)
    real = int(keep.sum()) if keep is not None else tokens.numel()
    for name in ("c_Q", "K", "delta_routed", "g_s"):
        blocks = sum(MODEL.dims.moe) if name in ("delta_routed", "g_s") else MODEL.dims.blocks
        assert counts[0][name] == blocks * real < counts[1][name], name


# ---- nodes -----------------------------------------------------------------------------------------------------------


def test_nodes_are_named_by_text() -> None:
    found = nodes(MODEL, IOI, ["blocks.2.O h=1", "O h=*", "hook_attn_out T=S2", "x_0 T=*", "logits"])
    names = [str(node) for node in found]
    assert names[0] == "blocks.2.O h=1"
    assert names.count("blocks.2.O h=1") == 1
    assert len([name for name in names if ".O h=" in name]) == 16
    assert "blocks.3.delta_attn T=S2" in names
    assert [name for name in names if name.startswith("x_0")] == ["x_0 T=IO", "x_0 T=S1", "x_0 T=S2", "x_0 T=END"]
    assert names[-1] == "logits"
    (one,) = nodes(MODEL, task("capital"), "blocks.1.V h=2 S=subject[-1]")
    assert one.columns == {**one.columns, "head": 2, "role": "subject[-1]", "block": 1, "tensor": "V"}
    assert len(nodes(MODEL, IOI, "blocks.1.delta_experts e=*")) == MODEL.dims.e
    (one,) = nodes(MODEL, IOI, "blocks.0.h f=7")
    assert one.part.columns == {"feature": 7}


def test_spans_that_some_prompts_lack_are_about_the_others() -> None:
    mixed = Prompts((*IOI.rows[:2], *task("capital").rows[:2]), TOKENIZER, "mixed")
    (node,) = nodes(MODEL, mixed, "x_0 T=subject")
    assert node.part.prompts == (2, 3)
    df = paths(
        MODEL,
        mixed,
        senders=["x_0 T=subject", "x_0 T=S2"],
        receivers=["blocks.3.V"],
        metrics=DIFFERENCE,
        per_prompt=True,
    )
    assert {sender: set(part["example"]) for sender, part in df.groupby("sender")} == {
        "x_0 T=S2": {0, 1},
        "x_0 T=subject": {2, 3},
    }


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        ("c_kv", UnknownTensor, "Nearest: c_KV"),
        ("blocks.9.O", OutOfRange, "blocks 0 to 3"),
        ("", UnknownTensor, "node '': no tensor"),
        ("O h", BadEdit, "it takes a number"),
        ("O =1", BadEdit, "a part is said like h=1"),
        ("O T=nowhere", BadEdit, r"'T=nowhere': .* the prompts have END, IO, S1, S2"),
        ("O h=one", BadEdit, "it takes a number"),
        ("O e=1", UnknownDim, "no dim 'e'"),
        ("V T=S2", UnknownDim, "its positions are S, not T"),
        ("O T=3", BadSample, "of .* shapes"),
        ("blocks.1.gates k=0", BadEdit, "a part is said like"),
        ("O h=-1", BadEdit, "it takes a number"),
    ],
)
def test_nodes_that_are_none(text: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        nodes(MODEL, IOI, text)


def test_the_largest_effects_as_nodes() -> None:
    df = patch(MODEL, task("capital"), tensors=["O"], by=["head", "role"], metrics=DIFFERENCE)
    texts = largest(df, 5)
    assert texts[0] == max(
        (f"blocks.{r.block}.O h={r.head} T={r.role}" for r in df.itertuples()),
        key=lambda text: abs(
            df["effect"][[f"blocks.{r.block}.O h={r.head} T={r.role}" == text for r in df.itertuples()]]
        ).max(),
    )
    assert [str(node) for node in nodes(MODEL, task("capital"), texts)] == texts
    with pytest.raises(BadFrame, match="of one metric"):
        largest(patch(MODEL, IOI), 3)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"senders": ["blocks.3.delta_ffn"], "receivers": ["blocks.1.V"]}, BadEdit, "no receiver .* is below a sender"),
        ({"senders": ["logits"]}, BadEdit, "is below a sender"),
        ({"receivers": ["logits T=END"]}, BadEdit, "logits receive whole"),
        ({"hold": "ffn"}, BadEdit, "hold='ffn': .* all, attn, none may be held"),
        ({"direction": "up"}, BadEdit, "direction='up'"),
        ({"senders": ["delta_heads"]}, BadEdit, "edit `O`"),
        ({"receivers": ["delta_heads"]}, BadEdit, "edit `O`"),
        ({"receivers": ["blocks.3.Q h=0"], "frozen": ["A"]}, BadEdit, "would do nothing"),
        ({"metrics": ["nothing"]}, BadMetric, "there is no metric"),
    ],
)
def test_refusals(asked: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        paths(MODEL, IOI, **{"senders": ["blocks.0.O h=1"], **asked})


def test_texts_that_do_not_fit() -> None:
    with pytest.raises(BadText, match="no corrupt text"):
        paths(MODEL, Prompts.text("The capital of France is", TOKENIZER, answer="Paris"), senders=["O"])
    row = {
        "template": "The capital of {subject} is",
        "slots": {"subject": "France"},
        "answer": "Paris",
        "wrong": "Lima",
    }
    uneven = Prompts.of([{**row, "corrupt_slots": {"subject": "the Peru"}}], TOKENIZER)
    with pytest.raises(BadEdit, match="go by role"):
        paths(MODEL, uneven, senders=["blocks.0.O h=1"])
    assert len(paths(MODEL, uneven, senders=["blocks.0.O h=1 T=END"], metrics=DIFFERENCE)) == 1


# ---- picture and command ---------------------------------------------------------------------------------------------


def test_the_picture_keeps_the_order_of_nodes() -> None:
    df = paths(MODEL, IOI, senders=["O h=0"], receivers=["V h=1", "logits"])
    ax = causal_plots.paths(df)
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"blocks.{b}.O h=0" for b in range(4)]
    assert [label.get_text() for label in ax.get_xticklabels()] == [*(f"blocks.{b}.V h=1" for b in (1, 2, 3)), "logits"]
    assert "all between held" in ax.get_title(loc="left")
    plt.close("all")
    with pytest.raises(BadFrame, match="no metric 'rank'"):
        causal_plots.paths(df, metric="rank")
    causal_plots.paths(df[:0])
    plt.close("all")


def test_the_command(tmp_path: Any) -> None:
    asked = [
        "paths",
        "--task",
        "capital",
        "--sender",
        "x_0 T=subject",
        "--receiver",
        "blocks.3.V h=*",
        "--hold",
        "none",
    ]
    out = CliRunner().invoke(app, [*asked, "--metric", "logit_difference", "--out", str(tmp_path)])
    assert out.exit_code == 0, out.output
    assert "x_0 T=subject  blocks.3.V h=3" in out.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"paths.parquet", "paths.csv", "paths.png"}
    dry = CliRunner().invoke(app, [*asked, "--dry-run"])
    assert dry.exit_code == 0
    assert "forwards" in dry.stdout
    wrong = CliRunner().invoke(app, ["paths", "--task", "capital", "--sender", "nothing"])
    assert wrong.exit_code == 1
    assert "is spelt 'nothing'" in wrong.output
