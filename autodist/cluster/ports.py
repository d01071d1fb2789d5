"""Ports: reserves those of TensorFlow's servers, from the checks before a run until a server binds them; listens."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

# Below Linux's range for outgoing connections (32768 and up), which could take a port between check and use.
_RANGE = range(20000, 32000)

# The state of a listening socket in /proc/net/tcp.
_LISTENS = "0A"

_LOOPBACK = ("0100007F", f"{0:024X}01000000")
"""The loopback addresses there."""


class ReservedPort:
    """A port that no other process on this machine can bind until `release`.

    The socket is bound and does not listen: a process that waits for the server must not mistake it for the server.

    Args:
        bound: the bound socket.
    """

    def __init__(self, bound: socket.socket) -> None:
        self._socket = bound
        self.port: int = bound.getsockname()[1]
        _inherited.add(bound)

    def fileno(self) -> int:
        return self._socket.fileno()

    def listen(self) -> None:
        """Accepts connections, to check that other machines reach the port; not for a port of a later server."""
        self._socket.listen()

    def share(self) -> None:
        """Lets one program that sets SO_REUSEADDR listen at the port; for other processes it stays reserved."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def release(self) -> None:
        """Releases the port; call it right before the server binds. Further calls have no effect.

        Processes that were forked before `_leave_to_parent` was registered have a copy of the socket that stays bound.
        With SO_REUSEADDR a server can still bind: TensorFlow's servers set it, too, and a copy never listens.
        """
        if self._socket.fileno() >= 0:
            self.share()
        self._socket.close()


def reserve_port(requested: int | None) -> ReservedPort:
    """Reserves the requested port or, for None, a free one.

    Raises:
        OSError: the requested port is taken or not allowed, or none is free.
    """
    if requested is not None:
        return ReservedPort(_bind_requested(requested))
    # A random start, so that processes that search at the same time do not collide.
    start = int.from_bytes(os.urandom(4), "little") % len(_RANGE)
    for offset in range(len(_RANGE)):
        try:
            return ReservedPort(_bind(_RANGE[(start + offset) % len(_RANGE)]))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise OSError(errno.EADDRINUSE, f"no port from {_RANGE.start} to {_RANGE.stop - 1} is free")


def leave_listening_to_this_process(port: int) -> None:
    """Makes processes forked from now on close this process's listening sockets on a port, which they may outlive."""
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the descriptor of the listed folder is closed by now
            if os.readlink(entry).startswith("socket:") and _listens_on(int(entry.name), port):
                _listening[int(entry.name)] = port


def stop_listening() -> None:
    """Closes the listening sockets of servers in this process, which cannot be stopped.

    The descriptor stays open, on the null device: a server would otherwise use the next file of that number.
    """
    while _listening:
        descriptor, port = _listening.popitem()
        with contextlib.suppress(OSError):  # TensorFlow has closed it
            if _listens_on(descriptor, port):
                nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nothing, descriptor, inheritable=False)
                os.close(nothing)


def _listens_on(descriptor: int, port: int) -> bool:
    """Returns True if a descriptor is a TCP socket that listens on the port."""
    number = os.dup(descriptor)
    try:
        copy = socket.socket(fileno=number)
    except OSError:  # the descriptor belongs to another file by now
        os.close(number)
        raise
    with copy:
        return (
            copy.family in (socket.AF_INET, socket.AF_INET6)
            and copy.getsockname()[1] == port
            and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        )


def _leave_to_parent() -> None:
    """Closes inherited ports in a process forked from this one, for instance by `multiprocessing`."""
    for bound in list(_inherited):
        bound.close()
    for descriptor, port in _listening.items():
        with contextlib.suppress(OSError):  # TensorFlow has closed it
            if _listens_on(descriptor, port):
                os.close(descriptor)
    _listening.clear()


_inherited: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_listening: dict[int, int] = {}  # port by descriptor
os.register_at_fork(after_in_child=_leave_to_parent)


def _bind_requested(port: int) -> socket.socket:
    try:
        return _bind(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise OSError(error.errno, f"port {port} cannot be used: {error.strerror}") from error
    try:
        # Connections of a server that has just ended prevent a bind without SO_REUSEADDR, and nothing else.
        return _bind(port, reuse=True)
    except OSError as error:
        raise OSError(error.errno, f"port {port} is taken by another process") from error


def _bind(port: int, reuse: bool = False) -> socket.socket:
    """Binds a port on all interfaces, as TensorFlow's servers do."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


def listen(host: str, port: int) -> socket.socket:
    """Creates a listening socket.

    Args:
        host: address; "" for all addresses of the machine.
        port: port.

    Raises:
        OSError: it cannot listen.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def is_open_to_others(port: int) -> bool:
    """Returns True if a socket of any process listens at a port on more than the loopback interface."""
    return any(row[1][:-5] not in _LOOPBACK for row in _listeners(port))


def holder_of(port: int) -> str:
    """Returns text about this user's process that listens on a port; "" if there is none."""
    inodes = {f"socket:[{row[9]}]" for row in _listeners(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if os.readlink(descriptor) in inodes:
                process = descriptor.parts[2]
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f", by process {process} ({command.strip()[:200]})"
    return ""


def _listeners(port: int) -> Iterator[list[str]]:
    """Yields the row of each socket of this machine that listens at a port: address, state and inode are 1, 3 and 9."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
            yield from (row for row in rows if row[3] == _LISTENS and row[1].endswith(f":{port:04X}"))


def reason_of(error: OSError) -> str:
    """Returns the reason without the address that Python appends."""
    return str(error) if error.errno is None else os.strerror(error.errno)
