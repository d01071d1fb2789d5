"""Parts of the values of variables: those at the places of a mesh, and shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autodist.kernels import Context
from autodist.placement.partitioning import Partitioning, part_name, shard_name
from autodist.sharding import Mesh, Sharding

Values = dict[str, np.ndarray]


def part_of(value: np.ndarray, sharding: Sharding, mesh: Mesh, place: int) -> np.ndarray:
    """The part of a value that a place of a mesh holds."""
    for axis, names in enumerate(sharding.axes):
        value = np.split(value, mesh.count(names), axis)[mesh.index(place, names)]
    return value


def joined(parts: Mapping[int, np.ndarray], sharding: Sharding, mesh: Mesh) -> np.ndarray:
    """The value whose parts the places of a mesh hold; of equal parts, the last place's."""
    counts, first = [mesh.count(names) for names in sharding.axes], next(iter(parts.values()))
    whole = np.zeros([length * count for length, count in zip(first.shape, counts, strict=True)], first.dtype)
    for place, part in parts.items():
        starts = [mesh.index(place, names) * n for names, n in zip(sharding.axes, part.shape, strict=True)]
        whole[tuple(slice(start, start + n) for start, n in zip(starts, part.shape, strict=True))] = part
    return whole


def values_in_row(values: Sequence[Values], context: Context, cuts: Mapping[str, Partitioning]) -> Values:
    """The variables of a worker on a mesh, with the slices of all workers of its row joined."""
    row = [values[worker] for worker in context.group.workers]
    found = dict(values[context.worker])
    parts = [(part_name(name, k), cut) for name, cut in cuts.items() for k in range(len(context.coordinates))]
    for name, cut in parts:
        shards = [shard_name(name, k) for k in range(len(cut.sizes))]
        if not any(shard in mine for shard in shards for mine in row):
            continue  # the worker's coordinates have one part of the variable
        held = [[mine[shard] for mine in row if shard in mine] for shard in shards]
        assert all(len(copies) == 1 for copies in held), f"{name}: each slice has one owner in a row"
        found[name] = np.concatenate([copy for (copy,) in held], cut.axis)
    return found


def in_shards(values: Values, cuts: Mapping[str, Partitioning]) -> Values:
    """The values of whole variables, and of the shards of those that are cut."""
    found = {name: value for name, value in values.items() if name not in cuts}
    for name, cut in cuts.items():
        parts = np.split(values[name], cut.starts[1:], cut.axis)
        found.update({shard_name(name, k): part for k, part in enumerate(parts)})
    return found
