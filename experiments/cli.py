"""The command line, ``k2probe``: demo, check, tensors, params, ablate, norms.

Exit codes: 0, 1 (the run failed: one sentence on stderr says why), 2 (it was asked for in a wrong way). Whatever is
heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from experiments.options import By, How, Kind

if TYPE_CHECKING:
    import pandas as pd

    from experiments.prompts import Prompts
    from hooks import HookedModel


class _Told(TyperGroup):
    """Tells an error that this toolkit raises on purpose in one sentence, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            errors = sys.modules.get("probe.errors")  # loaded, if one of its errors was raised
            if errors is None or not isinstance(error, errors.ProbeError):
                raise
            typer.echo(f"k2probe: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Told,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Every named tensor of the Kimi K2 / DeepSeek-V3 block: look at it, ablate it, and get a table and a picture.",
)

Model = Annotated[
    Path | None, typer.Option("--model", help="A checkpoint directory; without it, the tiny model that ships with us.")
]
Prompt = Annotated[str | None, typer.Option("--prompt", help="One text; what the model says next is the answer.")]
Task = Annotated[
    str | None, typer.Option("--task", help="A shipped task (ioi, capital, job, …), or a file: JSONL, CSV, parquet.")
]
Tensor = Annotated[list[str] | None, typer.Option("--tensor", help="A tensor, in any spelling. Repeat for several.")]
Block = Annotated[list[int] | None, typer.Option("--block", help="A block, counted from 0. Repeat for several.")]
Out = Annotated[Path | None, typer.Option("--out", help="A folder for the whole table (parquet, CSV) and pictures.")]


def main() -> None:
    """The entry point: `k2probe`, ``python -m experiments``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Δ gets a question mark, not a traceback
    if wrong := foreign_rooms():
        typer.echo(f"k2probe: {wrong}", err=True)
        sys.exit(1)
    app(prog_name="k2probe")


def foreign_rooms() -> str | None:
    """What is wrong if Python would take ``probe`` or ``hooks`` from somewhere else than from beside this package;
    else None.

    Their names are common ones, and another distribution's package of the same name may stand before ours on the path.
    """
    home = Path(__file__).resolve().parents[1]
    for room in ("probe", "hooks"):
        spec = find_spec(room)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or ())] if spec else []
        if home / room not in places:
            found = spec.origin or ", ".join(map(str, places)) if spec else None
            where = f"Python finds {found}" if found else "Python finds none"
            return (
                f"the package {room!r} on the path isn't k2-probe's: {where}, ours is {home / room}."
                " Take the other off the path, or install k2-probe in an environment of its own."
            )
    return None


# ---- the card --------------------------------------------------------------------------------------------------------


@app.command()
def tensors(
    block_kind: Annotated[Kind | None, typer.Option("--block-kind", help="Only this kind of block.")] = None,
    query_latent: Annotated[
        bool, typer.Option("--query-latent/--no-query-latent", help="Whether queries are read from a latent, as in K2.")
    ] = True,
) -> None:
    """List every named tensor: number, name, symbol, formula, shape, dtype, other spellings."""
    from experiments.tables import tensor_tables

    for table in tensor_tables(block_kind, query_latent):
        table.print()


@app.command()
def params(
    config: Annotated[
        Path | None, typer.Argument(help="A config.json, or a directory with one; without it, Kimi K2's own.")
    ] = None,
) -> None:
    """Count a model's parameters, component by component, from the card."""
    from experiments.tables import parameter_tables
    from probe import KIMI_K2, Dims

    for table in parameter_tables(KIMI_K2 if config is None else Dims.from_config(config)):
        table.print()


# ---- the studies -----------------------------------------------------------------------------------------------------


