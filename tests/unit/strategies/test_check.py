import pytest

from autodist.compressors import BFloat16, Float16, PowerSGD, TopK, Uncompressed
from autodist.errors import Place, StrategyError
from autodist.placement.partitioning import Partitioning
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
def test_valid_strategies_pass(check, nodes):
    check(*nodes)


def test_a_variable_that_is_not_in_the_graph_is_refused_with_the_nearest(step, cluster):
    planned, machines = step({"dense/kernel": (2,)}), cluster()
    strategy = make_strategy("Mine", machines, synced_variables(planned), [all_reduce_node("dense/kernle")])
    with pytest.raises(StrategyError, match=r"Mine has a node for 'dense/kernle'.*Did you mean dense/kernel[?]"):
        check_strategy(strategy, planned, machines)


def shards(cut, *synchronizers):
    """Returns a partitioned node of `a`."""
    return partitioned_node("a", cut, synchronizers or served(*[0] * len(cut.sizes)))


def compressed(**options):
    return whole_node("a", strategy_pb2.AllReduce(compressor=strategy_pb2.Compressor(**options)))


A, B = all_reduce_node("a"), all_reduce_node("b")
RING_A, RING_B = all_reduce_node("a", 0, "RING"), all_reduce_node("b", 0, "RING")
HALVES = Partitioning(0, (2, 2))
WORKERS = r"no such worker; the workers are 0 \(10.0.0.1\), 1 \(10.0.0.2\)"
B_IN_TWO_WAYS = partitioned_node("b", HALVES, [all_reduce_synchronizer(spec="RING"), *served(0)])

