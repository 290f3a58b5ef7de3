"""Pictures: they say what they show, put zero in the middle, survive NaN and nothing, and draw the whole card."""

from itertools import combinations, pairwise

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.mathtext import MathTextParser
from matplotlib.patches import FancyBboxPatch, PathPatch

from experiments import frames, plots
from experiments.diagram import block_diagram, layout
from experiments.frames import BadFrame
from probe.blocks import around, card

CARDS = [card(moe=moe, query_latent=latent) for moe in (False, True) for latent in (True, False)]
TOKENS = ["<bos>", "Mary", "$x$", "gave", "John"]


@pytest.fixture(autouse=True)
def _no_figures_left():
    yield
    plt.close("all")


def rows(**more):
    """By block and tensor: effects −2, −1, 0, 1 …; some equal by construction."""
    same = {"V": "O", "v": "V", "A": "O"}
    return [
        {"model": "tiny", "prompts": "ioi", "block": block, "tensor": tensor, "edit": "zero", "metric": "logit_diff"}
        | {"unit": "logits", "value": 9.0, "base": 10.0, "effect": i - 2.0 - block, "n": 8, "same_as": same.get(tensor)}
        | more
        for block in (0, 1, 10)
        for i, tensor in enumerate(("A", "O", "v", "V", "x_next"))
    ]


def by_position(tensors=("O",), examples=(0,), metric="logit_diff", **more):
    return [
        {"model": "tiny", "prompts": "ioi", "block": block, "tensor": tensor, "metric": metric, "unit": "logits"}
        | {"pos": pos, "token": token, "example": example, "value": 2.0**block * (50 if pos == 0 else 1 + pos)}
        | more
        for block in (0, 1)
        for tensor in tensors
        for example in examples
        for pos, token in enumerate(TOKENS)
    ]


def frame(rows):
    return frames.frame(rows, study="test")


def words(ax: Axes) -> str:
    texts = [ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel(), *(t.get_text() for t in ax.texts)]
    others = [a for a in ax.figure.axes if a is not ax] + list(ax.child_axes)
    texts += [text for a in others for text in (a.get_xlabel(), a.get_ylabel())]
    return "\n".join(texts)


def struck(ax: Axes, hatch: str) -> set[tuple[int, int]]:
    """Column and row of the cells that are hatched so."""
    marks = [p for p in ax.patches if isinstance(p, PathPatch) and p.get_hatch() == hatch]
    runs = [run for mark in marks for run in mark.get_path().vertices.reshape(-1, 5, 2)]  # corners, round and closed
    return {
        (round(column), round(run[0, 1] + 0.5))
        for run in runs
        for column in np.arange(run[:, 0].min(), run[:, 0].max()) + 0.5
    }


# ---------------------------------------------------------------- heat maps


def test_heatmap_draws_on_the_axes_it_is_given_and_labels_from_card_and_metric():
    _, given = plt.subplots()
    ax = plots.heatmap(frame(rows()), given)
    assert ax is given
    ax.figure.draw_without_rendering()
    assert [t.get_text() for t in ax.get_yticklabels()] == [plots.symbol(n) for n in ("v", "V", "A", "O", "x_next")]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "1", "10"]
    assert "change of logit diff [logits]" in words(ax)
    assert "Zero: change of logit diff from 10.0, n = 8" in words(ax)


def test_signed_data_is_symmetric_about_a_pale_zero():
    image = plots.heatmap(frame(rows())).images[0]
    assert image.get_clim() == (-12.0, 12.0)
    assert min(image.cmap(image.norm(0.0))[:3]) > 0.95
    red, _, blue = to_rgb(image.cmap(image.norm(-12.0)))
    assert red > blue
    assert plots.heatmap(frame(rows(effect=2.0))).images[0].get_clim() == (0.0, 2.0)
    assert plots.heatmap(frame(rows(effect=0.0))).images[0].get_clim() == (0.0, 1.0)
    assert plots.heatmap(frame(rows()), limit=3).images[0].get_clim() == (-3, 3)


