"""Run folders: killed at any moment, full, read-only, shared, or another run's, they keep what is finished.

Workers are forked once everything is imported and loaded, so that fifty kills are seconds. Their study, `toy`, writes a
line for every unit that it begins.
"""

import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from pandas.testing import assert_frame_equal
from typer.testing import CliRunner

from experiments import frames, runs
from experiments.cli import app
from experiments.fingerprint import fingerprint
from experiments.frames import BadPath, frame
from experiments.prompts import Prompts
from experiments.runs import BadRun, finished, plan, run
from experiments.spec import Spec, parse, read, shipped
from experiments.studies import STUDIES, Study
from experiments.study import identity
from hooks import HookedModel
from probe import TINY, Checkpoint, InMemory, random_weights
from probe.errors import BadEdit

UNITS = 12
LOG = "toy.log"


def until(done: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "nothing comes of it"
        time.sleep(0.001)


def toy(
    model: HookedModel,
    prompts: Prompts,
    *,
    block: int = 0,
    size: int = 2,
    fail: bool = False,
    wait: bool = False,
    log: str = "",
    name: str | None = None,
) -> pd.DataFrame:
    """A study that costs next to nothing."""
    if log:
        with Path(log).open("a") as file:
            file.write(f"{block}\n")
    if fail and block == 2:
        raise BadEdit("this one can't be.")
    if wait:
        until(Path(log).with_name("go").exists)
    what = {"block": block, "metric": "m", "unit": "1", "model": name}
    rows = [{**what, "feature": i, "value": block + i / 7} for i in range(size)]
    return frame(rows, study="toy").assign(prompts=prompts.name)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy is a study; model and prompts are loaded once."""
    monkeypatch.setitem(STUDIES, "toy", Study(toy, lambda df, arguments: iter(())))
    monkeypatch.setattr(HookedModel, "load", functools.cache(HookedModel.load))
    monkeypatch.setattr(Prompts, "load", functools.cache(Prompts.load))


def described(units: int = UNITS, folder: str | Path = ".", **more: Any) -> Spec:
    given = {"study": "toy", "prompts": "capital", "grid": {"block": list(range(units))}}
    return parse(given | more, "toy", folder)


def files(place: Path) -> set[str]:
    return {path.name for path in (place / "units").glob("*.parquet")}


def begun(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


def left_over(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.name.endswith(".part")]


class Worker:
    """A process of its own, forked with all that is loaded here."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.said, say = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(say)
            return
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            os.write(say, traceback.format_exc().encode()[-60000:])
        finally:
            os._exit(code)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WNOHANG | os.WEXITED | os.WNOWAIT) is not None

    def wait(self) -> int:
        """The exit code, or minus the signal."""
        until(lambda: self.ended)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @functools.cached_property
    def error(self) -> str:
        with os.fdopen(self.said) as said:
            return said.read()


