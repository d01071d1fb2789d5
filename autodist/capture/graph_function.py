"""Steps that are called while a graph is built: their operations become part of it, with their writes in order."""

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

_TELLS, _ENTRANCES = having(Trait.PRINTS), having(Trait.ENTER | Trait.SWITCH)


@dataclass(frozen=True)
class BuiltStep:
    """The additions of one function call to a graph.

    Attributes:
        outputs: the function's return value.
        effects: operations that run with each call, returned or not: writes of variables, checks and prints.
        order: by an operation's name, the operations that run before it. Each variable is read and written in program
            order, as within a `tf.function`.
    """

    outputs: Any
    effects: tuple[tf.Operation, ...]
    order: Mapping[str, Sequence[str]]


def build_step(graph: tf.Graph, function: Callable[[], Any]) -> BuiltStep:
    """Calls a function that adds its operations to `graph`, the default graph."""
    known = len(graph.get_operations())
    outputs = function()
    made = graph.get_operations()[known:]
    graph_index = GraphIndex(graph.as_graph_def())
    # Initializers run before any step and wait for none.
    initial = GraphEditor(graph_index.graph_def, graph_index).ancestors(initializers_of(graph).values())
    own = [op for op in made if op.name not in initial]
    writes = [op for op in own if op.name in graph_index.effects and graph_index.effects[op.name].writes]
    checks = [op for op in own if op.type in _TELLS]
    effects = tuple(op for op in (*writes, *checks) if graph.is_fetchable(op))
    return BuiltStep(outputs, effects, _order(graph_index, [op.name for op in own]))


def _order(graph_index: GraphIndex, made: Collection[str]) -> dict[str, list[str]]:
    """Returns the control inputs with which each variable is read and written in the order of `made`."""
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
    """Returns True if a node takes variables' handles directly, not through a loop or branch of TensorFlow 1."""
    sources = [graph_index.nodes[node_of(i)] for i in graph_index.nodes[name].input]
    return not any(source.op in _ENTRANCES for source in sources)
