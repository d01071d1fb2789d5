"""Evaluations distributed over two replicas equal one device's; those that would differ run on one device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist import AutoDist
from autodist.capture.keras.evaluations import Evaluations, LegacyEvaluations
from autodist.capture.keras.fits import Fits
from autodist.capture.keras.models import KerasModels, LegacyModels
from autodist.errors import NotSharedError
from autodist.resources import ResourceSpec

DRAW = np.random.default_rng(0)
X, Y, K = DRAW.normal(size=(29, 5)), DRAW.normal(size=(29, 2)), DRAW.integers(0, 3, (29,))
WORDS = np.where(np.arange(6) < DRAW.integers(1, 7, 29)[:, None], DRAW.integers(1, 9, (29, 6)), 0)
W = DRAW.uniform(size=29)


pytestmark = pytest.mark.usefixtures("keras_in_float64")


def on_two_replicas(build: Callable[[], keras.Model]) -> tuple[keras.Model, keras.Model]:
    """A model on two replicas, and the same on one device."""
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():
        shared = build()
    plain = build()
    plain.set_weights(shared.get_weights())
    return shared, plain


def assert_alike(found: Any, expected: Any) -> None:
    found, expected = tf.nest.flatten(found), tf.nest.flatten(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-15)


def two_outputs(**options: Any) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, "relu")(inputs)
    a, b = keras.layers.Dense(2, name="a")(hidden), keras.layers.Dense(3, "softmax", name="b")(hidden)
    model = keras.Model(inputs, {"a": a, "b": b})
    model.compile(
        "adam",
        {"a": "mse", "b": "sparse_categorical_crossentropy"},
        metrics={"a": ["mae", keras.metrics.R2Score()], "b": ["accuracy"]},
        weighted_metrics={"a": ["mse"], "b": []},
        **options,
    )
    return model


def one_layer(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"], **options)
    return model


def masked() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(9, 4, mask_zero=True),
            keras.layers.SimpleRNN(3, return_sequences=True),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


TRUTH = {"a": Y, "b": K}
TRUTH_OF: dict[str, Any] = {"evaluate": {"y": Y}, "predict": {}}


@functools.cache
def evaluated() -> tuple[keras.Model, keras.Model]:
    """Models for tests that only evaluate: the traces are shared by the tests, and weights do not change."""
    return on_two_replicas(two_outputs)


@pytest.fixture
def count_shared(monkeypatch):
    """Counts the steps of each kind that all replicas have shared."""
    from autodist.functions.keras_training import EvaluationStep

    counts = {"test_step": 0, "predict_step": 0}
    plain = EvaluationStep.__call__

    def call(self, data):
        found = plain(self, data)
        counts[self._name] += 1
        return found

    monkeypatch.setattr(EvaluationStep, "__call__", call)
    return counts


@pytest.mark.feature("fit", "evaluation: `evaluate`")
def test_evaluate_gives_what_one_device_gives(count_shared):
    shared, plain = evaluated()
    for options in ({"batch_size": 7}, {"batch_size": 7, "sample_weight": W}, {"batch_size": 28}, {"steps": 2}):
        given = [m.evaluate(X, TRUTH, verbose=0, return_dict=True, **options) for m in (shared, plain)]
        assert_alike(*given)
    assert count_shared == {"test_step": 5 + 5 + 2 + 2, "predict_step": 0}


def test_steps_per_execution_take_as_many_batches_as_ever(count_shared):
    shared, plain = on_two_replicas(lambda: one_layer(steps_per_execution=3))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()
    assert_alike(*(m.evaluate(data, steps=7, verbose=0) for m in (shared, plain)))
    assert_alike(*(m.predict(data, steps=7, verbose=0) for m in (shared, plain)))
    assert_alike(*(m.evaluate(X, Y, batch_size=4, verbose=0) for m in (shared, plain)))
    assert_alike(*(m.predict(X, batch_size=4, verbose=0) for m in (shared, plain)))
    assert count_shared == {"test_step": 9 + 8, "predict_step": 9 + 8}, "as Keras counts"


def test_masks_count_as_on_one_device(count_shared):
    shared, plain = on_two_replicas(masked)
    truth = np.repeat(K[:, None], 6, 1)
    assert_alike(*(m.evaluate(WORDS, truth, batch_size=9, verbose=0) for m in (shared, plain)))
    assert_alike(*(m.predict(WORDS, batch_size=9, verbose=0) for m in (shared, plain)))
    assert count_shared == {"test_step": 4, "predict_step": 4}


@pytest.mark.feature("fit", "evaluation: `predict`")
def test_predict_returns_all_rows_in_order(count_shared):
    shared, plain = evaluated()

    def endless():
        while True:
            for start in range(0, 29, 6):
                yield (X[start : start + 6],)

    for batch_size in (1, 7, 28, 32):
        assert_alike(*(m.predict(X, batch_size=batch_size, verbose=0) for m in (shared, plain)))
    assert_alike(*(m.predict(endless(), steps=9, verbose=0) for m in (shared, plain)))
    assert count_shared["predict_step"] == 29 + 5 + 2 + 1 + 9


@pytest.mark.feature("fit", "evaluation: `test_on_batch`, `predict_on_batch`")
def test_single_batches_smaller_than_the_number_of_replicas(count_shared):
    shared, plain = evaluated()
    for rows in (1, 2, 5):
        batch = X[:rows], {"a": Y[:rows], "b": K[:rows]}
        assert_alike(*(m.test_on_batch(*batch, return_dict=True) for m in (shared, plain)))
        assert_alike(*(m.test_on_batch(*batch, sample_weight=W[:rows]) for m in (shared, plain)))
        assert_alike(*(m.predict_on_batch(X[:rows]) for m in (shared, plain)))
    assert count_shared == {"test_step": 6, "predict_step": 3}


@pytest.mark.feature("fit", "evaluation: `validation_data`")
def test_validation_in_fit_is_shared(count_shared):
    shared, plain = on_two_replicas(one_layer)
    options = {"validation_data": (X, Y, W), "batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    found, expected = (m.fit(X, Y, **options).history for m in (shared, plain))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, err_msg=name)
    assert count_shared["test_step"] == 8


class Contrastive(keras.Model):
    """Each example's loss compares it with all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        y = self(x)
        loss = keras.losses.sparse_categorical_crossentropy(tf.range(tf.shape(y)[0]), y @ tf.transpose(y), True)
        return {"loss": tf.reduce_mean(loss)}

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.nn.softmax(self(x), 0)


