"""The messages that a worker receives from its chief before their first step."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from autodist.cluster import preemption_notice
from autodist.cluster.ports import reserve_port
from autodist.cluster.protocol import (
    ChiefText,
    ChiefWaits,
    Heartbeat,
    Joined,
    Leaving,
    Membership,
    Message,
    ProgressRequest,
    Release,
    decode,
    encode,
)
from autodist.cluster.script_client import ScriptClient
from autodist.cluster.script_end import watch_script_end


class Chief:
    """The other end of a worker client's control socket."""

    def __init__(self, on_preempt: bool = False, silence_timeout: float = 600.0) -> None:
        self._control, theirs = socket.socketpair()
        self._lines = self._control.makefile("rb")
        self.say(Membership(1, "localhost:1", ("a:1", "b:2"), b"", 3.0, silence_timeout, on_preempt=on_preempt))
        self.worker_client = ScriptClient(theirs, reserve_port(None))

    def say(self, message: Message) -> None:
        self._control.sendall(encode(message))

    def receive_text(self) -> Message:
        return decode(self._lines.readline())

    def end_the_script(self) -> None:
        """As an agent does before its guard sends SIGTERM."""
        self._control.shutdown(socket.SHUT_WR)

    def leave(self) -> None:
        self.worker_client.reserved_port.release()
        self._lines.close()
        self._control.close()

    def end(self) -> None:
        self.say(Release())  # otherwise the client ends this process
        assert self.worker_client._ended.wait(10)
        self.leave()


@pytest.fixture
def chief() -> Iterator[Chief]:
    one, hook = Chief(), sys.excepthook
    yield one
    sys.excepthook = hook
    one.end()


def test_what_the_chief_says_is_received_in_order_and_waited_for(chief: Chief) -> None:
    heard: list[str] = []
    thread = threading.Thread(target=lambda: heard.extend(chief.worker_client.receive_text() for _ in range(2)))
    thread.start()
    chief.say(ChiefText("first"))
    chief.say(ChiefText("second"))
    thread.join(10)
    assert heard == ["first", "second"]


def _raise(worker_client: ScriptClient, reported: list[str]) -> threading.Thread:
    sys.excepthook = lambda kind, error, trace: reported.append(str(error))
    worker_client.let_chief_fail_first(60.0)
    thread = threading.Thread(target=sys.excepthook, args=(ValueError, ValueError("boom"), None))
    thread.start()
    return thread


def test_an_error_before_the_first_step_is_reported_once_the_chief_has_come_there(chief: Chief) -> None:
    reported: list[str] = []
    thread = _raise(chief.worker_client, reported)
    thread.join(0.2)
    assert reported == []
    chief.say(ChiefWaits())
    thread.join(30)
    assert reported == ["boom"]


def test_an_error_is_reported_at_once_where_the_chief_waits_in_its_first_step(chief: Chief) -> None:
    chief.say(ChiefWaits())
    chief.worker_client.wait_for_chief()
    reported: list[str] = []
    _raise(chief.worker_client, reported).join(30)
    assert reported == ["boom"]


@pytest.fixture
def saving_chief(monkeypatch: pytest.MonkeyPatch) -> Chief:
    monkeypatch.setattr(watch_script_end(), "delays_termination", watch_script_end().delays_termination)
    return Chief(on_preempt=True)


def test_the_first_sigterm_and_its_repeats_are_reported_once_to_a_chief_that_saves_then(
    saving_chief: Chief, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = watch_script_end().delays_termination
    assert [delays(), delays()] == [True, True]
    monkeypatch.setattr(preemption_notice, "REPEATS_WITHIN", 0.0)
    assert not delays()
    assert [saving_chief.receive_text(), saving_chief.receive_text()] == [Joined(), Leaving()]
    saving_chief.end()


def test_the_agent_s_own_sigterm_ends_the_script(saving_chief: Chief, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("autodist.cluster.script_client._end_own_group", lambda limit: ended.set())
    saving_chief.say(ProgressRequest())  # the client may not have read it by then
    saving_chief.end_the_script()
    assert not watch_script_end().delays_termination()
    assert not ended.wait(0.1)  # its guard does that
    saving_chief.leave()
    assert ended.wait(10)  # unless the agent is gone


def test_a_script_ends_itself_when_its_agent_sends_nothing_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("autodist.cluster.script_client._end_own_group", lambda limit: ended.set())
    chief = Chief(silence_timeout=0.5)
    for _ in range(4):
        chief.say(Heartbeat())
        assert not ended.wait(0.2)
    assert ended.wait(30)
    chief.leave()


def test_an_agent_that_ends_its_script_is_not_taken_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the guard gives the script more time than an agent may be silent."""
    ended = threading.Event()
    monkeypatch.setattr("autodist.cluster.script_client._end_own_group", lambda limit: ended.set())
    chief = Chief(silence_timeout=0.2)
    chief.end_the_script()
    assert not ended.wait(1.5)
    chief.leave()
    assert ended.wait(30)  # without its agent, the script ends


def test_without_that_sigterm_ends_the_script(chief: Chief) -> None:
    assert not watch_script_end().delays_termination()
