"""One block alone on a saved residual stream: the same bits as inside the whole run, and no other weight is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hooks import (
    Cache,
    Dictionary,
    Edit,
    HookedModel,
    Run,
    Site,
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
from probe import Weights, random_weights
from probe.engine import Numerics
from probe.errors import BadEdit, BadText, OutOfRange, ShapeMismatch, UnknownTensor
from tests.hooks.small import (
    DENSE,
    DIMS,
    LAST,
    MODEL,
    MOE,
    ORACLE,
    SIDES,
    TOKENS,
    B,
    T,
    everything,
    padded,
    ragged,
)
from tests.oracle import draw

BLOCKS = [DENSE, MOE, LAST]


@pytest.fixture(scope="module")
def whole() -> Run:
    return everything()


@pytest.fixture(scope="module")
def source() -> Run:
    return everything(TOKENS.flip(0))


@pytest.fixture(scope="module")
def reference() -> Run:
    return everything(draw(ORACLE, 60, T, seed=2)[0])


def of(block: int) -> list[Site]:
    return [site for site in MODEL.sites if site.block == block]


# ---- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("side", [None, *SIDES])
def test_every_tensor_has_the_bits_that_it_has_in_the_whole_run(block: int, side: str | None) -> None:
    tokens, keep = (TOKENS, None) if side is None else padded(ragged(), side)
    inside = everything(tokens, keep)
    alone = MODEL.run_block(block, inside["x_n", block].clone(), keep, want=[site.tensor for site in of(block)])
    for site in of(block):
        assert torch.equal(alone[site], inside[site]), site
    assert set(alone.cache) == set(of(block))


@pytest.mark.parametrize("numerics", ["reference", "careful"])
def test_in_low_precision_too(numerics: Numerics) -> None:
    model = HookedModel(random_weights(DIMS, 3, torch.bfloat16), numerics=numerics)
    inside = model.run(TOKENS, want=None)
    assert inside["x_n", MOE].dtype == (torch.float32 if numerics == "careful" else torch.bfloat16)
    alone = model.run_block(MOE, inside, want=None)
    assert all(torch.equal(value, inside[site]) for site, value in alone.cache.items())
    other = torch.bfloat16 if numerics == "careful" else torch.float32
    with pytest.raises(ShapeMismatch, match="and the block takes"):
        model.run_block(MOE, inside["x_n", MOE].to(other))


def dictionary(width: int) -> Dictionary:
    g = torch.Generator().manual_seed(5)
    enc, dec = torch.randn(width, 9, generator=g), torch.randn(9, width, generator=g)
    return Dictionary(enc, torch.zeros(9), dec, torch.zeros(width))


SAE = dictionary(DIMS.d)
EDITS: dict[str, Callable[[Run, Run], Sequence[Edit]]] = {
    "zero": lambda s, r: [zero("O", MOE, h=1, T=-1)],
    "zero of x_n": lambda s, r: [zero("x_n", MOE, T=0)],
    "zero of gates, the others rescaled": lambda s, r: [zero("gates", MOE, k=0, renorm=True)],
    "zero into a reader": lambda s, r: [zero("c_KV_hat", MOE, into="k_C")],
    "zero within directions": lambda s, r: [zero("x_mid", MOE, within=torch.eye(DIMS.d)[:2])],
    "mean": lambda s, r: [mean("V", MOE, source=r)],
    "mean of an expert's tensor": lambda s, r: [mean("h_e", MOE, source=r)],
    "resample": lambda s, r: [resample("x_attn", MOE, source=r, seed=3)],
    "patch": lambda s, r: [patch("x_mid", MOE, source=s, T=[1, -1])],
    "patch by expert": lambda s, r: [patch("delta_experts", MOE, source=s)],
    "patch of a turned key": lambda s, r: [patch("k_R", MOE, source=s, T=2, source_T=4, rotate="redo")],
    "noise": lambda s, r: [noise("c_Q", MOE, std=0.5, relative=True, seed=2)],
    "add": lambda s, r: [add("delta_attn", MOE, direction=torch.ones(DIMS.d), alpha=2)],
    "scale": lambda s, r: [scale("g_s", MOE, factor=-1)],
    "project": lambda s, r: [project_out("x_ffn", MOE, span=torch.eye(DIMS.d)[:3])],
    "set": lambda s, r: [set_to("s_ffn", MOE, value=0.7)],
    "freeze": lambda s, r: [zero("x_attn", MOE, T=3), freeze("A", MOE)],
    "freeze the router": lambda s, r: [zero("O", MOE, h=0), freeze("experts", MOE), freeze("gates", MOE)],
    "knock out": lambda s, r: [knock_out(MOE, T=-1, S=[0, 2])],
    "exclude": lambda s, r: [exclude(MOE, e=[0, 1])],
    "force": lambda s, r: [force(MOE, range(DIMS.k), T=2)],
    "a function": lambda s, r: [edit("S", lambda value: value.flip(1), "flip", block=MOE)],
    "splice": lambda s, r: [splice("x_mid", MOE, dictionary=SAE)],
    "a latent": lambda s, r: [zero("x_mid", MOE, through=SAE, feature=[0, 4])],
    "weights": lambda s, r: [zero("W_O", MOE, h=2), scale("W_2_e", MOE, factor=2, e=1), zero("b", MOE)],
    "two at one site": lambda s, r: [zero("O", MOE, h=1), add("O", MOE, direction=torch.ones(DIMS.v))],
}


DRAWN = ("resample", "noise")
"""What hangs on the prompts' tokens, which a bare stream has not."""


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("kind", EDITS)
def test_every_kind_of_edit_acts_as_in_the_whole_run(kind: str, side: str | None, source: Run, reference: Run) -> None:
    tokens, keep = (TOKENS, None) if side is None else padded(ragged(), side)
    whole = everything(tokens, keep)
    edits = EDITS[kind](source, reference)
    inside = MODEL.run(tokens, keep, edits=edits, base=whole, want=of(MOE))
    moved = [site for site in of(MOE) if not torch.equal(inside[site], whole[site])]
    assert bool(moved) == (kind != "splice")  # an untouched splice changes nothing
    few, all_of_it = (MODEL.run_block(MOE, whole, want=want) for want in ("x_next", of(MOE)))
    for base in (None, few, all_of_it, whole):
        stream, mask = (whole, None) if kind in DRAWN else (whole["x_n", MOE], keep)
        alone = MODEL.run_block(MOE, stream, mask, edits=edits, base=base, want=of(MOE))
        for site in of(MOE):
            assert torch.equal(alone[site], inside[site]), site
        assert alone.touched == inside.touched


