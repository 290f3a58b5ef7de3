"""What a run does with each value as it is made: edit it, show it to its hook, keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hooks.apply import ROUTER, At, EditedWeights, acted, check_overlap, short_of_experts, too_few
from hooks.cache import Cache
from hooks.finite import noticing
from hooks.keep import Keeper
from probe.decoder import Decoder
from probe.engine import Fork
from probe.sites import Site

if TYPE_CHECKING:
    from hooks.model import HookedModel


class Recorder:
    """Sees each value as it is made: edits it, passes it through its hook point, and shows it to its keeper. ``cache``
    has what a later run needs, in a plain run beside what was asked for; without a keeper, nothing.

    Args:
        fresh: whether the run makes all its values itself. If no hook sees them either, they are kept as they are; an
            edit makes a new one.
        step: of decoding; see `hooks.point.Clock`.

    Raises:
        BadEdit: another thread has hooks on.
    """

    def __init__(
        self,
        model: HookedModel,
        applied: Sequence[At],
        keeper: Keeper | None = None,
        fresh: bool = False,
        step: int = 0,
    ) -> None:
        self.model, self.keeper, self.step = model, keeper, step
        on_weights = [at for at in applied if at.is_weight]
        weights = model.decoder.weights
        self.decoder = (
            Decoder(EditedWeights(weights, on_weights), model.decoder.numerics, model.decoder.beyond)
            if on_weights
            else model.decoder
        )
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
        readers = {Site(at.site.block, name) for at in applied for name in at.into}
        self.watched = model.acting()
        self.routers = {Site(at.site.block, "choice_score") for at in applied if at.site.tensor in ROUTER}
        self.edited = {*self.by_site, *self.watched, *self.slots, *readers, *self.routers}
        self.made = fresh and not self.watched
        tokens = keeper.cache.tokens if keeper else None
        self.notice = noticing(model, tokens, rows, [at.edit for at in applied])

    def __call__(self, site: Site, value: Tensor) -> Tensor | Fork:
        """The value as those below shall see it."""
        if not self.watched and site not in self.edited:
            self._keep(site, value)
            return value
        edits = self.by_site.get(site, [])
        if edits:
            self.natural.keep(site, value)
            check_overlap(edits, value, self.seen.get(site.block, {}))
        value, by_reader, last = acted(value, edits, self.seen.get(site.block, {}))
        shown = self.model.pass_in(self.step, site, last)
        if site in self.routers and bool(short_of_experts(shown, self.model.dims).any()):
            router = [at for name in ROUTER for at in self.by_site.get(Site(site.block, name), ())]
            raise too_few(router, self.model.dims)
        if site in self.slots:
            self.seen.setdefault(site.block, {})[site.tensor] = shown
        self._keep(site, shown)
        if not by_reader:
            return shown
        return Fork(value, {reader: shown if own is last else own for reader, own in by_reader.items()}, shown)

    def show(self, site: Site, queries: slice, value: Tensor) -> None:
        """A chunk of queries of scores or patterns, that are never made whole."""
        self.notice(site, value)
        if self.keeper is not None:
            self.keeper.see_chunk(site, queries, value)

    def _keep(self, site: Site, value: Tensor) -> None:
        self.notice(site, value)
        if self.keeper is not None:
            self.keeper.see(site, value, self.made)
            if self._on_spine(site) and site not in self.cache:
                self.cache.keep(site, value, self.made)

    def _on_spine(self, site: Site) -> bool:
        """What a later run needs of this one: the choice to compare with, and where this one may be its base (it is
        plain), the residual stream to start from."""
        plain = self.keeper is not None and self.cache is self.keeper.cache
        return site.tensor == "experts" or (plain and (site.tensor == "x_n" or site == Site(self.last, "x_next")))
