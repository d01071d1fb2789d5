"""Training ops of TensorFlow 1 optimizers update the parts of divided variables and their slots."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the only API that returns the definition of an op

from autodist.kernels import Context, rewrite
from tests.unit.kernels.in_one_process import Session, assert_same, capture, on_mesh, one_device

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


def _slots_of(op: str, variable: tf.Variable) -> list[tf.Variable]:
    count = sum(a.type == tf.resource.as_datatype_enum for a in op_def_registry.get(op).input_arg) - 1
    # Values for which no op takes the root of a negative number: a centered mean has a small square.
    values = [0.1 * (k + 1) for k in range(count)]
    of = variable.name.partition(":")[0]
    shape = variable.shape
    return [tf.Variable(np.full(shape, v), name=f"{of}_slot{k}", trainable=False) for k, v in enumerate(values)]


@pytest.mark.parametrize(
    ("ops", "sizes"),
    [(OPS[:9], {"data": 2, "model": 2}), (OPS[9:], {"data": 2, "model": 2}), (OPS[::5], {"model": 2})],
    ids=["first", "others", "without the axis of the batch"],
)
def test_variables_and_slots_are_updated_where_they_are(ops, sizes):
    """Each op trains two layers of its own; their variables have its name."""
    rng = np.random.default_rng(0)
    w1 = {op: tf.Variable(rng.normal(size=(6, 8)), name=f"w1_{op}") for op in ops}
    w2 = {op: tf.Variable(rng.normal(size=(8, 4)), name=f"w2_{op}") for op in ops}
    slots = {w.name.partition(":")[0]: _slots_of(op, w) for ws in (w1, w2) for op, w in ws.items()}

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean((tf.nn.relu(x @ w1[op]) @ w2[op] - y) ** 2) for op in ops])
        for op, *gradients in zip(ops, *tape.gradient(loss, [[*w1.values()], [*w2.values()]]), strict=True):
            for w, gradient in zip((w1[op], w2[op]), gradients, strict=True):
                _apply(op, w, slots[w.name.partition(":")[0]], gradient)
        return loss

    batches = [(rng.normal(size=(n, 6)), rng.normal(size=(n, 4))) for n in (8, 5)]
    captured = capture(step, *batches[0])
    layouts = {f"w1_{op}": "[–, model]" for op in ops} | {f"w2_{op}": "[model, –]" for op in ops}
    strategy = on_mesh(captured.step, sizes, layouts)
    made = rewrite(captured.step, Context(strategy, 0))
    shapes = {variable.name: variable.shape for variable in made.variables}
    assert shapes == {
        name: (6, 4) if name.startswith("w1") else (4, 4)
        for of, own in slots.items()
        for name in (of, *(f"{of}_slot{k}" for k in range(len(own))))
    }
    assert_same(Session(captured, strategy).train(batches), one_device(captured, step, batches), 1e-12)
