"""Graphs as text, one line per node: `name = Op(input, ^control, attribute=value)`, or `name = value` for a constant.

A text leaves out attributes that follow from the inputs or have their default value. Types are float32 and shapes
unknown if they are left out and do not follow from an input; a variable's shared name is the name of its node.

    table = VarHandleOp(shape=[6, 2])
    ids = Placeholder(dtype=int32, shape=[None])
    axis = 0
    read = ReadVariableOp(table)
    rows = GatherV2(read, ids, axis)
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the arguments and attributes of ops

from autodist.graph.names import is_control, node_of, output_index

AttrValue = tf.compat.v1.AttrValue
_LINE = re.compile(r"(?P<name>[\w./-]+) = ((?P<op>\w+)\((?P<arguments>.*)\)|(?P<value>[^()]+?))( on (?P<device>\S+))?")
_ARGUMENT = re.compile(r"(?:\[[^\]]*\]|'[^']*'|[^,\['])+")
_CONSTANT = re.compile(r"(?:(?P<dtype>[a-z]+\d*) )?(?P<elements>.+)")
_FLOAT = AttrValue(type=tf.float32.as_datatype_enum)
_DEFAULTS = {"type": _FLOAT, "shape": AttrValue(shape=tf.TensorShape(None).as_proto()), "int": AttrValue(i=2)}


def to_text(graph_def: tf.compat.v1.GraphDef) -> str:
    """Formats a graph with one line per node, in the order of the graph."""
    return "\n".join(lines_of(graph_def).values())


def lines_of(graph_def: tf.compat.v1.GraphDef) -> dict[str, str]:
    """Returns the line of each node by its name."""
    nodes = {node.name: node for node in graph_def.node}
    return {name: _line(node, nodes) for name, node in nodes.items()}


def from_text(text: str) -> tf.compat.v1.GraphDef:
    """Builds a graph; its nodes have all attributes that their ops need."""
    out, nodes = tf.compat.v1.GraphDef(), dict[str, Any]()
    for line in textwrap.dedent(text).strip().splitlines():
        found = _LINE.fullmatch(line.strip())
        assert found, f"{line!r} is neither 'name = Op(inputs)' nor 'name = constant'"
        node = out.node.add(name=found["name"], op=found["op"] or "Const", device=found["device"] or "")
        arguments = [one.strip() for one in _ARGUMENT.findall(found["arguments"] or "") if one.strip()]
        node.input[:] = [one for one in arguments if "=" not in one]
        named = {key: _value(value) for key, _, value in (one.partition("=") for one in arguments if "=" in one)}
        for key, value in (_constant(found["value"] or "0") if node.op == "Const" else named).items():
            node.attr[key].CopyFrom(value)
        nodes[node.name] = node
    for node in out.node:
        for key, value in _implied(node, nodes).items():
            if key not in node.attr:
                node.attr[key].CopyFrom(value)
    return out


def _constant(text: str) -> dict[str, AttrValue]:
    found = _CONSTANT.fullmatch(text)
    assert found
    value = np.array(ast.literal_eval(found["elements"]))
    dtype = found["dtype"] or {"i": "int32", "f": "float32"}.get(value.dtype.kind)
    made = tf.make_tensor_proto(value, dtype)
    return {"value": AttrValue(tensor=made), "dtype": AttrValue(type=made.dtype)}


def _value(text: str) -> AttrValue:
    """Returns a shape, a number, a string or, if it is none of them, a type."""
    if text[0].islower():
        return AttrValue(type=tf.as_dtype(text).as_datatype_enum)
    match ast.literal_eval(text):
        case None | list() as shape:
            return AttrValue(shape=tf.TensorShape(shape).as_proto())
        case bool() as value:
            return AttrValue(b=value)
        case str() as value:
            return AttrValue(s=value.encode())
        case int() as value:
            return AttrValue(i=value)
        case value:
            return AttrValue(f=value)


def _implied(node: Any, nodes: Mapping[str, Any]) -> dict[str, AttrValue]:
    """Returns the attributes that a text leaves out."""
    op = op_def_registry.get(node.op)
    if op is None or node.op == "Const":  # the call of a function, or a constant, whose value implies its type
        return {}
    implied = {a.name: a.default_value if a.HasField("default_value") else _DEFAULTS.get(a.type) for a in op.attr}
    if node.op == "VarHandleOp":
        implied["shared_name"] = AttrValue(s=node.name.encode())
    data = [name for name in node.input if not is_control(name)]
    if data and "dtype" in implied and (variable := nodes.get(node_of(data[0]))) is not None:
        implied["dtype"] = variable.attr.get("dtype", _FLOAT)
    position = 0
    for argument in op.input_arg:
        is_list = argument.number_attr or argument.type_list_attr
        count = len(data) - len(op.input_arg) + 1 if is_list else 1
        types = [_type(name, nodes) for name in data[position : position + count]]
        position += count
        if argument.type_list_attr:
            implied[argument.type_list_attr] = AttrValue(list=AttrValue.ListValue(type=types))
        if argument.number_attr:
            implied[argument.number_attr] = AttrValue(i=count)
        if argument.type_attr and types:
            implied[argument.type_attr] = AttrValue(type=types[0])
    return {key: value for key, value in implied.items() if value is not None}


def _type(name: str, nodes: Mapping[str, Any]) -> int:
    """Returns the type of a tensor as far as the attributes of its node are known, else float32."""
    node = nodes.get(node_of(name))
    types = [] if node is None else list(_types(node))
    return types[output_index(name)] if output_index(name) < len(types) else _FLOAT.type


def _types(node: Any) -> Iterator[int]:
    op = op_def_registry.get(node.op)
    for argument in op.output_arg if op else ():
        if argument.type_list_attr:
            yield from node.attr[argument.type_list_attr].list.type
        else:
            of_attribute = node.attr[argument.type_attr].type if argument.type_attr in node.attr else _FLOAT.type
            count = node.attr[argument.number_attr].i if argument.number_attr else 1
            yield from [argument.type or of_attribute] * count


def _line(node: Any, nodes: Mapping[str, Any]) -> str:
    device = f" on {node.device}" if node.device else ""
    if node.op == "Const":
        return f"{node.name} = {_constant_text(node.attr['value'].tensor)}{device}"
    implied = _implied(node, nodes)
    named = [f"{k}={_value_text(v)}" for k, v in sorted(node.attr.items()) if v.ByteSize() and v != implied.get(k)]
    return f"{node.name} = {node.op}({', '.join([*node.input, *named])}){device}"


def _constant_text(tensor: Any) -> str:
    value = tf.make_ndarray(tensor)
    elements = value.astype(str) if value.dtype.kind == "S" else value
    text = " ".join(str(elements.tolist()).split()) if value.size <= 8 else f"of shape {list(value.shape)}"
    is_plain = value.dtype in (np.int32, np.float32) or value.dtype.kind in "bSO"
    return text if is_plain and value.size else f"{value.dtype.name} {text}"


def _value_text(value: Any) -> str:
    match value.WhichOneof("value"):
        case "type":
            return tf.as_dtype(value.type).name
        case "shape":
            shape = tf.TensorShape(value.shape)
            return str(None if shape.rank is None else shape.as_list())
        case "s":
            return repr(value.s.decode())
        case "func":
            return value.func.name
        case "list":
            return " ".join(str(value.list).split())
        case kind:
            return str(getattr(value, kind))


def assert_text(graph_def: tf.compat.v1.GraphDef, expected: str) -> None:
    """Asserts that the graph matches the text; the order of the nodes does not matter."""
    wanted = textwrap.dedent(expected).strip().splitlines()
    assert sorted(to_text(graph_def).splitlines()) == sorted(line.strip() for line in wanted)


def assert_imports(graph_def: tf.compat.v1.GraphDef) -> None:
    """Asserts that TensorFlow can import the graph."""
    with tf.Graph().as_default():
        tf.import_graph_def(graph_def, name="")
