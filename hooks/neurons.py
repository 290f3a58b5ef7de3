r"""Every neuron of the last block at once: what zeroing each does to a logit difference, in closed form.

A neuron's change is a rank-1 update of the residual stream, x' = x - h_j W_2[j], and after the last block only the
final norm and two columns of the head follow. So the effect of neuron j needs three numbers: how its row of W_2 lies to
the direction that is read, to the stream, and to itself. All neurons together cost three products with W_2, less than
one forward pass; cell by cell they would cost one run each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from probe.errors import BadEdit, OutOfRange
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel
    from hooks.run import Run

ROWS = 128
"""Rows of W_2 that are in fp32 at a time: few enough to stay in the cache."""


def neuron_effects(
    model: HookedModel,
    tokens: Tensor,
    keep: Tensor | None = None,
    *,
    answer: Sequence[int],
    wrong: Sequence[int],
    tensor: str = "h",
    base: Run | None = None,
) -> Tensor:
    """logit(answer) − logit(wrong) at each prompt's last token with one neuron of the last block at zero there, less
    the same without; in fp32, exact but for rounding.

    Args:
        tokens: [B T]; ``keep`` [B T], true where a token is real.
        answer, wrong: for each prompt, a token id.
        tensor: ``h`` of a dense block, ``h_s`` (the shared expert) of a MoE block.
        base: a run on these prompts that holds the last block's neurons and its x_next; None: one is made.

    Returns:
        [B f] (or [B m_s]), in logits.

    Raises:
        BadEdit: a tensor whose neurons don't write to the stream directly.
        OutOfRange: not a token id for each prompt.
    """
    last = model.dims.blocks - 1
    weight = {"h": "W_2", "h_s": "W_2_s"}.get(tensor)
    if weight is None or Site(last, tensor) not in set(model.sites):
        raise BadEdit(f"{tensor} of block {last} is no plain neuron; h (dense) and h_s (shared expert) are.")
    if not len(answer) == len(wrong) == len(tokens) or not all(0 <= i < model.dims.V for i in (*answer, *wrong)):
        raise OutOfRange(f"answer and wrong should be a token id of 0 to {model.dims.V - 1} for each of the prompts.")
    run = base or model.run(tokens, keep, want=[Site(last, tensor), Site(last, "x_next")])
    rows = torch.arange(len(tokens), device=model.device)
    ends = torch.tensor([n - 1 + first for n, first in zip(run.rows.lengths, run.rows.first, strict=True)])
    h, x = (run[Site(last, name)][rows, ends.to(model.device)].float() for name in (tensor, "x_next"))
    read = model.decoder.weights.read
    W_U, W_2 = read(None, "W_U"), read(last, weight)
    columns = W_U[:, list(answer)].float() - W_U[:, list(wrong)].float()
    direction = (read(None, "w_final").float()[:, None] * columns).T  # [B d]
    along, across, size = (torch.cat(parts, -1) for parts in zip(*_products(W_2, direction, x), strict=True))
    before = (x * direction).sum(-1, keepdim=True)
    squares = x.pow(2).sum(-1, keepdim=True)
    after = squares - 2 * h * across + h.pow(2) * size
    scale, scale_after = (((each / model.dims.d) + model.dims.eps).rsqrt() for each in (squares, after))
    return (before - h * along) * scale_after - before * scale


def _products(W_2: Tensor, direction: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each row of W_2 with the direction, [B f], with the stream, [B f], and with itself, [f]; some rows at a time."""
    made = []
    vectors = torch.cat([direction, x])
    scratch = W_2.new_empty(ROWS, W_2.shape[1], dtype=torch.float32)
    for rows in W_2.split(ROWS):
        part = scratch[: len(rows)].copy_(rows)
        both = vectors @ part.T
        made.append((both[: len(x)], both[len(x) :], torch.linalg.vector_norm(part, dim=-1).square()))
    return made
