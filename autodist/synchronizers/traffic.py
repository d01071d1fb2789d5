"""Sent: bytes that workers send, added up piece by piece."""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

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
    """A sum of bytes by worker: a common value for workers with replicas, and the differences of owners.

    Adding a piece therefore costs the same for thousands of workers as for two.

    Args:
        computing: the workers that have replicas.
        parts: all added values are multiples of bytes by this factor: thousands of shards then add up to a row in
            integers, while fractions would cost ten times as much.
    """

    def __init__(self, computing: frozenset[int], parts: int = 1) -> None:
        self.computing = computing
        self._parts = parts
        self._each: Fraction | int = 0
        self._owners: dict[int, Fraction | int] = {}

    def add(self, each: Fraction | int, owner: int | None = None, owner_sends: Fraction | int = 0) -> None:
        """Adds the bytes that each worker with replicas sends, and those of the owner in its place."""
        self._each += each
        if owner is not None:
            differs = owner_sends - (each if owner in self.computing else 0)
            self._owners[owner] = self._owners.get(owner, 0) + differs

    def add_times(self, other: Sent, count: int) -> None:
        """Adds `count` times another sum for the same workers and parts."""
        self._each += other._each * count
        for owner, differs in other._owners.items():
            self._owners[owner] = self._owners.get(owner, 0) + differs * count

    def whole(self) -> Sent:
        """Returns the sum rounded to integer bytes for each worker: the traffic of one variable."""
        result = Sent(self.computing)
        result._each = self._rounded(self._each)
        for owner, differs in self._owners.items():
            mine, alike = (self._each, result._each) if owner in self.computing else (0, 0)
            result._owners[owner] = self._rounded(mine + differs) - alike
        return result

    def by_worker(self, workers: int) -> tuple[int, ...]:
        whole = self.whole()
        each = int(whole._each)
        sent = [each if worker in self.computing else 0 for worker in range(workers)]
        for owner, differs in whole._owners.items():
            sent[owner] += int(differs)
        return tuple(sent)

    def __bool__(self) -> bool:
        """Returns True if any worker sends anything."""
        others = len(self.computing - self._owners.keys())
        owners = (differs + (self._each if owner in self.computing else 0) for owner, differs in self._owners.items())
        return bool(self._each and others) or any(owners)

    def _rounded(self, count: Fraction | int) -> int:
        return round(Fraction(count, self._parts)) if self._parts > 1 else round(count)
