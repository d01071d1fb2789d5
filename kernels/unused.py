"""Nodes that a rewrite left without a reader."""

from __future__ import annotations

from collections.abc import Iterable

from autodist.graph.editor import GraphEditor
from autodist.graph.item import GraphItem
from autodist.graph.names import node_of
from autodist.kernels.elementwise import ELEMENTWISE

_PURE = ELEMENTWISE | {"All", "Any", "Const", "GatherV2", "Shape", "StatelessIf", "StridedSlice", "UnsortedSegmentSum"}


def named_by(item: GraphItem) -> frozenset[str]:
    """Nodes that an item names and that must therefore stay."""
    calls = [name for call in item.gradient_calls for name in (call.seed, *call.targets)]
    gradients = [name for gradient in item.gradients for name in gradient.tensors]
    return frozenset(map(node_of, (*item.outputs, *item.targets, *item.inputs, *calls, *gradients)))


def remove_unused(editor: GraphEditor, item: GraphItem, names: Iterable[str]) -> None:
    """Removes those of the nodes `names`, and of what leads to them, that compute for nobody.

    Left in the graph they would keep alive, until it is pruned, the reads that they take from, and for what waits for
    these reads even beyond that.
    """
    kept = named_by(item)
    front = list(names)
    count = len(editor)
    while front:
        name = front.pop()
        if name not in editor or name in kept or editor[name].op not in _PURE or editor.consumers(name):
            continue
        front += [node_of(i) for i in editor[name].input]
        editor.remove([name])
    if len(editor) < count:
        editor.drop_lost_colocation()
