"""Updates compiled by XLA: the same maths, in one call for each variable."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.kernels.finish.compile_updates import CompileUpdates
from autodist.kernels.pipeline import KERNELS
from tests.unit.kernels.dense_steps import dense_step
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, rewritten

ALL_SIZES = tuple(replace(k, min_bytes=1) if isinstance(k, CompileUpdates) else k for k in KERNELS)

optimizers = keras.optimizers

OPTIMIZERS = {
    "momentum, nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam, amsgrad, clipped by value": lambda: optimizers.Adam(0.01, amsgrad=True, clipvalue=0.01),
    "adamw, clipped by global norm": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "adam, with averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "nadam": lambda: optimizers.Nadam(0.01),
    "rmsprop, centered": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "lamb": lambda: optimizers.Lamb(0.01),
}


def batches(count=2):
    rng = np.random.default_rng(1)
    return [[rng.normal(size=(8, 4))] for _ in range(count)]


def calls_in(step):
    return [n for n in step.graph_def.node if n.op == "StatefulPartitionedCall" and n.attr["_XlaMustCompile"].b]


def writes_in(step):
    return [n.op for n in step.graph_def.node if n.op.startswith("Assign")]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_as_on_one_device(keras_in_float64, name):
    step = dense_step(OPTIMIZERS[name]())
    captured = capture(step, *batches()[0])
    session = Session(captured, plan(captured.step, 1, 2), ALL_SIZES)
    assert calls_in(session.steps[0])
    assert_same(session.train(batches()), one_device(captured, step, batches()))


def test_two_matrices_take_one_call_each_of_one_function(keras_in_float64):
    captured = capture(dense_step(optimizers.Adam()), *batches()[0])
    (step,) = rewritten(captured, plan(captured.step, 1, 2), ALL_SIZES)
    assert len(calls_in(step)) == 2
    assert len(step.graph_def.library.function) == 1
    assert writes_in(step) == ["AssignVariableOp"]  # of the iterations
    (function,) = step.graph_def.library.function
    assert sorted(n.op for n in function.node_def if n.op.startswith("Assign")) == [
        "AssignAddVariableOp", "AssignAddVariableOp", "AssignSubVariableOp",
    ]  # fmt: skip
    # The gradients of both replicas come in, and are added inside.
    assert [n.op for n in function.node_def].count("AddV2") == 2


def test_small_variables_are_left_alone(keras_in_float64):
    captured = capture(dense_step(optimizers.Adam()), *batches()[0])
    (step,) = rewritten(captured, plan(captured.step, 1, 2))
    assert not calls_in(step)


def test_on_many_machines_only_updates_of_owned_variables_are_compiled(keras_in_float64):
    step = dense_step(optimizers.Adam())
    captured = capture(step, *batches()[0])
    _, second = (v.name for v in captured.step.variables if v.trainable and len(v.shape) == 2)
    session = Session(captured, plan(captured.step, 2, 1, {second: 1}), ALL_SIZES)
    assert [len(calls_in(step)) for step in session.steps] == [0, 1]
    handle = next(v.handle for v in captured.step.variables if v.name == second)
    assert handle in calls_in(session.steps[1])[0].input
    assert_same(session.train(batches()), one_device(captured, step, batches()))


def test_workers_of_one_machine_compile_what_they_all_update_and_stay_alike(keras_in_float64):
    step = dense_step(optimizers.Adam())
    captured = capture(step, *batches()[0])
    session = Session(captured, plan(captured.step, 2, 1, one_machine=True), ALL_SIZES)
    assert [len(calls_in(step)) for step in session.steps] == [2, 2]
    assert_same(session.train(batches()), one_device(captured, step, batches()))


def test_half_precision_and_integers_are_left_alone():
    half, whole = tf.Variable(tf.ones([4], tf.float16)), tf.Variable(tf.ones([4], tf.int32))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * half)
        half.assign_sub(tape.gradient(loss, half) * 2)
        whole.assign_add(whole * 2)
        return loss

    captured = capture(step, np.ones((2, 4), np.float16))
    (item,) = rewritten(captured, plan(captured.step, 1, 2), ALL_SIZES)
    assert not calls_in(item)


def test_the_outputs_of_the_step_stay_outside():
    weight = tf.Variable(np.linspace(-1.0, 1.0, 4))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * weight))
        change = tape.gradient(loss, weight) * 0.1
        weight.assign_sub(change * 2)
        return loss, change

    given = [[np.random.default_rng(k).normal(size=(4, 4))] for k in range(2)]
    captured = capture(step, *given[0])
    session = Session(captured, plan(captured.step, 1, 2), ALL_SIZES)
    assert len(calls_in(session.steps[0])) == 1
    assert_same(session.train(given), one_device(captured, step, given))


def test_a_norm_between_two_writes_of_a_variable_keeps_them_apart():
    """A value computed from the first write, and used by the second, cannot be in one call with both."""
    weight, slot = tf.Variable(np.linspace(-1.0, 1.0, 4)), tf.Variable(np.zeros(4))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * weight))
        slot.assign_add(tape.gradient(loss, weight) * 0.5)
        weight.assign_sub(slot * tf.norm(slot))
        return loss

    given = [[np.random.default_rng(k).normal(size=(4, 4))] for k in range(3)]
    captured = capture(step, *given[0])
    session = Session(captured, plan(captured.step, 1, 2), ALL_SIZES)
    assert calls_in(session.steps[0])
    assert_same(session.train(given), one_device(captured, step, given))
