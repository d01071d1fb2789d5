"""`python -m autodist.cli.checking.measure_links`: measures the links between machines through TensorFlow's transport.

The chief reads the order from standard input, and starts this module on the other workers like any script. It writes
a line for each pair as soon as it is measured.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass

import tensorflow as tf

from autodist.cli.checking.links import ENVIRONMENT, MeasuredLink, MeasureOrder
from autodist.cluster.coordinator import Coordinator
from autodist.cluster.script import Script
from autodist.cluster.servers import JOB, start_server, wait_until_listening
from autodist.cluster.worker_client import WorkerClient
from autodist.errors import AutoDistError
from autodist.resources import ResourceSpec

SIZES = tuple(1 << power for power in (20, 23, 26))
"""Bytes of a transfer; a larger size is measured only if the smaller one took little time."""

_ENOUGH = 0.1
"""Seconds of a transfer that suffice to measure the bandwidth."""

_RUN_LIMIT = 20_000
"""Milliseconds of one transfer."""

_FEW_TURNS, _MANY_TURNS = 2, 22
"""Numbers of round trips in a run; the difference of the two runs cancels the fixed cost of a run."""

_RUNS = 3
"""Number of runs; the fastest counts, since the others were delayed."""


def main() -> int:
    logging.getLogger("autodist").setLevel(logging.ERROR)  # the check itself reports open ports
    worker_client = WorkerClient.from_environment()
    if worker_client is None:
        return _measure_all(MeasureOrder.model_validate_json(sys.stdin.buffer.read()))
    start_server(worker_client.addresses, worker_client.index, worker_client.reserved_port)
    worker_client.wait_for_end()
    return 0


def _measure_all(order: MeasureOrder) -> int:
    spec = ResourceSpec.from_payload(order.spec)
    script = Script(("-P", "-m", "autodist.cli.checking.measure_links"), "/", None, None, tuple(ENVIRONMENT.items()))
    coordinator = Coordinator(spec, lambda failure: None, script)
    try:
        coordinator.prepare()
        coordinator.start(b"")
        server = start_server(coordinator.addresses, 0, coordinator.reserved_port)
        wait_until_listening(coordinator.addresses, spec.start_timeout, coordinator.check)
        names = [worker.name for worker in spec.workers]
        deadline = time.monotonic() + order.seconds
        for one, other in order.pairs:
            if time.monotonic() > deadline:
                break
            coordinator.check()
            link = _measure(server.target, names.index(one), names.index(other))
            _write(link.named(one, other).model_dump_json())
        coordinator.finish()
    except AutoDistError as error:
        coordinator.abort("measuring failed")
        sys.stderr.write(f"{error}\n")
        return 1
    except BaseException:
        coordinator.abort("measuring was interrupted")
        raise
    return 0


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _measure(target: str, one: int, other: int) -> MeasuredLink:
    """Measures the link between two workers in both directions, from a session on the chief."""
    with tf.Graph().as_default():
        turns = [_forth_and_back(one, other, count) for count in (_FEW_TURNS, _MANY_TURNS)]
        there = [_transfer(one, other, size) for size in (1, *SIZES)]
        back = [_transfer(other, one, size) for size in (1, *SIZES)]
        try:
            with tf.compat.v1.Session(target, config=_config(one, other)) as session:
                few, many = (_seconds(session, turn) for turn in turns)
                round_trip = max(many - few, 0.0) / (_MANY_TURNS - _FEW_TURNS)
                return MeasuredLink(
                    round_trip=round_trip, there=_bandwidth(session, there), back=_bandwidth(session, back)
                )
        except tf.errors.OpError as error:
            return MeasuredLink(problem=f"TensorFlow could not send there: {error.message.splitlines()[0]}")


def _config(one: int, other: int) -> tf.compat.v1.ConfigProto:
    """Returns the config of a session with two workers and the chief, without graph rewrites."""
    config = tf.compat.v1.ConfigProto(device_filters=[f"/job:{JOB}/task:{task}" for task in {0, one, other}])
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    return config


def _device(task: int) -> str:
    return f"/job:{JOB}/task:{task}/device:CPU:0"


@dataclass(frozen=True)
class _Transfer:
    """A transfer to be timed.

    Attributes:
        prepare: creates the bytes.
        run: sends them.
    """

    prepare: tf.Operation
    run: tf.Operation


def _forth_and_back(one: int, other: int, count: int) -> _Transfer:
    """Sends one byte from one worker to the other and back, `count` times."""
    prepare, value = _bytes(one, 1)
    for task in (other, one) * count:
        with tf.device(_device(task)):
            value = tf.identity(value)
    return _Transfer(prepare, value.op)


def _transfer(source: int, target: int, size: int) -> _Transfer:
    """Sends `size` bytes from one worker to another."""
    prepare, value = _bytes(source, size)
    with tf.device(_device(target)):
        return _Transfer(prepare, tf.identity(value).op)


def _bytes(task: int, size: int) -> tuple[tf.Operation, tf.Tensor]:
    """Returns the initializer and value of bytes in a worker's memory; a variable provides them without a copy."""
    with tf.device(_device(task)), tf.compat.v1.variable_scope(f"w{task}", reuse=tf.compat.v1.AUTO_REUSE):
        zeros = tf.compat.v1.zeros_initializer()
        variable = tf.compat.v1.get_variable(f"b{size}", [size], tf.uint8, zeros, trainable=False, use_resource=True)
        return variable.initializer, variable.read_value()


def _bandwidth(session: tf.compat.v1.Session, transfers: list[_Transfer]) -> float:
    """Returns bytes per second, by the largest transfer that was measured."""
    least = _seconds(session, transfers[0])
    rate = 0.0
    for size, transfer in zip(SIZES, transfers[1:], strict=True):
        taken = _seconds(session, transfer)
        rate = size / max(taken - least, 1e-6)
        if taken > _ENOUGH:
            break
    return rate


def _seconds(session: tf.compat.v1.Session, transfer: _Transfer) -> float:
    """Returns the shortest duration of a run, without the first one, which sets up the connection."""
    options = tf.compat.v1.RunOptions(timeout_in_ms=_RUN_LIMIT)
    for first in (transfer.prepare, transfer.run):
        session.run(first, options=options)
    best = float("inf")
    for _ in range(_RUNS):
        began = time.perf_counter()
        session.run(transfer.run, options=options)
        best = min(best, time.perf_counter() - began)
        if best > _ENOUGH:
            break
    return best


if __name__ == "__main__":
    sys.exit(main())
