"""Bytes as text: as a byte-level vocabulary spells them, and as labels show them."""

from __future__ import annotations

import re

_PRINTED = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_CHARS = [chr(byte) if byte in _PRINTED else chr(0x100 + _OTHERS.index(byte)) for byte in range(256)]
_BYTES = {char: bytes([byte]) for byte, char in enumerate(_CHARS)}

_SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_MEANT = {sign: char for char, sign in _SIGNS.items()}
_MARK = re.compile(r"⟨U\+(?P<code>(?:10|[0-9A-F])?[0-9A-F]{4})⟩|⟨(?P<byte>[0-9A-F]{2})⟩|(?P<char>.)", re.DOTALL)


def spelt(data: bytes) -> str:
    """Bytes in the alphabet of byte-level vocabularies: one printed character a byte, a space as Ġ."""
    return "".join(_CHARS[byte] for byte in data)


def unspelt(text: str) -> bytes:
    """The bytes that `spelt` wrote; a character that is not of its alphabet stands for itself."""
    return b"".join(_BYTES.get(char) or _utf8(char) for char in text)


def label(data: bytes) -> str:
    """Bytes as a label: spaces ␣, newlines ⏎, tabs ⇥; bytes that are no whole character ⟨E4⟩⟨BD⟩; what is not printed,
    and these signs themselves, by number, ⟨U+200D⟩. Two labels are alike only if their bytes are."""
    return "".join(map(_shown, data.decode("utf-8", "surrogateescape")))


def _shown(char: str) -> str:
    if char in _SIGNS:
        return _SIGNS[char]
    if "\udc80" <= char <= "\udcff":  # a byte that is no character's, as surrogateescape hands it over
        return f"⟨{ord(char) - 0xDC00:02X}⟩"
    return char if char.isprintable() and char not in _MEANT and char != "⟨" else f"⟨U+{ord(char):04X}⟩"


def unlabel(text: str) -> bytes:
    """The bytes that a label shows; a text without a label's signs is itself."""
    return b"".join(map(_meant, _MARK.finditer(text)))


def _meant(mark: re.Match[str]) -> bytes:
    if mark["byte"]:
        return bytes.fromhex(mark["byte"])
    return _utf8(chr(int(mark["code"], 16)) if mark["code"] else _MEANT.get(mark["char"], mark["char"]))


def _utf8(char: str) -> bytes:
    return char.encode("utf-8", "surrogatepass")  # no token is spelt by half a surrogate pair, so none is found
