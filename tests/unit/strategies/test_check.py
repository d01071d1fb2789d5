import pytest

from autodist.compressors import BFloat16, Float16, PowerSGD, TopK, Uncompressed
from autodist.errors import Place, StrategyError
from autodist.graph.placement import Partitioning
from autodist.proto import strategy_pb2
from autodist.strategies import (
    SYNCHRONOUS,
    AllReduce,
    all_reduce_node,
    all_reduce_synchronizer,
    check_strategy,
    make_strategy,
    parameter_server_node,
    partitioned_node,
    synced_variables,
    whole_node,
)

SHAPES = {"a": (4, 4), "b": (4,), "counter": ()}


def served(*owners):
    return [SYNCHRONOUS.parameter_server(owner) for owner in owners]


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
    with pytest.raises(StrategyError, match="no node for b, which has a gradient: its copies would diverge"):
        check(all_reduce_node("a"))


@pytest.mark.parametrize("owner", [-1, 2])
def test_an_owner_out_of_range_is_refused_with_the_workers(check, owner):
    said = rf"b is to be owned by worker {owner}, but .*no such worker; the workers are 0 \(10.0.0.1\), 1 \(10.0.0.2\)"
    with pytest.raises(StrategyError, match=said):
        check(all_reduce_node("a"), parameter_server_node("b", owner))
    with pytest.raises(StrategyError, match="a is to be owned by worker"):
        check(partitioned_node("a", Partitioning(0, (2, 2)), served(0, owner)), all_reduce_node("b"))


def test_a_negative_staleness_is_refused(check):
    server = strategy_pb2.ParameterServer(owner=0, staleness=-1)
    with pytest.raises(StrategyError, match="b has staleness -1, .*; use 0 or more"):
        check(all_reduce_node("a"), whole_node("b", server))


def test_a_node_without_synchronizer_is_refused(check):
    with pytest.raises(StrategyError, match="b has a node without a synchronizer"):
        check(all_reduce_node("a"), strategy_pb2.VariableNode(variable="b"))


def test_a_spec_that_does_not_exist_is_refused(check):
    unknown = strategy_pb2.VariableNode(variable="b", all_reduce=strategy_pb2.AllReduce(spec=99))
    with pytest.raises(StrategyError, match=r"b has the all-reduce spec 99.*use one of AUTO, SHUFFLE, RING, NCCL"):
        check(all_reduce_node("a"), unknown)


@pytest.mark.parametrize(
    "cut", [Partitioning(0, (4,)), Partitioning(0, (1, 3)), Partitioning(1, (2, 1, 1)), Partitioning(0, (1, 1, 1, 1))]
)
def test_shards_that_add_up_pass(check, cut):
    check(partitioned_node("a", cut, served(*[1] * len(cut.sizes))), all_reduce_node("b"))
    check(partitioned_node("a", cut, [all_reduce_synchronizer()] * len(cut.sizes)), all_reduce_node("b"))


def test_shards_of_one_variable_may_differ_in_their_synchronizers(check):
    check(partitioned_node("a", Partitioning(0, (1, 3)), [all_reduce_synchronizer(), *served(1)]), all_reduce_node("b"))


