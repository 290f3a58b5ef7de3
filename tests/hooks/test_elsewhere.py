"""On another device than the CPU: whole runs, edits, sweeps, decoding; see `tests.elsewhere`. The numbers are
the CPU's, and nothing of the two devices meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import Prompts
from experiments.lens import lens as logit_lens
from experiments.norms import norms
from experiments.patch import patch as patching
from hooks import Cell, HookedModel, Live, Run, Site, knock_out, mean, neuron_effects, outlook, patch, zero
from hooks.lens import LensCache
from hooks.reduce import Mean
from probe.errors import ProbeError, Unmatched
from tests.elsewhere import DEVICE, Elsewhere, elsewhere
from tests.hooks.test_sweep import EDITS, KEEP, MODELS, OTHER, READ, ROUTERS, SEVERAL, SMALL, TOKENS, draw, readers
from tests.hooks.twin import LOGITS, Ask, Key, swept

both = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture(autouse=True)
def there() -> Iterator[None]:
    with elsewhere():
        yield


def moved(model: HookedModel) -> HookedModel:
    made = HookedModel(model.decoder.weights.to(device=DEVICE))  # type: ignore[attr-defined]
    assert made.device == DEVICE
    return made


def lives(device: torch.device | str) -> tuple[Live, Live]:
    keep = KEEP.to(device)
    return Live(TOKENS.to(device), keep), Live(OTHER.to(device), keep, read=[[3], [4], [5, 2]])


def reference(model: HookedModel, device: torch.device | str) -> Run:
    return model.run(draw(30, 9, 3).to(device), want=list(model.sites))


def same(ours: Tensor, theirs: Tensor, what: Any) -> None:
    assert isinstance(ours, Elsewhere), what
    real = theirs.abs() < 1e30
    limit = 1e-5 * max(1.0, float(theirs[real].abs().max()) if bool(real.any()) else 0.0)
    assert float((ours.cpu() - theirs)[real].abs().max()) <= limit, what


def agree(ours: dict[Key, Tensor], theirs: dict[Key, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for key, value in ours.items():
        same(value, theirs[key], key)


def test_the_devices_do_not_meet() -> None:
    """The control: what a GPU refuses is refused, what it takes is taken."""
    x = torch.ones(2, 3).to(DEVICE)
    with pytest.raises(RuntimeError, match="two devices"):
        x + torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.where(torch.ones(2, 3, dtype=torch.bool), x, x)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, 3).add_(x)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.cat([x, torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match="two devices"):
        torch.stack([x.sum(), torch.tensor(1.0)])  # a number goes into what is element by element alone
    with pytest.raises(RuntimeError, match="two devices"):
        torch.tensor(1.0).add_(x.sum())
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device=DEVICE, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="numpy"):
        x.numpy()
    assert (x * torch.tensor(2.0))[torch.tensor([0])].sum().item() == 6
    assert (x + torch.tensor([1.0, 2.0, 3.0], device=DEVICE)).cpu().tolist() == [[2, 3, 4]] * 2


@both
def test_every_tensor_of_a_run(kind: str) -> None:
    model = MODELS[kind]
    here = model.run(TOKENS, KEEP, want=list(model.sites))
    run = moved(model).run(TOKENS.to(DEVICE), KEEP.to(DEVICE), want=list(model.sites))
    for site in model.sites:
        if site.tensor not in ("S", "A"):
            same(run[site], here[site], site)
    kept = moved(model).run(TOKENS.to(DEVICE), want="blocks.1.x_n", device="cpu", pos=-1)
    assert kept["blocks.1.x_n"].device.type == "cpu"


@both
def test_every_tensor_under_some_edits_and_every_edit_of_some_tensors(kind: str) -> None:
    """In one sweep; what a run would refuse is left out."""
    made = []
    for model, device in ((SMALL[kind], torch.device("cpu")), (moved(SMALL[kind]), DEVICE)):
        live, source = lives(device)
        run, cells = reference(model, device), []
        for i, site in enumerate(model.sites):
            at = {"T" if "T" in model.sites.node(site).shape else "S": 2}
            for how in (list(EDITS)[(i + shift) % len(EDITS)] for shift in (0, 7, 16)):
                cell = Cell((EDITS[how](str(site), at, run[site].shape[-1], run, source),), how)
                try:
                    outlook(model, live, [cell], sources=[source])
                except ProbeError:
                    continue
                cells.append(cell)
        assert {cell.label for cell in cells} == set(EDITS)
        made.append((swept(model, Ask(live, cells, [source], ["logits", "blocks.1.x_next"], read=READ)), len(cells)))
    (here, outcomes), count = made[0]
    (ours, others), counted = made[1]
    assert count == counted > 200
    agree(ours, here)
    assert [one.worlds for one in others] == [one.worlds for one in outcomes]


@both
def test_several_edits_routers_and_readers(kind: str) -> None:
    made = []
    for model, device in ((MODELS[kind], torch.device("cpu")), (moved(MODELS[kind]), DEVICE)):
        live, source = lives(device)
        run = reference(model, device)
        cells = [Cell(make(source, run), label) for label, make in SEVERAL.items()]
        cells += [Cell((one,), label) for label, one in ROUTERS.items()]
        cells += readers(kind)
        cells += [Cell((patch("delta_experts", 2, source=source, e=[1, 4], T=-1),)), Cell((zero("W_O", 1),))]
        whole = ["blocks.2.x_next", "blocks.1.A"]
        made.append(swept(model, Ask(live, cells, [source], ["logits", "blocks.1.x_mid"], whole=whole))[0])
        made.append(swept(model, Ask(live, cells, [source], budget=1))[0])
    here, one_by_one, ours, ours_one_by_one = made
    agree(ours, here)
    agree(ours_one_by_one, one_by_one)


@both
def test_whole_runs_with_edits(kind: str) -> None:
    """Also from a base; with values of a run that is kept on the CPU."""
    model, other = MODELS[kind], moved(MODELS[kind])
    run = reference(model, "cpu")
    plain = other.run(TOKENS.to(DEVICE), KEEP.to(DEVICE), want=list(other.sites))
    for site in list(model.sites)[::4]:
        try:
            edits = [mean(str(site), source=run), zero("O", 1, h=1)]
            here = model.run(TOKENS, KEEP, edits=edits)["logits"]
        except (ProbeError, Unmatched):
            continue
        for base in (None, plain):
            ours = other.run(TOKENS.to(DEVICE), KEEP.to(DEVICE), edits=edits, base=base)["logits"]
            same(ours, here, site)


@both
def test_decoding_and_neurons(kind: str) -> None:
    model, other = MODELS[kind], moved(MODELS[kind])
    tokens = TOKENS.to(DEVICE)
    edits = [zero("O", 1, h=1)]
    ours, here = (m.generate(t, n=4, edits=edits) for m, t in ((other, tokens), (model, TOKENS)))
    assert ours.tokens.tolist() == here.tokens.tolist()
    if model.sites.card(model.dims.blocks - 1).kind == "dense":
        effects = [neuron_effects(m, t, answer=[3] * 3, wrong=[5] * 3) for m, t in ((other, tokens), (model, TOKENS))]
        same(effects[0], effects[1], "neurons")


Doing = Callable[[HookedModel, Tensor, Tensor], Tensor]


def summed(logits: Tensor) -> Tensor:
    return logits[:, -1].logsumexp(-1).sum()


def lens(model: HookedModel, tokens: Tensor, *names: str) -> LensCache:
    return model.activation_cache(model.run(tokens[:1], want=[*names] or None))


def of_lens(model: HookedModel, tokens: Tensor, token: Any) -> Tensor:
    cache = lens(model, tokens)
    return cache.logit_attrs(cache.accumulated_resid(layer=-1, apply_ln=True), tokens=token)


DOING: dict[str, Doing] = {
    "gradients": lambda m, t, k: m.run_with_cache(t, k, grads=summed)[1].gradients["blocks.1.Q"],  # type: ignore[index]
    "hooks": lambda m, t, k: m.run_with_hooks(
        t, k, fwd_hooks=[("blocks.1.hook_O", lambda v, hook: v * 0), ("blocks.1.ln1.hook_scale", lambda v, hook: v * 2)]
    ),
    "drawn tokens": lambda m, t, k: m.generate(t, k, n=3, temperature=1.0, seed=1, stop=[3]).logits,
    "left pads": lambda m, t, k: m.generate(t, k.flip(1), n=3, edits=[knock_out(1, T=3, S=1)]).logits,
    "a block alone": lambda m, t, k: m.run_block(1, m.run(t, k, want=None), edits=zero("O", h=1))["blocks.1.x_next"],
    "reductions": lambda m, t, k: m.run(t, k, reduce={"blocks.1.A": Mean("positions")}).cache.reduced["blocks.1.A"],
    "lens": lambda m, t, k: of_lens(m, t, 3),
    "lens of a list": lambda m, t, k: of_lens(m, t, torch.tensor([3])),
    "heads": lambda m, t, k: lens(m, t, *map(str, m.sites)).stack_head_results(layer=-1),
}


@both
@pytest.mark.parametrize("what", DOING)
def test_whatever_else_a_model_does(what: str, kind: str) -> None:
    model = MODELS[kind]
    here = DOING[what](model, TOKENS, KEEP)
    same(DOING[what](moved(model), TOKENS.to(DEVICE), KEEP.to(DEVICE)), here, what)


ANYWHERE: dict[str, Doing] = {
    "run": lambda m, t, k: m.run(t, k, edits=zero("O", 1, h=1))["logits"],
    "from a base": lambda m, t, k: m.run(
        t, k, edits=zero("O", 1), base=m.run(t.to(m.device), k.to(m.device), want=None)
    )["logits"],
    "decoding": lambda m, t, k: m.generate(t, k, n=2).logits,
    "sweep": lambda m, t, k: swept(m, Ask(Live(t, k), [Cell((zero("O", 1, T=1),))]))[0]["cell", 0, LOGITS],
}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("what", ANYWHERE)
def test_tokens_and_masks_may_lie_on_the_cpu(what: str, masked: bool) -> None:
    """Both, or the mask alone; the model's device is where everything comes out."""
    model, other = MODELS["latent"], moved(MODELS["latent"])
    here = ANYWHERE[what](model, TOKENS, KEEP)
    same(ANYWHERE[what](other, TOKENS if masked else TOKENS.to(DEVICE), KEEP), here, what)


def test_studies() -> None:
    model = HookedModel.load()
    prompts = Prompts.load("ioi", model.tokenizer).subset(range(4))  # type: ignore[arg-type]
    for what in (
        lambda m: patching(m, prompts, tensors=["O"], blocks=[3], by=["head"]),
        lambda m: logit_lens(m, prompts),
        lambda m: norms(m, prompts, tensors=["x_next", "A"]),
    ):
        here, there = (what(m).select_dtypes("number") for m in (model, moved(model)))
        assert len(here)
        assert (here.isna() == there.isna()).all(axis=None)
        assert float((here - there).abs().max(axis=None)) < 1e-4


def test_sites_are_named_on_the_cpu() -> None:
    """Masks, spans and lists of users lie on the CPU, whatever the model's device."""
    model, other = MODELS["latent"], moved(MODELS["latent"])
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[:, 2] = True
    edit = patch("x_n", 1, source=model.run(OTHER, KEEP, want="blocks.1.x_n"), T=mask)
    ours, here = (m.run(t, k, edits=[edit])["logits"] for m, t, k in (
        (other, TOKENS.to(DEVICE), KEEP.to(DEVICE)), (model, TOKENS, KEEP)))  # fmt: skip
    same(ours, here, Site(None, "logits"))
