"""Tensor by tensor: everything that the card names, against what transformers' DeepseekV3 and kin compute, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from probe import Decoder, Dims, Site, Sites, around, card, load
from probe.numerics import causal_mask, inverse_frequencies, position_ids, rotation
from tests.oracle import Oracle, Shown, by_expert, config, draw, indexed, padding, sarvam, seeing

RELATIVE = 1e-5


class Variant(NamedTuple):
    """A config, and how its weights are drawn."""

    config: dict[str, Any]
    bias: float = 0.0
    small: float = 1.0


SHORT = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}
"""A YaRN whose ramp holds all three kinds of pair, and whose stretched pairs turn far within 40 positions."""

V3 = {"yarn": {"factor": 40.0, "beta_fast": 32.0}, "rope_theta": 1e4, "routed_scaling_factor": 2.5}
GLM = {"rope_scaling": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "v_head_dim": 24, "routed_scaling_factor": 1.8}

VARIANTS = {
    "kimi": Variant(config()),
    "no-yarn": Variant(config(rope_scaling=None)),
    "small-theta": Variant(config(rope_scaling=None, rope_theta=100.0)),
    "yarn-short": Variant(config(yarn=SHORT)),
    "yarn-factor-40-betas-32-1": Variant(config(yarn={"factor": 40.0, "beta_fast": 32.0}, rope_theta=1e4)),
    "yarn-factor-64-betas-32-1": Variant(config(yarn={"factor": 64.0, "beta_fast": 32.0})),
    "yarn-betas-by-default": Variant(config(yarn={"beta_fast": None, "beta_slow": None, "factor": 4.0})),
    "yarn-ramp-beyond-the-last-pair": Variant(config(yarn={"factor": 16.0, "beta_fast": 32.0}, rope_theta=100.0)),
    "yarn-factor-1": Variant(config(yarn={"factor": 1.0})),
    "mscale-below-all-dim": Variant(config(yarn={**SHORT, "mscale": 0.7, "mscale_all_dim": 1.3})),
    "mscale-above-all-dim": Variant(config(yarn={**SHORT, "mscale": 1.4, "mscale_all_dim": 0.5})),
    "mscale-left-out": Variant(config(yarn={**SHORT, "mscale": None, "mscale_all_dim": None})),
    "no-query-latent": Variant(config(q_lora_rank=None)),
    "no-query-latent-no-yarn-groups": Variant(
        config(q_lora_rank=None, rope_scaling=None, n_group=4, topk_group=2, norm_topk_prob=False), bias=-1.2
    ),
    "groups": Variant(config(n_group=4, topk_group=2)),
    "groups-negative-bias": Variant(config(n_group=4, topk_group=2), bias=-1.2),
    "groups-negative-bias-one-kept": Variant(config(n_group=4, topk_group=1, num_experts_per_tok=3), bias=-0.6),
    "negative-bias": Variant(config(), bias=-1.2),
    "no-norm-topk": Variant(config(norm_topk_prob=False)),
    "one-expert-chosen": Variant(config(num_experts_per_tok=1)),
    "all-experts-chosen": Variant(config(num_experts_per_tok=16)),
    "two-shared": Variant(config(n_shared_experts=2)),
    "scaling-1": Variant(config(routed_scaling_factor=1.0)),
    "eps-1e-5": Variant(config(rms_norm_eps=1e-5), small=1e-3),
    "eps-1e-3": Variant(config(rms_norm_eps=1e-3), small=1e-2),
    "eps-1e-6-small": Variant(config(), small=1e-3),
    "k2-ratios": Variant(config(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)),
    "rotary-wider-than-content": Variant(config(qk_nope_head_dim=4, qk_rope_head_dim=12, v_head_dim=8)),
    "value-equals-rotary": Variant(config(qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=6)),
    "value-wider-than-query": Variant(config(qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=24)),
    "latents-alike": Variant(config(q_lora_rank=32, kv_lora_rank=32, intermediate_size=32, moe_intermediate_size=32)),
    "odd-attention": Variant(config(q_lora_rank=13, kv_lora_rank=11, qk_nope_head_dim=9, v_head_dim=7)),
    "odd-dense": Variant(config(hidden_size=33, intermediate_size=41, first_k_dense_replace=3)),
    "one-head": Variant(config(num_attention_heads=1, num_key_value_heads=1)),
    "all-moe": Variant(config(first_k_dense_replace=0)),
    "all-dense": Variant(config(first_k_dense_replace=3)),
    "two-dense": Variant(config(first_k_dense_replace=2, n_group=4, topk_group=3, n_shared_experts=2), bias=-0.6),
    "tied": Variant(config(tie_word_embeddings=True)),
    "glm-4.7": Variant(config(**GLM, model_type="glm4_moe_lite", mlp_layer_types=["sparse", "dense", "sparse"])),
    "youtu": Variant(config(model_type="youtu", rope_scaling=None, rope_theta=1.6e6, tie_word_embeddings=True)),
    "k2.5": Variant(seeing(config(yarn={"factor": 64.0, "beta_fast": 32.0}, rms_norm_eps=1e-5))),
    "k2.5-yarn-short": Variant(seeing(config(yarn=SHORT, n_group=4, topk_group=2))),
    "k2.5-tied": Variant(seeing(config(tie_word_embeddings=True, first_k_dense_replace=2))),
    "v3.2": Variant(indexed("deepseek_v32", 9, **V3, n_group=4, topk_group=2)),
    "v3.2-yarn-short": Variant(indexed("deepseek_v32", 2048, yarn={**SHORT, "mscale": 0.7, "mscale_all_dim": 1.3})),
    "v3.2-mixed": Variant(indexed("deepseek_v32", 9, **GLM, mlp_layer_types=["sparse", "dense", "sparse"])),
    "v3.2-tied": Variant(indexed("deepseek_v32", 10, tie_word_embeddings=True, num_experts_per_tok=1), bias=-0.6),
    "glm-5": Variant(indexed("glm_moe_dsa", 9, **GLM)),
    "glm-5-small": Variant(indexed("glm_moe_dsa", 9, **GLM, mlp_layer_types=["dense", "sparse", "dense"]), small=1e-3),
    "glm-5-groups": Variant(indexed("glm_moe_dsa", 64, yarn=SHORT, n_group=4, topk_group=2), bias=-1.2),
    "glm-5-two-shared": Variant(indexed("glm_moe_dsa", 9, n_shared_experts=2, norm_topk_prob=False)),
    "sarvam": Variant(sarvam(yarn={"factor": 40.0, "beta_fast": 32.0}, rope_theta=1e4)),
    "sarvam-yarn-short": Variant(sarvam(yarn=SHORT, first_k_dense_replace=2), bias=-0.6),
    "sarvam-groups": Variant(sarvam(n_group=8, topk_group=2, n_shared_experts=2), bias=-1.2),
    "sarvam-query-latent": Variant(sarvam(q_lora_rank=20, rms_norm_eps=1e-5), small=1e-3),
}

LAYOUTS: dict[str, Tensor | None] = {
    "full": None,
    "left": padding([9, 6, 1], "left"),
    "right": padding([9, 6, 1], "right"),
}


@cache
def oracle(variant: str) -> tuple[Oracle, Decoder]:
    """The oracle of a variant, and our decoder on the same weights."""
    made = Oracle(VARIANTS[variant].config, seed=5, bias=VARIANTS[variant].bias, small=VARIANTS[variant].small)
    return made, Decoder(made.weights())


@cache
def both(variant: str, layout: str) -> tuple[Shown, dict[Site, Tensor]]:
    """What the oracle shows and what we make, on the same tokens."""
    keep, (theirs, ours) = LAYOUTS[layout], oracle(variant)
    tokens, shown = draw(theirs, 3, 9, keep)
    return shown, ours.run(tokens, keep, want=list(ours.sites))


# ---- what the oracle cannot show ------------------------------------------------------------------------------------


def heads_sum_to_what_attention_writes(shown: Shown, site: Site, ours: Tensor, W_O: Tensor) -> None:
    """Each head's part from its definition in fp64, on the oracle's O; and all of them against the oracle's sum."""
    O = shown[site.block, "O"].double()
    per_head = [O[:, :, i] @ rows for i, rows in enumerate(W_O.double().chunk(shown.dims.h))]
    close(ours, torch.stack(per_head, 2), shown.real, "each head")
    close(ours.sum(2), shown[site.block, "delta_attn"], shown.real, "their sum")


