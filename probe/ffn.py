r"""The feed-forward part of a block: its norm (step 22), and the dense SwiGLU, steps 23 to 27."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from probe.card import step
from probe.numerics import inverse_rms, normalise


@step(
    r"1/\mathrm{rms}(x'_n)",
    "B T 1",
    formula=r"\mathrm{rsqrt}(\mathrm{mean}(x'^2_n) + \epsilon)",
    stream="ffn",
    dtype="fp32",
    inverse="ln2.hook_scale",
)
def s_ffn(x_mid: Tensor, eps: float) -> Tensor:
    """The scale that the feed-forward part's RMSNorm multiplies by. ``ln2.hook_scale`` is its reciprocal."""
    return inverse_rms(x_mid, eps)


@step(
    r"x'_n/\mathrm{rms}", "B T d", formula=r"x'_n \cdot s_{\mathrm{ffn}}", stream="ffn", also=("ln2.hook_normalized",)
)
def n_ffn(x_mid: Tensor, s_ffn: Tensor) -> Tensor:
    """The residual stream at unit rms, before the gain."""
    return normalise(x_mid, s_ffn)


@step(
    r"x_{\mathrm{ffn}}",
    "B T d",
    number=22,
    formula=r"w_{\mathrm{ffn}} \odot n_{\mathrm{ffn}}",
    stream="ffn",
    also=("ln2.hook_out", "mlp.hook_in", "post_attention_layernorm"),
)
def x_ffn(w_ffn: Tensor, n_ffn: Tensor) -> Tensor:
    """What the feed-forward part reads: RMSNorm(x_mid). In a MoE block the router and every expert read it."""
    return w_ffn * n_ffn


@step(
    "g",
    "B T f",
    number=23,
    formula=r"x_{\mathrm{ffn}} W_1",
    stream="ffn",
    also=("mlp.hook_pre", "mlp.gate_proj"),
    only="dense",
)
def g(x_ffn: Tensor, W_1: Tensor) -> Tensor:
    """The gate of each neuron, before its nonlinearity."""
    return x_ffn @ W_1


@step(
    "u",
    "B T f",
    number=24,
    formula=r"x_{\mathrm{ffn}} W_3",
    stream="ffn",
    also=("mlp.hook_pre_linear", "mlp.up_proj"),
    only="dense",
)
def u(x_ffn: Tensor, W_3: Tensor) -> Tensor:
    """What each neuron would pass on, were its gate open."""
    return x_ffn @ W_3


@step("a", "B T f", number=25, formula=r"g\,\sigma(g)", stream="ffn", only="dense")
def a(g: Tensor) -> Tensor:
    """The open gate: SiLU, in one fused operation (g · σ(g) in two rounds differently in a quarter of bf16 values)."""
    return F.silu(g)


@step("h", "B T f", number=26, formula=r"a \odot u", stream="ffn", also=("mlp.hook_post",), only="dense")
def h(a: Tensor, u: Tensor) -> Tensor:
    """The neurons: the one elementwise product of the block."""
    return a * u


@step(
    r"\Delta_{\mathrm{ffn}}",
    "B T d",
    number=27,
    formula="h W_2",
    stream="ffn",
    also=("hook_mlp_out", "mlp.down_proj"),
    only="dense",
)
def delta_ffn(h: Tensor, W_2: Tensor) -> Tensor:
    """What the feed-forward part writes to the residual stream."""
    return h @ W_2
