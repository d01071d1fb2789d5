"""Merges the copies of constants that propagation has sharded alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autodist.graph.names import as_input, is_control, node_of, output_index, tensor
from autodist.graph.op_types import types_of_outputs
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.sharding import Annotations, Sharding


def merge_constants(step: CapturedStep, sharding_of: Callable[[str], Sharding | None]) -> CapturedStep:
    """Returns a step without the copies that `SplitConstants` made and that turned out equal to another one.

    Two copies of a node are equal if their results have the same shardings and their operands are the same or equal.

    Args:
        step: the step after propagation.
        sharding_of: returns the sharding of a tensor; None: it is whole.
    """
    annotations = step.annotations
    if annotations is None or not annotations.copies:
        return step
    merged = _equal_copies(step, annotations, sharding_of)
    if not merged:
        return step
    editor = StepEditor(step)
    for name, kept in merged.items():
        for k, _ in enumerate(types_of_outputs(editor[name])):
            editor.rewire(f"{name}:{k}", f"{kept}:{k}")
        editor.replace_control(name, [kept])
    editor.remove(merged)
    return editor.to_step(annotations=_without(annotations, merged))


def _equal_copies(
    step: CapturedStep, annotations: Annotations, sharding_of: Callable[[str], Sharding | None]
) -> dict[str, str]:
    """Maps each copy to the equal node that replaces it."""
    instances: dict[str, list[str]] = {}
    for copy, original in annotations.copies.items():
        if copy in step.graph_index.nodes:
            instances.setdefault(original, [original]).append(copy)
    merged: dict[str, str] = {}
    for original in step.graph_index.order:
        kept: dict[object, str] = {}
        for name in instances.get(original, ()):
            node = step.graph_index.nodes[name]
            results = [sharding_of(f"{name}:{k}") for k, _ in enumerate(types_of_outputs(node))]
            inputs = [i if is_control(i) else _renamed(i, merged) for i in node.input]
            found = kept.setdefault((node.op, tuple(inputs), tuple(results)), name)
            if found != name:
                merged[name] = found
    return merged


def _renamed(spelling: str, merged: Mapping[str, str]) -> str:
    return as_input(f"{merged.get(node_of(spelling), node_of(spelling))}:{output_index(spelling)}")


def _without(annotations: Annotations, gone: Mapping[str, str]) -> Annotations:
    """Returns the annotations without nodes that were merged into others."""
    lost = {tensor(name) for name in gone}
    groups = {
        number: replace(group, members=tuple(name for name in group.members if name not in lost))
        for number, group in annotations.groups.items()
    }
    regions = {name: replace(region, body=region.body.difference(gone)) for name, region in annotations.regions.items()}
    return replace(
        annotations,
        groups=groups,
        regions=regions,
        tensors={name: one for name, one in annotations.tensors.items() if node_of(name) not in gone},
        barriers=annotations.barriers.difference(gone),
        copies={name: original for name, original in annotations.copies.items() if name not in gone},
    )
