"""Decoding, greedy or sampled, through the same evaluation: a step gives the keys and values of the old positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hooks.apply import At, bound, check_no_cut, check_seen
from hooks.edits import ROTATED, SCORES, Edit, Freeze, Mean, Noise, Patch, Resample
from hooks.recorder import Recorder
from hooks.run import Run, base_for
from hooks.where import Mask, Place, Rows, Span, Spans
from probe.errors import BadEdit, check_seed
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel

When = Literal["prompt", "steps", "both"]


@dataclass(frozen=True, eq=False)
class Generation:
    """What was decoded.

    Attributes:
        tokens: [B, T + n], prompts (left-padded) and their continuations; a row that met a stop token repeats it.
        keep: [B, T + n], true where a token is real.
        new: [B, n], the continuations alone; shorter where all rows have met a stop token.
        logits: [B, n, V], what each new token was chosen by.
    """

    tokens: Tensor
    keep: Tensor
    new: Tensor
    logits: Tensor


def generate(
    model: HookedModel,
    tokens: Tensor,
    keep: Tensor | None = None,
    *,
    n: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Collection[int] = (),
    edits: Sequence[Edit] = (),
    spans: Sequence[Spans] | None = None,
    positions: Tensor | None = None,
    when: When = "both",
    use_cache: bool = True,
) -> Generation:
    """Decode ``n`` tokens; hooks and edits act on the prompt, on each step's new token, or on both.

    On the prompt an edit acts as in `run`. In a step there is one new position a row: an edit without positions acts on
    it, and so do ``T=-1`` and open slices (``T=slice(1, None)``); edits that name other positions have acted on the
    prompt. -1 is the newest token at each step, of queries and of keys; spans and masks name the prompt's tokens. Noise
    relative to a spread takes the prompt's. A hook learns which step it is in from ``hook.step``: 0 the prompt, 1 the
    first new token read back, and so on.

    Args:
        tokens: [B, T]; rows of unequal length are padded on either side, and come back padded on the left.
        temperature: 0 takes the likeliest token, else tokens are drawn from softmax(logits / temperature).
        stop: token ids at which a row ends.
        spans: each prompt's named spans, for edits; they name positions of the prompt.
        positions: [B, T], position ids of the prompts, as in `hooks.run.run`; new tokens count on from the last. Texts
            that a row packs have no one end to go on from: give each a row of its own.
        when: where edits act.
        use_cache: False recomputes everything at each step, the edits acting on each part as they did when it was new:
            the slow twin of ``both``. (Hooks see the whole at each step.)

    Raises:
        BadEdit: an edit in the steps that takes values of another run's positions (there are none to take), or that
            acts in no step; the slow twin with another ``when``.
        OutOfRange: the last token would stand beyond the model's ``max_position_embeddings``.
        BadText: a prompt and the tokens decoded behind it are too long for a model with indexers.
    """
    model.decoder.check_tokens(tokens, keep, positions=positions)
    if n < 1:
        raise BadEdit(f"n={n}: at least one token is decoded.")
    model.decoder.check_texts(keep, tokens.shape[1], positions, None, more=n - 1)  # the last new token is not read
    if when not in ("prompt", "steps", "both"):
        raise BadEdit(f"when={when!r} is not one of prompt, steps, both.")
    check_seed(seed)
    if not use_cache and when != "both":
        raise BadEdit(f"use_cache=False has edits everywhere, as a full run does; it can't keep them to the {when}.")
    here = model.device
    rows = Rows(keep, tokens.shape[0], tokens.shape[1])
    edits = [_left_padded(edit, rows) for edit in edits]
    if spans is not None:
        spans = [_from_the_front(*of_row) for of_row in zip(spans, rows.lengths, strict=True)]
    keep = None if keep is None else keep.to(here)
    if positions is not None:
        positions, _ = left_padded(positions.to(here), keep)
    tokens, keep = left_padded(tokens.to(here), keep)
    spans = None if spans is None else tuple(spans)
    decoding = _Decoding(model, tokens, keep, positions, edits, spans, when, use_cache)
    generator = torch.Generator().manual_seed(seed)
    ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    chosen: list[Tensor] = []
    scores: list[Tensor] = []
    for step in range(n):
        logits = decoding.next_logits(step, chosen[-1] if chosen else None)
        token = _choose(logits, temperature, generator)
        if chosen:
            token = torch.where(ended, chosen[-1], token)
        for id in stop:
            ended = ended | (token == id)
        chosen.append(token)
        scores.append(logits)
        if bool(ended.all()):
            break
    new = torch.stack(chosen, 1)
    whole = torch.cat([keep, torch.ones_like(new, dtype=torch.bool)], 1)
    return Generation(torch.cat([tokens, new], 1), whole, new, torch.stack(scores, 1))


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, -1).cpu()
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)


def left_padded(tokens: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same rows with their pads on the left, so that each next token stands right behind its row."""
    if keep is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    keep = keep.bool()
    order = torch.argsort(keep.long(), dim=1, stable=True)  # pads first, the rest in their order
    return tokens.gather(1, order), keep.gather(1, order)


