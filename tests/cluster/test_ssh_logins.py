"""Several workers on a node whose SSH server limits concurrent logins, or commands per login."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import HOST_KINDS, Hosts, LoopbackHosts
from tests.cluster.runs import MARK, Run, command, parent, survivors, within

pytestmark = [pytest.mark.processes, pytest.mark.ssh]

FINISH = "coordinator.finish()"
WAIT = """
print(worker_client.payload, sys.argv[1:], os.environ["TOKEN"])
print("complaint", file=sys.stderr)
worker_client.wait_for_end()
"""
SLEEP = 'note(f"asleep{index}"); time.sleep(60)'
TRAIN_UNTIL_STOPPED = 'note("training")\nstop.wait(40)\ncoordinator.abort("stopped")'


@contextmanager
def one_host(directory: Path, *options: str, kind: type[Hosts] = HOST_KINDS[0]) -> Iterator[Hosts]:
    """A host whose SSH server has options of sshd_config."""
    (directory / "hosts").mkdir()
    environment = {MARK: secrets.token_hex(8), "TOKEN": "s3cret"}
    with kind(directory / "hosts", 1, environment, ["LogLevel DEBUG1", *options]) as hosts:
        yield hosts


def run_on(hosts: Hosts, directory: Path, chief: str, worker: str, workers: int, **settings: Any) -> Run:
    """Returns a run of `workers` workers on the host, in addition to the chief."""
    spec = hosts.spec() | {"connect_timeout": 60} | settings
    spec["nodes"][1] |= {"cpus": list(range(workers)), "workers": workers}
    mark = hosts.ssh["host1"]["shared_envs"][MARK]
    return Run(directory / "run", chief, worker, spec, hosts.chief_command, mark)


def accepted(hosts: Hosts) -> int:
    """Returns the number of logins that the host's server has accepted so far."""
    return log_of(hosts).count("Accepted publickey")


def programs_of(run: Run) -> list[int]:
    """Returns the `ssh` programs that hold a login."""
    return [pid for pid in survivors(run.mark) if command(pid).startswith("ssh") and "-N" in command(pid)]


def log_of(hosts: Hosts) -> str:
    return (hosts.directory / "host1.log").read_text()


by_each_transport = pytest.mark.parametrize("transport", ["paramiko", "openssh"])


@pytest.mark.parametrize(
    "transport, option, workers, logins",
    [
        ("paramiko", "MaxStartups 1", 3, 1),
        ("paramiko", "MaxSessions 2", 3, 2),
        ("openssh", "MaxStartups 1", 3, 1),
        ("openssh", "MaxSessions 2", 3, 2),
    ],
)
def test_a_node_is_logged_in_to_once_or_as_often_as_its_server_wants(
    tmp_path: Path, transport: str, option: str, workers: int, logins: int
) -> None:
    with (
        one_host(tmp_path, option) as hosts,
        run_on(hosts, tmp_path, FINISH, WAIT, workers, transport=transport) as run,
    ):
        assert run.wait(60) == 0, run.stderr
        run.assert_gone(0)
        assert accepted(hosts) == logins
    arguments = ["argument with spaces", "$HOME", "'"]
    for number in range(workers):
        name = f"[{hosts.hosts[0].address}:{number}]"
        assert f"{name} {b'payload ' + bytes([255])!r} {arguments} s3cret\n" in run.stdout
        assert f"{name} complaint\n" in run.stderr


@by_each_transport
def test_a_login_is_tried_again_while_the_server_admits_no_more(tmp_path: Path, transport: str) -> None:
    # On an address of this machine that the test itself reaches.
    with one_host(tmp_path, "MaxStartups 1", kind=LoopbackHosts) as hosts:
        stranger = socket.create_connection((hosts.hosts[0].address, hosts.hosts[0].port))
        assert stranger.recv(4) == b"SSH-"  # from here on it is one that may still log in
        with stranger, run_on(hosts, tmp_path, FINISH, WAIT, 2, transport=transport) as run:
            assert within(20, lambda: log_of(hosts).count("drop connection") > 1), log_of(hosts)
            stranger.close()
            assert run.wait(60) == 0, run.stderr
            run.assert_gone(0)
        assert accepted(hosts) == 1


