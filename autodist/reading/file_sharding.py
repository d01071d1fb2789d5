"""Shards the files of a `tf.data` pipeline over the workers; each worker trains on the records of its own files.

    tf.data.TFRecordDataset(names).shuffle(n).batch(64)    →    for N workers, names[k::N], and 64 / N of its records

All workers end together: a worker whose files are exhausted takes part without examples until all are exhausted.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute  # shards files for tf.distribute

from autodist.batch.examples import Share, length_of, share_of, slice_rows
from autodist.errors import AutoDistError, ClusterError
from autodist.logs.formatting import words_of
from autodist.reading.batch_sharding import PartsIterator
from autodist.reading.data_sets import all_of, elements_of, kind_of

MOST_AHEAD = 64
"""Largest number of parts that a worker has read when it announces them."""

_BYTES_AHEAD = 32 << 20

_STRING_BYTES = 64

NO_FILES_SHARDED = (
    "`shard: files` is in the YAML, but no data set's files were sharded: it applies to the data passed to `fit` or "
    "ad.distribute_dataset. Pass a tf.data.Dataset there, or remove `shard`."
)

_UNSHARDABLE, _OP = "unshardable source dataset", re.compile(r'^op: "(\w+)"', re.MULTILINE)

_TOO_FEW = re.compile(r"the dataset only has (\d+) file")


@dataclass(frozen=True)
class FileSharding:
    """The rule by which files are sharded.

    Attributes:
        replicas: for each replica, the index of its worker, in rising order; workers without replicas have no files.
        worker: index of this worker.
        names: names of all workers, by index.
        agree: collective call: sends this worker's message to the chief, and returns the chief's decision on all.
        refused: makes the error for data that cannot be sharded, with the position in the YAML.
    """

    replicas: Sequence[int]
    worker: int
    names: Sequence[str]
    agree: Callable[[str, Callable[[list[str]], str]], str]
    refused: Callable[[str], AutoDistError]

    @property
    def readers(self) -> list[int]:
        """The workers that have files."""
        return sorted(set(self.replicas))


def reason_not_sharded(is_compared: bool, is_pipeline: bool) -> str | None:
    """Returns the reason why a run cannot shard files, with what is allowed; None if it can.

    Args:
        is_compared: True if the run is compared with one device.
        is_pipeline: True if the strategy is a pipeline.
    """
    if is_compared:
        return (
            "with each worker reading its own files, the batches differ from those of one device, with which the run "
            "is compared; allowed: no `shard` under autodist verify and autodist diff."
        )
    if is_pipeline:
        return (
            "the stages of a pipeline work on the same examples, which one worker reads; allowed: no `shard` with a "
            "Pipeline, or another strategy."
        )
    return None


class ShardedFiles:
    """Iterates over this worker's part of each step, from the records of its own files; each iteration is an epoch.

    Args:
        dataset: a data set of global batches, read from files.
        files: the sharding rule.

    Raises:
        AutoDistError: the files cannot be sharded so that each record is used once.
    """

    def __init__(self, dataset: Any, files: FileSharding) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise files.refused(
                f"a {type(dataset).__name__} has no files that can be sharded; allowed: a tf.data.Dataset that reads "
                "files (for example tf.data.TFRecordDataset). Without `shard`, each worker reads its part of any data."
            )
        for one in all_of(dataset):
            problem = _problem(one)
            if problem is not None:
                raise files.refused(problem)
        self._files, self._spec = files, dataset.element_spec
        if all(getattr(leaf, "shape", tf.TensorShape(None)).rank == 0 for leaf in tf.nest.flatten(self._spec)):
            raise files.refused(_no_rows("none of its tensors has rows"))
        self._sharded = _sharded(dataset, files) if files.worker in files.readers else None

    def holds_anywhere(self, here: bool) -> bool:
        """Returns True if the value is true on any worker; a collective call."""
        return bool(json.loads(self._files.agree(json.dumps(here), lambda messages: json.dumps("true" in messages))))

    def __iter__(self) -> FilesIterator:
        return FilesIterator(iter(()) if self._sharded is None else iter(self._sharded), self._spec, self._files)


class FilesIterator(PartsIterator):
    """Yields this worker's parts, one after the other, as long as any worker has some.

    From the parts that each worker has read ahead, the workers agree on the number of next steps: 1, then 2, 4 and so
    on, within the limits of memory.

    Args:
        batches: batches of this worker's records.
        spec: element spec of a batch.
        files: the sharding rule.
    """

    def __init__(self, batches: Iterator[Any], spec: Any, files: FileSharding) -> None:
        super().__init__(self._parts_of(batches))
        self._spec, self._files = spec, files
        self._ahead: deque[Any] = deque()
        self._has_ended = self._is_over = False
        self._agreed, self._round = 0, 1
        self._last: Any = None
        self._shapes: list[list[int]] | None = None
        self._full = 0

    def __next__(self) -> Any:
        if not self._agreed:
            if not self._is_over:
                self._agree()
            if not self._agreed:
                raise StopIteration
        self._agreed -= 1
        if not self._ahead:
            return self._no_examples()
        self._last = self._ahead.popleft()
        return self._last

    def _agree(self) -> None:
        error = self._read_ahead()
        message = {
            "parts": min(len(self._ahead), self._round),
            "has_ended": self._has_ended and len(self._ahead) <= self._round,
            "bytes": max(map(_bytes_of, self._ahead), default=0),
            "shapes": _shapes_of(self._ahead[0]) if self._ahead else None,
            "failure": None if error is None else f"{type(error).__name__}: {words_of(error)}",
        }
        decision = json.loads(self._files.agree(json.dumps(message), _decide))
        if decision["failures"]:
            self._is_over = True
            raise self._failure(decision["failures"], error)
        self._agreed, self._is_over = decision["parts"], decision["has_ended"] or not decision["parts"]
        self._shapes = self._shapes or decision["shapes"]
        self._round = max(1, min(2 * self._round, MOST_AHEAD, _BYTES_AHEAD // max(decision["bytes"], 1)))

    def _read_ahead(self) -> Exception | None:
        """Reads ahead the parts of the next announcement; returns an exception, or None."""
        try:
            while len(self._ahead) < self._round and not self._has_ended:
                try:
                    self._ahead.append(self._read())
                except StopIteration:
                    self._has_ended = True
        except Exception as error:  # noqa: BLE001 - raised on all workers
            return error
        return None

    def _failure(self, failures: dict[str, str], own_error: Exception | None) -> Exception:
        found = [int(few[1]) for text in failures.values() if (few := _TOO_FEW.search(text))]
        if found:
            workers = len(self._files.readers)
            return self._files.refused(
                f"the data set reads {max(found)} file{'s' if max(found) > 1 else ''}, but {workers} workers need "
                f"files of their own; allowed: {workers} files or more. Write the records into more files, or "
                "remove `shard`."
            )
        if own_error is not None:
            return own_error
        worker, text = next(iter(failures.items()))
        return ClusterError(f"{self._files.names[int(worker)]} cannot read its files: {text}")

    def _parts_of(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in elements_of(batches):
            rows = self._rows_of(batch)
            self._full = max(self._full, rows)
            start = 0
            for size in part_sizes(rows, self._full, self._files.replicas, self._files.worker):
                share = Share(start, size)
                yield tf.nest.map_structure(lambda x, s=share: x if length_of(x) is None else slice_rows(x, s), batch)
                start += size

    def _rows_of(self, batch: Any) -> int:
        lengths = {rows for leaf in tf.nest.flatten(batch) if (rows := length_of(leaf)) is not None}
        if len(lengths) != 1:
            lengths_text = ", ".join(map(str, sorted(lengths)))
            raise self._files.refused(_no_rows(f"its tensors have different numbers of rows ({lengths_text})"))
        return lengths.pop()

    def _no_examples(self) -> Any:
        if self._last is not None:
            return tf.nest.map_structure(
                lambda x: x if length_of(x) is None else slice_rows(x, Share(0, 0)), self._last
            )
        leaves = tf.nest.flatten(self._spec)
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
            raise self._files.refused(
                f"the files of {self._files.names[self._files.worker]} have no record at all, and the data set returns "
                "sparse or ragged tensors; allowed: files with at least one record for each worker."
            )
        assert self._shapes is not None, "a worker with a part has sent its shapes"
        shapes = [[0, *shape[1:]] if shape else [] for shape in self._shapes]
        empty = [tf.zeros(shape, leaf.dtype) for leaf, shape in zip(leaves, shapes, strict=True)]
        return tf.nest.pack_sequence_as(self._spec, empty)


def sharding_changed(taken: int) -> str:
    """Returns the warning for an epoch that an earlier run had begun with other files or another sharding.

    Args:
        taken: steps done in that epoch.
    """
    return (
        f"the interrupted epoch had reached step {taken}, but its files were sharded differently then "
        "(`shard: files`): it is read from its beginning, and some of its records are trained on twice."
    )


def part_sizes(rows: int, full: int, replicas: Sequence[int], worker: int) -> list[int]:
    """Returns the numbers of examples in the parts of a worker's batch, one part for each step.

    If all workers have equally many replicas, their parts of a step add up to a full batch. This requires a batch with
    an example for each worker. No part is empty: the other workers may have no examples left.

    Args:
        rows: number of examples in the batch.
        full: number of examples in the largest batch so far.
        replicas: for each replica, the index of its worker, in rising order.
        worker: index of the batch's worker.

    >>> [part_sizes(10, 10, [0, 1, 2], worker) for worker in range(3)]
    [[4, 3, 3], [3, 3, 4], [3, 4, 3]]
    >>> part_sizes(5, 10, [0, 1, 2], 1)
    [3, 2]
    >>> part_sizes(10, 10, [0, 0, 1], 0)
    [7, 3]
    """
    readers = sorted(set(replicas))
    at = readers.index(worker)
    if len({replicas.count(one) for one in readers}) > 1:
        each = max(1, share_of(full, replicas, worker).size)
        shares = [each] * -(-rows // each)
    else:
        shares = [share_of(full, readers, one).size for one in readers]
        shares = shares[at:] + shares[:at]
    ends = np.minimum(np.cumsum(shares), rows)
    return [int(size) for size in np.diff(ends, prepend=0) if size]


def _decide(messages: list[str]) -> str:
    """On the chief, combines the workers' announcements."""
    announcements = [json.loads(one) for one in messages]
    return json.dumps(
        {
            "parts": max(one["parts"] for one in announcements),
            "has_ended": all(one["has_ended"] for one in announcements),
            "bytes": max(one["bytes"] for one in announcements),
            "shapes": next((one["shapes"] for one in announcements if one["shapes"] is not None), None),
            "failures": {k: one["failure"] for k, one in enumerate(announcements) if one["failure"] is not None},
        }
    )


