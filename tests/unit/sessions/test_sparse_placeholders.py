"""Sparse placeholders of a session with two replicas: results equal those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import CaptureError
from tests.equivalence.cases.base import Alone
from tests.unit.sessions.test_scripts import Found, assert_like_one_device, autodist, values

v1 = tf.compat.v1

WORDS = [[3, 1, 3], [], [7], [0, 2], [5, 5, 5, 1], [8], [2]]
"""Of an uneven number of examples, one of which has none."""
LABELS = np.array([1.0, 0, 1, 1, 0, 0, 1])


def entries(rows: list[list[int]], width: int) -> v1.SparseTensorValue:
    indices = [[k, at] for k, row in enumerate(rows) for at in range(len(row))]
    numbers = [one for row in rows for one in row]
    return v1.SparseTensorValue(np.array(indices, np.int64).reshape(-1, 2), np.array(numbers), [len(rows), width])


@pytest.mark.feature("session", "data: sparse tensors")
@pytest.mark.parametrize("shape", [None, [None, None], [None, 6]], ids=str)
def test_words_of_each_example_train_as_on_one_device(shape: list[int | None] | None) -> None:
    def script(ad: Any) -> Found:
        with tf.Graph().as_default(), ad.scope():
            words, labels = v1.sparse_placeholder(tf.int64, shape, "words"), v1.placeholder(tf.float64, [None])
            table = v1.get_variable("table", initializer=np.linspace(-1, 1, 27).reshape(9, 3))
            last = v1.get_variable("last", initializer=np.array([0.3, -0.2, 0.5]))
            logits = tf.linalg.matvec(tf.nn.safe_embedding_lookup_sparse([table], words, combiner="sum"), last)
            each = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(each)
            train = v1.train.AdagradOptimizer(0.1).minimize(loss)
            session = ad.create_distributed_session()
            session.run(v1.global_variables_initializer())
            call = session.make_callable([loss, each, words.dense_shape[1], train], [words, labels])
            told = [session.run([loss, each, words.dense_shape[1], train], {words: fed, labels: LABELS})[:3] for fed in
                    (entries(WORDS, 6), tuple(entries(WORDS[::-1], 6)))]  # fmt: skip
            told.append(call(entries(WORDS, 6), LABELS)[:3])
            return {
                f"{k} of step {step}": np.asarray(one) for step, of in enumerate(told) for k, one in enumerate(of)
            } | (values(session))

    assert_like_one_device(script)


@pytest.mark.parametrize("key", [lambda links: links, lambda _: "links"], ids=["tensor", "name"])
def test_a_matrix_for_all_examples_goes_to_every_replica_whole(key: Callable[[tf.SparseTensor], Any]) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 4))

    def script(ad: Any) -> Found:
        with tf.Graph().as_default(), ad.scope():
            x, links = v1.placeholder(tf.float64, [None, 4]), v1.sparse_placeholder(tf.float64, [4, 4], "links")
            weight = v1.get_variable("weight", initializer=np.linspace(-1, 1, 8).reshape(4, 2))
            loss = tf.reduce_mean(tf.square(x @ tf.sparse.sparse_dense_matmul(links, weight)))
            train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            of_all: dict[str, Any] = {} if isinstance(ad, Alone) else {"batch_axis": {key(links): None}}
            session = ad.create_distributed_session(**of_all)
            session.run(v1.global_variables_initializer())
            whole = v1.SparseTensorValue([[0, 1], [2, 3], [3, 0]], [0.5, 2.0, -1.0], [4, 4])
            for _ in range(2):
                session.run(train, {x: rows, links: whole})
            return values(session)

    assert_like_one_device(script)


def test_what_cannot_be_split_is_refused() -> None:
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        fixed = v1.sparse_placeholder(tf.float32, [4, 4], "fixed")
        words = v1.sparse_placeholder(tf.int64, name="words")
        weight = v1.get_variable("weight", initializer=1.0)
        loss = tf.reduce_mean(weight * tf.cast(tf.sparse.to_dense(words), tf.float32))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with pytest.raises(CaptureError, match="words is 1. It is split along its first axis alone"):
            ad.create_distributed_session(batch_axis={words: 1})
        session = ad.create_distributed_session()
        with pytest.raises(CaptureError, match=r"rank 3, and has rank 2.*shape=\[None, None, None\]"):
            session.run(loss, {words: v1.SparseTensorValue([[0, 0, 0]], [1], [2, 2, 2])})
        with pytest.raises(CaptureError, match=r"fixed shape.*batch_axis=\{'fixed': None\}"):
            session.run(tf.sparse.to_dense(fixed), {fixed: v1.SparseTensorValue([[0, 0]], [1.0], [4, 4])})


@pytest.mark.parametrize(
    ("shape", "static"),
    [
        (None, [None, None]),
        ([-1, 5], [None, 5]),
        (np.array([4, 5]), [4, 5]),
        (tf.TensorShape([None, 2, 3]), [None, 2, 3]),
    ],
    ids=str,
)
def test_shapes_are_those_of_tensorflow_s_placeholders(shape: Any, static: list[int | None]) -> None:
    with tf.Graph().as_default(), autodist().scope():
        assert v1.sparse_placeholder(tf.int64, shape).shape.as_list() == static
