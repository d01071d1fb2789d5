"""Lengths of divided tensors: integers of a program are lengths of whole tensors, except where a part is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, data_inputs, tensor
from autodist.kernels.shard.program import Program
from autodist.kernels.shard.propagate import Axes


class Lengths:
    """The lengths of divided tensors in a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        step = program.step
        batches = [step.spec_of(name).shape[axis] for name, axis in step.batch_axes.items()]
        self._has_open_batch = all(length is None for length in batches)

    def measure(self, node: NodeDef) -> None:
        """Multiplies the lengths of a divided tensor, so that integers in the program are lengths of whole tensors."""
        program = self._program
        for position, name in enumerate(data_inputs(node)):
            state, now = program.state(name), program.current(name)
            if now != name:
                inputs = list(program.editor[node.name].input)
                inputs[position] = as_input(now)
                program.editor.set_inputs(node.name, inputs)
            if state is None or not any(state.axes):
                continue
            measured = f"{node.name}:{position}"
            counts = [program.mesh.count(axes) for axes in state.axes]
            with program.editor.subgraph(f"lengths/{len(program.source_of)}") as f:
                own, known = f.input(measured), self._of_all(name)
                whole = f.name(own * prod(counts) if node.op == "Size" else _filled(own, known, tf.multiply, counts))
            program.stands_for(measured, whole)

    def divided(self, lengths: str, result: str, axes: Sequence[Axes]) -> str:
        """Returns the lengths of a place's part of a result."""
        program = self._program
        if not any(axes):
            return lengths
        counts = [program.mesh.count(own) for own in axes]
        known = [n if n is None else n // count for n, count in zip(self._of_all(result), counts, strict=True)]
        with program.editor.subgraph(f"lengths/{len(program.source_of)}") as f:
            own = f.name(_filled(f.input(lengths), known, tf.math.floordiv, counts))
        program.source_of[own] = tensor(lengths)
        return own

    def _of_all(self, name: str) -> list[int | None]:
        """Returns the lengths of a captured tensor that are the same for each part of the batch; None for others."""
        lengths = list(self._program.rules.static.lengths(name) or ())
        return lengths if self._has_open_batch else [None] * len(lengths)


def _filled(
    lengths: tf.Tensor,
    known: Sequence[int | None],
    change: Callable[[tf.Tensor, int], tf.Tensor],
    counts: Sequence[int],
) -> tf.Tensor:
    """Returns known lengths as constants, from which TensorFlow infers shapes; changes the others by `counts`."""
    if None not in known:
        return tf.constant(known, lengths.dtype)
    found = [change(lengths[k], counts[k]) if n is None else n for k, n in enumerate(known)]
    return tf.stack([tf.cast(n, lengths.dtype) for n in found])
