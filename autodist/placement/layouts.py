"""Layouts of variables, from the slices that the places of a mesh hold."""

from __future__ import annotations

from collections.abc import Sequence

from autodist.placement.group import Place
from autodist.placement.holder import Holder, Slice
from autodist.sharding import Mesh

HeldLayout = tuple[str | tuple[str, ...] | None, ...]


def held_layout(holder: Holder, mesh: Mesh, places: Sequence[Place]) -> HeldLayout:
    """Returns, for each dimension of a variable, the axis of a mesh that divides it, several (major first) or None.

    An axis divides a dimension if places that differ on it alone hold slices with different starts.

    Args:
        holder: the groups that hold the variable.
        mesh: the mesh.
        places: the place at each point of the mesh, in order.
    """
    held = [_held_by(holder, place) for place in places]
    entries: list[str | tuple[str, ...] | None] = []
    for dimension in range(len(holder.slices[0].begin)):
        distances = {
            name: max(
                _distance([held[other] for other in mesh.row(place, [name])], dimension) for place in mesh.coordinates
            )
            for name in mesh.names
        }
        axes = sorted((name for name in mesh.names if distances[name]), key=lambda name: -distances[name])
        entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return tuple(entries)


def _held_by(holder: Holder, place: Place) -> Slice | None:
    """Returns the slice that a place holds; None if other places of its worker, or other workers, hold it."""
    own = [one for one in holder.slices if place.worker in one.group]
    exact = [one for one in own if place in one.group.places]
    return next(iter(exact or own), None)


def _distance(row: Sequence[Slice | None], dimension: int) -> int:
    """Returns the distance between the first two different starts of the slices of a row, along a dimension."""
    begins = sorted({one.begin[dimension] for one in row if one is not None})
    return begins[1] - begins[0] if len(begins) > 1 else 0
