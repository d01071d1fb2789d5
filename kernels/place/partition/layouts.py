"""Layouts: how the pieces of a tensor, one for each shard of a variable, make up the whole."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.graph.placement import Partitioning


@dataclass(frozen=True)
class Along:
    """The pieces, one after the other along an axis, are the tensor."""

    cut: Partitioning


@dataclass(frozen=True)
class Routed:
    """Rows, each in the piece of the shard that it belongs to.

    Attributes:
        key: tensors of equal key have their rows in the same pieces and the same order.
    """

    key: str


@dataclass(frozen=True)
class RowIds:
    """Which row of a shard each row of the `Routed` tensors of equal `key` belongs to, counted within the shard."""

    key: str
    cut: Partitioning


@dataclass(frozen=True)
class Places:
    """For each row of `Routed(key)` its place among the rows of `Routed(of)`, within one piece."""

    key: str
    of: str


@dataclass(frozen=True)
class Alike:
    """Every piece is the whole tensor."""


Layout = Along | Routed | RowIds | Places | Alike
