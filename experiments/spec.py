"""A run in a TOML file: a study, its arguments, and a grid of lists, of whose product each combination is a unit.

.. code-block:: toml

    study = "ablate"                      # a name out of experiments.studies.STUDIES
    prompts = "ioi"                       # every other key on top is an argument of that function
    tensors = ["O"]

    [model]                               # arguments of HookedModel.load; without it, the tiny model
    dtype = "float32"

    [grid]                                # lists: a unit for each combination, the last key fastest
    by = ["head", "role"]
    model.directory = ["../a", "../b"]

Keys, values and their defaults are those of the functions, checked against their signatures before anything runs. TOML
says in text what it has no type for: prompts by task or file, a second model by its directory (or ``random``, see
`experiments.compare`), a dtype by name. A lone value where a list is wanted is a list of one. Paths are relative to the
TOML file.
"""

from __future__ import annotations

import inspect
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from experiments.options import Dtype
from experiments.prompts import Prompts
from experiments.studies import STUDIES
from hooks import HookedModel
from probe.errors import ProbeError, asking, nearest
from probe.files import read_bytes
from probe.headers import MOST, brief, expanded, told

SHIPPED = Path(__file__).parent / "specs"
"""Specs for the tiny model; `read` takes their names."""

MOST_UNITS = 100_000
"""The most units of a run: each is a file, and is planned before the first begins."""

_TABLES = ("study", "model", "grid")
_GIVEN_BY_THE_RUN = ("model", "name", "first", "names")


class BadSpec(ProbeError, ValueError):
    """A spec that can't be read, or doesn't describe a run."""


