"""The relay of one command's streams."""

from __future__ import annotations

import io
import os
import threading

import pytest

from autodist.cluster.protocol import Heartbeat, Lost, decode, encode
from autodist.cluster.stream_relay import ChiefStreams, StreamRelay
from autodist.cluster.timeouts import HeartbeatTimeout


class Kept(io.BytesIO):
    """A stream whose content can still be read after `close`."""

    def close(self) -> None: ...


class Command:
    """A command on another machine that sends some bytes, and then nothing."""

    hint_of_silence = "; look at its login"

    def __init__(self, sends: bytes) -> None:
        self._sends, self.ended = [sends] if sends else [], threading.Event()

    def send(self, content: bytes) -> None: ...

    def receive(self) -> bytes:
        return self._sends.pop() if self._sends else b"" * self.ended.wait(10)

    def receive_errors(self) -> bytes:
        return b""

    def why_ended(self) -> str | None:
        return None

    def close(self) -> None: ...


@pytest.mark.parametrize("sends", [b"", encode(Heartbeat())])
def test_a_silent_command_is_lost_and_one_that_never_sent_anything_with_a_hint(sends: bytes) -> None:
    (read, write), outgoing, command = os.pipe(), Kept(), Command(sends)
    streams = ChiefStreams(os.fdopen(read, "rb"), outgoing, Kept())
    StreamRelay("a", command, streams, HeartbeatTimeout(0.2)).run()
    os.close(write)
    command.ended.set()
    lost = decode(outgoing.getvalue().splitlines()[-1])
    assert isinstance(lost, Lost) and "nothing was heard from a for 0.2 s" in lost.problem
    assert ("look at its login" in lost.problem) is (not sends)
