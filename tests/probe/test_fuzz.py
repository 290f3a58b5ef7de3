"""Thousands of damaged checkpoints: each loads cleanly or is refused in our words, in bounded memory and time.

Headers, index, config and payload are damaged from a seed: bits, lengths, whole values, whole files. What still loads
is compared with what the safetensors library reads from the same files.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from probe import Checkpoint, InMemory, load, random_weights, save
from probe.errors import BadCheckpoint, BadConfig, TooLarge
from probe.params import tally
from probe.weights import weight_sites
from tests.probe.small import SMALL

TINY = replace(SMALL, moe=(False, True), e=2, k=1, d=32, m=32, m_s=32)
KINDS: dict[str, dict[str, Any]] = {
    "fp8": {"form": "fp8", "shards": 2},
    "int4": {"form": "int4", "model_type": "kimi_k25", "shards": 2},
    "plain": {},
}
MUTATIONS = 1000
"""Of each kind."""

NUMBERS = [0, 1, -1, 2, 3, 7, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")]
WORDS = ["", "x", "F8_E4M3", "BF16", "F64", "..", "/etc/passwd", "model.safetensors", "\x00", "\ud800", "A" * 300]
OTHERS = [None, True, False, [], [0], [1, 2], [-1], [2**63, 2**63], {}, {"a": 1}, [[[]]]]
VALUES: list[Any] = [*NUMBERS, *WORDS, *OTHERS]

Files = dict[str, bytes]


def flip(raw: bytes, draw: random.Random) -> bytes:
    """Some bits, a piece cut out, doubled or put in, or the end gone."""
    made = bytearray(raw)
    at = draw.randrange(len(made) + 1)
    how = draw.randrange(5)
    if how == 0:
        for _ in range(draw.choice([1, 1, 3, 30])):
            made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    elif how == 1:
        del made[at : at + draw.choice([1, 2, 8, 100])]
    elif how == 2:
        made[at:at] = made[at : at + draw.choice([1, 8, 100])] or b"!"
    elif how == 3:
        made[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice([1, 8])))
    else:
        del made[at:]
    return bytes(made)


def revalue(said: Any, draw: random.Random) -> Any:
    """Something in a JSON value, at any depth, made into something else, taken out, renamed or doubled."""
    if not isinstance(said, dict | list) or not said or draw.random() < 0.1:
        return draw.choice(VALUES)
    if isinstance(said, list):
        i = draw.randrange(len(said))
        kept = [revalue(said[i], draw)] if draw.random() < 0.8 else draw.choice([[], [said[i]] * 2])
        return said[:i] + kept + said[i + 1 :]
    key = draw.choice(sorted(said))
    made = dict(said)
    how = draw.random()
    if how < 0.7:
        made[key] = revalue(said[key], draw)
    elif how < 0.8:
        del made[key]
    elif how < 0.9:
        made[draw.choice([*sorted(said), f"{key}x", "", "__metadata__"])] = made.pop(key)
    else:
        made[f"{key}.more"] = said[key]
    return made


def dumped(said: Any, draw: random.Random) -> bytes:
    text = json.dumps(said)
    if isinstance(said, dict) and said and draw.random() < 0.1:  # the same key twice
        key = draw.choice(sorted(said))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(said[key])}}}"
    return text.encode("utf-8", errors="surrogatepass")


def of_header(files: Files, draw: random.Random) -> None:
    """A shard's header: its length, its bytes, or what it says; with the length that fits, or not."""
    name = draw.choice([name for name in sorted(files) if name.endswith("safetensors")])
    raw = files[name]
    end = 8 + int.from_bytes(raw[:8], "little")
    header, payload = raw[8:end], raw[end:]
    how = draw.randrange(4)
    if how == 0:
        files[name] = flip(raw[:8], draw)[:8].ljust(8, b"\0") + raw[8:]
        return
    header = flip(header, draw) if how == 1 else dumped(revalue(json.loads(header), draw), draw)
    length = len(header) if draw.random() < 0.9 else end - 8
    files[name] = length.to_bytes(8, "little") + header + payload


def of_json(file: str) -> Callable[[Files, random.Random], None]:
    def change(files: Files, draw: random.Random) -> None:
        if file in files:
            by_bytes = draw.random() < 0.3
            files[file] = flip(files[file], draw) if by_bytes else dumped(revalue(json.loads(files[file]), draw), draw)

    return change


