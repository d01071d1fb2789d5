"""A script of every front end: run on two workers as a pipeline, it prints what the first one's replicas alone would.

Arguments: how the machines are named, "stages" or "replicas".
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from autodist import AutoDist
from autodist.resources import ResourceSpec

MICRO_BATCHES = 3
STAGED = {
    "nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}],
    "strategy": {"builder": "Pipeline", "micro_batches": MICRO_BATCHES, "schedule": "1F1B"},
}
ALONE = {"nodes": [{"address": "localhost", "cpus": list(range(MICRO_BATCHES))}]}


def tell(what: str, values: object) -> None:
    bits = [np.asarray(value).tobytes().hex()[-64:] for value in tf.nest.flatten(values)]
    print("TOLD", what, *bits, flush=True)


def main() -> None:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    ad = AutoDist(resource_spec=ResourceSpec.from_dict(STAGED if sys.argv[1] == "stages" else ALONE))
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, 5)), draw.integers(0, 3, 20)
    with ad.scope():
        layers = [keras.layers.Dense(6, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dropout(0.3), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        tell("before", model.evaluate(x, y, batch_size=8, verbose=0))
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y)).history
        tell("history", history)
        tell("after", model.evaluate(x, y, batch_size=8, verbose=0))
        tell("predicted", model.predict(x, batch_size=8, verbose=0))
        tell("weights", model.get_weights())

        @ad.function
        def step(batch):
            with tf.GradientTape() as tape:
                rows = model(batch)
                loss = tf.reduce_mean(tf.square(rows))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss, rows

        tell("step", step(x[:2]))
        tell("step", step(x[:7]))
        tell("weights", model.get_weights())


if __name__ == "__main__":
    main()
