"""Elementwise arithmetic between a table and a gather is done on the rows that are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.item import GraphItem
from autodist.graph.names import as_input, is_control, node_of, tensor
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.elementwise import is_copy_of_variable, operands_of
from autodist.kernels.rows.gather_rows import gathers_rows
from autodist.kernels.unused import remove_unused


@dataclass(frozen=True)
class GatherBeforeArithmetic(Kernel):
    """A gather of arithmetic on a variable becomes arithmetic on a gather of the variable.

    An operand without rows of its own is taken as it is; one that has a row for each of the table's is gathered, too.
    The gather of the read that is left becomes one in the variable later.

        Sqrt(Add(ReadVariableOp(a), e)) → GatherV2(·, ids)    becomes    Sqrt(Add(GatherV2(ReadVariableOp(a), ids), e))
    """

    name: ClassVar[str] = "gather-before-arithmetic"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        gathers = [node.name for node in item.wiring.of_op("GatherV2")]
        if not gathers:
            return item
        editor = StepEditor(item)
        rows = _Mover(editor)
        moved = [name for name in gathers if rows.move(name)]
        if not moved:
            return item
        remove_unused(editor, item.named, rows.left)
        return editor.to_item()


class _Mover:
    """Moves gathers in one graph.

    Attributes:
        left: arithmetic on tables that gathers were moved before.
    """

    def __init__(self, editor: StepEditor) -> None:
        self.editor = editor
        self.left: list[str] = []
        self._root = ""
        self._leads: dict[tuple[str, bool], bool] = {}

    def move(self, name: str) -> bool:
        """Moves one gather before the arithmetic that leads to it from a read; returns whether there is any."""
        gather = self.editor[name]
        table = tensor(gather.input[0])
        if not gathers_rows(self.editor, gather, node_of(table)) or is_copy_of_variable(self.editor, table):
            return False
        rank = self.editor.shape(gather.input[1]).rank
        if rank is None:
            return False
        has_rows = rank > 0
        if not self._leads_from_read(table, has_rows):
            return False
        self._ask_shapes_of_read(table, has_rows)
        self.left.append(node_of(table))
        self._root = name
        self._leads.pop((tensor(name), True), None)  # it becomes arithmetic itself
        self._leads.pop((tensor(name), False), None)
        self._take_place(gather, table, has_rows)
        return True

    def _tables(self, name: str, has_rows: bool) -> list[str]:
        """The operands, with rows, of the arithmetic that makes a tensor; empty if it is no such arithmetic."""
        node = self.editor[node_of(name)]
        operands = operands_of(self.editor, node) if tensor(name) == tensor(node.name) else None
        if operands is None or (operands.has_single_row and not has_rows):
            return []
        return [tensor(node.input[k]) for k in operands.tables]

    def _leads_from_read(self, name: str, has_rows: bool) -> bool:
        key = (name, has_rows)
        if key not in self._leads:
            self._leads[key] = is_copy_of_variable(self.editor, name) or any(
                self._leads_from_read(t, has_rows) for t in self._tables(name, has_rows)
            )
        return self._leads[key]

    def _take_place(self, gather: NodeDef, table: str, has_rows: bool) -> None:
        """Lets the node of a gather be the arithmetic that made the table, on gathers of its operands."""
        arithmetic, asked = self.editor[node_of(table)], list(gather.input)
        gathers = {t: self._gather(gather, t, has_rows) for t in self._tables(table, has_rows)}
        data = [gathers.get(tensor(i), i) for i in arithmetic.input if not is_control(i)]
        gather.op = arithmetic.op
        gather.attr.clear()
        for key, value in arithmetic.attr.items():
            if key not in ("_class", "_output_shapes"):
                gather.attr[key].CopyFrom(value)
        self.editor.set_inputs(gather.name, [*data, *filter(is_control, [*arithmetic.input, *asked])])

    def _gather(self, like: NodeDef, table: str, has_rows: bool) -> str:
        """The rows of `table` that another gather asks for: by a gather of their own, or arithmetic on others."""
        name = f"autodist/rows/{self._root}/of/{node_of(table)}"
        if name in self.editor:
            return name
        made = NodeDef(op="GatherV2", name=name, device=like.device, input=[as_input(table), *like.input[1:]])
        spec, (ids, axis) = self.editor.spec(table), (self.editor.spec(i) for i in like.input[1:3])
        made.attr["Tparams"].type = spec.dtype.as_datatype_enum
        made.attr["Tindices"].type = ids.dtype.as_datatype_enum
        made.attr["Taxis"].type = axis.dtype.as_datatype_enum
        made.attr["batch_dims"].i = 0
        self.editor.add(made)
        self.editor.note({tensor(name): tf.TensorSpec(ids.shape.concatenate(spec.shape[1:]), spec.dtype)})
        if not is_copy_of_variable(self.editor, table) and self._leads_from_read(table, has_rows):
            self._take_place(self.editor[name], table, has_rows)
        return name

    def _ask_shapes_of_read(self, table: str, has_rows: bool) -> None:
        """Lets the gradient's code ask for the shape of the variable, where it asks for that of arithmetic on it."""
        shape = self.editor.spec(table).shape
        same = [t for t in self._tables(table, has_rows) if self.editor.spec(t).shape == shape]
        if not same or not shape.is_fully_defined():
            return
        for name in sorted(self.editor.consumers(node_of(table))):
            node = self.editor[name]
            if node.op == "Shape" and node_of(node.input[0]) == node_of(table):
                node.attr["T"].type = self.editor.spec(same[0]).dtype.as_datatype_enum
                self.editor.set_inputs(name, [same[0], *node.input[1:]])
        if not is_copy_of_variable(self.editor, same[0]):
            self._ask_shapes_of_read(same[0], has_rows)
