"""The studies by name: what a spec may ask for. A study's options are its function's arguments, and listed nowhere
else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from experiments import bars, causal_plots, effect_plots, lens_plots, probe_plots, steer_plots
from experiments.ablate import ablate
from experiments.ablate import outlook as of_ablation
from experiments.attribution import attribute
from experiments.attribution import outlook as of_attribution
from experiments.circuit import circuit
from experiments.circuit import outlook as of_circuit
from experiments.compare import compare
from experiments.compare import outlook as of_comparison
from experiments.lens import direct, lens
from experiments.lens import outlook as of_lens
from experiments.lens import outlook_direct as of_direct
from experiments.norms import norms
from experiments.norms import outlook as of_norms
from experiments.patch import outlook as of_patching
from experiments.patch import patch
from experiments.paths import outlook as of_paths
from experiments.paths import paths
from experiments.pictures import comparison_maps, head_maps, load_maps, size_maps
from experiments.probes import outlook as of_probes
from experiments.probes import probes
from experiments.routing import outlook as of_routing
from experiments.routing import outlook_split as of_split
from experiments.routing import routing, split
from experiments.scores import outlook as of_scores
from experiments.scores import scores
from experiments.steer import outlook as of_steering
from experiments.steer import steer
from experiments.top import outlook as of_ranking
from experiments.top import top


class Study(NamedTuple):
    """What can be asked of a study.

    Attributes:
        run: the function itself; its first argument is the model.
        pictures: (its frame, its arguments) → pictures, each with a name for its file.
        plan: the same arguments as ``run`` → what it would cost, name → number: ``cells``, ``worlds``, ``forwards``
            (in plain forward passes over the prompts), ``bytes``, ``seconds``. It raises what ``run`` would raise of
            these arguments. With ``timed=False`` no pass is made for ``seconds``, which are NaN. None: it can't tell.
    """

    run: Callable[..., pd.DataFrame]
    pictures: Callable[[pd.DataFrame, Mapping[str, Any]], Iterator[tuple[str, Axes]]]
    plan: Callable[..., Mapping[str, float]] | None = None


STUDIES: dict[str, Study] = {
    "ablate": Study(ablate, lambda df, arguments: effect_plots.pictures(df), of_ablation),
    "patch": Study(patch, lambda df, arguments: effect_plots.pictures(df), of_patching),
    "paths": Study(paths, lambda df, arguments: iter([("paths", causal_plots.paths(df))]), of_paths),
    "circuit": Study(circuit, lambda df, arguments: causal_plots.circuits(df), of_circuit),
    "attribute": Study(attribute, lambda df, arguments: causal_plots.attributions(df), of_attribution),
    "norms": Study(norms, lambda df, arguments: size_maps(df), of_norms),
    "lens": Study(lens, lambda df, arguments: lens_plots.pictures(df), of_lens),
    "direct": Study(direct, lambda df, arguments: iter([("direct", lens_plots.direct(df))]), of_direct),
    "probes": Study(probes, lambda df, arguments: probe_plots.pictures(df), of_probes),
    "routing": Study(routing, lambda df, arguments: load_maps(df), of_routing),
    "split": Study(split, lambda df, arguments: bars.splits(df), of_split),
    "scores": Study(scores, lambda df, arguments: head_maps(df), of_scores),
    "steer": Study(steer, lambda df, arguments: steer_plots.pictures(df), of_steering),
    "top": Study(top, lambda df, arguments: bars.rankings(df), of_ranking),
    "compare": Study(compare, lambda df, arguments: comparison_maps(df), of_comparison),
}
"""Name → study."""
