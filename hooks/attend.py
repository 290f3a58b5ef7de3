"""Attention of many worlds that differ from a base at some positions: what they share is read once, and never copied.

A world's keys and values at the positions that it has changed are its own, all others the base's. Worlds that changed
the same positions and ask for the same queries go together: one product with the base's keys for all of them, one with
their own. So do worlds that nearly do, where that is less than another product costs: there each has the base's rows
in the places that others have changed, and what it didn't ask for is thrown away.

Scores grow with worlds × heads × queries × keys, so a group goes in pieces of bounded bytes: some prompts at a time,
some worlds of a prompt, or some queries of a world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hooks.layout import Layout
from probe.numerics import QUERY_CHUNK, forbidden, query_chunks

CALL = 1 << 21
"""Multiplications that take about as long as the calls which a further group of worlds needs."""

COPIED = 32
"""Multiplications that take about as long as a number's copy."""


PIECE = 1 << 25
"""Bytes that a piece takes at most, where memory allows: larger ones are no faster."""


class Packed(NamedTuple):
    """A packed value, [1 N ·], and its rows."""

    value: Tensor
    layout: Layout


class Kind(NamedTuple):
    """Worlds that go together, the positions that they changed, and those that they ask for; [T] both, true there."""

    worlds: list[int]
    changed: npt.NDArray[np.bool_]
    asked: npt.NDArray[np.bool_]


class Piece(NamedTuple):
    """Worlds, as many on each of some prompts, with what they changed and ask for: [T] both, to the last one asked."""

    worlds: list[int]
    prompts: list[int]
    changed: npt.NDArray[np.bool_]
    asked: npt.NDArray[np.bool_]

    @property
    def pairs(self) -> int:
        """Of a query and a key, over all worlds."""
        keys = int((self.changed | (np.arange(len(self.asked)) < _end(self.asked))).sum())
        return len(self.worlds) * int(self.asked.sum()) * keys


def attend_worlds(
    Q: Packed,
    K: Packed,
    V: Packed,
    base_K: Tensor,
    base_V: Tensor,
    tau: float,
    most: int = PIECE,
    starts: Tensor | None = None,
) -> Tensor:
    """O of the worlds' queries, [1 N h v].

    Scores are made and rounded as in `probe.numerics.attend`; the two partial mixes are added in fp32.

    Args:
        Q: the queries asked for, [1 N h q].
        K, V: the worlds' own keys and values, of one layout.
        base_K, base_V: the base's, [B T h ·]; world w stands on row w mod B.
        most: bytes that are taken at a time, beside what is given and returned; one query's scores at the least.
        starts: [B, T], the place at which each token's text starts, where rows pack several.
    """
    _, N, h, q = Q.value.shape
    out = Q.value.new_empty(N + 1, h, base_V.shape[-1])  # the last takes what none asked for
    pieces = [
        piece
        for kind in _merged(_kinds(Q.layout, K.layout), h * (q + base_V.shape[-1]))
        for worlds, prompts in _by_prompt(kind.worlds, len(base_K))
        for piece in _pieces(worlds, prompts, kind, h * (q + base_V.shape[-1]), h, most)
    ]
    numbers = h * max((piece.pairs for piece in pieces), default=0)
    wide = torch.promote_types(out.dtype, torch.float32)
    room = out.new_empty(numbers, dtype=wide), out.new_empty(numbers, dtype=wide)
    for piece in pieces:
        _attend_piece(out, piece, Q, K, V, base_K, base_V, tau, room, starts)
    return out[None, :N]


Room = tuple[Tensor, Tensor]
"""Where scores are made, and where their pattern is: once for all pieces, as blocks of ever other sizes would leave the
heap in splinters."""


