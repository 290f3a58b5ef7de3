"""A sweep against its slow twin, one whole run a cell: every tensor under every edit, and edits in all company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import (
    Cell,
    Dictionary,
    Edit,
    HookedModel,
    Live,
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
    rounded,
    scale,
    set_to,
    splice,
    zero,
)
from probe import Dims, random_weights
from probe.errors import ProbeError, Unmatched
from tests.hooks.small import close
from tests.hooks.twin import LOGITS, Ask, agree, swept

LATENT = Dims(
    d=40, r_q=20, r_kv=16, h=3, n=8, r=4, v=10, f=56, e=8, k=3, m=16, m_s=12, V=40, moe=(False, True, True),
    eps=1e-6, scaling=2.5, norm_topk=True, n_group=2, topk_group=1, theta=1e3, yarn=None,
)  # fmt: skip
DIRECT = replace(LATENT, r_q=None, moe=(True, False, True), n_group=1, norm_topk=False)
SHORT = {"latent": replace(LATENT, moe=(False, True)), "direct": replace(DIRECT, moe=(True, False))}
"""Of two blocks: dense and MoE, each both first and last."""

MODELS = {"latent": HookedModel(random_weights(LATENT, 3)), "direct": HookedModel(random_weights(DIRECT, 4))}
SMALL = {name: HookedModel(random_weights(dims, 5)) for name, dims in SHORT.items()}
KEEP = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 6 + [0]]).bool()
READ = [[2, 6], [4], [0, 3, 5]]
"""Several positions, and not equally many."""


def draw(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


TOKENS, OTHER = draw(3, 7, 1), draw(3, 7, 2)
OTHER[:, :2] = TOKENS[:, :2]  # so that a source has a prefix to share


def base() -> Live:
    return Live(TOKENS, KEEP)


def source(**kwargs: Any) -> Live:
    return Live(OTHER, KEEP, **kwargs)


def references(models: dict[str, HookedModel]) -> dict[str, Run]:
    return {name: model.run(draw(90, 9, 3), want=list(model.sites)) for name, model in models.items()}


@pytest.fixture(scope="module")
def reference() -> dict[str, Run]:
    return references(MODELS)


@pytest.fixture(scope="module")
def of_small() -> dict[str, Run]:
    return references(SMALL)


both = pytest.mark.parametrize("kind", MODELS)


def randn(*shape: int, seed: int = 6) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def double(value: Tensor) -> Tensor:
    return 2 * value


def roll(value: Tensor) -> Tensor:
    return value.roll(1, 1)


# ---- every tensor under every edit -----------------------------------------------------------------------------------

At = dict[str, int]
Make = Callable[[str, At, int, Run, Live], Edit]
"""Of a site, a place, its width, a run to take from and a source that runs along: an edit."""

EDITS: dict[str, Make] = {
    "zero": lambda s, at, w, run, live: zero(s),
    "zero at a place": lambda s, at, w, run, live: zero(s, **at),
    "zero at several": lambda s, at, w, run, live: zero(s, **{dim: [1, -1] for dim in at}),
    "zero of a row": lambda s, at, w, run, live: zero(s, B=1),
    "zero within": lambda s, at, w, run, live: zero(s, within=randn(2, w)),
    "mean": lambda s, at, w, run, live: mean(s, source=run),
    "mean by position": lambda s, at, w, run, live: mean(s, source=run, over="position", **at),
    "mean of what runs along": lambda s, at, w, run, live: mean(s, source=live, over="position", **at),
    "resample": lambda s, at, w, run, live: resample(s, source=run, seed=1),
    "resample at a place": lambda s, at, w, run, live: resample(s, source=run, seed=1, **at),
    "patch": lambda s, at, w, run, live: patch(s, source=live),
    "patch at a place": lambda s, at, w, run, live: patch(s, source=live, **at),
    "patch at the last": lambda s, at, w, run, live: patch(s, source=live, **dict.fromkeys(at, -1)),
    "patch from elsewhere": lambda s, at, w, run, live: patch(s, source=live, source_T=4, rotate="redo", **at),
    "patch as it is": lambda s, at, w, run, live: patch(s, source=live, source_T=4, rotate="keep", **at),
    "patch from a run": lambda s, at, w, run, live: patch(s, source=run, rows=[5, 6, 7], **at),
    "noise": lambda s, at, w, run, live: noise(s, std=0.5, relative=True, seed=2),
    "noise at a place": lambda s, at, w, run, live: noise(s, std=0.5, seed=2, **at),
    "rounded": lambda s, at, w, run, live: rounded(s, seed=2, **at),
    "add": lambda s, at, w, run, live: add(s, direction=torch.linspace(-1, 1, w), alpha=2.0),
    "add at a place": lambda s, at, w, run, live: add(s, direction=torch.linspace(-1, 1, w), alpha=2.0, **at),
    "scale": lambda s, at, w, run, live: scale(s, factor=-0.5, **at),
    "project out": lambda s, at, w, run, live: project_out(s, span=randn(2, w), **at),
    "set": lambda s, at, w, run, live: set_to(s, value=torch.arange(w), **at),
    "freeze": lambda s, at, w, run, live: freeze(s),
    "function": lambda s, at, w, run, live: edit(s, double, **at),
}


@both
@pytest.mark.parametrize("how", EDITS)
def test_every_tensor_under_every_edit(how: str, kind: str, of_small: dict[str, Run]) -> None:
    """What a run refuses, a sweep refuses likewise, before it has shown anything; all else is one sweep."""
    model, run, live = SMALL[kind], of_small[kind], source(read=[[3], [4], [5, 2]])
    plain, other = (model.run(tokens, KEEP, want=list(model.sites)) for tokens in (TOKENS, OTHER))
    cells, refused = [], 0
    for site in model.sites:
        at = {"T" if "T" in model.sites.node(site).shape else "S": 2}
        one = EDITS[how](str(site), at, run[site].shape[-1], run, live)
        twin = replace(one, how=replace(one.how, source=other)) if getattr(one.how, "source", None) is live else one
        try:
            model.run(TOKENS, KEEP, edits=[twin], base=plain, want=[site])
        except Unmatched:
            pass  # which a sweep counts
        except ProbeError as why:
            with pytest.raises(type(why)):
                swept(model, Ask(base(), [Cell(()), Cell((one,))], [live], want=("x_0",)))
            refused += 1
            continue
        cells.append(Cell((one,)))
    assert len(cells) + refused == len(list(model.sites))
    assert len(cells) > 80
    _, outcomes = agree(model, Ask(base(), cells, [live], ["logits", "blocks.0.x_mid", "blocks.1.x_next"], read=READ))
    moved = sum(o.worlds > 0 for o in outcomes if o.unmatched is None)
    assert moved == 0 if how == "freeze" else moved > 0.9 * len(cells)
    assert all(o.unmatched is None for o in outcomes) or how.startswith(("patch", "mean", "resample"))


# ---- all that can be looked at ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_every_tensor_is_shown_whole(budget: int, kind: str) -> None:
    model, live = MODELS[kind], source(read=[[0]] * 3)
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in range(3) for pos in (0, 3, -1)]
    cells += [Cell((zero("S", 1, h=1, T=3),)), Cell((zero("A", 2, S=2),)), Cell((knock_out(1, T=4, S=[0, 2]),))]
    agree(model, Ask(base(), cells, [live], want=(), whole=list(model.sites), budget=budget))


@both
@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_every_tensor_is_shown_at_the_positions_read(budget: int, kind: str) -> None:
    model, live = MODELS[kind], source(read=[[0], [1, 4], [2]])
    sites = [site for site in model.sites if site.tensor not in ("S", "A")]
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in range(3) for pos in (0, 3, -1)]
    agree(model, Ask(base(), cells, [live], want=sites, read=READ, budget=budget))


@both
@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_cells_with_reads_and_wholes_of_their_own(budget: int, kind: str) -> None:
    cells = [
        Cell((zero("O", 0, h=1, T=2),), read=[[6, 3], [4], [1]], whole=("blocks.1.A", "blocks.2.x_mid")),
        Cell((zero("O", 1, h=1, T=2),), whole=("blocks.2.S",)),
        Cell((zero("O", 2, h=1, T=2),), read=[[2], [2], [2]]),
        Cell((knock_out(1, T=4, S=2),), whole=("blocks.1.S", "x_final")),
        Cell(()),
    ]
    agree(MODELS[kind], Ask(base(), cells, want=["logits", "blocks.2.O"], budget=budget))


@both
def test_what_heads_add_is_made_on_request(kind: str) -> None:
    cells = [Cell((scale("O", 1, factor=2.0, T=2),)), Cell((zero("x_n", 1, T=-1),))]
    agree(MODELS[kind], Ask(base(), cells, want=["blocks.1.delta_heads"], whole=["blocks.2.delta_heads"], read=READ))


# ---- cells of several edits ------------------------------------------------------------------------------------------

SEVERAL: dict[str, Callable[[Live, Run], tuple[Edit, ...]]] = {
    "a window of blocks": lambda live, run: tuple(patch("x_n", block, source=live, T=2) for block in (0, 1, 2)),
    "heads, values, an edge": lambda live, run: (
        zero("O", 0, h=1),
        zero("O", 0, h=2),
        add("O", 0, direction=torch.ones(10)),
        mean("V", 1, source=run),
        knock_out(2, T=-1, S=0),
    ),
    "positions that come later and earlier": lambda live, run: (
        zero("x_0", T=3),
        add("c_KV", 1, direction=torch.linspace(-1, 1, 16), T=1),
        zero("delta_attn", 2, T=4),
    ),
    "all writes to the stream": lambda live, run: tuple(
        patch(name, block, source=live, T=3) for block in (0, 1) for name in ("delta_attn", "delta_ffn")
    ),
    "the choice and the gates held": lambda live, run: (zero("O", 0, T=2), freeze("experts"), freeze("gates")),
    "the choice held": lambda live, run: (zero("O", 0), freeze("experts")),
    "patterns and norms held": lambda live, run: (zero("O", 0, T=2), freeze("A"), freeze("s_*")),
    "all else held": lambda live, run: (zero("x_n", 0, T=2), freeze("delta_attn"), freeze("delta_ffn")),
    "heads held": lambda live, run: (zero("x_n", 0, T=2), freeze("delta_attn")),
    "one block held": lambda live, run: (zero("O", 0, T=2), freeze("delta_attn", 1), freeze("delta_ffn", 1)),
    "queries and keys held": lambda live, run: (zero("x_n", 1, T=2), freeze("Q"), freeze("K")),
    "held at a position": lambda live, run: (zero("x_n", 0, T=1), freeze("delta_ffn", T=3)),
    "replaced, then changed": lambda live, run: (patch("O", 1, source=live), scale("O", 1, factor=2.0, T=3)),
    "in a part that nobody reads": lambda live, run: (zero("x_n", 0, T=1), edit("V", double, block=2)),
    "weights": lambda live, run: (zero("W_O", 1), zero("W_UV", 0), patch("x_n", 1, source=live, T=3)),
    "parts of a weight": lambda live, run: (zero("W_UK", 1, h=1), zero("W_UK", 1, h=2), zero("c_KV_hat", 1, T=2)),
    "the head": lambda live, run: (
        zero("x_n", 2, T=1),
        scale("s_final", factor=2.0),
        add("logits", direction=randn(40)),
    ),
}


@both
@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["blocks.2.x_next", "blocks.2.experts"], "read": READ}])
def test_cells_of_several_edits(asked: dict[str, Any], kind: str, reference: dict[str, Run]) -> None:
    live = source()
    cells = [Cell(make(live, reference[kind]), label) for label, make in SEVERAL.items()]
    _, outcomes = agree(MODELS[kind], Ask(base(), cells, [live], want=["logits", "blocks.1.x_next"], **asked))
    assert all(outcome.worlds == 3 for outcome in outcomes)


@both
@pytest.mark.parametrize("how", ["relative noise", "function", "function on queries", "function on scores", "logits"])
def test_an_edit_that_mixes_positions_sees_them_all(how: str, kind: str) -> None:
    """Where only the last position matters, one that looks at others must still see them edited."""
    second = {
        "relative noise": noise("h_s", 2, std=1.0, relative=True),
        "function": edit("h_s", roll, block=2),
        "function on queries": edit("Q", roll, block=2),
        "function on scores": edit("S", lambda value: value.roll(1, 2), block=2),
        "logits": edit("logits", roll),
    }[how]
    agree(MODELS[kind], Ask(Live(TOKENS), [Cell((zero("x_n", 0, T=1), second)), Cell((zero("x_n", 0, T=-2),))]))


# ---- routing, slots --------------------------------------------------------------------------------------------------

ROUTERS = {
    "excluded": exclude(2, e=[1, 5], T=2),  # one of each group, so that k are left in the best
    "forced": force(2, experts=[0, 2, 5], T=3),
    "gate": zero("gates", 2, e=3),
    "gate, the others grow": zero("gates", 2, e=3, renorm=True),
    "best slot": zero("gates", 2, k=0, T=2),
    "score": set_to("choice_score", 2, value=float("-inf"), e=2),
    "logits": add("router_logits", 2, direction=torch.linspace(-2, 2, 8), T=1),
    "affinity": scale("affinity", 2, factor=0.5, e=[1, 2]),
    "expert at a place": zero("delta_experts", 2, e=2, T=3),
    "second slot": zero("y_e", 2, k=1),
    "neurons of an expert": zero("h_e", 2, e=2, m=slice(0, 8)),
}


@both
@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["blocks.2.x_next"]}])
def test_routers(asked: dict[str, Any], kind: str) -> None:
    cells = [Cell((one,), label) for label, one in ROUTERS.items()]
    cells += [Cell((zero("x_n", 1, T=1), *cell.edits), f"{cell.label} after more") for cell in cells]
    agree(MODELS[kind], Ask(base(), cells, **asked))


@both
@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["blocks.2.delta_experts", "blocks.2.x_next"]}])
def test_contributions_are_matched_by_expert_and_new_experts_join(
    asked: dict[str, Any], kind: str, reference: dict[str, Run]
) -> None:
    live, run = source(), reference[kind]
    cells = [
        Cell((patch("delta_experts", 2, source=live, **where),))
        for where in ({}, {"T": 3}, {"e": 2}, {"e": [1, 4], "T": -1}, {"T": [1, 2, 4]}, {"B": 1})
    ]
    cells += [
        Cell((resample("delta_experts", 2, source=run, seed=3, T=2),)),
        Cell((mean("delta_experts", 2, source=run, T=2),)),
        Cell((resample("gates", 2, source=run, seed=3),)),
        Cell((patch("delta_experts", 2, source=live, e=1), patch("delta_experts", 2, source=live, e=2))),
        Cell((patch("delta_experts", 2, source=live, e=1, T=2), scale("delta_experts", 2, factor=2.0, T=2))),
        Cell((zero("x_n", 1, T=1), freeze("delta_experts"))),
        Cell((patch("experts", 2, source=live, T=3),)),
        Cell((patch("experts", 2, source=live),)),
        Cell((patch("x_n", 1, source=live, T=1), patch("delta_experts", 2, source=live, T=2))),
    ]
    shown, _ = agree(MODELS[kind], Ask(base(), cells, [live], ["logits", "blocks.2.delta_experts"], **asked))
    if "whole" in asked:
        whole = shown["cell", 0, Site(2, "delta_experts")]
        assert bool(whole[KEEP][:, 3:].any()), "some expert that only the source chose has joined"


@both
def test_an_expert_without_a_match_loses_its_cell_alone(kind: str) -> None:
    live = source()
    cells = [Cell((patch("y_e", 2, source=live),)), Cell((patch("y_e", 2, source=live, T=0),)), Cell((zero("O", 1),))]
    _, outcomes = agree(MODELS[kind], Ask(base(), cells, [live]))
    assert "patch delta_experts" in str(outcomes[0].unmatched)
    assert [outcome.unmatched for outcome in outcomes[1:]] == [None, None]  # at position 0 the two runs are one


def test_a_base_without_a_match_is_an_error() -> None:
    """Its edit would be left out without a word."""
    other = MODELS["latent"].run(OTHER, KEEP, want=["blocks.2.y_e", "blocks.2.experts"])
    with pytest.raises(Unmatched, match="patch delta_experts"):
        swept(MODELS["latent"], Ask(Live(TOKENS, KEEP, edits=[patch("y_e", 2, source=other)]), [Cell(())]))


# ---- readers ---------------------------------------------------------------------------------------------------------


def readers(kind: str) -> list[Cell]:
    queries = "c_Q" if kind == "latent" else "q_C"
    live = add("x_n", 0, direction=torch.ones(40))
    return [
        Cell((zero("c_KV_hat", 1, into="k_C", T=2),)),
        Cell((zero("x_n", 1, into=("s_attn", "n_attn")),)),
        Cell((zero("x_n", 2, into="x_mid"),)),
        Cell((zero("x_attn", 1, into=queries),)),
        Cell((scale("x_mid", 1, factor=2.0, into=("s_ffn", "n_ffn"), T=3),)),
        Cell((zero("x_n", 0, into=("s_attn", "n_attn")), live)),
        Cell((zero("x_n", 1, into="s_attn"), scale("x_n", 1, factor=2.0, into="x_mid"), live)),
        Cell((zero("O", 1, into="delta_attn"),)),
        Cell((zero("gates", 2, into="delta_experts", T=1),)),
        Cell((zero("V", 1, into="O", S=2),)),
        Cell((zero("K", 1, h=1, into="S"),)),
        Cell((zero("Q", 1, h=0, into="S"),)),
        Cell((scale("S", 1, factor=2.0, into="A"),)),
        Cell((zero("A", 1, S=2, into="O"),)),
        *(Cell((zero("x_ffn", 2, into=name, T=2),)) for name in ("router_logits", "g_e", "u_e", "g_s")),
        Cell((scale("affinity", 2, factor=0.5, e=[1, 2, 3], into="choice_score"),)),
        Cell((scale("affinity", 2, factor=0.5, e=[1, 2, 3], into="gates"),)),
        Cell((force(2, experts=[0, 1, 2]),)),
    ]


@both
@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["blocks.2.x_next", "blocks.1.A"]}])
def test_readers(asked: dict[str, Any], kind: str) -> None:
    """Also what is shown of a site that some readers see edited: what those see."""
    want = ["logits", "blocks.1.x_n", "blocks.1.c_KV_hat", "blocks.2.x_ffn"]
    agree(MODELS[kind], Ask(base(), readers(kind), want=want, **asked))


def test_each_reader_sees_the_edits_that_name_it() -> None:
    """By hand: two edits of one site, for two readers."""
    model = MODELS["latent"]
    names = ["blocks.1.s_attn", "blocks.1.x_mid", "blocks.1.delta_attn", "blocks.1.x_n"]
    plain, made = (
        model.run(TOKENS, want=names, edits=edits)
        for edits in ([], [zero("x_n", 1, into="s_attn"), scale("x_n", 1, factor=2.0, into="x_mid")])
    )
    assert torch.equal(made[names[0]], torch.full_like(made[names[0]], 1e-6).rsqrt())
    torch.testing.assert_close(made[names[1]] - made[names[2]], 2 * plain[names[3]])
    shown, _ = swept(
        model,
        Ask(Live(TOKENS), [Cell(made.edits)], want=(), whole=names),
    )
    torch.testing.assert_close(shown["cell", 0, Site(1, "s_attn")], made[names[0]])
    torch.testing.assert_close(shown["cell", 0, Site(1, "x_mid")], made[names[1]])


# ---- around the blocks, weights --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "want",
    [["logits"], ["s_final", "x_final"], ["x_0"], ["n_final", "logits", "blocks.2.x_next"], ["blocks.2.x_next"]],
    ids=str,
)
@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["logits", "x_0"]}, {"read": READ}])
def test_edits_around_the_blocks(asked: dict[str, Any], want: list[str], kind: str) -> None:
    edits = [
        zero("x_0", T=0),
        zero("x_next", 2, T=-1),
        zero("x_next", 2, T=2),
        scale("s_final", factor=2.0, T=2),
        zero("n_final", d=[1, 2]),
        zero("x_final", T=-1),
        zero("logits", V=3),
        add("logits", direction=randn(40), T=-1),
    ]
    cells = [Cell((one,)) for one in edits] + [Cell((zero("x_n", 1, T=1), freeze("s_final")))]
    agree(MODELS[kind], Ask(base(), cells, want=want, **asked))


@both
@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["blocks.2.x_next", "blocks.0.O"], "read": READ}])
def test_weights(asked: dict[str, Any], kind: str) -> None:
    model = MODELS[kind]
    names = [(block, leaf.name) for block in (0, 2) for leaf in model.sites.card(block).weights]
    edits = [scale(name, block, factor=0.5) for block, name in names]
    edits += [scale("W_O", 1, factor=0.5, h=1), zero("W_2_e", 2, e=3), scale("W_E", factor=0.5), zero("W_U", V=3)]
    edits += [zero("w_final", d=[1, 2]), zero("W_E", V=[int(TOKENS[0, 2])])]
    edits += [patch("W_O", 1, source=random_weights(model.dims, 9))]
    agree(model, Ask(base(), [Cell((one,)) for one in edits], want=["logits", "blocks.1.x_n"], **asked))


# ---- bases and sources -----------------------------------------------------------------------------------------------


@both
def test_edits_of_the_base_act_in_every_cell(kind: str, reference: dict[str, Run]) -> None:
    """Also on what a cell has changed before them; and what is frozen is the edited base's."""
    edits = (
        noise("x_0", std=0.3, seed=3, T=2),
        zero("O", 1, h=1),
        add("x_n", 2, direction=torch.ones(40), T=1),
        scale("delta_ffn", 1, factor=0.5, T=-1),
        zero("x_n", 2, into=("s_attn", "n_attn"), T=3),
        knock_out(2, T=4, S=1),
    )
    live = Live(TOKENS, KEEP, read=[[1], [2], [3]])
    cells = [Cell((patch("x_n", block, source=live, T=pos),)) for block in (0, 1) for pos in (0, 2, 4)]
    cells += [
        Cell((zero("O", 0, T=1),)),
        Cell((add("O", 1, direction=torch.ones(10), h=1),)),
        Cell((zero("x_n", 1, T=2),)),
        Cell((zero("S", 1, T=3),)),
        Cell((scale("A", 2, factor=0.5, T=3),)),
        Cell((zero("delta_attn", 0, T=1), freeze("delta_ffn", 0))),
        Cell((zero("x_n", 1, T=1), freeze("Q"))),
        Cell((zero("x_n", 1, into="x_mid"),)),
    ]
    ask = Ask(Live(TOKENS, KEEP, edits=edits), cells, [live], ["logits", "blocks.1.x_next", "blocks.2.x_n"])
    agree(MODELS[kind], ask)
    agree(MODELS[kind], replace(ask, whole=["blocks.2.A", "blocks.1.S", "blocks.2.x_next"], budget=1))


