"""Communicator: messages between the workers of a group, through an outbox of the source and an inbox of the reader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeAlias, TypeVar

import tensorflow as tf

from autodist.compressors import Summed
from autodist.graph.editor import NodeDef
from autodist.graph.inboxes import SOURCE, Inbox
from autodist.graph.parts import ReduceOp
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.communicate.buckets import cut
from autodist.kernels.communicate.codec import Codec
from autodist.kernels.communicate.packed import like_packed, packed, unpacked
from autodist.kernels.context import Context
from autodist.kernels.sums import ordered_sum, reduce_to_mean
from autodist.placement.group import Group

CAPACITY = 2
"""Places of a queue; more if the step may run further ahead.

In a lock-step step, a worker is at most one step ahead of those that it receives from. If it receives from none of its
readers, a full queue stops it until they have caught up."""

DIRECT_BYTES = 64 << 10
"""Vectors and pieces up to this size are sent uncut to any number of workers: one hop, where pieces take two."""

Like: TypeAlias = "tf.Tensor | tf.TensorSpec"

Part = Sequence[tf.Tensor]
"""A vector and its weight, if it has one."""

Made = TypeVar("Made")

Received = dict[int, list[tf.Tensor]]
"""Received tensors, by the worker that sent them."""


@dataclass
class Communicator:
    """Sends and receives tensors of one group within one subgraph.

    A message has a source, a reader and a tag, which all its workers know alike. Its source puts it into a queue of its
    own, the outbox. The reader takes it from a queue of its own, the inbox, to which `runtime.inbox_loops` brings it. A
    step therefore runs on its worker alone. A send waits only for its tensors and for `after`, not for control
    dependencies of the subgraph. Small tensors of a message between two workers are packed into one.

    Attributes:
        f: the builder of the subgraph.
        context: the worker for which it is built.
        key: of the messages, the same on all workers.
        group: the workers that take part.
        capacity: number of messages that may be in flight.
        suffix: of all tags.
        effects: names of the nodes that send and receive. All must run, even if nothing reads them, or a queue fills
            up.
    """

    f: SubgraphBuilder
    context: Context
    key: str
    group: Group
    capacity: int = CAPACITY
    suffix: str = ""
    effects: list[str] = field(default_factory=list)

    @property
    def me(self) -> int:
        """This worker."""
        return self.context.worker

    @property
    def contributes(self) -> bool:
        """True if this worker has a place in the group."""
        return self.me in self.group

    @property
    def owners(self) -> Sequence[int]:
        """The workers that may own vectors of `reduce_scatter`."""
        return self.group.workers

    # -- one worker to another -------------------------------------------------------------------------------------

    def send(self, to: int, tag: str, tensors: Sequence[tf.Tensor], after: Sequence[str] = ()) -> None:
        """Sends tensors to worker `to` after the nodes `after` of the step have run."""
        self._put(to, tag, tensors if to == self.me else packed(tensors), after)

    def _put(self, to: int, tag: str, tensors: Sequence[tf.Tensor], after: Sequence[str]) -> None:
        name, handle, nodes = self._add_queue(self.me, to, tag, tensors)
        put = self.f.add(
            nodes.put, f"{name}_enqueue", [handle, *map(self.f.name, tensors)], [self.f.after(after)] if after else ()
        )
        put.device = self.context.cpu(self.me)
        self.effects.append(put.name)

    def receive(self, source: int, tag: str, like: Sequence[Like]) -> list[tf.Tensor]:
        """Receives tensors from worker `source`; `like` has their dtypes and static shapes."""
        return self.receive_each(tag, {source: like})[source]

    def receive_each(self, tag: str, like: Mapping[int, Sequence[Like]]) -> Received:
        """Receives tensors from several workers; `like` has their dtypes and static shapes, by worker."""
        sent = {source: list(static) if source == self.me else like_packed(static) for source, static in like.items()}
        names = {source: self._take(source, tag, static) for source, static in sent.items()}
        found = iter(self.f.inputs_like(list(chain(*names.values())), list(chain(*sent.values()))))
        came = {source: list(islice(found, len(static))) for source, static in sent.items()}
        return {source: came[source] if source == self.me else unpacked(came[source], like[source]) for source in like}

    def prefill(self, source: int, tag: str, like: Sequence[tf.Tensor], count: int) -> tf.Operation:
        """Adds `count` copies of `like` that this worker receives before the messages of worker `source`."""
        queue = self._queue(source, self.me, tag, like)
        with tf.device(self.context.cpu(self.me)):
            return queue.enqueue_many([tf.stack([t] * count) for t in like])

    # -- the group -------------------------------------------------------------------------------------------------

    def broadcast(
        self,
        tag: str,
        tensors: Sequence[tf.Tensor],
        to: Iterable[int] | None = None,
        after: Sequence[str] = (),
    ) -> None:
        """Sends tensors to each other worker of `to`; by default to everyone in the group, in worker order."""
        readers = [worker for worker in (sorted(self.group.everyone) if to is None else to) if worker != self.me]
        message = packed(tensors) if readers else []
        for worker in readers:
            self._put(worker, tag, message, after)

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

    def all_gather(self, tag: str, part: Sequence[tf.Tensor], to_receivers: bool = True) -> list[list[tf.Tensor]]:
        """Sends each member's part to everyone in the group; returns all parts in rank order.

        Args:
            tag: of the messages.
            part: this worker's part; it has the specs of all.
            to_receivers: False if only the members call this.
        """
        if self.contributes:
            self.broadcast(tag, part, None if to_receivers else self.group.workers)
        return self.collect(tag, part)

    def all_to_all(self, tag: str, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends piece k to the member of rank k; returns the pieces for this worker, in rank order.

        All members send this worker pieces with the specs of its own piece.
        """
        own = pieces[self.group.ranks(self.me)[0]]
        self.scatter(tag, {w: [p] for w, p in zip(self.group.workers, pieces, strict=True) if w != self.me})
        return [piece for [piece] in self.collect(tag, [own])]

    def all_reduce(self, part: Part, how: ReduceOp) -> tf.Tensor:
        """Reduces a vector; divides it by the sum of the weights, if there are any.

        A large vector of more than two workers is cut into pieces. Each member reduces one piece and sends it to
        everyone in the group. This takes two hops and as many bytes as a ring.

        Args:
            part: this worker's part; it has the specs of all.
            how: the operation that merges the vectors.
        """
        if len(self.group.everyone) <= 2 or is_direct(part[0]):
            return self.all_reduce_together([part], [how])[0]
        lengths = cut(part[0].shape[0], part[0].dtype, len(self.group.workers))
        pieces = dict(zip(self.group.workers, tf.split(part[0], lengths), strict=True))
        own = pieces.pop(self.me, None)
        if own is not None:
            self.scatter("piece", {to: [piece, *part[1:]] for to, piece in pieces.items()})
        reduced = self.receive_each("sum", {source: [piece] for source, piece in pieces.items()})
        if own is not None:
            reduced[self.me] = [reduce_to_mean(self.collect("piece", [own, *part[1:]]), how)]
            self.broadcast("sum", reduced[self.me])
        return tf.concat([reduced[source][0] for source in self.group.workers], 0)

    def all_reduce_together(self, parts: Sequence[Part], how: Sequence[ReduceOp]) -> list[tf.Tensor]:
        """Reduces several vectors in the same messages, uncut, which takes one hop; see `all_reduce`.

        Args:
            parts: this worker's parts, which do not depend on each other's results.
            how: the operation that merges the vectors of each.
        """
        return merge(parts, how, self.all_gather("whole", [t for part in parts for t in part]), reduce_to_mean)

    def reduce_scatter(self, vectors: Mapping[int, Like], codec: Codec, name: str = "") -> dict[int, Summed]:
        """Sums encoded vectors at their owners, which send the sums to everyone in the group.

        Args:
            vectors: this worker's vectors by owner; their specs if it has no place.
            codec: the encoding of the messages.
            name: prefix of the messages' tags.
        """
        return {owner: self.reduce_at(owner, vector, codec, name)[1] for owner, vector in vectors.items()}

    def reduce_at(self, owner: int, vector: Like, codec: Codec, name: str = "") -> tuple[list[tf.Tensor], Summed]:
        """Sums vectors at their owner, which adds its own one without encoding, in rank order.

        Returns:
            The encoded sum, which the owner sends to everyone in the group; and the decoded one, which all use.
        """
        like = codec.specs(vector)
        if owner != self.me:
            sent = codec.encode(vector) if self.contributes else None
            if sent is not None:
                self.send(owner, f"{name}piece", sent)
            code = self.receive(owner, f"{name}sum", like)
            decoded = codec.decode(code, vector)
            return code, Summed(decoded, None if sent is None else vector - codec.decode(sent, vector))
        others = [worker for worker in self.group.workers if worker != owner]
        came = self.receive_each(f"{name}piece", dict.fromkeys(others, like))
        parts = {worker: codec.decode(came[worker], vector) for worker in others}
        total = codec.finish(ordered_sum([parts.get(worker, vector) for worker in self.group.workers]))
        code = codec.encode(total)
        self.broadcast(f"{name}sum", code)
        decoded = codec.decode(code, vector)
        return code, Summed(decoded, total - decoded)

    # -- queues ----------------------------------------------------------------------------------------------------

    def _take(self, source: int, tag: str, like: Sequence[Like]) -> list[str]:
        """Adds the dequeue of a queue that a worker sends to; returns the names of the tensors."""
        name, handle, nodes = self._add_queue(source, self.me, tag, like)
        take = self.f.add(nodes.take, f"{name}_Dequeue", [handle])
        take.device = self.context.cpu(self.me)
        self.effects.append(take.name)
        return [f"{take.name}:{k}" for k in range(len(like))]

    def _add_queue(self, source: int, to: int, tag: str, like: Sequence[Like]) -> tuple[str, str, _Nodes]:
        """Adds a queue; returns its name within the subgraph, its full name, and the node templates that go with it."""
        dtypes = tuple(t.dtype for t in like)
        nodes = _nodes_for(dtypes)
        name = self.f.graph.unique_name("fifo_queue")
        queue = self.f.add(nodes.queue, name, ())
        queue.device = self.context.cpu(self.me)
        Inbox(self._shared_name(source, to, tag), source, dtypes, known_shapes(like), self.capacity).describe(queue)
        if source != self.me:
            queue.attr[SOURCE].i = source
        return name, queue.name, nodes

    def _queue(self, source: int, to: int, tag: str, like: Sequence[tf.Tensor]) -> tf.queue.FIFOQueue:
        with tf.device(self.context.cpu(self.me)):
            return tf.queue.FIFOQueue(
                self.capacity, [t.dtype for t in like], known_shapes(like),
                shared_name=self._shared_name(source, to, tag),
            )  # fmt: skip

    def _shared_name(self, source: int, to: int, tag: str) -> str:
        return f"{self.key}/{tag}{self.suffix}/{source}/{to}"


def is_direct(vector: Like) -> bool:
    """Returns True if a vector is small enough to be sent uncut to any number of workers."""
    return bool(vector.shape[0] * vector.dtype.size <= DIRECT_BYTES)


def merge(
    like: Sequence[Part],
    how: Sequence[ReduceOp],
    came: Sequence[Sequence[tf.Tensor]],
    reduce: Callable[[Sequence[Part], ReduceOp], Made],
) -> list[Made]:
    """Merges the parts of each vector; each element of `came` holds one worker's parts of all vectors, concatenated."""
    found, start = [], 0
    for part, op in zip(like, how, strict=True):
        found.append(reduce([one[start : start + len(part)] for one in came], op))
        start += len(part)
    return found


def known_shapes(like: Sequence[Like]) -> tuple[tf.TensorShape, ...] | None:
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
