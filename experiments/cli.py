"""The command line, ``k2probe``: demo, check, tensors, params, run, and a command for each study.

Exit codes: 0, 1 (the run failed: one sentence on stderr says why), 2 (it was asked for in a wrong way). Whatever is
heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from typer.core import TyperGroup

from experiments.options import By, Control, Direction, Hold, How, Keeping, Kind, Probe, Rest, Scale, When

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

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
Keep = Annotated[
    Keeping,
    typer.Option(
        "--keep", help="The model's weights: expanded in memory, stored there as they are, or read from disk."
    ),
]
Prompt = Annotated[str | None, typer.Option("--prompt", help="One text; what the model says next is the answer.")]
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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it would cost.")]
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
    place: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint directory, or a config.json alone; without it, Kimi K2's own config."),
    ] = None,
) -> None:
    """Count a model's parameters, component by component: a checkpoint's own, from its headers, or from the card."""
    from experiments.tables import parameter_tables, tally_tables
    from probe import KIMI_K2, Dims
    from probe.errors import BadCheckpoint
    from probe.headers import holds_weights
    from probe.params import tally

    if place is None or not holds_weights(place):
        for table in parameter_tables(KIMI_K2 if place is None else Dims.from_config(place)):
            table.print()
        return
    found = tally(place)
    for table in tally_tables(place.resolve().name, found):
        table.print()
    if found.faults:
        raise BadCheckpoint(f"{place}: not as its config says in {len(found.faults)} of its tensors, listed above.")


# ---- the studies -----------------------------------------------------------------------------------------------------


@app.command()
def ablate(
    prompt: Prompt = None,
    task: Task = None,
    tensor: Tensor = None,
    block: Block = None,
    by: Parts = None,
    at: At = None,
    how: Annotated[
        How, typer.Option("--how", help="What stands in its place; exclude takes experts out.")
    ] = "resample",
    metric: Metrics = None,
    answer: Answer = None,
    wrong: Wrong = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of reference prompts.", min=0, max=2**63 - 1)] = 0,
    draws: Annotated[int, typer.Option("--draws", help="How many draws to average over.", min=1)] = 1,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Edit each tensor of each block, or a part of it, and see what the model makes of it."""
    _one_of(prompt, task)
    if prompt is None and (answer or wrong):
        raise typer.BadParameter("--answer and --wrong go with --prompt; a task brings its own.")
    from experiments import ablate as study
    from experiments.study import folder

    place = folder(out) if out and not dry_run else None
    hooked, name = _load(model, keep)
    if prompt is not None and answer is None and wrong is None:
        answer, wrong = _own_choices(hooked, prompt)
    prompts = _prompts(hooked, model, prompt, task, answer, wrong)
    asked: dict[str, Any] = {
        "tensors": tensor,
        "blocks": block,
        "by": by,
        "at": _place(at),
        "how": how,
        "metrics": metric,
    }
    asked |= {"seed": seed, "draws": draws, "name": name}
    if dry_run:
        _say_cost("ablate", prompts, study.outlook(hooked, prompts, **asked))
        return
    _say_effects(study.ablate(hooked, prompts, **asked), "ablation", place)


