"""One process of a check: trains a small classifier by `fit`; the last line that the chief prints is its report."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.cluster.hardware import query_gpus

EXAMPLES, BATCH, EPOCHS, CLASSES = 512, 64, 3, 10
IMAGE = (16, 16, 3)
DRIVER_LIMIT = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", choices=("alone", "local", "given"))
    parser.add_argument("--policy", default="float32")
    parser.add_argument("--spec", default="SHUFFLE", help="all_reduce_spec")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--grow", action="store_true")
    arguments = parser.parse_args()
    if arguments.grow:
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(arguments.policy)
    scope, is_chief = _scope(arguments.machines, arguments.spec)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((EXAMPLES, *IMAGE), dtype=np.float32)
    y = (x.reshape(EXAMPLES, -1) @ rng.standard_normal((np.prod(IMAGE), CLASSES))).argmax(axis=1)
    with scope:
        model = _model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.02), loss, jit_compile=arguments.jit)
        history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    if is_chief:
        held = sum(int(np.prod(variable.shape)) * 4 for variable in model.trainable_variables)
        print(json.dumps({"losses": history.history["loss"], "variable_bytes": held, **_memory()}), flush=True)


def _scope(machines: str, spec: str) -> tuple[AbstractContextManager[Any], bool]:
    """Returns the scope of the training, and True if this process reports."""
    if machines == "alone":
        return nullcontext(), True
    strategy = {"builder": "AllReduce", "all_reduce_spec": spec}
    if machines == "local":
        ad = AutoDist(strategy=strategy)
    else:
        ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": "given", "strategy": strategy}))
    return ad.scope(), ad.is_chief


def _model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(IMAGE),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="tanh"),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def _memory() -> dict[str, list[int]]:
    """Returns, for each GPU, the peak of TensorFlow's tensors and the driver's used and total memory, all in bytes."""
    gpus = tf.config.list_logical_devices("GPU")
    peaks = [int(tf.config.experimental.get_memory_info(gpu.name)["peak"]) for gpu in gpus]
    lines = query_gpus("memory.used,memory.total", DRIVER_LIMIT) if gpus else []
    used, total = ([int(line.split(",")[at]) * 2**20 for line in lines] for at in range(2))
    return {"peaks": peaks, "used": used, "total": total}


if __name__ == "__main__":
    main()
