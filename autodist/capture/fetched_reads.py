"""Variables that are fetched beside what writes them: one device's race between the two becomes an order."""

from __future__ import annotations

from collections.abc import Iterable

from autodist.graph.editor import GraphEditor
from autodist.graph.effects import READS
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of


def read_before_writing(editor: GraphEditor, roots: Iterable[str]) -> None:
    """Lets what only fetches need be read before this run writes it, unless the script has ordered it otherwise.

    TensorFlow leaves open which comes first. A read that waits for nothing has come first as a rule; left open, two
    workers could return values of two steps.

    Args:
        editor: of the graph of one run.
        roots: nodes that make what is fetched.
    """
    effects = GraphIndex(editor.to_graph_def()).effects
    writers: dict[str, list[str]] = {}
    for name, effect in effects.items():
        for handle in effect.writes:
            writers.setdefault(handle, []).append(name)
    if not writers:
        return
    before_writes = editor.ancestors([name for names in writers.values() for name in names])
    for name in sorted(editor.ancestors(roots) - before_writes):
        if editor[name].op in READS and node_of(editor[name].input[0]) in writers:  # not one within a loop or a branch
            earlier = editor.ancestors([name])
            for writer in writers[node_of(editor[name].input[0])]:
                if writer not in earlier:
                    editor.add_control(writer, [name])
