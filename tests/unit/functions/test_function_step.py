"""`ad.function`: its requirements for the captured step."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import EmptyBatchError
from autodist.functions import function_step
from autodist.functions.running_step import RunningStep
from autodist.functions.step_arguments import StepArguments
from autodist.reading.batch_sharding import GlobalBatch


@pytest.mark.parametrize("asked, found", [({}, False), ({"jit_compile": True}, True), ({"jit_compile": None}, False)])
def test_the_captured_step_says_whether_xla_is_asked_for(monkeypatch, asked, found):
    class SeenError(Exception):
        pass

    def prepare(run, item, *others):
        raise SeenError(item.jit_compile)

    monkeypatch.setattr(function_step, "prepare", prepare)
    ad = AutoDist()
    with ad.scope():
        weight = tf.Variable(1.0)

        @ad.function(**asked)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x * weight)
            weight.assign_sub(tape.gradient(loss, weight))

    with pytest.raises(SeenError) as seen:
        step(np.ones(3, np.float32))
    assert seen.value.args == (found,)


SPARSE = tf.SparseTensor([[0, 1], [2, 0]], [3.0, 4.0], [3, 2])
RAGGED = tf.RaggedTensor.from_row_lengths([3.0, 4.0], [0, 2, 0])


@pytest.mark.parametrize("value", [SPARSE, RAGGED])
def test_sparse_values_are_passed_whole_if_declared(value):
    ad = AutoDist()
    with ad.scope():
        weight = tf.Variable(1.0)

        @ad.function(batch_axis={"features": None})
        def step(features):
            with tf.GradientTape() as tape:
                loss = weight * tf.reduce_sum(features.values)
            weight.assign_sub(tape.gradient(loss, weight) * 0.0)
            return loss

        assert [float(step(value)), float(step(value.with_values(value.values * 2.0)))] == [7, 14]
    assert len(step._traced) == 1


@pytest.mark.feature("function", "evaluation: steps that only evaluate")
def test_functions_that_train_and_evaluate_take_turns():
    """An evaluation reads the values trained by earlier steps, and splits its batch over the replicas."""
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2]}]}))
    x = np.random.default_rng(0).normal(size=(7, 2))
    expected = np.ones((2, 1))
    with ad.scope():
        weight = tf.Variable(expected)
        seen = tf.Variable(0, trainable=False, dtype=tf.int64)

        @ad.function
        def train(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

        @ad.function
        def evaluate(x):
            seen.assign_add(tf.shape(x, out_type=tf.int64)[0])
            return x @ weight, tf.reduce_sum(x @ weight)

    for step in range(3):
        rows, total = evaluate(x)
        np.testing.assert_allclose(rows, x @ expected, rtol=1e-12)
        np.testing.assert_allclose(total, np.sum(x @ expected), rtol=1e-12)
        assert int(seen) == 7 * (step + 1)
        train(x[:5])
        expected = expected - 0.2 * x[:5].T @ (x[:5] @ expected) / 5


@pytest.mark.feature("function", "data: batches without examples", refused="EmptyBatchError")
def test_a_batch_without_examples_is_refused():
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function
        def train(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    with pytest.raises(EmptyBatchError, match="no examples at all"):
        train(np.ones((0, 2)))
    assert float(train(np.ones((1, 2)))) == 4.0


@pytest.mark.parametrize("passing", ["positional", "named"])
@pytest.mark.parametrize("batch", ["global", "per_worker"])
def test_a_call_like_an_earlier_one_is_not_looked_at_again_and_computes_with_its_own_values(
    monkeypatch, batch, passing
):
    looked = []
    plain = StepArguments.flatten
    monkeypatch.setattr(StepArguments, "flatten", lambda *args: looked.append(1) or plain(*args))
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():
        weight = tf.Variable(np.ones((2, 1)))

        @ad.function(batch=batch)
        def step(x, scale=1.0, shift=0.0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x["x"] @ weight)) * scale + shift
            weight.assign_sub(0.01 * tape.gradient(loss, weight))
            return loss

    rng, expected = np.random.default_rng(0), np.ones((2, 1))
    for rows, scale, shift in [
        (4, 1.0, 0.0),
        (3, 1.0, 0.0),
        (4, 1.0, 0.5),
        (4, 1.0, 0.0),
        (4, 2.0, 0.0),
        (3, 1.0, 0.0),
    ] * 3:
        x = rng.normal(size=(rows, 2))
        value = np.mean(np.square(x @ expected)) * scale + shift
        expected = expected - 0.01 * scale * 2 * x.T @ (x @ expected) / rows
        named = {"shift": np.float64(shift), "scale": scale, "x": {"x": x}}
        given = step(**named) if passing == "named" else step({"x": tf.constant(x)}, scale, np.float64(shift))
        np.testing.assert_allclose(float(given), value, rtol=1e-13)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-12)
    # Three forms; after the second trace two of them are checked again.
    assert len(looked) == 5 and step.traces == 2


def test_rows_that_were_as_many_by_chance_are_apart_in_calls_that_were_known():
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():

        @ad.function
        def step(x, y):
            return tf.reduce_mean(x) + tf.reduce_sum(y)

    for rows in (8, 8, 24, 8, 8):
        x, y = np.arange(float(rows)), np.arange(8.0) * rows
        np.testing.assert_allclose(float(step(x, y)), x.mean() + y.sum(), rtol=1e-13)
    assert not step._known


def test_a_step_reads_a_table_that_was_filled_since_also_in_a_call_that_was_known():
    ad = AutoDist()
    with ad.scope():
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float64, -1.0)
        table.insert(tf.constant(["a"]), tf.constant([1.0], tf.float64))

        @ad.function
        def step(words):
            return tf.reduce_sum(table.lookup(words))

    words = np.array(["a", "b"])
    assert [float(step(words)) for _ in range(3)] == [0.0] * 3
    table.insert(tf.constant(["b"]), tf.constant([5.0], tf.float64))
    assert [float(step(words)) for _ in range(3)] == [6.0] * 3


def test_parts_of_one_shape_are_told_apart_by_the_global_batches_that_they_are_of(monkeypatch):
    """Of five examples and of six the first of two workers has three."""
    seen = []
    plain = RunningStep.__call__

    def call(self, values, examples, all_examples):
        seen.append(all_examples)
        return plain(self, values, len(values[0]), len(values[0]))

    monkeypatch.setattr(RunningStep, "__call__", call)
    ad = AutoDist()
    with ad.scope():

        @ad.function(batch="global")
        def step(x):
            return tf.reduce_sum(x)

    for examples in (5, 6, 5, 6, None):
        step.global_batch = None if examples is None else GlobalBatch(examples, ())
        assert float(step(np.ones(3))) == 3
    assert seen == [5, 6, 5, 6, 3]


def test_a_pipeline_stage_means_nothing_to_another_strategy_and_that_is_told_once(caplog):
    ad = AutoDist()
    with ad.scope():
        with ad.stage(1):
            weight = tf.Variable(1.0)

        @ad.function
        def step(x):
            with tf.GradientTape() as tape, ad.stage(0):
                loss = tf.reduce_mean(x * weight)
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

        assert [float(step(np.ones(n, np.float32))) for n in (3, 2)] == [1, 0]
        assert float(step(np.ones((2, 2), np.float32))) == -1
    told = [record.message for record in caplog.records if "ad.stage" in record.message]
    assert len(told) == 1
    assert "ad.stage has no effect under AllReduce" in told[0]
