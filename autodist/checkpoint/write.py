"""PartWriter: writes values slice by slice, each on the worker that has it, into part files that are merged."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context

from autodist.checkpoint.files import Follow, in_threads, nobody
from autodist.placement.holder import Slice
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.variable_slices import HasSize, VariableSlices, in_groups
from autodist.runtime.variables import StoredVariable

_AT_ONCE = 2
"""Number of files that a worker writes at the same time."""

_RoundsKey = tuple[tuple[tuple[str, StoredVariable], ...], frozenset[int], bool]

WITNESS = "witness"
"""A file that the chief writes; a worker that can read it sees the chief's folder."""


@dataclass(frozen=True)
class _Slice:
    """The part of a variable that one write covers.

    Attributes:
        key: the key of the variable.
        place: TensorFlow's `shape_and_slice`: the shape of the variable, and begin and length on each axis.
        byte_size: the bytes of the value.
        writer: the worker that writes it.
        value: the tensor to write.
        is_copied: True if the writer needs a second copy in memory, since the value is on another device or worker.
    """

    key: str
    place: str
    byte_size: int
    writer: int
    value: tf.Tensor
    is_copied: bool


@dataclass(frozen=True)
class _ProcessValue:
    """A value of this process, with the key of its variable."""

    key: str
    value: tf.Tensor

    @property
    def byte_size(self) -> int:
        return self.value.dtype.size * int(tf.size(self.value))

    @property
    def is_copied(self) -> bool:
        return _is_elsewhere(self.value)


class _Written(HasSize, Protocol):
    """A value that shares a file with others."""

    @property
    def is_copied(self) -> bool: ...


W = TypeVar("W", bound=_Written)


class PartWriter:
    """Writes the values of the session.

    A worker that sees the folder writes its own values. Otherwise the chief does, and receives one group of slices at a
    time. Values in a worker's memory are written without another copy. Two files are written at the same time, since
    most of that is processor work.

    Args:
        graph_runner: runs the writes.
        variable_slices: locates the values.
        file_device: returns the device of a worker that writes its files.
    """

    def __init__(
        self, graph_runner: GraphRunner, variable_slices: VariableSlices, file_device: Callable[[int], str]
    ) -> None:
        self._graph_runner, self._variable_slices, self._file_device = graph_runner, variable_slices, file_device
        with graph_runner.graph.as_default():
            self._folder = tf.compat.v1.placeholder(tf.string, [])
        self._probes: dict[int, tf.Tensor] = {}
        self._rounds: dict[_RoundsKey, list[list[tuple[str, tf.Operation]]]] = {}

    def write(
        self, values: Mapping[str, StoredVariable], folder: str, follow: Follow = nobody, is_still: bool = False
    ) -> list[str]:
        """Writes values, by key, into part files; returns their prefixes.

        Args:
            values: the session's variable for each key.
            folder: an empty folder for the part files, on the chief's machine.
            follow: called with each file of values.
            is_still: True if no step writes the values meanwhile.
        """
        owners = {s.owner for stored in values.values() for s in stored.slices if s.owner}
        key = (tuple(values.items()), frozenset(self._seeing(sorted(owners), folder)), is_still)
        if key not in self._rounds:
            self._rounds.clear()  # those of other placements are not needed again
            self._rounds[key] = self._make(*key)
        for current in self._rounds[key]:
            self._graph_runner.session.run([operation for _, operation in current], {self._folder: folder})
            for name, _ in current:
                follow(_data_of(os.path.join(folder, name)))
        return [os.path.join(folder, name) for current in self._rounds[key] for name, _ in current]

    def _seeing(self, workers: Iterable[int], folder: str) -> Iterator[int]:
        """Yields the workers that see the chief's folder."""
        content = os.urandom(16)
        path = os.path.join(folder, WITNESS)
        with open(path, "wb") as witness:
            witness.write(content)
        for worker in workers:
            if worker not in self._probes:
                with self._graph_runner.graph.as_default(), tf.device(self._file_device(worker)):
                    self._probes[worker] = tf.io.read_file(tf.strings.join([self._folder, WITNESS], "/"))
            try:
                if self._graph_runner.session.run(self._probes[worker], {self._folder: folder}) == content:
                    yield worker
            except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError):
                continue
        os.unlink(path)

    def _make(
        self, values: tuple[tuple[str, StoredVariable], ...], seeing: frozenset[int], is_still: bool
    ) -> list[list[tuple[str, tf.Operation]]]:
        """Returns rounds of part files that are written at the same time, each with its write operation."""
        slices = list(
            itertools.chain.from_iterable(self._slices(key, stored, seeing, is_still) for key, stored in values)
        )
        files: dict[int, list[list[list[_Slice]]]] = {}
        for writer in sorted({s.writer for s in slices}):
            files[writer] = list(_in_rounds(in_groups([s for s in slices if s.writer == writer])))
        rounds = itertools.zip_longest(*files.values(), fillvalue=())
        number = itertools.count()
        return [
            [self._save(f"part-{next(number)}", group) for group in itertools.chain.from_iterable(current)]
            for current in rounds
        ]

    def _slices(self, key: str, stored: StoredVariable, seeing: frozenset[int], is_still: bool) -> Iterator[_Slice]:
        for shard, worker, value in self._variable_slices.slices(stored, is_still):
            size = stored.dtype.size * prod(shard.shape)
            writer = worker if worker in seeing else 0
            is_copied = not is_still or worker != writer or _is_elsewhere(value)
            yield _Slice(key, place_of(stored, shard), size, writer, value, is_copied)

    def _save(self, name: str, group: Sequence[_Slice]) -> tuple[str, tf.Operation]:
        with self._graph_runner.graph.as_default(), tf.device(self._file_device(group[0].writer)):
            operation = tf.raw_ops.SaveV2(
                prefix=tf.strings.join([self._folder, name], "/"),
                tensor_names=[s.key for s in group],
                shape_and_slices=[s.place for s in group],
                tensors=[s.value for s in group],
            )
        return name, operation


