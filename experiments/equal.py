"""Which edits of a block are the same by construction, so that one cell isn't read as several findings.

Zeroing ``O``, ``V``, ``v`` and ``A`` all mean "attention adds nothing"; resampling ``q_C`` or ``Q_C`` is one edit in
two shapes. Which coincide is not listed anywhere: it is found by editing every tensor of a small random block and
comparing what leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from experiments.options import By, How
from experiments.parts import ablation, can_go, dim_of, listed
from hooks import Edit, HookedModel, Run
from probe import Dims, random_weights
from probe.errors import BadEdit, UnknownDim
from probe.sites import Site


@cache
def coinciding(
    how: How, by: By | tuple[By, ...] | None = None, *, moe: bool, query_latent: bool = True, norm_topk: bool = True
) -> Mapping[str, str]:
    """For every editable tensor of a kind of block, the first tensor of the card whose edit does the same.

    Two edits are the same if they leave the same ``x_next``, to 1e-5 of its size, in a random block: a whole-tensor
    edit, or (by ``by``) an edit of one head, position, expert, or of what has several of these. An edit that leaves
    ``x_next`` as it was proves nothing, and is taken to coincide with none.
    """
    dims = _small(moe, query_latent, norm_topk)
    model = HookedModel(random_weights(dims, seed=1))
    tokens, others = torch.randint(dims.V, (2, 2, 7), generator=torch.Generator().manual_seed(1))
    sites = [site for site in model.sites if site.block == 0]
    base, source = model.run(tokens, want=sites), model.run(others, want=sites)
    into = Site(0, "x_next")
    size = base[into].norm()
    seen: dict[str, Tensor] = {}
    roots: dict[str, str] = {}
    for site in sites:
        edit = _edit(model, site, how, listed(by), base, source)
        if edit is None:
            continue
        new = model.run(tokens, want=[into], edits=[edit], base=base)[into]
        idle = bool((new - base[into]).norm() <= 1e-5 * size)
        same = [name for name, x in seen.items() if (new - x).norm() <= 1e-5 * size]
        roots[site.tensor] = same[0] if same and not idle else site.tensor
        seen.setdefault(roots[site.tensor], new)
    return roots


def _edit(model: HookedModel, site: Site, how: How, by: Sequence[By], base: Run, source: Run) -> Edit | None:
    """The edit of a tensor, or of one part of it; None where there can be none."""
    node = model.sites.node(site)
    if not all(can_go(one, node) for one in by):
        return None
    where = {dim_of(one, node): _common_expert(base, source) if one == "expert" else 2 for one in by}
    edit = ablation(how, site, source, where, (1, 0), 0)
    try:
        edit.sites(model.sites)
    except (BadEdit, UnknownDim):
        return None
    return edit


def _common_expert(*runs: Run) -> int:
    """The expert that the runs chose most, so that an edit of it does something; 0 in a dense block."""
    chosen = [run.cache[Site(0, "experts")].flatten() for run in runs if Site(0, "experts") in run.cache]
    return int(torch.cat(chosen).mode().values) if chosen else 0


def _small(moe: bool, query_latent: bool, norm_topk: bool) -> Dims:
    """The sizes of a small block of this kind, no two alike."""
    return Dims(
        d=24, r_q=10 if query_latent else None, r_kv=9, h=4, n=6, r=4, v=7, f=20, e=5, k=2, m=8, m_s=11, V=50,
        moe=(moe,), eps=1e-6, scaling=1.5, norm_topk=norm_topk, n_group=1, topk_group=1, theta=100.0, yarn=None,
    )  # fmt: skip
