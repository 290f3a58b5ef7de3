"""The forms in which a weight may be stored (plain, FP8, INT4), and which stored tensors are which weights.

All of it from the config and the headers: no weight is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from probe.config import Layout, config_file, extra_layers, layout, read_config, text_config
from probe.dims import Dims
from probe.errors import BadCheckpoint, BadConfig, asking
from probe.foreign import ORIGINAL, foreign, refuse_other_files
from probe.headers import READ, Stored, brief, read_headers, told, uncollected
from probe.leaves import FP32
from probe.names import INDEXER, stored_shapes
from probe.quantised import BLOCK, GROUP, fp8_scales

Form = Literal["plain", "fp8", "int4"]

PLAIN = ("BF16", "F16", "F32")

PER_WORD = 8
"""INT4 values in one int32."""

BUFFERS = "rotary buffers (inv_freq), which no run reads"
EXTRA = "next-token modules (MTP), which no run reads"
SIGHT = "the part that sees, of which only the text part is read"
CHOOSING = "indexers, which act in texts beyond index_topk tokens alone, and those are refused"
AGAIN = "the head, which is the embedding, stored again"
TIED = "is there, but tie_word_embeddings is true"


class Kept(NamedTuple):
    """How one stored matrix or vector is kept.

    Attributes:
        form: in which form.
        shape: its own shape, [out in], as the headers have it.
        parts: the tensors that make it, by their full names: the values, then scales, then INT4's stated shape.
    """

    form: Form
    shape: tuple[int, ...]
    parts: tuple[str, ...]


class Fault(NamedTuple):
    """Where a checkpoint is not what its config says: the tensor, what of it, and the file, if it is in one."""

    name: str
    said: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{told(self.name)} {self.said}"


class Survey(NamedTuple):
    """What a checkpoint directory holds.

    Attributes:
        config: its ``config.json``.
        dims: the sizes that this says.
        stored: every tensor by its full name.
        kept: every weight's matrix or vector that is there, by its original name, without a text part's prefix.
        left_out: what is no weight of ours and yet known, by what it is: full names.
        faults: what is not as the config says, in the card's order; before all, what tells why.
    """

    config: dict[str, Any]
    dims: Dims
    stored: dict[str, Stored]
    kept: dict[str, Kept]
    left_out: dict[str, list[str]]
    faults: list[Fault]

    def dtype(self, name: str, weight: str, asked: torch.dtype | None) -> torch.dtype:
        """What a stored matrix of a weight is expanded to: fp32 always for router weight and correction bias, else as
        asked; None: as it is stored, quantised ones to bf16."""
        if weight in FP32:
            return torch.float32
        kept = self.kept[name]
        return asked or (READ[self.stored[kept.parts[0]].dtype] if kept.form == "plain" else torch.bfloat16)

    def refuse_faults(self, directory: Path) -> None:
        """Refuse what is not as the config says, by the first fault.

        Raises:
            BadCheckpoint: there is one.
        """
        if self.faults:
            fault, more = self.faults[0], len(self.faults) - 1
            where = directory / told(fault.file) if fault.file else directory
            also = f" {more} more differ: `k2probe params` lists them." if more else ""
            raise BadCheckpoint(f"{where}: {fault}.{also}")


def survey(directory: Path) -> Survey:
    """Read config and headers, and match what is there with what should be.

    Raises:
        BadConfig: there is no config, or it cannot be honoured.
        BadCheckpoint: there is no such directory, or its files are damaged. What is only not as expected is a fault.
    """
    refuse_other_files(directory)
    config = read_config(directory)
    with asking(str(config_file(directory))):
        dims, form = Dims.from_config(config), quantisation(config)
    stored = read_headers(directory)
    return Survey(config, dims, stored, *_match(stored, config, dims, form))


@uncollected()
def _match(
    stored: Mapping[str, Stored], config: Mapping[str, Any], dims: Dims, form: Form
) -> tuple[dict[str, Kept], dict[str, list[str]], list[Fault]]:
    kept: dict[str, Kept] = {}
    faults: list[Fault] = []
    rest = dict.fromkeys(stored)
    spelt = layout(config, stored)
    for name, shape in stored_shapes(dims).items():
        full = spelt.full(name)
        found = _find(stored, full, form)
        if found is None:
            faults.append(Fault(full, _missing(full, stored)))
            continue
        kept[name] = found
        for part in found.parts:
            rest.pop(part, None)
        faults += _faults_of(stored, full, found, shape, form)
    left_out, unknown = _sorted_out(rest, spelt, dims, extra_layers(config))
    head, embedding = spelt.full("lm_head.weight"), spelt.full("model.embed_tokens.weight")
    if dims.tied and head in unknown and embedding in stored and stored[head][1:3] == stored[embedding][1:3]:
        unknown.remove(head)
        left_out[AGAIN] = [head]
    for name in unknown:
        said = TIED if name == head else _unknown(name, stored)
        faults.append(Fault(name, said, stored[name].file))
    if faults and (sign := foreign(unknown, embedding)):
        name, said = sign
        faults.insert(0, Fault(name, said, stored[name].file if name in stored else None))
    return kept, left_out, faults


def _find(stored: Mapping[str, Stored], name: str, form: Form) -> Kept | None:
    packed = stored.get(f"{name}_packed") if form == "int4" else None
    if packed is not None:
        shape = (*packed.shape[:-1], PER_WORD * packed.shape[-1]) if packed.shape else ()
        return Kept("int4", shape, (f"{name}_packed", f"{name}_scale", f"{name}_shape"))
    values = stored.get(name)
    if values is None:
        return None
    if values.dtype == "F8_E4M3":
        return Kept("fp8", values.shape, (name, f"{name}_scale_inv"))
    return Kept("plain", values.shape, (name,))


def _faults_of(
    stored: Mapping[str, Stored], name: str, kept: Kept, shape: tuple[int, ...], form: Form
) -> Iterator[Fault]:
    file = stored[kept.parts[0]].file
    if kept.shape != shape:
        yield Fault(name, f"should be {list(shape)}, and is {list(kept.shape)}", file)
        return
    if kept.form == "fp8" and form != "fp8":
        yield Fault(name, "is F8_E4M3, but no quantization_config says fp8 and how large a scale's block is", file)
    elif kept.form != "plain" and len(shape) != 2:
        yield Fault(name, f"is stored as {kept.form.upper()}, which only a matrix can be", file)
    elif kept.form == "int4" and shape[1] % GROUP:
        yield Fault(name, f"is {list(shape)}, which is no whole number of groups of {GROUP}", file)
    elif kept.form != "plain":
        yield from _faults_of_parts(stored, kept)
    elif stored[name].dtype not in PLAIN:
        needed = ", ".join(PLAIN) + {"fp8": ", or F8_E4M3 with its scales", "int4": ", or packed"}.get(form, "")
        yield Fault(name, f"is {stored[name].dtype}; it should be one of {needed}", file)


def _faults_of_parts(stored: Mapping[str, Stored], kept: Kept) -> Iterator[Fault]:
    """Scales and stated shape are there, in the shape and dtype that the form asks for."""
    out, into = kept.shape
    wanted: list[tuple[tuple[int, ...], tuple[str, ...]]]
    if kept.form == "fp8":
        wanted = [((out, into), ("F8_E4M3",)), (fp8_scales(out, into), ("F32",))]
    else:
        wanted = [((out, into // PER_WORD), ("I32",)), ((out, into // GROUP), ("BF16",)), ((2,), ("I32", "I64"))]
    for part, (shape, dtypes) in zip(kept.parts, wanted, strict=True):
        found = stored.get(part)
        if found is None:
            yield Fault(part, f"is missing: the {kept.form.upper()} values {kept.parts[0]} mean nothing without it")
        elif found.shape != shape:
            yield Fault(part, f"should be {list(shape)}, and is {list(found.shape)}", found.file)
        elif found.dtype not in dtypes:
            yield Fault(part, f"should be {' or '.join(dtypes)}, and is {found.dtype}", found.file)


def _sorted_out(
    rest: Mapping[str, None], spelt: Layout, dims: Dims, extra: int
) -> tuple[dict[str, list[str]], list[str]]:
    """What is no weight, by what it is; and what nobody knows."""
    left_out: dict[str, list[str]] = {}
    unknown = []
    for name in rest:
        found = _LAYER.match(spelt.original(name))
        layer = int(found[1]) if found else -1
        if dims.blocks <= layer < dims.blocks + extra:
            left_out.setdefault(EXTRA, []).append(name)
        elif dims.index_topk is not None and 0 <= layer < dims.blocks and INDEXER.search(name):
            left_out.setdefault(CHOOSING, []).append(name)
        elif name.endswith("rotary_emb.inv_freq"):
            left_out.setdefault(BUFFERS, []).append(name)
        elif name.startswith(spelt.apart):
            left_out.setdefault(SIGHT, []).append(name)
        else:
            unknown.append(name)
    return left_out, unknown


_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


def told_apart(left_out: Mapping[str, list[str]]) -> list[str]:
    """What was left out, in sentences."""
    return [f"left out: {len(names)} tensors, {what}" for what, names in left_out.items()]


def _missing(name: str, stored: Mapping[str, Stored]) -> str:
    if f"{name}_packed" in stored:
        return f"is missing: {told(name)}_packed is there, but no quantization_config says how it is packed"
    return "is missing" + (", but tie_word_embeddings is false" if name.endswith("lm_head.weight") else "")


def _unknown(name: str, stored: Mapping[str, Stored]) -> str:
    for end in ("_scale_inv", "_scale", "_packed", "_shape"):
        base = stored.get(name.removesuffix(end))
        if name.endswith(end) and base is not None:
            return f"is no tensor of this model: {told(name.removesuffix(end))} is {base.dtype}, and goes without"
    return "is no tensor of this model"


def quantisation(config: Mapping[str, Any]) -> Form:
    """The form that weights may have beside the plain one, by the config.

    Raises:
        BadConfig: they are quantised in another way than FP8 in blocks of 128 × 128 or INT4 in groups of 32.
    """
    said = quantisation_config(config)
    if (mlx := config.get("quantization")) is not None:
        raise BadConfig(f"quantization: {brief(mlx)} is of MLX' form, which is not read: {ORIGINAL}.")
    if said is None:
        return "plain"
    if not isinstance(said, Mapping):
        raise BadConfig(f"quantization_config: {brief(said)} should be an object.")
    method = said.get("quant_method")
    if method == "fp8":
        _only(said, "quantization_config", {"fmt": "e4m3"}, {"weight_block_size": [BLOCK, BLOCK]})
        if said.get("scale_fmt") not in (None, "float", "ue8m0"):
            raise BadConfig(f"quantization_config.scale_fmt: {brief(said['scale_fmt'])} is not one of float, ue8m0.")
        return "fp8"
    if method == "compressed-tensors":
        _only(said, "quantization_config", {}, {"format": "pack-quantized"})
        groups = said.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise BadConfig("quantization_config.config_groups: an object with at least one group is needed.")
        for name, group in groups.items():
            where = f"quantization_config.config_groups.{told(name)}.weights"
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                raise BadConfig(f"{where}: {brief(weights)} should be an object.")
            usual = {"type": "int", "symmetric": True, "strategy": "group", "actorder": None}
            _only(weights, where, usual, {"num_bits": 4, "group_size": GROUP})
        return "int4"
    algorithm = f" ({brief(said['quant_algo'])})" if "quant_algo" in said else ""
    raise BadConfig(
        f"quantization_config.quant_method: {brief(method)}{algorithm} is not read; read are fp8 (blocks of {BLOCK} ×"
        f" {BLOCK}), compressed-tensors (INT4 in groups of {GROUP}), and weights that are not quantised: {ORIGINAL}."
    )


def quantisation_config(config: Mapping[str, Any]) -> Any:
    """What the config says of quantisation: beside the text part's keys, or around them."""
    inner = text_config(config).get("quantization_config")
    return config.get("quantization_config") if inner is None else inner


def _only(said: Mapping[str, Any], where: str, usual: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """The stated keys are there and both kinds have the one value that is read; null is as the usual."""
    for key, only in {**usual, **stated}.items():
        value = said.get(key)
        if value != only and not (value is None and key in usual):
            raise BadConfig(f"{where}.{key}: {brief(value)} is not read; only {only!r} is.")
