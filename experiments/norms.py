"""How large every named tensor is, by block and position: rms, l2 and the largest channels; how the residual stream
grows, which channels of it are massive, and how much attention rests at the first position.

The numbers are taken as the values pass by, one forward pass for all of them: nothing but the reductions is kept, and
scores and patterns exist for a chunk of queries at a time. A tensor's size at a position is over all its other axes,
heads and slots together; of ``S`` and ``A`` over the keys that the query may see. ``experts`` holds integers and has no
size; ``delta_heads`` is made only where it is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.finite import telling
from experiments.frames import BadFrame, check_one, frame
from experiments.prompts import Prompts
from experiments.study import chosen_sites, common, passes
from hooks import HookedModel
from hooks.edits import SCORES
from probe.errors import OutOfRange, UnknownTensor
from probe.numerics import forbidden
from probe.sites import Site


@telling
def norms(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    channels: int = 1,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """The size of every tensor of every block, or of those named, at every real position of every prompt.

    Args:
        tensors: any spellings; None: all with a size that a forward pass makes.
        blocks: None: all that have the tensor.
        channels: how many of the largest channels to report at each position.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame by block, tensor, prompt (``example``) and position, in the activations' own unit: ``rms``, ``l2``, and
        ``max``, one row for each of the largest channels: the signed value there, with its index in the last axis as
        ``feature``, and its ``head``, ``key`` or ``expert`` where the tensor has such an axis. Besides, as ratios:

        - ``growth`` of ``x_next``, where the stream into the block was measured too: ‖x_next‖ / ‖x_n‖;
        - ``sink`` of ``A`` by head, with ``key`` 0: the attention that queries after position 0 give to it, their mean
          over a prompt; ``base`` is that of a head which sees all its keys alike. A prompt of one token has none.

    Raises:
        UnknownTensor, OutOfRange: a tensor or block that does not exist, ``experts``, or a number of channels below 0.
    """
    model = model.reaching(beyond)
    sizes, places = measure(model, prompts, _asked(model, tensors, blocks, channels), channels), _places(prompts)
    tables = [_table(model, site, size, places) for site, size in sizes.items()]
    tables += [_growth(site, size, sizes, places) for site, size in sizes.items() if site.tensor == "x_next"]
    tables += [_sink(site, size.sink, prompts) for site, size in sizes.items() if size.sink is not None]
    df = pd.concat([table.astype(object) for table in tables], ignore_index=True)
    return frame(df.assign(**common(model, name, prompts), unit="1"), study="norms")


def outlook(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    channels: int = 1,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `norms` would take; see `experiments.study.passes`."""
    model = model.reaching(beyond)
    sites = _asked(model, tensors, blocks, channels)
    return passes(model, [prompts.batch(model.device)], len(sites), timed=timed)


def _asked(
    model: HookedModel, tensors: Sequence[str] | None, blocks: Sequence[int] | None, channels: int
) -> list[Site]:
    if channels < 0:
        raise OutOfRange(f"channels={channels}: how many of the largest to report, 0 or more.")
    return sized(model, tensors, blocks)


def massive(df: pd.DataFrame, n: int = 10) -> pd.DataFrame:
    """The massive activations: of each place of the residual stream in a frame of `norms` with channels, the ``n``
    channels that are largest anywhere, each at its largest, metric ``massive``.

    ``base`` is the place's typical size: the median rms of positions after 0. No threshold is drawn (Sun et al.,
    Massive Activations in Large Language Models, 2024, call a value massive above 100 and a thousand times the median).
    ``n`` counts the prompts that have the channel among their largest at that position.

    Raises:
        BadFrame: the frame has no channels of the residual stream, or is of several models or sets of prompts.
    """
    from experiments.plots import RESIDUAL

    check_one(df)
    here = df[df["tensor"].isin(list(RESIDUAL))]
    top = here[here["metric"] == "max"]
    if not len(top):
        raise BadFrame("no channels of the residual stream to rank: take norms of x_n, x_mid or x_next, channels=1.")
    site, channel = ["block", "tensor"], ["block", "tensor", "feature"]
    typical = here[(here["metric"] == "rms") & (here["pos"] > 0)].groupby(site, observed=True)["value"].median()
    top = top.assign(size=top["value"].abs()).sort_values("size", ascending=False, kind="stable")
    prompts = top.groupby([*channel, "pos"], observed=True)["example"].nunique().rename("n")
    ranked = top.drop_duplicates(channel).groupby(site, observed=True).head(n)
    made = ranked.drop(columns=["size", "base", "n"], errors="ignore").join(prompts, on=[*channel, "pos"])
    return frame(made.join(typical.rename("base"), on=site).assign(metric="massive"), study="norms")


