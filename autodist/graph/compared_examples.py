"""Parts of a step in which examples are compared with one another, as in contrastive and ranking losses.

On one device such a part sees the whole batch. All replicas can therefore compute it on the rows of the whole batch,
which they gather: each then has the loss of one device, and the gradients of its own rows are those of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from autodist.graph.batch_statistics import BatchSearch, NodeInput, Statistic, can_be_whole, find_unknown
from autodist.graph.branch_effects import nodes_in_branches
from autodist.graph.editor import NodeDef
from autodist.graph.functions import functions_by_name
from autodist.graph.names import node_of, tensor
from autodist.graph.op_types import is_function_of_inputs, is_stateless
from autodist.graph.ops import Trait, draws_numbers, having
from autodist.graph.seeds import reduced_calls
from autodist.graph.walks import reach
from autodist.layout import Mean, PerExample, Replicated, Sum


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor, to be gathered from all replicas.

    Attributes:
        axis: the axis of the rows.
    """

    axis: int


def find_compared(search: BatchSearch) -> Mapping[NodeInput, Statistic | Rows]:
    """Returns what the parts of a step that compare examples read of the batch.

    A part begins with the nodes of a loss that make its dependence on the batch unknown. It has all nodes that read its
    results, except those of gradients, and those before it whose values belong to neither examples nor the whole batch.

    Returns:
        For each input of a node of a part that comes from outside, the rows to gather, or the sum or mean to reduce.
        Empty if there is no such part, or if it cannot be computed on the whole batch: it draws random numbers, has
        effects other than writes of variables, assertions and prints, has nodes that are left, or uses trained
        variables other than scalars (a layer, which all replicas would compute for all examples), or a
        `tf.custom_gradient` has an input of the step itself as an argument, which keeps its rows (`tf.identity` of the
        input does not).
    """
    return rows_behind(search, find_unknown(search))


def rows_behind(search: BatchSearch, nodes: Iterable[str]) -> Mapping[NodeInput, Statistic | Rows]:
    """Returns the rows, sums and means that the parts beginning with `nodes` read; empty as for `find_compared`."""
    part, front = _Part(search), list(nodes)
    while front:
        node = front.pop()
        if node in part.nodes:
            continue
        if not part.can_have(node):
            return {}
        part.nodes.add(node)
        front += part.neighbours(node)
    return part.read


_PRINTS = having(Trait.PRINTS | Trait.CHECKS)

_LENGTHS = having(Trait.LENGTHS)

_EFFECTS = having(Trait.ASSIGNMENT) | _PRINTS
"""Stateful ops that a part may have. They apply to the whole batch on each replica, as on one device."""


class _Part:
    """The parts of a step that compare examples.

    Attributes:
        nodes: their nodes.
    """

    def __init__(self, search: BatchSearch) -> None:
        self._search, self._step = search, search.step
        self.nodes: set[str] = set()

    def can_have(self, node: str) -> bool:
        """Returns True if all replicas can compute the same value of a node."""
        op = self._step.graph_index.nodes[node].op
        is_known = is_stateless(op) or op in _EFFECTS or self._is_assertion(self._step.graph_index.nodes[node])
        if self._search.is_left(node) or draws_numbers(op) or not is_known or tensor(node) in self._step.inputs:
            return False
        return not any(self._is_of_layer(name) for name in self._search.inputs(node))

    def neighbours(self, node: str) -> Sequence[str]:
        """Returns the nodes that belong to a part because `node` does.

        The gradient of a `tf.custom_gradient` reads its arguments themselves, and returns gradients for them. The nodes
        that compute these arguments therefore belong to the part too, so that the arguments have the rows of all.
        """
        is_cut = self._is_custom_gradient(node)
        before = [
            node_of(name)
            for name in self._search.inputs(node)
            if (kind := self._outside(name)) is None or (is_cut and not isinstance(kind, Replicated))
        ]
        return [*before, *(reader for reader in self._step.graph_index.readers(node) if reader in self._forward)]

    @property
    def read(self) -> dict[NodeInput, Statistic | Rows]:
        """The rows, sums and means that the nodes read from outside."""
        result: dict[NodeInput, Statistic | Rows] = {}
        for node in self.nodes:
            for k, name in enumerate(self._search.inputs(node)):
                outside = self._outside(name)
                if node_of(name) not in self.nodes and isinstance(outside, Rows | Sum | Mean):
                    result[NodeInput(node, k)] = outside
        return result

    def _outside(self, name: str) -> Replicated | Rows | Statistic | None:
        """Returns how a tensor is read from outside; None if its node has to belong to the part."""
        kind = self._search.kind(name)
        match kind:
            case Replicated():
                return kind
            case PerExample(axis, mixed_at=None):
                return Rows(axis)
            case Sum(mixed_at=None) | Mean(mixed_at=None) if can_be_whole(self._step, name, kind):
                return kind
        return None

    def _is_custom_gradient(self, node: str) -> bool:
        """Returns True for the node in which a `tf.custom_gradient` bundles its results and arguments."""
        return "_gradient_op_type" in self._step.graph_index.nodes[node].attr

    def _is_assertion(self, node: NodeDef) -> bool:
        """Returns True for a conditional that only prints something or stops the step, as `tf.debugging` makes them."""
        return node.op == "If" and all(
            inner.op == "If" or inner.op in _PRINTS or is_function_of_inputs(inner.op)
            for inner in nodes_in_branches(node, self._functions)
        )

    def _is_of_layer(self, name: str) -> bool:
        """Returns True for a value, other than a scalar or a shape, that is computed from trained variables alone."""
        is_shared = isinstance(self._search.kind(name), Replicated) and node_of(name) in self._of_variables
        spec = self._step.spec_of(name)
        return is_shared and not spec.dtype.is_integer and spec.shape.num_elements() != 1

    @cached_property
    def _forward(self) -> set[str]:
        """The nodes of losses, outputs and writes, without those of gradients, which a tape adds after the loss."""
        step = self._step
        calls = [step.gradient_calls[k] for k in reduced_calls(step)]
        backward = reach([node_of(call.seed) for call in calls], step.graph_index.readers)
        ends = [*(node_of(name) for call in calls for name in call.targets), *map(node_of, step.outputs), *step.targets]
        return reach([node for node in ends if node not in backward], step.graph_index.data.__getitem__)

    @cached_property
    def _functions(self) -> Mapping[str, tf.compat.v1.FunctionDef]:
        return functions_by_name(self._step.graph_def.library)

    @cached_property
    def _of_variables(self) -> set[str]:
        """The nodes whose values, and not only their lengths, are computed from trained variables."""
        index = self._step.graph_index
        handles = [self._step.by_name[gradient.variable].handle for gradient in self._step.gradients]
        return reach(handles, lambda name: [r for r in index.readers(name) if index.nodes[r].op not in _LENGTHS])
