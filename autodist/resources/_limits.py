"""Limits for a spec: file size, nesting, length of keys, size of numbers, and characters.

A file of a few hundred bytes can expand to gigabytes (an alias of aliases of aliases), and a file passed by mistake can
have any size. A file beyond these limits is refused, in a time bounded by the limits.
"""

from __future__ import annotations

import re

LONGEST_FILE = 1 << 20
"""Bytes; enough for about ten thousand nodes."""

DEEPEST = 32
"""Levels of lists and mappings; a spec has six."""

LARGEST_SPEC = 8 << 20
"""Characters of all values and of their paths, with aliases expanded, plus `VALUE_SIZE` for each value."""

VALUE_SIZE = 16

LONGEST_KEY = 1000
"""Characters; the longest keys are patterns for variable names."""

LONGEST_SHOWN = 60
"""Characters of a value in a message."""

_LONGEST_NUMBER = 64
_LARGEST_NUMBER = 1 << 63
# The system ends a path, a name or an environment variable at NUL; half a surrogate pair is not a character.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")

TOO_DEEP = f"nested more than {DEEPEST} levels deep; use fewer levels"
TOO_LARGE = (
    "too large: it holds too many values, or too long ones, once its aliases (*name) are expanded; "
    "remove what is not needed"
)
LONG_NUMBER = "has too many digits; allowed: whole numbers of up to 18 digits"


def text_fault(text: str) -> str | None:
    """Returns the reason why a text is not allowed in a spec; None if it is allowed."""
    found = _UNUSABLE.search(text)
    if found is None:
        return None
    return f"it contains the character U+{ord(found.group()):04X}; allowed: text without NUL or unpaired surrogates"


def key_fault(key: str) -> str | None:
    """Returns the reason why a key is not allowed in a spec; None if it is allowed."""
    if len(key) > LONGEST_KEY:
        return f"the key that starts with {shown(key)} has {len(key)} characters; allowed: up to {LONGEST_KEY}"
    return text_fault(key)


def is_long_number(number: str | int) -> bool:
    """Returns True if a number, or its text, is larger than any value of a spec can be."""
    return len(number) > _LONGEST_NUMBER if isinstance(number, str) else abs(number) >= _LARGEST_NUMBER


def shown(value: object) -> str:
    """Returns the `repr` of a value, shortened for a message."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
