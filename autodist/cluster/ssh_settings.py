"""The SSH settings of one machine, the commands to run there, and the orders of the relays that use them."""

from __future__ import annotations

import posixpath
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autodist.cluster.protocol import Message
from autodist.cluster.stream_relay import RelayOrder

if TYPE_CHECKING:
    from autodist.resources import SSHGroup


@dataclass(frozen=True)
class SSHSettings:
    """SSH settings of one machine. Fields that are None default to `~/.ssh/config` and the defaults of `ssh`.

    Attributes:
        host: name or address.
        username: user name for the login.
        port: port of the SSH server.
        key_file: private key, on the chief's machine.
        known_hosts: known_hosts file, on the chief's machine.
        host_key_checking: True if a host with an unknown key is refused.
        python_venv: virtual environment on the machine; by default the interpreter has the same path as the chief's.
        environment: environment variables of the commands; they may be secret.
        others: settings of other machines by their addresses, for jump hosts.
        connect_timeout: seconds for each step of connecting: reaching the port, the server's banner, logging in.
        retry_limit: seconds during which a machine that does not answer (it may be booting) is retried.
        transport: implementation of SSH: "paramiko" or "openssh", the `ssh` program.
    """

    host: str
    username: str | None = None
    port: int | None = None
    key_file: str | None = None
    known_hosts: str | None = None
    host_key_checking: bool = True
    python_venv: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    connect_timeout: float = 15.0
    retry_limit: float = 0.0
    transport: str = "paramiko"

    @staticmethod
    def from_group(
        host: str, group: SSHGroup, connect_timeout: float, retry_limit: float = 0.0, transport: str = "paramiko"
    ) -> SSHSettings:
        """Returns the settings of one host from its SSH group in the YAML; `transport` is the cluster's default."""
        return SSHSettings(
            host=host,
            username=group.username,
            port=group.port if "port" in group.model_fields_set else None,
            key_file=None if group.key_path is None else str(group.key_path),
            known_hosts=None if group.known_hosts_path is None else str(group.known_hosts_path),
            host_key_checking=group.host_key_checking,
            python_venv=group.python_venv,
            environment=group.shared_envs,
            connect_timeout=connect_timeout,
            retry_limit=retry_limit,
            transport=group.transport or transport,
        )

    def through(self, others: Iterable[SSHSettings]) -> SSHSettings:
        """Returns these settings with those of possible jump hosts, without their environments."""
        bare = (replace(other, python_venv=None, environment={}, others={}) for other in others)
        return replace(self, others={other.host: other.to_json() for other in bare if other.host != self.host})

    def command(self, module: str, *arguments: str) -> list[str]:
        """Returns the unquoted arguments of the command `python -P -m module arguments`.

        The command first reads `preamble` from its standard input: every user of the machine can see arguments.
        """
        python = ["env", self.interpreter, "-P", "-m", module, *arguments]
        if not self.environment:
            return python
        # `dd` reads exactly these bytes and leaves the rest to the module; it is available on every system.
        script = f'eval "$(dd bs=1 count={len(self.preamble)} 2>/dev/null)"; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *python]

    @property
    def preamble(self) -> bytes:
        """Shell code that sets the environment."""
        if not self.environment:
            return b""
        return ("export " + " ".join(f"{name}={shlex.quote(it)}" for name, it in self.environment.items())).encode()

    @property
    def interpreter(self) -> str:
        """Path of Python on the machine; a leading `~` is the home directory there."""
        return sys.executable if self.python_venv is None else posixpath.join(self.python_venv, "bin", "python")

    def to_json(self) -> dict[str, Any]:
        """Returns the keyword arguments of `SSHSettings`."""
        return asdict(self)


@dataclass(frozen=True)
class SSHOrder(RelayOrder):
    """The order of a relay that starts commands over SSH.

    Attributes:
        settings: SSH settings of the machine.
        module: module to run there, and its arguments.
        silence_timeout: seconds without a message after which the machine counts as lost.
        reach_timeout: seconds until its first message.
    """

    settings: SSHSettings
    module: tuple[str, ...]
    silence_timeout: float
    reach_timeout: float


@dataclass(frozen=True)
class ForwardOrder(RelayOrder):
    """The order of a relay that forwards the ports between the chief's machine and another one.

    Attributes:
        settings: SSH settings of the other machine.
        silence_timeout: seconds without a response after which the connection counts as lost.
        to_machine: pairs of a port on the chief's machine and the port of a server there, to which it leads.
        from_machine: ports on the chief's machine. For each, the other machine gets a port that leads to it.
    """

    settings: SSHSettings
    silence_timeout: float
    to_machine: tuple[tuple[int, int], ...]
    from_machine: tuple[int, ...]


@dataclass(frozen=True)
class Forwarded(Message):
    """Relay to coordinator: the ports are forwarded.

    Attributes:
        ports: for each of `from_machine`, the port on the other machine.
    """

    ports: tuple[int, ...]
