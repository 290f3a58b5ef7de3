"""What the residual stream says of the answer on its way, and what each part of the model has added to that.

`lens` reads each place of the residual stream as if it were the last: through the final norm and the head. `direct`
takes the last residual stream apart into what was added up in it: the embedding, each head, each expert. Given the
final norm's scale, the way from there to the logits is linear, so the parts add up to the logit difference.

That scale is 1/rms of what is read. A lens says which one it took: each place's ``own``; or the ``final`` one, of the
same prompt and position after the last block, by which two places differ exactly by what was written between them.

One forward pass each, which stops before the head; of each tensor nothing but the read positions is kept. An answer of
several tokens is forced behind the place that is read, in a row of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import pandas as pd
import torch
from torch import Tensor

from experiments.asking import LOGITS, Ask
from experiments.effects import full
from experiments.finite import telling
from experiments.frames import frame
from experiments.metrics import METRICS, BadMetric, Metric, choose
from experiments.options import Scale, Split
from experiments.prompts import Prompts, padded
from experiments.stats import check_average
from experiments.study import Reading, chosen_sites, direction_name, other_options, passes, report
from hooks import HookedModel
from hooks.where import Rows
from probe.engine import evaluate, plan
from probe.errors import BadEdit, BadText, ShapeMismatch, UnknownDim, UnknownTensor
from probe.heads import per_head
from probe.sites import Site
from probe.text import Batch

S_FINAL = Site(None, "s_final")

Columns = dict[str, Any]


METRICS_READ = ("logit_difference", "log_probability", "rank", "kl")
"""What the lens reads where nobody says what, as far as prompts have answers for it: see `experiments.metrics`."""


# ---- the lens --------------------------------------------------------------------------------------------------------


@telling
def lens(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] = ("x_n", "x_mid", "x_next"),
    blocks: Sequence[int] | None = None,
    roles: Sequence[str] | None = ("END",),
    scale: Scale = "own",
    metrics: Sequence[str] | None = None,
    per_prompt: bool = False,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    r"""Read the residual stream, or what is written to it, through the final norm and the head.

    .. math:: z = (w_{\mathrm{final}} \odot x \cdot s) W_U,\quad s = \mathrm{rsqrt}(\mathrm{mean}(x^2) + \epsilon)
        \text{ of the place itself, or } s_{\mathrm{final}}

    Args:
        tensors: any spellings of tensors [B T d]. ``x_n`` is read only where the block before is not: it is the same
            as that one's ``x_next``.
        blocks: None: all.
        roles: named spans of one token, ``subject[-1]`` where they have several; ``END`` is the last token. None: every
            position, of prompts that share a shape.
        scale: the final norm's: each place's ``own``, or the ``final`` one (``frozen`` is then ``s_final``).
        metrics: names, see `experiments.metrics.metric`, of those that read logits at one place, which here is the role
            or position; None: those of `METRICS_READ` that the prompts have answers for.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame by block, tensor and role or position. ``value`` is the place's, ``base`` that of the model's own output
        there, and ``kl`` the place's distance from it. Averages are over groups, with their interval. Of an answer of
        several tokens, each is read at the same tensor's place before it, behind the prompt up to the role or position
        and the tokens before: what is summed is what that depth says of the whole answer.

    Raises:
        UnknownTensor, OutOfRange: a tensor or block that does not exist, or one that is not [B T d].
        BadEdit: a role that a prompt lacks, or that is of several tokens.
        BadSample: every position, of prompts of several shapes.
        BadMetric: a metric that these prompts give no ground for, or that reads elsewhere.
    """
    model = model.reaching(beyond)
    sites, read, asked = _asked(model, prompts, tensors, blocks, roles, scale, metrics)
    last = Site(model.dims.blocks - 1, "x_next")
    reduce = dict.fromkeys({*sites, last, S_FINAL}, asked.at)
    made = model.run(asked.tokens, asked.keep, want=None, reduce=reduce).cache.reduced
    readings = []
    for i, (column, ask) in enumerate(zip(read.columns, asked.asks, strict=True)):
        final = made[S_FINAL][i] if scale == "final" else None
        base = {LOGITS: unembed(model, made[last][i])}
        own = {metric.name: ask.values(metric, base, base) for metric in ask.metrics}
        for site in sites:
            here = {LOGITS: unembed(model, made[site][i], final)}
            what = {"block": site.block, "tensor": site.tensor, **column}
            readings += [
                Reading(what, metric.name, metric.unit, ask.values(metric, here, base), own[metric.name])
                for metric in ask.metrics
            ]
    frozen = "s_final" if scale == "final" else pd.NA
    return report(model, prompts, readings, study="lens", per_prompt=per_prompt, name=name, frozen=frozen)


def outlook(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] = ("x_n", "x_mid", "x_next"),
    blocks: Sequence[int] | None = None,
    roles: Sequence[str] | None = ("END",),
    scale: Scale = "own",
    metrics: Sequence[str] | None = None,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `lens` would take; see `experiments.study.passes`."""
    model = model.reaching(beyond)
    sites, read, asked = _asked(model, prompts, tensors, blocks, roles, scale, metrics)
    cost = passes(model, [Batch(asked.tokens, asked.keep)], len(sites) * len(read.columns), timed=timed)
    return {**cost, "forwards": asked.tokens.numel() / prompts.batch().tokens.numel()}  # seconds are of all rows


