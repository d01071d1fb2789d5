"""Layouts of variables follow from the slices that places hold."""

from __future__ import annotations

import pytest

from autodist.placement.group import Group, Place
from autodist.placement.holder import Holder
from autodist.placement.layouts import held_layout
from autodist.placement.partitioning import Partitioning
from autodist.sharding import Mesh

MESH = Mesh.of({"data": 2, "model": 2})
WORKERS = [Place(k) for k in range(4)]
DEVICES = [Place(0, f"cpu:{k}") for k in range(4)]
ON_TWO = [Place(k // 2, f"cpu:{k % 2}") for k in range(4)]


def groups(*members: tuple[int, ...], places=WORKERS) -> list[Group]:
    return [Group(tuple(places[k] for k in some)) for some in members]


@pytest.mark.parametrize("places", [WORKERS, DEVICES, ON_TWO], ids=["workers", "devices", "both"])
@pytest.mark.parametrize(
    ("counts", "members", "expected"),
    [
        ((1, 2), [(0, 2), (1, 3)], (None, "model")),
        ((2, 2), [(0,), (1,), (2,), (3,)], ("data", "model")),
        ((2, 2), [(0,), (2,), (1,), (3,)], ("model", "data")),
        ((4, 1), [(0,), (1,), (2,), (3,)], (("data", "model"), None)),
        ((4, 1), [(0,), (2,), (1,), (3,)], (("model", "data"), None)),
    ],
)
def test_axes_divide_the_dimension_in_which_their_places_differ(counts, members, expected, places):
    holder = Holder.divided((8, 4), counts, groups(*members, places=places))
    assert held_layout(holder, MESH, places) == expected


def test_uneven_slices_and_whole_variables():
    uneven = Holder.partitioned((5, 4), Partitioning(0, (3, 2)), groups((0, 1), (2, 3)))
    assert held_layout(uneven, MESH, WORKERS) == ("data", None)
    assert held_layout(Holder.whole((5, 4), Group.all_workers(4)), MESH, WORKERS) == (None, None)
    assert held_layout(Holder.whole((), Group.of_workers((2,))), MESH, WORKERS) == ()
