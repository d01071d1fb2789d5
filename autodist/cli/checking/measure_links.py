"""`python -m autodist.cli.checking.measure_links`: measures the links between machines through TensorFlow's transport.

The chief reads the order from standard input, and starts this module on the other workers like any script. It writes
a line for each pair as soon as it is measured.
"""

from __future__ import annotations

import logging
import sys
import time

import tensorflow as tf

from autodist.cli.checking.links import ENVIRONMENT, MeasuredLink, MeasureOrder
from autodist.cluster.coordinator import Coordinator
from autodist.cluster.script import Script
from autodist.cluster.script_client import ScriptClient
from autodist.cluster.servers import start_server, wait_until_listening
from autodist.errors import AutoDistError
from autodist.resources import ResourceSpec
from autodist.runs.measuring.link_probe import TimeLimits
from autodist.runs.measuring.network_probe import measure_pair

_RUN_LIMIT = 20.0
"""Seconds of one transfer."""


def main() -> int:
    logging.getLogger("autodist").setLevel(logging.ERROR)  # the check itself reports open ports
    worker_client = ScriptClient.from_environment()
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
            link = _measure(server.target, len(names), (names.index(one), names.index(other)), deadline)
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


def _measure(target: str, workers: int, pair: tuple[int, int], deadline: float) -> MeasuredLink:
    """Measures the link between two workers in both directions, from a session on the chief."""
    try:
        found = measure_pair(target, workers, pair, TimeLimits(_RUN_LIMIT, deadline))
    except tf.errors.OpError as error:
        return MeasuredLink(problem=f"TensorFlow could not send there: {error.message.splitlines()[0]}")
    return MeasuredLink(round_trip=found.round_trip, there=found.there, back=found.back)


if __name__ == "__main__":
    sys.exit(main())
