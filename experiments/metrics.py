r"""What an edit is judged by: each metric is a name, a unit, a formula, the positions it reads and a function of views.

A metric compares what one run shows (`View`) with what the base shows, prompt by prompt, in float64. Applied to the
base itself it gives the base's value, so that ``effect = metric(edited, base) - metric(base, base)`` for all of them.
What must be run so that metrics can be read, and how a run's values become views, is in `experiments.asking`.

A metric is named by a text, here as on the command line and in a TOML file; see `metric` for the spellings. One of your
own is a `Metric` with a function of two views:

>>> def entropy(run: View, base: View) -> Tensor:
...     p = run.read.logits.softmax(-1)
...     return run.read.mean(-torch.xlogy(p, p).sum(-1))
>>> Metric("entropy", "nats", r"-\Sigma_i \, p_i \ln p_i", entropy, reads="S2").unit
'nats'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.prompts import Prompt
from hooks.where import Index
from probe.blocks import around, card
from probe.card import Leaf, Step
from probe.errors import ProbeError, UnknownTensor, asking, nearest


class BadMetric(ProbeError, ValueError):
    """A metric that does not exist, or that these prompts give no ground for."""


@dataclass(frozen=True, eq=False)
class Read:
    """Logits at N positions, those of one prompt behind those of the other; of answers, one for each token of each
    spelling, at the position before it.

    Attributes:
        logits: [N V], float64: the scores of the token that comes next.
        token: [N], the id of the token that does come: of the answer, or of the text; -1 behind the text's last.
        prompt: [N], which of the prompts.
        spelling: [N], which of all spellings of all prompts (not of an answer: the prompt).
        spelt: [spellings], the prompt of each.
        prompts: how many there are, P.
    """

    logits: Tensor
    token: Tensor
    prompt: Tensor
    spelling: Tensor
    spelt: Tensor
    prompts: int

    def mean(self, each: Tensor) -> Tensor:
        """[N] → [P]: the mean over each prompt's positions."""
        if len(each) == self.prompts:  # one each
            return each
        counts = torch.bincount(self.prompt, minlength=self.prompts)
        return each.new_zeros(self.prompts).index_add(0, self.prompt, each) / counts

    def of_token(self, scores: Tensor) -> Tensor:
        """[N V] → [N]: the score of the token that comes."""
        return scores.gather(-1, self.token[:, None])[:, 0]

    def total(self, each: Tensor) -> Tensor:
        """[N] → [P]: summed over the tokens of a spelling; spellings are added up by log-sum-exp."""
        if len(each) == self.prompts:  # one token each
            return each
        sums = each.new_zeros(len(self.spelt)).index_add(0, self.spelling, each)
        most = sums.new_full((self.prompts,), -torch.inf).scatter_reduce(0, self.spelt, sums, "amax")
        most = most.masked_fill(most == -torch.inf, 0.0)  # -inf - -inf would be NaN
        shares = (sums - most[self.spelt]).exp()  # of one spelling: 1, so that its own sum comes back to the bit
        return most + most.new_zeros(self.prompts).index_add(0, self.spelt, shares).log()


class Compared(NamedTuple):
    """A tensor of P prompts.

    Attributes:
        value: [P T ...], positions second, pads on the right.
        real: [P T], true where a token of the prompt stands.
        experts: [P T k], what its slots hold, where it has slots.
    """

    value: Tensor
    real: Tensor
    experts: Tensor | None


@dataclass(frozen=True, eq=False)
class View:
    """What one metric sees of a run on P prompts.

    Attributes:
        prompts: the P prompts.
        reads: ``read``, ``answer`` and ``wrong``, those that the metric asks for; attributes of the same names.
        tensor: what it compares, where it does.
        texts: P continuations, where it has some decoded.
    """

    prompts: tuple[Prompt, ...]
    reads: Mapping[str, Read] = field(default_factory=dict)
    tensor: Compared | None = None
    texts: tuple[str, ...] = ()

    def _get(self, key: str, how: str) -> Read:
        if key not in self.reads:
            raise BadMetric(f"a metric that looks at {key} says so: Metric(..., {how}).")
        return self.reads[key]

    @property
    def read(self) -> Read:
        """The logits at the positions that the metric ``reads``."""
        return self._get("read", "reads=-1")

    @property
    def answer(self) -> Read:
        """What the answers are read from."""
        return self._get("answer", 'needs=("answer",)')

    @property
    def wrong(self) -> Read:
        """What the wrong answers are read from."""
        return self._get("wrong", 'needs=("wrong",)')


