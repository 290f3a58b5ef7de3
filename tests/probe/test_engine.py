"""Plans and their evaluation: start anywhere, stop early, make only what is wanted, hold nothing beyond its readers."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from probe import KIMI_K2, Card, Decoder, Dims, InMemory, Site, Sites, evaluate, plan, random_weights
from probe.errors import Missing
from probe.numerics import Rotation, causal_mask, position_ids, rotation
from tests.oracle import config, padding

LATENT = Dims.from_config(config(n_group=4, topk_group=2))
DIRECT = Dims.from_config(config(q_lora_rank=None))
WEIGHTS = {"latent": random_weights(LATENT, 1), "direct": random_weights(DIRECT, 2)}
DENSE, MOE = 0, 1
KINDS = [(model, block) for model in WEIGHTS for block in (DENSE, MOE)]
IDS = [f"{model}-{'moe' if block else 'dense'}" for model, block in KINDS]
kinds = pytest.mark.parametrize(("model", "block"), KINDS, ids=IDS)
B, T = 2, 7
EVERY = [
    pytest.param(model, block, name, id=f"{kind}-{name}")
    for (model, block), kind in zip(KINDS, IDS, strict=True)
    for name in Sites(WEIGHTS[model].dims).card(block)
]


class Counting:
    """Weights that note what is read of them: (block, name, rows)."""

    def __init__(self, weights: InMemory, resident: bool = True) -> None:
        self.weights, self.dims, self.resident = weights, weights.dims, resident
        self.reads: list[tuple[int | None, str, list[int] | None]] = []

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        self.reads.append((block, name, None if experts is None else list(experts)))
        return self.weights.read(block, name, experts)

    def names(self, block: int | None) -> list[str]:
        return [name for at, name, _ in self.reads if at == block]


def card_of(model: str, block: int) -> Card:
    return Sites(WEIGHTS[model].dims).card(block)


def inputs(model: str, length: int = T, keep: Tensor | None = None) -> dict[str, Any]:
    dims = WEIGHTS[model].dims
    x = 0.7 * torch.randn(B, length, dims.d, generator=torch.Generator().manual_seed(length))
    R = rotation(position_ids(keep, length), dims, x.dtype)
    return {"x_n": x, "R": R, "M": causal_mask(keep, length, x.dtype)}


def whole(model: str, block: int, given: dict[str, Any]) -> dict[str, Any]:
    """Everything of a block, what it was given among it."""
    rows = card_of(model, block)
    return {**given, **evaluate(plan(rows, list(rows), given), given, WEIGHTS[model], block)}


@cache
def base(model: str, block: int) -> dict[str, Any]:
    """`whole` from `inputs`, made once; nobody changes it (a test below sees to that)."""
    return whole(model, block, inputs(model))


def expected(rows: Card, name: str, known: set[str]) -> set[str]:
    """The steps that ``name`` takes, found by walking parameters; without scores and pattern where nobody asks."""
    steps = set()
    stack = [name]
    while stack:
        at = stack.pop()
        if at in rows and at not in known:
            steps.add(at)
            stack += rows[at].needs
    return steps if {"S", "A"} & {name, *known} else steps - {"S", "A"}


# ---- start anywhere -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "block", "name"), EVERY)
def test_any_step_alone(model: str, block: int, name: str) -> None:
    """From the values that it reads: one step, the same bits, and no weight but its own."""
    rows = card_of(model, block)
    made = base(model, block)
    given = {need: made[need] for need in rows[name].needs if need in made}
    todo = plan(rows, [name], given)
    weights = Counting(WEIGHTS[model])
    versions = [value._version for _, value in tensors(given)]
    alone = evaluate(todo, {**given, "dt": torch.float32}, weights, block)
    assert [value._version for _, value in tensors(given)] == versions, "a step wrote into what it reads"
    assert [row.name for row in todo.steps] == [name]
    assert torch.equal(alone[name], made[name])
    assert weights.names(block) == list(todo.reads) == [need for need in rows[name].needs if need[0] in "Wwb"]


@pytest.mark.parametrize(("model", "block", "name"), EVERY)
def test_start_at_any_tensor(model: str, block: int, name: str) -> None:
    """Given all that is above it and itself, x_next takes what is below it, gives the same bits, and makes no more."""
    rows = card_of(model, block)
    made = base(model, block)
    above = {n: v for n, v in made.items() if n not in rows.descendants([name])}
    todo = plan(rows, ["x_next"], above)
    steps = {row.name for row in todo.steps}
    assert steps == expected(rows, "x_next", set(above))
    assert steps <= rows.descendants([name])
    assert torch.equal(evaluate(todo, above, WEIGHTS[model], block)["x_next"], made["x_next"])


@kinds
def test_a_given_value_is_taken_as_it_is(model: str, block: int) -> None:
    """Even where it could be computed: the steps above it don't run, those below see it."""
    rows, given = card_of(model, block), inputs(model)
    x_mid = torch.randn(B, T, WEIGHTS[model].dims.d)
    todo = plan(rows, ["x_mid", "x_next", "delta_ffn"], {**given, "x_mid": x_mid})
    made = evaluate(todo, {**given, "x_mid": x_mid}, WEIGHTS[model], block)
    assert made["x_mid"] is x_mid
    assert torch.equal(made["x_next"], x_mid + made["delta_ffn"])
    assert {row.stream for row in todo.steps} <= {"ffn", "residual", "router", "experts", "shared"}
    assert "W_O" not in todo.reads