# -- the data set ----------------------------------------------------------------------------------------------------


def _sharded(dataset: tf.data.Dataset, files: FileSharding) -> Any:
    """Returns the data set with every n-th of its files."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    readers = files.readers
    try:
        return distribute._AutoShardDataset(dataset.with_options(options), len(readers), readers.index(files.worker))
    except tf.errors.NotFoundError as error:
        if _UNSHARDABLE not in str(error):
            raise
        op = _OP.search(str(error))
        raise files.refused(
            f"the data set begins with a {op[1] if op else 'source'}, which does not read files that can be sharded; "
            "allowed: tf.data.TFRecordDataset, TextLineDataset and FixedLengthRecordDataset, directly or in "
            "interleave and flat_map over file names. If a map reads a file for each element, remove `shard`: "
            "a worker then maps only its own elements."
        ) from None


def _problem(data: Any) -> str | None:
    """Returns the reason why an operation after sharded files would drop or repeat records; None if it would not."""
    kind = kind_of(data)
    if kind in ("Take", "Skip", "Shard"):
        return (
            f"the data set has a {kind.lower()}, which would count the records of one worker instead of all; "
            "allowed: none. Select the files in Python, from the list of their names."
        )
    if kind == "AssertCardinality":
        return (
            "the data set has an assert_cardinality, and the files of one worker have fewer elements than all; "
            "allowed: none, the workers detect the end of an epoch themselves."
        )
    if kind == "Cache" and data._filename.numpy():
        return (
            "the data set has a cache in a file, which could belong to another worker, or to a run with other "
            "workers; allowed: a cache in memory, cache()."
        )
    drops = getattr(data, "_drop_remainder", None)
    if drops is not None and bool(drops) and data._input_dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        return (
            "the data set drops the remainder of its batches, which would drop records of each worker; allowed: "
            "batches without drop_remainder=True, or of a data set that repeats without end. Uneven parts train "
            "correctly."
        )
    return None


def _no_rows(why: str) -> str:
    return (
        f"the examples in the elements of the data set are not known, since {why}; allowed: batches, as made by "
        "dataset.batch(64)."
    )


def _bytes_of(part: Any) -> int:
    leaves = [x for x in tf.nest.flatten(part, expand_composites=True) if tf.is_tensor(x)]
    return sum(int(np.prod(x.shape)) * (x.dtype.size or _STRING_BYTES) for x in leaves)


def _shapes_of(part: Any) -> list[list[int]]:
    return [list(map(int, leaf.shape)) if isinstance(leaf, tf.Tensor) else [] for leaf in tf.nest.flatten(part)]
