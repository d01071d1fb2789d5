"""LowerReshards: replaces reshard nodes by exchanges with the other places of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import tensorflow as tf

from autodist.graph.names import is_control, node_of
from autodist.graph.step import ReplicatedStep, StepWithOwners
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import DIRECT_BYTES, Communicator
from autodist.kernels.shard.reshards import Reshard, ReshardKind, set_index
from autodist.kernels.sums import ordered_sum
from autodist.placement.group import Group, Place
from autodist.placement.holder import Holder
from autodist.sharding import Sharding

_Length = TypeVar("_Length", int, tf.Tensor)


@dataclass(frozen=True)
class LowerReshards(Kernel[ReplicatedStep, ReplicatedStep]):
    """Exchanges the parts of tensors among the workers of a row of the mesh.

    All members of a row compute sums in row order, so they get the same bits.

        all_gather(x)    becomes    send(x),  concat(x, received)
    """

    name: ClassVar[str] = "lower-reshards"
    after: ClassVar[Mapping[str, str]] = {
        "replicate": "it copies the reshard nodes of the compute part for each replica",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.mesh is None:
            return step
        editor = StepEditor(step)
        for name, node in step.graph_index.nodes.items():
            if (reshard := Reshard.of(node)) is not None:
                _lower(editor, step, context, name, reshard)
        _signal_writes(editor, step, context)
        holders = holders_of_shardings(step, context)
        for name, holder in holders.items():
            [own] = (one for one in holder.slices if context.worker in one.group)
            editor[step.by_name[name].handle].attr["shared_name"].s += own.name.encode()
        return editor.to_step(holders={**step.holders, **holders})


def _signal_writes(editor: StepEditor[ReplicatedStep], step: ReplicatedStep, context: Context) -> None:
    """Makes writes of divided variables wait until all members of a row begin the step; its end waits for all writes.

    Between two steps, a worker may therefore read the parts of the others: all are of the same step.
    """
    assert context.mesh is not None, "only a mesh divides variables"
    divided = {step.by_name[name].handle for name in step.shardings}
    writes = [name for name, effect in step.graph_index.effects.items() if effect.writes & divided and name in editor]
    own, data = context.mesh_row[context.local_replicas[0]], context.strategy.mesh.data
    row = context.mesh.row(own, [name for name in context.mesh.names if name != data])
    group = _group_of(row, context)
    others = [worker for worker in group.workers if worker != context.worker]
    if not writes or not others:
        return
    key = f"written_parts/{digest(';'.join(sorted(step.shardings)))}"
    with editor.subgraph(key) as f, tf.device(context.cpu(context.worker)):
        exchange, token = Communicator(f, context, key, group), tf.constant(True)
        exchange.broadcast("begun", [token])
        begun = exchange.receive_each("begun", {worker: [token] for worker in others})
        exchange.broadcast("written", [token], after=writes)
        exchange.receive_each("written", {worker: [token] for worker in others})
        names = [node_of(f.name(tensors[0])) for tensors in begun.values()]
    editor.run(exchange.effects)
    for name in writes:
        editor.add_control(name, names)


def _group_of(row: Sequence[int], context: Context) -> Group:
    """Returns the group of the workers of some places."""
    return Group.of_workers(context.strategy.mesh.places[place].worker for place in row)


def holders_of_shardings(step: StepWithOwners, context: Context) -> dict[str, Holder]:
    """Returns the holders of a step's divided variables, by name."""
    return {name: _holder(step, context, name, sharding) for name, sharding in step.shardings.items()}


def _holder(step: StepWithOwners, context: Context, name: str, sharding: Sharding) -> Holder:
    """Returns the holder of a divided variable: each part is held by the places with the same coordinates."""
    mesh, places = context.mesh, context.strategy.mesh.places
    assert mesh is not None, "only a mesh divides variables"
    counts = [mesh.count(axes) for axes in sharding.axes]
    used = [axis for axes in sharding.axes for axis in axes]
    members: dict[int, list[Place]] = {}
    for place in mesh.coordinates:
        part = 0
        for axes, count in zip(sharding.axes, counts, strict=True):
            part = part * count + mesh.index(place, axes)
        members.setdefault(part, []).append(Place(places[place].worker, places[place].device))
    shape = [n * count for n, count in zip(step.by_name[name].shape, counts, strict=True)]
    assert len(members) == mesh.count(used), "a part for each coordinate on the axes that divide the variable"
    return Holder.divided(shape, counts, [Group(tuple(members[part])) for part in sorted(members)])