@pytest.mark.parametrize("base", [False, True], ids=["alone", "from a base"])
def test_agreement_of_the_routing_is_that_of_the_block(whole: Run, base: bool) -> None:
    edits = [zero("O", MOE, h=0, T=[1, 3])]
    alone = MODEL.run_block(MOE, whole, edits=edits, base=MODEL.run_block(MOE, whole, want="experts") if base else None)
    if not base:
        assert alone.routing_agreement is alone.flips is None
        return
    reached = [(b, t) for b in range(B) for t in range(T) if t in (1, 3)]
    ours, theirs = alone["experts", MOE], whole["experts", MOE]
    kept = sum(len(set(ours[b, t].tolist()) & set(theirs[b, t].tolist())) for b, t in reached)
    assert alone.routing_agreement == kept / (DIMS.k * len(reached))
    assert alone.flips == DIMS.k * len(reached) - kept


def test_what_ran_alone_is_a_source_for_the_whole_model(whole: Run, source: Run) -> None:
    there = MODEL.run_block(MOE, source, want=["V", "x_next"])
    patched = [MODEL.run(TOKENS, edits=[patch("V", MOE, source=s, h=1)], base=whole)["logits"] for s in (source, there)]
    assert torch.equal(*patched)
    assert not torch.equal(patched[0], whole["logits"])


def test_hooks_of_the_block_fire_and_act(whole: Run) -> None:
    seen: list[Tensor] = []

    def double(value: Tensor, hook: object) -> Tensor:
        seen.append(value.clone())
        return 2 * value

    plain = MODEL.run_block(MOE, whole)
    with MODEL.hooks(fwd_hooks=[(f"blocks.{MOE}.hook_O", double)]):
        under = MODEL.run_block(MOE, whole)
    assert len(seen) == 1
    assert torch.equal(seen[0], whole["O", MOE])
    twice = MODEL.run_block(MOE, whole, edits=[scale("O", MOE, factor=2)])
    assert torch.equal(under["x_next", MOE], twice["x_next", MOE])
    assert torch.equal(MODEL.run_block(MOE, whole)["x_next", MOE], plain["x_next", MOE])
    with (
        MODEL.hooks(fwd_hooks=[(f"blocks.{LAST}.hook_O", double)]),
        pytest.raises(BadEdit, match=r"blocks\.2\.O would"),
    ):
        MODEL.run_block(MOE, whole)


