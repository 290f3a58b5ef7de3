"""The card against names.md, written out again by hand here; its spellings; what it refuses when it is made."""

from __future__ import annotations

import unicodedata
from collections import Counter

import pytest
from torch import Tensor

from probe import Card, Leaf, ProbeError, Site, Sites, Step, around, card
from probe.card import instead_of, plain, split_shape, step
from probe.errors import OutOfRange, UnknownDim, UnknownTensor
from probe.leaves import FP32, LEAVES
from tests.probe.small import SMALL

# --- the expected card -------------------------------------------------------------------------
# number | name | plain symbol | shape | dtype | other spellings ("1/" in front: the reciprocal)

ATTENTION = """
 | s_attn      | 1/rms(x_n)  | B T 1     | fp32 | 1/ln1.hook_scale
 | n_attn      | x_n/rms     | B T d     | act  | ln1.hook_normalized
1| x_attn      | x_attn      | B T d     | act  | ln1.hook_out, attn.hook_in, input_layernorm
2| c_Q         | c^Q         | B T r_q   | act  | self_attn.q_a_proj
 | s_Q         | 1/rms(c^Q)  | B T 1     | fp32 |
 | n_Q         | c^Q/rms     | B T r_q   | act  |
3| c_Q_hat     | ĉ^Q         | B T r_q   | act  | attn.hook_q_latent, self_attn.q_a_layernorm
4| c_KV        | c^KV        | B T r_kv  | act  |
 | s_KV        | 1/rms(c^KV) | B T 1     | fp32 |
 | n_KV        | c^KV/rms    | B T r_kv  | act  |
5| c_KV_hat    | ĉ^KV        | B T r_kv  | act  | attn.hook_kv_latent, self_attn.kv_a_layernorm
6| q_C         | q^C         | B T (h n) | act  |
7| Q_C         | Q^C         | B T h n   | act  |
8| q_pe        | q^pe        | B T (h r) | act  |
9| Q_pe        | Q^pe        | B T h r   | act  |
10| Q_R        | Q^R         | B T h r   | act  | attn.hook_rot_q
11| Q          | Q           | B T h q   | act  | attn.hook_q
12| k_C        | k^C         | B T (h n) | act  |
13| K_C        | K^C         | B T h n   | act  |
14| k_pe       | k^pe        | B T r     | act  |
15| k_R        | k^R         | B T r     | act  | attn.hook_rot_k
16| K          | K           | B S h q   | act  | attn.hook_k
17| v          | v           | B T (h v) | act  |
18| V          | V           | B S h v   | act  | attn.hook_v
 | S           | S           | B h T S   | act  | attn.hook_attn_scores
 | A           | A           | B h T S   | act  | attn.hook_pattern
19| O          | O           | B T h v   | act  | attn.hook_z
 | delta_heads | Δ_attn,i    | B T h d   | act  | attn.hook_result
20| delta_attn | Δ_attn      | B T d     | act  | hook_attn_out, self_attn.o_proj
21| x_mid      | x'_n        | B T d     | act  | hook_resid_mid
 | s_ffn       | 1/rms(x'_n) | B T 1     | fp32 | 1/ln2.hook_scale
 | n_ffn       | x'_n/rms    | B T d     | act  | ln2.hook_normalized
22| x_ffn      | x_ffn       | B T d     | act  | ln2.hook_out, mlp.hook_in, post_attention_layernorm
"""
DENSE = """
23| g          | g           | B T f     | act  | mlp.hook_pre, mlp.gate_proj
24| u          | u           | B T f     | act  | mlp.hook_pre_linear, mlp.up_proj
25| a          | a           | B T f     | act  |
26| h          | h           | B T f     | act  | mlp.hook_post
27| delta_ffn  | Δ_ffn       | B T d     | act  | hook_mlp_out, mlp.down_proj
"""
MOE = """
 | router_logits | r         | B T e     | fp32 | mlp.gate.hook_out
 | affinity      | s         | B T e     | fp32 |
 | choice_score  | s + b     | B T e     | fp32 |
 | experts       | E(t)      | B T k     | int64 |
 | gates         | w         | B T k     | fp32 |
 | g_e           | g_e       | B T k m   | act  |
 | u_e           | u_e       | B T k m   | act  |
 | a_e           | a_e       | B T k m   | act  |
 | h_e           | h_e       | B T k m   | act  |
 | y_e           | y_e       | B T k d   | act  |
 | delta_experts | Δ_e       | B T k d   | fp32 |
 | delta_routed  | Δ_routed  | B T d     | act  |
 | g_s           | g_s       | B T m_s   | act  | mlp.shared_experts.hook_pre
 | u_s           | u_s       | B T m_s   | act  | mlp.shared_experts.hook_pre_linear
 | a_s           | a_s       | B T m_s   | act  |
 | h_s           | h_s       | B T m_s   | act  | mlp.shared_experts.hook_post
 | delta_shared  | Δ_shared  | B T d     | act  | mlp.shared_experts.hook_out
 | delta_ffn     | Δ_ffn     | B T d     | act  | hook_mlp_out
"""
END = """
28| x_next     | x_{n+1}     | B T d     | act  | hook_resid_post, x_<n+1>
"""
AROUND = """
 | x_0        | x_0        | B T d | act  | hook_embed, embed_tokens
 | s_final    | 1/rms(x_L) | B T 1 | fp32 | 1/ln_final.hook_scale
 | n_final    | x_L/rms    | B T d | act  | ln_final.hook_normalized
 | x_final    | x_final    | B T d | act  | ln_final.hook_out, norm
 | logits     | logits     | B T V | act  | lm_head
"""
LATENT_ONLY = ("c_Q", "s_Q", "n_Q", "c_Q_hat")
WEIGHTS = """
W_DQ d r_q · W_UQ r_q (h n) · W_QR r_q (h r) · W_DKV d r_kv · W_KR d r · W_UK r_kv (h n) · W_UV r_kv (h v) ·
W_O (h v) d · W_1 d f · W_3 d f · W_2 f d · W_g d e · b e · W_1_e e d m · W_3_e e d m · W_2_e e m d ·
W_1_s d m_s · W_3_s d m_s · W_2_s m_s d · W_E V d · W_U d V · w_attn d · w_Q r_q · w_KV r_kv · w_ffn d · w_final d
"""

