"""What one head of MLA does, read off the weights: its own matrices, and the ones that inference never makes.

Keys and values come from a latent, so a head's query-key and output-value maps can be absorbed into it: the score of
two tokens, but for rotation, is a bilinear form of their normed latents, and what a head writes a linear map of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from probe.dims import Dims
from probe.engine import Weights
from probe.errors import BadEdit

PER_HEAD = ("W_UQ", "W_QR", "W_UK", "W_UV", "W_O")
"""Weights with a head axis."""


def per_head(weights: Weights, block: int, name: str) -> Tensor:
    """A weight by head, a view: [h, in, out]; for ``W_O``, [h, v, d].

    Raises:
        BadEdit: the weight has no heads.
    """
    if name not in PER_HEAD:
        raise BadEdit(f"{name} has no head axis; {', '.join(PER_HEAD)} have.")
    weight, h = weights.read(block, name), weights.dims.h
    return weight.unflatten(0, (h, -1)) if name == "W_O" else weight.unflatten(1, (h, -1)).transpose(0, 1)


def absorbed_qk(weights: Weights, block: int) -> Tensor:
    """W_UQ,i W_UK,iᵀ, [h, r_q, r_kv]: head i's content score is tau · ĉ^Q (this) ĉ^KVᵀ.

    Without a query latent, r_q is d and ĉ^Q is x_attn.
    """
    return per_head(weights, block, "W_UQ") @ per_head(weights, block, "W_UK").transpose(1, 2)


def absorbed_ov(weights: Weights, block: int) -> Tensor:
    """W_UV,i W_O,i, [h, r_kv, d]: head i writes A_i (ĉ^KV (this)) to the residual stream."""
    return per_head(weights, block, "W_UV") @ per_head(weights, block, "W_O")


class Scores(NamedTuple):
    """A score in two parts, [B, h, T, S] each, scaled and unmasked; they sum to ``S`` wherever that is visible."""

    content: Tensor
    position: Tensor


def split_scores(Q_C: Tensor, K_C: Tensor, Q_R: Tensor, k_R: Tensor, dims: Dims) -> Scores:
    """Split scores into what the tokens say (Q^C · K^C) and how they are placed (Q^R · k^R).

    Args:
        Q_C, K_C: [B, T, h, n] and [B, S, h, n].
        Q_R, k_R: [B, T, h, r] and [B, S, r], rotated.
    """
    content = torch.einsum("bthn,bshn->bhts", Q_C, K_C) * dims.tau
    return Scores(content, torch.einsum("bthr,bsr->bhts", Q_R, k_R) * dims.tau)
