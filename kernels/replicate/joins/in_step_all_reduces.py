"""Whole sums: what the step adds up over all replicas while it computes."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind, find_depths
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import PendingReductionKind
from autodist.graph.propagation import Sum
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import reach
from autodist.kernels.replicate.joins.joiner import Joiner
from autodist.kernels.replicate.joins.rows import WholeRows


class InStepAllReduces:
    """Gives replicas the sum of what all of them have, in place of their own, or the rows of all of them.

    Its gradient is the sum of all gradients: the seeds of each replica are its share of the batch, so that the whole
    loss is the sum of what replicas differentiate, and each of them reads the sum.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self._rows: dict[str, WholeRows] = {}

    def join(self) -> None:
        """Puts the sum over all replicas in place of each placeholder that stands for one."""
        joiner, item = self._joiner, self._joiner.item
        depths = find_depths(item) if item.whole_sums else {}
        trains = reach(joiner.stages.writes, item.graph_index.sources.__getitem__) if item.whole_sums else set()
        for asked in item.whole_sums:
            # Workers of a session may fetch different things.
            is_of_all = joiner.context.joins_outputs or asked.node in trains
            make = self._sums if asked.how is InStepAllReduceKind.SUM else self._of_rows
            for k, whole in enumerate(make(asked, depths[asked.node], is_of_all)):
                self._become(node_of(joiner.parts.named(tensor(asked.node), k)), whole)

    def _sums(self, asked: InStepAllReduce, depth: int, is_of_all: bool) -> list[str]:
        """The tensor that each local replica gets."""
        joiner, name, captured = self._joiner, f"whole_sum/{asked.node}", self._given(asked)
        if is_of_all:
            whole = joiner.join_value(name, PendingReductionKind.WHOLE, captured, Sum(), depth=depth)
        else:
            whole = joiner.join_here(name, captured, Sum())
        if asked.of is None:
            return [whole] * joiner.count
        return [self._if_used(name, captured, whole, k) for k in range(joiner.count)]

    def _of_rows(self, asked: InStepAllReduce, depth: int, is_of_all: bool) -> list[str]:
        """What each local replica gets of rows that are gathered."""
        name, captured, first = f"whole_rows/{asked.node}", self._given(asked), asked.of or asked.node
        if first == asked.node:
            self._rows[first] = WholeRows(self._joiner, name, captured, asked.axis, depth, is_of_all)
        if asked.how is InStepAllReduceKind.OWN_ROWS:
            return self._rows[first].own(name, captured, depth)
        return [self._rows[first].gathered(name, captured, depth)] * self._joiner.count

    def _given(self, asked: InStepAllReduce) -> str:
        return tensor(self._joiner.item.graph_index.nodes[asked.node].input[0])

    def _if_used(self, name: str, captured: str, whole: str, k: int) -> str:
        """The gradient of a replica's own part: none where the row that it computes with is no example."""
        if self._joiner.parts.sizes is None:
            return whole
        spec = self._joiner.item.spec_of(captured)
        with subgraph(self._joiner.editor, f"{name}/{k}") as f:
            value = f.input(whole, spec.dtype, spec.shape)
            made = tf.where(self._joiner.parts.is_used(f, k), value, tf.zeros_like(value))
        return f.name(made)

    def _become(self, name: str, whole: str) -> None:
        node = self._joiner.editor[name]
        dtype = tf.as_dtype(node.attr["dtype"].type)
        self._joiner.editor.pass_on(name, whole, dtype, filter(is_control, node.input))
