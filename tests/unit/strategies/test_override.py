import logging

import pytest

from autodist.errors import Place, StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import (
    PS,
    AllReduce,
    Override,
    OverrideVariables,
    PSLoadBalancing,
    StrategyBuilder,
    UseAllReduce,
    UseParameterServer,
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


def test_what_an_override_leaves_open_stays_the_builders_choice(step, cluster):
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
    with pytest.raises(StrategyError, match="owner is 5, and there is no such worker") as caught:
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
