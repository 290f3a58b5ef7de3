"""A cache as one safetensors file: what is equal is written once, and read back when asked for, a tensor at a time.

Tensors go by their site (``blocks.3.c_KV``), reduced ones by ``reduced.`` before it and the part's name behind it,
beside ``tokens``, ``keep``, ``positions``, ``segments`` and ``pos``; all else is JSON in the header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hooks.cache import Cache, Reduced
from hooks.reduce import Norms, Top
from hooks.where import Rows
from probe.card import letters
from probe.dims import Dims
from probe.errors import BadCheckpoint, BadEdit, ProbeError
from probe.files import replacing
from probe.headers import TORCH, brief, expanded, open_header, parsed, read_stored
from probe.sites import Site, Sites

FORMAT = "k2-probe cache 2"
_TUPLES: dict[str, type] = {"Norms": Norms, "Top": Top}


def save(cache: Cache, path: str | Path) -> None:
    """Write a cache. A file that is there is replaced, at once or not at all; gradients are a cache to save apart.

    Raises:
        BadEdit: a reduction's result is no tensor, nor a tuple of `hooks.reduce` or a dict of them.
    """
    tensors: dict[str, Tensor] = {str(site): value for site, value in cache.items()}
    kinds = {}
    for site, made in cache.reduced.items():
        kinds[str(site)], parts = _flat(site, made)
        tensors.update({f"reduced.{site}{'.' if part else ''}{part}": value for part, value in parts.items()})
    rows = cache._rows
    extra = {"tokens": cache.tokens, "pos": cache.pos}
    if rows is not None:
        extra |= {"keep": rows.keep, "positions": rows.ids, "segments": rows.segments}
    once, aliases, digests = _once({**tensors, **{name: value for name, value in extra.items() if value is not None}})
    header = {
        "dims": cache.dims.to_config(),
        "rows": None if rows is None else [rows.batch, rows.length],
        "spans": None if rows is None or rows.spans is None else [_lists(spans) for spans in rows.spans],
        "spoken": None if rows is None else rows.spoken,
        "sites": {str(site): list(cache._sites.node(site).shape) for site in cache},
        "reduced": kinds,
        "skipped": {str(site): why for site, why in cache.skipped.items()},
        "aliases": aliases,
        "digests": digests,
    }
    said = {"format": FORMAT, **{key: json.dumps(value) for key, value in header.items()}}
    said["seal"] = seal(said, {name: (_SPELT[value.dtype], value.shape) for name, value in once.items()})
    with replacing(expanded(path)) as file:
        save_file(once, file.name, metadata=said)


_SPELT = {dtype: spelt for spelt, dtype in TORCH.items()}


def seal(said: Mapping[str, str], tensors: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """A digest of all that a header says: its metadata, and the dtype and shape of each tensor."""
    layout = sorted((name, dtype, list(shape)) for name, (dtype, shape) in tensors.items())
    text = json.dumps([sorted(item for item in said.items() if item[0] != "seal"), layout])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(value: Tensor) -> str:
    return blake2b(value.reshape(-1).view(torch.uint8).numpy().data, digest_size=32).hexdigest()


def _lists(spans: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: [int(i) for i in places] for name, places in spans.items()}


def _flat(site: Site, made: Any) -> tuple[Any, dict[str, Tensor]]:
    """A reduction's result as named tensors, and what it was."""
    if isinstance(made, Tensor):
        return "tensor", {"": made}
    if isinstance(made, dict) and all(isinstance(part, Tensor) for part in made.values()):
        return list(made), {str(i): part for i, part in enumerate(made.values())}  # any name may stand in a dict
    if type(made).__name__ in _TUPLES:
        return type(made).__name__, made._asdict()
    raise BadEdit(f"{site} was reduced to {type(made).__name__}, which cannot be saved; reduce to tensors.")


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[Any]], dict[str, str]]:
    """Each content once; the others as name → [the name it is under, its shape]: x_next of a block and x_n of the next,
    a latent and its view by head. And the digest of each content."""
    once: dict[str, Tensor] = {}
    aliases: dict[str, list[Any]] = {}
    digests: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in tensors.items():
        whole = value.detach().cpu().contiguous()
        digest = _digest(whole)
        found = first.setdefault((whole.dtype, whole.numel(), digest), name)
        if found == name:
            once[name], digests[name] = whole, digest
        else:
            aliases[name] = [found, list(whole.shape)]
    return once, aliases, digests


# ---- reading ---------------------------------------------------------------------------------------------------


