"""Rows that a step writes to its state, such as counts of classes and queues of rows, are those of one device."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs

CLASSES = 4


def classes_of(x):
    return tf.cast(tf.clip_by_value(tf.floor(x[:, 0] + 2), 0, CLASSES - 1), tf.int32)


def trained(weight, loss_of):
    with tf.GradientTape() as tape:
        loss = loss_of()
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss


def of_weight():
    return tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2), name="weight")


def state(*shape):
    return tf.Variable(np.zeros(shape), trainable=False, name="state")


def counts_of_classes():
    weight, counts, mass = of_weight(), state(CLASSES), state(CLASSES, 3)

    def step(x):
        classes = classes_of(x)
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(x[:, 0]), classes))
        mass.scatter_sub(tf.IndexedSlices(x, classes))
        return trained(weight, lambda: tf.reduce_mean((x @ weight) ** 2))

    return step


def losses_in_a_ring():
    weight, ring, place = of_weight(), state(3), tf.Variable(0, trainable=False, name="place")

    def step(x):
        loss = trained(weight, lambda: tf.reduce_mean((x @ weight) ** 2))
        ring.scatter_update(tf.IndexedSlices(loss[None], place[None]))
        place.assign((place + 1) % 3)
        return loss, tf.reduce_max(ring)

    return step


def a_queue_of_gathered_rows():
    weight, queue = of_weight(), state(12, 2)
    place = tf.Variable(0, trainable=False, name="place")

    def step(x):
        rows = tf.distribute.get_replica_context().all_gather(x @ tf.stop_gradient(weight), 0)
        loss = trained(weight, lambda: tf.reduce_mean(tf.nn.softmax(x @ weight @ tf.transpose(queue + 1.0)) ** 2))
        places = (place + tf.range(tf.shape(rows)[0])) % 12
        queue.scatter_update(tf.IndexedSlices(rows, places))
        place.assign((place + tf.shape(rows)[0]) % 12)
        return loss

    return step


def centres_of_gathered_rows():
    """Each class's centre moves towards its examples, by a step that their number divides (centre loss)."""
    weight, centres = of_weight(), state(CLASSES, 2)

    def step(x):
        loss = trained(weight, lambda: tf.reduce_mean((x @ weight - tf.gather(centres, classes_of(x))) ** 2))
        rows, classes = map(tf.distribute.get_replica_context().all_gather, (x @ weight, classes_of(x)), (0, 0))
        _, group, counts = tf.unique_with_counts(classes)
        counted = tf.cast(1 + tf.gather(counts, group), x.dtype)[:, None]
        centres.scatter_sub(tf.IndexedSlices((tf.gather(centres, classes) - rows) / counted, classes))
        return loss

    return step


def rows_added_on_a_condition():
    weight, counts, steps = of_weight(), state(CLASSES), tf.Variable(0, trainable=False, name="steps")

    def step(x):
        classes, ones = classes_of(x), tf.ones_like(x[:, 0])
        if steps > 0:
            counts.scatter_add(tf.IndexedSlices(ones, classes))
        steps.assign_add(1)
        return trained(weight, lambda: tf.reduce_mean((x @ weight) ** 2))

    return step


def rows_by_position():
    """Counts of pairs of classes, sums by class, and a ring of losses, by `scatter_nd_add` and the like."""
    weight, pairs_of, mass, ring = of_weight(), state(CLASSES, 2), state(CLASSES, 3), state(3)
    place = tf.Variable(0, trainable=False, name="place")

    def step(x):
        classes, signs = classes_of(x), tf.cast(x[:, 1] > 0, tf.int32)
        pairs_of.scatter_nd_add(tf.stack([classes, signs], 1), tf.ones_like(x[:, 0]))
        mass.scatter_nd_sub(classes[:, None], x)
        loss = trained(weight, lambda: tf.reduce_mean((x @ weight) ** 2))
        ring.scatter_nd_update(place[None, None], loss[None])
        place.assign((place + 1) % 3)
        return loss

    return step


LAYOUTS = {
    "2 replicas": lambda step: plan(step, 1, 2),
    "2 workers, server": lambda step: plan(step, 2, 1, {g.variable: 1 for g in step.gradients}),
}
STEPS = [
    counts_of_classes,
    losses_in_a_ring,
    a_queue_of_gathered_rows,
    centres_of_gathered_rows,
    rows_added_on_a_condition,
    rows_by_position,
]
BATCHES = [(np.random.default_rng(n).normal(size=(n, 3)),) for n in (6, 5, 2, 7)]


@pytest.mark.parametrize("make, layout", pairs(STEPS, LAYOUTS, each=2))
def test_written_rows_are_those_of_one_device(make, layout):
    step = make()
    captured = capture(step, BATCHES[0][0])
    alone = one_device(captured, tf.function(step, input_signature=[tf.TensorSpec([None, 3], tf.float64)]), BATCHES)
    assert_same(train(captured, LAYOUTS[layout](captured.step), BATCHES), alone, 1e-10)


def a_loss_that_reads_the_counts():
    weight, counts = of_weight(), state(CLASSES)

    def step(x):
        classes = classes_of(x)
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(x[:, 0]), classes))
        scales = 1 / (1 + tf.reduce_sum(counts))
        return trained(weight, lambda: scales * tf.reduce_mean((x @ weight) ** 2))

    return step


def rows_that_examples_overwrite():
    weight, latest = of_weight(), state(CLASSES, 3)

    def step(x):
        latest.scatter_update(tf.IndexedSlices(x, classes_of(x)))
        return trained(weight, lambda: tf.reduce_mean((x @ weight) ** 2))

    return step


@pytest.mark.parametrize("make", [a_loss_that_reads_the_counts, rows_that_examples_overwrite])
def test_rows_that_replicas_cannot_combine_are_refused_by_name(make):
    captured = capture(make(), BATCHES[0][0])
    with pytest.raises(
        RewriteError, match="state by ResourceScatter.*Write rows and places of the whole batch.*all_gather"
    ):
        train(captured, LAYOUTS["2 replicas"](captured.step), BATCHES)
