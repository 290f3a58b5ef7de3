"""The model around the blocks: the embedding before the first, the final norm and the head after the last."""

from __future__ import annotations

from torch import Tensor

from probe.card import step
from probe.numerics import inverse_rms, normalise


@step("x_0", "B T d", formula=r"W_E[\mathrm{ids}]", stream="residual", also=("hook_embed", "embed_tokens"))
def x_0(tokens: Tensor, W_E: Tensor) -> Tensor:
    """The residual stream before the first block: one row of the embedding a token, unscaled."""
    return W_E[tokens]


@step(
    r"1/\mathrm{rms}(x_L)",
    "B T 1",
    formula=r"\mathrm{rsqrt}(\mathrm{mean}(x_L^2) + \epsilon)",
    stream="residual",
    dtype="fp32",
    inverse="ln_final.hook_scale",
)
def s_final(x_L: Tensor, eps: float) -> Tensor:
    """The scale that the final RMSNorm multiplies by. ``ln_final.hook_scale`` is its reciprocal."""
    return inverse_rms(x_L, eps)


@step(
    r"x_L/\mathrm{rms}",
    "B T d",
    formula=r"x_L \cdot s_{\mathrm{final}}",
    stream="residual",
    also=("ln_final.hook_normalized",),
)
def n_final(x_L: Tensor, s_final: Tensor) -> Tensor:
    """The last residual stream at unit rms, before the gain."""
    return normalise(x_L, s_final)


@step(
    r"x_{\mathrm{final}}",
    "B T d",
    formula=r"w_{\mathrm{final}} \odot n_{\mathrm{final}}",
    stream="residual",
    also=("ln_final.hook_out", "norm"),
)
def x_final(w_final: Tensor, n_final: Tensor) -> Tensor:
    """What the head reads: RMSNorm of the last block's x_next."""
    return w_final * n_final


@step(r"\mathrm{logits}", "B T V", formula=r"x_{\mathrm{final}} W_U", stream="residual", also=("lm_head",))
def logits(x_final: Tensor, W_U: Tensor) -> Tensor:
    """The scores of every next token."""
    return x_final @ W_U
