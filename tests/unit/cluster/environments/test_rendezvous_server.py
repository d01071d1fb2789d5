"""Clients join a rendezvous server over real sockets, all within this process."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from autodist.cluster.environments import follower as following
from autodist.cluster.environments.connect import connect
from autodist.cluster.environments.follower import Follower
from autodist.cluster.environments.follower_connection import FollowerConnection
from autodist.cluster.environments.handshake import Welcome
from autodist.cluster.environments.launcher_env import GivenCluster
from autodist.cluster.environments.rendezvous_server import RendezvousServer
from autodist.cluster.environments.roster import (
    MAX_TRIES,
    Failed,
    Listening,
    PortInUse,
    ProcessJoined,
    RendezvousOrder,
    Warned,
)
from autodist.cluster.protocol import Line, Lost, Message, decode, encode
from autodist.cluster.script import Script
from autodist.cluster.stream_relay import ChiefStreams, Relays
from autodist.errors import ClusterError
from tests.ports import free_port

SECRET = "a secret of the run"
SCRIPT = Script(("train.py",), "/", None)


class Chief:
    """A rendezvous server in threads of this process, and the chief's ends of its streams."""

    def __init__(self, count: int, port: int, stays_open: bool = True, runs_ahead: bool = True) -> None:
        ways = [tuple(os.pipe() for _ in range(3)) for _ in range(count - 1)]
        self._theirs = [ChiefStreams.open(stdin[0], stdout[1], stderr[1]) for stdin, stdout, stderr in ways]
        self.to = [os.fdopen(way[0][1], "wb") for way in ways]
        self.of = [os.fdopen(way[1][0], "rb") for way in ways]
        self.errors = [os.fdopen(way[2][0], "rb") for way in ways]
        reported, report = os.pipe()
        self.news: BinaryIO = os.fdopen(reported, "rb")
        self._tell: BinaryIO = os.fdopen(report, "wb")
        order = RendezvousOrder("127.0.0.1", port, count, SECRET, stays_open, 25.0, 3.0)
        self._server = RendezvousServer(order, Relays(self._theirs), self._tell)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        assert not runs_ahead or isinstance(self.receives(), Listening)

    def receives(self) -> Message:
        return decode(self.news.readline())

    def close(self) -> None:
        for stream in self.to:
            stream.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        for index in self._server._roster.missing:
            self._theirs[index - 1].close()
            self._theirs[index - 1].incoming.close()
        for other in (*self.of, *self.errors, self.news, self._tell):
            other.close()


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


@pytest.fixture
def chief(port: int) -> Iterator[Chief]:
    with closing(Chief(3, port)) as made:
        yield made


def join(port: int, index: int, secret: str = SECRET, limit: float = 10, **about: Any) -> tuple[socket.socket, Welcome]:
    given = GivenCluster("by hand", index, about.pop("count", 3), "127.0.0.1", port, **about)
    return connect(given, {"AUTODIST_SECRET": secret}, limit, lambda: 0)


def test_who_knows_the_secret_is_let_in_and_heard(chief: Chief, port: int) -> None:
    connection, welcome = join(port, 2)
    with connection:
        news = chief.receives()
        assert isinstance(news, ProcessJoined)
        assert (news.arrival.hello.index, news.arrival.from_host) == (2, "127.0.0.1")
        assert (welcome.silence_timeout, welcome.stop_timeout) == (25.0, 3.0)
        connection.sendall(encode(Line("stdout", "it says")))
        assert decode(chief.of[1].readline()) == Line("stdout", "it says")
        chief.to[1].write(encode(Lost("the chief says")))
        chief.to[1].flush()
        with connection.makefile("rb") as lines:
            assert decode(lines.readline()) == Lost("the chief says")


def test_a_wrong_secret_is_refused_and_reported_on_both_sides(chief: Chief, port: int) -> None:
    with pytest.raises(ClusterError, match="refuses process 1: its secret differs from the chief's; give all"):
        join(port, 1, "another secret of a run")
    news = chief.receives()
    assert isinstance(news, Warned)
    assert news.text.startswith("a process at 127.0.0.1 was refused: its secret differs")


def test_after_so_many_wrong_secrets_the_door_is_closed(chief: Chief, port: int) -> None:
    for _ in range(MAX_TRIES):
        with pytest.raises(ClusterError, match="its secret differs"):
            join(port, 1, "another secret of a run")
        assert isinstance(chief.receives(), Warned)
    news = chief.receives()
    assert isinstance(news, Failed)
    assert f"a process with another secret connected {MAX_TRIES} times" in news.problem
    with pytest.raises(ClusterError, match="found no chief at 127.0.0.1"):
        join(port, 1, limit=0.2)


def test_a_second_process_with_the_same_index_is_refused_and_the_first_stays(chief: Chief, port: int) -> None:
    first, _ = join(port, 1)
    with first:
        chief.receives()
        with pytest.raises(ClusterError, match="its index, 1, is that of a process that joined before"):
            join(port, 1)
        assert isinstance(chief.receives(), Warned)
        first.sendall(encode(Line("stdout", "still here")))
        assert decode(chief.of[0].readline()) == Line("stdout", "still here")


def test_who_counts_otherwise_than_the_chief_is_refused(chief: Chief, port: int) -> None:
    with pytest.raises(ClusterError, match="it counts 4 processes, the chief 3"):
        join(port, 1, count=4)


