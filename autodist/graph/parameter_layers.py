"""Layers of a model: variables that a step uses at about the same time, found by the paths of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autodist.graph.parameter_uses import ParameterUses
from autodist.graph.step import CapturedStep

LARGE = 8
"""A layer has at most one in `LARGE` of a model's bytes, unless it is a single variable."""

SMALL = 16
"""Variables of at most one in `SMALL` of a layer's bytes may join the layer next to them."""


def order_of_use(step: CapturedStep) -> dict[str, int]:
    """Maps the name of each variable that a step reads to its position in the order of first use."""
    reads = {name: effect.reads for name, effect in step.graph_index.effects.items() if not effect.writes}
    first = ParameterUses(step.graph_index, reads).first
    used: dict[str, int] = {}
    for read in filter(first.__contains__, reads):
        for handle in sorted(reads[read]):
            used[handle] = min(first[read], used.get(handle, first[read]))
    return {step.by_handle[handle].name: position for position, handle in enumerate(sorted(used, key=used.__getitem__))}


def find_layers(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Divides variables into layers by the paths of their names.

    Variables whose names begin alike are a layer: those of "model/block_3/…". A layer of more than one in `LARGE` of
    all bytes is divided further, down to single variables: an embedding is a layer of its own. Small layers that follow
    one another become one, of at most the size of the largest that is not a single large variable.

    >>> sizes = {"table": 90, "block_0/kernel": 10, "block_0/bias": 1, "block_1/kernel": 10, "block_1/bias": 1}
    >>> find_layers(sizes)
    [('table',), ('block_0/kernel', 'block_0/bias'), ('block_1/kernel', 'block_1/bias')]

    Args:
        sizes: the bytes of each variable, in the order of use.
    """
    most = sum(sizes.values()) / LARGE
    position = {name: k for k, name in enumerate(sizes)}
    groups = sorted(_divided(list(sizes), sizes, most, 0), key=lambda group: position[group[0]])
    usual = max((size for group in groups if (size := _bytes(group, sizes)) <= most), default=0)
    layers: list[list[str]] = []
    largest = 0
    for group in groups:
        size = _bytes(group, sizes)
        joined_largest = max(size, largest)
        if layers and _bytes(layers[-1], sizes) + size <= max(usual, joined_largest + joined_largest // SMALL):
            layers[-1] += group
            largest = joined_largest
        else:
            layers.append(list(group))
            largest = size
    return [tuple(layer) for layer in layers]


def _divided(names: Sequence[str], sizes: Mapping[str, int], most: float, depth: int) -> Iterable[Sequence[str]]:
    """Yields groups of names that agree in their first components, as many of these as needed."""
    if len(names) == 1 or (depth and _bytes(names, sizes) <= most):
        yield names
        return
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("/".join(name.split("/")[: depth + 1]), []).append(name)
    for group in groups.values():
        yield from _divided(group, sizes, most, depth + 1)


def _bytes(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in names)
