"""The card: every named tensor as one small pure function, and the graph that follows from their signatures.

A step's *name* is the tensor, its *parameters* are the tensors, weights and constants it needs, its *body* is the
right-hand side of the formula. Nothing is traced or parsed: `Card` reads the signatures, checks them once at import,
and answers which steps feed which.
"""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

from torch import Tensor

from probe.dims import DIMS
from probe.errors import UnknownDim, UnknownTensor, nearest

Dtype = Literal["act", "fp32", "int64"]
Stream = Literal["residual", "query", "key", "value", "attention", "ffn", "router", "experts", "shared"]


def split_shape(shape: str) -> tuple[str, ...]:
    """``"B T (h n)"`` as ``("B", "T", "(h n)")``: one entry an axis, composite axes in brackets."""
    return tuple(re.findall(r"\([^)]*\)|\S+", shape))


def letters(axis: str) -> tuple[str, ...]:
    """The dims of one axis: ``"(h n)"`` gives ``("h", "n")``."""
    return tuple(axis.strip("()").split())


_SIGNS = {
    r"\Delta": "Δ",
    r"\Sigma": "Σ",
    r"\sigma": "σ",
    r"\tau": "τ",
    r"\epsilon": "ε",
    r"\odot": "⊙",
    r"\cdot": "·",
    r"\top": "⊤",
}


def plain(symbol: str) -> str:
    r"""A LaTeX symbol in plain Unicode: ``\Delta_{\mathrm{ffn}}`` as ``Δ_ffn``, ``\hat c^{KV}`` as ``ĉ^KV``."""
    text = re.sub(r"\\mathrm\{([^}]*)\}", r"\1", symbol)
    for tex, char in _SIGNS.items():
        text = text.replace(tex, char)
    text = re.sub(r"\\hat ?(\w)", "\\1\u0302", text)
    text = re.sub(r"\\, ?", " ", text)
    return unicodedata.normalize("NFC", re.sub(r"\{([^+{}]*)\}", r"\1", text))  # x_{n+1} keeps its braces


@dataclass(frozen=True)
class Leaf:
    """What a block is given: an input, a weight or a constant.

    ``module`` is the checkpoint's module whose ``.weight`` holds a weight (or holds it beside another);
    ``part`` the line of the parameter table that counts it.
    """

    name: str
    kind: Literal["input", "weight", "constant"]
    symbol: str
    shape: tuple[str, ...]
    doc: str
    also: tuple[str, ...] = ()
    hook: bool = False
    part: str = ""

    @property
    def routed(self) -> bool:
        """Whether this weight is read by the rows of its ``e`` axis that tokens chose."""
        return self.kind == "weight" and len(self.shape) == 3

    @property
    def dtype(self) -> Dtype:
        """Leaves with a hook (x_n) hold activations."""
        return "act"


