"""Mailbox: receives messages from other workers at any time, also during a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.runtime.graph_runner import GraphRunner

Send = Callable[[Sequence[int], bytes], None]
"""Sends a message to some workers."""

_END = b""
"""Message that a worker sends to itself to end its reader."""

_END_LIMIT = 5.0
"""Seconds to wait for the reader, which is idle at that time unless other workers have gone."""


class Mailbox:
    """Reads messages in a thread, and passes each to the receiver of its box.

    Args:
        graph_runner: runs the sending and receiving.
        worker: index of this worker.
        workers: number of workers.
    """

    def __init__(self, graph_runner: GraphRunner, worker: int, workers: int) -> None:
        self._graph_runner, self._worker = graph_runner, worker
        with graph_runner.graph.as_default():
            self._content = tf.compat.v1.placeholder(tf.string, [])
            queues = [self._queue(w, workers) for w in range(workers)]
            self._sends = [queue.enqueue(self._content) for queue in queues]
            self._next = queues[worker].dequeue()
        self._receivers: list[Callable[[bytes], None]] = []
        self._reader: threading.Thread | None = None

    def open_box(self, receive: Callable[[bytes], None]) -> Send:
        """Opens a box and returns a function that sends to it. Workers open matching boxes in the same order.

        Args:
            receive: called with each message to this worker's box, in order of arrival, once reading has started.
        """
        mark = bytes([ord("a") + len(self._receivers)])
        self._receivers.append(receive)

        def send(workers: Sequence[int], content: bytes) -> None:
            self._send(workers, mark + content)

        return send

    def start(self) -> None:
        """Starts reading."""
        self._reader = threading.Thread(target=self._read, name="autodist-mailbox", daemon=True)
        self._reader.start()

    @staticmethod
    def _queue(worker: int, workers: int) -> tf.queue.FIFOQueue:
        with tf.device(cpu_of(worker, workers)):  # unbounded: a sender does not wait for the reader
            return tf.queue.FIFOQueue(-1, tf.string, [[]], shared_name=f"autodist/mail/{worker}")

    def _send(self, workers: Sequence[int], content: bytes) -> None:
        """Sends a message to some workers; returns when it has arrived, before it is read."""
        self._graph_runner.session.run([self._sends[w] for w in workers], {self._content: content})

    def close(self) -> None:
        """Stops reading, even if other workers have gone. Later messages stay unread."""
        if self._reader is not None and self._reader.is_alive():
            ending = threading.Thread(target=self._end, name="autodist-mailbox-end", daemon=True)
            ending.start()  # in a thread: the session may no longer answer
            ending.join(_END_LIMIT)
            self._reader.join(0 if ending.is_alive() else _END_LIMIT)

    def _end(self) -> None:
        with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session is closed, which also ends the reader
            self._send([self._worker], _END)

    def _read(self) -> None:
        while True:
            try:
                message = bytes(self._graph_runner.session.run(self._next))
            except (tf.errors.OpError, RuntimeError):  # the session is closed, or this worker's server gone
                return
            if message == _END:
                return
            self._receivers[message[0] - ord("a")](message[1:])
