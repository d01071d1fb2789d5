"""Mailbox: what other workers tell this one at any time, a step under way or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.runtime.host import Host

_END = b""
"""What a worker sends itself at the end."""

_END_LIMIT = 5.0
"""Seconds to wait for the reader, which has nothing else to do by then."""


class Mailbox:
    """Reads messages in a thread of its own.

    Args:
        host: where sending and receiving run.
        worker: index of this worker.
        workers: how many there are.
    """

    def __init__(self, host: Host, worker: int, workers: int) -> None:
        self._host, self._worker = host, worker
        with host.graph.as_default():
            self._content = tf.compat.v1.placeholder(tf.string, [])
            queues = [self._queue(w, workers) for w in range(workers)]
            self._sends = [queue.enqueue(self._content) for queue in queues]
            self._next = queues[worker].dequeue()
        self._reader: threading.Thread | None = None

    def start(self, receive: Callable[[bytes], None]) -> None:
        """Calls `receive` with each message from now on, in the order of arrival."""
        self._reader = threading.Thread(target=self._read, args=(receive,), name="autodist-mailbox", daemon=True)
        self._reader.start()

    @staticmethod
    def _queue(worker: int, workers: int) -> tf.queue.FIFOQueue:
        with tf.device(cpu_of(worker, workers)):  # without a limit: who sends does not wait for the reader
            return tf.queue.FIFOQueue(-1, tf.string, [[]], shared_name=f"autodist/mail/{worker}")

    def send(self, workers: Sequence[int], content: bytes) -> None:
        """Brings a message to some workers; returns when it is there, read or not."""
        self._host.session.run([self._sends[w] for w in workers], {self._content: content})

    def close(self) -> None:
        """Ends the reading. What comes later lies there unread."""
        if self._reader is not None:
            self.send([self._worker], _END)
            self._reader.join(_END_LIMIT)

    def _read(self, receive: Callable[[bytes], None]) -> None:
        while True:
            try:
                message = bytes(self._host.session.run(self._next))
            except (tf.errors.OpError, RuntimeError):  # the session is closed, or this worker's server gone
                return
            if message == _END:
                return
            receive(message)