@pytest.fixture
def expected(tmp_path: Path) -> pd.DataFrame:
    df = run(described(), tmp_path / "at once")
    assert df is not None
    return df


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_manifest_units_frame_and_pictures(tmp_path: Path) -> None:
    place = tmp_path / "new" / "run"
    df = run(described(3, size=4), place)
    assert df is not None
    assert len(files(place)) == 3
    assert sorted(path.name for path in place.iterdir()) == [
        *("frame.csv", "frame.parquet", "lock", "manifest.json", "pictures", "units"),
    ]
    for ending in ("csv", "parquet"):
        assert_frame_equal(frames.read(place / f"frame.{ending}"), df)
    assert df["block"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert finished(place) == (3, 3)
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["study"] == "toy"
    assert manifest["versions"]["torch"] == torch.__version__
    unit = manifest["units"][1]
    assert (unit["label"], unit["arguments"]["block"], unit["arguments"]["size"]) == ("block=1", 1, 4)
    assert unit["arguments"]["prompts"]["first"] == Prompts.load("capital", HookedModel.load().tokenizer).rows[0].clean
    assert unit["model"]["weights"] == fingerprint(HookedModel.load().decoder.weights)
    assert (unit["model"]["name"], unit["model"]["dtype"], unit["model"]["dims"]["d"]) == ("tiny", "float32", 128)


def test_a_finished_run_does_nothing_when_it_is_run_again(tmp_path: Path) -> None:
    log = tmp_path / LOG
    asked = described(4, log=str(log))
    first = run(asked, tmp_path / "run")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.parquet")}
    again = run(asked, tmp_path / "run")
    assert first is not None
    assert again is not None
    assert_frame_equal(first, again)
    assert begun(log) == [0, 1, 2, 3]
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("name", shipped())
def test_shipped_specs_run(name: str, tmp_path: Path) -> None:
    out = CliRunner().invoke(app, ["run", name, "--out", str(tmp_path)])
    assert out.exit_code == 0, out.output
    units = len(read(name).units)
    assert f"{units} of {units} units are finished, and joined" in out.stdout
    assert len(list((tmp_path / "pictures").glob("*.png"))) >= units
    assert len(frames.read(tmp_path / "frame.parquet")) > units


# ---- killed ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_sweep_loses_all_or_duplicates_rows_and_a_finished_one_crashes_on_resume(
    tmp_path: Path, expected: pd.DataFrame
) -> None:
    """Fifty kills at random moments: what was finished stays, byte for byte; only the unit under way is begun anew."""
    chance = random.Random(0)
    kills, place, partly = 0, tmp_path / "run-0", 0
    (tmp_path / LOG).touch()
    asked = described(log=str(tmp_path / LOG))
    while kills < 50:
        before = {path: path.read_bytes() for path in place.glob("units/*.parquet")}
        worker = Worker(lambda place=place: run(asked, place))
        code = killed(worker, tmp_path / LOG, chance)
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), worker.error
        assert all(path.read_bytes() == content for path, content in before.items()), "finished units are not touched"
        for path in set(place.glob("units/*.parquet")) - before.keys():
            frames.read(path)
        partly += len(before) < len(files(place)) < UNITS
        if (place / "pictures").exists():
            check_whole(place, asked, expected, tmp_path / LOG, kills)
            place = tmp_path / f"run-{kills}"
    check_whole(place, asked, expected, tmp_path / LOG, kills)
    assert partly >= 10, "kills came too early or too late to tell"


def killed(worker: Worker, log: Path, chance: random.Random) -> int:
    """A random number of units later, and a random time into the next; the exit code."""
    size = log.stat().st_size + 2 * chance.randrange(5)
    until(lambda: log.stat().st_size > size or worker.ended)
    time.sleep(chance.uniform(0, 0.03))
    worker.kill()
    return worker.wait()


def check_whole(place: Path, asked: Spec, expected: pd.DataFrame, log: Path, kills: int) -> None:
    """Run to the end: the frame is that of a run at once, and all but one unit a kill were begun once."""
    df = run(asked, place)
    assert df is not None
    assert_frame_equal(df, expected)
    assert len(files(place)) == UNITS
    assert left_over(place) == []
    assert len(begun(log)) <= UNITS + kills
    log.write_text("")


def dies(monkey: pytest.MonkeyPatch, place: Any, name: str, at: int, after: bool) -> None:
    """The ``at``-th call of a function is the process's last; it dies before it, or after."""
    calls, real = iter(range(10**6)), getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == at
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkey.setattr(place, name, call)


def draw(df: pd.DataFrame, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Axes]]:
    yield "dot", plt.figure(figsize=(1, 1)).add_axes((0, 0, 1, 1))