Check = Callable[[Shown, Site, Tensor, Tensor], None]

NOT_SHOWN: dict[str, tuple[str, Check]] = {
    "delta_heads": (
        "the oracle multiplies all heads by W_O at once, and never holds one head's part",
        heads_sum_to_what_attention_writes,
    ),
}
"""Tensors of the card that the oracle never makes: why, and what is checked in its place."""


# ---- comparing ------------------------------------------------------------------------------------------------------


def close(ours: Tensor, theirs: Tensor, real: Tensor, what: object) -> float:
    """Within 1e-5 × max(1, max|oracle|) where a token is real; finite where not. Returns the share of that size."""
    assert ours.shape == theirs.shape, what
    assert ours.isfinite().all(), f"{what}: pads are not finite"
    size = max(1.0, float(theirs[real].abs().max()))
    error = float((ours[real].double() - theirs[real].double()).abs().max())
    assert error <= RELATIVE * size, f"{what}: {error:.2e} from the oracle, {RELATIVE * size:.2e} allowed"
    return error / size


def scores_close(ours: Tensor, theirs: Tensor, shown: Shown, what: object) -> float:
    """Scores where a query may look, by the scores' own size; elsewhere both below any score."""
    assert ours.shape == theirs.shape, what
    assert ours.isfinite().all(), what
    open_ = shown.seen[:, None].expand_as(theirs)
    shut = ~open_ & shown.real[:, None, :, None]
    assert (ours[shut] < -1e30).all(), what
    assert (theirs[shut] < -1e30).all(), what
    return close(ours[open_], theirs[open_], torch.ones_like(ours[open_], dtype=torch.bool), what)


