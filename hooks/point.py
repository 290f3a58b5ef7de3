"""A hook point that knows its tensor, and guards it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from threading import Thread, current_thread, local
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

from probe.card import Leaf, Step, plain
from probe.errors import BadEdit, ShapeMismatch
from probe.numerics import forbidden
from probe.sites import Site

Hook = Callable[..., Tensor | None]
"""``f(value, hook)``: sees a clone; returns the tensor to go on with, or None to leave the value as it was."""

_TORCHS_OWN = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Where a module keeps hooks that were put on it by torch's own ``register_forward_hook``."""


class Clock(local):
    """Which step of decoding a thread's run is in: 0 the prompt (and any plain run), 1 the first new token read, …"""

    step = 0

    def __reduce__(self) -> tuple[type[Clock], tuple[()]]:
        """Copied and pickled as one that nobody has looked at."""
        return Clock, ()


class Owned:
    """A hook as torch keeps it, with the thread that put it on."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self.thread = hook, current_thread()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook itself returns."""
        return self.hook(*args, **kwargs)


def _owned(register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
    """One of torch's ways to put a hook on a module: the hook is owned before it is on."""

    @wraps(register)
    def through(self: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> RemovableHandle:
        return register(self, Owned(hook), *args, **kwargs)

    return through


class Point(HookPoint):
    """A `HookPoint` that knows its tensor. A hook gets a clone, so that an in-place write cannot reach the tensor's
    ancestors (Q_C is a view of q_C); what it returns must fit the tensor's place on the card. A backward hook gets the
    gradient instead."""

    def __init__(self, site: Site, node: Step | Leaf, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.site, self.node, self.clock = site, node, clock

    @property
    def step(self) -> int:
        """The step of decoding that the hook is called in; see `Clock`."""
        return self.clock.step

    register_forward_hook = _owned(nn.Module.register_forward_hook)
    register_forward_pre_hook = _owned(nn.Module.register_forward_pre_hook)
    register_full_backward_hook = _owned(nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _owned(nn.Module.register_full_backward_pre_hook)
    register_backward_hook = _owned(nn.Module.register_backward_hook)

    def add_hook(self, hook: Hook, dir: Literal["fwd", "bwd"] = "fwd", *args: Any, **kwargs: Any) -> Any:
        """Add a hook, as TransformerLens does, but guarded.

        Raises:
            BadEdit: a backward hook where no gradient arrives: it would never fire.
        """
        if dir == "bwd" and (self.node.dtype == "int64" or (isinstance(self.node, Step) and self.node.read_only)):
            raise BadEdit(f"{self.site} has no gradient, so a backward hook would never fire there.")
        handle = super().add_hook(self._guarded(hook), dir, *args, **kwargs)
        handle.user_hook = hook
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Point:
        """Its own point, with the same hooks, which are called with the copy."""
        made = Point(self.site, self.node, copy.deepcopy(self.clock, memo))
        memo[id(self)] = made
        made.name, made.ctx, made.training = self.name, copy.deepcopy(self.ctx, memo), self.training
        added = {handle.hook.id for handle in (*self.fwd_hooks, *self.bwd_hooks)}
        for kind in _TORCHS_OWN:
            getattr(made, kind).update({i: hook for i, hook in getattr(self, kind).items() if i not in added})
        for handle in self.fwd_hooks:
            made.add_hook(cast(Hook, handle.user_hook), "fwd", handle.is_permanent, handle.context_level)
        for handle in self.bwd_hooks:
            made.add_hook(cast(Hook, handle.user_hook), "bwd", handle.is_permanent, handle.context_level)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For pickling.

        Raises:
            BadEdit: there are hooks on: functions are not values.
        """
        if self.active:
            raise BadEdit(f"{self.site} has hooks on, and hooks cannot be pickled; reset_hooks() first.")
        return self.__dict__

    @property
    def active(self) -> bool:
        """Whether it has hooks, torch's own (``register_forward_hook``) among them."""
        return any(self._by_id())

    def _by_id(self) -> tuple[dict[int, Owned], ...]:
        """Where torch keeps them, by the number that each gets, which only grows."""
        kinds = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        return cast(tuple[dict[int, Owned], ...], kinds)

    def check_thread(self) -> None:
        """Refuse to call hooks that another thread has put on: whose run they are for, nobody knows.

        Raises:
            BadEdit: there are such; the message names the thread and what to do.
        """
        for owned in [owned for kind in self._by_id() for owned in list(kind.values())]:
            if owned.thread is not current_thread():
                raise BadEdit(
                    f"{self.site} has a hook of another thread on ({owned.thread.name}), which would act in this run."
                    " Give each thread a model of its own on the same weights, HookedModel(model.decoder.weights,"
                    " model.tokenizer, model.decoder.numerics); or put hooks on in the thread that runs;"
                    " model.reset_hooks() takes off all."
                )

    def take_off(self, ids: range, thread: Thread) -> None:
        """Remove this thread's hooks of these numbers, however far they have been put on."""
        for kind in self._by_id():
            for id in [i for i, owned in list(kind.items()) if i in ids and owned.thread is thread]:
                kind.pop(id, None)
        for handles in (self.fwd_hooks, self.bwd_hooks):
            for handle in [handle for handle in handles if handle.hook.id in ids and not self._is_on(handle.hook.id)]:
                handles.remove(handle)

    def _is_on(self, id: int) -> bool:
        return any(id in kind for kind in self._by_id())

    def clear_context(self) -> None:
        """TransformerLens' own, which between its two steps has none."""
        self.ctx = {}

    def _guarded(self, hook: Hook) -> Hook:
        def guarded(value: Tensor, hook: Any, user: Hook = hook) -> Tensor | None:
            copied = value.clone()
            made = user(copied, hook=hook)
            if made is None:
                say_if_lost(user, copied, str(self.site))
                return None
            self.check(made, value)
            if self.node.name == "S":  # what is hidden stays hidden: a hook can't let a query see the future
                made = torch.where(value < forbidden(value.dtype) / 2, value, made)
            return made

        return guarded

    def check(self, made: Any, value: Tensor) -> None:
        """What a hook returned must have the tensor's shape, dtype and device.

        Raises:
            ShapeMismatch: it has not; the message names the tensor and what was expected.
            BadEdit: the tensor is only a reading.
        """
        if reason := getattr(self.node, "read_only", ""):
            raise BadEdit(f"{self.site} cannot be edited: {reason}.")
        what = f"{self.site} = {plain(getattr(self.node, 'formula', self.node.symbol))}"
        dims = " ".join(self.node.shape)
        if not isinstance(made, Tensor):
            raise ShapeMismatch(f"{what} is a tensor [{dims}]; the hook returned {type(made).__name__}.")
        if made.shape != value.shape:
            raise ShapeMismatch(
                f"{what} should be [{dims}] = {list(value.shape)}; the hook returned {list(made.shape)}."
            )
        if made.dtype != value.dtype or made.device != value.device:
            raise ShapeMismatch(
                f"{what} should be {value.dtype} on {value.device}; the hook returned {made.dtype} on {made.device}."
            )


class Together:
    """Hooks that a thread puts on in one go, and takes off together.

    Torch numbers hooks in the order in which they come, whatever they are on. So these are known from the moment they
    are on, and Ctrl-C can't come before anybody has noted them.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.thread, self.first = current_thread(), RemovableHandle.next_id
        self.last: int | None = None

    def put_on(self, wanted: Iterable[tuple[Point, Hook]], dir: Literal["fwd", "bwd"], **kwargs: Any) -> None:
        """Add hooks, as `Point.add_hook` does."""
        for point, hook in wanted:
            self.points.append(point)
            point.add_hook(hook, dir=dir, **kwargs)

    def complete(self) -> None:
        """All are on: what the thread puts on from now on is not of these."""
        self.last = RemovableHandle.next_id

    def take_off(self) -> None:
        """Remove them, as far as they are on; where that was interrupted, do it again."""
        ids = range(self.first, RemovableHandle.next_id if self.last is None else self.last)
        for point in self.points:
            point.take_off(ids, self.thread)


def say_if_lost(f: Any, copied: Tensor, where: str) -> None:
    """Warn, at the user's own line, of a function that wrote into its copy and returned nothing: the value stands."""
    if torch.compiler.is_compiling() or copied.is_inference() or not copied._version:
        return
    code = getattr(f, "__code__", None)
    warnings.warn_explicit(
        f"{getattr(f, '__name__', 'a hook')} wrote into its copy of {where} and returned None, so nothing has changed:"
        " return the tensor.",
        UserWarning,
        code.co_filename if code else "<hook>",
        code.co_firstlineno if code else 1,
        getattr(f, "__module__", None),
    )


def reciprocal(hook: Hook) -> Hook:
    """A hook on TransformerLens' rms, at our 1/rms: it sees and returns the reciprocal."""

    def through(value: Tensor, hook: Any, user: Hook = hook) -> Tensor | None:
        made = user(value.reciprocal(), hook=hook)
        return None if made is None else made.reciprocal()

    return through
