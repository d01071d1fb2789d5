"""The strategies of the programs: the equivalent YAML, and a builder that applies one strategy per program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies import BuildsStrategy, chosen_builder
from autodist.strategies.variables import GraphLike

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "shuffle": {"builder": "AllReduce", "all_reduce_spec": "SHUFFLE"},
    "float16": {"builder": "AllReduce", "compressor": {"kind": "FLOAT16", "error_feedback": True}},
    "power_sgd": {"builder": "AllReduce", "compressor": {"kind": "POWER_SGD", "rank": 1}},
    "top_k": {"builder": "AllReduce", "compressor": {"kind": "TOP_K", "fraction": 0.2}},
    "ring": {"builder": "AllReduce", "all_reduce_spec": "RING"},
    "ps": {"builder": "PS", "max_shards": 2, "min_partition_bytes": 1},
    "ps_load_balancing": {"builder": "PSLoadBalancing"},
    "parallax": {"builder": "Parallax"},
    "partitioned_ps": {"builder": "PartitionedPS", "max_shards": 3, "min_partition_bytes": 1},
    "random_axis_ar": {"builder": "RandomAxisPartitionAR", "max_shards": 3, "min_partition_bytes": 1, "seed": 1},
    "sharded": {"builder": "ShardedAllReduce", "min_partition_bytes": 1},
    "fsdp": {"builder": "FSDP", "min_partition_bytes": 1},
}


class InTurn:
    """A builder that delegates to another one for each program of a run."""

    def __init__(self) -> None:
        self._builder: BuildsStrategy | None = None

    def take(self, strategy: str) -> None:
        """Selects the builder of the next steps, by a key of STRATEGIES."""
        self._builder = chosen_builder(STRATEGIES[strategy], None)

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        assert self._builder is not None, "no strategy was taken"
        return self._builder.build(graph_item, resource_spec)