# ---- what is read ----------------------------------------------------------------------------------------------------


class Counting:
    """Weights that write down what is read of them."""

    def __init__(self, weights: Weights, resident: bool) -> None:
        self.weights, self.dims, self.resident = weights, weights.dims, resident
        self.read_of: list[tuple[int | None, str, tuple[int, ...] | None]] = []

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        self.read_of.append((block, name, None if experts is None else tuple(experts)))
        return self.weights.read(block, name, experts)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("block", BLOCKS)
def test_no_weight_of_another_block_or_of_the_model_around_is_read(block: int, resident: bool, whole: Run) -> None:
    weights = Counting(MODEL.decoder.weights, resident)
    model = HookedModel(weights)
    base = model.run_block(block, whole["x_n", block], want=None)
    if block != DENSE:
        chosen = None if resident else tuple(whole["experts", block].unique().tolist())
        assert {rows for _, name, rows in weights.read_of if name == "W_1_e"} == {chosen}
    edits = [zero("O", h=0), freeze("A"), scale(f"blocks.{block}.W_O", factor=2)]
    edited = model.run_block(block, whole["x_n", block], edits=edits, base=base)
    names = {name for of, name, _ in weights.read_of}
    assert {of for of, _, _ in weights.read_of} == {block}
    assert {"W_O", "W_DKV", "W_2" if block == DENSE else "W_2_e"} <= names
    assert torch.isfinite(edited["x_next", block]).all()


def test_only_what_is_wanted_is_made_and_read(whole: Run) -> None:
    weights = Counting(MODEL.decoder.weights, resident=True)
    run = HookedModel(weights).run_block(LAST, whole["x_n", LAST], want="c_KV")
    assert {name for _, name, _ in weights.read_of} == {"w_attn", "W_DKV"}
    assert set(run.cache) == {Site(LAST, "x_n"), Site(LAST, "c_KV")}


# ---- in and out ------------------------------------------------------------------------------------------------------


def test_a_stream_goes_to_a_file_and_comes_back_from_it_or_from_elsewhere(tmp_path: Path) -> None:
    tokens, keep = padded(ragged(), "left")
    spans = [{"END": [int(n) - 1]} for n in keep.sum(-1)]
    _, cache = MODEL.run_with_cache(tokens, keep, names_filter="blocks.*.x_n", spans=spans)
    cache.save(tmp_path / "stream.safetensors")
    stored = load_file(tmp_path / "stream.safetensors")  # as any other tool reads it
    for block in BLOCKS:
        assert torch.equal(stored[f"blocks.{block}.x_n"], cache["x_n", block])
    inside = MODEL.run(tokens, keep, edits=[zero("O", MOE, T=[-1])], want=f"blocks.{MOE}.x_next")
    from_cache = MODEL.run_block(MOE, Cache.load(tmp_path / "stream.safetensors"), edits=[zero("O", T="END")])
    from_tensor = MODEL.run_block(MOE, stored[f"blocks.{MOE}.x_n"], keep, edits=[zero("O", T="END")], spans=spans)
    for run in (from_cache, from_tensor):
        assert torch.equal(run["x_next", MOE], inside["x_next", MOE])


def test_what_is_kept_can_be_less(whole: Run) -> None:
    run = MODEL.run_block(MOE, whole, want=["A", "experts"], pos=-1, dtype=torch.bfloat16)
    assert torch.equal(run["A", MOE], whole["A", MOE][:, :, -1:].bfloat16())
    assert torch.equal(run["experts", MOE], whole["experts", MOE][:, -1:])
    with pytest.raises(BadEdit, match="kept on a device, in a dtype"):
        MODEL.run_block(MOE, whole, base=run)


