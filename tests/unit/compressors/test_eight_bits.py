"""Int8 and Float8: codes within one step of their values, on average equal to them, repeated by the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import Float8, Int8
from autodist.compressors.eight_bits import BlockCode, _EightBits

LENGTH, BLOCK = 1000, 64
"""The last block is not full."""

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=LENGTH) * np.exp(3 * RNG.normal(size=LENGTH))


def rounded(compressor: _EightBits, values: np.ndarray, seed: int = 0) -> np.ndarray:
    code = BlockCode(compressor, lambda k: tf.constant([k, seed], tf.int64))
    vector = tf.constant(values)
    sent = code.encode(vector)
    for tensor, spec in zip(sent, code.specs(len(values), vector.dtype), strict=True):
        assert (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)
    decoded = code.decode(sent, vector.dtype)
    assert (decoded.dtype, decoded.shape) == (vector.dtype, vector.shape)
    return decoded.numpy()


def steps_of(compressor: _EightBits) -> np.ndarray:
    """Returns for each value the distance of the two codes between which it is."""
    largest = np.abs(np.pad(VALUES, (0, -LENGTH % BLOCK)).reshape(-1, BLOCK)).max(1).repeat(BLOCK)[:LENGTH]
    if isinstance(compressor, Int8):
        return largest / 127
    scale = largest / 448
    return scale * 2.0 ** (np.floor(np.log2(np.maximum(np.abs(VALUES) / scale, 2.0**-6))) - 3)


@pytest.mark.parametrize("compressor", [Int8(block=BLOCK), Float8(block=BLOCK)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_rounded_to_one_of_their_neighbours_and_on_average_to_themselves(compressor, dtype):
    values, steps = VALUES.astype(dtype), steps_of(compressor)

    @tf.function
    def rounded_by(seed):
        code = BlockCode(compressor, lambda k: tf.stack([tf.cast(k, tf.int64), seed]))
        return code.decode(code.encode(tf.constant(values)), tf.as_dtype(dtype))

    found = np.asarray([rounded_by(tf.constant(seed, tf.int64)) for seed in range(200)], np.float64)
    assert (np.abs(found - VALUES) <= steps * (1 + 1e-4)).all()
    # The standard deviation of a mean of 200 is at most half a step divided by 14.
    assert (np.abs(found.mean(0) - VALUES) <= 0.2 * steps).all()
    assert np.abs((found.mean(0) - VALUES) / steps).mean() < 0.035


@pytest.mark.parametrize("compressor", [Int8(), Float8()])
def test_the_seed_determines_the_codes(compressor):
    np.testing.assert_array_equal(rounded(compressor, VALUES, 1), rounded(compressor, VALUES, 1))
    assert (rounded(compressor, VALUES, 1) != rounded(compressor, VALUES, 2)).any()


@pytest.mark.parametrize("compressor", [Int8(block=BLOCK), Float8(block=BLOCK)])
def test_zeros_and_largest_values_are_exact(compressor):
    values = np.zeros(BLOCK)
    np.testing.assert_array_equal(rounded(compressor, values), values)
    values[3], values[5] = -2.5, 2.5
    np.testing.assert_allclose(rounded(compressor, values), values, rtol=1e-15)


@pytest.mark.parametrize("compressor", [Int8(block=BLOCK), Float8(block=BLOCK)])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_not_hidden_by_its_block(compressor, bad):
    values = VALUES.copy()
    values[BLOCK + 3] = bad
    is_finite = np.isfinite(rounded(compressor, values)).reshape(-1)
    np.testing.assert_array_equal(is_finite[:BLOCK], True)
    np.testing.assert_array_equal(is_finite[BLOCK : 2 * BLOCK], False)


def test_float8_has_the_numbers_of_e4m3():
    numbers = Float8().values_of(tf.range(-126, 127), tf.float32)
    exact = tf.cast(tf.cast(numbers, tf.dtypes.experimental.float8_e4m3fn), tf.float32)
    np.testing.assert_array_equal(numbers, exact)
    assert np.all(np.diff(numbers) > 0)
