"""Trains the tiny model of `probe/tiny` from nothing.

    python -m training.train --seed 0 --out DIR

The model is probe's own `Decoder`; its weights, as the card shows them, are the parameters. Two
phases: long lists of names alone, until induction works (a circuit that the full mixture forms late
or never), then every kind of sentence. Experts are balanced as in DeepSeek-V3: after each step the
correction bias of those that had too few tokens rises, of those that had too many it falls.

About four minutes on one core. A seed gives the same weights each time on one machine and number of
threads. Prints the accuracy of each kind of held-out question, of the weights as they were saved.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from probe import Decoder, Dims, InMemory, Site, load, save
from probe.dims import Yarn
from probe.weights import weight_shape, weight_sites
from training import prompts
from training.language import ALL_KINDS, ANSWER, BOS, EOS, ID, LONG_LISTS, PAD, VOCABULARY, Mix, document
from training.quiz import LOGITS, Quiz, padded

DIMS = Dims(
    d=128,
    r_q=64,
    r_kv=48,
    h=4,
    n=16,
    r=8,
    v=32,
    f=160,
    e=16,
    k=2,
    m=32,
    m_s=32,
    V=len(VOCABULARY),
    moe=(False, True, True, True),
    eps=1e-6,
    scaling=1.5,
    norm_topk=True,
    n_group=1,
    topk_group=1,
    theta=100.0,
    yarn=Yarn(factor=4.0, original=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    max_positions=256,
)
"""No two widths of a head are equal and n + r is not v, so that none can be taken for another."""

Key = tuple[int | None, str]


@dataclass(frozen=True)
class Recipe:
    """What training does, beside the language. A phase's `steps` are the most that it takes."""

    seed: int = 0
    documents: int = 64
    length: int = 32
    rate: float = 3e-3
    decay: float = 0.3
    clip: float = 1.0
    warm_up: int = 100
    list_steps: int = 500
    list_accuracy: float = 0.9
    steps: int = 1100
    balance: float = 3e-3

    def rate_at(self, step: int, in_phase_2: int) -> float:
        """The learning rate: a warm-up, then constant to the middle of phase 2, then linear down to 2 %."""
        left = (self.steps - in_phase_2) / (0.5 * self.steps)
        return self.rate * min(1.0, (step + 1) / self.warm_up) * min(1.0, max(0.02, left))


def initial_weights(dims: Dims, seed: int) -> dict[Key, Tensor]:
    """Normal weights of std fan-in^-1/2, less where a block writes to the residual stream; gains 1, bias 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (block, leaf.name): _initial(leaf.name, weight_shape(leaf, dims), dims, generator)
        for block, leaf in weight_sites(dims)
    }


def _initial(name: str, shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name == "b" else torch.ones(shape)
    std: float = {"W_E": 0.2, "W_U": 0.5 * dims.d**-0.5}.get(name, shape[-2] ** -0.5)
    if name == "W_O" or name.startswith("W_2"):
        std /= (2 * dims.blocks) ** 0.5
    return torch.randn(shape, generator=generator) * std


@dataclass
class Progress:
    """Running means that decide about phases and are printed."""

    accuracy: float = 0.0
    loss: float = 0.0
    load: list[float] = field(default_factory=list)


class Trainer:
    """The model, its optimiser, and one step of learning."""

    def __init__(self, recipe: Recipe, dims: Dims = DIMS) -> None:
        self.recipe = recipe
        self.weights = initial_weights(dims, recipe.seed)
        self.biases = [self.weights[i, "b"] for i, moe in enumerate(dims.moe) if moe]
        learnt = [w.requires_grad_() for (_, name), w in self.weights.items() if name != "b"]
        matrices, gains = [w for w in learnt if w.ndim > 1], [w for w in learnt if w.ndim == 1]
        self.learnt = learnt
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.decay}, {"params": gains, "weight_decay": 0.0}],
            lr=recipe.rate,
            betas=(0.9, 0.98),
            fused=True,
        )
        self.decoder = Decoder(InMemory(dims, self.weights))
        self.routing = [Site(i, "experts") for i, moe in enumerate(dims.moe) if moe]
        self.rng = random.Random(recipe.seed)
        self.progress = Progress()

    def train(self) -> None:
        """Both phases."""
        recipe, start = self.recipe, time.monotonic()
        step = in_phase_2 = 0
        long_lists = True
        while in_phase_2 < recipe.steps:
            if long_lists and (self.progress.accuracy > recipe.list_accuracy or step == recipe.list_steps):
                long_lists = False
                print(f"phase 2 from step {step}", flush=True)
            self.step(LONG_LISTS if long_lists else ALL_KINDS, recipe.rate_at(step, in_phase_2))
            step += 1
            in_phase_2 += not long_lists
            if step % 100 == 0:
                print(self.line(step, time.monotonic() - start), flush=True)

    def step(self, mix: Mix, rate: float) -> None:
        """Learn from fresh documents once."""
        documents = [document(self.rng, mix, self.recipe.length) for _ in range(self.recipe.documents)]
        tokens, _ = padded([d.words[1:] for d in documents])
        read, due = tokens[:, :-1], tokens[:, 1:]
        weight = torch.tensor([[*d.weights[1:]] + [0.0] * (due.shape[1] + 1 - len(d)) for d in documents])
        values = self.decoder.run(read, want=(LOGITS, *self.routing))
        loss = F.cross_entropy(values[LOGITS].flatten(0, 1), due.flatten(), reduction="none").view_as(weight)
        total = (loss * weight).sum() / weight.sum()
        self.optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.learnt, self.recipe.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.balance([values[site] for site in self.routing], real=read != ID[PAD])
        answers = weight >= ANSWER
        right = (values[LOGITS].argmax(-1) == due)[answers].float().mean().item()
        self.progress.accuracy += 0.1 * (right - self.progress.accuracy)
        self.progress.loss += 0.1 * (total.item() - self.progress.loss)

    def balance(self, chosen: Sequence[Tensor], real: Tensor) -> None:
        """Move each correction bias a fixed step towards equal load; pads are not counted."""
        self.progress.load = []
        for bias, experts in zip(self.biases, chosen, strict=True):
            count = torch.bincount(experts[real].flatten(), minlength=len(bias)).float()
            bias += self.recipe.balance * torch.sign(count.mean() - count)
            self.progress.load.append((count.max() / count.mean()).item())

    def line(self, step: int, seconds: float) -> str:
        """What is printed now and then."""
        now = self.progress
        load = " ".join(f"{ratio:.2f}" for ratio in now.load)
        return f"step {step}  loss {now.loss:.3f}  accuracy {now.accuracy:.3f}  max/mean load {load}  {seconds:.0f} s"

    def result(self) -> InMemory:
        """The weights learnt, cut off from training."""
        return InMemory(self.decoder.dims, {key: w.detach().clone() for key, w in self.weights.items()})


# --- the command line --------------------------------------------------------------------------


def main() -> None:
    """Train, save, read back what was saved, and print its accuracies."""
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--threads", type=int, default=1, help="other numbers may give other last bits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    trainer = Trainer(Recipe(seed=options.seed))
    trainer.train()
    save(
        trainer.result(),
        options.out,
        dtype=torch.bfloat16,
        shards=2,
        pad_token_id=ID[PAD],
        bos_token_id=ID[BOS],
        eos_token_id=ID[EOS],
    )
    prompts.write(options.out)
    quiz = Quiz(Decoder(load(options.out, torch.float32)))
    for kind in quiz.questions:
        print(f"{kind:<20} {quiz.accuracy(kind):.3f}")


if __name__ == "__main__":
    main()