def _asked(
    model: HookedModel,
    prompts: Prompts,
    tensors: Sequence[str],
    blocks: Sequence[int] | None,
    roles: Sequence[str] | None,
    scale: Scale,
    metrics: Sequence[str] | None,
) -> tuple[list[Site], _Read, _Asked]:
    """All that follows from the arguments of `lens`."""
    if scale not in get_args(Scale):
        raise BadEdit(f"scale={scale!r}: the final norm's scale is {' or '.join(get_args(Scale))}.")
    sites, read = _readable(model, tensors, blocks), _Read.of(model, prompts, roles)
    return sites, read, _Asked.of(model, read, _metrics(prompts, metrics))


def _metrics(prompts: Prompts, names: Sequence[str] | None) -> list[Metric]:
    """The metrics that are read at each place."""
    if names is None:
        names = [name for name in METRICS_READ if set(METRICS[name].needs) <= set(prompts.has())]
    metrics = choose(names, prompts.has())
    for metric in metrics:
        if metric.tensor is not None or metric.decodes or metric.reads not in (None, -1):
            raise BadMetric(f"{metric}: a lens reads logits where roles say; take {', '.join(METRICS_READ)}.")
    return metrics


class _Asked(NamedTuple):
    """What metrics ask at each of several places, as if it were the last: see `experiments.asking.Ask`.

    The rows of all are one batch. One that is the beginning of another is read in that: where answers are single
    tokens, a prompt has one row, up to the last place.

    Attributes:
        asks: of each place, on the prompts up to there.
        places: of each, the rows of the batch and the positions that it reads, [R n].
    """

    asks: list[Ask]
    tokens: Tensor
    keep: Tensor | None
    places: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, model: HookedModel, read: _Read, metrics: Sequence[Metric]) -> _Asked:
        asks = [Ask(model, _up_to(read.prompts, ends), metrics) for ends in read.places.T.tolist()]
        theirs = [_rows(ask) for ask in asks]
        every = sorted({row for some in theirs for row in some})  # a beginning stands right before what goes on from it
        rows = [row for row, after in zip(every, [*every[1:], ()], strict=True) if after[: len(row)] != row]
        places = []
        for ask, some in zip(asks, theirs, strict=True):
            at = [bisect_left(rows, row) for row in some]
            most = max(map(len, ask.read))
            positions = [[*one, *[0] * (most - len(one))] for one in ask.read]
            places.append(
                (torch.tensor(at, device=model.device)[:, None], torch.tensor(positions, device=model.device))
            )
        return cls(asks, *padded(rows, model.device), places)

    def at(self, value: Tensor) -> tuple[Tensor, ...]:
        """What stands at each place in a tensor [B T ...]: [R n ...]."""
        return tuple(value[place] for place in self.places)


def _up_to(prompts: Prompts, ends: Sequence[int]) -> Prompts:
    """Prompts that end at these positions."""
    rows = [
        replace(prompt, tokens=prompt.tokens[: end + 1], spans={"END": range(end, end + 1)})
        for prompt, end in zip(prompts.rows, ends, strict=True)
    ]
    return replace(prompts, rows=tuple(rows))


