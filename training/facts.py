"""What a trained tiny model does with its tasks: accuracies and causal facts, one column a model.

    python -m training.facts DIR [DIR ...]

Patching puts clean values of the residual stream into the corrupt run, at one named place before one
block; `recovered` is 0 where that does nothing and 1 where it makes the run clean (a ratio of means
over the shipped prompts). Switching off is setting to zero, judged by the accuracy that is left on 500
fresh held-out questions. Heads are found by score, never by number: a previous-token head gives more
than half of its attention to the token before, an induction head to the token after an earlier
occurrence, on lists of random names. A `!` stands for each figure
out of its bounds.

Probe's own parts do all of it: a `tap` on the decoder. About half a minute a model.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from probe import TINY, Decoder, Site, load
from training.language import ID, NAMES, induction
from training.quiz import LOGITS, Quiz, padded

PROMPTS = TINY / "prompts"
LIST = 10
"""Names in the lists on which heads are scored."""


ANYTHING = (-float("inf"), float("inf"))


@dataclass(frozen=True)
class Fact:
    """A figure (or one a block), and the bounds within which the model is as clean as we like."""

    name: str
    values: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]

    @property
    def outside(self) -> int:
        """How many of the figures are out of bounds."""
        return sum(not low <= value <= high for value, (low, high) in zip(self.values, self.bounds, strict=True))

    def __str__(self) -> str:
        shown = (f"{value:.2f}".replace("-0.00", "0.00") for value in self.values)
        return " ".join(shown) + " !" * self.outside


def fact(name: str, value: float, low: float = ANYTHING[0], high: float = ANYTHING[1]) -> Fact:
    """A fact of one figure."""
    return Fact(name, (value,), ((low, high),))


# --- edits, as taps ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Taps that change one run: sites and what happens to their values."""

    at: Mapping[Site, Callable[[Tensor], Tensor]]

    def tap(self, site: Site, value: Tensor) -> Tensor:
        """What the decoder calls with each value."""
        change = self.at.get(site)
        return value if change is None else change(value.clone())

    def run(self, decoder: Decoder, tokens: Tensor) -> Tensor:
        """The logits of the changed run."""
        return decoder.run(tokens, edited=tuple(self.at), tap=self.tap)[LOGITS]


def zero_heads(heads: Iterable[tuple[int, int]]) -> Change:
    """Switch off heads, as (block, head)."""
    by_block: dict[Site, list[int]] = {}
    for block, head in heads:
        by_block.setdefault(Site(block, "O"), []).append(head)
    return Change({site: partial(_fill_heads, chosen) for site, chosen in by_block.items()})


def _fill_heads(heads: list[int], O: Tensor) -> Tensor:
    O[:, :, heads] = 0
    return O


def zero_sites(sites: Iterable[Site]) -> Change:
    """Set whole tensors to zero."""
    return Change(dict.fromkeys(sites, torch.zeros_like))


def zero_expert(block: int, expert: int) -> Change:
    """Take one expert's output away where it was chosen; the others keep their gates."""
    chosen: list[Tensor] = []

    def look(experts: Tensor) -> Tensor:
        chosen[:] = [experts]
        return experts

    def close(gates: Tensor) -> Tensor:
        return gates.masked_fill(chosen[0] == expert, 0.0)

    return Change({Site(block, "experts"): look, Site(block, "gates"): close})


# --- heads -------------------------------------------------------------------------------------


def head_scores(decoder: Decoder, n: int = 64) -> tuple[Tensor, Tensor]:
    """Previous-token and induction scores, each [block, head]: mean attention on repeated random lists."""
    rng = random.Random("head scores")
    lists = [rng.sample(NAMES, LIST) for _ in range(n)]
    tokens, _ = padded([induction(names, 0, LIST - 1).words for names in lists])
    sites = tuple(Site(block, "A") for block in range(decoder.blocks))
    patterns = decoder.run(tokens, want=sites)
    queries = torch.arange(2, tokens.shape[1])
    again = torch.arange(LIST + 2, tokens.shape[1])  # behind <bos>, the list and its semicolon
    previous = [patterns[site][:, :, queries, queries - 1].mean((0, 2)) for site in sites]
    successor = [patterns[site][:, :, again, again - LIST].mean((0, 2)) for site in sites]
    return torch.stack(previous), torch.stack(successor)


