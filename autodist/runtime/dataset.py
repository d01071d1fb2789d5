"""DistributedDataset: of global batches, which all workers draw alike, each has its share."""

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
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import Given, Reading, WholeBatch, whole_of
from autodist.reading.data_sets import begins_within
from autodist.reading.element_sharding import reading_own
from autodist.reading.file_sharding import dealt_otherwise
from autodist.runtime.draws import Draws
from autodist.runtime.input_consistency import digest_of
from autodist.runtime.seeds import seed_for_all

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class PlaceInData:
    """Where an iteration over a data set is.

    Attributes:
        ended: iterations that are over.
        taken: batches of the one under way.
        seed: for all, under which the data set was made.
        first: a digest of its first batch; "": not known.
        draws: what NumPy's and Python's generators drew next when it began; None: it has not.
    """

    ended: int = 0
    taken: int = 0
    seed: int | None = None
    first: str = ""
    draws: Draws | None = None

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**vars(self), "draws": None if self.draws is None else self.draws.told()}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> PlaceInData:
        """What `told` has given."""
        draws = told.get("draws")
        return cls(**{**told, "draws": None if draws is None else Draws.of(draws)})


class DistributedDataset(tf.train.experimental.PythonState):
    """Gives this worker its rows of each global batch; arrays with different numbers of rows are split each by its own.

    A checkpoint that is told of it (`ad.checkpoint(folder, data=data)`) has its place: after `restore`, the next loop
    over it goes on where it was, an epoch's order included.

    Args:
        dataset: of global batches: a `tf.data.Dataset`, or whatever gives nests of arrays whose first axes are
            examples; it has to give the same batches on every worker.
        replicas: for each replica, the index of its worker.
        worker: index of this worker.
        on_first: called with the first global batch, or with a digest of it.
        reading: how this worker reads its share alone, where it can; None: it reads all.
        on_own_failure: called with what was raised where it reads its share alone, which no other worker sees.

    Attributes:
        place: where it is.
        on_request: called before it is asked for a batch; None: nobody wants to know, nor where it is.
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
        self._files = None
        if reading is not None and reading.files is not None:
            self._files = reading.files.deal(dataset)
        self._own = None if reading is None else self._files or reading_own(dataset, reading)
        self.on_request: Callable[[], None] | None = None
        self.place = PlaceInData(seed=seed_for_all())
        self._goes_on = isinstance(dataset, Iterator)  # it begins once, so that all loops over it are one
        self._resumed: PlaceInData | None = None
        self._is_loop_over = False

    def __iter__(self) -> Iterator[Any]:
        """This worker's part of each batch; without rows, where there are fewer examples than workers.

        Raises:
            UnevenBatchError: the arrays of a batch have different numbers of rows, and one too few for all replicas.
        """
        self._note_request()
        try:
            for batch, whole in self._begin():
                mine = self._part_of(batch, whole)
                if (self.on_request is not None or self._files is not None) and not self.place.taken:
                    self.place = replace(self.place, first=self._sign(batch, whole))
                self.place = replace(self.place, taken=self.place.taken + 1)
                yield mine
                self._note_request()
        finally:
            if not self._goes_on:
                self.place = PlaceInData(self.place.ended + 1, seed=self.place.seed)

    def _part_of(self, batch: Any, whole: WholeBatch | None) -> Any:
        if self._files is not None:
            return batch
        self._tell_first(batch if whole is None else [array for _, array in whole.alike])
        return self._share_of(batch) if whole is None else self._that_count(batch, whole.examples)

    def _tell_first(self, batch: Any) -> None:
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first(batch)

    def _share_of(self, batch: Any) -> Any:
        self._require_rows(batch)
        return tf.nest.map_structure(self._own_rows, batch)

    def _that_count(self, rows: Any, examples: int) -> Any:
        """What is read, or no rows where it only stands for none."""
        if share_of(examples, self._replicas, self._worker).size:
            return rows
        return tf.nest.map_structure(lambda value: slice_rows(value, Share(0, 0)), rows)

    def serialize(self) -> str:
        """Its place, for a checkpoint."""
        return json.dumps(self.place.told())

    def deserialize(self, string_value: str | bytes) -> None:
        """Goes on, with the next iteration, where another was."""
        self.resume(PlaceInData.of(json.loads(string_value)))

    def place_in_loop(self) -> Callable[[], Any]:
        """Gives its place of now, as JSON has it."""
        return self.place.told

    def go_on_in_loop(self, place: Any) -> None:
        """Goes on where another was; an iteration of which all batches were taken is over, and the next one begins."""
        self.resume(PlaceInData.of(place), is_loop_over=True)

    def resume(self, place: PlaceInData, is_loop_over: bool = False) -> None:
        """Goes on, with the next iteration, at a place.

        Args:
            place: of a data set like this one.
            is_loop_over: whether an iteration of which all batches were taken is over, and the next one begins.
        """
        if place.seed != self.place.seed:
            log.warning(
                "the data set was made under the seed %s, and under %s in the run that has saved its place: where a "
                "shuffle has no seed of its own, its order is another. Call tf.random.set_seed before it is made.",
                self.place.seed, place.seed, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        self.place = replace(place, seed=self.place.seed)
        self._resumed, self._is_loop_over = place, is_loop_over

    def _note_request(self) -> None:
        if self.on_request is not None:
            self.on_request()

    def _begin(self) -> Iterator[Given]:
        """An iteration of the data set; the first after it is resumed begins where the other one was."""
        place, self._resumed = self._resumed, None
        if place is None:
            if not (self._goes_on and self.place.taken):
                self.place = replace(self.place, taken=0, first="", draws=Draws.now())
            return self._read()
        now = Draws.now()
        given = self._begin_again(place)
        begun = Draws.now()
        self.place = replace(self.place, taken=0, first="", draws=begun)
        for number in range(place.taken):
            first = next(given, None)
            if number == 0 and self._is_other_anywhere(place.first, first):
                self._tell_other(place)
                now.resume()
                return itertools.chain([] if first is None else [first], given)
        # What reads ahead has drawn for batches to come; what does not has drawn no more than the loop had by then.
        now.resume(begun.unmoved() if self._is_of_tensorflow else begun.states)
        self.place = replace(self.place, taken=place.taken, first=place.first)
        return self._or_next(given) if self._is_loop_over and place.taken else given

    def _begin_again(self, place: PlaceInData) -> Iterator[Given]:
        """Begins the iteration that was under way, after those before it: a shuffle draws a new order for each.

        A shuffle that another one reads draws when that is read first, and one that is repeated as often.
        """
        is_read = place.ended > 0 and begins_within(self._dataset)
        for _ in range(place.ended):
            self._begin_and_leave(is_read)
        if place.draws is not None:
            place.draws.resume()
        return self._read()

    def _begin_and_leave(self, is_read: bool) -> None:
        """An iteration that is read no further than its orders are drawn: what reads ahead for it has ended, too."""
        batches = iter(self._source)
        next(batches, None)
        if is_read:
            deque(batches, maxlen=0)

    def _or_next(self, given: Iterator[Given]) -> Iterator[Given]:
        """What is left of an iteration or, if it is over, the next one."""
        first = next(given, None)
        if first is not None:
            return itertools.chain([first], given)
        self.place = PlaceInData(self.place.ended + 1, seed=self.place.seed, draws=Draws.now())
        return self._read()

    def _read(self) -> Iterator[Given]:
        batches = _with_wholes(iter(self._source))
        # What a worker alone cannot read of its files is raised on all of them.
        return batches if self._own is None or self._files is not None else self._telling(batches)

    def _telling(self, batches: Iterator[Given]) -> Iterator[Given]:
        try:
            yield from batches
        except Exception as error:
            self._on_own_failure(error)
            raise

    @property
    def _source(self) -> Iterable[Any]:
        return self._dataset if self._own is None else self._own

    @property
    def _is_of_tensorflow(self) -> bool:
        return isinstance(self._dataset, tf.data.Dataset)

    def _sign(self, batch: Any, whole: WholeBatch | None) -> str:
        """Tells a batch from others that this worker, among as many, is given."""
        share = "" if whole is None and self._files is None else f"{self._worker} of {self._replicas}"
        return f"{share}:{_digest(batch)}"

    def _is_other(self, first: str, given: Given | None) -> bool:
        """Whether an iteration begins with another batch than is told, as far as that is known."""
        if not first or given is None:
            return bool(first)
        now = self._sign(*given)
        (then, _, _), (share, _, _) = first.partition(":"), now.partition(":")
        if self._files is not None and then.partition(" of ")[2] != share.partition(" of ")[2]:
            return True
        return first != now and then == share

    def _is_other_anywhere(self, first: str, given: Given | None) -> bool:
        """The same; where files are dealt out, for all workers if one of them finds it."""
        is_other = self._is_other(first, given)
        return is_other if self._files is None else self._files.holds_anywhere(is_other)

    def _tell_other(self, place: PlaceInData) -> None:
        if self._files is not None:
            log.warning("%s", dealt_otherwise(place.taken), extra=ALIKE_EVERYWHERE)
            return
        log.warning(
            "a data set of ad.distribute_dataset begins with another batch than in the run that is gone on from, which "
            "had taken %d of it, and is read from its beginning. That is right where it passes over by itself what was "
            "trained on, dataset.skip(ad.steps_done); it need not. Else let it give the same batches each time that it "
            "is made: seed what shuffles it, read files in one order.", place.taken, extra=ALIKE_EVERYWHERE,
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


def _with_wholes(batches: Iterator[Any]) -> Iterator[Given]:
    for batch in batches:
        yield batch, whole_of(batches)


def _digest(batch: Any) -> str:
    """Tells a batch from others, alike in every process."""
    leaves = [digest_of(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True)]
    return hashlib.blake2b(" ".join(leaves).encode(), digest_size=16).hexdigest()
