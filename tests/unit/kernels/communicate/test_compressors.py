"""Compressors: each follows its formula, with the same bits on all workers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import BFloat16, Float8, Float16, Int8, PowerSGD, TopK
from autodist.compressors.power_sgd import first_right
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.kernels import Context
from autodist.kernels.communicate.buckets import digest, key_of
from tests.unit.kernels.compressed_models import (
    expected,
    given_gradient,
    largest_elements,
    power_iteration,
    rounding,
)
from tests.unit.kernels.in_one_process import Session, capture, plan, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.wire import sent_bytes

FLOAT16, BFLOAT16 = Float16(), BFloat16()
FLOAT16_FED = Float16(error_feedback=True)
BFLOAT16_FED = BFloat16(error_feedback=True)
POWER_SGD = PowerSGD(rank=2)
TOP_K = TopK(fraction=0.1)
ALL = {
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "float16 with feedback": FLOAT16_FED,
    "bfloat16 with feedback": BFLOAT16_FED,
    "int8": Int8(),
    "int8 with feedback": Int8(error_feedback=True, block=32),
    "float8": Float8(),
    "power_sgd": POWER_SGD,
    "top_k": TOP_K,
}

KINDS = ["float16 with feedback", "bfloat16", "int8 with feedback", "float8", "power_sgd", "top_k"]
"""Each kind once; those that round do so with and without feedback."""

SIZES = (7, 5, 1, 2, 6)
"""Examples of each step: uneven parts, and fewer examples than workers. Errors of the first steps persist in the sum.
"""


def gradients(shape, sizes=SIZES, dtype="float64"):
    return [np.random.default_rng(n).normal(size=(n, *shape)).astype(dtype) for n in sizes]


def trained(compressor, batches, workers, initial=0.0):
    variable = tf.Variable(np.full(batches[0].shape[1:], initial, batches[0].dtype), name="v")
    captured = capture(given_gradient(variable), batches[0])
    return train(captured, plan(captured.step, workers, compressor=compressor), [(b,) for b in batches])


# -- the same numbers as NumPy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, workers", pairs([n for n in ALL if "float16" in n], [2, 3]))
def test_sixteen_bits_round_each_piece_on_each_hop(name, workers):
    batches, asked = gradients((40,)), ALL[name]
    dtype = asked.short
    model = rounding(dtype, asked.error_feedback, workers)
    found = trained(asked, batches, workers).variable("v")
    np.testing.assert_allclose(found, expected(model, np.zeros(40), batches, workers), rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [2, 3])
def test_top_k_sends_the_largest_and_remembers_the_rest(workers):
    batches = gradients((9, 5))
    found = trained(TOP_K, batches, workers).variable("v")
    model = largest_elements(0.1)
    np.testing.assert_allclose(found, expected(model, np.zeros((9, 5)), batches, workers), rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers, shape", pairs([2, 3], [(12, 7), (3, 4, 7)]))
def test_power_sgd_is_one_power_iteration_on_the_sum(workers, shape):
    batches = gradients(shape)
    variable = tf.Variable(np.zeros(shape), name="v")
    strategy_item = capture(given_gradient(variable), batches[0]).step
    position = strategy_item.gradients[0].variable
    named = PendingReduction(
        f"{position}/0", PendingReductionKind.GRADIENT, ("v:0",), ("v:0",), "w:0", 1, tf.float64, tf.TensorShape(shape),
        Context(plan(strategy_item, workers), 0).group, "v",
        weight_dtype=tf.float64,
    )  # fmt: skip
    right = first_right(named, 2, int(digest(key_of([named])), 16)).numpy()
    found = trained(POWER_SGD, batches, workers).variable("v")
    model = expected(power_iteration(right), np.zeros(shape), batches, workers)
    np.testing.assert_allclose(found, model, rtol=0, atol=1e-10)


# -- all compressors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_all_workers_have_the_same_bits(name):
    batches = gradients((64, 48), dtype="float32")
    found = trained(ALL[name], batches, 3)
    found.variable("v")  # compares the bits of all workers
    assert len(found.variables) == 3 and all("v" in values for values in found.variables)


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("float16", "bfloat16", "int8", "float8")])
def test_compression_errors_of_a_step_are_added_in_later_steps(name):
    """The same gradient repeated: without error feedback, the mean of the received values never approaches it."""
    steps = 120
    gradient = np.random.default_rng(0).normal(size=(12, 10))
    batches = [gradient[np.newaxis].repeat(3, 0)] * steps
    error = np.abs(-trained(ALL[name], batches, 2).variable("v") / steps - gradient).max()
    once = np.abs(-trained(ALL[name], batches[:1], 2).variable("v") - gradient).max()
    assert error < once / 10


@pytest.mark.parametrize("name", KINDS)
def test_weights_do_not_drive_float16_out_of_its_range(name):
    """4000 examples times a gradient of 100 is past 65504; so is a single gradient of 1e6."""
    captured = capture(given_gradient(tf.Variable(tf.zeros((16, 16)), name="v")), np.zeros((2, 16, 16), "float32"))
    session = Session(captured, plan(captured.step, 2, compressor=ALL[name]))
    for size in (100.0, 1e6, 1e-9):
        gradient = size * (1 + np.random.default_rng(1).uniform(size=(16, 16)))
        batch = np.broadcast_to(gradient, (4000, 16, 16)).astype("float32")
        found = -session.train([(batch,)]).variable("v")
        assert np.isfinite(found).all()
        most = {"float8": 0.4, "int8 with feedback": 0.03}.get(name, 0.02)
        assert np.abs(found - gradient).max() <= most * size or name in ("power_sgd", "top_k")
        assert np.abs(found).max() >= size


@pytest.mark.parametrize("name, bad", pairs(KINDS, [np.inf, np.nan]))
def test_values_that_are_not_finite_reach_all_workers_and_leave_no_residual(name, bad):
    """A loss scale skips the step everywhere and goes on as if it had not been."""
    variable = tf.Variable(np.zeros((12, 10)), name="v")

    def step(examples):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(variable * examples, [1, 2]))
        gradient = tape.gradient(loss, variable)
        is_finite = tf.reduce_all(tf.math.is_finite(gradient))
        variable.assign_sub(tf.where(is_finite, gradient, tf.zeros_like(gradient)))

    good = gradients((12, 10))
    poisoned = good[1].copy()
    poisoned[-1, 3, 3] = bad  # the last worker's alone
    captured = capture(step, good[0])
    session = Session(captured, plan(captured.step, 2, compressor=ALL[name]))
    with_it = session.train([(b,) for b in (good[0], poisoned, *good[2:])]).variable("v")
    without_it = session.train([(b,) for b in (good[0], *good[2:])]).variable("v")
    assert np.isfinite(with_it).all()
    np.testing.assert_array_equal(with_it, without_it)


def test_a_gradient_that_is_zero_at_first_is_not_zero_for_ever():
    zeros, later = np.zeros((2, 12, 10)), np.zeros((2, 12, 10))
    later[:, 6:] = 1.0  # a matrix of rank 1, sent without loss; its first rows do not determine it
    found = trained(POWER_SGD, [zeros, later, zeros, later], 2).variable("v")
    np.testing.assert_allclose(found, -2 * later[0], atol=1e-12)


@pytest.mark.parametrize("asked, dtype", [(POWER_SGD, "float16"), (TOP_K, "bfloat16")])
def test_gradients_of_sixteen_bits(asked, dtype):
    variable = tf.Variable(tf.zeros((40, 30), dtype), name="v")
    batches = [tf.cast(b, dtype).numpy() for b in gradients((40, 30))]
    captured = capture(given_gradient(variable), tf.TensorSpec([None, 40, 30], dtype))
    strategy = plan(captured.step, 3, compressor=asked)
    found = train(captured, strategy, [(b,) for b in batches]).variable("v").astype("float64")
    assert np.isfinite(found).all() and np.abs(found).max() > 0.1


@pytest.mark.parametrize("name", KINDS)
def test_workers_without_replicas_learn_the_same_sums(name):
    """They have no residuals and send nothing, and the others' results do not depend on them."""
    batches = gradients((16, 12))
    captured = capture(given_gradient(tf.Variable(np.zeros((16, 12)), name="v")), batches[0])
    beside = plan(captured.step, 2, compressor=ALL[name], servers=2)
    session = Session(captured, beside)
    assert not any(step.initializers or sent_bytes(step) for step in session.steps[2:])
    found = session.train([(b,) for b in batches])
    assert len([values for values in found.variables if "v" in values]) == 4
    np.testing.assert_array_equal(found.variable("v"), trained(ALL[name], batches, 2).variable("v"))
