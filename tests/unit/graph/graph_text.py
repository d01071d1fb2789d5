"""Graphs as text, one line per node: `name = Op(input, ^control)`."""

from __future__ import annotations

import re
import textwrap

import tensorflow as tf

_LINE = re.compile(r"(?P<name>[\w/]+) = (?P<op>\w+)\((?P<inputs>[^)]*)\)")


def to_text(graph_def: tf.compat.v1.GraphDef) -> str:
    """Formats a graph with one line per node, in the order of the graph."""
    return "\n".join(f"{n.name} = {n.op}({', '.join(n.input)})" for n in graph_def.node)


def from_text(text: str) -> tf.compat.v1.GraphDef:
    """Builds a graph of float32 nodes with the attributes that these ops need; `read` has an unknown shape."""
    out = tf.compat.v1.GraphDef()
    for line in textwrap.dedent(text).strip().splitlines():
        found = _LINE.fullmatch(line.strip())
        assert found, f"{line!r} is not 'name = Op(inputs)'"
        node = out.node.add(name=found["name"], op=found["op"])
        node.input[:] = [i.strip() for i in found["inputs"].split(",") if i.strip()]
        _give_attributes(node)
    return out


def _give_attributes(node: tf.compat.v1.NodeDef) -> None:
    real = tf.float32.as_datatype_enum
    data = [i for i in node.input if not i.startswith("^")]
    if node.op in ("Placeholder", "VarHandleOp", "ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp"):
        node.attr["dtype"].type = real
    elif node.op == "IdentityN":
        node.attr["T"].list.type[:] = [real] * len(data)
    elif node.op == "Split":
        node.attr["T"].type, node.attr["num_split"].i = real, 2
    elif node.op == "AddN":
        node.attr["T"].type, node.attr["N"].i = real, len(data)
    elif node.op == "Const":
        node.attr["dtype"].type = tf.int32.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
    elif node.op != "NoOp":
        node.attr["T"].type = real
    if node.op == "VarHandleOp":
        node.attr["shape"].shape.SetInParent()
        node.attr["shared_name"].s = node.name.encode()


def assert_text(graph_def: tf.compat.v1.GraphDef, expected: str) -> None:
    """Asserts that the graph matches the text; the order of the nodes does not matter."""
    wanted = textwrap.dedent(expected).strip().splitlines()
    assert sorted(to_text(graph_def).splitlines()) == sorted(line.strip() for line in wanted)


def assert_imports(graph_def: tf.compat.v1.GraphDef) -> None:
    """Asserts that TensorFlow can import the graph."""
    with tf.Graph().as_default():
        tf.import_graph_def(graph_def, name="")
