"""Text to tokens and back: a ``tokenizer.json``, and token strings fit for labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tokenizers import Tokenizer as _Tokenizer
from torch import Tensor

from probe.errors import BadText


class Batch(NamedTuple):
    """Rows of tokens, padded; ``keep`` is true where a token is real, None where all are."""

    tokens: Tensor
    keep: Tensor | None


class Tokenizer:
    """The tokenizer of a checkpoint directory.

    Args:
        path: a ``tokenizer.json``, or a directory that holds one.

    Raises:
        BadText: there is none, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise BadText(f"{file}: there is no tokenizer; give token ids, or a directory with a tokenizer.json.")
        try:
            self._tokenizer = _Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise BadText(f"{file}: not a readable tokenizer ({error}).") from None
        self._know_unknown("<unk>", "[UNK]")

    @classmethod
    def of(cls, tokenizer: Any) -> Tokenizer:
        """A tokenizer that is loaded already: one of ours, as it is, or a copy of a fast one of transformers.

        Raises:
            BadText: it is neither; a slow one has no ``backend_tokenizer``.
        """
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, _Tokenizer):
            raise BadText(
                f"{type(tokenizer).__name__} is no fast tokenizer (it has no backend_tokenizer) and none of ours;"
                " give a Tokenizer, or None and token ids."
            )
        made = cls.__new__(cls)
        made._tokenizer = _Tokenizer.from_str(backend.to_str())
        made._tokenizer.no_padding()  # a call of theirs may have left padding or a length limit on
        made._tokenizer.no_truncation()
        roles = [getattr(tokenizer, f"{role}_token", None) for role in ("bos", "eos", "pad")]
        word = getattr(tokenizer, "unk_token", None)
        made._know_unknown("<unk>", "[UNK]", *([] if word is None or word in roles else [str(word)]))
        return made

    def _know_unknown(self, *words: str) -> None:
        self._unknown = {i for word in words if (i := self._tokenizer.token_to_id(word)) is not None}

    def encode(self, text: str) -> list[int]:
        """Token ids, with whatever the tokenizer itself puts in front.

        Raises:
            BadText: the text is empty, or has unknown words (they would all look alike to the model).
        """
        return self._encoding(text).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The character range of each token, half-open; empty for tokens that are put in front."""
        return [(int(a), int(b)) for a, b in self._encoding(text).offsets]

    def _encoding(self, text: str):  # type: ignore[no-untyped-def]
        made = self._tokenizer.encode(text)
        if not text.strip() or not made.ids:
            raise BadText("the text is empty.")
        lost = [text[a:b] for i, (a, b) in zip(made.ids, made.offsets, strict=True) if i in self._unknown]
        if lost:
            words = ", ".join(repr(word) for word in dict.fromkeys(lost))
            raise BadText(f"this model's vocabulary lacks {words}; rephrase, or use another model.")
        return made

    def batch(self, texts: Sequence[str], side: Literal["right", "left"] = "right") -> Batch:
        """Texts of any lengths as one padded batch; pads on the ``right`` or the ``left``.

        Raises:
            BadText: there are no texts, or one of them cannot be encoded.
        """
        if side not in ("right", "left"):
            raise ValueError(f"side: {side!r} is neither 'right' nor 'left'.")
        if not texts:
            raise BadText("there are no texts.")
        rows = [self.encode(text) for text in texts]
        length = max(map(len, rows))
        pads = [[0] * (length - len(row)) for row in rows]
        tokens = torch.tensor(
            [row + pad if side == "right" else pad + row for row, pad in zip(rows, pads, strict=True)]
        )
        if all(len(row) == length for row in rows):
            return Batch(tokens, None)
        real = [[1] * len(row) for row in rows]
        keep = torch.tensor([r + p if side == "right" else p + r for r, p in zip(real, pads, strict=True)]).bool()
        return Batch(tokens, keep)

    def id(self, word: str) -> int:
        """The id of exactly one token, for answers.

        Raises:
            BadText: the word is not one token.
        """
        found = self._tokenizer.token_to_id(word)
        if found is None:
            raise BadText(f"{word!r} is not one token of this vocabulary.")
        return int(found)

    def token(self, id: int) -> str:
        """The token of an id, for labels: spaces as ␣, newlines as ⏎."""
        text = self._tokenizer.id_to_token(id) if 0 <= id < 2**32 else None  # it takes no other number
        if text is None:
            raise BadText(f"token id {id} is outside the vocabulary of {self._tokenizer.get_vocab_size()}.")
        return str(text).replace(" ", "␣").replace("\n", "⏎")

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())
