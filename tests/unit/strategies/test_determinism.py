"""Equal input gives equal bytes."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.strategies import (
    FSDP,
    PS,
    AllReduce,
    Override,
    OverrideVariables,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    ShardedAllReduce,
    UnevenPartitionedPS,
    UseAllReduce,
    UseParameterServer,
)

BUILDERS = [
    AllReduce(chunk_size=2),
    PS(),
    PSLoadBalancing(),
    Parallax(),
    PartitionedPS(min_partition_bytes=0),
    UnevenPartitionedPS(min_partition_bytes=0),
    PartitionedAR(min_partition_bytes=0, chunk_size=2),
    RandomAxisPartitionAR(min_partition_bytes=0, seed=3),
    ShardedAllReduce(min_partition_bytes=0),
    FSDP(min_partition_bytes=0),
    OverrideVariables(
        AllReduce(), (Override("v[1-3]", UseParameterServer()), Override("v[45]", UseAllReduce(group=9)))
    ),
]


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: type(builder).__name__)
@settings(max_examples=10)
@given(order=st.permutations(range(8)))
def test_bytes_do_not_depend_on_the_order_in_which_variables_are_listed(step, cluster, builder, order):
    planned = step({f"v{index}": (index % 4 + 1, 2) for index in range(8)}, sparse=["v2", "v3", "v6"])
    reordered = type(planned)(tuple(planned.variables[index] for index in order), planned.gradients)
    first, second = builder.build(planned, cluster(3)), builder.build(reordered, cluster(3))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert first.nodes


HASHED = """
from types import SimpleNamespace as Named
from autodist.resources import ResourceSpec
from autodist.strategies import Override, OverrideVariables, Parallax, RandomAxisPartitionAR, UseParameterServer
names = [f"v{index}" for index in range(30)]
float32 = Named(name="float32", is_floating=True)
step = Named(
    variables=[Named(name=name, shape=(4, 4), byte_size=64, dtype=float32) for name in names],
    gradients=[Named(variable=name, is_sparse=name > "v15") for name in names],
)
spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2], "workers": 3}]})
overridden = OverrideVariables(Parallax(), (Override("v1.*", UseParameterServer()),))
for builder in (overridden, RandomAxisPartitionAR(min_partition_bytes=0)):
    print(builder.build(step, spec).SerializeToString(deterministic=True).hex())
"""


def test_bytes_do_not_depend_on_the_hash_seed_of_the_process():
    def build(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", HASHED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    first = build("1")
    assert first.strip()
    assert first == build("2")