@pytest.mark.parametrize(
    ("where", "name", "after"),
    [
        pytest.param(os, "fsync", False, id="before-fsync"),
        pytest.param(Path, "replace", False, id="before-rename"),
        pytest.param(Path, "replace", True, id="after-rename"),
        pytest.param(frames.pa_parquet, "write_table", True, id="half-written"),
        pytest.param(runs, "save", True, id="after-picture"),
        pytest.param(runs.fcntl, "lockf", True, id="after-lock"),
    ],
)
def test_killed_at_every_step(
    where: Any, name: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not left to chance: a process that dies at its first such call, one that dies at its second, …"""
    monkeypatch.setitem(STUDIES, "toy", Study(toy, draw))
    asked = described(2)
    expected = run(asked, tmp_path / "at once")
    assert expected is not None
    for at in range(20):
        place = tmp_path / f"run-{at}"

        def work(at: int = at, place: Path = place) -> None:
            dies(monkeypatch, where, name, at, after)
            run(asked, place)

        worker = Worker(work)
        code = worker.wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL, worker.error
        df = run(asked, place)
        assert df is not None
        assert_frame_equal(df, expected)
        assert left_over(place) == []
        assert len(list((place / "pictures").iterdir())) == 2
    assert at > 1


def test_ctrl_c_leaves_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: HookedModel, prompts: Prompts, *, block: int = 0, size: int = 2) -> pd.DataFrame:
        if block == 2:
            raise KeyboardInterrupt
        return toy(model, prompts, block=block, size=size)

    monkeypatch.setitem(STUDIES, "toy", Study(interrupted, lambda df, arguments: iter(())))
    with pytest.raises(KeyboardInterrupt):
        run(described(4), tmp_path)
    assert finished(tmp_path) == (2, 4)
    assert left_over(tmp_path) == []


# ---- places that can't be written ------------------------------------------------------------------------------------


def half_done(place: Path, log: Path) -> tuple[Spec, dict[Path, bytes]]:
    """A run of which every second unit is done."""
    asked = described(6, log=str(log), size=200)
    assert run(asked, place, shard=(1, 2)) is None
    return asked, {path: path.read_bytes() for path in place.glob("units/*")}


def intact(kept: dict[Path, bytes], place: Path) -> bool:
    return all(path.read_bytes() == content for path, content in kept.items()) and left_over(place) == []


def test_a_disk_that_gets_full(tmp_path: Path) -> None:
    """The kernel refuses to write on: a limit on the size of files, which is met in the middle of one."""
    place = tmp_path / "run"
    asked, kept = half_done(place, tmp_path / LOG)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        run(asked, place)

    worker = Worker(work)
    assert worker.wait() == 1
    last = worker.error.splitlines()[-1]
    assert last.startswith("probe.errors.BadPath: unit 2 of 6 (block=1): can't write "), last
    assert "File too large. 3 of 6 units are finished, and stay in" in last
    assert len(kept) == 3
    assert intact(kept, place)
    df = run(asked, place)
    assert df is not None
    assert sorted(begun(tmp_path / LOG)) == [0, 1, 1, 2, 3, 4, 5]


def test_a_disk_that_is_full_when_units_are_joined(tmp_path: Path) -> None:
    place = tmp_path / "run"
    asked, kept = half_done(place, tmp_path / LOG)
    assert run(asked, tmp_path / "other") is not None
    most = (tmp_path / "other" / "frame.csv").stat().st_size - 1

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        run(asked, place)

    worker = Worker(work)
    assert worker.wait() == 1
    last = worker.error.splitlines()[-1]
    assert "joining the units: can't write " in last
    assert "frame.csv: File too large. 6 of 6 units are finished" in last
    assert intact(kept, place)
    done = len(begun(tmp_path / LOG))
    assert run(asked, place) is not None
    assert len(begun(tmp_path / LOG)) == done


def test_a_small_file_system(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", disk], check=False).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    try:
        asked = described(30, size=200)
        with pytest.raises(BadPath, match=r"\d of 30 \(block=\d+\): can't write .*No space left on device"):
            run(asked, disk / "run")
        done, _ = finished(disk / "run")
        assert 2 < done < 30
        for path in (disk / "run").glob("units/*"):
            frames.read(path)
        assert left_over(disk) == []
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        assert run(asked, disk / "run") is not None
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        home.chmod(0o755)
        place = home / "run"
        asked, kept = half_done(place, tmp_path / LOG)
        for path in (place, place / "units"):
            path.chmod(0o555)

        def work() -> None:
            if os.getuid() == 0:
                os.setuid(65534)  # root may write anywhere
            with pytest.raises(BadPath, match=r"can't write to .*: Permission denied"):
                run(asked, place)

        worker = Worker(work)
        assert worker.wait() == 0, worker.error
        for path in (place, place / "units"):
            path.chmod(0o755)
        assert intact(kept, place)
        assert run(asked, place) is not None
    finally:
        shutil.rmtree(home)


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadPath, match="can't write to"):
        run(described(1), tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{")
    with pytest.raises(BadRun, match=r"manifest.json: no manifest of a run"):
        run(described(1), tmp_path / "run")
    with pytest.raises(BadRun, match="No such file"):
        finished(tmp_path)


# ---- several at once -------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[Worker, Spec, Path]]:
    """A worker in the middle of the first shard of two."""
    asked, place = described(4, log=str(tmp_path / LOG), wait=True), tmp_path / "run"
    worker = Worker(lambda: run(asked, place, shard=(1, 2)))
    until((tmp_path / LOG).exists)
    yield worker, asked, place
    (tmp_path / "go").touch()


def test_two_runs_of_the_same_shard_in_one_folder(busy: tuple[Worker, Spec, Path], tmp_path: Path) -> None:
    worker, asked, place = busy
    for shard, unit in (((1, 2), "1 of 4, block=0"), ((1, 1), "1 of 4"), ((3, 3), "3 of 4")):  # whatever overlaps
        at_work = (
            rf"another process is at work on unit {unit.split(',')[0]} \(block=.\). Wait for it, or give each proc"
        )
        with pytest.raises(BadRun, match=at_work):
            run(asked, place, shard=shard)
    (tmp_path / "go").touch()
    assert worker.wait() == 0, worker.error
    df = run(asked, place, shard=(2, 2))
    assert df is not None
    assert df["block"].unique().tolist() == [0, 1, 2, 3]
    assert sorted(begun(tmp_path / LOG)) == [0, 1, 2, 3]


def test_a_killed_process_holds_nothing(busy: tuple[Worker, Spec, Path], tmp_path: Path) -> None:
    worker, asked, place = busy
    worker.kill()
    assert worker.wait() == -signal.SIGKILL
    (tmp_path / "go").touch()
    assert run(asked, place) is not None
    assert sorted(begun(tmp_path / LOG)) == [0, 0, 1, 2, 3]


def test_shards_at_once_do_each_unit_once_and_join(tmp_path: Path, expected: pd.DataFrame) -> None:
    asked, place = described(log=str(tmp_path / LOG)), tmp_path / "run"
    workers = [Worker(lambda i=i: run(asked, place, shard=(i, 3))) for i in (1, 2, 3)]
    for worker in workers:
        assert worker.wait() == 0, worker.error
    assert (place / "pictures").exists(), "whoever was last has joined"
    assert sorted(begun(tmp_path / LOG)) == list(range(UNITS))
    assert_frame_equal(frames.read(place / "frame.parquet"), expected)
    assert left_over(place) == []


def test_one_joins_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(df: pd.DataFrame, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Axes]]:
        with (tmp_path / LOG).open("a") as file:
            file.write("0\n")
        until((tmp_path / "go").exists)
        yield from draw(df, arguments)

    monkeypatch.setitem(STUDIES, "toy", Study(toy, slow))
    first = Worker(lambda: run(described(1), tmp_path / "run"))
    until((tmp_path / LOG).exists)
    second = Worker(lambda: run(described(1), tmp_path / "run"))
    time.sleep(0.3)
    assert not second.ended
    (tmp_path / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0), first.error + second.error
    assert begun(tmp_path / LOG) == [0], "the second found it joined"


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0), (-1, 2)])
def test_a_shard_that_does_not_exist(shard: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(BadRun, match=rf"there is no shard {shard[0]}/{shard[1]}"):
        run(described(2), tmp_path, shard=shard)
    assert not list(tmp_path.iterdir())


def test_more_shards_than_units(tmp_path: Path) -> None:
    assert run(described(2), tmp_path, shard=(3, 3)) is None
    assert run(described(2), tmp_path, shard=(2, 3)) is None
    assert finished(tmp_path) == (1, 2)
    assert run(described(2), tmp_path, shard=(1, 3)) is not None


# ---- never mixed -----------------------------------------------------------------------------------------------------


def refused(asked: Spec, place: Path, why: str) -> None:
    kept = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with pytest.raises(BadRun, match=f"is another run's: .*{why}.*Take another folder"):
        run(asked, place)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == kept


def test_results_of_one_model_shown_for_another_the_key_left_out_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(described(2), tmp_path, shard=(1, 2))
    model = HookedModel.load()
    weights = model.decoder.weights
    assert isinstance(weights, InMemory)
    moved = {key: tensor.clone() for key, tensor in weights.tensors.items()}
    moved[2, "w_attn"][5] += 1e-6
    other = HookedModel(InMemory(weights.dims, moved), model.tokenizer)
    assert identity(other) != identity(model)

    def load(directory: str | Path = TINY, dtype: torch.dtype | None = None) -> HookedModel:
        return other

    monkeypatch.setattr(HookedModel, "load", load)
    refused(described(2), tmp_path, r"units\[0\].model.weights was '\w+', and is '\w+'")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"size": 3}, r"units\[0\].arguments.size was 2, and is 3"),
        ({"prompts": "job"}, r"units\[0\].arguments.prompts.name was 'capital', and is 'job'"),
        ({"model": {"dtype": "bfloat16"}}, r"units\[0\].model.dtype was 'float32', and is 'bfloat16'"),
        ({"grid": {"block": [0, 2]}}, r"units\[1\].label was 'block=1', and is 'block=2'"),
        ({"grid": {"block": [0, 1, 2]}}, "units was 2 long, and is 3 long"),
    ],
    ids=["argument", "prompts", "dtype", "unit", "units"],
)
def test_another_run_is_refused(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    run(described(2), tmp_path, shard=(1, 2))
    refused(described(2, **more), tmp_path, why)


@pytest.mark.parametrize(
    "change",
    [{"clean": "The capital of Japan is"}, {"answer": "Tokyo"}, {"group": "x"}, {"corrupt": "The capital of Peru is"}],
    ids=["text", "answer", "group", "corrupt"],
)
def test_prompts_count_by_content_not_by_name(change: dict[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    row = {"clean": "The capital of France is", "answer": "Paris", "corrupt": "The capital of Japan is"}
    asked = described(2, tmp_path, prompts="mine.jsonl")
    rows.write_text(json.dumps(row))
    run(asked, tmp_path / "run", shard=(1, 2))
    Prompts.load.cache_clear()  # type: ignore[attr-defined]
    rows.write_text(json.dumps(row | change))
    refused(asked, tmp_path / "run", r"units\[0\].arguments.prompts.digest was")
    Prompts.load.cache_clear()  # type: ignore[attr-defined]
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / rows.name).write_text(json.dumps(row))
    assert run(described(2, tmp_path / "moved", prompts="mine.jsonl"), tmp_path / "run") is not None, (
        "wherever they are"
    )


@pytest.mark.parametrize("keep", ["expanded", "stored", "disk"])
def test_weights_that_changed_by_one_byte_are_another_runs(keep: str, tmp_path: Path) -> None:
    """At the start of a tensor, where no sample would look."""
    shutil.copytree(TINY, tmp_path / "mine")
    asked = described(2, tmp_path, model={"directory": "mine", "keep": keep})
    assert run(asked, tmp_path / "run") is not None
    stored = Checkpoint(tmp_path / "mine").survey.stored["model.layers.2.self_attn.o_proj.weight"]
    with (tmp_path / "mine" / stored.file).open("r+b") as file:
        file.seek(stored.start)
        byte = file.read(1)[0]
        file.seek(stored.start)
        file.write(bytes([byte ^ 1]))
    HookedModel.load.cache_clear()  # type: ignore[attr-defined]
    refused(asked, tmp_path / "run", r"units\[0\].model.weights was '\w+', and is '\w+'")


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(described(2), tmp_path, shard=(1, 2))
    monkeypatch.setattr(frames, "VERSION", frames.VERSION + 1)
    refused(described(2), tmp_path, r"versions.frame was 2, and is 3")


# ---- units that fail -------------------------------------------------------------------------------------------------


def test_a_unit_that_fails_is_named_and_the_others_stay(tmp_path: Path) -> None:
    with pytest.raises(BadEdit) as error:
        run(described(4, fail=True), tmp_path)
    assert str(error.value) == (
        f"unit 3 of 4 (block=2): this one can't be. 2 of 4 units are finished, and stay in {tmp_path}."
    )


def test_rows_that_several_units_hold_alike_are_joined_once(tmp_path: Path) -> None:
    given = {"study": "attribute", "prompts": "job", "tensors": ["O"], "blocks": [3], "grid": {"steps": [1, 2]}}
    df = run(parse(given, "twice", tmp_path), tmp_path / "run")
    assert df is not None
    kinds = df.groupby("edit", observed=True).size()
    each = [f"integrated gradients, {steps}" for steps in ("1 step", "2 steps")]
    assert list(kinds.index) == ["attribution", *each, "patch"]
    assert kinds.nunique() == 1
    assert len(df) < sum(len(frames.read(file)) for file in (tmp_path / "run" / "units").glob("*.parquet"))


def test_what_a_killed_process_left_half_written_goes_at_the_start(tmp_path: Path) -> None:
    assert run(described(4, fail=True), tmp_path, shard=(1, 4)) is None
    later = json.loads((tmp_path / "manifest.json").read_text())["units"][3]["file"]
    (tmp_path / later).with_name(f".{Path(later).name}.0123456789abcdef.part").write_bytes(b"half")
    with pytest.raises(BadEdit, match="unit 3 of 4"):
        run(described(4, fail=True), tmp_path)
    assert left_over(tmp_path) == []


def test_units_that_measure_the_same_are_refused_when_joined(tmp_path: Path) -> None:
    asked = described(2, grid={"log": [str(tmp_path / "a"), str(tmp_path / "b")]})
    with pytest.raises(
        frames.BadFrame, match=r"joining the units: two rows measure one thing: study=toy.*2 of 2 units"
    ):
        run(asked, tmp_path / "run")


def test_what_units_say_beside_their_rows_is_kept_by_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of one unit must not pass for counts of all."""

    def says(model: HookedModel, prompts: Prompts, *, block: int = 0, name: str | None = None) -> pd.DataFrame:
        df = toy(model, prompts, block=block, name=name)
        df.attrs |= {"unmatched": block, "left_out": {"experts": f"no {block}"}}
        return df

    monkeypatch.setitem(STUDIES, "toy", Study(says, lambda df, arguments: iter(())))
    whole = run(described(3), tmp_path / "several")
    assert whole is not None
    assert whole.attrs.keys() == {"schema", "units"}
    assert whole.attrs["units"] == {
        f"block={i}": {"unmatched": i, "left_out": {"experts": f"no {i}"}} for i in range(3)
    }
    assert run(described(3), tmp_path / "several").attrs == whole.attrs  # type: ignore[union-attr]  # read back
    lone = run(parse({"study": "toy", "prompts": "capital", "block": 2}, "toy"), tmp_path / "lone")
    assert lone is not None
    assert lone.attrs == {"schema": frames.VERSION, "unmatched": 2, "left_out": {"experts": "no 2"}}


def test_a_damaged_unit_is_named_and_can_be_done_anew(tmp_path: Path) -> None:
    asked = described(2)
    assert run(asked, tmp_path, shard=(1, 2)) is None
    (path,) = (tmp_path / "units").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadRun, match=rf"can't read {path}.*Delete that file and run again"):
        run(asked, tmp_path)
    path.unlink()
    assert run(asked, tmp_path) is not None


