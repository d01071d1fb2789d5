"""The addresses under which workers' servers are announced to one another."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from autodist.errors import ClusterError


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
