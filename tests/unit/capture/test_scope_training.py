"""Local training of the scope's variables next to distributed steps causes one warning; other steps cause none."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist import AutoDist, ResourceSpec
from autodist.capture import local_steps, scope_training

X = np.ones((4, 3), "float32")


@pytest.fixture
def ad() -> Iterator[AutoDist]:
    """Two replicas on one worker."""
    made = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    yield made
    made._alone.stop()


def warnings(said: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in said.records if r.name == "autodist" and r.levelno == logging.WARNING]
    return [text for text in found if "in addition to the steps" in text]


class Pair:
    """Two models of a scope; a distributed step trains the first."""

    def __init__(self, ad: AutoDist) -> None:
        with ad.scope():
            self.first, self.second = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]) for _ in range(2))
            self.legacy = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
            self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)]
            self.rate = tf.Variable(0.1, trainable=False)
        self.step = ad.function(lambda x: self.train(self.first, self.optimizers[0], x))

    def gradients(self, model: Any, x: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        found: list[tf.Tensor] = tape.gradient(loss, model.trainable_variables)
        return found

    def train(self, model: Any, optimizer: Any, x: Any) -> None:
        optimizer.apply_gradients(zip(self.gradients(model, x), model.trainable_variables, strict=True))


ExtraState = Callable[[Pair], Callable[[], Any]]
"""Returns the function that a script calls after each distributed step."""


def play(pair: Pair, beside: Callable[[], Any]) -> None:
    for _ in range(5):
        pair.step(X)
        beside()


def in_a_function(pair: Pair) -> Callable[[], Any]:
    return tf.function(lambda: pair.train(pair.second, pair.optimizers[1], tf.constant(X)))


def the_same_variables(pair: Pair) -> Callable[[], Any]:
    return tf.function(lambda: pair.train(pair.first, pair.optimizers[1], tf.constant(X)))


def eagerly(pair: Pair) -> Callable[[], Any]:
    return lambda: pair.train(pair.second, pair.optimizers[1], X)


def eagerly_in_tf_keras(pair: Pair) -> Callable[[], Any]:
    optimizer = tf_keras.optimizers.legacy.SGD(0.1)
    return lambda: pair.train(pair.legacy, optimizer, X)


def by_hand_in_a_function(pair: Pair) -> Callable[[], Any]:
    @tf.function
    def step() -> None:
        for variable, gradient in zip(pair.second.trainable_variables, pair.gradients(pair.second, X), strict=True):
            variable.assign(variable - pair.rate * gradient)

    return step


def by_hand(pair: Pair) -> Callable[[], Any]:
    def step() -> None:
        for variable, gradient in zip(pair.second.trainable_variables, pair.gradients(pair.second, X), strict=True):
            variable.assign_sub(0.1 * gradient)

    return step


def gradients_in_a_function(pair: Pair) -> Callable[[], Any]:
    gradients = tf.function(lambda: pair.gradients(pair.second, X))
    return lambda: pair.optimizers[1].apply_gradients(zip(gradients(), pair.second.trainable_variables, strict=True))


@pytest.mark.parametrize(
    "beside",
    [
        in_a_function, the_same_variables, eagerly, eagerly_in_tf_keras, by_hand_in_a_function, by_hand,
        gradients_in_a_function,
    ],
)  # fmt: skip
def test_a_scope_training_is_told_once_with_its_line_and_the_mend(
    ad: AutoDist, caplog: pytest.LogCaptureFixture, beside: ExtraState
) -> None:
    pair = Pair(ad)
    play(pair, beside(pair))
    (text,) = warnings(caplog)
    assert "(test_scope_training.py:" in text
    assert "kernel" in text or "Variable" in text
    assert "under @ad.function" in text or "Put @ad.function in place of @tf.function" in text


def test_a_step_that_is_called_before_the_distributed_one_is_told_too(
    ad: AutoDist, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(ad)
    second = in_a_function(pair)
    for _ in range(2):
        second()
        pair.step(X)
    assert len(warnings(caplog)) == 1


def moving_averages(pair: Pair) -> Callable[[], Any]:
    @tf.function
    def follow() -> None:
        for target, source in zip(pair.second.variables, pair.first.variables, strict=True):
            target.assign(0.9 * target + 0.1 * source)

    return follow


def loaded_weights(pair: Pair) -> Callable[[], Any]:
    return lambda: pair.second.set_weights([w + 1.0 for w in pair.first.get_weights()])


def hyperparameters(pair: Pair) -> Callable[[], Any]:
    return lambda: (pair.rate.assign(pair.rate * 0.9), setattr(pair.optimizers[0], "learning_rate", 0.05))


def norms_in_a_function(pair: Pair) -> Callable[[], Any]:
    return tf.function(lambda: tf.linalg.global_norm(pair.gradients(pair.first, X)))


def norms(pair: Pair) -> Callable[[], Any]:
    return lambda: tf.linalg.global_norm(pair.gradients(pair.first, X))


def a_model_of_its_own(pair: Pair) -> Callable[[], Any]:
    own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    own.compile("sgd", "mse")
    optimizer = keras.optimizers.SGD(0.1)
    step = tf.function(lambda: pair.train(own, optimizer, X))
    return lambda: (own.fit(X, X[:, :1], verbose=0), step(), pair.train(own, optimizer, X))


def gradients_that_were_added_up(pair: Pair) -> Callable[[], Any]:
    held = [tf.Variable(tf.ones_like(v), trainable=False) for v in pair.second.trainable_variables]
    return tf.function(
        lambda: pair.optimizers[1].apply_gradients(
            zip([h / 2.0 for h in held], pair.second.trainable_variables, strict=True)
        )
    )


def evaluation(pair: Pair) -> Callable[[], Any]:
    pair.second.compile("sgd", "mse", metrics=["mae"])
    return lambda: (pair.second.evaluate(X, X[:, :1], verbose=0), pair.second.fit(X, X[:, :1], verbose=0))


@pytest.mark.parametrize(
    "beside",
    [
        moving_averages, loaded_weights, hyperparameters, norms_in_a_function, norms, a_model_of_its_own,
        gradients_that_were_added_up, evaluation,
    ],
)  # fmt: skip
def test_what_trains_nothing_of_the_scope_alone_is_not_told(
    ad: AutoDist, caplog: pytest.LogCaptureFixture, beside: ExtraState
) -> None:
    pair = Pair(ad)
    play(pair, beside(pair))
    assert warnings(caplog) == []


LIBRARY = """
import tensorflow as tf


