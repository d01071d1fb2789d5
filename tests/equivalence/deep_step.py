"""Trains a deep network repeatedly on one batch: python -m tests.equivalence.deep_step CLUSTER_FILE."""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

from autodist import AutoDist
from autodist.runtime.timeline import TRACED_RUN

LAYERS, WIDTH, BATCH = 8, 512, 1024

TRACES = 3
"""Of each worker, each of a step of its own."""


def main(cluster: str) -> None:
    ad = AutoDist(cluster)
    rng = np.random.default_rng(0)
    with ad.scope():
        layers = [
            tf.Variable((rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype("float32"), name=f"layer_{k}")
            for k in range(LAYERS)
        ]

        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                hidden = x
                for layer in layers:
                    hidden = tf.tanh(hidden @ layer)
                loss = tf.reduce_mean(tf.square(hidden))
            for layer, gradient in zip(layers, tape.gradient(loss, layers), strict=True):
                layer.assign_sub(0.1 * gradient)

        traced = [ad.function(step, batch="global") for _ in range(TRACES)]

    batch = rng.normal(size=(BATCH, WIDTH)).astype("float32")
    for run in traced:
        for _ in range(TRACED_RUN):
            run(batch)


if __name__ == "__main__":
    main(sys.argv[1])
