"""Leave out compute: a worker without replicas runs what runs once, and nothing that a batch reaches."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.editor import GraphEditor
from autodist.graph.names import is_control, node_of
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.waiting import wait_past
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.replica_dependent import sources_of_replicas


@dataclass(frozen=True)
class LeaveOutCompute(Kernel):
    """On a worker without replicas, nothing runs that a batch, a random draw or a gradient of its own reaches.

    By now the sums of the other workers' parts have taken the place of its own. What waited for a node that is left
    out waits for what that node waited for.

        x → f → update,  g (received) → update'       becomes       g (received) → update'
    """

    name: ClassVar[str] = "leave-out-compute"

    def apply(self, item: Step, context: Context) -> Step:
        if context.computes or context.goes_through_stages(item):
            return item
        editor = StepEditor(item)
        computed = _reached(editor, sources_of_replicas(item, item.graph_index))
        editor.drop_targets(computed & set(item.targets))
        roots = [
            *map(node_of, item.outputs),
            *editor.targets,
            *item.served,
            *item.flush_targets,
            *item.initializers.values(),
        ]
        wait_past(editor, _needed(editor, roots, computed))
        return editor.to_item()


def _reached(editor: GraphEditor, sources: Iterable[str]) -> set[str]:
    """The sources, and all that they reach by data."""
    return reach(sources, lambda name: [c for c in editor.consumers(name) if name in _given(editor, c)])


def _needed(editor: GraphEditor, roots: Iterable[str], computed: Set[str]) -> set[str]:
    """The roots and all that they need, but for what they only wait for if that is in `computed`."""

    def waits(name: str) -> list[str]:
        return [node_of(i) for i in editor[name].input if is_control(i) and node_of(i) not in computed]

    return reach(roots, lambda name: [*_given(editor, name), *waits(name)])


def _given(editor: GraphEditor, name: str) -> list[str]:
    """The nodes that a node has data from."""
    return [node_of(i) for i in editor[name].input if not is_control(i)]
