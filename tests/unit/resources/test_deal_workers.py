"""The assignment of devices to workers is an even partition in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.resources import ResourceSpec
from autodist.resources._workers import split_evenly

HANDS = st.integers(1, 6)
SIZES = st.integers(1, 5)


@given(hands=HANDS, size=st.integers(0, 5), extra=st.integers(0, 5))
def test_dealing_is_an_even_partition_in_order(hands: int, size: int, extra: int) -> None:
    items = list(range(hands * size + extra % hands))
    if len(items) % hands:
        with pytest.raises(ValueError, match="cannot be split evenly"):
            split_evenly(items, hands)
        return
    parts = split_evenly(items, hands)
    assert [item for part in parts for item in part] == items
    assert [len(part) for part in parts] == [size] * hands


@given(gpus=st.lists(st.integers(0, 99), unique=True, min_size=1, max_size=12), data=st.data())
def test_gpus_of_all_workers_joined_are_the_nodes_gpus(gpus: list[int], data: st.DataObject) -> None:
    workers = data.draw(st.sampled_from([count for count in range(1, len(gpus) + 1) if len(gpus) % count == 0]))
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "gpus": gpus, "workers": workers}]})
    assert [replica.device for replica in spec.replicas] == [f"gpu:{gpu}" for gpu in gpus]
    assert {len(worker.devices) for worker in spec.workers} == {len(gpus) // workers}


@given(shapes=st.lists(st.tuples(HANDS, SIZES), min_size=1, max_size=5), data=st.data())
def test_workers_and_replicas_are_numbered_in_order(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    chief = data.draw(st.integers(0, len(shapes) - 1))
    spec = ResourceSpec.from_dict(
        {
            "nodes": [
                {"address": f"n{i}", "chief": i == chief, "cpus": list(range(w * s)), "workers": w, "port": 15000}
                for i, (w, s) in enumerate(shapes)
            ]
        }
    )
    workers, replicas = spec.workers, spec.replicas
    assert [worker.index for worker in workers] == list(range(sum(w for w, _ in shapes)))
    assert [replica.index for replica in replicas] == list(range(sum(w * s for w, s in shapes)))
    assert [replica.worker for replica in replicas] == [worker for worker in workers for _ in worker.devices]
    others = [i for i in range(len(shapes)) if i != chief]
    assert [worker.node.address for worker in workers] == [
        f"n{i}" for i in [chief, *others] for _ in range(shapes[i][0])
    ]
    assert [worker.port for worker in workers] == [15000 + p for i in [chief, *others] for p in range(shapes[i][0])]
    assert all(worker.devices == tuple(f"cpu:{p}" for p in range(len(worker.devices))) for worker in workers)
    assert len({worker.name for worker in workers}) == len(workers)


def test_places_are_numbered_by_kind_over_all_machines() -> None:
    nodes = [
        {"address": "a", "gpus": [1, 3], "chief": True, "port": 15000},
        {"address": "b", "cpus": [0, 1, 2, 3], "workers": 2, "port": 15000},
        {"address": "c", "gpus": [0], "port": 15000},
        {"address": "d", "cpus": [], "port": 15000},
    ]
    spec = ResourceSpec.from_dict({"nodes": nodes})
    assert spec.places == ("gpu:0", "gpu:1", "cpu:0", "cpu:1", "cpu:2", "cpu:3", "gpu:2")
    assert spec.with_micro_batches(4).places == spec.places
