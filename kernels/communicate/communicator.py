"""Exchange: tensors that go from worker to worker through queues, each with one source and one reader."""

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
"""A worker is never more than one step ahead of what its peers read; more, where it may be by more steps."""


Received = dict[int, list[tf.Tensor]]
"""What came, by the worker that sent it."""


@dataclass
class Communicator:
    """Sends and receives within one fragment.

    What is sent waits for the tensors and for what `after` names alone, not for control dependencies of the fragment.

    Attributes:
        f: the fragment.
        context: for whom it is built.
        key: name of what travels, the same on all workers.
        capacity: how much of it may be under way.
        effects: names of the nodes that send and receive; all have to run, read or not, or a queue would fill up.
    """

    f: SubgraphBuilder
    context: Context
    key: str
    capacity: int = CAPACITY
    effects: list[str] = field(default_factory=list)

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor], after: Sequence[tf.Operation] = ()) -> None:
        """Puts `tensors` into the queue of worker `to`, once all of `after` ran."""
        name, handle, nodes = self._add_queue(self.context.worker, to, what, tensors)
        put = self.f.add(nodes.put, f"{name}_enqueue", [handle, *map(self.f.name, tensors)], after)
        put.device = self.context.cpu(to)
        self.effects.append(put.name)

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """What worker `source` sends; `like` has the dtypes and static shapes that come."""
        return self.receive_all(what, {source: like})[source]

    def receive_all(self, what: str, like: Mapping[int, Sequence[tf.Tensor | tf.TensorSpec]]) -> Received:
        """What workers send; `like` has by worker the dtypes and static shapes that come."""
        names = {source: self._take(source, what, known) for source, known in like.items()}
        found = iter(self.f.inputs_like(list(chain(*names.values())), list(chain(*like.values()))))
        return {source: list(islice(found, len(known))) for source, known in like.items()}

    def fill(self, source: int, what: str, like: Sequence[tf.Tensor], count: int) -> tf.Operation:
        """Puts `count` copies of `like` where worker `source` will send to, to be read before what it sends."""
        queue = self._queue(source, self.context.worker, what, like)
        with tf.device(self.context.cpu(self.context.worker)):
            return queue.enqueue_many([tf.stack([t] * count) for t in like])

    def take_and_put_back(self, source: int, what: str, like: Sequence[tf.Tensor], count: int) -> tf.Operation:
        """Ends once `count` of what worker `source` sends is there, and leaves it there."""
        queue = self._queue(source, self.context.worker, what, like)
        with tf.device(self.context.cpu(self.context.worker)):
            return queue.enqueue_many(queue.dequeue_many(count))

    def all_to_all(self, what: str, tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """What every worker that computes sends under `what`, in the order of the workers; its own part among them."""
        self.send_to_others(what, tensors)
        return self.parts(what, tensors)

    def send_to_others(self, what: str, tensors: Sequence[tf.Tensor]) -> None:
        """Puts `tensors` into a queue of every other worker, if this one computes."""
        if self.context.computes:
            for to in range(self.context.workers):
                if to != self.context.worker:
                    self.send(to, what, tensors)

    def parts(
        self, what: str, mine: Sequence[tf.Tensor], sources: Sequence[int] | None = None
    ) -> list[list[tf.Tensor]]:
        """What each worker of `sources` (all that compute) sends here, in their order; `mine` in this one's place."""
        me, sources = self.context.worker, self.context.computing if sources is None else sources
        received = self.receive_all(what, {w: mine for w in sources if w != me})
        return [list(mine) if w == me else received[w] for w in sources]

    def _take(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[str]:
        """Adds what takes from the queue that a worker sends to; returns the names of the tensors."""
        name, handle, nodes = self._add_queue(source, self.context.worker, what, like)
        take = self.f.add(nodes.take, f"{name}_Dequeue", [handle])
        take.device = self.context.cpu(self.context.worker)
        self.effects.append(take.name)
        return [f"{take.name}:{k}" for k in range(len(like))]

    def _add_queue(
        self, source: int, to: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]
    ) -> tuple[str, str, _Nodes]:
        """Adds a queue; returns its name within the fragment, its name, and the nodes that go with it."""
        nodes = _nodes_for(tuple(t.dtype for t in like))
        name = self.f.graph.unique_name("fifo_queue")
        queue = self.f.add(nodes.queue, name, ())
        queue.device = self.context.cpu(to)
        queue.attr["capacity"].i = self.capacity
        queue.attr["shared_name"].s = self._shared_name(source, to, what).encode()
        known = _known_shapes(like)
        if known is not None:
            queue.attr["shapes"].list.shape.extend(shape.as_proto() for shape in known)
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
    """The shapes, if all are known: a queue knows all or none."""
    shapes = [t.shape for t in like]
    return shapes if all(shape.is_fully_defined() for shape in shapes) else None


@dataclass(frozen=True)
class _Nodes:
    """A queue, and what puts into it and takes from it."""

    queue: NodeDef
    put: NodeDef
    take: NodeDef


@functools.cache
def _nodes_for(dtypes: tuple[tf.DType, ...]) -> _Nodes:
    """Nodes for tensors of some types, without names, inputs and shapes: there are thousands of each in a step."""
    with tf.Graph().as_default() as graph:
        queue = tf.queue.FIFOQueue(CAPACITY, dtypes)
        queue.enqueue([tf.raw_ops.Placeholder(dtype=dtype) for dtype in dtypes])
        queue.dequeue()
    by_op = {node.op: node for node in graph.as_graph_def().node}
    made = _Nodes(by_op["FIFOQueueV2"], by_op["QueueEnqueueV2"], by_op["QueueDequeueV2"])
    for node in (made.put, made.take):
        del node.input[:]
    return made
