"""Propagation: inputs, declared kinds, names, and graphs of any depth."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from autodist.layout import Mean, PerExample, Replicated, Scalar, propagate
from tests.unit.layout.batches import MEAN, check, tensor


def test_inputs_constants_and_variables(case, feeds):
    scale = tf.compat.v1.get_variable("scale", initializer=np.float64(2), use_resource=True)
    rate = tf.compat.v1.placeholder_with_default(np.float64(0.5), [], name="rate")
    fed_or_computed = tf.compat.v1.placeholder_with_default(tf.reduce_sum(tensor(case, "x"), 1), [None])
    check(
        case,
        feeds,
        [
            (tensor(case, "x"), PerExample(0)),
            (scale.read_value(), Replicated()),
            (rate * scale, Replicated()),
            (tensor(case, "x") * scale + rate, PerExample(0)),
            (tf.constant([1.0, 2.0]), Replicated()),
            (fed_or_computed, PerExample(0)),
        ],
    )


def test_kinds_may_be_declared(case):
    x = tensor(case, "x")
    odd = tf.sqrt(tf.reduce_sum(x))
    doubled = 2 * odd
    shapes = {tensor.name: tensor.shape for op in case.graph.get_operations() for tensor in op.outputs}
    found = propagate(case.graph.as_graph_def(), {"x:0": 0}, shapes, declared={odd.name: MEAN})
    assert found.kind(doubled.name) == MEAN
    with pytest.raises(ValueError, match="cannot be declared"):
        propagate(case.graph.as_graph_def(), {}, shapes, declared={odd.name: Mean(Scalar("Sum:0"))})


def test_a_tensor_that_is_not_there(case):
    with pytest.raises(ValueError, match="no tensor 'nothing:0'"):
        case.propagation().kind("nothing:0")


def test_the_walk_is_not_recursive_and_fast():
    graph = tf.Graph()
    with graph.as_default():
        value = tf.compat.v1.placeholder(tf.float32, [None], name="x")
    graph_def = graph.as_graph_def()
    previous = "x"
    for index in range(20_000):
        node = graph_def.node.add(name=f"n{index}", op="Tanh", input=[previous])
        node.attr["T"].type = tf.float32.as_datatype_enum
        previous = node.name
    began = time.process_time()
    kind = propagate(graph_def, {"x:0": 0}, lambda name: value.shape).kind(previous)
    assert kind == PerExample(0)
    assert time.process_time() - began < 3
