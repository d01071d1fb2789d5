"""TensorFlow's servers in the workers of a run."""

from __future__ import annotations

import logging
import socket
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


def test_taken_port_is_named(caplog: pytest.LogCaptureFixture) -> None:
    reserved_port = reserve_port(None)
    port = reserved_port.port
    reserved_port.release()
    taken = socket.create_server(("", port))
    words = pytest.raises(ClusterError, match=f"Worker 0: TensorFlow's server cannot listen on 10.9.9.9:{port}")
    with taken, caplog.at_level(logging.WARNING, "autodist"), words:
        start_server([f"10.9.9.9:{port}"], 0, reserved_port)
    assert "without authentication" in caplog.text


def test_servers_that_do_not_listen_are_named() -> None:
    reserved_port = reserve_port(None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = f"127.0.0.1:{server.getsockname()[1]}"
        silent = f"127.0.0.1:{reserved_port.port}"
        with pytest.raises(ClusterError, match=f"No server listens on {silent} after"):
            wait_until_listening([listening, silent], 0.2)
        wait_until_listening([listening], 0.2)
    reserved_port.release()


def test_check_ends_the_wait() -> None:
    reserved_port = reserve_port(None)

    def check() -> None:
        raise KeyError("a worker failed")

    with pytest.raises(KeyError, match="a worker failed"):
        wait_until_listening([f"127.0.0.1:{reserved_port.port}"], 60, check)
    reserved_port.release()
