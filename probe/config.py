"""What a ``config.json`` says: its keys, the model types that are this block, and what is refused, by the key.

A config's key is one of four things: read; a switch that this block honours at one value, refused at another; known to
change no number (token ids, training, bookkeeping); or unknown, and told (`unread_keys`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from probe.errors import BadConfig, asking, nearest
from probe.headers import brief, expanded, read_json, told

SIZES = {  # key → the letter of `probe.Dims`
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

FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
"""Keys with one value that this block can honour (the last is checked apart: an extra layer is only skipped)."""

_NEUTRAL: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "mlp_bias": False,
    "use_qk_norm": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "index_topk": None,
    "mla_scale_q_lora": False,
    "mla_scale_kv_lora": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "scale_emb": 1.0,
    "scale_depth": None,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}
"""Keys of other models, with the value at which each does nothing; null is as good as absent."""

GLM, V32 = "glm4_moe_lite", "deepseek_v32"
_V3, _YOUTU, _DSA, _SARVAM = "deepseek_v3", "youtu", "glm_moe_dsa", "sarvam_mla"


class _Family(NamedTuple):
    """What tells the configs of one model type from others of this block.

    Attributes:
        absent: what a config of it means by leaving a key out.
        spelt: its own keys for what is read, by ours.
        fixed: more keys with one value that this block can honour; null is as good as absent.
        inert: more keys that change no number.
    """

    absent: Mapping[str, Any] = {}
    spelt: Mapping[str, str] = {}
    fixed: Mapping[str, Any] = {}
    inert: Collection[str] = ()


_INDEXER = "index_head_dim index_n_heads indexer_rope_interleave index_skip_topk_offset index_share_for_mtp_iteration"

_FAMILY: dict[str, _Family] = {
    "kimi_k2": _Family(),
    _V3: _Family(),
    GLM: _Family({"first_k_dense_replace": 1}),
    _YOUTU: _Family({"tie_word_embeddings": True}),
    V32: _Family({"first_k_dense_replace": 3}, inert=_INDEXER.split()),
    _DSA: _Family({"first_k_dense_replace": 3}, inert=_INDEXER.split()),
    _SARVAM: _Family(
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        {"moe_router_enable_expert_bias": True, "score_function": "sigmoid", "router_dtype": "fp32"},
        ("use_qk_norm", "q_head_dim", "output_dropout", "embedding_dropout", "attn_implementation"),
    ),
}
"""The model types that are this block. Of Sarvam's attention no reader has norms of queries and keys, whatever its
``use_qk_norm`` says; and ``head_dim`` there is a cache's width."""

_INDEXED = (V32, _DSA)
"""Those whose attention is full up to ``index_topk`` tokens; in longer texts an indexer chooses as many of the keys."""

_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq")

_STRANGERS = {
    "axk1": "it has a norm after the feed-forward part",
    "deepseek_v2": "its router takes a softmax and has no correction bias",
    "kimi_linear": "most of its blocks use linear attention, and its MLA no rotation",
    "longcat_flash": "it has two attentions a layer and extra scales on the latents",
    "minicpm3": "it scales the embedding, each update and the logits",
    "mistral4": "its router takes a softmax, and its queries are scaled by position",
}


class Layout(NamedTuple):
    """How files spell the names of the tensors that are read: what stands for ``model.layers.``, ``model.`` and
    ``lm_head.``; and how the names of a part that sees start."""

    layers: str = "model.layers."
    model: str = "model."
    head: str = "lm_head."
    apart: tuple[str, ...] = ()

    def full(self, name: str) -> str:
        """An original name as it is spelt here."""
        return _respelt(name, _STARTS, self)

    def original(self, name: str) -> str:
        """A name from here as the original one; what is spelt like none stays."""
        return _respelt(name, self, _STARTS)


_STARTS = ("model.layers.", "model.", "lm_head.")


def _respelt(name: str, here: tuple[Any, ...], there: tuple[Any, ...]) -> str:
    for start, other in zip(here, there, strict=False):  # of a layout, the starts come first
        if name.startswith(start):
            return str(other) + name[len(start) :]
    return name


class Wrapper(NamedTuple):
    """How a model that sees keeps its text part: its class, and the layouts that its files may have, the published one
    first. The text part's config is under ``text_config``."""

    architecture: str
    layouts: tuple[Layout, ...]


_INSIDE = Layout("language_model.model.layers.", "language_model.model.", "language_model.lm_head.")
_K25_APART = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")

