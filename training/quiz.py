"""Fresh held-out questions as tensors, and the share of them that a model answers."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from probe import Decoder, Site
from training.language import BOS, HELD_OUT, ID, PAD, Example

LOGITS = Site(None, "logits")


def padded(rows: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
    """Token ids of rows of words behind `<bos>`, padded on the right; and where each row's last word is.

    Pads need no mask: a causal model's real tokens never see them."""
    longest = max(map(len, rows))
    ids = [[ID[BOS], *(ID[word] for word in row)] + [ID[PAD]] * (longest - len(row)) for row in rows]
    return torch.tensor(ids), torch.tensor([len(row) for row in rows])


class Quiz:
    """Held-out questions of each kind, the same for every model, put to one model."""

    def __init__(self, decoder: Decoder, n: int = 500, seed: int = 4242) -> None:
        self.decoder = decoder
        self.questions = {kind: _questions(draw, n, seed) for kind, draw in HELD_OUT.items()}

    @torch.no_grad()
    def accuracy(self, kind: str, run: Callable[[Decoder, Tensor], Tensor] | None = None) -> float:
        """The share of the questions of a kind whose answer has the largest logit.

        `run` makes the logits of tokens where the model is to be changed on the way."""
        tokens, last, answers = self.questions[kind]
        logits = self.decoder(tokens) if run is None else run(self.decoder, tokens)
        right = logits[torch.arange(len(last)), last].argmax(-1) == answers
        return right.float().mean().item()


def _questions(draw: Callable[[random.Random], Example], n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = random.Random(seed)
    examples = [draw(rng) for _ in range(n)]
    tokens, last = padded([example.words for example in examples])
    return tokens, last, torch.tensor([ID[example.answer] for example in examples])
