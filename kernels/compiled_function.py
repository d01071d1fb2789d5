"""A function of elementwise ops and accesses to variables, for XLA to compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.graph.editor import NodeDef
from autodist.graph.effects import ASSIGNMENTS
from autodist.graph.names import as_input, is_control, node_of
from autodist.kernels.buckets import digest

_EXACT = (
    "Abs Add AddN AddV2 Const Div DivNoNan Greater GreaterEqual Identity Inv Less LessEqual LogicalAnd LogicalNot "
    "LogicalOr Maximum Minimum Mul MulNoNan Neg RealDiv Reciprocal Select SelectV2 Sign Sqrt Square SquaredDifference "
    "Sub"
)
EXACT = frozenset(_EXACT.split())
"""Elementwise ops whose results are exact, or rounded to the nearest number, whoever computes them.

XLA's powers and exponentials differ from TensorFlow's in their last bit, which Adam's `1 - beta_2 ** t` makes a
thousand times as large.
"""


@dataclass(frozen=True)
class CompiledFunction:
    """What to call, and on what.

    Attributes:
        definition: a FunctionDef; nodes that do the same have the same one, and differ in their arguments.
        arguments: inputs of the call.
    """

    definition: Any
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.definition.signature.name)


def compiled_function(nodes: Sequence[NodeDef]) -> CompiledFunction:
    """Makes a function without results of nodes of EXACT, ASSIGNMENTS and ReadVariableOp.

    Args:
        nodes: each after what it needs of the others. What they read of other nodes becomes arguments.
    """
    made = tf.compat.v1.GraphDef().library.function.add()
    short = {node.name: f"node_{k}" for k, node in enumerate(nodes)}
    inside = {node.name: f"{short[node.name]}:{_output_of(node)}:0" for node in nodes if node.op not in ASSIGNMENTS}
    arguments: dict[str, str] = {}
    for node in nodes:
        copy = made.node_def.add(name=short[node.name], op=node.op)
        for key, value in node.attr.items():
            if not key.startswith("_"):
                copy.attr[key].CopyFrom(value)
        data = [as_input(i) for i in node.input if not is_control(i)]
        for spelling, kind in zip(data, _types_of_inputs(node), strict=True):
            if spelling not in inside and spelling not in arguments:
                arguments[spelling] = f"argument_{len(arguments)}"
                made.signature.input_arg.add(name=arguments[spelling], type=kind)
            copy.input.append(inside.get(spelling) or arguments[spelling])
        copy.input.extend(f"^{short[node_of(i)]}" for i in node.input if is_control(i) and node_of(i) in short)
        if node.op in ASSIGNMENTS:
            made.signature.control_output.append(copy.name)
            made.control_ret[copy.name] = copy.name
    made.signature.is_stateful = True
    made.attr["_XlaMustCompile"].b = True
    made.attr["_noinline"].b = True
    made.signature.name = f"autodist_update_{digest(str(made))}"
    return CompiledFunction(made, tuple(arguments))


def _output_of(node: NodeDef) -> str:
    """The name of a node's one output, by which functions name tensors."""
    (output,) = op_def_registry.get(node.op).output_arg
    return str(output.name)


def _types_of_inputs(node: NodeDef) -> Iterator[int]:
    for argument in op_def_registry.get(node.op).input_arg:
        kind = argument.type or node.attr[argument.type_attr].type
        count = node.attr[argument.number_attr].i if argument.number_attr else 1
        yield from [kind] * count
