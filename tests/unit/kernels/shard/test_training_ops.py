"""Training ops of TensorFlow 1 optimizers update the parts of divided variables and their slots."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the only API that returns the definition of an op

from autodist.kernels import Context, rewrite
from tests.unit.kernels.in_one_process import Session, assert_same, capture, on_mesh, one_device
from tests.unit.kernels.pairs import pairs

OPS = [
    "ResourceApplyGradientDescent",
    "ResourceApplyMomentum",
    "ResourceApplyKerasMomentum",
    "ResourceApplyAdam",
    "ResourceApplyAdamWithAmsgrad",
    "ResourceApplyAdagrad",
    "ResourceApplyAdagradV2",
    "ResourceApplyAdagradDA",
    "ResourceApplyRMSProp",
    "ResourceApplyCenteredRMSProp",
    "ResourceApplyAdadelta",
    "ResourceApplyFtrl",
    "ResourceApplyFtrlV2",
    "ResourceApplyAdaMax",
    "ResourceApplyAddSign",
    "ResourceApplyPowerSign",
    "ResourceApplyProximalAdagrad",
    "ResourceApplyProximalGradientDescent",
]
NUMBERS = {"lr_power": -0.5, "global_step": np.int64(3), "logbase": 1.0, "l1": 0.01, "l2": 0.01, "epsilon": 1e-3}
"""Scalar operands; others are 0.1."""


def _apply(op: str, variable: tf.Variable, slots: list[tf.Variable], gradient: tf.Tensor) -> None:
    handles = iter([variable.handle, *(slot.handle for slot in slots)])
    operands = {}
    for argument in op_def_registry.get(op).input_arg:
        if argument.type == tf.resource.as_datatype_enum:
            operands[argument.name] = next(handles)
        elif argument.name in ("grad", "delta"):
            operands[argument.name] = gradient
        else:
            number = NUMBERS.get(argument.name, 0.1)
            operands[argument.name] = tf.constant(number, tf.int64 if argument.name == "global_step" else tf.float64)
    getattr(tf.raw_ops, op)(**operands)


def _slots_of(op: str, of: str, shape: tuple[int, ...]) -> list[tf.Variable]:
    count = sum(a.type == tf.resource.as_datatype_enum for a in op_def_registry.get(op).input_arg) - 1
    # Values for which no op takes the root of a negative number: a centered mean has a small square.
    values = [0.1 * (k + 1) for k in range(count)]
    return [tf.Variable(np.full(shape, v), name=f"{of}_slot{k}", trainable=False) for k, v in enumerate(values)]


@pytest.mark.parametrize("op, sizes", pairs(OPS, [{"model": 2}, {"data": 2, "model": 2}], each=4))
def test_variables_and_slots_are_updated_where_they_are(op, sizes):
    rng = np.random.default_rng(0)
    w1 = tf.Variable(rng.normal(size=(6, 8)), name="w1")
    w2 = tf.Variable(rng.normal(size=(8, 4)), name="w2")
    slots = {"w1": _slots_of(op, "w1", (6, 8)), "w2": _slots_of(op, "w2", (8, 4))}

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.relu(x @ w1) @ w2 - y) ** 2)
        of_w1, of_w2 = tape.gradient(loss, [w1, w2])
        _apply(op, w1, slots["w1"], of_w1)
        _apply(op, w2, slots["w2"], of_w2)
        return loss

    batches = [(rng.normal(size=(n, 6)), rng.normal(size=(n, 4))) for n in (8, 5)]
    captured = capture(step, *batches[0])
    strategy = on_mesh(captured.step, sizes, {"w1": "[–, model]", "w2": "[model, –]"})
    made = rewrite(captured.step, Context(strategy, 0))
    shapes = {variable.name: variable.shape for variable in made.variables}
    assert shapes == {
        **dict.fromkeys(["w1", *(f"w1_slot{k}" for k in range(len(slots["w1"])))], (6, 4)),
        **dict.fromkeys(["w2", *(f"w2_slot{k}" for k in range(len(slots["w2"])))], (4, 4)),
    }
    assert_same(Session(captured, strategy).train(batches), one_device(captured, step, batches), 1e-12)
