"""Placement: into which shards a variable is cut, and which worker holds each."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

EVERY_WORKER = -1
"""Stands for an owner where every worker holds the variable."""


@dataclass(frozen=True)
class Partitioning:
    """How a variable is cut into shards, along one axis.

    Attributes:
        axis: along which.
        sizes: length of each shard along it, from 1.
    """

    axis: int
    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each shard begins along the axis."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    def shape(self, whole: Sequence[int | None], shard: int) -> tuple[int | None, ...]:
        """The shape of one shard of a tensor of shape `whole`."""
        return (*whole[: self.axis], self.sizes[shard], *whole[self.axis + 1 :])


WHOLE = "/whole"
"""What the variable that puts shards together is called, after the name of the variable that is cut."""


def shard_name(variable: str, shard: int) -> str:
    """The name of one shard of a variable; of its handle, and in the session, as well."""
    return f"{variable}/shard_{shard}"


@dataclass(frozen=True)
class Shard:
    """A part of a variable that is kept by itself.

    Attributes:
        name: what is appended to the name of a whole variable; "" for a whole one.
        begin: where it begins in the whole, on each axis.
        shape: its length on each axis.
        owner: the worker that holds it, or `EVERY_WORKER`.
        copies: what is appended to its name for copies that every worker has besides.
        mates: workers that hold it as its owner does.
    """

    name: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    copies: tuple[str, ...] = ()
    stage_group: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where the value of one variable lies.

    Attributes:
        cut: into which shards; None: it is whole.
        owners: the worker that holds it, or each of its shards; `EVERY_WORKER` where each holds it.
        copies: what is appended to its name, or to each shard's, for copies that every worker has besides.
        mates: of a whole one, workers that hold it as its owner does.
    """

    cut: Partitioning | None = None
    owners: tuple[int, ...] = (EVERY_WORKER,)
    copies: tuple[tuple[str, ...], ...] = ((),)
    stage_group: tuple[int, ...] = ()

    def with_copies_of(self, other: Placement) -> Placement:
        """This placement, with the other's copies too where it is cut alike."""
        if len(self.copies) != len(other.copies):
            return self
        together = zip(self.copies, other.copies, strict=True)
        return replace(self, copies=tuple(tuple(sorted({*mine, *theirs})) for mine, theirs in together))

    def shards(self, shape: Sequence[int]) -> Iterator[Shard]:
        """The parts of a variable of this shape; one, if it is whole."""
        if self.cut is None:
            yield Shard("", (0,) * len(shape), tuple(shape), self.owners[0], self.copies[0], self.stage_group)
            return
        for k, (start, size) in enumerate(zip(self.cut.starts, self.cut.sizes, strict=True)):
            begin = tuple(start if axis == self.cut.axis else 0 for axis in range(len(shape)))
            length = tuple(size if axis == self.cut.axis else n for axis, n in enumerate(shape))
            yield Shard(shard_name("", k), begin, length, self.owners[k], self.copies[k])


def listed(names: Sequence[str]) -> str:
    """Some names and the number of the others, each as the script has it."""
    known = [name.removesuffix(WHOLE) for name in names]
    return ", ".join(known) if len(known) <= 4 else f"{', '.join(known[:3])} and {len(known) - 3} other variables"


class SyncMode(enum.Enum):
    """When the gradients of a variable that one worker owns are applied."""

    SYNCHRONOUS = "synchronous"  # all workers' gradients of a step are one update, for which the step waits
    STALE = "stale"  # all workers' gradients of a step are one update, and steps may run ahead of it
    ASYNCHRONOUS = "asynchronous"  # each worker's gradient is an update


@dataclass(frozen=True)
class VariablePlacement:
    """How one worker keeps a variable for all.

    Attributes:
        owner: index of the worker.
        pace: when gradients are applied.
        staleness: how many steps a worker may be ahead of the slowest; 0 with ASYNCHRONOUS: as many as it likes.
    """

    owner: int
    pace: SyncMode = SyncMode.SYNCHRONOUS
    staleness: int = 0

    @property
    def runs_ahead(self) -> bool:
        """Whether steps do not wait for the update that they bring about."""
        return self.pace is not SyncMode.SYNCHRONOUS
