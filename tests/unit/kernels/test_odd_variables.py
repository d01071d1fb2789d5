"""All-reduce of variables of several types, scalars, empty ones and unused ones, against one device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import BFloat16, Float16, PowerSGD, TopK
from autodist.kernels.communicate.buckets import BUCKET_BYTES
from tests.unit.kernels.in_one_process import capture, one_device, plan, rewritten, train
from tests.unit.kernels.odd_variables import CLOSE, make_odd_step, odd_batches
from tests.unit.kernels.wire import sent_bytes


def assert_close(found, expected):
    for name, value in expected.variables[0].items():
        mine = found.variable(name)
        assert mine.dtype == value.dtype and mine.shape == value.shape, name
        margin = CLOSE[tf.as_dtype(value.dtype)]
        np.testing.assert_allclose(
            mine.astype("float64"), value.astype("float64"), rtol=margin, atol=margin, err_msg=name
        )


@pytest.mark.parametrize("workers, replicas", [(1, 2), (2, 2), (3, 1)])
def test_every_type_and_shape_trains_as_on_one_device(workers, replicas):
    (step, _), batches = make_odd_step(), odd_batches()
    captured = capture(step, batches[0][0])
    found = train(captured, plan(captured.step, workers, replicas), batches)
    expected = one_device(captured, step, batches)
    assert_close(found, expected)
    before = {v.name: s.numpy() for v, s in zip(captured.step.variables, captured.sources, strict=True)}
    moved = {name for name, value in found.variables[0].items() if (value != before[name]).any()}
    assert moved == {"single", "double", "half", "brain", "scalar", "half_scalar"}


@pytest.mark.parametrize("local_proxy", [False, True])
def test_every_type_and_shape_trains_at_an_owner(local_proxy):
    (step, _), batches = make_odd_step(), odd_batches()
    captured = capture(step, batches[0][0])
    owners = {gradient.variable: k % 2 for k, gradient in enumerate(captured.step.gradients)}
    found = train(captured, plan(captured.step, 2, 1, owners, local_proxy=local_proxy), batches)
    expected = one_device(captured, step, batches).variables[0]
    for name, value in expected.items():
        close = CLOSE.get(tf.as_dtype(value.dtype), 0)
        np.testing.assert_allclose(
            found.variable(name).astype("float64"), value.astype("float64"), rtol=close, atol=close, err_msg=name
        )


def test_a_variable_without_a_gradient_is_in_no_strategy():
    captured = capture(make_odd_step()[0], odd_batches()[0][0])
    nodes = {node.variable for node in plan(captured.step, 2).nodes}
    assert "untouched" not in nodes and "unused" not in nodes
    assert "untouched" in captured.step.by_name and "unused" not in captured.step.by_name


@pytest.mark.parametrize("asked", [Float16(True), BFloat16(True), PowerSGD(1), TopK(0.3)], ids=lambda one: one.kind)
def test_compressors_leave_what_they_cannot_shrink(asked):
    (step, _), batches = make_odd_step(), odd_batches()[:1]  # from the second step on, all depends on all
    captured = capture(step, batches[0][0])
    found = train(captured, plan(captured.step, 2, compressor=asked), batches)
    expected = one_device(captured, step, batches).variables[0]
    for name, value in expected.items():
        mine = found.variable(name)
        assert np.isfinite(mine.astype("float64")).all(), name
        if value.size <= 1:
            margin = 0.01 if asked.kind.endswith("16") else CLOSE[tf.as_dtype(value.dtype)]
            np.testing.assert_allclose(mine.astype("float64"), value.astype("float64"), rtol=margin, atol=margin)


@pytest.mark.parametrize("owners", [None, {"empty": 1}])
def test_an_empty_variable_alone_makes_an_empty_message(owners):
    empty = tf.Variable(np.zeros((0, 3)), name="empty")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(empty * 2.0) + tf.reduce_mean(x)
        empty.assign_sub(tape.gradient(loss, empty))

    captured = capture(step, np.ones((4, 2)))
    options = {} if owners is None else {"local_proxy": True}
    found = train(captured, plan(captured.step, 2, 1, owners, **options), [(np.ones((4, 2)),)])
    assert found.variable("empty").shape == (0, 3)


@pytest.mark.parametrize("asked", [None, PowerSGD(rank=2)])
def test_more_local_replicas_send_no_more_bytes(asked):
    """They are summed on their worker first, and the worker takes part in one exchange."""
    kernel = tf.Variable(np.zeros((512, 600), "float32"), name="kernel")
    assert math.prod(kernel.shape) * 4 < BUCKET_BYTES

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ kernel - 1.0))
        kernel.assign_sub(tape.gradient(loss, kernel))

    captured = capture(step, np.zeros((8, 512), "float32"))
    sent = [
        [sent_bytes(item) for item in rewritten(captured, plan(captured.step, 2, replicas, compressor=asked))]
        for replicas in (1, 2, 4)
    ]
    assert sent[0] == sent[1] == sent[2]
    assert sum(sent[0][0].values()) > 1000