def test_nan_spoils_no_limit_and_is_told_from_what_was_not_measured():
    data = rows()
    data[0]["effect"] = float("nan")
    data[1]["effect"] = float("inf")
    del data[7]
    ax = plots.heatmap(frame(data))
    assert ax.images[0].get_clim() == (-12.0, 12.0)
    assert struck(ax, plots.CROSSED) == {(0, 2), (0, 3)}  # A and O of block 0
    grid = ax.images[0].get_array()
    assert np.isnan(np.ma.filled(grid, np.nan)[0, 1])  # v of block 1 has no row: the ground shows
    assert to_rgb(ax.get_facecolor()) == to_rgb(plots.UNMEASURED)
    assert "grey: not measured · crossed: no value" in words(ax)


def test_cells_equal_by_construction_share_a_disc():
    ax = plots.heatmap(frame(rows()))
    discs = [t.get_text() for t in ax.texts if t.get_bbox_patch() is not None]
    assert discs == ["1"] * 4  # v → V → O and A → O, once a row since so in every block; x_next stands alone
    assert "alike discs: equal in a column by construction" in words(ax)
    data = rows()
    data[0]["same_as"] = None  # A of block 0: now its row says it cell by cell
    ax = plots.heatmap(frame(data))
    assert [t.get_text() for t in ax.texts if t.get_bbox_patch() is not None] == ["1"] * (3 + 2)
    assert not plots.coincide(plots.cells(frame(rows(same_as=None)), ("tensor", "block")).table)


def test_a_group_of_equal_cells_keeps_its_number_from_block_to_block():
    more = [row | {"tensor": "x_n", "same_as": "x_next"} for row in rows() if row["tensor"] == "x_next"]
    more[1] |= {"tensor": "x_mid"}  # another representative in block 1: x_mid, and x_next as it
    table = plots.cells(frame([*rows(), *more]), ("tensor", "block")).table
    found = {(table.loc[i, "tensor"], table.loc[i, "block"]): n for i, n in plots.coincide(table).items()}
    residual = {("x_n", 0): 1, ("x_mid", 1): 1, ("x_n", 10): 1} | {("x_next", block): 1 for block in (0, 1, 10)}
    assert found == residual | {(name, block): 2 for name in ("v", "V", "A", "O") for block in (0, 1, 10)}


def test_tokens_label_positions_even_if_they_look_like_mathematics():
    ax = plots.heatmap(frame(by_position()), y="block", x="pos")
    ax.figure.draw_without_rendering()
    assert [t.get_text() for t in ax.get_xticklabels()] == TOKENS
    assert not any(t.get_parse_math() for t in ax.get_xticklabels())


def test_prompts_are_averaged_and_nothing_else():
    two = frame(by_position(examples=(0, 1)))
    np.testing.assert_allclose(plots.heatmap(two, y="block", x="pos").images[0].get_array()[1], [100, 4, 6, 8, 10])
    with pytest.raises(BadFrame, match="rows of one cell differ in 'pos'"):
        plots.heatmap(two)
    with pytest.raises(BadFrame, match="differ in 'tensor'"):
        plots.heatmap(frame(by_position(("O", "A"))), y="block", x="pos")
    with pytest.raises(BadFrame, match="different length"):
        plots.heatmap(two[~((two["example"] == 1) & (two["pos"] == 4))], y="block", x="pos")
    swapped = two.assign(role="IO")
    swapped.loc[(swapped["example"] == 1) & (swapped["pos"] == 1), "token"] = "Bob"
    labels = [t.get_text() for t in plots.heatmap(swapped, y="block", x="pos").get_xticklabels()]
    assert labels == ["<bos>", "IO", *TOKENS[2:]]
    swapped.loc[(swapped["example"] == 1) & (swapped["pos"] == 1), "role"] = "S1"
    with pytest.raises(BadFrame, match="position 1 has roles IO, S1"):
        plots.heatmap(swapped, y="block", x="pos")


