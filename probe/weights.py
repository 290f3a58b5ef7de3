"""Weights in memory: where each comes from in a checkpoint, and random ones wide enough to do real work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from probe.card import Leaf
from probe.dims import Dims
from probe.errors import BadCheckpoint, Missing
from probe.leaves import FP32
from probe.sites import Sites


def weight_shape(leaf: Leaf, dims: Dims) -> tuple[int, ...]:
    """The sizes of a weight as the card shows it, [in out]. Without a query latent, W_UQ and W_QR read d inputs."""
    return tuple(dims.d if axis == "r_q" and dims.r_q is None else dims.size(axis) for axis in leaf.shape)


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


class InMemory:
    """Weights that are all in memory, as the card shows them ([in out], views of what is stored where that can be).

    Args:
        dims: the model's sizes.
        tensors: (block, name) → tensor; block None for the model around the blocks.

    Raises:
        BadCheckpoint: a weight is missing, unknown, or of another shape than ``dims`` say.
    """

    resident = True

    def __init__(self, dims: Dims, tensors: Mapping[tuple[int | None, str], Tensor]) -> None:
        self.dims = dims
        self.tensors = dict(tensors)
        expected = {(block, leaf.name): weight_shape(leaf, dims) for block, leaf in weight_sites(dims)}
        for key, shape in expected.items():
            if key not in self.tensors:
                raise BadCheckpoint(f"{_where(key)} is missing.")
            if tuple(self.tensors[key].shape) != shape:
                raise BadCheckpoint(f"{_where(key)} should be {list(shape)}, and is {list(self.tensors[key].shape)}.")
        if unknown := [key for key in self.tensors if key not in expected]:
            raise BadCheckpoint(f"{_where(unknown[0])} is no weight of this model.")
        if dims.tied:
            self.tensors[None, "W_U"] = self.tensors[None, "W_E"].T

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        """One weight of one block; ``experts`` selects rows of its e axis."""
        tensor = self.tensors.get((block, name))
        if tensor is None:
            raise Missing(f"{_where((block, name))} is no weight of this model.")
        return tensor if experts is None else tensor[list(experts)]

    @property
    def version(self) -> int:
        """Grows whenever somebody writes into a weight."""
        return sum(0 if tensor.is_inference() else tensor._version for tensor in self.tensors.values())

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> InMemory:
        """The same weights, cast or moved. Router weight and correction bias stay fp32 under every cast."""
        return InMemory(
            self.dims,
            {k: t.to(device=device, dtype=torch.float32 if k[1] in FP32 else dtype) for k, t in self._own().items()},
        )

    def _own(self) -> dict[tuple[int | None, str], Tensor]:
        """All but a tied head, which is the embedding."""
        return {key: t for key, t in self.tensors.items() if not (self.dims.tied and key == (None, "W_U"))}

    def __reduce__(self) -> tuple[type[InMemory], tuple[Dims, dict[tuple[int | None, str], Tensor]]]:
        """Copied and pickled without a tied head, which is tied anew."""
        return type(self), (self.dims, self._own())


def _where(key: tuple[int | None, str]) -> str:
    block, name = key
    return f"weight {name}" + ("" if block is None else f" of block {block}")


def random_weights(
    dims: Dims, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> InMemory:
    """Weights drawn from a seed, wide enough that softmax, routing and norms do real work.

    Matrices N(0, 1/fan-in), gains 1 ± 0.2, correction bias N(0, 0.3²): libraries' own initialisation (std 0.02, unit
    gains, no bias) leaves rotation, routing and norms nearly inert, and hides mistakes. Drawn in fp32 on the CPU, so
    that a seed means the same numbers on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[tuple[int | None, str], Tensor] = {}
    for block, leaf in weight_sites(dims):
        shape = weight_shape(leaf, dims)
        drawn = torch.randn(shape, generator=generator)
        if leaf.name == "b":
            drawn = 0.3 * drawn
        elif len(shape) == 1:
            drawn = 1.0 + 0.2 * drawn
        elif leaf.name == "W_E":
            drawn = drawn / dims.d**0.5 * 8  # a residual stream of rms above its updates' by little
        else:
            drawn = drawn / shape[-2] ** 0.5
        tensors[block, leaf.name] = drawn.to(device=device, dtype=torch.float32 if leaf.name in FP32 else dtype)
    return InMemory(dims, tensors)
