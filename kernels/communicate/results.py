"""Results: what a synchronizer puts in the place of joins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from autodist.graph.editor import GraphEditor
from autodist.graph.item import GraphItem
from autodist.graph.parts import Join


@dataclass
class Results:
    """Collects what one synchronizer changes in a graph.

    Attributes:
        editor: of the graph.
    """

    editor: GraphEditor
    _targets: list[str] = field(default_factory=list)
    _given: dict[str, str] = field(default_factory=dict)

    def give(self, join: Join, tensors: Sequence[str]) -> None:
        """Lets all that reads the join's local result read `tensors`, which hold the sum over all workers."""
        for old, new in zip(join.result, tensors, strict=True):
            self.replace(old, new)

    def replace(self, old: str, new: str, consumers: Iterable[str] | None = None) -> None:
        """Lets `consumers` of the tensor `old`, and the step's outputs, have `new`."""
        self.editor.rewire(old, new, consumers)
        self._given[old] = new

    def now(self, name: str) -> str:
        """The tensor that took the place of a join's local result, or `name` itself."""
        return self._given.get(name, name)

    def run(self, names: Iterable[str]) -> None:
        """Adds nodes that have to run in every step."""
        self._targets.extend(names)

    def applied_to(self, item: GraphItem, joins: Collection[Join]) -> GraphItem:
        """The item with the edited graph, in which `joins` are done."""
        return replace(
            item,
            graph_def=self.editor.to_graph_def(),
            outputs=tuple(self._given.get(name, name) for name in item.outputs),
            targets=tuple(dict.fromkeys((*item.targets, *self._targets))),
            joins=tuple(join for join in item.joins if join not in joins),
        )
