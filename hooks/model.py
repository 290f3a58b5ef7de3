"""The hooked model: one real `HookPoint` for every named tensor of every block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule

from hooks.cache import Cache, Names, select
from hooks.edits import Edit
from hooks.estimate import check_fits
from hooks.generate import Generation, When, generate
from hooks.gradients import Score, run_with_gradients
from hooks.keep import Keep, Keeper, Reduce
from hooks.lens import LensCache, LensConfig, activation_cache, lens_config
from hooks.point import Clock, Hook, Point, Together, reciprocal
from hooks.run import Run, run, run_block
from hooks.sources import Source
from hooks.where import Index, Rows, Spans
from probe import TINY, Decoder, Dims, Tokenizer, Weights, load
from probe.engine import Numerics
from probe.errors import BadCheckpoint, BadEdit, BadText, ProbeError, UnknownTensor
from probe.from_state import from_state
from probe.headers import expanded
from probe.memory import Keeping
from probe.sites import Site, Sites
from probe.text import Batch

P = ParamSpec("P")
R = TypeVar("R")


def eagerly(fn: Callable[P, R]) -> Callable[P, R]:
    """Run without `torch.compile`, whatever compiles the caller: compiled code may skip hooks that are added later,
    without a word. So a compiled model is as fast as it was."""
    uncompiled: list[Callable[P, R]] = []

    @wraps(fn)
    def through(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and loading it takes a second
            return fn(*args, **kwargs)
        if not uncompiled:
            uncompiled.append(torch.compiler.disable(fn))
        return uncompiled[0](*args, **kwargs)

    return through


class Block(nn.Module):
    """The hook points of one block."""

    @property
    def attn(self) -> NoReturn:
        """Refused: there are no modules in a block.

        Raises:
            BadEdit: always; the message says where weights, hooks and direct paths are.
        """
        raise BadEdit(
            "a block here has hook points and no modules. Its weights: model.decoder.weights.read(3, 'W_O'); its hooks:"
            " blocks.3.attn.hook_z. TransformerLens' direct paths need a copy of the stream for each head: edit x_n"
            " with into=('s_attn', 'n_attn'), or x_attn with into='c_Q', which reach all heads of a block."
        )

    mlp = attn


class HookedModel(HookedRootModule):
    """A model of K2's architecture with a hook on every named tensor.

    Hooks are called ``blocks.3.hook_c_KV`` (and ``hook_x_0``, ``hook_s_final`` … around the blocks); every spelling of
    the card names them: ``blocks.3.c^KV``, ``blocks.3.attn.hook_v``, ``model.layers.3.mlp.down_proj``.

    Args:
        weights: where weights come from; see `probe.load`, `probe.random_weights`.
        tokenizer: for running text; without one, tokens are needed.
        numerics: see `probe.engine.Numerics`.
    """

    def __init__(self, weights: Weights, tokenizer: Tokenizer | None = None, numerics: Numerics = "reference") -> None:
        super().__init__()
        self.decoder = Decoder(weights, numerics)
        self.tokenizer = tokenizer
        self.sites: Sites = self.decoder.sites
        self.blocks = nn.ModuleList(Block() for _ in range(self.decoder.blocks))
        self.clock = Clock()
        self._open: set[object] = set()
        """One for each `hooks()` whose block lasts."""
        self._points: dict[Site, Point] = {}
        for site in self.sites:
            point = Point(site, self.sites.node(site), self.clock)
            parent = self if site.block is None else self.blocks[site.block]
            parent.add_module(f"hook_{site.tensor}", point)
            self._points[site] = point
        self.setup()
        self.eval()

    @classmethod
    def load(
        cls,
        directory: str | Path = TINY,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        keep: Keeping = "expanded",
        numerics: Numerics | None = None,
    ) -> HookedModel:
        """A checkpoint directory, with its tokenizer where it has one. The default is the tiny model that ships with
        the package.

        Args:
            dtype: of weights and activations; None: as stored, FP8 and INT4 as bf16; of the tiny model, fp32.
            keep: how weights are kept, "expanded", "stored" or "disk": see `probe.load` and, before, `probe.memory`.
            numerics: see `probe.engine.Numerics`; None: ``careful`` below fp32, where rounding would flip experts.

        Raises:
            BadConfig, BadCheckpoint, TooLarge: as `probe.load`.
            BadText: the tokenizer cannot be read.
        """
        tokenizer = Tokenizer.find(directory)  # first: it is small
        if dtype is None and expanded(directory).resolve() == TINY.resolve():
            dtype = torch.float32
        model = cls(load(directory, dtype, device, keep=keep), tokenizer)
        low = model.decoder.weights.read(None, "w_final").dtype != torch.float32
        model.decoder.numerics = numerics or ("careful" if low else "reference")
        return model

    @classmethod
    def from_hf(cls, model: Any, tokenizer: Any = None) -> HookedModel:
        """A model that transformers has loaded (``DeepseekV3ForCausalLM``, or another class whose config we read), on
        the same weights.

        Only ``W_UQ``, ``W_QR``, ``W_UK`` and ``W_UV`` are copied, and router weight and correction bias where they are
        not fp32 (a cast of the whole model has rounded them; here they are cast back). A change of the model's other
        tensors in place acts here at once; after one of what was copied the next run is refused: wrap the model anew.
        Writes through ``.data``, as ``model.to`` makes them, are not seen: see `probe.from_state`. Its logits are those
        of attention ``eager`` and experts ``grouped_mm``, whatever the model itself runs. Gradients do not reach the
        model's parameters, and hooks on its modules are not called.

        Args:
            tokenizer: a fast tokenizer of transformers, or one of ours; None: tokens are needed.

        Raises:
            BadConfig: its config is of another block.
            BadCheckpoint: see `probe.from_state`.
            BadText: the tokenizer is a slow one.
        """
        config = getattr(model, "config", None)
        if config is None or not hasattr(model, "state_dict"):
            raise BadCheckpoint(f"{type(model).__name__} is no model of transformers: it has no config or no weights.")
        read = config if isinstance(config, Mapping) else config.to_dict()
        weights = from_state(model.state_dict(), Dims.from_config(read))
        return cls(weights, None if tokenizer is None else Tokenizer.of(tokenizer))

    def reaching(self, beyond: bool = True) -> HookedModel:
        """The same model, hooks and all, whose every run may go beyond ``max_position_embeddings``; itself, if not
        ``beyond``. Nobody has trained it there: what comes out says how it extrapolates.
        """
        if not beyond or self.decoder.beyond:
            return self
        made = copy(self)
        made.decoder = copy(self.decoder)
        made.decoder.beyond = True
        return made

    @property
    def dims(self) -> Dims:
        """The model's sizes."""
        return self.decoder.dims

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its numbers must know of its weights; see `probe.Checkpoint`."""
        return tuple(getattr(self.decoder.weights, "notes", ()))

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.decoder.weights.read(None, "w_final").device

    @property
    def cfg(self) -> LensConfig:
        """The model's sizes under TransformerLens' names, for its functions."""
        return lens_config(self.decoder.weights)

    @property
    def ln_final(self) -> NoReturn:
        """Refused: TransformerLens' cache would take it for a module.

        Raises:
            BadEdit: always; the message says what to make its cache with.
        """
        raise BadEdit(
            "the final norm is no module here (its tensors: s_final, n_final, x_final); for TransformerLens' own cache"
            " take model.activation_cache(cache), whose `model` has it."
        )

    def activation_cache(self, cache: Cache | Run) -> LensCache:
        """A cache of this model, or a run, as TransformerLens' `ActivationCache`; see `hooks.lens`.

        Raises:
            BadEdit: it is another model's.
        """
        return activation_cache(cache.cache, self.decoder, self.tokenizer)

    # ---- running -----------------------------------------------------------------------------------------------

    def batch(self, texts: str | Sequence[str]) -> Batch:
        """Texts as one right-padded batch of tokens, on the model's device.

        Raises:
            BadText: there is no tokenizer, or it does not know a word.
        """
        if self.tokenizer is None:
            raise BadText("this model has no tokenizer; give token ids.")
        tokens, keep = self.tokenizer.batch([texts] if isinstance(texts, str) else texts)
        return Batch(tokens.to(self.device), None if keep is None else keep.to(self.device))

    @eagerly
    def forward(
        self,
        tokens: Tensor | str | Sequence[str],
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        beyond: bool = False,
    ) -> Tensor:
        """The logits, [B T V], with whatever hooks are on. Gradients flow where torch records them.

        Args:
            tokens: [B, T] token ids, or text.
            keep: [B, T], true where a token is real. Texts bring their own.
            positions, segments: [B, T], position ids, and the texts that rows pack; see `hooks.run.run`.
            beyond: whether texts may be longer than ``max_position_embeddings``; see `reaching`.
        """
        return self.reaching(beyond)._run(*self._batch(tokens, keep), positions, segments)

    @eagerly
    def run_with_cache(  # type: ignore[override]  # TransformerLens' takes any argument, and swallows those it does not know
        self,
        tokens: Tensor | str | Sequence[str],
        keep: Tensor | None = None,
        *,
        names_filter: Names = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pos: Index | None = None,
        reduce: Reduce | None = None,
        spans: Sequence[Spans] | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        grads: Score | None = None,
        budget: int | None = None,
        beyond: bool = False,
    ) -> tuple[Tensor, Cache]:
        """The logits and a cache of every tensor, or of those named. What is cached has no graph.

        Args:
            names_filter: a spelling or a glob (``blocks.*.c_KV``), several, or a function of the hook's name; None: all
                but ``delta_heads``, which is large and made only on request; with ``reduce``, nothing else.
            device, dtype: where cached tensors go, and what floats are cast to.
            pos: positions to keep, as an edit's ``T``; the whole is not held. See `hooks.keep.Keep`.
            reduce: names → reductions (`hooks.reduce`), or functions of the value; found under ``cache.reduced``.
            spans: each row's named spans, for ``pos`` and means over roles.
            positions, segments: [B, T], position ids, and the texts that rows pack; see `hooks.run.run`.
            grads: a function from logits to one number. Its gradients at the same sites, kept likewise, are then
                ``cache.gradients``.
            budget: bytes that the run may take beside the weights; see `hooks.estimate`.
            beyond: whether texts may be longer than ``max_position_embeddings``; see `reaching`.

        Raises:
            UnknownTensor: a name or a glob names nothing, or nothing is selected.
            BadEdit, OutOfRange: positions, reductions or gradients that cannot mean what they say.
            TooLarge: it would not fit the budget.
        """
        model = self.reaching(beyond)
        tokens, keep = self._batch(tokens, keep)
        model.decoder.check_tokens(tokens, keep, positions=positions, segments=segments)
        rows = Rows.of(tokens, keep, spans, None, positions, segments)
        how = Keep(names_filter, device, dtype, pos, reduce)
        keeper = Keeper(self.sites, rows, tokens, how, in_chunks=grads is None)
        if budget is not None:
            check_fits(model, rows, how, budget, grads is not None)
        if grads is None:
            return model._run(tokens, keep, positions, segments, keeper), keeper.cache
        second = Keeper(self.sites, rows, tokens, how, in_chunks=False)
        keeper.cache.gradients = second.cache
        return run_with_gradients(model, tokens, keeper, second, grads), keeper.cache

    @eagerly
    def run(
        self,
        tokens: Tensor | str | Sequence[str],
        keep: Tensor | None = None,
        *,
        want: Names = ("logits",),
        edits: Sequence[Edit] | Edit = (),
        base: Run | None = None,
        spans: Sequence[Spans] | None = None,
        spoken: Sequence[int] | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pos: Index | None = None,
        reduce: Reduce | None = None,
        budget: int | None = None,
        beyond: bool = False,
    ) -> Run:
        """Run with edits, recomputing only what they reach from ``base``; see `hooks.run.run`, and `reaching` for
        ``beyond``."""
        return run(
            self.reaching(beyond),
            *self._batch(tokens, keep),
            want=want,
            edits=edits,
            base=base,
            spans=spans,
            spoken=spoken,
            positions=positions,
            segments=segments,
            device=device,
            dtype=dtype,
            pos=pos,
            reduce=reduce,
            budget=budget,
        )

    @eagerly
    def run_block(
        self,
        block: int,
        x_n: Tensor | Source,
        keep: Tensor | None = None,
        *,
        want: Names = "x_next",
        edits: Sequence[Edit] | Edit = (),
        base: Run | None = None,
        spans: Sequence[Spans] | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pos: Index | None = None,
        reduce: Reduce | None = None,
        beyond: bool = False,
    ) -> Run:
        """Run one block alone, on a residual stream from elsewhere; see `hooks.run.run_block`, and `reaching` for
        ``beyond``."""
        return run_block(
            self.reaching(beyond),
            block,
            x_n,
            keep,
            want=want,
            edits=edits,
            base=base,
            spans=spans,
            positions=positions,
            segments=segments,
            device=device,
            dtype=dtype,
            pos=pos,
            reduce=reduce,
        )

    @eagerly
    def generate(
        self,
        tokens: Tensor | str | Sequence[str],
        keep: Tensor | None = None,
        *,
        n: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Collection[int] = (),
        edits: Sequence[Edit] = (),
        spans: Sequence[Spans] | None = None,
        positions: Tensor | None = None,
        when: When = "both",
        beyond: bool = False,
    ) -> Generation:
        """Decode ``n`` tokens, greedily or sampled, with hooks and edits; see `hooks.generate.generate`, and `reaching`
        for ``beyond``."""
        tokens, keep = self._batch(tokens, keep)
        return generate(
            self.reaching(beyond),
            tokens,
            keep,
            n=n,
            temperature=temperature,
            seed=seed,
            stop=stop,
            edits=edits,
            spans=spans,
            positions=positions,
            when=when,
        )

    def _batch(self, tokens: Tensor | str | Sequence[str], keep: Tensor | None) -> Batch:
        if isinstance(tokens, Tensor):
            return Batch(tokens, keep)
        if keep is not None:
            raise BadText("texts bring their own mask; `keep` goes with token ids.")
        texts = [tokens] if isinstance(tokens, str) else tokens
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise BadText("a run takes token ids as a tensor [B T], a text, or a list of texts.")
        return self.batch(texts)

    def _run(
        self,
        tokens: Tensor,
        keep: Tensor | None,
        positions: Tensor | None,
        segments: Tensor | None,
        keeper: Keeper | None = None,
    ) -> Tensor:
        """The logits; all else passes through the hooks, and is shown to the keeper."""
        logits, watched = Site(None, "logits"), self.acting()

        def tap(site: Site, value: Tensor) -> Tensor:
            value = self.pass_in(0, site, value) if watched else value
            if keeper is not None:
                keeper.see(site, value, made=not watched and site != logits)  # the logits are the caller's
            return value

        made = self.decoder.run(
            tokens,
            keep,
            want=(logits,),
            positions=positions,
            segments=segments,
            edited=watched,
            tap=tap if watched or keeper else None,
            watched=keeper.watched if keeper else (),
            chunks=keeper.chunks if keeper else (),
            show=keeper.see_chunk if keeper else None,
        )[logits]
        if keeper is not None and made.requires_grad:
            keeper.cache.copy_made()  # the graph of the logits holds values that need no gradient themselves
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> HookedModel:
        """What `to`, `cuda`, `half` … come down to; a model of hooks alone would silently stay as it is."""
        raise ProbeError(
            "the weights are not this module's: cast or move them, HookedModel(weights.to(dtype, device))."
        )

    # ---- hooks -------------------------------------------------------------------------------------------------

    def watched(self) -> set[Site]:
        """The sites that have a hook now."""
        return {site for site, point in self._points.items() if point.active}

    def acting(self) -> set[Site]:
        """The sites whose hooks act in a run that this thread begins.

        Raises:
            BadEdit: another thread has hooks on.
        """
        acting = {site: point for site, point in self._points.items() if point.active}
        for point in acting.values():
            point.check_thread()
        return set(acting)

    def pass_through(self, site: Site, value: Tensor) -> Tensor:
        """A value through its hook point, if that has hooks.

        Raises:
            BadEdit: another thread has put one on meanwhile.
        """
        point = self._points[site]
        if not point.active:
            return value
        point.check_thread()
        return cast(Tensor, point(value))

    def pass_in(self, step: int, site: Site, value: Tensor) -> Tensor:
        """The same in a step of decoding; see `hooks.point.Clock`."""
        outer, self.clock.step = self.clock.step, step
        try:
            return self.pass_through(site, value)
        finally:
            self.clock.step = outer  # of the run whose hook has made this one

    def add_hook(  # type: ignore[override]
        self, name: Any, hook: Hook, dir: Literal["fwd", "bwd"] = "fwd", **kwargs: Any
    ) -> None:
        """Add a hook by any spelling, or by a function of hook names; it stays until `reset_hooks`.

        Raises:
            UnknownTensor: nothing is named.
            BadEdit: a backward hook where no gradient arrives. Then no hook has been added.
        """
        added = Together()
        try:
            added.put_on(self._named(name, hook, dir), dir, **kwargs)
        except BaseException:
            added.take_off()
            raise

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[Any, Hook]] = (),
        bwd_hooks: Sequence[tuple[Any, Hook]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedModel]:
        """Hooks for as long as the block lasts; others, that were on before or come in it, stay.

        Args:
            fwd_hooks, bwd_hooks: (name, hook), names as `add_hook` takes them.
            reset_hooks_end: whether they are taken off in the end.
            clear_contexts: whether all points' ``ctx`` are then emptied too.

        Raises:
            UnknownTensor, BadEdit: as `add_hook`.
        """
        added, this = Together(), object()

        def end() -> None:
            if reset_hooks_end or added.last is None:
                added.take_off()
            if reset_hooks_end and clear_contexts:
                self.clear_contexts()
            self.is_caching = self.is_caching and not reset_hooks_end
            self._open.discard(this)
            self.context_level = len(self._open)

        try:
            try:
                self._open.add(this)
                self.context_level = level = len(self._open)
                for name, hook in fwd_hooks:
                    added.put_on(self._named(name, hook, "fwd"), "fwd", level=level)
                for name, hook in bwd_hooks:
                    added.put_on(self._named(name, hook, "bwd"), "bwd", level=level)
                added.complete()
                yield self
            finally:
                end()
        finally:
            end()  # once more, as Ctrl-C may have ended the first

    def reset_hooks(self, *args: Any, **kwargs: Any) -> None:
        """TransformerLens' own; a Ctrl-C meanwhile arrives when it is done."""
        try:
            super().reset_hooks(*args, **kwargs)
        except KeyboardInterrupt:
            super().reset_hooks(*args, **kwargs)
            raise

    def add_caching_hooks(self, names_filter: Names = None, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """TransformerLens' own, with names in any spelling; keys are the hooks' names.

        Raises:
            UnknownTensor: nothing is named.
        """
        names, added = self._hook_names(names_filter), Together()
        added.points += [self._points[self.sites.find(name)] for name in names]
        try:
            return super().add_caching_hooks(names, *args, **kwargs)
        except BaseException:
            added.take_off()
            raise

    def get_caching_hooks(self, names_filter: Names = None, *args: Any, **kwargs: Any) -> Any:
        """TransformerLens' own, with names in any spelling; keys are the hooks' names.

        Raises:
            UnknownTensor: nothing is named.
        """
        return super().get_caching_hooks(self._hook_names(names_filter), *args, **kwargs)

    def _hook_names(self, names: Names) -> list[str]:
        return [site.hook for site in select(self.sites, names)]

    def _named(self, name: Any, hook: Hook, dir: str) -> list[tuple[Point, Hook]]:
        if dir not in ("fwd", "bwd"):
            raise BadEdit(f"a hook's direction is fwd or bwd, not {dir!r}.")
        if callable(name):
            found = [(point, hook) for site, point in self._points.items() if name(site.hook)]
            if not found:
                raise UnknownTensor("the function selects no hook at all; hooks are called like blocks.0.hook_c_KV.")
            return found
        site, inverse = self.sites.find_with_inverse(name)
        if inverse and dir == "bwd":
            raise BadEdit(f"the gradient at {name} is not the reciprocal of that at {site}; name {site}.")
        return [(self._points[site], reciprocal(hook) if inverse else hook)]
