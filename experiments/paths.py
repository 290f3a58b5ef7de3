"""Path patching: a sender takes the source's value, and only a receiver sees what comes of it.

It takes two runs. In the first the sender is patched, what is to hold keeps the base's value on the way, and what
arrives at the receiver is read. In the second the receiver alone takes that, and everything past it is computed as
usual. ``hold`` says what holds: ``all`` (every Δ_attn and Δ_ffn: the direct path through the residual stream), ``attn``
(heads; FFNs compute anew what they are given), ``none`` (every path from the sender to the receiver counts). Norm
scales and routing are computed anew unless frozen. What makes the sender's own Δ out of it is no way in between.

Any tensor, or part of one, sends and receives: a head sends ``O`` and receives ``Q``, ``K`` or ``V``; an FFN sends
``delta_ffn`` and receives ``x_ffn``, an expert ``delta_experts``; ``logits`` receives all that is left. First runs of
all senders are one sweep, second runs of all pairs another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from torch import Tensor

from experiments.asking import LOGITS
from experiments.finite import telling
from experiments.frames import frame
from experiments.measure import Asked, Measured, cost, measure, table
from experiments.nodes import Node, nodes
from experiments.options import Direction, Hold
from experiments.patch import Sides, check_lengths, sides, wrong
from experiments.prompts import Prompts
from experiments.study import check_drawn, common, numel
from hooks import Cache, Cell, Edit, HookedModel, Live, freeze, sweep
from hooks import outlook as ahead
from hooks import patch as patched
from hooks.cells import BUDGET
from hooks.edits import SCORES
from hooks.stream import differs
from hooks.where import Rows, where_of
from probe.errors import BadEdit
from probe.sites import Site, Sites

HOLDS: dict[Hold, tuple[str, ...]] = {"all": ("delta_attn", "delta_ffn"), "attn": ("delta_attn",), "none": ()}
"""What keeps the base's value between sender and receiver."""

READ = {"delta_attn": "x_n", "delta_ffn": "x_mid"}
"""Where in the residual stream each Δ begins."""


@telling
def paths(
    model: HookedModel,
    prompts: Prompts,
    *,
    senders: Sequence[str],
    receivers: Sequence[str] = ("logits",),
    hold: Hold = "all",
    direction: Direction = "denoise",
    frozen: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    per_prompt: bool = False,
    budget: int = BUDGET,
    beyond: bool = False,
    name: str | None = None,
) -> pd.DataFrame:
    """Patch every path from a sender to a receiver below it; a row for each path and metric.

    Args:
        senders, receivers: see `experiments.nodes`.
        hold: see above.
        direction: as in `experiments.patch`: clean into corrupt, or corrupt into clean.
        frozen: tensors that are held at the base's values in both runs: ``experts``, ``gates``, ``A``, ``s_*``.
        metrics: names, see `experiments.metrics.metric`; None: the usual ones of the logits.
        seed: of the intervals' resamples.
        per_prompt: a row for each prompt, its index in ``example``, in place of the average.
        budget: bytes for the rows in flight, and again for what arrives at receivers: senders go in as many parts as
            that needs.
        beyond: whether texts may be longer than ``max_position_embeddings``; see `HookedModel.reaching`.
        name: of the model, for the column ``model``, which adds a digest of the weights.

    Returns:
        A frame (see `experiments.frames.COLUMNS`). ``sender`` and ``receiver`` are nodes; block, tensor and parts are
        the sender's. ``recovered`` is the share of what swapping the prompt does that comes by this path. ``flips`` are
        the second run's; of logits the first's, in FFNs that hold too, where they change nothing.

    Raises:
        UnknownTensor, OutOfRange, UnknownDim, BadEdit: a node that doesn't exist or can't be patched; no receiver below
            any sender; texts of unequal length, unless all senders are at spans.
        BadMetric, BadText: a metric that these prompts give no ground for; prompts without a corrupt text.
    """
    check_drawn(seed)
    model = model.reaching(beyond)
    asked = _Paths.of(model, prompts, senders, receivers, hold, direction, frozen, metrics)
    parts = asked.parts(model, budget)
    found = _joined([asked.measured(model, part, budget) for part in parts])
    those = wrong(found, direction)
    df = table(asked.sides.ask, found, per_prompt=per_prompt, seed=seed, wrong=those)
    same: dict[str, Any] = {
        **common(model, name, prompts),
        "edit": "patch",
        "hold": hold,
        "frozen": ", ".join(frozen) or pd.NA,
        "direction": direction,
        "source": asked.sides.of_source,
        "seed": seed,
    }
    df = frame(df.assign(**same), study="paths")
    df.attrs["mistaken"] = None if those is None else int(those.sum())
    return df