def test_what_it_would_cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cost(model: HookedModel, prompts: Prompts, **more: Any) -> dict[str, float]:
        return {"cells": 10 + more["block"], "bytes": 1000 * more["block"], "seconds": 0.5}

    assert plan(described(2)) == [{}, {}]
    monkeypatch.setitem(STUDIES, "toy", Study(toy, lambda df, arguments: iter(()), cost))
    assert plan(described(3))[2] == {"cells": 12, "bytes": 2000, "seconds": 0.5}
    path = tmp_path / "toy.toml"
    path.write_text("study = 'toy'\nprompts = 'capital'\n[grid]\nblock = [0, 1, 2]\n")
    out = CliRunner().invoke(app, ["run", str(path), "--dry-run"])
    assert [line.split() for line in out.stdout.splitlines()] == [
        ["toy:", "3", "units"],
        ["unit", "with", "cells", "bytes", "seconds"],
        ["1", "block=0", "10", "0", "0.5"],
        ["2", "block=1", "11", "1,000", "0.5"],
        ["3", "block=2", "12", "2,000", "0.5"],
        ["in", "all", "33", "2,000", "1.5"],
        [],
    ]
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("study = 'toy'\nprompts = 'capital'\n[grid]\nblock = [0, 1, 2]\n")
    first = CliRunner().invoke(app, ["run", "mine.toml", "--shard", "1/2"])
    assert first.stdout.splitlines() == ["2 of 3 units are finished", "wrote runs/mine/units"]
    second = CliRunner().invoke(app, ["run", "mine.toml", "--shard", "2/2"])
    assert second.stdout.splitlines()[0] == "3 of 3 units are finished, and joined"
    assert Path("runs/mine/frame.parquet").exists()
    assert "/runs/" in (Path(__file__).parents[2] / ".gitignore").read_text().splitlines(), "results are nobody's code"
    for bad in ("2", "a/b", "1/2/3", "-1/2", ""):
        assert CliRunner().invoke(app, ["run", "mine.toml", "--shard", bad]).exit_code == 2
    wrong = CliRunner().invoke(app, ["run", "mine.toml", "--shard", "3/2"])
    assert (wrong.exit_code, wrong.stderr) == (
        1,
        "k2probe: there is no shard 3/2: they are 1/n to n/n, n at least 1.\n",
    )


