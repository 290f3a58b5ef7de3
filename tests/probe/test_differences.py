"""The page of checkpoints: how far every family's tensors are from transformers', when we open what it has written.

    python -m tests.probe.test_differences

prints the page's table anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from probe import Decoder, load
from probe.config import WRAPPERS
from tests.oracle import draw
from tests.probe.files import edit_json, edit_shard
from tests.probe.test_oracle import LAYOUTS, RELATIVE, VARIANTS, compare, oracle

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


class Family(NamedTuple):
    """A line of the table.

    Attributes:
        checkpoints: the published ones that it stands for.
        variants: the small models of `VARIANTS` that stand for them.
        renamed: the model type to whose layout transformers' files are renamed by hand, where it has no class.
    """

    checkpoints: str
    variants: tuple[str, ...]
    renamed: str | None = None


FAMILIES = (
    Family("Kimi K2, K2-Thinking", ("kimi", "eps-1e-5")),
    Family("DeepSeek-V3, R1, V3.1", ("yarn-factor-40-betas-32-1", "groups", "two-dense")),
    Family("Moonlight", ("no-query-latent", "two-shared")),
    Family("GLM-4.7-Flash", ("glm-4.7",)),
    Family("Youtu-LLM", ("youtu",)),
    Family("DeepSeek-V3.2", ("v3.2", "v3.2-yarn-short", "v3.2-mixed", "v3.2-tied")),
    Family("GLM-5, GLM-5.1", ("glm-5", "glm-5-small", "glm-5-groups", "glm-5-two-shared")),
    Family("sarvam-105b", ("sarvam", "sarvam-yarn-short", "sarvam-groups", "sarvam-query-latent")),
    Family("Kimi K2.5's text", ("k2.5", "k2.5-yarn-short", "k2.5-tied")),
    Family("Kimi-VL's text", ("no-query-latent", "two-shared"), renamed="kimi_vl"),
)


def rename(directory: Path, kind: str) -> None:
    """A checkpoint of nothing but text as the text part of one that sees, by hand; its own type stays unsaid."""
    spelt = WRAPPERS[kind].layouts[0]

    def renamed(state: dict[str, Tensor]) -> None:
        for name in list(state):
            state[spelt.full(name)] = state.pop(name)
        state.update({f"{start}weight": torch.ones(2, 2) for start in spelt.apart})

    def wrapped(config: dict[str, Any]) -> None:
        text = {key: value for key, value in config.items() if key != "model_type"}
        config.clear()
        config.update(model_type=kind, text_config=text)

    edit_shard(directory / "model.safetensors", renamed)
    edit_json(directory / "config.json", wrapped)


def largest(family: Family) -> float:
    """The largest difference of any tensor of any block, as a share of max(1, the tensor's size)."""
    found = 0.0
    for variant in family.variants:
        theirs, _ = oracle(variant)
        with TemporaryDirectory() as place:
            theirs.model.save_pretrained(place)
            if family.renamed:
                rename(Path(place), family.renamed)
            ours = Decoder(load(place))
        for keep in LAYOUTS.values():
            tokens, shown = draw(theirs, 3, 9, keep)
            compared = compare(shown, ours, ours.run(tokens, keep, want=list(ours.sites)))
            assert compared.keys() == shown.values.keys()
            found = max(found, *compared.values())
    return found


def line(family: Family, difference: str) -> str:
    """A line of the table."""
    model, config = oracle(family.variants[0])[0].model, VARIANTS[family.variants[0]].config
    by = f"`{type(model).__name__}`" + (", its files renamed by hand" if family.renamed else "")
    kind = family.renamed or config["model_type"]
    return f"| {family.checkpoints} | `{kind}` | {by} | {len(family.variants)} | {difference} |"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.checkpoints)
def test_the_page_says_what_is_measured(family: Family) -> None:
    """But the digits, which are one machine's."""
    assert largest(family) <= RELATIVE
    page = PAGE.read_text(encoding="utf-8")
    said = re.search(re.escape(line(family, "@")).replace("@", "([0-9.]+e-[0-9]+)"), page)
    assert said is not None, f"the page should have the line {line(family, '…')}"
    assert float(said[1]) <= RELATIVE
    assert f"transformers {transformers.__version__}" in page


if __name__ == "__main__":
    print("\n".join(line(family, f"{largest(family):.1e}") for family in FAMILIES))
