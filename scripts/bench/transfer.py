"""Time to transfer the bytes of a step between processes that do nothing else."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable

import tensorflow as tf

LISTEN_LIMIT = 60.0
"""Time limit in seconds until all processes listen."""


def transfer(workers: int, index: int, sent_bytes: int, config: tf.compat.v1.ConfigProto) -> Callable[[], float]:
    """Returns one process's function that sends its share to each other process, and waits for theirs.

    Like AutoDist's tensors, they travel through a queue on the receiver's server, but as one tensor in each direction.

    Args:
        workers: number of processes; their addresses are in `TF_CONFIG`.
        index: the index of this process.
        sent_bytes: bytes that all of them together send in a step.
        config: the config of the session.
    """
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    server = tf.distribute.Server(cluster, "worker", index, config=config)
    _wait_until_listening(cluster["worker"])
    elements = max(1, round(sent_bytes / (workers * (workers - 1)) / tf.float32.size))
    with tf.Graph().as_default() as graph:
        effects = [_through(source, to, index, elements) for source, to in _pairs(workers) if index in (source, to)]
        session = tf.compat.v1.Session(server.target, graph=graph, config=config)
    run = session.make_callable(effects)

    def step() -> float:
        run()
        return 0.0

    return step


def _pairs(workers: int) -> list[tuple[int, int]]:
    return [(source, to) for source in range(workers) for to in range(workers) if source != to]


def _through(source: int, to: int, mine: int, elements: int) -> tf.Operation:
    """Returns one process's op for one pair: it sends, or it waits for the data."""
    with tf.device(f"/job:worker/task:{to}/cpu:0"):
        queue = tf.queue.FIFOQueue(1, tf.float32, [[elements]], shared_name=f"from_{source}_to_{to}")
    if mine == to:
        with tf.device(f"/job:worker/task:{mine}/cpu:0"):
            return queue.dequeue().op
    with tf.device(f"/job:worker/task:{mine}/cpu:0"):
        # Computed in each step, like gradients: a constant would be folded, and only copied.
        content = tf.random.stateless_uniform([1], [0, 1]) + tf.zeros([elements])
    with tf.device(f"/job:worker/task:{to}/cpu:0"):
        return queue.enqueue(content)


def _wait_until_listening(addresses: Iterable[str]) -> None:
    """A session that is opened before its peers listen may fail much later."""
    end = time.monotonic() + LISTEN_LIMIT
    for address in addresses:
        host, port = address.rsplit(":", 1)
        while True:
            try:
                socket.create_connection((host, int(port)), LISTEN_LIMIT).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
