"""Mesh: the places of a run, arranged along named axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple


class Axis(NamedTuple):
    """A named axis of a mesh."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}: {self.size}"


@dataclass(frozen=True)
class Mesh:
    """An arrangement of places along named axes, of which the last varies fastest.

    Source: the `Mesh` of JAX and the mesh of Shardy.

    Attributes:
        axes: the axes, major first. A mesh without axes is a single place.
        places: the position in the run of the place at each point of the mesh; empty: their order in the run.
    """

    axes: tuple[Axis, ...]
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int], places: Iterable[int] = ()) -> Mesh:
        """Returns the mesh with these axes; `places` in their order in the run are left out."""
        axes = tuple(Axis(name, size) for name, size in sizes.items())
        listed = tuple(places)
        return cls(axes, () if listed == tuple(range(prod(sizes.values()))) and axes else listed)

    def __str__(self) -> str:
        axes = "{" + ", ".join(map(str, self.axes)) + "}"
        return f"{axes} over {', '.join(map(str, self.places))}" if self.places else axes

    @property
    def size(self) -> int:
        """The number of places."""
        return prod(axis.size for axis in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, by name."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, major first."""
        return tuple(axis.name for axis in self.axes)

    def count(self, axes: Iterable[str]) -> int:
        """Returns the number of parts into which some axes together divide a dimension."""
        return prod(self.sizes[name] for name in axes)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Returns axes in mesh order."""
        wanted = set(axes)
        return tuple(name for name in self.names if name in wanted)

    @cached_property
    def coordinates(self) -> dict[int, dict[str, int]]:
        """The coordinate on each axis, by position of a place in the run."""
        points = product(*(range(axis.size) for axis in self.axes))
        return {
            (self.places[k] if self.places else k): dict(zip(self.names, point, strict=True))
            for k, point in enumerate(points)
        }

    def index(self, place: int, axes: Iterable[str]) -> int:
        """Returns the part of a dimension that a place holds, if `axes`, major first, divide it."""
        found = 0
        for name in axes:
            found = found * self.sizes[name] + self.coordinates[place][name]
        return found

    def row(self, place: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Returns the places that differ from one place at most on `axes`, in the order of `index(…, axes)`."""
        along = tuple(axes)
        own = self.coordinates[place]
        members = [
            other for other, point in self.coordinates.items()
            if all(point[name] == own[name] for name in self.names if name not in along)
        ]  # fmt: skip
        return tuple(sorted(members, key=lambda other: self.index(other, along)))
