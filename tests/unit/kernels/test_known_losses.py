"""Losses in the style of keras-io's examples: many replicas train as one does."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from autodist.graph.python_calls import elementwise
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs

TOKENS, WIDTH, CLASSES = 6, 3, 4
SHAPES = [(1, 2), (2, 1)]
EDGES = [[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 0, 0, 4, 4]]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")


def batches(*sizes):
    """Vectors of tokens, and classes, some of them 0, in different numbers in each part."""
    rng = np.random.default_rng(0)
    found = []
    for n in sizes:
        classes = rng.integers(0, CLASSES - 1, (n, TOKENS))
        classes[: n // 2, 1:] = 0
        classes[:, 0] = 1 + rng.integers(0, 2, n)
        found.append((rng.normal(size=(n, TOKENS, WIDTH)), classes))
    return found


def step_of(loss):
    """Returns a step that trains a matrix by a loss of each token's output, and of the classes."""
    matrix = tf.Variable(np.random.default_rng(1).normal(size=(WIDTH, CLASSES)), name="matrix")

    def step(x, classes):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(tf.tanh(x @ matrix), classes))
        matrix.assign_sub(0.1 * tape.gradient(value, matrix))
        return value

    return step


SIZES = (6, 5, 4, 1)


@lru_cache(maxsize=1)  # for all shapes
def on_one_device(loss):
    step = step_of(loss)
    captured = capture(step, *batches(6)[0])
    return captured, one_device(captured, step, batches(*SIZES))


def check(loss, shape):
    captured, alone = on_one_device(loss)
    assert_same(train(captured, plan(captured.step, *shape), batches(*SIZES)), alone, 1e-13)


def drawn(h):
    return tf.argsort(tf.random.uniform([tf.shape(h)[0], TOKENS]), axis=-1)


def ctc_batch_cost(h, classes):
    lengths = [length * tf.ones([tf.shape(h)[0], 1], tf.int64) for length in (TOKENS, 2)]
    return keras.src.legacy.backend.ctc_batch_cost(classes[:, :3], tf.nn.softmax(h), *lengths)


def masked_patches(h, _):
    """Both halves of the patches, each by its random mask: together they are all patches for any mask."""
    order = drawn(h)
    seen, hidden = (tf.gather(h, part, axis=1, batch_dims=1) for part in (order[:, :2], order[:, 2:]))
    return tf.reduce_sum(tf.square(seen), [1, 2]) + tf.reduce_sum(tf.square(hidden), [1, 2])


def mixup(h, _):
    """The sum over pairs is independent of the pairing."""
    order = tf.random.shuffle(tf.range(tf.shape(h)[0]))
    return 0.3 * tf.square(h) + 0.7 * tf.square(tf.gather(h, order))


def over_a_graph(reduce):
    def loss(h, _):
        by_node = tf.transpose(h, [1, 0, 2])
        return tf.square(tf.transpose(reduce(tf.gather(by_node, EDGES[1]), EDGES[0], TOKENS), [1, 0, 2]))

    return loss


def over_a_sparse_graph(h, _):
    adjacent = tf.sparse.from_dense(np.eye(TOKENS)[EDGES[1]])
    by_node = tf.reshape(tf.transpose(h, [1, 0, 2]), [TOKENS, -1])
    return tf.square(tf.sparse.sparse_dense_matmul(adjacent, by_node))


def only_chosen(h, classes):
    places = tf.where(classes[:, 1] > 0)[:, 0]
    return tf.reduce_sum(tf.square(tf.gather(h, places)))


def put_where_the_mask_is(h, classes):
    places = tf.where(classes > 0)
    return tf.square(tf.tensor_scatter_nd_update(h, places, 2 * tf.gather_nd(h, places))) * h


def two_masked_vectors(h, classes):
    return tf.boolean_mask(h[..., 0], classes > 0) * tf.boolean_mask(tf.exp(h[..., 1]), classes > 0)


