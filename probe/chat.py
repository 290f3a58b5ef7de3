"""Kimi's chat format, from a table of special tokens; a checkpoint's template is never executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from probe.errors import BadText, asking

OPENING = {"system": "<|im_system|>", "user": "<|im_user|>", "assistant": "<|im_assistant|>"}
"""The special token that opens a role's message; the role's name follows as text, `MIDDLE`, the content, `END`."""

MIDDLE, END = "<|im_middle|>", "<|im_end|>"

Encode = Callable[[str], list[int]]


class Chat(NamedTuple):
    """Messages as tokens, [1 T] on the CPU, and their spans, for ``model.run(chat.tokens, spans=[chat.spans])``.

    ``text`` is for reading: encoded as a text, its special tokens would be ordinary words.
    """

    text: str
    tokens: Tensor
    spans: Mapping[str, range]


def render(messages: Sequence[Mapping[str, Any]], special: Encode, ordinary: Encode, reply: bool) -> Chat:
    """Messages in Kimi's format; see `probe.text.Tokenizer.chat`, which gives the two ways to encode: a special token
    by its name, and a text whatever it holds."""

    def head(role: str) -> list[tuple[str, Encode]]:
        return [(OPENING[role], special), (role, ordinary), (MIDDLE, special)]

    end = [(END, special)]
    parts: list[tuple[str, list[tuple[str, Encode]]]] = []  # a span and what it is made of
    count = Counter[str]()
    after, before = "", list[tuple[str, Encode]]()
    for role, content in _checked(messages):
        count[role] += 1
        name = role if count[role] == 1 else f"{role}{count[role]}"
        parts += [(after, before + head(role)), (name, [(content, ordinary)])]
        after, before = f"after_{name}", end
    if not reply:
        parts.append((after, end))
    elif role != "assistant":
        parts.append((after, end + head("assistant")))

    text, ids, spans = "", list[int](), dict[str, range]()
    for name, pieces in parts:
        first = len(ids)
        for piece, encode in pieces:
            with asking(name or "the first message"):
                ids += encode(piece)
            text += piece
        if name:
            spans[name] = range(first, len(ids))
    return Chat(text, torch.tensor([ids]), spans)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Role and content of each message.

    Raises:
        BadText: there is none, or one is not ``{"role": …, "content": …}``; the error counts from 0.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadText(f"a chat is a list of messages, {{'role': …, 'content': …}}; this one is {messages!r:.80}.")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise BadText(f"message {i} is {message!r:.80}; it should have a role and a content, and nothing else.")
        role, content = message["role"], message["content"]
        if role not in [*OPENING]:  # a role that is a list is compared, not hashed
            raise BadText(f"message {i} has the role {role!r:.80}; roles are {', '.join(OPENING)}.")
        if not isinstance(content, str) or not content:
            raise BadText(
                f"message {i} ({role}) says {content!r:.80}; the content should be text. Leave out empty ones."
            )
        checked.append((role, content))
    return checked
