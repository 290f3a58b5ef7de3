"""An edit at work: bound to a site and the rows of a run, it makes the new value from the old one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooks import draws
from hooks.edits import (
    PER_SLOT,
    ROTATED,
    SCORES,
    Add,
    Edit,
    Exclude,
    Force,
    Freeze,
    Function,
    KnockOut,
    Mean,
    Noise,
    Patch,
    Project,
    Resample,
    Scale,
    Set,
    Zero,
    onto,
)
from hooks.where import FEATURE, Mask, Numbers, Place, Rows, Span, along, axis_of, indices, one_hot
from probe.card import Leaf, Step, letters
from probe.dims import DIMS, Dims
from probe.errors import BadEdit, OutOfRange, ShapeMismatch, Unmatched, asking
from probe.moe import in_groups
from probe.numerics import forbidden, rotate, rotation
from probe.sites import Site, Sites
from probe.weights import weight_shape

if TYPE_CHECKING:
    from hooks.dictionary import Dictionary
    from hooks.sources import Source
    from probe.engine import Weights

NO_ROWS = Rows(None, 0, 0)
"""What a weight's edit is bound to: weights have no rows."""

WHOLE = Span(None, None, None)
"""All positions that can be named: a prompt's, without the answer behind it."""

ROUTER = ("W_g", "b", "router_logits", "affinity", "choice_score")
"""What is edited to move the choice of experts, and may leave a token too few."""


