"""Classes sampled once for the whole batch: `nce_loss` and `sampled_softmax_loss` train as on one device."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import sharded_plan

CLASSES, WIDTH, SAMPLED = 20, 4, 6

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
}
LAYOUTS = {
    "2 replicas": lambda step: plan(step, 1, 2),
    "2 workers, servers": lambda step: plan(step, 2, 1, {"matrix": 1, "embedding": 0, "bias": 0}),
    "2 workers, one on a server": lambda step: plan(step, 2, 1, {"matrix": 1}),
    "2 workers of 2": lambda step: plan(step, 2, 2),
}


def given(labels):
    """Samples that hold classes of the labels, and one twice."""
    expected = tf.cast(tf.fill(tf.shape(labels), 0.3), tf.float64)
    return tf.constant([1, 3, 4, 7, 9, 3], tf.int64), expected, tf.constant([0.3] * SAMPLED, tf.float64)


def every(labels):
    sampled, true, expected = tf.random.all_candidate_sampler(labels, 1, CLASSES, False)
    return sampled, tf.cast(true, tf.float64), tf.cast(expected, tf.float64)


def drawn(labels):
    sampled, true, expected = tf.random.log_uniform_candidate_sampler(labels, 1, SAMPLED, True, CLASSES, seed=3)
    return sampled, tf.cast(true, tf.float64), tf.cast(expected, tf.float64)


def skip_gram(optimizer, loss_of, sampler):
    rng = np.random.default_rng(0)
    shapes = {"embedding": (CLASSES, WIDTH), "matrix": (CLASSES, WIDTH), "bias": (CLASSES,)}
    variables = [keras.Variable(rng.normal(size=s), dtype="float64", name=name) for name, s in shapes.items()]
    optimizer.build(variables)
    embedding, matrix, bias = variables

    def step(words, labels):
        with tf.GradientTape() as tape:
            seen = tf.nn.embedding_lookup(embedding.value, words)
            rows = loss_of(matrix.value, bias.value, labels, seen, SAMPLED, CLASSES, sampled_values=sampler(labels))
            loss = tf.reduce_mean(rows)
        optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in variables]), variables, strict=True))
        return loss

    return capture(step, np.zeros(8, np.int64), np.zeros((8, 1), np.int64)), step


def batches(*sizes):
    rng = np.random.default_rng(2)
    return [(rng.integers(0, CLASSES, n), rng.integers(0, CLASSES, (n, 1))) for n in sizes]


@functools.lru_cache(maxsize=1)  # for all layouts
def on_one_device(optimizer, loss_of):
    captured, step = skip_gram(OPTIMIZERS[optimizer](), loss_of, given)
    return captured, one_device(captured, step, batches(8, 5, 3))


NCE, SOFTMAX = tf.nn.nce_loss, tf.nn.sampled_softmax_loss
MODELS = [(NCE, "sgd"), (SOFTMAX, "adagrad"), (NCE, "adam")]


@pytest.mark.feature("function", "loss: `nce_loss`, `sampled_softmax_loss`")
@pytest.mark.parametrize("model, layout", pairs(MODELS, LAYOUTS))
def test_training_equals_one_device_where_the_samples_are_the_same(model, layout):
    loss_of, optimizer = model
    captured, alone = on_one_device(optimizer, loss_of)
    assert_same(train(captured, LAYOUTS[layout](captured.step), batches(8, 5, 3)), alone)


def test_training_equals_one_device_where_every_class_is_taken():
    loss_of = functools.partial(tf.nn.nce_loss, remove_accidental_hits=False)

    def every_class(matrix, bias, labels, seen, _sampled, classes, sampled_values):
        return loss_of(matrix, bias, labels, seen, CLASSES, classes, sampled_values=sampled_values)

    captured, step = skip_gram(OPTIMIZERS["adagrad"](), every_class, every)
    found = train(captured, plan(captured.step, 2, 2), batches(8, 5, 3))
    assert_same(found, one_device(captured, step, batches(8, 5, 3)))


def test_batches_that_do_not_divide_train_with_samples_that_replicas_draw(caplog):
    captured, _ = skip_gram(OPTIMIZERS["adagrad"](), tf.nn.nce_loss, drawn)
    strategy = plan(captured.step, 2, 2)
    sessions = [Session(captured, strategy) for _ in range(2)]
    first, second = (session.train(batches(8, 5, 3)) for session in sessions)
    for name in ("embedding", "matrix", "bias"):
        np.testing.assert_array_equal(first.variable(name), second.variable(name))
    assert "not known" not in caplog.text
    seeds = [
        node.attr["seed2"].i
        for item in sessions[0].steps
        for node in item.graph_def.node
        if node.op == "LogUniformCandidateSampler"
    ]
    assert len(seeds) == len(set(seeds)) == 4


def test_a_matrix_in_shards_is_refused_where_its_rows_are_squared():
    captured, _ = skip_gram(OPTIMIZERS["adam"](), tf.nn.nce_loss, given)
    strategy = sharded_plan(captured.step, {"matrix": Partitioning(0, (2, CLASSES - 2))})
    with pytest.raises(RewriteError, match="matrix is looked up in several ways.*leave it in one piece"):
        rewritten(captured, strategy)
