"""Asking and reporting: metrics, studies, frames, pictures, and the command line.

A study is one function in a file of its own: ``from experiments.ablate import ablate``. Nothing heavy is loaded before
it is used, so that ``k2probe --help`` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.asking import Ask
    from experiments.metrics import METRICS, Metric
    from experiments.prompts import Prompt, Prompts, tasks

_FROM = {
    "METRICS": "metrics",
    "Ask": "asking",
    "Metric": "metrics",
    "Prompt": "prompts",
    "Prompts": "prompts",
    "tasks": "prompts",
}
_MODULES = frozenset(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))

__all__ = ["METRICS", "Ask", "Metric", "Prompt", "Prompts", "tasks"]


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(f"experiments.{_FROM[name]}"), name)
    if name in _MODULES:
        return import_module(f"experiments.{name}")
    raise AttributeError(f"module 'experiments' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