class At:
    """An edit at one site of one run. Call it with the value and what the block has shown so far."""

    def __init__(self, edit: Edit, site: Site, sites: Sites, rows: Rows, base: Source | None = None) -> None:
        self.edit, self.site, self.sites, self.rows, self.base = edit, site, sites, rows, base
        self.node: Step | Leaf = sites.node(site)
        self.dims: Dims = sites.dims
        self.where: dict[str, Place] = dict(edit.where)
        self.into = self._into()
        """Readers that alone see it; empty: all do."""
        self.seen: Mapping[str, Tensor] = {}
        self.touched = 0
        """Places that it met when it last acted, and no edit `before` it: entries of its mask before the last axis."""
        self.before: Sequence[At] = ()
        """The edits that were given before it for the same site."""
        self.number = 0
        """Its place among the edits of a run."""
        self.measured: Tensor | None = None
        """The `spread` that it took last; in a step of decoding, the prompt's."""
        self.stretch: slice | None = None
        """Of values that go on before or behind its rows, the columns of these; None: values are of its rows."""
        self.moved = False
        """Whether it takes from other places than those it comes to."""
        self.strange = False
        """Whether what it takes belongs to other positions, or to another text, than where it comes to."""
        self.narrow: Tensor | None = None
        """[B n]: the places that values are of; None: they are of all."""
        self.parts: Sequence[At] = ()
        """Those for whom it acts `together`; empty: for itself."""
        self.among = self._among()
        self._check_bounds()
        self.draw: list[int] = []
        self.came_from: Tensor | None = None
        given = getattr(edit.how, "source", None)
        if given is not None and not hasattr(given, "read" if self.is_weight else "cache"):
            kind = "weights, not from a run" if self.is_weight else "a run or a cache, not from weights"
            raise BadEdit(f"{edit}: what it puts there comes from {kind}.")
        if isinstance(edit.how, Mean):
            self._check_source(edit.how.source)
        if (source := self.source) is not None:
            self._check_source(source)
            by_slot = isinstance(edit.how, Resample) and self.node.name in PER_SLOT
            if by_slot and getattr(edit.how, "rows", None) is not None:
                raise BadEdit(
                    f"{edit}: slots are drawn among all tokens that chose the expert; rows= says nothing there."
                )
            if not by_slot:
                self.draw = self._draw(source)
                self.came_from = self._came_from(source)
        self._check_meaning()

    # ---- what it is bound to -----------------------------------------------------------------------------------

    @property
    def source(self) -> Source | None:
        """The run whose rows this edit takes values of, row by row."""
        how = self.edit.how
        if isinstance(how, Freeze):
            return self.base
        if isinstance(how, Resample) or (isinstance(how, Patch) and not self.is_weight):
            return how.source  # type: ignore[return-value]
        return None

    @property
    def is_weight(self) -> bool:
        """Whether it edits a weight, not an activation."""
        return isinstance(self.node, Leaf) and self.node.kind == "weight"

    @property
    def by_slot(self) -> bool:
        """Whether it must see the chosen experts and their scores to know its slots."""
        if "k" not in self.node.shape or self.node.name == "experts":
            return False
        return isinstance(self.edit.how, Mean | Resample | Patch | Freeze) or bool({"e", "k"} & set(self.where))

    @property
    def adds(self) -> bool:
        """Whether it may put experts behind the k slots: those that only its source chose."""
        return self.node.name == "delta_experts" and self.source is not None

    @property
    def mixes(self) -> bool:
        """Whether what it makes at one position may hang on others."""
        how = self.edit.how
        return (isinstance(how, Function) and not how.position_wise) or (isinstance(how, Noise) and how.relative)

    @property
    def hidden(self) -> bool:
        """Whether none of its places can be seen: all its keys come after its queries, or its mask is empty."""
        return not self.is_weight and not bool(self.real(self.blank, self.where).any())

    @property
    def whole(self) -> bool:
        """Whether nothing of the old value is left for those who read it."""
        return self.edit.how.replaces and not (self.edit.where or self.into or self.edit.within or self.edit.through)

    def _into(self) -> tuple[str, ...]:
        readers = {step.name for step in self.sites.card(self.site.block).readers(self.site.tensor)}
        return () if readers <= set(self.edit.into) else self.edit.into

    def _among(self) -> list[int]:
        """The rows that it acts on."""
        place = self.where.get("B")
        assert not isinstance(place, str | Mask)
        batch = self.rows.batch
        return list(range(batch)) if place is None else indices(place, batch, f"{self.node.name}: B")

    def _check_source(self, source: Source) -> None:
        """Refuse before anything runs: a source of other sizes, or without what will be taken from it."""
        ours, theirs = self.dims, source.cache.dims
        for dim in (dim for dim in DIMS if dim not in "BTS" and getattr(ours, dim) != getattr(theirs, dim)):
            raise BadEdit(
                f"{self.edit}: the source's model has {dim} = {getattr(theirs, dim)}, this one {getattr(ours, dim)}."
            )
        with asking(f"{self.edit}: of the source"):
            value = source.cache[self.site]
            if "k" in self.node.shape and self.node.name != "experts":
                experts = source.cache[Site(self.site.block, "experts")]
                if value.shape[2] != experts.shape[2]:
                    raise BadEdit("edits added experts, of which no number is kept; take a source without that edit.")

    def _check_bounds(self) -> None:
        for dim, place in self.where.items():
            what = f"{self.node.name}: {dim}"
            if dim in "TS":
                self._rows_of(dim).mask(place, what, self.among)
                continue
            assert not isinstance(place, str | Mask)
            indices(place, self._size(dim), f"{what} ({DIMS.get(dim, 'latents of the dictionary')})")

    def _check_meaning(self) -> None:
        """Refuse, before anything runs, what no values could make right: widths, and means and edges that can't be."""
        how, name = self.edit.how, self.node.name
        dtype = torch.int64 if self.node.dtype == "int64" else torch.float32
        value = torch.empty(self.shape, dtype=dtype, device="meta")
        if self.adds and {"k", "d"} & set(self.where):
            raise BadEdit(f"{self.edit}: a contribution is taken whole and by expert; name it by e.")
        if self.edit.through is not None:
            value = self._dictionary(value).encode(value)
        if self.edit.within is not None:
            self.fitting_span(self.edit.within.tensor, value)
        if isinstance(how, Add | Set | Force | Project):
            how.new(value, self)
        if isinstance(how, Patch) and self.is_weight:
            self._check_weight(how.source)
        if isinstance(how, Mean):
            if how.over == "all" and name in (*ROTATED, *SCORES):
                raise BadEdit(f"{self.edit}: {name} belongs to its position; its mean is by position.")
            if self._by_position(how.over):
                self._check_reference(how.source.rows)
        if isinstance(how, Noise) and how.relative and not self.is_weight and self.rows.past is None:
            self._check_spread()
        if isinstance(how, KnockOut):
            self._check_keys_left(self.real(self.blank) & ~self.real(self.blank, self.where))
        excludes = isinstance(how, Set) and name == "choice_score" and bool((how.to.tensor == float("-inf")).all())
        if isinstance(how, Exclude) or excludes:
            left = (~self.mask(self.blank)).sum(-1)
            if int(left.min()) < self.dims.k:
                raise too_few([self], self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it acts on."""
        if isinstance(self.node, Leaf) and self.is_weight:
            return weight_shape(self.node, self.dims)
        return self.rows.shape(self.node, self.dims)

    @property
    def blank(self) -> Tensor:
        """A value of that shape without content, for masks."""
        return torch.zeros(()).expand(self.shape)

    def _rows_of(self, dim: str) -> Rows:
        """The rows that a position dim counts: of scores, S counts the keys, which a step of decoding has more of."""
        return self.rows.keys if dim == "S" and self.node.name in SCORES else self.rows

    def _size(self, dim: str) -> int:
        if dim == "B":
            return self.rows.batch
        if dim == FEATURE:
            assert self.edit.through is not None
            return self.edit.through.features
        return self.dims.size(dim)

    # ---- acting ------------------------------------------------------------------------------------------------

    def __call__(self, value: Tensor, seen: Mapping[str, Tensor]) -> Tensor:
        """The edited value; ``value`` itself is left as it was. ``seen`` holds the block's ``experts`` and
        ``choice_score``."""
        self.seen = self.cut_seen(seen)
        if self.stretch is None:
            return self._made(value)
        part = self.cut(value)
        made = self._made(part)
        more = made.shape[2] - part.shape[2] if self.adds else 0  # slots for experts that only the source chose
        out = (
            torch.cat([value, value.new_zeros(*value.shape[:2], more, *value.shape[3:])], 2) if more else value.clone()
        )
        self.cut(out).copy_(made)
        return out

    def cut(self, value: Tensor) -> Tensor:
        """Of a longer value, that of its rows; a view."""
        if self.stretch is None:
            return value
        if self.node.name in SCORES:
            return value[:, :, self.stretch, : self.stretch.stop]
        return value[:, self.stretch]

    def cut_seen(self, seen: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What its block has shown, on its rows."""
        return seen if self.stretch is None else {name: value[:, self.stretch] for name, value in seen.items()}

    def _made(self, value: Tensor) -> Tensor:
        """The edited value, on its own rows."""
        if self.node.name == "delta_experts" and value.shape[2] > self.dims.k:  # an edit before has added experts
            k = self.dims.k
            return torch.cat([self._made(value[:, :, :k]), value[:, :, k:]], dim=2)
        mask = self.mask(value)
        met = mask.any(-1)
        for at in self.before:
            met = met & ~at.mask(value).any(-1)
        self.touched = int(met.sum())
        for at, met in zip(self.parts, mask.chunk(max(1, len(self.parts)), dim=min(1, mask.ndim - 1)), strict=False):
            at.touched = int(met.any(-1).sum())
        if self.edit.through is not None:
            return self._through(value, mask)
        new = self.edit.how.new(value, self)
        if self.edit.within is not None:
            span = self.fitting_span(self.edit.within.tensor, value)
            old = (
                torch.cat([value, torch.zeros_like(new[:, :, value.shape[2] :])], 2)
                if new.shape != value.shape
                else value
            )
            new = old + onto(new - old, span)
        if new.shape == value.shape:
            made = torch.where(mask, new, value)
            return self._rescaled(made, value) if isinstance(self.edit.how, Zero) and self.edit.how.renorm else made
        k = value.shape[2]  # delta_experts, with experts that only the source chose behind the k slots
        return torch.cat([torch.where(mask, new[:, :, :k], value), new[:, :, k:]], dim=2)

    @cached_property
    def window(self) -> Tensor | None:
        """[B n]: the places of the padded batch that it changes, where each is made on its own and every row has as
        many; None: it must see all."""
        place = self.where.get("T", self.where.get("S"))
        alone = isinstance(self.edit.how, Zero | Patch | Resample | Freeze | Scale | Add) and not self.is_weight
        if not alone or place is None or self.node.name in SCORES or "B" in self.where:
            return None
        if isinstance(self.edit.how, Add) and self.edit.how.direction.tensor.ndim > len(self.node.shape) - 2:
            return None
        rows = self.rows
        places = [
            [rows.first[b] + p for p in sorted(set(rows.positions(b, place, self.node.name)))] for b in self.among
        ]
        return torch.tensor(places) if len({len(some) for some in places}) == 1 else None

    @cached_property
    def kind(self) -> Hashable | None:
        """What edits have in common that differ in nothing but the positions they name; None: it stands alone."""
        if "k" in self.node.shape or self.moved or self.strange or self.edit.through is not None or self.window is None:
            return None
        others = tuple((dim, place) for dim, place in self.edit.where if dim not in "TS")
        return self.edit.how, others, self.edit.within, self.window.shape[1]

    def together(self, ats: Sequence[At], places: Tensor) -> At:
        """One edit that does what several of one `kind` do, on values [B n ·] of all their windows side by side;
        ``places`` are these, [B n]. What each touches is counted."""
        joined = copy(self)
        joined.where = (
            {dim: place for dim, place in self.where.items() if dim not in "TS"} if len(ats) > 1 else self.where
        )
        joined.narrow = places.cpu()
        if self.came_from is not None:
            joined.came_from = torch.stack([at.came_from for at in ats if at.came_from is not None]).amax(0)
        joined.parts = ats
        return joined

    def _rescaled(self, gates: Tensor, before: Tensor) -> Tensor:
        """Each token's gates, grown to the sum that they had; a token that has lost all keeps none."""
        left = gates.sum(-1, keepdim=True)
        return torch.where(left > 0, gates * (before.sum(-1, keepdim=True) / left.clamp(min=1e-20)), gates)

    def _through(self, value: Tensor, mask: Tensor) -> Tensor:
        """The edit of a dictionary's latents: value + decode(new) − decode(old), only where some latent changed."""
        dictionary = self._dictionary(value)
        z = dictionary.encode(value)
        features = self.where.get(FEATURE)
        chosen = torch.ones(dictionary.features, dtype=torch.bool)
        if features is not None:
            assert not isinstance(features, str | Mask)
            chosen = one_hot(features, dictionary.features, "feature")
        at = mask.any(-1, keepdim=True) & chosen.to(mask.device)
        new = torch.where(at, self.edit.how.new(z, self), z)
        change = dictionary.decode(new) - dictionary.decode(z)
        return torch.where((new != z).any(-1, keepdim=True), (value.float() + change).to(value.dtype), value)

    def _dictionary(self, value: Tensor) -> Dictionary:
        """The dictionary that it goes through, if it is one of the value's last axis."""
        dictionary = self.edit.through
        assert dictionary is not None
        if dictionary.W_enc.shape[0] != value.shape[-1] or dictionary.W_dec.shape[-1] != value.shape[-1]:
            raise ShapeMismatch(
                f"{self.edit}: its dictionary reads {dictionary.W_enc.shape[0]} and writes"
                f" {dictionary.W_dec.shape[-1]}; {self.site} is {value.shape[-1]} wide."
            )
        return dictionary

    # ---- where -------------------------------------------------------------------------------------------------

    def mask(self, value: Tensor) -> Tensor:
        """Where it acts, in the value's shape: real positions, allowed (query, key) pairs, and what ``where`` names."""
        mask = self.real(value, self.where)
        shape = self.node.shape
        for dim, place in self.where.items():
            if dim in "TS" or dim == FEATURE:
                continue
            assert not isinstance(place, str | Mask)
            if dim == "B":
                continue  # `real` leaves other rows out
            if dim in ("e", "k") and "k" in shape:
                mask = mask & self._slot_mask(dim, place, value)
            else:
                mask = mask & self._feature_mask(dim, place, value).to(mask.device)
        return mask.expand(value.shape)

    def real(self, value: Tensor, where: Mapping[str, Place] | None = None) -> Tensor:
        """Real positions (those that ``where`` names), and of scores the visible pairs; in the value's shape."""
        where = where or {}
        mask = torch.ones([1] * value.ndim, dtype=torch.bool)
        for dim in ("T", "S"):
            if dim in self.node.shape:
                places = self._rows_of(dim).mask(where.get(dim), f"{self.node.name}: {dim}", self.among)
                places = places if self.narrow is None else places.gather(1, self.narrow)
                mask = mask & along(places, self.node.shape.index(dim), value.ndim)
        if self.node.name in SCORES:
            queries, keys = value.shape[-2:]
            mask = mask & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            if (starts := self.rows.starts) is not None:
                mask = mask & (torch.arange(keys) >= starts[:, None, :, None])
        return mask.to(value.device)

    def _slot_mask(self, dim: str, place: Numbers, value: Tensor) -> Tensor:
        """Slots by the expert that they hold, or by rank of falling choice score."""
        held = self.seen["experts"] if dim == "e" else _slot_ranks(self.seen)
        named = torch.tensor(indices(place, self._size(dim), dim), device=held.device)
        return _on_slots(torch.isin(held, named), value)

    def _feature_mask(self, dim: str, place: Numbers, value: Tensor) -> Tensor:
        """One dim of the model, alone on its axis or part of a composite one."""
        axis = axis_of(self.node, dim)
        parts = letters(self.node.shape[axis])
        sizes = [1 if p == "1" else self.dims.size(p) for p in parts]
        chosen = one_hot(place, self.dims.size(dim), dim)
        spread = [chosen.shape[0] if p == dim else 1 for p in parts]
        return along(chosen.view(spread).expand(sizes).reshape(-1), axis, value.ndim)

    def reach(self, block: int, rows: Rows) -> Tensor:
        """[B, T]: the real positions of a run at which it can change what a block's router chooses."""
        card = self.sites.card(self.site.block)
        below = {self.site.tensor} | card.descendants([self.site.tensor])
        depth = self.sites.depth(self.site)
        if block < depth or (block == depth and "experts" not in below):
            return torch.zeros(rows.batch, rows.length, dtype=torch.bool)
        if self.is_weight:
            return rows.mask(None, "T")
        named = rows.mask(self.where.get("T", self.where.get("S")), "T", self.among)
        read_as_keys = self.site.tensor in card.key_side or ("S" in self.where and "T" not in self.where)
        if block == self.site.block and not read_as_keys:
            return named
        return rows.mask(None, "T", self.among) & rows.onward(named)

    # ---- values of other runs ----------------------------------------------------------------------------------

    def _draw(self, source: Source) -> list[int]:
        """For each row, the source row that it takes from."""
        lengths, theirs = self.rows.lengths, source.rows.lengths
        rows = getattr(self.edit.how, "rows", None)
        if rows is not None:
            if len(rows) != self.rows.batch:
                raise BadEdit(f"{self.edit}: rows names {len(rows)} source rows for {self.rows.batch} rows.")
            return indices(rows, source.rows.batch, "the source's rows")
        if not isinstance(self.edit.how, Resample):
            if source.rows.batch not in (1, self.rows.batch):
                raise BadEdit(
                    f"{self.edit}: the source has {source.rows.batch} rows for {self.rows.batch}; say which by rows=."
                )
            return list(range(self.rows.batch)) if source.rows.batch > 1 else [0] * self.rows.batch
        bits = draws.hashed(self.rows.prompts, self.edit.how.seed)
        drawn = []
        for b, length in enumerate(lengths):
            fits = [j for j in source.rows.in_order if theirs[j] >= length or b not in self.among]
            if not fits:
                raise BadEdit(f"{self.edit}: no reference prompt has the {length} tokens of row {b}; give longer ones.")
            if b in self.among:
                here = self._here(b)
                fits = [j for j in fits if self._at_home(source.rows, b, j, here, here)]
            if not fits:
                raise BadEdit(self._strange_reference)
            drawn.append(fits[int(draws.below(bits[b], len(fits)))])
        return drawn

    def _came_from(self, source: Source) -> Tensor:
        """[B, T]: for each place of the padded batch, the place in the source's row that it takes from."""
        dim = "T" if "T" in self.node.shape else "S"
        place = self.where.get(dim)
        places = dict(getattr(self.edit.how, "places", ()))
        if places and place is None:
            raise BadEdit(f"{self.edit}: source_T goes with {dim}, position by position.")
        theirs: Place | None = places.get(
            "T", place if isinstance(place, str) and isinstance(self.edit.how, Patch) else None
        )
        table = torch.zeros(self.rows.batch, self.rows.length, dtype=torch.long)
        for b in self.among:
            first, j = self.rows.first[b], self.draw[b]
            here = self._here(b)
            there = (
                here if theirs is None else source.rows.positions(j, theirs, f"{self.node.name}: the source's {dim}")
            )
            if len(here) != len(there):
                raise BadEdit(
                    f"{self.edit}: row {b} names {len(here)} positions here and {len(there)} in the source;"
                    " of spans of unequal length name one token, like subject[-1]."
                )
            if too_far := [p for p in there if p >= source.rows.lengths[j]]:
                raise BadEdit(
                    f"{self.edit}: source row {j} has {source.rows.lengths[j]} tokens, so it has no position"
                    f" {too_far[0]} for row {b}; nothing lies beyond its last."
                )
            self.moved = self.moved or here != there
            self.strange = self.strange or not self._at_home(source.rows, b, j, here, there)
            taken = [source.rows.first[j] + p for p in there]  # none, where a mask names others
            table[b, [first + p for p in here]] = torch.tensor(taken, dtype=torch.long)
        self._check_moved()
        if self.node.name in SCORES:  # keys are taken from their own positions, named or not
            shift = torch.tensor([source.rows.first[j] - f for f, j in zip(self.rows.first, self.draw, strict=True)])
            whole = torch.arange(self.rows.length)[None, :] + shift[:, None]
            return whole.clamp(0, source.rows.length - 1)
        return table

    def _here(self, b: int) -> list[int]:
        """The real positions of a row that it acts on."""
        dim = "T" if "T" in self.node.shape else "S"
        return self.rows.positions(b, self.where.get(dim), f"{self.node.name}: {dim}")

    def _at_home(self, theirs: Rows, b: int, j: int, here: Sequence[int], there: Sequence[int]) -> bool:
        """Whether what stands at positions ``there`` of a source's row j belongs to ``here`` in row b: a rotated tensor
        to its position id, scores to the keys of a text that begins where this one does, all else to any place."""
        if self.node.name not in (*ROTATED, *SCORES):
            return True
        if self.rows.counted and theirs.counted:
            return here == there
        ours, other = (r.position_ids if self.node.name in ROTATED else r.begun for r in (self.rows, theirs))
        mine, yours = ([r.first[row] + p for p in some] for r, row, some in ((self.rows, b, here), (theirs, j, there)))
        return torch.equal(ours[b, mine], other[j, yours])

    @property
    def _strange_reference(self) -> str:
        what = (
            "holds its position's rotation, and the source has other positions there; run it at these"
            if self.node.name in ROTATED
            else "is over the keys of its own text, and the source's begins elsewhere; pack it alike"
        )
        return f"{self.edit}: {self.node.name} {what}."

    def _check_moved(self) -> None:
        name, rotated = self.node.name, self.node.name in ROTATED
        if name in SCORES and self.moved:
            raise BadEdit(f"{self.edit}: {name} belongs to its positions, and can't be moved to others.")
        if not self.strange or (rotated and getattr(self.edit.how, "rotate", None) is not None):
            return
        if rotated and isinstance(self.edit.how, Patch):
            raise BadEdit(
                f"{self.edit}: {name} holds its position's rotation; from another position say"
                ' rotate="redo" (take the unrotated part and turn it here) or "keep".'
            )
        raise BadEdit(self._strange_reference)

    def held(self, source: Source, name: str) -> Tensor:
        """A source's value of a tensor of this block; its latents, where the edit goes through a dictionary.

        Raises:
            UnknownTensor: it was not kept.
        """
        value = source.cache[Site(self.site.block, name)]
        if self.edit.through is not None and name == self.node.name:
            return self.edit.through.encode(value)
        return value

    def taken(self, source: Any, value: Tensor) -> Tensor:
        """The source's values, each in its place here: rows drawn, positions aligned, slots matched by expert."""
        if self.is_weight:
            weight: Tensor = source.read(self.site.block, self.site.tensor)
            return weight.to(value.device, value.dtype)
        name = self.node.name
        if name == "delta_experts":
            return self._contributions(source, value)
        if name in PER_SLOT:
            return self._matched_slots(source, value)
        if name in ROTATED and self.strange and getattr(self.edit.how, "rotate", None) == "redo":
            return self._turned_here(source, value)
        return self._aligned(source, name, value)

    def _aligned(self, source: Source, name: str, value: Tensor | None = None) -> Tensor:
        taken = self.held(source, name)
        draw = torch.tensor(self.draw, device=taken.device)
        assert self.came_from is not None
        if self.narrow is not None:
            return self._like(taken[draw[:, None], self.came_from.gather(1, self.narrow).to(taken.device)], value)
        taken = taken[draw]
        shape = self.sites.card(self.site.block).shape(name)
        for dim in ("T", "S"):
            if dim in shape:
                axis = shape.index(dim)
                index = along(self.came_from.to(taken.device), axis, taken.ndim)
                sizes = list(taken.shape)
                sizes[axis] = self.rows.length
                taken = taken.gather(axis, index.expand(sizes))
        return self._like(taken, value)

    def _like(self, taken: Tensor, value: Tensor | None) -> Tensor:
        """A source's value, if it can stand for ours; in its dtype and on its device."""
        if value is None:
            return taken
        if taken.shape != value.shape:
            raise ShapeMismatch(
                f"{self.edit}: the source's {self.site} is {list(taken.shape)}, here it is {list(value.shape)}."
            )
        return taken.to(value.device, value.dtype)

    def _turned_here(self, source: Source, value: Tensor) -> Tensor:
        """The unrotated parts of the source, turned to the positions that they come to."""
        device, ids = value.device, self.rows.position_ids
        if self.narrow is not None:
            ids = ids.gather(1, self.narrow)
        R = rotation(ids.to(device), self.dims, value.dtype)
        name = self.node.name
        turned = rotate(self._aligned(source, "Q_pe" if name[0] == "Q" else "k_pe").to(device, value.dtype), R)
        if name in ("Q_R", "k_R"):
            return turned
        content = self._aligned(source, "Q_C" if name == "Q" else "K_C").to(device, value.dtype)
        if name == "K":
            turned = turned.unsqueeze(-2).expand(*content.shape[:-1], -1)
        return torch.cat([content, turned], dim=-1)

    def _matched_slots(self, source: Source, value: Tensor) -> Tensor:
        """Slots by expert: each takes the source's value of the same expert at the same token."""
        ours = self.seen["experts"]
        theirs = self._aligned(source, "experts").to(ours.device)
        same = ours[..., :, None] == theirs[..., None, :]
        missing = ~same.any(-1) & self.mask(value).flatten(2).view(*ours.shape, -1).any(-1)
        if bool(missing.any()):
            b, t, i = (int(x) for x in missing.nonzero()[0])
            raise Unmatched(
                f"{self.edit}: the source did not choose expert {int(ours[b, t, i])} of block"
                f" {self.site.block} in row {b} at position"
                f" {t - self.rows.first[b]}, so it has no {self.node.name} of it; patch delta_experts."
            )
        slot = same.to(torch.uint8).argmax(-1)
        taken = self._aligned(source, self.node.name).to(value.device, value.dtype)
        return taken.gather(2, _on_slots(slot, value).expand(*slot.shape, *taken.shape[3:]))

    def _contributions(self, source: Source, value: Tensor) -> Tensor:
        """What experts add, matched by expert; those that only the source chose stand behind the k slots."""
        ours = self.seen["experts"]
        theirs = self._aligned(source, "experts").to(ours.device)
        taken = self._aligned(source, "delta_experts").to(value.device, value.dtype)
        same = ours[..., :, None] == theirs[..., None, :]
        out = torch.einsum("btkj,btjd->btkd", same.to(value.dtype), taken)
        named = torch.ones_like(theirs, dtype=torch.bool)
        if "e" in self.where:
            place = self.where["e"]
            assert not isinstance(place, str | Mask)
            named = torch.isin(theirs, torch.tensor(indices(place, self.dims.e, "e"), device=theirs.device))
        added = ~same.any(-2) & named & self._positions().to(same.device)
        if not bool(added.any()):
            return out
        for at in (self, *self.parts):
            at.touched += int(added.sum())
        return torch.cat([out, taken * added[..., None]], dim=2)

    def _positions(self) -> Tensor:
        """[B, T, 1]: the rows and positions that the edit names, whatever it says of slots."""
        named = self.rows.mask(self.where.get("T"), f"{self.node.name}: T", self.among)
        return (named if self.narrow is None else named.gather(1, self.narrow))[..., None]

    def overlaps(self, other: At, value: Tensor) -> bool:
        """Whether both name some same part of ``value``, or the contribution of an expert that may join it."""
        if self.stretch != other.stretch:
            return False
        value = self.cut(value)
        if bool((self.mask(value) & other.mask(value)).any()):
            return True
        return (self.adds or other.adds) and bool((self._may_add() & other._may_add()).any())

    def _may_add(self) -> Tensor:
        """[B, T, e]: the contributions that a place in ``delta_experts`` names, whichever experts are chosen."""
        place = self.where.get("e")
        assert not isinstance(place, str | Mask)
        named = torch.full((self.dims.e,), "k" not in self.where)  # k names slots, so chosen experts alone
        return self._positions() & (named if place is None else one_hot(place, self.dims.e, "e") & named)

    def random_slots(self, source: Source, value: Tensor, seed: int) -> Tensor:
        """Each slot's value from a random reference token that chose the same expert."""
        theirs, pool = source.cache[Site(self.site.block, "experts")], self.held(source, self.node.name)
        real = source.rows.mask(None, "T").to(theirs.device)[..., None]
        bits = draws.hashed(self._texts(), seed)
        out, ours = value.clone(), self.seen["experts"]
        slots = self.mask(value).flatten(2).view(*ours.shape, -1).any(-1)
        for e in torch.unique(ours[slots]).tolist():
            found = ((theirs == e) & real).nonzero()
            if not len(found):
                raise Unmatched(f"{self.edit}: no reference token chose expert {e} of block {self.site.block}.")
            if source.rows.content is not None:
                found = found[source.rows.texts[*found[:, :2].cpu().T].argsort(stable=True).to(found.device)]
            here = slots & (ours == e)
            drawn = draws.below(draws.hashed(bits[*here.nonzero()[:, :2].cpu().T], e), len(found))
            pick = found[drawn.to(found.device)].to(pool.device)
            out[here] = pool[*pick.T].to(value.device, value.dtype)
        return out

    def mean_of(self, source: Source, value: Tensor, over: str | None) -> Tensor:
        """The mean over a reference set, in the value's shape; see `hooks.edits.mean`."""
        pool = self.held(source, self.node.name)
        if "k" in self.node.shape:
            return self._mean_by_expert(source, pool, value)
        real = source.rows.mask(None, "T").to(pool.device)
        if not self._by_position(over):
            return pool[real].float().mean(0).to(value.device, value.dtype).expand(value.shape)
        return self._mean_by_position(source, pool, real).to(value.device, value.dtype)

    def _by_position(self, over: str | None) -> bool:
        """Whether a mean is taken position by position."""
        return "k" not in self.node.shape and (over == "position" or self.node.name in (*ROTATED, *SCORES))

    def _check_reference(self, rows: Rows) -> None:
        """A mean by position needs a reference prompt that reaches as far."""
        longest, place = max(rows.lengths), self.where.get("T", self.where.get("S"))
        asked = max(1 + max(self.rows.positions(b, place, self.node.name)) for b in self.among)
        if asked > longest:
            raise BadEdit(
                f"{self.edit}: the longest reference prompt has {longest} tokens; of a row here {asked} are asked for."
            )
        for b in () if self.rows.counted and rows.counted else self.among:
            for j, length in enumerate(rows.lengths):
                here = [p for p in self._here(b) if p < length]
                if not self._at_home(rows, b, j, here, here):
                    raise BadEdit(self._strange_reference)

    def _mean_by_expert(self, source: Source, pool: Tensor, value: Tensor) -> Tensor:
        theirs = source.cache[Site(self.site.block, "experts")]
        real = source.rows.mask(None, "T").to(theirs.device)[..., None]
        out, ours = value.clone(), self.seen["experts"]
        slots = self.mask(value).flatten(2).view(*ours.shape, -1).any(-1)
        for e in torch.unique(ours[slots]).tolist():
            chosen = (theirs == e) & real
            if not bool(chosen.any()):
                raise Unmatched(f"{self.edit}: no reference token chose expert {e} of block {self.site.block}.")
            out[slots & (ours == e)] = pool[chosen].float().mean(0).to(value.device, value.dtype)
        return out

    def _mean_by_position(self, source: Source, pool: Tensor, real: Tensor) -> Tensor:
        """[B, T, …]: at each real position, the mean over the reference rows that have it."""
        longest = max(source.rows.lengths)
        places = torch.arange(longest)[None, :] + torch.tensor(source.rows.first)[:, None]
        there = torch.arange(longest)[None, :] < torch.tensor(source.rows.lengths)[:, None]
        places = places.clamp(max=source.rows.length - 1).to(pool.device)
        here = (torch.arange(self.rows.length)[None, :] - torch.tensor(self.rows.first)[:, None]).clamp(0, longest - 1)
        axes = [self.node.shape.index(dim) for dim in ("T", "S") if dim in self.node.shape]
        weight = torch.ones([1] * pool.ndim, device=pool.device)
        for axis in axes:
            sizes = list(pool.shape)
            sizes[axis] = longest
            pool = pool.gather(axis, along(places, axis, pool.ndim).expand(sizes))
            weight = weight * along(there.to(pool.device), axis, pool.ndim)
        mean = (pool.float() * weight).sum(0, keepdim=True) / weight.sum(0, keepdim=True).clamp(min=1)
        mean = mean.expand(self.rows.batch, *mean.shape[1:])
        for axis in axes:
            sizes = list(mean.shape)
            sizes[axis] = self.rows.length
            mean = mean.gather(axis, along(here.to(pool.device), axis, mean.ndim).expand(sizes))
        return mean

    def _check_weight(self, source: Any) -> None:
        assert isinstance(self.node, Leaf), "only weights are patched from weights"
        theirs = weight_shape(self.node, source.dims)
        if theirs != self.shape:
            raise ShapeMismatch(
                f"{self.edit}: the source's {self.site} is {list(theirs)}, here it is {list(self.shape)}."
            )

    # ---- checks that edits ask for -----------------------------------------------------------------------------

    def bits(self, value: Tensor, seed: int) -> Tensor:
        """What to draw each number of a value from: it hangs on the seed, the text up to the number's position (of
        scores, the query's), and the number's place there; of a weight, on the seed and its place."""
        if self.is_weight:
            return draws.hashed(torch.arange(value.numel()).view(value.shape), seed)
        if self.node.name in SCORES:
            heads = torch.arange(value.shape[1])[:, None, None]
            keys = self._rows_of("S")
            real = torch.arange(keys.length) - torch.tensor(keys.first)[:, None] - keys.begun  # of its text, from 0
            return draws.hashed(along(self._texts(), 2, 4), seed, along(real, 3, 4) * len(heads) + heads)
        places = torch.arange(value[0, 0].numel()).view(1, 1, *value.shape[2:])
        return draws.hashed(along(self._texts(), 1, value.ndim), seed, places)

    def _texts(self) -> Tensor:
        """[B n], the texts of the places that values are of."""
        return self.rows.texts if self.narrow is None else self.rows.texts.gather(1, self.narrow)

    def spread(self, value: Tensor) -> Tensor:
        """Each text's own standard deviation, over its prompt's tokens and visible keys, at each of its positions; of a
        weight, over all of it."""
        if self.is_weight:
            return value.float().std()
        axis = 2 if self.node.name in SCORES else 1
        if self.rows.past is not None and self.measured is not None:
            return self.measured.narrow(axis, self.measured.shape[axis] - 1, 1)
        mask = self.real(value, dict.fromkeys("TS", WHOLE)).expand(value.shape).movedim(axis, 1).flatten(2)
        numbers = torch.where(mask, value.float().movedim(axis, 1).flatten(2), 0.0)
        n = self._of_text(mask.sum(-1))
        means = self._of_text(numbers.sum(-1)) / n
        squares = torch.where(mask, numbers - means[..., None], 0.0) ** 2
        self.measured = along((self._of_text(squares.sum(-1)) / (n - 1)).sqrt(), axis, value.ndim)
        return self.measured

    def _of_text(self, each: Tensor) -> Tensor:
        """[B T], numbers of positions → the sum over its text, at each position."""
        starts = torch.zeros(each.shape, dtype=torch.long) if self.rows.starts is None else self.rows.starts
        starts = starts.to(each.device)
        return torch.zeros_like(each).scatter_add(1, starts, each).gather(1, starts)

    def _check_spread(self) -> None:
        """A spread is of two numbers or more."""
        places = self.rows.mask(WHOLE, f"{self.node.name}: T", self.among)
        each = self.blank.shape[1] if self.node.name in SCORES else self.blank[0, 0].numel()
        alone = (self._of_text(places.long()) == 1) & places
        if each == 1 and bool(alone.any()):
            b, t = (int(x) for x in alone.nonzero()[0])
            raise BadEdit(
                f"{self.edit}: position {t - self.rows.first[b]} of row {b} is a text of one token, where"
                f" {self.node.name} has one number, and so no spread; give std= itself, or leave the row out (B=)."
            )

    def fitting(self, given: Tensor, value: Tensor, what: str) -> Tensor:
        """What the user gave, if it broadcasts over the value; in its dtype and on its device."""
        try:
            fits = torch.broadcast_shapes(given.shape, value.shape) == value.shape
        except RuntimeError:
            fits = False
        if not fits:
            dims = " ".join(self.node.shape)
            raise ShapeMismatch(
                f"{self.edit}: {what} is {list(given.shape)}, {self.site} [{dims}] = {list(value.shape)}."
            )
        if value.dtype == torch.int64:
            self._check_experts(given)
        return given.to(value.device, value.dtype)

    def _check_experts(self, given: Tensor) -> None:
        whole = given.expand(*given.shape[:-1], self.dims.k) if given.ndim else given.expand(self.dims.k)
        ordered = whole.sort(-1).values
        if bool((whole < 0).any() | (whole >= self.dims.e).any()):
            raise OutOfRange(f"{self.edit}: experts are 0 to {self.dims.e - 1}.")
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise BadEdit(f"{self.edit}: an expert is named twice for one token.")

    def fitting_span(self, span: Tensor, value: Tensor) -> Tensor:
        """A subspace, if it is one of the value's last axis."""
        if span.shape[-1] != value.shape[-1]:
            raise ShapeMismatch(
                f"{self.edit}: directions of width {span.shape[-1]}; {self.site} is {value.shape[-1]} wide."
            )
        return span

    def check_fits(self, made: Any, value: Tensor, who: str) -> None:
        """What a function returned must have the value's shape, dtype and device."""
        if not isinstance(made, Tensor):
            raise ShapeMismatch(f"{self.site}: {who} returned {type(made).__name__}, not a tensor.")
        if (made.shape, made.dtype, made.device) != (value.shape, value.dtype, value.device):
            dims = " ".join(self.node.shape)
            raise ShapeMismatch(
                f"{self.site} should be [{dims}] = {list(value.shape)}, {value.dtype} on {value.device};"
                f" {who} returned {list(made.shape)}, {made.dtype} on {made.device}."
            )

    def check_rows_keep_a_key(self, scores: Tensor) -> None:
        """After knock-outs, each query must have a key left."""
        self._check_keys_left(scores > forbidden(scores.dtype) / 2)

    def _check_keys_left(self, left: Tensor) -> None:
        real = self.rows.mask(None, "T", self.among).to(left.device)[:, None, :]
        blind = ~left.any(-1) & real
        if bool(blind.any()):
            b, _, t = (int(x) for x in blind.nonzero()[0])
            raise BadEdit(f"{self.edit}: a head has no key left at position {t - self.rows.first[b]} of row {b}.")


def _on_slots(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (value.ndim - 3))


def _slot_ranks(seen: Mapping[str, Tensor]) -> Tensor:
    """Each slot's rank by falling choice score: 0 the best."""
    score = seen["choice_score"].gather(-1, seen["experts"])
    return torch.argsort(torch.argsort(score, dim=-1, descending=True, stable=True), dim=-1)


class EditedWeights:
    """Weights with edits: each is made anew where it is read, and the ones underneath stay as they are."""

    def __init__(self, weights: Weights, edits: Sequence[At]) -> None:
        self.weights, self.dims, self.resident = weights, weights.dims, weights.resident
        self.edits: dict[tuple[int | None, str], list[At]] = {}
        for at in edits:
            self.edits.setdefault(at.site, []).append(at)

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        """As the weights underneath, edited. An edited routed weight is read whole, then its rows are taken."""
        edits = self.edits.get((block, name))
        if edits is None:
            return self.weights.read(block, name, experts)
        value = self.weights.read(block, name)
        for at in edits:
            value = at(value, {})
        return value if experts is None else value[list(experts)]


def bound(edits: Sequence[Edit], sites: Sites, rows: Rows, base: Source | None) -> list[At]:
    """Every edit at every site where it acts.

    Raises:
        BadEdit: an edit cannot mean what it says there.
    """
    first = first_edited(edits, sites)
    made = []
    for number, edit in enumerate(edits):
        for site in edit.sites(sites, first):
            leaf = sites.node(site)
            on_weight = isinstance(leaf, Leaf) and leaf.kind == "weight"
            if on_weight and (edit.into or edit.through or isinstance(edit.how, Mean | Resample | Freeze)):
                raise BadEdit(
                    f"{edit}: a weight has no readers to choose, no rows and no base; zero, scale, set, add, patch it."
                )
            made.append(At(edit, site, sites, NO_ROWS if on_weight else rows, base))
            made[-1].number = number
    for site in dict.fromkeys(at.site for at in made):
        some = [at for at in made if at.site == site]
        for i, at in enumerate(some):
            at.before = some[:i]
        if len(some) > 1 and not any(at.by_slot for at in some):
            check_overlap(some, some[0].blank, {})
    return made


def first_edited(edits: Sequence[Edit], sites: Sites) -> int:
    """The first block that an edit (not a freeze) acts in; 0 where there is none, or where the embedding is edited."""
    found = [site for edit in edits if not isinstance(edit.how, Freeze) for site in edit.sites(sites)]
    return max(0, min(map(sites.depth, found), default=0))


def acted(value: Tensor, edits: Sequence[At], seen: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """A value through the edits at its site: what all readers see; what those see that ``into`` names, each its own;
    and of these the last one's, which is shown. Readers share a value until an edit parts them: none acts twice on it.
    """
    by_reader = dict.fromkeys(("", *(name for at in edits for name in at.into)), value)
    shown = ""
    for at in edits:
        made: dict[int, Tensor] = {}
        for reader in at.into or by_reader:
            old = by_reader[reader]
            if id(old) not in made:
                made[id(old)] = at(old, seen)
            by_reader[reader] = made[id(old)]
        shown = at.into[-1] if at.into else shown
    last = by_reader[shown]
    return by_reader.pop(""), by_reader, last


def check_overlap(edits: Sequence[At], value: Tensor, seen: Mapping[str, Tensor]) -> None:
    """Refuse two replacing edits on the same values of a site, or one after a change of them: the second would undo
    the first."""
    for i, at in enumerate(edits):
        at.seen = at.cut_seen(seen)
        if not at.edit.how.replaces or at.edit.through is not None:
            continue
        for other in edits[:i]:
            if at.overlaps(other, value) and not _apart(at.edit, other.edit):
                raise BadEdit(
                    f"{other.edit} and {at.edit} overlap: the second replaces values of {at.site} that the first made."
                )


def _apart(one: Edit, other: Edit) -> bool:
    """Whether two edits reach different readers, or orthogonal subspaces."""
    if one.into and other.into and not set(one.into) & set(other.into):
        return True
    if one.within is not None and other.within is not None:
        return bool((one.within.tensor @ other.within.tensor.T).abs().max() < 1e-5)
    return False


def short_of_experts(scores: Tensor, dims: Dims) -> Tensor:
    """Of choice scores [B T e], [B T]: true where a token must take an expert that its scores or its groups forbid."""
    open_ = in_groups(scores, dims.n_group, dims.topk_group)
    return ~(open_.topk(dims.k, dim=-1).values > float("-inf")).all(-1)  # NaN too: what was forbidden, times 0


def too_few(edits: Iterable[At], dims: Dims) -> BadEdit:
    """What edits of the router are refused with that leave a token `short_of_experts`."""
    named = " and ".join(dict.fromkeys(str(at.edit) for at in edits))
    among = f" in the {dims.topk_group} best of {dims.n_group} groups" if dims.n_group > 1 else ""
    return BadEdit(f"{named}: fewer than {dims.k} experts are left to choose from{among}; leave more.")


def check_seen(applied: Sequence[At]) -> None:
    """Refuse edges that aren't there, and a mask that names nothing. (A cell of a sweep may be such, in a grid; and
    other edits of S and A say by ``touched`` what they met.)

    Raises:
        BadEdit: an edit would silently do nothing.
    """
    for at in applied:
        edge = isinstance(at.edit.how, KnockOut)
        if (edge or at.node.name not in SCORES) and at.hidden:
            why = "none of its queries sees any of its keys, which come later" if edge else "its mask names no position"
            raise BadEdit(f"{at.edit} would do nothing: {why}.")


def check_no_cut(applied: Sequence[At], sites: Sites) -> None:
    """Refuse an edit all of whose ways on are replaced whole, in its block or later: it would silently do nothing."""
    for at in applied:
        if isinstance(at.edit.how, Freeze):
            continue
        by = _cut_in_block(at, applied, sites) or _cut_after(at, applied, sites)
        if by is not None:
            raise BadEdit(f"{at.edit} would do nothing: {str(by.edit)!r} replaces all that it could change.")


def _cut_in_block(at: At, applied: Sequence[At], sites: Sites) -> At | None:
    """What stands, together with others, on every way from a site to the end of its block."""
    whole = {
        o.site: o for o in applied if o.whole and not o.is_weight and o is not at and o.site.block == at.site.block
    }
    if at.site.block is None or at.site.tensor == "x_next" or not whole:
        return None
    card = sites.card(at.site.block)
    reached, stack = set(), [at.site.tensor]
    while stack:
        for step in card.readers(stack.pop()):
            if step.name not in reached and Site(at.site.block, step.name) not in whole:
                reached.add(step.name)
                stack.append(step.name)
    return None if "x_next" in reached else next(iter(whole.values()))


def _cut_after(at: At, applied: Sequence[At], sites: Sites) -> At | None:
    """A later residual stream that is replaced whole: nothing passes it."""
    stream = (o for o in applied if o.whole and o.site.tensor in ("x_n", "x_next"))
    return next((o for o in stream if sites.depth(o.site) > sites.depth(at.site)), None)
