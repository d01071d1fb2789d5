"""Messages: bytes that the chief sends to every other worker, through a queue on each worker's device."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.runtime.host import Host

_CAPACITY = 64


class Messages:
    """One way, from the chief; each worker reads what was sent, in order.

    Args:
        host: where sending and receiving run.
        worker: index of this worker; 0 is the chief.
        workers: how many there are.
    """

    def __init__(self, host: Host, worker: int, workers: int) -> None:
        self._host, self._is_chief = host, worker == 0
        with host.graph.as_default():
            self._content = tf.compat.v1.placeholder(tf.string, [])
            queues = [self._queue(w, workers) for w in range(1, workers)]
            self._send = [queue.enqueue(self._content) for queue in queues]
            self._receive = None if self._is_chief else queues[worker - 1].dequeue()

    @staticmethod
    def _queue(worker: int, workers: int) -> tf.queue.FIFOQueue:
        with tf.device(cpu_of(worker, workers)):
            return tf.queue.FIFOQueue(_CAPACITY, tf.string, [[]], shared_name=f"autodist/messages/{worker}")

    def exchange(self, content: bytes | None = None) -> bytes:
        """On the chief, sends `content` to all others; on another worker, waits for the next message and returns it."""
        if self._receive is not None:
            return bytes(self._host.session.run(self._receive))
        assert content is not None, "the chief has something to say"
        if self._send:
            self._host.session.run(self._send, {self._content: content})
        return content
