"""Kimi's tokenizer, from rank files made here: against a plain loop, another library's regex, and its own ids.

The ids of the real file are tested where it is at hand: K2PROBE_KIMI_TOKENIZER names a directory that holds Kimi K2's
``tiktoken.model`` and ``tokenizer_config.json``.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from probe import TINY, Tokenizer, text
from probe.errors import BadText, TextWarning
from probe.tiktoken import PATTERN, read_ranks
from tests.probe.ranks import BYTES, IDS, grown, kimi, lines, plain, write

TEXTS = [
    "The capital of France is Paris.",
    "It's 12345 o'clock; I'LL say they'Ve DON'T d'you'd",
    "我AI模型v2.0很强it's",
    "中文English混合 北京市 Pascal々〇⼀",
    "1 22 333 4444 1234567890 ٣٤٥٦ Ⅻ ½",
    "iPhone XMLHttpRequest fooBAR ǅungla ʰx",
    "line\n\n  next\r\n\r\n\tend   ",
    " \n \n x  y\u3000z\u00a0w\u2028v ",
    "!!! ??\n\n-->> ($100) #tag @you\n",
    "👩\u200d👩\u200d👧 🇫🇷 e\u0301le\u0300ve نص عربي עברית हिन्दी ไทย",
    "def f(x):\n    return x  # ok\n",
    "a<|im_end|>b [BOS]<|reserved_token_5|>",
    "日本語カタカナ한국어",
    "\x00\x07\x7f\ufeff\ufffd",
]

# Kimi's pattern once more, without `&&`: each letter is first seen not to be Han.
UPPER, LOWER = (rf"(?:(?!\p{{Han}})[{classes}\p{{Lm}}\p{{Lo}}\p{{M}}])" for classes in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
APART = rf"""(?x) \p{{Han}}+
  | (?:(?![\r\n])[^\p{{L}}\p{{N}}])? (?:{UPPER}*{LOWER}+ | {UPPER}+{LOWER}*) (?i:'(?:[stmd]|re|ve|ll))?
  | \p{{N}}{{1,3}}
  | [ ]?[^\s\p{{L}}\p{{N}}]+[\r\n]*
  | \s*[\r\n]+ | \s+(?!\S) | \s+"""


def pieces(text: str) -> list[str]:
    """The pieces of a text, by the other library."""
    return [found[0] for found in regex.finditer(PATTERN, text, regex.V1)]


VOCABULARY = grown([piece for text in TEXTS for piece in pieces(text)], 400, seed=0)
RANKS = {token: rank for rank, token in enumerate(VOCABULARY)}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(kimi(tmp_path_factory.mktemp("small"), VOCABULARY), specials="text")


# ---- pieces ----------------------------------------------------------------------------------------------------------


def ours(text: str, pattern: str = PATTERN) -> list[str]:
    """The pieces that the tokenizer encodes apart."""
    return [piece for piece, _ in Split(Regex(pattern), "isolated").pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's 12345 o'clock.", ["It's", " ", "123", "45", " o", "'clock", "."]),
        ("中文English混合", ["中文", "English", "混合"]),
        ("北京市 Pascal", ["北京市", " Pascal"]),
        ("我AI模型v2.0很强it's", ["我", "AI", "模型", "v", "2", ".", "0", "很强", "it's"]),
        ("they'LL we'd x'sy", ["they'LL", " we'd", " x's", "y"]),
        ("fooBar FOObar XMLHttp", ["foo", "Bar", " FOObar", " XMLHttp"]),
        ("a  b\n\n  c \n", ["a", " ", " b", "\n\n", " ", " c", " \n"]),
        (" (x) --\n\nnext", [" (", "x", ")", " --\n\n", "next"]),
        ("١٢٣٤", ["١٢٣", "٤"]),
        ("<|im_end|>", ["<|", "im", "_end", "|>"]),
    ],
)
def test_pieces_by_hand(text: str, expected: list[str]) -> None:
    assert ours(text) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_those_of_another_library(text: str) -> None:
    assert ours(text) == pieces(text) == [found[0] for found in regex.finditer(APART, text, regex.V1)]
    assert "".join(ours(text)) == text


LETTERS = "aZßǅʰ'sTlLvéÉе\u0301 \t\r\n\u00a0\u30000१½.,!-_(<|我的々〇ア한ا🇫👩\u200d\u200f"


@given(st.text(alphabet=LETTERS, max_size=30))
def test_pieces_of_any_text(text: str) -> None:
    assert ours(text) == pieces(text) == [found[0] for found in regex.finditer(APART, text, regex.V1)]


def test_another_models_pattern_gives_other_pieces() -> None:
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    gpt4 = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    assert ours("hello world", gpt4) == ours("hello world")
    assert ours("It's 12345 o'clock.", gpt4) != ours("It's 12345 o'clock.")
    assert ours("我AI模型", gpt4) != ours("我AI模型")


def test_every_character_is_in_a_piece() -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x33500)]))  # beyond, no more letters
    assert Split(Regex(PATTERN), "removed").pre_tokenize_str(everything) == []
    assert Split(Regex(PATTERN.replace(r"|\s+", "")), "removed").pre_tokenize_str(everything) != []


# ---- conversions -----------------------------------------------------------------------------------------------------


class Converter(TikTokenConverter):  # type: ignore[misc]  # transformers has no types
    """Transformers' own, with the ranks read without another library."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        return read_ranks(Path(tiktoken_url))


NAMES = [IDS.get(id, f"<|reserved_token_{id}|>") for id in range(163584, 163840)]


def converted(directory: Path, names: list[str], **how: str) -> PreTrainedTokenizerFast:
    kimi(directory / "kimi", VOCABULARY)
    made = Converter(str(directory / "kimi" / "tiktoken.model"), extra_special_tokens=names, **how).converted()
    made.save(str(directory / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_transformers_own_conversion_is_refused_by_its_pattern(small: Tokenizer, tmp_path: Path) -> None:
    theirs = converted(tmp_path, NAMES)
    assert theirs("It's")["input_ids"] != small.encode("It's")
    said = "splits text by another pattern than Kimi's"
    with pytest.raises(BadText, match=rf"tokenizer\.json: it has Kimi's tokens and {said}.* Take Kimi's own tiktoken"):
        Tokenizer(tmp_path)
    with pytest.raises(BadText, match=said):
        Tokenizer.of(theirs)
    write(tmp_path, VOCABULARY)
    assert Tokenizer(tmp_path, specials="text").encode("It's") == small.encode("It's"), "Kimi's own is read first"


def test_a_conversion_without_named_tokens_is_known_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_KIMIS", ("<|im_middle|>", len(VOCABULARY)))
    converted(tmp_path, [])
    with pytest.raises(BadText, match="another pattern than Kimi's"):
        Tokenizer(tmp_path)


def test_a_conversion_by_kimis_pattern_is_read(small: Tokenizer, tmp_path: Path) -> None:
    theirs = converted(tmp_path, NAMES, pattern=PATTERN)
    for one in TEXTS:
        assert Tokenizer(tmp_path, specials="text").encode(one) == small.encode(one)
    assert Tokenizer.of(theirs).encode("It's") == small.encode("It's")


def test_the_same_pattern_is_another_models_own(tmp_path: Path) -> None:
    """GLM's and others' tokenizers have it, and are right."""
    theirs = converted(tmp_path, ["<|user|>", "[MASK]"])
    assert Tokenizer(tmp_path).encode("It's") == theirs("It's")["input_ids"]


# ---- names of special tokens -----------------------------------------------------------------------------------------


RESERVED = f"<|reserved_token_{len(VOCABULARY) + 100}|>"
READ_AS_TOKENS = [name for name in (*IDS.values(), RESERVED) if name != "[UNK]"]  # which no text may hold


@pytest.mark.parametrize("name", READ_AS_TOKENS)
def test_a_special_name_inside_a_text_is_told(tmp_path: Path, name: str) -> None:
    directory = kimi(tmp_path, VOCABULARY)
    plain = Tokenizer(directory, specials="text")
    tokenizer, one = Tokenizer(directory), f"a {name} b"
    for ask in (tokenizer.encode, tokenizer.spans, lambda text: tokenizer.batch(["x", text])):
        with pytest.warns(TextWarning) as said:
            ask(one)
        assert repr(one) in str(said[0].message)
        assert f"the name of the special token {name} is ordinary text" in str(said[0].message)
        assert said[0].filename == __file__, "at the user's own line"
    as_token = Tokenizer(directory, specials="token")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in ("a", "[BO S]", "<|im_", "reserved_token_700"):
            assert tokenizer.encode(other) == plain.encode(other) == as_token.encode(other)
        assert as_token.encode(one) == [*plain.encode("a "), plain.id(name), *plain.encode(" b")]
        assert plain.decode(plain.encode(one)) == one
        assert plain.id(name) not in plain.encode(one)
        tokenizer.specials = "token"
        assert tokenizer.encode(one) == as_token.encode(one)
    tokenizer.specials = "words"  # type: ignore[assignment]
    with pytest.raises(BadText, match="specials='words' is not one of text, token"):
        tokenizer.encode(one)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def expected(text: str) -> list[int]:
    """The ids of a text, by the plain loop over pieces of the other library."""
    return [id for piece in pieces(text) for id in plain(piece.encode(), RANKS)]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_plain_loop(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert ids == expected(text)
    assert b"".join(VOCABULARY[id] for id in ids) == text.encode()
    assert small.decode(ids) == text


def test_merges_take_part(small: Tokenizer) -> None:
    assert len(VOCABULARY) > 400
    assert {id for text in TEXTS for id in small.encode(text)} - set(range(300))
    assert sum(len(small.encode(text)) for text in TEXTS) < 0.6 * sum(len(text.encode()) for text in TEXTS)


@given(st.text(alphabet=LETTERS, min_size=1, max_size=40))
def test_ids_of_any_text(small: Tokenizer, text: str) -> None:
    assert small.encode(text) == expected(text)


def test_ids_of_many_texts(small: Tokenizer) -> None:
    rng = random.Random(0)
    known = "".join(TEXTS)
    for _ in range(1500):
        parts = [known[at : at + rng.randint(1, 9)] for at in (rng.randrange(len(known)) for _ in range(6))]
        text = "".join(parts)
        assert small.encode(text) == expected(text)


@pytest.mark.parametrize("seed", range(12))
def test_ranks_decide_whatever_their_order(tmp_path: Path, seed: int) -> None:
    """Overlapping tokens of two letters, and ranks that no training gave: of all that could be joined, the lowest."""
    rng = random.Random(seed)
    tokens = grown(["".join(rng.choices("ab", k=12)) for _ in range(20)], 30, seed)[256:]
    if seed % 2:
        rng.shuffle(tokens)
    ranks = {token: rank for rank, token in enumerate([*BYTES, *dict.fromkeys(tokens)])}
    tokenizer = Tokenizer(write(tmp_path, list(ranks)))
    for length in range(1, 11):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            assert tokenizer.encode(text) == plain(text.encode(), ranks), text


def test_a_piece_that_is_a_token_is_never_split(tmp_path: Path) -> None:
    tokens = [*BYTES, b"bc", b"abcd"]  # no two tokens make abcd
    tokenizer = Tokenizer(write(tmp_path, tokens))
    assert tokenizer.encode("abcd") == [257]
    assert tokenizer.encode("abcde") == [97, 256, 100, 101]


def test_places_of_tokens_that_share_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, [*BYTES, "你".encode()[1:]]))
    assert tokenizer.encode("é 你x") == [0xC3, 0xA9, 0x20, 0xE4, 256, 0x78]
    assert tokenizer.spans("é 你x") == [(0, 1), (0, 1), (1, 2), (2, 3), (2, 3), (3, 4)]
    labels = ["⟨C3⟩", "⟨A9⟩", "␣", "⟨E4⟩", "⟨BD⟩⟨A0⟩", "x"]
    assert [tokenizer.token(id) for id in tokenizer.encode("é 你x")] == labels


@pytest.mark.parametrize("text", [" ", "\n\n", "\t", "\u3000"])
def test_whitespace_is_text(small: Tokenizer, text: str) -> None:
    assert small.encode(text) == expected(text)


@pytest.mark.parametrize("text", ["", "a\ud800b"])
def test_what_is_no_text(small: Tokenizer, text: str) -> None:
    for ask in (small.encode, small.spans, lambda one: small.batch(["a", one])):
        with pytest.raises(BadText):
            ask(text)


@pytest.mark.parametrize("text", ["A" * 100_000, " " * 100_000 + "x", "字" * 100_000, "!" * 100_000 + "\n" * 100_000])
def test_long_runs_end(text: str) -> None:
    assert "".join(ours(text)) == text


# ---- special tokens --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As many ranks as Kimi K2 has: all bytes, all pairs, some threes."""
    pairs = map(bytes, itertools.product(range(256), repeat=2))
    threes = map(bytes, itertools.product(range(97, 256), repeat=3))
    tokens = [*BYTES, *pairs]
    tokens += itertools.islice(threes, 163584 - len(tokens))
    return Tokenizer(write(tmp_path_factory.mktemp("full"), tokens, IDS))


def test_special_tokens_have_kimis_ids(full: Tokenizer) -> None:
    assert len(full) == 163840
    assert {id: full.token(id) for id in IDS} == IDS
    assert {full.id(name): name for name in IDS.values()} == IDS
    reserved = [id for id in range(163584, 163840) if id not in IDS]
    assert [full.token(id) for id in reserved] == [f"<|reserved_token_{id}|>" for id in reserved]
    assert full.id("<|reserved_token_163600|>") == 163600


def test_labels_of_all_tokens_differ_and_are_read_back(full: Tokenizer) -> None:
    labels = [full.token(id) for id in range(len(full))]
    assert len(set(labels)) == len(full)
    assert [full.id(label) for label in labels[::13]] == list(range(0, len(full), 13))
    assert not any(char.isspace() or not char.isprintable() for label in labels for char in label)


def test_the_name_of_a_special_token_is_ordinary_text(small: Tokenizer) -> None:
    for name in [*IDS.values(), f"<|reserved_token_{len(VOCABULARY) + 5}|>"]:
        ids = small.encode(f"a{name} b")
        assert ids == expected(f"a{name} b")
        assert max(ids) < len(VOCABULARY)
        assert small.id(name) >= len(VOCABULARY)  # the control: it is a token


def test_nothing_is_put_in_front(small: Tokenizer, full: Tokenizer) -> None:
    for tokenizer in (small, full):
        assert tokenizer.start == "no BOS: position 0 is the text's first token"
        assert tokenizer.spans("When")[0] != (0, 0)


def test_without_a_config_all_are_reserved(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, BYTES))
    assert len(tokenizer) == 512
    assert [tokenizer.token(id) for id in (256, 511)] == ["<|reserved_token_256|>", "<|reserved_token_511|>"]


def test_kimis_own_file_is_believed_before_a_conversion(tmp_path: Path) -> None:
    assert Tokenizer.find(tmp_path) is None
    assert Tokenizer.find(tmp_path / "nowhere") is None
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    found = Tokenizer.find(tmp_path)
    assert found is not None
    assert len(found) == 410
    write(tmp_path, BYTES)
    assert Tokenizer(tmp_path).encode("Mary") == [*b"Mary"]
    assert Tokenizer(tmp_path / "tiktoken.model").encode("Mary") == [*b"Mary"]
    assert Tokenizer(tmp_path / "tokenizer.json").encode("Mary") == [1, found.id("Mary")]


# ---- files that are wrong --------------------------------------------------------------------------------------------

GOOD = lines([*BYTES, b"ab", b"abc"])


def without(at: int) -> list[bytes]:
    return GOOD[:at] + GOOD[at + 1 :]


@pytest.mark.parametrize(
    ("wrong", "line", "says"),
    [
        ([b"%%% 0", *GOOD[1:]], 1, "b'%%% 0' is not a token in base64"[1:]),
        ([*GOOD[:5], b"BQ==", *GOOD[6:]], 6, "is not a token in base64, a space and a rank"),
        ([*GOOD[:5], b"", *GOOD[6:]], 6, "is not a token in base64"),
        ([*GOOD[:5], b" 5", *GOOD[6:]], 6, "is not a token in base64"),
        ([*GOOD[:5], b"BQ= 5", *GOOD[6:]], 6, "is not a token in base64"),
        ([*GOOD[:5], b"B!Q== 5", *GOOD[6:]], 6, "is not a token in base64"),
        ([*GOOD[:5], "é 5".encode(), *GOOD[6:]], 6, "is not a token in base64"),
        ([*GOOD[:5], b"\xff\xfe 5", *GOOD[6:]], 6, "is not a token in base64"),
        (without(7), 8, "the rank is '8'; ranks count lines from 0, so 7 is due"),
        ([GOOD[0], *GOOD], 2, "so 1 is due"),
        ([*GOOD[:2], GOOD[3], GOOD[2], *GOOD[4:]], 3, "the rank is '3'"),
        ([*GOOD[:4], b"BA== 0004", *GOOD[5:]], 5, "the rank is '0004'"),
        ([*GOOD[:4], b"BA== " + b"9" * 6000, *GOOD[5:]], 5, "999'…; ranks"),
        ([*GOOD[:4], b"BA== 4.0", *GOOD[5:]], 5, "the rank is '4.0'"),
        ([*GOOD, b"YWI= 258"], 259, "the token ab again, after line 257"),
        ([*GOOD, b"A" * 4000 + b" 258"], 259, "a token of 3,000 bytes; at most 1,024"),
        (GOOD[:200], None, "56 of the 256 single bytes are no tokens, 0xC8 first"),
        ([], None, "256 of the 256 single bytes"),
    ],
)
def test_a_broken_rank_file(tmp_path: Path, wrong: list[bytes], line: int | None, says: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(GOOD))
    assert len(Tokenizer(tmp_path)) == 258 + 256
    file = tmp_path / "tiktoken.model"
    file.write_bytes(b"\n".join(wrong))
    with pytest.raises(BadText) as error:
        Tokenizer(tmp_path)
    assert str(error.value).startswith(f"{file}: " if line is None else f"{file}:{line}: ")
    assert says in str(error.value)
    assert len(str(error.value)) < len(str(file)) + 200


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    for name, most in (("tiktoken.model", 2**24), ("tokenizer.json", 2**27)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(most + 1)  # a hole: nothing is written
        with pytest.raises(BadText, match=rf"{name}: {most + 1:,} bytes; a tokenizer's file has at most {most:,}"):
            Tokenizer(tmp_path / name)


def test_too_many_merges_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [*BYTES, *(b"a" * n for n in range(2, 1025))])
    with pytest.raises(BadText, match=r"tiktoken\.model: its tokens split into tokens in too many ways"):
        Tokenizer(tmp_path)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").mkdir()
    with pytest.raises(BadText, match=r"tiktoken\.model: there is no tokenizer"):
        Tokenizer(tmp_path)
    write(tmp_path / "other", BYTES)
    os.mkfifo(tmp_path / "other" / "tokenizer_config.json")  # to read it would never end
    with pytest.raises(BadText, match=r"tokenizer_config\.json: it is no file"):
        Tokenizer(tmp_path / "other")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"{", ":1: not JSON: Expecting property name"),
        (b'{\n"a": 1,\n}', ":3: not JSON"),
        (b"\xff\xfe{}", ": not JSON ('utf-8' codec can't decode"),
        (b"[" * 100_000, ": not JSON (it is nested too deeply)"),
        (b'{"a": ' + b"9" * 5000 + b"}", ": not JSON (Exceeds the limit"),
        (b"[]", ": it holds list; it should be an object"),
        (b'{"added_tokens_decoder": []}', ": added_tokens_decoder is list"),
        (b'{"added_tokens_decoder": null}', ": added_tokens_decoder is NoneType"),
        (b'{"added_tokens_decoder": {"255": {"content": "x"}}}', ": added_tokens_decoder has the id '255'"),
        (b'{"added_tokens_decoder": {"512": {"content": "x"}}}', "special tokens are 256 to 511"),
        (b'{"added_tokens_decoder": {"0300": {"content": "x"}}}', "has the id '0300'"),
        ('{"added_tokens_decoder": {"３００": {"content": "x"}}}'.encode(), "has the id '３００'"),
        (b'{"added_tokens_decoder": {"' + b"9" * 5000 + b'": {}}}', "has the id '9999"),
        (b'{"added_tokens_decoder": {"300": "x"}}', "id 300: the content is None"),
        (b'{"added_tokens_decoder": {"300": {"content": 5}}}', "id 300: the content is 5"),
        (b'{"added_tokens_decoder": {"300": {"content": ""}}}', "id 300: the content is ''"),
        (b'{"added_tokens_decoder": {"300": {"content": "a\\ud800"}}}', "id 300: the content is 'a\\ud800'"),
        (
            b'{"added_tokens_decoder": {"300": {"content": "ab"}}}',
            "the content is 'ab', which is an ordinary token too",
        ),
        (
            b'{"added_tokens_decoder": {"300": {"content": "x!"}, "301": {"content": "x!"}}}',
            "the ids 300 and 301 are both called 'x!'",
        ),
        (
            b'{"added_tokens_decoder": {"300": {"content": "<|reserved_token_301|>"}}}',
            "the ids 300 and 301 are both called",
        ),
    ],
)
def test_a_broken_config(tmp_path: Path, config: bytes, says: str) -> None:
    write(tmp_path, BYTES)
    if b'"ab"' in config:
        write(tmp_path, [*BYTES, b"ab"])
    file = tmp_path / "tokenizer_config.json"
    file.write_bytes(config)
    with pytest.raises(BadText) as error:
        Tokenizer(tmp_path)
    assert str(error.value).startswith(f"{file}:")
    assert str(error.value).count(str(file)) == 1
    assert says in str(error.value)
    assert len(str(error.value)) < len(str(file)) + 300