def compare(shown: Shown, decoder: Decoder, made: dict[Site, Tensor]) -> dict[Site, float]:
    """Every site against the oracle; returns how far those are that were compared with a value of the oracle's."""
    compared: dict[Site, float] = {}
    for site in decoder.sites:
        ours = made[site]
        if site.tensor in NOT_SHOWN and site not in shown.values:
            _, check = NOT_SHOWN[site.tensor]
            check(shown, site, ours, decoder.weights.read(site.block, "W_O"))
            continue
        assert site in shown.values, f"{site} is neither shown by the oracle nor in NOT_SHOWN"
        theirs = shown.values[site]
        shape = decoder.sites.node(site).shape
        if site.tensor == "experts":
            assert ours.dtype == torch.int64
            assert torch.equal(ours.sort(-1).values[shown.real], theirs.sort(-1).values[shown.real]), site
            compared[site] = 0.0
        elif site.tensor == "S":
            compared[site] = scores_close(ours, theirs, shown, site)
        elif shape == ("B", "h", "T", "S"):
            compared[site] = close(ours.transpose(1, 2), theirs.transpose(1, 2), shown.real, site)
        elif "k" in shape:
            ours = by_expert(ours, made[Site(site.block, "experts")])
            theirs = by_expert(theirs, shown[site.block, "experts"])
            compared[site] = close(ours, theirs, shown.real, site)
        else:
            compared[site] = close(ours, theirs, shown.real, site)
    return compared


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor(variant: str, layout: str) -> None:
    shown, made = both(variant, layout)
    decoder = oracle(variant)[1]
    compared = compare(shown, decoder, made)
    assert shown.values.keys() == compared.keys(), "the oracle shows a tensor that the card lacks"
    assert {site.tensor for site in set(decoder.sites) - compared.keys()} == set(NOT_SHOWN)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_and_mask(variant: str, layout: str) -> None:
    shown, _ = both(variant, layout)
    keep = LAYOUTS[layout]
    R = rotation(position_ids(keep, 9), shown.dims, torch.float32)
    for ours, theirs in zip(R, shown.R, strict=True):
        ours, theirs = ours.expand(3, 9, -1)[shown.real], theirs.expand(3, 9, -1)[shown.real]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    M = causal_mask(keep, 9, torch.float32).expand(3, 1, 9, 9).transpose(1, 2)[shown.real]
    theirs = shown.M.expand(3, 1, 9, 9).transpose(1, 2)[shown.real]
    assert torch.equal(M == 0, theirs == 0)
    assert (M[M != 0] < -1e30).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_and_softmax_scale(variant: str) -> None:
    """Frequencies to the bit: within 40 positions a wrong slow pair would hardly show."""
    theirs, ours = oracle(variant)
    assert torch.equal(inverse_frequencies(ours.dims), theirs.text.rotary_emb.inv_freq)
    assert ours.dims.rotary_gain == theirs.text.rotary_emb.attention_scaling
    assert ours.dims.tau == pytest.approx(theirs.text.layers[0].self_attn.scaling, rel=1e-15)


