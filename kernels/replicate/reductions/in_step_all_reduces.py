"""In-step all-reduces: sums over all replicas that the step needs while it computes."""

from __future__ import annotations

from functools import cached_property

import tensorflow as tf

from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind, find_depths
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import PendingReductionKind
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import reach
from autodist.kernels.replicate.reductions.reducer import Reducer
from autodist.kernels.replicate.reductions.rows import GatheredRows
from autodist.layout import Sum
from autodist.layout.linearity import Linearity, find_linearity


class InStepAllReduces:
    """Replaces a replica's value by the sum, or the concatenated rows, of all replicas.

    The gradient of such a sum is the sum of all replicas' gradients, since each replica reads the sum. The seed of each
    replica is its share of the batch, so that the loss of the batch is the sum of the replicas' losses.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._rows: dict[str, GatheredRows] = {}

    def reduce(self) -> None:
        """Replaces the placeholder of each in-step all-reduce by the sum, or the rows, of all replicas."""
        reducer, step = self._reducer, self._reducer.step
        depths = find_depths(step) if step.in_step_all_reduces else {}
        trains = (
            reach(reducer.stages.writes, step.graph_index.sources.__getitem__) if step.in_step_all_reduces else set()
        )
        for request in step.in_step_all_reduces:
            # In a session, workers may fetch different outputs; a sum for outputs alone is then local to a worker.
            is_of_all = reducer.context.reduces_outputs or request.node in trains
            make = self._sums if request.how is InStepAllReduceKind.SUM else self._of_rows
            for k, whole in enumerate(make(request, depths[request.node], is_of_all)):
                self._replace(node_of(reducer.parts.named(tensor(request.node), k)), whole)

    def _sums(self, request: InStepAllReduce, depth: int, is_of_all: bool) -> list[str]:
        """Returns the sum, as a tensor for each local replica."""
        reducer, name, captured = self._reducer, f"in_step_all_reduce/{request.node}", self._operand(request)
        if is_of_all:
            whole = reducer.reduce_value(name, captured, Sum(), depth=depth, purpose=PendingReductionKind.WHOLE)
        else:
            whole = reducer.reduce_locally(name, captured, Sum())
        if request.of is None and not self._cotangents.depends(tensor(request.node)):
            return [whole] * reducer.count
        return [self._if_used(name, captured, whole, k) for k in range(reducer.count)]

    def _of_rows(self, request: InStepAllReduce, depth: int, is_of_all: bool) -> list[str]:
        """Returns the gathered rows, or the gradient of them, as a tensor for each local replica."""
        name, captured, first = f"in_step_all_gather/{request.node}", self._operand(request), request.of or request.node
        if first == request.node:
            self._rows[first] = GatheredRows(self._reducer, name, captured, request.axis, depth, is_of_all)
        if request.how is InStepAllReduceKind.OWN_ROWS:
            return self._rows[first].own(name, captured, depth)
        return [self._rows[first].gathered(name, captured, depth)] * self._reducer.count

    @cached_property
    def _cotangents(self) -> Linearity:
        """The dependence on the seeds of the gradients that are summed over the replicas."""
        calls = {gradient.call for gradient in self._reducer.stages.gradients}
        step = self._reducer.step
        return find_linearity(step.graph_index, [step.gradient_calls[k].seed for k in sorted(calls)])

    def _operand(self, request: InStepAllReduce) -> str:
        return tensor(self._reducer.step.graph_index.nodes[request.node].input[0])

    def _if_used(self, name: str, captured: str, whole: str, k: int) -> str:
        """Returns a cotangent, or the gradient of a replica's part: zeros if the replica has no examples."""
        if self._reducer.parts.sizes is None:
            return whole
        spec = self._reducer.step.spec_of(captured)
        with subgraph(self._reducer.editor, f"{name}/{k}") as f:
            value = f.input(whole, spec.dtype, spec.shape)
            made = tf.where(self._reducer.parts.is_used(f, k), value, tf.zeros_like(value))
        return f.name(made)

    def _replace(self, name: str, whole: str) -> None:
        node = self._reducer.editor[name]
        dtype = tf.as_dtype(node.attr["dtype"].type)
        self._reducer.editor.pass_on(name, whole, dtype, filter(is_control, node.input))
