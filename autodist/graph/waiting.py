"""What waits for what, where nodes in between are not there: control inputs are led past them."""

from __future__ import annotations

from collections.abc import Collection, Set

from autodist.graph.control_flow import find_inside
from autodist.graph.editor import GraphEditor
from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having


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
            elif editor[source].op not in having(Trait.SOURCE):
                found.add(source)
    return frozenset(found)


def free_constants(editor: GraphEditor, graph_index: GraphIndex, kept: Collection[str]) -> bool:
    """Lets constants wait for nothing and their readers wait instead; returns whether one waited.

    A step of TensorFlow 1 is often held together by such a constant alone: what is added to `global_step` waits for the
    whole update.

    Args:
        editor: of the graph.
        wiring: of the graph as it was given to the editor.
        kept: constants that stay as they are.
    """
    if graph_index.of_op("Enter"):
        return False  # a control input tells in which frame of a v1 loop a constant stands
    left = {*kept, *find_inside(graph_index)}  # and whether it has a value at all, in a branch
    waiting = {n.name for n in graph_index.of_op("Const") if graph_index.sources[n.name] and n.name not in left}
    for name in filter(waiting.__contains__, graph_index.order if waiting else ()):
        before = [node_of(i) for i in editor[name].input]
        readers = editor.consumers(name)
        editor.replace_control(name, before, readers)
        for reader in readers:
            editor.add_control(reader, before)
        editor.set_inputs(name, [])
    return bool(waiting)