Row = tuple[int | None, str, str, tuple[str, ...], str, tuple[str, ...]]


def read(*tables: str) -> list[Row]:
    """The rows of the tables above."""
    rows: list[Row] = []
    for line in "".join(tables).split("\n"):
        if line.strip():
            number, name, symbol, shape, dtype, also = (cell.strip() for cell in line.split("|"))
            spellings = tuple(s.strip() for s in also.split(",") if s.strip())
            rows.append((int(number) if number else None, name, symbol, split_shape(shape), dtype, spellings))
    return rows


CARDS: dict[str, tuple[Card, list[Row]]] = {
    "dense": (card(moe=False), read(ATTENTION, DENSE, END)),
    "moe": (card(moe=True), read(ATTENTION, MOE, END)),
    "dense-direct": (card(moe=False, query_latent=False), read(ATTENTION, DENSE, END)),
    "moe-direct": (card(moe=True, query_latent=False), read(ATTENTION, MOE, END)),
    "around": (around(), read(AROUND)),
}
for _kind, (_, _rows) in CARDS.items():
    if _kind.endswith("direct"):
        _rows[:] = [row for row in _rows if row[1] not in LATENT_ONLY]

EACH = pytest.mark.parametrize("kind", CARDS)


@EACH
def test_it_has_the_names_of_the_list_in_its_order(kind: str) -> None:
    made, rows = CARDS[kind]
    assert list(made) == [row[1] for row in rows]
    counts = {"dense": 39, "moe": 52, "dense-direct": 35, "moe-direct": 48, "around": 5}
    assert len(made) == len(rows) == counts[kind]
    assert made.hooked == (*(() if kind == "around" else ("x_n",)), *made)


@EACH
def test_each_row_has_its_number_symbol_shape_dtype_and_spellings(kind: str) -> None:
    made, rows = CARDS[kind]
    for number, name, symbol, shape, dtype, also in rows:
        row = made[name]
        spelt = (*row.also, *([f"1/{row.inverse}"] if row.inverse else []))
        assert (row.number, row.plain, row.shape, row.dtype) == (number, symbol, shape, dtype), name
        assert sorted(spelt) == sorted(also), name
        assert row.doc, name


@pytest.mark.parametrize("kind", ["dense", "dense-direct", "moe", "moe-direct"])
def test_the_28_numbers_are_in_order(kind: str) -> None:
    made = CARDS[kind][0]
    numbers = [row.number for row in made.values() if row.number is not None]
    missing = set() if "direct" not in kind else {2, 3}
    missing |= set(range(23, 28)) if "moe" in kind else set()
    assert numbers == [n for n in range(1, 29) if n not in missing]


