"""A step's plan: kernels reject it before any other process is started."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import StrategyError
from autodist.runs.run import Run

MIXED = {"builder": "AllReduce", "variables": {"bias": {"synchronizer": "PS", "sync": False}}}


class StartedError(Exception):
    """A run is about to start processes."""


def train(monkeypatch: pytest.MonkeyPatch, strategy: dict[str, object], optimizer: keras.optimizers.Optimizer) -> None:
    def start(run: Run) -> None:
        raise StartedError

    monkeypatch.setattr(Run, "start", start)
    node = {"address": "localhost", "cpus": [0, 1], "workers": 2}
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node], "strategy": strategy}))
    kernel, bias = (
        keras.Variable(np.ones(shape), dtype="float32", name=n) for n, shape in (("kernel", (4, 2)), ("bias", (2,)))
    )
    optimizer.build([kernel, bias])

    @ad.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ kernel.value + bias.value)
        optimizer.apply_gradients(zip(tape.gradient(loss, [kernel.value, bias.value]), [kernel, bias], strict=True))
        return loss

    with ad.scope():
        step(np.ones((3, 4), np.float32))


def test_the_refusal_of_a_kernel_is_raised_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrategyError, match="a global norm"):
        train(monkeypatch, MIXED, keras.optimizers.SGD(0.1, global_clipnorm=1.0))


def test_a_step_that_can_be_rewritten_starts_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartedError):
        train(monkeypatch, MIXED, keras.optimizers.SGD(0.1))
