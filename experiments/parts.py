"""Parts of tensors that cells go by, a head, a position, a role, an expert, and the edits that replace them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args

import pandas as pd

from experiments import stats
from experiments.asking import Ask
from experiments.measure import Source
from experiments.options import By, How
from experiments.prompts import Prompts, Shape
from experiments.study import dims_of
from hooks import Edit, HookedModel, exclude, mean, noise, resample, zero
from hooks.edits import PER_SLOT, SCORES
from probe.card import Leaf, Step
from probe.errors import BadEdit, UnknownDim
from probe.sites import Site


@dataclass(frozen=True)
class Part:
    """A part of a tensor.

    Attributes:
        columns: what says in a frame which part it is.
        where: what says so in an edit.
        prompts: those that have it; None: all.
    """

    columns: Mapping[str, Any] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] | None = None

    def rows(self, ask: Ask) -> dict[str, Any]:
        """The edit's ``where``, on the rows of a batch that are about these prompts."""
        if self.prompts is None:
            return dict(self.where)
        return {**self.where, "B": [row for row, p in enumerate(ask.prompt_of) if p in set(self.prompts)]}


def listed(by: By | Sequence[By] | None) -> tuple[By, ...]:
    """What parts go by, as a tuple.

    Raises:
        UnknownDim: parts by something that is no part.
    """
    several: tuple[Any, ...] = () if by is None else (by,) if isinstance(by, str) else tuple(by)
    if unknown := [one for one in several if one not in get_args(By)]:
        raise UnknownDim(f"by={unknown[0]!r}: parts go by {', '.join(get_args(By))}; without it, tensors are whole.")
    if len(set(several)) < len(several) or {"position", "role"} <= set(several):
        raise UnknownDim(f"by={', '.join(several)}: positions are named twice.")
    return several


def dim_of(by: By, node: Step | Leaf) -> str:
    """The dim that ``by`` goes through: a tensor's position is a key's (S) where it is kept by key (K, V)."""
    if by in ("position", "role"):
        return "T" if "T" in node.shape else "S"
    return {"head": "h", "key": "S", "expert": "e"}.get(by) or node.shape[-1]


def can_go(by: By, node: Step | Leaf) -> bool:
    """Whether a tensor has such parts. Slots are parts by expert; features are of a last axis that is no other part."""
    dim, dims = dim_of(by, node), dims_of(node)
    if by == "feature":  # a contribution is taken whole, as experts of another run join it
        return dim not in ("S", "1", "k", "e") and "(" not in dim and node.name != "delta_experts"
    if by == "key":
        return node.name in SCORES
    return dim in dims or (dim == "e" and "k" in dims)


def parts(
    model: HookedModel, prompts: Prompts, site: Site, by: Sequence[By], at: Mapping[str, Any] | None = None
) -> list[Part]:
    """Every part of a tensor, by one thing or a product of several.

    Args:
        at: limits all parts, as an edit's ``where``: ``{"T": "END"}``.

    Raises:
        UnknownDim: the tensor has no such parts.
    """
    node = model.sites.node(site)
    for one in by:
        if not can_go(one, node):
            raise UnknownDim(f"{site} has no parts by {one}; it has {' '.join(node.shape)}.")
    made = [Part(where=dict(at or {}))]
    for one in by:
        made = [both for a, b in product(made, list(_by(model, prompts, node, one))) if (both := _joined(a, b))]
    return made


def place(prompts: Prompts, node: Step | Leaf, at: str | int | None) -> Part:
    """The part of a tensor that is at a span, or at a position; None: all of it.

    A position from the front has a number in the frame, one from the end (-1), which is another in each prompt, a name.

    Raises:
        BadSample: a position, of prompts in which it is different words.
    """
    if at is None:
        return Part()
    if isinstance(at, int) and at != -1:
        stats.check_average([prompt.shape for prompt in prompts.rows], "position")
    said = {"pos": at} if isinstance(at, int) and at >= 0 else {"role": str(at)}
    return Part(said, {dim_of("position", node): at})


