"""The strongest tokens: where a neuron, an expert's neuron, an expert or a direction is most active, over many texts.

Texts pass by in batches, each up to the block asked for, and only the strongest tokens so far stay: memory is that of
a batch and of ``n`` tokens a ranking, however many texts there are. A context counts once: where two texts begin
alike, what stands there is one computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.finite import telling
from experiments.frames import frame
from experiments.prompts import Prompts, padded
from experiments.study import common, direction_name, passes
from hooks import HookedModel
from hooks.edits import SCORES
from hooks.where import Mask, Place, indices, where_of
from probe import Dims
from probe.card import letters
from probe.errors import BadEdit, BadText, OutOfRange, ShapeMismatch, UnknownDim
from probe.sites import Site

NEIGHBOURS = 6
"""Tokens of context on either side."""

COLUMN = {"h": "head", "e": "expert"}
"""Axis → the frame's column; any other axis is ``feature``."""


@telling
def top(
    model: HookedModel,
    texts: Prompts | Iterable[str],
    tensor: str,
    block: int | None = None,
    *,
    where: Mapping[str, int | Sequence[int]] | None = None,
    n: int = 20,
    smallest: bool = False,
    direction: Tensor | Sequence[float] | None = None,
    batch: int = 32,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """The ``n`` tokens at which each named number of a tensor is largest, strongest first.

    ``where`` speaks in the tensor's own dims, as edits do: ``"h", 0, where={"f": 17}``, a neuron; ``"h_e", 2,
    where={"e": 5, "m": 17}``, an expert's neuron, at the tokens that chose the expert; ``"affinity", 2, where={"e":
    5}``, an expert; ``"x_next", 2, direction=v``, a direction; ``"O", 1, where={"h": 3}, direction=v``, one in a head.

    Args:
        texts: prompts, of which only the clean texts are read; or any texts, which are read as they are needed.
        tensor: any spelling; with ``block`` None, of the whole site (``blocks.0.h``).
        where: each of several has its own ranking, and a dim that isn't named stands for all of its own.
        smallest: the tokens at which it is smallest.
        direction: [width of the last axis]: the dot product with it is ranked, at the length that it has.
        batch: how many texts run together.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame, metric ``largest`` or ``smallest``, a row a token: ``example`` counts the texts, ``context`` shows what
        stands around it. A ranking is shorter where fewer tokens have the number; where none does, it is one row
        without a value.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim: no such tensor or place; T and B are what is ranked, not named.
        BadEdit: a tensor over pairs of positions, or of integers; one with slots, without its expert named by e; a
            direction that points nowhere.
        ShapeMismatch: a direction of another width.
        BadText: there is no text, or no tokenizer.
    """
    model = model.reaching(beyond)
    view = _asked(model, texts, tensor, block, where, n, direction, batch)
    site = view.site
    sign, heap, tokens = -1.0 if smallest else 1.0, None, dict[int, Sequence[int]]()
    for rows in _batches(model, texts, batch):
        ids, real = padded(list(rows.values()), model.device)
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        scores = sign * view.of(model, ids, real)[real].double().cpu().numpy()
        best = _Heap.best(scores, ids, real, first=min(rows), n=n)
        heap = best if heap is None else heap.merged(best, n)
        here = set(heap.text.ravel().tolist())
        tokens = {text: row for text, row in {**tokens, **rows}.items() if text in here}
    if heap is None:
        raise BadText("there is no text.")
    df = pd.DataFrame(_rows(model, view, heap, tokens))
    df = df.assign(value=sign * df["value"], metric="smallest" if smallest else "largest", unit="1")
    place: dict[str, Any] = {
        "tensor": site.tensor,
        "block": site.block,
        "prompts": texts.name if isinstance(texts, Prompts) else "texts",
        "within": pd.NA if direction is None else direction_name(direction),
    }
    return frame(df.assign(**common(model, name), **place), study="top")


def outlook(
    model: HookedModel,
    texts: Prompts | Iterable[str],
    tensor: str,
    block: int | None = None,
    *,
    where: Mapping[str, int | Sequence[int]] | None = None,
    n: int = 20,
    direction: Tensor | Sequence[float] | None = None,
    batch: int = 32,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `top` would take; see `experiments.study.passes`. A pass ends at the block that is asked for."""
    model = model.reaching(beyond)
    view = _asked(model, texts, tensor, block, where, n, direction, batch)
    batches = [padded(list(rows.values()), model.device) for rows in _batches(model, texts, batch)]
    if not batches:
        raise BadText("there is no text.")
    part = (1 + model.sites.depth(view.site)) / (1 + model.dims.blocks)
    return passes(model, batches, len(view.what), min(1.0, part), timed=timed)


def _asked(
    model: HookedModel,
    texts: Prompts | Iterable[str],
    tensor: str,
    block: int | None,
    where: Mapping[str, int | Sequence[int]] | None,
    n: int,
    direction: Tensor | Sequence[float] | None,
    batch: int,
) -> _View:
    """What is ranked; and whether there is anything to rank it by."""
    if isinstance(texts, str):
        raise BadText("texts are several, of which this would be the letters; put it in a list.")
    if n < 1 or batch < 1:
        raise OutOfRange(f"n={n}, batch={batch}: at least one token is ranked, and one text run.")
    site = model.sites.find(tensor if block is None else f"blocks.{block}.{tensor}")
    return _view(model, site, direction, where or {})


def _batches(model: HookedModel, texts: Prompts | Iterable[str], batch: int) -> Iterator[dict[int, Sequence[int]]]:
    """Text → its tokens, so many at a time."""
    if model.tokenizer is None:
        raise BadText("this model has no tokenizer, and contexts are shown as text.")
    rows = (p.tokens for p in texts.rows) if isinstance(texts, Prompts) else map(model.tokenizer.encode, texts)
    numbered = enumerate(rows)
    while some := dict(islice(numbered, batch)):
        yield some


# ---- what is ranked --------------------------------------------------------------------------------------------------


class _View(NamedTuple):
    """The numbers of a site that are ranked, K at each position.

    Attributes:
        experts: those whose slots are looked at; None: the tensor has no slots.
        places: along each axis of a position (slots apart), which are taken.
        direction: along the last axis, in place of its places.
        what: of each of the K, its columns in the frame.
    """

    site: Site
    experts: list[int] | None
    places: list[list[int]]
    direction: Tensor | None
    what: list[dict[str, int]]

    def of(self, model: HookedModel, tokens: Tensor, keep: Tensor) -> Tensor:
        """[B T K]; NaN where a token did not choose the expert."""
        held: list[Tensor] = []
        reduce: dict[Site, Any] = {self.site: lambda value: self._taken(value, *held)}
        if self.experts is not None:
            reduce = {Site(self.site.block, "experts"): held.append, **reduce}  # made before any tensor with slots
        made: Tensor = model.run(tokens, keep, want=None, reduce=reduce).cache.reduced[self.site]
        return made

    def _taken(self, value: Tensor, experts: Tensor | None = None) -> Tensor:
        if experts is None:
            return self._picked(value)
        assert self.experts is not None, "then experts are not looked at"
        parts = []
        for e in self.experts:
            chosen = experts == e
            slot = chosen.to(torch.uint8).argmax(-1)
            part = self._picked(value[torch.arange(len(value))[:, None], torch.arange(value.shape[1]), slot])
            parts.append(part.masked_fill(~chosen.any(-1, keepdim=True), torch.nan))
        return torch.cat(parts, dim=-1)

    def _picked(self, value: Tensor) -> Tensor:
        value = value.float()
        if self.direction is not None:
            value = (value @ self.direction.to(value.device))[..., None]
        for axis, places in enumerate(self.places, 2):
            value = value.index_select(axis, torch.tensor(places, device=value.device))
        return value.reshape(*value.shape[:2], -1)


def _view(
    model: HookedModel, site: Site, direction: Tensor | Sequence[float] | None, where: Mapping[str, int | Sequence[int]]
) -> _View:
    node, dims = model.sites.node(site), model.dims
    if site.tensor in SCORES or node.dtype == "int64":
        raise BadEdit(f"{site} has no number at a position: rank O or V of a head, affinity or gates of an expert.")
    axes, slots = [letters(axis) for axis in node.shape[2:] if axis != "k"], "k" in node.shape
    named = dict(where_of(where))
    along = axes[-1] if direction is not None else ()  # the last axis is summed over
    known = ["e"] * slots + [dim for axis in axes for dim in axis if dim != "1" and dim not in along]
    if unknown := [dim for dim in named if dim not in known]:
        raise UnknownDim(f"{site}: {unknown[0]} can't be named here; what can is {', '.join(known) or 'nothing'}.")
    if slots and "e" not in named:
        raise BadEdit(f"{site} has slots, whose order means nothing: name the expert, e=.")
    chosen = {"1": [0], **{dim: _numbers(named.get(dim), dims.size(dim), f"{site}: {dim}") for dim in known}}
    if direction is not None:
        direction = torch.as_tensor(direction, dtype=torch.float32)
        if direction.shape != (width := dims.size(node.shape[-1]),):
            raise ShapeMismatch(f"{site}: the direction is {list(direction.shape)}; the last axis is {width} wide.")
        if not direction.isfinite().all() or not direction.any():
            raise BadEdit(f"{site}: the direction is zero, or not finite: it points nowhere, and nothing is largest.")
        axes = axes[:-1]
    places = [_flat(axis, chosen, dims) for axis in axes]
    names = [COLUMN.get(axis[0], "feature") if len(axis) == 1 else "feature" for axis in axes]
    experts = chosen["e"] if slots else None
    what = [
        {**({} if experts is None else {"expert": e}), **dict(zip(names, at, strict=True))}
        for e in experts or [0]
        for at in product(*places)
    ]
    return _View(site, experts, places, direction, what)


def _numbers(place: Place | None, size: int, what: str) -> list[int]:
    assert not isinstance(place, str | Mask), "those are of positions"
    return list(range(size) if place is None else dict.fromkeys(indices(place, size, what)))


def _flat(axis: Sequence[str], chosen: Mapping[str, list[int]], dims: Dims) -> list[int]:
    """The places along a composite axis, ``(h n)``."""
    flat = [0]
    for dim in axis:
        flat = [i * (1 if dim == "1" else dims.size(dim)) + j for i in flat for j in chosen[dim]]
    return flat


# ---- the strongest so far --------------------------------------------------------------------------------------------


class _Heap(NamedTuple):
    """At most n tokens for each of K rankings, [n K] each, strongest first.

    Attributes:
        score: -inf where there is none.
        context: a number for all that stands before the token, and itself.
        text, pos: where it is.
    """

    score: NDArray[np.float64]
    context: NDArray[np.uint64]
    text: NDArray[np.intp]
    pos: NDArray[np.intp]

    @classmethod
    def best(cls, scores: NDArray[np.float64], ids: Tensor, real: Tensor, first: int, n: int) -> _Heap:
        """Of a batch: scores [N K] of its real tokens, in order, NaN where there is none."""
        contexts = _contexts(ids.cpu().numpy())[real.cpu().numpy()]
        _, once = np.unique(contexts, return_index=True)
        text, pos = (index.cpu().numpy()[once] for index in real.nonzero(as_tuple=True))
        seen = np.where(np.isnan(scores[once]), -np.inf, scores[once])
        order = torch.from_numpy(seen).topk(min(n, len(once)), dim=0).indices.numpy()
        return cls(np.take_along_axis(seen, order, 0), contexts[once][order], text[order] + first, pos[order])

    def merged(self, more: _Heap, n: int) -> _Heap:
        """With others, of which those that are here already are left out."""
        again = (more.context[:, None] == self.context[None]) & (self.score[None] > -np.inf)
        more = more._replace(score=np.where(again.any(1), -np.inf, more.score))
        joined = [np.concatenate(pair) for pair in zip(self, more, strict=True)]
        order = np.argsort(-joined[0], axis=0, kind="stable")[:n]
        return _Heap(*(np.take_along_axis(part, order, 0) for part in joined))


def _contexts(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[B T]: a number for each context, equal for equal ones; of two others it is so once in 2^64."""
    found, made = np.zeros(ids.shape, dtype=np.uint64), np.zeros(len(ids), dtype=np.uint64)
    for t in range(ids.shape[1]):
        made = (made ^ (ids[:, t].astype(np.uint64) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
        found[:, t] = made
    return found


def _rows(
    model: HookedModel, view: _View, heap: _Heap, tokens: Mapping[int, Sequence[int]]
) -> Iterator[dict[str, Any]]:
    assert model.tokenizer is not None, "_batches saw to it"
    for k, what in enumerate(view.what):
        for score, text, pos in zip(heap.score[:, k], heap.text[:, k], heap.pos[:, k], strict=True):
            if score > -np.inf:
                words = [model.tokenizer.token(id) for id in tokens[text]]
                before, after = words[max(0, pos - NEIGHBOURS) : pos], words[pos + 1 : pos + 1 + NEIGHBOURS]
                around = " ".join([*before, f"⟦{words[pos]}⟧", *after])
                yield {**what, "example": text, "pos": pos, "token": words[pos], "context": around, "value": score}
        if not (heap.score[:, k] > -np.inf).any():
            yield {**what, "value": np.nan}
