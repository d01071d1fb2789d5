"""Transfers among the places of one worker: arithmetic on their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist.graph.names import node_of
from autodist.graph.recomputation import RESHARD
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.shard.reshards import Reshard, ReshardKind
from autodist.kernels.sums import ordered_sum

_MERGED = {"max": tf.maximum, "min": tf.minimum}
_MERGED_BOOLEANS = {"max": tf.logical_or, "min": tf.logical_and}


def reduced(parts: Sequence[tf.Tensor], how: str) -> tf.Tensor:
    """Reduces parts in their order; `how` is "sum", "mean", "max" or "min"."""
    if how in _MERGED:
        merge = (_MERGED_BOOLEANS if parts[0].dtype == tf.bool else _MERGED)[how]
        found = parts[0]
        for part in parts[1:]:
            found = merge(found, part)
        return found
    total = ordered_sum(list(parts))
    return total / tf.cast(len(parts), total.dtype) if how == "mean" else total


@dataclass(frozen=True)
class Row:
    """The places of one worker in a row of a mesh.

    Attributes:
        size: the number of places of the row.
        ranks: the ranks of the worker's places in it, in rising order.
    """

    size: int
    ranks: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """True if the row has places of this worker alone."""
        return len(self.ranks) == self.size

    def filled(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns as many parts as the row has places: this worker's, then others with the specs of the first."""
        return [*parts, *[parts[0]] * (self.size - len(self.ranks))]

    def own(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the pieces for this worker's places; `pieces` are those of all places, or specs of them."""
        return [pieces[rank] for rank in self.ranks] if self.is_local else list(pieces[: len(self.ranks)])


def add_row(
    editor: StepEditor[PlacedStep], label: str, values: Sequence[str], reshard: Reshard, row: Row
) -> tuple[list[str], tuple[str, ...]]:
    """Adds a transfer of a row: arithmetic, or a reshard node if other workers have places in the row.

    Such a node has the parts of this worker as its first inputs, or their sum as its only one. It makes a tensor for
    all of the worker's places, or one for each.

    Args:
        editor: the editor.
        label: of the new nodes.
        values: the tensor of each of this worker's places.
        reshard: the transfer.
        row: the places.

    Returns:
        The tensor for each of this worker's places, and the new nodes.
    """
    with editor.subgraph(f"row/{label}") as f:
        made, node = _ROWS[reshard.kind]([f.input(value) for value in values], reshard, row)
        names = [f.name(one) for one in made]
        exchange = f.name(node.op)
    if not row.is_local and reshard.kind is not ReshardKind.SLICE:
        # A mean has been divided by the size of the row.
        how = "sum" if reshard.how == "mean" else reshard.how
        editor[node_of(exchange)].attr[RESHARD].s = replace(reshard, how=how).to_text().encode()
    return names * (len(values) // len(names)), f.made


_Made = tuple[list[tf.Tensor], tf.Tensor]
"""The results for all places together or for each, and an output of the op that other workers may take part in."""


def _slice(parts: list[tf.Tensor], how: Reshard, row: Row) -> _Made:
    """Takes the pieces of a whole tensor, which all places share."""
    pieces = tf.split(parts[0], row.size, how.dimension)
    return [pieces[rank] for rank in row.ranks], pieces[0]


def _all_gather(parts: list[tf.Tensor], how: Reshard, row: Row) -> _Made:
    whole = tf.concat(row.filled(parts), how.dimension)
    return [whole], whole


def _all_reduce(parts: list[tf.Tensor], how: Reshard, row: Row) -> _Made:
    if row.is_local:
        total = reduced(parts, how.how)
    elif how.how == "mean":
        total = ordered_sum(parts) / tf.cast(row.size, parts[0].dtype)
    else:
        total = reduced(parts, how.how)
    made = tf.identity(total)
    return [made], made


def _reduce_scatter(parts: list[tf.Tensor], how: Reshard, row: Row) -> _Made:
    pieces = tf.split(ordered_sum(parts), row.size, how.dimension)
    return row.own(pieces), pieces[0]


def _all_to_all(parts: list[tf.Tensor], how: Reshard, row: Row) -> _Made:
    pieces = tf.split(tf.concat(row.filled(parts), how.dimension), row.size, how.split)
    return row.own(pieces), pieces[0]


_ROWS: Mapping[ReshardKind, Callable[[list[tf.Tensor], Reshard, Row], _Made]] = {
    ReshardKind.SLICE: _slice,
    ReshardKind.ALL_GATHER: _all_gather,
    ReshardKind.ALL_REDUCE: _all_reduce,
    ReshardKind.REDUCE_SCATTER: _reduce_scatter,
    ReshardKind.ALL_TO_ALL: _all_to_all,
}
