"""Machines reached by the `ssh` program, over real SSH servers: `transport: openssh`."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autodist.cluster.file_sync import sync_folder
from autodist.cluster.folder import find_files
from autodist.cluster.sftp_folder import SyncResult
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.ssh_transports import reach
from autodist.errors import ClusterError
from tests.cluster.hosts import HOST_KINDS, Host, Hosts, LoopbackHosts
from tests.cluster.runs import MARK, Run, all_gone, command, parent, survivors, within

pytestmark = [
    pytest.mark.processes,
    pytest.mark.ssh,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed"),
]

FINISH = "coordinator.finish()"
WAIT = "worker_client.wait_for_end()"
SLEEP = 'note(f"asleep{index}"); time.sleep(60)'
TRAIN_UNTIL_STOPPED = 'note("training")\nstop.wait(40)\ncoordinator.abort("stopped")'


@contextmanager
def made_hosts(directory: Path, count: int, *options: str, kind: type[Hosts] = HOST_KINDS[0]) -> Iterator[Hosts]:
    (directory / "hosts").mkdir()
    environment = {MARK: secrets.token_hex(8), "GREETING": "a 'quoted' $HOME"}
    with kind(directory / "hosts", count, environment, ["LogLevel DEBUG1", *options]) as hosts:
        yield hosts


def run_on(hosts: Hosts, directory: Path, chief: str, worker: str, workers: int = 1, **more: Any) -> Run:
    spec = hosts.spec() | {"transport": "openssh", "silence_timeout": 5.0} | more
    for node in spec["nodes"][1:]:
        node |= {"cpus": list(range(workers)), "workers": workers}
    return Run(directory / "run", chief, worker, spec, hosts.chief_command, hosts.ssh["host1"]["shared_envs"][MARK])


def log_of(hosts: Hosts) -> str:
    return (hosts.directory / "host1.log").read_text()


def programs_of(run: Run) -> list[int]:
    return [pid for pid in survivors(run.mark) if command(pid).startswith("ssh") and "-N" in command(pid)]


@pytest.mark.parametrize(("option", "workers", "logins"), [("MaxStartups 1", 3, 1), ("MaxSessions 2", 3, 2)])
def test_a_run_of_several_workers_a_machine(tmp_path: Path, option: str, workers: int, logins: int) -> None:
    worker = 'print(worker_client.payload, sys.argv[1:], os.environ["GREETING"])\nprint("x", file=sys.stderr)\n' + WAIT
    with made_hosts(tmp_path, 1, option) as hosts, run_on(hosts, tmp_path, FINISH, worker, workers) as run:
        assert run.wait(60) == 0, run.stderr
        run.assert_gone(0)
        assert log_of(hosts).count("Accepted publickey") == logins
    said = f"{b'payload ' + bytes([255])!r} {['argument with spaces', '$HOME', chr(39)]} a 'quoted' $HOME\n"
    for number in range(workers):
        assert f"[{hosts.hosts[0].address}:{number}] {said}" in run.stdout
        assert f"[{hosts.hosts[0].address}:{number}] x\n" in run.stderr


@pytest.mark.parametrize("victim", ["worker", "agent", "relay", "ssh", "chief"])
def test_a_killed_process_ends_the_run_on_both_sides(tmp_path: Path, victim: str) -> None:
    with made_hosts(tmp_path, 1) as hosts, run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP, 2) as run:
        worker = run.wait_for_note("asleep1")
        for note in ("asleep2", "training"):
            run.wait_for_note(note)
        (relay,) = (
            pid for pid in survivors(run.mark) if parent(pid) == run.chief.pid and "cluster.relay ssh" in command(pid)
        )
        (program,) = programs_of(run)
        folder = Path(command(program).split(" -S ")[1].split()[0]).parent
        assert folder.is_dir()
        agent = parent(parent(worker))
        victims = {"worker": worker, "agent": agent, "relay": relay, "ssh": program, "chief": run.chief.pid}
        os.kill(victims[victim], signal.SIGKILL)
        began = time.monotonic()
        run.wait(10)
        run.assert_gone(10 - (time.monotonic() - began))
        assert not folder.exists()
    if victim != "chief":
        said = {"agent": "its agent ended without any output", "ssh": "the SSH connection to .* broke"}.get(victim, "")
        assert re.search(rf"^{hosts.hosts[0].address}:\d \| .*{said}", run.failures[0])


def test_a_cut_link_is_named_and_stops_the_run_on_both_sides(tmp_path: Path) -> None:
    with made_hosts(tmp_path, 2) as hosts, run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP) as run:
        for note in ("asleep1", "asleep2"):
            run.wait_for_note(note)
        hosts.cut(hosts.hosts[1])
        began = time.monotonic()
        run.wait_for_note("failed", limit=10)
        run.wait(10)
        run.assert_gone(14 - (time.monotonic() - began))
        hosts.mend(hosts.hosts[1])
    address = hosts.hosts[1].address
    assert run.failures[0].startswith(f"{address} | was lost: nothing was heard from {address} for 5 s")


def test_all_faults_are_told_at_once_and_as_by_the_other_way(tmp_path: Path) -> None:
    said = {}
    for transport in ("paramiko", "openssh"):
        folder = tmp_path / transport
        folder.mkdir()
        with made_hosts(folder, 2) as hosts:
            groups = hosts.ssh
            groups["host1"]["key_file"] = str(hosts.directory / "host_key")  # a key, but not the user's
            hosts.trust(hosts.hosts[:1])
            with run_on(hosts, folder, FINISH, WAIT, transport=transport, ssh=groups) as run:
                assert run.wait(30) == 1
                run.assert_gone(0)
            kinds = {str(hosts.directory): "FOLDER", **{f"{host.port}": "PORT" for host in hosts.hosts}}
            key = next(word for word in run.stderr.split() if word.startswith("SHA256:"))
            text = run.stderr.split("The run cannot start:\n")[1].replace(key, "SHA256)")
            for word, kind in kinds.items():
                text = text.replace(word, kind)
            said[transport] = text
    assert "it accepts none of the keys offered for user" in said["paramiko"]
    assert "its host key is not known (ssh-ed25519 SHA256" in said["paramiko"]
    assert said["openssh"].replace(" (it takes publickey)", "") == said["paramiko"]


def test_it_is_tried_again_while_the_server_admits_no_more_logins(tmp_path: Path) -> None:
    with made_hosts(tmp_path, 1, "MaxStartups 1", kind=LoopbackHosts) as hosts:
        stranger = socket.create_connection((hosts.hosts[0].address, hosts.hosts[0].port))
        assert stranger.recv(4) == b"SSH-"
        with stranger, run_on(hosts, tmp_path, FINISH, WAIT, 2) as run:
            assert within(20, lambda: log_of(hosts).count("drop connection") > 1), log_of(hosts)
            stranger.close()
            assert run.wait(60) == 0, run.stderr
            run.assert_gone(0)


def test_check_reaches_the_machines_so(tmp_path: Path) -> None:
    with made_hosts(tmp_path, 1) as hosts:
        spec = hosts.spec() | {"transport": "openssh"}
        (tmp_path / "cluster.yml").write_text(json.dumps(spec))
        done = subprocess.run(
            hosts.chief_command([sys.executable, "-m", "autodist", "check", "--json", "cluster.yml"]),
            cwd=tmp_path, env=os.environ | {MARK: spec["ssh"]["host1"]["shared_envs"][MARK]}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert all_gone(spec["ssh"]["host1"]["shared_envs"][MARK])
    machines = json.loads(done.stdout)["machines"]
    assert [machine["is_reached"] for machine in machines] == [True, True]
    assert [machine["faults"] for machine in machines] == [[], []]
    assert "transport" not in done.stderr


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHosts]:
    options = ["Subsystem sftp internal-sftp", "LogLevel DEBUG1"]
    with LoopbackHosts(tmp_path_factory.mktemp("hosts"), options=options) as made:
        yield made


@pytest.fixture
def home(hosts: LoopbackHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """~/.ssh with a key that the hosts take and their host keys."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folder = tmp_path / ".ssh"
    folder.mkdir()
    for name in ("user_key", "user_key.pub"):
        shutil.copy(hosts.directory / name, folder / name.replace("user_key", "id_ed25519"))
    shutil.copy(hosts.directory / "known_hosts", folder)
    return folder


