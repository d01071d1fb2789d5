"""Uneven batches are rejected before training if the loss's dependence on them is unknown."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import UnevenBatchError

v1 = tf.compat.v1
TOLD = r"a batch of 5 examples does not divide evenly among 2 replicas \(1 of them would get 3, the others 2\)"
LAST = r"a batch of 1 examples does not divide evenly among 2 replicas.*MatMul.*multiple of 2 examples.*drop_remainder"


@pytest.fixture
def ad():
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))


def rows(examples):
    return np.random.default_rng(0).normal(size=(examples, 3)).astype(np.float32)


def unknown(goal, found):
    """Each example is compared with every other by drawn weights, of which each replica has its own."""
    compared = tf.matmul(found, found, transpose_b=True) * tf.random.uniform(())
    return tf.reduce_mean(compared) + tf.reduce_mean(tf.square(goal - found))


def data_set(examples):
    return tf.data.Dataset.from_tensor_slices((rows(examples), rows(examples))).batch(4).prefetch(1)


FITS = {
    "arrays": lambda model, n, **more: model.fit(rows(n), rows(n), batch_size=4, **more),
    "data set": lambda model, n, **more: model.fit(data_set(n), shuffle=False, **more),
}


@pytest.mark.feature("fit", "data: uneven batches, where draws weigh pairs of examples", refused="UnevenBatchError")
@pytest.mark.parametrize("fit", [pytest.param(fit, id=name) for name, fit in FITS.items()])
def test_fit_refuses_with_its_first_batch_what_its_last_one_would_be(ad, fit):
    with ad.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), unknown)
        before, ended = model.get_weights(), []
        told = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended.append(batch))]
        with pytest.raises(UnevenBatchError, match=LAST):
            fit(model, 9, verbose=0, callbacks=told)
        assert not ended
        for was, now in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(now, was)
        fit(model, 8, verbose=0, callbacks=told)
        assert ended == [0, 1]


def test_a_batch_of_which_nothing_is_known_before_is_refused_when_it_comes(ad):
    with ad.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), unknown)
        model.train_on_batch(rows(4), rows(4))
        before = model.get_weights()
        with pytest.raises(UnevenBatchError, match=TOLD):
            model.train_on_batch(rows(5), rows(5))
        np.testing.assert_array_equal(model.get_weights()[0], before[0])


@pytest.mark.feature(
    "function", "data: uneven batches, where draws weigh pairs of examples", refused="UnevenBatchError"
)
def test_a_step_refuses_it(ad):
    with ad.scope():
        matrix = tf.Variable(tf.ones([3, 3]))

        @ad.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = unknown(x, x @ matrix)
            matrix.assign_sub(0.1 * tape.gradient(loss, matrix))
            return loss

        with pytest.raises(UnevenBatchError, match=TOLD):
            step(rows(5))
    np.testing.assert_array_equal(matrix, np.ones((3, 3)))


@pytest.mark.feature("session", "data: uneven batches, where draws weigh pairs of examples", refused="UnevenBatchError")
def test_a_session_refuses_it(ad):
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float32, [None, 3])
        matrix = v1.get_variable("matrix", initializer=tf.ones([3, 3]))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(unknown(x, x @ matrix))
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        with pytest.raises(UnevenBatchError, match=TOLD):
            session.run(train, {x: rows(5)})
        np.testing.assert_array_equal(session.run(matrix), np.ones((3, 3)))