def test_who_leaves_before_all_have_come_is_named(chief: Chief, port: int) -> None:
    connection, _ = join(port, 1)
    chief.receives()
    connection.close()
    news = chief.receives()
    assert isinstance(news, Failed)
    assert "process 1 on" in news.problem
    assert "left before all had joined" in news.problem


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b"\n"], ids=["HTTP", "long", "empty"])
def test_somebody_else_who_connects_does_no_harm(chief: Chief, port: int, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        with suppress(OSError):  # the server may close the connection before an oversized message is complete
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        connection, _ = join(port, 1)
        connection.close()


def test_the_port_is_free_for_the_server_once_all_have_come(port: int) -> None:
    with closing(Chief(2, port, stays_open=False)) as chief:
        connection, _ = join(port, 1, count=2)
        with connection:
            assert isinstance(chief.receives(), ProcessJoined)
            with pytest.raises(ClusterError, match="found no chief at 127.0.0.1"):
                join(port, 1, limit=0.2, count=2)
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", port))
                server.listen()


def test_who_comes_late_is_refused_where_the_port_is_nobody_elses(port: int) -> None:
    with closing(Chief(2, port)) as chief:
        connection, _ = join(port, 1, count=2)
        with connection:
            chief.receives()
            with pytest.raises(ClusterError, match="is that of a process that joined before"):
                join(port, 1, count=2, limit=1.2)  # it tries again: that run may be about to end
            news = chief.receives()
            assert isinstance(news, Warned) and "joined before" in news.text
            with pytest.raises(ClusterError, match="it refuses this process: its secret differs"):
                join(port, 1, "another secret of a run", count=2, limit=0.2)
            news = chief.receives()
            assert isinstance(news, Warned) and "its secret differs" in news.text, "each refusal is reported once"


def test_a_port_that_is_in_use_is_named_with_its_process_and_waited_for(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        chief = Chief(2, port, runs_ahead=False)
        reported = chief.receives()
        assert isinstance(reported, PortInUse)
        assert f"cannot listen on port {port} of this machine: Address already in use, by process " in reported.problem
        assert str(os.getpid()) in reported.problem
    with closing(chief):
        assert isinstance(chief.receives(), Listening)
        connection, _ = join(port, 1, count=2)
        with connection:
            assert isinstance(chief.receives(), ProcessJoined)


def test_a_port_that_stays_in_use_is_waited_for_as_long_as_the_chief_waits(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), closing(Chief(2, port, runs_ahead=False)) as chief:
        assert isinstance(chief.receives(), PortInUse)


def test_a_port_that_may_not_be_used_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, port: int) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied (while attempting to bind)")

    monkeypatch.setattr("autodist.cluster.environments.rendezvous_server.listen", refuse)
    with closing(Chief(2, port, runs_ahead=False)) as chief:
        reported = chief.receives()
    assert isinstance(reported, Failed)
    assert reported.problem.endswith("Permission denied; free the port, or set another one in AUTODIST_CHIEF")


def test_without_a_chief_it_is_said_where_it_was_looked_for(port: int) -> None:
    with pytest.raises(ClusterError, match=rf"Process 1 found no chief at 127.0.0.1, port {port}, within 0.2 s \("):
        join(port, 1, limit=0.2)


def test_a_chief_that_does_not_know_the_secret_is_none(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                connection.sendall(b'{"nonce":"x","kind":"Challenge"}\n')
                lines.readline()
                connection.sendall(b'{"digest":"x","silence_timeout":1,"stop_timeout":1,"kind":"Welcome"}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ClusterError, match="the process that listens there does not know the secret"):
            join(port, 1)
        thread.join(10)


def test_a_secret_that_the_chief_has_not_left_is_reported(
    chief: Chief, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = GivenCluster("SLURM", 1, 3, "127.0.0.1", port, job="slurm-1-0")
    with pytest.raises(ClusterError, match=r"the chief's file .*slurm-1-0 with the secret does not exist"):
        connect(given, {}, 0.3, lambda: 0)


def test_a_follower_that_was_informed_why_nothing_starts_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        follower = Follower(theirs, SCRIPT, Welcome("", 25.0, 3.0))
        ours.sendall(encode(Lost("the run did not start: process 2 of 3 did not come")))
        follower.serve()
        assert follower.status == 1
    assert "autodist: the run did not start: process 2 of 3 did not come\n" in capsys.readouterr().err


def test_a_process_that_becomes_a_follower_is_reported_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, str]] = []
    monkeypatch.setattr(following.os, "execve", lambda path, command, environment: found.append(environment))
    order = following.FollowerOrder(
        GivenCluster("SLURM", 1, 3, "127.0.0.1", 15000, job="slurm-1-0"), Script.of_this_process(), 0.3
    )
    following.follow(order)
    monkeypatch.setenv(following.VARIABLE, found[0][following.VARIABLE])
    reported: list[tuple[GivenCluster, float]] = []

    def connect_to_none(given: GivenCluster, environment: object, limit: float, count_gpus: object) -> None:
        reported.append((given, limit))
        raise ClusterError("there is no chief")

    monkeypatch.setattr(following, "connect", connect_to_none)
    monkeypatch.setattr(following, "_SIGNALS", ())  # this process keeps its handlers
    assert following.main() == 1
    assert reported == [(order.given, 0.3)]


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
def test_a_process_that_ends_with_unread_messages_has_ended_as_others_do(is_read: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = socket.create_connection(listener.getsockname())
        connection = FollowerConnection(listener.accept()[0], "process 1")
    with closing(connection):
        connection.send(b"message")
        if is_read:
            ending.recv(100)
        else:
            ending.recv(100, socket.MSG_PEEK)  # it has arrived
        ending.close()
        assert connection.receive() == b""
        assert connection.why_ended() is None
