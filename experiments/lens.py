"""What the residual stream says of the answer on its way, and what each part of the model has added to that.

`lens` reads each place of the residual stream as if it were the last: through the final norm and the head. `direct`
takes the last residual stream apart into what was added up in it: the embedding, each head, each expert. Given the
final norm's scale, the way from there to the logits is linear, so the parts add up to the logit difference.

That scale is 1/rms of what is read. A lens says which one it took: each place's ``own``; or the ``final`` one, of the
same prompt and position after the last block, by which two places differ exactly by what was written between them.

One forward pass each, which stops before the head; of each tensor nothing but the read positions is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import pandas as pd
import torch
from torch import Tensor

from experiments.metrics import METRICS, Read, View
from experiments.options import Scale, Split
from experiments.prompts import Prompts
from experiments.stats import check_average
from experiments.study import Reading, chosen_sites, report
from hooks import HookedModel
from hooks.where import Rows
from probe.engine import evaluate, plan
from probe.errors import BadEdit, ShapeMismatch, UnknownDim, UnknownTensor
from probe.heads import per_head
from probe.sites import Site

S_FINAL = Site(None, "s_final")

Columns = dict[str, Any]


METRICS_READ = ("logit_difference", "log_probability", "rank", "kl")
"""What the lens reads, as far as prompts have answers for it; see `experiments.metrics.metric`."""


# ---- the lens --------------------------------------------------------------------------------------------------------


def lens(
    model: HookedModel,
    prompts: Prompts,
    *,
    tensors: Sequence[str] = ("x_n", "x_mid", "x_next"),
    blocks: Sequence[int] | None = None,
    roles: Sequence[str] | None = ("END",),
    scale: Scale = "own",
    per_prompt: bool = False,
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
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame by block, tensor and role or position, of those of `METRICS_READ` that the prompts have answers for.
        ``value`` is the place's, ``base`` that of the model's own output there, and ``kl`` the place's distance from
        it. Averages are over groups, with their interval.

    Raises:
        UnknownTensor, OutOfRange: a tensor or block that does not exist, or one that is not [B T d].
        BadEdit: a role that a prompt lacks, or that is of several tokens.
        BadSample: every position, of prompts of several shapes.
        BadText: an answer of several tokens, of which the next one alone does not tell.
    """
    if scale not in get_args(Scale):
        raise BadEdit(f"scale={scale!r}: the final norm's scale is {' or '.join(get_args(Scale))}.")
    sites = _readable(model, tensors, blocks)
    metrics = [METRICS[name] for name in METRICS_READ if set(METRICS[name].needs) <= set(prompts.has())]
    read = _Read.of(model, prompts, roles)
    last = Site(model.dims.blocks - 1, "x_next")
    made = read.run(model, dict.fromkeys({*sites, last, S_FINAL}, read.at))
    readings = []
    for i, column in enumerate(read.columns):
        x = {site: values[:, i : i + 1] for site, values in made.items()}
        base = _view(prompts, unembed(model, x[last]))
        own = {m.name: m.of(base, base) for m in metrics}
        for site in sites:
            here = _view(prompts, unembed(model, x[site], x[S_FINAL] if scale == "final" else None))
            what = {"block": site.block, "tensor": site.tensor, **column}
            readings += [Reading(what, m.name, m.unit, m.of(here, base), own[m.name]) for m in metrics]
    frozen = "s_final" if scale == "final" else pd.NA
    return report(model, prompts, readings, study="lens", per_prompt=per_prompt, name=name, frozen=frozen)


def _view(prompts: Prompts, logits: Tensor) -> View:
    """What metrics see of logits [B 1 V] at one place of each prompt, its own answers read from there."""
    z = logits[:, 0].double()
    own = torch.arange(len(z), device=z.device)
    reads = {"read": Read(z, torch.full_like(own, -1), own, own, own, len(z))}
    for key in prompts.has():
        ids = prompts.spellings(key).to(z.device)
        prompt, spelling = (ids >= 0).nonzero(as_tuple=True)
        each = torch.arange(len(prompt), device=z.device)
        reads[key] = Read(z[prompt], ids[prompt, spelling], prompt, each, prompt, len(z))
    return View(prompts.rows, reads)


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


