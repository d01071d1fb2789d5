"""Training whose backward pass recomputes the blocks of a model: less memory, and the numbers of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

MODEL = """
import keras

class Block(keras.layers.Layer):
    def __init__(self, width, rate, **options):
        super().__init__(**options)
        self.norm = keras.layers.LayerNormalization()
        self.up, self.down = keras.layers.Dense(4 * width, "gelu"), keras.layers.Dense(width)
        self.dropout = keras.layers.Dropout(rate)

    def call(self, x, training=None):
        return x + self.dropout(self.down(self.up(self.norm(x))), training=training)

def build(width, count, rate, optimizer):
    keras.utils.set_random_seed(3)
    inputs = x = keras.Input((width,))
    for k in range(count):
        x = Block(width, rate, name=f"block_{k}")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(optimizer, "mse", jit_compile=False)
    return model
"""

# TensorFlow's constant folding moves the constants of a gelu to other factors where a product has fewer readers.
TRAINED = """
tf.config.optimizer.set_experimental_options({"constant_folding": False})
keras.config.set_floatx("float64")
with ad.scope():
    model = build(4, 3, 0.0, keras.optimizers.Adam(0.01))  # replicas draw numbers of their own
    model.fit(np.random.default_rng(1).normal(size=(22, 4)), np.ones((22, 1)), batch_size=8, epochs=2, verbose=0)
keep(**{str(k): value for k, value in enumerate(model.get_weights())})
"""

PEAK = """
def in_mib(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) / 1024

with ad.scope():
    model = build(16, 12, 0.2, "sgd")
    model.fit(np.zeros((2, 16), "float32"), np.zeros((2, 1), "float32"), verbose=0)
    x = np.zeros((16384 * ad.num_workers, 16), "float32")
    before = in_mib("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak from now on
    model.fit(x, x[:, :1], batch_size=len(x), verbose=0)
    print("PEAK", in_mib("VmHWM") - before, flush=True)
"""


def cluster(nodes: list[dict[str, Any]], builder: str = "AllReduce", **strategy: Any) -> dict[str, Any]:
    return {"nodes": nodes, "strategy": {"builder": builder, **strategy}}


ALONE = [{"address": "localhost", "cpus": [0]}]
TWO = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]


def weights_of(folder: Path, spec: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    folder.mkdir()
    workers = spec["nodes"][0].get("workers", 1)
    with Training(folder, MODEL + TRAINED, spec) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
    if spec["strategy"].get("recompute"):
        assert "recompute: the backward pass computes 3 blocks again: block_0, block_1, block_2." in run.stderr
    return [run.kept(worker) for worker in range(workers)]


@pytest.mark.slow
def test_one_device_has_the_same_bits_and_two_workers_the_same_numbers(tmp_path: Path) -> None:
    (alone,) = weights_of(tmp_path / "alone", cluster(ALONE))
    (again,) = weights_of(tmp_path / "again", cluster(ALONE, recompute=True))
    assert alone.keys() == again.keys()
    for name, value in alone.items():
        np.testing.assert_array_equal(again[name], value)
    for strategy in ({"builder": "PS"}, {"builder": "FSDP", "min_partition_bytes": 1}):
        for weights in weights_of(tmp_path / strategy["builder"], cluster(TWO, recompute=["block_."], **strategy)):
            for name, value in alone.items():
                np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_activations_of_twelve_blocks_take_a_third_of_their_memory(tmp_path: Path) -> None:
    """Two workers that recompute, and one device that does not, with the batch of one of them."""
    peaks = []
    for name, spec in (("alone", cluster(ALONE)), ("recomputes", cluster(TWO, recompute=True, builder="FSDP"))):
        with Training(tmp_path / name, MODEL + PEAK, spec) as run:
            assert run.wait(180) == 0, run.stderr
        peaks.append(float(run.stdout.partition("PEAK ")[2].split()[0]))
    assert peaks[1] <= 0.35 * peaks[0], peaks
