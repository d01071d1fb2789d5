"""TensorFlow generators: every replica draws different values, and all workers' generators advance equally."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.kernels.in_one_process import capture, plan, train


@pytest.fixture
def noisy_step():
    weight = tf.Variable(np.ones(4), name="weight")
    generator = tf.random.Generator.from_seed(1)

    def step(x):
        noise = generator.normal(tf.shape(x), dtype=tf.float64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight * noise)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return noise

    return capture(step, np.ones((1, 4)))


@pytest.mark.parametrize(("workers", "replicas"), [(1, 2), (2, 1)])
def test_replicas_draw_different_numbers_from_one_generator(noisy_step, workers, replicas):
    trained = train(noisy_step, plan(noisy_step.step, workers, replicas), [[np.ones((2, 4))]] * 2)
    rows = [row for step in trained.outputs for worker in step for row in worker[0]]
    assert len({row.tobytes() for row in rows}) == 4


def test_the_stored_state_is_alike_though_parts_are_uneven(noisy_step):
    trained = train(noisy_step, plan(noisy_step.step, workers=2), [[np.ones((3, 4))]] * 2)
    state = next(v.name for v in noisy_step.step.variables if v.is_seed)
    first, second = (values[state] for values in trained.variables)
    np.testing.assert_array_equal(first, second)
    assert first[0] > 0


def test_a_run_repeats_its_draws(noisy_step):
    strategy = plan(noisy_step.step, workers=2)
    once, again = (train(noisy_step, strategy, [[np.ones((3, 4))]]) for _ in range(2))
    np.testing.assert_array_equal(once.outputs[0][1][0], again.outputs[0][1][0])
