"""What studies share: which tensors a user means, what tells one model from another, how far a long run has come."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from experiments import stats
from experiments.fingerprint import BY_STAT, fingerprint
from experiments.frames import frame
from experiments.prompts import Prompts
from hooks import HookedModel, estimate
from probe.card import Leaf, Step, letters
from probe.errors import BadPath, OutOfRange, UnknownTensor, check_number, check_seed
from probe.headers import expanded
from probe.sites import Site
from probe.text import Batch

MOST_DRAWN = 100_000
"""The most draws, steps, random sets or directions that a study takes: each is a run, or many."""


def check_drawn(seed: int = 0, **counts: int) -> None:
    """Refuse a seed that is none, and counts of what is drawn beyond all use, before anything is made of them.

    Raises:
        OutOfRange: it is one.
    """
    check_seed(seed)
    for what, count in counts.items():
        if count > MOST_DRAWN:  # too few, each study refuses in its own words
            check_number(what, count, 0, MOST_DRAWN)


def chosen_blocks(model: HookedModel, blocks: Sequence[int] | None) -> list[int]:
    """The blocks asked for, in order; all, where none is.

    Raises:
        OutOfRange: one does not exist, or none is named.
    """
    if blocks is None:
        return list(range(model.dims.blocks))
    if not blocks:
        raise OutOfRange("no block is asked for: give some, or leave blocks out for all.")
    for block in blocks:
        model.sites.card(block)
    return sorted(set(blocks))


def chosen_sites(model: HookedModel, tensors: Iterable[str] | None, blocks: Sequence[int] | None) -> list[Site]:
    """The sites that ``tensors``, in any spelling, are in ``blocks``; block by block, in the card's order.

    Without ``tensors``: every tensor, but ``x_n`` only where the block before isn't asked for: ``blocks.3.x_next`` and
    ``blocks.4.x_n`` are one value. Without ``blocks``: the blocks that have the tensor. A spelling with a block in it
    stands for that block.

    Raises:
        UnknownTensor: a spelling that names no tensor of a block, or none of a block that was asked for.
        OutOfRange: a block that does not exist, or that one part of the request leaves out.
    """
    where = chosen_blocks(model, blocks)
    if tensors is None:
        named = {
            Site(i, name) for i in where for name in model.sites.card(i).hooked if name != "x_n" or i - 1 not in where
        }
    else:
        named = {site for spelling in tensors for site in _named(model, spelling, where, blocks is not None)}
    if not named:
        raise UnknownTensor("no tensor is asked for: name some, or leave tensors out for all.")
    return [site for site in model.sites if site in named]


def _named(model: HookedModel, spelling: str, where: Sequence[int], strict: bool) -> list[Site]:
    """One spelling in these blocks; ``strict``: all of them must have it."""
    if spelling.startswith(("blocks.", "model.layers.", "language_model.")):
        site = model.sites.find(spelling)
        if site.block not in where:
            raise OutOfRange(f"{site} is not in the blocks that were asked for, {', '.join(map(str, where))}.")
        return [site]
    found, missing = [], []
    for block in where:
        try:
            found.append(model.sites.find(f"blocks.{block}.{spelling}"))
        except UnknownTensor as fact:
            missing.append(fact)
    if missing and (strict or not found):
        if spelling in model.sites.around.spellings():
            raise UnknownTensor(f"{spelling!r} is outside the blocks; name a block's tensor: x_n, x_next.") from None
        raise missing[0]
    return found


def dims_of(node: Step | Leaf) -> set[str]:
    """The dim letters of a tensor, composite axes taken apart."""
    return {letter for axis in node.shape for letter in letters(axis)}


def numel(model: HookedModel, site: Site, batch: int, length: int) -> int:
    """How many numbers a tensor holds on so many rows of so many tokens."""
    sizes = {"B": batch, "T": length, "S": length, "1": 1}
    parts = [letter for axis in model.sites.node(site).shape for letter in letters(axis)]
    return math.prod(sizes[part] if part in sizes else model.dims.size(part) for part in parts)


def identity(model: HookedModel, name: str | None = None) -> str:
    """What tells a model from another in a frame: a name, and a digest of its sizes and weights, or ``by stat`` and one
    of its files' names, sizes and times; see `fingerprint`."""
    weights = fingerprint(model.decoder.weights)
    digest = hashlib.blake2s(repr(model.dims).encode() + weights.encode(), digest_size=4).hexdigest()
    return " ".join([name or "model", *([BY_STAT] if weights.startswith(BY_STAT) else []), digest])


