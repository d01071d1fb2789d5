"""TensorFlow servers of several workers in one process."""

from __future__ import annotations

import socket

import tensorflow as tf


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
