"""Looking and changing: a hook on every named tensor, caches, edits, runs that recompute what an edit reaches."""

import warnings

with warnings.catch_warnings():  # in a notebook what it loads misses a widget, which nobody here uses
    warnings.filterwarnings("ignore", "IProgress not found")
    import transformer_lens  # noqa: F401

from hooks import reduce
from hooks.cache import Cache
from hooks.cells import Cell, Live, Outcome
from hooks.dictionary import Dictionary
from hooks.edits import (
    Edit,
    add,
    edit,
    exclude,
    force,
    freeze,
    knock_out,
    mean,
    noise,
    patch,
    project_out,
    resample,
    rounded,
    scale,
    set_to,
    splice,
    zero,
)
from hooks.estimate import Estimate, estimate
from hooks.model import HookedModel
from hooks.neurons import neuron_effects
from hooks.run import Run
from hooks.sweep import outlook, sweep
from probe.sites import Site

__all__ = [
    "Cache",
    "Cell",
    "Dictionary",
    "Edit",
    "Estimate",
    "HookedModel",
    "Live",
    "Outcome",
    "Run",
    "Site",
    "add",
    "edit",
    "estimate",
    "exclude",
    "force",
    "freeze",
    "knock_out",
    "mean",
    "neuron_effects",
    "noise",
    "outlook",
    "patch",
    "project_out",
    "reduce",
    "resample",
    "rounded",
    "scale",
    "set_to",
    "splice",
    "sweep",
    "zero",
]
