"""Separates calls of one function whose arguments have different shardings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from autodist.graph.editor import NodeDef
from autodist.graph.functions import functions_by_name
from autodist.graph.names import data_inputs, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.shard.annotated import sharding_of
from autodist.sharding import Annotations, Constraint

Requested = list[Constraint | None]

_BRANCHES = having(Trait.BRANCH)


def separate_calls(step: CapturedStep) -> CapturedStep:
    """Returns a step in which two calls share a function only if no argument is sharded differently.

    Another call gets a copy of the function.
    """
    annotations = step.annotations
    assert annotations is not None
    sharings: dict[str, list[tuple[str, Requested]]] = {}
    editor = StepEditor(step)
    is_changed = False
    for node in step.graph_index.having(Trait.CALL | Trait.BRANCH | Trait.LOOP):
        requested = _requested(step, annotations, node)
        for called in _functions(editor[node.name]):
            known = sharings.setdefault(called.name, [])
            fitting = next((one for one in known if _agree(one[1], requested)), None)
            if fitting is None:
                fitting = (called.name if not known else _copy(editor, called.name, len(known)), requested)
                known.append(fitting)
            fitting[1][:] = [one or other for one, other in zip(fitting[1], requested, strict=True)]
            if called.name != fitting[0]:
                called.name = fitting[0]
                is_changed = True
    return editor.to_step() if is_changed else step


def _functions(node: NodeDef) -> Iterator[Any]:
    """Yields the attributes of a node that name the functions that it calls."""
    for _, value in sorted(node.attr.items()):
        yield from [value.func] if value.HasField("func") else value.list.func


def _requested(step: CapturedStep, annotations: Annotations, node: NodeDef) -> Requested:
    """Returns the requested sharding of each argument."""
    arguments = data_inputs(node)[1 if node.op in _BRANCHES else 0 :]
    return [sharding_of(annotations, name) or _of_read(step, annotations, name) for name in arguments]


def _of_read(step: CapturedStep, annotations: Annotations, name: str) -> Constraint | None:
    """Returns the requested sharding of the variable whose value a tensor is."""
    node = step.graph_index.nodes[node_of(name)]
    variable = step.by_handle.get(node.input[0]) if node.op == "ReadVariableOp" else None
    return annotations.variables.get(variable.name) if variable else None


def _agree(one: Requested, other: Requested) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is None or b is None or a.sharding == b.sharding for a, b in pairs)


def _copy(editor: StepEditor[CapturedStep], function: str, number: int) -> str:
    """Adds a copy of a function to the library; returns its name."""
    definition = copy.deepcopy(functions_by_name(editor.library)[function])
    definition.signature.name = f"{function}_separate_{number}"
    editor.library.function.append(definition)
    return definition.signature.name
