"""ScatterRows: adds only some rows of a tensor to a variable, if all other rows are zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.find_stages import find_stages
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import SUMS
from autodist.graph.step import CapturedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.replica_dependent import find_replica_dependent, sources_of
from autodist.kernels.rows.zero_rows import ZeroTable, zero_tables_of
from autodist.kernels.rule import Facts, Refusal, Rewrite, Rule
from autodist.kernels.unused import remove_unused

_SCATTERS = {s.assign: s.scatter for s in SUMS}


@dataclass(frozen=True)
class ScatterRows(Rule):
    """Replaces the addition of a table that is zero except in the rows of a segment sum by a scatter.

    TensorFlow creates such a sum whenever sparse rows reach an op that does not support them: Keras's clipping by a
    global norm, or a function called by the script. Repeated rows are still summed first, so the arithmetic need not be
    linear. If it meets numbers that are not finite (zero times infinity), rows that no batch touches keep their values.

        UnsortedSegmentSum(rows, ids, n) → f → AssignAdd(v, ·)    with f(0) = 0    becomes
        UnsortedSegmentSum(rows, Unique(ids)) → f → ResourceScatterAdd(v, Unique(ids), ·)
    """

    name: ClassVar[str] = "scatter-rows"
    ops: ClassVar[tuple[str, ...]] = tuple(_SCATTERS)

    def candidates(self, step: CapturedStep) -> Iterable[str]:
        if not step.graph_index.of_op("UnsortedSegmentSum"):
            return ()
        stages = find_stages(step)
        joined = find_replica_dependent(step, sources_of(step, (), ()), stages) & set(  # these add whole values
            stages.state_writes
        )
        return [node.name for node in step.graph_def.node if node.op in self.ops and node.name not in joined]

    def match(self, rows: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        value = node.input[1]
        table = rows.once(zero_tables_of).find(value)
        if table is None:
            return Refusal(rows.once(zero_tables_of).why_not(value))

        def rewrite() -> None:
            _scatter(rows.editor, node, table)
            remove_unused(rows.editor, rows.step.named, [node_of(value)])

        return rewrite


def _scatter(editor: StepEditor[Step], node: NodeDef, table: ZeroTable) -> None:
    """Replaces the addition of a table by one of rows."""
    ids = editor.spec(table.ids)
    rows_of = {tensor(name): tensor(editor[name].input[0]) for name in table.sums}
    with editor.subgraph(f"scatter_rows/{node.name}") as f:
        unique, segment = tf.unique(f.input(table.ids, ids.dtype, [None]), out_idx=tf.int32)
        made = {name: tf.gather(f.input(name), unique) for name in table.whole}
        made |= {
            name: tf.math.unsorted_segment_sum(f.input(rows), segment, tf.size(unique))
            for name, rows in rows_of.items()
        }
    taken = {name: f.name(rows) for name, rows in made.items()}
    copies = editor.clone(table.arithmetic, f.prefix, lambda i: i if is_control(i) else taken.get(tensor(i), i))
    written = tensor(node.input[1])
    added = tensor(copies[node_of(written)]) if node_of(written) in copies else taken[written]
    _become_scatter(editor, node, f.name(unique), added, ids.dtype)
    editor.note({tensor(copy): _rows_like(editor.spec(name)) for name, copy in copies.items()})


def _become_scatter(editor: GraphEditor, node: NodeDef, ids: str, rows: str, index: tf.DType) -> None:
    dtype = node.attr["dtype"].type
    node.op = _SCATTERS[node.op]
    node.attr.clear()
    node.attr["dtype"].type, node.attr["Tindices"].type = dtype, index.as_datatype_enum
    editor.set_inputs(node.name, [node.input[0], ids, rows, *node.input[2:]])


def _rows_like(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape[1:]), spec.dtype)