class Trains(Contrastive):
    def test_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x) ** 2)
        self.dense.kernel.assign_sub(0.1 * tape.gradient(loss, self.dense.kernel))
        return {"loss": loss}


class OfFixedLength(Contrastive):
    def test_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"loss": tf.reduce_mean(tf.reshape(self(x), [x.shape[0] or int("none"), 3]) ** 2)}


class Ragged(Contrastive):
    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.RaggedTensor.from_tensor(self(x))


@pytest.mark.parametrize("kind", [Contrastive, Trains, Ragged])
def test_evaluations_that_replicas_cannot_share_run_on_each_worker_as_without_autodist(kind, count_shared, caplog):
    def build():
        model = kind()
        model(X[:1])
        model.compile("sgd")
        return model

    with caplog.at_level(logging.INFO, "autodist"):
        shared, plain = on_two_replicas(build)
        assert_alike(*(m.evaluate(X, batch_size=7, verbose=0) for m in (shared, plain)))
        shapes = [tf.nest.map_structure(np.shape, m.predict(X, batch_size=7, verbose=0)) for m in (shared, plain)]
        assert shapes[0] == shapes[1]
        if kind is Contrastive:
            assert_alike(*(m.predict(X, batch_size=7, verbose=0) for m in (shared, plain)))
    assert count_shared == {"test_step": 0, "predict_step": 0}
    told = [r.message for r in caplog.records if "computes the whole" in r.message]
    assert len(told) == 2 and "evaluation" in told[0] and "prediction" in told[1]