def place_of(stored: StoredVariable, one: Slice) -> str:
    """Returns the `shape_and_slice` of a slice for SaveV2 and RestoreV2; empty for a complete variable."""
    if len(stored.slices) == 1:
        return ""
    lengths = " ".join(map(str, stored.shape))
    return f"{lengths} {':'.join(f'{b},{n}' for b, n in zip(one.begin, one.shape, strict=True))}"


def write_from_process(
    values: Iterable[tuple[str, Callable[[], tf.Tensor]]], folder: str, follow: Follow = nobody
) -> list[str]:
    """Writes values of this process, each read just before it is written, into part files; returns their prefixes."""
    numbers = itertools.count()
    prefixes: list[str] = []
    with context.eager_mode():  # in a script with sessions the values would be tensors of its graph
        for current in _in_rounds(in_groups(_ProcessValue(key, read()) for key, read in values)):
            named = [(os.path.join(folder, f"here-{next(numbers)}"), group) for group in current]
            in_threads(_write_group, named, _AT_ONCE)
            for prefix, _ in named:
                follow(_data_of(prefix))
                prefixes.append(prefix)
            del current, named  # frees the values before the next are read
    return prefixes


def _write_group(named: tuple[str, Sequence[_ProcessValue]]) -> None:
    prefix, group = named
    with context.eager_mode(), tf.device("/cpu:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[one.key for one in group],
            shape_and_slices=[""] * len(group),
            tensors=[one.value for one in group],
        )


def _in_rounds(groups: Iterable[list[W]]) -> Iterator[list[list[W]]]:
    """Yields the groups that a worker writes at the same time: two groups, if neither needs a copy."""
    current: list[list[W]] = []
    for group in groups:
        is_copied = any(one.is_copied for one in group)
        if is_copied and current:
            yield current
            current = []
        current.append(group)
        del group  # frees it before the next is read
        if is_copied or len(current) == _AT_ONCE:
            yield current
            current = []
    if current:
        yield current


def _is_elsewhere(value: tf.Tensor) -> bool:
    """Returns True if files cannot be written directly from the value's memory."""
    device = tf.DeviceSpec.from_string(value.device)
    return device.device_type not in (None, "CPU")


def _data_of(part: str) -> str:
    """Returns the file of a part that holds its values."""
    return f"{part}.data-00000-of-00001"


def merge(parts: Sequence[str], prefix: str) -> None:
    """Merges part files on one file system into one checkpoint, without copying their data."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=False)
        )
