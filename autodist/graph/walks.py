"""Walks over a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def reach(roots: Iterable[N], onward: Callable[[N], Iterable[N]]) -> set[N]:
    """The roots and all that one comes to from them.

    >>> sorted(reach(["a"], {"a": ["b", "c"], "b": ["a"], "c": []}.__getitem__))
    ['a', 'b', 'c']
    """
    found: set[N] = set()
    front = list(roots)
    while front:
        name = front.pop()
        if name not in found:
            found.add(name)
            front.extend(onward(name))
    return found
