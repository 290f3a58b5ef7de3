"""Every format that we read, damaged from a seed: it reads as what it was, or is refused in our words; nothing hangs.

A few mutations a format; with ``--long``, 500. (Checkpoints: tests/probe/test_fuzz.py, a thousand of each kind.)
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from pandas.testing import assert_frame_equal
from safetensors.torch import save_file

from experiments import frames
from experiments.prompts import Prompts
from experiments.runs import finished, run
from experiments.spec import parse, read
from hooks import Cache, Dictionary, HookedModel
from probe import TINY, Dims, Tokenizer
from probe.errors import ProbeError
from probe.params import tally
from tests.probe.test_fuzz import dumped, flip, revalue

FEW, MANY, SECONDS = 8, 500, 20
TEXT = "The capital of France is"
MODEL = HookedModel.load()
ROWS: list[dict[str, Any]] = [
    {"clean": TEXT, "answer": "Paris", "wrong": ["Tokyo", "Lima"], "group": "a", "spans": {"subject": [15, 21]}},
    {"template": "The capital of {subject} is", "slots": {"subject": "Japan"}, "corrupt_slots": {"subject": "Peru"}},
]
SPEC = 'study = "norms"\nprompts = "capital"\nchannels = 1\n[model]\nkeep = "stored"\n[grid]\nblocks = [[0], [1]]\n'
FRAME = frames.frame(
    [{"metric": "m", "unit": "1", "block": i, "tensor": "O", "value": i / 7, "prompts": "ä"} for i in range(4)],
    study="toy",
)


class Hangs(BaseException):
    """No error of the code under test, so that it catches none."""


@contextmanager
def in_time() -> Iterator[None]:
    def hangs(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Format(NamedTuple):
    """How a sound file is made in a folder, and read; which file is damaged, and whether it is JSON."""

    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    file: str
    json: bool = False


def lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def table(path: Path) -> None:
    rows = pd.DataFrame([{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in ROWS])
    rows.to_csv(path, index=False) if path.suffix == ".csv" else rows.to_parquet(path)


def ranks(place: Path) -> None:
    from base64 import b64encode

    place.joinpath("tiktoken.model").write_bytes(b"".join(b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    (place / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"256": {"content": "[BOS]"}}}))


def tiny(place: Path) -> None:
    for path in TINY.iterdir():
        if path.is_file():
            shutil.copy(path, place)


def saved_cache(place: Path) -> None:
    MODEL.run_with_cache(TEXT, names_filter=["blocks.1.O", "blocks.2.x_next", "blocks.3.x_n"])[1].save(place / "cache")


def read_cache(place: Path) -> None:
    """All of it; what comes is what was saved."""
    made = Cache.load(place / "cache")
    for site, value in made.items():
        assert torch.equal(value, CACHE[site])


CACHE = MODEL.run_with_cache(TEXT, names_filter=["blocks.1.O", "blocks.2.x_next", "blocks.3.x_n"])[1]


def dictionary(place: Path) -> None:
    shapes = {"W_enc": (8, 16), "b_enc": (16,), "W_dec": (16, 8), "b_dec": (8,)}
    save_file({name: torch.ones(*shape) for name, shape in shapes.items()}, place / "sae.safetensors")
    config = {"architecture": "standard", "d_in": 8, "d_sae": 16, "apply_b_dec_to_input": False, "dtype": "float32"}
    (place / "cfg.json").write_text(json.dumps(config))


def asked(place: Path) -> Any:
    return parse({"study": "norms", "prompts": "capital", "tensors": ["x_n"], "grid": {"blocks": [[0], [1]]}})


def read_run(place: Path) -> None:
    """What comes is what came at first; missing pictures make it read every unit anew."""
    shutil.rmtree(place / "run" / "pictures", ignore_errors=True)
    (place / "run" / "pictures").mkdir()
    finished(place / "run")
    made = run(asked(place), place / "run")
    assert made is not None
    kept = frames.read(place / "sound.parquet")
    assert_frame_equal(made, kept)
    assert_frame_equal(frames.read(place / "run" / "frame.csv"), kept)


def whole_run(place: Path) -> None:
    made = run(asked(place), place / "run")
    assert made is not None
    frames.write(made, place / "sound.parquet")


def same_frame(path: Path) -> None:
    assert_frame_equal(frames.read(path), FRAME)


def words(place: Path) -> None:
    made = Tokenizer(place)
    made.decode(made.encode(TEXT))
    made.batch([TEXT, "The capital"])


def prompts(name: str) -> Callable[[Path], Any]:
    return lambda place: Prompts.load(place / name, MODEL.tokenizer)  # type: ignore[arg-type]


HEADER = "model-2-of-2.safetensors"
FORMATS = {
    "config": Format(tiny, Dims.from_config, "config.json", True),
    "index": Format(tiny, tally, "model.safetensors.index.json", True),
    "header": Format(tiny, tally, HEADER),
    "weights": Format(tiny, lambda place: HookedModel.load(place, torch.float32), HEADER),
    "tokenizer": Format(tiny, words, "tokenizer.json", True),
    "tokenizer config": Format(ranks, words, "tokenizer_config.json", True),
    "ranks": Format(ranks, words, "tiktoken.model"),
    "prompts JSONL": Format(lambda place: lines(place / "p.jsonl"), prompts("p.jsonl"), "p.jsonl"),
    "prompts CSV": Format(lambda place: table(place / "p.csv"), prompts("p.csv"), "p.csv"),
    "prompts parquet": Format(lambda place: table(place / "p.parquet"), prompts("p.parquet"), "p.parquet"),
    "spec": Format(lambda place: (place / "s.toml").write_text(SPEC), lambda place: read(place / "s.toml"), "s.toml"),
    "frame parquet": Format(
        lambda place: frames.write(FRAME, place / "f.parquet"),
        lambda place: same_frame(place / "f.parquet"),
        "f.parquet",
    ),
    "frame CSV": Format(
        lambda place: frames.write(FRAME, place / "f.csv"), lambda place: frames.read(place / "f.csv"), "f.csv"
    ),
    "cache": Format(saved_cache, read_cache, "cache"),
    "dictionary": Format(dictionary, lambda place: Dictionary.load(place / "sae.safetensors"), "sae.safetensors"),
    "dictionary config": Format(dictionary, lambda place: Dictionary.load(place / "sae.safetensors"), "cfg.json", True),
    "manifest": Format(whole_run, read_run, "run/manifest.json", True),
    "frame of a run": Format(whole_run, read_run, "run/frame.parquet"),
    "CSV of a run": Format(whole_run, read_run, "run/frame.csv"),
}
DEEP = ["[" * 100_000 + "]" * 100_000, "9" * 5000, '{"a":' * 900 + "1" + "}" * 900]


def damaged(sound: bytes, form: Format, draw: random.Random) -> bytes:
    if form.json and draw.random() < 0.7:
        made = dumped(revalue(json.loads(sound), draw), draw)
        return made.replace(b"null", draw.choice(DEEP).encode(), 1) if draw.random() < 0.2 else made
    if draw.random() < 0.1:  # a value too deep, or too long, at a random place
        at = draw.randrange(len(sound))
        return sound[:at] + draw.choice(DEEP).encode() + sound[at:]
    return flip(sound, draw)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_damaged_is_refused_in_our_words_or_does_no_harm(
    name: str, tmp_path: Path, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS[name]
    if form.file.startswith("run/"):
        monkeypatch.setattr(HookedModel, "load", cache(HookedModel.load))
    form.make(tmp_path)
    form.read(tmp_path)
    file = tmp_path / form.file
    sound, refused, longest = file.read_bytes(), 0, 0
    for seed in range(MANY if long else FEW):
        draw = random.Random(f"{name} {seed}")
        with suppress(FileNotFoundError):
            file.unlink()
        file.write_bytes(damaged(sound, form, draw))
        try:
            with in_time():
                form.read(tmp_path)
        except ProbeError as error:
            refused += 1
            longest = max(longest, len(str(error)))
        except BaseException as error:
            pytest.fail(f"{name}, mutation {seed}: {error!r:.500}")
    assert longest < 5000, "what is told is short"
    assert refused or name == "CSV of a run", "damage is seen"
