"""A script with every front end: run as pipelines, it prints the same values as that many replicas on one worker.

Arguments: the machines, as a key of `MACHINES`, and a folder for checkpoints.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from autodist import AutoDist
from autodist.resources import ResourceSpec

MICRO_BATCHES = 3


def pipelines(workers: int, **options: object) -> dict[str, object]:
    nodes = [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}]
    return {"nodes": nodes, "strategy": {"builder": "Pipeline", **options}}


def replicas(count: int) -> dict[str, object]:
    return {"nodes": [{"address": "localhost", "cpus": list(range(count))}]}


def mesh_of_tensors(workers: int, data: str | None = None) -> dict[str, object]:
    """Layers divided by columns, then by rows, on four devices; whole biases and kernel_2 have slots in slices.

    With `data`, the other dimension of each kernel is divided along this axis.
    """
    columns, rows = ".*/(dense|dense_2)/kernel|kernel_0", ".*/(dense_1|dense_3)/kernel|kernel_1"
    layouts: dict[str, object] = {columns: {"sharding": [data, "model"]}, rows: {"sharding": ["model", data]}}
    layouts[".*/(dense_1|dense_3)/bias|kernel_2"] = {"slots": "data"}
    strategy = {"builder": "Mesh", "mesh": {"data": 2, "model": -1}, "variables": layouts, "compare_every": 1}
    nodes = [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": workers}]
    return {"nodes": nodes, "strategy": strategy, "batch": "global"}


MACHINES = {
    "mesh of tensors on one": mesh_of_tensors(1),
    "mesh of slices of tensors on two": mesh_of_tensors(2, "data"),
    "stages": pipelines(2, micro_batches=MICRO_BATCHES, schedule="1F1B", recompute=True),
    "mesh": pipelines(4, micro_batches=1, mesh={"stage": 2, "data": 2}),
    "replicas of stages": replicas(MICRO_BATCHES),
    "replicas of mesh": replicas(2),
}


def tell(what: str, values: object) -> None:
    bits = [np.asarray(value).tobytes().hex()[-64:] for value in tf.nest.flatten(values)]
    print("TOLD", what, *bits, flush=True)


def main() -> None:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    ad = AutoDist(resource_spec=ResourceSpec.from_dict(MACHINES[sys.argv[1]]))
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, 5)), draw.integers(0, 3, 20)
    with ad.scope():
        with ad.stage(0):
            layers = [keras.layers.Dense(6, activation="tanh") for _ in range(2)]
        with ad.stage(1):
            layers += [keras.layers.Dense(6, activation="tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        tell("before", model.evaluate(x, y, batch_size=8, verbose=0))
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y)).history
        tell("history", history)
        tell("after", model.evaluate(x, y, batch_size=8, verbose=0))
        tell("predicted", model.predict(x, batch_size=8, verbose=0))
        tell("weights", model.get_weights())

        @ad.function(batch="global")
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
        written_and_read(ad, model, lambda: step(x[:5]))
    tell("session", trained_in_a_session(ad, x))


def trained_in_a_session(ad: AutoDist, x: np.ndarray) -> list[object]:
    """Returns the losses of a TensorFlow 1 graph, and its final variables."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), ad.scope():
        given = hidden = v1.placeholder(tf.float64, [None, 5])
        for k, shape in enumerate([(5, 6), (6, 6), (6, 5)]):
            initial = np.cos(np.arange(float(np.prod(shape))) + k).reshape(shape)
            hidden = tf.tanh(hidden @ v1.get_variable(f"kernel_{k}", initializer=initial))
        loss = tf.reduce_mean(tf.square(hidden))
        train = v1.train.AdamOptimizer(0.01).minimize(loss)
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        workers, own = (1, 0) if "tensors" in sys.argv[1] else (ad.num_workers, ad.worker_index)
        parts = [np.array_split(x[:rows], workers)[own] for rows in (9, 8, 2)]
        losses = [session.run([loss, train], {given: part})[0] for part in parts]
        return [losses, session.run(v1.trainable_variables())]


def written_and_read(ad: AutoDist, model: keras.Model, step) -> None:
    """Assigns a variable between steps; each holder computes with the assigned values."""
    checkpoint = ad.checkpoint(sys.argv[2], model=model, optimizer=model.optimizer)
    saved = checkpoint.save()
    tell("saved", step())
    checkpoint.restore(saved)
    tell("restored", step())
    model.set_weights([np.cos(value) for value in model.get_weights()])
    tell("set", step())
    tell("weights", model.get_weights())


if __name__ == "__main__":
    main()
