"""A spec's units run into a folder, where nothing that is finished is lost, done twice, or mixed with another run's.

A run folder holds

- ``manifest.json``: what is run, on which weights and inputs, by which versions; written first, and never changed;
- ``units/*.parquet``: the frame of each finished unit, put there by a rename once it is complete, with a digest of its
  bytes (`experiments.frames`), so that a damaged one is never joined;
- ``frame.csv``, ``frame.parquet``, ``pictures/``: when all units are finished, of all of them, in that order. A row
  that several units hold alike (attributions of 2 and of 4 steps share their first order) stands there once; the attrs
  of each unit's frame stand in those of the parquet file, under its label;
- ``lock``: empty. A process holds a byte of it for each unit that it is about to do, as long as it lives.

A unit's file bears its *key* in its name: a digest of all that its numbers hang on, by content: weights, sizes, dtype,
device, the texts and tokens of the prompts, every argument of the study and of the model, the versions of the code. So
what is done is told by the files that are there, and a folder whose manifest says another key is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from importlib.metadata import version
from inspect import signature
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiments import frames
from experiments.apart import Told
from experiments.compare import RANDOM, load_second
from experiments.fingerprint import fingerprint
from experiments.finite import NOT_FINITE
from experiments.pictures import save
from experiments.prompts import Prompts
from experiments.spec import Spec, Unit, that_take
from experiments.studies import STUDIES
from experiments.study import activation_dtype, folder, progress
from hooks import HookedModel
from probe import TINY
from probe.errors import BadPath, BadText, ProbeError, asking
from probe.files import clear, read_bytes, replacing, size_of
from probe.headers import brief, expanded, parsed

VERSION = 3
"""Of a run folder's layout, and of what a key covers."""


class BadRun(ProbeError, ValueError):
    """A run folder that is another run's, or is being worked on; a shard that does not exist."""


@dataclass(frozen=True)
class Job:
    """A unit, with all that its numbers hang on.

    Attributes:
        what: its place and label, for messages.
        covers: what its numbers hang on, as JSON has it.
        file: where its frame goes, in the run folder; the key is in its name.
    """

    unit: Unit
    what: str
    covers: Mapping[str, Any]
    file: Path


def run(spec: Spec, out: str | os.PathLike[str], *, shard: tuple[int, int] = (1, 1)) -> pd.DataFrame | None:
    """Do the units of a spec that are not done yet, and join all when they are.

    Before the first of them all are planned (`experiments.studies.Study.plan`): a tensor, a metric or a span that does
    not exist is found then, in the last unit as in the first, and so are two units that one frame could not hold
    (`experiments.apart`); and nothing has been written.

    Args:
        out: the run folder; made where there is none.
        shard: (i, n): every n-th unit from the i-th on, i from 1. Processes and machines that share the folder take one
            each; whoever finds all units finished joins them.

    Returns:
        The frame of all units, as in ``frame.parquet``; None while units of other shards are missing.

    Raises:
        BadRun: the folder is another run's, or another process is at work on these units; a shard that doesn't exist;
            two units that no column tells apart.
        BadPath: the folder can't be written, or the disk is full.
        ProbeError: whatever a unit raises, with its label in front. In any case what is finished stays.
    """
    i, n = shard
    if not 1 <= i <= n:
        raise BadRun(f"there is no shard {i}/{n}: they are 1/n to n/n, n at least 1.")
    place, shelf = folder(out), _Shelf(spec.folder)
    jobs = _jobs(spec, shelf, place)
    with _lock(place) as lock:
        with _alone(lock, place):
            _claim(place, spec, jobs)
        mine = [(at, job) for at, job in enumerate(jobs) if at % n == i - 1 and not (place / job.file).exists()]
        for at, job in mine:
            _take(lock, at, place, job)
        with progress(len(mine), "units") as bar:
            for _, job in mine:
                with _told(job.what, place, jobs):
                    _do(spec.study, job, place / job.file, shelf)
                bar.update()
        if not all((place / job.file).exists() for job in jobs):
            return None
        with _alone(lock, place), _told("joining the units", place, jobs):
            return _joined(place, spec.study, jobs)


def finished(out: str | os.PathLike[str]) -> tuple[int, int]:
    """How many units of a run folder are finished, and how many there are.

    Raises:
        BadRun: it is no run folder.
    """
    out = expanded(out)
    files = [out / unit["file"] for unit in _manifest(out / "manifest.json")["units"]]
    return sum(file.exists() for file in files), len(files)


def not_finite(out: str | os.PathLike[str]) -> list[str]:
    """What the finished units of a run folder say was not finite, each with its label.

    Raises:
        BadRun: it is no run folder.
    """
    found = []
    for unit in _manifest(Path(out) / "manifest.json")["units"]:
        file = Path(out) / unit["file"]
        if file.exists() and (said := _sound(file).attrs.get(NOT_FINITE)):
            found.append(f"{unit['label']}: {said}" if unit.get("label") else said)
    return found