def test_the_model_around_starts_anywhere() -> None:
    rows = Sites(LATENT).around
    x = torch.randn(B, T, LATENT.d)
    todo = plan(rows, ["logits"], ["n_final"])
    made = evaluate(todo, {"n_final": x}, WEIGHTS["latent"])
    assert [row.name for row in todo.steps] == ["x_final", "logits"]
    read = WEIGHTS["latent"].read
    assert torch.equal(made["logits"], read(None, "w_final") * x @ read(None, "W_U"))


# ---- stop early, and only what is wanted ----------------------------------------------------------------------------


@kinds
def test_the_latent_takes_four_steps_and_two_weights(model: str, block: int) -> None:
    rows, given, weights = card_of(model, block), inputs(model), Counting(WEIGHTS[model])
    todo = plan(rows, ["c_KV"], given)
    made = evaluate(todo, given, weights, block)
    assert [row.name for row in todo.steps] == ["s_attn", "n_attn", "x_attn", "c_KV"]
    assert todo.reads == ("w_attn", "W_DKV")
    assert weights.reads == [(block, "w_attn", None), (block, "W_DKV", None)]
    assert todo.taken == ("x_n",)
    assert list(made) == ["c_KV"]


@pytest.mark.parametrize(("model", "block", "name"), EVERY)
def test_only_what_is_wanted(model: str, block: int, name: str) -> None:
    """The steps are the tensor's ancestors and none else, in the card's order; its value is that of a full run."""
    rows, given, weights = card_of(model, block), inputs(model), Counting(WEIGHTS[model])
    todo = plan(rows, [name], given)
    steps = [row.name for row in todo.steps]
    assert set(steps) == expected(rows, name, set(given))
    assert steps == [n for n in rows if n in steps]
    made = evaluate(todo, given, weights, block)
    assert list(made) == [name]
    assert torch.equal(made[name], base(model, block)[name])
    assert set(weights.names(block)) == set(todo.reads)
    assert ("delta_heads" in steps) == (name == "delta_heads")


@kinds
def test_wants_come_in_their_order_and_once(model: str, block: int) -> None:
    rows, given = card_of(model, block), inputs(model)
    todo = plan(rows, iter(["x_next", "x_n", "V", "x_next"]), given)
    assert todo.want == ("x_next", "x_n", "V")
    made = evaluate(todo, given, WEIGHTS[model], block)
    assert list(made) == ["x_next", "x_n", "V"]
    assert made["x_n"] is given["x_n"]


