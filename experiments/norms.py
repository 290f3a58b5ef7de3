"""How large every named tensor is, by block and position: rms, l2 and the largest channels.

The numbers are taken as the values pass by, one forward pass for all of them: nothing but the reductions is kept. A
tensor's size at a position is over all its other axes, heads and slots together; of ``S`` and ``A`` over the keys that
the query may see. ``experts`` holds integers and has no size; ``delta_heads`` is made only where it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.frames import frame
from experiments.prompts import Prompts
from experiments.study import activation_dtype, chosen_sites, identity
from hooks import HookedModel
from probe.card import Leaf, Step
from probe.errors import OutOfRange, UnknownTensor
from probe.sites import Site


def norms(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    channels: int = 1,
    name: str | None = None,
) -> pd.DataFrame:
    """The size of every tensor of every block, or of those named, at every real position of every prompt.

    Args:
        tensors: any spellings; None: all with a size that a forward pass makes.
        blocks: None: all that have the tensor.
        channels: how many of the largest channels to report at each position.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame with three metrics by block, tensor, prompt (``example``) and position, in the activations' own unit:
        ``rms``, ``l2``, and ``max``, one row for each of the largest channels: the signed value there, with its index
        in the last axis as ``feature``, and its ``head``, ``key`` or ``expert`` where the tensor has such an axis.

    Raises:
        UnknownTensor, OutOfRange: a tensor or block that does not exist, ``experts``, or a number of channels below 0.
    """
    if channels < 0:
        raise OutOfRange(f"channels={channels}: how many of the largest to report, 0 or more.")
    sites = [site for site in chosen_sites(model, tensors, blocks) if _has_size(model, site, asked=tensors is not None)]
    tokens, keep = prompts.batch(model.device)
    real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
    meter = _Meter(model, real, channels)
    slots = {Site(site.block, "experts") for site in sites if "k" in model.sites.node(site).shape}
    hooks: list[tuple[str | Callable[..., Any], Callable[..., Any]]] = [
        (site.hook, partial(meter.look, site)) for site in model.sites if site in {*sites, *slots}
    ]
    with torch.no_grad():
        model.run_with_hooks(tokens, keep, fwd_hooks=hooks)
    places = _places(prompts, real)
    df = pd.concat([_table(model, site, meter.sizes[site], places) for site in sites], ignore_index=True)
    common = {"model": identity(model, name), "prompts": prompts.name, "unit": "1"}
    return frame(df.assign(**common, dtype=activation_dtype(model), numerics="reference"), study="norms")


def _has_size(model: HookedModel, site: Site, *, asked: bool) -> bool:
    node = model.sites.node(site)
    if node.dtype == "int64" and asked:
        raise UnknownTensor(f"{site} holds integers, which have no size; look at gates.")
    return node.dtype != "int64" and (asked or not getattr(node, "on_request", False))


@dataclass(frozen=True)
class _Sizes:
    """Of one tensor, by prompt and position: [B T], and the largest channels, [B T channels], with where they are by
    column."""

    l2: Tensor
    rms: Tensor
    top: Tensor
    where: dict[str, Tensor]


@dataclass
class _Meter:
    """Sees each value as it passes, and keeps its sizes."""

    model: HookedModel
    real: Tensor
    channels: int
    sizes: dict[Site, _Sizes] = field(default_factory=dict)
    experts: dict[int | None, Tensor] = field(default_factory=dict)

    def look(self, site: Site, value: Tensor, hook: object) -> None:
        """A hook on a site: it looks, and leaves the value as it is."""
        if site.tensor == "experts":
            self.experts[site.block] = value
        else:
            self.sizes[site] = self._measure(self.model.sites.node(site), value, self.experts.get(site.block))

    def _measure(self, node: Step | Leaf, value: Tensor, experts: Tensor | None) -> _Sizes:
        axes = list(node.shape)
        value = value.double()
        if "T" in axes and "S" in axes:  # [B h T S]: position first, and only the keys that it sees
            visible = self.real[:, None, None, :] & torch.ones(value.shape[-2:], device=value.device).tril().bool()
            value = torch.where(visible, value, 0.0).transpose(1, 2)
            seen = visible.expand(-1, value.shape[2], -1, -1).transpose(1, 2).flatten(2).sum(-1)
            axes[1], axes[2] = axes[2], axes[1]
        flat = value.flatten(2)
        count = seen if "T" in axes and "S" in axes else flat.shape[-1]
        l2 = flat.norm(dim=-1)
        few = min(self.channels, flat.shape[-1]) if axes[-1] != "1" else 0
        index = flat.abs().topk(few, dim=-1).indices
        where = _unravel(index, axes[2:], value.shape[2:], experts)
        return _Sizes(l2, l2 / torch.as_tensor(count, device=l2.device) ** 0.5, flat.gather(-1, index), where)


def _unravel(index: Tensor, axes: Sequence[str], sizes: Sequence[int], experts: Tensor | None) -> dict[str, Tensor]:
    """A flat index over a position's axes, as the frame's columns: head, key, expert, and feature for a last axis."""
    where: dict[str, Tensor] = {}
    for axis, size in reversed(list(zip(axes, sizes, strict=True))):
        index, part = index // size, index % size
        if axis == "k":
            assert experts is not None, "the decoder makes `experts` before any tensor with slots"
            where["expert"] = experts.gather(-1, part)
        else:
            where[{"h": "head", "S": "key"}.get(axis, "feature")] = part
    return where


def _places(prompts: Prompts, real: Tensor) -> pd.DataFrame:
    """Every real position of every prompt: ``example``, ``pos``, ``token``, ``role``."""
    rows = []
    for example, prompt in enumerate(prompts.rows):
        for pos, token in enumerate(prompt.tokens):
            roles = [name for name, span in prompt.spans.items() if pos in span]
            role = ", ".join(roles) if roles else pd.NA
            rows.append({"example": example, "pos": pos, "token": prompts.tokenizer.token(token), "role": role})
    assert len(rows) == int(real.sum())
    return pd.DataFrame(rows)


def _table(model: HookedModel, site: Site, sizes: _Sizes, places: pd.DataFrame) -> pd.DataFrame:
    """The rows of one tensor: rms, l2 and its largest channels, each at every place."""
    here = tuple(np.asarray(places[name]) for name in ("example", "pos"))
    channels = range(sizes.top.shape[-1])
    values = [sizes.rms, sizes.l2, *(sizes.top[..., i] for i in channels)]
    node = model.sites.node(site)
    table = places.iloc[np.tile(np.arange(len(places)), len(values))].assign(
        metric=np.repeat(["rms", "l2", *["max" for _ in channels]], len(places)),
        value=np.concatenate([value.cpu().numpy()[here] for value in values]),
        block=site.block,
        tensor=site.tensor,
        symbol=node.symbol,
        step=float(getattr(node, "number", None) or np.nan),
    )
    sizeless = np.full(2 * len(places), np.nan)
    for name, index in sizes.where.items():
        table[name] = np.concatenate([sizeless, *(index[..., i].cpu().numpy()[here] for i in channels)])
    return table
