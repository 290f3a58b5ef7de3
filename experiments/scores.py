"""What a head's attention goes by: what the tokens say, or where they stand; and which known kind of head it is.

A score of MLA is a sum of two, which nothing has to estimate: content (``Q_C`` · ``K_C``, read from the latents, never
rotated) and position (``Q_R`` · ``k_R``, one rotary key for all heads). For each head `scores` says how much of what
tells its keys apart is content, and what it would attend to by content alone and by position alone; and how much it
gives to the token before, to earlier copies of its token, and to what followed those.

One forward pass, which stops at the last block's keys. Scores and patterns exist for one block, and for one chunk of
queries, at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from experiments.finite import telling
from experiments.frames import BadFrame, check_one
from experiments.prompts import Prompt, Prompts
from experiments.study import Reading, chosen_blocks, passes, report
from hooks import HookedModel
from probe import Dims, Tokenizer
from probe.errors import BadText, check_seed
from probe.heads import split_scores
from probe.numerics import query_chunks
from probe.sites import Site

INTO_SCORES = ("Q_C", "Q_R", "K_C", "k_R")
"""What scores are made of, in the order in which a block makes it."""

Key = tuple[str, str]
"""A metric, and the edit of the head; empty: none."""

KINDS = ("previous_token", "duplicate_token", "induction")
"""The kinds of head that are scored; `scores` says which keys each attends to."""


@telling
def scores(
    model: HookedModel,
    prompts: Prompts,
    *,
    blocks: Sequence[int] | None = None,
    per_prompt: bool = False,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    r"""Content against position in every head's scores, and how far each is a head of a known kind.

    A query t sees the keys V(t), and scores them S = c + p. What is equal for all its keys drops out of the softmax, so
    that variances are taken over V(t), query by query. ``content_share``, of ``S``, is

    .. math:: \Sigma_t \, \mathrm{cov}_{V(t)}(c, S) \,/\, \Sigma_t \, \mathrm{var}_{V(t)}(S)

    and that of position what lacks to 1. Below 0, or above 1, the two work against each other.

    All else is of ``A``: as it is, and as three edits of the head would leave it. ``zero Q_R`` leaves content alone,
    ``zero Q_C`` position alone, ``zero Q`` neither: all keys alike, for comparison. ``overlap`` of such a pattern A' is

    .. math:: \mathrm{mean}_t \, \Sigma_s \min(A_{ts}, A'_{ts})

    from 1, where it is the head's own, to 0, where they have no key in common. A head is of a kind as far as it attends
    to that kind's keys s: a mean over the queries t that have any, of all their keys together.

    - ``previous_token``: s = t − 1;
    - ``duplicate_token``: s < t with t's token;
    - ``induction``: s ≤ t, and right before s, before t, stands t's token.

    Position 0 is no key of any kind, as heads rest there that have nowhere to go; and its query, which has no choice,
    doesn't count.

    Args:
        blocks: None: all.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame by block and head. Averages are over the queries of a prompt, then over groups, with their interval;
        ``content_share`` is the ratio of the two sums' averages. Prompts without a query that counts are left out:
        ``n`` says how many groups are behind a number, which is NA for none.

    Raises:
        OutOfRange: a block that does not exist.
        BadText: no prompt has a second token.
    """
    model = model.reaching(beyond)
    asked = _asked(model, prompts, blocks)
    tokens, keep = prompts.batch(model.device)
    meter = _Meter(model.dims, tokens, torch.ones_like(tokens).bool() if keep is None else keep)
    reduce = {Site(block, part): partial(meter.see, part) for block in asked for part in INTO_SCORES}
    made = model.run(tokens, keep, want=None, reduce=reduce).cache.reduced
    readings = [one for block in asked for one in _readings(block, made[Site(block, INTO_SCORES[-1])])]
    return report(model, prompts, readings, study="scores", per_prompt=per_prompt, name=name)


def outlook(
    model: HookedModel,
    prompts: Prompts,
    *,
    blocks: Sequence[int] | None = None,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `scores` would take; see `experiments.study.passes`."""
    model = model.reaching(beyond)
    heads = model.dims.h * len(_asked(model, prompts, blocks))
    return passes(model, [prompts.batch(model.device)], heads, timed=timed)


def _asked(model: HookedModel, prompts: Prompts, blocks: Sequence[int] | None) -> list[int]:
    if max(len(prompt.tokens) for prompt in prompts.rows) < 2:
        raise BadText(f"{prompts.name}: no prompt has a second token, and where there is one key there is no choice.")
    return chosen_blocks(model, blocks)


def _readings(block: int, measures: dict[Key, tuple[Tensor, Tensor]]) -> Iterator[Reading]:
    """A block's measures, head by head. Of variances both means are kept: their ratio is taken over all prompts."""
    for (metric, edit), (above, below) in measures.items():
        ratio = metric == "content_share"
        values = above.masked_fill(below == 0, torch.nan) if ratio else above / below
        for head in range(values.shape[1]):
            what = {"block": block, "tensor": "S" if ratio else "A", "head": head, "edit": edit or pd.NA}
            yield Reading(what, metric, "1", values[:, head], per=below[:, head] if ratio else None)


def heads_above(df: pd.DataFrame, metric: str, least: float = 0.5) -> list[tuple[int, int]]:
    """The heads, as (block, head), whose attention as it is scores more than ``least``: all induction heads, say.

    Raises:
        BadFrame: the frame has no such metric by head, or is of several models or sets of prompts.
    """
    check_one(df)
    known = list(df["metric"].unique()) if "head" in df else []
    if metric not in known:
        raise BadFrame(f"the frame has no metric {metric!r} by head; it has {', '.join(known) or 'none'}.")
    here = df[(df["metric"] == metric) & (df["value"] > least)]
    here = here[here["edit"].isna()] if "edit" in here else here
    return sorted({(int(block), int(head)) for block, head in zip(here["block"], here["head"], strict=True)})


def repeated(
    tokenizer: Tokenizer, words: Sequence[str], *, length: int = 16, n: int = 32, seed: int = 0, name: str = "repeated"
) -> Prompts:
    """Random lists of words, each list said twice: there is nothing to go by but what followed a word the first time.

    Args:
        words: to draw from, each of one token of the vocabulary.
        length: of a list, whose words differ.
        n: how many lists; each is a group.

    Raises:
        BadText: a word is not one token, or there are fewer than ``length`` of them.
    """
    ids = {word: tokenizer.id(word) for word in words}
    if not 1 < length <= len(ids) or n < 1:
        raise BadText(f"{n} lists of {length} different words each can't be drawn from {len(ids)}.")
    one = next(iter(ids))
    front = [i for i, (a, b) in zip(tokenizer.encode(one), tokenizer.spans(one), strict=True) if a == b]
    check_seed(seed)
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        said = rng.sample(list(ids), length) * 2
        tokens = (*front, *(ids[word] for word in said))
        end = {"END": range(len(tokens) - 1, len(tokens))}
        rows.append(Prompt(" ".join(said), tokens, None, None, None, f"list {i}", f"{length} words, twice", end))
    return Prompts(tuple(rows), tokenizer, name)


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class _Meter:
    """Sees what a block's scores are made of, and measures once the last of it is there."""

    dims: Dims
    tokens: Tensor
    real: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)

    def see(self, part: str, value: Tensor) -> dict[Key, tuple[Tensor, Tensor]] | None:
        """What a block's heads measure in each prompt, as numerators and denominators, [B h]; None until the last part.

        A reduction, as `hooks.reduce` takes it.
        """
        self.parts[part] = value.to(torch.promote_types(value.dtype, torch.float32))
        if part != INTO_SCORES[-1]:
            return None
        sums: dict[Key, tuple[Tensor, Tensor]] = {}
        for rows in query_chunks(self.tokens.shape[1]):
            for key, (above, below) in self._chunk(rows).items():
                before = sums.get(key, (0.0, 0.0))
                sums[key] = before[0] + above.double().sum(-1), before[1] + below.double().sum(-1)
        self.parts.clear()
        return sums

    def _chunk(self, rows: slice) -> dict[Key, tuple[Tensor, Tensor]]:
        """The same of some queries, one by one: [B h t]."""
        Q_C, Q_R, K_C, k_R = (self.parts[part] for part in INTO_SCORES)
        content, position = split_scores(Q_C[:, rows], K_C, Q_R[:, rows], k_R, self.dims)
        both, neither = content + position, torch.zeros_like(content)
        visible, kinds = self._keys(rows)
        seen = visible.sum(-1, keepdim=True)
        chooses = (seen > 1).expand_as(content[..., :1])[..., 0].double()
        c, s = (_centred(x, visible, seen) for x in (content, both))
        cov, var = ((x * s / seen.clamp(min=1)).sum(-1) for x in (c, s))
        measured = {("content_share", ""): (cov, var)}
        left = {"": both, "zero Q_R": content, "zero Q_C": position, "zero Q": neither}
        A = {edit: x.masked_fill(~visible, torch.finfo(x.dtype).min).softmax(-1) for edit, x in left.items()}
        for edit in list(A)[1:]:
            measured["overlap", edit] = torch.minimum(A[""], A[edit]).sum(-1) * chooses, chooses
        for kind, keys in kinds.items():
            has = keys.any(-1).expand_as(chooses).double()
            for edit, pattern in A.items():
                measured[kind, edit] = (pattern * keys).sum(-1) * has, has
        return measured

    def _keys(self, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        """Which keys these queries see, and which of them are those of each kind of head, [B 1 t S]."""
        tokens, s = self.tokens, torch.arange(self.tokens.shape[1], device=self.tokens.device)
        t = s[rows, None]
        visible = (s <= t) & self.real[:, rows, None] & self.real[:, None, :]
        same = tokens[:, rows, None] == tokens[:, None, :]
        kinds = (s == t - 1, same & (s < t), torch.nn.functional.pad(same[..., :-1], (1, 0)))
        keys = {kind: (at & visible & (s > 0))[:, None] for kind, at in zip(KINDS, kinds, strict=True)}
        return visible[:, None], keys


def _centred(x: Tensor, visible: Tensor, seen: Tensor) -> Tensor:
    """Less its mean over the visible keys; 0 at the others."""
    mean = torch.where(visible, x, 0.0).sum(-1, keepdim=True) / seen.clamp(min=1)
    return torch.where(visible, x - mean, 0.0)
