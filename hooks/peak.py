"""The bytes that a sweep takes at most beside the weights, from its plans, before it starts.

A value is alive until its last reader is done, and so are the copies that a step makes while it runs. What each step
takes for a row is seen once, on tensors without storage; how many rows there are is for the sweep to say.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hooks.attend import attention_bytes
from probe.card import Card, Step, letters
from probe.dims import Dims
from probe.engine import Numerics, Plan, compute
from probe.leaves import FP32
from probe.numerics import QUERY_CHUNK, Rotation
from probe.weights import weight_shape

Numbers = npt.NDArray[np.float64]

ROWS = 64
"""Rows that a step is tried on."""

ENTERING = 5
"""Copies of an edited tensor's rows while edits act: old, new, taken, joined, and where they go."""

HEAP = 1.1
"""Bytes of the process for a byte that is alive: blocks of ever other sizes leave gaps."""

LAYOUT = 33
"""Bytes that layouts take for each position of a world."""


class Kind(NamedTuple):
    """Parts of a walk that take the same for a row.

    Attributes:
        stored: the dtype of weights.
        lasting: tensors that stay after their last reader.
    """

    todo: Plan
    dims: Dims
    stored: torch.dtype
    numerics: Numerics
    lasting: frozenset[str]

    @property
    def act(self) -> torch.dtype:
        """The dtype of activations."""
        return torch.float32 if self.numerics == "careful" else self.stored

    def width(self, name: str) -> int:
        """Bytes of a tensor's row."""
        return row_bytes(self.todo.card, name, self.dims, self.act)

    def group(self, name: str) -> int:
        """Which of a cell's rows a tensor has; see `Load.rows`."""
        card = self.todo.card
        if "O" not in card or name == "O" or name in card.descendants(["O"]):
            return 2
        return 0 if name in card.key_side else 1


class Load(NamedTuple):
    """What runs in a part.

    Attributes:
        rows: [3], a batch of cells': of tensors that keys and values are made of, and they; of others before attention;
            of those from attention on.
        entering: name → rows on which edits of it act.
        roots: rows of base and sources.
        batches: how many there are; base and sources are made with the first and stay for the last.
        prompts, length: of the base.
        worlds: cells of the batch × prompts.
        attended: bytes of the cells' attention at one time.
        fixed: other bytes: of whole values of base and sources, of scores and edited weights that are made whole.
    """

    rows: Numbers
    entering: Mapping[str, int]
    roots: int
    batches: int
    prompts: int
    length: int
    worlds: int
    attended: float = 0.0
    fixed: int = 0


def peak(kind: Kind, load: Load) -> int:
    """The most bytes that are alive at one time in a part."""
    spent, names = _spent(kind), [row.name for row in kind.todo.steps]
    if not names:  # where the last thing looked at is what enters a block, nothing is made of it
        return int(HEAP * load.fixed)
    alive = spent.cells @ load.rows + load.fixed + load.worlds * load.length * LAYOUT
    making, entering, of_roots = (np.zeros_like(alive) for _ in range(3))
    if len(set(load.rows)) > 1:
        making += spent.gathered * load.rows[2]
    if "O" in names:
        making[names.index("O")] += load.attended
        of_roots[names.index("O")] = _attention_of_roots(kind.dims, load)
    for name, rows in load.entering.items():
        entering[names.index(name) if name in names else 0] += ENTERING * kind.width(name) * rows
    copies = np.maximum(making, entering)  # one after the other
    first = alive + np.maximum(copies, of_roots)
    if load.batches == 1:
        return int(HEAP * (first + load.roots * spent.alone).max())
    later = alive + copies + load.roots * (spent.last if load.batches == 2 else spent.last.max())
    return int(HEAP * max((first + load.roots * spent.first).max(), later.max()))


def _attention_of_roots(dims: Dims, load: Load) -> float:
    """Made as a plain run makes it, in chunks of queries of all prompts; keys and values of several are copied."""
    queries = load.prompts * min(load.length, QUERY_CHUNK)
    copied = load.prompts * load.length / 2 if load.prompts > 1 else 0
    return float(attention_bytes(queries, load.length, copied, dims.h * (dims.q + dims.v), dims.h))


class _Spent(NamedTuple):
    """Bytes a row, step by step.

    Attributes:
        cells: [steps, 3], alive while the step is made, by `Kind.group`.
        gathered: [steps], copied where a step from attention on reads rows from before it, which are not the same.
        alone, first, last: [steps], of base and sources: where they go on with the one batch; where nothing of them is
            dropped; where all is made and these steps drop it.
    """

    cells: Numbers
    gathered: Numbers
    alone: Numbers
    first: Numbers
    last: Numbers


