"""`ad.function`: what it asks of the step that it captures."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, function_step


@pytest.mark.parametrize("asked, found", [({}, False), ({"jit_compile": True}, True), ({"jit_compile": None}, False)])
def test_the_captured_step_says_whether_xla_is_asked_for(monkeypatch, asked, found):
    class SeenError(Exception):
        pass

    def prepare(run, item, sources):
        raise SeenError(item.jit_compile)

    monkeypatch.setattr(function_step, "prepare", prepare)
    ad = AutoDist()
    with ad.scope():
        weight = tf.Variable(1.0)

        @ad.function(**asked)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x * weight)
            weight.assign_sub(tape.gradient(loss, weight))

    with pytest.raises(SeenError) as seen:
        step(np.ones(3, np.float32))
    assert seen.value.args == (found,)
