"""Replaces writes of rows of state variables by writes of whole values, which replicas can combine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import SUMS, UPDATE
from autodist.graph.read_again import writes_read_again
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.replica_dependent import find_replica_dependent, sources_of
from autodist.layout import Mean, Propagation, Replicated, Sum, Unknown

_SUMS = {op: kind.assign for kind in SUMS for op in (kind.scatter, kind.scatter_nd)}
_UPDATES = (UPDATE.scatter, UPDATE.scatter_nd)
_BY_POSITION = tuple(kind.scatter_nd for kind in (*SUMS, UPDATE))
"""Scatters whose indices are positions along the first axes; those of the others are indices of rows."""


@dataclass(frozen=True)
class AssignScatteredState(Kernel[CapturedStep, CapturedStep]):
    """Replaces scatters into state by assignments if their indices or rows differ between replicas.

        counts.scatter_add(classes, ones)    becomes    counts.assign_add(scatter_nd(classes, ones, shape))
        queue.scatter_update(places, rows)   becomes    queue.assign(tensor_scatter_nd_update(queue, places, rows))

    `scatter_nd_add` and the like become the same, with their positions.

    A scatter stays, and is refused later, if the value for the whole batch is not known: examples may update the same
    row. It also stays if the loss reads the new value, which would differ between replicas.
    """

    name: ClassVar[str] = "assign-scattered-state"
    after: ClassVar[Mapping[str, str]] = {
        "inline-branches": "it takes scatters out of branches",
        "reduce-before-postprocessing": "until then, updates by postprocessed gradients look like writes of state",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        scatters = {node.name for op in (*_SUMS, *_UPDATES) for node in step.graph_index.of_op(op)}
        if context.single_replica or not scatters:
            return step
        stages = find_stages(step)
        scatters &= set(stages.state_writes) & find_replica_dependent(step, sources_of(step, (), ()), stages)
        scatters = {name for name in scatters if _fits(step, step.graph_index.nodes[name])}
        if not scatters:
            return step
        changed, values = _assigned(step, scatters)
        flows = flows_of(changed)
        refused = {name for name, value in values.items() if not _is_known(flows, step.graph_index.nodes[name], value)}
        refused |= scatters.intersection(writes_read_again(changed, flows))
        return _assigned(step, scatters - refused)[0] if refused else changed


def _fits(step: CapturedStep, node: NodeDef) -> bool:
    """Returns True if each index has a row of its own, and the variable's shape is known."""
    variable = step.by_handle.get(node.input[0])
    if variable is None or not tf.TensorShape(variable.shape).is_fully_defined():
        return False
    indices, rows = (step.spec_of(tensor(name)).shape for name in node.input[1:3])
    if not indices.rank or node.op not in _BY_POSITION:
        return indices.rank is not None and rows.rank == indices.rank + len(variable.shape) - 1
    return indices[-1] is not None and rows.rank == indices.rank - 1 + len(variable.shape) - indices[-1]


def _is_known(flows: Propagation, scatter: NodeDef, value: str) -> bool:
    """Returns True if the value for the whole batch is known, or follows from statistics of it."""
    at, rows = (flows.kind(tensor(name)) for name in scatter.input[1:3])
    follows = isinstance(at, Replicated) and isinstance(rows, Mean | Sum)
    return follows or not isinstance(flows.kind(value), Unknown)


def _assigned(step: CapturedStep, scatters: Iterable[str]) -> tuple[CapturedStep, dict[str, str]]:
    """Returns the step with assignments in place of the scatters, and the assigned values by the scatter's name."""
    editor = StepEditor(step)
    values = {name: _assign(editor, step, name) for name in sorted(scatters)}
    return editor.to_step(), values


def _assign(editor: StepEditor[CapturedStep], step: CapturedStep, name: str) -> str:
    node = editor[name]
    handle, indices, rows = node.input[:3]
    control = [i for i in node.input if is_control(i)]
    variable = step.by_handle[handle]
    with editor.subgraph(f"scattered/{name}") as f:
        at, new = f.input(indices), f.input(rows)
        at = at if node.op in _BY_POSITION else at[..., tf.newaxis]
        if node.op in _UPDATES:
            with tf.control_dependencies([f.after(map(node_of, control))]):
                whole = tf.raw_ops.ReadVariableOp(resource=f.input(handle, tf.resource), dtype=variable.dtype)
            whole.set_shape(variable.shape)
            value = tf.tensor_scatter_nd_update(whole, at, new)
        else:
            value = tf.scatter_nd(at, new, tf.constant(variable.shape, at.dtype))
    made = f.name(value)
    node.op = _SUMS.get(node.op, "AssignVariableOp")
    node.attr.clear()
    node.attr["dtype"].type = variable.dtype.as_datatype_enum
    editor.set_inputs(name, [handle, made, *control])
    return made