def of_payload(files: Files, draw: random.Random) -> None:
    """Bits of the weights, scales among them; or a file's end."""
    name = draw.choice([name for name in sorted(files) if name.endswith("safetensors")])
    end = 8 + int.from_bytes(files[name][:8], "little")
    payload = bytearray(files[name][end:])
    for _ in range(draw.choice([1, 100])):
        payload[draw.randrange(len(payload))] = draw.choice([0, 0x7F, 0xFF, draw.randrange(256)])
    cut = draw.choice([None, None, -1, -100, 0])
    files[name] = files[name][:end] + bytes(payload[:cut]) + b"!" * draw.choice([0, 0, 0, 1])


def of_files(files: Files, draw: random.Random) -> None:
    """A file gone, empty, under another name, twice, or in another's place."""
    name, other = draw.choice(sorted(files)), draw.choice(sorted(files))
    how = draw.randrange(5)
    if how == 0:
        del files[name]
    elif how == 1:
        files[name] = b""
    elif how == 2:
        files[f"other-{name}"] = files.pop(name)
    elif how == 3:
        files[f"other-{name}"] = files[name]
    else:
        files[name], files[other] = files[other], files[name]


DAMAGE = [of_header, of_header, of_json("model.safetensors.index.json"), of_json("config.json"), of_payload, of_files]


def write(directory: Path, files: Files, sound: Files) -> None:
    for path in directory.iterdir():
        if files.get(path.name) != sound.get(path.name) or path.name not in files:
            path.unlink()
    for name, raw in files.items():
        if not (directory / name).exists():
            (directory / name).write_bytes(raw)


def read_all(directory: Path, keep: Any) -> None:
    """Load, and read every weight."""
    weights = load(directory, keep=keep)
    for block, leaf in weight_sites(weights.dims):
        assert weights.read(block, leaf.name).numel()
    if isinstance(weights, Checkpoint):
        agree(weights)
    assert isinstance(weights, Checkpoint | InMemory)


def outcome(directory: Path, keep: Any) -> Exception | None:
    try:
        read_all(directory, keep)
    except Exception as error:
        return error
    return None


def agree(checkpoint: Checkpoint) -> None:
    """The safetensors library reads the same tensors, bit for bit, where we have found them."""
    for file in {stored.file for stored in checkpoint.survey.stored.values()}:
        with safe_open(checkpoint.directory / file, framework="pt") as theirs:
            names = {name for name, stored in checkpoint.survey.stored.items() if stored.file == file}
            assert set(theirs.keys()) == names
            for name in names:
                ours, want = checkpoint._part(name), theirs.get_tensor(name)
                assert ours.dtype == want.dtype
                assert torch.equal(ours.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_in_our_words_or_does_no_harm(kind: str, tmp_path: Path) -> None:
    save(random_weights(TINY, 1), tmp_path, **KINDS[kind])
    read_all(tmp_path, "disk")
    sound = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused: dict[type[Exception], int] = dict.fromkeys((BadConfig, BadCheckpoint, TooLarge), 0)
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(MUTATIONS):
        draw = random.Random(f"{kind} {seed}")
        files = dict(sound)
        for damage in draw.choices(DAMAGE, k=draw.choice([1, 1, 1, 2, 3])):
            with suppress(ValueError, IndexError, KeyError):  # the damage before left nothing for this one
                damage(files, draw)
        write(tmp_path, files, sound)
        start = time.process_time()
        with suppress(BadConfig, BadCheckpoint):
            tally(tmp_path)
        if error := outcome(tmp_path, draw.choice(["expanded", "stored", "disk"])):
            assert type(error) in refused, f"{kind}, mutation {seed}: {error!r}"
            refused[type(error)] += 1
            assert str(tmp_path) in str(error)
            assert len(str(error)) < 3000
        slowest = max(slowest, time.process_time() - start)
        write(tmp_path, sound, files)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in kB here, in bytes elsewhere: at most that
    assert slowest < 2
    assert grown < 200_000
    assert refused[BadCheckpoint] > MUTATIONS / 4
    assert refused[BadConfig] > MUTATIONS / 20
    assert sum(refused.values()) < MUTATIONS * 0.95, "some damage does no harm"