@both
def test_a_base_to_which_experts_were_added(kind: str) -> None:
    model = MODELS[kind]
    other = model.run(OTHER, KEEP, want=["blocks.2.delta_experts", "blocks.2.experts"])
    edited = Live(TOKENS, KEEP, edits=[patch("delta_experts", 2, source=other)])
    cells = [Cell((zero("O", block, T=pos),)) for block in range(3) for pos in (1, -1)]
    agree(model, Ask(edited, cells, want=["logits", "blocks.2.delta_routed"], read=READ))


@both
@pytest.mark.parametrize("asked", [{}, {"budget": 1}, {"whole": ["blocks.1.x_n", "blocks.2.A"]}])
def test_sources_of_all_kinds(asked: dict[str, Any], kind: str) -> None:
    longer = Live(draw(3, 10, 7))
    one = Live(draw(1, 7, 8), read=[[2]])
    many = Live(draw(5, 8, 9), torch.tensor([[1] * 8, [1] * 6 + [0] * 2, [1] * 7 + [0], [1] * 8, [1] * 8]).bool())
    edited = Live(
        TOKENS,
        KEEP,
        edits=[noise("x_0", std=1.0, seed=1, T=1), zero("O", 1, h=0), scale("W_O", 0, factor=0.5)],
        read=[[2], [1], [3]],
    )
    behind = Live(
        torch.cat([TOKENS, draw(3, 2, 3)], 1), torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 6 + [0] * 3]) > 0
    )
    sources = {"longer": longer, "one": one, "edited": edited, "same": Live(TOKENS, KEEP), "behind": behind}
    cells = []
    for block in range(3):
        for name in ("x_n", "O", "V", "delta_ffn", "Q", "A"):
            at = {"S" if name == "V" else "T": 3}
            cells += [Cell((patch(name, block, source=live, **at),), label) for label, live in sources.items()]
            if name != "A":
                cells += [
                    Cell((patch(name, block, source=many, rows=[3, 1, 2], **dict.fromkeys(at, -2)),), "many"),
                    Cell((resample(name, block, source=many, seed=2),), "drawn"),
                ]
        cells += [
            Cell((patch("x_n", block, source=longer, source_T=8, T=3),), "from behind the base's last"),
            Cell((mean("x_n", block, source=many, T=2),), "a mean of many"),
            Cell((mean("O", block, source=longer, over="position"),), "a mean by position"),
            Cell((patch("x_n", block, source=edited, T=2), patch("delta_ffn", block, source=longer, T=4)), "two"),
        ]
    agree(MODELS[kind], Ask(base(), cells, [*sources.values(), many], ["logits", "blocks.1.x_mid"], **asked))


