"""Memory and sent bytes of this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from autodist.runtime.process_usage import SentBytes, peak_memory
from tests.cluster.runs import within

SIZE = 300_000


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def exchange(source: socket.socket, target: socket.socket) -> None:
    source.sendall(b"x" * SIZE)
    left = SIZE
    while left:
        left -= len(target.recv(left))


def test_the_peak_contains_memory_that_is_free_again() -> None:
    before = peak_memory()
    block = np.ones(200 << 20, np.uint8)
    assert before is not None and block.sum()
    del block
    after = peak_memory()
    assert after is not None and after >= 200 << 20


def test_bytes_count_on_both_sides_of_connections_of_these_ports_alone() -> None:
    with connection() as (one, other), connection() as (third, fourth):
        sent = SentBytes([other.getsockname()[1]])
        exchange(one, other)
        exchange(other, one)
        exchange(third, fourth)
        assert within(10, lambda: (sent.now() or 0) >= 2 * SIZE)
        assert sent.now() in (2 * SIZE, 2 * SIZE + 1)  # Linux counts the SYN of a connection that it has begun


def test_a_closed_connection_keeps_its_count_and_a_new_one_adds_to_it() -> None:
    with connection() as (one, other):
        port = other.getsockname()[1]
        sent = SentBytes([port])
        exchange(one, other)
        assert within(10, lambda: (sent.now() or 0) >= SIZE)
    first = sent.now()
    assert first is not None and SIZE <= first <= SIZE + 1
    assert sent.now() == first


def test_without_a_connection_the_count_is_not_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert SentBytes([server.getsockname()[1]]).now() is None
