"""Prune: removes unneeded nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.editor import drop_lost_colocation
from autodist.graph.names import node_of
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class Prune(Kernel):
    """Keeps the nodes that outputs, targets, inputs and background programs need."""

    name: ClassVar[str] = "prune"

    def apply(self, item: Step, context: Context) -> Step:
        returned = [*map(node_of, item.outputs), *item.targets]
        background = [*item.initializers.values(), *item.served, *item.flush_targets]
        handles = [v.handle for v in item.variables if v.handle in item.graph_index.nodes]
        roots = [*returned, *background, *map(node_of, item.inputs), *handles]
        needed = reach(roots, item.graph_index.sources.__getitem__)
        if len(needed) == len(item.graph_index.nodes):
            return item
        kept = item.graph_index.only(needed)
        drop_lost_colocation(kept.nodes)
        return replace(item, graph_def=kept.graph_def, graph_index=kept)
