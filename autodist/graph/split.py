"""split: divides a step into subgraphs by a callback, with the tensors between them and their dependencies."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autodist.errors import PartsError, SplitControlFlowError
from autodist.graph.control_flow import find_inside
from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.part_graph import PartGraph, part_graph
from autodist.graph.step import Step

Key = Hashable
"""Key of a subgraph, returned by a callback; `None` is no subgraph."""


@dataclass(frozen=True)
class Subgraph:
    """The nodes of a step that have one key.

    Attributes:
        key: the value that the callback returned.
        nodes: their names, in topological order.
        copies: nodes of no subgraph that are copied into this one, in topological order.
        step: the step that it is a part of.
    """

    key: Key
    nodes: tuple[str, ...]
    copies: tuple[str, ...]
    step: Step = field(compare=False, repr=False)

    @cached_property
    def takes(self) -> tuple[str, ...]:
        """The tensors of other nodes that it reads, each once, in the order of reading."""
        return tuple(dict.fromkeys(tensor(i) for i in self._from_outside() if not is_control(i)))

    @cached_property
    def waits(self) -> tuple[str, ...]:
        """The other nodes that are control inputs of its own."""
        return tuple(dict.fromkeys(node_of(i) for i in self._from_outside() if is_control(i)))

    @cached_property
    def gives(self) -> tuple[str, ...]:
        """Its tensors that other nodes read or the step returns, each once, in the order of their creation."""
        outputs: list[str] = []
        returned = {tensor(name) for name in self.step.outputs}
        for name in self.nodes:
            read = {t for t in returned if node_of(t) == name}
            read |= {tensor(i) for i in self._read_outside(name) if not is_control(i)}
            outputs += sorted(read, key=output_index)
        return tuple(outputs)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Its nodes that run even if their tensors are not read: targets of the step, and control inputs of others."""
        wanted, nodes = frozenset(self.step.targets), self.step.graph_index.nodes
        return tuple(n for n in self.nodes if n in wanted or (self._is_waited_for(n) and nodes[n].op != "Placeholder"))

    def graph(self) -> PartGraph:
        """Returns the subgraph as a graph that can be run alone.

        Raises:
            RewriteError: an input or output cannot be a value: a list of tensors, or a handle without a name.
        """
        return part_graph(self.step.graph_index, [*self.copies, *self.nodes], self.takes, self.gives, self.targets)

    @cached_property
    def _inside(self) -> frozenset[str]:
        return frozenset(self.nodes)

    def _from_outside(self) -> Iterator[str]:
        """Yields the inputs of its nodes from other nodes; its copies have no control inputs."""
        graph_index, known = self.step.graph_index, self._inside.union(self.copies)
        for name in (*self.copies, *self.nodes):
            if not known.issuperset(graph_index.sources[name]):
                inputs = (i for i in graph_index.nodes[name].input if node_of(i) not in known)
                yield from (i for i in inputs if name in self._inside or not is_control(i))

    def _is_waited_for(self, name: str) -> bool:
        return any(map(is_control, self._read_outside(name)))

    def _read_outside(self, name: str) -> Iterator[str]:
        """Yields the spellings of one of its nodes as an input of other nodes."""
        graph_index = self.step.graph_index
        for reader in graph_index.consumers[name]:
            if reader not in self._inside:
                yield from (i for i in graph_index.nodes[reader].input if node_of(i) == name)