def test_roles_make_an_axis_where_each_prompt_has_one_place_for_each():
    two = frame(by_position(examples=(0, 1))).assign(role=pd.NA)
    for example, places in ((0, {1: "IO", 4: "END"}), (1, {2: "IO", 3: "END"})):
        for pos, role in places.items():
            two.loc[(two["example"] == example) & (two["pos"] == pos), "role"] = role
    named = two[two["role"].notna()]
    image = plots.heatmap(named, y="block", x="role").images[0]
    np.testing.assert_allclose(image.get_array()[0], [2.5, 4.5])  # IO at 1 and 2, END at 4 and 3: as they come
    with pytest.raises(BadFrame, match="several rows of one prompt in a cell by block, role"):
        plots.heatmap(two, y="block", x="role")
    with pytest.raises(BadFrame, match="differ in 'role'"):
        plots.heatmap(named.drop(columns="pos"))


def test_a_choice_that_must_be_made_is_asked_for():
    two = frames.join(frame(rows()), frame(rows(metric="kl")))
    with pytest.raises(BadFrame, match=r"2 metrics; choose one with metric=: logit_diff, kl"):
        plots.heatmap(two)
    assert plots.heatmap(two, metric="kl").images
    with pytest.raises(BadFrame, match="no metric 'klm'; it has logit_diff, kl"):
        plots.heatmap(two, metric="klm")
    for wrong, message in (
        ({"value": "efect"}, "no column 'efect'. Nearest: effect"),
        ({"value": "unit"}, "'unit' is its unit"),
        ({"x": "head"}, "no column 'head'"),
        ({"x": "unit"}, "no axis for 'unit'"),
        ({"x": "tensor"}, "both axes show 'tensor'"),
    ):
        with pytest.raises(BadFrame, match=message):
            plots.heatmap(frame(rows()), **wrong)


def test_a_distance_is_called_by_its_name_and_the_noise_floor_is_shown():
    ax = plots.heatmap(frame(rows(metric="kl", unit="nats", base=0.0, effect=0.2, noise_floor=0.05)))
    assert "\nkl\n[nats]" in words(ax)  # beside a short figure, on two lines
    assert "noise floor" in words(ax)


def test_cells_below_the_noise_floor_are_hatched():
    data = rows()
    for row in data:
        row["noise_floor"] = {0: 1.5, 1: float("nan"), 10: 100.0}[row["block"]]
    data[0]["effect"] = float("nan")
    ax = plots.heatmap(frame(data))
    down = [t.get_text() for t in ax.get_yticklabels()]
    named = {(block, down[row]) for block, row in struck(ax, plots.HATCHED)}
    quiet = {plots.symbol(name) for name in ("O", "v", "V")}  # effects -1, 0, 1; A has none, x_next 2
    assert {name for block, name in named if block == 0} == quiet
    assert not any(block == 1 for block, _ in named), "where no floor was measured nothing is hatched"
    assert len([1 for block, _ in named if block == 2]) == 5
    assert "crossed: no value · hatched: below the noise floor" in words(ax)
    assert struck(ax, plots.CROSSED) == {(0, 2)}
    assert not struck(plots.heatmap(frame(rows())), plots.HATCHED)
    boxes = fills(block_diagram(CARDS[0], frame(data), block=0))
    assert {name for name, box in boxes.items() if box.get_hatch() == plots.HATCHED} == {"O", "v", "V"}


def test_what_was_recovered_is_drawn_and_never_averaged_over_prompts():
    """A mean of ratios is ruled by the pairs whose gap happens to be small."""
    ax = plots.heatmap(frame(rows(recovered=0.5, direction="noise", noise_floor=3.0)))
    assert set(ax.images[0].get_array().flatten()) == {0.5}
    assert words(ax).startswith("Zero, noise: logit diff recovered, n = 8\n"), "no base: 1 is all of it"
    assert "[logits]" not in words(ax)
    assert "grey band" not in words(ax), "the floor is in the metric's own unit"
    assert struck(ax, plots.HATCHED), "and cells are hatched by their effects"
    each = frame([row | {"example": example} for example in (0, 1) for row in rows(recovered=example)])
    assert set(plots.heatmap(each).images[0].get_array().flatten()) == {row["effect"] for row in rows()}
    with pytest.raises(BadFrame, match="a mean of what prompts recover says nothing"):
        plots.heatmap(each, value="recovered")
    image = plots.heatmap(each[each["block"] == 0], y="tensor", x="example").images[0]
    np.testing.assert_allclose(image.get_array(), [[0, 1]] * 5)


