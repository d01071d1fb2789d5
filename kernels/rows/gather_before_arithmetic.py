"""Elementwise arithmetic between a table and a gather is done on the rows that are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, is_control, node_of, tensor
from autodist.kernels.elementwise import is_copy_of_variable, operands_of
from autodist.kernels.rows.gather_rows import gathers_rows
from autodist.kernels.rows.rule import Refusal, Rewrite, RowFacts, RowRule
from autodist.kernels.unused import remove_unused


@dataclass(frozen=True)
class GatherBeforeArithmetic(RowRule):
    """A gather of arithmetic on a variable becomes arithmetic on a gather of the variable.

    An operand without rows of its own is taken as it is; one that has a row for each of the table's is gathered, too.
    The gather of the read that is left becomes one in the variable later.

        Sqrt(Add(ReadVariableOp(a), e)) → GatherV2(·, ids)    becomes    Sqrt(Add(GatherV2(ReadVariableOp(a), ids), e))
    """

    name: ClassVar[str] = "gather-before-arithmetic"
    ops: ClassVar[tuple[str, ...]] = ("GatherV2",)

    def match(self, rows: RowFacts, node: NodeDef) -> Rewrite | Refusal | None:
        table, mover = tensor(node.input[0]), _Mover(rows, node.name)
        if is_copy_of_variable(rows.editor, table):
            return None
        if not gathers_rows(rows.editor, node, node_of(table)):
            return Refusal(f"it takes no whole rows of {table} along its first axis")
        rank = rows.editor.shape(node.input[1]).rank
        if rank is None:
            return Refusal(f"it is not known how many axes {node.input[1]} has")
        has_rows = rank > 0
        if not mover.leads_from_read(table, has_rows):
            return Refusal(f"no arithmetic row by row leads from a variable to {table}")
        return lambda: mover.move(node, table, has_rows)


class _Mover:
    """Moves a gather before the arithmetic that leads to it from a read."""

    def __init__(self, rows: RowFacts, root: str) -> None:
        self.editor, self._named, self._leads, self._root = rows.editor, rows.item.named, rows.leads, root

    def move(self, gather: NodeDef, table: str, has_rows: bool) -> None:
        self._ask_shapes_of_read(table, has_rows)
        for either in (True, False):
            self._leads.pop((tensor(self._root), either), None)  # it becomes arithmetic itself
        self._take_place(gather, table, has_rows)
        remove_unused(self.editor, self._named, [node_of(table)])

    def _tables(self, name: str, has_rows: bool) -> list[str]:
        """The operands, with rows, of the arithmetic that makes a tensor; empty if it is no such arithmetic."""
        node = self.editor[node_of(name)]
        operands = operands_of(self.editor, node) if tensor(name) == tensor(node.name) else None
        if operands is None or (operands.has_single_row and not has_rows):
            return []
        return [tensor(node.input[k]) for k in operands.tables]

    def leads_from_read(self, name: str, has_rows: bool) -> bool:
        """Whether arithmetic row by row makes a tensor of a variable's read."""
        key = (name, has_rows)
        if key not in self._leads:
            self._leads[key] = is_copy_of_variable(self.editor, name) or any(
                self.leads_from_read(t, has_rows) for t in self._tables(name, has_rows)
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
        if not is_copy_of_variable(self.editor, table) and self.leads_from_read(table, has_rows):
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