def compiled(loss_of, variables, optimizer):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of()
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    return step
"""


def test_a_step_of_a_library_is_told_with_its_name_and_the_page(
    ad: AutoDist, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(local_steps, "_PACKAGES", (str(tmp_path),))
    monkeypatch.setattr(local_steps, "_NOT_THE_SCRIPT", (*local_steps._NOT_THE_SCRIPT, str(tmp_path)))
    compiled = importlib.import_module("a_library").compiled
    pair = Pair(ad)
    variables = pair.second.trainable_variables
    play(pair, compiled(lambda: tf.reduce_mean(pair.second(X) ** 2), variables, pair.optimizers[1]))
    (text,) = warnings(caplog)
    assert "(test_scope_training.py:" in text
    assert "made by a_library: wrap it in ad.function" in text
    assert "docs/libraries.md" in text


class Session:
    """A graph whose optimizer trains one variable; a plain session may run its loss."""

    def __init__(self) -> None:
        self.x = tf.compat.v1.placeholder(tf.float32, [None, 3])
        self.kernel, other = (
            tf.compat.v1.get_variable(n, [3], initializer=tf.compat.v1.ones_initializer()) for n in ("kernel", "other")
        )
        self.loss = tf.reduce_mean(tf.square(self.x @ self.kernel[:, None] - 1.0))
        descent = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        self.train = descent.minimize(self.loss, var_list=[self.kernel])
        self.train_other = descent.minimize(tf.reduce_mean(tf.square(self.x @ other[:, None])), var_list=[other])
        self.norm = tf.linalg.global_norm(tf.gradients(self.loss, [self.kernel]))
        self.plain = tf.compat.v1.Session()
        self.plain.run(tf.compat.v1.global_variables_initializer())

    def run(self, fetches: Any) -> None:
        self.plain.run(fetches, {self.x: X})

    def run_callable(self, fetches: Any) -> None:
        self.plain.make_callable(fetches, [self.x])(X)


def distributed_session(ad: AutoDist) -> Session:
    """A graph that a distributed session has trained."""
    with tf.Graph().as_default(), ad.scope():
        made = Session()
        session = ad.create_distributed_session()
    session.run(made.train, {made.x: X})
    return made


@pytest.mark.parametrize("run", [Session.run, Session.run_callable])
def test_a_plain_session_that_trains_the_graph_of_a_distributed_one_is_told(
    ad: AutoDist, caplog: pytest.LogCaptureFixture, run: Callable[[Session, Any], None]
) -> None:
    beside = distributed_session(ad)
    for _ in range(2):
        run(beside, [beside.train_other, beside.loss])
    (text,) = warnings(caplog)
    assert "a session that ad.create_distributed_session() did not make (test_scope_training.py:" in text
    assert "trains other on" in text


def test_a_plain_session_that_trains_a_graph_of_the_scope_beside_a_function_is_told(
    ad: AutoDist, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(ad)
    with tf.Graph().as_default(), ad.scope():
        beside = Session()
    play(pair, lambda: beside.run(beside.train))
    (text,) = warnings(caplog)
    assert "trains kernel on" in text


def test_a_plain_session_that_trains_nothing_of_the_scope_is_not_told(
    ad: AutoDist, caplog: pytest.LogCaptureFixture
) -> None:
    beside = distributed_session(ad)
    beside.run([beside.loss, beside.norm])
    with beside.plain.graph.as_default():
        beside.plain.run(beside.kernel.assign([1.0, 2.0, 3.0]))
    with tf.Graph().as_default():
        own = Session()
        own.run(own.train)
    assert warnings(caplog) == []


def test_a_function_that_trains_nothing_costs_no_comparisons_after_fifty_calls(
    ad: AutoDist, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, compared = Pair(ad), []
    calls = [norms_in_a_function(pair), norms(pair)]
    pair.step(X)
    monkeypatch.setattr(scope_training, "suspects_of", lambda variables: compared.append(variables) or [])
    for _ in range(60):
        for call in calls:
            call()
    assert len(compared) == 2 * scope_training._LOOKS