def above(scores: Tensor, least: float = 0.5) -> list[tuple[int, int]]:
    """The (block, head) whose score is larger."""
    return [(int(block), int(head)) for block, head in (scores > least).nonzero()]


def head_facts(quiz: Quiz) -> Iterator[Fact]:
    """Previous-token heads make induction work, other heads of their blocks don't; induction heads share the work."""
    scores = head_scores(quiz.decoder)
    previous, successor = (above(score) for score in scores)
    blocks = {block for block, _ in previous}
    heads = quiz.decoder.dims.h
    others = [(b, h) for b in sorted(blocks) for h in range(heads) if (b, h) not in previous + successor]
    yield fact("previous-token heads", len(previous), 1)
    yield fact("previous-token heads off: induction", _left(quiz, previous), high=0.3)
    yield fact(
        "any other head of their blocks off: induction", min((_left(quiz, [h]) for h in others), default=1.0), 0.95
    )
    yield fact("induction heads", len(successor), 1)
    yield fact("induction heads off: induction", _left(quiz, successor), high=0.1)
    yield fact("any one induction head off: induction", min((_left(quiz, [h]) for h in successor), default=0.0), 0.9)
    yield fact("induction heads off: agreement", quiz.accuracy("agreement", zero_heads(successor).run))


def _left(quiz: Quiz, heads: Sequence[tuple[int, int]]) -> float:
    return quiz.accuracy("induction", zero_heads(heads).run)


# --- experts -----------------------------------------------------------------------------------

UNTOUCHED = ("induction", "ioi", "agreement", "capital", "language", "continent")


def expert_facts(quiz: Quiz) -> Iterator[Fact]:
    """Facts about persons need routed experts, the other tasks don't."""
    moe = [block for block, is_moe in enumerate(quiz.decoder.dims.moe) if is_moe]
    routed = zero_sites(Site(block, "delta_routed") for block in moe)
    shared = zero_sites(Site(block, "delta_shared") for block in moe)
    for kind in ("job", "home"):
        yield fact(f"routed experts off: {kind}", quiz.accuracy(kind, routed.run), high=0.75)
    for kind in UNTOUCHED:
        yield fact(f"routed experts off: {kind}", quiz.accuracy(kind, routed.run), low=0.95)
    for kind in ("job", "home"):
        yield fact(f"shared experts off: {kind}", quiz.accuracy(kind, shared.run))
    one = {
        expert: tuple(quiz.accuracy(kind, zero_expert(moe[-1], expert).run) for kind in ("job", "home"))
        for expert in range(quiz.decoder.dims.e)
    }
    for i, kind in enumerate(("job", "home")):
        worst = min(one, key=lambda expert: one[expert][i])
        yield fact(f"the last block's expert that {kind} needs most, off: {kind}", one[worst][i], high=0.9)
        yield fact(f"the same, off: {('home', 'job')[i]}", one[worst][1 - i], low=0.95)


# --- patching ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """The clean and corrupt prompts of a task, as tensors."""

    clean: Tensor
    corrupt: Tensor
    answer: Tensor
    wrong: Tensor
    at: Mapping[str, Tensor]

    def difference(self, logits: Tensor) -> float:
        """Mean logit of the answer over that of the wrong one, at END."""
        rows = torch.arange(len(self.answer))
        end = logits[rows, self.at["END"]]
        return (end[rows, self.answer] - end[rows, self.wrong]).mean().item()


def pairs(task: str, directory: Path = PROMPTS) -> Pairs:
    """The shipped prompts of a task."""
    rows = [json.loads(line) for line in (directory / f"{task}.jsonl").open(encoding="utf-8")]
    clean, _ = padded([row["clean"].split() for row in rows])
    corrupt, _ = padded([row["corrupt"].split() for row in rows])
    places = {
        span: torch.tensor([row["clean"][: row["spans"][span][0]].count(" ") + 1 for row in rows])
        for span in rows[0]["spans"]
    }
    answer, wrong = (torch.tensor([ID[row[key]] for row in rows]) for key in ("answer", "wrong"))
    return Pairs(clean, corrupt, answer, wrong, places)


