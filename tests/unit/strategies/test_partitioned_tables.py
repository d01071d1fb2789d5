"""The variables that Parallax and PSLoadBalancing partition, and the workers that own the shards."""

from collections import Counter

import pytest

from autodist.strategies import Parallax, PSLoadBalancing, check_strategy
from autodist.strategies.table import strategy_table

TABLES = {"large": (200_000, 64), "small": (2_000, 64), "tiny": (10, 4), "kernel": (512, 512), "bias": (512,)}
SPARSE = ["large", "small", "tiny"]


@pytest.fixture
def planned(step):
    return step(TABLES, sparse=SPARSE)


def shards(strategy):
    return {node.variable: len(node.shards) for node in strategy.nodes}


def owned(strategy, planned, workers):
    sizes = {v.name: v.byte_size // v.shape[0] for v in planned.variables}
    loads = [0] * workers
    for node in strategy.nodes:
        for shard, size in zip(node.shards, node.partition.sizes, strict=True):
            loads[shard.parameter_server.owner] += size * sizes[node.variable]
    return loads


@pytest.mark.parametrize("workers", [4, 16, 64])
def test_parallax_cuts_tables_so_that_owners_share_them(workers, planned, cluster):
    machines = cluster(workers=workers)
    strategy = Parallax().build(planned, machines)
    check_strategy(strategy, planned, machines)
    assert shards(strategy) == {"large": workers, "small": 4, "tiny": 0, "kernel": 0, "bias": 0}
    loads = owned(strategy, planned, workers)
    assert max(loads) <= 1.4 * sum(loads) / workers
    assert {node.partition.axis for node in strategy.nodes} == {0}


def test_load_balancing_cuts_tables_and_what_is_larger_than_a_share(step, cluster):
    shapes = TABLES | {"wide": (300_000, 64)}
    planned = step(shapes, sparse=SPARSE)
    strategy = PSLoadBalancing().build(planned, cluster(workers=8))
    assert shards(strategy) == {"large": 8, "wide": 8, "small": 4, "tiny": 0, "kernel": 0, "bias": 0}


@pytest.mark.parametrize("builder", [Parallax, PSLoadBalancing])
def test_on_few_workers_nothing_is_cut_unless_it_is_asked_for(builder, planned, cluster):
    assert not any(shards(builder().build(planned, cluster(workers=3))).values())
    asked = shards(builder(max_shards=2).build(planned, cluster(workers=2)))
    assert (asked["large"], asked["small"]) == (2, 2)
    assert not any(shards(builder(max_shards=1).build(planned, cluster(workers=16))).values())


def test_small_variables_are_not_partitioned(planned, cluster):
    assert shards(Parallax(min_partition_bytes=1 << 20).build(planned, cluster(workers=4)))["small"] == 0
    assert shards(Parallax(min_partition_bytes=0).build(planned, cluster(workers=4)))["tiny"] == 4


def test_workers_without_replicas_own_all_shards(planned, cluster):
    strategy = Parallax().build(planned, cluster(workers=6, servers=2))
    owners = Counter(shard.parameter_server.owner for node in strategy.nodes for shard in node.shards)
    assert set(owners) == {4, 5}


def test_options_of_servers_are_those_of_all_shards(planned, cluster):
    strategy = Parallax(staleness=2, local_proxy_variable=True).build(planned, cluster(workers=4))
    said = [shard.parameter_server for node in strategy.nodes for shard in node.shards]
    assert {(one.staleness, one.local_proxy) for one in said} == {(2, True)}


def test_the_table_says_how_a_table_was_cut(planned, cluster):
    table = strategy_table(Parallax().build(planned, cluster(workers=8)), planned)
    assert str(next(iter(table.columns[5].cells))) == "8 shards of axis 0 at 8 workers"
