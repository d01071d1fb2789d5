"""Restores values: each worker reads its own shards, some groups in parallel, within the memory of the values.

Reading cached files is limited by the time that a thread needs to get fresh memory, so several threads are faster. The
old value of a large variable is freed before the new one is read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

import tensorflow as tf

from autodist.checkpoint.files import in_threads
from autodist.checkpoint.write import place_of
from autodist.compressors.values import ValueCode
from autodist.graph.devices import cpu_of
from autodist.runs.run import Run
from autodist.runtime.deferred_values import defer, discard
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.variable_slices import HasSize, VariableSlices, in_groups
from autodist.runtime.variables import LARGE, StoredVariable

_AT_ONCE = 2
"""Number of groups that a worker reads at the same time."""

_MORE_BYTES = 64 << 20
"""Extra bytes that these groups may use in addition to the values."""


class _Readable(HasSize, Protocol):
    """A value to be read from a checkpoint."""

    @property
    def extra_bytes(self) -> int:
        """Extra bytes in memory during the read, in addition to the value."""


R = TypeVar("R", bound=_Readable)


@dataclass(frozen=True)
class _ShardRead:
    """A shard, or a copy of one, that a worker reads.

    Attributes:
        key: the variable's key in the checkpoint.
        stored: the variable.
        place: the shard's slice of the variable, in TensorFlow's `shape_and_slice` format.
        byte_size: the bytes of its value.
        worker: the worker that holds it.
        handle: the handle of its resource.
    """

    key: str
    stored: StoredVariable
    place: str
    byte_size: int
    worker: int
    handle: tf.Tensor
    code: ValueCode

    @property
    def extra_bytes(self) -> int:
        """Extra bytes: for a slice TensorFlow first reads the saved piece that contains it."""
        return self.stored.dtype.size * prod(self.stored.shape) if self.place else 0


@dataclass(frozen=True)
class KeyedVariable:
    """A variable of this process, to be read from a key of the checkpoint."""

    key: str
    variable: tf.Variable
    extra_bytes = 0

    @property
    def byte_size(self) -> int:
        return int(self.variable.shape.num_elements() or 0) * self.dtype.size

    @property
    def dtype(self) -> tf.DType:
        return self.variable.dtype.base_dtype


def restore_session(run: Run, prefix: str, values: Iterable[tuple[str, StoredVariable]]) -> None:
    """On the chief, restores variables of a run's session; the arguments are those of `SessionReader.read`."""
    file_device = functools.partial(cpu_of, workers=run.workers)
    run.guard(SessionReader(run.graph_runners.control, run.variable_slices, file_device).read, prefix, values)


@dataclass(frozen=True)
class SessionReader:
    """Restores variables of the session on the chief.

    Attributes:
        graph_runner: runs the reads.
        variable_slices: locates the values.
        file_device: returns the device of a worker that reads files.
    """

    graph_runner: GraphRunner
    variable_slices: VariableSlices
    file_device: Callable[[int], str]

    def read(self, prefix: str, values: Iterable[tuple[str, StoredVariable]]) -> None:
        """Restores variables from a checkpoint, while no worker is in a step.

        Args:
            prefix: the prefix of the checkpoint, the same for every worker.
            values: the key of each variable in the checkpoint, and the variable.
        """
        by_worker: dict[int, list[_ShardRead]] = {}
        for read in self._reads(values):
            by_worker.setdefault(read.worker, []).append(read)
        rounds = [list(_rounds(reads)) for reads in by_worker.values()]
        for current in itertools.zip_longest(*rounds, fillvalue=()):
            groups = itertools.chain.from_iterable(current)
            self.graph_runner.session.run([write for group in groups for write in self._writes(prefix, group)])

    def _reads(self, values: Iterable[tuple[str, StoredVariable]]) -> Iterator[_ShardRead]:
        for key, stored in values:
            for shard, worker, handle, code in self.variable_slices.holders(stored):
                size = stored.dtype.size * prod(shard.shape)
                yield _ShardRead(key, stored, place_of(stored, shard), size, worker, handle, code)

    def _writes(self, prefix: str, group: Sequence[_ShardRead]) -> Iterator[tf.Operation]:
        with self.graph_runner.graph.as_default():
            destroyed = []
            for read in group:
                if read.byte_size >= LARGE:
                    with tf.device(read.handle.device):
                        destroyed.append(tf.raw_ops.DestroyResourceOp(resource=read.handle))
            with tf.device(self.file_device(group[0].worker)), tf.control_dependencies(destroyed):
                found = _restored(prefix, [(read.key, read.place, read.stored.dtype) for read in group])
            for read, value in zip(group, found, strict=True):
                with tf.device(read.handle.device):
                    yield tf.raw_ops.AssignVariableOp(resource=read.handle, value=read.code.rounded(value))


def _rounds(reads: Iterable[R]) -> Iterator[list[list[R]]]:
    """Yields the groups that a worker reads at the same time."""
    current: list[list[R]] = []
    more = 0
    for group in in_groups(reads):
        extra_bytes = max(read.extra_bytes for read in group)
        if current and (len(current) == _AT_ONCE or more + extra_bytes > _MORE_BYTES):
            yield current
            current, more = [], 0
        current.append(group)
        more += extra_bytes
    if current:
        yield current


def read_into_process(prefix: str, variables: Iterable[KeyedVariable], defers: bool = False) -> None:
    """Restores variables of this process from a checkpoint.

    Args:
        prefix: the prefix of the checkpoint.
        variables: the variables, with their keys.
        defers: True to read large values when they are needed.
    """
    now: list[KeyedVariable] = []
    for one in variables:
        if defers and one.byte_size >= LARGE:
            defer(one.variable, functools.partial(_value_of, prefix, one))
        else:
            now.append(one)
    for current in _rounds(now):
        _read_together(prefix, current)


def _read_together(prefix: str, groups: Sequence[Sequence[KeyedVariable]]) -> None:
    for one in itertools.chain.from_iterable(groups):
        if one.byte_size >= LARGE:
            _assign(one.variable, tf.zeros([0], one.dtype))
    found = in_threads(functools.partial(_values_of, prefix), groups, _AT_ONCE)
    for group, values in zip(groups, found, strict=True):
        for one, value in zip(group, values, strict=True):
            _assign(one.variable, value)


def _values_of(prefix: str, group: Sequence[KeyedVariable]) -> Sequence[tf.Tensor]:
    with tf.device("/cpu:0"):
        return _restored(prefix, [(one.key, "", one.dtype) for one in group])


def _value_of(prefix: str, one: KeyedVariable) -> tf.Tensor:
    return _values_of(prefix, [one])[0]


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value without a shape check, since `_read_together` frees large variables by an empty value."""
    discard(variable)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _restored(prefix: str, requests: Iterable[tuple[str, str, tf.DType]]) -> Sequence[tf.Tensor]:
    """Returns the values under the given keys, each with its slice and dtype."""
    keys, places, dtypes = zip(*requests, strict=True)
    values: Sequence[tf.Tensor] = tf.raw_ops.RestoreV2(
        prefix=prefix, tensor_names=keys, shape_and_slices=places, dtypes=dtypes
    )
    return values
