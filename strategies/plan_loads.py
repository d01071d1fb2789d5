"""Loads of variables: for each worker, the bytes, messages, seconds and memory that a variable adds to a step.

Loads of variables add up, so a changed plan costs one subtraction and one addition.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from autodist.compressors import Compressor, Dense
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import workers_with_replicas
from autodist.strategies.nodes import pieces
from autodist.strategies.step_facts import UPDATE_RATE, StepFacts, touched_rows
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import AllReduce, LocalSteps, ParameterServer, partitioning_of
from autodist.synchronizers.traffic import INDEX_BYTES

Load = np.ndarray
"""float64, shape (len(Row) + BINS, 2 + workers): see `Column`."""

Entry = tuple[int, int, float]
"""A row and a column of a load, and an amount."""

PACK_BYTES = 256 << 10
"""Smaller tensors for or from one owner share messages of this size."""

BINS = 16
"""Intervals of the step in which gradients become ready."""

_COPY_RATE = 3e9
"""Assumed bytes per second that a worker copies or adds up: gradients, packed or summed, and values that arrive."""

_ROW_TIME = 0.8e-6
"""Assumed seconds of a worker for each row of a table that it sends or receives: rows are compared and summed."""

_CODE_TIME = MappingProxyType({"INT8": 10e-9, "FLOAT8": 50e-9})
"""Assumed seconds in which a worker encodes and decodes an element, by compressor; others only copy it. Measured as
processor time of one core."""


class Row(enum.IntEnum):
    """The quantities of a load; each is a row of the array."""

    TO_ALL = 0  # bytes that a worker sends to all other computing workers together, during the backward pass
    PUSHED = enum.auto()  # bytes that each other computing worker sends to this owner, during the backward pass
    PULLED = enum.auto()  # bytes that this owner sends to each other computing worker, after the update
    ASKED = enum.auto()  # bytes of indices that each other computing worker sends to this owner, before the step
    READ = enum.auto()  # bytes that this owner sends to each other computing worker, before the step
    GATHERED = enum.auto()  # bytes that this owner sends to each other computing worker, while layers compute
    WORK = enum.auto()  # seconds of updates and sums of this worker
    HELD = enum.auto()  # bytes of variables, slots and gradients on this worker
    SUMMED = enum.auto()  # bytes of dense gradients that are all-reduced
    LARGE = enum.auto()  # tensors that travel alone between this owner and each other computing worker
    SMALL = enum.auto()  # bytes of tensors that share messages between this owner and each other computing worker
    TABLES = enum.auto()  # messages of rows to each other computing worker
    OUTER = enum.auto()  # bytes that outer steps sum
    OUTER_TIMES = enum.auto()  # the same, multiplied by the number of steps from one outer step to the next
    OUTER_SENT = enum.auto()  # bytes that a worker sends to all others in outer steps, divided by that number


class Column(enum.IntEnum):
    """The first columns of a load; those of the single workers follow."""

    COMPUTING = 0  # added for each worker that has replicas
    ALL = enum.auto()  # added for each worker
    FIRST = enum.auto()  # added for the first worker


@dataclass(frozen=True)
class _Piece:
    """A variable, or a shard of one.

    Attributes:
        variable: the whole variable.
        piece: the shard as a variable.
        share: its part of the elements of the variable.
        has_all_rows: True if a row of the variable has elements in it, whatever the row.
    """

    variable: SyncedVariable
    piece: SyncedVariable
    share: float
    has_all_rows: bool


@dataclass(frozen=True)
class Loads:
    """Computes the loads of variables.

    Attributes:
        spec: the machines.
        facts: the step's computation.
    """

    spec: ResourceSpec
    facts: StepFacts

    @cached_property
    def computes(self) -> np.ndarray:
        """1.0 for each worker with replicas, else 0.0."""
        computes = np.zeros(len(self.spec.workers))
        computes[list(workers_with_replicas(self.spec))] = 1.0
        return computes

    @cached_property
    def count(self) -> int:
        """Number of workers with replicas."""
        return int(self.computes.sum())

    def empty(self) -> Load:
        """Returns the load of no variable."""
        return np.zeros((len(Row) + BINS, Column.FIRST + len(self.spec.workers)))

    def entries(self, variable: SyncedVariable, node: strategy_pb2.VariableNode) -> list[Entry]:
        """Returns the load of one variable."""
        partitioning, entries = partitioning_of(node), list[Entry]()
        sizes = (1,) if partitioning is None else partitioning.sizes
        for (piece, synchronizer), size in zip(pieces(variable, node), sizes, strict=True):
            # All rows are in each shard of a partitioning along another axis, with a part of their elements.
            whole_rows = partitioning is None or partitioning.axis > 0
            one = _Piece(variable, piece, size / max(sum(sizes), 1), whole_rows)
            if isinstance(synchronizer, AllReduce):
                entries += self._all_reduced(one, synchronizer)
            elif isinstance(synchronizer, ParameterServer):
                entries += self._served(one, synchronizer)
        if partitioning is not None and not variable.is_sparse:
            entries.append((Row.WORK, Column.COMPUTING, 2 * variable.byte_size / _COPY_RATE))  # divides and joins
        return entries

    def _all_reduced(self, one: _Piece, way: AllReduce) -> Iterator[Entry]:
        """Yields the entries of a variable, or a shard, whose gradient is all-reduced."""
        piece, count = one.piece, self.count
        update = self.facts.updates[one.variable.name] * one.share
        if way.local is not None:
            yield from self._averaged(one, way, way.local, update)
            return
        if piece.is_sparse:
            touched, indices = self._touched(one)
            sent = (touched + indices) * (count - 1)
            rows_time = _ROW_TIME * indices / INDEX_BYTES * count
            yield Row.WORK, Column.COMPUTING, update * self._growth(one.variable) + rows_time
            yield Row.TABLES, Column.COMPUTING, 1.0
            yield Row.HELD, Column.COMPUTING, touched
        else:
            sent = float(way.compressor.bytes_sent(Dense(piece.shape, piece.element_bytes), count))
            yield Row.SUMMED, Column.COMPUTING, float(way.dense_bytes(piece))
            code = _code_time(way.compressor, piece)
            yield Row.WORK, Column.COMPUTING, update + 2 * sent / _COPY_RATE + code  # packs and adds up
            yield Row.HELD, Column.COMPUTING, float(piece.byte_size)
        yield Row.TO_ALL, Column.COMPUTING, sent
        yield Row.HELD, Column.ALL, piece.byte_size + self._slots(one)
        yield self._bin(one.variable), Column.COMPUTING, sent

    def _averaged(self, one: _Piece, way: AllReduce, local: LocalSteps, update: float) -> Iterator[Entry]:
        """Yields the entries of a variable, or a shard, that makes local steps."""
        piece, size = one.piece, float(one.piece.byte_size)
        sent = float(way.compressor.bytes_sent(Dense(piece.shape, piece.element_bytes), self.count))
        summed = float(way.compressor.encoded_bytes(Dense(piece.shape, piece.element_bytes)))
        outer = 2 * sent / _COPY_RATE + 4 * size / UPDATE_RATE + _code_time(way.compressor, piece)
        yield Row.WORK, Column.COMPUTING, update + outer / local.steps
        yield Row.OUTER, Column.COMPUTING, summed
        yield Row.OUTER_TIMES, Column.COMPUTING, summed * local.steps
        yield Row.OUTER_SENT, Column.COMPUTING, sent / local.steps
        copies = 2 if local.outer_momentum else 1
        yield Row.HELD, Column.ALL, (1 + copies) * size + self._slots(one)
        yield Row.HELD, Column.COMPUTING, self._touched(one)[0] if piece.is_sparse else size

    def _served(self, one: _Piece, way: ParameterServer) -> Iterator[Entry]:
        """Yields the entries of a variable, or a shard, that one worker owns."""
        piece, owner, others = one.piece, Column.FIRST + way.owner, self.count - int(self.computes[way.owner])
        update, size = self.facts.updates[one.variable.name] * one.share, float(piece.byte_size)
        touched, indices = self._touched(one) if piece.is_sparse else (size, 0.0)
        pushed = touched + indices
        if piece.is_sparse:
            rows_time = _ROW_TIME * indices / INDEX_BYTES
            yield Row.WORK, owner, update * self._growth(one.variable) + rows_time * others
            yield Row.WORK, Column.COMPUTING, rows_time * (1 if way.local_proxy else 2)
        else:
            yield Row.WORK, owner, update + size * others / _COPY_RATE
            code = _code_time(way.value_compressor, piece)
            yield Row.WORK, Column.COMPUTING, size / _COPY_RATE + code  # the value that arrives
            yield Row.WORK, owner, -size / _COPY_RATE * float(self.computes[way.owner])
        if way.synchrony.runs_ahead:  # the next step does not wait for it
            yield Row.GATHERED, owner, pushed + (way.value_bytes(piece) if way.local_proxy else touched)
        else:
            yield Row.PUSHED, owner, pushed
            yield self._bin(one.variable), Column.COMPUTING, pushed
            if way.gathered_with and not piece.is_sparse:
                yield Row.GATHERED, owner, 2 * size
            else:
                value = float(way.value_bytes(piece))
                yield Row.PULLED if way.local_proxy else Row.READ, owner, value if way.local_proxy else touched
                yield Row.ASKED, owner, 0.0 if way.local_proxy else indices
        if way.local_proxy:
            yield Row.HELD, Column.ALL, size
            yield Row.HELD, owner, -size
        yield Row.HELD, owner, size + self._slots(one)
        yield Row.HELD, Column.COMPUTING, 0.0 if way.gathered_with else touched
        is_alone = piece.is_sparse or piece.byte_size >= PACK_BYTES
        yield Row.LARGE if is_alone else Row.SMALL, owner, 1.0 if is_alone else size

    def _touched(self, one: _Piece) -> tuple[float, float]:
        """Returns the bytes of the rows of a table, or a shard, that a worker's batch touches, and of their indices."""
        rows = touched_rows(one.variable, self.facts.rows) * (1.0 if one.has_all_rows else one.share)
        return rows * one.piece.row_bytes, rows * INDEX_BYTES

    def _growth(self, variable: SyncedVariable) -> float:
        """Returns the factor by which the distinct rows of all workers' batches exceed those of one."""
        table = max(variable.shape[0] if variable.shape else 1, 1)
        rows = max(touched_rows(variable, self.facts.rows), 1)
        return float(table * (1 - (1 - rows / table) ** self.count) / rows)

    def _slots(self, one: _Piece) -> float:
        return self.facts.slots.get(one.variable.name, 0) * one.share

    def _bin(self, variable: SyncedVariable) -> int:
        """Returns the row of the interval at whose end the gradient is ready; without a measurement, the last."""
        return len(Row) + min(int(self.facts.ready.get(variable.name, 1.0) * BINS), BINS - 1)


def _code_time(compressor: Compressor, piece: SyncedVariable) -> float:
    """Returns the seconds in which a worker encodes and decodes a gradient or a value."""
    return _CODE_TIME.get(compressor.kind, 0.0) * piece.elements
