"""The rendezvous server: the part of the relay that the other processes of a given cluster join.

It listens, and accepts the processes that know the run's secret. It reports the events of `roster` on the
relay's standard output. Each process that has joined is relayed like a command over SSH.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from typing import BinaryIO

from autodist.cluster.environments.follower_connection import FollowerConnection
from autodist.cluster.environments.handshake import (
    MAX_LINE,
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
from autodist.cluster.environments.roster import (
    MAX_TRIES,
    Arrival,
    Failed,
    Listening,
    PortInUse,
    ProcessJoined,
    ProcessLeft,
    RendezvousOrder,
    Roster,
    Warned,
)
from autodist.cluster.environments.secret import remove_drawn
from autodist.cluster.ports import holder_of, listen, reason_of
from autodist.cluster.protocol import Message, encode
from autodist.cluster.stream_relay import Relays
from autodist.cluster.timeouts import HeartbeatTimeout
from autodist.waits import Condition, start_thread

# Timeout in seconds for each message of the handshake.
_MESSAGE_LIMIT = 10.0

# Limit on simultaneous connections that have not authenticated; further ones are closed.
_MAX_AT_ONCE = 64

# Seconds between two attempts to listen on a port that is in use.
_PORT_INTERVAL = 0.5

# Seconds for the last messages to the processes.
_LAST_MESSAGES_LIMIT = 5.0


def relay(order: RendezvousOrder, relays: Relays, output: BinaryIO) -> None:
    """Waits for all processes, and reports events on `output`; returns when they, or the chief, have ended."""
    try:
        RendezvousServer(order, relays, output).run()
    finally:
        if order.secret_file:
            remove_drawn(order.secret_file, order.secret)


class RendezvousServer:
    """Listens, and accepts processes that know the secret; see `relay`."""

    def __init__(self, order: RendezvousOrder, relays: Relays, output: BinaryIO) -> None:
        self._order, self._relays, self._output = order, relays, output
        self._secret = order.secret.encode()
        self._changed = Condition()  # guards the following fields, `relays.start` and `output`
        self._roster = Roster(order.count, order.left_out)
        self._elastic_channels = iter(range(len(order.channels)))
        self._handshakes: dict[threading.Thread, socket.socket] = {}  # connections that have not authenticated yet
        self._is_over = False
        self._refused: frozenset[str] = frozenset()  # warnings about refused processes
        self._listener: socket.socket | None = None
        self._at_once = threading.Semaphore(_MAX_AT_ONCE)

    def run(self) -> None:
        """Returns when all processes that have joined, or the chief, have ended."""
        start_thread("rendezvous-chief", self._watch_chief)
        self._listener = listener = self._listen()
        if listener is None:
            return
        self._report(Listening())
        accepting = start_thread("rendezvous", self._accept, listener)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not (self._order.is_elastic or self._relays.not_started))
            is_over = self._is_over
        limit = _LAST_MESSAGES_LIMIT + (self._order.stop_timeout if self._order.is_elastic else 0)
        self._relays.join(limit if is_over else None)
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
                problem = f"the rendezvous server cannot listen on port {port} of this machine: {reason_of(error)}"
                if error.errno != errno.EADDRINUSE:
                    self._report(Failed(f"{problem}; free the port, or set another one in AUTODIST_CHIEF"))
                    return None
            if not is_reported:
                self._report(PortInUse(f"{problem}{holder_of(port)}; end it, or set another port in AUTODIST_CHIEF"))
                is_reported = True
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, _PORT_INTERVAL)
        return None

    def _report(self, event: Message) -> None:
        with self._changed, contextlib.suppress(BrokenPipeError):
            self._output.write(encode(event))
            self._output.flush()

    def _watch_chief(self) -> None:
        """Ends the server when the chief has ended or given up."""
        self._relays.wait_for_chief_end()
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
            with self._changed:
                is_complete = not (self._roster.missing and self._relays.not_started)
            with contextlib.suppress(OSError):
                connection.sendall(encode(Refused(str(error), error.is_secret, is_complete)))
            connection.close()
            self._warn(f"a process at {from_host} was refused: {error}", is_complete)
        except OSError:
            connection.close()  # closed or silent; a process of the run tries again
        finally:
            with self._changed:
                self._handshakes.pop(threading.current_thread())
            self._at_once.release()
            self._close_if_complete()

    def _warn(self, text: str, is_complete: bool) -> None:
        """Reports a refusal; once if the run is complete, since the process may try again until the run has ended."""
        with self._changed:
            is_known, self._refused = is_complete and text in self._refused, self._refused | {text}
        if not is_known:
            self._report(Warned(text))

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
            channel = self._channel_for(arrival)
        order = self._order
        limits = order.silence_timeout, order.stop_timeout
        connection.sendall(encode(welcome(self._secret, hello, challenge, *limits, order.is_elastic)))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_relay(connection, arrival, channel)

    def _channel_for(self, arrival: Arrival) -> int:
        """Returns the number of the channel of a process that has been entered; called under `_changed`.

        Raises:
            RefusedError: so many processes have come and left that there is no channel before the next start.
        """
        if not self._order.is_elastic:
            return arrival.hello.index - 1
        channel = next(self._elastic_channels, None)
        if channel is None:
            self._roster.leave(arrival)
            raise RefusedError("too many processes have come and left since the run started")
        return channel

    def _start_relay(self, connection: socket.socket, arrival: Arrival, channel: int) -> None:
        remote = FollowerConnection(connection, arrival.name)

        def end() -> None:
            remote.close()
            if self._order.is_elastic:
                with self._changed:
                    self._roster.leave(arrival)
                self._report(ProcessLeft(channel))
                return
            with self._changed:
                is_early = bool(self._roster.missing) and not self._is_over
            if is_early:
                self._report(Failed(f"{arrival.name} left before all had joined; see its output"))

        self._close_if_complete()  # before the report: the chief may then use the port
        self._report(ProcessJoined(arrival, channel))
        timeout = HeartbeatTimeout(self._order.silence_timeout)
        with self._changed:
            self._relays.start(channel, arrival.name, remote, timeout, end)
            self._changed.notify_all()

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
                    f"a process with another secret connected {MAX_TRIES} times, and no more connections are "
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


def _read(connection: socket.socket) -> object:
    """Reads a message from a connection that has not authenticated."""
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(MAX_LINE)
        line += received
        # In the handshake, no message follows another one before its answer.
        if not received or len(line) > MAX_LINE or b"\n" in line[:-1]:
            raise OSError("no message")
    return decode(line)