LOADED = Layout("model.language_model.layers.", "model.language_model.", apart=_K25_APART)
"""A model that sees, as transformers holds it."""

WRAPPERS = {
    "kimi_k25": Wrapper(
        "KimiK25ForConditionalGeneration",
        (
            _INSIDE._replace(apart=_K25_APART),
            _INSIDE._replace(layers="language_model.model.blocks.", apart=_K25_APART),  # as transformers 5.24 writes it
            LOADED,
        ),
    ),
    "kimi_vl": Wrapper(
        "KimiVLForConditionalGeneration", (_INSIDE._replace(apart=("vision_tower.", "multi_modal_projector.")),)
    ),
}
"""By model type."""


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `probe.Dims`, of the text part; yarn's in a dict of their own.

    Raises:
        BadConfig: a key is missing, or says what this block cannot do; the message names the key.
    """
    text = text_config(config)
    with nullcontext() if text is config else asking("text_config"):
        return _Reader(text).sizes()


def wrapper(config: Mapping[str, Any]) -> Wrapper | None:
    """How this config's model keeps its text part; None: it is nothing but text."""
    kind = config.get("model_type")
    return WRAPPERS.get(kind) if isinstance(kind, str) else None


def layout(config: Mapping[str, Any], names: Collection[str] = ()) -> Layout:
    """How files with these names spell what is read; without names, how they are published."""
    whole = wrapper(config)
    layouts = whole.layouts if whole else (Layout(),)
    spelt = (each for each in layouts if any(name.startswith(each.layers) for name in names))
    return next(spelt, layouts[0])


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part: the config itself, or in a model that sees its ``text_config``. That is a
    DeepSeek-V3's where it names no type; and whether the head is tied, the whole decides where it says so.

    Raises:
        BadConfig: there should be one, and there is none.
    """
    if wrapper(config) is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise BadConfig(f"text_config: a {config['model_type']} config should hold the text part's here, an object.")
    return {"model_type": _V3, **text, **{key: config[key] for key in ("tie_word_embeddings",) if key in config}}


def extra_layers(config: Mapping[str, Any]) -> int:
    """How many next-token modules (MTP) are stored after the blocks; no run uses them.

    Raises:
        BadConfig: it is no whole number.
    """
    key = next((key for key in _EXTRA if text_config(config).get(key) is not None), None)
    return 0 if key is None else _Reader(text_config(config)).at_most(key, _MOST_BLOCKS, low=0)


_EXTRA = ("num_nextn_predict_layers", "num_mtp_layers")


def unread_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a config that nothing here reads and that we do not know to be harmless.

    They are told and not refused: what adds weights is refused by its tensors, and by its name nobody can tell a new
    multiplier from a new remark.
    """
    text = text_config(config)
    kind = text.get("model_type")
    family = _FAMILY.get(kind, _Family()) if isinstance(kind, str) else _Family()
    known = _KNOWN | {*family.spelt.values(), *family.fixed, *family.inert, *(_SHARING if kind in _INDEXED else ())}
    return tuple(k for k, value in text.items() if k not in known and value is not None and k[:1] != "_")


