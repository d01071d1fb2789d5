"""Test hosts on this machine, each with an SSH server of its own.

For root, a host is a network namespace with its own address, and its links can be cut. For other users, it is one of
127.0.0.2, 127.0.0.3, … with its own port. Keys, known_hosts and configuration are made for the test; the servers do not
read or change the user's own SSH setup.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import Namespaces
from tests.ports import free_port

_SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin") or "/usr/sbin/sshd"
_START_LIMIT = 10.0


@dataclass(frozen=True)
class Host:
    """One host with an SSH server.

    Attributes:
        number: number of the host, from 1; the chief's machine is 0 and needs no SSH.
        address: address under which the others reach it.
        port: port of its SSH server.
        group: the name of its SSH group in the YAML.
    """

    number: int
    address: str
    port: int
    group: str


class Hosts(ABC):
    """A chief's machine and `count` hosts with SSH servers, from `__enter__` to `__exit__`.

    Args:
        directory: empty, for keys, configuration and logs.
        count: number of hosts in addition to the chief's machine.
        environment: variables of workers on the hosts (`shared_envs`).
        options: options of the SSH servers, as lines of sshd_config.

    Attributes:
        chief_address: address of the chief's machine.
        hosts: the other hosts.
    """

    chief_address: str
    hosts: tuple[Host, ...]

    def __init__(
        self, directory: Path, count: int = 2, environment: dict[str, str] | None = None, options: Sequence[str] = ()
    ) -> None:
        self.directory, self._count, self._environment, self._options = directory, count, environment or {}, options
        self._servers: dict[Host, subprocess.Popen[bytes]] = {}
        self._undo = contextlib.ExitStack()

    @abstractmethod
    def chief_command(self, command: list[str]) -> list[str]:
        """Returns the command that runs `command` on the chief's machine; the process keeps its id."""

    @abstractmethod
    def cut(self, host: Host) -> None:
        """Drops all packets between `host` and the other machines from now on, without notice."""

    @abstractmethod
    def mend(self, host: Host) -> None:
        """Undoes `cut`."""

    def server_of(self, host: Host) -> int:
        """Returns the process id of the SSH server of a host."""
        return self._servers[host].pid

    def stop(self, host: Host) -> None:
        """Kills the SSH server of a host, with the connections that it serves."""
        _end(self._servers[host])

    def start(self, host: Host) -> None:
        """Starts the SSH server of a host again, after `stop`."""
        self._start_server(host)

    @abstractmethod
    def _make_hosts(self) -> tuple[Host, ...]: ...

    @abstractmethod
    def _in_host(self, host: Host, command: list[str]) -> list[str]: ...

    def command_on(self, number: int, command: list[str]) -> list[str]:
        """Returns the command that runs `command` on a host, or for 0 on the chief's machine."""
        return self.chief_command(command) if number == 0 else self._in_host(self.hosts[number - 1], command)

    @property
    def ssh(self) -> dict[str, dict[str, Any]]:
        """Returns the `ssh` part of the YAML: a group for each host."""
        return {
            host.group: {
                "username": getpass.getuser(),
                "key_file": str(self.directory / "user_key"),
                "known_hosts": str(self.directory / "known_hosts"),
                "port": host.port,
                "shared_envs": self._environment,
            }
            for host in self.hosts
        }

    def nodes(self, **settings: Any) -> list[dict[str, Any]]:
        """Returns the `nodes` part of the YAML: the chief's machine and all hosts.

        Args:
            settings: settings for every node (`cpus`, `workers`, …).
        """
        chief = {"address": self.chief_address, "chief": True, **settings}
        return [chief, *({"address": host.address, "ssh_config": host.group, **settings} for host in self.hosts)]

    def spec(self, **settings: Any) -> dict[str, Any]:
        """Returns the content of the YAML for the whole cluster."""
        return {"nodes": self.nodes(**settings), "ssh": self.ssh}

    def __enter__(self) -> Hosts:
        try:
            self._make_key("user_key")
            self._make_key("host_key")
            if os.geteuid() == 0:
                Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own empty folder, made when its service starts
            self.hosts = self._make_hosts()
            self.trust(self.hosts)
            for host in self.hosts:
                self._start_server(host)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        self._undo.close()

    def trust(self, hosts: tuple[Host, ...]) -> None:
        """Writes known_hosts so that it holds the keys of exactly these hosts."""
        kind, key, *_ = (self.directory / "host_key.pub").read_text().split()
        lines = [f"{_key_name(host)} {kind} {key}\n" for host in hosts]
        (self.directory / "known_hosts").write_text("".join(lines))

    def _make_key(self, name: str) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.directory / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def _start_server(self, host: Host) -> None:
        config = self.directory / f"{host.group}.conf"
        config.write_text(
            f"ListenAddress {host.address}\nPort {host.port}\nHostKey {self.directory / 'host_key'}\n"
            f"AuthorizedKeysFile {self.directory / 'user_key.pub'}\nPidFile none\nUsePAM no\nStrictModes no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nUseDNS no\n"
            "AllowTcpForwarding yes\n" + "".join(f"{option}\n" for option in self._options)
        )
        log = self.directory / f"{host.group}.log"
        command = self._in_host(host, [_SSHD, "-D", "-f", str(config), "-E", str(log)])
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._servers[host] = server
        self._undo.callback(_end, server)
        deadline = time.monotonic() + _START_LIMIT
        while "Server listening" not in (log.read_text() if log.exists() else ""):
            assert server.poll() is None, f"sshd ended: {log}"
            assert time.monotonic() < deadline, f"sshd does not listen: {log}"
            time.sleep(0.02)


