"""The rendezvous server: a small process on the chief's machine that the other processes of a given cluster join.

`python -m autodist.cluster.environments.rendezvous_server` reads its order from its standard input: address, number of
processes, secret, limits, and three descriptors for each process. It reports the events of `rendezvous_events` on
its standard output. It forwards bytes between the chief and the processes, as the SSH relay does: the chief's
own process may hold Python's global lock for longer than the heartbeat timeout. It ends when all these processes, or
the chief, have ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter

from autodist.cluster.environments.handshake import (
    LONGEST_LINE,
    Challenge,
    Hello,
    Proof,
    Refused,
    RefusedError,
    decode,
    nonce,
    proves,
    welcome,
)
from autodist.cluster.environments.machines import plain_host
from autodist.cluster.environments.rendezvous_events import (
    Failed,
    Listening,
    PortInUse,
    ProcessJoined,
    RendezvousServerOrder,
    Warned,
)
from autodist.cluster.environments.roster import MOST_TRIES, Arrival, Roster
from autodist.cluster.heartbeat_timeout import HeartbeatTimeout
from autodist.cluster.protocol import Message, encode
from autodist.cluster.stream_relay import Ends, Relay

_CHUNK = 1 << 16

# The state of a listening socket in /proc/net/tcp.
_LISTENS = "0A"

# Timeout in seconds for each message of the handshake.
_MESSAGE_LIMIT = 10.0

# Limit on simultaneous connections that have not authenticated; further ones are closed.
_MOST_AT_ONCE = 64

# Seconds between two attempts to listen on a port that is in use.
_PORT_INTERVAL = 0.5

# Seconds for the last messages to the processes.
_LAST_MESSAGES_LIMIT = 5.0


class FollowerConnection:
    """The connection to a process that has joined.

    Args:
        connection: socket of the connection.
        name: name of the process, for messages.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection, self._name = connection, name
        self._problem: str | None = None

    def send(self, content: bytes) -> None:
        self._connection.sendall(content)

    def receive(self) -> bytes:
        try:
            return self._connection.recv(_CHUNK)
        except ConnectionError as error:
            self._problem = f"the connection to {self._name} broke: {error.strerror}"
            return b""

    def receive_errors(self) -> bytes:
        return b""

    def why_ended(self) -> str | None:
        return self._problem

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class RendezvousServer:
    """Listens, and accepts processes that know the secret.

    Args:
        order: its settings.
        ends: the chief's ends of the streams of each process except the chief, by index.
        events: destination of the events.
    """

    def __init__(self, order: RendezvousServerOrder, ends: Sequence[Ends], events: BinaryIO) -> None:
        self._order, self._ends, self._events = order, ends, events
        self._secret = order.secret.encode()
        self._changed = threading.Condition()  # guards the following fields and `events`
        self._roster = Roster(order.count)
        self._relays: list[threading.Thread] = []
        self._handshakes: dict[threading.Thread, socket.socket] = {}  # connections that have not authenticated yet
        self._is_over = False
        self._listener: socket.socket | None = None
        self._at_once = threading.Semaphore(_MOST_AT_ONCE)

    def run(self) -> None:
        """Returns when all processes that have joined, or the chief, have ended."""
        threading.Thread(target=self._watch_chief, name="autodist-rendezvous-chief", daemon=True).start()
        self._listener = listener = self._listen()
        if listener is None:
            return
        self._report(Listening())
        accepting = threading.Thread(target=self._accept, args=(listener,), name="autodist-rendezvous", daemon=True)
        accepting.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._roster.missing)
            is_over = self._is_over
        for relay in self._relays:
            relay.join(_LAST_MESSAGES_LIMIT if is_over else None)
        self._close_listener()
        accepting.join(_LAST_MESSAGES_LIMIT)
        self._end_handshakes()

    def _listen(self) -> socket.socket | None:
        """Listens on the port; waits while it is in use, since a process of an earlier run may be about to end.

        Returns:
            None if the port cannot be used, or the chief has ended.
        """
        port, is_reported = self._order.port, False
        while not self._is_over:
            try:
                return listen(self._order.host, port)
            except OSError as error:
                problem = f"the rendezvous server cannot listen on port {port} of this machine: {_reason(error)}"
                if error.errno != errno.EADDRINUSE:
                    self._report(Failed(f"{problem}; free the port, or set another one in AUTODIST_CHIEF"))
                    return None
            if not is_reported:
                self._report(PortInUse(f"{problem}{_holder_of(port)}; end it, or set another port in AUTODIST_CHIEF"))
                is_reported = True
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, _PORT_INTERVAL)
        return None

    def _report(self, event: Message) -> None:
        with self._changed, contextlib.suppress(BrokenPipeError):
            self._events.write(encode(event))
            self._events.flush()

    def _watch_chief(self) -> None:
        """Ends the server when the chief has ended or given up."""
        gone = select.poll()
        for ends in self._ends:
            gone.register(ends.incoming, 0)  # `poll` always reports that the other end was closed
        gone.poll()
        self._close_listener()  # first: the job may be started again at once, with the same port
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            if not self._at_once.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._receive, args=(connection,), name="autodist-handshake", daemon=True)
            with self._changed:
                self._handshakes[thread] = connection
            thread.start()

    def _end_handshakes(self) -> None:
        """Closes the connections that have not authenticated."""
        with self._changed:
            left = dict(self._handshakes)
        for connection in left.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in left:
            thread.join(_LAST_MESSAGES_LIMIT)

    def _receive(self, connection: socket.socket) -> None:
        from_host, to_host = "an unknown address", ""
        try:
            connection.settimeout(_MESSAGE_LIMIT)
            from_host, to_host = (plain_host(name()[0]) for name in (connection.getpeername, connection.getsockname))
            self._authenticate(connection, from_host, to_host)
        except RefusedError as error:
            with contextlib.suppress(OSError):
                connection.sendall(encode(Refused(str(error), error.is_secret)))
            connection.close()
            self._report(Warned(f"a process at {from_host} was refused: {error}"))
        except OSError:
            connection.close()  # closed or silent; a process of the run tries again
        finally:
            with self._changed:
                self._handshakes.pop(threading.current_thread())
            self._at_once.release()
            self._close_if_complete()

    def _authenticate(self, connection: socket.socket, from_host: str, to_host: str) -> None:
        """Accepts a process that proves that it knows the secret."""
        hello = _read(connection)
        if not isinstance(hello, Hello):
            raise RefusedError("its first message is not `Hello`")
        challenge = Challenge(nonce())
        connection.sendall(encode(challenge))
        proof = _read(connection)
        if not isinstance(proof, Proof):
            raise RefusedError("it does not prove that it knows the secret")
        arrival = Arrival(hello, from_host, to_host)
        with self._changed:
            if self._roster.is_closed:
                raise OSError("closed")
            if not proves(self._secret, hello, challenge, proof):
                raise self._roster.refuse_secret()
            self._roster.enter(arrival)
        order = self._order
        connection.sendall(encode(welcome(self._secret, hello, challenge, order.silence_timeout, order.stop_timeout)))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_relay(connection, arrival)

    def _start_relay(self, connection: socket.socket, arrival: Arrival) -> None:
        remote = FollowerConnection(connection, arrival.name)
        ends = self._ends[arrival.hello.index - 1]
        relay = Relay(arrival.name, remote, ends, HeartbeatTimeout(self._order.silence_timeout))
        thread = threading.Thread(
            target=self._relay, args=(relay, remote, arrival), name=f"autodist-{arrival.name}", daemon=True
        )
        thread.start()
        self._close_if_complete()  # before the report: the chief may then use the port
        self._report(ProcessJoined(arrival))
        with self._changed:
            self._relays.append(thread)
            self._changed.notify_all()

    def _relay(self, relay: Relay, remote: FollowerConnection, arrival: Arrival) -> None:
        relay.run()
        remote.close()
        with self._changed:
            is_early = bool(self._roster.missing) and not self._is_over
        if is_early:
            self._report(Failed(f"{arrival.name} left before all had joined; see its output"))

    def _close_if_complete(self) -> None:
        with self._changed:
            is_done = not self._roster.missing and not self._order.stays_open
            is_closed = self._roster.is_closed and self._listener is not None
            missing = self._roster.missing
        if is_done or is_closed:
            self._close_listener()
        if is_closed and missing:
            self._report(
                Failed(
                    f"a process with another secret connected {MOST_TRIES} times, and no more connections are "
                    "accepted; check that all have the same secret, and who can reach the port"
                )
            )

    def _close_listener(self) -> None:
        with self._changed:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):  # wakes the thread in `accept`
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _reason(error: OSError) -> str:
    """Returns the reason without the address that Python appends."""
    return str(error) if error.errno is None else os.strerror(error.errno)


def _holder_of(port: int) -> str:
    """Returns text about this user's process that listens on a port; "" if there is none."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
            inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and row[1].endswith(f":{port:04X}")}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if os.readlink(descriptor) in inodes:
                process = descriptor.parts[2]
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f", by process {process} ({command.strip()[:200]})"
    return ""


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


def _read(connection: socket.socket) -> object:
    """Reads a message from a connection that has not authenticated."""
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(LONGEST_LINE)
        line += received
        # In the handshake, no message follows another one before its answer.
        if not received or len(line) > LONGEST_LINE or b"\n" in line[:-1]:
            raise OSError("no message")
    return decode(line)


def main() -> int:
    # The server ends with the chief, which may save a checkpoint after the scheduler has sent SIGTERM to all processes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = sys.stdin.readline()
    if not line:
        return 0  # the chief has already ended
    order = TypeAdapter(RendezvousServerOrder).validate_python(json.loads(line))
    # A duplicated descriptor: output of other code must not look like events.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    RendezvousServer(order, [Ends.of(*three) for three in order.channels], events).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
