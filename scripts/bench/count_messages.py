"""Counts the messages and bytes that a worker's step sends, from its rewritten graph. Runs as a separate process.

For each requested builder, the step is rewritten for the chief and for the next worker of a cluster of the given size.
No step runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from autodist import ResourceSpec
from autodist.capture.function import capture_function
from autodist.cli.planned_step import held_bytes
from autodist.graph.inboxes import inboxes_of
from autodist.graph.step import CapturedStep, Step
from autodist.kernels import Context, rewrite
from autodist.proto import strategy_pb2
from autodist.strategies import (
    call_builder,
    check_strategy,
    find_builder,
    link_bytes,
    resolve_specs,
    sums_by_worker,
    synced_variables,
)
from bench.models import IDS, TASKS
from bench.on_paper import Assumed, Counts

_TASK = re.compile(r"/task:(\d+)")
LOOKED_AT = 2
"""The chief and one other worker: all others differ from that one only in the variables that they own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=_STEPS)
    parser.add_argument("workers", type=int, nargs="+")
    parser.add_argument("--builder", action="append", required=True)
    arguments = parser.parse_args()
    step = _STEPS[arguments.model]()
    rows = TASKS["embedding"].batch * IDS if arguments.model == "embedding" else 0
    found = {
        name: {workers: dataclasses.asdict(counts_of(step, name, workers, rows)) for workers in arguments.workers}
        for name in arguments.builder
    }
    print(json.dumps(found))


def counts_of(step: CapturedStep, builder: str, workers: int, rows: int) -> Counts:
    """Returns the messages of the busiest of the examined workers, and the bytes of the busiest of all workers.

    Args:
        step: a captured step.
        builder: its name.
        workers: number of workers; each on a machine of its own, with one replica.
        rows: rows of a sparse variable that each worker touches in a step.
    """
    nodes = [
        {"address": f"10.0.{k // 256}.{k % 256}", "cpus": [0], "chief": not k, "network_bandwidth": Assumed.gigabits}
        for k in range(workers)
    ]
    spec = ResourceSpec.from_dict({"nodes": nodes})
    strategy = call_builder(find_builder(builder)(), step, spec)
    check_strategy(strategy, step, spec)
    strategy = resolve_specs(strategy, step, spec)
    seen = [_crossing(rewrite(step, Context(strategy, k)), k) for k in range(min(LOOKED_AT, workers))]
    return Counts(
        bytes=_most_bytes(step, strategy, workers, rows),
        messages=max(messages for messages, _ in seen),
        peers=max(peers for _, peers in seen),
        held=max(held_bytes(step, strategy, workers)),
    )


def _most_bytes(step: CapturedStep, strategy: strategy_pb2.Strategy, workers: int, rows: int) -> int:
    """Returns the bytes over the busiest link of a machine, in the busier direction."""
    synced = {variable.name: variable for variable in synced_variables(step)}
    total: dict[tuple[int, int], int] = {}
    for node in strategy.nodes:
        for link, count in link_bytes(synced[node.variable], node, strategy.graph_config, rows).items():
            total[link] = total.get(link, 0) + count
    sent, received = sums_by_worker(total, workers)
    return max(*sent, *received)


def _crossing(step: Step, worker: int) -> tuple[int, int]:
    """Returns the number of tensors that one worker sends, or reads from others, and the number of its peers."""
    nodes = {node.name: node for node in step.graph_def.node}
    task = {name: _task(node.device, worker) for name, node in nodes.items()}
    crossing = {
        (tensor, task[node.name])
        for node in nodes.values()
        for tensor, producer in _inputs(node)
        if task[producer] != task[node.name]
    }
    for node in nodes.values():
        if node.op == "QueueEnqueueV2":
            (_, queue), *message = _inputs(node)
            reader = int(nodes[queue].attr["shared_name"].s.decode().rpartition("/")[2])
            crossing |= {(tensor, reader) for tensor, _ in message if reader != worker}
    sources = {inbox.source for inbox in inboxes_of(step.graph_def).values()}
    return len(crossing), len(({to for _, to in crossing} | sources | set(task.values())) - {worker})


def _inputs(node: tf.compat.v1.NodeDef) -> Iterator[tuple[str, str]]:
    """Yields the data inputs of a node, each with the node that produces it; control inputs are left out."""
    for name in node.input:
        if not name.startswith("^"):
            yield name, name.partition(":")[0]


def _task(device: str, default: int) -> int:
    found = _TASK.search(device)
    return int(found[1]) if found else default


def _resnet50() -> CapturedStep:
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    model.compile("adam", loss="sparse_categorical_crossentropy")
    specs = (tf.TensorSpec([None, 64, 64, 3], tf.float32), tf.TensorSpec([None], tf.int32))
    return capture_function(lambda x, y: model.train_step((x, y)), specs, (0, 0)).step


def _embedding() -> CapturedStep:
    model = TASKS["embedding"].build()
    model.compile("sgd", loss=keras.losses.BinaryCrossentropy(from_logits=True))
    specs = (tf.TensorSpec([None, IDS], tf.int32), tf.TensorSpec([None, 1], tf.float32))
    return capture_function(lambda x, y: model.train_step((x, y)), specs, (0, 0)).step


_STEPS: dict[str, Callable[[], CapturedStep]] = {"resnet50": _resnet50, "embedding": _embedding}

if __name__ == "__main__":
    main()
