"""Activation patching: values of one run put into another, cell by cell, and what of the difference comes with them.

*Denoising* puts clean values into the corrupt run: what is enough to bring the answer back. *Noising* puts corrupt
values into the clean run: what is needed for it. The base is the run that is patched, the source the one that values
come from, in either direction ``recovered`` = (edited − base) / (source − base): 0 the patch did nothing, 1 it did all
that swapping the prompt does. The corrupt run is a prompt of its own, or noise on the clean one's embedding.

Base, source and all cells go through the model together, block by block (`experiments.measure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments import stats
from experiments.asking import Ask
from experiments.finite import telling
from experiments.frames import frame
from experiments.measure import Asked, Measured, Source, cost, measure, table
from experiments.options import By, Direction
from experiments.parts import Part, columns, listed, parts, place
from experiments.prompts import Prompts
from experiments.study import check_drawn, chosen_sites, common, other_options
from hooks import Edit, HookedModel, Live, freeze, noise
from hooks import patch as patched
from hooks.cells import BUDGET
from probe.errors import BadEdit
from probe.sites import Site

NOISE = 3.0
"""Standard deviations of noise where nobody says how much."""


@telling
def patch(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] = ("x_n",),
    blocks: Sequence[int] | None = None,
    by: By | Sequence[By] | None = "position",
    at: str | int | None = None,
    window: int = 1,
    direction: Direction = "denoise",
    noise_at: str | int | None = None,
    noise_std: float = NOISE,
    frozen: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = 1,
    per_prompt: bool = False,
    budget: int = BUDGET,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Patch every cell and measure what comes back; a row for each cell and metric.

    Args:
        tensors: any spellings; ``delta_experts`` is the one to go by expert.
        blocks: None: all that have the tensor.
        by: a cell for each position, named span (role), head, key, expert or feature, or for each of a product of
            several; None: whole tensors.
        at: a place to limit all cells to: a span's name (``END``) or a position.
        window: blocks that are patched together, from the cell's block on.
        direction: see above.
        noise_at: the corrupt run is the clean prompt with noise on its embedding at this span or position; None: it is
            the prompts' own corrupt text.
        noise_std: of that noise, in standard deviations of the prompt's own embeddings.
        frozen: tensors that are held at the base's values from the patch on: ``experts``, ``gates``, ``A``, ``s_*``.
        metrics: names, see `experiments.metrics.metric`; None: the usual ones of the logits.
        seed, draws: of the noise, and how many draws of it; metrics are averaged over them. The seed is of the
            intervals' resamples, too.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        budget: bytes for the rows in flight.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame (see `experiments.frames.COLUMNS`), with an interval of ``recovered`` over groups of prompts.
        ``mistaken`` counts the prompts whose answer the model doesn't prefer in clean, or does in a corrupt text.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, BadEdit: a tensor, a block or a part that doesn't exist or can't be
            patched so; positions of texts of unequal length, which roles align.
        BadMetric, BadText: a metric that these prompts give no ground for; prompts without a corrupt text.
    """
    check_drawn(seed, draws=draws)
    model = model.reaching(beyond)
    options = _Options(tensors, blocks, by, at, window, direction, noise_at, noise_std, frozen)
    pairs = [_Pair.of(model, prompts, options, metrics, seed + i) for i in range(_draws(draws, noise_at))]
    found = [pair.measured(model, budget) for pair in pairs]
    for one in found[1:]:
        _add(found[0], one)
    _divide(found[0], len(found))
    noised = noise_at is not None
    those = wrong(found[0], direction, noised=noised)
    df = table(pairs[0].ask, found[0], per_prompt=per_prompt, seed=seed, wrong=those)
    same: dict[str, Any] = {
        **common(model, name, prompts),
        "edit": "patch" if window == 1 else f"patch of {window} blocks",
        "direction": direction,
        "frozen": ", ".join(frozen) or pd.NA,
        "seed": seed,
        "options": other_options(patch, noise_std=noise_std, draws=draws),
        "source": pairs[0].of_source if noise_at is None else f"{pairs[0].of_source}, noise at {noise_at}",
    }
    df = frame(df.assign(**same), study="patch")
    df.attrs["unmatched"] = found[0].unmatched
    df.attrs["mistaken"] = None if those is None else int(those.sum())
    return df


