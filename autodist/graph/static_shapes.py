"""Static shapes of a step in which the length of the batch stands for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist.graph.imported import ImportedGraph
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.step import CapturedStep
from autodist.layout.folding import Constants

_LENGTHS = (999_983, 999_979, 999_961, 999_959)
"""Primes that stand for the lengths of batches: no length of a model is a multiple of one."""


class StaticShapes:
    """Shapes that TensorFlow infers if the open length of a batch is a large prime number.

    The lengths of a batch are then known numbers, so shapes that the step computes from other shapes are known, too. A
    length that is a multiple of such a prime depends on the batch.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self._nodes = step.graph_index.nodes
        self._inferred: dict[str, list[tf.TensorShape]] = self._infer()
        self._constants = _Constants(lambda name: self._nodes.get(node_of(name)), self.shape)

    def shape(self, name: str) -> tf.TensorShape:
        """Returns the shape of a tensor, with a prime for the length of the batch."""
        known = self._inferred.get(node_of(name))
        return known[output_index(name)] if known is not None else self._step.spec_of(name).shape

    def lengths(self, name: str) -> tuple[int | None, ...] | None:
        """Returns the lengths of a tensor, None for those that depend on the batch; None if its rank is unknown."""
        shape = self.shape(name)
        return None if shape.rank is None else tuple(None if is_open(n) else n for n in shape.as_list())

    def constant(self, name: str) -> np.ndarray | None:
        """Returns the value of a tensor that is computed from constants and shapes only."""
        return self._constants.value(tensor(name))

    def broadcast_axes(self, node: tf.compat.v1.NodeDef) -> Sequence[set[int]] | None:
        """Returns the results of a BroadcastGradientArgs: the axes along which each of two shapes is repeated."""
        shapes = [shape for i in node.input[:2] if (shape := self.constant(i)) is not None]
        if len(shapes) < 2:
            return None
        rank = max(map(len, shapes))
        padded = [[1] * (rank - len(shape)) + [int(n) for n in shape] for shape in shapes]
        return [
            {k for k in range(rank) if k < rank - len(shape) or (own[k] == 1 and other[k] != 1)}
            for shape, own, other in zip(shapes, padded, reversed(padded), strict=True)
        ]

    def _infer(self) -> dict[str, list[tf.TensorShape]]:
        definition = tf.compat.v1.GraphDef()
        definition.CopyFrom(self._step.graph_def)
        primes = dict(self._open_inputs())
        for node in definition.node:
            node.device = ""
            for attribute in ("_class", "_output_shapes"):
                node.attr.pop(attribute, None)
            if node.name in primes:
                axis, prime = primes[node.name]
                lengths = self._step.spec_of(node.name).shape.as_list()
                lengths[axis] = prime
                node.attr["shape"].shape.CopyFrom(tf.TensorShape(lengths).as_proto())
        graph = ImportedGraph()
        try:
            graph.import_nodes(definition)
        except ValueError:  # a shape that the step requires does not fit such a batch
            return {}
        graph.make_operations()
        return {op.name: [output.shape for output in op.outputs] for op in graph.get_operations()}

    def _open_inputs(self) -> Mapping[str, tuple[int, int]]:
        """The axis and the prime of each placeholder whose batch has an open length."""
        found: dict[str, tuple[int, int]] = {}
        counts: dict[str, int] = {}
        for name, axis in self._step.batch_axes.items():
            spec = self._step.spec_of(name)
            if spec.shape.rank is None or spec.shape[axis] is not None:
                continue
            of = self._step.apart.get(name, "")
            prime = _LENGTHS[counts.setdefault(of, len(counts)) % len(_LENGTHS)]
            if self._nodes[node_of(name)].op == "Placeholder":
                found[node_of(name)] = axis, prime
        return found


def is_open(length: int | None) -> bool:
    """Returns True if a length depends on the batch or is unknown."""
    return length is None or (length > 0 and any(length % prime == 0 for prime in _LENGTHS))


class _Constants(Constants):
    """Constants, with the ops by which gradients undo a broadcast."""

    def _compute(self, node: tf.compat.v1.NodeDef, depth: int) -> np.ndarray | None:
        found = super()._compute(node, depth)
        if found is not None or node.op not in ("StridedSlice", "GatherV2"):
            return found
        inputs = [i for i in node.input if not is_control(i)]
        values = [value for i in inputs if (value := self.value(i, depth + 1)) is not None]
        if len(values) < len(inputs) or values[0].ndim != 1:
            return None
        if node.op == "GatherV2":
            return np.asarray(values[0][values[1]]) if values[2] == 0 else None
        return _slice(node, *values)


def _slice(
    node: tf.compat.v1.NodeDef, x: np.ndarray, begin: np.ndarray, end: np.ndarray, strides: np.ndarray
) -> np.ndarray | None:
    if len(begin) != 1 or any(node.attr[f"{mask}_mask"].i for mask in ("ellipsis", "new_axis", "shrink_axis")):
        return None
    first = None if node.attr["begin_mask"].i else int(begin[0])
    last = None if node.attr["end_mask"].i else int(end[0])
    return x[slice(first, last, int(strides[0]))]