@both
@pytest.mark.parametrize("length", [2, 7, 9])
def test_a_source_that_its_edits_alone_tell_from_the_base(length: int, kind: str) -> None:
    """Of scores too, which have no rows of their own there; and where it ends, or its pads do, is its own affair."""
    tokens, keep = torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.bool)
    tokens[:, :7], keep[:, :7] = TOKENS, KEEP
    for edits in ([], [knock_out(1, T=1, S=0)], [zero("A", 1, h=1)], [zero("O", 1)]):
        live = Live(tokens[:, :length], keep[:, :length], edits=edits, read=[[0], [1], [1]])
        cells = [Cell((patch("A", 1, source=live, T=1, S=0),)), Cell((patch("x_mid", 1, source=live, T=1),))]
        agree(MODELS[kind], Ask(base(), cells, [live], whole=["blocks.1.A", "blocks.1.x_next"]))
        agree(MODELS[kind], Ask(base(), cells[1:], [live]))


@both
def test_the_base_may_lend_its_own_values(kind: str) -> None:
    model, live = MODELS[kind], base()
    run = model.run(TOKENS, KEEP, want=list(model.sites))
    cells, again = (
        [Cell((patch("x_n", block, source=one, source_T=1, T=3),)) for block in range(3)] for one in (live, run)
    )
    shown, _ = swept(model, Ask(live, cells))
    other, _ = agree(model, Ask(live, again))
    assert all((value - other[key]).abs().max() < 1e-5 * other[key].abs().max() for key, value in shown.items())


