"""Parts of steps, and their values on one device."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train

SHAPES = [(1, 3), (2, 1), (2, 2)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
hardest_shape = pytest.mark.parametrize("shape", SHAPES[-1:], ids=lambda s: f"{s[0]}x{s[1]}")


def variable(name, *shape, trainable=True, dtype=np.float64):
    values = np.random.default_rng(len(name)).normal(size=shape) if dtype == np.float64 else np.zeros(shape, dtype)
    return tf.Variable(values, name=name, trainable=trainable)


def batches(*sizes, width=4):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, width)),) for n in sizes]


def labelled(*sizes, width=4):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, width)), rng.integers(0, 3, (n,))) for n in sizes]


def check(step, data, shape, owners=None):
    captured = capture(step, *data[0])
    found = train(captured, plan(captured.step, *shape, owners=owners), data)
    assert_same(found, one_device(captured, step, data))
    return found
