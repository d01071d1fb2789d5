"""AllReduce: replicates every variable on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce_options import AllReduceOptions, SpecName, all_reduce_synchronizer
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.nodes import whole_node
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables


@register
@dataclass(frozen=True)
class AllReduce(AllReduceOptions, StrategyBuilder):
    """Sums gradients over all replicas; every worker applies the same update to its own copy.

    For models of dense variables, on machines with equal links: all workers carry the same load.

    Cost: with W workers and b bytes of dense gradients (after compression), each worker sends 2·b·(W-1)/W bytes a step
    Cost: with W workers and b bytes of dense gradients, each worker sends 2·b·(W-1)/W bytes a step and receives as
    and receives as many. A sparse gradient is gathered: a worker sends each row that it touches to the W-1 other
    workers.

    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    J. Parallel Distrib. Comput. 69(2), 2009, for the bytes, which SHUFFLE and RING share.

    Attributes: those of AllReduceOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        return make_strategy("AllReduce", resource_spec, variables, all_reduce_nodes(variables, self))


def all_reduce_nodes(variables: Sequence[SyncedVariable], options: AllReduceOptions) -> list[strategy_pb2.VariableNode]:
    """Returns a node for each variable, with groups of `chunk_size` consecutive variables."""
    return [whole_node(variable.name, options.all_reduce(index)) for index, variable in enumerate(variables)]


def all_reduce_node(
    variable: str, group: int = 0, spec: SpecName = "AUTO", compressor: Compressor = NO_COMPRESSOR
) -> strategy_pb2.VariableNode:
    """Returns the node of a variable that every worker holds; gradients of equal group are reduced together."""
    return whole_node(variable, all_reduce_synchronizer(group, spec, compressor))