@both
def test_a_cell_may_replace_what_the_base_s_edits_made(kind: str) -> None:
    """What a denoising patch does; a run of both edits would be refused. By hand: as if the base's had not been."""
    model, other = MODELS[kind], MODELS[kind].run(OTHER, KEEP, want=["blocks.1.O"])
    restored = Cell((patch("O", 1, source=other),))
    shown, _ = swept(model, Ask(Live(TOKENS, KEEP, edits=[zero("O", 1, h=1)]), [restored]))
    plain, _ = swept(model, Ask(base(), [restored]))
    close(shown["cell", 0, LOGITS], plain["cell", 0, LOGITS])
    assert float((shown["base", 0, LOGITS] - plain["base", 0, LOGITS]).abs().max()) > 0.01


@both
def test_a_source_is_read_where_it_is_one_with_the_base(kind: str) -> None:
    shorter = Live(TOKENS[:, :4], read=[[3], [0, 2], [1]])
    longer = Live(torch.cat([TOKENS[:1], draw(1, 3, 8)], 1), read=[[2, 8]])
    agree(MODELS[kind], Ask(Live(TOKENS), [Cell((zero("O", 1),))], [shorter], read=[[6]] * 3))
    agree(MODELS[kind], Ask(Live(TOKENS[:1]), [], [longer]))


