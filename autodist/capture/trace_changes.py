"""Changes that a trace makes to the script's step: values of the whole batch, and conditionals with both branches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autodist.capture.graphs import is_of_function
from autodist.capture.in_step_all_reduces import AllReduceNotes
from autodist.capture.inline import BranchesInGraph
from autodist.graph.batch_statistics import NodeInput, Statistic
from autodist.graph.compared_examples import Rows
from autodist.graph.origins import line_of
from autodist.layout import Mean, Scalar, Total, Weight
from autodist.tf_compat.patches import CREATE_OP, patched

SCOPE = "autodist_whole/"
"""Name scope of the additions to a trace, so that no name of the script's own nodes changes."""

Wanted = Mapping[NodeInput, Statistic | Rows]


class TraceChanges:
    """The changes that a trace makes to the script's step, and those that it has made.

    Args:
        wanted: the sums and means to compute over the whole batch, or the rows to gather, by the input that reads them.
        batch: an input of the step with a row for each example, and the axis of the rows; None if `wanted` is empty.
        branches: conditionals that are traced with both branches.

    Attributes:
        made: the inputs that read the whole batch's values now, with the line of the script that has made their node.
    """

    def __init__(
        self, wanted: Wanted | None = None, batch: tuple[str, int] | None = None, branches: Collection[str] = ()
    ) -> None:
        self._wanted, self._batch = wanted or {}, batch
        self._branches = BranchesInGraph(branches)
        self._nodes = {place.node for place in self._wanted}
        self.made: dict[NodeInput, str | None] = {}

    @contextmanager
    def applied(self, notes: AllReduceNotes) -> Iterator[None]:
        """Makes the changes in a step's own graph while the context is open.

        Args:
            notes: receives the in-step all-reduces.
        """

        def create(
            plain: Any,
            graph: Any,
            op_type: str,
            inputs: Sequence[tf.Tensor],
            dtypes: Any = None,
            input_types: Any = None,
            name: str | None = None,
            *args: Any,
            **others: Any,
        ) -> tf.Operation:
            node = (name or "").rstrip("/")
            is_own = not is_of_function(graph.outer_graph)
            is_meant = node in self._nodes and is_own
            if is_own:
                with tf.name_scope(SCOPE):
                    inputs = self._branches.written(op_type, inputs)
            read = [self._read(notes, NodeInput(node, k), x) for k, x in enumerate(inputs)] if is_meant else inputs
            made: tf.Operation = plain(graph, op_type, read, dtypes, input_types, name, *args, **others)
            self.made |= {place: line_of(made) for place in self._wanted if is_meant and place.node == node}
            return made

        if not (self._wanted or self.branches):
            yield
            return
        with patched({CREATE_OP: create}), self._branches.replacing():
            yield

    @property
    def branches(self) -> frozenset[str]:
        """The conditionals that are traced with both branches."""
        return frozenset(self._branches.names)

    def trace_branches(self, branches: Collection[str]) -> None:
        """Makes the next trace have both branches of more conditionals."""
        self._branches, self.made = BranchesInGraph(self.branches.union(branches)), {}

    @property
    def is_made(self) -> bool:
        """True if the trace has made all changes."""
        return self.made.keys() == self._wanted.keys() and self._branches.made >= self.branches

    def _read(self, notes: AllReduceNotes, place: NodeInput, value: tf.Tensor) -> tf.Tensor:
        if place not in self._wanted:
            return value
        assert self._batch is not None
        (name, axis), named, wanted = self._batch, value.graph.get_tensor_by_name, self._wanted[place]
        with tf.name_scope(SCOPE):
            if isinstance(wanted, Rows):
                return notes.gathered(value, wanted.axis, is_asked=False)
            return global_statistic(notes, wanted, value, (named(name), axis), named)


def global_statistic(
    notes: AllReduceNotes,
    statistic: Statistic,
    value: tf.Tensor,
    batch: tuple[tf.Tensor, int],
    named: Callable[[str], tf.Tensor],
) -> tf.Tensor:
    """Returns the sum or mean of the whole batch.

    Args:
        notes: receives the in-step all-reduces.
        statistic: the reduction over replicas.
        value: this replica's value.
        batch: a tensor with a row for each example, and the axis of the rows.
        named: returns the tensors of the weight of a mean by name.
    """
    all_reduced = functools.partial(notes.all_reduced, is_asked=False)
    if not isinstance(statistic, Mean):
        return all_reduced(value)

    def of(weight: Weight) -> tf.Tensor:
        match weight:
            case Scalar(tensor):
                return tf.cast(named(tensor), value.dtype)
            case Total(tensor, inner):
                return tf.cast(named(tensor), value.dtype) * of(inner)
        rows, axis = batch
        examples = tf.raw_ops.Shape(input=rows)[axis]  # read at run time, also if the traced length is static
        return tf.cast(examples, value.dtype)

    weight = of(statistic.weight)
    return all_reduced(value * weight) / all_reduced(weight)
