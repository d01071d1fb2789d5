"""Calls of a step that differ only in the values of their arrays."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.functions.tracing import form_of

X = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X,), (X + 1,)),
        ((tf.constant(X), 3), (tf.constant(X + 1), 3)),
        (({"b": X, "a": np.float32(1)},), ({"a": np.float32(2), "b": X + 1},)),
        (([X, None, "mean", b"x", 0.5, True],), ([X + 1, None, "mean", b"x", 0.5, True],)),
    ],
)
def test_values_of_arrays_do_not_count(one: Any, other: Any) -> None:
    assert form_of(one)[0] == form_of(other)[0] is not None


@pytest.mark.parametrize(
    "other", [X[:3], X.astype(np.float64), tf.constant(X), X.astype(">f4"), X.T, np.float32(0), [X], (X, X), 0.0, "x"]
)
def test_other_differences_make_another_form(other: Any) -> None:
    assert form_of((X,))[0] != form_of((other,))[0]


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, None), ("a", b"a"), (np.int32(1), np.int64(1))])
def test_plain_values_count_with_their_types(one: Any, other: Any) -> None:
    assert form_of((X, one))[0] != form_of((X, other))[0]


def test_the_arrays_are_those_that_are_passed_in_the_order_of_tensorflows_nests() -> None:
    a, b, c = X + 1, tf.constant(X), np.float32(3)
    found = form_of(({"z": a, "k": 7, "m": [b]}, c))[1]
    assert [id(x) for x in found] == [id(b), id(a), id(c)]


def test_calls_that_need_a_full_comparison_have_no_form() -> None:
    pair = collections.namedtuple("pair", "x y")
    others = [
        pair(X, X), tf.sparse.from_dense(X), tf.Variable(1.0), object(), {1: X, "a": X}, collections.OrderedDict(a=X),
    ]  # fmt: skip
    for other in others:
        assert form_of((X, other)) == (None, [])
