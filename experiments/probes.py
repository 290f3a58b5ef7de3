"""What a linear probe reads out of every tensor, and what it would read without the model's learning.

A *cell* is a tensor of a block at a named span or a position: one vector a prompt. All tensors are read in one forward
pass; what a sweep costs is its probes. Of every tensor a probe sees the same number of principal components, so that a
wide one has no more to fit with than a narrow one. (A random projection from d to w keeps w/d of what separates two
classes in even noise, and so would favour narrow tensors.) A tensor that is narrower than that is taken whole.

Prompts of one group are never both in training and test. A part of the groups is set aside; the others are
cross-validated, and the best cell is then scored once more, on the groups that took no part in choosing it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.finite import telling
from experiments.frames import frame
from experiments.labels import LEAST_FOLDS, BadProbe, Bools, Labels, Lesson, Numbers, lesson, truth
from experiments.options import Control, Probe
from experiments.prompts import Prompts
from experiments.readout import Fits, How, guesses, marks
from experiments.stats import interval, summary, units
from experiments.study import check_drawn, common, numel, other_options, passes, progress
from experiments.vectors import SLOTS, Place, Places, Vectors, count_tokens, find_places, read, readable
from hooks import Edit, HookedModel, add
from hooks.edits import SCORES
from probe.errors import BadEdit, OutOfRange, ShapeMismatch
from probe.sites import Site
from probe.weights import random_weights

WIDTH = 32
"""Principal components that a probe sees."""

DRAWS = 5
"""Of shuffled labels, where nobody says how many."""


@telling
def probes(
    model: HookedModel,
    prompts: Prompts,
    labels: Labels = "label",
    *,
    of: Prompts | None = None,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    at: Sequence[Place] | None = None,
    e: int | None = None,
    probe: Probe = "ridge",
    width: int = WIDTH,
    folds: int = 6,
    controls: Sequence[Control] = get_args(Control),
    draws: int = DRAWS,
    test: Prompts | None = None,
    test_labels: Labels | None = None,
    seed: int = 0,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Fit a linear probe to every tensor of every block at every named span, and score it on groups that it never saw.

    Args:
        labels: what is to be read; see `experiments.labels.Labels`.
        of: another set, whose rows the labels are of; a prompt gets that of its group.
        tensors: any spellings; None: all that can be read, and ``attrs["left_out"]`` says why others can't. Of
            ``experts`` the chosen set is read (a 1 for each); of ``S`` and ``A`` the rows by key, where all prompts are
            of one shape; of slot tensors the slot that holds ``e``.
        blocks: None: all that have the tensor.
        at: spans, and positions of prompts that share a shape; None: every span that all prompts have, at its last
            token.
        e: an expert. Its ``gates`` and ``delta_experts`` are 0 where it was not chosen; its other tensors are read from
            those prompts alone that chose it there, as ``n`` tells.
        probe: ``ridge``, least squares on class indicators; ``logistic``, at some twenty times the cost; ``means``, the
            nearest class mean.
        width: principal components that a probe sees.
        folds: parts that groups are dealt into: one is set aside, the others are cross-validated. 4 or more.
        controls: ``shuffled``, over ``draws``: groups exchange their labels, see `experiments.labels.shuffled`;
            ``random``: the same tensor with random weights; ``tokens``: how often each token stands up to that place.
        test: another set, read by the same probes: by one that hasn't seen the row's group, where that is in both.
        test_labels: its labels; None: as ``labels``.
        seed: of folds, shuffles and random weights.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A row for each cell, and one for each of its controls (column ``against``). ``value`` is the accuracy, or r² of
        numbers, with its interval over groups, which ``n`` counts (a point where no group is read wrong: with n groups
        read right, 1 − 3/n is as possible); ``base`` that of always guessing training's commonest label, or mean; p is
        that of reading more than ``base``, as in `experiments.stats`, and 1 where it doesn't (of nothing, r² is below
        0). One row whose ``group`` is ``held out`` scores the best cell on the groups set aside; rows with a
        ``source``, which names the training set, score ``test``. Bit-equal vectors (``q_C``, ``Q_C``) are fitted once
        and marked ``same_as``. ``attrs["unmatched"]`` counts cells without a value: too few prompts chose the expert.

    Raises:
        UnknownTensor, OutOfRange: a tensor, block, expert or position that doesn't exist, or too few prompts.
        UnknownDim: a slot tensor without ``e``.
        BadProbe: labels, groups, places or tensors that no probe can be fitted to.
        BadEdit: a span that some prompts lack.
        BadSample: a position, of prompts in which it is different words.
    """
    check_drawn(seed, draws=draws, folds=folds, width=width)
    model = model.reaching(beyond)
    _check(probe, controls, draws)
    sets = [prompts] if test is None else [prompts, test]
    taught = lesson(sets, truth(sets, labels, of, test_labels), folds, draws if "shuffled" in controls else 0, seed)
    sites, left_out = readable(model, sets, tensors, blocks, e)
    study = _Study(sets, find_places(sets, at), e, taught, _how(taught, probe, width, seed))
    tables = list(study.tables(model, sites, controls))
    told_labels = None if test_labels is None else _name(test_labels, None)
    same: dict[str, Any] = {
        **common(model, name),
        "label": _name(labels, of),
        "probe": probe,
        "seed": seed,
        "options": other_options(
            probes, e=e, width=width, folds=folds, draws=draws, test=test, test_labels=told_labels
        ),
        "metric": "accuracy" if taught.classes else "r2",
        "unit": "1",
    }
    df = frame(pd.concat(tables, ignore_index=True).assign(**same), study="probes")
    df.attrs["left_out"] = left_out
    df.attrs["unmatched"] = int(tables[0]["value"].isna().sum())
    return df


