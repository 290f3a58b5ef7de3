"""Attention of many worlds over shared keys, against each query's own attention, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooks import attend
from hooks.attend import Packed, attend_worlds
from hooks.layout import Layout

B, C, T, h, q, v = 3, 5, 6, 2, 4, 3
LENGTHS = torch.tensor([6, 4, 2])


def one_by_one(Q: Packed, K: Packed, V: Packed, base_K: Tensor, base_V: Tensor, tau: float, starts: Tensor) -> Tensor:
    """The twin."""
    made = []
    for row, (world, pos) in enumerate(zip(*(part.tolist() for part in Q.layout.places), strict=True)):
        keys, values = base_K[world % B].clone(), base_V[world % B].clone()
        for place in K.layout.mask[world].nonzero()[:, 0].tolist():
            keys[place] = K.value[0, K.layout.table[world, place]]
            values[place] = V.value[0, V.layout.table[world, place]]
        seen = slice(int(starts[world % B, pos]), pos + 1)
        A = (torch.einsum("hq,thq->ht", Q.value[0, row], keys[seen]) * tau).softmax(-1)
        made.append(torch.einsum("ht,thv->hv", A, values[seen]))
    return torch.stack(made)[None]


WHOLE = torch.zeros(B, T, dtype=torch.long)
TEXTS = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1], [0, 0, 0, 3, 3, 3]])
"""Where each token's text starts: of rows of one text, and of several."""


def layout(draw: torch.Generator) -> Layout:
    """Worlds of no rows, of any, of all from some position on; past a prompt's length none has any."""
    at = torch.arange(T)
    first = torch.randint(0, T, (C * B, 1), generator=draw)
    kind = torch.randint(0, 4, (C * B, 1), generator=draw)
    some = torch.rand(C * B, T, generator=draw) < 0.4
    mask = torch.where(kind == 0, some, (kind > 1) & (at >= first * (kind - 2)))
    return Layout(mask & (at < LENGTHS[:, None]).repeat(C, 1))


@pytest.mark.parametrize("most", [1, 500, 3000, attend.PIECE])
@pytest.mark.parametrize("call", [0, 1000, attend.CALL])
def test_worlds_of_all_layouts(call: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether kinds go alone, some together, or all: also worlds whose rows others' stand between. In pieces of one
    query, of some, of worlds, of all."""
    monkeypatch.setattr(attend, "CALL", call)
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        asked, changed = layout(draw), layout(draw)
        changed = asked if seed % 2 else changed
        rows = ((len(asked), q), (len(changed), q), (len(changed), v))
        own = [torch.randn(1, n, h, width, generator=draw) for n, width in rows]
        shared = [torch.randn(B, T, h, width, generator=draw) for width in (q, v)]
        packed = [Packed(value, where) for value, where in zip(own, (asked, changed, changed), strict=True)]
        starts = TEXTS if seed % 4 > 1 else WHOLE
        ours = attend_worlds(*packed, *shared, 0.5, most, None if starts is WHOLE else starts)
        assert float((ours - one_by_one(*packed, *shared, 0.5, starts)).abs().max()) < 1e-5, seed
