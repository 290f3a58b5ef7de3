"""A weight that is NaN or infinite is told by file, tensor and place, whatever its form and wherever it is kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe import Checkpoint, Dims, load, random_weights, save
from probe.errors import BadCheckpoint
from probe.headers import READ
from probe.memory import Keeping
from probe.numerics import finite
from probe.weights import weight_sites
from tests.probe.small import DIRECT, SMALL, TIED

BAD = (float("nan"), float("inf"), float("-inf"))
KEEPS: tuple[Keeping, ...] = ("expanded", "stored", "disk")


def spoilt(directory: Path) -> Iterator[str]:
    """A checkpoint with the last number of one stored tensor put to NaN or an infinity, one tensor after the other, and
    what an error should say of it."""
    stored = {
        name: one for name, one in Checkpoint(directory).survey.stored.items() if READ[one.dtype].is_floating_point
    }
    for (name, one), bad in zip(stored.items(), cycle(BAD), strict=False):
        path = directory / one.file
        sound = path.read_bytes()
        number = torch.tensor([BAD[0] if one.dtype == "F8_E4M3" else bad]).to(READ[one.dtype])  # FP8 has no infinity
        raw = number.view(torch.uint8).numpy().tobytes()
        path.write_bytes(sound[: one.stop - len(raw)] + raw + sound[one.stop :])
        *rows, last = (size - 1 for size in one.shape)
        where = f"row {rows[0]}, column {last}" if rows else f"place {last}"
        whole, scale, _ = name.partition("_scale")
        said = f"the weight at {where} is {'NaN' if bool(number.float().isnan()) else 'infinite'}"
        said = (
            f"the scale of {'block' if 'inv' in name else 'group'} [{rows[0]}, {last}] is NaN or inf" if scale else said
        )
        yield f"{one.file}: {whole}{'_packed' if scale and 'inv' not in name else ''}: {said}"
        path.write_bytes(sound)


def read_all(weights: Checkpoint) -> None:
    for block, leaf in weight_sites(weights.dims):
        weights.read(block, leaf.name)


CHECKPOINTS: dict[str, tuple[Dims, dict[str, Any]]] = {
    "bf16": (SMALL, {"dtype": torch.bfloat16}),
    "fp16": (SMALL, {"dtype": torch.float16}),
    "direct": (DIRECT, {}),
    "tied": (TIED, {}),
    "fp8": (SMALL, {"form": "fp8"}),
    "int4": (replace(SMALL, d=32, m=32, m_s=64), {"form": "int4"}),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_every_tensor_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    dims, how = CHECKPOINTS[kind]
    save(random_weights(dims, 2), tmp_path, **how)
    told = 0
    for said in spoilt(tmp_path):
        with pytest.raises(BadCheckpoint) as error:
            load(tmp_path)
        assert said in str(error.value)
        for keep in ("stored", "disk"):
            weights = load(tmp_path, keep=keep)  # opened from headers: told where it is read
            with pytest.raises(BadCheckpoint) as error:
                read_all(weights)
            assert said in str(error.value)
        told += 1
    assert told > 40
    for keep in KEEPS:
        read_all(load(tmp_path, keep=keep))  # all is as it was


@pytest.mark.parametrize("keep", ["stored", "disk"])
def test_only_what_is_read_is_looked_at_and_that_once(
    keep: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(random_weights(SMALL, 2), tmp_path, dtype=torch.bfloat16)
    seen: list[int] = []

    def counted(x: Tensor) -> bool:
        seen.append(x.numel())
        return finite(x)

    monkeypatch.setattr("probe.checkpoint.finite", counted)
    weights = load(tmp_path, keep=keep)
    assert isinstance(weights, Checkpoint)
    assert not seen
    for _ in range(2):
        weights.read(1, "W_1_e", [2])
    assert seen == [SMALL.d * SMALL.m]
    weights.read(1, "W_1_e")
    assert len(seen) == SMALL.e
    copy.deepcopy(weights).read(1, "W_1_e", [2])
    assert len(seen) == SMALL.e + 1, "a copy opens the files anew, and looks anew"


def test_a_dtype_that_cannot_hold_a_weight_is_told(tmp_path: Path) -> None:
    weights = random_weights(SMALL, 2)
    weights.read(2, "W_2_e")[3, 1, 2] = -70_000.0
    save(weights, tmp_path, dtype=torch.float32)
    for keep in KEEPS:
        assert float(load(tmp_path, torch.bfloat16, keep=keep).read(2, "W_2_e")[3, 1, 2]) == -70_144.0
        with pytest.raises(BadCheckpoint, match=r"experts\.3\.down_proj.*row 2, column 1 is infinite in float16"):
            load(tmp_path, torch.float16, keep=keep).read(2, "W_2_e")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finite_is_what_looking_at_every_number_says(dtype: torch.dtype) -> None:
    for place in (0, 5, 63, 64, 98):
        for bad in (*BAD, torch.finfo(dtype).max, torch.finfo(dtype).min):
            x = torch.linspace(-1, 1, 99).to(dtype)
            x[place] = bad
            for shape in (x, x.view(9, 11).T, x[::2], x.requires_grad_()):
                assert finite(shape) == bool(shape.isfinite().all())
