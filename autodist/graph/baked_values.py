"""Values that a script's Python code puts into a step: constants and numeric attributes of ops."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
from tensorflow.python.framework import op_def_registry  # the only API that returns the definition of an op

from autodist.graph.functions import functions_by_name
from autodist.graph.names import is_control, node_of
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach

NodeDef: TypeAlias = tf.compat.v1.NodeDef

SHOWN_AT_MOST = 8
"""Most array elements that a message shows; a larger array is shown as a digest."""

HASHED_AT_MOST = 16 << 20
"""Most bytes of a constant that are hashed; of a larger one, as many in samples from all parts of it."""

_SAMPLE_BYTES = 64 << 10

_SEED_OPERANDS = ("seed", "seeds", "key", "counter")
"""Names of the inputs of stateless random ops that select the draw, not the distribution."""

_SEED_ATTRIBUTES = ("seed", "seed2")

_COMPARED_TYPES = ("int", "float", "bool", "list(int)", "list(float)", "list(bool)")

_NO_NUMBERS = {t.as_datatype_enum for t in (tf.string, tf.resource, tf.variant)}

_PLAIN_WRITE = "AssignVariableOp"


class Baked(NamedTuple):
    """One value of a step.

    Attributes:
        at: the position of its node in the graph.
        what: the attribute of the node, with the position in a called function; "": the value of a constant.
        text: the value; a digest of a large array.
        dtype: of a constant; "" for an attribute.
        shape: of a constant, None for an attribute.
    """

    at: int
    what: str
    text: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None


def baked_values(step: CapturedStep) -> tuple[Baked, ...]:
    """Returns the values on which the writes and outputs of a step depend, except seeds and strings.

    For the complete graph of a session, which has no outputs, these are the values on which training depends, without
    initial values.
    """
    graph_index, nodes = step.graph_index, step.graph_index.nodes
    gradients = [name for g in step.gradients for t in g.tensors if (name := node_of(t)) in nodes]
    updates = reach(gradients, graph_index.consumers.__getitem__)
    writes = [n for n, e in graph_index.effects.items() if e.writes and nodes[n].op != _PLAIN_WRITE]
    computed = [node_of(t) for t in step.outputs if nodes[node_of(t)].op != "Const"]
    needed = reach(
        [*updates, *writes, *computed, *step.targets],
        lambda name: _data_sources(nodes[name].op, nodes[name].input),
    )
    functions = functions_by_name(graph_index.graph_def.library)
    bodies = functools.cache(lambda name: _values_in_body(functions, name, bodies))
    values: list[Baked] = []
    for at, (name, node) in enumerate(nodes.items()):
        if name in needed:
            values += (one._replace(at=at) for one in _values_of(node, bodies, functions))
    return tuple(values)


def _data_sources(op: str, inputs: Iterable[str]) -> Iterator[str]:
    """Returns the nodes of a node's data inputs, except seeds."""
    seeds = _seed_operands(op)
    return (node_of(i) for k, i in enumerate(inputs) if k not in seeds and not is_control(i))


@functools.cache
def _seed_operands(op: str) -> frozenset[int]:
    """Returns the positions of the inputs of an op that are seeds."""
    made = op_def_registry.get(op) if op.startswith("Stateless") else None
    inputs = [] if made is None else made.input_arg
    return frozenset(k for k, argument in enumerate(inputs) if argument.name in _SEED_OPERANDS)


_Bodies: TypeAlias = Callable[[str], Sequence[Baked]]


def _values_of(node: NodeDef, bodies: _Bodies, functions: Mapping[str, object]) -> Iterator[Baked]:
    if node.op == "Const":
        if node.attr["dtype"].type not in _NO_NUMBERS:
            yield _constant(node.attr["value"].tensor)
        return
    for name in _compared_attributes(node.op):
        if name in node.attr:
            value = node.attr[name]
            kind = value.WhichOneof("value")
            yield Baked(0, name, str(list(_numbers(value.list)) if kind == "list" else getattr(value, kind)))
    called = [(node.op, node.op)] if node.op in functions else []
    for name in _function_attributes(node.op):
        value = node.attr[name]
        called += [(f"{name} {k}" if k else name, f.name) for k, f in enumerate(value.list.func or [value.func])]
    for name, function in called:
        yield from (one._replace(what=f"{name}: {one.what}") for one in bodies(function))


def _values_in_body(functions: Mapping[str, tf.compat.v1.GraphDef], name: str, bodies: _Bodies) -> list[Baked]:
    """Returns the values in a function of the graph, identified by node positions, since names contain counters."""
    if name not in functions:
        return []
    function = functions[name]
    nodes = {node.name: node for node in function.node_def}
    roots = [node_of(t) for t in (*function.ret.values(), *function.control_ret.values())]
    needed = reach(
        (r for r in roots if r in nodes),
        lambda n: (s for s in _data_sources(nodes[n].op, nodes[n].input) if s in nodes),
    )
    ops = hashlib.blake2b(" ".join(sorted(nodes[n].op for n in needed if nodes[n].op not in functions)).encode())
    result = [Baked(0, "its operations", ops.hexdigest()[:12])]
    for k, (inner, node) in enumerate(nodes.items()):
        if inner in needed:
            for one in _values_of(node, bodies, functions):
                result.append(one._replace(what=f"node {k} ({node.op}) {one.what}".strip()))
    return result


@functools.cache
def _compared_attributes(op: str) -> tuple[str, ...]:
    made = op_def_registry.get(op)
    if made is None:
        return ()
    counts = {a.number_attr for a in (*made.input_arg, *made.output_arg)}
    left_out = counts.union(_SEED_ATTRIBUTES)
    return tuple(a.name for a in made.attr if a.type in _COMPARED_TYPES and a.name not in left_out)


@functools.cache
def _function_attributes(op: str) -> tuple[str, ...]:
    made = op_def_registry.get(op)
    return () if made is None else tuple(a.name for a in made.attr if a.type in ("func", "list(func)"))


def _numbers(listed: tf.compat.v1.AttrValue.ListValue) -> Iterator[object]:
    return iter([*listed.i, *listed.f, *listed.b])


def _constant(proto: tensor_pb2.TensorProto) -> Baked:
    shape = tuple(d.size for d in proto.tensor_shape.dim)
    dtype = tf.as_dtype(proto.dtype).name
    if math.prod(shape) <= SHOWN_AT_MOST:
        return Baked(0, "", str(tf.make_ndarray(proto)), dtype, shape)
    # All workers encode an array in the same way, in full or without the repeated end.
    content = proto.tensor_content or proto.SerializeToString(deterministic=True)
    digest = hashlib.blake2b(digest_size=8)
    if len(content) <= HASHED_AT_MOST:
        digest.update(content)
    else:
        view = memoryview(content)
        for start in np.linspace(0, len(content) - _SAMPLE_BYTES, HASHED_AT_MOST // _SAMPLE_BYTES, dtype=np.int64):
            digest.update(view[start : start + _SAMPLE_BYTES])
    return Baked(0, "", digest.hexdigest(), dtype, shape)
