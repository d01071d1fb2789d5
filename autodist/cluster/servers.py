"""TensorFlow's servers: one in each worker's process; all listen before any session opens."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autodist.cluster.addresses import split_host_and_port
from autodist.cluster.ports import ReservedPort, leave_listening_to_this_process
from autodist.cluster.timeouts import Stopwatch
from autodist.errors import ClusterError

if TYPE_CHECKING:
    import tensorflow as tf

JOB = "worker"
"""The job of all workers' servers, as in "/job:worker/task:0"."""

_RETRY_INTERVAL, _CONNECT_LIMIT = 0.05, 1.0
_ANSWER_LIMIT, _MAX_RETRY_INTERVAL = 5.0, 0.5


def start_server(
    addresses: Sequence[str], index: int, reserved_port: ReservedPort, config: tf.compat.v1.ConfigProto | None = None
) -> tf.distribute.Server:
    """Starts this process's server.

    Its port stays in use until the process ends: TensorFlow's servers cannot be stopped.

    Args:
        addresses: "host:port" of all workers' servers, as this worker reaches them.
        index: index of this worker.
        reserved_port: its port, as in `Coordinator.reserved_port` or `WorkerClient.reserved_port`; this function
            releases it.
        config: configuration of the server's devices and threads.

    Raises:
        ClusterError: the server cannot bind its port.
    """
    import tensorflow as tf

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


def wait_until_listening(
    addresses: Sequence[str], timeout: float, check: Callable[[], None] | None = None, names: Sequence[str] = ()
) -> None:
    """Waits until every server answers connections; a session opened earlier may fail much later.

    Args:
        addresses: "host:port" of all workers' servers.
        timeout: timeout in seconds of a `Stopwatch`.
        check: called between attempts; raises an error to end the wait (the server of a failed worker never listens).
        names: names of the workers for messages, since addresses may be those of forwards.

    Raises:
        ClusterError: names the servers that do not listen after that time.
    """
    stopwatch, waited = Stopwatch(_CONNECT_LIMIT), 0.0
    remaining = list(addresses)
    while remaining:
        for address in list(remaining):
            if _answers(address):
                remaining.remove(address)
            if check is not None:
                check()
            waited = stopwatch.read()
        if remaining and waited >= timeout:
            named = dict(zip(addresses, (f" ({name})" for name in names), strict=False))
            places = ", ".join(address + named.get(address, "") for address in remaining)
            raise ClusterError(
                f"No server listens on {places} after {timeout:g} s. The worker there may not have "
                "reached its first step, in which the servers start: then raise `start_timeout`. Or a firewall "
                "between the machines may drop connections."
            )
        # Through a forward, each attempt is a message to another machine.
        time.sleep(min(_MAX_RETRY_INTERVAL, max(_RETRY_INTERVAL, waited / 20)))


def _answers(address: str) -> bool:
    """Returns True if a server answers: it sends its settings at once, as every HTTP/2 server.

    A connection alone proves nothing, since a forward accepts it before it tries to reach the server.
    """
    try:
        with socket.create_connection(split_host_and_port(address), timeout=_CONNECT_LIMIT) as connection:
            connection.settimeout(_ANSWER_LIMIT)
            return bool(connection.recv(1))
    except OSError:
        return False
