"""split: parts of a step by a callback, what passes between them, and what depends on what."""

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
"""By which a callback tells one part from another; `None` is no part."""


@dataclass(frozen=True)
class Subgraph:
    """The nodes of a step that have one key.

    Attributes:
        key: what the callback said.
        nodes: their names, each after what it needs of the others.
        copies: nodes of no part that this one has copies of, each after what it needs of the others.
        step: what it is a part of.
    """

    key: Key
    nodes: tuple[str, ...]
    copies: tuple[str, ...]
    step: Step = field(compare=False, repr=False)

    @cached_property
    def takes(self) -> tuple[str, ...]:
        """The tensors of other nodes that it reads, each once, in the order in which it reads them."""
        return tuple(dict.fromkeys(tensor(i) for i in self._from_outside() if not is_control(i)))

    @cached_property
    def waits(self) -> tuple[str, ...]:
        """The other nodes that have to be done before some of its own, by control inputs."""
        return tuple(dict.fromkeys(node_of(i) for i in self._from_outside() if is_control(i)))

    @cached_property
    def gives(self) -> tuple[str, ...]:
        """Its tensors that other nodes read or the step returns, each once, in the order in which they are made."""
        found: list[str] = []
        returned = {tensor(name) for name in self.step.outputs}
        for name in self.nodes:
            read = {t for t in returned if node_of(t) == name}
            read |= {tensor(i) for i in self._read_outside(name) if not is_control(i)}
            found += sorted(read, key=output_index)
        return tuple(found)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Its nodes that run whether or not their tensors are asked for: the step's own, and what others wait for."""
        wanted, nodes = frozenset(self.step.targets), self.step.graph_index.nodes
        return tuple(n for n in self.nodes if n in wanted or (self._is_waited_for(n) and nodes[n].op != "Placeholder"))

    def graph(self) -> PartGraph:
        """The part as a graph that can be run by itself.

        Raises:
            RewriteError: it takes or gives what can be no value: a list of tensors, a handle of something that has no
                name.
        """
        return part_graph(self.step.graph_index, [*self.copies, *self.nodes], self.takes, self.gives, self.targets)

    @cached_property
    def _inside(self) -> frozenset[str]:
        return frozenset(self.nodes)

    def _from_outside(self) -> Iterator[str]:
        """The inputs of its nodes that other nodes give; its copies wait for nothing."""
        graph_index, known = self.step.graph_index, self._inside.union(self.copies)
        for name in (*self.copies, *self.nodes):
            if not known.issuperset(graph_index.sources[name]):
                inputs = (i for i in graph_index.nodes[name].input if node_of(i) not in known)
                yield from (i for i in inputs if name in self._inside or not is_control(i))

    def _is_waited_for(self, name: str) -> bool:
        return any(map(is_control, self._read_outside(name)))

    def _read_outside(self, name: str) -> Iterator[str]:
        """As what other nodes name one of its own."""
        graph_index = self.step.graph_index
        for reader in graph_index.consumers[name]:
            if reader not in self._inside:
                yield from (i for i in graph_index.nodes[reader].input if node_of(i) == name)


