import pytest

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import PS, PartitionedPS, PSLoadBalancing, UnevenPartitionedPS, check_strategy
from autodist.synchronizers import synchronizers_of


def owners(strategy):
    return {node.variable: node.parameter_server.owner for node in strategy.nodes}


def test_the_chief_owns_all_unless_told_otherwise(language_model, cluster):
    machines = cluster(workers=3)
    strategy = PS().build(language_model, machines)
    check_strategy(strategy, language_model, machines)
    assert owners(strategy) == {"embedding": 0, "dense/kernel": 0, "dense/bias": 0}
    assert all(node.HasField("parameter_server") for node in strategy.nodes)


def test_the_chief_owns_all_also_where_nodes_run_no_replica(language_model, cluster):
    machines = cluster(workers=3, servers=1)
    strategy = PS().build(language_model, machines)
    assert set(owners(strategy).values()) == {0}
    assert strategy.graph_config.workers == 3
    assert len(strategy.graph_config.replicas) == 2
    assert PS().build(language_model, cluster(workers=3)).graph_config.workers == 0
    assert set(owners(PS(owner=2).build(language_model, machines)).values()) == {2}


def test_options_reach_every_node(language_model, cluster):
    strategy = PS(sync=False, staleness=2, local_proxy_variable=True).build(language_model, cluster())
    wanted = strategy_pb2.ParameterServer(owner=0, asynchronous=True, staleness=2, local_proxy=True)
    assert [node.parameter_server for node in strategy.nodes] == [wanted] * 3


@pytest.mark.parametrize(
    ("options", "proxies"),
    [
        ({}, [False, True, True]),
        ({"local_proxy_variable": False}, [False] * 3),
        ({"local_proxy_variable": True}, [True] * 3),
        ({"staleness": 1}, [False, True, True]),
        ({"sync": False}, [False, True, True]),
    ],
)
@pytest.mark.parametrize("builder", [PS, PSLoadBalancing, PartitionedPS, UnevenPartitionedPS])
def test_workers_cache_variables_that_they_update_together(step, cluster, builder, options, proxies):
    planned = step({"large": (10000, 8), "small": (100, 8), "dense": (10000, 8)}, sparse=["large", "small"])
    strategy = builder(**options).build(planned, cluster())
    found = {node.variable: {one.local_proxy for one in synchronizers_of(node)} for node in strategy.nodes}
    assert [found[name] for name in ("large", "small", "dense")] == [{proxy} for proxy in proxies]


def shards(strategy):
    return {node.variable: list(node.partition.sizes) for node in strategy.nodes}


def test_large_dense_variables_have_shards_of_a_sixteenth_of_all_bytes(step, cluster):
    planned = step({"table": (4096, 256), "large": (4096, 1024), "wide": (3, 1 << 18), "small": (256, 256)}, ["table"])
    strategy = PS(owner=1, max_shards=None).build(planned, cluster())
    check_strategy(strategy, planned, cluster())
    assert shards(strategy) == {"table": [], "large": [373] * 4 + [372] * 7, "wide": [2, 1], "small": []}
    assert {one.owner for node in strategy.nodes for one in synchronizers_of(node)} == {1}


@pytest.mark.parametrize(
    ("options", "workers", "sizes"),
    [
        ({}, 2, []),
        ({"max_shards": None}, 2, [256, 256, 256, 256]),
        ({"max_shards": 3}, 2, [342, 341, 341]),
        ({"max_shards": 16}, 2, [256, 256, 256, 256]),
        ({"max_shards": None, "min_partition_bytes": 1 << 19}, 2, [512, 512]),
        ({"max_shards": None, "min_partition_bytes": 0}, 2, [64] * 16),
        ({"max_shards": None, "sync": False}, 2, []),
        ({"max_shards": None, "staleness": 1}, 2, []),
        ({"max_shards": None}, 1, []),
    ],
    ids=str,
)
def test_shards_of_one_owner_overlap_updates_that_workers_wait_for(step, cluster, options, workers, sizes):
    strategy = PS(**options).build(step({"dense": (1024, 256)}), cluster(workers=workers))
    assert shards(strategy) == {"dense": sizes}


@pytest.mark.parametrize("owner", [2, "10.0.0.3"])
def test_the_owner_is_told_by_index_or_name(language_model, cluster, owner):
    assert set(owners(PS(owner=owner).build(language_model, cluster(workers=3))).values()) == {2}


@pytest.mark.parametrize("owner", [3, "10.0.0.9"])
def test_an_owner_that_is_no_worker_is_refused_with_the_workers(language_model, cluster, owner):
    with pytest.raises(StrategyError, match=r"no such worker; the workers are 0 \(10.0.0.1\), 1 \(10.0.0.2\)"):
        PS(owner=owner).build(language_model, cluster(workers=2))


@pytest.mark.parametrize("owner", [-1, 1.5, True, None])
def test_an_owner_of_another_kind_is_refused(owner):
    with pytest.raises(StrategyError, match=r"owner is .*, which is not allowed"):
        PS(owner=owner)
