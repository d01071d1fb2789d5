"""Two outputs, one per token under a mask and one per example: each is a mean of its own, for any masks."""

from __future__ import annotations

import logging
from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs

TOKENS, WORDS, WIDTH = 5, 7, 3
SHAPES = [(1, 2), (2, 1)]


pytestmark = pytest.mark.usefixtures("keras_in_float64")


def batch(*lengths):
    """Returns words, padded with zeros to equal lengths; a target for each word, and one for each example."""
    rng = np.random.default_rng(len(lengths))
    words = rng.integers(1, WORDS, (len(lengths), TOKENS)) * (np.arange(TOKENS) < np.asarray(lengths)[:, np.newaxis])
    return words, rng.normal(size=(len(lengths), TOKENS, WIDTH)), rng.normal(size=(len(lengths), WIDTH))


BATCHES = [batch(1, 1, 5, 4), batch(5, 2, 1), batch(0, 0, 3, 5), batch(2, 5, 5, 1, 3), batch(4)]
"""Parts with equal and different masks, one that is masked completely, uneven ones, and an empty one."""


class FirstWords(keras.layers.Layer):
    """The first two words, under their own mask."""

    supports_masking = True

    def call(self, x):
        return x[:, :2]

    def compute_mask(self, x, mask):
        return mask[:, :2]


def model(second):
    words = keras.Input((TOKENS,), dtype="int64")
    seen = keras.layers.Embedding(WORDS, 4, mask_zero=True)(words)
    return keras.Model(words, [keras.layers.Dense(WIDTH)(seen), keras.layers.Dense(WIDTH)(second(seen))])


def step_of(network, loss):
    variables = network.trainable_variables

    def step(words, by_word, by_example):
        with tf.GradientTape() as tape:
            value = loss(words, by_word, by_example, *network(words, training=True))
        for v, g in zip(variables, tape.gradient(value, [v.value for v in variables]), strict=True):
            v.assign_sub(0.1 * tf.convert_to_tensor(g))
        return value

    return step


def mse(reduction="sum_over_batch_size"):
    return keras.losses.MeanSquaredError(reduction=reduction)


def rows(goal, found):
    return tf.reduce_mean(tf.square(goal - found), -1)


def of_words(words, by_word, found):
    left = tf.boolean_mask(rows(by_word, found), words > 0)
    return tf.math.divide_no_nan(tf.reduce_sum(left), tf.cast(tf.size(left), left.dtype))


def of_words_and_examples(words, by_word, by_example, of_words, of_examples):
    return tf.reduce_mean(
        tf.concat([tf.boolean_mask(rows(by_word, of_words), words > 0), rows(by_example, of_examples)], 0)
    )


POOL = keras.layers.GlobalAveragePooling1D
CASES = {
    "per word and per example": (POOL, lambda w, a, b, p, q: mse()(a, p) + 0.5 * mse()(b, q)),
    "words of two lengths": (FirstWords, lambda w, a, b, p, q: mse()(a, p) + mse()(a[:, :2] - 1, q)),
    "weighted mean and sum": (
        POOL,
        lambda w, a, b, p, q: 0.3 * mse("mean_with_sample_weight")(a, p) + 0.1 * mse("sum")(b, q),
    ),
    "sum and mean": (POOL, lambda w, a, b, p, q: 0.1 * mse("sum")(a, p) + mse()(b, q)),
    "of what the mask leaves": (POOL, lambda w, a, b, p, q: of_words(w, a, p) + tf.reduce_mean(rows(b, q))),
    "one mean of both": (POOL, of_words_and_examples),
}


@lru_cache(maxsize=1)  # for all shapes
def on_one_device(case):
    second, loss = CASES[case]
    step = step_of(model(second()), loss)
    captured = capture(step, *BATCHES[0])
    return captured, one_device(captured, step, BATCHES)


@pytest.mark.feature("function", "loss: masks")
@pytest.mark.feature("function", "loss: several losses or outputs, each with its own reduction")
@pytest.mark.parametrize("case, shape", pairs(CASES, SHAPES))
def test_many_replicas_train_what_one_does(case, shape, caplog):
    with caplog.at_level(logging.WARNING, "autodist"):
        captured, alone = on_one_device(case)
        found = train(captured, plan(captured.step, *shape), BATCHES)
    assert not [record for record in caplog.records if record.name == "autodist"]
    assert_same(found, alone, 1e-13)
