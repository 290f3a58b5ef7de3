"""TransformerLens at home: its names by value against its own bridge, its patching and its cache on our model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule, patching
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.utilities import get_act_name
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hooks import HookedModel, Site, add, patch
from hooks.lens import lens_names
from probe import InMemory
from probe.errors import BadEdit, BadText, ProbeError, UnknownDim, UnknownTensor
from tests.hooks.small import DENSE, DIMS, MODEL, MOE, ORACLE, TOKENS, close
from tests.oracle import draw

CORRUPT = TOKENS[:2, :3]
CLEAN = draw(ORACLE, 2, 3, seed=5)[0]
L, H, T = DIMS.blocks, DIMS.h, 3


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    yield
    assert not MODEL.watched()
    MODEL.reset_hooks(including_permanent=True)


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What TransformerLens' bridge shows of a copy of the same model; per-head results asked for."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    backend = Backend(WordLevel({"<unk>": 0, "<bos>": 1, "<eos>": 2, "<pad>": 3}, unk_token="<unk>"))
    where = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(where)
    model = copy.deepcopy(ORACLE.model)  # the bridge takes it apart
    model.config.architectures = ["DeepseekV3ForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True)
    booted = TransformerBridge.boot_transformers("small", hf_model=model, tokenizer=tokenizer)
    booted.set_use_attn_result(True)
    return booted.run_with_cache(TOKENS)[1]


OURS = HookedModel.from_hf(ORACLE.model).run(TOKENS, want=list(MODEL.sites)).cache
NAMES = {name: site for site in MODEL.sites for name, _ in lens_names(MODEL.sites, site)}
"""Every spelling with a hook in it, of every block: the rows of the card list them."""


def test_the_card_lists_the_names_that_are_tested_here() -> None:
    block = {re.sub(r"^blocks\.\d+\.", "", name) for name in NAMES if name.startswith("blocks.")}
    listed = (
        "hook_resid_pre ln1.hook_scale ln1.hook_normalized ln1.hook_out attn.hook_in attn.hook_q_latent"
        " attn.hook_kv_latent attn.hook_rot_q attn.hook_q attn.hook_rot_k attn.hook_k attn.hook_v attn.hook_attn_scores"
        " attn.hook_pattern attn.hook_z attn.hook_result hook_attn_out hook_resid_mid ln2.hook_scale"
        " ln2.hook_normalized ln2.hook_out mlp.hook_in mlp.hook_pre mlp.hook_pre_linear mlp.hook_post mlp.gate.hook_out"
        " mlp.shared_experts.hook_pre mlp.shared_experts.hook_pre_linear mlp.shared_experts.hook_post"
        " mlp.shared_experts.hook_out hook_mlp_out hook_resid_post"
    )
    assert block == set(listed.split())
    assert set(NAMES) >= {"hook_embed", "ln_final.hook_scale", "ln_final.hook_normalized", "ln_final.hook_out"}
    assert {int(name.split(".")[1]) for name in NAMES if name.startswith("blocks.")} == {0, 1, 2}


def as_ours(name: str, theirs: Tensor) -> Tensor:
    """The bridge's layout of a tensor, brought to ours: the whole list of what differs but for the rms."""
    d, (B, length) = DIMS, TOKENS.shape
    if name.endswith(("attn.hook_q", "attn.hook_k", "attn.hook_v")):
        assert theirs.shape[:3] == (B, d.h, length)
        return theirs.transpose(1, 2)
    if name.endswith("attn.hook_z"):  # split by head_dim, which is the rotary width here
        assert theirs.shape == (B, length, d.h * d.v // d.r, d.r)
        return theirs.reshape(B, length, d.h, d.v)
    if name.endswith("attn.hook_rot_k"):
        assert theirs.shape == (B, length, 1, d.r)
        return theirs.squeeze(2)
    if name.endswith("mlp.gate.hook_out"):
        assert theirs.shape == (B * length, d.e)
        return theirs.view(B, length, d.e)
    return theirs


@pytest.mark.parametrize("name", NAMES)
def test_a_name_shows_what_the_bridge_shows_under_it(name: str, bridge: ActivationCache) -> None:
    ours, theirs = OURS[name], as_ours(name, bridge[name])
    assert ours.shape == theirs.shape
    if name.endswith("hook_attn_scores"):  # beyond the diagonal one constant or another stands for minus infinity
        ours, theirs = (x[..., torch.ones(x.shape[-2:]).tril().bool()] for x in (ours, theirs))
    close(ours, theirs)
    assert float(theirs.std()) > 1e-3


def test_under_a_moe_the_bridges_mlp_names_are_input_and_output_so_we_refuse_them(bridge: ActivationCache) -> None:
    close(OURS["x_ffn", MOE], bridge["pre", MOE])
    close(OURS["delta_ffn", MOE], bridge["post", MOE])
    with pytest.raises(UnknownTensor, match="MoE's input there; name x_ffn, or g_e and g_s"):
        OURS["mlp.hook_pre", MOE]
    with pytest.raises(UnknownTensor, match="MoE's output there; name delta_ffn, or h_e and h_s"):
        OURS["mlp.hook_post", MOE]
    with pytest.raises(UnknownTensor, match="name u_e"):
        OURS["mlp.hook_pre_linear", MOE]


SHORT = {
    "resid_pre": "x_n",
    "resid_mid": "x_mid",
    "resid_post": "x_next",
    "attn_out": "delta_attn",
    "mlp_out": "delta_ffn",
    "q": "Q",
    "k": "K",
    "v": "V",
    "z": "O",
    "rot_q": "Q_R",
    "rot_k": "k_R",
    "result": "delta_heads",
    "pattern": "A",
    "attn": "A",
    "attn_scores": "S",
    "attn_logits": "S",
    "pre": "g",
    "pre_linear": "u",
    "post": "h",
}


@pytest.mark.parametrize("short", SHORT)
def test_get_act_name_names_a_site(short: str) -> None:
    assert MODEL.sites.find(get_act_name(short, DENSE)) == Site(DENSE, SHORT[short])
    assert MODEL.sites.find(get_act_name("scale", 1, "ln2")) == Site(1, "s_ffn")
    assert MODEL.sites.find(get_act_name("normalized")) == Site(None, "n_final")


# ---- the config ------------------------------------------------------------------------------------------------------


def test_the_config_has_what_there_is_one_value_of() -> None:
    cfg = MODEL.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads, cfg.d_model) == (L, H, H, DIMS.d)
    assert (cfg.d_vocab, cfg.d_mlp, cfg.n_ctx, cfg.eps) == (DIMS.V, DIMS.f, DIMS.max_positions, DIMS.eps)
    assert (cfg.device, cfg.dtype) == (torch.device("cpu"), torch.float32)
    with pytest.raises(FrozenInstanceError):
        cfg.n_layers = 2
    with pytest.raises(UnknownDim, match=r"q = n \+ r for queries and keys, v for values"):
        _ = cfg.d_head


