"""Circuit evaluation: keep some nodes, ablate all others, and see how much of what the model does is left.

*Faithfulness*: (the circuit − everything ablated) / (the whole model − everything ablated), in a metric: 1, the circuit
does all of it. Beside it, random sets of the same make-up (as many nodes of each tensor). *Minimality*: what the
circuit loses without each of its nodes. *Completeness*: without some of its nodes, the circuit and the whole model
should fall alike; if the model falls less, it does the same by nodes that the circuit lacks (Wang et al.,
Interpretability in the wild, 2023).

Every set of ablated nodes is one cell of a single sweep, and all of a cell's nodes take their values from the same
reference prompt.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import combinations_with_replacement
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from torch import Tensor

from experiments.ablate import forces, reference_of, source_name
from experiments.asking import Ask
from experiments.finite import telling
from experiments.frames import frame
from experiments.measure import Asked, Measured, Source, cost, measure, table
from experiments.nodes import Node, nodes
from experiments.options import Rest
from experiments.parts import ablation, dim_of
from experiments.patch import usual
from experiments.prompts import Prompts
from experiments.study import check_drawn, common, other_options
from hooks import Edit, HookedModel, Live
from hooks.cells import BUDGET
from hooks.where import where_of
from probe.errors import BadEdit

AMONG = ("O h=*", "delta_ffn")
"""What a model is taken apart into where nobody says otherwise: heads and FFNs."""


@telling
def circuit(
    model: HookedModel,
    prompts: Prompts,
    kept: Sequence[str],
    *,
    among: Sequence[str] = AMONG,
    how: Rest = "resample",
    reference: Prompts | None = None,
    random_sets: int = 10,
    subsets: int = 10,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = 1,
    per_prompt: bool = False,
    budget: int = BUDGET,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Test a circuit; a row for each test, set of nodes and metric.

    Args:
        kept: the circuit's nodes, see `experiments.nodes`.
        among: all nodes that the model is taken apart into; what is not kept is ablated. The rest of the model stays.
        how: what stands in the place of ablated nodes: a reference prompt's values, their mean, zero.
        reference: what to resample from, or to average; None: the prompts' own.
        random_sets: how many random sets the circuit's faithfulness is held against.
        subsets: how many random halves of the circuit completeness is tried with, beside each node alone.
        metrics: names, see `experiments.metrics.metric`; None: the usual ones of the logits. One of the edited block
            is of the last block that has nodes.
        seed: of random sets and halves, of the draw of reference rows, of the intervals' resamples.
        draws: how many draws of reference rows; metrics are averaged over them.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        budget: bytes for the rows in flight.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame (see `experiments.frames.COLUMNS`). ``attrs["unmatched"]`` counts rows without a value: they need an
        expert's gate or output that no reference prompt has. ``test`` says what ``value`` and ``base`` are:

        ============  ===============================  ===========================================================
        faithfulness  of the circuit (``against``: of  of everything ablated; ``recovered`` is the share of what
                      a random set)                    the whole model does beyond that, with its interval
        minimality    of the circuit less a node       of the circuit
        completeness  of the circuit less some nodes   of the whole model less these nodes
        ============  ===============================  ===========================================================

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, BadEdit: a node that doesn't exist or can't be ablated, two that overlap;
            a kept one that is not among all; more random sets than there are.
        BadMetric, BadText: a metric that these prompts give no ground for; prompts without a reference of their shape.
    """
    check_drawn(seed, random_sets=random_sets, subsets=subsets, draws=draws)
    model = model.reaching(beyond)
    asked = _Circuit.of(model, prompts, kept, among, how, reference, random_sets, subsets, metrics, seed, draws)
    found = measure(model, asked.ask, asked.cells, source=asked.source, budget=budget, what="circuit")
    parts = [table(asked.ask, one, per_prompt=per_prompt, seed=seed) for one in asked.by_test(found)]
    same: dict[str, Any] = {
        **common(model, name, prompts),
        "edit": how,
        "seed": seed,
        "source": source_name(prompts, reference) if asked.source is not None else pd.NA,
    }
    others = other_options(circuit, among=among, random_sets=random_sets, subsets=subsets, draws=draws)
    rows = pd.concat(parts, ignore_index=True).assign(**same)
    rows["options"] = rows["options"].map(lambda own: ", ".join(x for x in (own, others) if pd.notna(x)) or pd.NA)
    df = frame(rows, study="circuit")
    df.attrs["unmatched"] = int(df["value"].isna().sum())
    return df