def outlook(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] = ("x_n",),
    blocks: Sequence[int] | None = None,
    by: By | Sequence[By] | None = "position",
    at: str | int | None = None,
    window: int = 1,
    direction: Direction = "denoise",
    noise_at: str | int | None = None,
    noise_std: float = NOISE,
    frozen: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    draws: int = 1,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `patch` would take; see `experiments.measure.cost`."""
    check_drawn(draws=draws)
    model = model.reaching(beyond)
    options = _Options(tensors, blocks, by, at, window, direction, noise_at, noise_std, frozen)
    pair = _Pair.of(model, prompts, options, metrics, 0)
    one = cost(model, pair.ask, pair.asked, pair.source, source_ask=pair.source_ask, timed=timed)
    return {what: x if what in ("cells", "bytes") else x * _draws(draws, noise_at) for what, x in one.items()}


class _Options(NamedTuple):
    """The arguments of `patch` that say what cells are."""

    tensors: Sequence[str]
    blocks: Sequence[int] | None
    by: By | Sequence[By] | None
    at: str | int | None
    window: int
    direction: Direction
    noise_at: str | int | None
    noise_std: float
    frozen: Sequence[str]


class Sides(NamedTuple):
    """A base and its source: two asks, the second of them run along.

    Attributes:
        prompts: of the base.
        of_source: which of clean and corrupt the source is.
    """

    prompts: Prompts
    ask: Ask
    source_ask: Ask
    source: Live
    of_source: str


def sides(
    model: HookedModel,
    prompts: Prompts,
    direction: Direction,
    metrics: Sequence[str] | None,
    *,
    corrupted: Sequence[Edit] | None = None,
) -> Sides:
    """The base is corrupt to denoise, clean to noise.

    Args:
        metrics: None: the usual ones of the logits.
        corrupted: make the corrupt run of the clean prompt; None: it is a prompt of its own.
    """
    if direction not in get_args(Direction):
        raise BadEdit(f"direction={direction!r}: a patch can {' or '.join(get_args(Direction))}.")
    denoise = direction == "denoise"
    corrupt = prompts.swapped() if corrupted is None else prompts
    base, source = (corrupt, prompts) if denoise else (prompts, corrupt)
    asks = [Ask(model, one, metrics or usual(one)) for one in (base, source)]
    live = Live(
        asks[1].tokens,
        asks[1].keep,
        asks[1].spans,
        spoken=asks[1].spoken,
        edits=() if denoise else corrupted or (),
        read=[some or [spoken - 1] for some, spoken in zip(asks[1].read, asks[1].spoken, strict=True)],
    )
    return Sides(base, asks[0], asks[1], live, "clean" if denoise else "corrupt")


class _Pair(NamedTuple):
    """A base and its source, with the cells between them."""

    ask: Ask
    source_ask: Ask
    source: Live
    base_edits: Sequence[Edit]
    asked: Sequence[Asked]
    of_source: str

    @classmethod
    def of(
        cls, model: HookedModel, prompts: Prompts, options: _Options, metrics: Sequence[str] | None, seed: int
    ) -> _Pair:
        """All that follows from the arguments of `patch`."""
        if options.noise_at is None and options.noise_std != NOISE:
            raise BadEdit(f"noise_std={options.noise_std}: there is no noise; say where by noise_at, or leave it out.")
        corrupted = None if options.noise_at is None else (_noise(options, seed),)
        made = sides(model, prompts, options.direction, metrics, corrupted=corrupted)
        by_name = "role" in listed(options.by) or isinstance(options.at, str)
        check_lengths(made.ask, made.source_ask, by_role=by_name)
        asked = list(_cells(model, made.ask, made.prompts, options))
        if not asked:
            raise BadEdit(f"window={options.window}: no tensor asked for has so many blocks, one behind the other.")
        of_base = corrupted or () if options.direction == "denoise" else ()
        return cls(made.ask, made.source_ask, made.source, of_base, asked, made.of_source)

    def measured(self, model: HookedModel, budget: int) -> Measured:
        """All cells of this pair."""
        return measure(
            model,
            self.ask,
            self.asked,
            source=self.source,
            source_ask=self.source_ask,
            base_edits=self.base_edits,
            budget=budget,
            what="patch",
        )


def _noise(options: _Options, seed: int) -> Edit:
    """Noise on the embedding; it is the same in all rows of a prompt (of answers of several tokens)."""
    assert options.noise_at is not None, "there is a place"
    if not 0 < options.noise_std < float("inf"):
        raise BadEdit(f"noise_std={options.noise_std}: a standard deviation is above 0.")
    return noise("x_0", std=options.noise_std, relative=True, seed=seed, T=options.noise_at)


def usual(prompts: Prompts) -> list[str]:
    """The metrics of the logits that these prompts give ground for."""
    has = prompts.has()
    both = ["logit_difference"] if {"answer", "wrong"} <= set(has) else []
    return [*both, *(["log_probability"] if "answer" in has else []), "kl"]


def _draws(draws: int, noise_at: str | int | None) -> int:
    if draws < 1 or (noise_at is None and draws > 1):
        raise BadEdit(f"draws={draws}: noise takes one draw or more; a corrupt text has nothing to draw.")
    return draws


def check_lengths(base: Ask, source: Ask, *, by_role: bool) -> None:
    """Refuse a base and a source whose positions aren't the same; spans need not be at the same places.

    Raises:
        BadEdit: they have other rows, or rows of other lengths.
    """
    if len(base.tokens) != len(source.tokens):
        raise BadEdit("clean and corrupt have answers of different numbers of tokens; take metrics of one token.")
    if by_role or base.spoken == source.spoken:
        return
    p = next(i for i, (a, b) in enumerate(zip(base.spoken, source.spoken, strict=True)) if a != b)
    raise BadEdit(
        f"row {p}: clean and corrupt are of {base.spoken[p]} and {source.spoken[p]} tokens, so that their positions"
        " aren't the same; go by role, which aligns spans."
    )


def _cells(model: HookedModel, ask: Ask, prompts: Prompts, options: _Options) -> Any:
    """A cell for each part of each tensor, or of a window of blocks."""
    if options.window < 1:
        raise BadEdit(f"window={options.window}: one block or more.")
    if options.window > model.dims.blocks:  # and so for all sites, before any is looked at
        return
    by = listed(options.by)
    sites = chosen_sites(model, options.tensors, options.blocks)
    for site in sites:
        node = model.sites.node(site)
        assert site.block is not None, "chosen_sites are in blocks"
        together = [Site(site.block + i, site.tensor) for i in range(options.window)]
        if not all(other in sites for other in together):
            continue
        there = place(prompts, node, options.at)
        for part in parts(model, prompts, site, by, there.where):
            make = partial(_edits, together, part, ask, options.frozen)
            yield Asked((make,), columns(site, node, there, part), together[-1].block, part.prompts)


def _edits(sites: Sequence[Site], part: Part, ask: Ask, frozen: Sequence[str], source: Source) -> list[Edit]:
    assert source is not None, "a pair has a source"
    where = part.rows(ask)
    made = [patched(site.tensor, site.block, source=source, **where) for site in sites]
    return [*made, *(freeze(tensor) for tensor in frozen)]


# ---- several draws of noise ------------------------------------------------------------------------------------------


def _add(total: Measured, more: Measured) -> None:
    for mine, theirs in ((total.values, more.values), (total.base, more.base), (total.source, more.source)):
        for metric in mine:
            mine[metric] = mine[metric] + theirs[metric]
    total.outcomes = [[*a, *b] for a, b in zip(total.outcomes, more.outcomes, strict=True)]


def _divide(total: Measured, draws: int) -> None:
    for numbers in (total.values, total.base, total.source):
        for metric in numbers:
            numbers[metric] = numbers[metric] / draws


def wrong(found: Measured, direction: Direction, *, noised: bool = False) -> NDArray[np.bool_] | None:
    """[prompts], those that the model gets wrong: whose answer it doesn't prefer in clean, or does in a corrupt text.

    None where no answer was held against a wrong one.
    """
    metric = "logit_difference"
    if metric not in found.source:
        return None
    there = ~np.isnan(found.base[metric])
    base = found.base[metric][there.argmax(0), np.arange(there.shape[1])]  # the same in all cells that have one
    source = found.source[metric]
    clean, corrupt = (source, base) if direction == "denoise" else (base, source)
    return stats.mistaken(clean, None if noised else corrupt)


def mistaken(found: Measured, direction: Direction, *, noised: bool = False) -> int | None:
    """How many prompts the model gets wrong; see `wrong`."""
    those = wrong(found, direction, noised=noised)
    return None if those is None else int(those.sum())
