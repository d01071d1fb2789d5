"""Python functions called in a step: those marked by `ad.elementwise` keep the rows of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.python_calls import elementwise
from autodist.layout import Kind, PerExample, Replicated, Sum, Unknown
from tests.unit.layout.graphs import Case


def weigh(rows: Any) -> Any:
    return 1 / (1 + np.abs(rows).sum(1))


def kind_of(make: Callable[[tf.Tensor], tf.Tensor]) -> Kind:
    case = Case()
    with case.graph.as_default():
        return case.kind(make(case.batch("x", 3)))


@pytest.mark.parametrize("caller", [tf.numpy_function, tf.py_function])
def test_a_marked_function_keeps_the_rows(caller: Callable[..., tf.Tensor]) -> None:
    case = Case()
    with case.graph.as_default():
        weights = caller(elementwise(weigh), [case.batch("x", 3)], tf.float64)
        total = tf.reduce_sum(weights)
    assert case.kind(weights) == PerExample(0)
    assert case.kind(total) == Sum()
    case.assert_joins([weights, total], {"x": np.random.default_rng(0).normal(size=(7, 3))}, (1, 4, 2))


def test_the_reason_for_an_unmarked_function_shows_the_mark() -> None:
    kind = kind_of(lambda x: tf.numpy_function(weigh, [x], tf.float64))
    assert isinstance(kind, Unknown)
    assert "calls Python code, weigh" in kind.reason
    assert "ad.elementwise(weigh) in the call of tf.numpy_function" in kind.reason


def test_only_marked_functions_of_replicated_values_are_replicated() -> None:
    assert kind_of(lambda x: tf.numpy_function(elementwise(np.sin), [np.ones(3)], tf.float64)) == Replicated()
    assert isinstance(kind_of(lambda x: tf.numpy_function(np.sin, [np.ones(3)], tf.float64)), Unknown)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda x: [x, tf.reduce_sum(x)],
        lambda x: [x, tf.reduce_mean(x, 0)],
        lambda x: [tf.transpose(x)],
        lambda x: [x, tf.repeat(x, 2, 0)],
        lambda x: [x * tf.reduce_sum(x)],
    ],
)
def test_marked_functions_of_other_values_are_unknown(arguments: Callable[[tf.Tensor], list[tf.Tensor]]) -> None:
    assert isinstance(kind_of(lambda x: tf.numpy_function(elementwise(np.add), arguments(x), tf.float64)), Unknown)
