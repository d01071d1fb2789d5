"""Global batches from which a worker reads only its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from autodist.reading.data_sets import reading

if TYPE_CHECKING:
    from autodist.reading.file_sharding import FileSharding


class Slices:
    """Returns the examples of a batch that belong to this worker, and records its use.

    Args:
        share: maps a number of examples to the first index of this worker and one past its last.
    """

    def __init__(self, share: Callable[[int], tuple[int, int]]) -> None:
        self._share, self._requests = share, 0

    def __call__(self, start: int, stop: int) -> slice:
        """Returns this worker's slice of the examples from `start` to `stop`.

        Raises:
            ValueError: there are no examples.
        """
        if stop <= start:
            raise ValueError(f"a batch of the examples from {start} to {stop} is empty.")
        self._requests += 1
        first, end = self._share(stop - start)
        return slice(start + first, start + end)

    def are_used_by(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Returns the result of `call`, and True if `call` requested a slice."""
        before = self._requests
        return call(), self._requests > before


OwnRows = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Maps the number of examples in a global batch to the first row that a worker reads and their number; both int64."""


@dataclass(frozen=True)
class Reading:
    """The rule by which a worker reads its own part of global batches.

    Attributes:
        rows: the rows of a batch to read; None: complete batches, unless the script returns only the worker's part.
        workers: number of workers.
        slices: used by a script that returns only the worker's part.
        files: shards the files of data sets instead of the rows of batches; None: files are not sharded.
    """

    rows: OwnRows | None
    workers: int
    slices: Slices
    files: FileSharding | None = None


class PartOfBatch(NamedTuple):
    """A worker's part of a global batch.

    Attributes:
        examples: number of examples in the global batch; int64.
        order: equal on all workers that read in one order, for example the numbers of the batch's examples.
        rows: this worker's rows.
    """

    examples: tf.Tensor
    order: tf.Tensor
    rows: Any


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch; a worker receives a part of it.

    Attributes:
        examples: number of examples.
        alike: arrays that must be equal on every worker, by name.
    """

    examples: int
    alike: Sequence[tuple[str, Any]]


ReadBatch = tuple[Any, GlobalBatch | None]
"""An input of a step, and the global batch that it is this worker's part of; None: it is the complete batch."""


class ShardedBatches:
    """Iterates over this worker's rows of each global batch; each iteration starts at the first batch.

    Args:
        counted: a data set whose elements are `PartOfBatch`.
        alike: arrays that must be equal on every worker, by name.
    """

    def __init__(self, counted: tf.data.Dataset, alike: Sequence[tuple[str, Any]] = ()) -> None:
        self._counted, self._alike = counted, alike

    def __iter__(self) -> ShardedIterator:
        return ShardedIterator(iter(self._counted), self._alike)


class ShardedIterator:
    """Yields this worker's rows of the global batches, one after the other.

    Attributes:
        global_batch: the global batch of the last rows; None: no rows were read yet.
    """

    def __init__(self, counted: Iterator[PartOfBatch], alike: Sequence[tuple[str, Any]]) -> None:
        self._read, self._alike = reading(counted), alike
        self.global_batch: GlobalBatch | None = None

    def __iter__(self) -> ShardedIterator:
        return self

    def __next__(self) -> Any:
        examples, order, rows = self._read()
        self.global_batch = GlobalBatch(int(examples), (*self._alike, ("the order of examples", order)))
        return rows


def global_batch_of(iterator: Iterator[Any]) -> GlobalBatch | None:
    """Returns the global batch of the last part of an iterator; None: the iterator returns global batches."""
    return iterator.global_batch if isinstance(iterator, ShardedIterator) else None


class WorkerParts:
    """Iterates over a data set that the script shards with `Slices`: its elements are this worker's parts."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = parts

    def __iter__(self) -> PartsIterator:
        return PartsIterator(iter(self._parts))


class PartsIterator:
    """Yields this worker's own parts, one after the other."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._read = reading(parts)

    def __iter__(self) -> PartsIterator:
        return self

    def __next__(self) -> Any:
        return self._read()
