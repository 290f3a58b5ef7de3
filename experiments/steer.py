"""Steering: add a direction to a tensor, at rising doses and both signs, and see what it moves, meant and not meant.

A dose is in multiples of the tensor's own size: alpha 1 adds a vector whose rms is the median of the tensor's rms over
the places of the base that are steered. (The median: the first position may be a hundred times as large as all others.
Where only steps of decoding are steered, it is over the whole prompt.) Beside each dose stand what it does to plain
text, added at every position, and what the same dose does along random directions of equal norm.

All doses along all directions are the cells of one sweep (`experiments.measure`), those on plain text of another. What
is decoded is a generation a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments import stats
from experiments.ablate import source_name
from experiments.asking import Ask
from experiments.finite import telling
from experiments.frames import frame
from experiments.measure import Asked, Measured, cost, measure, table
from experiments.options import Probe, When
from experiments.parts import Part, columns, dim_of, place
from experiments.patch import usual
from experiments.probes import Direction
from experiments.probes import direction as of_probe
from experiments.prompts import Prompts
from experiments.study import check_drawn, common, direction_name, other_options
from experiments.vectors import Place, find_places, read, readable
from hooks import Edit, HookedModel, add
from hooks.apply import bound
from hooks.cells import BUDGET
from probe.errors import BadEdit, OutOfRange, ShapeMismatch, asking
from probe.sites import Site

DOSES = (0.25, 0.5, 1.0, 2.0)
"""Sizes that are tried where nobody says otherwise, in multiples of the tensor's rms."""

TEXTS = 16
"""Documents of plain text where nobody gives any."""

ON_TEXT = ("kl:all", "loss")
"""What is measured on plain text: how far predictions move, at every position, and how much worse they get."""


