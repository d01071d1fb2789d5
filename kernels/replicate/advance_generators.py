"""Draws different random numbers on each replica, and keeps the stored generator states equal on all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep, PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context, Kernel

STRIDE = 1_000_003
"""Distance between the seeds of neighbouring replicas; a prime, so that it does not coincide with other strides."""

_DRAWS = having(Trait.READ) | {"RngReadAndSkip"}
"""Ops that output a generator's state: Keras reads it, `tf.random.Generator` reads and advances it in one op."""


@dataclass(frozen=True)
class AdvanceGenerators(Kernel[PlacedStep, PlacedStep]):
    """Advances each `tf.random.Generator` by the same amount on every worker, whatever its part of the batch.

    Without this kernel, a generator advances by the count of numbers drawn, and the stored states of workers with parts
    of unequal size diverge. With it, a generator advances past the draws of all replicas.
    """

    name: ClassVar[str] = "advance-generators"

    def apply(self, step: PlacedStep, context: Context) -> PlacedStep:
        draws = [node.name for node in step.graph_index.of_op("RngReadAndSkip")]
        if context.single_replica or not draws:
            return step
        editor = StepEditor(step)
        with subgraph(editor, "advance_generators") as f:
            amount = tf.constant(STRIDE * context.group.size, tf.uint64)
        for name in draws:
            handle, algorithm, _, *control = editor[name].input
            editor.set_inputs(name, [handle, algorithm, f.name(amount), *control])
        return editor.to_step()


def reads_to_offset(editor: GraphEditor, step: CapturedStep) -> list[tuple[str, str]]:
    """Returns inputs (consumer, tensor) that draw from a generator's state, except those that advance the state."""
    reads = []
    for variable in step.variables:
        if not variable.is_seed:
            continue
        touching = sorted(editor.consumers(variable.handle))
        writes = [name for name in touching if editor[name].op.startswith("Assign")]
        advancing = editor.ancestors(writes, control=False) | set(writes)
        for read in touching:
            if editor[read].op in _DRAWS:
                reads += [
                    (consumer, tensor(read)) for consumer in sorted(editor.readers(read)) if consumer not in advancing
                ]
    return reads


@dataclass(frozen=True)
class AddedToDraws:
    """Nodes added before random draws, so that each replica draws numbers for its own examples.

    Attributes:
        indices: names of constants to be multiplied by the replica's index.
        nodes: all added nodes, each with the draw that it serves.
    """

    indices: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: AddedToDraws) -> AddedToDraws:
        return AddedToDraws(self.indices + other.indices, {**self.nodes, **other.nodes})


def offset_seeds(editor: GraphEditor, step: CapturedStep, reads: Iterable[tuple[str, str]]) -> AddedToDraws:
    """Adds a constant to each read of a state or seed; it is multiplied by the replica's index later.

    Args:
        editor: of the step.
        step: the captured step.
        reads: pairs of the drawing node and the tensor that it draws from.
    """
    indices: list[str] = []
    nodes: dict[str, str] = {}
    for k, (consumer, read) in enumerate(reads):
        dtype = step.spec_of(read).dtype
        with subgraph(editor, f"offset_draw/{k}") as f:
            offset = tf.constant([STRIDE], tf.int64)
            state = f.input(read, dtype, [None])
            drawn = state + tf.pad(tf.cast(offset, dtype), [[0, tf.size(state) - 1]])
        editor.rewire(read, f.name(drawn), [consumer])
        indices.append(node_of(f.name(offset)))
        nodes |= dict.fromkeys(f.made, consumer)
    return AddedToDraws(tuple(indices), nodes)
