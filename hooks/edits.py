"""Edits: frozen values that say what to change where. What each means is tested line by line.

``where`` speaks in the tensor's own dims: ``zero("Q_R", block=3, h=5, T=-1)``; `hooks.where` says how. An edit acts
on the value of the edited run, in the card's order, and at one site in the order given; it never touches what it was
given.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from hooks import draws
from hooks.point import say_if_lost
from hooks.where import FEATURE, Frozen, Index, Where, axis_of, shown, where_of
from probe.card import Step
from probe.errors import BadEdit, UnknownTensor, check_seed
from probe.numerics import forbidden
from probe.sites import Site, Sites

if TYPE_CHECKING:
    from hooks.apply import At
    from hooks.dictionary import Dictionary
    from hooks.sources import Source
    from probe.engine import Weights

PER_SLOT = ("gates", "g_e", "u_e", "a_e", "h_e", "y_e")
"""Slot tensors that exist only for chosen experts: values of two runs are matched by expert, never by slot."""

ROTATED = ("Q_R", "k_R", "Q", "K")
"""Tensors that hold their position's rotation."""

SCORES = ("S", "A")
"""Tensors over pairs of positions."""


class How(Protocol):
    """What an edit does to a value."""

    replaces: ClassVar[bool]
    """Whether the new value forgets the old one; two that do so at one place are refused."""

    def new(self, value: Tensor, at: At) -> Tensor:
        """The value that the edit puts wherever it acts; ``value`` stays as it is."""
        ...

    def sentence(self, what: str) -> str:
        """The edit in words."""
        ...


