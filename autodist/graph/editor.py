"""GraphEditor: the operations with which every kernel changes a GraphDef.

Nodes are indexed once, consumers on first use; an operation then costs time in proportion to the nodes that it changes.
The editor works on a copy of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.index import GraphIndex, copy_without
from autodist.graph.names import as_input, data_inputs, is_control, node_of, renamed, tensor
from autodist.graph.op_types import type_attribute
from autodist.graph.walks import reach

NodeDef: TypeAlias = tf.compat.v1.NodeDef
GraphDef: TypeAlias = tf.compat.v1.GraphDef


class GraphEditor:
    """A GraphDef under modification.

    Args:
        graph_def: the graph to start from; not modified.
        graph_index: index of `graph_def` if it exists; saves computing names and consumers.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef, graph_index: GraphIndex | None = None) -> None:
        self._graph = GraphDef()
        self._graph.CopyFrom(graph_def)
        self._consumer_index: dict[str, set[str]] | None = None
        self._graph_index = graph_index
        names = (node.name for node in self._graph.node) if graph_index is None else graph_index.nodes
        self._nodes: dict[str, NodeDef] = dict(zip(names, self._graph.node, strict=True))
        # A removed node stays in `_graph` until `to_graph_def`: deleting it would shift the positions of all others.
        self._positions = {name: position for position, name in enumerate(self._nodes)}
        self._removed: list[int] = []

    # -- lookup ----------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def __getitem__(self, name: str) -> NodeDef:
        try:
            return self._nodes[name]
        except KeyError:
            raise RewriteError(f"node {name!r} is not in the graph; a kernel uses a node that was removed") from None

    def __iter__(self) -> Iterator[NodeDef]:
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def names(self) -> Collection[str]:
        return self._nodes.keys()

    @property
    def library(self) -> tf.compat.v1.GraphDef:
        return self._graph.library

    def consumers(self, name: str) -> frozenset[str]:
        """Returns the nodes that have an output of `name` as a data or control input."""
        return frozenset(self._consumers[name])

    def readers(self, name: str) -> list[str]:
        """Returns the nodes that have data of a node as an input: `consumers` without those that only wait for it."""
        return [c for c in self.consumers(name) if name in map(node_of, data_inputs(self[c]))]

    def to_graph_def(self) -> tf.compat.v1.GraphDef:
        """Returns the current graph, with nodes in the order of their creation."""
        return copy_without(self._graph, self._removed)

    # -- changes ---------------------------------------------------------------------------------------------------

    def add(self, node: tf.compat.v1.NodeDef) -> str:
        """Adds a copy of `node`; returns its name.

        Raises:
            RewriteError: if the name is taken.
        """
        self.add_copy(node, node.name, node.input)
        return node.name

    def add_op(self, op: str, name: str, inputs: Iterable[str], dtype: tf.DType, device: str = "") -> str:
        """Adds a node of an op with a single type, such as an Identity or a read of a variable; returns its name."""
        node = NodeDef(name=name, op=op, input=map(as_input, inputs), device=device)
        node.attr[type_attribute(op)].type = dtype.as_datatype_enum
        return self.add(node)

    def add_copy(self, node: tf.compat.v1.NodeDef, name: str, inputs: Iterable[str]) -> NodeDef:
        """Adds a copy of `node` with another name and other inputs; returns the copy.

        Raises:
            RewriteError: if the name is taken.
        """
        if name in self._nodes:
            raise RewriteError(f"node {name!r} is already in the graph; two kernels chose the same name")
        copy = self._graph.node.add()
        copy.CopyFrom(node)
        copy.name = name
        copy.input[:] = inputs
        self._nodes[name] = copy
        self._positions[name] = len(self._graph.node) - 1
        self._add_to_index(name, copy.input)
        return copy

    def add_graph(self, graph_def: tf.compat.v1.GraphDef) -> None:
        """Adds copies of all nodes and library functions of `graph_def`."""
        for node in graph_def.node:
            self.add(node)
        known = {f.signature.name for f in self._graph.library.function}
        self._graph.library.function.extend(f for f in graph_def.library.function if f.signature.name not in known)

    def remove(self, names: Iterable[str]) -> None:
        """Removes nodes; the caller repairs the inputs that refer to them (`rewire`, `replace_control`)."""
        for name in names:
            self._removed.append(self._positions.pop(name))
            self._remove_from_index(name, self._nodes.pop(name).input)
            if self._consumer_index is not None and not self._consumer_index[name]:
                del self._consumer_index[name]

    def set_inputs(self, name: str, inputs: Iterable[str]) -> None:
        """Sets the inputs of a node; control inputs come last, each once."""
        node = self[name]
        self._remove_from_index(name, node.input)
        spelled = list(inputs)
        data = [as_input(i) for i in spelled if not is_control(i)]
        control = dict.fromkeys(i for i in spelled if is_control(i))
        node.input[:] = [*data, *control]
        self._add_to_index(name, node.input)

    def pass_on(self, name: str, source: str, dtype: tf.DType, control: Iterable[str] = ()) -> None:
        """Turns a node into an Identity of the tensor `source` with the control inputs `control` only."""
        node = self[name]
        node.op = "Identity"
        node.attr.clear()
        node.attr["T"].type = dtype.as_datatype_enum
        self.set_inputs(name, [source, *control])

    def rewire(self, old: str, new: str, consumers: Iterable[str] | None = None) -> int:
        """Replaces the tensor `old` by `new` in inputs of `consumers` (all, if None); returns the number of changes."""
        old, changed = tensor(old), 0
        for name in list(self._consumers.get(node_of(old), ())) if consumers is None else list(consumers):
            inputs = list(self[name].input)
            hits = [k for k, i in enumerate(inputs) if not is_control(i) and tensor(i) == old]
            if hits:
                for k in hits:
                    inputs[k] = new
                self.set_inputs(name, inputs)
                changed += len(hits)
        return changed

    def add_control(self, name: str, before: Iterable[str]) -> None:
        """Adds control dependencies of `name` on the nodes `before`."""
        more = [f"^{b}" for b in before if b != name]
        if more:
            self.set_inputs(name, [*self[name].input, *more])

    def replace_control(self, old: str, new: Iterable[str], consumers: Iterable[str] | None = None) -> None:
        """Replaces control dependencies on `old` by control dependencies on all of `new`."""
        after = [f"^{n}" for n in new]
        for name in list(self._consumers.get(old, ())) if consumers is None else list(consumers):
            inputs = list(self[name].input)
            if f"^{old}" in inputs:
                self.set_inputs(name, [*(i for i in inputs if i != f"^{old}"), *(a for a in after if a != f"^{name}")])

    def clone(
        self,
        names: Collection[str],
        prefix: str,
        outside: Callable[[str], str] | None = None,
        suffix: str = "",
    ) -> dict[str, str]:
        """Copies the nodes `names` under `prefix`; inputs among them refer to the copies, others to `outside(input)`.

        The prefix also renames attributes that copies must not share: colocation classes, frames of v1 loops and the
        `shared_name` of stateful ops.

        Returns:
            Maps each name to the name of its copy.
        """
        copies = {name: prefix + name + suffix for name in names}

        def in_clone(spelling: str) -> str:
            if outside is None or node_of(spelling) in copies:
                return renamed(spelling, copies)
            return outside(spelling)

        for name in names:
            node = self[name]
            _rename_attributes(self.add_copy(node, copies[name], map(in_clone, node.input)), prefix, copies)
        return copies

    def prune(self, roots: Iterable[str]) -> list[str]:
        """Removes the nodes that no root needs, by data or control; returns their names."""
        keep = self.ancestors(roots)
        gone = [name for name in self._nodes if name not in keep]
        self.remove(gone)
        self.drop_lost_colocation()
        return gone

    def remove_unread(self, names: Iterable[str], stays: Callable[[NodeDef], bool]) -> None:
        """Removes the nodes `names` and their inputs as far as no node reads them and `stays` returns False."""
        front = list(names)
        count = len(self)
        while front:
            name = front.pop()
            if name not in self or self._consumers[name] or stays(self[name]):
                continue
            front += map(node_of, self[name].input)
            self.remove([name])
        if len(self) < count:
            self.drop_lost_colocation()

    def drop_lost_colocation(self) -> None:
        """Drops colocation constraints with nodes that were removed."""
        drop_lost_colocation(self._nodes)

    # -- walks -----------------------------------------------------------------------------------------------------

    def ancestors(self, roots: Iterable[str], *, control: bool = True) -> set[str]:
        """Returns the nodes `roots` and all their inputs, transitively; those by data alone unless `control`."""
        return reach(
            map(node_of, roots),
            lambda name: map(node_of, self[name].input if control else data_inputs(self[name])),
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _consumers(self) -> dict[str, set[str]]:
        """Maps each node to its consumers; built on first use, then kept up to date."""
        if self._consumer_index is None and self._graph_index is not None:
            self._consumer_index = {name: set(consumers) for name, consumers in self._graph_index.consumers.items()}
        if self._consumer_index is None:
            self._consumer_index = {name: set() for name in self._nodes}
            for name, node in self._nodes.items():
                for source in map(node_of, node.input):
                    self._consumer_index.setdefault(source, set()).add(name)
        return self._consumer_index

    def _add_to_index(self, name: str, inputs: Iterable[str]) -> None:
        self._graph_index = None  # describes the graph before the change
        if self._consumer_index is not None:
            self._consumer_index.setdefault(name, set())
            for i in inputs:
                self._consumer_index.setdefault(node_of(i), set()).add(name)

    def _remove_from_index(self, name: str, inputs: Iterable[str]) -> None:
        self._graph_index = None
        if self._consumer_index is not None:
            for i in inputs:
                self._consumer_index.get(node_of(i), set()).discard(name)


def _rename_attributes(node: NodeDef, prefix: str, copies: Mapping[str, str]) -> None:
    if "_class" in node.attr:
        remaining = []
        for value in node.attr["_class"].list.s:
            target = value.removeprefix(b"loc:@").decode()
            remaining.append(b"loc:@" + copies.get(target, target).encode() if value.startswith(b"loc:@") else value)
        node.attr["_class"].list.s[:] = remaining
    if "frame_name" in node.attr:
        node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
    if node.attr["shared_name"].s if "shared_name" in node.attr else False:
        node.attr["shared_name"].s = prefix.encode() + node.attr["shared_name"].s


def drop_lost_colocation(nodes: Mapping[str, NodeDef]) -> None:
    """Drops colocation constraints of `nodes` with nodes that are not among them."""
    for node in nodes.values():
        if "_class" not in node.attr:
            continue
        classes = node.attr["_class"].list.s
        remaining = [c for c in classes if not c.startswith(b"loc:@") or c[5:].decode() in nodes]
        if len(remaining) != len(classes):
            del node.attr["_class"]
            if remaining:
                node.attr["_class"].list.s[:] = remaining