def attend_rows(Q: Tensor, K: Tensor, V: Tensor, tau: float, mask: Callable[[slice], Tensor]) -> Tensor:
    """O of whole rows, [B T h v]: `probe.numerics.attend` to the bit, in bounded room.

    Args:
        mask: gives the additive mask of a slice of queries.
    """
    (B, T, h, _), keys, values = Q.shape, K.permute(0, 2, 3, 1), V.transpose(1, 2)
    numbers = B * h * min(T, QUERY_CHUNK) * K.shape[1]
    room = Q.new_empty(numbers), Q.new_empty(numbers, dtype=torch.float32)
    O = V.new_empty(B, T, h, V.shape[-1])
    for rows in query_chunks(T):
        queries = Q[:, rows].transpose(1, 2)
        S, A = (part[: queries[..., 0].numel() * K.shape[1]].view(*queries.shape[:-1], -1) for part in room)
        torch.matmul(queries, keys, out=S).mul_(tau).add_(mask(rows))
        torch.softmax(S, dim=-1, dtype=torch.float32, out=A)
        O[:, rows] = (A.to(S.dtype) @ values).transpose(1, 2)
    return O


def _attend_piece(
    out: Tensor,
    piece: Piece,
    Q: Packed,
    K: Packed,
    V: Packed,
    base_K: Tensor,
    base_V: Tensor,
    tau: float,
    room: Room,
    starts: Tensor | None,
) -> None:
    """Some queries of some worlds, written to their places."""
    changed, asked = (torch.from_numpy(mask.nonzero()[0]).to(out.device) for mask in (piece.changed, piece.asked))
    shared = _but(changed, asked)
    order = torch.arange(int(asked[-1]) + 1, device=out.device)
    if isinstance(shared, Tensor):
        order = torch.cat([shared, changed])
    everyone = piece.prompts == list(range(len(base_K)))
    theirs = [_taken(base if everyone else _some(base, piece.prompts), shared) for base in (base_K, base_V)]
    queries = _of(Q, piece.worlds, asked)
    keys, values = _of(K, piece.worlds, changed, base_K), _of(V, piece.worlds, changed, base_V)
    hidden = order > asked[:, None]
    if starts is not None:
        hidden = hidden | (order < starts[piece.prompts][:, asked, None])
    made = _attend(queries, keys, values, theirs[0], theirs[1], tau, hidden, room)
    _put(out, Q.layout, piece.worlds, asked, made)


def _kinds(asked: Layout, changed: Layout) -> list[Kind]:
    """Worlds with queries, by what they changed and ask for."""
    active = asked.mask.any(-1).nonzero()[:, 0]
    both = torch.cat([changed.mask, asked.mask], dim=1)[active]
    kinds, member = torch.unique(both, dim=0, return_inverse=True)
    length = asked.mask.shape[1]
    worlds: list[list[int]] = [[] for _ in kinds]
    for world, kind in zip(active.tolist(), member.tolist(), strict=True):
        worlds[kind].append(world)
    split = zip(worlds, kinds.cpu().numpy(), strict=True)
    return [Kind(some, kind[:length], kind[length:]) for some, kind in split]


def _merged(kinds: Sequence[Kind], width: int) -> list[Kind]:
    """Kinds that are nearly alike as one, wherever that saves more calls than it adds products."""
    made: list[Kind] = []
    cost = 0
    for kind in sorted(kinds, key=lambda kind: (int(kind.changed.sum()), _end(kind.asked), int(kind.asked.argmax()))):
        own = _cost(kind, width)
        if made:
            last = made[-1]
            both = Kind([*last.worlds, *kind.worlds], last.changed | kind.changed, last.asked | kind.asked)
            if (together := _cost(both, width)) < cost + own + CALL:
                made[-1], cost = both, together
                continue
        made.append(kind)
        cost = own
    return [Kind(sorted(kind.worlds), kind.changed, kind.asked) for kind in made]


def largest_group(
    alike: npt.NDArray[np.float64], count: npt.NDArray[np.int64], length: int, width: int
) -> tuple[int, npt.NDArray[np.float64]]:
    """How many worlds go together at the most, and what one of them asks for: as `_merged` finds it, from counts alone.

    Args:
        alike: [kinds, 2], queries and own keys of a world, in rising order; the keys seen are taken to be ``length``.
        count: [kinds], worlds.
    """
    worlds, most, found = 0, 0.0, np.zeros(2)
    last = 0.0
    for some, n in zip(alike, count.tolist(), strict=True):
        each = width * (some[0] * length + COPIED * some[1])
        together = (worlds + n) * each
        worlds, last = (worlds + n, together) if worlds and together < last + n * each + CALL else (n, n * each)
        if last > most:
            most, found, largest = last, some, worlds
    return (largest, found) if most else (0, found)


