"""Lookup tables and Keras lookup layers, in steps, models and sessions: as on one device."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from autodist import AutoDist, ResourceSpec
from autodist.capture.function import capture_function
from autodist.errors import CaptureError
from autodist.graph.flows import flows_of
from autodist.layout import Examples, Mean
from autodist.runs.fingerprint import Fingerprint
from tests.versions import since_keras

v1 = tf.compat.v1

WORDS = np.array(["a", "b", "zz", "c", "a", "q", "b", "c", "d", "a", "zz"])
TEXTS = np.array(
    [f"{a} {b}, A {c}" if i % 3 else b for i, (a, b, c) in enumerate(zip(WORDS, WORDS[::-1], np.roll(WORDS, 3)))]
)
NUMBERS = np.array([3, 5, 3, 9, 7, 5, 11, 3, 9, 100, 5])
Y = np.random.default_rng(0).normal(size=(11, 1))


def autodist(replicas=2):
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


# -- Keras's layers --------------------------------------------------------------------------------------------------

VOCABULARY = ["a", "b", "c", "d"]
EMBEDDED = (lambda: layers.Embedding(9, 2), layers.Flatten)
ENCODED = {
    "string": (WORDS, lambda: layers.StringLookup(vocabulary=VOCABULARY), *EMBEDDED),
    "string, 3 unknown": (WORDS, lambda: layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=3), *EMBEDDED),
    "string, one-hot": (WORDS, lambda: layers.StringLookup(vocabulary=VOCABULARY, output_mode="one_hot")),
    "string, there and back": (
        WORDS,
        lambda: layers.StringLookup(vocabulary=VOCABULARY),
        lambda: layers.StringLookup(vocabulary=VOCABULARY, invert=True),
        lambda: layers.StringLookup(vocabulary=VOCABULARY, output_mode="multi_hot"),
    ),
    "integer": (NUMBERS, lambda: layers.IntegerLookup(vocabulary=[3, 5, 9], output_mode="multi_hot")),
    "integer, embedded": (NUMBERS, lambda: layers.IntegerLookup(vocabulary=[3, 5, 9], num_oov_indices=2), *EMBEDDED),
    "hashing": (WORDS, lambda: layers.Hashing(num_bins=5), *EMBEDDED),
    "hashing, salted": (WORDS, lambda: layers.Hashing(num_bins=5, salt=7, output_mode="one_hot")),
    "hashing of numbers": (NUMBERS, lambda: layers.Hashing(num_bins=5), *EMBEDDED),
    "categories": (NUMBERS % 4, lambda: layers.CategoryEncoding(4, output_mode="one_hot")),
    "categories, multi-hot": (
        np.stack([NUMBERS % 4, NUMBERS % 3], 1), lambda: layers.CategoryEncoding(4, output_mode="multi_hot"),
    ),
    "categories, counted": (
        np.stack([NUMBERS % 4, NUMBERS % 3], 1), lambda: layers.CategoryEncoding(4, output_mode="count"),
    ),
    "bins": (NUMBERS * 1.0, lambda: layers.Discretization([4.0, 6.0, 10.0], output_mode="one_hot")),
    "text": (TEXTS, lambda: layers.TextVectorization(vocabulary=VOCABULARY, output_sequence_length=4), *EMBEDDED),
    "text, counted": (TEXTS, lambda: layers.TextVectorization(vocabulary=VOCABULARY, output_mode="count")),
    "text, multi-hot": (TEXTS, lambda: layers.TextVectorization(vocabulary=VOCABULARY, output_mode="multi_hot")),
    "text, weighed": (
        TEXTS,
        lambda: layers.TextVectorization(vocabulary=VOCABULARY, idf_weights=[1.0, 2.0, 3.0, 4.0], output_mode="tf_idf"),
    ),
}  # fmt: skip


def model_of(encoding):
    """Returns a model of the encoded values, its input and a number for each example."""
    data, *making = ENCODED[encoding]
    x = data if data.ndim == 2 else data[:, None]
    keras.utils.set_random_seed(1)
    inputs = keras.Input(x.shape[1:], dtype="string" if x.dtype.kind == "U" else x.dtype.name)
    outputs = inputs
    for make in making:
        outputs = make()(outputs)
    return keras.Model(inputs, layers.Dense(1)(keras.ops.cast(outputs, "float64"))), x


OLDER = {
    "bins": since_keras("3.14", "bins of a batch of unknown length"),
    "text": since_keras("3.9", "padded texts of known length"),
}


@pytest.mark.parametrize("encoding", [pytest.param(name, marks=OLDER.get(name, ())) for name in ENCODED])
def test_how_a_loss_depends_on_the_batch_is_known_behind_layers_that_look_up(encoding, keras_in_float64):
    model, x = model_of(encoding)
    weights = [weight.value for weight in model.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(tf.convert_to_tensor(gradient))
        return loss

    spec = tf.TensorSpec([None, *x.shape[1:]], tf.string if x.dtype.kind == "U" else x.dtype)
    item = capture_function(step, (spec,), [0]).step
    assert flows_of(item).kind(item.outputs[0]) == Mean(Examples())


@pytest.mark.feature("fit", "model: lookup tables (`StringLookup`, `TextVectorization`)")
@pytest.mark.filterwarnings("ignore:.*will be ignored")
@pytest.mark.parametrize("encoding", ["string", "text, counted"])
def test_models_with_layers_that_look_up_train_as_on_one_device(encoding, keras_in_float64, caplog):
    def fitted():
        model, x = model_of(encoding)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        dataset = tf.data.Dataset.from_tensor_slices((x, Y)).batch(4)
        return model, model.fit(dataset, epochs=2, verbose=0, shuffle=False).history

    alone, expected = fitted()
    with autodist().scope(), caplog.at_level(logging.WARNING, "autodist"):
        model, found = fitted()
    assert [record.message for record in caplog.records if "not known" in record.message] == []
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-12)
    for mine, its in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-12, atol=1e-12)


# -- tables of a step ------------------------------------------------------------------------------------------------


def static(**content):
    keys, values = tf.constant(list(content)), tf.constant(list(content.values()), tf.int64)
    return tf.lookup.KeyValueTensorInitializer(keys, values)


def mutable(kind=tf.lookup.experimental.MutableHashTable, default=-1, **options):
    table = kind(tf.string, tf.int64, default, **options)
    table.insert(tf.constant(VOCABULARY), tf.constant([0, 1, 2, 3], tf.int64))
    return table


MAKERS = {
    "static": lambda: tf.lookup.StaticHashTable(static(a=0, b=1, c=2, d=3), 4),
    "vocabulary": lambda: tf.lookup.StaticVocabularyTable(static(d=3, c=2, b=1, a=0), 2),
    "mutable": lambda: mutable(default=4),
}


def step_on(table, ad):
    weight = tf.Variable(np.linspace(-1.0, 1.0, 8), trainable=True)

    @ad.function
    def step(words, y):
        with tf.GradientTape() as tape:
            ids = tf.ensure_shape(table.lookup(words), [None])
            loss = tf.reduce_mean(tf.square(tf.gather(weight, ids) - y))
        weight.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, weight)))
        return loss, ids

    return step, weight


def expected_of(table, weight, words, y):
    """The loss, the ids and the weight of one device."""
    ids = table.lookup(tf.constant(words)).numpy()
    difference = weight[ids] - y
    gradient = np.zeros_like(weight)
    np.add.at(gradient, ids, 2.0 * difference / len(y))
    return np.mean(difference**2), ids, weight - 0.1 * gradient


@pytest.mark.feature("function", "model: lookup tables (`StringLookup`, `TextVectorization`)")
@pytest.mark.parametrize("maker", MAKERS)
def test_a_table_that_stays_as_it_is_is_a_constant_of_the_step(maker, caplog):
    table = MAKERS[maker]()
    with autodist().scope() as ad, caplog.at_level(logging.WARNING, "autodist"):
        step, weight = step_on(table, ad)
    value = weight.numpy()
    for rows in (7, 11):
        loss, ids, value = expected_of(table, value, WORDS[:rows], Y[:rows, 0])
        found = step(WORDS[:rows], Y[:rows, 0])
        np.testing.assert_allclose(found[0], loss, rtol=1e-12)
        np.testing.assert_array_equal(found[1], ids)
        np.testing.assert_allclose(weight, value, rtol=1e-12)
    assert step.traces == 1
    assert [record.message for record in caplog.records if "not known" in record.message] == []


@pytest.mark.feature("function", "model: lookup tables, filled between steps")
def test_a_table_that_is_filled_further_between_steps_is_read_as_it_is_then(caplog):
    table = mutable(default=4)
    with autodist().scope() as ad, caplog.at_level(logging.WARNING, "autodist"):
        step, _ = step_on(table, ad)
        before = step(WORDS, Y[:, 0])[1].numpy()
        table.insert(tf.constant(["zz", "a"]), tf.constant([6, 7], tf.int64))
        after = step(WORDS, Y[:, 0])[1].numpy()
    np.testing.assert_array_equal(after, np.where(WORDS == "zz", 6, np.where(WORDS == "a", 7, before)))
    assert sum("filled further" in record.message for record in caplog.records) == 1


@pytest.mark.feature("function", "model: lookup tables of other kinds (`DenseHashTable`)", refused="CaptureError")
def test_a_table_of_another_kind_is_refused():
    table = mutable(tf.lookup.experimental.DenseHashTable, 4, empty_key="", deleted_key="-")
    with autodist().scope() as ad:
        step, _ = step_on(table, ad)
    with pytest.raises(CaptureError, match="DenseHashTable.*StaticHashTable.*input pipeline"):
        step(WORDS, Y[:, 0])


def test_a_table_that_the_step_makes_is_refused():
    with autodist().scope() as ad:
        weight = tf.Variable(1.0)

        @ad.function
        def step(words):
            table = tf.lookup.StaticHashTable(static(a=1, b=2), 0)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(weight * tf.cast(table.lookup(words), tf.float32))
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

    with pytest.raises(CaptureError, match="the step changes a lookup table .*Create and fill the table before"):
        step(WORDS)


@pytest.mark.feature("function", "model: lookup tables, changed by the step", refused="CaptureError")
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_table_that_the_step_changes_is_refused(is_nested):
    table = mutable()
    with autodist().scope() as ad:
        weight = tf.Variable(1.0)

        @ad.function
        def step(words):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(weight * tf.cast(table.lookup(words), tf.float32))
            weight.assign_sub(tape.gradient(loss, weight))
            if is_nested:
                tf.cond(loss > 0.0, lambda: table.remove(words), tf.no_op)
            else:
                table.insert(words, tf.zeros_like(words, tf.int64))
            return loss

    with pytest.raises(CaptureError, match=r"the step changes a lookup table .*Every worker.*fill the table before"):
        step(WORDS)


def test_workers_whose_tables_differ_capture_steps_that_differ():
    def captured(**content):
        table = tf.lookup.StaticHashTable(static(**content), 9)
        return Fingerprint.of(capture_function(table.lookup, (tf.TensorSpec([None], tf.string),), [0]).step)

    assert captured(a=1, b=2) == captured(b=2, a=1)
    assert captured(a=1, b=2) != captured(a=1, b=3)


# -- tables of a session ---------------------------------------------------------------------------------------------


def graph_on(table):
    words, y = v1.placeholder(tf.string, [None], "words"), v1.placeholder(tf.float64, [None], "y")
    weight = v1.get_variable("weight", initializer=tf.constant(np.linspace(-1.0, 1.0, 8)))
    ids = table.lookup(words)
    loss = tf.reduce_mean(tf.square(tf.gather(weight, ids) - y))
    train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    return {"loss": loss, "ids": ids, "weight": weight}, train, {words: WORDS, y: Y[:, 0]}


def run_all(session, fetches, train, batch):
    found = []
    for _ in range(2):
        found.append(session.run(fetches, batch))
        session.run(train, batch)
    return found


@pytest.mark.feature("session", "model: lookup tables (`StringLookup`, `TextVectorization`)")
@pytest.mark.parametrize("together", [True, False])
def test_tables_of_a_session_are_initialised_and_read(together, caplog):
    def initialised(session):
        both = v1.global_variables_initializer(), v1.tables_initializer()
        session.run(both) if together else [session.run(one) for one in both]
        return session

    with tf.Graph().as_default():
        parts = graph_on(MAKERS["vocabulary"]())
        with v1.Session() as session:
            expected = run_all(initialised(session), *parts)
    with tf.Graph().as_default(), autodist().scope() as ad, caplog.at_level(logging.WARNING, "autodist"):
        parts = graph_on(MAKERS["vocabulary"]())
        found = run_all(initialised(ad.create_distributed_session()), *parts)
    for mine, its in zip(found, expected, strict=True):
        for name in its:
            np.testing.assert_allclose(mine[name], its[name], rtol=1e-12, err_msg=name)
    assert [record.message for record in caplog.records if "not known" in record.message] == []


@pytest.mark.feature("session", "model: lookup tables, filled between steps")
@pytest.mark.feature("session", "model: lookup tables, changed by the step", refused="CaptureError")
def test_a_session_fills_tables_by_runs_of_their_own_and_no_others():
    with tf.Graph().as_default(), autodist().scope() as ad:
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 4)
        fetches, train, batch = graph_on(table)
        words = next(iter(batch))
        insert = table.insert(words, tf.ones_like(words, tf.int64))
        sessions = [ad.create_distributed_session() for _ in range(2)]
        for session in sessions:
            session.run(v1.global_variables_initializer())
        sessions[0].run(insert, {words: ["a", "b", "q"]})
        np.testing.assert_array_equal(
            sessions[0].run(fetches["ids"], batch), np.where(np.isin(WORDS, ["a", "b", "q"]), 1, 4)
        )
        np.testing.assert_array_equal(sessions[1].run(fetches["ids"], batch), 4)
        with pytest.raises(CaptureError, match="a run that takes a batch changes a lookup table"):
            sessions[0].run([train, insert], batch)
