"""Effects that prevent computing both branches of a conditional."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tensorflow.core.framework.function_pb2 import FunctionDef

from autodist.graph.functions import branches_of
from autodist.graph.op_types import NodeDef, is_stateless

_Functions = Mapping[str, FunctionDef]


def nodes_in_branches(node: NodeDef, functions: _Functions) -> Iterator[NodeDef]:
    """Yields the nodes in the branches of an `If`, and in those of each `If` in them; `functions` are by name."""
    for branch in branches_of(node):
        for inner in functions[branch].node_def:
            yield inner
            if inner.op == "If":
                yield from nodes_in_branches(inner, functions)


def first_effect(node: NodeDef, functions: _Functions, is_allowed: Callable[[NodeDef], bool]) -> NodeDef | None:
    """Returns the first node in the branches of an `If` that has an effect which is not allowed; None if none has.

    Args:
        node: the `If`.
        functions: the functions of its graph, by name.
        is_allowed: returns True for a stateful node that may run in both branches, such as a read of a variable.
    """
    for inner in nodes_in_branches(node, functions):
        if inner.op != "If" and not is_stateless(inner.op) and not is_allowed(inner):
            return inner
    return None
