"""Softmaxes along a divided dimension equal those of one device, and send three numbers an example."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.kernels.shard.reshards import ReshardKind
from tests.unit.kernels.in_one_process import Session, capture, on_mesh
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.shard.equal_on_mesh import assert_equal_on_mesh, reshards_of
from tests.unit.kernels.shard.mesh_models import Model

CLASSES = 6

LOSSES = {
    "sparse": lambda y, labels: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y),
    "dense": lambda y, labels: tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(labels, CLASSES, dtype=y.dtype), y),
    "softmax": lambda y, labels: tf.reduce_sum(tf.nn.softmax(y) ** 2 * tf.cast(labels[:, None], y.dtype), -1),
    "log softmax": lambda y, labels: -tf.gather(tf.nn.log_softmax(y), labels, batch_dims=1),
}


def head(loss: str, lengths: tuple[int, ...] = (8, 7, 1, 5)) -> Model:
    """A layer whose classes are the columns of a kernel."""
    rng = np.random.default_rng(0)
    kernel = tf.Variable(rng.normal(size=(4, CLASSES)), name="kernel")
    bias = tf.Variable(np.zeros(CLASSES), name="bias")

    def step(x, labels):
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(LOSSES[loss](x @ kernel + bias, labels))
        of_kernel, of_bias = tape.gradient(mean, [kernel, bias])
        kernel.assign_sub(0.1 * of_kernel)
        bias.assign_sub(0.1 * of_bias)
        return mean

    batches = [(100 * rng.normal(size=(n, 4)), rng.integers(0, CLASSES, n)) for n in lengths]
    return Model(step, capture(step, *batches[0]), batches)


@pytest.mark.parametrize(("loss", "sizes"), pairs(LOSSES, [{"model": 2}, {"model": 3}, {"data": 2, "model": 2}]))
def test_classes_in_parts_equal_one_device(loss, sizes):
    assert_equal_on_mesh(head(loss), sizes, {"kernel": "[–, model]"})


@pytest.mark.parametrize("loss", ["sparse", "dense", "softmax"])
def test_no_logits_are_gathered(loss):
    found = reshards_of(head(loss), {"model": 2}, {"kernel": "[–, model]"})
    assert found.keys() <= {ReshardKind.ALL_REDUCE, ReshardKind.SLICE}


def test_a_whole_softmax_stays():
    assert reshards_of(head("sparse"), {"data": 2, "model": 2}, {"kernel": "[–, –]"}) == {}


def test_a_label_outside_of_the_classes_is_an_error():
    model = head("sparse", (4,))
    strategy = on_mesh(model.captured.step, {"model": 2}, {"kernel": "[–, model]"})
    x, labels = model.batches[0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"= {CLASSES} is not in \[0, {CLASSES}\)"):
        Session(model.captured, strategy).train([(x, np.full_like(labels, CLASSES))])
