"""How values are kept: globs, positions, reductions in chunks, bytes, files, gradients; memory that stays flat."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hooks import Cache, Dictionary, HookedModel, Site, estimate, patch, reduce, resample, zero
from hooks.stored import seal
from probe import TINY, ProbeError, numerics
from probe.errors import BadCheckpoint, BadEdit, OutOfRange, ShapeMismatch, TooLarge, UnknownTensor
from probe.headers import open_header
from tests.hooks.small import (
    DIMS,
    LENGTHS,
    MODEL,
    ORACLE,
    REFERENCE,
    SIDES,
    TOKENS,
    B,
    T,
    close,
    padded,
    ragged,
    real_part,
)

ALL = list(MODEL.sites)
SPANS = [{"one": [0, 1], "two": [2]}, {"one": [1, 2], "two": [3]}, {"one": [0, 3], "two": [1]}]


@pytest.fixture(params=[4, 256], ids=["chunks of 4", "one chunk"])
def _chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "QUERY_CHUNK", request.param)


def whole(tokens: Tensor = TOKENS, keep: Tensor | None = None) -> Cache:
    """Every tensor, kept plainly."""
    return MODEL.run_with_cache(tokens, keep, names_filter=ALL)[1]


def rows_of(value: Tensor, site: Site, places: list[list[int]], keep: Tensor | None) -> Tensor:
    """By hand, row by row: the value at real positions."""
    shape = MODEL.sites.node(site).shape
    axis = shape.index("T" if "T" in shape else "S") - 1
    first = [0] * len(value) if keep is None else [row.tolist().index(True) for row in keep]
    picked = [
        row.index_select(axis, torch.tensor([f + p for p in at]))
        for row, f, at in zip(value, first, places, strict=True)
    ]
    return torch.stack(picked)


# ---- which -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("blocks.*.c_KV", ["blocks.0.c_KV", "blocks.1.c_KV", "blocks.2.c_KV"]),
        ("blocks.*.hook_c_KV", ["blocks.0.c_KV", "blocks.1.c_KV", "blocks.2.c_KV"]),
        ("blocks.[01].Q_?", [f"blocks.{b}.{name}" for b in (0, 1) for name in ("Q_C", "Q_R")]),
        (["blocks.2.c^KV", "*_final", Site(0, "O")], ["blocks.0.O", "blocks.2.c_KV", "s_final", "n_final", "x_final"]),
        ("blocks.0.h*", ["blocks.0.h"]),
        ("blocks.*.c^KV", ["blocks.0.c_KV", "blocks.1.c_KV", "blocks.2.c_KV"]),
        ("blocks.*.attn.hook_z", ["blocks.0.O", "blocks.1.O", "blocks.2.O"]),
        ("model.layers.*.mlp.gate.hook_out", ["blocks.1.router_logits", "blocks.2.router_logits"]),
        ("blocks.0.delta_*", ["blocks.0.delta_attn", "blocks.0.delta_ffn"]),
        ("blocks.0.delta_heads*", ["blocks.0.delta_heads"]),
    ],
)
def test_a_glob_selects_by_the_name_of_site_or_hook(names: Any, expected: list[str]) -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter=names)
    assert [str(site) for site in cache] == expected


@pytest.mark.parametrize("names", ["blocks.*.c_kv", ["x_0", "blocks.*.c_kv"], "blocks.[345].O"])
def test_a_glob_that_matches_nothing_is_an_error(names: Any) -> None:
    with pytest.raises(UnknownTensor, match=r"glob .* matches no tensor"):
        MODEL.run_with_cache(TOKENS, names_filter=names)
    with pytest.raises(UnknownTensor, match=r"glob .* matches no tensor"):
        MODEL.run_with_cache(TOKENS, reduce={"blocks.*.nothing": reduce.norms()})


# ---- where and as what -----------------------------------------------------------------------------------------


def test_floats_are_cast_and_moved_and_integers_only_moved() -> None:
    plain = whole()
    logits, cache = MODEL.run_with_cache(TOKENS, names_filter=ALL, dtype=torch.bfloat16)
    for site, value in plain.items():
        assert torch.equal(cache[site], value.to(torch.bfloat16) if value.is_floating_point() else value), site
    assert logits.dtype == torch.float32
    logits, away = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.*", device="meta")
    assert {value.device.type for value in away.values()} == {"meta"}
    assert logits.device.type == "cpu"
    with pytest.raises(BadEdit, match="floating dtype"):
        MODEL.run_with_cache(TOKENS, dtype=torch.int64)


@pytest.mark.parametrize("side", [None, *SIDES])
@pytest.mark.parametrize(
    ("pos", "places"),
    [
        (-1, lambda n: [n - 1]),
        (0, lambda n: [0]),
        ([2, 0], lambda n: [2, 0]),
        (slice(1, 4), lambda n: [1, 2, 3]),
        (slice(-2, None), lambda n: [n - 2, n - 1]),
    ],
)
@pytest.mark.usefixtures("_chunked")
def test_positions_are_real_ones_copied_alone(side: str | None, pos: Any, places: Any) -> None:
    tokens, keep = padded(ragged(), side) if side else (TOKENS, None)
    lengths = LENGTHS if side else [T] * B
    plain = whole(tokens, keep)
    logits, cache = MODEL.run_with_cache(tokens, keep, names_filter=ALL, pos=pos)
    assert torch.equal(logits, plain["logits"])
    for site, value in plain.items():
        assert torch.equal(cache[site], rows_of(value, site, [places(n) for n in lengths], keep)), site
        assert cache[site].untyped_storage().nbytes() == cache[site].nbytes, site
    assert cache.pos is not None
    assert cache.pos.tolist() == [places(n) for n in lengths]


def test_positions_by_span_and_mask() -> None:
    plain = whole()
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.O", pos="one", spans=SPANS)
    assert torch.equal(cache["O", 1], rows_of(plain["O", 1], Site(1, "O"), [[0, 1], [1, 2], [0, 3]], None))
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[[0, 1, 2], [4, 0, 5]] = True
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.O", pos=mask)
    assert torch.equal(cache["O", 1], rows_of(plain["O", 1], Site(1, "O"), [[4], [0], [5]], None))


@pytest.mark.parametrize(
    ("pos", "error", "why"),
    [
        (4, OutOfRange, "of row 1"),
        (-5, OutOfRange, "of row 1"),
        (slice(0, None), BadEdit, "6 positions of row 0 and 4 of row 1"),
        ("subject", BadEdit, "no span 'subject'"),
        ([], BadEdit, "names nothing"),
        (True, BadEdit, "whole number"),
    ],
)
def test_positions_that_cannot_be_kept_are_refused(pos: Any, error: type[ProbeError], why: str) -> None:
    tokens, keep = padded(ragged(), "left")
    with pytest.raises(error, match=why):
        MODEL.run_with_cache(tokens, keep, pos=pos)


def test_nothing_is_taken_from_a_cache_of_some_positions() -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.O", pos=-1)
    with pytest.raises(BadEdit, match="some positions only"):
        MODEL.run(TOKENS, edits=[patch("O", 1, source=cache)])


# ---- reductions ------------------------------------------------------------------------------------------------

FLOATS = [site for site in ALL if site.tensor not in ("experts", "S")]


@pytest.mark.usefixtures("_chunked")
def test_norms_of_every_tensor() -> None:
    plain = whole()
    _, cache = MODEL.run_with_cache(TOKENS, reduce=dict.fromkeys(FLOATS, reduce.norms()))
    assert not cache
    assert list(cache.reduced) == FLOATS
    for site in FLOATS:
        squares = plain[site].pow(2)
        close(cache.reduced[site].l2, squares.sum(-1).sqrt())
        close(cache.reduced[site].rms, squares.mean(-1).sqrt())


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize("side", SIDES)
def test_means_leave_pads_out(side: str) -> None:
    tokens, keep = padded(ragged(), side)
    first = [0 if side == "right" else T - n for n in LENGTHS]
    plain = whole(tokens, keep)
    by_row, at_all = (
        MODEL.run_with_cache(tokens, keep, reduce=dict.fromkeys(FLOATS, reduce.mean(over)))[1].reduced
        for over in ("positions", "all")
    )
    for site in FLOATS:
        value = plain[site]
        shape = MODEL.sites.node(site).shape
        axis = shape.index("T" if "T" in shape else "S") - 1
        real = [row.narrow(axis, f, n) for row, f, n in zip(value, first, LENGTHS, strict=True)]
        close(by_row[site], torch.stack([row.float().mean(axis) for row in real]))
        close(at_all[site], torch.cat(real, dim=axis).float().mean(axis))


def test_means_over_roles_and_positions() -> None:
    value = whole()["blocks.1.c_KV"]
    _, cache = MODEL.run_with_cache(TOKENS, reduce={"blocks.1.c_KV": reduce.mean("roles")}, spans=SPANS)
    made = cache.reduced["c_KV", 1]
    assert list(made) == ["one", "two"]
    for name, mean in made.items():
        close(mean, torch.stack([row[spans[name]].mean(0) for row, spans in zip(value, SPANS, strict=True)]))
    _, cache = MODEL.run_with_cache(TOKENS, reduce={"blocks.1.c_KV": reduce.mean()}, pos=[0, 3])
    close(cache.reduced["c_KV", 1], value[:, [0, 3]].mean(1))


@pytest.mark.usefixtures("_chunked")
def test_top_channels_and_projections() -> None:
    plain = whole()
    directions = torch.randn(2, DIMS.d)
    names = {"blocks.*.A": reduce.top(2), "blocks.1.x_mid": reduce.onto(directions), "blocks.1.c_KV": reduce.top(3)}
    _, cache = MODEL.run_with_cache(TOKENS, reduce=names, pos=[1, -1])
    for key, n in (("blocks.1.A", 2), ("blocks.1.c_KV", 3)):
        value = plain[key][:, :, [1, -1]] if key[-1] == "A" else plain[key][:, [1, -1]]
        order = value.abs().argsort(-1, descending=True)[..., :n]
        assert torch.equal(cache.reduced[key].values, value.gather(-1, order))
        assert torch.equal(cache.reduced[key].indices, order)
        assert bool((cache.reduced["blocks.1.c_KV"].values < 0).any())
    by_hand = torch.stack([(plain["x_mid", 1][:, [1, -1]] * v).sum(-1) for v in directions], -1)
    close(cache.reduced["x_mid", 1], by_hand)
    _, cache = MODEL.run_with_cache(TOKENS, reduce={"blocks.1.x_mid": reduce.onto(directions[0])})
    assert cache.reduced["x_mid", 1].shape == (B, T, 1)


@pytest.mark.usefixtures("_chunked")
def test_a_function_gets_a_copy_and_gives_what_it_likes() -> None:
    plain = whole()

    def entropy(A: Tensor) -> Tensor:
        made = -(A * A.clamp(min=1e-9).log()).sum(-1)
        A.zero_()
        return made

    logits, cache = MODEL.run_with_cache(
        TOKENS,
        names_filter="blocks.2.O",
        reduce={"*.A": entropy, "blocks.1.experts": lambda E: torch.bincount(E.flatten(), minlength=DIMS.e)},
    )
    assert torch.equal(logits, plain["logits"])
    assert [str(site) for site in cache] == ["blocks.2.O"]
    for block in range(3):
        assert torch.equal(cache.reduced["A", block], entropy(plain["A", block].clone()))
    assert int(cache.reduced["experts", 1].sum()) == B * T * DIMS.k


def test_what_is_reduced_is_not_kept_whole_and_is_cast_like_the_rest() -> None:
    _, cache = MODEL.run_with_cache(
        TOKENS, names_filter="blocks.1.[OV]", reduce={"*.O": reduce.top(2)}, dtype=torch.bfloat16
    )
    assert [str(site) for site in cache] == ["blocks.1.V"]
    assert cache.reduced["O", 1].values.dtype == torch.bfloat16
    assert cache.reduced["O", 1].indices.dtype == torch.int64
    with pytest.raises(UnknownTensor, match="not cached"):
        cache["O", 1]
    with pytest.raises(UnknownTensor, match=r"name blocks\.1\.s_attn"):
        MODEL.run_with_cache(TOKENS, reduce={"*.s_attn": reduce.norms()})[1].reduced["blocks.1.ln1.hook_scale"]


@pytest.mark.parametrize(
    ("names", "error", "why"),
    [
        ({"*.O": reduce.norms(), "blocks.1.O": reduce.mean()}, BadEdit, r"blocks\.1\.O is given two"),
        ({"blocks.1.O": 3}, BadEdit, "3 is no reduction"),
        ({"blocks.1.S": reduce.mean()}, BadEdit, "reduce A"),
        ({"blocks.1.experts": reduce.norms()}, BadEdit, "numbers of experts"),
        ({"blocks.1.O": reduce.top(99)}, OutOfRange, r"blocks\.1\.O, top 99: .* wide"),
        ({"blocks.1.O": reduce.onto(torch.ones(3))}, ShapeMismatch, "directions of width 3"),
        ({"blocks.1.A": lambda A: A.mean()}, ShapeMismatch, "keep the queries on axis 2"),
        ({"blocks.1.A": lambda A: 3}, ShapeMismatch, "returns tensors"),
        ({"blocks.1.O": reduce.mean("roles")}, BadEdit, "give spans="),
    ],
    ids=["two", "none", "scores", "integers", "too many", "width", "axis", "no tensor", "roles"],
)
def test_reductions_that_mean_nothing_are_refused(names: Any, error: type[ProbeError], why: str) -> None:
    with pytest.raises(error, match=why):
        MODEL.run_with_cache(TOKENS, reduce=names)


def test_reductions_that_are_none_are_refused_when_made() -> None:
    with pytest.raises(OutOfRange, match="at least one"):
        reduce.top(0)
    with pytest.raises(BadEdit, match="positions, all, roles"):
        reduce.mean("heads")  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch, match=r"\[n, width\]"):
        reduce.onto(torch.ones(1, 2, 3))


# ---- chunks ----------------------------------------------------------------------------------------------------

LONG = 2048


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.seen |= {part.shape for part in (made if isinstance(made, tuple | list) else [made]) if _is_tensor(part)}
        return made


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, Tensor)


def squares(shapes: set[torch.Size]) -> list[torch.Size]:
    """Those that hold an entry for each head and pair of positions (the mask holds one a pair)."""
    return [shape for shape in shapes if shape.numel() >= DIMS.h * LONG * LONG]


@pytest.mark.parametrize(
    "how",
    [
        {"reduce": {"blocks.0.A": reduce.mean()}},
        {"reduce": {"blocks.0.A": reduce.top(4), "blocks.0.S": lambda S: S.amax(-1)}},
        {"reduce": {"blocks.0.A": reduce.norms()}, "pos": slice(1, None)},
        {"want": ["blocks.0.A", "blocks.0.S"], "pos": [5, 300, -1]},
    ],
    ids=["mean", "top, function", "norms at positions", "positions"],
)
def test_scores_never_exist_whole_when_parts_are_asked_for(how: Any) -> None:
    tokens = torch.arange(LONG)[None] % DIMS.V
    with Shapes() as shapes:
        run = MODEL.run(tokens, **{"want": None, **how})
    assert not squares(shapes.seen)
    assert len(run.cache) + len(run.cache.reduced) == len(how.get("reduce", how.get("want")))


def test_the_notes_of_shapes_see_a_whole_pattern() -> None:
    with Shapes() as shapes:
        run = MODEL.run(torch.arange(LONG)[None] % DIMS.V, want="blocks.0.A")
    assert squares(shapes.seen)
    with Shapes() as shapes:
        part = MODEL.run(run.tokens, want="blocks.0.A", pos=[5, 300, -1])
    assert torch.equal(part["A", 0], run["A", 0][:, :, [5, 300, -1]])
    tops = MODEL.run(run.tokens, want=None, reduce={"blocks.0.A": reduce.top(4)}).cache.reduced["A", 0]
    assert torch.equal(tops.values, run["A", 0].gather(-1, tops.indices))


@pytest.mark.usefixtures("_chunked")
def test_who_edits_a_pattern_sees_it_whole_and_the_reduction_sees_the_edit() -> None:
    plain = whole()
    with MODEL.hooks(fwd_hooks=[("blocks.1.A", lambda A, hook: A * 2)]):
        _, cache = MODEL.run_with_cache(TOKENS, reduce={"blocks.[01].A": lambda A: A})
    assert torch.equal(cache.reduced["A", 0], plain["A", 0])
    assert torch.equal(cache.reduced["A", 1], plain["A", 1] * 2)
    run = MODEL.run(TOKENS, edits=[zero("A", 1, h=0)], reduce={"blocks.1.A": reduce.norms()})
    assert not run.cache.reduced["A", 1].l2[:, 0].any()
    assert bool(run.cache.reduced["A", 1].l2[:, 1].all())


# ---- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize("based", [False, True])
def test_a_run_keeps_likewise_with_and_without_a_base(based: bool) -> None:
    base = MODEL.run(TOKENS, want=["blocks.*.O", "blocks.0.x_mid"]) if based else None
    edit = zero("O", 1, h=1)
    plain = MODEL.run(TOKENS, want=ALL, edits=[edit])
    run = MODEL.run(
        TOKENS,
        want=["blocks.*.O", "blocks.*.A", "logits"],
        edits=[edit],
        base=base,
        pos=[0, -1],
        reduce={"blocks.*.x_mid": reduce.norms()},
        dtype=torch.float64,
    )
    assert {str(s) for s in run.cache} == {"logits", *(f"blocks.{b}.{name}" for b in range(3) for name in "OA")}
    for site, value in run.cache.items():
        assert torch.equal(value, rows_of(plain[site], site, [[0, T - 1]] * B, None).double()), site
    for block in range(3):
        close(run.cache.reduced["x_mid", block].l2, plain["x_mid", block][:, [0, -1]].norm(dim=-1).double())
    assert (run.routing_agreement is None) == (not based)
    with pytest.raises(BadEdit, match="base was kept"):
        MODEL.run(TOKENS, base=MODEL.run(TOKENS, pos=-1))


def test_nothing_wanted_is_held_whole_during_the_run() -> None:
    """The values of one block are gone when the next one's come."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def f(value: Tensor) -> Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(value))
        return value.sum()

    MODEL.run_with_cache(TOKENS, reduce={"blocks.*.h*": f, "blocks.*.c_KV": f})
    assert len(alive) == 3 + 1 + 4
    assert most <= 1


