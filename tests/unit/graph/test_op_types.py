"""Dtypes of tensors, from the op and the attributes of their nodes."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.graph.index import GraphIndex
from autodist.graph.op_types import spelled_outputs, type_of, types_of_inputs, types_of_outputs

FLOAT, INT = tf.float32.as_datatype_enum, tf.int32.as_datatype_enum


@pytest.fixture
def graph_index():
    with tf.Graph().as_default() as graph:
        tf.split(tf.ones([4]), 2, name="split")
        tf.raw_ops.IdentityN(input=[tf.ones([2]), tf.constant(1)], name="both")
    return GraphIndex(graph.as_graph_def())


def test_outputs_are_spelled_as_functions_spell_them(graph_index):
    assert spelled_outputs(graph_index.nodes["split"]) == ["output:0", "output:1"]


def test_lists_have_a_type_for_each_and_numbers_one_for_all(graph_index):
    assert list(types_of_inputs(graph_index.nodes["split"])) == [INT, FLOAT]
    assert list(types_of_outputs(graph_index.nodes["split"])) == [FLOAT, FLOAT]
    assert list(types_of_outputs(graph_index.nodes["both"])) == [FLOAT, INT]


def test_a_tensor_is_known_by_any_spelling(graph_index):
    assert [type_of(graph_index, name) for name in ("both", "both:0", "both:1")] == [FLOAT, FLOAT, INT]


def test_an_op_may_be_a_function_of_the_graph():
    graph_def = tf.compat.v1.GraphDef()
    function = graph_def.library.function.add()
    function.signature.name = "two"
    function.signature.output_arg.add(name="x", type=INT)
    function.signature.output_arg.add(name="y", type=FLOAT)
    graph_def.node.add(name="call", op="two")
    assert type_of(GraphIndex(graph_def), "call:1") == FLOAT