@dataclass(frozen=True)
class Edit:
    """One change at one site (a freeze: at many).

    Attributes:
        tensor: any spelling of the tensor; with ``block`` None, of the whole site (``blocks.3.c_KV``).
        where: which part, in the tensor's dims; empty: all real positions.
        how: what happens there.
        into: only these readers see the edited value; empty: all do.
        within: only the span of these rows changes (orthonormal); None: everything.
        through: a dictionary whose latents are edited (dim ``feature``), its error kept.
    """

    tensor: str
    block: int | None
    how: How
    where: Where = ()
    into: tuple[str, ...] = ()
    within: Frozen | None = None
    through: Dictionary | None = None

    @property
    def label(self) -> str:
        """The edit as a sentence: ``zero Q_R of block 3 at h=5, T=-1``."""
        what = self.tensor if self.block is None else f"{self.tensor} of block {self.block}"
        if self.through is not None:
            what = f"latents of {what}"
        if self.where:
            what += " at " + ", ".join(f"{dim}={shown(place)}" for dim, place in self.where)
        text = self.how.sentence(what)
        if self.into:
            text += " into " + ", ".join(self.into)
        if self.within is not None:
            text += f" within {self.within.tensor.shape[0]} directions"
        return text

    def __str__(self) -> str:
        return self.label

    def sites(self, sites: Sites, first: int = 0) -> tuple[Site, ...]:
        """Where it acts; checked. ``first`` is the first edited block, from which a freeze without a block holds.

        Raises:
            UnknownTensor, OutOfRange: no such tensor or block.
            BadEdit: the tensor cannot be edited so; the message says what to edit instead.
            UnknownDim: ``where`` names a dim that the tensor lacks.
        """
        found = self._frozen_sites(sites, first) if isinstance(self.how, Freeze) else (self._site(sites),)
        for site in found:
            self._check(sites, site)
        return found

    def _site(self, sites: Sites) -> Site:
        if self.block is not None:
            sites.card(self.block)
        spelling = self.tensor if self.block is None else f"blocks.{self.block}.{self.tensor}"
        site, inverse = sites.find_any(spelling)
        if inverse and not isinstance(self.how, Resample | Patch | Freeze):  # those commute with the reciprocal
            raise BadEdit(f"{spelling} is an rms; here is its reciprocal, {site}. Name that.")
        return site

    def _frozen_sites(self, sites: Sites, first: int) -> tuple[Site, ...]:
        """Every site that a freeze names: a pattern or a name, in one block or in all from the first edited one on."""
        pattern = any(c in self.tensor for c in "*?[")
        if not pattern and (self.block is not None or "." in self.tensor):
            return (self._site(sites),)
        found: list[Site] = []
        for block in [b for b in sites.blocks if b >= first] if self.block is None else [self.block]:
            card = sites.card(block)
            own = card.spellings().get(self.tensor)
            names = [n for n in card.hooked if fnmatchcase(n, self.tensor)] if pattern else [own] if own else []
            found += [Site(block, name) for name in names if name not in ("x_n", "delta_heads")]
        if self.block is None:
            found += [site for site in sites if site.block is None and fnmatchcase(site.tensor, self.tensor)]
        if not found:
            raise UnknownTensor(f"freeze({self.tensor!r}) names no tensor from block {first} on.")
        return tuple(found)

    def _check(self, sites: Sites, site: Site) -> None:
        node = sites.node(site)
        if reason := getattr(node, "read_only", ""):
            raise BadEdit(f"{site} cannot be edited: {reason}.")
        if node.dtype == "int64" and not isinstance(self.how, Set | Force | Patch | Freeze):
            raise BadEdit(
                f"{site} holds integers, so only set, force, patch and freeze act on it:"
                " zero `gates` to ablate, `exclude` to re-route."
            )
        if site.tensor == "experts" and {"e", "k"} & dict(self.where).keys():
            raise BadEdit(f"{self}: a token's experts are chosen together; name tokens (B, T), not e or k.")
        for dim, _ in self.where:
            if dim == FEATURE:
                if self.through is None:
                    raise BadEdit(f"{self}: the dim feature is a dictionary's; give through=.")
            elif not (dim == "e" and "k" in node.shape) and not (dim == "B" and isinstance(node, Step)):
                axis_of(node, dim)
        if isinstance(self.how, Zero) and self.how.renorm and site.tensor != "gates":
            raise BadEdit(f"{self}: renorm rescales a token's other gates; {site.tensor} has none.")
        if site.tensor in SCORES and (self.within or self.through or isinstance(self.how, Project)):
            raise BadEdit(
                f"{self}: the last axis of {site.tensor} is positions, not features; it has no subspaces, nor latents."
            )
        if self.into:
            self._check_into(sites, site)

    def _check_into(self, sites: Sites, site: Site) -> None:
        readers = [step.name for step in sites.card(site.block).readers(site.tensor)]
        if unknown := [name for name in self.into if name not in readers]:
            raise BadEdit(
                f"{unknown[0]} does not read {site} directly; its readers are"
                f" {', '.join(readers) or 'none in its block'}."
            )


# ---- what an edit does ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Zero:
    """Zero."""

    renorm: bool = False
    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        return torch.zeros_like(value)

    def sentence(self, what: str) -> str:
        return f"zero {what}" + (", the other gates rescaled" if self.renorm else "")


@dataclass(frozen=True)
class Mean:
    """The mean over a reference set, pads left out."""

    source: Source
    over: Literal["all", "position"] | None
    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        return at.mean_of(self.source, value, self.over)

    def sentence(self, what: str) -> str:
        over = {"all": " and their positions", "position": ", position by position", None: ""}[self.over]
        return f"mean of {what} over {self.source.rows.batch} reference prompts{over}"


@dataclass(frozen=True)
class Resample:
    """Values of other prompts at the same positions."""

    source: Source
    rows: tuple[int, ...] | None
    seed: int
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def new(self, value: Tensor, at: At) -> Tensor:
        if at.node.name in PER_SLOT:
            return at.random_slots(self.source, value, self.seed)
        return at.taken(self.source, value)

    def sentence(self, what: str) -> str:
        return f"resample {what} from {self.source.rows.batch} reference prompts"


@dataclass(frozen=True)
class Patch:
    """Values of a source run."""

    source: Source | Weights
    rows: tuple[int, ...] | None
    places: Where
    rotate: Literal["redo", "keep"] | None
    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        return at.taken(self.source, value)

    def sentence(self, what: str) -> str:
        return f"patch {what} from the source" + "".join(f"'s {dim}={shown(place)}" for dim, place in self.places)


