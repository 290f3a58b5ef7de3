"""Linear probes by themselves: vectors and labels in, readouts in folds out. Nothing here knows a model.

All rows of a group are in one fold, and a row is read out by a probe that has seen no row of its group. What a probe
needs beside labels (means and scales, principal components, the strength of its regularisation) is found anew from
the rows that teach it: components and scales inside each fold, the strength by the other folds among themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from experiments.labels import Ints, Lesson, Numbers
from experiments.options import Probe

STRENGTHS = (1e4, 1e3, 1e2, 1e1, 1e0)
"""Of regularisation, strongest first: of equally good ones the strongest is taken. Ridge's alpha, logistic's 1/C."""


class How(NamedTuple):
    """What kind of probe, on how many principal components, and the seed where sklearn draws for them."""

    probe: Probe
    width: int
    seed: int


# ---- one fit ---------------------------------------------------------------------------------------------------------


Affine = tuple[Numbers, Numbers]
"""Weights, [strengths w sets K], and biases, [strengths sets K]."""


def _ridge(Z: Numbers, targets: Numbers) -> Affine:
    """Least squares on class indicators or numbers, sklearn's RidgeClassifier or Ridge. Components are uncorrelated, so
    that each has its weight by itself."""
    size = (Z**2).sum(0)[None, :, None, None]
    strength = np.array(STRENGTHS)[:, None, None, None]
    W = np.tensordot(Z, targets, axes=(0, 0)) / (size + strength)
    return W, np.broadcast_to(targets.mean(0), (len(W), *targets.shape[1:]))


def _logistic(Z: Numbers, targets: Numbers) -> Affine:
    """sklearn's logistic regression, one by one. A class that is not there is never read."""
    sets, classes = targets.shape[1:]
    W, b = np.zeros((len(STRENGTHS), Z.shape[1], sets, classes)), np.full((len(STRENGTHS), sets, classes), -np.inf)
    for i, labels in enumerate(targets.argmax(-1).T):
        there = np.unique(labels)
        b[:, i, there] = 0.0
        scored = there[1:] if len(there) == 2 else there  # of two classes sklearn scores the second alone
        for a, strength in enumerate(STRENGTHS if len(there) > 1 else ()):
            made = LogisticRegression(C=1 / strength, max_iter=1000).fit(Z, labels)
            W[a][:, i, scored], b[a, i, scored] = made.coef_.T, made.intercept_
    return W, b


def _means(Z: Numbers, targets: Numbers) -> Affine:
    """The nearest of the classes' means, as sklearn's NearestCentroid: |z − m|² is least where z·m − |m|²/2 is most."""
    counts = targets.sum(0)
    means = np.tensordot(Z, targets, axes=(0, 0)) / np.maximum(counts, 1)
    return means[None], np.where(counts > 0, -0.5 * (means**2).sum(0), -np.inf)[None]


_PROBES: dict[Probe, Callable[[Numbers, Numbers], Affine]] = {"ridge": _ridge, "logistic": _logistic, "means": _means}
"""From the training rows' components, [n w], and targets, [n sets K]."""


class Fit(NamedTuple):
    """A probe of each strength: standardise and project, then an affine map.

    Attributes:
        project: sklearn's pipeline.
        W: [strengths, w, sets, K].
        b: [strengths, sets, K].
    """

    project: Pipeline
    W: Numbers
    b: Numbers

    def scores(self, X: Numbers) -> Numbers:
        """[strengths, n, sets, K]."""
        Z = self.project.transform(X)
        return np.asarray(np.tensordot(Z, self.W, axes=(1, 1)).swapaxes(0, 1) + self.b[:, None])


def fit(X: Numbers, targets: Numbers, how: How) -> Fit:
    """Fit to rows, [n d], of which all teach."""
    project = make_pipeline(StandardScaler(), PCA(min(how.width, X.shape[1]), random_state=how.seed))
    with np.errstate(invalid="ignore"):  # where all rows are equal, PCA divides 0 by 0 for shares that aren't read
        Z = project.fit_transform(X)
    return Fit(project, *_PROBES[how.probe](Z, targets))


# ---- fits in folds ---------------------------------------------------------------------------------------------------


class Fits:
    """The fits that one tensor's rows, [N d], need: each with some folds left out, made once."""

    def __init__(self, X: Numbers, lesson: Lesson, how: How) -> None:
        self.X, self.lesson, self.how = X, lesson, how
        self._made: dict[frozenset[int], Fit] = {}

    def fit(self, *left_out: int) -> Fit:
        """The fit without these folds."""
        key = frozenset(left_out)
        if key not in self._made:
            rows = self.lesson.without(*left_out)
            self._made[key] = fit(self.X[rows], self.lesson.targets[rows], self.how)
        return self._made[key]

    def best(self, *left_out: int) -> Ints:
        """For each set of labels, which strength reads best, judged by the folds that are not left out, each in turn
        by the others."""
        if self.how.probe == "means":  # which has no strength to choose
            return np.zeros(self.lesson.targets.shape[1], dtype=np.intp)
        found = []
        for fold in [fold for fold in self.lesson.folds if fold not in left_out]:
            rows = self.lesson.teaches & (self.lesson.fold == fold)
            scores = self.fit(*left_out, fold).scores(self.X[rows])
            found.append([_quality(one, self.lesson.targets[rows]).mean(0) for one in scores])
        return np.asarray(np.mean(found, axis=0).argmax(0))

    def scores(self) -> Numbers:
        """Every row read out, [N sets K]: by a probe without its fold; by all that teach, where its group does not."""
        made = np.empty_like(self.lesson.targets)
        for left_out in [(), *((fold,) for fold in self.lesson.folds)]:
            rows = self.lesson.fold == left_out[0] if left_out else ~np.isin(self.lesson.fold, self.lesson.folds)
            if rows.any():
                every = self.fit(*left_out).scores(self.X[rows])
                made[rows] = np.take_along_axis(every, self.best(*left_out)[None, None, :, None], axis=0)[0]
        return made

    def affine(self) -> tuple[Numbers, Numbers]:
        """The true labels' probe of all rows that teach, in the rows' own coordinates: weights [d K], biases [K]."""
        (scale, turn), every = self.fit().project, self.fit()
        strength = self.best()[0]
        weights = turn.components_.T @ every.W[strength, :, 0] / scale.scale_[:, None]
        return weights, every.scores(np.zeros((1, len(weights))))[strength, 0, 0]


def guesses(lesson: Lesson) -> Numbers:
    """What a probe that sees nothing says of each row, [N sets K]: the classes' shares, or the mean, in training."""
    made = np.empty_like(lesson.targets)
    for fold in np.unique(lesson.fold):
        made[lesson.fold == fold] = lesson.targets[lesson.without(fold)].mean(0)
    return made


def _quality(scores: Numbers, targets: Numbers) -> Numbers:
    return marks(scores, targets) if targets.shape[-1] > 1 else -marks(scores, targets)


def marks(scores: Numbers, targets: Numbers) -> Numbers:
    """[n sets]: of classes, 1 where the right one has the highest score, else 0; of numbers, the squared error."""
    if targets.shape[-1] > 1:
        return np.asarray(scores.argmax(-1) == targets.argmax(-1), dtype=np.float64)
    return np.asarray((scores - targets)[..., 0] ** 2)