# ---- bytes -----------------------------------------------------------------------------------------------------


def nbytes(made: Any) -> int:
    if isinstance(made, Tensor):
        return made.nbytes
    return sum(map(nbytes, made.values() if isinstance(made, dict) else made))


WAYS: list[dict[str, Any]] = [
    {},
    {"names_filter": ALL},
    {"names_filter": "blocks.1.*", "dtype": torch.bfloat16},
    {"names_filter": ["blocks.*.A", "x_0"], "pos": [0, -1]},
    {"reduce": {"blocks.*.A": reduce.mean("all"), "blocks.1.O": reduce.top(2), "*.x_n": reduce.norms()}},
    {"reduce": {"blocks.*.V": reduce.mean("roles"), "blocks.0.A": lambda A: A.amax(-1)}, "spans": SPANS},
]


@pytest.mark.parametrize("how", WAYS, ids=["all", "on request too", "cast", "positions", "reduced", "roles"])
def test_the_estimate_is_what_is_kept(how: dict[str, Any]) -> None:
    _, cache = MODEL.run_with_cache(TOKENS, **how)
    found = estimate(MODEL, TOKENS.shape, **how)
    kept = {site: nbytes(value) for site, value in (*cache.items(), *cache.reduced.items())}
    assert dict(found.kept) == kept
    assert found.cached == sum(kept.values())