def put_at_places(h, classes):
    n = tf.shape(h)[0]
    places = tf.stack([tf.repeat(tf.range(n), 2), tf.reshape(tf.cast(classes[:, :2], tf.int32), [-1])], 1)
    return h[..., 0] * tf.scatter_nd(places, tf.ones([2 * n], h.dtype), [n, TOKENS])


def in_towers(h, classes):
    """A tower for each class of an example, by which it is divided, and put back."""
    tower, numbers = tf.cast(classes[:, 0], tf.int32), tf.range(tf.shape(h)[0])
    made = [tf.nn.l2_normalize(k * part, 1) for k, part in enumerate(tf.dynamic_partition(h, tower, CLASSES), 1)]
    return tf.square(tf.dynamic_stitch(tf.dynamic_partition(numbers, tower, CLASSES), made) - 0.1 * h)


def by_experts(h, classes):
    """Each expert computes the examples that are routed to it; their rows are put, or added, where they were."""
    made = tf.zeros_like(h)
    for k in range(CLASSES):
        at = tf.where(tf.equal(classes[:, 0], k))
        rows = tf.tanh((k + 1) * tf.gather_nd(h, at))
        if k % 2:
            made += tf.scatter_nd(at, rows, tf.shape(h, tf.int64))
        else:
            made = tf.tensor_scatter_nd_add(made, at, rows)
    return tf.square(made - 0.1 * h)


def of_sparse_rows(h, classes):
    places = tf.where(classes > 0)
    marked = tf.SparseTensor(places, tf.cast(tf.gather_nd(classes, places), h.dtype), tf.shape(classes, tf.int64))
    added = tf.ensure_shape(tf.sparse.reduce_sum(marked, 1, keepdims=True), [None, 1])
    return tf.square(h[:, 0]) * added + tf.ensure_shape(tf.sparse.reduce_max(marked, 1), [None])[:, None] * h[:, 1]


LOSSES = {
    "ctc_batch_cost": ctc_batch_cost,
    "masked patches": masked_patches,
    "mixup": mixup,
    "taken along an axis": lambda h, c: tf.square(ops.take_along_axis(h, c[..., None], axis=-1)),
    "sorted along an axis": lambda h, c: ops.take_along_axis(h, ops.argsort(h, axis=1), axis=1)[:, :2] ** 2,
    "slice": lambda h, c: tf.slice(h, [0, 1, 0], [tf.shape(h)[0], TOKENS - 1, 2]) ** 2,
    "sums over a graph": over_a_graph(tf.math.unsorted_segment_sum),
    "means over a graph": over_a_graph(tf.math.unsorted_segment_mean),
    "largest over a graph": over_a_graph(tf.math.unsorted_segment_max),
    "sums over a sparse graph": over_a_sparse_graph,
    "chosen examples": only_chosen,
    "put where a mask is": put_where_the_mask_is,
    "put at places": put_at_places,
    "two masked vectors": two_masked_vectors,
    "repeated batch": lambda h, c: tf.tile(h, [2, 1, 1]) * tf.concat([h, tf.tanh(h)], 0),
    "layers of a batch": lambda h, c: tf.reshape(tf.concat([h, h**2], 0), [2, -1, TOKENS, CLASSES])[1] * h,
    "elements in batches": lambda h, c: tf.square(tf.gather_nd(h, c[:, :1], batch_dims=1)),
    "quantile": lambda h, c: ops.quantile(h, 0.3, axis=1) ** 2,
    "towers of classes": in_towers,
    "routed to experts": by_experts,
    "sums of sparse rows": of_sparse_rows,
    "order of tokens": lambda h, c: tf.gather(h, tf.random.shuffle(tf.range(TOKENS)), axis=1) ** 2,
}


@pytest.mark.feature("function", "loss: CTC")
@pytest.mark.feature("function", "loss: mixup, of pairs in a replica's part")
@pytest.mark.feature("function", "loss: masked patches, as drawn")
@pytest.mark.feature("function", "loss: sums and means over a graph")
@pytest.mark.parametrize("name, shape", pairs(LOSSES, SHAPES))
def test_many_replicas_train_what_one_does(name, shape, caplog):
    with caplog.at_level(logging.WARNING, "autodist"):
        check(LOSSES[name], shape)
    assert not caplog.records


