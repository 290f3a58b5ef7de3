"""In bf16, operation by operation: each step on the oracle's own inputs, so that no rounding is carried on.

End to end bf16 says nothing unless it is bit-equal: one rounding flips an expert, and the logits jump. As the engine
can start anywhere, each step is given what the oracle's was given (its experts among it) and must return its bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from probe import Decoder, Dims, InMemory, Site, Sites, evaluate, plan, random_weights
from probe.leaves import FP32
from probe.numerics import causal_mask, inverse_frequencies, rotation
from tests.oracle import Oracle, Shown, config, draw, padding

SHORT = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3}
VARIANTS: dict[str, dict[str, Any]] = {
    "kimi": config(),
    "groups": config(n_group=4, topk_group=2, yarn=SHORT, n_shared_experts=2),
    "no-query-latent": config(q_lora_rank=None, norm_topk_prob=False, rms_norm_eps=1e-5),
}
LAYOUTS = {"full": None, "left": padding([24, 17, 3], "left"), "right": padding([24, 17, 3], "right")}

APART = {
    "q_C": "W_UQ and W_QR",
    "q_pe": "W_UQ and W_QR",
    "c_KV": "W_DKV and W_KR",
    "k_pe": "W_DKV and W_KR",
    "k_C": "W_UK and W_UV",
    "v": "W_UK and W_UV",
    "g_e": "W_1_e and W_3_e",
    "u_e": "W_1_e and W_3_e",
}
"""Products that the oracle makes at once for two of our weights. A library may sum a wide product in another order than
two narrow ones, so these are promised to one bf16 step only; everything else to the bit."""

EVERY = [
    pytest.param(variant, site, id=f"{variant}-{site}")
    for variant, made in VARIANTS.items()
    for site in Sites(Dims.from_config(made))
    if not (site.tensor == "x_n" or site.tensor == "delta_heads")  # an input; what the oracle never holds
]


@cache
def both(variant: str, layout: str) -> tuple[Tensor, Shown, InMemory]:
    oracle = Oracle(VARIANTS[variant], seed=9, dtype=torch.bfloat16, bias=-0.6 if variant == "groups" else 0.0)
    tokens, shown = draw(oracle, 3, 24, LAYOUTS[layout])
    return tokens, shown, oracle.weights()


def one_step(site: Site, tokens: Tensor, shown: Shown, weights: InMemory) -> Tensor:
    """The step alone, from what the oracle's step read."""
    last = shown[shown.dims.blocks - 1, "x_next"]
    at_hand = {**shown.of(site.block), "R": shown.R, "M": shown.M, "tokens": tokens, "x_L": last, "dt": torch.bfloat16}
    rows = Sites(shown.dims).card(site.block)
    given = {need: at_hand[need] for need in rows[site.tensor].needs if need in at_hand}
    todo = plan(rows, [site.tensor], given)
    assert [row.name for row in todo.steps] == [site.tensor]
    return evaluate(todo, given, weights, site.block)[site.tensor]


@pytest.mark.parametrize(("variant", "site"), EVERY)
def test_every_step_gives_the_oracles_bits(variant: str, site: Site) -> None:
    for layout in LAYOUTS:
        tokens, shown, weights = both(variant, layout)
        ours, theirs = one_step(site, tokens, shown, weights), shown.values[site]
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        if site.tensor == "experts":  # a set: the order of top-k without sorting means nothing
            ours, theirs = ours.sort(-1).values[shown.real], theirs.sort(-1).values[shown.real]
        if site.tensor in APART:
            one_bf16_step(ours, theirs)
        else:
            assert torch.equal(ours, theirs), layout


def one_bf16_step(ours: Tensor, theirs: Tensor) -> None:
    """Nearly all equal; the others next to each other (or, near 0, within the sum's fp32 error)."""
    a, b = ours.double(), theirs.double()
    assert (a != b).double().mean() < 0.02
    near = 2**-7 * torch.maximum(a.abs(), b.abs()) + 1e-6 * b.abs().max()
    assert ((a - b).abs() <= near).all()