def test_leaves_are_those_of_the_list() -> None:
    expected = {}
    for entry in WEIGHTS.replace("\n", " ").split("·"):
        name, shape = entry.strip().split(" ", 1)
        expected[name] = split_shape(shape)
    assert {name: leaf.shape for name, leaf in LEAVES.items() if leaf.kind == "weight"} == expected
    of_kind = {kind: {n for n, leaf in LEAVES.items() if leaf.kind == kind} for kind in ("input", "constant")}
    assert of_kind["input"] == {"tokens", "x_n", "x_L", "R", "M"}
    constants = {"tau", "eps", "eps_latent", "scaling", "norm_topk", "n_group", "topk_group"}
    assert of_kind["constant"] == constants | {"dt"}
    assert {n for n, leaf in LEAVES.items() if leaf.hook} == {"x_n"}
    assert {n for n, leaf in LEAVES.items() if leaf.routed} == {"W_1_e", "W_3_e", "W_2_e"}
    assert {"W_g", "b"} == FP32
    assert "hook_resid_pre" in LEAVES["x_n"].also


def test_each_card_reads_the_weights_of_its_kind() -> None:
    def weights(kind: str) -> set[str]:
        return {leaf.name for leaf in CARDS[kind][0].weights}

    latent = {"W_DQ", "w_Q"}
    attention = {"w_attn", "W_UQ", "W_QR", "W_DKV", "W_KR", "w_KV", "W_UK", "W_UV", "W_O", "w_ffn"}
    dense = {"W_1", "W_3", "W_2"}
    moe = {"W_g", "b", "W_1_e", "W_3_e", "W_2_e", "W_1_s", "W_3_s", "W_2_s"}
    assert weights("dense") == attention | latent | dense
    assert weights("moe") == attention | latent | moe
    assert weights("dense-direct") == attention | dense
    assert weights("moe-direct") == attention | moe
    assert weights("around") == {"W_E", "w_final", "W_U"}


def test_only_heads_are_read_only_and_on_request() -> None:
    for made, _ in CARDS.values():
        rows = [row for row in made.values() if row.read_only or row.on_request]
        assert [row.name for row in rows] == (["delta_heads"] if "delta_heads" in made else [])
        assert all(row.on_request and "edit `O`" in row.read_only for row in rows)


# --- spellings ---------------------------------------------------------------------------------


@EACH
def test_every_spelling_of_every_row_and_leaf_finds_it(kind: str) -> None:
    made, _ = CARDS[kind]
    seen = 0
    for name in (*made.leaves, *made):
        node = made.node(name)
        for spelling in (name, node.symbol, plain(node.symbol), *node.also, getattr(node, "inverse", "") or name):
            for form in ("NFC", "NFD"):
                assert made.find(unicodedata.normalize(form, spelling)) is node
            assert made.spellings()[spelling] == name
            seen += 1
    assert seen > 4 * len(made)


def test_spellings_by_hand() -> None:
    dense, moe = CARDS["dense"][0], CARDS["moe"][0]
    pairs = {
        "Δ_ffn": "delta_ffn",
        r"\Delta_{\mathrm{ffn}}": "delta_ffn",
        "c^{KV}": "c_KV",
        "x'_n": "x_mid",
        "x_{n+1}": "x_next",
        "attn.hook_v": "V",
        "attn.hook_z": "O",
        "ln1.hook_scale": "s_attn",
        "hook_resid_pre": "x_n",
        "self_attn.o_proj": "delta_attn",
        "self_attn.o_proj.weight": "W_O",
        "τ": "tau",
    }
    assert {spelling: dense.find(spelling).name for spelling in pairs} == pairs
    assert dense.find("mlp.down_proj").name == "delta_ffn"
    assert moe.find("mlp.gate.e_score_correction_bias").name == "b"
    assert moe.find("E(t)").name == "experts"
    assert around().find("lm_head").name == "logits"
    assert around().find("lm_head.weight").name == "W_U"


def test_an_accent_may_be_composed_or_not() -> None:
    composed, apart = "ĉ^Q", "c\u0302^Q"
    assert composed != apart
    assert card(moe=False).find(composed) is card(moe=False).find(apart) is card(moe=False)["c_Q_hat"]