@dataclass(frozen=True)
class Step:
    """One row of the card: a named tensor and the function that computes it.

    Attributes:
        name: Python's name of the tensor.
        symbol: the atlas's symbol, LaTeX without dollars.
        shape: one entry an axis, in dim letters.
        formula: the right-hand side, LaTeX.
        dtype: ``act`` (the activation dtype), ``fp32`` under every cast, or ``int64``.
        stream: which stream of the block it flows in (where the diagram draws it).
        number: its number among the atlas's 28 steps, or None.
        also: further spellings.
        needs: the names it reads, in the order of its parameters.
        fn: the function.
        on_request: computed only when asked for.
        read_only: why it cannot be edited, with what to edit instead; empty where it can.
        only: the kind of block that has it: ``dense``, ``moe``, ``latent``, ``direct``; empty: all.
        without, exact: tensors that this way to the step's value does without, and whether to the bit (`instead_of`).
        inverse: a spelling that means the reciprocal of this tensor: it shows and takes 1/value.
    """

    name: str
    symbol: str
    shape: tuple[str, ...]
    formula: str
    dtype: Dtype
    stream: Stream
    number: int | None
    also: tuple[str, ...]
    needs: tuple[str, ...]
    fn: Callable[..., Tensor] = field(compare=False)
    doc: str = field(compare=False, default="")
    on_request: bool = False
    read_only: str = ""
    only: str = ""
    without: tuple[str, ...] = ()
    exact: bool = True
    inverse: str = ""
    hook: bool = True

    @property
    def plain(self) -> str:
        """The symbol in plain Unicode."""
        return plain(self.symbol)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every dim letter of the shape, composite axes taken apart."""
        return tuple(letter for axis in self.shape for letter in letters(axis) if letter != "1")

    def axis(self, dim: str) -> int:
        """The index of the axis that ``dim`` is, or is part of.

        Raises:
            UnknownDim: the tensor lacks it; the message says which it has.
        """
        for i, axis in enumerate(self.shape):
            if dim in letters(axis):
                return i
        if dim == "T" and "S" in self.shape:
            raise UnknownDim(f"{self.name} [{' '.join(self.shape)}] holds keys: its positions are S, not T.")
        raise UnknownDim(f"{self.name} has no dim {dim!r}; it has {' '.join(self.shape)}.")


def step(
    symbol: str,
    shape: str,
    *,
    formula: str,
    stream: Stream,
    number: int | None = None,
    dtype: Dtype = "act",
    also: tuple[str, ...] = (),
    name: str = "",
    only: str = "",
    on_request: bool = False,
    read_only: str = "",
    inverse: str = "",
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function a row of the card; the function itself stays as it is, with the row as its ``.step``."""

    def declare(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        fn.step = Step(  # type: ignore[attr-defined]
            name=name or fn.__name__,
            symbol=symbol,
            shape=split_shape(shape),
            formula=formula,
            dtype=dtype,
            stream=stream,
            number=number,
            also=also,
            needs=tuple(inspect.signature(fn).parameters),
            fn=fn,
            doc=inspect.cleandoc(fn.__doc__ or ""),
            only=only,
            on_request=on_request,
            read_only=read_only,
            inverse=inverse,
        )
        return fn

    return declare


def instead_of(
    full: Callable[..., Tensor], *without: str, exact: bool = True
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A way to the same value of ``full`` that never holds the tensors ``without``; taken when nobody asks for them.

    One that isn't ``exact`` gives other last bits, and is taken only by who says that these don't matter.
    """

    def declare(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        row: Step = full.step  # type: ignore[attr-defined]
        needs = tuple(inspect.signature(fn).parameters)
        fn.step = replace(row, needs=needs, fn=fn, without=without, exact=exact)  # type: ignore[attr-defined]
        return fn

    return declare


def steps_of(module: ModuleType) -> list[Step]:
    """The rows that a module declares, in its order."""
    rows = (getattr(thing, "step", None) for thing in vars(module).values() if inspect.isfunction(thing))
    return [row for row in rows if isinstance(row, Step) and row.fn.__module__ == module.__name__]


class Card(Mapping[str, Step]):
    """Name → `Step`, in the card's order; with the leaves they read and every spelling of both.

    Args:
        steps: the rows, each after what it needs.
        leaves: all leaves there are; the card keeps those that it reads.
        inputs: leaves that exist even if no step reads them.
        refused: spellings that are errors here, with the message that names the right one.

    Raises:
        ValueError: a parameter that is neither an earlier step nor a leaf, a name or a spelling defined twice, an
            unknown dim. All of it at import, so that a typo cannot wait for a user.
    """

    def __init__(
        self,
        kind: str,
        steps: Iterable[Step],
        leaves: Mapping[str, Leaf],
        *,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.refused = dict(refused or {})
        self._steps: dict[str, Step] = {}
        self._lean: dict[str, Step] = {}
        used: set[str] = set()
        for row in steps:
            for need in row.needs:
                if need not in self._steps and need not in leaves and need not in ("dims", "show"):
                    raise ValueError(f"{kind} card: {row.name} needs {need!r}, which is no leaf and no earlier step.")
            if bad := [letter for letter in row.axes if letter not in DIMS]:
                raise ValueError(f"{kind} card: {row.name} has unknown dims {bad}.")
            if row.without:
                self._lean[row.name] = row
            elif row.name in self._steps or row.name in leaves:
                raise ValueError(f"{kind} card: {row.name} is defined twice.")
            else:
                self._steps[row.name] = row
            used.update(row.needs)
        self.leaves: dict[str, Leaf] = {name: leaf for name, leaf in leaves.items() if name in used}
        self.hooked = (*(leaf.name for leaf in self.leaves.values() if leaf.hook), *self._steps)
        """Names of all tensors with a hook: the inputs among them (``x_n``), then the steps, in order."""
        self._below: dict[frozenset[str], frozenset[str]] = {}
        self._spellings = self._spell()
        self._readers: dict[str, tuple[Step, ...]] = {
            name: tuple(row for row in self._steps.values() if name in row.needs)
            for name in (*self.leaves, *self._steps)
        }

    def _spell(self) -> dict[str, str]:
        spellings: dict[str, str] = {}
        nodes: list[Step | Leaf] = [*self.leaves.values(), *self._steps.values()]
        for node in nodes:
            inverse = [node.inverse] if isinstance(node, Step) and node.inverse else []
            for spelling in {
                node.name,
                *inverse,
                *(unicodedata.normalize("NFC", also) for also in node.also),
            }:
                if spellings.setdefault(spelling, node.name) != node.name or spelling in self.refused:
                    raise ValueError(f"{self.kind} card: {spelling!r} spells two things.")
        for node in nodes:  # a symbol is a spelling too, unless it is another node's name: names win
            for spelling in (node.symbol, plain(node.symbol)):
                owner = spellings.setdefault(spelling, node.name)
                if owner != node.name and owner != spelling:
                    raise ValueError(f"{self.kind} card: {spelling!r} is the symbol of two things.")
        return spellings

    def __getitem__(self, name: str) -> Step:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"Card({self.kind}: {len(self)} tensors)"

    @property
    def weights(self) -> tuple[Leaf, ...]:
        """The weights that the card reads."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.kind == "weight")

    def node(self, name: str) -> Step | Leaf:
        """The step or the leaf of this exact name."""
        return self._steps[name] if name in self._steps else self.leaves[name]

    def shape(self, name: str) -> tuple[str, ...]:
        """The shape of a step or a leaf, in dim letters."""
        return self.node(name).shape

    def spellings(self) -> Mapping[str, str]:
        """Every accepted spelling → name."""
        return dict(self._spellings)

    def find(self, spelling: str) -> Step | Leaf:
        """The step or leaf that ``spelling`` names: its name, symbol or any other spelling on the card; case counts.

        Raises:
            UnknownTensor: nothing is spelt so; the message has the nearest spellings.
        """
        spelling = unicodedata.normalize("NFC", spelling)
        if spelling in self.refused:
            raise UnknownTensor(f"{spelling!r} is not one tensor of a {self.kind} block: {self.refused[spelling]}")
        name = self._spellings.get(spelling)
        if name is None:
            near = dict.fromkeys(self._spellings[s] for s in nearest(spelling, self._spellings, n=6))
            hint = ", ".join(f"{n} ({plain(self.node(n).symbol)})" for n in list(near)[:3])
            raise UnknownTensor(
                f"no tensor of a {self.kind} block is spelt {spelling!r}."
                + (f" Nearest: {hint}." if hint else "")
                + " `k2probe tensors` lists all."
            )
        return self.node(name)

    def readers(self, name: str) -> tuple[Step, ...]:
        """The steps that read ``name`` directly, in order."""
        return self._readers[name]

    def descendants(self, names: Iterable[str]) -> frozenset[str]:
        """Everything that ``names`` reach, themselves left out unless one reaches another."""
        sources = frozenset(names)
        if sources not in self._below:
            reached: set[str] = set()
            for row in self._steps.values():
                if any(need in sources or need in reached for need in row.needs):
                    reached.add(row.name)
            self._below[sources] = frozenset(reached)
        return self._below[sources]

    @cached_property
    def key_side(self) -> frozenset[str]:
        """What keys and values are made of, and they: an edit of it at a position is seen by all later queries."""
        return frozenset(name for name in ("x_n", *self) if {"K", "V"} & ({name} | self.descendants([name])))

    def lean(self, name: str) -> Step | None:
        """The other way to ``name`` that does without some tensors, where the card has one."""
        return self._lean.get(name)


Values = dict[str, Any]
"""Name → tensor (or, for ``R``, a pair of them)."""