def test_spoilt_files_end_in_a_tokenizer_or_our_error(tmp_path: Path) -> None:
    rng = random.Random(0)
    write(tmp_path, [*BYTES, b"ab", b"abc"], {300: "<|im_end|>", 301: "[BOS]"})
    names = ["tiktoken.model", "tokenizer_config.json"]
    whole = {name: (tmp_path / name).read_bytes() for name in names}
    ends = Counter[str]()
    for i in range(300):
        name = names[i % 2]
        data = bytearray(whole[name])
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[at] = rng.choice([*b'019"{}[]:, \n=A', rng.randrange(256)])
        else:
            data[at : at + rng.randint(0, 30)] = rng.choice([b"", b"null", b"-1", b'""', b"\\ud800", b"\n", b"\x00"])
        (tmp_path / name).write_bytes(data)
        try:
            ends["read"] += bool(Tokenizer(tmp_path).encode("abc"))
        except BadText as error:
            ends["refused"] += str(error).startswith(f"{tmp_path / name}:")
        (tmp_path / name).write_bytes(whole[name])
    assert ends.total() == 300
    assert min(ends.values()) > 20


# ---- the real file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [1008, 10484, 318, 15383, 387]),
        ("Hello, world!", [19180, 11, 2695, 0]),
        ("你好世界", [33845, 2243]),
        ("1234567890", [6694, 12972, 16242, 15]),
        ("中文English混合", [16717, 44372, 13935]),
    ],
)
def test_ids_of_kimi_k2(text: str, ids: list[int]) -> None:
    directory = os.environ.get("K2PROBE_KIMI_TOKENIZER")
    if not directory:
        pytest.skip("needs Kimi K2's tiktoken.model; K2PROBE_KIMI_TOKENIZER names a directory that holds it")
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode(text) == ids
    assert {id: tokenizer.token(id) for id in IDS} == IDS
    assert len(tokenizer) == 163840
    assert json.loads((Path(directory) / "tokenizer_config.json").read_text(encoding="utf-8"))
