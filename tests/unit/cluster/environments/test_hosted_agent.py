"""The agent of a hosted function, with the chief's end of its connection in this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from autodist.cluster.environments.handshake import Welcome
from autodist.cluster.environments.hosted_agent import HostedAgent, HostedClient
from autodist.cluster.hosted_function import HostedFunction
from autodist.cluster.protocol import (
    ChiefText,
    ChiefWaits,
    Done,
    Exited,
    Facts,
    Heartbeat,
    Inspect,
    Joined,
    Line,
    Lost,
    Membership,
    Message,
    Release,
    Start,
    Stop,
    decode,
    encode,
)
from autodist.cluster.script import Script
from autodist.errors import ClusterError, WorkerFailedError

MEMBERSHIP = Membership(1, "n1:1", ("n1:1", "n1:2"), b"payload", 3.0, 25.0)


class Chief:
    """The chief's end of the connection."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._lines = self._connection.makefile("rb")
        self.function = HostedFunction(Script((), "/", None, "a digest", function="train"))
        self.agent = HostedAgent(theirs, Welcome("", 25.0, 3.0), self.function)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._connection.sendall(encode(message))

    def hear(self) -> Message:
        """Returns the function's next message."""
        message = decode(self._lines.readline())
        return self.hear() if isinstance(message, Heartbeat) else message

    def start(self) -> HostedClient:
        self.say(Inspect(None, "/not/there", None), Start((), "/", {}, MEMBERSHIP))
        facts = self.hear()
        assert isinstance(facts, Facts)
        assert (facts.digest, facts.problems) == ("a digest", ())
        client = self.agent.wait_for_start()
        assert self.hear() == Joined()
        return client

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


@pytest.fixture
def chief() -> Iterator[Chief]:
    before = threading.active_count()
    made = Chief()
    yield made
    made.close()
    made.agent.end_function(None)
    assert threading.active_count() == before, [thread.name for thread in threading.enumerate()]


def test_a_function_takes_part_and_ends_with_all_others(chief: Chief) -> None:
    client = chief.start()
    assert (client.index, client.addresses, client.payload) == (1, MEMBERSHIP.addresses, b"payload")
    chief.say(ChiefText("a text"), ChiefWaits(), Release())
    assert client.receive_text() == "a text"
    client.wait_for_chief()
    client.wait_for_end()
    assert chief.hear() == Done()
    assert client.failure is None
    ending = threading.Thread(target=chief.agent.end_function, args=(None,))
    ending.start()
    assert chief.hear() == Exited(0)
    chief.close()
    ending.join(20)
    assert not ending.is_alive()


def test_the_error_of_a_function_is_sent_with_its_traceback(chief: Chief) -> None:
    chief.start()
    ending = threading.Thread(target=chief.agent.end_function, args=(ValueError("boom"),))
    ending.start()
    assert chief.hear() == Line("stderr", "ValueError: boom")
    assert chief.hear() == Exited(1, "raised ValueError: boom")
    chief.close()
    ending.join(20)
    assert chief.function.end.raised is None, "the function has raised it itself"


def test_the_failure_of_another_worker_is_raised_wherever_the_function_waits(chief: Chief) -> None:
    client = chief.start()
    failures: list[ClusterError] = []
    client.on_failure = failures.append
    chief.say(Stop("raised ValueError: boom", "n1:2", ("a line",)))
    for wait in (client.wait_for_chief, client.receive_text, client.wait_for_end):
        with pytest.raises(WorkerFailedError) as caught:
            wait()
        assert (caught.value.worker, caught.value.last_lines) == ("n1:2", ("a line",))
    assert failures == [chief.function.end.raised] == [client.failure]


def test_a_lost_chief_is_named(chief: Chief) -> None:
    client = chief.start()
    chief.close()
    with pytest.raises(ClusterError, match=r"^The chief was lost: its process has ended, or the connection"):
        client.wait_for_chief()


def test_a_run_that_does_not_start_says_why(chief: Chief) -> None:
    chief.say(Lost("the run did not start: process 2 of 3 did not join"))
    with pytest.raises(ClusterError, match="process 2 of 3 did not join"):
        chief.agent.wait_for_start()


def test_a_chief_that_ends_before_it_starts_anything_is_reported(chief: Chief) -> None:
    chief.close()
    with pytest.raises(ClusterError, match="The chief ended before the run was started"):
        chief.agent.wait_for_start()


@pytest.mark.parametrize("is_done", [True, False])
def test_a_chief_that_ends_without_a_step_ends_a_function_well_if_it_has_none_either(
    chief: Chief, is_done: bool
) -> None:
    client = chief.start()
    waiting = threading.Thread(target=client.wait_for_end)
    if is_done:
        waiting.start()
        assert chief.hear() == Done()
    chief.say(Stop())
    client.wait_to_be_ended(20)
    if is_done:
        waiting.join(20)
        assert client.failure is None
    else:
        with pytest.raises(ClusterError, match="The chief's function has ended, and makes no further step"):
            client.check()
