"""Applies elementwise arithmetic between a table and a gather to the gathered rows only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, is_control, node_of, tensor
from autodist.kernels.elementwise import is_copy_of_variable, operands_of
from autodist.kernels.rows.gather_rows import gathers_rows
from autodist.kernels.rule import Facts, Refusal, Rewrite, Rule
from autodist.kernels.unused import remove_unused


@dataclass(frozen=True)
class GatherBeforeArithmetic(Rule):
    """Replaces a gather of arithmetic on a variable by arithmetic on a gather of the variable.

    Operands without rows of their own are used unchanged; those with one row per row of the table are gathered, too.
    A later rule replaces the remaining gather of a read by a gather from the variable.

        Sqrt(Add(ReadVariableOp(a), e)) → GatherV2(·, ids)    becomes    Sqrt(Add(GatherV2(ReadVariableOp(a), ids), e))
    """

    name: ClassVar[str] = "gather-before-arithmetic"
    ops: ClassVar[tuple[str, ...]] = ("GatherV2",)

    def match(self, rows: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        table, mover = tensor(node.input[0]), _Mover(rows, node.name)
        if is_copy_of_variable(rows.editor, table):
            return None
        if not gathers_rows(rows.editor, node, node_of(table)):
            return Refusal(f"it does not gather whole rows of {table} along its first axis")
        rank = rows.editor.shape(node.input[1]).rank
        if rank is None:
            return Refusal(f"the rank of {node.input[1]} is not known")
        has_rows = rank > 0
        if not mover.leads_from_read(table, has_rows):
            return Refusal(f"{table} is not computed from a variable by row-wise arithmetic")
        return lambda: mover.move(node, table, has_rows)


def _leads_of(_: Facts) -> dict[tuple[str, bool], bool]:
    """Returns a cache of `_Mover.leads_from_read`."""
    return {}


class _Mover:
    """Moves a gather before the arithmetic between a read and the gather."""

    def __init__(self, rows: Facts, root: str) -> None:
        self.editor, self._named, self._leads, self._root = rows.editor, rows.step.named, rows.once(_leads_of), root

    def move(self, gather: NodeDef, table: str, has_rows: bool) -> None:
        self._use_shapes_of_read(table, has_rows)
        for either in (True, False):
            self._leads.pop((tensor(self._root), either), None)  # it becomes arithmetic itself
        self._replace(gather, table, has_rows)
        remove_unused(self.editor, self._named, [node_of(table)])

    def _tables(self, name: str, has_rows: bool) -> list[str]:
        """Returns the operands, with rows, of the arithmetic that computes a tensor; empty for other ops."""
        node = self.editor[node_of(name)]
        operands = operands_of(self.editor, node) if tensor(name) == tensor(node.name) else None
        if operands is None or (operands.has_single_row and not has_rows):
            return []
        return [tensor(node.input[k]) for k in operands.tables]

    def leads_from_read(self, name: str, has_rows: bool) -> bool:
        """Returns True if a tensor is computed from a variable's read by row-wise arithmetic."""
        key = (name, has_rows)
        if key not in self._leads:
            self._leads[key] = is_copy_of_variable(self.editor, name) or any(
                self.leads_from_read(t, has_rows) for t in self._tables(name, has_rows)
            )
        return self._leads[key]

    def _replace(self, gather: NodeDef, table: str, has_rows: bool) -> None:
        """Replaces a gather node by the arithmetic that computed the table, applied to gathers of its operands."""
        arithmetic, gather_inputs = self.editor[node_of(table)], list(gather.input)
        gathers = {t: self._gather(gather, t, has_rows) for t in self._tables(table, has_rows)}
        data = [gathers.get(tensor(i), i) for i in arithmetic.input if not is_control(i)]
        gather.op = arithmetic.op
        gather.attr.clear()
        for key, value in arithmetic.attr.items():
            if key not in ("_class", "_output_shapes"):
                gather.attr[key].CopyFrom(value)
        self.editor.set_inputs(gather.name, [*data, *filter(is_control, [*arithmetic.input, *gather_inputs])])

    def _gather(self, like: NodeDef, table: str, has_rows: bool) -> str:
        """Returns the rows of `table` that another gather selects: from a new gather, or arithmetic on others."""
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
            self._replace(self.editor[name], table, has_rows)
        return name

    def _use_shapes_of_read(self, table: str, has_rows: bool) -> None:
        """Replaces shapes of arithmetic on a variable, used by the gradient's code, by the shape of the variable."""
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
            self._use_shapes_of_read(same[0], has_rows)