def folder(path: str | os.PathLike[str]) -> Path:
    """A folder to write to, made where there is none; tried at once, so that a long run can't end in vain.

    Raises:
        BadPath: it can't be written.
    """
    path = expanded(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BadPath(f"can't write to {path}: {error.strerror or error}.") from None
    return path


def activation_dtype(model: HookedModel) -> str:
    """The activation dtype, as in the column ``dtype``: that of the embedding."""
    return str(model.decoder.weights.read(None, "W_E").dtype).removeprefix("torch.")


def common(model: HookedModel, name: str | None, prompts: Prompts | None = None) -> dict[str, Any]:
    """The columns of every study that say what was run: the model with its dtype and numerics, and the prompts.

    Args:
        name: of the model; see `identity`.
        prompts: None: they differ from row to row.
    """
    what = {"model": identity(model, name)} | ({} if prompts is None else {"prompts": prompts.name})
    reach = {"beyond": model.dims.max_positions} if model.decoder.beyond else {}
    return what | {"dtype": activation_dtype(model), "numerics": model.decoder.numerics} | reach


def other_options(study: Callable[..., Any], **given: Any) -> Any:
    """The column ``options``: arguments of a study that no other column tells, where they aren't the defaults (lists by
    their items, prompts by name); NA where there is nothing to tell."""
    defaults = {key: _plain(one.default) for key, one in signature(study).parameters.items()}
    said = [f"{key}={value}" for key, x in given.items() if (value := _plain(x)) not in (None, defaults[key])]
    return ", ".join(said) or pd.NA


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.name if isinstance(value, Prompts) else value


def direction_name(direction: Any) -> str:
    """What tells a direction from others in a frame."""
    values = torch.as_tensor(direction, dtype=torch.float32).detach().cpu().contiguous()
    return f"a direction {hashlib.blake2s(values.numpy().tobytes(), digest_size=4).hexdigest()}"


def progress(total: int, what: str) -> tqdm[NoReturn]:
    """A progress bar on a terminal; nothing elsewhere."""
    return tqdm(total=total, desc=what, unit="run", leave=False, disable=not sys.stderr.isatty())


# ---- what it would cost ----------------------------------------------------------------------------------------------


def seconds(model: HookedModel, tokens: Tensor, keep: Tensor | None) -> float:
    """How long a plain forward pass takes: one is made now."""
    start = time.perf_counter()
    model.run(tokens, keep)
    return time.perf_counter() - start


def passes(
    model: HookedModel, batches: Sequence[Batch], cells: int, forwards: float = 1.0, *, timed: bool = True
) -> dict[str, float]:
    """What a study takes that makes plain forward passes and no sweep: ``cells`` that it looks at, ``forwards``,
    ``bytes`` of the values that live at once, ``seconds`` of the passes.

    Args:
        batches: that run one after the other.
        forwards: how often all of them run, where it isn't once and to the end.
        timed: whether to run the first of them, for ``seconds``; else they are NaN, and nothing is run.

    Raises:
        OutOfRange: a text is beyond the model's ``max_position_embeddings``.
    """
    for batch in batches:
        model.decoder.check_tokens(*batch)
    tokens, keep = batches[0]
    share = sum(batch.tokens.numel() for batch in batches) / tokens.numel()
    return {
        "cells": float(cells),
        "forwards": forwards,
        "bytes": float(max(estimate(model, batch.tokens.shape, "x_0").live for batch in batches)),
        "seconds": forwards * share * (seconds(model, tokens, keep) if timed else math.nan),
    }


# ---- what was looked at, prompt by prompt ----------------------------------------------------------------------------


class Reading(NamedTuple):
    """One thing that was looked at, without an edit: a number for each prompt.

    Attributes:
        what: the frame's columns that say what it is.
        values: [B]; NaN where a prompt has none.
        base: [B], what to hold the values against; None: nothing.
        per: [B], where the number is a ratio of two means: the one below. ``values`` is then the one above.
    """

    what: Mapping[str, Any]
    metric: str
    unit: str
    values: Tensor
    base: Tensor | None = None
    per: Tensor | None = None


def report(
    model: HookedModel,
    prompts: Prompts,
    readings: Sequence[Reading],
    *,
    study: str,
    per_prompt: bool,
    name: str | None,
    **same: Any,
) -> pd.DataFrame:
    """A frame of readings: averages over groups, ``n`` of them, with their interval; or a row for each prompt.

    Args:
        name: of the model; see `identity`.
        same: other columns that are the same in all rows.
    """
    what = pd.DataFrame([{**one.what, "metric": one.metric, "unit": one.unit} for one in readings])
    values = _stacked([one.values for one in readings])
    base = _stacked([torch.full_like(one.values, torch.nan) if one.base is None else one.base for one in readings])
    per = _stacked([torch.ones_like(one.values) if one.per is None else one.per for one in readings])
    rows = _by_prompt(prompts, what, values / per, base) if per_prompt else _averages(prompts, what, values, base, per)
    return frame(rows.assign(**common(model, name, prompts), **same), study=study)


def _stacked(rows: Sequence[Tensor]) -> stats.Numbers:
    return torch.stack([row.detach().double().cpu() for row in rows]).numpy()


def _averages(
    prompts: Prompts, what: pd.DataFrame, values: stats.Numbers, base: stats.Numbers, per: stats.Numbers
) -> pd.DataFrame:
    groups = [prompt.group for prompt in prompts.rows]
    above, below = (stats.units(x, groups) for x in (values, np.where(np.isnan(values), np.nan, per)))
    low, high = stats.interval(above, below)
    return what.assign(
        value=stats.recovered(above, below),
        base=stats.recovered(stats.units(base, groups), stats.units(np.ones_like(base), groups)),
        n=(~np.isnan(above)).sum(-1),
        stderr=np.where(((below != 1) & ~np.isnan(below)).any(-1), np.nan, stats.stderr(above)),
        ci_low=low,
        ci_high=high,
    )


def _by_prompt(prompts: Prompts, what: pd.DataFrame, values: stats.Numbers, base: stats.Numbers) -> pd.DataFrame:
    B = len(prompts)
    groups = [prompt.group for prompt in prompts.rows]
    return what.loc[what.index.repeat(B)].assign(
        example=np.tile(np.arange(B), len(what)),
        group=np.tile(np.array(groups, dtype=object), len(what)),
        value=values.ravel(),
        base=base.ravel(),
        n=1,
    )
