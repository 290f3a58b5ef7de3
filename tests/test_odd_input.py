"""Odd input, wherever it comes in: one clear error of ours, at once; nothing waits, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import ablate, attribution, circuit, frames, patch, probes, routing, steer
from experiments.plain import shown
from experiments.prompts import Prompts
from experiments.runs import finished, run
from experiments.spec import parse, read
from hooks import Cache, Dictionary, HookedModel, noise, resample, zero
from probe import TINY, Dims, Drawn, Tokenizer, random_weights, save
from probe.errors import BadConfig, BadText, ProbeError
from probe.files import replacing, together
from probe.numerics import inverse_frequencies
from tests.test_fuzz import in_time

MODEL = HookedModel.load()
assert MODEL.tokenizer is not None
PROMPTS = Prompts.load("job", MODEL.tokenizer).subset(range(8))
TEXT, MANY, BIG, DEEP = "The capital of France is", 10**12, "9" * 5000, "[" * 100_000 + "]" * 100_000
EDITED = "blocks.3.O h=0"


def capped(place: Path, name: str, text: str) -> Path:
    (place / name).write_text(text)
    return place / name


SEEDED: dict[str, Callable[[int], Any]] = {
    "patch": lambda seed: patch.patch(MODEL, PROMPTS, seed=seed),
    "ablate": lambda seed: ablate.ablate(MODEL, PROMPTS, tensors=["O"], seed=seed),
    "circuit": lambda seed: circuit.circuit(MODEL, PROMPTS, [EDITED], seed=seed),
    "attribute": lambda seed: attribution.attribute(MODEL, PROMPTS, tensors=["O"], seed=seed),
    "probes": lambda seed: probes.probes(MODEL, PROMPTS, labels="answer", tensors=["x_n"], seed=seed),
    "steer": lambda seed: steer.steer(MODEL, PROMPTS, "token:Paris", tensor="blocks.2.x_next", seed=seed),
    "split": lambda seed: routing.split(MODEL, PROMPTS, ["zero blocks.2.O h=1"], seed=seed),
    "weights": lambda seed: random_weights(MODEL.dims, seed),
    "drawn": lambda seed: Drawn(MODEL.dims, seed),
    "noise": lambda seed: noise("O", 2, std=1.0, seed=seed),
    "resample": lambda seed: resample("O", 2, source=MODEL.run(TEXT, want=None), seed=seed),
    "generate": lambda seed: MODEL.generate(TEXT, n=1, seed=seed),
    "draw": lambda seed: PROMPTS.draw(PROMPTS.reference, seed),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize("seed", [-1, 2**63, 10**5000], ids=["negative", "too-large", "5001-digits"])
def test_a_seed_that_is_none(name: str, seed: int) -> None:
    with in_time(), pytest.raises(ProbeError, match=r"seed=.*whole number from 0"):
        SEEDED[name](seed)


COUNTED: dict[str, Callable[[], Any]] = {
    "window": lambda: patch.patch(MODEL, PROMPTS, window=MANY),
    "window-planned": lambda: patch.outlook(MODEL, PROMPTS, window=MANY),
    "noise": lambda: patch.patch(MODEL, PROMPTS, noise_at="END", draws=MANY),
    "draws": lambda: ablate.ablate(MODEL, PROMPTS, tensors=["O"], draws=MANY),
    "draws-planned": lambda: ablate.outlook(MODEL, PROMPTS, tensors=["O"], draws=MANY),
    "subsets": lambda: circuit.circuit(MODEL, PROMPTS, [EDITED], subsets=MANY),
    "random-sets": lambda: circuit.circuit(MODEL, PROMPTS, [EDITED], random_sets=MANY),
    "circuits-draws": lambda: circuit.circuit(MODEL, PROMPTS, [EDITED], draws=MANY),
    "steps": lambda: attribution.attribute(MODEL, PROMPTS, tensors=["O"], steps=MANY),
    "steps-planned": lambda: attribution.outlook(MODEL, PROMPTS, tensors=["O"], steps=MANY),
    "directions": lambda: steer.steer(MODEL, PROMPTS, "token:Paris", tensor="blocks.2.x_next", random_directions=MANY),
    "folds": lambda: probes.probes(MODEL, PROMPTS, labels="answer", tensors=["x_n"], folds=MANY),
    "grid": lambda: parse({"study": "norms", "prompts": "a", "grid": {k: [*range(20_000)] for k in ("a", "channels")}}),
    "product": lambda: parse(
        {"study": "ablate", "prompts": "a", "grid": {k: [*range(1, 2000)] for k in ("seed", "draws", "budget")}}
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_count_beyond_all_use(name: str) -> None:
    with in_time(), pytest.raises(ProbeError):
        COUNTED[name]()


def test_a_grid_is_checked_in_a_time_that_grows_with_its_length() -> None:
    seeds = list(range(50_000))
    with in_time():
        assert len(parse({"study": "ablate", "prompts": "ioi", "grid": {"seed": seeds}}).units) == len(seeds)
    with in_time(), pytest.raises(ProbeError, match="seed has 7 twice"):
        parse({"study": "ablate", "prompts": "ioi", "grid": {"seed": [*seeds, 7]}})


READERS: dict[str, Callable[[Path], Any]] = {
    "cache": Cache.load,
    "dictionary": Dictionary.load,
    "frame.parquet": frames.read,
    "frame.csv": frames.read,
    "prompts.jsonl": lambda path: Prompts.load(path, MODEL.tokenizer),  # type: ignore[arg-type]
    "prompts.csv": lambda path: Prompts.load(path, MODEL.tokenizer),  # type: ignore[arg-type]
    "prompts.parquet": lambda path: Prompts.load(path, MODEL.tokenizer),  # type: ignore[arg-type]
    "spec.toml": read,
    "config.json": Dims.from_config,
    "tokenizer.json": Tokenizer,
    "tiktoken.model": Tokenizer,
    "manifest.json": lambda path: finished(path.parent),
    "model": HookedModel.load,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_no_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with in_time(), pytest.raises(ProbeError):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("stem", ["a\0b", "\ud800", "a" * 300], ids=["nul", "surrogate", "300"])
@pytest.mark.parametrize("name", READERS)
def test_a_name_that_no_file_can_have(name: str, stem: str, tmp_path: Path) -> None:
    with pytest.raises(ProbeError):
        READERS[name](tmp_path / stem / name)
    with pytest.raises(ProbeError):
        READERS[name](tmp_path / f"{stem}{name}")
    for write in (lambda path: frames.write(FRAME, path), lambda path: save(random_weights(MODEL.dims), path)):
        with pytest.raises(ProbeError):
            write(tmp_path / f"{stem}.csv")
    with pytest.raises(ProbeError):
        run(parse({"study": "norms", "prompts": "capital", "model": {"directory": stem}}), tmp_path / "run")


FRAME = frames.frame([{"metric": "m", "unit": "1", "value": 1.0}], study="toy")

WRITTEN = {
    "deep.jsonl": DEEP,
    "spans.csv": f'clean,spans\n{TEXT},"{DEEP}"\n',
    "value.jsonl": '{"clean": ' + "[" * 900 + "]" * 900 + "}",
    "digits.jsonl": f'{{"clean": "{TEXT}", "label": {BIG}}}',
    "deep.toml": f"a = {DEEP}",
    "digits.toml": f"study = 'norms'\nprompts = 'ioi'\nchannels = {BIG}",
    "hexadecimal.toml": f"study = 'norms'\nprompts = 0x{'f' * 9000}",
    "grid.toml": f"study = 'norms'\nprompts = 'ioi'\n[grid]\nchannels = [0x{'f' * 9000}]",
    "deep.json": DEEP,
    "config.json": f'{{"model_type": {BIG}}}',
}
"""What is too deep, or has too many digits, by file."""


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_nested_too_deeply_or_has_too_many_digits(name: str, tmp_path: Path) -> None:
    path = capped(tmp_path, name, WRITTEN[name])
    load = {".toml": read, ".json": Dims.from_config}.get(
        path.suffix,
        lambda path: Prompts.load(path, MODEL.tokenizer),  # type: ignore[arg-type]
    )
    with in_time(), pytest.raises(ProbeError) as error:
        load(path)
    assert len(str(error.value)) < 3000


@pytest.mark.parametrize("node", [f"blocks.{BIG}.O", f"O h={BIG}", f"{EDITED[:-1]}{BIG}", f"blocks.3.O T=END[{BIG}]"])
def test_a_number_of_five_thousand_digits_in_a_spelling(node: str) -> None:
    with pytest.raises(ProbeError):
        circuit.circuit(MODEL, PROMPTS, [node])


@pytest.mark.parametrize("where", [{"block": 10**5000}, {"block": 1, "h": 10**5000}, {"block": 1, "T": -(10**5000)}])
def test_a_number_of_five_thousand_digits_in_an_edit(where: dict[str, int]) -> None:
    with pytest.raises(ProbeError):
        MODEL.run(TEXT, edits=[zero("O", **where)])  # type: ignore[arg-type]


def test_a_tokenizer_that_panics(tmp_path: Path) -> None:
    """What Rust raises is no Exception, and would pass all that expects one."""
    said = json.loads((TINY / "tokenizer.json").read_text())
    said["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    made = Tokenizer(capped(tmp_path, "tokenizer.json", json.dumps(said)))
    with pytest.raises(BadText, match="this tokenizer can't encode"):
        made.encode(TEXT)


EXTREME = [0, 1e-320, 1e-30, 0.5, 1, 1e30, 1e300, 2**62, -1.0]


def test_yarn_of_extreme_numbers_is_refused_or_stays_finite() -> None:
    config = MODEL.dims.to_config()
    keys = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
    taken = 0
    for (key, value), theta in product(product(keys, EXTREME), (1 + 1e-15, 50_000.0, 1e30, 1e300)):
        both = {"mscale_all_dim": value} if key == "mscale" else {}
        scaling = {**config["rope_scaling"], key: value, **both}
        try:
            dims = Dims.from_config({**config, "rope_theta": theta, "rope_scaling": scaling})
        except BadConfig as error:
            assert "rope" in str(error)  # noqa: PT017  # some are taken
            continue
        taken += 1
        assert torch.isfinite(inverse_frequencies(dims)).all(), (key, value, theta)
        assert torch.isfinite(torch.tensor([dims.tau, dims.rotary_gain])).all(), (key, value, theta)
    assert taken > 10


# ---- terminals -------------------------------------------------------------------------------------------------------


def command(line: str, place: Path) -> subprocess.CompletedProcess[str]:
    script = f"{sys.executable} -m experiments {line}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, cwd=place, env=env)


def test_a_message_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    assert shown("a\x1b[31m\r\u202eb\nc") == "a⟨U+001B⟩[31m⟨U+000D⟩⟨U+202E⟩b\nc"
    said = command("run $'\\e[31mno.toml'", tmp_path)
    assert said.returncode == 1
    assert "\x1b" not in said.stderr
    assert "⟨U+001B⟩[31mno.toml" in said.stderr


@pytest.mark.parametrize("end", ["| true", ">&-"], ids=["nobody-reads", "closed"])
def test_a_closed_stdout_loses_no_file(end: str, tmp_path: Path) -> None:
    said = command(f"norms --task capital --tensor x_n --out out {end}", tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"norms.parquet", "norms.csv", "norms.png"}


# ---- writers ---------------------------------------------------------------------------------------------------------


def test_two_writers_of_one_path_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "new" / "f"
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one" * 1000)
        other.write(b"other")
    assert path.read_bytes() == b"one" * 1000
    assert list(path.parent.iterdir()) == [path]


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    for name in ("f.csv", "f.csv.part", f"f.csv.{os.getpid()}.part"):
        (tmp_path / name).symlink_to("mine")
    frames.write(FRAME, tmp_path / "f.csv")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert not (tmp_path / "f.csv").is_symlink()


def test_files_that_belong_together_take_their_places_together(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def half() -> None:
        with together() as write:
            with write(tmp_path / "a") as file:
                file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]
