"""InboxLoops: messages reach their inbox once and in order, and a lost source fails the steps that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import ClusterError
from autodist.graph.devices import cpu_of
from autodist.graph.editor import NodeDef
from autodist.graph.inboxes import SOURCE, Inbox, inboxes_of, queue_of
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.inbox_loops import IN_ITERATION, OVERLAPPING, SMALL_BYTES, SMALL_IN_ITERATION, InboxLoops
from autodist.runtime.reserved_threads import ReservedThreads
from tests.unit.runtime.servers import LIMIT, running, start_servers

WORKERS = 3


@pytest.fixture(scope="module")
def targets() -> list[str]:
    """Targets of the workers' servers, in this process."""
    return start_servers(WORKERS)


@pytest.fixture
def workers(targets: list[str]) -> Iterator[list[GraphRunners]]:
    with running(targets) as made:
        yield made
    assert not [thread for thread in threading.enumerate() if thread.name == "autodist-inboxes"]


def inbox(name: str, source: int = 1, dtypes: Sequence[tf.DType] = (tf.int64,), capacity: int = 2) -> Inbox:
    return Inbox(name, source, tuple(dtypes), None, capacity)


def step_with(inboxes: Sequence[Inbox]) -> tf.compat.v1.GraphDef:
    """A step's graph, as far as the loops read it."""
    graph_def = tf.compat.v1.GraphDef()
    for one in inboxes:
        with tf.Graph().as_default() as graph:
            tf.raw_ops.FIFOQueueV2(component_types=one.dtypes)
        node = NodeDef()
        node.CopyFrom(graph.as_graph_def().node[0])
        one.describe(node)
        node.attr[SOURCE].i = one.source
        graph_def.node.append(node)
    return graph_def


def put(workers: list[GraphRunners], at: int, one: Inbox, *message: object) -> None:
    """Puts a message into a worker's queue: the outbox at its source."""
    runner = workers[at].control
    with tf.Graph().as_default() as graph:
        add = queue_of(one, cpu_of(at, WORKERS)).enqueue(
            [tf.constant(v, t) for v, t in zip(message, one.dtypes, strict=True)]
        )
        with tf.compat.v1.Session(runner.session.sess_str, graph=graph) as session:
            session.run(add, options=tf.compat.v1.RunOptions(timeout_in_ms=int(1000 * LIMIT)))


def taking(workers: list[GraphRunners], at: int, one: Inbox) -> Callable[[], list[np.ndarray]]:
    """Returns a run that takes a message from a worker's inbox, as a step does."""
    graph_def = step_with([one])
    graph_def.node[0].device = cpu_of(at, WORKERS)
    runner, prefix = workers[at].add(graph_def)
    with runner.graph.as_default(), tf.device(cpu_of(at, WORKERS)):
        handle = runner.graph.get_tensor_by_name(f"{prefix}{graph_def.node[0].name}:0")
        found = tf.raw_ops.QueueDequeueV2(handle=handle, component_types=one.dtypes)
    workers[at].inbox_loops.start(inboxes_of(graph_def).values())
    return runner.callable(found, [], [])


def test_messages_come_in_order_whoever_of_two_steps_takes_them(workers: list[GraphRunners]) -> None:
    one = inbox("ordered")
    first, second = taking(workers, 0, one), taking(workers, 0, one)
    sender = threading.Thread(target=lambda: [put(workers, 1, one, k) for k in range(30)])
    sender.start()
    found = [(first if k % 3 else second)()[0] for k in range(30)]
    sender.join(LIMIT)
    np.testing.assert_array_equal(found, np.arange(30))


def test_a_message_has_tensors_of_any_type_and_length(workers: list[GraphRunners]) -> None:
    one = inbox("types", 2, (tf.string, tf.bfloat16, tf.complex128))
    take = taking(workers, 0, one)
    for length in (2, 0, 5):
        message = [[b"a"] * length, np.ones([length, 3]), np.full([length], 1j)]
        put(workers, 2, one, *message)
        for value, sent in zip(take(), message, strict=True):
            np.testing.assert_array_equal(value.astype(np.asarray(sent).dtype), sent)


def test_sources_have_outboxes_of_their_own(workers: list[GraphRunners]) -> None:
    one, other = inbox("a/1/0"), inbox("a/2/0", 2)
    takes = [taking(workers, 0, one), taking(workers, 0, other)]
    put(workers, 2, other, 20)
    put(workers, 1, one, 10)
    assert [int(take()[0]) for take in takes] == [10, 20]


def test_messages_that_were_there_before_come_first(workers: list[GraphRunners]) -> None:
    one = inbox("filled")
    put(workers, 0, one, -1)
    put(workers, 1, one, 1)
    take = taking(workers, 0, one)
    assert [int(take()[0]) for _ in range(2)] == [-1, 1]


