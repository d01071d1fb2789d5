"""Steps that can be measured: their effects outside of copies, their batch and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autodist.batch.examples import Share, part_lengths, rows_of
from autodist.capture.graphs import bodies_of
from autodist.graph.activations import activation_bytes
from autodist.graph.flops import with_inferred_shapes
from autodist.graph.names import node_of
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, draws_numbers, having
from autodist.graph.step import CapturedStep
from autodist.logs.formatting import readable_bytes

Batch = Mapping[str, np.ndarray]
"""The values of a step's inputs, by name."""


class CannotMeasure(Exception):
    """Raised if a step cannot be measured; the argument is the reason. Use `estimate_step` instead."""


_OF_VARIABLES = having(Trait.SOURCE | Trait.READ | Trait.ASSIGNMENT | Trait.QUERY) | {"DisableCopyOnRead"}
_DRAWS = having(Trait.SEEDED | Trait.GENERATOR)
_CALLS = having(Trait.CALL | Trait.BRANCH | Trait.LOOP)
_CHECKS = having(Trait.CHECKS) - {"Print"} | {"Assert"}
_OF_FIRST_LOOPS = having(Trait.ENTER | Trait.STACK)
LOOPS = having(Trait.LOOP)


def require_measurable(step: CapturedStep) -> None:
    """Checks that a step runs as a whole, and that a run on copies of its variables has no other effects.

    Raises:
        CannotMeasure: it does not, or it may have.
    """
    if not step.gradients:
        raise CannotMeasure("the step trains no variable")
    if not (step.targets or step.outputs):
        raise CannotMeasure("it is not known which parts of the session's graph will run")
    node_with = {node.op: node.name for nodes in bodies_of(step.graph_def) for node in nodes}
    functions = {function.signature.name for function in step.graph_def.library.function}
    for op, name in node_with.items():
        fault = None if op in functions else _fault_of(op)
        if fault is not None:
            raise CannotMeasure(f"{name} ({op}) {fault}")


def _fault_of(op: str) -> str | None:
    """Returns the reason why an op must not run in a measurement; None if it may."""
    if "PyFunc" in op:
        return "calls a Python function of the script"
    if op in _OF_FIRST_LOOPS:
        return "belongs to a loop of TensorFlow 1, which may wait for itself"
    is_known = op in _OF_VARIABLES | _DRAWS | _CALLS | _CHECKS or is_stateless(op)
    if is_known or _updates_variable(op) or draws_numbers(op) or op.startswith("CudnnRNN"):
        return None
    return "may have effects outside of the step, or state that a copy of the step does not have"


def _updates_variable(op: str) -> bool:
    return op.startswith(("ResourceApply", "ResourceSparseApply", "ResourceScatter", "ResourceStridedSlice"))


def first_part(step: CapturedStep, batch: Mapping[str, Any], parts: int) -> Batch:
    """Returns the first of several parts of a batch, each input divided along its batch axis.

    Raises:
        CannotMeasure: there are no parts, or the step was captured for another number of examples.
    """
    if not parts:
        raise CannotMeasure("the worker has no replicas")
    found = {}
    for name, axis in step.inputs.items():
        spec = step.spec_of(name)
        value = np.asarray(batch[name], spec.dtype.as_numpy_dtype)
        if axis is not None:
            value = rows_of(value, axis, Share(0, part_lengths(value.shape[axis], parts)[0]))
        if not spec.shape.is_compatible_with(value.shape):
            raise CannotMeasure(f"{name} has the shape {spec.shape}, and a replica's part of the batch {value.shape}")
        found[name] = value
    return found


def half_of(step: CapturedStep, batch: Batch) -> Batch | None:
    """Returns half of the examples of a batch; None if there is one only, or the step accepts no other number.

    Not for steps that XLA compiles: it would compile them again, which takes longer than all steps.
    """
    try:
        half = first_part(step, batch, 2)
    except CannotMeasure:
        return None
    return half if count_examples(step, half) < count_examples(step, batch) else None


def count_examples(step: CapturedStep, batch: Batch) -> int:
    """Returns the number of rows of the first input with a batch axis; 0 if there is none."""
    return next((batch[name].shape[axis] for name, axis in step.inputs.items() if axis is not None), 0)


def require_memory(step: CapturedStep, batch: Batch, available: int) -> None:
    """Checks that the script's variables, copies of them, and the activations of one replica fit into the memory.

    Raises:
        CannotMeasure: they do not.
    """
    gradients = sorted({node_of(t) for gradient in step.gradients for t in gradient.tensors})
    inferred = with_inferred_shapes(step, gradients, {name: value.shape for name, value in batch.items()})
    needed = 2 * sum(variable.byte_size for variable in step.variables) + activation_bytes(step, inferred).count
    if 0 < available < needed:
        raise CannotMeasure(
            f"copies of the variables and the activations need {readable_bytes(needed)} of memory, and the worker has "
            f"{readable_bytes(available)}"
        )