# ---- patching --------------------------------------------------------------------------------------------------------


def per_example(logits: Tensor) -> Tensor:
    return logits[:, -1, 7] - logits[:, -1, 3]


def metric(logits: Tensor) -> Tensor:
    return per_example(logits).mean()


SOURCE = MODEL.run(CLEAN, want=list(MODEL.sites))


@cache
def by_hand(tensor: str, axes: tuple[str, ...]) -> Tensor:
    """Every cell by an edit: the clean run's values into the corrupted run."""
    sizes = {"layer": L, "pos": T, "dest_pos": T, "src_pos": T, "head": H, "head_index": H}
    dims = {"pos": "T", "dest_pos": "T", "src_pos": "S", "head": "h", "head_index": "h"}
    if tensor in ("K", "V"):
        dims["pos"] = "S"
    base, out = MODEL.run(CORRUPT), torch.zeros([sizes[axis] for axis in axes])
    for cell in torch.cartesian_prod(*[torch.arange(sizes[axis]) for axis in axes]).tolist():
        where = {dims[axis]: i for axis, i in zip(axes[1:], cell[1:], strict=True)}
        run = MODEL.run(CORRUPT, edits=[patch(tensor, cell[0], source=SOURCE, **where)], base=base)
        out[tuple(cell)] = metric(run["logits"])
    return out


SWEEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "resid_pre": ("x_n", ("layer", "pos")),
    "resid_mid": ("x_mid", ("layer", "pos")),
    "attn_out": ("delta_attn", ("layer", "pos")),
    "mlp_out": ("delta_ffn", ("layer", "pos")),
    "attn_head_out_by_pos": ("O", ("layer", "pos", "head")),
    "attn_head_q_by_pos": ("Q", ("layer", "pos", "head")),
    "attn_head_k_by_pos": ("K", ("layer", "pos", "head")),
    "attn_head_v_by_pos": ("V", ("layer", "pos", "head")),
    "attn_head_pattern_by_pos": ("A", ("layer", "head_index", "dest_pos")),
    "attn_head_pattern_dest_src_pos": ("A", ("layer", "head_index", "dest_pos", "src_pos")),
    "attn_head_out_all_pos": ("O", ("layer", "head")),
    "attn_head_q_all_pos": ("Q", ("layer", "head")),
    "attn_head_k_all_pos": ("K", ("layer", "head")),
    "attn_head_v_all_pos": ("V", ("layer", "head")),
    "attn_head_pattern_all_pos": ("A", ("layer", "head_index")),
}


def test_every_patching_function_is_in_a_test_here() -> None:
    there = {name.removeprefix("get_act_patch_") for name in vars(patching) if name.startswith("get_act_patch_")}
    every = {"attn_head_all_pos_every", "attn_head_by_pos_every", "block_every"}
    assert there == set(SWEEPS) | every | {"direct_path", "direct_path_all_sources"}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_patching_sweep_equals_patches_by_hand(name: str) -> None:
    expected = by_hand(*SWEEPS[name])
    sweep = getattr(patching, f"get_act_patch_{name}")
    close(sweep(MODEL, CORRUPT, SOURCE.cache, metric), expected)
    assert not torch.allclose(expected, metric(MODEL(CORRUPT)).expand(expected.shape))


def test_the_helpers_stack_their_sweeps() -> None:
    heads = patching.get_act_patch_attn_head_all_pos_every(MODEL, CORRUPT, SOURCE.cache, metric)
    close(heads, torch.stack([by_hand(tensor, ("layer", "head")) for tensor in "OQKVA"]))
    blocks = patching.get_act_patch_block_every(MODEL, CORRUPT, SOURCE.cache, metric)
    close(blocks, torch.stack([by_hand(tensor, ("layer", "pos")) for tensor in ("x_n", "delta_attn", "delta_ffn")]))
    by_pos = patching.get_act_patch_attn_head_by_pos_every(MODEL, CORRUPT, SOURCE.cache, metric)
    close(by_pos[1], by_hand("Q", ("layer", "pos", "head")))
    close(by_pos[4], by_hand("A", ("layer", "head_index", "dest_pos")).transpose(1, 2))


