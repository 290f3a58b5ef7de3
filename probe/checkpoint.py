"""A checkpoint directory in the original names: ``config.json``, safetensors shards, an index if there are several.

`load` opens one as published: bf16, fp16, fp32, FP8 or INT4, of Kimi K2 or its kin. Its weights are expanded into
memory, held as they are stored, or read from disk as they are needed: `memory` says what each would take. Everything
that headers can tell is checked before a weight is read; nothing is executed and nothing unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Literal, get_args, overload

import torch
from torch import Tensor

from probe.config import guesses, layout, unread_keys
from probe.errors import BadCheckpoint, Missing, OutOfRange, asking
from probe.forms import AGAIN, TIED, Survey, quantisation_config, survey, told_apart
from probe.headers import expanded, read_tensor, same_bytes, told
from probe.leaves import LEAVES
from probe.memory import Keeping, table
from probe.names import SOURCES, shown, stored_names
from probe.numerics import finite
from probe.quantised import dequantise_fp8, dequantise_int4
from probe.weights import InMemory, Origin, digest, place_of, weight_sites


class Checkpoint:
    """A directory of safetensors, read a weight at a time; FP8 and INT4 are expanded as they are read.

    Args:
        directory: holds ``config.json`` and either ``model.safetensors`` or an index with its shards.
        dtype: what weights are cast to as they are read; None: as stored, quantised ones to bf16. Router weight and
            correction bias are fp32 always.
        device: where what is read goes.

    Attributes:
        survey: what the directory holds: every tensor's place, and what was left out.
        origin: the files that it reads.
        notes: what a reader of this model's numbers must know.

    Raises:
        BadConfig: the config is missing or cannot be honoured.
        BadCheckpoint: a file is missing or damaged; a tensor is missing, unknown, or of a wrong shape or dtype; a scale
            is; a head contradicts the config. All of it from headers, before a weight is read: but a tied head that is
            stored all the same is held against the embedding.
    """

    resident = False

    def __init__(
        self, directory: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        self.directory, self.dtype, self.device = expanded(directory), dtype, torch.device(device or "cpu")
        self.survey = survey(self.directory)
        self.survey.refuse_faults(self.directory)
        for head in self.survey.left_out.get(AGAIN, ()):
            stored = self.survey.stored
            embedding = layout(self.survey.config, stored).full("model.embed_tokens.weight")
            if not same_bytes(self.directory, stored[head], stored[embedding]):
                where = self.directory / told(stored[head].file)
                raise BadCheckpoint(f"{where}: {told(head)} {TIED}, and it is another than the embedding.")
        self.dims = self.survey.dims
        self.notes = _notes(self.survey)
        self._held: dict[str, Tensor] | None = None
        opened = {stored.file: stored.opened for stored in self.survey.stored.values()}
        self.origin = Origin({self.directory.absolute() / file: one.stamp for file, one in opened.items()}, None)
        self._sound: set[str] = set()
        """The matrices and vectors that have been read and found finite."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """A copy, pickled or not, reads the files anew."""
        return _reopened, (type(self), self.directory, self.dtype, self.device, self._held is not None, self.origin)

    def hold(self) -> Checkpoint:
        """Read every weight once, and hold it in memory as it is stored; returns itself."""
        parts = [part for kept in self.survey.kept.values() for part in kept.parts]
        stored = self.survey.stored
        parts.sort(key=lambda part: (stored[part].file, stored[part].start))
        self._held = {part: self._part(part) for part in parts}
        self.origin = self.origin._replace(digest=self.digest())
        return self

    def digest(self) -> str:
        """Of every byte that is held in memory, as it is stored."""
        return digest((self._held or {}).items())

    @property
    def version(self) -> int:
        """Grows whenever somebody writes into a weight that is held."""
        return sum(0 if part.is_inference() else part._version for part in (self._held or {}).values())

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        """One weight of one block as the card shows it, [in out]; of a routed one only these experts' rows.

        Raises:
            BadCheckpoint: a file has changed since it was opened; a weight or a scale is NaN or infinite, which the
                first reading tells.
            Missing, OutOfRange: the model has no such weight or expert.
        """
        if name == "W_U" and self.dims.tied:
            return self.read(None, "W_E").T
        names = stored_names(block, LEAVES[name], self.dims) if name in SOURCES else []
        if not names or names[0] not in self.survey.kept:
            raise Missing(f"{place_of(block, name)} is no weight of this model.")
        dtype = reduce(torch.promote_types, (self.survey.dtype(one, name, self.dtype) for one in names))
        if not LEAVES[name].routed:
            return shown(self._matrix(names[0], dtype), name, self.dims)
        if beyond := [e for e in experts or () if not 0 <= e < len(names)]:
            raise OutOfRange(f"{place_of(block, name)}: there is no expert {beyond[0]} of {len(names)}.")
        chosen = names if experts is None else [names[e] for e in experts]
        made = torch.empty((len(chosen), *self.survey.kept[names[0]].shape), dtype=dtype, device=self.device)
        for one, place in zip(chosen, made, strict=True):
            self._matrix(one, dtype, place)
        return made.transpose(1, 2)

    def _matrix(self, name: str, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """A stored matrix or vector, [out in], expanded; written into ``out`` if there is one."""
        form, shape, parts = self.survey.kept[name]
        values, *rest = map(self._part, parts)
        with asking(f"{self.directory / self.survey.stored[parts[0]].file}: {told(parts[0])}"):
            if form == "plain":
                made = values.to(dtype) if out is None else out.copy_(values)
            elif form == "fp8":
                made = dequantise_fp8(values, rest[0], dtype, out=out)
            else:
                scale, stated = rest
                if tuple(stated.tolist()) != shape:
                    raise BadCheckpoint(f"it says that it is {stated.tolist()}, and is packed as {list(shape)}.")
                made = dequantise_int4(values, scale, (shape[0], shape[1]), dtype, out=out)
            if name not in self._sound:
                _check_finite(made)
                self._sound.add(name)
        return made

    def _part(self, part: str) -> Tensor:
        """A stored tensor, as it is."""
        if self._held is not None:
            return self._held[part]
        return read_tensor(self.directory, part, self.survey.stored[part]).to(self.device)

    def in_memory(self) -> InMemory:
        """All weights, expanded once: what is held beside them meanwhile is one stored tensor."""
        made = {}
        for block, leaf in weight_sites(self.dims):
            weight = self.read(block, leaf.name)
            whole = weight.untyped_storage().nbytes() == weight.nbytes
            made[block, leaf.name] = weight if whole else weight.clone()  # a view would hold its neighbour too
        weights = InMemory(self.dims, made, self.notes)
        weights.origin = Origin(self.origin.files, weights.digest())
        return weights


def _reopened(
    kind: type[Checkpoint],
    directory: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    held: bool,
    origin: Origin,
) -> Checkpoint:
    made = kind(directory, dtype, device)
    was, now = ({path: stamp[2:] for path, stamp in one.files.items()} for one in (origin, made.origin))
    if changed := sorted(path for path in {**was, **now} if was.get(path) != now.get(path)):
        raise BadCheckpoint(f"{changed[0]}: it has changed since the model that this is a copy of was opened.")
    return made.hold() if held else made


def _check_finite(weight: Tensor) -> None:
    """Refuse a weight as it was read, [out in], that a run could only multiply to NaN."""
    if finite(weight):
        return
    at = (~weight.isfinite()).nonzero()[0].tolist()
    where = f"row {at[0]}, column {at[1]}" if len(at) == 2 else f"place {at[0]}"
    what = "NaN" if bool(weight[tuple(at)].isnan()) else "infinite"
    if what == "infinite" and weight.dtype == torch.float16:
        raise BadCheckpoint(f"the weight at {where} is infinite in float16, which ends at 65,504; take another dtype.")
    raise BadCheckpoint(f"the weight at {where} is {what}. Fetch the file anew.")


def _notes(found: Survey) -> tuple[str, ...]:
    """What a reader of this model's numbers must know."""
    forms = sorted({kept.form for kept in found.kept.values()} - {"plain"})
    quantised = quantisation_config(found.config) or {}
    other = "a server that quantises activations too gives other numbers"
    said = [f"stored as {form.upper()} and expanded to bf16: {other}" for form in forms]
    if forms and quantised.get("scale_fmt") == "ue8m0":
        said.append("scale_fmt ue8m0: the scales are powers of two, and so would be those of a server's activations")
    said += [*told_apart(found.left_out), *guesses(found.config)]
    if unread := unread_keys(found.config):
        said.append(f"config.json has keys that are not read here and might mean something: {told(', '.join(unread))}")
    return tuple(said)


