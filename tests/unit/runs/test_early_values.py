"""Early values: variables that still hold their early value are detected in a process where others hold another."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.runs.early_values import EarlyValues
from autodist.runtime.eager_watch import Watcher, watch


@pytest.fixture
def made() -> list[tf.Variable]:
    """Two variables of one name, and a state of whole numbers."""
    first, second = (tf.Variable(np.full([3], value), name="early/kernel") for value in (1.0, 2.0))
    return [first, second, tf.Variable([1, 2], name="early/state")]


def chiefs(early: EarlyValues, changed: str) -> dict[str, str]:
    return {name: "another" if name == changed else digest for name, digest in early.to_json().items()}


def test_the_variables_of_one_name_are_told_apart_in_the_order_in_which_they_were_made(made: list[tf.Variable]) -> None:
    early = EarlyValues.now()
    assert [name for name in early.to_json() if name.startswith("early/")] == ["early/kernel:0#1", "early/kernel:0#2"]
    told = chiefs(early, "early/kernel:0#2")
    assert early.differing(told, made) == ["early/kernel"]
    assert early.differing(told, made[:1]) == []


def test_equal_values_and_those_of_which_the_other_has_none_do_not_differ(made: list[tf.Variable]) -> None:
    early = EarlyValues.now()
    assert early.differing(early.to_json(), made) == early.differing({}, made) == []


def test_values_assigned_since_are_no_difference(made: list[tf.Variable]) -> None:
    early = EarlyValues.now()
    made[0].assign([1.0, 2.0, 3.0])
    assert early.differing(chiefs(early, "early/kernel:0#1"), made) == []


def test_variables_of_graphs_and_deleted_variables_are_skipped(made: list[tf.Variable]) -> None:
    with tf.Graph().as_default():
        kept = tf.compat.v1.get_variable("early/graph", [2])
    early = EarlyValues.now()
    assert not any(name.startswith(kept.name) for name in early.to_json())
    told = chiefs(early, "early/kernel:0#1")
    others = [*made[1:]]
    made.clear()
    assert early.differing(told, others) == []


def test_a_script_that_builds_a_graph_has_the_values_of_its_eager_variables(made: list[tf.Variable]) -> None:
    before = EarlyValues.now()
    with tf.Graph().as_default():
        early = EarlyValues.now()
        assert early.to_json() == before.to_json()
        assert early.differing(chiefs(early, "early/kernel:0#1"), made) == ["early/kernel"]


def test_the_variables_of_another_run_are_neither_read_nor_compared(made: list[tf.Variable]) -> None:
    def before_read() -> None:
        raise RuntimeError("Attempted to use a closed Session.")

    end = watch(made[0], Watcher(before_read, lambda: None, lambda: None))
    try:
        early = EarlyValues.now()
    finally:
        end()
    assert [name for name in early.to_json() if name.startswith("early/")] == ["early/kernel:0#1"]
    assert early.differing(chiefs(early, "early/kernel:0#1"), made) == ["early/kernel"]