def test_a_generic_patch_of_any_of_our_tensors_gives_a_result_with_statistics() -> None:
    """`generic_activation_patch` writes a name of ours as our hook is called: ``blocks.1.hook_c_KV``."""
    found = patching.generic_activation_patch(
        MODEL,
        CORRUPT,
        SOURCE.cache,
        {"difference": per_example, "first": lambda logits: logits[:, -1, 0]},
        patching.layer_pos_patch_setter,
        "c_KV",
        index_axis_names=("layer", "pos"),
        reduce="none",
        baseline=True,
    )
    assert isinstance(found, patching.PatchingResult)
    close(found["difference"].mean(), by_hand("c_KV", ("layer", "pos")))
    corrupted, clean = per_example(MODEL(CORRUPT)), per_example(MODEL(CLEAN))
    close(found["difference"].effect(), found["difference"].values - corrupted)
    close(found["difference"].normalized(clean), (found["difference"].values - corrupted) / (clean - corrupted))
    whole = patching.get_act_patch_resid_pre(MODEL, CORRUPT, SOURCE.cache, per_example, reduce="none")
    assert whole.values.shape == (L, T, 2)
    low, high = whole.bootstrap_ci(n_resamples=50)
    assert bool((low <= whole.mean() + 1e-6).all() & (whole.mean() <= high + 1e-6).all())
    frame = found.to_dataframe()
    assert len(frame) == 2 * L * T * 2
    assert set(frame.columns) == {"metric", "layer", "pos", "example", "value"}


def test_a_sweep_takes_transformer_lens_own_cache_too_and_an_index_frame() -> None:
    cache = MODEL.activation_cache(SOURCE)
    swept = patching.get_act_patch_attn_head_out_all_pos(MODEL, CORRUPT, cache, metric)
    close(swept, by_hand("O", ("layer", "head")))
    frame = patching.make_df_from_ranges([L, H], ["layer", "head"]).iloc[[1, 5]]
    some = patching.generic_activation_patch(
        MODEL, CORRUPT, cache, metric, patching.layer_head_vector_patch_setter, "z", index_df=frame
    )
    close(some, swept.flatten()[[1, 5]])


def test_what_a_sweep_cannot_mean_is_refused_by_name() -> None:
    partial = MODEL.run_with_cache(CLEAN, names_filter="blocks.0.x_n")[1]
    with pytest.raises(UnknownTensor, match=r"blocks\.1\.x_n was not cached"):
        patching.get_act_patch_resid_pre(MODEL, CORRUPT, partial, metric)
    with pytest.raises(UnknownTensor, match="name x_ffn, or g_e and g_s"):
        patching.generic_activation_patch(
            MODEL,
            CORRUPT,
            SOURCE.cache,
            metric,
            patching.layer_pos_patch_setter,
            "pre",
            index_axis_names=("layer", "pos"),
        )
    with pytest.raises(BadEdit, match="edit `O`"):
        patching.generic_activation_patch(
            MODEL,
            CORRUPT,
            SOURCE.cache,
            metric,
            patching.layer_head_vector_patch_setter,
            "result",
            index_axis_names=("layer", "head"),
        )
    MODEL.train()
    try:
        with pytest.raises(ValueError, match="evaluation mode"):
            patching.get_act_patch_resid_pre(MODEL, CORRUPT, SOURCE.cache, metric)
    finally:
        MODEL.eval()


def test_direct_paths_are_refused_and_the_way_that_is_named_works() -> None:
    cache = SOURCE.cache
    with pytest.raises(BadEdit, match=r"into=\('s_attn', 'n_attn'\)") as caught:
        patching.get_act_patch_direct_path(MODEL, CORRUPT, cache, cache, metric, src_layer=0, src_head=0)
    assert isinstance(caught.value, ProbeError)
    with pytest.raises(BadEdit, match="no modules"):
        patching.get_act_patch_direct_path_all_sources(MODEL, CORRUPT, cache, cache, metric)
    with pytest.raises(BadEdit, match="no modules"):
        _ = MODEL.blocks[0].mlp
    direction = torch.ones(DIMS.d)
    through = MODEL.run(CORRUPT, want=None, edits=[add("x_n", 1, direction=direction, into=("s_attn", "n_attn"))])
    plain, whole = (MODEL.run(CORRUPT, want=None, edits=e) for e in ([], [add("x_n", 1, direction=direction)]))
    assert torch.equal(through["Q", 1], whole["Q", 1]), "the block's attention reads the edited stream"
    close(through["x_mid", 1] - through["delta_attn", 1], plain["x_n", 1])


# ---- its cache -------------------------------------------------------------------------------------------------------

