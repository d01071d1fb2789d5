"""OverrideVariables: some variables, told by pattern, are synchronised otherwise than a builder would."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from pydantic import Field

from autodist.errors import Place, StrategyError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce import SpecName, all_reduce_node
from autodist.strategies.base import BuildsStrategy, StrategyBuilder, make_strategy
from autodist.strategies.check import check_nodes
from autodist.strategies.loads import GreedyLoads
from autodist.strategies.nearest import listed, nearest
from autodist.strategies.options import check_options
from autodist.strategies.ps import Owner, owner_index, parameter_server_node
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

log = logging.getLogger("autodist.strategies")

Nodes = dict[str, strategy_pb2.VariableNode]


@dataclass(frozen=True)
class UseAllReduce:
    """The variable's gradient is summed over all replicas.

    Attributes:
        group: variables of equal group are reduced together. Absent: the builder's own if it chose all-reduce
            too, else one group for all variables that were changed to all-reduce.
        all_reduce_spec: as in AllReduce. Absent: the builder's own if it chose all-reduce too, else AUTO.
    """

    group: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    all_reduce_spec: SpecName | None = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class UseParameterServer:
    """One worker holds the variable.

    Attributes:
        owner: that worker's index or name. Absent: the builder's own if it chose a parameter server too, else the
            worker that owns the fewest bytes for its bandwidth.
    """

    owner: Owner | None = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Override:
    """What a pattern's variables use.

    Attributes:
        pattern: a regular expression that matches the whole name of a variable.
        use: the synchronizer.
        place: where it stands, if it came from a file.
    """

    pattern: str
    use: UseAllReduce | UseParameterServer
    place: Place | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise StrategyError(
                f"The pattern {self.pattern!r} is no regular expression: {error}.", self.place
            ) from error

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None


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
        inner = self.builder.build(graph_item, resource_spec)
        check_nodes(inner, graph_item, resource_spec)
        variables = synced_variables(graph_item)
        chosen = _chosen(self.overrides, variables, graph_item)
        nodes = {node.variable: node for node in inner.nodes}
        nodes |= _all_reduced(chosen, nodes)
        nodes |= _served(chosen, nodes, variables, resource_spec)
        return make_strategy(f"{inner.builder} with variables of their own", resource_spec, variables, nodes.values())


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


def _all_reduced(chosen: dict[str, Override], nodes: Nodes) -> Nodes:
    """The nodes of variables that an override gives to all-reduce."""
    groups = [node.all_reduce.group for node in nodes.values() if node.HasField("all_reduce")]
    own_group = max(groups, default=-1) + 1
    replaced: Nodes = {}
    for name, override in chosen.items():
        if not isinstance(override.use, UseAllReduce):
            continue
        before = nodes.get(name)
        group: int = own_group
        spec: SpecName = "AUTO"
        if before is not None and before.HasField("all_reduce"):
            group = before.all_reduce.group
            spec = cast(SpecName, strategy_pb2.AllReduce.Spec.Name(before.all_reduce.spec))
        group = group if override.use.group is None else override.use.group
        replaced[name] = all_reduce_node(name, group, override.use.all_reduce_spec or spec)
    return replaced


def _served(
    chosen: dict[str, Override], nodes: Nodes, variables: Sequence[SyncedVariable], resource_spec: ResourceSpec
) -> Nodes:
    """The nodes of variables that an override gives to a parameter server."""
    owners = {name: node.parameter_server.owner for name, node in nodes.items() if node.HasField("parameter_server")}
    for name, override in _for_parameter_servers(chosen):
        if override.owner is not None:
            owners[name] = _owner_at_place(override.owner, chosen[name], resource_spec)
    by_name = {variable.name: variable for variable in variables}
    loads = GreedyLoads(resource_spec)
    for name, owner in owners.items():
        loads.add(owner, by_name[name].byte_size)
    undecided = [by_name[name] for name, _ in _for_parameter_servers(chosen) if name not in owners]
    owners |= loads.place_all(undecided)
    return {name: parameter_server_node(name, owners[name]) for name, _ in _for_parameter_servers(chosen)}


def _for_parameter_servers(chosen: dict[str, Override]) -> Iterator[tuple[str, UseParameterServer]]:
    for name, override in chosen.items():
        if isinstance(override.use, UseParameterServer):
            yield name, override.use


def _owner_at_place(owner: Owner, override: Override, resource_spec: ResourceSpec) -> int:
    try:
        return owner_index(owner, resource_spec)
    except StrategyError as error:
        raise StrategyError(error.problem, override.place) from None
