"""Memories: what a kernel keeps begins anew or goes on with what a checkpoint has, whichever comes first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from autodist.runtime.graph_runners import GraphRunners
from autodist.runtime.persistent_buffers import Saved


@pytest.fixture
def engines() -> Iterator[GraphRunners]:
    engines = GraphRunners("", tf.compat.v1.ConfigProto())
    yield engines
    engines.close()


@pytest.fixture
def saved(tmp_path) -> Saved:
    prefix = str(tmp_path / "saved")
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=["k/a", "k/b"], shape_and_slices=["", ""],
        tensors=[np.array([1.0, 2.0]), np.array([[3.0]])],
    )  # fmt: skip
    return Saved(prefix, {"a": "k/a", "b": "k/b"})


def begin(engines: GraphRunners, name: str, shape: list[int]) -> tf.Tensor:
    """A step that keeps something; returns what reads it."""
    with engines.beside.graph.as_default():
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=name)
        first = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape, tf.float64))
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
        tokens = tf.raw_ops.NoOp()
    engines.initialize(engines.beside, {name: first.name, f"{name}/tokens": tokens.name})
    return read


def test_a_memory_that_comes_after_the_restore_begins_with_what_was_saved(engines, saved):
    engines.memories.resume(saved)
    assert engines.memories.awaited == ["a", "b"]
    a, c = begin(engines, "a", [2]), begin(engines, "c", [1])
    assert engines.beside.session.run([a, c])[0].tolist() == [1.0, 2.0]
    assert engines.beside.session.run(c).tolist() == [0.0]
    assert engines.memories.awaited == ["b"]


def test_a_restore_in_the_middle_gives_what_was_saved_and_lets_the_rest_begin_anew(engines, saved):
    b, c = begin(engines, "b", [1, 1]), begin(engines, "c", [1])
    assert {name: spec.shape.as_list() for name, spec in engines.memories.specs.items()} == {"b": [1, 1], "c": [1]}
    for name, shape in (("b", [1, 1]), ("c", [1])):
        with engines.beside.graph.as_default():
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shape, shared_name=name)
            write = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.ones(shape, tf.float64))
        engines.beside.session.run(write)
    engines.memories.resume(saved)
    assert engines.beside.session.run([b, c]) == [[[3.0]], [0.0]]
