"""Dictionaries (sparse autoencoders, transcoders): latents of a tensor that edits can name by ``feature``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from probe.errors import BadCheckpoint


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Latents z = act((x − b_dec?) W_enc + b_enc) and their reconstruction z W_dec + b_dec.

    Attributes:
        W_enc: [width, features].
        b_enc: [features].
        W_dec: [features, width].
        b_dec: [width].
        threshold: [features]; a latent at or below it is 0 (JumpReLU). None: ReLU.
        centred: whether b_dec is subtracted before encoding.
    """

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    threshold: Tensor | None = None
    centred: bool = False

    def __post_init__(self) -> None:
        width, features = self.W_enc.shape if self.W_enc.ndim == 2 else (-1, -1)
        expected = {"b_enc": (features,), "W_dec": (features, self.W_dec.shape[-1]), "b_dec": (self.W_dec.shape[-1],)}
        if self.threshold is not None:
            expected["threshold"] = (features,)
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise BadCheckpoint(
                    f"dictionary: with W_enc [{width}, {features}], {name} should be {shape}, not {found}."
                )

    @classmethod
    def load(cls, path: str | Path, centred: bool = False) -> Dictionary:
        """From a safetensors file with W_enc, b_enc, W_dec, b_dec and perhaps threshold.

        Raises:
            BadCheckpoint: the file cannot be read, or lacks one of them.
        """
        try:
            tensors = load(Path(path).read_bytes())  # and not mapped: what is written into the file later is not ours
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path}: not a readable safetensors file ({error}).") from None
        for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
            if name not in tensors:
                raise BadCheckpoint(f"{path}: {name} is missing; it holds {', '.join(sorted(tensors))}.")
        named = {name: tensors[name] for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
        return cls(**named, threshold=tensors.get("threshold"), centred=centred)

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