# ---- spans, answers behind the prompt, dictionaries, functions -------------------------------------------------------


@both
def test_spans_and_answers_behind_the_prompt(kind: str, reference: dict[str, Run]) -> None:
    """Named positions count the prompt's own tokens; edits that name none act on the answer too."""
    spans = [{"subject": [1, 2]}, {"subject": [0, 1]}, {"subject": [2, 3]}]
    live = Live(draw(3, 8, 5), None, [{"subject": [3, 4]}] * 3)
    cells = [Cell((patch("x_n", block, source=live, T=at),)) for block in range(3) for at in ("subject", "subject[-1]")]
    cells += [
        Cell((zero("O", 1, T=-1),)),
        Cell((zero("O", 1),)),
        Cell((zero("V", 1, S="subject"),)),
        Cell((knock_out(1, T=-1, S="subject"),)),
        Cell((mean("x_n", 1, source=reference[kind], T="subject"),)),
    ]
    ask = Ask(Live(TOKENS, KEEP, spans, spoken=[5, 4, 5]), cells, [live])
    agree(MODELS[kind], ask)
    agree(MODELS[kind], replace(ask, read=[[4, 5, 6], [3], [4, 5]]))


def dictionary(width: int, seed: int = 0) -> Dictionary:
    return Dictionary(
        randn(width, 9, seed=seed), randn(9, seed=seed + 1), randn(9, width, seed=2), randn(width, seed=3)
    )


