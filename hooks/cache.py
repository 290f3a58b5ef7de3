"""What a run leaves behind: a mapping from site to tensor that nothing later can change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooks.where import Rows
from probe.dims import Dims
from probe.errors import BadEdit, ProbeError, UnknownTensor, nearest
from probe.sites import Site, Sites

Names = str | Site | Iterable[str | Site] | Callable[[str], bool] | None
"""Which sites: a spelling or a glob, several, a function of the hook's name, or None for all but those made only on
request. A glob matches sites' names, or hooks' where it says ``hook_``: ``blocks.*.c_KV``, ``blocks.[01].hook_*``,
``*delta_*``; and ``blocks.*.`` goes before any spelling: ``blocks.*.c^KV``."""


def select(sites: Sites, names: Names) -> tuple[Site, ...]:
    """The sites that ``names`` means, in the order in which they are computed.

    Raises:
        UnknownTensor: a spelling or a glob names nothing, or nothing at all is selected.
    """
    if names is None:
        return tuple(site for site in sites if not getattr(sites.node(site), "on_request", False))
    if isinstance(names, str | Site):
        names = (names,)
    if callable(names):
        chosen = {site for site in sites if names(site.hook)}
    else:
        chosen = {site for name in names for site in _named(sites, name)}
    if not chosen:
        raise UnknownTensor("the names select no tensor at all; hooks are called like blocks.0.hook_c_KV.")
    return tuple(site for site in sites if site in chosen)


def _named(sites: Sites, name: str | Site) -> list[Site]:
    """The one site of a spelling, or all that a glob matches: ``delta_heads`` only if the glob spells that out."""
    if isinstance(name, Site) or not isinstance(name, str) or not re.search(r"[*?[]", name):
        return [sites.find(name)]
    found = [site for site in sites if fnmatchcase(site.hook if "hook_" in name else str(site), name)]
    found = [s for s in found if not getattr(sites.node(s), "on_request", False) or s.tensor in name]
    found = found or _in_every_block(sites, name)
    if not found:
        near = nearest(re.sub(r"[*?]", "", name.split(".")[-1]).removeprefix("hook_"), {s.tensor for s in sites})
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise UnknownTensor(
            f"the glob {name!r} matches no tensor; names are like blocks.0.c_KV and blocks.0.hook_c_KV.{hint}"
        )
    return found


def _in_every_block(sites: Sites, name: str) -> list[Site]:
    """``blocks.*.`` before any spelling that is no glob itself: the sites of all blocks that know it."""
    match = re.fullmatch(r"(.*\.)\*(\.[^*?[]+)", name)
    found = []
    for block in sites.blocks if match else ():
        assert match is not None
        with suppress(UnknownTensor):
            found.append(sites.find(f"{match[1]}{block}{match[2]}"))
    return found


def own(value: Tensor) -> Tensor:
    """A copy that shares nothing: no storage, no graph, no inference mode."""
    with torch.inference_mode(False):
        return value.detach().clone(memory_format=torch.contiguous_format)


class BySite(Mapping[Site, Any]):
    """A mapping from site to what was kept of it, found by `Site` or by any spelling."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._values: Mapping[Site, Any] = {}
        self.skipped: dict[Site, str] = {}
        """Sites that were asked for and have nothing, with the reason."""

    def _find(self, key: Any) -> tuple[Site, bool]:
        """The site that a key means, and whether its reciprocal."""
        if isinstance(key, tuple) and not isinstance(key, Site) and len(key) == 2:
            key = f"blocks.{key[1]}.{key[0]}"
        if not isinstance(key, str | Site):
            raise UnknownTensor(f"{key!r} names no tensor; a key is like 'blocks.3.c_KV', or ('c_KV', 3).")
        return self._sites.find_with_inverse(key)

    def __getitem__(self, key: Any) -> Any:
        site, inverse = self._find(key)
        if site in self.skipped:
            raise UnknownTensor(f"{site} is not there: {self.skipped[site]}.")
        if site not in self._values:
            held = ", ".join(sorted({s.tensor for s in self._values})) or "nothing"
            raise UnknownTensor(f"{site} was not cached in this run; it holds {held}. Ask for it by name when running.")
        if not inverse:
            return self._values[site]
        return self._reciprocal(key, self._values[site])

    def _reciprocal(self, key: Any, value: Any) -> Any:
        raise UnknownTensor(f"{key!r} is the reciprocal of what was kept; name {self._find(key)[0]}.")

    def __eq__(self, other: object) -> bool:
        return self is other  # what an edit takes values from is part of the edit, which is compared and hashed

    def __hash__(self) -> int:
        return id(self)

    def __contains__(self, key: object) -> bool:
        try:
            return self._find(key)[0] in self._values
        except ProbeError:
            return False

    def __iter__(self) -> Iterator[Site]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tensors of {len({site.block for site in self} - {None})} blocks)"