def test_the_estimate_of_what_lives_bounds_what_does() -> None:
    """By hand: the storages of a block's values that are alive as each next one is made."""
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def tap(site: Site, value: Tensor) -> Tensor:
        nonlocal most
        made.append(weakref.ref(value))
        alive = [v for ref in made if (v := ref()) is not None]
        most = max(most, sum({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in alive}.values()))
        return value

    tokens = REFERENCE.repeat(8, 4)
    MODEL.decoder.run(tokens, tap=tap)
    found = estimate(MODEL, tokens.shape, "x_0").live
    assert most <= found <= 2 * most


def test_the_estimate_of_a_long_pattern_is_of_its_chunks() -> None:
    A = 4 * DIMS.h * LONG * LONG
    part, all_of_it = (
        estimate(MODEL, (1, LONG), "blocks.0.A", pos=-1),
        estimate(MODEL, (1, LONG), "blocks.0.A"),
    )
    assert part.cached == A // LONG
    assert all_of_it.cached == A
    assert all_of_it.live - part.live > A / 2
    with_function = estimate(MODEL, (B, T), reduce={"blocks.0.O": lambda O: float(O.sum())})
    assert with_function.cached == estimate(MODEL, (B, T), "blocks.0.O").cached


def test_a_run_that_does_not_fit_is_refused_before_it_starts() -> None:
    found = estimate(MODEL, TOKENS.shape)
    fired = []
    with MODEL.hooks(fwd_hooks=[("x_0", lambda value, hook: fired.append(1))]):
        for call in (MODEL.run_with_cache, lambda *a, **k: MODEL.run(*a, want=None, **k)):
            with pytest.raises(TooLarge, match=r"names_filter=.*pos=.*reduce=.*dtype=") as refused:
                call(TOKENS, budget=found.total - 1)
            assert f"{found.total:,} against {found.total - 1:,} bytes" in str(refused.value)
        assert not fired
        MODEL.run_with_cache(TOKENS, budget=found.total)
    assert fired
    with pytest.raises(TooLarge):
        MODEL.run_with_cache(TOKENS, budget=found.total, grads=lambda logits: logits.sum())


