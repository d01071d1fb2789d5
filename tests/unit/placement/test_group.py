"""Group: places in rank order, and the workers that receive results."""

from __future__ import annotations

from autodist.placement.group import Group, Place
from autodist.proto import strategy_pb2


def config(*workers: int, count: int = 0) -> strategy_pb2.GraphConfig:
    replicas = [strategy_pb2.Replica(worker=worker, device=f"gpu:{k}") for k, worker in enumerate(workers)]
    return strategy_pb2.GraphConfig(replicas=replicas, workers=count)


def test_the_group_of_a_run_has_all_replicas_and_other_workers_receive():
    group = Group.of_run(config(0, 0, 2, count=4))
    assert group.places == (Place(0, "gpu:0"), Place(0, "gpu:1"), Place(2, "gpu:2"))
    assert (group.size, group.workers, group.receivers, group.everyone) == (3, (0, 2), (1, 3), (0, 2, 1, 3))
    assert (group.ranks(0), group.ranks(2), group.ranks(3)) == ((0, 1), (2,), ())
    assert 2 in group and 3 not in group
    assert group.spans_workers and not Group.of_run(config(0, 0)).spans_workers


def test_the_order_of_places_is_the_order_of_workers():
    assert Group.of_workers([3, 1]).workers == (3, 1)
    assert Group.of_workers([3, 1]) != Group.of_workers([1, 3])


def test_groups_have_keys_of_their_own_and_that_of_everyone_is_empty():
    groups = [Group.of_workers([0, 1]), Group.of_workers([1, 0]), Group((Place(0, "gpu:1"), Place(1, "gpu:1")))]
    assert len({group.key for group in groups}) == 3
    assert Group.of_run(config(0, 1)).key == Group.all_workers(2).key == ""
