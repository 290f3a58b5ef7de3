"""Kimi's tokenizer files: the ranks in ``tiktoken.model``, and the names of the special tokens behind them.

Nothing of the checkpoint is executed. `probe.text` makes a byte-level BPE of what is read here: ``tiktoken`` joins,
of two neighbours that are a token together, those whose token has the lowest rank, so every split of a token into two
is a merge, in the order of ranks; and a piece that is a token as a whole is never split.

Moonshot's own code cuts runs of more than 25,000 characters without whitespace, and texts every 400,000 characters,
before it looks for pieces; here they stay whole.
"""

from __future__ import annotations

import json
from binascii import Error, a2b_base64
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from probe.errors import BadText
from probe.headers import parsed
from probe.labels import label, spelt, unspelt

RESERVED = 256
"""Special tokens, whose ids follow the ranks; those without a name are called after their id."""

_NO_CASE = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"  # && is of all that stands before it in the class
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_NO_CASE}]", rf"[\p{{Ll}}{_NO_CASE}]"
_LEAD, _ENDING = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""The pieces that are encoded apart: runs of Han; words of any other script, new at a capital after small letters, with
one character before them and an English contraction after them; digits in threes; punctuation; newlines; spaces."""

_MOST_BYTES = 2**24  # of a rank file or a config: six times Kimi's
_MOST_IN_TOKEN = 2**10
_MOST_IN_MERGES = 2**26  # bytes of the tokens that merges make: twenty times Kimi's


def read(file: Path, most: int = _MOST_BYTES) -> bytes:
    """A file of a tokenizer, whole, without a byte order mark.

    Raises:
        BadText: it cannot be read, or is larger than any tokenizer's.
    """
    if not file.is_file():
        raise BadText(f"{file}: it is no file.")
    try:
        size = file.stat().st_size
        if size > most:
            raise BadText(f"{file}: {size:,} bytes; a tokenizer's file has at most {most:,}.")
        return file.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise BadText(f"{file}: can't be read ({error.strerror or error}).") from None


def read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens of a ``tiktoken.model`` by rank, from 0; a token is any bytes.

    Raises:
        BadText: it is not a token in base64 and its rank a line; a rank is missing, doubled or out of order; a token
            comes twice; one of the 256 single bytes is missing. By file and line.
    """
    ranks: dict[bytes, int] = {}
    for rank, line in enumerate(read(file).splitlines()):
        try:
            token = _token(line, rank)
            if token in ranks:
                raise BadText(f"the token {label(token)} again, after line {ranks[token] + 1}.")
        except BadText as fact:
            raise BadText(f"{file}:{rank + 1}: {fact}") from None
        ranks[token] = rank
    if lost := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise BadText(f"{file}: {len(lost)} of the 256 single bytes are no tokens, 0x{lost[0]:02X} first; it is cut.")
    return ranks


def _token(line: bytes, rank: int) -> bytes:
    """The token of one line."""
    text, _, given = line.partition(b" ")
    try:
        token = a2b_base64(text, strict_mode=True)
    except Error:
        token = b""
    if not token or not given:
        raise BadText(f"{_short(line)} is not a token in base64, a space and a rank.")
    if given != str(rank).encode():
        raise BadText(f"the rank is {_short(given)}; ranks count lines from 0, so {rank} is due.")
    if len(token) > _MOST_IN_TOKEN:
        raise BadText(f"a token of {len(token):,} bytes; at most {_MOST_IN_TOKEN:,} are read.")
    return token


def _short(data: bytes) -> str:
    return repr(data[:40])[1:] + ("…" if len(data) > 40 else "")


def merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[str, str]]:
    """Every split of a token into two tokens, in the order of the tokens' ranks, spelt by `labels.spelt`.

    Raises:
        BadText: there are more than memory is given for.
    """
    words = {token: spelt(token) for token in ranks}
    total = 0
    for token in ranks:
        for cut in range(1, len(token)):
            head, tail = words.get(token[:cut]), words.get(token[cut:])
            if head is not None and tail is not None:
                total += len(token)
                if total > _MOST_IN_MERGES:
                    raise BadText("its tokens split into tokens in too many ways; no trained vocabulary does.")
                yield head, tail


def read_config(file: Path) -> dict[str, Any]:
    """A ``tokenizer_config.json``; empty where there is none.

    Raises:
        BadText: it is no JSON object, by file and line; or a key is in it twice.
    """
    if not file.exists():
        return {}
    try:
        config = parsed(read(file))
    except json.JSONDecodeError as error:
        raise BadText(f"{file}:{error.lineno}: not JSON: {error.msg} at column {error.colno}.") from None
    except ValueError as error:  # no UTF-8; a number too long; brackets too deep; a key twice
        raise BadText(f"{file}: not JSON ({error}).") from None
    if not isinstance(config, dict):
        raise BadText(f"{file}: it holds {type(config).__name__}; it should be an object.")
    return config


def special_names(config: Mapping[str, Any], ranks: Mapping[bytes, int]) -> list[str]:
    """The names of the special tokens, whose ids follow the ranks.

    Args:
        config: a ``tokenizer_config.json``, whose ``added_tokens_decoder`` maps ids to ``{"content": name}``.

    Raises:
        BadText: an id is none of theirs; a name is no text, or another token's too.
    """
    first, last = len(ranks), len(ranks) + RESERVED - 1
    names = {str(id): f"<|reserved_token_{id}|>" for id in range(first, last + 1)}
    table = config.get("added_tokens_decoder", {})
    if not isinstance(table, Mapping):
        raise BadText(f"added_tokens_decoder is {type(table).__name__}; it should map ids to names.")
    for id, entry in table.items():
        name = entry.get("content") if isinstance(entry, Mapping) else None
        if id not in names:
            raise BadText(f"added_tokens_decoder has the id {id!r:.40}; special tokens are {first} to {last}.")
        if not isinstance(name, str) or not name or any("\ud800" <= char <= "\udfff" for char in name):
            raise BadText(f"added_tokens_decoder, id {id}: the content is {name!r:.80}; it should be a name.")
        if name.encode() in ranks or unspelt(name) in ranks:
            raise BadText(
                f"added_tokens_decoder, id {id}: the content is {name!r:.80}, which is an ordinary token too."
            )
        names[id] = name
    seen: dict[str, str] = {}
    for id, name in names.items():
        if name in seen:
            raise BadText(f"added_tokens_decoder: the ids {seen[name]} and {id} are both called {name!r:.80}.")
        seen[name] = id
    return list(seen)