@dataclass(frozen=True, eq=False)
class Metric:
    """A number for each prompt.

    Attributes:
        name: in frames and files, and what it can be asked for by.
        unit: of the number; ``1`` for a ratio or a share.
        formula: LaTeX, without dollars; z are logits, p probabilities, a prime marks the edited run.
        of: (the run's view, the base's view) → [P], float64.
        reads: the positions whose logits it sees, as an edit's ``T``: -1 (each prompt's last token), a span's name,
            ``slice(None)`` (all); None: none.
        needs: what is read of every prompt, in `View.reads`: ``answer``, ``wrong``, which it must bring; ``=TEXT``, a
            text that is the same for all.
        tensor: the tensor it compares; without a block (``c_KV``), that of the edited block.
        decodes: how many tokens it wants to see decoded, greedily.
        distance: whether it says how far a run is from the base, so that of the base itself it is at one end of what it
            can be (0; of an agreement 1), and effects of both signs can't be: they get no p value.
    """

    name: str
    unit: str
    formula: str
    of: Callable[[View, View], Tensor]
    reads: Index | None = -1
    needs: tuple[str, ...] = ()
    tensor: str | None = None
    decodes: int = 0
    distance: bool = False

    def __str__(self) -> str:
        return self.name


# ---- answers ---------------------------------------------------------------------------------------------------------


def _logit_difference(run: View, base: View, *, this: str = "answer", other: str = "wrong") -> Tensor:
    both = run.reads[this], run.reads[other]
    single = all(
        len(said.token) == len(said.spelt) for said in both
    )  # one position, where a shift of all logits is lost
    answer, wrong = (said.total(said.of_token(said.logits if single else said.logits.log_softmax(-1))) for said in both)
    return answer - wrong


def _log_probability(run: View, base: View, *, this: str = "answer") -> Tensor:
    said = run.reads[this]
    return said.total(said.of_token(said.logits.log_softmax(-1)))


def _difference_of(parameter: str) -> Metric:
    """Of the prompts' own answers, or of two given texts."""
    name, unit = "logit_difference", "logits"
    if not parameter:
        formula = r"z'_{\mathrm{answer}} - z'_{\mathrm{wrong}}"
        return Metric(name, unit, formula, _logit_difference, reads=None, needs=("answer", "wrong"))
    this, *others = parameter.split("/")
    if len(others) != 1 or not this or others[0] in ("", this):
        raise BadMetric("it is logit_difference:TEXT/OTHER, of two different texts, in which no / stands.")
    needs = f"={this}", f"={others[0]}"
    of = partial(_logit_difference, this=needs[0], other=needs[1])
    return Metric(f"{name}:{parameter}", unit, r"z'_{\mathrm{text}} - z'_{\mathrm{other}}", of, reads=None, needs=needs)


def _probability_of(parameter: str) -> Metric:
    """Of the prompts' own answers, or of a given text."""
    name, unit = "log_probability", "nats"
    if not parameter:
        return Metric(name, unit, r"\ln p'(\mathrm{answer})", _log_probability, reads=None, needs=("answer",))
    of = partial(_log_probability, this=f"={parameter}")
    return Metric(f"{name}:{parameter}", unit, r"\ln p'(\mathrm{text})", of, reads=None, needs=(f"={parameter}",))


def _rank(run: View, base: View) -> Tensor:
    said = run.answer
    greater = (said.logits > said.of_token(said.logits)[:, None]).sum(-1)
    rank = _unless_nan(1.0 + greater.double(), said.logits)  # nothing is greater than NaN: it would be the first
    worst = rank.new_zeros(len(said.spelt)).scatter_reduce(0, said.spelling, rank, "amax")
    return rank.new_full((said.prompts,), torch.inf).scatter_reduce(0, said.spelt, worst, "amin")


def _unless_nan(each: Tensor, logits: Tensor) -> Tensor:
    return each.masked_fill(logits.isnan().any(-1), torch.nan)


