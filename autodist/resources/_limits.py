"""What no description of machines needs: a file, nesting, names and numbers so large, or text with such characters.

A file of a few hundred bytes can stand for gigabytes (an alias of aliases of aliases), and one that was given by
mistake can be of any size. Past these limits it is refused, in a time that its length bounds.
"""

from __future__ import annotations

import re

LONGEST_FILE = 1 << 20
"""Bytes: some ten thousand nodes."""

DEEPEST = 32
"""Levels of lists and mappings; a spec has six."""

LARGEST_SPEC = 8 << 20
"""Characters of all values and of the paths to them, aliases written out; with each value, `VALUE_SIZE` more."""

VALUE_SIZE = 16

LONGEST_KEY = 1000
"""Characters; the longest keys are patterns of variables' names."""

LONGEST_SHOWN = 60
"""Characters of a value in a message."""

_LONGEST_NUMBER = 64
_LARGEST_NUMBER = 1 << 63
# NUL ends a path, a name and an environment variable for the system; half a surrogate pair is no character.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")

TOO_DEEP = f"nested more than {DEEPEST} levels deep; write it flatter"
TOO_LARGE = (
    "too large: it holds too many values, or too long ones, once its aliases (*name) are written out; "
    "write only what is needed"
)
LONG_NUMBER = "has more digits than any number here can use; allowed: whole numbers of up to 18 digits"


def text_fault(text: str) -> str | None:
    """Why a text cannot stand in a spec; None if it can."""
    found = _UNUSABLE.search(text)
    if found is None:
        return None
    return f"it holds the character U+{ord(found.group()):04X}; allowed: text without NUL and halves of surrogate pairs"


def key_fault(key: str) -> str | None:
    """Why a key cannot stand in a spec; None if it can."""
    if len(key) > LONGEST_KEY:
        return f"the key that begins with {shown(key)} has {len(key)} characters; allowed: up to {LONGEST_KEY}"
    return text_fault(key)


def is_long_number(number: str | int) -> bool:
    """Whether a number, or the text of one, is beyond what any value of a spec can be."""
    return len(number) > _LONGEST_NUMBER if isinstance(number, str) else abs(number) >= _LARGEST_NUMBER


def shown(value: object) -> str:
    """The value as Python writes it, cut where a message would grow too long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
