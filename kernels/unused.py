"""Removes nodes without a reader after a rewrite."""

from __future__ import annotations

from collections.abc import Iterable, Set

from autodist.graph.editor import GraphEditor
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, having

_FED = having(Trait.FED) - {"PlaceholderWithDefault"}
"""Ops that a run may feed even if nothing reads them; the default of `PlaceholderWithDefault` would be wasted work."""


def remove_unused(editor: GraphEditor, named: Set[str], names: Iterable[str]) -> None:
    """Removes those of the nodes `names` and their ancestors that have no reader and are not `named`.

    Otherwise the variable reads that they consume would stay in the graph until pruning. Later kernels would order
    other operations after these reads, and that order would remain after pruning.
    """
    editor.remove_unread(names, lambda node: node.name in named or node.op in _FED or not is_stateless(node.op))
