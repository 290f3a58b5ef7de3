"""A model that transformers has loaded, on the same weights: equal logits, shared storage, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hooks import HookedModel, zero
from probe import TINY, Dims, Tokenizer
from probe.errors import BadCheckpoint, BadConfig, BadEdit, BadText
from tests.hooks.small import close
from tests.oracle import Oracle, config, draw, indexed, padding, sarvam, seeing

CONFIGS: dict[str, dict[str, Any]] = {
    "k2": config(),
    "groups": config(n_group=4, topk_group=2),
    "no query latent": config(q_lora_rank=None, rope_scaling=None, rms_norm_eps=1e-5),
    "tied": config(tie_word_embeddings=True),
    "two shared": config(n_shared_experts=2, norm_topk_prob=False, routed_scaling_factor=1.5),
    "dense": config(first_k_dense_replace=3),
    "all MoE": config(first_k_dense_replace=0, num_hidden_layers=2),
    "one head": config(num_attention_heads=1, num_key_value_heads=1),
    "yarn 32/1": config(yarn={"beta_fast": 32.0, "mscale": 0.7, "mscale_all_dim": 1.3}),
    "V3.2": indexed("deepseek_v32", 7, n_group=4, topk_group=2),
    "GLM-5": indexed("glm_moe_dsa", 7, rope_scaling=None, rms_norm_eps=1e-5),
    "sarvam": sarvam(),
    "K2.5": seeing(config()),
    "K2.5 tied": seeing(config(tie_word_embeddings=True)),
}
COPIED = {"W_UQ", "W_QR", "W_UK", "W_UV"}


def run(model: nn.Module, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
    given = {} if keep is None else {"attention_mask": keep, "position_ids": (keep.long().cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        return model(tokens, use_cache=False, **given).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_its_logits_are_the_models(name: str) -> None:
    oracle = Oracle(CONFIGS[name], seed=3)
    tokens, _ = draw(oracle, 2, 7)
    ours = HookedModel.from_hf(oracle.model)
    assert ours.dims == Dims.from_config(CONFIGS[name])
    close(ours(tokens), run(oracle.model, tokens))
    for side in ("left", "right"):
        keep = padding([7, 4], side)
        close(ours(tokens, keep)[keep], run(oracle.model, tokens, keep)[keep])


@pytest.mark.parametrize(
    ("name", "told"),
    [("V3.2", "left out: 15 tensors, indexers"), ("K2.5", "tensors, the part that sees"), ("sarvam", None)],
)
def test_what_is_left_out_of_a_model_is_told(name: str, told: str | None) -> None:
    notes = HookedModel.from_hf(Oracle(CONFIGS[name]).model).notes
    assert [told in note for note in notes] == [True] if told else notes == ()


@pytest.mark.parametrize("name", ["groups", "no query latent", "tied", "dense"])
def test_only_what_alternates_by_head_is_copied(name: str) -> None:
    model = Oracle(CONFIGS[name]).model
    theirs = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    ours = HookedModel.from_hf(model).decoder.weights.tensors
    copied = {key for key, tensor in ours.items() if tensor.untyped_storage().data_ptr() not in theirs}
    assert {name for _, name in copied} == COPIED
    assert len(copied) == 4 * len(model.model.layers)


def test_a_change_of_the_model_is_a_change_here() -> None:
    oracle = Oracle(CONFIGS["k2"])
    tokens, _ = draw(oracle, 2, 5)
    ours = HookedModel.from_hf(oracle.model)
    before = ours(tokens)
    state = oracle.model.state_dict()
    state["model.layers.1.mlp.experts.gate_up_proj"][3, : ours.dims.m].mul_(3)
    state["model.layers.1.mlp.experts.gate_up_proj"][:, ours.dims.m :].mul_(-1)
    state["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"].mul_(2)
    assert not torch.allclose(ours(tokens), before)
    close(ours(tokens), run(oracle.model, tokens))


def halved(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name].mul_(0.5)


def loaded(model: nn.Module, name: str) -> None:
    model.load_state_dict({name: model.state_dict()[name].clone() * 0.5}, strict=False)


def trained(model: nn.Module, name: str) -> None:
    tensor = model.state_dict(keep_vars=True)[name]
    if isinstance(tensor, nn.Parameter):
        tensor.grad = tensor.detach() / 2
        torch.optim.SGD([tensor], lr=1.0).step()
    else:
        halved(model, name)  # a buffer, which no optimiser changes


def part(model: nn.Module, name: str) -> None:
    model.state_dict()[name].view(-1)[:3].zero_()  # a view of what is copied


WAYS = [("groups", way) for way in (halved, loaded, trained, part)]
WAYS += [(name, halved) for name in ("no query latent", "tied", "one head", "cast")]


@pytest.mark.parametrize(("name", "write"), WAYS)
def test_a_change_of_any_tensor_acts_at_once_or_is_refused(name: str, write: Callable[[nn.Module, str], None]) -> None:
    """Every tensor of the transformers model, each changed in place after it was wrapped; the oracle is that model."""
    oracle = Oracle(CONFIGS["groups" if name == "cast" else name], seed=4)
    if name == "cast":
        oracle.model.to(torch.bfloat16)
    tokens, state = torch.arange(8).view(2, 4), copy.deepcopy(oracle.model.state_dict())
    refused = set()
    for tensor in state:
        ours = HookedModel.from_hf(oracle.model)
        base = ours.run(tokens)
        write(oracle.model, tensor)
        assert not torch.equal(oracle.model.state_dict()[tensor], state[tensor])
        try:
            close(ours(tokens), run(oracle.model, tokens), 0.02 if name == "cast" else 1e-5)
        except BadCheckpoint as fact:
            assert f"{tensor} has been written into since" in str(fact)  # noqa: PT017
            assert "HookedModel.from_hf(model)" in str(fact)  # noqa: PT017
            refused.add(tensor.split(".", 3)[-1])
        with pytest.raises((BadCheckpoint, BadEdit), match="written into since"):
            ours.run(tokens, edits=[zero("delta_ffn", 2)], base=base)
        oracle.model.load_state_dict(state)
    by_head = {"self_attn.q_proj.weight" if name == "no query latent" else "self_attn.q_b_proj.weight"}
    by_head |= {"self_attn.kv_b_proj.weight"}
    rounded = {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"} if name == "cast" else set()
    assert refused == (set() if name == "one head" else by_head) | rounded, "one head's rows lie together: a view"


def test_only_what_reads_the_stale_copy_is_refused_and_wrapping_anew_helps() -> None:
    oracle = Oracle(CONFIGS["k2"])
    tokens, _ = draw(oracle, 2, 5)
    ours = HookedModel.from_hf(oracle.model)
    halved(oracle.model, "model.layers.2.self_attn.kv_b_proj.weight")
    assert ours.run(tokens, want="blocks.1.x_next")["x_next", 1].isfinite().all()
    with pytest.raises(BadCheckpoint, match=r"layers\.2\.self_attn\.kv_b_proj\.weight.*since W_UK was copied"):
        ours(tokens)
    close(HookedModel.from_hf(oracle.model)(tokens), run(oracle.model, tokens))


def test_the_stale_are_neither_cast_nor_copied_and_a_cast_shares_nothing() -> None:
    oracle = Oracle(CONFIGS["k2"])
    weights = HookedModel.from_hf(oracle.model).decoder.weights
    same, cast = weights.to(torch.float32), weights.to(torch.float64)
    halved(oracle.model, "model.layers.1.mlp.gate.weight")
    assert torch.equal(same.read(1, "W_g"), weights.read(1, "W_g")), "nothing had changed, so all is shared"
    assert torch.equal(cast.read(1, "W_g"), 2 * weights.read(1, "W_g")), "or nothing is"
    halved(oracle.model, "model.layers.0.self_attn.q_b_proj.weight")
    for attempt in (lambda: weights.to(torch.float64), lambda: copy.deepcopy(weights), lambda: same.read(0, "W_UQ")):
        with pytest.raises(BadCheckpoint, match=r"q_b_proj\.weight has been written into"):
            attempt()
    assert cast.read(0, "W_UQ").isfinite().all()


def test_what_was_copied_goes_when_the_model_goes() -> None:
    oracle = Oracle(CONFIGS["k2"])
    storage = weakref.ref(oracle.model.model.layers[0].self_attn.q_b_proj.weight.untyped_storage())
    ours = HookedModel.from_hf(oracle.model)
    del oracle
    gc.collect()
    assert storage() is None
    assert ours(torch.arange(4)[None]).isfinite().all()


def test_nothing_asks_for_a_graph_and_the_models_hooks_stay_its_own() -> None:
    model = Oracle(CONFIGS["k2"]).model.requires_grad_(True)
    model.model.layers[0].register_forward_hook(lambda *_: pytest.fail("the module ran"))
    ours = HookedModel.from_hf(model)
    assert not ours(torch.arange(4)[None]).requires_grad
    assert next(model.parameters()).requires_grad


def test_router_and_bias_are_fp32_also_where_the_whole_model_was_cast() -> None:
    oracle = Oracle(CONFIGS["groups"], dtype=torch.bfloat16)
    kept = HookedModel.from_hf(oracle.model).decoder.weights
    theirs = oracle.model.state_dict()
    storage = theirs["model.layers.1.mlp.gate.weight"].untyped_storage().data_ptr()
    assert kept.read(1, "W_g").untyped_storage().data_ptr() == storage, "it was fp32, so it is shared"
    rounded = HookedModel.from_hf(copy.deepcopy(oracle.model).to(torch.bfloat16)).decoder.weights
    for name in ("W_g", "b"):
        exact, cast = kept.read(1, name), rounded.read(1, name)
        assert exact.dtype == cast.dtype == torch.float32
        assert torch.equal(cast, exact.bfloat16().float())
        assert not torch.equal(cast, exact)
    assert kept.read(1, "W_O").dtype == torch.bfloat16


def test_in_bf16_the_chosen_experts_and_logits_are_the_models_bits() -> None:
    oracle = Oracle(CONFIGS["groups"], dtype=torch.bfloat16)
    tokens, shown = draw(oracle, 2, 6)
    _, cache = HookedModel.from_hf(oracle.model).run_with_cache(tokens, names_filter=["blocks.2.experts", "logits"])
    assert torch.equal(cache["experts", 2], shown[2, "experts"])
    assert torch.equal(cache["logits"], run(oracle.model, tokens))


def test_the_shipped_model_through_transformers_is_the_shipped_model() -> None:
    settings = DeepseekV3Config.from_pretrained(TINY)
    settings.model_type = "deepseek_v3"  # transformers would leave a kimi_k2's experts random
    model = DeepseekV3ForCausalLM.from_pretrained(
        TINY, config=settings, dtype=torch.float32, attn_implementation="eager", experts_implementation="grouped_mm"
    )
    ours, theirs = HookedModel.load(), HookedModel.from_hf(model.eval(), HookedModel.load().tokenizer)
    assert theirs.dims == ours.dims
    text = "When Mary and John went to the shop , John gave a drink to"
    assert torch.equal(theirs(text), ours(text))
    close(theirs(text), run(model, ours.batch(text).tokens))


# ---- what is refused -------------------------------------------------------------------------------------------------


def lora(model: nn.Module) -> nn.Module:
    model.model.layers[0].self_attn.o_proj.register_parameter("lora_A", nn.Parameter(torch.zeros(2, 2)))
    return model


def untied(model: nn.Module) -> nn.Module:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    return model


def quantised(model: nn.Module) -> nn.Module:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)
    return model


def cut(model: nn.Module) -> nn.Module:
    model.model.layers[1].self_attn.kv_a_proj_with_mqa.weight = nn.Parameter(torch.zeros(99, 32))
    return model


@pytest.mark.parametrize(
    ("name", "change", "error", "why"),
    [
        ("k2", lora, BadCheckpoint, r"holds model\.layers\.0\.self_attn\.o_proj\.lora_A.*without adapters"),
        ("tied", untied, BadCheckpoint, "not its embedding, but tie_word_embeddings"),
        ("k2", quantised, BadCheckpoint, r"o_proj\.weight is torch\.float8_e4m3fn; quantised"),
        ("k2", cut, BadCheckpoint, r"kv_a_proj_with_mqa\.weight should be \[36, 32\], and is \[99, 32\]"),
        ("k2", lambda model: model.to("meta"), BadCheckpoint, "meta device"),
        ("k2", lambda model: model.model, BadCheckpoint, r"no model\.embed_tokens\.weight; a DeepseekV3ForCausalLM"),
        ("k2", lambda model: object(), BadCheckpoint, "object is no model of transformers"),
    ],
)
def test_a_model_that_is_not_what_it_says_is_refused(name, change, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        HookedModel.from_hf(change(Oracle(CONFIGS[name]).model))


def test_another_architecture_is_refused_by_its_config() -> None:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    with pytest.raises(BadConfig, match="model_type: 'llama'"):
        HookedModel.from_hf(LlamaForCausalLM(LlamaConfig(**sizes)))


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def fast(unknown: str = "[?]") -> PreTrainedTokenizerFast:
    words = {unknown: 0, "<bos>": 1, "<pad>": 2, "Mary": 3, "went": 4, "home": 5}
    backend = Backend(WordLevel(words, unk_token=unknown))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": unknown}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_text_is_encoded_as_the_models_tokenizer_does_whatever_it_was_called_with() -> None:
    theirs, model = fast(), Oracle(CONFIGS["k2"]).model
    theirs(["Mary", "Mary went home"], padding="max_length", max_length=3, truncation=True)  # leaves both switched on
    ours = HookedModel.from_hf(model, theirs)
    assert ours.batch("Mary went home").tokens.tolist() == [theirs("Mary went home").input_ids] == [[1, 3, 4, 5]]
    assert ours.batch(["Mary", "went home"]).keep.tolist() == [[True, True, False], [True, True, True]]
    assert torch.equal(ours("Mary went"), ours(torch.tensor([[1, 3, 4]])))
    assert theirs("Mary", padding="max_length", max_length=4).input_ids == [1, 3, 2, 2], "theirs is as it was"


def test_unknown_words_are_refused_under_whatever_name_the_tokenizer_has_for_them() -> None:
    for unknown in ("[?]", "<unk>"):
        with pytest.raises(BadText, match="lacks 'John'"):
            Tokenizer.of(fast(unknown)).encode("Mary John")


@pytest.mark.parametrize("make", [lambda: object(), lambda: "a/path", lambda: Path()], ids=["object", "str", "Path"])
def test_what_is_no_fast_tokenizer_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(BadText, match="no fast tokenizer"):
        HookedModel.from_hf(Oracle(CONFIGS["k2"]).model, make())


def test_ours_is_taken_as_it_is_and_none_needs_tokens() -> None:
    model, ours = Oracle(CONFIGS["k2"]).model, Tokenizer(TINY)
    assert HookedModel.from_hf(model, ours).tokenizer is ours
    with pytest.raises(BadText, match="no tokenizer"):
        HookedModel.from_hf(model)("Mary")