@both
@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_dictionaries_and_subspaces(budget: int, kind: str, reference: dict[str, Run]) -> None:
    stream, heads, live, run = dictionary(40), dictionary(10, 5), source(), reference[kind]
    cells = [
        Cell((splice("x_n", 1, dictionary=stream),)),
        Cell((zero("x_n", 1, through=stream, feature=[1, 2], T=2),)),
        Cell((patch("x_n", 1, source=live, through=stream, feature=3, T=2),)),
        Cell((add("O", 1, direction=torch.ones(9), through=heads, T=3),)),
        Cell((mean("x_mid", 2, source=run, through=stream, feature=1),)),
        Cell((patch("x_n", 1, source=live, within=randn(2, 40), T=2),)),
        Cell((resample("x_n", 2, source=run, within=randn(2, 40), seed=2),)),
    ]
    _, outcomes = agree(MODELS[kind], Ask(base(), cells, [live], budget=budget))
    assert outcomes[0].worlds == 0, "an untouched splice changes nothing"


def test_functions() -> None:
    def in_place(value: Tensor) -> Tensor:
        value[:, 2] = 0
        return value

    edits = [
        edit("x_n", roll, block=1, T=2),
        edit("O", in_place, block=1),
        edit("x_n", double, block=2, position_wise=True, T=-1),
        edit("gates", lambda value: value.flip(-1), block=2),
        edit("logits", lambda value: value + 1, T=-1),
        edit("x_0", lambda value: None),
        edit("A", lambda value: value.flip(1), block=1),
    ]
    cells = [Cell((one,)) for one in edits]
    agree(MODELS["latent"], Ask(Live(TOKENS), cells, want=["logits", "blocks.1.x_next"]))