def openssh(host: str, **more: Any) -> SSHSettings:
    return SSHSettings(host, transport="openssh", connect_timeout=5, **more)


def answer(settings: SSHSettings) -> bytes:
    """Returns the output of a command on the host, in a login of its own."""
    with reach(settings, 10, lambda seconds: True) as machine:
        return machine.run(["echo", "$HOME 'there'"], 10)


def place(host: Host) -> str:
    return f"HostName {host.address}\n  Port {host.port}\n"


def test_the_configuration_counts_jump_hosts_and_proxy_commands_too(hosts: LoopbackHosts, home: Path) -> None:
    first, second = hosts.hosts
    (home / "more").write_text(f"Host lab\n  {place(first)}  RemoteCommand false\n  RequestTTY force\n")
    (home / "config").write_text(f"Include {home}/more\nHost far\n  {place(second)}  ProxyJump lab\n")
    assert answer(openssh("lab")) == b"$HOME 'there'\n"
    assert answer(openssh("far")) == b"$HOME 'there'\n"
    assert f"target {second.address} port {second.port}" in log_of(hosts)
    (home / "config").write_text(
        f"Host far\n  {place(second)}  ProxyJump lab\nHost lab\n  {place(first)}  User nobody1\n"
    )
    with pytest.raises(ClusterError, match=r"^lab \(127.0.0.2 port \d+\): it accepts none of .* for user nobody1 "):
        answer(openssh("far"))
    nobody = f"HostName {second.address}\n  Port 1\n"
    (home / "config").write_text(f"Host far\n  {nobody}  ProxyJump lab\nHost lab\n  {place(first)}")
    with pytest.raises(ClusterError, match=r"^far .*the jump host could not connect to it .*refused"):
        answer(openssh("far"))
    (home / "config").write_text("Host lab\n  ProxyCommand sh -c 'echo broken >&2; exit 3'\n")
    with pytest.raises(ClusterError, match="^lab .*the ProxyCommand .* failed: broken. Try `ssh "):
        answer(openssh("lab"))