class _File:
    """An open file: tensors by name, aliases followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.stored, said = open_header(path)
        except FileNotFoundError:
            raise BadCheckpoint(f"{path}: there is no such file.") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise BadCheckpoint(f"{path}: not a readable safetensors file ({why}).") from None
        if said.get("format") != FORMAT:
            raise BadCheckpoint(
                f"{path}: not a cache of this toolkit; its format is {brief(said.get('format'))}, not {FORMAT!r}."
            )
        if said.get("seal") != seal(said, {name: (one.dtype, one.shape) for name, one in self.stored.items()}):
            raise BadCheckpoint(f"{path}: its header is damaged (it is not the one that was written). {_ANEW}")
        try:
            self.header = {key: parsed(value) for key, value in said.items() if key not in ("format", "seal")}
            self.aliases: dict[str, Any] = self.header["aliases"]
            self.digests: dict[str, str] = self.header["digests"]
            assert all(math.prod(shape) == self.stored[name].elements for name, shape in self.aliases.values())
            assert self.digests.keys() == self.stored.keys()
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(f"{path}: its header is damaged ({error!r:.200}).") from None
        self.names = set(self.stored) | set(self.aliases)

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, from the header alone."""
        return list(self.aliases[name][1] if name in self.aliases else self.stored[name].shape)

    def read(self, name: str) -> Tensor:
        """A tensor, copied: what others do to the file later does nothing to it. A file that has taken this one's place
        is another, and left alone.

        Raises:
            BadCheckpoint: its bytes are not those that were saved, or somebody has written into the file, or cut it,
                since it was opened.
        """
        if name in self.aliases:
            stored, shape = self.aliases[name]
            return self.read(stored).view(shape)
        try:
            made = read_stored(self.stored[name])
        except OSError as error:
            raise BadCheckpoint(
                f"{self.path}: {name} cannot be read ({error.strerror}): the file has changed since it was opened."
            ) from None
        if _digest(made) != self.digests[name]:
            raise BadCheckpoint(f"{self.path}: {name} is damaged: its bytes are not those that were saved. {_ANEW}")
        return made


_ANEW = "Delete the file, and save the cache anew."


class _Mapped(Mapping[Site, Any]):
    """Site → what the file holds of it, read when asked for."""

    def __init__(self, file: _File, kinds: Mapping[Site, Any], prefix: str = "") -> None:
        self.file, self.kinds, self.prefix = file, kinds, prefix

    def __getitem__(self, site: Site) -> Any:
        kind, name = self.kinds[site], f"{self.prefix}{site}"
        if kind == "tensor":
            return self.file.read(name)
        if isinstance(kind, list):
            return {part: self.file.read(f"{name}.{i}") for i, part in enumerate(kind)}
        made = _TUPLES[kind]
        return made(*(self.file.read(f"{name}.{part}") for part in made._fields))  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def load(path: str | Path) -> Cache:
    """Open a saved cache; it serves as a source of edits as the first did.

    Raises:
        BadCheckpoint: there is no such file, it is damaged, or it is no cache of this toolkit.
    """
    file = _File(expanded(path))
    try:
        return _cache_of(file)
    except BadCheckpoint:
        raise
    except (ProbeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: its header is damaged ({error}).") from None


def _cache_of(file: _File) -> Cache:
    header = file.header
    sites = Sites(Dims.from_config(header["dims"]))
    tokens, keep, ids, segments, pos = (
        file.read(name) if name in file.names else None for name in ("tokens", "keep", "positions", "segments", "pos")
    )
    spans = None if header["spans"] is None else tuple(header["spans"])
    batch, length = header["rows"] or (0, 0)
    spoken = None if header["spoken"] is None else tuple(header["spoken"])
    rows = None if header["rows"] is None else Rows(keep, batch, length, spans, None, spoken, ids, segments, tokens)
    cache = Cache(sites, rows=rows, tokens=tokens, pos=pos)
    held = {sites.find(name): "tensor" for name in header["sites"]}
    cache._values = _Mapped(file, held)
    cache.reduced = Reduced(sites)
    cache.reduced._values = _Mapped(file, {sites.find(n): kind for n, kind in header["reduced"].items()}, "reduced.")
    cache.skipped = {sites.find(name): why for name, why in header["skipped"].items()}
    for site in held:
        _check_shape(file, site, cache)
    return cache


def _check_shape(file: _File, site: Site, cache: Cache) -> None:
    """A tensor of the header must be there, in the sizes that its dims say."""
    if str(site) not in file.names:
        raise BadCheckpoint(f"{file.path}: {site} is missing.")
    node, shape = cache._sites.node(site), file.shape(str(site))
    sizes: dict[str, int] = {"1": 1}
    if cache._rows is not None:
        sizes |= {"B": cache._rows.batch, "S": cache._rows.length, "T": cache._rows.length}
    if cache.pos is not None:
        sizes["T" if "T" in node.shape else "S"] = cache.pos.shape[1]
    fits = len(shape) == len(node.shape)
    for axis, size in zip(node.shape, shape, strict=False):
        known = [sizes[p] if p in sizes else 0 if p in "BTSk" else cache.dims.size(p) for p in letters(axis)]
        fits = fits and (0 in known or size == torch.Size(known).numel())
    if not fits:
        raise BadCheckpoint(f"{file.path}: {site} should be [{' '.join(node.shape)}], and is {shape}.")