def direct(
    model: HookedModel,
    prompts: Prompts,
    *,
    by: Sequence[Split] = ("head", "expert"),
    role: str = "END",
    direction: Tensor | None = None,
    per_prompt: bool = False,
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
        per_prompt: as in `lens`, and so is ``name``.

    Returns:
        A frame with a row for each part: ``x_0``, ``delta_heads`` by head or ``delta_attn``, ``delta_experts`` by
        expert with ``delta_shared``, or ``delta_ffn``. ``value`` is what the part adds, in logits, averaged as an
        ablation's, ``base`` the whole. An expert adds 0 to a prompt that did not choose it. Parts are summed up in
        fp64 and the whole as the model does; ``attrs["rounding"]`` is the largest difference of any prompt.

    Raises:
        UnknownDim: ``by`` names anything else.
        BadEdit: a role that a prompt lacks, or that is of several tokens.
        BadText: there is no direction, and the prompts give none: no two answers, or several tokens or spellings.
        ShapeMismatch: a direction of another shape, or not finite.
    """
    if isinstance(by, str) or not set(by) <= set(get_args(Split)):
        raise UnknownDim(f"by={by!r}: a list of {' and '.join(map(repr, get_args(Split)))}, of both or of none.")
    read = _Read.of(model, prompts, (role,))
    toward = _Toward.of(model, prompts, direction)
    last = Site(model.dims.blocks - 1, "x_next")
    made = read.run(model, {**_shares(model, by, read, toward.u), last: read.at, S_FINAL: read.at})
    s = made[S_FINAL][:, 0, 0].double()
    whole = toward.along(unembed(model, made[last])[:, 0])
    parts = [(what, s * share) for what, share in _parts(model, made)]
    readings = [Reading({**what, **read.columns[0]}, toward.metric, "logits", share, whole) for what, share in parts]
    df = report(model, prompts, readings, study="direct", per_prompt=per_prompt, name=name, frozen="s_final")
    df.attrs["rounding"] = float((sum(share for _, share in parts) - whole).abs().max())
    return df


class _Toward(NamedTuple):
    """A direction of logits: what it gives to some tokens, [B n], and what reads it off the normed stream, u [B d]."""

    metric: str
    tokens: Tensor
    amounts: Tensor
    u: Tensor

    @classmethod
    def of(cls, model: HookedModel, prompts: Prompts, direction: Tensor | None) -> _Toward:
        """That direction; None: from the wrong answer to the right one."""
        V = model.dims.V
        if direction is None:
            ids = [prompts.ids(key).to(model.device) for key in ("answer", "wrong")]
            tokens, places = torch.unique(torch.stack(ids), return_inverse=True)
            plus, minus = torch.nn.functional.one_hot(places, len(tokens)).double()
            amounts = plus - minus
        else:
            if direction.shape not in ((V,), (len(prompts), V)) or not direction.isfinite().all():
                given = list(direction.shape)
                raise ShapeMismatch(f"a direction of logits is [{V}] or [{len(prompts)} {V}], finite; this is {given}.")
            whole = direction.to(model.device).double().expand(len(prompts), V)
            tokens = whole.any(0).nonzero()[:, 0]
            amounts = whole[:, tokens]
        weights = model.decoder.weights
        u = amounts @ weights.read(None, "W_U")[:, tokens].T.double() * weights.read(None, "w_final").double()
        return cls("logit_difference" if direction is None else "logit_direction", tokens, amounts, u)

    def along(self, logits: Tensor) -> Tensor:
        """[B V] → [B]."""
        return (logits[:, self.tokens].double() * self.amounts).sum(-1)


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
