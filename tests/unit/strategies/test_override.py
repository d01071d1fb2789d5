import logging

import pytest

from autodist.compressors import Float16, TopK, Uncompressed
from autodist.errors import Place, StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import (
    PS,
    AllReduce,
    Override,
    OverrideVariables,
    Partition,
    PartitionedPS,
    PSLoadBalancing,
    StrategyBuilder,
    UseAllReduce,
    UseParameterServer,
    all_reduce_node,
    all_reduce_synchronizer,
    check_strategy,
)

SHAPES = {"embedding/table": (100, 8), "dense/kernel": (8, 8), "dense/bias": (8,), "head/kernel": (8, 2)}
PLACE = Place("cluster.yml", 7, 'strategy.variables["x"]')


def build(step, machines, builder, *overrides, **kwargs):
    planned = step(SHAPES, **kwargs)
    strategy = OverrideVariables(builder, overrides).build(planned, machines)
    check_strategy(strategy, planned, machines)
    return {node.variable: node for node in strategy.nodes}


def test_without_overrides_the_nodes_are_the_builders_own(step, cluster):
    own = {node.variable: node for node in AllReduce().build(step(SHAPES), cluster()).nodes}
    assert build(step, cluster(), AllReduce()) == own


def test_only_matching_variables_change(step, cluster):
    own = build(step, cluster(), AllReduce())
    nodes = build(step, cluster(), AllReduce(), Override("embedding/.*", UseParameterServer(owner=1)))
    assert nodes["embedding/table"].parameter_server.owner == 1
    del nodes["embedding/table"], own["embedding/table"]
    assert nodes == own


def test_a_pattern_must_match_the_whole_name(step, cluster):
    nodes = build(step, cluster(), AllReduce(), Override("dense/k.*", UseParameterServer()))
    assert [name for name, node in nodes.items() if node.HasField("parameter_server")] == ["dense/kernel"]
    with pytest.raises(StrategyError, match="must match the whole name"):
        build(step, cluster(), AllReduce(), Override("dense/k", UseParameterServer()))


def test_the_first_match_wins(step, cluster):
    nodes = build(
        step,
        cluster(),
        AllReduce(),
        Override("dense/bias", UseParameterServer(owner=1)),
        Override("dense/.*", UseParameterServer(owner=0)),
    )
    assert nodes["dense/bias"].parameter_server.owner == 1
    assert nodes["dense/kernel"].parameter_server.owner == 0


def test_a_pattern_that_comes_too_late_is_said_in_the_log(step, cluster, caplog):
    with caplog.at_level(logging.WARNING, logger="autodist"):
        build(
            step,
            cluster(),
            AllReduce(),
            Override(".*", UseParameterServer(owner=0)),
            Override("dense/.*", UseParameterServer(owner=1), PLACE),
        )
    assert caplog.messages == [
        f"{PLACE}: The pattern 'dense/.*' changes nothing: patterns before it match all of its variables."
    ]


def test_a_parameter_server_without_owner_goes_where_the_load_is_least(step, cluster):
    shapes = [Override("embedding/table", UseParameterServer(owner=0)), Override("dense/.*", UseParameterServer())]
    nodes = build(step, cluster(2), AllReduce(), *shapes)
    assert nodes["dense/kernel"].parameter_server.owner == 1
    assert nodes["dense/bias"].parameter_server.owner == 1


def test_options_without_an_override_are_chosen_by_the_builder(step, cluster):
    own = build(step, cluster(), PSLoadBalancing())
    assert build(step, cluster(), PSLoadBalancing(), Override(".*", UseParameterServer())) == own
    ring = AllReduce(chunk_size=2, all_reduce_spec="RING")
    assert build(step, cluster(), ring, Override(".*", UseAllReduce())) == build(step, cluster(), ring)


def test_variables_taken_from_parameter_servers_form_a_group_of_their_own(step, cluster):
    nodes = build(step, cluster(), PS(), Override("dense/.*", UseAllReduce()))
    assert nodes["dense/kernel"].all_reduce == nodes["dense/bias"].all_reduce
    assert nodes["dense/kernel"].all_reduce.spec == strategy_pb2.AllReduce.AUTO
    mixed = build(
        step,
        cluster(),
        OverrideVariables(PS(), (Override("dense/.*", UseAllReduce(group=4)),)),
        Override("head/.*", UseAllReduce()),
    )
    assert mixed["head/kernel"].all_reduce.group == 5


