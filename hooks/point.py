"""A hook point that knows its tensor, and guards it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor
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


class Clock:
    """Which step of decoding the model is in: 0 the prompt (and any plain run), 1 the first new token read, …"""

    step = 0


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
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks)

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