def test_the_stream_stays_as_it_was_and_the_run_keeps_its_own(whole: Run) -> None:
    mine = whole["x_n", MOE].clone()
    run = MODEL.run_block(MOE, mine, edits=[zero("x_n", T=1)])
    assert torch.equal(mine, whole["x_n", MOE])
    base = MODEL.run_block(MOE, mine)
    mine.zero_()
    assert torch.equal(base["x_n", MOE], whole["x_n", MOE])
    assert not torch.equal(run["x_next", MOE], base["x_next", MOE])


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x[..., :-1], rf"blocks\.1\.x_n should be \[B T d\].*d = {DIMS.d}; it is \[3, 6, {DIMS.d - 1}\]"),
        (lambda x: x[0], r"it is \[6, "),
        (lambda x: x[:, :0], r"it is \[3, 0, "),
        (lambda x: x.bfloat16(), r"torch\.bfloat16 on cpu, and the block takes torch\.float32 on cpu"),
        (lambda x: x.to("meta"), r"float32 on meta, and"),
    ],
    ids=["narrow", "no batch", "no positions", "another dtype", "another device"],
)
def test_a_stream_that_does_not_fit_is_refused(change: Callable[[Tensor], Tensor], says: str, whole: Run) -> None:
    with pytest.raises(ShapeMismatch, match=says):
        MODEL.run_block(MOE, change(whole["x_n", MOE]))


def test_a_mask_that_does_not_fit_is_refused(whole: Run) -> None:
    x = whole["x_n", MOE]
    for keep, error in (
        (torch.ones(B, T - 1, dtype=torch.bool), ShapeMismatch),
        (torch.tensor([[True, False] * (T // 2)] * B), ShapeMismatch),
        (torch.zeros(B, T, dtype=torch.bool), BadText),
    ):
        with pytest.raises(error):
            MODEL.run_block(MOE, x, keep)
    for given in ({"keep": torch.ones(B, T).bool()}, {"spans": [{}] * B}):
        with pytest.raises(BadEdit, match="brings its own mask"):
            MODEL.run_block(MOE, whole, **given)


def test_other_blocks_are_refused_by_name(whole: Run) -> None:
    with pytest.raises(OutOfRange, match="block 9 does not exist"):
        MODEL.run_block(9, whole["x_n", MOE])
    for edits in ([zero("O", LAST)], [zero("blocks.2.W_O")], [freeze("A", LAST)]):
        with pytest.raises(OutOfRange, match="block 1 runs alone here, without block 2"):
            MODEL.run_block(MOE, whole, edits=edits)
    with pytest.raises(OutOfRange, match="without block 0"):
        MODEL.run_block(MOE, whole, want="blocks.0.O")
    for name in ("logits", "W_E"):
        with pytest.raises(UnknownTensor):
            MODEL.run_block(MOE, whole, want=name)
    with pytest.raises(UnknownTensor, match="matches no tensor"):
        MODEL.run_block(MOE, whole, want="blocks.2.*")
    with pytest.raises(UnknownTensor, match="names no tensor"):
        MODEL.run_block(DENSE, whole, edits=[freeze("experts")])


def test_a_base_must_be_of_this_stream_and_a_whole_run_needs_a_whole_base(whole: Run) -> None:
    alone = MODEL.run_block(MOE, whole)
    other = HookedModel(random_weights(DIMS, 3))
    cases = [
        ((MOE, whole["x_n", MOE] + 1), {"base": alone}, BadEdit, "another blocks.1.x_n"),
        ((MOE, whole["x_n", MOE][:2]), {"base": alone}, BadEdit, "another blocks.1.x_n"),
        ((LAST, whole["x_n", LAST]), {"base": alone}, BadEdit, "another blocks.2.x_n"),
        ((MOE, whole["x_n", MOE], torch.ones(B, T).bool()), {"base": alone}, BadEdit, "another mask"),
        ((MOE, whole), {"base": MODEL.run_block(MOE, whole, edits=[zero("O")])}, BadEdit, "edits itself"),
        ((MOE, whole), {"base": other.run(TOKENS)}, BadEdit, "other weights"),
    ]
    for given, base, error, says in cases:
        with pytest.raises(error, match=says):
            MODEL.run_block(*given, **base)
    with pytest.raises(BadEdit, match="other tokens"):
        MODEL.run(TOKENS, base=alone)
    with pytest.raises(BadText, match="-1 is outside the vocabulary"):
        MODEL.run(alone.tokens)


def test_a_cache_without_the_stream_is_refused_by_name() -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.0.O")
    with pytest.raises(UnknownTensor, match=r"blocks\.1\.x_n was not cached in this run"):
        MODEL.run_block(MOE, cache)
    _, part = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.x_n", pos=-1)
    with pytest.raises(BadEdit, match="some positions only"):
        MODEL.run_block(MOE, part)
