r"""Multi-head latent attention, steps 1 to 21 of the block: from the residual stream ``x_n`` to ``x_mid``.

Read it top to bottom. Positions are axis 1, heads axis 2; only ``S`` and ``A`` are [B h T S].
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from probe.card import instead_of, step
from probe.dims import Dims
from probe.numerics import Rotation, Show, attend, inverse_rms, mix, normalise, pattern, rotate, scores

_RMS = r"\mathrm{rsqrt}(\mathrm{mean}(%s^2) + %s)"


@step(
    r"1/\mathrm{rms}(x_n)",
    "B T 1",
    formula=_RMS % ("x_n", r"\epsilon"),
    stream="attention",
    dtype="fp32",
    inverse="ln1.hook_scale",
)
def s_attn(x_n: Tensor, eps: float) -> Tensor:
    """The scale that attention's RMSNorm multiplies by. TransformerLens' ``ln1.hook_scale`` is its reciprocal."""
    return inverse_rms(x_n, eps)


@step(
    r"x_n/\mathrm{rms}",
    "B T d",
    formula=r"x_n \cdot s_{\mathrm{attn}}",
    stream="attention",
    also=("ln1.hook_normalized",),
)
def n_attn(x_n: Tensor, s_attn: Tensor) -> Tensor:
    """The residual stream at unit rms, before the gain; cast to the activation dtype here, not after the gain."""
    return normalise(x_n, s_attn)


@step(
    r"x_{\mathrm{attn}}",
    "B T d",
    number=1,
    formula=r"w_{\mathrm{attn}} \odot n_{\mathrm{attn}}",
    stream="attention",
    also=("ln1.hook_out", "attn.hook_in", "input_layernorm"),
)
def x_attn(w_attn: Tensor, n_attn: Tensor) -> Tensor:
    """What attention reads: RMSNorm(x_n)."""
    return w_attn * n_attn


@step(
    "c^Q",
    "B T r_q",
    number=2,
    formula="x_{\\mathrm{attn}} W_{DQ}",
    stream="query",
    also=("self_attn.q_a_proj",),
    only="latent",
)
def c_Q(x_attn: Tensor, W_DQ: Tensor) -> Tensor:
    """The latent from which every head's query is read."""
    return x_attn @ W_DQ


@step(
    r"1/\mathrm{rms}(c^Q)",
    "B T 1",
    formula=_RMS % ("(c^Q)", r"\epsilon_{\mathrm{latent}}"),
    stream="query",
    dtype="fp32",
    only="latent",
)
def s_Q(c_Q: Tensor, eps_latent: float) -> Tensor:
    """The scale of the query latent's RMSNorm. Its eps is 1e-6 whatever the config says."""
    return inverse_rms(c_Q, eps_latent)


@step(r"c^Q/\mathrm{rms}", "B T r_q", formula=r"c^Q \cdot s_Q", stream="query", only="latent")
def n_Q(c_Q: Tensor, s_Q: Tensor) -> Tensor:
    """The query latent at unit rms."""
    return normalise(c_Q, s_Q)


@step(
    r"\hat c^Q",
    "B T r_q",
    number=3,
    formula=r"w_Q \odot n_Q",
    stream="query",
    also=("attn.hook_q_latent", "self_attn.q_a_layernorm"),
    only="latent",
)
def c_Q_hat(w_Q: Tensor, n_Q: Tensor) -> Tensor:
    """The normed query latent: RMSNorm(c_Q)."""
    return w_Q * n_Q


@step("c^{KV}", "B T r_kv", number=4, formula="x_{\\mathrm{attn}} W_{DKV}", stream="value")
def c_KV(x_attn: Tensor, W_DKV: Tensor) -> Tensor:
    """The latent from which every head's keys and values are read; what inference would store."""
    return x_attn @ W_DKV


@step(
    r"1/\mathrm{rms}(c^{KV})",
    "B T 1",
    formula=_RMS % ("(c^{KV})", r"\epsilon_{\mathrm{latent}}"),
    stream="value",
    dtype="fp32",
)
def s_KV(c_KV: Tensor, eps_latent: float) -> Tensor:
    """The scale of the key-value latent's RMSNorm. Its eps is 1e-6 whatever the config says."""
    return inverse_rms(c_KV, eps_latent)


