"""Looking and changing: a hook on every named tensor, caches, edits, runs that recompute what an edit reaches."""

from hooks import reduce
from hooks.cache import Cache
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
    scale,
    set_to,
    splice,
    zero,
)
from hooks.estimate import Estimate, estimate
from hooks.model import HookedModel
from hooks.run import Run
from probe.sites import Site

__all__ = [
    "Cache",
    "Dictionary",
    "Edit",
    "Estimate",
    "HookedModel",
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
    "noise",
    "patch",
    "project_out",
    "reduce",
    "resample",
    "scale",
    "set_to",
    "splice",
    "zero",
]
