r"""The mixture of experts that stands for steps 23 to 27 in a MoE block: router, chosen experts, shared expert.

Slot tensors ([B T k ·]) hold one entry for each chosen expert, in the order of ``experts``; that order means nothing,
so two runs are compared by expert, never by slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from probe.card import instead_of, step
from probe.dims import Dims
from probe.numerics import grouped, mixture


@step(
    "r",
    "B T e",
    formula=r"x_{\mathrm{ffn}} W_g",
    stream="router",
    dtype="fp32",
    also=("mlp.gate.hook_out",),
    only="moe",
)
def router_logits(x_ffn: Tensor, W_g: Tensor) -> Tensor:
    """How well each expert's direction fits the token; in fp32 under every cast."""
    return x_ffn.to(torch.float32) @ W_g


@step("s", "B T e", formula=r"\sigma(r)", stream="router", dtype="fp32", only="moe")
def affinity(router_logits: Tensor) -> Tensor:
    """The affinity to each expert, each on its own: a sigmoid, not a softmax. Gates are made of it."""
    return router_logits.sigmoid()


@step("s + b", "B T e", formula="s + b", stream="router", dtype="fp32", only="moe")
def choice_score(affinity: Tensor, b: Tensor) -> Tensor:
    """What experts are chosen by: affinity plus a correction bias that balances load and enters nowhere else."""
    return affinity + b


@step("E(t)", "B T k", formula=r"\mathrm{top}_k(s + b)", stream="router", dtype="int64", only="moe")
def experts(choice_score: Tensor, n_group: int, topk_group: int, dims: Dims) -> Tensor:
    """The chosen experts: the k best scores within the token's best groups. Their order (the slots) means nothing."""
    return in_groups(choice_score, n_group, topk_group).topk(dims.k, dim=-1, sorted=False).indices


def in_groups(choice_score: Tensor, n_group: int, topk_group: int) -> Tensor:
    """The scores of a token's best groups, by the sum of their best two; -inf in the others."""
    if n_group == 1:
        return choice_score
    by_group = choice_score.unflatten(-1, (n_group, -1))
    best = by_group.topk(2, dim=-1).values.sum(-1).topk(topk_group, dim=-1, sorted=False).indices
    closed = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return by_group.masked_fill(closed[..., None], float("-inf")).flatten(-2)


@step(
    "w",
    "B T k",
    formula=r"\mathrm{scaling} \cdot s_{E(t)} / \Sigma s_{E(t)}",
    stream="router",
    dtype="fp32",
    only="moe",
)
def gates(affinity: Tensor, experts: Tensor, norm_topk: bool, scaling: float) -> Tensor:
    """How much each chosen expert counts: its affinity (without the bias) over the chosen ones' sum, times scaling."""
    chosen = affinity.gather(-1, experts)
    if norm_topk:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * scaling


@step("g_e", "B T k m", formula=r"x_{\mathrm{ffn}} W_{1,e}", stream="experts", only="moe")
def g_e(x_ffn: Tensor, experts: Tensor, W_1_e: Tensor) -> Tensor:
    """The gate of each neuron of the chosen experts."""
    return grouped(x_ffn, experts, W_1_e)


@step("u_e", "B T k m", formula=r"x_{\mathrm{ffn}} W_{3,e}", stream="experts", only="moe")
def u_e(x_ffn: Tensor, experts: Tensor, W_3_e: Tensor) -> Tensor:
    """What each neuron of the chosen experts would pass on, were its gate open."""
    return grouped(x_ffn, experts, W_3_e)


@step("a_e", "B T k m", formula=r"g_e\,\sigma(g_e)", stream="experts", only="moe")
def a_e(g_e: Tensor) -> Tensor:
    """The open gates of the chosen experts: SiLU."""
    return F.silu(g_e)


@step("h_e", "B T k m", formula=r"a_e \odot u_e", stream="experts", only="moe")
def h_e(a_e: Tensor, u_e: Tensor) -> Tensor:
    """The neurons of the chosen experts."""
    return a_e * u_e