@app.command()
def ablate(
    prompt: Prompt = None,
    task: Task = None,
    tensor: Tensor = None,
    block: Block = None,
    by: Annotated[By | None, typer.Option("--by", help="A cell for each part of a tensor, not for the whole.")] = None,
    how: Annotated[How, typer.Option("--how", help="Values from reference prompts, or zero.")] = "resample",
    metric: Annotated[list[str] | None, typer.Option("--metric", help="What to measure; without it, all.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="With --prompt: the right next token.")] = None,
    wrong: Annotated[str | None, typer.Option("--wrong", help="With --prompt: a wrong next token.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of reference prompts.", min=0, max=2**63 - 1)] = 0,
    draws: Annotated[int, typer.Option("--draws", help="How many draws to average over.", min=1)] = 1,
    model: Model = None,
    out: Out = None,
) -> None:
    """Edit each tensor of each block, or a part of it, and see what the model makes of it."""
    _one_of(prompt, task)
    if prompt is None and (answer or wrong):
        raise typer.BadParameter("--answer and --wrong go with --prompt; a task brings its own.")
    from experiments import ablate as study
    from experiments import frames
    from experiments.study import folder

    place = folder(out) if out else None
    hooked, name = _load(model)
    if prompt is not None and answer is None and wrong is None:
        answer, wrong = _own_choices(hooked, prompt)
    prompts = _prompts(hooked, model, prompt, task, answer, wrong)
    df = study.ablate(
        hooked,
        prompts,
        tensors=tensor,
        blocks=block,
        by=by,
        how=how,
        metrics=metric,
        seed=seed,
        draws=draws,
        name=name,
    )
    _say_effects(df, by)
    if place:
        from experiments.pictures import heat_maps, save

        files = [frames.write(df, place / f"ablation.{ending}") for ending in ("parquet", "csv")]
        _say_files([*files, *(save(ax, place / f"{name}.png") for name, ax in heat_maps(df, by))])


@app.command()
def norms(
    prompt: Prompt = None,
    task: Task = None,
    tensor: Tensor = None,
    block: Block = None,
    channels: Annotated[int, typer.Option("--channels", help="How many of the largest channels.", min=0)] = 1,
    model: Model = None,
    out: Out = None,
) -> None:
    """Measure how large each tensor is, by block and position: rms, l2, the largest channels."""
    _one_of(prompt, task)
    from experiments import frames
    from experiments import norms as study
    from experiments.study import folder
    from experiments.tables import norm_table

    place = folder(out) if out else None
    hooked, name = _load(model)
    prompts = _prompts(hooked, model, prompt, task)
    df = study.norms(hooked, prompts, tensors=tensor, blocks=block, channels=channels, name=name)
    norm_table(df).print()
    if place:
        from experiments import plots
        from experiments.pictures import save

        files = [frames.write(df, place / f"norms.{ending}") for ending in ("parquet", "csv")]
        _say_files([*files, save(plots.norms(df), place / "norms.png")])


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="A folder for the table and the pictures.")] = Path("demo"),
) -> None:
    """Ablate the tiny model's tensors on real prompts; leaves a table and three pictures."""
    import torch

    from experiments import demo as study

    torch.set_num_threads(1)
    study.demo(out)


@app.command()
def check(model: Model = None) -> None:
    """Test a model and its hooks: each fires once and acts, sums are what they should be, nothing is left behind."""
    from experiments import check as study

    hooked, _ = _load(model)
    findings = study.check(hooked)
    for finding in findings:
        typer.echo(finding)
    if failed := study.failures(findings):
        names = "; ".join(f"{finding.what} ({', '.join(finding.failed)})" for finding in failed)
        raise study.CheckFailed(f"{len(failed)} of {len(findings)} checks failed: {names}.")


# ---- what the studies' commands share --------------------------------------------------------------------------------


def _one_of(prompt: str | None, task: str | None) -> None:
    if (prompt is None) == (task is None):
        raise typer.BadParameter("give --prompt TEXT or --task NAME, one of the two.")


def _load(directory: Path | None) -> tuple[HookedModel, str]:
    """The model, and its name in tables."""
    import torch

    from hooks import HookedModel
    from probe import TINY

    if directory is None:
        torch.set_num_threads(1)  # the tiny model's products are so small that threads would only wait for each other
    place = TINY if directory is None else directory
    return HookedModel.load(place), place.resolve().name


def _prompts(
    model: HookedModel,
    directory: Path | None,
    prompt: str | None,
    task: str | None,
    answer: str | None = None,
    wrong: str | None = None,
) -> Prompts:
    """The prompts asked for."""
    from experiments.prompts import Prompts
    from probe import TINY
    from probe.errors import BadText

    place = TINY if directory is None else directory
    if model.tokenizer is None:
        raise BadText(f"{place}: there is no tokenizer.json, so it can't be asked in words.")
    if prompt is not None:
        return Prompts.text(prompt, model.tokenizer, answer=answer, wrong=wrong, directory=place)
    assert task is not None, "_one_of saw to it"
    return Prompts.load(task, model.tokenizer, place)


def _own_choices(model: HookedModel, prompt: str) -> tuple[str, str]:
    """The two tokens that the model would rather say next, for a text without an answer; and says so."""
    tokens, keep = model.batch(prompt)
    logits = model.run(tokens, keep)["logits"][0, -1]
    assert model.tokenizer is not None, "model.batch saw to it"
    answer, wrong = (model.tokenizer.token(int(i)) for i in logits.topk(2).indices)
    typer.echo(f"answer: {answer!r}, the model's own first choice; wrong: {wrong!r}, its second")
    return answer, wrong


def _say_effects(df: pd.DataFrame, by: By | None) -> None:
    """The table of an ablation's first metric, and what a reader must know of it."""
    from experiments.tables import effect_tables

    for table in effect_tables(df, by):
        table.print()
    if cells := df.attrs["unmatched"]:
        typer.echo(f"–: {cells} cells have no value: no reference token chose an expert that they need.")
    for reason in df.attrs["left_out"].values():
        typer.echo(f"left out: {reason}")


def _say_files(files: list[Path]) -> None:
    typer.echo("wrote " + ", ".join(map(str, files)))
