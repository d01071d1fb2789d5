"""StrategyBuilder: what decides, for each variable of a captured step, how it is kept and synchronised."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from autodist.options.fields import check_options
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.variables import GraphLike, SyncedVariable


class BuildsStrategy(Protocol):
    """Whatever can stand as a builder; a user's class need not derive from StrategyBuilder."""

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy: ...


@dataclasses.dataclass(frozen=True)
class StrategyBuilder(ABC):
    """Base of the builders; a user's own is a frozen dataclass that derives from it and is named in the YAML.

    Options are the fields: their names are the keys in the YAML, their types say what is allowed. A builder
    keeps nothing between builds, and equal input gives equal bytes.

    Raises:
        StrategyError: when it is made with an option of a type or value that is not allowed.
    """

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        """Writes the strategy for one captured step on these machines.

        Args:
            graph_item: the captured step; `synced_variables` lists what needs a node.
            resource_spec: the workers, their devices and bandwidths.

        Returns:
            One node for each variable that has a gradient; `make_strategy` puts the rest around them.

        Raises:
            StrategyError: when an option does not fit this step or these machines.
        """


def make_strategy(
    builder: str,
    resource_spec: ResourceSpec,
    variables: Sequence[SyncedVariable],
    nodes: Iterable[strategy_pb2.VariableNode],
) -> strategy_pb2.Strategy:
    """A strategy with these nodes in the order of the variables, on every replica of the resource spec.

    Nodes of variables that are not among them come last; `check_strategy` names them.
    """
    position = {variable.name: index for index, variable in enumerate(variables)}
    ordered = sorted(nodes, key=lambda node: position.get(node.variable, len(position)))
    return strategy_pb2.Strategy(builder=builder, graph_config=graph_config(resource_spec), nodes=ordered)


def graph_config(resource_spec: ResourceSpec) -> strategy_pb2.GraphConfig:
    """Every replica of the resource spec, worker by worker, and what else kernels are told of the machines."""
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
    """Indices of the workers that run replicas; the others only own variables."""
    return tuple(worker.index for worker in resource_spec.workers if worker.has_replicas)
