"""Dictionaries from files: SAELens' own config is held to, and what isn't read is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hooks import Dictionary
from probe.errors import BadCheckpoint

WIDTH, FEATURES = 6, 9
STANDARD: dict[str, Any] = {
    "architecture": "standard",
    "d_in": WIDTH,
    "d_sae": FEATURES,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {"hook_name": "blocks.1.hook_resid_mid", "sae_lens_version": "6.0.0", "hook_head_index": None},
}
"""As SAELens 6 writes it."""

OLD: dict[str, Any] = {
    "architecture": "standard",
    "d_in": WIDTH,
    "d_sae": FEATURES,
    "activation_fn_str": "relu",
    "activation_fn_kwargs": {},
    "apply_b_dec_to_input": False,
    "finetuning_scaling_factor": False,
    "context_size": 128,
    "model_name": "m",
    "hook_name": "blocks.1.hook_resid_mid",
    "hook_layer": 1,
    "hook_head_index": None,
    "prepend_bos": True,
    "dataset_path": "d",
    "dataset_trust_remote_code": True,
    "normalize_activations": "none",
    "dtype": "torch.float32",
    "device": "cpu",
    "sae_lens_training_version": "4.0.0",
    "model_from_pretrained_kwargs": {},
    "seqpos_slice": [None],
    "neuronpedia_id": None,
}
"""As SAELens 3 to 5 write it."""


def parts(**more: tuple[int, ...]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"W_enc": (WIDTH, FEATURES), "b_enc": (FEATURES,), "W_dec": (FEATURES, WIDTH), "b_dec": (WIDTH,), **more}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def saved(directory: Path, tensors: dict[str, Tensor], config: Any = None) -> Path:
    save_file(tensors, directory / "sae_weights.safetensors")
    if config is not None:
        (directory / "cfg.json").write_text(json.dumps(config))
    return directory / "sae_weights.safetensors"


def latents(x: Tensor, p: dict[str, Tensor], centred: bool) -> Tensor:
    """By hand."""
    pre = (x - p["b_dec"] if centred else x) @ p["W_enc"] + p["b_enc"]
    return torch.where(pre > p["threshold"], pre, 0) if "threshold" in p else pre.clamp(min=0)


@pytest.mark.parametrize(
    ("more", "config", "centred"),
    [
        ({}, None, False),
        ({}, STANDARD, True),
        ({}, OLD, False),
        ({}, {**OLD, "activation_fn_str": None, "activation_fn": "relu", "normalize_activations": False}, False),
        ({"threshold": (FEATURES,)}, {**STANDARD, "architecture": "jumprelu"}, True),
        ({"threshold": (FEATURES,)}, None, False),
    ],
)
def test_latents_are_as_the_config_says(
    more: dict[str, tuple[int, ...]], config: Any, centred: bool, tmp_path: Path
) -> None:
    made, x = parts(**more), torch.randn(4, WIDTH)
    dictionary = Dictionary.load(saved(tmp_path, made, config))
    torch.testing.assert_close(dictionary.encode(x), latents(x, made, centred))
    torch.testing.assert_close(dictionary.decode(made["W_dec"].T), made["W_dec"].T @ made["W_dec"] + made["b_dec"])
    if config is None:
        torch.testing.assert_close(
            Dictionary.load(tmp_path / "sae_weights.safetensors", True).encode(x), latents(x, made, True)
        )


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"architecture": "topk", "k": 2}, "architecture: 'topk'"),
        ({"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 2}}, "activation_fn_str: 'topk'"),
        ({"activation_fn": "tanh-relu"}, "activation_fn: 'tanh-relu'"),
        ({"activation_fn_kwargs": {"k": 2}}, "activation_fn_kwargs: {'k': 2}"),
        ({"k": 2}, "k: 2 is not read"),
        ({"architecture": "batchtopk"}, "architecture: 'batchtopk'"),
        ({"architecture": "gated"}, "architecture: 'gated'"),
        ({"architecture": ["standard"]}, "architecture: ['standard']"),
        ({"architecture": "jumprelu"}, "architecture: jumprelu goes with a threshold"),
        ({"architecture": "transcoder"}, "architecture: 'transcoder': a dictionary that writes another tensor"),
        ({"architecture": "skip_transcoder"}, "architecture: 'skip_transcoder': a dictionary that writes another"),
        ({"d_out": WIDTH}, f"d_out: {WIDTH}: a dictionary that writes another tensor"),
        ({"hook_name_out": "blocks.1.hook_mlp_out"}, "hook_name_out: 'blocks.1.hook_mlp_out': a dictionary that"),
        ({"metadata": {"hook_name_out": "blocks.1.hook_mlp_out"}}, "hook_name_out: 'blocks.1.hook_mlp_out'"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations: 'layer_norm'"),
        ({"normalize_activations": "expected_average_only_in"}, "normalize_activations: 'expected_average_only_in'"),
        ({"reshape_activations": "hook_z"}, "reshape_activations: 'hook_z'"),
        ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor: True"),
        ({"rescale_acts_by_decoder_norm": True}, "rescale_acts_by_decoder_norm: True"),
        ({"apply_b_dec_to_input": "yes"}, "apply_b_dec_to_input: 'yes' should be true or false"),
        ({"apply_b_dec_to_input": None}, "apply_b_dec_to_input: None should be true or false; or say centred="),
        ({"d_in": 7}, "d_in: 7, and W_enc is [6, 9]"),
        ({"d_sae": 7}, "d_sae: 7, and W_enc is [6, 9]"),
        ({"aply_b_dec_to_input": True}, "aply_b_dec_to_input: True is not read, and may change the latents; nearest:"),
        ({"new_multiplier": 2.0}, "new_multiplier: 2.0 is not read"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_its_key(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    file = saved(tmp_path, parts(), {**STANDARD, **change})
    with pytest.raises(BadCheckpoint) as error:
        Dictionary.load(file)
    assert str(error.value).startswith(f"{tmp_path / 'cfg.json'}: {key}")


def test_a_config_and_the_callers_word_may_not_differ(tmp_path: Path) -> None:
    file = saved(tmp_path, parts(), STANDARD)
    assert Dictionary.load(file, centred=True).centred
    with pytest.raises(BadCheckpoint, match="apply_b_dec_to_input: True, and centred=False is asked for"):
        Dictionary.load(file, centred=False)


@pytest.mark.parametrize(("text", "says"), [("{", "not JSON"), ("[]", "it holds list"), ('{"k": 1, "k": 2}', "twice")])
def test_a_config_that_is_none(text: str, says: str, tmp_path: Path) -> None:
    file = saved(tmp_path, parts())
    (tmp_path / "cfg.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=rf"cfg\.json: .*{says}"):
        Dictionary.load(file)


@pytest.mark.parametrize("name", ["W_skip", "scaling_factor", "b_gate", "r_mag", "log_threshold", "x"])
def test_a_tensor_that_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path, parts(**{name: (FEATURES,)}))
    with pytest.raises(BadCheckpoint, match=f"sae_weights.safetensors: {name} is no tensor that is read here"):
        Dictionary.load(file)


def test_a_dictionary_that_writes_another_width_than_it_reads_is_a_transcoders(tmp_path: Path) -> None:
    made = parts(W_dec=(FEATURES, 5), b_dec=(5,))
    with pytest.raises(BadCheckpoint, match=r"it reads 6 and writes 5; .* \(a transcoder\) has no place to write to"):
        Dictionary(**made)
    with pytest.raises(BadCheckpoint, match=r"sae_weights\.safetensors: dictionary: it reads 6 and writes 5"):
        Dictionary.load(saved(tmp_path, made))
