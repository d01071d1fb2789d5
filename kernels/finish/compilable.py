"""Decides, per node, if XLA can compile it and if it may be part of a compiled function."""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.util import pywrap_xla_ops  # the only list of what XLA can compile

from autodist.graph.editor import NodeDef
from autodist.graph.functions import called_by, functions_by_name
from autodist.graph.op_types import RESOURCE, VARIANT, is_stateless, types_of_inputs, types_of_outputs
from autodist.graph.ops import Trait, having, writes_rows

_DRAWS = Trait.SEEDED | Trait.GENERATOR
"""XLA ignores the generator state and the seeds: a seed would no longer determine the numbers."""

_CALLS = having(Trait.CALL | Trait.BRANCH | Trait.LOOP)
_NEVER_WAITS = having(_DRAWS | Trait.PRINTS | Trait.CHECKS | Trait.QUERY) | {"VarHandleOp"}

NOT_IN_XLA = "_autodist_not_in_xla"
"""An attribute of functions with a shape that depends on fed values, while XLA needs it at compile time."""

_STRING = tf.string.as_datatype_enum
"""XLA does not support strings."""


@functools.cache
def _known() -> frozenset[str]:
    """Returns the ops that XLA can compile on CPUs and GPUs and that compiled functions may contain."""
    every = frozenset(pywrap_xla_ops.get_cpu_kernel_names()) & frozenset(pywrap_xla_ops.get_gpu_kernel_names())
    rows = {op for op in every if writes_rows(op)}
    lists = {op for op in every if op.startswith(("Stack", "TensorArray", "_"))}
    return every - rows - lists - having(_DRAWS | Trait.NOT_IN_XLA)


class Compilable:
    """Decides, for the nodes of one graph, if XLA can compile them.

    Args:
        graph_def: the graph, for the functions that its nodes call.
        allows_loops: True if compiled loops may have variables and lists of tensors as inputs and outputs, in addition
            to plain tensors.
        allows_draws: True if XLA may draw random numbers from keys; it draws others.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef, allows_loops: bool, allows_draws: bool = True) -> None:
        self._refused_ops = frozenset() if allows_draws else having(Trait.BY_KEY | Trait.KEY)
        self._refused = frozenset({_STRING} if allows_loops else {_STRING, VARIANT})
        self._refused_of_loops = frozenset({_STRING} if allows_loops else {_STRING, VARIANT, RESOURCE})
        self._functions = functions_by_name(graph_def.library)
        self._answers: dict[str, bool] = {}
        self._waits: dict[str, bool] = {}

    def can_compile(self, node: NodeDef) -> bool:
        """Returns True if XLA can compile a node, provided that its resource inputs are handles of variables."""
        if node.op not in _known() or node.op in self._refused_ops:
            return False
        if node.op in _CALLS:
            bodies = all(map(self._is_compilable_body, called_by(node)))
            return bodies and self._refused_of_loops.isdisjoint((*types_of_inputs(node), *types_of_outputs(node)))
        outputs = (self._refused | {RESOURCE}).isdisjoint(types_of_outputs(node))
        return outputs and self._refused.isdisjoint(types_of_inputs(node))

    def _is_compilable_body(self, name: str) -> bool:
        if name not in self._answers:
            body = self._functions[name]
            takes = {argument.type for argument in body.signature.input_arg}
            self._answers[name] = (
                NOT_IN_XLA not in body.attr
                and self._refused_of_loops.isdisjoint(takes)
                and all(_passes_on(n) or self.can_compile(n) for n in body.node_def)
            )
        return self._answers[name]

    def may_wait(self, node: NodeDef) -> bool:
        """Returns True if a node may wait for an event outside this graph, such as a message from another worker."""
        if node.op in _NEVER_WAITS or _touches_a_variable(node.op):
            return False
        bodies = called_by(node)
        if bodies:
            return any(map(self._body_may_wait, bodies))
        return not is_stateless(node.op)

    def _body_may_wait(self, name: str) -> bool:
        if name not in self._waits:
            self._waits[name] = any(map(self.may_wait, self._functions[name].node_def))
        return self._waits[name]


def _passes_on(node: NodeDef) -> bool:
    return node.op == "Identity" and node.attr["T"].type == RESOURCE


def _touches_a_variable(op: str) -> bool:
    return op.endswith("VariableOp") or op.startswith(("ResourceApply", "ResourceGather")) or writes_rows(op)