@pytest.mark.parametrize("make", [plots.heatmap, plots.norms, lambda df: block_diagram(CARDS[0], df)])
def test_a_frame_without_rows_draws_something_honest(make):
    ax = make(frame([]))
    ax.figure.draw_without_rendering()
    assert "no rows" in words(ax) or "not measured" in words(ax)


def test_all_nan_draws():
    nan = float("nan")
    for ax in (plots.heatmap(frame(rows(effect=nan, value=nan))), block_diagram(CARDS[0], {"O": nan})):
        ax.figure.draw_without_rendering()
        assert "crossed: no value" in words(ax)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (-3.214, "−3.21"), (0.004, "4e−3"), (-12.345, "−12.3"), (123.4, "123"), (1.2e6, "1e6"), (np.nan, "")],
)
def test_short_numbers(number, text):
    assert plots.short(number) == text


# ---------------------------------------------------------------- norms


def residual():
    return frame(by_position(("x_n", "x_mid", "x_next", "O"), (0, 1, 2), metric="rms"))


def test_norms_draw_position_0_apart_on_a_log_axis():
    _, given = plt.subplots()
    ax = plots.norms(residual(), given)
    assert ax is given
    assert ax.get_yscale() == "log"
    assert ax.get_ylabel() == "rms [logits]"
    lines = {line.get_label().split(":")[0]: line.get_ydata() for line in ax.get_lines()}
    np.testing.assert_allclose(lines["position 0 (<bos>)"], [50, 50, 75, 100, 100])  # x_next of 0 meets x_n of 1
    np.testing.assert_allclose(lines["other positions"][:2], [3.5, 3.5])
    ax.figure.draw_without_rendering()
    symbols = [plots.mathtext(s) for s in ("x_{0}", "x'_{0}", "x_{1}")]
    assert [t.get_text() for t in ax.get_xticklabels()][:3] == symbols


def test_norms_count_what_a_log_axis_cannot_show():
    df = residual()
    df.loc[df["tensor"] == "x_mid", "value"] = 0.0
    assert "30 sizes are 0 or missing" in words(plots.norms(df))


def test_norms_ask_for_what_they_need():
    with pytest.raises(BadFrame, match="no metric 'l2'; it has rms"):
        plots.norms(residual(), metric="l2")
    with pytest.raises(BadFrame, match="rows by position"):
        plots.norms(residual().drop(columns="pos"))


# ---------------------------------------------------------------- the card as a picture


def test_matplotlib_can_set_every_symbol_and_formula_of_the_cards():
    parse = MathTextParser("path").parse
    nodes = [c.node(name) for c in (*CARDS, around()) for name in (*c, *c.leaves)]
    for latex in {node.symbol for node in nodes} | {getattr(node, "formula", "x") for node in nodes}:
        assert parse(plots.mathtext(latex)).width > 0, latex
    assert plots.mathtext("x'^2_n") == r"$x^{\prime 2}_n$"  # Matplotlib takes one superscript only


@pytest.mark.parametrize("c", CARDS, ids=lambda c: c.kind)
def test_layout_has_a_box_a_tensor_and_an_arrow_a_dependency(c):
    plan = layout(c)
    assert set(plan.boxes) == set(c.hooked)
    wanted = {(need, row.name) for row in c.values() for need in row.needs if need in plan.boxes or need in ("R", "M")}
    assert {(w.source, w.reader) for w in plan.wires} == wanted
    assert len(plan.wires) == len(wanted)
    assert plan.spine == ("x_n", "x_mid", "x_next")


