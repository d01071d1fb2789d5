"""Divides rows by the rows of a table, without searching the whole table for zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.functions import branches_of
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.elementwise import constant
from autodist.kernels.rows.signs import Sign, signs_of
from autodist.kernels.rule import Facts, Refusal, Rewrite, Rule
from autodist.kernels.unused import remove_unused
from autodist.layout.bodies import Body, Library


@dataclass(frozen=True)
class DivideRows(Rule):
    """Simplifies Keras's division of sparse rows by a table, if the table has neither zeros nor NaN.

    0 / 0 is NaN, so Keras searches the whole table for zeros and NaN, and then also divides their rows. The square root
    of a sum of squares and a positive number has no zeros. If an accumulator of squares is NaN, the gradient was NaN,
    and the weights of that row already are: subtracting NaN again changes nothing.

        If(any(d == 0 | isnan(d)), …, g / gather(d, ids))    becomes    g / gather(d, ids),    with  d = sqrt(a + 1e-7)
    """

    name: ClassVar[str] = "divide-rows"
    ops: ClassVar[tuple[str, ...]] = ("StatelessIf",)

    def match(self, rows: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        searched = _searched_by(rows.editor, node)
        if searched is None:
            return None
        if rows.once(signs_of).of(searched) is not Sign.POSITIVE:
            return Refusal(f"{searched}, which it searches for zeros, is not known to be positive")

        def rewrite() -> None:
            _take_other_branch(rows.editor, Library(rows.editor.library), node)
            remove_unused(rows.editor, rows.step.named, [node.name])

        return rewrite


def _searched_by(editor: GraphEditor, node: NodeDef) -> str | None:
    """Returns the tensor that a condition searches for zeros and NaN; None if the condition is another one."""
    condition = editor[node_of(node.input[0])]
    while condition.op == "Any":
        condition = editor[node_of(condition.input[0])]
    if condition.op != "LogicalOr":
        return None
    found = {_searched(editor, name) for name in condition.input if not is_control(name)}
    return found.pop() if len(found) == 1 else None


def _searched(editor: GraphEditor, name: str) -> str | None:
    """Returns the tensor that an op searches for zeros or NaN."""
    node = editor[node_of(name)]
    if node.op == "IsNan":
        return tensor(node.input[0])
    is_zero = node.op == "Equal" and (value := constant(editor, node.input[1])) is not None and not np.any(value)
    return tensor(node.input[0]) if is_zero else None


def _take_other_branch(editor: StepEditor[Step], library: Library, node: NodeDef) -> None:
    """Replaces a conditional node by the nodes of its else branch."""
    arguments = [i for i in node.input[1:] if not is_control(i)]
    shapes = [editor.spec(i).shape for i in arguments]
    _, branch = branches_of(node)
    body = library.body(branch, shapes, [None] * len(arguments))
    prefix = f"autodist/divide_rows/{node.name}/"
    inputs = {node_of(name): i for name, i in zip(body.arguments, arguments, strict=True)}
    waits = [i for i in node.input if is_control(i)]

    def outside(name: str) -> str:
        if node_of(name) not in inputs:
            return _in_branch(name, prefix)
        argument = inputs[node_of(name)]
        return f"^{node_of(argument)}" if is_control(name) else argument

    for inner in body.graph_def.node:
        if inner.name in inputs:
            continue
        copy = NodeDef()
        copy.CopyFrom(inner)
        copy.name, copy.device = prefix + inner.name, node.device
        copy.input[:] = [*map(outside, inner.input), *waits]
        editor.add(copy)
    for k, name in enumerate(body.outputs):
        editor.rewire(f"{node.name}:{k}", outside(name))
    editor.replace_control(node.name, [node_of(outside(name)) for name in body.outputs])
    editor.note({_in_branch(name, prefix): spec for name, spec in _specs(body).items()})


def _in_branch(name: str, prefix: str) -> str:
    return f"^{prefix}{name[1:]}" if is_control(name) else prefix + name


def _specs(body: Body) -> dict[str, tf.TensorSpec]:
    """Returns the specs of the tensors in a function."""
    whole = tf.compat.v1.GraphDef(library=body.library)
    whole.MergeFrom(body.graph_def)
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(whole, name="")
    return {t.name: tf.TensorSpec(t.shape, t.dtype) for op in graph.get_operations() for t in op.outputs}
