from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from autodist.strategies import UnevenPartitionedPS, even_sizes, parameter_server_node

BANDWIDTHS = st.lists(st.sampled_from([1.0, 2.5, 10.0, 25.0, 100.0]), min_size=2, max_size=5)


def build(planned, machines, **options):
    strategy = UnevenPartitionedPS(min_partition_bytes=0, **options).build(planned, machines)
    return {node.variable: node for node in strategy.nodes}


def sizes_by_owner(node):
    owners = [shard.parameter_server.owner for shard in node.shards]
    assert len(set(owners)) == len(owners)
    return dict(zip(owners, node.partition.sizes, strict=True))


def test_a_faster_link_owns_a_longer_shard(step, cluster):
    nodes = build(step({"table": (1100, 2)}), cluster(2, bandwidths=[10, 100]))
    assert sizes_by_owner(nodes["table"]) == {0: 100, 1: 1000}


@given(length=st.integers(5, 400), bandwidths=BANDWIDTHS)
def test_links_are_busy_equally_long_but_for_a_row(step, cluster, length, bandwidths):
    machines = cluster(len(bandwidths), bandwidths=bandwidths)
    sizes = sizes_by_owner(build(step({"v": (length, 2)}), machines)["v"])
    shares = [length * Fraction(bandwidth) / sum(map(Fraction, bandwidths)) for bandwidth in bandwidths]
    if min(shares) >= 1:
        assert all(abs(sizes[worker] - share) < 1 for worker, share in enumerate(shares))


@given(length=st.integers(2, 60), workers=st.integers(2, 6))
def test_links_alike_have_shards_that_differ_by_one_at_most(step, cluster, length, workers):
    node = build(step({"v": (length,)}), cluster(workers))["v"]
    assert tuple(node.partition.sizes) == even_sizes(length, workers)


def test_with_fewer_shards_than_workers_they_go_where_the_load_is_least(step, cluster):
    planned = step({"a": (40, 2), "b": (30, 2), "c": (20, 2)})
    nodes = build(planned, cluster(4), max_shards=2)
    assert [sorted(sizes_by_owner(nodes[name])) for name in "abc"] == [[0, 1], [2, 3], [2, 3]]


def test_there_is_one_shard_a_worker_at_most(step, cluster):
    assert sizes_by_owner(build(step({"v": (40,)}), cluster(2), max_shards=9)["v"]) == {0: 20, 1: 20}


def test_one_worker_has_nothing_to_cut_for(step, cluster):
    assert build(step({"v": (40,)}), cluster(1), max_shards=9)["v"] == parameter_server_node("v", 0, is_sent_whole=True)


def test_nodes_without_replicas_own_all_variables(step, cluster):
    nodes = build(step({"table": (30, 2), "scalar": ()}), cluster(3, bandwidths=[10, 10, 20], servers=2))
    assert sizes_by_owner(nodes["table"]) == {1: 10, 2: 20}
    assert nodes["scalar"].parameter_server.owner in (1, 2)
