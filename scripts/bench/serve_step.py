"""Times a small step on many workers whose servers share one process: processor time for each worker and step.

Runs as a separate process. Data between workers cross the loopback interface, as between machines; nothing else is
shared.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from autodist import ResourceSpec
from autodist.capture.function import CapturedFunction, capture_function
from autodist.graph.inboxes import inboxes_of
from autodist.graph.names import node_of
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, Step
from autodist.kernels import Context, rewrite
from autodist.runtime.graph_runner import GraphRunners
from autodist.strategies import AllReduce, check_strategy, resolve_specs

EXAMPLES_EACH, WIDTH = 4, 32
WARMUP = 5
ENDING = 10.0
"""Seconds for the end of the loops that bring messages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", type=int)
    parser.add_argument("--spec", default="AUTO", help="all_reduce_spec")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    captured = _captured()
    spec = _machines(arguments.workers)
    strategy = AllReduce(all_reduce_spec=arguments.spec).build(captured.step, spec)
    check_strategy(strategy, captured.step, spec)
    strategy = resolve_specs(strategy, captured.step, spec)
    items = [rewrite(captured.step, Context(strategy, worker)) for worker in range(arguments.workers)]
    graph_runners = [
        GraphRunners(server.target, _config(), worker, arguments.workers)
        for worker, server in enumerate(_servers(arguments.workers))
    ]
    steps = [
        _prepared(runners, item, captured, arguments.workers)
        for runners, item in zip(graph_runners, items, strict=True)
    ]
    _run(steps, WARMUP)
    start = time.process_time()
    _run(steps, arguments.steps)
    spent = (time.process_time() - start) / arguments.steps / arguments.workers
    for runners in graph_runners:
        runners.inbox_loops.close(ENDING)
    called = [_called(item, worker) for worker, item in enumerate(items)]
    print(json.dumps({"seconds": spent, "called": max(called)}))


def _captured() -> CapturedFunction:
    model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    model.compile("sgd", loss="mse")
    specs = (tf.TensorSpec([None, WIDTH], tf.float32), tf.TensorSpec([None, WIDTH], tf.float32))
    return capture_function(lambda x, y: model.train_step((x, y)), specs, (0, 0))


def _machines(workers: int) -> ResourceSpec:
    nodes = [{"address": f"10.0.{k // 256}.{k % 256}", "cpus": [0], "chief": not k} for k in range(workers)]
    return ResourceSpec.from_dict({"nodes": nodes})


def _servers(workers: int) -> Sequence[tf.distribute.Server]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{one.getsockname()[1]}" for one in held]})
    for one in held:
        one.close()
    config = _config()
    return [
        tf.distribute.Server(cluster, job_name="worker", task_index=k, protocol="grpc", config=config)
        for k in range(workers)
    ]


def _config() -> tf.compat.v1.ConfigProto:
    return tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


def _prepared(
    graph_runners: GraphRunners, step: Step, captured: CapturedFunction, workers: int
) -> Callable[[], object]:
    """Returns a step of one worker, with initialised variables."""
    graph_runner, prefix = graph_runners.add(step.graph_def)
    graph_runners.inbox_loops.start(inboxes_of(step.graph_def).values())
    present = {node.name for node in step.graph_def.node}
    values = {v.handle: s.numpy() for v, s in zip(captured.step.variables, captured.sources, strict=True)}
    with graph_runner.graph.as_default():
        for handle in values.keys() & present:
            resource = graph_runner.graph.get_tensor_by_name(f"{prefix}{handle}:0")
            graph_runner.session.run(tf.raw_ops.AssignVariableOp(resource=resource, value=values[handle]))
    graph_runner.session.run(
        [graph_runner.graph.get_operation_by_name(prefix + name) for name in step.initializers.values()]
    )
    feeds = {name: np.ones((EXAMPLES_EACH, WIDTH), np.float32) for name in captured.step.inputs}
    feeds |= {EXAMPLES: np.int64(EXAMPLES_EACH), ALL_EXAMPLES: np.int64(EXAMPLES_EACH * workers)}
    feeds = {name: value for name, value in feeds.items() if node_of(name) in present}
    outputs = [graph_runner.graph.get_tensor_by_name(prefix + name) for name in step.outputs]
    targets = [graph_runner.graph.get_operation_by_name(prefix + name) for name in step.targets]
    run = graph_runner.callable(outputs, targets, [prefix + name for name in feeds])
    return lambda: run(*feeds.values())


def _run(steps: Sequence[Callable[[], object]], count: int) -> None:
    """Runs `count` steps of all workers concurrently."""

    def repeat(step: Callable[[], object]) -> None:
        for _ in range(count):
            step()

    threads = [threading.Thread(target=repeat, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _called(step: Step, worker: int) -> int:
    """Returns the number of other workers on which a step runs nodes."""
    tasks = {tf.DeviceSpec.from_string(node.device).task for node in step.graph_def.node if node.device}
    return len(tasks - {None, worker})


if __name__ == "__main__":
    main()
