"""Inbox loops: move the messages of other workers to the inboxes of this worker's steps."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.graph.editor import NodeDef
from autodist.graph.imported import ImportedGraph
from autodist.graph.inboxes import Inbox
from autodist.graph.names import is_control
from autodist.runtime.reserved_threads import ReservedThreads
from autodist.waits import join_all

OVERLAPPING = 2
"""Iterations of a loop that overlap, so that the requests of the next one are at the source early."""

IN_ITERATION = 2
"""Messages that an iteration moves.

With 1, a message waits at its source until the next iteration's request arrives there: a step with one exchange takes a
whole round trip, where it otherwise takes half of one."""

SMALL_IN_ITERATION = 8
"""Small messages that an iteration moves: an iteration costs about as much processor time as such a message."""

SMALL_BYTES = 16 << 10
"""Largest size of a small message; a loop may hold many, which its source has sent and its worker has not read."""


class InboxLoops:
    """Runs, for each inbox, an endless loop that moves messages there from the outbox of their source.

    An iteration takes messages from the outbox on the source, one after another, and puts them into the inbox here. Its
    requests are at the source before the messages exist, so a message crosses the network once, as soon as it is sent.
    Steps share inboxes by name, and two loops would change the order of an inbox's messages, so each inbox has one
    loop: the one of the first step that has the inbox.

    A loop fails if its source goes away. Its inboxes are then closed, so that a step that waits for a message fails;
    `failure` is the cause. A worker that needs no further message is not affected.

    Args:
        worker: this worker.
        workers: number of workers.
        open_session: opens a session of this worker's server.
        ending_threads: threads that close the sessions.

    Attributes:
        failure: the first error of a loop; None if there was none.
    """

    def __init__(
        self,
        worker: int,
        workers: int,
        open_session: Callable[[tf.Graph], tf.compat.v1.Session],
        ending_threads: ReservedThreads,
    ) -> None:
        self._worker, self._workers, self._open_session = worker, workers, open_session
        self._ending_threads = ending_threads
        self._lock = threading.Lock()
        self._started: set[str] = set()
        self._running: list[tuple[tf.compat.v1.Session, threading.Thread]] = []
        self._ending: list[threading.Thread] = []
        self._is_closed = False
        self.failure: BaseException | None = None

    def start(self, wanted: Iterable[Inbox]) -> None:
        """Starts the loops for those inboxes that have none."""
        with self._lock:
            inboxes = [inbox for inbox in wanted if inbox.name not in self._started]
            if not inboxes or self._is_closed:
                return
            self._started.update(inbox.name for inbox in inboxes)
            names = [f"autodist_inbox_{k}" for k in range(len(inboxes))]
            loops = tf.compat.v1.GraphDef()
            for name, inbox in zip(names, inboxes, strict=True):
                loops.node.extend(loop_of(inbox, self._worker, self._workers, name))
            graph = ImportedGraph()
            graph.import_nodes(loops)
            ends, closes = ([graph.get_operation_by_name(f"{n}/{op}") for n in names] for op in ("end", "close"))
            session = self._open_session(graph)
            thread = threading.Thread(target=self._run, args=(session, ends, closes), name="autodist-inboxes")
            thread.daemon = True
            self._ending_threads.reserve()
            self._running.append((session, thread))
            thread.start()

    def close(self, limit: float) -> bool:
        """Ends the loops; returns True when they have ended, or False after about `limit` seconds.

        A loop whose source does not respond may never end. A further call waits for the loops that are left. The
        session of a loop that has failed stays open: closing it would wait for the lost source.
        """
        with self._lock:
            self._is_closed = True
            while self._running:  # an interrupt may end this call, and a further call goes on
                session, thread = self._running[-1]
                if thread.is_alive():
                    self._ending += [self._ending_threads.start(session.close), thread]
                else:  # before this call, only a failure ends it
                    keep_open(session)
                self._running.pop()
        join_all(self._ending, limit)
        return not any(thread.is_alive() for thread in self._ending)

    def _run(self, session: tf.compat.v1.Session, ends: Sequence[tf.Operation], closes: Sequence[tf.Operation]) -> None:
        try:
            session.run(ends)
        except (tf.errors.OpError, RuntimeError) as error:  # RuntimeError: the session is closed already
            if self._is_closed:
                return
            self.failure = self.failure or error
            try:
                session.run(closes)
            except (tf.errors.OpError, RuntimeError):
                if not self._is_closed:  # otherwise `close` has interrupted it
                    raise


def keep_open(session: tf.compat.v1.Session) -> None:
    """Keeps a session open until the process ends: closing it, even at exit, may wait for runs that never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


