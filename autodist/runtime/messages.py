"""Messages between steps: bytes from the chief to every other worker, and from other workers to the chief."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.runtime.graph_runner import GraphRunner

_CAPACITY = 64


class Messages:
    """One worker's end of the message queues. Each worker reads the chief's messages in order.

    Args:
        graph_runner: runs the sending and receiving.
        worker: index of this worker; 0 is the chief.
        workers: number of workers.
    """

    def __init__(self, graph_runner: GraphRunner, worker: int, workers: int) -> None:
        self._graph_runner, self._is_chief, self._workers = graph_runner, worker == 0, workers
        with graph_runner.graph.as_default():
            self._content = tf.compat.v1.placeholder(tf.string, [])
            queues = [self._queue(tf.string, f"messages/{w}", w) for w in range(1, workers)]
            self._send = [queue.enqueue(self._content) for queue in queues]
            self._receive = None if self._is_chief else queues[worker - 1].dequeue()
            to_chief = [self._queue(tf.string, f"gathered/{w}", 0) for w in range(1, workers)]
            self._gather_others = [queue.dequeue() for queue in to_chief]
            self._send_to_chief = None if self._is_chief else to_chief[worker - 1].enqueue(self._content)
            posted = self._queue(tf.string, "posted", 0, capacity=-1)  # unbounded: senders do not wait for the chief
            self._post = posted.enqueue(self._content)
            self._count_posted, self._take_posted = posted.size(), posted.dequeue()
            left = self._queue(tf.string, "left", 0, capacity=-1)
            self._leave, self._take_left = left.enqueue(self._content), left.dequeue_many(max(1, workers - 1))
            ready = self._queue(tf.bool, "ready", 0)
            self._send_ready = ready.enqueue(True)
            self._await_ready = ready.dequeue_many(max(1, workers - 1))

    def _queue(self, dtype: tf.DType, name: str, worker: int, capacity: int = _CAPACITY) -> tf.queue.FIFOQueue:
        with tf.device(cpu_of(worker, self._workers)):
            return tf.queue.FIFOQueue(capacity, dtype, [[]], shared_name=f"autodist/{name}")

    def broadcast(self, content: bytes | None = None) -> bytes:
        """On the chief, sends `content` to all others; on another worker, waits for the next message and returns it."""
        if self._receive is not None:
            return bytes(self._graph_runner.session.run(self._receive))
        if content is None:
            raise ValueError("the chief sends, it does not receive")
        if self._send:
            self._graph_runner.session.run(self._send, {self._content: content})
        return content

    def gather(self, content: bytes) -> list[bytes]:
        """On the chief, returns the content of every worker, by index; on another worker, sends it and returns []."""
        if self._send_to_chief is not None:
            self._graph_runner.session.run(self._send_to_chief, {self._content: content})
            return []
        return (
            [content, *map(bytes, self._graph_runner.session.run(self._gather_others))]
            if self._gather_others
            else [content]
        )

    def post(self, content: bytes) -> None:
        """Leaves a message that the chief reads at any later time."""
        self._graph_runner.session.run(self._post, {self._content: content})

    def posted(self) -> list[bytes]:
        """On the chief, returns the messages that others have posted so far."""
        count = int(self._graph_runner.session.run(self._count_posted))
        return [bytes(self._graph_runner.session.run(self._take_posted)) for _ in range(count)]

    def leave(self, content: bytes) -> None:
        """On another worker, leaves its final message for the chief."""
        self._graph_runner.session.run(self._leave, {self._content: content})

    def left(self) -> list[bytes]:
        """On the chief, waits for the final messages of all others and returns them, in any order."""
        return (
            [bytes(content) for content in self._graph_runner.session.run(self._take_left)] if self._workers > 1 else []
        )

    def barrier(self) -> None:
        """On the chief, waits until all others have called it, which they do after their last step."""
        if self._workers > 1:
            self._graph_runner.session.run(self._await_ready if self._is_chief else self._send_ready)