def _left_padded(edit: Edit, rows: Rows) -> Edit:
    """An edit of these rows, its masks as `left_padded` moves them."""

    def moved(place: Place) -> Place:
        if not isinstance(place, Mask):
            return place
        made = torch.zeros(rows.batch, rows.length, dtype=torch.bool)
        for b, length in enumerate(rows.lengths):
            made[b, [p - length for p in rows.positions(b, place, str(edit))]] = True
        return Mask(tuple(map(tuple, made.tolist())))

    return replace(edit, where=tuple((dim, moved(place)) for dim, place in edit.where))


def _grown(edit: Edit, length: int) -> Edit:
    """An edit of prompts, for rows that have grown to a length: its masks name no new token."""

    def longer(place: Place) -> Place:
        if not isinstance(place, Mask):
            return place
        return Mask(tuple(row + (False,) * (length - len(row)) for row in place.rows))

    return replace(edit, where=tuple((dim, longer(place)) for dim, place in edit.where))


def _from_the_front(spans: Spans, length: int) -> Spans:
    """A prompt's spans by positions that stay what they are when tokens come behind it."""
    return {name: [p + length if p < 0 else p for p in places] for name, places in spans.items()}


class _Decoding:
    """The state of a decoding: keys and values of what has been read; without a cache, what acted on it."""

    def __init__(
        self,
        model: HookedModel,
        tokens: Tensor,
        keep: Tensor,
        positions: Tensor | None,
        edits: Sequence[Edit],
        spans: tuple[Spans, ...] | None,
        when: When,
        use_cache: bool,
    ) -> None:
        self.model, self.tokens, self.keep, self.spans, self.use_cache = model, tokens, keep, spans, use_cache
        self.positions = positions
        self.on_steps = self._on_steps(edits, when) if when != "prompt" else {}
        self.on_prompt = dict(enumerate(edits)) if when != "steps" else _measuring(self.on_steps)
        self.first: list[At] = []
        """What acts on the prompt."""
        self.acting: list[At] = []
        """What acts on all that has been read, where nothing is kept of it."""
        self.stored = [Site(b, name) for b in range(model.dims.blocks) for name in ("K", "V")]
        self.past: dict[Site, Tensor] = {}

    def _on_steps(self, edits: Sequence[Edit], when: When) -> dict[int, Edit]:
        """By number, the edits that say something of a step's one new position, as they act there.

        Raises:
            BadEdit: one needs a source there, or is for the steps alone and acts in none.
        """
        here = [(edit, self._in_step(edit)) for edit in edits]
        if when == "steps" and (idle := [edit for edit, there in here if there is None]):
            raise BadEdit(
                f"{idle[0]} names positions of the prompt, so it acts in no step; use when='prompt' or 'both'."
            )
        return {i: there for i, (_, there) in enumerate(here) if there is not None}

    def _in_step(self, edit: Edit) -> Edit | None:
        """The edit at the new position; None where it names others only."""
        sites = edit.sites(self.model.sites)
        dim = "T" if any("T" in self.model.sites.node(site).shape for site in sites) else "S"
        place = dict(edit.where).get(dim)
        if place is not None and not _holds_the_last(place):
            return None
        rotates = any(site.tensor in (*ROTATED, *SCORES) for site in sites)
        if isinstance(edit.how, Patch | Resample | Freeze) or (
            isinstance(edit.how, Mean) and (edit.how.over == "position" or rotates)
        ):
            raise BadEdit(f"{edit}: beyond the source's last token there is nothing to take; use when='prompt'.")
        return replace(edit, where=tuple((d, (-1,) if d == dim else p) for d, p in edit.where))

    def next_logits(self, step: int, token: Tensor | None) -> Tensor:
        """[B, V]: the scores of the token after those read so far; ``token`` is the last one chosen."""
        applied = self._on_the_prompt() if token is None else self._on_the_new(token)
        if self.use_cache:
            return self._read(self.tokens if token is None else token[:, None], applied, step)
        length = self.tokens.shape[1]
        for at in applied:
            at.stretch = None if at.is_weight else slice(length - at.rows.length, length)
        self.acting += [at for at in applied if token is None or not at.is_weight]
        return self._read(self.tokens, self.acting, step)

    def _on_the_prompt(self) -> list[At]:
        rows = self._rows()
        edits = list(self.on_prompt.values())
        self.first = self._bind(edits, rows, base_for(self.model, rows, self.tokens, edits))
        check_seen(self.first)
        return self.first

    def _on_the_new(self, token: Tensor) -> list[At]:
        self.keep = torch.cat([self.keep, torch.ones_like(self.keep[:, :1])], 1)
        self.tokens = torch.cat([self.tokens, token[:, None]], 1)
        if self.positions is not None:
            self.positions = torch.cat([self.positions, self.positions[:, -1:] + 1], 1)
        rows = Rows(None, len(token), 1, past=self._rows())
        applied = self._bind([_grown(edit, self.tokens.shape[1]) for edit in self.on_steps.values()], rows)
        spreads = {list(self.on_prompt)[at.number]: at.measured for at in self.first}
        for at in applied:
            at.measured = spreads.get(list(self.on_steps)[at.number])
        return applied

    def _rows(self) -> Rows:
        """All that has been read."""
        return Rows.of(self.tokens, self.keep, self.spans, positions=self.positions)

    def _bind(self, edits: Sequence[Edit], rows: Rows, base: Run | None = None) -> list[At]:
        applied = bound(edits, self.model.sites, rows, base)
        check_no_cut(applied, self.model.sites)
        return applied

    def _read(self, tokens: Tensor, applied: list[At], step: int) -> Tensor:
        recorder = Recorder(self.model, applied, step=step)
        logits = Site(None, "logits")
        past = self.past if self.use_cache else {}
        with torch.no_grad():
            made = recorder.decoder.run(
                tokens,
                self.keep,
                want=(logits, *self.stored),
                positions=self.positions,
                edited=recorder.edited,
                tap=recorder,
                past=past,
            )
        self.past = {site: made[site] for site in self.stored}
        return made[logits][:, -1]


def _measuring(edits: Mapping[int, Edit]) -> dict[int, Edit]:
    """Of the edits of steps alone, those that take a spread from the prompt; they change nothing there."""
    relative = {i: edit.how for i, edit in edits.items() if isinstance(edit.how, Noise) and edit.how.relative}
    return {i: replace(edits[i], how=replace(how, std=0.0)) for i, how in relative.items()}


def _holds_the_last(place: Place) -> bool:
    """Whether a place goes on to the last position, whichever that is: -1, or a slice without an end."""
    if isinstance(place, Span):
        return place.stop is None and (place.step or 1) == 1
    return isinstance(place, tuple) and -1 in place
