"""Nodes that a rewrite left without a reader."""

from __future__ import annotations

from collections.abc import Iterable, Set

from autodist.graph.editor import GraphEditor
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, having

_FED = having(Trait.FED) - {"PlaceholderWithDefault"}
"""What a run may give a value, though nobody reads it; the default of the others would be computed for nobody."""


def remove_unused(editor: GraphEditor, named: Set[str], names: Iterable[str]) -> None:
    """Removes those of the nodes `names`, and of what leads to them, that compute for nobody and are not `named`.

    Left in the graph they would keep alive, until it is pruned, the reads that they take from, and for what waits for
    these reads even beyond that.
    """
    editor.remove_unread(names, lambda node: node.name in named or node.op in _FED or not is_stateless(node.op))
