"""For any model and machines, the strategies of built-in builders pass the check, and equal input gives equal bytes."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.compressors import Int8, PowerSGD
from autodist.placement.partitioning import Partitioning
from autodist.resources import ResourceSpec
from autodist.strategies import (
    FSDP,
    PS,
    AllReduce,
    Auto,
    DiLoCo,
    Override,
    OverrideVariables,
    Parallax,
    Partition,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    ShardedAllReduce,
    UnevenPartitionedPS,
    UseParameterServer,
    bytes_sent,
    check_strategy,
    chosen_builder,
    registered_names,
    strategy_table,
    synced_variables,
    worker_count,
)
from autodist.strategies.nodes import pieces
from autodist.strategies.strategy_file import strategy_yaml

NO_MINIMUM = {"min_partition_bytes": 0}

BUILDERS = [
    AllReduce(chunk_size=2),
    Auto(allow=("compressor", "INT8", "FLOAT8", "local_steps", "staleness")),
    DiLoCo(local_steps=3, outer_momentum=0.5, compressor=Int8()),
    PS(sync=False, staleness=2),
    PSLoadBalancing(local_proxy_variable=True),
    Parallax(compressor=PowerSGD(rank=2), staleness=1),
    PartitionedPS(**NO_MINIMUM),
    PartitionedPS(max_shards=5, min_partition_bytes=40, sync=False),
    UnevenPartitionedPS(**NO_MINIMUM),
    UnevenPartitionedPS(max_shards=2, **NO_MINIMUM),
    PartitionedAR(chunk_size=3, **NO_MINIMUM),
    RandomAxisPartitionAR(max_shards=3, seed=5, **NO_MINIMUM),
    ShardedAllReduce(**NO_MINIMUM),
    ShardedAllReduce(min_partition_bytes=100, value_compressor=Int8(block=8)),
    FSDP(**NO_MINIMUM),
    OverrideVariables(PartitionedPS(**NO_MINIMUM), (Override("v0", UseParameterServer(partition=Partition(0, 1))),)),
]

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)
MACHINES = st.lists(st.sampled_from([1.0, 2.5, 10.0, 100.0]), min_size=1, max_size=5)


def test_every_builder_is_here():
    # Neither runs with servers, and a pipeline needs a variable for each worker: test_pipeline.py, test_mesh.py,
    # test_megatron.py.
    by_itself = {"Megatron", "Mesh", "Pipeline"}
    assert {type(builder).__name__ for builder in BUILDERS} | by_itself == {*registered_names(), "OverrideVariables"}


@pytest.mark.parametrize("builder", BUILDERS, ids=str)
@settings(max_examples=10)  # of each builder
@given(shapes=SHAPES, sparse=st.sets(st.integers(0, 5)), bandwidths=MACHINES, servers=st.integers(0, 2))
def test_built_strategies_pass_and_are_deterministic(step, cluster, builder, shapes, sparse, bandwidths, servers):
    names = {f"v{index}": shape for index, shape in enumerate(shapes)}
    planned = step(names, sparse=[f"v{index}" for index in sparse if index < len(shapes) and shapes[index]])
    machines = cluster(len(bandwidths), bandwidths=bandwidths, servers=min(servers, len(bandwidths) - 1))
    strategy = builder.build(planned, machines)
    check_strategy(strategy, planned, machines)

    again = builder.build(planned, machines)
    assert strategy.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    variables = {variable.name: variable for variable in synced_variables(planned)}
    for node in strategy.nodes:
        whole = variables[node.variable]
        parts = [piece for piece, _ in pieces(whole, node)]
        assert sum(part.byte_size for part in parts) == whole.byte_size
        if node.HasField("partition"):
            assert len(node.shards) > 1
            assert node.WhichOneof("synchronizer") is None
            assert node.partition.axis == 0 or not whole.is_sparse
            assert min(node.partition.sizes) >= 1
    assert worker_count(strategy.graph_config) == len(bandwidths)
    assert len(bytes_sent(variables.values(), strategy.nodes, strategy.graph_config)) == len(bandwidths)
    assert strategy_table(strategy, planned).row_count == len(shapes)

    section = yaml.safe_load(strategy_yaml(strategy))["strategy"]
    if not isinstance(builder, FSDP):  # its file names the builder
        read = chosen_builder(section, None).build(planned, machines)
        assert list(map(with_one_group, read.nodes)) == list(map(with_one_group, strategy.nodes))


def with_one_group(node):
    """Returns a node whose shards have the group of the first one, which a file has for all of them."""
    changed = type(node)()
    changed.CopyFrom(node)
    for shard in changed.shards:
        if shard.HasField("all_reduce"):
            shard.all_reduce.group = node.shards[0].all_reduce.group
    return changed


def test_a_file_may_have_any_names(step, cluster):
    names = ["a 'quoted' \"name\"", "%percent: {braces}, # [x]", "größe/核", "long/" * 60, "w.*+?$^"]
    planned = step(dict.fromkeys(names, (4, 2)))
    strategy = PartitionedPS(**NO_MINIMUM).build(planned, cluster(2))
    section = yaml.safe_load(strategy_yaml(strategy))["strategy"]
    assert list(chosen_builder(section, None).build(planned, cluster(2)).nodes) == list(strategy.nodes)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), axis=st.integers(0, 2))
def test_any_boundaries_that_a_user_gives_pass(step, cluster, sizes, axis):
    shape = [3, 3, 3]
    shape[axis] = sum(sizes)
    planned, machines = step({"v": tuple(shape)}, sparse=["v"]), cluster(3)
    use = UseParameterServer(partition=Partition(axis, sizes=tuple(sizes)))
    strategy = OverrideVariables(AllReduce(), (Override("v", use),)).build(planned, machines)
    check_strategy(strategy, planned, machines)
    (node,) = strategy.nodes
    assert Partitioning(node.partition.axis, tuple(node.partition.sizes)) == Partitioning(axis, tuple(sizes))


@pytest.mark.parametrize("builder", BUILDERS[6:-1], ids=str)
def test_small_variables_stay_whole_and_large_ones_are_cut(step, cluster, builder):
    planned = step({"large": (512, 512), "small": (8, 8)})
    options = {} if isinstance(builder, ShardedAllReduce | FSDP) else {"max_shards": 2}
    nodes = {node.variable: node for node in type(builder)(**options).build(planned, cluster(2)).nodes}
    assert len(nodes["large"].shards) == 2
    assert not nodes["small"].shards


@pytest.mark.parametrize("builder", [PartitionedPS(**NO_MINIMUM), UnevenPartitionedPS(**NO_MINIMUM)], ids=str)
def test_thousands_of_workers_are_planned_for(step, builder):
    machines = ResourceSpec.from_dict({"nodes": [{"address": f"h{i}", "chief": i == 0} for i in range(4000)]})
    planned = step({"table": (8000, 4), "kernel": (8001, 3)}, sparse=["table"])
    strategy = builder.build(planned, machines)
    check_strategy(strategy, planned, machines)
    assert [len(node.shards) for node in strategy.nodes] == [4000, 4000]
    strategy_table(strategy, planned)
