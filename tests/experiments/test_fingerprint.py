"""One name for one checkpoint, however it lies on disk, is kept or cast; and another for any other."""

from __future__ import annotations

import copy
import os
import pickle
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments import Prompts, compare, norms
from experiments import fingerprint as module
from experiments.cli import app
from experiments.fingerprint import BY_STAT, by_content, fingerprint, kept
from experiments.study import identity
from hooks import HookedModel, zero
from probe import TINY, Checkpoint, InMemory, load
from probe.errors import BadCheckpoint, BadEdit
from probe.memory import Keeping
from probe.writer import save

KEPT: list[Keeping] = ["expanded", "stored", "disk"]
SHARDS = sorted(path.name for path in TINY.glob("*.safetensors"))


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for files of any age."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(module, "SETTLED", -1.0)
    for memory in ("_KEPT", "_NAMES"):
        monkeypatch.setattr(module, memory, {})
    return tmp_path / "caches" / "k2-probe" / "digests"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def snapshot(home: Path, digest: Callable[[bytes], str] = lambda data: sha256(data).hexdigest()) -> Path:
    """The tiny model as the hub's cache holds one: links to blobs that are called by their content."""
    place, blobs = home / "models--k2--tiny" / "snapshots" / "main", home / "models--k2--tiny" / "blobs"
    place.mkdir(parents=True)
    blobs.mkdir()
    for path in filter(Path.is_file, TINY.iterdir()):
        name = digest(path.read_bytes())
        shutil.copy(path, blobs / name)
        (place / path.name).symlink_to(f"../../blobs/{name}")
    return place