@pytest.mark.parametrize(
    ("elements", "in_iteration"),
    [(None, IN_ITERATION), (SMALL_BYTES // 8, SMALL_IN_ITERATION), (SMALL_BYTES // 8 + 1, IN_ITERATION)],
)
def test_a_source_runs_ahead_by_the_messages_that_queues_and_the_loop_hold(
    workers: list[GraphRunners], elements: int | None, in_iteration: int
) -> None:
    shapes = None if elements is None else (tf.TensorShape([elements]),)
    one = Inbox(f"ahead/{elements}", 1, (tf.int64,), shapes, 1)
    take = taking(workers, 0, one)
    held = in_iteration * OVERLAPPING
    most = 2 * one.capacity + held
    sent: list[int] = []
    enough = threading.Event()

    def send() -> None:
        for k in range(most + 3):
            put(workers, 1, one, np.full(elements or 1, k))
            sent.append(k)
            if len(sent) == one.capacity + held:
                enough.set()

    sender = threading.Thread(target=send)
    sender.start()
    assert enough.wait(LIMIT)
    assert len(sent) <= most
    assert [int(take()[0][0]) for _ in range(most + 3)] == list(range(most + 3))
    sender.join(LIMIT)


def test_a_step_that_waits_for_a_lost_source_raises_its_loss(workers: list[GraphRunners]) -> None:
    one = inbox("lost")
    take = taking(workers, 0, one)
    put(workers, 1, one, 5)
    assert int(take()[0]) == 5
    with tf.Graph().as_default() as graph:
        close = queue_of(one, cpu_of(1, WORKERS)).close(cancel_pending_enqueues=True)
    with tf.compat.v1.Session(workers[1].control.session.sess_str, graph=graph) as session:
        session.run(close)
    with pytest.raises(tf.errors.OpError) as raised:
        take()
    assert raised.value is workers[0].inbox_loops.failure


def test_the_end_of_the_loops_ends_a_waiting_step(workers: list[GraphRunners]) -> None:
    take = taking(workers, 0, inbox("ended"))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            take()
        except (ClusterError, RuntimeError, tf.errors.FailedPreconditionError) as error:  # or closed before
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    workers[0].end_runs(0.5)
    waiting.join(LIMIT)
    assert len(errors) == 1


class Unresponsive:
    """A session whose run, and whose end, wait for another worker's server that does not respond."""

    def __init__(self) -> None:
        self.responds = threading.Event()

    def run(self, fetches: object) -> None:
        self.responds.wait()
        raise tf.errors.CancelledError(None, None, "")

    def close(self) -> None:
        self.responds.wait()


def test_loops_that_do_not_end_are_left_and_waited_for_again() -> None:
    session = Unresponsive()
    loops = InboxLoops(0, WORKERS, lambda graph: session, ReservedThreads())  # type: ignore[arg-type, return-value]
    loops.start([inbox("left")])
    assert not loops.close(0.01)
    session.responds.set()
    assert loops.close(LIMIT) and loops.failure is None


class LostWhileClosed:
    """A session whose loops fail; it is closed while that closes their inboxes."""

    def __init__(self) -> None:
        self.runs = 0
        self.closes_inboxes, self.is_closed = threading.Event(), threading.Event()

    def run(self, fetches: object) -> None:
        self.runs += 1
        if self.runs == 1:
            raise tf.errors.UnavailableError(None, None, "the source is lost")
        self.closes_inboxes.set()
        self.is_closed.wait()
        raise tf.errors.CancelledError(None, None, "")

    def close(self) -> None:
        self.is_closed.set()


def test_a_failed_loop_may_be_closed_while_it_closes_its_inboxes() -> None:
    """An error in the thread of the loops would fail this test."""
    session = LostWhileClosed()
    loops = InboxLoops(0, WORKERS, lambda graph: session, ReservedThreads())  # type: ignore[arg-type, return-value]
    loops.start([inbox("lost")])
    session.closes_inboxes.wait()
    assert loops.close(LIMIT) and isinstance(loops.failure, tf.errors.UnavailableError)


class Lost(Unresponsive):
    """A session whose loops have failed; its end would wait for the lost source."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.has_closed_inboxes = threading.Event()

    def run(self, fetches: object) -> None:
        self.runs += 1
        if self.runs == 1:
            raise tf.errors.UnavailableError(None, None, "the source is lost")
        self.has_closed_inboxes.set()


def test_the_end_does_not_wait_for_the_session_of_a_failed_loop() -> None:
    session = Lost()
    loops = InboxLoops(0, WORKERS, lambda graph: session, ReservedThreads())  # type: ignore[arg-type, return-value]
    loops.start([inbox("lost")])
    session.has_closed_inboxes.wait()
    wait_for(loops)
    assert loops.close(LIMIT) and isinstance(loops.failure, tf.errors.UnavailableError)


def wait_for(loops: InboxLoops) -> None:
    """Returns when the threads of all loops have ended.

    Python 3.13 removes a thread from those that it lists a moment before the thread counts as ended.
    """
    for _, thread in loops._running:
        thread.join(LIMIT)


def test_loops_whose_end_was_interrupted_end_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Unresponsive()
    monkeypatch.setattr(session, "close", session.responds.set)
    threads = ReservedThreads(needs_reserve=False)
    loops = InboxLoops(0, WORKERS, lambda graph: session, threads)  # type: ignore[arg-type, return-value]
    loops.start([inbox("interrupted")])

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loops.close(LIMIT)
    assert not session.responds.is_set()
    assert loops.close(LIMIT) and session.responds.is_set()


def test_only_marked_queues_are_inboxes() -> None:
    shaped = Inbox("key/tag/1/0", 1, (tf.float32,), (tf.TensorShape([3]),), 4)
    graph_def = step_with([shaped])
    with tf.Graph().as_default() as graph:
        tf.queue.FIFOQueue(2, [tf.bool], [[]], shared_name="outbox")
    graph_def.node.extend(graph.as_graph_def().node)
    assert inboxes_of(graph_def) == {shaped.name: shaped}