@pytest.mark.parametrize(("lower", "upper"), [("q_C", "Q_C"), ("q_pe", "Q_pe"), ("k_C", "K_C"), ("v", "V"), ("a", "A")])
def test_case_tells_two_tensors_apart(lower: str, upper: str) -> None:
    dense = card(moe=False)
    assert (dense.find(lower).name, dense.find(upper).name) == (lower, upper)
    assert dense.find(lower) is not dense.find(upper)


@pytest.mark.parametrize(
    ("spelling", "near"),
    [
        ("c_kvv", "c_KV (c^KV)"),
        ("C_KV", "c_KV (c^KV)"),
        ("delta_atn", "delta_attn (Δ_attn)"),
        ("attn.hook_zz", "O (O)"),
        ("hook_rezid_mid", "x_mid (x'_n)"),
    ],
)
def test_a_misspelling_gets_the_nearest(spelling: str, near: str) -> None:
    with pytest.raises(UnknownTensor) as error:
        card(moe=False).find(spelling)
    assert repr(spelling) in str(error.value)
    assert near in str(error.value).split("Nearest: ")[1]
    assert "'\"" not in str(error.value)  # not a KeyError's repr of the message


def test_nothing_near_gets_no_suggestion() -> None:
    with pytest.raises(UnknownTensor, match="k2probe tensors") as error:
        card(moe=False).find("zzzzzzzzzz")
    assert "Nearest" not in str(error.value)


@pytest.mark.parametrize(
    ("spelling", "named"),
    [
        ("g", "g_e g_s"),
        ("u", "u_e u_s"),
        ("a", "a_e a_s"),
        ("h", "h_e h_s"),
        ("mlp.hook_pre", "x_ffn g_e g_s"),
        ("mlp.hook_pre_linear", "u_e u_s"),
        ("mlp.hook_post", "delta_ffn h_e h_s"),
        ("mlp.gate_proj", "g_e g_s"),
        ("mlp.up_proj", "u_e u_s"),
        ("mlp.down_proj", "y_e delta_shared"),
    ],
)
@pytest.mark.parametrize("latent", [True, False])
def test_a_moe_block_refuses_the_dense_names_and_says_which(spelling: str, named: str, latent: bool) -> None:
    moe = card(moe=True, query_latent=latent)
    with pytest.raises(UnknownTensor) as error:
        moe.find(spelling)
    assert repr(spelling) in str(error.value)
    for name in named.split():
        assert name in str(error.value)
        assert name in moe
    assert card(moe=False).find(spelling).name in ("g", "u", "a", "h", "delta_ffn")


@pytest.mark.parametrize(
    ("module", "tensors", "weights"),
    [
        ("self_attn.q_b_proj", ("q_C", "q_pe"), ("W_UQ", "W_QR")),
        ("self_attn.q_proj", ("q_C", "q_pe"), ("W_UQ", "W_QR")),
        ("self_attn.kv_b_proj", ("k_C", "v"), ("W_UK", "W_UV")),
        ("self_attn.kv_a_proj_with_mqa", ("c_KV", "k_pe"), ("W_DKV", "W_KR")),
    ],
)
@pytest.mark.parametrize("end", ["", ".weight"])
def test_a_module_that_holds_two_is_refused_and_both_are_named(
    module: str, tensors: tuple[str, str], weights: tuple[str, str], end: str
) -> None:
    for kind in ("dense", "moe", "dense-direct", "moe-direct"):
        with pytest.raises(UnknownTensor) as error:
            CARDS[kind][0].find(module + end)
        words = str(error.value).replace(",", " ").replace("(", " ").replace(")", " ").split()
        assert {*tensors, *weights} <= set(words)


def test_plain_symbols() -> None:
    assert plain(r"\Delta_{\mathrm{attn},i}") == "Δ_attn,i"
    assert plain(r"\hat c^{KV}") == "ĉ^KV"
    assert plain("x_{n+1}") == "x_{n+1}"
    assert plain("W_{1,e}") == "W_1,e"
    for made, _ in CARDS.values():
        for row in made.values():
            assert "\\" not in row.plain
            assert unicodedata.is_normalized("NFC", row.plain)


