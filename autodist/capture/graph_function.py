"""A step that is called where a graph is built: its operations become part of it, and what it writes is ordered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist.capture.graph_mode import initializers_of
from autodist.graph.editor import GraphEditor
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having

_TELLS, _ENTRANCES = having(Trait.TELLS), having(Trait.ENTER | Trait.SWITCH)


@dataclass(frozen=True)
class BuiltStep:
    """What a call of a function has added to a graph.

    Attributes:
        outputs: what it returned.
        effects: operations that run with each call, returned or not: what writes variables, checks or prints.
        order: for operations, by name, those that run before them: what touches a variable does so as it was written,
            as within a `tf.function`.
    """

    outputs: Any
    effects: tuple[tf.Operation, ...]
    order: Mapping[str, Sequence[str]]


def build_step(graph: tf.Graph, function: Callable[[], Any]) -> BuiltStep:
    """Calls a function that adds its operations to a graph, which is the default one."""
    known = len(graph.get_operations())
    outputs = function()
    made = graph.get_operations()[known:]
    graph_index = GraphIndex(graph.as_graph_def())
    # What makes initial values runs before any step, and waits for none.
    initial = GraphEditor(graph_index.graph_def, graph_index).ancestors(initializers_of(graph).values())
    own = [op for op in made if op.name not in initial]
    writes = [op for op in own if op.name in graph_index.effects and graph_index.effects[op.name].writes]
    checks = [op for op in own if op.type in _TELLS]
    effects = tuple(op for op in (*writes, *checks) if graph.is_fetchable(op))
    return BuiltStep(outputs, effects, _order(graph_index, [op.name for op in own]))


def _order(graph_index: GraphIndex, made: Collection[str]) -> dict[str, list[str]]:
    """What each operation waits for, so that each variable is read and written in the order of `made`."""
    order: dict[str, list[str]] = {}
    last_write: dict[str, str] = {}
    reads: dict[str, list[str]] = {}
    for name in made:
        effect = graph_index.effects.get(name)
        if effect is None or not _takes_handles(graph_index, name):
            continue
        before = [last_write[h] for h in sorted(effect.reads | effect.writes) if h in last_write]
        before += [read for h in sorted(effect.writes) for read in reads.pop(h, ())]
        if before:
            order[name] = list(dict.fromkeys(before))
        last_write.update(dict.fromkeys(effect.writes, name))
        for handle in effect.reads - effect.writes:
            reads.setdefault(handle, []).append(name)
    return order


def _takes_handles(graph_index: GraphIndex, name: str) -> bool:
    """Whether it takes variables' handles as they are; within a loop or branch of TensorFlow 1 they are passed on."""
    sources = [graph_index.nodes[node_of(i)] for i in graph_index.nodes[name].input]
    return not any(source.op in _ENTRANCES for source in sources)
