"""How values are kept: copied as a run makes them, whole or at some positions, reduced, moved, cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooks.cache import Cache, Names, own, select
from hooks.edits import SCORES
from hooks.reduce import Mean, Reduction, check, joined, mapped
from hooks.where import Index, Place, Rows, where_of
from probe.errors import BadEdit, ShapeMismatch, asking
from probe.numerics import query_chunks
from probe.sites import Site, Sites

Reduce = Mapping[Any, Any]
"""Names (a spelling, a glob, a site) → a reduction of `hooks.reduce`, or a function of the value."""


class Keep(NamedTuple):
    """What to keep of a run, and how.

    Attributes:
        names: what is kept whole (or at ``pos``).
        device, dtype: where to and what as; integers stay integers.
        pos: positions, as in an edit's ``T``: a number, several, a slice, a span's name, a mask. Each row's real tokens
            count from 0, and all rows must name equally many. Of ``S`` and ``A`` they are queries.
        reduce: names → reductions. What is reduced is not kept whole.
    """

    names: Names = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    pos: Index | None = None
    reduce: Reduce | None = None

    @property
    def plain(self) -> bool:
        """Whether tensors are kept as they are."""
        return self.device is None and self.dtype is None and self.pos is None and not self.reduce


class Keeper:
    """Keeps, of the values that a run shows it, what `Keep` says; everything is checked before the run.

    Raises:
        UnknownTensor: a name, or a glob, that names nothing.
        BadEdit, OutOfRange: positions or reductions that cannot mean what they say.
    """

    def __init__(self, sites: Sites, rows: Rows, tokens: Tensor | None, keep: Keep, in_chunks: bool = True) -> None:
        if keep.dtype is not None and not keep.dtype.is_floating_point:
            raise BadEdit(f"tensors are kept in a floating dtype, not in {keep.dtype}.")
        self.sites, self.rows, self.keep = sites, rows, keep
        self.reductions = self._reductions(keep.reduce or {})
        chosen = () if keep.names is None and keep.reduce else select(sites, keep.names)
        self.names = dict.fromkeys(site for site in chosen if site not in self.reductions)
        self.place: Place | None = None if keep.pos is None else dict(where_of({"T": keep.pos}))["T"]
        self.real = None if keep.pos is None else self._positions()
        self.masks = {
            site: how.masks(rows, self.place) for site, how in self.reductions.items() if isinstance(how, Mean)
        }
        self.cache = Cache(sites, rows=rows, tokens=tokens, pos=self.real)
        self.parts: dict[Site, list[Any]] = {}
        small = (site for site in self.asked if site.tensor in SCORES and (site in self.reductions or keep.pos))
        self.chunks = frozenset(small) if in_chunks else frozenset()
        self.watched = frozenset(self.asked) - self.chunks

    @property
    def asked(self) -> tuple[Site, ...]:
        """All sites that it wants to see."""
        return (*self.names, *self.reductions)

    def _reductions(self, reduce: Reduce) -> dict[Site, Reduction | Mean]:
        made: dict[Site, Reduction | Mean] = {}
        for names, reduction in reduce.items():
            for site in select(self.sites, names):
                if site in made:
                    raise BadEdit(f"{site} is given two reductions.")
                made[site] = check(reduction, site.tensor)
        return {site: made[site] for site in self.sites if site in made}

    def _positions(self) -> Tensor:
        """[B, n]: the real positions that ``pos`` names."""
        found = [self.rows.positions(b, self.place, "pos") for b in range(self.rows.batch)]
        if odd := next((b for b, row in enumerate(found) if len(row) != len(found[0])), None):
            raise BadEdit(
                f"pos names {len(found[0])} positions of row 0 and {len(found[odd])} of row {odd}; a kept tensor has"
                " equally many of each."
            )
        return torch.tensor(found)

    def _axis(self, site: Site) -> int:
        shape = self.sites.node(site).shape
        return shape.index("T" if "T" in shape else "S")

    # ---- seeing ------------------------------------------------------------------------------------------------

    def see(self, site: Site, value: Tensor, made: bool = False) -> None:
        """Keep what is asked of a whole value; ``made``: see `Cache.keep`."""
        if site in self.reductions and site.tensor not in SCORES:
            self._reduce(site, slice(0, self.rows.length), value)
        elif site in self.reductions:
            for queries in query_chunks(value.shape[2]):
                self.see_chunk(site, queries, value[:, :, queries])
        elif site in self.names:
            kept = self._cast(value if self.real is None else self._at(value, self._axis(site)))
            self.cache.keep(site, kept, made or kept is not value)

    def see_chunk(self, site: Site, queries: slice, value: Tensor) -> None:
        """Keep what is asked of a chunk of queries, [B h t S]; chunks come in order."""
        if site in self.reductions:
            self._reduce(site, queries, value)
        elif site in self.names:
            self._collect(site, queries, value)

    def _reduce(self, site: Site, queries: slice, value: Tensor) -> None:
        how, axis = self.reductions[site], self._axis(site)
        parts = self.parts.setdefault(site, [])
        with asking(f"{site}, {how}"):
            if isinstance(how, Mean):
                masks = self.masks[site]
                parts.append({name: how.part(value, mask[:, queries], axis) for name, mask in masks.items()})
            elif site.tensor in SCORES:
                parts.append(_checked(how.f(value), value))
            else:
                parts.append(how.f(value if self.real is None else self._at(value, axis)))
        if queries.stop < self.rows.length:
            return
        del self.parts[site]
        if isinstance(how, Mean):
            means = {name: how.join([p[name] for p in parts], mask) for name, mask in self.masks[site].items()}
            made: Any = means if how.over == "roles" else means[""]
        elif site.tensor not in SCORES:
            made = parts[0]
        else:
            made = joined(parts, axis)
            made = made if self.real is None else mapped(lambda part: self._at(part, axis), made)
        self.cache.keep_reduced(site, mapped(lambda part: own(self._cast(part)), made))

    def _collect(self, site: Site, queries: slice, value: Tensor) -> None:
        """The named queries of a chunk, written to their places among those of all chunks."""
        places = self._places(value.device)
        here = (places >= queries.start) & (places < queries.stop)
        taken = _along_queries((places - queries.start).clamp(0, value.shape[2] - 1), value)
        before = self.parts.get(site)
        made = taken if before is None else torch.where(here[:, None, :, None], taken, before[0])
        self.parts[site] = [made]
        if queries.stop >= self.rows.length:
            del self.parts[site]
            self.cache.keep(site, self._cast(made), made=True)

    def _places(self, device: torch.device) -> Tensor:
        """[B, n]: the named positions as places of the padded batch."""
        assert self.real is not None
        return (self.real + torch.tensor(self.rows.first)[:, None]).to(device)

    def _at(self, value: Tensor, axis: int) -> Tensor:
        """A copy of the named positions alone, along ``axis``; nothing of the whole stays."""
        places = self._places(value.device)
        rows = torch.arange(places.shape[0], device=value.device)[:, None]
        return value.movedim(axis, 1)[rows, places].movedim(1, axis)

    def _cast(self, value: Tensor) -> Tensor:
        if self.keep.device is None and self.keep.dtype is None:
            return value
        return value.to(self.keep.device, self.keep.dtype if value.is_floating_point() else None)


def _along_queries(places: Tensor, value: Tensor) -> Tensor:
    """[B h n S]: the queries at ``places`` [B n] of [B h t S]."""
    index = places[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3])
    return value.gather(2, index)


def _checked(made: Any, chunk: Tensor) -> Any:
    """What a function made of a chunk of queries: tensors that keep the query axis, so that chunks can be joined."""

    def kept(part: Tensor) -> Tensor:
        if part.ndim < 3 or part.shape[2] != chunk.shape[2]:
            raise ShapeMismatch(
                f"scores and patterns are reduced by chunks of queries, here {list(chunk.shape)}; the function must"
                f" keep the queries on axis 2, and returned {list(part.shape)}."
            )
        return part

    if not isinstance(made, Tensor | tuple | list | dict):
        raise ShapeMismatch(f"a function of scores or patterns returns tensors, not {type(made).__name__}.")
    return mapped(kept, made)
