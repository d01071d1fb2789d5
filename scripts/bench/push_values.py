"""Measures the chief's cost of broadcasting its values, before the first step or after `set_weights`.

    python -m bench.push_values 2 16

All workers are in this process, each with a server of its own. Prints, as JSON, two numbers for each number of workers:
the seconds of processor time of the chief's script, and the copies of the values that cross the busiest worker's link.
"""

from __future__ import annotations

import argparse
import collections
import json
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.runtime.batched_transfers import Listing
from autodist.runtime.broadcast import VariableBroadcast
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import StoredVariable, TrackedVariable

VARIABLES, SIZE = 200, 4096
"""As many variables as ResNet50 has with Adam, but smaller: the links show the costs that grow with their bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int, nargs="+")
    figures = {workers: (_seconds(workers), _times(workers)) for workers in parser.parse_args().workers}
    print(json.dumps(figures))


def _seconds(workers: int) -> float:
    """Returns the processor time of the broadcasting thread; the other workers have threads of their own."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
    cluster = tf.train.ClusterSpec({"worker": addresses})
    servers = [tf.distribute.Server(cluster, "worker", k) for k in range(workers)]
    graph_runners = [
        GraphRunners(server.target, tf.compat.v1.ConfigProto(), k, workers) for k, server in enumerate(servers)
    ]

    def home(worker: int, dtype: tf.DType, device: str | None = None) -> str:
        return cpu_of(worker, workers)

    everywhere = Holder.whole([SIZE], Group.of_workers(range(workers)))
    values = [
        TrackedVariable(tf.Variable(np.full([SIZE], k, np.float32)), f"v{k}", everywhere) for k in range(VARIABLES)
    ]
    others = [VariableBroadcast(graph_runner, k, workers, home) for k, graph_runner in enumerate(graph_runners) if k]
    chief, pieces = (
        VariableBroadcast(graph_runners[0], 0, workers, home),
        VariableSlices(graph_runners[0].control, 0, workers, home),
    )
    began = time.thread_time()
    listing = Listing.of([value.stored for value in values], range(workers))
    heard = listing.encode()
    taking = [threading.Thread(target=lambda one=one: one.receive(Listing.decode(heard))) for one in others]
    spent = time.thread_time() - began
    for one in taking:
        one.start()
    began = time.thread_time()
    chief.send(listing, lambda k: np.asarray(values[k].read()))
    pieces.set(values, workers=[0])
    spent += time.thread_time() - began
    for one in taking:
        one.join()
    return spent


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _times(workers: int) -> float:
    """Returns the number of copies of the values that the busiest worker's link carries."""
    holder = Holder.whole((1 << 20,), Group.all_workers(workers))
    listing = Listing.of([StoredVariable(f"v{k}", tf.float32, (1 << 20,), holder) for k in range(1000)], range(workers))
    sizes = [sum(listing.parts[one.part].byte_size for one in transfer.slices) for transfer in listing.transfers]
    sent: collections.Counter[int] = collections.Counter()
    for transfer, size in zip(listing.transfers, sizes, strict=True):
        by = listing.present if transfer.to is None else (0,)
        sent.update({w: size * (len(listing.after(w)) if transfer.to is None else 1) for w in by})
    return max(sent.values()) / sum(part.byte_size for part in listing.parts)


if __name__ == "__main__":
    main()
