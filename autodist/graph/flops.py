"""Floating point operations of the nodes of a graph, by TensorFlow's own formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import tensorflow as tf
from tensorflow.python.framework import ops  # evaluates the formula of an operation
from tensorflow.python.profiler.internal import flops_registry  # noqa: F401  # the formulas, in being imported
from tensorflow.python.util import deprecation  # silences warnings about TensorFlow's own formulas

from autodist.graph.gradient_rows import with_shapes
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep

_CALLS = having(Trait.CALL | Trait.BRANCH | Trait.LOOP)


def with_inferred_shapes(
    step: CapturedStep, wanted: Sequence[str], shapes: Mapping[str, Sequence[int | None]]
) -> tf.Graph:
    """Returns a graph that computes some tensors from inputs of these shapes, with shapes inferred by TensorFlow."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(with_shapes(step, wanted, shapes), name="")
    return graph


def flops_of_nodes(graph: tf.Graph) -> dict[str, int | None]:
    """Returns the FLOPs of the nodes of a graph by name, forward and backward; omits nodes without a formula.

    The formulas are those of TensorFlow's profiler. It has none for Einsum, which counts two operations for each
    product of two elements. A node of a loop counts once.

    Returns:
        None for a node whose shape depends on values, or that calls a function: functions are not analysed.
    """
    with deprecation.silence():
        counted = {op.name: _of_node(graph, op) for op in graph.get_operations()}
    return {name: count for name, count in counted.items() if count != 0}


def _of_node(graph: tf.Graph, op: tf.Operation) -> int | None:
    if op.type == "Einsum":
        return _of_einsum(op)
    if op.type in _CALLS:
        return None
    try:
        return int(ops.get_stats_for_node_def(graph, op.node_def, "flops").value or 0)
    except ValueError:  # unknown shape
        if op.type == "Sum" and op.inputs[0].shape.is_fully_defined():
            return int(op.inputs[0].shape.num_elements())  # the axes are not known here: an upper bound
        return None


def _of_einsum(op: tf.Operation) -> int | None:
    """Returns two operations (product, sum) for each product of elements: the product of all labelled lengths."""
    if not all(operand.shape.is_fully_defined() for operand in op.inputs):
        return None
    terms = op.get_attr("equation").decode().partition("->")[0].split(",")
    lengths: dict[str, int] = {}
    for term, operand in zip(terms, op.inputs, strict=True):
        before, dots, after = term.partition("...")
        shape = operand.shape.as_list()
        end = len(shape) - len(after)
        named = [*zip(before, shape, strict=False), *zip(after, shape[end:], strict=True)]
        if dots:  # aligned from the right, as in broadcasting
            named += [(f".{k}", length) for k, length in enumerate(reversed(shape[len(before) : end]))]
        for label, length in named:
            lengths[label] = max(lengths.get(label, 1), length)
    return prod(lengths.values()) * (2 if len(terms) > 1 else 1)
