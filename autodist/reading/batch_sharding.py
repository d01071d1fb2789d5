"""Global batches of which a worker reads its own part alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from autodist.errors import AutoDistError
from autodist.reading.quick_reads import reading


class Slices:
    """Tells a script which examples of a batch are this worker's, and whether it has asked.

    Args:
        share: gives, of a number of examples, the index of this worker's first and the one behind its last.
    """

    def __init__(self, share: Callable[[int], tuple[int, int]]) -> None:
        self._share, self._asked = share, 0

    def __call__(self, start: int, stop: int) -> slice:
        """Of the examples from `start` to `stop`, this worker's.

        Raises:
            ValueError: there are none.
        """
        if stop <= start:
            raise ValueError(f"a batch of the examples from {start} to {stop} has none.")
        self._asked += 1
        first, end = self._share(stop - start)
        return slice(start + first, start + end)

    def are_asked_by(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """What `call` returns, and whether it has asked for a slice."""
        before = self._asked
        return call(), self._asked > before


OwnRows = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Of a global batch of so many examples, the first row that a worker has to read, and how many; both int64."""


class AssignedFiles(Protocol):
    """Gives this worker's part of each step, of the records of its own files."""

    def __iter__(self) -> Iterator[Any]: ...

    def holds_anywhere(self, here: bool) -> bool:
        """Whether something holds for any worker; all of them ask."""


class AssignsFiles(Protocol):
    """Deals out the files of data sets."""

    def deal(self, dataset: Any) -> AssignedFiles:
        """What gives this worker's part of each step.

        Raises:
            AutoDistError: files cannot be dealt out so that each record is used once.
        """

    def refused(self, problem: str) -> AutoDistError:
        """The error for what cannot be dealt out, with the place in the YAML."""


@dataclass(frozen=True)
class Reading:
    """How a worker reads its own part of global batches.

    Attributes:
        rows: says which rows of a batch; None: it reads whole batches, unless the data gives it its part.
        workers: how many there are.
        slices: by which a script gives it its part.
        files: how the files of data sets are dealt out, in place of rows of batches; None: they are not.
    """

    rows: OwnRows | None
    workers: int
    slices: Slices
    files: AssignsFiles | None = None


class Counted(NamedTuple):
    """A worker's part of a global batch.

    Attributes:
        examples: how many the global batch has; int64.
        order: what is alike on all workers that follow one order, such as the numbers of the batch's examples.
        rows: this worker's.
    """

    examples: tf.Tensor
    order: tf.Tensor
    rows: Any


@dataclass(frozen=True)
class WholeBatch:
    """A global batch of which a worker is given its part.

    Attributes:
        examples: how many it has.
        alike: by name, arrays that have to be the same on every worker.
    """

    examples: int
    alike: Sequence[tuple[str, Any]]


Given = tuple[Any, WholeBatch | None]
"""A batch that is given to a step, and the global one of which it is this worker's part; None: it is the whole."""


class ShardedBatches:
    """Gives this worker's rows of each global batch; each iteration begins anew.

    Args:
        counted: a data set whose elements are `Counted`.
        alike: by name, arrays that have to be the same on every worker.
    """

    def __init__(self, counted: tf.data.Dataset, alike: Sequence[tuple[str, Any]] = ()) -> None:
        self._counted, self._alike = counted, alike

    def __iter__(self) -> ShardedIterator:
        return ShardedIterator(iter(self._counted), self._alike)


class ShardedIterator:
    """Gives this worker's rows of one global batch after the other.

    Attributes:
        whole: the batch of which it has given rows last; None: it has given none.
    """

    def __init__(self, counted: Iterator[Counted], alike: Sequence[tuple[str, Any]]) -> None:
        self._read, self._alike = reading(counted), alike
        self.whole: WholeBatch | None = None

    def __iter__(self) -> ShardedIterator:
        return self

    def __next__(self) -> Any:
        examples, order, rows = self._read()
        self.whole = WholeBatch(int(examples), (*self._alike, ("the order of examples", order)))
        return rows


def whole_of(iterator: Iterator[Any]) -> WholeBatch | None:
    """The global batch of which an iterator has given a part last; None: it gives whole ones."""
    return iterator.whole if isinstance(iterator, ShardedIterator) else None


class PartsGiven:
    """Gives what a data set gives that the script cuts by `Slices`: parts of batches, counted as they come.

    Args:
        parts: the data set.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = parts

    def __iter__(self) -> PartsIterator:
        return PartsIterator(iter(self._parts))


class PartsIterator:
    """Gives this worker's own parts, one after the other."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._read = reading(parts)

    def __iter__(self) -> PartsIterator:
        return self

    def __next__(self) -> Any:
        return self._read()
