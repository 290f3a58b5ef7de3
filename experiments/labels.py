"""What a probe is to read out of prompts, and which prompts may teach it: labels, folds of groups, shuffled labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.prompts import Prompt, Prompts
from probe.errors import OutOfRange, ProbeError

Numbers = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]

Labels = str | Sequence[Any] | Mapping[str, Any] | Callable[[Prompt], Any]
"""``"label"`` or ``"answer"``: the rows' own; one for each row; group → label; or a function of the row. Floats are
numbers to be read, all else names classes."""

LEAST_FOLDS = 4
"""One is set aside; of the others one is scored, one chooses the strength of regularisation, and one must teach."""


class BadProbe(ProbeError, ValueError):
    """A probe that can't be fitted: to these labels, groups or tensors."""


# ---- labels ----------------------------------------------------------------------------------------------------------


class Truth(NamedTuple):
    """The labels of N rows: [N], numbers, or indices of classes."""

    values: Numbers
    classes: tuple[str, ...]


def truth(
    sets: Sequence[Prompts], labels: Labels, of: Prompts | None = None, test_labels: Labels | None = None
) -> Truth:
    """The labels of the rows that teach, and behind them those of the test set, if there is one.

    Args:
        of: the rows that ``labels`` are of, where that is another set; joined by group.
        test_labels: of the test set; None: as ``labels``.

    Raises:
        BadProbe: a row has no label, or one that is not finite; there are too many or too few of them; they don't
            differ; a class is in one group alone; the test set has a class that the other lacks.
    """
    if of is not None:
        labels = _by_group(of, _values(of, labels))
    elif len(sets) > 1 and test_labels is None and not (isinstance(labels, str | Mapping) or callable(labels)):
        raise BadProbe(f"labels are one for each row of {sets[0].name}; give {sets[1].name} its own by test_labels=.")
    each = [labels, labels if test_labels is None else test_labels]
    found = [_values(prompts, how) for prompts, how in zip(sets, each, strict=False)]
    if any(isinstance(value, float | np.floating) for value in found[0]):
        return Truth(_finite(sets, found), ())
    words = [[str(value) for value in values] for values in found]
    classes = tuple(sorted(set(words[0])))
    _check_classes(sets[0], words[0])
    for prompts, some in zip(sets[1:], words[1:], strict=True):
        if new := sorted(set(some) - set(classes)):
            raise BadProbe(f"{prompts.name} has the label {new[0]!r}; {sets[0].name} has {', '.join(classes)}.")
    return Truth(np.array([classes.index(word) for some in words for word in some], dtype=np.float64), classes)


def _values(prompts: Prompts, labels: Labels) -> list[Any]:
    """One label a row, whatever they were given as."""
    if isinstance(labels, str):
        found = [_own(prompt, labels) for prompt in prompts.rows]
    elif callable(labels):
        found = [labels(prompt) for prompt in prompts.rows]
    elif isinstance(labels, Mapping):
        found = [labels.get(prompt.group) for prompt in prompts.rows]
    else:
        found = list(labels.tolist() if hasattr(labels, "tolist") else labels)
    if len(found) != len(prompts):
        raise BadProbe(f"there are {len(found)} labels for the {len(prompts)} rows of {prompts.name}; give one a row.")
    if lacking := [i for i, value in enumerate(found) if value is None]:
        row = prompts.rows[lacking[0]]
        raise BadProbe(f"{prompts.name}: {row.clean!r}, of group {row.group!r}, has no label.")
    return found


def _own(prompt: Prompt, name: str) -> Any:
    if name not in ("label", "answer"):
        raise BadProbe(f"labels={name!r}: rows have 'label' and 'answer'; those of another set are joined by of=.")
    return prompt.label if name == "label" else prompt.answer and str(prompt.answer)


