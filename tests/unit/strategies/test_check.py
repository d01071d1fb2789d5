import pytest

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import (
    AllReduce,
    all_reduce_node,
    check_strategy,
    make_strategy,
    parameter_server_node,
    synced_variables,
)

SHAPES = {"a": (4, 4), "b": (4,), "counter": ()}


@pytest.fixture
def planned(step):
    return step(SHAPES, without_gradient=["counter"])


@pytest.fixture
def check(planned, cluster):
    """Checks a strategy with these nodes."""

    def check_nodes(*nodes, machines=None):
        machines = machines or cluster(workers=2)
        check_strategy(make_strategy("Mine", machines, synced_variables(planned), nodes), planned, machines)

    return check_nodes


@pytest.mark.parametrize(
    "nodes",
    [
        [all_reduce_node("a"), all_reduce_node("b")],
        [all_reduce_node("a", 0, "SHUFFLE"), parameter_server_node("b", 1)],
        [all_reduce_node("a"), parameter_server_node("b", 1)],
        [all_reduce_node("a", 0, "RING"), all_reduce_node("b", 1, "RING")],
        [all_reduce_node("a", 0, "RING"), all_reduce_node("b")],
    ],
)
def test_what_can_be_carried_out_passes(check, nodes):
    check(*nodes)


def test_a_variable_that_is_not_in_the_graph_is_refused_with_the_nearest(step, cluster):
    planned, machines = step({"dense/kernel": (2,)}), cluster()
    strategy = make_strategy("Mine", machines, synced_variables(planned), [all_reduce_node("dense/kernle")])
    with pytest.raises(StrategyError, match=r"Mine has a node for 'dense/kernle'.*Did you mean dense/kernel[?]"):
        check_strategy(strategy, planned, machines)


def test_a_variable_without_gradient_is_refused(check):
    with pytest.raises(StrategyError, match="counter, which has no gradient; leave it out"):
        check(all_reduce_node("a"), all_reduce_node("b"), all_reduce_node("counter"))


def test_two_nodes_for_one_variable_are_refused(check):
    with pytest.raises(StrategyError, match="2 nodes for a; keep one"):
        check(all_reduce_node("a"), parameter_server_node("a", 0), all_reduce_node("b"))


def test_a_variable_that_would_drift_apart_is_refused(check):
    with pytest.raises(StrategyError, match="no node for b, which has a gradient: its copies would drift apart"):
        check(all_reduce_node("a"))


@pytest.mark.parametrize("owner", [-1, 2])
def test_an_owner_out_of_range_is_refused(check, owner):
    with pytest.raises(StrategyError, match=f"b is to be owned by worker {owner}, and there are 2 workers.*0.* to 1"):
        check(all_reduce_node("a"), parameter_server_node("b", owner))


def test_a_node_without_synchronizer_is_refused(check):
    with pytest.raises(StrategyError, match="b has a node without a synchronizer"):
        check(all_reduce_node("a"), strategy_pb2.VariableNode(variable="b"))


def test_a_spec_that_does_not_exist_is_refused(check):
    unknown = strategy_pb2.VariableNode(variable="b", all_reduce=strategy_pb2.AllReduce(spec=99))
    with pytest.raises(StrategyError, match=r"b is to be reduced by spec 99.*take one of AUTO, SHUFFLE, RING, NCCL"):
        check(all_reduce_node("a"), unknown)


@pytest.mark.parametrize(
    "cut",
    [
        {"partition": strategy_pb2.Partition(axis=0, sizes=[2, 2])},
        {"shards": [strategy_pb2.Shard(parameter_server=strategy_pb2.ParameterServer(owner=0))]},
    ],
)
def test_a_partition_is_refused_in_this_version(check, cut):
    node = strategy_pb2.VariableNode(variable="a", all_reduce=strategy_pb2.AllReduce(), **cut)
    with pytest.raises(StrategyError, match="a is to be partitioned, which this version cannot do"):
        check(node, all_reduce_node("b"))


@pytest.mark.parametrize("spec", ["RING", "NCCL"])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        (parameter_server_node("b", 0), "PS"),
        (all_reduce_node("b", 0, "SHUFFLE"), "SHUFFLE"),
    ],
)
def test_a_collective_beside_another_way_is_refused_and_shuffle_offered(check, cluster, spec, other, named):
    machines = cluster(workers=2, kind="gpus")
    with pytest.raises(StrategyError, match=f"a is reduced by {spec} and b by {named}: .*Take all_reduce_spec SHUFFLE"):
        check(all_reduce_node("a", 0, spec), other, machines=machines)


def test_ring_beside_nccl_is_refused(check, cluster):
    with pytest.raises(StrategyError, match="a is reduced by RING and b by NCCL"):
        check(all_reduce_node("a", 0, "RING"), all_reduce_node("b", 0, "NCCL"), machines=cluster(kind="gpus"))


def test_ring_beside_auto_and_a_parameter_server_is_refused(step, cluster):
    planned, machines = step({"a": (1,), "b": (1,), "c": (1,)}), cluster()
    nodes = [all_reduce_node("a"), all_reduce_node("b", 0, "RING"), parameter_server_node("c", 0)]
    strategy = make_strategy("Mine", machines, synced_variables(planned), nodes)
    with pytest.raises(StrategyError, match="b is reduced by RING and a by SHUFFLE"):
        check_strategy(strategy, planned, machines)


def test_ring_with_sparse_gradients_passes(language_model, cluster):
    strategy = AllReduce(all_reduce_spec="RING").build(language_model, cluster())
    check_strategy(strategy, language_model, cluster())


def test_nccl_needs_a_gpu_for_every_replica(check, cluster):
    nodes = [all_reduce_node("a", 0, "NCCL"), all_reduce_node("b", 0, "NCCL")]
    check(*nodes, machines=cluster(kind="gpus"))
    with pytest.raises(StrategyError, match=r"a is reduced by NCCL.*GP.*every replica, and 10.0.0.1 has one on cpu:0"):
        check(*nodes)


def test_replicas_of_other_machines_are_refused(planned, cluster):
    strategy = AllReduce().build(planned, cluster(workers=2))
    with pytest.raises(StrategyError, match="runs on the replicas worker 0 cpu:0, worker 1 cpu:0, and the resource"):
        check_strategy(strategy, planned, cluster(workers=3))
