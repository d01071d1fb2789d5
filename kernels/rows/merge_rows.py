"""Sums repeated rows in a worker's part of a sparse gradient before they are sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.ops import SUMS, Trait, having
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.graph.step import ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context, Kernel

# Their second input is the indices.
_ADDING = frozenset(op for s in SUMS for op in (s.scatter, s.scatter_nd)) | {"UnsortedSegmentSum"}
_PASS_INDICES = having(Trait.IDENTITY | Trait.RESHAPES) - {"EnsureShape"}

_WORTH_ONE_IN = 4


@dataclass(frozen=True)
class MergeRows(Kernel[ReplicatedStep, ReplicatedStep]):
    """Sends each row once per worker, however often it occurs in the worker's batch.

    Applies only if all readers of the gathered rows sum them by index and scale them uniformly before that: a norm over
    rows, a clip by value or a square yields different results for two rows and for their sum.

        (ids, rows) → send    becomes    (unique ids, sum of the rows of each) → send

    Summing takes a worker about as long as sending a quarter of the rows and writing them at the receiver. If less
    than a quarter is saved, all rows are sent unchanged.
    """

    name: ClassVar[str] = "merge-rows"

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.workers == 1:
            return step
        editor = StepEditor(step)
        returned = frozenset(map(tensor, step.outputs))
        merged = {
            pending.name: _merge(editor, pending) for pending in step.reductions
            if pending.is_sparse and pending.kind is PendingReductionKind.GRADIENT
            and returned.isdisjoint(pending.result) and is_summed(editor, *pending.result)
        }  # fmt: skip
        if not merged:
            return step
        reductions = tuple(replace(j, local=merged[j.name]) if j.name in merged else j for j in step.reductions)
        return editor.to_step(reductions=reductions)


def _merge(editor: GraphEditor, pending: PendingReduction) -> tuple[str, str]:
    ids, rows = pending.local
    with subgraph(editor, f"merge_rows/{pending.name}") as f:
        all_ids, all_rows = f.input(ids, pending.index_dtype, [None]), f.input(rows, pending.dtype, pending.shape)
        unique, segment = tf.unique(all_ids, out_idx=tf.int32)
        count, left = tf.size(all_ids), tf.size(unique)
        sent_ids, sent = tf.cond(
            count - left >= count // _WORTH_ONE_IN,
            lambda: (unique, tf.math.unsorted_segment_sum(all_rows, segment, left)),
            lambda: (all_ids, all_rows),
        )
    return f.name(sent_ids), f.name(sent)


def is_summed(editor: StepEditor[Step], indices: str, rows: str) -> bool:
    """Returns True if all readers of `rows` only scale them and sum them by `indices`, which have no other use."""
    paths = _Paths(editor)
    return paths.follow_rows(rows) and paths.follow_indices(indices) and paths.meet()


@dataclass
class _Paths:
    """The paths of rows and indices to the ops that sum the rows."""

    editor: StepEditor[Step]
    _rows: set[str] = field(default_factory=set)
    _indices: set[str] = field(default_factory=set)
    _added: set[str] = field(default_factory=set)

    def follow_rows(self, rows: str) -> bool:
        """Collects the ops that sum the rows; returns False if there is another reader."""
        front = [tensor(rows)]
        while front:
            made = front.pop()
            self._rows.add(made)
            for node in self._readers(made):
                if self._is_scaling(node, made):
                    front.append(tensor(node.name))
                elif node.op in _ADDING and tensor(node.input[1]) != made:
                    self._added.add(node.name)
                else:
                    return False
        return True

    def follow_indices(self, indices: str) -> bool:
        """Collects tensors equivalent to the indices; returns False if a reader depends on their number."""
        front = [tensor(indices)]
        while front:
            made = front.pop()
            self._indices.add(made)
            for node in self._readers(made):
                if node.op in _PASS_INDICES and tensor(node.input[0]) == made:
                    front.append(tensor(node.name))
                elif node.op in having(Trait.UNIQUE) and tensor(node.input[0]) == made:
                    # The unique indices do not change; their positions in the input do.
                    front.append(f"{node.name}:1")
                elif node.name not in self._added:
                    return False
        return True

    def meet(self) -> bool:
        """Returns True if rows are only summed by these indices."""
        return bool(self._added) and all(tensor(self.editor[name].input[1]) in self._indices for name in self._added)

    def _readers(self, made: str) -> Iterable[NodeDef]:
        for name in sorted(self.editor.consumers(node_of(made))):
            node = self.editor[name]
            if made in data_inputs(node):
                yield node

    def _is_scaling(self, node: NodeDef, made: str) -> bool:
        """Returns True if a node multiplies every row by the same number."""
        inputs = data_inputs(node)
        if node.op == "Neg" or node.op in having(Trait.IDENTITY):
            return True
        if node.op == "Mul":
            other = inputs[1] if inputs[0] == made else inputs[0]
        elif node.op == "RealDiv" and inputs[0] == made:
            other = inputs[1]
        else:
            return False
        return other not in self._rows and self.editor.shape(other).rank == 0
