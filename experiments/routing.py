"""Who is routed where: how much each expert is used, by how much it was chosen, and what the token alone would say.

The independent units are groups of prompts, never tokens: tokens of one prompt hang together. And much of what looks
like an expert for a topic is an expert for the topic's words: `routing` says of every load how much of it lies beyond
what the token's identity predicts, `split` how much of an edit's effect goes by the routing at all.

One forward pass a set of prompts, which stops at the last block asked for; nothing wider than the router's scores and
the chosen experts' contributions exists, a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.ablate import reference_of, source_name
from experiments.asking import Ask
from experiments.finite import telling
from experiments.frames import BadFrame, frame
from experiments.measure import Source, stayed
from experiments.metrics import Metric
from experiments.nodes import nodes
from experiments.options import How
from experiments.parts import ablation
from experiments.prompts import Prompts
from experiments.stats import Numbers, known, summary, units
from experiments.study import check_drawn, chosen_blocks, common, other_options, passes
from hooks import Cell, Edit, HookedModel, Live, Run, freeze, patch
from hooks import outlook as ahead
from hooks.edits import Freeze
from probe.errors import BadEdit, OutOfRange, asking
from probe.sites import Site
from probe.text import Batch


@telling
def routing(
    model: HookedModel,
    prompts: Prompts | Sequence[Prompts],
    *,
    blocks: Sequence[int] | None = None,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    r"""The routing of each set of prompts (``prompts``: a task, a language, a topic), block by block.

    Of each expert, as means over groups with intervals and p values (corrected for all experts of the block):

    - ``load``: the share of a prompt's tokens that choose it; ``base`` is k/e, all alike;
    - ``load_given_token``, of several sets: the same over those tokens that other sets have too; ``base`` is what the
      token's identity predicts, its mean over the contexts that it has in other sets, so that ``effect`` is what goes
      beyond. A context is all that stands before: where two prompts begin alike, they are one computation, which counts
      once, and not at all where it is in both;
    - ``gate``: its gate where it was chosen; ``contribution``: the l2 norm of what it then adds, gate included.

    Of each block:

    - ``entropy`` of the loads, :math:`-\Sigma_e \, p_e \log_2 p_e` with :math:`p_e` = load/k; ``base`` is
      :math:`\log_2 e`. Its standard error is a jackknife's over groups;
    - ``margin``: by how much the last chosen expert's score is above that of the next, which the router might have
      chosen: the median over a prompt's tokens;
    - ``told_by_token``: the mean probability that the token's identity gives to the chosen experts, over its contexts
      in all sets but for those in prompts of the same group; ``base`` is what loads alone give to them.

    Args:
        prompts: one set or several.
        blocks: None: all that have experts.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Raises:
        OutOfRange: a block that does not exist, or has no experts.
        BadFrame: two sets of one name.
    """
    model = model.reaching(beyond)
    sets, asked = _asked(model, prompts, blocks)
    seen = [_look(model, some, asked) for some in sets]
    contexts = _Contexts.of(sets)
    parts = []
    for block in asked:
        chosen = np.concatenate([looks[block].chosen for looks in seen])
        told = [contexts.mean_elsewhere(chosen, *how) for how in (("set", True), ("group", True), ("group", False))]
        for some, looks, other_sets, others, loads in zip(sets, seen, *map(contexts.by_set, told), strict=True):
            experts = _of_experts(looks[block], other_sets if len(sets) > 1 else None, some)
            rows = experts, _of_block(looks[block], others, loads, some)
            parts += [part.assign(block=block, prompts=some.name).astype(object) for part in rows]
    several = other_options(routing, prompts=sets if len(sets) > 1 else None)
    return _frame(model, pd.concat(parts, ignore_index=True).assign(options=several), name)


def outlook(
    model: HookedModel,
    prompts: Prompts | Sequence[Prompts],
    *,
    blocks: Sequence[int] | None = None,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `routing` would take; see `experiments.study.passes`."""
    model = model.reaching(beyond)
    sets, asked = _asked(model, prompts, blocks)
    batches = [some.batch(model.device) for some in sets]
    return passes(model, batches, len(sets) * len(asked) * model.dims.e, timed=timed)


