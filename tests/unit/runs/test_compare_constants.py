"""Python constants in a step: equal on two workers, except for seeds and rounding."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import capture_function
from autodist.errors import CaptureMismatchError
from autodist.graph.baked_values import Baked
from autodist.runs.fingerprint import Fingerprint, is_same_value, require_equal
from tests.unit.kernels.in_one_process import capture

ROWS = np.ones((4, 3), np.float32)


def fit_of(layer=None, optimizer=None, loss="mse"):
    """The step of a Keras model."""
    keras.utils.clear_session(free_memory=False)
    layers = [] if layer is None else [layer]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer or "sgd", loss)
    model.optimizer.build(model.trainable_variables)
    model._compile_metrics, model.metrics  # noqa: B018 - made before the step is traced

    def step(x):
        with tf.GradientTape() as tape:
            found = model.compute_loss(x, x[:, :1], model(x, training=True))
        model.optimizer.apply(tape.gradient(found, model.trainable_variables))
        return found

    return capture(step, ROWS).step


def step_of(gradient_of):
    """A step that applies a gradient."""
    weight = tf.Variable(np.ones((3, 1), np.float32), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weight) ** 2)
        weight.assign_sub(gradient_of(tape.gradient(loss, weight)))
        return loss

    return capture(step, ROWS).step


def looped(rate):
    def apply(gradient):
        return tf.while_loop(lambda k, g: k < 3, lambda k, g: (k + 1, g * rate), (0, gradient))[1]

    return apply


def branched(rate):
    return lambda gradient: tf.cond(tf.reduce_sum(gradient) > 0, lambda: gradient * rate, lambda: gradient)


def require(make, *values):
    """Requires of each worker that its step is the one of the first."""
    chief, *others = (Fingerprint.of(make(value)) for value in values)
    for number, other in enumerate(others, 1):
        require_equal(chief, other, name=f"worker {number}")


@pytest.mark.parametrize(
    "make, chief, mine",
    [
        (lambda v: fit_of(optimizer=keras.optimizers.SGD(0.1, momentum=v)), 0.9, 0.8),
        (lambda v: fit_of(optimizer=keras.optimizers.Adam(0.1, beta_1=v)), 0.9, 0.8),
        (lambda v: fit_of(optimizer=keras.optimizers.SGD(0.1, clipnorm=v)), 1.0, 2.0),
        (lambda v: fit_of(keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(v))), 0.01, 0.02),
        (lambda v: fit_of(keras.layers.Dropout(v)), 0.1, 0.2),
        (lambda v: fit_of(keras.layers.LeakyReLU(v)), 0.1, 0.2),
        (lambda v: fit_of(keras.layers.BatchNormalization(momentum=v)), 0.99, 0.9),
        (lambda v: fit_of(loss=keras.losses.Huber(v)), 1.0, 2.0),
        (lambda v: step_of(lambda g: v * g), 0.1, 0.2),
        (lambda v: step_of(lambda g: tf.constant(v) * g), 0.1, 0.2),
        (lambda v: step_of(looped(v)), 0.1, 0.2),
        (lambda v: step_of(branched(v)), 0.1, 0.2),
    ],
    ids=[
        "momentum", "beta", "clipnorm", "l2", "dropout", "slope", "average", "delta", "rate", "captured", "in_loop",
        "in_branch",
    ],
)  # fmt: skip
def test_a_number_that_differs_is_refused_and_one_that_does_not_passes(make, chief, mine):
    with pytest.raises(CaptureMismatchError, match="worker 2 has another number in its step than the chief"):
        require(make, chief, chief, mine)


def test_the_learning_rate_of_keras_is_a_variable_whose_value_the_chief_gives():
    require(lambda v: fit_of(optimizer=keras.optimizers.SGD(v)), 0.1, 0.2)


def by_set_seed(seed):
    tf.random.set_seed(seed)
    return step_of(lambda g: g + tf.random.normal([3, 1]))


def folded(seed):
    seeds = tf.random.experimental.stateless_fold_in(tf.constant([1, 2]), seed)
    return lambda g: g + tf.random.stateless_normal([3, 1], seeds)


@pytest.mark.parametrize(
    "make",
    [
        by_set_seed,
        lambda v: step_of(lambda g: g + tf.random.normal([3, 1], seed=v)),
        lambda v: step_of(lambda g: g + tf.random.stateless_normal([3, 1], [v, 2])),
        lambda v: step_of(folded(v)),
        lambda v: fit_of(keras.layers.Dropout(0.5, seed=v)),
        lambda v: fit_of(keras.layers.GaussianNoise(0.5, seed=v)),
    ],
    ids=["global", "of_op", "stateless", "folded", "dropout", "noise"],
)
def test_seeds_may_differ(make):
    require(make, 1, 2)


def test_distributions_of_random_numbers_must_be_equal_but_seeds_may_differ():
    with pytest.raises(CaptureMismatchError, match="another number"):
        require(lambda v: step_of(lambda g: g + tf.random.stateless_normal([3, 1], [int(v), 2], stddev=v)), 1.0, 2.0)


def test_texts_and_what_is_returned_as_it_is_may_differ():
    weight = tf.Variable(np.ones((3, 1), np.float32), name="weight")

    def make(worker):
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight) ** 2)
            tf.debugging.assert_less(loss, 1e9, message=f"on worker {worker}")
            weight.assign_sub(tape.gradient(loss, weight))
            return loss, tf.constant(worker), tf.constant(f"/logs/{worker}")

        return capture(step, ROWS).step

    require(make, 1, 2)


@pytest.mark.parametrize(
    "chief, mine, is_same",
    [
        (Baked(0, "", "0.1", "float64", ()), Baked(0, "", "0.10000000000000002", "float64", ()), True),
        (Baked(0, "", "0.1", "float64", ()), Baked(0, "", "0.1000001", "float64", ()), False),
        (Baked(0, "", "0.1", "float32", ()), Baked(0, "", "0.10000001", "float32", ()), True),
        (Baked(0, "", "0.1", "float32", ()), Baked(0, "", "0.1", "float64", ()), False),
        (Baked(0, "", "1000000000", "int64", ()), Baked(0, "", "1000000001", "int64", ()), False),
        (Baked(0, "alpha", "0.2"), Baked(0, "alpha", "0.3"), False),
        (Baked(0, "alpha", "True"), None, False),
    ],
)
def test_numbers_are_the_same_within_the_rounding_of_their_type(chief, mine, is_same):
    assert is_same_value(chief, mine) is is_same


def fixed(rows, rate):
    weight = tf.Variable(np.ones((3, 1), np.float32), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weight) ** 2)
        weight.assign_sub(rate * tape.gradient(loss, weight))
        return loss

    return Fingerprint.of(capture_function(step, (tf.TensorSpec([rows, 3], tf.float32),), [0]).step)


def test_a_graph_for_fewer_examples_may_have_other_whole_numbers_and_no_other_rate():
    require_equal(fixed(5, 0.1), fixed(4, 0.1), "worker 1")
    with pytest.raises(CaptureMismatchError, match="0.2"):
        require_equal(fixed(5, 0.1), fixed(4, 0.2), "worker 1")
