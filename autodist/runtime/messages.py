"""Messages between steps: bytes from the chief to every other worker, and from other workers to the chief."""

from __future__ import annotations

import queue

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.mailbox import Mailbox

_Received = queue.SimpleQueue[bytes | None]
"""Messages that have arrived; None once no more do."""


class Messages:
    """One worker's end of the messages. Each worker reads the messages of one sender in order, whenever they arrived.

    Args:
        graph_runner: runs the sending of posted messages.
        mailbox: delivers all others; None with one worker.
        worker: index of this worker; 0 is the chief.
        workers: number of workers.
    """

    def __init__(self, graph_runner: GraphRunner, mailbox: Mailbox | None, worker: int, workers: int) -> None:
        self._graph_runner, self._is_chief = graph_runner, worker == 0
        self._others = range(1, workers)
        self._from_chief: _Received = queue.SimpleQueue()
        self._gathered: dict[int, _Received] = {other: queue.SimpleQueue() for other in self._others}
        self._left: _Received = queue.SimpleQueue()
        if mailbox is not None:
            self._send = mailbox.open_box(lambda _, content: self._from_chief.put(content))
            self._send_to_chief = mailbox.open_box(lambda other, content: self._gathered[other].put(content))
            self._leave = mailbox.open_box(lambda _, content: self._left.put(content))
        with graph_runner.graph.as_default():
            self._content = tf.compat.v1.placeholder(tf.string, [])
            with tf.device(cpu_of(0, workers)):  # the chief's queue itself: a message is there before its sender's step
                posted = tf.queue.FIFOQueue(-1, tf.string, [[]], shared_name="autodist/posted")
            self._post = posted.enqueue(self._content)
            self._count_posted, self._take_posted = posted.size(), posted.dequeue()

    def close(self) -> None:
        """Makes calls that wait for a message fail."""
        for received in (self._from_chief, *self._gathered.values(), self._left):
            received.put(None)

    def broadcast(self, content: bytes | None = None) -> bytes:
        """On the chief, sends `content` to all others; on another worker, waits for the next message and returns it."""
        if not self._is_chief:
            return _next(self._from_chief)
        if content is None:
            raise ValueError("the chief sends, it does not receive")
        if self._others:
            self._send(self._others, content)
        return content

    def gather(self, content: bytes) -> list[bytes]:
        """On the chief, returns the content of every worker, by index; on another worker, sends it and returns []."""
        if self._is_chief:
            return [content, *map(_next, self._gathered.values())]
        self._send_to_chief([0], content)
        return []

    def post(self, content: bytes) -> None:
        """Leaves a message that the chief reads at any later time; returns when it has arrived."""
        self._graph_runner.session.run(self._post, {self._content: content})

    def posted(self) -> list[bytes]:
        """On the chief, returns the messages that others have posted so far."""
        count = int(self._graph_runner.session.run(self._count_posted))
        return [bytes(self._graph_runner.session.run(self._take_posted)) for _ in range(count)]

    def leave(self, content: bytes) -> None:
        """On another worker, leaves its final message for the chief."""
        self._leave([0], content)

    def left(self) -> list[bytes]:
        """On the chief, waits for the final messages of all others and returns them, in any order."""
        return [_next(self._left) for _ in self._others]


def _next(received: _Received) -> bytes:
    content = received.get()
    if content is None:
        received.put(None)  # for later calls
        raise RuntimeError("The run has ended, and no further message arrives.")
    return content