def outlook(
    model: HookedModel,
    prompts: Prompts,
    *,
    senders: Sequence[str],
    receivers: Sequence[str] = ("logits",),
    hold: Hold = "all",
    direction: Direction = "denoise",
    frozen: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    budget: int = BUDGET,
    beyond: bool = False,
    timed: bool = True,
    **_: Any,
) -> Mapping[str, float]:
    """What `paths` would take; see `experiments.measure.cost`."""
    model = model.reaching(beyond)
    asked = _Paths.of(model, prompts, senders, receivers, hold, direction, frozen, metrics)
    both = asked.sides
    stand_in = [
        asked.second(first, end, both.source, None if end.site == LOGITS else end.part.rows(both.ask))
        for first in asked.firsts
        for end in first.receivers
    ]
    second = cost(model, both.ask, stand_in, both.source, source_ask=both.source_ask, timed=timed)
    first = ahead(model, asked.base(), [one.cell for one in asked.firsts], sources=[both.source]).forwards
    again = 4.0 * (len(asked.parts(model, budget)) - 1)  # base and source, in both sweeps
    share = 1 + (first + again) / second["forwards"]
    return {**second, "forwards": second["forwards"] * share, "seconds": second["seconds"] * share}


# ---- the two runs ----------------------------------------------------------------------------------------------------


class _First(NamedTuple):
    """The first run of those paths of a sender that hold the same."""

    sender: Node
    cell: Cell
    looked: tuple[Site, ...]
    receivers: tuple[Node, ...]


class _Paths(NamedTuple):
    """All that follows from the arguments of `paths`."""

    sides: Sides
    frozen: tuple[Edit, ...]
    firsts: list[_First]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        prompts: Prompts,
        senders: Sequence[str],
        receivers: Sequence[str],
        hold: Hold,
        direction: Direction,
        frozen: Sequence[str],
        metrics: Sequence[str] | None,
    ) -> _Paths:
        """First runs, each with the receivers that it is of."""
        if hold not in get_args(Hold):
            raise BadEdit(f"hold={hold!r}: between sender and receiver {', '.join(get_args(Hold))} may be held.")
        both = sides(model, prompts, direction, metrics)
        starts, ends = (nodes(model, both.prompts, texts) for texts in (senders, receivers))
        check_lengths(both.ask, both.source_ask, by_role=all("role" in node.part.columns for node in starts))
        if parted := [node for node in ends if node.site == LOGITS and node.part.where]:
            raise BadEdit(f"{parted[0]}: logits receive whole; which of them count is the metric's.")
        kept = tuple(freeze(tensor) for tensor in frozen)
        made = cls(both, kept, [])
        for sender in starts:
            below = [end for end in ends if _below(model.sites, sender.site, end.site) and _prompts(sender, end) != ()]
            for held, some in _by_held(model.sites, sender.site, below, hold).items():
                made.firsts.append(made.first(model, sender, held, some))
        if not made.firsts:
            raise BadEdit(
                f"no receiver ({', '.join(map(str, ends))}) is below a sender ({', '.join(map(str, starts))})."
            )
        return made

    def first(self, model: HookedModel, sender: Node, held: Sequence[Site], receivers: Sequence[Node]) -> _First:
        """The sender patched, and what is held; whole at each receiver."""
        site, where = sender.site, sender.part.rows(self.sides.ask)
        start = patched(site.tensor, site.block, source=self.sides.source, **where)
        between = (freeze(one.tensor, one.block) for one in held)
        looked = dict.fromkeys(
            one for end in receivers if end.site != LOGITS for one in _with_slots(model.sites, end.site)
        )
        cell = Cell((start, *between, *self.frozen), str(sender), whole=tuple(looked))
        return _First(sender, cell, tuple(looked), tuple(receivers))

    def base(self) -> Live:
        """The base, to run along."""
        return self.sides.ask.live()

    def parts(self, model: HookedModel, budget: int) -> list[list[_First]]:
        """First runs in parts, of which what arrives fits the budget."""
        parts: list[list[_First]] = []
        full = 0
        for first in self.firsts:
            size = 4 * sum(numel(model, site, *self.sides.ask.tokens.shape) for site in first.looked)
            if not parts or full + size > budget:
                parts.append([])
                full = 0
            parts[-1].append(first)
            full += size
        return parts

    def measured(self, model: HookedModel, firsts: Sequence[_First], budget: int) -> Measured:
        """First runs in a sweep, second runs in another."""
        base, seen = self.base(), dict[int, dict[Site, Tensor]]()

        def look(who: Cell | Live, site: Site, value: Tensor) -> None:
            seen.setdefault(id(who), {})[site] = value

        cells = [first.cell for first in firsts if first.looked]
        if cells:
            sweep(model, base, cells, look, sources=[self.sides.source], want=(), budget=budget)
        of_base = seen.pop(id(base), {})
        asked = []
        for first in firsts:
            arrived = Cache(model.sites, seen.pop(id(first.cell), {}), base.rows)
            for end in first.receivers:
                where = None if end.site == LOGITS else self._new(model, end, arrived, of_base, base.rows)
                asked.append(self.second(first, end, arrived, where))
        ask, source_ask, source = self.sides.ask, self.sides.source_ask, self.sides.source
        return measure(model, ask, asked, source=source, source_ask=source_ask, budget=budget, what="paths")

    def _new(
        self, model: HookedModel, end: Node, arrived: Cache, of_base: Mapping[Site, Tensor], rows: Rows
    ) -> dict[str, Any] | None:
        """Where in the receiver anything arrives; None: nowhere. The base's own values are left out, as the second
        sweep may round them otherwise, and that would look like an effect."""
        node, where = model.sites.node(end.site), end.part.rows(self.sides.ask)
        dim = "T" if "T" in node.shape else "S"
        values = [run[end.site] for run in (arrived, of_base)]
        if "h" in where and "h" in node.shape:
            values = [value.select(node.shape.index("h"), where["h"]) for value in values]
        elif node.name in SCORES:
            values = [value.transpose(1, 2) for value in values]
        named = dict(where_of({dim: where[dim]}))[dim] if dim in where else None
        new = differs(*values).cpu() & rows.mask(named, dim, where.get("B"))
        return {**where, dim: new} if bool(new.any()) else None

    def second(self, first: _First, end: Node, arrived: Cache | Live, where: Mapping[str, Any] | None) -> Asked:
        """The receiver alone takes what has arrived; where that is the logits, the first run says all.

        Args:
            where: in the receiver's dims; None: nothing has arrived.
        """
        edits: tuple[Edit, ...] = first.cell.edits if end.site == LOGITS else ()
        if where is not None:
            edits = (patched(end.site.tensor, end.site.block, source=arrived, **where), *self.frozen)
        columns = {"sender": str(first.sender), "receiver": str(end), **first.sender.columns}
        block = (first.sender if end.site == LOGITS else end).site.block
        return Asked((lambda _: edits,), columns, block, _prompts(first.sender, end))


