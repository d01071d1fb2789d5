"""Graph mode with iterators in the graph, as TensorFlow 1 scripts read their data."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Results, Trainer, program
from tests.equivalence.cases.graph_models import Weights
from tests.equivalence.cases.models import make_batches

v1 = tf.compat.v1


def _train_operation(x: tf.Tensor, y: tf.Tensor) -> tf.Operation:
    weights = Weights()
    hidden = tf.tanh(x @ weights.draw("hidden/kernel", 8, 16) + weights.draw("hidden/bias", 16))
    logits = hidden @ weights.draw("logits/kernel", 16, 3)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    return v1.train.AdamOptimizer(0.01).minimize(loss)


def _until_its_end(session: Any, *arguments: Any) -> int:
    """Runs something until the data has come to its end; returns how often."""
    for count in range(1000):
        try:
            session.run(*arguments)
        except tf.errors.OutOfRangeError:
            return count
    raise AssertionError("the data has no end")


def _examples() -> tuple[np.ndarray, np.ndarray]:
    batches = make_batches("mlp")
    return np.concatenate(batches.x)[:97], np.concatenate(batches.y)[:97]


@program
def graph_global_batches(ad: Trainer) -> Results:
    """Feeds the global batch, of 97 examples and then of one, and values that are the same on all workers."""
    x, y = _examples()
    with tf.Graph().as_default(), ad.scope():
        fed = v1.placeholder(x.dtype, [None, *x.shape[1:]]), v1.placeholder(y.dtype, [None])
        scale = v1.placeholder(x.dtype, [8])
        train = _train_operation(fed[0] * scale, fed[1])
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for size in (97, 1, 30, 3):
                session.run(train, {fed[0]: x[:size], fed[1]: y[:size], scale: np.linspace(0.5, 1, 8)})
            return dict(session.run({v.op.name: v for v in v1.global_variables()}))


@program
def graph_initializable_iterator(ad: Trainer) -> Results:
    """Two epochs of shuffled data from placeholders; the last batch has one example."""
    examples = _examples()
    with tf.Graph().as_default(), ad.scope():
        fed = [v1.placeholder(a.dtype, a.shape) for a in examples]
        dataset = tf.data.Dataset.from_tensor_slices(tuple(fed)).shuffle(97, seed=5).batch(16)
        iterator = v1.data.make_initializable_iterator(dataset)
        train = _train_operation(*iterator.get_next())
        with ad.create_distributed_session() as session:
            session.run(
                [v1.global_variables_initializer(), iterator.initializer], dict(zip(fed, examples, strict=True))
            )
            steps = [_until_its_end(session, train)]
            session.run(iterator.initializer, dict(zip(fed, examples, strict=True)))
            steps.append(_until_its_end(session, train))
            return dict(session.run({v.op.name: v for v in v1.global_variables()})) | {"steps": np.array(steps)}


@program
def graph_feedable_iterator(ad: Trainer) -> Results:
    """Two one-shot iterators in turn, chosen by their handles; runs of other fetches continue at the iterator's
    position.

    Fetches without a training step see the whole batch of the iterator.
    """
    x, y = _examples()
    with tf.Graph().as_default(), ad.scope():
        datasets = [tf.data.Dataset.from_tensor_slices((a, b)).batch(10) for a, b in ((x, y), (x[::-1], y[::-1]))]
        one_shot = [v1.data.make_one_shot_iterator(dataset) for dataset in datasets]
        handle = v1.placeholder(tf.string, [])
        kind = datasets[0]
        iterator = v1.data.Iterator.from_string_handle(
            handle, v1.data.get_output_types(kind), v1.data.get_output_shapes(kind)
        )
        data = iterator.get_next()
        train = _train_operation(*data)
        spread = [tf.reduce_mean(data[0]), tf.reduce_max(data[0]), tf.math.reduce_std(data[0]), tf.reduce_sum(data[1])]
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            first, second = ({handle: session.run(i.string_handle())} for i in one_shot)
            for feed in (first, second, second, first):
                session.run(train, feed)
            found = session.run(spread, first)
            seen, _ = session.run([data[1], train], feed_dict=first)
            steps = [_until_its_end(session, train, feed) for feed in (second, first)]
            values = dict(session.run({v.op.name: v for v in v1.global_variables()}))
            return values | {"steps": np.array(steps), "spread": np.array(found), "worker:classes": seen}