def _rows(ask: Ask) -> list[tuple[int, ...]]:
    """The rows of an ask without what they are padded with."""
    return [tuple(row[:length]) for row, length in zip(ask.tokens.tolist(), ask.rows.lengths, strict=True)]


def unembed(model: HookedModel, x: Tensor, s: Tensor | None = None) -> Tensor:
    """The logits that the final norm and the head make of a residual stream: the card's own last steps.

    Args:
        x: [B T d].
        s: [B T 1], the norm's scale; None: that of ``x`` itself.
    """
    given = {"x_L": x} if s is None else {"x_L": x, "s_final": s}
    card = model.sites.card(None)
    decoder = model.decoder
    return evaluate(plan(card, ["logits"], given), given, decoder.weights, numerics=decoder.numerics)["logits"]


def _readable(model: HookedModel, tensors: Sequence[str], blocks: Sequence[int] | None) -> list[Site]:
    """The sites to read, each value once."""
    sites = chosen_sites(model, tensors, blocks)
    for site in sites:
        if (shape := model.sites.node(site).shape) != ("B", "T", "d"):
            raise UnknownTensor(
                f"{site} is [{' '.join(shape)}]: the head reads what is as wide as the residual stream, [B T d]."
            )
    return [site for site in sites if site.tensor != "x_n" or Site((site.block or 0) - 1, "x_next") not in sites]


# ---- direct attribution ----------------------------------------------------------------------------------------------


