"""Redirects control inputs past nodes that are removed or shared."""

from __future__ import annotations

from collections.abc import Collection, Set

from autodist.graph.control_flow import find_inside
from autodist.graph.editor import GraphEditor
from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having


def redirect_control_inputs(editor: GraphEditor, kept: Set[str]) -> None:
    """Replaces each control input that is not in `kept` by the nearest nodes of `kept` before it.

    read → x → ^write,  x not kept        becomes        read → ^write
    """
    before: dict[str, frozenset[str]] = {}
    for name in sorted(kept):
        lost = [node_of(i) for i in editor[name].input if is_control(i) and node_of(i) not in kept]
        if not lost:
            continue
        more: dict[str, None] = {}
        for source in lost:
            if source not in before:
                before[source] = nearest_before(editor, source, kept)
            more.update(dict.fromkeys(sorted(before[source])))
        gone = {f"^{source}" for source in lost}
        editor.set_inputs(name, [*(i for i in editor[name].input if i not in gone), *(f"^{m}" for m in more)])


def nearest_before(editor: GraphEditor, name: str, kept: Set[str]) -> frozenset[str]:
    """Returns the nodes of `kept` that lead to `name`, by data or control, with none of `kept` in between."""
    nearest: set[str] = set()
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
                nearest.add(source)
    return frozenset(nearest)


def free_constants(editor: GraphEditor, graph_index: GraphIndex, kept: Collection[str]) -> bool:
    """Moves the control inputs of constants to their readers; returns True if there were any.

    In a TensorFlow 1 step, the constant 1 that increments `global_step` often has such inputs: it waits for the
    complete update.

    Args:
        editor: of the graph.
        graph_index: of the graph from which the editor was created.
        kept: constants that stay unchanged.
    """
    if graph_index.of_op("Enter"):
        return False  # a control input determines the frame of a constant in a v1 loop
    left = {*kept, *find_inside(graph_index)}  # in a branch, it determines if the constant is computed
    waiting = {n.name for n in graph_index.of_op("Const") if graph_index.sources[n.name] and n.name not in left}
    for name in filter(waiting.__contains__, graph_index.order if waiting else ()):
        before = [node_of(i) for i in editor[name].input]
        readers = editor.consumers(name)
        editor.replace_control(name, before, readers)
        for reader in _past_concatenations(editor, readers, left):
            editor.add_control(reader, before)
        editor.set_inputs(name, [])
    return bool(waiting)


def _past_concatenations(editor: GraphEditor, readers: Collection[str], kept: Set[str]) -> set[str]:
    """Returns `readers`, with the readers of a ConcatV2 in place of it, since it computes nothing else.

    TensorFlow's constant folding breaks a ConcatV2 that has control inputs and some constants among its inputs.
    """
    found: set[str] = set()
    front = [*readers]
    while front:
        name = front.pop()
        if editor[name].op == "ConcatV2" and name not in kept:
            front.extend(editor.consumers(name))
        else:
            found.add(name)
    return found
