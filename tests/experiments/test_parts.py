"""Parts of tensors: what each is called in a frame, what says so in an edit, and which prompts have it."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.asking import Ask
from experiments.options import By
from experiments.parts import Part, ablation, can_go, columns, dim_of, labels, listed, parts, place
from experiments.prompts import Prompts
from experiments.stats import BadSample
from hooks import HookedModel, Site
from probe.errors import BadEdit, UnknownDim

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
IOI = Prompts.load("ioi", MODEL.tokenizer)
JOB = Prompts.load("job", MODEL.tokenizer)
BYS: tuple[By, ...] = ("head", "position", "role", "key", "expert", "feature")


def of(tensor: str, *by: By, prompts: Prompts = JOB, block: int = 2) -> list[Part]:
    return parts(MODEL, prompts, Site(block, tensor), by)


@pytest.mark.parametrize(
    ("tensor", "goes"),
    [
        ("x_n", {"position": "T", "role": "T", "feature": "d"}),
        ("O", {"head": "h", "position": "T", "role": "T", "feature": "v"}),
        ("v", {"head": "h", "position": "T", "role": "T"}),  # (h·v) is no axis of features
        ("K", {"head": "h", "position": "S", "role": "S", "feature": "q"}),
        ("A", {"head": "h", "position": "T", "role": "T", "key": "S"}),
        ("s_attn", {"position": "T", "role": "T"}),
        ("c_KV", {"position": "T", "role": "T", "feature": "r_kv"}),
        ("router_logits", {"position": "T", "role": "T", "expert": "e"}),
        ("gates", {"position": "T", "role": "T", "expert": "e"}),
        ("h_e", {"position": "T", "role": "T", "expert": "e", "feature": "m"}),
        ("delta_experts", {"position": "T", "role": "T", "expert": "e"}),  # contributions are taken whole
    ],
)
def test_what_a_tensor_has_parts_by(tensor: str, goes: dict[By, str]) -> None:
    node = MODEL.sites.node(Site(2, tensor))
    assert {by for by in BYS if can_go(by, node)} == set(goes)
    for by, dim in goes.items():
        assert dim_of(by, node) == dim
        assert all(set(part.where) == {dim} for part in of(tensor, by))
    for by in set(BYS) - set(goes):
        with pytest.raises(UnknownDim, match=rf"blocks\.2\.{tensor} has no parts by {by}; it has B"):
            of(tensor, by)


def test_heads_experts_and_features_are_numbered() -> None:
    dims = MODEL.dims
    assert [part.columns for part in of("O", "head")] == [{"head": i} for i in range(dims.h)]
    assert [part.where for part in of("delta_experts", "expert")] == [{"e": i} for i in range(dims.e)]
    assert len(of("x_n", "feature")) == dims.d
    assert all(part.prompts is None for part in of("O", "head"))


def test_a_tensor_is_whole_without_parts() -> None:
    assert of("O") == [Part()]


def test_position_sweeps_labelled_as_heads() -> None:
    """Each part of a product names in its columns what it names in its edit, and each once."""
    names = {"head": "h", "role": "T", "pos": "T", "key": "S", "expert": "e"}
    for tensor, by in (("O", ("head", "role")), ("A", ("head", "position", "key")), ("gates", ("role", "expert"))):
        made = of(tensor, *by, prompts=JOB.subset([0]))
        for part in made:
            told = {names[name]: value for name, value in part.columns.items() if name in names}
            told |= {"T": part.columns["pos"]} if "pos" in part.columns else {}  # a position's role is only said
            assert told == part.where
        assert len({tuple(part.where.items()) for part in made}) == len(made)
    assert len(of("A", "head", "position", "key", prompts=JOB.subset([0]))) == MODEL.dims.h * 5 * 5


def test_roles_come_in_the_order_of_the_text_and_end_last() -> None:
    assert [part.columns["role"] for part in of("x_n", "role", prompts=IOI.subset([0]))] == ["IO", "S1", "S2", "END"]
    assert [part.columns["role"] for part in of("x_n", "role")] == ["first", "last", "END"]
    mixed = Prompts((*IOI.rows[:2], *JOB.rows[:3]), MODEL.tokenizer)
    found = {part.columns["role"]: part.prompts for part in of("x_n", "role", prompts=mixed)}
    assert found["S2"] == (0, 1)
    assert found["first"] == (2, 3, 4)
    assert found["END"] is None


def test_positions_go_by_shape_and_say_token_and_role() -> None:
    two = JOB.subset([0, 1])
    assert len(two.shapes()) == 1
    made = of("x_n", "position", prompts=two)
    assert [part.columns["pos"] for part in made] == [0, 1, 2, 3, 4]
    assert [part.columns.get("token") for part in made] == ["<bos>", None, None, "is", "a"]
    assert [part.columns.get("role") for part in made] == [None, "first", "last", None, "END"]
    assert not any("group" in part.columns for part in made)
    several = of("x_n", "position", prompts=IOI)
    for (shape, rows), label in zip(IOI.shapes().items(), labels(list(IOI.shapes())), strict=True):
        here = [part for part in several if part.columns["group"] == label]
        assert [part.columns["pos"] for part in here] == list(range(shape.length))
        assert {part.prompts for part in here} == {tuple(rows)}


def test_shapes_of_one_template_are_told_apart() -> None:
    shapes = list(IOI.shapes())
    assert labels([shapes[0], shapes[0]._replace(length=3), shapes[1]]) == [
        f"{shapes[0].template} (0)",
        f"{shapes[0].template} (1)",
        shapes[1].template,
    ]
    assert labels([shapes[0]._replace(template="", length=3)]) == ["3 tokens"]


def test_keys_and_positions_of_one_shape_go_together() -> None:
    mixed = Prompts((*IOI.rows[:1], *JOB.rows[:1]), MODEL.tokenizer)
    made = of("A", "position", "key", prompts=mixed)
    lengths = [len(prompt.tokens) for prompt in mixed.rows]
    assert len(made) == sum(n * n for n in lengths), "no query of one prompt with a key of the other"
    assert {part.prompts for part in made} == {(0,), (1,)}


def test_a_place_limits_all_parts_and_is_in_the_frame() -> None:
    node = MODEL.sites.node(Site(2, "O"))
    for at, said in (("END", {"role": "END"}), ("last[-1]", {"role": "last[-1]"}), (-1, {"role": "-1"})):
        assert place(JOB, node, at) == Part(said, {"T": at})
    one = JOB.subset([0, 1])
    assert place(one, node, 3) == Part({"pos": 3}, {"T": 3})
    assert place(one, MODEL.sites.node(Site(2, "K")), 3).where == {"S": 3}
    assert place(one, node, None) == Part()
    made = parts(MODEL, one, Site(2, "O"), ["head"], {"T": "END"})
    assert [part.where for part in made] == [{"T": "END", "h": i} for i in range(MODEL.dims.h)]
    with pytest.raises(UnknownDim, match="T is limited twice"):
        parts(MODEL, one, Site(2, "O"), ["role"], {"T": "END"})


def test_averages_over_pos_across_prompts_of_different_shape() -> None:
    node = MODEL.sites.node(Site(2, "O"))
    for at in (0, 3, -2):
        with pytest.raises(BadSample, match="of 12 shapes, in which one position is different words"):
            place(IOI, node, at)
    assert place(IOI, node, -1).where == {"T": -1}, "the last is the last everywhere"


def test_columns_say_the_cards_own() -> None:
    site = Site(0, "delta_ffn")
    said = columns(site, MODEL.sites.node(site), Part({"role": "END"}), Part({"feature": 3}))
    assert said == {"block": 0, "step": 27, "tensor": "delta_ffn", "symbol": r"\Delta_{\mathrm{ffn}}"} | {
        "role": "END",
        "feature": 3,
    }


def test_rows_of_a_prompt_with_several_answers_go_together() -> None:
    rows = [
        {"clean": "The capital of Peru is", "answer": "Lima and", "wrong": "Budapest and"},
        {"clean": "Paul Jones is a", "answer": "teacher", "wrong": "nurse"},
    ]
    ask = Ask(MODEL, Prompts.of(rows, JOB.tokenizer), ["logit_difference"])
    assert ask.prompt_of == [0, 0, 1]
    assert Part({}, {"T": 2}, (0,)).rows(ask) == {"T": 2, "B": [0, 1]}
    assert Part({}, {"T": 2}, (1,)).rows(ask) == {"T": 2, "B": [2]}
    assert Part({}, {"T": 2}).rows(ask) == {"T": 2}


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("heads", "by='heads': parts go by head, position, role, key, expert, feature"),
        (["head", "neuron"], "by='neuron'"),
        (["head", "head"], "named twice"),
        (["position", "head", "role"], "named twice"),
    ],
)
def test_what_parts_cannot_go_by(by: Any, says: str) -> None:
    with pytest.raises(UnknownDim, match=says):
        listed(by)


def test_one_thing_or_several() -> None:
    assert [listed(by) for by in (None, "head", ["head", "role"])] == [(), ("head",), ("head", "role")]


@pytest.mark.parametrize("how", ["mean", "resample"])
def test_what_takes_from_others_needs_some(how: Any) -> None:
    with pytest.raises(BadEdit, match=f"{how} takes values from reference prompts, and there are none"):
        ablation(how, Site(1, "O"), None, {}, None, 0)
