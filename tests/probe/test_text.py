"""The tokenizer, on the shipped one and on small ones made here."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Made
from tokenizers import decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from probe import TINY, Tokenizer, labels
from probe.errors import BadText, ProbeError, TextWarning

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


@pytest.mark.parametrize(
    ("data", "label"),
    [
        (b" Paris", "␣Paris"),
        (b"\n\n\t", "⏎⏎⇥"),
        ("é你👩 ع".encode(), "é你👩␣ع"),
        ("你".encode()[:2], "⟨E4⟩⟨BD⟩"),
        ("你".encode()[1:] + b"a", "⟨BD⟩⟨A0⟩a"),
        (b"\xff\xfe", "⟨FF⟩⟨FE⟩"),
        (b"\xed\xa0\x80", "⟨ED⟩⟨A0⟩⟨80⟩"),  # half a surrogate pair is no character
        ("a\r\x00\u200d\u00a0\u3000\U0010ffff".encode(), "a⟨U+000D⟩⟨U+0000⟩⟨U+200D⟩⟨U+00A0⟩⟨U+3000⟩⟨U+10FFFF⟩"),
        ("␣⏎⇥⟨E4⟩".encode(), "⟨U+2423⟩⟨U+23CE⟩⟨U+21E5⟩⟨U+27E8⟩E4⟩"),
        (b"", ""),
    ],
)
def test_a_label_shows_every_byte(data: bytes, label: str) -> None:
    assert labels.label(data) == label
    assert labels.unlabel(label) == data


@given(st.binary(max_size=12) | st.text("⟨⟩U+0A4E␣⏎ \n\u200d你", max_size=8).map(str.encode))
def test_labels_are_alike_only_for_equal_bytes(data: bytes) -> None:
    label = labels.label(data)
    assert labels.unlabel(label) == data
    assert all(char.isprintable() and not char.isspace() for char in label)
    assert labels.unspelt(labels.spelt(data)) == data


def test_the_alphabet_of_byte_level_vocabularies() -> None:
    assert sorted(labels.spelt(bytes(range(256)))) == sorted(ByteLevel.alphabet())
    for text in ("a b", "é\n你", "\x00\x7f\u00ad\u00a0"):
        ((spelt, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert labels.spelt(text.encode()) == spelt
    assert labels.unspelt("你Ġ") == "你 ".encode()  # what is not of the alphabet stands for itself


def _byte_level(directory: Path, config: object = None, *, front: str | None = None) -> Path:
    """A directory with a byte-level ``tokenizer.json`` of the 256 bytes, `` P`` and three special tokens."""
    alphabet = {labels.spelt(bytes([byte])): byte for byte in range(256)}
    made = Made(BPE({**alphabet, "ĠP": 256}, [("Ġ", "P")]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<｜begin of text｜>", "<é>"])
    if front is not None:
        ids = [(name, made.token_to_id(name)) for name in front.split("+")]
        made.post_processor = TemplateProcessing(single=[*front.split("+"), "$A"], special_tokens=ids)
    made.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_a_byte_level_vocabulary_is_asked_by_text_or_label(tmp_path: Path) -> None:
    tokenizer = Tokenizer(_byte_level(tmp_path))
    assert tokenizer.id(" P") == tokenizer.id("␣P") == 256
    assert tokenizer.token(256) == "␣P"
    assert tokenizer.id("\n") == tokenizer.id("⏎") == 10
    assert tokenizer.id("⟨E4⟩") == 0xE4
    assert tokenizer.id("<｜begin of text｜>") == tokenizer.id("<｜begin␣of␣text｜>") == 258
    assert [tokenizer.id(tokenizer.token(id)) for id in range(260)] == list(range(260))
    assert [tokenizer.token(id) for id in (257, 258, 259)] == ["<s>", "<｜begin␣of␣text｜>", "<é>"]
    assert tokenizer.encode("x P你") == [120, 256, 0xE4, 0xBD, 0xA0]
    assert tokenizer.encode(" ") == [32]  # whitespace is text where it has tokens
    for word in ("ĠP", "P P", "", "⟨zz⟩", "⟨U+110000⟩", "\ud800"):
        with pytest.raises(BadText, match="is not one token"):
            tokenizer.id(word)


def test_a_sign_that_is_meant_as_it_stands_is_found_too(tmp_path: Path) -> None:
    Made(WordLevel({"a␣b": 0, "␣": 1, " ": 2, "[UNK]": 3}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.id(word) for word in ("a␣b", "␣", " ", "⟨U+2423⟩")] == [0, 2, 2, 1]
    assert [tokenizer.token(id) for id in range(3)] == ["a⟨U+2423⟩b", "⟨U+2423⟩", "␣"]


def test_decode_is_the_text_and_leaves_nothing_out(tmp_path: Path) -> None:
    tokenizer = Tokenizer(_byte_level(tmp_path))
    text = "é 你 P\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([257, 256]) == "<s> P"
    with pytest.raises(BadText, match="token id 260 is outside"):
        tokenizer.decode([256, 260])


BOS = {"bos_token": "<s>"}
NO_BOS = "no BOS: position 0 is the text's first token"


@pytest.mark.parametrize("front", [None, "<s>", "<｜begin of text｜>+<s>"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        BOS,
        {**BOS, "add_bos_token": True},
        {**BOS, "add_bos_token": False},
        {"add_bos_token": True},
        {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "add_bos_token": True},
        {"bos_token": "<é>", "add_bos_token": True},
    ],
)
def test_what_is_put_in_front_is_as_in_transformers(
    tmp_path: Path, config: dict[str, object], front: str | None
) -> None:
    _byte_level(tmp_path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"}, front=front)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    if front is None and {"bos_token", "add_bos_token"} <= config.keys():
        theirs.add_bos_token = config["add_bos_token"]  # which this release forgets where there is a tokenizer.json
    ours = Tokenizer(tmp_path)
    assert ours.encode("x P") == theirs("x P")["input_ids"]
    assert ours.spans("x P")[-2:] == [(0, 1), (1, 3)]
    names = [ours.token(id) for id in ours.encode("x P")[:-2]]
    told = f"{' '.join(names)} is put in front: position 0 is {names[0]}" if names else NO_BOS
    assert ours.start == Tokenizer.of(theirs).start == told


def test_what_position_0_is_is_said(tiny: Tokenizer) -> None:
    assert tiny.start == "<bos> is put in front: position 0 is <bos>"


def test_a_bos_that_is_no_token_is_refused(tmp_path: Path) -> None:
    _byte_level(tmp_path, {"bos_token": "<bos>", "add_bos_token": True})
    with pytest.raises(BadText, match=r"tokenizer_config\.json: bos_token is '<bos>', which is no special token"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadText, match=r"tokenizer_config\.json:1: not JSON"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("front", ["<s>", "<｜begin of text｜>+<s>"])
def test_a_second_bos_is_told(tmp_path: Path, front: str) -> None:
    directory = _byte_level(tmp_path, front=front)
    tokenizer, once, twice = (Tokenizer(directory, second_bos=how) for how in (None, False, True))
    leads = [tokenizer.id(name) for name in front.split("+")]
    for ask in (tokenizer.encode, tokenizer.spans, lambda text: tokenizer.batch([text])):
        with pytest.warns(TextWarning, match="the text '<s>x P' begins with <s>, and gets another in front") as said:
            ask("<s>x P")
        assert said[0].filename == __file__, "at the user's own line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twice.encode("<s>x P") == [*leads, tokenizer.id("<s>"), ord("x"), 256]
        assert once.encode("<s>x P") == [*leads, ord("x"), 256]
        assert once.spans("<s>x P") == [(0, 0)] * (len(leads) - 1) + [(0, 3), (3, 4), (4, 6)]
        for text in ("x P", "x<s>", "<é>x"):
            assert tokenizer.encode(text) == once.encode(text) == twice.encode(text)
    assert tokenizer.start == once.start == twice.start


def test_a_bos_that_the_config_adds_is_not_added_twice_in_silence(tmp_path: Path) -> None:
    tokenizer = Tokenizer(_byte_level(tmp_path, {"bos_token": "<s>", "add_bos_token": True}))
    with pytest.warns(TextWarning, match="'<s>a' begins with <s>"):
        assert tokenizer.encode("<s>a") == [257, 257, 97]


def test_padding_and_limits_of_a_file_are_not_kept(tmp_path: Path) -> None:
    made = Made.from_file(str(_byte_level(tmp_path) / "tokenizer.json"))
    made.enable_truncation(2)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode("abcd") == [*b"abcd"]


def test_a_copy_takes_special_names_as_the_original_does(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(_byte_level(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert Tokenizer.of(theirs).encode("a<s>") == [97, 257]
    theirs.backend_tokenizer.encode_special_tokens = True
    with pytest.warns(TextWarning):
        assert Tokenizer.of(theirs).encode("a<s>") == [97, *b"<s>"]


def test_what_the_library_cannot_encode_is_told(tmp_path: Path) -> None:
    Made(WordLevel({"x": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("x") == [0]
    with pytest.raises(BadText, match=r"can't encode 'y' \(WordLevel error: Missing \[UNK\]"):
        tokenizer.encode("y")


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