def recovered(decoder: Decoder, task: str) -> dict[str, list[float]]:
    """By span: what patching the residual stream there recovers, before each block and after the last."""
    data = pairs(task)
    stream = [Site(block, "x_n") for block in range(decoder.blocks)] + [Site(decoder.blocks - 1, "x_next")]
    source = decoder.run(data.clean, want=(LOGITS, *stream))
    low, high = data.difference(decoder(data.corrupt)), data.difference(source[LOGITS])
    rows = torch.arange(len(data.answer))

    def put(values: Tensor, where: Tensor, x: Tensor) -> Tensor:
        x[rows, where] = values[rows, where]
        return x

    return {
        span: [
            (data.difference(Change({site: partial(put, source[site], where)}).run(decoder, data.corrupt)) - low)
            / (high - low)
            for site in stream
        ]
        for span, where in data.at.items()
    }


BOUNDS: Mapping[str, Mapping[tuple[str, int], tuple[float, float]]] = {
    "ioi": {("S2", 0): (0.9, 1.1), ("S2", 1): (0.9, 1.1), ("S2", -1): (-0.05, 0.05)}
    | {("END", 0): (-0.1, 0.1), ("END", 1): (-0.1, 0.1), ("END", -1): (0.99, 1.01)},
    "capital": {
        ("subject", 0): (0.9, 1.1),
        ("subject", 1): (0.9, 1.1),
        ("subject", 3): (-0.25, 0.25),
        ("END", 3): (0.8, 1.1),
    },
    "language": {("subject", 0): (0.9, 1.1), ("subject", 3): (-0.25, 0.25), ("END", 3): (0.8, 1.1)},
    "relation": {("relation", 0): (0.9, 1.1)},
    "job": {("first", 0): (0.9, 1.1), ("first", 2): (-0.1, 0.4), ("last", 2): (0.6, 1.1), ("END", -1): (0.99, 1.01)},
    "home": {("first", 0): (0.9, 1.1), ("first", 2): (-0.1, 0.4), ("last", 2): (0.6, 1.1), ("END", -1): (0.99, 1.01)},
    "agreement": {("noun", 0): (0.9, 1.1)},
    "induction": {("B1", 0): (0.9, 1.1), ("END", -1): (0.99, 1.01)},
}
"""By task, for (span, block, -1 for after the last): within what `recovered` should lie."""


def patch_facts(decoder: Decoder) -> Iterator[Fact]:
    """Where what the answer hangs on stands in the residual stream, by block."""
    blocks = [*range(decoder.blocks), -1]
    for task, bounds in BOUNDS.items():
        for span, values in recovered(decoder, task).items():
            within = tuple(bounds.get((span, block), ANYTHING) for block in blocks)
            yield Fact(f"{task}: recovered at {span}", tuple(values), within)


# --- all ---------------------------------------------------------------------------------------


@torch.no_grad()
def facts(decoder: Decoder) -> list[Fact]:
    """Every fact of a model."""
    quiz = Quiz(decoder)
    known = [fact(f"accuracy: {kind}", quiz.accuracy(kind), low=0.95) for kind in quiz.questions]
    return [*known, *head_facts(quiz), *expert_facts(quiz), *patch_facts(decoder)]


def table(columns: Mapping[str, Sequence[Fact]]) -> str:
    """Markdown: a row a fact, a column a model."""
    names = [row.name for row in next(iter(columns.values()))]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, *row in zip(names, *columns.values(), strict=True):
        lines.append(f"| {name} | " + " | ".join(map(str, row)) + " |")
    outside = (sum(row.outside for row in column) for column in columns.values())
    lines.append("| out of bounds | " + " | ".join(map(str, outside)) + " |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Accuracies and causal facts of trained tiny models.")
    parser.add_argument("directories", nargs="+", type=Path)
    torch.set_num_threads(1)
    directories = parser.parse_args().directories
    print(table({path.name: facts(Decoder(load(path, torch.float32))) for path in directories}))


if __name__ == "__main__":
    main()
