import pytest

from autodist.compressors import BFloat16
from autodist.proto import strategy_pb2
from autodist.strategies import PartitionedAR, RandomAxisPartitionAR

SHAPES = {"kernel": (4, 6), "bias": (3,), "scalar": (), "filters": (1, 3, 8, 8)}


def nodes_of(builder, planned, machines):
    return {node.variable: node for node in builder.build(planned, machines).nodes}


def test_every_shard_has_its_place_in_the_groups(step, cluster):
    nodes = nodes_of(PartitionedAR(chunk_size=2, min_partition_bytes=0), step(SHAPES), cluster(3))
    groups = {name: [shard.all_reduce.group for shard in node.shards] for name, node in nodes.items()}
    assert groups == {"kernel": [0, 0, 1], "bias": [1, 2, 2], "scalar": [], "filters": []}
    assert nodes["scalar"].all_reduce.group == 3
    assert nodes["filters"].all_reduce.group == 3


def test_options_reach_every_shard(step, cluster):
    builder = PartitionedAR(all_reduce_spec="SHUFFLE", compressor=BFloat16(), min_partition_bytes=0)
    (node,) = nodes_of(builder, step({"kernel": (4, 6)}), cluster(2)).values()
    wanted = strategy_pb2.AllReduce(spec="SHUFFLE", compressor=strategy_pb2.Compressor(kind="BFLOAT16"))
    assert [shard.all_reduce for shard in node.shards] == [wanted, wanted]


def test_workers_without_replicas_take_no_part(step, cluster):
    nodes = nodes_of(PartitionedAR(min_partition_bytes=0), step({"kernel": (8, 6)}), cluster(4, servers=2))
    assert list(nodes["kernel"].partition.sizes) == [4, 4]


@pytest.mark.parametrize("seed", range(8))
def test_axes_are_drawn_among_those_that_can_be_cut(step, cluster, seed):
    planned = step({**SHAPES, "table": (5, 2, 2)}, sparse=["table"])
    nodes = nodes_of(RandomAxisPartitionAR(seed=seed, min_partition_bytes=0), planned, cluster(2))
    assert nodes["table"].partition.axis == 0
    assert nodes["filters"].partition.axis in (1, 2, 3)
    assert nodes["kernel"].partition.axis in (0, 1)
    assert not nodes["scalar"].shards


def test_all_axes_are_drawn_by_some_seed_and_a_seed_draws_the_same(step, cluster):
    planned, machines = step({"filters": (1, 3, 8, 8)}), cluster(2)
    builders = [RandomAxisPartitionAR(seed=seed, min_partition_bytes=0) for seed in range(30)]
    strategies = [builder.build(planned, machines) for builder in builders]
    assert {strategy.nodes[0].partition.axis for strategy in strategies} == {1, 2, 3}
    assert [builder.build(planned, machines) for builder in builders] == strategies


def test_an_axis_depends_on_the_variables_name_not_on_its_neighbours(step, cluster):
    builder = RandomAxisPartitionAR(min_partition_bytes=0)
    shapes = {f"v{index}": (8, 8) for index in range(10)}
    together = nodes_of(builder, step(shapes), cluster(2))
    alone = {name: nodes_of(builder, step({name: shape}), cluster(2))[name] for name, shape in shapes.items()}
    assert {name: node.partition.axis for name, node in together.items()} == {
        name: node.partition.axis for name, node in alone.items()
    }
