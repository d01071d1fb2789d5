"""word2vec in the style of TensorFlow 1 scripts, in a session of several replicas."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec

v1 = tf.compat.v1
WORDS, WIDTH, SAMPLED = 20, 4, 6


def given(labels):
    true = tf.cast(tf.fill(tf.shape(labels), 0.3), tf.float64)
    return tf.constant([1, 3, 4, 7, 9, 3], tf.int64), true, tf.constant([0.3] * SAMPLED, tf.float64)


def word2vec(sampled, dtype=tf.float64):
    rng = np.random.default_rng(0)

    def variable(name, *shape):
        return v1.get_variable(name, initializer=tf.constant(rng.normal(size=shape), dtype))

    words = v1.placeholder(tf.int32, [None], "words")
    labels = v1.placeholder(tf.int64, [None, 1], "labels")
    embeddings, matrix, bias = (
        variable("embeddings", WORDS, WIDTH),
        variable("matrix", WORDS, WIDTH),
        variable("bias", WORDS),
    )
    seen = tf.nn.embedding_lookup(embeddings, words)
    rows = v1.nn.nce_loss(matrix, bias, labels, seen, SAMPLED, WORDS, sampled_values=sampled and sampled(labels))
    loss = tf.reduce_mean(rows)
    return loss, v1.train.AdagradOptimizer(0.5).minimize(loss)


def trained(session, loss, train):
    session.run(v1.global_variables_initializer())
    rng = np.random.default_rng(1)
    losses = [
        session.run([loss, train], {"words:0": rng.integers(0, WORDS, n), "labels:0": rng.integers(0, WORDS, (n, 1))})[
            0
        ]
        for n in (8, 7, 2)
    ]
    return {"losses": losses, **{v.name: session.run(v) for v in v1.global_variables()}}


def autodist():
    node = {"address": "localhost", "cpus": [0, 1, 2]}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


@pytest.mark.feature("session", "loss: `nce_loss`, `sampled_softmax_loss`")
def test_three_replicas_train_what_one_device_trains():
    with tf.Graph().as_default():
        step = word2vec(given)
        with v1.Session() as session:
            expected = trained(session, *step)
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        step = word2vec(given)
        found = trained(ad.create_distributed_session(), *step)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_replicas_that_sample_for_themselves_take_uneven_batches(caplog):
    ad = autodist()
    with caplog.at_level(logging.WARNING, "autodist"), tf.Graph().as_default(), ad.scope():
        step = word2vec(None, tf.float32)
        found = trained(ad.create_distributed_session(), *step)
    assert np.isfinite(found["losses"]).all()
    assert "not known" not in caplog.text
