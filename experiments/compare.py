"""Two checkpoints side by side: how far apart their weights, the sizes of their activations and their routing are.

Weights are compared tensor by tensor, of routed experts expert by expert, in slices: nothing larger than one tensor of
each model is in memory. With prompts, both models run on the same tokens; in every row ``base`` is the first model's
number, ``value`` the second's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.fingerprint import fingerprint
from experiments.finite import telling
from experiments.frames import frame, join
from experiments.norms import measure, sized
from experiments.options import Keeping
from experiments.prompts import Prompts
from experiments.routing import by_prompt, moe_blocks
from experiments.stats import Numbers, known, summary
from experiments.study import activation_dtype, common, passes
from hooks import HookedModel
from probe import Drawn, Weights, account
from probe.dims import DIMS
from probe.errors import BadText, ProbeError
from probe.weights import weight_sites

SLICE = 2**22
"""Numbers that are compared at a time, in fp64."""


CONSTANTS = ("eps", "scaling", "norm_topk", "n_group", "topk_group", "theta", "yarn", "tied", "max_positions")
"""What two models of equal sizes may still differ in."""


class Unequal(ProbeError, ValueError):
    """Two models whose tensors cannot be laid side by side."""


@telling
def compare(
    first: HookedModel,
    second: HookedModel,
    prompts: Prompts | None = None,
    *,
    beyond: bool = False,
    names: tuple[str | None, str | None] = (None, None),
) -> pd.DataFrame:
    """The differences of two models of equal dims, in one frame.

    Of every weight (``tensor``; ``block``; ``expert`` NA: over all), as ``value``:

    - ``relative_change``: ‖second − first‖ / ‖first‖, Frobenius; NA where the first is zero and the second isn't;
    - ``cosine``: of the two as vectors; NA where one is zero;
    - ``largest_change``: the largest absolute difference of an entry.

    With prompts, prompt by prompt and then averaged over groups, as ``value``, ``base`` and ``effect`` with interval:

    - ``rms`` of every tensor of every block: the median over a prompt's positions, and at ``pos`` 0;
    - ``load`` of every expert: the share of a prompt's tokens that choose it;
    - ``agreement`` of the chosen experts: |first ∩ second| / k, each model on its own stream; ``base`` is 1;
    - ``agreement_same_stream``: the same, with the second's block run alone on the first's stream. What it lacks to 1
      is the block's own doing; what ``agreement`` lacks more came with the stream.

    Where the two differ in constants (eps, theta …), ``attrs["constants"]`` has both values of each. The same weights
    may run in two precisions: what differs then is the drift that rounding makes, and ``dtype`` and ``numerics`` name
    both.

    Args:
        prompts: None: weights only.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        names: of the two, for the column ``model``.

    Raises:
        Unequal: the two differ in a dim, in which blocks are MoE, or both in weights and in dtype or numerics; the
            message names it.
        BadText: a token of these prompts is another one to a tokenizer of the two.
    """
    first, second = first.reaching(beyond), second.reaching(beyond)
    check_alike(first, second)
    ours, theirs = (common(model, name) for model, name in zip((first, second), names, strict=True))
    both = {key: f"{one} → {theirs[key]}" for key, one in ours.items() if key == "model" or one != theirs[key]}
    parts = [frame(_weights(first.decoder.weights, second.decoder.weights), study="compare")]
    if prompts is not None:
        for model in (first, second):
            _check_tokens(model, prompts)
        parts.append(frame(_norms(first, second, prompts), study="compare"))
        if any(first.dims.moe):
            parts.append(frame(_routing(first, second, prompts), study="compare"))
        parts = [parts[0], *(part.assign(prompts=prompts.name) for part in parts[1:])]
    df = frame(join(*parts).assign(**ours | both), study="compare")
    df.attrs["constants"] = {
        name: [str(getattr(model.dims, name)) for model in (first, second)]
        for name in CONSTANTS
        if getattr(first.dims, name) != getattr(second.dims, name)
    }
    return df


def outlook(
    first: HookedModel,
    second: HookedModel,
    prompts: Prompts | None = None,
    *,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `compare` would take; see `experiments.study.passes`. A cell is a weight, and with prompts each tensor whose
    size is measured; passes are both models' for sizes and for routing, and the second's blocks on the first's
    stream."""
    first, second = first.reaching(beyond), second.reaching(beyond)
    check_alike(first, second)
    weights = len(list(weight_sites(first.dims)))
    reading = _seconds(first, second) if timed else math.nan
    if prompts is None:
        return {"cells": float(weights), "forwards": 0.0, "seconds": reading}
    for model in (first, second):
        _check_tokens(model, prompts)
    forwards = 5.0 if any(first.dims.moe) else 2.0
    found = passes(first, [prompts.batch(first.device)], weights + len(sized(first)), forwards, timed=timed)
    return {**found, "seconds": found["seconds"] + reading}


