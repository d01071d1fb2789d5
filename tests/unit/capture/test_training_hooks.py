"""Hooks that detect training outside of distributed steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras  # noqa: F401 (hooks are put into its optimizers, too)

from autodist.capture import training_hooks


class Listener:
    """Notes how many variables optimizers apply gradients to."""

    def __init__(self) -> None:
        self.applied: list[int] = []

    def on_applied(self, variables: list[object]) -> None:
        self.applied.append(len(variables))

    def on_gradients(self, sources: object, gradients: object) -> None:
        """Nothing."""

    def on_run(self, session: object, fetches: object) -> None:
        """Nothing."""

    def around_call(self, function: object, call: Callable[[], object]) -> object:
        return call()


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener()
    training_hooks.listen(one)  # type: ignore[arg-type]
    yield one
    training_hooks.stop_listening(one)  # type: ignore[arg-type]


def test_each_hook_takes_the_names_of_the_arguments_that_it_takes_the_place_of(listener: Listener) -> None:
    for hook in training_hooks._hooks:
        expected = list(inspect.signature(hook.plain).parameters)
        wrapper = inspect.getclosurevars(hook.replacement).nonlocals["wrapper"]
        parameters = [*inspect.signature(wrapper).parameters.values()][1:]  # the first is the plain method
        named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert named[1:] == expected[1 : len(named)], hook
        assert named or expected[0] == "self"


def test_gradients_may_be_applied_by_keyword(listener: Listener) -> None:
    w = keras.Variable(np.ones(2))
    keras.optimizers.SGD(1.0).apply(grads=[tf.ones(2)], trainable_variables=[w])
    np.testing.assert_allclose(w.numpy(), 0.0)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0)
    tf.function(lambda: scaled.apply([tf.fill([2], 2.0)], [w]))()  # calls the inner optimizer's apply by keyword
    np.testing.assert_allclose(w.numpy(), -1.0)
    assert listener.applied
