"""Position ids of the user's own, and texts packed in one row: against transformers, tensor by tensor, given the same
position ids and a mask over pairs; and each text against itself alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from probe import Decoder, Site
from probe.errors import BadText, OutOfRange, ProbeError, ShapeMismatch
from probe.numerics import causal_mask, position_ids, rotation
from tests.oracle import by_expert, draw, padding
from tests.probe.test_oracle import RELATIVE, close, compare, oracle

FAR = torch.tensor(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [7, 90, 91, 4000, 4001, 4095, 4096, 60000, 131071],
        [131000, 131001, 131002, 131003, 131010, 131011, 131012, 131013, 131014],
    ]
)
"""As ever; with gaps, to the last position of K2; and nothing but far."""

TEXTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [3, 3, -1, -1, -1, -1, 8, 8, 8], [5] * 9])
"""Two texts in a row, three, one; ids of any kind."""

FAR_TEXTS = torch.tensor([[9, 10, 40, 41, 0, 5, 6, 7, 8], [0, 3, 2, 9, 10, 11, 4096, 4097, 9000], [*range(3, 12)]])
"""Positions that rise within each text of `TEXTS`."""

LEFT, RIGHT = padding([9, 6, 2], "left"), padding([9, 6, 2], "right")

PLACES: dict[str, tuple[Tensor | None, Tensor | None, Tensor | None]] = {
    "far": (None, FAR, None),
    "far, left": (LEFT, FAR.masked_fill(~LEFT, -5), None),
    "far, right": (RIGHT, FAR.masked_fill(~RIGHT, 1 << 40), None),
    "packed": (None, None, TEXTS),
    "packed, left": (LEFT, None, TEXTS.masked_fill(~LEFT, 8)),
    "packed, right": (RIGHT, None, TEXTS.masked_fill(~RIGHT, 3)),
    "packed and far": (None, FAR_TEXTS, TEXTS),
    "packed and far, left": (LEFT, FAR_TEXTS, TEXTS.int()),
    "packed and far, right": (RIGHT, FAR_TEXTS.int(), TEXTS),
}
"""Mask, positions and segments; pads hold what no real token could."""

VARIANTS = [
    "kimi",
    "no-yarn",
    "yarn-short",
    "mscale-below-all-dim",
    "no-query-latent",
    "groups-negative-bias",
    "all-dense",
    "all-moe",
]


def counted(keep: Tensor | None, segments: Tensor) -> Tensor:
    """Position ids of packed rows by counting, token by token."""
    ids = torch.zeros_like(segments)
    for b, row in enumerate(segments.tolist()):
        seen: dict[int, int] = {}
        for t, text in enumerate(row):
            if keep is None or keep[b, t]:
                ids[b, t] = seen.get(text, 0)
                seen[text] = seen.get(text, 0) + 1
    return ids


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_transformers_own(variant: str, places: str) -> None:
    keep, positions, segments = PLACES[places]
    theirs, ours = oracle(variant)
    told = counted(keep, segments) if positions is None and segments is not None else positions
    tokens, shown = draw(theirs, 3, 9, keep, positions=told, segments=segments)
    made = ours.run(tokens, keep, want=list(ours.sites), positions=positions, segments=segments)
    assert compare(shown, ours, made).keys() == set(shown.values)
    M = causal_mask(keep, 9, torch.float32, segments=segments).expand(3, 1, 9, 9)[:, 0]
    assert torch.equal((M == 0) & shown.real[..., None], shown.seen)
    if told is not None:
        for ours_, theirs_ in zip(rotation(told, shown.dims, torch.float32), shown.R, strict=True):
            torch.testing.assert_close(ours_[shown.real], theirs_[shown.real], rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_where_tokens_stand_matters(variant: str) -> None:
    """Far beyond the tolerance: what was compared above could not have passed at other positions, or unpacked."""
    _, ours = oracle(variant)
    tokens = torch.randint(0, ours.dims.V, (3, 9), generator=torch.Generator().manual_seed(3))
    plain, far = ours(tokens), ours.run(tokens, positions=FAR)[Site(None, "logits")]
    packed = ours.run(tokens, segments=TEXTS)[Site(None, "logits")]
    close(torch.stack([far[0], packed[2]]), plain[[0, 2]], torch.ones(2, 9, dtype=torch.bool), "these stand as ever")
    for moved in (far[1] - plain[1], packed[0, 4:] - plain[0, 4:]):
        assert float(moved.abs().max()) > 1e-2
    shifted = ours.run(tokens, positions=(torch.arange(9) + 1000).expand(3, 9))[Site(None, "logits")]
    assert float((shifted - plain).abs().max()) < 1e-2, "a shift of all positions drops out of the scores"


# ---- packed rows: each text as if it were alone ---------------------------------------------------------------------


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("variant", ["kimi", "no-query-latent", "groups-negative-bias", "all-dense"])
def test_each_text_of_a_packed_row_is_the_text_alone(variant: str, far: bool, side: str | None) -> None:
    theirs, ours = oracle(variant)
    keep = {None: None, "left": LEFT, "right": RIGHT}[side]
    positions = FAR_TEXTS if far else None
    tokens, shown = draw(theirs, 3, 9, keep, segments=TEXTS, positions=positions if far else counted(keep, TEXTS))
    made = ours.run(tokens, keep, want=list(ours.sites), positions=positions, segments=TEXTS)
    for b in range(3):
        for text in TEXTS[b][shown.real[b]].unique():
            at = ((TEXTS[b] == text) & shown.real[b]).nonzero()[:, 0]
            first, count = int(at[0]), len(at)
            alone = ours.run(
                tokens[b : b + 1, at],
                want=list(ours.sites),
                positions=None if positions is None else positions[b : b + 1, at],
            )
            for site in ours.sites:
                _same(ours, site, made, alone, b, first, count)


def _same(
    decoder: Decoder, site: Site, made: dict[Site, Tensor], alone: dict[Site, Tensor], b: int, first: int, n: int
) -> None:
    """A text's part of a packed row, and of scores also that it sees nobody else."""
    shape = decoder.sites.node(site).shape
    ours, theirs = made[site][b : b + 1], alone[site]
    if site.tensor == "A":
        assert not ours[:, :, first : first + n, :first].any(), "it looks at no text before"
    for axis, dim in enumerate(shape):
        if dim in ("T", "S"):
            ours = ours.narrow(axis, first, n)
    if "k" in shape:
        at = Site(site.block, "experts")
        here = made[at][b : b + 1, first : first + n]
        ours, theirs = (
            v.sort(-1).values if site == at else by_expert(v, e) for v, e in ((ours, here), (theirs, alone[at]))
        )
    size = theirs[theirs > -1e30].abs().max()
    assert float((ours.double() - theirs.double()).abs().max()) <= RELATIVE * max(1.0, float(size)), site