def test_group_and_spec_are_taken_over(step, cluster):
    nodes = build(step, cluster(), PS(), Override("head/.*", UseAllReduce(group=3, all_reduce_spec="SHUFFLE")))
    assert nodes["head/kernel"].all_reduce.group == 3
    assert nodes["head/kernel"].all_reduce.spec == strategy_pb2.AllReduce.SHUFFLE


CUT = Partition(axis=0, shards=4)


def test_a_partition_is_dealt_to_the_workers_that_own_the_fewest_bytes(step, cluster):
    overrides = [
        Override("dense/kernel", UseParameterServer(owner=0)),
        Override("embedding/table", UseParameterServer(partition=CUT)),
    ]
    nodes = build(step, cluster(2), AllReduce(), *overrides)
    node = nodes["embedding/table"]
    assert (node.partition.axis, list(node.partition.sizes)) == (0, [25, 25, 25, 25])
    assert [shard.parameter_server.owner for shard in node.shards] == [1, 0, 1, 0]
    assert nodes["dense/kernel"].parameter_server.owner == 0


@pytest.mark.parametrize(
    ("owner", "owners"), [(1, [1] * 4), ("10.0.0.2", [1] * 4), ((1, "10.0.0.1", 1, 0), [1, 0, 1, 0])]
)
def test_owners_of_shards_are_one_for_all_or_one_for_each(step, cluster, owner, owners):
    use = UseParameterServer(owner=owner, partition=CUT, staleness=2, local_proxy_variable=True)
    node = build(step, cluster(2), AllReduce(), Override("embedding/table", use))["embedding/table"]
    assert [shard.parameter_server.owner for shard in node.shards] == owners
    assert {(shard.parameter_server.staleness, shard.parameter_server.local_proxy) for shard in node.shards} == {
        (2, True)
    }


@pytest.mark.parametrize(
    ("builder", "use", "has_proxy"),
    [
        (AllReduce(), UseParameterServer(), True),
        (AllReduce(), UseParameterServer(staleness=1), True),
        (PS(local_proxy_variable=False), UseParameterServer(staleness=1), False),
        (PS(), UseParameterServer(owner=1), True),
        (PS(local_proxy_variable=False), UseParameterServer(owner=1), False),
        (PS(), UseParameterServer(sync=False), True),
        (PS(sync=False), UseParameterServer(sync=True), True),
        (PS(sync=False, local_proxy_variable=False), UseParameterServer(sync=True), False),
        (PS(sync=False), UseParameterServer(sync=True, local_proxy_variable=False), False),
    ],
)
def test_a_proxy_suits_the_options_of_the_override(step, cluster, builder, use, has_proxy):
    node = build(step, cluster(2), builder, Override("dense/kernel", use))["dense/kernel"]
    assert node.parameter_server.local_proxy == has_proxy


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            UseParameterServer(owner=(0, 1), partition=CUT),
            "owner names 2 workers for embedding/table, .* has 4 shards",
        ),
        (UseParameterServer(owner=(0, 1)), "owner names 2 workers for embedding/table, which is whole; name one"),
        (UseParameterServer(owner=(0, 1, 2, 0), partition=CUT), "owner is 2, but there is no such worker"),
        (UseParameterServer(partition=Partition(2, 2)), "axis 2 is out of range of its shape 100 × 8"),
        (UseAllReduce(partition=Partition(1, 9)), "9 shards are more than the 8 indices of its axis 1"),
        (UseAllReduce(partition=Partition(sizes=(50, 49))), "sum to 99, but its axis 0 has 100 indices"),
    ],
)
def test_a_partition_that_cannot_be_had_is_refused_at_the_patterns_place(step, cluster, use, said):
    with pytest.raises(StrategyError, match=said) as caught:
        build(step, cluster(2), AllReduce(), Override("embedding/table", use, PLACE))
    assert caught.value.place == PLACE


def test_shards_are_all_reduced_like_the_whole_was(step, cluster):
    own = AllReduce(chunk_size=1, compressor=Float16())
    node = build(step, cluster(2), own, Override("dense/kernel", UseAllReduce(partition=Partition(1, sizes=(1, 7)))))[
        "dense/kernel"
    ]
    assert [shard.all_reduce for shard in node.shards] == [all_reduce_synchronizer(1, "AUTO", own.compressor)] * 2


