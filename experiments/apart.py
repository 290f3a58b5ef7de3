"""Which units of a spec one frame could not hold: both would have rows about one thing, and nothing would tell them
apart. It is asked before the first unit runs, of what the units are given.

Nearly all arguments stand in a column of every row, their own or ``options`` (`experiments.study.other_options`). Those
that don't are listed here: what chooses which rows there are, and what changes no number.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.metrics import metric
from experiments.nodes import nodes
from experiments.study import chosen_sites
from hooks import HookedModel

UNTOLD = ("budget", "batch", "exact", "controls", "n", "channels")
"""What changes no number, but for last bits: how much runs at once; how many rows of a kind, or which others, stand
beside the rest."""

MODEL = ("name", "weights", "dims", "dtype", "numerics")
"""What columns tell of a model; on which device it runs, or from where weights are read, changes last bits."""


class Told(NamedTuple):
    """What a frame would know of a unit.

    Attributes:
        rows: what stands in every row, as text: units that differ in it are apart.
        chosen: what chooses rows → all that is chosen, None: whatever there is. Units that share nothing of one kind
            are apart, too.
    """

    rows: str
    chosen: Mapping[str, Collection[Any] | None]

    @classmethod
    def of(cls, model: HookedModel, covers: Mapping[str, Any], arguments: Mapping[str, Any]) -> Told:
        """Of a unit.

        Args:
            covers: all that its numbers hang on, by content: see `experiments.runs.Job`.
            arguments: as its study takes them.

        Raises:
            ProbeError: a tensor, a node, a metric that doesn't exist.
        """
        chosen, told = dict(_chosen(model, arguments)), {**covers["arguments"]}
        for key in (*UNTOLD, *_CHOOSE):
            told.pop(key, None)
        rows = {key: _named(value) for key, value in told.items()} | _as_said(model, arguments)
        return cls(json.dumps([rows, {key: covers["model"][key] for key in MODEL}], sort_keys=True), chosen)

    def shares(self, other: Told) -> bool:
        """Whether both could have rows that nothing tells apart."""
        assert self.rows == other.rows, "else they are apart"
        both = [(one, other.chosen.get(kind)) for kind, one in self.chosen.items()]
        return all(one is None or theirs is None or set(one) & set(theirs) for one, theirs in both)


_CHOOSE = ("tensors", "blocks", "metrics", "senders", "receivers", "roles", "doses", "where", "steps")


def _chosen(model: HookedModel, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Collection[Any] | None]]:
    """What chooses rows, and all that is chosen."""
    if {"tensors", "blocks"} & arguments.keys():
        yield "sites", chosen_sites(model, arguments.get("tensors"), arguments.get("blocks"))
    if names := arguments.get("metrics"):
        yield "metrics", [str(metric(name)) for name in names]
    for key in ("senders", "receivers"):
        if key in arguments:
            yield key, _nodes(model, arguments, arguments[key])
    for key in ("roles", "doses"):
        yield key, arguments.get(key)
    if steps := arguments.get("steps"):  # without them, nothing that others don't have
        yield "steps", [steps]
    for dim, place in (arguments.get("where") or {}).items():
        yield f"where {dim}", place if isinstance(place, Sequence) else [place]


def _as_said(model: HookedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that can be spelt in several ways, as columns have them."""
    said: dict[str, Any] = {}
    if by := arguments.get("by"):
        said["by"] = sorted([by] if isinstance(by, str) else by)
    if "kept" in arguments:
        said["kept"] = sorted(_nodes(model, arguments, arguments["kept"]))
    if "edits" in arguments:
        given = arguments["edits"]
        edits = (one.partition(" ") for one in ([given] if isinstance(given, str) else given))
        said["edits"] = [[how, _nodes(model, arguments, node)] for how, _, node in edits]
    if (tensor := arguments.get("tensor")) is not None:
        block = arguments.get("block")
        said |= {
            "tensor": str(model.sites.find(tensor if block is None else f"blocks.{block}.{tensor}")),
            "block": None,
        }
    said |= {dim: i % model.dims.size(dim) for dim in ("h", "e") if isinstance(i := arguments.get(dim), int)}
    if "beyond" in arguments and model.dims.max_positions is None:  # no text is too long
        said["beyond"] = None
    if arguments.get("label") is not None:  # it stands for the direction
        said["direction"] = None
    return said


def _nodes(model: HookedModel, arguments: Mapping[str, Any], texts: str | Sequence[str]) -> list[str]:
    return [str(node) for node in nodes(model, arguments["prompts"], texts)]


def _named(value: Any) -> Any:
    """Prompts by their name, which is all that a column says of them."""
    if isinstance(value, list):
        return [_named(one) for one in value]
    return value["name"] if isinstance(value, dict) and "name" in value else value
