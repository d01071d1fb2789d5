"""The walk over a graph that analyses share: one fact for each tensor, from the facts of its node's inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import tensorflow as tf

from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.ops import Trait, having

F = TypeVar("F")

_BACK = having(Trait.BACK)


class GraphWalk(ABC, Generic[F]):
    """Computes facts on demand, inputs first, and each node once.

    A node that passes a value to the next iteration of a TensorFlow 1 loop has an assumed fact, since its value depends
    on itself. The assumption is checked against the value; if it is wrong, it is corrected and all facts are computed
    again.

    Args:
        nodes: the nodes of the graph, by name.
        known: facts of some tensors, which precede those of their nodes.
    """

    def __init__(self, nodes: Mapping[str, tf.compat.v1.NodeDef], known: Mapping[str, F]) -> None:
        self._nodes = nodes
        self._known = dict(known)
        self._known_nodes = {node_of(name) for name in known}
        self._facts: dict[str, F | list[F]] = {}
        self._assumed: dict[str, F] = {}
        self._checked: set[str] = set()

    @abstractmethod
    def _evaluate(self, node: tf.compat.v1.NodeDef, sources: list[str]) -> F | list[F]:
        """Returns the fact of all outputs of a node, or one fact for each.

        Args:
            node: the node.
            sources: its sources, whose facts are known.
        """

    @abstractmethod
    def _assume(self, node: tf.compat.v1.NodeDef) -> F:
        """Returns the first assumption for the value that a loop passes to its next iteration."""

    @abstractmethod
    def _correct(self, node: tf.compat.v1.NodeDef, assumed: F, found: F) -> F:
        """Returns the assumption to go on with, after the value has been found to be different."""

    def _differs(self, assumed: F, found: F) -> bool:
        """Returns True if an assumption does not hold for the value found."""
        return assumed != found

    def _in_cycle(self, node: tf.compat.v1.NodeDef) -> F:
        """Returns the fact of a node that depends on itself outside of a loop's next iteration."""
        raise ValueError(f"node '{node.name}' ({node.op}) depends on itself")

    def _sources(self, node: tf.compat.v1.NodeDef) -> list[str]:
        """Returns the tensors whose facts determine those of a node."""
        return data_inputs(node)

    def fact(self, name: str) -> F:
        """Returns the fact of a tensor."""
        name = tensor(name)
        self.follow(node_of(name))
        return self._output(name)

    def follow(self, *names: str) -> None:
        """Computes the facts of all outputs of some nodes."""
        while missing := [name for name in names if name not in self._facts]:
            self._evaluate_from(missing)
            self._check_assumptions()

    def _output(self, name: str) -> F:
        """Returns the fact of a tensor whose node has been evaluated."""
        node, _, index = name.partition(":")
        if node in self._known_nodes and name in self._known:
            return self._known[name]
        result = self._facts[node]
        return result[int(index)] if isinstance(result, list) else result

    def _evaluate_from(self, roots: Iterable[str]) -> None:
        """Evaluates nodes after their sources, with an explicit stack: graphs exceed Python's recursion limit."""
        stack, open_nodes = [*roots][::-1], set()
        while stack:
            name = stack[-1]
            if name in self._facts:
                stack.pop()
                continue
            node = self._nodes[name]
            if node.op in _BACK:
                if name not in self._assumed:
                    self._assumed[name] = self._assume(node)
                self._facts[stack.pop()] = self._assumed[name]
                continue
            sources = self._sources(node)
            missing = [source for source in map(node_of, sources) if source not in self._facts]
            if missing and name not in open_nodes:
                open_nodes.add(name)
                stack.extend(missing)
                continue
            self._facts[stack.pop()] = self._in_cycle(node) if missing else self._evaluate(node, sources)

    def _check_assumptions(self) -> None:
        while pending := [name for name in self._assumed if name not in self._checked]:
            name = pending[0]
            [source, *_] = data_inputs(self._nodes[name])
            self._evaluate_from([node_of(source)])
            found, assumed = self._output(source), self._assumed[name]
            self._checked.add(name)
            corrected = self._correct(self._nodes[name], assumed, found) if self._differs(assumed, found) else assumed
            if self._differs(assumed, corrected):
                self._assumed[name] = corrected
                self._checked.clear()
                self._facts.clear()
                return
