"""How one machine is reached over SSH, and what is run there; light, since the relay reads it back from text."""

from __future__ import annotations

import posixpath
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autodist.cluster.ssh_config import SSHOptions, read_options
from autodist.cluster.ssh_errors import Endpoint
from autodist.errors import ClusterError

if TYPE_CHECKING:
    from autodist.resources import SSHGroup


@dataclass(frozen=True)
class SSHSettings:
    """One machine's way in. What is None comes from `~/.ssh/config`, or is what the `ssh` command would take.

    Attributes:
        host: name or address.
        username: to log in as.
        port: of the SSH server.
        key_file: private key, on the chief's machine.
        known_hosts: file of known host keys, on the chief's machine.
        host_key_checking: whether a host whose key is not known is refused.
        python_venv: virtual environment there; without it the interpreter has the same path as the chief's.
        environment: variables of what is run there; they may be secret.
        others: settings of other machines by their addresses, for those that are gone through to reach this one.
        connect_timeout: seconds for each step of connecting: reaching the port, the server's greeting, logging in.
        patience: seconds for which a machine that does not answer, since it boots, say, is tried again.
        transport: what speaks SSH: "paramiko" or "openssh", the `ssh` program.
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
    patience: float = 0.0
    transport: str = "paramiko"

    @staticmethod
    def of_group(
        host: str, group: SSHGroup, connect_timeout: float, patience: float = 0.0, transport: str = "paramiko"
    ) -> SSHSettings:
        """The settings that the YAML gives for one host, of a cluster with that transport."""
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
            patience=patience,
            transport=group.transport or transport,
        )

    def through(self, others: Iterable[SSHSettings]) -> SSHSettings:
        """These settings, with the ways in of other machines; what is run there, and with what, stays out."""
        bare = (replace(other, python_venv=None, environment={}, others={}) for other in others)
        return replace(self, others={other.host: other.as_json() for other in bare if other.host != self.host})

    def command(self, module: str, *arguments: str) -> list[str]:
        """Arguments that start `python -P -m module arguments` there, each still unquoted.

        What they start reads `preamble` from its standard input first: everybody there can see arguments.
        """
        python = ["env", self.interpreter, "-P", "-m", module, *arguments]
        if not self.environment:
            return python
        # `dd` takes these bytes and no more; the module gets the rest. Any shell and system has all of it.
        script = f'eval "$(dd bs=1 count={len(self.preamble)} 2>/dev/null)"; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *python]

    @property
    def preamble(self) -> bytes:
        """What sets the environment there."""
        if not self.environment:
            return b""
        return ("export " + " ".join(f"{name}={shlex.quote(it)}" for name, it in self.environment.items())).encode()

    @property
    def interpreter(self) -> str:
        """Path of Python there; a leading `~` is the home directory there."""
        return sys.executable if self.python_venv is None else posixpath.join(self.python_venv, "bin", "python")

    def as_json(self) -> dict[str, Any]:
        """What `SSHSettings(**...)` takes back."""
        return asdict(self)


def known_hosts_of(settings: SSHSettings, options: SSHOptions) -> tuple[str, ...]:
    """The files of host keys that count."""
    return (settings.known_hosts,) if settings.known_hosts else options.known_hosts + options.system_known_hosts


def endpoint_of(settings: SSHSettings, options: SSHOptions) -> Endpoint:
    """Where a connection goes, for messages."""
    return Endpoint(
        name=settings.host,
        host=options.hostname,
        port=options.port,
        username=options.user,
        known_hosts=next(iter(known_hosts_of(settings, options)), "/dev/null"),
        alias=options.host_key_alias,
    )


def require_progress(endpoint: Endpoint, behind: Sequence[Endpoint]) -> None:
    """Passes unless the way to a machine leads through itself."""
    if any((e.host, e.port, e.username) == (endpoint.host, endpoint.port, endpoint.username) for e in behind):
        way = " through ".join(e.name for e in (*reversed(behind), endpoint))
        raise ClusterError(
            f"{behind[-1]}: the way to it leads through itself ({way}); correct `ProxyJump` in ~/.ssh/config."
        )


def jump_settings(jump: str, others: Mapping[str, Mapping[str, Any]]) -> SSHSettings:
    """Of `[user@]host[:port]`, as ProxyJump has it; of a machine in the YAML, those of its SSH group.

    Args:
        jump: the host.
        others: settings of machines in the YAML, by their addresses.
    """
    user, _, place = jump.strip().removeprefix("ssh://").rstrip("/").rpartition("@")
    found = re.fullmatch(r"\[(?P<v6>[^]]+)\](?::(?P<p6>\d+))?|(?P<name>[^:]+)(?::(?P<port>\d+))?|(?P<bare>.*)", place)
    assert found is not None, "the last alternative takes all"
    host = found["v6"] or found["name"] or found["bare"]
    port = found["p6"] or found["port"]
    known = others.get(host) or others.get(read_options(host, user or None, None).hostname) or {}
    settings = SSHSettings(**{**known, "host": host, "others": others})
    return replace(settings, username=user or settings.username, port=int(port) if port else settings.port)
