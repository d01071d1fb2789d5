"""Distributed data set: all workers draw the same global batches, and each takes its share."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from autodist.batch.examples import Share, group_rows, length_of, require_rows_for_all, share_of, slice_rows
from autodist.errors import CaptureError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import GlobalBatch, ReadBatch, Reading, global_batch_of
from autodist.reading.data_sets import begins_within, elements_of, in_one_order
from autodist.reading.element_sharding import reading_own
from autodist.reading.file_sharding import ShardedFiles, sharding_changed
from autodist.runtime.draws import Draws
from autodist.runtime.input_consistency import digest_of
from autodist.runtime.seeds import global_seed

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class DataPosition:
    """The position of an iteration over a data set.

    Attributes:
        ended: number of finished iterations.
        taken: number of batches taken in the current iteration.
        seed: TensorFlow's global seed when the data set was created.
        first: digest of the iteration's first batch; "": not known.
        draws: state of NumPy's and Python's generators at the start of the iteration; None: it has not started.
    """

    ended: int = 0
    taken: int = 0
    seed: int | None = None
    first: str = ""
    draws: Draws | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the position as a JSON value."""
        return {**vars(self), "draws": None if self.draws is None else self.draws.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DataPosition:
        """Returns the position from the result of `to_json`."""
        draws = content.get("draws")
        return cls(**{**content, "draws": None if draws is None else Draws.from_json(draws)})


class DistributedDataset(tf.train.experimental.PythonState):
    """Iterates over this worker's rows of each global batch; arrays are split separately if their lengths differ.

    A checkpoint that contains it (`ad.checkpoint(folder, data=data)`) saves its position. After `restore`, the next
    loop continues at that position, in the same order of the epoch.

    Args:
        dataset: global batches: a `tf.data.Dataset`, or any iterable of nests of arrays whose first axis is the
            batch axis; must yield the same batches on every worker.
        replicas: index of the worker of each replica.
        worker: index of this worker.
        on_first: called with the first global batch, or with its digest.
        reading: input sharding, by which this worker reads only its share; None: it reads everything.
        on_own_failure: called with an error raised while this worker reads its share, which no other worker raises.

    Attributes:
        place: position of the iteration.
        on_request: called before each batch; None: no callback, and the position is not needed.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        replicas: Sequence[int],
        worker: int,
        on_first: Callable[[Any], None] = lambda batch: None,
        reading: Reading | None = None,
        on_own_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._on_own_failure = on_own_failure
        self._dataset, self._replicas, self._worker = dataset, replicas, worker
        self._on_first: Callable[[Any], None] | None = on_first
        files = None if reading is None else reading.files
        self._files = None if files is None else ShardedFiles(dataset, files)
        self._own_source = None if reading is None else self._files or reading_own(dataset, reading)
        self._whole = dataset if reading is None or self._files is not None else in_one_order(dataset)
        self.on_request: Callable[[], None] | None = None
        self.place = DataPosition(seed=global_seed())
        self._is_iterator = isinstance(dataset, Iterator)  # it can be started once, so that all loops over it are one
        self._resumed: DataPosition | None = None
        self._is_loop_over = False

    def __iter__(self) -> Iterator[Any]:
        """Yields this worker's part of each batch; without rows if there are fewer examples than workers.

        Raises:
            CaptureError: a function that is being traced takes a batch: it would keep that one for all of its calls.
            UnevenBatchError: the arrays of a batch have different lengths, and one has too few rows for all replicas.
        """
        self._note_request()
        try:
            for batch, whole in self._begin():
                own = self._part_of(batch, whole)
                if (self.on_request is not None or self._files is not None) and not self.place.taken:
                    self.place = replace(self.place, first=self._signature(batch, whole))
                self.place = replace(self.place, taken=self.place.taken + 1)
                yield own
                self._note_request()
        finally:
            if not self._is_iterator:
                self.place = DataPosition(self.place.ended + 1, seed=self.place.seed)

    @property
    def dataset(self) -> Iterable[Any]:
        """The whole batches, of all workers."""
        return self._dataset

    @property
    def is_restored(self) -> bool:
        """True if the next iteration starts at a restored position other than the beginning."""
        return self._resumed is not None and bool(self._resumed.ended or self._resumed.taken)

    def _part_of(self, batch: Any, whole: GlobalBatch | None) -> Any:
        if self._files is not None:
            return batch
        self._report_first(batch if whole is None else [array for _, array in whole.alike])
        return self._share_of(batch) if whole is None else self._without_padding(batch, whole.examples)

    def _report_first(self, batch: Any) -> None:
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first(batch)

    def _share_of(self, batch: Any) -> Any:
        self._require_rows(batch)
        return tf.nest.map_structure(self._own_rows, batch)

    def _without_padding(self, rows: Any, examples: int) -> Any:
        """Returns the rows that were read, or none if they are only padding for an empty share."""
        if share_of(examples, self._replicas, self._worker).size:
            return rows
        return tf.nest.map_structure(lambda value: slice_rows(value, Share(0, 0)), rows)

    def serialize(self) -> str:
        """Returns the position, for a checkpoint."""
        return json.dumps(self.place.to_json())

    def deserialize(self, string_value: str | bytes) -> None:
        """Continues, in the next iteration, at a saved position."""
        self.resume(DataPosition.from_json(json.loads(string_value)))

    def place_in_loop(self) -> Callable[[], Any]:
        """Returns a function that returns the current position as a JSON value."""
        return self.place.to_json

    def resume_in_loop(self, place: Any) -> None:
        """Continues at a saved position; an iteration whose batches were all taken is over, and the next one begins."""
        self.resume(DataPosition.from_json(place), is_loop_over=True)

    def resume(self, place: DataPosition, is_loop_over: bool = False) -> None:
        """Continues, in the next iteration, at a position.

        Args:
            place: position of an equal data set.
            is_loop_over: True if an iteration whose batches were all taken is over, and the next one begins.
        """
        if place.seed != self.place.seed:
            log.warning(
                "the data set was created under the seed %s, but under %s in the run that saved its position. A "
                "shuffle without its own seed now has another order. Call tf.random.set_seed before the data set is "
                "created.",
                self.place.seed, place.seed, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        self.place = replace(place, seed=self.place.seed)
        self._resumed, self._is_loop_over = place, is_loop_over

    def _note_request(self) -> None:
        if tf.inside_function():
            raise CaptureError(
                "a function that is being traced takes a batch from ad.distribute_dataset, and would keep this one "
                "for all of its calls. Take the batches outside of steps and tf.functions, and pass them as "
                "arguments: `step(next(iterator))`, or `for batch in dataset: step(batch)`."
            )
        if self.on_request is not None:
            self.on_request()

    def _begin(self) -> Iterator[ReadBatch]:
        """Starts an iteration over the data set; the first one after `resume` starts at the saved position."""
        place, self._resumed = self._resumed, None
        if place is None:
            if not (self._is_iterator and self.place.taken):
                self.place = replace(self.place, taken=0, first="", draws=Draws.now())
            return self._read()
        now = Draws.now()
        batches = self._begin_again(place)
        begun = Draws.now()
        self.place = replace(self.place, taken=0, first="", draws=begun)
        for number in range(place.taken):
            first = next(batches, None)
            if number == 0 and self._is_other_anywhere(place.first, first):
                self._warn_of_other(place)
                now.resume()
                return itertools.chain([] if first is None else [first], batches)
        # Readers with prefetch have drawn for later batches; others have drawn exactly what the loop had drawn.
        now.resume(begun.unmoved() if self._is_of_tensorflow else begun.states)
        self.place = replace(self.place, taken=place.taken, first=place.first)
        return self._rest_or_next(batches) if self._is_loop_over and place.taken else batches

    def _begin_again(self, place: DataPosition) -> Iterator[ReadBatch]:
        """Repeats all iterations up to the saved one, because a shuffle draws a new order for each iteration.

        A nested shuffle draws when it is first read, and a repeated one draws once per repetition.
        """
        is_read = place.ended > 0 and begins_within(self._dataset)
        for _ in range(place.ended):
            self._skip_iteration(is_read)
        if place.draws is not None:
            place.draws.resume()
        return self._read()

    def _skip_iteration(self, is_read: bool) -> None:
        """Runs an iteration until its shuffle orders are drawn, and waits until its prefetch has ended."""
        batches = elements_of(iter(self._source))
        next(batches, None)
        if is_read:
            deque(batches, maxlen=0)

    def _rest_or_next(self, batches: Iterator[ReadBatch]) -> Iterator[ReadBatch]:
        """Returns the rest of an iteration, or the next one if it is over."""
        first = next(batches, None)
        if first is not None:
            return itertools.chain([first], batches)
        self.place = DataPosition(self.place.ended + 1, seed=self.place.seed, draws=Draws.now())
        return self._read()

    def _read(self) -> Iterator[ReadBatch]:
        batches = _with_whole_batches(iter(self._source))
        # For file sharding, errors of one worker are already raised on all workers.
        return batches if self._own_source is None or self._files is not None else self._reporting_errors(batches)

    def _reporting_errors(self, batches: Iterator[ReadBatch]) -> Iterator[ReadBatch]:
        try:
            yield from batches
        except Exception as error:
            self._on_own_failure(error)
            raise

    @property
    def _source(self) -> Iterable[Any]:
        return self._whole if self._own_source is None else self._own_source

    @property
    def _is_of_tensorflow(self) -> bool:
        return isinstance(self._dataset, tf.data.Dataset)

    def _signature(self, batch: Any, whole: GlobalBatch | None) -> str:
        """Returns a string that identifies a batch for this worker and this number of workers."""
        share = "" if whole is None and self._files is None else f"{self._worker} of {self._replicas}"
        return f"{share}:{_digest(batch)}"

    def _is_other(self, first: str, given: ReadBatch | None) -> bool:
        """Returns True if an iteration is known to begin with another batch than the one with this digest."""
        if not first or given is None:
            return bool(first)
        now = self._signature(*given)
        (then, _, _), (share, _, _) = first.partition(":"), now.partition(":")
        if self._files is not None and then.partition(" of ")[2] != share.partition(" of ")[2]:
            return True
        return first != now and then == share

    def _is_other_anywhere(self, first: str, given: ReadBatch | None) -> bool:
        """Like `_is_other`; with file sharding, returns True on all workers if it is True on one."""
        is_other = self._is_other(first, given)
        return is_other if self._files is None else self._files.holds_anywhere(is_other)

    def _warn_of_other(self, place: DataPosition) -> None:
        if self._files is not None:
            log.warning("%s", sharding_changed(place.taken), extra=ALIKE_EVERYWHERE)
            return
        log.warning(
            "a data set of ad.distribute_dataset is read from its beginning: its first batch differs from that of the "
            "resumed run, which had taken %d batches. That is correct if the script itself skips the batches already "
            "trained on with dataset.skip(ad.steps_done), which is not needed. Otherwise make it yield the same "
            "batches each time: seed its shuffle, read files in one order.",
            place.taken, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def _require_rows(self, batch: Any) -> None:
        lengths = [length_of(value) for value in tf.nest.flatten(batch)]
        split = [(f"array {k}", n) for k, n in enumerate(lengths) if n is not None]
        require_rows_for_all(split, group_rows([n for _, n in split]), len(self._replicas))

    def _own_rows(self, value: Any) -> Any:
        length = length_of(value)
        return value if length is None else slice_rows(value, share_of(length, self._replicas, self._worker))


def _with_whole_batches(batches: Iterator[Any]) -> Iterator[ReadBatch]:
    for batch in elements_of(batches):
        yield batch, global_batch_of(batches)


def _digest(batch: Any) -> str:
    """Returns a digest of a batch, equal in every process."""
    leaves = [digest_of(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True)]
    return hashlib.blake2b(" ".join(leaves).encode(), digest_size=16).hexdigest()