REFUSED = {
    "a variable without gradient": ([A, B, all_reduce_node("counter")], "counter, which has no gradient; leave it out"),
    "two nodes for one variable": ([A, parameter_server_node("a", 0), B], "2 nodes for a; keep one"),
    "a variable without node": ([A], "no node for b, which has a gradient: its copies would diverge"),
    "a negative owner": (
        [A, parameter_server_node("b", -1)],
        f"b is to be owned by worker -1, but .*{WORKERS}",
    ),
    "an owner that is no worker": (
        [A, parameter_server_node("b", 2)],
        f"b is to be owned by worker 2, but .*{WORKERS}",
    ),
    "a negative owner of a shard": ([shards(HALVES, *served(0, -1)), B], "a is to be owned by worker -1"),
    "an owner of a shard that is no worker": ([shards(HALVES, *served(0, 2)), B], "a is to be owned by worker 2"),
    "a negative staleness": (
        [A, whole_node("b", strategy_pb2.ParameterServer(owner=0, staleness=-1))],
        "b has staleness -1, .*; use 0 or more",
    ),
    "a node without synchronizer": (
        [A, strategy_pb2.VariableNode(variable="b")],
        "b has a node without a synchronizer",
    ),
    "an unknown spec": (
        [A, strategy_pb2.VariableNode(variable="b", all_reduce=strategy_pb2.AllReduce(spec=99))],
        "b has the all-reduce spec 99.*use one of AUTO, SHUFFLE, RING, NCCL",
    ),
    "an axis that is too high": (
        [shards(Partitioning(2, (2, 2))), B],
        "a cannot be partitioned: axis 2 is out of range of its shape 4 × 4; use an axis from 0 to 1",
    ),
    "a negative axis": (
        [shards(Partitioning(-1, (2, 2))), B],
        "a cannot be partitioned: axis -1 is out of range of its shape 4 × 4; use an axis from 0 to 1",
    ),
    "more shards than indices": (
        [shards(Partitioning(0, (1,) * 5)), B],
        "a cannot be partitioned: 5 shards are more than the 4 indices of its axis 0 .*; use at most 4",
    ),
    "sizes with another sum": (
        [shards(Partitioning(0, (2, 1))), B],
        r"a cannot be partitioned: the sizes \[2, 1\] sum to 3, but its axis 0 has 4 indices .*; make them sum to 4",
    ),
    "an empty shard": (
        [shards(Partitioning(1, (4, 0))), B],
        r"the sizes \[4, 0\] must be one or more lengths of at least 1; leave empty shards out",
    ),
    "a negative size": (
        [shards(Partitioning(1, (5, -1))), B],
        r"a cannot be partitioned: the sizes \[5, -1\] must be one or more lengths of at least 1",
    ),
    "no sizes": (
        [partitioned_node("a", Partitioning(0, ()), []), B],
        r"a cannot be partitioned: the sizes \[\] must be one or more lengths of at least 1",
    ),
    "more synchronizers than shards": (
        [shards(HALVES, *served(0, 1, 1)), B],
        "a is cut in 2 pieces but has synchronizers for 3 shards",
    ),
    "shards without synchronizers": (
        [strategy_pb2.VariableNode(variable="a", partition=strategy_pb2.Partition(sizes=[2, 2])), B],
        "a is cut in 2 pieces but has synchronizers for 0 shards",
    ),
    "shards without partition": (
        [strategy_pb2.VariableNode(variable="a", shards=[strategy_pb2.Shard(parameter_server=served(0)[0])]), B],
        "a has 1 shards but no partition with their sizes; add it",
    ),
    "a shard with an empty synchronizer": (
        [
            strategy_pb2.VariableNode(
                variable="a", partition=strategy_pb2.Partition(sizes=[2, 2]), shards=[strategy_pb2.Shard()] * 2
            ),
            B,
        ],
        "a has a shard without a synchronizer",
    ),
    "a synchronizer of the whole beside those of shards": (
        [
            strategy_pb2.VariableNode(
                variable="a",
                all_reduce=all_reduce_synchronizer(),
                partition=strategy_pb2.Partition(sizes=[4]),
                shards=[strategy_pb2.Shard(all_reduce=all_reduce_synchronizer())],
            ),
            B,
        ],
        "a is partitioned and has a synchronizer of its own that no shard would use; leave it out",
    ),
    "a rank of 0": (
        [compressed(kind="POWER_SGD", error_feedback=True, rank=0), B],
        "a .*cannot be compressed: the compressor POWER_SGD: rank is 0, which is not allowed",
    ),
    "a fraction of 0": (
        [compressed(kind="TOP_K", error_feedback=True), B],
        "a .*the compressor TOP_K: fraction is 0.0, .* greater than 0",
    ),
    "a fraction above 1": (
        [compressed(kind="TOP_K", error_feedback=True, fraction=1.5), B],
        "a .*TOP_K: fraction is 1.5, which",
    ),
    "TopK without error feedback": (
        [compressed(kind="TOP_K", fraction=0.5), B],
        "a .*TOP_K: error_feedback is False, but TOP_K does not converge without",
    ),
    "PowerSGD without error feedback": (
        [compressed(kind="POWER_SGD", rank=1), B],
        "a .*but POWER_SGD does not converge without",
    ),
    "an unknown compressor": (
        [compressed(kind=9), B],
        "a .*compressor of kind 9 does not exist; use one of NONE, FLOAT16, BFLOAT16, POW",
    ),
    "a compressor with AUTO beside a collective": (
        [all_reduce_node("a", compressor=Float16()), RING_B],
        "a is reduced by RING and has the compressor FLOAT16",
    ),
    "a collective beside a shard on a server": ([RING_A, B_IN_TWO_WAYS], "a is reduced by RING and b by PS"),
    "a server beside a shard of a collective": (
        [parameter_server_node("a", 0), B_IN_TWO_WAYS],
        "b is reduced by RING and a by PS",
    ),
    "NCCL without GPUs": (
        [all_reduce_node("a", 0, "NCCL"), all_reduce_node("b", 0, "NCCL")],
        "a is reduced by NCCL.*GP.*every replica, but 10.0.0.1 has one on cpu:0",
    ),
}