# ---- files -----------------------------------------------------------------------------------------------------


def test_a_saved_cache_comes_back(tmp_path) -> None:
    tokens, keep = padded(ragged(), "left")
    spans = [{"S1": [1, 2]}, {"S1": [0, 3]}, {"S1": [2]}]
    logits, cache = MODEL.run_with_cache(
        tokens,
        keep,
        names_filter=ALL,
        reduce={"*.A": reduce.norms(), "*.V": reduce.mean("roles"), "*.O": reduce.mean()},
        spans=spans,
    )
    cache.save(tmp_path / "a.safetensors")
    read = Cache.load(tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert list(read) == list(cache)
    assert list(read.reduced) == list(cache.reduced)
    for site, value in cache.items():
        assert torch.equal(read[site], value)
        assert read[site].dtype == value.dtype
    assert torch.equal(read.reduced["A", 1].l2, cache.reduced["A", 1].l2)
    assert torch.equal(read.reduced["V", 1]["S1"], cache.reduced["V", 1]["S1"])
    assert torch.equal(read.reduced["O", 2], cache.reduced["O", 2])
    assert read.tokens is not None
    assert torch.equal(read.tokens, tokens)
    assert read.rows.lengths == LENGTHS
    assert read.rows.spans == tuple(spans)
    assert read.dims == DIMS
    assert torch.equal(read["blocks.1.c^KV"], cache["c_KV", 1])
    with pytest.raises(UnknownTensor, match="not cached"):
        read["blocks.1.O"]
    with pytest.raises(BadEdit, match="stays as it is"):
        read.keep(Site(1, "O"), logits)


def test_positions_and_dtype_come_back(tmp_path) -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.*.[OAK]", pos=[0, -1], dtype=torch.bfloat16)
    cache.save(tmp_path / "a")
    read = Cache.load(tmp_path / "a")
    assert read.pos is not None
    assert read.pos.tolist() == [[0, T - 1]] * B
    assert all(torch.equal(read[site], value) and value.dtype == torch.bfloat16 for site, value in cache.items())
    with pytest.raises(BadEdit, match="some positions only"):
        read.rows  # noqa: B018


def test_what_is_equal_is_stored_once_and_said_so(tmp_path) -> None:
    _, cache = MODEL.run_with_cache(TOKENS)
    cache.save(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        stored, header = set(file.keys()), file.metadata()
    aliases = json.loads(header["aliases"])
    assert aliases["blocks.2.x_n"] == ["blocks.1.x_next", [B, T, DIMS.d]]
    assert aliases["blocks.0.x_n"] == ["x_0", [B, T, DIMS.d]]
    assert aliases["blocks.1.Q_C"] == ["blocks.1.q_C", [B, T, DIMS.h, DIMS.n]]
    assert not stored & set(aliases)
    assert stored | set(aliases) == {"tokens", *map(str, cache)}


def test_a_loaded_cache_is_a_source(tmp_path) -> None:
    other = REFERENCE[:B, :T]
    _, cache = MODEL.run_with_cache(other, names_filter=["blocks.1.O", "blocks.1.experts", "blocks.1.delta_experts"])
    cache.save(tmp_path / "a")
    read = Cache.load(tmp_path / "a")
    source = MODEL.run(other, want=list(cache))
    for make in (
        lambda source: patch("O", 1, source=source, T=-1),
        lambda source: patch("delta_experts", 1, source=source),
        lambda source: resample("O", 1, source=source, seed=3),
    ):
        logits = [MODEL.run(TOKENS, edits=[make(s)])["logits"] for s in (source, read)]
        assert torch.equal(*logits)
        assert not torch.equal(logits[0], MODEL.run(TOKENS)["logits"])


def test_a_written_value_leaves_the_file(tmp_path) -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.O")
    cache.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    Cache.load(tmp_path / "a")["O", 1].zero_()
    assert (tmp_path / "a").read_bytes() == before
    assert torch.equal(Cache.load(tmp_path / "a")["O", 1], cache["O", 1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "it had [0-9,]+ bytes, and has"),
        (lambda path: os.truncate(path, 0), "it had [0-9,]+ bytes, and has 0"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4] + b"\1\1\1\1"), "it has been written into"),
    ],
    ids=["cut", "emptied", "written into"],
)
def test_a_cache_whose_file_changes_keeps_what_was_read_and_refuses_the_rest(tmp_path, change: Any, why: str) -> None:
    path = tmp_path / "a"
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.*.O")
    cache.save(path)
    read = Cache.load(path)
    held = {site: read[site] for site in list(read)[:2]}
    change(path)
    for site in read:
        with pytest.raises(BadCheckpoint, match=rf"{path}: {site} cannot be read \({why}.*changed since it was opened"):
            read[site]
    assert all(torch.equal(value, cache[site]) for site, value in held.items())


