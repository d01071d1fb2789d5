"""Times the rewriting of a captured step, for so many replicas; a process of its own, since TensorFlow is imported."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence

import keras
import tensorflow as tf

from autodist import ResourceSpec
from autodist.capture.function import capture_function
from autodist.graph.item import GraphItem
from autodist.kernels import Context, rewrite
from autodist.strategies import AllReduce, check_strategy, resolve_specs

CAPTURED = {"resnet50": keras.applications.ResNet50, "mobilenet": keras.applications.MobileNetV2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CAPTURED)
    parser.add_argument("clusters", nargs="+", help="workers × replicas of each, as 2x1")
    parser.add_argument("--repeat", type=int, default=5)
    told = parser.parse_args()
    item = _captured(told.model)
    clusters = {name: [int(n) for n in name.split("x")] for name in told.clusters}
    seconds: dict[str, list[float]] = {name: [] for name in clusters}
    for _ in range(told.repeat):
        for name, cluster in clusters.items():
            seconds[name].append(_rewriting(item, cluster))
    print(json.dumps({"nodes": len(item.graph_def.node), "seconds": seconds}))


def _captured(name: str) -> GraphItem:
    model = CAPTURED[name](weights=None, input_shape=(64, 64, 3), classes=10)
    model.compile("adam", loss="sparse_categorical_crossentropy")
    specs = (tf.TensorSpec([None, 64, 64, 3], tf.float32), tf.TensorSpec([None], tf.int32))
    return capture_function(lambda x, y: model.train_step((x, y)), specs, (0, 0)).item


def _rewriting(item: GraphItem, cluster: Sequence[int]) -> float:
    """Seconds of the processor that the chief needs for the rewriting, strategy and import left out."""
    workers, replicas = cluster
    nodes = [{"address": "localhost", "cpus": list(range(workers * replicas)), "workers": workers}]
    spec = ResourceSpec.from_dict({"nodes": nodes})
    strategy = AllReduce().build(item, spec)
    check_strategy(strategy, item, spec)
    context = Context(resolve_specs(strategy), 0)
    gc.collect()
    start = time.thread_time()
    rewrite(item, context)
    return time.thread_time() - start


if __name__ == "__main__":
    main()