@telling
def steer(
    model: HookedModel,
    prompts: Prompts,
    direction: str | Tensor | Direction,
    *,
    tensor: str | None = None,
    block: int | None = None,
    h: int | None = None,
    e: int | None = None,
    at: str | int | None = None,
    when: When = "both",
    doses: Sequence[float] = DOSES,
    random_directions: int = 20,
    label: str | None = None,
    learn: Prompts | None = None,
    neutral: Prompts | None = None,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    budget: int = BUDGET,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Steer along a direction; a row for each dose and metric.

    Args:
        direction: what is added, whatever its length:

            - a tensor, [the last axis of what is steered] (or the last ones, [h v]), as `difference` makes one;
            - what a probe has found, see `experiments.probes.direction`;
            - ``token:WORD``: what raises that token's logit, its column of ``W_U`` times the final norm's gain;
            - ``means:answer=CLASS`` (also ``ridge``, ``logistic``; ``label=``): what a probe of the rows' answers finds
              at the steered place (where that is not one span, at ``END``), towards this class.
        tensor: any spelling; with ``block`` None, of the whole site (``blocks.2.x_next``). A probe's direction has its
            own.
        h, e: the head, or the expert's slot, that is steered alone.
        at: the span (``subject``, ``END``) or the position that is steered; -1 is the last token; None: every token.
        when: which tokens are steered where metrics decode: the ``prompt``'s, those of the ``steps`` that read decoded
            ones, or ``both``. A span, or a position from 0 on, is the prompt's; -1 is in each step the new token. The
            first new token is chosen before any step.
        doses: above 0, each taken with both signs.
        random_directions: how many random directions each dose is held against.
        label: what the frame calls the direction; None: its text.
        learn: the prompts that a direction given by text is learnt from; None: the prompts' own reference set.
        neutral: plain text; None: 16 documents that ship with the tiny model.
        metrics: names, see `experiments.metrics.metric`; None: the usual ones of the logits. ``logit_difference:A/B``
            says how far one direction moves all prompts alike, whatever their answers are.
        seed: of the random directions, of the intervals' resamples.
        budget: bytes for the rows in flight.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame (see `experiments.frames.COLUMNS`) of the prompts' metrics and, with the text's name in ``prompts``, of
        ``kl:all`` and ``loss`` on plain text. ``control`` is the mean effect of the random directions at that dose,
        ``spread`` their standard deviation. A row ``rms`` says what alpha 1 is.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, ShapeMismatch: what is steered doesn't exist, or the direction is not of
            its axes; doses, or a number of random directions, that can't be.
        BadEdit: a tensor, a place or a direction that can't be steered so; ``steps`` and a metric that sees none.
        BadMetric, BadText, BadProbe, BadSample: what the prompts give no ground for.
    """
    check_drawn(seed, random_directions=random_directions)
    model = model.reaching(beyond)
    target = _Target.of(model, prompts, direction, tensor, block, h, e, at, when)
    asked = _Steering.of(model, prompts, target, direction, doses, random_directions, learn, neutral, metrics, seed)
    whole = measure(model, asked.ask, asked.cells(target.place), when=when, budget=budget, what="steer")
    aside = measure(model, asked.aside, asked.cells(target.within), budget=budget, what="plain text")
    unit = pd.DataFrame([{**target.columns, "metric": "rms", "unit": "1", "value": asked.rms}])
    there = {**target.there.columns, "options": other_options(steer, random_directions=random_directions)}
    sized = {"prompts": prompts, "at": at, "when": when}  # where a dose's size is taken, on plain text too
    beside = other_options(steer, random_directions=random_directions, **sized)
    parts = [
        asked.rows(asked.ask, whole, seed).assign(prompts=prompts.name, when=when, **there),
        asked.rows(asked.aside, aside, seed).assign(prompts=asked.aside.prompts.name, options=beside),
        unit.assign(prompts=prompts.name, when=when, **there),
    ]
    same: dict[str, Any] = {
        **common(model, name),
        "edit": f"add {label or asked.along.label}",
        "source": asked.along.source,
        "seed": seed,
    }
    return frame(pd.concat([part.astype(object) for part in parts], ignore_index=True).assign(**same), study="steer")


def outlook(
    model: HookedModel,
    prompts: Prompts,
    direction: str | Tensor | Direction,
    *,
    tensor: str | None = None,
    block: int | None = None,
    h: int | None = None,
    e: int | None = None,
    at: str | int | None = None,
    when: When = "both",
    doses: Sequence[float] = DOSES,
    random_directions: int = 20,
    learn: Prompts | None = None,
    neutral: Prompts | None = None,
    metrics: Sequence[str] | None = None,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `steer` would take, but for what is decoded; see `experiments.measure.cost`."""
    check_drawn(random_directions=random_directions)
    model = model.reaching(beyond)
    target = _Target.of(model, prompts, direction, tensor, block, h, e, at, when)
    asked = _Steering.of(model, prompts, target, direction, doses, random_directions, learn, neutral, metrics, 0)
    asks = (asked.ask, target.place), (asked.aside, target.within)
    both = [cost(model, ask, asked.cells(where), timed=timed) for ask, where in asks]
    return {what: (max if what == "bytes" else sum)(one[what] for one in both) for what in both[0]}


# ---- directions ------------------------------------------------------------------------------------------------------


def difference(
    model: HookedModel,
    prompts: Prompts,
    others: Prompts,
    tensor: str,
    block: int | None = None,
    *,
    at: Place = "END",
    e: int | None = None,
) -> Tensor:
    """The mean of a tensor over the clean texts of some prompts, less that over others: [its last axes], fp32.

    Args:
        tensor: any spelling; with ``block`` None, of the whole site.
        at: the place in both, a span of one token (``subject[-1]``) or a position.
        e: the expert, of tensors with slots; the mean is over the prompts that chose it.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, BadEdit, BadProbe: a tensor or a place that doesn't exist, or gives no
            vector a prompt; an expert that no prompt of a set chose there.
        BadSample: a position, of prompts in which it is different words.
    """
    sets, site = [prompts, others], _site(model, tensor, block)
    ((site,), _) = readable(model, sets, [str(site)], None, e)
    made = read(model, sets, find_places(sets, [at]).tokens, [site], e)[site]
    means: list[Tensor] = []
    for some, values, there in zip(sets, *(x[:, 0].split([len(prompts), len(others)]) for x in made), strict=True):
        if not bool(there.any()):
            raise BadEdit(f"{some.name}: no prompt chose expert {e} of block {site.block} at {at!r}.")
        means.append(values[there].mean(0))
    return means[0] - means[1]


class _Along(NamedTuple):
    """A direction of any length, what to call it, and the prompts that it was learnt from."""

    vector: Tensor
    label: str
    source: Any = pd.NA


def _along(
    model: HookedModel, prompts: Prompts, direction: str | Tensor | Direction, target: _Target, learn: Prompts | None
) -> _Along:
    if learn is not None and (not isinstance(direction, str) or direction.startswith("token:")):
        raise BadEdit(f"learn={learn.name}: this direction is not learnt from prompts; leave it out.")
    if isinstance(direction, Direction):
        to = "" if direction.to is None else f"={direction.to}"
        return _Along(direction.vector, f"{direction.probe}:{direction.label}{to}", direction.prompts)
    if not isinstance(direction, str):
        vector = torch.as_tensor(direction, dtype=torch.float32).detach().cpu()
        return _Along(vector, direction_name(vector))
    kind, _, what = direction.partition(":")
    if kind == "token" and what:
        return _Along(_of_token(model, prompts, what, target.site), direction)
    labels, _, to = what.partition("=")
    if kind not in get_args(Probe) or not to:
        kinds = ", ".join(f"{kind}:answer=CLASS" for kind in get_args(Probe))
        raise BadEdit(f"direction={direction!r}: as text it is token:WORD, {kinds}, or these with label=CLASS.")
    theirs = learn or prompts.reference
    if theirs is None:
        raise BadEdit(f"{prompts.name}: it has no reference prompts to learn {direction!r} from; give learn=.")
    if (block := target.site.block) is None:
        raise BadEdit(f"{target.site}: probes read the tensors of blocks; of the embedding, blocks.0.x_n.")
    probe: Any = kind
    with asking(f"direction {direction!r}"):
        found = of_probe(model, theirs, labels, target.site.tensor, block, target.read, to=to, e=target.e, probe=probe)
    return _Along(found.vector, direction, source_name(prompts, theirs))


def _of_token(model: HookedModel, prompts: Prompts, word: str, site: Site) -> Tensor:
    """What a token's logit is the final norm's scale times the dot product with: [d]."""
    if (last := model.sites.node(site).shape[-1]) != "d":
        raise BadEdit(f"a token has a direction in the residual stream, [d]; {site} ends in [{last}].")
    W_U, w_final = (model.decoder.weights.read(None, name) for name in ("W_U", "w_final"))
    return (W_U[:, prompts.tokenizer.id(word)].float() * w_final.float()).cpu()


def _site(model: HookedModel, tensor: str, block: int | None) -> Site:
    return model.sites.find(tensor if block is None else f"blocks.{block}.{tensor}")


# ---- cells -----------------------------------------------------------------------------------------------------------


class _Target(NamedTuple):
    """What is steered, and where.

    Attributes:
        e: the expert, of a tensor with slots.
        within: the head or the expert alone, as an edit's ``where``; ``place``: with the tokens.
        there: the tokens, as a part of the tensor.
        when: which tokens are steered where metrics decode.
        read: where probes read.
        columns: what a frame says of it, but for the tokens.
    """

    site: Site
    e: int | None
    within: dict[str, Any]
    place: dict[str, Any]
    there: Part
    when: When
    read: Place
    columns: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        prompts: Prompts,
        direction: str | Tensor | Direction,
        tensor: str | None,
        block: int | None,
        h: int | None,
        e: int | None,
        at: str | int | None,
        when: When,
    ) -> _Target:
        own = direction if isinstance(direction, Direction) else None
        if tensor is None and (own is None or block is not None):
            raise BadEdit("say what is steered: tensor='x_next', block=2, or tensor='blocks.2.x_next'.")
        site = own.site if tensor is None and own is not None else _site(model, str(tensor), block)
        h, e = (_from_front(model, dim, i) for dim, i in (("h", h), ("e", e)))
        e = own.e if own is not None and e is None else e
        if own is not None and (own.site, own.e) != (site, e):
            raise BadEdit(f"{site}{'' if e is None else f', e={e}'}: the direction is another's: {own}.")
        _check_when(when, at)
        node = model.sites.node(site)
        if node.shape[-1] in ("S", "k"):
            raise BadEdit(
                f"{site} [{' '.join(node.shape)}]: its last axis is positions or slots, and has no directions."
            )
        there = place(prompts, node, at)
        tokens = dict(there.where)
        if at is None and when == "prompt":
            tokens = {dim_of("position", node): slice(None)}  # the prompt's; a forced answer behind it is none of them
        within = {dim: i for dim, i in (("h", h), ("e", e)) if i is not None}
        said = columns(site, node) | {{"h": "head", "e": "expert"}[dim]: i for dim, i in within.items()}
        read = at if isinstance(at, str) or (at is not None and at >= 0) else "END"
        return cls(site, e, within, within | tokens, there, when, read, said)


