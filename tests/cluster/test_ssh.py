"""Runs over real SSH, on test hosts."""

from __future__ import annotations

import getpass
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import HOST_KINDS, Hosts
from tests.cluster.runs import MARK, Run, command, parent, survivors, within

pytestmark = [pytest.mark.processes, pytest.mark.ssh]

FINISH = "coordinator.finish()"
TRAIN_UNTIL_STOPPED = 'note("training")\nstop.wait(40)\ncoordinator.abort("stopped")'
WAIT = "worker_client.wait_for_end()"
SILENCE_LIMIT = 4.0
SUSPENDED = SILENCE_LIMIT + 2
SLEEP = 'note(f"asleep{index}"); time.sleep(60)'

# In the two seconds that SIGTERM leaves a script, this one goes on.
PRINT_FOR_EVER = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(f"asleep{index}")
while True:
    print("x" * 1000)
    time.sleep(0.0005)
"""


@pytest.fixture(params=HOST_KINDS, ids=lambda kind: kind.__name__)
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    directory = tmp_path / "hosts"
    directory.mkdir()
    with request.param(directory, environment={MARK: secrets.token_hex(8), "GREETING": "a 'quoted' $HOME"}) as made:
        yield made


# Events within a connection, independent of its transport and of the kind of disconnection.
of_one_kind = pytest.mark.parametrize("hosts", HOST_KINDS[:1], indirect=True, ids=lambda kind: kind.__name__)


def run_on(hosts: Hosts, directory: Path, chief: str, worker: str, spec: dict[str, Any] | None = None) -> Run:
    """Returns a run whose chief is on the chief's machine of `hosts`, with the mark of the hosts' processes."""
    mark = hosts.ssh["host1"]["shared_envs"][MARK]
    return Run(directory / "run", chief, worker, spec or impatient(hosts), hosts.chief_command, mark)


def impatient(hosts: Hosts) -> dict[str, Any]:
    """Returns a cluster whose connections count as lost after a few seconds."""
    return hosts.spec() | {"silence_timeout": SILENCE_LIMIT}


def test_run_over_ssh(hosts: Hosts, tmp_path: Path) -> None:
    worker = """
print(worker_client.name, worker_client.payload, sys.argv[1:], os.environ["GREETING"])
print("complaint", file=sys.stderr)
worker_client.wait_for_end()
"""
    with run_on(hosts, tmp_path, FINISH, worker) as run:
        assert run.wait() == 0, run.stderr
        run.assert_gone(0)
    for host in hosts.hosts:
        arguments = ["argument with spaces", "$HOME", "'"]
        expected = f"[{host.address}] {host.address} {b'payload ' + bytes([255])!r} {arguments} a 'quoted' $HOME\n"
        assert expected in run.stdout
        assert f"[{host.address}] complaint\n" in run.stderr


@of_one_kind
def test_much_output_passes(hosts: Hosts, tmp_path: Path) -> None:
    worker = """
for number in range(5000):
    print("x" * 300)
print("last", index)
worker_client.wait_for_end()
"""
    with run_on(hosts, tmp_path, FINISH, worker) as run:
        assert run.wait() == 0, run.stderr
    assert run.stdout.count("x" * 300 + "\n") == 10000
    assert run.stdout.count("last") == 2


@of_one_kind
@pytest.mark.parametrize("victim", ["agent", "chief"])
def test_killed_process_ends_the_run_on_all_hosts(hosts: Hosts, tmp_path: Path, victim: str) -> None:
    with run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP) as run:
        worker = run.wait_for_note("asleep1")
        run.wait_for_note("asleep2")
        assert len(survivors(run.mark)) == 9  # the chief; for each worker a relay, an agent, a guard and the script
        os.kill({"agent": parent(parent(worker)), "chief": run.chief.pid}[victim], signal.SIGKILL)
        run.assert_gone(10)
        run.wait()
    assert victim == "chief" or run.failures[0].startswith(f"{hosts.hosts[0].address} | ")


@pytest.mark.parametrize(
    "hosts, worker, transport",
    [
        pytest.param(HOST_KINDS[0], PRINT_FOR_EVER, "paramiko", id="printing"),
        pytest.param(HOST_KINDS[-1], SLEEP, "openssh", id="quiet"),
    ],
    indirect=["hosts"],
)
def test_cut_link_stops_the_run_on_both_sides_and_is_named(
    hosts: Hosts, tmp_path: Path, worker: str, transport: str
) -> None:
    with run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, worker, impatient(hosts) | {"transport": transport}) as run:
        run.wait_for_note("asleep1")
        run.wait_for_note("asleep2")
        hosts.cut(hosts.hosts[1])
        run.wait_for_note("failed", limit=10)
        run.wait(10)
        run.assert_gone(4)
        hosts.mend(hosts.hosts[1])
    address = hosts.hosts[1].address
    assert len(run.failures) == 1
    assert run.failures[0].startswith(f"{address} | was lost: nothing was heard from {address} for 4 s")


@of_one_kind
def test_a_link_that_is_cut_for_ten_seconds_does_no_harm(hosts: Hosts, tmp_path: Path) -> None:
    worker = """
