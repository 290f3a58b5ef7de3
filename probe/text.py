"""Text to tokens and back: a ``tokenizer.json`` or Kimi's ``tiktoken.model``, chats, and token strings for labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from tokenizers import AddedToken, Encoding, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as _Tokenizer
from torch import Tensor

from probe import chat, labels, tiktoken
from probe.chat import Chat
from probe.errors import BadText, asking, warn_of_text
from probe.headers import expanded, parsed, told, uncollected

_FILES = ("tiktoken.model", "tokenizer.json")
"""What holds a tokenizer, by falling trust: beside Kimi's own file, a ``tokenizer.json`` is a conversion, and the usual
one splits text by another model's pattern."""

_CONFIG = "tokenizer_config.json"
_MOST_BYTES = 2**27  # of a tokenizer.json; those of models with a quarter of a million tokens have a quarter of that


Specials = Literal["text", "token"]


class _Read(NamedTuple):
    """A text's tokens, and the characters of each."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Batch(NamedTuple):
    """Rows of tokens, padded; ``keep`` is true where a token is real, None where all are."""

    tokens: Tensor
    keep: Tensor | None


class Tokenizer:
    """The tokenizer of a checkpoint directory.

    A ``tokenizer.json`` is taken as it is, and puts in front what it or the ``tokenizer_config.json`` beside it says.
    Of a ``tiktoken.model`` only the ranks are read, and of the config beside it the names of special tokens; nothing is
    put in front, and the name of a special token inside a text is ordinary text: `chat` and ids alone bring them in.

    Args:
        path: one of these files, or a directory that holds one.
        specials: what the name of a special token inside a text is: ordinary ``text``, or the ``token`` itself. None:
            what it is by the file, and a `probe.errors.TextWarning` says so where it is ordinary text. In a chat's
            messages it is that always. This and the next may be set later, too.
        second_bos: whether a text that begins with what is put in front, a BOS, gets it there once more. None: it
            does, and a `probe.errors.TextWarning` says so.

    Raises:
        BadText: there is none, or it cannot be read; by file and line. Or it is a conversion of Kimi's that splits text
            by another pattern.
    """

    specials: Specials | None = None
    second_bos: bool | None = None

    def __init__(self, path: str | Path, *, specials: Specials | None = None, second_bos: bool | None = None) -> None:
        self.specials, self.second_bos = specials, second_bos
        path = expanded(path)
        file = (_file_in(path) or path / _FILES[-1]) if path.is_dir() else path
        if not file.is_file():
            raise BadText(
                f"{file}: there is no tokenizer; give token ids, or a directory with a {' or '.join(_FILES)}."
            )
        if file.suffix == ".model":
            self._keep(_from_ranks(file), "[UNK]")
        else:
            backend = _from_json(file)
            with _told(f"{file}: not a readable tokenizer"), asking(str(file)):
                _check_pieces(backend)
            self._keep(backend, "<unk>", "[UNK]")
            self._begin(file.parent / _CONFIG)

    @classmethod
    def find(cls, directory: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint directory, or None where it has none.

        Raises:
            BadText: it has one that cannot be read.
        """
        return cls(directory) if _file_in(expanded(directory)) else None

    @classmethod
    def of(cls, tokenizer: Any) -> Tokenizer:
        """A tokenizer that is loaded already: one of ours, as it is, or a copy of a fast one of transformers.

        Raises:
            BadText: it is neither; a slow one has no ``backend_tokenizer``. Or it is a conversion of Kimi's that splits
                text by another pattern.
        """
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, _Tokenizer):
            raise BadText(
                f"{type(tokenizer).__name__} is no fast tokenizer (it has no backend_tokenizer) and none of ours;"
                " give a Tokenizer, or None and token ids."
            )
        _check_pieces(backend)
        copy = _Tokenizer.from_str(backend.to_str())
        copy.encode_special_tokens = backend.encode_special_tokens  # which is no part of the string
        roles = [getattr(tokenizer, f"{role}_token", None) for role in ("bos", "eos", "pad")]
        word = getattr(tokenizer, "unk_token", None)
        made = cls.__new__(cls)
        made._keep(copy, "<unk>", "[UNK]", *([] if word is None or word in roles else [str(word)]))
        return made

    def _keep(self, backend: _Tokenizer, *unknown: str) -> None:
        backend.no_padding()  # a file, or a call of theirs, may have left padding or a length limit on
        backend.no_truncation()
        self._tokenizer = backend
        self._unknown = {i for word in unknown if (i := backend.token_to_id(word)) is not None}
        self._bytes = isinstance(backend.decoder, decoders.ByteLevel)
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._named = {name: id for id, name in self._added.items()}
        names = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._special_name = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @property
    def start(self) -> str:
        """What position 0 is, in a sentence: it takes much attention and has a size of its own, whatever it is."""
        front = [self.token(id) for id in self._in_front()]
        if not front:
            return "no BOS: position 0 is the text's first token"
        return f"{' '.join(front)} is put in front: position 0 is {front[0]}"

    def _in_front(self) -> list[int]:
        """The ids that are put in front of a text; of any, so of the first word that can be encoded."""
        for id in range(min(len(self), 1000)):
            with suppress(BadText):
                with _told("it can't decode"):
                    text = self._tokenizer.decode([id])
                made = self._encoding(text)
                empty = takewhile(lambda place: place[0] == place[1], made.offsets)
                return [lead for lead, _ in zip(made.ids, empty, strict=False)]
        return []

    def _begin(self, file: Path) -> None:
        """Put a BOS in front where the config wants one and the tokenizer's own file, as DeepSeek's, leaves it out."""
        config = tiktoken.read_config(file)
        bos = config.get("bos_token")
        name = bos.get("content") if isinstance(bos, Mapping) else bos
        if config.get("add_bos_token") is not True or name is None or self._in_front():
            return
        if not isinstance(name, str) or name.encode() not in self._named:
            raise BadText(f"{file}: bos_token is {name!r:.80}, which is no special token of the tokenizer beside it.")
        pair = (name, self._named[name.encode()])
        template = processors.TemplateProcessing(single=[name, "$A"], special_tokens=[pair])
        own = self._tokenizer.post_processor
        self._tokenizer.post_processor = processors.Sequence([own, template]) if own else template

    def encode(self, text: str) -> list[int]:
        """Token ids, with whatever the tokenizer itself puts in front.

        Raises:
            BadText: the text is empty, or has unknown words (they would all look alike to the model).
        """
        return self._read(text).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The character range of each token, half-open; empty for tokens that are put in front. Tokens that share a
        character's bytes have that character each."""
        return self._read(text).spans

    def _read(self, text: str, *, plain: bool = False) -> _Read:
        """A text's tokens, after saying what of them may not be meant; ``plain`` as for `_encoding`."""
        made = self._encoding(text, plain=plain)
        ids, spans = made.ids, [(int(a), int(b)) for a, b in made.offsets]
        if self.specials != "text" and (plain or self._as_text) and (name := self._special_name.search(text)):
            other = "" if plain else ", and 'token' makes it the token"
            warn_of_text(
                f"in the text {text!r:.80} the name of the special token {name[0]} is ordinary text;"
                f" tokenizer.specials = 'text' says that it is meant{other}."
            )
        first = next(i for i, (a, b) in enumerate(spans) if a < b)
        if ids[first] not in self._added or ids[first] not in ids[:first] or self.second_bos:
            return _Read(ids, spans)
        if self.second_bos is None:
            warn_of_text(
                f"the text {text!r:.80} begins with {self.token(ids[first])}, and gets another in front;"
                " tokenizer.second_bos = True says that it is meant, and False leaves it out."
            )
            return _Read(ids, spans)
        again = ids.index(ids[first])
        return _Read(ids[:again] + ids[first:], spans[:again] + spans[first:])

    @property
    def _as_text(self) -> bool:
        """Whether the name of a special token inside a text is ordinary text."""
        if self.specials not in (None, *get_args(Specials)):
            raise BadText(f"specials={self.specials!r} is not one of {', '.join(get_args(Specials))}.")
        return bool(self._tokenizer.encode_special_tokens) if self.specials is None else self.specials == "text"

    def _encoding(self, text: str, *, plain: bool = False) -> Encoding:
        """``plain``: nothing is put in front, and names of special tokens are ordinary text."""
        kept = self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = plain or self._as_text
        try:
            with _told(f"this tokenizer can't encode {text!r:.80}"):
                made = self._tokenizer.encode(text, add_special_tokens=not plain)
        finally:
            self._tokenizer.encode_special_tokens = kept
        if not any(a < b for a, b in made.offsets):
            raise BadText("the text is empty.")
        lost = [text[a:b] for i, (a, b) in zip(made.ids, made.offsets, strict=True) if i in self._unknown]
        if lost:
            words = ", ".join(f"{word!r:.80}" for word in [*dict.fromkeys(lost)][:10])
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

    def chat(self, messages: Sequence[Mapping[str, Any]], reply: bool = True) -> Chat:
        """Messages as tokens in Kimi's format: ``<|im_user|>user<|im_middle|>`` content ``<|im_end|>``, for each.

        What a content holds is ordinary text, the names of special tokens too. No message is added: where Kimi's own
        template would put a default system message first, give one. Models that think go on with ``<think>`` or
        ``<think></think>``, which is not added either.

        The spans: each content under its role, and under ``after_`` and the role what stands between it and the next
        content (or the end), the tokens that close one message and open another. The second message of a role is
        ``user2``, and so on, however many there are.

        Args:
            messages: ``{"role": "system", "user" or "assistant", "content": text}``.
            reply: the assistant speaks next: its message is opened, or left open where the last message is its own.
                False: all are closed.

        Raises:
            BadText: a message is something else, or this tokenizer lacks Kimi's special tokens.
        """
        return chat.render(messages, self._special, lambda text: self._read(text, plain=True).ids, reply)

    def _special(self, name: str) -> list[int]:
        if name.encode() not in self._named:
            raise BadText(f"this tokenizer has no special token {name}, which Kimi's chat format is made of.")
        return [self._named[name.encode()]]

    def id(self, word: str) -> int:
        """The id of exactly one token, for answers: by its text, by its label, or by a special token's name. Where a
        text could be either, the label's signs are meant.

        Raises:
            BadText: the word is not one token.
        """
        for data in (labels.unlabel(word), word.encode("utf-8", "surrogatepass")):
            text = labels.spelt(data) if self._bytes else data.decode("utf-8", "backslashreplace")
            found = self._named.get(data, self._tokenizer.token_to_id(text))
            if found is not None:
                return int(found)
        raise BadText(f"{word!r} is not one token of this vocabulary.")

    def token(self, id: int) -> str:
        """The token of an id as a label, which `id` reads back; see `probe.labels.label`.

        Raises:
            BadText: there is no such token.
        """
        text = self._tokenizer.id_to_token(id) if 0 <= id < 2**32 else None  # it takes no other number
        if text is None:
            raise BadText(f"token id {id} is outside the vocabulary of {len(self)}.")
        return labels.label(labels.unspelt(text) if self._bytes and id not in self._added else text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, those outside the text (``<bos>``) among them.

        Raises:
            BadText: there is no such token.
        """
        for id in ids:
            self.token(id)  # the library leaves out what it does not know
        with _told("this tokenizer can't decode these tokens"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())


# ---- files -----------------------------------------------------------------------------------------------------------


def _file_in(directory: Path) -> Path | None:
    return next((directory / name for name in _FILES if (directory / name).exists()), None)


def _from_ranks(file: Path) -> _Tokenizer:
    """A ``tiktoken.model`` as a byte-level BPE."""
    ranks = tiktoken.read_ranks(file)
    with asking(str(file)):
        merges = list(tiktoken.merges(ranks))
    config = tiktoken.read_config(file.parent / _CONFIG)
    with asking(str(file.parent / _CONFIG)):
        names = tiktoken.special_names(config, ranks)
    vocabulary = {labels.spelt(token): rank for token, rank in ranks.items()}
    made = _Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([_pieces(), as_bytes])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    made.encode_special_tokens = True
    return made


def _pieces() -> Any:  # the library's pre-tokenizers have no common type
    return pre_tokenizers.Split(Regex(tiktoken.PATTERN), "isolated")


_KIMIS = "<|im_middle|>", 163_584
"""What tells Kimi's vocabulary: a special token that no other has, and how many tokens stand before those."""

_ANY_PIECE = "It's 12345 o'clock. 我AI模型v2.0很强it's they'LL\r\n\n  fooBar FOObar (x) --\n end "


def _check_pieces(backend: _Tokenizer) -> None:
    """Refuse a conversion of Kimi's tokenizer that splits a text into other pieces than the original.

    Raises:
        BadText: it is one.
    """
    name, ranks = _KIMIS
    if backend.token_to_id(name) is None and backend.get_vocab_size(with_added_tokens=False) != ranks:
        return
    theirs = backend.pre_tokenizer.pre_tokenize_str(_ANY_PIECE) if backend.pre_tokenizer else []
    ours = _pieces().pre_tokenize_str(_ANY_PIECE)
    if [span for _, span in theirs] != [span for _, span in ours]:
        raise BadText(
            "it has Kimi's tokens and splits text by another pattern than Kimi's, as transformers' own conversion does:"
            " contractions and Han text get other ids than the model was trained with. Take Kimi's own tiktoken.model:"
            " beside a tokenizer.json it is read first."
        )


def _from_json(file: Path) -> _Tokenizer:
    data = tiktoken.read(file, _MOST_BYTES)
    with _told(f"{file}: not a readable tokenizer"):
        with uncollected():
            parsed(data)  # of a key that is there twice the library takes the last
        return _Tokenizer.from_buffer(data)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What the library raises, in our words: bare exceptions, and where its Rust panics, one that is no `Exception`."""
    try:
        yield
    except BadText:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadText(f"{what} ({told(error)}).") from None