def flip(path: Path, at: int) -> None:
    """A byte, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose digests are made from here on."""
    names: list[str] = []
    real = module._made

    def seen(path: Path, *more: object) -> str:
        names.append(path.name)
        return real(path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_made", seen)
    return names


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(module, "_KEPT", {})


# ---- one name for one checkpoint -------------------------------------------------------------------------------------


def test_a_checkpoint_has_one_name_however_it_is_kept_or_cast(tiny: Path, tmp_path: Path) -> None:
    """In a copy and in the hub's cache too, so that frames of it join."""
    names = {
        identity(HookedModel.load(place, dtype, keep=keep), "tiny")
        for place in (TINY, tiny, snapshot(tmp_path))
        for dtype in (None, torch.float32)
        for keep in KEPT
    }
    assert len(names) == 1
    assert identity(HookedModel.load(), "tiny") in names


def test_frames_of_studies_that_keep_weights_otherwise_name_one_model(tiny: Path) -> None:
    from_disk, resident = HookedModel.load(tiny, keep="disk"), HookedModel.load(tiny)
    assert resident.tokenizer is not None
    prompts = Prompts.load("capital", resident.tokenizer).subset([0])
    (one,) = {*norms.norms(resident, prompts, tensors=["x_n"], name="tiny")["model"]}
    (both,) = {*compare.compare(from_disk, resident, names=("tiny", "tiny"))["model"]}
    assert both == f"{one} → {one}"


@pytest.mark.parametrize("keep", KEPT)
def test_every_byte_of_every_file_counts(keep: Keeping, tiny: Path) -> None:
    """Of each tensor one, but for the 64 in the middle."""
    plain, draw = fingerprint(load(tiny, keep=keep)), random.Random(0)
    stored = list(Checkpoint(tiny).survey.stored.values())
    for one in stored if keep == "disk" else draw.sample(stored, 8):
        at = draw.choice([*range(one.start, one.stop)][: max(1, one.nbytes // 2 - 32)])
        flip(tiny / one.file, at)
        assert fingerprint(load(tiny, keep=keep)) != plain
        flip(tiny / one.file, at)
    assert fingerprint(load(tiny, keep=keep)) == plain


@pytest.mark.parametrize("digits", [64, 40])
def test_in_the_hubs_cache_no_blob_is_read(digits: int, tmp_path: Path, made: list[str]) -> None:
    """SHA-256 of large files; of small ones git's SHA-1."""
    place = snapshot(tmp_path / "one", lambda data: sha256(data).hexdigest()[:digits])
    other = snapshot(tmp_path / "other", lambda data: sha256(data + b"other").hexdigest()[:digits])
    names = {fingerprint(Checkpoint(one)) for one in (place, other)}
    assert len(names) == 2
    assert made == []
    assert not kept().exists()


@pytest.mark.parametrize("name", ["g" * 64, "a" * 63, "model-1"], ids=["no digits", "too few", "a name"])
def test_a_blob_that_is_called_otherwise_is_read(name: str, tmp_path: Path, made: list[str]) -> None:
    places = iter([name, *(f"{name}-{i}" for i in range(20))])
    assert fingerprint(Checkpoint(snapshot(tmp_path, lambda data: next(places)))) == fingerprint(Checkpoint(TINY))
    assert sorted(made) == sorted(2 * SHARDS)


# ---- weights that somebody has written into --------------------------------------------------------------------------


def in_place(weight: torch.Tensor) -> None:
    weight.mul_(2)


def past_autograd(weight: torch.Tensor) -> None:
    weight.data[-1] += 1


def through_numpy(weight: torch.Tensor) -> None:
    weight.numpy()[0] += 1


def swapped(weight: torch.Tensor) -> None:
    """Rows, so that no sum tells."""
    weight.data[:2] = weight.data[:2].flip(0)


@pytest.mark.parametrize("write", [in_place, past_autograd, through_numpy, swapped])
@pytest.mark.parametrize("keep", ["expanded", "stored"])
def test_written_weights_lose_their_files_name_and_get_it_back(
    keep: Keeping, write: Callable[[torch.Tensor], None], tmp_path: Path
) -> None:
    save(load(TINY), tmp_path / "fp32", dtype=torch.float32)
    weights = load(tmp_path / "fp32", keep=keep)
    name, W_O = fingerprint(weights), weights.read(2, "W_O")
    before = W_O.clone()
    write(W_O)
    assert torch.equal(weights.read(2, "W_O"), W_O), "it is the model's own"
    assert fingerprint(weights) != name
    W_O.copy_(before)
    assert fingerprint(weights) == name


def test_what_is_made_of_loaded_weights_is_named_by_its_values() -> None:
    weights = load(TINY)
    names = [fingerprint(weights), fingerprint(weights.to(torch.float32)), fingerprint(weights.to(torch.float16))]
    assert len({*names}) == 3
    again = InMemory(weights.dims, dict(reversed(weights.tensors.items())))
    lying = InMemory(
        weights.dims, {key: t.clone(memory_format=torch.contiguous_format) for key, t in again._own().items()}
    )
    assert fingerprint(again) == fingerprint(lying)
    assert fingerprint(again) not in names
    assert fingerprint(weights.to()) == names[0], "what is shared has the name of its files"


def test_a_copy_of_weights_in_memory_keeps_the_name() -> None:
    weights = load(TINY)
    for twin in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert fingerprint(twin) == fingerprint(weights)
        twin.read(0, "W_O").zero_()
        assert fingerprint(twin) != fingerprint(weights)


# ---- files that change -----------------------------------------------------------------------------------------------


def test_files_that_changed_name_nothing(tiny: Path) -> None:
    """What is read from them is refused; what is in memory is named by its values."""
    from_disk, resident, held = (load(tiny, keep=keep) for keep in ("disk", "expanded", "stored"))
    flip(tiny / SHARDS[1], -9 + (tiny / SHARDS[1]).stat().st_size)
    with pytest.raises(BadCheckpoint, match=f"{tiny / SHARDS[1]}: the file has changed since it was opened"):
        fingerprint(from_disk)
    values = fingerprint(InMemory(load(TINY).dims, load(TINY).tensors))
    assert fingerprint(resident) == fingerprint(held) == values
    assert values != fingerprint(load(tiny))
    (tiny / SHARDS[1]).unlink()
    assert fingerprint(resident) == fingerprint(held) == values
    with pytest.raises(BadCheckpoint, match=f"{tiny / SHARDS[1]}: it cannot be read any more"):
        fingerprint(from_disk)


def test_what_is_in_memory_keeps_the_name_that_it_had(tiny: Path) -> None:
    """Or frames of one session would not join."""
    weights = [load(tiny, keep=keep) for keep in ("expanded", "stored")]
    names = [fingerprint(one) for one in weights]
    shutil.rmtree(tiny)
    assert [fingerprint(one) for one in weights] == names == 2 * [fingerprint(load(TINY))]
    for one in weights:
        one.read(None, "w_final").zero_()
        assert fingerprint(one) not in names


def test_a_base_is_refused_once_stored_weights_are_written_into() -> None:
    model = HookedModel.load(dtype=torch.bfloat16, keep="stored")
    tokens = torch.arange(5)[None]
    base = model.run(tokens, want=None)
    model.decoder.weights.read(1, "W_O").mul_(2)
    with pytest.raises(BadEdit, match="weights have been written into since the base was run"):
        model.run(tokens, edits=[zero("O", 2)], base=base)


def test_a_file_that_changes_while_its_digest_is_made_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, real = Checkpoint(tiny), module.OpenFile.read

    def read(self: module.OpenFile, place: memoryview, start: int) -> None:
        real(self, place, start)
        flip(tiny / SHARDS[0], 1000)

    monkeypatch.setattr(module.OpenFile, "read", read)
    with pytest.raises(BadCheckpoint, match=rf"{tiny / SHARDS[0]}: .*changed"):
        fingerprint(weights)
    assert not kept().exists()


# ---- digests are made once -------------------------------------------------------------------------------------------


def test_a_digest_is_made_once(tiny: Path, made: list[str], caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fingerprint(Checkpoint(tiny))
    assert made == SHARDS
    assert kept() == caches
    assert len(list(caches.iterdir())) == 2, "and nothing else is left there"
    for _ in range(2):
        forgotten(monkeypatch)
        assert fingerprint(Checkpoint(tiny)) == name
    assert made == SHARDS


def test_a_file_with_its_old_size_and_time_is_another(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = fingerprint(Checkpoint(tiny)), tiny / SHARDS[1]
    said = path.stat()
    flip(path, said.st_size - 9)
    os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))
    assert fingerprint(Checkpoint(tiny)) != name


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text[:40],
        lambda text: ("0" if text[0] != "0" else "1") + text[1:],
        lambda text: "é" + text,
        lambda text: text + text,
    ],
    ids=["empty", "no end", "cut", "a digit", "other letters", "twice"],
)
def test_a_damaged_entry_is_made_anew(
    damage: Callable[[str], str], tiny: Path, made: list[str], caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fingerprint(Checkpoint(tiny))
    sound = {path: path.read_text() for path in caches.iterdir()}
    for path, text in sound.items():
        path.write_text(damage(text), encoding="latin-1")
    forgotten(monkeypatch)
    assert fingerprint(Checkpoint(tiny)) == name
    assert made == 2 * SHARDS
    assert {path: path.read_text() for path in caches.iterdir()} == sound


def test_an_entry_of_another_file_is_none(
    tiny: Path, made: list[str], caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fingerprint(Checkpoint(tiny))
    one, other = caches.iterdir()
    shutil.copy(one, other)
    forgotten(monkeypatch)
    assert fingerprint(Checkpoint(tiny)) == name
    assert len(made) == 3


def test_without_a_cache_folder_a_process_makes_a_digest_once(tmp_path: Path, made: list[str]) -> None:
    (tmp_path / "caches").write_text("no folder")
    names = {fingerprint(Checkpoint(TINY)) for _ in range(3)}
    assert len(names) == 1
    assert made == SHARDS


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for said in ("", "relative/does/not/count"):
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert kept() == tmp_path / ".cache" / "k2-probe" / "digests"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept() == tmp_path / ".cache" / "k2-probe" / "digests"


def test_what_was_written_just_now_is_not_kept(tiny: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tick of the clock it may be written again."""
    monkeypatch.setattr(module, "SETTLED", 3600.0)
    assert fingerprint(Checkpoint(tiny)) == fingerprint(Checkpoint(tiny))
    assert made == 2 * SHARDS
    assert not kept().exists()


def test_a_long_reading_is_told_before(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fingerprint(Checkpoint(TINY))
    assert capsys.readouterr() == ("", "")
    forgotten(monkeypatch)
    shutil.rmtree(kept())
    monkeypatch.setattr(module, "TOLD", 0.0)
    fingerprint(Checkpoint(TINY))
    said = capsys.readouterr().err
    assert said.startswith(f"{TINY}: 2 MB are read once for their digest: ")
    assert said.endswith(" seconds\n")


# ---- large ones, by stat ---------------------------------------------------------------------------------------------


@pytest.fixture
def large(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "LIMIT", 10_000)
    module._say_by_stat.cache_clear()
    return tiny


@pytest.mark.parametrize("keep", KEPT)
def test_above_the_limit_frames_say_by_stat(
    keep: Keeping, large: Path, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = HookedModel.load(large, keep=keep)
    name = identity(model, "tiny")
    assert name.startswith(f"tiny {BY_STAT} ")
    assert made == []
    said = capsys.readouterr().err
    assert said.startswith(f"{large}: frames name this model by stat: its files' names, sizes and times.")
    assert "2 MB have to be read once: `k2probe --digest ...`" in said
    with by_content():
        assert BY_STAT not in identity(model, "tiny")
    assert made == SHARDS
    assert identity(model, "tiny") == name, "whatever is kept"
    assert capsys.readouterr().err == "", "it is said once"


def test_by_stat_goes_by_names_sizes_and_times(large: Path) -> None:
    twin = Path(shutil.copytree(large, large.with_name("copy")))
    names = {fingerprint(Checkpoint(large)), fingerprint(Checkpoint(twin))}
    assert len(names) == 1, "copied with its times"
    os.utime(twin / SHARDS[0])
    names.add(fingerprint(Checkpoint(twin)))
    assert len(names) == 2


def test_the_hubs_names_know_no_limit(tmp_path: Path, large: Path) -> None:
    name = fingerprint(Checkpoint(snapshot(tmp_path)))
    assert BY_STAT not in name
    with by_content():
        assert fingerprint(Checkpoint(large)) == name


def test_the_command_asks_for_the_content(large: Path, tmp_path: Path) -> None:
    asked = ["norms", "--model", str(large), "--prompt", "The capital of France is", "--tensor", "x_n", "--out"]
    names = []
    for options in ([], ["--digest"], []):
        done = CliRunner().invoke(app, [*options, *asked, str(tmp_path / "out")])
        assert done.exit_code == 0, done.output
        names += (tmp_path / "out" / "norms.csv").read_text().splitlines()[1].split(",")[1:2]
    assert [BY_STAT in name for name in names] == [True, False, True]
    assert names[0] == names[2]