def test_a_sparse_variable_may_be_cut_along_any_axis(step, cluster):
    planned, machines = step({"table": (8, 4)}, sparse=["table"]), cluster()
    node = partitioned_node("table", Partitioning(1, (1, 3)), served(0, 1))
    check_strategy(make_strategy("Mine", machines, synced_variables(planned), [node]), planned, machines)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (Partitioning(2, (2, 2)), "axis 2 is out of range of its shape 4 × 4; use an axis from 0 to 1"),
        (Partitioning(-1, (2, 2)), "axis -1 is out of range of its shape 4 × 4; use an axis from 0 to 1"),
        (Partitioning(0, (1,) * 5), "5 shards are more than the 4 indices of its axis 0 .*; use at most 4"),
        (
            Partitioning(0, (2, 1)),
            r"the sizes \[2, 1\] sum to 3, but its axis 0 has 4 indices .*; make them sum to 4",
        ),
        (
            Partitioning(1, (4, 0)),
            r"the sizes \[4, 0\] must be one or more lengths of at least 1; leave empty shards out",
        ),
        (Partitioning(1, (5, -1)), r"the sizes \[5, -1\] must be one or more lengths of at least 1"),
        (Partitioning(0, ()), r"the sizes \[\] must be one or more lengths of at least 1"),
    ],
)
def test_a_cut_that_cannot_be_made_is_refused_with_the_mend(check, cut, said):
    with pytest.raises(StrategyError, match=f"a cannot be partitioned: {said}"):
        check(partitioned_node("a", cut, served(*[0] * len(cut.sizes))), all_reduce_node("b"))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((), "it is a scalar, which has no axis to cut"),
        ((0, 3), "its shape is 0 × 3, so it has no element"),
        ((3, 0), "its shape is 3 × 0, so it has no element"),
    ],
)
def test_what_has_nothing_to_cut_cannot_be_partitioned(step, cluster, shape, said):
    planned, machines = step({"v": shape}), cluster()
    node = partitioned_node("v", Partitioning(0, (1, 2)), served(0, 1))
    with pytest.raises(StrategyError, match=f"v cannot be partitioned: {said}; leave its partition out"):
        check_strategy(make_strategy("Mine", machines, synced_variables(planned), [node]), planned, machines)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (
            partitioned_node("a", Partitioning(0, (2, 2)), served(0, 1, 1)),
            "a is cut in 2 pieces but has synchronizers for 3 shards",
        ),
        (
            strategy_pb2.VariableNode(variable="a", partition=strategy_pb2.Partition(sizes=[2, 2])),
            "a is cut in 2 pieces but has synchronizers for 0 shards",
        ),
        (
            strategy_pb2.VariableNode(variable="a", shards=[strategy_pb2.Shard(parameter_server=served(0)[0])]),
            "a has 1 shards but no partition with their sizes; add it",
        ),
        (
            strategy_pb2.VariableNode(
                variable="a", partition=strategy_pb2.Partition(sizes=[2, 2]), shards=[strategy_pb2.Shard()] * 2
            ),
            "a has a shard without a synchronizer",
        ),
        (
            strategy_pb2.VariableNode(
                variable="a",
                all_reduce=all_reduce_synchronizer(),
                partition=strategy_pb2.Partition(sizes=[4]),
                shards=[strategy_pb2.Shard(all_reduce=all_reduce_synchronizer())],
            ),
            "a is partitioned and has a synchronizer of its own that no shard would use; leave it out",
        ),
    ],
)
def test_a_partition_that_does_not_hang_together_is_refused(check, node, said):
    with pytest.raises(StrategyError, match=said):
        check(node, all_reduce_node("b"))


def compressed(**options):
    return whole_node("a", strategy_pb2.AllReduce(compressor=strategy_pb2.Compressor(**options)))


@pytest.mark.parametrize(
    "compressor",
    [
        Uncompressed(),
        Float16(),
        BFloat16(error_feedback=True),
        PowerSGD(rank=1),
        TopK(fraction=1),
    ],
)
def test_a_compressor_of_a_dense_gradient_passes(check, compressor):
    check(all_reduce_node("a", compressor=compressor), parameter_server_node("b", 0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"kind": "POWER_SGD", "error_feedback": True, "rank": 0},
            "cannot be compressed: the compressor POWER_SGD: rank is 0, which is not allowed",
        ),
        (
            {"kind": "TOP_K", "error_feedback": True},
            "the compressor TOP_K: fraction is 0.0, .* greater than 0",
        ),
        (
            {"kind": "TOP_K", "error_feedback": True, "fraction": 1.5},
            "TOP_K: fraction is 1.5, which",
        ),
        ({"kind": "TOP_K", "fraction": 0.5}, "TOP_K: error_feedback is False, but TOP_K does not converge without"),
        (
            {"kind": "POWER_SGD", "rank": 1},
            "but POWER_SGD does not converge without",
        ),
        (
            {"kind": 9},
            "compressor of kind 9 does not exist; use one of NONE, FLOAT16, BFLOAT16, POW",
        ),
    ],
)
def test_a_compressor_out_of_range_is_refused(check, options, said):
    with pytest.raises(StrategyError, match=f"a .*{said}"):
        check(compressed(**options), all_reduce_node("b"))


