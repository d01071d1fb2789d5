"""Tensors of a loop's body that are the same in each iteration, computed once before the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.loop_editor import LoopEditor
from autodist.graph.names import is_control, node_of, output_index
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SubgraphBuilder

_LOOPS = having(Trait.LOOP)
_ALLOWED = having(Trait.ELEMENTWISE) | {"Const", "Softmax", "Transpose"}
"""Ops of one output that can run for a loop without iterations, too."""


@dataclass(frozen=True)
class LoopConstant:
    """A tensor of a loop's body that is the same in each iteration.

    Attributes:
        loop: the loop that computes it; for a backward loop, that of the forward pass.
        source: the tensor, in the body of that loop.
        dtype: of the tensor.
        nodes: the nodes of the body that compute it from variables that keep their value, in order.
    """

    loop: LoopEditor
    source: str
    dtype: tf.DType
    nodes: tuple[NodeDef, ...]

    def build(self, f: SubgraphBuilder) -> tf.Tensor:
        """Computes the tensor, a matrix, when its loop could start."""
        start = [f.after(dict.fromkeys(map(node_of, self.loop.node.input)))]
        names: dict[str, str] = {}
        for node in self.nodes:
            inputs = [self._outside(names, spelled) for spelled in node.input]
            names[node.name] = f.add(node, f.graph.unique_name(node.name), inputs, start).name
        return f.input(self._outside(names, self.source), self.dtype, [None, None])

    def _outside(self, names: dict[str, str], spelled: str) -> str:
        source = self.loop.source(spelled)
        return names.get(node_of(source)) or self.loop.constants[source]


def find_constant(editor: StepEditor[Step], loop: LoopEditor, spelled: str) -> LoopConstant | None:
    """Returns how to compute a tensor of a loop's body before the loop; None if it may change between iterations.

    The backward loop takes the matrices of the forward loop from lists, to which that has appended the same matrix in
    each iteration.
    """
    dtype = tf.as_dtype(loop.type_of(spelled))
    nodes = _find_nodes(loop, spelled)
    if nodes is not None:
        return LoopConstant(loop, loop.source(spelled), dtype, tuple(nodes))
    popped = _find_popped(loop, spelled)
    maker = editor[node_of(popped)] if popped is not None else None
    if popped is None or maker is None or maker.op not in _LOOPS:
        return None
    forward, variable = LoopEditor(editor, maker.name), output_index(popped)
    appended = forward.producer(forward.source(forward.result(variable)))
    if appended is None or appended.op != "TensorListPushBack":
        return None
    is_new = editor[node_of(forward.before(variable))].op == "EmptyTensorList"
    is_same_list = forward.source(appended.input[0]) == forward.inside(variable)
    return find_constant(editor, forward, appended.input[1]) if is_new and is_same_list else None


def _find_nodes(loop: LoopEditor, spelled: str) -> list[NodeDef] | None:
    """Returns the nodes of a body that compute a tensor from variables that keep their value; None if others do."""
    found: dict[str, NodeDef] = {}

    def is_constant(spelled: str) -> bool:
        source = loop.source(spelled)
        node = loop.producer(source)
        if source in loop.constants or (node is not None and node.name in found):
            return True
        if node is None or not _is_repeatable(loop, node) or not all(map(is_constant, node.input)):
            return False
        found[node.name] = node
        return True

    return list(found.values()) if is_constant(spelled) else None


def _is_repeatable(loop: LoopEditor, node: NodeDef) -> bool:
    """Returns True if a node always computes the same value from the same inputs, and never fails."""
    if node.op == "ReadVariableOp":
        return all(reader.op == "ReadVariableOp" for reader in loop.readers(loop.source(node.input[0])))
    return node.op in _ALLOWED and not any(map(is_control, node.input))


def _find_popped(loop: LoopEditor, spelled: str) -> str | None:
    """Returns the list, a tensor of the graph, from whose end each iteration takes a tensor; None if none does."""
    source = loop.source(spelled)
    node = loop.producer(source)
    if node is None or node.op != "TensorListPopBack" or source != f"{node.name}:tensor:0":
        return None
    variable = loop.variable_of(loop.source(node.input[0]))
    if variable is None or len(loop.readers(loop.inside(variable))) != 1:
        return None
    is_shortened = loop.source(loop.result(variable)) == f"{node.name}:output_handle:0"
    return loop.before(variable) if is_shortened else None


def add_before(
    editor: StepEditor[Step], loop: LoopEditor, made: Iterable[str], constants: Sequence[LoopConstant]
) -> None:
    """Places new nodes with their loop, and reads with their variables.

    Loops that read a variable wait for the reads that replace theirs, so that later writes wait for these, too.
    """
    reads: dict[str, list[str]] = {}
    for name in made:
        node = editor[name]
        node.device = editor[node_of(node.input[0])].device if node.op == "ReadVariableOp" else loop.node.device
    for constant in constants:
        if constant.loop.node.name != loop.node.name:
            reads[constant.loop.node.name] = [name for name in made if editor[name].op == "ReadVariableOp"]
    for name, before in reads.items():
        editor.add_control(name, before)