@kinds
def test_wanting_nothing_or_what_is_given_takes_no_step(model: str, block: int) -> None:
    rows, given, weights = card_of(model, block), inputs(model), Counting(WEIGHTS[model])
    for want in ([], ["x_n"]):
        todo = plan(rows, want, given)
        assert (todo.steps, todo.reads) == ((), ())
        assert list(evaluate(todo, given, weights, block)) == want
    assert weights.reads == []


@pytest.mark.parametrize(
    ("want", "read"),
    [
        (Site(None, "x_0"), {None: ["W_E"]}),
        (Site(0, "c_KV"), {None: ["W_E"], 0: ["w_attn", "W_DKV"]}),
        (Site(1, "affinity"), {None: ["W_E"], 1: None, 0: None}),
        (Site(2, "x_n"), {None: ["W_E"], 1: None, 0: None}),
    ],
    ids=str,
)
def test_a_decoder_stops_after_the_last_block_that_is_wanted(want: Site, read: dict[int | None, list[str]]) -> None:
    weights = Counting(WEIGHTS["latent"])
    tokens = torch.randint(0, LATENT.V, (B, T))
    made = Decoder(weights).run(tokens, want=[want])
    assert list(made) == [want]
    assert {at for at, _, _ in weights.reads} == set(read)
    for at, names in read.items():
        assert names is None or weights.names(at) == names
    full = Decoder(WEIGHTS["latent"])
    assert torch.equal(made[want], full.run(tokens, want=list(full.sites))[want])
    if want == Site(1, "affinity"):
        assert "W_1_s" not in weights.names(1)


# ---- nothing is held longer than it is read -------------------------------------------------------------------------


@kinds
def test_each_value_is_dropped_once_after_its_last_reader(model: str, block: int) -> None:
    rows, given = card_of(model, block), inputs(model)
    for want in (["x_next"], ["x_next", "A"], ["delta_heads", "c_KV"]):
        todo = plan(rows, want, given)
        names = [row.name for row in todo.steps]
        dropped = [(name, names[i]) for i, drop in enumerate(todo.drops) for name in drop]
        assert len(dict(dropped)) == len(dropped), "dropped twice"
        for name in (*todo.taken, *names):
            readers = [row.name for row in todo.steps if name in row.needs]
            assert (name in want) != (name in dict(dropped)), name
            if name not in want:
                assert dict(dropped)[name] == (readers or [name])[-1]


@kinds
@pytest.mark.parametrize("want", [["x_next"], ["x_next", "S"], ["delta_ffn"]], ids=" ".join)
@torch.inference_mode()  # outside it, views keep what they are views of
def test_a_dropped_value_is_gone(model: str, block: int, want: list[str]) -> None:
    """Seen from a tap: when a step's value arrives, what earlier steps were the last to read exists no more."""
    rows, given = card_of(model, block), inputs(model)
    todo = plan(rows, want, given)
    gone_at = {name: i for i, drop in enumerate(todo.drops) for name in drop}
    names = [row.name for row in todo.steps]
    alive: dict[str, weakref.ref[Tensor]] = {}
    seen: list[str] = []

    def tap(name: str, value: Tensor) -> Tensor:
        if name in names:  # not x_n, which the caller holds
            late = [n for n, ref in alive.items() if n in gone_at and gone_at[n] < names.index(name) and ref()]
            assert not late, f"{late} at {name}"
            assert all(ref() is not None for n, ref in alive.items() if n in want)
            alive[name] = weakref.ref(value)
        seen.append(name)
        return value

    made = evaluate(todo, given, WEIGHTS[model], block, tap)
    assert seen == ["x_n", *names]
    assert {n for n, ref in alive.items() if ref() is not None} == set(made) == set(want)


@torch.inference_mode()
def test_a_decoder_holds_one_block_at_a_time() -> None:
    decoder = Decoder(WEIGHTS["latent"])
    alive: dict[Site, weakref.ref[Tensor]] = {}
    most = 0

    def tap(site: Site, value: Tensor) -> Tensor:
        nonlocal most
        alive[site] = weakref.ref(value)
        held = [at for at, ref in alive.items() if ref() is not None]
        most = max(most, len(held))
        old = {at for at in held if at.block is not None and site.block is not None and at.block < site.block}
        assert old <= {Site(site.block - 1, "x_next")} if site.block else not old
        return value

    decoder.run(torch.randint(0, LATENT.V, (B, T)), tap=tap)
    assert len(alive) == len([s for s in decoder.sites if s.tensor not in ("S", "A", "delta_heads")])
    assert most < 14


