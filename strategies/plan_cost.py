"""Predicts the seconds of a step under a plan: computation, updates, and transfers by a network model.

A *load* is an array with a row for each quantity, and columns for workers. Loads of variables add up, so a changed plan
costs one subtraction and one addition. The time of a step is that of the busiest worker: forward and backward pass,
updates, and the processor time of transfers; then the part of the transfers that the backward pass does not hide.
(Source of the form: A. Jayarajan et al., "Priority-based Parameter Propagation", MLSys 2019, for gradients that are
sent while the backward pass goes on.)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from types import MappingProxyType

import numpy as np

from autodist.compressors import Compressor, Dense
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import workers_with_replicas
from autodist.strategies.network_model import NetworkModel
from autodist.strategies.nodes import pieces
from autodist.strategies.subgroups import BUCKET_BYTES, choose_subgroups, group_of, sum_cost
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import AllReduce, LocalSteps, ParameterServer, Subgroups, partitioning_of
from autodist.synchronizers.traffic import INDEX_BYTES

Load = np.ndarray
"""float64, shape (len(Row) + BINS, 2 + workers): see `Column`."""

Entry = tuple[int, int, float]
"""A row and a column of a load, and an amount."""

PACK_BYTES = 256 << 10
"""Smaller tensors for or from one owner share messages of this size."""

BINS = 16
"""Intervals of the step in which gradients become ready."""

UPDATE_RATE = 2e9
"""Assumed bytes per second that an update reads and writes; a measured step replaces it."""

COPY_RATE = 3e9
"""Assumed bytes per second that a worker copies or adds up: gradients, packed or summed, and values that arrive."""

ROW_TIME = 0.8e-6
"""Assumed seconds of a worker for each row of a table that it sends or receives: rows are compared and summed."""

HANDLING = 0.9e-3
"""Assumed seconds from the arrival of a message to the operation that uses it, and on to the next message. The model
`tiny` of `scripts/bench.py --only auto` shows it: a step that waits for two messages takes as much longer."""

CODE_TIME = MappingProxyType({"INT8": 10e-9, "FLOAT8": 50e-9})
"""Assumed seconds in which a worker encodes and decodes an element, by compressor; others only copy it. Measured as
processor time of one core."""

ROWS = 1000
"""Assumed rows of a table that a worker's batch touches, if no batch is known."""


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
class StepFacts:
    """The computation of a step on one worker.

    Attributes:
        seconds: of the forward and backward pass.
        updates: seconds to update a whole variable with the rows of one worker's batch, by the variable's name.
        ready: moment at which the gradient of a variable is ready, as a fraction of `seconds`, by its name.
        rows: distinct rows of each table that a worker's batch touches.
        slots: bytes of the slots of each variable.
        slowness: factor by which each worker takes longer than the chief.
        is_measured: False if `seconds` and `updates` are estimates.
    """

    seconds: float
    updates: Mapping[str, float]
    ready: Mapping[str, float]
    rows: Mapping[str, int]
    slots: Mapping[str, int]
    slowness: np.ndarray
    is_measured: bool

    @classmethod
    def of(cls, spec: ResourceSpec, variables: Iterable[SyncedVariable]) -> StepFacts:
        """Returns the facts that were measured, with estimates in place of missing ones."""
        measured, slots = spec.measurements.step, spec.measurements.slots
        own = {} if measured is None else measured.updates
        rows = {} if measured is None else measured.rows
        updates = {}
        for variable in variables:
            size = variable.byte_size
            touched = _rows(variable, rows) * variable.row_bytes if variable.is_sparse else size
            share = touched / max(size, 1)
            estimate = (2 * touched + 2 * share * slots.get(variable.name, 0)) / UPDATE_RATE
            updates[variable.name] = own.get(variable.name, estimate)
        total = 0.0 if measured is None else measured.seconds
        seconds = max(total - sum(own.values()), 0.0)
        ready = {} if measured is None else _fractions(measured.ready, own, seconds)
        slowness = np.array(spec.measurements.slowness or (1.0,) * len(spec.workers))
        return cls(
            seconds, updates, ready, rows, slots, slowness, measured is not None and not spec.measurements.why_not
        )


