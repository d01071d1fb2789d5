from types import SimpleNamespace

import pytest

from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies import (
    all_reduce_node,
    all_reduce_synchronizer,
    parameter_server_node,
    partitioned_node,
    resolve_specs,
)


def resolve(strategy, workers=1, bandwidth=10):
    names = [node.variable for node in strategy.nodes]
    kind = SimpleNamespace(name="float32", is_floating=True)
    step = SimpleNamespace(
        variables=[SimpleNamespace(name=n, shape=(1 << 20,), dtype=kind, byte_size=4 << 20) for n in names],
        gradients=[SimpleNamespace(variable=name, is_sparse=False) for name in names],
    )
    nodes = [{"address": f"10.0.0.{k + 1}", "cpus": [0], "network_bandwidth": bandwidth} for k in range(workers)]
    nodes[0]["chief"] = True
    return resolve_specs(strategy, step, ResourceSpec.from_dict({"nodes": nodes}))


SERVED = parameter_server_node("served", 0)


def resolved(*nodes):
    strategy = strategy_pb2.Strategy(nodes=nodes)
    before = strategy.SerializeToString(deterministic=True)
    after = resolve(strategy)
    assert strategy.SerializeToString(deterministic=True) == before
    return [
        strategy_pb2.AllReduce.Spec.Name(node.all_reduce.spec) for node in after.nodes if node.HasField("all_reduce")
    ]


def test_a_strategy_without_auto_stays_as_it_is():
    nodes = [all_reduce_node("a", 3, "RING"), all_reduce_node("b", 1, "SHUFFLE"), SERVED]
    strategy = strategy_pb2.Strategy(nodes=nodes)
    assert resolve(strategy) == strategy


def test_a_parameter_server_gets_no_spec():
    assert resolve(strategy_pb2.Strategy(nodes=[SERVED])).nodes[0] == SERVED


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
    cut = partitioned_node("a", Partitioning(0, (1, 1)), [auto, ring])
    (node,) = resolve(strategy_pb2.Strategy(nodes=[cut])).nodes
    assert [shard.all_reduce.spec for shard in node.shards] == [strategy_pb2.AllReduce.RING] * 2
    beside = resolve(strategy_pb2.Strategy(nodes=[cut, SERVED]))
    assert beside.nodes[0].shards[0].all_reduce.spec == strategy_pb2.AllReduce.SHUFFLE


def spec_and_teams(spec, workers, **options):
    after = resolve(strategy_pb2.Strategy(nodes=[all_reduce_node("a", 0, spec)]), workers, **options)
    return strategy_pb2.AllReduce.Spec.Name(after.nodes[0].all_reduce.spec), len(set(after.graph_config.subgroups))


def test_auto_is_hierarchical_on_many_workers():
    assert spec_and_teams("AUTO", 4) == ("SHUFFLE", 0)
    assert spec_and_teams("AUTO", 16) == ("HIERARCHICAL", 4)
    assert spec_and_teams("AUTO", 144) == ("HIERARCHICAL", 12)


def test_shuffle_that_is_asked_for_stays_without_teams():
    assert spec_and_teams("SHUFFLE", 64) == ("SHUFFLE", 0)
    assert spec_and_teams("RING", 64) == ("RING", 0)


def test_hierarchical_that_is_asked_for_has_teams_wherever_there_can_be_any():
    assert spec_and_teams("HIERARCHICAL", 3) == ("SHUFFLE", 0)
    assert spec_and_teams("HIERARCHICAL", 4) == ("HIERARCHICAL", 2)


def test_other_sums_of_a_step_with_servers_use_subgroups_on_many_workers():
    assert len(set(resolve(strategy_pb2.Strategy(nodes=[SERVED]), 16).graph_config.subgroups)) == 4