def _from_front(model: HookedModel, dim: str, i: int | None) -> int | None:
    """A head or an expert that is counted from the end, as edits allow, by the number that a frame has for it."""
    size = model.dims.size(dim)
    return i + size if i is not None and -size <= i < 0 else i


def _check_when(when: str, at: str | int | None) -> None:
    if when not in get_args(When):
        raise BadEdit(f"when={when!r}: tokens are steered of the {', '.join(get_args(When))}.")
    if when == "steps" and at not in (None, -1):
        raise BadEdit(f"at={at!r} is a place of the prompt, which when='steps' leaves as it is.")


class _Steering(NamedTuple):
    """What is asked of a sweep over the prompts, and of one over plain text (``aside``).

    Attributes:
        vectors: the direction, and behind it the random ones, each of the size of what is steered, ``rms``.
        alphas: ascending.
    """

    ask: Ask
    aside: Ask
    target: _Target
    along: _Along
    vectors: list[Tensor]
    alphas: list[float]
    rms: float

    @classmethod
    def of(
        cls,
        model: HookedModel,
        prompts: Prompts,
        target: _Target,
        direction: str | Tensor | Direction,
        doses: Sequence[float],
        random_directions: int,
        learn: Prompts | None,
        neutral: Prompts | None,
        metrics: Sequence[str] | None,
        seed: int,
    ) -> _Steering:
        alphas = _alphas(doses)
        if random_directions < 2:
            raise OutOfRange(
                f"random_directions={random_directions}: two random directions or more, or there is no spread."
            )
        ask = Ask(model, prompts, metrics or usual(prompts))
        if target.when == "steps" and (blind := [metric.name for metric in ask.metrics if not metric.decodes]):
            raise BadEdit(
                f"{blind[0]} sees no step of decoding; take metrics that do, as continuation:5:contains=TEXT."
            )
        aside = Ask(model, neutral or Prompts.documents(prompts.tokenizer, TEXTS), ON_TEXT)
        along = _along(model, prompts, direction, target, learn)
        part, rms = _size(model, ask, target, along.vector)
        drawn = torch.randn(random_directions, *along.vector.shape, generator=torch.Generator().manual_seed(seed))
        vectors = [_sized(vector, part, rms) for vector in (along.vector, *drawn)]
        return cls(ask, aside, target, along, vectors, alphas, rms)

    def cells(self, where: Mapping[str, Any]) -> list[Asked]:
        """A cell for each dose along each direction, the direction's own first."""
        site, columns = self.target.site, self.target.columns
        return [
            Asked((_adding(site, vector, alpha, where),), {**columns, "alpha": alpha}, site.block)
            for vector in self.vectors
            for alpha in self.alphas
        ]

    def rows(self, ask: Ask, found: Measured, seed: int) -> pd.DataFrame:
        """The rows of the direction's own cells, with what the random ones did at the same dose."""
        n, groups = len(self.alphas), [prompt.group for prompt in ask.prompts.rows]
        values, base, noise = (
            {metric: x[:n] for metric, x in numbers.items()} for numbers in (found.values, found.base, found.noise)
        )
        own = Measured(found.asked[:n], values, base, noise=noise, outcomes=found.outcomes[:n])
        control, spread = [], []
        for metric in (metric.name for metric in ask.metrics):
            effects = stats.units(found.values[metric][n:] - found.base[metric][n:], groups).mean(-1).reshape(-1, n)
            control.append(effects.mean(0))
            spread.append(effects.std(0, ddof=1))
        return table(ask, own, seed=seed).assign(control=np.concatenate(control), spread=np.concatenate(spread))