def outlook(
    model: HookedModel,
    prompts: Prompts,
    labels: Labels = "label",
    *,
    of: Prompts | None = None,
    tensors: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    at: Sequence[Place] | None = None,
    e: int | None = None,
    probe: Probe = "ridge",
    width: int = WIDTH,
    folds: int = 6,
    controls: Sequence[Control] = get_args(Control),
    draws: int = DRAWS,
    test: Prompts | None = None,
    test_labels: Labels | None = None,
    seed: int = 0,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `probes` would take; see `experiments.study.passes`. Most of its time are ``fits``, of which one is made."""
    check_drawn(seed, draws=draws, folds=folds, width=width)
    model = model.reaching(beyond)
    _check(probe, controls, draws)
    sets = [prompts] if test is None else [prompts, test]
    taught = lesson(sets, truth(sets, labels, of, test_labels), folds, draws if "shuffled" in controls else 0, seed)
    sites, _left_out = readable(model, sets, tensors, blocks, e)
    study = _Study(sets, find_places(sets, at), e, taught, _how(taught, probe, width, seed))
    return study.cost(model, sites, controls, timed)


def _check(probe: str, controls: Sequence[str], draws: int) -> None:
    if probe not in get_args(Probe):
        raise BadProbe(f"probe={probe!r}: probes are {', '.join(get_args(Probe))}.")
    if isinstance(controls, str) or (odd := [control for control in controls if control not in get_args(Control)]):
        wrong = controls if isinstance(controls, str) else odd[0]
        raise BadProbe(f"controls={wrong!r}: give a list out of {', '.join(get_args(Control))}.")
    if draws < 1:
        raise OutOfRange(f"draws={draws}: labels are shuffled once or more.")
    if draws != DRAWS and "shuffled" not in controls:
        raise BadProbe(f"draws={draws}: of shuffled labels, and 'shuffled' is not among the controls; leave it out.")


def _how(taught: Lesson, probe: Probe, width: int, seed: int) -> How:
    """What probe to fit, if there are prompts enough."""
    if probe != "ridge" and not taught.classes:
        raise BadProbe(f"probe={probe!r} tells classes apart, and the labels are numbers; take 'ridge'.")
    fewest = taught.fewest()
    if not 0 < width <= fewest:
        raise OutOfRange(
            f"width={width}: 1 to {fewest}. So few prompts teach where two folds and the groups set aside are left out;"
            f" half of them, {fewest // 2}, is a good width, and more prompts are better."
        )
    return How(probe, width, seed)


def _name(labels: Labels, of: Prompts | None) -> str:
    """What to call the labels in a frame."""
    named = labels if isinstance(labels, str) else getattr(labels, "__name__", None) or getattr(labels, "name", None)
    return (named if isinstance(named, str) and named != "<lambda>" else "given") + (f" of {of.name}" if of else "")


# ---- fitting and reporting -------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """How every row was read out of every cell, [cells, rows]; NaN where not.

    Attributes:
        cells: the columns that say which.
        right: 1 where the class was read right, else 0; of numbers the squared error. Of shuffled labels, the mean over
            draws.
        base: the same of a guess.
    """

    cells: Sequence[dict[str, Any]]
    right: Numbers
    base: Numbers

    def only(self, cell: int) -> Judged:
        """One cell."""
        part = slice(cell, cell + 1)
        return Judged(self.cells[part], self.right[part], self.base[part])


def _judged(X: Numbers, there: Bools, taught: Lesson, how: How) -> Numbers:
    """One cell of `Judged`, of the true labels and of shuffled ones: right and base, [2, 2, rows]."""
    made = np.full((2, 2, len(there)), np.nan)
    there = there & np.isfinite(X).all(-1)
    part = taught.only(there)
    if len(part.folds) < LEAST_FOLDS - 1 or part.fewest() < min(how.width, X.shape[1]):
        return made  # too few prompts chose the expert, or were finite
    both = np.stack([marks(scores, part.targets) for scores in (Fits(X[there], part, how).scores(), guesses(part))])
    made[0][:, there] = both[..., 0]
    if both.shape[-1] > 1:
        made[1][:, there] = both[..., 1:].mean(-1)
    return made


@dataclass(frozen=True)
class _Study:
    """What stays the same in all tables of a sweep."""

    sets: Sequence[Prompts]
    places: Places
    e: int | None
    taught: Lesson
    how: How

    def tables(self, model: HookedModel, sites: Sequence[Site], controls: Sequence[Control]) -> Iterator[pd.DataFrame]:
        """The cells cross-validated; the best one on the groups set aside; the test set; the controls."""
        sets, places, taught = self.sets, self.places, self.taught
        own = np.arange(len(taught.fold)) < len(sets[0])
        found, shuffled = self._judge(read(model, sets, places.tokens, sites, self.e), taught, "probes")
        yield (table := self._table(found, taught.teaches))
        if table["value"].notna().any():
            yield self._table(found.only(int(table["value"].argmax())), own & ~taught.teaches, group="held out")
        if len(sets) > 1:
            yield self._table(found, ~own, prompts=sets[1].name, source=sets[0].name)
        if "shuffled" in controls:
            yield self._table(shuffled, taught.teaches, against="shuffled")
        alone = taught.only(own, sets=1)
        if "random" in controls:
            dtype = model.decoder.weights.read(None, "W_E").dtype
            weights = random_weights(model.dims, self.how.seed, dtype, model.device)
            other = HookedModel(weights, numerics=model.decoder.numerics).reaching(model.decoder.beyond)
            drawn, _ = self._judge(read(other, sets[:1], places.tokens[:1], sites, self.e), alone, "random weights")
            yield self._table(drawn, alone.teaches, against="random")
        if "tokens" in controls:
            counted, _ = self._judge({None: count_tokens(sets[0], places.tokens[0])}, alone, "bag of tokens")
            yield self._table(counted, alone.teaches, against="tokens")

    def cost(
        self, model: HookedModel, sites: Sequence[Site], controls: Sequence[Control], timed: bool
    ) -> dict[str, float]:
        """What all of that takes."""
        again = "random" in controls
        batches = [some.batch(model.device) for some in (*self.sets, *self.sets[:again])]
        places = len(self.places.columns)
        cost = passes(model, batches, len(sites) * places, timed=timed)
        fits = len(sites) * places * (1 + again) + places * ("tokens" in controls)
        cost["forwards"] = sum(one.tokens.numel() for one in batches) / batches[0].tokens.numel()
        return {**cost, "fits": fits, "seconds": cost["seconds"] + fits * (self._second(model, sites) if timed else 0)}

    def _second(self, model: HookedModel, sites: Sequence[Site]) -> float:
        """How long a fit takes, on noise as wide as these tensors are on average."""
        rows, width = len(self.taught.fold), sum(numel(model, site, 1, 1) for site in sites) // len(sites)
        noise = np.random.default_rng(0).standard_normal((rows, width))
        start = time.perf_counter()
        _judged(noise, np.ones(rows, dtype=bool), self.taught, self.how)
        return time.perf_counter() - start

    def _judge(self, vectors: Mapping[Site | None, Vectors], taught: Lesson, what: str) -> tuple[Judged, Judged]:
        """Fit and read out every cell, of the true labels and of shuffled ones; equal vectors of a block, at one place,
        once."""
        cells: list[dict[str, Any]] = []
        found: list[Numbers] = []
        first: dict[Any, tuple[str, Numbers]] = {}
        with progress(len(vectors) * len(self.places.columns), what) as bar:
            for site, (X, there) in vectors.items():
                for i, place in enumerate(self.places.columns):
                    part, rows = X[:, i].flatten(1).double().numpy(), there[:, i].numpy()
                    key = (site and site.block, i, blake2b(part.tobytes() + rows.tobytes()).digest())
                    cells.append(place | self._columns(site))
                    if key in first and rows.any():
                        cells[-1]["same_as"] = first[key][0]
                    else:
                        first[key] = str(site and site.tensor), _judged(part, rows, taught, self.how)
                    found.append(first[key][1])
                    bar.update()
        true, shuffled = np.stack(found, axis=2)
        return Judged(cells, *true), Judged(cells, *shuffled)

    def _columns(self, site: Site | None) -> dict[str, Any]:
        """What a frame says of a tensor."""
        if site is None:
            return {}
        return {"block": site.block, "tensor": site.tensor} | ({"expert": self.e} if site.tensor in SLOTS else {})

    def _table(self, judged: Judged, rows: Bools, **same: Any) -> pd.DataFrame:
        """A row for each cell, averaged over these prompts' groups."""
        groups = [prompt.group for prompts in self.sets for prompt in prompts.rows]
        these = [groups[i] for i in np.flatnonzero(rows)]
        marks, base = judged.right[:, rows], judged.base[:, rows]
        if self.taught.classes:
            found = summary(marks, base, these, seed=self.how.seed)
            low, high = interval(units(marks, these), seed=self.how.seed)
            numbers = {"value": found["value"], "base": found["base"], "ci_low": low, "ci_high": high}
        else:  # r² is how far the squared error goes from that of the mean to 0
            found = summary(marks, base, these, np.zeros(len(these)), seed=self.how.seed)
            r2 = found["recovered"]
            numbers = {
                "value": r2,
                "base": np.where(np.isnan(r2), r2, 0.0),
                "ci_low": found["ci_low"],
                "ci_high": found["ci_high"],
            }
        more = numbers["value"] > numbers["base"]
        numbers |= {"n": found["n"], "p": np.where(more | np.isnan(found["p"]), found["p"], 1.0)}
        numbers["p_family"] = found["p_family"]
        return pd.DataFrame(judged.cells).assign(**{"prompts": self.sets[0].name, **numbers, **same})


# ---- a direction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Direction:
    """Where a probe found something, as a vector to add: see `direction`.

    Attributes:
        site: the tensor that it lives in; ``e``: the expert whose slot, of a slot tensor.
        at: the place that it was read at.
        label, to: what was read, and which class it points to; ``to`` is None for numbers.
        vector: of length 1, [the tensor's last axes: d, h v, ...].
        unit: how far activations move along it, on average, from the other classes to this one, or as a number goes up
            by 1: in the activations' own unit. ``edit(alpha=1)`` moves them so far.
        weights, bias: what `read` takes; as ``vector``.
        probe, prompts, n: the probe, the set that it was fitted to, and how many groups that has.
    """

    site: Site
    e: int | None
    at: Place
    label: str
    to: str | None
    vector: Tensor
    unit: float
    weights: Tensor
    bias: float
    probe: Probe
    prompts: str
    n: int

    def __str__(self) -> str:
        to = self.label if self.to is None else f"{self.label} {self.to!r}"
        return (
            f"{to} in {self.site}, read at {self.at!r} by {self.probe} from {self.n} groups of {self.prompts};"
            f" alpha 1 moves by {self.unit:.3g}"
        )

    def read(self, values: Tensor) -> Tensor:
        """The probe's readout of the tensor's values, [..., the vector's axes] → [...]: the class's score less the mean
        of the others', or the number.

        Raises:
            ShapeMismatch: they have other last axes.
        """
        axes = self.vector.ndim
        if values.shape[-axes:] != self.vector.shape:
            raise ShapeMismatch(f"values are {list(values.shape)}; {self.site} ends in {list(self.vector.shape)}.")
        return (values.double() * self.weights.to(values.device)).flatten(-axes).sum(-1) + self.bias

    def edit(self, alpha: float = 1.0, **where: Any) -> Edit:
        """Add ``alpha`` units at a place, as `hooks.add` does.

        Raises:
            BadEdit: the tensor can't be steered so.
        """
        if self.site.tensor in SCORES:
            raise BadEdit(f"{self.site}: a direction over the keys of one place is none at another; edit it by set_to.")
        own: dict[str, Any] = {} if self.e is None else {"e": self.e}
        return add(self.site.tensor, self.site.block, direction=self.vector * self.unit, alpha=alpha, **(own | where))


def direction(
    model: HookedModel,
    prompts: Prompts,
    labels: Labels,
    tensor: str,
    block: int,
    at: Place,
    *,
    of: Prompts | None = None,
    to: str | None = None,
    e: int | None = None,
    probe: Probe = "ridge",
    width: int = WIDTH,
    folds: int = 6,
    seed: int = 0,
) -> Direction:
    """The direction that a probe finds at one cell, fitted to all prompts, as a steering edit.

    For ``ridge`` and ``logistic`` it is the weights of the class less the mean of the others', taken back from
    components and scales to the tensor's own coordinates; for ``means``, the class's mean less that of all other rows.

    Args:
        to: the class to point to; None for numbers, which it goes up with.

    Raises:
        BadProbe: ``to`` is no class, or numbers have none; and as `probes`.
    """
    _check(probe, (), DRAWS)
    true = truth([prompts], labels, of)
    taught = lesson([prompts], true, folds, 0, seed, aside=False)
    if to not in (true.classes or (None,)):
        known = f"the classes are {', '.join(true.classes)}" if true.classes else "labels are numbers; leave it out"
        raise BadProbe(f"to={to!r}: {known}.")
    ((site,), _) = readable(model, [prompts], [tensor], [block], e)
    made = read(model, [prompts], find_places([prompts], [at]).tokens, [site], e)[site]
    there = made.there[:, 0].numpy()
    X, taught = made.values[:, 0].flatten(1).double().numpy()[there], taught.only(there)
    if not np.ptp(taught.targets[:, 0], axis=0).all():
        raise BadProbe(f"{site}, e={e}: the prompts that chose the expert don't have all labels.")
    c = 0 if to is None else true.classes.index(to)
    target = taught.targets[:, 0, c]
    weights, bias = (_against_others(x, c) for x in Fits(X, taught, _how(taught, probe, width, seed)).affine())
    along = X[target == 1].mean(0) - X[target == 0].mean(0) if probe == "means" else weights
    if not (size := np.linalg.norm(along)):
        raise BadProbe(f"{site} at {at!r}: nothing differs between the rows; there is no direction.")
    vector = along / size
    unit = np.polyfit(target, X @ vector, 1)[0]
    axes = made.values.shape[2:]
    return Direction(
        site,
        e,
        at,
        _name(labels, of),
        to,
        torch.from_numpy(vector).float().view(axes),
        float(unit),
        torch.from_numpy(weights).view(axes),
        float(bias),
        probe,
        prompts.name,
        len({prompt.group for prompt, here in zip(prompts.rows, there, strict=True) if here}),
    )


def _against_others(scores: Numbers, c: int) -> Numbers:
    """A class's score less the mean of the others', [..., K] → [...]; a number as it is."""
    k = scores.shape[-1]
    return np.asarray(scores[..., c] - (scores.sum(-1) - scores[..., c]) / (k - 1) if k > 1 else scores[..., 0])
