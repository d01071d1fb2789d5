"""AllReduce: every worker holds every variable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

SpecName = Literal["AUTO", "SHUFFLE", "RING", "NCCL"]
ChunkSize = Annotated[int, Field(ge=1)]


@register
@dataclass(frozen=True)
class AllReduce(StrategyBuilder):
    """Gradients are summed over all replicas, and every worker applies the same update to its own copy.

    For models of dense variables, on machines with links alike: no worker carries more than another.

    Cost: with W workers and b bytes of dense gradients, each worker sends 2·b·(W-1)/W bytes a step and receives as
    many. A sparse gradient is gathered: a worker sends each row that it touches to the W-1 others.

    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    J. Parallel Distrib. Comput. 69(2), 2009, for the bytes, which SHUFFLE and RING share.

    Attributes:
        chunk_size: how many variables, one after the other, form a group. Gradients of one group are packed into
            buckets together, so a smaller group starts to travel earlier and makes more messages.
        all_reduce_spec: how sums travel between workers: SHUFFLE (a piece to each worker, summed in their order),
            RING or NCCL (TensorFlow's collectives; the whole model must then use the same one), or AUTO.
    """

    chunk_size: ChunkSize = 128
    all_reduce_spec: SpecName = "AUTO"

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        nodes = all_reduce_nodes(variables, self.chunk_size, self.all_reduce_spec)
        return make_strategy("AllReduce", resource_spec, variables, nodes)


def all_reduce_nodes(
    variables: Sequence[SyncedVariable], chunk_size: int, spec: SpecName
) -> list[strategy_pb2.VariableNode]:
    """A node for each variable, `chunk_size` neighbours a group."""
    return [all_reduce_node(variable.name, index // chunk_size, spec) for index, variable in enumerate(variables)]


def all_reduce_node(variable: str, group: int = 0, spec: SpecName = "AUTO") -> strategy_pb2.VariableNode:
    """The node of a variable that every worker holds; gradients of equal group are reduced together."""
    synchronizer = strategy_pb2.AllReduce(spec=spec, group=group)
    return strategy_pb2.VariableNode(variable=variable, all_reduce=synchronizer)
