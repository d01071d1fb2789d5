"""PS: places every variable on one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.logs.formatting import listed
from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.nodes import whole_node
from autodist.strategies.registry import register
from autodist.strategies.server_options import SYNCHRONOUS, ServerOptions
from autodist.strategies.variables import GraphLike, synced_variables

Owner = Annotated[int, Field(ge=0)] | str


@register
@dataclass(frozen=True)
class PS(ServerOptions, StrategyBuilder):
    """Places all variables on one worker, which sums the workers' gradients and applies the update once.

    For models whose optimizer state should reside on one machine, one with much memory or the fastest link, and as
    a baseline for other parameter servers.

    Cost: with W workers and b bytes of dense gradients, the owner sends (W-1)·b bytes a step and receives as many;
    every other worker sends b and receives b. Of a sparse variable only the rows that a worker touches are sent; with
    a proxy, all of its b bytes to each worker.

    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    Attributes:
        owner: the worker that holds the variables, by index (0 is the chief) or by name.
        sync, staleness, local_proxy_variable: see ServerOptions.
    """

    owner: Owner = 0

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        server = self.parameter_server(owner_index(self.owner, resource_spec))
        return make_strategy(
            "PS", resource_spec, variables, [whole_node(variable.name, server) for variable in variables]
        )


def parameter_server_node(variable: str, owner: int, options: ServerOptions = SYNCHRONOUS) -> strategy_pb2.VariableNode:
    """Returns the node of a variable that one worker holds."""
    return whole_node(variable, options.parameter_server(owner))


def owner_index(owner: Owner, resource_spec: ResourceSpec) -> int:
    """Returns the index of the worker that an option names.

    Raises:
        StrategyError: no worker has that index or name.
    """
    for worker in resource_spec.workers:
        if owner in (worker.index, worker.name):
            return worker.index
    raise OptionError(
        "owner", f"owner is {owner!r}, but there is no such worker; the workers are {known_workers(resource_spec)}."
    )


def known_workers(resource_spec: ResourceSpec) -> str:
    """Returns all workers as text: "0 (10.0.0.1), 1 (10.0.0.2)"."""
    return listed(f"{worker.index} ({worker.name})" for worker in resource_spec.workers)
