"""PS: one worker owns every variable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.nearest import listed
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, synced_variables

Owner = Annotated[int, Field(ge=0)] | str


@register
@dataclass(frozen=True)
class PS(StrategyBuilder):
    """One worker holds all variables, sums the gradients that the workers send, and applies the update once.

    For models whose optimizer state should lie on one machine, one with much memory or the fastest link, and as
    the plainest parameter server to compare others with.

    Cost: with W workers and b bytes of dense gradients, the owner sends (W-1)·b bytes a step and receives as many;
    every other worker sends b and receives b. Of a sparse variable only the rows that a worker touches travel.

    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    Attributes:
        owner: the worker that holds the variables, by index (0 is the chief) or by name.
    """

    owner: Owner = 0

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        owner = owner_index(self.owner, resource_spec)
        nodes = [parameter_server_node(variable.name, owner) for variable in variables]
        return make_strategy("PS", resource_spec, variables, nodes)


def parameter_server_node(variable: str, owner: int) -> strategy_pb2.VariableNode:
    """The node of a variable that one worker holds."""
    return strategy_pb2.VariableNode(variable=variable, parameter_server=strategy_pb2.ParameterServer(owner=owner))


def owner_index(owner: Owner, resource_spec: ResourceSpec) -> int:
    """Index of the worker that an option names.

    Raises:
        StrategyError: when no worker has that index or name.
    """
    for worker in resource_spec.workers:
        if owner in (worker.index, worker.name):
            return worker.index
    known = listed(f"{worker.index} ({worker.name})" for worker in resource_spec.workers)
    raise StrategyError(f"owner is {owner!r}, and there is no such worker; the workers are {known}.")
