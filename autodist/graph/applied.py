"""Variables that a gradient updates: those written with a tensor derived from it by shape-preserving arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist.graph.find_stages import find_stages
from autodist.graph.names import data_inputs, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable, VariableGradient
from autodist.graph.stages import Stages
from autodist.graph.step import CapturedStep

_PASSING = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS)


@dataclass(frozen=True)
class Application:
    """A write of a variable that a tensor of its shape reaches.

    Attributes:
        variable: the written variable.
        is_plain: True if the variable is assigned the tensor without arithmetic in between.
    """

    variable: Variable
    is_plain: bool


def find_applied(step: CapturedStep, stages: Stages) -> tuple[VariableGradient, ...]:
    """Returns the gradients of a step, each with the variable that it updates.

    That is its own variable, or another network's if the gradient reaches no write of its own: the workers of A3C
    differentiate with respect to a network of their own and apply the result to a global one.
    """
    return tuple(
        replace(g, variable=_applied_to(step, stages, g)) if k in stages.unapplied_gradients else g
        for k, g in enumerate(stages.gradients)
    )


def _applied_to(step: CapturedStep, stages: Stages, gradient: VariableGradient) -> str:
    """Returns the trained variable that is written last, after its slots; if none, the gradient's own variable.

    None is written if, say, the gradient is accumulated for another run.
    """
    shape = step.by_name[gradient.variable].shape
    written = [a.variable for a in _applications(step, stages, gradient.tensors[-1])]
    trained = [v.name for v in written if v.trainable and v.shape == shape]
    return trained[-1] if trained else gradient.variable


def find_fed_updates(step: CapturedStep) -> dict[str, Variable]:
    """Maps placeholders that update trained variables like gradients to these variables."""
    placeholders = step.graph_index.of_op("Placeholder")
    if not placeholders or not any(effect.writes for effect in step.graph_index.effects.values()):
        return {}
    stages = find_stages(step)
    result = {}
    for node in placeholders:
        name = f"{node.name}:0"
        shape = step.spec_of(name).shape
        if shape.rank == 0:
            continue
        for applied in _applications(step, stages, name):
            if applied.variable.trainable and shape.is_compatible_with(applied.variable.shape) and not applied.is_plain:
                result[name] = applied.variable
    return result


def _applications(step: CapturedStep, stages: Stages, name: str) -> list[Application]:
    """Returns the writes that a tensor reaches by way of tensors of its shape, in the order of the writes.

    Writes inside functions are ignored: the analysis does not resolve which variable a function writes.
    """
    shape = step.spec_of(name).shape
    applications: dict[str, Application] = {}
    is_plain = {name: True}
    front = [name]
    while front:
        made = front.pop()
        for reader in _readers(step, made):
            effect = stages.effects.get(reader.name)
            handle = node_of(reader.input[0])  # the first input of an update op; slots come after it
            onward: list[str] = []
            if effect is None or not effect.writes:
                onward = _outputs(step, reader.name)
            elif handle in effect.writes:
                passes = is_plain[made] and reader.op == "AssignVariableOp"
                applications[reader.name] = Application(step.by_handle[handle], passes)
                onward = _read_after(step, stages, reader.name, handle)
            for t in onward:
                if t not in is_plain and shape.is_compatible_with(step.spec_of(t).shape):
                    is_plain[t] = is_plain[made] and reader.op in _PASSING
                    front.append(t)
    return [applications[write] for write in sorted(applications, key=stages.order.__getitem__)]


def _readers(step: CapturedStep, name: str) -> Iterator[tf.compat.v1.NodeDef]:
    for consumer in step.graph_index.consumers[node_of(name)]:
        node = step.graph_index.nodes[consumer]
        if name in data_inputs(node):
            yield node


def _outputs(step: CapturedStep, node: str) -> list[str]:
    """Returns the outputs of a node that are read."""
    read = (name for consumer in step.graph_index.consumers[node] for name in step.graph_index.inputs(consumer))
    return list(dict.fromkeys(name for name in read if node_of(name) == node))


def _read_after(step: CapturedStep, stages: Stages, write: str, handle: str) -> list[str]:
    """Returns the values read of a variable after a write."""
    readers = [r for r in stages.readers(handle) if write in stages.writes_before(r, handle) and r != write]
    return [
        t for reader in readers if step.graph_index.nodes[reader].op == "ReadVariableOp" for t in _outputs(step, reader)
    ]