def test_a_cache_whose_file_is_replaced_is_what_it_was(tmp_path) -> None:
    """As when a run saves its cache under the same name again."""
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.O")
    cache.save(tmp_path / "a")
    read = Cache.load(tmp_path / "a")
    MODEL.run_with_cache(TOKENS.flip(0), names_filter="blocks.1.O")[1].save(tmp_path / "a")
    assert torch.equal(read["O", 1], cache["O", 1])
    assert not torch.equal(Cache.load(tmp_path / "a")["O", 1], cache["O", 1])


def test_a_dictionary_is_what_it_was_whatever_becomes_of_its_file(tmp_path) -> None:
    path = tmp_path / "sae.safetensors"
    save_file({name: torch.ones(*shape) for name, shape in SHAPES.items()}, path)
    dictionary = Dictionary.load(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(getattr(dictionary, name), torch.ones(*shape)) for name, shape in SHAPES.items())


SHAPES = {"W_enc": (8, 16), "b_enc": (16,), "W_dec": (16, 8), "b_dec": (8,)}


def _edit_header(path, **changes: Any) -> None:
    with safe_open(path, framework="pt") as file:
        tensors, header = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    for key, change in changes.items():
        said = json.loads(header[key])
        change(said)
        header[key] = json.dumps(said)
    entries = {name: (stored.dtype, stored.shape) for name, stored in open_header(path)[0].items()}
    save_file(tensors, path, metadata={**header, "seal": seal(header, entries)})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a readable safetensors"),
        (lambda path: path.write_bytes(b"\0" * 100), "not a readable safetensors"),
        (lambda path: path.write_bytes(b""), "not a readable safetensors"),
        (lambda path: path.write_bytes((TINY / "model-1-of-2.safetensors").read_bytes()), "not a cache"),
        (lambda path: _edit_header(path, sites=lambda s: s.update({"blocks.1.V": []})), r"blocks\.1\.V is missing"),
        (lambda path: _edit_header(path, sites=lambda s: s.update({"blocks.1.W": []})), "header is damaged.*'W'"),
        (lambda path: _edit_header(path, rows=lambda r: r.reverse()), r"blocks\.1\.O should be \[B T h v\]"),
        (lambda path: _edit_header(path, dims=lambda d: d.pop("hidden_size")), "header is damaged.*hidden_size"),
    ],
    ids=["missing", "truncated", "zeros", "empty", "foreign", "a tensor short", "unknown site", "shape", "dims"],
)
def test_files_that_are_no_caches_are_refused_by_name(tmp_path, damage: Any, why: str) -> None:
    path = tmp_path / "cache.safetensors"
    MODEL.run_with_cache(TOKENS, names_filter="blocks.1.O")[1].save(path)
    damage(path)
    with pytest.raises(BadCheckpoint, match=f"cache.safetensors: .*{why}"):
        Cache.load(path)