@telling
def direct(
    model: HookedModel,
    prompts: Prompts,
    *,
    by: Sequence[Split] = ("head", "expert"),
    role: str = "END",
    direction: Tensor | None = None,
    per_prompt: bool = False,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    r"""What each part of the model adds to the logit difference, or to any direction of logits, straight away.

    .. math:: z_a - z_b = \Sigma_p \, x_p \cdot u,\quad
        u = s_{\mathrm{final}} \, w_{\mathrm{final}} \odot (W_{U,a} - W_{U,b}),\quad \Sigma_p \, x_p = x_L

    What a part does by way of later ones is theirs here. The final norm's scale is held, as ``frozen`` says: that a
    part also makes it smaller or larger is nobody's.

    Args:
        by: what is taken apart: attention by ``head``, a mixture of experts by ``expert`` (and the shared one). Empty:
            ``delta_attn`` and ``delta_ffn`` of each block as they are.
        role: the span of one token behind which the logits are read; see `lens`.
        direction: [V] or [B V], a number for each token's logit; None: +1 for the answer, -1 for the wrong one, each of
            one token and one spelling.
        per_prompt: as in `lens`, and so are ``beyond`` and ``name``.

    Returns:
        A frame with a row for each part: ``x_0``, ``delta_heads`` by head or ``delta_attn``, ``delta_experts`` by
        expert with ``delta_shared``, or ``delta_ffn``. ``value`` is what the part adds, in logits, averaged as an
        ablation's, ``base`` the whole. An expert adds 0 to a prompt that did not choose it. Parts are summed up in
        fp64 and the whole as the model does: ``completeness_gap`` is what their sum leaves of it by rounding, and
        ``attrs["rounding"]`` the largest of any prompt.

    Raises:
        UnknownDim: ``by`` names anything else.
        BadEdit: a role that a prompt lacks, or that is of several tokens.
        BadText: there is no direction, and the prompts give none: no two answers, or several tokens or spellings.
        ShapeMismatch: a direction of another shape, or not finite.
    """
    model = model.reaching(beyond)
    _check_split(by)
    read = _Read.of(model, prompts, (role,))
    toward = _Toward.of(model, prompts, direction)
    last = Site(model.dims.blocks - 1, "x_next")
    made = read.run(model, {**_shares(model, by, read, toward.u), last: read.at, S_FINAL: read.at})
    s = made[S_FINAL][:, 0, 0].double()
    whole = toward.along(unembed(model, made[last])[:, 0])
    parts = [(what, s * share) for what, share in _parts(model, made)]
    readings = [Reading({**what, **read.columns[0]}, toward.metric, "logits", share, whole) for what, share in parts]
    same: Columns = {"frozen": "s_final", "options": other_options(direct, by=by)}
    if direction is not None:
        same["within"] = direction_name(direction)
    df = report(model, prompts, readings, study="direct", per_prompt=per_prompt, name=name, **same)
    each = df["example"] if per_prompt else pd.Series(0, df.index)
    df = full(df)
    df = frame(df.assign(completeness_gap=df["base"] - df["value"].groupby(each).transform("sum")), study="direct")
    df.attrs["rounding"] = float((sum(share for _, share in parts) - whole).abs().max())
    return df


def outlook_direct(
    model: HookedModel,
    prompts: Prompts,
    *,
    by: Sequence[Split] = ("head", "expert"),
    role: str = "END",
    direction: Tensor | None = None,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `direct` would take; see `experiments.study.passes`."""
    model = model.reaching(beyond)
    _check_split(by)
    _Read.of(model, prompts, (role,))
    _Toward.given(model, prompts, direction)
    heads = model.dims.h if "head" in by else 1
    experts = 1 + model.dims.e if "expert" in by else 1
    parts = 1 + sum(heads + (experts if moe else 1) for moe in model.dims.moe)
    return passes(model, [prompts.batch(model.device)], parts, timed=timed)


def _check_split(by: Sequence[Split]) -> None:
    if isinstance(by, str) or not set(by) <= set(get_args(Split)):
        raise UnknownDim(f"by={by!r}: a list of {' and '.join(map(repr, get_args(Split)))}, of both or of none.")


class _Toward(NamedTuple):
    """A direction of logits: what it gives to some tokens, [B n], and what reads it off the normed stream, u [B d]."""

    metric: str
    tokens: Tensor
    amounts: Tensor
    u: Tensor

    @classmethod
    def of(cls, model: HookedModel, prompts: Prompts, direction: Tensor | None) -> _Toward:
        """That direction; None: from the wrong answer to the right one."""
        tokens, amounts = cls.given(model, prompts, direction)
        weights = model.decoder.weights
        u = amounts @ weights.read(None, "W_U")[:, tokens].T.double() * weights.read(None, "w_final").double()
        return cls("logit_difference" if direction is None else "logit_direction", tokens, amounts, u)

    @staticmethod
    def given(model: HookedModel, prompts: Prompts, direction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Its tokens, and what it gives to each."""
        V = model.dims.V
        if direction is None:
            ids = [_only(prompts, key).to(model.device) for key in ("answer", "wrong")]
            tokens, places = torch.unique(torch.stack(ids), return_inverse=True)
            plus, minus = torch.nn.functional.one_hot(places, len(tokens)).double()
            return tokens, plus - minus
        if direction.shape not in ((V,), (len(prompts), V)) or not direction.isfinite().all():
            given = list(direction.shape)
            raise ShapeMismatch(f"a direction of logits is [{V}] or [{len(prompts)} {V}], finite; this is {given}.")
        whole = direction.to(model.device).double().expand(len(prompts), V)
        tokens = whole.any(0).nonzero()[:, 0]
        return tokens, whole[:, tokens]

    def along(self, logits: Tensor) -> Tensor:
        """[B V] → [B]."""
        return (logits[:, self.tokens].double() * self.amounts).sum(-1)


def _only(prompts: Prompts, key: str) -> Tensor:
    """The one token of every row's ``answer`` or ``wrong``, [B].

    Raises:
        BadText: a row has none; or several tokens or spellings, whose sum is no straight line in the stream.
    """
    for i, answer in enumerate(prompts.answers(key)):
        if len(answer.tokens) > 1 or not answer.one_token:
            what = "several spellings" if len(answer.tokens) > 1 else "several tokens"
            raise BadText(
                f"{prompts.name}: the {key} of row {i}, {str(answer)!r}, has {what}; parts add up to one token's logit."
                " Give each row one, or direction=, a number for each token's logit. (lens takes several.)"
            )
    return prompts.ids(key)


def _shares(model: HookedModel, by: Sequence[Split], read: _Read, u: Tensor) -> dict[Site, Callable[[Tensor], Tensor]]:
    """Everything that is added up in the residual stream, and how to take its share along ``u`` as it passes by."""

    def share(value: Tensor) -> Tensor:
        return torch.einsum("b...d,bd->b...", read.at(value)[:, 0].double(), u)

    shares: dict[Site, Callable[[Tensor], Tensor]] = {Site(None, "x_0"): share}
    for block, moe in enumerate(model.dims.moe):
        if "head" in by:  # O, not delta_heads: that is h times as wide as the stream, at every position
            shares[Site(block, "O")] = partial(_of_heads, model, block, read, u)
        else:
            shares[Site(block, "delta_attn")] = share
        if moe and "expert" in by:
            shares |= {Site(block, "experts"): read.at, Site(block, "delta_experts"): share}
            shares[Site(block, "delta_shared")] = share
        else:
            shares[Site(block, "delta_ffn")] = share
    return shares


def _of_heads(model: HookedModel, block: int, read: _Read, u: Tensor, O: Tensor) -> Tensor:
    """[B h]: O_i · (W_O,i u)."""
    W_O = per_head(model.decoder.weights, block, "W_O")
    wide = torch.promote_types(W_O.dtype, torch.float32)
    reader = torch.einsum("hvd,bd->bhv", W_O.to(wide), u.to(wide))
    return (read.at(O)[:, 0].double() * reader.double()).sum(-1)


def _parts(model: HookedModel, made: Mapping[Site, Tensor]) -> Iterator[tuple[Columns, Tensor]]:
    """The columns of each part and its share, [B]."""
    for site in model.sites:
        if site not in made or site.tensor in ("experts", "s_final", "x_next"):
            continue
        what, share = {"block": site.block, "tensor": site.tensor}, made[site]
        if site.tensor == "O":
            yield from (({**what, "tensor": "delta_heads", "head": i}, share[:, i]) for i in range(model.dims.h))
        elif site.tensor == "delta_experts":
            chosen = made[Site(site.block, "experts")][:, 0]
            by_expert = share.new_zeros(len(share), model.dims.e).scatter_add(1, chosen, share)
            yield from (({**what, "expert": e}, by_expert[:, e]) for e in range(model.dims.e))
        else:
            yield what, share


# ---- what both share -------------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """The positions that are read of each prompt: as columns of the frame, and as places, [B n]."""

    prompts: Prompts
    columns: list[Columns]
    places: Tensor

    @classmethod
    def of(cls, model: HookedModel, prompts: Prompts, roles: Sequence[str] | None) -> _Read:
        """One position a role; or all positions of prompts of one shape."""
        if roles is None:
            return cls._all(prompts, model.device)
        if isinstance(roles, str) or not roles:
            raise BadEdit(f"roles={roles!r}: a list of spans' names, or None for every position.")
        rows = Rows(None, len(prompts), max(len(prompt.tokens) for prompt in prompts.rows), prompts.spans)
        places = []
        for b in range(len(prompts)):
            found = [rows.positions(b, role, "roles") for role in roles]
            for role, span in zip(roles, found, strict=True):
                if len(span) != 1:
                    raise BadEdit(
                        f"span {role!r} of row {b} is of {len(span)} tokens, and one is read: {role}[0], {role}[-1]."
                    )
            places.append([span[0] for span in found])
        return cls(prompts, [{"role": role} for role in roles], torch.tensor(places, device=model.device))

    @classmethod
    def _all(cls, prompts: Prompts, device: torch.device) -> _Read:
        check_average([prompt.shape for prompt in prompts.rows], "position")
        length = len(prompts.rows[0].tokens)
        columns: list[Columns] = []
        for pos in range(length):
            ids = {prompt.tokens[pos] for prompt in prompts.rows}
            roles = [name for name, span in prompts.rows[0].spans.items() if pos in span]
            columns.append({"pos": pos})
            if len(ids) == 1:
                columns[-1]["token"] = prompts.tokenizer.token(ids.pop())
            if roles:
                columns[-1]["role"] = ", ".join(roles)
        return cls(prompts, columns, torch.arange(length, device=device).expand(len(prompts), -1))

    def at(self, value: Tensor) -> Tensor:
        """Those of a tensor [B T ...]: [B n ...]."""
        return value[torch.arange(len(value), device=value.device)[:, None], self.places]

    def run(self, model: HookedModel, shares: Mapping[Site, Callable[[Tensor], Tensor]]) -> Mapping[Site, Any]:
        """One pass, as far as these sites; what each function made of its tensor, in the order of the sites."""
        return model.run(*self.prompts.batch(model.device), want=None, reduce=shares).cache.reduced
