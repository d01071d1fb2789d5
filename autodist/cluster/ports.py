"""Ports for TensorFlow's servers: found or checked before anything starts, and held until the server takes them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from pathlib import Path

# Below what Linux hands out to outgoing connections (32768 and up), which would take a port between check and use.
_RANGE = range(20000, 32000)


class PortHeld:
    """A port that nobody else on this machine can bind until `release`.

    The socket is bound and does not listen, so that nobody who waits for the server takes it for the server.

    Args:
        holder: the bound socket.
    """

    def __init__(self, holder: socket.socket) -> None:
        self._holder = holder
        self.port: int = holder.getsockname()[1]
        _inherited.add(holder)

    def fileno(self) -> int:
        return self._holder.fileno()

    def listen(self) -> None:
        """Lets others connect, who then know that they reach it; for a check, not where a server is to follow."""
        self._holder.listen()

    def release(self) -> None:
        """Lets the port go; call it right before the server binds. Again: nothing happens.

        Processes that were forked before any code of ours ran have a copy of the socket, which stays bound. It lets a
        server bind beside it from here on: TensorFlow's ask for the address to be reused, and a copy never listens.
        """
        if self._holder.fileno() >= 0:
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.close()


def hold_port(asked: int | None) -> PortHeld:
    """Holds the asked port or, for None, a free one.

    Raises:
        OSError: the asked port is taken or not allowed, or none is free; the message says so.
    """
    if asked is not None:
        return PortHeld(_bind_asked(asked))
    # A start of its own for each process keeps those that look at the same moment apart.
    start = int.from_bytes(os.urandom(4), "little") % len(_RANGE)
    for offset in range(len(_RANGE)):
        try:
            return PortHeld(_bind(_RANGE[(start + offset) % len(_RANGE)]))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise OSError(errno.EADDRINUSE, f"no port from {_RANGE.start} to {_RANGE.stop - 1} is free")


def leave_listening_to_this_process(port: int) -> None:
    """Processes that are forked from now on do not keep open what listens on a port here, should they live longer."""
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is gone by now
            if os.readlink(entry).startswith("socket:") and _listens_on(int(entry.name), port):
                _listening[int(entry.name)] = port


def _listens_on(descriptor: int, port: int) -> bool:
    """Whether a descriptor is a TCP socket that listens on a port."""
    number = os.dup(descriptor)
    try:
        copy = socket.socket(fileno=number)
    except OSError:  # another file has the descriptor by now
        os.close(number)
        raise
    with copy:
        return (
            copy.family in (socket.AF_INET, socket.AF_INET6)
            and copy.getsockname()[1] == port
            and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        )


def _leave_to_parent() -> None:
    """In a process forked from this one, as those of `multiprocessing` are: ports are no business of it."""
    for holder in list(_inherited):
        holder.close()
    for descriptor, port in _listening.items():
        with contextlib.suppress(OSError):  # TensorFlow has closed it
            if _listens_on(descriptor, port):
                os.close(descriptor)
    _listening.clear()


_inherited: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_listening: dict[int, int] = {}  # port by descriptor
os.register_at_fork(after_in_child=_leave_to_parent)


def _bind_asked(port: int) -> socket.socket:
    try:
        return _bind(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise OSError(error.errno, f"port {port} cannot be used: {error.strerror}") from error
    try:
        # Connections of a server that ended a moment ago are in the way of a plain bind, and of nothing else.
        return _bind(port, reuse=True)
    except OSError as error:
        raise OSError(error.errno, f"port {port} is taken by another process") from error


def _bind(port: int, reuse: bool = False) -> socket.socket:
    """Binds on all interfaces, as TensorFlow's servers do."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if reuse:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder
