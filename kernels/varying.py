"""Which nodes differ between replicas: those that a batch, a gradient's weight or a random draw reaches by data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import tensorflow as tf

from autodist.graph.names import is_control, node_of
from autodist.graph.order import topological

# Stateful ops that draw numbers from the seeds in their attributes.
RANDOM = frozenset(
    {
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal",
        "Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "RandomShuffleQueue",
        "UniformCandidateSampler", "LogUniformCandidateSampler", "LearnedUnigramCandidateSampler",
        "AllCandidateSampler", "FixedUnigramCandidateSampler", "ThreadUnsafeUnigramCandidateSampler",
    }
)  # fmt: skip

_LOOPS = ("Enter", "RefEnter")


def find_varying(
    graph_def: tf.compat.v1.GraphDef, sources: Iterable[str], outside: Collection[str], order: Mapping[str, int]
) -> frozenset[str]:
    """Names of the nodes that every replica needs a copy of.

    Args:
        graph_def: the captured step.
        sources: names of nodes whose outputs differ between replicas.
        outside: nodes that run once whatever reaches them.
        order: position of each node in a topological order.
    """
    found = set(sources)
    for node in sorted(graph_def.node, key=lambda n: order[n.name]):
        if node.name in outside:
            continue
        if node.op in RANDOM or any(node_of(i) in found for i in node.input if not is_control(i)):
            found.add(node.name)
    if any(node.op in _LOOPS for node in graph_def.node):
        found |= _whole_loops(graph_def, found, outside)
    return frozenset(found)


def _whole_loops(graph_def: tf.compat.v1.GraphDef, varying: set[str], outside: Collection[str]) -> set[str]:
    """All nodes of the v1 loops that hold a varying node: a loop's frame is copied whole or not at all."""
    frames = _frames(graph_def)
    copied = {frames[name] for name in varying if name in frames}
    return {name for name, frame in frames.items() if frame in copied and name not in outside}


def _frames(graph_def: tf.compat.v1.GraphDef) -> dict[str, str]:
    """The outermost v1 loop that each node stands in, by the name of its frame."""
    inside: dict[str, tuple[str, ...]] = {}
    for node in topological(graph_def):
        stack: tuple[str, ...] = ()
        for i in node.input:
            stack = max(stack, inside.get(node_of(i), ()), key=len)
        if node.op in _LOOPS:
            stack = (*stack, node.attr["frame_name"].s.decode())
        inside[node.name] = stack[:-1] if node.op in ("Exit", "RefExit") else stack
    found = {name: stack[0] for name, stack in inside.items() if stack}
    exits = {n.name: node_of(n.input[0]) for n in graph_def.node if n.op in ("Exit", "RefExit")}
    found.update({name: found[source] for name, source in exits.items() if source in found})
    return found
