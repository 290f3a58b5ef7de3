"""What the block is: every tensor of a Kimi K2 / DeepSeek-V3 block by name, and one engine that evaluates them."""

from pathlib import Path

from probe.blocks import around, card
from probe.card import Card, Leaf, Step
from probe.checkpoint import Checkpoint, load
from probe.decoder import Decoder
from probe.dims import KIMI_K2, Dims
from probe.engine import Plan, Weights, evaluate, plan
from probe.errors import ProbeError
from probe.from_state import from_state
from probe.memory import memory
from probe.params import account
from probe.sites import Site, Sites
from probe.text import Tokenizer
from probe.weights import Drawn, InMemory, random_weights
from probe.writer import save

TINY = Path(__file__).parent / "tiny"
"""The checkpoint directory of the small trained model that ships with the package; also its prompts."""

__all__ = [
    "KIMI_K2",
    "TINY",
    "Card",
    "Checkpoint",
    "Decoder",
    "Dims",
    "Drawn",
    "InMemory",
    "Leaf",
    "Plan",
    "ProbeError",
    "Site",
    "Sites",
    "Step",
    "Tokenizer",
    "Weights",
    "account",
    "around",
    "card",
    "evaluate",
    "from_state",
    "load",
    "memory",
    "plan",
    "random_weights",
    "save",
]
