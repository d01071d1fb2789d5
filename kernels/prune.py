"""Prune: what nothing needs is removed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.editor import GraphEditor
from autodist.graph.item import GraphItem
from autodist.graph.names import node_of
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class Prune(Kernel):
    """Keeps what outputs, targets, inputs, and what runs beside the step need."""

    name: ClassVar[str] = "prune"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        editor = GraphEditor(item.graph_def)
        returned = [*map(node_of, item.outputs), *item.targets]
        beside = [*item.initializers.values(), *item.served, *item.landed]
        editor.prune([*returned, *beside, *map(node_of, item.inputs), *_handles(item)])
        return replace(item, graph_def=editor.to_graph_def())


def _handles(item: GraphItem) -> list[str]:
    present = {node.name for node in item.graph_def.node}
    return [v.handle for v in item.variables if v.handle in present]
