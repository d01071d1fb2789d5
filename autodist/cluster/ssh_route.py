"""The route of an SSH connection, the machine and its jump hosts, from the settings and the user's configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autodist.cluster.ssh_config import SSHOptions, read_options
from autodist.cluster.ssh_errors import Endpoint
from autodist.cluster.ssh_keys import UnusableKeyError
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError


@dataclass(frozen=True)
class Hop:
    """A jump host or the target machine.

    Attributes:
        settings: SSH settings of the machine.
        options: its options in the user's configuration.
    """

    settings: SSHSettings
    options: SSHOptions

    @property
    def known_hosts(self) -> tuple[str, ...]:
        """The known_hosts files to use."""
        settings, options = self.settings, self.options
        return (settings.known_hosts,) if settings.known_hosts else options.known_hosts + options.system_known_hosts

    @property
    def key_files(self) -> tuple[str, ...]:
        """The files of private keys to offer; those of the configuration may not exist."""
        return (self.settings.key_file,) if self.settings.key_file else self.options.identity_files

    @property
    def endpoint(self) -> Endpoint:
        """The destination of the connection."""
        return Endpoint(
            name=self.settings.host,
            host=self.options.hostname,
            port=self.options.port,
            username=self.options.user,
            known_hosts=next(iter(self.known_hosts), "/dev/null"),
            alias=self.options.host_key_alias,
        )


def find_route(settings: SSHSettings, read_key_file: Callable[[str], object]) -> list[Hop]:
    """Returns the machine, followed by its jump hosts, the nearest to it first.

    Args:
        settings: SSH settings of the machine.
        read_key_file: reads a `key_file` in the YAML; raises `UnusableKeyError`.

    Raises:
        ClusterError: the configuration cannot be used, the jump hosts form a cycle, or a key file cannot be used. A
            locked key can, since an agent may hold it.
    """
    route: list[Hop] = []
    jumps: Sequence[str] = ()
    while True:
        hop = Hop(settings, read_options(settings.host, settings.username, settings.port, jumps))
        _require_progress(hop.endpoint, [other.endpoint for other in reversed(route)])
        try:
            if settings.key_file is not None:
                read_key_file(settings.key_file)
        except UnusableKeyError as error:
            if not error.is_locked:
                raise ClusterError(f"{hop.endpoint}: the key file {error}. Correct `key_file`.") from error
        route.append(hop)
        if not hop.options.proxy_jump:
            return route
        *jumps, last = hop.options.proxy_jump
        settings = replace(_jump_settings(last, settings.others), connect_timeout=settings.connect_timeout)


def _require_progress(endpoint: Endpoint, behind: Sequence[Endpoint]) -> None:
    """Checks that a machine is not its own jump host.

    Args:
        endpoint: the machine.
        behind: the machines for which it is a jump host, the nearest first.

    Raises:
        ClusterError: the jump hosts form a cycle.
    """
    if any((e.host, e.port, e.username) == (endpoint.host, endpoint.port, endpoint.username) for e in behind):
        hops = " through ".join(e.name for e in (*reversed(behind), endpoint))
        raise ClusterError(
            f"{behind[-1]}: its connection leads through itself ({hops}); correct `ProxyJump` in ~/.ssh/config."
        )


def _jump_settings(jump: str, others: Mapping[str, Mapping[str, Any]]) -> SSHSettings:
    """Returns the settings of a jump host; those of its SSH group if it is a machine in the YAML.

    Args:
        jump: `[user@]host[:port]`, as in ProxyJump.
        others: settings of machines in the YAML, by their addresses.
    """
    user, _, place = jump.strip().removeprefix("ssh://").rstrip("/").rpartition("@")
    match = re.fullmatch(r"\[(?P<v6>[^]]+)\](?::(?P<p6>\d+))?|(?P<name>[^:]+)(?::(?P<port>\d+))?|(?P<bare>.*)", place)
    assert match is not None, "the last alternative matches any text"
    host = match["v6"] or match["name"] or match["bare"]
    port = match["p6"] or match["port"]
    known = others.get(host) or others.get(read_options(host, user or None, None).hostname) or {}
    settings = SSHSettings(**{**known, "host": host, "others": others})
    return replace(settings, username=user or settings.username, port=int(port) if port else settings.port)
