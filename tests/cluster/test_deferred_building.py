"""A model that a strategy divides is built without its values: in little memory, with the values of one device."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

START = 90.0
WORKERS = 2
NODES = [{"address": "localhost", "cpus": [0, 1], "workers": WORKERS}]
LAYERS, WIDTH = 12, 1024
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4
STATE_BYTES = 2 * MODEL_BYTES
"""With the slots of momentum."""
IN_FLIGHT = 72 << 20
"""Bytes of values and messages on their way, for models of any size."""
ALSO = 8 << 20
"""Bytes of two layers: of one that is computed, and of objects."""


def build(layers: int, width: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    chain = [keras.layers.Dense(width, use_bias=False, dtype="float32", name=f"d{k}") for k in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *chain, keras.layers.Dense(1, dtype="float32", name="last")])
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


SCRIPT = f"""
import keras
from autodist.runs.variable_sync import VariableSync
{inspect.getsource(build)}
def peak(of="VmHWM"):
    [line] = [line for line in open("/proc/self/status") if line.startswith(of)]
    return int(line.split()[1]) << 10

pushes = []
push = VariableSync._push

def measured(*arguments):  # notes how much more memory the chief needs to send the values of the first step
    with open("/proc/self/clear_refs", "w") as resets:
        resets.write("5")  # the peak
    before = peak("VmRSS")
    push(*arguments)
    pushes.append(peak() - before)

VariableSync._push = measured

with ad.scope():
    keras.layers.Dense(1).build((1, 1))
    before = peak()
    model = build({LAYERS}, {WIDTH})
    if FILE:
        model.load_weights(FILE)
    built = peak() - before
    alone = model.get_layer("d1").kernel.numpy() if me == 1 else 0  # read by one worker
    kernel = model.get_layer("d2").kernel
    kernel.assign(keras.ops.full(kernel.shape, 0.5))
    x = np.random.default_rng(1).normal(size=(4, {WIDTH})).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    kernel = model.get_layer("d3").kernel
    kernel.assign(keras.ops.full(kernel.shape, 0.25))  # not read since the steps have written it
    model.evaluate(x, x[:, :1], batch_size=4, verbose=0)
    measures = dict(built=built, pushed=max(pushes, default=0))
    keep(alone=alone, **measures, **{{f"w{{k}}": one for k, one in enumerate(model.get_weights())}})
"""


@pytest.mark.parametrize(
    "strategy",
    [
        {"builder": "FSDP"},
        {
            "builder": "Mesh",
            "mesh": {"data": 1, "model": WORKERS},
            "variables": {
                ".*/d\\d*[02468]/kernel": {"sharding": [None, "model"]},
                ".*/d\\d*[13579]/kernel": {"sharding": ["model", None]},
            },
        },
    ],
    ids=lambda one: one["builder"],
)
def test_a_divided_model_is_built_in_little_memory_with_the_values_of_one_device(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    expected = build(LAYERS, WIDTH).get_weights()
    file = ""
    if strategy["builder"] == "FSDP":  # from a file, which is one of pretrained weights
        model = build(LAYERS, WIDTH)
        model.set_weights([-value for value in expected])
        model.save_weights(file := str(tmp_path / "pretrained.weights.h5"))
        expected = model.get_weights()
    alone = expected[1]
    expected[2], expected[3] = np.full_like(expected[2], 0.5), np.full_like(expected[3], 0.25)
    with Training(tmp_path / "run", f"FILE = {file!r}\n{SCRIPT}", {"nodes": NODES, "strategy": strategy}) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        for worker in range(WORKERS):
            kept = run.kept(worker)
            assert kept["built"] < (2 * ALSO if file else ALSO) < 0.35 * MODEL_BYTES
            assert kept["pushed"] < STATE_BYTES / WORKERS + IN_FLIGHT
            if worker == 1:
                np.testing.assert_array_equal(kept["alone"], alone)
            for k, value in enumerate(expected):
                np.testing.assert_array_equal(kept[f"w{k}"], value)