def _cost(kind: Kind, width: int) -> int:
    """Of a group, in multiplications."""
    pairs = int(kind.asked.sum()) * _end(kind.asked)
    return len(kind.worlds) * width * (pairs + COPIED * int(kind.changed.sum()))


def _end(mask: npt.NDArray[np.bool_]) -> int:
    """Behind the last true one."""
    return len(mask) - int(mask[::-1].argmax())


def _but(changed: Tensor, asked: Tensor) -> Tensor | slice:
    """The positions up to the last asked one that are not changed: a slice, where these are the last."""
    last = int(asked[-1])
    count = len(changed)
    if count and int(changed[-1]) == last and int(changed[0]) == last - count + 1:
        return slice(0, last - count + 1)
    everything = torch.arange(last + 1, device=asked.device)
    return everything[~torch.isin(everything, changed)]


def _by_prompt(worlds: list[int], batch: int) -> list[tuple[list[int], list[int]]]:
    """Worlds by the prompt they stand on, and these prompts: all together where each has as many worlds."""
    by: dict[int, list[int]] = {}
    for world in worlds:
        by.setdefault(world % batch, []).append(world)
    if len({len(some) for some in by.values()}) == 1:
        return [([world for some in by.values() for world in some], list(by))]
    return [(some, [prompt]) for prompt, some in by.items()]


def attention_bytes(queries: Any, keys: float, own: Any, width: int, heads: int) -> Any:
    """What attention takes at a time, in fp32: scores and their pattern, and of all that is gathered two copies.

    Args:
        queries: how many there are.
        keys: that each query sees.
        own: keys of the worlds' own.
        width: numbers of a query or key and a value, over all heads.
    """
    return 4 * 2 * (queries * (width + heads * keys) + own * width)


