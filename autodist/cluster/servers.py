"""TensorFlow's servers: one in each worker's process; all listen before any session opens."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autodist.cluster.addresses import is_loopback, split_host_and_port
from autodist.cluster.ports import ReservedPort, leave_listening_to_this_process
from autodist.cluster.timeouts import Stopwatch
from autodist.errors import ClusterError

if TYPE_CHECKING:
    import tensorflow as tf

JOB = "worker"
"""The job of all workers' servers, as in "/job:worker/task:0"."""

_log = logging.getLogger("autodist.cluster")
_RETRY_INTERVAL, _CONNECT_LIMIT = 0.05, 1.0


def start_server(
    addresses: Sequence[str], index: int, reserved_port: ReservedPort, config: tf.compat.v1.ConfigProto | None = None
) -> tf.distribute.Server:
    """Starts this process's server.

    Its port stays in use until the process ends: TensorFlow's servers cannot be stopped.

    Args:
        addresses: "host:port" of all workers' servers.
        index: index of this worker.
        reserved_port: its port, as in `Coordinator.reserved_port` or `WorkerClient.reserved_port`; this function
            releases it.
        config: configuration of the server's devices and threads.

    Raises:
        ClusterError: the server cannot bind its port.
    """
    import tensorflow as tf

    if index == 0 and not all(is_loopback(split_host_and_port(address)[0]) for address in addresses):
        _log.warning(
            "TensorFlow's servers listen on all network interfaces without authentication: anyone who reaches the "
            "ports of %s can run code there. Use a firewall that admits only the workers' machines.",
            ", ".join(addresses),
        )
    cluster = tf.train.ClusterSpec({JOB: list(addresses)})
    reserved_port.release()
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
        timeout: timeout in seconds of a `Stopwatch`.
        check: called between attempts; raises an error to end the wait (the server of a failed worker never listens).

    Raises:
        ClusterError: names the servers that do not listen after that time.
    """
    stopwatch, waited = Stopwatch(_CONNECT_LIMIT), 0.0
    remaining = list(addresses)
    while remaining:
        for address in list(remaining):
            if _accepts(address):
                remaining.remove(address)
            if check is not None:
                check()
            waited = stopwatch.read()
        if remaining and waited >= timeout:
            raise ClusterError(
                f"No server listens on {', '.join(remaining)} after {timeout:g} s. The worker there may not have "
                "reached its first step, in which the servers start: then raise `start_timeout`. Or a firewall "
                "between the machines may drop connections."
            )
        time.sleep(_RETRY_INTERVAL)


def _accepts(address: str) -> bool:
    try:
        with socket.create_connection(split_host_and_port(address), timeout=_CONNECT_LIMIT):
            return True
    except OSError:
        return False
