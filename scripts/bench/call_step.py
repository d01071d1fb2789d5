"""Measures the processor time of calls of a step of one dense layer: python -m bench.call_step WAY [REPLICAS]."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist import AutoDist, ResourceSpec

v1 = tf.compat.v1
CALLS, ROUNDS = 300, 3
STEPS_PER_EXECUTION, STEPS = 10, 1500
EXAMPLES, FEATURES, CLASSES = 16, 32, 10
RATE = 0.01


def _data(examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(examples, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, examples, np.int32)


def _model() -> keras.Sequential:
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])


def _step() -> Callable[..., Any]:
    model, optimizer = _model(), keras.optimizers.SGD(RATE)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    return step


def _function(ad: AutoDist | None) -> Callable[[], Any]:
    x, y = _data()
    if ad is None:
        plain = tf.function(_step())
        return lambda: plain(x, y)
    with ad.scope():
        distributed = ad.function(_step())
    return lambda: distributed(x, y)


def _session(ad: AutoDist | None) -> Callable[[], Any]:
    graph, (x, y) = tf.Graph(), _data()

    def built() -> tuple[Any, Any]:
        features, labels = v1.placeholder(tf.float32, [None, FEATURES]), v1.placeholder(tf.int32, [None])
        weight, bias = v1.get_variable("weight", [FEATURES, CLASSES]), v1.get_variable("bias", [CLASSES])
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=features @ weight + bias)
        loss = tf.reduce_mean(each)
        return [loss, v1.train.GradientDescentOptimizer(RATE).minimize(loss)], {features: x, labels: y}

    with graph.as_default():
        if ad is None:
            (fetches, feeds), session = built(), v1.Session()
        else:
            with ad.scope():
                (fetches, feeds), session = built(), ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
    return lambda: session.run(fetches, feeds)


def _fit(ad: AutoDist | None) -> Callable[[], Any]:
    model, (x, y) = _model(), _data(EXAMPLES * STEPS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with nullcontext() if ad is None else ad.scope():
        model.compile(keras.optimizers.SGD(RATE), loss, steps_per_execution=STEPS_PER_EXECUTION)
    return lambda: model.fit(x, y, EXAMPLES, verbose=0, shuffle=False)


WAYS: dict[str, tuple[Callable[[AutoDist | None], Callable[[], Any]], int, int]] = {
    "function": (_function, CALLS, 1),
    "session": (_session, CALLS, 1),
    "fit": (_fit, 1, STEPS),
}
"""For each way: the function that makes the call, the calls timed together, and the steps of each call."""


def _measure(call: Callable[[], Any], calls: int) -> float:
    """Returns the seconds of processor time per call, over all threads: the minimum of some rounds."""
    for _ in range(calls):
        call()
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            call()
        rounds.append((time.process_time() - began) / calls)
    return min(rounds)


def main() -> None:
    """Prints the microseconds of processor time that a step takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("replicas", nargs="?", type=int, default=0, help="0: the script alone")
    arguments = parser.parse_args()
    make, calls, steps = WAYS[arguments.way]
    ad = None
    if arguments.replicas:
        nodes = [{"address": "localhost", "cpus": list(range(arguments.replicas))}]
        ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes}))
    print(json.dumps(_measure(make(ad), calls) / steps * 1e6))


if __name__ == "__main__":
    main()
