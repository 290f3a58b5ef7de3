"""The table of edits × tensors: each cell either acts, the same from a base as in a full run, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooks import (
    HookedModel,
    Run,
    Site,
    add,
    edit,
    freeze,
    mean,
    noise,
    patch,
    project_out,
    resample,
    scale,
    set_to,
    zero,
)
from probe import Dims, random_weights
from probe.errors import ProbeError

DIMS = Dims(
    d=40, r_q=20, r_kv=16, h=3, n=8, r=4, v=10, f=56, e=8, k=3, m=16, m_s=16, V=40, moe=(False, True),
    eps=1e-6, scaling=2.5, norm_topk=True, n_group=2, topk_group=1, theta=1e3, yarn=None,
)  # fmt: skip
MODEL = HookedModel(random_weights(DIMS, 3))
SITES = list(MODEL.sites)


def draw(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, DIMS.V, (rows, length), generator=torch.Generator().manual_seed(seed))


TOKENS = draw(3, 6, 1)
BASE = MODEL.run(TOKENS, want=SITES)
SOURCE = MODEL.run(draw(3, 6, 2), want=SITES)
REFERENCE = MODEL.run(draw(120, 6, 3), want=SITES)


def width(site: Site) -> int:
    return BASE[site].shape[-1]


def span(site: Site) -> Tensor:
    return torch.randn(2, width(site), generator=torch.Generator().manual_seed(4))


EDITS = {
    "zero": lambda s, at: zero(str(s)),
    "zero at a place": lambda s, at: zero(str(s), **at),
    "zero within": lambda s, at: zero(str(s), within=span(s)),
    "mean": lambda s, at: mean(str(s), source=REFERENCE),
    "mean by position": lambda s, at: mean(str(s), source=REFERENCE, over="position"),
    "mean over all": lambda s, at: mean(str(s), source=REFERENCE, over="all"),
    "resample": lambda s, at: resample(str(s), source=REFERENCE, seed=1),
    "patch": lambda s, at: patch(str(s), source=SOURCE),
    "patch from elsewhere": lambda s, at: patch(str(s), source=SOURCE, source_T=4, **at),
    "patch redone": lambda s, at: patch(str(s), source=SOURCE, source_T=4, rotate="redo", **at),
    "noise": lambda s, at: noise(str(s), std=0.5, relative=True, seed=2),
    "add": lambda s, at: add(str(s), direction=torch.linspace(-1, 1, width(s)), alpha=2.0),
    "scale": lambda s, at: scale(str(s), factor=-0.5),
    "project out": lambda s, at: project_out(str(s), span=span(s)),
    "set": lambda s, at: set_to(str(s), value=torch.arange(width(s))),
    "freeze": lambda s, at: freeze(str(s)),
    "function": lambda s, at: edit(str(s), lambda v: v.flip(0), "flip rows"),
}

PER_SLOT = {"gates", "g_e", "u_e", "a_e", "h_e", "y_e"}
INTEGERS = dict.fromkeys([*EDITS], "only set, force, patch and freeze") | dict.fromkeys(
    ["set", "patch", "patch from elsewhere", "patch redone", "freeze"], ""
)
REFUSED: dict[str, dict[str, str]] = {
    "delta_heads": dict.fromkeys(EDITS, "edit `O`"),
    "experts": INTEGERS,
    **{
        name: dict.fromkeys(["patch", "patch from elsewhere", "patch redone"], "patch delta_experts")
        for name in PER_SLOT
    },
    **{
        name: {"mean over all": "belongs to its position", "patch from elsewhere": "rotate="}
        for name in ("Q_R", "k_R", "Q", "K")
    },
    **{
        name: dict.fromkeys(["zero within", "project out"], "no subspaces")
        | dict.fromkeys(["patch from elsewhere", "patch redone"], "belongs to its positions")
        | {"mean over all": "belongs to its position"}
        for name in ("S", "A")
    },
}
"""What is refused, by tensor and edit, and what the message says. Everything else acts."""

NOTHING = {"freeze"}
"""Edits that change nothing by themselves."""


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_each_cell_acts_or_is_refused_by_name(site: Site, kind: str) -> None:
    node = MODEL.sites.node(site)
    change = EDITS[kind](site, {"T" if "T" in node.shape else "S": 2})
    if why := REFUSED.get(site.tensor, {}).get(kind):
        with pytest.raises(ProbeError) as refusal:
            MODEL.run(TOKENS, edits=[change])
        assert why in str(refusal.value)
        assert site.tensor in str(refusal.value)
        return
    whole, part = (MODEL.run(TOKENS, edits=[change], want=[site, "logits"], base=base) for base in (None, BASE))
    assert torch.equal(whole["logits"], part["logits"]), "partial equals whole"
    assert torch.equal(whole[site], part[site])
    assert whole["logits"].isfinite().all()
    moved = not torch.equal(whole["logits"], BASE["logits"])
    assert moved == (kind not in NOTHING), "it acts"
    natural = whole.natural[site]
    assert torch.equal(natural, BASE[site]), "the value that would have been is at hand"


def test_the_table_is_whole() -> None:
    assert len(SITES) * len(EDITS) == (40 + 53 + 5) * 17
    assert set(REFUSED) <= {site.tensor for site in SITES}


def test_nothing_of_the_runs_that_others_hold_has_moved() -> None:
    again: Run = MODEL.run(TOKENS, want=SITES)
    assert all(torch.equal(again[site], BASE[site]) for site in SITES)