class Reduced(BySite):
    """Site → the result of its reduction."""


class Cache(BySite):
    """Site → tensor: what descendants saw. Each tensor has a storage of its own, so that no later edit, of the run's
    values or of another cached tensor (q_C and Q_C would share theirs), can alter it; and it keeps no graph alive.

    Look up by `Site` or by any spelling: ``cache["blocks.3.c^KV"]``, ``cache["c_KV", 3]``.

    Attributes:
        tokens: [B, T], what was run; None where the cache was not made by a run.
        pos: [B, n], the real positions that the tensors hold; None: all of them.
        reduced: site → the result of its reduction.
        gradients: a cache of gradients at the same sites, where they were asked for.
    """

    def __init__(
        self,
        sites: Sites,
        values: Mapping[Site, Tensor] | None = None,
        rows: Rows | None = None,
        tokens: Tensor | None = None,
        pos: Tensor | None = None,
    ) -> None:
        super().__init__(sites)
        self._rows = rows
        self.tokens = None if tokens is None else own(tokens)
        self.pos = pos
        self.reduced = Reduced(sites)
        self.gradients: Cache | None = None
        self._versions: dict[Site, int] = {}
        self._storages: set[int] = set()
        """Of the tensors that were kept as they were made."""
        for site, value in (values or {}).items():
            self.keep(site, value)

    @property
    def rows(self) -> Rows:
        """The rows that the tensors belong to.

        Raises:
            BadEdit: this cache does not know them, or holds some positions only.
        """
        if self._rows is None:
            raise BadEdit("this cache does not know its rows, so nothing can be taken from it.")
        if self.pos is not None:
            raise BadEdit("this cache holds some positions only (pos=), so nothing can be taken from it by position.")
        return self._rows

    @property
    def dims(self) -> Dims:
        """The sizes of the model that the tensors come from."""
        return self._sites.dims

    def changed(self) -> tuple[Site, ...]:
        """The sites whose tensors somebody has written into since they were kept; what is taken from those is not what
        the run gave."""
        return tuple(site for site, version in self._versions.items() if self._values[site]._version != version)

    @property
    def cache(self) -> Cache:
        """Itself: values can be taken from a cache as from a run."""
        return self

    def keep(self, site: Site, value: Tensor, made: bool = False) -> None:
        """Store a copy of ``value``, without its graph. What was ``made`` for this, and nobody else can write into, is
        stored as it is, if it is whole and no other tensor here lies in its storage."""
        kept = value.detach() if made and self._stands_alone(value) else own(value)
        self._values = self._put(self._values, site, kept)
        self._versions[site] = kept._version

    def _stands_alone(self, value: Tensor) -> bool:
        """Whether a value is whole, usable anywhere, and alone in its storage here; from now on that is its own."""
        storage = value.untyped_storage()
        whole = value.is_contiguous() and storage.nbytes() == value.nbytes
        alone = whole and not value.is_inference() and storage.data_ptr() not in self._storages
        if alone:
            self._storages.add(storage.data_ptr())
        return alone

    def copy_made(self) -> None:
        """Copy what was kept as it was made: somebody holds it after all."""
        for site, value in self.items():
            if value.untyped_storage().data_ptr() in self._storages:
                self.keep(site, value)
        self._storages.clear()

    def keep_reduced(self, site: Site, made: Any) -> None:
        """Store what a reduction made; the caller gives it away."""
        self.reduced._values = self._put(self.reduced._values, site, made)

    @staticmethod
    def _put(values: Mapping[Site, Any], site: Site, value: Any) -> Mapping[Site, Any]:
        if not isinstance(values, dict):
            raise BadEdit("a cache that was read from a file stays as it is.")
        values[site] = value
        return values

    def __getitem__(self, key: Any) -> Tensor:
        made: Tensor = super().__getitem__(key)
        return made

    def _reciprocal(self, key: Any, value: Tensor) -> Tensor:
        return value.reciprocal()

    def save(self, path: str | Path) -> None:
        """Write all of it, the tokens, the mask, spans and positions to one safetensors file; see `hooks.stored`."""
        from hooks.stored import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Cache:
        """A saved cache; tensors are read from the file when they are asked for, each time anew.

        Raises:
            BadCheckpoint: there is no such file, it is damaged, or it is no cache.
        """
        from hooks.stored import load

        return load(path)