LENS = MODEL.activation_cache(SOURCE)
W_U = LENS.model.W_U
FINAL = SOURCE["logits"]


def test_its_keys_are_really_there() -> None:
    assert isinstance(LENS, ActivationCache)
    assert set(NAMES) | {site.hook for site in MODEL.sites} == set(LENS.keys())
    assert torch.equal(LENS["z", 1], SOURCE["O", 1])
    assert torch.equal(LENS["resid_post", -1], SOURCE["x_next", L - 1])
    close(LENS["scale", 1, "ln1"], SOURCE["x_n", 1].pow(2).mean(-1, keepdim=True).add(DIMS.eps).sqrt())
    assert torch.equal(LENS["blocks.2.hook_c_KV"], SOURCE["c_KV", 2])
    close(LENS.stack_activation("z"), torch.stack([SOURCE["O", i] for i in range(L)]))
    sliced = LENS.apply_slice_to_batch_dim(1)
    assert torch.equal(sliced["q", 2], SOURCE["Q", 2][1])
    assert dict(LENS.items()).keys() == set(LENS)
    assert len(list(LENS.values())) == len(LENS.to("cpu")) == len(LENS)
    try:
        LENS.toggle_autodiff(False)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    alone = MODEL.activation_cache(MODEL.run(CLEAN[:1], want="blocks.1.O")).remove_batch_dim()
    assert alone["z", 1].shape == (T, H, DIMS.v)


def test_a_key_that_is_not_there_says_what_to_name() -> None:
    part = MODEL.activation_cache(MODEL.run_with_cache(CLEAN, names_filter="blocks.1.c_KV")[1])
    with pytest.raises(UnknownTensor, match=r"blocks\.1\.O was not cached"):
        part["z", 1]
    with pytest.raises(UnknownTensor, match="MoE's output there"):
        LENS["post", MOE]
    with pytest.raises(UnknownTensor, match="Nearest"):
        LENS["blocks.1.hook_c_KVV"]
    with pytest.raises(BadEdit, match="another model's"):
        HookedModel(MODEL.decoder.weights).activation_cache(HookedModel.load().run("Mary", want=None))
    with pytest.raises(BadEdit, match="some positions only"):
        MODEL.activation_cache(MODEL.run_with_cache(CLEAN, names_filter="blocks.1.O", pos=-1)[1])
    with pytest.raises(BadEdit, match=r"model\.activation_cache"):
        ActivationCache({}, MODEL).apply_ln_to_stack(torch.zeros(1, 2, T, DIMS.d), recompute_ln=True)


def test_the_accumulated_residual_reads_out_as_the_logits_do() -> None:
    stack, labels = LENS.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]
    assert torch.equal(stack[3], SOURCE["x_mid", 1])
    lens = LENS.accumulated_resid(apply_ln=True) @ W_U
    close(lens[-1], FINAL)
    x, w = SOURCE["x_n", 1], MODEL.decoder.weights
    rms = x.pow(2).mean(-1, keepdim=True).add(DIMS.eps).sqrt()
    close(lens[1], (x / rms * w.read(None, "w_final")) @ w.read(None, "W_U"))


def test_the_logit_lens_of_the_last_entry_is_the_model() -> None:
    read = LENS.logit_lens(positions=None)
    values = read.readout.values
    close(values.view(L + 1, 2, T, -1)[-1], FINAL)
    best = LENS.logit_lens(top_k=1)
    assert torch.equal(best.readout.top_ids.view(L + 1, 2)[-1], FINAL[:, -1].argmax(-1))


