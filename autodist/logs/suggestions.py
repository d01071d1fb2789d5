"""Names in messages: the nearest to a misspelt one, and lists of what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question whether a known name was meant, with a blank before it, or nothing when none is near.

    >>> did_you_mean("AllReduc", ["AllReduce", "PS"])
    ' Did you mean AllReduce?'
    >>> did_you_mean("xyz", ["AllReduce", "PS"])
    ''
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[near[0]]}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The three names most like a word, best first, however unlike."""
    return difflib.get_close_matches(word, list(known), n=3, cutoff=0.0)


def listed(names: Iterable[str]) -> str:
    """Names with commas between, or "none".

    >>> listed(["a", "b"])
    'a, b'
    """
    return ", ".join(names) or "none"