class NamespaceHosts(Hosts):
    """Hosts that are network namespaces. Needs root."""

    chief_address = "10.200.0.1"

    def chief_command(self, command: list[str]) -> list[str]:
        return self._namespaces.command_on(0, command)

    def command_on_switch(self, command: list[str]) -> list[str]:
        """Returns the command that runs `command` where all packets between the machines pass."""
        return self._namespaces.command_on_switch(command)

    def cut(self, host: Host) -> None:
        self._namespaces.set_link(host.number, "down")

    def mend(self, host: Host) -> None:
        self._namespaces.set_link(host.number, "up")

    def _make_hosts(self) -> tuple[Host, ...]:
        self._namespaces = self._undo.enter_context(Namespaces(self._count + 1))
        return tuple(
            Host(number, self._namespaces.address(number), 22, f"host{number}") for number in range(1, self._count + 1)
        )

    def _in_host(self, host: Host, command: list[str]) -> list[str]:
        return self._namespaces.command_on(host.number, command)


class LoopbackHosts(Hosts):
    """Hosts that are addresses of the loopback interface. `cut` freezes the processes that serve their connections."""

    chief_address = "127.0.0.1"

    def chief_command(self, command: list[str]) -> list[str]:
        return command

    def cut(self, host: Host) -> None:
        self._signal_servers(host, signal.SIGSTOP)

    def mend(self, host: Host) -> None:
        self._signal_servers(host, signal.SIGCONT)

    def _make_hosts(self) -> tuple[Host, ...]:
        addresses = [(number, f"127.0.0.{number + 1}") for number in range(1, self._count + 1)]
        return tuple(Host(number, address, free_port(address), f"host{number}") for number, address in addresses)

    def _in_host(self, host: Host, command: list[str]) -> list[str]:
        return command

    def _signal_servers(self, host: Host, number: signal.Signals) -> None:
        for pid in _children(self._servers[host].pid):
            # A process may end while it is looked at, as those below a worker do when its run ends.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, number)


HOST_KINDS = [NamespaceHosts, LoopbackHosts] if os.geteuid() == 0 else [LoopbackHosts]
"""The kinds of hosts that this user can make, the better one first."""


def _key_name(host: Host) -> str:
    return host.address if host.port == 22 else f"[{host.address}]:{host.port}"


def _children(pid: int) -> list[int]:
    """Returns all descendants of a process."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                found += [int(child), *_children(int(child))]
    return found


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ends an SSH server and the connections that it still serves."""
    for pid in [*_children(server.pid), server.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.wait()
