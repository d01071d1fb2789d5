"""Mailbox: control messages between the chief and each other worker, which arrive at any time, also during a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.graph.inboxes import Inbox, queue_of
from autodist.runtime.graph_runner import GraphRunners
from autodist.waits import start_thread

Send = Callable[[Sequence[int], bytes], None]
"""Sends a message to some workers; returns before it has arrived."""

Receive = Callable[[int, bytes], None]
"""Called with a message and the worker that has sent it."""

_END = b""
"""Message that a worker puts into its own inboxes to end their readers."""

_END_LIMIT = 5.0
"""Seconds to wait for the readers, which are idle at that time unless other workers have gone."""


class Mailbox:
    """Reads messages in threads, one for each sender, and passes each to the receiver of its box.

    Args:
        graph_runners: graph runners of this worker.
        worker: index of this worker; 0 is the chief.
        workers: number of workers.

    Attributes:
        on_loss: called with the error of a lost connection, which brings no further message; from a reader's thread.
    """

    def __init__(self, graph_runners: GraphRunners, worker: int, workers: int) -> None:
        control, here = graph_runners.control, cpu_of(worker, workers)
        others = range(1, workers) if worker == 0 else [0]
        self._loops, self._ending_threads = graph_runners.inbox_loops, graph_runners.ending_threads
        self._inboxes = [_mail(other, worker) for other in others]
        with control.graph.as_default():
            content = tf.compat.v1.placeholder(tf.string, [])
            puts = {other: queue_of(_mail(worker, other), here).enqueue(content) for other in others}
            queues = {inbox.source: queue_of(inbox, here) for inbox in self._inboxes}
            ends = [queue.enqueue(_END) for queue in queues.values()]
            takes = {other: queue.dequeue() for other, queue in queues.items()}
        self._puts = {other: control.callable([], [put], [content.name]) for other, put in puts.items()}
        self._takes = {other: control.callable([take], [], []) for other, take in takes.items()}
        self._put_ends = control.callable([], ends, [])
        self.on_loss: Callable[[BaseException], None] = lambda error: None
        self._receivers: list[Receive] = []
        self._readers: list[threading.Thread] = []

    def open_box(self, receive: Receive) -> Send:
        """Opens a box and returns a function that sends to it. Workers open matching boxes in the same order.

        Args:
            receive: called with each message to this worker's box once reading has started, in the order in which its
                sender has sent them.
        """
        mark = bytes([ord("a") + len(self._receivers)])
        self._receivers.append(receive)

        def send(workers: Sequence[int], content: bytes) -> None:
            for worker in workers:
                self._puts[worker](mark + content)

        return send

    def start(self) -> None:
        """Starts reading."""
        self._loops.start(self._inboxes)
        self._ending_threads.reserve()
        for other in self._takes:
            self._readers.append(start_thread("mailbox", self._read, other))

    def close(self) -> None:
        """Stops reading, even if other workers have gone. Later messages stay unread."""
        if any(reader.is_alive() for reader in self._readers):
            ending = self._ending_threads.start(self._end)  # in a thread: the session may no longer answer
            ending.join(_END_LIMIT)
            for reader in self._readers:
                reader.join(0 if ending.is_alive() else _END_LIMIT)

    def _end(self) -> None:
        with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session is closed, which also ends the readers
            self._put_ends()

    def _read(self, other: int) -> None:
        while True:
            try:
                message = bytes(self._takes[other]()[0])
            except (tf.errors.OpError, RuntimeError) as error:  # the session is closed, or a server has gone
                if self._loops.failure is not None:
                    self.on_loss(error)
                return
            if message == _END:
                return
            self._receivers[message[0] - ord("a")](other, message[1:])


def _mail(source: int, to: int) -> Inbox:
    """Returns the inbox of a worker for the messages of another one; unbounded, so that a sender does not wait."""
    return Inbox(f"autodist/mail/{source}/{to}", source, (tf.string,), (tf.TensorShape([]),), -1)
