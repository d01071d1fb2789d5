"""Repeats a step in one call of a session, each time on the next batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist.graph.ops import Trait, having
from autodist.graph.walks import reach
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.runnable import Runnable

_NOT_COPYABLE = having(Trait.SEEDED)
"""Ops whose random state TensorFlow keeps with the node: a copy of the node would start again from the seed."""


@dataclass(frozen=True)
class StepTensors:
    """The tensors and operations of a step in a session's graph.

    Attributes:
        outputs: tensors that the step returns.
        operations: additional targets.
        batch: tensors that are fed with a new value in each step.
        alike: tensors that are fed with the same value in all steps.
        counts_examples: True if the last output is the number of examples, which must be positive in all steps.
    """

    outputs: Sequence[tf.Tensor]
    operations: Sequence[tf.Operation]
    batch: Sequence[tf.Tensor]
    alike: Sequence[tf.Tensor]
    counts_examples: bool


def can_repeat(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Returns True if a step does the same in a loop as in separate calls, as far as its ops show."""
    ops = {node.op for node in graph_def.node}
    ops |= {node.op for function in graph_def.library.function for node in function.node_def}
    moves = any(op.startswith(("Collective", "Nccl")) for op in ops)
    return not moves and not (ops & _NOT_COPYABLE) and tf.compat.v1.control_flow_v2_enabled()


def repeated(graph_runner: GraphRunner, step: StepTensors, times: int) -> Runnable:
    """Returns a run that makes several steps one after the other.

    Returns:
        A run. Its feeds are `times` values for each tensor of `batch`, step by step, then one for each of
        `alike`. It returns the outputs of the last step; for the number of examples, the minimum of all steps.
    """
    body = _body(graph_runner, step)
    used = {name if ":" in name else f"{name}:0" for node in body.node for name in node.input}
    with graph_runner.graph.as_default():
        fed = [_like(tensor) for _ in range(times) for tensor in step.batch]
        rows = [_array_of(fed[k :: len(step.batch)]) for k in range(len(step.batch))]
        same = [_like(tensor) for tensor in step.alike]

        def once(number: tf.Tensor, *before: tf.Tensor) -> Sequence[tf.Tensor]:
            given = {tensor.name: values.read(number) for tensor, values in zip(step.batch, rows, strict=True)}
            given |= {tensor.name: tf.identity(value) for tensor, value in zip(step.alike, same, strict=True)}
            given = {name: value for name, value in given.items() if name in used}
            wanted = [*(t.name for t in step.outputs), *(op.name for op in step.operations)]
            elements = tf.import_graph_def(body, input_map=given, return_elements=wanted, name="repeated")
            outputs = elements[: len(step.outputs)]
            if step.counts_examples:
                outputs[-1] = tf.minimum(outputs[-1], before[-1])
            with tf.control_dependencies(elements[len(step.outputs) :]):
                return (number + 1, *(tf.identity(output) for output in outputs))

        first: list[Any] = [_initial(output) for output in step.outputs]
        if step.counts_examples:
            first[-1] = tf.fill(tf.shape(first[-1]), step.outputs[-1].dtype.max)
        made, *outputs = tf.while_loop(
            lambda number, *_: number < times,
            once,
            [tf.constant(0), *first],
            shape_invariants=[tf.TensorShape([]), *(output.shape for output in step.outputs)],
            parallel_iterations=1,
        )
    return Runnable(graph_runner, outputs, [made.op], [tensor.name for tensor in (*fed, *same)])


def _body(graph_runner: GraphRunner, step: StepTensors) -> tf.compat.v1.GraphDef:
    """Returns the step's nodes, without those that are fed."""
    fed = {tensor.op for tensor in (*step.batch, *step.alike)}
    graph_runner.graph.make_operations()
    results = [*(output.op for output in step.outputs), *step.operations]
    needed = reach(results, lambda op: () if op in fed else [*(t.op for t in op.inputs), *op.control_inputs]) - fed
    graph_def = graph_runner.graph.as_graph_def()
    names = {operation.name for operation in needed}
    body = tf.compat.v1.GraphDef(library=graph_def.library, versions=graph_def.versions)
    body.node.extend(node for node in graph_def.node if node.name in names)
    for node in body.node:
        node.attr.pop("_class", None)  # each node has its own device
        inputs = [name for name in node.input if not name.startswith("^") or name[1:] in names]
        node.input[:] = inputs  # a control edge from a fed node has no effect
    return body


def _like(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)


def _array_of(values: Sequence[tf.Tensor]) -> tf.TensorArray:
    """Returns an array of values from which each step reads its own, without a copy."""
    with tf.device(values[0].device):
        array = tf.TensorArray(
            values[0].dtype, len(values), infer_shape=False, element_shape=values[0].shape, clear_after_read=False
        )
        for k, value in enumerate(values):
            array = array.write(k, value)
    return array


def _initial(output: tf.Tensor) -> tf.Tensor:
    """Returns the loop's initial value for an output: a tensor without rows."""
    shape = output.shape
    with tf.device(output.device):
        return tf.zeros([] if shape.rank is None else [n or 0 for n in shape.as_list()], output.dtype)