@dataclass(frozen=True, eq=False)
class Subgraphs(Mapping[Key, Subgraph]):
    """What `split` makes of a step: its parts by key, in the order in which the step comes to them.

    Attributes:
        needs: for each part those that are to be run before it, whose nodes lead to its own directly or by way of nodes
            of no part.
        order: the parts' keys, each after all that it needs.
        key_of: the part of each node that is in one.
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
        """For each tensor that a part takes, the parts that take it."""
        found: dict[str, list[Key]] = {}
        for key, part in self.items():
            for name in part.takes:
                found.setdefault(name, []).append(key)
        return {name: tuple(keys) for name, keys in found.items()}

    def __str__(self) -> str:
        return "\n".join(line for key in self.order for line in self._told(self[key]))

    def _told(self, part: Subgraph) -> Iterator[str]:
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
    """Parts of a step by a callback: those nodes are one part that have one key.

        parts = split(step, lambda name: name.split("/")[0])     # a part for each scope
        print(parts)                                             # what each takes and gives, and after which it comes
        for key in parts.order:
            graph = parts[key].graph()                           # to be run by itself

    Run one after the other in their order, each given what it takes, the parts do what the step does. A tensor that
    several parts read is given once. Variables, queues and tables are no values: each part that uses one has a
    handle of its own to what all share.

    Args:
        step: captured, or rewritten.
        key: asked once for each node, by its name, in an order in which each comes after what it needs. What it says
            for one node means nothing for others; `None`: the node is in no part, and stands by itself.
        copied: nodes of which each part that reads one has a copy of its own, and of which `key` is not asked.
            By default, handles of what sessions keep by name.
        cut_cycles: whether a part that would need itself is cut where a path leaves it, in place of an error. The keys
            of parts are then pairs of the callback's and a number.

    Raises:
        PartsError: a part needs itself, by way of nodes that are not in it.
        SplitControlFlowError: a loop or a branch of TensorFlow 1 is partly in a part.
    """
    graph_index = step.graph_index
    copied = _handles(graph_index) if copied is None else copied
    told = ((name, key(name)) for name in graph_index.order if name not in copied)
    keys = {name: one for name, one in told if one is not None}
    _refuse_parts_of_control_flow(graph_index, keys)
    needs = _needs(graph_index, keys)
    cycle = _cycle(needs)
    if cycle and not cut_cycles:
        raise _refusal(graph_index, keys, cycle)
    if cut_cycles:
        keys = _in_pieces(graph_index, keys) if cycle else {name: (one, 0) for name, one in keys.items()}
        needs = _needs(graph_index, keys)
    nodes: dict[Key, list[str]] = {one: [] for one in needs}
    for name, one in keys.items():
        nodes[one].append(name)
    parts = {
        one: Subgraph(one, tuple(found), _copies(graph_index, found, copied), step) for one, found in nodes.items()
    }
    order = tuple(graphlib.TopologicalSorter(needs).static_order())
    return Subgraphs({one: frozenset(found) for one, found in needs.items()}, order, keys, parts)


def _handles(graph_index: GraphIndex) -> frozenset[str]:
    """What stands for something that sessions keep by its name."""
    return frozenset(
        n.name for n in graph_index.nodes.values() if "shared_name" in n.attr and not graph_index.data[n.name]
    )


def _copies(graph_index: GraphIndex, nodes: Sequence[str], copied: Collection[str]) -> tuple[str, ...]:
    """The nodes of which a part has copies: what it reads of them after what this needs."""
    levels = [list(dict.fromkeys(s for name in nodes for s in graph_index.data[name] if s in copied))]
    while levels[-1]:
        levels.append([s for name in levels[-1] for s in graph_index.data[name] if s in copied])
    return tuple(dict.fromkeys(name for level in reversed(levels) for name in level))


def _refuse_parts_of_control_flow(graph_index: GraphIndex, keys: Mapping[str, Key]) -> None:
    for name in find_inside(graph_index):
        for reader in graph_index.consumers[name]:
            if keys.get(name) != keys.get(reader):
                raise SplitControlFlowError(name, keys.get(name), reader, keys.get(reader))


def _needs(graph_index: GraphIndex, keys: Mapping[str, Key]) -> dict[Key, dict[Key, None]]:
    """For each part those that lead to it, itself included if it does so by way of others' nodes."""
    numbers: dict[Key, int] = {}
    part_of = {name: numbers.setdefault(one, len(numbers)) for name, one in keys.items()}
    needs: list[dict[int, None]] = [{} for _ in numbers]
    through: dict[str, int] = {}
    """For nodes of no part, as a set of bits, the parts that lead to them."""
    for name in graph_index.order:
        own, bits = part_of.get(name), 0
        for source in graph_index.sources[name]:
            part = part_of.get(source)
            if part is None:
                bits |= through.get(source, 0)
            elif own is None:
                bits |= 1 << part
            elif part != own:
                needs[own][part] = None
        if own is None:
            through[name] = bits
        while own is not None and bits:
            needs[own][bits.bit_length() - 1] = None
            bits ^= 1 << bits.bit_length() - 1
    told = list(numbers)
    return {told[own]: {told[part]: None for part in found} for own, found in enumerate(needs)}


def _cycle(needs: Mapping[Key, Collection[Key]]) -> list[Key]:
    """Parts of which each needs the one before it, and the first the last; none, if there are no such."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        cycle: list[Key] = error.args[1][:-1]
        first = min(range(len(cycle)), key=lambda k: list(needs).index(cycle[k]))
        return cycle[first:] + cycle[:first]
    return []


def _refusal(graph_index: GraphIndex, keys: Mapping[str, Key], cycle: Sequence[Key]) -> PartsError:
    onward = [*cycle[1:], cycle[0]]
    return PartsError(tuple(cycle), tuple(_way(graph_index, keys, *pair) for pair in zip(cycle, onward, strict=True)))


def _way(graph_index: GraphIndex, keys: Mapping[str, Key], start: Key, end: Key) -> tuple[str, ...]:
    """Nodes of which each reads the one before, from one part to another, with none of a part in between."""
    ways: list[tuple[str, ...]] = [(name,) for name in graph_index.order if keys.get(name) == start]
    seen: set[str] = set()
    for way in ways:
        for reader in graph_index.consumers[way[-1]]:
            if keys.get(reader) == end and (start != end or len(way) > 1):
                return (*way, reader)
            if reader not in keys and reader not in seen:
                seen.add(reader)
                ways.append((*way, reader))
    raise AssertionError(f"{start!r} does not lead to {end!r}")


def _in_pieces(graph_index: GraphIndex, keys: Mapping[str, Key]) -> dict[str, Key]:
    """The keys, each with how often a path has left its part: no path comes back to one piece.

    The count never falls along an edge and rises wherever a part is left. What only its own part reads belongs to the
    piece where it is read first.
    """
    levels: dict[str, int] = {}
    for name in graph_index.order:
        own = keys.get(name)
        levels[name] = max(
            (levels.get(s, 0) + (s in keys and keys[s] != own) for s in graph_index.sources[name]), default=0
        )
    for name in reversed(graph_index.order):
        readers = graph_index.consumers[name]
        if name in keys and readers and all(keys.get(reader) == keys[name] for reader in readers):
            levels[name] = max(levels[name], min(levels[reader] for reader in readers))
    return {name: (one, levels[name]) for name, one in keys.items()}
