"""Lookups in the annotations of a step that several passes share."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.names import node_of, tensor
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.sharding import Annotations, Constraint


def annotated(step: CapturedStep) -> Annotations | None:
    """Returns the annotations of a step; None if the script and the strategy request no sharding."""
    found = step.annotations
    return found if found is not None and (found.regions or any(found.requests())) else None


def with_annotations(step: CapturedStep, annotations: Annotations) -> CapturedStep:
    """Returns a step with other annotations; the same object if they are equal."""
    return step if annotations == step.annotations else replace(step, annotations=annotations)


def sharding_of(annotations: Annotations, tensor: str) -> Constraint | None:
    """Returns the requested sharding of a tensor; None if it has none of its own. That of its edge does not count."""
    constraint = annotations.constraints.get(node_of(tensor)) if tensor.endswith(":0") else None
    return constraint or annotations.tensors.get(tensor)


def put_identity(editor: StepEditor[CapturedStep], name: str, node: str) -> None:
    """Puts an Identity, on which a constraint may stand, between a tensor and the nodes that read it."""
    spec = editor.spec(name)
    readers = sorted(editor.consumers(node_of(name)))
    editor.add_op("Identity", node, [name], spec.dtype)
    editor.rewire(name, tensor(node), readers)
    editor.note({tensor(node): spec})
