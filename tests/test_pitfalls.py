"""What goes wrong in tools like this one, kind by kind, each in the smallest form that would show it."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformer_lens
from torch import Tensor
from transformer_lens import ActivationCache, patching

from experiments.ablate import ablate
from experiments.frames import COLUMNS
from experiments.metrics import METRICS
from experiments.prompts import Prompts
from hooks import Cache, HookedModel, Site, add, exclude, force, freeze, patch, resample, scale, set_to, zero
from hooks.generate import generate
from probe import Decoder, Dims, InMemory, card, numerics, random_weights
from probe.errors import BadEdit, ProbeError, UnknownTensor
from probe.moe import experts, gates
from tests.hooks.small import DENSE, DIMS, MODEL, MOE, ORACLE, TOKENS, B, T, close, everything, padded, ragged, theirs
from tests.oracle import Oracle, by_expert, config, draw

SITES = list(MODEL.sites)
OTHER = TOKENS.flip(1)
NAME = "blocks.1.O"
PLAIN = MODEL(TOKENS)


def double(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


def fail(value: Tensor, hook: Any) -> None:
    raise RuntimeError("on purpose")


def shallow(**changes: Any) -> HookedModel:
    """One block, so that thousands of runs are seconds."""
    return HookedModel(random_weights(replace(DIMS, moe=(True,), **changes), 1))


def refuses(why: str, error: type[Exception], *uses: Callable[[], Any]) -> None:
    for use in uses:
        with pytest.raises(error, match=why):
            use()


# ==== Hooks ===========================================================================================================


def test_a_hook_that_raises_is_removed() -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.O", double), (NAME, fail)])
    assert not MODEL.watched()
    assert torch.equal(MODEL(TOKENS), PLAIN)


def test_a_caching_call_leaves_the_users_own_hooks() -> None:
    model = copy.deepcopy(MODEL)
    model.add_hook(NAME, double)
    hooked = model(TOKENS)
    assert torch.equal(model.run_with_cache(TOKENS)[0], hooked)
    model.run(TOKENS, want=None)
    assert model.watched() == {Site(1, "O")}
    assert torch.equal(model(TOKENS), hooked)
    assert not torch.equal(hooked, PLAIN)


def test_no_point_is_switched_off_and_where_there_is_none_the_hook_is_refused() -> None:
    """Not even what is made only on request: a hook asks for it."""
    fired: list[Any] = []
    made = MODEL.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.1.attn.hook_result", lambda v, hook: fired.append(v.shape))]
    )
    assert fired == [(B, T, DIMS.h, DIMS.d)]
    assert torch.equal(made, PLAIN)
    refuses("gates", UnknownTensor, lambda: MODEL.add_hook("blocks.0.gates", double))
    direct = shallow(r_q=None)
    refuses("c_Q", UnknownTensor, lambda: direct.add_hook("blocks.0.c_Q", double))


def test_one_hook_fires_once() -> None:
    fired: Counter[str] = Counter()
    MODEL.run_with_hooks(TOKENS, fwd_hooks=[(n, lambda v, hook: fired.update([hook.name])) for n in MODEL.hook_dict])
    assert fired == Counter(dict.fromkeys(MODEL.hook_dict, 1))


def test_options_are_not_swallowed() -> None:
    refuses(
        "unexpected keyword",
        TypeError,
        lambda: MODEL.run_with_cache(TOKENS, name_filter=NAME),
        lambda: MODEL.run_with_hooks(TOKENS, fwd_hook=[(NAME, double)]),
        lambda: MODEL.run(TOKENS, edit=[]),
        lambda: MODEL.generate(TOKENS, n=1, max_new_tokens=1),
        lambda: MODEL(TOKENS, stop_at_layer=1),
    )
    for takes in (MODEL.forward, MODEL.run, MODEL.run_with_cache, MODEL.generate):
        assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(takes).parameters.values())
    refuses("'head' is no dim", ProbeError, lambda: zero("O", 1, head=2))


def test_after_compilation_hooks_caches_and_edits_act() -> None:
    model = shallow()
    before, doubled = model(TOKENS), model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.O", double)])
    compiled = torch.compile(model, backend="eager")
    try:
        assert torch.equal(compiled(TOKENS), before)
        model.add_hook("blocks.0.O", double)
        assert torch.equal(compiled(TOKENS), doubled)
        model.reset_hooks()
        assert len(compiled.run_with_cache(TOKENS)[1]) == len(
            [site for site in model.sites if site.tensor != "delta_heads"]
        )
        assert not torch.equal(compiled.run(TOKENS, edits=[zero("O", 0)])["logits"], before)
    finally:
        torch._dynamo.reset()


def test_a_value_that_was_never_computed_is_no_source() -> None:
    source = MODEL.run(OTHER, want=NAME)
    for edit in (patch("V", 1, source=source), resample("V", 1, source=source), patch("O", 0, source=source.cache)):
        refuses(r"blocks\.\d\.. was not cached", UnknownTensor, lambda edit=edit: MODEL.run(TOKENS, edits=[edit]))


def test_an_early_stop_leaves_the_model_whole() -> None:
    made: list[str] = []
    with MODEL.hooks(fwd_hooks=[("blocks.2.O", lambda v, hook: made.append(hook.name))]):
        MODEL.decoder.run(TOKENS, want=["blocks.0.c_KV"], tap=lambda site, value: made.append(str(site)) or value)
    assert not [name for name in made if not name.startswith(("blocks.0", "x_0"))]
    assert torch.equal(MODEL.run(TOKENS, want="blocks.0.c_KV")["c_KV", 0], everything()["c_KV", 0])
    assert torch.equal(MODEL(TOKENS), PLAIN)


def test_a_run_leaves_no_state_for_the_next() -> None:
    MODEL.run(OTHER, edits=[zero("x_n", 1)])
    MODEL.run_with_hooks(OTHER, fwd_hooks=[(NAME, double)])
    MODEL.generate(OTHER[:, :2], n=2)
    MODEL.run_with_cache(TOKENS[:, :2], grads=lambda logits: logits.sum())
    assert torch.equal(MODEL(TOKENS), PLAIN)
    assert MODEL.clock.step == 0


def test_two_thousand_short_runs_leave_nothing() -> None:
    model, few = shallow(), TOKENS[:1, :1]

    def short() -> None:
        with model.hooks(fwd_hooks=[("blocks.0.s_attn", double)]):
            model.run(few, want="blocks.0.n_attn", edits=[zero("x_0", d=1)])

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(5):
        short()
    before = objects()
    for _ in range(2000):
        short()
    assert objects() - before < 100


def test_a_deepcopy_runs_itself() -> None:
    twin = copy.deepcopy(MODEL)
    twin.add_hook(NAME, double)
    twin.decoder.weights.tensors[1, "W_UV"].mul_(3)
    assert not torch.equal(twin(TOKENS), PLAIN)
    assert torch.equal(MODEL(TOKENS), PLAIN)
    twin.reset_hooks()
    MODEL.add_hook(NAME, double)
    try:
        assert not twin.watched()
    finally:
        MODEL.reset_hooks()


def test_a_model_can_be_pickled_and_a_hooked_one_says_why_not() -> None:
    twin = pickle.loads(pickle.dumps(MODEL))
    assert torch.equal(twin(TOKENS), PLAIN)
    with twin.hooks(fwd_hooks=[(NAME, double)]):
        refuses(r"blocks\.1\.O has hooks on", BadEdit, lambda: pickle.dumps(twin))


def test_it_is_a_root_module_of_transformer_lens_as_it_is_imported_now() -> None:
    assert isinstance(MODEL, transformer_lens.HookedRootModule)
    assert all(type(point).__mro__[1] is transformer_lens.hook_points.HookPoint for point in MODEL.hook_points())
    assert set(MODEL.hook_dict) == {site.hook for site in SITES}


def test_hooks_takes_its_four_arguments_by_position() -> None:
    with MODEL.hooks([(NAME, double)], [], False, False) as model:
        assert model.watched() == {Site(1, "O")}
    assert MODEL.watched() == {Site(1, "O")}, "reset_hooks_end=False: as asked"
    MODEL.reset_hooks()
    made = MODEL.run_with_hooks(TOKENS, fwd_hooks=[(NAME, double)], reset_hooks_end=True, clear_contexts=True)
    assert torch.equal(made, MODEL.run(TOKENS, edits=[scale("O", 1, factor=2)])["logits"])


def test_generic_patching_finds_the_config_that_it_wants() -> None:
    cfg = MODEL.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads, cfg.device.type) == (3, 3, 3, "cpu")
    assert not MODEL.training
    source = MODEL.run(OTHER, want=["blocks.0.O", NAME, "blocks.2.O"])
    swept = patching.get_act_patch_attn_head_out_all_pos(MODEL, TOKENS, source.cache, lambda logits: logits[0, -1, 7])
    by_hand = MODEL.run(TOKENS, edits=[patch("O", 1, source=source, h=2)])["logits"][0, -1, 7]
    close(swept[1, 2], by_hand)


def test_transformer_lens_cache_has_its_own_names_as_real_keys() -> None:
    cache = MODEL.activation_cache(MODEL.run(TOKENS, want=None))
    assert isinstance(cache, ActivationCache)
    assert {"hook_embed", "blocks.1.hook_resid_pre", "blocks.1.attn.hook_z", "blocks.2.ln2.hook_scale"} <= set(cache)
    close(cache.accumulated_resid()[-1], cache["blocks.2.hook_resid_post"])


# ==== Cache ===========================================================================================================


def test_cached_tensors_stay_when_live_ones_are_written_to() -> None:
    held: list[Tensor] = []

    def mine(value: Tensor, hook: Any) -> Tensor:
        held.append(value)
        return value

    with MODEL.hooks(fwd_hooks=[("blocks.1.c_KV", mine)]):
        _, cache = MODEL.run_with_cache(TOKENS)
    held[0].zero_()
    base = everything()
    MODEL.run(TOKENS, base=base, edits=[zero("c_KV", 1)])["logits"].zero_()
    for kept in (cache, base):
        assert torch.equal(kept["c_KV", 1], everything()["c_KV", 1])


def test_names_share_no_storage() -> None:
    """A view by head, a part, and the next block's input are the same numbers, and three pieces of memory."""
    cache = everything().cache
    assert len({value.untyped_storage().data_ptr() for value in cache.values()}) == len(cache)


