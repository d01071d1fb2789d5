"""Replaces the sum of all elements of a segment sum by the sum of its input rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autodist.graph.editor import NodeDef
from autodist.graph.names import is_control, node_of
from autodist.graph.step import CapturedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.elementwise import constant
from autodist.kernels.rule import Facts, Refusal, Rewrite, Rule
from autodist.kernels.unused import remove_unused


@dataclass(frozen=True)
class SumRows(Rule):
    """Sums the rows directly: a sum over all elements needs neither their positions nor the zeros between them.

    The global norm of the gradients then reads the rows of a sparse gradient, not a whole table.

        UnsortedSegmentSum(rows, ids, n) → Sum(·, all axes)    becomes    Sum(rows, all axes)
    """

    name: ClassVar[str] = "sum-rows"
    ops: ClassVar[tuple[str, ...]] = ("Sum",)

    def candidates(self, step: CapturedStep) -> Iterable[str]:
        return super().candidates(step) if step.graph_index.of_op("UnsortedSegmentSum") else ()

    def match(self, rows: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        editor = rows.editor
        table = editor[node_of(node.input[0])]
        if table.op != "UnsortedSegmentSum":
            return None
        if not _adds_up_all(editor, node, table):
            return Refusal(f"it is not known to sum all elements of {table.name}, with one segment per row")

        def rewrite() -> None:
            waits = filter(is_control, [*table.input, *node.input])
            editor.set_inputs(node.name, [table.input[0], node.input[1], *waits])
            remove_unused(editor, rows.step.named, [table.name])

        return rewrite


def _adds_up_all(editor: StepEditor[Step], node: NodeDef, table: NodeDef) -> bool:
    """Returns True if a Sum is known to reduce all axes of a segment sum that has one segment id per row."""
    axes, rank = constant(editor, node.input[1]), editor.spec(table.input[0]).shape.rank
    if axes is None or not rank or editor.spec(table.input[1]).shape.rank != 1:
        return False
    return len({int(axis) % rank for axis in np.ravel(axes)}) == rank
