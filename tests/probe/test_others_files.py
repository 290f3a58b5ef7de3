"""Files that others have made: how they begin, what they say twice, and what they are where they are none of ours."""

from __future__ import annotations

import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from probe import TINY, Checkpoint, Dims, Tokenizer, random_weights, save
from probe.errors import BadCheckpoint, BadText
from tests.probe.files import INDEX
from tests.probe.ranks import BYTES, kimi
from tests.probe.small import SMALL


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint in two shards, bf16."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    save(random_weights(SMALL, 1), directory, shards=2)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def marked(file: Path) -> None:
    """Put a byte order mark in front of a file."""
    file.write_bytes(BOM_UTF8 + file.read_bytes())


def test_a_byte_order_mark_of_config_and_index_says_nothing(copy: Path) -> None:
    for name in ("config.json", INDEX):
        marked(copy / name)
    assert Checkpoint(copy).dims == Dims.from_config(copy) == SMALL


def test_a_byte_order_mark_of_a_tokenizer_says_nothing(tmp_path: Path) -> None:
    tiny = shutil.copytree(TINY, tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tiny / name).exists():
            marked(tiny / name)
    assert Tokenizer(tiny).encode("When Mary") == Tokenizer(TINY).encode("When Mary")
    ranks = kimi(tmp_path / "ranks", BYTES)
    before = Tokenizer(ranks).encode("Mary"), Tokenizer(ranks).id("[BOS]")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        marked(ranks / name)
    assert (Tokenizer(ranks).encode("Mary"), Tokenizer(ranks).id("[BOS]")) == before


def test_a_header_with_a_byte_order_mark_is_damaged_as_it_is_to_the_format(copy: Path) -> None:
    shard = copy / "model-1-of-2.safetensors"
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shard.write_bytes((length + 3).to_bytes(8, "little") + BOM_UTF8 + raw[8:])
    with pytest.raises(BadCheckpoint, match="begins with a byte order mark"):
        Checkpoint(copy)


def test_a_key_of_a_tokenizer_twice_is_refused(tmp_path: Path) -> None:
    said = (TINY / "tokenizer.json").read_text(encoding="utf-8")
    word = next(iter(json.loads(said)["model"]["vocab"]))
    for twice in (said.replace('"vocab": {', f'"vocab": {{{json.dumps(word)}: 3,', 1), '{"version": "1.0",' + said[1:]):
        assert twice != said
        (tmp_path / "tokenizer.json").write_text(twice, encoding="utf-8")
        with pytest.raises(BadText, match=r"tokenizer\.json: .* is in it twice"):
            Tokenizer(tmp_path)
    kimi(tmp_path / "ranks", BYTES)
    config = tmp_path / "ranks" / "tokenizer_config.json"
    config.write_text('{"bos_token": "[BOS]", "bos_token": "[EOS]"}', encoding="utf-8")
    with pytest.raises(BadText, match=r"tokenizer_config\.json: not JSON \(bos_token is in it twice\)"):
        Tokenizer(tmp_path / "ranks")
