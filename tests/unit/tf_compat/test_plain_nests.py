"""Plain nests are flattened, and packed again, as by `tf.nest`."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from autodist.tf_compat.plain_nests import NotPlainError, filled, form_of, named_as, numbered

NESTS = [1, (), [1, (2,)], {"b": 1, "a": [2, {"d": 3, "c": 4}]}, ({2: "x", 1: None},)]


@pytest.mark.parametrize("nest", NESTS)
def test_leaves_come_in_the_order_of_tensorflows(nest: Any) -> None:
    seen: list[Any] = []
    form_of(nest, seen.append)
    assert seen == tf.nest.flatten(nest)


@pytest.mark.parametrize("nest", NESTS)
def test_a_nest_is_filled_as_tensorflow_fills_it(nest: Any) -> None:
    leaves = [f"leaf {k}" for k in range(len(tf.nest.flatten(nest)))]
    mine, theirs = filled(nest, iter(leaves)), tf.nest.pack_sequence_as(nest, leaves)
    assert mine == theirs and str(mine) == str(theirs)  # the keys' order, too


@pytest.mark.parametrize(
    ("one", "other"), [((1, 2), [1, 2]), ((1, (2,)), ((1, 2),)), ({"a": 1}, {"b": 1}), ([[1], 2], [1, [2]])]
)
def test_other_structures_have_other_forms(one: Any, other: Any) -> None:
    assert form_of(one, lambda leaf: leaf) != form_of(other, lambda leaf: leaf)


def test_keys_without_an_order_are_not_plain() -> None:
    with pytest.raises(NotPlainError):
        form_of({1: 1, "a": 2}, lambda leaf: leaf)


def test_keys_without_an_order_are_numbers_to_tensorflow_and_come_back() -> None:
    hook = object()
    nest = {"caller": [1, {"b": 2, "a": 3}], hook: ({hook: 4, "x": 5},)}
    made = tf.nest.map_structure(lambda leaf: 10 * leaf, numbered(nest))
    found = named_as(nest, made)
    assert found == {"caller": [10, {"b": 20, "a": 30}], hook: ({hook: 40, "x": 50},)}
    assert list(found) == list(nest)
    assert numbered(sorted_ := {"b": 1, "a": (2,)}) == sorted_
