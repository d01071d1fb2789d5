"""What waits for what, where nodes in between are not there: control inputs are led past them."""

from __future__ import annotations

from collections.abc import Set

from autodist.graph.editor import GraphEditor
from autodist.graph.names import is_control, node_of

_ALWAYS_DONE = frozenset({"Const", "Placeholder", "VarHandleOp"})
"""Nothing needs to wait for them."""


def wait_past(editor: GraphEditor, kept: Set[str]) -> None:
    """Lets each node of `kept` wait for no other nodes than such; those that it waited for by way of others it keeps.

    read → x → ^write,  x not kept        becomes        read → ^write
    """
    found: dict[str, frozenset[str]] = {}
    for name in sorted(kept):
        lost = [node_of(i) for i in editor[name].input if is_control(i) and node_of(i) not in kept]
        if not lost:
            continue
        more: dict[str, None] = {}
        for source in lost:
            if source not in found:
                found[source] = nearest_before(editor, source, kept)
            more.update(dict.fromkeys(sorted(found[source])))
        gone = {f"^{source}" for source in lost}
        editor.set_inputs(name, [*(i for i in editor[name].input if i not in gone), *(f"^{m}" for m in more)])


def nearest_before(editor: GraphEditor, name: str, kept: Set[str]) -> frozenset[str]:
    """The nodes of `kept` that lead to `name`, by data or control, with none of `kept` in between."""
    found: set[str] = set()
    seen = {name}
    front = [name]
    while front:
        for i in editor[front.pop()].input:
            source = node_of(i)
            if source in seen:
                continue
            seen.add(source)
            if source not in kept:
                front.append(source)
            elif editor[source].op not in _ALWAYS_DONE:
                found.add(source)
    return frozenset(found)