# ---- fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_sees_every_byte_in_memory() -> None:
    dims = replace(HookedModel.load().dims, moe=(False, True))
    prints = {fingerprint(random_weights(dims, seed)) for seed in (0, 1)}
    weights = random_weights(dims)
    assert fingerprint(weights) in prints
    for key in ((0, "w_attn"), (1, "W_2_e"), (None, "W_U")):
        weights.tensors[key].view(-1)[-1] += 1e-3
        prints.add(fingerprint(weights))
    assert len(prints) == 5
    assert len({fingerprint(weights.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}) == 2


def test_a_fingerprint_of_files_sees_every_tensor(tmp_path: Path) -> None:
    """No tensor's own bytes can all change unseen, nor a name, a dtype or a file."""
    shutil.copytree(TINY, tmp_path / "copy")
    copy = tmp_path / "copy"
    plain = fingerprint(Checkpoint(TINY))
    assert fingerprint(Checkpoint(copy)) == plain
    path = copy / "model-2-of-2.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name in random.Random(0).sample(sorted(header.keys() - {"__metadata__"}), 20):
        first, end = (8 + length + at for at in header[name]["data_offsets"])
        path.write_bytes(content[:first] + bytes(255 - byte for byte in content[first:end]) + content[end:])
        assert fingerprint(Checkpoint(copy)) != plain, name
    path.write_bytes(content.replace(b'"BF16"', b'"F16" ', 1))
    assert fingerprint(Checkpoint(copy)) != plain
    path.write_bytes(content)
    assert fingerprint(Checkpoint(copy)) == plain


def test_weights_may_say_their_own() -> None:
    weights = random_weights(replace(HookedModel.load().dims, moe=(False,)))
    weights.fingerprint = "abc"  # type: ignore[attr-defined]
    assert fingerprint(weights) == "abc"
