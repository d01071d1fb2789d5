"""The addresses under which workers' servers are announced to one another."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from autodist.cluster.load_adjusted_clock import Stopwatch
from autodist.errors import ClusterError

_RESOLVE_LIMIT, _RETRY_INTERVAL = 10.0, 0.5
_MOST_AT_ONCE = 32


def host_and_port(host: str, port: int) -> str:
    """The text that TensorFlow takes for one server.

    `localhost` becomes 127.0.0.1, since a resolver may prefer ::1 for it and each try of that costs time.

    >>> host_and_port("localhost", 20000), host_and_port("fd00::1", 20000)
    ('127.0.0.1:20000', '[fd00::1]:20000')
    """
    if host == "localhost":
        host = "127.0.0.1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_and_port(address: str) -> tuple[str, int]:
    """The reverse of `host_and_port`.

    >>> split_host_and_port("[fd00::1]:20000")
    ('fd00::1', 20000)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether an address or name is one that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unresolved(hosts: Iterable[str], limit: float = _RESOLVE_LIMIT) -> dict[str, str]:
    """Which of some names this machine cannot resolve, with the reasons.

    They are tried again for a while: the name of a machine that has just been started may come later than that.

    Args:
        hosts: names and IP addresses.
        limit: seconds after which none is tried again.
    """
    stopwatch = Stopwatch()
    left = {host: "" for host in hosts if host != "localhost"}  # which is announced as an IP address
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:  # where no DNS server answers, each takes seconds
        while True:
            reasons = zip(left, pool.map(_why_unresolved, left), strict=True)
            left = {host: reason for host, reason in reasons if reason is not None}
            if not left or stopwatch.read() >= limit:
                return left
            time.sleep(_RETRY_INTERVAL)


def _why_unresolved(host: str) -> str | None:
    """Why a name cannot be resolved; None: it can."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "it is no name of a machine"
    return None


def check_reach(hosts: Sequence[str]) -> None:
    """Checks that machines can reach one another under the addresses that the YAML gives them.

    Raises:
        ClusterError: some addresses are loopback ones and others are not.
    """
    own = [host for host in hosts if is_loopback(host)]
    others = [host for host in hosts if not is_loopback(host)]
    if own and others:
        raise ClusterError(
            f"Node {own[0]}: other machines ({others[0]}) cannot reach it under this address. "
            "Give it the address that it has on their network."
        )