def test_what_cannot_be_saved_is_refused_and_leaves_no_file(tmp_path) -> None:
    _, cache = MODEL.run_with_cache(TOKENS, reduce={"blocks.1.O": lambda O: float(O.sum())})
    with pytest.raises(BadEdit, match=r"blocks\.1\.O was reduced to float"):
        cache.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


# ---- gradients -------------------------------------------------------------------------------------------------


def score(logits: Tensor) -> Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 5]).sum()


def test_gradients_leave_every_value_as_it_was() -> None:
    plain = whole()
    logits, cache = MODEL.run_with_cache(TOKENS, names_filter=ALL, grads=score)
    assert torch.equal(logits, plain["logits"])
    assert all(torch.equal(value, plain[site]) for site, value in cache.items())
    assert not any(value.requires_grad for value in (logits, *cache.values(), *cache.gradients.values()))
    expected = [site for site in ALL if site.tensor not in ("experts", "delta_heads")]
    assert list(cache.gradients) == expected
    assert all(cache.gradients[site].shape == plain[site].shape for site in expected)


def test_gradients_are_those_of_the_oracle() -> None:
    """Transformers' own backward pass, at the outputs of its modules."""
    held: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: Any, args: Any, out: Any) -> None:
            made = out[0] if isinstance(out, tuple) else out
            made.retain_grad()
            held[name] = made

        return hook

    model = ORACLE.model
    at = {"self_attn.o_proj": "delta_attn", "mlp": "delta_ffn", "self_attn.q_a_proj": "c_Q"}
    handles = [
        layer.get_submodule(module).register_forward_hook(note(f"blocks.{i}.{name}"))
        for i, layer in enumerate(model.model.layers)
        for module, name in at.items()
    ]
    embedded = model.model.embed_tokens(TOKENS).detach().requires_grad_()
    try:
        score(model(inputs_embeds=embedded, use_cache=False).logits).backward()
    finally:
        for handle in handles:
            handle.remove()
    _, cache = MODEL.run_with_cache(TOKENS, grads=score)
    assert embedded.grad is not None
    close(cache.gradients["x_0"], embedded.grad)
    assert len(held) == 9
    for key, value in held.items():
        assert value.grad is not None
        close(cache.gradients[key], value.grad)


