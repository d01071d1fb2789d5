"""Traces both branches of conditionals whose writes a step reads again, and selects the written values.

    tf.cond(p, lambda: v.assign(f(x)), …)      becomes      v.assign(tf.where(p, f(x), v))

Batch statistics in a branch are then nodes of the step's graph, like all others, and cover the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from autodist.capture.graphs import is_of_function
from autodist.graph.ops import SUMS, Trait, having
from autodist.tf_compat.patches import COND, patched

_SUMS = tuple(one.assign for one in SUMS)


@dataclass
class BranchesInGraph:
    """The conditionals of a step's graph that are traced with both branches.

    Attributes:
        names: names of the conditionals' nodes.
        made: names of those traced so far.
    """

    names: Collection[str]
    made: set[str] = field(default_factory=set)
    _conditions: list[tf.Tensor] = field(default_factory=list)

    def written(self, op_type: str, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Returns the inputs of an op.

        In a branch that is not taken, a write gets inputs that leave its variable as it is.
        """
        if not self._conditions or op_type not in having(Trait.ASSIGNMENT):
            return inputs
        handle, value, *others = inputs
        taken = functools.reduce(tf.logical_and, self._conditions)
        kept = tf.zeros_like(value)
        if op_type not in _SUMS:
            kept = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
        return [handle, tf.where(taken, value, kept), *others]

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Traces both branches of the conditionals while the context is open."""

        def cond(
            plain: Any, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any], name: str = "cond"
        ) -> Any:
            graph = tf.compat.v1.get_default_graph()
            node = graph.unique_name(name or "cond", mark_as_used=False)
            is_own = not is_of_function(getattr(graph, "outer_graph", None))
            if not is_own or not (self._conditions or node in self.names):
                return plain(pred, true_fn, false_fn, name)
            self.made.add(node)
            with tf.name_scope(name or "cond"):
                return self._both(tf.convert_to_tensor(pred), true_fn, false_fn)

        with patched({COND: cond}):
            yield

    def _both(self, condition: tf.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        results = []
        for taken, branch in ((condition, true_fn), (tf.logical_not(condition), false_fn)):
            self._conditions.append(taken)
            try:
                results.append(branch())
            finally:
                self._conditions.pop()
        return tf.nest.map_structure(functools.partial(_chosen, condition), *results)


def _chosen(condition: tf.Tensor, then: Any, other: Any) -> Any:
    if then is None or isinstance(then, tf.Operation):
        return then
    return tf.where(condition, then, other)
