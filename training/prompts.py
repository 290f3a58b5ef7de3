"""Writes the language down beside the tiny model: tokenizer, prompts, reference prompts.

    python -m training.prompts [DIR]        # DIR: probe/tiny

`prompts/<task>.jsonl` holds the questions that a study asks, all of them held out of training. A row's
`clean` and `corrupt` differ in one word, so that they align token by token; `answer` and `wrong` are
what follows the one and the other; `spans` names places by characters of `clean`; `template` is equal
for rows of one shape; `group` is the unit for statistics (the names, the country, the person, …).

`reference/<task>.jsonl` holds rows of the same templates that share no text with the prompts, at least
eight for each template: what a resampling ablation draws from. `reference/text.jsonl` holds documents
like those of training, each of them 32 tokens long with `<bos>`.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from probe import TINY
from training import language
from training.language import Example

Row = dict[str, object]
Rows = tuple[list[Row], list[Row]]
"""The prompts of a task and its reference."""

SPANS = {
    "ioi": ("S1", "IO", "S2"),
    "capital": ("subject",),
    "language": ("subject",),
    "continent": ("subject",),
    "relation": ("relation", "subject"),
    "job": ("first", "last"),
    "home": ("first", "last"),
    "agreement": ("noun", "attractor"),
    "induction": ("A1", "B1", "A2"),
}
"""The spans of each task; every row has END, the last word, too."""


def row(task: str, clean: Example, corrupt: Example, group: str, split: str = "held") -> Row:
    """One line of a prompt file."""
    return {
        "task": task,
        "clean": clean.text,
        "corrupt": corrupt.text,
        "answer": clean.answer,
        "wrong": corrupt.answer,
        "group": group,
        "template": clean.template,
        "spans": {name: list(place) for name, place in clean.places(*SPANS[task]).items()},
        "split": split,
    }


def halves(rows: Iterable[Row], prompts: int) -> Rows:
    """The first rows as prompts, the others as reference."""
    rows = list(rows)
    return rows[:prompts], rows[prompts:]


# --- one function a task -----------------------------------------------------------------------


def ioi_rows() -> Rows:
    """Pairs of names that training never shows together, in twelve templates; corrupt names IO again.

    Opening i goes with closing i, which training has not shown where i is odd; IO stands first or
    second. Prompts and reference share no pair of names."""
    return halves((_ioi_row(i, pair) for i, pair in enumerate(language.IOI_HELD_PAIRS[:192])), 96)


def _ioi_row(i: int, pair: tuple[str, str]) -> Row:
    kind = i % len(language.IOI_OPENINGS)
    subject, other = pair if i // 12 % 2 == 0 else pair[::-1]
    order = (other, subject) if i // 6 % 2 == 0 else (subject, other)
    template = f"{language.IOI_OPENINGS[kind]} {language.IOI_CLOSINGS[kind]}"
    place, thing = language.PLACES[i % 10], language.OBJECTS[(i + i // 12) % 10]
    clean = language.ioi(template, *order, subject, place, thing)
    corrupt = replace(clean, slots={**clean.slots, "S2": other}, answer=subject)
    return row("ioi", clean, corrupt, "|".join(pair))


def fact_rows(task: str, prompts: int, reference: int) -> Rows:
    """Facts in the wording held out for them, at most that many of each wording; corrupt swaps the subject.

    Of a person it swaps the first name. The reference is of the wordings that training saw."""
    facts, rng = language.FACTS[task], random.Random(f"prompts {task}")
    rows: Rows = ([], [])
    for template in facts.templates:
        every = [facts.example(subject, template) for subject in rng.sample(list(facts.answers), len(facts.answers))]
        held = [example for example in every if facts.held[tuple(example.slots.values())] == template]
        seen = [example for example in every if example not in held]
        asked = counterparts(held[:prompts], held + seen)
        taken = [example for pair in asked for example in pair]
        rest = [example for example in seen if example not in taken]
        rows[0].extend(_fact_row(task, clean, corrupt, "held") for clean, corrupt in asked)
        rows[1].extend(
            _fact_row(task, clean, corrupt, "train") for clean, corrupt in counterparts(rest[:reference], rest)
        )
    return rows


def counterparts(examples: Sequence[Example], others: Sequence[Example]) -> list[tuple[Example, Example]]:
    """Each example with another one, unlike in its first slot and its answer, equal in the other slots.

    Those that were taken go to the end of the queue, so that few are taken twice."""
    queue, found = list(others), []
    for clean in examples:
        rest = list(clean.slots.values())[1:]
        corrupt = next(
            other for other in queue if list(other.slots.values())[1:] == rest and other.answer != clean.answer
        )
        queue.remove(corrupt)
        queue.append(corrupt)
        found.append((clean, corrupt))
    return found


def _fact_row(task: str, clean: Example, corrupt: Example, split: str) -> Row:
    return row(task, clean, corrupt, " ".join(clean.slots.values()), split)


def relation_rows() -> Rows:
    """Capital or language of a country, in the three wordings that both share; corrupt asks the other.

    Prompts are held-out wordings of what `clean` asks; of the reference, no (country, wording) is asked
    in the prompts."""
    rng = random.Random("prompts relation")
    rows: Rows = ([], [])
    for template in language.RELATION_TEMPLATES:
        taken: set[str] = set()
        for relation, other in (("capital", "language"), ("language", "capital")):
            held = [c for c, t in language.FACTS[relation].held.items() if t == _ask(template, relation)]
            free = [country for (country,) in rng.sample(held, len(held)) if country not in taken][:12]
            taken.update(free)
            rows[0].extend(_relation_row(template, country, relation, other, "held") for country in free)
        rest = [country for (country,) in language.FACTS["capital"].answers if country not in taken]
        for i, country in enumerate(rng.sample(rest, 20)):
            relation, other = ("capital", "language") if i % 2 == 0 else ("language", "capital")
            held_here = language.FACTS[relation].held[(country,)] == _ask(template, relation)
            rows[1].append(_relation_row(template, country, relation, other, "held" if held_here else "train"))
    return rows


def _ask(template: str, relation: str) -> str:
    return template.replace("{relation}", relation)


def _relation_row(template: str, country: str, relation: str, other: str, split: str) -> Row:
    answers = {r: language.FACTS[r].answers[(country,)] for r in (relation, other)}
    clean, corrupt = (Example(template, {"relation": r, "subject": country}, answers[r]) for r in (relation, other))
    return row("relation", clean, corrupt, country, split)


def agreement_rows() -> Rows:
    """Pairs of nouns that training never shows; each once with a singular and once with a plural subject."""
    rng = random.Random("prompts agreement")
    return halves(
        (
            _agreement_row(i, pair, plural, rng.choice(language.PREPOSITIONS))
            for i, pair in enumerate(language.HELD_NOUN_PAIRS)
            for plural in (0, 1)
        ),
        len(language.HELD_NOUN_PAIRS),
    )


def _agreement_row(i: int, pair: tuple[int, int], plural: int, preposition: str) -> Row:
    template = language.AGREEMENT_TEMPLATES[i % 3]
    attractor = (i // 3 + plural) % 2
    clean, corrupt = (
        language.agreement(template, pair, (number, attractor), preposition) for number in (plural, 1 - plural)
    )
    group = "|".join(language.NOUNS[noun][0] for noun in pair)
    return row("agreement", clean, corrupt, group)


INDUCTION_SHAPES = ((10, 0, 3), (10, 0, 6), (8, 2, 4), (12, 4, 5))
"""Names in the list, the one from which it is repeated, names shown again."""


def induction_rows() -> Rows:
    """Random lists; corrupt has another name where the answer first stands."""
    rng = random.Random("prompts induction")
    return halves((_induction_row(rng, *shape) for _ in range(32) for shape in INDUCTION_SHAPES), 64)


def _induction_row(rng: random.Random, size: int, start: int, shown: int) -> Row:
    *names, other = rng.sample(language.NAMES, size + 1)
    clean = language.induction(names, start, shown)
    corrupt = replace(clean, slots={**clean.slots, "B1": other}, answer=other)
    label = f"{size} names, {shown} again from number {start + 1}"
    group = f"{clean.slots['A1']}|{clean.slots['B1']}"
    return {**row("induction", clean, corrupt, group), "template": label}


def all_rows() -> dict[str, Rows]:
    """The prompts and the reference of every task."""
    return {
        "ioi": ioi_rows(),
        "capital": fact_rows("capital", prompts=16, reference=12),
        "language": fact_rows("language", prompts=19, reference=12),
        "continent": fact_rows("continent", prompts=19, reference=12),
        "relation": relation_rows(),
        "job": fact_rows("job", prompts=20, reference=16),
        "home": fact_rows("home", prompts=20, reference=16),
        "agreement": agreement_rows(),
        "induction": induction_rows(),
    }


def texts(n: int, size: int = 32) -> Iterator[Row]:
    """Documents of training's kind that fill `size` tokens; the tokenizer adds `<bos>`."""
    rng = random.Random("reference text")
    found = 0
    while found < n:
        document = language.document(rng, language.ALL_KINDS, size)
        if len(document) == size:
            found += 1
            yield {"text": " ".join(document.words[1:])}


# --- files -------------------------------------------------------------------------------------


def tokenizer() -> Tokenizer:
    """Splits at white space, one id a word, `<bos>` in front."""
    made = Tokenizer(WordLevel(vocab=dict(language.ID), unk_token=language.UNK))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(
        single=f"{language.BOS} $A", special_tokens=[(language.BOS, language.ID[language.BOS])]
    )
    made.add_special_tokens(list(language.SPECIALS))
    return made


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")


def write(directory: Path) -> None:
    """Write tokenizer.json, prompts/ and reference/ into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(directory / "tokenizer.json"))
    for task, (prompts, reference) in all_rows().items():
        write_lines(directory / "prompts" / f"{task}.jsonl", prompts)
        write_lines(directory / "reference" / f"{task}.jsonl", reference)
    write_lines(directory / "reference" / "text.jsonl", texts(256))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the tiny model's tokenizer and prompts.")
    parser.add_argument("directory", nargs="?", type=Path, default=TINY)
    write(parser.parse_args().directory)


if __name__ == "__main__":
    main()