def _seconds(first: HookedModel, second: HookedModel) -> float:
    """How long all weights would take, by the embedding's."""
    start = time.perf_counter()
    W_E, other = (model.decoder.weights.read(None, "W_E") for model in (first, second))
    _Sums.of(W_E, other)
    return (time.perf_counter() - start) / W_E.numel() * account(first.dims).total


RANDOM = "random"
"""What stands for a second checkpoint where it is weights of the same sizes that nobody has trained."""


def load_second(first: HookedModel, second: str | Path, keep: Keeping = "disk") -> HookedModel:
    """What a model is held against, in its dtype and numerics: a checkpoint directory's weights, or `RANDOM` ones."""
    dtype, numerics = getattr(torch, activation_dtype(first)), first.decoder.numerics
    if str(second) == RANDOM:
        return HookedModel(Drawn(first.dims, 0, dtype, first.device), first.tokenizer, numerics)
    return HookedModel.load(second, dtype, first.device, keep=keep, numerics=numerics)


def load_both(
    first: str | Path,
    second: str | Path,
    dtype: torch.dtype | None = None,
    keep: Keeping = "disk",
    second_dtype: torch.dtype | None = None,
) -> tuple[HookedModel, HookedModel]:
    """Two checkpoint directories, or one and `RANDOM`; both in fp32, where left alone they would run in two dtypes.

    Args:
        second_dtype: the second's, where it is another than the first's.

    Raises:
        Unequal: a dtype of their own for `RANDOM` weights, which can't be the first's.
    """
    one = HookedModel.load(first, dtype, keep=keep)
    if str(second) == RANDOM:
        if second_dtype is not None:
            raise Unequal(f"{RANDOM} weights are drawn in the first model's dtype; another goes with a directory.")
        return one, load_second(one, second)
    other = HookedModel.load(second, second_dtype or dtype, keep=keep)
    if second_dtype is None and activation_dtype(one) != activation_dtype(other):
        one, other = (HookedModel.load(directory, torch.float32, keep=keep) for directory in (first, second))
    return one, other


def check_alike(first: HookedModel, second: HookedModel) -> None:
    """Refuse two models of other sizes; or of other weights in other numerics, where rounding would pass for theirs.

    Raises:
        Unequal: names the dim.
    """
    ours, theirs = first.dims, second.dims
    for dim in (dim for dim in DIMS if dim not in "BTS"):
        if (a := getattr(ours, dim)) != (b := getattr(theirs, dim)):
            raise Unequal(f"the first model has {dim} = {a} ({DIMS[dim]}), the second {b}; only equal sizes compare.")
    if ours.moe != theirs.moe:
        counts = [f"{sum(moe)} of {len(moe)}" for moe in (ours.moe, theirs.moe)]
        raise Unequal(f"their MoE blocks differ: {counts[0]} in the first model, {counts[1]} in the second.")
    runs = [f"{activation_dtype(model)}, {model.decoder.numerics}" for model in (first, second)]
    if runs[0] != runs[1] and not _same_weights(first.decoder.weights, second.decoder.weights):
        raise Unequal(
            f"one runs in {runs[0]}, the other in {runs[1]}, and their weights differ by more than that: load both with"
            " the same dtype and numerics."
        )


