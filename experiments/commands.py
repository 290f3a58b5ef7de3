"""A command for each study, with the study's own words as options.

Whatever is heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from experiments.options import Control, Dtype, Hold, How, Probe, Rest, Scale, When
from experiments.plain import shown
from experiments.terminal import (
    Answer,
    At,
    Beyond,
    Block,
    Corrupt,
    Draw,
    DryRun,
    Keep,
    Metrics,
    Model,
    Out,
    Parts,
    PerPrompt,
    Precision,
    Prompt,
    Task,
    Tensor,
    Way,
    Wrong,
    folder_for,
    judged,
    one_of,
    opened,
    place_of,
    prompts_of,
    say_cost,
    show,
    show_effects,
    torch_dtype,
    two_texts,
)


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
    seed: Draw = 0,
    draws: Annotated[int, typer.Option("--draws", help="How many draws to average over.", min=1)] = 1,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    per_prompt: PerPrompt = False,
    dry_run: DryRun = False,
) -> None:
    """Edit each tensor of each block, or a part of it, and see what the model makes of it."""
    one_of(prompt, task, answer=answer, wrong=wrong)
    from experiments import ablate as study

    place = folder_for(out, dry_run, per_prompt)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = judged(hooked, model, prompt, task, answer, wrong)
    asked: dict[str, Any] = {
        "tensors": tensor,
        "blocks": block,
        "by": by,
        "at": place_of(at),
        "how": how,
        "metrics": metric,
    }
    asked |= {"seed": seed, "draws": draws, "name": name}
    if dry_run:
        say_cost("ablate", prompts.name, study.outlook(hooked, prompts, **asked))
        return
    df = study.ablate(hooked, prompts, per_prompt=per_prompt, **asked)
    show_effects(df, "ablation", place)


def patch(
    prompt: Prompt = None,
    task: Task = None,
    corrupt: Corrupt = None,
    tensor: Tensor = None,
    block: Block = None,
    by: Parts = None,
    at: At = None,
    window: Annotated[int, typer.Option("--window", help="How many blocks to patch together.", min=1)] = 1,
    direction: Way = "denoise",
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
    seed: Draw = 0,
    draws: Annotated[int, typer.Option("--draws", help="How many draws of noise to average over.", min=1)] = 1,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    per_prompt: PerPrompt = False,
    dry_run: DryRun = False,
) -> None:
    """Put values of one run into another, and see how much of the difference comes with them.

    Without --tensor and --by: the residual stream into each block, position by position. Tensors that are named are
    patched whole, unless --by says otherwise.
    """
    one_of(prompt, task, corrupt=corrupt, answer=answer, wrong=wrong)
    if prompt is not None and (corrupt is None) == (noise_at is None):
        raise typer.BadParameter("--prompt goes with --corrupt TEXT or --noise-at PLACE, one of the two.")
    from experiments import patch as study

    place = folder_for(out, dry_run, per_prompt)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = judged(hooked, model, prompt, task, answer, wrong, corrupt)
    parts = by or (None if tensor or at else "position")
    asked: dict[str, Any] = {
        "tensors": tensor or ["x_n"],
        "blocks": block,
        "by": parts,
        "at": place_of(at),
        "window": window,
    }
    asked |= {"direction": direction, "noise_at": place_of(noise_at), "noise_std": noise_std, "frozen": frozen or ()}
    asked |= {"metrics": metric, "seed": seed, "draws": draws, "name": name}
    if dry_run:
        say_cost("patch", prompts.name, study.outlook(hooked, prompts, **asked))
        return
    df = study.patch(hooked, prompts, per_prompt=per_prompt, **asked)
    show_effects(df, "patch", place)


def paths(
    sender: Annotated[
        list[str],
        typer.Option("--sender", help="What takes the source's value: 'O h=*', 'x_0 T=S2'. Repeat for several."),
    ],
    prompt: Prompt = None,
    task: Task = None,
    corrupt: Corrupt = None,
    receiver: Annotated[
        list[str] | None,
        typer.Option("--receiver", help="What alone sees it: 'V h=*', 'blocks.3.x_ffn', logits. Repeat for several."),
    ] = None,
    hold: Annotated[Hold, typer.Option("--hold", help="What keeps the base's value in between.")] = "all",
    direction: Way = "denoise",
    frozen: Annotated[
        list[str] | None, typer.Option("--frozen", help="Held at the base's values too: experts, s_*, A. Repeat.")
    ] = None,
    metric: Metrics = None,
    answer: Answer = None,
    wrong: Wrong = None,
    seed: Draw = 0,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    per_prompt: PerPrompt = False,
    dry_run: DryRun = False,
) -> None:
    """See by which paths values go from one place of the model to another, and what comes by each."""
    one_of(prompt, task, corrupt=corrupt, answer=answer, wrong=wrong)
    two_texts(prompt, corrupt)
    from experiments import causal_plots
    from experiments import paths as study
    from experiments.tables import path_table

    place = folder_for(out, dry_run, per_prompt)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = judged(hooked, model, prompt, task, answer, wrong, corrupt)
    asked: dict[str, Any] = {"senders": sender, "receivers": receiver or ["logits"], "hold": hold}
    asked |= {"direction": direction, "frozen": frozen or (), "metrics": metric, "seed": seed}
    if dry_run:
        say_cost("paths", prompts.name, study.outlook(hooked, prompts, **asked))
        return
    df = study.paths(hooked, prompts, per_prompt=per_prompt, name=name, **asked)
    show(
        df,
        "paths",
        place,
        lambda df: [path_table(df)],
        lambda df: [("paths", causal_plots.paths(df))],
        averaged=not per_prompt,
    )


def circuit(
    node: Annotated[
        list[str],
        typer.Option("--node", help="What is kept: 'blocks.3.O h=0', blocks.0.delta_ffn. Repeat for several."),
    ],
    prompt: Prompt = None,
    task: Task = None,
    among: Annotated[
        list[str] | None, typer.Option("--among", help="All that is ablated but for those; without it, heads and FFNs.")
    ] = None,
    how: Annotated[Rest, typer.Option("--how", help="Values from reference prompts, or zero.")] = "resample",
    random: Annotated[int, typer.Option("--random", help="Sets of the same make-up to hold it against.", min=0)] = 10,
    metric: Metrics = None,
    answer: Answer = None,
    wrong: Wrong = None,
    seed: Draw = 0,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    per_prompt: PerPrompt = False,
    dry_run: DryRun = False,
) -> None:
    """Keep some heads and FFNs, ablate the rest, and see what is left: faithfulness, minimality, completeness."""
    one_of(prompt, task, answer=answer, wrong=wrong)
    from experiments import causal_plots, finite
    from experiments import circuit as study
    from experiments.tables import circuit_tables

    place = folder_for(out, dry_run, per_prompt)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = judged(hooked, model, prompt, task, answer, wrong)
    asked: dict[str, Any] = {"among": among or study.AMONG, "how": how, "random_sets": random}
    asked |= {"metrics": metric, "seed": seed}
    if dry_run:
        say_cost("circuit", prompts.name, study.outlook(hooked, prompts, node, **asked))
        return
    df = study.circuit(hooked, prompts, node, per_prompt=per_prompt, name=name, **asked)
    lost = 0 if finite.NOT_FINITE in df.attrs else df.attrs["unmatched"]
    notes = [f"{lost} rows have no value: they need an expert that no reference prompt chose."] if lost else []
    show(df, "circuit", place, circuit_tables, causal_plots.circuits, notes=notes, averaged=not per_prompt)


def attribute(
    prompt: Prompt = None,
    task: Task = None,
    corrupt: Corrupt = None,
    tensor: Tensor = None,
    block: Block = None,
    by: Parts = None,
    at: At = None,
    steps: Annotated[int, typer.Option("--steps", help="Of integrated gradients; 0: without them.", min=0)] = 0,
    exact: Annotated[bool, typer.Option("--exact/--no-exact", help="Patch every cell, too, and compare.")] = True,
    direction: Way = "denoise",
    metric: Annotated[str | None, typer.Option("--metric", help="What to differentiate.")] = None,
    answer: Answer = None,
    wrong: Wrong = None,
    seed: Draw = 0,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    per_prompt: PerPrompt = False,
    dry_run: DryRun = False,
) -> None:
    """Estimate what patching every tensor would do, from two runs and their gradients; and see how well."""
    one_of(prompt, task, corrupt=corrupt, answer=answer, wrong=wrong)
    two_texts(prompt, corrupt)
    from experiments import attribution as study
    from experiments import causal_plots
    from experiments.effects import gaps
    from experiments.tables import attribution_tables

    place = folder_for(out, dry_run, per_prompt)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = judged(hooked, model, prompt, task, answer, wrong, corrupt)
    asked: dict[str, Any] = {"tensors": tensor, "blocks": block, "by": by, "at": place_of(at), "steps": steps}
    asked |= {"exact": exact, "direction": direction, "metric": metric, "seed": seed}
    if dry_run:
        say_cost("attribute", prompts.name, study.outlook(hooked, prompts, **asked))
        return
    df = study.attribute(hooked, prompts, per_prompt=per_prompt, name=name, **asked)
    left = gaps(df[:0] if per_prompt else df)
    notes = [f"{edit}: over the whole embedding the estimates leave {what}" for edit, what in left.items()]
    notes += [f"left out: {reason}" for reason in df.attrs["left_out"].values()]
    show(df, "attribution", place, attribution_tables, causal_plots.attributions, notes=notes, averaged=not per_prompt)


def lens(
    prompt: Prompt = None,
    task: Task = None,
    block: Block = None,
    role: Annotated[
        list[str] | None, typer.Option("--role", help="A span to read at: END, subject[-1]. Repeat for several.")
    ] = None,
    scale: Annotated[Scale, typer.Option("--scale", help="The final norm's: of each place, or of the last.")] = "own",
    metric: Metrics = None,
    answer: Answer = None,
    wrong: Wrong = None,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    per_prompt: PerPrompt = False,
    dry_run: DryRun = False,
) -> None:
    """Read the residual stream as if each place were the last, and see which heads and experts add up to the answer."""
    one_of(prompt, task, answer=answer, wrong=wrong)
    from experiments import finite, lens_plots
    from experiments import lens as study
    from experiments.tables import direct_table, lens_tables
    from probe.errors import BadText

    place = folder_for(out, dry_run, per_prompt)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = judged(hooked, model, prompt, task, answer, wrong)
    asked: dict[str, Any] = {"blocks": block, "roles": role or ["END"], "scale": scale, "metrics": metric}
    ahead: Mapping[str, float] = {}
    why: object = "it takes an answer and a wrong one."
    if len(prompts.has()) == 2:
        try:
            ahead = study.outlook_direct(hooked, prompts, timed=dry_run)
        except BadText as fact:
            why = fact
    if dry_run:
        say_cost("lens", prompts.name, study.outlook(hooked, prompts, **asked), **({"direct": ahead} if ahead else {}))
        return
    df = study.lens(hooked, prompts, per_prompt=per_prompt, name=name, **asked)
    show(df, "lens", place, lens_tables, lens_plots.pictures, averaged=not per_prompt, last=False)
    if not ahead:
        typer.echo(shown(f"left out: what adds up to the logit difference: {why}"))
        finite.check([df.attrs.get(finite.NOT_FINITE)])
        return
    parts = study.direct(hooked, prompts, per_prompt=per_prompt, name=name)
    show(
        parts,
        "direct",
        place,
        lambda df: [direct_table(df)],
        lambda df: [("direct", lens_plots.direct(df))],
        averaged=not per_prompt,
        last=False,
    )
    finite.check(one.attrs.get(finite.NOT_FINITE) for one in (df, parts))


def scores(
    prompt: Prompt = None,
    task: Task = None,
    block: Block = None,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    per_prompt: PerPrompt = False,
    dry_run: DryRun = False,
) -> None:
    """See of each head whether its attention goes by content or by position, and which known kind of head it is."""
    one_of(prompt, task)
    from experiments import scores as study
    from experiments.pictures import head_maps
    from experiments.tables import score_table

    place = folder_for(out, dry_run, per_prompt)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = prompts_of(hooked, model, prompt, task)
    if dry_run:
        say_cost("scores", prompts.name, study.outlook(hooked, prompts, blocks=block))
        return
    df = study.scores(hooked, prompts, blocks=block, per_prompt=per_prompt, name=name)
    show(df, "scores", place, lambda df: [score_table(df)], head_maps, averaged=not per_prompt)


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
    seed: Draw = 0,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Read a label out of each tensor by a linear probe, and see what controls would give."""
    from experiments import probe_plots
    from experiments import probes as study
    from experiments.prompts import Prompts
    from experiments.tables import probe_tables
    from probe import TINY

    place = folder_for(out, dry_run)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = prompts_of(hooked, model, None, task)
    own = label in ("label", "answer")
    asked: dict[str, Any] = {
        "labels": label if own else "answer",
        "of": None if own else Prompts.load(label, prompts.tokenizer, model or TINY),
        "tensors": tensor,
        "blocks": block,
        "at": [int(x) if re.fullmatch("[0-9]{1,18}", x) else x for x in at] if at else None,
        "e": expert,
        "probe": kind,
        "width": width,
        "folds": folds,
        "controls": get_args(Control) if control is None else control,
        "test": Prompts.load(test, prompts.tokenizer, model or TINY) if test else None,
        "seed": seed,
    }
    if dry_run:
        say_cost("probes", prompts.name, study.outlook(hooked, prompts, **asked))
        return
    df = study.probes(hooked, prompts, name=name, **asked)
    notes = [f"left out: {reason}" for reason in df.attrs["left_out"].values()]
    show(df, "probes", place, probe_tables, probe_plots.pictures, notes=notes)


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
    seed: Draw = 0,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Add a direction at rising doses, and see what it moves: the prompts, and plain text that it shouldn't."""
    from experiments import steer as study
    from experiments import steer_plots
    from experiments.tables import steer_tables

    place = folder_for(out, dry_run)
    hooked, name = opened(model, keep, dtype, beyond)
    sets = [None if one is None else prompts_of(hooked, model, None, one) for one in (learn, neutral)]
    prompts = prompts_of(hooked, model, None, task)
    asked: dict[str, Any] = {"tensor": tensor, "h": head, "e": expert, "at": place_of(at), "when": when}
    asked |= {"doses": dose or study.DOSES, "random_directions": random, "learn": sets[0], "neutral": sets[1]}
    asked |= {"metrics": metric, "seed": seed, "name": name}
    if dry_run:
        say_cost("steer", prompts.name, study.outlook(hooked, prompts, direction, **asked))
        return
    df = study.steer(hooked, prompts, direction, **asked)
    show(df, "steer", place, steer_tables, steer_plots.pictures)