def test_positions_that_count_are_none() -> None:
    """Position ids that say what would have been counted give the same bits; so do segments of one text."""
    _, ours = oracle("kimi")
    tokens = torch.randint(0, ours.dims.V, (3, 9), generator=torch.Generator().manual_seed(3))
    for keep in (None, LEFT, RIGHT):
        real = torch.ones(3, 9, dtype=torch.bool) if keep is None else keep
        plain = ours.run(tokens, keep, want=list(ours.sites))
        ids = position_ids(keep, 9).expand(3, 9)
        for given in ({"positions": ids}, {"segments": torch.full((3, 9), 4)}):
            made = ours.run(tokens, keep, want=list(ours.sites), **given)
            for site, value in plain.items():
                axis = ours.sites.node(site).shape.index("T" if "T" in ours.sites.node(site).shape else "S")
                assert torch.equal(made[site].movedim(axis, 1)[real], value.movedim(axis, 1)[real]), site


def test_what_pads_hold_says_nothing() -> None:
    _, ours = oracle("kimi")
    tokens = torch.randint(0, ours.dims.V, (3, 9), generator=torch.Generator().manual_seed(3))
    for keep in (LEFT, RIGHT):
        made = [
            ours.run(tokens, keep, positions=FAR_TEXTS.masked_fill(~keep, a), segments=TEXTS.masked_fill(~keep, b))
            for a, b in ((0, 0), (-7, 3), (1 << 50, 8))
        ]
        logits = [each[Site(None, "logits")] for each in made]
        for other in logits[1:]:  # pads choose experts too, and so move the bits of a product of many rows
            close(other, logits[0], keep, "logits")
        assert all(bool(each.isfinite().all()) for each in logits)