def test_a_compressor_of_a_sparse_gradient_is_refused_also_for_one_shard(step, cluster):
    planned, machines = step({"table": (8, 4)}, sparse=["table"]), cluster()
    lossy = all_reduce_synchronizer(compressor=Float16())
    for node in (whole_node("table", lossy), partitioned_node("table", Partitioning(0, (4, 4)), [*served(0), lossy])):
        with pytest.raises(StrategyError, match="table has the compressor FLOAT16, but its gradient is sparse.*NONE"):
            check_strategy(make_strategy("Mine", machines, synced_variables(planned), [node]), planned, machines)


def test_a_compressor_of_integers_is_refused(step, cluster):
    planned, machines = step({"counts": (8,)}, integers=["counts"]), cluster()
    strategy = AllReduce(compressor=TopK()).build(planned, machines)
    with pytest.raises(StrategyError, match="counts has the compressor TOP_K 1 % .*dtype int32 is not floating"):
        check_strategy(strategy, planned, machines)


@pytest.mark.parametrize("spec", ["RING", "NCCL"])
def test_a_compressor_of_a_collective_is_refused_and_shuffle_offered(check, cluster, spec):
    nodes = [all_reduce_node("a", 0, spec, Float16()), all_reduce_node("b", 0, spec)]
    with pytest.raises(StrategyError, match=f"a is reduced by {spec} and has the compressor FLOAT16: only SHUFFLE"):
        check(*nodes, machines=cluster(kind="gpus"))


def test_a_compressor_with_auto_beside_a_collective_is_refused(check):
    nodes = [all_reduce_node("a", compressor=Float16()), all_reduce_node("b", 0, "RING")]
    with pytest.raises(StrategyError, match="a is reduced by RING and has the compressor FLOAT16"):
        check(*nodes)


def test_a_collective_beside_a_shard_of_another_way_is_refused(check):
    cut = partitioned_node("b", Partitioning(0, (2, 2)), [all_reduce_synchronizer(spec="RING"), *served(0)])
    with pytest.raises(StrategyError, match="a is reduced by RING and b by PS"):
        check(all_reduce_node("a", 0, "RING"), cut)
    with pytest.raises(StrategyError, match="b is reduced by RING and a by PS"):
        check(parameter_server_node("a", 0), cut)


def test_a_collective_needs_a_replica_on_every_worker(check, cluster):
    machines = cluster(workers=3, servers=1)
    check(all_reduce_node("a"), parameter_server_node("b", 2), machines=machines)
    with pytest.raises(StrategyError, match="a is reduced by RING, .*but 10.0.0.3 has no replica; use .*SHUFFLE"):
        check(all_reduce_node("a", 0, "RING"), all_reduce_node("b", 0, "RING"), machines=machines)


def test_the_place_of_the_option_at_fault_is_told(planned, cluster):
    def place_of(variable, option):
        return Place("cluster.yml", 7, f"{variable}.{option}")

    machines = cluster()
    faults = {
        "b.owner": parameter_server_node("b", 9),
        "b.partition": partitioned_node("b", Partitioning(1, (1,)), served(0)),
        "b.staleness": whole_node("b", strategy_pb2.ParameterServer(staleness=-1)),
        "b.compressor": whole_node("b", strategy_pb2.AllReduce(compressor=strategy_pb2.Compressor(kind=9))),
        "b.all_reduce_spec": all_reduce_node("b", 0, "RING"),
    }
    for key, node in faults.items():
        nodes = [parameter_server_node("a", 0), node]
        strategy = make_strategy("Mine", machines, synced_variables(planned), nodes)
        with pytest.raises(StrategyError) as caught:
            check_strategy(strategy, planned, machines, place_of)
        assert caught.value.place == Place("cluster.yml", 7, key)


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
    with pytest.raises(StrategyError, match=f"a is reduced by {spec} and b by {named}: .*Use all_reduce_spec SHUFFLE"):
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
    with pytest.raises(StrategyError, match=r"a is reduced by NCCL.*GP.*every replica, but 10.0.0.1 has one on cpu:0"):
        check(*nodes)


def test_replicas_of_other_machines_are_refused(planned, cluster):
    strategy = AllReduce().build(planned, cluster(workers=2))
    with pytest.raises(StrategyError, match="runs on the replicas worker 0 cpu:0, worker 1 cpu:0, but the resource"):
        check_strategy(strategy, planned, cluster(workers=3))