def test_the_parts_of_the_stream_sum_to_it_and_their_logits_to_the_logit() -> None:
    parts, labels = LENS.decompose_resid(return_labels=True)
    assert labels == ["embed", "0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out", "2_attn_out", "2_mlp_out"]
    close(parts.sum(0), SOURCE["x_next", L - 1])
    close(LENS.decompose_resid(1, mlp_input=True).sum(0), SOURCE["x_mid", 1])
    for token in (7, torch.tensor([7, 3])):
        attributed = LENS.logit_attrs(parts, token)
        column = FINAL[..., 7] if isinstance(token, int) else torch.stack([FINAL[0, :, 7], FINAL[1, :, 3]])
        close(attributed.sum(0), column)
    below = LENS.decompose_resid(1, apply_ln=True)
    close(below.sum(0), SOURCE["n_attn", 1])
    close(LENS.apply_ln_to_stack(SOURCE["x_mid", 2][None], 2, mlp_input=True)[0], SOURCE["n_ffn", 2])
    difference = LENS.logit_attrs(parts, 7, incorrect_tokens=3)
    close(difference.sum(0), FINAL[..., 7] - FINAL[..., 3])


def test_what_heads_write_sums_to_what_attention_writes() -> None:
    heads, labels = LENS.stack_head_results(return_labels=True)
    assert labels == [f"L{i}H{h}" for i in range(L) for h in range(H)]
    for i in range(L):
        close(heads[H * i : H * (i + 1)].sum(0), SOURCE["delta_attn", i])
        close(heads[H * i + 1], SOURCE["delta_heads", i][:, :, 1])
    without = MODEL.activation_cache(MODEL.run(CLEAN, want=["hook_embed", *(f"blocks.{i}.O" for i in range(L))]))
    without.compute_head_results()  # from z and W_O
    close(without["result", 2], SOURCE["delta_heads", 2])
    rest = LENS.stack_head_results(2, incl_remainder=True)
    close(rest.sum(0), SOURCE["x_n", 2])


def test_neurons_are_a_dense_blocks() -> None:
    dense = LENS.get_neuron_results(DENSE)
    close(dense.sum(-2), SOURCE["delta_ffn", DENSE])
    close(LENS.get_neuron_results(DENSE, neuron_slice=5, pos_slice=-1), dense[:, -1, 5])
    close(LENS.stack_neuron_results(1).sum(0), SOURCE["delta_ffn", DENSE])
    for ask in (
        lambda: LENS.get_neuron_results(MOE),
        lambda: LENS.stack_neuron_results(2),
        lambda: LENS.stack_neuron_results(2, apply_ln=True, project_output_onto=torch.ones(DIMS.d)),
        lambda: LENS.get_full_resid_decomposition(),
    ):
        with pytest.raises(UnknownTensor, match="h_e and h_s"):
            ask()


def test_the_full_decomposition_without_neurons_is_the_stream() -> None:
    stack, labels = LENS.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    assert labels[-2:] == ["embed", "bias"]
    assert not stack[-1].any()
    close(stack.sum(0), SOURCE["x_next", L - 1])
    whole = LENS.get_full_resid_decomposition(1)
    close(whole.sum(0), SOURCE["x_n", 1])
    read = LENS.get_full_resid_decomposition(expand_neurons=False, apply_ln=True, project_output_onto=W_U[:, 7])
    close(read.sum(0), FINAL[..., 7])


def test_words_need_a_tokenizer_and_recurrent_mixers_a_model_that_has_them() -> None:
    with pytest.raises(BadText, match="no tokenizer; give token ids"):
        LENS.logit_attrs(LENS.decompose_resid(), "Mary")
    model = HookedModel.load()
    run = model.run("Mary went", want=None)
    cache = model.activation_cache(run)
    close(cache.logit_attrs(cache.decompose_resid(), "John").sum(0), run["logits"][..., model.tokenizer.id("John")])
    assert LENS.ssm_layers() == []
    for compute in (LENS.compute_ssm_effective_attention, lambda: LENS.compute_ssm_state(layer=None)):
        with pytest.raises(RuntimeError, match="No SSM"):
            compute()


# ---- contexts, resets, backward hooks, as in TransformerLens ---------------------------------------------------------


