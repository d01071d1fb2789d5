"""Ports that tests listen at."""

from __future__ import annotations

import contextlib
import secrets
import socket

_LOWEST, _COUNT = 20_000, 12_000
"""Below those that the system deals to whoever connects somewhere, which would take one before it is listened at."""


def free_port(address: str) -> int:
    """A port at which nobody listens, and that nobody is given without asking for it."""
    while True:
        port = _LOWEST + secrets.randbelow(_COUNT)
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port
