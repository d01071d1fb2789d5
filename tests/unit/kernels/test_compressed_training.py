"""Training under a compressor reaches the loss of the uncompressed run; without error feedback it would not."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import BFloat16, Float8, Float16, Int8, PowerSGD, TopK
from autodist.kernels.communicate.bucket_reduction import BucketReduction
from tests.unit.kernels.in_one_process import capture, plan, train

COMPRESSORS = {
    "float16": Float16(),
    "bfloat16": BFloat16(),
    "int8": Int8(block=64),
    "float8": Float8(),
    "power_sgd": PowerSGD(rank=2),
    "top_k": TopK(fraction=0.05),
}

STEPS, BATCH, RATE = 400, 30, 0.5

MARGIN = {
    "float16": 0.01,
    "bfloat16": 0.01,
    "int8": 0.02,
    "float8": 0.05,
    "power_sgd": 0.1,
    "top_k": 0.1,
}
"""By how much of the uncompressed run's loss a compressor's may be the larger."""

RNG = np.random.default_rng(5)
INPUTS = RNG.normal(size=(600, 16)).astype("float32")
LABELS = np.argmax(np.tanh(INPUTS @ RNG.normal(size=(16, 24))) @ RNG.normal(size=(24, 5)), 1)
"""Labels by a random network with one hidden layer, for random inputs."""

BATCHES = [
    (INPUTS[chosen], LABELS[chosen]) for chosen in (RNG.choice(len(INPUTS), BATCH, replace=False) for _ in range(STEPS))
]


def classifier():
    """16 inputs, 32 hidden units, 5 classes; and the loss that its weights have on all inputs."""
    rng = np.random.default_rng(0)
    weights = [
        tf.Variable(value.astype("float32"), name=name)
        for name, value in {
            "hidden": rng.normal(size=(16, 32)) / 4,
            "hidden_bias": np.zeros(32),
            "output": rng.normal(size=(32, 5)) / 6,
            "output_bias": np.zeros(5),
        }.items()
    ]

    def loss_of(values, x, y):
        hidden, hidden_bias, output, output_bias = values
        scores = tf.tanh(x @ hidden + hidden_bias) @ output + output_bias
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)

    return capture(step, *BATCHES[0]), loss_of


def final_loss(compressor, **servers):
    captured, loss_of = classifier()
    trained = train(captured, plan(captured.step, 2, compressor=compressor, **servers), BATCHES)
    weights = [trained.variable(name) for name in ("hidden", "hidden_bias", "output", "output_bias")]
    return float(loss_of(weights, INPUTS, LABELS))


@functools.cache
def uncompressed():
    return final_loss(None)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_training_comes_to_the_loss_of_the_uncompressed_run(name):
    assert uncompressed() < 0.25  # it has learned: 1.6 is a guess
    assert final_loss(COMPRESSORS[name]) <= uncompressed() * (1 + MARGIN[name])


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_training_with_rounded_values_comes_to_the_loss_of_exact_ones(name):
    owners = {"hidden": 0, "hidden_bias": 0, "output": 1, "output_bias": 1}
    rounded = COMPRESSORS[name].to_message()
    loss = final_loss(None, owners=owners, local_proxy=True, value_compressor=rounded)
    assert loss <= uncompressed() * (1 + MARGIN[name])


@pytest.mark.parametrize("name", ["power_sgd", "top_k"])
def test_the_margin_is_missed_without_error_feedback(name, monkeypatch):
    remember = BucketReduction.remember

    def forget_residuals(self, memory, value):
        if not memory.name.endswith("/residual"):
            remember(self, memory, value)

    monkeypatch.setattr(BucketReduction, "remember", forget_residuals)
    assert final_loss(COMPRESSORS[name]) > uncompressed() * (1 + 2 * MARGIN[name])
