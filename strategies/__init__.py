"""Strategies: decide, for each variable of a captured step, its placement and the synchronisation of its gradient.

A builder (built-in or user-defined) decides, the protobuf Strategy records the decision, and the kernels apply it.
"""

import sys

from autodist.placement.group import worker_count
from autodist.placement.partitioning import Partitioning, even_sizes
from autodist.strategies import all_reduce, cost, partitioning, ps, ps_load_balancing
from autodist.strategies.all_reduce import AllReduce, AllReduceOptions, all_reduce_node, all_reduce_synchronizer
from autodist.strategies.auto import Auto, find_auto
from autodist.strategies.base import (
    BuildsStrategy,
    StrategyBuilder,
    graph_config,
    make_strategy,
    workers_with_replicas,
)
from autodist.strategies.build_strategy import call_builder
from autodist.strategies.check import check_strategy
from autodist.strategies.cost import Traffic, bytes_sent, link_bytes, sums_by_worker, traffic
from autodist.strategies.diloco import DiLoCo
from autodist.strategies.fsdp import FSDP
from autodist.strategies.gather_summary import bytes_of_layers_at_once
from autodist.strategies.loads import GreedyLoads, usual_owners, worker_bandwidths
from autodist.strategies.megatron import Megatron
from autodist.strategies.mesh import Mesh
from autodist.strategies.nodes import partitioned_node, whole_node
from autodist.strategies.override import Override, UseAllReduce, UseParameterServer
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.parallax import Parallax
from autodist.strategies.partition import Partition
from autodist.strategies.partitioned_ar import PartitionedAR
from autodist.strategies.partitioned_ps import PartitionedPS
from autodist.strategies.partitioning import PartitionOptions, proportional_sizes, shards_of
from autodist.strategies.pipeline import Pipeline, arranged, divides_variables, find_mesh, find_pipeline
from autodist.strategies.placed import PlacedBuilder, errors_with_place
from autodist.strategies.ps import PS, SYNCHRONOUS, ServerOptions, owner_index, parameter_server_node
from autodist.strategies.ps_load_balancing import PSLoadBalancing
from autodist.strategies.random_axis_partition_ar import RandomAxisPartitionAR
from autodist.strategies.reader import builder_from_section, chosen_builder
from autodist.strategies.registry import find_builder, register, registered_names
from autodist.strategies.sharded_all_reduce import ShardedAllReduce
from autodist.strategies.specs import resolve_specs
from autodist.strategies.table import strategy_table
from autodist.strategies.uneven_partitioned_ps import UnevenPartitionedPS
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

Cut = Partitioning
"""The former name of a partitioning, which builders of scripts may import; the modules below are former paths."""

for _former, _module in {
    "all_reduce_options": all_reduce,
    "cut": partitioning,
    "links": cost,
    "served": ps_load_balancing,
    "server_options": ps,
}.items():
    sys.modules[f"{__name__}.{_former}"] = _module

__all__ = [
    "FSDP",
    "PS",
    "SYNCHRONOUS",
    "AllReduce",
    "AllReduceOptions",
    "Auto",
    "BuildsStrategy",
    "Cut",
    "DiLoCo",
    "GraphLike",
    "GreedyLoads",
    "Megatron",
    "Mesh",
    "Override",
    "OverrideVariables",
    "PSLoadBalancing",
    "Parallax",
    "Partition",
    "PartitionOptions",
    "PartitionedAR",
    "PartitionedPS",
    "Partitioning",
    "Pipeline",
    "PlacedBuilder",
    "RandomAxisPartitionAR",
    "ServerOptions",
    "ShardedAllReduce",
    "StrategyBuilder",
    "SyncedVariable",
    "Traffic",
    "UnevenPartitionedPS",
    "UseAllReduce",
    "UseParameterServer",
    "all_reduce_node",
    "all_reduce_synchronizer",
    "arranged",
    "builder_from_section",
    "bytes_of_layers_at_once",
    "bytes_sent",
    "call_builder",
    "check_strategy",
    "chosen_builder",
    "divides_variables",
    "errors_with_place",
    "even_sizes",
    "find_auto",
    "find_builder",
    "find_mesh",
    "find_pipeline",
    "graph_config",
    "link_bytes",
    "make_strategy",
    "owner_index",
    "parameter_server_node",
    "partitioned_node",
    "proportional_sizes",
    "register",
    "registered_names",
    "resolve_specs",
    "shards_of",
    "strategy_table",
    "sums_by_worker",
    "synced_variables",
    "traffic",
    "usual_owners",
    "whole_node",
    "worker_bandwidths",
    "worker_count",
    "workers_with_replicas",
]
