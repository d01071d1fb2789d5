"""The machines on the way to one: where each is, and that the way leads through none twice."""

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