def sized(model: HookedModel, tensors: Sequence[str] | None = None, blocks: Sequence[int] | None = None) -> list[Site]:
    """The sites that are measured; as `norms` takes them.

    Raises:
        UnknownTensor, OutOfRange: as `norms`.
    """
    found = []
    for site in chosen_sites(model, tensors, blocks):
        node = model.sites.node(site)
        if node.dtype == "int64" and tensors is not None:
            raise UnknownTensor(f"{site} holds integers, which have no size; look at gates.")
        if node.dtype != "int64" and (tensors is not None or not getattr(node, "on_request", False)):
            found.append(site)
    return found


class Sizes(NamedTuple):
    """Of one tensor, by prompt and position.

    Attributes:
        l2, rms: [B T], fp64.
        top: [B T channels], the largest; ``where``: column of the frame → where they are, [B T channels].
        sink: [B h T], of ``A``: what each query gives to position 0.
    """

    l2: Tensor
    rms: Tensor
    top: Tensor
    where: dict[str, Tensor]
    sink: Tensor | None


def measure(model: HookedModel, prompts: Prompts, sites: Sequence[Site], channels: int = 0) -> dict[Site, Sizes]:
    """The sizes of these tensors, in one pass."""
    tokens, keep = prompts.batch(model.device)
    slots = {Site(site.block, "experts") for site in sites if "k" in model.sites.node(site).shape}
    reduce: dict[Site, Callable[[Tensor], Any]] = dict.fromkeys(slots, torch.clone)
    for site in sites:
        most = 0 if model.sites.node(site).shape[-1] == "1" else channels
        reduce[site] = partial(_of_pairs if site.tensor in SCORES else _of_rows, most)
    made = model.run(tokens, keep, want=None, reduce=reduce).cache.reduced
    found = {}
    for site in sites:
        l2, top, index, *sink = made[site]
        if site.tensor in SCORES:
            l2, top, index = l2[:, 0], top.movedim(1, -1), index.movedim(1, -1)
        axes = _rest(model, site, tokens.shape[1])
        count = torch.tensor(math.prod(axes.values()), device=l2.device)
        if site.tensor in SCORES:  # the keys up to the query
            count = model.dims.h * torch.arange(1, tokens.shape[1] + 1, device=l2.device)
        where = _unravel(index, axes, made[Site(site.block, "experts")] if "k" in axes else None)
        found[site] = Sizes(l2, l2 / count**0.5, top, where, sink[0] if site.tensor == "A" else None)
    return found


def _rest(model: HookedModel, site: Site, length: int) -> dict[str, int]:
    """The axes of a position, with their sizes."""
    shape = model.sites.node(site).shape
    axes = ("h", "S") if site.tensor in SCORES else shape[2:]
    return {axis: length if axis == "S" else 1 if axis == "1" else model.dims.size(axis) for axis in axes}


