"""Rows of a table that is divided by rows: each place looks up, or adds to, the rows of its part.

Source: the vocabulary-parallel embedding of Megatron-LM (Shoeybi et al., 2019).
"""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.node_rules import NodeRule
from autodist.kernels.shard.program import Program
from autodist.kernels.shard.propagate import Axes
from autodist.kernels.shard.reshards import add_index
from autodist.kernels.shard.transfers import State


class OwnRows:
    """The rows of divided tables in a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._is_own: dict[str, str] = {}

    def select(self, rule: NodeRule, axes: Axes, inputs: list[str]) -> list[str]:
        """Makes a node look up, or add to, the rows of a place; returns its inputs.

        Rows of other places are looked up as zeros, so that the sum over the places is the row; added rows are zero.
        An index outside of the table is the error, or the zeros, that it is for the device without a mesh.
        """
        program, name, table = self._program, rule.node.name, rule.operands[0]
        assert table is not None and table.lengths[0] is not None, "a divided dimension has a known length"
        index = add_index(program.editor, f"autodist/rows/{name}/index", axes)
        length = table.lengths[0] // program.mesh.count(axes)
        with program.editor.subgraph(f"rows/{name}") as f:
            rows = program.input(f, inputs[1])
            own = rows - tf.cast(f.input(index, tf.int64, []) * length, rows.dtype)
            is_own = tf.logical_and(own >= 0, own < length)
            is_row = tf.logical_and(rows >= 0, rows < table.lengths[0])
            # An index outside of the table stays as it is: it is outside of each part, too.
            kept = tf.where(is_own, own, tf.where(is_row, tf.zeros_like(own), rows))
            values = None if rule.results else _rows_where(is_own, program.input(f, inputs[2]))
        self._is_own[name] = f.name(is_own)
        if values is None:
            return [inputs[0], f.name(kept), *inputs[2:]]
        return [inputs[0], f.name(kept), f.name(values), *inputs[3:]]

    def mask(self, name: str, state: State) -> None:
        """Replaces the rows of other places that a lookup has returned by zeros."""
        program, found = self._program, f"{name}:0"
        with program.editor.subgraph(f"own_rows/{name}") as f:
            made = f.name(_rows_where(program.input(f, self._is_own[name]), program.input(f, found)))
        program.stands_for(found, made, state)


def _rows_where(is_kept: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns rows, with zeros for those that are not kept."""
    shape = tf.concat([tf.shape(is_kept), tf.ones([tf.rank(rows) - tf.rank(is_kept)], tf.int32)], 0)
    return tf.where(tf.reshape(is_kept, shape), rows, tf.zeros_like(rows))
