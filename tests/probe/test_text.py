"""The tokenizer, on the shipped one and on small ones made here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Made
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from probe import TINY, Tokenizer
from probe.errors import BadText, ProbeError

LONG = "When Mary and John went to the shop , John gave a drink to"
SHORT = "When Mary"


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(TINY)


def test_encode_puts_bos_in_front_and_each_word_is_one_token(tiny: Tokenizer) -> None:
    ids = tiny.encode(LONG)
    assert ids == [1, *map(tiny.id, LONG.split())]
    assert [tiny.token(i) for i in ids] == ["<bos>", *LONG.split()]
    assert len(set(ids)) == len(ids) - 2  # John and to, twice each
    assert len(tiny) == 410


def test_spans_are_the_words(tiny: Tokenizer) -> None:
    text = " When  Mary\nwent to "
    spans = tiny.spans(text)
    assert spans[0] == (0, 0)
    assert [text[a:b] for a, b in spans[1:]] == text.split()
    assert spans[1:] == [(1, 5), (7, 11), (12, 16), (17, 19)]
    assert len(spans) == len(tiny.encode(text))


@pytest.mark.parametrize("side", ["right", "left"])
def test_batch_pads_on_the_asked_side(tiny: Tokenizer, side: str) -> None:
    texts = [SHORT, LONG, "When Mary and John"]
    tokens, keep = tiny.batch(texts, side)  # type: ignore[arg-type]
    assert tokens.dtype == torch.int64
    assert keep is not None
    assert keep.dtype == torch.bool
    assert tokens.shape == keep.shape == (3, 15)
    assert keep.sum(-1).tolist() == [3, 15, 5]
    for row, real, text in zip(tokens, keep, texts, strict=True):
        assert row[real].tolist() == tiny.encode(text)
        assert (row[~real] == 0).all()
        order = real.long() if side == "left" else real.long().flip(0)
        assert (order.diff() >= 0).all()  # pads first (seen from that side), then tokens


def test_batch_pads_right_unless_told(tiny: Tokenizer) -> None:
    _, keep = tiny.batch([SHORT, LONG])
    assert keep is not None
    assert keep[0].tolist() == [True] * 3 + [False] * 12


def test_rows_of_one_length_need_no_mask(tiny: Tokenizer) -> None:
    tokens, keep = tiny.batch([SHORT, "When John"])
    assert keep is None
    assert tokens.tolist() == [tiny.encode(SHORT), tiny.encode("When John")]


def test_batch_refuses_nothing_and_another_side(tiny: Tokenizer) -> None:
    with pytest.raises(BadText, match="no texts"):
        tiny.batch([])
    with pytest.raises(ValueError, match="'middle'"):
        tiny.batch([SHORT, LONG], "middle")  # type: ignore[arg-type]


def test_unknown_words_are_named_once_each_in_order(tiny: Tokenizer) -> None:
    for ask in (tiny.encode, tiny.spans, lambda text: tiny.batch([SHORT, text])):
        with pytest.raises(BadText) as error:
            ask("When Zebedee and mary went to Zebedee")
        assert "vocabulary lacks 'Zebedee', 'mary'; rephrase" in str(error.value)
        assert isinstance(error.value, ProbeError)


def test_the_unknown_token_is_no_word(tiny: Tokenizer) -> None:
    with pytest.raises(BadText, match="'<unk>'"):
        tiny.encode("When <unk> went")


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_empty_text(tiny: Tokenizer, text: str) -> None:
    for ask in (tiny.encode, tiny.spans, lambda text: tiny.batch([SHORT, text])):
        with pytest.raises(BadText, match="the text is empty"):
            ask(text)


@pytest.mark.parametrize("word", ["Zebedee", "Mary went", " Mary", "mary", ""])
def test_id_of_what_is_no_token(tiny: Tokenizer, word: str) -> None:
    with pytest.raises(BadText) as error:
        tiny.id(word)
    assert repr(word) in str(error.value)
    assert "not one token" in str(error.value)


def test_id_and_token_are_inverse(tiny: Tokenizer) -> None:
    words = [tiny.token(i) for i in range(len(tiny))]
    assert [tiny.id(word) for word in words] == list(range(len(tiny)))
    assert words[:3] == ["<pad>", "<bos>", "<eos>"]


@pytest.mark.parametrize("number", [410, -1, 2**40])
def test_token_of_no_id(tiny: Tokenizer, number: int) -> None:
    with pytest.raises(BadText, match=rf"token id {number} is outside the vocabulary of 410"):
        tiny.token(number)


def test_labels_show_spaces_and_newlines(tmp_path: Path) -> None:
    made = Made(WordLevel({"[UNK]": 0, " Paris": 1, "\n\n": 2, "x": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = Split("|", "removed")
    made.save(str(tmp_path / "other.json"))
    tokenizer = Tokenizer(tmp_path / "other.json")
    assert [tokenizer.token(i) for i in (1, 2, 3)] == ["␣Paris", "⏎⏎", "x"]
    assert tokenizer.encode("x| Paris") == [3, 1]
    assert tokenizer.spans("x| Paris") == [(0, 1), (2, 8)]
    with pytest.raises(BadText, match="lacks 'Paris'"):
        tokenizer.encode("x|Paris")


def test_reads_a_file_or_its_directory(tiny: Tokenizer, tmp_path: Path) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert Tokenizer(path).encode(LONG) == tiny.encode(LONG)


@pytest.mark.parametrize("where", ["", "tokenizer.json", "nowhere"])
def test_no_tokenizer(where: str, tmp_path: Path) -> None:
    with pytest.raises(BadText, match=r"there is no tokenizer; give token ids") as error:
        Tokenizer(tmp_path / where)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "Unheard"}}'])
def test_a_broken_tokenizer(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(BadText, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer(tmp_path)
