"""Infers the signs of tensor elements from the graph alone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import numpy as np

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import Effects, group_by_handle
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import SUM, Trait, having
from autodist.kernels.elementwise import constant
from autodist.kernels.rule import Facts


class Sign(enum.IntEnum):
    """A lower bound of all elements."""

    ANY = 0
    NOT_NEGATIVE = 1
    POSITIVE = 2


class Signs:
    """Computes signs for the graph of one editor, which must not change in the meantime.

    A variable is assumed to be non-negative if a step writes it and all its writes keep it so: a sum or an average of
    squares, which optimizers initialise with zero or more. NaN has no sign here and is assumed to be absent.
    """

    def __init__(self, editor: GraphEditor) -> None:
        self._editor = editor
        self._variables: dict[str, bool] = {}
        effects = Effects(editor.to_graph_def())
        self._writes = group_by_handle((node, effects.of(node).writes) for node in editor)
        self._handle_of = effects.handle_of

    def of(self, name: str) -> Sign:
        """Returns the sign of the tensor `name`."""
        node = self._editor[node_of(name)]
        inputs = [i for i in node.input if not is_control(i)]
        if node.op == "Const":
            return _sign_of_constant(constant(self._editor, name))
        if node.op == "Square" or (node.op == "Mul" and tensor(inputs[0]) == tensor(inputs[1])):
            return Sign.NOT_NEGATIVE
        if node.op == "ReadVariableOp":
            return Sign(self._stays_not_negative(self._handle_of(inputs[0])))
        if node.op == "Sqrt" or node.op in having(Trait.IDENTITY):
            return self.of(inputs[0])
        if node.op == "UnsortedSegmentSum":
            return min(self.of(inputs[0]), Sign.NOT_NEGATIVE)
        if node.op in _BINARY:
            one, other = self.of(inputs[0]), self.of(inputs[1])
            return _BINARY[node.op](one, other)
        return Sign.ANY

    def _stays_not_negative(self, handle: str | None) -> bool:
        if handle is None or handle not in self._writes:
            return False
        if handle in self._variables:
            return self._variables[handle]
        self._variables[handle] = True  # in case a write reads the variable
        keeps = all(self._keeps_sign(write) for write in self._writes[handle])
        if not keeps:  # conclusions from the assumption are dropped as well
            self._variables = {other: known for other, known in self._variables.items() if not known}
            self._variables[handle] = False
        return keeps

    def _keeps_sign(self, write: NodeDef) -> bool:
        written = {"AssignVariableOp": 1, SUM.assign: 1, SUM.scatter: 2}.get(write.op)
        return written is not None and self.of(write.input[written]) >= Sign.NOT_NEGATIVE


def signs_of(facts: Facts) -> Signs:
    """Returns the signs of the tensors of a step, for `Facts.once`."""
    return Signs(facts.editor)


def _sign_of_constant(value: np.ndarray | None) -> Sign:
    if value is None or not np.isrealobj(value) or not np.issubdtype(value.dtype, np.number):
        return Sign.ANY
    return Sign.POSITIVE if np.all(value > 0) else Sign(int(np.all(value >= 0)))


def _sum(one: Sign, other: Sign) -> Sign:
    return max(one, other) if min(one, other) >= Sign.NOT_NEGATIVE else Sign.ANY


def _product(one: Sign, other: Sign) -> Sign:
    """Returns at most NOT_NEGATIVE: a product of small numbers underflows to zero."""
    return min(one, other, Sign.NOT_NEGATIVE)


_BINARY: Mapping[str, Callable[[Sign, Sign], Sign]] = {
    **dict.fromkeys(having(Trait.ADDITION), _sum),
    "Maximum": max,
    "Minimum": min,
    "Mul": _product,
    "RealDiv": _product,
}