@dataclass(frozen=True)
class Freeze:
    """The base's own values."""

    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        assert at.base is not None  # run() makes one for a freeze
        return at.taken(at.base, value)

    def sentence(self, what: str) -> str:
        return f"freeze {what} to the base"


@dataclass(frozen=True)
class Noise:
    """Gaussian noise."""

    std: float
    relative: bool
    seed: int
    replaces: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def new(self, value: Tensor, at: At) -> Tensor:
        drawn = draws.normal(at.bits(value, self.seed)).to(value.device)
        scale = self.std * at.spread(value) if self.relative else self.std
        return (value.float() + scale * drawn).to(value.dtype)

    def sentence(self, what: str) -> str:
        return f"add noise of std {self.std:g}{' × its spread' if self.relative else ''} to {what}"


@dataclass(frozen=True)
class Rounded:
    """Another rounding."""

    like: torch.dtype
    seed: int
    replaces: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def new(self, value: Tensor, at: At) -> Tensor:
        step = draws.below(at.bits(value, self.seed), 3).to(value.device) - 1
        _, exponent = torch.frexp(value.float())
        ulp = torch.finfo(self.like).eps * torch.exp2(exponent - 1.0)
        return (value.float() + step * ulp).to(value.dtype)

    def sentence(self, what: str) -> str:
        return f"round {what} otherwise (seed {self.seed})"


@dataclass(frozen=True)
class Add:
    """A direction, alpha times."""

    direction: Frozen
    alpha: float
    replaces: ClassVar[bool] = False

    def new(self, value: Tensor, at: At) -> Tensor:
        return value + self.alpha * at.fitting(self.direction.tensor, value, "the direction")

    def sentence(self, what: str) -> str:
        return f"add {self.alpha:g} × a direction to {what}"


@dataclass(frozen=True)
class Scale:
    """A factor."""

    factor: float
    replaces: ClassVar[bool] = False

    def new(self, value: Tensor, at: At) -> Tensor:
        return value * self.factor

    def sentence(self, what: str) -> str:
        return f"scale {what} by {self.factor:g}"


@dataclass(frozen=True)
class Project:
    """A subspace taken out."""

    span: Frozen
    replaces: ClassVar[bool] = False

    def new(self, value: Tensor, at: At) -> Tensor:
        return value - onto(value, at.fitting_span(self.span.tensor, value))

    def sentence(self, what: str) -> str:
        n = self.span.tensor.shape[0]
        return f"project {'a direction' if n == 1 else f'{n} directions'} out of {what}"


@dataclass(frozen=True)
class Set:
    """A value of the user's."""

    to: Frozen
    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        return at.fitting(self.to.tensor, value, "the value").expand(value.shape)

    def sentence(self, what: str) -> str:
        one = self.to.tensor.numel() == 1
        return f"set {what}" + (f" to {self.to.tensor.item():g}" if one else " to a given value")


@dataclass(frozen=True)
class Force:
    """Experts chosen by the user."""

    experts: tuple[int, ...]
    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        if len(self.experts) != value.shape[-1]:
            raise BadEdit(f"{at.edit}: a token has {value.shape[-1]} experts; {len(self.experts)} are named.")
        return at.fitting(torch.tensor(self.experts), value, "the experts").expand(value.shape)

    def sentence(self, what: str) -> str:
        return f"force experts {', '.join(map(str, self.experts))} in {what}"


@dataclass(frozen=True)
class Exclude:
    """Scores out of the choice."""

    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        return torch.full_like(value, float("-inf"))  # whether enough are left is seen once all edits have acted

    def sentence(self, what: str) -> str:
        return f"exclude experts: -inf in {what}"


@dataclass(frozen=True)
class KnockOut:
    """Attention edges forbidden before the softmax."""

    replaces: ClassVar[bool] = True

    def new(self, value: Tensor, at: At) -> Tensor:
        out = torch.full_like(value, forbidden(value.dtype))
        at.check_rows_keep_a_key(torch.where(at.mask(value), out, value))
        return out

    def sentence(self, what: str) -> str:
        return f"knock out edges of {what}"