@dataclass(frozen=True)
class Unit:
    """One call of the study.

    Attributes:
        label: what tells it from the other units: ``by=head how=zero``; empty where it is the only one.
        model: arguments of `HookedModel.load`.
        arguments: of the study, defaults among them; prompts by task or file.
    """

    label: str
    model: Mapping[str, Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Spec:
    """What a TOML file describes.

    Attributes:
        name: of the file, without its ending.
        folder: what paths are relative to.
        study: a name out of `STUDIES`.
        units: in the order of the grid, but one model after the other.
    """

    name: str
    folder: Path
    study: str
    units: tuple[Unit, ...]


def read(spec: str | Path) -> Spec:
    """The spec in a TOML file; or one that ships with us, by its name (`shipped`).

    Raises:
        BadSpec: it can't be read; a key or a value that the study or the model doesn't take.
    """
    path = expanded(spec)
    if path.suffix != ".toml":
        if str(spec) not in shipped():
            raise BadSpec(
                f"there is no spec {str(spec)!r}.{_hint(str(spec), shipped())} A file of yours ends in .toml;"
                f" those that ship: {', '.join(shipped())}."
            )
        path = SHIPPED / f"{spec}.toml"
    try:
        given = tomllib.loads(read_bytes(path, MOST).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSpec(f"{path}: can't be read ({getattr(error, 'strerror', None) or error}).") from None
    except ValueError as error:  # a TOMLDecodeError; a number of more digits than Python reads
        raise BadSpec(f"{path}: not TOML: {error}.") from None
    except RecursionError:
        raise BadSpec(f"{path}: not TOML: it is nested too deeply.") from None
    with asking(str(path)):
        return parse(given, path.stem, path.parent)


def shipped() -> list[str]:
    """The names of the specs that ship with us."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def parse(given: Mapping[str, Any], name: str = "run", folder: str | Path = ".") -> Spec:
    """The spec that a table describes; see `read`."""
    _check_numbers(given)
    study = given.get("study")
    if not isinstance(study, str) or study not in STUDIES:
        raise BadSpec(f"study is {brief(study)}; it should be a study's name.{_hint(str(study), STUDIES)}")
    model, grid = ({} if (table := given.get(key)) is None else _table(key, table) for key in ("model", "grid"))
    fixed = {key: value for key, value in given.items() if key not in _TABLES}
    fixed |= {f"model.{key}": value for key, value in model.items()}
    lists = dict(_lists(grid))
    if twice := [key for key in lists if key in fixed]:
        raise BadSpec(f"{twice[0]} is given twice, in the grid and outside it.")
    kinds = _kinds(study)
    checked = {key: _checked(kinds, study, key, value) for key, value in fixed.items()}
    axes = {key: [_checked(kinds, study, key, value) for value in values] for key, values in lists.items()}
    for key, values in axes.items():
        again, times = Counter(map(repr, values)).most_common(1)[0]
        if times > 1:
            raise BadSpec(f"grid: {key} has {told(again)} twice; every unit is run once.")
    if (count := math.prod(map(len, axes.values()))) > MOST_UNITS:
        raise BadSpec(f"grid: it makes {count:,} units, and a run takes up to {MOST_UNITS:,}; make it several.")
    units = [_unit(study, checked, dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
    order: dict[str, int] = {}
    units.sort(key=lambda unit: order.setdefault(repr(unit.model), len(order)))
    return Spec(name, expanded(folder), study, tuple(units))


def _check_numbers(value: Any) -> None:
    """Refuse whole numbers of more than TOML's 64 bits, which nothing takes and Python may not print."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadSpec("it has a whole number of more than 64 bits.")
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_numbers(inner)


def _table(key: str, table: Any) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise BadSpec(f"{key} is {brief(table)}; it should be a table, [{key}].")
    return table


def _lists(grid: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Key → its values, the keys of ``model`` with that in front."""
    for key, values in grid.items():
        if key == "model":
            yield from ((f"model.{inner}", values) for inner, values in _lists(_table("grid.model", values)))
        elif not isinstance(values, list) or not values:
            raise BadSpec(f"grid: {key} is {brief(values)}; it should be a list of the values that it takes in turn.")
        else:
            yield key, values


def _unit(study: str, fixed: Mapping[str, Any], chosen: Mapping[str, Any]) -> Unit:
    """One combination of the grid, with the defaults filled in."""
    given = {**fixed, **chosen}
    arguments: dict[str, Any] = {}
    for key, parameter in _parameters(STUDIES[study].run).items():
        arguments[key] = given.get(key, parameter.default)
        if arguments[key] is parameter.empty:
            raise BadSpec(f"{key} is missing; {study} can't do without.")
    label = " ".join(f"{key}={_short(value)}" for key, value in chosen.items())
    model = {key.removeprefix("model."): value for key, value in given.items() if key.startswith("model.")}
    return Unit(label, model, arguments)


def _short(value: Any) -> str:
    return "+".join(map(_short, value)) if isinstance(value, list) else str(value)


# ---- what may be given, out of signatures ----------------------------------------------------------------------------


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {key: parameter for key, parameter in found.items() if key not in _GIVEN_BY_THE_RUN}


def _kinds(study: str) -> dict[str, TypeAdapter[Any] | None]:
    """Every key that may be given → what checks a value as TOML can say it; None: TOML can't."""
    functions: dict[str, Callable[..., Any]] = {"": STUDIES[study].run, "model.": HookedModel.load}
    return {
        prefix + key: None if (kind := _in_toml(get_type_hints(function)[key])) is None else _adapter(kind)
        for prefix, function in functions.items()
        for key in _parameters(function)
    }


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))


_SAID_AS: dict[Any, Any] = {
    Prompts: str,
    HookedModel: str,
    Path: str,
    torch.device: str,
    torch.dtype: Dtype,
}


def _in_toml(hint: Any) -> Any:
    """A type with text for what TOML has no type for; None where nothing of it can be said. (Nor can None: a key that
    is left out has its default.)"""
    if hint in _SAID_AS or hint in (str, int, float, bool):
        return _SAID_AS.get(hint, hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return hint
    if origin in (Union, UnionType):
        said = tuple(kind for part in parts if part is not NoneType and (kind := _in_toml(part)) is not None)
        return Union[said] if said else None  # noqa: UP007  # made at run time
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        origin, parts = Sequence, parts[:1]
    if isinstance(origin, type) and issubclass(origin, Sequence | Mapping) and origin is not tuple:
        kinds = tuple(map(_in_toml, parts))
        return None if None in kinds else origin[kinds]  # type: ignore[index]
    return None


def that_take(kind: type, function: Callable[..., Any]) -> set[str]:
    """The arguments of a function that may be of this type."""
    hints = get_type_hints(function)
    return {key for key, hint in hints.items() if key != "return" and kind in (hint, *get_args(hint))}


def _checked(kinds: Mapping[str, TypeAdapter[Any] | None], study: str, key: str, value: Any) -> Any:
    """A value as its argument takes it."""
    if key not in kinds:
        keys = [*kinds, *_TABLES]
        raise BadSpec(f"{told(key)} is no key of a spec for {study}.{_hint(key, keys)}")
    kind = kinds[key]
    if kind is None:
        raise BadSpec(f"{key} can't be said in TOML; call experiments.studies.STUDIES[{study!r}].run from Python.")
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        try:
            return kind.validate_python([value])
        except ValidationError:
            why = error.errors()[0]["msg"]
            raise BadSpec(f"{key} is {brief(value)}: {why[:1].lower()}{why[1:]}.") from None


def _hint(spelling: str, known: Iterable[str]) -> str:
    known = list(known)
    near = nearest(spelling, known)
    return f" Nearest: {', '.join(near)}." if near else f" There are {', '.join(known)}."