def norms(
    prompt: Prompt = None,
    task: Task = None,
    tensor: Tensor = None,
    block: Block = None,
    channels: Annotated[int, typer.Option("--channels", help="How many of the largest channels.", min=0)] = 1,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Measure how large each tensor is, by block and position: rms, l2, the largest channels."""
    one_of(prompt, task)
    from experiments import norms as study
    from experiments.pictures import size_maps
    from experiments.tables import norm_table, stream_tables

    place = folder_for(out, dry_run)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = prompts_of(hooked, model, prompt, task)
    asked: dict[str, Any] = {"tensors": tensor, "blocks": block, "channels": channels}
    if dry_run:
        say_cost("norms", prompts.name, study.outlook(hooked, prompts, **asked))
        return
    df = study.norms(hooked, prompts, name=name, **asked)
    show(df, "norms", place, lambda df: [norm_table(df), *stream_tables(df)], size_maps)


def routing(
    task: Annotated[
        list[str],
        typer.Option("--task", help="A shipped task, or a file of prompts. Several are held against each other."),
    ],
    block: Block = None,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """See which experts each set of prompts uses, and what of that goes beyond what its tokens alone would say."""
    from experiments import routing as study
    from experiments.pictures import load_maps
    from experiments.tables import routing_tables

    place = folder_for(out, dry_run)
    hooked, name = opened(model, keep, dtype, beyond)
    sets = [prompts_of(hooked, model, None, one) for one in task]
    if dry_run:
        say_cost("routing", ", ".join(some.name for some in sets), study.outlook(hooked, sets, blocks=block))
        return
    df = study.routing(hooked, sets, blocks=block, name=name)
    show(df, "routing", place, routing_tables, load_maps)


def split(
    edit: Annotated[
        list[str],
        typer.Argument(
            help="What is done, all together: 'zero blocks.2.O h=1'; zero, mean, resample or noise, a node."
        ),
    ],
    prompt: Prompt = None,
    task: Task = None,
    gates: Annotated[bool, typer.Option("--gates", help="Routing is the gates, too, not the choice alone.")] = False,
    metric: Metrics = None,
    answer: Answer = None,
    wrong: Wrong = None,
    seed: Draw = 0,
    model: Model = None,
    keep: Keep = "expanded",
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """See how much of an edit's effect goes by the routing: the whole, with routing frozen, by routing alone."""
    one_of(prompt, task, answer=answer, wrong=wrong)
    from experiments import bars
    from experiments import routing as study
    from experiments.tables import split_tables

    place = folder_for(out, dry_run)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = judged(hooked, model, prompt, task, answer, wrong)
    asked: dict[str, Any] = {"metrics": metric, "gates": gates, "seed": seed}
    if dry_run:
        say_cost("split", prompts.name, study.outlook_split(hooked, prompts, edit, **asked))
        return
    df = study.split(hooked, prompts, edit, name=name, **asked)
    show(df, "split", place, split_tables, bars.splits)


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
    dtype: Precision = None,
    beyond: Beyond = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Find the tokens at which a neuron or an expert is most active, with what stands around them."""
    where: dict[str, list[int]] = {}
    for one in at or []:
        dim, _, number = one.partition("=")
        if not re.fullmatch("[0-9]{1,18}", number):
            raise typer.BadParameter(f"--at {one}: give a dim and a number, as in f=17.")
        where.setdefault(dim, []).append(int(number))
    from experiments import bars
    from experiments import top as study
    from experiments.tables import top_tables

    place = folder_for(out, dry_run)
    hooked, name = opened(model, keep, dtype, beyond)
    prompts = prompts_of(hooked, model, None, task)
    if dry_run:
        say_cost("top", prompts.name, study.outlook(hooked, prompts, tensor, where=where, n=n))
        return
    df = study.top(hooked, prompts, tensor, where=where, n=n, smallest=smallest, name=name)
    show(df, "top", place, top_tables, bars.rankings)


def compare(
    first: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    second: Annotated[
        Path,
        typer.Argument(help="Another one, of a model of the same sizes; or 'random': weights that nobody has trained."),
    ],
    prompt: Prompt = None,
    task: Task = None,
    keep: Keep = "disk",
    dtype: Precision = None,
    second_dtype: Annotated[
        Dtype | None, typer.Option("--second-dtype", help="The second's, where it is another: how one model drifts.")
    ] = None,
    beyond: Beyond = False,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Hold two checkpoints, or one in two dtypes, against each other: weights; with prompts, sizes and routing too."""
    if prompt is not None or task is not None:
        one_of(prompt, task)
    from experiments import compare as study
    from experiments.pictures import comparison_maps
    from experiments.tables import comparison_tables

    place = folder_for(out, dry_run)
    both = study.load_both(first, second, torch_dtype(dtype), keep, torch_dtype(second_dtype))
    one, other = (model.reaching(beyond) for model in both)
    prompts = None if prompt is None and task is None else prompts_of(one, first, prompt, task)
    if dry_run:
        say_cost("compare", "weights" if prompts is None else prompts.name, study.outlook(one, other, prompts))
        return
    df = study.compare(one, other, prompts, names=(first.resolve().name, second.resolve().name))
    show(df, "compare", place, comparison_tables, comparison_maps)


STUDIES = (ablate, patch, paths, circuit, attribute, lens, scores, probe, steer, norms, routing, split, top, compare)
"""In the order in which ``--help`` lists them."""