@dataclass(frozen=True, eq=False)
class Subgraphs(Mapping[Key, Subgraph]):
    """Result of `split`: the subgraphs of a step by key, in the order in which the step reaches them.

    Attributes:
        needs: maps each subgraph to those that run before it: their nodes lead to its own, directly or through nodes of
            no subgraph.
        order: the keys in topological order.
        key_of: the subgraph of each node that is in one.
    """

    needs: Mapping[Key, frozenset[Key]]
    order: tuple[Key, ...]
    key_of: Mapping[str, Key]
    _parts: Mapping[Key, Subgraph]

    def __getitem__(self, key: Key) -> Subgraph:
        return self._parts[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @cached_property
    def readers(self) -> Mapping[str, tuple[Key, ...]]:
        """Maps each tensor that a subgraph takes to the subgraphs that take it."""
        keys_by_tensor: dict[str, list[Key]] = {}
        for key, part in self.items():
            for name in part.takes:
                keys_by_tensor.setdefault(name, []).append(key)
        return {name: tuple(keys) for name, keys in keys_by_tensor.items()}

    def __str__(self) -> str:
        return "\n".join(line for key in self.order for line in self._describe(self[key]))

    def _describe(self, part: Subgraph) -> Iterator[str]:
        after = [repr(key) for key in self.order if key in self.needs[part.key]]
        yield f"part {part.key!r}, {len(part.nodes)} nodes" + (f", after {', '.join(after)}" if after else "")
        returned = {tensor(name) for name in part.step.outputs}
        for name in part.copies:
            yield f"  has {name}"
        for name in part.takes:
            yield f"  takes {name}"
        for name in part.waits:
            yield f"  waits for {name}"
        for name in part.gives:
            to = [f"to {key!r}" for key in self.readers.get(name, ())] + ["to the caller"] * (name in returned)
            yield f"  gives {name} {', '.join(to) or 'to no part'}"
        for name in part.targets:
            yield f"  runs {name}"


def split(
    step: Step,
    key: Callable[[str], Key | None],
    *,
    copied: Collection[str] | None = None,
    cut_cycles: bool = False,
) -> Subgraphs:
    """Divides a step into subgraphs: all nodes for which the callback returns the same key are one subgraph.

        parts = split(step, lambda name: name.split("/")[0])     # a subgraph for each scope
        print(parts)                                             # inputs, outputs and predecessors of each
        for key in parts.order:
            graph = parts[key].graph()                           # can be run alone

    Run in order, each fed the tensors that it takes, the subgraphs do the same as the step. A tensor that several
    subgraphs read is an output once. Variables, queues and tables are not values: each subgraph that uses one has its
    own handle to the shared resource.

    Args:
        step: captured, or rewritten.
        key: called once for each node, with its name, in topological order. `None`: the node is in no subgraph.
        copied: nodes that each reader subgraph copies; `key` is not called for them. Default: handles of resources that
            sessions keep by name.
        cut_cycles: True to divide a subgraph that depends on itself where a path leaves it, instead of raising an
            error. Keys are then pairs of the callback's key and a number.

    Raises:
        PartsError: a subgraph depends on itself through nodes that are not in it.
        SplitControlFlowError: a loop or a branch of TensorFlow 1 is only partly in a subgraph.
    """
    graph_index = step.graph_index
    copied = _handles(graph_index) if copied is None else copied
    listed = ((name, key(name)) for name in graph_index.order if name not in copied)
    keys = {name: one_key for name, one_key in listed if one_key is not None}
    _require_complete_control_flow(graph_index, keys)
    needs = _needs(graph_index, keys)
    cycle = _cycle(needs)
    if cycle and not cut_cycles:
        raise _cycle_error(graph_index, keys, cycle)
    if cut_cycles:
        keys = _without_cycles(graph_index, keys) if cycle else {name: (one_key, 0) for name, one_key in keys.items()}
        needs = _needs(graph_index, keys)
    nodes: dict[Key, list[str]] = {one_key: [] for one_key in needs}
    for name, one_key in keys.items():
        nodes[one_key].append(name)
    parts = {
        one_key: Subgraph(one_key, tuple(found), _copies(graph_index, found, copied), step)
        for one_key, found in nodes.items()
    }
    order = tuple(graphlib.TopologicalSorter(needs).static_order())
    return Subgraphs({one_key: frozenset(found) for one_key, found in needs.items()}, order, keys, parts)


def _handles(graph_index: GraphIndex) -> frozenset[str]:
    """Returns the handles of resources that sessions keep by name."""
    return frozenset(
        n.name for n in graph_index.nodes.values() if "shared_name" in n.attr and not graph_index.data[n.name]
    )


def _copies(graph_index: GraphIndex, nodes: Sequence[str], copied: Collection[str]) -> tuple[str, ...]:
    """Returns the nodes that a subgraph copies, in topological order."""
    levels = [list(dict.fromkeys(s for name in nodes for s in graph_index.data[name] if s in copied))]
    while levels[-1]:
        levels.append([s for name in levels[-1] for s in graph_index.data[name] if s in copied])
    return tuple(dict.fromkeys(name for level in reversed(levels) for name in level))


def _require_complete_control_flow(graph_index: GraphIndex, keys: Mapping[str, Key]) -> None:
    for name in find_inside(graph_index):
        for reader in graph_index.consumers[name]:
            if keys.get(name) != keys.get(reader):
                raise SplitControlFlowError(name, keys.get(name), reader, keys.get(reader))


def _needs(graph_index: GraphIndex, keys: Mapping[str, Key]) -> dict[Key, dict[Key, None]]:
    """Maps each subgraph to those that lead to it, itself included if a path through other nodes does."""
    numbers: dict[Key, int] = {}
    part_of = {name: numbers.setdefault(one_key, len(numbers)) for name, one_key in keys.items()}
    needs: list[dict[int, None]] = [{} for _ in numbers]
    through: dict[str, int] = {}
    """For nodes of no subgraph, a bit set of the subgraphs that lead to them."""
    for name in graph_index.order:
        part_key, bits = part_of.get(name), 0
        for source in graph_index.sources[name]:
            part = part_of.get(source)
            if part is None:
                bits |= through.get(source, 0)
            elif part_key is None:
                bits |= 1 << part
            elif part != part_key:
                needs[part_key][part] = None
        if part_key is None:
            through[name] = bits
        while part_key is not None and bits:
            needs[part_key][bits.bit_length() - 1] = None
            bits ^= 1 << bits.bit_length() - 1
    listed = list(numbers)
    return {listed[part_key]: {listed[part]: None for part in found} for part_key, found in enumerate(needs)}


def _cycle(needs: Mapping[Key, Collection[Key]]) -> list[Key]:
    """Returns the subgraphs of a cycle, each of which needs the previous one; empty if there is no cycle."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        cycle: list[Key] = error.args[1][:-1]
        first = min(range(len(cycle)), key=lambda k: list(needs).index(cycle[k]))
        return cycle[first:] + cycle[:first]
    return []


def _cycle_error(graph_index: GraphIndex, keys: Mapping[str, Key], cycle: Sequence[Key]) -> PartsError:
    onward = [*cycle[1:], cycle[0]]
    return PartsError(tuple(cycle), tuple(_path(graph_index, keys, *pair) for pair in zip(cycle, onward, strict=True)))


def _path(graph_index: GraphIndex, keys: Mapping[str, Key], start: Key, end: Key) -> tuple[str, ...]:
    """Returns a path of nodes from one subgraph to another without nodes of any other subgraph."""
    paths: list[tuple[str, ...]] = [(name,) for name in graph_index.order if keys.get(name) == start]
    seen: set[str] = set()
    for path in paths:
        for reader in graph_index.consumers[path[-1]]:
            if keys.get(reader) == end and (start != end or len(path) > 1):
                return (*path, reader)
            if reader not in keys and reader not in seen:
                seen.add(reader)
                paths.append((*path, reader))
    raise AssertionError(f"{start!r} does not lead to {end!r}")


def _without_cycles(graph_index: GraphIndex, keys: Mapping[str, Key]) -> dict[str, Key]:
    """Returns the keys, each with the number of times that a path has left its subgraph; breaks all cycles.

    The number never decreases along an edge and increases whenever a path leaves a subgraph. A node that only its own
    subgraph reads has the number of its first reader.
    """
    levels: dict[str, int] = {}
    for name in graph_index.order:
        part_key = keys.get(name)
        levels[name] = max(
            (levels.get(s, 0) + (s in keys and keys[s] != part_key) for s in graph_index.sources[name]), default=0
        )
    for name in reversed(graph_index.order):
        readers = graph_index.consumers[name]
        if name in keys and readers and all(keys.get(reader) == keys[name] for reader in readers):
            levels[name] = max(levels[name], min(levels[reader] for reader in readers))
    return {name: (one_key, levels[name]) for name, one_key in keys.items()}
