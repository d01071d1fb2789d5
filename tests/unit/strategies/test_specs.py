import pytest

from autodist.graph.placement import Cut
from autodist.proto import strategy_pb2
from autodist.strategies import (
    all_reduce_node,
    all_reduce_synchronizer,
    parameter_server_node,
    partitioned_node,
    resolve_specs,
)

SERVED = parameter_server_node("served", 0)


def resolved(*nodes):
    strategy = strategy_pb2.Strategy(nodes=nodes)
    before = strategy.SerializeToString(deterministic=True)
    after = resolve_specs(strategy)
    assert strategy.SerializeToString(deterministic=True) == before
    return [
        strategy_pb2.AllReduce.Spec.Name(node.all_reduce.spec) for node in after.nodes if node.HasField("all_reduce")
    ]


def test_a_strategy_without_auto_stays_as_it_is():
    nodes = [all_reduce_node("a", 3, "RING"), all_reduce_node("b", 1, "SHUFFLE"), SERVED]
    strategy = strategy_pb2.Strategy(nodes=nodes)
    assert resolve_specs(strategy) == strategy


def test_a_parameter_server_gets_no_spec():
    assert resolve_specs(strategy_pb2.Strategy(nodes=[SERVED])).nodes[0] == SERVED


def test_auto_alone_is_shuffle():
    assert resolved(all_reduce_node("a"), all_reduce_node("b")) == ["SHUFFLE", "SHUFFLE"]


@pytest.mark.parametrize("spec", ["SHUFFLE", "RING", "NCCL"])
def test_auto_follows_what_all_others_say(spec):
    assert resolved(all_reduce_node("a"), all_reduce_node("b", 0, spec)) == [spec, spec]


def test_auto_is_shuffle_where_others_differ_or_are_served():
    assert resolved(all_reduce_node("a"), all_reduce_node("b", 0, "RING"), SERVED) == ["SHUFFLE", "RING"]
    assert resolved(all_reduce_node("a"), all_reduce_node("b", 0, "RING"), all_reduce_node("c", 0, "SHUFFLE")) == [
        "SHUFFLE",
        "RING",
        "SHUFFLE",
    ]


def test_auto_of_a_shard_is_resolved_too():
    auto, ring = all_reduce_synchronizer(), all_reduce_synchronizer(spec="RING")
    cut = partitioned_node("a", Cut(0, (1, 1)), [auto, ring])
    (node,) = resolve_specs(strategy_pb2.Strategy(nodes=[cut])).nodes
    assert [shard.all_reduce.spec for shard in node.shards] == [strategy_pb2.AllReduce.RING] * 2
    beside = resolve_specs(strategy_pb2.Strategy(nodes=[cut, SERVED]))
    assert beside.nodes[0].shards[0].all_reduce.spec == strategy_pb2.AllReduce.SHUFFLE
