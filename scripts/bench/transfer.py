"""Time to transfer the bytes of a step between processes that do nothing else."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from itertools import permutations

import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.graph.inboxes import Inbox, queue_of
from autodist.runtime.inbox_loops import InboxLoops
from autodist.runtime.reserved_threads import ReservedThreads
from bench.jobs import INBOX_LOOP

LISTEN_LIMIT = 60.0
"""Time limit in seconds until all processes listen."""
CLOSE_LIMIT = 5.0
"""Time limit in seconds for the end of the inbox loops."""


def transfer(
    workers: int, index: int, sent_bytes: int, transport: str, config: tf.compat.v1.ConfigProto
) -> Callable[[], float]:
    """Returns one process's function that sends its share to each other process, and waits for theirs.

    Everything that a process sends to another one is one tensor.

    Args:
        workers: number of processes; their addresses are in `TF_CONFIG`.
        index: the index of this process.
        sent_bytes: bytes that all of them together send in a step.
        transport: one of `jobs.TRANSPORTS`.
        config: the config of the session.
    """
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    server = tf.distribute.Server(cluster, "worker", index, config=config)
    _wait_until_listening(cluster["worker"])
    elements = max(1, round(sent_bytes / (workers * (workers - 1)) / tf.float32.size))
    pairs = [(source, to) for source, to in permutations(range(workers), 2) if index in (source, to)]
    messages = {pair: _message(*pair, elements) for pair in pairs}
    uses_loop = transport == INBOX_LOOP
    with tf.Graph().as_default() as graph:
        effects = [_end(to, message, index, workers, uses_loop) for (_, to), message in messages.items()]
        session = tf.compat.v1.Session(server.target, graph=graph, config=config)
    if uses_loop:
        loops = InboxLoops(
            index, workers, lambda graph: tf.compat.v1.Session(server.target, graph=graph), ReservedThreads()
        )
        loops.start(message for (_, to), message in messages.items() if to == index)
        atexit.register(loops.close, CLOSE_LIMIT)
    run = session.make_callable(effects)

    def step() -> float:
        run()
        return 0.0

    return step


def _message(source: int, to: int, elements: int) -> Inbox:
    return Inbox(f"from_{source}_to_{to}", source, (tf.float32,), (tf.TensorShape([elements]),), 1)


def _end(to: int, message: Inbox, mine: int, workers: int, uses_loop: bool) -> tf.Operation:
    """Returns one process's op for one pair: it sends, or it waits for the data."""
    place = cpu_of(mine if uses_loop else to, workers)
    queue = queue_of(message, place)
    with tf.device(cpu_of(mine, workers)):
        if mine == to:
            return queue.dequeue().op
        # Computed in each step, like gradients: a constant would be folded, and only copied.
        content = tf.random.stateless_uniform([1], [0, 1]) + tf.zeros(queue.shapes[0])
    with tf.device(place):
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
