"""The sum over a table that is a sum of segments is the sum over the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autodist.graph.editor import NodeDef
from autodist.graph.item import GraphItem
from autodist.graph.names import is_control, node_of
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.elementwise import constant
from autodist.kernels.unused import remove_unused


@dataclass(frozen=True)
class SumRows(Kernel):
    """A sum over all elements does not need rows to be put in their places first, nor zeros between them.

    So a norm over all gradients costs what the rows cost of a sparse one.

        UnsortedSegmentSum(rows, ids, n) → Sum(·, all axes)    becomes    Sum(rows, all axes)
    """

    name: ClassVar[str] = "sum-rows"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        if not item.wiring.of_op("UnsortedSegmentSum"):
            return item
        editor = StepEditor(item)
        tables = {
            node.name: table for node in editor
            if node.op == "Sum" and (table := _summed_table(editor, node)) is not None
        }  # fmt: skip
        if not tables:
            return item
        for name, table in tables.items():
            waits = filter(is_control, [*editor[table].input, *editor[name].input])
            editor.set_inputs(name, [editor[table].input[0], editor[name].input[1], *waits])
            remove_unused(editor, item.named, [table])
        return editor.to_item()


def _summed_table(editor: StepEditor, node: NodeDef) -> str | None:
    """The sum of segments whose elements a Sum adds up, all of them."""
    table = editor[node_of(node.input[0])]
    axes = constant(editor, node.input[1])
    if table.op != "UnsortedSegmentSum" or axes is None or editor.spec(table.input[1]).shape.rank != 1:
        return None
    rank = editor.spec(table.input[0]).shape.rank
    found = {int(axis) % rank for axis in np.ravel(axes)} if rank else set()
    return table.name if rank and len(found) == rank else None
