"""The processes with which an elastic run starts."""

from __future__ import annotations

import pytest

from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.quorum import Quorum
from autodist.cluster.environments.roster import Arrival
from autodist.runs.node_choice import processes_in_whole_rows
from autodist.strategies import AllReduce, Mesh


def hello(index: int) -> Hello:
    return Hello(index, None, f"n{index}", f"10.0.0.{index}", (0, 1), None, ())


def arrivals(*indices: int) -> list[Arrival]:
    return [Arrival(hello(index), f"10.0.0.{index}", "10.0.0.0") for index in indices]


def chosen(quorum: Quorum, *indices: int, replicas: int | None = None) -> list[int] | None:
    found = quorum.choose(hello(0), arrivals(*indices), replicas)
    return None if found is None else [arrival.hello.index for arrival in found]


def test_enough_processes_start_whichever_they_are() -> None:
    quorum = Quorum(3, 60.0, processes_in_whole_rows(AllReduce()))
    assert chosen(quorum, 4) is None
    assert chosen(quorum, 4, 2) == [2, 4]
    assert chosen(quorum, 3, 1, 2) == [1, 2, 3]
    assert chosen(Quorum(1, 60.0)) == []


def test_on_a_mesh_the_first_processes_that_form_whole_rows_start() -> None:
    rows = Quorum(2, 60.0, processes_in_whole_rows(Mesh({"data": -1, "model": 2})))
    assert chosen(rows) is None
    assert chosen(rows, 5) == [5]
    assert chosen(rows, 1, 2) == [1]
    assert chosen(rows, 1, 2, 7) == [1, 2, 7]
    assert chosen(rows, 1, 2, replicas=2) == [1, 2]


def test_on_a_mesh_of_fixed_sizes_only_one_number_of_processes_starts() -> None:
    fixed = processes_in_whole_rows(Mesh({"data": 2, "model": 2}))
    quorum = Quorum(2, 60.0, fixed)
    assert chosen(quorum, 1, 2) is None
    assert chosen(quorum, 1, 2, 3, 4) == [1, 2, 3]
    assert chosen(Quorum(5, 60.0, fixed), 1, 2, 3, 4) is None
    assert "all 6 processes are there, but no 5 or more of them form the mesh" in str(Quorum(5, 60.0, fixed).error(6))


@pytest.mark.parametrize(
    ("expected", "present", "waited", "is_met"),
    [
        ((), (1,), 59.9, False),
        ((), (1,), 60.0, True),
        ((1, 3), (1,), 59.9, False),
        ((1, 3), (1,), 60.0, True),
        ((1, 3), (1, 3), 0.0, True),
        ((1, 3), (1, 2, 3), 0.0, True),
    ],
)
def test_further_processes_are_waited_for_a_while_or_until_those_of_the_start_before_are_back(
    expected: tuple[int, ...], present: tuple[int, ...], waited: float, is_met: bool
) -> None:
    assert Quorum(2, 60.0, expected=expected).is_met(arrivals(*present), waited) is is_met
