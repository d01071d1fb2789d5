"""Keras batch normalisation: the conditions for its capture as one op, and equal training with and without it."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.ops import nn_fused_batch_norm_grad as second_order

from autodist.capture.keras.batch_norm import fusing_batch_norms
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.versions import since_keras

FUSED = {"FusedBatchNormV3", "FusedBatchNormGradV3"}
ARITHMETIC = {"SquaredDifference", "Rsqrt"}
"""Ops of moments and of their use, which occur nowhere else in these steps."""

ROUNDING = 5e-6
"""In float32, over the few steps that are trained here."""


def images(*sizes, shape=(4, 4, 2), dtype="float32"):
    rng = np.random.default_rng(3)
    return [(rng.normal(1.0, 2.0, (size, *shape)).astype(dtype),) for size in sizes]


def training_step(norm, shape=(4, 4, 2), optimizer=None, between=lambda x: x, **call):
    """A step that trains a kernel before and a scale and an offset in the normalisation."""
    width = shape[-1]
    kernel = keras.Variable(np.random.default_rng(0).normal(size=(width, width)), name="kernel", dtype=norm.dtype)
    if not norm.built:
        norm.build((None, *shape))
    trained = [kernel, *norm.trainable_variables]
    opt = optimizer or keras.optimizers.SGD(0.1)
    opt.build(trained)

    def step(x):
        with tf.GradientTape() as tape:
            y = norm(between(x @ tf.cast(kernel.value, x.dtype)), training=True, **call)
            loss = tf.reduce_mean(tf.square(tf.tanh(tf.cast(y, "float32") + 0.3)))
        opt.apply(tape.gradient(loss, [v.value for v in trained]), trained)
        return loss

    return step


def ops(captured):
    return {node.op for node in captured.step.graph_def.node}


def assert_trains_the_same(step, batches, workers=1, replicas=1):
    captured = capture(step, *batches[0])
    assert ops(captured) >= FUSED
    found = train(captured, plan(captured.step, workers, replicas), batches)
    assert_same(found, one_device(captured, step, batches), rtol=ROUNDING)
    return captured


@pytest.mark.parametrize(
    "options", [{}, {"axis": 3}, {"scale": False}, {"center": False}, {"scale": False, "center": False}], ids=str
)
def test_training_is_one_op_and_its_gradient_one(options):
    found = ops(assert_trains_the_same(training_step(layers.BatchNormalization(**options)), images(5, 3, 6, 4)))
    assert not found & ARITHMETIC, "the moving averages read the op's own moments"


def test_ten_steps_end_where_arithmetic_ends():
    step = training_step(layers.BatchNormalization(momentum=0.9), optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    assert_trains_the_same(step, images(*[6] * 10))


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 3, 2)])
def test_a_single_example(shape):
    """Of one number there is no variance, and no correction of it for being an estimate."""
    assert_trains_the_same(training_step(layers.BatchNormalization(), shape), images(1, 1, shape=shape))


@pytest.mark.parametrize("workers, replicas", [(1, 3), (3, 1)])
def test_replicas_without_examples_are_left_out(workers, replicas):
    assert_trains_the_same(training_step(layers.BatchNormalization()), images(1, 1), workers, replicas)


def test_the_variance_is_that_of_the_replicas_part_as_is_told_once(caplog):
    caplog.set_level("INFO", "autodist")
    norm = layers.BatchNormalization(momentum=0.0)
    ((x,),) = images(4)
    captured = capture(training_step(norm), x)
    before = {v.name: source.numpy() for v, source in zip(captured.step.variables, captured.sources, strict=True)}
    (name,) = [name for name in before if name.endswith("moving_variance")]
    found = train(captured, plan(captured.step, 1, 2), [(x,)]).variable(name)
    kernel = before["kernel"]
    parts = [np.var(part @ kernel, (0, 1, 2)) for part in np.split(x, 2)]
    np.testing.assert_allclose(found, np.mean(parts, 0), rtol=ROUNDING)
    (told,) = caplog.messages
    assert told.startswith("examples see one another in the model, as in batch normalisation")


def test_a_layer_that_is_called_twice():
    norm = layers.BatchNormalization(momentum=0.5)
    found = ops(assert_trains_the_same(training_step(norm, between=lambda x: norm(2 * x, training=True)), images(5, 3)))
    assert not found & ARITHMETIC


def test_mixed_precision_is_normalised_in_float32():
    norm = layers.BatchNormalization(dtype="mixed_float16")
    captured = capture(training_step(norm, between=lambda x: tf.cast(x, "float16")), *images(5)[0])
    (node,) = [n for n in captured.step.graph_def.node if n.op == "FusedBatchNormV3"]
    assert node.attr["T"].type == tf.float32.as_datatype_enum


def gradient_penalty(norm, kernel, x):
    with tf.GradientTape() as inner:
        inner.watch(x)
        y = tf.reduce_sum(tf.tanh(norm(x @ kernel, training=True)) ** 2, (1, 2, 3))
    return tf.reduce_mean(tf.square(inner.gradient(y, x)))


def jacobian(norm, kernel, x):
    with tf.GradientTape(persistent=True) as inner:
        y = tf.reduce_mean(tf.tanh(norm(x @ kernel, training=True)), (0, 1, 2))
    return tf.reduce_sum(tf.square(inner.jacobian(y, kernel))) + tf.reduce_mean(y)


@pytest.mark.parametrize("loss_of", [gradient_penalty, jacobian])
def test_a_step_with_second_derivatives_is_left_as_it_is(loss_of):
    """Those of the arithmetic leave out that the mean within the variance depends on the batch; the op's do not."""
    kernel = tf.Variable(np.random.default_rng(0).normal(size=(2, 2)), dtype="float32", name="kernel")
    norm = layers.BatchNormalization()
    norm.build((None, 4, 4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(norm, kernel, x)
        by_kernel, by_scale = tape.gradient(loss, [kernel, norm.gamma.value])
        kernel.assign_sub(0.1 * by_kernel)
        norm.gamma.assign_sub(0.1 * by_scale)
        return loss

    batches = images(5, 5, 5)
    captured = capture(step, *batches[0])
    assert not ops(captured) & FUSED
    assert_same(train(captured, plan(captured.step), batches), one_device(captured, step, batches), rtol=ROUNDING)


def test_first_derivatives_on_their_own_stay_one_op():
    """The outer tape records the computation of the inner gradient, and does not differentiate it."""
    kernel = tf.Variable(np.random.default_rng(0).normal(size=(2, 2)), dtype="float32", name="kernel")
    norm = layers.BatchNormalization()
    norm.build((None, 4, 4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.tanh(norm(x @ kernel, training=True)))
            steepness = tf.stop_gradient(tf.reduce_mean(tf.square(inner.gradient(y, x))))
            loss = tf.reduce_mean(tf.square(norm(x @ kernel, training=True) - steepness))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    assert_trains_the_same(step, images(5, 3))


class ScaledVariance(layers.BatchNormalization):
    """Normalises by something else than the moments."""

    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, 1.5 * variance


class MomentsOfAnother(layers.BatchNormalization):
    """Normalises by moments of another tensor."""

    def _moments(self, inputs, mask):
        return super()._moments(2 * inputs, mask)


@pytest.mark.parametrize(
    "norm, shape, call",
    [
        (layers.BatchNormalization(dtype="float64"), (4, 4, 2), {}),
        (layers.BatchNormalization(axis=1), (2, 4, 2), {}),
        (layers.BatchNormalization(synchronized=True), (4, 4, 2), {}),
        (layers.BatchNormalization(epsilon=1e-6), (4, 4, 2), {}),
        (layers.BatchNormalization(), (2,), {}),
        (layers.BatchNormalization(), (4, 2), {}),
        (layers.BatchNormalization(), (4, 4, 2), {"mask": tf.ones((5, 4, 4), tf.bool)}),
        (ScaledVariance(), (4, 4, 2), {}),
        (MomentsOfAnother(), (4, 4, 2), {}),
        (layers.LayerNormalization(), (4, 4, 2), {}),
        (layers.GroupNormalization(1), (4, 4, 2), {}),
    ],
    ids=(
        "float64", "channels first", "synchronised", "small epsilon", "vectors", "sequences", "a mask",
        "another variance", "moments of another", "layer normalisation", "group normalisation",
    ),
)  # fmt: skip
def test_normalizations_that_the_op_does_not_support_stay(norm, shape, call):
    captured = capture(training_step(norm, shape, **call), *images(5, shape=shape, dtype=norm.dtype)[0])
    assert not ops(captured) & FUSED


@pytest.mark.parametrize("how", [{"training": False}, {"trainable": False}], ids=str)
def test_fixed_averages_are_left_as_they_are(how):
    norm = layers.BatchNormalization(trainable=how.get("trainable", True))
    norm.build((None, 4, 4, 2))
    kernel = tf.Variable(tf.ones((2, 2)), name="kernel")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(norm(x @ kernel, training=how.get("training", True))))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    assert not ops(capture(step, *images(5)[0])) & FUSED


def test_moments_that_a_script_makes_itself_may_be_differentiated_by():
    kernel = tf.Variable(tf.ones((2, 2)), name="kernel")

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            y = x @ kernel
            mean, variance = tf.nn.moments(y, [0, 1, 2])
            loss = tf.reduce_mean(tf.nn.batch_normalization(y, mean, variance, None, tf.constant([1.0, 2.0]), 1e-3))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return tape.gradient(loss, mean)

    captured = capture(step, *images(5)[0])
    assert not ops(captured) & FUSED
    assert captured.step.outputs


def test_in_the_body_of_a_condition_it_is_left_as_it_is():
    norm = layers.BatchNormalization()

    def sometimes(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: norm(x, training=True), lambda: x)

    norm.build((None, 4, 4, 2))
    captured = capture(training_step(norm, between=sometimes), *images(5)[0])
    assert ops(captured) >= FUSED, "the one outside of it"
    within = {node.op for function in captured.step.graph_def.library.function for node in function.node_def}
    assert within >= ARITHMETIC and not within & FUSED


@since_keras("3.14", "batch renormalization")
def test_renormalisation_keeps_the_moments_that_its_scale_is_made_of():
    """The readers of these moments precede the op, which cannot wait for itself."""
    norm = layers.BatchNormalization(renorm=True, renorm_clipping={"rmax": 2.0, "rmin": 0.5, "dmax": 1.0})
    captured = assert_trains_the_same(training_step(norm), images(5, 3, 6, 4))
    assert "SquaredDifference" in ops(captured)


def functions_in_use():
    second = second_order._FusedBatchNormGradGrad
    return tf.nn.moments, tf.nn.batch_normalization, layers.BatchNormalization.call, second


def test_everything_is_put_back_also_after_an_error():
    before = functions_in_use()
    with fusing_batch_norms():
        within = functions_in_use()
        with pytest.raises(ValueError, match="inside"), fusing_batch_norms():
            raise ValueError("inside")
        assert functions_in_use() == within
    assert functions_in_use() == before
    assert not any(one is other for one, other in zip(before, within, strict=True))


def test_a_layer_that_fails_leaves_nothing_open():
    norm = layers.BatchNormalization()
    with fusing_batch_norms() as norms:
        with pytest.raises(ValueError):
            norm.call(tf.zeros((3, 2)), mask=tf.ones((3, 2, 1)))
        assert not norms.is_in_a_layer


def traced_ops(norm):
    traced = tf.function(lambda x: norm(x, training=True)).get_concrete_function(tf.TensorSpec([None, 4, 4, 2]))
    return {op.type for op in traced.graph.get_operations()}


def test_functions_traced_by_another_thread_stay():
    norm = layers.BatchNormalization()
    norm.build((None, 4, 4, 2))
    found = []
    with fusing_batch_norms():
        thread = threading.Thread(target=lambda: found.append(traced_ops(norm)))
        thread.start()
        thread.join()
        assert "FusedBatchNormV3" in traced_ops(norm)
    assert "SquaredDifference" in found[0] and "FusedBatchNormV3" not in found[0]


def test_the_op_repeats_itself_bit_for_bit():
    step = training_step(layers.BatchNormalization(), shape=(16, 16, 2))
    batches = images(8, 8, shape=(16, 16, 2))
    captured = capture(step, *batches[0])
    first, second = (train(captured, plan(captured.step), batches) for _ in range(2))
    for name, value in first.variables[0].items():
        np.testing.assert_array_equal(value, second.variable(name), err_msg=name)