def plan(spec: Spec) -> list[Mapping[str, float]]:
    """What each unit would cost, as its study tells (`experiments.studies.Study.plan`); nothing where it can't.

    Raises:
        ProbeError: whatever `run` raises before its first unit, but for the folder.
    """
    estimate, shelf, apart = STUDIES[spec.study].plan, _Shelf(spec.folder), _Apart(spec)
    costs: list[Mapping[str, float]] = []
    for what, unit in _named(spec):
        with asking(what):
            costs.append({} if estimate is None else estimate(shelf.model(unit), **shelf.arguments(estimate, unit)))
            apart.check(what, unit, shelf, shelf.covers(spec.study, unit))
    return costs


def _do(study: str, job: Job, file: Path, shelf: _Shelf) -> None:
    if file.exists():  # since the units were listed
        return
    ask = STUDIES[study].run
    model = shelf.model(job.unit)
    frames.write(ask(model, **shelf.arguments(ask, job.unit)), file)


@contextmanager
def _told(what: str, place: Path, jobs: Sequence[Job]) -> Iterator[None]:
    """An error says what was being done, and what stays."""
    try:
        yield
    except ProbeError as fact:
        done = sum((place / job.file).exists() for job in jobs)
        fact.args = (f"{what}: {fact} {done} of {len(jobs)} units are finished, and stay in {place}.", *fact.args[1:])
        raise


def _joined(place: Path, study: str, jobs: Sequence[Job]) -> pd.DataFrame:
    """The frame of all units, written and read back; and their pictures, in a folder that is there once all are."""
    whole, table, pictures = place / "frame.parquet", place / "frame.csv", place / "pictures"
    parts = [] if whole.exists() and pictures.exists() else [_sound(place / job.file) for job in jobs]
    if not whole.exists():
        df = frames.join(*_once(parts))
        df.attrs |= _attrs(jobs, parts)
        frames.write(df, whole)
    df = _sound(whole)
    if not _holds(table, frames.as_csv(df)):
        frames.write(df, table)
    if not pictures.exists():
        drawn = place / "pictures.part"
        _empty(drawn)
        for job, part in zip(jobs, parts, strict=True):
            for name, ax in STUDIES[study].pictures(part, job.unit.arguments):
                save(ax, drawn / f"{job.file.stem}_{name}.png")
        drawn.replace(pictures)
    return df


def _holds(file: Path, content: bytes) -> bool:
    try:
        return size_of(file) == len(content) and read_bytes(file) == content
    except OSError:
        return False


def _empty(place: Path) -> None:
    """A new folder, in place of what a killed process left there."""
    try:
        if os.path.lexists(place):
            shutil.rmtree(place)
        place.mkdir()
    except OSError as error:
        raise BadPath(f"can't write to {place}: {error.strerror or error}.") from None


