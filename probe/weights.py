"""Weights in memory: where each comes from in a checkpoint, and random ones wide enough to do real work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from probe.card import Leaf
from probe.dims import Dims
from probe.engine import Weights
from probe.errors import BadCheckpoint, Missing, OutOfRange, check_seed
from probe.headers import Stamp
from probe.leaves import FP32
from probe.sites import Sites


def weight_shape(leaf: Leaf, dims: Dims) -> tuple[int, ...]:
    """The sizes of a weight as the card shows it, [in out]."""
    return tuple(map(dims.size, leaf.shape))


def weight_sites(dims: Dims) -> Iterator[tuple[int | None, Leaf]]:
    """Every (block, weight) of a model, embedding first, head last. A tied head is the embedding, and left out."""
    sites = Sites(dims)
    outer = {leaf.name: leaf for leaf in sites.around.weights}
    yield None, outer["W_E"]
    for block, block_card in enumerate(sites.cards):
        for leaf in block_card.weights:
            yield block, leaf
    yield None, outer["w_final"]
    if not dims.tied:
        yield None, outer["W_U"]


class Origin(NamedTuple):
    """Where weights were read from.

    Attributes:
        files: each file as it was opened.
        digest: of the tensors in memory as they were made of these files: as long as they have it, nobody has written
            into them. None: they are read from the files each time.
    """

    files: Mapping[Path, Stamp]
    digest: str | None


def digest(tensors: Iterable[tuple[object, Tensor]], at_once: bool = True) -> str:
    """Of named tensors: every byte, with names, dtypes and shapes, however they lie; 32 hexadecimal digits.

    Args:
        at_once: all are in memory already; else they are taken one after the other.
    """
    with ThreadPoolExecutor() as pool:
        parts = b"".join((pool.map if at_once else map)(_digest, tensors))
    return blake2b(parts, digest_size=16).hexdigest()


def _digest(item: tuple[object, Tensor]) -> bytes:
    """Of one tensor; where it is no plain block of memory, a slice of it is copied at a time."""
    name, tensor = item
    made = sha256(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
    count = max(1, _SLICE // max(1, tensor[:1].numel()))
    for part in () if tensor.is_meta else tensor.detach().split(count):
        made.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return made.digest()


def digest_of(weights: Weights) -> str:
    """The `digest` of all weights, taken [out in], as files have them: what was read from one is not copied."""
    return digest(_as_stored(weights), at_once=weights.resident)


def _as_stored(weights: Weights) -> Iterator[tuple[object, Tensor]]:
    for block, leaf in weight_sites(weights.dims):
        weight = weights.read(block, leaf.name)
        yield (block, leaf.name), weight if weight.ndim == 1 or leaf.name == "W_E" else weight.mT


_SLICE = 2**22
"""Numbers of a tensor that are hashed at a time."""


def writes_into(tensor: Tensor) -> int:
    """How often somebody has written into a tensor, as torch counts; of inference tensors it doesn't."""
    return 0 if tensor.is_inference() else tensor._version


class Copied(NamedTuple):
    """What a weight was copied from.

    Attributes:
        name: its name in the model that holds it.
        counter: shares its count of writes, and none of its numbers.
        before: that count when the copy was made.
    """

    name: str
    counter: Tensor
    before: int

    @classmethod
    def of(cls, name: str, original: Tensor) -> Copied:
        """To be noted when the copy is made."""
        counter = original.detach()
        if not original.is_inference():
            counter.data = counter.new_empty(0)  # so that the numbers go when the model goes
        return cls(name, counter, writes_into(counter))

    def check(self, name: str) -> None:
        """Refuse a copy of what has changed: the weights that are shared have changed with it, and this one hasn't.

        Raises:
            BadCheckpoint: somebody has written into the original since.
        """
        if writes_into(self.counter) != self.before:
            raise BadCheckpoint(
                f"the model's {self.name} has been written into since {name} was copied from it, so this model is of"
                " two minds: wrap it anew, HookedModel.from_hf(model)."
            )


