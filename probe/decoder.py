"""The whole model: embedding, blocks, final norm, head; each evaluated by the same engine, as far as is wanted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from probe.dims import Dims
from probe.engine import Fork, Numerics, Plan, Weights, evaluate, plan
from probe.errors import BadText, OutOfRange, ShapeMismatch
from probe.numerics import causal_mask, position_ids, rotation
from probe.positions import check_positions
from probe.sites import Site, Sites

SiteTap = Callable[[Site, Tensor], Tensor | Fork]
"""Sees each value at its site and returns what everything below it shall see."""

SiteShow = Callable[[Site, slice, Tensor], None]
"""Sees a chunk of queries of a site that is never made whole."""


class Decoder:
    """A model of K2's architecture on some weights. It holds no state: two runs never touch each other.

    Args:
        numerics: see `probe.engine.Numerics`.
        beyond: whether position ids may reach the model's ``max_position_embeddings`` and beyond.
    """

    def __init__(self, weights: Weights, numerics: Numerics = "reference", beyond: bool = False) -> None:
        self.weights, self.numerics, self.beyond = weights, numerics, beyond
        self.dims: Dims = weights.dims
        self.sites = Sites(self.dims)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self.dims.blocks

    def check_tokens(
        self,
        tokens: Tensor,
        keep: Tensor | None,
        past: Mapping[Site, Tensor] | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> None:
        """Refuse tokens, a mask, positions or segments that do not fit this model.

        Raises:
            ShapeMismatch: tokens are not [B T] integers, or the mask is of another shape, or has holes.
            BadText: a token id outside the vocabulary.
            ShapeMismatch, BadText, OutOfRange: as `check_rows`.
        """
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32) or not tokens.numel():
            raise ShapeMismatch(
                f"tokens should be integers [B T], at least one; they are {tokens.dtype} {list(tokens.shape)}."
            )
        if tokens.device.type != "meta":
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.dims.V:
                raise BadText(f"token id {low if low < 0 else high} is outside the vocabulary of {self.dims.V}.")
        self.check_rows(keep, tokens.shape[0], tokens.shape[1] + _past_length(past), positions, segments)

    def check_rows(
        self,
        keep: Tensor | None,
        batch: int,
        length: int,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> None:
        """Refuse a mask, positions or segments that do not fit these rows, and texts that are too long.

        Raises:
            ShapeMismatch: the mask is of another shape, or has holes.
            BadText: a row has no real token.
            ShapeMismatch, BadText, OutOfRange: as `probe.positions.check_positions` and `check_texts`.
        """
        self._check_keep(keep, batch, length)
        if positions is not None or segments is not None:
            check_positions(keep, positions, segments, [batch, length])
        self.check_texts(keep, length, positions, segments)

    def check_texts(
        self, keep: Tensor | None, length: int, positions: Tensor | None, segments: Tensor | None, more: int = 0
    ) -> None:
        """Refuse texts that are too long, or stand too far, together with ``more`` tokens behind each.

        Raises:
            BadText: as `check_length`.
            OutOfRange: as `check_reach`.
        """
        alone = keep is None and segments is None
        last = length - 1 if alone else int(position_ids(keep, length, segments=segments).max())
        far = last
        if positions is not None:
            far = int((positions if keep is None else positions[keep.to(positions.device).bool()]).max())
        self.check_length(last + 1 + more)
        self.check_reach(far + more)

    def _check_keep(self, keep: Tensor | None, batch: int, length: int) -> None:
        if keep is None:
            return
        if keep.shape != (batch, length):
            raise ShapeMismatch(f"the mask of real tokens is {list(keep.shape)}; the tokens are {[batch, length]}.")
        real = keep.bool()
        if not bool(real.any(-1).all()):
            raise BadText("a row of the mask has no real token.")
        if int((real[:, 1:] != real[:, :-1]).sum(-1).max() if real.shape[1] > 1 else 0) > 1:
            raise ShapeMismatch(
                "the mask has holes: pads stand left or right of a row's tokens, not between or on both sides."
            )

    def check_length(self, longest: int) -> None:
        """Refuse a text that this model's indexers would act in: its attention is not full then, and ours is.

        Raises:
            BadText: the model has indexers, and the longest text more than ``index_topk`` tokens.
        """
        most = self.dims.index_topk
        if most is not None and longest > most:
            raise BadText(
                f"a text of {longest:,} tokens is longer than index_topk: beyond {most:,} tokens this model's indexers"
                " choose the keys that attention sees, and indexers are not computed here. Shorten it."
            )

    def check_reach(self, largest: int) -> None:
        """Refuse rows whose largest position id is beyond those that the model was made for, unless that is said.

        Raises:
            OutOfRange: it is ``max_position_embeddings`` or more.
        """
        most = self.dims.max_positions
        if most is not None and largest >= most and not self.beyond:
            raise OutOfRange(
                f"position id {largest:,}, and the model's max_position_embeddings is {most:,}: it has not learnt what"
                " is beyond. Take shorter texts; or say beyond=True (--beyond), and they are run all the same."
            )

    def run(
        self,
        tokens: Tensor | None,
        keep: Tensor | None = None,
        *,
        want: Iterable[Site | str] = (Site(None, "logits"),),
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        edited: Collection[Site] = (),
        known: Mapping[Site, Tensor] | None = None,
        tap: SiteTap | None = None,
        past: Mapping[Site, Tensor] | None = None,
        watched: Collection[Site] = (),
        chunks: Collection[Site] = (),
        show: SiteShow | None = None,
    ) -> dict[Site, Tensor]:
        """Evaluate the wanted sites, block by block, and stop after the last one that is needed.

        Args:
            tokens: [B, T] token ids; None where ``known`` has the stream into what is asked for.
            keep: [B, T], true where a token is real; None: all are.
            want: what to return, in any spelling.
            positions: [B, T], the position ids that rotate queries and keys, rising within each text; those of pads
                say nothing. None: they count each text's real tokens from 0.
            segments: [B, T], an id for each of the texts that a row packs, one behind the other: attention stays
                within each. None: a row is one text.
            edited: sites whose value ``tap`` may change. Nothing above them is recomputed where ``known`` has it.
            known: values of an earlier run on the same tokens; those that no edit reaches are taken, not made.
            tap: sees every value that is made.
            past: keys and values (``K``, ``V``) of the positions before these tokens; ``keep``, ``positions`` and
                ``segments``, if given, cover both.
                Taps see those of the new positions; what is wanted of K and V is whole, to be the next step's past.
            watched: sites that ``tap`` shall see; they are made or taken, and not held.
            chunks: sites of which ``show`` may see chunks of queries instead; see `plan`.

        Returns:
            The wanted values, as everything below them sees them.
        """
        if tokens is not None:
            self.check_tokens(tokens, keep, past, positions, segments)
        wanted = tuple(dict.fromkeys(self.sites.find(site) for site in want))
        asked = _Asked.of(wanted, edited, watched, chunks)
        rows = _Rows(keep, positions, segments)
        made = _Walk(self, tokens, rows, asked, known or {}, tap, past or {}, show).go()
        return {site: made[site] for site in wanted}

    def __call__(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """The logits, [B T V]."""
        return self.run(tokens, keep)[Site(None, "logits")]


ByBlock = dict[int | None, dict[str, None]]


def _by_block(sites: Iterable[Site]) -> ByBlock:
    """Block → names, each once, in order."""
    names: ByBlock = {}
    for block, name in sites:
        names.setdefault(block, {})[name] = None
    return names


class _Asked(NamedTuple):
    """What a run is asked for, and how: returned, changed, seen whole, seen in chunks; each block → names."""

    want: ByBlock
    edited: ByBlock
    watched: ByBlock
    chunks: ByBlock

    @classmethod
    def of(cls, *sites: Iterable[Site]) -> _Asked:
        """From sites, in this order."""
        return cls(*map(_by_block, sites))

    def names(self, block: int | None) -> tuple[str, ...]:
        """All names of a block, each once."""
        return tuple(dict.fromkeys(name for part in self for name in part.get(block, ())))


class _Rows(NamedTuple):
    """What a run is told of its rows' places: see `Decoder.run`."""

    keep: Tensor | None
    positions: Tensor | None
    segments: Tensor | None

    def frame(self, length: int, new: int, dims: Dims, like: Tensor) -> dict[str, Any]:
        """The inputs that are one for all blocks, ``R`` and ``M``, of the last ``new`` positions."""
        ids = self.positions
        if ids is None:
            ids = position_ids(self.keep, length, like.device, self.segments)
        here = slice(length - new, length)
        mask = causal_mask(self.keep, length, like.dtype, like.device, here, self.segments)
        return {"R": rotation(ids.to(like.device)[..., here], dims, like.dtype), "M": mask}


