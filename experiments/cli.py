"""The command line, ``k2probe``: demo, check, tensors, params, run, and a command for each study.

Exit codes: 0, 1 (the run failed, or what it wrote is NaN or infinite: one sentence on stderr says why or where), 2 (it
was asked for in a wrong way). Whatever is heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from experiments import commands
from experiments.options import Kind
from experiments.plain import shown
from experiments.terminal import Keep, Model, Precision, opened, say_files


class _Told(TyperGroup):
    """Tells an error that this toolkit raises on purpose in one sentence, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* not finite", RuntimeWarning)  # of a study: said at the end of it
                warnings.showwarning = _noted(warnings.showwarning)
                return super().invoke(ctx)
        except Exception as error:
            errors = sys.modules.get("probe.errors")  # loaded, if one of its errors was raised
            if errors is None or not isinstance(error, errors.ProbeError):
                raise
            typer.echo(shown(f"k2probe: {error}"), err=True)
            raise typer.Exit(1) from None


def _noted(show: Callable[..., None]) -> Callable[..., None]:
    """How warnings are shown, with those of texts as notes."""

    def note(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if category.__name__ == "TextWarning":
            typer.echo(shown(f"note: {message}"), err=True)
        else:
            show(message, category, *where)

    return note


app = typer.Typer(
    cls=_Told,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Every named tensor of the Kimi K2 / DeepSeek-V3 block: look at it, ablate it, and get a table and a picture.",
)


@app.callback()
def every(
    ctx: typer.Context,
    digest: Annotated[
        bool,
        typer.Option(
            "--digest",
            help="Read checkpoints above 64 GB, too, for their digest, once; without it, tables name those by stat.",
        ),
    ] = False,
) -> None:
    """What goes before any command."""
    if digest:
        from experiments.fingerprint import by_content

        ctx.with_resource(by_content())


def main() -> None:
    """The entry point: `k2probe`, ``python -m experiments``."""
    sys.stdout, sys.stderr = (_lasting(stream) for stream in (sys.stdout, sys.stderr))
    if wrong := foreign_rooms():
        typer.echo(f"k2probe: {wrong}", err=True)
        sys.exit(1)
    app(prog_name="k2probe")


def _lasting(stream: Any) -> Any:
    """A stream that work survives, so that files are still written behind tables: a terminal without Δ gets a question
    mark, and what nobody reads any more (``| head``), or ever did (``>&-``), goes nowhere."""
    if stream is not None and not isinstance(getattr(stream, "buffer", None), io.BufferedWriter | io.FileIO):
        return stream  # it is no file
    descriptor = os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()
    encoding = "utf-8" if stream is None else stream.encoding
    file = io.BufferedWriter(_Unread(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding, "replace", line_buffering=True)


class _Unread(io.FileIO):
    """A file that may be a pipe whose reader has gone."""

    def write(self, data: Any) -> int:
        """What was written, or would have been."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)


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
    from probe.config import read_config
    from probe.errors import BadCheckpoint, BadConfig
    from probe.forms import quantisation
    from probe.headers import expanded, holds_weights
    from probe.params import tally

    place = None if place is None else expanded(place)
    if place is None or not holds_weights(place):
        for table in parameter_tables(KIMI_K2 if place is None else Dims.from_config(place)):
            table.print()
        if place is not None:
            try:
                quantisation(read_config(place))
            except BadConfig as fact:
                typer.echo(shown(f"its weights would be refused: {fact}"))
        return
    found = tally(place)
    for table in tally_tables(place.resolve().name, found):
        table.print()
    if found.faults:
        raise BadCheckpoint(f"{place}: not as its config says in {len(found.faults)} of its tensors, listed above.")


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
def check(model: Model = None, keep: Keep = "expanded", dtype: Precision = None) -> None:
    """Test a model and its hooks: each fires once and acts, sums are what they should be, nothing is left behind."""
    from experiments import check as study

    hooked, _ = opened(model, keep, dtype)
    findings = study.check(hooked)
    for finding in findings:
        typer.echo(shown(finding))
    if failed := study.failures(findings):
        names = "; ".join(f"{finding.what} ({', '.join(finding.failed)})" for finding in failed)
        raise study.CheckFailed(f"{len(failed)} of {len(findings)} checks failed: {names}.")


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
    if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,18}", part) for part in parts):
        raise typer.BadParameter(f"--shard {shard}: give two numbers, as in 2/4 for the second of four.")
    import torch

    from experiments import finite, runs
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
    say_files([place / name for name in (("units",) if done < units else ("frame.parquet", "frame.csv", "pictures"))])
    finite.check(runs.not_finite(place))


for study in commands.STUDIES:
    app.command(rich_help_panel="Studies")(study)
