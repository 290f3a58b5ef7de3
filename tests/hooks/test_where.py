"""Named positions: those of a prompt, where an answer stands behind it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hooks import Cache, patch, zero
from hooks.where import Rows, where_of
from probe.errors import BadEdit, OutOfRange
from tests.hooks.small import MODEL, SIDES, TOKENS, B, T, close, padded, ragged

SPOKEN = (4, 2, 5)
LENGTHS = [6, 4, 5]
SPANS = tuple({"first": [0], "END": [n - 1]} for n in SPOKEN)


def place(index: Any) -> Any:
    ((_, made),) = where_of({"T": index})
    return made


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("index", "named"),
    [
        (-1, [[3], [1], [4]]),
        ([0, -1], [[0, 3], [0, 1], [0, 4]]),
        (slice(1, None), [[1, 2, 3], [1], [1, 2, 3, 4]]),
        (slice(None), [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3, 4]]),
        (1, [[1], [1], [1]]),
        ("END", [[3], [1], [4]]),
        ("END[-1]", [[3], [1], [4]]),
    ],
)
def test_named_positions_count_what_is_spoken(index: Any, named: list[list[int]], side: str) -> None:
    _, keep = padded(ragged(TOKENS, LENGTHS), side)
    rows = Rows(keep, B, T, SPANS, spoken=SPOKEN)
    assert [rows.positions(b, place(index), "T") for b in range(B)] == named
    mask = rows.mask(place(index), "T")
    for b, some in enumerate(named):
        assert mask[b].nonzero()[:, 0].tolist() == [rows.first[b] + i for i in some]
    assert torch.equal(rows.mask(None, "T"), keep.bool())  # what names nothing means all that is real
    assert rows.positions(0, None, "T") == list(range(6))


def test_all_of_a_mask_is_meant() -> None:
    _, keep = padded(ragged(TOKENS, LENGTHS), "right")
    assert torch.equal(Rows(keep, B, T, spoken=SPOKEN).mask(place(keep.bool()), "T"), keep.bool())


@pytest.mark.parametrize(("index", "says"), [(4, "row 0 .* has 4"), (2, "row 1 .* has 2"), (-3, "row 1 .* has 2")])
def test_what_is_not_spoken_has_no_name(index: int, says: str) -> None:
    rows = Rows(padded(ragged(TOKENS, LENGTHS), "right")[1], B, T, spoken=SPOKEN)
    with pytest.raises(OutOfRange, match=says):
        rows.mask(place(index), "T")
    late = Rows(None, 1, 6, ({"late": [4]},), spoken=(4,))
    with pytest.raises(OutOfRange, match=r"row 0 .* has 4"):
        late.mask("late", "T")


@pytest.mark.parametrize(
    ("spoken", "error", "says"),
    [
        ((6, 4), BadEdit, "spoken counts the tokens of 2 rows; there are 3"),
        ((6, 5, 5), OutOfRange, "row 1 has 4 real tokens, so 5"),
        ((0, 4, 5), OutOfRange, "row 0 has 6 real tokens, so 0"),
    ],
)
def test_more_than_there_is_cannot_be_spoken(spoken: tuple[int, ...], error: type[Exception], says: str) -> None:
    tokens, keep = padded(ragged(TOKENS, LENGTHS), "right")
    with pytest.raises(error, match=says):
        MODEL.run(tokens, keep, spoken=spoken)


def test_an_edit_at_the_prompts_end_before_an_answer(tmp_path: Path) -> None:
    """In a run, from a source that is a run or a saved cache, and in a block alone."""
    tokens, keep = padded(ragged(TOKENS, LENGTHS), "right")
    source, all_spoken = (MODEL.run((tokens + 7) % 50, keep, want=None, spoken=some) for some in (SPOKEN, None))
    source.cache.save(tmp_path / "cache.safetensors")
    saved = Cache.load(tmp_path / "cache.safetensors")
    base = MODEL.run(tokens, keep, want=None, spoken=SPOKEN)
    named = list(enumerate(n - 1 for n in SPOKEN))
    taken = [patch("O", 1, source=source, B=b, T=0, source_T=t) for b, t in named]
    wrongly = MODEL.run(tokens, keep, edits=[patch("O", 1, source=all_spoken, T=0, source_T=-1)])["logits"]
    for edit, at in (
        (zero("O", 1, T=-1), [zero("O", 1, B=b, T=t) for b, t in named]),
        (zero("A", 1, S=-1), [zero("A", 1, B=b, S=t) for b, t in named]),
        (patch("O", 1, source=source, T=0, source_T=-1), taken),
        (patch("O", 1, source=saved, T=0, source_T=-1), taken),
    ):
        made = MODEL.run(tokens, keep, edits=[edit], spoken=SPOKEN)["logits"]
        assert torch.equal(made, MODEL.run(tokens, keep, edits=at)["logits"])
        plain = wrongly if at is taken else MODEL.run(tokens, keep, edits=[edit])["logits"]
        assert not torch.equal(made, plain)
        alone = MODEL.run_block(1, base, edits=[edit])["x_next"]
        assert torch.equal(alone, MODEL.run_block(1, base, edits=at)["x_next"])


def test_a_span_in_decoding() -> None:
    tokens, keep = padded(ragged(), "right")
    spans = [{"who": [0, 2]}, {"who": [1]}, {"who": [3]}]
    for use in ({}, {"when": "prompt"}):
        edits = [zero("O", 0, T="who"), zero("g_e", 1, T="who")]
        made = MODEL.generate(tokens, keep, n=4, edits=edits, spans=spans, **use)  # type: ignore[arg-type]
        for b, row in enumerate(ragged()):
            alone = [zero("O", 0, T=spans[b]["who"]), zero("g_e", 1, T=spans[b]["who"])]
            close(made.logits[b], MODEL.generate(row[None], n=4, edits=alone).logits[0], 1e-4)
    with pytest.raises(BadEdit, match="row 0 has no span 'who'"):
        MODEL.generate(tokens, keep, n=1, edits=[zero("O", 0, T="who")])
