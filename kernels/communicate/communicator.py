"""Communicator: transfers of tensors between workers through queues, each with one source and one reader."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.base import Context

CAPACITY = 2
"""A worker runs at most one step ahead of its peers' reads; larger if the step may run further ahead."""


Received = dict[int, list[tf.Tensor]]
"""Received tensors, by the worker that sent them."""


@dataclass
class Communicator:
    """Sends and receives tensors within one subgraph.

    A send waits only for its tensors and for `after`, not for control dependencies of the subgraph.

    Attributes:
        f: the builder of the subgraph.
        context: the worker for which it is built.
        key: name of the messages, the same on all workers.
        capacity: number of messages that may be in flight.
        effects: names of the nodes that send and receive. All must run, even if nothing reads them, or a queue fills
            up.
    """

    f: SubgraphBuilder
    context: Context
    key: str
    capacity: int = CAPACITY
    effects: list[str] = field(default_factory=list)

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor], after: Sequence[tf.Operation] = ()) -> None:
        """Enqueues `tensors` in the queue of worker `to` after all of `after` have run."""
        name, handle, nodes = self._add_queue(self.context.worker, to, what, tensors)
        put = self.f.add(nodes.put, f"{name}_enqueue", [handle, *map(self.f.name, tensors)], after)
        put.device = self.context.cpu(to)
        self.effects.append(put.name)

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """Receives tensors from worker `source`; `like` has their dtypes and static shapes."""
        return self.receive_all(what, {source: like})[source]

    def receive_all(self, what: str, like: Mapping[int, Sequence[tf.Tensor | tf.TensorSpec]]) -> Received:
        """Receives tensors from several workers; `like` has their dtypes and static shapes, by worker."""
        names = {source: self._take(source, what, static) for source, static in like.items()}
        found = iter(self.f.inputs_like(list(chain(*names.values())), list(chain(*like.values()))))
        return {source: list(islice(found, len(static))) for source, static in like.items()}

    def fill(self, source: int, what: str, like: Sequence[tf.Tensor], count: int) -> tf.Operation:
        """Enqueues `count` copies of `like` in the queue of worker `source`, to be read before its messages."""
        queue = self._queue(source, self.context.worker, what, like)
        with tf.device(self.context.cpu(self.context.worker)):
            return queue.enqueue_many([tf.stack([t] * count) for t in like])

    def take_and_put_back(self, source: int, what: str, like: Sequence[tf.Tensor], count: int) -> tf.Operation:
        """Completes when `count` messages of worker `source` have arrived, and leaves them in the queue."""
        queue = self._queue(source, self.context.worker, what, like)
        with tf.device(self.context.cpu(self.context.worker)):
            return queue.enqueue_many(queue.dequeue_many(count))

    def all_to_all(self, what: str, tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Sends `tensors` to all workers; returns those of every computing worker in worker order."""
        self.send_to_others(what, tensors)
        return self.parts(what, tensors)

    def send_to_others(self, what: str, tensors: Sequence[tf.Tensor]) -> None:
        """Sends `tensors` to every other worker, if this one computes."""
        if self.context.computes:
            for to in range(self.context.workers):
                if to != self.context.worker:
                    self.send(to, what, tensors)

    def parts(
        self, what: str, mine: Sequence[tf.Tensor], sources: Sequence[int] | None = None
    ) -> list[list[tf.Tensor]]:
        """Receives a part from each of `sources` (by default all that compute), in order, with `mine` as its own."""
        me, sources = self.context.worker, self.context.computing if sources is None else sources
        received = self.receive_all(what, {w: mine for w in sources if w != me})
        return [list(mine) if w == me else received[w] for w in sources]

    def _take(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[str]:
        """Adds the dequeue of a queue that a worker sends to; returns the names of the tensors."""
        name, handle, nodes = self._add_queue(source, self.context.worker, what, like)
        take = self.f.add(nodes.take, f"{name}_Dequeue", [handle])
        take.device = self.context.cpu(self.context.worker)
        self.effects.append(take.name)
        return [f"{take.name}:{k}" for k in range(len(like))]

    def _add_queue(
        self, source: int, to: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]
    ) -> tuple[str, str, _Nodes]:
        """Adds a queue; returns its name within the subgraph, its full name, and the node templates that go with it."""
        nodes = _nodes_for(tuple(t.dtype for t in like))
        name = self.f.graph.unique_name("fifo_queue")
        queue = self.f.add(nodes.queue, name, ())
        queue.device = self.context.cpu(to)
        queue.attr["capacity"].i = self.capacity
        queue.attr["shared_name"].s = self._shared_name(source, to, what).encode()
        static = _known_shapes(like)
        if static is not None:
            queue.attr["shapes"].list.shape.extend(shape.as_proto() for shape in static)
        return name, queue.name, nodes

    def _queue(self, source: int, to: int, what: str, like: Sequence[tf.Tensor]) -> tf.queue.FIFOQueue:
        with tf.device(self.context.cpu(to)):
            return tf.queue.FIFOQueue(
                self.capacity, [t.dtype for t in like], _known_shapes(like),
                shared_name=self._shared_name(source, to, what),
            )  # fmt: skip

    def _shared_name(self, source: int, to: int, what: str) -> str:
        return f"{self.key}/{what}/{source}/{to}"


def _known_shapes(like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.TensorShape] | None:
    """Returns the shapes if all are fully defined, else None: a queue has all shapes or none."""
    shapes = [t.shape for t in like]
    return shapes if all(shape.is_fully_defined() for shape in shapes) else None


@dataclass(frozen=True)
class _Nodes:
    """Node templates of a queue, its enqueue and its dequeue."""

    queue: NodeDef
    put: NodeDef
    take: NodeDef


@functools.cache
def _nodes_for(dtypes: tuple[tf.DType, ...]) -> _Nodes:
    """Returns node templates for some dtypes, without names, inputs and shapes: a step has thousands of each."""
    with tf.Graph().as_default() as graph:
        queue = tf.queue.FIFOQueue(CAPACITY, dtypes)
        queue.enqueue([tf.raw_ops.Placeholder(dtype=dtype) for dtype in dtypes])
        queue.dequeue()
    by_op = {node.op: node for node in graph.as_graph_def().node}
    made = _Nodes(by_op["FIFOQueueV2"], by_op["QueueEnqueueV2"], by_op["QueueDequeueV2"])
    for node in (made.put, made.take):
        del node.input[:]
    return made