def test_a_jump_host_that_is_a_node_is_reached_as_its_group_says(hosts: LoopbackHosts, home: Path) -> None:
    first, second = hosts.hosts
    known = home / "known first %"
    shutil.move(home / "known_hosts", known)
    (home / "known_hosts").write_text("".join(known.read_text().splitlines(keepends=True)[1:]))
    (home / "config").write_text(
        f"Host target\n  {place(second)}  ProxyJump first\nHost first\n  HostName {first.address}"
    )
    jump = SSHSettings(first.address, port=first.port, known_hosts=str(known))
    assert answer(openssh("target").through([jump])) == b"$HOME 'there'\n"


def test_a_connection_that_is_open_already_is_used_and_stays(hosts: LoopbackHosts, home: Path) -> None:
    (home / "config").write_text(f"Host lab\n  {place(hosts.hosts[0])}  ControlPath ~/c-%n\n")
    path = Path.home() / "c-lab"
    by_hand = ["ssh", "-F", str(home / "config"), "-S", str(path), "-o", f"UserKnownHostsFile={home}/known_hosts"]
    subprocess.run([*by_hand, "-i", home / "id_ed25519", "-fNM", "lab"], check=True, capture_output=True)
    (home / "id_ed25519").unlink()  # there is no other way in
    try:
        (home / "config").write_text((home / "config").read_text().replace("~/c-%n", f"{Path.home()}/c-%n"))
        assert answer(openssh("lab")) == b"$HOME 'there'\n"
    finally:
        asked = subprocess.run([*by_hand, "-O", "exit", "lab"], check=False, capture_output=True)
    assert asked.returncode == 0, "it is still there"
    with pytest.raises(ClusterError, match="there is no private key to log in with as user"):
        answer(openssh("lab"))