class InMemory:
    """Weights that are all in memory, as the card shows them ([in out], views of what is stored where that can be).

    Args:
        dims: the model's sizes.
        tensors: (block, name) → tensor; block None for the model around the blocks.
        notes: what a reader of this model's numbers must know.
        origin: the files that they were read from.
        copied: what those were copied from that are no views of somebody's tensors, as the others are.

    Raises:
        BadCheckpoint: a weight is missing, unknown, or of another shape than ``dims`` say.
    """

    resident = True

    def __init__(
        self,
        dims: Dims,
        tensors: Mapping[tuple[int | None, str], Tensor],
        notes: tuple[str, ...] = (),
        origin: Origin | None = None,
        copied: Mapping[tuple[int | None, str], Copied] | None = None,
    ) -> None:
        self.dims, self.notes, self.origin = dims, notes, origin
        self.tensors, self.copied = dict(tensors), dict(copied or {})
        expected = {(block, leaf.name): weight_shape(leaf, dims) for block, leaf in weight_sites(dims)}
        for key, shape in expected.items():
            if key not in self.tensors:
                raise BadCheckpoint(f"{place_of(*key)} is missing.")
            if tuple(self.tensors[key].shape) != shape:
                raise BadCheckpoint(
                    f"{place_of(*key)} should be {list(shape)}, and is {list(self.tensors[key].shape)}."
                )
        if unknown := [key for key in self.tensors if key not in expected]:
            raise BadCheckpoint(f"{place_of(*unknown[0])} is no weight of this model.")
        if dims.tied:
            self.tensors[None, "W_U"] = self.tensors[None, "W_E"].T

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        """One weight of one block; ``experts`` selects rows of its e axis.

        Raises:
            Missing: the model has no such weight.
            BadCheckpoint: it was copied, and what it was copied from has been written into since.
        """
        tensor = self.tensors.get((block, name))
        if tensor is None:
            raise Missing(f"{place_of(block, name)} is no weight of this model.")
        if (block, name) in self.copied:
            self.copied[block, name].check(name)
        return tensor if experts is None else tensor[list(experts)]

    @property
    def version(self) -> int:
        """Grows whenever somebody writes into a weight, or into what it was copied from."""
        written = [*self.tensors.values(), *(original.counter for original in self.copied.values())]
        return sum(map(writes_into, written))

    def digest(self) -> str:
        """See `digest_of`."""
        return digest_of(self)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> InMemory:
        """The same weights, cast or moved. Router weight and correction bias stay fp32 under every cast. Where nothing
        changes they are shared, else every one is a copy: none is half of each.

        Raises:
            BadCheckpoint: as `read`.
        """
        own = self._own()
        dtypes = {key: torch.float32 if key[1] in FP32 else dtype or tensor.dtype for key, tensor in own.items()}
        place = None if device is None else torch.device(device)
        if all(t.dtype == dtypes[key] and place in (None, t.device) for key, t in own.items()):
            return InMemory(self.dims, own, self.notes, self.origin, self.copied)
        made = {key: t.to(device=device, dtype=dtypes[key], copy=True) for key, t in own.items()}
        return InMemory(self.dims, made, self.notes)

    def _own(self) -> dict[tuple[int | None, str], Tensor]:
        """All but a tied head, which is the embedding."""
        for (_, name), original in self.copied.items():
            original.check(name)
        return {key: t for key, t in self.tensors.items() if not (self.dims.tied and key == (None, "W_U"))}

    def __reduce__(self) -> tuple[type[InMemory], tuple[object, ...]]:
        """Copied and pickled without a tied head, which is tied anew."""
        return type(self), (self.dims, self._own(), self.notes, self.origin)


def place_of(block: int | None, name: str) -> str:
    """A weight as errors name it."""
    return f"weight {name}" + ("" if block is None else f" of block {block}")


def random_weights(
    dims: Dims, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> InMemory:
    """Weights drawn from a seed, wide enough that softmax, routing and norms do real work.

    Matrices N(0, 1/fan-in), gains 1 ± 0.2, correction bias N(0, 0.3²): libraries' own initialisation (std 0.02, unit
    gains, no bias) leaves rotation, routing and norms nearly inert, and hides mistakes. Drawn in fp32 on the CPU, so
    that a seed means the same numbers on every device.
    """
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    return InMemory(
        dims,
        {
            (block, leaf.name): _drawn(leaf, weight_shape(leaf, dims), dims, generator).to(
                device=device, dtype=torch.float32 if leaf.name in FP32 else dtype
            )
            for block, leaf in weight_sites(dims)
        },
    )


def _drawn(leaf: Leaf, shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """A weight, or one expert's part of it. In place: a big one is in memory once."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    if leaf.name == "b":
        return drawn.mul_(0.3)
    if len(shape) == 1:
        return drawn.mul_(0.2).add_(1.0)
    if leaf.name == "W_E":
        return drawn.div_(dims.d**0.5).mul_(8)  # a residual stream of rms above its updates' by little
    return drawn.div_(shape[-2] ** 0.5)


class Drawn:
    """Random weights that are drawn when they are read: a model of any size, without its memory.

    They spread as those of `random_weights` do, but each has a seed of its own, made of ``seed``, its block, its name
    and, of a routed weight, the expert. So its numbers are the same in whatever order, company or size of model it is
    read, and one expert is drawn without the others.
    """

    resident = False

    def __init__(
        self,
        dims: Dims,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_seed(seed)
        self.dims, self.seed, self.dtype, self.device = dims, seed, dtype, device
        self._leaves = {(block, leaf.name): leaf for block, leaf in weight_sites(dims)}

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        """One weight of one block; ``experts`` selects rows of its e axis.

        Raises:
            Missing: the model has no such weight.
            OutOfRange: it has no such expert.
        """
        if (block, name) == (None, "W_U") and self.dims.tied:
            return self.read(None, "W_E").T
        leaf = self._leaves.get((block, name))
        if leaf is None:
            raise Missing(f"{place_of(block, name)} is no weight of this model.")
        if not leaf.routed:
            return self._one(block, leaf)
        chosen = range(self.dims.e) if experts is None else experts
        if beyond := [e for e in chosen if not 0 <= e < self.dims.e]:
            raise OutOfRange(f"{place_of(block, name)}: there is no expert {beyond[0]} of {self.dims.e}.")
        made = torch.empty((len(chosen), *weight_shape(leaf, self.dims)[1:]), dtype=self.dtype, device=self.device)
        for expert, place in zip(chosen, made, strict=True):
            place.copy_(self._one(block, leaf, expert))
        return made

    def _one(self, block: int | None, leaf: Leaf, expert: int | None = None) -> Tensor:
        shape = weight_shape(leaf, self.dims)[1 if leaf.routed else 0 :]
        place = f"{self.seed} {block} {leaf.name} {expert}".encode()
        seed = int.from_bytes(blake2b(place, digest_size=4).digest(), "little")  # torch's generator takes 32 bits of it
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.float32 if leaf.name in FP32 else self.dtype
        return _drawn(leaf, shape, self.dims, generator).to(device=self.device, dtype=dtype)
