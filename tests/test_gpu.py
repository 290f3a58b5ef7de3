"""The same numbers on a GPU. Skipped without one; ``--require-gpu`` makes that a failure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import Prompts
from experiments.patch import patch as patching
from hooks import Cell, HookedModel, Live, Run, Site, patch, resample, zero
from probe import KIMI_K2, Decoder, Dims, InMemory, Sites, evaluate, load, plan, random_weights, save
from probe.numerics import causal_mask, grouped, grouped_by_hand, position_ids, rotation
from probe.weights import weight_shape, weight_sites
from tests.hooks.test_sweep import KEEP, MODELS, OTHER, READ, ROUTERS, SEVERAL, TOKENS, draw, readers
from tests.hooks.twin import Ask, agree

pytestmark = pytest.mark.gpu

SMALL = dataclasses.replace(
    KIMI_K2, d=128, r_q=48, r_kv=32, h=4, n=16, r=8, v=24, f=320, e=16, k=4, m=64, m_s=64, V=64, moe=(False, True)
)
SITES_OF = Sites(SMALL)
SITES = [site for site in SITES_OF if site.tensor not in ("experts", "delta_heads")]


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, SMALL.V, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel(random_weights(SMALL, device="cuda"))


@pytest.fixture(scope="module")
def base(model: HookedModel, tokens: Tensor) -> Run:
    return model.run(tokens.cuda(), want=list(model.sites))


@pytest.fixture(scope="module")
def source(model: HookedModel) -> Run:
    reference = torch.randint(0, SMALL.V, (64, 9), generator=torch.Generator().manual_seed(2))
    return model.run(reference.cuda(), want=list(model.sites))


def test_fp32_equals_the_cpu_tensor_by_tensor(base: Run, tokens: Tensor) -> None:
    here = HookedModel(random_weights(SMALL)).run(tokens, want=SITES)
    for site in SITES:
        there, ours = by_expert(base, site), by_expert(here, site)
        scale = max(1.0, float(ours[ours > -1e30].abs().max()))
        torch.testing.assert_close(there, ours, rtol=0, atol=3e-5 * scale, msg=lambda why, at=site: f"{at}: {why}")


def by_expert(run: Run, site: Site) -> Tensor:
    """A slot tensor with its slots in the order of their experts, as their own order means nothing; others as they
    are."""
    value = run[site].cpu()
    if "k" not in SITES_OF.node(site).shape:
        return value
    order = run["experts", site.block].cpu().argsort(-1)
    return value.gather(2, order.view(*order.shape, *[1] * (value.ndim - 3)).expand(value.shape))


@pytest.mark.parametrize("site", SITES, ids=str)
def test_partial_equals_whole(site: Site, model: HookedModel, base: Run, source: Run, tokens: Tensor) -> None:
    for edit in (zero(str(site)), resample(str(site), source=source, seed=3)):
        whole = model.run(tokens.cuda(), edits=[edit])["logits"]
        assert torch.equal(model.run(tokens.cuda(), edits=[edit], base=base)["logits"], whole), edit.label
        assert (whole - base["logits"]).abs().max() > 1e-4, edit.label


@pytest.mark.parametrize("left", [True, False])
def test_padding(left: bool, model: HookedModel, tokens: Tensor) -> None:
    pads = torch.zeros_like(tokens[:, :2])
    parts = [(pads, False), (tokens, True)] if left else [(tokens, True), (pads, False)]
    padded = torch.cat([part for part, _ in parts], 1).cuda()
    keep = torch.cat([torch.full(part.shape, real) for part, real in parts], 1).cuda()
    made = model(padded, keep)
    assert made.isfinite().all()
    torch.testing.assert_close(made[keep].view(3, 9, -1), model(tokens.cuda()), rtol=0, atol=5e-5)


def test_bf16_runs_grouped_and_keeps_routing_in_fp32(tokens: Tensor) -> None:
    half = HookedModel(random_weights(SMALL, dtype=torch.bfloat16, device="cuda"))
    cache = half.run(tokens.cuda(), want=SITES).cache
    for site, value in cache.items():
        dtype = {"act": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}[half.sites.node(site).dtype]
        assert value.dtype == dtype, site
        assert value.is_cuda, site
    here = HookedModel(random_weights(SMALL, dtype=torch.bfloat16)).run(tokens, want=["blocks.0.x_next"])
    torch.testing.assert_close(cache["x_next", 0].cpu(), here["blocks.0.x_next"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_equal_the_fallback(dtype: torch.dtype) -> None:
    x = torch.randn(2, 33, 64, device="cuda", dtype=dtype)
    W = torch.randn(7, 48, 64, device="cuda", dtype=dtype).transpose(1, 2) / 8
    experts = torch.rand(2, 33, 7, device="cuda").topk(3).indices % 6  # expert 6 has no tokens
    made = grouped(x, experts, W)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=7).cumsum(0)
    by_hand = grouped_by_hand(x.view(-1, 64)[order // 3], W, ends)
    torch.testing.assert_close(made.view(-1, 48)[order], by_hand, rtol=0.02, atol=0.02)


# ---- edits, sweeps, checkpoints, studies -----------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["blocks.2.x_next", "blocks.1.A"]}])
@pytest.mark.parametrize("kind", MODELS)
def test_a_sweep_equals_its_runs(kind: str, asked: dict[str, Any]) -> None:
    """A patch of every tensor, edits together, routers, readers: each cell beside one whole run on the GPU."""
    model, keep = HookedModel(MODELS[kind].decoder.weights.to(device="cuda")), KEEP.cuda()  # type: ignore[attr-defined]
    base, source = Live(TOKENS.cuda(), keep), Live(OTHER.cuda(), keep, read=[[3], [4], [5]])
    run = model.run(draw(30, 9, 3).cuda(), want=list(model.sites))
    places = {site: "T" if "T" in model.sites.node(site).shape else "S" for site in model.sites}
    cells = [
        Cell((patch(str(site), source=source, **{dim: 3}),))
        for site, dim in places.items()
        if site.tensor not in ("experts", "delta_heads")
    ]
    cells += [Cell(make(source, run), label) for label, make in SEVERAL.items()]
    cells += [Cell((one,), label) for label, one in ROUTERS.items()] + readers(kind)
    agree(model, Ask(base, cells, [source], ["logits", "blocks.1.x_mid"], read=READ, **asked), tolerance=3e-5)


def test_careful_numerics_are_nearer_to_fp32() -> None:
    """And a sweep in them is near its runs: routing flips apart, which both count."""
    tokens = TOKENS.cuda()
    exact = MODELS["latent"](TOKENS)
    far = {}
    for numerics in ("reference", "careful"):
        weights = MODELS["latent"].decoder.weights.to(torch.bfloat16, "cuda")  # type: ignore[attr-defined]
        low = HookedModel(weights, numerics=numerics)
        far[numerics] = float((low(tokens).float().cpu() - exact).abs().mean())
    assert far["careful"] < 0.8 * far["reference"]


@pytest.mark.parametrize("keep", ["expanded", "stored", "disk"])
@pytest.mark.parametrize("form", ["plain", "fp8", "int4"])
def test_a_checkpoint_has_the_same_weights_there(form: Any, keep: Any, tmp_path: Path) -> None:
    save(random_weights(SMALL, dtype=torch.bfloat16), tmp_path, form=form)
    here, there = load(tmp_path), load(tmp_path, device="cuda", keep=keep)
    for block, leaf in weight_sites(SMALL):
        value = there.read(block, leaf.name)
        assert value.is_cuda
        assert torch.equal(value.cpu(), here.read(block, leaf.name)), (block, leaf.name)
    assert HookedModel(there)(TOKENS.cuda()).isfinite().all()


def test_decoding_and_a_study() -> None:
    here, there = HookedModel.load(), HookedModel.load(device="cuda")
    text = "The capital of France is"
    edits = [zero("O", 2, h=1, T=-1)]
    assert (
        there.generate(text, n=4, edits=edits).tokens.tolist() == here.generate(text, n=4, edits=edits).tokens.tolist()
    )
    assert here.tokenizer is not None
    prompts = Prompts.load("capital", here.tokenizer)
    ours, theirs = (patching(model, prompts, tensors=["O"], by=["head", "role"]) for model in (there, here))
    assert list(ours["head"]) == list(theirs["head"])
    torch.testing.assert_close(torch.tensor(ours["value"]), torch.tensor(theirs["value"]), rtol=1e-3, atol=1e-3)


# ---- full size -------------------------------------------------------------------------------------------------------


def on_gpu(dims: Dims, dtype: torch.dtype) -> InMemory:
    """Random weights drawn where they stay: at full size there is no other way."""
    torch.manual_seed(0)
    drawn = {}
    for block, leaf in weight_sites(dims):
        shape = weight_shape(leaf, dims)
        fan_in = shape[-2] if len(shape) > 1 else 1
        kept = torch.float32 if leaf.name in ("W_g", "b") else dtype
        drawn[block, leaf.name] = torch.randn(shape, device="cuda", dtype=kept).mul_(fan_in**-0.5)
    return InMemory(dims, drawn)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_block_of_kimi_k2_at_full_size_without_a_host_sync(moe: bool) -> None:
    """Real widths in bf16 (1 GB dense, 34 GB MoE): forward without a host sync; watched and partial runs equal it."""
    if torch.cuda.mem_get_info()[0] < (80 << 30 if moe else 8 << 30):
        pytest.skip("too little memory on this GPU")
    dims = dataclasses.replace(KIMI_K2, moe=(moe,), V=1024)
    weights = on_gpu(dims, torch.bfloat16)
    decoder = Decoder(weights)
    card = decoder.sites.card(0)
    x_n = torch.randn(1, 256, dims.d, device="cuda", dtype=torch.bfloat16)
    ids = position_ids(None, 256, x_n.device)
    given = {
        "x_n": x_n,
        "R": rotation(ids, dims, x_n.dtype),
        "M": causal_mask(None, 256, x_n.dtype, x_n.device),
    }
    todo = plan(card, ["x_next"], given)
    evaluate(todo, given, weights, 0)  # once, so that libraries are loaded
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        start.record()
        made = evaluate(todo, given, weights, 0)["x_next"]
        end.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    print(f"\n{card.kind} block, 256 tokens, bf16: {start.elapsed_time(end):.2f} ms")
    assert made.isfinite().all()
    every = evaluate(plan(card, card.hooked, given), given, weights, 0)
    assert torch.equal(every["x_next"], made)
    from_middle = plan(card, ["x_next"], [*given, *card], edited=["O"])
    again = evaluate(from_middle, {**given, **every}, weights, 0, tap=lambda name, value: value)
    assert torch.equal(again["x_next"], made)