def test_a_locked_key_is_told_unless_an_agent_holds_it(
    hosts: LoopbackHosts, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, key = hosts.hosts[0], home / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", key], check=True, capture_output=True)
    settings = openssh(first.address, port=first.port, key_file=str(key))
    with pytest.raises(ClusterError, match=r"id_ed25519 is locked by a passphrase; unlock it: `ssh-add"):
        answer(settings)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", home / "agent"], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "agent"))
        subprocess.run(["ssh-add", "-q", hosts.directory / "user_key"], check=True, capture_output=True)
        assert answer(settings) == b"$HOME 'there'\n"
    finally:
        agent.terminate()
        agent.communicate()


def test_what_keeps_a_machine_from_being_reached_is_told(hosts: LoopbackHosts, home: Path) -> None:
    first = hosts.hosts[0]
    silent = socket.create_server(("127.0.0.1", 0))
    cases: list[tuple[SSHSettings, str]] = [
        (openssh(first.address, port=1), f"^{first.address} port 1: connection refused. Start an SSH server"),
        (openssh("nowhere.invalid"), "^nowhere.invalid port 22: the name cannot be resolved"),
        (openssh(first.address, port=first.port, key_file="/no/key"), "the key file /no/key cannot be read"),
        (openssh(first.address, port=first.port, username="no-one"), "none of the keys .* user no-one .it takes publi"),
        (openssh("127.0.0.1", port=silent.getsockname()[1]), "no SSH session was established: .*`connect_timeout`"),
    ]
    with silent:
        for settings, said in cases:
            with pytest.raises(ClusterError, match=said):
                answer(settings)
    known = (home / "known_hosts").read_text()
    (home / "known_hosts").write_text(known.replace(known.split()[2], known.split()[2][:-4] + "AAAA"))
    with pytest.raises(ClusterError, match=r"its host key has changed \(ssh-ed25519 SHA256:.*`ssh-keygen -R "):
        answer(openssh(first.address, port=first.port))
    assert answer(openssh(first.address, port=first.port, host_key_checking=False))
    (home / "known_hosts").write_text(f"{known}@revoked * {' '.join(known.split()[1:3])}\n")
    with pytest.raises(ClusterError, match="its host key is marked as revoked"):
        answer(openssh(first.address, port=first.port))


def test_a_folder_is_brought_so(hosts: LoopbackHosts, home: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "far" / "there"
    here.mkdir()
    (here / "large.bin").write_bytes(secrets.token_bytes(3 << 20))
    (here / "small.py").write_text("small")
    settings = openssh(hosts.hosts[0].address, port=hosts.hosts[0].port)

    def brought(target: Path, is_stopped: Callable[[], bool] = lambda: False) -> SyncResult:
        return sync_folder(settings, find_files(str(here), ()), (str(here), str(target)), 10, is_stopped)

    assert brought(there) == SyncResult(files=2, bytes=5 + (3 << 20))
    assert (there / "large.bin").read_bytes() == (here / "large.bin").read_bytes()
    assert brought(there) == SyncResult(unchanged=2)
    with pytest.raises(ClusterError, match=r"/proc/nowhere"):
        brought(Path("/proc/nowhere"))


def test_a_server_without_sftp_is_told_with_the_mend(tmp_path: Path) -> None:
    with made_hosts(tmp_path, 1, kind=LoopbackHosts) as bare:
        group = bare.ssh["host1"]
        more = {name: group[name] for name in ("port", "key_file", "known_hosts")}
        with pytest.raises(ClusterError, match="offers no SFTP, .* `Subsystem sftp internal-sftp`"):
            sync_folder(openssh(bare.hosts[0].address, **more), {}, (str(tmp_path), str(tmp_path)), 10, lambda: False)
