"""Hooks: which one fires, what it may return, what stays behind; and TransformerLens' names by value."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import HookedModel, Site, zero
from probe import InMemory, ProbeError, random_weights
from probe.errors import BadEdit, OutOfRange, ShapeMismatch, UnknownTensor
from tests.hooks.small import DIMS, MODEL, ORACLE, TOKENS, B, T, close, everything
from tests.oracle import Oracle, config


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    yield
    assert not MODEL.watched()
    MODEL.reset_hooks(including_permanent=True)


def plain() -> Tensor:
    return MODEL.run(TOKENS)["logits"]


def double(value: Tensor, hook: object) -> Tensor:
    return 2 * value


def zeroed(value: Tensor, hook: object) -> Tensor:
    return torch.zeros_like(value)


def spoil(value: Tensor, hook: object) -> None:
    value.zero_()


# ---- names -----------------------------------------------------------------------------------------------------------

ALIASES: dict[str, dict[str, str]] = {
    "any": {
        "hook_resid_pre": "x_n",
        "ln1.hook_scale": "s_attn",
        "ln1.hook_normalized": "n_attn",
        "ln1.hook_out": "x_attn",
        "attn.hook_in": "x_attn",
        "input_layernorm": "x_attn",
        "self_attn.q_a_proj": "c_Q",
        "attn.hook_q_latent": "c_Q_hat",
        "self_attn.q_a_layernorm": "c_Q_hat",
        "attn.hook_kv_latent": "c_KV_hat",
        "self_attn.kv_a_layernorm": "c_KV_hat",
        "attn.hook_rot_q": "Q_R",
        "attn.hook_q": "Q",
        "attn.hook_rot_k": "k_R",
        "attn.hook_k": "K",
        "attn.hook_v": "V",
        "hook_v": "v",
        "attn.hook_attn_scores": "S",
        "attn.hook_pattern": "A",
        "attn.hook_z": "O",
        "attn.hook_result": "delta_heads",
        "hook_attn_out": "delta_attn",
        "self_attn.o_proj": "delta_attn",
        "hook_resid_mid": "x_mid",
        "ln2.hook_scale": "s_ffn",
        "ln2.hook_normalized": "n_ffn",
        "ln2.hook_out": "x_ffn",
        "mlp.hook_in": "x_ffn",
        "post_attention_layernorm": "x_ffn",
        "hook_mlp_out": "delta_ffn",
        "hook_resid_post": "x_next",
        "x_<n+1>": "x_next",
        "Δ_attn": "delta_attn",
        "Δ_ffn": "delta_ffn",
        "ĉ^KV": "c_KV_hat",
        "c\u0302^Q": "c_Q_hat",
    },
    "dense": {
        "mlp.hook_pre": "g",
        "mlp.gate_proj": "g",
        "mlp.hook_pre_linear": "u",
        "mlp.up_proj": "u",
        "mlp.hook_post": "h",
        "mlp.down_proj": "delta_ffn",
    },
    "moe": {
        "mlp.gate.hook_out": "router_logits",
        "mlp.shared_experts.hook_pre": "g_s",
        "mlp.shared_experts.hook_pre_linear": "u_s",
        "mlp.shared_experts.hook_post": "h_s",
        "mlp.shared_experts.hook_out": "delta_shared",
    },
}
"""The spellings of names.md, by hand."""
AROUND = {
    "hook_embed": "x_0",
    "ln_final.hook_scale": "s_final",
    "ln_final.hook_normalized": "n_final",
    "ln_final.hook_out": "x_final",
}
EACH = [
    (f"blocks.{block}.{alias}", Site(block, name))
    for block, kinds in ((0, ("any", "dense")), (1, ("any", "moe")))
    for kind in kinds
    for alias, name in ALIASES[kind].items()
] + [(alias, Site(None, name)) for alias, name in AROUND.items()]


@pytest.mark.parametrize(("alias", "site"), EACH)
def test_every_alias_hooks_the_right_tensor(alias: str, site: Site) -> None:
    fired: list[str] = []
    MODEL.run_with_hooks(TOKENS, fwd_hooks=[(alias, lambda value, hook: fired.append(hook.name))])
    assert fired == [site.hook]
    if "<" not in alias and "layer" in alias:
        assert MODEL.sites.find(alias.replace("blocks.", "model.layers.")) == site


def test_every_alias_of_the_card_with_a_hook_in_its_name_is_in_this_list() -> None:
    known = {alias for kind in ALIASES.values() for alias in kind} | set(AROUND)
    cards = [*MODEL.sites.cards, MODEL.sites.around]
    assert not {s for card in cards for s in card.spellings() if ".hook_" in s or s.startswith("hook_")} - known


@pytest.mark.parametrize("spelling", ["blocks.1.c_KV", "blocks.1.hook_c_KV", "blocks.1.c^KV", Site(1, "c_KV")])
def test_every_way_in_takes_every_spelling(spelling) -> None:
    by_run = MODEL.run_with_hooks(TOKENS, fwd_hooks=[(spelling, zeroed)])
    with MODEL.hooks(fwd_hooks=[(spelling, zeroed)]):
        by_context = MODEL(TOKENS)
    MODEL.add_hook(spelling, zeroed)
    by_adding = MODEL(TOKENS)
    MODEL.reset_hooks()
    by_edit = MODEL.run(TOKENS, edits=[zero(str(spelling))])["logits"]
    assert torch.equal(by_run, by_context)
    assert torch.equal(by_run, by_adding)
    assert torch.equal(by_run, by_edit)
    assert not torch.equal(by_run, plain())


def test_v_and_attn_hook_v_are_two_tensors() -> None:
    seen: dict[str, torch.Size] = {}

    def note(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value.shape

    MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_v", note), ("blocks.1.hook_v", note)])
    assert seen == {"blocks.1.hook_V": (B, T, DIMS.h, DIMS.v), "blocks.1.hook_v": (B, T, DIMS.h * DIMS.v)}


@pytest.mark.parametrize("alias", [pair[0] for pair in EACH if "hook_scale" in pair[0]])
def test_hook_scale_shows_rms_and_takes_rms(alias: str) -> None:
    """Twice the rms halves the scale, and so the normed stream, whichever of the two is hooked."""
    site = MODEL.sites.find(alias)
    seen: list[Tensor] = []

    def twice(value: Tensor, hook: object) -> Tensor:
        seen.append(value.clone())
        return 2 * value

    by_rms = MODEL.run_with_hooks(TOKENS, fwd_hooks=[(alias, twice)])
    by_scale = MODEL.run_with_hooks(TOKENS, fwd_hooks=[(site, lambda value, hook: value / 2)])
    close(by_rms, by_scale)
    assert not torch.equal(by_rms, plain())
    stream = {"s_attn": "blocks.{}.x_n", "s_ffn": "blocks.{}.x_mid", "s_final": "blocks.2.x_next"}[site.tensor]
    value = everything()[stream.format(site.block)]
    torch.testing.assert_close(seen[0], (value.pow(2).mean(-1, keepdim=True) + DIMS.eps).sqrt())
    unchanged = MODEL.run_with_hooks(TOKENS, fwd_hooks=[(alias, spoil)])
    assert torch.equal(unchanged, plain()), "it wrote into its own copy"


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("blocks.1.c_kvv", UnknownTensor, "Nearest: c_KV"),
        ("c_KV", UnknownTensor, "in every block"),
        ("blocks.3.c_KV", OutOfRange, "block 3 does not exist: this model has blocks 0 to 2"),
        ("blocks.1.mlp.hook_pre", UnknownTensor, "TransformerLens shows the MoE's input there"),
        ("blocks.1.mlp.hook_post", UnknownTensor, "TransformerLens shows the MoE's output there"),
        ("blocks.1.self_attn.kv_b_proj", UnknownTensor, "k_C and v"),
        ("blocks.1.R", UnknownTensor, "shown, never watched or edited"),
        ("blocks.1.W_O", UnknownTensor, "W_O"),
        ("blocks.1.attn.hook_c_KV", UnknownTensor, "attn.hook_c_KV"),
        (lambda name: False, UnknownTensor, "selects no hook at all"),
        (lambda name: name == "blocks.1.c_KV", UnknownTensor, "hook_c_KV"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_and_leaves_nothing(name, error, why: str) -> None:
    for use in (
        lambda: MODEL.add_hook(name, double),
        lambda: MODEL.add_perma_hook(name, double),
        lambda: MODEL.run_with_hooks(TOKENS, fwd_hooks=[("x_0", double), (name, double)]),
    ):
        with pytest.raises(error, match=why) as caught:
            use()
        assert isinstance(caught.value, ProbeError)
        assert not MODEL.watched()


def test_the_caching_hooks_of_transformer_lens_take_our_spellings_and_refuse_what_is_none() -> None:
    held = MODEL.add_caching_hooks("blocks.1.c^KV")
    MODEL(TOKENS)
    MODEL.reset_hooks()
    assert list(held) == ["blocks.1.hook_c_KV"]
    assert torch.equal(held["blocks.1.hook_c_KV"], everything()["c_KV", 1])
    for names in ("blocks.1.c_kvv", [], lambda name: False):
        with pytest.raises(UnknownTensor):
            MODEL.add_caching_hooks(names)
        with pytest.raises(UnknownTensor):
            MODEL.get_caching_hooks(names)


def test_what_we_do_not_know_is_not_swallowed() -> None:
    for use in (
        lambda: MODEL.run_with_hooks(TOKENS, fwd_hook=[("x_0", double)]),
        lambda: MODEL.run_with_hooks(TOKENS, fwd_hooks=[], return_type="loss"),
        lambda: MODEL.hooks(fwd_hooks=[], names=3).__enter__(),
        lambda: MODEL.add_hook("x_0", double, permanent=True),
        lambda: MODEL(TOKENS, stop_at_layer=1),
        lambda: MODEL.run(TOKENS, edit=[]),
    ):
        with pytest.raises(TypeError, match="unexpected keyword"):
            use()
    with pytest.raises(BadEdit, match="fwd or bwd, not 'forward'"):
        MODEL.add_hook("x_0", double, dir="forward")


@pytest.mark.parametrize("move", ["half", "double", "bfloat16", "cpu"])
def test_casting_the_module_would_do_nothing_and_says_so(move: str) -> None:
    with pytest.raises(ProbeError, match=r"HookedModel\(weights\.to"):
        getattr(MODEL, move)()
    with pytest.raises(ProbeError, match=r"weights\.to"):
        MODEL.to(torch.bfloat16)


# ---- firing ----------------------------------------------------------------------------------------------------------

VIEWS = ["q_C", "Q_C", "q_pe", "Q_pe", "v", "V", "k_C", "K_C"]


@pytest.mark.parametrize("name", VIEWS)
def test_one_hook_fires_once_though_others_view_its_tensor(name: str) -> None:
    fired: Counter[str] = Counter()
    hook = lambda value, hook: fired.update([hook.name])  # noqa: E731
    MODEL.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.1.{name}", hook)])
    MODEL.run(TOKENS, want=list(MODEL.sites))
    assert fired == {f"blocks.1.hook_{name}": 1}


@pytest.mark.parametrize("name", VIEWS)
def test_writing_to_a_view_moves_its_descendants_and_never_its_ancestors(name: str) -> None:
    def write(value: Tensor, hook: object) -> Tensor:
        return value.mul_(3)

    before = everything()
    with MODEL.hooks(fwd_hooks=[(f"blocks.1.{name}", write)]):
        after = everything()
    below = MODEL.sites.card(1).descendants([name]) | {name}
    moved = {site.tensor for site in MODEL.sites if site.block == 1 and not torch.equal(before[site], after[site])}
    assert name in moved
    assert moved <= below


def test_hooks_of_one_point_run_in_order_each_on_what_the_last_returned() -> None:
    seen: list[float] = []

    def add(value: Tensor, hook: object) -> Tensor:
        seen.append(float(value[0, 0, 0]))
        return value + 1

    with MODEL.hooks(fwd_hooks=[("blocks.1.c_KV", zeroed), ("blocks.1.c^KV", add), ("blocks.1.hook_c_KV", add)]):
        _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.c_KV")
    assert seen == [0.0, 1.0]
    assert bool((cache["c_KV", 1] == 2).all())


def test_both_names_of_one_value_fire() -> None:
    fired: list[str] = []
    note = lambda value, hook: fired.append(hook.name)  # noqa: E731
    MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.x_n", note), ("blocks.0.x_next", note)])
    assert fired == ["blocks.0.hook_x_next", "blocks.1.hook_x_n"]


def test_edits_act_before_hooks_and_hooks_see_the_edited_value() -> None:
    seen: list[Tensor] = []
    with MODEL.hooks(fwd_hooks=[("blocks.1.O", lambda value, hook: seen.append(value))]):
        MODEL.run(TOKENS, edits=[zero("O", 1, h=1)], base=None)
    assert not seen[0][:, :, 1].any()
    assert seen[0][:, :, 0].any()


def test_a_hook_by_a_function_of_names_fires_at_each() -> None:
    fired: list[str] = []
    MODEL.run_with_hooks(
        TOKENS, fwd_hooks=[(lambda name: name.endswith("hook_O"), lambda value, hook: fired.append(hook.name))]
    )
    assert fired == [f"blocks.{i}.hook_O" for i in range(3)]


def test_hooks_act_in_partial_runs_too() -> None:
    base = everything()
    with MODEL.hooks(fwd_hooks=[("blocks.0.O", double)]):
        part = MODEL.run(TOKENS, edits=[zero("O", 2, h=1)], base=base)
        whole = MODEL.run(TOKENS, edits=[zero("O", 2, h=1)])
    assert torch.equal(part["logits"], whole["logits"])
    assert not torch.equal(part["logits"], MODEL.run(TOKENS, edits=[zero("O", 2, h=1)])["logits"])


# ---- contexts and permanence -----------------------------------------------------------------------------------------


def test_nested_contexts_take_off_their_own() -> None:
    with MODEL.hooks(fwd_hooks=[("blocks.0.O", double)]):
        outer = MODEL(TOKENS)
        with MODEL.hooks(fwd_hooks=[("blocks.1.O", double)]):
            assert not torch.equal(MODEL(TOKENS), outer)
            assert MODEL.watched() == {Site(0, "O"), Site(1, "O")}
        assert torch.equal(MODEL(TOKENS), outer)
        with pytest.raises(RuntimeError, match="in the inner"), MODEL.hooks(fwd_hooks=[("blocks.2.O", double)]):
            raise RuntimeError("in the inner")
        assert torch.equal(MODEL(TOKENS), outer)
        MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.O", double)])
        assert MODEL.watched() == {Site(0, "O")}
    assert not MODEL.watched()
    assert MODEL.context_level == 0


def test_reset_hooks_takes_all_but_permanent_ones() -> None:
    MODEL.add_hook("blocks.0.O", double)
    MODEL.add_perma_hook("blocks.1.attn.hook_z", double)
    MODEL.reset_hooks()
    assert MODEL.watched() == {Site(1, "O")}
    assert set(MODEL.list_hooks()) == {"blocks.1.hook_O"}
    once = MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.O", lambda value, hook: value / 2)])
    close(once, plain_without(Site(1, "O")))
    assert MODEL.watched() == {Site(1, "O")}
    MODEL.reset_hooks(including_permanent=True)
    assert not MODEL.watched()


def plain_without(site: Site) -> Tensor:
    """What the model gives without hooks, from a second model on the same weights."""
    return HookedModel(MODEL.decoder.weights)(TOKENS)


def test_a_run_leaves_no_state() -> None:
    first = plain()
    MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.experts", lambda value, hook: value.flip(0))])
    MODEL.run(TOKENS.flip(1), edits=[zero("x_n", 1)])
    MODEL.run(TOKENS, want="blocks.0.c_KV")  # an early stop
    MODEL.run_with_cache(TOKENS[:, :2])
    with pytest.raises(ProbeError):
        MODEL.run(TOKENS, edits=[zero("O", 1, h=99)])
    assert torch.equal(plain(), first)


# ---- what a hook may return ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "returns", "why"),
    [
        (
            "blocks.1.c_KV",
            lambda v: v[..., :-1],
            r"blocks\.1\.c_KV = x_attn W_DKV .*\[B T r_kv\] = \[3, 6, 28\].*\[3, 6, 27\]",
        ),
        ("blocks.1.c_KV", lambda v: v[:1], r"\[3, 6, 28\].*\[1, 6, 28\]"),
        ("blocks.1.c_KV", lambda v: v.sum(), r"\[B T r_kv\].*returned \[\]"),
        ("blocks.1.c_KV", lambda v: v.double(), r"float32.*returned torch\.float64"),
        ("blocks.1.c_KV", lambda v: v.to("meta"), "cpu.*returned .*meta"),
        ("blocks.1.c_KV", lambda v: 0.0, r"tensor \[B T r_kv\]; the hook returned float"),
        ("blocks.1.c_KV", lambda v: (v,), "returned tuple"),
        ("blocks.1.c_KV", lambda v: v.numpy(), "returned ndarray"),
        ("blocks.1.experts", lambda v: v.float(), r"blocks\.1\.experts.*int64.*returned torch\.float32"),
        ("blocks.1.gates", lambda v: v.bfloat16(), "float32.*bfloat16"),
        ("blocks.1.x_n", lambda v: v[:, 1:], r"blocks\.1\.x_n.*\[B T d\]"),
        ("blocks.1.ln1.hook_scale", lambda v: v.squeeze(-1), r"blocks\.1\.s_attn.*\[B T 1\]"),
        ("blocks.1.S", lambda v: v[:, :2], r"blocks\.1\.S.*\[B h T S\] = \[3, 3, 6, 6\].*\[3, 2, 6, 6\]"),
        ("logits", lambda v: v[..., 0], r"logits.*\[B T V\] = \[3, 6, 50\].*\[3, 6\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, returns: Callable[[Tensor], Any], why: str) -> None:
    with pytest.raises(ShapeMismatch, match=why) as caught:
        MODEL.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda value, hook: returns(value))])
    assert isinstance(caught.value, ProbeError)


def test_a_reading_can_be_watched_and_not_changed() -> None:
    seen: list[Tensor] = []
    MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.delta_heads", lambda value, hook: seen.append(value))])
    assert seen[0].shape == (B, T, DIMS.h, DIMS.d)
    with pytest.raises(BadEdit, match="edit `O`"):
        MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_result", double)])


def test_an_error_in_a_hook_points_at_the_users_line() -> None:
    def wrong(value: Tensor, hook: object) -> Tensor:
        return value @ torch.ones(3)  # the line that is wrong

    with pytest.raises(RuntimeError) as caught:
        MODEL.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.c_KV", wrong)])
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert Path(frame.filename).name == "test_hooks.py"
    assert "the line that is wrong" in (frame.line or "") or frame.name == "wrong"


# ---- gradients -------------------------------------------------------------------------------------------------------


def trainable() -> tuple[HookedModel, dict[Any, Tensor]]:
    weights = InMemory(DIMS, {key: t.clone() for key, t in ORACLE.weights().tensors.items()})
    for tensor in weights.tensors.values():
        tensor.requires_grad_()
    return HookedModel(weights), weights.tensors


def test_no_graph_is_kept_unless_something_asks_for_one() -> None:
    out, cache = MODEL.run_with_cache(TOKENS)
    assert not out.requires_grad
    assert not any(value.requires_grad for value in cache.values())
    model, _ = trainable()
    assert model(TOKENS).requires_grad
    run = model.run(TOKENS, want=None)
    assert not any(value.requires_grad for value in run.cache.values())


def test_gradients_of_weights_equal_transformers() -> None:
    model, tensors = trainable()
    model(TOKENS).square().mean().backward()
    twin = copy.deepcopy(ORACLE.model).requires_grad_(True)
    twin(TOKENS, use_cache=False).logits.square().mean().backward()
    layer = twin.model.layers[1]
    close(tensors[1, "W_O"].grad, layer.self_attn.o_proj.weight.grad.T)
    close(tensors[1, "W_DKV"].grad, layer.self_attn.kv_a_proj_with_mqa.weight.grad[: DIMS.r_kv].T)
    close(tensors[1, "W_g"].grad, layer.mlp.gate.weight.grad.T)
    close(tensors[1, "W_2_e"].grad, layer.mlp.experts.down_proj.grad.transpose(1, 2))
    close(tensors[None, "W_E"].grad, twin.model.embed_tokens.weight.grad)
    assert tensors[1, "b"].grad is None, "the correction bias only chooses"


MODULES = {
    "blocks.1.c_Q": "model.layers.1.self_attn.q_a_proj",
    "blocks.1.delta_attn": "model.layers.1.self_attn.o_proj",
    "blocks.1.delta_ffn": "model.layers.1.mlp",
    "blocks.0.g": "model.layers.0.mlp.gate_proj",
    "blocks.2.x_ffn": "model.layers.2.post_attention_layernorm",
    "blocks.1.delta_shared": "model.layers.1.mlp.shared_experts",
}


@pytest.mark.parametrize("name", MODULES)
def test_the_gradient_at_a_hook_equals_transformers(name: str) -> None:
    """Once by a leaf that a forward hook puts in, once by a backward hook."""
    leaves: list[Tensor] = []

    def leaf(value: Tensor, hook: object) -> Tensor:
        leaves.append(value.detach().requires_grad_())
        return leaves[0]

    MODEL.run_with_hooks(TOKENS, fwd_hooks=[(name, leaf)]).square().sum().backward()
    twin = copy.deepcopy(ORACLE.model)
    theirs_: list[Tensor] = []

    def put(_: Any, __: Any, out: Tensor) -> Tensor:
        theirs_.append(out.detach().requires_grad_())
        return theirs_[0]

    twin.get_submodule(MODULES[name]).register_forward_hook(put)
    twin(TOKENS, use_cache=False).logits.square().sum().backward()
    close(leaves[0].grad, theirs_[0].grad)
    assert leaves[0].grad.abs().max() > 1e-3

    fired: list[Tensor] = []
    model, _ = trainable()
    with model.hooks(bwd_hooks=[(name, lambda grad, hook: fired.append(grad))]):
        model(TOKENS).square().sum().backward()
    assert len(fired) == 1
    close(fired[0], theirs_[0].grad)


def test_a_backward_hook_may_replace_the_gradient_and_not_spoil_it() -> None:
    def gradient(hook: Any) -> Tensor:
        model, tensors = trainable()
        with model.hooks(bwd_hooks=[("blocks.1.delta_ffn", hook), ("blocks.1.delta_attn", hook)]):
            model(TOKENS).square().sum().backward()
        return tensors[1, "W_O"].grad

    as_it_is = gradient(lambda grad, hook: None)
    assert as_it_is.any()
    assert torch.equal(gradient(spoil), as_it_is)
    assert not gradient(lambda grad, hook: torch.zeros_like(grad)).any()
    with pytest.raises(ShapeMismatch, match=r"blocks\.1\.delta_ffn.*\[B T d\]"):
        gradient(lambda grad, hook: grad[..., 0])


def test_a_backward_hook_that_could_never_fire_is_refused() -> None:
    for name, why in [
        ("blocks.1.experts", "no gradient"),
        ("blocks.1.delta_heads", "no gradient"),
        ("blocks.1.ln1.hook_scale", r"name blocks\.1\.s_attn"),
    ]:
        with pytest.raises(BadEdit, match=why):
            MODEL.add_hook(name, double, dir="bwd")


# ---- memory and copies -----------------------------------------------------------------------------------------------


def test_many_short_runs_leave_no_memory() -> None:
    model = HookedModel(random_weights(dataclasses.replace(DIMS, moe=(True,))))
    base = model.run(TOKENS)

    def fail(value: Tensor, hook: object) -> None:
        raise RuntimeError

    def short() -> None:
        model.run(TOKENS, want="blocks.0.O", edits=[zero("O", 0, h=1)], base=base)
        model.run_with_cache(TOKENS[:, :2], names_filter="blocks.0.c_KV")
        model.run_with_hooks(TOKENS[:, :1], fwd_hooks=[("blocks.0.O", double)])
        with pytest.raises(RuntimeError):
            model.run_with_hooks(TOKENS[:, :1], fwd_hooks=[("blocks.0.O", fail)])

    def measure() -> tuple[int, int]:
        gc.collect()
        things = gc.get_objects()
        return sum(type(thing) is Tensor for thing in things), len(things)

    for _ in range(5):
        short()
    tensors, objects = measure()
    for _ in range(75):
        short()
    more_tensors, more_objects = measure()
    assert more_tensors <= tensors
    assert more_objects - objects < 75, "not one object a run"


def test_a_copy_is_its_own_model() -> None:
    twin = copy.deepcopy(MODEL)
    first = plain()
    assert torch.equal(twin(TOKENS), first)
    twin.add_hook("blocks.1.O", double)
    assert not MODEL.watched()
    hooked = twin(TOKENS)
    assert torch.equal(plain(), first)
    assert not torch.equal(hooked, first)
    base, run = twin.run(TOKENS), MODEL.run(TOKENS)
    assert torch.equal(base["logits"], hooked)
    with pytest.raises(BadEdit, match="hooks on"):
        MODEL.run(TOKENS, base=base)
    with pytest.raises(BadEdit, match="other weights"):
        twin.run(TOKENS, base=run)


def test_a_copy_of_a_hooked_model_has_its_own_hooks() -> None:
    fired: list[str] = []
    with MODEL.hooks(fwd_hooks=[("blocks.1.O", lambda value, hook: fired.append(hook.name))]):
        twin = copy.deepcopy(MODEL)
        twin(TOKENS)
        assert fired == ["blocks.1.hook_O"]
    twin(TOKENS)
    assert len(fired) == 2
    twin.reset_hooks(level=None)
    twin(TOKENS)
    assert len(fired) == 2
    assert torch.equal(twin(TOKENS), plain())


def test_a_model_can_be_pickled() -> None:
    twin = pickle.loads(pickle.dumps(MODEL))
    assert torch.equal(twin(TOKENS), plain())
    edit = zero("O", 1, h=1)
    assert torch.equal(twin.run(TOKENS, edits=[edit])["logits"], MODEL.run(TOKENS, edits=[edit])["logits"])


# ---- TransformerLens' own bridge -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> tuple[HookedModel, Any]:
    """The same weights in TransformerLens' bridge, as (our cache, theirs)."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = {"<unk>": 0, "<bos>": 1, "<eos>": 2, "<pad>": 3}
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    where = tmp_path_factory.mktemp("tokenizer")
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), **special)
    made.save_pretrained(where)
    oracle = Oracle(config(n_group=4, topk_group=2), seed=11)
    ours = HookedModel(oracle.weights()).run_with_cache(TOKENS)[1]  # before: the bridge takes the model apart
    oracle.model.config.architectures = ["DeepseekV3ForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True)
    _, other = TransformerBridge.boot_transformers("small", hf_model=oracle.model, tokenizer=tokenizer).run_with_cache(
        TOKENS
    )
    return ours, other


SHOWN = [
    alias
    for alias, _ in EACH
    if "hook_" in alias and "hook_result" not in alias and alias not in ("blocks.0.hook_v", "blocks.1.hook_v")
]
"""Aliases that TransformerLens has too: all with a hook in their name but our own v; it makes no result unasked."""


@pytest.mark.parametrize("alias", SHOWN)
def test_an_alias_shows_what_transformer_lens_shows_under_it(alias: str, bridge) -> None:
    """Transposed as stated: there q, k, v are [B h T ·], z is split otherwise, rot_k [B T 1 r], the gate flat."""
    ours, other = bridge[0][alias], bridge[1][alias]
    if alias.endswith(("attn.hook_q", "attn.hook_k", "attn.hook_v")):
        other = other.transpose(1, 2)
    if alias.endswith(("hook_z", "hook_rot_k", "gate.hook_out")):
        other = other.reshape(ours.shape)
    if alias.endswith("hook_attn_scores"):
        visible = torch.ones(T, T).tril().bool()
        ours, other = ours[..., visible], other[..., visible]
    close(ours, other)
