"""A relay for the connections to other workers, which delays them and limits their rate; a process of its own.

    python -m bench.relay DELAY RATE HOST:PORT …

It prints the ports at which it listens, one for each address, and ends with its standard input. Linux's `netem` would
do the same, but is missing in many kernels, and needs root. One process moves about 1 GB/s; the figures of a link with
a higher rate are those of the relay.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_PIECE = 1 << 16


class Relay:
    """Processes that relay a worker's connections to the others.

    Args:
        delay: seconds that data takes in each direction.
        rate: bytes per second in each direction of a connection; 0: unlimited.
    """

    def __init__(self, delay: float, rate: float) -> None:
        self._delay, self._rate = delay, rate
        self._process: subprocess.Popen[str] | None = None

    def through(self, addresses: Sequence[str], index: int) -> list[str]:
        """Returns the addresses of all workers as worker `index` has to use them."""
        others = [address for k, address in enumerate(addresses) if k != index]
        command = [sys.executable, "-m", "bench.relay", str(self._delay), str(self._rate), *others]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None, "requested above"
        ports = iter(self._process.stdout.readline().split())
        return [a if k == index else f"127.0.0.1:{next(ports)}" for k, a in enumerate(addresses)]


def _serve(listening: socket.socket, address: str, delay: float, rate: float) -> None:
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
        for source, target in ((one, other), (other, one)):
            sent: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=_receive, args=(source, sent, delay, rate), daemon=True).start()
            threading.Thread(target=_send, args=(target, sent), daemon=True).start()


def _receive(source: socket.socket, sent: queue.SimpleQueue[tuple[float, bytes]], delay: float, rate: float) -> None:
    """Puts data with the time of its arrival into a queue; waits as long as the link is busy with it."""
    free = time.monotonic()
    while True:
        try:
            data = source.recv(_PIECE)
        except OSError:
            data = b""
        if rate:
            free = max(free, time.monotonic()) + len(data) / rate
            time.sleep(max(0.0, free - time.monotonic()))
        sent.put((time.monotonic() + delay, data))
        if not data:
            return


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


def main() -> None:
    delay, rate = map(float, sys.argv[1:3])
    ports = []
    for address in sys.argv[3:]:
        listening = socket.create_server(("127.0.0.1", 0))
        ports.append(listening.getsockname()[1])
        threading.Thread(target=_serve, args=(listening, address, delay, rate), daemon=True).start()
    print(*ports, flush=True)
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    main()
