"""Times the rewriting of a captured step for a number of replicas; a separate process because it imports TensorFlow."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from autodist import ResourceSpec
from autodist.capture.function import capture_function
from autodist.graph.step import CapturedStep
from autodist.kernels import Context, rewrite
from autodist.strategies import (
    AllReduce,
    BuildsStrategy,
    check_strategy,
    find_builder,
    registered_names,
    resolve_specs,
)

CAPTURED = {"resnet50": keras.applications.ResNet50, "mobilenet": keras.applications.MobileNetV2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CAPTURED)
    parser.add_argument("clusters", nargs="+", help="workers × replicas, for example 2x1")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--every-builder", action="store_true", help="use each builder, with every worker on its own machine"
    )
    arguments = parser.parse_args()
    step = _captured(arguments.model)
    clusters = {name: [int(n) for n in name.split("x")] for name in arguments.clusters}
    if arguments.every_builder:
        print(json.dumps(_by_builder(step, clusters, arguments.repeat)))
        return
    seconds: dict[str, list[float]] = {name: [] for name in clusters}
    for _ in range(arguments.repeat):
        for name, cluster in clusters.items():
            seconds[name].append(_rewriting(step, _one_machine(*cluster), AllReduce())[0])
    print(json.dumps({"nodes": len(step.graph_def.node), "seconds": seconds}))


def _captured(name: str) -> CapturedStep:
    model = CAPTURED[name](weights=None, input_shape=(64, 64, 3), classes=10)
    model.compile("adam", loss="sparse_categorical_crossentropy")
    specs = (tf.TensorSpec([None, 64, 64, 3], tf.float32), tf.TensorSpec([None], tf.int32))
    return capture_function(lambda x, y: model.train_step((x, y)), specs, (0, 0)).step


def _by_builder(step: CapturedStep, clusters: Mapping[str, Sequence[int]], repeat: int) -> dict[str, Any]:
    """Returns the seconds by builder and cluster, and the queues in the graph of a worker."""
    seconds: dict[str, dict[str, list[float]]] = {}
    queues: dict[str, dict[str, int]] = {}
    for builder in registered_names():
        if builder in ("Auto", "Pipeline"):  # makes plans of the others; needs one device per worker
            continue
        for name, (workers, replicas) in clusters.items():
            for _ in range(repeat):
                took, made = _rewriting(step, _machines(workers, replicas), find_builder(builder)())
                seconds.setdefault(builder, {}).setdefault(name, []).append(took)
            queues.setdefault(builder, {})[name] = len(made.graph_index.of_op("FIFOQueueV2"))
    return {"builders": seconds, "queues": queues}


def _one_machine(workers: int, replicas: int) -> ResourceSpec:
    nodes = [{"address": "localhost", "cpus": list(range(workers * replicas)), "workers": workers}]
    return ResourceSpec.from_dict({"nodes": nodes})


def _machines(workers: int, replicas: int) -> ResourceSpec:
    nodes = [{"address": f"10.0.{k // 256}.{k % 256}", "cpus": list(range(replicas))} for k in range(workers)]
    nodes[0]["chief"] = True
    return ResourceSpec.from_dict({"nodes": nodes})


def _rewriting(step: CapturedStep, spec: ResourceSpec, builder: BuildsStrategy) -> tuple[float, CapturedStep]:
    """Returns a worker's seconds of processor time for the rewriting, without strategy and import; and the rewritten
    step.

    The worker is the second one, which is like all others except the chief.
    """
    strategy = builder.build(step, spec)
    check_strategy(strategy, step, spec)
    context = Context(resolve_specs(strategy, step, spec), min(1, len(spec.workers) - 1) if len(spec.nodes) > 1 else 0)
    gc.collect()
    start = time.thread_time()
    made = rewrite(step, context)
    return time.thread_time() - start, made


if __name__ == "__main__":
    main()