# ---- a block alone, few rows -----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("whole", [(), ("A", "x_next")])
@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_a_block_alone(budget: int, whole: tuple[str, ...], block: int, kind: str) -> None:
    model = MODELS[kind]
    streams = [model.run(tokens, KEEP, want=["blocks.*.x_n"])["x_n", block] for tokens in (TOKENS, OTHER)]
    first, live = (Live(None, KEEP, x_n=x) for x in streams)
    cells = [
        Cell((patch(name, block, source=live, **{"S" if name in "KV" else "T": pos}),))
        for name in ("x_n", "O", "Q", "K", "V", "x_mid", "delta_ffn")
        for pos in range(4)
    ]
    cells += [
        Cell((knock_out(block, T=3, S=1),)),
        Cell((zero("x_next", block, T=-1),)),
        Cell((zero("O", block), freeze("s_ffn", block))),
        Cell((scale("W_O", block, factor=0.5),)),
    ]
    sites = [f"blocks.{block}.{name}" for name in whole]
    ask = Ask(first, cells, [live], [f"blocks.{block}.delta_ffn"], sites, READ, first=block, budget=budget)
    agree(model, ask)


@both
def test_one_prompt_one_token_no_cell(kind: str) -> None:
    agree(MODELS[kind], Ask(base(), []))
    agree(MODELS[kind], Ask(Live(TOKENS[:1]), [Cell((zero("O", 1, T=0),)), Cell(())]))
    agree(MODELS[kind], Ask(Live(TOKENS[:1, :1]), [Cell((zero("O", 1, T=0),)), Cell((zero("x_0"),))]))


@both
def test_equal_prompts_and_many_of_them(kind: str) -> None:
    tokens = TOKENS.repeat(7, 1)
    cells = [Cell((zero("x_n", block, T=pos),)) for block in range(3) for pos in range(7)]
    agree(MODELS[kind], Ask(Live(tokens), cells, read=[[pos] for pos in torch.arange(21).remainder(7).tolist()]))
