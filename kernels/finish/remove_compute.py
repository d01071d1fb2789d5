"""RemoveCompute: removes the nodes that depend on a batch from the graph of a worker without replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.waiting import redirect_control_inputs
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.replica_dependent import sources_of_replicas


@dataclass(frozen=True)
class RemoveCompute(Kernel[ReplicatedStep, ReplicatedStep]):
    """Removes all nodes that depend on a batch, a random draw or a gradient seed on a worker without replicas.

    At this point the sums of the other workers' parts have replaced its own part. Nodes that waited for a removed node
    inherit its control inputs.

        x → f → update,  g (received) → update'       becomes       g (received) → update'
    """

    name: ClassVar[str] = "remove-compute"
    after: ClassVar[Mapping[str, str]] = {
        "parameter-servers": "until then the graphs of all workers are alike",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.computes or context.goes_through_stages(step):
            return step
        editor = StepEditor(step)
        computed = reach(sources_of_replicas(step, step.graph_index), step.graph_index.readers)
        editor.drop_targets(computed & set(step.targets))
        roots = [
            *map(node_of, step.outputs),
            *editor.targets,
            *(name for nodes in step.nodes_apart for name in nodes),
        ]
        redirect_control_inputs(editor, _needed(step.graph_index, roots, computed))
        return editor.to_step()


def _needed(graph_index: GraphIndex, roots: Iterable[str], computed: Set[str]) -> set[str]:
    """Returns the roots and all their ancestors, except those in `computed` that are only control inputs."""

    def waits(name: str) -> list[str]:
        inputs = graph_index.nodes[name].input
        return [node_of(i) for i in inputs if is_control(i) and node_of(i) not in computed]

    return reach(roots, lambda name: [*graph_index.data[name], *waits(name)])
