"""Several workers on a node whose SSH server limits concurrent logins, or commands per login."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.hosts import HOST_KINDS, Hosts, LoopbackHosts
from tests.cluster.runs import MARK, Run, command, parent, survivors, within

pytestmark = [pytest.mark.processes, pytest.mark.ssh]

FINISH = "coordinator.finish()"
WAIT = 'print("here", os.environ["TOKEN"] == "s3cret", len(sys.argv))\nworker_client.wait_for_end()'
SLEEP = 'note(f"asleep{index}"); time.sleep(60)'
TRAIN_UNTIL_STOPPED = 'note("training")\nstop.wait(40)\ncoordinator.abort("stopped")'


@contextmanager
def one_host(directory: Path, *options: str, kind: type[Hosts] = HOST_KINDS[0]) -> Iterator[Hosts]:
    """A host whose SSH server has options of sshd_config."""
    (directory / "hosts").mkdir()
    environment = {MARK: secrets.token_hex(8), "TOKEN": "s3cret"}
    with kind(directory / "hosts", 1, environment, ["LogLevel DEBUG1", *options]) as hosts:
        yield hosts


def run_on(hosts: Hosts, directory: Path, chief: str, worker: str, workers: int, connect_timeout: float = 60) -> Run:
    """Returns a run of `workers` workers on the host, in addition to the chief."""
    spec = hosts.spec() | {"connect_timeout": connect_timeout}
    spec["nodes"][1] |= {"cpus": list(range(workers)), "workers": workers}
    mark = hosts.ssh["host1"]["shared_envs"][MARK]
    return Run(directory / "run", chief, worker, spec, hosts.chief_command, mark)


def accepted(hosts: Hosts) -> int:
    """Returns the number of logins that the host's server has accepted so far."""
    return log_of(hosts).count("Accepted publickey")


def log_of(hosts: Hosts) -> str:
    return (hosts.directory / "host1.log").read_text()


@pytest.mark.parametrize(
    ("option", "workers", "logins"),
    [("MaxStartups 1", 4, 1), ("MaxSessions 2", 4, 2), ("MaxSessions 1", 3, 3)],
)
def test_a_node_is_logged_in_to_once_or_as_often_as_its_server_wants(
    tmp_path: Path, option: str, workers: int, logins: int
) -> None:
    with one_host(tmp_path, option) as hosts, run_on(hosts, tmp_path, FINISH, WAIT, workers) as run:
        assert run.wait(60) == 0, run.stderr
        run.assert_gone(0)
        assert accepted(hosts) == logins
        for number in range(workers):
            assert f"[{hosts.hosts[0].address}:{number}] here True 4\n" in run.stdout


def test_a_login_is_tried_again_while_the_server_admits_no_more(tmp_path: Path) -> None:
    # On an address of this machine that the test itself reaches.
    with one_host(tmp_path, "MaxStartups 1", kind=LoopbackHosts) as hosts:
        stranger = socket.create_connection((hosts.hosts[0].address, hosts.hosts[0].port))
        assert stranger.recv(4) == b"SSH-"  # from here on it is one that may still log in
        with stranger, run_on(hosts, tmp_path, FINISH, WAIT, 2) as run:
            assert within(20, lambda: "beginning MaxStartups throttling" in log_of(hosts)), log_of(hosts)
            stranger.close()
            assert run.wait(60) == 0, run.stderr
            run.assert_gone(0)
        assert accepted(hosts) == 1


def test_a_server_that_hangs_up_for_ever_is_told_of_with_the_mend(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("victim", ["worker", "relay", "chief"])
def test_killed_process_ends_all_workers_of_the_node(tmp_path: Path, victim: str) -> None:
    with one_host(tmp_path) as hosts, run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP, 3) as run:
        worker = run.wait_for_note("asleep1")
        for number in (2, 3):
            run.wait_for_note(f"asleep{number}")
        run.wait_for_note("training")
        (relay,) = (
            pid for pid in survivors(run.mark) if parent(pid) == run.chief.pid and "cluster.relay ssh" in command(pid)
        )
        os.kill({"worker": worker, "relay": relay, "chief": run.chief.pid}[victim], signal.SIGKILL)
        began = time.monotonic()
        run.wait(10)
        run.assert_gone(10 - (time.monotonic() - began))
    assert victim == "chief" or run.failures[0].startswith(f"{hosts.hosts[0].address}:")


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