# --- the graph ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "readers"),
    [
        ("dense", "x_n", "s_attn n_attn x_mid"),
        ("dense", "x_attn", "c_Q c_KV k_pe"),
        ("dense-direct", "x_attn", "c_KV q_C q_pe k_pe"),
        ("dense", "c_KV", "s_KV n_KV"),
        ("dense", "c_KV_hat", "k_C v"),
        ("dense", "k_R", "K"),
        ("dense", "Q", "S"),
        ("dense", "V", "O"),
        ("dense", "O", "delta_heads delta_attn"),
        ("dense", "delta_heads", ""),
        ("dense", "x_mid", "s_ffn n_ffn x_next"),
        ("dense", "x_ffn", "g u"),
        ("dense", "x_next", ""),
        ("dense", "eps", "s_attn s_ffn"),
        ("dense", "eps_latent", "s_Q s_KV"),
        ("dense", "tau", "S"),
        ("dense", "R", "Q_R k_R"),
        ("moe", "x_ffn", "router_logits g_e u_e g_s u_s"),
        ("moe", "affinity", "choice_score gates"),
        ("moe", "b", "choice_score"),
        ("moe", "experts", "gates g_e u_e y_e"),
        ("moe", "scaling", "gates"),
        ("around", "x_L", "s_final n_final"),
    ],
)
def test_readers_by_hand(kind: str, name: str, readers: str) -> None:
    assert [row.name for row in CARDS[kind][0].readers(name)] == readers.split()


LATE = "x_mid s_ffn n_ffn x_ffn g u a h delta_ffn x_next"


@pytest.mark.parametrize(
    ("kind", "names", "reached"),
    [
        ("dense", "V", f"O delta_heads delta_attn {LATE}"),
        ("dense", "k_R", f"K S A O delta_heads delta_attn {LATE}"),
        ("dense", "delta_heads", ""),
        ("dense", "h", "delta_ffn x_next"),
        ("dense", "g u", "a h delta_ffn x_next"),
        ("dense", "a h", "h delta_ffn x_next"),
        ("dense", "x_next", ""),
        ("moe", "choice_score", "experts gates g_e u_e a_e h_e y_e delta_experts delta_routed delta_ffn x_next"),
        ("moe", "gates", "delta_experts delta_routed delta_ffn x_next"),
        ("moe", "g_s", "a_s h_s delta_shared delta_ffn x_next"),
        ("around", "s_final", "n_final x_final logits"),
        ("around", "x_0", ""),
    ],
)
def test_descendants_by_hand(kind: str, names: str, reached: str) -> None:
    assert CARDS[kind][0].descendants(names.split()) == set(reached.split())


def test_everything_hangs_on_x_n() -> None:
    for kind in ("dense", "moe", "dense-direct", "moe-direct"):
        assert CARDS[kind][0].descendants(["x_n"]) == set(CARDS[kind][0])


def test_axis_finds_parts_and_says_what_there_is() -> None:
    dense = card(moe=False)
    assert [dense["Q_C"].axis(dim) for dim in "BThn"] == [0, 1, 2, 3]
    assert (dense["q_C"].axis("h"), dense["q_C"].axis("n")) == (2, 2)
    assert [dense["S"].axis(dim) for dim in "BhTS"] == [0, 1, 2, 3]
    with pytest.raises(UnknownDim, match=r"K \[B S h q\].*S, not T"):
        dense["K"].axis("T")
    with pytest.raises(UnknownDim, match=r"c_KV has no dim 'h'; it has B T r_kv"):
        dense["c_KV"].axis("h")


# --- checked when made -------------------------------------------------------------------------


def leaf(name: str, symbol: str = "", *also: str) -> Leaf:
    return Leaf(name, "input", symbol or name, ("B", "T", "d"), "", also)


PLANTED = {"x": leaf("x"), "y": leaf("y", "y", "a.y")}


