"""What values can be taken from: a run, or a cache that knows its rows."""

from __future__ import annotations

from typing import Protocol

from hooks.cache import Cache
from hooks.where import Rows


class Source(Protocol):
    """A run or a cache: tensors by site, and the rows that they belong to."""

    @property
    def rows(self) -> Rows:
        """The rows of the tensors."""
        ...

    @property
    def cache(self) -> Cache:
        """The tensors."""
        ...