def test_a_slice_of_positions_pins_no_more_than_itself() -> None:
    _, cache = MODEL.run_with_cache(TOKENS, pos=slice(1, 3))
    for site, value in cache.items():
        assert value.untyped_storage().nbytes() == value.nbytes, site
    assert cache["c_KV", 1].shape == (B, 2, DIMS.r_kv)
    assert torch.equal(cache["c_KV", 1], everything()["c_KV", 1][:, 1:3])


@pytest.mark.parametrize("names", ["blocks.*.c_kvv", [], lambda name: "resid_pre" in name], ids=["glob", "none", "f"])
def test_a_filter_that_matches_nothing_is_an_error(names: Any) -> None:
    refuses(
        "match|select",
        UnknownTensor,
        lambda: MODEL.run_with_cache(TOKENS, names_filter=names),
        lambda: MODEL.run(TOKENS, want=names),
        lambda: MODEL.add_caching_hooks(names),
    )


def test_no_graph_is_kept_with_gradients_on() -> None:
    model = HookedModel(InMemory(DIMS, {k: t.clone().requires_grad_() for k, t in ORACLE.weights().tensors.items()}))
    logits, cache = model.run_with_cache(TOKENS, names_filter=SITES)
    assert logits.grad_fn is not None
    for kept in (cache, model.run(TOKENS, want=SITES).cache):
        assert all(value.grad_fn is None and not value.requires_grad for value in kept.values())


