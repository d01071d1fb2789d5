"""Partitioning: the division of a variable into shards along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


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


def even_sizes(length: int, shards: int) -> tuple[int, ...]:
    """Returns lengths of at most `shards` shards that differ by at most one; no more shards than indices.

    >>> even_sizes(7, 3)
    (3, 2, 2)
    >>> even_sizes(2, 3)
    (1, 1)
    """
    count = min(length, shards)
    return tuple(length // count + (index < length % count) for index in range(count))


WHOLE = "/whole"
"""Suffix of the variable that concatenates the shards, after the name of the partitioned variable."""


def shard_name(variable: str, shard: int) -> str:
    """Returns the name of one shard of a variable; also used for its handle and in the session."""
    return f"{variable}/shard_{shard}"


def part_name(variable: str, coordinate: int) -> str:
    """Returns the name of the part of a variable for one of a worker's coordinates on a mesh, by its position."""
    return f"{variable}/part_{coordinate}" if coordinate else variable


def listed(names: Sequence[str]) -> str:
    """Returns up to four names, or three and the number of the others, as in the script."""
    known = [name.removesuffix(WHOLE) for name in names]
    return ", ".join(known) if len(known) <= 4 else f"{', '.join(known[:3])} and {len(known) - 3} other variables"