def test_a_builders_cut_stays_unless_an_override_says_otherwise(step, cluster):
    own = PartitionedPS(min_partition_bytes=0, staleness=3)
    before = build(step, cluster(2), own)
    kept = build(step, cluster(2), own, Override("dense/kernel", UseParameterServer(sync=False)))["dense/kernel"]
    assert kept.partition == before["dense/kernel"].partition
    assert [one.parameter_server.owner for one in kept.shards] == [
        one.parameter_server.owner for one in before["dense/kernel"].shards
    ]
    assert all(one.parameter_server.asynchronous and one.parameter_server.staleness == 3 for one in kept.shards)
    reduced = build(step, cluster(2), own, Override("dense/kernel", UseAllReduce()))["dense/kernel"]
    assert reduced.partition == before["dense/kernel"].partition
    assert {one.WhichOneof("synchronizer") for one in reduced.shards} == {"all_reduce"}
    whole = build(step, cluster(2), own, Override("dense/kernel", UseParameterServer(partition=Partition(shards=1))))
    assert not whole["dense/kernel"].shards
    assert whole["dense/kernel"].parameter_server.staleness == 3


def test_a_builders_compressor_can_be_taken_away_from_what_cannot_have_it(step, cluster):
    own = AllReduce(compressor=TopK())
    with pytest.raises(StrategyError, match="embedding/table has the compressor TOP_K"):
        build(step, cluster(), own, sparse=["embedding/table"])
    nodes = build(
        step,
        cluster(),
        own,
        Override("embedding/.*", UseAllReduce(compressor=Uncompressed())),
        sparse=["embedding/table"],
    )
    assert nodes["embedding/table"] == all_reduce_node("embedding/table")
    assert nodes["dense/kernel"].all_reduce.compressor == own.compressor.to_message()


def test_a_spec_of_auto_can_be_asked_for(step, cluster):
    auto = Override(".*", UseAllReduce(all_reduce_spec="AUTO"))
    nodes = build(step, cluster(), AllReduce(all_reduce_spec="RING"), auto)
    assert {node.all_reduce.spec for node in nodes.values()} == {strategy_pb2.AllReduce.AUTO}


def test_variables_without_an_owner_go_to_nodes_without_replicas(step, cluster):
    nodes = build(step, cluster(3, servers=1), AllReduce(), Override("dense/.*", UseParameterServer()))
    assert {nodes[name].parameter_server.owner for name in ("dense/kernel", "dense/bias")} == {2}


def test_a_pattern_that_matches_nothing_is_refused_with_place_and_nearest_variables(step, cluster):
    with pytest.raises(StrategyError, match=r"'embeding/\.\*' matches no variable.* embedding/table") as caught:
        build(step, cluster(), AllReduce(), Override("embeding/.*", UseParameterServer(), PLACE))
    assert caught.value.place == PLACE


def test_a_pattern_that_matches_only_variables_without_gradient_says_so(step, cluster):
    with pytest.raises(StrategyError, match=r"no gradient in this step \(head/kernel\)"):
        build(step, cluster(), AllReduce(), Override("head/.*", UseParameterServer()), without_gradient=["head/kernel"])


def test_a_pattern_that_is_no_expression_is_refused():
    with pytest.raises(StrategyError, match=r"'dense[(]' is no regular expression"):
        Override("dense(", UseAllReduce(), PLACE)


def test_an_owner_that_does_not_exist_is_refused_at_the_patterns_place(step, cluster):
    with pytest.raises(StrategyError, match="owner is 5, but there is no such worker") as caught:
        build(step, cluster(), AllReduce(), Override("head/.*", UseParameterServer(owner=5), PLACE))
    assert caught.value.place == PLACE


def test_settings_out_of_range_are_refused():
    with pytest.raises(StrategyError, match="group is -1"):
        UseAllReduce(group=-1)
    with pytest.raises(StrategyError, match="owner is -1"):
        UseParameterServer(owner=-1)


def test_a_faulty_inner_strategy_is_named_not_mended_in_silence(step, cluster):
    class Twice(StrategyBuilder):
        def build(self, graph_item, resource_spec):
            strategy = AllReduce().build(graph_item, resource_spec)
            strategy.nodes.append(strategy.nodes[0])
            return strategy

    with pytest.raises(StrategyError, match="has 2 nodes for embedding/table"):
        build(step, cluster(), Twice(), Override("head/.*", UseParameterServer()))
