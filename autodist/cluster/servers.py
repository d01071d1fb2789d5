"""TensorFlow's servers: one in each worker's process, all listening before any session opens."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autodist.cluster.addresses import is_loopback, split_host_and_port
from autodist.cluster.load_adjusted_clock import Stopwatch
from autodist.cluster.ports import PortHeld, leave_listening_to_this_process
from autodist.errors import ClusterError

if TYPE_CHECKING:
    import tensorflow as tf

JOB = "worker"
"""The job that all workers' servers belong to, as in "/job:worker/task:0"."""

_log = logging.getLogger("autodist.cluster")
_RETRY_INTERVAL, _CONNECT_LIMIT = 0.05, 1.0


def start_server(
    addresses: Sequence[str], index: int, held: PortHeld, config: tf.compat.v1.ConfigProto | None = None
) -> tf.distribute.Server:
    """Starts this process's server.

    Its port is free again only when the process has ended: TensorFlow's servers cannot be stopped.

    Args:
        addresses: "host:port" of all workers' servers.
        index: of this worker.
        held: the hold on its port (`Coordinator.held`, `WorkerClient.held`), released here.
        config: of the server's devices and threads.

    Raises:
        ClusterError: the server cannot bind its port.
    """
    import tensorflow as tf

    if index == 0 and not all(is_loopback(split_host_and_port(address)[0]) for address in addresses):
        _log.warning(
            "TensorFlow's servers listen on all network interfaces and ask for no password: whoever reaches the ports "
            "of %s can run code there. Let a firewall admit the workers' machines only.",
            ", ".join(addresses),
        )
    cluster = tf.train.ClusterSpec({JOB: list(addresses)})
    held.release()
    try:
        server = tf.distribute.Server(cluster, job_name=JOB, task_index=index, protocol="grpc", config=config)
    except tf.errors.OpError as error:
        raise ClusterError(
            f"Worker {index}: TensorFlow's server cannot listen on {addresses[index]}: {error.message}. If another "
            "process took the port in the meantime, run again; if it is always this port, give the node another `port`."
        ) from error
    leave_listening_to_this_process(split_host_and_port(addresses[index])[1])
    return server


def wait_until_listening(addresses: Sequence[str], timeout: float, check: Callable[[], None] | None = None) -> None:
    """Waits until every server accepts connections; a session opened earlier may fail much later.

    Args:
        addresses: "host:port" of all workers' servers.
        timeout: in seconds of a `Stopwatch`.
        check: called between tries; what it raises ends the wait (a worker that failed never will listen).

    Raises:
        ClusterError: some do not listen after that time; names them.
    """
    stopwatch, waited = Stopwatch(_CONNECT_LIMIT), 0.0
    silent = list(addresses)
    while silent:
        for address in list(silent):
            if _accepts(address):
                silent.remove(address)
            if check is not None:
                check()
            waited = stopwatch.read()
        if silent and waited >= timeout:
            raise ClusterError(
                f"No server listens on {', '.join(silent)} after {timeout:g} s. The worker there may still be on its "
                "way to the point where the servers start, its first step: then raise `start_timeout`. Or a firewall "
                "between the machines may drop connections."
            )
        time.sleep(_RETRY_INTERVAL)


def _accepts(address: str) -> bool:
    try:
        with socket.create_connection(split_host_and_port(address), timeout=_CONNECT_LIMIT):
            return True
    except OSError:
        return False
