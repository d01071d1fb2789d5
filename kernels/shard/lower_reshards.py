"""LowerReshards: replaces reshard nodes by exchanges with the other places of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import tensorflow as tf

from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.communicator import DIRECT_BYTES, Communicator
from autodist.kernels.shard.local_reshards import reduced
from autodist.kernels.shard.reshards import Reshard, ReshardKind, set_index, source_of
from autodist.placement.group import Group

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
        "parameter-servers": "it finds the owners that run a reshard node by the operands of the node",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.mesh is None:
            return step
        editor = StepEditor(step)
        run = _run_here(step) if context.has_stages_on_mesh else step.graph_index.nodes.keys()
        for name, node in step.graph_index.nodes.items():
            if name in run and (reshard := Reshard.of(node)) is not None:
                _lower(editor, step, context, name, reshard)
        return editor.to_step()


def _run_here(step: ReplicatedStep) -> Set[str]:
    """Returns the nodes that the outputs and targets of a step need; other pipeline stages run the other nodes."""
    return reach([*map(node_of, step.outputs), *step.targets], step.graph_index.sources.__getitem__)


def group_of(row: Sequence[int], context: Context) -> Group:
    """Returns the group of the workers of some places."""
    return Group.of_workers(context.strategy.mesh.places[place].worker for place in row)


def _lower(editor: StepEditor[ReplicatedStep], step: ReplicatedStep, context: Context, name: str, how: Reshard) -> None:
    assert context.mesh is not None, "only a mesh has reshard nodes"
    replica, placed = step.replica_of(name)
    coordinate, captured = step.part_of(placed)
    place = context.place_of(replica, coordinate)
    row = context.mesh.row(place, how.axes)
    node = editor[name]
    if how.kind is ReshardKind.INDEX:
        set_index(node, row.index(place))
        return
    group = group_of(row, context)
    # Workers may have several rows in common, which differ on the other axes.
    index = context.mesh.index(place, [axis for axis in context.model_axes if axis not in how.axes])
    key = f"{captured}/{replica}" + (f"/{index}" if index else "")
    with editor.subgraph(f"lowered/{key}") as f, tf.device(context.cpu(context.worker)):
        exchange = Communicator(f, context, key, group)
        parts = f.inputs(_sources(editor, name, how, len(group.ranks(context.worker))))
        made = list(map(f.name, _LOWERED[how.kind](exchange, parts, how)))
    editor.run(exchange.effects)
    if len(made) == 1:
        editor.pass_on(name, made[0], step.spec_of(f"{name}:0").dtype, filter(is_control, node.input))
        return
    for position, one in enumerate(made):
        editor.rewire(f"{name}:{position}", one)


def _sources(editor: StepEditor[ReplicatedStep], name: str, how: Reshard, count: int) -> list[str]:
    """Returns the tensors that a reshard node transfers: one, or those of `count` places of this worker."""
    node = editor[name]
    if node.op == "ConcatV2":
        return [tensor(i) for i in node.input[:count]]
    source = source_of(name, editor)
    if how.kind is ReshardKind.ALL_TO_ALL and node.op == "Split":
        return [tensor(i) for i in editor[node_of(source)].input[:count]]
    return [source]


def _slice(exchange: Communicator, parts: list[tf.Tensor], how: Reshard) -> list[tf.Tensor]:
    own = exchange.group.ranks(exchange.me)[0]
    return [tf.split(parts[0], exchange.group.size, how.dimension)[own]]


def _all_gather(exchange: Communicator, parts: list[tf.Tensor], how: Reshard) -> list[tf.Tensor]:
    return [tf.concat(_gather(exchange, "part", parts), how.dimension)]


def _gather(exchange: Communicator, tag: str, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the parts of all places of a row, in rank order; each worker sends those of its places."""
    group = exchange.group
    exchange.broadcast(tag, parts)
    counts = {worker: len(group.ranks(worker)) for worker in group.workers if worker != exchange.me}
    came = exchange.receive_each(tag, {worker: [parts[0]] * count for worker, count in counts.items()})
    came[exchange.me] = parts
    return _by_rank(exchange, came)


def _by_rank(exchange: Communicator, came: Mapping[int, Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the tensors of the places of each worker in rank order."""
    ranks = [rank for worker in came for rank in exchange.group.ranks(worker)]
    tensors = [one for worker in came for one in came[worker]]
    return [one for _, one in sorted(zip(ranks, tensors, strict=True), key=lambda pair: pair[0])]


def _all_reduce(exchange: Communicator, parts: list[tf.Tensor], how: Reshard) -> list[tf.Tensor]:
    """Reduces whole tensors of two workers, or small ones; of others, each worker reduces one piece."""
    [x], count = parts, len(exchange.group.workers)
    if is_sent_whole(x, count):
        return [reduced([part[0] for part in exchange.all_gather("part", [x])], how.how)]
    flat = tf.reshape(x, [-1])
    length = tf.size(flat)
    pieces = _open(tf.split(flat, piece_lengths(length, count), num=count))
    of_worker = dict(zip(exchange.group.workers, pieces, strict=True))
    mine = of_worker.pop(exchange.me)
    exchange.scatter("piece", {worker: [piece] for worker, piece in of_worker.items()})
    own = reduced([piece for [piece] in exchange.collect("piece", [mine])], how.how)
    sums = [part[0] for part in exchange.all_gather("sum", _open([own]))]
    return [tf.reshape(tf.concat(sums, 0), tf.shape(x))]


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


def _reduce_scatter(exchange: Communicator, parts: list[tf.Tensor], how: Reshard) -> list[tf.Tensor]:
    [x], group = parts, exchange.group
    pieces = tf.split(x, group.size, how.dimension)
    of_worker = {worker: [pieces[rank] for rank in group.ranks(worker)] for worker in group.workers}
    own = of_worker.pop(exchange.me)
    exchange.scatter("piece", of_worker)
    came = exchange.collect("piece", own)
    return [reduced(pieces_of_place, how.how) for pieces_of_place in zip(*came, strict=True)]


def _all_to_all(exchange: Communicator, parts: list[tf.Tensor], how: Reshard) -> list[tf.Tensor]:
    """Sends each worker the pieces of this worker's places for its places, place by place."""
    group = exchange.group
    pieces = [tf.split(part, group.size, how.split) for part in parts]
    of_worker = {w: [own[rank] for own in pieces for rank in group.ranks(w)] for w in group.workers}
    own = of_worker.pop(exchange.me)
    exchange.scatter("piece", of_worker)
    counts = {worker: len(group.ranks(worker)) * len(parts) for worker in of_worker}
    came = exchange.receive_each("piece", {worker: [own[0]] * count for worker, count in counts.items()})
    came[exchange.me] = own
    count = len(parts)
    return [
        tf.concat(_by_rank(exchange, {w: tensors[k::count] for w, tensors in came.items()}), how.dimension)
        for k in range(count)
    ]


_LOWERED: Mapping[ReshardKind, Callable[[Communicator, list[tf.Tensor], Reshard], list[tf.Tensor]]] = {
    ReshardKind.SLICE: _slice,
    ReshardKind.ALL_GATHER: _all_gather,
    ReshardKind.ALL_REDUCE: _all_reduce,
    ReshardKind.REDUCE_SCATTER: _reduce_scatter,
    ReshardKind.ALL_TO_ALL: _all_to_all,
}
"""The transfers of a row, by the parts of this worker's places: its only result, or one for each of its places."""
