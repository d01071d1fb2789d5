"""Placement: the groups of variables, their slices and pipeline stages, resolved from a strategy."""

from __future__ import annotations

from autodist.placement.group import Group
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.strategies import all_reduce_node, parameter_server_node, partitioned_node
from autodist.synchronizers import AllReduce, ParameterServer, placement_of, stages_of
from tests.unit.placement.holders import held_by

OWNED, SHARED = parameter_server_node("owned", 1), all_reduce_node("shared")
HALVES = partitioned_node("halves", Partitioning(1, (2, 1)), [ParameterServer(2), AllReduce()])
CONFIG = strategy_pb2.GraphConfig(replicas=[strategy_pb2.Replica(worker=0)], workers=3)


def stage(*workers: int) -> strategy_pb2.PipelineStage:
    """A stage whose first worker is that of the first pipeline."""
    others = [strategy_pb2.PipelineStage(worker=worker) for worker in workers[1:]]
    return strategy_pb2.PipelineStage(worker=workers[0], stage_group=others)


PIPELINES = strategy_pb2.Strategy(
    nodes=[parameter_server_node("first", 0), parameter_server_node("second", 2)],
    graph_config=strategy_pb2.GraphConfig(workers=4),
    pipeline=strategy_pb2.Pipeline(stages=[stage(0, 1), stage(2, 3)]),
)


def test_each_slice_is_held_by_its_owner_or_by_all_workers():
    placement = placement_of(strategy_pb2.Strategy(nodes=[OWNED, SHARED, HALVES], graph_config=CONFIG))
    assert list(placement.owners) == ["owned", "shared", "halves"]
    assert placement.holder("owned", (4,)) == held_by((4,), [1], workers=3)
    assert placement.holder("shared", ()) == held_by((), workers=3)
    assert placement.holder("halves", (5, 3)) == held_by((5, 3), [2, None], Partitioning(1, (2, 1)), workers=3)
    assert placement.stages.pipelines == 1 and not placement.stages.groups


def test_the_workers_of_a_stage_hold_its_variables():
    placement = placement_of(PIPELINES)
    assert placement.holder("first", (2,)) == held_by((2,), [(0, 1)])
    assert placement.holder("second", (2,)) == held_by((2,), [(2, 3)])


def test_a_worker_has_a_stage_and_a_rank_among_the_workers_of_the_stage():
    stages = stages_of(PIPELINES)
    assert stages.pipelines == 2 and stages.groups == (Group.of_workers([0, 1]), Group.of_workers([2, 3]))
    assert [stages.rank_of(worker) for worker in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [stages.stage_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert [stages.group_of(owner).workers for owner in (2, 1)] == [(2, 3), (1,)]