@app.command()
def patch(
    prompt: Prompt = None,
    corrupt: Annotated[
        str | None, typer.Option("--corrupt", help="With --prompt: the other text, of as many tokens.")
    ] = None,
    task: Task = None,
    tensor: Tensor = None,
    block: Block = None,
    by: Parts = None,
    at: At = None,
    window: Annotated[int, typer.Option("--window", help="How many blocks to patch together.", min=1)] = 1,
    direction: Annotated[
        Direction, typer.Option("--direction", help="Clean into corrupt: denoise; corrupt into clean: noise.")
    ] = "denoise",
    noise_at: Annotated[
        str | None,
        typer.Option("--noise-at", help="Corrupt is clean with noise on this span's or position's embedding."),
    ] = None,
    noise_std: Annotated[
        float, typer.Option("--noise-std", help="Of that noise, in standard deviations of the embeddings.")
    ] = 3.0,
    frozen: Annotated[
        list[str] | None, typer.Option("--frozen", help="Held at the base's values: experts, gates, A, s_*. Repeat.")
    ] = None,
    metric: Metrics = None,
    answer: Answer = None,
    wrong: Wrong = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the noise.", min=0, max=2**63 - 1)] = 0,
    draws: Annotated[int, typer.Option("--draws", help="How many draws of noise to average over.", min=1)] = 1,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Put values of one run into another, and see how much of the difference comes with them.

    Without --tensor and --by: the residual stream into each block, position by position. Tensors that are named are
    patched whole, unless --by says otherwise.
    """
    _one_of(prompt, task)
    if prompt is None and (answer or wrong or corrupt):
        raise typer.BadParameter("--corrupt, --answer and --wrong go with --prompt; a task brings its own.")
    if prompt is not None and (corrupt is None) == (noise_at is None):
        raise typer.BadParameter("--prompt goes with --corrupt TEXT or --noise-at PLACE, one of the two.")
    from experiments import patch as study
    from experiments.study import folder

    place = folder(out) if out and not dry_run else None
    hooked, name = _load(model, keep)
    if prompt is not None and answer is None and wrong is None:
        answer, wrong = _own_choices(hooked, prompt, corrupt)
    prompts = _prompts(hooked, model, prompt, task, answer, wrong, corrupt)
    parts = by or (None if tensor or at else "position")
    asked: dict[str, Any] = {
        "tensors": tensor or ["x_n"],
        "blocks": block,
        "by": parts,
        "at": _place(at),
        "window": window,
    }
    asked |= {"direction": direction, "noise_at": _place(noise_at), "noise_std": noise_std, "frozen": frozen or ()}
    asked |= {"metrics": metric, "seed": seed, "draws": draws, "name": name}
    if dry_run:
        _say_cost("patch", prompts, study.outlook(hooked, prompts, **asked))
        return
    _say_effects(study.patch(hooked, prompts, **asked), "patch", place)


@app.command()
def norms(
    prompt: Prompt = None,
    task: Task = None,
    tensor: Tensor = None,
    block: Block = None,
    channels: Annotated[int, typer.Option("--channels", help="How many of the largest channels.", min=0)] = 1,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
) -> None:
    """Measure how large each tensor is, by block and position: rms, l2, the largest channels."""
    _one_of(prompt, task)
    from experiments import norms as study
    from experiments.pictures import size_maps
    from experiments.study import folder
    from experiments.tables import norm_table, stream_tables

    place = folder(out) if out else None
    hooked, name = _load(model, keep)
    prompts = _prompts(hooked, model, prompt, task)
    df = study.norms(hooked, prompts, tensors=tensor, blocks=block, channels=channels, name=name)
    for table in (norm_table(df), *stream_tables(df)):
        table.print()
    if place:
        _save(place, "norms", df, size_maps(df))


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
def check(model: Model = None, keep: Keep = "expanded") -> None:
    """Test a model and its hooks: each fires once and acts, sums are what they should be, nothing is left behind."""
    from experiments import check as study

    hooked, _ = _load(model, keep)
    findings = study.check(hooked)
    for finding in findings:
        typer.echo(finding)
    if failed := study.failures(findings):
        names = "; ".join(f"{finding.what} ({', '.join(finding.failed)})" for finding in failed)
        raise study.CheckFailed(f"{len(failed)} of {len(findings)} checks failed: {names}.")


@app.command()
def lens(
    prompt: Prompt = None,
    task: Task = None,
    block: Block = None,
    role: Annotated[
        list[str] | None, typer.Option("--role", help="A span to read at: END, subject[-1]. Repeat for several.")
    ] = None,
    scale: Annotated[Scale, typer.Option("--scale", help="The final norm's: of each place, or of the last.")] = "own",
    answer: Annotated[str | None, typer.Option("--answer", help="With --prompt: the right next token.")] = None,
    wrong: Annotated[str | None, typer.Option("--wrong", help="With --prompt: a wrong next token.")] = None,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
) -> None:
    """Read the residual stream as if each place were the last, and see which heads and experts add up to the answer."""
    _one_of(prompt, task)
    from experiments import lens as study
    from experiments import lens_plots
    from experiments.study import folder
    from experiments.tables import direct_table, lens_tables

    place = folder(out) if out else None
    hooked, name = _load(model, keep)
    if prompt is not None and answer is None and wrong is None:
        answer, wrong = _own_choices(hooked, prompt)
    prompts = _prompts(hooked, model, prompt, task, answer, wrong)
    df = study.lens(hooked, prompts, blocks=block, roles=role or ["END"], scale=scale, name=name)
    for table in lens_tables(df):
        table.print()
    if place:
        _save(place, "lens", df, lens_plots.pictures(df))
    if len(prompts.has()) < 2:
        typer.echo("left out: what adds up to the logit difference, which takes an answer and a wrong one.")
        return
    parts = study.direct(hooked, prompts, name=name)
    direct_table(parts).print()
    if place:
        _save(place, "direct", parts, [("direct", lens_plots.direct(parts))])


@app.command()
def scores(
    prompt: Prompt = None,
    task: Task = None,
    block: Block = None,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
) -> None:
    """See of each head whether its attention goes by content or by position, and which known kind of head it is."""
    _one_of(prompt, task)
    from experiments import scores as study
    from experiments.pictures import head_maps
    from experiments.study import folder
    from experiments.tables import score_table

    place = folder(out) if out else None
    hooked, name = _load(model, keep)
    df = study.scores(hooked, _prompts(hooked, model, prompt, task), blocks=block, name=name)
    score_table(df).print()
    if place:
        _save(place, "scores", df, head_maps(df))


@app.command()
def routing(
    task: Annotated[
        list[str],
        typer.Option("--task", help="A shipped task, or a file of prompts. Several are held against each other."),
    ],
    block: Block = None,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
) -> None:
    """See which experts each set of prompts uses, and what of that goes beyond what its tokens alone would say."""
    from experiments import routing as study
    from experiments.pictures import load_maps
    from experiments.study import folder
    from experiments.tables import routing_tables

    place = folder(out) if out else None
    hooked, name = _load(model, keep)
    sets = [_prompts(hooked, model, None, one) for one in task]
    df = study.routing(hooked, sets, blocks=block, name=name)
    for table in routing_tables(df):
        table.print()
    if place:
        _save(place, "routing", df, load_maps(df))


@app.command()
def top(
    tensor: Annotated[str, typer.Argument(help="What to rank, in any spelling: blocks.0.h, blocks.2.affinity.")],
    task: Annotated[
        str, typer.Option("--task", help="A shipped task, or a file of prompts: the texts to look through.")
    ],
    at: Annotated[
        list[str] | None, typer.Option("--at", metavar="DIM=N", help="In the tensor's own dims: f=17, e=5. Repeat.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="How many tokens.", min=1)] = 10,
    smallest: Annotated[bool, typer.Option("--smallest", help="The tokens at which it is smallest.")] = False,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
) -> None:
    """Find the tokens at which a neuron or an expert is most active, with what stands around them."""
    where: dict[str, list[int]] = {}
    for one in at or []:
        dim, _, number = one.partition("=")
        if not number.isdecimal():
            raise typer.BadParameter(f"--at {one}: give a dim and a number, as in f=17.")
        where.setdefault(dim, []).append(int(number))
    from experiments import bars
    from experiments import top as study
    from experiments.study import folder
    from experiments.tables import top_tables

    place = folder(out) if out else None
    hooked, name = _load(model, keep)
    prompts = _prompts(hooked, model, None, task)
    df = study.top(hooked, prompts, tensor, where=where, n=n, smallest=smallest, name=name)
    for table in top_tables(df):
        table.print()
    if place:
        _save(place, "top", df, bars.rankings(df))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    second: Annotated[Path, typer.Argument(help="Another one, of a model of the same sizes.")],
    prompt: Prompt = None,
    task: Task = None,
    out: Out = None,
) -> None:
    """Hold two checkpoints against each other: weights; with prompts, sizes of activations and routing too."""
    if prompt is not None or task is not None:
        _one_of(prompt, task)
    from experiments import compare as study
    from experiments.pictures import comparison_maps
    from experiments.study import folder
    from experiments.tables import comparison_tables

    place = folder(out) if out else None
    one, other = study.load_both(first, second)
    prompts = None if prompt is None and task is None else _prompts(one, first, prompt, task)
    df = study.compare(one, other, prompts, names=(first.resolve().name, second.resolve().name))
    for table in comparison_tables(df):
        table.print()
    if place:
        _save(place, "compare", df, comparison_maps(df))


@app.command()
def run(
    spec: Annotated[str, typer.Argument(help="A TOML file; or the name of one that ships with us: ablate, norms.")],
    out: Annotated[Path | None, typer.Option("--out", help="The run folder; without it, runs/NAME.")] = None,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Every N-th unit from the I-th on; others do the rest.")
    ] = "1/1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run, and at what cost.")] = False,
) -> None:
    """Run the study that a TOML file describes into a folder; run again, it goes on where it ended."""
    parts = shard.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--shard {shard}: give two numbers, as in 2/4 for the second of four.")
    import torch

    from experiments import runs
    from experiments.spec import read
    from experiments.tables import unit_table

    asked = read(spec)
    if not any("directory" in unit.model for unit in asked.units):
        torch.set_num_threads(1)  # as in _load
    if dry_run:
        unit_table(asked.study, [unit.label for unit in asked.units], runs.plan(asked)).print()
        return
    place = Path("runs", asked.name) if out is None else out
    runs.run(asked, place, shard=(int(parts[0]), int(parts[1])))
    done, units = runs.finished(place)
    typer.echo(f"{done} of {units} units are finished" + ("" if done < units else ", and joined"))
    _say_files([place / name for name in (("units",) if done < units else ("frame.parquet", "frame.csv", "pictures"))])


@app.command()
def probe(
    task: Annotated[str, typer.Option("--task", help="A shipped task (capital, …), or a file: JSONL, CSV, parquet.")],
    label: Annotated[
        str,
        typer.Option("--label", help="What to read: label or answer, the rows' own; or a task or file, its answers."),
    ] = "label",
    tensor: Tensor = None,
    block: Block = None,
    at: Annotated[
        list[str] | None, typer.Option("--at", help="A span (subject[-1]), or a position from 0. Repeat for several.")
    ] = None,
    expert: Annotated[int | None, typer.Option("--expert", help="Whose slot to read, of tensors with slots.")] = None,
    kind: Annotated[Probe, typer.Option("--probe", help="The kind of linear probe.")] = "ridge",
    control: Annotated[
        list[str] | None,
        typer.Option("--control", help=f"What to hold it against: {', '.join(get_args(Control))}; without it, all."),
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="Another task or file to read with the same probes.")
    ] = None,
    width: Annotated[int, typer.Option("--width", help="Principal components that a probe sees.", min=1)] = 32,
    folds: Annotated[int, typer.Option("--folds", help="Parts that groups of prompts are dealt into.")] = 6,
    seed: Annotated[int, typer.Option("--seed", help="Of folds, shuffles, random weights.", min=0, max=2**63 - 1)] = 0,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
) -> None:
    """Read a label out of each tensor by a linear probe, and see what controls would give."""
    from experiments import probe_plots
    from experiments import probes as study
    from experiments.prompts import Prompts
    from experiments.study import folder
    from experiments.tables import probe_tables
    from probe import TINY

    place = folder(out) if out else None
    hooked, name = _load(model, keep)
    prompts = _prompts(hooked, model, None, task)
    own = label in ("label", "answer")
    df = study.probes(
        hooked,
        prompts,
        label if own else "answer",
        of=None if own else Prompts.load(label, prompts.tokenizer, model or TINY),
        tensors=tensor,
        blocks=block,
        at=[int(x) if x.isdecimal() else x for x in at] if at else None,
        e=expert,
        probe=kind,
        width=width,
        folds=folds,
        controls=get_args(Control) if control is None else cast("list[Control]", control),
        test=Prompts.load(test, prompts.tokenizer, model or TINY) if test else None,
        seed=seed,
        name=name,
    )
    for table in probe_tables(df):
        table.print()
    for reason in df.attrs["left_out"].values():
        typer.echo(f"left out: {reason}")
    if place:
        _save(place, "probes", df, probe_plots.pictures(df))


@app.command()
def steer(
    direction: Annotated[
        str,
        typer.Argument(
            help="token:WORD; or means:answer=CLASS (ridge, logistic; label=), learnt from reference prompts."
        ),
    ],
    tensor: Annotated[str, typer.Option("--tensor", help="What is steered, in any spelling: blocks.2.x_next.")],
    task: Annotated[str, typer.Option("--task", help="A shipped task (agreement, …), or a file: JSONL, CSV, parquet.")],
    at: Annotated[
        str | None, typer.Option("--at", help="A span, or a position (-1: the last); without it, every token.")
    ] = None,
    when: Annotated[
        When, typer.Option("--when", help="Tokens of the prompt, of the steps of decoding, both.")
    ] = "both",
    dose: Annotated[
        list[float] | None,
        typer.Option("--dose", help="In multiples of the tensor's rms; both signs are tried. Repeat for several."),
    ] = None,
    head: Annotated[int | None, typer.Option("--head", help="The head that is steered alone.")] = None,
    expert: Annotated[
        int | None, typer.Option("--expert", help="Whose slot is steered, of tensors with slots.")
    ] = None,
    random: Annotated[int, typer.Option("--random", help="Random directions for comparison.", min=2)] = 20,
    learn: Annotated[
        str | None, typer.Option("--learn", help="A task or file to learn the direction from, not the reference set.")
    ] = None,
    neutral: Annotated[
        str | None, typer.Option("--neutral", help="A file of plain text (rows of 'clean'), not the text that ships.")
    ] = None,
    metric: Metrics = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random directions.", min=0, max=2**63 - 1)] = 0,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Add a direction at rising doses, and see what it moves: the prompts, and plain text that it shouldn't."""
    from experiments import steer as study
    from experiments import steer_plots
    from experiments.study import folder
    from experiments.tables import steer_tables

    place = folder(out) if out and not dry_run else None
    hooked, name = _load(model, keep)
    sets = [None if one is None else _prompts(hooked, model, None, one) for one in (learn, neutral)]
    prompts = _prompts(hooked, model, None, task)
    asked: dict[str, Any] = {"tensor": tensor, "h": head, "e": expert, "at": _place(at), "when": when}
    asked |= {"doses": dose or study.DOSES, "random_directions": random, "learn": sets[0], "neutral": sets[1]}
    asked |= {"metrics": metric, "seed": seed, "name": name}
    if dry_run:
        _say_cost("steer", prompts, study.outlook(hooked, prompts, direction, **asked))
        return
    df = study.steer(hooked, prompts, direction, **asked)
    for table in steer_tables(df):
        table.print()
    if place:
        _save(place, "steer", df, steer_plots.pictures(df))


@app.command()
def paths(
    task: Annotated[str, typer.Option("--task", help="A shipped task (ioi, …), or a file: JSONL, CSV, parquet.")],
    sender: Annotated[
        list[str],
        typer.Option("--sender", help="What takes the source's value: 'O h=*', 'x_0 T=S2'. Repeat for several."),
    ],
    receiver: Annotated[
        list[str] | None,
        typer.Option("--receiver", help="What alone sees it: 'V h=*', 'blocks.3.x_ffn', logits. Repeat for several."),
    ] = None,
    hold: Annotated[Hold, typer.Option("--hold", help="What keeps the base's value in between.")] = "all",
    direction: Annotated[
        Direction, typer.Option("--direction", help="Clean into corrupt: denoise; corrupt into clean: noise.")
    ] = "denoise",
    frozen: Annotated[
        list[str] | None, typer.Option("--frozen", help="Held at the base's values too: experts, s_*, A. Repeat.")
    ] = None,
    metric: Metrics = None,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """See by which paths values go from one place of the model to another, and what comes by each."""
    from experiments import causal_plots
    from experiments import paths as study
    from experiments.study import folder
    from experiments.tables import path_table

    place = folder(out) if out and not dry_run else None
    hooked, name = _load(model, keep)
    prompts = _prompts(hooked, model, None, task)
    asked: dict[str, Any] = {"senders": sender, "receivers": receiver or ["logits"], "hold": hold}
    asked |= {"direction": direction, "frozen": frozen or (), "metrics": metric}
    if dry_run:
        _say_cost("paths", prompts, study.outlook(hooked, prompts, **asked))
        return
    df = study.paths(hooked, prompts, name=name, **asked)
    path_table(df).print()
    if place:
        _save(place, "paths", df, [("paths", causal_plots.paths(df))])


@app.command()
def circuit(
    task: Annotated[str, typer.Option("--task", help="A shipped task (ioi, …), or a file: JSONL, CSV, parquet.")],
    node: Annotated[
        list[str],
        typer.Option("--node", help="What is kept: 'blocks.3.O h=0', blocks.0.delta_ffn. Repeat for several."),
    ],
    among: Annotated[
        list[str] | None, typer.Option("--among", help="All that is ablated but for those; without it, heads and FFNs.")
    ] = None,
    how: Annotated[Rest, typer.Option("--how", help="Values from reference prompts, or zero.")] = "resample",
    metric: Metrics = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of random sets and reference prompts.", min=0, max=2**63 - 1)
    ] = 0,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Keep some heads and FFNs, ablate the rest, and see what is left: faithfulness, minimality, completeness."""
    from experiments import causal_plots
    from experiments import circuit as study
    from experiments.study import folder
    from experiments.tables import circuit_tables

    place = folder(out) if out and not dry_run else None
    hooked, name = _load(model, keep)
    prompts = _prompts(hooked, model, None, task)
    asked: dict[str, Any] = {"among": among or study.AMONG, "how": how, "metrics": metric, "seed": seed}
    if dry_run:
        _say_cost("circuit", prompts, study.outlook(hooked, prompts, node, **asked))
        return
    df = study.circuit(hooked, prompts, node, name=name, **asked)
    for table in circuit_tables(df):
        table.print()
    if place:
        _save(place, "circuit", df, causal_plots.circuits(df))


@app.command()
def attribute(
    task: Annotated[str, typer.Option("--task", help="A shipped task (ioi, …), or a file: JSONL, CSV, parquet.")],
    tensor: Tensor = None,
    block: Block = None,
    by: Parts = None,
    at: At = None,
    steps: Annotated[int, typer.Option("--steps", help="Of integrated gradients; 0: without them.", min=0)] = 0,
    exact: Annotated[bool, typer.Option("--exact/--no-exact", help="Patch every cell, too, and compare.")] = True,
    direction: Annotated[
        Direction, typer.Option("--direction", help="Clean into corrupt: denoise; corrupt into clean: noise.")
    ] = "denoise",
    metric: Annotated[str | None, typer.Option("--metric", help="What to differentiate.")] = None,
    model: Model = None,
    keep: Keep = "expanded",
    out: Out = None,
) -> None:
    """Estimate what patching every tensor would do, from two runs and their gradients; and see how well."""
    from experiments import attribution as study
    from experiments import causal_plots
    from experiments.study import folder
    from experiments.tables import agreement_table, effect_tables

    place = folder(out) if out else None
    hooked, name = _load(model, keep)
    prompts = _prompts(hooked, model, None, task)
    asked: dict[str, Any] = {"tensors": tensor, "blocks": block, "by": by, "at": _place(at), "steps": steps}
    df = study.attribute(hooked, prompts, exact=exact, direction=direction, metric=metric, name=name, **asked)
    best = df.loc[df["edit"] != "patch", "edit"].iloc[-1]
    for table in effect_tables(df[df["edit"] == best]):
        table.print()
    if exact:
        agreement_table(df).print()
    for reason in df.attrs["left_out"].values():
        typer.echo(f"left out: {reason}")
    if place:
        _save(place, "attribution", df, causal_plots.attributions(df))


# ---- what the studies' commands share --------------------------------------------------------------------------------


def _one_of(prompt: str | None, task: str | None) -> None:
    if (prompt is None) == (task is None):
        raise typer.BadParameter("give --prompt TEXT or --task NAME, one of the two.")


def _load(directory: Path | None, keep: Keeping) -> tuple[HookedModel, str]:
    """The model, and its name in tables. Of a checkpoint it is said first what its weights will take."""
    import torch

    from hooks import HookedModel
    from probe import TINY, memory

    if directory is None:
        torch.set_num_threads(1)  # the tiny model's products are so small that threads would only wait for each other
        return HookedModel.load(TINY, keep=keep), TINY.name
    typer.echo(f"{memory(directory)}\n")
    hooked = HookedModel.load(directory, keep=keep)
    for note in hooked.notes:
        typer.echo(f"note: {note}")
    if hooked.tokenizer is not None:
        typer.echo(f"note: {hooked.tokenizer.start}")
    return hooked, directory.resolve().name


def _prompts(
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


def _place(text: str | None) -> str | int | None:
    """A span's name, or a position."""
    return int(text) if text is not None and text.lstrip("-").isdecimal() else text


def _say_effects(df: pd.DataFrame, name: str, place: Path | None) -> None:
    """The tables of a study's first metric, what a reader must know of it, and its files."""
    from experiments.tables import effect_tables

    for table in effect_tables(df):
        table.print()
    if cells := df.attrs["unmatched"]:
        typer.echo(f"–: {cells} cells have no value: they need an expert that the source didn't choose.")
    for reason in df.attrs.get("left_out", {}).values():
        typer.echo(f"left out: {reason}")
    if place:
        from experiments import effect_plots

        _save(place, name, df, effect_plots.pictures(df))


def _say_cost(study: str, prompts: Prompts, cost: Mapping[str, float]) -> None:
    from experiments.tables import unit_table

    unit_table(study, [prompts.name], [cost]).print()


def _say_files(files: list[Path]) -> None:
    typer.echo("wrote " + ", ".join(map(str, files)))


def _save(place: Path, name: str, df: pd.DataFrame, pictures: Iterable[tuple[str, Axes]]) -> None:
    """A study's frame and pictures as files."""
    from experiments import frames
    from experiments.pictures import save

    files = [frames.write(df, place / f"{name}.{ending}") for ending in ("parquet", "csv")]
    _say_files([*files, *(save(ax, place / f"{label}.png") for label, ax in pictures)])
