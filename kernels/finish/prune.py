"""Prune: removes unneeded nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.editor import drop_lost_colocation
from autodist.graph.names import node_of
from autodist.graph.step import Phase, Step
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class Prune(Kernel[Step, Step]):
    """Keeps the nodes that outputs, targets, inputs and the programs apart from the step need."""

    name: ClassVar[str] = "prune"
    after: ClassVar[Mapping[str, str]] = {
        "remove-compute": "it makes the compute part unneeded",
        "place-stages": "it drops the targets of other workers",
    }

    def apply(self, step: Phase, context: Context) -> Phase:
        returned = [*map(node_of, step.outputs), *step.targets]
        apart = [name for nodes in step.nodes_apart for name in nodes]
        handles = [v.handle for v in step.variables if v.handle in step.graph_index.nodes]
        roots = [*returned, *apart, *map(node_of, step.inputs), *handles]
        needed = reach(roots, step.graph_index.sources.__getitem__)
        if len(needed) == len(step.graph_index.nodes):
            return step
        kept = step.graph_index.only(needed)
        drop_lost_colocation(kept.nodes)
        return replace(step, graph_def=kept.graph_def, graph_index=kept)
