"""What a run does with each value as it is made: edit it, show it to its hook, keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hooks.apply import At, EditedWeights
from hooks.cache import Cache
from hooks.edits import Edit
from hooks.keep import Keeper
from probe.decoder import Decoder
from probe.engine import Fork
from probe.errors import BadEdit
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel


class Recorder:
    """Sees each value as it is made: edits it, passes it through its hook point, and shows it to its keeper. ``cache``
    has what a later run needs, in a plain run beside what was asked for; without a keeper, nothing."""

    def __init__(self, model: HookedModel, applied: Sequence[At], keeper: Keeper | None = None) -> None:
        self.model, self.keeper = model, keeper
        on_weights = [at for at in applied if at.is_weight]
        weights = model.decoder.weights
        self.decoder = Decoder(EditedWeights(weights, on_weights)) if on_weights else model.decoder
        rows = keeper.rows if keeper else None
        self.cache = keeper.cache if keeper and keeper.keep.plain else Cache(model.sites, rows=rows)
        self.natural = Cache(model.sites, rows=rows)
        self.applied = applied
        self.by_site: dict[Site, list[At]] = {}
        self.seen: dict[int | None, dict[str, Tensor]] = {}
        self.last = model.sites.dims.blocks - 1
        for at in applied:
            self.by_site.setdefault(at.site, []).append(at)
        self.slots = {Site(at.site.block, name) for at in applied if at.by_slot for name in ("experts", "choice_score")}
        readers = {Site(at.site.block, name) for at in applied for name in at.edit.into}
        self.watched = model.watched()
        self.edited = {*self.by_site, *self.watched, *self.slots, *readers}

    def __call__(self, site: Site, value: Tensor) -> Tensor | Fork:
        """The value as those below shall see it."""
        edits = self.by_site.get(site, [])
        if edits:
            self.natural.keep(site, value)
            self._check_overlap(site, value, edits)
        for_all, for_some = value, value
        seen = self.seen.get(site.block, {})
        for at in edits:
            made = at(for_some, seen)
            if not at.edit.into:  # one value until an edit for some readers parts the two: no edit acts twice on one
                for_all = made if for_all is for_some else at(for_all, seen)
            for_some = made
        into = frozenset(name for at in edits for name in at.edit.into)
        shown = self.model.pass_through(site, for_some)
        if site in self.slots:
            self.seen.setdefault(site.block, {})[site.tensor] = shown
        if self.keeper is not None:
            self.keeper.see(site, shown)
            if self._on_spine(site) and site not in self.cache:
                self.cache.keep(site, shown)
        return Fork(for_all, shown, into) if into else shown

    def _on_spine(self, site: Site) -> bool:
        """What a later run needs to start from this one: the residual stream, and the choice to compare with."""
        return site.tensor in ("x_n", "experts") or site == Site(self.last, "x_next")

    def _check_overlap(self, site: Site, value: Tensor, edits: Sequence[At]) -> None:
        """Two replacing edits on the same values, or one after a change of them: the second would undo the first."""
        for i, at in enumerate(edits):
            at.seen = self.seen.get(site.block, {})
            if not at.edit.how.replaces or at.edit.through is not None:
                continue
            for other in edits[:i]:
                other.seen = at.seen
                if at.overlaps(other, value) and not _apart(at.edit, other.edit):
                    raise BadEdit(
                        f"{other.edit} and {at.edit} overlap: the second replaces values of {site} that the first made."
                    )


def _apart(one: Edit, other: Edit) -> bool:
    """Whether two edits reach different readers, or orthogonal subspaces."""
    if one.into and other.into and not set(one.into) & set(other.into):
        return True
    if one.within is not None and other.within is not None:
        return bool((one.within.tensor @ other.within.tensor.T).abs().max() < 1e-5)
    return False
