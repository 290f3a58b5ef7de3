"""The self-test of a model and of the hooks on it: does each hook fire, act and leave nothing behind?

It asks on random tokens and needs no tokenizer; each finding is a sentence and what failed, by name. A few runs for
each tensor of the first dense and the first MoE block: seconds on the tiny model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hooks import HookedModel, Run, Site, resample
from hooks.edits import PER_SLOT
from hooks.finite import begins
from probe.errors import ProbeError
from probe.numerics import forbidden

ROWS, LENGTH = 2, 8


class CheckFailed(ProbeError):
    """A check of what is shown has failed: the numbers are not to be trusted."""


@dataclass(frozen=True)
class Finding:
    """One thing that should hold, and where it does not."""

    what: str
    failed: tuple[str, ...]
    of: int

    def __str__(self) -> str:
        if not self.failed:
            return f"ok      {self.what} ({self.of})"
        return f"FAILED  {self.what}: {len(self.failed)} of {self.of}: {', '.join(self.failed)}"


def check(model: HookedModel, seed: int = 0) -> list[Finding]:
    """Every finding; the model is as it was afterwards. Where hooks are on already, or something isn't finite, only
    that is found: it would fail all else."""
    tokens = torch.randint(0, model.dims.V, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.to(model.device)
    first, _ = begins(model, tokens)
    if first is not None:
        return [Finding("every tensor of a run is finite", (f"not finite from {first} on",), len(list(model.sites)))]
    sites = _chosen(model)
    base = model.run(tokens, want=["logits", *sites])
    if base.hooked:
        return [no_hook_left(model, base)]
    return [
        _fires_once(model, tokens),
        _acts(model, tokens, base, sites),
        _rows_of_patterns(base, sites),
        _sums_of_gates(model, base, sites),
        null_edits(model, base, sites),
        no_hook_left(model, base),
    ]


def _chosen(model: HookedModel) -> list[Site]:
    """Every site around the blocks and of one block of each kind."""
    moe = model.dims.moe
    blocks = {moe.index(kind) for kind in set(moe)}
    return [site for site in model.sites if site.block is None or site.block in blocks]


def _is_reading(model: HookedModel, site: Site) -> bool:
    return bool(getattr(model.sites.node(site), "read_only", ""))


def _fires_once(model: HookedModel, tokens: Tensor) -> Finding:
    fired: Counter[str] = Counter()
    with torch.no_grad():
        model.run_with_hooks(
            tokens, fwd_hooks=[(site.hook, lambda value, hook: fired.update([hook.name])) for site in model.sites]
        )
    names = [site.hook for site in model.sites]
    return Finding("each hook fires exactly once a run", tuple(n for n in names if fired[n] != 1), len(names))


def _acts(model: HookedModel, tokens: Tensor, base: Run, sites: Sequence[Site]) -> Finding:
    """An edit of each tensor moves the logits: other experts for integers, the values of the other row for all else."""
    tried = [site for site in sites if not _is_reading(model, site)]
    idle = []
    for site in tried:
        with torch.no_grad():
            moved = model.run_with_hooks(tokens, fwd_hooks=[(site.hook, _disturb(model))])
        if torch.equal(moved, base["logits"]):
            idle.append(str(site))
    return Finding("an edit at each hook moves the output", tuple(idle), len(tried))


def _disturb(model: HookedModel) -> Callable[..., Tensor]:
    def hook(value: Tensor, hook: object) -> Tensor:
        if value.dtype == torch.int64:
            return (value + 1) % model.dims.e
        masked = value <= forbidden(value.dtype) / 2
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.device, value.dtype)
        return torch.where(masked, value, value + noise * value[~masked].float().std().to(value.dtype))

    return hook


def _rows_of_patterns(base: Run, sites: Sequence[Site]) -> Finding:
    patterns = [site for site in sites if site.tensor == "A"]
    off = [
        str(site)
        for site in patterns
        if not torch.allclose(base[site].float().sum(-1).cpu(), torch.tensor(1.0), atol=0.02)
    ]
    return Finding("attention rows sum to one", tuple(off), len(patterns))


def _sums_of_gates(model: HookedModel, base: Run, sites: Sequence[Site]) -> Finding:
    gates = [site for site in sites if site.tensor == "gates"]
    if not model.dims.norm_topk:
        return Finding("gates sum to the scaling factor (not asked for by this config)", (), 0)
    expected = torch.tensor(model.dims.scaling)
    off = [str(site) for site in gates if not torch.allclose(base[site].sum(-1).cpu(), expected, rtol=1e-4)]
    return Finding("gates sum to the scaling factor", tuple(off), len(gates))


def null_edits(model: HookedModel, base: Run, sites: Sequence[Site]) -> Finding:
    """A tensor replaced by its own values leaves the logits' bits as they were. Slots, which are drawn, stay out."""
    tried = [s for s in sites if not _is_reading(model, s) and s.tensor not in (*PER_SLOT, "experts")]
    changed = []
    for site in tried:
        same = resample(str(site), source=base, rows=range(base.tokens.shape[0]))
        if not torch.equal(model.run(base.tokens, base.keep, edits=[same], base=base)["logits"], base["logits"]):
            changed.append(str(site))
    return Finding("an edit that does nothing changes nothing, bit for bit", tuple(changed), len(tried))


def no_hook_left(model: HookedModel, base: Run) -> Finding:
    """No hook is on the model, and a plain run, as well as the base, gives the bits that the decoder alone gives."""
    left = [site.hook for site in model.watched()]
    with torch.no_grad():
        alone = model.decoder.run(base.tokens, base.keep)[Site(None, "logits")]
        if not (torch.equal(alone, base["logits"]) and torch.equal(alone, model(base.tokens, base.keep))):
            left.append("a run's logits aren't the decoder's own" if left else "none by name, but logits have changed")
    return Finding("no hook is left, and a plain run gives the decoder's own bits", tuple(left), len(list(model.sites)))


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Those that failed."""
    return [finding for finding in findings if finding.failed]
