"""`checkpoint` in the YAML with a TensorFlow 1 script, in which only the range of its loop changes."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint.read import saved_values
from autodist.errors import CheckpointMismatchError
from autodist.strategies import PartitionedPS
from tests.unit.checkpoint.models import SHARDS
from tests.unit.checkpoint.test_automatic import autodist

v1 = tf.compat.v1


def script(ad, steps: int, ends: bool = True, width: int = 3) -> dict[str, np.ndarray]:
    """Trains with momentum; the loop's own batches depend on the number of the step."""
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float64, [None, 4])
        weight = v1.get_variable("net/weight", [4, width], tf.float64, v1.constant_initializer(0.5))
        count = v1.get_variable("count", [], tf.int64, v1.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ weight)))
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=count)
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for step in range(ad.steps_done, steps):
                session.run([train, loss], {x: np.random.default_rng(step).normal(size=(6, 4))})
            values = session.run({v.op.name: v for v in v1.global_variables()})
    if ends:
        ad._run.end.finish()
    else:
        ad._automatic._saves.wait()
    return values


def test_a_session_goes_on_where_the_last_one_was_saved(tmp_path):
    builder = PartitionedPS(max_shards=3, **SHARDS)
    expected = script(autodist(tmp_path / "whole", builder), 6)
    script(autodist(tmp_path / "parts", builder), 5, ends=False)
    reader = tf.train.load_checkpoint(str(tmp_path / "parts"))
    assert sorted(saved_values(reader)) == ["count", "net/weight", "net/weight/Momentum"]
    assert reader.get_tensor("count") == 4
    ad = autodist(tmp_path / "parts", builder)
    assert ad.steps_done == 4
    found = script(ad, 6)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_checkpoint_of_one_strategy_is_resumed_by_another(tmp_path):
    expected = script(autodist(tmp_path / "whole"), 4)
    script(autodist(tmp_path / "parts", PartitionedPS(max_shards=3, **SHARDS)), 2)
    found = script(autodist(tmp_path / "parts", replicas=3), 4)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


def test_another_graph_is_refused(tmp_path):
    script(autodist(tmp_path), 2)
    with pytest.raises(CheckpointMismatchError, match="weight"):
        script(autodist(tmp_path), 4, width=2)


def of_iterators(ad, steps: int, skips: bool) -> np.ndarray:
    """A script whose graph contains its data, as one-shot iterators and as initialised ones."""
    with tf.Graph().as_default(), ad.scope():
        rows = tf.data.Dataset.from_tensor_slices(np.random.default_rng(0).normal(size=(48, 4))).batch(6)
        rows = rows.skip(ad.steps_done) if skips else rows
        targets = v1.data.make_initializable_iterator(rows.map(tf.math.cos))
        weight = v1.get_variable("weight", [4], tf.float64, v1.ones_initializer())
        x, y = v1.data.make_one_shot_iterator(rows).get_next(), targets.get_next()
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * weight, 1) - tf.reduce_sum(y, 1)))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with ad.create_distributed_session() as session:
            session.run([v1.global_variables_initializer(), targets.initializer])
            for _ in range(ad.steps_done, steps):
                session.run(train)
            value = session.run(weight)
    ad._run.end.finish()
    return value


def test_iterators_of_a_graph_begin_anew_which_is_told_unless_they_pass_over_what_was_read(tmp_path, caplog):
    expected = of_iterators(autodist(tmp_path / "whole"), 6, skips=False)
    of_iterators(autodist(tmp_path / "parts"), 4, skips=False)
    with caplog.at_level(logging.WARNING, "autodist"):
        np.testing.assert_array_equal(of_iterators(autodist(tmp_path / "parts"), 6, skips=True), expected)
    assert "start over" not in caplog.text
    with caplog.at_level(logging.WARNING, "autodist"):
        of_iterators(autodist(tmp_path / "parts"), 7, skips=False)
    assert "although the 6 completed steps have read from them" in caplog.text
