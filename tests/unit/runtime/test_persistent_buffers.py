"""Persistent buffers start at their initial values or at a checkpoint's, for either order of creation and restore."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.persistent_buffers import Saved


@pytest.fixture
def graph_runners() -> Iterator[GraphRunners]:
    graph_runners = GraphRunners("", tf.compat.v1.ConfigProto())
    yield graph_runners
    graph_runners.close(60)


@pytest.fixture
def saved(tmp_path) -> Saved:
    prefix = str(tmp_path / "saved")
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=["k/a", "k/b"], shape_and_slices=["", ""],
        tensors=[np.array([1.0, 2.0]), np.array([[3.0]])],
    )  # fmt: skip
    return Saved(prefix, {"a": "k/a", "b": "k/b"})


def begin(graph_runners: GraphRunners, name: str, shape: list[int]) -> tf.Tensor:
    """Starts a step with a persistent buffer; returns the tensor that reads it."""
    with graph_runners.control.graph.as_default():
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=name)
        first = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape, tf.float64))
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
        tokens = tf.raw_ops.NoOp()
    graph_runners.initialize(graph_runners.control, {name: first.name, f"{name}/tokens": tokens.name})
    return read


def test_a_memory_that_comes_after_the_restore_begins_with_what_was_saved(graph_runners, saved):
    graph_runners.persistent_buffers.resume(saved)
    assert graph_runners.persistent_buffers.awaited == ["a", "b"]
    a, c = begin(graph_runners, "a", [2]), begin(graph_runners, "c", [1])
    graph_runners.persistent_buffers.begin_step()
    assert graph_runners.control.session.run([a, c])[0].tolist() == [1.0, 2.0]
    assert graph_runners.control.session.run(c).tolist() == [0.0]
    assert graph_runners.persistent_buffers.awaited == ["b"]


def test_a_restore_in_the_middle_gives_what_was_saved_and_lets_the_rest_begin_anew(graph_runners, saved):
    b, c = begin(graph_runners, "b", [1, 1]), begin(graph_runners, "c", [1])
    assert {name: spec.shape.as_list() for name, spec in graph_runners.persistent_buffers.specs.items()} == {
        "b": [1, 1],
        "c": [1],
    }
    for name, shape in (("b", [1, 1]), ("c", [1])):
        with graph_runners.control.graph.as_default():
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=name)
            write = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.ones(shape, tf.float64))
        graph_runners.control.session.run(write)
    graph_runners.persistent_buffers.resume(saved)
    graph_runners.persistent_buffers.begin_step()
    assert graph_runners.control.session.run([b, c]) == [[[3.0]], [0.0]]


def test_a_copy_that_is_set_after_the_restore_gets_its_saved_value_before_the_next_step_and_before_a_save(
    graph_runners, saved
):
    with graph_runners.control.graph.as_default():
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[2], shared_name="a")
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
        setting = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([2], tf.float64))
    graph_runners.initialize(graph_runners.control, {"kept/a": handle.op.name})
    buffers, session = graph_runners.persistent_buffers, graph_runners.control.session
    buffers.resume(saved)
    session.run(setting)
    assert set(buffers.specs) == {"a"}  # for a save
    assert session.run(read).tolist() == [1.0, 2.0]
    session.run(setting)
    buffers.begin_step()
    assert session.run(read).tolist() == [1.0, 2.0]
    session.run(setting)  # by the step
    assert set(buffers.specs) == {"a"}
    buffers.begin_step()
    assert session.run(read).tolist() == [0.0, 0.0]
