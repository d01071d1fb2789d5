"""Network addresses of the workers' servers."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from autodist.cluster.timeouts import Stopwatch
from autodist.errors import ClusterError

_RESOLVE_LIMIT, _RETRY_INTERVAL = 10.0, 0.5
_MAX_THREADS = 32


def host_and_port(host: str, port: int) -> str:
    """Formats a server's address for TensorFlow's cluster definition.

    `localhost` becomes 127.0.0.1: a resolver may prefer ::1 for it, and each failed attempt costs time.

    >>> host_and_port("localhost", 20000), host_and_port("fd00::1", 20000)
    ('127.0.0.1:20000', '[fd00::1]:20000')
    """
    if host == "localhost":
        host = "127.0.0.1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_and_port(address: str) -> tuple[str, int]:
    """Parses an address written by `host_and_port`.

    >>> split_host_and_port("[fd00::1]:20000")
    ('fd00::1', 20000)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolved(host: str) -> list[str]:
    """Returns the IP addresses of a name or an address; none if this machine cannot resolve it."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in entries]


def unresolved(hosts: Iterable[str], limit: float = _RESOLVE_LIMIT) -> dict[str, str]:
    """Returns the names that this machine cannot resolve, with the reason for each.

    Retries for a while, since the name of a machine that has just started may not be registered yet.

    Args:
        hosts: names and IP addresses.
        limit: seconds after which no name is retried.
    """
    stopwatch = Stopwatch()
    unresolved_hosts = {
        host: "" for host in hosts if host != "localhost"
    }  # `host_and_port` replaces it by an IP address
    with ThreadPoolExecutor(_MAX_THREADS) as pool:  # without a DNS server that answers, each name takes seconds
        while True:
            reasons = zip(unresolved_hosts, pool.map(_why_unresolved, unresolved_hosts), strict=True)
            unresolved_hosts = {host: reason for host, reason in reasons if reason is not None}
            if not unresolved_hosts or stopwatch.read() >= limit:
                return unresolved_hosts
            time.sleep(_RETRY_INTERVAL)


def _why_unresolved(host: str) -> str | None:
    """Returns the reason that a name cannot be resolved; None if it can."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "it is not a valid host name"
    return None


def check_reach(hosts: Sequence[str]) -> None:
    """Checks that machines can reach one another under their addresses in the YAML.

    Raises:
        ClusterError: some addresses are loopback addresses and others are not.
    """
    loopback = [host for host in hosts if is_loopback(host)]
    others = [host for host in hosts if not is_loopback(host)]
    if loopback and others:
        raise ClusterError(
            f"Node {loopback[0]}: other machines ({others[0]}) cannot reach it under this address. "
            "Replace it by its address on their network."
        )
