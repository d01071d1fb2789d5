"""Mailbox and messages: each arrives once, in the order of its sender, and nobody waits for a reader."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.mailbox import Mailbox
from autodist.runtime.messages import Messages
from tests.unit.runtime.servers import LIMIT, running, start_servers

WORKERS = 3


@pytest.fixture(scope="module")
def targets() -> list[str]:
    """Targets of the workers' servers, in this process; their queues are empty after each test."""
    return start_servers(WORKERS)


@pytest.fixture
def graph_runners(targets: list[str]) -> Iterator[list[GraphRunners]]:
    with running(targets) as made:
        yield made


@pytest.fixture
def mailboxes(graph_runners: list[GraphRunners]) -> Iterator[list[Mailbox]]:
    made = [Mailbox(one, worker, WORKERS) for worker, one in enumerate(graph_runners)]
    yield made
    for one in made:
        one.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("autodist-mailbox")]


def test_messages_of_a_sender_arrive_in_order_in_their_box(mailboxes: list[Mailbox]) -> None:
    arrived: list[queue.SimpleQueue[tuple[str, int, bytes]]] = [queue.SimpleQueue() for _ in mailboxes]
    sends = [
        [
            mailbox.open_box(lambda other, content, to=to, box=box: to.put((box, other, content)))  # type: ignore[misc]
            for box in ("first", "second")
        ]
        for mailbox, to in zip(mailboxes, arrived, strict=True)
    ]
    for number in range(20):
        sends[1][number % 2]([0], b"%d" % number)
        sends[2][0]([0], b"\0%d" % number)
    sends[0][1]([1, 2], b"")  # before any worker reads
    for mailbox in mailboxes:
        mailbox.start()
    found = [arrived[0].get(timeout=LIMIT) for _ in range(40)]
    assert [one for one in found if one[1] == 1] == [(("first", "second")[n % 2], 1, b"%d" % n) for n in range(20)]
    assert [one for one in found if one[1] == 2] == [("first", 2, b"\0%d" % n) for n in range(20)]
    for worker in (1, 2):
        assert arrived[worker].get(timeout=LIMIT) == ("second", 0, b"")


def test_the_chief_gathers_and_broadcasts(graph_runners: list[GraphRunners], mailboxes: list[Mailbox]) -> None:
    ends = [
        Messages(one.control, mailbox, worker, WORKERS)
        for worker, (one, mailbox) in enumerate(zip(graph_runners, mailboxes, strict=True))
    ]
    for mailbox in mailboxes:
        mailbox.start()
    for worker in (2, 1):
        assert ends[worker].gather(b"of %d" % worker) == []
        ends[worker].gather(b"next of %d" % worker)
        ends[worker].leave(b"last")
    assert ends[0].gather(b"of 0") == [b"of 0", b"of 1", b"of 2"]
    assert ends[0].gather(b"next of 0") == [b"next of 0", b"next of 1", b"next of 2"]
    assert ends[0].left() == [b"last", b"last"]
    assert ends[0].broadcast(b"one") == b"one"
    ends[0].broadcast(b"two")
    assert [ends[worker].broadcast() for worker in (1, 2)] == [b"one", b"one"]
    assert [ends[worker].broadcast() for worker in (1, 2)] == [b"two", b"two"]


def test_a_worker_that_waits_for_a_message_is_released_at_the_end(
    graph_runners: list[GraphRunners], mailboxes: list[Mailbox]
) -> None:
    messages = Messages(graph_runners[1].control, mailboxes[1], 1, WORKERS)
    timer = threading.Timer(0.1, messages.close)
    timer.start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="The run has ended"):
            messages.broadcast()
    timer.join()


def test_a_lost_connection_is_reported_and_the_end_of_reading_is_not(
    graph_runners: list[GraphRunners], mailboxes: list[Mailbox]
) -> None:
    """Otherwise calls that wait for a message wait for ever: the worker that should send it is alive."""
    lost: list[queue.SimpleQueue[BaseException]] = [queue.SimpleQueue() for _ in mailboxes]
    for mailbox, errors in zip(mailboxes, lost, strict=True):
        mailbox.on_loss = errors.put
        mailbox.start()
    with tf.Graph().as_default() as graph, tf.device(cpu_of(1, WORKERS)):
        queue_named = tf.queue.FIFOQueue(-1, tf.string, [[]], shared_name="autodist/mail/1/0")
        close = queue_named.close(cancel_pending_enqueues=True)
    with tf.compat.v1.Session(graph_runners[1].control.session.sess_str, graph=graph) as session:
        session.run(close)
    assert lost[0].get(timeout=LIMIT) is graph_runners[0].inbox_loops.failure
    for mailbox in mailboxes:
        mailbox.close()
    assert lost[1].empty() and lost[2].empty()
