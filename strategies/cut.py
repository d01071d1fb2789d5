"""Arithmetic of partition sizes: variables divided along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace
from math import lcm

from autodist.graph.placement import Partitioning, shard_name
from autodist.strategies.variables import SyncedVariable


def shards_of(variable: SyncedVariable, cut: Partitioning | None) -> tuple[SyncedVariable, ...]:
    """Returns the shards as separate variables; an unpartitioned variable is its only shard."""
    if cut is None:
        return (variable,)
    alike = {length: variable.first_shard(cut.axis, length) for length in set(cut.sizes)}
    return tuple(alike[length].named(shard_name(variable.name, index)) for index, length in enumerate(cut.sizes))


def even_sizes(length: int, shards: int) -> tuple[int, ...]:
    """Returns lengths of at most `shards` shards that differ by at most one; no more shards than indices.

    >>> even_sizes(7, 3)
    (3, 2, 2)
    >>> even_sizes(2, 3)
    (1, 1)
    """
    count = min(length, shards)
    return tuple(length // count + (index < length % count) for index in range(count))


def proportional_sizes(length: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns the lengths of one shard per weight, proportional to the weights after rounding, and at least 1.

    Each share is rounded down, and the remaining indices go to the largest remainders (A. Hamilton's method), the lower
    index first. A share below 1 becomes 1 at the cost of the shards that exceed their share most.

    >>> proportional_sizes(11, [Fraction(10), Fraction(100)])
    (1, 10)
    >>> proportional_sizes(7, [Fraction(1)] * 3)
    (3, 2, 2)

    Raises:
        ValueError: there are more weights than indices.
    """
    if not 0 < len(weights) <= length:
        raise ValueError(f"{length} indices cannot make {len(weights)} shards of at least one")
    scale = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * scale) for weight in weights]
    total = sum(parts)
    sizes = [max(1, length * part // total) for part in parts]
    # The excess length of each, in `total`ths of an index. Heaps, since there may be thousands of shards.
    excess = [size * total - length * part for size, part in zip(sizes, parts, strict=True)]
    missing = length - sum(sizes)
    shortest = list(zip(excess, range(len(sizes)), strict=True))
    heapify(shortest)
    for _ in range(missing):
        least, index = shortest[0]
        sizes[index] += 1
        heapreplace(shortest, (least + total, index))
    longest = [(-most, -index) for index, most in enumerate(excess) if sizes[index] > 1]
    heapify(longest)
    for _ in range(-missing):
        most, index = heappop(longest)
        sizes[-index] -= 1
        if sizes[-index] > 1:
            heappush(longest, (most + total, index))
    return tuple(sizes)


def axes_to_cut(variable: SyncedVariable) -> tuple[int, ...]:
    """Returns the axes along which a variable can be divided into at least two shards."""
    if variable.elements == 0:
        return ()
    return tuple(axis for axis, length in enumerate(variable.shape) if length > 1)
