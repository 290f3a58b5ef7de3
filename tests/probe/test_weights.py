"""Weights in memory, and random ones: seeded, wide, in one place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from probe import Decoder, Drawn, InMemory, random_weights
from probe.dims import Dims
from probe.errors import BadCheckpoint, Missing, OutOfRange
from probe.sites import Sites
from probe.weights import weight_shape, weight_sites
from tests.probe.small import SMALL, TIED, VARIANTS

WIDE = Dims(
    **{**vars(SMALL), "d": 96, "r_q": 64, "r_kv": 48, "n": 24, "r": 12, "v": 40, "f": 128, "m": 72, "m_s": 80, "V": 150}
)


def tensors(weights: InMemory) -> dict[tuple[int | None, str], Tensor]:
    """A copy of what it was made of."""
    return {key: t for key, t in weights.tensors.items() if not (weights.dims.tied and key == (None, "W_U"))}


@pytest.mark.parametrize("dims", VARIANTS.values(), ids=list(VARIANTS))
def test_every_axis_of_a_weight_has_a_name_and_its_size(dims: Dims) -> None:
    for (block, name), tensor in random_weights(dims).tensors.items():
        axes = Sites(dims).card(block).shape(name)
        assert tuple(map(dims.size, axes)) == tuple(tensor.shape), (block, name)


# --- random ------------------------------------------------------------------------------------


def test_a_seed_means_the_same_numbers_and_another_seed_others() -> None:
    first, again, other = (tensors(random_weights(SMALL, seed)) for seed in (5, 5, 6))
    assert first.keys() == again.keys() == other.keys()
    for key in first:
        assert torch.equal(first[key], again[key])
        assert not torch.equal(first[key], other[key])


def test_drawing_does_not_touch_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    random_weights(SMALL, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_blocks_and_weights_are_drawn_apart() -> None:
    made = random_weights(SMALL, 0)
    assert not torch.equal(made.read(1, "W_1_e"), made.read(2, "W_1_e"))
    assert not torch.equal(made.read(0, "W_1"), made.read(0, "W_3"))
    assert not torch.equal(made.read(1, "W_1_e", [0]), made.read(1, "W_1_e", [1]))


def test_matrices_have_the_width_of_their_fan_in() -> None:
    made = random_weights(WIDE, 0)
    fan_in = {
        **{"W_DQ": 96, "W_UQ": 64, "W_QR": 64, "W_DKV": 96, "W_KR": 96, "W_UK": 48, "W_UV": 48, "W_O": 80},
        **{"W_1": 96, "W_3": 96, "W_2": 128, "W_g": 96, "W_1_e": 96, "W_3_e": 96, "W_2_e": 72},
        **{"W_1_s": 96, "W_3_s": 96, "W_2_s": 80, "W_U": 96},
    }
    seen = set()
    for (block, name), tensor in made.tensors.items():
        if name in fan_in:
            error = 5 / (2 * tensor.numel()) ** 0.5  # five standard errors of a standard deviation
            assert float(tensor.std()) * fan_in[name] ** 0.5 == pytest.approx(1, abs=error), (block, name)
            assert float(tensor.mean()) == pytest.approx(0, abs=5 / (tensor.numel() * fan_in[name]) ** 0.5)
            seen.add(name)
    assert seen == set(fan_in)
    assert {name for _, name in made.tensors} - seen == {"W_E", "b", "w_attn", "w_Q", "w_KV", "w_ffn", "w_final"}


def test_gains_are_near_one_and_the_bias_does_work() -> None:
    made = random_weights(Dims(**{**vars(WIDE), "e": 400}), 0)
    gains = torch.cat([t for (_, name), t in made.tensors.items() if name.startswith("w_")])
    assert float(gains.mean()) == pytest.approx(1, abs=0.05)
    assert float(gains.std()) == pytest.approx(0.2, abs=0.03)
    bias = torch.cat([made.read(1, "b"), made.read(2, "b")])
    assert float(bias.mean()) == pytest.approx(0, abs=0.06)
    assert float(bias.std()) == pytest.approx(0.3, abs=0.05)
    rms = made.read(None, "W_E").pow(2).mean().sqrt()
    assert 0.3 < float(rms) < 3


@pytest.mark.parametrize("name", VARIANTS)
def test_every_weight_of_every_block_is_there_in_its_shape(name: str) -> None:
    dims = VARIANTS[name]
    made = random_weights(dims)
    sites = [(block, leaf.name) for block, leaf in weight_sites(dims)]
    assert len(set(sites)) == len(sites)
    assert sites[0] == (None, "W_E")
    assert sites[-1] == ((None, "w_final") if dims.tied else (None, "W_U"))
    for block, leaf in weight_sites(dims):
        assert tuple(made.read(block, leaf.name).shape) == weight_shape(leaf, dims)
    assert made.dims is dims
    assert made.resident


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_drawn_in_another_dtype_is_drawn_then_cast(dtype: torch.dtype) -> None:
    made, plain = random_weights(SMALL, 3, dtype), random_weights(SMALL, 3)
    for (block, name), tensor in tensors(made).items():
        kept = torch.float32 if name in ("W_g", "b") else dtype
        assert tensor.dtype == kept
        assert torch.equal(tensor, plain.read(block, name).to(kept))


# --- in memory ---------------------------------------------------------------------------------


def test_a_missing_weight_is_named() -> None:
    held = tensors(random_weights(SMALL))
    for key, said in (((1, "W_UK"), "weight W_UK of block 1"), ((None, "W_E"), "weight W_E")):
        with pytest.raises(BadCheckpoint) as error:
            InMemory(SMALL, {k: t for k, t in held.items() if k != key})
        assert str(error.value) == f"{said} is missing."


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ((0, "W_g"), "weight W_g of block 0"),  # a dense block has no router
        ((3, "W_O"), "weight W_O of block 3"),
        ((1, "W_x"), "weight W_x of block 1"),
        ((None, "W_O"), "weight W_O"),
    ],
)
def test_an_unknown_weight_is_named(key: tuple[int | None, str], said: str) -> None:
    held = tensors(random_weights(SMALL))
    with pytest.raises(BadCheckpoint) as error:
        InMemory(SMALL, {**held, key: torch.zeros(1)})
    assert str(error.value) == f"{said} is no weight of this model."


@pytest.mark.parametrize("key", [(0, "W_DQ"), (2, "W_2_e"), (1, "b"), (None, "W_U")])
def test_a_wrong_shape_is_told_apart(key: tuple[int | None, str]) -> None:
    held = tensors(random_weights(SMALL))
    turned = held[key].unsqueeze(0) if held[key].ndim == 1 else held[key].transpose(-2, -1)
    with pytest.raises(BadCheckpoint) as error:
        InMemory(SMALL, {**held, key: turned})
    assert f"weight {key[1]}" in str(error.value)
    assert f"should be {list(held[key].shape)}, and is {list(turned.shape)}" in str(error.value)


def test_a_tied_head_is_the_embedding() -> None:
    made = random_weights(TIED)
    assert made.read(None, "W_U").data_ptr() == made.read(None, "W_E").data_ptr()
    assert torch.equal(made.read(None, "W_U"), made.read(None, "W_E").T)
    with pytest.raises(BadCheckpoint, match="W_U is no weight"):
        InMemory(TIED, made.tensors)
    cast = made.to(torch.bfloat16)
    assert torch.equal(cast.read(None, "W_U"), made.read(None, "W_E").to(torch.bfloat16).T)


def test_rows_of_a_routed_weight() -> None:
    made = random_weights(SMALL)
    whole = made.read(1, "W_2_e")
    assert whole is made.tensors[1, "W_2_e"]
    for rows in ([2, 0], [3], (1, 1, 2), range(4)):
        assert torch.equal(made.read(1, "W_2_e", rows), torch.stack([whole[i] for i in rows]))


@pytest.mark.parametrize("key", [(0, "W_g"), (7, "W_O"), (None, "W_1"), (0, "nothing")])
def test_reading_what_is_not_there(key: tuple[int | None, str]) -> None:
    with pytest.raises(Missing, match=rf"weight {key[1]}.* is no weight of this model"):
        random_weights(SMALL).read(*key)


def test_casting_keeps_router_weight_and_bias() -> None:
    made = random_weights(SMALL, 2)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        cast = made.to(dtype)
        for (block, name), tensor in cast.tensors.items():
            assert tensor.dtype == (torch.float32 if name in ("W_g", "b") else dtype)
            assert torch.equal(tensor, made.read(block, name).to(tensor.dtype))
    assert all(t.dtype == torch.float32 for t in made.tensors.values())  # the first is as it was


def test_moving_casts_nothing() -> None:
    mixed = tensors(random_weights(SMALL, 2, torch.bfloat16))
    mixed[0, "w_attn"] = mixed[0, "w_attn"].float()
    moved = InMemory(SMALL, mixed).to(device="meta")
    assert {key: t.dtype for key, t in moved.tensors.items()} == {key: t.dtype for key, t in mixed.items()}
    assert all(t.device.type == "meta" for t in moved.tensors.values())


# --- drawn when read ---------------------------------------------------------------------------


def drawn_in_memory(drawn: Drawn) -> InMemory:
    return InMemory(drawn.dims, {(b, leaf.name): drawn.read(b, leaf.name) for b, leaf in weight_sites(drawn.dims)})


def test_drawn_numbers_do_not_depend_on_order_company_or_size_of_model() -> None:
    whole, sites = drawn_in_memory(Drawn(SMALL, 3)), list(weight_sites(SMALL))
    again = Drawn(replace(SMALL, moe=(*SMALL.moe, True)), 3)
    for block, leaf in reversed(sites):
        if block is not None:
            assert torch.equal(again.read(block, leaf.name), whole.read(block, leaf.name))
    for name in ("W_1_e", "W_3_e", "W_2_e"):
        for experts in ([2], [3, 0], []):
            assert torch.equal(Drawn(SMALL, 3).read(1, name, experts), whole.read(1, name, experts))


def test_no_two_drawn_weights_are_alike() -> None:
    def first(tensor: Tensor) -> float:
        return float(tensor.flatten()[0])

    seen = []
    for seed in (0, 1):
        drawn = Drawn(SMALL, seed)
        for block, leaf in weight_sites(SMALL):
            read = drawn.read(block, leaf.name)
            seen += [first(one) for one in read] if leaf.routed else [first(read)]
    assert len(set(seen)) == len(seen)


def test_drawn_weights_spread_as_random_ones() -> None:
    drawn, random = Drawn(WIDE, 1), random_weights(WIDE, 1)
    for block, leaf in weight_sites(WIDE):
        ours, theirs = drawn.read(block, leaf.name), random.read(block, leaf.name)
        assert ours.shape == theirs.shape
        few = 4 / len(ours.flatten()) ** 0.5
        assert abs(ours.std() / theirs.std() - 1) < few, leaf.name
        assert abs(ours.mean() - theirs.mean()) < 1.5 * few * theirs.std(), leaf.name


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_runs_on_drawn_weights(name: str) -> None:
    drawn = Drawn(VARIANTS[name], 2, torch.bfloat16)
    tokens = torch.arange(7)[None]
    ours = Decoder(drawn).run(tokens, want=["logits"])
    theirs = Decoder(drawn_in_memory(drawn)).run(tokens, want=["logits"])
    (a,), (b,) = ours.values(), theirs.values()
    assert a.dtype == torch.bfloat16
    assert torch.equal(a, b)


def test_drawn_router_and_bias_are_fp32_and_the_head_may_be_tied() -> None:
    drawn = Drawn(TIED, 2, torch.bfloat16)
    kinds = {leaf.name: drawn.read(block, leaf.name).dtype for block, leaf in weight_sites(TIED)}
    assert {name for name, dtype in kinds.items() if dtype == torch.float32} == {"W_g", "b"}
    assert torch.equal(drawn.read(None, "W_U"), drawn.read(None, "W_E").T)


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(Missing, match="weight W_1_e of block 0 is no weight"):
        Drawn(SMALL).read(0, "W_1_e")
    for expert in (-1, SMALL.e):
        with pytest.raises(OutOfRange, match=f"there is no expert {expert} of {SMALL.e}"):
            Drawn(SMALL).read(1, "W_1_e", [0, expert])
