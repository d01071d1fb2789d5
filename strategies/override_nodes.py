"""The nodes of variables that overrides change: what an override leaves open stays as the builder had it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autodist.errors import StrategyError
from autodist.graph.placement import Cut
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce_options import all_reduce_synchronizer
from autodist.strategies.cut import shards_of
from autodist.strategies.loads import GreedyLoads, PieceKey
from autodist.strategies.nodes import cut_of, node_of, pieces, synchronized_parts
from autodist.strategies.override import Override, UseAllReduce, UseParameterServer
from autodist.strategies.ps import owner_index
from autodist.strategies.server_options import SYNCHRONOUS
from autodist.strategies.variables import SyncedVariable

Synchronizer = TypeVar("Synchronizer", strategy_pb2.AllReduce, strategy_pb2.ParameterServer)

Nodes = Mapping[str, strategy_pb2.VariableNode]
"""By the variable's name."""


def all_reduced_nodes(
    chosen: Mapping[str, Override], nodes: Nodes, variables: Sequence[SyncedVariable]
) -> dict[str, strategy_pb2.VariableNode]:
    """The nodes of variables that an override gives to all-reduce.

    Args:
        chosen: the override that each variable uses.
        nodes: the builder's.
        variables: all that have a gradient.

    Raises:
        StrategyError: when a variable cannot be cut as its override says.
    """
    groups = [part.all_reduce.group for part in _parts(nodes) if part.HasField("all_reduce")]
    default = all_reduce_synchronizer(group=max(groups, default=-1) + 1)
    replaced = {}
    for variable in variables:
        override = chosen.get(variable.name)
        if override is None or not isinstance(override.use, UseAllReduce):
            continue
        before = nodes[variable.name]
        cut = _cut(override, variable, before)
        earlier = [part.all_reduce for part in synchronized_parts(before) if part.HasField("all_reduce")]
        reduced = [_reduced(override.use, one) for one in _matched(cut, earlier or [default])]
        replaced[variable.name] = node_of(variable.name, cut, reduced)
    return replaced


def _reduced(use: UseAllReduce, before: strategy_pb2.AllReduce) -> strategy_pb2.AllReduce:
    after = strategy_pb2.AllReduce()
    after.CopyFrom(before)
    if use.group is not None:
        after.group = use.group
    if use.all_reduce_spec is not None:
        after.ClearField("spec")
        after.MergeFrom(strategy_pb2.AllReduce(spec=use.all_reduce_spec))
    if use.compressor is not None:
        after.ClearField("compressor")
        after.MergeFrom(all_reduce_synchronizer(compressor=use.compressor))
    return after


