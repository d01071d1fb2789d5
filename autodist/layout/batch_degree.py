"""Batch degree: the power of the batch size with which a tensor of unknown kind grows, derived from its ops.

It decides if the parts of the replicas are averaged or summed. If each example occurs twice, a loss keeps its value and
a sum over rows doubles.
"""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.layout import Propagation, Sum, Unknown

_DEEPEST = 50


class BatchDegree:
    """Computes the batch degree of the tensors of one captured step.

    Args:
        step: the step.
        flows: the dependence of its tensors on the batch.
    """

    def __init__(self, step: CapturedStep, flows: Propagation) -> None:
        self._step, self._flows = step, flows

    def of(self, name: str, depth: int = 0) -> int | None:
        """Returns the power of the number of examples with which a tensor grows: 0 for an average, 1 for a sum.

        Args:
            name: of the tensor.
            depth: number of ops followed so far.

        Returns:
            None if the ops do not determine it.
        """
        kind = self._flows.kind(name)
        if not isinstance(kind, Unknown):
            return int(isinstance(kind, Sum))
        node = self._step.graph_index.nodes[node_of(name)]
        inputs = data_inputs(node)
        return self._by_op(node, name, inputs, depth + 1) if depth < _DEEPEST else None

    def _by_op(self, node: NodeDef, name: str, inputs: list[str], depth: int) -> int | None:
        match node.op:
            case op if op in having(Trait.MEASURES):
                return self.of(inputs[0], depth)
            case "Sum":
                return _plus(self.of(inputs[0], depth), self._axes_reduced(inputs))
            case "L2Loss":
                inner = self.of(inputs[0], depth)
                return _plus(inner, inner, self._open_axes(inputs[0]))
            case "Square":
                return _plus(*[self.of(inputs[0], depth)] * 2)
            case op if op in having(Trait.PRODUCT):
                return _plus(*[self.of(i, depth) for i in inputs])
            case op if op in having(Trait.QUOTIENT):
                above, below = (self.of(i, depth) for i in inputs)
                return None if above is None or below is None else above - below
            case op if op in having(Trait.LEVELS):
                return self._alike(inputs[1:] if op.startswith("Select") else inputs, depth)
            case "Size":
                return self._open_axes(inputs[0])
            case "StridedSlice" if self._step.graph_index.nodes[node_of(inputs[0])].op == "Shape":
                return self._length(inputs)
            case "Softmax" if self._is_open(name, -1):  # its rows add up to 1
                return -1
            case "Prod":
                return self._product_of_lengths(inputs[0], depth)
        return self._otherwise(name, inputs, depth)

    def _alike(self, operands: list[str], depth: int) -> int | None:
        """Returns the common degree of the operands; constants, such as a smallest divisor, are ignored."""
        degrees = {self.of(i, depth) for i in operands if self._step.graph_index.nodes[node_of(i)].op != "Const"}
        return next(iter(degrees)) if len(degrees) == 1 else None

    def _otherwise(self, name: str, inputs: list[str], depth: int) -> int | None:
        """Returns 0 for rows (the batch axis stays open) and for ops on averages that reduce no open axis."""
        if self._open_axes(name):
            return 0
        if any(self._open_axes(i) != 0 for i in inputs):
            return None
        return 0 if all(self.of(i, depth) == 0 for i in inputs) else None

    # -- lengths ---------------------------------------------------------------------------------------------------

    def _open_axes(self, name: str) -> int | None:
        shape = self._step.spec_of(name).shape
        return None if shape.rank is None else sum(length is None for length in shape.as_list())

    def _is_open(self, name: str, axis: int) -> bool:
        shape = self._step.spec_of(name).shape
        return bool(shape.rank) and shape[axis] is None

    def _axes_reduced(self, inputs: list[str]) -> int | None:
        """Returns the number of open axes that a reduction removes."""
        shape, axes = self._step.spec_of(inputs[0]).shape, self._constant(inputs[1])
        if shape.rank is None:
            return None
        if axes is None:  # for example `range(rank(x))`: all of them
            return self._open_axes(inputs[0])
        return sum(shape[axis % shape.rank] is None for axis in axes) if shape.rank else 0

    def _length(self, inputs: list[str]) -> int | None:
        """Returns the degree of one element of a shape."""
        source = self._step.graph_index.nodes[node_of(inputs[0])]
        indices = self._constant(inputs[1])
        if source.op != "Shape" or indices is None or len(indices) != 1:
            return None
        shape = self._step.spec_of(tensor(source.input[0])).shape
        return int(shape[indices[0]] is None) if shape.rank else None

    def _product_of_lengths(self, name: str, depth: int) -> int | None:
        source = self._step.graph_index.nodes[node_of(name)]
        if source.op == "Shape":
            return self._open_axes(tensor(source.input[0]))
        if source.op == "Pack":
            return _plus(*[self.of(name, depth) for name in data_inputs(source)])
        passes = source.op in having(Trait.IDENTITY | Trait.CASTS)
        return self._product_of_lengths(tensor(source.input[0]), depth) if passes else None

    def _constant(self, name: str) -> list[int] | None:
        node = self._step.graph_index.nodes[node_of(name)]
        return tf.make_ndarray(node.attr["value"].tensor).reshape(-1).tolist() if node.op == "Const" else None


def _plus(*powers: int | None) -> int | None:
    known = [power for power in powers if power is not None]
    return sum(known) if len(known) == len(powers) else None