@overload
def load(
    directory: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep: Literal["expanded"] = "expanded",
) -> InMemory: ...


@overload
def load(
    directory: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    keep: Keeping,
) -> InMemory | Checkpoint: ...


def load(
    directory: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep: Keeping = "expanded",
) -> InMemory | Checkpoint:
    """Open a checkpoint directory.

    Args:
        directory: see `Checkpoint`.
        dtype: what weights are cast to; None: as stored, FP8 and INT4 to bf16. Router weight and correction bias are
            fp32 always.
        device: where to keep them.
        keep: "expanded": all in memory in this dtype, the fastest. "stored": all in memory as they are stored, and
            expanded for each step that reads them. "disk": read for each step. `memory` says what each takes.

    Raises:
        BadConfig, BadCheckpoint: as `Checkpoint`.
        TooLarge: they would not fit into the memory that is available; the message names what takes less.
    """
    if keep not in get_args(Keeping):
        raise BadCheckpoint(f"{directory}: keep={keep!r} is not one of {', '.join(get_args(Keeping))}.")
    checkpoint = Checkpoint(directory, dtype, device)
    table(checkpoint.directory, checkpoint.survey, dtype, device).check(keep)
    if keep == "disk":
        return checkpoint
    return checkpoint.hold() if keep == "stored" else checkpoint.in_memory()
