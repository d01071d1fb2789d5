"""Elementwise arithmetic on a table, a variable whose rows are gathered by ids (such as an embedding).

Finds the operands of such a node that have one row per row of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor


@dataclass(frozen=True)
class Operands:
    """The inputs of an elementwise op whose output has one row per row of a table.

    Attributes:
        tables: positions of the inputs that also have one row per row of the table.
        has_single_row: True if another input has the table's rank and a single row; such an input does not broadcast
            to a value of lower rank.
    """

    tables: tuple[int, ...]
    has_single_row: bool


def operands_of(editor: StepEditor[Step], node: NodeDef) -> Operands | None:
    """Classifies a node's operands; returns None if the node is not known to be elementwise along the rows."""
    if node.op not in having(Trait.ELEMENTWISE):
        return None
    inputs = [i for i in node.input if not is_control(i)]
    if len(inputs) == 1:
        return Operands((0,), False)
    shape = editor.shape(node.name)
    if not shape.rank or shape[0] is None:
        return None
    rows, tables, has_single_row = shape[0], [], False
    for position, name in enumerate(inputs):
        operand = editor.shape(name)
        if operand.rank is None:
            return None
        if operand.rank == shape.rank:
            if operand[0] == rows:
                tables.append(position)
            elif operand[0] == 1:
                has_single_row = True
            else:
                return None
    return Operands(tuple(tables), has_single_row)


def is_copy_of_variable(editor: GraphEditor, name: str) -> bool:
    """Returns True if a tensor is a read of a variable, possibly through Identity nodes."""
    node = editor[node_of(name)]
    while node.op == "Identity":
        node = editor[node_of(node.input[0])]
    return node.op == "ReadVariableOp"


def constant(editor: GraphEditor, name: str) -> np.ndarray | None:
    """Returns the value of a constant tensor, or None if the tensor is not a constant."""
    node = editor[node_of(name)]
    return tf.make_ndarray(node.attr["value"].tensor) if node.op == "Const" else None
