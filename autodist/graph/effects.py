"""Variables that a node reads and writes, including through functions called by control flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import tensorflow as tf

from autodist.graph.functions import functions_by_name
from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having

READS = having(Trait.READ)
QUERIES = having(Trait.QUERY)
_BRANCHES = having(Trait.BRANCH)

PASSES = having(Trait.IDENTITY | Trait.ENTER | Trait.SWITCH)
"""Ops that return a handle unchanged."""


def passes_handle(node: tf.compat.v1.NodeDef) -> bool:
    """Returns True if a node returns the handle that it gets."""
    return node.op in PASSES and node.attr["T"].type == tf.resource.as_datatype_enum


@dataclass(frozen=True)
class Effect:
    """The variables that a node reads and writes, each named by its VarHandleOp."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes)


NO_EFFECT = Effect()


T = TypeVar("T")


def group_by_handle(touching: Iterable[tuple[T, Iterable[str]]]) -> dict[str, list[T]]:
    """Maps each handle to the values that come with it, in their order.

    >>> group_by_handle([("read", ["v"]), ("write", ["v", "w"])])
    {'v': ['read', 'write'], 'w': ['write']}
    """
    result: dict[str, list[T]] = {}
    for value, handles in touching:
        for handle in handles:
            result.setdefault(handle, []).append(value)
    return result


@dataclass
class Effects:
    """Computes the variables that each node of a GraphDef reads and writes.

    Create one object per graph, since it indexes all nodes and functions.

    Args:
        graph_def: the graph; it must not change while this object is in use.
        nodes: maps names to nodes; computed from `graph_def` if it is empty.

    Attributes:
        carriers: the nodes that return a variable's handle.
    """

    graph_def: tf.compat.v1.GraphDef
    nodes: Mapping[str, tf.compat.v1.NodeDef] = field(default_factory=dict)
    _handles: dict[str, str | None] = field(default_factory=dict)
    _bodies: dict[tuple[str, int], tuple[bool, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = self.nodes or {node.name: node for node in self.graph_def.node}
        self.carriers = {n for n, node in self._nodes.items() if node.op == "VarHandleOp" or passes_handle(node)}
        self._functions = functions_by_name(self.graph_def.library)

    def handle_of(self, spelling: str) -> str | None:
        """Returns the name of the VarHandleOp that an input comes from; None if it is not a variable's handle."""
        name = node_of(spelling)
        if name not in self._handles:
            node = self._nodes[name]
            if node.op == "VarHandleOp":
                self._handles[name] = name
            elif passes_handle(node):
                self._handles[name] = self.handle_of(node.input[0])
            else:
                self._handles[name] = None
        return self._handles[name]

    def of(self, node: tf.compat.v1.NodeDef) -> Effect:
        """Returns the effect of `node`; an op counts as a write unless it is known to only read."""
        if node.op in QUERIES or node.op in PASSES or node.op == "VarHandleOp":
            return NO_EFFECT
        if self.carriers.isdisjoint(map(node_of, node.input)):
            return NO_EFFECT
        handles = [(k, h) for k, i in enumerate(node.input) if not is_control(i) and (h := self.handle_of(i))]
        if not handles:
            return NO_EFFECT
        if node.op in READS:
            return Effect(reads=frozenset(h for _, h in handles))
        called = self._called(node)
        if called is None:
            overwrites = node.op == "AssignVariableOp"
            every = frozenset(h for _, h in handles)
            return Effect(reads=frozenset() if overwrites else every, writes=every)
        reads, writes = set(), set()
        for k, handle in handles:
            for body, shift in called:
                does_read, does_write = self._in_body(body, k - shift)
                if does_read:
                    reads.add(handle)
                if does_write:
                    writes.add(handle)
        return Effect(frozenset(reads), frozenset(writes))

    @staticmethod
    def _called(node: tf.compat.v1.NodeDef) -> list[tuple[str, int]] | None:
        """Returns the functions that a node calls; None if it calls none.

        Each comes with the number of the node's inputs that precede its arguments (1 for a branch's predicate).
        """
        functions = []
        shift = 1 if node.op in _BRANCHES else 0
        for value in node.attr.values():
            if value.HasField("func"):
                functions.append((value.func.name, shift))
            functions += [(f.name, shift) for f in value.list.func]
        return functions or None

    def _in_body(self, name: str, argument: int) -> tuple[bool, bool]:
        """Returns two flags: a function reads the variable at position `argument`, and it writes that variable."""
        key = (name, argument)
        if key in self._bodies:
            return self._bodies[key]
        self._bodies[key] = (False, False)
        body = self._functions[name]
        if not 0 <= argument < len(body.signature.input_arg):
            return False, False
        carriers = {body.signature.input_arg[argument].name}
        reads = writes = False
        for node in body.node_def:
            places = [k for k, i in enumerate(node.input) if not is_control(i) and node_of(i) in carriers]
            if not places or node.op in QUERIES:
                continue
            if node.op in PASSES:
                carriers.add(node.name)
                continue
            called = self._called(node)
            if called is not None:
                answers = [self._in_body(f, k - shift) for k in places for f, shift in called]
                reads |= any(r for r, _ in answers)
                writes |= any(w for _, w in answers)
            else:
                reads |= node.op != "AssignVariableOp"
                writes |= node.op not in READS
        self._bodies[key] = (reads, writes)
        return reads, writes
