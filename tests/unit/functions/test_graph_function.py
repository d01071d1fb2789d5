"""`ad.function` while a graph is built: two replicas, against the same step run eagerly on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import CaptureError

v1 = tf.compat.v1

X, Y = np.linspace(-1.0, 1.0, 21).reshape(7, 3), np.linspace(0.0, 2.0, 7)

RATE = 2.0**-6


def autodist(replicas: int = 2) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


class Model:
    """A linear model whose step is one of its methods."""

    def __init__(self) -> None:
        self.w = tf.Variable(np.linspace(0.5, 1.0, 3), name="w")
        self.b = tf.Variable(np.float64(0.25), name="b")
        self.steps = tf.Variable(0, trainable=False, name="steps")
        self.optimizer = keras.optimizers.Adam(0.05)

    def step(self, x, y):
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, self.w) + self.b - y))
        gradients = tf.gradients(loss, [self.w, self.b])
        self.optimizer.apply_gradients(zip(gradients, [self.w, self.b], strict=True))
        self.steps.assign_add(1)
        return {"loss": loss, "twice": self.steps * 2, "name": "linear"}


def test_writes_of_a_step_keep_their_order():
    """Keras 3's optimizers do not order their writes: they rely on `tf.function`."""
    ad, batches = autodist(), [slice(0, 7), slice(1, 6), slice(0, 7)]
    with tf.Graph().as_default(), ad.scope():
        model = Model()
        step = ad.function(model.step)
        found = [step(X[b], y=Y[b]) for b in batches]
        read = ad.function(lambda: (model.w, model.b, model.steps))
        values = read()
    alone = Model()
    step = tf.function(alone.step, reduce_retracing=True)
    expected = [step(X[b], y=Y[b]) for b in batches]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["name"] == "linear" and mine["twice"] == theirs["twice"].numpy()
        np.testing.assert_allclose(mine["loss"], theirs["loss"].numpy(), rtol=1e-6)  # Keras's rates are in float32
    for mine, theirs in zip(values, (alone.w, alone.b, alone.steps), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-6)


def test_control_flow_on_tensors_is_converted_as_elsewhere():
    def made():
        weight = tf.Variable(np.linspace(0.5, 1.0, 3), name="weight")

        def step(x):
            loss = tf.reduce_mean(tf.linalg.matvec(x, weight))
            if tf.reduce_mean(weight) > 0.75 + RATE:
                loss = 2 * loss
            (gradient,) = tf.gradients(loss, [weight])
            weight.assign_sub(gradient)
            return loss

        return weight, step

    ad, batches = autodist(), [X - 1.0, X, X]  # the weight grows past the bound
    with tf.Graph().as_default(), ad.scope():
        weight, step = made()
        function, read = ad.function(step), ad.function(weight.read_value)
        found, value = [function(x) for x in batches], read()
    alone, step = made()
    step = tf.function(step)
    expected = [step(x).numpy() for x in batches]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(value, alone.numpy(), rtol=1e-12)


@pytest.fixture
def linear():
    """Returns two variables in a graph, and the train operation of an optimizer."""
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        w, b = tf.Variable(5.0, name="w", dtype=tf.float64), tf.Variable(0.0, name="b", dtype=tf.float64)

        def train(x, y):
            loss = tf.reduce_mean(tf.square(w * x + b - y))
            optimizer = v1.train.GradientDescentOptimizer(RATE)
            return loss, optimizer.apply_gradients(zip(tf.gradients(loss, [w, b]), [w, b], strict=True)), b

        yield ad, train


def after(steps: int, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns the loss before each step's update, and b, fetched with it."""
    w, b = 5.0, 0.0
    for _ in range(steps):
        error = w * x + b - y
        loss, fetched = np.mean(error**2), b
        w, b = w - RATE * np.mean(2 * error * x), b - RATE * np.mean(2 * error)
    return loss, fetched


def test_a_step_returns_operations_and_variables(linear):
    ad, train = linear
    step, x = ad.function(train), X[:, 0]
    for k in (1, 2, 3):
        loss, operation, b = step(x=x, y=Y)
        assert operation is None
        np.testing.assert_allclose((loss, b), after(k, x, Y), rtol=1e-12)
    assert len({op.name for op in v1.get_default_graph().get_operations() if op.name.startswith("x")}) == 1


def test_a_step_takes_the_graphs_own_batches(linear):
    ad, train = linear
    data = tf.data.Dataset.from_tensor_slices((X[:, 0], Y)).batch(7).repeat()
    batch = v1.data.make_one_shot_iterator(data).get_next()
    step = ad.function(lambda batch: train(*batch))
    for k in (1, 2):
        np.testing.assert_allclose(step(batch)[0], after(k, X[:, 0], Y)[0], rtol=1e-12)


def test_steps_of_one_graph_share_its_values(linear):
    ad, train = linear
    step = ad.function(lambda x, y, sign: train(sign * x, sign * y)[0])
    w, b = 5.0, 0.0
    for sign in (1, -1, 1):  # each is a trace of its own, with gradients of its own
        x, y = sign * X[:, 0], sign * Y
        error = w * x + b - y
        np.testing.assert_allclose(step(X[:, 0], Y, sign), np.mean(error**2), rtol=1e-12)
        w, b = w - RATE * np.mean(2 * error * x), b - RATE * np.mean(2 * error)
    np.testing.assert_allclose(ad.function(lambda: (w_of(), b_of()))(), (w, b), rtol=1e-12)


def w_of() -> tf.Variable:
    return next(v for v in v1.global_variables() if v.op.name == "w")


def b_of() -> tf.Variable:
    return next(v for v in v1.global_variables() if v.op.name == "b")


def test_a_step_that_makes_no_gradient_is_refused_where_none_is_made_before(linear):
    ad, _ = linear
    with pytest.raises(CaptureError, match="the graph makes no gradient"):
        ad.function(w_of)()


def test_a_step_in_a_graph_outside_of_any_scope_is_refused():
    ad = autodist()
    with tf.Graph().as_default(), pytest.raises(CaptureError, match="outside the scope"):
        ad.function(lambda x: x + 1.0)(X)


def test_a_placeholder_that_no_call_can_feed_is_refused():
    with tf.Graph().as_default(), autodist().scope() as ad:
        weight, given = tf.Variable(np.ones(3), name="weight"), v1.placeholder(tf.float64, [None, 3], "given")

        @ad.function
        def step(x):
            loss = tf.reduce_mean(tf.linalg.matvec(x, weight))
            if loss > 0.0:
                loss *= 2.0
            weight.assign_sub(tf.gradients(loss, [weight])[0])
            return loss

        with pytest.raises(CaptureError, match="step computes from given, a placeholder"):
            step(given)


def test_a_step_of_a_script_that_disables_what_version_2_does_has_its_dimensions():
    v1.disable_v2_tensorshape()
    try:
        with tf.Graph().as_default(), autodist().scope() as ad:
            weight, kinds = tf.Variable(np.ones(3), name="weight"), []

            @ad.function
            def step(x):
                kinds.append(type(x.shape[1]))
                loss = tf.reduce_mean(tf.linalg.matvec(x, weight))
                weight.assign_sub(tf.gradients(loss, [weight])[0])
                return loss

            found = [step(X), step(X[:4])]
    finally:
        v1.enable_v2_tensorshape()
    assert kinds == [v1.Dimension]
    weight = 1 - X.mean(0)
    np.testing.assert_allclose(found, [X.sum(1).mean(), (X[:4] @ weight).mean()], atol=1e-12)
