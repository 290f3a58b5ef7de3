"""experiments -> hooks -> probe, never back; each library in its own room; a command line that loads fast."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {"probe": set(), "hooks": {"probe"}, "experiments": {"hooks", "probe"}}
HOUSE = {*MAY_IMPORT, "training", "tests", "benchmarks", "notebooks"}
ONLY_IN = {  # library -> where it may be imported
    "transformer_lens": "hooks",
    "pandas": "experiments",
    "matplotlib": "experiments",
    "typer": "experiments",
    "rich": "experiments",
    "pydantic": "experiments",
    "sklearn": "experiments",
    "tokenizers": "probe/text.py",
    "transformers": None,  # the oracle is for tests
}
HEAVY = {"torch", "numpy", "pandas", "pyarrow", "matplotlib", "tokenizers", "transformer_lens", "sklearn"}

Sources = Mapping[str, str]  # a file's path from the root -> its text


class Import(NamedTuple):
    name: str  # absolute and dotted; the last part may be an attribute
    line: int
    at_load: bool  # runs when its module is imported


def imports(path: str, source: str) -> Iterator[Import]:
    """Each import in a file: also in functions, under TYPE_CHECKING, by import_module of a plain string."""
    package = PurePosixPath(path).parent.parts

    def absolute(level: int, name: str) -> str:
        return ".".join([*package[: len(package) - level + 1], name]) if level else name

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                yield from (Import(a.name, node.lineno, at_load) for a in node.names)
            case ast.ImportFrom():
                base = f"{node.module}." if node.module else ""
                for a in node.names:
                    yield Import(absolute(node.level, base + a.name), node.lineno, at_load)
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                dots = len(name) - len(name.lstrip("."))
                yield Import(absolute(dots, name[dots:]), node.lineno, at_load)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                at_load = False
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for child in node.body:
                    yield from visit(child, False)
                for child in node.orelse:
                    yield from visit(child, at_load)
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_load)

    return visit(ast.parse(source, path), True)


def reversed_arrows(sources: Sources) -> list[str]:
    """Every import that a room may not make."""
    wrong = []
    for path, source in sources.items():
        room = path.split("/")[0]
        for name, line, _ in imports(path, source):
            top = name.split(".")[0]
            if top in HOUSE - {room} - MAY_IMPORT[room]:
                wrong.append(f"{path}:{line}: {room} may not import {name}")
            if top in ONLY_IN and ONLY_IN[top] not in (room, path):
                wrong.append(f"{path}:{line}: {top} belongs in {ONLY_IN[top] or 'no room'}")
    return wrong


def loaded(start: str, sources: Sources) -> set[str]:
    """What importing module `start` imports: our modules, followed, and the libraries that they name."""
    files = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    seen: set[str] = set()
    todo = [start]
    while todo:
        parts = todo.pop().split(".")
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        ours = prefixes & files.keys()
        for module in ours - seen:
            todo += [i.name for i in imports(files[module], sources[files[module]]) if i.at_load]
        seen |= ours or {parts[0]}
    return seen


@pytest.fixture(scope="module")
def rooms() -> Sources:
    paths = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_arrows_point_one_way(rooms: Sources) -> None:
    assert {path.split("/")[0] for path in rooms} == MAY_IMPORT.keys()
    assert reversed_arrows(rooms) == []


@pytest.mark.parametrize("module", ["experiments", "experiments.cli", "experiments.__main__"])
def test_command_line_loads_nothing_heavy(module: str, rooms: Sources) -> None:
    got = loaded(module, rooms)
    assert module in got
    assert got & HEAVY == set()


def test_help_leaves_torch_and_pandas_unimported() -> None:
    code = f"""
import runpy, sys
sys.argv = ["k2probe", "--help"]
try:
    runpy.run_module("experiments", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *sorted(set(sys.modules) & {HEAVY!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("probe/a.py", "import hooks"),
        ("probe/a.py", "from hooks.sites import Site"),
        ("probe/a.py", "def f():\n    from experiments import frames"),
        ("probe/a.py", "if TYPE_CHECKING:\n    import hooks.model as m"),
        ("probe/a.py", "importlib.import_module('hooks.model')"),
        ("probe/a.py", "__import__('experiments')"),
        ("probe/tiny/a.py", "from ... import hooks"),
        ("hooks/a.py", "try:\n    import experiments.cli\nexcept ImportError:\n    pass"),
        ("hooks/a.py", "from ..experiments import frames"),
        ("experiments/a.py", "from tests import helpers"),
        ("experiments/a.py", "import training.train"),
        ("probe/a.py", "import transformer_lens"),
        ("experiments/a.py", "from transformer_lens.hook_points import HookPoint"),
        ("hooks/a.py", "import os, pandas as pd"),
        ("hooks/a.py", "from matplotlib import pyplot"),
        ("probe/a.py", "import typer"),
        ("probe/a.py", "from rich.console import Console"),
        ("probe/decoder.py", "import tokenizers"),
        ("hooks/text.py", "import tokenizers"),
        ("experiments/a.py", "import transformers"),
    ],
)
def test_planted_violation_is_seen(path: str, source: str) -> None:
    (wrong,) = reversed_arrows({path: source})
    assert wrong.startswith(f"{path}:{source[: source.index('import')].count(chr(10)) + 1}: ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("probe/a.py", "import torch, probe.leaves\nfrom . import card\nfrom .dims import Dims"),
        ("probe/text.py", "def f():\n    from tokenizers import Tokenizer"),
        ("hooks/a.py", "from transformer_lens import HookedRootModule\nfrom probe import card"),
        ("experiments/a.py", "import pandas, matplotlib.pyplot, typer, rich, probe\nfrom hooks import run"),
        ("experiments/a.py", "import_module(f'.{name}', __name__)\nhooks = 'import tests'  # tests"),
    ],
)
def test_rightful_import_passes(path: str, source: str) -> None:
    assert reversed_arrows({path: source}) == []


@pytest.mark.parametrize(
    ("cli", "heavy"),
    [
        ("import torch", {"torch"}),
        ("try:\n    from matplotlib import pyplot\nexcept ImportError: ...", {"matplotlib"}),
        ("class C:\n    import pandas", {"pandas"}),
        ("import probe.errors", {"torch"}),  # probe/__init__.py comes first
        ("from probe import errors", {"torch"}),
        ("from .frames import Frame", {"pandas"}),
        ("from . import frames", {"pandas"}),
        ("from .prompts import Prompts", {"pandas"}),  # two steps away
        ("importlib.import_module('.frames', __name__)", {"pandas"}),
        ("import typer, os.path", set()),
        ("def f():\n    import torch", set()),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import os", set()),
    ],
)
def test_what_loading_brings(cli: str, heavy: set[str]) -> None:
    sources = {
        "probe/__init__.py": "from .card import card",
        "probe/card.py": "import torch",
        "probe/errors.py": "",
        "experiments/__init__.py": "def __getattr__(name):\n    from .frames import Frame",
        "experiments/cli.py": cli,
        "experiments/frames.py": "import pandas",
        "experiments/prompts.py": "from experiments.frames import Frame",
    }
    assert loaded("experiments.cli", sources) & HEAVY == heavy
