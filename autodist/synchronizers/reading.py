"""Access to the synchronizers of strategy nodes; the only module that reads them from messages."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator, Sequence

from google.protobuf.message import Message

from autodist.errors import StrategyError
from autodist.placement.group import Group, worker_count
from autodist.placement.partitioning import Partitioning, shard_name
from autodist.placement.placement import PipelineStages, Placement
from autodist.proto import strategy_pb2
from autodist.sharding import Axis, Mesh
from autodist.synchronizers.base import Synchronizer

Part = strategy_pb2.VariableNode | strategy_pb2.Shard
"""A message with a synchronizer: the node of an unpartitioned variable, or a shard."""

KINDS: dict[str, type[Synchronizer]] = {
    field.name: pkgutil.resolve_name(f"autodist.synchronizers.{field.name}:{kind.name}")
    for field in strategy_pb2.VariableNode.DESCRIPTOR.oneofs_by_name["synchronizer"].fields
    if (kind := field.message_type)
}
"""The classes by their field: each is named after its message, and its file after the field."""


def has_synchronizer(part: Part) -> bool:
    """Returns True if a message has a synchronizer."""
    return part.WhichOneof("synchronizer") is not None


def field_of(message: type) -> str:
    """Returns the field of a node or shard that holds a type of message."""
    return _FIELDS[message]


_FIELDS: dict[type, str] = {kind.message: field for field, kind in KINDS.items()}


def synchronizer_of(part: Part) -> Synchronizer:
    """Returns the synchronizer of one message.

    Raises:
        StrategyError: it is missing or invalid; the problem is the end of a sentence that starts with a variable's
            name.
    """
    field = part.WhichOneof("synchronizer")
    if field is None:
        what = "node" if isinstance(part, strategy_pb2.VariableNode) else "shard"
        raise StrategyError(f"has a {what} without a synchronizer; set {' or '.join(KINDS)}.")
    message = getattr(part, field)
    if isinstance(message, strategy_pb2.AllReduce) and message.compressor.kind == strategy_pb2.Compressor.NAMED:
        return KINDS[field].from_message(message)  # a script may register another class under the name
    return _read(field, message.SerializeToString())


def set_synchronizer(part: Part, synchronizer: Synchronizer) -> None:
    """Sets the synchronizer of a message."""
    getattr(part, field_of(synchronizer.message)).CopyFrom(_message_of(synchronizer))


@functools.lru_cache(maxsize=1 << 14)
def _message_of(synchronizer: Synchronizer) -> Message:
    return synchronizer.to_message()


@functools.lru_cache(maxsize=1 << 14)
def _read(field: str, serialized: bytes) -> Synchronizer:
    """Parses a message; cached: plans for hundreds of workers have hundreds of thousands of mostly equal shards."""
    kind = KINDS[field]
    return kind.from_message(kind.message.FromString(serialized))


def partitioning_of(node: strategy_pb2.VariableNode) -> Partitioning | None:
    """Returns the partitioning of a node's variable; None if it is not partitioned."""
    return Partitioning(node.partition.axis, tuple(node.partition.sizes)) if node.HasField("partition") else None


def synchronizers_of(node: strategy_pb2.VariableNode) -> tuple[Synchronizer, ...]:
    """Returns the synchronizer of a node's variable, or those of its shards in order."""
    return tuple(synchronizer_of(part) for part in parts_of(node))


def parts_of(node: strategy_pb2.VariableNode) -> Sequence[Part]:
    """Returns the messages of a node that have a synchronizer: itself, or each of its shards."""
    return node.shards or (node,)


def named_synchronizers(node: strategy_pb2.VariableNode, name: str = "") -> Iterator[tuple[str, Synchronizer]]:
    """Yields the name and synchronizer of the variable, or of each of its shards; `name`: in place of its name."""
    name = name or node.variable
    names = [shard_name(name, k) for k in range(len(node.shards))] or [name]
    yield from zip(names, synchronizers_of(node), strict=True)


def all_synchronizers(strategy: strategy_pb2.Strategy) -> Iterator[tuple[str, Synchronizer]]:
    """Yields all synchronizers of a strategy, each with the name of its variable."""
    for node in strategy.nodes:
        for synchronizer in synchronizers_of(node):
            yield node.variable, synchronizer


def stages_of(strategy: strategy_pb2.Strategy) -> PipelineStages:
    """Returns the groups of a strategy's pipeline stages."""
    return PipelineStages(
        tuple(
            Group.of_workers([stage.worker, *(one.worker for one in stage.stage_group)])
            for stage in strategy.pipeline.stages
        )
    )


def placement_of(strategy: strategy_pb2.Strategy) -> Placement:
    """Returns the groups that hold the values of a run."""
    return Placement(
        Group.all_workers(worker_count(strategy.graph_config)),
        stages_of(strategy),
        {node.variable: [one.owner for one in synchronizers_of(node)] for node in strategy.nodes},
        {node.variable: one for node in strategy.nodes if (one := partitioning_of(node)) is not None},
        layers_of(strategy),
    )


def layers_of(strategy: strategy_pb2.Strategy) -> dict[str, int]:
    """Maps each variable that is gathered with a layer to the number of the layer, from 1."""
    return {node.variable: layer for node in strategy.nodes if (layer := _layer_of(node))}


def with_owners_in_row(strategy: strategy_pb2.Strategy, row: Sequence[int]) -> strategy_pb2.Strategy:
    """Returns the strategy of a mesh with workers as owners and in stages, in place of positions in a row.

    Args:
        strategy: a strategy with a mesh.
        row: the workers of a row along the axes of the batch and of the stages, by their positions.
    """
    made = strategy_pb2.Strategy()
    made.CopyFrom(strategy)
    for node in made.nodes:
        for part in parts_of(node):
            if part.HasField("parameter_server"):
                part.parameter_server.owner = row[part.parameter_server.owner]
    for stage in made.pipeline.stages:
        for one in (stage, *stage.stage_group):
            one.worker = row[one.worker]
    return made


def mesh_of(strategy: strategy_pb2.Strategy) -> Mesh:
    """Returns the mesh of a strategy."""
    return Mesh(tuple(Axis(axis.name, axis.size) for axis in strategy.mesh.axes))


def workers_of_stages(strategy: strategy_pb2.Strategy) -> list[tuple[int, ...]]:
    """Returns the workers that compute each stage; on a mesh, those of all rows."""
    by_stage = [group.workers for group in stages_of(strategy).groups]
    if not strategy.HasField("mesh"):
        return by_stage
    parts = len(strategy.mesh.places) // sum(map(len, by_stage))
    return [tuple(position * parts + k for position in positions for k in range(parts)) for positions in by_stage]


def row_axes_of(strategy: strategy_pb2.Strategy) -> list[str]:
    """Returns the axes of a mesh along which places compute on the same slices: of the stages and of the batch."""
    stages = [strategy.mesh.axes[0].name] if strategy.pipeline.stages else []
    return [*stages, *filter(None, [strategy.mesh.data])]


def _layer_of(node: strategy_pb2.VariableNode) -> int:
    """Returns the layer with which all parts of a variable are gathered, from 1; 0 if they are not."""
    layers = {synchronizer.gathered_with for synchronizer in synchronizers_of(node)}
    return layers.pop() if len(layers) == 1 else 0
