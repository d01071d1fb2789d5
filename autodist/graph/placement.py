"""Placement: the shards of a variable and the worker that holds each."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

EVERY_WORKER = -1
"""Owner of a variable that every worker holds."""


@dataclass(frozen=True)
class Partitioning:
    """Partitioning of a variable into shards along one axis.

    Attributes:
        axis: the axis.
        sizes: length of each shard along it, from 1.
    """

    axis: int
    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Start of each shard along the axis."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    def shape(self, whole: Sequence[int | None], shard: int) -> tuple[int | None, ...]:
        """Returns the shape of one shard of a tensor of shape `whole`."""
        return (*whole[: self.axis], self.sizes[shard], *whole[self.axis + 1 :])


WHOLE = "/whole"
"""Suffix of the variable that concatenates the shards, after the name of the partitioned variable."""


def shard_name(variable: str, shard: int) -> str:
    """Returns the name of one shard of a variable; also used for its handle and in the session."""
    return f"{variable}/shard_{shard}"


@dataclass(frozen=True)
class Shard:
    """A part of a variable that is stored as a variable of its own.

    Attributes:
        name: suffix after the name of the variable; "" if it is not partitioned.
        begin: its start in the variable, on each axis.
        shape: its length on each axis.
        owner: the worker that holds it, or `EVERY_WORKER`.
        copies: suffixes of the cached copies that every worker holds in addition.
        stage_group: other workers that hold the same value as its owner.
    """

    name: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    copies: tuple[str, ...] = ()
    stage_group: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Location of the value of one variable.

    Attributes:
        cut: its partitioning; None: not partitioned.
        owners: the worker that holds it, or one for each shard; `EVERY_WORKER` if each worker holds it.
        copies: for the variable or each shard, suffixes of the cached copies that every worker holds in addition.
        stage_group: for an unpartitioned variable, other workers that hold the same value as its owner.
    """

    cut: Partitioning | None = None
    owners: tuple[int, ...] = (EVERY_WORKER,)
    copies: tuple[tuple[str, ...], ...] = ((),)
    stage_group: tuple[int, ...] = ()

    def with_copies_of(self, other: Placement) -> Placement:
        """Returns this placement with the cached copies of `other` added, if both have as many shards."""
        if len(self.copies) != len(other.copies):
            return self
        pairs = zip(self.copies, other.copies, strict=True)
        return replace(self, copies=tuple(tuple(sorted({*ours, *theirs})) for ours, theirs in pairs))

    def shards(self, shape: Sequence[int]) -> Iterator[Shard]:
        """Yields the shards of a variable of this shape; one if it is not partitioned."""
        if self.cut is None:
            yield Shard("", (0,) * len(shape), tuple(shape), self.owners[0], self.copies[0], self.stage_group)
            return
        for k, (start, size) in enumerate(zip(self.cut.starts, self.cut.sizes, strict=True)):
            begin = tuple(start if axis == self.cut.axis else 0 for axis in range(len(shape)))
            length = tuple(size if axis == self.cut.axis else n for axis, n in enumerate(shape))
            yield Shard(shard_name("", k), begin, length, self.owners[k], self.copies[k])


def listed(names: Sequence[str]) -> str:
    """Returns up to four names, or three and the number of the others, as in the script."""
    known = [name.removesuffix(WHOLE) for name in names]
    return ", ".join(known) if len(known) <= 4 else f"{', '.join(known[:3])} and {len(known) - 3} other variables"


class SyncMode(enum.Enum):
    """When an owner applies the gradients of a variable."""

    SYNCHRONOUS = "synchronous"  # one update for all workers' gradients of a step; the step waits for it
    STALE = "stale"  # one update for all workers' gradients of a step; steps may run ahead of it
    ASYNCHRONOUS = "asynchronous"  # one update for each worker's gradient


@dataclass(frozen=True)
class VariablePlacement:
    """Placement of a variable on the one worker that owns it.

    Attributes:
        owner: index of the worker.
        pace: when gradients are applied.
        staleness: the number of steps that a worker may be ahead of the slowest; 0 with ASYNCHRONOUS: unlimited.
    """

    owner: int
    pace: SyncMode = SyncMode.SYNCHRONOUS
    staleness: int = 0

    @property
    def runs_ahead(self) -> bool:
        """True if steps do not wait for the update that they cause."""
        return self.pace is not SyncMode.SYNCHRONOUS