@dataclass(frozen=True)
class Function:
    """A function of the user's."""

    f: Callable[[Tensor], Tensor | None]
    name: str
    position_wise: bool | None
    replaces: ClassVar[bool] = False

    def new(self, value: Tensor, at: At) -> Tensor:
        copied = value.clone()
        made = self.f(copied)
        if made is None:
            say_if_lost(self.f, copied, str(at.site))
            return value
        at.check_fits(made, value, f"the function {self.name}")
        return made

    def sentence(self, what: str) -> str:
        return f"{self.name} on {what}"


@dataclass(frozen=True)
class Nothing:
    """No change: what an untouched splice does to its latents."""

    replaces: ClassVar[bool] = False

    def new(self, value: Tensor, at: At) -> Tensor:
        return value

    def sentence(self, what: str) -> str:
        return f"splice into {what.removeprefix('latents of ')}"


def onto(value: Tensor, span: Tensor) -> Tensor:
    """The part of ``value`` in the span of orthonormal rows, over the last axis; made in fp32."""
    span = span.to(value.device, torch.float32)
    dense = value.float().contiguous()  # the bits of a product hang on how its factors lie in memory
    return ((dense @ span.T) @ span).to(value.dtype)


def orthonormal(rows: Tensor | Sequence[Sequence[float]]) -> Frozen:
    """An orthonormal basis of the rows' span, [rank, width].

    Raises:
        BadEdit: the rows span nothing, or are not a matrix.
    """
    rows = torch.as_tensor(rows, dtype=torch.float64)
    if rows.ndim == 1:
        rows = rows[None]
    if rows.ndim != 2 or not rows.isfinite().all():
        raise BadEdit(f"a subspace is rows of directions, [n, width], all finite; this is {list(rows.shape)}.")
    _, scale, basis = torch.linalg.svd(rows, full_matrices=False)
    rank = int((scale > scale.max() * 1e-7).sum()) if scale.numel() and float(scale.max()) > 0 else 0
    if not rank:
        raise BadEdit("these directions are all zero: they span nothing.")
    return Frozen(basis[:rank].float())


# ---- the words for them ---------------------------------------------------------------------------------------------

Names = str | Sequence[str]


