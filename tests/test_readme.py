"""The README is true: its listing computes the library's 28 values (law 8), its tree is the tree, its Python runs."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe import KIMI_K2, Dims, card, evaluate, plan, random_weights
from probe.numerics import causal_mask, rotation

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STEPS = {row.number: row for row in card(moe=False).values() if row.number}

SIZES: dict[str, dict[str, int]] = {
    "small": {"d": 32, "r_q": 20, "r_kv": 24, "h": 3, "n": 12, "r": 8, "v": 16, "f": 40},
    "v-is-q": {"d": 48, "r_q": 16, "r_kv": 32, "h": 2, "n": 8, "r": 4, "v": 12, "f": 64},
    "one-head": {"d": 16, "r_q": 8, "r_kv": 8, "h": 1, "n": 2, "r": 6, "v": 4, "f": 8},
    "wide": {"d": 256, "r_q": 96, "r_kv": 64, "h": 4, "n": 32, "r": 16, "v": 24, "f": 512},
}


def block_after(marker: str, language: str = "") -> str:
    """The one code block after a marker."""
    blocks = re.findall(rf"^<!-- {marker} -->\n```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"README.md marks one {marker!r}"
    return str(blocks[0])


LISTING = block_after("the block", "python")


def dims_of(sizes: str) -> Dims:
    return replace(KIMI_K2, **SIZES[sizes], V=8, e=0, k=0, m=0, m_s=0, moe=(False,), eps=1e-5)


def given(dims: Dims, seed: int, length: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A block's inputs, and the values that the library makes of them."""
    weights = random_weights(dims, seed=seed, dtype=dtype)
    x_n = torch.randn(2, length, dims.d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    R, M = rotation(torch.arange(length), dims, dtype), causal_mask(None, length, dtype)
    made = evaluate(plan(card(moe=False), card(moe=False), ("x_n", "R", "M")), {"x_n": x_n, "R": R, "M": M}, weights, 0)
    names = {leaf.name: weights.read(0, leaf.name) for leaf in card(moe=False).weights}
    constants = {"tau": dims.tau, "eps": dims.eps, "eps_latent": dims.eps_latent, "dims": dims}
    return {"torch": torch, "x_n": x_n, "cos": R.cos, "sin": R.sin, "M": M, **names, **constants}, made


def test_28_lines_one_a_step() -> None:
    statements = [s for s in ast.parse(LISTING).body if not isinstance(s, ast.FunctionDef)]
    assert len(statements) == 28
    lines = LISTING.splitlines()
    for number, statement in enumerate(statements, start=1):
        assert isinstance(statement, ast.Assign)
        assert statement.lineno == statement.end_lineno, "one line a step"
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        assert target.id == STEPS[number].name
        assert re.search(rf"# {number}(:|$)", lines[statement.lineno - 1]), "the step's number, as a comment"


def test_plain_torch_reading_what_each_step_reads() -> None:
    known = {"torch", "dims", "x_n", "cos", "sin", "M", "tau", "eps", "eps_latent", "rms_norm", "rope", "pattern"}
    known |= {leaf.name for leaf in card(moe=False).weights}
    for statement in (s for s in ast.parse(LISTING).body if isinstance(s, ast.Assign)):
        assert isinstance(statement.targets[0], ast.Name)
        target = statement.targets[0].id
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        assert names - {target} <= known
        step = next(row for row in STEPS.values() if row.name == target)
        asked = set(step.needs) - {"R"} - {n for n in step.needs if re.fullmatch(r"[nsA]_\w+|A", n)}  # made inside
        assert asked <= names, "each line reads what its step reads"
        known.add(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("sizes", SIZES)
def test_law_8_the_same_28_values(sizes: str, length: int, seed: int, dtype: torch.dtype) -> None:
    names, made = given(dims_of(sizes), seed, length, dtype)
    exec(compile(LISTING, "README.md", "exec"), names)
    for number, step in STEPS.items():
        ours, listed = made[step.name], names[step.name]
        assert listed.dtype == ours.dtype
        assert torch.equal(listed, ours), f"step {number}, {step.name}"


def test_the_tree_names_every_file_of_the_rooms_and_no_other() -> None:
    folder, named = "", set()
    for line in block_after("the tree").splitlines():
        path = line.split("  ")[0] if not line.startswith("  ") else line.strip().split("  ")[0]
        if line.startswith("  "):
            named.update(f"{folder}{file}" for file in path.split(" "))
        elif path.endswith("/"):
            folder = path
    rooms = ("probe", "hooks", "experiments", "training")
    listed = subprocess.run(["git", "ls-files", *rooms], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = {
        f for f in listed.splitlines() if f.count("/") == 1 and f.endswith(".py") and not f.endswith("__init__.py")
    }
    if not files:
        pytest.skip("not a git checkout")
    assert {n for n in named if n.endswith(".py") and n.split("/")[0] in rooms} == files


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = README.split("## From Python")[1].split("## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for code in blocks:
        exec(compile(code, "README.md", "exec"), names)
    assert set(names["frame"]["head"].dropna()) == {0, 1, 2, 3}
    assert (names["edited"]["logits"] - names["base"]["logits"]).abs().max() > 0
    word = names["model"].tokenizer.token
    assert word(int(names["source"]["logits"][0, -1].argmax())) == "Paris"
    assert word(int(names["start"]["logits"][0, -1].argmax())) == "Tokyo"
    assert word(int(names["patched"]["logits"][0, -1].argmax())) == "Paris", "the country's place carries the capital"
    assert (tmp_path / "patterns.safetensors").exists()
