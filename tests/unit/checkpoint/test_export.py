"""Trained models run in plain TensorFlow and Keras, in a process that cannot import AutoDist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.strategies import PartitionedPS

pytestmark = pytest.mark.processes

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)

SERVE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "autodist":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import keras
import numpy as np
import tensorflow as tf

folder = sys.argv[1]
x = np.load(f"{folder}/x.npy")
exported, module = tf.saved_model.load(f"{folder}/exported"), tf.saved_model.load(f"{folder}/module")
built = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.5),
                          keras.layers.BatchNormalization(), keras.layers.Dense(1)])
built.load_weights(f"{folder}/model.weights.h5")
found = {
    "keras": keras.models.load_model(f"{folder}/model.keras").predict(x, verbose=0),
    "weights": built.predict(x, verbose=0),
    "exported": exported.serve(x),
    "signature": exported.signatures["serving_default"](tf.constant(x))["output_0"],
    "module": module.predict(tf.constant(x)),
}
assert not [name for name in sys.modules if name.startswith("autodist")]
np.savez(f"{folder}/found.npz", **found)
"""


class Served(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(np.ones((4, 3), np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def predict(self, x: tf.Tensor) -> tf.Tensor:
        return x @ self.weight


def test_an_exported_model_is_served_without_autodist(tmp_path: Path):
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]})
    ad = AutoDist(resource_spec=spec, strategy=PartitionedPS(max_shards=3, min_partition_bytes=1))
    module = Served()
    with ad.scope():
        layers = [keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")

        @ad.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(module.predict(x)))
            module.weight.assign_sub(0.1 * tape.gradient(loss, module.weight))
            return loss

    model.fit(X, X[:, :1], batch_size=8, epochs=2, verbose=0)
    step(X)
    step(X)  # its value lies in the session's shards when it is exported
    tf.saved_model.save(module, str(tmp_path / "module"))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    model.export(tmp_path / "exported", verbose=False)
    expected = model(X, training=False).numpy()
    np.save(tmp_path / "x.npy", X)
    subprocess.run([sys.executable, "-c", SERVE, str(tmp_path)], check=True, timeout=120, capture_output=True)
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_allclose(found["module"], module.predict(X), rtol=1e-6)  # NumPy would round otherwise
    assert np.abs(module.weight.numpy() - 1).max() > 1e-3
    for name in ("keras", "weights", "exported", "signature"):
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
