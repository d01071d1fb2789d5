"""The relay is there as long as the chief, and no longer."""

from __future__ import annotations

import socket

import pytest

from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.transport import SSHTransport
from tests.cluster.runs import within


@pytest.mark.processes
def test_a_relay_whose_chief_goes_away_ends_though_a_login_waits_for_its_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = SSHSettings("127.0.0.1", port=silent.getsockname()[1], host_key_checking=False)
        (channel,) = SSHTransport(settings, silence_timeout=60, reach_timeout=60).open(1, "none")
        with silent.accept()[0]:
            channel.stdin.close()
            try:
                assert within(5, lambda: channel._process.poll() is not None)
            finally:
                channel._process.kill()
                channel._process.wait(10)
                channel.stdout.close()
                channel.stderr.close()
