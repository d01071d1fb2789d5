"""PSLoadBalancing: each variable has one owner, and the owners share the bytes evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.loads import GreedyLoads
from autodist.strategies.nodes import whole_node
from autodist.strategies.registry import register
from autodist.strategies.server_options import ServerOptions
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables


@register
@dataclass(frozen=True)
class PSLoadBalancing(ServerOptions, StrategyBuilder):
    """Parameter servers on all workers: variables are dealt out by bytes, weighed by the owners' bandwidths.

    For models with large sparse variables, for machines with links of unequal speed, and for optimizers with much
    state, of which each worker then keeps its share only. Where nodes without replicas are given, they alone own.

    Cost: with W workers alike and b bytes of dense gradients, each worker owns about b/W, so it sends about
    2·b·(W-1)/W bytes a step, half as a worker and half as an owner, and receives as many. A variable larger than
    b/W makes its owner's link the slowest: the owner of v bytes sends (W-1)·v as an owner.

    Source: the greedy rule of R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math.
    17(2), 1969, largest first.

    Attributes:
        sync, staleness, local_proxy_variable: see ServerOptions.
    """

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        nodes = load_balanced_nodes(variables, resource_spec, self)
        return make_strategy("PSLoadBalancing", resource_spec, variables, nodes)


def load_balanced_nodes(
    variables: Sequence[SyncedVariable], resource_spec: ResourceSpec, options: ServerOptions
) -> list[strategy_pb2.VariableNode]:
    """A parameter server's node for each variable, the owners by `GreedyLoads`."""
    owners = GreedyLoads(resource_spec).place_all(variables)
    return [whole_node(name, options.parameter_server(owner)) for name, owner in owners.items()]