@step("one", "B T d", formula="", stream="ffn")
def one(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@step("two", "B T d", formula="", stream="ffn", also=("the.second",), inverse="the.reciprocal")
def two(one: Tensor) -> Tensor:
    return 2 * one


@instead_of(two, "one")
def two_lean(x: Tensor, y: Tensor) -> Tensor:
    return 2 * (x + y)


def planted(*functions: object, **kwargs: object) -> Card:
    rows = [fn.step for fn in functions]  # type: ignore[attr-defined]
    return Card("planted", rows, PLANTED, **kwargs)  # type: ignore[arg-type]


def test_a_sound_planted_card_is_made() -> None:
    made = planted(one, two, two_lean)
    assert list(made) == ["one", "two"]
    assert made["two"].fn is two
    assert made.lean("two") is not None
    assert made.lean("two").needs == ("x", "y")  # type: ignore[union-attr]
    assert made.lean("one") is None
    assert [row.name for row in made.readers("x")] == ["one"]  # the lean way is no second reader


def test_an_unknown_parameter_is_refused() -> None:
    @step("three", "B T d", formula="", stream="ffn")
    def three(one: Tensor, tow: Tensor) -> Tensor:
        return one + tow

    with pytest.raises(ValueError, match=r"planted card: three needs 'tow', which is no leaf and no earlier step"):
        planted(one, two, three)


def test_a_step_before_what_it_needs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two needs 'one'"):
        planted(two, one)


def test_a_lean_way_is_checked_too() -> None:
    @instead_of(two, "one")
    def leaner(z: Tensor) -> Tensor:
        return z

    with pytest.raises(ValueError, match=r"two needs 'z'"):
        planted(one, two, leaner)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"planted card: one is defined twice"):
        planted(one, one)

    @step("other", "B T d", formula="", stream="ffn", name="one")
    def another(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match=r"one is defined twice"):
        planted(one, another)


def test_a_leafs_name_is_taken() -> None:
    @step("other", "B T d", formula="", stream="ffn", name="y")
    def like_a_leaf(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match=r"y is defined twice"):
        planted(like_a_leaf)


@pytest.mark.parametrize("shape", ["B T w", "B T (h w)"])
def test_an_unknown_dim_is_refused(shape: str) -> None:
    @step("other", shape, formula="", stream="ffn")
    def other(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match=r"other has unknown dims \['w'\]"):
        planted(other)


@pytest.mark.parametrize(
    ("symbol", "also", "inverse", "twice"),
    [
        ("s", ("the.second",), "", "the.second"),
        ("s", ("the.reciprocal",), "", "the.reciprocal"),
        ("s", (), "the.second", "the.second"),
        ("s", ("one",), "", "one"),
        ("s", ("a.y",), "", "a.y"),
        ("s", ("no.such",), "", "no.such"),
        ("s", ("e\u0301",), "", "é"),
    ],
)
def test_a_spelling_twice_is_refused(symbol: str, also: tuple[str, ...], inverse: str, twice: str) -> None:
    @step(symbol, "B T d", formula="", stream="ffn", also=also, inverse=inverse)
    def third(x: Tensor, y: Tensor) -> Tensor:
        return x

    @step("e", "B T d", formula="", stream="ffn", also=("é",))
    def accented(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match=rf"'{twice}' spells two things"):
        planted(one, two, accented, third, refused={"no.such": "."})


def test_a_symbol_twice_is_refused_but_a_name_wins_over_a_symbol() -> None:
    @step(r"\Delta_{\mathrm{o}}", "B T d", formula="", stream="ffn")
    def p(x: Tensor) -> Tensor:
        return x

    @step("Δ_o", "B T d", formula="", stream="ffn")
    def q(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match=r"'Δ_o' is the symbol of two things"):
        planted(p, q)

    @step("one", "B T d", formula="", stream="ffn")
    def called_one(x: Tensor) -> Tensor:
        return x

    made = planted(called_one, one)
    assert made.find("one") is made["one"]


# --- sites -------------------------------------------------------------------------------------

SITES = Sites(SMALL)  # block 0 dense, 1 and 2 MoE


def test_sites_are_all_tensors_in_order() -> None:
    sites = list(SITES)
    assert sites[:2] == [Site(None, "x_0"), Site(0, "x_n")]
    assert sites[-4:] == [Site(None, name) for name in ("s_final", "n_final", "x_final", "logits")]
    assert Counter(site.block for site in sites) == {None: 5, 0: 40, 1: 53, 2: 53}
    assert len(set(sites)) == len(sites)
    assert len({site.hook for site in sites}) == len(sites)


def test_every_site_is_found_by_its_name_its_hook_and_itself() -> None:
    for site in SITES:
        assert SITES.find(str(site)) == SITES.find(site.hook) == SITES.find(site) == site
        assert SITES.node(site).name == site.tensor


