"""Regions of a graph that update variables by elementwise arithmetic and serve nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import ASSIGNMENTS
from autodist.graph.names import node_of
from autodist.graph.walks import reach
from autodist.kernels.finish.compiled_function import EXACT

_TYPES = frozenset(dtype.as_datatype_enum for dtype in (tf.float32, tf.float64, tf.bool))
"""XLA may keep the values between two ops of a smaller type in a larger one."""


def find_regions(editor: GraphEditor, handles: Collection[str], kept: Collection[str]) -> Iterator[list[str]]:
    """Nodes that can be replaced by one, each after what it needs of the others.

    Nothing else reads what they compute, and nothing that they need comes after one of them. No region has a node of
    another; what is no more than a write is none.

    Args:
        editor: the graph; a region may be replaced before the next one is asked for.
        handles: of the variables.
        kept: nodes that are in no region.
    """
    search = _Search(editor, frozenset(handles), frozenset(kept))
    found = {node.name: search.region_of(node.name) for node in editor if search.is_write(node)}
    # The write of a slot stands in the region of the weight that is computed from it, too.
    for write, region in sorted(found.items(), key=lambda pair: -len(pair[1])):
        if len(region) > 1 and all(name in editor for name in region) and search.is_convex(region):
            yield search.in_order(region, write)


@dataclass(frozen=True)
class _Search:
    editor: GraphEditor
    handles: frozenset[str]
    kept: frozenset[str]

    def is_write(self, node: NodeDef) -> bool:
        return node.op in ASSIGNMENTS and node.input[0] in self.handles

    def region_of(self, write: str) -> set[str]:
        """A write, with all that leads to it and may stand where it stands."""
        region = {write}
        while found := {name for name in self._before(region) if self._belongs(name, region, write)}:
            region |= found
        return region

    def _before(self, region: Collection[str]) -> set[str]:
        return {node_of(i) for name in region for i in self.editor[name].input}.difference(region)

    def _belongs(self, name: str, region: Collection[str], write: str) -> bool:
        node = self.editor[name]
        if name in self.kept or node.device != self.editor[write].device:
            return False
        if self.is_write(node):
            return self._shape(node) == self._shape(self.editor[write])
        return self._is_elementwise(node) and self.editor.consumers(name).issubset(region)

    def _is_elementwise(self, node: NodeDef) -> bool:
        if node.op == "ReadVariableOp":
            return node.input[0] in self.handles
        types = [node.attr[key].type for key in ("T", "dtype") if key in node.attr]
        return node.op in EXACT and _TYPES.issuperset(types)

    def _shape(self, write: NodeDef) -> bytes:
        return bytes(self.editor[write.input[0]].attr["shape"].shape.SerializeToString())

    def is_convex(self, region: Collection[str]) -> bool:
        """Whether nothing outside stands between two nodes of the region."""

        def onward(name: str) -> Iterable[str]:
            return () if name in region else self.editor.consumers(name)

        later = reach((c for name in region for c in self.editor.consumers(name)), onward)
        return later.isdisjoint(self._before(region))

    def in_order(self, region: Collection[str], write: str) -> list[str]:
        """The nodes of a region, which all lead to `write`; in the same order where they do the same."""
        ordered: dict[str, None] = {}
        left = set(region)

        def visit(name: str) -> None:
            if name in left:
                left.discard(name)
                for i in self.editor[name].input:
                    visit(node_of(i))
                ordered[name] = None

        visit(write)
        return list(ordered)
