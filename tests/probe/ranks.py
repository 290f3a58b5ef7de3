"""Rank files for tests, and tiktoken's way to encode in its plainest form."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

IDS = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163590: "<|start_header_id|>",
    163591: "<|end_header_id|>",
    163593: "[EOT]",
    163594: "<|im_system|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163601: "<|im_middle|>",
    163838: "[UNK]",
    163839: "[PAD]",
}
"""Kimi K2's named special tokens."""

BYTES = [bytes([byte]) for byte in range(256)]


def plain(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """The tokens of one piece: itself if it is one; else its bytes, of which the two neighbours whose token has the
    lowest rank are joined, the first such two, until none are a token."""
    parts = [piece] if piece in ranks else [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        joined = [ranks.get(a + b, 1 << 40) for a, b in pairwise(parts)]
        at = joined.index(min(joined))
        if joined[at] == 1 << 40:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


def grown(pieces: Sequence[str], tries: int, seed: int) -> list[bytes]:
    """The 256 bytes and more tokens, each made of two neighbours in one of the pieces as it is encoded so far."""
    rng = random.Random(seed)
    ranks = {token: rank for rank, token in enumerate(BYTES)}
    for _ in range(tries):
        tokens = list(ranks)
        ids = plain(rng.choice(pieces).encode(), ranks)
        if len(ids) > 1:
            at = rng.randrange(len(ids) - 1)
            ranks[tokens[ids[at]] + tokens[ids[at + 1]]] = len(ranks)
    return list(ranks)


def lines(tokens: Sequence[bytes]) -> list[bytes]:
    """The lines of a rank file."""
    return [b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


def write(directory: Path, tokens: Sequence[bytes], names: Mapping[int, str] | None = None) -> Path:
    """A directory with a ``tiktoken.model``, and a ``tokenizer_config.json`` where special tokens have names."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines(tokens)) + b"\n")
    if names is not None:
        table: dict[str, Any] = {str(id): {"content": name, "special": True} for id, name in names.items()}
        config = json.dumps({"added_tokens_decoder": table, "bos_token": "[BOS]"})
        (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return directory


def kimi(directory: Path, tokens: Sequence[bytes]) -> Path:
    """The same with Kimi's names, as far behind the ranks as behind Kimi's."""
    return write(directory, tokens, {id - 163584 + len(tokens): name for id, name in IDS.items()})
