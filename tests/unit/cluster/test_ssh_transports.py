"""The relay lives exactly as long as the chief."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Iterator

import pytest

from autodist.cluster import ssh_transports
from autodist.cluster.protocol import Lost, decode
from autodist.cluster.ssh_errors import UnreachableError
from autodist.cluster.ssh_settings import SSHOrder, SSHSettings
from autodist.cluster.stream_relay import ChiefStreams, Relays
from autodist.cluster.transport import start_relay
from autodist.errors import ClusterError
from tests.cluster.runs import within


@pytest.mark.processes
def test_a_relay_whose_chief_goes_away_ends_though_a_login_waits_for_its_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = SSHSettings("127.0.0.1", port=silent.getsockname()[1], host_key_checking=False)
        _, (channel,) = start_relay("ssh", SSHOrder(settings, ("none",), 60, 60), 1)
        with silent.accept()[0]:
            channel.stdin.close()
            try:
                assert within(5, lambda: channel._process.poll() is not None)
            finally:
                channel._process.kill()
                channel._process.wait(10)
                channel.stdout.close()
                channel.stderr.close()


@pytest.mark.parametrize("kind", [UnreachableError, ClusterError])
def test_all_of_a_machine_that_was_not_reached_are_reported_why_and_whether_it_answers(
    kind: type[ClusterError], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine:
        def start(self, *command: object) -> None:
            raise kind("it did not work")

    @contextlib.contextmanager
    def reach(*how: object) -> Iterator[Machine]:
        yield Machine()

    monkeypatch.setattr(ssh_transports, "reach", reach)
    monkeypatch.setattr(
        ssh_transports, "_end_with_the_chief", lambda relays, have_started: None
    )  # it would end this process
    pipes = [[os.pipe() for _ in range(3)] for _ in range(2)]
    ends = [ChiefStreams.open(reported[0], said[1], errors[1]) for reported, said, errors in pipes]
    ssh_transports.relay(SSHOrder(SSHSettings("b"), ("module",), 60.0, 60.0), Relays(ends), io.BytesIO())
    for one, ((_, reported), (said, _), (errors, _)) in zip(ends, pipes, strict=True):
        with os.fdopen(said, "rb") as lines:
            assert decode(lines.readline()) == Lost("it did not work", kind is UnreachableError)
        one.incoming.close()
        os.close(reported)
        os.close(errors)