def test_what_was_cached_in_inference_mode_serves_autograd() -> None:
    with torch.inference_mode():
        _, cache = MODEL.run_with_cache(TOKENS, names_filter=NAME)
        run = MODEL.run(TOKENS, want=NAME)
    for kept in (cache, run):
        weight = torch.ones(DIMS.v, requires_grad=True)
        (kept[NAME] * weight).sum().backward()
        assert weight.grad is not None


def test_memory_goes_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        runs = [everything(), everything(edits=[zero("O", 1)]), MODEL.run_with_cache(TOKENS)[1]]
        caches = [run if isinstance(run, Cache) else run.cache for run in runs]
        refs = [weakref.ref(value) for cache in caches for value in cache.values()]
        del runs, caches
        assert len(refs) > 2 * len(SITES)
        assert not [ref for ref in refs if ref() is not None]
    finally:
        gc.enable()


# ==== Attention =======================================================================================================


@pytest.mark.parametrize(("mscale", "over_all"), [(0.7, 1.3), (1.3, 0.7)])
def test_mscale_squared_is_in_the_softmax_scale_and_their_ratio_in_the_rotation(mscale: float, over_all: float) -> None:
    oracle = Oracle(config(yarn={"mscale": mscale, "mscale_all_dim": over_all}), seed=3)
    tokens, shown = draw(oracle, 2, 9)
    made = Decoder(oracle.weights()).run(tokens, want=["blocks.1.Q_R", "blocks.1.S"])
    for tensor in ("Q_R", "S"):
        at = made[Site(1, tensor)]
        visible = at > -1e30
        close(at[visible], shown[1, tensor][visible])
        assert at.shape == shown[1, tensor].shape
    gain = torch.tensor(32.0).log() / 10
    assert oracle.dims.tau == pytest.approx(float((1 + over_all * gain) ** 2 / (DIMS.n + DIMS.r) ** 0.5))
    assert oracle.dims.rotary_gain == pytest.approx(float((1 + mscale * gain) / (1 + over_all * gain)))


