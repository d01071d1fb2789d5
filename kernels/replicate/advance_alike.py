"""Each replica draws other random numbers, while the stored state of every generator stays alike everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context, Kernel

STRIDE = 1_000_003
"""Distance between the seeds of neighbouring replicas; a prime, so that it does not fall in with other strides."""

_DRAWS = having(Trait.READ) | {"RngReadAndSkip"}
"""What hands out a generator's state: Keras reads it, `tf.random.Generator` reads and advances it in one."""


@dataclass(frozen=True)
class AdvanceAlike(Kernel):
    """A `tf.random.Generator` advances by the same amount on every worker, whatever part of the batch is there.

    It would advance by how many numbers are drawn, and the stored states of workers with parts of unequal size would
    drift apart. Here it advances past what all replicas draw.
    """

    name: ClassVar[str] = "advance-alike"

    def apply(self, item: Step, context: Context) -> Step:
        draws = [node.name for node in item.graph_index.of_op("RngReadAndSkip")]
        if context.is_alone or not draws:
            return item
        editor = StepEditor(item)
        with subgraph(editor, "advance_alike") as f:
            amount = tf.constant(STRIDE * len(context.replicas), tf.uint64)
        for name in draws:
            handle, algorithm, _, *control = editor[name].input
            editor.set_inputs(name, [handle, algorithm, f.name(amount), *control])
        return editor.to_item()


def reads_to_offset(editor: GraphEditor, item: Step) -> list[tuple[str, str]]:
    """Inputs (consumer, tensor) that draw from a generator's state, without those that advance the state."""
    found = []
    for variable in item.variables:
        if not variable.is_seed:
            continue
        touching = sorted(editor.consumers(variable.handle))
        writes = [name for name in touching if editor[name].op.startswith("Assign")]
        advancing = editor.ancestors(writes, control=False) | set(writes)
        for read in touching:
            if editor[read].op in _DRAWS:
                found += [
                    (consumer, tensor(read))
                    for consumer in sorted(editor.consumers(read))
                    if consumer not in advancing and _takes(editor, consumer, read)
                ]
    return found


def _takes(editor: GraphEditor, consumer: str, source: str) -> bool:
    return any(not is_control(i) and node_of(i) == source for i in editor[consumer].input)


@dataclass(frozen=True)
class AddedToDraws:
    """What was put before random draws, so that each replica draws for its own examples.

    Attributes:
        indices: names of constants that are then multiplied by the replica's index.
        nodes: all that was added, with the draw that it is for.
    """

    indices: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: AddedToDraws) -> AddedToDraws:
        return AddedToDraws(self.indices + other.indices, {**self.nodes, **other.nodes})


def draw_apart(editor: GraphEditor, item: Step, reads: Iterable[tuple[str, str]]) -> AddedToDraws:
    """Adds to each read of a state or a seed a constant that is then multiplied by the replica's index.

    Args:
        editor: of the step.
        item: the captured step.
        reads: what draws, and the tensor by which it does.
    """
    indices: list[str] = []
    nodes: dict[str, str] = {}
    for k, (consumer, read) in enumerate(reads):
        dtype = item.spec_of(read).dtype
        with subgraph(editor, f"draw_apart/{k}") as f:
            offset = tf.constant([STRIDE], tf.int64)
            state = f.input(read, dtype, [None])
            drawn = state + tf.pad(tf.cast(offset, dtype), [[0, tf.size(state) - 1]])
        editor.rewire(read, f.name(drawn), [consumer])
        indices.append(node_of(f.name(offset)))
        nodes |= dict.fromkeys(f.made, consumer)
    return AddedToDraws(tuple(indices), nodes)
