"""Communicator: messages between the workers of a group, through an outbox of the source and an inbox of the reader."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.inboxes import SOURCE, Inbox
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.base import Context
from autodist.placement.group import Group

CAPACITY = 2
"""A worker runs at most one step ahead of its peers' reads; larger if the step may run further ahead."""


Received = dict[int, list[tf.Tensor]]
"""Received tensors, by the worker that sent them."""


@dataclass
class Communicator:
    """Sends and receives tensors of one group within one subgraph.

    A message has a source, a reader and a tag, which all its workers know alike. Its source puts it into a queue of its
    own, the outbox. The reader takes it from a queue of its own, the inbox, to which `runtime.inbox_loops` brings it. A
    step therefore runs on its worker alone. A send waits only for its tensors and for `after`, not for control
    dependencies of the subgraph.

    Attributes:
        f: the builder of the subgraph.
        context: the worker for which it is built.
        key: of the messages, the same on all workers.
        group: the workers that take part.
        capacity: number of messages that may be in flight.
        effects: names of the nodes that send and receive. All must run, even if nothing reads them, or a queue fills
            up.
    """

    f: SubgraphBuilder
    context: Context
    key: str
    group: Group
    capacity: int = CAPACITY
    effects: list[str] = field(default_factory=list)

    @property
    def me(self) -> int:
        """This worker."""
        return self.context.worker

    @property
    def contributes(self) -> bool:
        """True if this worker has a place in the group."""
        return self.me in self.group

    # -- one worker to another -------------------------------------------------------------------------------------

    def send(self, to: int, tag: str, tensors: Sequence[tf.Tensor], after: Sequence[str] = ()) -> None:
        """Sends tensors to worker `to` after the nodes `after` of the step have run."""
        name, handle, nodes = self._add_queue(self.me, to, tag, tensors)
        put = self.f.add(
            nodes.put, f"{name}_enqueue", [handle, *map(self.f.name, tensors)], [self.f.after(after)] if after else ()
        )
        put.device = self.context.cpu(self.me)
        self.effects.append(put.name)

    def receive(self, source: int, tag: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """Receives tensors from worker `source`; `like` has their dtypes and static shapes."""
        return self.receive_each(tag, {source: like})[source]

    def receive_each(self, tag: str, like: Mapping[int, Sequence[tf.Tensor | tf.TensorSpec]]) -> Received:
        """Receives tensors from several workers; `like` has their dtypes and static shapes, by worker."""
        names = {source: self._take(source, tag, static) for source, static in like.items()}
        found = iter(self.f.inputs_like(list(chain(*names.values())), list(chain(*like.values()))))
        return {source: list(islice(found, len(static))) for source, static in like.items()}

    def prefill(self, source: int, tag: str, like: Sequence[tf.Tensor], count: int) -> tf.Operation:
        """Adds `count` copies of `like` that this worker receives before the messages of worker `source`."""
        queue = self._queue(source, self.me, tag, like)
        with tf.device(self.context.cpu(self.me)):
            return queue.enqueue_many([tf.stack([t] * count) for t in like])

    def await_messages(self, source: int, tag: str, like: Sequence[tf.Tensor], count: int) -> tf.Operation:
        """Completes when `count` messages of worker `source` have arrived, which this worker can still receive."""
        queue = self._queue(source, self.me, tag, like)
        with tf.device(self.context.cpu(self.me)):
            return queue.enqueue_many(queue.dequeue_many(count))

    # -- the group -------------------------------------------------------------------------------------------------

    def broadcast(
        self,
        tag: str,
        tensors: Sequence[tf.Tensor],
        to: Iterable[int] | None = None,
        after: Sequence[str] = (),
    ) -> None:
        """Sends tensors to each other worker of `to`; by default to everyone in the group, in worker order."""
        for worker in sorted(self.group.everyone) if to is None else to:
            if worker != self.me:
                self.send(worker, tag, tensors, after)

    def scatter(self, tag: str, parts: Mapping[int, Sequence[tf.Tensor]]) -> None:
        """Sends each worker its part."""
        for worker, part in parts.items():
            self.send(worker, tag, part)

    def collect(
        self, tag: str, own: Sequence[tf.Tensor], sources: Sequence[int] | None = None
    ) -> list[list[tf.Tensor]]:
        """Receives a part from each of `sources`, in order; `own` is this worker's part and has the specs of all.

        Args:
            tag: of the messages.
            own: this worker's part.
            sources: workers; by default those with a place in the group, in rank order.
        """
        sources = self.group.workers if sources is None else sources
        received = self.receive_each(tag, {w: own for w in sources if w != self.me})
        return [list(own) if w == self.me else received[w] for w in sources]

    def gather(
        self, root: int, tag: str, part: Sequence[tf.Tensor], after: Sequence[str] = ()
    ) -> list[list[tf.Tensor]]:
        """Sends each member's part to worker `root`, which returns all parts in rank order; others return none."""
        if root == self.me:
            return self.collect(tag, part)
        if self.contributes:
            self.send(root, tag, part, after)
        return []

    def all_gather(self, tag: str, part: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Sends each member's part to everyone in the group; returns all parts in rank order."""
        if self.contributes:
            self.broadcast(tag, part)
        return self.collect(tag, part)

    # -- queues ----------------------------------------------------------------------------------------------------

    def _take(self, source: int, tag: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[str]:
        """Adds the dequeue of a queue that a worker sends to; returns the names of the tensors."""
        name, handle, nodes = self._add_queue(source, self.me, tag, like)
        take = self.f.add(nodes.take, f"{name}_Dequeue", [handle])
        take.device = self.context.cpu(self.me)
        self.effects.append(take.name)
        return [f"{take.name}:{k}" for k in range(len(like))]

    def _add_queue(
        self, source: int, to: int, tag: str, like: Sequence[tf.Tensor | tf.TensorSpec]
    ) -> tuple[str, str, _Nodes]:
        """Adds a queue; returns its name within the subgraph, its full name, and the node templates that go with it."""
        dtypes = tuple(t.dtype for t in like)
        nodes = _nodes_for(dtypes)
        name = self.f.graph.unique_name("fifo_queue")
        queue = self.f.add(nodes.queue, name, ())
        queue.device = self.context.cpu(self.me)
        Inbox(self._shared_name(source, to, tag), source, dtypes, _known_shapes(like), self.capacity).describe(queue)
        if source != self.me:
            queue.attr[SOURCE].i = source
        return name, queue.name, nodes

    def _queue(self, source: int, to: int, tag: str, like: Sequence[tf.Tensor]) -> tf.queue.FIFOQueue:
        with tf.device(self.context.cpu(self.me)):
            return tf.queue.FIFOQueue(
                self.capacity, [t.dtype for t in like], _known_shapes(like),
                shared_name=self._shared_name(source, to, tag),
            )  # fmt: skip

    def _shared_name(self, source: int, to: int, tag: str) -> str:
        return f"{self.key}/{tag}/{source}/{to}"


def reader_of(queue: NodeDef) -> int:
    """Returns the worker that the messages of an outbox go to, or that has an inbox."""
    return int(queue.attr["shared_name"].s.decode().rsplit("/", 1)[1])


def _known_shapes(like: Sequence[tf.Tensor | tf.TensorSpec]) -> tuple[tf.TensorShape, ...] | None:
    """Returns the shapes if all are fully defined, else None: a queue has all shapes or none."""
    shapes = tuple(t.shape for t in like)
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