def test_a_step_for_batches_of_a_known_length_alone_runs_on_one_device(count_shared):
    def build():
        model = OfFixedLength()
        model(X[:1])
        model.compile("sgd")
        return model

    data = tf.data.Dataset.from_tensor_slices(X).batch(7, drop_remainder=True)
    shared, plain = on_two_replicas(build)
    assert_alike(*(m.evaluate(data, verbose=0) for m in (shared, plain)))
    assert count_shared["test_step"] == 0


def test_sparse_batches_are_shared_too(count_shared):
    def build():
        inputs = keras.Input((5,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), Y)).batch(7)
    shared, plain = on_two_replicas(build)
    assert_alike(*(m.evaluate(data, verbose=0) for m in (shared, plain)))
    assert count_shared["test_step"] == 5


def test_a_class_that_makes_its_own_functions_keeps_them():
    class Own(keras.Model):
        def make_test_function(self, force: bool = False) -> None:
            self.test_function = lambda iterator: {"loss": len(next(iterator))}

    evaluations = Evaluations(lambda *_: None, lambda describe, is_certain: True, str)  # type: ignore[arg-type,return-value]
    with KerasModels(lambda step, jit_compile: None, None, evaluations).adopting():  # type: ignore[arg-type,return-value]
        model = Own()
    assert "make_test_function" not in vars(model) and "make_predict_function" in vars(model)


class Step:
    """A step that counts its calls, and raises on request."""

    traces = 0

    def __init__(self, own: Callable[[Any], Any], refuses: bool = False) -> None:
        self._own, self._refuses, self.calls = own, refuses, 0

    def __call__(self, data: Any) -> Any:
        if self._refuses:
            raise NotSharedError("told to.")
        self.calls += 1
        return self._own(data)