@pytest.mark.parametrize("c", CARDS, ids=lambda c: c.kind)
def test_boxes_keep_apart_and_arrows_run_around_them(c):
    plan = layout(c)
    boxes = {**plan.boxes, **plan.inputs}
    for a, b in combinations(boxes.values(), 2):
        apart = max(abs(a.x - b.x) - (a.width + b.width) / 2, abs(a.y - b.y) - (a.height + b.height) / 2)
        assert apart > 0.05, (a.name, b.name)
        assert a.x - a.width / 2 > 0
        assert a.x + a.width / 2 < plan.width
    for wire in plan.wires:
        for p, q in pairwise(wire.way):
            for name in set(boxes) - {wire.source, wire.reader}:
                assert not boxes[name].meets(p, q), (wire.source, wire.reader, name)
        assert boxes[wire.reader].y <= boxes[wire.source].y, "arrows run down or level"


def fills(ax):
    return {p.get_gid(): p for p in ax.patches if isinstance(p, FancyBboxPatch) and p.get_gid()}


@pytest.mark.parametrize("c", CARDS[::2], ids=lambda c: c.kind)
def test_diagram_draws_each_tensor_once_and_fills_what_was_measured(c):
    ax = block_diagram(c, {name: -3.0 for name in c.hooked if name not in ("delta_heads", "experts")} | {"O": 12.34})
    boxes = fills(ax)
    assert set(boxes) == set(c.hooked)
    assert boxes["delta_heads"].get_facecolor()[:3] == to_rgb(plots.UNMEASURED)
    assert boxes["O"].get_facecolor()[2] > boxes["O"].get_facecolor()[0]  # above zero: blue
    assert boxes["V"].get_facecolor()[0] > boxes["V"].get_facecolor()[2]  # below: red
    texts = [t.get_text() for t in ax.texts]
    assert "12.3" in texts
    assert all(texts.count(plots.symbol(name)) == 1 for name in c.hooked)
    assert ax.figure.get_figwidth() < 9.5  # notebook width
    assert min(t.get_fontsize() for t in ax.texts) >= 8


def test_texts_stay_inside_their_boxes():
    ax = block_diagram(CARDS[2], dict.fromkeys(CARDS[2].hooked, -88.8))
    ax.figure.draw_without_rendering()
    texts = [t.get_window_extent() for t in ax.texts]
    for name, box in fills(ax).items():
        frame = box.get_window_extent()
        inside = [t for t in texts if frame.contains((t.x0 + t.x1) / 2, (t.y0 + t.y1) / 2)]
        assert len(inside) == 2, name
        for text in inside:
            assert text.x0 > frame.x0, name
            assert text.x1 < frame.x1, name
        left, right = sorted(inside, key=lambda t: t.x0)
        assert left.x1 < right.x0 + 1, name


def test_diagram_from_a_frame_takes_one_block_and_draws_equal_cells_alike():
    df = frame(rows())
    with pytest.raises(BadFrame, match=r"blocks 0, 1, 10: choose one with block="):
        block_diagram(CARDS[0], df)
    with pytest.raises(BadFrame, match="no block 7; it has 0, 1, 10"):
        block_diagram(CARDS[0], df, block=7)
    _, given = plt.subplots(figsize=(9, 9))
    ax = block_diagram(CARDS[0], df, given, block=1)
    assert ax is given
    boxes = fills(ax)
    assert len({boxes[name].get_edgecolor() for name in ("A", "O", "v", "V")}) == 1
    assert boxes["O"].get_edgecolor() != boxes["x_next"].get_edgecolor()
    assert "Block 1 (dense): zero each tensor" in words(ax)
    assert "change of logit diff [logits]" in words(ax)
    assert "equal by construction" in words(ax)


def test_diagram_refuses_a_tensor_of_the_other_card_and_a_card_without_a_block():
    with pytest.raises(BadFrame, match="h_e is no tensor of a dense block"):
        block_diagram(CARDS[0], {"h_e": 1.0})
    with pytest.raises(BadFrame, match="draws a block; the model card"):
        block_diagram(around())


def test_bare_diagram_shows_step_numbers():
    ax = block_diagram(CARDS[0])
    numbers = {t.get_text() for t in ax.texts if t.get_text().isdigit()}
    assert numbers == {str(i) for i in range(1, 29)}
    assert not ax.child_axes
