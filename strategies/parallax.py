"""Parallax: all-reduces dense gradients and sends sparse ones to parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce import AllReduceOptions, all_reduce_nodes
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.partitioning import PartitionOptions
from autodist.strategies.ps import ServerOptions
from autodist.strategies.ps_load_balancing import balanced_server_nodes, partition_heavy_variables
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, synced_variables


@register
@dataclass(frozen=True)
class Parallax(AllReduceOptions, ServerOptions, PartitionOptions, StrategyBuilder):
    """Uses all-reduce for dense gradients, and parameter servers that share the bytes evenly for sparse ones.

    For models that have both, such as language models with an embedding. All-reduce would send every touched row to
    every worker, while a parameter server receives it once.

    Cost: with W workers and b bytes of dense gradients, each worker sends 2·b·(W-1)/W bytes a step and receives as
    many. Of each sparse variable, a worker sends and receives the rows that it touches once. The owner of a whole table
    sends and receives the rows of the W-1 other workers. From four workers on, tables are therefore partitioned along
    axis 0 (see `partition_heavy_variables`). Their owners share the rows, as evenly as batches touch them.

    Source: S. Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019.

    Attributes:
        chunk_size, compressor: of the dense variables; see AllReduceOptions.
        all_reduce_spec: the all-reduce algorithm of dense variables. RING and NCCL do not work together with parameter
            servers, so they raise an error if the model has a sparse variable.
        max_shards, min_partition_bytes: of the sparse variables; see PartitionOptions. If `max_shards` is set, they
            are partitioned on any number of workers; 1 disables partitioning.
        sync, staleness, local_proxy_variable: of the sparse variables; see ServerOptions. Workers still wait for each
            other at the dense ones.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        dense = [variable for variable in variables if not variable.is_sparse]
        sparse = [variable for variable in variables if variable.is_sparse]
        nodes = all_reduce_nodes(dense, self)
        partitionings = partition_heavy_variables(sparse, resource_spec, self)
        nodes += balanced_server_nodes(sparse, partitionings, resource_spec, self)
        return make_strategy("Parallax", resource_spec, variables, nodes)