@step("y_e", "B T k d", formula="h_e W_{2,e}", stream="experts", only="moe")
def y_e(h_e: Tensor, experts: Tensor, W_2_e: Tensor) -> Tensor:
    """What each chosen expert says, before its gate."""
    return grouped(h_e, experts, W_2_e)


@step(r"\Delta_e", "B T k d", formula=r"w \cdot y_e", stream="experts", dtype="fp32", only="moe")
def delta_experts(gates: Tensor, y_e: Tensor) -> Tensor:
    """What each chosen expert adds, in fp32. The tensor to patch: an expert that was not chosen adds 0."""
    return gates[..., None] * y_e


@step(r"\Delta_{\mathrm{routed}}", "B T d", formula=r"\Sigma_k \Delta_e", stream="experts", only="moe")
def delta_routed(delta_experts: Tensor, dt: torch.dtype) -> Tensor:
    """What all routed experts add: summed over slots in fp32, cast once."""
    return delta_experts.sum(2).to(dt)


@instead_of(delta_routed, "g_e", "u_e", "a_e", "h_e", "y_e", "delta_experts", exact=False)
def delta_routed_unwatched(
    x_ffn: Tensor,
    experts: Tensor,
    gates: Tensor,
    W_1_e: Tensor,
    W_3_e: Tensor,
    W_2_e: Tensor,
    dt: torch.dtype,
) -> Tensor:
    """What all routed experts add when nobody asks for one slot's part: rows stay sorted by expert throughout. Other
    last bits: a vectorised SiLU rounds an element by its place in the tensor."""
    return mixture(x_ffn, experts, gates, W_1_e, W_3_e, W_2_e).to(dt)


@step(
    "g_s",
    "B T m_s",
    formula=r"x_{\mathrm{ffn}} W_{1,s}",
    stream="shared",
    also=("mlp.shared_experts.hook_pre",),
    only="moe",
)
def g_s(x_ffn: Tensor, W_1_s: Tensor) -> Tensor:
    """The gate of each neuron of the shared expert, which sees every token."""
    return x_ffn @ W_1_s


@step(
    "u_s",
    "B T m_s",
    formula=r"x_{\mathrm{ffn}} W_{3,s}",
    stream="shared",
    also=("mlp.shared_experts.hook_pre_linear",),
    only="moe",
)
def u_s(x_ffn: Tensor, W_3_s: Tensor) -> Tensor:
    """What each neuron of the shared expert would pass on, were its gate open."""
    return x_ffn @ W_3_s


@step("a_s", "B T m_s", formula=r"g_s\,\sigma(g_s)", stream="shared", only="moe")
def a_s(g_s: Tensor) -> Tensor:
    """The open gates of the shared expert: SiLU."""
    return F.silu(g_s)


@step("h_s", "B T m_s", formula=r"a_s \odot u_s", stream="shared", also=("mlp.shared_experts.hook_post",), only="moe")
def h_s(a_s: Tensor, u_s: Tensor) -> Tensor:
    """The neurons of the shared expert."""
    return a_s * u_s


@step(
    r"\Delta_{\mathrm{shared}}",
    "B T d",
    formula="h_s W_{2,s}",
    stream="shared",
    also=("mlp.shared_experts.hook_out",),
    only="moe",
)
def delta_shared(h_s: Tensor, W_2_s: Tensor) -> Tensor:
    """What the shared expert adds, ungated."""
    return h_s @ W_2_s


@step(
    r"\Delta_{\mathrm{ffn}}",
    "B T d",
    formula=r"\Delta_{\mathrm{routed}} + \Delta_{\mathrm{shared}}",
    stream="ffn",
    also=("hook_mlp_out",),
    only="moe",
)
def delta_ffn(delta_routed: Tensor, delta_shared: Tensor) -> Tensor:
    """What the feed-forward part writes to the residual stream."""
    return delta_routed + delta_shared
