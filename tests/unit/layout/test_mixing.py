"""Kinds if examples of a shard interact, or may interact: statistics, noise, ops without a rule."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import Mean, PerExample, Replicated, Sum, Unknown
from tests.unit.layout.batches import MEAN, check, reason, tensor
from tests.unit.layout.graphs import Case


def test_random_numbers_of_a_fixed_shape_are_noise_beside_rows_only(case):
    x = tensor(case, "x")
    noise = tf.random.uniform([3], dtype=tf.float64)
    assert "each replica draws for itself" in case.kind(noise).reason
    assert case.kind(x * noise) == PerExample(0)
    assert isinstance(case.kind(tf.reduce_sum(x) * noise), Unknown)


def test_what_a_seed_draws_that_all_replicas_have_is_the_same_on_all(case):
    x, given = tensor(case, "x"), tf.compat.v1.placeholder_with_default(np.array([1, 2]), [2])
    count, state = (tf.Variable([1, 2], dtype=tf.int64, use_resource=True, name=name) for name in ("count", "state"))
    case.declared[state.handle.name] = Replicated(is_generator=True)
    in_a_function = tf.function(lambda seed: tf.random.stateless_normal([3], seed))
    draws = [
        lambda seed: tf.random.stateless_uniform([3], seed, 0, 9, tf.int64),
        lambda seed: tf.random.stateless_categorical([[0.1, 0.2]], 3, seed),
        lambda seed: tf.random.experimental.stateless_shuffle([3, 1, 2], seed),
        in_a_function,
    ]
    alike = [[1, 2], given + 1, tf.random.split([1, 2])[1], count + 1]
    own = [tf.cast(x[0, :2], tf.int64), tf.random.split(state.read_value())[0], state + count]
    kinds = [[case.kind(draw(tf.convert_to_tensor(seed))) for draw in draws] for seed in (*alike, *own)]
    assert all(isinstance(kind, Replicated) for row in kinds[: len(alike)] for kind in row)
    assert all(isinstance(kind, Unknown) for row in kinds[len(alike) :] for kind in row)


def test_what_is_drawn_in_a_map_by_an_examples_own_seed_belongs_to_it(case):
    x = tensor(case, "x")
    seeds = tf.random.stateless_uniform([tf.shape(x)[0], 2], [1, 2], None, None, tf.int32)
    made = tf.map_fn(
        lambda pair: pair[0] + tf.random.stateless_normal([3], pair[1], dtype=tf.float64),
        (x, seeds), fn_output_signature=tf.float64,
    )  # fmt: skip
    assert case.kind(made) == PerExample(0)


def test_what_is_made_of_noise_and_of_what_all_replicas_share_is_noise(case):
    """For example, a filter whose width is drawn for the batch, or a random choice between two layers."""
    x = tensor(case, "x")
    noise = tf.random.uniform([3], dtype=tf.float64)
    shares = tf.exp(-noise) / tf.reduce_sum(tf.exp(-noise))
    is_first = tf.equal(tf.random.uniform([], maxval=2, dtype=tf.int32), 0)
    made = [x * shares, tf.where(is_first, x, 2 * x), x[:, tf.cast(noise[0], tf.int32) :][:, :1]]
    assert [case.kind(t) for t in made] == [PerExample(0)] * 3
    assert [case.kind(tf.reduce_mean(t)) for t in made] == [MEAN] * 3
    assert all(isinstance(case.kind(t), Unknown) for t in (shares, tf.reduce_sum(x) * tf.reduce_sum(shares)))


def test_draws_fit_the_order_of_the_rows_whose_shape_they_have(case):
    """As for noise on the labels of a concatenated batch of generated and real examples."""
    x = tensor(case, "x")
    label = tf.concat([tf.ones_like(x), tf.zeros_like(x)], 0)
    noise = tf.random.uniform(tf.shape(label), dtype=tf.float64)
    loss = tf.square(label + 0.1 * noise - tf.concat([x * x, x], 0)) * tf.fill(
        [tf.shape(label)[0], 1], tf.constant(2.0, x.dtype)
    )
    assert case.kind(tf.reduce_mean(loss)) == MEAN


def test_statistics_of_the_batch_leave_rows_but_say_so(case):
    x = tensor(case, "x")
    mean, variance = tf.nn.moments(x, [0])
    normal = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
    assert case.kind(mean) == MEAN
    assert isinstance(case.kind(variance), (Mean, Unknown))
    kind = case.kind(tf.reduce_mean(normal))
    assert kind == MEAN
    assert "batchnorm" in kind.mixed_at
    assert case.kind(tf.reduce_mean(x)).mixed_at is None


@pytest.mark.parametrize("axis", [0, 1])
def test_the_statistics_of_fused_batch_norm_are_over_all_but_the_channels(axis):
    case = Case()
    with case.graph.as_default():
        x = case.batch("images", 4, 5, 3, dtype=tf.float32, axis=axis)
        nothing = tf.constant([], tf.float32)
        normal, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=tf.ones(3), offset=tf.zeros(3), mean=nothing, variance=nothing, name="fused"
        )
    assert case.kind(normal) == PerExample(axis) and case.kind(normal).mixed_at == "fused"
    assert case.kind(mean) == MEAN
    assert "no mean of variances" in case.kind(variance).reason


def test_the_gradients_of_fused_batch_norm_are_rows_and_sums_of_a_replica_of_its_own():
    """As of a generator, whose gradients pass through the batch normalisation of the discriminator."""
    case = Case()
    with case.graph.as_default():
        x = case.batch("images", 4, 5, 3, dtype=tf.float32)
        scale, offset, nothing = tf.ones(3), tf.zeros(3), tf.constant([], tf.float32)
        fused = tf.raw_ops.FusedBatchNormV3(x=x * x, scale=scale, offset=offset, mean=nothing, variance=nothing)
        gradients = tf.gradients(tf.reduce_sum(tf.square(fused.y)), [x, scale, offset])
    assert [case.kind(gradient) for gradient in gradients] == [PerExample(0), Sum(), Sum()]
    assert all("FusedBatchNormGrad" in case.kind(gradient).mixed_at for gradient in gradients)


def test_what_follows_an_unknown_gradient_has_its_reason():
    """The lengths of the result are those of the examples, which cannot be known without rows."""
    case = Case()
    with case.graph.as_default():
        x = case.batch("images", 4, 5, 3, dtype=tf.float32)
        strange = tf.numpy_function(lambda v: v, [x], tf.float32)
        kernel = tf.ones([3, 3, 3, 2])
        back = tf.nn.conv2d_transpose(strange[..., :2], kernel, tf.shape(x), 1)
    assert "calls Python code" in case.kind(back).reason


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_quantization_by_its_own_range_mixes_examples_unless_each_has_a_range_of_its_own(case, feeds, version):
    def quantized(value, low, high, **options):
        bits = {"num_bits": 8} if version == 3 else {}
        op = getattr(tf.raw_ops, f"QuantizeAndDequantizeV{version}")
        return op(input=value, input_min=low, input_max=high, name="quantized", **bits, **options)

    x = tensor(case, "x")
    zero, columns, rows = np.float64(0), np.zeros(x.shape[1]), tf.zeros(tf.shape(x)[:1], tf.float64)
    exact = [
        quantized(x, zero, zero + 1, range_given=True),
        *[quantized(x, columns, columns + 1, range_given=True, axis=1)] * (version == 3),  # the others do not run it
        quantized(x, rows, rows, range_given=False, axis=0),
    ]
    for value in exact:
        check(case, feeds, [(value, PerExample(0)), (tf.reduce_mean(value), MEAN)])
        assert case.kind(value).mixed_at is None
    for axis, bound in ((-1, zero), (1, columns)):
        mixed = quantized(x, bound, bound, range_given=False, axis=axis)
        assert case.kind(mixed) == PerExample(0) and case.kind(mixed).mixed_at == mixed.op.name
        assert case.kind(tf.reduce_mean(mixed)).mixed_at == mixed.op.name
        scaled = quantized(x / tf.reduce_sum(x), bound, bound, range_given=False, axis=axis)
        assert isinstance(case.kind(scaled), Unknown)


def test_examples_along_the_channels_are_not_normalised_together():
    case = Case()
    with case.graph.as_default():
        x = case.batch("images", 4, 5, 3, dtype=tf.float32, axis=3)
        nothing, n = tf.constant([], tf.float32), tf.shape(x)[3:]
        ones, zeros = tf.ones(n), tf.zeros(n)
        fused = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=nothing, variance=nothing)
        fed = case.batch("scale", dtype=tf.float32)[::-1]
        mixed = tf.raw_ops.FusedBatchNormV3(x=x, scale=fed, offset=zeros, mean=nothing, variance=nothing)
    assert [case.kind(fused.y), case.kind(fused.batch_variance)] == [PerExample(3), PerExample(0)]
    assert isinstance(case.kind(mixed.y), Unknown)


def test_unknown_ops_are_unknown_until_they_meet_rows_of_their_shape(case):
    x = tensor(case, "x")
    strange = tf.numpy_function(lambda v: v, [x], tf.float64)
    strange.set_shape([None, 3])
    assert "calls Python code" in reason(case, strange)
    assert case.kind(strange - x) == PerExample(0)
    assert case.kind(tf.reduce_mean(strange - x)) == MEAN
    assert isinstance(case.kind(tf.reduce_mean(strange)), Unknown)
    assert isinstance(case.kind(tf.reduce_mean(strange) * x), Unknown)
