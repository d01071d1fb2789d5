"""FSDP: no worker keeps a whole variable; the shards of a layer are gathered shortly before the layer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy, workers_with_replicas
from autodist.strategies.loads import GreedyLoads
from autodist.strategies.partitioning import MIN_PARTITION_BYTES, MinPartitionBytes
from autodist.strategies.ps import ServerOptions
from autodist.strategies.registry import register
from autodist.strategies.sharded_all_reduce import sharded_nodes
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables
from autodist.synchronizers import parts_of


@register
@dataclass(frozen=True)
class FSDP(StrategyBuilder):
    """Shards parameters, gradients and slots over all workers, and gathers the parameters layer by layer.

    For models that are too large for one worker. As in ZeRO stage 3, each worker holds 1/W of the parameters, their
    gradients and their slots, and no cached copies. Shortly before a layer computes, the owners of its shards send them
    to the other workers, which concatenate them and release the result after use. For the backward pass a layer is
    gathered again, except for the last one, whose backward pass begins at once. Gradients are reduce-scattered.

    A layer has the variables whose names begin alike; a variable above 1/8 of the model is a layer of its own. Tables
    that are only looked up are read by rows. Variables below `min_partition_bytes` stay whole, each at one owner.

    Cost: with W workers and b bytes of dense parameters, each worker sends 3·b·(W-1)/W bytes a step and receives as
    many: the parameters twice and the gradients once. That is 1.5 times the bytes of all-reduce.

    Sources: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020;
    Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

    Attributes:
        prefetch: the number of layers that are gathered ahead of the layer that computes: 0 needs the least memory, 1
            overlaps gathering and computation.
        min_partition_bytes: smaller variables stay whole.
    """

    prefetch: Literal[0, 1] = 1
    min_partition_bytes: MinPartitionBytes = MIN_PARTITION_BYTES

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        owners = workers_with_replicas(resource_spec)
        shards = {variable.name: len(owners) for variable in variables}
        loads = GreedyLoads(resource_spec, owners)
        nodes = sharded_nodes(variables, loads, shards, self.min_partition_bytes, WITHOUT_COPIES)
        layers = layers_of_use(graph_item, variables)
        for node in nodes:
            for part in parts_of(node):
                part.parameter_server.layer = layers[node.variable]
        strategy = make_strategy("FSDP", resource_spec, variables, nodes)
        strategy.prefetch = self.prefetch
        return strategy


WITHOUT_COPIES = ServerOptions(local_proxy_variable=False)


def layers_of_use(graph_item: GraphLike, variables: Sequence[SyncedVariable]) -> dict[str, int]:
    """Maps each variable to its layer, from 1 in the order of use; without a graph, in the order of gradients."""
    # Imports TensorFlow only if there is a graph, which TensorFlow has created.
    from autodist.graph.parameter_layers import find_layers, order_of_use
    from autodist.graph.step import CapturedStep

    position = {variable.name: index for index, variable in enumerate(variables)}
    if isinstance(graph_item, CapturedStep):
        position |= order_of_use(graph_item)
    ordered = sorted(variables, key=lambda variable: position[variable.name])
    layers = find_layers({variable.name: variable.byte_size for variable in ordered})
    return {name: number for number, names in enumerate(layers, 1) for name in names}
