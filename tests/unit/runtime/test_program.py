"""A program runs a step, and gives back the memory that the step's making took."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.item import GraphItem
from autodist.graph.parts import Gradient
from autodist.runtime import program as module
from autodist.runtime.host import Host
from autodist.runtime.program import Program
from autodist.runtime.updates import Updates


@pytest.fixture
def host():
    made = Host("", tf.compat.v1.ConfigProto())
    yield made
    made.close()


@pytest.mark.parametrize(("trains", "times"), [(True, 1), (False, 0)])
def test_memory_is_given_back_before_and_after_the_first_run_of_a_step_that_trains(host, monkeypatch, trains, times):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.identity(x + 1.0, name="y")
    gradients = (Gradient("v", ("y:0",), 0),) if trains else ()
    item = GraphItem(graph.as_graph_def(), gradients=gradients, inputs={"x:0": None}, outputs=("y:0",))
    step = Program(host, item, ["x:0"], Updates(lambda failure: failure))
    given_back = []
    monkeypatch.setattr(module, "collect_and_trim", lambda: given_back.append("before"))
    monkeypatch.setattr(module, "trim_heaps", lambda: given_back.append("after"))
    for _ in range(3):
        np.testing.assert_array_equal(step.run([np.ones(2, np.float32)], 1)[0], [2.0, 2.0])
        assert given_back == ["before", "after"] * times