def test_a_server_that_hangs_up_for_ever_is_reported_with_the_fix(tmp_path: Path) -> None:
    with one_host(tmp_path, "MaxStartups 1", kind=LoopbackHosts) as hosts:
        stranger = socket.create_connection((hosts.hosts[0].address, hosts.hosts[0].port))
        assert stranger.recv(4) == b"SSH-"
        with stranger, run_on(hosts, tmp_path, FINISH, WAIT, 2, connect_timeout=5) as run:
            assert run.wait(60) == 1
            run.assert_gone(0)
    assert "if it admits too few logins at once, raise `MaxStartups` in its sshd_config." in run.stderr


def test_chief_that_is_killed_while_a_login_is_tried_again_leaves_nothing(tmp_path: Path) -> None:
    with one_host(tmp_path, "MaxStartups 1", kind=LoopbackHosts) as hosts:
        stranger = socket.create_connection((hosts.hosts[0].address, hosts.hosts[0].port))
        assert stranger.recv(4) == b"SSH-"
        with stranger, run_on(hosts, tmp_path, FINISH, WAIT, 2) as run:
            assert within(20, lambda: "beginning MaxStartups throttling" in log_of(hosts)), log_of(hosts)
            run.chief.kill()
            run.chief.wait()
            run.assert_gone(10)


KILLS = [
    ("paramiko", "worker", ""),
    ("paramiko", "relay", ""),
    ("openssh", "relay", ""),
    ("openssh", "chief", ""),
    ("openssh", "agent", "its agent ended without any output"),
    ("openssh", "ssh", "the SSH connection to .* broke"),
]


@pytest.mark.parametrize("transport, victim, reason", KILLS, ids=lambda value: value)
def test_killed_process_ends_all_workers_of_the_node(tmp_path: Path, transport: str, victim: str, reason: str) -> None:
    with (
        one_host(tmp_path) as hosts,
        run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP, 3, transport=transport) as run,
    ):
        worker = run.wait_for_note("asleep1")
        for number in (2, 3):
            run.wait_for_note(f"asleep{number}")
        run.wait_for_note("training")
        victims = {"worker": worker, "agent": parent(parent(worker)), "chief": run.chief.pid}
        (relay,) = (
            pid for pid in survivors(run.mark) if parent(pid) == run.chief.pid and "cluster.relay ssh" in command(pid)
        )
        victims["relay"], folder = relay, None
        if transport == "openssh":
            (victims["ssh"],) = programs_of(run)
            folder = Path(command(victims["ssh"]).split(" -S ")[1].split()[0]).parent
            assert folder.is_dir()
        os.kill(victims[victim], signal.SIGKILL)
        began = time.monotonic()
        run.wait(10)
        run.assert_gone(10 - (time.monotonic() - began))
        assert folder is None or not folder.exists()
    assert victim == "chief" or re.search(rf"^{hosts.hosts[0].address}:\d \| .*{reason}", run.failures[0])


def test_shared_variables_are_in_no_process_arguments(tmp_path: Path) -> None:
    # A login shell that does not replace itself by its last command.
    shell = 'ForceCommand exec /bin/sh -c "$SSH_ORIGINAL_COMMAND ; :"'
    with one_host(tmp_path, shell) as hosts, run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP, 2) as run:
        for number in (1, 2):
            run.wait_for_note(f"asleep{number}")
        run.wait_for_note("training")
        everybody = [file for file in Path("/proc").glob("[0-9]*/cmdline") if b"s3cret" in _read(file)]
        assert everybody == []
        assert b"TOKEN=s3cret" in _read(Path(f"/proc/{run.wait_for_note('worker1')}/environ"))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # it has ended
