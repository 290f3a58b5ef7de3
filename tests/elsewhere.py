"""Another device without having one: tensors with real numbers that say they lie on it, and refuse to meet the CPU's.

Inside `elsewhere()` a tensor made on, or moved to, ``meta`` holds its numbers and keeps its device, so that a whole run
or sweep goes through as on a GPU; an operation that is given tensors of both devices raises, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")

BETWEEN = ("aten::copy_", "aten::_to_copy")
"""Operations that go from one device to the other."""

INDEXED = ("aten::index.", "aten::index_put", "aten::_index_put_impl_")
"""Operations whose indices may lie on the CPU."""

SCALAR = ("aten::index_put", "aten::_index_put_impl_", "aten::masked_fill", "aten::fill_")
"""Operations that take a number from the CPU, beside those that go element by element."""


class Elsewhere(Tensor):
    """Numbers on the other device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        """Its numbers, which C++ would read past the dispatcher."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees what no tensor of the other device is an argument of: what is made there, or moved there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


class _Lists(TorchFunctionMode):
    """Numbers and lists become tensors, in ``torch.tensor`` and as an index, by no dispatcher: here the CPU's first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(i, dtype=None if i else torch.long) if isinstance(i, list) else i for i in index)
            args = (args[0], index, *args[2:])
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Where ``meta`` is a device with numbers."""
    with _Lists(), _Mode():
        yield


def _carried_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the numbers held, its results where its arguments are."""
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = [x for x in given if isinstance(x, Elsewhere)]
    assert all(isinstance(x, Elsewhere) or x.device != DEVICE for x in given), (
        f"{func} is given a tensor without numbers"
    )
    _check_one_device(func, args, given, there)
    asked = kwargs.get("device")
    away = bool(there) if asked is None else torch.device(asked) == DEVICE
    if func.name().startswith("aten::copy_"):
        away = isinstance(args[0], Elsewhere)
    if away and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func.name()} is given the CPU's generator.")
    if asked is not None and away:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held_args, held_kwargs = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
    made = func(*held_args, **held_kwargs)
    if func.name().startswith("aten::copy_") or (there and func._schema.is_mutable and "out" not in kwargs):
        return args[0] if made is held_args[0] else _wrapped(made) if away else made
    return tree_map(_wrapped, made) if away else made


def _wrapped(x: Any) -> Any:
    return Elsewhere(x) if isinstance(x, Tensor) and not isinstance(x, Elsewhere) else x


def _check_one_device(func: Any, args: Any, given: list[Tensor], there: list[Tensor]) -> None:
    """Scalars go into what is element by element, indices may be the CPU's; copies go between."""
    name = func.name()
    if not there or name.startswith(BETWEEN):
        return
    scalars = torch.Tag.pointwise in func.tags or name.startswith(SCALAR)
    written = func._schema.is_mutable and args and isinstance(args[0], Tensor)
    here = [x for x in given if not isinstance(x, Elsewhere) and (x.ndim or not scalars or (written and x is args[0]))]
    if name.startswith(INDEXED) and isinstance(args[0], Elsewhere):
        indices = {id(x) for x in args[1] if x is not None}
        here = [x for x in here if id(x) not in indices]
    if here:
        raise RuntimeError(f"{name} is given tensors of two devices, {[list(x.shape) for x in here]} of the CPU's.")
