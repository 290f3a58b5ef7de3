"""The demo: ablate every named tensor of the tiny model on real prompts; leave words, a table and three pictures.

It is the first study to read: load a model, load prompts, ablate, measure norms, draw, write, and check itself at last.
It takes about a quarter of a minute on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from experiments import frames, plots
from experiments.ablate import ablate
from experiments.check import CheckFailed, Finding, no_hook_left, null_edits
from experiments.diagram import block_diagram
from experiments.frames import tensors
from experiments.norms import norms
from experiments.pictures import save
from experiments.prompts import Prompts
from experiments.study import folder
from experiments.tables import effect_grid
from hooks import HookedModel
from probe.card import plain
from probe.errors import BadText

METRIC = "logit_difference"


def demo(out: str | Path = "demo", task: str = "ioi") -> pd.DataFrame:
    """Run it, print what it finds, and write ``ablation.parquet``, ``ablation.csv`` and three pictures into ``out``.

    Returns:
        The ablation's frame.

    Raises:
        BadPath: ``out`` can't be written; before anything is computed.
        CheckFailed: two cells that are equal by construction differ, an edit that does nothing changes something, or a
            hook is left on the model.
    """
    place = folder(out)
    model = HookedModel.load()
    if model.tokenizer is None:
        raise BadText("the tiny model has lost its tokenizer.json: reinstall k2-probe.")
    prompts = Prompts.load(task, model.tokenizer)
    print(f"{len(prompts)} prompts like {prompts.rows[0].clean!r} → {str(prompts.rows[0].answer)!r}\n")

    df = ablate(model, prompts, name="tiny")
    effects = df[df["metric"] == METRIC]
    effect_grid(effects, "block", most=10).print()
    print("The largest effects, the residual stream apart (to resample that is to swap the prompt):")
    for line in largest(effects):
        print(f"  {line}")

    sizes = norms(model, prompts, tensors=list(plots.RESIDUAL), channels=0, name="tiny")
    files = [frames.write(df, place / f"ablation.{ending}") for ending in ("parquet", "csv")]
    files += [save(ax, place / f"{name}.png") for name, ax in pictures(model, effects, sizes)]

    print("\nSelf-checks:")
    for check in checks(model, prompts, df):
        print(f"  {check}")
    print(f"\nWrote {', '.join(map(str, files))}")
    return df


def largest(effects: pd.DataFrame, most: int = 3) -> Iterator[str]:
    """The largest effects of one metric in words, those of equal cells told once, the residual stream left out."""
    own = effects[effects["same_as"].isna() & ~effects["tensor"].isin(list(plots.RESIDUAL))]
    for i in own["effect"].abs().sort_values(ascending=False).index[:most]:
        row = own.loc[[i]].to_dict("records")[0]
        same_block = effects[effects["block"] == row["block"]]
        twins = same_block.loc[same_block["same_as"].eq(row["tensor"]).fillna(False), "tensor"]
        also = f"; {', '.join(twins)}: the same by construction" if len(twins) else ""
        yield (
            f"to {row['edit']} {row['tensor']} ({plain(tensors()[row['tensor']].symbol)}) of block {row['block']}"
            f" takes the {METRIC.replace('_', ' ')} from {row['base']:.1f} to {row['value']:.1f} {row['unit']}"
            f" (effect {plots.short(row['effect'], signed=True)} ± {plots.short(row['stderr'])}{also})"
        )


def pictures(model: HookedModel, effects: pd.DataFrame, sizes: pd.DataFrame) -> Iterator[tuple[str, Axes]]:
    """The heat map of effects, the residual stream's norms, the diagram of the MoE block with the largest effects."""
    yield "effects", plots.heatmap(effects)
    yield "norms", plots.norms(sizes)
    moe = [block for block, is_moe in enumerate(model.dims.moe) if is_moe]
    inside = effects[effects["block"].isin(moe) & ~effects["tensor"].isin(list(plots.RESIDUAL))]
    block = max(moe, key=lambda i: inside.loc[inside["block"] == i, "effect"].abs().max())
    yield "block", block_diagram(model.sites.card(block), effects, block=block)


# ---- self-checks -----------------------------------------------------------------------------------------------------


def checks(model: HookedModel, prompts: Prompts, df: pd.DataFrame) -> Iterator[str]:
    """What was found to hold, in sentences.

    Raises:
        CheckFailed: something that should hold doesn't.
    """
    yield equal_pairs(model, prompts, df)
    base = model.run(*prompts.subset(range(min(8, len(prompts)))).batch(model.device), want=None)
    yield held(null_edits(model, base, list(model.sites)))
    yield held(no_hook_left(model, base))


def equal_pairs(model: HookedModel, prompts: Prompts, df: pd.DataFrame) -> str:
    """In one block of each kind: a copied cell of each group, computed apart, equals what it was copied from."""
    blocks = [model.dims.moe.index(moe) for moe in sorted(set(model.dims.moe))]
    copied = df[df["same_as"].notna() & df["block"].isin(blocks)].astype({"tensor": str})
    pairs = copied.groupby(["block", "same_as"])[["tensor"]].last().reset_index().to_dict("records")
    again = ablate(model, prompts, tensors=[f"blocks.{pair['block']}.{pair['tensor']}" for pair in pairs])
    both = again.merge(df, on=["block", "tensor", "metric"], suffixes=("", "_copied"))
    worst = float((both["value"] - both["value_copied"]).abs().max())
    if "same_as" in again or len(both) != len(again) or not worst < 1e-3:
        raise CheckFailed(f"cells that are equal by construction differ by {worst:.1e}.")
    shown = ", ".join(f"{pair['tensor']} = {pair['same_as']}" for pair in pairs if pair["block"] == blocks[-1])
    near = f"to {worst:.0e}" if worst else "exactly"
    return f"equal pairs are equal, {near}, when computed apart; in block {blocks[-1]}: {shown}"


def held(finding: Finding) -> str:
    """A finding of the self-test, in words.

    Raises:
        CheckFailed: it failed.
    """
    if finding.failed:
        raise CheckFailed(f"this should hold: {finding.what}; it does not at {', '.join(finding.failed)}.")
    return f"{finding.what} ({finding.of} tensors)"
