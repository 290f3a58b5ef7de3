r"""What an edit is judged by: each metric is a name, a unit, a formula and a function of two views of one batch.

A metric compares what the edited run shows (`View`) with what the base shows, prompt by prompt, in float64. Applied to
the base itself it gives the base's value, so that ``effect = metric(edited, base) - metric(base, base)`` for all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from experiments.prompts import Prompts, padded
from hooks.where import Span
from probe.errors import BadEdit, ProbeError, nearest

if TYPE_CHECKING:
    from hooks import Edit, HookedModel


class BadMetric(ProbeError, ValueError):
    """A metric that does not exist, or that these prompts give no ground for."""


@dataclass(frozen=True)
class View:
    """What metrics see of a run on B prompts.

    Attributes:
        logits: [B V], float64: the scores of the next token after each prompt's last real token.
        x_next: [B T d]: what the edited block wrote, the residual stream out of it; None where nothing asked for it.
        real: [B T], true where a token is real.
        answer, wrong: [B, spellings], the token id of each accepted spelling, -1 where a row has fewer; None where the
            prompts have none. Scores and probabilities of spellings are added up, by log-sum-exp.
    """

    logits: Tensor
    x_next: Tensor | None
    real: Tensor
    answer: Tensor | None = None
    wrong: Tensor | None = None


@dataclass(frozen=True)
class Metric:
    """A number for each prompt.

    Attributes:
        unit: of the number; ``1`` for a ratio.
        formula: LaTeX, without dollars; z are the logits at the last real token, a prime marks the edited run.
        of: (edited view, base's view) → [B], float64.
        needs: what a prompt must bring: ``answer``, ``wrong``.
        looks_at_block: whether it reads the edited block's ``x_next``.
    """

    name: str
    unit: str
    formula: str
    of: Callable[[View, View], Tensor]
    needs: tuple[str, ...] = ()
    looks_at_block: bool = False


def last_logits(logits: Tensor, real: Tensor) -> Tensor:
    """The logits at each row's last real token, [B V] in float64.

    Args:
        logits: [B T V].
        real: [B T], true where a token is real.
    """
    places = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, places, -1).max(-1).values
    return logits[torch.arange(len(last), device=logits.device), last.to(logits.device)].double()


def _pick(values: Tensor, ids: Tensor | None) -> Tensor:
    assert ids is not None, "`choose` checks `needs`"
    return values.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf).logsumexp(-1)


def _logit_difference(view: View, base: View) -> Tensor:
    return _pick(view.logits, view.answer) - _pick(view.logits, view.wrong)


def _log_probability(view: View, base: View) -> Tensor:
    return _pick(view.logits.log_softmax(-1), view.answer)


def _kl(view: View, base: View) -> Tensor:
    p, q = base.logits.log_softmax(-1), view.logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _change_by_position(view: View, base: View) -> Tensor:
    """‖Δx_next‖ / ‖x_next‖ by position, [B T]."""
    assert view.x_next is not None, "the caller sees to `looks_at_block`"
    assert base.x_next is not None, "the caller sees to `looks_at_block`"
    before = base.x_next.double()
    change: Tensor = (view.x_next.double() - before).norm(dim=-1) / before.norm(dim=-1)
    return change


def _relative_change(view: View, base: View) -> Tensor:
    after_first = view.real & (view.real.long().cumsum(-1) > 1)
    change = torch.where(after_first, _change_by_position(view, base), 0.0)
    return change.sum(-1) / after_first.sum(-1)  # a prompt of one token has no other position: NaN


def _relative_change_first(view: View, base: View) -> Tensor:
    first = view.real.long().argmax(-1, keepdim=True)
    return _change_by_position(view, base).gather(-1, first).squeeze(-1)


_CHANGE = r"\Vert x'_{n+1} - x_{n+1} \Vert / \Vert x_{n+1} \Vert"

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "logit_difference",
            "logits",
            r"z_{\mathrm{answer}} - z_{\mathrm{wrong}}",
            _logit_difference,
            needs=("answer", "wrong"),
        ),
        Metric("log_probability", "nats", r"\ln p(\mathrm{answer})", _log_probability, needs=("answer",)),
        Metric("kl", "nats", r"\Sigma_i \, p_i \ln (p_i / p'_i)", _kl),
        Metric(
            "relative_change",
            "1",
            rf"\mathrm{{mean}}_{{t > 0}} \, {_CHANGE}",
            _relative_change,
            looks_at_block=True,
        ),
        Metric("relative_change_first", "1", rf"{_CHANGE} \; (t = 0)", _relative_change_first, looks_at_block=True),
    )
}
"""Every metric by name. KL is KL(base ‖ edited); the relative change is of the edited block's x_next, position 0
apart, whose residual stream is many times larger than all others'."""


def choose(names: Sequence[str] | None, has: Sequence[str]) -> list[Metric]:
    """The metrics of these names, or all that prompts with ``has`` (``answer``, ``wrong``) can be judged by.

    Raises:
        BadMetric: an unknown name, with the nearest; or one that needs what the prompts lack.
    """
    if names is None:
        return [metric for metric in METRICS.values() if set(metric.needs) <= set(has)]
    if not names:
        raise BadMetric(f"no metric is asked for; there are {', '.join(METRICS)}.")
    chosen = []
    for name in dict.fromkeys(names):
        if name not in METRICS:
            near = nearest(name, METRICS)
            raise BadMetric(
                f"there is no metric {name!r}."
                + (f" Nearest: {', '.join(near)}." if near else f" There are {', '.join(METRICS)}.")
            )
        if lacks := [need for need in METRICS[name].needs if need not in has]:
            raise BadMetric(f"{name} needs {' and '.join(lacks)} with every prompt; some of these have none.")
        chosen.append(METRICS[name])
    return chosen


# ---- answers of several tokens ---------------------------------------------------------------------------------------


class Said(NamedTuple):
    """How much a run is for each row's answer, [B] in float64."""

    log_probability: Tensor
    logit: Tensor


def teacher_forced(model: HookedModel, prompts: Prompts, key: str = "answer", *, edits: Sequence[Edit] = ()) -> Said:
    """What a run gives to answers of any number of tokens, several spellings among them.

    A spelling's tokens are appended to its prompt, each is read from the logits before it, and summed; spellings are
    added up by log-sum-exp. For answers of one token these are the metrics ``log_probability`` and, as the difference
    of two, ``logit_difference``.

    Args:
        key: ``answer`` or ``wrong``.
        edits: an edit without ``T`` acts on the appended tokens too.

    Raises:
        BadText: a row has no answer.
        BadEdit: an edit counts positions from the end, which the appended tokens move.
    """
    device, answers = model.device, prompts.answers(key)
    longest_first = [sorted(answer.tokens, key=len, reverse=True) for answer in answers]
    sums = []
    for i in range(max(map(len, longest_first))):  # each row's i-th spelling
        said = [spellings[i] if i < len(spellings) else () for spellings in longest_first]
        rows = [(*prompt.tokens, *tokens[:-1]) for prompt, tokens in zip(prompts.rows, said, strict=True)]
        if any(len(tokens) > 1 for tokens in said):
            _check_not_from_the_end(edits)
        logits = model.run(*padded(rows, device), edits=edits, spans=prompts.spans)["logits"]
        for_row = []
        for b, (prompt, tokens) in enumerate(zip(prompts.rows, said, strict=True)):
            first = len(prompt.tokens) - 1
            z = logits[b, first : first + len(tokens)].double()
            ids = torch.tensor(tokens, dtype=torch.long, device=z.device)[:, None]
            each = torch.stack([z.log_softmax(-1).gather(-1, ids).sum(), z.gather(-1, ids).sum()])
            for_row.append(each if tokens else torch.full_like(each, -torch.inf))
        sums.append(torch.stack(for_row, dim=-1))
    return Said(*torch.stack(sums).logsumexp(0))


def _check_not_from_the_end(edits: Sequence[Edit]) -> None:
    for edit in edits:
        for dim, place in edit.where:
            ends = (place.start, place.stop) if isinstance(place, Span) else place if isinstance(place, tuple) else ()
            if dim in ("T", "S") and any(end is not None and end < 0 for end in ends):
                raise BadEdit(f"{edit}: counted from the end, it would be a place in the answer; name it by a span.")