@step(r"c^{KV}/\mathrm{rms}", "B T r_kv", formula=r"c^{KV} \cdot s_{KV}", stream="value")
def n_KV(c_KV: Tensor, s_KV: Tensor) -> Tensor:
    """The key-value latent at unit rms."""
    return normalise(c_KV, s_KV)


@step(
    r"\hat c^{KV}",
    "B T r_kv",
    number=5,
    formula=r"w_{KV} \odot n_{KV}",
    stream="value",
    also=("attn.hook_kv_latent", "self_attn.kv_a_layernorm"),
)
def c_KV_hat(w_KV: Tensor, n_KV: Tensor) -> Tensor:
    """The normed key-value latent: RMSNorm(c_KV). The rotary key is not normed."""
    return w_KV * n_KV


@step("q^C", "B T (h n)", number=6, formula=r"\hat c^Q W_{UQ}", stream="query", only="latent")
def q_C(c_Q_hat: Tensor, W_UQ: Tensor) -> Tensor:
    """All heads' queries without position, side by side."""
    return c_Q_hat @ W_UQ


@step("q^C", "B T (h n)", number=6, formula=r"x_{\mathrm{attn}} W_{UQ}", stream="query", name="q_C", only="direct")
def q_C_direct(x_attn: Tensor, W_UQ: Tensor) -> Tensor:
    """All heads' queries without position, side by side; read from x_attn, as this model has no query latent."""
    return x_attn @ W_UQ


@step("Q^C", "B T h n", number=7, formula=r"\mathrm{reshape}(q^C)", stream="query")
def Q_C(q_C: Tensor, dims: Dims) -> Tensor:
    """The queries without position, by head."""
    return rearrange(q_C, "B T (h n) -> B T h n", h=dims.h)


@step(r"q^{\mathrm{pe}}", "B T (h r)", number=8, formula=r"\hat c^Q W_{QR}", stream="query", only="latent")
def q_pe(c_Q_hat: Tensor, W_QR: Tensor) -> Tensor:
    """All heads' rotary queries before rotation; a head's features are interleaved pairs (2i, 2i+1)."""
    return c_Q_hat @ W_QR


@step(
    r"q^{\mathrm{pe}}",
    "B T (h r)",
    number=8,
    formula=r"x_{\mathrm{attn}} W_{QR}",
    stream="query",
    name="q_pe",
    only="direct",
)
def q_pe_direct(x_attn: Tensor, W_QR: Tensor) -> Tensor:
    """All heads' rotary queries before rotation; read from x_attn, as this model has no query latent."""
    return x_attn @ W_QR


@step(r"Q^{\mathrm{pe}}", "B T h r", number=9, formula=r"\mathrm{reshape}(q^{\mathrm{pe}})", stream="query")
def Q_pe(q_pe: Tensor, dims: Dims) -> Tensor:
    """The rotary queries before rotation, by head."""
    return rearrange(q_pe, "B T (h r) -> B T h r", h=dims.h)


@step(
    "Q^R", "B T h r", number=10, formula=r"\mathrm{RoPE}(Q^{\mathrm{pe}}, R)", stream="query", also=("attn.hook_rot_q",)
)
def Q_R(Q_pe: Tensor, R: Rotation) -> Tensor:
    """The rotary queries, turned to their position. Half-split: pair (2i, 2i+1) of Q_pe is (i, r/2+i) here."""
    return rotate(Q_pe, R)


@step("Q", "B T h q", number=11, formula="[Q^C ; Q^R]", stream="query", also=("attn.hook_q",))
def Q(Q_C: Tensor, Q_R: Tensor) -> Tensor:
    """Each head's whole query: content first, then position."""
    return torch.cat([Q_C, Q_R], dim=-1)


@step("k^C", "B T (h n)", number=12, formula=r"\hat c^{KV} W_{UK}", stream="key")
def k_C(c_KV_hat: Tensor, W_UK: Tensor) -> Tensor:
    """All heads' keys without position, side by side."""
    return c_KV_hat @ W_UK


@step("K^C", "B T h n", number=13, formula=r"\mathrm{reshape}(k^C)", stream="key")
def K_C(k_C: Tensor, dims: Dims) -> Tensor:
    """The keys without position, by head."""
    return rearrange(k_C, "B T (h n) -> B T h n", h=dims.h)