def _same_weights(first: Weights, second: Weights) -> bool:
    """Whether two models' weights are the same but for their precision: those of the same files, or equal as numbers of
    the coarser dtype."""
    if fingerprint(first) == fingerprint(second):
        return True
    for block, leaf in weight_sites(first.dims):
        for e in range(first.dims.e) if leaf.routed else [None]:
            x, y = _both(first, second, block, leaf.name, e)
            coarse = max(x.dtype, y.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            if not torch.equal(x.to(coarse), y.to(x.device, coarse)):
                return False
    return True


def _check_tokens(model: HookedModel, prompts: Prompts) -> None:
    if model.tokenizer is None:
        return
    for id in {id for prompt in prompts.rows for id in prompt.tokens}:
        ours, theirs = (tokenizer.token(id) for tokenizer in (prompts.tokenizer, model.tokenizer))
        if ours != theirs:
            raise BadText(f"the two tokenizers differ: token {id} is {ours!r} in one and {theirs!r} in the other.")


# ---- weights ---------------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """Of two tensors x and y: Σx², Σy², Σxy, Σ(y − x)², max |y − x|."""

    xx: float
    yy: float
    xy: float
    dd: float
    most: float

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> _Sums:
        rows = max(1, SLICE // max(1, x[0].numel()))
        return cls.joined([cls._of(*parts) for parts in zip(x.split(rows), y.split(rows), strict=True)])

    @classmethod
    def _of(cls, x: Tensor, y: Tensor) -> _Sums:
        x, y = x.double(), y.double().to(x.device)
        d = y - x
        return cls(*(float(n) for n in ((x * x).sum(), (y * y).sum(), (x * y).sum(), (d * d).sum(), d.abs().max())))

    @classmethod
    def joined(cls, parts: Sequence[_Sums]) -> _Sums:
        """Of tensors put together."""
        *sums, most = np.array(parts).T
        xx, yy, xy, dd = (float(column.sum()) for column in sums)
        return cls(xx, yy, xy, dd, float(most.max()))

    def rows(self, what: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """As rows of the frame."""
        relative = 0.0 if self.dd == 0 else (self.dd / self.xx) ** 0.5 if self.xx else np.nan
        cosine = self.xy / (self.xx * self.yy) ** 0.5 if self.xx and self.yy else np.nan
        for metric, value in (("relative_change", relative), ("cosine", cosine), ("largest_change", self.most)):
            yield {**what, "metric": metric, "unit": "1", "value": value}


def _both(first: Weights, second: Weights, block: int | None, name: str, e: int | None = None) -> list[Tensor]:
    """A weight of each, or of a routed one an expert's part."""
    if e is None:
        return [weights.read(block, name) for weights in (first, second)]
    return [weights.read(block, name, [e])[0] for weights in (first, second)]


def _weights(first: Weights, second: Weights) -> Iterator[dict[str, Any]]:
    for block, leaf in weight_sites(first.dims):
        what = {"block": pd.NA if block is None else block, "tensor": leaf.name}
        if not leaf.routed:
            yield from _Sums.of(*_both(first, second, block, leaf.name)).rows(what)
            continue
        experts = []
        for e in range(first.dims.e):
            experts.append(_Sums.of(*_both(first, second, block, leaf.name, e)))
            yield from experts[-1].rows({**what, "expert": e})
        yield from _Sums.joined(experts).rows(what)


# ---- activations and routing -----------------------------------------------------------------------------------------


def _norms(first: HookedModel, second: HookedModel, prompts: Prompts) -> pd.DataFrame:
    sites, groups = sized(first), [prompt.group for prompt in prompts.rows]
    sizes = [measure(model, prompts, sites) for model in (first, second)]
    base, value = (np.stack([size[site].rms.cpu().numpy() for site in sites]) for size in sizes)
    lengths = [len(prompt.tokens) for prompt in prompts.rows]
    usual, was = (
        np.stack([np.median(rms[:, b, :n], axis=-1) for b, n in enumerate(lengths)], axis=-1) for rms in (value, base)
    )
    what = pd.DataFrame({"block": [s.block for s in sites], "tensor": [s.tensor for s in sites]})
    pairs = (usual, was), (value[..., 0], base[..., 0])
    typical, at_first = (what.assign(**summary(known(after, before), before, groups)) for after, before in pairs)
    parts = typical, at_first.assign(pos=0)
    return pd.concat([part.astype(object) for part in parts], ignore_index=True).assign(metric="rms", unit="1")


def _routing(first: HookedModel, second: HookedModel, prompts: Prompts) -> pd.DataFrame:
    groups, e = [prompt.group for prompt in prompts.rows], first.dims.e
    ours, theirs = (model.run(*prompts.batch(model.device), want="blocks.*.experts") for model in (first, second))
    parts = []
    for block in moe_blocks(first, None):
        keep = theirs.keep
        x_n = ours["x_n", block].to(second.device, theirs["x_n", block].dtype)
        alone = second.run_block(block, x_n, keep, want="experts")
        chosen, other, same = (_chosen(run["experts", block], keep, e) for run in (ours, theirs, alone))
        shared = [by_prompt((chosen * one).sum(-1) / first.dims.k, prompts) for one in (other, same)]
        what = pd.DataFrame({"metric": ["agreement", "agreement_same_stream"], "block": block})
        parts.append(what.assign(**summary(shared, np.ones(len(groups)), groups, distance=True)))
        loads = summary(by_prompt(other, prompts), by_prompt(chosen, prompts), groups)
        parts.append(pd.DataFrame({"metric": "load", "block": block, "expert": range(e)}).assign(**loads))
    made = pd.concat([part.astype(object) for part in parts], ignore_index=True)
    return made.assign(tensor="experts", unit="1")


def _chosen(experts: Tensor, keep: Tensor | None, e: int) -> Numbers:
    """[N e]: 1 where a real token chose the expert."""
    real = experts[torch.ones(experts.shape[:2]).bool() if keep is None else keep.bool()].cpu()
    return torch.zeros(len(real), e, dtype=torch.float64).scatter(-1, real, 1.0).numpy()
