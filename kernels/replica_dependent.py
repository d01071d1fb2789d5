"""Finds the nodes that differ between replicas: a batch, a gradient's weight or a random draw reaches them.

Values flow through data inputs and through variables: a variable written by a replica differs until it is reduced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autodist.graph.control_flow import find_inside
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.stages import Stages
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, CapturedStep, Step


def sources_of(step: CapturedStep, seeds: Iterable[str], draws: Iterable[str]) -> list[str]:
    """Returns the nodes at which differences between replicas originate.

    Args:
        step: the captured step.
        seeds: cotangents that gradients start from; each replica has its own.
        draws: nodes that draw from a generator's state; each replica draws its own numbers.
    """
    return [*map(node_of, step.batch_axes), *(seed for seed in seeds if seed in step.graph_index.nodes), *draws]


def sources_of_replicas(step: Step, graph_index: GraphIndex) -> list[str]:
    """Returns the nodes of a replicated step at which differences between replicas originate."""
    named = {node_of(name) for name in (*step.batch_axes, EXAMPLES, ALL_EXAMPLES)}
    named |= {seed for call in step.gradient_calls for seed in call.seeds}
    drawn = {node.name for node in graph_index.having(Trait.SEEDED)}
    return [name for name in graph_index.nodes if name in named or name in drawn]


def find_replica_dependent(step: CapturedStep, sources: Iterable[str], stages: Stages) -> frozenset[str]:
    """Returns the names of the nodes that need one copy per replica.

    Args:
        step: the captured step.
        sources: names of nodes whose outputs differ between replicas.
        stages: the stages of the step; `stages.once` run once, whatever reaches them.
    """
    found = _reached(step.graph_index, set(sources), stages.once)
    while late := find_late_reads(stages, found) - found:
        found = _reached(step.graph_index, found | late, stages.once)
    return frozenset(found)


def find_late_reads(stages: Stages, replica_dependent: Collection[str]) -> set[str]:
    """Returns the reads, within the compute part, of variables written there before with replica-dependent values."""
    written = {w for w in stages.state_writes if w in replica_dependent}
    handles = {handle for w in written for handle in stages.effects[w].writes}
    return {
        reader
        for handle in handles
        for reader in stages.readers(handle)
        if reader not in stages.once and not written.isdisjoint(stages.writes_before(reader, handle))
    }


def after_loops(graph_index: GraphIndex, names: Iterable[str]) -> list[str]:
    """Replaces nodes inside v1 loops by the exits of those loops, for use as control inputs.

    A node outside a loop cannot wait for a node inside; the exit of a loop represents all nodes in it.
    """
    if not graph_index.having(Trait.ENTER):
        return list(names)
    frames = _frames(graph_index)
    leaving: dict[str, list[str]] = {}
    for node in graph_index.having(Trait.EXIT):
        frame = frames.get(node.name, "")
        if any(frames.get(consumer) != frame for consumer in graph_index.consumers[node.name]):
            leaving.setdefault(frame, []).append(node.name)
    found = [one for name in names for one in (leaving.get(frames[name], []) if name in frames else [name])]
    return list(dict.fromkeys(found))


def _reached(graph_index: GraphIndex, sources: set[str], outside: Collection[str]) -> set[str]:
    more, found = (
        {*sources, *(node.name for node in graph_index.having(Trait.SEEDED))} - {*outside} | sources,
        set[str](),
    )
    inside = set(find_inside(graph_index))
    while more - found:
        found |= more
        for name in graph_index.order:
            before = (  # a node inside a conditional or loop may not run on all replicas
                graph_index.sources[name] if name in inside else graph_index.data[name]
            )
            if not found.isdisjoint(before) and name not in outside:
                found.add(name)
        more = _whole_loops(graph_index, found, outside) | _shared_stacks(graph_index, found)
    return found


def _whole_loops(graph_index: GraphIndex, replica_dependent: set[str], outside: Collection[str]) -> set[str]:
    """Returns all nodes of the v1 loops that hold a replica-dependent node: loops are copied whole or not at all."""
    if not graph_index.having(Trait.ENTER):
        return set()
    frames = _frames(graph_index)
    copied = {frames[name] for name in replica_dependent if name in frames}
    return {name for name, frame in frames.items() if frame in copied and name not in outside}


def _shared_stacks(graph_index: GraphIndex, replica_dependent: set[str]) -> set[str]:
    """Returns TensorFlow 1 stacks and arrays that replica-dependent nodes use: each replica has its own."""
    return {
        node.name
        for node in graph_index.having(Trait.STACK)
        if not replica_dependent.isdisjoint(graph_index.consumers[node.name])
    }


def _frames(graph_index: GraphIndex) -> dict[str, str]:
    """Returns, for each node in a v1 loop, the frame name of its outermost loop."""
    inside: dict[str, tuple[str, ...]] = {}
    for name in graph_index.order:
        node = graph_index.nodes[name]
        stack: tuple[str, ...] = ()
        for source in graph_index.sources[name]:
            stack = max(stack, inside.get(source, ()), key=len)
        if node.op in having(Trait.ENTER):
            stack = (*stack, node.attr["frame_name"].s.decode())
        inside[name] = stack[:-1] if node.op in having(Trait.EXIT) else stack
    found = {name: stack[0] for name, stack in inside.items() if stack}
    exits = {n.name: node_of(n.input[0]) for n in graph_index.having(Trait.EXIT)}
    found.update({name: found[source] for name, source in exits.items() if source in found})
    return found
