"""Slices: a variable's value is written to the shards that the session holds, and read back whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from autodist.placement.holder import Holder
from autodist.placement.partitioning import Partitioning
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import LARGE, TrackedVariable
from tests.unit.placement.holders import held_by

VALUE = np.arange(24.0).reshape(4, 6)

HOLDERS = {
    "whole": held_by(VALUE.shape),
    "whole, at a worker": held_by(VALUE.shape, [1]),
    "whole, at mates": held_by(VALUE.shape, [(1, 0)]),
    "rows at owners": held_by(VALUE.shape, (1, 0), Partitioning(0, (1, 3))),
    "rows everywhere": held_by(VALUE.shape, (None, None), Partitioning(0, (1, 3))),
    "columns, mixed": held_by(VALUE.shape, (0, None, 1), Partitioning(1, (2, 1, 3))),
    "rows with copies": held_by(VALUE.shape, (1, 0), Partitioning(0, (2, 2)), copies=[["/proxy"]]),
}


@dataclass(frozen=True)
class Chief:
    """The chief of two workers whose variables are in one process."""

    graph_runner: GraphRunner
    variable_slices: VariableSlices

    def value(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the session's value of a variable."""
        with self.graph_runner.graph.as_default():
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=name)
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
        return self.graph_runner.session.run(read)


@pytest.fixture
def chief() -> Iterator[Chief]:
    graph_runner = GraphRunner("", tf.compat.v1.ConfigProto())
    yield Chief(graph_runner, VariableSlices(graph_runner, 0, 2, lambda worker, dtype, device: ""))
    graph_runner.close()


def tracked(holder: Holder) -> TrackedVariable:
    return TrackedVariable(tf.Variable(VALUE), "v", holder)


@pytest.mark.parametrize("name", HOLDERS)
def test_set_values_are_pulled(chief: Chief, name: str):
    one, given = tracked(HOLDERS[name]), []
    chief.variable_slices.set([one], given.append)
    assert given == [one]
    one.write(np.zeros_like(VALUE))
    one.is_behind = True
    chief.variable_slices.pull([one])
    assert not one.is_behind
    np.testing.assert_array_equal(one.source, VALUE)


def test_each_shard_gets_its_part_and_so_do_copies_of_it(chief: Chief):
    chief.variable_slices.set([tracked(HOLDERS["rows with copies"])])
    for name in ("v/shard_0", "v/shard_0/proxy"):
        np.testing.assert_array_equal(chief.value(name, (2, 6)), VALUE[:2])
    np.testing.assert_array_equal(chief.value("v/shard_1", (2, 6)), VALUE[2:])


def test_a_variable_that_is_moved_is_set_where_it_is_now(chief: Chief):
    one = tracked(held_by(VALUE.shape))
    chief.variable_slices.set([one])
    one.source.assign(2.0 * VALUE)
    one.holder = HOLDERS["columns, mixed"]
    chief.variable_slices.set([one])
    np.testing.assert_array_equal(chief.value("v/shard_1", (4, 1)), 2.0 * VALUE[:, 2:3])
    np.testing.assert_array_equal(chief.value("v", (4, 6)), VALUE)
    one.holder = held_by(VALUE.shape, [1, 1, 1], one.holder.partitioning)
    chief.variable_slices.pull([one])
    np.testing.assert_array_equal(one.source, 2.0 * VALUE)


def test_writes_of_the_session_do_not_change_values_that_the_script_has_read(chief: Chief):
    """The session is fed the memory of the script's object itself."""
    large = TrackedVariable(tf.Variable(tf.ones([LARGE // 8], tf.float64)), "large", held_by([LARGE // 8]))
    small = TrackedVariable(tf.Variable(tf.ones([1024], tf.float64)), "small", held_by([1024]))
    earlier = [one.read() for one in (large, small)]
    chief.variable_slices.set([large, small])
    with chief.graph_runner.graph.as_default():
        for one in (large, small):
            shape = one.source.shape
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=one.shared_name)
            chief.graph_runner.session.run(
                tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.ones(shape, tf.float64))
            )
    for value in (*earlier, small.read()):
        np.testing.assert_array_equal(value, np.ones(value.shape))
    for one in (large, small):
        np.testing.assert_array_equal(chief.value(one.shared_name, one.source.shape), np.full(one.source.shape, 2.0))


def test_the_workers_that_are_named_get_their_pieces_and_no_others(chief: Chief):
    chief.variable_slices.set([tracked(HOLDERS["rows at owners"])], workers=[0])
    np.testing.assert_array_equal(chief.value("v/shard_1", (3, 6)), VALUE[1:])
    with pytest.raises(tf.errors.OpError):
        chief.value("v/shard_0", (1, 6))
    chief.variable_slices.set([tracked(HOLDERS["rows at owners"])], workers=[1])
    np.testing.assert_array_equal(chief.value("v/shard_0", (1, 6)), VALUE[:1])