class Theirs(HookedRootModule):
    """TransformerLens' own root module, with two hook points."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.first, self.second = HookPoint(), HookPoint()
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(2 * self.first(x * self.weight))


class Twins:
    """The same script on TransformerLens' module and on our model, with its log of what fired and what was on."""

    def __init__(self, model: Any, points: tuple[str, str], given: Tensor) -> None:
        self.model, self.points, self.given = model, points, given
        self.log: list[Any] = []

    def hook(self, label: str, change: bool = False) -> Callable[..., Any]:
        def fire(value: Tensor, hook: Any) -> Tensor | None:
            hook.ctx[label] = hook.ctx.get(label, 0) + 1
            self.log.append((label, self.points.index(hook.name), hook.ctx[label]))
            return 2 * value if change else None

        fire.label = label
        return fire

    def run(self) -> None:
        self.model(self.given).square().sum().backward()
        self.state()

    def state(self) -> None:
        on = self.model.list_hooks()
        self.log.append(
            [[(h.user_hook.label, h.is_permanent, h.context_level) for h in on.get(name, [])] for name in self.points]
        )
        self.log.append(self.model.context_level)


def nested(t: Twins) -> None:
    a, b = t.points
    with t.model.hooks(fwd_hooks=[(a, t.hook("outer", change=True))]):
        t.run()
        with t.model.hooks(fwd_hooks=[(a, t.hook("inner")), (b, t.hook("inner b"))]):
            t.run()
        t.run()
        t.model.run_with_hooks(t.given, fwd_hooks=[(b, t.hook("once"))])
        t.run()
    t.run()


def reset_inside(t: Twins) -> None:
    a, b = t.points
    t.model.add_hook(a, t.hook("plain"))
    t.model.add_perma_hook(b, t.hook("permanent"))
    with t.model.hooks(fwd_hooks=[(b, t.hook("in context"))]):
        t.run()
        t.model.reset_hooks(level=1)
        t.run()
        t.model.reset_hooks()
        t.run()
    t.run()
    t.model.reset_hooks(including_permanent=True)
    t.run()


def left_on(t: Twins) -> None:
    a, b = t.points
    with t.model.hooks(fwd_hooks=[(a, t.hook("stays"))], reset_hooks_end=False):
        t.run()
    t.run()
    t.model.run_with_hooks(t.given, fwd_hooks=[(b, t.hook("stays too"))], reset_hooks_end=False)
    t.run()
    t.model.reset_hooks()
    t.run()


def order(t: Twins) -> None:
    a = t.points[0]
    t.model.add_hook(a, t.hook("first"))
    t.model.add_hook(a, t.hook("before it"), prepend=True)
    t.model.add_hook(lambda name: name in t.points, t.hook("both"))
    t.run()
    t.model.reset_hooks(direction="bwd")
    t.run()
    t.model.reset_hooks(clear_contexts=False, direction="fwd")
    t.model.add_hook(a, t.hook("first"))
    t.run()  # its context was kept, so it counts on
    t.model.reset_hooks()
    t.model.add_hook(a, t.hook("first"))
    t.run()
    t.model.reset_hooks()


def backward(t: Twins) -> None:
    a, b = t.points
    with t.model.hooks(fwd_hooks=[(a, t.hook("fwd"))], bwd_hooks=[(a, t.hook("bwd a")), (b, t.hook("bwd b"))]):
        t.run()
        t.model.reset_hooks(direction="bwd")
        t.run()
        with t.model.hooks(bwd_hooks=[(b, t.hook("bwd inner"))]):
            t.run()
        t.run()
    t.model.add_perma_hook(b, t.hook("permanent"), dir="bwd")
    t.model.reset_hooks()
    t.run()
    t.model.run_with_hooks(t.given, bwd_hooks=[(a, t.hook("too late"))]).sum().backward()
    t.model.run_with_hooks(t.given, bwd_hooks=[(a, t.hook("in time"))], reset_hooks_end=False).sum().backward()
    t.state()
    t.model.reset_hooks(including_permanent=True)
    t.run()


