"""Attention of many worlds that differ from a base at some positions: what they share is read once, and never copied.

A world's keys and values at the positions that it has changed are its own, all others the base's. Worlds that changed
the same positions and ask for the same queries go together: one product with the base's keys for all of them, one with
their own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hooks.layout import Layout
from probe.numerics import forbidden


class Packed(NamedTuple):
    """A packed value, [1 N ·], and its rows."""

    value: Tensor
    layout: Layout


def attend_worlds(Q: Packed, K: Packed, V: Packed, base_K: Tensor, base_V: Tensor, tau: float) -> Tensor:
    """O of the worlds' queries, [1 N h v].

    Scores are made and rounded as in `probe.numerics.attend`; the two partial mixes are added in fp32.

    Args:
        Q: the queries asked for, [1 N h q].
        K, V: the worlds' own keys and values, of one layout.
        base_K, base_V: the base's, [B T h ·]; world w stands on row w mod B.
    """
    out = Q.value.new_empty(*Q.value.shape[1:-1], base_V.shape[-1])
    future = torch.ones(base_K.shape[1], base_K.shape[1], dtype=torch.bool, device=out.device).triu(1)
    for kind, changed, asked in _kinds(Q.layout, K.layout):
        shared = _but(changed, asked)
        order = torch.cat([shared, changed]) if isinstance(shared, Tensor) else slice(0, int(asked[-1]) + 1)
        hidden = future[asked][:, order]
        for worlds, prompts in _by_prompt(kind, len(base_K)):
            queries = _of(Q.value[0], Q.layout, worlds, len(asked))
            keys, values = (_of(own.value[0], own.layout, worlds, len(changed)) for own in (K, V))
            everyone = prompts == list(range(len(base_K)))
            theirs = [_taken(base if everyone else base[prompts], shared) for base in (base_K, base_V)]
            made = _attend(queries, keys, values, theirs[0], theirs[1], tau, hidden)
            _put(out, Q.layout, worlds, made)
    return out[None]


def _kinds(asked: Layout, changed: Layout) -> list[tuple[list[int], Tensor, Tensor]]:
    """Worlds with queries, by what they changed and ask for: (worlds, changed positions, asked positions)."""
    active = asked.mask.any(-1).nonzero()[:, 0]
    both = torch.cat([changed.mask, asked.mask], dim=1)[active]
    kinds, member = torch.unique(both, dim=0, return_inverse=True)
    length = asked.mask.shape[1]
    worlds: list[list[int]] = [[] for _ in kinds]
    for world, kind in zip(active.tolist(), member.tolist(), strict=True):
        worlds[kind].append(world)
    split = zip(worlds, kinds, strict=True)
    return [(some, kind[:length].nonzero()[:, 0], kind[length:].nonzero()[:, 0]) for some, kind in split]


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


def _taken(base: Tensor, positions: Tensor | slice) -> Tensor:
    return base[:, positions] if isinstance(positions, slice) else base.index_select(1, positions)


def _of(rows: Tensor, layout: Layout, worlds: list[int], count: int) -> Tensor:
    """[worlds, count, ·]: all rows of some worlds, as many each; a view where they stand one behind the other."""
    first = layout.starts[worlds[0]]
    if _together(layout, worlds, count):
        return rows[first : first + count * len(worlds)].view(len(worlds), count, *rows.shape[1:])
    return rows.index_select(0, _index(layout, worlds, count, rows.device)).view(len(worlds), count, *rows.shape[1:])


def _put(out: Tensor, layout: Layout, worlds: list[int], made: Tensor) -> None:
    """[worlds, count, ·] to where `_of` would find it."""
    count, flat = made.shape[1], made.flatten(0, 1)
    if _together(layout, worlds, count):
        first = layout.starts[worlds[0]]
        out[first : first + len(flat)] = flat
    else:
        out.index_copy_(0, _index(layout, worlds, count, out.device), flat)


def _together(layout: Layout, worlds: list[int], count: int) -> bool:
    starts = [layout.starts[world] for world in worlds]
    return all(b - a == count for a, b in pairwise(starts))


def _index(layout: Layout, worlds: list[int], count: int, device: torch.device) -> Tensor:
    starts = torch.tensor([layout.starts[world] for world in worlds], device=device)
    return (starts[:, None] + torch.arange(count, device=device)).flatten()


def _attend(Q: Tensor, K: Tensor, V: Tensor, base_K: Tensor, base_V: Tensor, tau: float, hidden: Tensor) -> Tensor:
    """[G nq h v]: G worlds, as many on each of the prompts whose shared keys are ``base_K``, [P nu h q].

    Products are made in fp32 (small ones in bf16 are slower on a CPU) and rounded as if they weren't.
    """
    G, nq, h, _ = Q.shape
    P, nu = base_K.shape[:2]
    act = Q.dtype
    Q, K, V, base_K, base_V = (x.to(torch.promote_types(act, torch.float32)) for x in (Q, K, V, base_K, base_V))
    by_prompt = Q.view(P, G // P * nq, h, Q.shape[-1]).transpose(1, 2)  # all queries on a prompt meet its keys at once
    to_base = (by_prompt @ base_K.permute(0, 2, 3, 1)).view(P, h, G // P, nq, nu)
    to_own = (Q.transpose(1, 2) @ K.permute(0, 2, 3, 1)).view(P, G // P, h, nq, K.shape[1]).transpose(1, 2)
    S = torch.cat([to_base, to_own], dim=-1).to(act).mul_(tau).masked_fill_(hidden, forbidden(act))
    A = torch.softmax(S, dim=-1, dtype=torch.float32).to(act).to(Q.dtype)
    of_base = A[..., :nu].reshape(P, h, G // P * nq, nu) @ base_V.transpose(1, 2)
    of_own = A[..., nu:].transpose(1, 2).reshape(G, h, nq, K.shape[1]) @ V.transpose(1, 2)
    of_base = of_base.view(P, h, G // P, nq, V.shape[-1]).permute(0, 2, 3, 1, 4).reshape(G, nq, h, V.shape[-1])
    return (of_base + of_own.transpose(1, 2)).to(act)
