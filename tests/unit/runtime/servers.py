"""TensorFlow servers of several workers in one process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import tensorflow as tf

from autodist.runtime.graph_runner import GraphRunners

LIMIT = 60.0
"""Seconds for anything that is not expected to block."""


def start_servers(workers: int) -> list[str]:
    """Returns the targets of new servers, one for each worker; they run until the process ends."""
    sockets = [socket.socket() for _ in range(workers)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    cluster = tf.train.ClusterSpec({"worker": addresses})
    return [tf.distribute.Server(cluster, "worker", k).target for k in range(workers)]


@contextlib.contextmanager
def running(targets: Sequence[str]) -> Iterator[list[GraphRunners]]:
    """Context of the graph runners of all workers, which must end within the limit."""
    config, workers = tf.compat.v1.ConfigProto(), len(targets)
    made = [GraphRunners(target, config, worker, workers) for worker, target in enumerate(targets)]
    yield made
    for one in made:
        assert one.inbox_loops.close(LIMIT)
        one.close(LIMIT)
