"""What the commands share: options, prompts asked for in words, what is said in a terminal and left in files.

Whatever is heavy is imported inside the functions, so that ``--help`` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from experiments.options import By, Direction, Dtype, Keeping
from experiments.plain import shown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from experiments.prompts import Prompts
    from experiments.tables import Table
    from hooks import HookedModel

Model = Annotated[
    Path | None, typer.Option("--model", help="A checkpoint directory; without it, the tiny model that ships with us.")
]
Keep = Annotated[
    Keeping,
    typer.Option(
        "--keep", help="The model's weights: expanded in memory, stored there as they are, or read from disk."
    ),
]
Precision = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="What to compute in; without it, as stored, FP8 and INT4 as bfloat16."),
]
Beyond = Annotated[
    bool, typer.Option("--beyond", help="Run texts that are longer than the model's max_position_embeddings, too.")
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", help="One text, in place of a task; what the model says next is the answer.")
]
Task = Annotated[
    str | None, typer.Option("--task", help="A shipped task (ioi, capital, job, …), or a file: JSONL, CSV, parquet.")
]
Tensor = Annotated[list[str] | None, typer.Option("--tensor", help="A tensor, in any spelling. Repeat for several.")]
Block = Annotated[list[int] | None, typer.Option("--block", help="A block, counted from 0. Repeat for several.")]


def _known(parts: list[str] | None) -> list[str] | None:
    if unknown := [part for part in parts or [] if part not in get_args(By)]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(get_args(By))}.")
    return parts


Parts = Annotated[
    list[str] | None,  # typer takes no list of a Literal
    typer.Option(
        "--by",
        callback=_known,
        metavar=f"[{'|'.join(get_args(By))}]",
        help="A cell for each such part of a tensor, not for the whole. Repeat for a product.",
    ),
]
At = Annotated[str | None, typer.Option("--at", help="Only there: a span (END, subject[-1]), or a position from 0.")]
Metrics = Annotated[
    list[str] | None, typer.Option("--metric", help="What to measure; without it, all that the prompts allow.")
]
Answer = Annotated[str | None, typer.Option("--answer", help="With --prompt: the right next token.")]
Wrong = Annotated[str | None, typer.Option("--wrong", help="With --prompt: a wrong next token.")]
Corrupt = Annotated[str | None, typer.Option("--corrupt", help="With --prompt: the other text, of as many tokens.")]


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise typer.BadParameter(f"{seed}: a seed is from 0 to 2^63 - 1.")
    return seed


Draw = Annotated[int, typer.Option("--seed", callback=_seed, help="Of all that is drawn.")]
Way = Annotated[Direction, typer.Option("--direction", help="Clean into corrupt: denoise; corrupt into clean: noise.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it would cost.")]
Out = Annotated[Path | None, typer.Option("--out", help="A folder for the whole table (parquet, CSV) and pictures.")]
PerPrompt = Annotated[
    bool,
    typer.Option(
        "--per-prompt", help="With --out: a row for each prompt into its files, in place of averages and pictures."
    ),
]


def one_of(prompt: str | None, task: str | None, **its: str | None) -> None:
    """Prompts are a text, with what goes with it, or a task."""
    if (prompt is None) == (task is None):
        raise typer.BadParameter("give --prompt TEXT or --task NAME, one of the two.")
    if given := [f"--{option}" for option, value in its.items() if prompt is None and value is not None]:
        raise typer.BadParameter(f"{', '.join(given)}: a task brings its own; it goes with --prompt.")


def two_texts(prompt: str | None, corrupt: str | None) -> None:
    """A text goes with the other that values come from."""
    if prompt is not None and corrupt is None:
        raise typer.BadParameter("--prompt goes with --corrupt TEXT: values go from one into the other.")


def folder_for(out: Path | None, dry_run: bool, per_prompt: bool = False) -> Path | None:
    """Where files go, tried at once."""
    from experiments.study import folder

    if per_prompt and out is None:
        raise typer.BadParameter("--per-prompt goes with --out DIR: its rows go to files.")
    return folder(out) if out and not dry_run else None


def opened(directory: Path | None, keep: Keeping, dtype: Dtype | None, beyond: bool = False) -> tuple[HookedModel, str]:
    """The model, and its name in tables. Of a checkpoint it is said first what its weights will take."""
    import torch

    from hooks import HookedModel
    from probe import TINY, memory

    if directory is None:
        torch.set_num_threads(1)  # the tiny model's products are so small that threads would only wait for each other
        return HookedModel.load(TINY, torch_dtype(dtype), keep=keep).reaching(beyond), TINY.name
    typer.echo(shown(f"{memory(directory, torch_dtype(dtype))}\n"))
    hooked = HookedModel.load(directory, torch_dtype(dtype), keep=keep)
    for note in hooked.notes:
        typer.echo(shown(f"note: {note}"))
    if hooked.tokenizer is not None:
        typer.echo(shown(f"note: {hooked.tokenizer.start}"))
    return hooked.reaching(beyond), directory.resolve().name


def torch_dtype(dtype: Dtype | None) -> Any:
    """torch's own, by name."""
    import torch

    return None if dtype is None else getattr(torch, dtype)