def _by_group(prompts: Prompts, values: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prompt, value in zip(prompts.rows, values, strict=True):
        if found.setdefault(prompt.group, value) != value:
            raise BadProbe(f"{prompts.name}: group {prompt.group!r} has both {found[prompt.group]!r} and {value!r}.")
    return found


def _finite(sets: Sequence[Prompts], found: Sequence[Sequence[Any]]) -> Numbers:
    rows = [(prompts.name, value) for prompts, values in zip(sets, found, strict=True) for value in values]
    for name, value in rows:
        if not (isinstance(value, int | float | np.number) and np.isfinite(value)):
            raise BadProbe(f"{name}: the label {value!r} is no finite number, as the others are.")
    values = np.array([value for _, value in rows], dtype=np.float64)
    if np.ptp(values[: len(found[0])]) == 0:
        raise BadProbe(f"{sets[0].name}: all labels are {values[0]:g}; there is nothing to tell apart.")
    return values


def _check_classes(prompts: Prompts, words: Sequence[str]) -> None:
    groups: dict[str, set[str]] = {}
    for word, prompt in zip(words, prompts.rows, strict=True):
        groups.setdefault(word, set()).add(prompt.group)
    if len(groups) == 1:
        raise BadProbe(f"{prompts.name}: all labels are {words[0]!r}; there is nothing to tell apart.")
    if lone := [word for word, names in groups.items() if len(names) == 1]:
        raise BadProbe(
            f"{prompts.name}: {len(lone)} of {len(groups)} classes, as {lone[0]!r}, are in one group of prompts alone,"
            " so that none is left to learn them from; join classes, or give numbers as floats to have them read as"
            " numbers."
        )


# ---- folds and shuffles ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lesson:
    """What is to be read out of N rows, and which of them teach it.

    Attributes:
        targets: [N, sets, K]. K = 1: a number; more: 1 at the row's class, 0 elsewhere. Sets of labels are fitted side
            by side: the true ones first, then shuffled ones.
        fold: [N]; -1: a row whose group teaches nobody.
        teaches: [N]. The others are only read out.
    """

    targets: Numbers
    fold: Ints
    teaches: Bools

    @property
    def classes(self) -> bool:
        """Whether classes are told apart; else numbers are read."""
        return bool(self.targets.shape[-1] > 1)

    @property
    def folds(self) -> list[int]:
        """The folds that teach."""
        return sorted(set(self.fold[self.teaches].tolist()))

    def without(self, *left_out: int) -> Bools:
        """[N], the rows that teach when these folds don't."""
        return np.asarray(self.teaches & ~np.isin(self.fold, left_out))

    def only(self, rows: Bools, *, sets: int | None = None) -> Lesson:
        """These rows alone, with the first sets of labels (None: all)."""
        return Lesson(self.targets[rows, :sets], self.fold[rows], self.teaches[rows])

    def fewest(self) -> int:
        """How many rows teach where fewest do: with two folds left out."""
        sizes = sorted(int((self.fold[self.teaches] == fold).sum()) for fold in self.folds)
        return sum(sizes[:-2])


def lesson(sets: Sequence[Prompts], true: Truth, folds: int, draws: int, seed: int, *, aside: bool = True) -> Lesson:
    """Labels, shuffled ones beside them, and folds.

    Args:
        sets: prompts that teach, and a test set, if there is one, whose rows are in their group's fold.
        folds: parts that the groups are dealt into; with ``aside`` the last of them teaches nobody.
        draws: how many shuffles.

    Raises:
        BadProbe, OutOfRange: fewer groups than folds, or than 4 folds.
    """
    if folds < LEAST_FOLDS:
        raise OutOfRange(
            f"folds={folds}: {LEAST_FOLDS} or more; one is set aside, one scored, one chooses, one teaches."
        )
    groups = [prompt.group for prompts in sets for prompt in prompts.rows]
    n, rng = len(sets[0]), np.random.default_rng(seed)
    fold_of = dealt(groups[:n], true.values[:n], folds, rng)
    fold = np.array([fold_of.get(group, -1) for group in groups])
    if aside:
        fold[fold == folds - 1] = -1
    order = sets[0].in_order  # so that a shuffle hangs on texts, and not on how they stand
    back, by_text = np.argsort(order), [groups[i] for i in order]
    drawn = (shuffled(true.values[order], by_text, fold[order], rng)[back] for _ in range(draws))
    values = np.stack([true.values, *(np.resize(one, len(groups)) for one in drawn)], axis=1)
    targets = np.eye(len(true.classes))[values.astype(int)] if true.classes else values[..., None]
    return Lesson(targets, fold, (np.arange(len(groups)) < n) & (fold >= 0))


def dealt(groups: Sequence[str], values: Numbers, folds: int, rng: np.random.Generator) -> dict[str, int]:
    """Group → fold: equally many groups a fold, and about equally many of each class, or of each size of number.

    Raises:
        BadProbe: fewer groups than folds.
    """
    names, rows = np.unique(groups, return_inverse=True)
    if len(names) < folds:
        raise BadProbe(
            f"there are {len(names)} groups of prompts for {folds} folds; give more prompts, or fewer folds. Rows of"
            " one group are never both in training and test."
        )
    mean, mixed = np.bincount(rows, values) / np.bincount(rows), rng.permutation(len(names))
    line = mixed[np.argsort(mean[mixed], kind="stable")]
    return {str(names[group]): i % folds for i, group in enumerate(line)}


def shuffled(values: Numbers, groups: Sequence[str], fold: Ints, rng: np.random.Generator) -> Numbers:
    """Labels that say nothing about their rows, and hang together within groups and folds as the true ones do: each
    group gets those of another group in a new order, repeated or cut where sizes differ.

    So where a group has one label (a country's continent), groups exchange them, which a shuffle inside the group would
    leave as they are; where a group's rows differ, they are shuffled too.

    The groups of a fold get the labels of one fold's groups: of its own, or of another that teaches and has as many. So
    what was dealt out evenly stays so. Exchanged among all groups, labels of which a fold has many would be those that
    training has few of, and be read less often than by chance. As it is, were the true labels random, any other
    exchange would have been as likely.

    Args:
        fold: of each row; -1: teaches nobody.
    """
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    mine = np.split(np.argsort(group_of, kind="stable"), np.cumsum(np.bincount(group_of))[:-1])
    made = np.empty_like(values)
    for rows, donor in zip(mine, _donors(fold[first], rng), strict=True):
        made[rows] = rng.permutation(np.resize(rng.permutation(values[mine[donor]]), len(rows)))
    return made


def _donors(fold: Ints, rng: np.random.Generator) -> Ints:
    """Whose labels each group gets, [groups]."""
    folds = np.unique(fold)
    members = [np.flatnonzero(fold == one) for one in folds]
    kind = np.array([len(some) if one >= 0 else 0 for one, some in zip(folds, members, strict=True)])
    made = np.empty_like(fold)
    for one in np.unique(kind):
        alike = np.flatnonzero(kind == one)
        for own, other in zip(alike, rng.permutation(alike), strict=True):
            made[members[own]] = rng.permutation(members[other])
    return made
