"""The builder's view of a captured step: the variables that have a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from autodist.placement.partitioning import shard_name


class DTypeLike(Protocol):
    """The part of tf.DType that strategies use."""

    @property
    def name(self) -> str: ...

    @property
    def is_floating(self) -> bool: ...


class VariableLike(Protocol):
    """The part of graph.Variable that strategies use."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DTypeLike: ...

    @property
    def byte_size(self) -> int: ...


class GradientLike(Protocol):
    """The part of graph.Gradient that strategies use."""

    @property
    def variable(self) -> str: ...

    @property
    def is_sparse(self) -> bool: ...


class GraphLike(Protocol):
    """The part of a Step that strategies use, so that plans can be computed and tested without a graph."""

    @property
    def variables(self) -> Sequence[VariableLike]: ...

    @property
    def gradients(self) -> Sequence[GradientLike]: ...


SMALL_TABLE_BYTES = 64 << 10
"""The bytes of a table that cross a fast network in less time than a request for some of its rows and the answer."""


@dataclass(frozen=True)
class SyncedVariable:
    """A variable with a gradient.

    Attributes:
        name: its name in the captured graph.
        shape: length of each axis.
        byte_size: bytes of the whole variable.
        is_sparse: True if only the rows that a step touches have a gradient. A variable that has a dense and a sparse
            gradient in one step counts as dense, since the whole gradient is sent anyway.
        dtype: name of its elements' dtype ("float32").
        is_floating: True for a floating-point dtype.
        stage: the pipeline stage that the script assigns it to; None: unspecified.
    """

    name: str
    shape: tuple[int, ...]
    byte_size: int
    is_sparse: bool
    dtype: str = "float32"
    is_floating: bool = True
    stage: int | None = None

    @property
    def is_sent_whole(self) -> bool:
        """True if its owner sends its whole value in each step rather than the rows that a worker requests."""
        return not self.is_sparse or self.byte_size <= SMALL_TABLE_BYTES

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; 0 if there is none."""
        return self.byte_size // self.elements if self.elements else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the slice at one index of the first axis."""
        return self.byte_size // self.shape[0] if self.shape and self.shape[0] else self.byte_size

    def first_shard(self, axis: int, length: int) -> SyncedVariable:
        """Returns the first shard along `axis`, with `length` indices, as a variable of its own."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        byte_size = self.element_bytes * prod(shape)
        return replace(self, name=shard_name(self.name, 0), shape=shape, byte_size=byte_size)

    def named(self, name: str) -> SyncedVariable:
        """Returns the same variable under another name."""
        return SyncedVariable(
            name, self.shape, self.byte_size, self.is_sparse, self.dtype, self.is_floating, self.stage
        )


def synced_variables(graph_item: GraphLike) -> tuple[SyncedVariable, ...]:
    """Returns the variables that have a gradient, each once, in the order of their first gradient."""
    by_name = {variable.name: variable for variable in graph_item.variables}
    sparse: dict[str, bool] = {}
    for gradient in graph_item.gradients:
        sparse[gradient.variable] = sparse.get(gradient.variable, True) and gradient.is_sparse
    return tuple(_synced(by_name[name], is_sparse) for name, is_sparse in sparse.items())


def _synced(variable: VariableLike, is_sparse: bool) -> SyncedVariable:
    dtype = variable.dtype
    shape = tuple(variable.shape)
    stage = getattr(variable, "stage", None)  # a stand-in used for planning may lack the attribute
    return SyncedVariable(variable.name, shape, variable.byte_size, is_sparse, dtype.name, dtype.is_floating, stage)