def zero(
    tensor: str,
    block: int | None = None,
    *,
    renorm: bool = False,
    into: Names = (),
    within: Tensor | None = None,
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Set a tensor, or the part of it that ``where`` names, to zero.

    Args:
        tensor: any spelling; with ``block`` None, of a whole site (``blocks.3.O``).
        renorm: of ``gates`` alone: the token's other gates grow so that they sum to what they did before.
        into: only these direct readers see the change.
        within: rows of directions; only the span of them changes.
        through: a dictionary; ``where`` then names its latents by ``feature``.

    >>> zero("O", block=3, h=5).label
    'zero O of block 3 at h=5'
    """
    return _edit(tensor, block, Zero(renorm), where, into, within, through)


def mean(
    tensor: str,
    block: int | None = None,
    *,
    source: Source,
    over: Literal["all", "position"] | None = None,
    into: Names = (),
    within: Tensor | None = None,
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Replace by the mean over a reference set; pads are left out, of scores only visible keys count.

    Args:
        source: a run on the reference prompts that holds the site (for slot tensors, ``experts`` too: the mean of an
            expert's tensor is over the tokens that chose it).
        over: ``all`` positions, or each ``position`` by itself; None: all, but for tensors that hold their position's
            rotation and for S and A, where only ``position`` means something, of prompts that stand at the same
            position ids.
    """
    if over not in (None, "all", "position"):
        raise BadEdit(f"over={over!r}: a mean is over all or by position.")
    return _edit(tensor, block, Mean(source, over), where, into, within, through)


def resample(
    tensor: str,
    block: int | None = None,
    *,
    source: Source,
    rows: Sequence[int] | None = None,
    seed: int = 0,
    into: Names = (),
    within: Tensor | None = None,
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Replace by values of other prompts at the same positions.

    Which are drawn hangs on ``seed`` and the prompt's text, not on its row, nor on the order of the reference prompts:
    a prompt draws alike in any batch, and two rows of one text draw alike.

    Slot tensors (``gates``, ``g_e`` … ``y_e``) take, slot by slot, values of reference tokens that chose the same
    expert; ``delta_experts`` is matched by expert: one that the source did not choose adds 0, one that only the
    source chose joins the sum, and stands behind the k slots in the cached value.

    Args:
        source: a run on the reference prompts that holds the site (and, for slot tensors, ``experts``).
        rows: for each row of the edited run, the source's row; None: drawn among rows that are long enough (of a tensor
            that holds its position's rotation, among those at the same position ids).
    """
    how = Resample(source, _rows(rows), seed)
    return _edit(tensor, block, how, where, into, within, through)


def patch(
    tensor: str,
    block: int | None = None,
    *,
    source: Source | Weights,
    rows: Sequence[int] | None = None,
    source_T: Index | None = None,
    rotate: Literal["redo", "keep"] | None = None,
    into: Names = (),
    within: Tensor | None = None,
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Replace by a source's values: another run's, a cache's, another checkpoint's of equal dims; for a weight, of
    weights.

    Slots are matched by expert. For an expert that the source did not choose, ``g_e`` … ``y_e`` and ``gates`` do not
    exist there: refused. ``delta_experts`` is the tensor to patch: there such an expert adds 0.

    Args:
        rows: for each row of the edited run, the source's row; None: the same row, or the only one.
        source_T: the source's positions, one for each named by T (or S); None: the same span where T is a span's name,
            else the same positions.
        rotate: for tensors that hold their position's rotation, taken from another position id: ``redo`` takes the
            unrotated part and turns it here, ``keep`` takes them as they are; without a word that is refused.
    """
    places = () if source_T is None else where_of({"T": source_T})
    if rotate not in (None, "redo", "keep"):
        raise BadEdit(f"rotate={rotate!r} is not redo or keep.")
    how = Patch(source, _rows(rows), places, rotate)
    return _edit(tensor, block, how, where, into, within, through)


def noise(
    tensor: str,
    block: int | None = None,
    *,
    std: float,
    relative: bool = False,
    seed: int = 0,
    into: Names = (),
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Add Gaussian noise of this standard deviation, or (relative) of so many times the tensor's own in each prompt.

    It hangs on ``seed`` and on the text up to its position: a prompt meets the same noise in any batch, and two prompts
    meet the same as long as they say the same.
    """
    _finite(std=std)
    if not std >= 0:
        raise BadEdit(f"std={std}: a standard deviation is not negative.")
    return _edit(tensor, block, Noise(float(std), relative, seed), where, into, None, through)


def rounded(
    tensor: str, block: int | None = None, *, like: torch.dtype = torch.bfloat16, seed: int = 0, **where: Index
) -> Edit:
    """Move every number by one unit in the last place of a dtype, up, down or not, at random: what another rounding
    would have made of it. The effects of such edits are what low precision can't tell from nothing."""
    return _edit(tensor, block, Rounded(like, seed), where, (), None, None)


def add(
    tensor: str,
    block: int | None = None,
    *,
    direction: Tensor | Sequence[float],
    alpha: float = 1.0,
    into: Names = (),
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Add ``alpha`` times a direction: the size of the last axis (or of the last ones, as [h, v])."""
    _finite(alpha=alpha, direction=direction)
    return _edit(tensor, block, Add(Frozen(direction), float(alpha)), where, into, None, through)


def scale(
    tensor: str,
    block: int | None = None,
    *,
    factor: float,
    into: Names = (),
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Multiply by a factor."""
    _finite(factor=factor)
    return _edit(tensor, block, Scale(float(factor)), where, into, None, through)


def project_out(
    tensor: str,
    block: int | None = None,
    *,
    span: Tensor | Sequence[Sequence[float]],
    into: Names = (),
    **where: Index,
) -> Edit:
    """Remove the part in the span of these rows of directions, over the last axis."""
    return _edit(tensor, block, Project(orthonormal(span)), where, into, None, None)


def set_to(
    tensor: str,
    block: int | None = None,
    *,
    value: Tensor | float | Sequence[float],
    into: Names = (),
    within: Tensor | None = None,
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Put a value there: a number, or a tensor that broadcasts over the tensor's shape."""
    if bool(torch.as_tensor(value).isnan().any()):  # infinities are meant: -inf in choice_score excludes
        raise BadEdit("value holds NaN, which is no number.")
    return _edit(tensor, block, Set(Frozen(value)), where, into, within, through)


def freeze(tensor: str, block: int | None = None, **where: Index) -> Edit:
    """Hold the base's value at the positions that other edits reach, from the first edited block on (or in ``block``).

    ``freeze("experts")`` holds the choice and recomputes gates; with ``freeze("gates")`` the router whole;
    ``freeze("A")`` holds patterns while values still move; ``freeze("s_*")`` the norms' scales.
    """
    return _edit(tensor, block, Freeze(), where, (), None, None)


def knock_out(block: int, **where: Index) -> Edit:
    """Forbid attention edges, from queries T to keys S, of heads h, before the softmax: the rest is renormalised.

    Edges alone that no query could see are refused; in a sweep they are a cell that changes nothing.
    """
    if not {"T", "S"} & set(where):
        raise BadEdit("knock_out needs the edges: queries T=, keys S=, or both.")
    return _edit("S", block, KnockOut(), where, (), None, None)


def exclude(block: int, e: int | Sequence[int], **where: Index) -> Edit:
    """Take experts out of the choice: the next best take their places, and gates are recomputed."""
    return _edit("choice_score", block, Exclude(), {"e": e, **where}, (), None, None)


def force(block: int, experts: Sequence[int], **where: Index) -> Edit:
    """Choose these experts, as many as a token has; gates are recomputed from their affinities."""
    if len(set(experts)) != len(experts):
        raise BadEdit(f"force(experts={list(experts)}): an expert is named twice.")
    return _edit("experts", block, Force(tuple(experts)), where, (), None, None)


def edit(
    tensor: str,
    f: Callable[[Tensor], Tensor | None],
    /,  # so that f= can be a dim
    label: str = "",
    *,
    block: int | None = None,
    position_wise: bool | None = None,
    into: Names = (),
    within: Tensor | None = None,
    through: Dictionary | None = None,
    **where: Index,
) -> Edit:
    """Your own function: it sees a clone of the whole tensor and returns the new one (None: unchanged).

    Args:
        f: another shape, dtype or device than the tensor's is an error.
        label: what prints; the function's name without one.
        position_wise: whether each position's result depends on that position alone.
    """
    name = label or getattr(f, "__name__", "a function")
    return _edit(tensor, block, Function(f, name, position_wise), where, into, within, through)


def splice(tensor: str, block: int | None = None, *, dictionary: Dictionary, **where: Index) -> Edit:
    """Put a dictionary in: its reconstruction plus its error, so that untouched it changes nothing.

    Any other edit acts on its latents by ``through=dictionary``, and names them by ``feature``.
    """
    return _edit(tensor, block, Nothing(), where, (), None, dictionary)


def _finite(**numbers: Tensor | float | Sequence[float]) -> None:
    for name, value in numbers.items():
        if not bool(torch.as_tensor(value).isfinite().all()):
            raise BadEdit(f"{name} is not finite.")


def _rows(rows: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if rows is None else tuple(operator.index(row) for row in rows)


def _edit(
    tensor: str,
    block: int | None,
    how: How,
    where: dict[str, Index],
    into: Names,
    within: Tensor | None,
    through: Dictionary | None,
) -> Edit:
    if not (block is None or hasattr(block, "__index__")) or isinstance(block, bool):
        raise BadEdit(f"block={block!r}: a block is a whole number.")
    if within is not None and through is not None:
        raise BadEdit("within= and through= do not go together: a dictionary's features are its directions.")
    names = (into,) if isinstance(into, str) else tuple(into)
    return Edit(tensor, block, how, where_of(where), names, None if within is None else orthonormal(within), through)