@step(r"k^{\mathrm{pe}}", "B T r", number=14, formula=r"x_{\mathrm{attn}} W_{KR}", stream="key")
def k_pe(x_attn: Tensor, W_KR: Tensor) -> Tensor:
    """The one rotary key of all heads before rotation: straight from x_attn, past the latent and its norm."""
    return x_attn @ W_KR


@step("k^R", "B T r", number=15, formula=r"\mathrm{RoPE}(k^{\mathrm{pe}}, R)", stream="key", also=("attn.hook_rot_k",))
def k_R(k_pe: Tensor, R: Rotation) -> Tensor:
    """The rotary key, turned to its position. One vector for all heads: an edit of it reaches all, one of K one."""
    return rotate(k_pe, R)


@step("K", "B S h q", number=16, formula="[K^C_i ; k^R]", stream="key", also=("attn.hook_k",))
def K(K_C: Tensor, k_R: Tensor) -> Tensor:
    """Each head's whole key: its own content, then the shared rotary key."""
    return torch.cat([K_C, k_R.unsqueeze(-2).expand(*K_C.shape[:-1], -1)], dim=-1)


@step("v", "B T (h v)", number=17, formula=r"\hat c^{KV} W_{UV}", stream="value")
def v(c_KV_hat: Tensor, W_UV: Tensor) -> Tensor:
    """All heads' values, side by side."""
    return c_KV_hat @ W_UV


@step("V", "B S h v", number=18, formula=r"\mathrm{reshape}(v)", stream="value", also=("attn.hook_v",))
def V(v: Tensor, dims: Dims) -> Tensor:
    """The values, by head."""
    return rearrange(v, "B T (h v) -> B T h v", h=dims.h)


@step("S", "B h T S", formula=r"\tau \cdot Q K^{\top} + M", stream="attention", also=("attn.hook_attn_scores",))
def S(Q: Tensor, K: Tensor, tau: float, M: Tensor) -> Tensor:
    """The attention scores, scaled and masked: rounded after the product, the scale and the mask, in this order."""
    return scores(Q, K, tau, M)


@step("A", "B h T S", formula=r"\mathrm{softmax}(S)", stream="attention", also=("attn.hook_pattern",))
def A(S: Tensor) -> Tensor:
    """The attention pattern: what each query takes from each key. Made in fp32, then cast."""
    return pattern(S)


@step("O", "B T h v", number=19, formula="A V", stream="attention", also=("attn.hook_z",))
def O(A: Tensor, V: Tensor) -> Tensor:
    """What each head has read: its mix of values. Switching a head off is zeroing its ``O``."""
    return mix(A, V)


@instead_of(O, "S", "A")
def O_unwatched(Q: Tensor, K: Tensor, V: Tensor, tau: float, M: Tensor, show: Show | None) -> Tensor:
    """O when nobody asks for S or A whole: one chunk of queries at a time, so that neither ever exists whole."""
    return attend(Q, K, V, tau, M, show)


@step(
    r"\Delta_{\mathrm{attn},i}",
    "B T h d",
    formula="O_i W_{O,i}",
    stream="attention",
    also=("attn.hook_result",),
    on_request=True,
    read_only="it is a reading, which nothing reads; edit `O`",
)
def delta_heads(O: Tensor, W_O: Tensor, dims: Dims) -> Tensor:
    """What each head writes to the residual stream; over heads they sum to Δ_attn."""
    return torch.einsum("bthv,hvd->bthd", O, W_O.unflatten(0, (dims.h, dims.v)))


@step(
    r"\Delta_{\mathrm{attn}}",
    "B T d",
    number=20,
    formula=r"\mathrm{concat}(O) W_O",
    stream="attention",
    also=("hook_attn_out", "self_attn.o_proj"),
)
def delta_attn(O: Tensor, W_O: Tensor) -> Tensor:
    """What attention writes to the residual stream."""
    return rearrange(O, "B T h v -> B T (h v)") @ W_O


@step(r"x'_n", "B T d", number=21, formula=r"x_n + \Delta_{\mathrm{attn}}", stream="residual", also=("hook_resid_mid",))
def x_mid(x_n: Tensor, delta_attn: Tensor) -> Tensor:
    """The residual stream between attention and the feed-forward part."""
    return x_n + delta_attn