# ---- attention without its scores -----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the shape of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor):
                self.shapes.add(tuple(made.shape))
        return out

    def whole_scores(self, length: int) -> set[tuple[int, ...]]:
        """Those with an axis of queries and one of keys, both whole."""
        return {shape for shape in self.shapes if shape[-2:] == (length, length)}


LONG = 19


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 18, 19, 256])
@pytest.mark.parametrize("keep", [None, padding([LONG, 5], "left")], ids=["full", "left"])
def test_watched_or_not_attention_has_the_same_bits(
    chunk: int, keep: Tensor | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And unless watched, scores never exist whole once there are more queries than a chunk."""
    monkeypatch.setattr("probe.numerics.QUERY_CHUNK", chunk)
    rows, weights = card_of("latent", DENSE), WEIGHTS["latent"].to(dtype)
    given = inputs("latent", LONG, keep)
    given = {"x_n": given["x_n"].to(dtype), "R": Rotation(*(t.to(dtype) for t in given["R"])), "M": given["M"]}
    given["M"] = causal_mask(keep, LONG, dtype)
    made = {}
    for want in (["O", "x_next"], ["S", "O", "x_next"], ["A", "O", "x_next"]):
        with Largest() as largest:
            made[want[0]] = evaluate(plan(rows, want, given), given, weights, DENSE)
        watched = want[0] != "O"
        assert bool(largest.whole_scores(LONG)) == (watched or chunk >= LONG)
        if chunk < LONG:
            assert (B, LATENT.h, chunk, LONG) in largest.shapes
    for name in ("O", "x_next"):
        assert torch.equal(made["O"][name], made["S"][name])
        assert torch.equal(made["O"][name], made["A"][name])
    assert made["S"]["S"].shape == (B, LATENT.h, LONG, LONG)


@pytest.mark.parametrize("asked", ["S", "A"])
def test_scores_are_made_whole_when_asked_for_in_any_way(asked: str) -> None:
    """Wanted, edited or given: then O is read from A, and an edit of either reaches it."""
    rows, given = card_of("latent", DENSE), inputs("latent")
    made = base("latent", DENSE)

    def steps(todo: Any) -> set[str]:
        return {row.name for row in todo.steps}

    assert not {"S", "A"} & steps(plan(rows, ["O"], given))
    assert {"S", asked, "O"} <= steps(plan(rows, ["O", asked], given))
    assert asked in steps(plan(rows, ["O"], given, [asked]))
    assert "Q" not in steps(plan(rows, ["O"], {**given, asked: made[asked], "V": made["V"]}))

    def tap(name: str, value: Tensor) -> Tensor:
        return torch.zeros_like(value) if name == asked else value

    edited = evaluate(plan(rows, ["O"], given, [asked]), given, WEIGHTS["latent"], DENSE, tap)["O"]
    assert not torch.equal(edited, made["O"])


# ---- edits and taps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "block", "name"), EVERY)
def test_below_an_edit_nothing_known_stands(model: str, block: int, name: str) -> None:
    """With every value known: the edited tensor is taken and tapped, what it reaches is made anew, nothing else is."""
    rows = card_of(model, block)
    made = base(model, block)
    todo = plan(rows, ["x_next", name], made, [name])
    tapped: list[str] = []

    def tap(at: str, value: Tensor) -> Tensor:
        tapped.append(at)
        return value

    again = evaluate(todo, made, WEIGHTS[model], block, tap)
    steps = [row.name for row in todo.steps]
    stale = rows.descendants([name])
    assert set(steps) == expected(rows, "x_next", set(made) - stale)
    assert set(steps) <= stale
    assert name in todo.taken
    assert tapped == [at for at in ("x_n", name) if at in todo.tapped] + steps
    assert all(torch.equal(again[at], made[at]) for at in todo.want)


def test_a_tap_sees_each_value_once_and_its_answer_stands() -> None:
    rows, given = card_of("latent", MOE), inputs("latent")
    todo = plan(rows, ["x_next", "V"], given, ["V"])
    seen: list[str] = []

    def tap(name: str, value: Tensor) -> Tensor:
        seen.append(name)
        return torch.zeros_like(value) if name == "V" else value

    made = evaluate(todo, given, WEIGHTS["latent"], MOE, tap)
    assert seen == ["x_n", *(row.name for row in todo.steps)]
    assert not made["V"].any()
    zeroed = evaluate(
        plan(rows, ["x_next"], {**given, "V": made["V"]}), {**given, "V": made["V"]}, WEIGHTS["latent"], MOE
    )
    assert torch.equal(made["x_next"], zeroed["x_next"])


def halve(name: str, value: Tensor) -> Tensor:
    return value / 2 if name == "x_mid" else value


def tensors(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        for part in value if isinstance(value, tuple) else (value,):
            yield name, part


@kinds
def test_given_values_and_weights_are_never_changed(model: str, block: int) -> None:
    """Not by a step: all that is given is as it was, its version too."""
    rows = card_of(model, block)
    for given in (inputs(model), whole(model, block, inputs(model))):
        held = [*tensors(given), *((str(at), t) for at, t in WEIGHTS[model].tensors.items())]
        before = [(name, value, value.clone(), value._version) for name, value in held]
        evaluate(plan(rows, list(rows), ["x_n", "R", "M"]), given, WEIGHTS[model], block)
        evaluate(plan(rows, ["x_next"], given, ["x_mid"]), given, WEIGHTS[model], block, halve)
        for name, value, was, version in before:
            assert torch.equal(value, was), name
            assert value._version == version, name


def test_two_runs_give_the_same_bits() -> None:
    decoder = Decoder(WEIGHTS["latent"])
    tokens = torch.randint(0, LATENT.V, (B, T))
    first = decoder.run(tokens, want=list(decoder.sites))
    decoder.run(tokens, want=[Site(1, "A")], edited=[Site(0, "O")], tap=lambda site, value: value * 0.5)
    second = decoder.run(tokens, want=list(decoder.sites))
    assert all(torch.equal(first[site], second[site]) for site in first)


# ---- what cannot be planned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "given", "needs"),
    [
        ("O", ["x_n", "R"], "M"),
        ("Q_R", ["x_n", "M"], "R"),
        ("c_KV", ["x_mid"], "x_n"),
        ("x_next", ["delta_ffn"], "x_n|R|M"),
        ("c_KV", [], "x_n"),
        ("c_kvv", ["x_n"], "c_kvv"),
    ],
)
def test_what_is_missing_is_named(want: str, given: list[str], needs: str) -> None:
    with pytest.raises(Missing, match=rf"^{want} needs ({needs}), which is not given; given are .+\.$"):
        plan(card_of("latent", DENSE), [want], given)


def test_another_kinds_tensor_is_missing() -> None:
    with pytest.raises(Missing, match="needs h, which"):
        plan(card_of("latent", MOE), ["h"], ["x_n", "R", "M"])
    with pytest.raises(Missing, match="needs c_Q, which"):
        plan(card_of("direct", MOE), ["c_Q"], ["x_n", "R", "M"])


def test_the_activation_dtype_is_asked_for() -> None:
    """The one cast that no argument tells: from x_n, or from dt."""
    rows = card_of("latent", MOE)
    parts = torch.randn(B, T, LATENT.k, LATENT.d)
    todo = plan(rows, ["delta_routed"], ["delta_experts"])
    with pytest.raises(Missing, match="give x_n, or dt"):
        evaluate(todo, {"delta_experts": parts}, WEIGHTS["latent"], MOE)
    for extra in ({"dt": torch.bfloat16}, {"x_n": torch.zeros(1).bfloat16()}):
        made = evaluate(todo, {"delta_experts": parts, **extra}, WEIGHTS["latent"], MOE)["delta_routed"]
        assert torch.equal(made, parts.sum(2).bfloat16())


# ---- a plan is data -------------------------------------------------------------------------------------------------


def test_a_printed_plan_shows_steps_drops_and_reads() -> None:
    lines = str(plan(card_of("latent", DENSE), ["c_KV"], ["x_n", "R", "M"])).splitlines()
    assert len(lines) == 6
    assert lines[0] == "want c_KV given x_n: 4 steps"
    shown = [" ".join(line.split()) for line in lines[1:]]
    assert shown == [
        "s_attn = 1/rms(x_n) from x_n, eps [B T 1]",
        "n_attn = x_n/rms from x_n, s_attn [B T d] drop s_attn, x_n",
        "x_attn = x_attn from w_attn, n_attn [B T d] drop n_attn",
        "c_KV = c^KV from x_attn, W_DKV [B T r_kv] drop x_attn",
        "reads w_attn, W_DKV",
    ]


@pytest.mark.parametrize(("model", "block", "name"), EVERY)
def test_every_plan_prints(model: str, block: int, name: str) -> None:
    todo = plan(card_of(model, block), [name], ["x_n", "R", "M"])
    lines = str(todo).splitlines()
    assert len(lines) == len(todo.steps) + 2
    assert [line.split()[0] for line in lines[1:-1]] == [row.name for row in todo.steps]
    assert ("(the chosen rows of e)" in lines[-1]) == any(read.endswith("_e") for read in todo.reads)


def test_a_plan_that_does_nothing_prints() -> None:
    assert str(plan(card_of("latent", DENSE), ["x_n"], ["x_n"])) == "want x_n given x_n: 0 steps\nreads no weights"


# ---- weights that are not in memory ---------------------------------------------------------------------------------

ROUTED = ["W_1_e", "W_3_e", "W_2_e"]


@pytest.mark.parametrize("model", WEIGHTS)
@pytest.mark.parametrize("length", [1, 3, 12])
def test_only_the_chosen_experts_rows_are_read(model: str, length: int) -> None:
    rows, given = card_of(model, MOE), inputs(model, length)
    weights = Counting(WEIGHTS[model], resident=False)
    want = ["experts", "y_e", "delta_ffn", "x_next"]
    made = evaluate(plan(rows, want, given), given, weights, MOE)
    chosen = sorted(set(made["experts"].flatten().tolist()))
    assert [(name, at) for _, name, at in weights.reads if name in ROUTED] == [(name, chosen) for name in ROUTED]
    assert all(at is None for _, name, at in weights.reads if name not in ROUTED)
    if length == 1:
        assert len(chosen) < WEIGHTS[model].dims.e
    resident = evaluate(plan(rows, want, given), given, WEIGHTS[model], MOE)
    assert torch.equal(
        made["experts"], resident["experts"]
    )  # their numbers in the model, not their place in what was read
    for name in want[1:]:
        torch.testing.assert_close(made[name], resident[name], rtol=0, atol=1e-5)


def test_resident_weights_are_read_whole() -> None:
    given, weights = inputs("latent"), Counting(WEIGHTS["latent"])
    evaluate(plan(card_of("latent", MOE), ["x_next"], given), given, weights, MOE)
    assert [at for _, name, at in weights.reads if name in ROUTED] == [None] * 3


def test_forced_experts_are_those_that_are_read() -> None:
    """Given from outside, or set by an edit: the rows read follow, and no more than the steps need."""
    rows = card_of("latent", MOE)
    made = base("latent", MOE)
    forced = torch.tensor([15, 3, 0, 7]).expand(B, T, 4)
    given = {"x_ffn": made["x_ffn"], "experts": forced}
    weights = Counting(WEIGHTS["latent"], resident=False)
    a_e = evaluate(plan(rows, ["a_e"], given), given, weights, MOE)["a_e"]
    assert weights.reads == [(MOE, "W_1_e", [0, 3, 7, 15])]
    exact = torch.nn.functional.silu(
        torch.einsum("btd,kdm->btkm", made["x_ffn"], WEIGHTS["latent"].read(MOE, "W_1_e", [15, 3, 0, 7]))
    )
    torch.testing.assert_close(a_e, exact, rtol=0, atol=1e-5)

    weights = Counting(WEIGHTS["latent"], resident=False)
    todo = plan(rows, ["x_next"], inputs("latent"), ["experts"])
    edited = evaluate(todo, inputs("latent"), weights, MOE, lambda name, value: forced if name == "experts" else value)
    assert [at for _, name, at in weights.reads if name in ROUTED] == [[0, 3, 7, 15]] * 3
    assert not torch.equal(edited["x_next"], made["x_next"])


@pytest.mark.parametrize("keep", [None, padding([6, 2], "left")], ids=["full", "left"])
def test_a_decoder_on_weights_that_are_not_in_memory(keep: Tensor | None) -> None:
    tokens = torch.randint(0, LATENT.V, (2, 6))
    weights = Counting(WEIGHTS["latent"], resident=False)
    there, here = Decoder(weights)(tokens, keep), Decoder(WEIGHTS["latent"])(tokens, keep)
    torch.testing.assert_close(there, here, rtol=0, atol=2e-5)
    assert sum(name in ROUTED for _, name, _ in weights.reads) == 3 * sum(LATENT.moe)


# ---- no host sync, no other device ----------------------------------------------------------------------------------

FULL = {
    "latent": dataclasses.replace(KIMI_K2, moe=(False, True)),
    "direct": dataclasses.replace(KIMI_K2, r_q=None, n_group=8, topk_group=4, moe=(False, True)),
}


def meta(dims: Dims, padded: bool, device: str = "meta") -> dict[str, Any]:
    """A block's inputs at 24 positions, nowhere."""
    keep = torch.ones(B, 24, dtype=torch.bool, device=device) if padded else None
    R = rotation(position_ids(keep, 24, torch.device(device)), dims, torch.bfloat16)
    M = causal_mask(keep, 24, torch.bfloat16, torch.device(device))
    return {"x_n": torch.empty(B, 24, dims.d, dtype=torch.bfloat16, device="meta"), "R": R, "M": M}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("block", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("kind", FULL)
def test_a_full_size_block_never_waits_for_a_value_nor_leaves_its_device(
    kind: str, block: int, padded: bool, watched: bool
) -> None:
    """Kimi K2's own sizes on tensors without data: whoever reads a value, or mixes devices, raises."""
    dims = FULL[kind]
    with FakeTensorMode(), torch.inference_mode():
        weights = random_weights(dims, dtype=torch.bfloat16, device="meta")
        rows, given = Sites(dims).card(block), meta(dims, padded)
        made = evaluate(plan(rows, list(rows) if watched else ["x_next"], given), given, weights, block)
    sizes = {"B": B, "T": 24, "S": 24, "1": 1}
    for name, value in made.items():
        shape = tuple(sizes[axis] if axis in sizes else dims.size(axis) for axis in rows[name].shape)
        assert tuple(value.shape) == shape, name
        assert value.device.type == "meta", name
        assert value.dtype == {"act": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}[rows[name].dtype]


def test_a_full_size_model_never_waits_for_a_value() -> None:
    with FakeTensorMode(), torch.inference_mode():
        decoder = Decoder(random_weights(FULL["latent"], dtype=torch.bfloat16, device="meta"))
        logits = decoder(torch.zeros(B, 24, dtype=torch.int64, device="meta"))
    assert logits.shape == (B, 24, KIMI_K2.V)


def test_a_host_sync_or_another_device_would_raise() -> None:
    """That the two tests above can fail: choosing rows reads values; a mask left on the CPU is elsewhere."""
    dims = FULL["latent"]
    with FakeTensorMode(), torch.inference_mode():
        weights = random_weights(dims, dtype=torch.bfloat16, device="meta")
        given = meta(dims, padded=False)
        todo = plan(Sites(dims).card(MOE), ["x_next"], given)
        with pytest.raises(DynamicOutputShapeException):
            evaluate(todo, given, Counting(weights, resident=False), MOE)
        with pytest.raises(RuntimeError, match="device"):
            evaluate(todo, {**given, "M": meta(dims, padded=False, device="cpu")["M"]}, weights, MOE)
