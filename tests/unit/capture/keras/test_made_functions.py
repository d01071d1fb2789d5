"""Train functions created by a model's class are the steps that `fit` distributes, in Keras 3 and in tf_keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist import AutoDist, ResourceSpec
from autodist.capture.keras.train_functions import one_batch_step, plain_function
from autodist.errors import CaptureError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(17, 3)), RNG.normal(size=(17, 1))

Train = Callable[[Any, Any], Any]
"""A function that a class makes: of the model and the iterator."""


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Lets `fit` of both libraries hand out batches as they are."""
    before = [library.backend.floatx() for library in (keras, tf_keras)]
    for library in (keras, tf_keras):
        library.backend.set_floatx("float64")
    yield
    for library, floatx in zip((keras, tf_keras), before, strict=True):
        library.backend.set_floatx(floatx)


def around_the_library_s(model: Any, iterator: Any) -> Any:
    logs = dict(model.plain(iterator))
    return logs | {"twice": 2 * logs["loss"]}


def compiled(model: Any, iterator: Any) -> Any:
    x, y = iterator.get_next()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.abs(model(x) - y))
    variables = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return {"loss": loss, "inputs": tf.reduce_mean(x)}


def of_two(model: Any, iterator: Any) -> Any:
    return [model.train_step(next(iterator)) for _ in range(2)][-1]


def of_an_optional(model: Any, iterator: Any) -> Any:
    return model.train_step(iterator.get_next_as_optional().get_value())


def build(library: Any, function: Train) -> Any:
    """Returns a model of Keras 3 or of tf_keras whose class makes that function."""

    class Own(library.Sequential):  # type: ignore[misc,name-defined]
        train_function: Any

        def make_train_function(self, force: bool = False) -> Any:
            if self.train_function is None or force:
                super().make_train_function(force=True)
                self.plain = self.train_function

                def made(iterator: Any) -> Any:
                    return function(self, iterator)

                self.train_function = tf.function(made) if function is compiled else made
            return self.train_function

    initial = [library.initializers.GlorotUniform(seed=seed) for seed in (1, 2)]
    first = library.layers.Dense(4, "tanh", kernel_initializer=initial[0])
    last = library.layers.Dense(1, kernel_initializer=initial[1])
    return Own([library.Input((3,)), first, last])


def fitted(library: Any, function: Train, **settings: Any) -> list[Any]:
    """The weights and the history of a training."""
    model = build(library, function)
    model.compile(library.optimizers.SGD(0.1), "mse", **settings)
    history = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), *(history.history[name] for name in sorted(history.history))]


def two_replicas() -> AutoDist:
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))


BOTH = pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    "library, function, steps",
    [
        (keras, around_the_library_s, 2),
        (keras, compiled, 1),
        (tf_keras, around_the_library_s, 1),
        (tf_keras, around_the_library_s, 2),
    ],
    ids=name_of,
)
def test_fit_distributes_what_the_class_makes(library: Any, function: Train, steps: int) -> None:
    alone = fitted(library, function, steps_per_execution=steps)
    with two_replicas().scope():
        found = fitted(library, function, steps_per_execution=steps)
    assert len(found) == len(alone) == 6
    for mine, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-9)


def doubled(library: Any, when: str, calls: str) -> list[Any]:
    """Returns the weights after a `fit` of a model with a custom train function that doubles its logs."""
    initial = library.initializers.GlorotUniform(seed=1)
    model = library.Sequential([library.Input((3,)), library.layers.Dense(1, kernel_initializer=initial)])
    if when == "before fit":
        model.compile(library.optimizers.SGD(0.1), "mse")
    found = model.make_train_function

    def make_train_function(force: bool = False) -> Any:
        if model.train_function is None or force:
            found(force=True) if calls == "what it found" else type(model).make_train_function(model, force=True)
            plain = model.train_function
            model.train_function = lambda iterator: tf.nest.map_structure(lambda log: 2.0 * log, plain(iterator))
        return model.train_function

    model.make_train_function = make_train_function
    if when == "before compile":
        model.compile(library.optimizers.SGD(0.1), "mse")
    history = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), history.history["loss"]]


@pytest.mark.parametrize(
    "library, when, calls",
    [
        (keras, "before compile", "what it found"),
        (keras, "before fit", "the class's"),
        (tf_keras, "before compile", "the class's"),
        (tf_keras, "before fit", "what it found"),
    ],
    ids=name_of,
)
def test_fit_distributes_what_a_maker_that_is_set_on_the_model_makes(library: Any, when: str, calls: str) -> None:
    alone, ad = doubled(library, when, calls), two_replicas()
    with ad.scope():
        found = doubled(library, when, calls)
    assert ad._run.step == 2 * 4
    for mine, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("library, owner", [(keras, None), (tf_keras, 1)], ids=["all-reduce", "server"])
def test_functions_made_by_the_class_train_on_two_workers_as_on_one_device(library: Any, owner: int | None) -> None:
    model = build(library, compiled)
    model.compile(library.optimizers.SGD(0.1), "mse")
    step, plain = one_batch_step(model, "train"), plain_function(model, "train")
    captured = capture(lambda x, y: step((x, y)), X, Y)
    batches = [(X[:5], Y[:5]), (X[5:14], Y[5:14]), (X[14:], Y[14:])]
    alone = one_device(captured, lambda x, y: plain(iter(tf.data.Dataset.from_tensors((x, y)))), batches)
    owners = {} if owner is None else {gradient.variable: owner for gradient in captured.step.gradients}
    assert_same(train(captured, plan(captured.step, 2, 1, owners), batches), alone, rtol=1e-9)


@BOTH
@pytest.mark.parametrize("function, told", [(of_two, "more than one batch"), (of_an_optional, "by next")])
def test_functions_that_cannot_be_steps_are_refused_by_name(library: Any, function: Train, told: str) -> None:
    model = build(library, function)
    with two_replicas().scope():
        model.compile("sgd", "mse")
        with pytest.raises(CaptureError, match=f"(?s)Own.make_train_function makes takes .*{told}"):
            model.fit(X, Y, batch_size=5, verbose=0)


class Judged(keras.Sequential):
    def make_test_function(self, force: bool = False) -> None:
        self.test_function = lambda iterator: {"total": tf.reduce_sum(self(next(iterator)[0]))}

    def make_predict_function(self, force: bool = False) -> None:
        self.predict_function = lambda batches: 2.0 * self(batches[0])


def test_test_and_predict_functions_that_are_set_on_the_model_are_called_as_they_are() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.make_test_function = lambda force=False: Judged.make_test_function(model)
    model.make_predict_function = lambda force=False: Judged.make_predict_function(model)
    with two_replicas().scope():
        model.compile("sgd", "mse")
        np.testing.assert_allclose(model.predict(X, verbose=0), 2.0 * model(X))
        assert set(model.evaluate(X, Y, verbose=0, return_dict=True)) == {"total"}


def test_test_and_predict_functions_of_the_class_are_called_as_they_are() -> None:
    with two_replicas().scope():
        model = Judged([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
    outputs = model(X)
    evaluated = model.evaluate(X, Y, batch_size=17, verbose=0, return_dict=True)
    np.testing.assert_allclose(evaluated["total"], np.sum(outputs), rtol=1e-9)
    np.testing.assert_allclose(model.predict(X, batch_size=17, verbose=0), 2.0 * outputs, rtol=1e-9)
