"""Wiring: how the nodes of one graph hang together.

To read a protobuf's fields is the dear part of most walks over a graph: here each is read once, for all who ask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar, cast

import tensorflow as tf

from autodist.graph.effects import Effect, Effects
from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having

T = TypeVar("T")

_MERGES = having(Trait.MERGE)


def copy_without(graph_def: tf.compat.v1.GraphDef, gone: Iterable[int]) -> tf.compat.v1.GraphDef:
    """A copy that lacks the nodes at the positions `gone`; it takes a third of the time of adding node to node."""
    out = tf.compat.v1.GraphDef()
    out.CopyFrom(graph_def)
    for position in sorted(gone, reverse=True):
        del out.node[position]
    return out


class GraphIndex:
    """Answers for one GraphDef; each is found when it is first asked for, and kept.

    A Step holds the wiring of its graph, and hands it on to items with the same graph.

    Args:
        graph_def: the graph; must not change while this is used.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self.graph_def = graph_def
        self._found: dict[str, tuple[Hashable, Any]] = {}

    def once(self, question: str, given: Hashable, find: Callable[[], T]) -> T:
        """What is found out about the graph with what is given beside it; kept until something else is given."""
        asked, answer = self._found.get(question, (None, None))
        if asked != given:
            answer = find()
            self._found[question] = given, answer
        return cast(T, answer)

    @cached_property
    def nodes(self) -> dict[str, tf.compat.v1.NodeDef]:
        """By name, in the order of the graph."""
        return {node.name: node for node in self.graph_def.node}

    def of_op(self, *ops: str) -> list[tf.compat.v1.NodeDef]:
        """The nodes of some ops, op by op, each op's in the order of the graph."""
        return [node for op in ops for node in self._by_op.get(op, ())]

    def having(self, traits: Trait) -> list[tf.compat.v1.NodeDef]:
        """The nodes of the ops that have one of some traits, in the order of `of_op`."""
        return self.of_op(*sorted(having(traits)))

    @property
    def sources(self) -> Mapping[str, list[str]]:
        """For each node the nodes that its inputs come from, control inputs included, as often as they are named."""
        return self._read[0]

    @property
    def data(self) -> Mapping[str, list[str]]:
        """`sources` without control inputs."""
        return self._read[1]

    @cached_property
    def consumers(self) -> Mapping[str, list[str]]:
        """For each node those that name it among their inputs, in the order of the graph."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name, sources in self.sources.items():
            for source in sources if len(sources) < 2 else set(sources):
                found[source].append(name)
        return found

    @cached_property
    def order(self) -> list[str]:
        """The nodes' names, each after all that it needs; the back edges of v1 loops are left out.

        Raises:
            ValueError: if the graph has a cycle that is not a v1 loop's.
        """
        waiting = {name: len(set(sources)) for name, sources in self.sources.items()}
        back = {
            n.name: [c for c in self.consumers[n.name] if self.nodes[c].op in _MERGES] for n in self.having(Trait.BACK)
        }
        for merges in back.values():
            for merge in merges:
                waiting[merge] -= 1
        ready = [name for name in reversed(self.nodes) if not waiting[name]]
        found = []
        while ready:
            name = ready.pop()
            found.append(name)
            for consumer in self.consumers[name]:
                if name in back and consumer in back[name]:
                    continue
                left = waiting[consumer] = waiting[consumer] - 1
                if not left:
                    ready.append(consumer)
        if len(found) != len(self.nodes):
            stuck = next(name for name, count in waiting.items() if count > 0)
            raise ValueError(f"the graph has a cycle through {stuck!r}")
        return found

    @cached_property
    def effects(self) -> Mapping[str, Effect]:
        """What each node that reads or writes a variable does, in the order of the graph."""
        effects = Effects(self.graph_def, self.nodes)
        touching = {consumer for carrier in effects.carriers for consumer in self.consumers[carrier]}
        found = {name: effects.of(node) for name, node in self.nodes.items() if name in touching}
        return {name: effect for name, effect in found.items() if effect}

    def only(self, kept: Collection[str]) -> GraphIndex:
        """The wiring of the graph of the nodes `kept` alone, which need no others; they stay in their order."""
        names = [name for name in self.nodes if name in kept]
        gone = [position for position, name in enumerate(self.nodes) if name not in kept]
        graph_def = copy_without(self.graph_def, gone)
        found = GraphIndex(graph_def)
        found.nodes = dict(zip(names, graph_def.node, strict=True))
        found._read = {name: self.sources[name] for name in names}, {name: self.data[name] for name in names}
        return found

    @cached_property
    def _by_op(self) -> dict[str, list[tf.compat.v1.NodeDef]]:
        found: dict[str, list[tf.compat.v1.NodeDef]] = {}
        for node in self.graph_def.node:
            found.setdefault(node.op, []).append(node)
        return found

    @cached_property
    def _read(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """`sources` and `data`; one list is both where a node has no control inputs, which stand last if there are."""
        sources, data = {}, {}
        for name, node in self.nodes.items():
            inputs = node.input[:]
            sources[name] = data[name] = [node_of(i) for i in inputs]
            if inputs and is_control(inputs[-1]):
                data[name] = [node_of(i) for i in inputs if not is_control(i)]
        return sources, data
