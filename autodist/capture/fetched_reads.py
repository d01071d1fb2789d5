"""Orders fetched reads of variables before writes in the same run; TensorFlow leaves their order open."""

from __future__ import annotations

from collections.abc import Iterable

from autodist.graph.editor import GraphEditor
from autodist.graph.effects import READS
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of


def read_before_writing(editor: GraphEditor, roots: Iterable[str]) -> None:
    """Makes reads that only fetches need run before this run's writes, unless the script orders them otherwise.

    In TensorFlow a read that waits for nothing usually runs first. Without an order, two workers could return the
    values of two different steps.

    Args:
        editor: editor of the graph of one run.
        roots: nodes of the fetches.
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
        if editor[name].op in READS and node_of(editor[name].input[0]) in writers:  # not within a loop or a branch
            earlier = editor.ancestors([name])
            for writer in writers[node_of(editor[name].input[0])]:
                if writer not in earlier:
                    editor.add_control(writer, [name])