def guesses(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What was read into keys that a config leaves out and that its readers take differently, in sentences."""
    text = text_config(config)
    if text.get("model_type") != _SARVAM or {"n_group", "topk_group"} <= text.keys():
        return ()
    return (
        "config.json does not state n_group and topk_group: they are read as 1 and 1, all experts compete, as in"
        " transformers; other readers take an eighth of the experts' number and 2. State them to choose",
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` at ``path`` (the file, or a directory that holds it).

    Raises:
        BadConfig: there is none, or it is not a JSON object.
    """
    path = config_file(path)
    try:
        config = read_json(path)
    except OSError as error:
        raise BadConfig(f"{path}: cannot read a config there ({error.strerror}).") from None
    except ValueError as error:
        raise BadConfig(f"{path}: not JSON ({error}).") from None
    if not isinstance(config, dict):
        raise BadConfig(f"{path}: a config is a JSON object, not {type(config).__name__}.")
    return config


def config_file(path: str | Path) -> Path:
    """Where a config is: the file itself, or ``config.json`` in a directory."""
    path = expanded(path)
    return path / "config.json" if path.is_dir() else path


def _is_number(value: object) -> bool:
    """A finite one; a whole number beyond all floats is none."""
    return type(value) in (int, float) and abs(value) <= _MOST_FLOAT  # type: ignore[arg-type]


_MOST_SIZE, _MOST_FLOAT, _LEAST_FLOAT = 2**31, 1e30, 1e-30
"""Of numbers that are not whole: what fp32, which they are used in, can still multiply."""

_MOST_MSCALE = 1e3

_MOST_BLOCKS, _MOST_EXPERTS = 4096, 2**18
"""Of blocks, and of experts in all of them: some ten times the largest model's. A config that says more is damaged, and
the names alone of what it says would fill the memory."""


class _Reader:
    """Reads a config key by key; whatever is refused is refused under its key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def sizes(self) -> dict[str, Any]:
        """The fields of a `probe.Dims`, yarn's as a dict of their own."""
        kind = self._kind()
        self._spell(_FAMILY[kind])
        self._switches(kind)
        extra_layers(self.config)
        moe = self._moe(self.at_most("num_hidden_layers", _MOST_BLOCKS), kind)
        sizes = {letter: self._size(key, any(moe)) for key, letter in SIZES.items()}
        if any(moe):
            self.at_most("n_routed_experts", _MOST_EXPERTS // sum(moe))
        heads = self.config.get("num_key_value_heads")
        if heads not in (None, sizes["h"]):
            raise BadConfig(
                f"num_key_value_heads: {brief(heads)} is not num_attention_heads ({sizes['h']}); MLA has no groups."
            )
        if int(sizes["r"] or 0) % 2:
            raise BadConfig(f"qk_rope_head_dim: {sizes['r']} is odd; rotation takes pairs.")
        theta, yarn = self._rotary()
        n_group, topk_group = self._routing(sizes) if any(moe) else (1, 1)
        longest = self.config.get("max_position_embeddings")
        return {
            **sizes,
            "m_s": int(sizes["m"] or 0) * self.whole("n_shared_experts") if any(moe) else 0,
            "moe": moe,
            "eps": self._float("rms_norm_eps"),
            "scaling": self._float("routed_scaling_factor") if any(moe) else 1.0,
            "norm_topk": self._bool("norm_topk_prob", True),
            "n_group": n_group,
            "topk_group": topk_group,
            "theta": theta,
            "yarn": yarn,
            "tied": self._bool("tie_word_embeddings", False),
            "max_positions": self.whole("max_position_embeddings") if longest else None,
            "index_topk": self._index_topk() if kind in _INDEXED else None,
        }

    def _kind(self) -> str:
        kind = self.config.get("model_type")
        if isinstance(kind, str) and kind in _FAMILY:
            return kind
        if isinstance(kind, str) and kind in _STRANGERS:
            raise BadConfig(f"model_type: {brief(kind)} is another block than ours: {_STRANGERS[kind]}.")
        known = (*_FAMILY, *WRAPPERS)
        near = nearest(kind, known, n=1) if isinstance(kind, str) else []
        raise BadConfig(
            f"model_type: {brief(kind)} is not one that we know to be this block ({', '.join(known)})"
            + (f"; nearest: {near[0]}." if near else ".")
        )

    def _spell(self, family: _Family) -> None:
        """The family's own keys become ours, and what is left out what it means there."""
        for ours, theirs in family.spelt.items():
            value = self.config.get(theirs)
            if value is not None and self.config.get(ours, value) != value:
                raise BadConfig(f"{theirs}: {brief(value)} should be what {ours} is, {brief(self.config[ours])}.")
            if value is not None:
                self.config = {**self.config, ours: value}
        self.config = {**family.absent, **self.config}

    def _switches(self, kind: str) -> None:
        """What this block honours at one value is at that value."""
        family = _FAMILY[kind]
        apart = {*_EXTRA, *family.inert, *(("index_topk",) if kind in _INDEXED else ())}
        for key, only in {**FIXED, **_NEUTRAL, **family.fixed}.items():
            value = self.config.get(key, only)
            if value != only and key not in apart and not (value is None and key not in FIXED):
                raise BadConfig(f"{key}: {brief(value)} is not what this block computes; only {only!r} is.")
        if self.config.get("rope_interleave", True) is not True:
            raise BadConfig("rope_interleave: false means rotary weights in half-split order; these are in pairs.")
        full = ("full_attention", *(("indexed_attention",) if kind in _INDEXED else ()))
        if other := [layer for layer in self._list("layer_types") if layer not in full]:
            raise BadConfig(f"layer_types: {brief(other[0])} is not what this block computes; only {full[-1]!r} is.")

    def _index_topk(self) -> int:
        """Up to how many tokens attention is full, after checking that each block has an indexer of its own."""
        if self._get("q_lora_rank") is None:
            raise BadConfig("q_lora_rank: None is not what a model with indexers has: they read the query latent.")
        for key in _SHARING:
            value = self.config.get(key)
            each = value if isinstance(value, list | str) else [value]
            if other := [one for one in each if one not in ("full", "F", 1, None)]:
                raise BadConfig(f"{key}: {brief(other[0])}: blocks that share another's indexer are not read.")
        return self.whole("index_topk")

    def _moe(self, blocks: int, kind: str) -> tuple[bool, ...]:
        """Which blocks are MoE blocks."""
        if kind == _YOUTU:
            return (False,) * blocks
        types = self._list("mlp_layer_types")
        if not types:
            dense = self.whole("first_k_dense_replace", low=0)
            return tuple(i >= dense for i in range(blocks))
        if len(types) != blocks or not all(kind in ("dense", "sparse") for kind in types):
            raise BadConfig(f"mlp_layer_types: {brief(types)} should be {blocks} times 'dense' or 'sparse'.")
        return tuple(kind == "sparse" for kind in types)

    def _list(self, key: str) -> list[Any]:
        value = self.config.get(key)
        if not isinstance(value, list | None):
            raise BadConfig(f"{key}: {brief(value)} should be a list, an entry a layer.")
        return value or []

    def _get(self, key: str) -> Any:
        if key not in self.config:
            near = nearest(key, self.config, n=1)
            raise BadConfig(f"{key}: the config lacks it" + (f" (it has {near[0]})." if near else "."))
        return self.config[key]

    def whole(self, key: str, low: int = 1) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < _MOST_SIZE:
            raise BadConfig(f"{key}: {brief(value)} should be a whole number of at least {low} and below 2**31.")
        return value

    def at_most(self, key: str, most: int, low: int = 1) -> int:
        value = self.whole(key, low)
        if value > most:
            raise BadConfig(f"{key}: {value:,} is beyond all models; at most {most:,} are believed.")
        return value

    def _float(self, key: str) -> float:
        value = self._get(key)
        if not _is_number(value) or not value >= _LEAST_FLOAT:
            raise BadConfig(f"{key}: {brief(value)} should be a positive number, from 1e-30 to 1e30.")
        return float(value)

    def _bool(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise BadConfig(f"{key}: {brief(value)} should be true or false.")
        return value

    def _size(self, key: str, any_moe: bool) -> int | None:
        if key == "q_lora_rank" and self._get(key) is None:
            return None
        if key in _MOE_KEYS and not any_moe:
            return 0
        return self.whole(key)

    def _routing(self, sizes: Mapping[str, int | None]) -> tuple[int, int]:
        """``n_group`` and ``topk_group``, after checking that every token can find its k experts."""
        e, k = int(sizes["e"] or 0), int(sizes["k"] or 0)
        n_group, topk_group = self.whole("n_group"), self.whole("topk_group")
        if e % n_group or e // n_group < 2:
            raise BadConfig(f"n_group: {n_group} groups of {e} experts: groups are equal and hold at least two.")
        if topk_group > n_group:
            raise BadConfig(f"topk_group: {topk_group} of {n_group} groups cannot be kept.")
        if k > topk_group * (e // n_group):
            raise BadConfig(f"num_experts_per_tok: {k} is more than the {topk_group * (e // n_group)} allowed experts.")
        return n_group, topk_group

    def _rotary(self) -> tuple[float, dict[str, float] | None]:
        """``rope_theta``, and YaRN's numbers where there is YaRN."""
        given = [where for where in _ROPE if self.config.get(where) is not None] or [_ROPE[-1]]
        theta, yarn = _agreed({where: self._rope(where) for where in given})
        if not _is_number(theta) or not theta > 1:
            raise BadConfig(f"rope_theta: {brief(theta)} should be a number above 1.")
        return float(theta), yarn

    def _rope(self, where: str) -> tuple[Any, dict[str, float] | None]:
        """What one of the two rotary objects says; theta as it stands, there or beside it."""
        rope = self.config.get(where)
        if not isinstance(rope, Mapping | None):
            raise BadConfig(f"{where}: {brief(rope)} should be an object, or null.")
        sarvam = self.config.get("model_type") == _SARVAM
        if rope is None and sarvam:
            raise BadConfig(f"{where}: the config lacks it: transformers reads that as none, other readers as YaRN.")
        rope = rope or {}
        kind = _agreed({f"{where}.{key}": rope.get(key) for key in ("rope_type", "type")})
        if kind == "deepseek_yarn" and sarvam:
            kind = "yarn"
        if kind not in (None, "default", "yarn"):
            raise BadConfig(f"{where}.type: {brief(kind)} is not one of default, yarn.")
        known = {*_YARN, *_UNSUPPORTED, "type", "rope_type", "rope_theta"}
        for key in rope:
            if key not in known:
                near = nearest(key, known, n=1)
                raise BadConfig(
                    f"{where}.{told(key)}: not a key that we know" + (f"; nearest: {near[0]}." if near else ".")
                )
        for key, fine in _UNSUPPORTED.items():
            if rope.get(key) not in (None, fine):
                raise BadConfig(f"{where}.{key}: {brief(rope[key])} is not supported; these checkpoints leave it out.")
        theta = _agreed({f"{where}.rope_theta": rope.get("rope_theta"), "rope_theta": self.config.get("rope_theta")})
        return theta, self._yarn(rope, where) if kind == "yarn" else None

    def _yarn(self, rope: Mapping[str, Any], where: str) -> dict[str, float]:
        numbers = {}
        for key, default in _YARN.items():
            value = rope.get(key, default)
            if not _is_number(value) or not value >= 0:
                raise BadConfig(f"{where}.{key}: {brief(value)} should be a number of at least 0.")
            numbers[key] = float(value)
        mscale, all_dim = numbers["mscale"], numbers["mscale_all_dim"]
        if (all_dim and not rope.get("mscale")) or (not all_dim and mscale != 1.0):
            said = f"{rope.get('mscale')} with mscale_all_dim {all_dim}"
            raise BadConfig(f"{where}.mscale: {said}: the two references disagree on that.")
        for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            if numbers[key] < _LEAST_FLOAT:
                raise BadConfig(f"{where}.{key}: {numbers[key]:g} should be positive, and not below 1e-30.")
        if max(mscale, all_dim) > _MOST_MSCALE:
            raise BadConfig(f"{where}.mscale: {max(mscale, all_dim):g} is beyond all models; at most 1000 is believed.")
        if not 1 <= numbers["original_max_position_embeddings"] < _MOST_SIZE:
            said = f"{numbers['original_max_position_embeddings']:g}"
            raise BadConfig(f"{where}.original_max_position_embeddings: {said} should be from 1 to 2**31.")
        original = int(numbers.pop("original_max_position_embeddings"))
        return {**numbers, "original": original}


def _agreed(said: Mapping[str, Any]) -> Any:
    """What places of a config say of one thing, each by its name; None where none says anything."""
    (first, value), *others = [(place, one) for place, one in said.items() if one is not None] or [("", None)]
    for other, its in others:
        if its != value:
            raise BadConfig(
                f"{first} and {other} differ: {brief(value)} and {brief(its)}. Libraries take different ones; keep the"
                " one that is meant."
            )
    return value


_ROPE = ("rope_parameters", "rope_scaling")
"""The objects with rotary keys, new and old."""

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

_INERT = """
    architectures auto_map dtype torch_dtype transformers_version tokenizer_class name_or_path unsloth_fixed
    unsloth_version bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    attention_dropout initializer_range embedding_initializer_range aux_loss_alpha seq_aux router_aux_loss_coef
    output_router_logits use_cache ep_size pretraining_tp head_dim qk_head_dim num_local_experts quantization_config
    output_attentions output_hidden_states return_dict id2label label2id num_labels problem_type is_encoder_decoder
    is_decoder chunk_size_feed_forward torchscript use_bfloat16 pruned_heads tie_encoder_decoder add_cross_attention
    cross_attention_hidden_size finetuning_task task_specific_params prefix tf_legacy_loss
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
""".split()
"""Keys that change no number of a forward pass, or that say again what another key says (the head widths)."""

_READ = """
    model_type num_hidden_layers first_k_dense_replace mlp_layer_types layer_types n_shared_experts num_key_value_heads
    rms_norm_eps routed_scaling_factor norm_topk_prob n_group topk_group tie_word_embeddings max_position_embeddings
    rope_theta rope_scaling rope_parameters rope_interleave
""".split()

_KNOWN = frozenset({*SIZES, *FIXED, *_NEUTRAL, *_EXTRA, *_READ, *_INERT})