# ---- distributions ---------------------------------------------------------------------------------------------------


def _loss(run: View, base: View) -> Tensor:
    return run.read.mean(-run.read.of_token(run.read.logits.log_softmax(-1)))


def _kl(run: View, base: View) -> Tensor:
    p, q = (one.read.logits.log_softmax(-1) for one in (base, run))
    return run.read.mean(torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(-1))


def _top1_agreement(run: View, base: View) -> Tensor:
    z, base_z = run.read.logits, base.read.logits
    return run.read.mean(_unless_nan((z.argmax(-1) == base_z.argmax(-1)).double(), z + base_z))


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _relative_change(tensor: str) -> Callable[[View, View], tuple[Tensor, Tensor]]:
    """‖edited − base‖ / ‖base‖ of a tensor by position, [P T], and where it can be told, as a function of two views."""

    def change(run: View, base: View) -> tuple[Tensor, Tensor]:
        assert run.tensor is not None, "the metric has a tensor"
        assert base.tensor is not None, "the metric has a tensor"
        after, before, real = run.tensor.value.double(), base.tensor.value.double(), base.tensor.real
        moved, their, ours = after - before, run.tensor.experts, base.tensor.experts
        if their is not None and ours is not None:
            moved, before, told = _by_expert(after, their, before, ours, tensor in _ABSENT_IS_ZERO)
            real = real & told
        far, size = (x.flatten(2).norm(dim=-1) for x in (moved, before))
        return torch.where(far == 0, 0.0, far / size), real  # no change is none, of nothing too

    return change


_ABSENT_IS_ZERO = ("gates", "delta_experts")
"""Slot tensors in which an expert that was not chosen counts 0; in the others it has no value."""


