"""A relay for the connections to other workers, which delays them and limits their rate; a process of its own.

    python scripts/bench/relay.py DELAY RATE COUNTS HOST:PORT …

It prints the ports at which it listens, one for each address, and ends with its standard input. The file COUNTS holds
the bytes that it has relayed so far. Linux's `netem` would do the same, but is missing in many kernels, and needs root.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_PIECE = 1 << 16
_FORMAT = "Q"
"""A counter in the file of counts."""


class Relay:
    """A process that relays a worker's connections to the others.

    Args:
        delay: seconds that data takes in each direction.
        rate: bytes per second in each direction to and from each of the others; 0: unlimited.
        folder: the folder for the number of relayed bytes.
    """

    def __init__(self, delay: float, rate: float, folder: pathlib.Path) -> None:
        self._delay, self._rate, self._folder = delay, rate, folder
        self._process: subprocess.Popen[str] | None = None

    def through(self, addresses: Sequence[str], index: int) -> list[str]:
        """Returns the addresses of all workers as worker `index` has to use them."""
        others = [address for k, address in enumerate(addresses) if k != index]
        options = [str(self._delay), str(self._rate), str(_counts_of(self._folder, index))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *options, *others],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None, "requested above"
        ports = iter(self._process.stdout.readline().split())
        return [a if k == index else f"127.0.0.1:{next(ports)}" for k, a in enumerate(addresses)]

    def close(self) -> None:
        """Ends the process and waits for its end."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def relayed_bytes(folder: pathlib.Path) -> list[int]:
    """Returns the bytes that the relays of two workers have passed so far, in each direction."""
    (out, back), (back_to_first, from_second) = (_read_counts(_counts_of(folder, index)) for index in range(2))
    return [out + from_second, back + back_to_first]


def _counts_of(folder: pathlib.Path, index: int) -> pathlib.Path:
    return folder / f"relay{index}.bytes"


def _read_counts(path: pathlib.Path) -> tuple[int, int]:
    """Returns the bytes that a relay has sent to the other workers so far, and those that came from them."""
    there, back = memoryview(path.read_bytes()).cast(_FORMAT)
    return there, back


class _Direction:
    """One direction of the link to another worker, which all connections to it share."""

    def __init__(self, delay: float, rate: float, counts: memoryview, counter: int) -> None:
        self._delay, self._rate, self._counts, self._counter = delay, rate, counts, counter
        self._lock = threading.Lock()
        self._free = 0.0

    def relay(self, source: socket.socket, target: socket.socket) -> None:
        """Relays a connection's data in this direction, in the background."""
        sent: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._receive, args=(source, sent), daemon=True).start()
        threading.Thread(target=_send, args=(target, sent), daemon=True).start()

    def _receive(self, source: socket.socket, sent: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        """Puts data with the time of its arrival into a queue; waits as long as the link is busy with it."""
        done = time.monotonic()
        while True:
            data, arrived = _next_piece(source, done)
            with self._lock:
                self._counts[self._counter] += len(data)
                self._free = max(self._free, arrived) + (len(data) / self._rate if self._rate else 0.0)
                done = self._free
            time.sleep(max(0.0, done - time.monotonic()))
            sent.put((done + self._delay, data))
            if not data:
                return


def _next_piece(source: socket.socket, since: float) -> tuple[bytes, float]:
    """Returns data and the time at which it came: `since` if it was there before this call. At the end: no data."""
    try:
        return source.recv(_PIECE, socket.MSG_DONTWAIT), since
    except BlockingIOError:
        pass
    except OSError:
        return b"", since
    try:
        data = source.recv(_PIECE)
    except OSError:
        data = b""
    return data, time.monotonic()


def _send(target: socket.socket, sent: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while True:
        arrival, data = sent.get()
        time.sleep(max(0.0, arrival - time.monotonic()))
        try:
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
        except OSError:
            return


def _serve(listening: socket.socket, address: str, there: _Direction, back: _Direction) -> None:
    host, _, port = address.rpartition(":")
    while True:
        one = listening.accept()[0]
        try:
            other = socket.create_connection((host, int(port)))
        except OSError:
            one.close()
            continue
        for end in (one, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there.relay(one, other)
        back.relay(other, one)


def main() -> None:
    delay, rate = map(float, sys.argv[1:3])
    counts = _shared_counts(pathlib.Path(sys.argv[3]))
    ports = []
    for address in sys.argv[4:]:
        listening = socket.create_server(("127.0.0.1", 0))
        ports.append(listening.getsockname()[1])
        directions = [_Direction(delay, rate, counts, counter) for counter in range(2)]
        threading.Thread(target=_serve, args=(listening, address, *directions), daemon=True).start()
    print(*ports, flush=True)
    while os.read(0, 1):
        pass


def _shared_counts(path: pathlib.Path) -> memoryview:
    """Returns the counters of a new file, which other processes read while they change."""
    path.write_bytes(bytes(2 * struct.calcsize(_FORMAT)))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast(_FORMAT)


if __name__ == "__main__":
    main()