@pytest.mark.parametrize("length", range(1, 41))
def test_every_tensor_at_every_length(length: int) -> None:
    variant = ("yarn-short", "groups-negative-bias", "no-query-latent", "kimi")[length % 4]
    theirs, ours = oracle(variant)
    tokens, shown = draw(theirs, 1 + length % 3, length, seed=length)
    assert compare(shown, ours, ours.run(tokens, want=list(ours.sites))).keys() == shown.values.keys()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (40, 1), (2, 31, 17, 8, 24)], ids=str)
def test_every_tensor_of_ragged_batches(side: str, lengths: tuple[int, ...]) -> None:
    theirs, ours = oracle("mscale-below-all-dim")
    keep = padding(list(lengths), side)
    tokens, shown = draw(theirs, len(lengths), max(lengths), keep)
    assert compare(shown, ours, ours.run(tokens, keep, want=list(ours.sites))).keys() == shown.values.keys()


@pytest.mark.parametrize("variant", ["kimi", "groups-negative-bias", "no-query-latent"])
def test_the_call_gives_the_oracles_logits(variant: str) -> None:
    """Without anything watched: the way that never holds scores gives the same."""
    theirs, ours = oracle(variant)
    tokens, shown = draw(theirs, 2, 20)
    close(ours(tokens), shown[None, "logits"], shown.real, "logits")


@pytest.mark.parametrize("variant", ["kimi", "no-query-latent", "k2-ratios", "two-dense"])
def test_through_a_checkpoint(variant: str, tmp_path) -> None:
    """The oracle writes the original names, we read them: what is split by head and by rows lands in its place."""
    theirs, ours = oracle(variant)
    theirs.model.save_pretrained(tmp_path)
    read = Decoder(load(tmp_path))
    assert read.dims == ours.dims
    tokens, shown = draw(theirs, 2, 9)
    assert compare(shown, read, read.run(tokens, want=list(read.sites))).keys() == shown.values.keys()


# ---- that the comparison is one -------------------------------------------------------------------------------------

CARDS = {
    "dense": (card(moe=False), 39, 1),
    "moe": (card(moe=True), 52, 1),
    "dense-direct": (card(moe=False, query_latent=False), 35, 1),
    "moe-direct": (card(moe=True, query_latent=False), 48, 1),
    "around": (around(), 5, 0),
}


@pytest.mark.parametrize("kind", CARDS)
def test_the_card_is_counted(kind: str) -> None:
    """None can vanish, and each is compared: its site is in a model of the matrix."""
    rows, steps, inputs = CARDS[kind]
    assert (len(rows), len(rows.hooked) - len(rows)) == (steps, inputs)
    variant = "no-query-latent" if "direct" in kind else "kimi"
    shown, _ = both(variant, "full")
    block = {"dense": 0, "moe": 1, "around": None}[kind.split("-")[0]]
    assert set(shown.of(block)).isdisjoint(NOT_SHOWN)
    assert set(rows.hooked) == set(shown.of(block)) | (set(NOT_SHOWN) & set(rows))