def _pieces(worlds: list[int], prompts: list[int], kind: Kind, width: int, heads: int, most: int) -> Iterator[Piece]:
    """A group in pieces that take ``most`` bytes each; keys behind the last query of a piece are left out.

    Args:
        worlds: as many on each prompt, prompt after prompt.
        width: numbers of a query or key and a value, over all heads.
    """
    asked, each, keys = kind.asked.nonzero()[0], len(worlds) // len(prompts), _end(kind.asked)
    a_query = int(attention_bytes(1, keys, 0, width, heads))
    a_world = int(attention_bytes(len(asked), keys, int(kind.changed.sum()), width, heads))
    a_prompt = each * a_world + (4 * width * keys if len(prompts) > 1 else 0)  # whose keys and values are copied
    many, few, queries = (max(1, most // bytes) for bytes in (a_prompt, a_world, a_query))
    whole = a_world <= most
    for i in range(0, len(prompts), many):
        some = prompts[i : i + many]
        here = worlds[i * each : (i + many) * each]
        if a_prompt <= most:
            yield Piece(here, some, kind.changed, kind.asked)
            continue
        for j in range(0, each, few):
            if whole:
                yield Piece(here[j : j + few], some, kind.changed, kind.asked)
                continue
            for k in range(0, len(asked), queries):
                yield Piece([here[j]], some, *_up_to(kind, asked[k : k + queries]))


def _up_to(kind: Kind, queries: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """What was changed before the last of some queries, and these."""
    asked, changed = np.zeros_like(kind.asked), kind.changed.copy()
    asked[queries] = True
    changed[queries[-1] + 1 :] = False
    return changed, asked


def _some(base: Tensor, prompts: list[int]) -> Tensor:
    """Some rows of the base; one is a view."""
    return base[prompts[0] : prompts[0] + 1] if len(prompts) == 1 else base[prompts]


def _taken(base: Tensor, positions: Tensor | slice) -> Tensor:
    return base[:, positions] if isinstance(positions, slice) else base.index_select(1, positions)


def _of(own: Packed, worlds: list[int], places: Tensor, base: Tensor | None = None) -> Tensor:
    """[worlds, places, ·]: rows of some worlds; a view where they have these alone and stand one behind the other.

    Args:
        base: has the rows that they lack, [B T ·]; None: these mean nothing.
    """
    rows, layout, count = own.value[0], own.layout, len(places)
    if (first := _first(layout, worlds, places)) is not None:
        return rows[first : first + count * len(worlds)].view(len(worlds), count, *rows.shape[1:])
    index = _index(layout, worlds, places)
    found = rows.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, *rows.shape[1:])
    if base is not None:
        world, place = (index < 0).nonzero(as_tuple=True)
        prompt = torch.tensor(worlds, device=rows.device)[world] % len(base)
        found[world, place] = base[prompt, places[place]]
    return found


def _put(out: Tensor, layout: Layout, worlds: list[int], places: Tensor, made: Tensor) -> None:
    """[worlds, places, ·] to where `_of` would find it; to the last row, where it wouldn't."""
    flat = made.flatten(0, 1)
    if (first := _first(layout, worlds, places)) is not None:
        out[first : first + len(flat)] = flat
    else:
        out.index_copy_(0, _index(layout, worlds, places).flatten() % len(out), flat)


def _first(layout: Layout, worlds: list[int], places: Tensor) -> int | None:
    """The row where worlds' rows at some places begin, if they stand there one behind the other and are all that these
    worlds have (of one world, others may be before and behind); None: they don't."""
    count, first = len(places), layout.starts[worlds[0]]
    if len(worlds) == 1:
        index = layout.table[worlds[0], places]
        first = int(index[0]) if count else 0
        expected = torch.arange(first, first + count, device=index.device)
        return first if first >= 0 and torch.equal(index, expected) else None
    bounds = (layout.starts[world : world + 2] for world in worlds)
    together = all([a, b] == [first + i * count, first + (i + 1) * count] for i, (a, b) in enumerate(bounds))
    return first if together else None


def _index(layout: Layout, worlds: list[int], places: Tensor) -> Tensor:
    """[worlds, places]: their rows; -1 where they have none."""
    return layout.table[torch.tensor(worlds, device=places.device)][:, places]


def _attend(
    Q: Tensor, K: Tensor, V: Tensor, base_K: Tensor, base_V: Tensor, tau: float, hidden: Tensor, room: Room
) -> Tensor:
    """[G nq h v]: G worlds, as many on each of the prompts whose shared keys are ``base_K``, [P nu h q], and of which
    ``hidden``, [P nq ·] or [nq ·], says what a query does not see.

    Products are made in fp32 (small ones in bf16 are slower on a CPU) and rounded as if they weren't.

    Args:
        room: where the scores and their pattern are made, at least in fp32.
    """
    G, nq, h, q = Q.shape
    P, nu = base_K.shape[:2]
    g, own, act, wide = G // P, K.shape[1], Q.dtype, room[0].dtype

    def by_head(x: Tensor) -> Tensor:
        x = x.to(wide).view(P, g, *x.shape[1:]).permute(0, 3, 1, 2, 4)
        return x.reshape(P * h * g, *x.shape[3:])

    Q, K, V = by_head(Q), by_head(K), by_head(V)
    base_K, base_V = (x.to(wide).transpose(1, 2).flatten(0, 1) for x in (base_K, base_V))
    shape, to_base, to_own = (P * h, g, nq, nu + own), G * h * nq * nu, G * h * nq * own
    first, second = room[0][: to_base + to_own], room[1][: to_base + to_own].view(shape)
    torch.bmm(Q.view(P * h, g * nq, q), base_K.mT, out=first[:to_base].view(P * h, g * nq, nu))
    torch.bmm(Q, K.mT, out=first[to_base:].view(P * h * g, nq, own))
    parts = first[:to_base].view(P * h, g, nq, nu), first[to_base:].view(P * h, g, nq, own)
    S = torch.cat(parts, dim=-1, out=second).to(act).mul_(tau)
    S.view(P, h, g, nq, -1).masked_fill_(hidden.view(-1, 1, 1, nq, nu + own), forbidden(act))
    pattern = first.view(shape) if wide == torch.float32 else None  # the softmax is made in fp32, whatever the dtype
    A = torch.softmax(S, dim=-1, dtype=torch.float32, out=pattern)
    del S
    A = A if act == A.dtype else second.copy_(A.to(act))
    O = (A[..., :nu].view(P * h, g * nq, nu) @ base_V).view(P * h * g, nq, -1)
    O.baddbmm_(A[..., nu:].view(P * h * g, nq, own), V)
    return O.view(P, h, g, nq, -1).permute(0, 2, 3, 1, 4).reshape(G, nq, h, -1).to(act)
