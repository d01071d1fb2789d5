"""Rematerialization: backward nodes read copies of forward nodes, which wait for a node of the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from autodist.graph.names import data_renamed, is_control, node_of, tensor
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor


def recompute(
    editor: StepEditor[Step],
    names: Sequence[str],
    readers: Collection[str],
    gates: Sequence[str],
    *,
    prefix: str = "",
    suffix: str = "",
    entries: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Makes backward nodes read copies of forward nodes, which run once the gates have run.

        in → f → g → out,  f, g → reader      becomes      in → f → g → out,  gate, in → f' → g',  f', g' → reader

    TensorFlow's executor runs each node as soon as its inputs exist. Without a gate, it would compute the copies during
    the forward pass and keep them. Copies that read no other copy wait for the gates. As each copy waits for the gates,
    or for copies that do, TensorFlow's optimizer does not merge it with its original.

    Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    Args:
        editor: of the step.
        names: the forward nodes.
        readers: the backward nodes.
        gates: nodes that do not depend on the readers.
        prefix: of the copies' names.
        suffix: of the copies' names.
        entries: maps tensors that the forward nodes read to nodes that return them after the gates; copies read these.

    Returns:
        The original of each copy.
    """
    copies = editor.clone(names, prefix, lambda i: i if is_control(i) else entries.get(tensor(i), i), suffix)
    late = {*copies.values(), *entries.values()}
    for copy in copies.values():
        inputs = [i for i in editor[copy].input if not is_control(i)]
        follows = any(node_of(i) in late for i in inputs)
        editor.set_inputs(copy, inputs if follows else [*inputs, *(f"^{gate}" for gate in gates)])
    for reader in readers:
        editor.set_inputs(reader, data_renamed(editor[reader].input, copies))
    return {copy: name for name, copy in copies.items()}
