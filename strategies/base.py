"""StrategyBuilder: the base class of builders, which choose placement and synchronisation of each variable."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

from pydantic import Field

from autodist.options.fields import check_options
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.variables import GraphLike, SyncedVariable


class BuildsStrategy(Protocol):
    """The interface of builders; a user-defined class need not derive from StrategyBuilder."""

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy: ...


@dataclasses.dataclass(frozen=True)
class StrategyBuilder(ABC):
    """Base class of builders. A user-defined builder is a frozen dataclass that derives from it; the YAML names it.

    The fields are the options: field names are YAML keys, and type annotations define the allowed values. A builder
    keeps no state between builds; equal inputs yield equal bytes.

    Attributes:
        recompute: True if the backward pass recomputes the activations of the layers that repeat in a chain, so that
            only the tensors that enter them stay in memory. Or patterns (regular expressions) of names of layers to
            recompute: a pattern matches the path of a layer, or its end from a "/" on.

    Raises:
        StrategyError: on construction, if an option has a disallowed type or value.
    """

    recompute: bool | Annotated[tuple[str, ...], Field(min_length=1)] = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        """Builds the strategy for one captured step on the given machines.

        Args:
            graph_item: the captured step; `synced_variables` lists the variables that need a node.
            resource_spec: the workers, their devices and bandwidths.

        Returns:
            A strategy with one node per variable that has a gradient; `make_strategy` adds the other fields.

        Raises:
            StrategyError: an option does not fit this step or these machines.
        """


def make_strategy(
    builder: str,
    resource_spec: ResourceSpec,
    variables: Sequence[SyncedVariable],
    nodes: Iterable[strategy_pb2.VariableNode],
) -> strategy_pb2.Strategy:
    """Returns a strategy with the nodes in the order of the variables, on every replica of the resource spec.

    Nodes of unknown variables come last; `check_strategy` rejects them.
    """
    position = {variable.name: index for index, variable in enumerate(variables)}
    ordered = sorted(nodes, key=lambda node: position.get(node.variable, len(position)))
    return strategy_pb2.Strategy(builder=builder, graph_config=graph_config(resource_spec), nodes=ordered)


def graph_config(resource_spec: ResourceSpec) -> strategy_pb2.GraphConfig:
    """Returns the replicas of the resource spec, in worker order, and the other facts about machines for kernels."""
    has_servers = len(set(resource_spec.replica_workers)) < len(resource_spec.workers)
    return strategy_pb2.GraphConfig(
        replicas=[
            strategy_pb2.Replica(worker=replica.worker.index, device=replica.device)
            for replica in resource_spec.replicas
        ],
        workers=len(resource_spec.workers) if has_servers else 0,
        one_machine=len({worker.node.address for worker in resource_spec.workers}) == 1,
    )


def workers_with_replicas(resource_spec: ResourceSpec) -> tuple[int, ...]:
    """Returns the indices of the workers that run replicas; the others only own variables."""
    return tuple(worker.index for worker in resource_spec.workers if worker.has_replicas)