# ---- which paths there are, and what holds ---------------------------------------------------------------------------


def _below(sites: Sites, sender: Site, receiver: Site) -> bool:
    """Whether anything leads from the one to the other."""
    start, end = sites.depth(sender), sites.depth(receiver)
    if start != end:  # embedding and logits are in no block, and far apart
        return start < end
    return receiver.tensor in sites.card(sender.block).descendants([sender.tensor])


def _prompts(sender: Node, receiver: Node) -> tuple[int, ...] | None:
    """The prompts that have both; None: all."""
    some, others = sender.part.prompts, receiver.part.prompts
    return others if some is None else some if others is None else tuple(p for p in some if p in set(others))


def _by_held(sites: Sites, sender: Site, receivers: Sequence[Node], hold: Hold) -> dict[tuple[Site, ...], list[Node]]:
    """What holds → the receivers for which it does. A held Δ can't be a receiver itself; one past all receivers would
    change nothing."""
    last = max((sites.depth(end.site) for end in receivers), default=-1)
    blocks = [block for block in sites.blocks if sites.depth(sender) <= block <= last]
    deltas = [Site(block, name) for block in blocks for name in HOLDS[hold]]
    made: dict[tuple[Site, ...], list[Node]] = {}
    for end in receivers:
        held = tuple(one for one in deltas if one != end.site and _between(sites, sender, one))
        made.setdefault(held, []).append(end)
    return made


def _between(sites: Sites, sender: Site, delta: Site) -> bool:
    """Whether a Δ is below the sender, by way of the residual stream: not itself, nor of what it is made of."""
    if sender.block != delta.block:
        return _below(sites, sender, delta)
    card, start = sites.card(sender.block), READ[delta.tensor]
    inside = sender.tensor in card.descendants([start])
    return not inside and _below(sites, sender, delta)


def _with_slots(sites: Sites, site: Site) -> list[Site]:
    """A site, with the experts that its slots hold."""
    return [site, *([Site(site.block, "experts")] if "k" in sites.node(site).shape else [])]


def _joined(found: Sequence[Measured]) -> Measured:
    """The cells of several sweeps over the same prompts."""
    first = found[0]

    def stacked(kind: str) -> dict[str, Any]:
        return {
            metric: np.concatenate([getattr(one, kind)[metric] for one in found]) for metric in getattr(first, kind)
        }

    asked = [one for part in found for one in part.asked]
    outcomes = [draws for part in found for draws in part.outcomes]
    return Measured(asked, stacked("values"), stacked("base"), first.source, stacked("noise"), outcomes)
