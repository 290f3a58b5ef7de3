"""The sizes of a model, by the card's letters, and its constants; read from an HF-style ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.config import FIXED, GLM, SIZES, V32, config_file, read_config, read_sizes
from probe.errors import asking

EPS_LATENT = 1e-6
"""The two latent norms' eps: both references fix it in the constructor, whatever ``rms_norm_eps`` says."""

DIMS: dict[str, str] = {
    "B": "batch",
    "T": "positions (queries)",
    "S": "positions (keys)",
    "d": "hidden",
    "r_q": "query latent",
    "r_kv": "key-value latent",
    "h": "heads",
    "n": "per head, without position",
    "r": "per head, rotary",
    "q": "per head, n + r",
    "v": "value width",
    "f": "FFN width",
    "e": "routed experts",
    "k": "experts chosen per token",
    "m": "width of an expert",
    "m_s": "width of the shared expert",
    "V": "vocabulary",
}
"""Every dim that a shape may name, with its meaning."""


@dataclass(frozen=True)
class Yarn:
    """YaRN's parameters, under the config's own names; positions are stretched by ``factor`` beyond ``original``."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def magnitude(self, mscale: float) -> float:
        """0.1 · mscale · ln(factor) + 1: how much YaRN sharpens attention."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Dims:
    """A model's sizes by letter, and its constants.

    ``r_q`` is None in a model without a query latent; ``e``, ``k``, ``m`` and ``m_s`` are 0 where no block is a MoE;
    ``moe`` says of each block whether it is one. ``index_topk`` is up to how many tokens the attention of a model with
    indexers is full, and so ours; of others it is None.
    """

    d: int
    r_q: int | None
    r_kv: int
    h: int
    n: int
    r: int
    v: int
    f: int
    e: int
    k: int
    m: int
    m_s: int
    V: int
    moe: tuple[bool, ...]
    eps: float
    scaling: float
    norm_topk: bool
    n_group: int
    topk_group: int
    theta: float
    yarn: Yarn | None
    tied: bool = False
    max_positions: int | None = None
    index_topk: int | None = None

    @property
    def q(self) -> int:
        """A head's whole query width, n + r."""
        return self.n + self.r

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.moe)

    @property
    def eps_latent(self) -> float:
        """The eps of the norms of c_Q and c_KV: always 1e-6 (see `EPS_LATENT`)."""
        return EPS_LATENT

    @property
    def tau(self) -> float:
        """The softmax scale: q^-1/2, times the square of YaRN's mscale over all dims where there is one."""
        tau = float(self.q**-0.5)
        if self.yarn and self.yarn.mscale_all_dim:
            mscale = self.yarn.magnitude(self.yarn.mscale_all_dim)
            tau = tau * mscale * mscale  # in this order, which has the references' last bit
        return tau

    @property
    def rotary_gain(self) -> float:
        """What YaRN multiplies cosines and sines by: 1.0 in every Kimi model, where the two mscales agree."""
        if self.yarn is None:
            return 1.0
        if self.yarn.mscale and self.yarn.mscale_all_dim:
            return self.yarn.magnitude(self.yarn.mscale) / self.yarn.magnitude(self.yarn.mscale_all_dim)
        return self.yarn.magnitude(1.0)

    def size(self, dim: str) -> int:
        """The size of one dim, or of a composite like ``(h n)``. `B`, `T`, `S` belong to a run, not to a model.

        Raises:
            KeyError: the dim has no size here.
        """
        if dim.startswith("("):
            return math.prod(self.size(part) for part in dim[1:-1].split())
        size = getattr(self, dim) if dim in DIMS and dim not in "BTS" else None
        if size is None:
            raise KeyError(dim)
        return int(size)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path) -> Dims:
        """Read sizes and constants from a config: a mapping, a ``config.json``, or a directory that holds one.

        Old rotary keys (``rope_theta``, ``rope_scaling``) and new ones (``rope_parameters``) both work; of a model
        that sees, its text part is read. A key that no config of this block had when this was written is not read: see
        `unread_keys`.

        Raises:
            BadConfig: a key is missing, or says what this block cannot do; the message names the key.
        """
        if not isinstance(config, Mapping):
            read = read_config(config)
            with asking(str(config_file(config))):
                return cls.from_config(read)
        sizes = read_sizes(config)
        return cls(**{**sizes, "yarn": sizes["yarn"] and Yarn(**sizes["yarn"])})

    def to_config(self) -> dict[str, Any]:
        """The config that `from_config` reads back equal, in Kimi K2's own (old) rotary keys.

        Where dense and MoE blocks alternate, it is one of GLM-4.7-Flash's kind, which can say so; of a model with
        indexers, one of DeepSeek-V3.2's kind, which keeps its limit on texts.
        """
        dense = self.moe.index(True) if any(self.moe) else self.blocks
        shared = self.m_s // self.m if self.m else 1
        config: dict[str, Any] = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            **{key: getattr(self, letter) for key, letter in SIZES.items()},
            "num_key_value_heads": self.h,
            "n_shared_experts": shared,
            "num_hidden_layers": self.blocks,
            "first_k_dense_replace": dense,
            "rms_norm_eps": self.eps,
            "routed_scaling_factor": self.scaling,
            "norm_topk_prob": self.norm_topk,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.theta,
            "rope_scaling": None,
            **FIXED,
        }
        if y := self.yarn:
            config["rope_scaling"] = {
                "type": "yarn",
                "factor": y.factor,
                "original_max_position_embeddings": y.original,
                "beta_fast": y.beta_fast,
                "beta_slow": y.beta_slow,
                "mscale": y.mscale,
                "mscale_all_dim": y.mscale_all_dim,
            }
        if self.moe != tuple(i >= dense for i in range(self.blocks)):
            del config["first_k_dense_replace"]
            types = ["sparse" if moe else "dense" for moe in self.moe]
            config |= {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": GLM, "mlp_layer_types": types}
        if self.index_topk is not None:
            config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": V32, "index_topk": self.index_topk}
        return config


KIMI_K2 = Dims(
    d=7168,
    r_q=1536,
    r_kv=512,
    h=64,
    n=128,
    r=64,
    v=128,
    f=18432,
    e=384,
    k=8,
    m=2048,
    m_s=2048,
    V=163840,
    moe=tuple(i >= 1 for i in range(61)),
    eps=1e-6,
    scaling=2.827,
    norm_topk=True,
    n_group=1,
    topk_group=1,
    theta=50000.0,
    yarn=Yarn(factor=32.0, original=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    max_positions=131072,
)
"""moonshotai/Kimi-K2-Instruct: 61 blocks, the first one dense."""