def in_pairs(pair):
    return lambda h, c: tf.square(h + 0.5 * pair(h))


PAIRS = {
    "reversed": lambda h: tf.reverse(h, [0]),
    "sliced backwards": lambda h: h[::-1],
    "rolled": lambda h: tf.roll(h, 1, 0),
}


@every_shape
@pytest.mark.parametrize("pair", [pytest.param(pair, id=name) for name, pair in PAIRS.items()])
def test_pairs_are_those_of_a_replicas_part_and_it_is_told(pair, shape, caplog):
    step = step_of(in_pairs(pair))
    (x, classes) = batches(5)[0]
    captured = capture(step, x, classes)
    with caplog.at_level(logging.INFO, "autodist"):
        found = train(captured, plan(captured.step, *shape), [(x, classes)])
    assert "examples see one another" in caplog.text
    before = captured.sources[0].numpy()
    change = np.zeros_like(before)
    for part in (slice(0, 3), slice(3, 5)):
        alone = one_device(captured, step, [(x[part], classes[part])])
        change += (alone.variable("matrix") - before) * len(x[part]) / len(x)
    np.testing.assert_allclose(found.variable("matrix"), before + change, rtol=1e-13)


@pytest.mark.parametrize(
    "pair",
    [
        lambda h: keras.random.shuffle(h, seed=1),
        lambda h: ops.take(h, keras.random.shuffle(ops.arange(ops.shape(h)[0]), seed=1), axis=0),
        tf.random.shuffle,
        lambda h: tf.gather(h, tf.argsort(tf.random.uniform([tf.shape(h)[0]]))),
    ],
)
def test_drawn_pairs_are_told_of(pair, caplog):
    captured = capture(step_of(in_pairs(pair)), *batches(6)[0])
    with caplog.at_level(logging.INFO, "autodist"):
        train(captured, plan(captured.step, 1, 2), batches(5))
    assert "examples see one another" in caplog.text
    assert not [r for r in caplog.records if r.name == "autodist" and r.levelno > logging.INFO]


def by_row(rows):
    return 1.0 + rows


def by_batch(rows):
    return rows / rows.max()


def weighed(function):
    def loss(h, classes):
        weights = tf.numpy_function(function, [tf.cast(classes, h.dtype)], h.dtype)
        return tf.square(h) * tf.ensure_shape(weights, classes.shape)[..., None]

    return loss


@pytest.mark.parametrize("function, is_told", [(elementwise(by_row), False), (by_row, True), (by_batch, True)])
def test_values_of_unmarked_python_functions_are_told_of(function, is_told, caplog):
    captured = capture(step_of(weighed(function)), *batches(6)[0])
    with caplog.at_level(logging.WARNING, "autodist"):
        train(captured, plan(captured.step, 1, 2), batches(6))
    assert (f"ad.elementwise({function.__name__}) in the call of tf.numpy_function" in caplog.text) == is_told


def test_a_sum_over_as_many_examples_as_the_graph_was_made_for_is_taken_for_a_mean_as_a_constant_may_divide_it(caplog):
    matrix = tf.Variable(np.random.default_rng(1).normal(size=(WIDTH, CLASSES)), name="matrix")

    def step(x, replicas):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ matrix)) / 3 / replicas + tf.nn.l2_loss(matrix)
        matrix.assign_sub(0.1 * tape.gradient(loss, matrix))

    whole = np.random.default_rng(0).normal(size=(6, WIDTH))
    captured = capture(step, whole, np.float64(1))
    captured = replace(captured, step=replace(captured.step, rows=3))
    with caplog.at_level(logging.WARNING, "autodist"):
        trained = train(captured, plan(captured.step, 2), [(whole, np.float64(1))] * 3)
    alone = one_device(captured, step, [(whole, np.float64(2))] * 3)
    np.testing.assert_allclose(trained.variable("matrix"), alone.variable("matrix"), rtol=1e-13)
    assert "it is not known how the loss depends on the batch" in caplog.text
