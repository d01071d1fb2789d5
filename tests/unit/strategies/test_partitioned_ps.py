from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from autodist.strategies import PartitionedPS, synced_variables
from autodist.strategies.nodes import pieces


def build(planned, machines, **options):
    strategy = PartitionedPS(**{"min_partition_bytes": 0, **options}).build(planned, machines)
    return {node.variable: node for node in strategy.nodes}


def owners(node):
    return [shard.parameter_server.owner for shard in node.shards]


def test_a_variable_of_seven_rows_has_three_shards(step, cluster):
    nodes = build(step({"table": (7, 2)}), cluster(3))
    assert list(nodes["table"].partition.sizes) == [3, 2, 2]
    assert sorted(owners(nodes["table"])) == [0, 1, 2]


def test_fewer_rows_than_workers_make_fewer_shards(step, cluster):
    nodes = build(step({"two": (2, 9), "one": (1, 9), "scalar": ()}), cluster(4))
    assert list(nodes["two"].partition.sizes) == [1, 1]
    assert [nodes[name].HasField("parameter_server") for name in ("one", "scalar")] == [True, True]


def test_one_worker_cuts_only_when_told(step, cluster):
    planned = step({"table": (8, 2)})
    assert not build(planned, cluster(1))["table"].shards
    assert owners(build(planned, cluster(1), max_shards=3)["table"]) == [0, 0, 0]


def test_options_reach_every_shard(step, cluster):
    options = {"sync": False, "staleness": 3, "local_proxy_variable": True}
    nodes = build(step({"table": (8, 2), "scalar": ()}), cluster(2), **options)
    servers = [shard.parameter_server for shard in nodes["table"].shards] + [nodes["scalar"].parameter_server]
    assert {(one.asynchronous, one.staleness, one.local_proxy) for one in servers} == {(True, 3, True)}


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=8), workers=st.integers(1, 5))
def test_no_worker_owns_more_than_its_share_and_one_piece(step, cluster, lengths, workers):
    planned = step({f"v{index}": (length, 3) for index, length in enumerate(lengths)})
    nodes = build(planned, cluster(workers))
    loads, sizes = Counter(), []
    for variable in synced_variables(planned):
        for piece, part in pieces(variable, nodes[variable.name]):
            loads[part.owner] += piece.byte_size
            sizes.append(piece.byte_size)
    assert max(loads.values()) <= sum(sizes) / workers + max(sizes)


def test_nodes_without_replicas_own_all_variables(step, cluster):
    nodes = build(step({"table": (8, 2), "bias": (2,), "scalar": ()}), cluster(4, servers=2))
    assert owners(nodes["table"]) == [2, 3]
    assert set(owners(nodes["bias"])) == {2, 3}
    assert nodes["scalar"].parameter_server.owner in (2, 3)
