"""The sizes of a model, by the card's letters, and its constants; read from an HF-style ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.errors import BadConfig, nearest

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
    ``moe`` says of each block whether it is one.
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

        Old rotary keys (``rope_theta``, ``rope_scaling``) and new ones (``rope_parameters``) both work.

        Raises:
            BadConfig: a key is missing, or says what this block cannot do; the message names the key.
        """
        return _Reader(config if isinstance(config, Mapping) else read_config(config)).dims()

    def to_config(self) -> dict[str, Any]:
        """The config that `from_config` reads back equal, in Kimi K2's own (old) rotary keys."""
        dense = self.moe.index(True) if any(self.moe) else self.blocks
        if self.moe != tuple(i >= dense for i in range(self.blocks)):
            raise BadConfig("first_k_dense_replace: dense and MoE blocks alternate, which this key cannot say.")
        shared = self.m_s // self.m if self.m else 1
        config: dict[str, Any] = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            **{key: getattr(self, letter) for key, letter in _SIZES.items()},
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
            **_FIXED,
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
        return config


_SIZES = {
    "hidden_size": "d",
    "q_lora_rank": "r_q",
    "kv_lora_rank": "r_kv",
    "num_attention_heads": "h",
    "qk_nope_head_dim": "n",
    "qk_rope_head_dim": "r",
    "v_head_dim": "v",
    "intermediate_size": "f",
    "n_routed_experts": "e",
    "num_experts_per_tok": "k",
    "moe_intermediate_size": "m",
    "vocab_size": "V",
}
_MOE_KEYS = {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"}

_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
"""Keys with one value that this block can honour (the last is checked apart: an extra layer is only skipped)."""

_FAMILY = ("kimi_k2", "deepseek_v3")
_STRANGERS = {
    "deepseek_v2": "its router takes a softmax and has no correction bias",
    "deepseek_v32": "its attention chooses keys with an indexer",
    "kimi_linear": "most of its blocks use linear attention, and its MLA no rotation",
    "longcat_flash": "it has two attentions a layer and extra scales on the latents",
}


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` at ``path`` (the file, or a directory that holds it).

    Raises:
        BadConfig: there is none, or it is not a JSON object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{path}: cannot read a config there ({error.strerror}).") from None
    except ValueError as error:
        raise BadConfig(f"{path}: not JSON ({error}).") from None
    if not isinstance(config, dict):
        raise BadConfig(f"{path}: a config is a JSON object, not {type(config).__name__}.")
    return config


class _Reader:
    """Reads a config key by key; whatever is refused is refused under its key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def dims(self) -> Dims:
        self._family()
        for key, only in _FIXED.items():
            if key != "num_nextn_predict_layers" and self.config.get(key, only) != only:
                raise BadConfig(f"{key}: {self.config[key]!r} is not what this block computes; only {only!r} is.")
        if self.config.get("num_nextn_predict_layers") is not None:
            self._int("num_nextn_predict_layers", low=0)
        if self.config.get("rope_interleave", True) is not True:
            raise BadConfig("rope_interleave: false means rotary weights in half-split order; these are in pairs.")
        blocks, dense = self._int("num_hidden_layers"), self._int("first_k_dense_replace", low=0)
        moe = tuple(i >= dense for i in range(blocks))
        sizes = {letter: self._size(key, any(moe)) for key, letter in _SIZES.items()}
        heads = self.config.get("num_key_value_heads")
        if heads not in (None, sizes["h"]):
            raise BadConfig(
                f"num_key_value_heads: {heads} is not num_attention_heads ({sizes['h']}); MLA has no groups."
            )
        if int(sizes["r"] or 0) % 2:
            raise BadConfig(f"qk_rope_head_dim: {sizes['r']} is odd; rotation takes pairs.")
        theta, yarn = self._rotary()
        n_group, topk_group = self._routing(sizes) if any(moe) else (1, 1)
        return Dims(
            **sizes,  # type: ignore[arg-type]
            m_s=sizes["m"] * self._int("n_shared_experts") if any(moe) else 0,  # type: ignore[operator]
            moe=moe,
            eps=self._float("rms_norm_eps"),
            scaling=self._float("routed_scaling_factor") if any(moe) else 1.0,
            norm_topk=self._bool("norm_topk_prob", True),
            n_group=n_group,
            topk_group=topk_group,
            theta=theta,
            yarn=yarn,
            tied=self._bool("tie_word_embeddings", False),
            max_positions=self._int("max_position_embeddings") if self.config.get("max_position_embeddings") else None,
        )

    def _family(self) -> None:
        kind = self.config.get("model_type")
        if kind in _FAMILY:
            return
        if isinstance(kind, str) and kind in _STRANGERS:
            raise BadConfig(f"model_type: {kind!r} is another block than ours: {_STRANGERS[kind]}.")
        raise BadConfig(f"model_type: {kind!r} is not one that we know to be this block ({', '.join(_FAMILY)}).")

    def _get(self, key: str) -> Any:
        if key not in self.config:
            near = nearest(key, self.config, n=1)
            raise BadConfig(f"{key}: the config lacks it" + (f" (it has {near[0]})." if near else "."))
        return self.config[key]

    def _int(self, key: str, low: int = 1) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise BadConfig(f"{key}: {value!r} should be a whole number of at least {low}.")
        return value

    def _float(self, key: str) -> float:
        value = self._get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise BadConfig(f"{key}: {value!r} should be a positive number.")
        return float(value)

    def _bool(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise BadConfig(f"{key}: {value!r} should be true or false.")
        return value

    def _size(self, key: str, any_moe: bool) -> int | None:
        if key == "q_lora_rank" and self._get(key) is None:
            return None
        if key in _MOE_KEYS and not any_moe:
            return 0
        return self._int(key)

    def _routing(self, sizes: Mapping[str, int | None]) -> tuple[int, int]:
        """``n_group`` and ``topk_group``, after checking that every token can find its k experts."""
        e, k = int(sizes["e"] or 0), int(sizes["k"] or 0)
        n_group, topk_group = self._int("n_group"), self._int("topk_group")
        if e % n_group or e // n_group < 2:
            raise BadConfig(f"n_group: {n_group} groups of {e} experts: groups are equal and hold at least two.")
        if topk_group > n_group:
            raise BadConfig(f"topk_group: {topk_group} of {n_group} groups cannot be kept.")
        if k > topk_group * (e // n_group):
            raise BadConfig(f"num_experts_per_tok: {k} is more than the {topk_group * (e // n_group)} allowed experts.")
        return n_group, topk_group

    def _rotary(self) -> tuple[float, Yarn | None]:
        new = self.config.get("rope_parameters")
        where = "rope_parameters" if new is not None else "rope_scaling"
        rope = new if new is not None else self.config.get("rope_scaling")
        if not isinstance(rope, Mapping | None):
            raise BadConfig(f"{where}: {rope!r} should be an object, or null.")
        theta = (rope or {}).get("rope_theta", self.config.get("rope_theta"))
        if not isinstance(theta, int | float) or not 1 < theta < math.inf:
            raise BadConfig(f"rope_theta: {theta!r} should be a number above 1.")
        kind = (rope or {}).get("rope_type", (rope or {}).get("type", "default"))
        for key, fine in _UNSUPPORTED.items():
            if (rope or {}).get(key) not in (None, fine):
                said = f"{rope[key]!r}"  # type: ignore[index]
                raise BadConfig(f"{where}.{key}: {said} is not supported; these checkpoints leave it out.")
        if rope is None or kind == "default":
            return float(theta), None
        if kind != "yarn":
            raise BadConfig(f"{where}.type: {kind!r} is not one of default, yarn.")
        return float(theta), self._yarn(rope, where)

    def _yarn(self, rope: Mapping[str, Any], where: str) -> Yarn:
        known = {*_YARN, *_UNSUPPORTED, "type", "rope_type", "rope_theta"}
        for key in rope:
            if key not in known:
                near = nearest(key, known, n=1)
                raise BadConfig(f"{where}.{key}: not a key that we know" + (f"; nearest: {near[0]}." if near else "."))
        numbers = {}
        for key, default in _YARN.items():
            value = rope.get(key, default)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise BadConfig(f"{where}.{key}: {value!r} should be a number of at least 0.")
            numbers[key] = float(value)
        mscale, all_dim = numbers["mscale"], numbers["mscale_all_dim"]
        if (all_dim and not rope.get("mscale")) or (not all_dim and mscale != 1.0):
            said = f"{rope.get('mscale')} with mscale_all_dim {all_dim}"
            raise BadConfig(f"{where}.mscale: {said}: the two references disagree on that.")
        for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            if not numbers[key]:
                raise BadConfig(f"{where}.{key}: 0 should be positive.")
        return Yarn(
            factor=numbers["factor"],
            original=int(numbers["original_max_position_embeddings"]),
            beta_fast=numbers["beta_fast"],
            beta_slow=numbers["beta_slow"],
            mscale=mscale,
            mscale_all_dim=all_dim,
        )


_YARN: dict[str, float | None] = {
    "factor": None,
    "original_max_position_embeddings": None,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
"""YaRN's keys and both references' defaults; None has none. K2 states 1.0 for both betas."""

_UNSUPPORTED: dict[str, Any] = {"attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0}
"""Rotary keys with one value that this block can honour; null is as good as absent."""

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
