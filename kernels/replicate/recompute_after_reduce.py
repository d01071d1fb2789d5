"""Recomputes a value from tensors that have been reduced over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autodist.graph.editor import GraphEditor
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import draws_numbers
from autodist.graph.step import CapturedStep
from autodist.layout import Kind, Replicated, Unknown


@dataclass(frozen=True)
class RecomputedValue:
    """The computation of a tensor, from tensors that differ between replicas.

    Attributes:
        wholes: tensors whose value for the whole batch is known.
        between: the nodes that compute the tensor from them.
    """

    wholes: tuple[str, ...]
    between: tuple[str, ...]


def find_recomputed(
    step: CapturedStep, name: str, kind_of: Callable[[str], Kind], is_whole: Callable[[str, Kind], bool | None]
) -> RecomputedValue | None:
    """Returns the computation of a captured tensor; None if an input's value for the whole batch is not known.

    Args:
        step: the captured step.
        name: of the tensor, of unknown kind itself.
        kind_of: returns the dependence of a tensor on the batch.
        is_whole: returns True if a tensor's value for the whole batch is known; None: that depends on its inputs.
    """
    wholes: dict[str, None] = {}
    between: dict[str, None] = {node_of(name): None}
    front = [node_of(name)]
    while front:
        node = step.graph_index.nodes[front.pop()]
        if draws_numbers(node.op):
            return None
        for i in node.input:
            kind = None if is_control(i) else kind_of(i)
            if kind is None or isinstance(kind, Replicated):
                continue
            known = is_whole(tensor(i), kind)
            if known is False:
                return None
            if known:
                wholes[tensor(i)] = None
            elif isinstance(kind, Unknown) and step.spec_of(tensor(i)).shape.is_fully_defined():
                if node_of(i) not in between:
                    between[node_of(i)] = None
                    front.append(node_of(i))
            else:
                return None
    return RecomputedValue(tuple(wholes), tuple(between)) if wholes else None


def make_again(editor: GraphEditor, label: str, name: str, made_of: RecomputedValue, reduced: Mapping[str, str]) -> str:
    """Recomputes a captured tensor from the reduced values of its inputs; returns the new tensor.

    Args:
        editor: of the replicated step.
        label: for the names of the new nodes.
        name: of the captured tensor.
        made_of: its computation.
        reduced: for each of its `wholes`, the tensor that replaces it.
    """
    clones = editor.clone(made_of.between, f"autodist/{label}/", lambda i: reduced.get(tensor(i), i))
    return tensor(name).replace(node_of(name), clones[node_of(name)], 1)