def _asked(
    model: HookedModel, prompts: Prompts | Sequence[Prompts], blocks: Sequence[int] | None
) -> tuple[list[Prompts], list[int]]:
    """The sets, each of another name, and the blocks with experts."""
    sets = [prompts] if isinstance(prompts, Prompts) else list(prompts)
    if not sets or len({some.name for some in sets}) < len(sets):
        raise BadFrame(f"sets are told apart by name; these are {', '.join(some.name for some in sets) or 'none'}.")
    return sets, moe_blocks(model, blocks)


@telling
def coactivation(
    model: HookedModel, prompts: Prompts, block: int, *, beyond: bool = False, name: str | None = None
) -> pd.DataFrame:
    r"""How often two experts of a block are chosen together: the share of a prompt's tokens, for every pair (``expert``
    and ``feature``), mean over groups, metric ``coactivation``.

    ``base`` is what their loads l alone give, k (k − 1) · l_i l_j / (k² − Σ l²): pairs of all experts then come to the
    k (k − 1) / 2 that every token has. ``beyond`` and ``name`` are as in `routing`.

    Raises:
        OutOfRange: the block does not exist, or has no experts.
    """
    model = model.reaching(beyond)
    (block,) = moe_blocks(model, [block])
    groups, chosen = [prompt.group for prompt in prompts.rows], _look(model, prompts, [block])[block].chosen
    i, j = np.triu_indices(chosen.shape[1], 1)
    load, k = units(by_prompt(chosen, prompts), groups).mean(1), chosen[0].sum()
    expected = k * (k - 1) * load[i] * load[j] / (k**2 - (load**2).sum())
    found = summary(by_prompt(chosen[:, i] * chosen[:, j], prompts), np.tile(expected[:, None], len(groups)), groups)
    rows = pd.DataFrame(
        {"metric": "coactivation", "unit": "1", "tensor": "experts", "expert": i, "feature": j, **found}
    )
    return _frame(model, rows.assign(block=block, prompts=prompts.name), name)


HOWS = ("zero", "mean", "resample", "noise")
"""How a text says that a node is edited, for `split`."""


