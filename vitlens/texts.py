"""File, class and model names as text: readable in titles and messages, and valid as names of output files."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata

LONGEST_SHOWN = 200
"""Letters of a name in titles and messages. The middle of longer ones is left out."""
LONGEST_FILE_NAME = 160
"""Bytes of the name of an output file without its suffix. File systems take 255 in all."""
_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
"""Unicode categories of control, format and private characters, surrogates and line separators."""
_JOINERS = "\u200c\u200d"  # between letters of Persian and Indic scripts, and parts of emoji


def shown(name: object) -> str:
    """A name in one line of readable characters: others become escapes, such as \\n, \\xe9 or \\u202e.

    Bytes that are not UTF-8 become \\x.. too. Long names are shortened in the middle.

    >>> shown("a\\tb")
    'a\\\\tb'
    """
    text = os.fsdecode(name) if isinstance(name, bytes | os.PathLike) else str(name)
    text = shorten(text, LONGEST_SHOWN)
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_readable, text))


def shorten(text: str, letters: int) -> str:
    """A text of more than some letters without its middle."""
    if len(text) <= letters:
        return text
    half = letters // 2
    return f"{text[:half]}…{text[-half:]}"


def visible(text: str) -> str:
    """Text of several lines with escapes in place of the characters that `shown` escapes, but not line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" else _readable(c) for c in text)


def lines(text: str) -> list[str]:
    """The lines of a text, without empty ones at its end. Only line breaks divide it, not other separators of Unicode.

    >>> lines("a\\r\\nb\\n\\n")
    ['a', 'b']
    """
    return text.replace("\r\n", "\n").rstrip("\n").split("\n")


def encode(text: str) -> bytes:
    """Text in UTF-8. Bytes that are not UTF-8, as Python keeps them in paths, become escapes as in JSON.

    >>> encode("caf" + b"\\xe9".decode(errors="surrogateescape"))
    b'caf\\\\udce9'
    """
    return text.encode("utf-8", "backslashreplace")


def valid(text: str) -> str:
    """Text that UTF-8 can hold, as `encode` writes it. Tables of pandas take no other."""
    return encode(text).decode()


def _readable(character: str) -> str:
    """A character, or its escape if it is invisible."""
    if character in _JOINERS or unicodedata.category(character) not in _INVISIBLE:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8, as Python keeps it in paths
        return f"\\x{number - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode()


def file_name(name: object, *, before: str = "", suffix: str = "") -> str:
    """Name of an output file: `before`, the letters, digits, "-" and "_" of a name, and a suffix.

    Other characters become "-". A long name is cut, with a checksum of the whole one at its end.

    >>> file_name("my cat", before="00-", suffix=".png")
    '00-my-cat.png'
    """
    text = os.fsdecode(name) if isinstance(name, bytes | os.PathLike) else str(name)
    text = unicodedata.normalize("NFC", text)
    letters = [c if c.isalnum() or c in "-_" else "-" for c in text]
    plain = "".join(letters)
    if len(plain.encode()) > LONGEST_FILE_NAME:
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
        kept = plain.encode()[: LONGEST_FILE_NAME - 13].decode(errors="ignore")
        plain = f"{kept}-{digest}"
    return f"{before}{plain}{suffix}"


def natural_key(name: str) -> list[tuple[bool, int | str]]:
    """Key that sorts numbers in names by their value, and before letters.

    >>> sorted(["b", "a10", "a9"], key=natural_key)
    ['a9', 'a10', 'b']
    """
    parts: list[tuple[bool, int | str]] = []
    for part in re.findall(r"\d+|\D+", name):
        if part.isdecimal():
            parts.append((False, int(part)))
        else:
            parts.append((True, part))
    return parts
