"""Whether an address is this machine's own."""

from __future__ import annotations

import socket


def is_own_address(address: str) -> bool:
    """Whether `address` (a name or an IP address) belongs to the machine that runs this.

    A socket can be bound to a machine's own addresses only, so that is what is tried: no interface needs to be listed,
    and inside a network namespace the answer is the namespace's. A name is looked up first, which may ask DNS; one that
    cannot be found is not this machine's. Where the kernel allows binding to foreign addresses
    (net.ipv4.ip_nonlocal_bind=1) every address looks like an own one: there, give the other nodes an `ssh_config`.
    """
    if address in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: a label that is too long for a host name
        return False
    return any(_can_bind(family, sockaddr) for family, _, _, _, sockaddr in found)


def _can_bind(family: int, sockaddr: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(sockaddr)
    except OSError:
        return False
    return True