def test_what_is_promised_to_one_step_is_little() -> None:
    for variant in VARIANTS:
        rows = [site for v, site in (p.values for p in EVERY) if v == variant]
        assert sum(site.tensor in APART for site in rows) == 3 * 6 + 2 * 2
        assert len(rows) in (39 + 2 * 52 + 5 - 3, 35 + 2 * 48 + 5 - 3)  # less x_n's and delta_heads


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_written_apart_sum_to_what_attention_writes(variant: str) -> None:
    """What the oracle never holds, rounded once a head: their sum is attention's within those roundings."""
    _, shown, weights = both(variant, "full")
    rows = Sites(shown.dims).card(1)
    given = {"O": shown[1, "O"]}
    made = evaluate(plan(rows, ["delta_heads"], given), given, weights, 1)["delta_heads"]
    assert made.dtype == torch.bfloat16
    O, W_O = shown[1, "O"].double(), weights.read(1, "W_O").double()
    exact = torch.stack([O[:, :, i] @ part for i, part in enumerate(W_O.chunk(shown.dims.h))], 2)
    assert ((made.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()
    total = shown[1, "delta_attn"].double()
    assert float((made.double().sum(2) - total).abs().max()) <= 2**-6 * float(exact.abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_block_with_the_oracles_experts_forced(variant: str) -> None:
    """From x_n alone, with the choice of experts taken from the oracle: all the way down, a few roundings apart."""
    for block in range(3):
        _, shown, weights = both(variant, "left")
        rows = Sites(shown.dims).card(block)
        given = {"x_n": shown[block, "x_n"], "R": shown.R, "M": shown.M}
        if "experts" in rows:
            given["experts"] = shown[block, "experts"]
        todo = plan(rows, ["x_next"], given)
        made, theirs = evaluate(todo, given, weights, block)["x_next"], shown[block, "x_next"]
        assert ("experts" in todo.taken) == ("experts" in rows)
        error = (made.double() - theirs.double())[shown.real].abs().max()
        assert float(error) <= 0.02 * float(theirs[shown.real].double().abs().max())


# ---- dtypes ---------------------------------------------------------------------------------------------------------

SMALL = {
    "latent": Dims.from_config(config(n_group=4, topk_group=2)),
    "direct": Dims.from_config(config(q_lora_rank=None)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("keep", [None, padding([6, 4], "left")], ids=["full", "left"])
def test_every_tensor_has_its_dtype(kind: str, dtype: torch.dtype, keep: Tensor | None) -> None:
    decoder = Decoder(random_weights(SMALL[kind]).to(dtype))
    tokens = torch.randint(0, SMALL[kind].V, (2, 6))
    for site, value in decoder.run(tokens, keep, want=list(decoder.sites)).items():
        said = decoder.sites.node(site).dtype
        assert value.dtype == {"act": dtype, "fp32": torch.float32, "int64": torch.int64}[said], site
        assert value.isfinite().all(), site


def test_dtypes_as_the_names_list_has_them() -> None:
    """The rows that are fp32 under every cast, by name; a row that changes side changes this."""
    sites = Sites(SMALL["latent"])
    by_dtype: dict[str, set[str]] = {}
    for site in sites:
        by_dtype.setdefault(sites.node(site).dtype, set()).add(site.tensor)
    assert by_dtype["int64"] == {"experts"}
    assert by_dtype["fp32"] == {
        *("s_attn", "s_Q", "s_KV", "s_ffn", "s_final"),
        *("router_logits", "affinity", "choice_score", "gates", "delta_experts"),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_router_weight_and_bias_stay_as_they_are(dtype: torch.dtype) -> None:
    """Not only their dtype: their values, which a way there and back through ``dtype`` would round."""
    whole = random_weights(SMALL["latent"])
    cast = whole.to(dtype)
    for (block, name), tensor in whole.tensors.items():
        there = cast.read(block, name)
        if name in FP32:
            assert there.dtype == torch.float32
            assert torch.equal(there, tensor), name
            assert not torch.equal(tensor.to(dtype).float(), tensor), "rounding would not show"
        else:
            assert there.dtype == dtype
            assert torch.equal(there, tensor.to(dtype)), name
    assert {"W_g", "b"} == FP32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["far", "near"])
def test_angles_are_fp32_and_cast_once(dtype: torch.dtype, kind: str) -> None:
    """Positions beyond 256 are no bf16 numbers: an angle made in bf16 would be off by whole turns."""
    dims = SMALL["latent"]
    positions = torch.arange(40) + (131_000 if kind == "far" else 0)
    assert inverse_frequencies(dims).dtype == torch.float32
    whole = rotation(positions, dims, torch.float32)
    cast = rotation(positions, dims, dtype)
    for there, here in zip(cast, whole, strict=True):
        assert there.dtype == dtype
        assert torch.equal(there, here.to(dtype))
    exact = positions.double()[:, None] * inverse_frequencies(dims).double()
    atol = 2e-2 if kind == "far" else 1e-5  # fp32 angles of 131,000 are themselves 0.008 wide
    torch.testing.assert_close(whole.cos.double(), exact.cos() * dims.rotary_gain, rtol=0, atol=atol)
    torch.testing.assert_close(whole.sin.double(), exact.sin() * dims.rotary_gain, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_mask_is_the_dtypes_least_number(dtype: torch.dtype) -> None:
    M = causal_mask(None, 3, dtype)
    assert M.dtype == dtype
    assert M[0, 1] == torch.finfo(dtype).min / (2 if dtype == torch.float16 else 1)
    hidden = causal_mask(torch.tensor([[False, True, True]]), 3, dtype)[0, 0, :1] - 128
    assert torch.softmax(hidden, -1).isfinite().all(), "a pad query stays finite under large scores"
