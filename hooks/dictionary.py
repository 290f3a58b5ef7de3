"""Dictionaries (sparse autoencoders) of a tensor: latents that edits can name by ``feature``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from probe.errors import BadCheckpoint, asking, nearest
from probe.headers import brief, expanded, open_header, read_json, read_stored, told

_PARTS = ("W_enc", "b_enc", "W_dec", "b_dec")

_CENTRED = "apply_b_dec_to_input"
_READ = ("architecture", "d_in", "d_sae", _CENTRED)
"""The keys of SAELens' ``cfg.json`` that are read; the first says a kind of `_KINDS`."""

_KINDS = {"standard": False, "jumprelu": True}
"""The architectures that are read, and whether each has a threshold."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_fn": ("relu",),
    "activation_fn_str": ("relu",),
    "activation_fn_kwargs": ({},),
    "normalize_activations": ("none", False),
    "reshape_activations": ("none",),
    "finetuning_scaling_factor": (False,),
    "rescale_acts_by_decoder_norm": (False,),
}
"""Its keys that change what latents are, with the values that are read; null is as good as absent."""

_INERT = frozenset(
    """
    dtype device metadata model_name model_class_name model_from_pretrained_kwargs hook_name hook_layer hook_point
    hook_point_layer hook_head_index prepend_bos context_size dataset_path dataset_trust_remote_code neuronpedia_id
    sae_lens_training_version sae_lens_version seqpos_slice exclude_special_tokens sequence_separator_token
    disable_concat_sequences
    """.split()
)
"""Its keys that say where a dictionary comes from and where it belongs."""

_OTHER_END = ("d_out", "hook_name_out", "hook_layer_out", "hook_head_index_out", "hook_point_out")
"""Its keys of a dictionary that writes another tensor than it reads."""

_TRANSCODER = "a dictionary that writes another tensor than it reads (a transcoder) has no place to write to here"


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Latents z = act((x − b_dec?) W_enc + b_enc) and their reconstruction z W_dec + b_dec, of the tensor they read.

    Attributes:
        W_enc: [width, features].
        b_enc: [features].
        W_dec: [features, width].
        b_dec: [width].
        threshold: [features]; a latent at or below it is 0 (JumpReLU). None: ReLU.
        centred: whether b_dec is subtracted before encoding.

    Raises:
        BadCheckpoint: a part of another shape; a decoder of another width than the encoder's, which is a transcoder's.
    """

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    threshold: Tensor | None = None
    centred: bool = False

    def __post_init__(self) -> None:
        width, features = self.W_enc.shape if self.W_enc.ndim == 2 else (-1, -1)
        if self.W_dec.ndim == 2 and self.W_dec.shape[0] == features and self.W_dec.shape[1] != width:
            raise BadCheckpoint(f"dictionary: it reads {width} and writes {self.W_dec.shape[1]}; {_TRANSCODER}.")
        expected = {"b_enc": (features,), "W_dec": (features, width), "b_dec": (width,)}
        if self.threshold is not None:
            expected["threshold"] = (features,)
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise BadCheckpoint(
                    f"dictionary: with W_enc [{width}, {features}], {name} should be {shape}, not {found}."
                )

    @classmethod
    def load(cls, path: str | Path, centred: bool | None = None) -> Dictionary:
        """From a safetensors file with W_enc, b_enc, W_dec, b_dec and perhaps threshold. A ``cfg.json`` beside it, as
        SAELens writes it, is held to: what it says that is not read here is refused by its key.

        Args:
            centred: whether b_dec is subtracted before encoding; None: as ``cfg.json`` says, and without one it isn't.

        Raises:
            BadCheckpoint: the file cannot be read, lacks one of them or holds another tensor; the config says of the
                latents what is not read here, or not what the tensors or ``centred`` say.
        """
        path = expanded(path)
        try:
            tensors = {name: read_stored(stored) for name, stored in open_header(path)[0].items()}
        except (OSError, ValueError, KeyError) as error:  # KeyError: a dtype that torch lacks
            why = getattr(error, "strerror", None) or error
            raise BadCheckpoint(f"{path}: not a readable safetensors file ({why}).") from None
        file = path.parent / "cfg.json"
        if file.exists():
            with asking(str(file)):
                centred = _checked(_config(file), tensors, centred)
        if lost := [name for name in _PARTS if name not in tensors]:
            raise BadCheckpoint(f"{path}: {lost[0]} is missing; it holds {told(', '.join(sorted(tensors)))}.")
        if other := sorted(tensors.keys() - {*_PARTS, "threshold"}):
            raise BadCheckpoint(f"{path}: {told(other[0])} is no tensor that is read here; it may change the latents.")
        with asking(str(path)):
            return cls(**tensors, centred=bool(centred))

    @property
    def features(self) -> int:
        """How many latents there are."""
        return self.W_enc.shape[1]

    def encode(self, x: Tensor) -> Tensor:
        """The latents of x [..., width], fp32: [..., features]."""
        x = x.float().contiguous()
        if self.centred:
            x = x - self.b_dec.to(x.device, x.dtype)
        pre = x @ self.W_enc.to(x.device, x.dtype) + self.b_enc.to(x.device, x.dtype)
        if self.threshold is None:
            return pre.relu()
        return pre * (pre > self.threshold.to(x.device, x.dtype))

    def decode(self, z: Tensor) -> Tensor:
        """The reconstruction of latents z [..., features], fp32: [..., width]."""
        return z.float() @ self.W_dec.to(z.device).float() + self.b_dec.to(z.device).float()


