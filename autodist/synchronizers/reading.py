"""What the nodes of a strategy say: the one place where messages are asked which synchronizer they have."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from google.protobuf.message import Message

from autodist.errors import StrategyError
from autodist.graph.placement import Partitioning, shard_name
from autodist.proto import strategy_pb2
from autodist.synchronizers.all_reduce import AllReduce
from autodist.synchronizers.base import Synchronizer
from autodist.synchronizers.parameter_server import ParameterServer

Part = strategy_pb2.VariableNode | strategy_pb2.Shard
"""What has a synchronizer: a whole variable's node, or a shard."""

KINDS: dict[str, type[Synchronizer]] = {kind.field: kind for kind in (AllReduce, ParameterServer)}


def has_synchronizer(part: Part) -> bool:
    """Whether a message says by what it is synchronised."""
    return part.WhichOneof("synchronizer") is not None


def field_of(message: type) -> str:
    """The field of a node, or a shard, that holds a type of message."""
    return _FIELDS[message]


_FIELDS: dict[type, str] = {kind.message: field for field, kind in KINDS.items()}


def synchronizer_of(part: Part) -> Synchronizer:
    """By what one message is synchronised.

    Raises:
        StrategyError: by nothing, or by what cannot be; the problem goes on after a variable's name.
    """
    field = part.WhichOneof("synchronizer")
    if field is None:
        what = "node" if isinstance(part, strategy_pb2.VariableNode) else "shard"
        raise StrategyError(f"has a {what} without a synchronizer; set {' or '.join(KINDS)}.")
    message = getattr(part, field)
    if field == AllReduce.field and message.compressor.kind == strategy_pb2.Compressor.NAMED:
        return KINDS[field].from_message(message)  # a script may give the name to another class
    return _read(field, message.SerializeToString())


def set_synchronizer(part: Part, synchronizer: Synchronizer) -> None:
    """Lets a message say by what it is synchronised."""
    getattr(part, synchronizer.field).CopyFrom(_said(synchronizer))


@functools.lru_cache(maxsize=1 << 14)
def _said(synchronizer: Synchronizer) -> Message:
    return synchronizer.to_message()


@functools.lru_cache(maxsize=1 << 14)
def _read(field: str, said: bytes) -> Synchronizer:
    """A plan for hundreds of workers has hundreds of thousands of shards, which say few different things."""
    kind = KINDS[field]
    return kind.from_message(kind.message.FromString(said))


def cut_of(node: strategy_pb2.VariableNode) -> Partitioning | None:
    """How a node's variable is cut; None if it is whole."""
    return Partitioning(node.partition.axis, tuple(node.partition.sizes)) if node.HasField("partition") else None


def synchronizers_of(node: strategy_pb2.VariableNode) -> tuple[Synchronizer, ...]:
    """By what a node's variable is synchronised, or each of its shards in their order."""
    return tuple(synchronizer_of(part) for part in parts_of(node))


def parts_of(node: strategy_pb2.VariableNode) -> Sequence[Part]:
    """What of a node has a synchronizer: itself, or each of its shards."""
    return node.shards or (node,)


def named_synchronizers(node: strategy_pb2.VariableNode) -> Iterator[tuple[str, Synchronizer]]:
    """The name of the variable with its synchronizer, or that of each of its shards."""
    names = [shard_name(node.variable, k) for k in range(len(node.shards))] or [node.variable]
    yield from zip(names, synchronizers_of(node), strict=True)


def all_synchronizers(strategy: strategy_pb2.Strategy) -> Iterator[tuple[str, Synchronizer]]:
    """All of a strategy, each with the name of its variable."""
    for node in strategy.nodes:
        for synchronizer in synchronizers_of(node):
            yield node.variable, synchronizer
