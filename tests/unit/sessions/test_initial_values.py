"""Sessions whose scripts never run an initialiser."""

from __future__ import annotations

import logging

import numpy as np
import tensorflow as tf

from tests.unit.sessions.test_session import autodist

v1 = tf.compat.v1


def build() -> tuple[tf.Tensor, tf.Tensor, tf.Operation]:
    x = v1.placeholder(tf.float64, [None, 2], "x")
    w = v1.get_variable("w", initializer=np.array([1.0, 2.0]))
    loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, w)))
    return x, w, v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)


def test_variables_have_their_initial_values_where_no_run_sets_them(caplog):
    with tf.Graph().as_default(), (ad := autodist()).scope(), caplog.at_level(logging.INFO, "autodist"):
        x, w, train = build()
        session = ad.create_distributed_session()
        assert list(session.run(v1.report_uninitialized_variables())) == [b"w", b"w/Momentum"]
        np.testing.assert_array_equal(session.run(w), [1.0, 2.0])
        session.run(train, {x: np.ones((4, 2))})
        assert session.run(w)[0] < 1.0
        assert list(session.run(v1.report_uninitialized_variables())) == []
    assert "no run of the session has set w, w/Momentum" in caplog.text


def test_values_set_by_a_run_stay(caplog):
    with tf.Graph().as_default(), (ad := autodist()).scope(), caplog.at_level(logging.INFO, "autodist"):
        x, w, train = build()
        session = ad.create_distributed_session()
        w.load([3.0, 4.0], session)
        np.testing.assert_array_equal(session.run(w), [3.0, 4.0])
        session.run(train, {x: np.ones((4, 2))})
    assert "no run of the session has set w/Momentum;" in caplog.text


def test_a_script_that_initialises_pays_nothing(caplog):
    with tf.Graph().as_default(), (ad := autodist()).scope(), caplog.at_level(logging.INFO, "autodist"):
        x, _, train = build()
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        session.run(train, {x: np.ones((4, 2))})
        assert not any("has_value" in op.name for op in session._run.graph_runners.control.graph.get_operations())
    assert "no run of the session has set" not in caplog.text


def test_a_run_that_counts_up_or_reads_beside_what_it_sets_finds_initial_values():
    with tf.Graph().as_default(), (ad := autodist()).scope():
        x, w, train = build()
        count = v1.get_variable("count", initializer=np.int64(3))
        total = tf.reduce_sum(x) + tf.reduce_sum(w)
        session = ad.create_distributed_session()
        session.run(w.initializer)
        assert session.run([total, count.assign_add(1)], {x: np.ones((4, 2))}) == [11.0, 4]
        session.run(train, {x: np.ones((4, 2))})
        assert session.run(count) == 4


def test_tf_kerass_optimizers_for_functions_need_no_initialiser():
    from tf_keras.optimizers import SGD

    with tf.Graph().as_default(), (ad := autodist()).scope():
        x = v1.placeholder(tf.float64, [None, 2], "x")
        w = tf.Variable(np.ones((2, 1)), name="w")
        optimizer = SGD(0.1, momentum=0.9)
        loss = tf.reduce_mean(tf.square(x @ w))
        optimizer.build([w])
        train = tf.function(lambda g: optimizer.apply_gradients([(g, w)]))(*tf.gradients(loss, w))
        session = ad.create_distributed_session()
        for _ in range(2):
            session.run(train, {x: np.ones((4, 2))})
        np.testing.assert_allclose(session.run(w), 0.0, atol=1e-8)  # its learning rate is float32
        assert session.run(optimizer.iterations) == 2


def test_a_run_that_sets_reads_in_a_branch_what_has_no_value_yet(caplog):
    with tf.Graph().as_default(), (ad := autodist()).scope(), caplog.at_level(logging.INFO, "autodist"):
        _, w, _ = build()
        is_set = v1.is_variable_initialized(w)
        copy = v1.get_variable("copy", initializer=tf.cond(is_set, w.read_value, lambda: 2 * w.initial_value))
        session = ad.create_distributed_session()
        session.run(copy.initializer)
        assert "no run of the session has set" not in caplog.text
        np.testing.assert_array_equal(session.run([copy, w]), [[2.0, 4.0], [1.0, 2.0]])