# ---- SAELens' config -------------------------------------------------------------------------------------------------


def _config(file: Path) -> dict[str, Any]:
    """What it says; null says nothing."""
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"not JSON ({getattr(error, 'strerror', None) or error}).") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"it holds {type(config).__name__}; it should be an object.")
    return {key: value for key, value in config.items() if value is not None}


def _checked(config: Mapping[str, Any], tensors: Mapping[str, Tensor], centred: bool | None) -> bool:
    """Whether b_dec is subtracted before encoding, after refusing what a config says that is not read, or not what the
    tensors say."""
    metadata = config.get("metadata")
    for said in (config, metadata if isinstance(metadata, Mapping) else {}):
        if ends := [key for key in _OTHER_END if said.get(key) is not None]:
            raise BadCheckpoint(f"{ends[0]}: {brief(said[ends[0]])}: {_TRANSCODER}.")
    kind = config.get("architecture", "jumprelu" if "threshold" in tensors else "standard")
    if "transcoder" in str(kind):
        raise BadCheckpoint(f"architecture: {brief(kind)}: {_TRANSCODER}.")
    if kind not in [*_KINDS]:
        raise BadCheckpoint(f"architecture: {brief(kind)} is not one that is read; {', '.join(_KINDS)} are.")
    for key, value in config.items():
        _check(key, value)
    if _KINDS[kind] != ("threshold" in tensors):
        raise BadCheckpoint(f"architecture: {kind} goes {'with' if _KINDS[kind] else 'without'} a threshold.")
    for key, axis in (("d_in", 0), ("d_sae", -1)):
        shape = list(tensors["W_enc"].shape) if "W_enc" in tensors else []
        if shape and config.get(key, shape[axis]) != shape[axis]:
            raise BadCheckpoint(f"{key}: {brief(config[key])}, and W_enc is {shape}.")
    subtracted = config.get(_CENTRED, centred)
    if not isinstance(subtracted, bool):
        raise BadCheckpoint(f"{_CENTRED}: {brief(subtracted)} should be true or false; or say centred=.")
    if centred not in (None, subtracted):
        raise BadCheckpoint(f"{_CENTRED}: {subtracted}, and centred={centred} is asked for.")
    return subtracted


def _check(key: str, value: Any) -> None:
    """Refuse a key that is not read, or at another value than those that are."""
    if key in _FIXED:
        if not any(value == only and type(value) is type(only) for only in _FIXED[key]):
            raise BadCheckpoint(f"{key}: {brief(value)} is not read; only {' or '.join(map(repr, _FIXED[key]))} is.")
    elif key not in _INERT and key not in _READ:
        near = nearest(key, {*_FIXED, *_INERT, *_READ}, n=1)
        hint = f"; nearest: {near[0]}." if near else "."
        raise BadCheckpoint(f"{told(key)}: {brief(value)} is not read, and may change the latents{hint}")
