"""Encrypted traffic between the workers' servers, and the firewall of their ports."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autodist.cluster.firewall import FirewallError, why_not_permitted
from tests.cluster.hosts import HOST_KINDS, Hosts, LoopbackHosts, NamespaceHosts
from tests.cluster.runs import MARK, Run, command, parent, survivors, within

pytestmark = [pytest.mark.processes, pytest.mark.ssh]

PORT = 15000

START = """
from autodist.cluster.servers import start_server, wait_until_listening
import tensorflow as tf
"""

# The text is fed to the chief, passes through worker 1, and then goes to worker 2.
SEND = """
server = start_server(addresses, 0, coordinator.reserved_port)
wait_until_listening(addresses, 60, coordinator.check)
with tf.Graph().as_default(), tf.compat.v1.Session(server.target) as session:
    with tf.device("/job:worker/task:0/cpu:0"):
        fed = tf.compat.v1.placeholder(tf.string)
    for task in (1, 2):
        with tf.device(f"/job:worker/task:{task}/cpu:0"):
            fed = tf.strings.join([fed, "+"])
    print("RECEIVED", session.run(fed, {"Placeholder:0": "a-known-tensor"}))
note("sent")
while not os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "notes", "tried")):
    coordinator.check()
    time.sleep(0.02)
coordinator.finish()
"""

SERVE = """
server = start_server(worker_client.addresses, index, worker_client.reserved_port)
wait_until_listening(worker_client.addresses, 60)
worker_client.wait_for_end()
"""

TRAIN_UNTIL_STOPPED = 'note("training")\nstop.wait(40)\ncoordinator.abort("stopped")'
SLEEP = 'note(f"asleep{index}"); time.sleep(60)'

WAIT_FOR_A_SERVER = """
from autodist.cluster.servers import wait_until_listening
wait_until_listening(addresses[1:2], 40, coordinator.check)
"""

SNIFF = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print("listening", flush=True)
with open(sys.argv[1], "wb", 0) as file:
    while True:
        file.write(packets.recv(1 << 16))
"""

CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()
"""


@pytest.fixture(scope="module")
def firewall() -> None:
    """Skips tests where this machine's kernel has no firewall for them."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces and nftables")
    try:
        reason = why_not_permitted()
    except FirewallError as error:
        reason = str(error)
    if reason is not None:
        pytest.skip(reason)


needs_firewall = pytest.mark.usefixtures("firewall")


@contextlib.contextmanager
def made(kind: type[Hosts], directory: Path, count: int = 2, options: Sequence[str] = ()) -> Iterator[Hosts]:
    (directory / "hosts").mkdir()
    with kind(directory / "hosts", count, {MARK: secrets.token_hex(8)}, options) as hosts:
        yield hosts


def run_on(hosts: Hosts, directory: Path, chief: str, worker: str, **keys: Any) -> Run:
    """Returns a run on the chief's machine and the first two hosts, with keys of the YAML."""
    nodes = [{**node, "port": PORT} if isinstance(hosts, NamespaceHosts) else node for node in hosts.nodes()[:3]]
    mark = hosts.ssh["host1"]["shared_envs"][MARK]
    spec = {**hosts.spec(), "nodes": nodes, "silence_timeout": 5.0, **keys}
    return Run(directory / "run", chief, worker, spec, hosts.chief_command, mark)


@contextlib.contextmanager
def sniffing(hosts: NamespaceHosts, file: Path) -> Iterator[None]:
    """Writes all packets between the machines to a file."""
    program = hosts.command_on_switch([sys.executable, "-c", SNIFF, str(file)])
    sniffer = subprocess.Popen(program, stdout=subprocess.PIPE)
    assert sniffer.stdout is not None
    try:
        assert sniffer.stdout.readline() == b"listening\n"
        yield
    finally:
        sniffer.kill()
        sniffer.communicate()


def can_connect(hosts: Hosts, number: int, address: str) -> bool:
    """Returns True if a host can connect to the port of a server."""
    attempt = hosts.command_on(number, [sys.executable, "-c", CONNECT, address, str(PORT)])
    return subprocess.run(attempt, check=False, stderr=subprocess.DEVNULL, timeout=20).returncode == 0


def tables(hosts: Hosts) -> str:
    """Returns the tables of nftables on all machines."""
    listing = [hosts.command_on(number, ["nft", "list", "tables"]) for number in range(3)]
    return "".join(subprocess.run(one, check=True, capture_output=True, text=True).stdout for one in listing)