@pytest.mark.parametrize("is_together", [True, False])
def test_each_evaluation_asks_once_whether_all_make_it_and_validation_says_so(is_together, caplog):
    caplog.set_level(logging.INFO, "autodist")
    asked: list[tuple[tuple[str, str], bool]] = []
    steps: list[Step] = []

    def together(describe, is_certain):
        asked.append((describe(), is_certain))
        return is_together

    def make(own, jit_compile):
        steps.append(Step(own))
        return steps[-1]

    validated: list[keras.Model] = []
    evaluations = Evaluations(make, together, lambda array: str(np.sum(array)), lambda m: m in validated)  # type: ignore[arg-type]
    with KerasModels(lambda own, *_: Step(own), None, evaluations).adopting():  # type: ignore[arg-type]
        model = one_layer()
    for _ in range(2):
        model.evaluate(X, Y, batch_size=7, verbose=0)
    model.evaluate(X[::-1], Y, batch_size=7, verbose=0)
    validated.append(model)
    model.evaluate(X, Y, batch_size=7, verbose=0)
    assert [certain for _, certain in asked] == [False, False, False, True]
    assert ("since their data or steps differ" in caplog.text) is not is_together
    (what, data), *others = [call for call, _ in asked]
    assert others[0] == others[2] == (what, data)
    assert others[1][0] == what and others[1][1] != data
    assert sum(step.calls for step in steps) == (4 * 5 if is_together else 0)


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_evaluations_with_the_same_first_batch_are_the_same_if_as_much_follows(library):
    asked: list[tuple[str, str]] = []

    def together(describe, is_certain):
        asked.append(describe())
        return False

    kind, of = (Evaluations, KerasModels) if library is keras else (LegacyEvaluations, LegacyModels)
    evaluations = kind(lambda own, *_: Step(own), together, lambda array: str(np.sum(array)))
    with of(lambda own, *_: Step(own), Fits(True, lambda said, call: said, lambda: None), evaluations).adopting():
        model = library.Sequential([library.layers.InputLayer((5,)), library.layers.Dense(2)])
        model.compile("sgd", "mse")

    def called(method: str, *args: Any, **options: Any) -> tuple[str, str]:
        asked.clear()
        getattr(model, method)(*args, **options)
        return asked[0]

    def data_set(count: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(7).take(count)

    quietly = {"verbose": 0}
    whole = called("evaluate", X, Y, 7, **quietly)
    assert called("evaluate", x=X, y=Y, batch_size=7, **quietly) == whole
    others = [
        called("evaluate", X, Y, 7, steps=2, **quietly),
        called("evaluate", X[:8], Y[:8], 7, **quietly),
        called("evaluate", data_set(4), **quietly),
        called("evaluate", data_set(2), **quietly),
        called("evaluate", data_set(2), steps=1, **quietly),
        called("test_on_batch", X[:7], Y[:7]),
    ]
    assert all(what == whole[0] for what, _ in others)
    assert len({data for _, data in [whole, *others]}) == 1 + len(others)
    assert called("test_on_batch", X[:7], Y[:7]) == others[-1]
    assert called("predict", X, batch_size=7, **quietly) != called("predict", X[:8], batch_size=7, **quietly)


@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_worker_that_leaves_an_evaluation_of_all_is_noted(name, is_together):
    told: list[bool] = []

    @contextmanager
    def noting(is_shared):
        try:
            yield
        finally:
            told.append(is_shared())

    class Leaves(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

        on_predict_batch_end = on_test_batch_end

    class LeavesAtOnce(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            raise KeyboardInterrupt

        on_predict_begin = on_test_begin

    evaluations = Evaluations(
        lambda own, *_: Step(own), lambda describe, is_certain: is_together, str, noting_interrupts=noting,
    )  # type: ignore[arg-type]  # fmt: skip
    fits = Fits(True, lambda said, call: said, lambda: None)
    with KerasModels(lambda own, *_: Step(own), fits, evaluations).adopting():  # type: ignore[arg-type]
        model = one_layer()
    for leaves in (Leaves(), LeavesAtOnce()):
        with pytest.raises(KeyboardInterrupt):
            getattr(model, name)(X, batch_size=7, verbose=0, callbacks=[leaves], **TRUTH_OF[name])
    assert told == [is_together, False]


def test_the_parts_loss_of_an_evaluation_alone_weighs_batches_as_ever():
    """Keras weighs the batches of an output's loss by their length if it is known when the step is traced."""
    evaluations = Evaluations(lambda own, *_: Step(own), lambda describe, is_certain: False, str)  # type: ignore[arg-type]
    with KerasModels(lambda own, jit_compile: Step(own), None, evaluations).adopting():  # type: ignore[arg-type]
        model = two_outputs()
    plain = two_outputs()
    plain.set_weights(model.get_weights())
    assert_alike(*(m.evaluate(X, TRUTH, batch_size=8, verbose=0) for m in (model, plain)))


@pytest.mark.slow
def test_evaluations_compiled_by_xla_are_shared_too(count_shared):
    shared, plain = on_two_replicas(lambda: one_layer(jit_compile=True))
    assert_alike(*(m.evaluate(X, Y, batch_size=7, verbose=0) for m in (shared, plain)))
    assert count_shared["test_step"] == 5


def test_before_there_are_other_workers_a_script_that_has_asked_which_it_is_evaluates_alone(caplog):
    caplog.set_level(logging.INFO, "autodist")
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes}))
    with ad.scope():
        shared = one_layer()
    plain = one_layer()
    plain.set_weights(shared.get_weights())
    if ad.is_chief:
        assert_alike(*(m.evaluate(X, Y, batch_size=7, verbose=0) for m in (shared, plain)))
    assert not ad._run._peers.have_joined, "nobody was started"
    assert caplog.text.count("since the script has read its worker's index") == 1