def columns(site: Site, node: Step | Leaf, *within: Part) -> dict[str, Any]:
    """What says in a frame which tensor it is, and which part of it within which."""
    return {
        "block": site.block,
        "step": getattr(node, "number", None) or pd.NA,
        "tensor": site.tensor,
        "symbol": node.symbol,
        **{name: said for part in within for name, said in part.columns.items()},
    }


def _joined(a: Part, b: Part) -> Part | None:
    """A part of a part; None where no prompt has both."""
    if taken := set(a.where) & set(b.where):
        raise UnknownDim(f"{', '.join(sorted(taken))} is limited twice; go by it, or name a place, not both.")
    both = a.prompts or b.prompts
    if a.prompts is not None and b.prompts is not None:
        both = tuple(p for p in a.prompts if p in set(b.prompts))
        if not both:
            return None
    return Part({**a.columns, **b.columns}, {**a.where, **b.where}, both)


def _by(model: HookedModel, prompts: Prompts, node: Step | Leaf, by: By) -> Iterator[Part]:
    dim = dim_of(by, node)
    if by in ("head", "expert", "feature"):
        for i in range(model.dims.size(dim)):
            yield Part({by: i}, {dim: i})
    elif by == "role":
        for name in _roles(prompts):
            have = tuple(i for i, prompt in enumerate(prompts.rows) if len(prompt.spans.get(name, ())))
            yield Part({"role": name}, {dim: name}, None if len(have) == len(prompts) else have)
    else:
        yield from _places(prompts, dim, "pos" if by == "position" else "key")


def _roles(prompts: Prompts) -> list[str]:
    """The names of all spans, in the order of the text in which each first comes."""
    first: dict[str, int] = {}
    for prompt in prompts.rows:
        for name, span in prompt.spans.items():
            first.setdefault(name, span[0] if len(span) else 0)
    return sorted(first, key=lambda name: (first[name], name == "END"))


def _places(prompts: Prompts, dim: str, column: str) -> Iterator[Part]:
    """Positions; of prompts of several shapes, shape by shape, with a label in ``group``."""
    shapes = prompts.shapes()
    for label, (shape, rows) in zip(labels(list(shapes)), shapes.items(), strict=True):
        several = {"group": label} if len(shapes) > 1 else {}
        for pos in range(shape.length):
            named = _named(prompts, rows, pos) if column == "pos" else {}
            yield Part({**several, column: pos, **named}, {dim: pos}, tuple(rows) if several else None)


def _named(prompts: Prompts, rows: Sequence[int], pos: int) -> dict[str, str]:
    """A position's token, where these prompts agree on it, and the spans that it is in."""
    ids = {prompts.rows[i].tokens[pos] for i in rows}
    token = {"token": prompts.tokenizer.token(ids.pop())} if len(ids) == 1 else {}
    roles = [name for name, span in prompts.rows[rows[0]].spans.items() if pos in span]
    return {**token, **({"role": ", ".join(roles)} if roles else {})}


def labels(shapes: Sequence[Shape]) -> list[str]:
    """A name for each shape: its template, with its length or number where several share it."""
    names = [shape.template or f"{shape.length} tokens" for shape in shapes]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def ablation(
    how: How, site: Site, source: Source, where: Mapping[str, Any], rows: Sequence[int] | None, seed: int
) -> Edit:
    """One part of a tensor replaced.

    Args:
        source: the reference prompts, where ``how`` takes values from any.
        rows: the reference row of each row, where it resamples.
        seed: of what is drawn.
    """
    if how == "exclude":
        assert site.block is not None, "choice_score is in a block"
        return exclude(site.block, **where)
    if how == "noise":
        return noise(site.tensor, site.block, std=1.0, relative=True, seed=seed, **where)
    if how == "zero":
        return zero(site.tensor, site.block, **where)
    if source is None:
        raise BadEdit(f"{how} takes values from reference prompts, and there are none.")
    if how == "mean":
        return mean(site.tensor, site.block, source=source, **where)
    drawn = None if site.tensor in PER_SLOT else rows  # slots are drawn token by token
    return resample(site.tensor, site.block, source=source, rows=drawn, seed=seed, **where)
