from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.strategies import AllReduce, ShardedAllReduce, SyncedVariable, bytes_sent, synced_variables
from autodist.strategies.nodes import pieces
from autodist.strategies.partitioning import FEW_WORKERS
from autodist.strategies.sharded_all_reduce import nearly_even_axis


def build(planned, machines, min_partition_bytes=0):
    strategy = ShardedAllReduce(min_partition_bytes).build(planned, machines)
    return strategy, {node.variable: node for node in strategy.nodes}


def test_shard_k_belongs_to_worker_k(step, cluster):
    _, nodes = build(step({"kernel": (7, 4), "table": (9, 50)}, sparse=["table"]), cluster(3))
    for name, sizes in (("kernel", [3, 2, 2]), ("table", [3, 3, 3])):
        assert nodes[name].partition.axis == 0
        assert list(nodes[name].partition.sizes) == sizes
        assert [shard.parameter_server.owner for shard in nodes[name].shards] == [0, 1, 2]


def test_with_one_worker_nothing_is_cut(step, cluster):
    _, nodes = build(step({"kernel": (7, 4), "scalar": ()}), cluster(1))
    assert {node.parameter_server.owner for node in nodes.values()} == {0}
    assert not any(node.shards for node in nodes.values())


def test_small_variables_are_whole_and_balance_the_bytes(step, cluster):
    _, nodes = build(step({"large": (3, 100), "a": (50,), "b": (40,)}), cluster(2), min_partition_bytes=1000)
    assert list(nodes["large"].partition.sizes) == [50, 50]
    assert nodes["large"].partition.axis == 1
    assert {nodes[name].parameter_server.owner for name in "ab"} == {0, 1}


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((8, 100), 0), ((3, 3, 64, 128), 2), ((2, 100), 1), ((1, 3), 1), ((40, 44), 0), ((), 0), ((1, 1), 0)],
)
def test_the_first_axis_that_cuts_nearly_evenly_is_taken(shape, axis):
    variable = SyncedVariable("v", shape, 4 * SyncedVariable("v", shape, 0, False).elements, False)
    assert nearly_even_axis(variable, 4) == axis


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), workers=st.integers(2, 5))
def test_each_worker_keeps_its_share_of_the_slots(step, cluster, lengths, workers):
    planned = step({f"v{index}": (length, 3) for index, length in enumerate(lengths)})
    _, nodes = build(planned, cluster(workers))
    kept, largest = Counter(), 0
    for variable in synced_variables(planned):
        parts = [(piece.byte_size, part.owner) for piece, part in pieces(variable, nodes[variable.name])]
        kept.update({owner: size for size, owner in parts})
        largest += max(size for size, _ in parts) - variable.byte_size // workers
    assert max(kept.values()) <= sum(kept.values()) / workers + largest + workers


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), workers=st.integers(1, FEW_WORKERS))
def test_evenly_divided_shards_cost_the_same_as_all_reduce(step, cluster, lengths, workers):
    planned = step({f"v{index}": (workers * length, 4) for index, length in enumerate(lengths)})
    machines = cluster(workers)
    sharded, _ = build(planned, machines)
    reduced = AllReduce().build(planned, machines)
    variables = synced_variables(planned)
    assert bytes_sent(variables, sharded.nodes, sharded.graph_config) == bytes_sent(
        variables, reduced.nodes, reduced.graph_config
    )


def test_every_owner_has_a_replica(step, cluster):
    _, nodes = build(step({"kernel": (8, 4), "scalar": (), "two": (2,)}), cluster(4, servers=2))
    assert [shard.parameter_server.owner for shard in nodes["kernel"].shards] == [0, 1]
    assert nodes["scalar"].parameter_server.owner in (0, 1)
