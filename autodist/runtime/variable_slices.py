"""Variable slices: reads and writes the values of variables wherever the session stores them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from autodist.compressors.values import ValueCode
from autodist.graph.devices import Home
from autodist.placement.holder import Copy, Holder, Slice
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.heaps import FreedBytes
from autodist.runtime.variables import StoredVariable, TrackedVariable

_Key = tuple[str, Holder]
"""A variable's name and holder in the session."""
_Writes = list[tuple[Slice, tf.Tensor, list[tf.Operation]]]
"""Slices of a value, each with its placeholder and the operations that write it."""


GROUP_BYTES = 16 << 20
"""Values are transferred in groups of about this size, since values in flight are held in memory twice."""


class HasSize(Protocol):
    """An object with a size, transferred together with others."""

    @property
    def byte_size(self) -> int: ...


T = TypeVar("T", bound=HasSize)


class HasStored(HasSize, Protocol):
    """A variable of the session."""

    @property
    def stored(self) -> StoredVariable: ...


class HasValue(HasStored, Protocol):
    """A value for a variable of the session."""

    def read(self) -> Any: ...


V = TypeVar("V", bound=HasValue)


def in_groups(values: Iterable[T]) -> Iterator[list[T]]:
    """Yields groups of values for one transfer each, in order; reads the next value once the last group was taken."""
    group: list[T] = []
    size = 0
    for value in values:
        group.append(value)
        size += value.byte_size
        del value  # the consumer of a group may free it before the next value is read
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class VariableSlices:
    """Transfers values between the script's variables and the session's, on all workers.

    Args:
        graph_runner: runs the transfers.
        worker: index of this worker.
        workers: number of workers.
        home: returns the device on which a worker keeps a variable of a dtype.
    """

    def __init__(self, graph_runner: GraphRunner, worker: int, workers: int, home: Home) -> None:
        self._graph_runner = graph_runner
        self._worker, self._workers, self._home = worker, workers, home
        self._reads: dict[_Key, tf.Tensor] = {}
        self._copies: dict[tuple[_Key, int], tf.Tensor] = {}
        self._writes: dict[tuple[_Key, tuple[int, ...]], _Writes] = {}

    def prepare(self, values: Iterable[HasStored], workers: Collection[int] | None = None) -> None:
        """Adds all nodes that `set` of these values needs at once: TensorFlow prepares a grown graph again."""
        for value in values:
            self._write(value.stored, self._all(workers))

    def set(
        self,
        values: Sequence[V],
        then: Callable[[V], None] = lambda value: None,
        workers: Collection[int] | None = None,
    ) -> None:
        """On the chief, sets the values of some variables on all their holders; no worker may be in a step.

        Args:
            values: the values, with their variables; each is read in its turn.
            then: called with each value once it is set.
            workers: holders to set; None: all.
        """
        self.prepare(values, workers)
        freed = FreedBytes()
        for some in in_groups(values):
            arrays: dict[tf.Tensor, np.ndarray] = {}
            operations: list[tf.Operation] = []
            for value in some:
                writes = self._write(value.stored, self._all(workers))
                arrays |= _slices_of(value, writes)
                operations += [op for _, _, ops in writes for op in ops]
            self._graph_runner.session.run(operations, arrays)
            del arrays  # before the next values are read
            for value in some:
                then(value)
                freed.add(value.byte_size)

    def pull(self, variables: Sequence[TrackedVariable]) -> None:
        """Updates the script's variables to the session's values."""
        for some in in_groups(variables):
            values = self._graph_runner.session.run([self._read(t) for t in some])
            for tracked, value in zip(some, values, strict=True):
                tracked.write(value)
                tracked.is_behind = False

    def read(self, kept: StoredVariable, worker: int) -> np.ndarray:
        """Returns the value of a variable in one slice, as one of its holders has it."""
        key = (kept.shared_name, kept.holder), worker
        if key not in self._copies:
            _, _, handle, _ = next(held for held in self.holders(kept) if held[1] == worker)
            with self._graph_runner.graph.as_default(), self.on(kept, worker, kept.slices[0]):
                self._copies[key] = tf.raw_ops.ReadVariableOp(resource=handle, dtype=kept.dtype)
        value: np.ndarray = self._graph_runner.session.run(self._copies[key])
        return value

    def named_holders(self, one: Slice) -> Iterator[tuple[int, Copy]]:
        """Yields every worker that holds a slice or a copy, with that, under the name there as the suffix."""
        for worker in range(self._workers):
            if worker in one.group:
                yield worker, Copy(one.name)
            for copy in Copy.held_beside(one.name, one.copies, worker, one.owner):
                yield worker, copy

    def slices(self, kept: StoredVariable, is_still: bool = False) -> Iterator[tuple[Slice, int, tf.Tensor]]:
        """Yields each slice of a variable, a worker that holds it (this one if all do), and a tensor that reads it.

        Args:
            kept: the variable.
            is_still: True if it is not written meanwhile, so that a variable with sparse updates is read without a
                copy. (After the first sparse update, TensorFlow copies on read; the next update enables that again.)
        """
        for one in kept.slices:
            worker = self._worker if one.owner is None else one.owner
            with self._graph_runner.graph.as_default(), self.on(kept, worker, one):
                handle = self._handle(kept, one, one.name)
                first = [tf.raw_ops.DisableCopyOnRead(resource=handle)] if is_still else []
                with tf.control_dependencies(first):
                    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=kept.dtype)
            yield one, worker, read  # outside of the graph context, which is not the caller's

    def holders(self, kept: StoredVariable) -> Iterator[tuple[Slice, int, tf.Tensor, ValueCode]]:
        """Yields each slice of a variable and each copy of one.

        Each comes with the worker that holds it, its handle there, and the code by which the slice's value is rounded.
        """
        for one in kept.slices:
            for worker, held in self.named_holders(one):
                with self._graph_runner.graph.as_default(), self.on(kept, worker, one):
                    handle = self._handle(kept, one, held.suffix)
                yield one, worker, handle, ValueCode.of(held.encoding, one.shape, kept.dtype)

    @staticmethod
    def _handle(kept: StoredVariable, one: Slice, name: str) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=kept.dtype, shape=one.shape, shared_name=kept.shared_name + name)

    def on(self, kept: StoredVariable, worker: int, one: Slice | None = None) -> AbstractContextManager[None]:
        """Context of the device on which a worker keeps a variable, or a slice of one."""
        device = None if one is None else one.device(worker)
        dtype = tf.int64 if kept.on_cpu else kept.dtype  # counters stay on the CPU
        return tf.device(self._home(worker, dtype, device))

    def _read(self, tracked: TrackedVariable) -> tf.Tensor:
        key = (tracked.shared_name, tracked.holder)
        if key not in self._reads:
            parts = [read for _, _, read in self.slices(tracked.stored)]
            with self._graph_runner.graph.as_default(), self.on(tracked.stored, self._worker):
                self._reads[key] = _join(parts, tracked.holder)
        return self._reads[key]

    def _all(self, workers: Collection[int] | None) -> tuple[int, ...]:
        return tuple(range(self._workers) if workers is None else sorted(workers))

    def _write(self, kept: StoredVariable, workers: tuple[int, ...]) -> _Writes:
        key = ((kept.shared_name, kept.holder), workers)
        if key not in self._writes:
            with self._graph_runner.graph.as_default():
                slices = [(one, self._write_slice(kept, one, workers)) for one in kept.slices]
            self._writes[key] = [(one, *made) for one, made in slices if made is not None]
        return self._writes[key]

    def _write_slice(
        self, kept: StoredVariable, one: Slice, workers: tuple[int, ...]
    ) -> tuple[tf.Tensor, list[tf.Operation]] | None:
        """Returns a placeholder for a slice, and the operations that write it; None if no worker holds it."""
        holders = [(worker, held) for worker, held in self.named_holders(one) if worker in workers]
        if not holders:
            return None
        with self.on(kept, self._worker):
            placeholder = tf.compat.v1.placeholder(kept.dtype, one.shape)
            # The fed array is the memory of the script's variable. With this copy the session releases that memory, and
            # the next group's copies can reuse it.
            value = tf.raw_ops.DeepCopy(x=placeholder)
            encodings = {held.encoding for _, held in holders}
            values = {each: ValueCode.of(each, one.shape, kept.dtype).rounded(value) for each in sorted(encodings)}
        operations = []
        for worker, held in holders:
            with self.on(kept, worker, one):
                handle = self._handle(kept, one, held.suffix)
                operations.append(tf.raw_ops.AssignVariableOp(resource=handle, value=values[held.encoding]))
        return placeholder, operations


def _slices_of(value: HasValue, writes: _Writes) -> dict[tf.Tensor, np.ndarray]:
    """Returns the slices of a value by the placeholders that take them; the value is read if there are any."""
    if not writes:
        return {}
    whole = np.asarray(value.read())
    return {placeholder: whole[one.place] if one.name else whole for one, placeholder, _ in writes}


def _join(parts: Sequence[tf.Tensor], holder: Holder) -> tf.Tensor:
    """Returns the value that slices make up: those that differ along later axes only are joined first."""
    if len(parts) == 1:
        return parts[0]
    begins = [one.begin for one in holder.slices]
    for axis in reversed(range(len(begins[0]))):
        joined: dict[tuple[int, ...], list[tf.Tensor]] = {}
        for begin, part in zip(begins, parts, strict=True):
            joined.setdefault((*begin[:axis], *begin[axis + 1 :]), []).append(part)
        if len(joined) == len(parts):
            continue
        begins = [(*rest[:axis], 0, *rest[axis:]) for rest in joined]
        parts = [tf.concat(some, axis) for some in joined.values()]
    return parts[0]
