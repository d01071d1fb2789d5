"""The reception: a small process beside the chief's, where the other processes of a given cluster come.

`python -m autodist.cluster.environments.rendezvous_server` reads its order from its standard input:
where to listen, how many are to
come, the secret, limits, and three descriptors for each of them. It tells what happens as lines of JSON on its standard
output (`News`), and passes bytes between the chief and whoever has come, as the relay does over SSH: the chief's own
process may keep Python's global lock for longer than the limit of silence. It ends when all of these have, or the
chief.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, TypeAdapter

from autodist.cluster.environments.handshake import (
    LONGEST_LINE,
    Challenge,
    Hello,
    Proof,
    Refused,
    RefusedError,
    decode,
    encode,
    nonce,
    proves,
    welcome,
)
from autodist.cluster.environments.machines import plain_host
from autodist.cluster.environments.roster import MOST_TRIES, Arrival, Roster
from autodist.cluster.heartbeat_timeout import HeartbeatTimeout
from autodist.cluster.stream_relay import Ends, Relay

_CHUNK = 1 << 16

# As /proc/net/tcp writes the state of a socket that listens.
_LISTENS = "0A"

# Seconds in which somebody who connects has to say each of its words.
_WORD_LIMIT = 10.0

# Who connects and has proved nothing; more than these at once are not listened to.
_MOST_AT_ONCE = 64

# Seconds between two tries to listen on a port that is in use.
_PORT_INTERVAL = 0.5

# Seconds for the last words to those who have come.
_LAST_WORDS = 5.0


@dataclass(frozen=True)
class RendezvousServerOrder:
    """What a reception is told.

    Attributes:
        host: address to listen on; "": all of the machine's.
        port: to listen on.
        count: of processes, the chief included.
        secret: of the run.
        stays_open: whether it goes on listening when all have come, to tell others that they are too late.
        silence_timeout: seconds without a word after which a machine counts as lost.
        stop_timeout: seconds between asking a script to end and ending it.
        channels: descriptors of the chief's ends, one triple for each process but the chief, by index.
    """

    host: str
    port: int
    count: int
    secret: str
    stays_open: bool
    silence_timeout: float
    stop_timeout: float
    channels: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Listening:
    """The reception listens."""

    kind: Literal["Listening"] = field(default="Listening", kw_only=True)


@dataclass(frozen=True)
class PortInUse:
    """The port is in use; the reception waits for it, as long as the chief does."""

    problem: str
    kind: Literal["PortInUse"] = field(default="PortInUse", kw_only=True)


@dataclass(frozen=True)
class Came:
    """A process has come, and is one of the run."""

    arrival: Arrival
    kind: Literal["Came"] = field(default="Came", kw_only=True)


@dataclass(frozen=True)
class Warned:
    """Something that the user has to know of."""

    text: str
    kind: Literal["Warned"] = field(default="Warned", kw_only=True)


@dataclass(frozen=True)
class Failed:
    """The processes cannot meet any more."""

    problem: str
    kind: Literal["Failed"] = field(default="Failed", kw_only=True)


News = Listening | PortInUse | Came | Warned | Failed

NEWS: TypeAdapter[News] = TypeAdapter(Annotated[News, Field(discriminator="kind")])


class FarProcess:
    """The connection to a process that has come.

    Args:
        connection: to it.
        lines: read from it.
        name: of its machine, for messages.
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
    """Listens, and lets in who knows the secret.

    Args:
        order: what it was told.
        ends: the chief's ends of the streams of each process but the chief, by index.
        news: where it tells what happens.
    """

    def __init__(self, order: RendezvousServerOrder, ends: Sequence[Ends], news: BinaryIO) -> None:
        self._order, self._ends, self._news = order, ends, news
        self._secret = order.secret.encode()
        self._changed = threading.Condition()  # guards what follows, and `news`
        self._roll = Roster(order.count)
        self._relays: list[threading.Thread] = []
        self._conversations: dict[threading.Thread, socket.socket] = {}  # with those who are nobody yet
        self._is_over = False
        self._listener: socket.socket | None = None
        self._at_once = threading.Semaphore(_MOST_AT_ONCE)

    def run(self) -> None:
        """Returns when all who have come are gone again, or the chief is."""
        threading.Thread(target=self._watch_chief, name="autodist-reception-chief", daemon=True).start()
        self._listener = listener = self._listen()
        if listener is None:
            return
        self._tell(Listening())
        accepting = threading.Thread(target=self._accept, args=(listener,), name="autodist-reception", daemon=True)
        accepting.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._roll.missing)
            is_over = self._is_over
        for relay in self._relays:
            relay.join(_LAST_WORDS if is_over else None)
        self._close_listener()
        accepting.join(_LAST_WORDS)
        self._end_conversations()

    def _listen(self) -> socket.socket | None:
        """Listens on the port, and waits for it while it is in use: a process of an earlier run may be about to end.

        Returns:
            None if that is impossible, or the chief has gone.
        """
        port, is_reported = self._order.port, False
        while not self._is_over:
            try:
                return listen(self._order.host, port)
            except OSError as error:
                problem = f"the processes of the cluster cannot meet at port {port} of this machine: {_reason(error)}"
                if error.errno != errno.EADDRINUSE:
                    self._tell(Failed(f"{problem}; free the port, or name another in AUTODIST_CHIEF"))
                    return None
            if not is_reported:
                self._tell(PortInUse(f"{problem}{_holder_of(port)}; end that, or name another port in AUTODIST_CHIEF"))
                is_reported = True
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, _PORT_INTERVAL)
        return None

    def _tell(self, news: News) -> None:
        with self._changed, contextlib.suppress(BrokenPipeError):
            self._news.write(NEWS.dump_json(news) + b"\n")
            self._news.flush()

    def _watch_chief(self) -> None:
        """Ends the reception with the chief, or where that has given up."""
        gone = select.poll()
        for ends in self._ends:
            gone.register(ends.incoming, 0)  # that the other end was closed is told without asking
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
            thread = threading.Thread(target=self._receive, args=(connection,), name="autodist-greeting", daemon=True)
            with self._changed:
                self._conversations[thread] = connection
            thread.start()

    def _end_conversations(self) -> None:
        """Hangs up on those who have not proved anything by now."""
        with self._changed:
            left = dict(self._conversations)
        for connection in left.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in left:
            thread.join(_LAST_WORDS)

    def _receive(self, connection: socket.socket) -> None:
        from_host, to_host = "somebody", ""
        try:
            connection.settimeout(_WORD_LIMIT)
            from_host, to_host = (plain_host(name()[0]) for name in (connection.getpeername, connection.getsockname))
            self._converse(connection, from_host, to_host)
        except RefusedError as error:
            with contextlib.suppress(OSError):
                connection.sendall(encode(Refused(str(error), error.is_secret)))
            connection.close()
            self._tell(Warned(f"a process at {from_host} was refused: {error}"))
        except OSError:
            connection.close()  # it has gone, or says nothing: no process of the run, which comes again
        finally:
            with self._changed:
                self._conversations.pop(threading.current_thread())
            self._at_once.release()
            self._close_if_nobody_is_to_come()

    def _converse(self, connection: socket.socket, from_host: str, to_host: str) -> None:
        """Lets a process in that proves that it knows the secret."""
        hello = _read(connection)
        if not isinstance(hello, Hello):
            raise RefusedError("it does not say who it is")
        challenge = Challenge(nonce())
        connection.sendall(encode(challenge))
        proof = _read(connection)
        if not isinstance(proof, Proof):
            raise RefusedError("it does not show that it knows the secret")
        arrival = Arrival(hello, from_host, to_host)
        with self._changed:
            if self._roll.is_closed:
                raise OSError("closed")
            if not proves(self._secret, hello, challenge, proof):
                raise self._roll.refuse_secret()
            self._roll.enter(arrival)
        order = self._order
        connection.sendall(encode(welcome(self._secret, hello, challenge, order.silence_timeout, order.stop_timeout)))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pass_on(connection, arrival)

    def _pass_on(self, connection: socket.socket, arrival: Arrival) -> None:
        far = FarProcess(connection, arrival.name)
        ends = self._ends[arrival.hello.index - 1]
        relay = Relay(arrival.name, far, ends, HeartbeatTimeout(self._order.silence_timeout))
        thread = threading.Thread(
            target=self._relay, args=(relay, far, arrival), name=f"autodist-{arrival.name}", daemon=True
        )
        thread.start()
        self._close_if_nobody_is_to_come()  # before the chief is told, who may use the port then
        self._tell(Came(arrival))
        with self._changed:
            self._relays.append(thread)
            self._changed.notify_all()

    def _relay(self, relay: Relay, far: FarProcess, arrival: Arrival) -> None:
        relay.run()
        far.close()
        with self._changed:
            is_early = bool(self._roll.missing) and not self._is_over
        if is_early:
            self._tell(Failed(f"{arrival.name} left before all had come; see what it printed"))

    def _close_if_nobody_is_to_come(self) -> None:
        with self._changed:
            is_done = not self._roll.missing and not self._order.stays_open
            is_closed = self._roll.is_closed and self._listener is not None
            missing = self._roll.missing
        if is_done or is_closed:
            self._close_listener()
        if is_closed and missing:
            self._tell(
                Failed(
                    f"{MOST_TRIES} times a process came with another secret, and nobody is listened to any more; see "
                    "whether all have the same secret, and who can reach the port"
                )
            )

    def _close_listener(self) -> None:
        with self._changed:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):  # wakes who accepts
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _reason(error: OSError) -> str:
    """The reason alone, without the address, which Python adds."""
    return str(error) if error.errno is None else os.strerror(error.errno)


def _holder_of(port: int) -> str:
    """Names the process of this user that listens on a port; nothing if it is not found."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
            inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and row[1].endswith(f":{port:04X}")}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(descriptor) in inodes:
                process = descriptor.parts[2]
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f", by process {process} ({command.strip()[:200]})"
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: address; "": on all of the machine's.
        port: its port.

    Raises:
        OSError: it cannot.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _read(connection: socket.socket) -> object:
    """A word read from a connection that has proved nothing yet."""
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(LONGEST_LINE)
        line += received
        # Nobody says anything behind a word before it has been answered.
        if not received or len(line) > LONGEST_LINE or b"\n" in line[:-1]:
            raise OSError("no word")
    return decode(line)


def main() -> int:
    # It ends with the chief. SIGTERM to all processes of a scheduler's job says that this one may save before.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told = sys.stdin.readline()
    if not told:
        return 0  # the chief has gone already
    order = TypeAdapter(RendezvousServerOrder).validate_python(json.loads(told))
    # Its own descriptor: what anything else prints must not look like news.
    news = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    RendezvousServer(order, [Ends.of(*three) for three in order.channels], news).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
