"""Text as a terminal may have it."""

from __future__ import annotations

import unicodedata


def shown(text: object) -> str:
    """A message as a terminal may have it: characters that would act on one, or hide or turn what stands around them,
    by number. Lines stay lines."""
    return "".join(f"⟨U+{ord(char):04X}⟩" if _acts(char) else char for char in str(text))


def _acts(char: str) -> bool:
    return char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