def loop_of(inbox: Inbox, worker: int, workers: int, name: str) -> list[NodeDef]:
    """Returns the nodes of the loop for an inbox: `end` completes if the loop ends; `close` closes the inbox.

    Args:
        inbox: the inbox.
        worker: the worker that has it.
        workers: number of workers.
        name: name scope of the nodes.
    """
    nodes = []
    for template in _template(inbox.dtypes, in_iteration(inbox)):
        node = NodeDef()
        node.CopyFrom(template)
        node.name = f"{name}/{node.name}"
        node.input[:] = [f"^{name}/{i[1:]}" if is_control(i) else f"{name}/{i}" for i in node.input]
        node.device = cpu_of(inbox.source if node.device == _THERE else worker, workers)
        if "frame_name" in node.attr:
            node.attr["frame_name"].s = name.encode()
        if node.op == "FIFOQueueV2":
            inbox.describe(node)
        nodes.append(node)
    return nodes


def in_iteration(inbox: Inbox) -> int:
    """Returns the number of messages that an iteration of the loop for an inbox moves."""
    return SMALL_IN_ITERATION if inbox.byte_size is not None and inbox.byte_size <= SMALL_BYTES else IN_ITERATION


_HERE, _THERE = cpu_of(0, 2), cpu_of(1, 2)
"""Devices of the reader and of the source in a template."""


@functools.cache
def _template(dtypes: tuple[tf.DType, ...], count: int) -> tuple[NodeDef, ...]:
    """Returns the nodes of a loop for messages of some dtypes, `count` in an iteration; a step may have hundreds of
    loops.

    Source: Y. Yu et al., "Dynamic Control Flow in Large-Scale Machine Learning", EuroSys 2018, for loops over several
    machines.
    """
    with tf.Graph().as_default() as graph:
        outbox, inbox = (_queue(dtypes, device) for device in (_THERE, _HERE))
        loop = _EndlessLoop(_HERE)
        source, target = loop.constant(outbox, _THERE), loop.constant(inbox, _HERE)
        messages: list[list[tf.Tensor]] = []

        def take(last: tf.Operation) -> tf.Operation:
            for _ in range(count):
                with tf.control_dependencies([last]):
                    messages.append(tf.raw_ops.QueueDequeueV2(handle=source, component_types=dtypes))
                last = messages[-1][0].op
            return last

        def put(last: tf.Operation) -> tf.Operation:
            for message in messages:
                with tf.control_dependencies([last]):
                    last = tf.raw_ops.QueueEnqueueV2(handle=target, components=message)
            return last

        loop.repeat(take, _THERE)
        loop.repeat(put, _HERE, name="end")
        with tf.device(_HERE):
            tf.raw_ops.QueueCloseV2(handle=inbox, cancel_pending_enqueues=True, name="close")
    return tuple(graph.as_graph_def().node)


def _queue(dtypes: Sequence[tf.DType], device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.raw_ops.FIFOQueueV2(component_types=dtypes)


class _EndlessLoop:
    """A loop of TensorFlow's control-flow primitives, with nodes on several devices.

    `tf.while_loop` does not order the nodes of each device by themselves.

    Args:
        device: the device of the condition, which is always true.
    """

    def __init__(self, device: str) -> None:
        with tf.device(device):
            start = self._start()
            self._condition = tf.raw_ops.LoopCond(input=start)
            self._continue(start, lambda last: last)

    def constant(self, value: tf.Tensor, device: str) -> tf.Tensor:
        """Returns, on the value's device, a value for all iterations."""
        with tf.device(device):
            return self._enter(value, is_constant=True)

    def repeat(self, body: Callable[[tf.Operation], tf.Operation], device: str, name: str | None = None) -> None:
        """Adds nodes that each iteration runs on a device, after the same nodes of the iteration before.

        Args:
            body: adds the nodes after a given operation; returns the last one.
            device: their device.
            name: name of the node that completes when the loop ends.
        """
        with tf.device(device):
            self._continue(self._start(), body, name)

    def _start(self) -> tf.Tensor:
        first = self._enter(tf.constant(True), is_constant=False)
        return tf.raw_ops.Merge(inputs=[first, first]).output  # `_continue` replaces the second input

    def _enter(self, value: tf.Tensor, is_constant: bool) -> tf.Tensor:
        return tf.raw_ops.Enter(data=value, frame_name="loop", is_constant=is_constant, parallel_iterations=OVERLAPPING)

    def _continue(
        self, start: tf.Tensor, body: Callable[[tf.Operation], tf.Operation], name: str | None = None
    ) -> None:
        ended, going = tf.raw_ops.Switch(data=start, pred=self._condition)
        going = tf.identity(going)
        with tf.control_dependencies([body(going.op)]):
            again = tf.raw_ops.NextIteration(data=going)
        start.op._update_input(1, again)
        tf.raw_ops.Exit(data=ended, name=name)