@pytest.mark.parametrize(("nodes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_strategy_that_cannot_be_carried_out_is_refused(check, nodes, message):
    with pytest.raises(StrategyError, match=message):
        check(*nodes)


REFUSED_ON_GPUS = {
    **{
        f"{spec} with a compressor": (
            [all_reduce_node("a", 0, spec, Float16()), all_reduce_node("b", 0, spec)],
            f"a is reduced by {spec} and has the compressor FLOAT16: only SHUFFLE",
        )
        for spec in ("RING", "NCCL")
    },
    **{
        f"{spec} beside {name}": (
            [all_reduce_node("a", 0, spec), other],
            f"a is reduced by {spec} and b by {name}: .*Use all_reduce_spec SHUFFLE",
        )
        for spec in ("RING", "NCCL")
        for name, other in {"PS": parameter_server_node("b", 0), "SHUFFLE": all_reduce_node("b", 0, "SHUFFLE")}.items()
    },
    "RING beside NCCL": ([RING_A, all_reduce_node("b", 0, "NCCL")], "a is reduced by RING and b by NCCL"),
}


@pytest.mark.parametrize(("nodes", "message"), REFUSED_ON_GPUS.values(), ids=REFUSED_ON_GPUS)
def test_a_collective_beside_another_way_is_refused_also_on_gpus(check, cluster, nodes, message):
    with pytest.raises(StrategyError, match=message):
        check(*nodes, machines=cluster(kind="gpus"))


@pytest.mark.parametrize("spec", ["RING", "NCCL"])
def test_a_collective_is_refused_if_ssh_carries_the_traffic(check, cluster, spec):
    machines = cluster(kind="gpus").model_copy(update={"encrypt": "ssh"})
    nodes = [all_reduce_node("a", 0, spec), all_reduce_node("b", 0, spec)]
    with pytest.raises(StrategyError, match=f"a is reduced by {spec}, and `encrypt: ssh` carries only .*or remove `en"):
        check(*nodes, machines=machines)
    check(all_reduce_node("a"), all_reduce_node("b"), machines=machines)


def test_nccl_passes_with_a_gpu_for_every_replica(check, cluster):
    check(all_reduce_node("a", 0, "NCCL"), all_reduce_node("b", 0, "NCCL"), machines=cluster(kind="gpus"))


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
    ("shape", "said"),
    [
        ((), "it is a scalar, which has no axis to cut"),
        ((0, 3), "its shape is 0 × 3, so it has no element"),
        ((3, 0), "its shape is 3 × 0, so it has no element"),
    ],
)
def test_a_variable_without_elements_or_axes_cannot_be_partitioned(step, cluster, shape, said):
    planned, machines = step({"v": shape}), cluster()
    node = partitioned_node("v", Partitioning(0, (1, 2)), served(0, 1))
    with pytest.raises(StrategyError, match=f"v cannot be partitioned: {said}; leave its partition out"):
        check_strategy(make_strategy("Mine", machines, synced_variables(planned), [node]), planned, machines)


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


def test_ring_beside_auto_and_a_parameter_server_is_refused(step, cluster):
    planned, machines = step({"a": (1,), "b": (1,), "c": (1,)}), cluster()
    nodes = [all_reduce_node("a"), all_reduce_node("b", 0, "RING"), parameter_server_node("c", 0)]
    strategy = make_strategy("Mine", machines, synced_variables(planned), nodes)
    with pytest.raises(StrategyError, match="b is reduced by RING and a by SHUFFLE"):
        check_strategy(strategy, planned, machines)


def test_ring_with_sparse_gradients_passes(language_model, cluster):
    strategy = AllReduce(all_reduce_spec="RING").build(language_model, cluster())
    check_strategy(strategy, language_model, cluster())


def test_replicas_of_other_machines_are_refused(planned, cluster):
    strategy = AllReduce().build(planned, cluster(workers=2))
    with pytest.raises(StrategyError, match="runs on the replicas worker 0 cpu:0, worker 1 cpu:0, but the resource"):
        check_strategy(strategy, planned, cluster(workers=3))