def test_gradients_are_slopes_at_every_tensor() -> None:
    """With the experts held, a step along the gradient moves the score by the gradient's length times the step."""
    model = HookedModel(ORACLE.weights().to(torch.float64))
    _, cache = model.run_with_cache(TOKENS, grads=score)
    flat = []
    for site, gradient in cache.gradients.items():
        length = gradient.double().norm()
        if not length:
            flat.append(site.tensor)
            continue
        held = [(s, lambda E, hook, kept=cache[s]: kept) for s in cache if s.tensor == "experts"]
        step = 2e-3 * max(1.0, float(cache[site].abs().median())) * gradient / length

        def along(value: Tensor, hook: Any, by: Tensor) -> Tensor:
            return value + by.to(value.dtype)

        ends = []
        for sign in (1, -1):
            with model.hooks(fwd_hooks=[*held, (site, lambda value, hook, by=sign * step: along(value, hook, by))]):
                ends.append(float(score(model(TOKENS))))
        assert ends[0] - ends[1] == pytest.approx(2 * float(step.double().norm() * length), rel=0.05), site
    assert set(flat) == {"choice_score"}  # read by the choice alone


@pytest.mark.parametrize("side", SIDES)
def test_gradients_of_padded_rows_are_each_rows_alone_and_pads_have_none(side: str) -> None:
    tokens, keep = padded(ragged(), side)
    firsts = [T - length if side == "left" else 0 for length in LENGTHS]
    ends = [first + length - 1 for first, length in zip(firsts, LENGTHS, strict=True)]

    def at_ends(logits: Tensor) -> Tensor:
        return (logits[range(B), ends, 3] - logits[range(B), ends, 5]).sum()

    _, cache = MODEL.run_with_cache(tokens, keep, grads=at_ends)
    for b, row in enumerate(ragged()):
        _, alone = MODEL.run_with_cache(row[None], grads=score)
        for site, gradient in alone.gradients.items():
            close(real_part(cache.gradients[site], site, b, firsts[b], LENGTHS[b]), gradient[0])
    for site, gradient in cache.gradients.items():
        if site.tensor == "A":  # what a query would read of a hidden key is a number, and times 0
            gradient = gradient * cache[site]
        for axis in (i for i, dim in enumerate(MODEL.sites.node(site).shape) if dim in ("T", "S")):
            assert not gradient.movedim(axis, 1)[~keep].any(), site


def test_what_has_no_gradient_is_named() -> None:
    _, cache = MODEL.run_with_cache(
        TOKENS, names_filter=["blocks.1.experts", "blocks.1.delta_heads", "x_0"], grads=score
    )
    assert [str(site) for site in cache.gradients] == ["x_0"]
    assert "blocks.1.experts" in cache
    with pytest.raises(UnknownTensor, match="integers"):
        cache.gradients["experts", 1]
    with pytest.raises(UnknownTensor, match="nothing reads it"):
        cache.gradients["delta_heads", 1]
    with pytest.raises(BadEdit, match="no gradient is left"):
        MODEL.run_with_cache(TOKENS, names_filter="blocks.1.experts", grads=score)


