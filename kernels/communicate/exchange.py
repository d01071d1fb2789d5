"""Exchange: tensors that go from worker to worker through queues, each with one source and one reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.kernels.base import Context

CAPACITY = 2
"""A worker is never more than one step ahead of what its peers read; more, where it may be by more steps."""


@dataclass
class Exchange:
    """Sends and receives within one fragment.

    Attributes:
        context: for whom the fragment is built.
        key: name of what travels, the same on all workers.
        capacity: how much of it may be under way.
        effects: the operations that send and receive; all have to run, read or not, or a queue would fill up.
    """

    context: Context
    key: str
    capacity: int = CAPACITY
    effects: list[tf.Operation] = field(default_factory=list)

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor], after: Sequence[tf.Operation] = ()) -> None:
        """Puts `tensors` into the queue of worker `to`, once all of `after` ran."""
        queue = self._queue(self.context.worker, to, what, tensors)
        with tf.device(self.context.cpu(to)), tf.control_dependencies(after):
            self.effects.append(queue.enqueue(list(tensors)))

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What worker `source` sends; `like` has the dtypes and static shapes that come."""
        queue = self._queue(source, self.context.worker, what, like)
        with tf.device(self.context.cpu(self.context.worker)):
            got = queue.dequeue()
        found = list(got) if isinstance(got, list | tuple) else [got]
        self.effects.append(found[0].op)
        for tensor, known in zip(found, like, strict=True):
            tensor.set_shape(known.shape)
        return found

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

    def send_to_others(self, what: str, tensors: Sequence[tf.Tensor], after: Sequence[tf.Operation] = ()) -> None:
        """Puts `tensors` into a queue of every other worker, if this one computes."""
        if self.context.computes:
            for to in range(self.context.workers):
                if to != self.context.worker:
                    self.send(to, what, tensors, after)

    def parts(self, what: str, mine: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """What each worker that computes sends here, in the order of the workers; `mine` in this one's place."""
        me = self.context.worker
        return [list(mine) if w == me else self.receive(w, what, mine) for w in self.context.computing]

    def _queue(self, source: int, to: int, what: str, like: Sequence[tf.Tensor]) -> tf.queue.FIFOQueue:
        shapes = [t.shape for t in like]
        known = shapes if all(s.is_fully_defined() for s in shapes) else None
        with tf.device(self.context.cpu(to)):
            return tf.queue.FIFOQueue(
                self.capacity, [t.dtype for t in like], known, shared_name=f"{self.key}/{what}/{source}/{to}"
            )