def _by_expert(
    after: Tensor, their: Tensor, before: Tensor, ours: Tensor, absent_is_zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots matched by the expert that they hold, never by place.

    Args:
        after, before: [P T k ...] of the edited run and of the base.
        their, ours: [P T k], the experts there.

    Returns:
        What moved, what it moved from (each [P T slots -1]), and [P T], true where any expert can be compared.
    """
    after, before = (x.unsqueeze(-1).flatten(3) for x in (after, before))
    same = ours[..., :, None] == their[..., None, :]
    both, partner = same.any(-1), same.int().argmax(-1)
    moved = after.gather(2, partner[..., None].expand_as(before)) - before
    if not absent_is_zero:
        moved, before = (x.masked_fill(~both[..., None], 0.0) for x in (moved, before))
        return moved, before, both.any(-1)
    moved = torch.where(both[..., None], moved, -before)
    new = after.masked_fill(same.any(-2)[..., None], 0.0)
    return torch.cat([moved, new], 2), before, torch.ones_like(both[..., 0])


def _change_metric(name: str, spelling: str) -> Metric:
    """``relative_change`` or ``relative_change_first`` of a tensor in any spelling."""
    tensor, node = _tensor(spelling or "x_next")
    change = _relative_change(node.name)

    def after_first(run: View, base: View) -> Tensor:
        each, told = change(run, base)
        told = told & (torch.arange(told.shape[1], device=told.device) > 0)
        return torch.where(told, each, 0.0).sum(-1) / told.sum(-1)  # nothing to average (a prompt of one token): NaN

    def at_first(run: View, base: View) -> Tensor:
        each, told = change(run, base)
        return each[:, 0].masked_fill(~told[:, 0], torch.nan)

    of, where = (at_first, "t = 0") if name.endswith("first") else (after_first, "t > 0")
    formula = (
        rf"\mathrm{{mean}}_{{{where}}} \, \Vert {{{node.symbol}}}' - {node.symbol} \Vert / \Vert {node.symbol} \Vert"
    )
    name = name if tensor == "x_next" else f"{name}:{tensor}"
    return Metric(name, "1", formula, of, reads=None, tensor=tensor, distance=True)


def _tensor(spelling: str) -> tuple[str, Step | Leaf]:
    """A tensor in the card's own spelling, with its block where one is named, and its row.

    Raises:
        UnknownTensor: no card has it.
        BadMetric: it holds no numbers that can be more or less.
    """
    match = re.fullmatch(r"(?:blocks|(?:language_model\.)?model\.layers)\.(\d+)\.(.+)", spelling)
    inner = match[2] if match else spelling
    if not match and inner in around().spellings():
        raise BadMetric(f"{inner} is outside the blocks; name a block's tensor: blocks.0.x_n, x_next, c_KV.")
    node = _find(inner)
    if not node.hook or inner == getattr(node, "inverse", None):
        raise BadMetric(f"{inner} is a weight, an input or a reciprocal; name an activation: x_next, c_KV, A.")
    if node.name == "experts":
        raise BadMetric("experts are numbers, none of them more than another; see the column routing_agreement.")
    return (f"blocks.{int(match[1])}.{node.name}" if match else node.name), node


def _find(spelling: str) -> Step | Leaf:
    """The row of a spelling in either kind of block."""
    dense, moe = card(moe=False), card(moe=True)
    plain = spelling.removeprefix("hook_")
    name = plain if plain in dense.hooked or plain in moe.hooked else spelling  # hook_c_KV, but hook_resid_post
    try:
        return moe.find(name)
    except UnknownTensor:
        if name in dense.spellings():
            return dense.find(name)
        raise


# ---- continuations ---------------------------------------------------------------------------------------------------


def _continuation(parameter: str) -> Metric:
    match = re.fullmatch(r"(\d+):(contains|exact|regex)(?:=(.+))?", parameter, re.DOTALL)
    if match is None or int(match[1]) < 1 or (match[2] == "regex" and match[3] is None):
        raise BadMetric(
            "it is continuation:N:contains, :exact (of the answer, or =TEXT), or continuation:N:regex=PATTERN."
        )
    n, how, text = int(match[1]), match[2], match[3]
    try:
        found = re.compile(text or "").search
    except re.error as error:
        raise BadMetric(f"{text!r} is no regular expression: {error}.") from None

    def holds(said: str, prompt: Prompt) -> bool:
        if how == "regex":
            return found(said) is not None
        spelt = (text,) if text is not None else prompt.answer.spellings if prompt.answer else ()
        return any(one.strip() in said if how == "contains" else one.strip() == said.strip() for one in spelt)

    def of(run: View, base: View) -> Tensor:
        pairs = zip(run.texts, run.prompts, strict=True)
        return torch.tensor([float(holds(said, prompt)) for said, prompt in pairs], dtype=torch.float64)

    sign = {"contains": r"\ni", "exact": "=", "regex": r"\sim"}[how]
    name, wanted = f"continuation:{n}:{how}", "answer" if text is None else "given"
    return Metric(
        name if text is None else f"{name}={text}",
        "1",
        rf"[\mathrm{{text}}_{{{n}}} {sign} \mathrm{{{wanted}}}]",
        of,
        reads=None,
        needs=("answer",) if text is None else (),
        decodes=n,
    )


# ---- by name ---------------------------------------------------------------------------------------------------------


def _at(name: str, unit: str, formula: str, of: Callable[[View, View], Tensor], place: str) -> Metric:
    """How far distributions are from the base's, at the place that the metric's name says."""
    if place in ("", "-1"):
        return Metric(name, unit, formula, of, distance=True)
    whole = re.fullmatch(r"-?\d+", place)
    reads: Index = slice(None) if place == "all" else int(place) if whole else place
    name, formula = f"{name}:{int(place) if whole else place}", rf"\mathrm{{mean}}_t \, {formula}"
    return Metric(name, unit, formula, of, reads=reads, distance=True)


_PLAIN = {
    made.name: made
    for made in (
        Metric("rank", "places", r"1 + |\{i : z'_i > z'_{\mathrm{answer}}\}|", _rank, reads=None, needs=("answer",)),
        Metric("loss", "nats", r"-\mathrm{mean}_t \, \ln p'(t)", _loss, reads=slice(None, -1)),
    )
}
_WITH_PARAMETER: dict[str, Callable[[str], Metric]] = {
    "logit_difference": _difference_of,
    "log_probability": _probability_of,
    "kl": partial(_at, "kl", "nats", r"\Sigma_i \, p_i \ln (p_i / p'_i)", _kl),
    "top1_agreement": partial(
        _at, "top1_agreement", "1", r"[\mathrm{argmax} \, p' = \mathrm{argmax} \, p]", _top1_agreement
    ),
    "relative_change": partial(_change_metric, "relative_change"),
    "relative_change_first": partial(_change_metric, "relative_change_first"),
    "continuation": _continuation,
}
_NAMES = (*_WITH_PARAMETER, *_PLAIN)
_USUAL = ("logit_difference", "log_probability", "kl", "relative_change", "relative_change_first")
"""What is measured where nobody says what: what one more read of a run gives."""

METRICS: dict[str, Metric] = {
    name: make("") for name, make in _WITH_PARAMETER.items() if name != "continuation"
} | _PLAIN
"""Every metric that can be asked for by its name alone; `metric` has those with a parameter."""


def metric(spelling: str) -> Metric:
    """The metric that a text names: here, on the command line, in a TOML file.

    ==============================================  ====================================================================
    ``logit_difference``                            answer less wrong
    ``log_probability``, ``rank``                   of the answer; the likeliest token has rank 1
    ``logit_difference:TEXT/OTHER``                 of two given texts, whatever the prompts' answers are
    ``log_probability:TEXT``                        of a given text
    ``loss``                                        of the prompt's own text, mean over its tokens
    ``kl``, ``top1_agreement``                      against the base, after the prompt's last token
    ``kl:PLACE``, ``top1_agreement:PLACE``          after other tokens: a span (``S2``, ``subject[-1]``), a position
                                                    (``3``, ``-2``), or ``all``; the mean over them
    ``relative_change``, ``relative_change_first``  of the edited block's x_next: mean over positions, 0 apart; at 0
    ``relative_change:TENSOR`` (``_first`` too)     of another tensor of that block, ``c_KV``, or of one place,
                                                    ``blocks.3.c_KV``; in any spelling
    ``continuation:N:contains``, ``…:exact``        whether N tokens, decoded greedily, contain or are the answer
    ``continuation:N:contains=TEXT``, ``…:exact=``  … contain or are a text
    ``continuation:N:regex=PATTERN``                … hold a match of a regular expression
    ==============================================  ====================================================================

    Of an answer of several tokens, log-probabilities are summed, each read after the tokens before it; the rank is the
    worst of theirs; and the logit difference is that of the sums (of single tokens the same; a sum of logits would hang
    on what each position adds to all of them, which means nothing). Of several spellings, probabilities are added up;
    the rank is the best one's.

    Raises:
        BadMetric: no such metric, with the nearest, or not such a parameter.
        UnknownTensor: no card has the tensor.
    """
    if spelling in METRICS:
        return METRICS[spelling]
    name, colon, parameter = spelling.partition(":")
    if name not in _PLAIN and name not in _WITH_PARAMETER:
        near = nearest(name, _NAMES)
        hint = f"Nearest: {', '.join(near)}." if near else f"There are {', '.join(_NAMES)}."
        raise BadMetric(f"there is no metric {name!r}. {hint}")
    with asking(f"metric {spelling!r}"):
        if name in _PLAIN:
            raise BadMetric(f"{name} takes nothing behind a colon.")
        if colon and not parameter:
            raise BadMetric("nothing stands behind the colon.")
        return _WITH_PARAMETER[name](parameter)


def choose(names: Sequence[str | Metric] | None, has: Sequence[str]) -> list[Metric]:
    """The metrics of these names, or the usual ones that prompts with ``has`` (``answer``, ``wrong``) can be judged by.

    Raises:
        BadMetric: an unknown name, with the nearest; one that needs what the prompts lack; two metrics of one name.
        UnknownTensor: as `metric`.
    """
    if names is None:
        return [METRICS[name] for name in _USUAL if set(METRICS[name].needs) <= set(has)]
    if not names:
        raise BadMetric(f"no metric is asked for; there are {', '.join(_NAMES)}.")
    chosen: dict[str, Metric] = {}
    own = {one.name for one in names if isinstance(one, Metric)}
    for one in names:
        made = metric(one) if isinstance(one, str) else one
        if lacks := [need for need in made.needs if need not in has and not need.startswith("=")]:
            raise BadMetric(f"{made.name} needs {' and '.join(lacks)} with every prompt; some of these have none.")
        if chosen.setdefault(made.name, made) is not made and made.name in own:
            raise BadMetric(f"two metrics are called {made.name}; a frame could not tell them apart.")
    return list(chosen.values())
