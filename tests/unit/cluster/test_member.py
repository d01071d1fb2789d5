"""What a worker hears from its chief before their first step."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from autodist.cluster.member import Member
from autodist.cluster.ports import hold_port
from autodist.cluster.protocol import Join, Message, Release, Said, Waiting, encode


class Chief:
    """The other end of a member's control socket."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self.say(Join(1, "localhost:1", ("a:1", "b:2"), b"", 3.0))
        self.member = Member(theirs, hold_port(None))

    def say(self, message: Message) -> None:
        self._control.sendall(encode(message))

    def end(self) -> None:
        self.say(Release())  # or the member ends this process
        assert self.member._ended.wait(10)
        self.member.held.release()
        self._control.close()


@pytest.fixture
def chief() -> Iterator[Chief]:
    one, hook = Chief(), sys.excepthook
    yield one
    sys.excepthook = hook
    one.end()


def test_what_the_chief_says_is_heard_in_order_and_waited_for(chief: Chief) -> None:
    heard: list[str] = []
    thread = threading.Thread(target=lambda: heard.extend(chief.member.hear() for _ in range(2)))
    thread.start()
    chief.say(Said("first"))
    chief.say(Said("second"))
    thread.join(10)
    assert heard == ["first", "second"]


def _raise(member: Member, told: list[str]) -> threading.Thread:
    sys.excepthook = lambda kind, error, trace: told.append(str(error))
    member.let_chief_fail_first(60.0)
    thread = threading.Thread(target=sys.excepthook, args=(ValueError, ValueError("boom"), None))
    thread.start()
    return thread


def test_an_error_before_the_first_step_is_told_once_the_chief_has_come_there(chief: Chief) -> None:
    told: list[str] = []
    thread = _raise(chief.member, told)
    thread.join(0.2)
    assert told == []
    chief.say(Waiting())
    thread.join(30)
    assert told == ["boom"]


def test_an_error_is_told_at_once_where_the_chief_waits_in_its_first_step(chief: Chief) -> None:
    chief.say(Waiting())
    chief.member.wait_for_chief()
    told: list[str] = []
    _raise(chief.member, told).join(30)
    assert told == ["boom"]