for number in range(3):
    while not os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "notes", f"go{number}")):
        time.sleep(0.02)
    print("line", number)
worker_client.wait_for_end()
"""
    with run_on(hosts, tmp_path, FINISH, worker, hosts.spec()) as run:
        run.wait_for_note("worker1")
        run.wait_for_note("worker2")
        for number in range(3):
            if number == 1:
                hosts.cut(hosts.hosts[1])
            (run.directory / "notes" / f"go{number}").touch()
            if number == 1:
                time.sleep(10)  # as claimed
                hosts.mend(hosts.hosts[1])
        assert run.wait(60) == 0, run.stderr
        run.assert_gone(0)
    for host in hosts.hosts:
        assert [f"[{host.address}] line {number}" in run.stdout for number in range(3)] == [True] * 3
    assert run.failures == []


@of_one_kind
def test_run_that_was_suspended_as_a_whole_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    with run_on(hosts, tmp_path, f"note('training'); stop.wait({SUSPENDED + 3})\n{FINISH}", WAIT) as run:
        for event in ("training", "worker1", "worker2"):
            run.wait_for_note(event)
        suspended = survivors(run.mark)
        for pid in suspended:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(SUSPENDED)
        for pid in suspended:
            os.kill(pid, signal.SIGCONT)
        assert run.wait() == 0, run.stderr
        assert run.failures == []


@of_one_kind
def test_worker_that_receives_nothing_for_a_while_is_named_with_that_reason(hosts: Hosts, tmp_path: Path) -> None:
    with run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP) as run:
        scripts = [run.wait_for_note("asleep1"), run.wait_for_note("asleep2")]
        run.wait_for_note("training")
        relay = next(
            pid for pid in survivors(run.mark) if parent(pid) == run.chief.pid and "cluster.relay ssh" in command(pid)
        )
        os.kill(relay, signal.SIGSTOP)
        assert within(4 * SILENCE_LIMIT, lambda: not all(Path(f"/proc/{pid}").exists() for pid in scripts))
        os.kill(relay, signal.SIGCONT)
        run.wait_for_note("failed", limit=10)
        run.wait(10)
        run.assert_gone()
    (failure,) = run.failures
    assert "was lost: it received nothing from the chief's machine for 4 s and ended its script" in failure


@of_one_kind
def test_worker_whose_agent_and_guard_are_stopped_does_not_outlive_the_run(hosts: Hosts, tmp_path: Path) -> None:
    with run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP) as run:
        script = run.wait_for_note("asleep1")
        run.wait_for_note("training")
        guard = parent(script)
        for pid in (parent(guard), guard):
            os.kill(pid, signal.SIGSTOP)
        run.wait_for_note("failed", limit=20)
        assert within(4 * SILENCE_LIMIT, lambda: script not in survivors(run.mark))
        for pid in (parent(guard), guard):
            os.kill(pid, signal.SIGCONT)
        run.wait(20)
        run.assert_gone()
    assert "was lost: nothing was heard" in run.failures[0]


@of_one_kind
def test_chief_that_holds_pythons_lock_is_not_taken_for_lost(hosts: Hosts, tmp_path: Path) -> None:
    chief = """
import ctypes
ctypes.PyDLL(None).usleep(7_000_000)  # keeps the lock, unlike time.sleep
note("back")
coordinator.finish()
"""
    with run_on(hosts, tmp_path, chief, WAIT) as run:
        assert run.wait(30) == 0, run.stderr
        assert run.has_note("back")


@of_one_kind
def test_output_that_the_chief_does_not_take_for_long_is_not_taken_for_silence(hosts: Hosts, tmp_path: Path) -> None:
    chief = """
