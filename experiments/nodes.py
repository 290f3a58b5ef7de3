"""Nodes: the places in a model that paths and circuits are made of, and the texts that name them.

A text names one node or several: a tensor in any spelling, in its block or in all that have it, then parts of it in the
tensor's own dims, each a number, a span's name, or ``*`` for every one:

=====================  ==============================================
``blocks.2.O h=1``     what head 1 of block 2 has read
``O h=*``              the same of every head of every block
``V h=* S=subject``    every head's values at the subject
``x_0 T=*``            the embedding at each named span
``delta_experts e=*``  what each expert adds, in every MoE block
``logits``             what comes out
=====================  ==============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from experiments import stats
from experiments.frames import BadFrame, check_one, tensors
from experiments.options import By
from experiments.parts import Part, dim_of, parts
from experiments.prompts import Prompts
from experiments.study import chosen_sites
from hooks import HookedModel
from hooks.edits import SCORES
from hooks.where import axis_of
from probe.card import Leaf, Step
from probe.errors import BadEdit, UnknownTensor, asking
from probe.sites import Site


@dataclass(frozen=True)
class Node:
    """A tensor of a block, or a part of it."""

    site: Site
    part: Part

    def __str__(self) -> str:
        return " ".join([str(self.site), *(f"{dim}={place}" for dim, place in self.part.where.items())])

    @property
    def columns(self) -> dict[str, Any]:
        """What says in a frame which it is."""
        block = pd.NA if self.site.block is None else self.site.block
        return {"block": block, "tensor": self.site.tensor, **self.part.columns}


def nodes(model: HookedModel, prompts: Prompts, texts: str | Sequence[str]) -> list[Node]:
    """The nodes that texts name, each once, in the order of the texts.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim: a tensor, a block or a part that doesn't exist.
        BadEdit: a part that is no place, a span that no prompt has.
        BadSample: a position, of prompts in which it is different words.
    """
    found: dict[str, Node] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        with asking(f"node {text!r}"):
            name, *words = text.split() or [text]
            around = name in model.sites.around.spellings()
            for site in [model.sites.find(name)] if around else chosen_sites(model, [name], None):
                for part in _parts(model, prompts, site, words):
                    node = Node(site, part)
                    found.setdefault(str(node), node)
    if not found:
        raise UnknownTensor("no node is named; they are like 'blocks.2.O h=1', 'O h=*', 'logits'.")
    return list(found.values())


def _parts(model: HookedModel, prompts: Prompts, site: Site, words: Sequence[str]) -> list[Part]:
    """All parts of a tensor that words like ``h=1``, ``T=*`` name."""
    node = model.sites.node(site)
    every: list[By] = []
    where: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    have = set(range(len(prompts)))
    for word in words:
        dim, _, place = word.partition("=")
        by, numbered = _by(node, dim, word), place.isdecimal() and len(place) < 19
        if numbered or (by == "key" and place == "*"):
            stats.check_average([prompt.shape for prompt in prompts.rows], by)
        if place == "*":
            every.append("role" if by == "position" else by)
        elif numbered:
            where[dim] = int(place)
            columns[{"position": "pos"}.get(by, by)] = int(place)
        else:
            where[dim] = columns["role"] = place
            have &= _with_span(prompts, place, by, word)
    order = ["h", "e", node.shape[-1], "S", "T"]  # one name for a node, whatever the order of the words
    made = [
        replace(part, where=dict(sorted(part.where.items(), key=lambda at: order.index(at[0]))))
        for part in parts(model, prompts, site, every, where)
    ]
    if len(have) == len(prompts):
        return [replace(part, columns={**columns, **part.columns}) for part in made]
    both = [tuple(p for p in sorted(have) if part.prompts is None or p in part.prompts) for part in made]
    return [Part({**columns, **part.columns}, part.where, some) for part, some in zip(made, both, strict=True) if some]


def _by(node: Step | Leaf, dim: str, word: str) -> By:
    """What parts along a dim go by.

    Raises:
        UnknownDim: the tensor lacks it.
        BadEdit: it makes no parts that a frame could tell apart.
    """
    slots = dim == "e" and "k" in node.shape
    axis = -1 if slots or not dim else axis_of(node, dim)
    if dim in ("T", "S"):
        return "key" if dim == "S" and node.name in SCORES else "position"
    if dim in ("h", "e"):
        return "head" if dim == "h" else "expert"
    if not dim or dim == "k" or axis != len(node.shape) - 1:
        raise BadEdit(
            f"{word!r}: a part is said like h=1, T=END, e=*, in the dims of {node.name} [{' '.join(node.shape)}]."
        )
    return "feature"


def _with_span(prompts: Prompts, place: str, by: By, word: str) -> set[int]:
    """The prompts that have a span."""
    span = place.partition("[")[0]
    have = {i for i, prompt in enumerate(prompts.rows) if span in prompt.spans}
    if by != "position" or not have:
        known = sorted({name for prompt in prompts.rows for name in prompt.spans})
        raise BadEdit(f"{word!r}: it takes a number, * or, of positions, a span; the prompts have {', '.join(known)}.")
    return have


def largest(df: pd.DataFrame, most: int) -> list[str]:
    """The nodes of the largest effects in a frame of cells (of an ablation, of patches), as texts, the largest first.

    Args:
        df: of one metric. Cells that equal earlier ones by construction (``same_as``) are passed over.

    Raises:
        BadFrame: several metrics, models or sets of prompts; no effects; rows by prompt.
    """
    check_one(df)
    if df["metric"].nunique() != 1 or "effect" not in df or "example" in df:
        raise BadFrame("the largest effects are of one metric, averaged over prompts: keep the rows of one.")
    own = df[df["same_as"].isna()] if "same_as" in df else df
    order = own["effect"].abs().sort_values(ascending=False, kind="stable")
    return [_text(row) for row in own.loc[order.index[:most]].to_dict("records")]


def _text(row: dict[Any, Any]) -> str:
    node = tensors()[row["tensor"]]
    columns: list[tuple[str, By]] = [("head", "head"), ("expert", "expert"), ("feature", "feature"), ("key", "key")]
    columns += [("role", "role")] if pd.notna(row.get("role")) else [("pos", "position")]
    there = [f"{dim_of(by, node)}={row[column]}" for column, by in columns if pd.notna(row.get(column))]
    return " ".join([str(Site(None if pd.isna(row["block"]) else row["block"], row["tensor"])), *there])