def test_decoding_goes_on_from_a_past_at_any_positions() -> None:
    _, ours = oracle("kimi")
    tokens = torch.randint(0, ours.dims.V, (3, 9), generator=torch.Generator().manual_seed(3))
    stored = [Site(b, name) for b in range(ours.blocks) for name in ("K", "V")]
    want = [Site(None, "logits"), *stored]
    for given in ({"positions": FAR}, {"positions": FAR_TEXTS, "segments": TEXTS}, {"segments": TEXTS}):
        whole = ours.run(tokens, **given)[Site(None, "logits")]
        first = ours.run(tokens[:, :5], want=want, **{name: value[:, :5] for name, value in given.items()})
        rest = ours.run(tokens[:, 5:], past={site: first[site] for site in stored}, **given)
        close(rest[Site(None, "logits")], whole[:, 5:], torch.ones(3, 4, dtype=torch.bool), given)


# ---- what can't be meant --------------------------------------------------------------------------------------------

ASIDE = "texts packed in one row go with segments="

REFUSED: list[tuple[dict[str, Tensor], type[ProbeError], str]] = [
    ({"positions": torch.arange(9)}, ShapeMismatch, r"positions should be integers \[B T\] = \[3, 9\].*\[9\]"),
    ({"positions": FAR[:, :8]}, ShapeMismatch, r"positions .*int64 \[3, 8\]"),
    ({"positions": FAR.float()}, ShapeMismatch, r"positions .*float32"),
    ({"segments": TEXTS.bool()}, ShapeMismatch, r"segments .*bool"),
    ({"segments": TEXTS[0]}, ShapeMismatch, r"segments should be integers \[B T\] = \[3, 9\]"),
    ({"positions": FAR - 1}, OutOfRange, r"position -1 of row 0, at token 0: positions count from 0"),
    ({"positions": FAR + (1 << 24)}, OutOfRange, r"position 16777217 of row 0, at token 1.*up to 16,777,216"),
    ({"positions": FAR_TEXTS}, BadText, rf"positions of row 0 do not rise at token 4, from 41 to 0; {ASIDE}"),
    ({"positions": FAR.clamp(max=60000)}, BadText, rf"row 1 do not rise at token 8, from 60000 to 60000; {ASIDE}"),
    (
        {"positions": FAR_TEXTS.flip(-1), "segments": TEXTS},
        BadText,
        r"positions of row 0 do not rise at token 1, from 8 to 7; within a segment they rise from token to token",
    ),
    (
        {"segments": torch.tensor([[0] * 9, [1, 1, 2, 2, 2, 1, 1, 3, 3], [0] * 9])},
        BadText,
        r"segment 1 of row 1 comes again at token 5, behind another",
    ),
]


@pytest.mark.parametrize(("given", "kind", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_run_can_have_is_refused_by_row_and_place(
    given: dict[str, Tensor], kind: type[ProbeError], says: str
) -> None:
    _, ours = oracle("kimi")
    with pytest.raises(kind, match=says):
        ours.run(torch.zeros(3, 9, dtype=torch.long), **given)


def test_places_are_named_as_a_padded_row_counts_them() -> None:
    _, ours = oracle("kimi")
    bad = FAR.clone()
    bad[2, 8] = bad[2, 7]
    with pytest.raises(BadText, match=r"row 2 do not rise at token 1, "):
        ours.run(torch.zeros(3, 9, dtype=torch.long), LEFT, positions=bad)
    ours.run(torch.zeros(3, 9, dtype=torch.long), RIGHT, positions=bad)  # there these are pads
    again = torch.tensor([[0] * 9, [9, 9, 9, 1, 2, 2, 1, 1, 1], [0] * 9])
    with pytest.raises(BadText, match=r"segment 1 of row 1 comes again at token 3"):
        ours.run(torch.zeros(3, 9, dtype=torch.long), LEFT, segments=again)
