"""`ad.constrain` and `ad.alike`: shardings that a script requests for tensors."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.sharding_marks import alike, constrain
from autodist.errors import StrategyError
from autodist.kernels import Context, rewrite
from autodist.kernels.shard.reshards import Reshard
from tests.unit.kernels.in_one_process import Session, assert_same, capture, on_mesh, one_device

SIZES = {"data": 2, "model": 2}


def model(mark):
    """A step whose hidden layer `mark` marks, and its batches."""
    rng = np.random.default_rng(0)
    w1, w2 = (tf.Variable(rng.normal(size=size), name=name) for name, size in (("w1", (6, 8)), ("w2", (8, 4))))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((tf.nn.relu(mark(x @ w1)) @ w2 - y) ** 2, 1))
        for variable, gradient in zip((w1, w2), tape.gradient(loss, [w1, w2]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step, [(rng.normal(size=(n, 6)), rng.normal(size=(n, 4))) for n in (6, 5, 1)]


def transfers(captured, strategy):
    found = []

    def note(kernel, step):
        if kernel == "shard-tensors":
            found.extend(str(one) for node in step.graph_def.node if (one := Reshard.of(node)))

    made = rewrite(captured.step, Context(strategy, 0), also=note)
    return found, {name: str(sharding.closed()) for name, sharding in made.shardings.items()}


@pytest.mark.parametrize("layout", [(None, "model"), ("data", "model"), ("?", ["model"])])
def test_a_constraint_divides_the_variables_around_it(layout):
    step, batches = model(lambda h: constrain(h, layout))
    captured = capture(step, *batches[0])
    strategy = on_mesh(captured.step, SIZES, {})
    found, shardings = transfers(captured, strategy)
    assert found == ["all_reduce over model"]
    assert shardings == {"w1": "[–, model]", "w2": "[model, –]"}
    assert_same(Session(captured, strategy).train(batches), one_device(captured, step, batches))


def test_the_axis_of_the_batch_alone_divides_nothing():
    step, batches = model(lambda h: constrain(h, ("data",)))
    captured = capture(step, *batches[0])
    assert transfers(captured, on_mesh(captured.step, SIZES, {})) == ([], {})


def test_tensors_of_a_group_are_divided_alike():
    step, batches = model(lambda h: tf.add(*alike(h, constrain(tf.ones_like(h), (None, "model")))))
    captured = capture(step, *batches[0])
    strategy = on_mesh(captured.step, SIZES, {})
    assert transfers(captured, strategy)[1] == {"w1": "[–, model]", "w2": "[model, –]"}
    assert_same(Session(captured, strategy).train(batches), one_device(captured, step, batches))


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (("model",), "into 2 parts, but the dimension depends on the batch"),
        ((None, "data"), "the examples are not along this dimension"),
        ((None, "modell"), "has the axis modell, but the mesh"),
    ],
)
def test_a_constraint_that_does_not_fit_is_refused_with_its_line(layout, problem):
    step, batches = model(lambda h: constrain(h, layout))
    captured = capture(step, *batches[0])
    with pytest.raises(StrategyError, match=rf"ad.constrain in \S+py:\d+.*{problem}|{problem}"):
        rewrite(captured.step, Context(on_mesh(captured.step, SIZES, {}), 0))


def test_marks_that_cannot_be_are_refused_at_once():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="has 3 dimensions"):
        constrain(tf.zeros([2, 2]), (None, None, "model"))
    with pytest.raises(ValueError, match="different shapes"):
        alike(tf.zeros([2]), tf.zeros([3]))


def test_without_a_step_tensors_are_returned():
    x = tf.zeros([2, 2])
    assert constrain(x, (None, "model")) is x
    assert alike(x, x) == (x, x)
