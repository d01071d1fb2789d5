"""The relay of the bench delays connections, limits their rate together, counts their bytes, and ends."""

from __future__ import annotations

import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from bench.relay import Relay, relayed_bytes

SCRIPTS = pathlib.Path(__file__).resolve().parents[3] / "scripts"
LIMIT = 30.0


@contextmanager
def connections(relay: Relay, count: int = 1) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Yields pairs of the two ends of connections through a relay."""
    with socket.create_server(("127.0.0.1", 0)) as listening, closing(relay):
        addresses = ["127.0.0.1:0", f"127.0.0.1:{listening.getsockname()[1]}"]
        port = int(relay.through(addresses, 0)[1].rpartition(":")[2])
        pairs = []
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port), LIMIT)
            pairs.append((one, listening.accept()[0]))
        yield pairs
        for one, other in pairs:
            one.close()
            other.close()


def send(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    pair[0].sendall(bytes(size))
    left = size
    while left:
        left -= len(pair[1].recv(left))


@pytest.fixture(autouse=True)
def _in_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS)


def test_data_take_the_delay_in_each_direction(tmp_path: pathlib.Path) -> None:
    with connections(Relay(0.1, 0, tmp_path)) as [(one, other)]:
        start = time.monotonic()
        send((one, other), 1)
        send((other, one), 1)
        assert time.monotonic() - start >= 0.2


def test_connections_to_one_address_share_its_rate(tmp_path: pathlib.Path) -> None:
    with connections(Relay(0, 1e6, tmp_path), 2) as pairs:
        start = time.monotonic()
        sending = [threading.Thread(target=send, args=(pair, 100_000)) for pair in pairs]
        for thread in sending:
            thread.start()
        for thread in sending:
            thread.join(LIMIT)
        assert time.monotonic() - start >= 0.15


def test_idle_time_is_not_made_up_for(tmp_path: pathlib.Path) -> None:
    with connections(Relay(0, 1e6, tmp_path)) as [pair]:
        send(pair, 1)
        time.sleep(0.2)
        start = time.monotonic()
        send(pair, 100_000)
        assert time.monotonic() - start >= 0.05


def test_bytes_of_both_workers_relays_are_counted_by_direction(tmp_path: pathlib.Path) -> None:
    relays = [Relay(0, 0, tmp_path) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        for index, relay in enumerate(relays):
            addresses = [address, address]
            found = relay.through(addresses, index)
            assert found[index] == address
            with socket.create_connection(("127.0.0.1", int(found[1 - index].rpartition(":")[2])), LIMIT) as one:
                other = listening.accept()[0]
                send((one, other), 10 ** (index + 1))
                send((other, one), 10 ** (index + 3))
                other.close()
    assert relayed_bytes(tmp_path) == [10 + 10**4, 100 + 10**3]
    for relay in relays:
        relay.close()
        relay.close()