def _of_rows(channels: int, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of [B T ...]: l2, [B T]; the largest numbers, and where they are among those of their position, [B T n]."""
    flat = value.flatten(2)
    l2 = torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64)
    index = flat.abs().topk(min(channels, flat.shape[-1]), dim=-1).indices
    return l2, flat.gather(-1, index).double(), index  # numpy knows no bf16


def _of_pairs(channels: int, value: Tensor) -> tuple[Tensor, ...]:
    """The same of a chunk of queries, [B h t S], over the keys that they see; and what they give to the first, [B h t].
    Queries stay on axis 2, where chunks are joined."""
    seen = torch.where(value <= forbidden(value.dtype) / 2, 0.0, value)  # what is NaN stays so
    l2, top, index = _of_rows(channels, seen.transpose(1, 2))
    return l2[:, None], top.movedim(-1, 1), index.movedim(-1, 1), value[..., 0]


def _unravel(index: Tensor, axes: dict[str, int], experts: Tensor | None) -> dict[str, Tensor]:
    """A flat index over a position's axes, as the frame's columns: head, key, expert, and feature for a last axis."""
    where: dict[str, Tensor] = {}
    for axis, size in reversed(axes.items()):
        index, part = index // size, index % size
        if axis == "k":
            assert experts is not None, "`measure` asks for them"
            where["expert"] = experts.gather(-1, part)
        elif axis != "1":
            where[{"h": "head", "S": "key"}.get(axis, "feature")] = part
    return where


def _places(prompts: Prompts) -> pd.DataFrame:
    """Every real position of every prompt: ``example``, ``pos``, ``token``, ``role``."""
    rows = []
    for example, prompt in enumerate(prompts.rows):
        for pos, token in enumerate(prompt.tokens):
            roles = [name for name, span in prompt.spans.items() if pos in span]
            role = ", ".join(roles) if roles else pd.NA
            rows.append({"example": example, "pos": pos, "token": prompts.tokenizer.token(token), "role": role})
    return pd.DataFrame(rows)


def _table(model: HookedModel, site: Site, sizes: Sizes, places: pd.DataFrame) -> pd.DataFrame:
    """The rows of one tensor: rms, l2 and its largest channels, each at every place."""
    channels = range(sizes.top.shape[-1])
    values = [sizes.rms, sizes.l2, *(sizes.top[..., i] for i in channels)]
    node = model.sites.node(site)
    table = places.iloc[np.tile(np.arange(len(places)), len(values))].assign(
        metric=np.repeat(["rms", "l2", *["max" for _ in channels]], len(places)),
        value=np.concatenate([_at(value, places) for value in values]),
        block=site.block,
        tensor=site.tensor,
        symbol=node.symbol,
        step=float(getattr(node, "number", None) or np.nan),
    )
    sizeless = np.full(2 * len(places), np.nan)
    for name, index in sizes.where.items():
        table[name] = np.concatenate([sizeless, *(_at(index[..., i], places) for i in channels)])
    return table[~(table["key"] > table["pos"])] if "key" in table else table  # some queries see few keys


def _at(value: Tensor, places: pd.DataFrame) -> NDArray[Any]:
    """[B T] as one number a place."""
    return np.asarray(value.cpu().numpy()[places["example"], places["pos"]])


def _growth(site: Site, out: Sizes, sizes: Mapping[Site, Sizes], places: pd.DataFrame) -> pd.DataFrame:
    """By how much a block makes the stream longer, where what goes into it was measured."""
    assert site.block is not None, "x_next is a block's"
    into = sizes.get(Site(site.block, "x_n"), sizes.get(Site(site.block - 1, "x_next")))
    if into is None:
        return places[:0]
    return places.assign(metric="growth", value=_at(out.l2 / into.l2, places), block=site.block, tensor=site.tensor)


def _sink(site: Site, given: Tensor, prompts: Prompts) -> pd.DataFrame:
    """What each head's queries, the first apart, give to position 0."""
    rows = []
    for example, prompt in enumerate(prompts.rows):
        queries = range(1, len(prompt.tokens))
        even = float(np.mean([1 / (pos + 1) for pos in queries])) if queries else np.nan
        for head, value in enumerate(given[example, :, list(queries)].double().mean(-1).tolist()):
            rows.append({"example": example, "head": head, "value": value, "base": even})
    return pd.DataFrame(rows).dropna().assign(metric="sink", key=0, block=site.block, tensor=site.tensor)
