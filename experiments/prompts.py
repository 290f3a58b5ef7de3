"""Prompts: rows of text with an answer, a wrong answer and named spans; checked when they are made, grouped by shape.

A row's *spans* are character ranges in its text, or the slots of the template that it is made from; the tokenizer turns
them into token positions, in clean and corrupt both. By its spans a prompt is aligned with its counterpart, whatever
their lengths: ``patch("x_mid", 2, source=corrupt, T="subject")`` takes the one's subject to the other's.

A *shape* is a template, a number of tokens and the positions of the spans: prompts of one shape can be compared
position by position. Reference prompts, which resampling takes values from, are prompts of the same shape and another
text.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import islice, permutations
from pathlib import Path
from string import Formatter
from textwrap import shorten
from typing import Any, NamedTuple

import torch

from hooks import draws
from hooks.where import Rows
from probe import TINY, Tokenizer
from probe.errors import BadText, asking, check_seed, nearest
from probe.files import read_bytes
from probe.headers import brief, expanded, parsed
from probe.text import Batch

_TEXTS = ("clean", "corrupt")
_WORDS = ("answer", "wrong")
_NAMED = ("spans", "corrupt_spans", "slots", "corrupt_slots")
_KEYS = ("task", *_TEXTS, *_WORDS, "label", "group", "template", *_NAMED, "split")


class Shape(NamedTuple):
    """What prompts that can be compared position by position have in common: ``spans`` are (name, first, one past
    last)."""

    template: str
    length: int
    spans: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Answer:
    """What may come next: its accepted spellings, and the tokens of each."""

    spellings: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return " or ".join(self.spellings)

    @property
    def one_token(self) -> bool:
        """Whether every spelling is one token, so that the next token alone tells."""
        return all(len(tokens) == 1 for tokens in self.tokens)

    @classmethod
    def of(cls, spellings: str | Sequence[str], tokenizer: Tokenizer) -> Answer:
        """One spelling, or all that are accepted.

        Raises:
            BadText: a spelling has unknown words, or begins another one, whose probability would be counted twice.
        """
        spellings = (spellings,) if isinstance(spellings, str) else tuple(spellings)
        tokens = tuple(_continuation(spelling, tokenizer) for spelling in spellings)
        for (short, first), (long, second) in permutations(zip(spellings, tokens, strict=True), 2):
            if second[: len(first)] == first:
                raise BadText(f"{short!r} begins {long!r}, and would be counted twice; accept one of the two.")
        return cls(spellings, tokens)


def _continuation(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """A token of the vocabulary; or the tokens of a text, without what the tokenizer puts in front."""
    with suppress(BadText):
        return (tokenizer.id(text),)
    return tuple(i for i, (a, b) in zip(tokenizer.encode(text), tokenizer.spans(text), strict=True) if a < b)


@dataclass(frozen=True)
class Prompt:
    """One row.

    Attributes:
        clean: the text that is run.
        tokens: its ids, with what the tokenizer puts in front.
        corrupt: the text that differs in what the answer hangs on; None where there is none.
        answer, wrong: the right continuation and a wrong one.
        label: what a probe is to read out of ``clean``: a class, or a number.
        group: rows of one group are not independent: averages count the group once.
        template: what it was made from; empty where unknown.
        spans: name → token positions. ``END``, the last token, is always there.
        corrupt_tokens, corrupt_spans: the same of ``corrupt``. The names are those of ``spans``.
    """

    clean: str
    tokens: tuple[int, ...]
    corrupt: str | None
    answer: Answer | None
    wrong: Answer | None
    group: str
    template: str
    spans: Mapping[str, range] = field(hash=False)
    corrupt_tokens: tuple[int, ...] | None = None
    corrupt_spans: Mapping[str, range] | None = field(default=None, hash=False)
    label: str | float | None = None

    @property
    def shape(self) -> Shape:
        """Template, length and where the spans are."""
        spans = tuple(sorted((name, span.start, span.stop) for name, span in self.spans.items()))
        return Shape(self.template, len(self.tokens), spans)

    @classmethod
    def of(cls, row: Mapping[str, Any], tokenizer: Tokenizer) -> Prompt:
        """A row of a prompt file, checked.

        Args:
            row: ``clean``, or ``template`` (``The capital of {subject} is``) with ``slots`` (``{"subject": "Peru"}``).
                ``clean`` may be a chat, a list of messages: `Tokenizer.chat` opens the reply and names the spans. All
                else is optional: ``corrupt``, likewise, or ``corrupt_slots`` with those slots that differ; ``answer``
                and ``wrong``, a text or a list of accepted spellings; ``label``, a text or a number; ``group``;
                ``spans``: name → [first character, one past the last] in ``clean``; ``corrupt_spans``, needed where
                clean and corrupt are of unequal length. Slots are spans.

        Raises:
            BadText: what is wrong with the row.
        """
        _check_keys(row)
        clean = _clean(row, tokenizer)
        corrupt = _corrupt(row, clean, tokenizer)
        answer, wrong = (_answer(key, row.get(key), tokenizer) for key in _WORDS)
        if wrong and (answer is None or set(answer.tokens) & set(wrong.tokens)):
            raise BadText(f"wrong is {str(wrong)!r}, and answer {answer and str(answer)!r}: give two different words.")
        return cls(
            clean.text,
            clean.tokens,
            corrupt and corrupt.text,
            answer,
            wrong,
            row.get("group") or clean.text,
            row.get("template") or "",
            clean.spans,
            corrupt and corrupt.tokens,
            corrupt and corrupt.spans,
            row.get("label"),
        )

    def swapped(self) -> Prompt:
        """Clean and corrupt exchanged; answer and wrong stay as they are, a label of clean is dropped.

        Raises:
            BadText: there is no corrupt text.
        """
        if self.corrupt is None or self.corrupt_tokens is None or self.corrupt_spans is None:
            raise BadText(f"{self.clean!r} has no corrupt text.")
        return replace(
            self,
            clean=self.corrupt,
            tokens=self.corrupt_tokens,
            spans=self.corrupt_spans,
            corrupt=self.clean,
            corrupt_tokens=self.tokens,
            corrupt_spans=self.spans,
            label=None,
        )


def _check_keys(row: Any) -> None:
    if not isinstance(row, Mapping):
        raise BadText(f"a prompt is an object with the key 'clean', not {type(row).__name__}.")
    for key in row:
        if key not in _KEYS:
            near = nearest(str(key), _KEYS)
            raise BadText(f"unknown key {brief(key)}." + (f" Nearest: {', '.join(near)}." if near else ""))
    for key in _KEYS:
        value = row.get(key)
        if value is None or isinstance(value, Mapping if key in _NAMED else str):
            continue
        if key == "label" and isinstance(value, int | float):
            continue
        if key in _TEXTS and isinstance(value, list | tuple):
            continue  # the tokenizer checks messages
        if key in _WORDS and isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
            continue
        kinds = {**dict.fromkeys(_NAMED, "an object"), **dict.fromkeys(_WORDS, "text, or a list of spellings")}
        kinds |= {**dict.fromkeys(_TEXTS, "text, or a list of messages"), "label": "text or a number"}
        kind = kinds.get(key, "text")
        raise BadText(f"{key} is {brief(value)}; it should be {kind}.")


def _answer(key: str, spellings: Any, tokenizer: Tokenizer) -> Answer | None:
    if spellings is None:
        return None
    with asking(key):
        return Answer.of(spellings, tokenizer)


# ---- the two texts and their spans -----------------------------------------------------------------------------------


class _Side(NamedTuple):
    """Clean or corrupt, with the positions of its spans."""

    text: str
    tokens: tuple[int, ...]
    spans: Mapping[str, range]


def _side(text: str | list[Any] | tuple[Any, ...], ranges: Mapping[str, Any], tokenizer: Tokenizer) -> _Side:
    if not isinstance(text, str):
        if ranges:
            raise BadText("spans are ranges of a text; those of a chat are its roles.")
        chat = tokenizer.chat(text)
        last = chat.tokens.shape[1] - 1
        return _Side(chat.text, tuple(chat.tokens[0].tolist()), {"END": range(last, last + 1), **chat.spans})
    tokens, places = tokenizer.encode(text), tokenizer.spans(text)
    spans = {"END": range(len(tokens) - 1, len(tokens))}
    spans.update({name: _positions(name, span, text, places) for name, span in ranges.items()})
    return _Side(text, tuple(tokens), spans)


def _clean(row: Mapping[str, Any], tokenizer: Tokenizer) -> _Side:
    given = {key for key in _KEYS if row.get(key) is not None}
    if "slots" not in given:
        if "corrupt_slots" in given:
            raise BadText("corrupt_slots goes with slots, of which it names those that differ.")
        if "clean" not in given:
            raise BadText("the key 'clean' is missing; or give template and slots.")
        return _side(row["clean"], row.get("spans") or {}, tokenizer)
    if "template" not in given:
        raise BadText("slots go with a template, a text like 'The capital of {subject} is'.")
    if clash := [key for key in ("clean", "spans") if key in given]:
        raise BadText(f"slots and {clash[0]} are given; template and slots make text and spans by themselves.")
    return _side(*_filled(row["template"], row["slots"]), tokenizer)


def _corrupt(row: Mapping[str, Any], clean: _Side, tokenizer: Tokenizer) -> _Side | None:
    slots, text, ranges = (row.get(key) for key in ("corrupt_slots", "corrupt", "corrupt_spans"))
    if slots is not None:
        if text is not None or ranges is not None:
            raise BadText("corrupt_slots makes text and spans by itself; leave out corrupt and corrupt_spans.")
        return _side(*_filled(row["template"], {**row["slots"], **slots}), tokenizer)
    if text is None:
        if ranges is not None:
            raise BadText("corrupt_spans goes with corrupt, which is missing.")
        return None
    if isinstance(text, str) != isinstance(row.get("clean", ""), str):
        raise BadText("one of clean and corrupt is a chat and the other a text; give two of a kind.")
    with asking("corrupt"):
        other = _side(text, ranges or {}, tokenizer)
    if ranges is not None or not isinstance(text, str):
        if odd := sorted(other.spans.keys() ^ clean.spans.keys()):
            raise BadText(f"spans and corrupt_spans name the same spans; only one of them has {odd[0]!r}.")
        return other
    if len(other.tokens) != len(clean.tokens):
        raise BadText(_parting(clean.tokens, other.tokens, tokenizer))
    return other._replace(spans=clean.spans)


def _parting(clean: Sequence[int], corrupt: Sequence[int], tokenizer: Tokenizer) -> str:
    pairs = enumerate(zip(clean, corrupt, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(clean), len(corrupt)))
    here, there = (repr(tokenizer.token(ids[at])) if at < len(ids) else "the end" for ids in (clean, corrupt))
    return (
        f"clean and corrupt have {len(clean)} and {len(corrupt)} tokens and part at token {at}, {here} and {there};"
        " align them by corrupt_spans, or by a template with slots and corrupt_slots."
    )


def _filled(template: str, slots: Mapping[str, Any]) -> tuple[str, dict[str, tuple[int, int]]]:
    """A template with its slots filled in, and the characters that each slot came to."""
    text, ranges = "", dict[str, tuple[int, int]]()
    with asking(f"template {brief(template)}"):
        try:
            parts = list(Formatter().parse(template))
        except ValueError as error:
            raise BadText(f"{error}.") from None
        for literal, name, spec, conversion in parts:
            text += literal
            if name is None:
                continue
            if not name or spec or conversion:
                raise BadText("a slot is a name in braces, like {subject}.")
            if name in ranges:
                raise BadText(f"the slot {brief(name)} stands twice; a span is one place, so name them apart.")
            if name not in slots:
                raise BadText(f"the slot {brief(name)} is not filled.")
            value = slots[name]
            if not isinstance(value, str) or not value.strip():
                raise BadText(f"the slot {brief(name)} is filled with {brief(value)}; it should be text.")
            ranges[name] = (len(text), len(text) + len(value))
            text += value
        if unknown := [name for name in slots if name not in ranges]:
            raise BadText(f"there is no slot {brief(unknown[0])}; it has {', '.join(ranges) or 'none'}.")
    return text, ranges


def _positions(name: str, span: Any, text: str, places: Sequence[tuple[int, int]]) -> range:
    """The tokens that a range of characters covers."""
    if not (isinstance(span, Sequence) and len(span) == 2 and all(type(end) is int for end in span)):
        raise BadText(f"span {name} is {brief(span)}; it should be [first character, one past the last].")
    first, end = span
    if not 0 <= first < end <= len(text):
        raise BadText(f"span {name} is {list(span)}, outside the text of {len(text)} characters.")
    covered = [i for i, (a, b) in enumerate(places) if a < end and b > first]
    if not covered:
        raise BadText(f"span {name} is {list(span)}, {text[first:end]!r}: no token is there.")
    return range(covered[0], covered[-1] + 1)


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prompts:
    """Checked prompts, and the reference prompts that resampling takes values from.

    Attributes:
        name: of the task or set, for the column ``prompts``.
        tokenizer: what made their tokens.
        reference: prompts of the same shapes and other texts; None where there are none.
        notes: what was decided for the user, in sentences.
    """

    rows: tuple[Prompt, ...]
    tokenizer: Tokenizer
    name: str = "prompts"
    reference: Prompts | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.rows:
            raise BadText(f"{self.name}: there is no prompt.")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        reference = f", {len(self.reference)} reference prompts" if self.reference else ""
        return f"Prompts({self.name}: {len(self)} rows in {len(self.shapes())} shapes{reference})"

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        name: str = "prompts",
        reference: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompts:
        """Prompts from Python: each row as in `Prompt.of`.

        Raises:
            BadText: a row is wrong; the message counts rows from 0.
        """
        made = []
        for i, row in enumerate(rows):
            with asking(f"{name}, row {i}"):
                made.append(Prompt.of(row, tokenizer))
        theirs = cls.of(reference, tokenizer, name=f"{name} (reference)") if reference is not None else None
        return cls(tuple(made), tokenizer, name, theirs)

    @classmethod
    def load(cls, task: str | Path, tokenizer: Tokenizer, directory: str | Path = TINY) -> Prompts:
        """The prompts of a task, with its reference prompts; or of a file, without any.

        Args:
            task: a name out of `tasks`; or the path of a file, its kind told by its ending: JSONL (an object a line),
                CSV (the keys as header; objects and lists of spellings as JSON), or parquet. Empty cells are left out.
            directory: holds ``prompts/<task>.jsonl`` and ``reference/<task>.jsonl``.

        Raises:
            BadText: no such task or file; or a row is wrong, by file and line.
        """
        if isinstance(task, Path) or task.endswith(tuple(_READERS)):
            return _from_file(expanded(task), tokenizer, Path(task).stem)
        directory = expanded(directory)
        known = tasks(directory)
        if task not in known:
            near = nearest(task, known)
            hint = f"Nearest: {', '.join(near)}; there" if near else "There"
            raise BadText(f"there is no task {task!r}. {hint} are {', '.join(known) or 'none'} in {directory}.")
        prompts = _from_file(directory / "prompts" / f"{task}.jsonl", tokenizer, task)
        reference = directory / "reference" / f"{task}.jsonl"
        theirs = _from_file(reference, tokenizer, f"reference/{task}") if reference.exists() else None
        return cls(prompts.rows, tokenizer, task, theirs)

    @classmethod
    def text(
        cls,
        text: str,
        tokenizer: Tokenizer,
        *,
        corrupt: str | None = None,
        answer: str | None = None,
        wrong: str | None = None,
        directory: str | Path = TINY,
    ) -> Prompts:
        """One text as a prompt. Its reference prompts are documents of ``reference/text.jsonl``, cut to its length: in
        a causal model what comes later changes nothing.

        Raises:
            BadText: the text is empty, or has unknown words.
        """
        prompt = Prompt.of({"clean": text, "corrupt": corrupt, "answer": answer, "wrong": wrong}, tokenizer)
        file = expanded(directory) / "reference" / "text.jsonl"
        documents = _documents(file) if file.exists() else ()
        cut = [_cut(document, len(prompt.tokens), tokenizer) for document in documents]
        theirs = tuple({one.tokens: one for one in cut if one is not None}.values())
        notes = () if theirs else (f"No reference text is as long as this prompt's {len(prompt.tokens)} tokens.",)
        reference = cls(theirs, tokenizer, f"reference/{file.stem}") if theirs else None
        return cls((prompt,), tokenizer, shorten(text, 60, placeholder=" …"), reference, notes)

    @classmethod
    def documents(cls, tokenizer: Tokenizer, n: int | None = None, directory: str | Path = TINY) -> Prompts:
        """Plain text, without answers: the first ``n`` documents of ``reference/text.jsonl``; None: all.

        Raises:
            BadText: there are none, or fewer; or they have unknown words.
        """
        file = expanded(directory) / "reference" / "text.jsonl"
        texts = list(islice(_documents(file), n))
        if n is not None and len(texts) < n:
            raise BadText(f"{file} holds {len(texts)} documents, and {n} are asked for.")
        return cls.of([{"clean": text} for text in texts], tokenizer, name="reference/text")

    def shapes(self) -> dict[Shape, list[int]]:
        """Shape → the rows that have it, in order."""
        found: dict[Shape, list[int]] = {}
        for i, prompt in enumerate(self.rows):
            found.setdefault(prompt.shape, []).append(i)
        return found

    @property
    def spans(self) -> tuple[Mapping[str, range], ...]:
        """Each row's spans, name → token positions, as ``model.run(..., spans=)`` takes them."""
        return tuple(prompt.spans for prompt in self.rows)

    def swapped(self) -> Prompts:
        """Clean and corrupt exchanged, row by row: what to run as the source of a patch. Reference prompts stay.

        Raises:
            BadText: a row has no corrupt text.
        """
        with asking(self.name):
            return replace(self, rows=tuple(prompt.swapped() for prompt in self.rows))

    def subset(self, rows: Sequence[int]) -> Prompts:
        """Only these rows; the reference prompts stay."""
        return replace(self, rows=tuple(self.rows[i] for i in rows))

    def batch(self, device: torch.device | str | None = None) -> Batch:
        """All rows as one right-padded batch of tokens; ``keep`` is None where all are of one length."""
        return padded([prompt.tokens for prompt in self.rows], device)

    def has(self) -> tuple[str, ...]:
        """Which of ``answer`` and ``wrong`` every row has."""
        return tuple(key for key in _WORDS if all(getattr(p, key) is not None for p in self.rows))

    def answers(self, key: str) -> list[Answer]:
        """Every row's ``answer`` or ``wrong``.

        Raises:
            BadText: a row has none.
        """
        found = [getattr(prompt, key) for prompt in self.rows]
        if None in found:
            raise BadText(f"{self.name}: row {found.index(None)} has no {key}.")
        return found

    def one_token(self, key: str) -> bool:
        """Whether every spelling of every row's ``answer`` or ``wrong`` is one token."""
        return all(answer.one_token for answer in self.answers(key))

    def ids(self, key: str) -> torch.Tensor:
        """The token ids of every row's ``answer`` or ``wrong``, [B].

        Raises:
            BadText: a row has none, one of several tokens, or several spellings.
        """
        found = self.spellings(key)
        if found.shape[1] > 1:
            raise BadText(f"{self.name}: there are several spellings of {key}; see Prompts.spellings.")
        return found[:, 0]

    def spellings(self, key: str) -> torch.Tensor:
        """The token ids of every spelling of every row's ``answer`` or ``wrong``, [B, spellings], -1 where a row has
        fewer.

        Raises:
            BadText: a row has none, or one of several tokens.
        """
        answers = self.answers(key)
        if long := [i for i, answer in enumerate(answers) if not answer.one_token]:
            raise BadText(
                f"{self.name}: the {key} of row {long[0]}, {str(answers[long[0]])!r}, has several tokens, and here only"
                " the next one is read; experiments.asking.Ask forces the others."
            )
        most = max(len(answer.tokens) for answer in answers)
        rows = [[tokens[0] for tokens in answer.tokens] for answer in answers]
        return torch.tensor([row + [-1] * (most - len(row)) for row in rows])

    @property
    def in_order(self) -> list[int]:
        """The rows in an order that hangs on their texts, and not on how they stand here."""
        return _in_a_batch(self).in_order

    def draw(self, reference: Prompts, seed: int) -> list[int]:
        """For each row, a reference row of the same length and spans and another text, drawn by ``seed``.

        Among those, rows of the same template and of another group are preferred. Which is drawn hangs on the row's own
        text, not on its place here, nor on the order of the reference rows.

        Raises:
            BadText: a row has none.
        """
        check_seed(seed)
        bits = draws.hashed(_in_a_batch(self).prompts, seed)
        by_place: dict[tuple[Any, ...], list[int]] = {}
        for j in reference.in_order:
            by_place.setdefault(reference.rows[j].shape[1:], []).append(j)
        drawn = []
        for i, prompt in enumerate(self.rows):
            fits = [j for j in by_place.get(prompt.shape[1:], []) if reference.rows[j].tokens != prompt.tokens]
            if not fits:
                spans = ", ".join(f"{name} at {first}" for name, first, _ in prompt.shape.spans)
                raise BadText(
                    f"{reference.name} has no other prompt of the shape of {prompt.clean!r}"
                    f" ({len(prompt.tokens)} tokens, {spans}). Give reference prompts of that shape, or edit by zero."
                )
            ranks = {j: _rank(reference.rows[j], prompt) for j in fits}
            best = [j for j in fits if ranks[j] == min(ranks.values())]
            drawn.append(best[int(draws.below(bits[i], len(best)))])
        return drawn