def _adding(site: Site, vector: Tensor, alpha: float, where: Mapping[str, Any]) -> Callable[[Any], list[Edit]]:
    edit = add(str(site), direction=vector, alpha=alpha, **where)
    return lambda _: [edit]


def _alphas(doses: Sequence[float]) -> list[float]:
    """Doses of both signs, ascending."""
    if not len(doses) or len(set(doses)) < len(doses) or not all(dose > 0 and isfinite(dose) for dose in doses):
        raise OutOfRange(f"doses={list(doses)}: give sizes above 0, each once; both signs are tried of each.")
    return sorted(float(sign * dose) for dose in doses for sign in (-1, 1))


def _size(model: HookedModel, ask: Ask, target: _Target, vector: Tensor) -> tuple[Tensor, float]:
    """Which numbers of a position a direction is added to, and how large they are: the median of their rms over the
    positions of the base that are steered.

    Raises:
        ShapeMismatch: the direction is not one of the tensor's last axes.
        BadEdit: what is steered is zero.
    """
    site = target.site
    node = model.sites.node(site)
    slots = [Site(site.block, "experts")] if "k" in node.shape else []
    run = model.run(ask.tokens, ask.keep, want=[site, *slots], spans=ask.spans, spoken=ask.spoken)
    value, axes = run[site].float(), 2 if node.shape[-2] == "h" else 1
    if vector.shape not in (value.shape[-1:], value.shape[-axes:]):
        dims = " ".join(node.shape)
        raise ShapeMismatch(f"the direction is {list(vector.shape)}, and {site} [{dims}] = {list(value.shape)}.")
    edit = add(str(site), direction=vector, **(target.within if target.when == "steps" else target.place))
    (at,) = bound([edit], model.sites, ask.rows, None)
    at.seen = {one.tensor: run[one] for one in slots}
    mask = at.mask(value)
    squares, counts = ((x * mask).flatten(2).sum(-1) for x in (value**2, torch.ones_like(value)))
    sizes = (squares / counts)[counts > 0].sqrt().cpu().numpy()
    if not len(sizes) or (rms := float(np.median(sizes))) == 0:
        raise BadEdit(f"{edit}: there is nothing but zero to measure a dose by.")
    return mask.flatten(0, 1).any(0).cpu(), rms


def _sized(vector: Tensor, part: Tensor, rms: float) -> Tensor:
    """A vector along another, of this rms over the numbers that it is added to."""
    size = float(vector.expand(part.shape)[part].double().square().mean().sqrt())
    if not (size > 0 and isfinite(size)):
        raise BadEdit("the direction is zero there, or not finite: it points nowhere.")
    return vector * ((rms if isfinite(rms) else 1.0) / size)  # of what isn't finite no dose has a number