@needs_firewall
@pytest.mark.parametrize("keys", [{}, {"encrypt": "ssh"}], ids=["firewall", "encrypted"])
def test_a_stranger_neither_joins_nor_reads_what_is_encrypted(tmp_path: Path, keys: dict[str, str]) -> None:
    """The machines of the run connect to its servers directly, unless SSH forwards their traffic."""
    with made(NamespaceHosts, tmp_path, 3) as hosts, sniffing(hosts, tmp_path / "packets"):  # type: ignore[arg-type]
        member, stranger = 1, 3
        addresses = [hosts.chief_address, *(host.address for host in hosts.hosts[:2])]
        with run_on(hosts, tmp_path, START + SEND, START + SERVE, firewall="auto", **keys) as run:
            run.wait_for_note("sent", 90)
            assert not any(can_connect(hosts, stranger, address) for address in addresses)
            assert [can_connect(hosts, member, address) for address in addresses[::2]] == [not keys] * 2
            (run.directory / "notes" / "tried").touch()
            assert run.wait(60) == 0, run.stderr
            assert within(10, lambda: not tables(hosts))
            run.assert_gone()
    assert "RECEIVED b'a-known-tensor++'" in run.stdout
    assert (b"a-known-tensor" in (tmp_path / "packets").read_bytes()) == (not keys)
    assert "without authentication" not in run.stderr


@needs_firewall
@pytest.mark.parametrize("victim", ["chief", "guard"])
def test_the_firewall_ends_with_the_run_however_that_ends(tmp_path: Path, victim: str) -> None:
    with made(NamespaceHosts, tmp_path) as hosts:
        ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
        with run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, ignoring, firewall="auto", encrypt="ssh") as run:
            worker = run.wait_for_note("asleep1")
            run.wait_for_note("asleep2")
            assert tables(hosts).count("table inet autodist_15000_") == 3
            os.kill(run.chief.pid if victim == "chief" else parent(worker), signal.SIGKILL)
            run.assert_gone(10)
            assert tables(hosts) == ""
            run.wait()


@pytest.mark.parametrize(
    ("kind", "transport"),
    [pytest.param(HOST_KINDS[0], "paramiko", id="paramiko"), pytest.param(HOST_KINDS[-1], "openssh", id="openssh")],
)
def test_a_forward_that_breaks_is_the_failure_of_its_machine(tmp_path: Path, kind: type[Hosts], transport: str) -> None:
    with (
        made(kind, tmp_path) as hosts,
        run_on(hosts, tmp_path, TRAIN_UNTIL_STOPPED, SLEEP, encrypt="ssh", transport=transport) as run,
    ):
        run.wait_for_note("asleep1")
        run.wait_for_note("asleep2")
        address = hosts.hosts[1].address
        os.kill(forwarding_to(run, address), signal.SIGKILL)
        run.wait_for_note("failed", limit=10)
        run.wait(10)
        run.assert_gone(4)
    assert len(run.failures) == 1
    lost = f"{address} | was lost: the SSH connection that carries its traffic broke"
    assert run.failures[0].startswith(lost)


def forwarding_to(run: Run, address: str) -> int:
    """Returns the process of the `ssh` program that forwards ports to a host."""
    relays = [pid for pid in survivors(run.mark) if "autodist.cluster.relay forwards" in command(pid)]
    programs = [pid for pid in survivors(run.mark) if parent(pid) in relays and command(pid).startswith("ssh ")]
    (found,) = (pid for pid in programs if command(pid).rstrip().endswith(f"-- {address}"))
    return found


NO_FORWARDS = "its SSH server forwards no ports"
REFUSED = {
    "DisableForwarding yes": ("The run cannot start", NO_FORWARDS, "set `AllowTcpForwarding yes` in its sshd_config"),
    "PermitOpen none": ("was lost", NO_FORWARDS, "set `AllowTcpForwarding yes` in its sshd_config"),
    "GatewayPorts yes": ("was lost", "opens forwarded ports to other machines", "set `GatewayPorts no`"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_ssh_server_that_forwards_in_another_way_is_named(tmp_path: Path, option: str) -> None:
    with (
        made(LoopbackHosts, tmp_path, options=[option]) as hosts,
        run_on(hosts, tmp_path, WAIT_FOR_A_SERVER, SLEEP, encrypt="ssh") as run,
    ):
        assert run.wait(60) != 0
        run.assert_gone(10)
    told = run.stderr + run.stdout
    assert [words for words in REFUSED[option] if words not in told] == []