def _in_a_batch(prompts: Prompts) -> Rows:
    tokens, keep = prompts.batch()
    return Rows.of(tokens, keep)


def _rank(other: Prompt, prompt: Prompt) -> tuple[bool, bool]:
    """How well another prompt stands in for one; the least is best."""
    return other.template != prompt.template, other.group == prompt.group


def padded(rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> Batch:
    """Rows of tokens as one right-padded batch; ``keep`` is None where all are of one length."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    if bool((lengths == longest).all()):
        return Batch(tokens, None)
    return Batch(tokens, (torch.arange(longest) < lengths[:, None]).to(device))


# ---- files -----------------------------------------------------------------------------------------------------------


def tasks(directory: str | Path = TINY) -> list[str]:
    """The names of the tasks that a model directory ships; by default those of the tiny model."""
    return sorted(path.stem for path in (expanded(directory) / "prompts").glob("*.jsonl"))


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Where each line of a JSONL file is (``file:line``), and what it holds; empty lines are passed over. Lines end at
    a line feed alone: other characters that end a line may stand in a text.

    Raises:
        BadText: the file cannot be read, or a line is no JSON, or says something twice.
    """
    try:
        lines = read_bytes(file).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from None
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        if line.strip():
            with asking(where):
                made = _json(line)
            yield where, made


def _json(text: str) -> Any:
    try:
        return parsed(text)
    except json.JSONDecodeError as error:
        raise BadText(f"not JSON: {error.msg} at column {error.colno}.") from None
    except ValueError as error:
        raise BadText(f"not JSON: {error}.") from None


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a CSV file; ``file:line`` is where a row ends."""
    try:
        text = read_bytes(file).decode("utf-8-sig")
        reader = csv.DictReader(StringIO(text, newline=""), strict=True)
        _once(file, reader.fieldnames or ())
        for row in reader:
            where = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                raise BadText(f"{where}: it has more or fewer cells than the header's {len(reader.fieldnames or ())}.")
            with asking(where):
                cells = _cells(row)
            yield where, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(file, error) from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a parquet file, counted from 0."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        raw = read_bytes(file)
        _once(file, pq.read_schema(pa.BufferReader(raw)).names)
        rows = pq.read_table(pa.BufferReader(raw)).to_pylist()
    except BadText:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _unreadable(file, error) from None
    for number, row in enumerate(rows):
        where = f"{file}, row {number}"
        with asking(where):
            cells = _cells(row)
        yield where, cells


def _once(file: Path, columns: Sequence[str]) -> None:
    if twice := [name for i, name in enumerate(columns) if name in columns[:i]]:
        raise BadText(f"{file}: it has the column {brief(twice[0])} twice.")


_READERS = {".jsonl": _lines, ".csv": _csv, ".parquet": _parquet}


def _unreadable(file: Path, error: Exception) -> BadText:
    return BadText(f"{file}: can't be read ({getattr(error, 'strerror', None) or error}).")


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A table's row: empty cells left out; objects, and lists of spellings, read where they are written as JSON."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if value is None or value == "":
            continue
        if isinstance(value, dict):  # parquet gives every row the names of all
            value = {name: one for name, one in value.items() if one is not None}
        elif isinstance(value, str) and key in _NAMED:
            with asking(key):
                value = _json(value)
        elif isinstance(value, str) and key in _WORDS and value.startswith("["):
            with suppress(ValueError):  # else it is a word with a bracket
                value = parsed(value)
        found[key] = value
    return found


def _from_file(file: Path, tokenizer: Tokenizer, name: str) -> Prompts:
    if file.suffix not in _READERS:
        raise BadText(f"{file}: prompts are read from {', '.join(_READERS)}.")
    rows = []
    for where, row in _READERS[file.suffix](file):
        with asking(where):
            rows.append(Prompt.of(row, tokenizer))
    if not rows:
        raise BadText(f"{file}: there is no prompt in it.")
    return Prompts(tuple(rows), tokenizer, name)


def _documents(file: Path) -> Iterator[str]:
    """The texts of a file of documents."""
    for where, row in _lines(file):
        if not (isinstance(row, dict) and isinstance(row.get("text"), str)):
            raise BadText(f"{where}: the key 'text' is missing.")
        yield row["text"]


def _cut(document: str, length: int, tokenizer: Tokenizer) -> Prompt | None:
    """The first ``length`` tokens of a document as a prompt; None where it is shorter."""
    tokens, places = tokenizer.encode(document), tokenizer.spans(document)
    if len(tokens) < length:
        return None
    text = document[: places[length - 1][1]]
    return Prompt(text, tuple(tokens[:length]), None, None, None, text, "", {"END": range(length - 1, length)})