def _once(parts: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Units' frames, less the rows that equal one of an earlier unit in every column. A unit without a row of its own
    stays as it is: `join` refuses it."""
    held = pd.concat([part.astype(object) for part in parts], ignore_index=True)
    ends = np.cumsum([len(part) for part in parts])
    own = np.split(~held.duplicated().to_numpy(), ends[:-1])
    return [part[mask] if mask.any() else part for part, mask in zip(parts, own, strict=True)]


def _attrs(jobs: Sequence[Job], parts: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """What units' frames say beside their rows: of a lone one as it is, of several under ``units`` by label, so that
    what is said of one can't be read as said of all."""
    said = {
        job.unit.label: {str(key): value for key, value in part.attrs.items() if key != "schema"}
        for job, part in zip(jobs, parts, strict=True)
    }
    if len(jobs) == 1:
        return said[jobs[0].unit.label]
    return {"units": said} if any(said.values()) else {}


def _sound(file: Path) -> pd.DataFrame:
    """A frame of this folder, a unit's or that of all, as it was written."""
    try:
        return frames.read(file, sealed=True)
    except ProbeError as fact:
        raise BadRun(f"{fact} Delete that file and run again: only what it holds is made anew.") from None


# ---- what a unit's numbers hang on -----------------------------------------------------------------------------------


@dataclass
class _Shelf:
    """What units share: one model at a time, its fingerprint, the prompts made with its tokenizer."""

    folder: Path
    _asked: Mapping[str, Any] | None = None
    _model: HookedModel | None = None
    _fingerprint: str = ""
    _prompts: dict[str, Prompts] = field(default_factory=dict)
    _others: dict[str, HookedModel] = field(default_factory=dict)

    def model(self, unit: Unit) -> HookedModel:
        """The unit's model, loaded where the last unit's was another."""
        if self._model is None or self._asked != unit.model:
            self._model, self._others = None, {}  # two may not fit
            given = dict(unit.model)
            if "dtype" in given:
                given["dtype"] = getattr(torch, given["dtype"])
            self._model, self._asked = HookedModel.load(**given | {"directory": self._directory(unit)}), unit.model
            self._fingerprint, self._prompts = fingerprint(self._model.decoder.weights), {}
        return self._model

    def _directory(self, unit: Unit) -> Path:
        return self._path(unit.model["directory"]) if "directory" in unit.model else TINY

    def _path(self, given: str) -> Path:
        return self.folder / expanded(given)

    def prompts(self, unit: Unit, task: str) -> Prompts:
        """A task's prompts, or a file's."""
        tokenizer, directory = self.model(unit).tokenizer, self._directory(unit)
        if tokenizer is None:
            raise BadText(f"{directory}: it has no tokenizer, so it can't be asked in words.")
        if task not in self._prompts:
            named = self._path(task) if Path(task).suffix else task
            self._prompts[task] = Prompts.load(named, tokenizer, directory)
        return self._prompts[task]

    def other(self, unit: Unit, place: str) -> HookedModel:
        """What the unit's model is held against, see `experiments.compare.load_second`."""
        if place not in self._others:
            self._others[place] = load_second(self.model(unit), place if place == RANDOM else self._path(place))
        return self._others[place]

    def arguments(self, function: Callable[..., Any], unit: Unit) -> dict[str, Any]:
        """A unit's arguments as a study takes them: prompts loaded, the model named."""
        given = dict(unit.arguments)
        for key in that_take(Prompts, function) & given.keys():
            if isinstance(given[key], str):
                given[key] = self.prompts(unit, given[key])
            elif given[key] is not None:
                given[key] = [self.prompts(unit, task) for task in given[key]]
        own = self._directory(unit).resolve().name
        for key in that_take(HookedModel, function) & given.keys():
            given["names"] = own, Path(given[key]).name
            given[key] = self.other(unit, given[key])
        if "name" in signature(function).parameters:
            given["name"] = own
        return given

    def covers(self, study: str, unit: Unit) -> dict[str, Any]:
        """All that a unit's numbers hang on."""
        model, arguments = self.model(unit), self.arguments(STUDIES[study].run, unit)
        load = {key: parameter.default for key, parameter in signature(HookedModel.load).parameters.items()}
        load |= {**unit.model, "dtype": activation_dtype(model), "device": str(model.device)}
        load["numerics"] = model.decoder.numerics
        del load["directory"]  # what is there counts, not where
        named = {"name": self._directory(unit).resolve().name, "weights": self._fingerprint}
        covers = {
            "model": {**named, **load, "dims": asdict(model.dims)},
            "arguments": {key: _said(value) for key, value in arguments.items() if key not in ("name", "names")},
        }
        plain: dict[str, Any] = json.loads(json.dumps(covers, default=str))
        return plain


def _said(value: Any) -> Any:
    """An argument by its content."""
    if isinstance(value, list):
        return [_said(one) for one in value]
    if isinstance(value, HookedModel):
        weights = {"weights": fingerprint(value.decoder.weights), "dims": asdict(value.dims)}
        return {**weights, "dtype": activation_dtype(value), "numerics": value.decoder.numerics}
    return _content(value) if isinstance(value, Prompts) else value


@lru_cache(maxsize=16)
def _content(prompts: Prompts) -> dict[str, Any]:
    """Prompts by their content: the digest is over all texts, tokens, answers, groups, spans, the reference's too."""
    theirs = prompts.reference.rows if prompts.reference else ()
    return {
        "name": prompts.name,
        "prompts": len(prompts),
        "reference": len(theirs),
        "first": prompts.rows[0].clean,
        "digest": _digest(repr((prompts.rows, theirs))),
    }


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _versions() -> dict[str, Any]:
    """Those that numbers may hang on."""
    return {"run folder": VERSION, "frame": frames.VERSION, **_installed()}


@cache
def _installed() -> dict[str, str]:
    return {**{name: version(name) for name in ("k2-probe", "numpy")}, "torch": torch.__version__}  # and its build


def _jobs(spec: Spec, shelf: _Shelf, place: Path) -> list[Job]:
    """All units with what they hang on; each that isn't finished has been planned, and all are apart."""
    jobs = []
    estimate, apart = STUDIES[spec.study].plan, _Apart(spec)
    for at, (what, unit) in enumerate(_named(spec)):
        with asking(what):
            covers = shelf.covers(spec.study, unit)
            key = _digest(json.dumps([_versions(), spec.study, covers], sort_keys=True))
            label = re.sub(r"[^\w.=+-]+", "_", unit.label).encode()[:80].decode(errors="ignore")
            name = "_".join(filter(None, (f"{at:0{len(str(len(spec.units)))}}", label, key)))
            jobs.append(Job(unit, what, covers, Path("units", f"{name}.parquet")))
            if estimate is not None and not (place / jobs[-1].file).exists():
                estimate(shelf.model(unit), **shelf.arguments(estimate, unit), timed=False)
            apart.check(what, unit, shelf, covers)
    return jobs


def _named(spec: Spec) -> Iterator[tuple[str, Unit]]:
    """The units, each with its place and label, for messages."""
    for at, unit in enumerate(spec.units, 1):
        yield f"unit {at} of {len(spec.units)}" + (f" ({unit.label})" if unit.label else ""), unit


class _Apart:
    """Sees that one frame can hold the rows of all units; see `experiments.apart`."""

    def __init__(self, spec: Spec) -> None:
        self.study = spec.study
        self.seen: dict[str, list[tuple[str, Unit, Told]]] = {}

    def check(self, what: str, unit: Unit, shelf: _Shelf, covers: Mapping[str, Any]) -> None:
        """One more unit.

        Raises:
            BadRun: no column would tell its rows from another's.
        """
        told = Told.of(shelf.model(unit), covers, shelf.arguments(STUDIES[self.study].run, unit))
        alike = self.seen.setdefault(told.rows, [])
        for before, other, theirs in alike:
            if told.shares(theirs):
                ours, others = (
                    {**one.arguments, **{f"model.{key}": value for key, value in one.model.items()}}
                    for one in (unit, other)
                )
                odd = [key for key in {**others, **ours} if ours.get(key) != others.get(key)]
                raise BadRun(
                    f"{before} would have the same rows: the two differ in {' and '.join(odd)}, and no column tells one"
                    " from the other. Leave one out, or run it as a spec of its own, into another folder."
                )
        alike.append((what, unit, told))


# ---- the folder ------------------------------------------------------------------------------------------------------


def _claim(place: Path, spec: Spec, jobs: Sequence[Job]) -> None:
    """Write the manifest, or see that it says the same.

    Raises:
        BadRun: it says something else; the message tells what.
    """
    path = place / "manifest.json"
    units = [{"file": job.file.as_posix(), "label": job.unit.label, **job.covers} for job in jobs]
    ours = {"study": spec.study, "versions": _versions(), "units": units}
    if not path.exists():
        with replacing(path) as file:
            file.write(json.dumps(ours, indent=1, ensure_ascii=False).encode())
        return
    if odd := list(islice(_differences(_manifest(path), ours), 3)):
        raise BadRun(f"{place} is another run's: {'; '.join(odd)}. Take another folder, or finish it as it was begun.")


def _manifest(path: Path) -> Any:
    try:
        said = parsed(read_bytes(path))
        if not all(isinstance(unit["file"], str) for unit in said["units"]):
            raise TypeError
        return said
    except (KeyError, TypeError):
        raise BadRun(f"{path}: no manifest of a run (it lists no units).") from None
    except (OSError, ValueError) as error:
        raise BadRun(f"{path}: no manifest of a run ({getattr(error, 'strerror', None) or error}).") from None


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Where two JSON values differ, but for the files' names, which only follow."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [key for key in {**old, **new} if key != "file"]:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{path}[{i}]")
    elif old != new:
        before, after = (f"{len(x)} long" if isinstance(x, list) else shorten(brief(x), 80) for x in (old, new))
        yield f"{path} was {before}, and is {after}"


@contextmanager
def _lock(place: Path) -> Iterator[int]:
    """The lock file, open. Byte 0 is the folder's, byte 1 + i the i-th unit's.

    Locks are taken on bytes (fcntl), so that any two shards meet where they overlap, over network file systems too, and
    are the process's: the kernel lets go of them when it ends, however it ends. (So two threads of one process are not
    kept apart.)
    """
    path = place / "lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise BadPath(f"can't write {path}: {error.strerror or error}.") from None
    try:
        yield lock
    finally:
        os.close(lock)


@contextmanager
def _alone(lock: int, place: Path) -> Iterator[None]:
    """Nobody else begins or joins a run in this folder meanwhile; what one that was killed has half-written goes.

    Raises:
        BadPath: the file system can't lock.
    """
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
    except OSError as error:
        raise BadPath(f"can't lock {place}: {error.strerror or error}. Take a folder on another file system.") from None
    try:
        for name in ("manifest.json", "frame.parquet", "frame.csv"):
            clear(place / name)
        yield
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, 0)


def _take(lock: int, at: int, place: Path, job: Job) -> None:
    """Hold a unit until the process ends or the run is over; what a killed process left of it half-written goes.

    Raises:
        BadRun: another process holds it.
    """
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + at)
    except (BlockingIOError, PermissionError):
        raise BadRun(
            f"{place}: another process is at work on {job.what}. Wait for it, or give each process a shard of its own."
        ) from None
    clear(place / job.file)
