"""Sent: bytes that workers send, added up piece by piece."""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

INDEX_BYTES = 8
"""Of a row's index in a sparse gradient (int64; TensorFlow has int32 too, where it is half)."""


class Piece(Protocol):
    """A variable that has a gradient, or a shard of one."""

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
    """A sum of bytes by worker: what each that computes sends alike, and by how much owners differ.

    So adding a piece costs the same on thousands of workers as on two.

    Args:
        computing: the workers that have replicas.
        parts: what is added are so many times the bytes that are meant: thousands of shards add up to a row in whole
            numbers, where fractions would cost ten times as much.
    """

    def __init__(self, computing: frozenset[int], parts: int = 1) -> None:
        self.computing = computing
        self._parts = parts
        self._each: Fraction | int = 0
        self._owners: dict[int, Fraction | int] = {}

    def add(self, each: Fraction | int, owner: int | None = None, owner_sends: Fraction | int = 0) -> None:
        """Adds what each worker with replicas sends, and the owner in its place."""
        self._each += each
        if owner is not None:
            differs = owner_sends - (each if owner in self.computing else 0)
            self._owners[owner] = self._owners.get(owner, 0) + differs

    def add_times(self, other: Sent, count: int) -> None:
        """Adds so many times what another sum of the same workers and parts has."""
        self._each += other._each * count
        for owner, differs in other._owners.items():
            self._owners[owner] = self._owners.get(owner, 0) + differs * count

    def whole(self) -> Sent:
        """The same in whole bytes of each worker, which is what the workers send of one variable."""
        found = Sent(self.computing)
        found._each = self._rounded(self._each)
        for owner, differs in self._owners.items():
            mine, alike = (self._each, found._each) if owner in self.computing else (0, 0)
            found._owners[owner] = self._rounded(mine + differs) - alike
        return found

    def by_worker(self, workers: int) -> tuple[int, ...]:
        whole = self.whole()
        each = int(whole._each)
        sent = [each if worker in self.computing else 0 for worker in range(workers)]
        for owner, differs in whole._owners.items():
            sent[owner] += int(differs)
        return tuple(sent)

    def __bool__(self) -> bool:
        """Whether a worker sends anything."""
        others = len(self.computing - self._owners.keys())
        owners = (differs + (self._each if owner in self.computing else 0) for owner, differs in self._owners.items())
        return bool(self._each and others) or any(owners)

    def _rounded(self, count: Fraction | int) -> int:
        return round(Fraction(count, self._parts)) if self._parts > 1 else round(count)
