"""What a study has met that is NaN or infinite: said once its frame is there, by where in the model it begins.

An expert that wasn't chosen has no value, and that is nothing to tell: what counts is what runs show (`hooks.finite`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import ParamSpec

import pandas as pd

from hooks.finite import LOGITS, Lost, begins, is_watched, watching
from probe.errors import ProbeError

P = ParamSpec("P")

NOT_FINITE = "not_finite"
"""Where a frame's attrs say so."""


class NotFinite(ProbeError, ArithmeticError):
    """What was run is NaN or infinite somewhere, so that what hangs on it is no result."""


class NotFiniteWarning(RuntimeWarning):
    """The same of a study that has given its frame all the same."""


def telling(study: Callable[P, pd.DataFrame]) -> Callable[P, pd.DataFrame]:
    """Make a study tell where the runs that it makes stop being finite: in its frame's attrs, and as a warning. One
    that can't go on then is refused with that; a study that another asks leaves it to that one."""

    @wraps(study)
    def through(*args: P.args, **kwargs: P.kwargs) -> pd.DataFrame:
        if is_watched():
            return study(*args, **kwargs)
        with watching() as lost:
            try:
                df = study(*args, **kwargs)
            except Exception as error:
                if not lost:
                    raise
                raise NotFinite(f"{told(lost)}, and nothing can be made of it ({error})") from error
        if lost:
            df.attrs[NOT_FINITE] = told(lost)
            warnings.warn(df.attrs[NOT_FINITE], NotFiniteWarning, stacklevel=2)
        return df

    return through


def check(said: Iterable[str | None]) -> None:
    """Refuse to end well where frames say that something was not finite.

    Args:
        said: what their attrs have under `NOT_FINITE`; None: nothing.

    Raises:
        NotFinite: with what they say.
    """
    if lost := list(dict.fromkeys(filter(None, said))):
        raise NotFinite(f"{'; '.join(lost)}: see the weights there, or take another dtype.")


def told(lost: Sequence[Lost]) -> str:
    """One sentence, without its end, of what was lost: of plain runs, else of edited ones."""
    plain = [one for one in lost if not one.edits and one.tokens is not None]
    if plain:
        return "; ".join(dict.fromkeys(_where(plain)))
    first, others = lost[0], len(lost) - 1
    subject = "logits are" if first.site == LOGITS else f"{first.site} is"
    what = " and ".join(map(str, first.edits)) or "a stream from elsewhere"
    more = f", nor in {others} other edited run{'s' if others > 1 else ''}" if others else ""
    return f"{subject} not finite after {what}{more}"


def _where(lost: Sequence[Lost]) -> Iterator[str]:
    """A sentence for each batch: where a plain run of it stops being finite, and of how many rows."""
    once = {(id(one.model.decoder.weights), repr(one.tokens.tolist())): one for one in lost if one.tokens is not None}
    for model, site, tokens, of, _ in once.values():
        assert tokens is not None, "only such"
        masks = (None, None, None) if of is None else (of.keep, of.ids, of.segments)
        on = (None if mask is None else mask.to(model.device) for mask in masks)
        first, rows = begins(model, tokens.to(model.device), *on)
        some = "" if bool(rows.all()) else f" ({int(rows.sum())} of {len(rows)} rows)"
        if bool(rows.any()):
            yield f"logits are not finite from {first} on{some}"
        else:
            yield f"{first or site} is not finite, though the logits are"