@telling
def split(
    model: HookedModel,
    prompts: Prompts,
    edits: str | Edit | Sequence[str | Edit],
    *,
    metrics: Sequence[str | Metric] | None = None,
    gates: bool = False,
    reference: Prompts | None = None,
    seed: int = 0,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """How much of an edit's effect goes by the routing: four rows for each metric, told apart by ``edit`` and
    ``frozen``.

    - the edit: the whole effect;
    - the edit with the routing ``frozen`` at the base's: what is computed;
    - the base with the edited run's routing patched in: the routing alone;
    - the interaction: the whole less the two. It has an ``effect`` and no value.

    Args:
        edits: all act together. A text is one of `HOWS` and a node (see `experiments.nodes`): ``zero blocks.2.O h=1``.
        metrics: see `experiments.metrics`; None: all that the prompts allow.
        gates: whether the routing is the chosen experts and their gates; else it is the choice, and gates are made
            anew of each run's own affinities.
        reference: what edits in text take from, where they resample or average; None: the prompts' own.
        seed: of what they draw, and of the intervals' resamples.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Raises:
        BadEdit: an edit that can't mean what it says, or that frozen routing would cut off: one of the router itself;
            or none, besides what is frozen.
        UnknownTensor, OutOfRange, UnknownDim: a node that doesn't exist; no block that the edits reach has experts.
    """
    check_drawn(seed)
    model = model.reaching(beyond)
    asked = _Split.of(model, prompts, edits, metrics, gates, reference, seed)
    ask, block = asked.ask, asked.block
    made = asked.made(model, prompts, seed)
    label = " + ".join(edit.label for edit in made)
    base, *runs = _routed(model, ask, made, asked.router, asked.reached, block)
    seen = [ask.seen(run, block) for run in (base, *runs)]
    routing = "routing, gates too," if gates else "routing"
    names = label, label, f"the {routing} of: {label}", f"interaction of the {routing} and: {label}"
    held = [", ".join(run.frozen) or pd.NA for run in runs]
    what = pd.DataFrame({"edit": names, "frozen": [*held, pd.NA]}).assign(
        routing_agreement=pd.Series([run.routing_agreement for run in runs]),
        flips=pd.Series([run.flips for run in runs]),
    )
    what["source"] = pd.NA if asked.source is None else source_name(prompts, reference)
    what["seed"], what["options"] = seed, other_options(split, gates=gates)
    groups, parts = [prompt.group for prompt in prompts.rows], []
    for metric in ask.metrics:
        before, whole, computed, alone = (ask.values(metric, one, seen[0], block).numpy() for one in seen)
        together = whole - computed - alone + 2 * before
        edited = known([whole, computed, alone, together], before)
        found = summary(edited, before, groups, distance=metric.distance, seed=seed)
        found["value"][-1] = np.nan
        parts.append(what.assign(metric=metric.name, unit=metric.unit, prompts=prompts.name, **found).astype(object))
    return _frame(model, pd.concat(parts, ignore_index=True), name, study="split")


def outlook_split(
    model: HookedModel,
    prompts: Prompts,
    edits: str | Edit | Sequence[str | Edit],
    *,
    metrics: Sequence[str | Metric] | None = None,
    gates: bool = False,
    reference: Prompts | None = None,
    seed: int = 0,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `split` would take: four runs, and one over the reference prompts where edits take from these."""
    check_drawn(seed)
    model = model.reaching(beyond)
    asked = _Split.of(model, prompts, edits, metrics, gates, reference, seed)
    ask, taken = asked.ask, [] if asked.source is None else [asked.source]
    base, held = ask.live(), tuple(map(freeze, asked.router))
    ahead(model, base, [Cell(asked.edits), Cell((*asked.edits, *held))], sources=taken)  # sees what can't be
    ask.sites(asked.block)
    forwards = 4.0 + sum(live.tokens.numel() for live in taken if live.tokens is not None) / ask.tokens.numel()
    return passes(model, [Batch(ask.tokens, ask.keep)], 4, forwards, timed=timed)


class _Split(NamedTuple):
    """All that follows from the arguments of `split`.

    Attributes:
        told: the edits as they were given; ``edits``: as they would be made of the reference prompts.
        source: those prompts, where an edit takes from them.
        block: the last that is edited; None: none is.
        reached: the blocks with experts from there on.
    """

    ask: Ask
    told: tuple[str | Edit, ...]
    edits: tuple[Edit, ...]
    source: Live | None
    rows: list[int] | None
    router: tuple[str, ...]
    block: int | None
    reached: list[int]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        prompts: Prompts,
        edits: str | Edit | Sequence[str | Edit],
        metrics: Sequence[str | Metric] | None,
        gates: bool,
        reference: Prompts | None,
        seed: int,
    ) -> _Split:
        told = (edits,) if isinstance(edits, str | Edit) else tuple(edits)
        ask, source, rows = Ask(model, prompts, metrics), None, None
        if any(isinstance(one, str) and one.startswith(("mean ", "resample ")) for one in told):
            theirs = reference_of(prompts, reference)
            source = Live(*theirs.batch(model.device), theirs.spans)
            if any(isinstance(one, str) and one.startswith("resample ") for one in told):
                drawn = prompts.draw(theirs, seed)
                rows = [drawn[p] for p in ask.prompt_of]
        elif reference is not None:
            raise BadEdit(f"reference={reference.name}: no edit takes from other prompts; leave it out.")
        router = ("experts", "gates") if gates else ("experts",)
        asked = cls(ask, told, (), source, rows, router, None, [])
        made = asked._from(model, prompts, source, seed)
        at = [site for edit in made if not isinstance(edit.how, Freeze) for site in edit.sites(model.sites)]
        if not at:
            raise BadEdit("nothing is edited; give an edit whose effect is to be split.")
        block = max((site.block for site in at if site.block is not None), default=None)
        reached = [i for i in moe_blocks(model, None) if i >= min(map(model.sites.depth, at))]
        if not reached:
            raise OutOfRange("no block that these edits reach has experts, so nothing goes by the routing.")
        return asked._replace(edits=made, block=block, reached=reached)

    def made(self, model: HookedModel, prompts: Prompts, seed: int) -> tuple[Edit, ...]:
        """The edits, with the values that they take from the reference prompts at hand."""
        if self.source is None:
            return self.edits
        return self._from(model, prompts, stayed(model, self.source, self.edits), seed)

    def _from(self, model: HookedModel, prompts: Prompts, source: Source, seed: int) -> tuple[Edit, ...]:
        made: list[Edit] = []
        for one in self.told:
            if isinstance(one, Edit):
                made.append(one)
                continue
            how, _, node = one.partition(" ")
            with asking(f"edit {one!r}"):
                if how not in HOWS or not node.strip():
                    raise BadEdit(f"it is said as one of {', '.join(HOWS)} and a node: zero blocks.2.O h=1.")
                for found in nodes(model, prompts, node):
                    where = found.part.rows(self.ask)
                    made.append(ablation(cast("How", how), found.site, source, where, self.rows, seed))
        return tuple(made)


def _routed(
    model: HookedModel,
    ask: Ask,
    edits: Sequence[Edit],
    router: Sequence[str],
    reached: Sequence[int],
    block: int | None,
) -> tuple[Run, Run, Run, Run]:
    """The base, the edited run, the same with the base's routing, and the base with the edited run's routing."""
    held = [Site(i, tensor) for i in reached for tensor in router]

    def run(edits: Sequence[Edit], base: Run | None) -> Run:
        want = [*ask.sites(block), *held]
        return model.run(ask.tokens, ask.keep, want=want, edits=edits, base=base, spans=ask.spans, spoken=ask.spoken)

    base = run((), None)
    whole = run(edits, base)
    frozen = run([*edits, *map(freeze, router)], base)
    return base, whole, frozen, run([patch(str(site), source=whole) for site in held], base)


def _frame(model: HookedModel, rows: pd.DataFrame, name: str | None, study: str = "routing") -> pd.DataFrame:
    return frame(rows.assign(**common(model, name)), study=study)


def moe_blocks(model: HookedModel, blocks: Sequence[int] | None) -> list[int]:
    """The blocks asked for; all with experts, where none is.

    Raises:
        OutOfRange: one does not exist or has no experts; or the model has none.
    """
    moe = model.dims.moe
    if blocks is None:
        found = [block for block in range(model.dims.blocks) if moe[block]]
        if not found:
            raise OutOfRange("no block of this model has experts.")
        return found
    for block in (found := chosen_blocks(model, blocks)):
        if not moe[block]:
            raise OutOfRange(f"block {block} is dense, and has no experts.")
    return found


# ---- what the router did, token by token -----------------------------------------------------------------------------


class _Look(NamedTuple):
    """A block's routing of a set's N real tokens, one prompt after the other.

    Attributes:
        chosen: [N e], 1 where the token chose the expert, else 0.
        gate, contribution: [N e], its gate, and the l2 norm of what it added; NaN where it was not chosen.
        margin: [N], score of the last chosen expert less that of the next; NaN where no next one is allowed.
    """

    chosen: Numbers
    gate: Numbers
    contribution: Numbers
    margin: Numbers


def _look(model: HookedModel, prompts: Prompts, blocks: Sequence[int]) -> dict[int, _Look]:
    tokens, keep = prompts.batch(model.device)
    real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
    kept: dict[str, Callable[[Tensor], Tensor]] = {
        "choice_score": partial(_margin, model),
        "experts": torch.clone,
        "gates": torch.clone,
        "delta_experts": lambda value: value.norm(dim=-1),
    }
    reduce = {Site(block, tensor): made for block in blocks for tensor, made in kept.items()}
    found = model.run(tokens, keep, want=None, reduce=reduce).cache.reduced
    looks = {}
    for block in blocks:
        margin, experts, gates, l2 = (found[Site(block, tensor)][real] for tensor in kept)
        nowhere = torch.full((len(experts), model.dims.e), torch.nan, dtype=torch.float64, device=experts.device)
        by_expert = [nowhere.scatter(-1, experts, value.double()) for value in (torch.ones_like(gates), gates, l2)]
        chosen, gate, contribution = (value.cpu().numpy() for value in by_expert)
        looks[block] = _Look(np.nan_to_num(chosen), gate, contribution, margin.double().cpu().numpy())
    return looks


def _margin(model: HookedModel, scores: Tensor) -> Tensor:
    """[B T]: by how much the last of the k best scores is above the next, within the groups that a token may choose
    from; the card's own choice of k + 1."""
    dims = replace(model.dims, k=model.dims.k + 1)
    if dims.k > dims.topk_group * (dims.e // dims.n_group):
        return torch.full(scores.shape[:-1], torch.nan, device=scores.device)
    choose = next(card["experts"] for card in model.sites.cards if "experts" in card)
    best = scores.gather(-1, choose.fn(scores, dims.n_group, dims.topk_group, dims)).sort(-1).values
    return best[..., 1] - best[..., 0]


def by_prompt(values: Numbers, prompts: Prompts) -> Numbers:
    """[N ...] → [... B]: the mean over each prompt's tokens; NaN is left out, and stands where there is nothing
    else."""
    starts = np.cumsum([0, *(len(prompt.tokens) for prompt in prompts.rows)])[:-1]
    there = ~np.isnan(values)
    total, count = (np.add.reduceat(x, starts, axis=0) for x in (np.where(there, values, 0.0), there))
    with np.errstate(invalid="ignore"):
        return np.moveaxis(total / count, 0, -1)


# ---- what the token alone would say ----------------------------------------------------------------------------------


class _Contexts(NamedTuple):
    """All N tokens of several sets: which token, in which context (all that stands before, and itself), in a prompt of
    which set and group."""

    token: NDArray[np.intp]
    context: NDArray[np.intp]
    set: NDArray[np.intp]
    group: NDArray[np.intp]

    @classmethod
    def of(cls, sets: Sequence[Prompts]) -> _Contexts:
        contexts: dict[tuple[int, int], int] = {}  # (the context before, the token) → the context
        groups: dict[tuple[int, str], int] = {}
        rows = []
        for i, some in enumerate(sets):
            for prompt in some.rows:
                group, before = groups.setdefault((i, prompt.group), len(groups)), -1
                for token in prompt.tokens:
                    before = contexts.setdefault((before, token), len(contexts))
                    rows.append((token, before, i, group))
        return cls(*np.array(rows).T)

    def by_set(self, values: Numbers) -> list[Numbers]:
        """[N ...] as one part a set."""
        return np.split(values, np.flatnonzero(np.diff(self.set)) + 1)

    def mean_elsewhere(self, values: Numbers, apart: Literal["set", "group"], alike: bool) -> Numbers:
        """Of each token, the mean of values [N e] over the contexts that are not in its own set, or group: of the same
        token, or of all. NaN where there is none."""
        own, kind = getattr(self, apart), self.token if alike else np.zeros_like(self.token)
        _, once = np.unique(self.context, return_index=True)
        counted = np.column_stack([values, np.ones(len(values))])[once][self.context]  # one computation, one value
        kinds, of_kind = np.unique(kind, return_inverse=True)
        everywhere = np.zeros((len(kinds), counted.shape[1]))
        np.add.at(everywhere, of_kind[once], counted[once])
        _, once = np.unique(np.stack([own, self.context]), axis=1, return_index=True)
        pairs, of_pair = np.unique(np.stack([own, kind]), axis=1, return_inverse=True)
        here = np.zeros((pairs.shape[1], counted.shape[1]))
        np.add.at(here, of_pair[once], counted[once])
        left = everywhere[of_kind] - here[of_pair]
        with np.errstate(invalid="ignore"):
            return np.asarray(left[:, :-1] / left[:, -1:])


# ---- rows ------------------------------------------------------------------------------------------------------------


def _of_experts(look: _Look, by_token: Numbers | None, prompts: Prompts) -> pd.DataFrame:
    groups, k, e = [prompt.group for prompt in prompts.rows], look.chosen[0].sum(), look.chosen.shape[1]
    load, gate, contribution = (by_prompt(x, prompts) for x in (look.chosen, look.gate, look.contribution))
    measured = {
        "load": ("experts", summary(load, np.full(len(groups), k / e), groups)),
        "gate": ("gates", _mean(gate, groups)),
        "contribution": ("delta_experts", _mean(contribution, groups)),
    }
    if by_token is not None:
        told = by_prompt(np.where(np.isnan(by_token), np.nan, look.chosen), prompts)
        measured["load_given_token"] = "experts", summary(told, by_prompt(by_token, prompts), groups)
    return pd.concat(
        [
            pd.DataFrame({"metric": metric, "tensor": tensor, "unit": "1", "expert": range(e), **found})
            for metric, (tensor, found) in measured.items()
        ]
    )


def _mean(values: Numbers, groups: Sequence[str]) -> dict[str, Any]:
    """Over groups, of values [cells, prompts] that are held against nothing."""
    by_group = pd.DataFrame(units(values, groups))
    return {"value": by_group.mean(axis=1), "n": by_group.count(axis=1), "stderr": by_group.sem(axis=1)}


def _of_block(look: _Look, by_token: Numbers, by_load: Numbers, prompts: Prompts) -> pd.DataFrame:
    groups, k = [prompt.group for prompt in prompts.rows], look.chosen[0].sum()
    known = np.where(np.isnan(by_token), np.nan, look.chosen)  # the same tokens in both
    told, by_chance = (by_prompt((known * by).sum(-1) / k, prompts)[None] for by in (by_token, by_load))
    ends = np.cumsum([len(prompt.tokens) for prompt in prompts.rows])
    margin = np.array([np.median(part) for part in np.split(look.margin, ends[:-1])])
    rows = [
        {
            "metric": "entropy",
            "tensor": "experts",
            "unit": "bits",
            **_entropy(units(by_prompt(look.chosen, prompts), groups)),
        },
        {"metric": "margin", "tensor": "choice_score", "unit": "1", **_first(_mean(margin[None], groups))},
        {"metric": "told_by_token", "tensor": "experts", "unit": "1", **_first(summary(told, by_chance, groups))},
    ]
    return pd.DataFrame(rows)


def _first(found: dict[str, Any]) -> dict[str, Any]:
    return {name: column[0] for name, column in found.items()}


def entropy_bits(load: Numbers) -> Numbers:
    """Of loads over the first axis, whatever they sum to, in bits."""
    p = load / load.sum(0)
    return np.asarray(-(p * np.log2(np.where(p > 0, p, 1.0))).sum(0))


def _entropy(load: Numbers) -> dict[str, Any]:
    """Of the mean of loads [e, units], with the jackknife's standard error."""
    n, value = load.shape[1], float(entropy_bits(load.mean(1)))
    even = float(np.log2(len(load)))
    less = entropy_bits(load.sum(1, keepdims=True) - load) if n > 1 else np.array([np.nan])
    stderr = float(np.sqrt((n - 1) / n * ((less - less.mean()) ** 2).sum()))
    return {"value": value, "base": even, "effect": value - even, "n": n, "stderr": stderr}
