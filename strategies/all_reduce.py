"""AllReduce: every worker holds every variable; and the options that all builders with all-reduce share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from autodist import synchronizers
from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.nodes import whole_node
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables
from autodist.synchronizers import LocalSteps

SpecName = Literal["AUTO", "SHUFFLE", "HIERARCHICAL", "RING", "NCCL"]
ChunkSize = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class AllReduceOptions:
    """Options of all builders that use all-reduce.

    Attributes:
        chunk_size: the number of consecutive variables (or shards) in a group. Gradients of one group are packed into
            buckets together; smaller groups are sent earlier, in more messages.
        all_reduce_spec: the algorithm: SHUFFLE (each worker sums one slice, in worker order), HIERARCHICAL (the same
            within subgroups of workers first, then between them), RING or NCCL (TensorFlow's collectives; the whole
            model must use the same one), or AUTO.
        compressor: compresses the gradients before they are sent. Only SHUFFLE supports it, for dense gradients of a
            floating-point dtype.
    """

    chunk_size: ChunkSize = 128
    all_reduce_spec: SpecName = "AUTO"
    compressor: Compressor = NO_COMPRESSOR

    def all_reduce(self, position: int, local: LocalSteps | None = None) -> strategy_pb2.AllReduce:
        """Returns the synchronizer of a variable or shard; `position` is its index among those that are all-reduced."""
        group = position // self.chunk_size
        return synchronizers.AllReduce(self.all_reduce_spec, group, self.compressor, local).to_message()


def all_reduce_synchronizer(
    group: int = 0, spec: SpecName = "AUTO", compressor: Compressor = NO_COMPRESSOR
) -> strategy_pb2.AllReduce:
    """Returns an all-reduce synchronizer in a group; the compressor field is unset without a compressor."""
    return synchronizers.AllReduce(spec, group, compressor).to_message()


@register
@dataclass(frozen=True)
class AllReduce(AllReduceOptions, StrategyBuilder):
    """Sums gradients over all replicas; every worker applies the same update to its own copy.

    For models of dense variables, on machines with equal links: all workers carry the same load.

    Cost: with W workers and b bytes of dense gradients (after compression), each worker sends 2·b·(W-1)/W bytes a step
    and receives as many. A sparse gradient is gathered: a worker sends each row that it touches to the W-1 other
    workers.

    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    J. Parallel Distrib. Comput. 69(2), 2009, for the bytes, which SHUFFLE and RING share.

    Attributes: those of AllReduceOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        return make_strategy("AllReduce", resource_spec, variables, all_reduce_nodes(variables, self))


def all_reduce_nodes(
    variables: Sequence[SyncedVariable], options: AllReduceOptions, local: LocalSteps | None = None
) -> list[strategy_pb2.VariableNode]:
    """Returns a node for each variable, with groups of `chunk_size` consecutive variables."""
    return [whole_node(variable.name, options.all_reduce(index, local)) for index, variable in enumerate(variables)]


def all_reduce_node(
    variable: str, group: int = 0, spec: SpecName = "AUTO", compressor: Compressor = NO_COMPRESSOR
) -> strategy_pb2.VariableNode:
    """Returns the node of a variable that every worker holds; gradients of equal group are reduced together."""
    return whole_node(variable, all_reduce_synchronizer(group, spec, compressor))
