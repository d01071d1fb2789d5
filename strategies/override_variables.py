"""OverrideVariables: some variables, told by pattern, are synchronised otherwise than a builder would."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from autodist.errors import StrategyError
from autodist.logs.suggestions import listed, nearest
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.asking import ask_builder
from autodist.strategies.base import BuildsStrategy, StrategyBuilder, make_strategy
from autodist.strategies.check_nodes import check_nodes
from autodist.strategies.override import Override
from autodist.strategies.override_nodes import all_reduced_nodes, served_nodes
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

log = logging.getLogger("autodist.strategies")


@dataclass(frozen=True)
class OverrideVariables(StrategyBuilder):
    """A builder's strategy, with some variables' nodes replaced.

    For the few variables that are known to want something else. A variable uses the first override that matches
    it; a variable that none matches keeps the builder's choice.

    Cost: the builder's, with each replaced variable's own (see AllReduce and PS).

    Attributes:
        builder: decides for all variables first.
        overrides: in order of precedence.
    """

    builder: BuildsStrategy
    overrides: tuple[Override, ...]

    def __post_init__(self) -> None:
        """Nothing to check: the parts have checked themselves."""

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        inner = ask_builder(self.builder, graph_item, resource_spec)
        check_nodes(inner, graph_item, resource_spec)
        variables = synced_variables(graph_item)
        chosen = _chosen(self.overrides, variables, graph_item)
        nodes = {node.variable: node for node in inner.nodes}
        nodes |= all_reduced_nodes(chosen, nodes, variables)
        nodes |= served_nodes(chosen, nodes, variables, resource_spec)
        name = f"{inner.builder} with variables of their own"
        strategy = make_strategy(name, resource_spec, variables, nodes.values())
        if inner.HasField("pipeline"):
            strategy.graph_config.CopyFrom(inner.graph_config)
            strategy.pipeline.CopyFrom(inner.pipeline)
        return strategy


def _chosen(
    overrides: Sequence[Override], variables: Sequence[SyncedVariable], graph_item: GraphLike
) -> dict[str, Override]:
    """The override that each variable uses, by name.

    Raises:
        StrategyError: when an override matches no variable that has a gradient.
    """
    names = [variable.name for variable in variables]
    for override in overrides:
        if not any(override.matches(name) for name in names):
            raise StrategyError(_no_match(override, names, graph_item), override.place)
    chosen: dict[str, Override] = {}
    for name in names:
        first = next((override for override in overrides if override.matches(name)), None)
        if first is not None:
            chosen[name] = first
    for override in overrides:
        if not any(used is override for used in chosen.values()):
            log.warning(
                "%sThe pattern %r changes nothing: patterns before it match all of its variables.",
                f"{override.place}: " if override.place else "",
                override.pattern,
            )
    return chosen


def _no_match(override: Override, names: Sequence[str], graph_item: GraphLike) -> str:
    without = [variable.name for variable in graph_item.variables if override.matches(variable.name)]
    if without:
        return (
            f"The pattern {override.pattern!r} matches only variables that have no gradient in this step "
            f"({listed(without[:3])}), and there is nothing to synchronise; remove it."
        )
    return (
        f"The pattern {override.pattern!r} matches no variable (it must match the whole name). "
        f"The nearest variables are {listed(nearest(override.pattern, names))}."
    )
