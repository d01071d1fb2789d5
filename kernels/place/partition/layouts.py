"""Layouts: how the pieces of a tensor, one per shard of a variable, represent the tensor."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.placement.partitioning import Partitioning


@dataclass(frozen=True)
class Along:
    """The tensor is the concatenation of the pieces along an axis."""

    cut: Partitioning


@dataclass(frozen=True)
class Routed:
    """Each row is in the piece of the shard that it belongs to.

    Attributes:
        key: tensors of equal key have their rows in the same pieces and the same order.
    """

    key: str


@dataclass(frozen=True)
class RowIds:
    """The row index within its shard of each row of the `Routed` tensors of equal `key`."""

    key: str
    cut: Partitioning


@dataclass(frozen=True)
class Places:
    """The position, within one piece, of each row of `Routed(key)` among the rows of `Routed(of)`."""

    key: str
    of: str


@dataclass(frozen=True)
class Alike:
    """Every piece is the whole tensor."""


Layout = Along | Routed | RowIds | Places | Alike
