"""Placements that variables cannot have: one op writes variables of several owners."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.errors import StrategyError
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import capture, plan, rewritten
from tests.unit.kernels.place.partition.shards import cut_in_strategy

pytestmark = pytest.mark.usefixtures("keras_in_float64")


def accumulating_step(optimizer: keras.optimizers.Optimizer) -> CapturedFunction:
    """A step whose optimizer applies every other gradient, to all variables in one tf.cond."""
    layer = keras.layers.Dense(2, name="layer")
    layer.build((None, 4))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x)))
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        return loss

    return capture(step, np.ones((4, 4)))


def test_one_write_of_variables_with_two_owners_is_refused_by_name():
    captured = accumulating_step(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    strategy = plan(captured.step, 2, 1, {"layer/kernel": 0, "layer/bias": 1}, asynchronous=True)
    with pytest.raises(StrategyError, match="layer/bias, layer/kernel.* are written by one operation") as caught:
        rewritten(captured, strategy)
    assert "Give them one owner" in str(caught.value)


def test_many_variables_are_counted_and_named_as_the_script_has_them():
    captured = accumulating_step(keras.optimizers.Adam(0.1, gradient_accumulation_steps=2))
    strategy = plan(captured.step, 2, 1, {"layer/bias": 1}, asynchronous=True)
    cut_in_strategy(strategy, "layer/kernel", Partitioning(0, (2, 2)), [0, 1])
    with pytest.raises(StrategyError, match=r"^\S+, \S+, \S+ and \d+ other variables are written by one") as caught:
        rewritten(captured, strategy)
    assert "/whole" not in str(caught.value)