def test_gradients_are_kept_like_values() -> None:
    plain = MODEL.run_with_cache(TOKENS, grads=score)[1].gradients
    _, cache = MODEL.run_with_cache(
        TOKENS, names_filter="blocks.1.A", reduce={"*.x_mid": reduce.norms()}, pos=[1, -1], grads=score
    )
    assert torch.equal(cache.gradients["A", 1], plain["A", 1][:, :, [1, -1]])
    close(cache.gradients.reduced["x_mid", 2].l2, plain["x_mid", 2][:, [1, -1]].norm(dim=-1))


def test_gradients_pass_hooks_both_ways() -> None:
    """An edit on the way forth, and one on the way back, act; a constant put in starts anew."""
    plain = MODEL.run_with_cache(TOKENS, grads=score)[1]
    for site in ("blocks.1.O", "x_0"):
        seen: list[Tensor] = []
        with MODEL.hooks(bwd_hooks=[(site, lambda gradient, hook, seen=seen: seen.append(gradient))]):
            MODEL.run_with_cache(TOKENS, names_filter="x_0", grads=score)
        assert torch.equal(seen[0], plain.gradients[site])
    value = plain["O", 1]
    with MODEL.hooks(fwd_hooks=[("blocks.1.O", lambda O, hook: value)]):
        _, cache = MODEL.run_with_cache(TOKENS, grads=score)
    assert torch.equal(cache.gradients["O", 1], plain.gradients["O", 1])
    assert not cache.gradients["A", 1].any()
    assert not value.requires_grad


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda logits: logits, r"one number; this one returned \[3, 6"),
        (lambda logits: 3.0, "returned float"),
        (lambda logits: logits.detach().sum(), "does not depend"),
    ],
    ids=["many", "float", "detached"],
)
def test_scores_that_have_no_gradient_are_refused(f: Any, why: str) -> None:
    with pytest.raises(BadEdit, match=why):
        MODEL.run_with_cache(TOKENS, grads=f)
    assert torch.equal(MODEL(TOKENS), whole()["logits"])


def test_no_graph_is_kept_unless_asked_for() -> None:
    weights = ORACLE.weights()
    for weight in weights.tensors.values():
        weight.requires_grad_()
    model = HookedModel(weights)
    made: list[weakref.ref[Tensor]] = []

    def f(value: Tensor) -> Tensor:
        made.append(weakref.ref(value))
        return value[..., :1]

    logits, cache = model.run_with_cache(TOKENS, reduce={"*.O": f}, names_filter="*")
    assert logits.requires_grad
    assert not any(value.requires_grad for value in (*cache.values(), *cache.reduced.values()))
    del logits
    assert len(made) == 3
    assert all(ref() is None for ref in made)
    _, cache = model.run_with_cache(TOKENS, grads=score)
    assert all(weight.grad is None for weight in weights.tensors.values())


def test_what_is_cached_in_inference_mode_can_be_differentiated_later() -> None:
    with torch.inference_mode():
        _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.O", reduce={"blocks.1.V": lambda V: V.sum(-1)})
    w = torch.ones(DIMS.v, requires_grad=True)
    (cache["O", 1] * w).sum().backward()
    assert w.grad is not None
    assert not cache["O", 1].is_inference()
    assert not cache.reduced["V", 1].is_inference()


# ---- memory ----------------------------------------------------------------------------------------------------


RUNS = 200
"""The law is of 2,000, a minute's work: set it by hand."""


@pytest.fixture
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_gc")
def test_memory_is_flat_over_many_runs(tmp_path) -> None:
    """No object more after many short runs of every kind than after a few, the collector off: no cycle, no leak."""
    tokens = TOKENS[:1, :3]
    MODEL.run_with_cache(tokens, names_filter="blocks.1.O")[1].save(tmp_path / "a")  # safetensors' own makes cycles

    def once(i: int) -> None:
        how: list[dict[str, Any]] = [
            {},
            {"pos": -1, "dtype": torch.bfloat16},
            {"reduce": {"*.A": reduce.mean(), "*.O": reduce.norms()}},
            {"names_filter": "blocks.1.*", "grads": score},
        ]
        if i % 8 < 4:
            MODEL.run_with_cache(tokens, **how[i % 4])
        elif i % 8 < 6:
            with MODEL.hooks(fwd_hooks=[("blocks.1.O", lambda O, hook: O * 2)]):
                MODEL(tokens)
        elif i % 8 < 7:
            base = MODEL.run(tokens, want="blocks.1.O")
            MODEL.run(tokens, edits=[zero("O", 1, h=0)], base=base, reduce={"*.x_n": reduce.norms()})
        else:
            Cache.load(tmp_path / "a")["O", 1].sum()

    def alive() -> tuple[int, int]:
        things = gc.get_objects()
        return sum(issubclass(type(thing), Tensor) for thing in things), len(things)

    for i in range(16):
        once(i)
    tensors, objects = alive()
    for i in range(RUNS):
        once(i)
    after = alive()
    assert after[0] == tensors
    assert after[1] - objects < RUNS // 4
