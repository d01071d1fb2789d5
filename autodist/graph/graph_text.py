"""Graphs as text in which two graphs are equal if they do the same by the same names.

What carries no meaning is left out or put in order: the order of nodes, of control inputs and of attributes; attributes
that have their default, or no value, as protobuf adds them where one is asked for; the numbers that TensorFlow gives to
functions; how a constant is encoded. What the names of nodes are stays, since a look at two texts side by side needs
them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # which attributes have defaults

from autodist.graph.names import is_control

_SHOWN_ELEMENTS = 8
"""Larger constants are told by a hash."""

_COUNT = re.compile(r"(_\d+)+$")


def sections_of_graph(graph_def: tf.compat.v1.GraphDef) -> dict[str, list[str]]:
    """Lines by title: "nodes", and "function NAME" for each function that is called."""
    functions = _Functions(graph_def)
    nodes = _lines_of_nodes(graph_def.node, functions)
    return {"nodes": nodes, **{f"function {name}": lines for name, lines in functions.sections()}}


class _Functions:
    """The functions of a graph's library, numbered in the order in which they are first met."""

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._known = {function.signature.name: function for function in graph_def.library.function}
        self._gradients = {g.function_name: g.gradient_func for g in graph_def.library.gradient}
        self._met: dict[str, str] = {}

    def name(self, name: str) -> str:
        """The name that a function has in the text."""
        if name not in self._met:
            self._met[name] = f"{_COUNT.sub('', name)}#{len(self._met)}" if name in self._known else name
        return self._met[name]

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Of each that was met, also by another's body, what it does."""
        done = 0
        while done < len(self._met):
            name = list(self._met)[done]
            done += 1
            if name in self._known:
                yield self._met[name], list(self._lines(self._known[name]))

    def _lines(self, function: Any) -> Iterator[str]:
        signature = function.signature
        yield f"takes {', '.join(f'{a.name}: {_type(a.type)}' for a in signature.input_arg)}"
        yield f"returns {', '.join(f'{function.ret[a.name]}: {_type(a.type)}' for a in signature.output_arg)}"
        yield from (f"runs {name}" for name in sorted(function.control_ret.values()))
        if function.signature.name in self._gradients:
            yield f"has the gradient {self.name(self._gradients[function.signature.name])}"
        yield from (f"has {key}={_attribute(value, self)}" for key, value in sorted(function.attr.items()))
        yield from _lines_of_nodes(function.node_def, self)


def _lines_of_nodes(nodes: Iterable[tf.compat.v1.NodeDef], functions: _Functions) -> list[str]:
    return [_line(node, functions) for node in sorted(nodes, key=lambda node: node.name)]


def _line(node: tf.compat.v1.NodeDef, functions: _Functions) -> str:
    defaults = _defaults(node.op)
    attributes = [
        f"{key}={_attribute(value, functions)}"
        for key, value in sorted(node.attr.items())
        if value.SerializeToString(deterministic=True) not in (b"", defaults.get(key))
    ]
    data = [i for i in node.input if not is_control(i)]
    control = sorted(i for i in node.input if is_control(i))
    shown = f"{node.name} = {functions.name(node.op)}"
    if attributes:
        shown += f"[{', '.join(attributes)}]"
    shown += f"({', '.join([*data, *control])})"
    return f"{shown} on {node.device}" if node.device else shown


@cache
def _defaults(op: str) -> Mapping[str, bytes]:
    """The attributes of an op that have a default, serialised."""
    found = op_def_registry.get(op)
    if found is None:  # a function's name
        return {}
    return {
        a.name: a.default_value.SerializeToString(deterministic=True) for a in found.attr if a.HasField("default_value")
    }


def _attribute(value: Any, functions: _Functions) -> str:
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return "()"
        case "list":
            return f"[{', '.join(_elements(value.list, functions))}]"
        case _:
            return _scalar(kind, getattr(value, kind), functions)


def _elements(values: Any, functions: _Functions) -> list[str]:
    """The elements of a list attribute; colocation classes are sorted, since their order means nothing."""
    for field, found in values.ListFields():
        shown = [_scalar(field.name, one, functions) for one in found]
        return sorted(shown) if any(one.startswith("'loc:@") for one in shown) else shown
    return []


def _scalar(kind: str, value: Any, functions: _Functions) -> str:
    match kind:
        case "type":
            return _type(value)
        case "shape":
            return _shape(value)
        case "tensor":
            return _constant(value)
        case "func":
            given = [f"{key}={_attribute(one, functions)}" for key, one in sorted(value.attr.items())]
            return functions.name(value.name) + (f"[{', '.join(given)}]" if given else "")
        case "s":
            return _string(value)
        case _:
            return str(value)


def _string(value: bytes) -> str:
    """Long ones, which hold serialised messages, by a hash."""
    return repr(value)[1:] if len(value) <= 200 else f"{len(value)} bytes {_hash(value)}"


def _type(value: int) -> str:
    return tf.as_dtype(value).name


def _shape(value: Any) -> str:
    return "?" if value.unknown_rank else f"[{', '.join('?' if d.size < 0 else str(d.size) for d in value.dim)}]"


def _constant(value: Any) -> str:
    shown = _type(value.dtype) + _shape(value.tensor_shape)
    if tf.as_dtype(value.dtype) in (tf.variant, tf.resource):
        return f"{shown} {_hash(value.SerializeToString(deterministic=True))}"
    array = tf.make_ndarray(value)
    if array.size <= _SHOWN_ELEMENTS:
        return f"{shown} {', '.join(_element(one) for one in array.ravel())}".rstrip()
    content = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
    return f"{shown} {_hash(content)}"


def _element(value: Any) -> str:
    if isinstance(value, bytes):
        return _string(value)
    return repr(value.item() if isinstance(value, np.generic) and value.dtype.kind in "biufc" else value)


def _hash(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
