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
    """

    def __init__(self, computing: frozenset[int]) -> None:
        self.computing = computing
        self._each = Fraction(0)
        self._owners: dict[int, Fraction] = {}

    def add(self, each: Fraction | int, owner: int | None = None, owner_sends: Fraction | int = 0) -> None:
        """Adds what each worker with replicas sends, and the owner in its place."""
        self._each += each
        if owner is not None:
            differs = owner_sends - (each if owner in self.computing else 0)
            self._owners[owner] = self._owners.get(owner, Fraction(0)) + differs

    def by_worker(self, workers: int) -> tuple[int, ...]:
        each = round(self._each)
        sent = [each if worker in self.computing else 0 for worker in range(workers)]
        for owner, differs in self._owners.items():
            sent[owner] = round((self._each if owner in self.computing else 0) + differs)
        return tuple(sent)