class _Walk:
    """One pass over the blocks. ``clean`` until the first edit: until then, known values stand."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: Tensor | None,
        rows: _Rows,
        asked: _Asked,
        known: Mapping[Site, Tensor],
        tap: SiteTap | None,
        past: Mapping[Site, Tensor],
        show: SiteShow | None,
    ) -> None:
        self.decoder, self.tokens, self.rows, self.past = decoder, tokens, rows, past
        self.tap = _with_past(tap, past) if past else tap
        self.asked, self.known, self.show = asked, known, show
        self.out: dict[Site, Tensor] = {}
        self.clean = True
        self.frame: dict[str, Any] | None = None

    def go(self) -> dict[Site, Tensor]:
        depth, into = self.decoder.blocks, self._into()
        x: Tensor | None = None
        if self._outer(("x_0",)) or into[0]:
            ids = {} if self.tokens is None else {"tokens": self.tokens}
            x = self._part(None, ("x_0",), {**ids, **self._known_of(None)}, "x_0")
        for block in range(depth):
            names = self.asked.names(block)
            if not names and not into[block + 1]:
                x = None  # a later part that needs its input has it known
                continue
            x = self._block(block, names, x, into[block + 1])
        if names := self._outer(self._head()):
            last = Site(depth - 1, "x_next")
            x = self.known[last] if x is None else x
            self._part(None, names, {"x_L": x, **self._known_of(None)}, None)
        return self.out

    def _outer(self, among: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these names around the blocks that are asked for."""
        return tuple(name for name in self.asked.names(None) if name in among)

    def _head(self) -> tuple[str, ...]:
        """What comes after the blocks."""
        return tuple(name for name in self.decoder.sites.around if name != "x_0")

    def _into(self) -> list[bool]:
        """Of each block, and at the end of the head: whether the residual stream into it must be made.

        It must where that part has something to do, unless the stream is known and no edit stands before it.
        """
        depth = self.decoder.blocks
        edited = (self.decoder.sites.depth(Site(b, name)) for b, names in self.asked.edited.items() for name in names)
        clean_until = min(edited, default=depth)  # the first part with an edit; its own input is still clean
        busy = bool(self._outer(self._head()))
        into = [False] * (depth + 1)
        for part in range(depth, -1, -1):
            site = Site(part, "x_n") if part < depth else Site(depth - 1, "x_next")
            into[part] = busy and not (part <= clean_until and site in self.known)
            busy = into[part] or bool(part and self.asked.names(part - 1))
        return into

    def _known_of(self, block: int | None) -> dict[str, Tensor]:
        return {s.tensor: value for s, value in self.known.items() if s.block == block} if self.clean else {}

    def _block(self, block: int, names: tuple[str, ...], x: Tensor | None, pass_on: bool) -> Tensor | None:
        known = self._known_of(block)
        given = {**known, **({} if x is None else {"x_n": x})}
        if self.frame is None:
            new = given["x_n"].shape[1]
            length = new + _past_length(self.past)
            if self.tokens is None:  # else it is checked
                rows = self.rows
                self.decoder.check_rows(rows.keep, given["x_n"].shape[0], length, rows.positions, rows.segments)
            self.frame = self.rows.frame(length, new, self.decoder.dims, given["x_n"])
        return self._part(block, names, {**given, **self.frame}, "x_next" if pass_on else None)

    def _part(
        self, block: int | None, names: tuple[str, ...], given: dict[str, Any], pass_on: str | None
    ) -> Tensor | None:
        card = self.decoder.sites.card(block)
        made_here = {*names, pass_on}
        want, _, *seen = ([name for name in names if name in part.get(block, ())] for part in self.asked)
        here = self.asked.edited.get(block, ())  # weights among them
        edited = {
            name for name in here if name in made_here or (name in card.leaves and made_here & card.descendants([name]))
        }
        todo: Plan = plan(card, (*want, pass_on) if pass_on else want, given, edited, *seen)
        tap, show = self.tap, self.show
        at = (lambda name, value: tap(Site(block, name), value)) if tap else None
        shown = (lambda name, queries, value: show(Site(block, name), queries, value)) if show else None
        made = evaluate(todo, given, self.decoder.weights, block, at, shown, self.decoder.numerics)
        self.clean = self.clean and not edited
        self.out.update({Site(block, name): made[name] for name in want})
        return made[pass_on] if pass_on else None


def _past_length(past: Mapping[Site, Tensor] | None) -> int:
    return next(iter(past.values())).shape[1] if past else 0


def _with_past(tap: SiteTap | None, past: Mapping[Site, Tensor]) -> SiteTap:
    """After the tap has seen the new positions' keys and values, those of the old ones are put before them."""

    def whole(site: Site, value: Tensor) -> Tensor | Fork:
        seen = value if tap is None else tap(site, value)
        if site not in past:
            return seen

        def behind(new: Tensor) -> Tensor:
            return torch.cat([past[site], new], dim=1)

        if isinstance(seen, Fork):
            edited = {reader: behind(new) for reader, new in seen.edited.items()}
            return Fork(behind(seen.value), edited, behind(seen.shown))
        return behind(seen)

    return whole