@pytest.mark.parametrize(
    ("spelling", "block", "tensor"),
    [
        ("blocks.2.c_KV", 2, "c_KV"),
        ("blocks.2.hook_c_KV", 2, "c_KV"),
        ("blocks.2.c^KV", 2, "c_KV"),
        ("blocks.0.hook_v", 0, "v"),
        ("blocks.0.v", 0, "v"),
        ("blocks.0.attn.hook_v", 0, "V"),
        ("blocks.2.attn.hook_pattern", 2, "A"),
        ("blocks.1.hook_resid_pre", 1, "x_n"),
        ("blocks.1.x_n", 1, "x_n"),
        ("blocks.1.hook_resid_post", 1, "x_next"),
        ("blocks.0.mlp.hook_post", 0, "h"),
        ("blocks.0.hook_h", 0, "h"),
        ("blocks.1.mlp.shared_experts.hook_post", 1, "h_s"),
        ("model.layers.2.self_attn.o_proj", 2, "delta_attn"),
        ("model.layers.0.mlp.down_proj", 0, "delta_ffn"),
        ("language_model.model.layers.1.input_layernorm", 1, "x_attn"),
        ("blocks.1.c\u0302^KV", 1, "c_KV_hat"),
        ("hook_embed", None, "x_0"),
        ("hook_x_0", None, "x_0"),
        ("model.embed_tokens", None, "x_0"),
        ("language_model.model.norm", None, "x_final"),
        ("ln_final.hook_normalized", None, "n_final"),
        ("lm_head", None, "logits"),
        ("hook_logits", None, "logits"),
    ],
)
def test_spellings_of_sites(spelling: str, block: int | None, tensor: str) -> None:
    assert SITES.find_with_inverse(spelling) == (Site(block, tensor), False)


@pytest.mark.parametrize(
    ("spelling", "site"),
    [
        ("blocks.1.ln1.hook_scale", Site(1, "s_attn")),
        ("blocks.0.ln2.hook_scale", Site(0, "s_ffn")),
        ("ln_final.hook_scale", Site(None, "s_final")),
    ],
)
def test_a_reciprocal_is_found_as_one(spelling: str, site: Site) -> None:
    assert SITES.find_with_inverse(spelling) == (site, True)
    assert SITES.find_with_inverse(str(site)) == (site, False)


@pytest.mark.parametrize("block", [3, 99, -1])
@pytest.mark.parametrize("form", ["blocks.{}.c_KV", "blocks.{}.hook_O", "model.layers.{}.mlp.down_proj"])
def test_a_block_that_does_not_exist(block: int, form: str) -> None:
    with pytest.raises(OutOfRange, match=rf"block {block} does not exist: .* blocks 0 to 2"):
        SITES.find(form.format(block))
    with pytest.raises(OutOfRange):
        SITES.card(block)


@pytest.mark.parametrize(
    ("spelling", "said"),
    [
        ("c_KV", "say which, as in blocks.0.c_KV"),
        ("self_attn.o_proj", "say which, as in blocks.0.delta_attn"),
        ("g_e", "say which, as in blocks.0.g_e"),
        ("blocks.0.R", "R is shown, never watched or edited"),
        ("blocks.1.M", "M is shown, never watched or edited"),
        ("blocks.0.W_O", "W_O is shown, never watched or edited"),
        ("blocks.0.self_attn.o_proj.weight", "W_O is shown"),
        ("blocks.0.tau", "tau is shown"),
        ("blocks.0.c_kvv", "Nearest: c_KV"),
        ("blocks.0.g_e", "g_e is a tensor of MoE blocks; block 0 is dense"),
        ("blocks.1.g", "g_e"),
        ("blocks.1.mlp.hook_post", "h_e and h_s"),
        ("blocks.2.self_attn.kv_b_proj", "k_C and v"),
        ("blocks.0.attn.v", "no tensor"),
        ("blocks.0.mlp.h", "no tensor"),
        ("blocks..c_KV", "no tensor"),
        ("blocks.x.c_KV", "no tensor"),
        ("x_n", "say which, as in blocks.0.x_n"),
        ("nonsense", "no tensor"),
    ],
)
def test_what_is_no_site_says_why(spelling: str, said: str) -> None:
    with pytest.raises(UnknownTensor) as error:
        SITES.find(spelling)
    assert said in str(error.value)
    assert isinstance(error.value, ProbeError)


def test_steps_hold_what_they_are() -> None:
    assert all(isinstance(row, Step) for made, _ in CARDS.values() for row in made.values())
    assert card(moe=True) is card(moe=True)
    assert repr(card(moe=True)) == "Card(MoE: 52 tensors)"
