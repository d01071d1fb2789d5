import pytest

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import AllReduce, check_strategy

SHAPES = {f"layer{index}/kernel": (4, 4) for index in range(5)}


def test_a_step_without_gradients_has_no_nodes(step, cluster):
    assert not AllReduce().build(step({"counter": ()}, without_gradient=["counter"]), cluster()).nodes


def test_every_variable_is_reduced_on_every_replica(step, cluster):
    planned, machines = step(SHAPES), cluster(workers=2, devices=2)
    strategy = AllReduce().build(planned, machines)
    check_strategy(strategy, planned, machines)
    assert strategy.builder == "AllReduce"
    assert [node.variable for node in strategy.nodes] == list(SHAPES)
    assert all(node.all_reduce.spec == strategy_pb2.AllReduce.AUTO for node in strategy.nodes)
    assert [(replica.worker, replica.device) for replica in strategy.graph_config.replicas] == [
        (0, "cpu:0"),
        (0, "cpu:1"),
        (1, "cpu:0"),
        (1, "cpu:1"),
    ]


def test_chunk_size_is_the_number_of_variables_in_a_group(step, cluster):
    strategy = AllReduce(chunk_size=2).build(step(SHAPES), cluster())
    assert [node.all_reduce.group for node in strategy.nodes] == [0, 0, 1, 1, 2]


def test_spec_reaches_every_node(step, cluster):
    strategy = AllReduce(all_reduce_spec="RING").build(step(SHAPES), cluster())
    assert {node.all_reduce.spec for node in strategy.nodes} == {strategy_pb2.AllReduce.RING}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunk_size": 0}, "chunk_size is 0, which is not allowed: input should be greater than or equal to 1"),
        ({"chunk_size": True}, "chunk_size is True, which is not allowed: input should be a valid integer"),
        ({"all_reduce_spec": "TREE"}, "all_reduce_spec is 'TREE'.*'AUTO', 'SHUFFLE', 'HIERARCHICAL', 'RING' or 'NCCL'"),
    ],
)
def test_options_out_of_range_are_refused_with_what_is_allowed(options, said):
    with pytest.raises(StrategyError, match=said):
        AllReduce(**options)