def outlook(
    model: HookedModel,
    prompts: Prompts,
    kept: Sequence[str],
    *,
    among: Sequence[str] = AMONG,
    how: Rest = "resample",
    reference: Prompts | None = None,
    random_sets: int = 10,
    subsets: int = 10,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = 1,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `circuit` would take; see `experiments.measure.cost`."""
    check_drawn(seed, random_sets=random_sets, subsets=subsets, draws=draws)
    model = model.reaching(beyond)
    asked = _Circuit.of(model, prompts, kept, among, how, reference, random_sets, subsets, metrics, seed, draws)
    return cost(model, asked.ask, asked.cells, asked.source, timed=timed)


Set = frozenset[int]
"""Nodes, by their places among all."""


class _Test(NamedTuple):
    """A row: what is asked of which nodes, and the sets whose ablation gives its two numbers."""

    test: str
    kept: Set
    removed: Set
    value: Set
    base: Set


class _Circuit(NamedTuple):
    """All that follows from the arguments of `circuit`."""

    ask: Ask
    all: list[Node]
    own: Set
    tests: list[_Test]
    cells: list[Asked]
    place: dict[Set, int]
    source: Live | None

    @classmethod
    def of(
        cls,
        model: HookedModel,
        prompts: Prompts,
        kept: Sequence[str],
        among: Sequence[str],
        how: Rest,
        reference: Prompts | None,
        random_sets: int,
        subsets: int,
        metrics: Sequence[str] | None,
        seed: int,
        draws: int,
    ) -> _Circuit:
        if how not in get_args(Rest):
            raise BadEdit(f"how={how!r}: what a circuit leaves out is replaced by {', '.join(get_args(Rest))}.")
        if draws < 1 or (how != "resample" and draws > 1):
            raise BadEdit(f"draws={draws}: resampling takes one draw or more; {how} has nothing to draw.")
        if how == "zero" and reference is not None:
            raise BadEdit(f"reference={reference.name}: zero takes nothing from other prompts; leave it out.")
        every = nodes(model, prompts, among)
        ask = Ask(model, prompts, metrics or usual(prompts))
        _check_apart(every, ask)
        own = _among(every, nodes(model, prompts, kept))
        tests = _tests(every, own, random_sets, subsets, seed)
        source: Live | None = None
        rows: list[list[int] | None] = [None] * draws
        if how != "zero":
            theirs = reference_of(prompts, reference)
            source = Live(*theirs.batch(model.device), theirs.spans)
            if how == "resample":
                drawn = (prompts.draw(theirs, seed + i) for i in range(draws))
                rows = [[draw[p] for p in ask.prompt_of] for draw in drawn]
        sets = list(dict.fromkeys(one for test in tests for one in (test.value, test.base)))
        where = [_where(model, node, ask, how) for node in every]
        last = max((node.site.block for node in every if node.site.block is not None), default=None)
        ablated = ([(every[i], where[i]) for i in sorted(one)] for one in sets)
        cells = [
            Asked(tuple(partial(_edits, some, how, each, seed + i) for i, each in enumerate(rows)), {}, last)
            for some in ablated
        ]
        return cls(ask, every, own, tests, cells, {one: i for i, one in enumerate(sets)}, source)

    def by_test(self, found: Measured) -> list[Measured]:
        """The numbers of each kind of test, out of those of all sets."""
        base = {metric: np.fmax.reduce(x) for metric, x in found.base.items()}  # of all sets that have a value
        made = []
        for kind in dict.fromkeys(test.test for test in self.tests):
            tests = [test for test in self.tests if test.test == kind]
            one, other = [self.place[test.value] for test in tests], [self.place[test.base] for test in tests]
            values, bases = (
                {metric: np.where(np.isnan(x[but]), np.nan, x[of]) for metric, x in found.values.items()}
                for of, but in ((one, other), (other, one))
            )
            made.append(
                Measured(
                    [Asked((), self._columns(test), None) for test in tests],
                    values,
                    bases,
                    base if kind == "faithfulness" else {},
                    {metric: x[one] for metric, x in found.noise.items()},
                    [found.outcomes[i] for i in one],
                )
            )
        return made

    def _columns(self, test: _Test) -> dict[str, Any]:
        like = test.test == "faithfulness" and test.kept != self.own
        one = self.all[next(iter(test.removed))].columns if len(test.removed) == 1 else {}
        return {
            "block": pd.NA,
            "tensor": pd.NA,
            **one,
            "test": test.test,
            "kept": self._text(test.kept),
            "removed": self._text(test.removed),
            "against": "random" if like else pd.NA,
            "options": f"like {self._text(self.own)}" if like else pd.NA,
        }

    def _text(self, some: Set) -> Any:
        return ", ".join(str(self.all[i]) for i in sorted(some)) or pd.NA


# ---- sets of nodes ---------------------------------------------------------------------------------------------------


def _tests(every: Sequence[Node], own: Set, random_sets: int, subsets: int, seed: int) -> list[_Test]:
    """What is asked, in the order of the frame's rows."""
    rng = random.Random(seed)
    whole = Set(range(len(every)))
    rest = whole - own
    tests = [_Test("faithfulness", own, Set(), rest, whole)]
    tests += [_Test("faithfulness", one, Set(), whole - one, whole) for one in _others(every, own, random_sets, rng)]
    each = [Set([i]) for i in sorted(own)]
    tests += [_Test("minimality", own, one, rest | one, rest) for one in each]
    some = [*each, *_halves(own, subsets, rng), own]
    return tests + [_Test("completeness", own, one, rest | one, one) for one in dict.fromkeys(some)]


def _others(every: Sequence[Node], own: Set, count: int, rng: random.Random) -> list[Set]:
    """Random sets with as many nodes of each tensor as a circuit has."""
    like: dict[str, list[int]] = {}
    for i, node in enumerate(every):
        like.setdefault(node.site.tensor, []).append(i)
    makeup = Counter(every[i].site.tensor for i in sorted(own))
    there = math.prod(math.comb(len(like[tensor]), n) for tensor, n in makeup.items()) - 1
    if not 0 <= count <= there:
        raise BadEdit(
            f"random_sets={count}: there are {there} other sets with as many nodes of each tensor; take no more."
        )
    found: dict[Set, None] = {}
    while len(found) < count:
        one = Set(i for tensor, n in makeup.items() for i in rng.sample(like[tensor], n))
        if one != own:
            found[one] = None
    return list(found)


def _halves(own: Set, count: int, rng: random.Random) -> list[Set]:
    """Random halves of a circuit, at most as many as there are; none of fewer than four nodes."""
    half = len(own) // 2
    if count < 0:
        raise BadEdit(f"subsets={count}: none or more.")
    most = min(count, math.comb(len(own), half)) if half > 1 else 0
    found: dict[Set, None] = {}
    while len(found) < most:
        found[Set(rng.sample(sorted(own), half))] = None
    return list(found)


def _among(every: Sequence[Node], some: Sequence[Node]) -> Set:
    """Nodes by their places.

    Raises:
        BadEdit: one is not there.
    """
    place = {str(node): i for i, node in enumerate(every)}
    if lost := [str(node) for node in some if str(node) not in place]:
        raise BadEdit(f"{lost[0]} can't be kept: it is not among the {len(every)} nodes that are ablated; see among=.")
    return Set(place[str(node)] for node in some)


def _check_apart(every: Sequence[Node], ask: Ask) -> None:
    """Refuse two nodes that share a place: were one of them kept, the other would decide.

    Nodes are held together where all dims but positions agree: there are few such pairs.
    """

    @cache
    def there(dim: str, place: Any, prompts: tuple[int, ...] | None) -> Tensor:
        ((_, named),) = where_of({dim: place})
        among = None if prompts is None else [row for row, p in enumerate(ask.prompt_of) if p in set(prompts)]
        return ask.rows.mask(named, dim, among)

    @cache
    def meet(dim: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        return bool((there(dim, *one) & there(dim, *other)).any())

    by_site: dict[Any, dict[frozenset[str], list[Node]]] = {}
    for node in every:
        by_site.setdefault(node.site, {}).setdefault(frozenset(node.part.where), []).append(node)
    for kinds in by_site.values():
        for some, others in combinations_with_replacement(kinds, 2):
            fixed, places = some & others - {"T", "S"}, some & others & {"T", "S"}
            like: dict[tuple[Any, ...], list[Node]] = {}
            for node in kinds[some]:
                like.setdefault(tuple(node.part.where[dim] for dim in fixed), []).append(node)
            for b in kinds[others]:
                for a in like.get(tuple(b.part.where[dim] for dim in fixed), ()):
                    at = {dim: [(node.part.where[dim], node.part.prompts) for node in (a, b)] for dim in places}
                    if a is not b and all(meet(dim, *both) for dim, both in at.items()):
                        raise BadEdit(f"{a} and {b} overlap: take the model apart into nodes that don't.")


def _where(model: HookedModel, node: Node, ask: Ask, how: Rest) -> dict[str, Any]:
    """A node's place in an edit; only in the prompt, where answers stand behind it that no reference has."""
    prompt = {dim_of("position", model.sites.node(node.site)): slice(None)} if how != "zero" and forces(ask) else {}
    return {**prompt, **node.part.rows(ask)}


def _edits(
    some: Sequence[tuple[Node, dict[str, Any]]], how: Rest, rows: Sequence[int] | None, seed: int, source: Source
) -> list[Edit]:
    """All of these nodes replaced; those that differ in a head or an expert alone by one edit."""
    together: dict[Any, tuple[Node, dict[str, Any]]] = {}
    for node, where in some:
        dim = next((dim for dim in ("h", "e") if dim in where), "")
        key = node.site, dim, repr({name: place for name, place in where.items() if name != dim})
        _, before = together.setdefault(key, (node, {**where, dim: []} if dim else where))
        if dim:
            before[dim].append(where[dim])
    return [ablation(how, node.site, source, where, rows, seed) for node, where in together.values()]
