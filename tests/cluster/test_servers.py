"""TensorFlow's servers in the workers of a run."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autodist.cluster.ports import reserve_port
from autodist.cluster.servers import start_server, wait_until_listening
from autodist.errors import ClusterError
from tests.cluster.runs import Run

pytestmark = pytest.mark.processes

START = """
from autodist.cluster.servers import start_server, wait_until_listening
import tensorflow as tf
server = start_server({addresses}, {index}, {reserved_port})
wait_until_listening({addresses}, 60{check})
"""


def test_servers_of_all_workers_form_one_cluster(tmp_path: Path) -> None:
    chief = START.format(
        addresses="addresses", index="0", reserved_port="coordinator.reserved_port", check=", coordinator.check"
    )
    chief += """
with tf.Graph().as_default():
    parts = []
    for task in range(2):
        with tf.device(f"/job:worker/task:{task}"):
            parts.append(tf.constant(task + 1))
    total = tf.add_n(parts)
    with tf.compat.v1.Session(server.target) as session:
        print("TOTAL", session.run(total))
coordinator.finish()
"""
    worker = START.format(
        addresses="worker_client.addresses", index="index", reserved_port="worker_client.reserved_port", check=""
    )
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}
    with Run(tmp_path, chief, worker + "worker_client.wait_for_end()", spec) as run:
        assert run.wait(60) == 0, run.stderr
        run.assert_gone(0)
    assert "TOTAL 3" in run.stdout


def test_taken_port_is_named() -> None:
    reserved_port = reserve_port(None)
    port = reserved_port.port
    reserved_port.release()
    taken = socket.create_server(("", port))
    words = pytest.raises(ClusterError, match=f"Worker 0: TensorFlow's server cannot listen on 10.9.9.9:{port}")
    with taken, words:
        start_server([f"10.9.9.9:{port}"], 0, reserved_port)


def test_servers_that_do_not_answer_are_named() -> None:
    reserved_port = reserve_port(None)
    with answering_server(b"settings") as answering, answering_server(b"") as closing:
        silent = f"127.0.0.1:{reserved_port.port}"
        named = rf"No server listens on {closing} \(b\), {silent} \(c\) after"
        with pytest.raises(ClusterError, match=named):
            wait_until_listening([answering, closing, silent], 0.2, names="abc")
        wait_until_listening([answering], 0.2)
    reserved_port.release()


@contextlib.contextmanager
def answering_server(answer: bytes) -> Iterator[str]:
    """Yields the address of a server that sends an answer to each connection and closes it; a forward sends none."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the test has ended
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_check_ends_the_wait() -> None:
    reserved_port = reserve_port(None)

    def check() -> None:
        raise KeyError("a worker failed")

    with pytest.raises(KeyError, match="a worker failed"):
        wait_until_listening([f"127.0.0.1:{reserved_port.port}"], 60, check)
    reserved_port.release()