def _lower(editor: StepEditor[ReplicatedStep], step: ReplicatedStep, context: Context, name: str, how: Reshard) -> None:
    assert context.mesh is not None, "only a mesh has reshard nodes"
    replica, captured = step.replica_of(name)
    place = context.mesh_row[context.local_replicas[replica]]
    row = context.mesh.row(place, how.axes)
    node = editor[name]
    if how.kind is ReshardKind.INDEX:
        set_index(node, row.index(place))
        return
    group = _group_of(row, context)
    data = [i for i in node.input if not is_control(i)]
    source = data[1] if node.op == "Split" else data[0]
    if how.kind is ReshardKind.ALL_TO_ALL:
        source = [i for i in editor[source].input if not is_control(i)][1]
    key = f"{captured}/{replica}"
    with editor.subgraph(f"lowered/{key}") as f, tf.device(context.cpu(context.worker)):
        exchange = Communicator(f, context, key, group)
        made = f.name(_LOWERED[how.kind](exchange, f.input(source), how))
    editor.run(exchange.effects)
    editor.pass_on(name, made, step.spec_of(f"{name}:0").dtype, filter(is_control, node.input))


def _slice(exchange: Communicator, x: tf.Tensor, how: Reshard) -> tf.Tensor:
    own = exchange.group.ranks(exchange.me)[0]
    return tf.split(x, exchange.group.size, how.dimension)[own]


def _all_gather(exchange: Communicator, x: tf.Tensor, how: Reshard) -> tf.Tensor:
    return tf.concat([part[0] for part in exchange.all_gather("part", [x])], how.dimension)


def _all_reduce(exchange: Communicator, x: tf.Tensor, how: Reshard) -> tf.Tensor:
    """Reduces whole tensors of two members, or small ones; of others, each member reduces one piece."""
    count = exchange.group.size
    if is_sent_whole(x, count):
        return _reduced([part[0] for part in exchange.all_gather("part", [x])], how)
    flat = tf.reshape(x, [-1])
    length = tf.size(flat)
    own = _reduced(exchange.all_to_all("piece", _open(tf.split(flat, piece_lengths(length, count), num=count))), how)
    pieces = [part[0] for part in exchange.all_gather("sum", _open([own]))]
    return tf.reshape(tf.concat(pieces, 0), tf.shape(x))


def is_sent_whole(x: tf.Tensor | tf.TensorSpec, count: int) -> bool:
    """Returns True if an all-reduce of `count` members sends whole tensors with the static shape of `x`."""
    elements = x.shape.num_elements()
    return count == 2 or (elements is not None and elements * x.dtype.size <= DIRECT_BYTES)


def piece_lengths(length: _Length, count: int) -> list[_Length]:
    """Returns the numbers of elements of the pieces that the members of an all-reduce reduce, in rank order."""
    return [length // count] * (count - 1) + [length - length // count * (count - 1)]


def _open(vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns vectors without static lengths: the last piece may be longer than the others."""
    return [tf.raw_ops.PlaceholderWithDefault(input=vector, shape=[None]) for vector in vectors]


def _reduce_scatter(exchange: Communicator, x: tf.Tensor, how: Reshard) -> tf.Tensor:
    return _reduced(exchange.all_to_all("piece", tf.split(x, exchange.group.size, how.dimension)), how)


def _all_to_all(exchange: Communicator, x: tf.Tensor, how: Reshard) -> tf.Tensor:
    return tf.concat(exchange.all_to_all("piece", tf.split(x, exchange.group.size, how.split)), how.dimension)


_LOWERED: Mapping[ReshardKind, Callable[[Communicator, tf.Tensor, Reshard], tf.Tensor]] = {
    ReshardKind.SLICE: _slice,
    ReshardKind.ALL_GATHER: _all_gather,
    ReshardKind.ALL_REDUCE: _all_reduce,
    ReshardKind.REDUCE_SCATTER: _reduce_scatter,
    ReshardKind.ALL_TO_ALL: _all_to_all,
}


_MERGED = {"max": tf.maximum, "min": tf.minimum}
_MERGED_BOOLEANS = {"max": tf.logical_or, "min": tf.logical_and}


def _reduced(parts: list[tf.Tensor], how: Reshard) -> tf.Tensor:
    """Reduces parts in row order."""
    if how.how in ("max", "min"):
        merge = (_MERGED_BOOLEANS if parts[0].dtype == tf.bool else _MERGED)[how.how]
        found = parts[0]
        for part in parts[1:]:
            found = merge(found, part)
        return found
    total = ordered_sum(parts)
    return total / tf.cast(len(parts), total.dtype) if how.how == "mean" else total
