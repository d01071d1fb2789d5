"""With `steps_per_execution=k` in `compile`, k steps are one call of the session, and train as k calls do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.runtime.program import Program

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(38, 5)), RNG.normal(size=(38, 2))


pytestmark = pytest.mark.usefixtures("keras_in_float64")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of steps of each call of a program."""
    found: list[int] = []
    for name, count in (("run", lambda values: 1), ("repeat", len)):
        method = getattr(Program, name)

        def noted(self: Program, values: Any, *args: Any, method: Any = method, count: Any = count, **kw: Any) -> Any:
            found.append(count(values))
            return method(self, values, *args, **kw)

        monkeypatch.setattr(Program, name, noted)
    return found


class Seen(keras.callbacks.Callback):
    """Records the arguments of callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, dict[str, float]]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("begin", batch, {}))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("end", batch, {k: float(v) for k, v in logs.items()}))


def dense(**options: Any) -> keras.Model:
    layers = [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=3, **options)
    return model


def with_dropout(**options: Any) -> keras.Model:
    layers = [keras.Input((5,)), keras.layers.Dense(6), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", steps_per_execution=3, **options)
    return model


def recurrent() -> keras.Model:
    layers = [keras.Input((5,)), keras.layers.Reshape((5, 1)), keras.layers.SimpleRNN(3), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", steps_per_execution=3)
    return model


class Drawing(keras.layers.Layer):
    """Draws from a state that TensorFlow keeps with the node."""

    def call(self, x: Any) -> Any:
        return x + 0.0 * tf.random.normal(tf.shape(x), dtype=x.dtype)


def drawing() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), Drawing(), keras.layers.Dense(2)])
    model.compile("sgd", "mse", steps_per_execution=3)
    return model


def trained(build: Callable[[], keras.Model], cpus: int, **options: Any) -> tuple[keras.Model, keras.Model, Any, Any]:
    """Returns a model trained on `cpus` replicas of one worker, one trained on one device, and the callbacks' records
    of both.
    """
    nodes = [{"address": "localhost", "cpus": list(range(cpus))}]
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes}))
    with ad.scope():
        shared = build()
    plain = build()
    plain.set_weights(shared.get_weights())
    seen = Seen(), Seen()
    for model, callback in zip((shared, plain), seen, strict=True):
        model.fit(X, Y, batch_size=4, verbose=0, shuffle=False, callbacks=[callback], **options)
    return shared, plain, seen[0].seen, seen[1].seen


def assert_alike(shared: keras.Model, plain: keras.Model, found: Any, expected: Any) -> None:
    for one, other in zip(shared.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert [(what, batch, logs.keys()) for what, batch, logs in found] == [
        (what, batch, logs.keys()) for what, batch, logs in expected
    ]
    for (*_, logs), (*_, others) in zip(found, expected, strict=True):
        np.testing.assert_allclose(list(logs.values()), list(others.values()), rtol=1e-9)


@pytest.mark.parametrize("build", [dense, recurrent])
def test_steps_are_one_call_and_train_what_one_device_does(build: Callable[[], keras.Model], calls: list[int]) -> None:
    assert_alike(*trained(build, 2, epochs=2))
    # 38 rows are nine batches of 4 and one of 2. The first call traces, and each new shape is looked at once.
    assert calls[:3] == [1, 1, 1] and set(calls) == {1, 3}
    assert sum(calls) == 20 and calls.count(3) == 5


@pytest.mark.slow
def test_steps_compiled_by_xla_are_repeated(calls: list[int]) -> None:
    assert_alike(*trained(lambda: dense(jit_compile=True), 2, epochs=2))
    assert 3 in calls and sum(calls) == 20


def test_keras_draws_go_on_from_step_to_step(calls: list[int]) -> None:
    assert_alike(*trained(with_dropout, 1, epochs=2))
    assert 3 in calls and sum(calls) == 20


def test_draws_that_a_loop_would_begin_anew_take_a_call_for_each_step(calls: list[int]) -> None:
    assert_alike(*trained(drawing, 2, epochs=2))
    assert calls == [1] * 20


def test_an_error_of_the_data_is_raised_after_the_steps_before_it(calls: list[int]) -> None:
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():
        model = dense()

    def rows() -> Iterator[Any]:
        for k in range(8):
            yield X[4 * k : 4 * k + 4], Y[4 * k : 4 * k + 4]
        raise ValueError("no more rows")

    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    with pytest.raises(Exception, match="no more rows"):
        model.fit(rows(), verbose=0, shuffle=False)
    assert sum(calls) == 8 == int(model.optimizer.iterations)


def test_steps_are_counted_and_saved_at_a_step_that_was_made(calls: list[int]) -> None:
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    with ad.scope():
        model = dense()
    model.fit(X[:36], Y[:36], batch_size=4, epochs=2, verbose=0)
    assert ad.steps_done == 18 == int(model.optimizer.iterations)
    assert calls.count(3) == 5
