"""Walks over a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def reach(roots: Iterable[str], onward: Callable[[str], Iterable[str]]) -> set[str]:
    """The roots and all that one comes to from them.

    >>> sorted(reach(["a"], {"a": ["b", "c"], "b": ["a"], "c": []}.__getitem__))
    ['a', 'b', 'c']
    """
    found: set[str] = set()
    front = list(roots)
    while front:
        name = front.pop()
        if name not in found:
            found.add(name)
            front.extend(onward(name))
    return found
