"""Weights in other forms than ours, told by what they are: adapters, and what other libraries and quantisers store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from probe.errors import BadCheckpoint
from probe.headers import brief, holds_weights, parsed, told

ORIGINAL = "take the checkpoint that it was made from"

_MERGE = "merge it into its base (peft's merge_and_unload) and save the whole"
_PICKLED = "pickled weights, and nothing is unpickled here: save them as safetensors"

_FILES = {
    "*.gguf": f"GGUF, llama.cpp's form, which is not read: {ORIGINAL}",
    "*.npz": f"NumPy's form, as MLX writes, which is not read: {ORIGINAL}",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth"), _PICKLED),
}
"""What a file is, by its name."""

_FORMS = {
    r"\.(qweight|qzeros|g_idx)$": "GPTQ or AWQ",
    r"\.weight\.(absmax|quant_map|nested_\w+|quant_state\..+)$|\.SCB$": "bitsandbytes",
    r"\.weight_scale_2$|_global_scale$": "NVFP4",
    r"_blocks$": "MXFP4",
    r"\.switch_mlp\.|\.self_attn\.(embed_q|unembed_out)\.|\.(scales|biases)$": "MLX",
    r"^blk\.\d+\.": "GGUF",
}
_TENSORS = {
    r"\.lora_[A-Za-z]|^base_model\.": f"is an adapter's (LoRA), without its base: {_MERGE}",
    **{sign: f"is of the form of {form}, which is not read: {ORIGINAL}" for sign, form in _FORMS.items()},
    r"\.experts\.(\w+_proj|w\d+(_weight)?)(\.weight)?$": "holds all experts of a block in one tensor (fused), and each"
    " should be by itself: write the model with save_pretrained of transformers 5, which takes them apart",
    r"fused_qkv_a_proj|\.(mlp|shared_experts)\.gate_up_proj\.": "holds two matrices in one (fused), as servers have"
    f" them in memory: {ORIGINAL}",
    r"^layers\.\d+\.(attn|ffn)\.": "is called as in DeepSeek's own inference code: take the checkpoint as it is"
    " published, in transformers' names",
}
"""What a tensor is, by its name."""


def refuse_other_files(directory: Path) -> None:
    """Refuse a place that holds weights in no form that is read, by what they are.

    Raises:
        BadCheckpoint: see above; or an adapter lies there.
    """
    if not directory.is_dir():
        form = next((what for glob, what in _FILES.items() if directory.match(glob) and directory.is_file()), None)
        raise BadCheckpoint(f"{directory}: {f'it is {form}' if form else 'there is no such directory'}.")
    whole = holds_weights(directory)
    for adapter in (directory / "adapter_model.safetensors", directory / "adapter_model.bin", directory / _SAYS_BASE):
        if adapter.exists() and not (whole and adapter.name == _SAYS_BASE):  # which merging leaves behind
            where = (
                f"beside the weights: move it away, or {_MERGE}" if whole else f"without {_base(directory)}: {_MERGE}"
            )
            raise BadCheckpoint(f"{adapter}: an adapter (LoRA) {where}.")
    for glob, what in _FILES.items() if not whole else ():
        for file in sorted(directory.glob(glob)):
            raise BadCheckpoint(f"{file}: it is {what}.")


_SAYS_BASE = "adapter_config.json"


def _base(directory: Path) -> str:
    """The base of an adapter, as far as its config says it."""
    try:
        return f"its base, {brief(parsed((directory / _SAYS_BASE).read_bytes())['base_model_name_or_path'])}"
    except (OSError, ValueError, TypeError, KeyError):
        return "its base"


def foreign(names: Iterable[str], embedding: str) -> tuple[str, str] | None:
    """A tensor that tells in which other form the weights are, and what of it; None where none does.

    Args:
        names: of tensors that are no weights of ours.
        embedding: what the embedding of ours is called.
    """
    names = list(names)
    for sign, what in _TENSORS.items():
        if found := next((name for name in names if re.search(sign, name)), None):
            return found, what
    for name in names:
        if name.endswith("embed_tokens.weight"):
            return embedding, f"is missing: it is called {told(name)} here. Other names are another model_type's"
    return None
