"""Ports that tests listen at."""

from __future__ import annotations

import contextlib
import secrets
import socket

_LOWEST, _COUNT = 20_000, 12_000
"""Below the system's ephemeral ports, which could be taken before the server listens."""


def free_port(address: str) -> int:
    """Returns an unused port that the system does not assign on its own."""
    while True:
        port = _LOWEST + secrets.randbelow(_COUNT)
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port