def prompts_of(
    model: HookedModel,
    directory: Path | None,
    prompt: str | None,
    task: str | None,
    answer: str | None = None,
    wrong: str | None = None,
    corrupt: str | None = None,
) -> Prompts:
    """The prompts asked for."""
    from experiments.prompts import Prompts
    from probe import TINY
    from probe.errors import BadText

    place = TINY if directory is None else directory
    if model.tokenizer is None:
        raise BadText(f"{place}: there is no tokenizer, so it can't be asked in words.")
    if prompt is not None:
        return Prompts.text(prompt, model.tokenizer, corrupt=corrupt, answer=answer, wrong=wrong, directory=place)
    assert task is not None, "_one_of saw to it"
    return Prompts.load(task, model.tokenizer, place)


def judged(
    model: HookedModel,
    directory: Path | None,
    prompt: str | None,
    task: str | None,
    answer: str | None,
    wrong: str | None,
    corrupt: str | None = None,
) -> Prompts:
    """The prompts asked for; of a text without an answer, with the model's own."""
    if prompt is not None and answer is None and wrong is None:
        answer, wrong = _own_choices(model, prompt, corrupt)
    return prompts_of(model, directory, prompt, task, answer, wrong, corrupt)


def _own_choices(model: HookedModel, prompt: str, corrupt: str | None = None) -> tuple[str, str]:
    """For a text without an answer what the model would rather say next, and what it would say of a corrupt text or
    else its second choice; and says so."""

    def choices(text: str) -> list[str]:
        assert model.tokenizer is not None, "model.batch saw to it"
        tokens, keep = model.batch(text)
        return [model.tokenizer.token(int(i)) for i in model.run(tokens, keep)["logits"][0, -1].topk(2).indices]

    (answer, wrong), which = choices(prompt), "its second"
    if corrupt is not None:
        wrong, which = choices(corrupt)[0], "its first for the corrupt text"
    typer.echo(f"answer: {answer!r}, the model's own first choice; wrong: {wrong!r}, {which}")
    return answer, wrong


def place_of(text: str | None) -> str | int | None:
    """A span's name, or a position."""
    return int(text) if text is not None and re.fullmatch("-?[0-9]{1,18}", text) else text


def show(
    df: pd.DataFrame,
    name: str,
    place: Path | None,
    tables: Callable[[pd.DataFrame], Iterable[Table]],
    pictures: Callable[[pd.DataFrame], Iterable[tuple[str, Axes]]],
    *,
    notes: Iterable[str] = (),
    averaged: bool = True,
    last: bool = True,
) -> None:
    """A study's frame as files; then its tables, what a reader must know of it, and its pictures: whatever comes of
    these, the numbers are there.

    Args:
        name: of the files.
        place: where they go; None: nowhere.
        averaged: whether there is anything to show: rows by prompt go to files alone.
        last: whether the command ends here.

    Raises:
        NotFinite: at the very end, where something that was run is NaN or infinite.
    """
    from experiments import finite, frames
    from experiments.pictures import save

    files = [frames.write(df, place / f"{name}.{ending}") for ending in ("parquet", "csv")] if place else []
    for table in tables(df) if averaged else ():
        table.print()
    for note in notes:
        typer.echo(shown(note))
    if place:
        drawn = pictures(df) if averaged else ()
        say_files([*files, *(save(ax, place / f"{label}.png") for label, ax in drawn)])
    if last:
        finite.check([df.attrs.get(finite.NOT_FINITE)])


def show_effects(df: pd.DataFrame, name: str, place: Path | None) -> None:
    """The frame of an ablation or of patches; see `show`."""
    from experiments import effect_plots
    from experiments.tables import effect_tables

    cells, left_out = df.attrs["unmatched"], df.attrs.get("left_out", {})
    notes = [f"–: no value, as it needs an expert that the source didn't choose (cells: {cells})."] if cells else []
    notes += [f"left out: {reason}" for reason in left_out.values()]
    show(df, name, place, effect_tables, effect_plots.pictures, notes=notes, averaged="example" not in df)


def say_cost(study: str, what: str, cost: Mapping[str, float], **more: Mapping[str, float]) -> None:
    """What a study would take, of ``what``; and what goes with it."""
    from experiments.tables import unit_table

    unit_table(study, [what, *more], [cost, *more.values()]).print()


def say_files(files: list[Path]) -> None:
    """What was written."""
    typer.echo(shown("wrote " + ", ".join(map(str, files))))