def after_an_error(t: Twins) -> None:
    a, b = t.points

    def fail(value: Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    fail.label = "fail"
    t.model.add_hook(b, t.hook("mine"))
    with pytest.raises(KeyboardInterrupt), t.model.hooks(fwd_hooks=[(a, t.hook("outer"))]):
        t.model.run_with_hooks(t.given, fwd_hooks=[(a, fail)])
    t.run()
    t.model.reset_hooks()


@pytest.fixture
def trainable() -> HookedModel:
    tensors = {key: t.clone().requires_grad_() for key, t in ORACLE.weights().tensors.items()}
    return HookedModel(InMemory(DIMS, tensors))


@pytest.mark.parametrize("script", [nested, reset_inside, left_on, order, backward, after_an_error])
def test_hooks_come_and_go_as_in_transformer_lens(script: Callable[[Twins], None], trainable: HookedModel) -> None:
    theirs = Twins(Theirs(), ("first", "second"), torch.ones(2, 3))
    ours = Twins(trainable, ("blocks.1.hook_c_Q", "blocks.1.hook_O"), CORRUPT)
    script(theirs)
    script(ours)
    assert ours.log == theirs.log
    assert any(isinstance(entry, tuple) for entry in ours.log)
    assert not trainable.watched()


def test_a_context_takes_off_its_own_hooks_alone_where_transformer_lens_takes_all_of_its_level(trainable) -> None:
    on = []
    for model, (a, b) in ((Theirs(), ("first", "second")), (trainable, ("blocks.1.hook_c_Q", "blocks.1.hook_O"))):
        with model.hooks(fwd_hooks=[(a, lambda value, hook: None)], reset_hooks_end=False):
            pass
        with model.hooks(fwd_hooks=[(b, lambda value, hook: None)]):
            pass
        on.append(list(model.list_hooks()))
        model.reset_hooks()
    assert on == [[], ["blocks.1.hook_c_Q"]]


def test_a_backward_hook_sees_the_gradient_as_transformer_lens_shows_it(trainable: HookedModel) -> None:
    """The same number from a plain autograd call, in both; a replaced gradient reaches what is above it."""
    seen: list[Tensor] = []
    toy, x = Theirs(), torch.ones(2, 3)
    with toy.hooks(bwd_hooks=[("first", lambda grad, hook: seen.append(grad))]):
        toy(x).square().sum().backward()
    close(seen[0], torch.full((2, 3), 8.0))
    site = "blocks.1.c_KV_hat"
    with trainable.hooks(bwd_hooks=[(site, lambda grad, hook: seen.append(grad))]):
        trainable(CORRUPT).square().sum().backward()
    leaf: list[Tensor] = []

    def put(value: Tensor, hook: Any) -> Tensor:
        leaf.append(value.detach().requires_grad_())
        return leaf[0]

    trainable.run_with_hooks(CORRUPT, fwd_hooks=[(site, put)]).square().sum().backward()
    close(seen[1], leaf[0].grad)


def test_caching_hooks_of_transformer_lens_hold_values_and_gradients(trainable: HookedModel) -> None:
    held = trainable.add_caching_hooks("blocks.1.attn.hook_z", incl_bwd=True)
    trainable(CORRUPT).sum().backward()
    trainable.reset_hooks()
    assert set(held) == {"blocks.1.hook_O", "blocks.1.hook_O_grad"}
    close(held["blocks.1.hook_O"], MODEL.run(CORRUPT, want="blocks.1.O")["O", 1])
    assert held["blocks.1.hook_O_grad"].abs().max() > 0


def test_the_page_of_the_docs_names_every_function_that_was_tried() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformer_lens.md").read_text(encoding="utf-8")
    tried = [name for name in vars(patching) if name.startswith("get_act_patch_")]
    methods = [name for name in vars(ActivationCache) if not name.startswith("_")]
    missing = [name for name in (*tried, *methods, "generic_activation_patch", "PatchingResult") if name not in page]
    assert not missing
