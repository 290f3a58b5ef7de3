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

ROWS = 8
"""Of tokens: in few the choice of experts would be alike by chance."""

PART = 2
"""Which head, position, feature is tried: none at an end, where a rotation or the mask leaves alike what isn't."""


@cache
def coinciding(
    how: How,
    by: By | tuple[By, ...] | None = None,
    reads: tuple[str, ...] = (),
    *,
    moe: bool,
    query_latent: bool = True,
    norm_topk: bool = True,
) -> Mapping[str, str]:
    """For every editable tensor of a kind of block, the first tensor of the card whose edit does the same.

    Two edits are the same if they leave the same ``x_next``, to 1e-5 of its size, in a random block: a whole-tensor
    edit, or (by ``by``) an edit of one head, position, expert, or of what has several of these. Of features one is
    tried, and the tensors' last as well: a wider tensor has features that a narrower one lacks, so that what is said is
    said of the parts that both have. An edit that leaves ``x_next`` as it was proves nothing, and is taken to coincide
    with none.

    Args:
        reads: tensors of the block that must be left the same, too, as they are looked at; ``experts`` as sets.
    """
    dims = _small(moe, query_latent, norm_topk)
    model = HookedModel(random_weights(dims, seed=1))
    tokens, others = torch.randint(dims.V, (2, ROWS, 7), generator=torch.Generator().manual_seed(1))
    sites = [site for site in model.sites if site.block == 0]
    base, source = model.run(tokens, want=sites), model.run(others, want=sites)
    into = [Site(0, name) for name in ("x_next", *reads) if Site(0, name) in sites]
    before = _left(base, into)
    classes: dict[str, list[dict[int, list[Tensor]]]] = {}
    roots: dict[str, str] = {}
    for site in sites:
        edits = _edits(model, site, how, listed(by), base, source)
        if not edits:
            continue
        new = {i: _left(model.run(tokens, want=into, edits=[edit], base=base), into) for i, edit in edits.items()}
        root = site.tensor
        if not any(_equal(left[:1], before[:1], before) for left in new.values()):
            root = next((name for name, members in classes.items() if _same(new, members, before)), root)
        classes.setdefault(root, []).append(new)
        roots[site.tensor] = root
    return roots


def _left(run: Run, into: Sequence[Site]) -> list[Tensor]:
    """What a run leaves at these sites; experts in order, as their slots mean nothing."""
    return [run[site].sort(-1).values.float() if site.tensor == "experts" else run[site] for site in into]


def _same(new: Mapping[int, list[Tensor]], members: Sequence[Mapping[int, list[Tensor]]], base: list[Tensor]) -> bool:
    """Whether edits of one tensor do what those of each of several others do, part by part that both have."""
    return all(_equal(new[i], other[i], base) for other in members for i in new.keys() & other.keys())


def _equal(some: Sequence[Tensor], others: Sequence[Tensor], base: Sequence[Tensor]) -> bool:
    """Whether values are equal, to 1e-5 of the base's size."""
    return all(
        a.shape == b.shape and bool((a - b).norm() <= 1e-5 * x.norm())
        for a, b, x in zip(some, others, base, strict=False)
    )


def _edits(model: HookedModel, site: Site, how: How, by: Sequence[By], base: Run, source: Run) -> dict[int, Edit]:
    """The edit of a tensor, or of a part of it, by the part's number; of features the tensor's last, too."""
    node = model.sites.node(site)
    if not all(can_go(one, node) for one in by):
        return {}
    where = {dim_of(one, node): _common_expert(base, source) if one == "expert" else PART for one in by}
    made = {PART: where}
    if "feature" in by:
        dim = dim_of("feature", node)
        made[model.dims.size(dim) - 1] = {**where, dim: model.dims.size(dim) - 1}
    try:
        edits = {i: ablation(how, site, source, at, range(ROWS), 0) for i, at in made.items()}
        for edit in edits.values():
            edit.sites(model.sites)
    except (BadEdit, UnknownDim):
        return {}
    return edits


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