def _fractions(ready: Mapping[str, float], updates: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Returns the moments at which gradients are ready, without the updates before them, as fractions of `seconds`.

    An update may run as soon as its gradient is ready, while others are still computed.
    """
    fractions, updated = {}, 0.0
    for name, at in sorted(ready.items(), key=lambda one: one[1]):
        fractions[name] = min(max(at - updated, 0.0) / max(seconds, 1e-9), 1.0)
        updated += updates.get(name, 0.0)
    if fractions and max(ready.values()) <= seconds:  # all updates come last, as behind a global norm
        return {name: min(at / max(seconds, 1e-9), 1.0) for name, at in ready.items()}
    return fractions


def _rows(variable: SyncedVariable, rows: Mapping[str, int]) -> int:
    """Returns the number of rows of a table that one worker's batch touches."""
    return min(rows.get(variable.name, ROWS), variable.shape[0] if variable.shape else 1)


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
class Prediction:
    """The predicted time of a step, and the memory that it needs.

    Attributes:
        computation: seconds of the forward and backward pass.
        updates: seconds of updates and sums of the busiest worker.
        processor: seconds that the busiest worker spends on messages.
        network: seconds of transfers that no computation hides.
        waits: seconds of messages that wait for each other.
        sent: bytes that the busiest worker sends or receives.
        held: bytes of variables, slots and gradients of each worker.
    """

    computation: float
    updates: float
    processor: float
    network: float
    waits: float
    sent: int
    held: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.computation + self.updates + self.processor + self.network + self.waits

    @property
    def terms(self) -> dict[str, float]:
        """The parts of `seconds`, by name."""
        return {
            "computation": self.computation,
            "updates": self.updates,
            "processor time of transfers": self.processor,
            "network": self.network,
            "waits": self.waits,
        }


@dataclass(frozen=True)
class _Sums:
    """The costs of all-reduced gradients for one worker.

    Attributes:
        messages: the messages that it sends and receives.
        calls: the workers that it exchanges them with.
        hops: the messages that wait for each other.
        network: the time of the busiest link, as a part of that without subgroups.
    """

    messages: int
    calls: int
    hops: int
    network: float


@dataclass(frozen=True)
class CostModel:
    """Computes loads of variables, and predictions for sums of loads.

    Attributes:
        spec: the machines, with the measurements.
        facts: the step's computation.
        network: the network.
    """

    spec: ResourceSpec
    facts: StepFacts
    network: NetworkModel
    _known_sums: dict[int, _Sums] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, spec: ResourceSpec, variables: Sequence[SyncedVariable]) -> CostModel:
        """Returns the model for a step with these variables."""
        return cls(spec, StepFacts.of(spec, variables), NetworkModel.of(spec))

    @cached_property
    def _computes(self) -> np.ndarray:
        """1.0 for each worker with replicas, else 0.0."""
        computes = np.zeros(len(self.spec.workers))
        computes[list(workers_with_replicas(self.spec))] = 1.0
        return computes

    @cached_property
    def _count(self) -> int:
        """Number of workers with replicas."""
        return int(self._computes.sum())

    @cached_property
    def _machines(self) -> np.ndarray:
        """Matrix of machines and workers: 1.0 for the workers of a machine."""
        numbers = np.array(self.network.machine_of)
        return (numbers == np.arange(len(self.network.rates))[:, None]).astype(float)

    # -- loads -----------------------------------------------------------------------------------------------------

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
            entries.append((Row.WORK, Column.COMPUTING, 2 * variable.byte_size / COPY_RATE))  # divides and joins
        return entries

    def _all_reduced(self, one: _Piece, way: AllReduce) -> Iterator[Entry]:
        """Yields the entries of a variable, or a shard, whose gradient is all-reduced."""
        piece, count = one.piece, self._count
        update = self.facts.updates[one.variable.name] * one.share
        if way.local is not None:
            yield from self._averaged(one, way, way.local, update)
            return
        if piece.is_sparse:
            touched, indices = self._touched(one)
            sent = (touched + indices) * (count - 1)
            rows_time = ROW_TIME * indices / INDEX_BYTES * count
            yield Row.WORK, Column.COMPUTING, update * self._growth(one.variable) + rows_time
            yield Row.TABLES, Column.COMPUTING, 1.0
            yield Row.HELD, Column.COMPUTING, touched
        else:
            sent = float(way.compressor.bytes_sent(Dense(piece.shape, piece.element_bytes), count))
            yield Row.SUMMED, Column.COMPUTING, float(way.dense_bytes(piece))
            code = _code_time(way.compressor, piece)
            yield Row.WORK, Column.COMPUTING, update + 2 * sent / COPY_RATE + code  # packs and adds up
            yield Row.HELD, Column.COMPUTING, float(piece.byte_size)
        yield Row.TO_ALL, Column.COMPUTING, sent
        yield Row.HELD, Column.ALL, piece.byte_size + self._slots(one)
        yield self._bin(one.variable), Column.COMPUTING, sent

    def _averaged(self, one: _Piece, way: AllReduce, local: LocalSteps, update: float) -> Iterator[Entry]:
        """Yields the entries of a variable, or a shard, that makes local steps."""
        piece, size = one.piece, float(one.piece.byte_size)
        sent = float(way.compressor.bytes_sent(Dense(piece.shape, piece.element_bytes), self._count))
        summed = float(way.compressor.encoded_bytes(Dense(piece.shape, piece.element_bytes)))
        outer = 2 * sent / COPY_RATE + 4 * size / UPDATE_RATE + _code_time(way.compressor, piece)
        yield Row.WORK, Column.COMPUTING, update + outer / local.steps
        yield Row.OUTER, Column.COMPUTING, summed
        yield Row.OUTER_TIMES, Column.COMPUTING, summed * local.steps
        yield Row.OUTER_SENT, Column.COMPUTING, sent / local.steps
        copies = 2 if local.outer_momentum else 1
        yield Row.HELD, Column.ALL, (1 + copies) * size + self._slots(one)
        yield Row.HELD, Column.COMPUTING, self._touched(one)[0] if piece.is_sparse else size

    def _served(self, one: _Piece, way: ParameterServer) -> Iterator[Entry]:
        """Yields the entries of a variable, or a shard, that one worker owns."""
        piece, owner, others = one.piece, Column.FIRST + way.owner, self._count - int(self._computes[way.owner])
        update, size = self.facts.updates[one.variable.name] * one.share, float(piece.byte_size)
        touched, indices = self._touched(one) if piece.is_sparse else (size, 0.0)
        pushed = touched + indices
        if piece.is_sparse:
            rows_time = ROW_TIME * indices / INDEX_BYTES
            yield Row.WORK, owner, update * self._growth(one.variable) + rows_time * others
            yield Row.WORK, Column.COMPUTING, rows_time * (1 if way.local_proxy else 2)
        else:
            yield Row.WORK, owner, update + size * others / COPY_RATE
            code = _code_time(way.value_compressor, piece)
            yield Row.WORK, Column.COMPUTING, size / COPY_RATE + code  # the value that arrives
            yield Row.WORK, owner, -size / COPY_RATE * float(self._computes[way.owner])
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
        rows = _rows(one.variable, self.facts.rows) * (1.0 if one.has_all_rows else one.share)
        return rows * one.piece.row_bytes, rows * INDEX_BYTES

    def _growth(self, variable: SyncedVariable) -> float:
        """Returns the factor by which the distinct rows of all workers' batches exceed those of one."""
        table, rows = max(variable.shape[0] if variable.shape else 1, 1), max(_rows(variable, self.facts.rows), 1)
        return float(table * (1 - (1 - rows / table) ** self._count) / rows)

    def _slots(self, one: _Piece) -> float:
        return self.facts.slots.get(one.variable.name, 0) * one.share

    def _bin(self, variable: SyncedVariable) -> int:
        """Returns the row of the interval at whose end the gradient is ready; without a measurement, the last."""
        return len(Row) + min(int(self.facts.ready.get(variable.name, 1.0) * BINS), BINS - 1)

    # -- predictions -----------------------------------------------------------------------------------------------

    def predict(self, sums: Load) -> Prediction:
        """Returns the prediction for a step with the sum of its variables' loads."""
        load = sums[:, Column.FIRST :] + sums[:, [Column.ALL]] + sums[:, [Column.COMPUTING]] * self._computes
        sent, received = self._bytes(load)
        messages, calls, hops = self._messages(load)
        processor = self.network.byte * (sent + received) + self.network.message * messages + self.network.call * calls
        computation = self._computes * self.facts.seconds * self.facts.slowness
        updates = load[Row.WORK] * self.facts.slowness
        busiest = int(np.argmax(computation + updates + processor))
        return Prediction(
            computation=float(computation[busiest]),
            updates=float(updates[busiest]),
            processor=float(processor[busiest]),
            network=self._exposed(load),
            waits=hops * (self.network.hop + HANDLING),
            sent=int(max(sent.max(), received.max())),
            held=tuple(int(held) for held in load[Row.HELD] + self._computes * self.spec.measurements.activations),
        )

    def _bytes(self, load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes that each worker sends and receives in a step."""
        to_owner, computes = load[Row.PUSHED] + load[Row.ASKED], self._computes
        from_owner = load[Row.PULLED] + load[Row.READ] + load[Row.GATHERED]
        others = self._count - computes
        to_all = load[Row.TO_ALL] + load[Row.OUTER_SENT]
        sent = to_all + computes * (to_owner.sum() - to_owner) + from_owner * others
        received = to_all + computes * (from_owner.sum() - from_owner) + to_owner * others
        return sent, received

    def _messages(self, load: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns the messages and the peers of each worker, and the number of messages that wait for each other."""
        computes, count = self._computes, self._count
        own = load[Row.LARGE] + np.ceil(load[Row.SMALL] / PACK_BYTES)
        messages = 2 * (computes * (own.sum() - own) + own * (count - computes))
        owners = (own > 0).astype(float)
        calls = np.maximum(computes * (owners.sum() - owners), owners * (count - computes))
        messages += 2 * load[Row.TABLES] * (count - 1)
        hops = 0.0
        if owners.any():
            hops = 4 if load[Row.READ].any() else 2
        if load[Row.SUMMED].any() or load[Row.TO_ALL].any():
            sums = self._sums(int(load[Row.SUMMED].max()))
            messages = messages + computes * sums.messages
            calls, hops = np.maximum(calls, computes * sums.calls), max(hops, sums.hops)
        if load[Row.OUTER].any():  # once in some steps
            outer, share = self._sums(int(load[Row.OUTER].max())), load[Row.OUTER].max() / load[Row.OUTER_TIMES].max()
            messages = messages + computes * outer.messages * share
            calls, hops = calls + computes * outer.calls * share, hops + outer.hops * share
        return messages, calls, hops

    def _sums(self, byte_size: int) -> _Sums:
        """Returns the costs of the sums of so many bytes of dense gradients."""
        buckets = ceil(byte_size / BUCKET_BYTES)
        if buckets not in self._known_sums:
            numbers = choose_subgroups(self.spec, byte_size)
            at_once = sum_cost(None, self.spec, byte_size)
            cost = sum_cost(Subgroups.of(numbers, group_of(self.spec)), self.spec, byte_size) if numbers else at_once
            is_pair = self._count == 2
            self._known_sums[buckets] = _Sums(
                messages=(2 if is_pair else 2 * cost.messages) * buckets,
                calls=cost.calls,
                hops=1 if is_pair else cost.hops,
                network=cost.transfer / at_once.transfer if at_once.transfer else 1.0,
            )
        return self._known_sums[buckets]

    def _exposed(self, load: np.ndarray) -> float:
        """Returns the seconds of transfers between machines that no computation hides."""
        rates = np.array(self.network.rates)
        if len(rates) < 2:
            return 0.0
        early = self._wire(self._to_all(load), load[Row.PUSHED], np.zeros_like(load[0]))
        late = self._wire(None, None, load[Row.PULLED])
        before = self._wire(None, load[Row.ASKED], load[Row.READ])
        gathered = self._wire(None, None, load[Row.GATHERED])
        hidden = max(gathered - self.facts.seconds, 0.0)
        outer = self._wire(load[Row.OUTER_SENT], None, np.zeros_like(load[0]))
        return self._after_backward(load, early) + late + before + hidden + outer

    def _to_all(self, load: np.ndarray) -> np.ndarray:
        """Returns the bytes that workers send to all others; in subgroups, fewer of a sum's bytes leave a machine."""
        dense = load[Row.SUMMED] * (2 * (self._count - 1) / max(self._count, 1))
        saved = 1 - self._sums(int(load[Row.SUMMED].max())).network
        return np.maximum(load[Row.TO_ALL] - dense * saved, 0.0)

    def _wire(self, to_all: np.ndarray | None, to_owner: np.ndarray | None, from_owner: np.ndarray) -> float:
        """Returns the seconds that the busiest link between machines needs for some of the transfers."""
        machines, computing, count = self._machines, self._machines @ self._computes, self._count
        away = count - computing
        out = inward = np.zeros(len(self.network.rates))
        if to_all is not None and count > 1:
            out = inward = machines @ to_all * away / (count - 1)
        if to_owner is not None:
            own = machines @ to_owner
            out, inward = out + computing * (own.sum() - own), inward + own * away
        own = machines @ from_owner
        out, inward = out + own * away, inward + computing * (own.sum() - own)
        return float((np.maximum(out, inward) / np.array(self.network.rates)).max())

    def _after_backward(self, load: np.ndarray, wire: float) -> float:
        """Returns the seconds from the end of the backward pass to the arrival of the last gradient."""
        sent = load[len(Row) :].sum(axis=1)
        total = sent.sum()
        if not total or not wire:
            return 0.0
        ready = self.facts.seconds * (np.arange(BINS) + 1) / BINS
        left = np.cumsum(sent[::-1])[::-1] / total * wire
        end = (ready + left)[sent > 0].max()
        return float(max(end - self.facts.seconds, 0.0))


def _code_time(compressor: Compressor, piece: SyncedVariable) -> float:
    """Returns the seconds in which a worker encodes and decodes a gradient or a value."""
    return CODE_TIME.get(compressor.kind, 0.0) * piece.elements