@lru_cache(maxsize=64)
def _spent(kind: Kind) -> _Spent:
    todo, made = kind.todo, _tried(kind)
    steps = len(todo.steps)
    cells, gathered = np.zeros((steps, 3)), np.zeros(steps)
    alone, first, last = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    dropped = {name: i for i, drops in enumerate(todo.drops) for name in drops if name not in kind.lasting}
    begun = dict.fromkeys(todo.taken, 0) | {row.name: i for i, row in enumerate(todo.steps)}
    end: dict[str, int] = {}
    for name, one in made.items():
        end[one.owner] = max(end.get(one.owner, 0), dropped.get(name, steps - 1))
    for name, i in end.items():
        cells[begun[name] : i + 1, kind.group(name)] += made[name].own
        alone[begun[name] : i + 1] += made[name].own
        first[begun[name] :] += made[name].own
        last[: i + 1] += made[name].own
    for i, row in enumerate(todo.steps):
        cells[i, kind.group(row.name)] += made[row.name].extra
        alone[i] += made[row.name].extra
        first[i] += made[row.name].extra
        if kind.group(row.name) == 2:  # of keys and values attention takes the rows that there are
            other = (
                need for need in row.needs if need in made and kind.group(need) in ((1,) if row.name == "O" else (0, 1))
            )
            gathered[i] = sum(map(kind.width, other))
    return _Spent(cells, gathered, alone, first, last)


# ---- what a step takes -----------------------------------------------------------------------------------------------


def row_bytes(card: Card, name: str, dims: Dims, act: torch.dtype) -> int:
    """Bytes of one row of a tensor; of scores, of one pair."""
    node = card.node(name)
    sizes = [dims.size(letter) for axis in node.shape for letter in letters(axis) if letter not in ("B", "T", "S", "1")]
    return {"act": act.itemsize, "fp32": 4, "int64": 8}[node.dtype] * math.prod(sizes)


class _Made(NamedTuple):
    """What a value takes for a row, in bytes: of its own (none where it is a view of ``owner``'s), and beside it while
    it is made."""

    owner: str
    own: float
    extra: float


def _tried(kind: Kind) -> dict[str, _Made]:
    """Every step of a plan on `ROWS` rows without storage."""
    todo, dims = kind.todo, kind.dims
    values: dict[str, Any] = {}
    made: dict[str, _Made] = {}
    owners: dict[int, str] = {}

    def empty(name: str) -> Tensor:
        node = todo.card.node(name)
        dtype = {"act": kind.act, "fp32": torch.float32, "int64": torch.int64}
        kinds = torch.int64 if name == "tokens" else dtype[node.dtype]
        sizes = [ROWS if axis in "TS" else 1 if axis in "B1" else dims.size(axis) for axis in node.shape]
        return torch.zeros(
            sizes, dtype=kinds, device="meta"
        )  # a stand-in for a device may hold numbers: ids must be some

    def take(name: str, value: Tensor, peak: float) -> None:
        storage = value.untyped_storage()
        owner = owners.setdefault(storage._cdata, name)
        own = storage.nbytes() / ROWS if owner == name else 0.0
        values[name], made[name] = value, _Made(owner, own, max(0.0, peak - own))

    for name in todo.taken:
        if name == "R":
            half = torch.empty(1, ROWS, dims.r // 2, dtype=kind.act, device="meta")
            values[name] = Rotation(half, half)
        elif name != "M":
            take(name, empty(name), 0.0)
    for row in todo.steps:
        if row.name == "O":
            take(row.name, empty(row.name), 0.0)
        elif any(need in todo.card.leaves and todo.card.leaves[need].routed for need in row.needs):
            value = empty(row.name)
            take(row.name, value, value.nbytes / ROWS + _routed(kind, row))
        else:
            args = [_argument(kind, need, values) for need in row.needs]
            with _Meter() as meter:
                value = compute(row, args, todo.card.leaves, kind.numerics)
            take(row.name, value, meter.most / ROWS)
    return made


def _argument(kind: Kind, need: str, values: Mapping[str, Any]) -> Any:
    if need in values:
        return values[need]
    if need in ("dims", "dt", "show"):
        return {"dims": kind.dims, "dt": kind.act, "show": None}[need]
    leaf = kind.todo.card.leaves[need]
    if leaf.kind == "constant":
        return getattr(kind.dims, need)
    dtype = torch.float32 if need in FP32 else kind.stored
    return torch.empty(weight_shape(leaf, kind.dims), dtype=dtype, device="meta")


def _routed(kind: Kind, row: Step) -> float:
    """What products with chosen experts' weights take beside their value, for a row: which experts are chosen is not
    known, and the busiest is taken to have twice its share."""
    dims, act = kind.dims, kind.act.itemsize
    sorting = dims.k * (8 + 8 + 8)
    if row.without:  # one expert after the other, summed in fp32
        busy = min(1.0, 2 * dims.k / dims.e)
        summed = 4 * dims.d if kind.act != torch.float32 else 0
        return sorting + summed + busy * act * (2 * dims.d + 3 * dims.m)
    read = next(need for need in row.needs if need in kind.todo.card and need != "experts")
    rows = kind.width(read) * (1 if "k" in kind.todo.card.shape(read) else dims.k)
    return sorting + rows + kind.width(row.name)


class _Meter(TorchDispatchMode):
    """Counts the bytes of tensors that are made under it, for as long as they are alive; ``most`` at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {part.untyped_storage()._cdata for part in tree_iter((args, kwargs)) if isinstance(part, Tensor)}
        made = func(*args, **(kwargs or {}))
        for part in tree_iter(made):
            if isinstance(part, Tensor) and (key := part.untyped_storage()._cdata) not in given | self.alive.keys():
                self.alive[key] = part.untyped_storage().nbytes()
                weakref.finalize(part.untyped_storage(), self.alive.pop, key, None)
        self.most = max(self.most, sum(self.alive.values()))
        return made
