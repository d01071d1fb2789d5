"""The pairs of machines that are measured, and the report on the others."""

from __future__ import annotations

import pytest

from autodist.cli.checking import links
from autodist.cli.checking.links import MeasuredLink, MeasureOrder, measure, pairs_of
from autodist.resources import ResourceSpec
from tests.unit.cli.checking.fakes import THREE, found


def measured_as(monkeypatch: pytest.MonkeyPatch, count: int, problem: str | None = None) -> list[MeasureOrder]:
    """Records the measuring orders from now on, and simulates `count` measured pairs for each."""
    orders: list[MeasureOrder] = []

    def run(order: MeasureOrder, limit: float) -> tuple[list[MeasuredLink], str | None]:
        orders.append(order)
        return [
            MeasuredLink(round_trip=1e-4, there=1e9, back=1e9).named(*pair) for pair in order.pairs[:count]
        ], problem

    monkeypatch.setattr(links, "_run", run)
    return orders


def test_each_pair_is_measured_once_between_workers_on_the_machines_own_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = measured_as(monkeypatch, 3)
    measured = measure(THREE, [found(0), found(1), found(2)], 60)
    assert [(link.one, link.other) for link in measured.links] == [
        ("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.0.0.3"), ("10.0.0.2", "10.0.0.3"),
    ]  # fmt: skip
    assert measured.left_out == ()
    assert [node.port for node in ResourceSpec.from_payload(orders[0].spec).nodes] == [15000] * 3


def test_machines_with_a_fault_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    (order,) = _orders(monkeypatch, [0, 2])
    assert order.pairs == (("10.0.0.1", "10.0.0.3"),)


def _orders(monkeypatch: pytest.MonkeyPatch, machines: list[int]) -> list[MeasureOrder]:
    orders = measured_as(monkeypatch, 3)
    measure(THREE, [found(index) for index in machines], 60)
    return orders


def test_one_machine_is_measured_between_two_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = measured_as(monkeypatch, 1)
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "gpus": [0, 1, 2], "workers": 3}]})
    assert measure(spec, [found(0, spec)], 60).left_out == ()
    assert orders[0].pairs == (("localhost:0", "localhost:1"),)


def test_nothing_is_started_where_there_is_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _orders(monkeypatch, [0]) == []


def test_skipped_measurements_are_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, 1)
    (reported,) = measure(THREE, [found(0), found(1), found(2)], 60).left_out
    assert reported == (
        "2 of 3 pairs were not measured (10.0.0.1 and 10.0.0.3, 10.0.0.2 and 10.0.0.3): 60 s were over; `--seconds` "
        "sets the limit"
    )
    measured_as(monkeypatch, 2, "10.0.0.3 was ended by SIGKILL")
    (reported,) = measure(THREE, [found(0), found(1), found(2)], 60).left_out
    assert reported.endswith("(10.0.0.2 and 10.0.0.3): 10.0.0.3 was ended by SIGKILL")


def test_the_chiefs_pairs_come_first_however_many_there_are() -> None:
    pairs = pairs_of([str(number) for number in range(10)])
    assert len(pairs) == len(set(pairs)) == 45
    assert {one for one, _ in pairs[:9]} == {"0"}