def test_stored_pairs_are_interleaved_and_come_back_half_split() -> None:
    x, positions = torch.randn(1, 5, 8), torch.arange(5)
    dims = replace(DIMS, yarn=None)
    angle = positions[:, None] * dims.theta ** -(torch.arange(0, 8, 2) / 8)
    turned = torch.view_as_complex(x.view(1, 5, 4, 2)) * torch.polar(torch.ones_like(angle), angle)
    made = numerics.rotate(x, numerics.rotation(positions, dims, torch.float32))
    close(made, torch.cat([turned.real, turned.imag], -1))
    close(made[:, :1], torch.cat([x[:, :1, 0::2], x[:, :1, 1::2]], -1))


def test_the_latent_is_split_at_its_own_width() -> None:
    base, rows = everything(), ORACLE.model.model.layers[1].self_attn.kv_a_proj_with_mqa.weight
    assert DIMS.r_kv not in (DIMS.n, DIMS.r, DIMS.v)
    close(base["c_KV", 1], base["x_attn", 1] @ rows[: DIMS.r_kv].T)
    close(base["k_pe", 1], base["x_attn", 1] @ rows[DIMS.r_kv :].T)


def test_the_latent_norms_keep_their_own_eps() -> None:
    model = HookedModel(random_weights(replace(DIMS, eps=0.5), 1))
    cache = model.run(TOKENS, want=SITES).cache
    for scale_of, latent in (("s_KV", "c_KV"), ("s_Q", "c_Q")):
        close(cache[scale_of, 1], (cache[latent, 1].square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    close(cache["s_attn", 1], (cache["x_n", 1].square().mean(-1, keepdim=True) + 0.5).rsqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_real_score_goes_below_what_is_hidden(dtype: torch.dtype) -> None:
    Q = torch.full((1, 3, 1, 4), 100.0, dtype=dtype)
    S = numerics.scores(Q, -Q, 1.0, numerics.causal_mask(None, 3, dtype))
    assert float(S[0, 0, 2, 2]) == pytest.approx(-40000, rel=0.01)
    A = numerics.pattern(S)
    assert not A.triu(1).any()
    close(A.sum(-1).float(), torch.ones(1, 1, 3), 0.01)


def test_pad_queries_on_the_left_stay_finite() -> None:
    tokens, keep = padded(ragged(), "left")
    run = MODEL.run(tokens, keep, want=SITES)
    assert all(value.isfinite().all() for value in run.cache.values() if value.is_floating_point())
    _, cache = MODEL.run_with_cache(tokens, keep, grads=lambda logits: logits[:, -1].sum())
    assert all(value.isfinite().all() for value in cache.gradients.values())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_count_their_own_positions(side: str) -> None:
    tokens, keep = padded(ragged(), side)
    made = MODEL(tokens, keep)
    for b, row in enumerate(ragged()):
        close(made[b][keep[b]], MODEL(row[None])[0])


@pytest.mark.parametrize("head", range(DIMS.h))
def test_a_head_is_its_columns_of_o_proj_though_head_dim_is_the_rotary_width(head: int) -> None:
    assert DIMS.v != DIMS.r

    def columns(state: dict[str, Tensor]) -> None:
        state["model.layers.1.self_attn.o_proj.weight"][:, head * DIMS.v : (head + 1) * DIMS.v] = 0

    def silence(value: Tensor, hook: Any) -> Tensor:
        value[:, :, head] = 0
        return value

    close(MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", silence)]), theirs(columns))


def test_cached_decoding_is_uncached_decoding() -> None:
    tokens, keep = padded(ragged(), "left")
    fast, slow = (generate(MODEL, tokens, keep, n=6, use_cache=cached) for cached in (True, False))
    assert torch.equal(fast.new, slow.new)
    close(fast.logits, slow.logits)


def test_the_norm_is_cast_down_before_its_gain() -> None:
    model = HookedModel(random_weights(DIMS, 1).to(torch.bfloat16))
    cache = model.run(TOKENS, want=["blocks.1.x_n", "blocks.1.s_attn", "blocks.1.x_attn"]).cache
    gain, unit = model.decoder.weights.read(1, "w_attn"), cache["x_n", 1].float() * cache["s_attn", 1]
    assert torch.equal(cache["x_attn", 1], gain * unit.bfloat16())
    assert not torch.equal(cache["x_attn", 1], (gain * unit).bfloat16())


# ==== MoE =============================================================================================================

GROUPED = replace(DIMS, e=8, k=2, n_group=4, topk_group=1)


def chosen(score: list[float], dims: Dims = GROUPED) -> set[int]:
    made = experts(torch.tensor(score)[None, None], dims.n_group, dims.topk_group, dims)
    return set(made.flatten().tolist())


def test_closed_groups_lose_to_negative_scores() -> None:
    assert chosen([-9.0, -9.0, -1.0, -2.0, -8.0, -8.0, -7.0, -7.0]) == {2, 3}


def test_a_group_is_as_good_as_its_best_two() -> None:
    assert chosen([0.9, 0.0, 0.6, 0.5, 0.0, 0.0, 0.1, 0.2]) == {2, 3}


def test_router_and_bias_are_fp32_under_every_cast() -> None:
    weights = random_weights(DIMS, 1)
    cast = weights.to(torch.bfloat16)
    cache = HookedModel(cast).run(TOKENS, want=SITES).cache
    for name in ("W_g", "b"):
        assert torch.equal(cast.read(1, name), weights.read(1, name))
    for name in ("router_logits", "affinity", "choice_score", "gates", "delta_experts"):
        assert cache[name, 1].dtype == torch.float32
    close(cache["router_logits", 1], cache["x_ffn", 1].float() @ weights.read(1, "W_g"))
    assert cache["x_ffn", 1].dtype == torch.bfloat16


def test_scaling_is_applied_once() -> None:
    base = everything()
    close(base["gates", 1].sum(-1), torch.full((B, T), DIMS.scaling))
    close(base["delta_routed", 1], (base["gates", 1][..., None] * base["y_e", 1]).sum(2))
    assert DIMS.scaling != 1


def test_the_bias_chooses_and_is_not_in_the_gates() -> None:
    score = torch.tensor([[[0.5, 0.2, 0.4, 0.1]]])
    close(gates(score, torch.tensor([[[3, 0]]]), True, 3.0), torch.tensor([[[0.5, 2.5]]]))
    assert not {"b", "choice_score"} & set(card(moe=True)["gates"].needs)
    tensors = dict(ORACLE.weights().tensors)
    tensors.update({(block, "b"): torch.linspace(-9, 9, DIMS.e) for block in (1, 2)})
    other, forced = HookedModel(InMemory(DIMS, tensors)), [force(block, range(DIMS.k)) for block in (1, 2)]
    assert torch.equal(other.run(TOKENS, edits=forced)["logits"], MODEL.run(TOKENS, edits=forced)["logits"])
    assert not torch.equal(other(TOKENS), PLAIN)


def test_an_expert_without_tokens_is_no_trouble() -> None:
    one = TOKENS[:1, :1]
    run = MODEL.run(one, want=SITES, edits=[force(MOE, [0, 5, 14, 15])])
    assert run["logits"].isfinite().all()
    x, W = run["x_ffn", 1], MODEL.decoder.weights.read(1, "W_1_e")
    for slot, e in enumerate(run["experts", 1].flatten().tolist()):
        close(run["g_e", 1][0, 0, slot], x[0, 0] @ W[e])
    made = MODEL.run(TOKENS, edits=[zero("y_e", MOE, e=int(everything()["experts", MOE].flatten()[0]))])
    assert made.touched[0] > 0


def test_edits_reach_inside_fused_experts() -> None:
    model = HookedModel.from_hf(ORACLE.model)
    e = int(everything()["experts", MOE].flatten().mode().values)

    def silent(state: dict[str, Tensor]) -> None:
        state["model.layers.1.mlp.experts.down_proj"][e] = 0

    made = model.run(TOKENS, edits=[zero("h_e", MOE, e=e)])
    close(made["logits"], theirs(silent))
    assert float((made["logits"] - PLAIN).abs().max()) > 1e-3
    assert float((MODEL.run(TOKENS, edits=[zero("W_2_e", MOE, e=e)])["logits"] - made["logits"]).abs().max()) < 1e-5


ROUTER = {
    "router_logits": add("router_logits", MOE, direction=torch.linspace(-4, 4, DIMS.e)),
    "affinity": scale("affinity", MOE, factor=0.1, e=slice(0, 8)),
    "choice_score": exclude(MOE, list(range(8))),
    "experts": force(MOE, [0, 1, 2, 3]),
    "gates": scale("gates", MOE, factor=0.5),
    "W_g": zero("W_g", MOE, e=[0, 3]),
    "b": zero("b", MOE),
}


@pytest.mark.parametrize("name", ROUTER)
def test_every_edit_of_the_router_has_an_effect(name: str) -> None:
    made = MODEL.run(TOKENS, edits=[ROUTER[name]])["logits"]
    assert float((made - PLAIN).abs().max()) > 1e-3


def test_routing_flips_are_counted_and_not_taken_for_rounding() -> None:
    base, noisy = everything(), [add("x_n", MOE, direction=torch.full((DIMS.d,), 0.3))]
    moved = MODEL.run(TOKENS, edits=noisy, base=base, want=SITES)
    same = (moved["experts", b].sort(-1).values == base["experts", b].sort(-1).values for b in (1, 2))
    assert moved.flips > 0
    assert moved.routing_agreement == pytest.approx(1 - moved.flips / (2 * B * T * DIMS.k))
    assert not all(bool(block.all()) for block in same)
    held = MODEL.run(TOKENS, edits=[*noisy, freeze("experts")], base=base)
    assert (held.flips, held.routing_agreement, held.frozen) == (0, 1.0, ("experts",))


def test_slots_of_two_runs_are_compared_by_expert() -> None:
    """The same experts in other slots: no flip, and a patch from there changes nothing."""
    base = everything()
    other = [set_to("experts", MOE, value=base["experts", MOE].flip(-1))]
    swapped = MODEL.run(TOKENS, want=SITES, edits=other, base=base)
    close(swapped["logits"], PLAIN)
    assert (swapped.flips, swapped.routing_agreement) == (0, 1.0)
    assert not torch.allclose(swapped["y_e", MOE], base["y_e", MOE])
    for tensor in ("gates", "y_e", "delta_experts"):
        made = MODEL.run(TOKENS, want=SITES, edits=[patch(tensor, MOE, source=swapped)])
        close(made["logits"], PLAIN)
        ours, others = (by_expert(r[tensor, MOE], r["experts", MOE]) for r in (made, swapped))
        close(ours, others)


@pytest.fixture(scope="module")
def tiny() -> HookedModel:
    return HookedModel.load()


def test_prompts_of_one_group_are_one_unit_and_tokens_are_none(tiny: HookedModel) -> None:
    assert tiny.tokenizer is not None
    rows = [
        {"clean": f"{name} Jones is a", "answer": "teacher", "wrong": "nurse", "group": group}
        for name, group in (("Paul", "p"), ("Anna", "q"), ("Tom", "q"))
    ]
    prompts = Prompts.of(rows, tiny.tokenizer)
    options: dict[str, Any] = {"tensors": ["gates"], "blocks": [1], "how": "zero", "metrics": ["logit_difference"]}
    for by, cells in ((None, 1), ("position", 5)):
        df = ablate(tiny, prompts, by=by, **options)
        assert set(df["n"]) == {2}, "not 3 prompts, not 15 tokens"
        assert len(df) >= cells


def test_no_expert_is_called_special_and_its_tokens_are_told(tiny: HookedModel) -> None:
    """With attention off, equal tokens choose equal experts wherever they stand: that an expert comes with a token says
    nothing of what it does. Nothing here ranks experts by what chose them, and a cell of a position names its token."""
    quiet = [zero("delta_attn", block) for block in range(DIMS.blocks)]
    same = torch.full((1, 4), int(TOKENS[0, 0]))
    run = MODEL.run(same, want=SITES, edits=quiet)
    for block in (1, 2):
        assert (run["experts", block].sort(-1).values == run["experts", block][:, :1].sort(-1).values).all()
    said = " ".join([*COLUMNS, *METRICS]).lower()
    assert not any(word in said for word in ("special", "selectiv", "specific", "monosem"))
    row = {"clean": "Paul Jones is a", "answer": "teacher", "wrong": "nurse"}
    df = ablate(
        tiny, Prompts.of([row], tiny.tokenizer), tensors=["gates"], blocks=[DENSE + 1], by="position", how="zero"
    )
    assert list(df["token"].unique()) == ["<bos>", "Paul", "Jones", "is", "a"]