def test_a_tensor_that_nobody_compares_fails() -> None:
    shown, made = both("kimi", "full")
    hidden = Site(1, "affinity")
    values = shown.values
    shown.values = {site: value for site, value in values.items() if site != hidden}
    try:
        with pytest.raises(AssertionError, match=r"blocks\.1\.affinity is neither shown"):
            compare(shown, oracle("kimi")[1], made)
    finally:
        shown.values = values


@pytest.mark.parametrize("site", [*Sites(Dims.from_config(config()))], ids=str)
def test_an_error_in_any_one_tensor_fails(site: Site) -> None:
    """A thousandth of the tensor's size, added at one real token."""
    shown, made = both("kimi", "left")
    off = made[site].clone()
    at = off[0, :, -1] if off.ndim == 4 and site.tensor in ("S", "A") else off[0, -1]
    if off.dtype == torch.int64:
        at.copy_(torch.arange(at.shape[-1]) if at.min() > 0 else torch.arange(at.shape[-1]) + 7)
    else:
        at += 1e-3 * max(1.0, float(at[at > -1e30].abs().max()))
    with pytest.raises(AssertionError):
        compare(shown, oracle("kimi")[1], {**made, site: off})


def swapped(variant: str, **changes: Any) -> float:
    """How far the logits of a config with ``changes`` are from the variant's, on the same weights and tokens."""
    theirs, ours = oracle(variant)
    tokens, _ = draw(theirs, 2, 40)
    other = Dims(**{**vars(ours.dims), **changes})
    weights = theirs.weights()
    weights.dims = other
    return float((Decoder(weights)(tokens) - ours(tokens)).abs().max())


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("eps-1e-5", {"eps": 1e-6}),
        ("no-norm-topk", {"norm_topk": True}),
        ("groups", {"n_group": 1, "topk_group": 1}),
        ("groups-negative-bias", {"topk_group": 3}),
        ("kimi", {"scaling": 1.0}),
        ("kimi", {"yarn": None}),
        ("small-theta", {"theta": 1e4}),
    ],
    ids=str,
)
def test_the_matrix_matters(variant: str, change: dict[str, Any]) -> None:
    """Each constant moves the logits far beyond the tolerance, so that a wrong one can't pass."""
    assert swapped(variant, **change) > 1e-3


class OneEps(Dims):
    """The mistake of others: the config's eps in the latent norms too."""

    @property
    def eps_latent(self) -> float:
        return self.eps


@pytest.mark.parametrize("variant", ["eps-1e-5", "eps-1e-3"])
def test_the_latents_eps_matters(variant: str) -> None:
    shown, made = both(variant, "full")
    theirs, ours = oracle(variant)
    weights = theirs.weights()
    weights.dims = OneEps(**vars(ours.dims))
    wrong = Decoder(weights).run(draw(theirs, 3, 9)[0], want=list(ours.sites))
    with pytest.raises(AssertionError, match="s_Q"):
        compare(shown, ours, wrong)
    assert float((wrong[Site(None, "logits")] - made[Site(None, "logits")]).abs().max()) > 1e-3


def test_routes_are_mixed() -> None:
    """The negative biases put scores below 0, where a closed group filled with 0 would win; each choice is its own."""
    shown, _ = both("groups-negative-bias", "full")
    for block in (1, 2):
        assert (shown[block, "choice_score"] < 0).double().mean() > 0.9
        assert len(shown[block, "experts"].flatten().unique()) > 8


def test_near_ties_are_redrawn() -> None:
    """The margin is a real one: of the groups' choice and of the experts'."""
    for variant in ("kimi", "groups-negative-bias", "groups-negative-bias-one-kept"):
        for layout in LAYOUTS:
            assert both(variant, layout)[0].margin > 3e-5
