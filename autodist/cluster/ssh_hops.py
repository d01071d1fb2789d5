"""The destinations and jump hosts of SSH connections, from the SSH settings and the user's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autodist.cluster.ssh_config import SSHOptions, read_options
from autodist.cluster.ssh_errors import Endpoint
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError


def known_hosts_of(settings: SSHSettings, options: SSHOptions) -> tuple[str, ...]:
    """Returns the known_hosts files to use."""
    return (settings.known_hosts,) if settings.known_hosts else options.known_hosts + options.system_known_hosts


def endpoint_of(settings: SSHSettings, options: SSHOptions) -> Endpoint:
    """Returns the destination of a connection."""
    return Endpoint(
        name=settings.host,
        host=options.hostname,
        port=options.port,
        username=options.user,
        known_hosts=next(iter(known_hosts_of(settings, options)), "/dev/null"),
        alias=options.host_key_alias,
    )


def require_progress(endpoint: Endpoint, behind: Sequence[Endpoint]) -> None:
    """Checks that a machine is not its own jump host.

    Raises:
        ClusterError: the jump hosts form a cycle.
    """
    if any((e.host, e.port, e.username) == (endpoint.host, endpoint.port, endpoint.username) for e in behind):
        hops = " through ".join(e.name for e in (*reversed(behind), endpoint))
        raise ClusterError(
            f"{behind[-1]}: its connection leads through itself ({hops}); correct `ProxyJump` in ~/.ssh/config."
        )


def jump_settings(jump: str, others: Mapping[str, Mapping[str, Any]]) -> SSHSettings:
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
