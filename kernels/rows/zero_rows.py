"""Finds tables that are zero except in the rows of segment sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autodist.graph.editor import NodeDef
from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.elementwise import constant, operands_of
from autodist.kernels.rows.signs import Sign, Signs, signs_of
from autodist.kernels.rule import Facts


@dataclass(frozen=True)
class ZeroTable:
    """A table that elementwise arithmetic computes from segment sums, and that is zero elsewhere.

    Attributes:
        ids: tensor with the row of each segment.
        sums: the UnsortedSegmentSum nodes, all with these ids.
        arithmetic: nodes between the sums and the table.
        whole: other table operands of the arithmetic; only their rows at the segments matter.
    """

    ids: str
    sums: tuple[str, ...]
    arithmetic: tuple[str, ...]
    whole: tuple[str, ...]


class ZeroTables:
    """Finds zero tables in the graph of one editor, which must not change in the meantime."""

    def __init__(self, editor: StepEditor[Step], signs: Signs) -> None:
        self._editor = editor
        self._signs = signs
        self._zero: dict[str, tuple[str, ...]] = {}

    def find(self, table: str) -> ZeroTable | None:
        """Returns the computation of the tensor `table`, if all rows but some are zero."""
        sums: dict[str, None] = {}
        arithmetic: dict[str, None] = {}
        whole: dict[str, None] = {}
        front = [tensor(table)]
        while front:
            node = self._editor[node_of(front.pop())]
            if self._is_sum(node):
                sums[node.name] = None
            elif node.name not in arithmetic:
                zero = self._operands_that_are_zero(node)
                if not zero:
                    return None
                arithmetic[node.name] = None
                front += zero
                whole.update(dict.fromkeys(t for t in self._tables(node) if t not in zero))
        ids = {tensor(self._editor[name].input[1]) for name in sums}
        return ZeroTable(ids.pop(), tuple(sums), tuple(arithmetic), tuple(whole)) if len(ids) == 1 else None

    def why_not(self, table: str) -> str:
        """Returns the reason why all rows of the tensor `table` may be nonzero, if `find` returns None."""
        node, seen = self._editor[node_of(table)], set()
        while node.name not in seen and not self._operands_that_are_zero(node) and not self._is_sum(node):
            seen.add(node.name)
            tables = self._tables(node)
            if not tables or any(map(self._is_zero, tables)):
                return f"{node.op} ({node.name}) may be nonzero in every row"
            node = self._editor[node_of(tables[0])]
        return f"{node.op} ({node.name}) is not computed from segment sums with the same ids"

    def _is_zero(self, name: str) -> bool:
        node = self._editor[node_of(name)]
        return self._is_sum(node) or bool(self._operands_that_are_zero(node))

    def _is_sum(self, node: NodeDef) -> bool:
        return node.op == "UnsortedSegmentSum" and self._editor.shape(node.input[1]).rank == 1

    def _tables(self, node: NodeDef) -> list[str]:
        operands = operands_of(self._editor, node)
        if operands is None or operands.has_single_row:
            return []
        return [tensor(node.input[k]) for k in operands.tables]

    def _operands_that_are_zero(self, node: NodeDef) -> tuple[str, ...]:
        """Returns the operands whose zeros make the output zero; empty if the output may be nonzero there."""
        if node.name not in self._zero:
            tables = self._tables(node)
            zero = tuple(t for t in tables if self._is_zero(t))
            self._zero[node.name] = zero if zero and self._keeps_zero(node, tables, zero) else ()
        return self._zero[node.name]

    def _keeps_zero(self, node: NodeDef, tables: list[str], zero: tuple[str, ...]) -> bool:
        inputs = data_inputs(node)
        if node.op in having(Trait.ZERO_TO_ZERO) or node.op == "Mul":
            return True
        if node.op == "Sub" or node.op in having(Trait.ADDITION):
            return len(zero) == 2
        if node.op == "RealDiv":
            is_divided = zero == (inputs[0],)
            return is_divided and (len(tables) == 1 or self._signs.of(inputs[1]) is Sign.POSITIVE)
        if node.op in _BOUNDS and len(tables) == 1:
            bound = constant(self._editor, inputs[1] if zero[0] == inputs[0] else inputs[0])
            return bound is not None and bool(np.all(_BOUNDS[node.op](bound, 0)))
        return False


def zero_tables_of(facts: Facts) -> ZeroTables:
    """Returns the zero tables of a step, for `Facts.once`."""
    return ZeroTables(facts.editor, facts.once(signs_of))


_BOUNDS = {"Maximum": np.less_equal, "Minimum": np.greater_equal}
"""Comparisons of a bound with zero that hold if the bound keeps zero unchanged."""
