"""Sent: bytes that workers send, added up piece by piece."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from typing import Protocol

from autodist.placement.group import Group

INDEX_BYTES = 8
"""Bytes of a row's index in a sparse gradient (int64; int32, which TensorFlow supports too, takes half)."""


class Piece(Protocol):
    """A variable with a gradient, or a shard of one."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def byte_size(self) -> int: ...

    @property
    def element_bytes(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def is_sparse(self) -> bool: ...

    @property
    def dtype(self) -> str: ...

    @property
    def is_floating(self) -> bool: ...


class Sent:
    """A sum of bytes by worker: a common value for the workers of each group, and the differences of owners.

    Adding a piece therefore costs the same for thousands of workers as for two.

    Args:
        parts: all added values are multiples of bytes by this factor: thousands of shards then add up to a row in
            integers, while fractions would cost ten times as much.
    """

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts
        self._each: defaultdict[Group, Fraction | int] = defaultdict(int)
        self._owners: defaultdict[int, Fraction | int] = defaultdict(int)

    def add(
        self, group: Group, each: Fraction | int, owner: int | None = None, owner_sends: Fraction | int = 0
    ) -> None:
        """Adds the bytes that each worker of a group sends, and those of the owner in its place."""
        self._each[group] += each
        if owner is not None:
            self._owners[owner] += owner_sends - (each if owner in group else 0)

    def add_times(self, other: Sent, count: int) -> None:
        """Adds `count` times another sum with the same parts."""
        for group, each in other._each.items():
            self._each[group] += each * count
        for owner, differs in other._owners.items():
            self._owners[owner] += differs * count

    def whole(self) -> Sent:
        """Returns the sum rounded to integer bytes for each worker: the traffic of one variable."""
        result = Sent()
        for group, each in self._each.items():
            result._each[group] = self._rounded(each)
        for owner, differs in self._owners.items():
            mine, alike = (sum(n for group, n in sent._each.items() if owner in group) for sent in (self, result))
            result._owners[owner] = self._rounded(mine + differs) - alike
        return result

    def by_worker(self, workers: int) -> tuple[int, ...]:
        """Returns the rounded bytes of each worker of a run."""
        sent = self._sums()
        return tuple(sent[worker] for worker in range(workers))

    def __bool__(self) -> bool:
        """Returns True if any worker sends anything."""
        return any(self._sums().values())

    def _sums(self) -> Counter[int]:
        whole, sent = self.whole(), Counter[int]()
        for group, each in whole._each.items():
            sent.update(dict.fromkeys(group.workers, int(each)))
        for owner, differs in whole._owners.items():
            sent[owner] += int(differs)
        return sent

    def _rounded(self, count: Fraction | int) -> int:
        return round(Fraction(count, self._parts)) if self._parts > 1 else round(count)