@dataclass(frozen=True)
class _Served:
    """What an override makes of a variable that is given to parameter servers.

    Attributes:
        cut: None if it is whole.
        servers: one a piece; the owners hold only where they are decided.
        is_decided: whether the owners stand.
    """

    variable: SyncedVariable
    cut: Cut | None
    servers: tuple[strategy_pb2.ParameterServer, ...]
    is_decided: bool

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece."""
        return [shard.byte_size for shard in shards_of(self.variable, self.cut)]

    def node(self, dealt: Mapping[PieceKey, int]) -> strategy_pb2.VariableNode:
        """The node, with owners that were dealt out where none was decided."""
        name = self.variable.name
        servers = [
            _owned_by(server, dealt.get((name, index), server.owner)) for index, server in enumerate(self.servers)
        ]
        return node_of(name, self.cut, servers)


def served_nodes(
    chosen: Mapping[str, Override], nodes: Nodes, variables: Sequence[SyncedVariable], resource_spec: ResourceSpec
) -> dict[str, strategy_pb2.VariableNode]:
    """The nodes of variables that an override gives to parameter servers; arguments and errors as above.

    Owners that nothing decides are dealt out after all others, whose bytes count.
    """
    served = {}
    for variable in variables:
        override = chosen.get(variable.name)
        if override is not None and isinstance(override.use, UseParameterServer):
            served[variable.name] = _served(override, override.use, variable, nodes[variable.name], resource_spec)
    loads = GreedyLoads(resource_spec)
    for variable in variables:
        for owner, byte_size in _owned(variable, nodes[variable.name], served.get(variable.name)):
            loads.add(owner, byte_size)
    undecided = [one for one in served.values() if not one.is_decided]
    owners = loads.place_pieces(
        {(one.variable.name, index): size for one in undecided for index, size in enumerate(one.sizes)}
    )
    return {name: one.node(owners) for name, one in served.items()}


def _served(
    override: Override,
    use: UseParameterServer,
    variable: SyncedVariable,
    before: strategy_pb2.VariableNode,
    resource_spec: ResourceSpec,
) -> _Served:
    cut = _cut(override, variable, before)
    earlier = [part.parameter_server for part in synchronized_parts(before) if part.HasField("parameter_server")]
    servers = [_server(use, one) for one in _matched(cut, earlier or [SYNCHRONOUS.parameter_server(0)])]
    owners = _owners(override, use, variable, len(servers), resource_spec)
    if owners:
        servers = [_owned_by(server, owner) for server, owner in zip(servers, owners, strict=True)]
    keeps_owners = len(earlier) == len(servers) and cut == cut_of(before)
    return _Served(variable, cut, tuple(servers), bool(owners) or keeps_owners)


def _owned_by(server: strategy_pb2.ParameterServer, owner: int) -> strategy_pb2.ParameterServer:
    owned = strategy_pb2.ParameterServer()
    owned.CopyFrom(server)
    owned.owner = owner
    return owned


def _server(use: UseParameterServer, before: strategy_pb2.ParameterServer) -> strategy_pb2.ParameterServer:
    after = strategy_pb2.ParameterServer()
    after.CopyFrom(before)
    if use.sync is not None:
        after.asynchronous = not use.sync
    if use.staleness is not None:
        after.staleness = use.staleness
    if use.local_proxy_variable is not None:
        after.local_proxy = use.local_proxy_variable
    return after


def _owners(
    override: Override, use: UseParameterServer, variable: SyncedVariable, count: int, resource_spec: ResourceSpec
) -> list[int]:
    """The owner of each piece as the override says it; none if it says nothing."""
    if use.owner is None:
        return []
    named = use.owner if isinstance(use.owner, tuple) else (use.owner,) * count
    if len(named) != count:
        problem = f"owner names {len(named)} workers for {variable.name}, which has {count} shards"
        if count == 1:
            problem = f"owner names {len(named)} workers for {variable.name}, which is whole"
        raise StrategyError(f"{problem}; name one, or one for each shard.", override.place)
    try:
        return [owner_index(owner, resource_spec) for owner in named]
    except StrategyError as error:
        raise StrategyError(error.problem, override.place) from None


def _owned(
    variable: SyncedVariable, node: strategy_pb2.VariableNode, served: _Served | None
) -> Iterator[tuple[int, int]]:
    """Owner and bytes of each piece of a variable, where the owner is known."""
    if served is None:
        for piece, part in pieces(variable, node):
            if part.HasField("parameter_server"):
                yield part.parameter_server.owner, piece.byte_size
    elif served.is_decided:
        yield from zip((server.owner for server in served.servers), served.sizes, strict=True)


def _cut(override: Override, variable: SyncedVariable, before: strategy_pb2.VariableNode) -> Cut | None:
    partition = override.use.partition
    if partition is None:
        return cut_of(before)
    try:
        return partition.cut(variable)
    except StrategyError as error:
        raise StrategyError(error.problem, override.place) from None


def _matched(cut: Cut | None, earlier: Sequence[Synchronizer]) -> Sequence[Synchronizer]:
    """What each piece had before: its own where there are as many, else the first one's."""
    count = 1 if cut is None else len(cut.sizes)
    return earlier if len(earlier) == count else [earlier[0]] * count


def _parts(nodes: Nodes) -> Iterator[strategy_pb2.VariableNode | strategy_pb2.Shard]:
    for node in nodes.values():
        yield from synchronized_parts(node)