reading, writing = os.pipe()
os.dup2(writing, 1)
time.sleep(7)
count = 0
def drain():
    global count
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            count += 1
threading.Thread(target=drain, daemon=True).start()
coordinator.finish()
note("finished")
while count < 40000: time.sleep(0.02)
note("all")
"""
    worker = """
for number in range(20000):
    print("x" * 300)
worker_client.wait_for_end()
"""
    with run_on(hosts, tmp_path, chief, worker) as run:
        run.wait_for_note("finished", 30)
        run.wait_for_note("all")
        assert run.wait() == 0, run.stderr


@pytest.mark.parametrize(
    "hosts, transport", [(HOST_KINDS[0], "openssh"), (HOST_KINDS[-1], "paramiko")], indirect=["hosts"]
)
def test_preflight_over_ssh_names_all_faults_at_once(hosts: Hosts, tmp_path: Path, transport: str) -> None:
    spec = hosts.spec() | {"transport": transport}
    spec["ssh"]["host1"]["key_file"] = str(hosts.directory / "host_key")  # a key, but not the user's
    hosts.trust(hosts.hosts[:1])
    with run_on(hosts, tmp_path, FINISH, WAIT, spec) as run:
        assert run.wait(30) == 1
        run.assert_gone(0)
    first, second = hosts.hosts
    # Only OpenSSH's client knows which login methods the server offers.
    methods = " (it takes publickey)" if transport == "openssh" else ""
    refused = f"{first.address} port {first.port}: it accepts none of the keys offered for user {getpass.getuser()}"
    assert f"{refused}{methods}. Set the right `username` and `key_file`, or run `ssh-copy-id " in run.stderr
    assert f"{second.address} port {second.port}: its host key is not known (ssh-ed25519 SHA256:" in run.stderr
    keyscan = f"ssh-keyscan {'' if second.port == 22 else f'-p {second.port} '}{second.address} >> "
    assert keyscan + f"{hosts.directory / 'known_hosts'}" in run.stderr
    assert "Traceback" not in run.stderr.split("Error: The run cannot start")[1]


@of_one_kind
def test_host_key_checking_can_be_turned_off(hosts: Hosts, tmp_path: Path) -> None:
    spec = hosts.spec()
    hosts.trust(())
    for group in spec["ssh"].values():
        group["host_key_checking"] = False
    with run_on(hosts, tmp_path, FINISH, WAIT, spec) as run:
        assert run.wait() == 0, run.stderr


@of_one_kind
def test_python_without_autodist_is_named(hosts: Hosts, tmp_path: Path) -> None:
    spec = hosts.spec()
    bare = tmp_path / "bare" / "bin"
    bare.mkdir(parents=True)
    (bare / "python").symlink_to("/usr/bin/python3")
    spec["ssh"]["host1"]["python_venv"] = str(tmp_path / "bare")
    spec["ssh"]["host2"]["python_venv"] = str(tmp_path / "nowhere")
    with run_on(hosts, tmp_path, FINISH, WAIT, spec) as run:
        assert run.wait() == 1
        run.assert_gone(0)
    assert "autodist is not installed for the Python there" in run.stderr
    assert "there is no Python at the expected path" in run.stderr


@of_one_kind
def test_ssh_config_of_the_user_is_read_jump_hosts_included(hosts: Hosts, tmp_path: Path) -> None:
    first, second = hosts.hosts
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "known_hosts").write_text((hosts.directory / "known_hosts").read_text())
    (home / ".ssh" / "config").write_text(
        f"Host first\n  HostName {first.address}\n  Port {first.port}\n"
        f"Host {second.address}\n  Port {second.port}\n  ProxyJump first\n"
        f"Host *\n  IdentityFile {hosts.directory / 'user_key'}\n"
    )
    environment = {"shared_envs": hosts.ssh["host2"]["shared_envs"]}
    nodes = [{"address": hosts.chief_address, "chief": True}, {"address": second.address, "ssh_config": "by_config"}]
    spec = {"nodes": nodes, "ssh": {"by_config": environment}}
    run = run_on(hosts, tmp_path, FINISH, 'print("came through", os.environ["SSH_CONNECTION"])\n' + WAIT, spec)
    run.environment["HOME"] = str(home)
    with run:
        assert run.wait() == 0, run.stderr
        run.assert_gone(0)
    assert f"[{second.address}] came through {first.address if first.port == 22 else '127.0.0.'}" in run.stdout
