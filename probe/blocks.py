"""The cards: one for each kind of block, and one for what stands around the blocks."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from probe import attention, ffn, model
from probe import moe as mixture
from probe.card import Card, Step, step, steps_of
from probe.leaves import DIRECT, LEAVES


@step(
    "x_{n+1}",
    "B T d",
    number=28,
    formula=r"x'_n + \Delta_{\mathrm{ffn}}",
    stream="residual",
    also=("hook_resid_post", "x_<n+1>"),
)
def x_next(x_mid: Tensor, delta_ffn: Tensor) -> Tensor:
    """The residual stream out of the block: the next block's x_n."""
    return x_mid + delta_ffn


_TWO = {
    "self_attn.q_b_proj": "it holds q_C and q_pe, interleaved by head (weights W_UQ and W_QR); name one of them.",
    "self_attn.q_proj": "it holds q_C and q_pe, interleaved by head (weights W_UQ and W_QR); name one of them.",
    "self_attn.kv_b_proj": "it holds k_C and v, interleaved by head (weights W_UK and W_UV); name one of them.",
    "self_attn.kv_a_proj_with_mqa": "it holds c_KV and k_pe (weights W_DKV and W_KR); name one of them.",
}
_MOE_ONLY = {
    **{x: f"name {x}_e (the chosen experts) or {x}_s (the shared one)." for x in "gua"},
    "h": "name h_e (the chosen experts' neurons) or h_s (the shared expert's).",
    "mlp.hook_pre": "TransformerLens shows the MoE's input there; name x_ffn, or g_e and g_s.",
    "mlp.hook_pre_linear": "name u_e (the chosen experts) or u_s (the shared one).",
    "mlp.hook_post": "TransformerLens shows the MoE's output there; name delta_ffn, or h_e and h_s.",
    **{
        f"mlp.{w}_proj": f"name {x}_e (the chosen experts) or {x}_s (the shared one)."
        for w, x in zip(("gate", "up", "down"), "guy", strict=True)
    },
}
_MOE_ONLY["mlp.down_proj"] = "name y_e (the chosen experts) or delta_shared (the shared one)."


@cache
def card(*, moe: bool, query_latent: bool = True) -> Card:
    """The card of a block: every named tensor, in order, of a dense or a MoE block, with or without a query latent.

    >>> card(moe=False).find("Δ_ffn").name
    'delta_ffn'
    """
    kinds = {"", "moe" if moe else "dense", "latent" if query_latent else "direct"}
    rows: list[Step] = [row for row in _rows() if row.only in kinds]
    refused = {f"{spelling}{end}": why for spelling, why in _TWO.items() for end in ("", ".weight")}
    leaves = LEAVES if query_latent else DIRECT
    return Card("MoE" if moe else "dense", rows, leaves, refused=refused | (_MOE_ONLY if moe else {}))


def _rows() -> list[Step]:
    return [*steps_of(attention), *steps_of(ffn), *steps_of(mixture), x_next.step]  # type: ignore[attr-defined]


@cache
def around() -> Card:
    """The card of the model around the blocks: the embedding ``x_0``, the final norm, the logits."""
    return Card("model", steps_of(model), LEAVES)


(
    card(moe=False),
    card(moe=True),
    card(moe=False, query_latent=False),
    card(moe=True, query_latent=False),
    around(),
)
